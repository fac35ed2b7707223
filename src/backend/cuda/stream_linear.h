/* Linear layers of few tokens by streaming (stream.h). Callers: linear.cu, the planner of a step.
 */
#pragma once

#include "backend/cuda/cuda_backend.h"

#define NBI_STREAM_JOBS NBI_CUDA_PENDING /* matrices that one launch can hold */

/* Whether one launch can do these calls: the same x, rows and columns, packed weights of one kind,
 * at most 16 rows, a device with bulk copies. */
bool nbi_cuda_stream_fits(const nbi_cuda *c, const nbi_linear_args *calls, uint32_t n);

/* Does them; they fit. The bits are those of separate calls. norm: what x is made by, in the same
 * launch (nbi_cuda_norm_waits(), nbi_cuda_norm_before() for each call), or NULL. */
void nbi_cuda_stream_linear(nbi_cuda *c, const nbi_linear_args *calls, uint32_t n,
                            const nbi_rmsnorm_args *norm);

/* Whether a norm can be part of the products behind it: few rows, and what it reads stays as it is
 * while the blocks of a launch read it. */
bool nbi_cuda_norm_waits(const nbi_cuda *c, const nbi_rmsnorm_args *a);

/* Whether this product multiplies what the norm makes, and leaves what the norm reads alone. */
bool nbi_cuda_norm_before(const nbi_rmsnorm_args *norm, const nbi_linear_args *a);
