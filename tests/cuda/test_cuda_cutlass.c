/* The MoE runner cutlass against the float64 oracle; its numerics are a class of their own, so the
 * bits of a row are compared over batches only. Emulated, a plain product stands in for CUTLASS:
 * rows, weights and sums around it are what is tested then. In builds without the runner there is
 * nothing to test. test_cuda_moe --bench times it. */
#include "cuda/gpu_util.h"
#include "moe_util.h"

#if NBI_WITH_CUTLASS
static const nbi_limits limits = {.max_rows = 320,
                                  .max_seqs = 8,
                                  .max_context = 1024,
                                  .max_logit_rows = 8,
                                  .n_heads = 1,
                                  .n_kv_heads = 1,
                                  .head_dim = 64,
                                  .max_linear_cols = 4096,
                                  .max_linear_rows = 4096,
                                  .vocab = 1000};

typedef struct prepared {
    nbi_backend *b;
    const nbi_moe_runner_ops *ops;
    nbi_moe_layer *layer;
    const moe_layer *l;
} prepared;

static prepared prepare(nbi_backend *b, const char *name, const moe_layer *l)
{
    prepared p = {.b = b, .l = l};
    nb_error err = {0};
    if (nbi_moe_runner_choose(&p.ops, name, b, &l->e.shape, &err) != NB_OK ||
        p.ops->prepare(b, &p.layer, &l->e, &err) != NB_OK)
        fail_msg("%s", err.text);
    return p;
}

static void release(prepared *p)
{
    p->ops->release(p->b, &p->layer);
    assert_null(p->layer);
}

/* out [n][hidden] (malloc). */
static float *run(const prepared *p, const float *x, const int32_t *ids, const float *weights,
                  uint32_t n)
{
    const nbi_moe_shape *s = &p->l->e.shape;
    gpu_buffer gx = gpu_floats(p->b, x, (size_t)n * s->hidden);
    gpu_buffer gi = gpu_bytes(p->b, ids, (size_t)n * s->top_k * sizeof *ids);
    gpu_buffer gw = gpu_floats(p->b, weights, (size_t)n * s->top_k);
    gpu_buffer ws = gpu_poisoned(p->b, p->ops->workspace_bytes(p->b, s, n));
    gpu_buffer out = gpu_poisoned(p->b, (size_t)n * s->hidden * sizeof(float));
    p->ops->run(
        p->b, p->layer,
        &(nbi_moe_args){
            .out = out.p, .x = gx.p, .ids = gi.p, .weights = gw.p, .n_rows = n, .workspace = ws.p});
    float *got = gpu_read(&out);
    gpu_free(&gx);
    gpu_free(&gi);
    gpu_free(&gw);
    gpu_free(&ws);
    gpu_free(&out);
    return got;
}

/* One batch of a layer. */
typedef struct batch {
    float *x, *weights;
    int32_t *ids;
    uint32_t n;
} batch;

static batch make_batch(const moe_layer *l, uint32_t n)
{
    const nbi_moe_shape *s = &l->e.shape;
    batch b = {.x = op_floats((size_t)n * s->hidden),
               .weights = op_floats((size_t)n * s->top_k),
               .ids = op_alloc((size_t)n * s->top_k * sizeof *b.ids),
               .n = n};
    op_fill(b.x, (size_t)n * s->hidden, 1);
    moe_routing(l, b.ids, b.weights, n);
    return b;
}

static void free_batch(batch *b)
{
    op_free(b->x);
    op_free(b->weights);
    op_free(b->ids);
}

static void check_oracle(const prepared *p, const batch *b, const float *out, double bound)
{
    const nbi_moe_shape *s = &p->l->e.shape;
    double *want = malloc(s->hidden * sizeof *want);
    for (uint32_t t = 0; t < b->n; t++) {
        moe_oracle_row(p->l, b->x + (size_t)t * s->hidden, b->ids + t * s->top_k,
                       b->weights + t * s->top_k, want);
        OP_ASSERT_ERROR(op_error(out + (size_t)t * s->hidden, want, s->hidden), bound,
                        "runner %s, %s/%s, [%u, %u], row %u of %u", p->ops->name,
                        nbi_weight_kind_name(s->kind_gate_up), nbi_weight_kind_name(s->kind_down),
                        s->inter, s->hidden, t, b->n);
    }
    free(want);
}

/* A class of its own: the oracle, and the bits of a row alone and among others, where there are
 * other tiles and more slices of experts. */
static void check_rows(nbi_backend *b, const moe_layer *l, uint32_t n, double bound)
{
    const uint32_t width = l->e.shape.hidden, top_k = l->e.shape.top_k;
    batch k = make_batch(l, n);
    for (uint32_t t = 0; t < n; t++) { /* one expert has most rows, one few */
        if (t % 7 == 1) k.ids[t * top_k] = -1;
        if (t % 3) k.ids[t * top_k + top_k - 1] = 1;
    }
    prepared p = prepare(b, "cutlass", l);
    assert_string_equal(p.ops->name, "cutlass");
    float *out = run(&p, k.x, k.ids, k.weights, n);
    check_oracle(&p, &k, out, bound);
    for (uint32_t t = 0; t < n; t += 1 + op_below(20)) {
        const uint32_t some = 1 + op_below(n - t < 4 ? n - t : 4);
        float *alone = run(&p, k.x + (size_t)t * width, k.ids + (size_t)t * top_k,
                           k.weights + (size_t)t * top_k, some);
        moe_same_bits(alone, out + (size_t)t * width, some * width, "cutlass, rows alone");
        free(alone);
    }
    free(out);
    release(&p);
    free_batch(&k);
}

static void test_oracle(void **state)
{
    (void)state;
    static const struct {
        nbi_weight_kind gate_up, down;
        uint32_t hidden, inter, experts, top_k;
        double bound;
    } cases[] = {
        {NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 320, 144, 8, 4, 1e-3},
        {NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 1040, 528, 4, 2, 1e-3},
        {NBI_WEIGHT_FP8_TENSOR, NBI_WEIGHT_FP8_TENSOR, 136, 72, 5, 2, 1e-3},
        {NBI_WEIGHT_BF16, NBI_WEIGHT_BF16, 136, 104, 5, 3, 8e-3},
        {NBI_WEIGHT_BF16, NBI_WEIGHT_FP8_TENSOR, 256, 256, 4, 2, 8e-3},
        {NBI_WEIGHT_F16, NBI_WEIGHT_NVFP4, 48, 80, 5, 2, 1e-3},
    };
    nbi_backend *b = gpu_open(&limits);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe_layer l;
        moe_make(&l, cases[i].gate_up, cases[i].down, cases[i].experts, cases[i].top_k,
                 cases[i].hidden, cases[i].inter, false);
        check_rows(b, &l, 23, cases[i].bound);
        if (i % 2 == 0) check_rows(b, &l, 150, cases[i].bound);
        moe_free(&l);
    }
    gpu_close(b);
    b = gpu_open_w4a4(&limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 5, 2, 544, 272, true);
    check_rows(b, &l, 40, 1e-2);
    moe_free(&l);
    gpu_close(b);
}

/* Rows of every size, values of a row far apart, no experts, and what is not finite. */
static void test_sizes(void **state)
{
    (void)state;
    enum { N = 6, K = 2, H = 64, I = 32 };
    static const float sizes[N] = {300, 0x1p-50f, 0, 1, 0x1p90f, 1};
    nbi_backend *b = gpu_open(&limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_FP8_TENSOR, 5, K, H, I, false);
    batch k = make_batch(&l, N);
    for (uint32_t i = 0; i < N * H; i++) k.x[i] *= sizes[i / H];
    for (uint32_t c = 1; c < H; c++) k.x[3 * H + c] *= c % 2 ? 0x1p-12f : 0x1p-24f;
    for (uint32_t t = 0; t < N; t++) k.ids[K * t] = t == 4 ? -1 : (int32_t)t % 2;
    for (uint32_t t = 0; t < N; t++) k.ids[K * t + 1] = t == 4 ? -1 : 2;
    prepared p = prepare(b, "cutlass", &l);
    float *want = run(&p, k.x, k.ids, k.weights, N);
    check_oracle(&p, &k, want, 1e-3);
    for (uint32_t c = 0; c < H; c++) assert_true(want[2 * H + c] == 0 && want[4 * H + c] == 0);
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        k.x[5 * H + 7] = bad[i];
        float *out = run(&p, k.x, k.ids, k.weights, N);
        moe_same_bits(out, want, 5 * H, "rows before");
        bool finite = true;
        for (int c = 0; c < H; c++) finite = finite && isfinite(out[5 * H + c]);
        assert_false(finite);
        free(out);
    }
    release(&p);
    uint8_t *scale = (uint8_t *)l.gate[0].scales;
    scale[5] = 0x7f;
    p = prepare(b, "cutlass", &l);
    float *out = run(&p, k.x, k.ids, k.weights, N);
    assert_true(isnan(out[0])); /* expert 0 */
    moe_same_bits(out + H, want + H, H, "other experts");
    free(out);
    free(want);
    release(&p);
    free_batch(&k);
    moe_free(&l);
    gpu_close(b);
}

/* What it does not take is done as in a build without it. */
static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        nbi_weight_kind kind;
        const char *why;
    } cases[] = {{NBI_WEIGHT_F32, "f32"}, {NBI_WEIGHT_FP8_BLOCK, "block"}};
    nbi_backend *b = gpu_open(&limits);
    const nbi_moe_runner_ops *ops = NULL;
    nb_error err = {0};
    nbi_moe_shape s = {.n_experts = 4, .top_k = 2, .hidden = 64, .inter = 32};
    s.kind_gate_up = s.kind_down = NBI_WEIGHT_NVFP4;
    assert_int_equal(nbi_moe_runner_choose(&ops, "cutlass", b, &s, &err), NB_OK);
    const nbi_moe_runner_ops *cutlass = ops;
    for (size_t i = 0; i < 2; i++) {
        char why[256] = "";
        s.kind_down = cases[i].kind;
        assert_false(cutlass->supports(b, &s, why, sizeof why));
        assert_non_null(strstr(why, cases[i].why));
        assert_int_equal(nbi_moe_runner_choose(&ops, "flashinfer_cutlass", b, &s, &err), NB_OK);
        assert_string_equal(ops->name, "cuda_grouped");
    }
    s = (nbi_moe_shape){.n_experts = 1024,
                        .top_k = 8,
                        .hidden = 8192,
                        .inter = 2048,
                        .kind_gate_up = NBI_WEIGHT_NVFP4,
                        .kind_down = NBI_WEIGHT_NVFP4};
    size_t before = 0;
    for (uint32_t rows = 1; rows <= 4096; rows++) {
        const size_t bytes = cutlass->workspace_bytes(b, &s, rows);
        assert_true(bytes >= before);
        before = bytes;
    }
    assert_int_equal(cutlass->workspace_bytes(b, &s, 8192), before); /* passes of at most 4096 */
    assert_true(before <= (size_t)2 << 30);
    gpu_close(b);
}
#endif

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) return 0;
#if NBI_WITH_CUTLASS
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
#else
    return 0;
#endif
}
