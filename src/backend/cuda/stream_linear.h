/* Linear layers of few tokens by streaming (stream.h). Callers: linear.cu, the planner of a step.
 */
#pragma once

#include "backend/cuda/cuda_backend.h"

#define NBI_STREAM_JOBS NBI_CUDA_PENDING /* matrices that one launch can hold */

/* Whether one launch can do these calls: the same x, rows and columns, packed weights of one kind,
 * at most 16 rows, a device with bulk copies. */
bool nbi_cuda_stream_fits(const nbi_cuda *c, const nbi_linear_args *calls, uint32_t n);

/* Does them; they fit. The bits are those of separate calls. */
void nbi_cuda_stream_linear(nbi_cuda *c, const nbi_linear_args *calls, uint32_t n);
