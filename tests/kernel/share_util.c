/* See share_util.h: the definition, by sorting; known cases. */
#include "share_util.h"

static void (*share)(const nbi_share_experts_args *a);

enum { EXPERTS_MAX = 512, ROWS_MAX = 70, K_MAX = 16 };

typedef struct share_case {
    uint32_t T, E, k, k0, groups, keep;
    bool softmax, norm, bias;
    uint32_t each; /* every so-manieth row does not share; 0: all do */
} share_case;

typedef struct buffers {
    float *logits, *bias, *weights;
    int32_t *ids, *shares;
    nbi_share_state *state;
    nbi_share_experts_args a;
} buffers;

static buffers make(const share_case *c)
{
    buffers b = {.logits = op_floats((size_t)c->T * c->E),
                 .bias = op_floats(c->E),
                 .weights = op_floats((size_t)c->T * c->k),
                 .ids = op_alloc((size_t)c->T * c->k * sizeof(int32_t)),
                 .shares = op_alloc(c->T * sizeof(int32_t)),
                 .state = op_alloc(sizeof(nbi_share_state))};
    memset(b.state, 0, sizeof *b.state);
    for (size_t i = 0; i < (size_t)c->T * c->E; i++) b.logits[i] = op_normal() * 2;
    for (uint32_t e = 0; e < c->E; e++) b.bias[e] = 0.3f * op_normal();
    for (uint32_t t = 0; t < c->T; t++) b.shares[t] = !c->each || t % c->each != 0;
    b.a = (nbi_share_experts_args){.route = {.ids = b.ids,
                                             .weights = b.weights,
                                             .logits = b.logits,
                                             .bias = c->bias ? b.bias : NULL,
                                             .n_rows = c->T,
                                             .n_experts = c->E,
                                             .top_k = c->k,
                                             .n_group = c->groups,
                                             .topk_group = c->keep,
                                             .softmax = c->softmax,
                                             .norm_topk = c->norm,
                                             .routed_scale = 2.5f},
                                   .shares = b.shares,
                                   .k0 = c->k0,
                                   .state = b.state};
    return b;
}

static void drop(buffers *b)
{
    op_free(b->logits);
    op_free(b->bias);
    op_free(b->weights);
    op_free(b->ids);
    op_free(b->shares);
    op_free(b->state);
}

/* All experts of a row that can be chosen, best first: ids[], and their scores. */
static uint32_t ranking(const nbi_route_args *a, uint32_t t, uint32_t *ids, double *score)
{
    const uint32_t E = a->n_experts;
    const float *l = a->logits + (size_t)t * E;
    double total = 0, max = -INFINITY;
    float choice[EXPERTS_MAX];
    for (uint32_t e = 0; e < E; e++) max = fmax(max, (double)l[e]);
    for (uint32_t e = 0; e < E; e++) total += exp((double)l[e] - max);
    for (uint32_t e = 0; e < E; e++) {
        score[e] = a->softmax ? exp((double)l[e] - max) / total : 1 / (1 + exp(-(double)l[e]));
        choice[e] = (float)score[e] + (a->bias ? a->bias[e] : 0);
    }
    bool keeps[EXPERTS_MAX];
    const uint32_t per = a->n_group > 1 ? E / a->n_group : E, groups = E / per;
    float best[EXPERTS_MAX];
    for (uint32_t g = 0; g < groups; g++) {
        float top = -INFINITY, second = -INFINITY;
        for (uint32_t i = 0; i < per; i++) {
            const float c = choice[g * per + i];
            second = c > top ? top : fmaxf(second, c);
            top = fmaxf(top, c);
        }
        best[g] = top + second;
    }
    for (uint32_t e = 0; e < E; e++) {
        uint32_t better = 0;
        for (uint32_t g = 0; g < groups; g++) better += best[g] > best[e / per];
        keeps[e] = groups == 1 || better < a->topk_group;
    }
    uint32_t n = 0;
    for (uint32_t e = 0; e < E; e++)
        if (keeps[e]) ids[n++] = e;
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t k = i; k > 0 && choice[ids[k]] > choice[ids[k - 1]]; k--) {
            const uint32_t swap = ids[k];
            ids[k] = ids[k - 1];
            ids[k - 1] = swap;
        }
    return n;
}

static uint32_t count(const bool *in, uint32_t n)
{
    uint32_t all = 0;
    for (uint32_t i = 0; i < n; i++) all += in[i];
    return all;
}

static void check_row(const share_case *c, const buffers *b, uint32_t t, const uint32_t *rank,
                      uint32_t n, const double *score, const bool *in_union)
{
    uint32_t want[K_MAX], have = 0;
    double sum = 0;
    for (uint32_t i = 0; i < n && have < c->k; i++)
        if (i < (b->shares[t] ? c->k0 : c->k) || in_union[rank[i]]) want[have++] = rank[i];
    for (uint32_t i = 0; i < have; i++) sum += score[want[i]];
    for (uint32_t i = 0; i < c->k; i++) {
        const int32_t id = b->ids[t * c->k + i];
        const float weight = b->weights[t * c->k + i];
        if (i >= have) {
            assert_int_equal(id, -1);
            assert_true(weight == 0);
            continue;
        }
        assert_int_equal(id, want[i]);
        const double w = 2.5 * (c->norm ? score[want[i]] / sum : score[want[i]]);
        assert_true(fabs((double)weight - w) <= 2e-6 * w);
    }
}

static void check(const share_case *c)
{
    static uint32_t rank[ROWS_MAX][EXPERTS_MAX], n[ROWS_MAX];
    static double score[ROWS_MAX][EXPERTS_MAX];
    bool in_union[EXPERTS_MAX] = {false}, chosen[EXPERTS_MAX] = {false};
    buffers b = make(c);
    share(&b.a);
    for (uint32_t t = 0; t < c->T; t++) {
        n[t] = ranking(&b.a.route, t, rank[t], score[t]);
        for (uint32_t i = 0; i < c->k; i++) {
            chosen[rank[t][i]] = true;
            if (i < c->k0 || !b.shares[t]) in_union[rank[t][i]] = true;
        }
    }
    for (uint32_t t = 0; t < c->T; t++) check_row(c, &b, t, rank[t], n[t], score[t], in_union);
    const bool any = c->each != 1;
    assert_int_equal(b.state->calls, any);
    assert_int_equal(b.state->before, any ? count(chosen, c->E) : 0);
    assert_int_equal(b.state->after, any ? count(in_union, c->E) : 0);
    /* Nobody reads an expert outside of the union. */
    for (uint32_t i = 0; i < c->T * c->k; i++) assert_true(b.ids[i] < 0 || in_union[b.ids[i]]);
    drop(&b);
}

static void test_definition(void **state)
{
    (void)state;
    static const share_case cases[] = {
        {16, 128, 8, 3, 1, 1, true, true, false, 0}, /* Qwen3-30B-A3B of the paper */
        {16, 256, 8, 4, 1, 1, false, true, true, 0}, /* GLM-5 */
        {16, 256, 8, 4, 8, 4, false, true, true, 3}, /* groups; some do not share */
        {1, 64, 8, 2, 1, 1, false, true, true, 0},   /* alone: k0 experts */
        {70, 512, 16, 5, 1, 1, false, true, true, 7},
        {5, 40, 6, 1, 1, 1, true, false, false, 2}, /* weights are the scores */
        {9, 96, 4, 4, 1, 1, false, true, true, 0},  /* k0 is top_k: nothing changes */
        {9, 96, 4, 2, 1, 1, false, true, true, 1},  /* nobody shares: nothing changes */
        {64, 33, 8, 1, 1, 1, false, true, false, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int repeat = 0; repeat < 4; repeat++) check(&cases[i]);
}

/* Two rows: the second's expert is taken by the first from its fifth place. */
static void test_by_hand(void **state)
{
    (void)state;
    const share_case c = {2, 6, 3, 1, 1, 1, false, true, false, 0};
    static const float logits[12] = {3, 2,  1,  0,  -1, -2, /* best first */
                                     0, -3, -3, -3, 5,  1};
    buffers b = make(&c);
    memcpy(b.logits, logits, sizeof logits);
    share(&b.a);
    static const int32_t want[6] = {0, 4, -1, 4, 0, -1}; /* S = {0, 4} */
    assert_memory_equal(b.ids, want, sizeof want);
    const double first = 1 / (1 + exp(-3)), other = 1 / (1 + exp(1));
    assert_true(fabs((double)b.weights[0] - 2.5 * first / (first + other)) < 1e-6);
    assert_true(fabs((double)b.weights[1] - 2.5 * other / (first + other)) < 1e-6);
    assert_int_equal(b.state->before, 5); /* 0 1 2, 4 5 0 */
    assert_int_equal(b.state->after, 2);
    share(&b.a); /* sums */
    assert_int_equal(b.state->calls, 2);
    assert_int_equal(b.state->after, 4);
    drop(&b);
}

int share_test(void (*fn)(const nbi_share_experts_args *a), int (*open)(void **),
               int (*close)(void **))
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_definition),
        cmocka_unit_test(test_by_hand),
    };
    share = fn;
    return cmocka_run_group_tests(tests, open, close);
}
