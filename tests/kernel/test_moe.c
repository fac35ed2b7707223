/* MoE runners: every runner at every level of this machine against a float64 oracle; equal bits
 * over batches, neighbours and threads; ids of -1, NaN in one expert, unequal global scales, NVFP4
 * activations; names. `--bench` times them. */
#include "moe_util.h"

#include "backend/cpu/linear.h"

static nbi_cpu *open_cpu(nbi_cpu_level level, uint32_t threads, bool w4a4)
{
    const nbi_limits limits = {.max_rows = 4,
                               .max_linear_cols = 64,
                               .max_linear_rows = 64,
                               .max_seqs = 1,
                               .max_context = 64,
                               .n_heads = 1,
                               .n_kv_heads = 1,
                               .head_dim = 64,
                               .vocab = 64,
                               .max_logit_rows = 1};
    nbi_cpu *cpu = op_open(level, threads, &limits);
    cpu->w4a4 = w4a4;
    return cpu;
}

static float *run(nbi_cpu *cpu, const nbi_moe_runner_ops *ops, const moe_layer *l, const float *x,
                  const int32_t *ids, const float *weights, uint32_t n)
{
    nb_error err = {0};
    char why[128];
    assert_true(ops->supports(&cpu->base, &l->e.shape, why, sizeof why));
    nbi_moe_layer *prepared = NULL;
    if (ops->prepare(&cpu->base, &prepared, &l->e, &err) != NB_OK) fail_msg("%s", err.text);
    void *ws = op_alloc(ops->workspace_bytes(&cpu->base, &l->e.shape, n));
    float *out = op_floats((size_t)n * l->e.shape.hidden);
    ops->run(&cpu->base, prepared,
             &(nbi_moe_args){
                 .out = out, .x = x, .ids = ids, .weights = weights, .n_rows = n, .workspace = ws});
    op_check(out);
    op_free(ws);
    ops->release(&cpu->base, &prepared);
    assert_null(prepared);
    return out;
}

static void check_layer(nbi_cpu *cpu, const nbi_moe_runner_ops *ops, const moe_layer *l, uint32_t n,
                        double bound)
{
    const nbi_moe_shape *s = &l->e.shape;
    float *x = op_floats((size_t)n * s->hidden), *weights = op_floats((size_t)n * s->top_k);
    int32_t *ids = op_alloc((size_t)n * s->top_k * sizeof *ids);
    op_fill(x, (size_t)n * s->hidden, 1);
    moe_routing(l, ids, weights, n);
    float *out = run(cpu, ops, l, x, ids, weights, n);
    double *want = malloc(s->hidden * sizeof *want);
    for (uint32_t t = 0; t < n; t++) {
        moe_oracle_row(l, x + (size_t)t * s->hidden, ids + t * s->top_k, weights + t * s->top_k,
                       want);
        OP_ASSERT_ERROR(op_error(out + (size_t)t * s->hidden, want, s->hidden), bound,
                        "runner %s, %s, %s/%s, [%u, %u], row %u of %u", ops->name,
                        nbi_cpu_level_name(cpu->level), nbi_weight_kind_name(s->kind_gate_up),
                        nbi_weight_kind_name(s->kind_down), s->inter, s->hidden, t, n);
    }
    free(want);
    op_free(out);
    op_free(ids);
    op_free(weights);
    op_free(x);
}

static void each(void (*test)(nbi_cpu_level level, const nbi_moe_runner_ops *ops))
{
    for (const nbi_moe_runner_ops *const *r = nbi_moe_runners(); *r; r++) {
        if (strncmp((*r)->name, "cuda", 4) == 0 || strcmp((*r)->name, "cutlass") == 0)
            continue; /* tests/cuda */
        for (int l = 0; l < NBI_CPU_LEVEL_COUNT; l++) {
            if ((nbi_cpu_level)l > nbi_cpu_detect()) {
                print_message("level %s: not on this machine, skipped\n", nbi_cpu_level_name(l));
                continue;
            }
            test((nbi_cpu_level)l, *r);
        }
    }
}

static void oracle_case(nbi_cpu_level level, const nbi_moe_runner_ops *ops)
{
    static const nbi_weight_kind kinds[][2] = {{NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4},
                                               {NBI_WEIGHT_FP8_BLOCK, NBI_WEIGHT_FP8_BLOCK},
                                               {NBI_WEIGHT_BF16, NBI_WEIGHT_BF16},
                                               {NBI_WEIGHT_NVFP4, NBI_WEIGHT_BF16},
                                               {NBI_WEIGHT_F32, NBI_WEIGHT_FP8_TENSOR}};
    static const uint32_t rows[] = {1, 2, 5, 40};
    nbi_cpu *cpu = open_cpu(level, 3, false);
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        moe_layer l;
        moe_make(&l, kinds[k][0], kinds[k][1], 6, 3, 112, 80, false);
        const bool exact = level <= NBI_CPU_REFERENCE || strcmp(ops->name, "reference") == 0;
        for (size_t i = 0; i < 4; i++) check_layer(cpu, ops, &l, rows[i], exact ? 1e-6 : 8e-3);
        moe_free(&l);
    }
    op_close(cpu);
}

static void test_oracle(void **state)
{
    (void)state;
    each(oracle_case);
}

/* The same values rounded the same way. The bound leaves room for one flipped rounding of h: a
 * float32 and a double h may lie on two sides of a tie. */
static void w4a4_case(nbi_cpu_level level, const nbi_moe_runner_ops *ops)
{
    nbi_cpu *cpu = open_cpu(level, 2, true);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 5, 2, 96, 64, true);
    check_layer(cpu, ops, &l, 1, 1e-2);
    check_layer(cpu, ops, &l, 30, 1e-2);
    moe_free(&l);
    op_close(cpu);
}

static void test_w4a4(void **state)
{
    (void)state;
    each(w4a4_case);
}

/* Row by row, in small batches, and with more threads: the bits of the large batch. 700 rows are
 * more than one chunk of rows and more than one block of tokens per expert. */
static void bits_case(nbi_cpu_level level, const nbi_moe_runner_ops *ops)
{
    enum { N = 700, K = 2, H = 48, I = 64 };
    nbi_cpu *one = open_cpu(level, 1, false), *four = open_cpu(level, 4, false);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 3, K, H, I, false);
    float *x = op_floats(N * H), *weights = op_floats(N * K);
    int32_t *ids = op_alloc(N * K * sizeof *ids);
    op_fill(x, N * H, 1);
    moe_routing(&l, ids, weights, N);
    float *want = run(one, ops, &l, x, ids, weights, N);
    static const uint32_t sizes[] = {1, 2, 3, 7, 16, 17, 64, 200, N};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const uint32_t n = sizes[i], t = op_below(N - n + 1);
        float *out = run(i % 2 ? one : four, ops, &l, x + t * H, ids + t * K, weights + t * K, n);
        moe_same_bits(out, want + t * H, n * H, ops->name);
        op_free(out);
    }
    op_free(want);
    op_free(ids);
    op_free(weights);
    op_free(x);
    moe_free(&l);
    op_close(one);
    op_close(four);
}

static void test_bits(void **state)
{
    (void)state;
    each(bits_case);
}

/* ---------------------------------------------------------------- field cases */

/* An expert of constant codes: weight 1.0 * block scale * global everywhere. */
typedef struct flat {
    uint8_t codes[64 * 32], scales[64 * 4];
    nbi_matrix m;
} flat;

static void make_flat(flat *f, uint32_t rows, uint32_t cols, uint8_t scale, float global)
{
    memset(f->codes, 0x22, sizeof f->codes);
    memset(f->scales, scale, sizeof f->scales);
    f->m = (nbi_matrix){.kind = NBI_WEIGHT_NVFP4,
                        .rows = rows,
                        .cols = cols,
                        .data = f->codes,
                        .scales = f->scales,
                        .global_scale = global,
                        .name = "expert"};
}

static moe_layer flat_layer(flat f[3], nbi_matrix views[3], uint32_t hidden, uint32_t inter)
{
    for (int i = 0; i < 3; i++) views[i] = f[i].m;
    return (moe_layer){.e = {.shape = {.n_experts = 1,
                                       .top_k = 1,
                                       .hidden = hidden,
                                       .inter = inter,
                                       .kind_gate_up = NBI_WEIGHT_NVFP4,
                                       .kind_down = NBI_WEIGHT_NVFP4},
                             .gate = &views[0],
                             .up = &views[1],
                             .down = &views[2]}};
}

/* C03: gate and up keep their own global scales: sums 0.32 and 1.28. */
static void c03_case(nbi_cpu_level level, const nbi_moe_runner_ops *ops)
{
    nbi_cpu *cpu = open_cpu(level, 1, false);
    flat f[3];
    nbi_matrix views[3];
    make_flat(&f[0], 16, 32, 0x38, 0.010f);
    make_flat(&f[1], 16, 32, 0x38, 0.040f);
    make_flat(&f[2], 32, 16, 0x38, 1.0f / 16);
    moe_layer l = flat_layer(f, views, 32, 16);
    float x[32];
    for (int i = 0; i < 32; i++) x[i] = 1;
    const int32_t id = 0;
    const float weight = 1;
    float *out = run(cpu, ops, &l, x, &id, &weight, 1);
    const float want = (float)(0.32 / (1 + exp(-0.32)) * 1.28);
    for (int i = 0; i < 32; i++) assert_float_equal(out[i], want, 0.003f * want);
    op_free(out);
    op_close(cpu);
}

static void test_c03(void **state)
{
    (void)state;
    each(c03_case);
}

/* C55, the runner's part: the weight it is given is used once and nothing else scales. Weight 2.5
 * (the routing factor is in it), expert output 4: with a shared expert of 1 the sum is 11. */
static void c55_case(nbi_cpu_level level, const nbi_moe_runner_ops *ops)
{
    nbi_cpu *cpu = open_cpu(level, 1, false);
    flat f[3];
    nbi_matrix views[3];
    make_flat(&f[0], 16, 32, 0x38, 1); /* gate: 32; silu(32) = 32 */
    make_flat(&f[1], 16, 32, 0x38, 1.0f / 32);
    make_flat(&f[2], 32, 16, 0x38, 1.0f / 128);
    moe_layer l = flat_layer(f, views, 32, 16);
    float x[32];
    for (int i = 0; i < 32; i++) x[i] = 1;
    const int32_t id = 0;
    const float weight = 2.5f;
    float *out = run(cpu, ops, &l, x, &id, &weight, 1);
    for (int i = 0; i < 32; i++) assert_float_equal(out[i] + 1, 11, 1e-4f);
    op_free(out);
    op_close(cpu);
}

static void test_c55(void **state)
{
    (void)state;
    each(c55_case);
}

/* C63: a NaN scale in one expert stays in the rows that chose it; unused, it is not even read. */
static void c63_case(nbi_cpu_level level, const nbi_moe_runner_ops *ops)
{
    enum { N = 4, K = 1, H = 64, I = 48 };
    nbi_cpu *cpu = open_cpu(level, 2, false);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 2, K, H, I, false);
    float x[N * H];
    op_fill(x, N * H, 1);
    const float weights[N] = {1, 1, 1, 1};
    const int32_t all_one[N] = {1, 1, 1, 1}, mixed[N] = {1, 0, 1, 0};
    float *want = run(cpu, ops, &l, x, all_one, weights, N);
    ((uint8_t *)l.gate[0].scales)[5] = 0x7f;
    ((uint8_t *)l.down[0].scales)[5] = 0x7f;
    float *unused = run(cpu, ops, &l, x, all_one, weights, N);
    moe_same_bits(unused, want, N * H, "NaN in an unused expert");
    float *used = run(cpu, ops, &l, x, mixed, weights, N);
    for (int t = 0; t < N; t += 2)
        moe_same_bits(used + t * H, want + t * H, H, "NaN in another row's expert");
    for (int t = 1; t < N; t += 2) assert_true(isnan(used[t * H]));
    op_free(want);
    op_free(unused);
    op_free(used);
    moe_free(&l);
    op_close(cpu);
}

static void test_c63(void **state)
{
    (void)state;
    each(c63_case);
}

/* C70: -1 is no expert. Experts that no row chose must not be touched: their pointers lead nowhere.
 */
static void c70_case(nbi_cpu_level level, const nbi_moe_runner_ops *ops)
{
    enum { H = 32, I = 32 };
    nbi_cpu *cpu = open_cpu(level, 2, false);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 3, 2, H, I, false);
    static const char nowhere[1];
    l.views[0 + 2].data = l.views[3 + 2].data = l.views[6 + 2].data = nowhere;
    l.views[0 + 2].scales = l.views[3 + 2].scales = l.views[6 + 2].scales = nowhere;
    float x[2 * H];
    op_fill(x, 2 * H, 1);
    const int32_t ids[4] = {0, -1, -1, -1};
    const float weights[4] = {0, 0, 0, 0};
    float *out = run(cpu, ops, &l, x, ids, weights, 2);
    for (int i = 0; i < 2 * H; i++) assert_float_equal(out[i], 0, 0);
    op_free(out);
    const int32_t none[4] = {-1, -1, -1, -1};
    out = run(cpu, ops, &l, x, none, weights, 2);
    for (int i = 0; i < 2 * H; i++) assert_float_equal(out[i], 0, 0);
    op_free(out);
    moe_free(&l);
    op_close(cpu);
}

static void test_c70(void **state)
{
    (void)state;
    each(c70_case);
}

/* ---------------------------------------------------------------- names and refusals */

static void test_names(void **state)
{
    (void)state;
    nbi_cpu *cpu = open_cpu(NBI_CPU_REFERENCE, 1, false);
    nbi_moe_shape shape = {.n_experts = 4,
                           .top_k = 2,
                           .hidden = 64,
                           .inter = 32,
                           .kind_gate_up = NBI_WEIGHT_NVFP4,
                           .kind_down = NBI_WEIGHT_NVFP4};
    const nbi_moe_runner_ops *ops = NULL;
    nb_error err;
    assert_int_equal(nbi_moe_runner_choose(&ops, "auto", &cpu->base, &shape, &err), NB_OK);
    assert_string_equal(ops->name, "cpu");
    assert_int_equal(nbi_moe_runner_choose(&ops, "reference", &cpu->base, &shape, &err), NB_OK);
    assert_string_equal(ops->name, "reference");
    static const char *const gpu[] = {"flashinfer_cutlass",
                                      "flashinfer_cutedsl",
                                      "flashinfer_trtllm",
                                      "triton",
                                      "deep_gemm",
                                      "cutlass",
                                      "marlin"};
    for (size_t i = 0; i < sizeof gpu / sizeof *gpu; i++) {
        assert_int_equal(nbi_moe_runner_choose(&ops, gpu[i], &cpu->base, &shape, &err),
                         NB_UNSUPPORTED);
        assert_non_null(strstr(err.text, gpu[i]));
        assert_non_null(strstr(err.text, "GPU"));
        assert_non_null(strstr(err.text, "\"cpu\""));
    }
    assert_int_equal(nbi_moe_runner_choose(&ops, "cublas", &cpu->base, &shape, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "auto, cpu, reference"));
    shape.hidden = 72; /* not whole NVFP4 blocks */
    assert_int_equal(nbi_moe_runner_choose(&ops, "cpu", &cpu->base, &shape, &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "72"));
    assert_string_equal(ops->name, "reference"); /* untouched by failures */
    op_close(cpu);
}

static void refusal_case(nbi_cpu_level level, const nbi_moe_runner_ops *ops)
{
    nbi_cpu *cpu = open_cpu(level, 1, false);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 2, 1, 32, 32, false);
    nbi_moe_layer *prepared = NULL;
    nb_error err;
    l.views[1].name = "layers.3.experts.1.gate_proj";
    l.views[1].rows = 16;
    assert_int_equal(ops->prepare(&cpu->base, &prepared, &l.e, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "layers.3.experts.1.gate_proj"));
    l.views[1].rows = 32;
    l.views[1].kind = NBI_WEIGHT_BF16;
    assert_int_equal(ops->prepare(&cpu->base, &prepared, &l.e, &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "layers.3.experts.1.gate_proj"));
    assert_null(prepared);
    moe_free(&l);
    op_close(cpu);
}

static void test_refusals(void **state)
{
    (void)state;
    each(refusal_case);
}

/* ---------------------------------------------------------------- speed */

typedef struct bench {
    nbi_cpu *cpu;
    const nbi_moe_runner_ops *ops;
    nbi_moe_layer *prepared;
    nbi_moe_args a;
    int32_t *ids;
    moe_layer *l;
    float *weights;
} bench;

static void bench_step(void *arg)
{
    bench *b = arg;
    b->ops->run(&b->cpu->base, b->prepared, &b->a);
}

/* Experts share bytes in cache unless there are many: 128 of the Qwen3-30B-A3B shape are 340 MB. */
static void bench_case(nbi_cpu_level level, uint32_t n, double bandwidth)
{
    enum { E = 128, K = 8, H = 2048, I = 768 };
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, E, K, H, I, false);
    bench b = {.cpu = open_cpu(level, 0, false), .l = &l};
    nbi_moe_runner_choose(&b.ops, "cpu", &b.cpu->base, &l.e.shape, NULL);
    assert_int_equal(b.ops->prepare(&b.cpu->base, &b.prepared, &l.e, NULL), NB_OK);
    const size_t ws_bytes = b.ops->workspace_bytes(&b.cpu->base, &l.e.shape, n);
    void *ws = nbi_pages_alloc(ws_bytes);
    float *x = op_floats((size_t)n * H), *out = op_floats((size_t)n * H),
          *weights = op_floats((size_t)n * K);
    int32_t *ids = op_alloc((size_t)n * K * sizeof *ids);
    op_fill(x, (size_t)n * H, 1);
    double best = 1e9;
    uint64_t used = 0;
    for (int i = 0; i < 40; i++) { /* fresh routing each step: no expert stays in a cache */
        uint32_t seen[E] = {0};
        for (uint32_t t = 0; t < n; t++)
            for (uint32_t k = 0; k < K; k++)
                ids[t * K + k] = (int32_t)((op_below(E / K) * K + k) % E);
        used = 0;
        for (uint32_t k = 0; k < n * K; k++) used += seen[ids[k]]++ == 0;
        for (uint32_t k = 0; k < n * K; k++) weights[k] = 0.125f;
        b.a = (nbi_moe_args){
            .out = out, .x = x, .ids = ids, .weights = weights, .n_rows = n, .workspace = ws};
        const double s = op_time(bench_step, &b, 1);
        if (s < best) best = s;
    }
    const double bytes = (double)used * 3 * H * I * 9 / 16;
    const uint32_t threads = nbi_pool_threads(b.cpu->pool);
    print_message(
        "%-9s cpu nvfp4 %u of %u experts [%u, %u] T=%-4u %9.1f us  %6.2f GB/s  %5.1f %% of "
        "read  %7.1f GMAC/s per core (best of 40)\n",
        nbi_cpu_level_name(level), K, E, I, H, n, 1e6 * best, 1e-9 * bytes / best,
        100 * bytes / best / bandwidth, 1e-9 * n * K * 3.0 * H * I / best / threads);
    b.ops->release(&b.cpu->base, &b.prepared);
    nbi_pages_free(ws, ws_bytes);
    op_free(x);
    op_free(out);
    op_free(weights);
    op_free(ids);
    moe_free(&l);
    op_close(b.cpu);
}

static void run_bench(void)
{
    static const uint32_t rows[] = {1, 4, 16, 64, 512};
    nbi_pool *pool = NULL;
    nbi_pool_create(&pool, 0, NULL);
    const double bandwidth = op_read_bandwidth(pool);
    print_message("read bandwidth %.2f GB/s, %u threads\n", 1e-9 * bandwidth,
                  nbi_pool_threads(pool));
    nbi_pool_destroy(&pool);
    for (int l = NBI_CPU_AVX2; l <= (int)nbi_cpu_detect(); l++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            bench_case((nbi_cpu_level)l, rows[i], bandwidth);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) {
        run_bench();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),   cmocka_unit_test(test_w4a4),
        cmocka_unit_test(test_bits),     cmocka_unit_test(test_c03),
        cmocka_unit_test(test_c55),      cmocka_unit_test(test_c63),
        cmocka_unit_test(test_c70),      cmocka_unit_test(test_names),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
