/* Operators that touch every value once, on the CUDA backend against float64. */
#include "cuda/gpu_util.h"

static const nbi_limits limits = {.max_rows = 64,
                                  .max_seqs = 8,
                                  .max_context = 1024,
                                  .max_logit_rows = 8,
                                  .n_heads = 1,
                                  .n_kv_heads = 1,
                                  .head_dim = 64,
                                  .max_linear_cols = 4096,
                                  .max_linear_rows = 4096,
                                  .vocab = 1000};

static void check_swiglu(nbi_backend *b, uint32_t T, uint32_t width, uint32_t in, uint32_t out)
{
    float *gate = op_floats((size_t)T * in), *up = op_floats((size_t)T * in);
    op_fill(gate, (size_t)T * in, 3);
    op_fill(up, (size_t)T * in, 1);
    gpu_buffer g = gpu_floats(b, gate, (size_t)T * in), u = gpu_floats(b, up, (size_t)T * in);
    gpu_buffer y = gpu_poisoned(b, (size_t)T * out * sizeof(float));
    b->ops->swiglu(b, &(nbi_swiglu_args){.out = y.p,
                                         .gate = g.p,
                                         .up = u.p,
                                         .n_rows = T,
                                         .width = width,
                                         .in_stride = in,
                                         .out_stride = out});
    float *got = gpu_read(&y);
    for (uint32_t t = 0; t < T; t++) {
        for (uint32_t i = 0; i < width; i++) {
            const double x = (double)gate[(size_t)t * in + i];
            const double want = x / (1 + exp(-x)) * (double)up[(size_t)t * in + i];
            assert_true(fabs((double)got[(size_t)t * out + i] - want) <= 1e-6 * (fabs(want) + 1));
        }
        for (uint32_t i = width; i < out; i++) assert_true(isnan(got[(size_t)t * out + i]));
    }
    free(got);
    gpu_free(&g);
    gpu_free(&u);
    gpu_free(&y);
    op_free(gate);
    op_free(up);
}

static void test_swiglu(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&limits);
    check_swiglu(b, 1, 1, 1, 1);
    check_swiglu(b, 3, 255, 257, 256);
    check_swiglu(b, 5, 768, 768, 768);
    check_swiglu(b, 64, 33, 40, 35);
    gpu_close(b);
}

/* ---------------------------------------------------------------- embed */

/* Rows of a table with one NaN where its kind has any, and where a step's fault is already known.
 */
static void check_embed(nbi_backend *b, nbi_weight_kind kind, uint32_t cols)
{
    enum { V = 50, T = 9 };
    static const int32_t ids[T] = {0, 49, 7, 3, 3, 7, 1, 2, 48};
    const uint32_t ones[T] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    const bool nan = kind == NBI_WEIGHT_BF16;
    nbi_weight *table = NULL;
    nb_error err;
    mat w;
    mat_make(&w, kind, V, cols, true);
    if (nan) memset((char *)w.m.data + (7 * (size_t)cols + 3) * 2, 0xff, 2);
    if (b->ops->weight_prepare(b, &table, &w.m, &err) != NB_OK) fail_msg("%s", err.text);
    op_batch batch;
    op_batch_make(&batch, ones, ones, T);
    memcpy(batch.ids, ids, sizeof ids);
    batch.fault[5] = 77;
    gpu_buffer out = gpu_poisoned(b, T * (size_t)cols * sizeof(float));
    const nbi_batch *device = gpu_step(b, &batch.b);
    b->ops->embed(b, &(nbi_embed_args){.out = out.p, .table = table, .batch = device});
    gpu_step_end(b);
    float *got = gpu_read(&out);
    for (uint32_t t = 0; t < T; t++) {
        for (uint32_t c = 0; c < cols; c++) {
            const double want = mat_at(&w.m, (uint32_t)ids[t], c);
            const double x = (double)got[t * (size_t)cols + c];
            if (isnan(want) ? !isnan(x) : !(fabs(x - want) <= 2e-7 * fabs(want)))
                fail_msg("%s: row %d column %u is %g, expected %g", nbi_weight_kind_name(kind),
                         ids[t], c, x, want);
        }
        assert_int_equal(batch.fault[t], t == 5               ? 77
                                         : nan && ids[t] == 7 ? 1 + NBI_WHERE_EMBED
                                                              : 0);
    }
    free(got);
    gpu_free(&out);
    op_batch_free(&batch);
    b->ops->weight_release(b, &table);
    mat_free(&w);
}

static void test_embed(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&limits);
    for (nbi_weight_kind kind = NBI_WEIGHT_F32; kind < NBI_WEIGHT_KIND_COUNT; kind++) {
        check_embed(b, kind, 48);
        check_embed(b, kind, kind == NBI_WEIGHT_NVFP4 ? 1040 : 1027);
    }
    gpu_close(b);
}

/* ---------------------------------------------------------------- ranks */

/* Ids of another rank give zeros and no fault; its experts become -1; zeros where they were asked.
 */
static void test_ranks(void **state)
{
    (void)state;
    enum { V = 32, FIRST = 16, H = 80, T = 6, N = 700 };
    static const int32_t ids[T] = {0, 15, 16, 47, 48, 100};
    const uint32_t ones[T] = {1, 1, 1, 1, 1, 1};
    nbi_backend *b = gpu_open(&limits);
    nbi_weight *table = NULL;
    mat w;
    mat_make(&w, NBI_WEIGHT_BF16, V, H, true);
    assert_int_equal(b->ops->weight_prepare(b, &table, &w.m, NULL), NB_OK);
    op_batch batch;
    op_batch_make(&batch, ones, ones, T);
    memcpy(batch.ids, ids, sizeof ids);
    gpu_buffer out = gpu_poisoned(b, T * H * sizeof(float));
    const nbi_batch *device = gpu_step(b, &batch.b);
    b->ops->embed(
        b, &(nbi_embed_args){
               .out = out.p, .table = table, .first = FIRST, .part_of = true, .batch = device});
    gpu_step_end(b);
    float *got = gpu_read(&out);
    for (uint32_t t = 0; t < T; t++) {
        const bool mine = ids[t] >= FIRST && ids[t] < FIRST + V;
        for (uint32_t c = 0; c < H; c++)
            assert_true((double)got[t * H + c] ==
                        (mine ? mat_at(&w.m, (uint32_t)(ids[t] - FIRST), c) : 0));
        assert_int_equal(batch.fault[t], 0);
    }
    free(got);
    b->ops->clear(b, &(nbi_clear_args){.p = out.p, .bytes = 2 * H * sizeof(float)});
    got = gpu_read(&out);
    for (uint32_t i = 0; i < 2 * H; i++) assert_true(got[i] == 0);
    assert_true((double)got[2 * H] == mat_at(&w.m, 0, 0));
    free(got);
    int32_t experts[N];
    for (int32_t i = 0; i < N; i++) experts[i] = i % 13 - 1;
    gpu_buffer e = gpu_bytes(b, experts, sizeof experts);
    b->ops->own_experts(b, &(nbi_own_experts_args){.ids = e.p, .n = N, .first = 4, .n_own = 5});
    int32_t *own = gpu_read(&e);
    for (int32_t i = 0; i < N; i++)
        assert_int_equal(own[i], experts[i] >= 4 && experts[i] < 9 ? experts[i] - 4 : -1);
    free(own);
    gpu_free(&e);
    gpu_free(&out);
    op_batch_free(&batch);
    b->ops->weight_release(b, &table);
    mat_free(&w);
    gpu_close(b);
}

/* ---------------------------------------------------------------- rope */

static void test_rope_table(void **state)
{
    (void)state;
    enum { T = 7, DIM = 68, HALF = DIM / 2 };
    static const int32_t pos[T] = {0, 1, 2, 199, 131071, 202751, 1048575};
    const uint32_t lengths[T] = {1, 1, 1, 1, 1, 1, 1};
    float inv[HALF];
    for (int i = 0; i < HALF; i++) inv[i] = (float)pow(8e6, -2.0 * i / DIM);
    op_batch batch;
    op_batch_make(&batch, lengths, lengths, T);
    memcpy(batch.pos, pos, sizeof pos);
    nbi_backend *b = gpu_open(&limits);
    const nbi_batch *device = gpu_step(b, &batch.b);
    gpu_buffer c = gpu_poisoned(b, T * HALF * sizeof(float));
    gpu_buffer s = gpu_poisoned(b, T * HALF * sizeof(float));
    b->ops->rope_table(
        b,
        &(nbi_rope_table_args){
            .cos = c.p, .sin = s.p, .inv_freq = inv, .dim = DIM, .factor = 1.25f, .batch = device});
    gpu_step_end(b);
    float *cs = gpu_read(&c), *sn = gpu_read(&s);
    for (int t = 0; t < T; t++)
        for (int i = 0; i < HALF; i++) {
            const double angle = (double)pos[t] * (double)inv[i];
            assert_true(fabs((double)cs[t * HALF + i] - cos(angle) * 1.25) <= 1.6e-7);
            assert_true(fabs((double)sn[t * HALF + i] - sin(angle) * 1.25) <= 1.6e-7);
        }
    free(cs);
    free(sn);
    gpu_free(&c);
    gpu_free(&s);
    gpu_close(b);
    op_batch_free(&batch);
}

/* ---------------------------------------------------------------- RMSNorm */

/* What is passed and what is expected of one RMSNorm. */
typedef struct norm_case {
    uint32_t T, width, x_stride, out_stride, shift; /* floats in front of the first row */
    bool delta, in_place;
} norm_case;

static float *run_norm(nbi_backend *b, const norm_case *c, const float *x, const float *delta,
                       const float *w, float **x_after)
{
    const size_t nx = c->shift + (size_t)c->T * c->x_stride;
    gpu_buffer gx = gpu_floats(b, x, nx), gd = gpu_floats(b, delta, (size_t)c->T * c->width);
    gpu_buffer gw = gpu_floats(b, w, c->width);
    gpu_buffer out = gpu_poisoned(b, (size_t)c->T * c->out_stride * sizeof(float));
    float *const first = (float *)gx.p + c->shift;
    b->ops->rmsnorm(b,
                    &(nbi_rmsnorm_args){.out = c->in_place ? first : out.p,
                                        .x = first,
                                        .delta = c->delta ? gd.p : NULL,
                                        .weight = gw.p,
                                        .eps = 1e-5f,
                                        .n_rows = c->T,
                                        .width = c->width,
                                        .x_stride = c->x_stride,
                                        .out_stride = c->in_place ? c->x_stride : c->out_stride});
    float *got = gpu_read(&out);
    *x_after = gpu_read(&gx);
    gpu_free(&gx);
    gpu_free(&gd);
    gpu_free(&gw);
    gpu_free(&out);
    return got;
}

static void check_norm_row(const norm_case *c, const float *x, const float *delta, const float *w,
                           const float *got, const float *x_after)
{
    double *sum = malloc(c->width * sizeof *sum), *want = malloc(c->width * sizeof *want);
    double squares = 0;
    for (uint32_t i = 0; i < c->width; i++) {
        sum[i] = c->delta ? (double)(x[i] + delta[i]) : (double)x[i];
        squares += sum[i] * sum[i];
        if (!c->in_place) assert_true(x_after[i] == (float)sum[i]);
    }
    for (uint32_t i = 0; i < c->width; i++)
        want[i] = sum[i] / sqrt(squares / c->width + (double)1e-5f) * (double)w[i];
    OP_ASSERT_ERROR(op_error(c->in_place ? x_after : got, want, c->width), 5e-7,
                    "rmsnorm of %u, stride %u", c->width, c->x_stride);
    for (uint32_t i = c->width; i < c->x_stride; i++) assert_true(x_after[i] == x[i]);
    for (uint32_t i = c->width; !c->in_place && i < c->out_stride; i++) assert_true(isnan(got[i]));
    free(sum);
    free(want);
}

static void check_norm(nbi_backend *b, const norm_case *c)
{
    const size_t nx = c->shift + (size_t)c->T * c->x_stride, nd = (size_t)c->T * c->width;
    float *x = op_floats(nx), *delta = op_floats(nd), *w = op_floats(c->width);
    float *x_after, *one_after;
    op_fill(x, nx, 0.01f);
    op_fill(delta, nd, 0.01f);
    op_fill(w, c->width, 1);
    float *got = run_norm(b, c, x, delta, w, &x_after);
    for (uint32_t t = 0; t < c->T; t++)
        check_norm_row(c, x + c->shift + (size_t)t * c->x_stride, delta + (size_t)t * c->width, w,
                       got + (size_t)t * c->out_stride,
                       x_after + c->shift + (size_t)t * c->x_stride);
    /* the last row alone, where its loads are of another kind, has the same bits */
    norm_case one = *c;
    one.T = 1;
    one.in_place = false;
    one.shift = 1 - c->shift % 2;
    one.out_stride = one.x_stride = c->width + 5;
    float *row = op_floats(one.shift + one.x_stride);
    memcpy(row + one.shift, x + c->shift + (size_t)(c->T - 1) * c->x_stride,
           c->width * sizeof *row);
    float *alone = run_norm(b, &one, row, delta + (size_t)(c->T - 1) * c->width, w, &one_after);
    const float *in_batch = c->in_place ? x_after + c->shift + (size_t)(c->T - 1) * c->x_stride
                                        : got + (size_t)(c->T - 1) * c->out_stride;
    assert_memory_equal(alone, in_batch, c->width * sizeof *alone);
    free(got);
    free(alone);
    free(x_after);
    free(one_after);
    op_free(x);
    op_free(delta);
    op_free(w);
    op_free(row);
}

static void test_rmsnorm(void **state)
{
    (void)state;
    static const norm_case cases[] = {
        {1, 1, 1, 1, 0, false, false},
        {3, 64, 64, 64, 0, true, false},
        {2, 127, 131, 129, 1, true, false},
        {4, 512, 576, 512, 0, false, true},
        {2, 1000, 1001, 1000, 0, true, true},
        {3, 6144, 6144, 6144, 0, true, false},
        {1, 8193, 8193, 8200, 0, true, false},
        {2, 16384, 16384, 16384, 0, true, false},
        {1, 20001, 20004, 20004, 0, true, false},
    };
    nbi_backend *b = gpu_open(&limits);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_norm(b, &cases[i]);
    gpu_close(b);
}

static void test_rmsnorm_guard(void **state)
{
    (void)state;
    enum { T = 5, D = 40 };
    const int code = 1 + 3 * NBI_WHERE_COUNT + NBI_WHERE_POST_NORM;
    const int32_t before[T] = {0, 0, 0, 5, 0}, want[T] = {0, code, code, 5, 0};
    float x[T * D], w[D], same[D];
    op_fill(x, T * D, 1);
    op_fill(w, D, 1);
    memcpy(x + 4 * D, x, sizeof same);
    x[1 * D + 39] = NAN;
    x[2 * D + 1] = INFINITY;
    x[3 * D + 2] = NAN;
    nbi_backend *b = gpu_open(&limits);
    gpu_buffer gx = gpu_floats(b, x, T * D), gw = gpu_floats(b, w, D);
    gpu_buffer fault = gpu_bytes(b, before, sizeof before);
    gpu_buffer out = gpu_poisoned(b, T * D * sizeof(float));
    nbi_rmsnorm_args a = {.out = NULL,
                          .x = gx.p,
                          .weight = gw.p,
                          .eps = 1e-5f,
                          .n_rows = T,
                          .width = D,
                          .x_stride = D,
                          .out_stride = D,
                          .row_fault = fault.p,
                          .layer = 3,
                          .where = NBI_WHERE_POST_NORM};
    for (int k = 0; k < 2; k++) { /* without and with an output */
        b->ops->rmsnorm(b, &a);
        int32_t *got = gpu_read(&fault);
        assert_memory_equal(got, want, sizeof want);
        free(got);
        b->ops->upload(b, fault.p, before, sizeof before);
        a.out = out.p;
    }
    /* C63: the neighbours of broken rows keep their bits */
    float *got = gpu_read(&out);
    assert_memory_equal(got, got + 4 * D, sizeof same);
    assert_true(isfinite(got[0]) && isnan(got[D]));
    free(got);
    gpu_free(&gx);
    gpu_free(&gw);
    gpu_free(&fault);
    gpu_free(&out);
    gpu_close(b);
}

/* ---------------------------------------------------------------- gather, add */

static void check_gather(nbi_backend *b, uint32_t width)
{
    static const int32_t rows[] = {4, 0, 4};
    float *x = op_floats(5 * width);
    op_fill(x, 5 * width, 1);
    gpu_buffer gx = gpu_floats(b, x, 5 * width), gr = gpu_bytes(b, rows, sizeof rows);
    gpu_buffer out = gpu_poisoned(b, 3 * width * sizeof(float));
    b->ops->gather(
        b, &(nbi_gather_args){.out = out.p, .x = gx.p, .rows = gr.p, .n = 3, .width = width});
    float *got = gpu_read(&out);
    for (int i = 0; i < 3; i++)
        assert_memory_equal(got + i * width, x + (uint32_t)rows[i] * width, width * sizeof *got);
    free(got);
    gpu_free(&gx);
    gpu_free(&gr);
    gpu_free(&out);
    op_free(x);
}

static void check_add(nbi_backend *b, size_t n, size_t shift)
{
    float *x = op_floats(n + shift), *y = op_floats(n + shift);
    op_fill(x, n + shift, 1);
    op_fill(y, n + shift, 1);
    gpu_buffer gx = gpu_floats(b, x, n + shift), gy = gpu_floats(b, y, n + shift);
    b->ops->add(b, &(nbi_add_args){.x = (float *)gx.p + shift, .y = (float *)gy.p, .n = n});
    float *got = gpu_read(&gx);
    for (size_t i = 0; i < n; i++) assert_true(got[shift + i] == x[shift + i] + y[i]);
    for (size_t i = 0; i < shift; i++) assert_true(got[i] == x[i]);
    free(got);
    gpu_free(&gx);
    gpu_free(&gy);
    op_free(x);
    op_free(y);
}

static void test_gather_add(void **state)
{
    (void)state;
    static const uint32_t widths[] = {1, 37, 1024, 6144};
    static const size_t sizes[] = {0, 1, 1023, 1024, 1025, 100000};
    nbi_backend *b = gpu_open(&limits);
    for (size_t i = 0; i < 4; i++) check_gather(b, widths[i]);
    for (size_t i = 0; i < 6; i++)
        for (size_t shift = 0; shift < 2; shift++) check_add(b, sizes[i], shift);
    gpu_close(b);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_embed),         cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_rope_table),    cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_rmsnorm_guard), cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_gather_add),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
