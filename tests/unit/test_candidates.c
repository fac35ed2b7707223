/* The best logits of each rank instead of all: rows made of them are sampled to the tokens of whole
 * rows, by every form of sampling that asks for them. */
#include "cmocka_all.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "model/candidates.h"

enum { VOCAB = 5000, PARTS = 3, COUNT_MAX = NBI_CANDIDATES_MAX + 1 };

static uint64_t state_of_random = 88172645463325252u;

static uint32_t below(uint32_t n)
{
    state_of_random ^= state_of_random << 13;
    state_of_random ^= state_of_random >> 7;
    state_of_random ^= state_of_random << 17;
    return (uint32_t)(state_of_random >> 33) % n;
}

/* Kinds: smooth, with many ties, with both zeros, with masked ids, nearly all the same. */
static void fill(float *x, uint32_t kind)
{
    for (uint32_t i = 0; i < VOCAB; i++) {
        x[i] = (float)below(1u << 24) / (1u << 24) * 30 - 15;
        if (kind == 1) x[i] = (float)below(5) - 3;
        if (kind == 2) x[i] = below(3) ? -0.0f : 0.0f;
        if (kind == 3 && below(2)) x[i] = -INFINITY;
        if (kind == 4) x[i] = -7 - (below(2000) ? 0.0f : 1e-6f);
    }
}

static void rebuild(float *out, const float *x, uint32_t count, uint32_t n_valid)
{
    static const uint32_t cut[PARTS + 1] = {0, 1700, 4096, VOCAB};
    for (uint32_t p = 0; p < PARTS; p++) {
        nbi_candidate found[COUNT_MAX];
        const uint32_t n = cut[p + 1] - cut[p], left = n_valid > cut[p] ? n_valid - cut[p] : 0;
        nbi_candidates_find(found, count, x + cut[p], n, left < n ? left : n, (int32_t)cut[p]);
        nbi_candidates_put(out, VOCAB, found, count + 1, p == 0);
    }
}

static nbi_sample_out sample(nbi_backend *b, const float *x, uint32_t n_valid,
                             const nbi_sample_row *row, int32_t *fault)
{
    static float copy[VOCAB];
    nbi_sample_out out;
    memcpy(copy, x, sizeof copy);
    b->ops->sample(b, &(nbi_sample_args){.out = &out,
                                         .logits = copy,
                                         .rows = row,
                                         .n_rows = 1,
                                         .vocab = VOCAB,
                                         .n_valid = n_valid,
                                         .row_fault = fault});
    return out;
}

static void test_same_tokens(void **state)
{
    static float x[VOCAB], few[VOCAB];
    static const int32_t top_ks[] = {1, 2, 20, 64, NBI_CANDIDATES_MAX - 1};
    nbi_backend *b = *state;
    for (uint32_t trial = 0; trial < 60; trial++) {
        const uint32_t n_valid = trial % 3 ? VOCAB : 4200;
        fill(x, trial % 5);
        for (size_t k = 0; k <= sizeof top_ks / sizeof *top_ks; k++) {
            const bool greedy = k == sizeof top_ks / sizeof *top_ks;
            const int32_t top_k = greedy ? 0 : top_ks[k];
            rebuild(few, x, greedy ? 1 : (uint32_t)top_k + 1, n_valid);
            for (uint32_t draw = 0; draw < 12; draw++) {
                const nbi_sample_row row = {.temperature = greedy ? 0 : 0.3f + 0.4f * (float)draw,
                                            .top_p = draw % 2 ? 0.8f : 1,
                                            .min_p = draw % 3 ? 0.05f : 0,
                                            .top_k = top_k,
                                            .seed = trial,
                                            .counter = draw,
                                            .n_logprobs = -1};
                int32_t faults[2] = {0};
                const int32_t want = sample(b, x, n_valid, &row, &faults[0]).id,
                              have = sample(b, few, n_valid, &row, &faults[1]).id;
                assert_int_equal(have, want);
                assert_true(want >= 0 && !faults[0] && !faults[1]);
            }
        }
    }
}

/* What is found, against a plain search; a part may have fewer ids than are asked for. */
static void test_found(void **state)
{
    static float x[VOCAB];
    (void)state;
    for (uint32_t trial = 0; trial < 50; trial++) {
        const uint32_t n = trial < 10 ? trial : 1 + below(VOCAB), count = 1 + below(COUNT_MAX - 1);
        nbi_candidate found[COUNT_MAX];
        bool taken[VOCAB] = {0};
        fill(x, trial % 5);
        nbi_candidates_find(found, count, x, n, n, 100);
        for (uint32_t i = 0; i < count; i++) {
            int32_t best = -1;
            for (uint32_t j = 0; j < n; j++)
                if (!taken[j] && (best < 0 || x[j] > x[best])) best = (int32_t)j;
            assert_int_equal(found[i].id, best < 0 ? -1 : best + 100);
            if (best >= 0) taken[best] = true;
        }
        float least = INFINITY;
        for (uint32_t j = 0; j < n; j++)
            if (x[j] > -INFINITY && x[j] < least) least = x[j];
        assert_true(least < INFINITY ? found[count].id >= 100 && found[count].logit == least &&
                                           x[found[count].id - 100] == least
                                     : found[count].id == -1);
    }
}

/* NaN and +inf are faults as they are in a whole row, also in padding; a row of -inf alone too. */
static void test_faults(void **state)
{
    static float x[VOCAB], few[VOCAB];
    nbi_backend *b = *state;
    static const float bad[] = {NAN, -NAN, INFINITY};
    const nbi_sample_row row = {.top_p = 1, .n_logprobs = -1};
    for (uint32_t trial = 0; trial < 4; trial++) {
        int32_t fault = 0;
        fill(x, 0);
        for (uint32_t i = 0; i < VOCAB && trial == 3; i++) x[i] = -INFINITY;
        if (trial < 3) x[trial * 2000 + 900] = bad[trial];
        rebuild(few, x, 1, 4200);
        assert_int_equal(sample(b, few, 4200, &row, &fault).id, -1);
        assert_int_not_equal(fault, 0);
    }
}

static int open_cpu(void **state)
{
    nb_error err;
    nbi_backend *b = NULL;
    const nbi_limits limits = {
        .max_rows = 1, .max_context = 1, .max_logit_rows = 1, .vocab = VOCAB};
    const nbi_backend_options o = {.cpu_level = NBI_CPU_LEVEL_COUNT, .n_threads = 1};
    if (nbi_backend_open(&b, "cpu", &o, &err) != NB_OK) return 1;
    if (b->ops->reserve(b, &limits, &err) != NB_OK) return 1;
    *state = b;
    return 0;
}

static int close_cpu(void **state)
{
    nbi_backend *b = *state;
    nbi_backend_close(&b);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_tokens),
        cmocka_unit_test(test_found),
        cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests(tests, open_cpu, close_cpu);
}
