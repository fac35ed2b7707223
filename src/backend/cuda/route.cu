/* Expert routing: sigmoid with a choice bias and groups (GLM, DeepSeek), softmax (Qwen3); one warp
 * a row (route_row.h). Callers: the backend's table. */
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/route_row.h"

#define ROW_WARPS 4u /* rows of a block */

/* The lane's logits of row t. */
template <uint32_t HAS>
static NBI_DEV void load_logits(const nbi_route_args &a, uint32_t t, float score[HAS])
{
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const uint32_t e = i * NBI_WARP + nbi_lane();
        score[i] = e < a.n_experts ? a.logits[static_cast<size_t>(t) * a.n_experts + e] : 0.0f;
    }
}

template <uint32_t HAS>
static __global__ void __launch_bounds__(ROW_WARPS *NBI_WARP) route_kernel(const nbi_route_args a)
{
    __shared__ nbi_route_shared<HAS> shared[ROW_WARPS];
    const uint32_t warp = threadIdx.x / NBI_WARP;
    const uint32_t t = blockIdx.x * ROW_WARPS + warp;
    float bias[HAS], score[HAS];
    nbi_route_bias<HAS>(a, bias);
    nbi_wait_before();
    nbi_let_next();
    if (t >= a.n_rows) return;
    load_logits<HAS>(a, t, score);
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

/* ---------------------------------------------------------------- opportunistic activation */

/* One block, a thread for each expert: who is chosen, and who is in the union S. Words of the union
 * go to state->scratch. */
static __global__ void __launch_bounds__(NBI_ROUTE_EXPERTS)
    union_kernel(const nbi_share_experts_args a)
{
    __shared__ uint32_t counts[2][NBI_ROUTE_EXPERTS / NBI_WARP], sharing;
    nbi_wait_before();
    nbi_let_next();
    const uint32_t e = threadIdx.x, warp = e / NBI_WARP;
    const uint32_t n = a.route.n_rows * a.route.top_k;
    if (e == 0) sharing = 0;
    __syncthreads();
    for (uint32_t t = e; t < a.route.n_rows; t += NBI_ROUTE_EXPERTS)
        if (a.shares[t]) sharing = 1; /* the same from every thread */
    bool chosen = false, in = false;
    for (uint32_t i = 0; i < n; i++) {
        if (a.route.ids[i] != static_cast<int32_t>(e)) continue;
        chosen = true;
        in = in || i % a.route.top_k < a.k0 || !a.shares[i / a.route.top_k];
    }
    const uint32_t all = __ballot_sync(NBI_FULL_MASK, chosen),
                   kept = __ballot_sync(NBI_FULL_MASK, in);
    if (nbi_lane() == 0) {
        a.state->scratch[warp] = kept;
        counts[0][warp] = static_cast<uint32_t>(__popc(all));
        counts[1][warp] = static_cast<uint32_t>(__popc(kept));
    }
    __syncthreads();
    if (e != 0 || !sharing) return;
    uint32_t before = 0, after = 0;
    for (uint32_t w = 0; w < NBI_ROUTE_EXPERTS / NBI_WARP; w++) {
        before += counts[0][w];
        after += counts[1][w];
    }
    a.state->calls += 1;
    a.state->before += before;
    a.state->after += after;
}

/* One warp a row. */
template <uint32_t HAS>
static __global__ void __launch_bounds__(ROW_WARPS *NBI_WARP)
    share_kernel(const nbi_share_experts_args a)
{
    __shared__ nbi_route_shared<HAS> shared[ROW_WARPS];
    const nbi_route_args &r = a.route;
    const uint32_t warp = threadIdx.x / NBI_WARP, lane = nbi_lane();
    const uint32_t t = blockIdx.x * ROW_WARPS + warp;
    float bias[HAS], score[HAS];
    uint32_t order[HAS];
    nbi_route_bias<HAS>(r, bias);
    nbi_wait_before();
    nbi_let_next();
    if (t >= r.n_rows || !a.shares[t]) return;
    nbi_route_shared<HAS> *s = &shared[warp];
    load_logits<HAS>(r, t, score);
    nbi_route_order<HAS>(r, score, bias, order, s);
    const size_t out = static_cast<size_t>(t) * r.top_k + lane;
    const uint32_t kept = lane < a.k0 ? static_cast<uint32_t>(r.ids[out]) : NBI_ROUTE_NONE;
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const bool in = a.state->scratch[i] >> lane & 1u;
        /* of groups that are not kept, nothing is a choice */
        if (!in || order[i] <= NBI_ROUTE_LAST) order[i] = NBI_ROUTE_TAKEN;
    }
    uint32_t id = kept;
    float own_score = 0;
    double sum = 0;
    for (uint32_t k = 0; k < r.top_k; k++) {
        uint32_t best;
        if (k < a.k0) {
            best = __shfl_sync(NBI_FULL_MASK, kept, static_cast<int>(k));
#pragma unroll
            for (uint32_t i = 0; i < HAS; i++)
                if (i * NBI_WARP + lane == best) order[i] = NBI_ROUTE_TAKEN;
        } else {
            best = nbi_route_take_best<HAS>(order);
        }
        const float own = best == NBI_ROUTE_NONE ? 0.0f : s->scores[best];
        sum += static_cast<double>(own);
        if (lane == k) id = best, own_score = own;
    }
    if (lane >= r.top_k) return;
    r.ids[out] = id == NBI_ROUTE_NONE ? -1 : static_cast<int32_t>(id);
    r.weights[out] = id == NBI_ROUTE_NONE ? 0.0f : nbi_route_weight(r, own_score, sum);
}

void nbi_cuda_share_experts(nbi_backend *b, const nbi_share_experts_args *a)
{
    const nbi_route_args *r = &a->route;
    NB_ASSERT(nbi_route_fits(r) && a->k0 && a->k0 <= r->top_k);
    if (!r->n_rows || !r->top_k) return;
    nbi_rt *rt = &nbi_cuda_of(b)->rt;
    nbi_launch(rt, dim3(1), dim3(NBI_ROUTE_EXPERTS), 0, union_kernel, *a);
    const auto kernel = r->n_experts <= 4 * NBI_WARP   ? share_kernel<4>
                        : r->n_experts <= 8 * NBI_WARP ? share_kernel<8>
                                                       : share_kernel<NBI_ROUTE_EXPERTS / NBI_WARP>;
    nbi_launch(rt, dim3(nbi_ceil_div(r->n_rows, ROW_WARPS)), dim3(ROW_WARPS * NBI_WARP), 0, kernel,
               *a);
}
