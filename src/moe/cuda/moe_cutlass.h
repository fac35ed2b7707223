/* Grouped products of 16-bit rows and 16-bit weights, one for each expert, through CUTLASS.
 * Callers: moe_cutlass.cu, which says what the rows and weights are. */
#pragma once

#include "moe/cuda/moe_cuda.h"

/* Product i: d[i] [m][n] = a[i] [m][k] times the transpose of b[i] [n][k], all without gaps between
 * rows, d in float32. Arrays of the device, written there: the host does not know the experts. */
struct nbi_moe_problems {
    int32_t *size; /* [..][3]: m, n, k; m may be 0, n and k are multiples of 8 */
    void **a, **b;
    float **d;
    int64_t *k, *n;
};

/* The first n_problems of the list. bf16: else FP16. few: tiles for up to 32 rows of an expert; the
 * bits are the same. An element is the sum over k in ascending steps of 16, whatever m is. */
void nbi_moe_cutlass_product(nbi_cuda *c, const nbi_moe_problems &p, uint32_t n_problems, bool bf16,
                             bool few);
