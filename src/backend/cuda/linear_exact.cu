/* Products in float32 with x as it is: the router, and F32 weights. One order of additions for
 * every number of tokens: K in chunks of 256; in a chunk lane t of four adds columns 16 w + 4 t ...
 * + 3 of the k-steps w in ascending order, then the lanes t pairwise; chunks in ascending order.
 *
 * A warp has a chunk of a row tile, lane (g, t) rows g and g+8 as in a fragment. */
#include "backend/cuda/cuda_linear.h"

#define WARPS 8u
#define PITCH 17u
#define FEW   512u /* tokens */
#define SOME  4u   /* tokens of a block of exact_some_kernel() */

/* Four weights of row g and of row g+8 from column c on, without the row's factor. */
template <nbi_weight_kind KIND>
static NBI_DEV void exact_weights(float w[2][4], const nbi_cuda_packed &m, uint32_t rt, uint32_t c)
{
    const uint32_t lane = (uint32_t)nbi_lane(), g = lane / 4;
    const size_t tile = (size_t)rt * m.n_kt + c / 64;
    const uint32_t step = c / 16 % 4;
    if constexpr (KIND == NBI_WEIGHT_BF16) {
        const nbi_u32x4 v = nbi_load16<true>(static_cast<const char *>(m.data) + tile * 2048 +
                                             step * 512 + lane * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i % 2][i / 2 * 2] = nbi_bf16_lo(v.v[i]);
            w[i % 2][i / 2 * 2 + 1] = nbi_bf16_hi(v.v[i]);
        }
    } else {
#pragma unroll
        for (uint32_t high = 0; high < 2; high++) {
            const uint32_t row = rt * 16 + high * 8 + g;
            if (KIND == NBI_WEIGHT_F32 && m.cols % 4 == 0 && row < m.rows && c < m.cols) {
                const nbi_u32x4 v =
                    nbi_load16<true>(static_cast<const float *>(m.data) + (size_t)row * m.cols + c);
#pragma unroll
                for (int i = 0; i < 4; i++) w[high][i] = nbi_float(v.v[i]);
                continue;
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const bool real = row < m.rows && c + i < m.cols;
                w[high][i] = real ? nbi_tile_value(m, row, c + i) : 0;
            }
        }
    }
}

template <nbi_weight_kind KIND, int N>
static NBI_DEV void exact_chunk(float sum[2][N], const nbi_linear_call &a, uint32_t rt,
                                uint32_t chunk, uint32_t token0)
{
    const uint32_t t = (uint32_t)nbi_lane() % 4;
#pragma unroll
    for (int n = 0; n < N; n++) sum[0][n] = sum[1][n] = 0;
    /* steps whose loads are on their way together */
    [[maybe_unused]] constexpr int AT_ONCE = N <= 4 ? 8 : 2;
#pragma unroll AT_ONCE
    for (uint32_t step = 0; step < NBI_CHUNK_COLS / 16; step++) {
        const uint32_t c = chunk * NBI_CHUNK_COLS + step * 16 + t * 4;
        if (chunk * NBI_CHUNK_COLS + step * 16 >= a.w.cols) break;
        float w[2][4];
        exact_weights<KIND>(w, a.w, rt, c);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const bool real = token0 + n < a.n_tokens;
            const nbi_f32x4 x = nbi_x_load(a.x + (size_t)(real ? token0 + n : 0) * a.x_stride, c,
                                           real ? a.w.cols : 0, a.fast);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[0][n] = fmaf(w[0][i], x.v[i], sum[0][n]);
                sum[1][n] = fmaf(w[1][i], x.v[i], sum[1][n]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int high = 0; high < 2; high++) {
            sum[high][n] += __shfl_xor_sync(NBI_FULL_MASK, sum[high][n], 1);
            sum[high][n] += __shfl_xor_sync(NBI_FULL_MASK, sum[high][n], 2);
        }
}

/* Block (row tile, N tokens); warp w has chunks w, w + 8, ... */
template <nbi_weight_kind KIND, int N>
static __global__ void __launch_bounds__(WARPS *NBI_WARP)
    exact_kernel(nbi_linear_call a, uint32_t n_chunks)
{
    __shared__ float sums[WARPS][N][PITCH]; /* [chunk][token][row] */
    nbi_wait_before();
    nbi_let_next();
    const uint32_t warp = threadIdx.x / NBI_WARP, lane = (uint32_t)nbi_lane();
    const uint32_t rt = blockIdx.x, token0 = blockIdx.y * N;
    const uint32_t row = threadIdx.x % 16, token = threadIdx.x / 16;
    float y = 0; /* of the thread's row and token */
    for (uint32_t first = 0; first < n_chunks; first += WARPS) {
        if (first) __syncthreads();
        if (first + warp < n_chunks) {
            float sum[2][N];
            exact_chunk<KIND, N>(sum, a, rt, first + warp, token0);
#pragma unroll
            for (int n = 0; n < N; n++)
                if (lane % 4 == 0) {
                    sums[warp][n][lane / 4] = sum[0][n];
                    sums[warp][n][lane / 4 + 8] = sum[1][n];
                }
        }
        __syncthreads();
        for (uint32_t c = 0; token < N && c < WARPS && first + c < n_chunks; c++)
            y += sums[c][token][row];
    }
    const uint32_t r = rt * 16 + row;
    if (token >= N || token0 + token >= a.n_tokens || r >= a.w.rows) return;
    const float factor = KIND == NBI_WEIGHT_F32 ? 1.0f : a.w.row_scale[r];
    a.y[(size_t)(token0 + token) * a.y_stride + r] = fmaf(y, factor, a.bias ? a.bias[r] : 0);
}

/* One token and BF16 weights, the router of a decoded token: a warp asks for its whole chunk of
 * weights before the kernel before has ended. The same additions as exact_kernel. */
static __global__ void __launch_bounds__(WARPS *NBI_WARP)
    exact_one_kernel(nbi_linear_call a, uint32_t n_chunks)
{
    constexpr uint32_t STEPS = NBI_CHUNK_COLS / 16;
    __shared__ float sums[WARPS][NBI_TILE_ROWS];
    const uint32_t warp = threadIdx.x / NBI_WARP, lane = (uint32_t)nbi_lane(), t = lane % 4;
    const uint32_t rt = blockIdx.x;
    float y = 0; /* of row threadIdx.x */
    for (uint32_t first = 0; first < n_chunks; first += WARPS) {
        const uint32_t column = (first + warp) * NBI_CHUNK_COLS;
        float w[STEPS][2][4], sum[2] = {0, 0};
#pragma unroll
        for (uint32_t k = 0; k < STEPS; k++)
            if (column + k * 16 < a.w.cols)
                exact_weights<NBI_WEIGHT_BF16>(w[k], a.w, rt, column + k * 16 + t * 4);
        if (first == 0) {
            nbi_wait_before();
            nbi_let_next();
        } else {
            __syncthreads();
        }
        nbi_f32x4 x[STEPS]; /* all on their way before the first is used */
#pragma unroll
        for (uint32_t k = 0; k < STEPS; k++)
            x[k] = nbi_x_load(a.x, column + k * 16 + t * 4, a.w.cols, a.fast);
#pragma unroll
        for (uint32_t k = 0; k < STEPS; k++) {
            if (column + k * 16 >= a.w.cols) continue;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[0] = fmaf(w[k][0][i], x[k].v[i], sum[0]);
                sum[1] = fmaf(w[k][1][i], x[k].v[i], sum[1]);
            }
        }
#pragma unroll
        for (int high = 0; high < 2; high++) {
            sum[high] += __shfl_xor_sync(NBI_FULL_MASK, sum[high], 1);
            sum[high] += __shfl_xor_sync(NBI_FULL_MASK, sum[high], 2);
            if (t == 0) sums[warp][lane / 4 + 8 * high] = sum[high];
        }
        __syncthreads();
        for (uint32_t c = 0; threadIdx.x < NBI_TILE_ROWS && c < WARPS && first + c < n_chunks; c++)
            y += sums[c][threadIdx.x];
    }
    const uint32_t r = rt * NBI_TILE_ROWS + threadIdx.x;
    if (threadIdx.x < NBI_TILE_ROWS && r < a.w.rows)
        a.y[r] = fmaf(y, a.w.row_scale[r], a.bias ? a.bias[r] : 0);
}

/* The same for some tokens, SOME a block: x of them goes to shared memory at once, so that nothing
 * waits for one load after the other. */
static __global__ void __launch_bounds__(WARPS *NBI_WARP)
    exact_some_kernel(nbi_linear_call a, uint32_t n_chunks)
{
    constexpr uint32_t STEPS = NBI_CHUNK_COLS / 16;
    __shared__ float sums[WARPS][SOME][PITCH]; /* [chunk][token][row] */
    float *x = nbi_shared<float>();            /* [token][chunk][256] */
    const uint32_t warp = threadIdx.x / NBI_WARP, lane = (uint32_t)nbi_lane(), t = lane % 4;
    const uint32_t rt = blockIdx.x, token0 = blockIdx.y * SOME, width = n_chunks * NBI_CHUNK_COLS;
    const char *weights = static_cast<const char *>(a.w.data) + (size_t)rt * a.w.n_kt * 2048;
    const uint32_t row = threadIdx.x % 16, token = threadIdx.x / 16;
    float y = 0; /* of the thread's row and token */
    for (uint32_t first = 0; first < n_chunks; first += WARPS) {
        const uint32_t column = (first + warp) * NBI_CHUNK_COLS;
        nbi_u32x4 w[STEPS] = {};
#pragma unroll
        for (uint32_t k = 0; k < STEPS; k++)
            if (column + k * 16 < a.w.cols)
                w[k] = nbi_load16<true>(weights + (column / 16 + k) * 512 + lane * 16);
        if (first == 0) {
            nbi_wait_before();
            nbi_let_next();
            for (uint32_t i = threadIdx.x; i < SOME * width / 4; i += WARPS * NBI_WARP) {
                const uint32_t n = i / (width / 4), c = i % (width / 4) * 4;
                const bool real = token0 + n < a.n_tokens && c < a.w.cols;
                nbi_copy_async(x + i * 4, real ? a.x + (token0 + n) * (size_t)a.x_stride + c : a.x,
                               real);
            }
            nbi_copy_commit();
            nbi_copy_wait<0>();
        }
        __syncthreads();
        float sum[2][SOME] = {};
#pragma unroll
        for (uint32_t k = 0; k < STEPS; k++) {
            if (column + k * 16 >= a.w.cols) continue;
            float f[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                f[i % 2][i / 2 * 2] = nbi_bf16_lo(w[k].v[i]);
                f[i % 2][i / 2 * 2 + 1] = nbi_bf16_hi(w[k].v[i]);
            }
#pragma unroll
            for (uint32_t n = 0; n < SOME; n++) {
                const nbi_f32x4 v =
                    *reinterpret_cast<const nbi_f32x4 *>(x + n * width + column + k * 16 + t * 4);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sum[0][n] = fmaf(f[0][i], v.v[i], sum[0][n]);
                    sum[1][n] = fmaf(f[1][i], v.v[i], sum[1][n]);
                }
            }
        }
#pragma unroll
        for (uint32_t n = 0; n < SOME; n++)
#pragma unroll
            for (int high = 0; high < 2; high++) {
                sum[high][n] += __shfl_xor_sync(NBI_FULL_MASK, sum[high][n], 1);
                sum[high][n] += __shfl_xor_sync(NBI_FULL_MASK, sum[high][n], 2);
                if (t == 0) sums[warp][n][lane / 4 + 8 * high] = sum[high][n];
            }
        __syncthreads();
        for (uint32_t c = 0; token < SOME && c < WARPS && first + c < n_chunks; c++)
            y += sums[c][token][row];
    }
    const uint32_t r = rt * NBI_TILE_ROWS + row;
    if (token < SOME && token0 + token < a.n_tokens && r < a.w.rows)
        a.y[(size_t)(token0 + token) * a.y_stride + r] =
            fmaf(y, a.w.row_scale[r], a.bias ? a.bias[r] : 0);
}

template <nbi_weight_kind KIND> static void run(nbi_cuda *c, const nbi_linear_call *a)
{
    const uint32_t n_chunks = nbi_ceil_div(a->w.cols, NBI_CHUNK_COLS);
    const dim3 block(WARPS * NBI_WARP);
    const size_t shared = (size_t)SOME * n_chunks * NBI_CHUNK_COLS * sizeof(float);
    if (a->n_tokens == 1 && KIND == NBI_WEIGHT_BF16)
        nbi_launch(&c->rt, dim3(a->w.n_rt), block, 0, exact_one_kernel, *a, n_chunks);
    else if (a->n_tokens <= FEW && KIND == NBI_WEIGHT_BF16 && a->fast && shared <= 96u << 10)
        nbi_launch(&c->rt, dim3(a->w.n_rt, nbi_ceil_div(a->n_tokens, SOME)), block, shared,
                   exact_some_kernel, *a, n_chunks);
    else if (a->n_tokens <= FEW) /* many small blocks: what they cost is waiting */
        nbi_launch(&c->rt, dim3(a->w.n_rt, nbi_ceil_div(a->n_tokens, 4)), block, 0,
                   exact_kernel<KIND, 4>, *a, n_chunks);
    else
        nbi_launch(&c->rt, dim3(a->w.n_rt, nbi_ceil_div(a->n_tokens, 16)), block, 0,
                   exact_kernel<KIND, 16>, *a, n_chunks);
}

void nbi_linear_exact(nbi_cuda *c, const nbi_linear_call *a)
{
    switch (a->w.kind) {
    case NBI_WEIGHT_F32: return run<NBI_WEIGHT_F32>(c, a);
    case NBI_WEIGHT_BF16: return run<NBI_WEIGHT_BF16>(c, a);
    default: return run<NBI_WEIGHT_NONE>(c, a); /* the kind is looked at for every value */
    }
}
