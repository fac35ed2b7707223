/* MLA and GQA on the CUDA backend against float64 oracles; and the rule that a row's bits depend
 * on the row alone. `--bench` times them. */
#include "cuda/gpu_util.h"
#include "kernel/attention_util.h"

/* float32 sums of up to a few thousand terms; BF16 caches may meet queries and probabilities of 16
 * bits. */
static double bound(nbi_dtype cache)
{
    return cache == NBI_F32 ? 4e-6 : 4e-5;
}

/* ---------------------------------------------------------------- MLA */

/* What lies on the device for all calls of a case. */
typedef struct gpu_mla {
    nbi_backend *b;
    const at_mla *d;
    gpu_buffer latent;
    nbi_weight *kv_b;
} gpu_mla;

static bool without_warpgroups; /* attend_mla.cu where attend_wide.cu would do it */

static gpu_mla mla_open(const at_mla *d)
{
    const nbi_limits limits = at_mla_limits(&d->c, d->batch.b.n_rows, d->batch.b.max_len);
    gpu_mla g = {.b = gpu_open(&limits), .d = d};
    g.latent = gpu_bytes(g.b, d->cache.data, d->cache.bytes);
    nb_error err = {0};
    if (g.b->ops->weight_prepare(g.b, &g.kv_b, &d->kv_b.host, &err) != NB_OK)
        fail_msg("%s", err.text);
    if (without_warpgroups) g.b->sm = 80;
    return g;
}

static void mla_close(gpu_mla *g)
{
    g->b->ops->weight_release(g->b, &g->kv_b);
    gpu_free(&g->latent);
    gpu_close(g->b);
}

/* Rows of `batch`, which begin at row `first` of the case. */
static void mla_run(const gpu_mla *g, const nbi_batch *batch, uint32_t first, float *out)
{
    const at_mla_case *c = &g->d->c;
    const size_t T = batch->n_rows, nq = (size_t)c->heads * (c->nope + c->rope);
    gpu_buffer q = gpu_floats(g->b, g->d->q + first * nq, T * nq);
    gpu_buffer o = gpu_poisoned(g->b, T * c->heads * c->v * sizeof(float)), sel = {0};
    if (c->topk) sel = gpu_bytes(g->b, g->d->select + (size_t)first * c->topk, T * c->topk * 4);
    const nbi_kv_layer kv = {.dtype = c->cache, .latent = g->latent.p};
    g->b->ops->mla_attend(g->b, &(nbi_mla_attend_args){.out = o.p,
                                                       .q = q.p,
                                                       .kv_b = g->kv_b,
                                                       .n_heads = c->heads,
                                                       .nope_dim = c->nope,
                                                       .rope_dim = c->rope,
                                                       .kv_lora = c->lora,
                                                       .v_dim = c->v,
                                                       .scale = g->d->scale,
                                                       .cache = &kv,
                                                       .select = sel.p,
                                                       .select_stride = c->topk,
                                                       .batch = gpu_step(g->b, batch)});
    gpu_step_end(g->b);
    float *got = gpu_read(&o);
    memcpy(out, got, T * c->heads * c->v * sizeof(float));
    free(got);
    gpu_free(&q);
    gpu_free(&o);
    if (c->topk) gpu_free(&sel);
}

static void check_mla(const at_mla_case *c, const uint32_t *lengths, const uint32_t *rows,
                      uint32_t n_seqs)
{
    at_mla d;
    at_make_mla(&d, c, lengths, rows, n_seqs);
    const uint32_t T = d.batch.b.n_rows;
    double *want = malloc(c->v * sizeof *want);
    gpu_mla g = mla_open(&d);
    mla_run(&g, &d.batch.b, 0, d.out);
    for (uint32_t t = 0; t < T; t++)
        for (uint32_t h = 0; h < c->heads; h++) {
            at_oracle_mla(&d, t, h, want);
            OP_ASSERT_ERROR(op_error(d.out + ((size_t)t * c->heads + h) * c->v, want, c->v),
                            bound(c->cache),
                            "mla heads %u nope %u rope %u lora %u v %u cache %s weight %s topk %u "
                            "row %u (pos %d) head %u",
                            c->heads, c->nope, c->rope, c->lora, c->v, nbi_dtype_name(c->cache),
                            nbi_weight_kind_name(c->kind), c->topk, t, d.batch.pos[t], h);
        }
    mla_close(&g);
    free(want);
    at_free_mla(&d);
}

static void test_mla_shapes(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65}, rows[] = {1, 2, 1, 2, 3};
    static const at_mla_case cases[] = {
        {1, 16, 8, 32, 16, NBI_F32, NBI_WEIGHT_F32, 0},
        {3, 20, 8, 32, 24, NBI_BF16, NBI_WEIGHT_BF16, 0},
        {7, 24, 64, 512, 40, NBI_BF16, NBI_WEIGHT_BF16, 0},
        {64, 8, 64, 32, 8, NBI_F32, NBI_WEIGHT_BF16, 0},
        {3, 16, 8, 64, 16, NBI_F32, NBI_WEIGHT_NVFP4, 0},
        {2, 100, 8, 160, 50, NBI_BF16, NBI_WEIGHT_FP8_BLOCK, 0},
        {3, 16, 10, 44, 17, NBI_BF16, NBI_WEIGHT_F16, 0},
        {3, 16, 8, 32, 16, NBI_BF16, NBI_WEIGHT_BF16, 16},
        {5, 16, 8, 32, 16, NBI_F32, NBI_WEIGHT_BF16, 2048},
        {3, 16, 8, 140, 16, NBI_F8_E4M3, NBI_WEIGHT_BF16, 0},
        {7, 24, 64, 512, 40, NBI_F8_E4M3, NBI_WEIGHT_BF16, 0},
        {3, 16, 8, 32, 16, NBI_F8_E4M3, NBI_WEIGHT_NVFP4, 16},
        {2, 48, 64, 512, 144, NBI_BF16, NBI_WEIGHT_BF16, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_mla(&cases[i], lengths, rows, 5);
    /* shapes of real models */
    static const uint32_t longer[] = {200, 1}, one[] = {1, 1};
    check_mla(&(at_mla_case){4, 192, 64, 512, 256, NBI_BF16, NBI_WEIGHT_BF16, 0}, longer, one, 2);
    check_mla(&(at_mla_case){128, 128, 64, 512, 128, NBI_BF16, NBI_WEIGHT_NVFP4, 0}, longer, one,
              2);
    check_mla(&(at_mla_case){64, 24, 64, 512, 16, NBI_BF16, NBI_WEIGHT_BF16, 40}, longer, one, 2);
    check_mla(&(at_mla_case){64, 24, 64, 512, 16, NBI_F8_E4M3, NBI_WEIGHT_BF16, 40}, longer, one,
              2);
}

static void test_mla_long(void **state)
{
    (void)state;
    const uint32_t one[] = {1000}, two[] = {2};
    check_mla(&(at_mla_case){3, 16, 8, 32, 16, NBI_F32, NBI_WEIGHT_F32, 0}, one, two, 1);
    check_mla(&(at_mla_case){3, 16, 8, 32, 16, NBI_BF16, NBI_WEIGHT_BF16, 700}, one, two, 1);
    const uint32_t longer[] = {17000, 513}, both[] = {2, 2};
    check_mla(&(at_mla_case){2, 4, 8, 16, 4, NBI_BF16, NBI_WEIGHT_F32, 0}, longer, both, 2);
}

/* The rows of a case in chunks of at most `most` rows of one sequence, into `out`. */
typedef void (*run_slice)(const void *g, const nbi_batch *b, uint32_t first, float *out);

static void in_chunks(const void *g, run_slice run, const op_batch *batch, uint32_t most,
                      size_t width, float *out)
{
    for (uint32_t t = 0, end; t < batch->b.n_rows; t = end) {
        for (end = t; end < batch->b.n_rows && end - t < most && batch->seq[end] == batch->seq[t];)
            end++;
        op_batch part;
        op_batch_slice(&part, batch, t, end);
        run(g, &part.b, t, out + t * width);
        op_batch_free(&part);
    }
}

static void mla_slice(const void *g, const nbi_batch *b, uint32_t first, float *out)
{
    mla_run(g, b, first, out);
}

static void mla_bits(const at_mla_case *c, const uint32_t *lengths, const uint32_t *rows,
                     uint32_t n_seqs)
{
    at_mla d;
    at_make_mla(&d, c, lengths, rows, n_seqs);
    const size_t width = (size_t)c->heads * c->v, bytes = d.batch.b.n_rows * width * sizeof(float);
    float *other = op_floats(d.batch.b.n_rows * width);
    gpu_mla g = mla_open(&d);
    mla_run(&g, &d.batch.b, 0, d.out);
    static const uint32_t chunks[] = {1, 3};
    for (size_t k = 0; k < 2; k++) {
        in_chunks(&g, mla_slice, &d.batch, chunks[k], width, other);
        assert_memory_equal(other, d.out, bytes);
    }
    mla_close(&g);
    op_free(other);
    at_free_mla(&d);
}

static void test_mla_bits(void **state)
{
    (void)state;
    const uint32_t lengths[] = {330, 20, 1}, rows[] = {9, 20, 1};
    mla_bits(&(at_mla_case){3, 24, 8, 40, 16, NBI_F32, NBI_WEIGHT_BF16, 0}, lengths, rows, 3);
    mla_bits(&(at_mla_case){4, 16, 8, 64, 16, NBI_BF16, NBI_WEIGHT_NVFP4, 100}, lengths, rows, 3);
    const uint32_t few[] = {5, 2, 1};
    mla_bits(&(at_mla_case){20, 8, 64, 512, 8, NBI_BF16, NBI_WEIGHT_BF16, 0}, lengths, few, 3);
    mla_bits(&(at_mla_case){20, 8, 64, 512, 8, NBI_BF16, NBI_WEIGHT_BF16, 150}, lengths, few, 3);
    mla_bits(&(at_mla_case){20, 8, 64, 512, 8, NBI_F8_E4M3, NBI_WEIGHT_BF16, 0}, lengths, few, 3);
}

/* Products of 64 rows at once, where blocks of them fill the device: sides with ends inside of
 * blocks, and as many heads as a real device needs. */
static void test_mla_many_rows(void **state)
{
    (void)state;
    const uint32_t lengths[] = {70, 3, 40}, rows[] = {66, 1, 1};
    mla_bits(&(at_mla_case){3, 80, 8, 288, 144, NBI_BF16, NBI_WEIGHT_BF16, 0}, lengths, rows, 3);
    const at_mla_case c = {50, 48, 8, 160, 16, NBI_BF16, NBI_WEIGHT_BF16, 0};
    mla_bits(&c, lengths, rows, 1);
    check_mla(&c, lengths, rows, 3);
}

/* What devices other than 9.0 do. */
static void test_mla_without_warpgroups(void **state)
{
    (void)state;
    without_warpgroups = true;
    static const uint32_t lengths[] = {200, 65, 1}, rows[] = {5, 2, 1};
    const at_mla_case c = {20, 8, 64, 512, 8, NBI_BF16, NBI_WEIGHT_BF16, 0};
    at_mla_case other = c;
    check_mla(&c, lengths, rows, 3);
    mla_bits(&c, lengths, rows, 3);
    other.topk = 90;
    mla_bits(&other, lengths, rows, 3);
    other = c;
    other.cache = NBI_F8_E4M3;
    check_mla(&other, lengths, rows, 3);
    without_warpgroups = false;
}

/* A list of all positions gives the bits of the dense form. */
static void check_mla_identity(const at_mla_case *dense, uint32_t length, uint32_t n_rows)
{
    at_mla_case c = *dense;
    c.topk = length + 5;
    at_mla d;
    at_make_mla(&d, &c, &length, &n_rows, 1);
    const size_t n = (size_t)n_rows * c.heads * c.v;
    float *other = op_floats(n);
    gpu_mla g = mla_open(&d);
    mla_run(&g, &d.batch.b, 0, d.out);
    d.c.topk = 0;
    mla_run(&g, &d.batch.b, 0, other);
    assert_memory_equal(other, d.out, n * sizeof(float));
    mla_close(&g);
    op_free(other);
    at_free_mla(&d);
}

static void test_mla_identity(void **state)
{
    (void)state;
    check_mla_identity(&(at_mla_case){3, 24, 8, 40, 16, NBI_BF16, NBI_WEIGHT_BF16, 0}, 200, 3);
    check_mla_identity(&(at_mla_case){33, 8, 64, 512, 8, NBI_BF16, NBI_WEIGHT_BF16, 0}, 200, 2);
}

/* ---------------------------------------------------------------- GQA */

typedef struct gpu_gqa {
    nbi_backend *b;
    const at_gqa *d;
    gpu_buffer k, v;
} gpu_gqa;

static gpu_gqa gqa_open(const at_gqa *d)
{
    const nbi_limits limits = at_gqa_limits(&d->c, d->batch.b.n_rows, d->batch.b.max_len);
    gpu_gqa g = {.b = gpu_open(&limits), .d = d};
    g.k = gpu_bytes(g.b, d->k.data, d->k.bytes);
    g.v = gpu_bytes(g.b, d->v.data, d->v.bytes);
    return g;
}

static void gqa_close(gpu_gqa *g)
{
    gpu_free(&g->k);
    gpu_free(&g->v);
    gpu_close(g->b);
}

static void gqa_run(const void *arg, const nbi_batch *batch, uint32_t first, float *out)
{
    const gpu_gqa *g = arg;
    const at_gqa_case *c = &g->d->c;
    const size_t width = (size_t)c->heads * c->dim, n = batch->n_rows * width;
    gpu_buffer q = gpu_floats(g->b, g->d->q + first * width, n);
    gpu_buffer o = gpu_poisoned(g->b, n * sizeof(float));
    const nbi_kv_layer kv = {.dtype = c->cache, .k = g->k.p, .v = g->v.p};
    g->b->ops->gqa_attend(g->b, &(nbi_gqa_attend_args){.out = o.p,
                                                       .q = q.p,
                                                       .n_heads = c->heads,
                                                       .n_kv_heads = c->kv_heads,
                                                       .head_dim = c->dim,
                                                       .scale = g->d->scale,
                                                       .cache = &kv,
                                                       .batch = gpu_step(g->b, batch)});
    gpu_step_end(g->b);
    float *got = gpu_read(&o);
    memcpy(out, got, n * sizeof(float));
    free(got);
    gpu_free(&q);
    gpu_free(&o);
}

static void check_gqa(const at_gqa_case *c, const uint32_t *lengths, const uint32_t *rows,
                      uint32_t n_seqs)
{
    at_gqa d;
    at_make_gqa(&d, c, lengths, rows, n_seqs);
    double *want = malloc(c->dim * sizeof *want);
    gpu_gqa g = gqa_open(&d);
    gqa_run(&g, &d.batch.b, 0, d.out);
    for (uint32_t t = 0; t < d.batch.b.n_rows; t++)
        for (uint32_t h = 0; h < c->heads; h++) {
            at_oracle_gqa(&d, t, h, want);
            OP_ASSERT_ERROR(op_error(d.out + ((size_t)t * c->heads + h) * c->dim, want, c->dim),
                            bound(c->cache),
                            "gqa heads %u/%u dim %u cache %s row %u pos %d head %u", c->heads,
                            c->kv_heads, c->dim, nbi_dtype_name(c->cache), t, d.batch.pos[t], h);
        }
    gqa_close(&g);
    free(want);
    at_free_gqa(&d);
}

static void test_gqa_shapes(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65, 300}, rows[] = {1, 2, 1, 20, 3, 5};
    static const at_gqa_case cases[] = {
        {1, 1, 32, NBI_F32},     {3, 1, 96, NBI_BF16},     {8, 1, 128, NBI_BF16},
        {4, 2, 128, NBI_F32},    {6, 6, 32, NBI_BF16},     {9, 3, 20, NBI_F32},
        {70, 1, 8, NBI_BF16},    {3, 3, 150, NBI_F8_E4M3}, {8, 1, 128, NBI_F8_E4M3},
        {6, 2, 64, NBI_F8_E4M3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_gqa(&cases[i], lengths, rows, 6);
    /* shapes of real models: one row each, and rows that share blocks */
    static const uint32_t one[] = {1, 1, 1};
    check_gqa(&(at_gqa_case){32, 4, 128, NBI_BF16}, lengths + 3, one, 3);
    check_gqa(&(at_gqa_case){24, 2, 128, NBI_BF16}, lengths + 3, rows + 3, 3);
    check_gqa(&(at_gqa_case){64, 8, 64, NBI_BF16}, lengths + 3, one, 3);
}

static void gqa_bits(const at_gqa_case *c, const uint32_t *lengths, const uint32_t *rows,
                     uint32_t n_seqs)
{
    at_gqa d;
    at_make_gqa(&d, c, lengths, rows, n_seqs);
    const size_t width = (size_t)c->heads * c->dim,
                 bytes = d.batch.b.n_rows * width * sizeof(float);
    float *other = op_floats(d.batch.b.n_rows * width);
    gpu_gqa g = gqa_open(&d);
    gqa_run(&g, &d.batch.b, 0, d.out);
    static const uint32_t chunks[] = {1, 3};
    for (size_t k = 0; k < 2; k++) {
        in_chunks(&g, gqa_run, &d.batch, chunks[k], width, other);
        assert_memory_equal(other, d.out, bytes);
    }
    gqa_close(&g);
    op_free(other);
    at_free_gqa(&d);
}

static void test_gqa_bits(void **state)
{
    (void)state;
    const uint32_t lengths[] = {330, 20, 1}, rows[] = {24, 20, 1};
    gqa_bits(&(at_gqa_case){6, 2, 36, NBI_F32}, lengths, rows, 3);
    gqa_bits(&(at_gqa_case){3, 1, 96, NBI_BF16}, lengths, rows, 3);
    gqa_bits(&(at_gqa_case){6, 2, 128, NBI_BF16}, lengths, rows, 3);
    gqa_bits(&(at_gqa_case){24, 1, 64, NBI_BF16}, lengths, rows, 3);
    gqa_bits(&(at_gqa_case){6, 2, 128, NBI_F8_E4M3}, lengths, rows, 3);
    gqa_bits(&(at_gqa_case){24, 1, 64, NBI_F8_E4M3}, lengths, rows, 3);
}

/* Codes are read as the BF16 values that they are: the same bits as from a BF16 cache of these, few
 * rows and many. */
static void test_codes_are_bf16(void **state)
{
    (void)state;
    const uint32_t lengths[] = {200, 20, 1}, rows[] = {13, 20, 1}, few[] = {2, 1, 1};
    for (int i = 0; i < 4; i++) {
        at_gqa d;
        at_make_gqa(&d, &(at_gqa_case){8, 2, i & 1 ? 64 : 128, NBI_F8_E4M3}, lengths,
                    i & 2 ? few : rows, 3);
        const size_t n = (size_t)d.batch.b.n_rows * d.c.heads * d.c.dim;
        float *other = op_floats(n);
        gpu_gqa g = gqa_open(&d);
        gqa_run(&g, &d.batch.b, 0, d.out);
        gqa_close(&g);
        const op_kv k = op_kv_bf16(&d.k), v = op_kv_bf16(&d.v);
        op_free(d.k.data);
        op_free(d.v.data);
        d.k = k;
        d.v = v;
        d.kv = (nbi_kv_layer){.dtype = NBI_BF16, .k = k.data, .v = v.data};
        d.c.cache = NBI_BF16;
        g = gqa_open(&d);
        gqa_run(&g, &d.batch.b, 0, other);
        gqa_close(&g);
        assert_memory_equal(other, d.out, n * sizeof *other);
        op_free(other);
        at_free_gqa(&d);
    }
    for (int i = 0; i < 4; i++) {
        at_mla d;
        const at_mla_case c = {20, 8, 64, 512, 8, NBI_F8_E4M3, NBI_WEIGHT_BF16, i & 1 ? 90 : 0};
        at_make_mla(&d, &c, lengths, i & 2 ? few : rows, i & 2 ? 2 : 1);
        const size_t n = (size_t)d.batch.b.n_rows * c.heads * c.v;
        float *other = op_floats(n);
        gpu_mla g = mla_open(&d);
        mla_run(&g, &d.batch.b, 0, d.out);
        mla_close(&g);
        const op_kv latent = op_kv_bf16(&d.cache);
        op_free(d.cache.data);
        d.cache = latent;
        d.kv = (nbi_kv_layer){.dtype = NBI_BF16, .latent = latent.data};
        d.c.cache = NBI_BF16;
        g = mla_open(&d);
        mla_run(&g, &d.batch.b, 0, other);
        mla_close(&g);
        assert_memory_equal(other, d.out, n * sizeof *other);
        op_free(other);
        at_free_mla(&d);
    }
}

/* Splits grow inside the rows of one chunk. */
static void test_gqa_long(void **state)
{
    (void)state;
    const uint32_t length = 8193, rows = 3;
    gqa_bits(&(at_gqa_case){2, 1, 64, NBI_BF16}, &length, &rows, 1);
}

/* ---------------------------------------------------------------- append */

static const nbi_dtype cache_types[] = {NBI_F32, NBI_BF16, NBI_F8_E4M3};

/* What lies on the device. */
static void read_cache(const op_kv *to, const gpu_buffer *from)
{
    void *got = gpu_read(from);
    memcpy(to->data, got, to->bytes);
    free(got);
}

static void check_mla_append(nbi_dtype dtype, bool interleaved)
{
    enum { H = 3, NOPE = 20, ROPE = 8, LORA = 150, STRIDE = LORA + ROPE + 5, HEAD = NOPE + ROPE };
    const uint32_t lengths[] = {70, 64, 1}, rows[] = {20, 1, 1};
    op_batch b;
    op_batch_make(&b, lengths, rows, 3);
    const uint32_t T = b.b.n_rows;
    float *q0 = op_floats((size_t)T * H * HEAD), *kv = op_floats((size_t)T * STRIDE);
    float *norm = op_floats(LORA), *cs, *sn;
    at_angles(&cs, &sn, &b, ROPE);
    op_fill(kv, (size_t)T * STRIDE, 0.01f); /* small: eps shows */
    op_fill(norm, LORA, 1);
    op_fill(q0, (size_t)T * H * HEAD, 1);
    const nbi_limits limits = {.max_rows = T, .max_seqs = 3, .max_context = 70};
    nbi_backend *g = gpu_open(&limits);
    gpu_buffer q = gpu_floats(g, q0, (size_t)T * H * HEAD), k = gpu_floats(g, kv, T * STRIDE);
    gpu_buffer w = gpu_floats(g, norm, LORA), c = gpu_floats(g, cs, T * ROPE / 2);
    gpu_buffer s = gpu_floats(g, sn, T * ROPE / 2);
    const op_kv cache = op_kv_empty(dtype, b.n_pages, 1, LORA + ROPE, LORA);
    gpu_buffer latent = gpu_poisoned(g, cache.bytes);
    const nbi_kv_layer layer = {.dtype = dtype, .latent = latent.p};
    const nbi_rope_rows rope = {.cos = c.p, .sin = s.p, .dim = ROPE, .interleaved = interleaved};
    g->ops->mla_append(g, &(nbi_mla_append_args){.q = q.p,
                                                 .kv = k.p,
                                                 .kv_norm = w.p,
                                                 .eps = 1e-4f,
                                                 .n_heads = H,
                                                 .nope_dim = NOPE,
                                                 .rope_dim = ROPE,
                                                 .kv_lora = LORA,
                                                 .kv_stride = STRIDE,
                                                 .rope = &rope,
                                                 .cache = &layer,
                                                 .batch = gpu_step(g, &b.b)});
    gpu_step_end(g);
    read_cache(&cache, &latent);
    float *turned = gpu_read(&q);
    for (uint32_t t = 0; t < T; t++) {
        double want[LORA + ROPE], wq[HEAD];
        for (uint32_t i = 0; i < LORA + ROPE; i++) want[i] = (double)kv[t * STRIDE + i];
        at_norm(want, LORA, norm, (double)1e-4f);
        at_rotate(want + LORA, ROPE, interleaved, cs + t * ROPE / 2, sn + t * ROPE / 2);
        const size_t at = op_slot(&b, (uint32_t)b.seq[t], (uint32_t)b.pos[t]);
        OP_ASSERT_ERROR(at_cache_error(&cache, at, 0, want, LORA), at_cache_bound(dtype),
                        "latent row %u", t);
        OP_ASSERT_ERROR(at_cache_error(&cache, at, LORA, want + LORA, ROPE),
                        at_cache_bound(dtype == NBI_F32 ? dtype : NBI_BF16), "rope key row %u", t);
        for (uint32_t h = 0; h < H; h++) {
            const size_t o = ((size_t)t * H + h) * HEAD;
            for (uint32_t i = 0; i < HEAD; i++) wq[i] = (double)q0[o + i];
            at_rotate(wq + NOPE, ROPE, interleaved, cs + t * ROPE / 2, sn + t * ROPE / 2);
            OP_ASSERT_ERROR(op_error(turned + o, wq, HEAD), 1e-6, "q row %u head %u", t, h);
        }
    }
    gpu_buffer *buffers[] = {&q, &k, &w, &c, &s, &latent};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) gpu_free(buffers[i]);
    gpu_close(g);
    op_free(cache.data);
    free(turned);
    float *hosts[] = {q0, kv, norm, cs, sn};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) op_free(hosts[i]);
    op_batch_free(&b);
}

static void test_mla_append(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) check_mla_append(cache_types[i / 2], i & 1);
}

typedef struct gqa_rows {
    op_batch b;
    uint32_t rope_dim;
    bool normed;
    float *q, *k, *v, *q_norm, *k_norm, *cs, *sn;
} gqa_rows;

enum { GH = 6, GKV = 2, GD = 36 };

static void check_gqa_appended(const gqa_rows *r, nbi_dtype dtype, const float *q, const float *k,
                               const op_kv *cache_k, const op_kv *cache_v)
{
    double want[GD];
    const uint32_t half = r->rope_dim / 2;
    for (uint32_t t = 0; t < r->b.b.n_rows; t++)
        for (uint32_t h = 0; h < GH + GKV; h++) {
            const size_t at_q = ((size_t)t * GH + h) * GD;
            const size_t at_k = ((size_t)t * GKV + h - GH) * GD;
            const bool is_q = h < GH;
            for (uint32_t i = 0; i < GD; i++)
                want[i] = (double)(is_q ? r->q[at_q + i] : r->k[at_k + i]);
            if (r->normed) at_norm(want, GD, is_q ? r->q_norm : r->k_norm, (double)1e-4f);
            at_rotate(want, r->rope_dim, false, r->cs + t * half, r->sn + t * half);
            OP_ASSERT_ERROR(op_error(is_q ? q + at_q : k + at_k, want, GD), 1e-6,
                            "gqa append row %u head %u", t, h);
            if (is_q) continue;
            const size_t slot = op_slot(&r->b, (uint32_t)r->b.seq[t], (uint32_t)r->b.pos[t]);
            const size_t at = (slot / 64 * GKV + h - GH) * 64 + slot % 64;
            OP_ASSERT_ERROR(at_cache_error(cache_k, at, 0, want, GD), at_cache_bound(dtype), "k");
            for (uint32_t i = 0; i < GD; i++) want[i] = (double)r->v[at_k + i];
            OP_ASSERT_ERROR(at_cache_error(cache_v, at, 0, want, GD), at_cache_bound(dtype), "v");
        }
}

/* Values are stored as they came: the very codes and scales. */
static void check_stored(const gqa_rows *r, const op_kv *got)
{
    float *x = op_floats(got->n);
    memset(x, 0, got->n * sizeof *x);
    for (int pass = 0; pass < 2; pass++) {
        const op_kv want = op_kv_make(got->dtype, r->b.n_pages, GKV, GD, GD, x);
        for (uint32_t i = 0; i < r->b.b.n_rows * GKV * GD; i++) {
            const uint32_t t = i / GD / GKV, h = i / GD % GKV, c = i % GD;
            const size_t slot = op_slot(&r->b, (uint32_t)r->b.seq[t], (uint32_t)r->b.pos[t]);
            const size_t at = (slot / 64 * GKV + h) * 64 + slot % 64;
            x[at * GD + c] = r->v[i];
            if (pass) assert_true(op_kv_at(&want, at, c) == op_kv_at(got, at, c));
        }
        op_free(want.data);
    }
    op_free(x);
}

static void run_gqa_append(const gqa_rows *r, nbi_dtype dtype)
{
    const uint32_t T = r->b.b.n_rows, half = r->rope_dim / 2;
    const nbi_limits limits = {.max_rows = T, .max_seqs = 3, .max_context = 70};
    nbi_backend *g = gpu_open(&limits);
    gpu_buffer q = gpu_floats(g, r->q, (size_t)T * GH * GD), k = gpu_floats(g, r->k, T * GKV * GD);
    gpu_buffer v = gpu_floats(g, r->v, T * GKV * GD), c = gpu_floats(g, r->cs, T * half);
    gpu_buffer s = gpu_floats(g, r->sn, T * half), qn = gpu_floats(g, r->q_norm, GD);
    gpu_buffer kn = gpu_floats(g, r->k_norm, GD);
    const op_kv host_k = op_kv_empty(dtype, r->b.n_pages, GKV, GD, GD);
    const op_kv host_v = op_kv_empty(dtype, r->b.n_pages, GKV, GD, GD);
    gpu_buffer cache_k = gpu_poisoned(g, host_k.bytes), cache_v = gpu_poisoned(g, host_v.bytes);
    const nbi_kv_layer layer = {.dtype = dtype, .k = cache_k.p, .v = cache_v.p};
    const nbi_rope_rows rope = {.cos = c.p, .sin = s.p, .dim = r->rope_dim};
    g->ops->gqa_append(g, &(nbi_gqa_append_args){.q = q.p,
                                                 .k = k.p,
                                                 .v = v.p,
                                                 .q_norm = r->normed ? qn.p : NULL,
                                                 .k_norm = r->normed ? kn.p : NULL,
                                                 .eps = 1e-4f,
                                                 .n_heads = GH,
                                                 .n_kv_heads = GKV,
                                                 .head_dim = GD,
                                                 .rope = &rope,
                                                 .cache = &layer,
                                                 .batch = gpu_step(g, &r->b.b)});
    gpu_step_end(g);
    float *got_q = gpu_read(&q), *got_k = gpu_read(&k);
    read_cache(&host_k, &cache_k);
    read_cache(&host_v, &cache_v);
    check_gqa_appended(r, dtype, got_q, got_k, &host_k, &host_v);
    check_stored(r, &host_v);
    gpu_buffer *buffers[] = {&q, &k, &v, &c, &s, &qn, &kn, &cache_k, &cache_v};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) gpu_free(buffers[i]);
    gpu_close(g);
    free(got_q);
    free(got_k);
    op_free(host_k.data);
    op_free(host_v.data);
}

static void test_gqa_append(void **state)
{
    (void)state;
    const uint32_t lengths[] = {70, 64, 1}, rows[] = {20, 1, 1};
    for (int i = 0; i < 12; i++) {
        gqa_rows r = {.normed = i & 1, .rope_dim = i & 2 ? GD : GD / 2};
        op_batch_make(&r.b, lengths, rows, 3);
        at_angles(&r.cs, &r.sn, &r.b, r.rope_dim);
        const size_t T = r.b.b.n_rows;
        struct {
            float **x;
            size_t n;
            float scale;
        } fills[] = {{&r.q, T * GH * GD, 0.02f},
                     {&r.k, T * GKV * GD, 0.02f},
                     {&r.v, T * GKV * GD, 1},
                     {&r.q_norm, GD, 1},
                     {&r.k_norm, GD, 1}};
        for (size_t j = 0; j < 5; j++)
            op_fill(*fills[j].x = op_floats(fills[j].n), fills[j].n, fills[j].scale);
        run_gqa_append(&r, cache_types[i / 4]);
        for (size_t j = 0; j < 5; j++) op_free(*fills[j].x);
        op_free(r.cs);
        op_free(r.sn);
        op_batch_free(&r.b);
    }
}

/* ---------------------------------------------------------------- speed */

/* A cache of random BF16 values, in copies that together are larger than any L2, taken in turn. */
typedef struct bench_cache {
    nbi_backend *b;
    char *p;
    size_t copy_bytes, n_copies;
} bench_cache;

static bench_cache bench_fill(nbi_backend *b, size_t bytes, bool emulated)
{
    bench_cache c = {.b = b, .copy_bytes = (bytes + 255) / 256 * 256};
    c.n_copies = emulated ? 1 : ((size_t)256 << 20) / c.copy_bytes + 1;
    const size_t all = c.copy_bytes * c.n_copies, n = (size_t)1 << 20;
    c.p = b->ops->alloc(b, all);
    assert_non_null(c.p);
    uint16_t *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = nbi_f32_bf16(op_normal());
    for (size_t at = 0; at < all; at += n * sizeof *x)
        b->ops->upload(b, c.p + at, x, all - at < n * sizeof *x ? all - at : n * sizeof *x);
    free(x);
    return c;
}

static bool is_emulated(const nbi_backend *b)
{
    return strstr(b->description, "emulated") != NULL;
}

typedef struct bench_run {
    nbi_backend *b;
    bench_cache kv;
    nbi_kv_layer layer;
    nbi_mla_attend_args mla;
    nbi_gqa_attend_args gqa; /* when heads are given */
    size_t turn;
    uint32_t calls; /* per measurement */
} bench_run;

static void bench_calls(void *arg)
{
    bench_run *r = arg;
    for (uint32_t i = 0; i < r->calls; i++) {
        char *copy = r->kv.p + r->turn++ % r->kv.n_copies * r->kv.copy_bytes;
        if (r->gqa.n_heads) {
            r->layer.k = copy;
            r->layer.v = copy + r->kv.copy_bytes / 2 / 256 * 256;
            r->b->ops->gqa_attend(r->b, &r->gqa);
        } else {
            r->layer.latent = copy;
            r->b->ops->mla_attend(r->b, &r->mla);
        }
    }
    gpu_sync(r->b);
}

static void bench_report(bench_run *r, const char *what, const op_batch *batch, double kv_bytes,
                         double flops)
{
    r->calls = is_emulated(r->b) ? 1 : 16;
    const double s = op_time(bench_calls, r, is_emulated(r->b) ? 1 : 5) / r->calls;
    const double roof = r->b->ops->read_bandwidth(r->b, r->kv.p, r->kv.copy_bytes * r->kv.n_copies);
    printf("  %-34s rows %4u len %6u %9.1f us  cache %7.1f MB %7.1f GB/s %5.1f%% of read bandwidth "
           "%7.1f TFLOP/s\n",
           what, batch->b.n_rows, batch->b.max_len, s * 1e6, kv_bytes * 1e-6, kv_bytes / s * 1e-9,
           100 * kv_bytes / s / roof, flops / s * 1e-12);
}

/* n_seqs sequences of `length` positions, the last `rows` of each. */
static void bench_batch(op_batch *batch, uint32_t n_seqs, uint32_t length, uint32_t rows)
{
    uint32_t lengths[64], n[64];
    for (uint32_t i = 0; i < n_seqs; i++) lengths[i] = length, n[i] = rows;
    op_batch_make(batch, lengths, n, n_seqs);
}

static double bench_visible(const op_batch *b, uint32_t most)
{
    double n = 0;
    for (uint32_t t = 0; t < b->b.n_rows; t++)
        n += (uint32_t)b->pos[t] + 1 < most ? (uint32_t)b->pos[t] + 1 : most;
    return n;
}

/* topk > 0: lists of topk positions, evenly spread. */
static void bench_mla(uint32_t heads, uint32_t nope, uint32_t v, uint32_t n_seqs, uint32_t length,
                      uint32_t rows, uint32_t topk)
{
    op_batch batch;
    bench_batch(&batch, n_seqs, length, rows);
    const uint32_t T = batch.b.n_rows;
    const at_mla_case c = {heads, nope, 64, 512, v, NBI_BF16, NBI_WEIGHT_BF16, 0};
    nbi_limits limits = at_mla_limits(&c, T, length);
    limits.max_seqs = n_seqs;
    nbi_backend *b = gpu_open(&limits);
    const size_t nq = (size_t)T * heads * (nope + 64), nw = (size_t)heads * (nope + v) * 512;
    uint16_t *w = malloc(nw * sizeof *w);
    for (size_t i = 0; i < nw; i++) w[i] = nbi_f32_bf16(0.05f * op_uniform(-1, 1));
    const nbi_matrix m = {.kind = NBI_WEIGHT_BF16,
                          .rows = heads * (nope + v),
                          .cols = 512,
                          .data = w,
                          .global_scale = 1,
                          .name = "kv_b_proj"};
    nb_error err = {0};
    nbi_weight *kv_b = NULL;
    assert_int_equal(b->ops->weight_prepare(b, &kv_b, &m, &err), NB_OK);
    float *q0 = op_floats(nq);
    for (size_t i = 0; i < nq; i++) q0[i] = op_uniform(-1, 1);
    int32_t *sel = malloc((size_t)T * (topk + 1) * sizeof *sel);
    for (uint32_t t = 0; t < T; t++)
        for (uint32_t i = 0; i < topk; i++) {
            const uint32_t len = (uint32_t)batch.pos[t] + 1;
            sel[t * topk + i] =
                len <= topk ? (i < len ? (int32_t)i : -1) : (int32_t)((uint64_t)i * len / topk);
        }
    gpu_buffer q = gpu_floats(b, q0, nq), o = gpu_poisoned(b, (size_t)T * heads * v * 4);
    gpu_buffer lists = gpu_bytes(b, sel, (size_t)T * topk * 4);
    bench_run r = {.b = b};
    r.kv = bench_fill(b, (size_t)batch.n_pages * 64 * 576 * 2, is_emulated(b));
    r.layer = (nbi_kv_layer){.dtype = NBI_BF16};
    r.mla = (nbi_mla_attend_args){.out = o.p,
                                  .q = q.p,
                                  .kv_b = kv_b,
                                  .n_heads = heads,
                                  .nope_dim = nope,
                                  .rope_dim = 64,
                                  .kv_lora = 512,
                                  .v_dim = v,
                                  .scale = 0.0625f,
                                  .cache = &r.layer,
                                  .select = topk ? lists.p : NULL,
                                  .select_stride = topk,
                                  .batch = gpu_step(b, &batch.b)};
    char what[64];
    snprintf(what, sizeof what, "mla %u heads%s", heads, topk ? ", selected" : "");
    const double see = bench_visible(&batch, topk ? topk : UINT32_MAX);
    const double read = topk ? (double)T * topk : (double)n_seqs * length;
    bench_report(&r, what, &batch, read * 1152,
                 2 * heads * (see * (2 * 512 + 64) + (double)T * 512 * (nope + v)));
    gpu_step_end(b);
    b->ops->release(b, r.kv.p, r.kv.copy_bytes * r.kv.n_copies);
    b->ops->weight_release(b, &kv_b);
    gpu_free(&q);
    gpu_free(&o);
    gpu_free(&lists);
    gpu_close(b);
    op_free(q0);
    free(w);
    free(sel);
    op_batch_free(&batch);
}

static void bench_gqa(uint32_t heads, uint32_t kv, uint32_t n_seqs, uint32_t length, uint32_t rows)
{
    op_batch batch;
    bench_batch(&batch, n_seqs, length, rows);
    const uint32_t T = batch.b.n_rows;
    const at_gqa_case c = {heads, kv, 128, NBI_BF16};
    nbi_limits limits = at_gqa_limits(&c, T, length);
    limits.max_seqs = n_seqs;
    nbi_backend *b = gpu_open(&limits);
    const size_t nq = (size_t)T * heads * 128;
    float *q0 = op_floats(nq);
    for (size_t i = 0; i < nq; i++) q0[i] = op_uniform(-1, 1);
    gpu_buffer q = gpu_floats(b, q0, nq), o = gpu_poisoned(b, nq * 4);
    bench_run r = {.b = b};
    r.kv = bench_fill(b, (size_t)batch.n_pages * 64 * kv * 128 * 2 * 2, is_emulated(b));
    r.layer = (nbi_kv_layer){.dtype = NBI_BF16};
    r.gqa = (nbi_gqa_attend_args){.out = o.p,
                                  .q = q.p,
                                  .n_heads = heads,
                                  .n_kv_heads = kv,
                                  .head_dim = 128,
                                  .scale = 0.09f,
                                  .cache = &r.layer,
                                  .batch = gpu_step(b, &batch.b)};
    char what[64];
    snprintf(what, sizeof what, "gqa %u/%u heads of 128", heads, kv);
    bench_report(&r, what, &batch, (double)n_seqs * length * kv * 512,
                 2.0 * heads * bench_visible(&batch, UINT32_MAX) * 256);
    gpu_step_end(b);
    b->ops->release(b, r.kv.p, r.kv.copy_bytes * r.kv.n_copies);
    gpu_free(&q);
    gpu_free(&o);
    gpu_close(b);
    op_free(q0);
    op_batch_free(&batch);
}

static void bench(void)
{
    const nbi_limits none = {.max_rows = 1, .max_seqs = 1, .max_context = 64};
    nbi_backend *b = gpu_open(&none);
    printf("%s\n", b->description);
    const bool emulated = is_emulated(b); /* then only that it runs */
    gpu_close(b);
    const uint32_t less = emulated ? 32 : 1, S = emulated ? 2 : 64, R = emulated ? 4 : 2048;
    bench_gqa(32, 4, 1, 4096 / less, 1);
    bench_gqa(32, 4, S, 4096 / less, 1);
    bench_gqa(96, 8, S, 4096 / less, 1);
    bench_gqa(32, 4, 1, 4096 / less, R);
    bench_mla(64, 192, 256, 1, 2048 / less, 1, 0);
    bench_mla(64, 192, 256, 1, 8192 / less, 1, 2048 / less);
    bench_mla(64, 192, 256, S, 8192 / less, 1, 0);
    bench_mla(64, 192, 256, S, 8192 / less, 1, 2048 / less);
    bench_mla(128, 128, 128, S, 4096 / less, 1, 0);
    bench_mla(20, 192, 256, 1, 4096 / less, 1, 0);
    bench_mla(20, 192, 256, S, 4096 / less, 1, 0);
    if (emulated) return;
    bench_mla(64, 192, 256, 1, 8192, 2048, 2048);
    bench_mla(20, 192, 256, 1, 4096, 2048, 0);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) {
        bench();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mla_shapes),   cmocka_unit_test(test_mla_long),
        cmocka_unit_test(test_mla_bits),     cmocka_unit_test(test_mla_many_rows),
        cmocka_unit_test(test_mla_identity), cmocka_unit_test(test_gqa_shapes),
        cmocka_unit_test(test_gqa_bits),     cmocka_unit_test(test_codes_are_bf16),
        cmocka_unit_test(test_gqa_long),     cmocka_unit_test(test_mla_append),
        cmocka_unit_test(test_gqa_append),   cmocka_unit_test(test_mla_without_warpgroups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
