/* The DSA indexer on the CUDA backend: keys, scores, the choice of positions. `--bench` times it.
 */
#include "cuda/gpu_util.h"
#include "kernel/indexer_util.h"

static void run_on(nbi_backend *g, const index_data *d, const gpu_buffer *keys, const nbi_batch *b,
                   uint32_t first, int32_t *select)
{
    const index_case *c = &d->c;
    const size_t T = b->n_rows, half = c->rope / 2, nq = (size_t)c->heads * c->dim;
    gpu_buffer q = gpu_floats(g, d->q + first * nq, T * nq);
    gpu_buffer w = gpu_floats(g, d->w + (size_t)first * c->heads, T * c->heads);
    gpu_buffer cs = gpu_floats(g, d->cs + first * half, T * half);
    gpu_buffer sn = gpu_floats(g, d->sn + first * half, T * half);
    gpu_buffer sel = gpu_poisoned(g, T * c->topk * 4);
    const nbi_kv_layer kv = {.dtype = c->cache, .index_k = keys->p};
    const nbi_rope_rows rope = {
        .cos = cs.p, .sin = sn.p, .dim = c->rope, .interleaved = c->interleaved};
    g->ops->index_select(g, &(nbi_index_select_args){.select = sel.p,
                                                     .q = q.p,
                                                     .w = w.p,
                                                     .n_heads = c->heads,
                                                     .index_dim = c->dim,
                                                     .topk = c->topk,
                                                     .rope = &rope,
                                                     .cache = &kv,
                                                     .batch = gpu_step(g, b)});
    gpu_step_end(g);
    int32_t *got = gpu_read(&sel);
    memcpy(select, got, T * c->topk * 4);
    free(got);
    gpu_buffer *all[] = {&q, &w, &cs, &sn, &sel};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) gpu_free(all[i]);
}

static gpu_buffer keys_of(nbi_backend *g, const index_data *d)
{
    return gpu_bytes(g, d->keys.data, d->keys.bytes);
}

/* All rows in one batch. */
static void run(const index_data *d, int32_t *select)
{
    const nbi_limits limits = ix_limits(d);
    nbi_backend *g = gpu_open(&limits);
    gpu_buffer keys = keys_of(g, d);
    run_on(g, d, &keys, &d->batch.b, 0, select);
    gpu_free(&keys);
    gpu_close(g);
}

static void check(const index_case *c, const uint32_t *lengths, const uint32_t *rows,
                  uint32_t n_seqs)
{
    index_data d;
    ix_make(&d, c, lengths, rows, n_seqs);
    const uint32_t T = d.batch.b.n_rows;
    int32_t *sel = op_alloc((size_t)T * c->topk * sizeof *sel);
    run(&d, sel);
    for (uint32_t t = 0; t < T; t++) ix_check(&d, t, sel + (size_t)t * c->topk);
    op_free(sel);
    ix_free(&d);
}

static void test_shapes(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65, 1000}, rows[] = {1, 2, 3, 12, 3, 2};
    static const index_case cases[] = {
        {1, 32, 8, 4, NBI_F32, true},      {4, 128, 64, 16, NBI_BF16, true},
        {32, 128, 64, 64, NBI_BF16, true}, {3, 40, 10, 63, NBI_F32, false},
        {64, 16, 16, 1, NBI_F32, false},   {2, 32, 8, 2048, NBI_BF16, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check(&cases[i], lengths, rows, 6);
}

/* Keys are one number, the query is 1, so scores are chosen freely. */
static void select_scores(const float *scores, uint32_t n, uint32_t topk, float w, int32_t *out)
{
    const uint32_t rows[] = {1};
    index_data d;
    ix_make(&d, &(index_case){1, 2, 2, topk, NBI_F32, true}, &n, rows, 1);
    d.cs[0] = 1;
    d.sn[0] = 0;
    d.q[0] = 1;
    d.q[1] = 0;
    d.w[0] = w;
    for (uint32_t p = 0; p < n; p++) {
        float *k = (float *)d.kv.index_k + op_slot(&d.batch, 0, p) * 2;
        k[0] = scores[p];
        k[1] = 0;
    }
    run(&d, out);
    ix_free(&d);
}

static void test_ties(void **state)
{
    (void)state;
    int32_t out[4];
    const float equal[] = {1, 1, 1, 1, 0, 0};
    select_scores(equal, 6, 3, 1, out);
    const int32_t lowest[] = {0, 1, 2};
    assert_memory_equal(out, lowest, sizeof lowest);

    /* relu makes all non-positive keys equal, and a negative weight makes those the largest */
    const float mixed[] = {3, -1, 2, 0, -5, 1};
    select_scores(mixed, 6, 3, -1, out);
    const int32_t zeros[] = {1, 3, 4};
    assert_memory_equal(out, zeros, sizeof zeros);

    const float negative[] = {3, 5, 2, 9, 1, 4}; /* all scores below zero */
    select_scores(negative, 6, 2, -1, out);
    const int32_t smallest[] = {2, 4};
    assert_memory_equal(out, smallest, sizeof smallest);

    enum { N = 6000, K = 5000 };
    float *same = op_floats(N);
    int32_t *most = op_alloc(K * sizeof *most);
    for (int i = 0; i < N; i++) same[i] = i % 3 == 1 && i > 4200 ? 2 : 1;
    select_scores(same, N, K, 1, most);
    int32_t larger = 0, at = 0;
    for (int i = 0; i < N; i++) larger += same[i] > 1;
    for (int i = 0, ties = K - larger; i < N; i++)
        if (same[i] > 1 || ties-- > 0) assert_int_equal(most[at++], i);
    assert_int_equal(at, K);
    op_free(same);
    op_free(most);

    const float broken[] = {NAN, 1, INFINITY, NAN, 2, 0};
    select_scores(broken, 6, 4, 1, out);
    const int32_t finite_first[] = {1, 2, 4, 5};
    assert_memory_equal(out, finite_first, sizeof finite_first);
    const float all_nan[] = {NAN, NAN, NAN};
    select_scores(all_nan, 3, 2, 1, out);
    assert_memory_equal(out, lowest, 2 * sizeof *lowest);
}

/* A needle at 10 percent of 20,000 positions is found. */
static void test_long_context(void **state)
{
    (void)state;
    const uint32_t n = 20000, rows[] = {1};
    index_data d;
    ix_make(&d, &(index_case){2, 4, 2, 64, NBI_BF16, true}, &n, rows, 1);
    d.w[0] = d.w[1] = 1;
    uint16_t *k = (uint16_t *)d.kv.index_k + op_slot(&d.batch, 0, 2000) * 4;
    k[2] = nbi_f32_bf16(100 * d.q[2]);
    k[3] = nbi_f32_bf16(100 * d.q[3]);
    int32_t sel[64];
    run(&d, sel);
    bool found = false;
    for (int i = 0; i < 64; i++) found |= sel[i] == 2000;
    assert_true(found);
    ix_check(&d, 0, sel);
    ix_free(&d);
}

/* The same list in one batch, in chunks and row by row; with many equal scores. */
static void bits(const index_case *c)
{
    const uint32_t lengths[] = {700, 90}, rows[] = {20, 90};
    index_data d;
    ix_make(&d, c, lengths, rows, 2);
    const uint32_t T = d.batch.b.n_rows, topk = c->topk;
    uint16_t *k = d.kv.index_k;
    for (uint32_t p = 0; p < 700; p += 3)
        memcpy(k + op_slot(&d.batch, 0, p) * c->dim, k + op_slot(&d.batch, 0, 0) * c->dim,
               c->dim * sizeof *k);
    const nbi_limits limits = ix_limits(&d);
    int32_t *all = op_alloc((size_t)T * topk * 4), *part = op_alloc((size_t)T * topk * 4);
    nbi_backend *g = gpu_open(&limits);
    gpu_buffer keys = keys_of(g, &d);
    run_on(g, &d, &keys, &d.batch.b, 0, all);
    static const uint32_t chunks[] = {64, 7, 1};
    for (int i = 0; i < 3; i++) {
        for (uint32_t t = 0, end; t < T; t = end) {
            for (end = t; end < T && end - t < chunks[i] && d.batch.seq[end] == d.batch.seq[t];)
                end++;
            op_batch b;
            op_batch_slice(&b, &d.batch, t, end);
            run_on(g, &d, &keys, &b.b, t, part + (size_t)t * topk);
            op_batch_free(&b);
        }
        assert_memory_equal(all, part, (size_t)T * topk * 4);
    }
    gpu_free(&keys);
    gpu_close(g);
    op_free(all);
    op_free(part);
    ix_free(&d);
}

static void test_bits(void **state)
{
    (void)state;
    bits(&(index_case){5, 24, 8, 50, NBI_BF16, true});
    bits(&(index_case){16, 128, 64, 40, NBI_BF16, true});
    bits(&(index_case){32, 128, 64, 40, NBI_BF16, false}); /* a single row: index_row.cu */
}

/* Codes are read as the BF16 values that they are: the same lists. */
static void test_codes_are_bf16(void **state)
{
    (void)state;
    const uint32_t lengths[] = {300, 190}, rows[] = {5, 9};
    for (int i = 0; i < 2; i++) {
        index_data d;
        ix_make(&d, &(index_case){8, i ? 128 : 140, 64, 40, NBI_F8_E4M3, true}, lengths, rows, 2);
        int32_t codes[14 * 40], plain[14 * 40];
        run(&d, codes);
        for (uint32_t t = 0; t < 14; t++) ix_check(&d, t, codes + t * 40);
        const op_kv keys = op_kv_bf16(&d.keys);
        op_free(d.keys.data);
        d.keys = keys;
        d.kv = (nbi_kv_layer){.dtype = NBI_BF16, .index_k = keys.data};
        d.c.cache = NBI_BF16;
        run(&d, plain);
        assert_memory_equal(codes, plain, sizeof codes);
        ix_free(&d);
    }
}

static void check_append(nbi_dtype dtype, bool pairs)
{
    enum { D = 140, ROPE = 12 };
    const uint32_t lengths[] = {70, 64, 1}, rows[] = {20, 1, 1};
    op_batch b;
    op_batch_make(&b, lengths, rows, 3);
    const uint32_t T = b.b.n_rows;
    const op_kv host = op_kv_empty(dtype, b.n_pages, 1, D, D);
    float *k = op_floats((size_t)T * D), *w = op_floats(D), *bias = op_floats(D);
    float *cs = op_floats((size_t)T * ROPE / 2), *sn = op_floats((size_t)T * ROPE / 2);
    for (size_t i = 0; i < (size_t)T * D; i++) k[i] = 5 + 0.01f * op_normal(); /* far from zero */
    op_fill(w, D, 1);
    op_fill(bias, D, 1);
    op_fill(cs, (size_t)T * ROPE / 2, 1);
    op_fill(sn, (size_t)T * ROPE / 2, 1);
    const nbi_limits limits = {.max_rows = T, .max_seqs = 3, .max_context = 70};
    nbi_backend *g = gpu_open(&limits);
    gpu_buffer gk = gpu_floats(g, k, T * D), gw = gpu_floats(g, w, D), gb = gpu_floats(g, bias, D);
    gpu_buffer gc = gpu_floats(g, cs, T * ROPE / 2), gs = gpu_floats(g, sn, T * ROPE / 2);
    gpu_buffer cache = gpu_poisoned(g, host.bytes);
    const nbi_kv_layer layer = {.dtype = dtype, .index_k = cache.p};
    const nbi_rope_rows rope = {.cos = gc.p, .sin = gs.p, .dim = ROPE, .interleaved = pairs};
    g->ops->index_append(g, &(nbi_index_append_args){.k = gk.p,
                                                     .norm_weight = gw.p,
                                                     .norm_bias = gb.p,
                                                     .eps = 1e-6f,
                                                     .index_dim = D,
                                                     .rope = &rope,
                                                     .cache = &layer,
                                                     .batch = gpu_step(g, &b.b)});
    gpu_step_end(g);
    void *got_cache = gpu_read(&cache);
    memcpy(host.data, got_cache, host.bytes);
    for (uint32_t t = 0; t < T; t++) {
        double x[D], mean = 0, var = 0;
        float got[D];
        for (int i = 0; i < D; i++) mean += (double)k[t * D + i] / D;
        for (int i = 0; i < D; i++) var += pow((double)k[t * D + i] - mean, 2) / D;
        for (int i = 0; i < D; i++)
            x[i] = ((double)k[t * D + i] - mean) / sqrt(var + (double)1e-6f) * (double)w[i] +
                   (double)bias[i];
        for (int i = 0; i < ROPE / 2; i++) {
            const int p = pairs ? 2 * i : i, q = pairs ? 2 * i + 1 : i + ROPE / 2;
            const double u = x[p], v = x[q], c = (double)cs[t * ROPE / 2 + i],
                         s = (double)sn[t * ROPE / 2 + i];
            x[p] = u * c - v * s;
            x[q] = u * s + v * c;
        }
        const size_t at = op_slot(&b, (uint32_t)b.seq[t], (uint32_t)b.pos[t]);
        for (uint32_t i = 0; i < D; i++) got[i] = (float)op_kv_at(&host, at, i);
        const double most = dtype == NBI_F32 ? 1e-6 : dtype == NBI_BF16 ? 0.004 : 0.0625;
        OP_ASSERT_ERROR(op_error(got, x, D), most, "index key %u", t);
    }
    free(got_cache);
    op_free(host.data);
    gpu_buffer *buffers[] = {&gk, &gw, &gb, &gc, &gs, &cache};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) gpu_free(buffers[i]);
    gpu_close(g);
    float *hosts[] = {k, w, bias, cs, sn};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) op_free(hosts[i]);
    op_batch_free(&b);
}

static void test_append(void **state)
{
    (void)state;
    static const nbi_dtype types[] = {NBI_F32, NBI_BF16, NBI_F8_E4M3};
    for (int i = 0; i < 6; i++) check_append(types[i / 2], i & 1);
}

/* ---------------------------------------------------------------- what waits for the choice */

enum { AT_ONCE_DIM = 128, AT_ONCE_ROPE = 64, AT_ONCE_WIDTH = 784 };

typedef struct at_once {
    index_data d;
    float *x, *k, *norm, *bias;
    nbi_weight *first, *weigh; /* of a product that waits; of the heads' weights */
    gpu_buffer keys;
} at_once;

typedef struct at_once_result {
    int32_t *select;
    float *w;
    void *keys;
} at_once_result;

/* A decoded row of each sequence; key and weights as a layer makes them. apart: one by one. */
static at_once_result run_at_once(nbi_backend *g, const at_once *a, bool apart)
{
    const index_data *d = &a->d;
    const index_case *c = &d->c;
    const uint32_t T = d->batch.b.n_rows, half = AT_ONCE_ROPE / 2;
    const size_t nq = (size_t)c->heads * c->dim;
    gpu_buffer x = gpu_floats(g, a->x, (size_t)T * AT_ONCE_WIDTH);
    gpu_buffer y = gpu_poisoned(g, (size_t)T * 16 * sizeof(float));
    gpu_buffer k = gpu_floats(g, a->k, (size_t)T * c->dim), q = gpu_floats(g, d->q, T * nq);
    gpu_buffer norm = gpu_floats(g, a->norm, c->dim), bias = gpu_floats(g, a->bias, c->dim);
    gpu_buffer cs = gpu_floats(g, d->cs, T * half), sn = gpu_floats(g, d->sn, T * half);
    gpu_buffer w = gpu_poisoned(g, (size_t)T * c->heads * sizeof(float));
    gpu_buffer sel = gpu_poisoned(g, (size_t)T * c->topk * sizeof(int32_t));
    gpu_buffer keys = gpu_bytes(g, d->keys.data, d->keys.bytes);
    const nbi_kv_layer kv = {.dtype = c->cache, .index_k = keys.p};
    const nbi_rope_rows rope = {
        .cos = cs.p, .sin = sn.p, .dim = AT_ONCE_ROPE, .interleaved = c->interleaved};
    const nbi_batch *batch = gpu_step(g, &d->batch.b);
    nbi_linear_args l = {
        .y = y.p, .x = x.p, .w = a->first, .n_rows = T, .x_stride = AT_ONCE_WIDTH, .y_stride = 16};
    g->ops->linear(g, &l);
    l.y = w.p;
    l.w = a->weigh;
    l.y_stride = c->heads;
    l.y_f32 = l.x_exact = true;
    g->ops->linear(g, &l);
    if (apart) gpu_sync(g);
    g->ops->index_append(g, &(nbi_index_append_args){.k = k.p,
                                                     .norm_weight = norm.p,
                                                     .norm_bias = bias.p,
                                                     .eps = 1e-6f,
                                                     .index_dim = c->dim,
                                                     .rope = &rope,
                                                     .cache = &kv,
                                                     .batch = batch});
    if (apart) gpu_sync(g);
    g->ops->index_select(g, &(nbi_index_select_args){.select = sel.p,
                                                     .q = q.p,
                                                     .w = w.p,
                                                     .n_heads = c->heads,
                                                     .index_dim = c->dim,
                                                     .topk = c->topk,
                                                     .rope = &rope,
                                                     .cache = &kv,
                                                     .batch = batch});
    gpu_step_end(g);
    const at_once_result r = {gpu_read(&sel), gpu_read(&w), gpu_read(&keys)};
    gpu_buffer *all[] = {&x, &y, &k, &q, &norm, &bias, &cs, &sn, &w, &sel, &keys};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) gpu_free(all[i]);
    return r;
}

static void check_at_once(const index_case *c, const uint32_t *lengths, uint32_t n_seqs)
{
    static const uint32_t rows[] = {1, 1, 1, 1, 1, 1, 1, 1};
    at_once a;
    mat first, weigh;
    nb_error err;
    ix_make(&a.d, c, lengths, rows, n_seqs);
    a.x = op_floats((size_t)n_seqs * AT_ONCE_WIDTH);
    a.k = op_floats((size_t)n_seqs * c->dim);
    a.norm = op_floats(c->dim);
    a.bias = op_floats(c->dim);
    op_fill(a.x, (size_t)n_seqs * AT_ONCE_WIDTH, 1);
    op_fill(a.k, (size_t)n_seqs * c->dim, 1);
    op_fill(a.norm, c->dim, 1);
    op_fill(a.bias, c->dim, 1);
    mat_make(&first, NBI_WEIGHT_BF16, 16, AT_ONCE_WIDTH, false);
    mat_make(&weigh, NBI_WEIGHT_BF16, c->heads, AT_ONCE_WIDTH, false);
    nbi_limits limits = ix_limits(&a.d);
    limits.max_linear_cols = AT_ONCE_WIDTH;
    nbi_backend *g = gpu_open(&limits);
    if (g->ops->weight_prepare(g, &a.first, &first.m, &err) != NB_OK ||
        g->ops->weight_prepare(g, &a.weigh, &weigh.m, &err) != NB_OK)
        fail_msg("%s", err.text);
    at_once_result want = run_at_once(g, &a, true), got = run_at_once(g, &a, false);
    assert_memory_equal(got.select, want.select, (size_t)n_seqs * c->topk * sizeof(int32_t));
    assert_memory_equal(got.keys, want.keys, a.d.keys.bytes);
    for (uint32_t t = 0; t < n_seqs; t++) {
        assert_true(want.w[(size_t)t * c->heads] == want.w[(size_t)t * c->heads]);
        if (lengths[t] > c->topk) /* else nobody needs them */
            assert_memory_equal(got.w + (size_t)t * c->heads, want.w + (size_t)t * c->heads,
                                c->heads * sizeof(float));
    }
    memcpy(a.d.keys.data, want.keys, a.d.keys.bytes);
    memcpy(a.d.w, want.w, (size_t)n_seqs * c->heads * sizeof(float));
    for (uint32_t t = 0; t < n_seqs; t++) ix_check(&a.d, t, got.select + (size_t)t * c->topk);
    at_once_result *both[] = {&want, &got};
    for (int i = 0; i < 2; i++) {
        free(both[i]->select);
        free(both[i]->w);
        free(both[i]->keys);
    }
    g->ops->weight_release(g, &a.first);
    g->ops->weight_release(g, &a.weigh);
    gpu_close(g);
    mat_free(&first);
    mat_free(&weigh);
    float *hosts[] = {a.x, a.k, a.norm, a.bias};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) op_free(hosts[i]);
    ix_free(&a.d);
}

static void test_at_once(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 64, 65, 128, 129, 500}, one[] = {700};
    check_at_once(&(index_case){32, AT_ONCE_DIM, AT_ONCE_ROPE, 64, NBI_BF16, true}, lengths, 6);
    check_at_once(&(index_case){64, AT_ONCE_DIM, AT_ONCE_ROPE, 200, NBI_BF16, false}, one, 1);
    check_at_once(&(index_case){32, AT_ONCE_DIM, AT_ONCE_ROPE, 50, NBI_F8_E4M3, false}, one, 1);
}

/* Equal scores in all, and in runs: the choice by bins and by digits. */
static void test_row_ties(void **state)
{
    (void)state;
    enum { N = 3000, K = 700 };
    const uint32_t n = N, rows[] = {1};
    for (int kinds = 1; kinds <= 9; kinds += 8) {
        index_data d;
        ix_make(&d, &(index_case){32, AT_ONCE_DIM, AT_ONCE_ROPE, K, NBI_BF16, true}, &n, rows, 1);
        uint16_t *k = d.kv.index_k;
        for (uint32_t p = 0; p < N; p++)
            memcpy(k + op_slot(&d.batch, 0, p) * AT_ONCE_DIM,
                   k + op_slot(&d.batch, 0, p % (uint32_t)kinds) * AT_ONCE_DIM,
                   AT_ONCE_DIM * sizeof *k);
        int32_t got[K];
        run(&d, got);
        ix_check(&d, 0, got);
        for (int i = 0; kinds == 1 && i < K; i++) assert_int_equal(got[i], i);
        for (int i = 1; i < K; i++) assert_true(got[i] > got[i - 1]);
        ix_free(&d);
    }
}

/* Lists of an earlier pass, against the plain loop of the CPU. */
static void test_reuse(void **state)
{
    (void)state;
    enum { T = 5, K = 700, FIRST = 3 };
    static const uint32_t lengths[T] = {1, 100, 700, 701, 5000}, rows[T] = {1, 1, 1, 1, 1};
    static const int32_t list_rows[T] = {0, 0, 2, 1, 1};
    index_data d;
    ix_make(&d, &(index_case){1, 32, 8, K, NBI_BF16, true}, lengths, rows, T);
    const nbi_limits limits = ix_limits(&d);
    static int32_t from[FIRST][K], expected[T][K];
    for (int i = 0; i < K; i++) {
        from[0][i] = i < 98 ? i : -1;
        from[1][i] = 7 * i;
        from[2][i] = i < 699 ? i : -1;
    }
    nbi_batch b = d.batch.b;
    b.list_rows = list_rows;
    nbi_cpu *cpu = op_open(NBI_CPU_REFERENCE, 1, NULL);
    nbi_backend *g = gpu_open(&limits);
    gpu_buffer lists = gpu_bytes(g, from, sizeof from), sel = gpu_poisoned(g, sizeof expected);
    for (int listed = 0; listed < 2; listed++) {
        cpu->base.ops->index_reuse(&cpu->base,
                                   &(nbi_index_reuse_args){.select = &expected[0][0],
                                                           .from = listed ? &from[0][0] : NULL,
                                                           .topk = K,
                                                           .batch = &b});
        g->ops->index_reuse(g, &(nbi_index_reuse_args){.select = sel.p,
                                                       .from = listed ? lists.p : NULL,
                                                       .topk = K,
                                                       .batch = gpu_step(g, &b)});
        gpu_step_end(g);
        int32_t *got = gpu_read(&sel);
        assert_memory_equal(got, expected, sizeof expected);
        free(got);
    }
    gpu_free(&lists);
    gpu_free(&sel);
    gpu_close(g);
    op_close(cpu);
    ix_free(&d);
}

/* ---------------------------------------------------------------- speed */

typedef struct bench_run {
    nbi_backend *b;
    nbi_index_select_args a;
    uint32_t calls;
} bench_run;

static void bench_calls(void *arg)
{
    bench_run *r = arg;
    for (uint32_t i = 0; i < r->calls; i++) r->b->ops->index_select(r->b, &r->a);
    gpu_sync(r->b);
}

/* One sequence of `length` positions, its last rows; 32 heads of 128, 2,048 chosen. */
static void bench_select(uint32_t length, uint32_t rows)
{
    index_data d;
    ix_make(&d, &(index_case){32, 128, 64, 2048, NBI_BF16, true}, &length, &rows, 1);
    const uint32_t T = rows;
    const nbi_limits limits = ix_limits(&d);
    nbi_backend *g = gpu_open(&limits);
    gpu_buffer keys = keys_of(g, &d), q = gpu_floats(g, d.q, (size_t)T * 32 * 128);
    gpu_buffer w = gpu_floats(g, d.w, T * 32), cs = gpu_floats(g, d.cs, T * 32);
    gpu_buffer sn = gpu_floats(g, d.sn, T * 32), sel = gpu_poisoned(g, (size_t)T * 2048 * 4);
    const nbi_kv_layer kv = {.dtype = NBI_BF16, .index_k = keys.p};
    const nbi_rope_rows rope = {.cos = cs.p, .sin = sn.p, .dim = 64, .interleaved = true};
    bench_run r = {.b = g, .calls = 16};
    r.a = (nbi_index_select_args){.select = sel.p,
                                  .q = q.p,
                                  .w = w.p,
                                  .n_heads = 32,
                                  .index_dim = 128,
                                  .topk = 2048,
                                  .rope = &rope,
                                  .cache = &kv,
                                  .batch = gpu_step(g, &d.batch.b)};
    const double s = op_time(bench_calls, &r, 5) / r.calls;
    double visible = 0;
    for (uint32_t t = 0; t < T; t++) visible += d.batch.pos[t] + 1;
    printf("  index_select len %6u rows %4u %9.1f us %8.2f TFLOP/s, keys %6.1f MB (in L2)\n",
           length, rows, s * 1e6, visible * 32 * 128 * 2e-12 / s, length * 256e-6);
    gpu_step_end(g);
    gpu_buffer *all[] = {&keys, &q, &w, &cs, &sn, &sel};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) gpu_free(all[i]);
    gpu_close(g);
    ix_free(&d);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) {
        bench_select(8192, 1);
        bench_select(65536, 1);
        bench_select(131072, 1);
        bench_select(8192, 2048);
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),         cmocka_unit_test(test_ties),
        cmocka_unit_test(test_long_context),   cmocka_unit_test(test_bits),
        cmocka_unit_test(test_codes_are_bf16), cmocka_unit_test(test_append),
        cmocka_unit_test(test_reuse),          cmocka_unit_test(test_at_once),
        cmocka_unit_test(test_row_ties),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
