/* DSA lightning indexer: append keys; score all visible keys and choose the topk. Callers: the
 * backend's table. */
#include "backend/cuda/codes.h"
#include "backend/cuda/indexer.h"

#define APPEND_WARPS 4u
#define POSITIONS    128u /* of a block of scores: one per thread */
#define CHOOSE       1024u
#define GROUP_BYTES  ((size_t)128 << 20) /* scores of the rows of one pass */

/* ---------------------------------------------------------------- append */

/* A warp per row. */
static __global__ void index_append_kernel(nbi_index_keys a)
{
    nbi_wait_before();
    nbi_let_next();
    const size_t t = blockIdx.x * APPEND_WARPS + threadIdx.x / NBI_WARP;
    if (t >= a.n_rows) return;
    const uint32_t p = (uint32_t)a.pos[t];
    const size_t page = nbi_kv_page(a.page_table, a.page_stride, a.row_seq[t], p);
    const size_t at = (page * NBI_PAGE_TOKENS + p % NBI_PAGE_TOKENS) * a.dim;
    float *row = nbi_shared<float>() + threadIdx.x / NBI_WARP * a.dim; /* of a key to be coded */
    nbi_index_key(a, t, [=](uint32_t i, float x) {
        if (a.codes)
            row[i] = x;
        else
            nbi_kv_store(a.cache, at + i, a.bf16, x);
    });
    if (!a.codes) return;
    __syncwarp();
    uint8_t *head = static_cast<uint8_t *>(a.cache) + page * a.shape.page;
    const uint32_t slot = p % NBI_PAGE_TOKENS;
    nbi_codes_store(head + slot * a.shape.slot,
                    reinterpret_cast<float *>(head + a.shape.scales + slot * a.shape.scale_slot),
                    a.dim, 0, 1, [=](uint32_t i) { return row[i]; });
}

static nbi_index_keys keys_of(const nbi_cuda_index_waiting *w)
{
    const nbi_index_append_args *args = &w->append;
    const nbi_batch *batch = args->batch;
    return {.k = static_cast<const float *>(args->k),
            .weight = args->norm_weight,
            .bias = args->norm_bias,
            .eps = args->eps,
            .dim = args->index_dim,
            .rope = nbi_rope_of(&w->rope),
            .cache = w->cache.index_k,
            .bf16 = w->cache.dtype == NBI_BF16,
            .codes = w->cache.dtype == NBI_F8_E4M3,
            .shape = nbi_kv_head_shape(w->cache.dtype, 1, args->index_dim),
            .n_rows = batch->n_rows,
            .pos = batch->pos,
            .row_seq = batch->row_seq,
            .page_table = batch->page_table,
            .page_stride = batch->page_stride};
}

static void append_now(nbi_cuda *c)
{
    if (!c->index.appends) return;
    c->index.appends = false;
    const nbi_index_keys a = keys_of(&c->index);
    nbi_launch(&c->rt, dim3(nbi_ceil_div(a.n_rows, APPEND_WARPS)), dim3(APPEND_WARPS * NBI_WARP),
               a.codes ? APPEND_WARPS * a.dim * sizeof(float) : 0, index_append_kernel, a);
}

/* Waits for the choice behind it, beside an append of MLA that does. */
void nbi_cuda_index_append(nbi_backend *b, const nbi_index_append_args *args)
{
    nbi_cuda *c = nbi_cuda_of(b);
    NB_ASSERT(args->rope->dim <= args->index_dim);
    nbi_cuda_products_now(c);
    if (c->index.appends || c->index.selects) nbi_cuda_index_now(c);
    if (!args->batch->n_rows) return;
    c->index.appends = true;
    c->index.append = *args;
    c->index.rope = *args->rope;
    c->index.cache = *args->cache;
}

/* ---------------------------------------------------------------- scores */

static __global__ void index_rotate_kernel(nbi_index_rows a)
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

/* A block is POSITIONS positions of one row, a thread one position; any shape. */
template <int TYPE> static __global__ void index_score_kernel(nbi_index_rows a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t r = blockIdx.y, n = (uint32_t)a.pos[a.first + r] + 1;
    if (n <= a.topk || blockIdx.x * POSITIONS >= n) return;
    float *q = nbi_shared<float>();
    const size_t width = (size_t)a.n_heads * a.dim, t = a.first + r;
    for (size_t i = threadIdx.x; i < width; i += POSITIONS) q[i] = a.q[t * width + i];
    __syncthreads();
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
            score =
                nbi_index_add_head(score, dot * a.dim_scale, a.w[t * a.n_heads + h] * a.head_scale);
        }
        a.scores[(size_t)r * a.stride + p] = nbi_index_sortable(score);
    }
}

/* ---------------------------------------------------------------- scores by matrix units */

#define MMA_WARPS   4
#define MMA_THREADS (MMA_WARPS * NBI_WARP)
#define MMA_HEADS   64 /* at most */
#define MMA_GROUP   8u /* rows of a sequence that share a block's keys */

static_assert(MMA_WARPS * 32 == POSITIONS, "a warp has 32 positions");

struct score_memory {
    uint16_t keys[POSITIONS][NBI_INDEX_ROW];
    uint16_t q_hi[MMA_HEADS][NBI_INDEX_ROW], q_lo[MMA_HEADS][NBI_INDEX_ROW];
    float w[MMA_HEADS];
};

/* The block's keys on their way to shared memory; zeros from position n on. */
NBI_DEV void load_keys(const nbi_index_rows &a, score_memory *s, int32_t seq, uint32_t begin,
                       uint32_t n)
{
    const uint16_t *keys = static_cast<const uint16_t *>(a.keys);
    for (uint32_t i = threadIdx.x; i < POSITIONS * (NBI_INDEX_DIM / 8); i += MMA_THREADS) {
        const uint32_t row = i / (NBI_INDEX_DIM / 8), c = i % (NBI_INDEX_DIM / 8) * 8,
                       p = begin + row;
        size_t at = 0;
        if (p < n)
            at = (nbi_kv_page(a.page_table, a.page_stride, seq, p) * NBI_PAGE_TOKENS +
                  p % NBI_PAGE_TOKENS) *
                     NBI_INDEX_DIM +
                 c;
        nbi_copy_async(&s->keys[row][c], keys + at, p < n);
    }
    nbi_copy_commit();
}

#define CODE_CHUNKS (NBI_INDEX_DIM / 16)

/* The same of a cache of codes, in BF16 when all is done. */
NBI_DEV void load_code_keys(const nbi_index_rows &a, score_memory *s, int32_t seq, uint32_t begin,
                            uint32_t n)
{
    const uint8_t *keys = static_cast<const uint8_t *>(a.keys);
    for (uint32_t i = threadIdx.x; i < POSITIONS * CODE_CHUNKS; i += MMA_THREADS) {
        const uint32_t row = i / CODE_CHUNKS, c = i % CODE_CHUNKS * 16, p = begin + row;
        const uint8_t *page = keys;
        if (p < n) page += nbi_kv_page(a.page_table, a.page_stride, seq, p) * a.shape.page;
        const int slot = p % NBI_PAGE_TOKENS;
        nbi_codes_copy<NBI_INDEX_DIM>(s->keys[row], c, page + slot * NBI_INDEX_DIM,
                                      page + a.shape.scales, slot, p < n);
    }
    nbi_copy_commit();
    nbi_copy_wait<0>();
    for (uint32_t i = threadIdx.x; i < POSITIONS * CODE_CHUNKS; i += MMA_THREADS) {
        uint16_t *const rows[1] = {s->keys[i / CODE_CHUNKS]};
        const int slot[1] = {(int)(i / CODE_CHUNKS)};
        nbi_codes_decode<NBI_INDEX_DIM>(rows, slot, i % CODE_CHUNKS * 16);
    }
}

/* Row t's queries in two BF16 halves, and its weights. */
NBI_DEV void load_index_queries(const nbi_index_rows &a, score_memory *s, size_t t)
{
    const float *q = a.q + t * a.n_heads * NBI_INDEX_DIM;
    for (uint32_t i = threadIdx.x; i < a.n_heads * (NBI_INDEX_DIM / 2); i += MMA_THREADS) {
        const uint32_t h = i / (NBI_INDEX_DIM / 2), c = i % (NBI_INDEX_DIM / 2) * 2;
        const nbi_f32x2 x = *reinterpret_cast<const nbi_f32x2 *>(q + h * NBI_INDEX_DIM + c);
        nbi_halves(x.v[0], x.v[1], reinterpret_cast<uint32_t *>(&s->q_hi[h][c]),
                   reinterpret_cast<uint32_t *>(&s->q_lo[h][c]));
    }
    for (uint32_t h = threadIdx.x; h < a.n_heads; h += MMA_THREADS)
        s->w[h] = a.w[t * a.n_heads + h] * a.head_scale;
}

/* Scores of the warp's 32 positions (k: their fragments) for one row: lane (g, t) of a quad gets
 * those of positions g, g + 8, g + 16, g + 24. Heads are summed in ascending order inside a lane,
 * then over the quad. */
NBI_DEV void score_row(const nbi_index_rows &a, const score_memory *s, const uint32_t k[2][8][4],
                       float score[2][2])
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
                score[i][j / 2] = nbi_index_add_head(score[i][j / 2], d[i][j] * a.dim_scale,
                                                     s->w[h + 2 * t + j % 2]);
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
static __global__ void __launch_bounds__(MMA_THREADS) index_score_mma_kernel(nbi_index_rows a)
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
            load_index_queries(a, s, t);
            __syncthreads();
            float score[2][2];
            score_row(a, s, k, score);
            uint32_t *out = a.scores + (size_t)(t - a.first) * a.stride;
            for (int i = 0; i < 4; i++) {
                const uint32_t p = begin + warp * 32 + i * 8 + lane / 4;
                if ((lane & 3) == 0 && p < see) out[p] = nbi_index_sortable(score[i / 2][i % 2]);
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
static __global__ void index_choose_kernel(nbi_index_rows a)
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
        uint32_t total;
        const uint32_t before = block_scan(&s, nbi_index_taken(x, i, n, edge), &total);
        nbi_index_list(out, x, i, n, edge, ties, taken + (before & 0xffffu), tied + (before >> 16));
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
    return (all < most ? all : most) + nbi_index_row_scratch(l);
}

static void select_rows(nbi_cuda *c, const nbi_index_rows *a)
{
    const uint32_t blocks = nbi_ceil_div(a->stride, POSITIONS);
    /* few blocks that find nothing to do when one sequence is long and many are short */
    uint32_t most = 16384u / a->n_rows;
    if (most < 32) most = 32;
    const dim3 grid(blocks < most ? blocks : most, a->n_rows);
    const nbi_dtype dtype = a->shape.dtype;
    const bool codes = dtype == NBI_F8_E4M3;
    if (dtype != NBI_F32 && a->dim == NBI_INDEX_DIM && a->n_heads % 8 == 0 &&
        a->n_heads <= MMA_HEADS && (uintptr_t)a->keys % 16 == 0)
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

/* `used` bytes of the scratch are somebody else's. */
static nbi_index_rows rows_of(const nbi_cuda *c, size_t used)
{
    const nbi_index_select_args *args = &c->index.select;
    const nbi_kv_layer *cache = &c->index.select_cache;
    const nbi_batch *batch = args->batch;
    return {.select = args->select,
            .q = static_cast<float *>(args->q),
            .w = args->w,
            .n_heads = args->n_heads,
            .dim = args->index_dim,
            .topk = args->topk,
            .dim_scale = (float)(1.0 / sqrt((double)args->index_dim)),
            .head_scale = (float)(1.0 / sqrt((double)args->n_heads)),
            .rope = nbi_rope_of(&c->index.select_rope),
            .keys = cache->index_k,
            .shape = nbi_kv_head_shape(cache->dtype, 1, args->index_dim),
            .first = 0,
            .n_rows = batch->n_rows,
            .pos = batch->pos,
            .row_seq = batch->row_seq,
            .seq_first = batch->seq_first,
            .page_table = batch->page_table,
            .page_stride = batch->page_stride,
            .scores = reinterpret_cast<uint32_t *>(static_cast<char *>(c->scratch) + used),
            .stride = score_stride(batch->max_len),
            .room = c->scratch_bytes > used ? c->scratch_bytes - used : 0};
}

/* What waits as one launch. launch: false only asks. */
static bool select_few(nbi_cuda *c, const nbi_mla_product *absorb, const nbi_mla_rows *latents,
                       size_t used, bool launch)
{
    const nbi_batch *batch = c->index.select.batch;
    const nbi_index_rows a = rows_of(c, used);
    nbi_index_keys keys = {};
    if (c->index.appends) keys = keys_of(&c->index);
    const nbi_index_beside beside = {c->index.appends ? &keys : NULL,
                                     c->index.weighs ? &c->index.weigh : NULL, absorb, latents};
    if (!nbi_index_row_fits(c, &a, batch->n_seqs, &beside)) return false;
    if (!launch) return true;
    c->index.appends = c->index.weighs = c->index.selects = false;
    nbi_index_row_run(c, &a, &beside);
    return true;
}

bool nbi_index_absorb(nbi_cuda *c, const nbi_mla_product *absorb, const nbi_mla_rows *latents,
                      const nbi_batch *batch, size_t used)
{
    return c->index.selects && c->index.select.batch == batch &&
           select_few(c, absorb, latents, used, true);
}

/* Whatever the rows. */
static void select_all(nbi_cuda *c)
{
    nbi_index_rows a = rows_of(c, 0);
    const uint32_t T = a.n_rows, pairs = a.n_heads * (a.rope.dim / 2);
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

void nbi_cuda_index_now(nbi_cuda *c)
{
    if (c->index.selects && select_few(c, NULL, NULL, 0, true)) return;
    nbi_cuda_weigh_now(c);
    append_now(c);
    if (c->index.selects) select_all(c);
    c->index.selects = false;
}

/* Of few rows it waits for MLA's attention behind it, which may do its first product beside it. */
void nbi_cuda_index_select(nbi_backend *b, const nbi_index_select_args *args)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nbi_cuda_products_now(c);
    if (c->index.selects) nbi_cuda_index_now(c);
    if (!args->batch->n_rows) return;
    c->index.selects = true;
    c->index.select = *args;
    c->index.select_rope = *args->rope;
    c->index.select_cache = *args->cache;
    if (c->waiting.what != NBI_CUDA_WAITS_MLA || !select_few(c, NULL, NULL, 0, false))
        nbi_cuda_index_now(c);
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
