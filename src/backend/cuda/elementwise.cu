/* Operators that touch every value once. Callers: the backend's table.
 *
 * A block is one row, or 256 values; sums go over the block's threads in a fixed tree, so that a
 * row's bits depend on its width alone. */
#include "backend/cuda/cuda_backend.h"

#define THREADS 256u

static __global__ void swiglu_kernel(float *out, const float *gate, const float *up, uint32_t width,
                                     uint32_t in_stride, uint32_t out_stride)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (i >= width) return;
    const float g = gate[(size_t)t * in_stride + i], u = up[(size_t)t * in_stride + i];
    out[(size_t)t * out_stride + i] = g / (1.0f + expf(-g)) * u;
}

void nbi_cuda_swiglu(nbi_backend *b, const nbi_swiglu_args *a)
{
    nbi_cuda *c = nbi_cuda_of(b);
    if (!a->n_rows || !a->width) return;
    nbi_launch(&c->rt, dim3(nbi_ceil_div(a->width, THREADS), a->n_rows), dim3(THREADS), 0,
               swiglu_kernel, static_cast<float *>(a->out), static_cast<const float *>(a->gate),
               static_cast<const float *>(a->up), a->width, a->in_stride, a->out_stride);
}
