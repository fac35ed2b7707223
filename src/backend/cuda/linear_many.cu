/* Products with many tokens. x is converted once into scratch, in the order of B fragments; then
 * blocks of 128 weight rows x 128 tokens (64 x 64 where there are few) go over K. x comes through
 * shared memory by asynchronous copies, weights straight into registers as A fragments, one tile
 * ahead. Sums of a chunk are apart from totals, so that every bit is that of linear_few.cu.
 *
 * Per block and 64 columns of NVFP4: 16 KB of x, 4.6 KB of weights, 512 mma. */
#include "backend/cuda/cuda_linear.h"

#define STAGES      4u
#define ROW_WARPS   4
#define TOKEN_WARPS 2
#define THREADS     (ROW_WARPS * TOKEN_WARPS * NBI_WARP)

/* Converted activations:
 *   x     [token tiles of 8][n_kt * 2][32 lanes][16 bytes]: k-steps 2i and 2i+1 of 32 columns
 *   unit  [token tiles][chunks][8 tokens]: 2^e */
struct many_x {
    char *x;
    float *unit;
    uint32_t n_tiles, n_chunks;
};

static size_t x_bytes(uint32_t n_tokens, uint32_t cols)
{
    return (size_t)nbi_ceil_div(n_tokens, 8) * nbi_ceil_div(cols, NBI_TILE_COLS) * 1024;
}

size_t nbi_linear_many_scratch(uint32_t n_tokens, uint32_t cols)
{
    const size_t chunks = nbi_ceil_div(cols, NBI_FP8_BLOCK); /* the shortest */
    return x_bytes(n_tokens, cols) + (size_t)nbi_ceil_div(n_tokens, 8) * chunks * 32;
}

/* ---------------------------------------------------------------- x into scratch */

#define CONVERT_WARPS 4u

/* A warp per (token tile, chunk). */
template <nbi_weight_kind KIND, bool W4A4>
static __global__ void __launch_bounds__(CONVERT_WARPS *NBI_WARP)
    convert_kernel(nbi_linear_call a, many_x to)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t at = blockIdx.x * CONVERT_WARPS + threadIdx.x / NBI_WARP;
    const uint32_t tile = at / to.n_chunks, chunk = at % to.n_chunks;
    if (tile >= to.n_tiles) return;
    constexpr uint32_t PAIRS = nbi_chunk_tiles(KIND) * 2;
    const uint32_t lane = (uint32_t)nbi_lane();
    uint32_t b[PAIRS * 2][2];
    const int e = nbi_linear_chunk<KIND, W4A4>(b, a, tile * 8 + lane / 4, chunk);
    nbi_u32x4 *x =
        reinterpret_cast<nbi_u32x4 *>(to.x) + (size_t)tile * a.w.n_kt * 2 * NBI_WARP + lane;
#pragma unroll
    for (uint32_t i = 0; i < PAIRS; i++) {
        const uint32_t pair = chunk * PAIRS + i;
        const nbi_u32x4 v = {{b[2 * i][0], b[2 * i][1], b[2 * i + 1][0], b[2 * i + 1][1]}};
        if (pair < a.w.n_kt * 2) x[(size_t)pair * NBI_WARP] = v;
    }
    if (lane % 4 == 0) to.unit[((size_t)tile * to.n_chunks + chunk) * 8 + lane / 4] = nbi_pow2(e);
}

/* ---------------------------------------------------------------- products */

/* TILES: token tiles of a block. */
template <int TILES> struct many_stage {
    nbi_u32x4 x[TILES][2][NBI_WARP];
    float unit[TILES][8];
};

/* Asks for the columns of weight tile kt. A thread copies the same place of every fourth token
 * tile.
 */
template <nbi_weight_kind KIND, int TILES>
static NBI_DEV void ask(many_stage<TILES> *stage, const many_x &x, uint32_t n_kt, uint32_t tile0,
                        uint32_t kt)
{
    constexpr uint32_t SIDE = THREADS / 64;
    static_assert(TILES % SIDE == 0 && TILES * 2 <= THREADS, "whole rounds of all threads");
    const uint32_t tile = threadIdx.x / 64, at = threadIdx.x % 64;
    const nbi_u32x4 *from =
        reinterpret_cast<const nbi_u32x4 *>(x.x) + ((size_t)(tile0 + tile) * n_kt + kt) * 64 + at;
    const size_t step = (size_t)n_kt * 64 * SIDE;
    nbi_u32x4 *to = &stage->x[tile][0][at];
#pragma unroll
    for (uint32_t i = 0; i < TILES / SIDE; i++)
        nbi_copy_async(to + i * SIDE * 64, from + i * step, tile0 + tile + i * SIDE < x.n_tiles);
    if (threadIdx.x >= TILES * 2) return;
    const uint32_t t = tile0 + threadIdx.x / 2, half = threadIdx.x % 2 * 4;
    const size_t unit = ((size_t)t * x.n_chunks + kt / nbi_chunk_tiles(KIND)) * 8 + half;
    nbi_copy_async(&stage->unit[threadIdx.x / 2][half], x.unit + unit, t < x.n_tiles);
}

/* A warp's part: MT row tiles, NT token tiles. */
template <int MT, int NT> struct many_sums {
    float p[MT][NT][4], y[MT][NT][4];
};

template <nbi_weight_kind KIND, int MT, int NT, int TILES>
static NBI_DEV void tile_products(many_sums<MT, NT> &s, const nbi_tile<KIND> w[MT],
                                  const many_stage<TILES> &stage, uint32_t tile0)
{
    const uint32_t lane = (uint32_t)nbi_lane();
#pragma unroll
    for (uint32_t pair = 0; pair < 2; pair++) {
        uint32_t a[2][MT][4];
#pragma unroll
        for (uint32_t k = 0; k < 2; k++)
#pragma unroll
            for (int m = 0; m < MT; m++) w[m].fragment(a[k][m], 2 * pair + k);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const nbi_u32x4 v = stage.x[tile0 + n][pair][lane];
#pragma unroll
            for (uint32_t k = 0; k < 2; k++) {
                const uint32_t b[2] = {v.v[2 * k], v.v[2 * k + 1]};
#pragma unroll
                for (int m = 0; m < MT; m++) nbi_tile_mma<KIND>(s.p[m][n], a[k][m], b);
            }
        }
    }
}

/* The chunk's sums into the totals. */
template <nbi_weight_kind KIND, int MT, int NT, int TILES>
static NBI_DEV void end_chunk(many_sums<MT, NT> &s, const nbi_cuda_packed &w, uint32_t rt,
                              uint32_t chunk, const many_stage<TILES> &stage, uint32_t tile0)
{
    const uint32_t t = (uint32_t)nbi_lane() % 4;
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const uint32_t at = rt + m < w.n_rt ? rt + m : 0;
        const nbi_f32x2 block = nbi_tile_block_scale<KIND>(w, at, chunk);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const float unit[2] = {stage.unit[tile0 + n][2 * t], stage.unit[tile0 + n][2 * t + 1]};
            nbi_chunk_add(s.y[m][n], s.p[m][n], unit, block);
#pragma unroll
            for (int i = 0; i < 4; i++) s.p[m][n][i] = 0;
        }
    }
}

template <int MT, int NT>
static NBI_DEV void put_rows(const nbi_linear_call &a, const many_sums<MT, NT> &s, uint32_t rt,
                             uint32_t tile0)
{
    const uint32_t g = (uint32_t)nbi_lane() / 4, t = (uint32_t)nbi_lane() % 4;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (uint32_t high = 0; high < 2; high++) {
            const uint32_t row = (rt + m) * NBI_TILE_ROWS + high * 8 + g;
            if (row >= a.w.rows) continue;
            const float factor = nbi_linear_factor(a, row), bias = a.bias ? a.bias[row] : 0;
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (uint32_t j = 0; j < 2; j++) {
                    const uint32_t token = (tile0 + n) * 8 + 2 * t + j;
                    if (token < a.n_tokens)
                        a.y[(size_t)token * a.y_stride + row] =
                            fmaf(s.y[m][n][2 * high + j], factor, bias);
                }
        }
}

/* Warp (i, j) has row tiles i * MT and token tiles j * NT of the block. */
template <nbi_weight_kind KIND, int MT, int NT>
static __global__ void __launch_bounds__(THREADS, 1) many_kernel(nbi_linear_call a, many_x x)
{
    constexpr int TILES = NT * TOKEN_WARPS;
    many_stage<TILES> *stages = nbi_shared<many_stage<TILES>>();
    const uint32_t warp = threadIdx.x / NBI_WARP, lane = (uint32_t)nbi_lane();
    const uint32_t rt = (blockIdx.x * ROW_WARPS + warp / TOKEN_WARPS) * MT;
    const uint32_t block_tile = blockIdx.y * TILES, tile0 = warp % TOKEN_WARPS * NT;
    const uint32_t n_kt = a.w.n_kt;
    nbi_tile<KIND> w[MT], next[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) /* rows behind the last: any tile, nothing is written */
        next[m].template load<false>(a.w, rt + m < a.w.n_rt ? rt + m : 0, 0, lane);
    nbi_wait_before();
    nbi_let_next();
    for (uint32_t kt = 0; kt + 1 < STAGES; kt++) {
        if (kt < n_kt) ask<KIND, TILES>(&stages[kt], x, n_kt, block_tile, kt);
        nbi_copy_commit();
    }
    many_sums<MT, NT> s;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s.p[m][n][i] = s.y[m][n][i] = 0;
    for (uint32_t kt = 0; kt < n_kt; kt++) {
#pragma unroll
        for (int m = 0; m < MT; m++) {
            w[m] = next[m];
            if (kt + 1 < n_kt)
                next[m].template load<false>(a.w, rt + m < a.w.n_rt ? rt + m : 0, kt + 1, lane);
        }
        nbi_copy_wait<STAGES - 2>();
        __syncthreads(); /* this stage is there, and the one before has been read by all */
        const uint32_t ahead = kt + STAGES - 1;
        if (ahead < n_kt) ask<KIND, TILES>(&stages[ahead % STAGES], x, n_kt, block_tile, ahead);
        nbi_copy_commit();
        tile_products<KIND, MT, NT, TILES>(s, w, stages[kt % STAGES], tile0);
        if ((kt + 1) % nbi_chunk_tiles(KIND) == 0 || kt + 1 == n_kt)
            end_chunk<KIND, MT, NT, TILES>(s, a.w, rt, kt / nbi_chunk_tiles(KIND),
                                           stages[kt % STAGES], tile0);
    }
    put_rows<MT, NT>(a, s, rt, block_tile + tile0);
}

template <nbi_weight_kind KIND, int MT, int NT>
static void multiply(nbi_cuda *c, const nbi_linear_call *a, const many_x &x)
{
    constexpr int TILES = NT * TOKEN_WARPS;
    nbi_launch(&c->rt,
               dim3(nbi_ceil_div(a->w.n_rt, MT * ROW_WARPS), nbi_ceil_div(x.n_tiles, TILES)),
               dim3(THREADS), STAGES * sizeof(many_stage<TILES>), many_kernel<KIND, MT, NT>, *a, x);
}

template <nbi_weight_kind KIND, bool W4A4 = false>
static void run(nbi_cuda *c, const nbi_linear_call *a)
{
    many_x x;
    x.x = static_cast<char *>(c->scratch);
    x.unit = reinterpret_cast<float *>(x.x + x_bytes(a->n_tokens, a->w.cols));
    x.n_tiles = nbi_ceil_div(a->n_tokens, 8);
    x.n_chunks = nbi_linear_chunks(&a->w);
    nbi_launch(&c->rt, dim3(nbi_ceil_div(x.n_tiles * x.n_chunks, CONVERT_WARPS)),
               dim3(CONVERT_WARPS * NBI_WARP), 0, convert_kernel<KIND, W4A4>, *a, x);
    const uint32_t large = nbi_ceil_div(a->w.n_rt, 8) * nbi_ceil_div(x.n_tiles, 16);
    if (x.n_tiles > 8 && large >= (uint32_t)c->rt.n_sms)
        multiply<KIND, 2, 8>(c, a, x);
    else
        multiply<KIND, 1, 4>(c, a, x);
}

void nbi_linear_many(nbi_cuda *c, const nbi_linear_call *a)
{
    NB_ASSERT(nbi_linear_many_scratch(a->n_tokens, a->w.cols) <= c->scratch_bytes);
    if (nbi_linear_wide(c, a)) return;
    switch (a->w.kind) {
    case NBI_WEIGHT_NVFP4:
        if (a->input_scale > 0) return run<NBI_WEIGHT_NVFP4, true>(c, a);
        return run<NBI_WEIGHT_NVFP4>(c, a);
    case NBI_WEIGHT_FP8_BLOCK: return run<NBI_WEIGHT_FP8_BLOCK>(c, a);
    case NBI_WEIGHT_FP8_TENSOR: return run<NBI_WEIGHT_FP8_TENSOR>(c, a);
    case NBI_WEIGHT_BF16: return run<NBI_WEIGHT_BF16>(c, a);
    default: return run<NBI_WEIGHT_F16>(c, a);
    }
}
