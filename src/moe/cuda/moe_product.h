/* Products of experts with many rows on the matrix units, and how a block divides them. Included by
 * moe_grouped.cu, whose tiles are those of a list, and moe_masked.cu, whose experts have a capacity
 * each. The same sums in the same order: the same bits. */
#pragma once

#include "moe/cuda/moe_grouped.h"
#include "moe/cuda/moe_tiles.h"

#define NBI_MOE_THREADS 256u
#define NBI_MOE_WARPS   (NBI_MOE_THREADS / NBI_WARP)
#define NBI_MOE_STAGES  4u /* k-tiles of x on their way or in use */

/* One chunk of the row at x, by one warp, to row `to_row` of the converted ones. */
template <nbi_weight_kind KIND>
static NBI_DEV void nbi_moe_convert(char *to, float *unit, const float *x, uint32_t cols,
                                    uint32_t to_row, uint32_t c, float input_scale)
{
    constexpr uint32_t TILES = nbi_chunk_tiles(KIND);
    const size_t n_kt = (cols + NBI_TILE_COLS - 1) / NBI_TILE_COLS;
    const size_t n_chunks = (n_kt + TILES - 1) / TILES;
    const float factor = nbi_moe_x_chunk<KIND>(
        to + (to_row * n_kt + c * TILES) * NBI_MOE_TILE_X_BYTES, x, c, cols, input_scale);
    if (nbi_lane() == 0) unit[to_row * n_chunks + c] = factor;
}

/* ---------------------------------------------------------------- products */

/* How a block of 8 warps divides its work: MT row tiles and NT column tiles of 8 tokens per warp,
 * WM x WN warps; DEPTH k-tiles of weights on their way; BLOCKS of a multiprocessor at once. */
template <uint32_t MT_, uint32_t WM_, uint32_t NT_, uint32_t DEPTH_, uint32_t BLOCKS_>
struct nbi_moe_division {
    static constexpr uint32_t MT = MT_, WM = WM_, WN = NBI_MOE_WARPS / WM_, NT = NT_,
                              DEPTH = DEPTH_;
    static constexpr uint32_t BLOCKS = BLOCKS_;
    static constexpr uint32_t ROW_TILES = MT * WM, TOKENS = WN * NT * 8;
    static constexpr bool SKIP = BLOCKS > 1; /* columns without tokens; else whole warps only */
};
using nbi_moe_large = nbi_moe_division<2, 4, 8, 2, 1>; /* 128 tokens */
using nbi_moe_wider =
    nbi_moe_division<2, 4, 6, 2, 1>; /* 96: what registers leave beside larger weights */
using nbi_moe_middle = nbi_moe_division<2, 4, 4, 2, 1>; /* 64 */
using nbi_moe_small = nbi_moe_division<1, 8, 5, 2, 2>;  /* 40: on the way to the stream's bound */
using nbi_moe_narrow = nbi_moe_division<1, 8, 2, 4, 2>; /* 16: bound by the stream of weights */

struct nbi_moe_product_args {
    nbi_moe_weights weights;
    nbi_moe_work w;
    float *out;       /* [places][rows] */
    uint32_t x_pairs; /* sorted, gate_up: pairs that share a converted row of x */
    /* masked: expert e has the places e * capacity ... + masked_m[e] - 1 */
    const uint32_t *masked_m; /* [n_experts], each at most capacity */
    uint32_t capacity;
    const float *h_scale; /* [n_experts] moe_fp4.h, gate_up: input scales of down */
};

/* Where the rows of a tile come from. */
struct nbi_moe_source {
    const char *rows;
    const float *unit;
    uint32_t row_pieces; /* of 16 bytes */
    uint32_t n_chunks;
};

/* Row r of the tile: gate_up reads the pair's row of x where it was converted once for all, else as
 * down the place's own. */
template <bool GATE_UP, bool MASKED>
static NBI_DEV uint32_t nbi_moe_source_row(const nbi_moe_product_args &a,
                                           const nbi_moe_token_tile &tile, uint32_t r)
{
    const uint32_t place = tile.first + r;
    return GATE_UP && !MASKED ? a.w.pair[place] / a.x_pairs : place;
}

/* The ring: a row of a stage is one k-tile, 8 pieces of 16 bytes; odd rows have their halves
 * exchanged, so that two rows that are read together share no banks. */
template <class D, bool GATE_UP, bool MASKED> struct nbi_moe_x_ring {
    static constexpr uint32_t PIECES = D::TOKENS * 8,
                              EACH = (PIECES + NBI_MOE_THREADS - 1) / NBI_MOE_THREADS;
    static constexpr uint32_t ROWS = NBI_MOE_THREADS / 8; /* between a thread's pieces */
    const char *rows;
    uint32_t from[EACH]; /* in pieces */
    uint32_t n;          /* tokens */
    char *stages;

    NBI_DEV void open(const nbi_moe_product_args &a, const nbi_moe_token_tile &tile,
                      const nbi_moe_source &s)
    {
        rows = s.rows;
        n = tile.n;
        stages = nbi_shared<char>();
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            const uint32_t r = i * ROWS + threadIdx.x / 8;
            const uint32_t row = r < n ? nbi_moe_source_row<GATE_UP, MASKED>(a, tile, r) : 0;
            from[i] = row * s.row_pieces + threadIdx.x % 8;
        }
    }

    NBI_DEV void fetch(uint32_t kt, uint32_t n_kt)
    {
        const uint32_t r = threadIdx.x / 8, q = threadIdx.x % 8;
        char *to = stages + (kt % NBI_MOE_STAGES * D::TOKENS + r) * NBI_MOE_TILE_X_BYTES +
                   (q ^ (r & 1) * 4) * 16;
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++)
            if (kt < n_kt && i * NBI_MOE_THREADS + threadIdx.x < PIECES)
                nbi_copy_async(to + i * ROWS * NBI_MOE_TILE_X_BYTES,
                               rows + ((size_t)from[i] + kt * 8) * 16, i * ROWS + r < n);
        nbi_copy_commit();
    }

    /* B fragments of k-steps 2 pair, 2 pair + 1 for the lane's token of column tile `first / 8`. */
    NBI_DEV nbi_u32x4 fragment(uint32_t kt, uint32_t first, uint32_t pair) const
    {
        const uint32_t r = first + (uint32_t)nbi_lane() / 4, q = pair * 4 + (nbi_lane() & 3);
        return *reinterpret_cast<const nbi_u32x4 *>(
            stages + (kt % NBI_MOE_STAGES * D::TOKENS + r) * NBI_MOE_TILE_X_BYTES +
            (q ^ (r & 1) * 4) * 16);
    }
};

/* One k-tile: weights of MT row tiles times the warp's tokens, `live` from token0 on. */
template <nbi_weight_kind KIND, class D, class R>
static NBI_DEV void nbi_moe_multiply(float (&p)[D::MT][D::NT][4],
                                     const nbi_tile<KIND> (&weights)[D::MT], const R &x,
                                     uint32_t kt, uint32_t token0, uint32_t live)
{
#pragma unroll
    for (uint32_t pair = 0; pair < 2; pair++) {
        uint32_t a[D::MT][2][4];
#pragma unroll
        for (uint32_t m = 0; m < D::MT; m++) {
            weights[m].fragment(a[m][0], 2 * pair);
            weights[m].fragment(a[m][1], 2 * pair + 1);
        }
#pragma unroll
        for (uint32_t n = 0; n < D::NT; n++) {
            if (D::SKIP && n * 8 >= live) continue;
            const nbi_u32x4 b = x.fragment(kt, token0 + n * 8, pair);
#pragma unroll
            for (uint32_t m = 0; m < D::MT; m++) {
                nbi_tile_mma<KIND>(p[m][n], a[m][0], b.v);
                nbi_tile_mma<KIND>(p[m][n], a[m][1], b.v + 2);
            }
        }
    }
}

/* y += the chunk's sums, which begin anew. */
template <nbi_weight_kind KIND, class D>
static NBI_DEV void nbi_moe_add_chunk(float (&y)[D::MT][D::NT][4], float (&p)[D::MT][D::NT][4],
                                      const nbi_cuda_packed &w, const uint32_t (&rt)[D::MT],
                                      uint32_t c, const float *unit)
{
#pragma unroll
    for (uint32_t m = 0; m < D::MT; m++) {
        const nbi_f32x2 block = nbi_tile_block_scale<KIND>(w, rt[m], c);
#pragma unroll
        for (uint32_t n = 0; n < D::NT; n++) {
            const nbi_f32x2 two_e = *reinterpret_cast<const nbi_f32x2 *>(unit + n * 8);
            nbi_chunk_add(y[m][n], p[m][n], two_e.v, block);
#pragma unroll
            for (int i = 0; i < 4; i++) p[m][n][i] = 0;
        }
    }
}

template <class D, bool GATE_UP>
static NBI_DEV void nbi_moe_store(const nbi_moe_product_args &a, const nbi_cuda_packed &w,
                                  const nbi_moe_token_tile &tile, const float (&y)[D::MT][D::NT][4],
                                  uint32_t first_rt, uint32_t token0)
{
    const uint32_t g = (uint32_t)nbi_lane() / 4, t = (uint32_t)nbi_lane() % 4;
#pragma unroll
    for (uint32_t m = 0; m < D::MT; m++) {
        const uint32_t rt = first_rt + m, low = rt * NBI_TILE_ROWS + g;
        if (rt >= w.n_rt) continue;
        const float low_scale = w.row_scale[low], high_scale = w.row_scale[low + 8];
        const uint32_t row = GATE_UP ? rt * 8 + g : low;
#pragma unroll
        for (uint32_t n = 0; n < D::NT; n++) {
#pragma unroll
            for (uint32_t j = 0; j < 2; j++) {
                const uint32_t r = token0 + n * 8 + 2 * t + j;
                if (r >= tile.n) continue;
                float *to = a.out + (size_t)(tile.first + r) * w.rows + row;
                const float low_y = y[m][n][j] * low_scale, high_y = y[m][n][2 + j] * high_scale;
                if (GATE_UP) {
                    if (row < w.rows) to[0] = nbi_moe_swiglu(low_y, high_y);
                } else {
                    if (row < w.rows) to[0] = low_y;
                    if (row + 8 < w.rows) to[8] = high_y;
                }
            }
        }
    }
}

/* 2^e of the tile's tokens, [chunk][token]; zeros behind the last token. */
template <class D, bool GATE_UP, bool MASKED>
static NBI_DEV void nbi_moe_load_units(float *unit, const nbi_moe_product_args &a,
                                       const nbi_moe_token_tile &tile, const nbi_moe_source &s)
{
    for (uint32_t i = threadIdx.x; i < D::TOKENS * s.n_chunks; i += NBI_MOE_THREADS) {
        const uint32_t r = i / s.n_chunks, c = i % s.n_chunks;
        unit[c * D::TOKENS + r] =
            r < tile.n
                ? s.unit[(size_t)nbi_moe_source_row<GATE_UP, MASKED>(a, tile, r) * s.n_chunks + c]
                : 0;
    }
}

/* The block's tile. False: there is no work for it, tile->n is 0. */
template <class D, bool MASKED>
static NBI_DEV bool nbi_moe_find_tile(const nbi_moe_product_args &a, nbi_moe_token_tile *tile)
{
    bool work_here;
    *tile = {0, 0, 0};
    if constexpr (MASKED) { /* tile y of expert z's capacity */
        const uint32_t m = nbi_load_fresh(a.masked_m + blockIdx.z), at = blockIdx.y * D::TOKENS;
        const uint32_t left = at < m ? m - at : 0;
        work_here = left > 0;
        *tile = {blockIdx.z, blockIdx.z * a.capacity + at, left < D::TOKENS ? left : D::TOKENS};
    } else {
        const uint32_t n_tiles = nbi_load_fresh(&a.w.total->n_tiles);
        work_here = blockIdx.y < n_tiles;
        if (work_here) {
            const nbi_moe_token_tile *from = a.w.tiles + blockIdx.y;
            *tile = {nbi_load_fresh(&from->expert), nbi_load_fresh(&from->first),
                     nbi_load_fresh(&from->n)};
        }
    }
    return work_here;
}

/* down asks for its first weights before the wait: which tokens it has was written three kernels
 * back or more, which is complete when the one before lets us start. */
template <nbi_weight_kind KIND, class D, bool GATE_UP, bool MASKED>
static __global__ void __launch_bounds__(NBI_MOE_THREADS, D::BLOCKS)
    nbi_moe_product_kernel(const nbi_moe_product_args a)
{
    constexpr uint32_t TILES = nbi_chunk_tiles(KIND), DEPTH = D::DEPTH;
    constexpr bool ONCE = D::WN == 1; /* else the warps beside read the same weights */
    if (GATE_UP) nbi_wait_before();
    nbi_moe_token_tile tile;
    const bool work_here = nbi_moe_find_tile<D, MASKED>(a, &tile);
    const nbi_cuda_packed w = nbi_moe_expert(a.weights, tile.expert);
    /* known to be the same in all lanes: no code for lanes that part */
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
    const uint32_t lane = (uint32_t)nbi_lane(), token0 = warp / D::WM * D::NT * 8;
    const uint32_t n_tokens = __shfl_sync(NBI_FULL_MASK, tile.n, 0);
    const uint32_t live = n_tokens > token0 ? n_tokens - token0 : 0;
    const uint32_t first_rt = (blockIdx.x * D::WM + warp % D::WM) * D::MT;
    uint32_t rt[D::MT]; /* behind the last: the last, and nothing is written */
    nbi_tile<KIND> weights[DEPTH][D::MT];
#pragma unroll
    for (uint32_t m = 0; m < D::MT; m++) {
        rt[m] = first_rt + m < w.n_rt ? first_rt + m : w.n_rt - 1;
#pragma unroll
        for (uint32_t i = 0; i < DEPTH; i++)
            if (work_here && i < w.n_kt) weights[i][m].template load<ONCE>(w, rt[m], i, lane);
    }
    if (!GATE_UP) nbi_wait_before();
    nbi_let_next();
    if (!work_here) return;

    const nbi_moe_source s = {GATE_UP ? a.w.xc : a.w.hc, GATE_UP ? a.w.xe : a.w.he,
                              w.n_kt * NBI_MOE_TILE_X_BYTES / 16, (w.n_kt + TILES - 1) / TILES};
    nbi_moe_x_ring<D, GATE_UP, MASKED> x;
    x.open(a, tile, s);
#pragma unroll
    for (uint32_t i = 0; i + 1 < NBI_MOE_STAGES; i++) x.fetch(i, w.n_kt);
    float *unit =
        reinterpret_cast<float *>(x.stages + NBI_MOE_STAGES * D::TOKENS * NBI_MOE_TILE_X_BYTES);
    nbi_moe_load_units<D, GATE_UP, MASKED>(unit, a, tile, s);
    unit += token0 + lane % 4 * 2;

    float p[D::MT][D::NT][4] = {}, y[D::MT][D::NT][4] = {};
    for (uint32_t kt0 = 0; kt0 < w.n_kt; kt0 += DEPTH) {
#pragma unroll
        for (uint32_t i = 0; i < DEPTH; i++) {
            const uint32_t kt = kt0 + i;
            if (kt >= w.n_kt) break;
            nbi_copy_wait<NBI_MOE_STAGES - 2>();
            __syncthreads();
            x.fetch(kt + NBI_MOE_STAGES - 1, w.n_kt);
            if (live) {
                nbi_moe_multiply<KIND, D>(p, weights[i], x, kt, token0, live);
#pragma unroll
                for (uint32_t m = 0; m < D::MT; m++)
                    if (kt + DEPTH < w.n_kt)
                        weights[i][m].template load<ONCE>(w, rt[m], kt + DEPTH, lane);
                if (kt % TILES == TILES - 1 || kt + 1 == w.n_kt)
                    nbi_moe_add_chunk<KIND, D>(y, p, w, rt, kt / TILES,
                                               unit + kt / TILES * D::TOKENS);
            }
        }
    }
    if (live) nbi_moe_store<D, GATE_UP>(a, w, tile, y, first_rt, token0);
}

/* ---------------------------------------------------------------- launches */

static inline uint32_t nbi_moe_chunks(nbi_weight_kind kind, uint32_t cols)
{
    return nbi_chunks_of(kind, nbi_ceil_div(cols, NBI_TILE_COLS));
}

static inline size_t nbi_moe_row_bytes(uint32_t cols)
{
    return (size_t)nbi_ceil_div(cols, NBI_TILE_COLS) * NBI_MOE_TILE_X_BYTES;
}

static inline size_t nbi_moe_product_shared(uint32_t tokens, uint32_t n_chunks)
{
    return (size_t)tokens * (NBI_MOE_STAGES * NBI_MOE_TILE_X_BYTES + n_chunks * sizeof(float));
}

static inline uint32_t nbi_moe_most_chunks(const nbi_moe_shape *s)
{
    const uint32_t x = nbi_moe_chunks(s->kind_gate_up, s->hidden),
                   h = nbi_moe_chunks(s->kind_down, s->inter);
    return x > h ? x : h;
}

/* Sorted: n_tiles tiles at most, n_experts 1. Masked: n_tiles of an expert's capacity. */
template <nbi_weight_kind KIND, class D, bool GATE_UP, bool MASKED>
static void nbi_moe_launch_division(nbi_cuda *c, const nbi_moe_product_args &a, uint32_t n_tiles,
                                    uint32_t n_experts)
{
    const nbi_cuda_packed &w = a.weights.first;
    nbi_launch(&c->rt, dim3(nbi_ceil_div(w.n_rt, D::ROW_TILES), n_tiles, n_experts),
               dim3(NBI_MOE_THREADS),
               nbi_moe_product_shared(D::TOKENS, nbi_ceil_div(w.n_kt, nbi_chunk_tiles(KIND))),
               nbi_moe_product_kernel<KIND, D, GATE_UP, MASKED>, a);
}
