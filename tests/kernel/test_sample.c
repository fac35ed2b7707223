/* The sampler: random numbers against published answers, filters against a full sort, the
 * distribution by chi-square with fixed seeds, log-probabilities, bans, guards. */
#include "backend/sample_random.h"

#include "sample_util.h"

#define LEVELS(level) \
    for (nbi_cpu_level level = NBI_CPU_REFERENCE; level <= nbi_cpu_detect(); level++)

static nbi_cpu *open_for(nbi_cpu_level level, uint32_t threads, uint32_t vocab)
{
    const nbi_limits l = {.max_rows = 1, .max_context = 1, .max_logit_rows = 8, .vocab = vocab};
    return op_open(level, threads, &l);
}

/* Samples one row from a copy of the logits. */
static nbi_sample_out sample(nbi_cpu *cpu, const float *logits, uint32_t vocab, uint32_t n_valid,
                             const nbi_sample_row *row, int32_t *fault)
{
    float *copy = op_cache(NBI_F32, logits, vocab);
    nbi_sample_out out;
    memset(&out, 0x55, sizeof out);
    const nbi_sample_args a = {.out = &out,
                               .logits = copy,
                               .rows = row,
                               .n_rows = 1,
                               .vocab = vocab,
                               .n_valid = n_valid,
                               .row_fault = fault};
    cpu->base.ops->sample(&cpu->base, &a);
    op_free(copy);
    return out;
}

/* ---------------------------------------------------------------- random numbers */

/* Known answers of the Random123 distribution (kat_vectors, philox4x32 10). */
static void test_philox(void **state)
{
    (void)state;
    static const uint32_t kat[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d,
         0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
         0x94fdcceb, 0x5001e420, 0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        nbi_philox4x32(out, kat[i], kat[i] + 4);
        assert_memory_equal(out, kat[i] + 6, sizeof out);
    }
    double sum = 0, low = 1, high = 0;
    for (uint64_t i = 0; i < 100000; i++) {
        const double u = nbi_sample_uniform(42, i);
        assert_true(u >= 0 && u < 1);
        sum += u;
        low = fmin(low, u);
        high = fmax(high, u);
    }
    assert_true(fabs(sum / 100000 - 0.5) < 0.005 && low < 1e-3 && high > 0.999);
    assert_true(nbi_sample_uniform(1, 0) != nbi_sample_uniform(1, (uint64_t)1 << 32));
    assert_true(nbi_sample_uniform((uint64_t)1 << 32, 0) != nbi_sample_uniform(0, 0));
}

/* ---------------------------------------------------------------- greedy */

static void test_greedy(void **state)
{
    (void)state;
    LEVELS(level)
    {
        static const uint32_t sizes[] = {1, 2, 15, 16, 17, 100, 4099};
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            const uint32_t n = sizes[k];
            nbi_cpu *cpu = open_for(level, 1, n);
            float *x = malloc(n * sizeof *x);
            for (int trial = 0; trial < 20; trial++) {
                for (uint32_t i = 0; i < n; i++)
                    x[i] = (float)op_below(6) - 9; /* ties, all negative */
                const uint32_t valid = trial & 1 ? n : n - op_below(n);
                uint32_t best = 0;
                for (uint32_t i = 1; i < valid; i++)
                    if (x[i] > x[best]) best = i;
                nbi_sample_row row = sample_row_of(0, 5, 0.1f, 0, 1, 1);
                int32_t fault = 0;
                assert_int_equal(sample(cpu, x, n, valid, &row, &fault).id, best);
                row.temperature = 9e-7f;
                assert_int_equal(sample(cpu, x, n, valid, &row, NULL).id, best);
                assert_int_equal(fault, 0);
            }
            free(x);
            op_close(cpu);
        }
    }
}

static void test_banned(void **state)
{
    (void)state;
    const float x[6] = {5, 4, 3, 2, 9, 1};
    const int32_t banned[] = {0, 1, 1000, -1}, all[] = {0, 1, 2, 3};
    LEVELS(level)
    {
        nbi_cpu *cpu = open_for(level, 1, 6);
        nbi_sample_row row = sample_row_of(0, 0, 1, 0, 0, 0);
        row.banned = banned;
        row.n_banned = 4;
        row.n_logprobs = 2;
        nbi_sample_out out = sample(cpu, x, 6, 4, &row, NULL);
        assert_int_equal(out.id, 2);
        /* log-probabilities are of the untouched logits: over all ids, the banned ones listed */
        double z = 0;
        for (int i = 0; i < 6; i++) z += exp((double)x[i]);
        assert_true(fabs((double)out.logprob - (3 - log(z))) < 1e-5);
        assert_int_equal(out.top_ids[0], 0);
        assert_int_equal(out.top_ids[1], 1);
        assert_true(fabs((double)out.top_logprobs[0] - (5 - log(z))) < 1e-5);
        row.temperature = 1;
        for (uint64_t c = 0; c < 200; c++) {
            row.counter = c;
            const int32_t id = sample(cpu, x, 6, 4, &row, NULL).id;
            assert_true(id == 2 || id == 3);
        }
        /* nothing left to choose */
        int32_t fault = 0;
        row.banned = all;
        out = sample(cpu, x, 6, 4, &row, &fault);
        assert_int_equal(out.id, -1);
        assert_int_equal(fault, 1 + NBI_WHERE_LOGITS);
        op_close(cpu);
    }
}

static void test_guard(void **state)
{
    (void)state;
    LEVELS(level)
    {
        nbi_cpu *cpu = open_for(level, 2, 40);
        for (int kind = 0; kind < 5; kind++)
            for (int where = 0; where < 40; where += 39) {
                float x[40];
                op_fill(x, 40, 1);
                if (kind == 0) x[where] = NAN;
                if (kind == 1) x[where] = INFINITY;
                if (kind == 2) x[where] = -INFINITY; /* a mask, not a fault */
                if (kind == 3)
                    for (int i = 0; i < 40; i++) x[i] = -INFINITY;
                if (kind == 4) x[where] = -NAN;
                for (int t = 0; t < 2; t++) {
                    nbi_sample_row row = sample_row_of((float)t, 0, 1, 0, 3, 4);
                    row.n_logprobs = 3;
                    int32_t fault = 0;
                    const nbi_sample_out out = sample(cpu, x, 40, 40, &row, &fault);
                    if (kind == 2) {
                        assert_int_equal(fault, 0);
                        assert_in_range(out.id, 0, 39);
                        assert_int_not_equal(out.id, where);
                    } else {
                        assert_int_equal(fault, 1 + NBI_WHERE_LOGITS);
                        assert_int_equal(out.id, -1);
                        assert_true(out.logprob == -9999.0f && out.top_logprobs[2] == -9999.0f);
                    }
                }
            }
        op_close(cpu);
    }
}

/* ---------------------------------------------------------------- filters against a full sort */

static void check_draw(nbi_cpu *cpu, const float *x, uint32_t vocab, uint32_t n_valid,
                       const nbi_sample_row *row)
{
    const int32_t id = sample(cpu, x, vocab, n_valid, row, NULL).id;
    if (!sample_agrees(x, n_valid, row, id))
        fail_msg("T %g top_k %d top_p %g min_p %g: id %d is not what u = %.17g gives",
                 (double)row->temperature, row->top_k, (double)row->top_p, (double)row->min_p, id,
                 nbi_sample_uniform(row->seed, row->counter));
}

static void test_filters(void **state)
{
    (void)state;
    static const float temperatures[] = {1e-5f, 0.3f, 1, 1.7f, 50, 1e6f};
    static const int32_t top_k[] = {0, -1, 1, 2, 40, 1000000};
    static const float top_p[] = {1, 0.95f, 0.5f, 0.01f, 1e-9f};
    static const float min_p[] = {0, 0.05f, 0.5f, 0.9f};
    LEVELS(level)
    {
        static const uint32_t sizes[] = {1, 5, 300, 5000};
        for (int k = 0; k < 4; k++) {
            const uint32_t n = sizes[k], valid = n - n / 7;
            nbi_cpu *cpu = open_for(level, 1, n);
            float *x = malloc(n * sizeof *x);
            for (int trial = 0; trial < 120; trial++) {
                const float scale = trial % 3 == 0 ? 0 : trial % 3 == 1 ? 3 : 0.1f;
                for (uint32_t i = 0; i < n; i++) x[i] = 20 + op_normal() * scale;
                if (trial % 4 == 0)
                    for (uint32_t i = 0; i < n; i++) x[i] = roundf(x[i]); /* ties */
                if (trial % 5 == 0 && n > 2) x[1] = -INFINITY;
                const nbi_sample_row row =
                    sample_row_of(temperatures[op_below(6)], top_k[op_below(6)], top_p[op_below(5)],
                                  min_p[op_below(4)], op_random(), op_random());
                check_draw(cpu, x, n, valid, &row);
            }
            free(x);
            op_close(cpu);
        }
    }
}

/* ---------------------------------------------------------------- distribution */

/* Chi-square of 20,000 draws; the 99.99 percent point by Wilson and Hilferty. Seeds are fixed: the
 * test gives one answer. */
static void check_distribution(nbi_cpu *cpu, const float *x, uint32_t n, nbi_sample_row row)
{
    enum { DRAWS = 20000, MAX = 64 };
    sample_entry e[MAX];
    uint32_t hits[MAX] = {0};
    const uint32_t kept = sample_oracle(x, n, &row, e);
    double sum = 0, chi = 0;
    for (uint32_t i = 0; i < kept; i++) sum += e[i].p;
    for (uint32_t c = 0; c < DRAWS; c++) {
        row.counter = c;
        hits[sample(cpu, x, n, n, &row, NULL).id]++;
    }
    uint32_t total = 0;
    for (uint32_t i = 0; i < kept; i++) {
        const double want = DRAWS * e[i].p / sum;
        chi += (hits[e[i].id] - want) * (hits[e[i].id] - want) / want;
        total += hits[e[i].id];
    }
    assert_int_equal(total, DRAWS); /* nothing outside the filters */
    const double df = kept > 1 ? kept - 1 : 1, z = 3.72;
    const double limit = df * pow(1 - 2 / (9 * df) + z * sqrt(2 / (9 * df)), 3);
    if (!(chi < limit)) fail_msg("chi-square %g of %u candidates above %g", chi, kept, limit);
}

static void test_distribution(void **state)
{
    (void)state;
    enum { N = 24 };
    float x[N];
    for (int i = 0; i < N; i++) x[i] = (float)((i * 7) % N) * 0.15f;
    nbi_cpu *cpu = open_for(nbi_cpu_detect(), 1, N);
    check_distribution(cpu, x, N, sample_row_of(1, 0, 1, 0, 11, 0));
    check_distribution(cpu, x, N, sample_row_of(0.5f, 0, 1, 0, 12, 0));
    check_distribution(cpu, x, N, sample_row_of(2, 7, 1, 0, 13, 0));
    check_distribution(cpu, x, N, sample_row_of(1, 0, 0.6f, 0, 14, 0));
    check_distribution(cpu, x, N, sample_row_of(1, 0, 1, 0.2f, 15, 0));
    check_distribution(cpu, x, N, sample_row_of(1.5f, 20, 0.9f, 0.1f, 16, 0));
    for (int i = 0; i < N; i++) x[i] = 1; /* all equal */
    check_distribution(cpu, x, N, sample_row_of(1, 0, 1, 0, 17, 0));
    check_distribution(cpu, x, N, sample_row_of(1, 5, 1, 0, 18, 0));
    op_close(cpu);
}

/* A row gives the same token alone, in a batch, and with any number of threads. */
static void test_rows_independent(void **state)
{
    (void)state;
    enum { V = 3000, R = 7 };
    float *x = op_floats(V * R), *copy = op_floats(V * R);
    op_fill(x, V * R, 2);
    x[3 * V + 17] = NAN;
    nbi_sample_row rows[R];
    for (int r = 0; r < R; r++)
        rows[r] = sample_row_of(r == 2 ? 0 : 0.9f, r * 10, 0.9f, 0.01f, 1000 + r, 5);
    rows[5] = rows[4];
    memcpy(x + 5 * V, x + 4 * V, V * sizeof *x);
    for (int r = 0; r < R; r++) rows[r].n_logprobs = r;
    LEVELS(level)
    {
        nbi_sample_out first[R];
        for (uint32_t threads = 1; threads <= 3; threads++) {
            nbi_cpu *cpu = open_for(level, threads, V);
            nbi_sample_out out[R];
            int32_t fault[R] = {0};
            memcpy(copy, x, V * R * sizeof *x);
            const nbi_sample_args a = {.out = out,
                                       .logits = copy,
                                       .rows = rows,
                                       .n_rows = R,
                                       .vocab = V,
                                       .n_valid = V - 3,
                                       .row_fault = fault};
            cpu->base.ops->sample(&cpu->base, &a);
            if (threads == 1) memcpy(first, out, sizeof out);
            for (int r = 0; r < R; r++) {
                const nbi_sample_out one = sample(cpu, x + r * V, V, V - 3, &rows[r], NULL);
                assert_int_equal(one.id, out[r].id);
                assert_int_equal(first[r].id, out[r].id);
                assert_true(one.logprob == out[r].logprob);
                for (int i = 0; i < rows[r].n_logprobs; i++)
                    assert_int_equal(one.top_ids[i], out[r].top_ids[i]);
                assert_int_equal(fault[r], r == 3 ? 1 + NBI_WHERE_LOGITS : 0);
            }
            assert_int_equal(out[4].id, out[5].id);
            op_close(cpu);
        }
    }
    op_free(x);
    op_free(copy);
}

/* ---------------------------------------------------------------- log-probabilities */

static void test_logprobs(void **state)
{
    (void)state;
    LEVELS(level)
    {
        static const uint32_t sizes[] = {1, 7, 50, 151552};
        for (int k = 0; k < 4; k++) {
            const uint32_t n = sizes[k];
            nbi_cpu *cpu = open_for(level, 1, n);
            float *x = malloc(n * sizeof *x);
            op_fill(x, n, 4);
            if (n > 20) x[3] = x[9] = x[11] = 30; /* ties in the list */
            if (n > 20) x[5] = -INFINITY;
            sample_entry *e = malloc(n * sizeof *e);
            nbi_sample_row row = sample_row_of(0, 0, 1, 0, 1, 2);
            row.n_logprobs = NBI_SAMPLE_TOP_MAX;
            const nbi_sample_out out = sample(cpu, x, n, n, &row, NULL);
            row.temperature = 1;
            sample_oracle(x, n, &row, e);
            double z = 0;
            for (uint32_t i = n; i-- > 0;) z += e[i].p;
            const double lse = (double)e[0].logit + log(z);
            assert_int_equal(out.id, e[0].id);
            for (uint32_t i = 0; i < NBI_SAMPLE_TOP_MAX; i++) {
                if (i >= n) {
                    assert_int_equal(out.top_ids[i], -1);
                    assert_true(out.top_logprobs[i] == -9999.0f);
                    continue;
                }
                assert_int_equal(out.top_ids[i], e[i].id);
                const double want = (double)e[i].logit - lse;
                assert_true(fabs((double)out.top_logprobs[i] - want) < 2e-6 * (1 + fabs(want)));
            }
            assert_true(out.logprob == out.top_logprobs[0]);
            free(x);
            free(e);
            op_close(cpu);
        }
    }
}

/* Of the ids that are named, in their order, before anything is changed. */
static void test_wanted(void **state)
{
    (void)state;
    enum { N = 70 };
    LEVELS(level)
    {
        static const int32_t wanted[] = {69, 3, 0, 40, 3, 12};
        nbi_cpu *cpu = open_for(level, 1, N);
        float x[N];
        double z = 0;
        uint32_t mask[3] = {1u << 3, 0, 0};
        nbi_sample_adjust adjust = {.id = 12, .repetition = 2, .bias = 7};
        op_fill(x, N, 3);
        for (int i = 0; i < N; i++) z += exp((double)x[i]);
        for (int forced = 0; forced < 2; forced++) {
            nbi_sample_row row = sample_row_of(0, 0, 1, 0, 1, 2);
            row.n_logprobs = forced ? 0 : 20;
            row.wanted = wanted;
            row.n_wanted = 6;
            row.mask = mask;
            row.adjust = &adjust;
            row.n_adjust = 1;
            row.forced = forced;
            row.forced_id = 40;
            const nbi_sample_out out = sample(cpu, x, N, N - 2, &row, NULL);
            assert_int_equal(out.id, forced ? 40 : 3);
            for (int i = 0; i < 6; i++) {
                assert_int_equal(out.top_ids[i], wanted[i]);
                const double want = (double)x[wanted[i]] - log(z);
                assert_true(fabs((double)out.top_logprobs[i] - want) < 1e-5);
            }
            assert_true(out.logprob == out.top_logprobs[forced ? 3 : 1]);
        }
        op_close(cpu);
    }
}

/* ---------------------------------------------------------------- speed */

typedef struct bench_run {
    nbi_cpu *cpu;
    nbi_sample_args a;
} bench_run;

static void bench_once(void *arg)
{
    bench_run *r = arg;
    r->cpu->base.ops->sample(&r->cpu->base, &r->a);
}

static void bench(void)
{
    enum { V = 154880 };
    float *x = op_floats(V);
    op_fill(x, V, 2);
    static const char *names[] = {"greedy", "T 1", "T 1 top_p 0.95", "T 0.6 top_k 40 min_p 0.05",
                                  "greedy, 20 logprobs"};
    nbi_sample_row rows[] = {sample_row_of(0, 0, 1, 0, 1, 1), sample_row_of(1, 0, 1, 0, 1, 1),
                             sample_row_of(1, 0, 0.95f, 0, 1, 1),
                             sample_row_of(0.6f, 40, 1, 0.05f, 1, 1),
                             sample_row_of(0, 0, 1, 0, 1, 1)};
    rows[4].n_logprobs = 20;
    LEVELS(level)
    {
        for (int i = 0; i < 5; i++) {
            nbi_sample_out out;
            bench_run r = {.cpu = open_for(level, 1, V),
                           .a = {.out = &out,
                                 .logits = x,
                                 .rows = &rows[i],
                                 .n_rows = 1,
                                 .vocab = V,
                                 .n_valid = V}};
            const double s = op_time(bench_once, &r, 21);
            printf("  sample %-9s vocab %u %-26s %8.1f us, %4.1f GB/s of logits\n",
                   nbi_cpu_level_name(level), V, names[i], s * 1e6, V * 4e-9 / s);
            op_close(r.cpu);
        }
    }
    op_free(x);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) {
        bench();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox),           cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_banned),           cmocka_unit_test(test_guard),
        cmocka_unit_test(test_filters),          cmocka_unit_test(test_distribution),
        cmocka_unit_test(test_logprobs),         cmocka_unit_test(test_wanted),
        cmocka_unit_test(test_rows_independent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
