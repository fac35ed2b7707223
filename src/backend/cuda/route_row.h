/* The choice of experts of one row by one warp: route.cu, and router.cu behind the router's
 * product.
 *
 * Lane l has experts l, l + 32, ... in registers. Everything stays in float32 (a bias rounded to 16
 * bits ties and chooses other experts); the bias decides the choice only, weights are the unbiased
 * scores. A choice is kept as an integer in the order of the floats, so that the best of 32 lanes
 * is one reduction; 0 stands for taken. Ids of a row are distinct and in range even when logits are
 * NaN (NaN is chosen last). */
#pragma once

#include "backend/backend.h"
#include "backend/cuda/device.h"

#define NBI_ROUTE_EXPERTS 512u /* at most */
#define NBI_ROUTE_NONE    0xffffffffu
#define NBI_ROUTE_TAKEN   0u
#define NBI_ROUTE_LAST    0x007fffffu /* nbi_order(-infinity) */

/* Whether these functions can do the call. */
inline bool nbi_route_fits(const nbi_route_args *a)
{
    return a->n_experts <= NBI_ROUTE_EXPERTS && a->top_k <= a->n_experts && a->top_k <= NBI_WARP &&
           (a->n_group <= 1 ||
            (a->n_experts % a->n_group == 0 && a->topk_group >= 1 && a->topk_group <= a->n_group));
}

/* score[i] of expert i * 32 + lane, in the place of its logit; 0 behind the last. */
template <uint32_t HAS> NBI_DEV void nbi_route_score(const nbi_route_args &a, float score[HAS])
{
    const uint32_t lane = nbi_lane();
    float max = -INFINITY, sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const uint32_t e = i * NBI_WARP + lane;
        if (e >= a.n_experts) score[i] = -INFINITY;
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
NBI_DEV uint32_t nbi_route_best_of_lane(const uint32_t order[HAS], uint32_t *at)
{
    uint32_t best = NBI_ROUTE_TAKEN;
    *at = NBI_ROUTE_NONE;
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        if (order[i] <= best) continue;
        best = order[i];
        *at = i * NBI_WARP + nbi_lane();
    }
    return best;
}

/* The best entry of the warp, which becomes NBI_ROUTE_TAKEN: entry i of a lane is number i * 32 +
 * lane. */
template <uint32_t HAS> NBI_DEV uint32_t nbi_route_take_best(uint32_t order[HAS])
{
    uint32_t at;
    const uint32_t own = nbi_route_best_of_lane<HAS>(order, &at), best = nbi_warp_max(own);
    const uint32_t first = nbi_warp_min(own == best ? at : NBI_ROUTE_NONE);
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++)
        if (i * NBI_WARP + nbi_lane() == first) order[i] = NBI_ROUTE_TAKEN;
    return first;
}

/* Sum of the two largest choices of n experts. */
NBI_DEV float nbi_route_group_score(const uint32_t *order, uint32_t n)
{
    uint32_t a = NBI_ROUTE_LAST, b = NBI_ROUTE_LAST;
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
NBI_DEV void nbi_route_mask_groups(const nbi_route_args &a, uint32_t order[HAS], uint32_t *all,
                                   bool *kept)
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
        group[i] = NBI_ROUTE_TAKEN;
        if (g < a.n_group) group[i] = nbi_order(nbi_route_group_score(all + g * per, per) + 0.0f);
    }
    __syncwarp();
    for (uint32_t k = 0; k < a.topk_group; k++) {
        const uint32_t best = nbi_route_take_best<HAS>(group);
        if (lane == 0 && best < a.n_group) kept[best] = true;
    }
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const uint32_t e = i * NBI_WARP + lane;
        if (e < a.n_experts && !kept[e / per]) order[i] = NBI_ROUTE_LAST;
    }
}

/* A warp's shared memory. */
template <uint32_t HAS> struct nbi_route_shared {
    uint32_t all[HAS * NBI_WARP];
    float scores[HAS * NBI_WARP];
    bool kept[HAS * NBI_WARP];
};

/* The lane's share of the bias: the model's, needs no wait. */
template <uint32_t HAS> NBI_DEV void nbi_route_bias(const nbi_route_args &a, float bias[HAS])
{
    const uint32_t lane = nbi_lane();
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++)
        bias[i] = a.bias && i * NBI_WARP + lane < a.n_experts ? a.bias[i * NBI_WARP + lane] : 0.0f;
}

/* One warp: the scores of a row and the order of its choices, from its logits in score. */
template <uint32_t HAS>
NBI_DEV void nbi_route_order(const nbi_route_args &a, float score[HAS], const float bias[HAS],
                             uint32_t order[HAS], nbi_route_shared<HAS> *s)
{
    const uint32_t lane = nbi_lane();
    nbi_route_score<HAS>(a, score);
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const uint32_t e = i * NBI_WARP + lane;
        s->scores[e] = score[i];
        order[i] = NBI_ROUTE_TAKEN;
        if (e >= a.n_experts) continue;
        const float choice = score[i] + bias[i]; /* never -0, which would be below 0 */
        order[i] = choice == choice ? nbi_order(choice) : NBI_ROUTE_LAST;
    }
    if (a.n_group > 1 && a.topk_group < a.n_group)
        nbi_route_mask_groups<HAS>(a, order, s->all, s->kept);
    __syncwarp();
}

/* Weight of a lane's choice; `sum` of all scores that the row has. */
NBI_DEV float nbi_route_weight(const nbi_route_args &a, float score, double sum)
{
    const double by = a.norm_topk ? (a.softmax ? sum : sum + 1e-20) : 1.0;
    return static_cast<float>(static_cast<double>(score) / by) * a.routed_scale;
}

/* One warp: row t, whose logits are in score. */
template <uint32_t HAS>
NBI_DEV void nbi_route_row(const nbi_route_args &a, uint32_t t, float score[HAS],
                           const float bias[HAS], nbi_route_shared<HAS> *s)
{
    const uint32_t lane = nbi_lane();
    uint32_t order[HAS];
    nbi_route_order<HAS>(a, score, bias, order, s);
    /* lane k keeps the k-th choice; the sum is in the order of the choices */
    uint32_t id = 0;
    float own_score = 0;
    double sum = 0;
    for (uint32_t k = 0; k < a.top_k; k++) {
        const uint32_t best = nbi_route_take_best<HAS>(order);
        const float own = s->scores[best];
        sum += static_cast<double>(own);
        if (lane == k) id = best, own_score = own;
    }
    if (lane >= a.top_k) return;
    const size_t out = static_cast<size_t>(t) * a.top_k + lane;
    a.ids[out] = static_cast<int32_t>(id);
    a.weights[out] = nbi_route_weight(a, own_score, sum);
}
