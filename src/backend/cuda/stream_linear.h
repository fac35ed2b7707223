/* Linear layers of few tokens by streaming (stream.h). Callers: linear.cu, the planner of a step.
 */
#pragma once

#include "backend/cuda/cuda_backend.h"

#define NBI_STREAM_JOBS NBI_CUDA_PENDING /* matrices that one launch can hold */

/* Whether one launch can do these calls: the same x, rows and columns, packed weights of one kind,
 * at most 16 rows, a device with bulk copies. */
bool nbi_cuda_stream_fits(const nbi_cuda *c, const nbi_linear_args *calls, uint32_t n);

/* What else a launch does: what makes x, and what becomes of the last y. */
struct nbi_stream_around {
    const nbi_rmsnorm_args *norm;  /* nbi_cuda_norm_waits(), nbi_cuda_norm_before() each call */
    const nbi_peer_view *peers;    /* the norm sums its delta over ranks; NULL */
    const nbi_swiglu_args *swiglu; /* or this one, the same way */
    const nbi_add_args *add;       /* nbi_cuda_add_behind() the last call */
};

/* Does them; they fit. The bits are those of separate calls. */
void nbi_cuda_stream_linear(nbi_cuda *c, const nbi_linear_args *calls, uint32_t n,
                            const nbi_stream_around *around);

/* Whether a norm can be part of the products behind it: few rows, and what it reads stays as it is
 * while the blocks of a launch read it. The same of silu(gate) * up that is not wanted in memory.
 */
bool nbi_cuda_norm_waits(const nbi_cuda *c, const nbi_rmsnorm_args *a);
bool nbi_cuda_swiglu_waits(const nbi_cuda *c, const nbi_swiglu_args *a);

/* Whether this product multiplies what the norm or silu(gate) * up makes, and leaves alone what
 * that reads. */
bool nbi_cuda_norm_before(const nbi_rmsnorm_args *norm, const nbi_linear_args *a);
bool nbi_cuda_swiglu_before(const nbi_swiglu_args *swiglu, const nbi_linear_args *a);

/* Whether this addition takes what the product makes, which is not wanted in memory. swiglu: what
 * makes x, or NULL. */
bool nbi_cuda_add_behind(const nbi_linear_args *a, const nbi_swiglu_args *swiglu,
                         const nbi_add_args *add);
