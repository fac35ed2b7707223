/* The sampler of the CUDA backend against the CPU's for the same logits, and against float64 where
 * the two may differ by rounding; lists, log-probabilities, guards, rounds. */
#include "cuda/gpu_util.h"
#include "kernel/sample_util.h"

/* Rows of one call, their logits and results. */
typedef struct call {
    nbi_backend *gpu;
    nbi_cpu *cpu;
    uint32_t R, V, n_valid;
    float *x;             /* [R, V] */
    nbi_sample_row *rows; /* [R] */
    nbi_sample_out *got, *want;
    int32_t *got_fault, *want_fault;
} call;

static call call_open(uint32_t R, uint32_t V, uint32_t n_valid)
{
    const nbi_limits limits = {.max_rows = 1,
                               .max_seqs = 1,
                               .max_context = 1,
                               .max_logit_rows = R,
                               .max_linear_cols = 64,
                               .max_linear_rows = 64,
                               .vocab = V};
    call c = {.R = R, .V = V, .n_valid = n_valid};
    c.gpu = gpu_open(&limits);
    c.cpu = op_open(nbi_cpu_detect(), 1, &limits);
    c.x = op_floats((size_t)R * V);
    c.rows = calloc(R, sizeof *c.rows);
    c.got = op_alloc(R * sizeof *c.got);
    c.want = op_alloc(R * sizeof *c.want);
    c.got_fault = op_alloc(R * sizeof(int32_t));
    c.want_fault = op_alloc(R * sizeof(int32_t));
    return c;
}

static void call_close(call *c)
{
    gpu_close(c->gpu);
    op_close(c->cpu);
    op_free(c->x);
    free(c->rows);
    op_free(c->got);
    op_free(c->want);
    op_free(c->got_fault);
    op_free(c->want_fault);
}

static float *row_of(const call *c, uint32_t r)
{
    return c->x + (size_t)r * c->V;
}

/* Rows [first, first + n) on the CUDA backend; their logits lie `shift` floats behind an aligned
 * place. */
static void run_gpu(const call *c, uint32_t first, uint32_t n, uint32_t shift, nbi_sample_out *out,
                    int32_t *fault)
{
    float *x = op_floats(shift + (size_t)n * c->V);
    memcpy(x + shift, row_of(c, first), (size_t)n * c->V * sizeof *x);
    gpu_buffer logits = gpu_floats(c->gpu, x, shift + (size_t)n * c->V);
    if (fault) memset(fault, 0, n * sizeof *fault);
    c->gpu->ops->sample(c->gpu, &(nbi_sample_args){.out = out,
                                                   .logits = (float *)logits.p + shift,
                                                   .rows = c->rows + first,
                                                   .n_rows = n,
                                                   .vocab = c->V,
                                                   .n_valid = c->n_valid,
                                                   .row_fault = fault});
    gpu_sync(c->gpu);
    gpu_free(&logits);
    op_free(x);
}

static void run(call *c)
{
    run_gpu(c, 0, c->R, 0, c->got, c->got_fault);
    float *x = op_cache(NBI_F32, c->x, (size_t)c->R * c->V);
    memset(c->want_fault, 0, c->R * sizeof(int32_t));
    c->cpu->base.ops->sample(&c->cpu->base, &(nbi_sample_args){.out = c->want,
                                                               .logits = x,
                                                               .rows = c->rows,
                                                               .n_rows = c->R,
                                                               .vocab = c->V,
                                                               .n_valid = c->n_valid,
                                                               .row_fault = c->want_fault});
    op_free(x);
}

static void same_logprobs(const call *c, uint32_t r, bool same_id)
{
    const nbi_sample_out *a = &c->got[r], *b = &c->want[r];
    uint32_t n_top = c->rows[r].n_logprobs > 0 ? (uint32_t)c->rows[r].n_logprobs : 0;
    if (c->rows[r].n_wanted) n_top = c->rows[r].n_wanted;
    if (same_id) assert_true(fabs((double)a->logprob - (double)b->logprob) <= 1e-5);
    for (uint32_t i = 0; i < n_top && i < NBI_SAMPLE_TOP_MAX; i++) {
        assert_int_equal(a->top_ids[i], b->top_ids[i]);
        assert_true(fabs((double)a->top_logprobs[i] - (double)b->top_logprobs[i]) <= 1e-5);
    }
}

/* Every row as the CPU has it. Another id only where float64 says that rounding decides: that is
 * counted. */
static uint32_t compare(const call *c)
{
    uint32_t others = 0;
    for (uint32_t r = 0; r < c->R; r++) {
        const nbi_sample_row *row = &c->rows[r];
        const bool same = c->got[r].id == c->want[r].id;
        assert_int_equal(c->got_fault[r], c->want_fault[r]);
        same_logprobs(c, r, same);
        if (same) continue;
        if (row->forced || row->temperature < 1e-6f || row->n_adjust || row->n_banned ||
            row->mask || !sample_agrees(row_of(c, r), c->n_valid, row, c->got[r].id))
            fail_msg("row %u of %u, T %g top_k %d top_p %g min_p %g: id %d, the CPU's is %d", r,
                     c->V, (double)row->temperature, row->top_k, (double)row->top_p,
                     (double)row->min_p, c->got[r].id, c->want[r].id);
        others++;
    }
    return others;
}

/* ---------------------------------------------------------------- filters */

static void fill_row(const call *c, uint32_t r, uint32_t trial)
{
    float *x = row_of(c, r);
    const float scale = trial % 3 == 0 ? 0 : trial % 3 == 1 ? 3 : 0.1f;
    for (uint32_t i = 0; i < c->V; i++) x[i] = 20 + op_normal() * scale;
    if (trial % 4 == 0)
        for (uint32_t i = 0; i < c->V; i++) x[i] = roundf(x[i]); /* ties */
    if (trial % 5 == 0 && c->V > 2) x[1] = -INFINITY;
}

static nbi_sample_row random_row(void)
{
    static const float temperatures[] = {1e-5f, 0.3f, 1, 1.7f, 50, 1e6f};
    static const int32_t top_k[] = {0, -1, 1, 2, 40, 1000000};
    static const float top_p[] = {1, 0.95f, 0.5f, 0.01f, 1e-9f};
    static const float min_p[] = {0, 0.05f, 0.5f, 0.9f};
    nbi_sample_row row =
        sample_row_of(temperatures[op_below(6)], top_k[op_below(6)], top_p[op_below(5)],
                      min_p[op_below(4)], op_random(), op_random());
    if (op_below(4) == 0) row.n_logprobs = (int32_t)op_below(NBI_SAMPLE_TOP_MAX + 1);
    if (op_below(8) == 0) row.temperature = 0;
    return row;
}

static void test_filters(void **state)
{
    (void)state;
    static const struct {
        uint32_t V, R, calls;
    } shapes[] = {{1, 3, 3}, {5, 8, 8}, {300, 16, 10}, {5003, 16, 4}, {20000, 4, 2}};
    uint32_t rows = 0, others = 0, trial = 0;
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        call c = call_open(shapes[k].R, shapes[k].V, shapes[k].V - shapes[k].V / 7);
        for (uint32_t n = 0; n < shapes[k].calls; n++) {
            for (uint32_t r = 0; r < c.R; r++) {
                fill_row(&c, r, trial++);
                c.rows[r] = random_row();
            }
            run(&c);
            others += compare(&c);
            rows += c.R;
        }
        call_close(&c);
    }
    if (others * 50 > rows) fail_msg("%u of %u rows are not the CPU's", others, rows);
}

/* A vocabulary as models have it, each kind of row once. */
static void test_vocabulary(void **state)
{
    (void)state;
    enum { R = 5, V = 151552 };
    call c = call_open(R, V, V - 300);
    op_fill(c.x, (size_t)R * V, 2);
    c.rows[0] = sample_row_of(0, 0, 1, 0, 1, 1);
    c.rows[1] = sample_row_of(1, 0, 1, 0, 2, 1);
    c.rows[2] = sample_row_of(1, 0, 0.95f, 0, 3, 1);
    c.rows[3] = sample_row_of(0.6f, 40, 0.9f, 0.05f, 4, 1);
    c.rows[4] = sample_row_of(1.3f, 20000, 0.99f, 0, 5, 1);
    c.rows[1].n_logprobs = c.rows[4].n_logprobs = NBI_SAMPLE_TOP_MAX;
    run(&c);
    assert_true(compare(&c) <= 1);
    call_close(&c);
}

/* Thousands of equal logits in the bin of a boundary: sorted in device memory, lower ids first. */
static void test_equal_logits(void **state)
{
    (void)state;
    enum { R = 4, V = 7000 };
    call c = call_open(R, V, V);
    for (uint32_t i = 0; i < R * V; i++) c.x[i] = 1 + (i % V < 20);
    c.rows[0] = sample_row_of(1, 0, 1, 0, 1, 1);
    c.rows[1] = sample_row_of(1, 3000, 1, 0, 2, 1);
    c.rows[2] = sample_row_of(1, 0, 0.5f, 0, 3, 1);
    c.rows[3] = sample_row_of(1, 5000, 0.5f, 0.01f, 4, 1);
    for (uint64_t counter = 0; counter < 3; counter++) {
        for (uint32_t r = 0; r < R; r++) c.rows[r].counter = counter;
        run(&c);
        assert_int_equal(compare(&c), 0);
    }
    call_close(&c);
}

/* ---------------------------------------------------------------- lists */

typedef struct row_lists {
    nbi_sample_adjust *adjust;
    int32_t *banned;
    uint32_t *mask;
} row_lists;

static row_lists make_lists(const call *c, uint32_t r, uint32_t n_adjust, uint32_t n_banned,
                            bool mask)
{
    nbi_sample_row *row = &c->rows[r];
    row_lists l = {.adjust = calloc(n_adjust + 1, sizeof *l.adjust),
                   .banned = calloc(n_banned + 1, sizeof *l.banned),
                   .mask = calloc(c->V / 32 + 1, sizeof *l.mask)};
    for (uint32_t i = 0; i < n_adjust; i++) /* distinct: 7 has no part in the sizes */
        l.adjust[i] = (nbi_sample_adjust){.id = (int32_t)((i * 7 + r) % c->V),
                                          .repetition = op_uniform(0.5f, 2),
                                          .bias = op_uniform(-3, 3)};
    for (uint32_t i = 0; i < n_banned; i++) l.banned[i] = (int32_t)op_below(c->V + 5) - 2;
    for (uint32_t i = 0; i < c->V; i++) l.mask[i / 32] |= (uint32_t)(op_below(3) > 0) << i % 32;
    l.mask[0] |= 1u << 5;
    for (uint32_t i = 0; i < n_banned; i++)
        if (l.banned[i] == 5) l.banned[i] = -1; /* something is left */
    row->adjust = l.adjust;
    row->n_adjust = n_adjust;
    row->banned = l.banned;
    row->n_banned = n_banned;
    row->mask = mask ? l.mask : NULL;
    return l;
}

static void free_lists(row_lists *l)
{
    free(l->adjust);
    free(l->banned);
    free(l->mask);
}

/* Also lists of all rows that are more than the staging memory holds, and bans that are more than a
 * mask. */
static void test_lists(void **state)
{
    (void)state;
    enum { R = 9 };
    static const uint32_t sizes[] = {40, 303, 4100};
    for (size_t k = 0; k < 3; k++) {
        const uint32_t V = sizes[k];
        call c = call_open(R, V, V - 3);
        row_lists lists[R];
        const int32_t last = (int32_t)V - 1;
        const int32_t wanted[] = {last, 0, 5, 11, 12, 13, 14, 11, last - 4, 1, 2, 3};
        for (uint32_t trial = 0; trial < 3; trial++) {
            op_fill(c.x, (size_t)R * V, 2);
            for (uint32_t r = 0; r < R; r++) {
                c.rows[r] =
                    sample_row_of(r % 3 ? 0.8f : 0, r % 2 ? 20 : 0, 0.9f, 0, op_random(), trial);
                c.rows[r].n_logprobs = r % 4 == 0 ? 5 : -1;
                if (r == 4 || r == 8) { /* also of ids that are banned or masked, and of no token */
                    c.rows[r].wanted = wanted;
                    c.rows[r].n_wanted = 12;
                }
                lists[r] = make_lists(&c, r,
                                      r % 3 == 1 ? 0
                                      : trial    ? V
                                                 : V / 3,
                                      r % 4 == 2   ? 0
                                      : trial == 2 ? V
                                                   : 7,
                                      r % 2);
            }
            c.rows[4].forced = true;
            c.rows[4].forced_id = 11;
            run(&c);
            assert_int_equal(compare(&c), 0);
            for (uint32_t r = 0; r < R; r++) free_lists(&lists[r]);
        }
        call_close(&c);
    }
}

static void test_known_lists(void **state)
{
    (void)state;
    enum { V = 6 };
    const float x[V] = {5, 4, 3, 2, 9, 1};
    const int32_t banned[] = {0, 1, 1000, -1}, all[] = {0, 1, 2, 3};
    call c = call_open(2, V, 4);
    memcpy(row_of(&c, 0), x, sizeof x);
    memcpy(row_of(&c, 1), x, sizeof x);
    c.rows[0] = c.rows[1] = sample_row_of(0, 0, 1, 0, 0, 0);
    c.rows[0].banned = banned;
    c.rows[0].n_banned = 4;
    c.rows[0].n_logprobs = 2;
    c.rows[1].banned = all; /* nothing left to choose */
    c.rows[1].n_banned = 4;
    run_gpu(&c, 0, 2, 0, c.got, c.got_fault);
    double z = 0;
    for (int i = 0; i < V; i++) z += exp((double)x[i]);
    assert_int_equal(c.got[0].id, 2);
    assert_true(fabs((double)c.got[0].logprob - (3 - log(z))) < 1e-5);
    assert_int_equal(c.got[0].top_ids[0], 0);
    assert_int_equal(c.got[0].top_ids[1], 1);
    assert_int_equal(c.got[1].id, -1);
    assert_int_equal(c.got_fault[0], 0);
    assert_int_equal(c.got_fault[1], 1 + NBI_WHERE_LOGITS);
    call_close(&c);
}

/* ---------------------------------------------------------------- guards, rows */

static void test_guard(void **state)
{
    (void)state;
    enum { R = 12, V = 2500 };
    call c = call_open(R, V, V - 1);
    op_fill(c.x, R * V, 1);
    row_of(&c, 0)[0] = NAN;
    row_of(&c, 1)[V - 1] = NAN; /* behind the valid ids: still a fault */
    row_of(&c, 2)[2049] = INFINITY;
    row_of(&c, 3)[7] = -NAN;
    row_of(&c, 4)[7] = -INFINITY; /* a mask, not a fault */
    for (uint32_t i = 0; i < V; i++) row_of(&c, 5)[i] = -INFINITY;
    for (uint32_t i = 0; i < V - 1; i++) row_of(&c, 6)[i] = -INFINITY;
    for (uint32_t i = 0; i < V - 1; i++) row_of(&c, 7)[i] = i == 70 ? -80 : -INFINITY;
    row_of(&c, 8)[5] = NAN;
    for (int t = 0; t < 2; t++) {
        for (uint32_t r = 0; r < R; r++) {
            c.rows[r] = sample_row_of((float)t, 0, 1, 0, r, 4);
            c.rows[r].n_logprobs = 3;
        }
        c.rows[8].forced = c.rows[9].forced = true;
        c.rows[8].forced_id = c.rows[9].forced_id = 9;
        run(&c);
        assert_int_equal(compare(&c), 0);
        static const uint32_t bad[] = {0, 1, 2, 3, 5, 6, 8};
        for (uint32_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            assert_int_equal(c.got_fault[bad[i]], 1 + NBI_WHERE_LOGITS);
            assert_int_equal(c.got[bad[i]].id, -1);
            assert_true(c.got[bad[i]].top_logprobs[2] == -9999.0f);
        }
        assert_int_equal(c.got[7].id, 70);
    }
    call_close(&c);
}

/* More rows than a round has; a row alone, and one whose loads are not aligned, has the same bits.
 */
static void test_rows_independent(void **state)
{
    (void)state;
    enum { R = 150, V = 2052 };
    call c = call_open(R, V, V - 3);
    op_fill(c.x, R * V, 2);
    for (uint32_t r = 0; r < R; r++) {
        c.rows[r] = sample_row_of(r % 3 ? 0.9f : 0, r % 2 ? 30 : 0, 0.9f, 0.01f, 1000 + r, 5);
        c.rows[r].n_logprobs = r % 5 ? -1 : (int32_t)(r % 21);
    }
    run(&c);
    assert_true(compare(&c) <= 1);
    for (uint32_t r = 0; r < R; r += 13) {
        nbi_sample_out one;
        memset(&one, 0x55, sizeof one);
        run_gpu(&c, r, 1, r % 2, &one, NULL);
        assert_memory_equal(&one, &c.got[r], sizeof one);
    }
    call_close(&c);
}

/* ---------------------------------------------------------------- speed */

typedef struct bench_run {
    nbi_backend *gpu;
    nbi_sample_args a;
} bench_run;

static void bench_once(void *arg)
{
    bench_run *r = arg;
    r->gpu->ops->sample(r->gpu, &r->a);
    gpu_sync(r->gpu);
}

static void bench(void)
{
    enum { V = 151552, R = 64 };
    static const char *names[] = {"greedy", "T 1", "T 1 top_p 0.95", "T 0.6 top_k 40 min_p 0.05",
                                  "greedy, 20 logprobs"};
    const nbi_sample_row kinds[] = {
        sample_row_of(0, 0, 1, 0, 1, 1), sample_row_of(1, 0, 1, 0, 1, 1),
        sample_row_of(1, 0, 0.95f, 0, 1, 1), sample_row_of(0.6f, 40, 1, 0.05f, 1, 1),
        sample_row_of(0, 0, 1, 0, 1, 1)};
    static const uint32_t counts[] = {1, 8, 64};
    call c = call_open(R, V, V);
    op_fill(c.x, (size_t)R * V, 2);
    gpu_buffer logits = gpu_floats(c.gpu, c.x, (size_t)R * V);
    for (int k = 0; k < 5; k++)
        for (int n = 0; n < 3; n++) {
            for (uint32_t r = 0; r < R; r++) {
                c.rows[r] = kinds[k];
                c.rows[r].n_logprobs = k == 4 ? NBI_SAMPLE_TOP_MAX : -1;
            }
            bench_run b = {.gpu = c.gpu,
                           .a = {.out = c.got,
                                 .logits = logits.p,
                                 .rows = c.rows,
                                 .n_rows = counts[n],
                                 .vocab = V,
                                 .n_valid = V}};
            const double s = op_time(bench_once, &b, 41);
            printf("  sample vocab %u rows %2u %-26s %8.1f us a call\n", V, counts[n], names[k],
                   s * 1e6);
        }
    gpu_free(&logits);
    call_close(&c);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) {
        bench();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_filters),          cmocka_unit_test(test_vocabulary),
        cmocka_unit_test(test_equal_logits),     cmocka_unit_test(test_lists),
        cmocka_unit_test(test_known_lists),      cmocka_unit_test(test_guard),
        cmocka_unit_test(test_rows_independent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
