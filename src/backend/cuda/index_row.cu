/* The indexer of decoded rows as one launch: keys appended, heads weighed, positions scored, the
 * topk chosen. The same lists as by the operators one after the other. Callers: indexer.cu.
 *
 * Blocks of a row, in this order: those that multiply the heads' weights, chunk sums to memory as
 * linear_exact.cu makes them; those of POSITIONS positions each, which add these up and score; the
 * last of them to be done chooses. A block waits for blocks of a lower index only. */
#include "backend/cuda/cuda_linear.h"
#include "backend/cuda/indexer.h"

#define WARPS     8u
#define THREADS   (WARPS * NBI_WARP)
#define POSITIONS (WARPS * 16u)
#define ROWS      8u     /* at most */
#define MOST      16384u /* positions */
#define BINS      2048u
#define OWN_BINS  (BINS / THREADS)
#define PADDED    (4u * THREADS)
#define FEW       1024u /* keys of a bin that are ranked by comparing all with all */
#define STEPS     (NBI_CHUNK_COLS / 16)

struct row_work {
    nbi_index_rows a;
    nbi_index_keys append;
    nbi_linear_call weigh;
    bool appends;
    nbi_mla_product absorb;
    nbi_mla_rows latents;
    uint32_t absorbers; /* blocks that absorb and append latents, once for all rows; or 0 */
    uint32_t producers; /* blocks of a row that weigh; 0: a.w is there */
    uint32_t n_chunks;  /* of a product that weighs */
    nbi_divisor chunks, columns; /* by n_chunks; by the blocks of a head that absorb */
    float *parts;                /* [row][chunk][n_rt * 16] */
    uint32_t *ready, *arrived;   /* [row]: blocks; zero between kernels */
};
/* ---------------------------------------------------------------- weights of heads */

/* A warp has a chunk of a row tile, as exact_one_kernel() of linear_exact.cu has it. */
static NBI_DEV void weigh(const row_work &k, uint32_t t)
{
    const uint32_t warp = threadIdx.x / NBI_WARP, lane = (uint32_t)nbi_lane(), quad = lane % 4;
    const nbi_cuda_packed &m = k.weigh.w;
    const uint32_t unit = blockIdx.x * WARPS + warp, rt = nbi_div(unit, k.chunks);
    const uint32_t chunk = nbi_mod(unit, k.chunks), column = chunk * NBI_CHUNK_COLS;
    const bool real = rt < m.n_rt;
    nbi_u32x4 w[STEPS] = {};
    const char *from = static_cast<const char *>(m.data) +
                       ((size_t)rt * m.n_kt + column / NBI_TILE_COLS) * 2048 + lane * 16;
#pragma unroll
    for (uint32_t i = 0; i < STEPS; i++)
        if (real && column + i * 16 < m.cols) w[i] = nbi_load16<true>(from + i * 512);
    nbi_wait_before();
    nbi_let_next();
    if ((uint32_t)k.a.pos[t] < k.a.topk) return;
    float *x = nbi_shared<float>() + warp * NBI_CHUNK_COLS;
#pragma unroll
    for (uint32_t i = 0; i < NBI_CHUNK_COLS; i += 128)
        *reinterpret_cast<nbi_f32x4 *>(x + i + lane * 4) = nbi_x_load(
            k.weigh.x + (size_t)t * k.weigh.x_stride, column + i + lane * 4, m.cols, k.weigh.fast);
    __syncwarp();
    float sum[2] = {0, 0};
#pragma unroll
    for (uint32_t i = 0; i < STEPS; i++) {
        if (column + i * 16 >= m.cols) continue;
        const nbi_f32x4 v = *reinterpret_cast<const nbi_f32x4 *>(x + i * 16 + quad * 4);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t low = w[i].v[j / 2 * 2], high = w[i].v[j / 2 * 2 + 1];
            sum[0] = fmaf(j % 2 ? nbi_bf16_hi(low) : nbi_bf16_lo(low), v.v[j], sum[0]);
            sum[1] = fmaf(j % 2 ? nbi_bf16_hi(high) : nbi_bf16_lo(high), v.v[j], sum[1]);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(NBI_FULL_MASK, sum[i], 1);
        sum[i] += __shfl_xor_sync(NBI_FULL_MASK, sum[i], 2);
        if (real && quad == 0)
            k.parts[((size_t)t * k.n_chunks + chunk) * m.n_rt * NBI_TILE_ROWS + rt * NBI_TILE_ROWS +
                    lane / 4 + 8 * i] = sum[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) nbi_arrive(&k.ready[t]);
}

/* All threads: the heads' weights into w, through `parts` of shared memory. Their products are left
 * in memory by one block. */
static NBI_DEV void take_weights(const row_work &k, uint32_t t, float row_scale, float *w,
                                 float *parts, bool leave)
{
    const uint32_t h = threadIdx.x, rows = k.a.n_heads;
    if (!k.producers) {
        __syncthreads();
        if (h < rows) w[h] = k.a.w[t * rows + h] * k.a.head_scale;
        return;
    }
    if (h == 0)
        while (nbi_arrived(&k.ready[t]) < k.producers) nbi_spin();
    __syncthreads();
    const uint32_t n = k.n_chunks * rows;
    const uint32_t *from = reinterpret_cast<const uint32_t *>(k.parts) + (size_t)t * n;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        parts[i] = nbi_float(nbi_load_fresh(from + i));
    __syncthreads();
    if (h >= rows) return;
    float y = 0;
#pragma unroll 8
    for (uint32_t c = 0; c < k.n_chunks; c++) y += parts[c * rows + h];
    y = fmaf(y, row_scale, 0);
    if (leave) k.weigh.y[(size_t)t * k.weigh.y_stride + h] = y;
    w[h] = y * k.a.head_scale;
}

/* ---------------------------------------------------------------- absorb */

#define COLUMNS (WARPS * 16u) /* of W_UK per block */

/* The first row's blocks: first those of the latents, one each, then those of head and columns. */
static NBI_DEV void absorb(const row_work &k, uint32_t i)
{
    if (blockIdx.y || i < k.absorb.n_rows) {
        if (!blockIdx.y) return nbi_mla_append_latent(k.latents, i, false);
        nbi_wait_before();
        nbi_let_next();
        return;
    }
    const uint32_t j = i - k.absorb.n_rows;
    nbi_mla_absorb<1, true, COLUMNS>(k.absorb, k.latents, nbi_div(j, k.columns),
                                     nbi_mod(j, k.columns) * COLUMNS, 0);
}

/* ---------------------------------------------------------------- scores */

template <int HEADS> struct score_memory {
    uint16_t keys[POSITIONS][NBI_INDEX_ROW];
    uint16_t q_hi[HEADS][NBI_INDEX_ROW], q_lo[HEADS][NBI_INDEX_ROW];
    float w[HEADS];
    float key[NBI_INDEX_DIM]; /* the new one */
};

/* Keys [from, to) of the block's positions on their way to shared memory. */
template <int HEADS>
static NBI_DEV void ask_keys(const nbi_index_rows &a, score_memory<HEADS> *s, int32_t seq,
                             uint32_t begin, uint32_t from, uint32_t to)
{
    for (uint32_t i = threadIdx.x; i < POSITIONS * (NBI_INDEX_DIM / 8); i += THREADS) {
        const uint32_t row = i / (NBI_INDEX_DIM / 8), c = i % (NBI_INDEX_DIM / 8) * 8;
        const uint32_t p = begin + row;
        if (p < from || p >= to) continue;
        const size_t page = nbi_kv_page(a.page_table, a.page_stride, seq, p);
        nbi_copy_async(&s->keys[row][c],
                       static_cast<const uint16_t *>(a.keys) +
                           (page * NBI_PAGE_TOKENS + p % NBI_PAGE_TOKENS) * NBI_INDEX_DIM + c);
    }
    nbi_copy_commit();
}

/* The pair of values of a head that a thread turns. */
struct turn {
    uint32_t iu, iv;
    float cs, sn;
    bool turns;
};

static NBI_DEV turn turn_of(const nbi_rope_arg &r, size_t t, uint32_t pair)
{
    turn x = {2 * pair, 2 * pair + 1, 1, 0, pair < r.dim / 2};
    if (!x.turns) return x;
    nbi_rope_pair(r, pair, &x.iu, &x.iv);
    x.cs = r.cos[t * (r.dim / 2) + pair];
    x.sn = r.sin[t * (r.dim / 2) + pair];
    return x;
}

/* The queries of row t, turned, in two BF16 halves: a thread has one pair of all heads. */
template <int HEADS>
static NBI_DEV void take_queries(const nbi_index_rows &a, score_memory<HEADS> *s, size_t t,
                                 const turn &x)
{
    constexpr uint32_t PAIRS = NBI_INDEX_DIM / 2, EACH = THREADS / PAIRS;
    const uint32_t h0 = threadIdx.x / PAIRS, iu = x.iu, iv = x.iv;
    const float *q = a.q + (t * HEADS + h0) * NBI_INDEX_DIM;
    float u[HEADS / EACH], v[HEADS / EACH];
#pragma unroll
    for (uint32_t i = 0; i < HEADS / EACH; i++) {
        u[i] = q[i * EACH * NBI_INDEX_DIM + iu];
        v[i] = q[i * EACH * NBI_INDEX_DIM + iv];
    }
#pragma unroll
    for (uint32_t i = 0; i < HEADS / EACH; i++) {
        uint32_t hi, lo;
        if (x.turns) nbi_rope_turn_by(x.cs, x.sn, &u[i], &v[i]);
        nbi_halves(u[i], v[i], &hi, &lo);
        const uint32_t h = h0 + i * EACH;
        s->q_hi[h][iu] = (uint16_t)hi;
        s->q_hi[h][iv] = (uint16_t)(hi >> 16);
        s->q_lo[h][iu] = (uint16_t)lo;
        s->q_lo[h][iv] = (uint16_t)(lo >> 16);
    }
}

/* Products of the warp's 16 positions with all heads, in the order of score_row() of indexer.cu. */
template <int HEADS>
static NBI_DEV void multiply(const score_memory<HEADS> *s, float d[HEADS / 8][4])
{
    const int lane = nbi_lane(), warp = (int)(threadIdx.x / NBI_WARP);
    uint32_t key[8][4];
#pragma unroll
    for (int c = 0; c < 8; c++)
        nbi_ldmatrix(key[c], &s->keys[warp * 16 + (lane & 15)][c * 16 + (lane >> 4) * 8]);
#pragma unroll
    for (int h = 0; h < HEADS / 8; h++) {
        d[h][0] = d[h][1] = d[h][2] = d[h][3] = 0;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            uint32_t hi[4], lo[4];
            nbi_ldmatrix(hi, &s->q_hi[8 * h + (lane & 7)][c * 32 + (lane >> 3) * 8]);
            nbi_ldmatrix(lo, &s->q_lo[8 * h + (lane & 7)][c * 32 + (lane >> 3) * 8]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                nbi_mma_bf16(d[h], key[2 * c + i], hi + 2 * i);
                nbi_mma_bf16(d[h], key[2 * c + i], lo + 2 * i);
            }
        }
    }
}

/* Heads in ascending order inside a lane, then over the quad. */
template <int HEADS>
static NBI_DEV void put_scores(const row_work &k, const score_memory<HEADS> *s,
                               const float d[HEADS / 8][4], uint32_t t, uint32_t begin, uint32_t n)
{
    const int lane = nbi_lane();
    float score[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < HEADS / 8; h++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            score[j / 2] = nbi_index_add_head(score[j / 2], d[h][j] * k.a.dim_scale,
                                              s->w[8 * h + 2 * (lane & 3) + j % 2]);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        score[i] += __shfl_xor_sync(NBI_FULL_MASK, score[i], 1);
        score[i] += __shfl_xor_sync(NBI_FULL_MASK, score[i], 2);
        const uint32_t p = begin + threadIdx.x / NBI_WARP * 16 + i * 8 + (uint32_t)lane / 4;
        if ((lane & 3) == 0 && p < n)
            k.a.scores[(size_t)t * k.a.stride + p] = nbi_index_sortable(score[i]);
    }
}

/* ---------------------------------------------------------------- the choice */

struct choice {
    alignas(16) uint32_t count[BINS];
    uint32_t few[FEW];
    uint32_t sums[WARPS];
    uint32_t lowest[WARPS], highest[WARPS];
    uint32_t bin, larger, n_few; /* found by the step before */
    uint32_t edge, ties;
    bool all;                     /* keys that equal the edge are taken */
    alignas(16) uint32_t keys[4]; /* [n, to a multiple of PADDED]; 0 behind the last */
};

/* f(four keys) of all keys; 0 is none. Few warps wait for what they look at: four at a time. */
template <class F> static NBI_DEV void each_four(const choice *s, uint32_t padded, const F &f)
{
#pragma unroll 2
    for (uint32_t i = 4 * threadIdx.x; i < padded; i += PADDED)
        f(*reinterpret_cast<const nbi_u32x4 *>(s->keys + i));
}

/* Exclusive sum of x over the block's threads. */
static NBI_DEV uint32_t block_scan(choice *s, uint32_t x)
{
    const uint32_t lane = (uint32_t)nbi_lane(), warp = threadIdx.x / NBI_WARP;
    uint32_t sum = x;
#pragma unroll
    for (uint32_t d = 1; d < NBI_WARP; d *= 2) {
        const uint32_t y = __shfl_up_sync(NBI_FULL_MASK, sum, d);
        if (lane >= d) sum += y;
    }
    if (lane == NBI_WARP - 1) s->sums[warp] = sum;
    __syncthreads();
    uint32_t before = 0;
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++) before += w < warp ? s->sums[w] : 0;
    return before + sum - x;
}

static NBI_DEV void clear_bins(choice *s)
{
#pragma unroll
    for (uint32_t i = 0; i < OWN_BINS; i++) s->count[i * THREADS + threadIdx.x] = 0;
}

/* The largest bin at which, counted from above behind s->larger, k is reached. A barrier before. */
static NBI_DEV void find_bin(choice *s, uint32_t k)
{
    const uint32_t larger = s->larger, top = BINS - 1 - OWN_BINS * threadIdx.x;
    uint32_t own[OWN_BINS], sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < OWN_BINS; i++) sum += own[i] = s->count[top - i];
    uint32_t before = larger + block_scan(s, sum);
    if (before < k && before + sum >= k) {
#pragma unroll
        for (uint32_t i = 0; i < OWN_BINS; i++) {
            if (before < k && before + own[i] >= k) {
                s->bin = top - i;
                s->larger = before;
            }
            before += own[i];
        }
    }
    __syncthreads();
}

/* Bins of equal width from the lowest key to the highest: scores lie close to each other, and in
 * the bits of a float they would share few bins. A larger key is never in a lower bin. */
struct bins {
    float low, scale;

    NBI_DEV uint32_t of(uint32_t key) const
    {
        const float f = nbi_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
        const float x = (f - low) * scale;
        return x < (float)(BINS - 1) ? (uint32_t)x : BINS - 1;
    }
};

static NBI_DEV bins make_bins(const choice *s)
{
    uint32_t lowest = s->lowest[0], highest = s->highest[0];
#pragma unroll
    for (uint32_t w = 1; w < WARPS; w++) {
        lowest = s->lowest[w] < lowest ? s->lowest[w] : lowest;
        highest = s->highest[w] > highest ? s->highest[w] : highest;
    }
    const float low = nbi_float(lowest & 0x80000000u ? lowest ^ 0x80000000u : ~lowest);
    const float high = nbi_float(highest & 0x80000000u ? highest ^ 0x80000000u : ~highest);
    return {low, high > low ? (float)(BINS - 1) / (high - low) : 0};
}

/* The edge among the few keys of its bin: the one that k - larger of them reach from above. */
static NBI_DEV void rank_few(choice *s, uint32_t k)
{
    const uint32_t need = k - s->larger, n = s->n_few;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        const uint32_t key = s->few[i];
        uint32_t above = 0, equal = 0;
#pragma unroll 4
        for (uint32_t j = 0; j < n; j++) {
            above += s->few[j] > key;
            equal += s->few[j] == key;
        }
        if (above < need && above + equal >= need) {
            s->edge = key;
            s->ties = need - above;
            s->all = above + equal == need;
        }
    }
    __syncthreads();
}

/* The edge digit by digit (11, 11 and 10 bits), whatever the keys. */
static NBI_DEV void rank_digits(choice *s, uint32_t padded, uint32_t k)
{
    uint32_t prefix = 0, fixed = 0;
    __syncthreads(); /* s->larger was read */
    if (threadIdx.x == 0) s->larger = 0;
    for (int d = 0; d < 3; d++) {
        const uint32_t shift = d == 0 ? 21 : d == 1 ? 10 : 0, mask = d < 2 ? 0x7ff : 0x3ff;
        clear_bins(s);
        __syncthreads();
        each_four(s, padded, [=](const nbi_u32x4 &x) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (x.v[j] && (x.v[j] & fixed) == prefix)
                    atomicAdd(&s->count[x.v[j] >> shift & mask], 1u);
        });
        __syncthreads();
        find_bin(s, k);
        prefix |= s->bin << shift;
        fixed |= mask << shift;
    }
    if (threadIdx.x == 0) {
        s->edge = prefix;
        s->ties = k - s->larger;
        s->all = false;
    }
    __syncthreads();
}

/* s->edge, and how many keys that equal it are taken. */
static NBI_DEV void find_edge(choice *s, uint32_t padded, uint32_t k)
{
    const uint32_t warp = threadIdx.x / NBI_WARP;
    uint32_t lowest = UINT32_MAX, highest = 0;
    each_four(s, padded, [&](const nbi_u32x4 &x) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            lowest = x.v[j] - 1 < lowest ? x.v[j] - 1 : lowest;
            highest = x.v[j] > highest ? x.v[j] : highest;
        }
    });
    lowest = nbi_warp_min(lowest) + 1;
    highest = nbi_warp_max(highest);
    if (nbi_lane() == 0) {
        s->lowest[warp] = lowest;
        s->highest[warp] = highest;
    }
    clear_bins(s);
    if (threadIdx.x == 0) s->larger = s->n_few = 0;
    __syncthreads();
    const bins b = make_bins(s);
    each_four(s, padded, [=](const nbi_u32x4 &x) {
        uint32_t at[4];
#pragma unroll
        for (int j = 0; j < 4; j++) at[j] = b.of(x.v[j]);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (x.v[j]) atomicAdd(&s->count[at[j]], 1u);
    });
    __syncthreads();
    find_bin(s, k);
    const uint32_t bin = s->bin;
    if (s->count[bin] > FEW) {
        rank_digits(s, padded, k);
        return;
    }
    each_four(s, padded, [=](const nbi_u32x4 &x) {
        uint32_t at[4];
#pragma unroll
        for (int j = 0; j < 4; j++) at[j] = x.v[j] ? b.of(x.v[j]) : BINS;
        if (at[0] != bin && at[1] != bin && at[2] != bin && at[3] != bin) return;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (at[j] == bin) s->few[atomicAdd(&s->n_few, 1u)] = x.v[j];
    });
    __syncthreads();
    rank_few(s, k);
}

static NBI_DEV uint32_t warp_scan(uint32_t x)
{
#pragma unroll
    for (uint32_t d = 1; d < NBI_WARP; d *= 2) {
        const uint32_t y = __shfl_up_sync(NBI_FULL_MASK, x, d);
        if ((uint32_t)nbi_lane() >= d) x += y;
    }
    return x;
}

/* What the warps before this one have counted. */
static NBI_DEV uint32_t sum_before(const choice *s)
{
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++) sum += w < threadIdx.x / NBI_WARP ? s->sums[w] : 0;
    return sum;
}

/* All keys from the edge on. A warp has neighbouring keys, in fours of 32. */
static NBI_DEV void write_whole(choice *s, uint32_t padded, int32_t *out)
{
    const uint32_t edge = s->edge, lane = (uint32_t)nbi_lane(), warp = threadIdx.x / NBI_WARP;
    const uint32_t first = warp * (padded / WARPS), end = first + padded / WARPS;
    const uint32_t below = (1u << lane) - 1;
    uint32_t own = 0;
#pragma unroll 1
    for (uint32_t i = first; i < end; i += 4 * NBI_WARP)
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            own += (uint32_t)__popc(
                __ballot_sync(NBI_FULL_MASK, s->keys[i + j * NBI_WARP + lane] >= edge));
    if (lane == 0) s->sums[warp] = own;
    __syncthreads();
    uint32_t base = sum_before(s);
#pragma unroll 1
    for (uint32_t i = first; i < end; i += 4 * NBI_WARP) {
        uint32_t taken[4];
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            taken[j] = __ballot_sync(NBI_FULL_MASK, s->keys[i + j * NBI_WARP + lane] >= edge);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            if (taken[j] >> lane & 1)
                out[base + (uint32_t)__popc(taken[j] & below)] = (int32_t)(i + j * NBI_WARP + lane);
            base += (uint32_t)__popc(taken[j]);
        }
    }
}

/* In ascending order of positions: a warp has neighbouring keys, a lane four at a time. */
static NBI_DEV void write_list(choice *s, uint32_t n, int32_t *out)
{
    const uint32_t edge = s->edge, ties = s->ties, lane = (uint32_t)nbi_lane();
    const uint32_t warp = threadIdx.x / NBI_WARP, rounds = (n + 4 * THREADS - 1) / (4 * THREADS);
    const uint32_t first = (warp * rounds * NBI_WARP + lane) * 4;
    uint32_t own = 0;
#pragma unroll 1
    for (uint32_t r = 0, i = first; r < rounds; r++, i += 4 * NBI_WARP)
        if (i < n) own += nbi_index_taken(*reinterpret_cast<nbi_u32x4 *>(s->keys + i), i, n, edge);
    own = warp_scan(own);
    if (lane == NBI_WARP - 1) s->sums[warp] = own;
    __syncthreads();
    uint32_t base = sum_before(s);
#pragma unroll 1
    for (uint32_t r = 0, i = first; r < rounds; r++, i += 4 * NBI_WARP) {
        nbi_u32x4 x = {{0, 0, 0, 0}};
        if (i < n) x = *reinterpret_cast<nbi_u32x4 *>(s->keys + i);
        const uint32_t here = nbi_index_taken(x, i, n, edge), all = warp_scan(here);
        const uint32_t before = base + all - here;
        nbi_index_list(out, x, i, n, edge, ties, before & 0xffffu, before >> 16);
        base += __shfl_sync(NBI_FULL_MASK, all, NBI_WARP - 1);
    }
}

static NBI_DEV void choose(const nbi_index_rows &a, uint32_t t, uint32_t n)
{
    choice *s = nbi_shared<choice>();
    const uint32_t padded = (n + PADDED - 1) / PADDED * PADDED;
    const uint32_t *scores = a.scores + (size_t)t * a.stride;
    for (uint32_t i = 4 * threadIdx.x; i < padded; i += PADDED)
        nbi_copy_async(s->keys + i, scores + (i < n ? i : 0), i < n);
    nbi_copy_commit();
    nbi_copy_wait<0>();
    for (uint32_t i = n; i < (n + 3) / 4 * 4; i++) /* of the thread that copied them */
        if (i / 4 % THREADS == threadIdx.x) s->keys[i] = 0;
    __syncthreads();
    find_edge(s, padded, a.topk);
    int32_t *out = a.select + (size_t)t * a.topk;
    if (s->all)
        write_whole(s, padded, out);
    else
        write_list(s, n, out);
}

/* ---------------------------------------------------------------- the kernel */

/* A warp: the new key, into the cache and among the block's keys. Four values a lane. */
template <int HEADS>
static NBI_DEV void append(const nbi_index_keys &a, score_memory<HEADS> *s, uint32_t t)
{
    const uint32_t p = (uint32_t)a.pos[t], lane = (uint32_t)nbi_lane();
    const size_t page = nbi_kv_page(a.page_table, a.page_stride, a.row_seq[t], p);
    uint16_t *to = static_cast<uint16_t *>(a.cache) +
                   (page * NBI_PAGE_TOKENS + p % NBI_PAGE_TOKENS) * NBI_INDEX_DIM;
    uint16_t *here = s->keys[p % POSITIONS];
    constexpr uint32_t EACH = NBI_INDEX_DIM / NBI_WARP;
    float k[EACH], weight[EACH], bias[EACH];
#pragma unroll
    for (uint32_t j = 0; j < EACH; j++) {
        const uint32_t i = lane + j * NBI_WARP;
        k[j] = a.k[(size_t)t * NBI_INDEX_DIM + i];
        weight[j] = a.weight[i];
        bias[j] = a.bias[i];
    }
    const turn x[2] = {turn_of(a.rope, t, lane), turn_of(a.rope, t, lane + NBI_WARP)};
    double sum = 0, squares = 0;
#pragma unroll
    for (uint32_t j = 0; j < EACH; j++) sum += (double)k[j];
    nbi_index_norm n;
    n.mean = nbi_index_sum(sum) / NBI_INDEX_DIM;
#pragma unroll
    for (uint32_t j = 0; j < EACH; j++) {
        const double d = (double)k[j] - n.mean;
        squares += d * d;
    }
    n.r = 1.0 / sqrt(nbi_index_sum(squares) / NBI_INDEX_DIM + (double)a.eps);
#pragma unroll
    for (uint32_t j = 0; j < EACH; j++)
        s->key[lane + j * NBI_WARP] =
            fmaf((float)(((double)k[j] - n.mean) * n.r), weight[j], bias[j]);
    __syncwarp();
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
        float u = s->key[x[j].iu], v = s->key[x[j].iv];
        if (x[j].turns) nbi_rope_turn_by(x[j].cs, x[j].sn, &u, &v);
        to[x[j].iu] = here[x[j].iu] = nbi_to_bf16(u);
        to[x[j].iv] = here[x[j].iv] = nbi_to_bf16(v);
    }
}

template <int HEADS>
static __global__ void __launch_bounds__(THREADS, 1)
    index_row_kernel(const __grid_constant__ row_work k)
{
    const uint32_t t = blockIdx.y, block = blockIdx.x - k.producers - k.absorbers;
    if (blockIdx.x < k.producers) {
        weigh(k, t);
        return;
    }
    if (blockIdx.x < k.producers + k.absorbers) {
        absorb(k, blockIdx.x - k.producers);
        return;
    }
    score_memory<HEADS> *s = nbi_shared<score_memory<HEADS>>();
    const uint32_t n = (uint32_t)k.a.pos[t] + 1, begin = block * POSITIONS;
    const bool sparse = n > k.a.topk, newest = (n - 1) / POSITIONS == block;
    const int32_t seq = k.a.row_seq[t];
    float row_scale = 0; /* of the head that the thread weighs */
    if (k.producers && threadIdx.x < HEADS) row_scale = k.weigh.w.row_scale[threadIdx.x];
    const turn x = turn_of(k.a.rope, t, threadIdx.x % (NBI_INDEX_DIM / 2));
    if (sparse && begin < n) ask_keys<HEADS>(k.a, s, seq, begin, begin, n - 1);
    nbi_wait_before();
    nbi_let_next();
    if (begin >= n) return;
    if (newest && k.appends && threadIdx.x / NBI_WARP == WARPS - 1) append<HEADS>(k.append, s, t);
    if (!sparse) {
        int32_t *out = k.a.select + (size_t)t * k.a.topk;
        for (uint32_t i = threadIdx.x; block == 0 && i < k.a.topk; i += THREADS)
            out[i] = i < n ? (int32_t)i : -1;
        return;
    }
    if (newest && !k.appends) ask_keys<HEADS>(k.a, s, seq, begin, n - 1, n);
    take_queries<HEADS>(k.a, s, t, x);
    nbi_copy_wait<0>();
    __syncthreads();
    float d[HEADS / 8][4];
    multiply<HEADS>(s, d);
    take_weights(k, t, row_scale, s->w, reinterpret_cast<float *>(s->keys), block == 0);
    __syncthreads();
    put_scores<HEADS>(k, s, d, t, begin, n);
    __shared__ bool last;
    if (!nbi_arrive_last(&k.arrived[t], (n - 1) / POSITIONS + 1, &last)) return;
    if (threadIdx.x == 0) k.ready[t] = 0;
    choose(k.a, t, n);
}

/* ---------------------------------------------------------------- the launch */

bool nbi_index_row_weighs(const nbi_linear_args *a)
{
    const nbi_cuda_packed *w = nbi_cuda_packed_of(a->w);
    return a->x_exact && w->kind == NBI_WEIGHT_BF16 && !a->bias && a->n_rows && a->n_rows <= ROWS &&
           (w->rows == 32 || w->rows == 64);
}

static size_t parts_bytes(const nbi_index_rows *a, const nbi_linear_args *weigh)
{
    if (!weigh) return 0;
    const nbi_cuda_packed *w = nbi_cuda_packed_of(weigh->w);
    return (size_t)a->n_rows * nbi_ceil_div(w->cols, NBI_CHUNK_COLS) * w->n_rt * NBI_TILE_ROWS *
           sizeof(float);
}

size_t nbi_index_row_scratch(const nbi_limits *l)
{
    const uint32_t rows = l->max_rows < ROWS ? l->max_rows : ROWS;
    return (size_t)rows * nbi_ceil_div(l->max_linear_cols, NBI_CHUNK_COLS) * 64 * sizeof(float);
}

static size_t shared_bytes(const nbi_index_rows *a, const nbi_index_beside *beside)
{
    const size_t scores = a->n_heads == 32 ? sizeof(score_memory<32>) : sizeof(score_memory<64>);
    const size_t chosen = sizeof(choice) + ((size_t)a->stride + PADDED) * sizeof(uint32_t);
    size_t most = scores > chosen ? scores : chosen;
    if (!beside->absorb) return most;
    const size_t absorb = nbi_mla_absorb_shared<1>(beside->absorb->nope, COLUMNS);
    return absorb > most ? absorb : most;
}

bool nbi_index_row_fits(const nbi_cuda *c, const nbi_index_rows *a, uint32_t n_seqs,
                        const nbi_index_beside *beside)
{
    const nbi_linear_args *weigh = beside->weigh;
    const nbi_index_keys *append = beside->append;
    if (weigh && (weigh->y != a->w || weigh->n_rows != a->n_rows ||
                  nbi_cuda_packed_of(weigh->w)->rows != a->n_heads ||
                  parts_bytes(a, weigh) / a->n_rows > sizeof(uint16_t[POSITIONS][NBI_INDEX_ROW])))
        return false;
    if (append && (append->cache != a->keys || append->dim != a->dim || append->pos != a->pos ||
                   append->n_rows != a->n_rows))
        return false;
    if (beside->absorb && beside->absorb->n_rows != a->n_rows) return false;
    const size_t scores = (size_t)a->n_rows * a->stride * sizeof(uint32_t);
    return a->n_rows <= ROWS && a->n_rows == n_seqs && a->shape.dtype == NBI_BF16 &&
           a->dim == NBI_INDEX_DIM && (a->n_heads == 32 || a->n_heads == 64) &&
           (uintptr_t)a->keys % 16 == 0 && a->rope.dim % 2 == 0 && a->stride <= MOST &&
           scores + parts_bytes(a, weigh) <= a->room && shared_bytes(a, beside) <= c->rt.shared_max;
}

void nbi_index_row_run(nbi_cuda *c, const nbi_index_rows *a, const nbi_index_beside *beside)
{
    row_work k = {};
    k.a = *a;
    k.ready = c->arrivals;
    k.arrived = c->arrivals + ROWS;
    if (beside->append) {
        k.append = *beside->append;
        k.appends = true;
    }
    if (beside->weigh) {
        const nbi_linear_args *l = beside->weigh;
        k.weigh.w = *nbi_cuda_packed_of(l->w);
        k.weigh.y = static_cast<float *>(l->y);
        k.weigh.x = static_cast<const float *>(l->x);
        k.weigh.n_tokens = l->n_rows;
        k.weigh.x_stride = l->x_stride;
        k.weigh.y_stride = l->y_stride;
        k.weigh.fast = nbi_x_fast(l->x, l->x_stride, k.weigh.w.cols);
        k.n_chunks = nbi_ceil_div(k.weigh.w.cols, NBI_CHUNK_COLS);
        k.chunks = nbi_divisor_of(k.n_chunks);
        k.producers = nbi_ceil_div(k.n_chunks * k.weigh.w.n_rt, WARPS);
        k.parts = reinterpret_cast<float *>(a->scores + (size_t)a->n_rows * a->stride);
    }
    if (beside->absorb) {
        k.absorb = *beside->absorb;
        k.latents = *beside->latents;
        const uint32_t columns = nbi_ceil_div(k.absorb.lora, COLUMNS);
        k.columns = nbi_divisor_of(columns);
        k.absorbers = a->n_rows + k.absorb.n_heads * columns;
    }
    const uint32_t blocks = k.producers + k.absorbers + nbi_ceil_div(a->stride, POSITIONS);
    nbi_launch(&c->rt, dim3(blocks, a->n_rows), dim3(THREADS), shared_bytes(a, beside),
               a->n_heads == 32 ? index_row_kernel<32> : index_row_kernel<64>, k);
}
