/* Copies of an expert layer's views. Callers: the runners cpu and reference, when a model opens. */
#include "moe/mapped.h"

#include <string.h>

void nbi_moe_mapped_release(nbi_backend *b, nbi_moe_layer **layer)
{
    (void)b;
    if (!*layer) return;
    nbi_free((*layer)->matrices);
    if ((*layer)->block) nbi_pages_free((*layer)->block, (*layer)->block_bytes);
    nbi_free(*layer);
    *layer = NULL;
}

/* Sizes with base NULL, copies otherwise. */
static size_t pack_strided(nbi_moe_layer *l, size_t n, char *base)
{
    nbi_plan plan = {0};
    for (size_t i = 0; i < n; i++) {
        nbi_matrix *m = &l->matrices[i];
        if (!nbi_matrix_strided(m)) continue;
        const size_t at = nbi_plan_add(&plan, nbi_matrix_packed_bytes(m));
        if (base) nbi_matrix_pack(m, m, base + at);
    }
    return plan.bytes;
}

nb_status nbi_moe_mapped_prepare(nbi_backend *b, nbi_moe_layer **out, const nbi_moe_experts *e,
                                 nb_error *err)
{
    NB_TRY(nbi_moe_experts_check(e, err));
    const size_t n = e->shape.n_experts;
    nbi_moe_layer *l = nbi_calloc(1, sizeof *l);
    if (l) l->matrices = nbi_calloc(3 * n, sizeof *l->matrices);
    if (!l || !l->matrices) {
        nbi_moe_mapped_release(b, &l);
        return nbi_fail(err, NB_NO_MEMORY, "layer %u: no memory for %zu experts", e->layer, n);
    }
    memcpy(l->matrices, e->gate, n * sizeof *e->gate);
    memcpy(l->matrices + n, e->up, n * sizeof *e->up);
    memcpy(l->matrices + 2 * n, e->down, n * sizeof *e->down);
    l->block_bytes = pack_strided(l, 3 * n, NULL);
    if (l->block_bytes && !(l->block = nbi_pages_alloc(l->block_bytes))) {
        nb_status st = nbi_fail(err, NB_NO_MEMORY, "layer %u: no memory for %zu bytes of columns",
                                e->layer, l->block_bytes);
        nbi_moe_mapped_release(b, &l);
        return st;
    }
    if (l->block) pack_strided(l, 3 * n, l->block);
    l->experts = *e;
    l->experts.gate = l->matrices;
    l->experts.up = l->matrices + n;
    l->experts.down = l->matrices + 2 * n;
    *out = l;
    return NB_OK;
}
