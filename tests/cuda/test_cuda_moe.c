/* MoE runners of the CUDA backend against the float64 oracle, and the bits of a row over runners,
 * batches and row order. `--bench` times whole layers. */
#include "cuda/moe_gpu.h"

static const char *const runners[] = {"cuda_gemv", "cuda_stream", "cuda_grouped", "cuda_masked",
                                      "cuda"};
#define N_RUNNERS (sizeof runners / sizeof *runners)

#if NBI_WITH_CUTLASS
#define CUTLASS "cutlass"
#else
#define CUTLASS "cuda_grouped" /* what the name means without it */
#endif

/* cuda_masked, and it alone, has no products for float32 experts. */
static bool refused(nbi_backend *b, const char *name, const nbi_moe_shape *s)
{
    const nbi_moe_runner_ops *ops = NULL;
    nb_error err = {0};
    if (strcmp(name, "cuda_masked") ||
        (s->kind_gate_up != NBI_WEIGHT_F32 && s->kind_down != NBI_WEIGHT_F32))
        return false;
    assert_int_equal(nbi_moe_runner_choose(&ops, name, b, s, &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "f32"));
    return true;
}

/* Every runner on the same batches: the oracle, and one runner's bits are the others'. */
static void check_layer(nbi_backend *b, const moe_layer *l, const uint32_t *rows, size_t n_rows,
                        double bound)
{
    for (size_t i = 0; i < n_rows; i++) {
        gpu_moe_batch k = gpu_moe_batch_make(l, rows[i]);
        float *want = NULL;
        for (size_t r = 0; r < N_RUNNERS; r++) {
            if (refused(b, runners[r], &l->e.shape)) continue;
            gpu_moe p = gpu_moe_prepare(b, runners[r], l);
            float *out = gpu_moe_run(&p, k.x, k.ids, k.weights, k.n);
            if (!want) {
                gpu_moe_check(&p, &k, out, bound);
                want = out;
            } else {
                moe_same_bits(out, want, (size_t)k.n * l->e.shape.hidden, runners[r]);
                free(out);
            }
            gpu_moe_release(&p);
        }
        free(want);
        gpu_moe_batch_free(&k);
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
        {NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 512, 256, 6, 2, 1e-3},
        {NBI_WEIGHT_FP8_BLOCK, NBI_WEIGHT_FP8_BLOCK, 256, 128, 6, 2, 1e-3},
        {NBI_WEIGHT_FP8_BLOCK, NBI_WEIGHT_FP8_BLOCK, 320, 144, 6, 2, 1e-3},
        {NBI_WEIGHT_FP8_TENSOR, NBI_WEIGHT_FP8_TENSOR, 136, 72, 5, 2, 1e-3},
        {NBI_WEIGHT_BF16, NBI_WEIGHT_BF16, 136, 72, 5, 3, 8e-3},
        {NBI_WEIGHT_BF16, NBI_WEIGHT_FP8_TENSOR, 256, 256, 4, 2, 8e-3},
        {NBI_WEIGHT_F32, NBI_WEIGHT_F32, 48, 40, 5, 2, 1e-6},
        {NBI_WEIGHT_F32, NBI_WEIGHT_FP8_TENSOR, 48, 40, 5, 2, 1e-3},
        {NBI_WEIGHT_F16, NBI_WEIGHT_F16, 48, 40, 5, 2, 1e-3},
        {NBI_WEIGHT_NVFP4, NBI_WEIGHT_BF16, 64, 272, 4, 1, 8e-3},
    };
    static const uint32_t rows[] = {1, 3, 21};
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe_layer l;
        moe_make(&l, cases[i].gate_up, cases[i].down, cases[i].experts, cases[i].top_k,
                 cases[i].hidden, cases[i].inter, false);
        check_layer(b, &l, rows, i ? 2 : 3, cases[i].bound);
        moe_free(&l);
    }
    gpu_close(b);
}

/* NVFP4 activations: values rounded as the oracle rounds them. The bound leaves room for a rounding
 * of h that flips: a float32 and a double h may lie on two sides of a tie. */
static void test_w4a4(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open_w4a4(&gpu_moe_limits);
    static const uint32_t rows[] = {1, 19};
    static const uint32_t sizes[][2] = {{96, 64}, {512, 256}};
    for (size_t i = 0; i < 2; i++) {
        moe_layer l;
        moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 5, 2, sizes[i][0], sizes[i][1], true);
        check_layer(b, &l, rows, 2, 1e-2);
        for (uint32_t e = 1; e < 5; e += 2) /* not every expert has a scale */
            l.views[e].input_scale = l.views[10 + e].input_scale = 0;
        gpu_moe_batch k = gpu_moe_batch_make(&l, 11);
        float *want = NULL;
        for (size_t r = 0; r < N_RUNNERS; r++) {
            gpu_moe p = gpu_moe_prepare(b, runners[r], &l);
            float *out = gpu_moe_run(&p, k.x, k.ids, k.weights, k.n);
            if (want) moe_same_bits(out, want, (size_t)k.n * sizes[i][0], runners[r]);
            if (want) free(out);
            if (!want) want = out;
            gpu_moe_release(&p);
        }
        free(want);
        gpu_moe_batch_free(&k);
        moe_free(&l);
    }
    gpu_close(b);
}

/* A row alone, in other batches, and at another place: the same bits. Every runner, all sizes of
 * its tiles. */
static void test_bits(void **state)
{
    (void)state;
    enum { N = 80, K = 3, H = 64, I = 32 };
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 4, K, H, I, false);
    gpu_moe_batch k = gpu_moe_batch_make(&l, N);
    gpu_moe p = gpu_moe_prepare(b, "cuda_gemv", &l);
    float *want = gpu_moe_run(&p, k.x, k.ids, k.weights, N);
    gpu_moe_release(&p);
    static const uint32_t sizes[] = {1, 2, 7, 8, 9, 17, 40, 60, N};
    for (size_t r = 0; r < N_RUNNERS; r++) {
        p = gpu_moe_prepare(b, runners[r], &l);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            const uint32_t n = sizes[i], t = op_below(N - n + 1);
            float *out = gpu_moe_run(&p, k.x + t * H, k.ids + t * K, k.weights + t * K, n);
            moe_same_bits(out, want + t * H, n * H, runners[r]);
            free(out);
        }
        gpu_moe_batch back = gpu_moe_batch_make(&l, N); /* rows in the opposite order */
        for (uint32_t t = 0; t < N; t++) {
            memcpy(back.x + t * H, k.x + (N - 1 - t) * H, H * sizeof(float));
            memcpy(back.ids + t * K, k.ids + (N - 1 - t) * K, K * sizeof(int32_t));
            memcpy(back.weights + t * K, k.weights + (N - 1 - t) * K, K * sizeof(float));
        }
        float *out = gpu_moe_run(&p, back.x, back.ids, back.weights, N);
        for (uint32_t t = 0; t < N; t++)
            moe_same_bits(out + t * H, want + (N - 1 - t) * H, H, runners[r]);
        free(out);
        gpu_moe_batch_free(&back);
        gpu_moe_release(&p);
    }
    free(want);
    gpu_moe_batch_free(&k);
    moe_free(&l);
    gpu_close(b);
}

/* Several token tiles of an expert, the last of them of every height; chunks that end within a row;
 * more units than blocks. */
static void test_many_rows(void **state)
{
    (void)state;
    static const struct {
        nbi_weight_kind gate_up, down;
        uint32_t hidden, inter;
    } cases[] = {{NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 272, 144},
                 {NBI_WEIGHT_FP8_BLOCK, NBI_WEIGHT_FP8_BLOCK, 192, 136},
                 {NBI_WEIGHT_BF16, NBI_WEIGHT_FP8_TENSOR, 136, 72},
                 {NBI_WEIGHT_F16, NBI_WEIGHT_BF16, 64, 328}};
    static const float sizes[4] = {1, 300, 0x1p-70f, 0};
    enum { N = 300, MASKED = 140 };
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe_layer l;
        moe_make(&l, cases[i].gate_up, cases[i].down, 4, 2, cases[i].hidden, cases[i].inter, false);
        gpu_moe_batch k = gpu_moe_batch_make(&l, N);
        for (uint32_t t = 0; t < N; t++) { /* 294, 200 to 250, 80 to 40 and 20 to 10 pairs */
            k.ids[2 * t] = t % 50 ? 2 : -1;
            k.ids[2 * t + 1] = t % (3 + i) ? 1 : t % 5 ? 0 : 3;
            const float factor = t % 16 < 4 ? sizes[t % 16] : 1;
            for (uint32_t c = 0; c < l.e.shape.hidden; c++) /* gates of every size */
                k.x[(size_t)t * l.e.shape.hidden + c] *= factor;
        }
        gpu_moe p = gpu_moe_prepare(b, "cuda_grouped", &l);
        float *want = gpu_moe_run(&p, k.x, k.ids, k.weights, N);
        const uint32_t width = cases[i].hidden;
        gpu_moe other = gpu_moe_prepare(b, "cuda_stream", &l); /* many entries of a block */
        float *same = gpu_moe_run(&other, k.x, k.ids, k.weights, N);
        moe_same_bits(same, want, (size_t)N * width, "many rows, cuda_stream");
        free(same);
        gpu_moe_release(&other);
        other = gpu_moe_prepare(b, "cuda_masked",
                                &l); /* the rest of two passes, several tiles of each */
        same = gpu_moe_run(&other, k.x, k.ids, k.weights, MASKED);
        moe_same_bits(same, want, (size_t)MASKED * width, "many rows, cuda_masked");
        free(same);
        gpu_moe_release(&other);
        for (uint32_t t = 0; t < N; t += 37 + op_below(20)) { /* rows alone take other kernels */
            const gpu_moe_batch one = {k.x + (size_t)t * width, k.weights + 2 * t,
                                       k.ids + 2 * (size_t)t, 1};
            float *out = gpu_moe_run(&p, one.x, one.ids, one.weights, 1);
            gpu_moe_check(&p, &one, out, 1e-2);
            moe_same_bits(out, want + (size_t)t * width, width, "a row of many");
            free(out);
        }
        gpu_moe_release(&p);
        free(want);
        gpu_moe_batch_free(&k);
        moe_free(&l);
    }
    gpu_close(b);
}

/* All rows on one expert, the same expert twice in a row, no expert at all, ids that are none. */
static void test_routings(void **state)
{
    (void)state;
    enum { N = 19, K = 2, H = 64, I = 32 };
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 5, K, H, I, false);
    static const int32_t patterns[][2] = {{3, -1}, {-1, 0}, {2, 2}, {-1, -1}, {4, 1}};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        gpu_moe_batch k = gpu_moe_batch_make(&l, N);
        for (uint32_t t = 0; t < N; t++) memcpy(k.ids + t * K, patterns[i], sizeof patterns[i]);
        for (size_t r = 0; r < N_RUNNERS; r++) {
            gpu_moe p = gpu_moe_prepare(b, runners[r], &l);
            float *out = gpu_moe_run(&p, k.x, k.ids, k.weights, N);
            gpu_moe_check(&p, &k, out, 1e-3);
            if (patterns[i][0] < 0 && patterns[i][1] < 0)
                for (uint32_t j = 0; j < N * H; j++) assert_true(out[j] == 0);
            free(out);
            gpu_moe_release(&p);
        }
        gpu_moe_batch_free(&k);
    }
    moe_free(&l);
    gpu_close(b);
}

/* The same expert by the launches of a model without it among the others: two products of x,
 * silu(gate) * up, the product of that, and the addition to `sum`, [n][hidden]. */
static float *add_apart(nbi_backend *b, const moe_layer *l, const float *x, const float *sum,
                        uint32_t n)
{
    const nbi_moe_shape *s = &l->e.shape;
    const nbi_matrix *m[3] = {&l->e.gate[s->n_experts], &l->e.up[s->n_experts],
                              &l->e.down[s->n_experts]};
    nbi_weight *w[3] = {0};
    nb_error err = {0};
    for (int i = 0; i < 3; i++)
        if (b->ops->weight_prepare(b, &w[i], m[i], &err) != NB_OK) fail_msg("%s", err.text);
    gpu_buffer gx = gpu_floats(b, x, (size_t)n * s->hidden);
    gpu_buffer gs = gpu_floats(b, sum, (size_t)n * s->hidden);
    gpu_buffer h[2], y = gpu_poisoned(b, (size_t)n * s->hidden * sizeof(float));
    for (int i = 0; i < 3; i++) {
        if (i < 2) h[i] = gpu_poisoned(b, (size_t)n * s->inter * sizeof(float));
        if (i == 2)
            b->ops->swiglu(b, &(nbi_swiglu_args){.out = h[0].p,
                                                 .gate = h[0].p,
                                                 .up = h[1].p,
                                                 .n_rows = n,
                                                 .width = s->inter,
                                                 .in_stride = s->inter,
                                                 .out_stride = s->inter,
                                                 .once = true});
        b->ops->linear(b, &(nbi_linear_args){.y = i < 2 ? h[i].p : y.p,
                                             .x = i < 2 ? gx.p : h[0].p,
                                             .w = w[i],
                                             .n_rows = n,
                                             .x_stride = m[i]->cols,
                                             .y_stride = m[i]->rows});
    }
    b->ops->add(b, &(nbi_add_args){.x = gs.p, .y = y.p, .n = (size_t)n * s->hidden, .once = true});
    float *got = gpu_read(&gs);
    gpu_buffer *all[] = {&gx, &gs, &h[0], &h[1], &y};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) gpu_free(all[i]);
    for (int i = 0; i < 3; i++) b->ops->weight_release(b, &w[i]);
    return got;
}

/* A shared expert among the others: the oracle, and in every runner and for every number of rows
 * the bits of a layer without it to which its own launches add. */
static void test_shared(void **state)
{
    (void)state;
    static const struct {
        nbi_weight_kind kind;
        uint32_t hidden, inter, experts, top_k;
        double bound;
    } cases[] = {{NBI_WEIGHT_NVFP4, 320, 144, 6, 3, 1e-3},
                 {NBI_WEIGHT_NVFP4, 64, 272, 4, 1, 1e-3},
                 {NBI_WEIGHT_FP8_BLOCK, 192, 136, 4, 2, 1e-3},
                 {NBI_WEIGHT_BF16, 136, 72, 4, 2, 8e-3}};
    static const uint32_t rows[] = {1, 9, 2, 40};
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe_layer l;
        moe_make(&l, cases[i].kind, cases[i].kind, cases[i].experts + 1, cases[i].top_k,
                 cases[i].hidden, cases[i].inter, false);
        moe_share_last(&l);
        moe_layer without = l;
        without.e.shape.n_shared = 0;
        gpu_moe apart = gpu_moe_prepare(b, "cuda_gemv", &without), among[N_RUNNERS];
        for (size_t r = 0; r < N_RUNNERS; r++) among[r] = gpu_moe_prepare(b, runners[r], &l);
        for (size_t j = 0; j < (i ? 2 : 4); j++) {
            gpu_moe_batch k = gpu_moe_batch_make(&l, rows[j]);
            float *sum = gpu_moe_run(&apart, k.x, k.ids, k.weights, k.n);
            float *want = add_apart(b, &l, k.x, sum, k.n);
            gpu_moe_check(&among[0], &k, want, cases[i].bound);
            for (size_t r = 0; r < N_RUNNERS; r++) {
                float *out = gpu_moe_run(&among[r], k.x, k.ids, k.weights, k.n);
                moe_same_bits(out, want, (size_t)k.n * cases[i].hidden, runners[r]);
                free(out);
            }
            free(sum);
            free(want);
            gpu_moe_batch_free(&k);
        }
        for (size_t r = 0; r < N_RUNNERS; r++) gpu_moe_release(&among[r]);
        gpu_moe_release(&apart);
        moe_free(&l);
    }
    gpu_close(b);
}

/* Shapes that cannot have a shared expert among the others say so. */
static void test_shared_refused(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    const nbi_moe_shape good = {.n_experts = 4,
                                .top_k = 2,
                                .hidden = 64,
                                .inter = 32,
                                .kind_gate_up = NBI_WEIGHT_NVFP4,
                                .kind_down = NBI_WEIGHT_NVFP4,
                                .n_shared = 1};
    nbi_moe_shape bad[4] = {good, good, good, good};
    bad[0].w4a4 = true;
    bad[1].kind_down = NBI_WEIGHT_F32;
    bad[2].top_k = 32, bad[2].n_experts = 64;
    bad[3].n_experts = 1024;
    for (const nbi_moe_runner_ops *const *r = nbi_moe_runners(); *r; r++) {
        char why[256] = "";
        bool known = strcmp("cutlass", (*r)->name) == 0;
        for (size_t i = 0; i < N_RUNNERS; i++) known = known || !strcmp(runners[i], (*r)->name);
        assert_int_equal((*r)->supports(b, &good, why, sizeof why), known);
        for (int i = 0; i < 4; i++) {
            assert_false((*r)->supports(b, &bad[i], why, sizeof why));
            if (known) assert_non_null(strstr(why, "shared"));
        }
    }
    gpu_close(b);
}

/* What is not finite stays in its row: x of one row, a NaN scale of one expert (C63). */
static void test_not_finite(void **state)
{
    (void)state;
    enum { N = 4, K = 1, H = 64, I = 48 };
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 2, K, H, I, false);
    gpu_moe_batch k = gpu_moe_batch_make(&l, N);
    const int32_t mixed[N] = {1, 0, 1, 0};
    memcpy(k.ids, mixed, sizeof mixed);
    for (size_t r = 0; r < N_RUNNERS; r++) {
        gpu_moe p = gpu_moe_prepare(b, runners[r], &l);
        float *want = gpu_moe_run(&p, k.x, k.ids, k.weights, N);
        const float kept = k.x[2 * H + 5];
        const float bad[] = {NAN, INFINITY, -INFINITY};
        for (int i = 0; i < 3; i++) {
            k.x[2 * H + 5] = bad[i];
            float *out = gpu_moe_run(&p, k.x, k.ids, k.weights, N);
            moe_same_bits(out, want, 2 * H, "rows before");
            moe_same_bits(out + 3 * H, want + 3 * H, H, "row behind");
            bool finite = true;
            for (int j = 0; j < H; j++) finite = finite && isfinite(out[2 * H + j]);
            assert_false(finite);
            free(out);
        }
        k.x[2 * H + 5] = kept;
        gpu_moe_release(&p);
        uint8_t *scale = (uint8_t *)l.gate[0].scales;
        const uint8_t kept_scale = scale[5];
        scale[5] = 0x7f;
        p = gpu_moe_prepare(b, runners[r], &l);
        float *out = gpu_moe_run(&p, k.x, k.ids, k.weights, N);
        for (int t = 0; t < N; t += 2) moe_same_bits(out + t * H, want + t * H, H, "other expert");
        for (int t = 1; t < N; t += 2) assert_true(isnan(out[t * H]));
        scale[5] = kept_scale;
        free(out);
        free(want);
        gpu_moe_release(&p);
    }
    gpu_moe_batch_free(&k);
    moe_free(&l);
    gpu_close(b);
}

static void test_names(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&gpu_moe_limits);
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
                 {"cuda_stream", "cuda_stream", NULL},
                 {"cuda_grouped", "cuda_grouped", NULL},
                 {"flashinfer_cutlass", CUTLASS, NULL},
                 {"cutlass", CUTLASS, NULL},
                 {"triton", "cuda_grouped", NULL},
                 {"deep_gemm", "cuda_grouped", NULL},
                 {"marlin", "cuda_grouped", NULL},
                 {"cuda_masked", "cuda_masked", NULL},
                 {"flashinfer_cutedsl", "cuda_masked", NULL},
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
    shape.inter = 36;
    assert_int_equal(nbi_moe_runner_choose(&ops, "auto", b, &shape, &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "36 x 64"));
    gpu_close(b);
}

/* The capacity: a step of any size fits, memory stays within bounds and grows with the rows. */
static void test_masked_memory(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    const nbi_moe_runner_ops *ops = NULL;
    nb_error err = {0};
    static const struct {
        uint32_t experts, hidden, inter;
    } shapes[] = {{8, 64, 32}, {128, 2048, 768}, {256, 6144, 2048}, {1024, 8192, 2048}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const nbi_moe_shape s = {.n_experts = shapes[i].experts,
                                 .top_k = 8,
                                 .hidden = shapes[i].hidden,
                                 .inter = shapes[i].inter,
                                 .kind_gate_up = NBI_WEIGHT_NVFP4,
                                 .kind_down = NBI_WEIGHT_NVFP4,
                                 .w4a4 = true};
        assert_int_equal(nbi_moe_runner_choose(&ops, "cuda_masked", b, &s, &err), NB_OK);
        size_t before = 0;
        for (uint32_t rows = 1; rows <= 8192; rows *= 2) {
            const size_t bytes = ops->workspace_bytes(b, &s, rows);
            assert_true(bytes >= before);
            before = bytes;
        }
        assert_int_equal(ops->workspace_bytes(b, &s, 129), before); /* passes of at most 128 */
        assert_true(before <= ((size_t)1 << 30));
    }
    gpu_close(b);
}

/* All runners but cutlass are of one numerics class, which is what this file shows. */
static void test_class(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    const nbi_moe_shape s = {.n_experts = 4,
                             .top_k = 2,
                             .hidden = 64,
                             .inter = 32,
                             .kind_gate_up = NBI_WEIGHT_NVFP4,
                             .kind_down = NBI_WEIGHT_NVFP4};
    uint32_t n = 0;
    for (const nbi_moe_runner_ops *const *r = nbi_moe_runners(); *r; r++) {
        char why[256];
        if (!(*r)->supports(b, &s, why, sizeof why)) continue;
        if (strcmp((*r)->name, "cutlass") == 0) {
            assert_string_equal((*r)->numerics, "cutlass");
            continue;
        }
        n++;
        assert_string_equal((*r)->numerics, "cuda");
        bool shown = false;
        for (size_t i = 0; i < N_RUNNERS; i++) shown = shown || !strcmp(runners[i], (*r)->name);
        assert_true(shown);
    }
    assert_int_equal(n, N_RUNNERS);
    gpu_close(b);
}

static void test_refusals(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&gpu_moe_limits);
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

/* ---------------------------------------------------------------- speed */

#if NBI_CUDA_EMULATED
#define BENCH_RUNS 2u
#define BENCH_ROWS 16u
#else
#define BENCH_RUNS 48u
#define BENCH_ROWS 8192u
#endif

typedef struct bench_shape {
    const char *name;
    uint32_t experts, top_k, hidden, inter;
} bench_shape;

/* A layer of random experts that share their bytes on the host; on the device each has its own. */
typedef struct bench_layer {
    moe_layer one;
    nbi_matrix *views;
    nbi_moe_experts e;
} bench_layer;

static void bench_make(bench_layer *l, const bench_shape *s, bool w4a4)
{
    const uint32_t n = s->experts;
    moe_make(&l->one, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 1, 1, s->hidden, s->inter, w4a4);
    l->views = calloc(3 * (size_t)n, sizeof *l->views);
    for (uint32_t i = 0; i < n; i++) {
        l->views[i] = l->one.gate[0].m;
        l->views[n + i] = l->one.up[0].m;
        l->views[2 * n + i] = l->one.down[0].m;
    }
    l->e = l->one.e;
    l->e.shape.n_experts = n;
    l->e.shape.top_k = s->top_k;
    l->e.gate = l->views;
    l->e.up = l->views + n;
    l->e.down = l->views + 2 * n;
}

/* Calls of one bench: run i uses layer i % n_layers and its own routing. */
typedef struct bench {
    nbi_backend *b;
    const nbi_moe_runner_ops *ops;
    nbi_moe_layer *layers[2];
    gpu_buffer x, ids, weights, out;
    void *ws;
    nbi_moe_shape shape;
    uint32_t rows, runs;
    nbi_batch host;
    uint32_t pass;
} bench;

/* One step of all runs, as a model makes it: recorded the second time, replayed from then on. */
static void bench_step(void *arg)
{
    bench *k = arg;
    const nbi_batch *device = NULL;
    nb_error err = {0};
    if (k->b->ops->step_begin(k->b, &k->host, k->pass, &device)) {
        for (uint32_t i = 0; i < k->runs; i++) {
            const int32_t *ids = k->ids.p;
            k->ops->run(k->b, k->layers[i % 2],
                        &(nbi_moe_args){.out = k->out.p,
                                        .x = k->x.p,
                                        .ids = ids + (size_t)i * k->rows * k->shape.top_k,
                                        .weights = k->weights.p,
                                        .n_rows = k->rows,
                                        .workspace = k->ws});
        }
    }
    if (k->b->ops->step_end(k->b, &err) != NB_OK) fail_msg("%s", err.text);
    gpu_sync(k->b);
}

/* Random routings of all runs; returns the distinct experts of a run, on average. */
static double bench_routing(int32_t *ids, uint32_t runs, uint32_t rows, const nbi_moe_shape *s)
{
    uint64_t used = 0;
    unsigned char *seen = malloc(s->n_experts);
    for (uint32_t i = 0; i < runs; i++) {
        memset(seen, 0, s->n_experts);
        for (uint32_t t = 0; t < rows; t++) {
            int32_t *row = ids + ((size_t)i * rows + t) * s->top_k;
            for (uint32_t k = 0; k < s->top_k; k++) {
                bool again;
                do {
                    row[k] = (int32_t)op_below(s->n_experts);
                    again = false;
                    for (uint32_t j = 0; j < k; j++) again |= row[j] == row[k];
                } while (again);
                used += seen[row[k]]++ == 0;
                if (!seen[row[k]]) seen[row[k]] = 1; /* wrapped */
            }
        }
    }
    free(seen);
    return (double)used / runs;
}

static void bench_rows(bench *k, const bench_shape *s, uint32_t rows, double bandwidth)
{
    k->rows = rows;
    k->runs = rows > 256 ? 4 : BENCH_RUNS;
    k->pass++;
    const size_t n_ids = (size_t)k->runs * rows * s->top_k, n_x = (size_t)rows * s->hidden;
    int32_t *ids = malloc(n_ids * sizeof *ids);
    float *x = malloc(n_x * sizeof *x), *weights = malloc((size_t)rows * s->top_k * sizeof *x);
    const double experts = bench_routing(ids, k->runs, rows, &k->shape);
    op_fill(x, n_x, 1);
    for (size_t i = 0; i < (size_t)rows * s->top_k; i++) weights[i] = 1.0f / (float)s->top_k;
    k->x = gpu_floats(k->b, x, n_x);
    k->ids = gpu_bytes(k->b, ids, n_ids * sizeof *ids);
    k->weights = gpu_floats(k->b, weights, (size_t)rows * s->top_k);
    k->out = gpu_poisoned(k->b, n_x * sizeof *x);
    const size_t ws_bytes = k->ops->workspace_bytes(k->b, &k->shape, rows);
    k->ws = k->b->ops->alloc(k->b, ws_bytes);
    assert_non_null(k->ws);
    op_batch steps;
    op_batch_make(&steps, &rows, &rows, 1);
    k->host = steps.b;
    for (int i = 0; i < 3; i++) bench_step(k);
    const double layer = op_time(bench_step, k, 9) / k->runs;
    const double bytes = experts * 3 * s->hidden * s->inter * 9 / 16;
    const double macs = 3.0 * rows * s->top_k * s->hidden * s->inter;
    print_message("%-12s %-16s T=%-5u %9.1f us  %6.1f experts  %7.0f GB/s  %5.1f %% of read  "
                  "%7.1f TFLOP/s\n",
                  s->name, k->ops->name, rows, 1e6 * layer, experts, 1e-9 * bytes / layer,
                  100 * bytes / layer / bandwidth, 2e-12 * macs / layer);
    op_batch_free(&steps);
    gpu_free(&k->x);
    gpu_free(&k->ids);
    gpu_free(&k->weights);
    gpu_free(&k->out);
    k->b->ops->release(k->b, k->ws, ws_bytes);
    free(ids);
    free(x);
    free(weights);
}

/* Runners and the rows that they are meant for. */
typedef struct bench_runner {
    const char *name;
    uint32_t most;
} bench_runner;

static const bench_runner weight_only[] = {
    {"cuda_gemv", 16}, {"cuda_stream", 128}, {"cuda_grouped", 8192}, {"cutlass", 8192}};
static const bench_runner nvfp4_rows[] = {{"cuda_grouped", 8192},
                                          {"cuda_masked_fp4", 512},
                                          {"cuda_grouped_fp4", 8192},
                                          {"cutlass", 8192}};

static void bench_one(nbi_backend *b, const bench_shape *s, const bench_runner *timed,
                      double bandwidth)
{
    static const uint32_t rows[] = {1, 2, 4, 8, 16, 32, 64, 128, 512, 8192};
    bench_layer l;
    bench_make(&l, s, b->w4a4);
    for (int r = 0; r < (NBI_WITH_CUTLASS ? 4 : 3); r++) {
        bench k = {.b = b, .shape = l.e.shape, .pass = (uint32_t)r * 100 + s->inter * 1000};
        nb_error err = {0};
        nbi_moe_runner_choose(&k.ops, timed[r].name, b, &k.shape, &err);
        for (int i = 0; i < 2; i++)
            if (k.ops->prepare(b, &k.layers[i], &l.e, &err) != NB_OK) fail_msg("%s", err.text);
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            if (rows[i] <= timed[r].most && rows[i] <= BENCH_ROWS)
                bench_rows(&k, s, rows[i], bandwidth);
        for (int i = 0; i < 2; i++) k.ops->release(b, &k.layers[i]);
    }
    free(l.views);
    moe_free(&l.one);
}

/* One MoE layer of real shapes, many in a row in one recorded step: two layers of weights, other
 * experts each time. Steps of more than 256 rows are not recorded. */
static void run_bench(void)
{
#if NBI_CUDA_EMULATED
    static const bench_shape shapes[] = {{"tiny", 8, 2, 64, 32}};
#else
    static const bench_shape shapes[] = {{"30b-a3b", 128, 8, 2048, 768},
                                         {"glm-5/tp8", 256, 8, 6144, 256},
                                         {"4.7-flash", 64, 4, 2048, 1536}};
#endif
    nbi_limits wide = gpu_moe_limits;
    wide.max_rows = BENCH_ROWS;
    wide.max_context = BENCH_ROWS;
    for (int w4a4 = 0; w4a4 < 2; w4a4++) {
        nbi_backend *b = gpu_open_graphs(&wide, w4a4);
        const double bandwidth = gpu_bandwidth(b, NBI_CUDA_EMULATED ? 1u << 16 : (size_t)4 << 30);
        print_message("NVFP4 experts, %s\n", w4a4 ? "NVFP4 activations" : "weight-only");
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            bench_one(b, &shapes[i], w4a4 ? nvfp4_rows : weight_only, bandwidth);
        gpu_close(b);
    }
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) {
        run_bench();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),     cmocka_unit_test(test_w4a4),
        cmocka_unit_test(test_bits),       cmocka_unit_test(test_routings),
        cmocka_unit_test(test_not_finite), cmocka_unit_test(test_names),
        cmocka_unit_test(test_many_rows),  cmocka_unit_test(test_masked_memory),
        cmocka_unit_test(test_class),      cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_shared),     cmocka_unit_test(test_shared_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
