/* The forward pass: a list of operator calls, the same for every family and device. Called by
 * nbi_model_forward() once per step.
 *
 * Ranks (split.h) have the same rows and residual, bit by bit, and each a part of what is added to
 * it: two sums per layer, one for the embedding, and logits are gathered.
 *
 * Naming: x is the residual stream, delta what the last block added and nobody has added to x yet
 * (the next norm does, in one pass). */
#include "model/layer.h"

/* Up to so many rows the residual moves between two buffers: a backend can then let every block of
 * the product behind a norm make the norm on its own. */
#define APART_ROWS 8u

/* ---------------------------------------------------------------- workspace */

static size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Draft passes behind the first take its index lists. */
static bool shares_lists(const nbi_model *m)
{
    return m->can_draft && m->config.has_indexer && m->config.index_share_mtp;
}

/* Kinds of weights, and with them a rank's columns, may differ between layers. */
static size_t moe_bytes(const nbi_model *m, uint32_t T)
{
    size_t most = 0;
    for (uint32_t l = 0; l < m->n_layers + m->has_mtp; l++) {
        const nbi_moe_weights *w = &m->layers[l].moe;
        if (!m->layers[l].sparse || !w->prepared) continue;
        most = max_size(most, nbi_moe_table_workspace(&m->moe_table, m->b, &w->experts.shape, T));
    }
    return most;
}

/* Of all that is summed at once where latents are split. */
static size_t latents_width(const nbi_config *c)
{
    return (size_t)c->q_lora + c->kv_lora + c->rope_dim + c->index_dim + c->index_heads;
}

/* Sizes with base NULL, lays out otherwise. T rows, R logit rows. */
static size_t carve(nbi_workspace *ws, const nbi_model *m, uint32_t T, uint32_t R, char *base)
{
    const nbi_config *c = &m->local;
    size_t act = nbi_dtype_bits(m->b->act_dtype) / 8, f32 = sizeof(float), i32 = sizeof(int32_t);
    bool mla = c->attention == NBI_ATTENTION_MLA;
    size_t qk = mla ? (size_t)c->nope_dim + c->rope_dim : c->head_dim,
           v = mla ? c->v_dim : c->head_dim;
    size_t kv = mla ? (size_t)c->kv_lora + c->rope_dim : (size_t)c->n_kv_heads * c->head_dim;
    size_t mlp = max_size(c->intermediate, (size_t)c->moe_intermediate * c->n_shared);
    size_t vocab = m->split.vocab_max;
    size_t gate = max_size(mlp, c->q_lora); /* in attention: the normed q latent */
    nbi_plan plan = {0};
    struct {
        void *slot; /* address of a pointer in *ws */
        size_t bytes;
    } const parts[] = {
        {&ws->x, T * c->hidden * act},
        {&ws->x_other, (T < APART_ROWS ? T : APART_ROWS) * c->hidden * act},
        {&ws->xn, T * c->hidden * act},
        {&ws->delta, T * c->hidden * act},
        {&ws->shared, T * c->hidden * act},
        {&ws->q_a, T * c->q_lora * act},
        {&ws->q, T * c->n_heads * qk * act},
        {&ws->kv, T * kv * act},
        {&ws->v, mla ? 0 : T * kv * act},
        {&ws->latents, m->split.shard.latents ? T * latents_width(c) * f32 : 0},
        {&ws->attn, T * c->n_heads * v * act},
        {&ws->index_q, T * c->index_heads * (size_t)c->index_dim * act},
        {&ws->index_k, T * c->index_dim * act},
        {&ws->index_w, T * c->index_heads * f32},
        {&ws->select, T * c->index_topk * i32},
        {&ws->gate, T * gate * act},
        {&ws->up, T * mlp * act},
        {&ws->router_logits, T * c->n_experts * f32},
        {&ws->expert_ids, T * c->top_k * i32},
        {&ws->expert_weights, T * c->top_k * f32},
        {&ws->moe, moe_bytes(m, T)},
        {&ws->last, R * c->hidden * act},
        {&ws->shared_experts, m->oea_k0 ? sizeof *ws->shared_experts : 0},
        {&ws->logits, (size_t)R * c->vocab * f32},
        {&ws->part, m->comm ? R * vocab * f32 : 0},
        {&ws->parts, m->comm && !m->b->ops->join_ranks
                         ? m->split.shard.tp_size * NBI_LOGIT_ROWS * vocab * f32
                         : 0},
        {&ws->best,
         m->comm && !m->b->ops->join_ranks ? R * (NBI_CANDIDATES_MAX + 1) * sizeof *ws->best : 0},
        {&ws->all_best,
         m->comm && !m->b->ops->join_ranks
             ? m->split.shard.tp_size * R * (NBI_CANDIDATES_MAX + 1) * sizeof *ws->all_best
             : 0},
        {&ws->cos, T * (c->rope.dim / 2) * f32},
        {&ws->sin, T * (c->rope.dim / 2) * f32},
        {&ws->hidden, m->can_draft ? T * c->hidden * act : 0},
        {&ws->draft_select, shares_lists(m) ? R * c->index_topk * i32 : 0},
        {&ws->draft_hidden, m->can_draft ? T * c->hidden * act : 0},
        {&ws->pair, m->can_draft ? T * 2 * c->hidden * act : 0},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        size_t at = nbi_plan_add(&plan, parts[i].bytes);
        if (base && parts[i].bytes) *(void **)parts[i].slot = base + at;
    }
    return plan.bytes;
}

static nbi_limits limits_of(const nbi_model *m, uint32_t max_rows, uint32_t max_seqs,
                            uint32_t max_logit_rows, uint32_t max_context)
{
    const nbi_config *c = &m->local;
    nbi_limits lim = {.max_rows = max_rows,
                      .max_seqs = max_seqs,
                      .max_context = max_context,
                      .max_logit_rows = max_logit_rows,
                      .n_heads = c->n_heads,
                      .n_kv_heads = c->n_kv_heads,
                      .head_dim = c->head_dim,
                      .kv_lora = c->kv_lora,
                      .rope_dim = c->rope_dim,
                      .nope_dim = c->nope_dim,
                      .v_dim = c->v_dim,
                      .index_heads = c->index_heads,
                      .index_dim = c->index_dim,
                      .index_topk = c->index_topk,
                      .vocab = c->vocab,
                      .mla_expanded = m->expanded_block > 0};
    uint32_t heads_v = c->n_heads * (c->attention == NBI_ATTENTION_MLA ? c->v_dim : c->head_dim);
    const uint32_t sides[] = {
        c->hidden, 2 * c->hidden,   c->q_lora,           c->kv_lora,
        heads_v,   c->intermediate, c->moe_intermediate, c->moe_intermediate * c->n_shared};
    for (size_t i = 0; i < sizeof sides / sizeof *sides; i++) {
        if (sides[i] > lim.max_linear_cols) lim.max_linear_cols = sides[i];
    }
    lim.max_linear_rows = c->vocab;
    return lim;
}

size_t nbi_model_workspace_bytes(const nbi_model *m, uint32_t max_rows, uint32_t max_seqs,
                                 uint32_t max_logit_rows, uint32_t max_context)
{
    nbi_workspace ws = {0};
    nbi_limits lim = limits_of(m, max_rows, max_seqs, max_logit_rows, max_context);
    return carve(&ws, m, max_rows, max_logit_rows, NULL) + m->b->ops->workspace_bytes(m->b, &lim);
}

nb_status nbi_model_reserve(nbi_model *m, uint32_t max_rows, uint32_t max_seqs,
                            uint32_t max_logit_rows, uint32_t max_context, nb_error *err)
{
    NB_ASSERT(!m->ws.block);
    nbi_limits lim = limits_of(m, max_rows, max_seqs, max_logit_rows, max_context);
    NB_TRY(m->b->ops->reserve(m->b, &lim, err));
    m->ws.bytes = carve(&m->ws, m, max_rows, max_logit_rows, NULL);
    m->ws.block = m->b->ops->alloc(m->b, m->ws.bytes);
    if (!m->ws.block)
        return nbi_fail(err, NB_NO_MEMORY, "workspace: cannot reserve %zu bytes", m->ws.bytes);
    carve(&m->ws, m, max_rows, max_logit_rows, m->ws.block);
    m->ws.max_rows = max_rows;
    m->ws.max_logit_rows = max_logit_rows;
    return NB_OK;
}

/* ---------------------------------------------------------------- one step's view */

typedef struct step {
    nbi_model *m;
    nbi_backend *b;
    const nbi_config *c;
    nbi_workspace *ws;
    void *x, *x_other; /* the residual; where it may go */
    const nbi_batch *batch;
    nbi_rope_rows rope, index_rope;
    bool has_delta;
    bool reuse;       /* index lists are those of the first draft pass, */
    bool from_listed; /* which has left them in ws->select */
    bool shares;      /* some rows may share experts */
    nb_status status; /* of sums over ranks; behind a failure there are no more */
    nb_error *err;
} step;

/* What every rank has a part of becomes the sum: x, n values. once: for the norm behind it. */
static void sum_ranks(step *s, void *x, size_t n, bool once)
{
    if (!s->m->comm || s->status != NB_OK) return;
    nbi_timing *t = s->b->timing;
    if (t) nbi_timing_collective_begin(t);
    if (s->b->ops->sum_ranks)
        s->b->ops->sum_ranks(s->b, &(nbi_sum_ranks_args){.x = x, .n = n, .once = once});
    else
        s->status = nbi_comm_sum(s->m->comm, x, n, s->err);
    if (t)
        nbi_timing_collective_end(t, NBI_TIMED_ALL_REDUCE,
                                  2 * (1 - 1.0 / s->m->split.shard.tp_size) * (double)n *
                                      sizeof(float));
}

static void clear(step *s, void *x)
{
    const size_t act = nbi_dtype_bits(s->b->act_dtype) / 8;
    s->b->ops->clear(s->b,
                     &(nbi_clear_args){.p = x, .bytes = s->batch->n_rows * s->c->hidden * act});
}

static void linear_f(step *s, void *y, const void *x, const nbi_weight *w, const float *bias,
                     bool f32)
{
    s->b->ops->linear(s->b, &(nbi_linear_args){.y = y,
                                               .x = x,
                                               .w = w,
                                               .bias = bias,
                                               .n_rows = s->batch->n_rows,
                                               .x_stride = w->host.cols,
                                               .y_stride = w->host.rows,
                                               .y_f32 = f32,
                                               .x_exact = f32});
}

static void linear(step *s, void *y, const void *x, const nbi_weight *w, const float *bias)
{
    linear_f(s, y, x, w, bias, false);
}

/* Adds what is pending to the residual and norms it into `out`. */
static void residual_norm(step *s, const float *weight, void *out, uint32_t layer, nbi_where where)
{
    uint32_t H = s->c->hidden;
    bool apart = s->has_delta && s->batch->n_rows <= APART_ROWS;
    s->b->ops->rmsnorm(s->b, &(nbi_rmsnorm_args){.out = out,
                                                 .x = s->x,
                                                 .x_out = apart ? s->x_other : NULL,
                                                 .delta = s->has_delta ? s->ws->delta : NULL,
                                                 .weight = weight,
                                                 .eps = s->c->norm_eps,
                                                 .n_rows = s->batch->n_rows,
                                                 .width = H,
                                                 .x_stride = H,
                                                 .out_stride = H,
                                                 .row_fault = s->batch->row_fault,
                                                 .layer = layer,
                                                 .where = where});
    if (apart) {
        void *x = s->x;
        s->x = s->x_other;
        s->x_other = x;
    }
    s->has_delta = true; /* every norm is followed by a block that writes delta */
}

static void mlp(step *s, void *out, const void *x, const nbi_mlp_weights *w)
{
    if (!w->inter) { /* the rank has none of its columns */
        clear(s, out);
        return;
    }
    linear(s, s->ws->gate, x, w->gate, NULL);
    linear(s, s->ws->up, x, w->up, NULL);
    s->b->ops->swiglu(s->b, &(nbi_swiglu_args){.out = s->ws->gate,
                                               .gate = s->ws->gate,
                                               .up = s->ws->up,
                                               .n_rows = s->batch->n_rows,
                                               .width = w->inter,
                                               .in_stride = w->inter,
                                               .out_stride = w->inter,
                                               .once = true});
    linear(s, out, s->ws->gate, w->down, NULL);
}

/* ---------------------------------------------------------------- attention */

/* Whether rows attend to lists of positions: else every position is selected, without a list. */
static bool sparse_now(const step *s)
{
    return s->c->has_indexer && s->batch->max_len > s->c->index_topk;
}

/* What a layer makes of the normed residual for all heads, [T] rows each. */
typedef struct latents {
    void *q, *kv;
    void *key;      /* of the indexer */
    float *weights; /* of the choice */
} latents;

/* Writes the layer's indexer key and, for every row, the positions its attention may see. */
static void index_positions(step *s, const nbi_indexer_weights *w, const latents *made,
                            const nbi_kv_layer *cache)
{
    const nbi_config *c = s->c;
    nbi_workspace *ws = s->ws;
    s->b->ops->index_append(s->b, &(nbi_index_append_args){.k = made->key,
                                                           .norm_weight = w->k_norm,
                                                           .norm_bias = w->k_norm_bias,
                                                           .eps = c->index_norm_eps,
                                                           .index_dim = c->index_dim,
                                                           .rope = &s->index_rope,
                                                           .cache = cache,
                                                           .batch = s->batch});
    if (!sparse_now(s)) return;
    s->b->ops->index_select(s->b, &(nbi_index_select_args){.select = ws->select,
                                                           .q = ws->index_q,
                                                           .w = made->weights,
                                                           .n_heads = c->index_heads,
                                                           .index_dim = c->index_dim,
                                                           .topk = c->index_topk,
                                                           .rope = &s->index_rope,
                                                           .cache = cache,
                                                           .batch = s->batch});
}

/* y[T, rows] of this rank's columns; a bias is added once. Returns the end of y. */
static float *linear_of_columns(step *s, float *y, uint32_t rows, const nbi_weight *w,
                                const float *bias, bool exact)
{
    const nbi_split *split = &s->m->split;
    s->b->ops->linear(s->b, &(nbi_linear_args){.y = y,
                                               .x = (const float *)s->ws->xn + split->latent.first,
                                               .w = w,
                                               .bias = split->shard.tp_rank ? NULL : bias,
                                               .n_rows = s->batch->n_rows,
                                               .x_stride = s->c->hidden,
                                               .y_stride = rows,
                                               .y_f32 = true,
                                               .x_exact = exact});
    return y + (size_t)s->batch->n_rows * rows;
}

/* Ranks multiply their columns and sum all that comes of it at once, the indexer's key and weights
 * too. */
static latents sum_latents(step *s, const nbi_mla_weights *w, const nbi_indexer_weights *index)
{
    const nbi_config *c = s->c;
    float *const all = s->ws->latents, *kv = all;
    if (w->q_a) kv = linear_of_columns(s, all, c->q_lora, w->q_a, w->q_a_bias, false);
    float *const key =
        linear_of_columns(s, kv, c->kv_lora + c->rope_dim, w->kv_a, w->kv_a_bias, false);
    float *weights = key, *end = key;
    if (index) weights = end = linear_of_columns(s, key, c->index_dim, index->k, NULL, false);
    if (index && sparse_now(s))
        end = linear_of_columns(s, weights, c->index_heads, index->weights, NULL, true);
    sum_ranks(s, all, (size_t)(end - all), false);
    return (latents){.q = all, .kv = kv, .key = key, .weights = weights};
}

static latents whole_latents(step *s, const nbi_mla_weights *w, const nbi_indexer_weights *index)
{
    nbi_workspace *ws = s->ws;
    linear(s, ws->kv, ws->xn, w->kv_a, w->kv_a_bias);
    if (w->q_a) linear(s, ws->q_a, ws->xn, w->q_a, w->q_a_bias);
    if (index) linear(s, ws->index_k, ws->xn, index->k, NULL);
    return (latents){.q = ws->q_a, .kv = ws->kv, .key = ws->index_k, .weights = ws->index_w};
}

/* The products of attention and of the indexer (NULL: none), those of the same x one after the
 * other. */
static latents mla_products(step *s, const nbi_mla_weights *w, const nbi_indexer_weights *index)
{
    const nbi_config *c = s->c;
    nbi_workspace *ws = s->ws;
    const void *q_in = ws->xn;
    const bool split = s->m->split.shard.latents;
    const latents made = split ? sum_latents(s, w, index) : whole_latents(s, w, index);
    if (w->q_a) {
        s->b->ops->rmsnorm(s->b, &(nbi_rmsnorm_args){.out = ws->gate,
                                                     .x = made.q,
                                                     .weight = w->q_a_norm,
                                                     .eps = c->latent_norm_eps,
                                                     .n_rows = s->batch->n_rows,
                                                     .width = c->q_lora,
                                                     .x_stride = c->q_lora,
                                                     .out_stride = c->q_lora});
        q_in = ws->gate;
    }
    linear(s, ws->q, q_in, w->q_b, NULL);
    if (!index || !sparse_now(s)) return made;
    linear(s, ws->index_q, q_in, index->q, NULL);
    if (!split) linear_f(s, ws->index_w, ws->xn, index->weights, NULL, true);
    return made;
}

static void mla(step *s, const nbi_layer *layer, const nbi_kv_layer *cache)
{
    const nbi_config *c = s->c;
    const nbi_mla_weights *w = &layer->mla;
    nbi_workspace *ws = s->ws;
    const nbi_indexer_weights *index = layer->full_indexer && !s->reuse ? &layer->indexer : NULL;
    const latents made = mla_products(s, w, index);
    s->b->ops->mla_append(s->b, &(nbi_mla_append_args){.q = ws->q,
                                                       .kv = made.kv,
                                                       .kv_norm = w->kv_a_norm,
                                                       .eps = c->latent_norm_eps,
                                                       .n_heads = c->n_heads,
                                                       .nope_dim = c->nope_dim,
                                                       .rope_dim = c->rope_dim,
                                                       .kv_lora = c->kv_lora,
                                                       .kv_stride = c->kv_lora + c->rope_dim,
                                                       .rope = &s->rope,
                                                       .cache = cache,
                                                       .batch = s->batch});
    const bool sparse = sparse_now(s);
    if (s->reuse && sparse)
        s->b->ops->index_reuse(s->b,
                               &(nbi_index_reuse_args){.select = ws->draft_select,
                                                       .from = s->from_listed ? ws->select : NULL,
                                                       .topk = c->index_topk,
                                                       .batch = s->batch});
    else if (index)
        index_positions(s, index, &made, cache);
    const int32_t *select = !sparse ? NULL : s->reuse ? ws->draft_select : ws->select;
    s->b->ops->mla_attend(s->b, &(nbi_mla_attend_args){.out = ws->attn,
                                                       .q = ws->q,
                                                       .kv_b = w->kv_b,
                                                       .n_heads = c->n_heads,
                                                       .nope_dim = c->nope_dim,
                                                       .rope_dim = c->rope_dim,
                                                       .kv_lora = c->kv_lora,
                                                       .v_dim = c->v_dim,
                                                       .scale = c->softmax_scale,
                                                       .cache = cache,
                                                       .select = select,
                                                       .select_stride = c->index_topk,
                                                       .batch = s->batch});
    linear(s, ws->delta, ws->attn, w->o, w->o_bias);
}

static void gqa(step *s, const nbi_layer *layer, const nbi_kv_layer *cache)
{
    const nbi_config *c = s->c;
    const nbi_gqa_weights *w = &layer->gqa;
    nbi_workspace *ws = s->ws;
    linear(s, ws->q, ws->xn, w->q, w->q_bias);
    linear(s, ws->kv, ws->xn, w->k, w->k_bias);
    linear(s, ws->v, ws->xn, w->v, w->v_bias);
    s->b->ops->gqa_append(s->b, &(nbi_gqa_append_args){.q = ws->q,
                                                       .k = ws->kv,
                                                       .v = ws->v,
                                                       .q_norm = w->q_norm,
                                                       .k_norm = w->k_norm,
                                                       .eps = c->norm_eps,
                                                       .n_heads = c->n_heads,
                                                       .n_kv_heads = c->n_kv_heads,
                                                       .head_dim = c->head_dim,
                                                       .rope = &s->rope,
                                                       .cache = cache,
                                                       .batch = s->batch});
    s->b->ops->gqa_attend(s->b, &(nbi_gqa_attend_args){.out = ws->attn,
                                                       .q = ws->q,
                                                       .n_heads = c->n_heads,
                                                       .n_kv_heads = c->n_kv_heads,
                                                       .head_dim = c->head_dim,
                                                       .scale = c->softmax_scale,
                                                       .cache = cache,
                                                       .batch = s->batch});
    linear(s, ws->delta, ws->attn, w->o, w->o_bias);
}

/* ---------------------------------------------------------------- experts */

static void run_experts(step *s, const nbi_moe_weights *w)
{
    const uint32_t T = s->batch->n_rows;
    const nbi_range own = s->m->split.experts;
    nbi_workspace *ws = s->ws;
    if (own.n != s->c->n_experts)
        s->b->ops->own_experts(s->b, &(nbi_own_experts_args){.ids = ws->expert_ids,
                                                             .n = (size_t)T * s->c->top_k,
                                                             .first = own.first,
                                                             .n_own = own.n});
    nbi_moe_table_runner(s->m->table_now, T)
        ->run(s->b, w->prepared,
              &(nbi_moe_args){.out = ws->delta,
                              .x = ws->xn,
                              .ids = ws->expert_ids,
                              .weights = ws->expert_weights,
                              .n_rows = T,
                              .workspace = ws->moe});
}

static void moe(step *s, const nbi_moe_weights *w)
{
    const nbi_config *c = s->c;
    nbi_workspace *ws = s->ws;
    uint32_t T = s->batch->n_rows;
    linear_f(s, ws->router_logits, ws->xn, w->router, NULL, true);
    const nbi_route_args route = {.ids = ws->expert_ids,
                                  .weights = ws->expert_weights,
                                  .logits = ws->router_logits,
                                  .bias = w->router_bias,
                                  .n_rows = T,
                                  .n_experts = c->n_experts,
                                  .top_k = c->top_k,
                                  .n_group = c->n_group,
                                  .topk_group = c->topk_group,
                                  .softmax = c->scoring == NBI_SCORING_SOFTMAX,
                                  .norm_topk = c->norm_topk,
                                  .routed_scale = c->routed_scale};
    s->b->ops->route(s->b, &route);
    if (s->shares)
        s->b->ops->share_experts(s->b, &(nbi_share_experts_args){.route = route,
                                                                 .shares = s->batch->shares,
                                                                 .k0 = s->m->oea_k0,
                                                                 .state = ws->shared_experts});
    if (!w->prepared) {
        clear(s, ws->delta);
    } else {
        run_experts(s, w);
    }
    if (!w->shared.inter) return;
    mlp(s, ws->shared, ws->xn, &w->shared);
    s->b->ops->add(
        s->b,
        &(nbi_add_args){.x = ws->delta, .y = ws->shared, .n = (size_t)T * c->hidden, .once = true});
}

/* ---------------------------------------------------------------- the pass */

static void decoder_layer(step *s, uint32_t index, const nbi_kv_layer *cache)
{
    const nbi_layer *layer = &s->m->layers[index];
    const size_t values = (size_t)s->batch->n_rows * s->c->hidden;
    residual_norm(s, layer->input_norm, s->ws->xn, index, NBI_WHERE_INPUT_NORM);
    if (!s->c->n_heads) {
        clear(s, s->ws->delta);
    } else if (s->c->attention == NBI_ATTENTION_MLA) {
        mla(s, layer, cache);
    } else {
        gqa(s, layer, cache);
    }
    sum_ranks(s, s->ws->delta, values, true);
    residual_norm(s, layer->post_norm, s->ws->xn, index, NBI_WHERE_POST_NORM);
    if (layer->sparse) {
        moe(s, &layer->moe);
    } else {
        mlp(s, s->ws->delta, s->ws->xn, &layer->mlp);
    }
    sum_ranks(s, s->ws->delta, values, true);
}

/* Embeds the rows into x and computes their rotations. */
static void embed_rows(step *s)
{
    if (!s->m->embed)
        clear(s, s->x);
    else
        s->b->ops->embed(s->b, &(nbi_embed_args){.out = s->x,
                                                 .table = s->m->embed,
                                                 .first = s->m->split.vocab.first,
                                                 .part_of = s->m->comm != NULL,
                                                 .batch = s->batch});
    sum_ranks(s, s->x, (size_t)s->batch->n_rows * s->c->hidden, false);
    const nbi_rope_config *r = &s->c->rope;
    s->b->ops->rope_table(s->b, &(nbi_rope_table_args){.cos = s->ws->cos,
                                                       .sin = s->ws->sin,
                                                       .inv_freq = s->m->inv_freq,
                                                       .dim = r->dim,
                                                       .factor = (float)r->attention_factor,
                                                       .batch = s->batch});
    s->rope = (nbi_rope_rows){
        .cos = s->ws->cos, .sin = s->ws->sin, .dim = r->dim, .interleaved = r->interleaved};
    s->index_rope = s->rope;
    s->index_rope.interleaved = s->c->index_interleaved;
}

static void join_logits(step *s, uint32_t n_rows)
{
    const nbi_split *split = &s->m->split;
    uint32_t first[NBI_RANKS_MAX + 1];
    for (uint32_t k = 0; k < split->shard.tp_size; k++)
        first[k] = nbi_split_vocab(split, s->c->vocab, k).first;
    first[split->shard.tp_size] = s->c->vocab;
    nbi_timing *t = s->b->timing;
    if (t) nbi_timing_collective_begin(t);
    s->b->ops->join_ranks(s->b, &(nbi_join_ranks_args){.out = s->ws->logits,
                                                       .in = s->ws->part,
                                                       .first = first,
                                                       .n_rows = n_rows,
                                                       .width = s->c->vocab,
                                                       .in_stride = split->vocab_max});
    if (t)
        nbi_timing_collective_end(t, NBI_TIMED_ALL_GATHER,
                                  (split->shard.tp_size - 1.0) * n_rows * split->vocab_max *
                                      sizeof(float));
}

/* out[ranks][bytes] := `in` of all ranks. */
static void gather_ranks(step *s, void *out, const void *in, size_t bytes)
{
    nbi_timing *t = s->status == NB_OK ? s->b->timing : NULL;
    if (t) nbi_timing_collective_begin(t);
    if (s->status == NB_OK) s->status = nbi_comm_gather(s->m->comm, out, in, bytes, s->err);
    if (t)
        nbi_timing_collective_end(t, NBI_TIMED_ALL_GATHER,
                                  (s->m->split.shard.tp_size - 1.0) * (double)bytes);
}

/* Rows of which the best logits suffice: those of each rank, the rest of the row is -inf. */
static void gather_best(step *s, uint32_t n_rows)
{
    const nbi_split *split = &s->m->split;
    const nbi_batch *batch = s->batch;
    const nbi_range own = nbi_split_vocab(split, s->c->vocab, split->shard.tp_rank);
    const uint32_t valid = batch->n_valid > own.first ? batch->n_valid - own.first : 0;
    uint32_t n = 0;
    for (uint32_t r = 0; r < n_rows; r++) {
        if (!batch->candidates[r]) continue;
        const uint32_t count = (uint32_t)batch->candidates[r];
        NB_ASSERT(count <= NBI_CANDIDATES_MAX);
        nbi_candidates_find(s->ws->best + n, count, s->ws->part + (size_t)r * split->vocab_max,
                            own.n, valid < own.n ? valid : own.n, (int32_t)own.first);
        n += count + 1;
    }
    if (!n) return;
    gather_ranks(s, s->ws->all_best, s->ws->best, n * sizeof *s->ws->best);
    for (uint32_t k = 0; k < split->shard.tp_size && s->status == NB_OK; k++) {
        const nbi_candidate *in = s->ws->all_best + (size_t)k * n;
        for (uint32_t r = 0; r < n_rows; r++) {
            if (!batch->candidates[r]) continue;
            const uint32_t count = (uint32_t)batch->candidates[r] + 1;
            nbi_candidates_put(s->ws->logits + (size_t)r * s->c->vocab, s->c->vocab, in, count,
                               k == 0);
            in += count;
        }
    }
}

/* Logits [from, to) of all ranks from their parts. */
static void gather_rows(step *s, uint32_t from, uint32_t to)
{
    const nbi_split *split = &s->m->split;
    const size_t width = split->vocab_max, vocab = s->c->vocab;
    for (uint32_t r = from; r < to; r += NBI_LOGIT_ROWS) {
        const uint32_t n = to - r < NBI_LOGIT_ROWS ? to - r : NBI_LOGIT_ROWS;
        gather_ranks(s, s->ws->parts, s->ws->part + r * width, n * width * sizeof(float));
        for (uint32_t k = 0; k < split->shard.tp_size; k++) {
            const nbi_range rows = nbi_split_vocab(split, s->c->vocab, k);
            for (uint32_t i = 0; i < n; i++)
                s->b->ops->copy(s->b, s->ws->logits + (r + i) * vocab + rows.first,
                                s->ws->parts + (k * n + i) * width, rows.n * sizeof(float));
        }
    }
}

/* The logits of all ranks; the same on each. */
static void gather_logits(step *s, uint32_t n_rows)
{
    const nbi_comm *comm = s->m->comm;
    if (s->b->ops->join_ranks) {
        join_logits(s, n_rows);
        return;
    }
    /* In shared memory all are copied in the time in which the best are found. */
    const int32_t *best =
        nbi_comm_local_size(comm) < nbi_comm_size(comm) ? s->batch->candidates : NULL;
    if (best) gather_best(s, n_rows);
    for (uint32_t r = 0, to; r < n_rows; r = to) {
        for (to = r; to < n_rows && !(best && best[to]);) to++;
        gather_rows(s, r, to);
        for (; to < n_rows && best && best[to];) to++;
    }
}

/* Final norm of every row into `normed`, logits of the rows that want them. */
static void head_rows(step *s, const float *norm, void *normed)
{
    const nbi_model *m = s->m;
    uint32_t R = s->batch->n_logit_rows, H = s->c->hidden;
    residual_norm(s, norm, normed, m->n_layers, NBI_WHERE_FINAL_NORM);
    if (!R) return;
    s->b->ops->gather(
        s->b,
        &(nbi_gather_args){
            .out = s->ws->last, .x = normed, .rows = s->batch->logit_rows, .n = R, .width = H});
    if (m->head)
        s->b->ops->linear(s->b, &(nbi_linear_args){.y = m->comm ? s->ws->part : s->ws->logits,
                                                   .x = s->ws->last,
                                                   .w = m->head,
                                                   .n_rows = R,
                                                   .x_stride = H,
                                                   .y_stride = m->split.vocab_max,
                                                   .y_f32 = true});
    if (m->comm) gather_logits(s, R);
}

/* Lists of operator calls that a backend may record (nbi_backend_ops.step_begin). */
enum { PASS_FORWARD, PASS_DRAFT, PASS_DRAFT_AGAIN, PASS_DRAFT_AGAIN_LISTED };

/* False: the backend repeats what it recorded, no operator is to be called. */
static bool begin(step *s, nbi_model *m, const nbi_batch *batch, uint32_t pass, nb_error *err)
{
    NB_ASSERT(m->ws.block && batch->n_rows <= m->ws.max_rows &&
              batch->n_logit_rows <= m->ws.max_logit_rows);
    *s = (step){.m = m,
                .b = m->b,
                .c = &m->local,
                .ws = &m->ws,
                .x = m->ws.x,
                .x_other = m->ws.x_other,
                .status = NB_OK,
                .err = err};
    return m->b->ops->step_begin(m->b, batch, pass, &s->batch);
}

static nb_status end(step *s)
{
    const nb_status failed = s->status;
    nb_error own;
    const nb_status st = s->b->ops->step_end(s->b, failed == NB_OK ? s->err : &own);
    return failed == NB_OK ? st : failed;
}

static void run_forward(step *s, const nbi_kv *kv)
{
    nbi_model *m = s->m;
    embed_rows(s);
    for (uint32_t l = 0; l < m->n_layers; l++) decoder_layer(s, l, &kv->layers[l]);
    head_rows(s, m->final_norm, m->can_draft ? m->ws.hidden : m->ws.xn);
}

nb_status nbi_model_forward(nbi_model *m, nbi_kv *kv, const nbi_batch *batch, float **logits,
                            nb_error *err)
{
    step s;
    const bool run = begin(&s, m, batch, PASS_FORWARD, err);
    NB_ASSERT(!m->oea_k0 || batch->shares);
    s.shares = m->oea_k0 > 0;
    if (run) run_forward(&s, kv);
    *logits = m->ws.logits;
    return end(&s);
}

nb_status nbi_model_sync(nbi_model *m, nb_error *err)
{
    return m->b->ops->sync(m->b, err);
}

void nbi_model_oea_counts(const nbi_model *m, nbi_oea_counts *out)
{
    nbi_share_state sums = {0};
    if (m->ws.shared_experts) m->b->ops->download(m->b, &sums, m->ws.shared_experts, sizeof sums);
    *out = (nbi_oea_counts){.layers = sums.calls, .before = sums.before, .after = sums.after};
}

void nbi_model_read_logits(const nbi_model *m, float *out, const float *logits, uint32_t n)
{
    m->b->ops->download(m->b, out, logits, (size_t)n * m->config.vocab * sizeof *out);
}

/* ---------------------------------------------------------------- drafting */

/* x = eh_proj [enorm(embedding), hnorm(hidden state)]. */
static void join_hidden(step *s, bool from_draft)
{
    const nbi_mtp_weights *w = &s->m->mtp;
    nbi_workspace *ws = s->ws;
    uint32_t T = s->batch->n_rows, H = s->c->hidden;
    size_t act = nbi_dtype_bits(s->b->act_dtype) / 8;
    s->b->ops->gather(s->b, &(nbi_gather_args){.out = ws->delta,
                                               .x = from_draft ? ws->draft_hidden : ws->hidden,
                                               .rows = s->batch->hidden_rows,
                                               .n = T,
                                               .width = H});
    s->b->ops->rmsnorm(s->b, &(nbi_rmsnorm_args){.out = ws->pair,
                                                 .x = s->x,
                                                 .weight = w->enorm,
                                                 .eps = s->c->norm_eps,
                                                 .n_rows = T,
                                                 .width = H,
                                                 .x_stride = H,
                                                 .out_stride = 2 * H});
    s->b->ops->rmsnorm(s->b, &(nbi_rmsnorm_args){.out = (char *)ws->pair + H * act,
                                                 .x = ws->delta,
                                                 .weight = w->hnorm,
                                                 .eps = s->c->norm_eps,
                                                 .n_rows = T,
                                                 .width = H,
                                                 .x_stride = H,
                                                 .out_stride = 2 * H});
    linear(s, s->x, ws->pair, w->eh_proj, NULL);
}

static void run_draft(step *s, const nbi_kv *kv, bool from_draft)
{
    nbi_model *m = s->m;
    embed_rows(s);
    join_hidden(s, from_draft);
    decoder_layer(s, m->n_layers, &kv->layers[m->n_layers]);
    head_rows(s, m->mtp.head_norm, m->ws.draft_hidden);
}

nb_status nbi_model_draft(nbi_model *m, nbi_kv *kv, const nbi_batch *batch, bool from_draft,
                          float **logits, nb_error *err)
{
    NB_ASSERT(m->can_draft);
    uint32_t pass = !from_draft       ? PASS_DRAFT
                    : m->draft_listed ? PASS_DRAFT_AGAIN_LISTED
                                      : PASS_DRAFT_AGAIN;
    step s;
    bool run = begin(&s, m, batch, pass, err);
    if (shares_lists(m)) {
        NB_ASSERT(!from_draft || batch->n_rows <= m->ws.max_logit_rows);
        s.reuse = from_draft;
        s.from_listed = m->draft_listed;
        if (!from_draft) m->draft_listed = s.batch->max_len > m->config.index_topk;
    }
    if (run) run_draft(&s, kv, from_draft);
    *logits = m->ws.logits;
    return end(&s);
}
