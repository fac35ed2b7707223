/* Parts of a matrix, as a rank has them: views of rows and columns show the values of the whole at
 * every kind and address, packing copies them and touches nothing else, products and runners take
 * them; borders that cut a block of scales are refused. Operators of ranks. */
#include "matrix_util.h"

#include "base/mem.h"
#include "moe_util.h"
#include "tensor/load.h"

static const nbi_weight_kind kinds[] = {NBI_WEIGHT_F32,       NBI_WEIGHT_F16,
                                        NBI_WEIGHT_BF16,      NBI_WEIGHT_NVFP4,
                                        NBI_WEIGHT_FP8_BLOCK, NBI_WEIGHT_FP8_TENSOR};
enum { N_KINDS = sizeof kinds / sizeof *kinds, ROWS = 300, COLS = 592 };

static void same_values(const nbi_matrix *part, const nbi_matrix *whole, uint32_t row, uint32_t col)
{
    float a[COLS], b[COLS];
    for (uint32_t r = 0; r < part->rows; r++) {
        nbi_matrix_row(part, r, a);
        nbi_matrix_row(whole, row + r, b);
        assert_memory_equal(a, b + col, part->cols * sizeof *a);
    }
}

/* Data outside of rows [r0, r1) x columns [c0, c1) becomes bytes of ones, and so do NVFP4 scales.
 */
static void spoil_outside(const mat *w, uint32_t r0, uint32_t r1, uint32_t c0, uint32_t c1)
{
    nbi_matrix before = w->m, row = w->m;
    uint8_t *data = (uint8_t *)before.data, *scales = (uint8_t *)before.scales;
    const uint64_t bytes = nbi_matrix_row_bytes(&row);
    row.cols = c0;
    const uint64_t from = nbi_matrix_row_bytes(&row);
    row.cols = c1;
    const uint64_t to = nbi_matrix_row_bytes(&row);
    for (uint32_t r = 0; r < before.rows; r++) {
        const bool inside = r >= r0 && r < r1;
        memset(data + r * bytes, 0xff, inside ? from : bytes);
        memset(data + r * bytes + to, 0xff, bytes - to);
    }
    if (before.kind != NBI_WEIGHT_NVFP4) return;
    for (uint32_t r = 0; r < before.rows; r++) {
        const bool inside = r >= r0 && r < r1;
        memset(scales + r * (before.cols / 16), 0xff, inside ? c0 / 16 : before.cols / 16);
        memset(scales + r * (before.cols / 16) + c1 / 16, 0xff, (before.cols - c1) / 16);
    }
}

/* Rows and columns [begin, end) at borders that every kind allows. */
static const uint32_t borders[][2] = {{0, 128}, {128, 256}, {256, 300}, {0, 300}, {128, 300}};
static const uint32_t column_borders[][2] = {
    {0, 128}, {128, 384}, {384, 592}, {0, 592}, {512, 592}};

static void test_views(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_KINDS; k++)
        for (size_t i = 0; i < 5; i++)
            for (size_t j = 0; j < 5; j++) {
                const uint32_t *r = borders[i], *c = column_borders[j];
                mat w;
                mat_make(&w, kinds[k], ROWS, COLS, true);
                nbi_matrix part, packed;
                assert_int_equal(nbi_matrix_columns(&part, &w.m, c[0], c[1], NULL), NB_OK);
                assert_int_equal(nbi_matrix_rows(&part, &part, r[0], r[1], NULL), NB_OK);
                assert_true(nbi_matrix_strided(&part));
                assert_int_equal(part.rows, r[1] - r[0]);
                assert_int_equal(part.cols, c[1] - c[0]);
                same_values(&part, &w.m, r[0], c[0]);
                nbi_matrix other; /* the other way round */
                assert_int_equal(nbi_matrix_rows(&other, &w.m, r[0], r[1], NULL), NB_OK);
                assert_false(nbi_matrix_strided(&other));
                assert_int_equal(nbi_matrix_columns(&other, &other, c[0], c[1], NULL), NB_OK);
                same_values(&other, &w.m, r[0], c[0]);
                void *block = op_alloc(nbi_matrix_packed_bytes(&part));
                nbi_matrix_pack(&packed, &part, block);
                assert_false(nbi_matrix_strided(&packed));
                assert_int_equal(nbi_matrix_bytes(&packed), nbi_matrix_bytes(&part));
                same_values(&packed, &w.m, r[0], c[0]);
                assert_int_equal(nbi_matrix_check(&part, NULL), NB_OK);
                /* What other ranks have may be anything. */
                spoil_outside(&w, r[0], r[1], c[0], c[1]);
                assert_int_equal(nbi_matrix_check(&part, NULL), NB_OK);
                same_values(&packed, &part, 0, 0);
                op_free(block);
                mat_free(&w);
            }
}

static void test_check_finds(void **state)
{
    (void)state;
    mat w;
    nbi_matrix part;
    nb_error err;
    mat_make(&w, NBI_WEIGHT_NVFP4, 8, 64, false);
    ((uint8_t *)w.m.scales)[5 * 4 + 2] = 0x7f;
    assert_int_equal(nbi_matrix_columns(&part, &w.m, 32, 64, NULL), NB_OK);
    assert_int_equal(nbi_matrix_check(&part, &err), NB_CORRUPT);
    assert_non_null(strstr(err.text, "row 5, block 0"));
    assert_int_equal(nbi_matrix_columns(&part, &w.m, 0, 32, NULL), NB_OK);
    assert_int_equal(nbi_matrix_check(&part, NULL), NB_OK);
    mat_free(&w);
    mat_make(&w, NBI_WEIGHT_FP8_BLOCK, 200, 384, false);
    memset((uint8_t *)w.m.scales + 4 * (3 + 2), 0, 4);
    assert_int_equal(nbi_matrix_columns(&part, &w.m, 256, 384, NULL), NB_OK);
    assert_int_equal(nbi_matrix_check(&part, &err), NB_CORRUPT);
    assert_non_null(strstr(err.text, "block row 1, block column 0"));
    assert_int_equal(nbi_matrix_columns(&part, &w.m, 0, 256, NULL), NB_OK);
    assert_int_equal(nbi_matrix_check(&part, NULL), NB_OK);
    mat_free(&w);
}

static void test_borders(void **state)
{
    (void)state;
    static const struct {
        nbi_weight_kind kind;
        uint32_t begin, end;
        nb_status columns;
        const char *says;
    } cases[] = {
        {NBI_WEIGHT_NVFP4, 8, 32, NB_UNSUPPORTED, "columns [8, 32) of 592 cut a block of 16"},
        {NBI_WEIGHT_NVFP4, 16, 40, NB_UNSUPPORTED, "columns [16, 40) of 592 cut a block of 16"},
        {NBI_WEIGHT_FP8_BLOCK, 64, 128, NB_UNSUPPORTED, "columns [64, 128) of 592 cut a block"},
        {NBI_WEIGHT_FP8_BLOCK, 128, 590, NB_UNSUPPORTED, "columns [128, 590) of 592"},
        {NBI_WEIGHT_BF16, 3, 593, NB_INVALID, "columns [3, 593) of 592"},
        {NBI_WEIGHT_F32, 7, 6, NB_INVALID, "columns [7, 6) of 592"},
        {NBI_WEIGHT_BF16, 3, 5, NB_OK, NULL},
        {NBI_WEIGHT_FP8_TENSOR, 3, 5, NB_OK, NULL},
        {NBI_WEIGHT_NVFP4, 592, 592, NB_OK, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mat w;
        nbi_matrix part;
        nb_error err;
        mat_make(&w, cases[i].kind, 4, COLS, false);
        assert_int_equal(nbi_matrix_columns(&part, &w.m, cases[i].begin, cases[i].end, &err),
                         cases[i].columns);
        if (cases[i].says) assert_non_null(strstr(err.text, cases[i].says));
        if (cases[i].says) assert_non_null(strstr(err.text, w.m.name));
        mat_free(&w);
    }
}

/* ---------------------------------------------------------------- operators */

static nbi_cpu *open_level(nbi_cpu_level level)
{
    const nbi_limits limits = {.max_rows = 32,
                               .max_linear_cols = COLS,
                               .max_linear_rows = ROWS,
                               .max_seqs = 1,
                               .max_context = 64,
                               .n_heads = 1,
                               .n_kv_heads = 1,
                               .head_dim = 64,
                               .vocab = 64,
                               .max_logit_rows = 1};
    return op_open(level, 2, &limits);
}

static float *product(nbi_cpu *cpu, const nbi_matrix *m, const float *x, uint32_t n)
{
    nbi_weight *w = NULL;
    nb_error err;
    assert_int_equal(cpu->base.ops->weight_prepare(&cpu->base, &w, m, &err), NB_OK);
    assert_int_equal(w->device_bytes, nbi_matrix_strided(m) ? nbi_matrix_packed_bytes(m) : 0);
    assert_false(nbi_matrix_strided(&w->host));
    float *y = op_floats((size_t)n * m->rows);
    cpu->base.ops->linear(
        &cpu->base,
        &(nbi_linear_args){
            .y = y, .x = x, .w = w, .n_rows = n, .x_stride = COLS, .y_stride = m->rows});
    op_check(y);
    cpu->base.ops->weight_release(&cpu->base, &w);
    return y;
}

/* Parts of a product over columns add up to the whole. */
static void test_products(void **state)
{
    (void)state;
    enum { N = 19 };
    for (int l = 0; l <= (int)nbi_cpu_detect(); l++)
        for (size_t k = 0; k < N_KINDS; k++) {
            nbi_cpu *cpu = open_level((nbi_cpu_level)l);
            mat w;
            mat_make(&w, kinds[k], ROWS, COLS, true);
            float *x = op_floats(N * COLS), *want = NULL;
            op_fill(x, N * COLS, 1);
            want = product(cpu, &w.m, x, N);
            double sum[N * ROWS] = {0};
            static const uint32_t cuts[] = {0, 128, 384, COLS};
            for (int i = 0; i < 3; i++) {
                nbi_matrix part;
                assert_int_equal(nbi_matrix_columns(&part, &w.m, cuts[i], cuts[i + 1], NULL),
                                 NB_OK);
                float *y = product(cpu, &part, x + cuts[i], N);
                for (size_t j = 0; j < N * ROWS; j++) sum[j] += (double)y[j];
                op_free(y);
            }
            OP_ASSERT_ERROR(op_error(want, sum, N * ROWS), 1e-6, "%s, %s",
                            nbi_cpu_level_name((nbi_cpu_level)l), nbi_weight_kind_name(kinds[k]));
            op_free(want);
            op_free(x);
            mat_free(&w);
            op_close(cpu);
        }
}

static void run_layer(nbi_cpu *cpu, const nbi_moe_experts *e, float *out, const float *x,
                      const int32_t *ids, const float *weights, uint32_t n)
{
    const nbi_moe_runner_ops *ops = NULL;
    nbi_moe_layer *prepared = NULL;
    assert_int_equal(nbi_moe_runner_choose(&ops, "auto", &cpu->base, &e->shape, NULL), NB_OK);
    assert_int_equal(ops->prepare(&cpu->base, &prepared, e, NULL), NB_OK);
    void *ws = op_alloc(ops->workspace_bytes(&cpu->base, &e->shape, n));
    ops->run(&cpu->base, prepared,
             &(nbi_moe_args){
                 .out = out, .x = x, .ids = ids, .weights = weights, .n_rows = n, .workspace = ws});
    op_check(out);
    op_free(ws);
    ops->release(&cpu->base, &prepared);
}

/* Whole experts on some ranks, columns of them on others: parts of a layer add up to it. */
static void test_experts(void **state)
{
    (void)state;
    enum { E = 6, K = 3, H = 192, I = 96, N = 9 };
    static const uint32_t first[] = {0, 2, 2}, n_own[] = {2, 4, 4};
    static const uint32_t from[] = {0, 0, 32}, to[] = {96, 32, 96};
    for (int l = 0; l <= (int)nbi_cpu_detect(); l++) {
        nbi_cpu *cpu = open_level((nbi_cpu_level)l);
        moe_layer all;
        moe_make(&all, NBI_WEIGHT_NVFP4, NBI_WEIGHT_NVFP4, E, K, H, I, false);
        float *x = op_floats(N * H), *weights = op_floats(N * K), *want = op_floats(N * H);
        int32_t *ids = op_alloc(N * K * sizeof *ids), *own = op_alloc(N * K * sizeof *ids);
        op_fill(x, N * H, 1);
        moe_routing(&all, ids, weights, N);
        run_layer(cpu, &all.e, want, x, ids, weights, N);
        double sum[N * H] = {0};
        for (int i = 0; i < 3; i++) {
            nbi_matrix views[3][E];
            const nbi_matrix *const whole[3] = {all.e.gate, all.e.up, all.e.down};
            for (uint32_t p = 0; p < 3; p++)
                for (uint32_t e = 0; e < n_own[i]; e++)
                    assert_int_equal(
                        (p == 2 ? nbi_matrix_columns : nbi_matrix_rows)(
                            &views[p][e], &whole[p][first[i] + e], from[i], to[i], NULL),
                        NB_OK);
            nbi_moe_experts part = {.gate = views[0], .up = views[1], .down = views[2]};
            part.shape = all.e.shape;
            part.shape.n_experts = n_own[i];
            part.shape.inter = to[i] - from[i];
            memcpy(own, ids, N * K * sizeof *ids);
            cpu->base.ops->own_experts(
                &cpu->base, &(nbi_own_experts_args){
                                .ids = own, .n = N * K, .first = first[i], .n_own = n_own[i]});
            for (int j = 0; j < N * K; j++) {
                const bool mine =
                    ids[j] >= (int32_t)first[i] && ids[j] < (int32_t)(first[i] + n_own[i]);
                assert_int_equal(own[j], mine ? ids[j] - (int32_t)first[i] : -1);
            }
            float *y = op_floats(N * H);
            run_layer(cpu, &part, y, x, own, weights, N);
            for (size_t j = 0; j < N * H; j++) sum[j] += (double)y[j];
            op_free(y);
        }
        OP_ASSERT_ERROR(op_error(want, sum, N * H), l < NBI_CPU_AVX512 ? 1e-6 : 1e-5, "%s",
                        nbi_cpu_level_name((nbi_cpu_level)l));
        op_free(want);
        op_free(x);
        op_free(weights);
        op_free(ids);
        op_free(own);
        moe_free(&all);
        op_close(cpu);
    }
}

/* Rows of the vocabulary on several ranks: the row of one, zero from the others. */
static void test_embedding(void **state)
{
    (void)state;
    enum { V = 40, H = 64, N = 6 };
    static const int32_t tokens[N] = {0, 15, 16, 31, 32, 39};
    nbi_cpu *cpu = open_level(NBI_CPU_REFERENCE);
    mat w;
    mat_make(&w, NBI_WEIGHT_BF16, V, H, true);
    op_batch batch;
    op_batch_make(&batch, (const uint32_t[]){N}, (const uint32_t[]){N}, 1);
    memcpy(batch.ids, tokens, sizeof tokens);
    nbi_matrix part;
    assert_int_equal(nbi_matrix_rows(&part, &w.m, 16, 32, NULL), NB_OK);
    nbi_weight table = {.host = part};
    float *out = op_floats(N * H), row[H];
    cpu->base.ops->embed(
        &cpu->base,
        &(nbi_embed_args){
            .out = out, .table = &table, .first = 16, .part_of = true, .batch = &batch.b});
    op_check(out);
    for (uint32_t t = 0; t < N; t++) {
        memset(row, 0, sizeof row);
        if (tokens[t] >= 16 && tokens[t] < 32) nbi_matrix_row(&w.m, (uint32_t)tokens[t], row);
        assert_memory_equal(out + (size_t)t * H, row, sizeof row);
    }
    cpu->base.ops->clear(&cpu->base, &(nbi_clear_args){.p = out, .bytes = H * sizeof *out});
    for (uint32_t i = 0; i < H; i++) assert_true(out[i] == 0);
    op_free(out);
    op_batch_free(&batch);
    mat_free(&w);
    op_close(cpu);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_views),   cmocka_unit_test(test_check_finds),
        cmocka_unit_test(test_borders), cmocka_unit_test(test_products),
        cmocka_unit_test(test_experts), cmocka_unit_test(test_embedding),
    };
    op_begin(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
