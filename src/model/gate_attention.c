/* Attention of one layer: rotation and append, choice of positions, softmax over the cache. The
 * sums in double start from what the cache holds, so each step is judged by itself. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend/kv_shape.h"
#include "base/clock.h"
#include "model/gate_parts.h"

#define CHUNK      70u /* tokens of a first prompt: more than a page */
#define HEADS      3u  /* looked at */
#define BEYOND     40u /* positions above those that an index chooses */
#define LONG_BRIEF 200u
#define LONG_FULL  700u
#define TIME_CALLS 8u
#define SEQS       2u

typedef struct attention {
    nbi_gate *g;
    const nbi_config *c;
    const nbi_layer *layer;
    bool mla, sparse;                   /* sparse: the layer chooses positions itself */
    uint32_t q_width, v_width, k_width; /* of a head of q; of a head of the output; of kv's row */
    uint32_t n_pages, rows, stride, n_seqs;
    nbi_kv_layer kv;
    nbi_kv_shape latent_shape, head_shape, index_shape;
    nbi_gate_buffer latent, k_part, v_part, index_part; /* the cache's parts */
    nbi_gate_buffer q, kv_in, v_in, out, index_q, index_k, index_w, select, cosines, sines;
    float *raw_q, *raw_kv, *raw_v, *raw_index_k; /* before the operators */
    float *norm_a, *norm_b;                      /* host copies of the layer's norms */
    float *index_norm, *index_bias;
    nbi_batch batch; /* host arrays */
    int32_t *ids, *pos, *seq, *first, *len, *pages, *logit_rows, *fault;
    double *scores; /* [n_pages * 64] */
    double *values; /* scratch of one row and head */
    float *row;     /* [kv_lora] of kv_b */
    float *vector;  /* one of the cache */
    void *block;
} attention;

/* ---------------------------------------------------------------- memory */

static nb_status open_device(attention *a, nb_error *err)
{
    nbi_gate *g = a->g;
    const nbi_config *c = a->c;
    const size_t T = a->rows, f = sizeof(float);
    const size_t pages = a->n_pages;
    a->latent_shape = nbi_kv_latent_shape(g->opt->kv_dtype, c->kv_lora, c->rope_dim);
    a->head_shape = nbi_kv_head_shape(g->opt->kv_dtype, c->n_kv_heads, c->head_dim);
    a->index_shape = nbi_kv_head_shape(g->opt->kv_dtype, 1, c->index_dim);
    const struct {
        nbi_gate_buffer *at;
        size_t bytes;
    } parts[] = {
        {&a->latent, a->mla ? pages * a->latent_shape.page : 0},
        {&a->k_part, a->mla ? 0 : pages * a->head_shape.page},
        {&a->v_part, a->mla ? 0 : pages * a->head_shape.page},
        {&a->index_part, a->sparse ? pages * a->index_shape.page : 0},
        {&a->q, T * c->n_heads * a->q_width * f},
        {&a->kv_in, T * a->k_width * f},
        {&a->v_in, a->mla ? 0 : T * a->k_width * f},
        {&a->out, T * c->n_heads * a->v_width * f},
        {&a->index_q, a->sparse ? T * c->index_heads * c->index_dim * f : 0},
        {&a->index_k, a->sparse ? T * c->index_dim * f : 0},
        {&a->index_w, a->sparse ? T * c->index_heads * f : 0},
        {&a->select, a->sparse ? T * c->index_topk * sizeof(int32_t) : 0},
        {&a->cosines, T * (c->rope.dim / 2) * f},
        {&a->sines, T * (c->rope.dim / 2) * f},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i].bytes) NB_TRY(nbi_gate_buffer_open(g, parts[i].at, parts[i].bytes, err));
    a->kv = (nbi_kv_layer){.dtype = g->opt->kv_dtype,
                           .latent = a->latent.device,
                           .k = a->k_part.device,
                           .v = a->v_part.device,
                           .index_k = a->index_part.device};
    return NB_OK;
}

static nb_status open_host(attention *a, nb_error *err)
{
    const nbi_config *c = a->c;
    const size_t T = a->rows, f = sizeof(float), i32 = sizeof(int32_t);
    const size_t n = (size_t)a->n_pages * NBI_PAGE_TOKENS;
    const struct {
        void *at; /* address of a pointer in *a */
        size_t bytes;
    } parts[] = {{&a->raw_q, T * c->n_heads * a->q_width * f},
                 {&a->raw_kv, T * a->k_width * f},
                 {&a->raw_v, T * a->k_width * f},
                 {&a->raw_index_k, T * c->index_dim * f},
                 {&a->norm_a, a->q_width * f + c->kv_lora * f},
                 {&a->norm_b, a->q_width * f},
                 {&a->index_norm, c->index_dim * f},
                 {&a->index_bias, c->index_dim * f},
                 {&a->ids, T * i32},
                 {&a->pos, T * i32},
                 {&a->seq, T * i32},
                 {&a->fault, T * i32},
                 {&a->logit_rows, SEQS * i32},
                 {&a->first, (SEQS + 1) * i32},
                 {&a->len, SEQS * i32},
                 {&a->pages, SEQS * a->stride * i32},
                 {&a->scores, n * sizeof(double)},
                 {&a->values, (2 * (size_t)a->k_width + a->q_width + a->v_width + c->index_dim) *
                                  sizeof(double)},
                 {&a->row, ((size_t)c->kv_lora + 1) * f},
                 {&a->vector, ((size_t)a->k_width + c->index_dim) * f}};
    nbi_plan plan = {0};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) nbi_plan_add(&plan, parts[i].bytes);
    a->block = nbi_calloc(1, plan.bytes);
    if (!a->block) return nbi_fail(err, NB_NO_MEMORY, "check: out of memory");
    plan.bytes = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        *(void **)parts[i].at = (char *)a->block + nbi_plan_add(&plan, parts[i].bytes);
    return NB_OK;
}

static void load(attention *a, float *to, const float *from, uint32_t n)
{
    if (from) a->g->b->ops->download(a->g->b, to, from, n * sizeof *to);
}

static void load_norms(attention *a)
{
    const nbi_config *c = a->c;
    const nbi_layer *l = a->layer;
    load(a, a->norm_a, a->mla ? l->mla.kv_a_norm : l->gqa.q_norm,
         a->mla ? c->kv_lora : c->head_dim);
    if (!a->mla) load(a, a->norm_b, l->gqa.k_norm, c->head_dim);
    load(a, a->index_norm, l->indexer.k_norm, a->sparse ? c->index_dim : 0);
    load(a, a->index_bias, l->indexer.k_norm_bias, a->sparse ? c->index_dim : 0);
}

static void close_all(attention *a)
{
    nbi_gate_buffer *all[] = {&a->latent,  &a->k_part, &a->v_part,  &a->index_part, &a->q,
                              &a->kv_in,   &a->v_in,   &a->out,     &a->index_q,    &a->index_k,
                              &a->index_w, &a->select, &a->cosines, &a->sines};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) nbi_gate_buffer_close(a->g, all[i]);
    nbi_free(a->block);
}

/* ---------------------------------------------------------------- a step on the device */

/* The last `rows[s]` positions of sequences of `len[s]` tokens. */
static void set_batch(attention *a, const uint32_t *len, const uint32_t *rows, uint32_t first_seq,
                      uint32_t n_seqs)
{
    uint32_t T = 0, most = 0;
    for (uint32_t s = 0; s < n_seqs; s++) {
        a->first[s] = (int32_t)T;
        a->len[s] = (int32_t)len[s];
        if (len[s] > most) most = len[s];
        for (uint32_t i = 0; i < rows[s]; i++, T++) {
            a->pos[T] = (int32_t)(len[s] - rows[s] + i);
            a->seq[T] = (int32_t)s;
            a->fault[T] = 0;
        }
    }
    a->first[n_seqs] = (int32_t)T;
    a->batch = (nbi_batch){.n_rows = T,
                           .n_seqs = n_seqs,
                           .page_stride = a->stride,
                           .max_len = most,
                           .ids = a->ids,
                           .pos = a->pos,
                           .row_seq = a->seq,
                           .seq_first = a->first,
                           .seq_len = a->len,
                           .page_table = a->pages + (size_t)first_seq * a->stride,
                           .logit_rows = a->logit_rows,
                           .row_fault = a->fault};
}

static void fill_inputs(attention *a)
{
    nbi_gate *g = a->g;
    const nbi_config *c = a->c;
    const size_t T = a->batch.n_rows, f = sizeof(float);
    nbi_gate_fill(g, a->raw_q, T * c->n_heads * a->q_width);
    nbi_gate_fill(g, a->raw_kv, T * a->k_width);
    memcpy(a->q.host, a->raw_q, T * c->n_heads * a->q_width * f);
    memcpy(a->kv_in.host, a->raw_kv, T * a->k_width * f);
    nbi_gate_up(g, &a->q);
    nbi_gate_up(g, &a->kv_in);
    memset(a->out.host, 0xff, a->out.bytes);
    nbi_gate_up(g, &a->out);
    if (!a->mla) {
        nbi_gate_fill(g, a->raw_v, T * a->k_width);
        memcpy(a->v_in.host, a->raw_v, T * a->k_width * f);
        nbi_gate_up(g, &a->v_in);
    }
    if (!a->sparse) return;
    nbi_gate_fill(g, a->raw_index_k, T * c->index_dim);
    memcpy(a->index_k.host, a->raw_index_k, T * c->index_dim * f);
    nbi_gate_fill(g, a->index_q.host, T * c->index_heads * c->index_dim);
    nbi_gate_fill(g, a->index_w.host, T * c->index_heads);
    nbi_gate_up(g, &a->index_k);
    nbi_gate_up(g, &a->index_q);
    nbi_gate_up(g, &a->index_w);
}

static bool selects(const attention *a)
{
    return a->sparse && a->batch.max_len > a->c->index_topk;
}

static void append(attention *a, const nbi_batch *batch, const nbi_rope_rows *rope)
{
    nbi_backend *b = a->g->b;
    const nbi_config *c = a->c;
    if (a->mla)
        b->ops->mla_append(b, &(nbi_mla_append_args){.q = a->q.device,
                                                     .kv = a->kv_in.device,
                                                     .kv_norm = a->layer->mla.kv_a_norm,
                                                     .eps = c->latent_norm_eps,
                                                     .n_heads = c->n_heads,
                                                     .nope_dim = c->nope_dim,
                                                     .rope_dim = c->rope_dim,
                                                     .kv_lora = c->kv_lora,
                                                     .kv_stride = a->k_width,
                                                     .rope = rope,
                                                     .cache = &a->kv,
                                                     .batch = batch});
    else
        b->ops->gqa_append(b, &(nbi_gqa_append_args){.q = a->q.device,
                                                     .k = a->kv_in.device,
                                                     .v = a->v_in.device,
                                                     .q_norm = a->layer->gqa.q_norm,
                                                     .k_norm = a->layer->gqa.k_norm,
                                                     .eps = c->norm_eps,
                                                     .n_heads = c->n_heads,
                                                     .n_kv_heads = c->n_kv_heads,
                                                     .head_dim = c->head_dim,
                                                     .rope = rope,
                                                     .cache = &a->kv,
                                                     .batch = batch});
}

static void choose_positions(attention *a, const nbi_batch *batch, nbi_rope_rows rope)
{
    nbi_backend *b = a->g->b;
    const nbi_config *c = a->c;
    rope.interleaved = c->index_interleaved;
    b->ops->index_append(b, &(nbi_index_append_args){.k = a->index_k.device,
                                                     .norm_weight = a->layer->indexer.k_norm,
                                                     .norm_bias = a->layer->indexer.k_norm_bias,
                                                     .eps = c->index_norm_eps,
                                                     .index_dim = c->index_dim,
                                                     .rope = &rope,
                                                     .cache = &a->kv,
                                                     .batch = batch});
    if (!selects(a)) return;
    b->ops->index_select(b, &(nbi_index_select_args){.select = a->select.device,
                                                     .q = a->index_q.device,
                                                     .w = a->index_w.device,
                                                     .n_heads = c->index_heads,
                                                     .index_dim = c->index_dim,
                                                     .topk = c->index_topk,
                                                     .rope = &rope,
                                                     .cache = &a->kv,
                                                     .batch = batch});
}

static void attend(attention *a, const nbi_batch *batch)
{
    nbi_backend *b = a->g->b;
    const nbi_config *c = a->c;
    if (a->mla)
        b->ops->mla_attend(b, &(nbi_mla_attend_args){.out = a->out.device,
                                                     .q = a->q.device,
                                                     .kv_b = a->layer->mla.kv_b,
                                                     .n_heads = c->n_heads,
                                                     .nope_dim = c->nope_dim,
                                                     .rope_dim = c->rope_dim,
                                                     .kv_lora = c->kv_lora,
                                                     .v_dim = c->v_dim,
                                                     .scale = c->softmax_scale,
                                                     .cache = &a->kv,
                                                     .select = selects(a) ? a->select.device : NULL,
                                                     .select_stride = c->index_topk,
                                                     .batch = batch});
    else
        b->ops->gqa_attend(b, &(nbi_gqa_attend_args){.out = a->out.device,
                                                     .q = a->q.device,
                                                     .n_heads = c->n_heads,
                                                     .n_kv_heads = c->n_kv_heads,
                                                     .head_dim = c->head_dim,
                                                     .scale = c->softmax_scale,
                                                     .cache = &a->kv,
                                                     .batch = batch});
}

static nb_status run_step(attention *a, nb_error *err)
{
    nbi_backend *b = a->g->b;
    const nbi_config *c = a->c;
    const nbi_batch *batch = NULL;
    fill_inputs(a);
    const bool runs = b->ops->step_begin(b, &a->batch, a->g->pass++, &batch);
    NB_ASSERT(runs); /* no pass of the gate is recorded */
    const nbi_rope_rows rope = {.cos = a->cosines.device,
                                .sin = a->sines.device,
                                .dim = c->rope.dim,
                                .interleaved = c->rope.interleaved};
    b->ops->rope_table(b, &(nbi_rope_table_args){.cos = a->cosines.device,
                                                 .sin = a->sines.device,
                                                 .inv_freq = a->g->m->inv_freq,
                                                 .dim = c->rope.dim,
                                                 .factor = (float)c->rope.attention_factor,
                                                 .batch = batch});
    append(a, batch, &rope);
    if (a->sparse) choose_positions(a, batch, rope);
    attend(a, batch);
    NB_TRY(b->ops->step_end(b, err));
    return b->ops->sync(b, err);
}

/* Attention alone, again and again, behind a step of this batch. What it gives is nothing: q is
 * undefined behind the first. */
static nb_status time_attention(attention *a, double *seconds, nb_error *err)
{
    nbi_backend *b = a->g->b;
    const nbi_batch *batch = NULL;
    const bool runs = b->ops->step_begin(b, &a->batch, a->g->pass++, &batch);
    NB_ASSERT(runs);
    attend(a, batch);
    NB_TRY(b->ops->sync(b, err));
    const uint64_t begin = nbi_now_ns();
    for (uint32_t n = 0; n < TIME_CALLS; n++) attend(a, batch);
    NB_TRY(b->ops->sync(b, err));
    *seconds = 1e-9 * (double)(nbi_now_ns() - begin) / TIME_CALLS;
    NB_TRY(b->ops->step_end(b, err));
    return b->ops->sync(b, err);
}

/* ---------------------------------------------------------------- the same in double */

/* What the cache holds of a position in the sequence of a row; until the next call. */
static const float *cached(const attention *a, const nbi_gate_buffer *part,
                           const nbi_kv_shape *shape, uint32_t row, uint32_t pos, uint32_t head)
{
    const int32_t *pages = a->batch.page_table + (size_t)a->seq[row] * a->stride;
    nbi_kv_read(shape, part->host, (size_t)pages[pos / NBI_PAGE_TOKENS], head,
                pos % NBI_PAGE_TOKENS, a->vector);
    return a->vector;
}

static void rotate(const attention *a, double *x, uint32_t pos, bool interleaved)
{
    const uint32_t half = a->c->rope.dim / 2;
    for (uint32_t i = 0; i < half; i++) {
        const double angle = pos * (double)a->g->m->inv_freq[i],
                     cs = cos(angle) * a->c->rope.attention_factor,
                     sn = sin(angle) * a->c->rope.attention_factor;
        double *u = x + (interleaved ? 2 * i : i), *v = x + (interleaved ? 2 * i + 1 : i + half);
        const double p = *u, q = *v;
        *u = p * cs - q * sn;
        *v = q * cs + p * sn;
    }
}

static void norm(double *x, uint32_t n, const float *weight, double eps)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += x[i] * x[i];
    for (uint32_t i = 0; i < n; i++) x[i] = x[i] / sqrt(sum / n + eps) * (double)weight[i];
}

/* How far a code may lie off: half a unit of four bits, or of the smallest codes. Others: 0. */
static double code_slack(const nbi_kv_shape *shape, const double *want, uint32_t i)
{
    if (i >= shape->coded) return 0;
    const uint32_t first = i / NBI_KV_GROUP * NBI_KV_GROUP;
    double most = 0;
    for (uint32_t j = first; j < shape->coded && j < first + NBI_KV_GROUP; j++)
        most = fmax(most, fabs(want[j]));
    return fabs(want[i]) / 16 + most / (448 * 512.0);
}

static double compare_cache(const float *got, const nbi_kv_shape *shape, const double *want)
{
    double most = 0, square = 0;
    for (uint32_t i = 0; i < shape->width; i++) {
        const double d = fabs((double)got[i] - want[i]);
        if (!isfinite(d)) return INFINITY;
        most = fmax(most, d - code_slack(shape, want, i));
        square += want[i] * want[i];
    }
    if (most == 0) return 0;
    return square > 0 ? most / sqrt(square / shape->width) : (double)INFINITY;
}

/* q of a row and head, normed and rotated: what the operators leave of it is not defined. */
static const double *rotated_q(const attention *a, uint32_t t, uint32_t h, double *q)
{
    const nbi_config *c = a->c;
    const float *raw = a->raw_q + ((size_t)t * c->n_heads + h) * a->q_width;
    for (uint32_t i = 0; i < a->q_width; i++) q[i] = (double)raw[i];
    if (!a->mla && a->layer->gqa.q_norm) norm(q, c->head_dim, a->norm_a, (double)c->norm_eps);
    rotate(a, q + (a->mla ? c->nope_dim : 0), (uint32_t)a->pos[t], c->rope.interleaved);
    return q;
}

static double append_error_mla(const attention *a, uint32_t t, double *w)
{
    const nbi_config *c = a->c;
    const float *kv = a->raw_kv + (size_t)t * a->k_width;
    const uint32_t pos = (uint32_t)a->pos[t];
    for (uint32_t i = 0; i < a->k_width; i++) w[i] = (double)kv[i];
    norm(w, c->kv_lora, a->norm_a, (double)c->latent_norm_eps);
    rotate(a, w + c->kv_lora, pos, c->rope.interleaved);
    return compare_cache(cached(a, &a->latent, &a->latent_shape, t, pos, 0), &a->latent_shape, w);
}

static double append_error_gqa(const attention *a, uint32_t t, uint32_t h, double *w)
{
    const nbi_config *c = a->c;
    const uint32_t d = c->head_dim, kv = h / (c->n_heads / c->n_kv_heads),
                   pos = (uint32_t)a->pos[t];
    const size_t k_at = (size_t)t * a->k_width + kv * d;
    const nbi_kv_shape *shape = &a->head_shape;
    for (uint32_t i = 0; i < d; i++) w[i] = (double)a->raw_v[k_at + i];
    double e = compare_cache(cached(a, &a->v_part, shape, t, pos, kv), shape, w);
    for (uint32_t i = 0; i < d; i++) w[i] = (double)a->raw_kv[k_at + i];
    if (a->layer->gqa.k_norm) norm(w, d, a->norm_b, (double)c->norm_eps);
    rotate(a, w, pos, c->rope.interleaved);
    return fmax(e, compare_cache(cached(a, &a->k_part, shape, t, pos, kv), shape, w));
}

static double index_append_error(const attention *a, uint32_t t, double *w)
{
    const nbi_config *c = a->c;
    const uint32_t d = c->index_dim, pos = (uint32_t)a->pos[t];
    double mean = 0, square = 0;
    for (uint32_t i = 0; i < d; i++) mean += (double)a->raw_index_k[(size_t)t * d + i] / d;
    for (uint32_t i = 0; i < d; i++) {
        w[i] = (double)a->raw_index_k[(size_t)t * d + i] - mean;
        square += w[i] * w[i] / d;
    }
    for (uint32_t i = 0; i < d; i++)
        w[i] = w[i] / sqrt(square + (double)c->index_norm_eps) * (double)a->index_norm[i] +
               (double)a->index_bias[i];
    rotate(a, w, pos, c->index_interleaved);
    return compare_cache(cached(a, &a->index_part, &a->index_shape, t, pos, 0), &a->index_shape, w);
}

/* How far a position that was left out lies above one that was chosen, in root mean squares of the
 * scores; infinite when the list is none. */
static double select_error(const attention *a, uint32_t t, double *w)
{
    const nbi_config *c = a->c;
    const uint32_t d = c->index_dim, n = (uint32_t)a->pos[t] + 1,
                   want = nbi_gate_least(n, c->index_topk);
    const float *weight = (const float *)a->index_w.host + (size_t)t * c->index_heads;
    const int32_t *list = (const int32_t *)a->select.host + (size_t)t * c->index_topk;
    double square = 0, out = -INFINITY, in = INFINITY;
    memset(a->scores, 0, n * sizeof *a->scores);
    for (uint32_t h = 0; h < c->index_heads; h++) {
        const float *q = (const float *)a->index_q.host + ((size_t)t * c->index_heads + h) * d;
        for (uint32_t i = 0; i < d; i++) w[i] = (double)q[i];
        rotate(a, w, (uint32_t)a->pos[t], c->index_interleaved);
        for (uint32_t s = 0; s < n; s++) {
            double dot = 0;
            const float *key = cached(a, &a->index_part, &a->index_shape, t, s, 0);
            for (uint32_t i = 0; i < d; i++) dot += w[i] * (double)key[i];
            if (dot > 0) a->scores[s] += (double)weight[h] * dot / sqrt((double)d * c->index_heads);
        }
    }
    for (uint32_t s = 0; s < n; s++) square += a->scores[s] * a->scores[s];
    for (uint32_t i = 0, s = 0; s < n; s++) {
        const bool chosen = i < want && list[i] == (int32_t)s;
        i += chosen;
        if (chosen)
            in = fmin(in, a->scores[s]);
        else
            out = fmax(out, a->scores[s]);
        if (s + 1 == n && i != want) return INFINITY; /* not ascending, doubled or too few */
    }
    if (want < c->index_topk && list[want] != -1) return INFINITY;
    return want < n && out > in ? (out - in) / sqrt(square / n) : 0;
}

/* Positions of row t, one after the other: -1 behind the last. */
static int32_t position(const attention *a, uint32_t t, uint32_t i)
{
    const bool listed = selects(a);
    if (i > (uint32_t)a->pos[t] || (listed && i >= a->c->index_topk)) return -1;
    return listed ? ((const int32_t *)a->select.host)[(size_t)t * a->c->index_topk + i]
                  : (int32_t)i;
}

/* scores[i] -> weights, n of them. */
static void softmax(double *scores, uint32_t n)
{
    double most = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++) most = fmax(most, scores[i]);
    for (uint32_t i = 0; i < n; i++) sum += scores[i] = exp(scores[i] - most);
    for (uint32_t i = 0; i < n; i++) scores[i] /= sum;
}

static double attend_error_mla(const attention *a, uint32_t t, uint32_t h, double *w)
{
    const nbi_config *c = a->c;
    const nbi_matrix *kv_b = &a->layer->mla.kv_b->host;
    const size_t at = (size_t)t * c->n_heads + h;
    double *ql = w, *ol = w + c->kv_lora, *out = ol + c->kv_lora;
    const double *q = rotated_q(a, t, h, out + c->v_dim);
    uint32_t n = 0;
    memset(ql, 0, 2 * (size_t)c->kv_lora * sizeof *ql);
    for (uint32_t i = 0; i < c->nope_dim; i++) {
        nbi_matrix_row(kv_b, h * (c->nope_dim + c->v_dim) + i, a->row);
        for (uint32_t l = 0; l < c->kv_lora; l++) ql[l] += q[i] * (double)a->row[l];
    }
    for (int32_t p; (p = position(a, t, n)) >= 0; n++) {
        const float *latent = cached(a, &a->latent, &a->latent_shape, t, (uint32_t)p, 0);
        double s = 0;
        for (uint32_t l = 0; l < c->kv_lora; l++) s += ql[l] * (double)latent[l];
        for (uint32_t i = 0; i < c->rope_dim; i++)
            s += q[c->nope_dim + i] * (double)latent[c->kv_lora + i];
        a->scores[n] = s * (double)c->softmax_scale;
    }
    softmax(a->scores, n);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t p = (uint32_t)position(a, t, i);
        const float *latent = cached(a, &a->latent, &a->latent_shape, t, p, 0);
        for (uint32_t l = 0; l < c->kv_lora; l++) ol[l] += a->scores[i] * (double)latent[l];
    }
    for (uint32_t i = 0; i < c->v_dim; i++) {
        nbi_matrix_row(kv_b, h * (c->nope_dim + c->v_dim) + c->nope_dim + i, a->row);
        out[i] = 0;
        for (uint32_t l = 0; l < c->kv_lora; l++) out[i] += ol[l] * (double)a->row[l];
    }
    return nbi_gate_error((const float *)a->out.host + at * c->v_dim, out, c->v_dim);
}

static double attend_error_gqa(const attention *a, uint32_t t, uint32_t h, double *out)
{
    const nbi_config *c = a->c;
    const uint32_t d = c->head_dim, kv = h / (c->n_heads / c->n_kv_heads),
                   n = (uint32_t)a->pos[t] + 1;
    const size_t at = ((size_t)t * c->n_heads + h) * d;
    const double *q = rotated_q(a, t, h, out + d);
    for (uint32_t p = 0; p < n; p++) {
        const float *k = cached(a, &a->k_part, &a->head_shape, t, p, kv);
        double s = 0;
        for (uint32_t i = 0; i < d; i++) s += q[i] * (double)k[i];
        a->scores[p] = s * (double)c->softmax_scale;
    }
    softmax(a->scores, n);
    memset(out, 0, d * sizeof *out);
    for (uint32_t p = 0; p < n; p++) {
        const float *v = cached(a, &a->v_part, &a->head_shape, t, p, kv);
        for (uint32_t i = 0; i < d; i++) out[i] += a->scores[p] * (double)v[i];
    }
    return nbi_gate_error((const float *)a->out.host + at, out, d);
}

/* ---------------------------------------------------------------- cases */

static double row_error(const attention *a, uint32_t t)
{
    const nbi_config *c = a->c;
    double error = 0;
    for (uint32_t i = 0; i < HEADS; i++) {
        const uint32_t h = i * (c->n_heads - 1) / (HEADS - 1);
        error = fmax(error, a->mla ? append_error_mla(a, t, a->values)
                                   : append_error_gqa(a, t, h, a->values));
        error = fmax(error, a->mla ? attend_error_mla(a, t, h, a->values)
                                   : attend_error_gqa(a, t, h, a->values));
    }
    if (a->sparse) error = fmax(error, index_append_error(a, t, a->values));
    if (selects(a)) error = fmax(error, select_error(a, t, a->values));
    return error;
}

/* First, last and two rows between, of what the step just run left. */
static double step_error(attention *a)
{
    const uint32_t T = a->batch.n_rows;
    const nbi_gate_buffer *parts[] = {&a->latent, &a->k_part, &a->v_part, &a->index_part, &a->out};
    const size_t width = (size_t)a->c->n_heads * a->v_width;
    double error = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i]->device) nbi_gate_down(a->g, parts[i]);
    if (selects(a)) nbi_gate_down(a->g, &a->select);
    for (size_t i = 0; i < T * width; i++)
        if (!isfinite(((const float *)a->out.host)[i])) return INFINITY;
    for (uint32_t i = 0, last = T; i < 4; i++) {
        const uint32_t t = i * (T - 1) / 3;
        if (t != last) error = fmax(error, row_error(a, t));
        last = t;
    }
    return error;
}

static nbi_gate_result result(const attention *a, const char *phase)
{
    nbi_gate_result r = {
        .kind = "attention", .chosen = true, .supported = true, .bound = nbi_gate_bound(false)};
    snprintf(r.path, sizeof r.path, "%s %s, %s", nbi_attention_path(a->g->b),
             a->sparse ? "sparse"
             : a->mla  ? "latent"
                       : "grouped-query",
             phase);
    snprintf(r.where, sizeof r.where, "layer %u, %u heads, %s cache",
             (uint32_t)(a->layer - a->g->m->layers), a->c->n_heads, nbi_dtype_name(a->kv.dtype));
    return r;
}

/* Positions [begin, end) of sequence `seq` in steps of at most `rows`; the last is checked. */
static nb_status prompt(attention *a, uint32_t seq, uint32_t end, double *error, nb_error *err)
{
    for (uint32_t at = 0; at < end;) {
        const uint32_t n = nbi_gate_least(a->rows, end - at), len = at + n;
        set_batch(a, &len, &n, seq, 1);
        NB_TRY(run_step(a, err));
        at = len;
    }
    *error = fmax(*error, step_error(a));
    return NB_OK;
}

static uint64_t bytes_read(const attention *a, const uint32_t *len)
{
    uint64_t positions = 0;
    for (uint32_t s = 0; s < a->n_seqs; s++)
        positions += selects(a) ? nbi_gate_least(len[s], a->c->index_topk) : len[s];
    uint64_t bytes = positions * (a->mla ? nbi_kv_position_bytes(&a->latent_shape)
                                         : 2 * nbi_kv_position_bytes(&a->head_shape));
    return bytes + (a->mla ? nbi_matrix_bytes(&a->layer->mla.kv_b->host) : 0);
}

static nb_status run_cases(attention *a, uint32_t shorter, uint32_t longer, nb_error *err)
{
    nbi_gate_result r = result(a, "prefill"), d = result(a, "decode");
    r.rows = a->rows;
    r.context = longer;
    if (a->n_seqs > 1) NB_TRY(prompt(a, 0, shorter, &r.error, err));
    NB_TRY(prompt(a, 1, longer, &r.error, err));
    nbi_gate_say(a->g, &r);
    const uint32_t both[SEQS] = {shorter + 1, longer + 1}, rows[SEQS] = {1, 1};
    const uint32_t *len = both + SEQS - a->n_seqs;
    set_batch(a, len, rows, SEQS - a->n_seqs, a->n_seqs);
    NB_TRY(run_step(a, err));
    d.error = step_error(a);
    d.rows = a->n_seqs;
    d.context = longer + 1;
    if (!a->g->opt->brief) {
        NB_TRY(time_attention(a, &d.seconds, err));
        d.bytes = bytes_read(a, len);
    }
    nbi_gate_say(a->g, &d);
    return NB_OK;
}

/* The layer to look at: the first with an index of its own, where there is one. */
static const nbi_layer *pick_layer(const nbi_model *m)
{
    for (uint32_t l = 0; l < m->n_layers; l++)
        if (m->layers[l].full_indexer) return &m->layers[l];
    return &m->layers[0];
}

nb_status nbi_gate_attention(nbi_gate *g, nb_error *err)
{
    const nbi_config *c = &g->m->local;
    attention a = {.g = g, .c = c, .layer = pick_layer(g->m)};
    a.mla = c->attention == NBI_ATTENTION_MLA;
    a.sparse = a.layer->full_indexer;
    a.q_width = a.mla ? c->nope_dim + c->rope_dim : c->head_dim;
    a.v_width = a.mla ? c->v_dim : c->head_dim;
    a.k_width = a.mla ? c->kv_lora + c->rope_dim : c->n_kv_heads * c->head_dim;
    uint32_t longer = g->opt->brief ? LONG_BRIEF : LONG_FULL;
    if (a.sparse && longer < c->index_topk + BEYOND) longer = c->index_topk + BEYOND;
    a.n_seqs = nbi_gate_least(SEQS, nbi_gate_least(g->opt->max_seqs, g->m->ws.max_rows));
    if (!a.n_seqs || g->opt->max_context < 2) return NB_OK; /* nothing can be served */
    if (!c->n_heads) return NB_OK;                          /* other ranks have them */
    longer = nbi_gate_least(longer, g->opt->max_context - 1);
    const uint32_t shorter = nbi_gate_least(CHUNK, longer);
    a.rows = nbi_gate_least(g->m->ws.max_rows, 512);
    a.stride = (longer + NBI_PAGE_TOKENS) / NBI_PAGE_TOKENS;
    a.n_pages = SEQS * a.stride;
    nb_status st = open_host(&a, err);
    if (st == NB_OK) st = open_device(&a, err);
    if (st == NB_OK) {
        for (uint32_t i = 0; i < a.n_pages; i++) a.pages[i] = (int32_t)(a.n_pages - 1 - i);
        load_norms(&a);
        st = run_cases(&a, shorter, longer, err);
    }
    close_all(&a);
    return st;
}
