/* Expert routing: sigmoid with a choice bias and groups (GLM, DeepSeek), softmax (Qwen3).
 *
 * Callers: the table in cpu.c.
 * Invariants: everything stays in float32 (a bias rounded to 16 bits ties and chooses other
 * experts); the bias decides the choice only, weights are the unbiased scores; ids of a row are
 * distinct and in range even when logits are NaN (NaN is chosen last). */
#include "backend/cpu/cpu_kernels.h"

typedef struct route_row {
    float score[NBI_CPU_EXPERTS_MAX];
    float choice[NBI_CPU_EXPERTS_MAX]; /* -inf: masked or NaN */
} route_row;

static void score_row(const nbi_route_args *a, const float *logits, route_row *r)
{
    const uint32_t E = a->n_experts;
    if (a->softmax) {
        float max = -INFINITY;
        double sum = 0;
        for (uint32_t e = 0; e < E; e++)
            if (logits[e] > max) max = logits[e];
        for (uint32_t e = 0; e < E; e++) {
            r->score[e] = expf(logits[e] - max);
            sum += (double)r->score[e];
        }
        for (uint32_t e = 0; e < E; e++) r->score[e] = (float)((double)r->score[e] / sum);
    } else {
        for (uint32_t e = 0; e < E; e++) r->score[e] = 1.0f / (1.0f + expf(-logits[e]));
    }
    for (uint32_t e = 0; e < E; e++) {
        r->choice[e] = a->bias ? r->score[e] + a->bias[e] : r->score[e];
        if (isnan(r->choice[e])) r->choice[e] = -INFINITY;
    }
}

/* Sum of the two largest choices of experts [first, first + n). */
static float group_score(const float *choice, uint32_t first, uint32_t n)
{
    float a = -INFINITY, b = -INFINITY; /* a >= b */
    for (uint32_t e = first; e < first + n; e++) {
        if (choice[e] > a) { /* NOLINT(clang-analyzer-core.UndefinedBinaryOperatorResult): n_group
                                groups of n lie inside the experts */
            b = a;
            a = choice[e];
        } else if (choice[e] > b) {
            b = choice[e];
        }
    }
    return n < 2 ? a : a + b;
}

/* Keeps the topk_group best groups (ties to the lower group), the others become -inf. */
static void mask_groups(const nbi_route_args *a, route_row *r)
{
    float score[NBI_CPU_EXPERTS_MAX];
    bool keep[NBI_CPU_EXPERTS_MAX] = {false};
    const uint32_t per = a->n_experts / a->n_group;
    for (uint32_t g = 0; g < a->n_group; g++) score[g] = group_score(r->choice, g * per, per);
    for (uint32_t k = 0; k < a->topk_group; k++) {
        uint32_t best = a->n_group;
        for (uint32_t g = 0; g < a->n_group; g++)
            if (!keep[g] && (best == a->n_group || score[g] > score[best])) best = g;
        NB_ASSERT(best < a->n_group);
        keep[best] = true;
    }
    for (uint32_t e = 0; e < a->n_experts; e++)
        if (!keep[e / per]) r->choice[e] = -INFINITY;
}

/* The largest choice that is not taken, the lower id among equals; n_experts: there is none. */
static uint32_t best_left(const nbi_route_args *a, const route_row *r, const bool *taken)
{
    uint32_t best = a->n_experts;
    for (uint32_t e = 0; e < a->n_experts; e++)
        if (!taken[e] && (best == a->n_experts || r->choice[e] > r->choice[best])) best = e;
    return best;
}

/* Weights of the n experts that a row has, from their scores; none behind them. */
static void weigh(const nbi_route_args *a, const route_row *r, const int32_t *ids, float *weights,
                  uint32_t n)
{
    double sum = 0;
    for (uint32_t k = 0; k < n; k++) sum += (double)r->score[ids[k]];
    const double by = a->norm_topk ? (a->softmax ? sum : sum + 1e-20) : 1.0;
    for (uint32_t k = 0; k < n; k++)
        weights[k] = (float)((double)r->score[ids[k]] / by) * a->routed_scale;
}

static void choose_row(const nbi_route_args *a, uint32_t t, route_row *r)
{
    score_row(a, a->logits + (size_t)t * a->n_experts, r);
    if (a->n_group > 1 && a->topk_group < a->n_group) mask_groups(a, r);
}

static void route_one(const nbi_route_args *a, uint32_t t)
{
    route_row r;
    choose_row(a, t, &r);
    int32_t *ids = a->ids + (size_t)t * a->top_k;
    bool taken[NBI_CPU_EXPERTS_MAX] = {false};
    for (uint32_t k = 0; k < a->top_k; k++) {
        const uint32_t best = best_left(a, &r, taken);
        NB_ASSERT(best < a->n_experts);
        taken[best] = true;
        ids[k] = (int32_t)best;
    }
    weigh(a, &r, ids, a->weights + (size_t)t * a->top_k, a->top_k);
}

static void route_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    for (uint32_t t = begin; t < end; t++) route_one(arg, t);
}

void nbi_cpu_route(nbi_backend *b, const nbi_route_args *a)
{
    NB_ASSERT(a->n_experts <= NBI_CPU_EXPERTS_MAX && a->top_k <= a->n_experts);
    NB_ASSERT(a->n_group <= 1 || (a->n_experts % a->n_group == 0 && a->topk_group >= 1 &&
                                  a->topk_group <= a->n_group));
    nbi_route_args args = *a;
    nbi_pool_run(nbi_cpu_of(b)->pool, route_task, &args, a->n_rows, 8);
}

/* ---------------------------------------------------------------- opportunistic activation */

typedef struct sharing {
    const nbi_share_experts_args *a;
    bool in_union[NBI_CPU_EXPERTS_MAX];
} sharing;

static void share_one(const sharing *s, uint32_t t)
{
    const nbi_route_args *a = &s->a->route;
    route_row r;
    choose_row(a, t, &r);
    int32_t *ids = a->ids + (size_t)t * a->top_k;
    float *weights = a->weights + (size_t)t * a->top_k;
    bool taken[NBI_CPU_EXPERTS_MAX];
    /* of groups that are not kept, nothing is a choice */
    for (uint32_t e = 0; e < a->n_experts; e++)
        taken[e] = !s->in_union[e] || !(r.choice[e] > -INFINITY);
    for (uint32_t k = 0; k < s->a->k0; k++) taken[ids[k]] = true;
    uint32_t n = s->a->k0;
    for (; n < a->top_k; n++) {
        const uint32_t best = best_left(a, &r, taken);
        if (best == a->n_experts) break;
        taken[best] = true;
        ids[n] = (int32_t)best;
    }
    weigh(a, &r, ids, weights, n);
    for (; n < a->top_k; n++) {
        ids[n] = -1;
        weights[n] = 0;
    }
}

static void share_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const sharing *s = arg;
    for (uint32_t t = begin; t < end; t++)
        if (s->a->shares[t]) share_one(s, t);
}

void nbi_cpu_share_experts(nbi_backend *b, const nbi_share_experts_args *a)
{
    const nbi_route_args *r = &a->route;
    bool chosen[NBI_CPU_EXPERTS_MAX] = {false}, any = false;
    sharing s = {.a = a};
    NB_ASSERT(r->n_experts <= NBI_CPU_EXPERTS_MAX && a->k0 && a->k0 <= r->top_k);
    for (uint32_t t = 0; t < r->n_rows; t++) {
        any = any || a->shares[t];
        for (uint32_t k = 0; k < r->top_k; k++) {
            const int32_t id = r->ids[(size_t)t * r->top_k + k];
            chosen[id] = true;
            if (!a->shares[t] || k < a->k0) s.in_union[id] = true;
        }
    }
    if (!any) return;
    a->state->calls++;
    for (uint32_t e = 0; e < r->n_experts; e++) {
        a->state->before += chosen[e];
        a->state->after += s.in_union[e];
    }
    nbi_pool_run(nbi_cpu_of(b)->pool, share_task, &s, r->n_rows, 8);
}
