/* Linear layers of some dozen tokens with K divided over blocks (split_linear.cu). Callers:
 * linear.cu. */
#pragma once

#include "backend/cuda/cuda_backend.h"

#define NBI_SPLIT_TOKENS 64u /* at most */

/* Scratch that these products can use. */
size_t nbi_cuda_split_scratch(const nbi_cuda *c, const nbi_limits *limits);

/* Whether one pair of launches can do these calls: the same x, rows and columns, packed weights of
 * one kind, 9 to 64 rows, a device with bulk copies. */
bool nbi_cuda_split_fits(const nbi_cuda *c, const nbi_linear_args *calls, uint32_t n);

/* Does them; they fit. The bits are those of separate calls by other kernels. add: see
 * nbi_stream_around. */
void nbi_cuda_split_linear(nbi_cuda *c, const nbi_linear_args *calls, uint32_t n,
                           const nbi_add_args *add);
