/* Products of NVFP4 values on the matrix units of SM120: the instruction, and what stands in for it
 * elsewhere with the same registers. A sibling of device.h, for the kernels that need it. */
#pragma once

#include "backend/cuda/device.h"

/* Architecture-specific code of 12.x (sm_120a, sm_121a, sm_120f); plain sm_120 lacks it. */
#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL) || \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ == 1200)
#define NBI_FP4 1
#else
#define NBI_FP4 0
#endif

/* Four E2M1 codes (16 bits, the first lowest) to FP16 times 2^-14: pairs 0 1 and 2 3. */
NBI_DEV void nbi_e2m1_f16(uint32_t r[2], uint32_t four)
{
    const uint32_t a = (four & 0xfu) | (four & 0xf0u) << 12;
    const uint32_t b = (four >> 8 & 0xfu) | (four >> 8 & 0xf0u) << 12;
    r[0] = (a & 0x00080008u) << 12 | (a & 0x00070007u) << 9;
    r[1] = (b & 0x00080008u) << 12 | (b & 0x00070007u) << 9;
}

/* nbi_mma_fp4() by FP16 products: registers of the same layout. A group of 16 is one m16n8k16,
 * whose products and sum are exact; d = fmaf(sum, scale of a * scale of b, d), groups ascending. */
NBI_DEV void nbi_mma_fp4_by_f16(float d[4], const uint32_t a[4], const uint32_t b[2],
                                uint32_t scale_a, uint32_t scale_b)
{
    const int quad = nbi_lane() & ~3, t = nbi_lane() & 3;
    const uint32_t row[2] = {__shfl_sync(NBI_FULL_MASK, scale_a, quad),
                             __shfl_sync(NBI_FULL_MASK, scale_a, quad + 1)};
    const uint32_t column[2] = {__shfl_sync(NBI_FULL_MASK, scale_b, 8 * t),
                                __shfl_sync(NBI_FULL_MASK, scale_b, 8 * t + 4)};
#pragma unroll
    for (int group = 0; group < 4; group++) {
        /* lanes 2 (group % 2) and the next hold it; this lane takes four of its 16 values */
        const int from = quad + group % 2 * 2 + t / 2, half = t % 2 * 16;
        uint32_t fa[4], fb[2], pair[2];
#pragma unroll
        for (int high = 0; high < 2; high++) {
            const uint32_t word = __shfl_sync(NBI_FULL_MASK, a[group / 2 * 2 + high], from);
            nbi_e2m1_f16(pair, word >> half & 0xffffu);
            fa[high] = pair[0];
            fa[high + 2] = pair[1];
        }
        nbi_e2m1_f16(fb, __shfl_sync(NBI_FULL_MASK, b[group / 2], from) >> half & 0xffffu);
        float sum[4] = {0, 0, 0, 0};
        nbi_mma_f16(sum, fa, fb);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float s = nbi_from_e4m3((uint8_t)(row[i / 2] >> 8 * group & 0x7fu)) *
                            nbi_from_e4m3((uint8_t)(column[i % 2] >> 8 * group & 0x7fu));
            d[i] = fmaf(sum[i] * 268435456.0f, s, d[i]); /* 2^28 */
        }
    }
}

#if !NBI_EMULATED
/* A call: inlined it would fill kernels that nobody takes on such a device. */
static __device__ __noinline__ nbi_f32x4 nbi_mma_fp4_called(nbi_f32x4 d, nbi_u32x4 a, nbi_u32x2 b,
                                                            uint32_t scale_a, uint32_t scale_b)
{
    nbi_mma_fp4_by_f16(d.v, a.v, b.v, scale_a, scale_b);
    return d;
}
#endif

/* d += (a scale_a) (b scale_b), m16n8k64, E2M1 values with an UE4M3 scale for each 16 along k, FP32
 * sums. Lane (g = lane / 4, t = lane % 4), eight values in a register, the first lowest:
 *   a[0] row g, k 8t ... 8t+7          a[1] row g+8, the same k
 *   a[2] row g, k 32+8t ... 32+8t+7    a[3] row g+8, the same k
 *   b[0] column g, k 8t ... 8t+7       b[1] column g, k 32+8t ... 32+8t+7
 *   d[0] d[1] row g, columns 2t 2t+1; d[2] d[3] row g+8
 *   scale_a: byte i is of k 16i ... 16i+15. Lane t = 0 gives those of row g, t = 1 those of row
 *   g+8 (thread-id-a 0); what t = 2, 3 hold is not looked at
 *   scale_b: the same of column g, from t = 0 (thread-id-b 0)
 * Source: PTX ISA, mma.m16n8k64 and "Block Scaling" (scale_vec::4X: byte-id 0); CUTLASS 4,
 * mma_traits_sm120.hpp, SM120_16x8x64_TN_VS (ALayout, BLayout, SFALayout, SFBLayout).
 *
 * Products and the sums of a group are exact in float32. In which order the groups and d are added,
 * and how that is rounded, PTX leaves to the device: sums are a function of the row, the column and
 * the order of the calls alone, but have bits of their own. Without the instruction:
 * nbi_mma_fp4_by_f16(). A scale of 0x7f is NaN. */
NBI_DEV void nbi_mma_fp4(float d[4], const uint32_t a[4], const uint32_t b[2], uint32_t scale_a,
                         uint32_t scale_b)
{
#if NBI_EMULATED
    nbi_emu_mma_fp4(d, a, b, scale_a, scale_b);
#elif NBI_FP4
    asm volatile("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32."
                 "e2m1.e2m1.f32.ue4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3}, %10, {0, 0}, %11, {0, 0};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),
                   "r"(scale_b));
#else
    const nbi_f32x4 sum = nbi_mma_fp4_called({{d[0], d[1], d[2], d[3]}}, {{a[0], a[1], a[2], a[3]}},
                                             {{b[0], b[1]}}, scale_a, scale_b);
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] = sum.v[i];
#endif
}
