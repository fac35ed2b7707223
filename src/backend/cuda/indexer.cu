/* DSA lightning indexer: append keys; score all visible keys and choose the topk. Callers: the
 * backend's table.
 *
 * A score depends on its row and position alone; the choice is exact: the topk largest, ties (and
 * -0 against 0) to the lower position, NaN below everything. Scores may be negative. */
#include "backend/cuda/attention.h"

#define APPEND_WARPS 4u
#define POSITIONS    128u /* of a block of scores: one per thread */
#define CHOOSE       1024u
#define GROUP_BYTES  ((size_t)128 << 20) /* scores of the rows of one pass */

/* ---------------------------------------------------------------- append */

struct index_append {
    const float *k, *weight, *bias;
    float eps;
    uint32_t dim;
    nbi_rope_arg rope;
    void *cache;
    bool bf16;
    uint32_t n_rows;
    const int32_t *pos, *row_seq, *page_table;
    uint32_t page_stride;
};

NBI_DEV double warp_sum_double(double x)
{
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(NBI_FULL_MASK, x, d);
    return x;
}

struct layer_norm {
    double mean, r;
};

NBI_DEV float layer_normed(const index_append &a, const float *k, const layer_norm &n, uint32_t i)
{
    return fmaf((float)(((double)k[i] - n.mean) * n.r), a.weight[i], a.bias[i]);
}

/* A warp per row. Keys may lie far from zero, close to each other: mean and variance in double. */
static __global__ void index_append_kernel(index_append a)
{
    nbi_wait_before();
    nbi_let_next();
    const size_t t = blockIdx.x * APPEND_WARPS + threadIdx.x / NBI_WARP;
    const uint32_t lane = nbi_lane();
    if (t >= a.n_rows) return;
    const float *k = a.k + t * a.dim;
    double sum = 0, squares = 0;
    for (uint32_t i = lane; i < a.dim; i += NBI_WARP) sum += (double)k[i];
    layer_norm n;
    n.mean = warp_sum_double(sum) / a.dim;
    for (uint32_t i = lane; i < a.dim; i += NBI_WARP) {
        const double d = (double)k[i] - n.mean;
        squares += d * d;
    }
    n.r = 1.0 / sqrt(warp_sum_double(squares) / a.dim + (double)a.eps);
    const uint32_t p = (uint32_t)a.pos[t];
    const size_t page = nbi_kv_page(a.page_table, a.page_stride, a.row_seq[t], p);
    const size_t at = (page * NBI_PAGE_TOKENS + p % NBI_PAGE_TOKENS) * a.dim;
    for (uint32_t i = lane; i < a.rope.dim / 2; i += NBI_WARP) {
        uint32_t iu, iv;
        nbi_rope_pair(a.rope, i, &iu, &iv);
        float u = layer_normed(a, k, n, iu), v = layer_normed(a, k, n, iv);
        nbi_rope_turn(a.rope, t, i, &u, &v);
        nbi_kv_store(a.cache, at + iu, a.bf16, u);
        nbi_kv_store(a.cache, at + iv, a.bf16, v);
    }
    for (uint32_t i = a.rope.dim / 2 * 2 + lane; i < a.dim; i += NBI_WARP)
        nbi_kv_store(a.cache, at + i, a.bf16, layer_normed(a, k, n, i));
}

void nbi_cuda_index_append(nbi_backend *b, const nbi_index_append_args *args)
{
    nbi_cuda *c = nbi_cuda_of(b);
    const nbi_batch *batch = args->batch;
    NB_ASSERT(args->rope->dim <= args->index_dim);
    if (!batch->n_rows) return;
    const index_append a = {.k = static_cast<const float *>(args->k),
                            .weight = args->norm_weight,
                            .bias = args->norm_bias,
                            .eps = args->eps,
                            .dim = args->index_dim,
                            .rope = nbi_rope_of(args->rope),
                            .cache = args->cache->index_k,
                            .bf16 = args->cache->dtype == NBI_BF16,
                            .n_rows = batch->n_rows,
                            .pos = batch->pos,
                            .row_seq = batch->row_seq,
                            .page_table = batch->page_table,
                            .page_stride = batch->page_stride};
    nbi_launch(&c->rt, dim3(nbi_ceil_div(batch->n_rows, APPEND_WARPS)),
               dim3(APPEND_WARPS * NBI_WARP), 0, index_append_kernel, a);
}

/* ---------------------------------------------------------------- scores */

/* Rows [first, first + n_rows) of the batch. */
struct index_select {
    int32_t *select;
    float *q;
    const float *w;
    uint32_t n_heads, dim, topk;
    nbi_rope_arg rope;
    const void *keys;
    uint32_t first, n_rows;
    const int32_t *pos, *row_seq, *page_table;
    uint32_t page_stride;
    uint32_t *scores; /* [n_rows][stride], sortable */
    uint32_t stride;
};

static __global__ void index_rotate_kernel(index_select a)
{
    nbi_wait_before();
    nbi_let_next();
    const size_t t = blockIdx.y;
    const uint32_t half = a.rope.dim / 2, pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= a.n_heads * half) return;
    float *q = a.q + (t * a.n_heads + pair / half) * a.dim;
    uint32_t iu, iv;
    nbi_rope_pair(a.rope, pair % half, &iu, &iv);
    float u = q[iu], v = q[iv];
    nbi_rope_turn(a.rope, t, pair % half, &u, &v);
    q[iu] = u;
    q[iv] = v;
}

/* Larger float, larger key; NaN as -inf, -0 as 0. */
NBI_DEV uint32_t sortable(float f)
{
    if (!(f == f)) f = -INFINITY;
    const uint32_t u = nbi_bits(f + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* Adds a head's share of a score. NaN stays NaN: of a comparison that fails the sum is kept. */
NBI_DEV float add_head(float score, float dot, float weight)
{
    return fmaf(weight, dot < 0 ? 0 : dot, score);
}

/* A block is POSITIONS positions of one row, a thread one position; any shape. */
template <bool BF16> static __global__ void index_score_kernel(index_select a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t r = blockIdx.y, n = (uint32_t)a.pos[a.first + r] + 1;
    if (n <= a.topk || blockIdx.x * POSITIONS >= n) return;
    float *q = nbi_shared<float>();
    const size_t width = (size_t)a.n_heads * a.dim, t = a.first + r;
    for (size_t i = threadIdx.x; i < width; i += POSITIONS) q[i] = a.q[t * width + i];
    __syncthreads();
    const float dim_scale = (float)(1.0 / sqrt((double)a.dim));
    const float head_scale = (float)(1.0 / sqrt((double)a.n_heads));
    for (uint32_t p = blockIdx.x * POSITIONS + threadIdx.x; p < n; p += gridDim.x * POSITIONS) {
        const size_t page = nbi_kv_page(a.page_table, a.page_stride, a.row_seq[t], p);
        const size_t at = (page * NBI_PAGE_TOKENS + p % NBI_PAGE_TOKENS) * a.dim;
        float score = 0;
        for (uint32_t h = 0; h < a.n_heads; h++) {
            float dot = 0;
            for (uint32_t i = 0; i < a.dim; i++)
                dot = fmaf(q[h * a.dim + i], nbi_kv_load<BF16>(a.keys, at + i), dot);
            score = add_head(score, dot * dim_scale, a.w[t * a.n_heads + h] * head_scale);
        }
        a.scores[(size_t)r * a.stride + p] = sortable(score);
    }
}

/* ---------------------------------------------------------------- selection */

/* Shared by the threads of a row. */
struct choice {
    uint32_t count[2048];
    uint32_t sums[CHOOSE / NBI_WARP];
    uint32_t digit, larger; /* found by the step before */
};

/* Exclusive sum of x over the block's threads; the total into *total. */
NBI_DEV uint32_t block_scan(choice *s, uint32_t x, uint32_t *total)
{
    const uint32_t lane = nbi_lane(), warp = threadIdx.x / NBI_WARP;
    uint32_t sum = x;
    for (uint32_t d = 1; d < NBI_WARP; d *= 2) {
        const uint32_t y = __shfl_up_sync(NBI_FULL_MASK, sum, d);
        if (lane >= d) sum += y;
    }
    if (lane == NBI_WARP - 1) s->sums[warp] = sum;
    __syncthreads();
    uint32_t before = 0, all = 0;
    for (uint32_t w = 0; w < CHOOSE / NBI_WARP; w++) {
        before += w < warp ? s->sums[w] : 0;
        all += s->sums[w];
    }
    __syncthreads();
    *total = all;
    return before + sum - x;
}

/* One digit of the k-th largest key: the largest digit at which, counted from above, k is reached.
 * s->larger counts the keys above it. */
NBI_DEV void find_digit(choice *s, uint32_t k, uint32_t bins)
{
    const uint32_t larger = s->larger;
    /* thread i has the i-th pair of bins from above */
    const uint32_t hi = bins - 1 - 2 * threadIdx.x;
    const bool own = 2 * threadIdx.x < bins;
    const uint32_t c0 = own ? s->count[hi] : 0, c1 = own ? s->count[hi - 1] : 0;
    uint32_t total;
    const uint32_t before = larger + block_scan(s, c0 + c1, &total);
    if (own && before < k && before + c0 + c1 >= k) {
        const bool second = before + c0 < k;
        s->digit = second ? hi - 1 : hi;
        s->larger = second ? before + c0 : before;
    }
    __syncthreads();
}

/* The k-th largest of n keys, digit by digit (11, 11 and 10 bits). */
NBI_DEV uint32_t kth_key(choice *s, const uint32_t *keys, uint32_t n, uint32_t k)
{
    uint32_t prefix = 0, fixed = 0;
    if (threadIdx.x == 0) s->larger = 0;
    for (int d = 0; d < 3; d++) {
        const uint32_t shift = d == 0 ? 21 : d == 1 ? 10 : 0, mask = d < 2 ? 0x7ff : 0x3ff;
        for (uint32_t i = threadIdx.x; i < 2048; i += CHOOSE) s->count[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += CHOOSE)
            if ((keys[i] & fixed) == prefix) atomicAdd(&s->count[keys[i] >> shift & mask], 1u);
        __syncthreads();
        find_digit(s, k, mask + 1);
        prefix |= s->digit << shift;
        fixed |= mask << shift;
    }
    return prefix;
}

/* A block per row. */
static __global__ void index_choose_kernel(index_select a)
{
    __shared__ choice s;
    nbi_wait_before();
    nbi_let_next();
    const uint32_t r = blockIdx.x, n = (uint32_t)a.pos[a.first + r] + 1;
    int32_t *out = a.select + (size_t)(a.first + r) * a.topk;
    if (n <= a.topk) {
        for (uint32_t i = threadIdx.x; i < a.topk; i += CHOOSE) out[i] = i < n ? (int32_t)i : -1;
        return;
    }
    const uint32_t *keys = a.scores + (size_t)r * a.stride;
    const uint32_t edge = kth_key(&s, keys, n, a.topk);
    __syncthreads();
    const uint32_t ties = a.topk - s.larger; /* the first of those that equal the edge */
    uint32_t taken = 0, tied = 0;
    for (uint32_t begin = 0; begin < n && taken + (tied < ties ? tied : ties) < a.topk;
         begin += CHOOSE) {
        const uint32_t i = begin + threadIdx.x;
        const bool above = i < n && keys[i] > edge, equal = i < n && keys[i] == edge;
        uint32_t total;
        const uint32_t before = block_scan(&s, (uint32_t)above | (uint32_t)equal << 16, &total);
        const uint32_t tie = tied + (before >> 16), tie_taken = tie < ties ? tie : ties;
        if (above || (equal && tie < ties))
            out[taken + (before & 0xffffu) + tie_taken] = (int32_t)i;
        taken += total & 0xffffu;
        tied += total >> 16;
    }
}

/* ---------------------------------------------------------------- the operator */

static uint32_t score_stride(uint32_t max_len)
{
    return nbi_ceil_div(max_len, NBI_CUDA_LEN_BUCKET) * NBI_CUDA_LEN_BUCKET;
}

size_t nbi_cuda_index_scratch(const nbi_limits *l)
{
    if (!l->index_topk) return 0;
    const size_t row = score_stride(l->max_context) * sizeof(uint32_t), all = l->max_rows * row;
    const size_t most = row > GROUP_BYTES ? row : GROUP_BYTES;
    return all < most ? all : most;
}

static void select_rows(nbi_cuda *c, const index_select *a, bool bf16)
{
    const uint32_t blocks = nbi_ceil_div(a->stride, POSITIONS);
    /* few blocks that find nothing to do when one sequence is long and many are short */
    uint32_t most = 16384u / a->n_rows;
    if (most < 32) most = 32;
    const size_t shared = (size_t)a->n_heads * a->dim * sizeof(float);
    nbi_launch(&c->rt, dim3(blocks < most ? blocks : most, a->n_rows), dim3(POSITIONS), shared,
               bf16 ? index_score_kernel<true> : index_score_kernel<false>, *a);
    nbi_launch(&c->rt, dim3(a->n_rows), dim3(CHOOSE), 0, index_choose_kernel, *a);
}

void nbi_cuda_index_select(nbi_backend *b, const nbi_index_select_args *args)
{
    nbi_cuda *c = nbi_cuda_of(b);
    const nbi_batch *batch = args->batch;
    const uint32_t T = batch->n_rows;
    if (!T) return;
    index_select a = {.select = args->select,
                      .q = static_cast<float *>(args->q),
                      .w = args->w,
                      .n_heads = args->n_heads,
                      .dim = args->index_dim,
                      .topk = args->topk,
                      .rope = nbi_rope_of(args->rope),
                      .keys = args->cache->index_k,
                      .first = 0,
                      .n_rows = T,
                      .pos = batch->pos,
                      .row_seq = batch->row_seq,
                      .page_table = batch->page_table,
                      .page_stride = batch->page_stride,
                      .scores = static_cast<uint32_t *>(c->scratch),
                      .stride = score_stride(batch->max_len)};
    const uint32_t pairs = a.n_heads * (a.rope.dim / 2);
    if (pairs)
        nbi_launch(&c->rt, dim3(nbi_ceil_div(pairs, 256), T), dim3(256), 0, index_rotate_kernel, a);
    const uint32_t most = (uint32_t)(c->scratch_bytes / (a.stride * sizeof(uint32_t)));
    NB_ASSERT(most > 0);
    for (; a.first < T; a.first += a.n_rows) {
        a.n_rows = T - a.first < most ? T - a.first : most;
        if (a.n_rows > 65535) a.n_rows = 65535;
        select_rows(c, &a, args->cache->dtype == NBI_BF16);
    }
}
