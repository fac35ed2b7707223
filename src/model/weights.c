/* Loading: walks the layers, finds every tensor by name and shape, prepares it for the backend.
 * Called once by nbi_model_open().
 *
 * Shapes come from the config, kinds from the tensors, the rank's parts from the split. Nothing is
 * copied that can stay mapped; float vectors (norms, biases) are converted to float32 and put into
 * one device block at the end.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "format/st_ahead.h"
#include "model/layer.h"
#include "moe/tune_file.h"

#define NAME_MAX_BYTES 256

/* One loading run. `prefix` is where names start ("model.layers.3."). */
typedef struct loader {
    nbi_model *m;
    const nbi_model_options *opt;
    nbi_pool *pool; /* checks scales */
    uint64_t done_bytes, total_bytes;
    nbi_st_ahead *ahead; /* units as unit_of() has them; NULL: nothing is read ahead */
    nbi_part part;       /* what load_linear() loads belongs to it */
    char prefix[96];
} loader;

static const char *full_name(const loader *ld, char out[NAME_MAX_BYTES], const char *name)
{
    snprintf(out, NAME_MAX_BYTES, "%s%s", ld->prefix, name);
    return out;
}

/* ---------------------------------------------------------------- vectors */

static nb_status remember_vector(nbi_model *m, const float **slot, uint32_t n, nb_error *err)
{
    if (m->n_slots == m->cap_slots) {
        uint32_t cap = m->cap_slots ? 2 * m->cap_slots : 256;
        nbi_vector_slot *slots = nbi_realloc(m->slots, cap * sizeof *slots);
        if (!slots) return nbi_fail(err, NB_NO_MEMORY, "loading: out of memory");
        m->slots = slots;
        m->cap_slots = cap;
    }
    m->slots[m->n_slots++] = (nbi_vector_slot){slot, n};
    return NB_OK;
}

static nb_status load_vector(loader *ld, const float **slot, const char *name, uint32_t n,
                             nb_error *err)
{
    char full[NAME_MAX_BYTES];
    NB_TRY(
        nbi_vector_load(slot, NULL, ld->m->ckpt, &ld->m->arena, full_name(ld, full, name), n, err));
    return remember_vector(ld->m, slot, n, err);
}

/* Values [part.first, + part.n) of a vector of n. */
static nb_status load_vector_part(loader *ld, const float **slot, const char *name, uint32_t n,
                                  nbi_range part, nb_error *err)
{
    char full[NAME_MAX_BYTES];
    NB_TRY(
        nbi_vector_load(slot, NULL, ld->m->ckpt, &ld->m->arena, full_name(ld, full, name), n, err));
    *slot += part.first;
    return remember_vector(ld->m, slot, part.n, err);
}

/* What one rank adds to the sum of all, rank 0. */
static nb_status load_added_once(loader *ld, const float **slot, const char *name, uint32_t n,
                                 nb_error *err)
{
    const uint32_t rank = ld->m->split.shard.tp_rank;
    if (rank == 0) return load_vector(ld, slot, name, n, err);
    char full[NAME_MAX_BYTES];
    nbi_checkpoint_find(ld->m->ckpt, full_name(ld, full, name));
    return NB_OK;
}

/* Moves every vector into one device block and points the slots there. */
static nb_status place_vectors(nbi_model *m, nb_error *err)
{
    nbi_plan plan = {0};
    for (uint32_t i = 0; i < m->n_slots; i++) nbi_plan_add(&plan, m->slots[i].n * sizeof(float));
    if (!plan.bytes) return NB_OK;
    m->vectors = m->b->ops->alloc(m->b, plan.bytes);
    if (!m->vectors)
        return nbi_fail(err, NB_NO_MEMORY, "loading: no memory for %zu bytes of norms and biases",
                        plan.bytes);
    m->vector_bytes = plan.bytes;
    plan.bytes = 0;
    for (uint32_t i = 0; i < m->n_slots; i++) {
        size_t bytes = m->slots[i].n * sizeof(float);
        char *dst = (char *)m->vectors + nbi_plan_add(&plan, bytes);
        m->b->ops->upload(m->b, dst, *m->slots[i].slot, bytes);
        *m->slots[i].slot = (const float *)(const void *)dst;
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- matrices */

static void progress(loader *ld, uint64_t bytes)
{
    ld->done_bytes += bytes;
    if (ld->opt->progress)
        ld->opt->progress(ld->opt->progress_user, ld->done_bytes, ld->total_bytes);
}

static nb_status prepare(loader *ld, nbi_weight **out, const nbi_matrix *matrix, nb_error *err)
{
    if (ld->opt->verify_scales) NB_TRY(nbi_matrix_check(matrix, err));
    NB_TRY(ld->m->b->ops->weight_prepare(ld->m->b, out, matrix, err));
    (*out)->part = (uint8_t)ld->part;
    ld->m->weight_bytes += nbi_matrix_bytes(matrix);
    progress(ld, nbi_matrix_bytes(matrix));
    return NB_OK;
}

/* A linear layer that a rank has a part of: rows or columns [part.first, + part.n). */
typedef enum cut { CUT_ROWS, CUT_COLUMNS } cut;

static nb_status take_part(nbi_matrix *m, cut along, nbi_range part, nb_error *err)
{
    if (part.n == (along == CUT_ROWS ? m->rows : m->cols)) return NB_OK;
    const uint32_t end = part.first + part.n;
    return along == CUT_ROWS ? nbi_matrix_rows(m, m, part.first, end, err)
                             : nbi_matrix_columns(m, m, part.first, end, err);
}

static nb_status prepare_part(loader *ld, nbi_weight **out, nbi_matrix *m, cut along,
                              nbi_range part, bool counted, nb_error *err)
{
    if (!part.n) return NB_OK;
    NB_TRY(take_part(m, along, part, err));
    NB_TRY(prepare(ld, out, m, err));
    if (counted) {
        ld->m->non_expert_bytes += nbi_matrix_bytes(m);
        ld->m->non_expert_macs += (uint64_t)m->rows * m->cols;
    }
    return NB_OK;
}

static nb_status load_part(loader *ld, nbi_weight **out, const char *name, uint32_t rows,
                           uint32_t cols, cut along, nbi_range part, bool counted, nb_error *err)
{
    nbi_matrix matrix;
    char full[NAME_MAX_BYTES];
    NB_TRY(nbi_matrix_load(&matrix, ld->m->ckpt, &ld->m->arena, full_name(ld, full, name), rows,
                           cols, err));
    return prepare_part(ld, out, &matrix, along, part, counted, err);
}

/* A linear layer [rows, cols]. `counted`: it is read once per token of the main stack. */
static nb_status load_linear(loader *ld, nbi_weight **out, const char *name, uint32_t rows,
                             uint32_t cols, bool counted, nb_error *err)
{
    return load_part(ld, out, name, rows, cols, CUT_ROWS, (nbi_range){0, rows}, counted, err);
}

/* Rows or columns of heads, `each` per head. */
static nbi_range of_heads(nbi_range heads, uint32_t each)
{
    return (nbi_range){heads.first * each, heads.n * each};
}

/* Gate, up and down whole, and the rank's columns of them. */
static nb_status load_mlp_views(loader *ld, nbi_matrix m[3], nbi_range *columns, const char *name,
                                uint32_t inter, nb_error *err)
{
    static const char *const names[3] = {"gate_proj", "up_proj", "down_proj"};
    const uint32_t hidden = ld->m->config.hidden;
    const nbi_shard *shard = &ld->m->split.shard;
    nbi_weight_kind kinds[3];
    for (int i = 0; i < 3; i++) {
        char part[NAME_MAX_BYTES], full[NAME_MAX_BYTES];
        snprintf(part, sizeof part, "%s.%s", name, names[i]);
        NB_TRY(nbi_matrix_load(&m[i], ld->m->ckpt, &ld->m->arena, full_name(ld, full, part),
                               i == 2 ? hidden : inter, i == 2 ? inter : hidden, err));
        kinds[i] = m[i].kind;
    }
    *columns = nbi_split_inter(inter, kinds, shard->tp_rank, shard->tp_size);
    return NB_OK;
}

static cut mlp_cut(uint32_t part)
{
    return part == 2 ? CUT_COLUMNS : CUT_ROWS;
}

static nb_status prepare_mlp(loader *ld, nbi_mlp_weights *w, nbi_matrix m[3], nbi_range columns,
                             bool counted, nb_error *err)
{
    nbi_weight **const to[3] = {&w->gate, &w->up, &w->down};
    w->inter = columns.n;
    for (uint32_t i = 0; i < 3; i++)
        NB_TRY(prepare_part(ld, to[i], &m[i], mlp_cut(i), columns, counted, err));
    return NB_OK;
}

static nb_status load_mlp(loader *ld, nbi_mlp_weights *w, const char *name, uint32_t inter,
                          bool counted, nb_error *err)
{
    nbi_matrix m[3];
    nbi_range columns;
    NB_TRY(load_mlp_views(ld, m, &columns, name, inter, err));
    return prepare_mlp(ld, w, m, columns, counted, err);
}

/* ---------------------------------------------------------------- attention */

/* [rows, hidden]: what multiplies the residual and is no head's. */
static nb_status load_of_residual(loader *ld, nbi_weight **out, const char *name, uint32_t rows,
                                  bool counted, nb_error *err)
{
    const nbi_split *s = &ld->m->split;
    const uint32_t hidden = ld->m->config.hidden;
    return load_part(ld, out, name, rows, hidden, CUT_COLUMNS,
                     s->shard.latents ? s->latent : (nbi_range){0, hidden}, counted, err);
}

static nb_status load_mla(loader *ld, nbi_mla_weights *w, bool counted, nb_error *err)
{
    const nbi_config *c = &ld->m->config;
    const nbi_range heads = ld->m->split.heads;
    const uint32_t qk = c->nope_dim + c->rope_dim, q_rows = c->n_heads * qk;
    ld->part = NBI_PART_ATTENTION;
    if (c->q_lora) {
        NB_TRY(load_of_residual(ld, &w->q_a, "self_attn.q_a_proj", c->q_lora, counted, err));
        NB_TRY(load_vector(ld, &w->q_a_norm, "self_attn.q_a_layernorm.weight", c->q_lora, err));
        NB_TRY(load_part(ld, &w->q_b, "self_attn.q_b_proj", q_rows, c->q_lora, CUT_ROWS,
                         of_heads(heads, qk), counted, err));
    } else {
        NB_TRY(load_part(ld, &w->q_b, "self_attn.q_proj", q_rows, c->hidden, CUT_ROWS,
                         of_heads(heads, qk), counted, err));
    }
    NB_TRY(load_of_residual(ld, &w->kv_a, "self_attn.kv_a_proj_with_mqa", c->kv_lora + c->rope_dim,
                            counted, err));
    NB_TRY(load_vector(ld, &w->kv_a_norm, "self_attn.kv_a_layernorm.weight", c->kv_lora, err));
    NB_TRY(load_part(ld, &w->kv_b, "self_attn.kv_b_proj", c->n_heads * (c->nope_dim + c->v_dim),
                     c->kv_lora, CUT_ROWS, of_heads(heads, c->nope_dim + c->v_dim), counted, err));
    NB_TRY(load_part(ld, &w->o, "self_attn.o_proj", c->hidden, c->n_heads * c->v_dim, CUT_COLUMNS,
                     of_heads(heads, c->v_dim), counted, err));
    if (!c->attention_bias) return NB_OK;
    if (c->q_lora) NB_TRY(load_vector(ld, &w->q_a_bias, "self_attn.q_a_proj.bias", c->q_lora, err));
    NB_TRY(load_vector(ld, &w->kv_a_bias, "self_attn.kv_a_proj_with_mqa.bias",
                       c->kv_lora + c->rope_dim, err));
    return load_added_once(ld, &w->o_bias, "self_attn.o_proj.bias", c->hidden, err);
}

static nb_status load_gqa(loader *ld, nbi_gqa_weights *w, bool counted, nb_error *err)
{
    const nbi_config *c = &ld->m->config;
    const uint32_t q_rows = c->n_heads * c->head_dim, kv_rows = c->n_kv_heads * c->head_dim;
    const nbi_range q = of_heads(ld->m->split.heads, c->head_dim),
                    kv = of_heads(ld->m->split.kv_heads, c->head_dim);
    ld->part = NBI_PART_ATTENTION;
    NB_TRY(load_part(ld, &w->q, "self_attn.q_proj", q_rows, c->hidden, CUT_ROWS, q, counted, err));
    NB_TRY(
        load_part(ld, &w->k, "self_attn.k_proj", kv_rows, c->hidden, CUT_ROWS, kv, counted, err));
    NB_TRY(
        load_part(ld, &w->v, "self_attn.v_proj", kv_rows, c->hidden, CUT_ROWS, kv, counted, err));
    NB_TRY(
        load_part(ld, &w->o, "self_attn.o_proj", c->hidden, q_rows, CUT_COLUMNS, q, counted, err));
    if (c->attention_bias) {
        NB_TRY(load_vector_part(ld, &w->q_bias, "self_attn.q_proj.bias", q_rows, q, err));
        NB_TRY(load_vector_part(ld, &w->k_bias, "self_attn.k_proj.bias", kv_rows, kv, err));
        NB_TRY(load_vector_part(ld, &w->v_bias, "self_attn.v_proj.bias", kv_rows, kv, err));
        char full[NAME_MAX_BYTES]; /* Qwen3 has one on o, GLM-4.x none */
        if (nbi_checkpoint_peek(ld->m->ckpt, full_name(ld, full, "self_attn.o_proj.bias"))) {
            NB_TRY(load_added_once(ld, &w->o_bias, "self_attn.o_proj.bias", c->hidden, err));
        }
    }
    if (!c->qk_norm) return NB_OK;
    NB_TRY(load_vector(ld, &w->q_norm, "self_attn.q_norm.weight", c->head_dim, err));
    return load_vector(ld, &w->k_norm, "self_attn.k_norm.weight", c->head_dim, err);
}

static nb_status load_indexer(loader *ld, nbi_indexer_weights *w, bool counted, nb_error *err)
{
    const nbi_config *c = &ld->m->config;
    uint32_t q_cols = c->q_lora ? c->q_lora : c->hidden;
    const uint64_t before = ld->m->non_expert_bytes;
    ld->part = NBI_PART_INDEXER;
    NB_TRY(load_linear(ld, &w->q, "self_attn.indexer.wq_b", c->index_heads * c->index_dim, q_cols,
                       counted, err));
    NB_TRY(load_of_residual(ld, &w->weights, "self_attn.indexer.weights_proj", c->index_heads,
                            counted, err));
    ld->m->selecting_bytes += ld->m->non_expert_bytes - before;
    NB_TRY(load_of_residual(ld, &w->k, "self_attn.indexer.wk", c->index_dim, counted, err));
    NB_TRY(load_vector(ld, &w->k_norm, "self_attn.indexer.k_norm.weight", c->index_dim, err));
    return load_vector(ld, &w->k_norm_bias, "self_attn.indexer.k_norm.bias", c->index_dim, err);
}

/* ---------------------------------------------------------------- experts */

static nb_status load_expert(loader *ld, nbi_matrix *out, uint32_t expert, uint32_t part,
                             nb_error *err)
{
    static const char *const part_name[3] = {"gate_proj", "up_proj", "down_proj"};
    nbi_model *m = ld->m;
    const nbi_config *c = &m->config;
    uint32_t inter = c->moe_intermediate, hidden = c->hidden;
    char name[NAME_MAX_BYTES];
    snprintf(name, sizeof name, "%smlp.experts", ld->prefix);
    nb_status st = nbi_matrix_load_fused(out, m->ckpt, &m->arena, name, c->n_experts, expert, part,
                                         inter, hidden, err);
    if (st != NB_NOT_FOUND) return st;
    snprintf(name, sizeof name, "%smlp.experts.%u.%s", ld->prefix, expert, part_name[part]);
    return nbi_matrix_load(out, m->ckpt, &m->arena, name, part == 2 ? hidden : inter,
                           part == 2 ? inter : hidden, err);
}

typedef struct expert_check {
    const nbi_matrix *const *parts; /* gate, up, down: [n] each */
    nb_status *status;              /* [n] */
    nb_error *errors;               /* [n] */
} expert_check;

static void check_experts_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    expert_check *check = arg;
    (void)thread;
    for (uint32_t e = begin; e < end; e++) {
        for (uint32_t part = 0; part < 3 && check->status[e] == NB_OK; part++) {
            check->status[e] = nbi_matrix_check(&check->parts[part][e], &check->errors[e]);
        }
    }
}

/* Reads every scale of a layer's experts, in parallel; the first bad expert is reported. */
static nb_status check_experts(loader *ld, const nbi_moe_experts *x, nb_error *err)
{
    uint32_t n = nbi_moe_n_all(&x->shape);
    const nbi_matrix *const parts[3] = {x->gate, x->up, x->down};
    expert_check check = {parts, nbi_calloc(n, sizeof(nb_status)), nbi_calloc(n, sizeof(nb_error))};
    nb_status st = check.status && check.errors
                       ? NB_OK
                       : nbi_fail(err, NB_NO_MEMORY, "loading: out of memory");
    if (st == NB_OK) nbi_pool_run(ld->pool, check_experts_task, &check, n, 1);
    for (uint32_t e = 0; st == NB_OK && e < n; e++) {
        if (check.status[e] != NB_OK)
            st = nbi_fail(err, check.status[e], "%s", check.errors[e].text);
    }
    nbi_free(check.status);
    nbi_free(check.errors);
    return st;
}

/* Writes the ids of experts whose part has no input scale, "3, 6", as far as they fit; part[0] is
 * expert `first`. */
static void list_without_input_scale(const nbi_matrix *part, uint32_t first, uint32_t n, char *out,
                                     size_t n_out)
{
    size_t at = 0;
    out[0] = 0;
    for (uint32_t e = 0; e < n && at + 16 < n_out; e++) {
        if (part[e].input_scale > 0) continue;
        at += (size_t)snprintf(out + at, n_out - at, "%s%u", at ? ", " : "", first + e);
    }
}

/* Experts of one layer must agree in kind, and all or none carry input scales: a mixture means a
 * broken export. */
static nb_status check_expert_kinds(const nbi_moe_experts *x, uint32_t first_id, nb_error *err)
{
    const nbi_matrix *const parts[3] = {x->gate, x->up, x->down};
    for (uint32_t part = 0; part < 3; part++) {
        const nbi_matrix *first = &parts[part][0];
        for (uint32_t e = 0; e < x->shape.n_experts; e++) {
            const nbi_matrix *it = &parts[part][e];
            if (it->kind != first->kind) {
                return nbi_fail(
                    err, NB_CORRUPT,
                    "layer %u: %s is %s but %s is %s; experts of a layer must be of one kind",
                    x->layer, it->name, nbi_weight_kind_name(it->kind), first->name,
                    nbi_weight_kind_name(first->kind));
            }
            if ((it->input_scale > 0) != (first->input_scale > 0)) {
                char ids[160];
                list_without_input_scale(parts[part], first_id, x->shape.n_experts, ids,
                                         sizeof ids);
                return nbi_fail(
                    err, NB_CORRUPT,
                    "layer %u: input_scale is missing for experts %s (found for others, e.g. %s)",
                    x->layer, ids, it->input_scale > 0 ? it->name : first->name);
            }
        }
        if (part == 1 && first->kind != x->gate[0].kind) {
            return nbi_fail(err, NB_CORRUPT, "layer %u: gate_proj is %s but up_proj is %s",
                            x->layer, nbi_weight_kind_name(x->gate[0].kind),
                            nbi_weight_kind_name(first->kind));
        }
    }
    return NB_OK;
}

/* What `nibble tune` has found, else false with one line why not. */
static bool tuned_table(loader *ld, const nbi_moe_shape *shape, nbi_moe_table *out)
{
    const nbi_model *m = ld->m;
    nb_error why = {.text = "out of memory"};
    if (!ld->opt->tune_file) return false;
    const nbi_tune_key key = nbi_tune_key_of(m->b, shape);
    char *file = nbi_tune_path(ld->opt->tune_file, &key);
    nb_status st = NB_NO_MEMORY;
    if (file) st = nbi_tune_read(out, file, &key, m->b, &why);
    if (st == NB_OK)
        nbi_log(NB_LOG_INFO, "MoE runners are those of %s", file);
    else if (st == NB_NOT_FOUND)
        nbi_log(NB_LOG_INFO, "MoE runners by rule: `nibble tune` has not measured this model here");
    else
        nbi_log(NB_LOG_WARN, "MoE runners by rule: %s", why.text);
    nbi_free(file);
    return st == NB_OK;
}

/* At the first layer with experts. */
static nb_status choose_runners(loader *ld, const nbi_moe_shape *shape, nb_error *err)
{
    nbi_model *m = ld->m;
    const char *asked = ld->opt->moe_runner ? ld->opt->moe_runner : "auto";
    const bool is_auto = strcmp(asked, "auto") == 0;
    if (is_auto && tuned_table(ld, shape, &m->moe_table)) {
        m->runner = m->moe_table.buckets[0].runner;
        m->moe_source = "tuned";
    } else {
        NB_TRY(nbi_moe_runner_choose(&m->runner, asked, m->b, shape, err));
        nbi_moe_table_one(&m->moe_table, m->runner);
        m->moe_source = is_auto ? "rule" : "named";
    }
    m->table_now = &m->moe_table;
    char text[256];
    nbi_moe_table_names(&m->moe_table, m->moe_names, sizeof m->moe_names);
    nbi_moe_table_text(&m->moe_table, text, sizeof text);
    nbi_log(NB_LOG_INFO, "MoE runners (%s): %s", m->moe_source, text);
    return NB_OK;
}

/* Measured were the first layer's experts; another layer's kinds may be beyond a runner. Another of
 * its class gives the same bits. */
static const nbi_moe_runner_ops *stand_in(const nbi_model *m, const nbi_moe_runner_ops *of,
                                          const nbi_moe_shape *shape)
{
    char why[256];
    for (const nbi_moe_runner_ops *const *r = nbi_moe_runners(); *r; r++)
        if (nbi_moe_same_class(*r, of) && (*r)->supports(m->b, shape, why, sizeof why)) return *r;
    return NULL;
}

static nb_status check_runners(loader *ld, const nbi_moe_shape *shape, nb_error *err)
{
    nbi_model *m = ld->m;
    char why[256];
    if (!m->runner) NB_TRY(choose_runners(ld, shape, err));
    for (uint32_t i = 0; i < m->moe_table.n; i++) {
        const nbi_moe_runner_ops **r = &m->moe_table.buckets[i].runner;
        if ((*r)->supports(m->b, shape, why, sizeof why)) continue;
        const nbi_moe_runner_ops *other = m->moe_table.n > 1 ? stand_in(m, *r, shape) : NULL;
        if (!other)
            return nbi_fail(err, NB_UNSUPPORTED,
                            "MoE runner %s cannot run every layer of this model: %s", (*r)->name,
                            why);
        nbi_log(NB_LOG_WARN, "MoE runner %s instead of %s: %s", other->name, (*r)->name, why);
        *r = other;
    }
    return NB_OK;
}

/* Views of the rank's experts: its columns of each. part[p][i] is expert split.experts.first + i.
 * *inter: columns it has; 0: nothing is to be done with the views. */
static nb_status load_expert_views(loader *ld, nbi_matrix *const part[3], uint32_t *inter,
                                   nb_error *err)
{
    const nbi_model *m = ld->m;
    const nbi_range mine = m->split.experts;
    const nbi_shard *shard = &m->split.shard;
    for (uint32_t p = 0; p < 3; p++)
        for (uint32_t i = 0; i < mine.n; i++)
            NB_TRY(load_expert(ld, &part[p][i], mine.first + i, p, err));
    *inter = 0;
    if (!mine.n) return NB_OK;
    const nbi_weight_kind kinds[3] = {part[0]->kind, part[1]->kind, part[2]->kind};
    const nbi_range columns = nbi_split_inter(m->config.moe_intermediate, kinds,
                                              nbi_shard_moe_rank(shard), nbi_shard_moe_size(shard));
    *inter = columns.n;
    for (uint32_t p = 0; p < 3 && columns.n; p++)
        for (uint32_t i = 0; i < mine.n; i++)
            NB_TRY(take_part(&part[p][i], mlp_cut(p), columns, err));
    return NB_OK;
}

/* A shared expert, as the checkpoint has it. */
typedef struct shared_expert {
    nbi_matrix m[3];
    nbi_range columns; /* the rank's */
} shared_expert;

/* Where it looks as the others do, and the runners of every step take it, it becomes the last of
 * them; else it stays a dense MLP. */
static nb_status join_shared(loader *ld, nbi_moe_experts *e, nbi_matrix *const part[3],
                             const shared_expert *shared, uint32_t layer, bool counted,
                             nb_error *err)
{
    nbi_model *m = ld->m;
    nbi_moe_shape with = e->shape;
    char why[256];
    with.n_shared = 1;
    if (m->config.n_shared != 1 || shared->columns.n != with.inter) return NB_OK;
    for (uint32_t p = 0; p < 3; p++)
        if (shared->m[p].kind != (p == 2 ? with.kind_down : with.kind_gate_up)) return NB_OK;
    for (uint32_t i = 0; i < m->moe_table.n; i++)
        if (!m->moe_table.buckets[i].runner->supports(m->b, &with, why, sizeof why)) return NB_OK;
    uint64_t bytes = 0;
    for (uint32_t p = 0; p < 3; p++) {
        nbi_matrix *to = &part[p][with.n_experts];
        *to = shared->m[p];
        NB_TRY(take_part(to, mlp_cut(p), shared->columns, err));
        bytes += nbi_matrix_bytes(to);
    }
    e->shape = with;
    m->shared_bytes[layer] = bytes;
    m->weight_bytes += bytes;
    if (counted) {
        m->non_expert_bytes += bytes;
        m->non_expert_macs += 3ull * with.inter * with.hidden;
    }
    progress(ld, bytes);
    return NB_OK;
}

static nb_status load_experts(loader *ld, nbi_moe_weights *w, const shared_expert *shared,
                              uint32_t layer, bool counted, nb_error *err)
{
    nbi_model *m = ld->m;
    const nbi_config *c = &m->config;
    const uint32_t n_experts = m->split.experts.n;
    const size_t places = (size_t)n_experts + 1;
    NB_ASSERT(c->n_experts);
    nbi_matrix *all = nbi_arena_alloc(&m->arena, 3 * places * sizeof *all);
    if (!all) return nbi_fail(err, NB_NO_MEMORY, "loading: out of memory");
    nbi_matrix *const part[3] = {all, all + places, all + 2 * places};
    uint64_t bytes = 0;
    uint32_t inter;
    NB_TRY(load_expert_views(ld, part, &inter, err));
    if (!inter) return NB_OK;
    for (uint32_t p = 0; p < 3; p++)
        for (uint32_t i = 0; i < n_experts; i++) bytes += nbi_matrix_bytes(&part[p][i]);
    w->experts = (nbi_moe_experts){.gate = part[0], .up = part[1], .down = part[2], .layer = layer};
    w->experts.shape = (nbi_moe_shape){.n_experts = n_experts,
                                       .top_k = c->top_k,
                                       .hidden = c->hidden,
                                       .inter = inter,
                                       .kind_gate_up = part[0]->kind,
                                       .w4a4 = m->b->w4a4,
                                       .kind_down = part[2]->kind};
    NB_TRY(check_expert_kinds(&w->experts, m->split.experts.first, err));
    NB_TRY(check_runners(ld, &w->experts.shape, err));
    NB_TRY(join_shared(ld, &w->experts, part, shared, layer, counted, err));
    if (ld->opt->verify_scales) NB_TRY(check_experts(ld, &w->experts, err));
    NB_TRY(m->runner->prepare(m->b, &w->prepared, &w->experts, err));
    m->expert_bytes[layer] = bytes / c->n_experts;
    if (counted) {
        m->expert_bytes_per_layer_sum += bytes / c->n_experts;
        m->expert_macs += 3ull * c->top_k * inter * c->hidden * n_experts / c->n_experts;
    }
    m->weight_bytes += bytes;
    progress(ld, bytes);
    return NB_OK;
}

static nb_status load_moe(loader *ld, nbi_moe_weights *w, uint32_t layer, bool counted,
                          nb_error *err)
{
    const nbi_config *c = &ld->m->config;
    ld->part = NBI_PART_ROUTER;
    NB_TRY(load_linear(ld, &w->router, "mlp.gate", c->n_experts, c->hidden, counted, err));
    if (c->router_bias)
        NB_TRY(load_vector(ld, &w->router_bias, "mlp.gate.e_score_correction_bias", c->n_experts,
                           err));
    shared_expert shared = {0};
    if (c->n_shared)
        NB_TRY(load_mlp_views(ld, shared.m, &shared.columns, "mlp.shared_experts",
                              c->moe_intermediate * c->n_shared, err));
    NB_TRY(load_experts(ld, w, &shared, layer, counted, err));
    if (!c->n_shared || w->experts.shape.n_shared) return NB_OK;
    ld->part = NBI_PART_SHARED;
    return prepare_mlp(ld, &w->shared, shared.m, shared.columns, counted, err);
}

/* ---------------------------------------------------------------- reading ahead */

#define LAYERS "model.layers."

/* 0: what is outside of layers; 1 + layer. */
static uint32_t unit_of(void *user, const nbi_st_tensor *t)
{
    static const char *const outside[] = {"model.embed_tokens.", "lm_head.", "model.norm."};
    const nbi_model *m = user;
    if (nbi_split_foreign(&m->split, t->name)) return NBI_ST_NONE;
    if (strncmp(t->name, LAYERS, sizeof LAYERS - 1) == 0) {
        const unsigned long layer = strtoul(t->name + sizeof LAYERS - 1, NULL, 10);
        return layer < m->n_layers + m->has_mtp ? (uint32_t)layer + 1 : NBI_ST_NONE;
    }
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++)
        if (strncmp(t->name, outside[i], strlen(outside[i])) == 0) return 0;
    return NBI_ST_NONE;
}

/* Weights that stay mapped and are more than the memory would push each other out. */
static nb_status start_ahead(loader *ld, nb_error *err)
{
    const uint64_t room = nbi_memory_available();
    if (!ld->m->b->ops->asynchronous && room && ld->total_bytes > room) return NB_OK;
    const nbi_st_ahead_plan plan = {
        .n_units = ld->m->n_layers + ld->m->has_mtp + 1, .unit_of = unit_of, .user = ld->m};
    return nbi_st_ahead_start(&ld->ahead, ld->m->ckpt, &plan, err);
}

static nb_status need(loader *ld, uint32_t unit, nb_error *err)
{
    return ld->ahead ? nbi_st_ahead_need(ld->ahead, unit, err) : NB_OK;
}

static void stop_ahead(loader *ld)
{
    nbi_st_ahead_sum sum = {0};
    nbi_st_ahead_stop(&ld->ahead, &sum);
    if (!sum.read_bytes) return;
    nbi_log(NB_LOG_INFO, "%s: %.2f GB of %.2f GB were not in the page cache, read at %.2f GB/s",
            nbi_checkpoint_dir(ld->m->ckpt), (double)sum.read_bytes * 1e-9,
            (double)sum.bytes * 1e-9, (double)sum.read_bytes * 1e-9 / sum.seconds);
}

/* ---------------------------------------------------------------- layers and the whole */

static nb_status load_layer(loader *ld, nbi_layer *layer, uint32_t index, nb_error *err)
{
    const nbi_config *c = &ld->m->config;
    bool counted = index < c->n_layers;
    NB_TRY(need(ld, index + 1, err));
    snprintf(ld->prefix, sizeof ld->prefix, "model.layers.%u.", index);
    layer->sparse = c->layer_sparse[index];
    const bool attends = ld->m->split.heads.n > 0;
    layer->full_indexer = attends && c->has_indexer && c->layer_full_indexer[index];
    NB_TRY(load_vector(ld, &layer->input_norm, "input_layernorm.weight", c->hidden, err));
    NB_TRY(load_vector(ld, &layer->post_norm, "post_attention_layernorm.weight", c->hidden, err));
    if (attends) {
        NB_TRY(c->attention == NBI_ATTENTION_MLA ? load_mla(ld, &layer->mla, counted, err)
                                                 : load_gqa(ld, &layer->gqa, counted, err));
    }
    if (layer->full_indexer) NB_TRY(load_indexer(ld, &layer->indexer, counted, err));
    if (layer->sparse) return load_moe(ld, &layer->moe, index, counted, err);
    ld->part = NBI_PART_DENSE;
    return load_mlp(ld, &layer->mlp, "mlp", c->intermediate, counted, err);
}

/* The MTP layer: a decoder layer plus its own norms and projection. Its copies of embedding and
 * head, where a file has them, are those of the main model and stay unread. */
static nb_status load_mtp(loader *ld, nb_error *err)
{
    nbi_model *m = ld->m;
    const nbi_config *c = &m->config;
    uint32_t hidden = c->hidden;
    NB_TRY(load_layer(ld, &m->layers[c->n_layers], c->n_layers, err));
    NB_TRY(load_vector(ld, &m->mtp.enorm, "enorm.weight", hidden, err));
    NB_TRY(load_vector(ld, &m->mtp.hnorm, "hnorm.weight", hidden, err));
    NB_TRY(load_vector(ld, &m->mtp.head_norm, "shared_head.norm.weight", hidden, err));
    NB_TRY(load_linear(ld, &m->mtp.eh_proj, "eh_proj", hidden, 2 * hidden, false, err));
    char full[NAME_MAX_BYTES];
    nbi_checkpoint_find(m->ckpt, full_name(ld, full, "embed_tokens.weight"));
    nbi_checkpoint_find(m->ckpt, full_name(ld, full, "shared_head.head.weight"));
    return NB_OK;
}

/* The head: its own tensor when the file has one (also when the config says tied: the stored one is
 * what the exporter wrote). */
static nb_status load_head(loader *ld, nb_error *err)
{
    nbi_model *m = ld->m;
    const nbi_config *c = &m->config;
    bool stored = nbi_matrix_present(m->ckpt, "lm_head");
    if (c->tied_head && !stored) {
        m->head = m->embed;
        if (m->embed) m->non_expert_bytes += nbi_matrix_bytes(&m->embed->host);
        m->non_expert_macs += (uint64_t)m->split.vocab.n * c->hidden;
        return NB_OK;
    }
    if (c->tied_head)
        nbi_log(
            NB_LOG_WARN,
            "config says the head is tied, but lm_head.weight is stored: the stored head is used");
    ld->part = NBI_PART_HEAD;
    return load_part(ld, &m->head, "lm_head", c->vocab, c->hidden, CUT_ROWS, m->split.vocab, true,
                     err);
}

static nb_status load_all(loader *ld, nb_error *err)
{
    nbi_model *m = ld->m;
    const nbi_config *c = &m->config;
    ld->part = NBI_PART_EMBEDDING;
    NB_TRY(need(ld, 0, err));
    NB_TRY(load_part(ld, &m->embed, "model.embed_tokens", c->vocab, c->hidden, CUT_ROWS,
                     m->split.vocab, false, err));
    NB_TRY(load_head(ld, err));
    NB_TRY(load_vector(ld, &m->final_norm, "model.norm.weight", c->hidden, err));
    for (uint32_t l = 0; l < c->n_layers; l++) NB_TRY(load_layer(ld, &m->layers[l], l, err));
    if (m->has_mtp) NB_TRY(load_mtp(ld, err));
    return place_vectors(m, err);
}

nb_status nbi_model_load_weights(nbi_model *m, const nbi_model_options *opt, nb_error *err)
{
    loader ld = {
        .m = m, .opt = opt, .total_bytes = nbi_split_bytes(&m->split, &m->config, m->ckpt)};
    if (opt->verify_scales) NB_TRY(nbi_pool_create(&ld.pool, 0, err));
    nb_status st = start_ahead(&ld, err);
    if (st == NB_OK) st = load_all(&ld, err);
    stop_ahead(&ld);
    nbi_pool_destroy(&ld.pool);
    return st;
}

/* ---------------------------------------------------------------- release */

static void release_mlp(nbi_model *m, nbi_mlp_weights *w)
{
    nbi_weight **all[] = {&w->gate, &w->up, &w->down};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) m->b->ops->weight_release(m->b, all[i]);
}

static void release_layer(nbi_model *m, nbi_layer *l)
{
    nbi_weight **all[] = {&l->mla.q_a,   &l->mla.q_b,   &l->mla.kv_a,  &l->mla.kv_b,
                          &l->mla.o,     &l->gqa.q,     &l->gqa.k,     &l->gqa.v,
                          &l->gqa.o,     &l->indexer.q, &l->indexer.k, &l->indexer.weights,
                          &l->moe.router};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) m->b->ops->weight_release(m->b, all[i]);
    release_mlp(m, &l->mlp);
    release_mlp(m, &l->moe.shared);
    if (l->moe.prepared) m->runner->release(m->b, &l->moe.prepared);
}

void nbi_model_release_weights(nbi_model *m)
{
    uint32_t n = m->layers ? m->n_layers + m->has_mtp : 0;
    for (uint32_t l = 0; l < n; l++) release_layer(m, &m->layers[l]);
    m->b->ops->weight_release(m->b, &m->mtp.eh_proj);
    if (m->head != m->embed) m->b->ops->weight_release(m->b, &m->head);
    m->b->ops->weight_release(m->b, &m->embed);
    if (m->vectors) m->b->ops->release(m->b, m->vectors, m->vector_bytes);
    nbi_free(m->slots);
}
