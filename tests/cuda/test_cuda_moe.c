/* MoE runners of the CUDA backend against the float64 oracle, and the bits of a row over runners,
 * batches and row order. `--bench` times whole layers. */
#include "cuda/gpu_util.h"
#include "moe_util.h"

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

static const char *const runners[] = {"cuda_gemv", "cuda_grouped", "cuda"};
#define N_RUNNERS (sizeof runners / sizeof *runners)

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

/* Every runner on the same batches: the oracle, and one runner's bits are the others'. */
static void check_layer(nbi_backend *b, const moe_layer *l, const uint32_t *rows, size_t n_rows,
                        double bound)
{
    for (size_t i = 0; i < n_rows; i++) {
        batch k = make_batch(l, rows[i]);
        float *want = NULL;
        for (size_t r = 0; r < N_RUNNERS; r++) {
            prepared p = prepare(b, runners[r], l);
            float *out = run(&p, k.x, k.ids, k.weights, k.n);
            if (!want) {
                check_oracle(&p, &k, out, bound);
                want = out;
            } else {
                moe_same_bits(out, want, (size_t)k.n * l->e.shape.hidden, runners[r]);
                free(out);
            }
            release(&p);
        }
        free(want);
        free_batch(&k);
    }
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
        {NBI_WEIGHT_FP8_BLOCK, NBI_WEIGHT_FP8_BLOCK, 320, 144, 6, 2, 1e-3},
        {NBI_WEIGHT_FP8_TENSOR, NBI_WEIGHT_FP8_TENSOR, 136, 72, 5, 2, 1e-3},
        {NBI_WEIGHT_BF16, NBI_WEIGHT_BF16, 136, 72, 5, 3, 8e-3},
        {NBI_WEIGHT_F16, NBI_WEIGHT_F16, 48, 40, 5, 2, 1e-3},
        {NBI_WEIGHT_NVFP4, NBI_WEIGHT_BF16, 64, 272, 4, 1, 8e-3},
    };
    static const uint32_t rows[] = {1, 3, 21};
    nbi_backend *b = gpu_open(&limits);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe_layer l;
        moe_make(&l, cases[i].gate_up, cases[i].down, cases[i].experts, cases[i].top_k,
                 cases[i].hidden, cases[i].inter, false);
        check_layer(b, &l, rows, i ? 2 : 3, cases[i].bound);
        moe_free(&l);
    }
    gpu_close(b);
}

/* A row alone, in other batches, and at another place: the same bits. Every runner, all sizes of
 * its tiles. */
static void test_bits(void **state)
{
    (void)state;
    enum { N = 70, K = 3, H = 64, I = 32 };
    nbi_backend *b = gpu_open(&limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 4, K, H, I, false);
    batch k = make_batch(&l, N);
    prepared p = prepare(b, "cuda_gemv", &l);
    float *want = run(&p, k.x, k.ids, k.weights, N);
    release(&p);
    static const uint32_t sizes[] = {1, 2, 7, 8, 9, 17, 33, N};
    for (size_t r = 0; r < N_RUNNERS; r++) {
        p = prepare(b, runners[r], &l);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            const uint32_t n = sizes[i], t = op_below(N - n + 1);
            float *out = run(&p, k.x + t * H, k.ids + t * K, k.weights + t * K, n);
            moe_same_bits(out, want + t * H, n * H, runners[r]);
            free(out);
        }
        batch back = make_batch(&l, N); /* rows in the opposite order */
        for (uint32_t t = 0; t < N; t++) {
            memcpy(back.x + t * H, k.x + (N - 1 - t) * H, H * sizeof(float));
            memcpy(back.ids + t * K, k.ids + (N - 1 - t) * K, K * sizeof(int32_t));
            memcpy(back.weights + t * K, k.weights + (N - 1 - t) * K, K * sizeof(float));
        }
        float *out = run(&p, back.x, back.ids, back.weights, N);
        for (uint32_t t = 0; t < N; t++)
            moe_same_bits(out + t * H, want + (N - 1 - t) * H, H, runners[r]);
        free(out);
        free_batch(&back);
        release(&p);
    }
    free(want);
    free_batch(&k);
    moe_free(&l);
    gpu_close(b);
}

/* All rows on one expert, the same expert twice in a row, no expert at all, ids that are none. */
static void test_routings(void **state)
{
    (void)state;
    enum { N = 19, K = 2, H = 64, I = 32 };
    nbi_backend *b = gpu_open(&limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 5, K, H, I, false);
    static const int32_t patterns[][2] = {{3, -1}, {-1, 0}, {2, 2}, {-1, -1}, {4, 1}};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        batch k = make_batch(&l, N);
        for (uint32_t t = 0; t < N; t++) memcpy(k.ids + t * K, patterns[i], sizeof patterns[i]);
        for (size_t r = 0; r < N_RUNNERS; r++) {
            prepared p = prepare(b, runners[r], &l);
            float *out = run(&p, k.x, k.ids, k.weights, N);
            check_oracle(&p, &k, out, 1e-3);
            if (patterns[i][0] < 0 && patterns[i][1] < 0)
                for (uint32_t j = 0; j < N * H; j++) assert_true(out[j] == 0);
            free(out);
            release(&p);
        }
        free_batch(&k);
    }
    moe_free(&l);
    gpu_close(b);
}

/* What is not finite stays in its row: x of one row, a NaN scale of one expert (C63). */
static void test_not_finite(void **state)
{
    (void)state;
    enum { N = 4, K = 1, H = 64, I = 48 };
    nbi_backend *b = gpu_open(&limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 2, K, H, I, false);
    batch k = make_batch(&l, N);
    const int32_t mixed[N] = {1, 0, 1, 0};
    memcpy(k.ids, mixed, sizeof mixed);
    for (size_t r = 0; r < N_RUNNERS; r++) {
        prepared p = prepare(b, runners[r], &l);
        float *want = run(&p, k.x, k.ids, k.weights, N);
        const float kept = k.x[2 * H + 5];
        const float bad[] = {NAN, INFINITY, -INFINITY};
        for (int i = 0; i < 3; i++) {
            k.x[2 * H + 5] = bad[i];
            float *out = run(&p, k.x, k.ids, k.weights, N);
            moe_same_bits(out, want, 2 * H, "rows before");
            moe_same_bits(out + 3 * H, want + 3 * H, H, "row behind");
            bool finite = true;
            for (int j = 0; j < H; j++) finite = finite && isfinite(out[2 * H + j]);
            assert_false(finite);
            free(out);
        }
        k.x[2 * H + 5] = kept;
        release(&p);
        uint8_t *scale = (uint8_t *)l.gate[0].scales;
        const uint8_t kept_scale = scale[5];
        scale[5] = 0x7f;
        p = prepare(b, runners[r], &l);
        float *out = run(&p, k.x, k.ids, k.weights, N);
        for (int t = 0; t < N; t += 2) moe_same_bits(out + t * H, want + t * H, H, "other expert");
        for (int t = 1; t < N; t += 2) assert_true(isnan(out[t * H]));
        scale[5] = kept_scale;
        free(out);
        free(want);
        release(&p);
    }
    free_batch(&k);
    moe_free(&l);
    gpu_close(b);
}

static void test_names(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&limits);
    nbi_moe_shape shape = {.n_experts = 4,
                           .top_k = 2,
                           .hidden = 64,
                           .inter = 32,
                           .kind_gate_up = NBI_WEIGHT_NVFP4,
                           .kind_down = NBI_WEIGHT_NVFP4};
    static const struct {
        const char *name, *runner, *why;
    } names[] = {{"auto", "cuda", NULL},
                 {"cuda", "cuda", NULL},
                 {"cuda_gemv", "cuda_gemv", NULL},
                 {"cuda_grouped", "cuda_grouped", NULL},
                 {"flashinfer_cutlass", "cuda_grouped", NULL},
                 {"cutlass", "cuda_grouped", NULL},
                 {"triton", "cuda_grouped", NULL},
                 {"deep_gemm", "cuda_grouped", NULL},
                 {"marlin", "cuda_grouped", NULL},
                 {"flashinfer_cutedsl", NULL, "masked"},
                 {"flashinfer_trtllm", NULL, "SM100"},
                 {"cpu", NULL, "CPU backend"},
                 {"reference", NULL, "CPU backend"}};
    nb_error err = {0};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const nbi_moe_runner_ops *ops = NULL;
        const nb_status st = nbi_moe_runner_choose(&ops, names[i].name, b, &shape, &err);
        assert_int_equal(st, names[i].runner ? NB_OK : NB_UNSUPPORTED);
        if (names[i].runner)
            assert_string_equal(ops->name, names[i].runner);
        else
            assert_non_null(strstr(err.text, names[i].why));
    }
    const nbi_moe_runner_ops *ops = NULL;
    shape.kind_down = NBI_WEIGHT_F32;
    assert_int_equal(nbi_moe_runner_choose(&ops, "auto", b, &shape, &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, nbi_weight_kind_name(NBI_WEIGHT_F32)));
    shape.kind_down = NBI_WEIGHT_NVFP4;
    shape.w4a4 = true;
    assert_int_equal(nbi_moe_runner_choose(&ops, "triton", b, &shape, &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "w4a4"));
    gpu_close(b);
}

static void test_refusals(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 2, 1, 32, 32, false);
    const nbi_moe_runner_ops *ops = NULL;
    nbi_moe_layer *layer = NULL;
    nb_error err = {0};
    assert_int_equal(nbi_moe_runner_choose(&ops, "auto", b, &l.e.shape, &err), NB_OK);
    l.views[1].name = "layers.3.experts.1.gate_proj";
    l.views[1].rows = 16;
    assert_int_equal(ops->prepare(b, &layer, &l.e, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "layers.3.experts.1.gate_proj"));
    assert_null(layer);
    moe_free(&l);
    gpu_close(b);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),   cmocka_unit_test(test_bits),
        cmocka_unit_test(test_routings), cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_names),    cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
