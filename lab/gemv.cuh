// The matrix-vector kernels on packed NVFP4 weights: one template, the ways of loading as
// parameters.
#pragma once
#include "fp4.cuh"

enum Load { L_REG, L_CPASYNC, L_BULK };
static const char *const load_name[] = {"ld.global", "cp.async", "bulk"};

struct GemvArgs {
    const uint8_t *w;       // packed, [pool][tile][chunk] units
    int pick[8];            // slots of the chosen experts in the pool
    int tiles;              // all tiles: experts * tiles per expert
    int n;                  // tokens, at most 8 * NT
    const float *x;         // [expert or 1][n][256 C]
    size_t x_expert_stride; // 0: all experts share x
    float *y;               // [expert][n][16 TPE], scaled by `global` * 2^7
    float global;
};

// Experts that one block's tiles can touch, at most. TPE: tiles per expert.
template <int TPE> __host__ __device__ inline int experts_touched(int tiles, int grid)
{
    int per_block = (tiles + grid - 1) / grid;
    int touched = (per_block + TPE - 2) / TPE + 1, all = tiles / TPE;
    return touched < all ? touched : all;
}

struct GemvSmem {
    size_t ring, bars, x, pow, part, total;
};

template <int NT, int C, int TPE>
static inline GemvSmem gemv_smem(int load, int depth, int warps, int grid, int tiles, int n,
                                 bool shared_x)
{
    GemvSmem s;
    int ex = shared_x ? 1 : experts_touched<TPE>(tiles, grid);
    size_t units = (size_t)((tiles + grid - 1) / grid) * C, at = 0;
    s.ring = at;
    if (load != L_REG) at += (size_t)warps * (size_t)depth * UNIT;
    s.bars = at;
    at += (size_t)warps * (size_t)depth * 8;
    at = (at + 15) / 16 * 16;
    s.x = at;
    at += (size_t)(ex * n + 1) * (size_t)x_pitch(C * CHUNK); // and one row of zeros
    s.pow = at;
    at += (size_t)(ex * n * C) * 4;
    at = (at + 15) / 16 * 16;
    s.part = at;
    s.total = at + units * NT * 512;
    return s;
}

// D: L_REG: half units (three 16-byte loads a thread) in flight per warp, even; else stages of the
// warp's ring, a unit each.
template <int U, bool AFTER, int NT, int C, int TPE, int LOAD, int D>
__global__ void __launch_bounds__(D >= 8 ? 256 : 512, 1)
    gemv(const __grid_constant__ GemvArgs a, const __grid_constant__ GemvSmem lay)
{
    extern __shared__ __align__(128) uint8_t smem[];
    constexpr int PITCH = x_pitch(C * CHUNK) / 2;
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int t0 = (int)((long long)a.tiles * blockIdx.x / gridDim.x);
    const int t1 = (int)((long long)a.tiles * (blockIdx.x + 1) / gridDim.x);
    const int units = (t1 - t0) * C, e0 = t0 / TPE;
    const int mine = warp < units ? (units - warp + warps - 1) / warps : 0;
    __half *xs = (__half *)(smem + lay.x);
    float *pow2 = (float *)(smem + lay.pow), *part = (float *)(smem + lay.part);
    uint8_t *ring = smem + lay.ring + (size_t)warp * D * UNIT;
    uint64_t *bars = (uint64_t *)(smem + lay.bars) + warp * D;

    auto unit_at = [&](int i) { // the warp's i-th unit
        int u = warp + i * warps, tile = t0 + u / C, e = tile / TPE;
        return a.w + ((size_t)(a.pick[e] * TPE + tile - e * TPE) * C + u % C) * UNIT;
    };
    auto stage = [&](int i) { // starts loading the warp's i-th unit into its ring
        uint8_t *to = ring + i % D * UNIT;
        if (LOAD == L_CPASYNC) {
            if (i < mine) {
                const uint8_t *from = unit_at(i);
#pragma unroll
                for (int q = 0; q < 4; ++q)
                    cp_async16(to + q * 512 + lane * 16, from + q * 512 + lane * 16);
                if (lane < 16) cp_async16(to + 2048 + lane * 16, from + 2048 + lane * 16);
            }
            cp_async_commit();
        } else if (i < mine && lane == 0) {
            mbar_expect(&bars[i % D], UNIT);
            bulk_load(to, unit_at(i), UNIT, &bars[i % D]);
        }
    };

    uint4 c0[D], c1[D], sc[D];
    const uint8_t *next = nullptr;
    auto fetch = [&](int p, int d) { // half unit p of the warp into register slot d, d % 2 == p % 2
        if (p / 2 >= mine) return;
        if (d % 2 == 0) next = unit_at(p / 2);
        c0[d] = ld_stream(next + d % 2 * 1024 + lane * 16);
        c1[d] = ld_stream(next + d % 2 * 1024 + 512 + lane * 16);
        sc[d] = ld_stream(next + 2048 + g * 32 + d % 2 * 16);
    };

    // Weights first: they depend on nothing. Then the activations.
    pdl_trigger();
    if (LOAD == L_REG) {
#pragma unroll
        for (int d = 0; d < D; ++d) fetch(d, d);
    } else {
        if (LOAD == L_BULK) {
            if (lane == 0) {
                for (int d = 0; d < D; ++d) mbar_init(&bars[d], 1);
                mbar_fence_init();
            }
            __syncwarp();
        }
        for (int d = 0; d < D; ++d) stage(d);
    }
    pdl_wait();
    const int ex = a.x_expert_stride ? (t1 > t0 ? (t1 - 1) / TPE - e0 + 1 : 0) : 1, rows = ex * a.n;
    for (int i = warp; i < rows * C; i += warps) {
        int row = i / C, chunk = i % C, e = row / a.n, n = row % a.n;
        const float *x = a.x + (a.x_expert_stride ? (e0 + e) * a.x_expert_stride : 0) +
                         (size_t)n * C * CHUNK + chunk * CHUNK;
        float p = normalize_chunk(x, xs + (size_t)row * PITCH + chunk * CHUNK);
        if (lane == 0) pow2[i] = p;
    }
    for (int i = threadIdx.x; i < C * CHUNK / 2; i += blockDim.x)
        ((uint32_t *)(xs + (size_t)rows * PITCH))[i] = 0;
    __syncthreads();

    const __half *x[NT];
    auto set_x = [&](int tile) {
        int e = a.x_expert_stride ? tile / TPE - e0 : 0;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            int n = g + 8 * nt, row = n < a.n ? e * a.n + n : rows;
            x[nt] = xs + (size_t)row * PITCH + 4 * t;
        }
    };
    auto store = [&](int i, const float acc[NT][4]) {
        float *p = part + (size_t)(warp + i * warps) * NT * 128 + g * 8 + 2 * t;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            *(float2 *)(p + nt * 128) = make_float2(acc[nt][0], acc[nt][1]);
            *(float2 *)(p + nt * 128 + 64) = make_float2(acc[nt][2], acc[nt][3]);
        }
    };

    if (LOAD == L_REG) {
        float acc[NT][4];
        for (int p = 0; p < 2 * mine; p += D) {
#pragma unroll
            for (int d = 0; d < D; ++d) {
                if ((p + d) / 2 < mine) {
                    int u = warp + (p + d) / 2 * warps, column = u % C * CHUNK + d % 2 * 128;
                    if (d % 2 == 0) {
                        set_x(t0 + u / C);
#pragma unroll
                        for (int nt = 0; nt < NT; ++nt)
                            acc[nt][0] = acc[nt][1] = acc[nt][2] = acc[nt][3] = 0;
                    }
                    part_mma<U, AFTER, NT>(c0[d], sc[d].x, sc[d].y, x, column, acc);
                    part_mma<U, AFTER, NT>(c1[d], sc[d].z, sc[d].w, x, column + 64, acc);
                    if (d % 2 == 1) store((p + d) / 2, acc);
                    fetch(p + d + D, d);
                }
            }
        }
    } else {
        for (int i = 0; i < mine; ++i) {
            const uint8_t *from = ring + i % D * UNIT;
            int u = warp + i * warps, column = u % C * CHUNK;
            float acc[NT][4] = {};
            set_x(t0 + u / C);
            if (LOAD == L_CPASYNC) {
                cp_async_wait<D - 1>();
                __syncwarp();
            } else {
                mbar_wait(&bars[i % D], (uint32_t)(i / D) & 1);
            }
            uint4 s[2] = {*(const uint4 *)(from + 2048 + g * 32),
                          *(const uint4 *)(from + 2064 + g * 32)};
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                uint4 c = *(const uint4 *)(from + q * 512 + lane * 16);
                part_mma<U, AFTER, NT>(c, q % 2 ? s[q / 2].z : s[q / 2].x,
                                       q % 2 ? s[q / 2].w : s[q / 2].y, x, column + 64 * q, acc);
            }
            __syncwarp(); // all lanes have read the slot
            stage(i + D);
            store(i, acc);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < (t1 - t0) * 16 * a.n; i += blockDim.x) {
        int r = i % 16, n = i / 16 % a.n, tile = i / 16 / a.n, e = (t0 + tile) / TPE;
        int px = ((a.x_expert_stride ? (e - e0) * a.n : 0) + n) * C;
        float y = 0;
        for (int c = 0; c < C; ++c)
            y = fmaf(part[(size_t)((tile * C + c) * NT + n / 8) * 128 + r * 8 + n % 8],
                     pow2[px + c], y);
        a.y[((size_t)e * a.n + n) * (16 * TPE) + (t0 + tile - e * TPE) * 16 + r] =
            y * (a.global * 128);
    }
}
