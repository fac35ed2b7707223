/* Experts as FP4 products take them, and those products. Callers: the tables of the runners;
 * moe_masked.cu, moe_grouped.cu. */
#include "moe/cuda/moe_fp4.h"

#include <stdio.h>

#include "base/log.h"

#define STAGES 3u /* chunks of x on their way or in use */

/* ---------------------------------------------------------------- weights */

/* Rows g and g+8 of a lane's four columns, 16 bits each, from the word of tile.h. */
static NBI_DEV uint32_t both_rows(uint32_t word)
{
    uint32_t r = 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) { /* of the columns of a pair */
        const uint32_t v = word >> 16 * i & 0xffffu;
        r |= ((v >> 12 & 8u) | (v >> 9 & 7u)) << 4 * i | ((v >> 11 & 8u) | (v >> 3 & 7u))
                                                             << (8 + 4 * i);
        r |= ((v >> 9 & 8u) | (v >> 6 & 7u)) << (16 + 4 * i) | ((v >> 10 & 8u) | (v & 7u))
                                                                   << (24 + 4 * i);
    }
    return r;
}

/* The bits 14-7 of FP16(scale * 2^7) to E4M3. */
static NBI_DEV uint32_t scale_back(uint32_t byte)
{
    if (byte >= 0xf8u) return 0x7f;
    return nbi_to_e4m3(nbi_from_f16((uint16_t)(byte << 7)) * 0.0078125f);
}

/* A warp per tile, in place: a lane writes where it has read. */
static __global__ void __launch_bounds__(NBI_MOE_THREADS) repack_kernel(const nbi_moe_weights all)
{
    nbi_wait_before();
    nbi_let_next();
    const nbi_cuda_packed w = nbi_moe_expert(all, blockIdx.y);
    const size_t tile = (size_t)blockIdx.x * NBI_MOE_WARPS + threadIdx.x / NBI_WARP;
    if (tile >= (size_t)w.n_rt * w.n_kt) return;
    const uint32_t lane = (uint32_t)nbi_lane(), t = lane % 4;
    char *data = static_cast<char *>(const_cast<void *>(w.data)) + tile * 512;
    uint8_t *scales = static_cast<uint8_t *>(const_cast<void *>(w.scales)) + tile * 64;
    const nbi_u32x4 words = reinterpret_cast<const nbi_u32x4 *>(data)[lane];
    nbi_u32x4 a = {};
    /* k 8t of a group pair lies in lanes 2 (t % 2) and the next, k-steps t / 2 and 2 + t / 2 */
    const int from = (int)((lane & ~3u) + t % 2 * 2);
#pragma unroll
    for (uint32_t step = 0; step < 4; step++) {
        const uint32_t own = both_rows(words.v[step]);
        const uint32_t low = __shfl_sync(NBI_FULL_MASK, own, from);
        const uint32_t high = __shfl_sync(NBI_FULL_MASK, own, from + 1);
        if (step % 2 != t / 2) continue;
        a.v[step / 2 * 2] = (low & 0xffffu) | high << 16;
        a.v[step / 2 * 2 + 1] = low >> 16 | (high & 0xffff0000u);
    }
    const uint32_t s0 = scale_back(scales[2 * lane]), s1 = scale_back(scales[2 * lane + 1]);
    reinterpret_cast<nbi_u32x4 *>(data)[lane] = a;
    scales[2 * lane] = (uint8_t)s0;
    scales[2 * lane + 1] = (uint8_t)s1;
}

static void repack(nbi_cuda *c, const nbi_moe_weights &w, uint32_t n_experts)
{
    const uint32_t tiles = w.first.n_rt * w.first.n_kt;
    nbi_launch(&c->rt, dim3(nbi_ceil_div(tiles, NBI_MOE_WARPS), n_experts), dim3(NBI_MOE_THREADS),
               0, repack_kernel, w);
}

/* What FP4 products need and the layer lacks: "" when nothing. */
static void find_lack(const nbi_moe_experts *e, char *why, size_t n)
{
    const nbi_moe_shape *s = &e->shape;
    why[0] = 0;
    if (s->kind_gate_up != NBI_WEIGHT_NVFP4 || s->kind_down != NBI_WEIGHT_NVFP4) {
        snprintf(why, n, "the experts are %s and %s", nbi_weight_kind_name(s->kind_gate_up),
                 nbi_weight_kind_name(s->kind_down));
        return;
    }
    for (uint32_t i = 0; i < s->n_experts; i++) {
        const bool up = nbi_moe_gate_up_scale(s, &e->gate[i], &e->up[i]) > 0;
        if (up && nbi_moe_down_scale(s, &e->down[i]) > 0) continue;
        snprintf(why, n, "expert %u has no input scale for its %s", i,
                 up ? "down product" : "gate and up products");
        return;
    }
}

nb_status nbi_moe_fp4_prepare(nbi_backend *b, nbi_moe_layer **out, const nbi_moe_experts *e,
                              nb_error *err)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nbi_moe_layer *l = NULL;
    char why[96];
    NB_TRY(nbi_moe_cuda_prepare(b, &l, e, err));
    find_lack(e, why, sizeof why);
    if (why[0]) {
        nbi_log(NB_LOG_INFO, "layer %u: products of FP16, not of FP4: %s", e->layer, why);
        *out = l;
        return NB_OK;
    }
    l->fp4 = true;
    repack(c, l->gate_up, e->shape.n_experts);
    repack(c, l->down, e->shape.n_experts);
    if (c->rt.error[0]) {
        nbi_moe_cuda_release(b, &l);
        return nbi_fail(err, NB_INTERNAL, "layer %u: packing experts: %s", e->layer, c->rt.error);
    }
    *out = l;
    return NB_OK;
}

/* ---------------------------------------------------------------- products */

/* One lane's part of a tile. */
struct fp4_tile {
    nbi_u32x4 a;
    uint32_t scale; /* of row g or g+8, by the lane */

    template <bool ONCE>
    NBI_DEV void load(const nbi_cuda_packed &w, uint32_t rt, uint32_t kt, uint32_t lane)
    {
        *this = {};
        if (kt >= w.n_kt) return; /* the last chunk ends before */
        const size_t tile = (size_t)rt * w.n_kt + kt;
        a = nbi_load16<ONCE>(static_cast<const char *>(w.data) + tile * 512 + lane * 16);
        scale = __ldg(reinterpret_cast<const uint32_t *>(static_cast<const char *>(w.scales) +
                                                         tile * 64 + lane / 4 * 8 + lane % 2 * 4));
    }
};

/* The ring: a stage is one chunk of every row, 9 pieces of 16 bytes. Rows are 36 words apart, so
 * the 16 bytes that a quarter of a warp reads together share no banks. */
template <class D, bool GATE_UP, bool MASKED> struct fp4_ring {
    static constexpr uint32_t ROW = NBI_MOE_FP4_CHUNK_BYTES / 16, PIECES = D::TOKENS * ROW,
                              EACH = (PIECES + NBI_MOE_THREADS - 1) / NBI_MOE_THREADS;
    const char *rows;
    uint32_t from[EACH]; /* in pieces */
    uint32_t n, n_chunks;
    char *stages;

    NBI_DEV void open(const nbi_moe_product_args &a, const nbi_moe_token_tile &tile, uint32_t cols)
    {
        rows = GATE_UP ? a.w.xc : a.w.hc;
        n = tile.n;
        n_chunks = (cols + NBI_MOE_FP4_COLS - 1) / NBI_MOE_FP4_COLS;
        stages = nbi_shared<char>();
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            const uint32_t p = i * NBI_MOE_THREADS + threadIdx.x, r = p / ROW;
            const uint32_t row = r < n ? nbi_moe_source_row<GATE_UP, MASKED>(a, tile, r) : 0;
            from[i] = row * n_chunks * ROW + p % ROW;
        }
    }

    NBI_DEV void fetch(uint32_t c)
    {
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            const uint32_t p = i * NBI_MOE_THREADS + threadIdx.x;
            if (c < n_chunks && p < PIECES)
                nbi_copy_async(stages + (c % STAGES * PIECES + p) * 16,
                               rows + ((size_t)from[i] + c * ROW) * 16, p / ROW < n);
        }
        nbi_copy_commit();
    }

    /* The chunk of the lane's token of column tile `first / 8`. */
    NBI_DEV const char *row(uint32_t c, uint32_t first) const
    {
        return stages + (c % STAGES * D::TOKENS + first + (uint32_t)nbi_lane() / 4) * ROW * 16;
    }
};

/* k-tiles 2 pair and 2 pair + 1 of chunk c. */
template <class D, class R>
static NBI_DEV void multiply(float (&y)[D::MT][D::NT][4],
                             const fp4_tile (&w)[NBI_MOE_FP4_TILES][D::MT], const R &x, uint32_t c,
                             uint32_t pair, uint32_t token0, uint32_t live)
{
#pragma unroll
    for (uint32_t n = 0; n < D::NT; n++) {
        if (D::SKIP && n * 8 >= live) continue;
        const char *row = x.row(c, token0 + n * 8);
        const nbi_u32x4 b = *reinterpret_cast<const nbi_u32x4 *>(
            row + ((uint32_t)nbi_lane() & 3u) * 32 + pair * 16);
        const nbi_u32x2 s = *reinterpret_cast<const nbi_u32x2 *>(row + 128 + pair * 8);
#pragma unroll
        for (uint32_t j = 0; j < 2; j++)
#pragma unroll
            for (uint32_t m = 0; m < D::MT; m++) {
                const fp4_tile &a = w[2 * pair + j][m];
                nbi_mma_fp4(y[m][n], a.a.v, b.v + 2 * j, a.scale, s.v[j]);
            }
    }
}

/* Rows of h as floats in shared memory: lanes that write together share no banks, and neither do
 * those that read 16 bytes. */
#define H_PITCH (NBI_TILE_COLS + 4)

/* h of the block's 64 columns, a k-tile of down, rounded to rows of FP4. Behind the last k-tile the
 * chunk is filled with zeros. */
template <class D>
static NBI_DEV void store_h(const nbi_moe_product_args &a, const nbi_cuda_packed &w,
                            const nbi_moe_token_tile &tile, const float (&y)[D::MT][D::NT][4],
                            uint32_t first_rt, uint32_t token0)
{
    static_assert(D::ROW_TILES * 8 == NBI_TILE_COLS, "a block has one k-tile of h");
    const uint32_t g = (uint32_t)nbi_lane() / 4, t = (uint32_t)nbi_lane() % 4;
    float *h = nbi_shared<float>();
    nbi_copy_wait<0>();
    __syncthreads(); /* the ring is read */
#pragma unroll
    for (uint32_t m = 0; m < D::MT; m++) {
        const uint32_t rt = first_rt + m, row = rt * 8 + g, low = rt * NBI_TILE_ROWS + g;
        const bool here = rt < w.n_rt && row < w.rows;
        const float low_scale = here ? w.row_scale[low] : 0;
        const float high_scale = here ? w.row_scale[low + 8] : 0;
#pragma unroll
        for (uint32_t n = 0; n < D::NT; n++)
#pragma unroll
            for (uint32_t j = 0; j < 2; j++)
                h[(token0 + n * 8 + 2 * t + j) * H_PITCH + row % NBI_TILE_COLS] =
                    here ? nbi_moe_swiglu(y[m][n][j] * low_scale, y[m][n][2 + j] * high_scale) : 0;
    }
    __syncthreads();
    const uint32_t n_kt = (w.rows + NBI_TILE_COLS - 1) / NBI_TILE_COLS, kt = blockIdx.x;
    const uint32_t n_chunks = (n_kt + NBI_MOE_FP4_TILES - 1) / NBI_MOE_FP4_TILES;
    const float scale = a.h_scale[tile.expert];
    for (uint32_t i = threadIdx.x; i < D::TOKENS * 8; i += NBI_MOE_THREADS) { /* whole warps */
        const uint32_t r = i / 8, at = i % 8;
        const float *from = h + r * H_PITCH + at * 8;
        nbi_moe_fp4_octet octet(*reinterpret_cast<const nbi_f32x4 *>(from),
                                *reinterpret_cast<const nbi_f32x4 *>(from + 4), scale);
        if (r >= tile.n) continue;
        char *chunk = a.w.hc + ((size_t)(tile.first + r) * n_chunks + kt / NBI_MOE_FP4_TILES) *
                                   NBI_MOE_FP4_CHUNK_BYTES;
        octet.store(chunk, kt % NBI_MOE_FP4_TILES, at);
        if (kt + 1 != n_kt) continue;
        octet.codes = octet.scale = 0;
        for (uint32_t k = kt % NBI_MOE_FP4_TILES + 1; k < NBI_MOE_FP4_TILES; k++)
            octet.store(chunk, k, at);
    }
}

/* down asks for its first weights before the wait: its tile was written before gate_up, which lets
 * it start behind a wait of its own. */
template <class D, bool GATE_UP, bool MASKED>
static __global__ void __launch_bounds__(NBI_MOE_THREADS, D::BLOCKS)
    product_kernel(const nbi_moe_product_args a)
{
    constexpr uint32_t TILES = NBI_MOE_FP4_TILES;
    constexpr bool ONCE = D::WN == 1;
    if (GATE_UP) nbi_wait_before();
    nbi_moe_token_tile tile;
    const bool work_here = nbi_moe_find_tile<D, MASKED>(a, &tile);
    const nbi_cuda_packed w = nbi_moe_expert(a.weights, tile.expert);
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
    const uint32_t lane = (uint32_t)nbi_lane(), token0 = warp / D::WM * D::NT * 8;
    const uint32_t n_tokens = __shfl_sync(NBI_FULL_MASK, tile.n, 0);
    const uint32_t live = n_tokens > token0 ? n_tokens - token0 : 0;
    const uint32_t first_rt = (blockIdx.x * D::WM + warp % D::WM) * D::MT;
    uint32_t rt[D::MT]; /* behind the last: the last, and nothing is written */
    fp4_tile weights[TILES][D::MT];
#pragma unroll
    for (uint32_t m = 0; m < D::MT; m++) {
        rt[m] = first_rt + m < w.n_rt ? first_rt + m : w.n_rt - 1;
#pragma unroll
        for (uint32_t i = 0; i < TILES; i++)
            if (work_here) weights[i][m].template load<ONCE>(w, rt[m], i, lane);
    }
    if (!GATE_UP) nbi_wait_before();
    nbi_let_next();
    if (!work_here) return;

    fp4_ring<D, GATE_UP, MASKED> x;
    x.open(a, tile, w.cols);
#pragma unroll
    for (uint32_t i = 0; i + 1 < STAGES; i++) x.fetch(i);
    float y[D::MT][D::NT][4] = {};
    for (uint32_t c = 0; c < x.n_chunks; c++) {
        nbi_copy_wait<STAGES - 2>();
        __syncthreads();
        x.fetch(c + STAGES - 1);
        if (!live) continue;
#pragma unroll
        for (uint32_t pair = 0; pair < 2; pair++) {
            multiply<D>(y, weights, x, c, pair, token0, live);
#pragma unroll
            for (uint32_t i = 2 * pair; i < 2 * pair + 2; i++)
#pragma unroll
                for (uint32_t m = 0; m < D::MT; m++)
                    weights[i][m].template load<ONCE>(w, rt[m], (c + 1) * TILES + i, lane);
        }
    }
    const float unit = nbi_moe_input_scale(a.weights, tile.expert) * 0.0078125f; /* 2^-7 */
#pragma unroll
    for (uint32_t m = 0; m < D::MT; m++)
#pragma unroll
        for (uint32_t n = 0; n < D::NT; n++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) y[m][n][i] *= unit;
    if constexpr (GATE_UP)
        store_h<D>(a, w, tile, y, first_rt, token0);
    else if (live)
        nbi_moe_store<D, false>(a, w, tile, y, first_rt, token0);
}

/* ---------------------------------------------------------------- launches */

uint32_t nbi_moe_fp4_tokens(uint32_t rows_each)
{
    return rows_each > 56   ? nbi_moe_large::TOKENS
           : rows_each > 34 ? nbi_moe_middle::TOKENS
           : rows_each > 8  ? nbi_moe_small::TOKENS
                            : nbi_moe_narrow::TOKENS;
}

template <class D, bool GATE_UP, bool MASKED>
static void launch_division(nbi_cuda *c, const nbi_moe_product_args &a, uint32_t n_tiles,
                            uint32_t n_experts)
{
    nbi_launch(&c->rt, dim3(nbi_ceil_div(a.weights.first.n_rt, D::ROW_TILES), n_tiles, n_experts),
               dim3(NBI_MOE_THREADS), (size_t)D::TOKENS * STAGES * NBI_MOE_FP4_CHUNK_BYTES,
               product_kernel<D, GATE_UP, MASKED>, a);
}

template <bool GATE_UP>
static void launch_product(nbi_cuda *c, const nbi_moe_product_args &a, uint32_t tokens, bool masked,
                           uint32_t n_tiles, uint32_t n_experts)
{
    if (masked && tokens == nbi_moe_small::TOKENS)
        launch_division<nbi_moe_small, GATE_UP, true>(c, a, n_tiles, n_experts);
    else if (masked)
        launch_division<nbi_moe_narrow, GATE_UP, true>(c, a, n_tiles, n_experts);
    else if (tokens == nbi_moe_large::TOKENS)
        launch_division<nbi_moe_large, GATE_UP, false>(c, a, n_tiles, n_experts);
    else if (tokens == nbi_moe_middle::TOKENS)
        launch_division<nbi_moe_middle, GATE_UP, false>(c, a, n_tiles, n_experts);
    else if (tokens == nbi_moe_small::TOKENS)
        launch_division<nbi_moe_small, GATE_UP, false>(c, a, n_tiles, n_experts);
    else
        launch_division<nbi_moe_narrow, GATE_UP, false>(c, a, n_tiles, n_experts);
}

void nbi_moe_fp4_product(nbi_cuda *c, const nbi_moe_product_args &a, uint32_t tokens, bool gate_up,
                         bool masked, uint32_t n_tiles, uint32_t n_experts)
{
    if (gate_up)
        launch_product<true>(c, a, tokens, masked, n_tiles, n_experts);
    else
        launch_product<false>(c, a, tokens, masked, n_tiles, n_experts);
}
