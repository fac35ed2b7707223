/* NVFP4 products: the layout of the instruction of SM120 and of what stands in for it. */
#include "cuda/gpu_util.h"
#include "moe_util.h"

#include "backend/cuda/fp4_probe.h"

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

/* ---------------------------------------------------------------- single products */

#define M 16
#define N 8
#define K 64

/* Matrices of a product, and their registers. */
typedef struct product {
    uint8_t a[M][K], b[N][K]; /* codes */
    uint8_t scale_a[M][K / 16], scale_b[N][K / 16];
    float d[M][N];
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
    for (int k = 0; k < K; k++) {
        for (int i = 0; i < M; i++) p->a[i][k] = (uint8_t)op_below(16);
        for (int i = 0; i < N; i++) p->b[i][k] = (uint8_t)op_below(16);
    }
    for (int q = 0; q < K / 16; q++) {
        for (int i = 0; i < M; i++) p->scale_a[i][q] = (uint8_t)op_below(0x7f);
        for (int i = 0; i < N; i++) p->scale_b[i][q] = (uint8_t)op_below(0x7f);
    }
    op_fill(&p->d[0][0], M * N, 100);
}

/* What a product is, and the size of what was added up. */
static double want_product(const product *p, int row, int col, double *size)
{
    double sum = (double)p->d[row][col];
    *size = fabs(sum);
    for (int k = 0; k < K; k++) {
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
    nbi_backend *b = gpu_open(&limits);
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
    nbi_backend *b = gpu_open(&limits);
    product *p = malloc(K * sizeof *p);
    registers *r = malloc(K * sizeof *r);
    for (int i = 0; i < K; i++) {
        make_product(&p[i]);
        for (int k = 0; k < K; k++) {
            for (int row = 0; row < M && k != i; row++) p[i].a[row][k] = 0;
            for (int col = 0; col < N && k != i; col++) p[i].b[col][k] = 0;
        }
        memset(p[i].d, 0, sizeof p[i].d);
        to_registers(&r[i], &p[i]);
    }
    for (int by_f16 = 0; by_f16 < 2; by_f16++) {
        float *d = run_products(b, r, K, by_f16);
        for (int i = 0; i < K; i++)
            check_product(&p[i], d + i * 128, 0, by_f16 ? "places, by FP16" : "places");
        free(d);
    }
    free(p);
    free(r);
    gpu_close(b);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_places),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
