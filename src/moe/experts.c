/* What all runners ask of the experts of a layer. Callers: the runners' prepare and run. */
#include "moe/runners.h"

static nb_status check_matrix(const nbi_matrix *m, uint32_t rows, uint32_t cols,
                              nbi_weight_kind kind, nb_error *err)
{
    if (!m->data || m->rows != rows || m->cols != cols)
        return nbi_fail(err, NB_INVALID, "%s: [%u, %u], expected [%u, %u]",
                        m->name ? m->name : "expert", m->rows, m->cols, rows, cols);
    if (m->kind != kind)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "%s: %s weights, but expert 0 of the layer has %s; the experts of a layer "
                        "must be of one kind",
                        m->name, nbi_weight_kind_name(m->kind), nbi_weight_kind_name(kind));
    if (kind == NBI_WEIGHT_NVFP4 && cols % NBI_NVFP4_BLOCK)
        return nbi_fail(err, NB_INVALID, "%s: %u columns, NVFP4 needs a multiple of %u", m->name,
                        cols, NBI_NVFP4_BLOCK);
    return NB_OK;
}

nb_status nbi_moe_experts_check(const nbi_moe_experts *e, nb_error *err)
{
    const nbi_moe_shape *s = &e->shape;
    if (s->n_experts == 0 || s->top_k == 0 || s->hidden == 0 || s->inter == 0)
        return nbi_fail(err, NB_INVALID, "layer %u: experts without a size", e->layer);
    if (s->n_shared > 1)
        return nbi_fail(err, NB_INVALID, "layer %u: %u shared experts, expected 0 or 1", e->layer,
                        s->n_shared);
    for (uint32_t i = 0; i < nbi_moe_n_all(s); i++) {
        NB_TRY(check_matrix(&e->gate[i], s->inter, s->hidden, s->kind_gate_up, err));
        NB_TRY(check_matrix(&e->up[i], s->inter, s->hidden, s->kind_gate_up, err));
        NB_TRY(check_matrix(&e->down[i], s->hidden, s->inter, s->kind_down, err));
    }
    return NB_OK;
}

float nbi_moe_gate_up_scale(const nbi_moe_shape *shape, const nbi_matrix *gate,
                            const nbi_matrix *up)
{
    if (!shape->w4a4 || shape->kind_gate_up != NBI_WEIGHT_NVFP4) return 0;
    if (!(gate->input_scale > 0) || !(up->input_scale > 0)) return 0;
    return gate->input_scale > up->input_scale ? gate->input_scale : up->input_scale;
}

float nbi_moe_down_scale(const nbi_moe_shape *shape, const nbi_matrix *down)
{
    if (!shape->w4a4 || shape->kind_down != NBI_WEIGHT_NVFP4) return 0;
    return down->input_scale > 0 ? down->input_scale : 0;
}
