/* Grouped-query attention: norm, rotate and append keys and values; attend. Callers: the backend's
 * table. The cache holds rotated, normed keys (kv_shape.h). */
#include "backend/cuda/attend.h"

#define WARPS 4u

/* A value of a head, normed. */
NBI_DEV float normed(const float *x, const float *weight, float r, uint32_t i)
{
    return weight ? x[i] * r * weight[i] : x[i];
}

/* A key that is done, and its value, as codes. */
NBI_DEV void append_codes(const nbi_gqa_append &a, size_t t, uint32_t kv)
{
    const uint32_t p = (uint32_t)a.pos[t], slot = p % NBI_PAGE_TOKENS;
    const size_t head = nbi_kv_page(a.page_table, a.page_stride, a.row_seq[t], p) * a.shape.page +
                        (size_t)kv * a.shape.head;
    const size_t at = head + slot * a.shape.slot;
    const size_t scales = head + a.shape.scales + slot * a.shape.scale_slot;
    __syncwarp(); /* other lanes wrote parts of the key */
    for (int is_v = 0; is_v < 2; is_v++) {
        const float *x = (is_v ? a.v : a.k) + (t * a.n_kv + kv) * a.dim;
        uint8_t *to = static_cast<uint8_t *>(is_v ? a.cache_v : a.cache_k);
        nbi_codes_store(to + at, reinterpret_cast<float *>(to + scales), a.dim, 0, 1,
                        [=](uint32_t i) { return x[i]; });
    }
}

/* A warp takes one head of one row: the query heads, then the key heads. */
static __global__ void gqa_append_kernel(nbi_gqa_append a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t head = blockIdx.x * WARPS + threadIdx.x / NBI_WARP, lane = nbi_lane();
    const size_t t = blockIdx.y;
    if (head >= a.n_heads + a.n_kv) return;
    const bool is_k = head >= a.n_heads;
    const uint32_t kv = head - a.n_heads;
    float *x = is_k ? a.k + (t * a.n_kv + kv) * a.dim : a.q + (t * a.n_heads + head) * a.dim;
    const float *weight = is_k ? a.k_norm : a.q_norm;
    float r = 1;
    if (weight) {
        float sum = 0;
        for (uint32_t i = lane; i < a.dim; i += NBI_WARP) sum = fmaf(x[i], x[i], sum);
        r = nbi_gqa_factor(sum, a.dim, a.eps);
    }
    size_t at = 0;
    if (is_k) {
        const uint32_t p = (uint32_t)a.pos[t];
        const size_t page = nbi_kv_page(a.page_table, a.page_stride, a.row_seq[t], p);
        at = ((page * a.n_kv + kv) * NBI_PAGE_TOKENS + p % NBI_PAGE_TOKENS) * a.dim;
    }
    for (uint32_t i = lane; i < a.rope.dim / 2; i += NBI_WARP) {
        uint32_t iu, iv;
        nbi_rope_pair(a.rope, i, &iu, &iv);
        float u = normed(x, weight, r, iu), v = normed(x, weight, r, iv);
        nbi_rope_turn(a.rope, t, i, &u, &v);
        x[iu] = u;
        x[iv] = v;
        if (!is_k || a.codes) continue;
        nbi_kv_store(a.cache_k, at + iu, a.bf16, u);
        nbi_kv_store(a.cache_k, at + iv, a.bf16, v);
    }
    for (uint32_t i = a.rope.dim / 2 * 2 + lane; i < a.dim; i += NBI_WARP) {
        const float y = normed(x, weight, r, i);
        x[i] = y;
        if (is_k && !a.codes) nbi_kv_store(a.cache_k, at + i, a.bf16, y);
    }
    if (is_k && a.codes) {
        append_codes(a, t, kv);
        return;
    }
    const float *v = a.v + (t * a.n_kv + kv) * a.dim;
    for (uint32_t i = lane; is_k && i < a.dim; i += NBI_WARP)
        nbi_kv_store(a.cache_v, at + i, a.bf16, v[i]);
}

static nbi_gqa_append append_of(const nbi_cuda_waiting *w)
{
    const nbi_gqa_append_args *args = &w->gqa;
    const nbi_batch *batch = args->batch;
    return {.q = static_cast<float *>(args->q),
            .k = static_cast<float *>(args->k),
            .v = static_cast<const float *>(args->v),
            .q_norm = args->q_norm,
            .k_norm = args->k_norm,
            .eps = args->eps,
            .n_heads = args->n_heads,
            .n_kv = args->n_kv_heads,
            .dim = args->head_dim,
            .rope = nbi_rope_of(&w->rope),
            .cache_k = w->cache.k,
            .cache_v = w->cache.v,
            .bf16 = w->cache.dtype != NBI_F32,
            .codes = w->cache.dtype == NBI_F8_E4M3,
            .shape = nbi_kv_head_shape(w->cache.dtype, args->n_kv_heads, args->head_dim),
            .pos = batch->pos,
            .row_seq = batch->row_seq,
            .page_table = batch->page_table,
            .page_stride = batch->page_stride};
}

void nbi_cuda_gqa_append_now(nbi_cuda *c)
{
    const nbi_gqa_append a = append_of(&c->waiting);
    const uint32_t T = c->waiting.gqa.batch->n_rows;
    nbi_launch(&c->rt, dim3(nbi_ceil_div(a.n_heads + a.n_kv, WARPS), T), dim3(WARPS * NBI_WARP), 0,
               gqa_append_kernel, a);
}

/* Waits for the attention behind it. */
void nbi_cuda_gqa_append(nbi_backend *b, const nbi_gqa_append_args *args)
{
    nbi_cuda *c = nbi_cuda_of(b);
    NB_ASSERT(args->rope->dim <= args->head_dim);
    if (!args->batch->n_rows) return;
    c->waiting.what = NBI_CUDA_WAITS_GQA;
    c->waiting.gqa = *args;
    c->waiting.rope = *args->rope;
    c->waiting.cache = *args->cache;
}

/* Whether what waits is the append of this very call, one row a sequence. */
static bool goes_along(const nbi_cuda_waiting *w, const nbi_gqa_attend_args *args)
{
    return w->what == NBI_CUDA_WAITS_GQA && w->gqa.q == args->q && w->gqa.batch == args->batch &&
           w->gqa.n_heads == args->n_heads && w->gqa.n_kv_heads == args->n_kv_heads &&
           w->gqa.head_dim == args->head_dim && w->cache.k == args->cache->k &&
           w->cache.v == args->cache->v && args->batch->n_rows == args->batch->n_seqs;
}

void nbi_cuda_gqa_attend(nbi_backend *b, const nbi_gqa_attend_args *args)
{
    nbi_cuda *c = nbi_cuda_of(b);
    const nbi_batch *batch = args->batch;
    const size_t dim = args->head_dim, row = args->n_heads * dim;
    const nbi_kv_shape shape = nbi_kv_head_shape(args->cache->dtype, args->n_kv_heads, dim);
    const uint32_t element = nbi_dtype_bits(args->cache->dtype) / 8;
    NB_ASSERT(args->n_heads % args->n_kv_heads == 0);
    const nbi_cuda_attend a = {.q = static_cast<const float *>(args->q),
                               .out = static_cast<float *>(args->out),
                               .k = args->cache->k,
                               .v = args->cache->v,
                               .bf16 = args->cache->dtype != NBI_F32,
                               .codes = args->cache->dtype == NBI_F8_E4M3,
                               .shape = shape,
                               .q_row = row,
                               .q_head = dim,
                               .out_row = row,
                               .out_head = dim,
                               .kv_page = shape.page / element,
                               .kv_head = shape.head / element,
                               .kv_slot = dim,
                               .n_heads = args->n_heads,
                               .n_kv = args->n_kv_heads,
                               .k_width = args->head_dim,
                               .v_width = args->head_dim,
                               .scale = args->scale,
                               .select = NULL,
                               .select_stride = 0,
                               .first = 0,
                               .n_rows = batch->n_rows,
                               .n_seqs = batch->n_seqs,
                               .max_len = batch->max_len,
                               .pos = batch->pos,
                               .row_seq = batch->row_seq,
                               .seq_first = batch->seq_first,
                               .page_table = batch->page_table,
                               .page_stride = batch->page_stride,
                               .partial = static_cast<float *>(c->scratch),
                               .partial_bytes = c->scratch_bytes};
    if (goes_along(&c->waiting, args)) {
        const nbi_gqa_append append = append_of(&c->waiting);
        if (nbi_cuda_attend_few(c, &a, &append)) {
            c->waiting.what = NBI_CUDA_WAITS_NOT;
            return;
        }
    }
    nbi_cuda_flush(c);
    nbi_cuda_attend_run(c, &a);
}
