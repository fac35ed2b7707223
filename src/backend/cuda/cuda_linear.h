/* Matrix products of the CUDA backend from inside. Callers: linear*.cu.
 *
 * Three kernels give one set of bits (tile.h): few tokens stream the weights once, many tokens read
 * converted activations from scratch; exact products are apart. */
#pragma once

#include "backend/cuda/pack.h"

#define NBI_LINEAR_FEW 16u /* tokens of the streaming kernel */

/* One product. y[t][r] = sum_c W[r][c] x[t][c] * factor of row r + bias[r]. */
struct nbi_linear_call {
    nbi_cuda_packed w;
    float *y;
    const float *x, *bias; /* bias may be NULL */
    uint32_t n_tokens, x_stride, y_stride;
    float input_scale; /* of NVFP4 activations; 0: x is as it is */
    bool fast;         /* rows of x can be read 16 bytes at a time */
};

/* The factor behind a row's sum. */
NBI_DEV float nbi_linear_factor(const nbi_linear_call &a, uint32_t row)
{
    const float f = a.w.row_scale[row];
    return a.input_scale > 0 ? f * a.input_scale : f;
}

/* x of one chunk as B fragments; returns e. W4A4: input_scale is set. */
template <nbi_weight_kind KIND, bool W4A4, bool TWICE = false>
NBI_DEV int nbi_linear_chunk(uint32_t b[][2], const nbi_linear_call &a, uint32_t token,
                             uint32_t chunk)
{
    const float *row = token < a.n_tokens ? a.x + (size_t)token * a.x_stride : NULL;
    const uint32_t first = chunk * nbi_chunk_tiles(KIND) * NBI_TILE_COLS;
    if constexpr (W4A4) {
        nbi_x_chunk_w4a4(b, row, first, a.w.cols, a.fast, a.input_scale);
        return 0;
    } else {
        return nbi_x_chunk<KIND, TWICE>(b, row, first, a.w.cols, a.fast);
    }
}

inline uint32_t nbi_linear_chunks(const nbi_cuda_packed *w)
{
    return nbi_chunks_of(w->kind, w->n_kt);
}

void nbi_linear_few(nbi_cuda *c, const nbi_linear_call *a);
void nbi_linear_many(nbi_cuda *c, const nbi_linear_call *a);
/* On warpgroups; false: not on this device, or too little work. The scratch is that of many. */
bool nbi_linear_wide(nbi_cuda *c, const nbi_linear_call *a);
size_t nbi_linear_many_scratch(uint32_t n_tokens, uint32_t cols);
void nbi_linear_exact(nbi_cuda *c, const nbi_linear_call *a);
