/* Goes through the modules of a checkpoint and adds them up. Called by inspect. */
#include "model/census.h"

#include <stdio.h>
#include <string.h>

typedef struct taker {
    nbi_census *c;
    size_t at; /* of module_bytes */
    bool verify;
    float gate_global; /* of the expert being read */
} taker;

static void add(taker *t, const nbi_module *m, nbi_weight_kind kind, uint64_t weights,
                uint64_t bytes)
{
    nbi_census *c = t->c;
    nbi_census_cell *cell = &c->cells[m->component][kind];
    NB_ASSERT(t->at < c->n_modules);
    c->module_bytes[t->at++] = bytes;
    cell->modules++;
    cell->weights += weights;
    cell->bytes += bytes;
}

/* Which convention wrote this matrix; FP8 per tensor is ModelOpt's. */
static nbi_convention convention_of(const nbi_census *c, const nbi_matrix *m)
{
    char name[256];
    if (m->kind == NBI_WEIGHT_FP8_BLOCK) return NBI_CONVENTION_FP8;
    if (m->kind == NBI_WEIGHT_FP8_TENSOR) return NBI_CONVENTION_MODELOPT;
    if (m->kind != NBI_WEIGHT_NVFP4) return NBI_CONVENTION_NONE;
    snprintf(name, sizeof name, "%s.weight_packed", m->name);
    return nbi_checkpoint_peek(c->ckpt, name) ? NBI_CONVENTION_COMPRESSED_TENSORS
                                              : NBI_CONVENTION_MODELOPT;
}

/* Mixed checkpoints go by what wrote their NVFP4. */
static int convention_rank(nbi_convention convention)
{
    static const int rank[NBI_CONVENTION_COUNT] = {[NBI_CONVENTION_FP8] = 1,
                                                   [NBI_CONVENTION_MODELOPT] = 2,
                                                   [NBI_CONVENTION_COMPRESSED_TENSORS] = 3};
    return rank[convention];
}

static nb_status take_matrix(taker *t, nbi_matrix *out, const nbi_module *m, nb_error *err)
{
    nbi_census *c = t->c;
    nbi_matrix w;
    NB_TRY(nbi_matrix_load(&w, c->ckpt, &c->arena, m->name, (uint32_t)m->rows, (uint32_t)m->cols,
                           err));
    *out = w;
    return NB_OK;
}

/* An expert, stacked or on its own. */
static nb_status take_expert(taker *t, nbi_matrix *out, const nbi_module *m, nb_error *err)
{
    nbi_census *c = t->c;
    char base[96];
    snprintf(base, sizeof base, "model.layers.%u.mlp.experts", m->layer);
    nb_status st =
        nbi_matrix_load_fused(out, c->ckpt, &c->arena, base, c->config.n_experts, m->expert,
                              m->part, c->config.moe_intermediate, c->config.hidden, err);
    if (st == NB_OK) c->fused_experts = true;
    return st == NB_NOT_FOUND ? take_matrix(t, out, m, err) : st;
}

/* What runners and reports want to know about experts. */
static nb_status note_expert(taker *t, const nbi_module *m, const nbi_matrix *w, nb_error *err)
{
    nbi_weight_kind *kinds = t->c->expert_kinds[m->layer], *kind = &kinds[m->part == 2];
    if (m->part == 0) t->gate_global = w->global_scale;
    if (m->part == 1 && w->global_scale != t->gate_global) t->c->unequal_pairs++;
    if (m->expert == 0 && m->part != 1) {
        *kind = w->kind;
        t->c->n_sparse += m->part == 0;
    }
    return *kind == w->kind
               ? NB_OK
               : nbi_fail(err, NB_CORRUPT, "%s is %s, other experts of layer %u are %s", w->name,
                          nbi_weight_kind_name(w->kind), m->layer, nbi_weight_kind_name(*kind));
}

static nb_status take_linear(taker *t, const nbi_module *m, nb_error *err)
{
    nbi_matrix w;
    if (m->component == NBI_COMPONENT_ROUTED) {
        NB_TRY(take_expert(t, &w, m, err));
        NB_TRY(note_expert(t, m, &w, err));
    } else {
        NB_TRY(take_matrix(t, &w, m, err));
    }
    if (t->verify) NB_TRY(nbi_matrix_check(&w, err));
    nbi_convention convention = convention_of(t->c, &w);
    if (convention_rank(convention) > convention_rank(t->c->convention))
        t->c->convention = convention;
    if (w.kind == NBI_WEIGHT_NVFP4 && w.input_scale == 0) t->c->without_input_scale++;
    add(t, m, w.kind, (uint64_t)w.rows * w.cols, nbi_matrix_bytes(&w));
    return NB_OK;
}

static nb_status take(void *user, const nbi_module *m, nb_error *err)
{
    taker *t = user;
    if (m->linear) return take_linear(t, m, err);
    const float *v;
    NB_TRY(nbi_vector_load(&v, NULL, t->c->ckpt, &t->c->arena, m->name, (uint32_t)m->rows, err));
    add(t, m, NBI_WEIGHT_F32, m->rows, nbi_checkpoint_peek(t->c->ckpt, m->name)->bytes);
    return NB_OK;
}

/* Before anything is read. */
static nb_status count(void *user, const nbi_module *m, nb_error *err)
{
    (void)err;
    nbi_census *c = user;
    const bool mtp = m->layer != UINT32_MAX && m->layer >= c->config.n_layers;
    if (mtp && !c->n_mtp++) c->first_mtp = c->n_modules;
    c->n_modules++;
    return NB_OK;
}

/* The MTP layer is stored when its projection is. */
static void find_mtp(nbi_census *c)
{
    char name[96];
    snprintf(name, sizeof name, "model.layers.%u.eh_proj", c->config.n_layers);
    c->has_mtp = c->config.n_mtp_layers && nbi_matrix_present(c->ckpt, name);
}

static nb_status open_all(nbi_census *c, const char *dir, bool verify, nb_error *err)
{
    NB_TRY(nbi_config_load(&c->config, dir, err));
    NB_TRY(nbi_quant_load(&c->quant, dir, err));
    NB_TRY(nbi_checkpoint_open(&c->ckpt, dir, err));
    find_mtp(c);
    nbi_config config = c->config; /* as the files are: without an MTP layer that is not there, with
                                      a head that is */
    config.n_mtp_layers = c->has_mtp;
    c->stored_head = config.tied_head && nbi_matrix_present(c->ckpt, "lm_head");
    config.tied_head = config.tied_head && !c->stored_head;
    c->expert_kinds = nbi_calloc(config.n_layers + config.n_mtp_layers, sizeof *c->expert_kinds);
    if (!c->expert_kinds) return nbi_fail(err, NB_NO_MEMORY, "out of memory");
    NB_TRY(nbi_modules_walk(&config, false, count, c, err));
    c->module_bytes = nbi_calloc(c->n_modules, sizeof *c->module_bytes);
    if (!c->module_bytes) return nbi_fail(err, NB_NO_MEMORY, "out of memory");
    taker t = {.c = c, .verify = verify};
    return nbi_modules_walk(&config, true, take, &t, err);
}

nb_status nbi_census_open(nbi_census *out, const char *dir, bool verify, nb_error *err)
{
    nbi_census c = {0};
    nb_status st = open_all(&c, dir, verify, err);
    if (st == NB_OK)
        *out = c;
    else
        nbi_census_close(&c);
    return st;
}

void nbi_census_fit(nbi_census *c, bool mtp)
{
    c->config.tied_head = c->config.tied_head && !c->stored_head;
    c->config.n_mtp_layers = c->has_mtp && mtp;
    if (mtp) return;
    c->n_modules -= c->n_mtp;
    memmove(c->module_bytes + c->first_mtp, c->module_bytes + c->first_mtp + c->n_mtp,
            (c->n_modules - c->first_mtp) * sizeof *c->module_bytes);
    c->n_mtp = 0;
}

void nbi_census_close(nbi_census *census)
{
    nbi_config_free(&census->config);
    nbi_quant_free(&census->quant);
    nbi_checkpoint_close(&census->ckpt);
    nbi_arena_free(&census->arena);
    nbi_free(census->expert_kinds);
    nbi_free(census->module_bytes);
    *census = (nbi_census){0};
}
