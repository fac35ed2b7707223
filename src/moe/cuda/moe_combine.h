/* The last step of many rows: slots are added up. Included by moe_grouped.cu and moe_masked.cu. */
#pragma once

#include "moe/cuda/moe_product.h"

#define NBI_MOE_TOGETHER 4u /* slots of a row whose y is asked for together */

/* out: y of the pairs of a row, at their places, in the order of its slots. */
static __global__ void __launch_bounds__(NBI_MOE_THREADS)
    nbi_moe_combine_kernel(const nbi_moe_work w, float *out, const nbi_moe_slots slots,
                           uint32_t hidden)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t c = 4 * (blockIdx.x * NBI_MOE_THREADS + threadIdx.x);
    const size_t t = blockIdx.y;
    if (c >= hidden) return;
    nbi_f32x4 sum = {{0, 0, 0, 0}};
    for (uint32_t k0 = 0; k0 < slots.n; k0 += NBI_MOE_TOGETHER) { /* their loads go out together */
        nbi_f32x4 y[NBI_MOE_TOGETHER] = {};
        float weight[NBI_MOE_TOGETHER] = {};
        bool here[NBI_MOE_TOGETHER];
#pragma unroll
        for (uint32_t j = 0; j < NBI_MOE_TOGETHER; j++) {
            const uint32_t p = (uint32_t)t * slots.n + k0 + j;
            here[j] = k0 + j < slots.n && slots.expert(p) >= 0;
            if (!here[j]) continue;
            weight[j] = slots.weight(p);
            y[j] = *reinterpret_cast<const nbi_f32x4 *>(w.y + (size_t)w.place[p] * hidden + c);
        }
#pragma unroll
        for (uint32_t j = 0; j < NBI_MOE_TOGETHER; j++) {
            if (!here[j]) continue;
#pragma unroll
            for (int i = 0; i < 4; i++) sum.v[i] = fmaf(weight[j], y[j].v[i], sum.v[i]);
        }
    }
    *reinterpret_cast<nbi_f32x4 *>(out + t * hidden + c) = sum;
}
