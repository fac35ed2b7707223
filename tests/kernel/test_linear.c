/* The operator `linear` at every level of this machine against a float64 oracle: all weight kinds,
 * odd shapes and addresses, bit equality over batches, threads and row views, NVFP4 activations,
 * the field cases of NVFP4 arithmetic. `--bench` times it. */
#include "matrix_util.h"

#include "backend/cpu/linear.h"
#include "backend/cpu/linear_tables.h"

static const nbi_weight_kind kinds[] = {NBI_WEIGHT_NVFP4,      NBI_WEIGHT_FP8_BLOCK,
                                        NBI_WEIGHT_FP8_TENSOR, NBI_WEIGHT_BF16,
                                        NBI_WEIGHT_F16,        NBI_WEIGHT_F32};
#define N_KINDS (sizeof kinds / sizeof *kinds)

static nbi_cpu *open_for(nbi_cpu_level level, uint32_t threads, uint32_t cols, uint32_t rows,
                         uint32_t n)
{
    const nbi_limits limits = {.max_rows = n,
                               .max_linear_cols = cols,
                               .max_linear_rows = rows,
                               .max_seqs = 1,
                               .max_context = 64,
                               .n_heads = 1,
                               .n_kv_heads = 1,
                               .head_dim = 64,
                               .vocab = 64,
                               .max_logit_rows = 1};
    return op_open(level, threads, &limits);
}

static double bound_of(nbi_cpu_level level, nbi_weight_kind kind, bool exact)
{
    if (level == NBI_CPU_REFERENCE) return 1e-6;
    return nbi_lin_form_of(level, kind, exact) == NBI_LIN_F32 ? 4e-6 : 5e-3;
}

static const char *label(nbi_cpu_level level, const nbi_matrix *m, uint32_t n, bool exact)
{
    static char text[160];
    snprintf(text, sizeof text, "%s %s [%u, %u] x %u%s", nbi_cpu_level_name(level),
             nbi_weight_kind_name(m->kind), m->rows, m->cols, n, exact ? " exact" : "");
    return text;
}

/* One product; y is guarded, row stride y_stride, the gaps must stay as they were. */
static float *run(nbi_cpu *cpu, const nbi_matrix *m, const float *x, uint32_t x_stride, uint32_t n,
                  uint32_t y_stride, const float *bias, bool exact)
{
    nbi_weight *w = NULL;
    nb_error err;
    assert_int_equal(cpu->base.ops->weight_prepare(&cpu->base, &w, m, &err), NB_OK);
    assert_int_equal(w->device_bytes, 0);
    float *y = op_floats((size_t)n * y_stride);
    cpu->base.ops->linear(&cpu->base, &(nbi_linear_args){.y = y,
                                                         .x = x,
                                                         .w = w,
                                                         .bias = bias,
                                                         .n_rows = n,
                                                         .x_stride = x_stride,
                                                         .y_stride = y_stride,
                                                         .y_f32 = true,
                                                         .x_exact = exact});
    op_check(y);
    cpu->base.ops->weight_release(&cpu->base, &w);
    assert_null(w);
    return y;
}

static void check_shape(nbi_cpu *cpu, nbi_weight_kind kind, uint32_t rows, uint32_t cols,
                        uint32_t n, bool exact)
{
    mat w;
    mat_make(&w, kind, rows, cols, op_below(2));
    const uint32_t xs = cols + op_below(3), ys = rows + op_below(3);
    float *x = op_floats((size_t)n * xs), *bias = op_below(2) ? op_floats(rows) : NULL;
    for (uint32_t t = 0; t < n; t++) op_fill(x + (size_t)t * xs, cols, 1);
    if (bias) op_fill(bias, rows, 0.1f);
    double *want = malloc((size_t)n * rows * sizeof *want),
           *size = malloc((size_t)n * rows * sizeof *size);
    mat_product(want, size, &w.m, x, n, xs);
    float *y = run(cpu, &w.m, x, xs, n, ys, bias, exact);
    const double bound = bound_of(cpu->level, kind, exact);
    const char *what = label(cpu->level, &w.m, n, exact);
    for (uint32_t t = 0; t < n; t++) {
        const float *yt = y + (size_t)t * ys;
        double *wt = want + (size_t)t * rows;
        for (uint32_t r = 0; r < rows; r++) {
            if (bias) wt[r] += (double)bias[r];
            const double off = fabs((double)yt[r] - wt[r]);
            const double unit = size[(size_t)t * rows + r] + (bias ? fabs((double)bias[r]) : 0);
            OP_ASSERT_ERROR(off / (unit + 1e-30), bound, "%s token %u row %u", what, t, r);
        }
        if (rows >= 32) OP_ASSERT_ERROR(op_error(yt, wt, rows), bound, "%s token %u", what, t);
        for (uint32_t r = rows; r < ys; r++) assert_true(isnan(yt[r]));
    }
    free(want);
    free(size);
    op_free(y);
    op_free(x);
    op_free(bias);
    mat_free(&w);
}

static void each_level(void (*test)(nbi_cpu_level level))
{
    for (int l = 0; l < NBI_CPU_LEVEL_COUNT; l++) {
        if ((nbi_cpu_level)l > nbi_cpu_detect())
            print_message("level %s: not on this machine, skipped\n", nbi_cpu_level_name(l));
        else
            test((nbi_cpu_level)l);
    }
}

/* ---------------------------------------------------------------- oracle */

static void oracle_level(nbi_cpu_level level)
{
    static const uint32_t rows[] = {1, 2, 15, 16, 17, 31, 32, 33, 100, 129, 300};
    static const uint32_t cols[] = {16, 32, 48, 96, 128, 144, 256, 1024, 1040, 2064};
    static const uint32_t odd_cols[] = {1, 2, 5, 31, 33, 63, 65, 127, 129, 200, 1031};
    static const uint32_t tokens[] = {1, 2, 3, 7, 16, 17, 31, 32, 33, 48, 70, 300};
    nbi_cpu *cpu = open_for(level, 2, 2064, 300, 300);
    const uint32_t repeats = level == NBI_CPU_REFERENCE ? 12 : 40;
    for (size_t k = 0; k < N_KINDS; k++) {
        for (uint32_t i = 0; i < repeats; i++) {
            const bool odd = kinds[k] != NBI_WEIGHT_NVFP4 && op_below(2);
            const uint32_t c = odd ? odd_cols[op_below(11)] : cols[op_below(10)];
            check_shape(cpu, kinds[k], rows[op_below(11)], c, tokens[op_below(11)], i % 5 == 4);
        }
        check_shape(cpu, kinds[k], 130, 160, 300, false); /* two token blocks */
    }
    op_close(cpu);
}

static void test_oracle(void **state)
{
    (void)state;
    each_level(oracle_level);
}

static void test_tables(void **state)
{
    (void)state;
    for (int s = 0; s < 256; s++) {
        for (int c = 0; c < 16; c++) {
            const double want = mat_e2m1((uint8_t)c) * mat_e4m3((uint8_t)s);
            const double got = (double)nbi_bf16_f32(nbi_lin_nvfp4_bf16[s][c]);
            assert_true(want == got || (isnan(want) && isnan(got)));
        }
        if (s >= 128) continue;
        const double want = mat_e4m3((uint8_t)s);
        const uint16_t bits = (uint16_t)(nbi_lin_e4m3_high[s] << 8 | nbi_lin_e4m3_low[s]);
        const double got = (double)nbi_bf16_f32(bits);
        assert_true(want == got || (isnan(want) && isnan(got)));
    }
}

/* ---------------------------------------------------------------- bits */

/* Every value a matrix kind can hold, through every kernel: unit vectors pick single weights, so
 * the result is the weight itself (times the global scale). */
static void exact_values_level(nbi_cpu_level level)
{
    nbi_cpu *cpu = open_for(level, 1, 256, 256, 256);
    for (size_t k = 0; k < N_KINDS; k++) {
        mat w;
        mat_make(&w, kinds[k], 40, 208, true);
        w.m.global_scale = 1;
        float *x = op_floats(208 * 208);
        for (uint32_t i = 0; i < 208 * 208; i++) x[i] = i % 209 == 0 ? 1.0f : 0.0f;
        for (int one = 0; one < 2; one++) { /* all tokens in one call, then one by one */
            for (uint32_t t = 0; t < 208; t += one ? 1 : 208) {
                const uint32_t n = one ? 1 : 208;
                float *y = run(cpu, &w.m, x + (size_t)t * 208, 208, n, 40, NULL, false);
                for (uint32_t i = 0; i < n; i++)
                    for (uint32_t r = 0; r < 40; r++) {
                        const float want = (float)mat_at(&w.m, r, t + i);
                        assert_float_equal(y[(size_t)i * 40 + r], want, 0);
                    }
                op_free(y);
            }
        }
        op_free(x);
        mat_free(&w);
    }
    op_close(cpu);
}

static void test_exact_values(void **state)
{
    (void)state;
    each_level(exact_values_level);
}

static void same_bits(const float *a, const float *b, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++) {
        if (nbi_f32_bits(a[i]) == nbi_f32_bits(b[i])) continue;
        print_error("%s: value %zu is %a, expected %a\n", what, i, (double)a[i], (double)b[i]);
        fail();
    }
}

static void bits_level(nbi_cpu_level level)
{
    static const uint32_t tokens[] = {1, 2, 3, 7, 16, 17, 33, 64, 200};
    enum { ROWS = 297, COLS = 1168, N = 200 }; /* more than one deep chunk, tails everywhere */
    for (size_t k = 0; k < N_KINDS; k++) {
        for (int exact = 0; exact < 2; exact++) {
            mat w;
            mat_make(&w, kinds[k], ROWS, COLS, true);
            float *x = op_floats((size_t)N * COLS);
            op_fill(x, (size_t)N * COLS, 1);
            nbi_cpu *one = open_for(level, 1, COLS, ROWS, N),
                    *three = open_for(level, 3, COLS, ROWS, N);
            float *want = run(one, &w.m, x, COLS, N, ROWS, NULL, exact);
            for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
                const uint32_t n = tokens[i], t = op_below(N - n + 1);
                float *y = run(i % 2 ? one : three, &w.m, x + (size_t)t * COLS, COLS, n, ROWS, NULL,
                               exact);
                same_bits(y, want + (size_t)t * ROWS, (size_t)n * ROWS,
                          label(level, &w.m, n, exact));
                op_free(y);
            }
            /* A view of some rows gives those rows. FP8 blocks: starts at a block. */
            nbi_matrix view;
            assert_int_equal(nbi_matrix_rows(&view, &w.m, 128, 291, NULL), NB_OK);
            float *y = run(three, &view, x, COLS, 5, 163, NULL, exact);
            for (uint32_t t = 0; t < 5; t++)
                same_bits(y + (size_t)t * 163, want + (size_t)t * ROWS + 128, 163,
                          label(level, &view, 5, exact));
            op_free(y);
            op_free(want);
            op_free(x);
            mat_free(&w);
            op_close(one);
            op_close(three);
        }
    }
}

static void test_bits(void **state)
{
    (void)state;
    each_level(bits_level);
}

/* A NaN weight or scale makes its own rows NaN and no other. */
static void nan_level(nbi_cpu_level level)
{
    nbi_cpu *cpu = open_for(level, 1, 256, 64, 64);
    for (size_t k = 0; k < 3; k++) {
        mat w;
        mat_make(&w, kinds[k], 48, 192, false);
        if (kinds[k] == NBI_WEIGHT_NVFP4)
            ((uint8_t *)w.scales)[20 * 12 + 5] = 0x7f;
        else
            ((uint8_t *)w.data)[20 * 192 + 77] = 0xff;
        for (uint32_t n = 1; n <= 40; n += 39) {
            float *x = op_floats((size_t)n * 192);
            op_fill(x, (size_t)n * 192, 1);
            float *y = run(cpu, &w.m, x, 192, n, 48, NULL, false);
            for (uint32_t i = 0; i < n * 48; i++) assert_int_equal(isnan(y[i]) != 0, i % 48 == 20);
            op_free(x);
            op_free(y);
        }
        mat_free(&w);
    }
    op_close(cpu);
}

static void test_nan(void **state)
{
    (void)state;
    each_level(nan_level);
}

/* ---------------------------------------------------------------- NVFP4 activations */

static void w4a4_level(nbi_cpu_level level)
{
    static const uint32_t cols[] = {16, 48, 128, 400, 1040};
    nbi_cpu *cpu = open_for(level, 2, 1040, 100, 70);
    cpu->w4a4 = true;
    for (uint32_t i = 0; i < 20; i++) {
        mat w;
        const uint32_t c = cols[op_below(5)], n = 1 + op_below(70), rows = 20 + op_below(80);
        mat_make(&w, NBI_WEIGHT_NVFP4, rows, c, true);
        w.m.input_scale = op_uniform(0.001f, 0.01f);
        float *x = op_floats((size_t)n * c), *rounded = op_floats((size_t)n * c);
        op_fill(x, (size_t)n * c, 1);
        for (uint32_t t = 0; t < n; t++)
            nbi_nvfp4_round_row(x + (size_t)t * c, c, w.m.input_scale, rounded + (size_t)t * c);
        double *want = malloc((size_t)n * rows * sizeof *want);
        mat_product(want, NULL, &w.m, rounded, n, c);
        float *y = run(cpu, &w.m, x, c, n, rows, NULL, false);
        OP_ASSERT_ERROR(op_error(y, want, (size_t)n * rows), 1e-6, "w4a4 %s",
                        label(level, &w.m, n, false));
        op_free(y);
        /* Exact activations are never rounded. */
        mat_product(want, NULL, &w.m, x, n, c);
        y = run(cpu, &w.m, x, c, n, rows, NULL, true);
        OP_ASSERT_ERROR(op_error(y, want, (size_t)n * rows), 1e-6, "w4a4 exact %s",
                        label(level, &w.m, n, true));
        op_free(y);
        free(want);
        op_free(x);
        op_free(rounded);
        mat_free(&w);
    }
    op_close(cpu);
}

static void test_w4a4(void **state)
{
    (void)state;
    each_level(w4a4_level);
}

/* ---------------------------------------------------------------- field cases */

/* C57: block scales lie row by row, and each is used once, for its own 16 columns. */
static void c57_level(nbi_cpu_level level)
{
    enum { ROWS = 160, BLOCKS = 8, COLS = 128 };
    nbi_cpu *cpu = open_for(level, 1, COLS, ROWS, BLOCKS);
    uint8_t codes[ROWS * COLS / 2], scales[ROWS * BLOCKS];
    memset(codes, 0x22, sizeof codes);
    for (uint32_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)(1 + i * 7 % 126);
    const nbi_matrix m = {.kind = NBI_WEIGHT_NVFP4,
                          .rows = ROWS,
                          .cols = COLS,
                          .data = codes,
                          .scales = scales,
                          .global_scale = 1,
                          .name = "c57"};
    float x[BLOCKS * COLS] = {0};
    for (uint32_t b = 0; b < BLOCKS; b++) x[b * COLS + 16 * b + 3] = 1;
    float *y = run(cpu, &m, x, COLS, BLOCKS, ROWS, NULL, false);
    for (uint32_t b = 0; b < BLOCKS; b++)
        for (uint32_t r = 0; r < ROWS; r++)
            assert_float_equal(y[b * ROWS + r], mat_e4m3(scales[r * BLOCKS + b]), 0);
    op_free(y);
    op_close(cpu);
}

static void test_c57(void **state)
{
    (void)state;
    each_level(c57_level);
}

/* C58: with a tensor-level scale a block with a maximum above 2688 is not clipped. */
static void test_c58(void **state)
{
    (void)state;
    float x[32] = {0}, y[32];
    x[7] = 4000;
    for (int i = 16; i < 32; i++) x[i] = 1;
    nbi_nvfp4_round_row(x, 32, 4000.0f / 2688, y);
    for (int i = 0; i < 32; i++) {
        const float largest = i < 16 ? 4000.0f : 1.0f;
        assert_true(fabsf(y[i] - x[i]) <= 0.1f * largest);
    }
}

/* C59: the input scale reaches every kernel. Rounded to NVFP4, 2.0 becomes 6 * 0.6875 * 0.5
 * = 2.0625. */
static void c59_level(nbi_cpu_level level)
{
    nbi_cpu *cpu = open_for(level, 1, 32, 32, 32);
    uint8_t codes[32 * 16], scales[32 * 2];
    memset(codes, 0x22, sizeof codes);
    memset(scales, 0x48, sizeof scales);
    const nbi_matrix m = {.kind = NBI_WEIGHT_NVFP4,
                          .rows = 32,
                          .cols = 32,
                          .data = codes,
                          .scales = scales,
                          .global_scale = 0.25f,
                          .input_scale = 0.5f,
                          .name = "c59"};
    float x[32 * 32];
    for (int i = 0; i < 32 * 32; i++) x[i] = 2;
    for (int w4a4 = 0; w4a4 < 2; w4a4++) {
        cpu->w4a4 = w4a4;
        for (uint32_t n = 1; n <= 32; n += 31) {
            float *y = run(cpu, &m, x, 32, n, 32, NULL, false);
            for (uint32_t i = 0; i < n * 32; i++) assert_float_equal(y[i], w4a4 ? 66 : 64, 0);
            op_free(y);
        }
    }
    op_close(cpu);
}

static void test_c59(void **state)
{
    (void)state;
    each_level(c59_level);
}

/* C60: codes come from a division, not from a multiplication by the reciprocal. */
static void test_c60(void **state)
{
    (void)state;
    /* Block maximum 6 * 0.013671875: block scale byte 0x07 with input scale 1. */
    float x[16] = {6 * 0.013671875f, 0.02392577938735485f};
    uint8_t codes[8], scales[1];
    nbi_nvfp4_quantize_row(x, 16, 1, codes, scales);
    assert_int_equal(scales[0], 0x07);
    assert_int_equal(codes[0], 0x37);
}

static void test_refusals(void **state)
{
    (void)state;
    nbi_cpu *cpu = open_for(NBI_CPU_REFERENCE, 1, 64, 64, 1);
    uint8_t data[64] = {0};
    nbi_weight *w = NULL;
    nb_error err;
    nbi_matrix m = {.kind = NBI_WEIGHT_NVFP4,
                    .rows = 1,
                    .cols = 24,
                    .data = data,
                    .scales = data,
                    .global_scale = 1,
                    .name = "m.proj"};
    assert_int_equal(cpu->base.ops->weight_prepare(&cpu->base, &w, &m, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "m.proj"));
    assert_non_null(strstr(err.text, "24"));
    m.kind = NBI_WEIGHT_NONE;
    assert_int_equal(cpu->base.ops->weight_prepare(&cpu->base, &w, &m, &err), NB_INVALID);
    assert_null(w);
    op_close(cpu);
}

/* ---------------------------------------------------------------- speed */

typedef struct bench {
    nbi_cpu *cpu;
    nbi_weight *w[64];
    uint32_t n_w, next;
    nbi_linear_args a;
} bench;

static void bench_step(void *arg)
{
    bench *b = arg;
    b->a.w = b->w[b->next++ % b->n_w];
    b->cpu->base.ops->linear(&b->cpu->base, &b->a);
}

static void bench_case(nbi_cpu_level level, nbi_weight_kind kind, uint32_t n, double bandwidth)
{
    /* Enough matrices that none stays in a cache: half a gigabyte. */
    enum { ROWS = 4096, COLS = 4096 };
    bench b = {.cpu = open_for(level, 0, COLS, ROWS, n)};
    mat one;
    mat_make(&one, kind, ROWS, COLS, false);
    const uint64_t bytes = nbi_matrix_bytes(&one.m);
    b.n_w = (uint32_t)((512u << 20) / bytes) + 1;
    void *copies[64];
    for (uint32_t i = 0; i < b.n_w; i++) {
        nbi_matrix m = one.m;
        const size_t data = (size_t)(nbi_matrix_row_bytes(&m) * ROWS),
                     scales = (size_t)(bytes - data);
        copies[i] = nbi_pages_alloc(data + scales);
        memcpy(copies[i], m.data, data);
        if (scales) memcpy((char *)copies[i] + data, m.scales, scales);
        m.data = copies[i];
        m.scales = scales ? (char *)copies[i] + data : NULL;
        assert_int_equal(b.cpu->base.ops->weight_prepare(&b.cpu->base, &b.w[i], &m, NULL), NB_OK);
    }
    float *x = op_floats((size_t)n * COLS), *y = op_floats((size_t)n * ROWS);
    op_fill(x, (size_t)n * COLS, 1);
    b.a = (nbi_linear_args){.y = y, .x = x, .n_rows = n, .x_stride = COLS, .y_stride = ROWS};
    const double s = op_time(bench_step, &b, n > 16 ? 9 : 3 * b.n_w);
    const uint32_t threads = nbi_pool_threads(b.cpu->pool);
    print_message(
        "%-9s %-10s T=%-4u %9.1f us  %6.2f GB/s  %5.1f %% of read  %7.1f GMAC/s per core\n",
        nbi_cpu_level_name(level), nbi_weight_kind_name(kind), n, 1e6 * s, 1e-9 * (double)bytes / s,
        100 * (double)bytes / s / bandwidth, 1e-9 * n * (double)ROWS * COLS / s / threads);
    for (uint32_t i = 0; i < b.n_w; i++) {
        b.cpu->base.ops->weight_release(&b.cpu->base, &b.w[i]);
        nbi_pages_free(copies[i], (size_t)bytes);
    }
    op_free(x);
    op_free(y);
    mat_free(&one);
    op_close(b.cpu);
}

static void run_bench(void)
{
    static const uint32_t tokens[] = {1, 4, 16, 32, 64, 512};
    nbi_pool *pool = NULL;
    nbi_pool_create(&pool, 0, NULL);
    const double bandwidth = op_read_bandwidth(pool);
    print_message("read bandwidth %.2f GB/s, %u threads\n", 1e-9 * bandwidth,
                  nbi_pool_threads(pool));
    nbi_pool_destroy(&pool);
    for (int l = NBI_CPU_AVX2; l <= (int)nbi_cpu_detect(); l++)
        for (size_t k = 0; k < 4; k++)
            for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
                bench_case((nbi_cpu_level)l, kinds[k], tokens[i], bandwidth);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) {
        run_bench();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables),       cmocka_unit_test(test_oracle),
        cmocka_unit_test(test_exact_values), cmocka_unit_test(test_bits),
        cmocka_unit_test(test_nan),          cmocka_unit_test(test_w4a4),
        cmocka_unit_test(test_c57),          cmocka_unit_test(test_c58),
        cmocka_unit_test(test_c59),          cmocka_unit_test(test_c60),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
