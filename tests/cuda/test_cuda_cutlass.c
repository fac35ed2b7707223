/* The MoE runner cutlass against the float64 oracle; its numerics are a class of their own, so the
 * bits of a row are compared over batches only. Emulated, a plain product stands in for CUTLASS:
 * rows, weights and sums around it are what is tested then. In builds without the runner there is
 * nothing to test. test_cuda_moe --bench times it. */
#include "cuda/moe_gpu.h"

#if NBI_WITH_CUTLASS

/* A class of its own: the oracle, and the bits of a row alone and among others, where there are
 * other tiles and more slices of experts. */
static void check_rows(nbi_backend *b, const moe_layer *l, uint32_t n, double bound)
{
    const uint32_t width = l->e.shape.hidden, top_k = l->e.shape.top_k;
    gpu_moe_batch k = gpu_moe_batch_make(l, n);
    for (uint32_t t = 0; t < n; t++) { /* one expert has most rows, one few */
        if (t % 7 == 1) k.ids[t * top_k] = -1;
        if (t % 3) k.ids[t * top_k + top_k - 1] = 1;
    }
    gpu_moe p = gpu_moe_prepare(b, "cutlass", l);
    assert_string_equal(p.ops->name, "cutlass");
    float *out = gpu_moe_run(&p, k.x, k.ids, k.weights, n);
    gpu_moe_check(&p, &k, out, bound);
    for (uint32_t t = 0; t < n; t += 1 + op_below(20)) {
        const uint32_t some = 1 + op_below(n - t < 4 ? n - t : 4);
        float *alone = gpu_moe_run(&p, k.x + (size_t)t * width, k.ids + (size_t)t * top_k,
                                   k.weights + (size_t)t * top_k, some);
        moe_same_bits(alone, out + (size_t)t * width, some * width, "cutlass, rows alone");
        free(alone);
    }
    free(out);
    gpu_moe_release(&p);
    gpu_moe_batch_free(&k);
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
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe_layer l;
        moe_make(&l, cases[i].gate_up, cases[i].down, cases[i].experts, cases[i].top_k,
                 cases[i].hidden, cases[i].inter, false);
        check_rows(b, &l, 23, cases[i].bound);
        if (i % 2 == 0) check_rows(b, &l, 150, cases[i].bound);
        moe_free(&l);
    }
    gpu_close(b);
    b = gpu_open_w4a4(&gpu_moe_limits);
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
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_FP8_TENSOR, 5, K, H, I, false);
    gpu_moe_batch k = gpu_moe_batch_make(&l, N);
    for (uint32_t i = 0; i < N * H; i++) k.x[i] *= sizes[i / H];
    for (uint32_t c = 1; c < H; c++) k.x[3 * H + c] *= c % 2 ? 0x1p-12f : 0x1p-24f;
    for (uint32_t t = 0; t < N; t++) k.ids[K * t] = t == 4 ? -1 : (int32_t)t % 2;
    for (uint32_t t = 0; t < N; t++) k.ids[K * t + 1] = t == 4 ? -1 : 2;
    gpu_moe p = gpu_moe_prepare(b, "cutlass", &l);
    float *want = gpu_moe_run(&p, k.x, k.ids, k.weights, N);
    gpu_moe_check(&p, &k, want, 1e-3);
    for (uint32_t c = 0; c < H; c++) assert_true(want[2 * H + c] == 0 && want[4 * H + c] == 0);
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        k.x[5 * H + 7] = bad[i];
        float *out = gpu_moe_run(&p, k.x, k.ids, k.weights, N);
        moe_same_bits(out, want, 5 * H, "rows before");
        bool finite = true;
        for (int c = 0; c < H; c++) finite = finite && isfinite(out[5 * H + c]);
        assert_false(finite);
        free(out);
    }
    gpu_moe_release(&p);
    uint8_t *scale = (uint8_t *)l.gate[0].scales;
    scale[5] = 0x7f;
    p = gpu_moe_prepare(b, "cutlass", &l);
    float *out = gpu_moe_run(&p, k.x, k.ids, k.weights, N);
    assert_true(isnan(out[0])); /* expert 0 */
    moe_same_bits(out + H, want + H, H, "other experts");
    free(out);
    free(want);
    gpu_moe_release(&p);
    gpu_moe_batch_free(&k);
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
    nbi_backend *b = gpu_open(&gpu_moe_limits);
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
