/* Number formats against formulas of their own: values by ldexp() in double, rounding by search for
 * the nearest value. */
#include "cmocka_all.h"

#include <math.h>

#include "base/numfmt.h"

/* Value of a small float in double: bias, mantissa bits; the caller handles infinity and NaN. */
static double value_of(unsigned code, int exponent_bits, int mantissa_bits, int bias)
{
    unsigned mantissa = code & ((1u << mantissa_bits) - 1);
    unsigned exponent = code >> mantissa_bits & ((1u << exponent_bits) - 1);
    double sign = code >> (mantissa_bits + exponent_bits) & 1 ? -1.0 : 1.0;
    if (exponent == 0) return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexp(1.0 + mantissa / ldexp(1.0, mantissa_bits), (int)exponent - bias);
}

/* Index of the value nearest to |x| among n rising values, ties to the even index. */
static unsigned nearest(const double *values, unsigned n, double x)
{
    x = fabs(x);
    unsigned low = 0, high = n - 1;
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (values[middle] <= x) {
            low = middle;
        } else {
            high = middle;
        }
    }
    double below = x - values[low], above = values[high] - x;
    if (below < above) return low;
    if (above < below) return high;
    return low % 2 == 0 ? low : high;
}

/* Float32 patterns that cover all signs, exponents and leading mantissa bits, with low bits at and
 * around the ties. */
static const uint32_t low_bits[] = {0, 1, 0x7ff, 0x800, 0x801, 0xfff, 0x5a5};
#define N_LOW (sizeof low_bits / sizeof *low_bits)

static void e4m3_values(void **state)
{
    (void)state;
    for (unsigned v = 0; v < 256; v++) {
        if ((v & 0x7f) == 0x7f) {
            assert_true(isnan(nbi_e4m3_f32((uint8_t)v)));
            continue;
        }
        assert_true((double)nbi_e4m3_table[v] == value_of(v, 4, 3, 7));
        assert_int_equal(!!signbit(nbi_e4m3_table[v]), v >> 7);
        assert_int_equal(nbi_f32_e4m3(nbi_e4m3_table[v]), v);
    }
    assert_true(nbi_e4m3_table[0x7e] == NBI_E4M3_MAX);
}

static void e4m3_rounds_to_nearest_even(void **state)
{
    (void)state;
    double values[127];
    for (unsigned v = 0; v < 127; v++) values[v] = value_of(v, 4, 3, 7);
    for (uint32_t top = 0; top < 1u << 20; top++) {
        for (size_t i = 0; i < N_LOW; i++) {
            float f = nbi_bits_f32(top << 12 | low_bits[i]);
            uint8_t got = nbi_f32_e4m3(f);
            if (isnan(f)) {
                if (got != 0x7f) fail_msg("NaN gave %02x", got);
                continue;
            }
            unsigned want = fabsf(f) >= 448.0f ? 126 : nearest(values, 127, (double)f);
            want |= signbit(f) ? 0x80u : 0;
            if (got != want) fail_msg("%a gave %02x, expected %02x", (double)f, got, want);
        }
    }
}

static void e2m1_values_and_rounding(void **state)
{
    (void)state;
    double values[8];
    for (unsigned v = 0; v < 16; v++) {
        assert_true((double)nbi_e2m1_table[v] == value_of(v, 2, 1, 1));
        assert_int_equal(!!signbit(nbi_e2m1_table[v]), v >> 3);
        if (v < 8) values[v] = value_of(v, 2, 1, 1);
        if (v != 8) assert_int_equal(nbi_f32_e2m1(nbi_e2m1_table[v]), v);
    }
    assert_int_equal(nbi_f32_e2m1(-0.0f), 0);
    for (uint32_t top = 0; top < 1u << 20; top++) {
        for (size_t i = 0; i < N_LOW; i++) {
            float f = nbi_bits_f32(top << 12 | low_bits[i]);
            if (isnan(f)) continue;
            unsigned want = fabsf(f) >= 6.0f ? 7 : nearest(values, 8, (double)f);
            want |= f < 0 ? 8u : 0;
            uint8_t got = nbi_f32_e2m1(f);
            if (got != want) fail_msg("%a gave %x, expected %x", (double)f, got, want);
        }
    }
}

static void f16_values(void **state)
{
    (void)state;
    for (unsigned v = 0; v < 65536; v++) {
        float f = nbi_f16_f32((uint16_t)v);
        unsigned exponent = v >> 10 & 31, mantissa = v & 1023;
        if (exponent == 31) {
            assert_int_equal(!!isnan(f), mantissa != 0);
            assert_int_equal(!!isinf(f), mantissa == 0);
            if (mantissa) assert_true(isnan(nbi_f16_f32(nbi_f32_f16(f))));
        } else {
            assert_true((double)f == value_of(v, 5, 10, 15));
        }
        assert_int_equal(!!signbit(f), v >> 15);
        if (exponent != 31 || mantissa == 0) assert_int_equal(nbi_f32_f16(f), v);
    }
}

static void f16_rounds_to_nearest_even(void **state)
{
    (void)state;
    static double values[0x7c01];
    for (unsigned v = 0; v < 0x7c00; v++) values[v] = value_of(v, 5, 10, 15);
    values[0x7c00] = 65536.0; /* where infinity stands for rounding */
    for (uint32_t top = 0; top < 1u << 20; top++) {
        for (size_t i = 0; i < N_LOW; i++) {
            float f = nbi_bits_f32(top << 12 | low_bits[i]);
            if (isnan(f)) continue;
            unsigned want = fabsf(f) >= 65536.0f ? 0x7c00 : nearest(values, 0x7c01, (double)f);
            want |= signbit(f) ? 0x8000u : 0;
            uint16_t got = nbi_f32_f16(f);
            if (got != want) fail_msg("%a gave %04x, expected %04x", (double)f, got, want);
        }
    }
}

static void bf16_values_and_rounding(void **state)
{
    (void)state;
    for (unsigned v = 0; v < 65536; v++) {
        float f = nbi_bf16_f32((uint16_t)v);
        if (isnan(f)) {
            assert_true((v & 0x7f80) == 0x7f80 && (v & 0x7f));
            assert_true(isnan(nbi_bf16_f32(nbi_f32_bf16(f))));
            continue;
        }
        assert_int_equal(nbi_f32_bf16(f), v);
        if ((v & 0x7f80) == 0x7f80) continue;
        assert_true((double)f == value_of(v, 8, 7, 127));
        /* Between this value and the next larger in magnitude: the half goes to the even one. */
        uint32_t bits = (uint32_t)v << 16;
        assert_int_equal(nbi_f32_bf16(nbi_bits_f32(bits | 0x7fff)), v);
        assert_int_equal(nbi_f32_bf16(nbi_bits_f32(bits | 0x8000)), v + (v & 1));
        assert_int_equal(nbi_f32_bf16(nbi_bits_f32(bits | 0x8001)), v + 1);
    }
    /* A NaN whose bits are all below the cut stays one. */
    assert_true(isnan(nbi_bf16_f32(nbi_f32_bf16(nbi_bits_f32(0x7f800001)))));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3_values),
        cmocka_unit_test(e4m3_rounds_to_nearest_even),
        cmocka_unit_test(e2m1_values_and_rounding),
        cmocka_unit_test(f16_values),
        cmocka_unit_test(f16_rounds_to_nearest_even),
        cmocka_unit_test(bf16_values_and_rounding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
