/* Modules out of checkpoints: every kind and convention, partners that are missing, scales that are
 * wrong (C02 to C05, C18). */
#include "cmocka_all.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/numfmt.h"
#include "scratch.h"
#include "tensor/load.h"

typedef struct box {
    char *dir;
    nbi_st_writer *w;
    nbi_checkpoint *c;
    nbi_arena arena;
    nbi_buf data;
} box;

static void start(box *b)
{
    nb_error err;
    *b = (box){.dir = scratch_make()};
    assert_int_equal(nbi_st_writer_create(&b->w, b->dir, 0, &err), NB_OK);
}

static void put(box *b, const char *name, nbi_dtype dtype, uint32_t n_dims, uint64_t d0,
                uint64_t d1, uint64_t d2, const void *data)
{
    const uint64_t shape[3] = {d0, d1, d2};
    uint64_t bytes = nbi_dtype_bits(dtype);
    nb_error err;
    for (uint32_t i = 0; i < n_dims; i++) bytes *= shape[i];
    assert_int_equal(nbi_st_writer_add(b->w, name, dtype, n_dims, shape, &err), NB_OK);
    assert_int_equal(nbi_buf_add(&b->data, data, bytes / 8), NB_OK);
}

static void put_scalar(box *b, const char *name, float value)
{
    put(b, name, NBI_F32, 0, 0, 0, 0, &value);
}

static void finish(box *b)
{
    nb_error err;
    assert_int_equal(nbi_st_writer_data(b->w, b->data.data, b->data.len, &err), NB_OK);
    assert_int_equal(nbi_st_writer_finish(b->w, &err), NB_OK);
    nbi_st_writer_destroy(&b->w);
    assert_int_equal(nbi_checkpoint_open(&b->c, b->dir, &err), NB_OK);
}

static void end(box *b)
{
    nbi_checkpoint_close(&b->c);
    nbi_st_writer_destroy(&b->w);
    nbi_arena_free(&b->arena);
    nbi_buf_free(&b->data);
    scratch_remove(b->dir);
}

static void says(const nb_error *err, const char *a, const char *b)
{
    if (!strstr(err->text, a) || !strstr(err->text, b))
        fail_msg("\"%s\" does not say \"%s\" and \"%s\"", err->text, a, b);
}

static nb_status load(box *b, nbi_matrix *m, const char *name, uint32_t rows, uint32_t cols,
                      nb_error *err)
{
    return nbi_matrix_load(m, b->c, &b->arena, name, rows, cols, err);
}

static float dot_ones(const nbi_matrix *m, uint32_t r)
{
    float row[512], sum = 0;
    nbi_matrix_row(m, r, row);
    for (uint32_t i = 0; i < m->cols; i++) sum += row[i];
    return sum;
}

/* C03: gate and up of one expert with different global scales. */
static void unequal_gate_and_up(void **state)
{
    box b;
    nb_error err;
    nbi_matrix gate, up;
    uint8_t codes[16], scales[2] = {0x38, 0x38};
    (void)state;
    memset(codes, 0x22, sizeof codes);
    start(&b);
    put(&b, "e.gate_proj.weight", NBI_U8, 2, 1, 16, 0, codes);
    put(&b, "e.gate_proj.weight_scale", NBI_F8_E4M3, 2, 1, 2, 0, scales);
    put_scalar(&b, "e.gate_proj.weight_scale_2", 0.010f);
    put(&b, "e.up_proj.weight", NBI_U8, 2, 1, 16, 0, codes);
    put(&b, "e.up_proj.weight_scale", NBI_F8_E4M3, 2, 1, 2, 0, scales);
    put_scalar(&b, "e.up_proj.weight_scale_2", 0.040f);
    finish(&b);
    assert_int_equal(load(&b, &gate, "e.gate_proj", 1, 32, &err), NB_OK);
    assert_int_equal(load(&b, &up, "e.up_proj", 1, 32, &err), NB_OK);
    assert_true(fabsf(dot_ones(&gate, 0) - 0.32f) < 1e-5f);
    assert_true(fabsf(dot_ones(&up, 0) - 1.28f) < 1e-5f);
    assert_true(gate.input_scale == 0);
    end(&b);
}

/* C04: one convention multiplies, the other divides. */
static void two_conventions(void **state)
{
    box b;
    nb_error err;
    nbi_matrix a, c;
    uint8_t codes[32], scales[4] = {0x38, 0x40, 0x7e, 0x01};
    const float wgs = 2048, igs = 64;
    (void)state;
    for (int i = 0; i < 32; i++) codes[i] = (uint8_t)(i * 37);
    start(&b);
    put(&b, "a.weight", NBI_U8, 2, 2, 16, 0, codes);
    put(&b, "a.weight_scale", NBI_F8_E4M3, 2, 2, 2, 0, scales);
    put_scalar(&b, "a.weight_scale_2", 0.00048828125f);
    put_scalar(&b, "a.input_scale", 0.015625f);
    put(&b, "c.weight_packed", NBI_U8, 2, 2, 16, 0, codes);
    put(&b, "c.weight_scale", NBI_F8_E4M3, 2, 2, 2, 0, scales);
    put(&b, "c.weight_global_scale", NBI_F32, 1, 1, 0, 0, &wgs);
    put(&b, "c.input_global_scale", NBI_F32, 1, 1, 0, 0, &igs);
    finish(&b);
    assert_true(nbi_matrix_present(b.c, "a") && nbi_matrix_present(b.c, "c") &&
                !nbi_matrix_present(b.c, "d"));
    assert_int_equal(load(&b, &a, "a", 0, 0, &err), NB_OK);
    assert_int_equal(load(&b, &c, "c", 2, 32, &err), NB_OK);
    assert_int_equal(a.kind, NBI_WEIGHT_NVFP4);
    assert_int_equal(a.cols, 32);
    assert_true(a.global_scale == c.global_scale && a.input_scale == c.input_scale);
    for (uint32_t r = 0; r < 2; r++) {
        float x[32], y[32];
        nbi_matrix_row(&a, r, x);
        nbi_matrix_row(&c, r, y);
        assert_memory_equal(x, y, sizeof x);
    }
    assert_string_equal(a.name, "a");
    assert_int_equal(nbi_checkpoint_unused(b.c, 0), nbi_checkpoint_count(b.c));
    end(&b);
}

/* C05: a misspelt scale is refused with both names; C02: a divisor of zero is refused with its
 * name. */
static void partners(void **state)
{
    static const struct {
        const char *scale, *global;
        float value;
        const char *first, *second;
    } cases[] = {
        {"m.weight_scale", "m.weight_scale2", 1, "m.weight_scale_2 is missing", "m.weight_scale2"},
        {"m.scale", "m.weight_scale_2", 1, "m.weight_scale is missing", "m.scale"},
        {"m.weight_scale", "m.weight_scale_2", 0, "m.weight_scale_2", "positive finite"},
        {"m.weight_scale", "m.weight_scale_2", -1, "m.weight_scale_2", "positive finite"},
        {"m.weight_scale", "m.weight_scale_2", NAN, "m.weight_scale_2", "positive finite"},
        {"m.weight_scale", "m.weight_scale_2", INFINITY, "m.weight_scale_2", "positive finite"},
    };
    uint8_t codes[8] = {0}, scale = 0x38;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        box b;
        nb_error err;
        nbi_matrix m = {.rows = 77};
        start(&b);
        put(&b, "m.weight", NBI_U8, 2, 1, 8, 0, codes);
        put(&b, cases[i].scale, NBI_F8_E4M3, 2, 1, 1, 0, &scale);
        put_scalar(&b, cases[i].global, cases[i].value);
        finish(&b);
        assert_int_equal(load(&b, &m, "m", 1, 16, &err), NB_CORRUPT);
        says(&err, cases[i].first, cases[i].second);
        assert_int_equal(m.rows, 77); /* untouched */
        end(&b);
    }
    box b;
    nb_error err;
    nbi_matrix m;
    const float one = 1, zero = 0;
    start(&b);
    put(&b, "experts.7.up_proj.weight_packed", NBI_U8, 2, 1, 8, 0, codes);
    put(&b, "experts.7.up_proj.weight_scale", NBI_F8_E4M3, 2, 1, 1, 0, &scale);
    put(&b, "experts.7.up_proj.weight_global_scale", NBI_F32, 1, 1, 0, 0, &one);
    put(&b, "experts.7.up_proj.input_global_scale", NBI_F32, 1, 1, 0, 0, &zero);
    finish(&b);
    assert_int_equal(load(&b, &m, "experts.7.up_proj", 1, 16, &err), NB_CORRUPT);
    says(&err, "experts.7.up_proj.input_global_scale", "is 0");
    assert_int_equal(load(&b, &m, "experts.8.up_proj", 1, 16, &err), NB_NOT_FOUND);
    says(&err, "experts.8.up_proj.weight", "missing");
    end(&b);
}

static void wrong_shapes(void **state)
{
    box b;
    nb_error err;
    nbi_matrix m;
    uint8_t bytes[4096] = {0};
    (void)state;
    start(&b);
    put(&b, "plain.weight", NBI_BF16, 2, 4, 8, 0, bytes);
    put(&b, "flat.weight", NBI_BF16, 1, 4, 0, 0, bytes);
    put(&b, "odd.weight", NBI_U8, 2, 2, 12, 0, bytes);
    put(&b, "q.weight", NBI_U8, 2, 2, 8, 0, bytes);
    put(&b, "q.weight_scale", NBI_F8_E4M3, 2, 2, 2, 0, bytes);
    put(&b, "i.weight", NBI_I8, 2, 2, 8, 0, bytes);
    put(&b, "f.weight", NBI_F8_E4M3, 2, 130, 8, 0, bytes);
    put(&b, "f.weight_scale_inv", NBI_F32, 2, 1, 1, 0, bytes); /* 130 rows have two block rows */
    finish(&b);
    assert_int_equal(load(&b, &m, "plain", 8, 4, &err), NB_CORRUPT);
    says(&err, "plain.weight is BF16 [4, 8]", "expected [8, 4]");
    assert_int_equal(load(&b, &m, "flat", 0, 0, &err), NB_CORRUPT);
    assert_int_equal(load(&b, &m, "odd", 0, 0, &err), NB_CORRUPT);
    says(&err, "odd.weight", "multiple of 16");
    assert_int_equal(load(&b, &m, "q", 2, 16, &err), NB_CORRUPT);
    says(&err, "q.weight_scale is F8_E4M3 [2, 2]", "[2, 1]");
    assert_int_equal(load(&b, &m, "i", 2, 8, &err), NB_UNSUPPORTED);
    says(&err, "i.weight is I8", "model.safetensors");
    end(&b);
}

/* FP8 blocks at the borders: 130 x 200 has two block rows of 128 and 2, two block columns of 128
 * and 72. */
static void fp8(void **state)
{
    enum { ROWS = 130, COLS = 200 };
    box b;
    nb_error err;
    nbi_matrix m, part;
    uint8_t *data = malloc(ROWS * COLS);
    const float scales[4] = {0.5f, 2, 4, 8}, tensor_scale = 0.25f;
    uint16_t half[4];
    float row[COLS];
    (void)state;
    for (int i = 0; i < ROWS * COLS; i++) data[i] = (uint8_t)((i * 7) & 0x77);
    for (int i = 0; i < 4; i++) half[i] = nbi_f32_bf16(scales[i]);
    start(&b);
    put(&b, "a.weight", NBI_F8_E4M3, 2, ROWS, COLS, 0, data);
    put(&b, "a.weight_scale_inv", NBI_F32, 2, 2, 2, 0, scales);
    put(&b, "b.weight", NBI_F8_E4M3, 2, ROWS, COLS, 0, data);
    put(&b, "b.weight_scale", NBI_BF16, 2, 2, 2, 0, half);
    put(&b, "t.weight", NBI_F8_E4M3, 2, ROWS, COLS, 0, data);
    put(&b, "t.weight_scale", NBI_F32, 0, 0, 0, 0, &tensor_scale);
    put(&b, "n.weight", NBI_F8_E4M3, 2, ROWS, COLS, 0, data);
    finish(&b);
    static const char *const names[] = {"a", "b"};
    for (int k = 0; k < 2; k++) {
        assert_int_equal(load(&b, &m, names[k], ROWS, COLS, &err), NB_OK);
        assert_int_equal(m.kind, NBI_WEIGHT_FP8_BLOCK);
        assert_int_equal(nbi_matrix_check(&m, &err), NB_OK);
        for (uint32_t r = 0; r < ROWS; r += 43) {
            nbi_matrix_row(&m, r, row);
            for (uint32_t c = 0; c < COLS; c++)
                assert_true(row[c] ==
                            nbi_e4m3_f32(data[r * COLS + c]) * scales[r / 128 * 2 + c / 128]);
        }
        assert_int_equal(nbi_matrix_rows(&part, &m, 128, 130, &err), NB_OK);
        nbi_matrix_row(&part, 1, row);
        assert_true(row[199] == nbi_e4m3_f32(data[129 * COLS + 199]) * 8);
        assert_int_equal(nbi_matrix_rows(&part, &m, 3, 100, &err), NB_OK);
        assert_int_equal(nbi_matrix_rows(&part, &m, 100, 129, &err), NB_UNSUPPORTED);
        assert_int_equal(nbi_matrix_rows(&part, &m, 100, 131, &err), NB_INVALID);
    }
    assert_int_equal(nbi_matrix_bytes(&m), ROWS * COLS + 16);
    assert_int_equal(load(&b, &m, "t", ROWS, COLS, &err), NB_OK);
    assert_int_equal(m.kind, NBI_WEIGHT_FP8_TENSOR);
    nbi_matrix_row(&m, 1, row);
    assert_true(row[5] == nbi_e4m3_f32(data[COLS + 5]) * 0.25f);
    assert_int_equal(load(&b, &m, "n", ROWS, COLS, &err), NB_CORRUPT);
    says(&err, "n.weight_scale_inv is missing", "F8_E4M3");
    free(data);
    end(&b);
}

static void bad_scales(void **state)
{
    uint8_t codes[16 * 80] = {0}, scales[2 * 80];
    float fp8_scales[4] = {1, 1, 1, 1};
    nb_error err;
    (void)state;
    memset(scales, 0x38, sizeof scales);
    nbi_matrix m = {.kind = NBI_WEIGHT_NVFP4,
                    .rows = 80,
                    .cols = 32,
                    .data = codes,
                    .scales = scales,
                    .global_scale = 1,
                    .name = "m"};
    static const uint8_t good[] = {0x00, 0x01, 0x7e}, bad[] = {0x7f, 0x80, 0xb8, 0xfe, 0xff};
    for (size_t i = 0; i < sizeof good; i++) {
        scales[133] = good[i];
        assert_int_equal(nbi_matrix_check(&m, &err), NB_OK);
    }
    for (size_t i = 0; i < sizeof bad; i++) {
        scales[133] = bad[i];
        assert_int_equal(nbi_matrix_check(&m, &err), NB_CORRUPT);
        says(&err, "m.weight_scale", "row 66, block 1");
    }
    scales[133] = 0x38;
    m.global_scale = NAN;
    assert_int_equal(nbi_matrix_check(&m, &err), NB_CORRUPT);
    m.global_scale = 1;
    m.input_scale = -1;
    assert_int_equal(nbi_matrix_check(&m, &err), NB_CORRUPT);
    nbi_matrix f = {.kind = NBI_WEIGHT_FP8_BLOCK,
                    .rows = 129,
                    .cols = 129,
                    .data = codes,
                    .scales = fp8_scales,
                    .global_scale = 1,
                    .name = "f"};
    assert_int_equal(nbi_matrix_check(&f, &err), NB_OK);
    static const float bad_f32[] = {0, -1, NAN, INFINITY};
    for (size_t i = 0; i < 4; i++) {
        fp8_scales[2] = bad_f32[i];
        assert_int_equal(nbi_matrix_check(&f, &err), NB_CORRUPT);
        says(&err, "f.weight_scale_inv", "block row 1, block column 0");
    }
}

/* C18: stacked experts give the same matrices as single ones; sizes are not square. */
static void stacked_experts(void **state)
{
    enum { E = 3, I = 6, H = 16 };
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    box b;
    nb_error err;
    uint16_t gate_up[E][2 * I][H], down[E][H][I];
    char name[64];
    (void)state;
    for (int i = 0; i < E * 2 * I * H; i++) (&gate_up[0][0][0])[i] = (uint16_t)(0x3f00 + i);
    for (int i = 0; i < E * H * I; i++) (&down[0][0][0])[i] = (uint16_t)(0xbe00 + i);
    start(&b);
    put(&b, "s.experts.gate_up_proj", NBI_BF16, 3, E, 2 * I, H, gate_up);
    put(&b, "s.experts.down_proj", NBI_BF16, 3, E, H, I, down);
    for (int e = 0; e < E; e++)
        for (int p = 0; p < 3; p++) {
            snprintf(name, sizeof name, "o.experts.%d.%s.weight", e, parts[p]);
            if (p == 2)
                put(&b, name, NBI_BF16, 2, H, I, 0, down[e]);
            else
                put(&b, name, NBI_BF16, 2, I, H, 0, gate_up[e][p * I]);
        }
    finish(&b);
    for (uint32_t e = 0; e < E; e++)
        for (uint32_t p = 0; p < 3; p++) {
            nbi_matrix s, o;
            assert_int_equal(
                nbi_matrix_load_fused(&s, b.c, &b.arena, "s.experts", E, e, p, I, H, &err), NB_OK);
            assert_int_equal(
                nbi_matrix_load_fused(&o, b.c, &b.arena, "o.experts", E, e, p, I, H, &err),
                NB_NOT_FOUND);
            snprintf(name, sizeof name, "o.experts.%u.%s", e, parts[p]);
            assert_int_equal(load(&b, &o, name, p == 2 ? H : I, p == 2 ? I : H, &err), NB_OK);
            assert_true(s.rows == o.rows && s.cols == o.cols);
            assert_memory_equal(s.data, o.data, nbi_matrix_bytes(&o));
            snprintf(name, sizeof name, "s.experts.%u.%s", e, parts[p]);
            assert_string_equal(s.name, name);
        }
    nbi_matrix m;
    assert_int_equal(nbi_matrix_load_fused(&m, b.c, &b.arena, "s.experts", E + 1, 0, 0, I, H, &err),
                     NB_CORRUPT);
    says(&err, "s.experts.gate_up_proj is BF16 [3, 12, 16]", "expected [4, 12, 16]");
    end(&b);
}

static void vectors(void **state)
{
    box b;
    nb_error err;
    const float *v = NULL;
    uint32_t n = 0;
    const uint16_t half[2] = {0x3f80, 0xc000}, f16[2] = {0x3c00, 0xc000};
    const float f32[2] = {7.001f, NAN};
    (void)state;
    start(&b);
    put(&b, "bf16", NBI_BF16, 1, 2, 0, 0, half);
    put(&b, "f16", NBI_F16, 1, 2, 0, 0, f16);
    put(&b, "f32", NBI_F32, 1, 1, 0, 0, f32);
    put(&b, "nan", NBI_F32, 1, 2, 0, 0, f32);
    put(&b, "u8", NBI_U8, 1, 2, 0, 0, half);
    finish(&b);
    assert_int_equal(nbi_vector_load(&v, &n, b.c, &b.arena, "bf16", 0, &err), NB_OK);
    assert_true(n == 2 && v[0] == 1 && v[1] == -2);
    assert_int_equal(nbi_vector_load(&v, NULL, b.c, &b.arena, "f16", 2, &err), NB_OK);
    assert_true(v[0] == 1 && v[1] == -2);
    assert_int_equal(nbi_vector_load(&v, NULL, b.c, &b.arena, "f32", 1, &err), NB_OK);
    assert_true(v[0] == 7.001f); /* C54: 16 bits would make 7.0 of it */
    assert_int_equal(nbi_vector_load(&v, NULL, b.c, &b.arena, "f16", 3, &err), NB_CORRUPT);
    says(&err, "f16 is F16 [2]", "[3]");
    assert_int_equal(nbi_vector_load(&v, NULL, b.c, &b.arena, "nan", 2, &err), NB_CORRUPT);
    says(&err, "nan", "value 1 is NaN");
    assert_int_equal(nbi_vector_load(&v, NULL, b.c, &b.arena, "u8", 2, &err), NB_CORRUPT);
    assert_int_equal(nbi_vector_load(&v, NULL, b.c, &b.arena, "none", 2, &err), NB_NOT_FOUND);
    assert_non_null(nbi_tensor_note("model.layers.0.self_attn.k_proj.k_scale")); /* C06 */
    assert_non_null(nbi_tensor_note("model.layers.0.self_attn.rotary_emb.inv_freq"));
    assert_null(nbi_tensor_note("model.layers.1.mlp.experts.0.down_proj.weight_scale_3")); /* C05 */
    end(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unequal_gate_and_up),
        cmocka_unit_test(two_conventions),
        cmocka_unit_test(partners),
        cmocka_unit_test(wrong_shapes),
        cmocka_unit_test(fp8),
        cmocka_unit_test(bad_scales),
        cmocka_unit_test(stacked_experts),
        cmocka_unit_test(vectors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
