/* See route_util.h: an oracle in float64 and the known cases: ties, groups, bias precision, factor.
 */
#include "route_util.h"

static void (*route)(const nbi_route_args *a);

/* Straight from the contract, by sorting: choices are float32 as in the contract, weights float64.
 */
static void oracle(const nbi_route_args *a, uint32_t t, int32_t *ids, double *weights)
{
    const uint32_t E = a->n_experts;
    const float *l = a->logits + (size_t)t * E;
    double score[1024], total = 0, max = -INFINITY;
    float choice[1024];
    for (uint32_t e = 0; e < E; e++) max = fmax(max, (double)l[e]);
    for (uint32_t e = 0; e < E; e++) total += exp((double)l[e] - max);
    for (uint32_t e = 0; e < E; e++) {
        score[e] = a->softmax ? exp((double)l[e] - max) / total : 1 / (1 + exp(-(double)l[e]));
        choice[e] = (float)score[e] + (a->bias ? a->bias[e] : 0);
    }
    if (a->n_group > 1) {
        const uint32_t per = E / a->n_group;
        float best[64];
        for (uint32_t g = 0; g < a->n_group; g++) {
            float top = -INFINITY, second = -INFINITY;
            for (uint32_t i = 0; i < per; i++) {
                const float c = choice[g * per + i];
                if (c > top) {
                    second = top;
                    top = c;
                } else if (c > second)
                    second = c;
            }
            best[g] = per > 1 ? top + second : top;
        }
        for (uint32_t g = 0; g < a->n_group; g++) {
            uint32_t better = 0;
            for (uint32_t o = 0; o < a->n_group; o++)
                better += best[o] > best[g] || (best[o] == best[g] && o < g);
            if (better >= a->topk_group)
                for (uint32_t i = 0; i < per; i++) choice[g * per + i] = -INFINITY;
        }
    }
    double sum = 0;
    for (uint32_t e = 0; e < E; e++) {
        uint32_t better = 0;
        for (uint32_t o = 0; o < E; o++)
            better += choice[o] > choice[e] || (choice[o] == choice[e] && o < e);
        if (better < a->top_k) {
            ids[better] = (int32_t)e;
            weights[better] = score[e];
        }
    }
    for (uint32_t k = 0; k < a->top_k; k++) sum += weights[k];
    for (uint32_t k = 0; k < a->top_k; k++)
        weights[k] = (a->norm_topk ? weights[k] / (sum + (a->softmax ? 0 : 1e-20)) : weights[k]) *
                     (double)a->routed_scale;
}

typedef struct route_case {
    uint32_t T, E, k, groups, keep;
    bool softmax, norm, bias;
    float scale;
} route_case;

static void check(const route_case *c, float round_to)
{
    const size_t n = (size_t)c->T * c->E;
    float *logits = op_floats(n), *bias = op_floats(c->E), *weights = op_floats(c->T * c->k);
    int32_t *ids = op_alloc(c->T * c->k * sizeof *ids), want_ids[64];
    double want[64];
    for (size_t i = 0; i < n; i++) {
        logits[i] = op_normal() * 2;
        if (round_to > 0) logits[i] = roundf(logits[i] / round_to) * round_to; /* many ties */
    }
    for (uint32_t e = 0; e < c->E; e++) bias[e] = round_to > 0 ? 0 : 0.3f * op_normal();
    const nbi_route_args a = {.ids = ids,
                              .weights = weights,
                              .logits = logits,
                              .bias = c->bias ? bias : NULL,
                              .n_rows = c->T,
                              .n_experts = c->E,
                              .top_k = c->k,
                              .n_group = c->groups,
                              .topk_group = c->keep,
                              .softmax = c->softmax,
                              .norm_topk = c->norm,
                              .routed_scale = c->scale};
    route(&a);
    op_check(ids);
    op_check(weights);
    for (uint32_t t = 0; t < c->T; t++) {
        oracle(&a, t, want_ids, want);
        /* Choices nearer than rounding may swap: then the weights still agree. */
        OP_ASSERT_ERROR(op_error(weights + t * c->k, want, c->k), 2e-6,
                        "E %u k %u groups %u row %u", c->E, c->k, c->groups, t);
        if (round_to > 0)
            assert_memory_equal(ids + t * c->k, want_ids, c->k * sizeof *ids);
        else
            for (uint32_t k = 0; k < c->k; k++)
                for (uint32_t o = 0; o < k; o++)
                    assert_int_not_equal(ids[t * c->k + k], ids[t * c->k + o]);
    }
    /* any batch gives the same bits */
    float one_w[64];
    int32_t one_id[64];
    nbi_route_args one = a;
    one.n_rows = 1;
    one.ids = one_id;
    one.weights = one_w;
    for (uint32_t t = 0; t < c->T; t++) {
        one.logits = logits + (size_t)t * c->E;
        route(&one);
        assert_memory_equal(one_id, ids + t * c->k, c->k * sizeof *ids);
        assert_memory_equal(one_w, weights + t * c->k, c->k * sizeof *weights);
    }
    op_free(logits);
    op_free(bias);
    op_free(weights);
    op_free(ids);
}

static void test_shapes(void **state)
{
    (void)state;
    static const route_case cases[] = {
        {9, 256, 8, 1, 1, false, true, true, 2.5f}, {5, 256, 8, 8, 4, false, true, true, 2.5f},
        {4, 128, 8, 1, 1, true, true, false, 1},    {4, 128, 8, 1, 1, true, false, false, 1},
        {3, 16, 4, 4, 2, false, false, true, 1.8f}, {2, 8, 8, 8, 8, false, true, false, 1},
        {1, 1, 1, 1, 1, false, true, false, 1},     {3, 6, 2, 6, 3, false, true, true, 1},
        {17, 512, 16, 1, 1, true, true, false, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check(&cases[i], 0);
        check(&cases[i], 0.5f);
    }
}

/* C54: biases that 16 bits cannot tell apart. */
static void test_bias_precision(void **state)
{
    (void)state;
    float logits[8] = {0}, bias[8], weights[2];
    int32_t ids[2];
    for (int i = 0; i < 8; i++) bias[i] = 7.0f + 0.001f * (float)i;
    route(&(nbi_route_args){.ids = ids,
                            .weights = weights,
                            .logits = logits,
                            .bias = bias,
                            .n_rows = 1,
                            .n_experts = 8,
                            .top_k = 2,
                            .n_group = 1,
                            .topk_group = 1,
                            .routed_scale = 1});
    assert_int_equal(ids[0], 7);
    assert_int_equal(ids[1], 6);
    assert_true(weights[0] == 0.5f && weights[1] == 0.5f); /* the bias is not in the weight */
}

/* C55: the factor is in the weight, once. */
static void test_factor(void **state)
{
    (void)state;
    float logits[1] = {0.3f}, weights[1];
    int32_t ids[1];
    route(&(nbi_route_args){.ids = ids,
                            .weights = weights,
                            .logits = logits,
                            .n_rows = 1,
                            .n_experts = 1,
                            .top_k = 1,
                            .norm_topk = true,
                            .routed_scale = 2.5f});
    assert_true(weights[0] * 4.0f + 1.0f == 11.0f);
}

/* Masked groups are -inf, not 0: with negative choices 0 would win. */
static void test_masked_groups(void **state)
{
    (void)state;
    float logits[4] = {0, 0, 0, 0}, bias[4] = {-3, -3, -4, -4}, weights[2];
    int32_t ids[2];
    route(&(nbi_route_args){.ids = ids,
                            .weights = weights,
                            .logits = logits,
                            .bias = bias,
                            .n_rows = 1,
                            .n_experts = 4,
                            .top_k = 2,
                            .n_group = 2,
                            .topk_group = 1,
                            .routed_scale = 1});
    assert_int_equal(ids[0], 0);
    assert_int_equal(ids[1], 1);
}

/* NaN logits: ids stay distinct and in range, finite experts come first; other rows are not
 * touched. */
static void test_nan(void **state)
{
    (void)state;
    for (int softmax = 0; softmax < 2; softmax++) {
        float logits[12] = {NAN, 1, NAN, 2, NAN, NAN, NAN, NAN, 3, 1, 2, 0}, weights[9];
        int32_t ids[9];
        route(&(nbi_route_args){.ids = ids,
                                .weights = weights,
                                .logits = logits,
                                .n_rows = 3,
                                .n_experts = 4,
                                .top_k = 3,
                                .softmax = softmax,
                                .routed_scale = 1});
        if (!softmax) {
            assert_int_equal(ids[0], 3);
            assert_int_equal(ids[1], 1);
        }
        for (int i = 0; i < 9; i++) {
            assert_in_range(ids[i], 0, 3);
            if (i % 3) assert_int_not_equal(ids[i], ids[i - 1]);
        }
        assert_int_equal(ids[6], 0);
        assert_int_equal(ids[7], 2);
        assert_int_equal(ids[8], 1);
        assert_true(isfinite(weights[6]));
    }
}

int route_test(void (*fn)(const nbi_route_args *a), int (*open)(void **), int (*close)(void **))
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes), cmocka_unit_test(test_bias_precision),
        cmocka_unit_test(test_factor), cmocka_unit_test(test_masked_groups),
        cmocka_unit_test(test_nan),
    };
    route = fn;
    return cmocka_run_group_tests(tests, open, close);
}
