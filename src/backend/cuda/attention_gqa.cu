/* Grouped-query attention: norm, rotate and append keys and values; attend. Callers: the backend's
 * table. The cache holds rotated, normed keys, [pages][kv heads][64][head_dim]. */
#include "backend/cuda/attention.h"

#define WARPS 4u

struct gqa_append {
    float *q, *k;
    const float *v, *q_norm, *k_norm;
    float eps;
    uint32_t n_heads, n_kv, dim;
    nbi_rope_arg rope;
    void *cache_k, *cache_v;
    bool bf16;
    const int32_t *pos, *row_seq, *page_table;
    uint32_t page_stride;
};

/* A value of a head, normed. */
NBI_DEV float normed(const float *x, const float *weight, float r, uint32_t i)
{
    return weight ? x[i] * r * weight[i] : x[i];
}

/* A warp takes one head of one row: the query heads, then the key heads. */
static __global__ void gqa_append_kernel(gqa_append a)
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
        r = 1.0f / sqrtf(nbi_warp_sum(sum) / (float)a.dim + a.eps);
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
        if (!is_k) continue;
        nbi_kv_store(a.cache_k, at + iu, a.bf16, u);
        nbi_kv_store(a.cache_k, at + iv, a.bf16, v);
    }
    for (uint32_t i = a.rope.dim / 2 * 2 + lane; i < a.dim; i += NBI_WARP) {
        const float y = normed(x, weight, r, i);
        x[i] = y;
        if (is_k) nbi_kv_store(a.cache_k, at + i, a.bf16, y);
    }
    const float *v = a.v + (t * a.n_kv + kv) * a.dim;
    for (uint32_t i = lane; is_k && i < a.dim; i += NBI_WARP)
        nbi_kv_store(a.cache_v, at + i, a.bf16, v[i]);
}

void nbi_cuda_gqa_append(nbi_backend *b, const nbi_gqa_append_args *args)
{
    nbi_cuda *c = nbi_cuda_of(b);
    const nbi_batch *batch = args->batch;
    NB_ASSERT(args->rope->dim <= args->head_dim);
    if (!batch->n_rows) return;
    const gqa_append a = {.q = static_cast<float *>(args->q),
                          .k = static_cast<float *>(args->k),
                          .v = static_cast<const float *>(args->v),
                          .q_norm = args->q_norm,
                          .k_norm = args->k_norm,
                          .eps = args->eps,
                          .n_heads = args->n_heads,
                          .n_kv = args->n_kv_heads,
                          .dim = args->head_dim,
                          .rope = nbi_rope_of(args->rope),
                          .cache_k = args->cache->k,
                          .cache_v = args->cache->v,
                          .bf16 = args->cache->dtype == NBI_BF16,
                          .pos = batch->pos,
                          .row_seq = batch->row_seq,
                          .page_table = batch->page_table,
                          .page_stride = batch->page_stride};
    nbi_launch(&c->rt, dim3(nbi_ceil_div(a.n_heads + a.n_kv, WARPS), batch->n_rows),
               dim3(WARPS * NBI_WARP), 0, gqa_append_kernel, a);
}

void nbi_cuda_gqa_attend(nbi_backend *b, const nbi_gqa_attend_args *args)
{
    nbi_cuda *c = nbi_cuda_of(b);
    const nbi_batch *batch = args->batch;
    const size_t dim = args->head_dim, row = args->n_heads * dim;
    NB_ASSERT(args->n_heads % args->n_kv_heads == 0);
    const nbi_cuda_attend a = {.q = static_cast<const float *>(args->q),
                               .out = static_cast<float *>(args->out),
                               .k = args->cache->k,
                               .v = args->cache->v,
                               .bf16 = args->cache->dtype == NBI_BF16,
                               .q_row = row,
                               .q_head = dim,
                               .out_row = row,
                               .out_head = dim,
                               .kv_page = args->n_kv_heads * NBI_PAGE_TOKENS * dim,
                               .kv_head = NBI_PAGE_TOKENS * dim,
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
    nbi_cuda_attend_run(c, &a);
}
