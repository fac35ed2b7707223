/* Packed weights of the CUDA backend: what is packed comes back as the mapped file says, for every
 * kind, odd shapes and odd addresses, views, interleaved pairs, and matrices larger than a piece of
 * staging memory. */
#include "backend/cuda/weights.h"
#include "cuda/gpu_util.h"

static const nbi_limits limits = {.max_rows = 8,
                                  .max_seqs = 1,
                                  .max_context = 64,
                                  .max_logit_rows = 1,
                                  .n_heads = 1,
                                  .n_kv_heads = 1,
                                  .head_dim = 64,
                                  .max_linear_cols = 64,
                                  .max_linear_rows = 64,
                                  .vocab = 64};

static const nbi_weight_kind kinds[] = {NBI_WEIGHT_NVFP4,      NBI_WEIGHT_FP8_BLOCK,
                                        NBI_WEIGHT_FP8_TENSOR, NBI_WEIGHT_BF16,
                                        NBI_WEIGHT_F16,        NBI_WEIGHT_F32};
#define N_KINDS (sizeof kinds / sizeof *kinds)

/* Rows of the weight on the device against those of m (and up). */
static void check_rows(nbi_backend *b, const nbi_weight *w, const nbi_matrix *m,
                       const nbi_matrix *up, const uint32_t *rows, uint32_t n)
{
    int32_t *ids = op_alloc(n * sizeof *ids);
    for (uint32_t i = 0; i < n; i++) /* of a pair: the first n of m, then as many of up */
        ids[i] = (int32_t)(up ? rows[i] / 8 * 16 + rows[i] % 8 + (i % 2 ? 8 : 0) : rows[i]);
    const uint32_t stride = m->cols + 3;
    gpu_buffer at = gpu_bytes(b, ids, n * sizeof *ids);
    gpu_buffer out = gpu_poisoned(b, (size_t)n * stride * sizeof(float));
    nbi_cuda_weight_rows(b, out.p, w, at.p, n, stride);
    float *got = gpu_read(&out), *want = op_floats(m->cols);
    for (uint32_t i = 0; i < n; i++) {
        nbi_matrix_row(up && i % 2 ? up : m, rows[i], want);
        for (uint32_t c = 0; c < m->cols; c++) {
            const float g = got[(size_t)i * stride + c];
            if (fabsf(g - want[c]) > 1e-6f * fabsf(want[c]))
                fail_msg("%s [%u, %u]: row %u column %u is %a, expected %a",
                         nbi_weight_kind_name(m->kind), m->rows, m->cols, rows[i], c, (double)g,
                         (double)want[c]);
        }
        for (uint32_t c = m->cols; c < stride; c++) assert_true(isnan(got[(size_t)i * stride + c]));
    }
    free(got);
    op_free(want);
    op_free(ids);
    gpu_free(&at);
    gpu_free(&out);
}

static void check_all(nbi_backend *b, const nbi_matrix *m, const nbi_matrix *up)
{
    nbi_weight *w = NULL;
    nb_error err;
    if (nbi_cuda_weight_prepare_pair(b, &w, m, up, &err) != NB_OK) fail_msg("%s", err.text);
    assert_true(w->device_bytes >= nbi_matrix_bytes(m));
    assert_ptr_equal(w->host.data, m->data);
    const uint32_t n = up ? 2 * m->rows : m->rows;
    uint32_t *rows = op_alloc(n * sizeof *rows);
    for (uint32_t i = 0; i < n; i++) rows[i] = up ? i / 2 : i;
    check_rows(b, w, m, up, rows, n);
    op_free(rows);
    b->ops->weight_release(b, &w);
    assert_null(w);
}

static void test_round_trip(void **state)
{
    (void)state;
    static const uint32_t rows[] = {1, 7, 8, 9, 15, 16, 17, 40, 130};
    static const uint32_t cols[] = {16, 48, 64, 80, 144, 256, 272};
    static const uint32_t odd_cols[] = {1, 2, 5, 31, 63, 65, 129, 200};
    nbi_backend *b = gpu_open(&limits);
    for (size_t k = 0; k < N_KINDS; k++) {
        for (uint32_t i = 0; i < 12; i++) {
            const bool odd = kinds[k] != NBI_WEIGHT_NVFP4 && op_below(2);
            const uint32_t r = rows[op_below(9)],
                           c = odd ? odd_cols[op_below(8)] : cols[op_below(7)];
            mat w;
            mat_make(&w, kinds[k], r, c, op_below(2));
            if (kinds[k] == NBI_WEIGHT_NVFP4 && i % 2) /* the format allows negative scales */
                ((uint8_t *)w.scales)[op_below(r * (c / 16))] |= 0x80;
            check_all(b, &w.m, NULL);
            mat_free(&w);
        }
    }
    gpu_close(b);
}

static void test_pair(void **state)
{
    (void)state;
    static const uint32_t rows[] = {1, 8, 12, 144};
    nbi_backend *b = gpu_open(&limits);
    for (size_t k = 0; k + 1 < N_KINDS; k++) {
        for (uint32_t i = 0; i < 4; i++) {
            mat gate, up;
            mat_make(&gate, kinds[k], rows[i], 80 + 64 * i, true);
            mat_make(&up, kinds[k], rows[i], 80 + 64 * i, false);
            check_all(b, &gate.m, &up.m);
            mat_free(&gate);
            mat_free(&up);
        }
    }
    gpu_close(b);
}

static void test_views(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&limits);
    for (size_t k = 0; k < N_KINDS; k++) {
        mat w;
        nbi_matrix view;
        mat_make(&w, kinds[k], 300, 144, true);
        assert_int_equal(nbi_matrix_rows(&view, &w.m, 128, 291, NULL), NB_OK);
        check_all(b, &view, NULL);
        assert_int_equal(nbi_matrix_rows(&view, &w.m, 130, 211, NULL), NB_OK);
        check_all(b, &view, NULL);
        /* columns of a rank, and of some rows of them */
        assert_int_equal(nbi_matrix_columns(&view, &w.m, 128, 144, NULL), NB_OK);
        check_all(b, &view, NULL);
        assert_int_equal(nbi_matrix_columns(&view, &w.m, 0, 128, NULL), NB_OK);
        check_all(b, &view, NULL);
        assert_int_equal(nbi_matrix_rows(&view, &view, 128, 291, NULL), NB_OK);
        check_all(b, &view, NULL);
        mat_free(&w);
    }
    gpu_close(b);
}

/* Several pieces of staging memory, cut inside the matrix: the first and last rows of each tile of
 * a stretch around every cut, and some others. */
static void test_large(void **state)
{
    (void)state;
    static const struct {
        nbi_weight_kind kind;
        uint32_t rows, cols;
    } cases[] = {{NBI_WEIGHT_NVFP4, 2100, 16384},
                 {NBI_WEIGHT_FP8_BLOCK, 2300, 8320},
                 {NBI_WEIGHT_BF16, 1000, 9001},
                 {NBI_WEIGHT_F32, 1000, 4400}};
    nbi_backend *b = gpu_open(&limits);
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        mat m;
        mat_make(&m, cases[k].kind, cases[k].rows, cases[k].cols, true);
        nbi_weight *w = NULL;
        nb_error err;
        if (b->ops->weight_prepare(b, &w, &m.m, &err) != NB_OK) fail_msg("%s", err.text);
        uint32_t rows[48];
        for (uint32_t i = 0; i < 48; i++) rows[i] = i * (cases[k].rows - 1) / 47;
        check_rows(b, w, &m.m, NULL, rows, 48);
        b->ops->weight_release(b, &w);
        mat_free(&m);
    }
    gpu_close(b);
}

/* A NaN among FP8 codes marks its own row. */
static void test_nan(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&limits);
    for (size_t k = 1; k < 3; k++) {
        mat m;
        mat_make(&m, kinds[k], 40, 70, false);
        ((uint8_t *)m.data)[29 * 70 + 66] = 0xff;
        nbi_weight *w = NULL;
        assert_int_equal(b->ops->weight_prepare(b, &w, &m.m, NULL), NB_OK);
        int32_t ids[40];
        for (int i = 0; i < 40; i++) ids[i] = i;
        gpu_buffer at = gpu_bytes(b, ids, sizeof ids);
        gpu_buffer out = gpu_poisoned(b, 40 * 70 * sizeof(float));
        nbi_cuda_weight_rows(b, out.p, w, at.p, 40, 70);
        float *got = gpu_read(&out);
        for (int i = 0; i < 40 * 70; i++) assert_int_equal(isnan(got[i]) != 0, i / 70 == 29);
        free(got);
        gpu_free(&at);
        gpu_free(&out);
        b->ops->weight_release(b, &w);
        mat_free(&m);
    }
    gpu_close(b);
}

static void test_refusals(void **state)
{
    (void)state;
    nbi_backend *b = gpu_open(&limits);
    uint8_t data[64] = {0};
    nbi_weight *w = NULL;
    nb_error err;
    nbi_matrix m = {.kind = NBI_WEIGHT_NVFP4,
                    .rows = 1,
                    .cols = 24,
                    .data = data,
                    .scales = data,
                    .global_scale = 1,
                    .name = "m.proj"};
    assert_int_equal(b->ops->weight_prepare(b, &w, &m, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "m.proj"));
    assert_non_null(strstr(err.text, "24"));
    m.kind = NBI_WEIGHT_NONE;
    assert_int_equal(b->ops->weight_prepare(b, &w, &m, &err), NB_INVALID);
    nbi_matrix other = m;
    m.kind = other.kind = NBI_WEIGHT_BF16;
    other.rows = 2;
    assert_int_equal(nbi_cuda_weight_prepare_pair(b, &w, &m, &other, &err), NB_INVALID);
    assert_null(w);
    gpu_close(b);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_pair),
        cmocka_unit_test(test_views),      cmocka_unit_test(test_large),
        cmocka_unit_test(test_nan),        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
