/* Which linear layers are quantised, where their tensors are, and which share a scale. Called by
 * nbi_quantize(). */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "model/quantize_parts.h"

/* Layers whose scales ModelOpt unifies because they read the same input. */
typedef enum group {
    GROUP_NONE,
    GROUP_GATE_UP,
    GROUP_QKV,
    GROUP_LATENT_IN,
    GROUP_LATENT_OUT
} group;

static group group_of(const nbi_module *m)
{
    static const struct tail {
        const char *text;
        group group;
    } tails[] = {
        {".q_proj", GROUP_QKV},
        {".k_proj", GROUP_QKV},
        {".v_proj", GROUP_QKV},
        {".q_a_proj", GROUP_LATENT_IN},
        {".kv_a_proj_with_mqa", GROUP_LATENT_IN},
        {".indexer.wk", GROUP_LATENT_IN},
        {".q_b_proj", GROUP_LATENT_OUT},
        {".indexer.wq_b", GROUP_LATENT_OUT},
    };
    if (m->component <= NBI_COMPONENT_DENSE) return m->part < 2 ? GROUP_GATE_UP : GROUP_NONE;
    size_t n = strlen(m->name);
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        size_t k = strlen(tails[i].text);
        if (n > k && !strcmp(m->name + n - k, tails[i].text)) return tails[i].group;
    }
    return GROUP_NONE;
}

typedef struct maker {
    nbi_q_list *list;
    nbi_checkpoint *ckpt;
    const nbi_config *config;
    const nbi_quantize_options *o;
    uint32_t last[5]; /* group: its latest member + 1 within the layer (gate/up: within the MLP) */
    uint32_t layer;
    uint32_t *tail; /* [tensors] latest module + 1 of the tensor */
} maker;

/* Is the component inside the scope? */
static bool in_scope(const maker *k, const nbi_module *m)
{
    static const nbi_component last[NBI_QUANTIZE_SCOPE_COUNT] = {
        [NBI_QUANTIZE_EXPERTS] = NBI_COMPONENT_ROUTED,
        [NBI_QUANTIZE_MLP] = NBI_COMPONENT_DENSE,
        [NBI_QUANTIZE_ALL] = NBI_COMPONENT_INDEXER};
    bool mtp = m->layer != UINT32_MAX && m->layer >= k->config->n_layers;
    return m->linear && m->component <= last[k->o->scope] && (k->o->mtp || !mtp);
}

/* The tensor that holds the module and its view. */
static nb_status find_matrix(maker *k, const nbi_module *m, nbi_matrix *matrix,
                             const nbi_st_tensor **tensor, nb_error *err)
{
    char name[256];
    const nbi_config *c = k->config;
    nb_status st = NB_NOT_FOUND;
    if (m->component == NBI_COMPONENT_ROUTED) {
        snprintf(name, sizeof name, "model.layers.%u.mlp.experts", m->layer);
        st = nbi_matrix_load_fused(matrix, k->ckpt, &k->list->arena, name, c->n_experts, m->expert,
                                   m->part, c->moe_intermediate, c->hidden, err);
        snprintf(name, sizeof name, "model.layers.%u.mlp.experts.%s", m->layer,
                 m->part == 2 ? "down_proj" : "gate_up_proj");
        *tensor = nbi_checkpoint_peek(k->ckpt, name);
        if (st == NB_OK && !*tensor) { /* spelt with ".weight" */
            snprintf(name, sizeof name, "model.layers.%u.mlp.experts.%s.weight", m->layer,
                     m->part == 2 ? "down_proj" : "gate_up_proj");
            *tensor = nbi_checkpoint_peek(k->ckpt, name);
        }
    }
    if (st == NB_NOT_FOUND) {
        st = nbi_matrix_load(matrix, k->ckpt, &k->list->arena, m->name, (uint32_t)m->rows,
                             (uint32_t)m->cols, err);
        snprintf(name, sizeof name, "%s.weight", m->name);
        *tensor = nbi_checkpoint_peek(k->ckpt, name);
    }
    NB_TRY(st);
    if (matrix->kind == NBI_WEIGHT_BF16 || matrix->kind == NBI_WEIGHT_F16 ||
        matrix->kind == NBI_WEIGHT_F32)
        return NB_OK;
    return nbi_fail(err, NB_INVALID,
                    "%s is %s already; only BF16, F16 and F32 weights are quantised", m->name,
                    nbi_weight_kind_name(matrix->kind));
}

static nb_status grow(nbi_q_list *list, nb_error *err)
{
    if (list->n < list->cap) return NB_OK;
    uint32_t cap = list->cap ? list->cap * 2 : 256;
    nbi_q_module *more = nbi_realloc(list->modules, cap * sizeof *more);
    if (!more) return nbi_fail(err, NB_NO_MEMORY, "out of memory for %u modules", cap);
    list->modules = more;
    list->cap = cap;
    return NB_OK;
}

/* Puts module i into the ring of its group. */
static void join_group(maker *k, const nbi_module *m, uint32_t i)
{
    nbi_q_module *modules = k->list->modules;
    group g = group_of(m);
    modules[i].next = i;
    if (g == GROUP_GATE_UP && m->part == 0) k->last[g] = 0; /* a new MLP */
    if (g == GROUP_NONE) return;
    if (k->last[g]) {
        uint32_t other = k->last[g] - 1;
        modules[i].next = modules[other].next;
        modules[other].next = i;
    }
    k->last[g] = i + 1;
}

static nb_status take(void *user, const nbi_module *m, nb_error *err)
{
    maker *k = user;
    if (m->layer != k->layer) {
        memset(k->last, 0, sizeof k->last);
        k->layer = m->layer;
    }
    if (!in_scope(k, m)) return NB_OK;
    nbi_matrix matrix;
    const nbi_st_tensor *tensor;
    NB_TRY(find_matrix(k, m, &matrix, &tensor, err));
    if (m->cols % NBI_NVFP4_BLOCK) {
        nbi_log(NB_LOG_WARN, "%s: %llu input columns are not a multiple of %u, left as it is",
                m->name, (unsigned long long)m->cols, NBI_NVFP4_BLOCK);
        k->list->n_kept++;
        return NB_OK;
    }
    NB_TRY(grow(k->list, err));
    uint32_t i = k->list->n++;
    k->list->modules[i] = (nbi_q_module){.matrix = matrix};
    join_group(k, m, i);
    size_t at = nbi_checkpoint_index(k->ckpt, tensor);
    if (k->tail[at])
        k->list->modules[k->tail[at] - 1].chain = i + 1;
    else
        k->list->first[at] = i + 1;
    k->tail[at] = i + 1;
    return NB_OK;
}

/* A stacked tensor is replaced by all of its experts or by none: a width that does not fit keeps
 * the whole. */
nb_status nbi_q_list_make(nbi_q_list *out, nbi_checkpoint *ckpt, const nbi_config *config,
                          const nbi_quantize_options *o, nb_error *err)
{
    size_t n = nbi_checkpoint_count(ckpt);
    nbi_q_list list = {.first = nbi_calloc(n + 1, sizeof *list.first)};
    maker k = {.list = &list,
               .ckpt = ckpt,
               .config = config,
               .o = o,
               .layer = UINT32_MAX,
               .tail = nbi_calloc(n + 1, sizeof *k.tail)};
    nb_status st = list.first && k.tail ? nbi_modules_walk(config, true, take, &k, err)
                                        : nbi_fail(err, NB_NO_MEMORY, "out of memory");
    if (st == NB_OK && !list.n)
        st = nbi_fail(err, NB_INVALID, "%s: nothing to quantise in this scope", o->model_dir);
    nbi_free(k.tail);
    if (st == NB_OK)
        *out = list;
    else
        nbi_q_list_free(&list);
    return st;
}

void nbi_q_list_free(nbi_q_list *list)
{
    nbi_free(list->modules);
    nbi_free(list->first);
    nbi_arena_free(&list->arena);
    *list = (nbi_q_list){0};
}
