/* DSA indexer: keys, scores and the choice of positions. The oracle computes every score in
 * float64; a chosen set is right when it is what the oracle would choose up to scores closer than
 * rounding. */
#include "indexer_util.h"

#define LEVELS(level) \
    for (nbi_cpu_level level = NBI_CPU_REFERENCE; level <= nbi_cpu_detect(); level++)

/* q is a copy: the operator rotates it in place. */
static void run(nbi_cpu *cpu, const index_data *d, const nbi_batch *b, uint32_t first, float *q,
                int32_t *select)
{
    const uint32_t half = d->c.rope / 2;
    nbi_rope_rows rope = d->rope;
    rope.cos += (size_t)first * half;
    rope.sin += (size_t)first * half;
    const nbi_index_select_args a = {.select = select,
                                     .q = q,
                                     .w = d->w + (size_t)first * d->c.heads,
                                     .n_heads = d->c.heads,
                                     .index_dim = d->c.dim,
                                     .topk = d->c.topk,
                                     .rope = &rope,
                                     .cache = &d->kv,
                                     .batch = b};
    cpu->base.ops->index_select(&cpu->base, &a);
}

static void check(const index_case *c, const uint32_t *lengths, const uint32_t *rows,
                  uint32_t n_seqs)
{
    index_data d;
    ix_make(&d, c, lengths, rows, n_seqs);
    const uint32_t T = d.batch.b.n_rows;
    const size_t nq = (size_t)T * c->heads * c->dim;
    const nbi_limits limits = ix_limits(&d);
    LEVELS(level)
    {
        nbi_cpu *cpu = op_open(level, 2, &limits);
        int32_t *sel = op_alloc((size_t)T * c->topk * sizeof *sel);
        memset(sel, 0x55, (size_t)T * c->topk * sizeof *sel);
        float *q = op_cache(NBI_F32, d.q, nq);
        run(cpu, &d, &d.batch.b, 0, q, sel);
        for (uint32_t t = 0; t < T; t++) ix_check(&d, t, sel + (size_t)t * c->topk);
        op_free(q);
        op_free(sel);
        op_close(cpu);
    }
    ix_free(&d);
}

static void test_shapes(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65, 1000}, rows[] = {1, 2, 3, 64, 3, 4};
    static const index_case cases[] = {
        {1, 32, 8, 4, NBI_F32, true},         {4, 128, 64, 16, NBI_BF16, true},
        {32, 128, 64, 64, NBI_BF16, true},    {3, 40, 10, 63, NBI_F32, false},
        {64, 16, 16, 1, NBI_F32, false},      {2, 32, 8, 2048, NBI_BF16, true},
        {32, 128, 64, 64, NBI_F8_E4M3, true}, {3, 140, 10, 63, NBI_F8_E4M3, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check(&cases[i], lengths, rows, 6);
}

/* C52: with wrong pairs the rotation of q alone would choose other keys. */
static void test_rotation_kind_matters(void **state)
{
    (void)state;
    const uint32_t length[] = {300}, rows[] = {1};
    index_data d;
    ix_make(&d, &(index_case){2, 32, 32, 20, NBI_F32, true}, length, rows, 1);
    const nbi_limits limits = ix_limits(&d);
    nbi_cpu *cpu = op_open(NBI_CPU_REFERENCE, 1, &limits);
    int32_t a[20], b[20];
    float *q = op_cache(NBI_F32, d.q, 64), *q2 = op_cache(NBI_F32, d.q, 64);
    run(cpu, &d, &d.batch.b, 0, q, a);
    d.rope.interleaved = false;
    run(cpu, &d, &d.batch.b, 0, q2, b);
    assert_memory_not_equal(a, b, sizeof a);
    op_free(q);
    op_free(q2);
    op_close(cpu);
    ix_free(&d);
}

/* C61 and hostile scores: keys are one number, the query is 1, so scores are chosen freely. */
static void select_scores(const float *scores, uint32_t n, uint32_t topk, float w, int32_t *out)
{
    const uint32_t rows[] = {1};
    LEVELS(level)
    {
        for (uint32_t threads = 1; threads <= 3; threads++) {
            index_data d;
            ix_make(&d, &(index_case){1, 2, 2, topk, NBI_F32, true}, &n, rows, 1);
            d.cs[0] = 1;
            d.sn[0] = 0;
            d.q[0] = 1;
            d.q[1] = 0;
            d.w[0] = w;
            for (uint32_t p = 0; p < n; p++) {
                float *k = (float *)d.kv.index_k + op_slot(&d.batch, 0, p) * 2;
                k[0] = scores[p];
                k[1] = 0;
            }
            const nbi_limits limits = ix_limits(&d);
            nbi_cpu *cpu = op_open(level, threads, &limits);
            int32_t *sel = op_alloc(topk * sizeof *sel);
            float *q = op_cache(NBI_F32, d.q, 2);
            run(cpu, &d, &d.batch.b, 0, q, sel);
            if (level == NBI_CPU_REFERENCE && threads == 1)
                memcpy(out, sel, topk * sizeof *sel);
            else
                assert_memory_equal(out, sel, topk * sizeof *sel);
            op_free(q);
            op_free(sel);
            op_close(cpu);
            ix_free(&d);
        }
    }
}

static void test_ties(void **state)
{
    (void)state;
    int32_t out[4];
    const float equal[] = {1, 1, 1, 1, 0, 0};
    select_scores(equal, 6, 3, 1, out);
    const int32_t lowest[] = {0, 1, 2};
    assert_memory_equal(out, lowest, sizeof lowest);

    /* relu makes all non-positive keys equal, and a negative weight makes those the largest: -0 ==
     * 0 */
    const float mixed[] = {3, -1, 2, 0, -5, 1};
    select_scores(mixed, 6, 3, -1, out);
    const int32_t zeros[] = {1, 3, 4};
    assert_memory_equal(out, zeros, sizeof zeros);

    const float negative[] = {3, 5, 2, 9, 1, 4}; /* all scores below zero */
    select_scores(negative, 6, 2, -1, out);
    const int32_t smallest[] = {2, 4};
    assert_memory_equal(out, smallest, sizeof smallest);

    const float broken[] = {NAN, 1, INFINITY, NAN, 2, 0};
    select_scores(broken, 6, 4, 1, out);
    const int32_t finite_first[] = {1, 2, 4, 5};
    assert_memory_equal(out, finite_first, sizeof finite_first);
    const float all_nan[] = {NAN, NAN, NAN};
    select_scores(all_nan, 3, 2, 1, out);
    assert_memory_equal(out, lowest, 2 * sizeof *lowest);
}

/* C62: a needle at 10 percent of 140,000 positions is found. */
static void test_long_context(void **state)
{
    (void)state;
    const uint32_t n = 140000, rows[] = {1};
    index_data d;
    ix_make(&d, &(index_case){2, 4, 2, 64, NBI_BF16, true}, &n, rows, 1);
    const nbi_limits limits = ix_limits(&d);
    d.w[0] = d.w[1] = 1;
    d.q[2] = 0.6f; /* not so small that any key would do */
    d.q[3] = 0.8f;
    const float needle[] = {d.q[2], d.q[3]};
    uint16_t *k = (uint16_t *)d.kv.index_k + op_slot(&d.batch, 0, 14000) * 4;
    k[2] = nbi_f32_bf16(100 * needle[0]);
    k[3] = nbi_f32_bf16(100 * needle[1]);
    LEVELS(level)
    {
        nbi_cpu *cpu = op_open(level, 2, &limits);
        int32_t *sel = op_alloc(64 * sizeof *sel);
        float *q = op_cache(NBI_F32, d.q, 8);
        run(cpu, &d, &d.batch.b, 0, q, sel);
        bool found = false;
        for (int i = 0; i < 64; i++) found |= sel[i] == 14000;
        assert_true(found);
        ix_check(&d, 0, sel);
        op_free(q);
        op_free(sel);
        op_close(cpu);
    }
    ix_free(&d);
}

/* The same list in one batch, in chunks and row by row, for 1 to 3 threads. */
static void test_bits(void **state)
{
    (void)state;
    const uint32_t lengths[] = {700, 90}, rows[] = {100, 90};
    index_data d;
    ix_make(&d, &(index_case){5, 24, 8, 50, NBI_BF16, true}, lengths, rows, 2);
    /* many equal scores: ties must fall the same way everywhere */
    const uint32_t T = d.batch.b.n_rows, topk = d.c.topk, nq = d.c.heads * d.c.dim;
    uint16_t *k = d.kv.index_k;
    for (uint32_t p = 0; p < 700; p += 3)
        memcpy(k + op_slot(&d.batch, 0, p) * 24, k + op_slot(&d.batch, 0, 0) * 24, 48);
    const nbi_limits limits = ix_limits(&d);
    int32_t *all = op_alloc((size_t)T * topk * 4), *part = op_alloc((size_t)T * topk * 4);
    LEVELS(level)
    {
        for (uint32_t threads = 1; threads <= 3; threads++) {
            nbi_cpu *cpu = op_open(level, threads, &limits);
            static const uint32_t chunks[] = {1000, 64, 7, 1};
            for (int c = 0; c < 4; c++) {
                int32_t *out = c == 0 && threads == 1 ? all : part;
                memset(out, 0x55, (size_t)T * topk * 4);
                for (uint32_t t = 0; t < T;) {
                    uint32_t end = t;
                    while (end < T && end - t < chunks[c] && d.batch.seq[end] == d.batch.seq[t])
                        end++;
                    op_batch b;
                    op_batch_slice(&b, &d.batch, t, end);
                    float *q = op_cache(NBI_F32, d.q + (size_t)t * nq, (size_t)(end - t) * nq);
                    run(cpu, &d, &b.b, t, q, out + (size_t)t * topk);
                    op_free(q);
                    op_batch_free(&b);
                    t = end;
                }
                if (out == part) assert_memory_equal(all, part, (size_t)T * topk * 4);
            }
            op_close(cpu);
        }
    }
    op_free(all);
    op_free(part);
    ix_free(&d);
}

static void test_append(void **state)
{
    (void)state;
    enum { D = 40, ROPE = 12 };
    const uint32_t lengths[] = {70, 64, 1}, rows[] = {20, 1, 1};
    op_batch b;
    op_batch_make(&b, lengths, rows, 3);
    const uint32_t T = b.b.n_rows;
    float *k = op_floats((size_t)T * D), *w = op_floats(D), *bias = op_floats(D);
    float *cs = op_floats((size_t)T * ROPE / 2), *sn = op_floats((size_t)T * ROPE / 2);
    for (size_t i = 0; i < (size_t)T * D; i++)
        k[i] = 5 + 0.01f * op_normal(); /* mean far from zero */
    op_fill(w, D, 1);
    op_fill(bias, D, 1);
    op_fill(cs, (size_t)T * ROPE / 2, 1);
    op_fill(sn, (size_t)T * ROPE / 2, 1);
    static const nbi_dtype types[] = {NBI_F32, NBI_BF16, NBI_F8_E4M3};
    static const double bounds[] = {1e-6, 0.004, 0.0625};
    for (int kind = 0; kind < 6; kind++) {
        const nbi_dtype dtype = types[kind / 2];
        const bool pairs = kind & 1;
        const op_kv cache = op_kv_empty(dtype, b.n_pages, 1, D, D);
        const nbi_kv_layer layer = {.dtype = dtype, .index_k = cache.data};
        const nbi_rope_rows rope = {.cos = cs, .sin = sn, .dim = ROPE, .interleaved = pairs};
        nbi_cpu *cpu = op_open(nbi_cpu_detect(), 2, NULL);
        const nbi_index_append_args a = {.k = k,
                                         .norm_weight = w,
                                         .norm_bias = bias,
                                         .eps = 1e-6f,
                                         .index_dim = D,
                                         .rope = &rope,
                                         .cache = &layer,
                                         .batch = &b.b};
        cpu->base.ops->index_append(&cpu->base, &a);
        for (uint32_t t = 0; t < T; t++) {
            double x[D], mean = 0, var = 0;
            float got[D];
            for (int i = 0; i < D; i++) mean += (double)k[t * D + i] / D;
            for (int i = 0; i < D; i++) var += pow((double)k[t * D + i] - mean, 2) / D;
            for (int i = 0; i < D; i++)
                x[i] = ((double)k[t * D + i] - mean) / sqrt(var + (double)1e-6f) * (double)w[i] +
                       (double)bias[i];
            for (int i = 0; i < ROPE / 2; i++) {
                const int p = pairs ? 2 * i : i, q = pairs ? 2 * i + 1 : i + ROPE / 2;
                const double u = x[p], v = x[q], c = (double)cs[t * ROPE / 2 + i],
                             s = (double)sn[t * ROPE / 2 + i];
                x[p] = u * c - v * s;
                x[q] = u * s + v * c;
            }
            const size_t at = op_slot(&b, (uint32_t)b.seq[t], (uint32_t)b.pos[t]);
            for (uint32_t i = 0; i < D; i++) got[i] = (float)op_kv_at(&cache, at, i);
            OP_ASSERT_ERROR(op_error(got, x, D), bounds[kind / 2], "index key %u", t);
        }
        op_check(cache.data);
        op_free(cache.data);
        op_close(cpu);
    }
    op_free(k);
    op_free(w);
    op_free(bias);
    op_free(cs);
    op_free(sn);
    op_batch_free(&b);
}

/* ---------------------------------------------------------------- speed */

/* Lists of an earlier pass: taken by row; free places grow up to the row's own position. */
static void test_reuse(void **state)
{
    (void)state;
    static const int32_t from[3][4] = {{0, 1, -1, -1}, {2, 5, 7, 9}, {0, 1, 2, 3}};
    static const int32_t rows[] = {1, 0, 0, 0, 2}, pos[] = {12, 2, 3, 7, 4};
    static const int32_t listed[5][4] = {
        {2, 5, 7, 9}, {0, 1, 2, -1}, {0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}};
    static const int32_t unlisted[5][4] = {
        {0, 1, 2, 3}, {0, 1, 2, -1}, {0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}};
    const nbi_batch b = {.n_rows = 5, .pos = pos, .list_rows = rows};
    nbi_cpu *cpu = op_open(NBI_CPU_REFERENCE, 1, NULL);
    int32_t *out = op_alloc(sizeof listed);
    nbi_index_reuse_args a = {.select = out, .from = &from[0][0], .topk = 4, .batch = &b};
    cpu->base.ops->index_reuse(&cpu->base, &a);
    assert_memory_equal(out, listed, sizeof listed);
    a.from = NULL;
    cpu->base.ops->index_reuse(&cpu->base, &a);
    assert_memory_equal(out, unlisted, sizeof unlisted);
    op_free(out);
    op_close(cpu);
}

typedef struct bench_run {
    nbi_cpu *cpu;
    index_data *d;
    float *q;
    int32_t *sel;
} bench_run;

static void bench_once(void *arg)
{
    bench_run *r = arg;
    run(r->cpu, r->d, &r->d->batch.b, 0, r->q, r->sel);
}

static void bench(void)
{
    static const uint32_t shapes[][2] = {{8192, 1}, {65536, 1}, {4096, 256}};
    nbi_cpu *probe = op_open(nbi_cpu_detect(), 2, NULL);
    const double bw = op_read_bandwidth(probe->pool);
    op_close(probe);
    printf("read bandwidth, 2 threads: %.1f GB/s\n", bw * 1e-9);
    for (int i = 0; i < 3; i++) {
        const index_case c = {32, 128, 64, 2048, NBI_BF16, true};
        index_data d;
        ix_make(&d, &c, &shapes[i][0], &shapes[i][1], 1);
        const uint32_t T = shapes[i][1];
        const nbi_limits limits = ix_limits(&d);
        bench_run r = {.d = &d,
                       .q = op_cache(NBI_F32, d.q, (size_t)T * 32 * 128),
                       .sel = op_alloc((size_t)T * 2048 * 4)};
        double visible = 0;
        for (uint32_t t = 0; t < T; t++) visible += d.batch.pos[t] + 1;
        LEVELS(level)
        {
            if (level == NBI_CPU_REFERENCE) continue;
            r.cpu = op_open(level, 2, &limits);
            const double s = op_time(bench_once, &r, 7), bytes = shapes[i][0] * 256.0;
            printf(
                "  index_select %-9s ctx %6u rows %4u %9.1f us %6.1f GMAC/s, %5.1f MB %5.1f%% of "
                "read bandwidth\n",
                nbi_cpu_level_name(level), shapes[i][0], T, s * 1e6, visible * 32 * 128 * 1e-9 / s,
                bytes * 1e-6, 100 * bytes / s / bw);
            op_close(r.cpu);
        }
        op_free(r.q);
        op_free(r.sel);
        ix_free(&d);
    }
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) {
        bench();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes), cmocka_unit_test(test_rotation_kind_matters),
        cmocka_unit_test(test_ties),   cmocka_unit_test(test_long_context),
        cmocka_unit_test(test_bits),   cmocka_unit_test(test_append),
        cmocka_unit_test(test_reuse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
