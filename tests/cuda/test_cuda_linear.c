/* The operator `linear` on the CUDA backend against a float64 oracle: all weight kinds, odd shapes,
 * strides and addresses, NVFP4 activations, values that are not finite; the same bits for a row
 * whatever the number and order of tokens. `--bench` times it. */
#include "cuda/gpu_util.h"

static const nbi_weight_kind kinds[] = {NBI_WEIGHT_NVFP4,      NBI_WEIGHT_FP8_BLOCK,
                                        NBI_WEIGHT_FP8_TENSOR, NBI_WEIGHT_BF16,
                                        NBI_WEIGHT_F16,        NBI_WEIGHT_F32};
#define N_KINDS (sizeof kinds / sizeof *kinds)

static nbi_limits limits_for(uint32_t cols, uint32_t rows, uint32_t n)
{
    return (nbi_limits){.max_rows = n,
                        .max_seqs = 1,
                        .max_context = 64,
                        .max_logit_rows = 1,
                        .n_heads = 1,
                        .n_kv_heads = 1,
                        .head_dim = 64,
                        .max_linear_cols = cols,
                        .max_linear_rows = rows,
                        .vocab = 64};
}

static nbi_backend *open_for(uint32_t cols, uint32_t rows, uint32_t n)
{
    const nbi_limits limits = limits_for(cols, rows, n);
    return gpu_open(&limits);
}

/* Of |error| against the sum of magnitudes: x has 11 significant bits, BF16 x has 8. */
static double bound_of(nbi_weight_kind kind, bool exact)
{
    if (exact || kind == NBI_WEIGHT_F32) return 2e-6;
    return kind == NBI_WEIGHT_BF16 ? 4e-3 : 5e-4;
}

static const char *label(const nbi_matrix *m, uint32_t n, bool exact)
{
    static char text[160];
    snprintf(text, sizeof text, "%s [%u, %u] x %u%s", nbi_weight_kind_name(m->kind), m->rows,
             m->cols, n, exact ? " exact" : "");
    return text;
}

/* One product. y is guarded, with row stride y_stride; x begins `shift` floats behind an aligned
 * address. */
static float *run(nbi_backend *b, const nbi_matrix *m, const float *x, uint32_t x_stride,
                  uint32_t shift, uint32_t n, uint32_t y_stride, const float *bias, bool exact)
{
    nbi_weight *w = NULL;
    nb_error err;
    if (b->ops->weight_prepare(b, &w, m, &err) != NB_OK) fail_msg("%s", err.text);
    const size_t n_x = (size_t)n * x_stride + shift;
    float *shifted = op_floats(n_x);
    memcpy(shifted + shift, x, (size_t)n * x_stride * sizeof *x);
    gpu_buffer xs = gpu_floats(b, shifted, n_x);
    gpu_buffer y = gpu_poisoned(b, (size_t)n * y_stride * sizeof(float));
    gpu_buffer add = {0};
    if (bias) add = gpu_floats(b, bias, m->rows);
    b->ops->linear(b, &(nbi_linear_args){.y = y.p,
                                         .x = (float *)xs.p + shift,
                                         .w = w,
                                         .bias = add.p,
                                         .n_rows = n,
                                         .x_stride = x_stride,
                                         .y_stride = y_stride,
                                         .y_f32 = true,
                                         .x_exact = exact});
    float *got = gpu_read(&y);
    gpu_free(&xs);
    gpu_free(&y);
    if (bias) gpu_free(&add);
    op_free(shifted);
    b->ops->weight_release(b, &w);
    return got;
}

/* ---------------------------------------------------------------- oracle */

static void check_product(const nbi_matrix *m, const float *y, uint32_t y_stride, const float *x,
                          uint32_t x_stride, uint32_t n, const float *bias, double bound,
                          bool exact)
{
    const uint32_t rows = m->rows;
    double *want = malloc((size_t)n * rows * sizeof *want),
           *size = malloc((size_t)n * rows * sizeof *size);
    mat_product(want, size, m, x, n, x_stride);
    for (uint32_t t = 0; t < n; t++) {
        const float *yt = y + (size_t)t * y_stride;
        for (uint32_t r = 0; r < rows; r++) {
            const double add = bias ? (double)bias[r] : 0;
            const double off = fabs((double)yt[r] - want[(size_t)t * rows + r] - add);
            const double unit = size[(size_t)t * rows + r] + fabs(add);
            OP_ASSERT_ERROR(off / (unit + 1e-30), bound, "%s token %u row %u", label(m, n, exact),
                            t, r);
        }
        for (uint32_t r = rows; r < y_stride; r++) assert_true(isnan(yt[r]));
    }
    free(want);
    free(size);
}

static void check_shape(nbi_backend *b, nbi_weight_kind kind, uint32_t rows, uint32_t cols,
                        uint32_t n, bool exact)
{
    mat w;
    mat_make(&w, kind, rows, cols, op_below(2));
    const uint32_t xs = cols + op_below(2) * op_below(5), ys = rows + op_below(3);
    float *x = op_floats((size_t)n * xs), *bias = op_below(2) ? op_floats(rows) : NULL;
    for (uint32_t t = 0; t < n; t++) {
        /* Tokens of all sizes, and some without anything. */
        const float scale = op_below(8) == 0 ? 0 : exp2f((float)op_below(80) - 40);
        for (uint32_t c = 0; c < cols; c++) x[(size_t)t * xs + c] = op_normal() * scale;
    }
    if (bias) op_fill(bias, rows, 0.1f);
    float *y = run(b, &w.m, x, xs, op_below(2) * op_below(4), n, ys, bias, exact);
    check_product(&w.m, y, ys, x, xs, n, bias, bound_of(kind, exact), exact);
    free(y);
    op_free(x);
    op_free(bias);
    mat_free(&w);
}

static void test_oracle(void **state)
{
    (void)state;
    static const uint32_t rows[] = {1, 2, 15, 16, 17, 33, 100, 129};
    static const uint32_t cols[] = {16, 48, 64, 96, 144, 256, 272, 528, 784};
    static const uint32_t odd_cols[] = {1, 2, 5, 31, 65, 129, 200, 257, 1031};
    static const uint32_t tokens[] = {1, 2, 7, 8, 9, 16, 17, 24, 33};
    nbi_backend *b = open_for(1031, 300, 70);
    for (size_t k = 0; k < N_KINDS; k++)
        for (uint32_t i = 0; i < 16; i++) {
            const bool odd = kinds[k] != NBI_WEIGHT_NVFP4 && op_below(2);
            const uint32_t c = odd ? odd_cols[op_below(9)] : cols[op_below(9)];
            check_shape(b, kinds[k], rows[op_below(8)], c, tokens[op_below(9)], i % 4 == 3);
        }
    gpu_close(b);
}

/* More chunks than a block has warps, more row tiles than blocks, and the large blocks of many
 * tokens. */
static void test_large(void **state)
{
    (void)state;
    nbi_backend *b = open_for(2400, 1100, 180);
    for (size_t k = 0; k < N_KINDS; k++) {
        const bool fp8 = kinds[k] == NBI_WEIGHT_FP8_BLOCK;
        check_shape(b, kinds[k], 200, fp8 ? 1200 : 2400, 3, false);
        check_shape(b, kinds[k], 260, 192, 150, false);
        check_shape(b, kinds[k], 260, 272, 140, false);
        check_shape(b, kinds[k], 520, 592, 180, false);
        check_shape(b, kinds[k], 520, fp8 ? 400 : 592, 40, false); /* K divided over blocks, */
        check_shape(b, kinds[k], 1100, 272, 64, false);            /* warps go on */
    }
    /* 16 row tiles of a block between two passes are not all of it. */
    check_shape(b, NBI_WEIGHT_FP8_BLOCK, 1100, 1168, 1, false);
    check_shape(b, NBI_WEIGHT_NVFP4, 1100, 2320, 9, false);
    check_shape(b, NBI_WEIGHT_BF16, 40, 2400, 20, true);
    gpu_close(b);
}

/* Unit vectors pick single weights: what comes out is the weight. */
static void test_exact_values(void **state)
{
    (void)state;
    enum { ROWS = 24, COLS = 80 };
    nbi_backend *b = open_for(COLS, ROWS, COLS);
    for (size_t k = 0; k < N_KINDS; k++) {
        mat w;
        mat_make(&w, kinds[k], ROWS, COLS, true);
        w.m.global_scale = 1;
        float *x = op_floats(COLS * COLS);
        for (uint32_t i = 0; i < COLS * COLS; i++) x[i] = i % (COLS + 1) == 0 ? 1.0f : 0.0f;
        for (int one = 0; one < 2; one++)
            for (uint32_t t = 0; t < COLS; t += one ? 9 : COLS) {
                const uint32_t n = one ? 1 : COLS;
                float *y = run(b, &w.m, x + (size_t)t * COLS, COLS, 0, n, ROWS, NULL, false);
                for (uint32_t i = 0; i < n; i++)
                    for (uint32_t r = 0; r < ROWS; r++)
                        assert_float_equal(y[(size_t)i * ROWS + r], (float)mat_at(&w.m, r, t + i),
                                           0);
                free(y);
            }
        op_free(x);
        mat_free(&w);
    }
    gpu_close(b);
}

/* ---------------------------------------------------------------- bits */

static void same_bits(const float *a, const float *b, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++) {
        if (nbi_f32_bits(a[i]) == nbi_f32_bits(b[i])) continue;
        fail_msg("%s: value %zu is %a, expected %a", what, i, (double)a[i], (double)b[i]);
    }
}

static void check_bits(nbi_backend *b, const nbi_matrix *m, bool exact)
{
    static const uint32_t tokens[] = {1, 2, 8, 9, 16, 17, 40, 64, 70};
    enum { N = 100 };
    const uint32_t cols = m->cols, rows = m->rows;
    float *x = op_floats((size_t)N * cols), *back = op_floats((size_t)N * cols);
    op_fill(x, (size_t)N * cols, 1);
    for (uint32_t t = 0; t < N; t++)
        memcpy(back + (size_t)t * cols, x + (size_t)(N - 1 - t) * cols, cols * sizeof *x);
    float *want = run(b, m, x, cols, 0, N, rows, NULL, exact);
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        const uint32_t n = tokens[i], t = op_below(N - n + 1);
        float *y = run(b, m, x + (size_t)t * cols, cols, i % 2, n, rows, NULL, exact);
        same_bits(y, want + (size_t)t * rows, (size_t)n * rows, label(m, n, exact));
        free(y);
    }
    float *y = run(b, m, back, cols, 0, N, rows, NULL, exact);
    for (uint32_t t = 0; t < N; t++)
        same_bits(y + (size_t)t * rows, want + (size_t)(N - 1 - t) * rows, rows, "order of rows");
    free(y);
    nbi_matrix view;
    assert_int_equal(nbi_matrix_rows(&view, m, 128, rows, NULL), NB_OK);
    y = run(b, &view, x, cols, 0, 3, rows - 128, NULL, exact);
    for (uint32_t t = 0; t < 3; t++)
        same_bits(y + (size_t)t * (rows - 128), want + (size_t)t * rows + 128, rows - 128, "view");
    free(y);
    free(want);
    op_free(x);
    op_free(back);
}

static void test_bits(void **state)
{
    (void)state;
    nbi_backend *b = open_for(656, 300, 100);
    for (size_t k = 0; k < N_KINDS; k++) {
        mat w;
        mat_make(&w, kinds[k], 170, 656, true);
        check_bits(b, &w.m, false);
        if (k == 0 || k == 3) check_bits(b, &w.m, true);
        mat_free(&w);
    }
    gpu_close(b);
}

/* Products of one x in a row, as q, k and v, apart or in one launch: what is kept of x from one to
 * the next is not kept when x changes, by an upload or by a product. */
static void check_same_x(uint32_t n)
{
    enum { COLS = 272, ROWS = 272 };
    nbi_backend *b = open_for(COLS, ROWS, n);
    static const nbi_weight_kind chain[] = {NBI_WEIGHT_NVFP4, NBI_WEIGHT_F16, NBI_WEIGHT_BF16,
                                            NBI_WEIGHT_BF16, NBI_WEIGHT_BF16};
    enum { LINKS = sizeof chain / sizeof *chain };
    const size_t bytes = (size_t)n * COLS * sizeof(float);
    mat m[LINKS];
    nbi_weight *w[LINKS];
    gpu_buffer y[LINKS], x = gpu_poisoned(b, bytes);
    nb_error err;
    for (size_t i = 0; i < LINKS; i++) {
        mat_make(&m[i], chain[i], ROWS, COLS, true);
        assert_int_equal(b->ops->weight_prepare(b, &w[i], &m[i].m, &err), NB_OK);
        y[i] = gpu_poisoned(b, bytes);
    }
    float *host = op_floats((size_t)n * COLS);
    for (uint32_t round = 0; round < 2; round++) {
        op_fill(host, (size_t)n * COLS, 1);
        b->ops->upload(b, x.p, host, bytes);
        for (size_t i = 0; i < LINKS; i++) /* the last but one of the second round changes x */
            b->ops->linear(b, &(nbi_linear_args){.y = round && i + 2 == LINKS ? x.p : y[i].p,
                                                 .x = x.p,
                                                 .w = w[i],
                                                 .n_rows = n,
                                                 .x_stride = COLS,
                                                 .y_stride = ROWS,
                                                 .y_f32 = true});
        for (size_t i = 0; i < LINKS; i++) {
            const bool over = round && i + 2 == LINKS;
            float *got = gpu_read(over ? &x : &y[i]);
            check_product(&m[i].m, got, ROWS, host, COLS, n, NULL, bound_of(chain[i], false),
                          false);
            if (over) memcpy(host, got, bytes);
            free(got);
        }
    }
    for (size_t i = 0; i < LINKS; i++) gpu_free(&y[i]);
    gpu_free(&x);
    op_free(host);
    for (size_t i = 0; i < LINKS; i++) {
        b->ops->weight_release(b, &w[i]);
        mat_free(&m[i]);
    }
    gpu_close(b);
}

static void test_same_x(void **state)
{
    (void)state;
    check_same_x(90);
    check_same_x(33);
}

/* ---------------------------------------------------------------- not finite */

/* What is not finite in a row of x is seen in the row of y, and in no other. */
static void test_not_finite(void **state)
{
    (void)state;
    static const float bad[] = {INFINITY, -INFINITY, NAN, 1e37f};
    enum { ROWS = 20, COLS = 272 };
    nbi_backend *b = open_for(COLS, ROWS, 20);
    for (size_t k = 0; k < N_KINDS; k++) {
        mat w;
        mat_make(&w, kinds[k], ROWS, COLS, false);
        for (size_t i = 0; i < 4; i++)
            for (uint32_t n = 3; n <= 20; n += 17) {
                float *x = op_floats(n * COLS);
                op_fill(x, n * COLS, 1);
                x[COLS + 261] = bad[i];
                float *y = run(b, &w.m, x, COLS, 0, n, ROWS, NULL, false);
                for (uint32_t j = 0; j < n * ROWS; j++) {
                    const bool finite = isfinite(y[j]);
                    if (i == 3) /* large numbers are numbers like others */
                        assert_true(finite);
                    else if (j / ROWS != 1)
                        assert_true(finite);
                    else
                        assert_false(finite);
                }
                free(y);
                op_free(x);
            }
        mat_free(&w);
    }
    gpu_close(b);
}

/* A NaN weight or scale makes its own rows NaN and no other. */
static void test_nan_weight(void **state)
{
    (void)state;
    enum { ROWS = 48, COLS = 192 };
    nbi_backend *b = open_for(COLS, ROWS, 40);
    for (size_t k = 0; k < 3; k++) {
        mat w;
        mat_make(&w, kinds[k], ROWS, COLS, false);
        if (kinds[k] == NBI_WEIGHT_NVFP4)
            ((uint8_t *)w.scales)[20 * 12 + 5] = 0x7f;
        else
            ((uint8_t *)w.data)[20 * COLS + 77] = 0xff;
        for (uint32_t n = 1; n <= 40; n += 39) {
            float *x = op_floats(n * COLS);
            op_fill(x, n * COLS, 1);
            float *y = run(b, &w.m, x, COLS, 0, n, ROWS, NULL, false);
            for (uint32_t i = 0; i < n * ROWS; i++)
                assert_int_equal(isnan(y[i]) != 0, i % ROWS == 20);
            free(y);
            op_free(x);
        }
        mat_free(&w);
    }
    gpu_close(b);
}

/* ---------------------------------------------------------------- NVFP4 activations */

static void test_w4a4(void **state)
{
    (void)state;
    static const uint32_t cols[] = {16, 48, 128, 400};
    const nbi_limits limits = limits_for(400, 100, 40);
    nbi_backend *b = gpu_open_w4a4(&limits);
    for (uint32_t i = 0; i < 12; i++) {
        mat w;
        const uint32_t c = cols[op_below(4)], n = 1 + op_below(40), rows = 20 + op_below(80);
        mat_make(&w, NBI_WEIGHT_NVFP4, rows, c, true);
        w.m.input_scale = op_uniform(0.001f, 0.01f);
        float *x = op_floats((size_t)n * c), *rounded = op_floats((size_t)n * c);
        op_fill(x, (size_t)n * c, 1);
        for (uint32_t t = 0; t < n; t++)
            nbi_nvfp4_round_row(x + (size_t)t * c, c, w.m.input_scale, rounded + (size_t)t * c);
        float *y = run(b, &w.m, x, c, 0, n, rows, NULL, false);
        check_product(&w.m, y, rows, rounded, c, n, NULL, 1e-6, false);
        float *first = run(b, &w.m, x, c, 0, 1, rows, NULL, false);
        same_bits(first, y, rows, label(&w.m, n, false));
        free(first);
        free(y);
        /* Exact activations are never rounded. */
        y = run(b, &w.m, x, c, 0, n, rows, NULL, true);
        check_product(&w.m, y, rows, x, c, n, NULL, 2e-6, true);
        free(y);
        op_free(x);
        op_free(rounded);
        mat_free(&w);
    }
    gpu_close(b);
}

/* ---------------------------------------------------------------- norm and products */

enum { NORM_MATS = 3 };

/* A norm with its addition, then products of what it makes; y_on_delta: one of them overwrites what
 * the norm added. */
typedef struct norm_call {
    nbi_weight *w[NORM_MATS];
    const float *x, *delta, *weight;
    uint32_t T, width;
    bool with_delta, y_on_delta;
} norm_call;

typedef struct norm_result {
    float *y[NORM_MATS], *out, *sum, *delta;
    int32_t *fault;
} norm_result;

/* apart: every operator is done before the next is asked for. */
static norm_result run_norm(nbi_backend *b, const norm_call *k, bool apart)
{
    const size_t n = (size_t)k->T * k->width;
    const int32_t none[8] = {0};
    norm_result r;
    gpu_buffer x = gpu_floats(b, k->x, n), delta = gpu_floats(b, k->delta, n);
    gpu_buffer weight = gpu_floats(b, k->weight, k->width), y[NORM_MATS];
    gpu_buffer out = gpu_poisoned(b, n * sizeof(float)), sum = gpu_poisoned(b, n * sizeof(float));
    gpu_buffer fault = gpu_bytes(b, none, k->T * sizeof *none);
    for (int i = 0; i < NORM_MATS; i++)
        y[i] = gpu_poisoned(b, (size_t)k->T * k->w[i]->host.rows * sizeof(float));
    b->ops->rmsnorm(b, &(nbi_rmsnorm_args){.out = out.p,
                                           .x = x.p,
                                           .x_out = sum.p,
                                           .delta = k->with_delta ? delta.p : NULL,
                                           .weight = weight.p,
                                           .eps = 1e-5f,
                                           .n_rows = k->T,
                                           .width = k->width,
                                           .x_stride = k->width,
                                           .out_stride = k->width,
                                           .row_fault = fault.p,
                                           .layer = 2,
                                           .where = NBI_WHERE_POST_NORM});
    for (int i = 0; i < NORM_MATS; i++) {
        if (apart) gpu_sync(b);
        b->ops->linear(b, &(nbi_linear_args){.y = i == 1 && k->y_on_delta ? delta.p : y[i].p,
                                             .x = out.p,
                                             .w = k->w[i],
                                             .n_rows = k->T,
                                             .x_stride = k->width,
                                             .y_stride = k->w[i]->host.rows,
                                             .y_f32 = true});
    }
    for (int i = 0; i < NORM_MATS; i++) r.y[i] = gpu_read(&y[i]);
    float *same = gpu_read(&x);
    assert_memory_equal(same, k->x, n * sizeof *same);
    free(same);
    r.out = gpu_read(&out);
    r.sum = gpu_read(&sum);
    r.delta = gpu_read(&delta);
    r.fault = gpu_read(&fault);
    for (int i = 0; i < NORM_MATS; i++) gpu_free(&y[i]);
    gpu_free(&x);
    gpu_free(&delta);
    gpu_free(&weight);
    gpu_free(&out);
    gpu_free(&sum);
    gpu_free(&fault);
    return r;
}

static void check_norm(nbi_backend *b, nbi_weight_kind kind, uint32_t T, uint32_t width, int form)
{
    const size_t n = (size_t)T * width;
    float *x = op_floats(n), *delta = op_floats(n), *weight = op_floats(width);
    op_fill(x, n, 3);
    op_fill(delta, n, 3);
    op_fill(weight, width, 1);
    if (T > 1) delta[width + width / 2] = NAN;
    norm_call k = {.x = x, .delta = delta, .weight = weight, .T = T, .width = width};
    k.with_delta = form != 0;
    k.y_on_delta = form == 2;
    mat m[NORM_MATS];
    for (int i = 0; i < NORM_MATS; i++) {
        nb_error err;
        mat_make(&m[i], kind, 40 - 12 * (uint32_t)i, width, false);
        if (b->ops->weight_prepare(b, &k.w[i], &m[i].m, &err) != NB_OK) fail_msg("%s", err.text);
    }
    norm_result want = run_norm(b, &k, true), got = run_norm(b, &k, false);
    for (int i = 0; i < NORM_MATS; i++)
        assert_memory_equal(got.y[i], want.y[i], (size_t)T * m[i].m.rows * sizeof(float));
    assert_memory_equal(got.out, want.out, n * sizeof *x);
    assert_memory_equal(got.sum, want.sum, n * sizeof *x);
    assert_memory_equal(got.delta, want.delta, n * sizeof *x);
    for (uint32_t t = 0; t < T; t++) {
        const int code = 1 + 2 * NBI_WHERE_COUNT + NBI_WHERE_POST_NORM;
        assert_int_equal(want.fault[t], k.with_delta && t == 1 ? code : 0);
        assert_int_equal(got.fault[t], want.fault[t]);
        for (uint32_t c = 0; c < width; c++) {
            const size_t i = (size_t)t * width + c;
            if (!k.with_delta || (t == 1 && c == width / 2))
                assert_true(isnan(got.sum[i])); /* not written, or NaN */
            else
                assert_true(got.sum[i] == x[i] + delta[i]);
        }
    }
    for (int i = 0; i < NORM_MATS; i++) {
        b->ops->weight_release(b, &k.w[i]);
        free(got.y[i]);
        free(want.y[i]);
        mat_free(&m[i]);
    }
    norm_result *both[] = {&got, &want};
    for (int i = 0; i < 2; i++) {
        free(both[i]->out);
        free(both[i]->sum);
        free(both[i]->delta);
        free(both[i]->fault);
    }
    op_free(x);
    op_free(delta);
    op_free(weight);
}

/* A norm in the launch of its products: the same bits as one after the other, in all that is left
 * in memory; also where it cannot be. */
static void test_norm_bits(void **state)
{
    (void)state;
    static const uint32_t tokens[] = {1, 2, 5, 8};
    static const uint32_t widths[] = {48, 256, 784, 2064};
    nbi_backend *b = open_for(8192, 64, 8);
    for (size_t k = 0; k < N_KINDS; k++)
        for (int i = 0; i < 4; i++)
            check_norm(b, kinds[k], tokens[(i + (int)k) % 4], widths[i], (i + (int)k / 2) % 3);
    check_norm(b, NBI_WEIGHT_NVFP4, 1, 6144, 1);
    check_norm(b, NBI_WEIGHT_BF16, 1, 8192, 1);
    check_norm(b, NBI_WEIGHT_FP8_BLOCK, 1, 5120, 1);
    check_norm(b, NBI_WEIGHT_BF16, 3, 1030, 1);
    gpu_close(b);
}

/* ---------------------------------------------------------------- MLP */

typedef struct mlp_result {
    float *x, *y;
} mlp_result;

/* silu(gate) * up in place, its product, and the addition of that to x. apart: one after the other,
 * all of it left in memory. y_on_up: the product overwrites what was multiplied. */
static mlp_result run_mlp(nbi_backend *b, nbi_weight *w, const float *gate, const float *up,
                          const float *x, uint32_t n, bool apart, bool y_on_up)
{
    const uint32_t rows = w->host.rows, cols = w->host.cols;
    gpu_buffer g = gpu_floats(b, gate, (size_t)n * cols), u = gpu_floats(b, up, (size_t)n * cols);
    gpu_buffer sum = gpu_floats(b, x, (size_t)n * rows);
    gpu_buffer y = gpu_poisoned(b, (size_t)n * rows * sizeof(float));
    void *product = y_on_up ? u.p : y.p;
    b->ops->swiglu(b, &(nbi_swiglu_args){.out = g.p,
                                         .gate = g.p,
                                         .up = u.p,
                                         .n_rows = n,
                                         .width = cols,
                                         .in_stride = cols,
                                         .out_stride = cols,
                                         .once = !apart});
    b->ops->linear(b, &(nbi_linear_args){.y = product,
                                         .x = g.p,
                                         .w = w,
                                         .n_rows = n,
                                         .x_stride = cols,
                                         .y_stride = rows,
                                         .y_f32 = true});
    b->ops->add(b,
                &(nbi_add_args){.x = sum.p, .y = product, .n = (size_t)n * rows, .once = !apart});
    const mlp_result r = {gpu_read(&sum), gpu_read(&y)};
    gpu_free(&g);
    gpu_free(&u);
    gpu_free(&sum);
    gpu_free(&y);
    return r;
}

static void check_mlp(nbi_backend *b, nbi_weight_kind kind, uint32_t rows, uint32_t cols,
                      uint32_t n, bool y_on_up)
{
    nb_error err;
    nbi_weight *w = NULL;
    mat m;
    mat_make(&m, kind, rows, cols, false);
    if (b->ops->weight_prepare(b, &w, &m.m, &err) != NB_OK) fail_msg("%s", err.text);
    float *gate = op_floats((size_t)n * cols), *up = op_floats((size_t)n * cols);
    float *x = op_floats((size_t)n * rows);
    op_fill(gate, (size_t)n * cols, 2);
    op_fill(up, (size_t)n * cols, 2);
    op_fill(x, (size_t)n * rows, 2);
    mlp_result want = run_mlp(b, w, gate, up, x, n, true, false);
    mlp_result got = run_mlp(b, w, gate, up, x, n, false, y_on_up);
    assert_memory_equal(got.x, want.x, (size_t)n * rows * sizeof *x);
    for (size_t i = 0; i < (size_t)n * rows; i++) assert_true(want.x[i] == x[i] + want.y[i]);
    free(got.x);
    free(got.y);
    free(want.x);
    free(want.y);
    b->ops->weight_release(b, &w);
    mat_free(&m);
    op_free(gate);
    op_free(up);
    op_free(x);
}

/* Activation and addition in the launch of the product between them. */
static void test_mlp_bits(void **state)
{
    (void)state;
    static const uint32_t cols[] = {48, 256, 784, 1552};
    nbi_backend *b = open_for(1600, 64, 20);
    for (size_t k = 0; k < N_KINDS; k++)
        for (uint32_t i = 0; i < 4; i++)
            check_mlp(b, kinds[k], 30 + i, cols[i], 1 + 3 * ((i + (uint32_t)k) % 4), false);
    check_mlp(b, NBI_WEIGHT_BF16, 48, 256, 1, true);
    check_mlp(b, NBI_WEIGHT_NVFP4, 256, 256, 1, true);
    check_mlp(b, NBI_WEIGHT_BF16, 40, 258, 2, false);
    check_mlp(b, NBI_WEIGHT_BF16, 40, 256, 17, false);
    gpu_close(b);
}

/* ---------------------------------------------------------------- speed */

#if NBI_CUDA_EMULATED
#define BENCH_CALLS  2u
#define BENCH_TOKENS 24u
#define BENCH_MEMORY ((size_t)1 << 16)
#define BENCH_COLD   ((size_t)1 << 12)
#else
#define BENCH_CALLS  200u
#define BENCH_TOKENS 8192u
#define BENCH_MEMORY ((size_t)4 << 30)
#define BENCH_COLD   ((size_t)160 << 20) /* more than any L2 */
#endif

/* Calls of one step: call i uses weight i % n_w. */
typedef struct bench {
    nbi_backend *b;
    nbi_weight *w[256];
    uint32_t n_w, calls, pass;
    nbi_linear_args a;
    nbi_batch host;
} bench;

/* As a model makes it: recorded the second time, replayed from then on. */
static void bench_step(void *arg)
{
    bench *k = arg;
    const nbi_batch *device = NULL;
    nb_error err = {0};
    if (k->b->ops->step_begin(k->b, &k->host, k->pass, &device)) {
        for (uint32_t i = 0; i < k->calls; i++) {
            k->a.w = k->w[i % k->n_w];
            k->b->ops->linear(k->b, &k->a);
        }
    }
    if (k->b->ops->step_end(k->b, &err) != NB_OK) fail_msg("%s", err.text);
    gpu_sync(k->b);
}

/* The same random weight as often as it takes to be cold. The host's copy repeats 1,024 rows. */
static void bench_weights(bench *k, nbi_weight_kind kind, uint32_t rows, uint32_t cols)
{
    const uint32_t own = rows < 1024 ? rows : 1024;
    mat one;
    mat_make(&one, kind, own, cols, false);
    nbi_matrix m = one.m;
    const size_t part = (size_t)own * nbi_matrix_row_bytes(&m);
    const size_t scales = kind == NBI_WEIGHT_NVFP4       ? (size_t)own * (cols / 16)
                          : kind == NBI_WEIGHT_FP8_BLOCK ? (size_t)own / 128 * (cols / 128) * 4
                                                         : 0;
    const size_t n = (rows + own - 1) / own;
    char *data = malloc(n * (part + scales));
    assert_non_null(data);
    for (size_t i = 0; i < n; i++) {
        memcpy(data + i * part, one.m.data, part);
        if (scales) memcpy(data + n * part + i * scales, one.m.scales, scales);
    }
    m.rows = rows;
    m.data = data;
    m.scales = scales ? data + n * part : NULL;
    const size_t copies = BENCH_COLD / nbi_matrix_bytes(&m) + 1;
    k->n_w = copies > 256 ? 256 : copies < 2 ? 2 : (uint32_t)copies;
    for (uint32_t i = 0; i < k->n_w; i++) {
        nb_error err;
        if (k->b->ops->weight_prepare(k->b, &k->w[i], &m, &err) != NB_OK) fail_msg("%s", err.text);
    }
    gpu_sync(k->b);
    free(data);
    mat_free(&one);
}

static void bench_tokens(bench *k, uint32_t n, bool exact, double bandwidth)
{
    const nbi_matrix *m = &k->w[0]->host;
    const size_t n_x = (size_t)n * m->cols;
    float *values = malloc(n_x * sizeof *values);
    for (size_t i = 0; i < n_x; i++) values[i] = op_uniform(-1, 1);
    gpu_buffer x = gpu_floats(k->b, values, n_x);
    gpu_buffer y = gpu_poisoned(k->b, (size_t)n * m->rows * sizeof(float));
    k->calls = n > 256 ? BENCH_CALLS / 10 + 1 : BENCH_CALLS;
    k->pass++;
    k->a = (nbi_linear_args){.y = y.p,
                             .x = x.p,
                             .n_rows = n,
                             .x_stride = m->cols,
                             .y_stride = m->rows,
                             .y_f32 = true,
                             .x_exact = exact};
    op_batch steps;
    op_batch_make(&steps, &n, &n, 1);
    k->host = steps.b;
    for (int i = 0; i < 3; i++) bench_step(k);
    const double s = op_time(bench_step, k, 9) / k->calls;
    const double bytes = (double)nbi_matrix_bytes(m);
    print_message("%-10s %6u x %-5u T=%-5u%s %9.2f us  %7.0f GB/s  %5.1f %% of read  "
                  "%7.2f TFLOP/s\n",
                  nbi_weight_kind_name(m->kind), m->rows, m->cols, n, exact ? " exact" : "",
                  1e6 * s, 1e-9 * bytes / s, 100 * bytes / s / bandwidth,
                  2e-12 * n * (double)m->rows * m->cols / s);
    op_batch_free(&steps);
    gpu_free(&x);
    gpu_free(&y);
    free(values);
}

static void run_bench(void)
{
    static const struct {
        nbi_weight_kind kind;
        uint32_t rows, cols;
        bool exact;
        uint32_t most; /* tokens */
    } cases[] = {
#if NBI_CUDA_EMULATED
        {NBI_WEIGHT_NVFP4, 64, 128, false, BENCH_TOKENS},
        {NBI_WEIGHT_BF16, 64, 128, true, BENCH_TOKENS},
#else
        {NBI_WEIGHT_NVFP4, 2048, 2048, false, BENCH_TOKENS},
        {NBI_WEIGHT_NVFP4, 1536, 2048, false, BENCH_TOKENS},
        {NBI_WEIGHT_NVFP4, 2048, 768, false, BENCH_TOKENS},
        {NBI_WEIGHT_NVFP4, 2048, 4096, false, BENCH_TOKENS},
        {NBI_WEIGHT_NVFP4, 16384, 6144, false, 64},
        {NBI_WEIGHT_BF16, 2048, 2048, false, BENCH_TOKENS},
        {NBI_WEIGHT_BF16, 6144, 2048, false, BENCH_TOKENS},
        {NBI_WEIGHT_BF16, 151936, 2048, false, 64},
        {NBI_WEIGHT_FP8_TENSOR, 6144, 2048, false, 512},
        {NBI_WEIGHT_FP8_BLOCK, 6144, 2048, false, 512},
        {NBI_WEIGHT_BF16, 128, 2048, true, BENCH_TOKENS},
#endif
    };
    static const uint32_t tokens[] = {1, 4, 8, 16, 24, 64, 512, 8192};
    nbi_limits limits = limits_for(6144, 151936, BENCH_TOKENS);
    limits.max_context = BENCH_TOKENS;
    nbi_backend *b = gpu_open_graphs(&limits, false);
    const double bandwidth = gpu_bandwidth(b, BENCH_MEMORY);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bench k = {.b = b, .pass = (uint32_t)i * 100};
        bench_weights(&k, cases[i].kind, cases[i].rows, cases[i].cols);
        for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
            if (tokens[t] <= cases[i].most) bench_tokens(&k, tokens[t], cases[i].exact, bandwidth);
        for (uint32_t w = 0; w < k.n_w; w++) b->ops->weight_release(b, &k.w[w]);
    }
    gpu_close(b);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) {
        run_bench();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),       cmocka_unit_test(test_large),
        cmocka_unit_test(test_exact_values), cmocka_unit_test(test_bits),
        cmocka_unit_test(test_not_finite),   cmocka_unit_test(test_nan_weight),
        cmocka_unit_test(test_w4a4),         cmocka_unit_test(test_norm_bits),
        cmocka_unit_test(test_mlp_bits),     cmocka_unit_test(test_same_x),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
