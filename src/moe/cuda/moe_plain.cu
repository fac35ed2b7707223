/* Experts with float32 weights: a warp per row, exact float32 sums. No model worth serving has
 * them; they are here so that every checkpoint runs. Callers: moe_gemv.cu. */
#include "moe/cuda/moe_cuda.h"

#define THREADS 256u
#define WARPS   (THREADS / NBI_WARP)

/* Row r of expert e's matrix times x, in every lane; lanes add every 32nd column, then the tree. */
static NBI_DEV float dot(const nbi_moe_weights &w, uint32_t e, uint32_t r, const float *x)
{
    const nbi_cuda_packed p = nbi_moe_expert(w, e);
    const float *row = static_cast<const float *>(p.data) + (size_t)r * p.cols;
    float sum = 0;
    for (uint32_t c = (uint32_t)nbi_lane(); c < p.cols; c += NBI_WARP)
        sum = fmaf(row[c], x[c], sum);
    return nbi_warp_sum(sum);
}

/* Rows of gate, then as many of up. */
static __global__ void __launch_bounds__(THREADS)
    plain_gate_up_kernel(const nbi_moe_weights w, float *h, const float *x, const int32_t *ids,
                         uint32_t top_k, uint32_t n_experts)
{
    nbi_wait_before();
    nbi_let_next();
    const size_t pair = blockIdx.x;
    const uint32_t inter = w.first.rows / 2, cols = w.first.cols;
    const uint32_t row = blockIdx.y * WARPS + threadIdx.x / NBI_WARP;
    const int32_t e = ids[pair];
    if (e < 0 || (uint32_t)e >= n_experts || row >= inter) return;
    const float *from = x + pair / top_k * cols;
    const float gate = dot(w, (uint32_t)e, row, from), up = dot(w, (uint32_t)e, inter + row, from);
    if (nbi_lane() == 0) h[pair * inter + row] = nbi_moe_swiglu(gate, up);
}

static __global__ void __launch_bounds__(THREADS)
    plain_down_kernel(const nbi_moe_weights w, float *out, const float *h, const int32_t *ids,
                      const float *weights, uint32_t top_k, uint32_t n_experts)
{
    nbi_wait_before();
    nbi_let_next();
    const size_t t = blockIdx.x;
    const uint32_t row = blockIdx.y * WARPS + threadIdx.x / NBI_WARP;
    if (row >= w.first.rows) return;
    float sum = 0;
    for (uint32_t k = 0; k < top_k; k++) {
        const size_t pair = t * top_k + k;
        const int32_t e = ids[pair];
        if (e < 0 || (uint32_t)e >= n_experts) continue;
        sum = fmaf(weights[pair], dot(w, (uint32_t)e, row, h + pair * w.first.cols), sum);
    }
    if (nbi_lane() == 0) out[t * w.first.rows + row] = sum;
}

void nbi_moe_plain_gate_up(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, float *h)
{
    nbi_launch(&c->rt, dim3(a->n_rows * l->shape.top_k, nbi_ceil_div(l->shape.inter, WARPS)),
               dim3(THREADS), 0, plain_gate_up_kernel, l->gate_up, h,
               static_cast<const float *>(a->x), a->ids, l->shape.top_k, l->shape.n_experts);
}

void nbi_moe_plain_down(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, const float *h)
{
    nbi_launch(&c->rt, dim3(a->n_rows, nbi_ceil_div(l->shape.hidden, WARPS)), dim3(THREADS), 0,
               plain_down_kernel, l->down, static_cast<float *>(a->out), h, a->ids, a->weights,
               l->shape.top_k, l->shape.n_experts);
}
