/* DSA lightning indexer: append keys; score all visible keys and choose the topk. Callers: the
 * backend's table.
 *
 * A score depends on its row and position alone; the choice is exact: the topk largest, ties (and
 * -0 against 0) to the lower position, NaN below everything. Scores may be negative. */
#include "backend/cuda/attention.h"
#include "backend/cuda/codes.h"

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
    bool bf16, codes;
    nbi_kv_shape shape;
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
    float *row = nbi_shared<float>() + threadIdx.x / NBI_WARP * a.dim; /* of a key to be coded */
    const auto put = [=](uint32_t i, float x) {
        if (a.codes)
            row[i] = x;
        else
            nbi_kv_store(a.cache, at + i, a.bf16, x);
    };
    for (uint32_t i = lane; i < a.rope.dim / 2; i += NBI_WARP) {
        uint32_t iu, iv;
        nbi_rope_pair(a.rope, i, &iu, &iv);
        float u = layer_normed(a, k, n, iu), v = layer_normed(a, k, n, iv);
        nbi_rope_turn(a.rope, t, i, &u, &v);
        put(iu, u);
        put(iv, v);
    }
    for (uint32_t i = a.rope.dim / 2 * 2 + lane; i < a.dim; i += NBI_WARP)
        put(i, layer_normed(a, k, n, i));
    if (!a.codes) return;
    __syncwarp();
    uint8_t *head = static_cast<uint8_t *>(a.cache) + page * a.shape.page;
    const uint32_t slot = p % NBI_PAGE_TOKENS;
    nbi_codes_store(head + slot * a.shape.slot,
                    reinterpret_cast<float *>(head + a.shape.scales + slot * a.shape.scale_slot),
                    a.dim, 0, 1, [=](uint32_t i) { return row[i]; });
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
                            .codes = args->cache->dtype == NBI_F8_E4M3,
                            .shape = nbi_kv_head_shape(args->cache->dtype, 1, args->index_dim),
                            .n_rows = batch->n_rows,
                            .pos = batch->pos,
                            .row_seq = batch->row_seq,
                            .page_table = batch->page_table,
                            .page_stride = batch->page_stride};
    nbi_launch(&c->rt, dim3(nbi_ceil_div(batch->n_rows, APPEND_WARPS)),
               dim3(APPEND_WARPS * NBI_WARP), a.codes ? APPEND_WARPS * a.dim * sizeof(float) : 0,
               index_append_kernel, a);
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
    nbi_kv_shape shape;
    uint32_t first, n_rows;
    const int32_t *pos, *row_seq, *seq_first, *page_table;
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
template <int TYPE> static __global__ void index_score_kernel(index_select a)
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
        const uint32_t slot = p % NBI_PAGE_TOKENS;
        size_t at = (page * NBI_PAGE_TOKENS + slot) * a.dim, scales = 0;
        if (TYPE == NBI_CACHE_CODES) {
            at = page * a.shape.page + slot * a.shape.slot;
            scales = page * a.shape.page + a.shape.scales + slot * a.shape.scale_slot;
        }
        float score = 0;
        for (uint32_t h = 0; h < a.n_heads; h++) {
            float dot = 0;
            for (uint32_t i = 0; i < a.dim; i++)
                dot =
                    fmaf(q[h * a.dim + i], nbi_kv_value<TYPE>(a.shape, a.keys, at, scales, i), dot);
            score = add_head(score, dot * dim_scale, a.w[t * a.n_heads + h] * head_scale);
        }
        a.scores[(size_t)r * a.stride + p] = sortable(score);
    }
}

/* ---------------------------------------------------------------- scores by matrix units */

#define MMA_DIM     128
#define MMA_ROW     (MMA_DIM + 8) /* rows in shared memory 16 bytes further apart: no conflicts */
#define MMA_WARPS   4
#define MMA_THREADS (MMA_WARPS * NBI_WARP)
#define MMA_HEADS   64 /* at most */
#define MMA_GROUP   8u /* rows of a sequence that share a block's keys */

static_assert(MMA_WARPS * 32 == POSITIONS, "a warp has 32 positions");

struct score_memory {
    uint16_t keys[POSITIONS][MMA_ROW];
    uint16_t q_hi[MMA_HEADS][MMA_ROW], q_lo[MMA_HEADS][MMA_ROW];
    float w[MMA_HEADS];
};

/* The block's keys on their way to shared memory; zeros from position n on. */
NBI_DEV void load_keys(const index_select &a, score_memory *s, int32_t seq, uint32_t begin,
                       uint32_t n)
{
    const uint16_t *keys = static_cast<const uint16_t *>(a.keys);
    for (uint32_t i = threadIdx.x; i < POSITIONS * (MMA_DIM / 8); i += MMA_THREADS) {
        const uint32_t row = i / (MMA_DIM / 8), c = i % (MMA_DIM / 8) * 8, p = begin + row;
        size_t at = 0;
        if (p < n)
            at = (nbi_kv_page(a.page_table, a.page_stride, seq, p) * NBI_PAGE_TOKENS +
                  p % NBI_PAGE_TOKENS) *
                     MMA_DIM +
                 c;
        nbi_copy_async(&s->keys[row][c], keys + at, p < n);
    }
    nbi_copy_commit();
}

#define CODE_CHUNKS (MMA_DIM / 16)

/* The same of a cache of codes, in BF16 when all is done. */
NBI_DEV void load_code_keys(const index_select &a, score_memory *s, int32_t seq, uint32_t begin,
                            uint32_t n)
{
    const uint8_t *keys = static_cast<const uint8_t *>(a.keys);
    for (uint32_t i = threadIdx.x; i < POSITIONS * CODE_CHUNKS; i += MMA_THREADS) {
        const uint32_t row = i / CODE_CHUNKS, c = i % CODE_CHUNKS * 16, p = begin + row;
        const uint8_t *page = keys;
        if (p < n) page += nbi_kv_page(a.page_table, a.page_stride, seq, p) * a.shape.page;
        const int slot = p % NBI_PAGE_TOKENS;
        nbi_codes_copy<MMA_DIM>(s->keys[row], c, page + slot * MMA_DIM, page + a.shape.scales, slot,
                                p < n);
    }
    nbi_copy_commit();
    nbi_copy_wait<0>();
    for (uint32_t i = threadIdx.x; i < POSITIONS * CODE_CHUNKS; i += MMA_THREADS) {
        uint16_t *const rows[1] = {s->keys[i / CODE_CHUNKS]};
        const int slot[1] = {(int)(i / CODE_CHUNKS)};
        nbi_codes_decode<MMA_DIM>(rows, slot, i % CODE_CHUNKS * 16);
    }
}

/* Row t's queries in two BF16 halves, and its weights. */
NBI_DEV void load_index_queries(const index_select &a, score_memory *s, size_t t, float head_scale)
{
    const float *q = a.q + t * a.n_heads * MMA_DIM;
    for (uint32_t i = threadIdx.x; i < a.n_heads * (MMA_DIM / 2); i += MMA_THREADS) {
        const uint32_t h = i / (MMA_DIM / 2), c = i % (MMA_DIM / 2) * 2;
        const nbi_f32x2 x = *reinterpret_cast<const nbi_f32x2 *>(q + h * MMA_DIM + c);
        nbi_halves(x.v[0], x.v[1], reinterpret_cast<uint32_t *>(&s->q_hi[h][c]),
                   reinterpret_cast<uint32_t *>(&s->q_lo[h][c]));
    }
    for (uint32_t h = threadIdx.x; h < a.n_heads; h += MMA_THREADS)
        s->w[h] = a.w[t * a.n_heads + h] * head_scale;
}

/* Scores of the warp's 32 positions (k: their fragments) for one row: lane (g, t) of a quad gets
 * those of positions g, g + 8, g + 16, g + 24. Heads are summed in ascending order inside a lane,
 * then over the quad. */
NBI_DEV void score_row(const index_select &a, const score_memory *s, const uint32_t k[2][8][4],
                       float dim_scale, float score[2][2])
{
    const int lane = nbi_lane(), t = lane & 3;
    score[0][0] = score[0][1] = score[1][0] = score[1][1] = 0;
#pragma unroll 2
    for (uint32_t h = 0; h < a.n_heads; h += 8) {
        float d[2][4] = {};
#pragma unroll
        for (int c = 0; c < 4; c++) {
            uint32_t hi[4], lo[4];
            nbi_ldmatrix(hi, &s->q_hi[h + (lane & 7)][c * 32 + (lane >> 3) * 8]);
            nbi_ldmatrix(lo, &s->q_lo[h + (lane & 7)][c * 32 + (lane >> 3) * 8]);
#pragma unroll
            for (int half_step = 0; half_step < 2; half_step++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    nbi_mma_bf16(d[i], k[i][2 * c + half_step], hi + 2 * half_step);
                    nbi_mma_bf16(d[i], k[i][2 * c + half_step], lo + 2 * half_step);
                }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                score[i][j / 2] =
                    add_head(score[i][j / 2], d[i][j] * dim_scale, s->w[h + 2 * t + j % 2]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            score[i][j] += __shfl_xor_sync(NBI_FULL_MASK, score[i][j], 1);
            score[i][j] += __shfl_xor_sync(NBI_FULL_MASK, score[i][j], 2);
        }
}

/* A block is POSITIONS positions and up to MMA_GROUP rows of one sequence: 128 values per head,
 * keys in BF16 or codes, heads in eights. */
template <bool CODES>
static __global__ void __launch_bounds__(MMA_THREADS) index_score_mma_kernel(index_select a)
{
    nbi_wait_before();
    nbi_let_next();
    score_memory *s = nbi_shared<score_memory>();
    const uint32_t first = a.first + blockIdx.y;
    const int32_t seq = a.row_seq[first];
    const uint32_t seq_begin = (uint32_t)a.seq_first[seq], seq_end = (uint32_t)a.seq_first[seq + 1];
    if ((first - (seq_begin > a.first ? seq_begin : a.first)) % MMA_GROUP) return;
    uint32_t rows = seq_end - first < MMA_GROUP ? seq_end - first : MMA_GROUP;
    if (rows > a.first + a.n_rows - first) rows = a.first + a.n_rows - first;
    const uint32_t n = (uint32_t)a.pos[first + rows - 1] + 1; /* of the longest row */
    if (n <= a.topk) return;
    const float dim_scale = (float)(1.0 / sqrt((double)a.dim));
    const float head_scale = (float)(1.0 / sqrt((double)a.n_heads));
    const int lane = nbi_lane(), warp = threadIdx.x / NBI_WARP;
    for (uint32_t begin = blockIdx.x * POSITIONS; begin < n; begin += gridDim.x * POSITIONS) {
        if (CODES) {
            load_code_keys(a, s, seq, begin, n);
        } else {
            load_keys(a, s, seq, begin, n);
            nbi_copy_wait<0>();
        }
        __syncthreads();
        uint32_t k[2][8][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int c = 0; c < 8; c++)
                nbi_ldmatrix(k[i][c],
                             &s->keys[warp * 32 + i * 16 + (lane & 15)][c * 16 + (lane >> 4) * 8]);
        for (uint32_t r = 0; r < rows; r++) {
            const uint32_t t = first + r, see = (uint32_t)a.pos[t] + 1;
            if (see <= a.topk || see <= begin) continue;
            load_index_queries(a, s, t, head_scale);
            __syncthreads();
            float score[2][2];
            score_row(a, s, k, dim_scale, score);
            uint32_t *out = a.scores + (size_t)(t - a.first) * a.stride;
            for (int i = 0; i < 4; i++) {
                const uint32_t p = begin + warp * 32 + i * 8 + lane / 4;
                if ((lane & 3) == 0 && p < see) out[p] = sortable(score[i / 2][i % 2]);
            }
            __syncthreads();
        }
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
#pragma unroll 2
        for (uint32_t i = 4 * threadIdx.x; i < n; i += 4 * CHOOSE) {
            const nbi_u32x4 x = *reinterpret_cast<const nbi_u32x4 *>(keys + i);
#pragma unroll
            for (uint32_t j = 0; j < 4; j++)
                if (i + j < n && (x.v[j] & fixed) == prefix)
                    atomicAdd(&s->count[x.v[j] >> shift & mask], 1u);
        }
        __syncthreads();
        find_digit(s, k, mask + 1);
        prefix |= s->digit << shift;
        fixed |= mask << shift;
    }
    return prefix;
}

/* A block per row; a thread looks at four neighbouring keys at a time. */
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
         begin += 4 * CHOOSE) {
        const uint32_t i = begin + 4 * threadIdx.x;
        const nbi_u32x4 x =
            i < n ? *reinterpret_cast<const nbi_u32x4 *>(keys + i) : nbi_u32x4{{0, 0, 0, 0}};
        uint32_t own = 0, total; /* above the edge; equal to it, in the high half */
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            if (i + j < n) own += (uint32_t)(x.v[j] > edge) + ((uint32_t)(x.v[j] == edge) << 16);
        const uint32_t before = block_scan(&s, own, &total);
        uint32_t above = taken + (before & 0xffffu), equal = tied + (before >> 16);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            if (i + j >= n || x.v[j] < edge) continue;
            const bool tie = x.v[j] == edge;
            if (!tie || equal < ties) out[above + (equal < ties ? equal : ties)] = (int32_t)(i + j);
            above += !tie;
            equal += tie;
        }
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

static void select_rows(nbi_cuda *c, const index_select *a)
{
    const uint32_t blocks = nbi_ceil_div(a->stride, POSITIONS);
    /* few blocks that find nothing to do when one sequence is long and many are short */
    uint32_t most = 16384u / a->n_rows;
    if (most < 32) most = 32;
    const dim3 grid(blocks < most ? blocks : most, a->n_rows);
    const nbi_dtype dtype = a->shape.dtype;
    const bool codes = dtype == NBI_F8_E4M3;
    if (dtype != NBI_F32 && a->dim == MMA_DIM && a->n_heads % 8 == 0 && a->n_heads <= MMA_HEADS &&
        (uintptr_t)a->keys % 16 == 0)
        nbi_launch(&c->rt, grid, dim3(MMA_THREADS), sizeof(score_memory),
                   codes ? index_score_mma_kernel<true> : index_score_mma_kernel<false>, *a);
    else
        nbi_launch(&c->rt, grid, dim3(POSITIONS), (size_t)a->n_heads * a->dim * sizeof(float),
                   codes               ? index_score_kernel<NBI_CACHE_CODES>
                   : dtype == NBI_BF16 ? index_score_kernel<NBI_CACHE_BF16>
                                       : index_score_kernel<NBI_CACHE_F32>,
                   *a);
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
                      .shape = nbi_kv_head_shape(args->cache->dtype, 1, args->index_dim),
                      .first = 0,
                      .n_rows = T,
                      .pos = batch->pos,
                      .row_seq = batch->row_seq,
                      .seq_first = batch->seq_first,
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
        select_rows(c, &a);
    }
}

/* ---------------------------------------------------------------- lists of an earlier pass */

struct index_reuse {
    int32_t *select;
    const int32_t *from, *list_rows, *pos;
    uint32_t topk;
};

/* A block per row. */
static __global__ void index_reuse_kernel(index_reuse a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t t = blockIdx.x;
    const int32_t *from = a.from ? a.from + (size_t)a.list_rows[t] * a.topk : nullptr;
    int32_t *out = a.select + (size_t)t * a.topk;
    for (uint32_t i = threadIdx.x; i < a.topk; i += CHOOSE) {
        const int32_t at = from ? from[i] : -1;
        out[i] = at >= 0 ? at : (int32_t)i <= a.pos[t] ? (int32_t)i : -1;
    }
}

void nbi_cuda_index_reuse(nbi_backend *b, const nbi_index_reuse_args *args)
{
    nbi_cuda *c = nbi_cuda_of(b);
    const uint32_t T = args->batch->n_rows;
    if (!T) return;
    const index_reuse a = {args->select, args->from, args->batch->list_rows, args->batch->pos,
                           args->topk};
    nbi_launch(&c->rt, dim3(T), dim3(CHOOSE), 0, index_reuse_kernel, a);
}
