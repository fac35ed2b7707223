/* Expert routing: sigmoid with a choice bias and groups (GLM, DeepSeek), softmax (Qwen3); one warp
 * a row (route_row.h). Callers: the backend's table. */
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/route_row.h"

#define ROW_WARPS 4u /* rows of a block */

template <uint32_t HAS>
static __global__ void __launch_bounds__(ROW_WARPS *NBI_WARP) route_kernel(const nbi_route_args a)
{
    __shared__ nbi_route_shared<HAS> shared[ROW_WARPS];
    const uint32_t warp = threadIdx.x / NBI_WARP, lane = nbi_lane();
    const uint32_t t = blockIdx.x * ROW_WARPS + warp;
    float bias[HAS], score[HAS];
    nbi_route_bias<HAS>(a, bias);
    nbi_wait_before();
    nbi_let_next();
    if (t >= a.n_rows) return;
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const uint32_t e = i * NBI_WARP + lane;
        score[i] = e < a.n_experts ? a.logits[static_cast<size_t>(t) * a.n_experts + e] : 0.0f;
    }
    nbi_route_row<HAS>(a, t, score, bias, &shared[warp]);
}

void nbi_cuda_route(nbi_backend *b, const nbi_route_args *a)
{
    NB_ASSERT(nbi_route_fits(a));
    if (!a->n_rows || !a->top_k) return;
    const auto kernel = a->n_experts <= 4 * NBI_WARP   ? route_kernel<4>
                        : a->n_experts <= 8 * NBI_WARP ? route_kernel<8>
                                                       : route_kernel<NBI_ROUTE_EXPERTS / NBI_WARP>;
    nbi_launch(&nbi_cuda_of(b)->rt, dim3(nbi_ceil_div(a->n_rows, ROW_WARPS)),
               dim3(ROW_WARPS * NBI_WARP), 0, kernel, *a);
}
