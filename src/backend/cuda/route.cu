/* Expert routing: sigmoid with a choice bias and groups (GLM, DeepSeek), softmax (Qwen3). Callers:
 * the backend's table.
 *
 * One warp a row; lane l has experts l, l + 32, ... in registers. Everything stays in float32 (a
 * bias rounded to 16 bits ties and chooses other experts); the bias decides the choice only,
 * weights are the unbiased scores. A choice is kept as an integer in the order of the floats, so
 * that the best of 32 lanes is one reduction; 0 stands for taken. Ids of a row are distinct and in
 * range even when logits are NaN (NaN is chosen last). */
#include "backend/cuda/cuda_backend.h"

#define ROW_WARPS   4u /* rows of a block */
#define EXPERTS_MAX 512u
#define HAS_MAX     (EXPERTS_MAX / NBI_WARP)
#define NO_EXPERT   0xffffffffu
#define TAKEN       0u
#define LAST        0x007fffffu /* nbi_order(-infinity) */

struct route_args {
    int32_t *ids;
    float *weights;
    const float *logits, *bias;
    uint32_t n_rows, n_experts, top_k, n_group, topk_group;
    bool softmax, norm_topk;
    float routed_scale;
};

/* score[i] of expert i * 32 + lane; 0 behind the last. */
template <uint32_t HAS>
static NBI_DEV void score_row(const route_args &a, const float *logits, float score[HAS])
{
    const uint32_t lane = nbi_lane();
    float max = -INFINITY, sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const uint32_t e = i * NBI_WARP + lane;
        score[i] = e < a.n_experts ? logits[e] : -INFINITY;
        max = score[i] > max ? score[i] : max;
    }
    if (a.softmax) max = nbi_warp_max(max);
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const bool mine = i * NBI_WARP + lane < a.n_experts;
        if (a.softmax)
            score[i] = mine ? expf(score[i] - max) : 0.0f;
        else
            score[i] = mine ? 1.0f / (1.0f + expf(-score[i])) : 0.0f;
        sum += score[i];
    }
    if (!a.softmax) return;
    sum = nbi_warp_sum(sum);
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) score[i] = score[i] / sum;
}

/* The lane's best entry: its order, and its index by *at; the lower index among equals. */
template <uint32_t HAS>
static NBI_DEV uint32_t best_of_lane(const uint32_t order[HAS], uint32_t *at)
{
    uint32_t best = TAKEN;
    *at = NO_EXPERT;
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        if (order[i] <= best) continue;
        best = order[i];
        *at = i * NBI_WARP + nbi_lane();
    }
    return best;
}

/* The best entry of the warp, which becomes TAKEN: entry i of a lane is number i * 32 + lane. */
template <uint32_t HAS> static NBI_DEV uint32_t take_best(uint32_t order[HAS])
{
    uint32_t at;
    const uint32_t own = best_of_lane<HAS>(order, &at), best = nbi_warp_max(own);
    const uint32_t first = nbi_warp_min(own == best ? at : NO_EXPERT);
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++)
        if (i * NBI_WARP + nbi_lane() == first) order[i] = TAKEN;
    return first;
}

/* Sum of the two largest choices of n experts. */
static NBI_DEV float group_score(const uint32_t *order, uint32_t n)
{
    uint32_t a = LAST, b = LAST;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t c = order[i];
        b = c > a ? a : c > b ? c : b;
        a = c > a ? c : a;
    }
    return n < 2 ? nbi_unorder(a) : nbi_unorder(a) + nbi_unorder(b);
}

/* Keeps the topk_group best groups (ties to the lower group); choices of the others become -inf.
 * `all` and `kept` are the warp's shared memory. */
template <uint32_t HAS>
static NBI_DEV void mask_groups(const route_args &a, uint32_t order[HAS], uint32_t *all, bool *kept)
{
    const uint32_t per = a.n_experts / a.n_group, lane = nbi_lane();
    uint32_t group[HAS];
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) all[i * NBI_WARP + lane] = order[i];
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const uint32_t g = i * NBI_WARP + lane;
        kept[g] = false;
        group[i] = TAKEN;
        if (g < a.n_group) group[i] = nbi_order(group_score(all + g * per, per) + 0.0f);
    }
    __syncwarp();
    for (uint32_t k = 0; k < a.topk_group; k++) {
        const uint32_t best = take_best<HAS>(group);
        if (lane == 0 && best < a.n_group) kept[best] = true;
    }
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const uint32_t e = i * NBI_WARP + lane;
        if (e < a.n_experts && !kept[e / per]) order[i] = LAST;
    }
}

template <uint32_t HAS>
static __global__ void __launch_bounds__(ROW_WARPS *NBI_WARP) route_kernel(const route_args a)
{
    __shared__ uint32_t all[ROW_WARPS][HAS * NBI_WARP];
    __shared__ float scores[ROW_WARPS][HAS * NBI_WARP];
    __shared__ bool kept[ROW_WARPS][HAS * NBI_WARP];
    const uint32_t warp = threadIdx.x / NBI_WARP, lane = nbi_lane();
    const uint32_t t = blockIdx.x * ROW_WARPS + warp;
    float bias[HAS]; /* the model's: needs no wait */
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++)
        bias[i] = a.bias && i * NBI_WARP + lane < a.n_experts ? a.bias[i * NBI_WARP + lane] : 0.0f;
    nbi_wait_before();
    nbi_let_next();
    if (t >= a.n_rows) return;
    float score[HAS];
    uint32_t order[HAS];
    score_row<HAS>(a, a.logits + static_cast<size_t>(t) * a.n_experts, score);
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const uint32_t e = i * NBI_WARP + lane;
        scores[warp][e] = score[i];
        order[i] = TAKEN;
        if (e >= a.n_experts) continue;
        const float choice = score[i] + bias[i]; /* never -0, which would be below 0 */
        order[i] = choice == choice ? nbi_order(choice) : LAST;
    }
    if (a.n_group > 1 && a.topk_group < a.n_group)
        mask_groups<HAS>(a, order, all[warp], kept[warp]);

    __syncwarp();
    /* lane k keeps the k-th choice; the sum is in the order of the choices */
    uint32_t id = 0;
    float weight = 0;
    double sum = 0;
    for (uint32_t k = 0; k < a.top_k; k++) {
        const uint32_t best = take_best<HAS>(order);
        const float s = scores[warp][best];
        sum += static_cast<double>(s);
        if (lane == k) id = best, weight = s;
    }
    if (lane >= a.top_k) return;
    const double by = a.norm_topk ? (a.softmax ? sum : sum + 1e-20) : 1.0;
    const size_t out = static_cast<size_t>(t) * a.top_k + lane;
    a.ids[out] = static_cast<int32_t>(id);
    a.weights[out] = static_cast<float>(static_cast<double>(weight) / by) * a.routed_scale;
}

void nbi_cuda_route(nbi_backend *b, const nbi_route_args *a)
{
    NB_ASSERT(a->n_experts <= EXPERTS_MAX && a->top_k <= a->n_experts && a->top_k <= NBI_WARP);
    NB_ASSERT(a->n_group <= 1 || (a->n_experts % a->n_group == 0 && a->topk_group >= 1 &&
                                  a->topk_group <= a->n_group));
    if (!a->n_rows || !a->top_k) return;
    const route_args k = {a->ids,        a->weights,   a->logits,    a->bias,
                          a->n_rows,     a->n_experts, a->top_k,     a->n_group,
                          a->topk_group, a->softmax,   a->norm_topk, a->routed_scale};
    const auto kernel = a->n_experts <= 4 * NBI_WARP   ? route_kernel<4>
                        : a->n_experts <= 8 * NBI_WARP ? route_kernel<8>
                                                       : route_kernel<HAS_MAX>;
    nbi_launch(&nbi_cuda_of(b)->rt, dim3(nbi_ceil_div(a->n_rows, ROW_WARPS)),
               dim3(ROW_WARPS * NBI_WARP), 0, kernel, k);
}
