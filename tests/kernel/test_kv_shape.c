/* Layout of the cache, and E4M3 codes with their scales, against a reader and a writer of their own
 * (operator_util.c). */
#include <float.h>

#include "backend/cpu/cpu_kernels.h"
#include "operator_util.h"

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static void test_sizes(void **state)
{
    (void)state;
    static const struct {
        nbi_dtype dtype;
        uint32_t bytes, head;
    } want[] = {{NBI_F32, 576 * 4, 128 * 4}, {NBI_BF16, 1152, 256}, {NBI_F8_E4M3, 656, 132}};
    for (size_t i = 0; i < 3; i++) {
        const nbi_kv_shape latent = nbi_kv_latent_shape(want[i].dtype, 512, 64);
        const nbi_kv_shape heads = nbi_kv_head_shape(want[i].dtype, 4, 128);
        assert_int_equal(nbi_kv_position_bytes(&latent), want[i].bytes);
        assert_int_equal(nbi_kv_position_bytes(&heads), 4 * want[i].head);
    }
}

/* What nbi_kv_write makes of x, read back by the other reader, is what the other writer makes. */
static void check(nbi_dtype dtype, uint32_t heads, uint32_t width, uint32_t coded, uint32_t pages,
                  const float *x)
{
    const nbi_kv_shape s = coded < width ? nbi_kv_latent_shape(dtype, coded, width - coded)
                                         : nbi_kv_head_shape(dtype, heads, width);
    const op_kv want = op_kv_make(dtype, pages, heads, width, coded, x);
    const op_kv got = op_kv_empty(dtype, pages, heads, width, coded);
    float *row = op_floats(width);
    for (size_t i = 0; i < want.n / width; i++) {
        const size_t page = i / 64 / heads;
        const uint32_t head = i / 64 % heads, slot = i % 64;
        for (uint32_t at = 0, n; at < width; at += n) { /* in pieces */
            n = at >= coded ? 3 : coded - at < NBI_KV_GROUP ? coded - at : NBI_KV_GROUP;
            if (n > width - at) n = width - at;
            nbi_kv_write(&s, got.data, page, head, slot, at, x + i * width + at, n);
        }
        nbi_kv_read(&s, got.data, page, head, slot, row);
        for (uint32_t c = 0; c < width; c++) {
            const double a = op_kv_at(&want, i, c), b = op_kv_at(&got, i, c);
            assert_true(a == b || (isnan(a) && isnan(b)));
            assert_true(a == (double)row[c] || (isnan(a) && isnan(row[c])));
            const float exact = nbi_bf16_f32(nbi_f32_bf16(row[c]));
            if (dtype != NBI_F32) assert_true(isnan(exact) || exact == row[c]);
        }
    }
    op_check(got.data);
    op_check(row);
    op_free(got.data);
    op_free(want.data);
    op_free(row);
}

static void test_write_and_read(void **state)
{
    (void)state;
    static const uint32_t shapes[][3] = {/* heads, width, coded */
                                         {1, 576, 512}, {1, 150, 140}, {1, 21, 13},
                                         {2, 128, 128}, {3, 20, 20},   {1, 300, 300}};
    static const nbi_dtype types[] = {NBI_F32, NBI_BF16, NBI_F8_E4M3};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const uint32_t heads = shapes[i][0], width = shapes[i][1];
        const size_t n = (size_t)2 * heads * 64 * width;
        float *x = op_floats(n);
        for (size_t j = 0; j < n; j++) x[j] = ldexpf(op_normal(), (int)op_below(20) - 10);
        for (int t = 0; t < 3; t++) check(types[t], heads, width, shapes[i][2], 2, x);
        op_free(x);
    }
}

/* Magnitudes from nothing to the largest float, and what is none. */
static void test_hostile_values(void **state)
{
    (void)state;
    enum { D = 128, N = 64 };
    float *x = op_floats(N * D);
    for (int i = 0; i < N; i++)
        for (int c = 0; c < D; c++)
            x[i * D + c] = i == 1 ? 0 : ldexpf(op_uniform(-1, 1), -140 + 5 * (i > 53 ? 53 : i));
    x[2 * D + 5] = INFINITY;
    x[3 * D + 6] = NAN;
    x[4 * D] = FLT_MAX;
    x[5 * D] = 448;
    for (int c = 1; c < D; c++) x[5 * D + c] = 1;
    x[6 * D] = nextafterf(448, 1000);
    check(NBI_F8_E4M3, 1, D, D, 1, x);
    const op_kv kv = op_kv_make(NBI_F8_E4M3, 1, 1, D, D, x);
    for (int c = 0; c < D; c++) {
        assert_true(isnan(op_kv_at(&kv, 2, c)) && isnan(op_kv_at(&kv, 3, c)));
        assert_true(op_kv_at(&kv, 1, c) == 0 && isfinite(op_kv_at(&kv, 4, c)));
    }
    assert_true(op_kv_at(&kv, 5, 0) == 448 && op_kv_at(&kv, 5, 1) == 1);
    op_free(kv.data);
    op_free(x);
}

/* Every code times scales of every size, at every level: exact in BF16. */
static void test_decode(void **state)
{
    (void)state;
    uint8_t codes[256];
    uint16_t out[256 + 1];
    for (int n = 0; n < 256; n++) codes[n] = (uint8_t)n;
    for (nbi_cpu_level level = NBI_CPU_REFERENCE; level <= nbi_cpu_detect(); level++) {
        for (int many = 1; many < 17; many += 15)
            for (int e = NBI_KV_EXP_MIN; e <= NBI_KV_EXP_MAX; e++)
                for (uint32_t from = 0; from < 256; from += 77) {
                    const nbi_cpu_kernels *k = nbi_cpu_kernels_many(level, (uint32_t)many);
                    const uint32_t n = from ? 77 : 256;
                    if (from + n > 256) continue;
                    out[n] = 0x1234;
                    k->codes_bf16(out, codes + from, ldexpf(1, e), n);
                    assert_int_equal(out[n], 0x1234);
                    for (uint32_t i = 0; i < n; i++) {
                        const uint8_t c = codes[from + i];
                        if ((c & 0x7f) == 0x7f) continue;
                        const float want = ldexpf(nbi_e4m3_f32(c), e);
                        assert_int_equal(bits_of(nbi_bf16_f32(out[i])), bits_of(want));
                    }
                }
        const nbi_cpu_kernels *k = nbi_cpu_kernels_of(level);
        k->codes_bf16(out, codes, NAN, 100);
        for (int i = 0; i < 100; i++) assert_true(isnan(nbi_bf16_f32(out[i])));
    }
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_write_and_read),
        cmocka_unit_test(test_hostile_values),
        cmocka_unit_test(test_decode),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
