/* NVFP4 rounding: the fact sheet's vector, every edge, and the field cases about activation scales
 * (C58, C59, C60). */
#include "cmocka_all.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/numfmt.h"
#include "tensor/matrix.h"

/* A block whose first eight values hit every tie. */
static void vector_of_the_fact_sheet(void **state)
{
    static const float w[16] = {0.0625f, 0.1875f, 0.3125f,  0.4375f,  0.625f, 0.875f,
                                1.25f,   1.5f,    -0.0625f, -0.1875f, -0.07f, -0.5f,
                                -0.7f,   -1.0f,   -1.26f,   -1.5f};
    static const uint8_t packed[8] = {0x20, 0x42, 0x64, 0x76, 0xa8, 0xc9, 0xed, 0xff};
    static const float decoded[16] = {0,    .25f,  .25f,   .5f,  .5f,   1,  1,     1.5f,
                                      -0.f, -.25f, -.125f, -.5f, -.75f, -1, -1.5f, -1.5f};
    uint8_t codes[8], scale;
    float global, row[16];
    nb_error err;
    (void)state;
    assert_int_equal(nbi_nvfp4_quantize(w, 1, 16, 2688 * 0x1p-10f, codes, &scale, &global, &err),
                     NB_OK);
    assert_true(global == 0x1p-10f);
    assert_int_equal(scale, 0x78);
    assert_memory_equal(codes, packed, 8);
    nbi_matrix m = {.kind = NBI_WEIGHT_NVFP4,
                    .rows = 1,
                    .cols = 16,
                    .data = codes,
                    .scales = &scale,
                    .global_scale = global};
    nbi_matrix_row(&m, 0, row);
    for (int i = 0; i < 16; i++) assert_true(row[i] == decoded[i]);
    assert_int_equal(nbi_matrix_bytes(&m), 9);
}

/* Every code, every midpoint and its neighbours, both signs, against the rule: nearest, ties to the
 * even code. */
static void rounding_edges(void **state)
{
    (void)state;
    for (int code = 0; code < 7; code++) {
        float low = nbi_e2m1_table[code], high = nbi_e2m1_table[code + 1], mid = (low + high) / 2;
        const float at[3] = {nextafterf(mid, 0), mid, nextafterf(mid, 9)};
        const int expected[3] = {code, code % 2 ? code + 1 : code, code + 1};
        for (int k = 0; k < 3; k++)
            for (int sign = 0; sign < 2; sign++) {
                float x[16] = {0}, scale = 1.0f;
                uint8_t codes[8], byte;
                x[0] = sign ? -at[k] : at[k];
                x[15] = 6; /* block maximum: scale 1 */
                nbi_nvfp4_quantize_row(x, 16, scale, codes, &byte);
                assert_int_equal(byte, 0x38);
                assert_int_equal(codes[0] & 15, expected[k] | (sign ? 8 : 0));
                assert_int_equal(codes[0] & 15, nbi_f32_e2m1(x[0]));
                assert_int_equal(codes[7] >> 4, 7);
            }
    }
}

static void zeros_and_extremes(void **state)
{
    float w[48] = {0}, global;
    uint8_t codes[24], scales[3];
    nb_error err = {0};
    (void)state;
    assert_int_equal(nbi_nvfp4_quantize(w, 3, 16, 0, codes, scales, &global, &err), NB_OK);
    assert_true(global == 1.0f);
    for (int i = 0; i < 3; i++)
        assert_int_equal(scales[i], 0x38); /* a block of zeros has scale 1 */
    for (int i = 0; i < 24; i++) assert_int_equal(codes[i], 0);
    w[0] = 2688; /* global 1: the second block's scale would be 0, the third's 1e-9: both are stored
                    as they must be */
    w[32] = 1e-8f;
    w[33] = -0.0f;
    assert_int_equal(nbi_nvfp4_quantize(w, 3, 16, 0, codes, scales, &global, &err), NB_OK);
    assert_int_equal(scales[0], 0x7e);
    assert_int_equal(scales[1], 0x38);
    assert_int_equal(scales[2], 0x01); /* 2^-9, the smallest */
    assert_int_equal(codes[16], 0);    /* -0 has no sign here */
    assert_int_equal(nbi_nvfp4_quantize(w, 2, 24, 0, codes, scales, &global, &err), NB_INVALID);
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        w[17] = bad[i];
        assert_int_equal(nbi_nvfp4_quantize(w, 3, 16, 1, codes, scales, &global, &err), NB_INVALID);
        assert_non_null(strstr(err.text, "value 17"));
    }
}

/* C58: without a tensor scale a block above 6 * 448 saturates; with 4000 / 2688 it and a block of
 * ones both survive. */
static void activation_scale_saturates(void **state)
{
    float big[16] = {0}, ones[16], out[16];
    (void)state;
    big[7] = 4000;
    for (int i = 0; i < 16; i++) ones[i] = 1;
    nbi_nvfp4_round_row(big, 16, 1.0f, out);
    assert_true(out[7] == 2688);
    nbi_nvfp4_round_row(big, 16, 4000.0f / 2688.0f, out);
    assert_true(fabsf(out[7] - 4000) <= 400);
    nbi_nvfp4_round_row(ones, 16, 4000.0f / 2688.0f, out);
    for (int i = 0; i < 16; i++) assert_true(fabsf(out[i] - 1) <= 0.1f);
}

/* C59: K = 32, activations 2.0 with input scale 0.5; codes 0x22 (1.0), block scales 0x48 (4.0),
 * global scale 0.25. */
static void input_scale_is_applied(void **state)
{
    uint8_t codes[16], scales[2] = {0x48, 0x48};
    float x[32], rounded[32], w[32], sum = 0, plain = 0;
    (void)state;
    memset(codes, 0x22, sizeof codes);
    for (int i = 0; i < 32; i++) x[i] = 2;
    nbi_matrix m = {.kind = NBI_WEIGHT_NVFP4,
                    .rows = 1,
                    .cols = 32,
                    .data = codes,
                    .scales = scales,
                    .global_scale = 0.25f,
                    .input_scale = 0.5f};
    nbi_matrix_row(&m, 0, w);
    nbi_nvfp4_round_row(x, 32, m.input_scale, rounded);
    for (int i = 0; i < 32; i++) {
        sum += w[i] * rounded[i];
        plain += w[i] * x[i];
    }
    assert_true(plain == 64);
    assert_true(
        fabsf(sum - 64) <
        64 *
            0.05f); /* 2 / 0.5 / 6 = 0.667 is not an E4M3 value: the activation itself is rounded */
}

/* C60: division, not multiplication by a reciprocal. */
static void division_not_reciprocal(void **state)
{
    float x[16] = {0.02392577938735485f}, scale = nbi_e4m3_f32(0x07);
    uint8_t codes[8], byte;
    (void)state;
    assert_int_equal(nbi_f32_e2m1(x[0] / scale), 3);
    assert_int_equal(nbi_f32_e2m1(x[0] * (1.0f / scale)), 4);
    x[1] = 6 * scale; /* the block's scale becomes 0x07 */
    nbi_nvfp4_quantize_row(x, 16, 1.0f, codes, &byte);
    assert_int_equal(byte, 0x07);
    assert_int_equal(codes[0] & 15, 3);
}

/* Random tensors: the decoded value is the nearest that the chosen scales can express. */
static void nearest(void **state)
{
    enum { ROWS = 8, COLS = 64 };
    float w[ROWS * COLS], row[COLS], global;
    uint8_t codes[ROWS * COLS / 2], scales[ROWS * COLS / 16];
    nb_error err;
    (void)state;
    srand(7);
    for (int i = 0; i < ROWS * COLS; i++)
        w[i] = ldexpf((float)rand() / (float)RAND_MAX - 0.5f, rand() % 12 - 6);
    assert_int_equal(nbi_nvfp4_quantize(w, ROWS, COLS, 0, codes, scales, &global, &err), NB_OK);
    nbi_matrix m = {.kind = NBI_WEIGHT_NVFP4,
                    .rows = ROWS,
                    .cols = COLS,
                    .data = codes,
                    .scales = scales,
                    .global_scale = global};
    for (uint32_t r = 0; r < ROWS; r++) {
        nbi_matrix_row(&m, r, row);
        for (uint32_t c = 0; c < COLS; c++) {
            float step = nbi_e4m3_f32(scales[r * COLS / 16 + c / 16]) * global, x = w[r * COLS + c],
                  best = INFINITY;
            for (int code = 0; code < 16; code++) {
                float d = fabsf(nbi_e2m1_table[code] * step - x);
                if (d < best) best = d;
            }
            assert_true(fabsf(row[c] - x) <= best * 1.00001f + 1e-6f * fabsf(x));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vector_of_the_fact_sheet),
        cmocka_unit_test(rounding_edges),
        cmocka_unit_test(zeros_and_extremes),
        cmocka_unit_test(activation_scale_saturates),
        cmocka_unit_test(input_scale_is_applied),
        cmocka_unit_test(division_not_reciprocal),
        cmocka_unit_test(nearest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
