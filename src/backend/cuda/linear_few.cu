/* Products with at most 16 tokens: weights stream from memory once, at its rate.
 *
 * A warp owns one chunk of K and keeps x of it as B fragments in registers; the warps of a block
 * cover the chunks of a row tile, or of several where K is short. Every tile of weights is asked
 * for a whole chunk ahead: its registers are loaded anew as soon as they have been used. Chunk sums
 * meet in shared memory, two buffers in turn, and are added in the order of chunks. Where K has
 * more chunks than a block has warps, the block passes over its row tiles once for every eight
 * chunks.
 *
 * Bytes: the weights, once. Instructions per 256 NVFP4 weights and warp: 16 (6 logic, 3 multiply, 4
 * packed multiply, 2 scales, 1 mma), of 31 issue slots that a multiprocessor of an H200 has while
 * they arrive. */
#include "backend/cuda/cuda_linear.h"

#define WARPS 8u
#define STRIP 16u /* row tiles between two passes */
#define PITCH 20u /* floats from one token's sums to the next: no bank conflicts */

struct few_shape {
    uint32_t n_chunks, per_pass, n_passes; /* chunks side by side: warps of a row tile */
    uint32_t side;                         /* row tiles side by side in a block */
    uint32_t n_units;                      /* groups of `side` row tiles */
};

template <int NT> struct few_shared {
    float sums[2][WARPS][NT * 8 * PITCH]; /* [buffer][warp][token][row] */
    float unit[WARPS][NT * 8];            /* 2^e of the warp's chunk, by token */
    nbi_f32x2 block[2][WARPS];            /* FP8 block scales: [buffer][warp] rows g, rows g+8 */
    float total[STRIP][NT * 8][NBI_TILE_ROWS];
};

/* Where a block is: unit blockIdx.x + i * gridDim.x, in pass `pass` over units [first, end). */
struct few_at {
    uint32_t i, pass, first;
};

static NBI_DEV few_at next_of(const few_at &at, const few_shape &s, uint32_t n_mine)
{
    few_at n = {at.i + 1, at.pass, at.first};
    if (s.n_passes == 1) return n;
    const uint32_t end = at.first + STRIP < n_mine ? at.first + STRIP : n_mine;
    if (n.i < end) return n;
    n.i = at.first;
    if (++n.pass < s.n_passes) return n;
    n.pass = 0;
    n.i = n.first = end;
    return n;
}

/* A warp's weights: the chunk's tiles of one row tile. */
template <nbi_weight_kind KIND> struct few_weights {
    nbi_tile<KIND> tile[nbi_chunk_tiles(KIND)];
    nbi_f32x2 block;

    NBI_DEV void load(const nbi_cuda_packed &w, uint32_t rt, uint32_t chunk, uint32_t j)
    {
        const uint32_t kt = chunk * nbi_chunk_tiles(KIND) + j;
        if (rt < w.n_rt && kt < w.n_kt) tile[j].load(w, rt, kt, (uint32_t)nbi_lane());
    }

    NBI_DEV void load_block(const nbi_cuda_packed &w, uint32_t rt, uint32_t chunk)
    {
        if (KIND != NBI_WEIGHT_FP8_BLOCK || rt >= w.n_rt || chunk * 2 >= w.n_kt) return;
        block = nbi_tile_block_scale<KIND>(w, rt, chunk);
    }
};

/* The chunk's sums of one row tile; each tile's registers then take that of the next row tile. */
template <nbi_weight_kind KIND, int NT>
static NBI_DEV void chunk_sums(float p[NT][4], few_weights<KIND> &w,
                               const uint32_t b[NT][nbi_chunk_tiles(KIND) * 4][2],
                               const nbi_cuda_packed &m, uint32_t chunk, uint32_t next_rt,
                               uint32_t next_chunk)
{
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[n][i] = 0;
#pragma unroll
    for (uint32_t j = 0; j < nbi_chunk_tiles(KIND); j++) {
        if (chunk * nbi_chunk_tiles(KIND) + j < m.n_kt) {
#pragma unroll
            for (uint32_t k = 0; k < NBI_TILE_STEPS; k++) {
                uint32_t a[4];
                w.tile[j].fragment(a, k);
#pragma unroll
                for (int n = 0; n < NT; n++) nbi_tile_mma<KIND>(p[n], a, b[n][j * 4 + k]);
            }
        }
        w.load(m, next_rt, next_chunk, j);
    }
}

template <int NT> static NBI_DEV void put_sums(float *sums, const float p[NT][4])
{
    const uint32_t g = (uint32_t)nbi_lane() / 4, t = (uint32_t)nbi_lane() % 4;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            sums[(n * 8 + 2 * t + i % 2) * PITCH + g + i / 2 * 8] = p[n][i];
}

/* What a thread adds up: one row of the block's row tiles, and every step-th token. */
struct few_owner {
    uint32_t row, side, token, step;
    float factor, bias;
};

template <nbi_weight_kind KIND, int NT>
static NBI_DEV void add_chunks(const nbi_linear_call &a, const few_shape &s, few_shared<NT> &sh,
                               uint32_t buffer, const few_at &at, uint32_t rt, const few_owner &o)
{
    const uint32_t done = at.pass * s.per_pass, left = s.n_chunks - done;
    const uint32_t n = left < s.per_pass ? left : s.per_pass;
    const uint32_t row = rt * NBI_TILE_ROWS + o.row;
    if (rt >= a.w.n_rt) return;
    for (uint32_t token = o.token; token < a.n_tokens; token += o.step) {
        float y = at.pass ? sh.total[at.i - at.first][token][o.row] : 0;
        for (uint32_t c = 0; c < n; c++) {
            const uint32_t warp = o.side * s.per_pass + c;
            float unit = sh.unit[warp][token];
            if (KIND == NBI_WEIGHT_FP8_BLOCK) unit *= sh.block[buffer][warp].v[o.row / 8];
            y = fmaf(sh.sums[buffer][warp][token * PITCH + o.row], unit, y);
        }
        if (at.pass + 1 < s.n_passes)
            sh.total[at.i - at.first][token][o.row] = y;
        else if (row < a.w.rows)
            a.y[(size_t)token * a.y_stride + row] = fmaf(y, o.factor, o.bias);
    }
}

template <nbi_weight_kind KIND, int NT, int BLOCKS, bool W4A4>
static __global__ void __launch_bounds__(WARPS *NBI_WARP, BLOCKS)
    few_kernel(nbi_linear_call a, few_shape s)
{
    __shared__ few_shared<NT> sh;
    const uint32_t warp = threadIdx.x / NBI_WARP, lane = (uint32_t)nbi_lane();
    const uint32_t slot = warp % s.per_pass, side = warp / s.per_pass;
    const uint32_t n_mine = (s.n_units - blockIdx.x + gridDim.x - 1) / gridDim.x;
    few_owner o;
    o.row = threadIdx.x % NBI_TILE_ROWS;
    o.side = threadIdx.x / NBI_TILE_ROWS % s.side;
    o.token = threadIdx.x / (NBI_TILE_ROWS * s.side);
    o.step = blockDim.x / (NBI_TILE_ROWS * s.side);

    few_at at = {0, 0, 0};
    few_weights<KIND> w;
    w.load_block(a.w, blockIdx.x * s.side + side, slot);
#pragma unroll
    for (uint32_t j = 0; j < nbi_chunk_tiles(KIND); j++)
        w.load(a.w, blockIdx.x * s.side + side, slot, j);
    nbi_wait_before();
    nbi_let_next();

    uint32_t b[NT][nbi_chunk_tiles(KIND) * 4][2];
    for (uint32_t buffer = 0; at.i < n_mine; buffer ^= 1) {
        const uint32_t first_rt = (blockIdx.x + at.i * gridDim.x) * s.side;
        const uint32_t chunk = at.pass * s.per_pass + slot;
        if (at.i == at.first) {
            /* Sums of the pass before still read the units. */
            if (at.pass || at.first) __syncthreads();
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const int e =
                    chunk < s.n_chunks
                        ? nbi_linear_chunk<KIND, W4A4, (NT > 1)>(b[n], a, n * 8 + lane / 4, chunk)
                        : 0;
                if (lane % 4 == 0) sh.unit[warp][n * 8 + lane / 4] = nbi_pow2(e);
            }
        }
        const uint32_t row = (first_rt + o.side) * NBI_TILE_ROWS + o.row;
        const bool real = first_rt + o.side < a.w.n_rt && at.pass + 1 == s.n_passes;
        o.factor = real ? nbi_linear_factor(a, row) : 0;
        o.bias = real && a.bias && row < a.w.rows ? a.bias[row] : 0;

        const few_at next = next_of(at, s, n_mine);
        const uint32_t next_rt = next.i < n_mine ? (blockIdx.x + next.i * gridDim.x) * s.side + side
                                                 : a.w.n_rt; /* nothing */
        const uint32_t next_chunk = next.pass * s.per_pass + slot;
        if (chunk < s.n_chunks) {
            float p[NT][4];
            chunk_sums<KIND, NT>(p, w, b, a.w, chunk, next_rt, next_chunk);
            put_sums<NT>(sh.sums[buffer][warp], p);
            if (KIND == NBI_WEIGHT_FP8_BLOCK && lane == 0) sh.block[buffer][warp] = w.block;
        } else {
#pragma unroll
            for (uint32_t j = 0; j < nbi_chunk_tiles(KIND); j++)
                w.load(a.w, next_rt, next_chunk, j);
        }
        w.load_block(a.w, next_rt, next_chunk);
        __syncthreads();
        add_chunks<KIND, NT>(a, s, sh, buffer, at, first_rt + o.side, o);
        at = next;
    }
}

template <nbi_weight_kind KIND, int NT, int BLOCKS, bool W4A4>
static void launch(nbi_cuda *c, const nbi_linear_call *a)
{
    few_shape s;
    s.n_chunks = nbi_linear_chunks(&a->w);
    s.n_passes = nbi_ceil_div(s.n_chunks, WARPS);
    s.per_pass = nbi_ceil_div(s.n_chunks, s.n_passes);
    s.side = s.n_passes == 1 ? WARPS / s.per_pass : 1;
    s.n_units = nbi_ceil_div(a->w.n_rt, s.side);
    const uint32_t most = (uint32_t)c->rt.n_sms * BLOCKS;
    const uint32_t grid = s.n_units < most ? s.n_units : most;
    nbi_launch(&c->rt, dim3(grid), dim3(s.per_pass * s.side * NBI_WARP), 0,
               few_kernel<KIND, NT, BLOCKS, W4A4>, *a, s);
}

/* Blocks of a multiprocessor: what the registers allow. */
template <nbi_weight_kind KIND, int ONE, int TWO, bool W4A4 = false>
static void by_tokens(nbi_cuda *c, const nbi_linear_call *a)
{
    if (a->n_tokens <= 8)
        launch<KIND, 1, ONE, W4A4>(c, a);
    else
        launch<KIND, 2, TWO, W4A4>(c, a);
}

void nbi_linear_few(nbi_cuda *c, const nbi_linear_call *a)
{
    switch (a->w.kind) {
    case NBI_WEIGHT_NVFP4:
        if (a->input_scale > 0) return by_tokens<NBI_WEIGHT_NVFP4, 2, 1, true>(c, a);
        return by_tokens<NBI_WEIGHT_NVFP4, 2, 2>(c, a);
    case NBI_WEIGHT_FP8_BLOCK: return by_tokens<NBI_WEIGHT_FP8_BLOCK, 2, 2>(c, a);
    case NBI_WEIGHT_FP8_TENSOR: return by_tokens<NBI_WEIGHT_FP8_TENSOR, 2, 1>(c, a);
    case NBI_WEIGHT_BF16: return by_tokens<NBI_WEIGHT_BF16, 1, 1>(c, a);
    default: return by_tokens<NBI_WEIGHT_F16, 1, 1>(c, a);
    }
}
