/* RMSNorm of a row by warps: the operator itself (elementwise.cu), and products that norm what they
 * multiply on their own (stream_linear.cu). One order of additions for all: a warp
 * has a chunk of 256 columns, a lane of it the columns 4 l ... and 128 + 4 l ...; its squares in
 * this order, then those of the lanes by a tree, then the chunks in ascending order. */
#pragma once

#include "backend/backend.h"
#include "backend/cuda/tile.h"

#define NBI_NORM_COLS  256u
#define NBI_NORM_WARPS 32u /* of a wider row, a warp goes on with chunk w + 32 */

struct nbi_norm_args {
    float *out, *x_out; /* x_out: where x + delta goes */
    const float *x, *delta, *weight;
    float eps;
    uint32_t width, x_stride, out_stride;
    int32_t *row_fault, fault;
    bool vec; /* all rows start at multiples of 16 bytes, width is a multiple of 4 */
};

inline nbi_norm_args nbi_norm_of(const nbi_rmsnorm_args *a)
{
    nbi_norm_args k = {};
    k.out = static_cast<float *>(a->out);
    k.x = static_cast<const float *>(a->x);
    k.x_out = static_cast<float *>(a->x_out ? a->x_out : a->x);
    k.delta = static_cast<const float *>(a->delta);
    k.weight = a->weight;
    k.eps = a->eps;
    k.width = a->width;
    k.x_stride = a->x_stride;
    k.out_stride = a->out_stride;
    k.row_fault = a->row_fault;
    k.fault = static_cast<int32_t>(1 + a->layer * NBI_WHERE_COUNT + a->where);
    k.vec = nbi_x_fast(k.x, k.x_stride, k.width) && nbi_x_fast(k.x_out, k.x_stride, k.width) &&
            nbi_x_fast(k.delta, k.width, k.width) && nbi_x_fast(k.weight, 0, k.width) &&
            nbi_x_fast(k.out, k.out_stride, k.width);
    return k;
}

/* A lane's two groups of the chunk that begins at column `first`. vec: n is a multiple of 4, and
 * the row starts at a multiple of 16 bytes. */
struct nbi_norm_part {
    nbi_f32x4 v[2];

    NBI_DEV void load(const float *row, uint32_t first, uint32_t n, bool vec)
    {
        const uint32_t i = first + 4 * (uint32_t)nbi_lane();
        v[0] = nbi_x_load(row, i, n, vec);
        v[1] = nbi_x_load(row, i + 128, n, vec);
    }

    NBI_DEV void store(float *row, uint32_t first, uint32_t n, bool vec) const
    {
        const uint32_t i = first + 4 * (uint32_t)nbi_lane();
        nbi_x_store(row, i, n, vec, v[0]);
        nbi_x_store(row, i + 128, n, vec, v[1]);
    }

    NBI_DEV void add(const nbi_norm_part &d)
    {
#pragma unroll
        for (int k = 0; k < 8; k++) v[k / 4].v[k % 4] += d.v[k / 4].v[k % 4];
    }

    NBI_DEV float squares(float sum) const
    {
#pragma unroll
        for (int k = 0; k < 8; k++) sum = fmaf(v[k / 4].v[k % 4], v[k / 4].v[k % 4], sum);
        return sum;
    }

    NBI_DEV void scale(float by, const nbi_norm_part &weight)
    {
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k / 4].v[k % 4] = v[k / 4].v[k % 4] * by * weight.v[k / 4].v[k % 4];
    }
};

/* x + delta of row t. vec: of both. */
NBI_DEV void nbi_norm_take(nbi_norm_part *p, const nbi_norm_args &a, uint32_t t, uint32_t first,
                           bool vec)
{
    p->load(a.x + (size_t)t * a.x_stride, first, a.width, vec);
    if (!a.delta) return;
    nbi_norm_part d;
    d.load(a.delta + (size_t)t * a.width, first, a.width, vec);
    p->add(d);
}

NBI_DEV float nbi_norm_sum(const float *parts, uint32_t n)
{
    float sum = 0;
#pragma unroll 8
    for (uint32_t i = 0; i < n; i++) sum += parts[i];
    return sum;
}

NBI_DEV float nbi_norm_factor(const nbi_norm_args &a, float squares)
{
    return 1.0f / sqrtf(squares / static_cast<float>(a.width) + a.eps);
}

NBI_DEV void nbi_norm_guard(const nbi_norm_args &a, uint32_t t, float squares)
{
    if (a.row_fault && !nbi_finite(squares) && !a.row_fault[t]) a.row_fault[t] = a.fault;
}
