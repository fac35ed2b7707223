/* Embedding, rope angles, RMSNorm, SwiGLU, gather and add against float64, for every level; the
 * numerics guard; rows keep their bits in any batch. */
#include "operator_util.h"

#define LEVELS(level) \
    for (nbi_cpu_level level = NBI_CPU_REFERENCE; level <= nbi_cpu_detect(); level++)

static nbi_batch rows_batch(uint32_t T, const int32_t *ids, const int32_t *pos, int32_t *fault)
{
    return (nbi_batch){.n_rows = T, .ids = ids, .pos = pos, .row_fault = fault};
}

/* ---------------------------------------------------------------- embed */

static void test_embed(void **state)
{
    (void)state;
    enum { V = 50, H = 48, T = 9 };
    float w[V * H];
    op_fill(w, V * H, 1);
    w[7 * H + 3] = NAN;
    uint16_t *bf16 = op_cache(NBI_BF16, w, V * H);
    uint8_t *codes = op_alloc(V * H / 2), *scales = op_alloc(V * H / 16);
    float global, finite[V * H];
    nb_error err;
    memcpy(finite, w, sizeof w);
    finite[7 * H + 3] = 0;
    assert_int_equal(nbi_nvfp4_quantize(finite, V, H, 0, codes, scales, &global, &err), NB_OK);
    const nbi_weight tables[2] = {
        {.host = {.kind = NBI_WEIGHT_BF16, .rows = V, .cols = H, .data = bf16, .global_scale = 1}},
        {.host = {.kind = NBI_WEIGHT_NVFP4,
                  .rows = V,
                  .cols = H,
                  .data = codes,
                  .scales = scales,
                  .global_scale = global}}};
    const int32_t ids[T] = {0, 49, 7, 3, 3, 7, 1, 2, 48};
    LEVELS(level)
    {
        nbi_cpu *cpu = op_open(level, 2, NULL);
        for (int k = 0; k < 2; k++) {
            int32_t fault[T] = {0};
            fault[5] = 77; /* an earlier fault stays */
            const nbi_batch b = rows_batch(T, ids, NULL, fault);
            float *out = op_floats(T * H), want[H];
            const nbi_embed_args a = {.out = out, .table = &tables[k], .batch = &b};
            cpu->base.ops->embed(&cpu->base, &a);
            op_check(out);
            for (int t = 0; t < T; t++) {
                nbi_matrix_row(&tables[k].host, (uint32_t)ids[t], want);
                assert_memory_equal(out + t * H, want, sizeof want);
                const bool bad = k == 0 && ids[t] == 7;
                assert_int_equal(fault[t], t == 5 ? 77 : bad ? 1 + NBI_WHERE_EMBED : 0);
            }
            op_free(out);
        }
        op_close(cpu);
    }
    op_free(bf16);
    op_free(codes);
    op_free(scales);
}

/* ---------------------------------------------------------------- rope */

static void test_rope_table(void **state)
{
    (void)state;
    enum { T = 7, DIM = 64, HALF = DIM / 2 };
    const int32_t pos[T] = {0, 1, 2, 199, 131071, 202751, 1048575};
    float inv[HALF];
    for (int i = 0; i < HALF; i++) inv[i] = (float)pow(8e6, -2.0 * i / DIM);
    const nbi_batch b = rows_batch(T, NULL, pos, NULL);
    LEVELS(level)
    {
        nbi_cpu *cpu = op_open(level, 2, NULL);
        float *cs = op_floats(T * HALF), *sn = op_floats(T * HALF);
        const nbi_rope_table_args a = {
            .cos = cs, .sin = sn, .inv_freq = inv, .dim = DIM, .factor = 1.25f, .batch = &b};
        cpu->base.ops->rope_table(&cpu->base, &a);
        op_check(cs);
        op_check(sn);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < HALF; i++) {
                const long double angle = (long double)pos[t] * (long double)inv[i];
                assert_true(fabsl((long double)cs[t * HALF + i] - 1.25L * cosl(angle)) < 2e-7L);
                assert_true(fabsl((long double)sn[t * HALF + i] - 1.25L * sinl(angle)) < 2e-7L);
                /* The float32 angle of other implementations agrees at short range only. */
                const float other = 1.25f * cosf((float)pos[t] * inv[i]);
                if (pos[t] < 200) assert_true(fabsf(cs[t * HALF + i] - other) < 1.5e-5f);
            }
        op_free(cs);
        op_free(sn);
        op_close(cpu);
    }
}

/* ---------------------------------------------------------------- RMSNorm */

static void check_norm(nbi_cpu_level level, uint32_t T, uint32_t D, bool delta, bool in_place)
{
    const uint32_t xs = D + 3, os = in_place ? xs : D + 1;
    float *x = op_floats((size_t)T * xs), *d = op_floats((size_t)T * D), *w = op_floats(D);
    float *out = in_place ? x : op_floats((size_t)T * os);
    op_fill(x, (size_t)T * xs, 0.01f);
    op_fill(d, (size_t)T * D, 0.01f);
    op_fill(w, D, 1);
    double *want = malloc(D * sizeof *want), *sum = malloc((size_t)T * D * sizeof *sum);
    for (uint32_t t = 0; t < T; t++)
        for (uint32_t i = 0; i < D; i++)
            sum[t * D + i] = delta ? (double)(x[t * xs + i] + d[t * D + i]) : (double)x[t * xs + i];
    nbi_cpu *cpu = op_open(level, 2, NULL);
    nbi_rmsnorm_args a = {.out = out,
                          .x = x,
                          .delta = delta ? d : NULL,
                          .weight = w,
                          .eps = 1e-5f,
                          .n_rows = T,
                          .width = D,
                          .x_stride = xs,
                          .out_stride = os};
    float *other = op_floats((size_t)T * xs), *first = op_floats((size_t)T * os);
    if (!in_place) { /* the sum elsewhere: x stays, the rest has the same bits */
        a.out = first;
        a.x_out = other;
        cpu->base.ops->rmsnorm(&cpu->base, &a);
        a.out = out;
        a.x_out = NULL;
    }
    cpu->base.ops->rmsnorm(&cpu->base, &a);
    for (uint32_t t = 0; t < T && !in_place; t++) {
        assert_memory_equal(first + t * os, out + t * os, D * sizeof *out);
        if (delta) assert_memory_equal(other + t * xs, x + t * xs, D * sizeof *x);
    }
    op_free(other);
    op_free(first);
    for (uint32_t t = 0; t < T; t++) {
        double squares = 0;
        for (uint32_t i = 0; i < D; i++) squares += sum[t * D + i] * sum[t * D + i];
        for (uint32_t i = 0; i < D; i++)
            want[i] = sum[t * D + i] / sqrt(squares / D + (double)1e-5f) * (double)w[i];
        OP_ASSERT_ERROR(op_error(out + t * os, want, D), 1e-6, "rmsnorm %s D %u row %u",
                        nbi_cpu_level_name(level), D, t);
        if (!in_place)
            for (uint32_t i = 0; i < D; i++) assert_true(x[t * xs + i] == (float)sum[t * D + i]);
    }
    op_free(x);
    if (!in_place) op_free(out);
    op_free(d);
    op_free(w);
    free(want);
    free(sum);
    op_close(cpu);
}

static void test_rmsnorm(void **state)
{
    (void)state;
    static const uint32_t widths[] = {1, 15, 16, 17, 128, 384, 1000, 6144};
    LEVELS(level)
    {
        for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
            for (int k = 0; k < 4; k++) check_norm(level, i % 3 + 1, widths[i], k & 1, k & 2);
    }
}

static void test_rmsnorm_guard(void **state)
{
    (void)state;
    enum { T = 5, D = 40 };
    LEVELS(level)
    {
        float x[T * D], delta[T * D] = {0}, out[T * D], w[D];
        int32_t fault[T] = {0, 0, 0, 5, 0};
        op_fill(x, T * D, 1);
        op_fill(w, D, 1);
        float alone[D], x0[D];
        memcpy(x0, x, sizeof x0);
        x[1 * D + 39] = NAN;
        x[2 * D + 1] = INFINITY;
        x[3 * D + 2] = NAN;
        nbi_cpu *cpu = op_open(level, 2, NULL);
        nbi_rmsnorm_args a = {.out = out,
                              .x = x,
                              .delta = delta,
                              .weight = w,
                              .eps = 1e-5f,
                              .n_rows = T,
                              .width = D,
                              .x_stride = D,
                              .out_stride = D,
                              .row_fault = fault,
                              .layer = 3,
                              .where = NBI_WHERE_POST_NORM};
        cpu->base.ops->rmsnorm(&cpu->base, &a);
        const int code = 1 + 3 * NBI_WHERE_COUNT + NBI_WHERE_POST_NORM;
        const int32_t want[T] = {0, code, code, 5, 0};
        assert_memory_equal(fault, want, sizeof want);
        /* C63: the neighbours of broken rows keep their bits; out may be absent. */
        a.x = x0;
        a.out = alone;
        a.n_rows = 1;
        a.row_fault = NULL;
        cpu->base.ops->rmsnorm(&cpu->base, &a);
        assert_memory_equal(alone, out, sizeof alone);
        a.out = NULL;
        cpu->base.ops->rmsnorm(&cpu->base, &a);
        op_close(cpu);
    }
}

/* ---------------------------------------------------------------- SwiGLU */

static void test_swiglu(void **state)
{
    (void)state;
    static const uint32_t widths[] = {1, 7, 16, 100, 1024, 1025, 2600};
    LEVELS(level)
    {
        nbi_cpu *cpu = op_open(level, 2, NULL);
        for (size_t k = 0; k < sizeof widths / sizeof *widths; k++) {
            const uint32_t T = 3, W = widths[k], in = 2 * W, os = W + 1;
            float *x = op_floats((size_t)T * in), *out = op_floats((size_t)T * os);
            for (uint32_t i = 0; i < T * in; i++) x[i] = op_uniform(-12, 12);
            const float edge[] = {0, -0.0f, 88, -88, -103, 200, -200, 1e30f, -1e30f, 1e-30f};
            for (uint32_t i = 0; i < W && i < 10; i++) x[i] = edge[i];
            const nbi_swiglu_args a = {.out = out,
                                       .gate = x,
                                       .up = x + W,
                                       .n_rows = T,
                                       .width = W,
                                       .in_stride = in,
                                       .out_stride = os};
            cpu->base.ops->swiglu(&cpu->base, &a);
            op_check(out);
            for (uint32_t t = 0; t < T; t++)
                for (uint32_t i = 0; i < W; i++) {
                    const double g = (double)x[t * in + i], u = (double)x[t * in + W + i];
                    const double want = g / (1 + exp(-g)) * u, got = (double)out[t * os + i];
                    /* below exp(-87) results leave float32's normal range */
                    if (!(fabs(got - want) <= 1e-6 * fabs(want) + 1e-35))
                        fail_msg("%s: swiglu(%g, %g) = %g, expected %g", nbi_cpu_level_name(level),
                                 g, u, got, want);
                }
            /* the same value anywhere in a row gives the same bits */
            for (uint32_t i = 0; i < T * in; i++) x[i] = i % in < W ? 1.7f : 0.3f;
            cpu->base.ops->swiglu(&cpu->base, &a);
            for (uint32_t t = 0; t < T; t++)
                for (uint32_t i = 0; i < W; i++) assert_true(out[t * os + i] == out[0]);
            op_free(x);
            op_free(out);
        }
        op_close(cpu);
    }
}

/* ---------------------------------------------------------------- gather, add */

static void test_gather_add(void **state)
{
    (void)state;
    enum { W = 37 };
    float x[5 * W];
    op_fill(x, 5 * W, 1);
    const int32_t rows[] = {4, 0, 4};
    nbi_cpu *cpu = op_open(nbi_cpu_detect(), 3, NULL);
    float *out = op_floats(3 * W);
    const nbi_gather_args g = {.out = out, .x = x, .rows = rows, .n = 3, .width = W};
    cpu->base.ops->gather(&cpu->base, &g);
    op_check(out);
    for (int i = 0; i < 3; i++)
        assert_memory_equal(out + i * W, x + rows[i] * W, W * sizeof(float));
    op_free(out);
    static const size_t sizes[] = {0, 1, 1023, 1024, 1025, 100000};
    for (size_t k = 0; k < 6; k++) {
        const size_t n = sizes[k];
        float *a = op_floats(n), *b = op_floats(n), *want = op_floats(n);
        op_fill(a, n, 1);
        op_fill(b, n, 1);
        for (size_t i = 0; i < n; i++) want[i] = a[i] + b[i];
        cpu->base.ops->add(&cpu->base, &(nbi_add_args){.x = a, .y = b, .n = n});
        assert_memory_equal(a, want, n * sizeof(float));
        op_free(a);
        op_free(b);
        op_free(want);
    }
    op_close(cpu);
}

/* ---------------------------------------------------------------- speed */

typedef struct bench_run {
    nbi_cpu *cpu;
    nbi_rmsnorm_args norm;
    nbi_swiglu_args swiglu;
} bench_run;

static void bench_norm(void *arg)
{
    bench_run *r = arg;
    r->cpu->base.ops->rmsnorm(&r->cpu->base, &r->norm);
}

static void bench_swiglu(void *arg)
{
    bench_run *r = arg;
    r->cpu->base.ops->swiglu(&r->cpu->base, &r->swiglu);
}

static void bench(void)
{
    enum { D = 6144, W = 12288 };
    static const uint32_t rows[] = {1, 512};
    for (int i = 0; i < 2; i++) {
        const uint32_t T = rows[i];
        float *x = op_floats((size_t)T * D), *out = op_floats((size_t)T * W), *w = op_floats(D);
        float *gate = op_floats((size_t)T * W), *delta = op_floats((size_t)T * D);
        op_fill(x, (size_t)T * D, 1);
        op_fill(gate, (size_t)T * W, 1);
        op_fill(w, D, 1);
        memset(delta, 0, (size_t)T * D * sizeof(float));
        LEVELS(level)
        {
            bench_run r = {.cpu = op_open(level, 2, NULL)};
            r.norm = (nbi_rmsnorm_args){.out = out,
                                        .x = x,
                                        .delta = delta,
                                        .weight = w,
                                        .eps = 1e-5f,
                                        .n_rows = T,
                                        .width = D,
                                        .x_stride = D,
                                        .out_stride = D};
            r.swiglu = (nbi_swiglu_args){.out = out,
                                         .gate = gate,
                                         .up = gate,
                                         .n_rows = T,
                                         .width = W,
                                         .in_stride = W,
                                         .out_stride = W};
            const double n = op_time(bench_norm, &r, 15), s = op_time(bench_swiglu, &r, 15);
            printf("  %-9s rows %4u rmsnorm %6u: %8.1f us %5.1f GB/s   swiglu %6u: %8.1f us %5.1f "
                   "GB/s\n",
                   nbi_cpu_level_name(level), T, D, n * 1e6, T * D * 16e-9 / n, W, s * 1e6,
                   T * 12.0 * W * 1e-9 / s);
            op_close(r.cpu);
        }
        op_free(x);
        op_free(out);
        op_free(w);
        op_free(gate);
        op_free(delta);
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
        cmocka_unit_test(test_embed),   cmocka_unit_test(test_rope_table),
        cmocka_unit_test(test_rmsnorm), cmocka_unit_test(test_rmsnorm_guard),
        cmocka_unit_test(test_swiglu),  cmocka_unit_test(test_gather_add),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
