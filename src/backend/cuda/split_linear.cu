/* Linear layers of 9 to 64 tokens: too many for a block to hold all of x
 * (stream.h), too few for blocks of 64 rows and all of K to fill the device (linear_many.cu).
 *
 *   multiply  a block has one chunk of K and an equal, contiguous share of the row tiles of all
 *             matrices; it converts its chunk of x itself. A warp takes two row tiles at a time
 *             from a ring of its own and leaves their chunk sums p_c in scratch
 *   add       y of a row from its chunk sums, in ascending order
 *
 * Weights are read once, x by every block (a chunk of 64 tokens is 64 KB), chunk sums are written
 * and read once in L2: 8 MB for 2048 x 4096. Numerics are those of tile.h. */
#include "backend/cuda/split_linear.h"

#include "backend/cuda/pack.h"
#include "backend/cuda/stream.h"

#define WARPS_MAX   11u
#define STAGES_MAX  4u
#define PAIR        2u /* row tiles of a warp */
#define LEAST       9u /* tokens */
#define ADD_THREADS 256u
#define SCRATCH     ((size_t)16 << 20)

struct split_job {
    nbi_cuda_packed m;
    float *y;
    const float *bias;
    uint32_t y_stride;
    bool add; /* y += */
};

struct split_work {
    split_job jobs[NBI_CUDA_PENDING]; /* tiles of one behind those of the other */
    const float *x;
    float *sums; /* [chunk][n_tiles][token tile][lane][4] */
    float *unit; /* [chunk][token]: 2^e */
    uint32_t x_stride, n_jobs, n_tiles, n_chunks, cols, n_tokens;
    bool x_fast;

    NBI_DEV const split_job &find(uint32_t tile, uint32_t *rt) const
    {
        uint32_t j = 0;
        while (j + 1 < n_jobs && tile >= jobs[j].m.n_rt) tile -= jobs[j++].m.n_rt;
        *rt = tile;
        return jobs[j];
    }
};

/* Token tiles of 8 that a block multiplies. */
static uint32_t token_tiles(uint32_t n_tokens)
{
    return n_tokens <= 16 ? 2 : n_tokens <= 32 ? 4 : 8;
}

/* How a launch is cut. */
struct split_plan {
    uint32_t shares;        /* blocks of a chunk */
    uint32_t warps, stages; /* of a warp's ring; 0: does not fit */
    uint32_t shared;
};

static __host__ __device__ constexpr uint32_t pair_bytes(nbi_weight_kind kind)
{
    return PAIR * nbi_stream_unit_bytes(kind);
}

/* Shared memory: barriers, 2^e of tokens, x, rings. x: [token tile][pair of k-steps][lane][16]. */
static __host__ __device__ constexpr uint32_t x_at()
{
    return WARPS_MAX * STAGES_MAX * 8 + NBI_SPLIT_TOKENS * 4;
}

static __host__ __device__ constexpr uint32_t ring_at(nbi_weight_kind kind, uint32_t n_tt)
{
    return x_at() + n_tt * nbi_chunk_tiles(kind) * 1024;
}

/* ---------------------------------------------------------------- products */

/* One lane: asks for chunk `chunk` of a pair of row tiles. */
template <nbi_weight_kind KIND>
static NBI_DEV void ask_pair(const split_work &w, char *to, uint64_t *full, uint32_t pair,
                             uint32_t chunk)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND), TILE = nbi_tile_bytes(KIND);
    constexpr uint32_t SCALES = KIND == NBI_WEIGHT_NVFP4 ? 64u : 0u;
    const uint32_t n_kt = w.jobs[0].m.n_kt, kt = chunk * CT, left = n_kt - kt;
    const uint32_t n = left < CT ? left : CT, first = pair * PAIR;
    const uint32_t tiles = w.n_tiles - first < PAIR ? w.n_tiles - first : PAIR;
    nbi_bar_expect(full, tiles * n * (TILE + SCALES));
    for (uint32_t i = 0; i < tiles; i++) {
        uint32_t rt;
        const nbi_cuda_packed &m = w.find(first + i, &rt).m;
        const size_t tile = (size_t)rt * n_kt + kt;
        char *at = to + i * nbi_stream_unit_bytes(KIND);
        nbi_copy_bulk(at, static_cast<const char *>(m.data) + tile * TILE, n * TILE, full);
        if (SCALES)
            nbi_copy_bulk(at + CT * TILE, static_cast<const char *>(m.scales) + tile * SCALES,
                          n * SCALES, full);
    }
}

/* All warps: the block's chunk of x as B fragments, token tiles in turn. */
template <nbi_weight_kind KIND, uint32_t NT>
static NBI_DEV void take_x(const split_work &w, uint32_t chunk, bool first_share)
{
    constexpr uint32_t PAIRS = nbi_chunk_tiles(KIND) * 2;
    const uint32_t lane = (uint32_t)nbi_lane(), warp = threadIdx.x / NBI_WARP;
    nbi_u32x4 *x = reinterpret_cast<nbi_u32x4 *>(nbi_shared<char>() + x_at());
    for (uint32_t tile = warp; tile < NT; tile += blockDim.x / NBI_WARP) {
        const uint32_t token = tile * 8 + lane / 4;
        const float *row = token < w.n_tokens ? w.x + (size_t)token * w.x_stride : nullptr;
        uint32_t b[PAIRS * 2][2];
        const int e = nbi_x_chunk<KIND>(b, row, chunk * nbi_chunk_tiles(KIND) * NBI_TILE_COLS,
                                        w.cols, w.x_fast);
#pragma unroll
        for (uint32_t i = 0; i < PAIRS; i++)
            x[(tile * PAIRS + i) * NBI_WARP + lane] = {
                {b[2 * i][0], b[2 * i][1], b[2 * i + 1][0], b[2 * i + 1][1]}};
        if (first_share && lane % 4 == 0 && row) w.unit[chunk * w.n_tokens + token] = nbi_pow2(e);
    }
}

/* p of a pair of row tiles over `tiles` tiles of K. */
template <nbi_weight_kind KIND, uint32_t NT>
static NBI_DEV void multiply(float p[PAIR][NT][4], const char *ring, uint32_t n_rows,
                             uint32_t tiles)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND);
    const nbi_u32x4 *x = reinterpret_cast<const nbi_u32x4 *>(nbi_shared<char>() + x_at());
    const uint32_t lane = (uint32_t)nbi_lane();
#pragma unroll
    for (uint32_t m = 0; m < PAIR; m++)
#pragma unroll
        for (uint32_t n = 0; n < NT; n++) p[m][n][0] = p[m][n][1] = p[m][n][2] = p[m][n][3] = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < tiles; k++) {
        nbi_tile<KIND> t[PAIR];
#pragma unroll
        for (uint32_t m = 0; m < PAIR; m++) { /* a second that is not there: the first again */
            const char *unit = ring + (m < n_rows ? m : 0) * nbi_stream_unit_bytes(KIND);
            nbi_stream_tile<KIND>(&t[m], unit, unit + CT * nbi_tile_bytes(KIND), k);
        }
#pragma unroll
        for (uint32_t pair = 0; pair < 2; pair++) {
            uint32_t a[2][PAIR][4];
#pragma unroll
            for (uint32_t q = 0; q < 2; q++)
#pragma unroll
                for (uint32_t m = 0; m < PAIR; m++) t[m].fragment(a[q][m], 2 * pair + q);
#pragma unroll
            for (uint32_t n = 0; n < NT; n++) {
                const nbi_u32x4 v = x[((n * CT + k) * 2 + pair) * NBI_WARP + lane];
#pragma unroll
                for (uint32_t q = 0; q < 2; q++) {
                    const uint32_t b[2] = {v.v[2 * q], v.v[2 * q + 1]};
#pragma unroll
                    for (uint32_t m = 0; m < PAIR; m++) nbi_tile_mma<KIND>(p[m][n], a[q][m], b);
                }
            }
        }
    }
}

/* Chunk sums to scratch, as the lanes have them. */
template <uint32_t NT>
static NBI_DEV void put_sums(const split_work &w, const float p[PAIR][NT][4], uint32_t tile,
                             uint32_t n_rows, uint32_t chunk)
{
    nbi_f32x4 *to = reinterpret_cast<nbi_f32x4 *>(w.sums) +
                    ((size_t)chunk * w.n_tiles + tile) * NT * NBI_WARP + nbi_lane();
#pragma unroll
    for (uint32_t m = 0; m < PAIR; m++)
#pragma unroll
        for (uint32_t n = 0; n < NT; n++)
            if (m < n_rows)
                to[(m * NT + n) * NBI_WARP] = {{p[m][n][0], p[m][n][1], p[m][n][2], p[m][n][3]}};
}

template <nbi_weight_kind KIND, uint32_t NT>
static __global__ void __launch_bounds__(WARPS_MAX *NBI_WARP, 1)
    multiply_kernel(const __grid_constant__ split_work w, const __grid_constant__ split_plan plan)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND), PAIR_BYTES = pair_bytes(KIND);
    const uint32_t lane = (uint32_t)nbi_lane();
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
    const uint32_t chunk = blockIdx.x % w.n_chunks, share = blockIdx.x / w.n_chunks;
    const uint32_t n_pairs = (w.n_tiles + PAIR - 1) / PAIR;
    const uint32_t first = n_pairs * share / plan.shares;
    const uint32_t end = n_pairs * (share + 1) / plan.shares;
    uint64_t *full = nbi_shared<uint64_t>() + warp * STAGES_MAX;
    char *ring = nbi_shared<char>() + ring_at(KIND, NT) + warp * plan.stages * PAIR_BYTES;
    if (lane == 0) {
        for (uint32_t i = 0; i < plan.stages; i++) nbi_bar_init(full + i, 1);
        nbi_bar_init_done();
        uint32_t pair = first + warp;
        for (uint32_t i = 0; i < plan.stages && pair < end; i++, pair += plan.warps)
            ask_pair<KIND>(w, ring + i * PAIR_BYTES, full + i, pair, chunk);
    }
    nbi_let_next();
    nbi_wait_before();
    take_x<KIND, NT>(w, chunk, share == 0);
    __syncthreads();
    const uint32_t left = w.jobs[0].m.n_kt - chunk * CT, tiles = left < CT ? left : CT;
    uint32_t stage = 0, parity = 0;
    for (uint32_t pair = first + warp; pair < end; pair += plan.warps) {
        const uint32_t tile = pair * PAIR, rows = w.n_tiles - tile < PAIR ? 1 : PAIR;
        char *here = ring + stage * PAIR_BYTES;
        float p[PAIR][NT][4];
        nbi_bar_wait(full + stage, parity);
        multiply<KIND, NT>(p, here, rows, tiles);
        __syncwarp();
        const uint32_t next = pair + plan.stages * plan.warps;
        if (lane == 0 && next < end) ask_pair<KIND>(w, here, full + stage, next, chunk);
        put_sums<NT>(w, p, tile, rows, chunk);
        if (++stage == plan.stages) stage = 0, parity ^= 1;
    }
}

/* ---------------------------------------------------------------- sums */

/* A thread has what a lane had of a row tile and a token tile: rows g and g + 8, tokens 2 t and
 * 2 t + 1. */
template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(ADD_THREADS)
    add_kernel(const __grid_constant__ split_work w, uint32_t n_tt)
{
    const uint32_t i = blockIdx.x * ADD_THREADS + threadIdx.x, lane = i % NBI_WARP;
    const uint32_t tile = i / NBI_WARP / n_tt, token = i / NBI_WARP % n_tt * 8 + lane % 4 * 2;
    const uint32_t at = tile < w.n_tiles ? tile : 0;
    uint32_t rt;
    const split_job &job = w.find(at, &rt);
    const uint32_t row = rt * NBI_TILE_ROWS + lane / 4;
    const float factor[2] = {job.m.row_scale[row], job.m.row_scale[row + 8]};
    nbi_let_next();
    nbi_wait_before();
    if (tile >= w.n_tiles || token >= w.n_tokens) return;
    const size_t step = (size_t)w.n_tiles * n_tt * NBI_WARP;
    const nbi_f32x4 *from = reinterpret_cast<const nbi_f32x4 *>(w.sums) + i;
    const bool two = token + 1 < w.n_tokens;
    float y[4] = {0, 0, 0, 0};
#pragma unroll 8
    for (uint32_t c = 0; c < w.n_chunks; c++) {
        const nbi_f32x4 p = from[c * step];
        const float *u = w.unit + c * w.n_tokens + token;
        const float unit[2] = {u[0], two ? u[1] : 0.0f};
        nbi_chunk_add(y, p.v, unit, nbi_tile_block_scale<KIND>(job.m, rt, c));
    }
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        const uint32_t r = row + k / 2 * 8, t = token + k % 2;
        if (r >= job.m.rows || t >= w.n_tokens) continue;
        const float v = fmaf(y[k], factor[k / 2], job.bias ? job.bias[r] : 0.0f);
        float *to = job.y + (size_t)t * job.y_stride + r;
        *to = job.add ? *to + v : v;
    }
}

/* ---------------------------------------------------------------- host */

static split_plan plan_for(const nbi_cuda *c, nbi_weight_kind kind, uint32_t n_chunks,
                           uint32_t n_tiles, uint32_t n_tokens)
{
    split_plan p = {};
    const uint32_t n_tt = token_tiles(n_tokens), n_sms = (uint32_t)c->rt.n_sms;
    const uint32_t fixed = ring_at(kind, n_tt), n_pairs = nbi_ceil_div(n_tiles, PAIR);
    p.shares = n_sms / n_chunks < n_pairs ? n_sms / n_chunks : n_pairs;
    if (!p.shares || fixed >= c->rt.shared_max) return p;
    const uint32_t slots = ((uint32_t)c->rt.shared_max - fixed) / pair_bytes(kind);
    const uint32_t most = slots < WARPS_MAX ? slots : WARPS_MAX;
    if (!most) return p;
    const uint32_t pairs = nbi_ceil_div(n_pairs, p.shares), rounds = nbi_ceil_div(pairs, most);
    p.warps = nbi_ceil_div(pairs, rounds);
    if (p.warps < n_tt) p.warps = n_tt < most ? n_tt : most; /* x takes them too */
    p.stages = slots / p.warps < rounds ? slots / p.warps : rounds;
    if (p.stages > STAGES_MAX) p.stages = STAGES_MAX;
    p.shared = fixed + p.warps * p.stages * pair_bytes(kind);
    return p;
}

/* Bytes of scratch of one chunk's sums, all chunks together. */
static size_t sum_bytes(uint32_t n_chunks, uint32_t n_tiles, uint32_t n_tokens)
{
    return (size_t)n_chunks * n_tiles * token_tiles(n_tokens) * NBI_WARP * sizeof(nbi_f32x4);
}

size_t nbi_cuda_split_scratch(const nbi_cuda *c, const nbi_limits *limits)
{
    return c->rt.sm >= 90 && limits->max_rows >= LEAST ? SCRATCH : 0;
}

static bool overlaps(const nbi_linear_args *a)
{
    const float *x = static_cast<const float *>(a->x), *y = static_cast<const float *>(a->y);
    return y < x + (size_t)a->n_rows * a->x_stride && x < y + (size_t)a->n_rows * a->y_stride;
}

bool nbi_cuda_split_fits(const nbi_cuda *c, const nbi_linear_args *calls, uint32_t n)
{
    const nbi_cuda_packed *first = nbi_cuda_packed_of(calls[0].w);
    const uint32_t T = calls[0].n_rows;
    if (c->rt.sm < 90 || !n || n > NBI_CUDA_PENDING || T < LEAST || T > NBI_SPLIT_TOKENS)
        return false;
    const uint32_t n_chunks = nbi_chunks_of(first->kind, first->n_kt);
    uint32_t n_tiles = 0;
    for (uint32_t i = 0; i < n; i++) {
        const nbi_linear_args *a = &calls[i];
        const nbi_cuda_packed *p = nbi_cuda_packed_of(a->w);
        if (a->x_exact || p->kind == NBI_WEIGHT_F32 || p->kind != first->kind ||
            p->cols != first->cols || p->interleaved)
            return false;
        if (a->x != calls[0].x || a->x_stride != calls[0].x_stride || a->n_rows != T) return false;
        if (c->base.w4a4 && p->kind == NBI_WEIGHT_NVFP4) return false;
        if (i + 1 < n && overlaps(a)) return false;
        n_tiles += p->n_rt;
    }
    const size_t bytes = sum_bytes(n_chunks, n_tiles, T) + (size_t)n_chunks * T * sizeof(float);
    return bytes <= c->scratch_bytes && plan_for(c, first->kind, n_chunks, n_tiles, T).stages;
}

template <nbi_weight_kind KIND>
static void launch(nbi_cuda *c, const split_work &w, const split_plan &plan)
{
    const uint32_t n_tt = token_tiles(w.n_tokens);
    const dim3 grid(plan.shares * w.n_chunks), block(plan.warps * NBI_WARP);
    nbi_launch(&c->rt, grid, block, plan.shared,
               n_tt == 2   ? multiply_kernel<KIND, 2>
               : n_tt == 4 ? multiply_kernel<KIND, 4>
                           : multiply_kernel<KIND, 8>,
               w, plan);
    const uint32_t threads = w.n_tiles * n_tt * NBI_WARP;
    nbi_launch(&c->rt, dim3(nbi_ceil_div(threads, ADD_THREADS)), dim3(ADD_THREADS), 0,
               add_kernel<KIND>, w, n_tt);
}

void nbi_cuda_split_linear(nbi_cuda *c, const nbi_linear_args *calls, uint32_t n,
                           const nbi_add_args *add)
{
    const nbi_linear_args *a = &calls[0];
    const nbi_cuda_packed *p = nbi_cuda_packed_of(a->w);
    split_work w = {};
    for (uint32_t i = 0; i < n; i++) {
        w.jobs[i] = {*nbi_cuda_packed_of(calls[i].w), static_cast<float *>(calls[i].y),
                     calls[i].bias, calls[i].y_stride, false};
        w.n_tiles += w.jobs[i].m.n_rt;
    }
    if (add) {
        w.jobs[n - 1].y = static_cast<float *>(add->x);
        w.jobs[n - 1].add = true;
    }
    w.x = static_cast<const float *>(a->x);
    w.x_stride = a->x_stride;
    w.n_jobs = n;
    w.n_chunks = nbi_chunks_of(p->kind, p->n_kt);
    w.cols = p->cols;
    w.n_tokens = a->n_rows;
    w.x_fast = nbi_x_fast(a->x, a->x_stride, p->cols);
    w.sums = static_cast<float *>(c->scratch);
    w.unit = w.sums + sum_bytes(w.n_chunks, w.n_tiles, w.n_tokens) / sizeof(float);
    const split_plan plan = plan_for(c, p->kind, w.n_chunks, w.n_tiles, w.n_tokens);
    switch (p->kind) {
    case NBI_WEIGHT_NVFP4: return launch<NBI_WEIGHT_NVFP4>(c, w, plan);
    case NBI_WEIGHT_BF16: return launch<NBI_WEIGHT_BF16>(c, w, plan);
    case NBI_WEIGHT_F16: return launch<NBI_WEIGHT_F16>(c, w, plan);
    case NBI_WEIGHT_FP8_BLOCK: return launch<NBI_WEIGHT_FP8_BLOCK>(c, w, plan);
    default: return launch<NBI_WEIGHT_FP8_TENSOR>(c, w, plan);
    }
}
