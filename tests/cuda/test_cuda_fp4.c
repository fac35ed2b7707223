/* NVFP4 products: the layout of the instruction of SM120 and of what stands in for it; runners made
 * of them against the float64 oracle, and the bits of a row over batches and runners. */
#include "cuda/moe_gpu.h"

#include "backend/cuda/fp4_probe.h"

/* ---------------------------------------------------------------- single products */

enum { ROWS = 16, COLUMNS = 8, DEPTH = 64 };

/* Matrices of a product, and their registers. */
typedef struct product {
    uint8_t a[ROWS][DEPTH], b[COLUMNS][DEPTH]; /* codes */
    uint8_t scale_a[ROWS][DEPTH / 16], scale_b[COLUMNS][DEPTH / 16];
    float d[ROWS][COLUMNS];
} product;

typedef struct registers {
    float d[32][4];
    uint32_t a[32][4], b[32][2], scale_a[32], scale_b[32];
} registers;

static const float e2m1[16] = {0,    0.5f,  1,  1.5f,  2,  3,  4,  6,
                               -0.f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

static double ue4m3(uint8_t x)
{
    if (x == 0x7f) return NAN;
    return x >> 3 ? ldexp(8 + (x & 7), (x >> 3) - 10) : ldexp(x, -9);
}

/* As the PTX ISA has it, element by element: "Matrix fragments for mma.m16n8k64", and for scales
 * the threads that thread-id 0 selects. Lanes that are not to be read hold NaN. */
static void to_registers(registers *r, const product *p)
{
    memset(r, 0, sizeof *r);
    for (int lane = 0; lane < 32; lane++) {
        const int group = lane / 4, thread = lane % 4;
        for (int i = 0; i < 32; i++) {
            const int row = i < 8 || (i >= 16 && i < 24) ? group : group + 8;
            const int col = thread * 8 + (i & 7) + (i >= 16 ? 32 : 0);
            r->a[lane][i / 8] |= (uint32_t)p->a[row][col] << 4 * (i & 7);
        }
        for (int i = 0; i < 16; i++) {
            const int row = thread * 8 + (i & 7) + (i >= 8 ? 32 : 0);
            r->b[lane][i / 8] |= (uint32_t)p->b[group][row] << 4 * (i & 7);
        }
        for (int i = 0; i < 4; i++)
            r->d[lane][i] = p->d[i < 2 ? group : group + 8][thread * 2 + (i & 1)];
        r->scale_a[lane] = r->scale_b[lane] = 0x7f7f7f7fu;
        if (thread < 2) memcpy(&r->scale_a[lane], p->scale_a[group + 8 * thread], 4);
        if (thread < 1) memcpy(&r->scale_b[lane], p->scale_b[group], 4);
    }
}

static float *run_products(nbi_backend *b, const registers *r, uint32_t n, bool by_f16)
{
    float *d = malloc(n * sizeof r->d);
    uint32_t *rest = malloc(n * 32 * 8 * sizeof *rest);
    uint32_t *at[4] = {rest, rest + n * 128, rest + n * 192, rest + n * 224};
    for (uint32_t i = 0; i < n; i++) {
        memcpy(d + i * 128, r[i].d, sizeof r->d);
        memcpy(at[0] + i * 128, r[i].a, sizeof r->a);
        memcpy(at[1] + i * 64, r[i].b, sizeof r->b);
        memcpy(at[2] + i * 32, r[i].scale_a, sizeof r->scale_a);
        memcpy(at[3] + i * 32, r[i].scale_b, sizeof r->scale_b);
    }
    gpu_buffer gd = gpu_floats(b, d, n * 128);
    gpu_buffer ga = gpu_bytes(b, at[0], n * sizeof r->a), gb = gpu_bytes(b, at[1], n * sizeof r->b);
    gpu_buffer sa = gpu_bytes(b, at[2], n * sizeof r->scale_a);
    gpu_buffer sb = gpu_bytes(b, at[3], n * sizeof r->scale_b);
    nbi_cuda_fp4_probe(b, &(nbi_cuda_fp4_registers){.d = gd.p,
                                                    .a = ga.p,
                                                    .b = gb.p,
                                                    .scale_a = sa.p,
                                                    .scale_b = sb.p,
                                                    .n = n,
                                                    .by_f16 = by_f16});
    free(d);
    free(rest);
    float *got = gpu_read(&gd);
    gpu_free(&gd);
    gpu_free(&ga);
    gpu_free(&gb);
    gpu_free(&sa);
    gpu_free(&sb);
    return got;
}

static void make_product(product *p)
{
    for (int k = 0; k < DEPTH; k++) {
        for (int i = 0; i < ROWS; i++) p->a[i][k] = (uint8_t)op_below(16);
        for (int i = 0; i < COLUMNS; i++) p->b[i][k] = (uint8_t)op_below(16);
    }
    for (int q = 0; q < DEPTH / 16; q++) {
        for (int i = 0; i < ROWS; i++) p->scale_a[i][q] = (uint8_t)op_below(0x7f);
        for (int i = 0; i < COLUMNS; i++) p->scale_b[i][q] = (uint8_t)op_below(0x7f);
    }
    op_fill(&p->d[0][0], ROWS * COLUMNS, 100);
}

/* What a product is, and the size of what was added up. */
static double want_product(const product *p, int row, int col, double *size)
{
    double sum = (double)p->d[row][col];
    *size = fabs(sum);
    for (int k = 0; k < DEPTH; k++) {
        const double v = (double)e2m1[p->a[row][k]] * (double)e2m1[p->b[col][k]] *
                         ue4m3(p->scale_a[row][k / 16]) * ue4m3(p->scale_b[col][k / 16]);
        sum += v;
        *size += fabs(v);
    }
    return sum;
}

/* Each value of d, whose place is that of the PTX ISA. bound: of the error, against the size. */
static void check_product(const product *p, const float *d, double bound, const char *what)
{
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            const int row = i < 2 ? lane / 4 : lane / 4 + 8, col = lane % 4 * 2 + (i & 1);
            double size;
            const double want = want_product(p, row, col, &size);
            const double got = (double)d[lane * 4 + i];
            if (isnan(want) ? !isnan(got) : !(fabs(got - want) <= bound * size))
                fail_msg("%s: [%d, %d] is %.9g, expected %.9g", what, row, col, got, want);
        }
}

/* How far a device's own sums may be off: a wrong place is off by the size itself. */
#if NBI_CUDA_EMULATED
#define PRODUCT_BOUND 1.2e-7
#else
#define PRODUCT_BOUND 1e-3
#endif

static void test_products(void **state)
{
    (void)state;
    enum { COUNT = 24 };
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    product *p = malloc(COUNT * sizeof *p);
    registers *r = malloc(COUNT * sizeof *r);
    for (int i = 0; i < COUNT; i++) {
        make_product(&p[i]);
        if (i == 1) p[i].scale_a[3][2] = p[i].scale_b[5][1] = 0x7f;
        to_registers(&r[i], &p[i]);
    }
    for (int by_f16 = 0; by_f16 < 2; by_f16++) {
        float *d = run_products(b, r, COUNT, by_f16);
        for (int i = 0; i < COUNT; i++)
            check_product(&p[i], d + i * 128, by_f16 ? 5e-7 : PRODUCT_BOUND,
                          by_f16 ? "by FP16" : "product");
        free(d);
    }
    free(p);
    free(r);
    gpu_close(b);
}

/* One column of A and row of B at a time: nothing is rounded, on no device. */
static void test_places(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&gpu_moe_limits);
    product *p = malloc(DEPTH * sizeof *p);
    registers *r = malloc(DEPTH * sizeof *r);
    for (int i = 0; i < DEPTH; i++) {
        make_product(&p[i]);
        for (int k = 0; k < DEPTH; k++) {
            for (int row = 0; row < ROWS && k != i; row++) p[i].a[row][k] = 0;
            for (int col = 0; col < COLUMNS && k != i; col++) p[i].b[col][k] = 0;
        }
        memset(p[i].d, 0, sizeof p[i].d);
        to_registers(&r[i], &p[i]);
    }
    for (int by_f16 = 0; by_f16 < 2; by_f16++) {
        float *d = run_products(b, r, DEPTH, by_f16);
        for (int i = 0; i < DEPTH; i++)
            check_product(&p[i], d + i * 128, 0, by_f16 ? "places, by FP16" : "places");
        free(d);
    }
    free(p);
    free(r);
    gpu_close(b);
}

/* ---------------------------------------------------------------- runners */

static const char *const runners[] = {"cuda_masked_fp4", "cuda_grouped_fp4"};
#define N_RUNNERS 2

/* Rows first ... first + n - 1 of the batch: out [n][hidden] (malloc). */
static float *run(const gpu_moe *p, const gpu_moe_batch *b, uint32_t first, uint32_t n)
{
    const nbi_moe_shape *s = &p->l->e.shape;
    const size_t pair = (size_t)first * s->top_k;
    return gpu_moe_run(p, b->x + (size_t)first * s->hidden, b->ids + pair, b->weights + pair, n);
}

/* The bound leaves room for a rounding of h that flips: a float32 and a double h may lie on two
 * sides of a tie. */
#define BOUND 1e-2

/* Sides that end within a tile, a k-tile pair and a chunk; each runner's bits are the other's. */
static void test_oracle(void **state)
{
    (void)state;
    static const uint32_t rows[] = {1, 3, 26};
    static const uint32_t sizes[][3] = {
        {96, 64, 5}, {320, 144, 5}, {512, 272, 5}, {16, 48, 5}, {32, 16, 300}}; /* experts last */
    nbi_backend *b = gpu_open_w4a4(&gpu_moe_limits);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        moe_layer l;
        moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, sizes[i][2], 3, sizes[i][0], sizes[i][1],
                 true);
        for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
            gpu_moe_batch x = gpu_moe_batch_make(&l, rows[k]);
            float *want = NULL;
            for (size_t r = 0; r < N_RUNNERS; r++) {
                gpu_moe p = gpu_moe_prepare(b, runners[r], &l);
                float *out = run(&p, &x, 0, x.n);
                gpu_moe_check(&p, &x, out, BOUND);
                if (want) moe_same_bits(out, want, (size_t)x.n * sizes[i][0], runners[r]);
                free(want);
                want = out;
                gpu_moe_release(&p);
            }
            free(want);
            gpu_moe_batch_free(&x);
        }
        moe_free(&l);
    }
    gpu_close(b);
}

/* A row in steps of every size of tile, in both runners, and among several tiles and passes. */
static void test_bits(void **state)
{
    (void)state;
    enum { N = 150, TOP = 2, H = 80, I = 32 };
    nbi_backend *b = gpu_open_w4a4(&gpu_moe_limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 3, TOP, H, I, true);
    gpu_moe_batch k = gpu_moe_batch_make(&l, N);
    for (uint32_t t = 0; t < N; t++) { /* 148, 120 and 30 pairs */
        k.ids[TOP * t] = t % 75 ? 2 : -1;
        k.ids[TOP * t + 1] = t % 5 ? 1 : 0;
    }
    gpu_moe p = gpu_moe_prepare(b, runners[0], &l);
    float *want = run(&p, &k, 0, 1);
    want = realloc(want, N * H * sizeof *want);
    for (uint32_t t = 1; t < N; t++) {
        float *one = run(&p, &k, t, 1);
        memcpy(want + t * H, one, H * sizeof *one);
        free(one);
    }
    gpu_moe_release(&p);
    static const uint32_t sizes[] = {2, 9, 17, 40, 60, N}; /* tiles of 16, 40, 64, 128 rows */
    for (size_t r = 0; r < N_RUNNERS; r++) {
        p = gpu_moe_prepare(b, runners[r], &l);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            const uint32_t n = sizes[i], t = op_below(N - n + 1);
            float *out = run(&p, &k, t, n);
            moe_same_bits(out, want + t * H, (size_t)n * H, runners[r]);
            free(out);
        }
        gpu_moe_release(&p);
    }
    free(want);
    gpu_moe_batch_free(&k);
    moe_free(&l);
    gpu_close(b);
}

/* The same expert twice in a row, no expert at all, ids that are none. */
static void test_routings(void **state)
{
    (void)state;
    enum { N = 19, TOP = 2, H = 64, I = 32 };
    nbi_backend *b = gpu_open_w4a4(&gpu_moe_limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 5, TOP, H, I, true);
    static const int32_t patterns[][2] = {{3, -1}, {-1, 0}, {2, 2}, {-1, -1}, {4, 1}};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        gpu_moe_batch k = gpu_moe_batch_make(&l, N);
        for (uint32_t t = 0; t < N; t++) memcpy(k.ids + t * TOP, patterns[i], sizeof patterns[i]);
        for (size_t r = 0; r < N_RUNNERS; r++) {
            gpu_moe p = gpu_moe_prepare(b, runners[r], &l);
            float *out = run(&p, &k, 0, N);
            gpu_moe_check(&p, &k, out, BOUND);
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

/* What is not finite stays in its row, and is seen there: x of one row, a NaN scale of one expert.
 */
static void test_not_finite(void **state)
{
    (void)state;
    enum { N = 4, H = 64, I = 48 };
    nbi_backend *b = gpu_open_w4a4(&gpu_moe_limits);
    moe_layer l;
    moe_make(&l, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, 2, 1, H, I, true);
    gpu_moe_batch k = gpu_moe_batch_make(&l, N);
    const int32_t mixed[N] = {1, 0, 1, 0};
    memcpy(k.ids, mixed, sizeof mixed);
    for (size_t r = 0; r < N_RUNNERS; r++) {
        gpu_moe p = gpu_moe_prepare(b, runners[r], &l);
        float *want = run(&p, &k, 0, N);
        const float kept = k.x[2 * H + 5];
        const float bad[] = {NAN, INFINITY, -INFINITY};
        for (int i = 0; i < 3; i++) {
            k.x[2 * H + 5] = bad[i];
            float *out = run(&p, &k, 0, N);
            moe_same_bits(out, want, 2 * H, "rows before");
            moe_same_bits(out + 3 * H, want + 3 * H, H, "row behind");
            for (int j = 0; j < H; j++) assert_true(isnan(out[2 * H + j]));
            free(out);
        }
        k.x[2 * H + 5] = kept;
        gpu_moe_release(&p);
        uint8_t *scale = (uint8_t *)l.gate[0].scales;
        const uint8_t kept_scale = scale[5];
        scale[5] = 0x7f;
        p = gpu_moe_prepare(b, runners[r], &l);
        float *out = run(&p, &k, 0, N);
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

/* A layer with an expert that has no input scale, or is not NVFP4, has the products of the runner
 * without FP4, and its bits. */
static void test_other_layers(void **state)
{
    (void)state;
    static const char *const plain[] = {"cuda_masked", "cuda_grouped"};
    enum { N = 13, TOP = 2, H = 64, I = 48 };
    nbi_backend *b = gpu_open_w4a4(&gpu_moe_limits);
    for (int i = 0; i < 3; i++) {
        moe_layer l;
        moe_make(&l, i < 2 ? NBI_WEIGHT_NVFP4 : NBI_WEIGHT_BF16, NBI_WEIGHT_NVFP4, 3, TOP, H, I,
                 true);
        if (i < 2) l.views[i ? 8 : 4].input_scale = 0; /* down of expert 2, up of expert 1 */
        gpu_moe_batch k = gpu_moe_batch_make(&l, N);
        for (size_t r = 0; r < N_RUNNERS; r++) {
            gpu_moe p = gpu_moe_prepare(b, runners[r], &l),
                    other = gpu_moe_prepare(b, plain[r], &l);
            float *out = run(&p, &k, 0, N), *want = run(&other, &k, 0, N);
            moe_same_bits(out, want, N * H, runners[r]);
            free(out);
            free(want);
            gpu_moe_release(&p);
            gpu_moe_release(&other);
        }
        gpu_moe_batch_free(&k);
        moe_free(&l);
    }
    gpu_close(b);
}

/* Who gets these runners, by their names and by names of other engines. */
static void test_names(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open_w4a4(&gpu_moe_limits);
    nbi_moe_shape s = {.n_experts = 4,
                       .top_k = 2,
                       .hidden = 64,
                       .inter = 32,
                       .kind_gate_up = NBI_WEIGHT_NVFP4,
                       .kind_down = NBI_WEIGHT_NVFP4,
                       .w4a4 = true};
    static const struct {
        const char *name, *elsewhere, *sm120, *weight_only; /* the last on SM120; NULL: refused */
    } names[] = {
        {"auto", "cuda", "cuda", "cuda"},
        {"cuda_masked_fp4", "cuda_masked_fp4", "cuda_masked_fp4", NULL},
        {"cuda_grouped_fp4", "cuda_grouped_fp4", "cuda_grouped_fp4", NULL},
        {"flashinfer_cutedsl", "cuda_masked", "cuda_masked_fp4", "cuda_masked"},
#if NBI_WITH_CUTLASS
        {"flashinfer_cutlass", "cutlass", "cutlass", "cutlass"},
        {"cutlass", "cutlass", "cutlass", "cutlass"},
#else
        {"flashinfer_cutlass", "cuda_grouped", "cuda_grouped_fp4", "cuda_grouped"},
        {"cutlass", "cuda_grouped", "cuda_grouped_fp4", "cuda_grouped"},
#endif
        {"marlin", "cuda_grouped", "cuda_grouped", "cuda_grouped"},
    };
    const int sm = b->sm;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (int where = 0; where < 3; where++) {
            const nbi_moe_runner_ops *ops = NULL;
            nb_error err = {0};
            b->sm = where ? 120 : 90;
            s.w4a4 = where < 2;
            const char *want = where == 0   ? names[i].elsewhere
                               : where == 1 ? names[i].sm120
                                            : names[i].weight_only;
            const nb_status st = nbi_moe_runner_choose(&ops, names[i].name, b, &s, &err);
            assert_int_equal(st, want ? NB_OK : NB_UNSUPPORTED);
            if (want)
                assert_string_equal(ops->name, want);
            else
                assert_non_null(strstr(err.text, "--activations w4a4"));
        }
    b->sm = sm;
    gpu_close(b);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) return 0; /* test_cuda_moe times them */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),     cmocka_unit_test(test_places),
        cmocka_unit_test(test_oracle),       cmocka_unit_test(test_bits),
        cmocka_unit_test(test_routings),     cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_other_layers), cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
