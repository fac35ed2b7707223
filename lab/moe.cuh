// One MoE layer at batch 1, router output given: as two kernels, and as one persistent kernel for a
// chain of layers. Both use the same unit of work and the same sums, so their bits must agree.
#pragma once
#include "fp4.cuh"

constexpr int LAYERS = 48, TOP = 8, POOL = 16; // experts per layer in memory, 8 of them chosen
constexpr int HIDDEN = 2048, INTER = 768;
constexpr int GC = HIDDEN / CHUNK, GT = INTER / 8;  // gate/up: chunks, tiles (8 gate + 8 up rows)
constexpr int DC = INTER / CHUNK, DT = HIDDEN / 16; // down
constexpr int G_TILES = TOP * GT, D_UNITS = TOP * DC;
constexpr int WARPS = 16, THREADS = WARPS * 32, D_WARPS = 12;
constexpr int MAX_TILES = 8; // gate/up tiles of a block at most
constexpr float GLOBAL_GATE = 0.0085f, GLOBAL_UP = 0.0091f, GLOBAL_DOWN = 0.024f;

struct Layer {
    const uint8_t *gate_up, *down; // packed experts of all layers: [layer * POOL + expert]
    const int *ids;                // [LAYERS][TOP], slots of the pools above
    const float *weights;          // [LAYERS][TOP]
    const float *residual;         // [HIDDEN]
    float *x;                      // [LAYERS + 1][HIDDEN]: input of each layer
    float *h;                      // [TOP][INTER]
    unsigned *counters; // persistent form: 32 words apart; 0 layer output, 1 h, 2.. h by chunk
};

struct Smem { // beside the slots
    alignas(16) __half x[HIDDEN];
    alignas(16) __half own_x[WARPS][CHUNK];
    alignas(16) __half zero[CHUNK];
    float pow_x[GC], pow_h[D_UNITS];
    float part_g[MAX_TILES * GC][16], part_d[D_UNITS][16];
    int ids[LAYERS * TOP];
};

__device__ inline int first_tile(int block, int blocks)
{
    return G_TILES * block / blocks;
}

__device__ inline const uint8_t *gate_unit(const Layer &a, const int *ids, int tile, int chunk)
{
    int e = tile / GT;
    return a.gate_up + ((size_t)(ids[e] * GT + tile - e * GT) * GC + chunk) * UNIT;
}

__device__ inline const uint8_t *down_unit(const Layer &a, const int *ids, int tile, int j)
{
    return a.down + ((size_t)(ids[j / DC] * DT + tile) * DC + j % DC) * UNIT;
}

// Partial sums of a unit in shared memory for one vector; x: 256 values of its chunk.
__device__ inline void unit_partial(const uint8_t *unit, const __half *x, const __half *zero,
                                    float *out)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const __half *const px[1] = {(g ? zero : x) + 4 * t};
    float acc[1][4] = {};
    uint4 s[2] = {*(const uint4 *)(unit + 2048 + g * 32), *(const uint4 *)(unit + 2064 + g * 32)};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        uint4 c = *(const uint4 *)(unit + q * 512 + lane * 16);
        part_mma<U_PERM, false, 1>(c, q % 2 ? s[q / 2].z : s[q / 2].x,
                                   q % 2 ? s[q / 2].w : s[q / 2].y, px, 64 * q, acc);
    }
    if (t == 0) {
        out[g] = acc[0][0];
        out[g + 8] = acc[0][2];
    }
}

// h of one gate row and its up row: tile's partial sums [chunk][16].
__device__ inline float swiglu(const float (*part)[16], const float *pow2, int i)
{
    float gate = 0, up = 0;
    for (int c = 0; c < GC; ++c) {
        gate = fmaf(part[c][i], pow2[c], gate);
        up = fmaf(part[c][i + 8], pow2[c], up);
    }
    gate *= GLOBAL_GATE * 128;
    up *= GLOBAL_UP * 128;
    return __fdividef(gate, 1 + __expf(-gate)) * up;
}

// Row i of a down tile: experts in their order, chunks in theirs.
__device__ inline float combine(const float (*part)[16], const float *pow2, const float *weights,
                                int i)
{
    float y = 0;
    for (int e = 0; e < TOP; ++e) {
        float s = 0;
        for (int c = 0; c < DC; ++c) s = fmaf(part[e * DC + c][i], pow2[e * DC + c], s);
        y = fmaf(s * (GLOBAL_DOWN * 128), weights[e], y);
    }
    return y;
}

__device__ inline void zero_fill(Smem *sm)
{
    for (int i = threadIdx.x; i < CHUNK; i += blockDim.x) sm->zero[i] = __float2half(0);
}

// ---- two kernels ----

// EARLY: the experts are known before the previous layer ends (an upper bound); else only after it.
template <bool EARLY>
__global__ void __launch_bounds__(THREADS, 1)
    gate_up_kernel(const __grid_constant__ Layer a, int layer)
{
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ Smem sm;
    __shared__ uint64_t bars[MAX_TILES * GC];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int t0 = first_tile(blockIdx.x, gridDim.x), t1 = first_tile(blockIdx.x + 1, gridDim.x);
    const int units = (t1 - t0) * GC;
    const int *ids = a.ids + layer * TOP;

    if (!EARLY) {
        pdl_wait();
        pdl_trigger();
    }
    if (lane == 0) { // each warp fetches what it will use
        for (int u = warp; u < units; u += WARPS) mbar_init(&bars[u], 1);
        mbar_fence_init();
        for (int u = warp; u < units; u += WARPS) {
            mbar_expect(&bars[u], UNIT);
            bulk_load(slots + u * UNIT, gate_unit(a, ids, t0 + u / GC, u % GC), UNIT, &bars[u]);
        }
    }
    zero_fill(&sm);
    if (EARLY) {
        pdl_trigger();
        pdl_wait();
    }
    if (warp < GC) {
        float p = normalize_chunk(a.x + (size_t)layer * HIDDEN + warp * CHUNK, sm.x + warp * CHUNK);
        if (lane == 0) sm.pow_x[warp] = p;
    }
    __syncthreads();
    for (int u = warp; u < units; u += WARPS) {
        mbar_wait(&bars[u], 0);
        unit_partial(slots + u * UNIT, sm.x + u % GC * CHUNK, sm.zero, sm.part_g[u]);
    }
    __syncthreads();
    if (threadIdx.x < (t1 - t0) * 8) {
        int k = threadIdx.x / 8, i = threadIdx.x % 8;
        a.h[(t0 + k) * 8 + i] = swiglu(sm.part_g + k * GC, sm.pow_x, i);
    }
}

__global__ void __launch_bounds__(D_WARPS * 32, 1)
    down_kernel(const __grid_constant__ Layer a, int layer)
{
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ Smem sm;
    __shared__ uint64_t bars[D_UNITS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x;
    const int *ids = a.ids + layer * TOP;

    pdl_trigger();
    if (lane == 0) {
        for (int j = warp; j < D_UNITS; j += D_WARPS) mbar_init(&bars[j], 1);
        mbar_fence_init();
        for (int j = warp; j < D_UNITS; j += D_WARPS) {
            mbar_expect(&bars[j], UNIT);
            bulk_load(slots + j * UNIT, down_unit(a, ids, tile, j), UNIT, &bars[j]);
        }
    }
    zero_fill(&sm);
    __syncthreads();
    pdl_wait();
    for (int j = warp; j < D_UNITS; j += D_WARPS) {
        float p = normalize_chunk(a.h + j * CHUNK, sm.own_x[warp]);
        if (lane == 0) sm.pow_h[j] = p;
        __syncwarp();
        mbar_wait(&bars[j], 0);
        unit_partial(slots + j * UNIT, sm.own_x[warp], sm.zero, sm.part_d[j]);
        __syncwarp();
    }
    __syncthreads();
    if (threadIdx.x < 16) {
        int row = tile * 16 + threadIdx.x;
        a.x[(size_t)(layer + 1) * HIDDEN + row] =
            0.5f * a.residual[row] +
            combine(sm.part_d, sm.pow_h, a.weights + layer * TOP, threadIdx.x);
    }
}

// ---- one persistent kernel ----

constexpr int SLOTS = 76; // 175 KB: more than a layer's 72 units
constexpr int D_DONE = 0, H_DONE = 1, H_CHUNK = 2, N_COUNTERS = H_CHUNK + D_UNITS;

// TILED: down units wait for the 32 gate/up tiles of their own chunk; else for all of them.
template <bool EARLY, bool TILED>
__global__ void __launch_bounds__(THREADS + 32, 1)
    persistent_kernel(const __grid_constant__ Layer a)
{
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ Smem sm;
    __shared__ uint64_t full[SLOTS], empty[SLOTS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
    const int t0 = first_tile(block, gridDim.x), t1 = first_tile(block + 1, gridDim.x);
    const int g_units = (t1 - t0) * GC, d_units = block < DT ? D_UNITS : 0;
    auto counter = [&](int i) { return a.counters + i * 32; };

    for (int i = threadIdx.x; i < SLOTS; i += blockDim.x) {
        mbar_init(&full[i], 1);
        mbar_init(&empty[i], 1);
    }
    for (int i = threadIdx.x; i < LAYERS * TOP; i += blockDim.x) sm.ids[i] = a.ids[i];
    zero_fill(&sm);
    mbar_fence_init();
    __syncthreads();

    if (warp == WARPS) { // producer
        if (lane) return;
        int i = 0;
        for (int layer = 0; layer < LAYERS; ++layer) {
            const int *ids = sm.ids + layer * TOP;
            if (!EARLY && layer) poll_until(counter(D_DONE), (unsigned)(layer * DT));
            for (int u = 0; u < g_units + d_units; ++u, ++i) {
                const uint8_t *from = u < g_units ? gate_unit(a, ids, t0 + u / GC, u % GC)
                                                  : down_unit(a, ids, block, u - g_units);
                if (i >= SLOTS) mbar_wait(&empty[i % SLOTS], (uint32_t)(i / SLOTS - 1) & 1);
                mbar_expect(&full[i % SLOTS], UNIT);
                bulk_load(slots + i % SLOTS * UNIT, from, UNIT, &full[i % SLOTS]);
            }
        }
        return;
    }
    auto use = [&](int i, const __half *x, float *out) { // unit i of the block's sequence
        mbar_wait(&full[i % SLOTS], (uint32_t)(i / SLOTS) & 1);
        unit_partial(slots + i % SLOTS * UNIT, x, sm.zero, out);
        __syncwarp();
        if (lane == 0) mbar_arrive(&empty[i % SLOTS]);
    };
    for (int layer = 0, base = 0; layer < LAYERS; ++layer, base += g_units + d_units) {
        if (layer && threadIdx.x == 0) poll_until(counter(D_DONE), (unsigned)(layer * DT));
        named_sync(1, THREADS);
        if (warp < GC) {
            float p =
                normalize_chunk(a.x + (size_t)layer * HIDDEN + warp * CHUNK, sm.x + warp * CHUNK);
            if (lane == 0) sm.pow_x[warp] = p;
        }
        named_sync(1, THREADS);
        for (int u = warp; u < g_units; u += WARPS)
            use(base + u, sm.x + u % GC * CHUNK, sm.part_g[u]);
        named_sync(1, THREADS);
        if (threadIdx.x < (t1 - t0) * 8) {
            int k = threadIdx.x / 8, i = threadIdx.x % 8;
            a.h[(t0 + k) * 8 + i] = swiglu(sm.part_g + k * GC, sm.pow_x, i);
        }
        if (warp < 2) named_sync(2, 64); // the writers of h: at most 64 threads
        if (TILED) {
            if (threadIdx.x < t1 - t0)
                red_release(counter(H_CHUNK + (t0 + (int)threadIdx.x) / 32), 1);
        } else if (threadIdx.x == 0) {
            red_release(counter(H_DONE), 1);
        }
        if (!d_units) continue;
        if (!TILED) {
            if (threadIdx.x == 0) poll_until(counter(H_DONE), (unsigned)(layer + 1) * gridDim.x);
            named_sync(1, THREADS);
        }
        for (int j = warp; j < D_UNITS; j += WARPS) {
            if (TILED) {
                if (lane == 0) poll_until(counter(H_CHUNK + j), (unsigned)(layer + 1) * 32);
                __syncwarp();
            }
            float p = normalize_chunk(a.h + j * CHUNK, sm.own_x[warp]);
            if (lane == 0) sm.pow_h[j] = p;
            __syncwarp();
            use(base + g_units + j, sm.own_x[warp], sm.part_d[j]);
        }
        named_sync(1, THREADS);
        if (warp == 0) {
            if (lane < 16) {
                int row = block * 16 + lane;
                a.x[(size_t)(layer + 1) * HIDDEN + row] =
                    0.5f * a.residual[row] +
                    combine(sm.part_d, sm.pow_h, a.weights + layer * TOP, lane);
            }
            __syncwarp();
            if (lane == 0) red_release(counter(D_DONE), 1);
        }
    }
}
