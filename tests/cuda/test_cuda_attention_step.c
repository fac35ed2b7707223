/* Append and attention of one layer as the model calls them: together, when they may be one launch,
 * and apart they give the same bits. */
#include "cuda/gpu_util.h"
#include "kernel/attention_util.h"

/* ---------------------------------------------------------------- GQA */

typedef struct gqa_step_case {
    uint32_t heads, kv_heads, dim, rope_dim;
    bool normed, interleaved;
} gqa_step_case;

/* One layer of a decode step: the last row of every sequence. */
typedef struct gqa_step {
    gqa_step_case c;
    op_batch batch;
    float *q, *k, *v, *q_norm, *k_norm, *cs, *sn;
    uint16_t *cache_k, *cache_v; /* before the step */
    size_t cache_bytes;
} gqa_step;

static void make_gqa_step(gqa_step *s, const gqa_step_case *c, const uint32_t *lengths,
                          uint32_t n_seqs)
{
    uint32_t ones[64];
    for (uint32_t i = 0; i < n_seqs; i++) ones[i] = 1;
    *s = (gqa_step){.c = *c};
    op_batch_make(&s->batch, lengths, ones, n_seqs);
    at_angles(&s->cs, &s->sn, &s->batch, c->rope_dim);
    const size_t T = n_seqs, n = (size_t)s->batch.n_pages * NBI_PAGE_TOKENS * c->kv_heads * c->dim;
    struct {
        float **x;
        size_t n;
    } fills[] = {{&s->q, T * c->heads * c->dim},
                 {&s->k, T * c->kv_heads * c->dim},
                 {&s->v, T * c->kv_heads * c->dim},
                 {&s->q_norm, c->dim},
                 {&s->k_norm, c->dim}};
    for (size_t i = 0; i < 5; i++) op_fill(*fills[i].x = op_floats(fills[i].n), fills[i].n, 1);
    s->cache_bytes = n * sizeof(uint16_t);
    s->cache_k = malloc(s->cache_bytes);
    s->cache_v = malloc(s->cache_bytes);
    for (size_t i = 0; i < n; i++) s->cache_k[i] = nbi_f32_bf16(op_normal());
    for (size_t i = 0; i < n; i++) s->cache_v[i] = nbi_f32_bf16(op_normal());
    for (uint32_t t = 0; t < n_seqs; t++) { /* what the step writes is not a number before */
        const size_t slot = op_slot(&s->batch, t, (uint32_t)s->batch.pos[t]);
        for (uint32_t h = 0; h < c->kv_heads; h++) {
            const size_t at = ((slot / 64 * c->kv_heads + h) * 64 + slot % 64) * c->dim;
            memset(s->cache_k + at, 0xff, c->dim * sizeof(uint16_t));
            memset(s->cache_v + at, 0xff, c->dim * sizeof(uint16_t));
        }
    }
}

static void free_gqa_step(gqa_step *s)
{
    float *floats[] = {s->q, s->k, s->v, s->q_norm, s->k_norm, s->cs, s->sn};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) op_free(floats[i]);
    free(s->cache_k);
    free(s->cache_v);
    op_batch_free(&s->batch);
}

/* Rows [first, first + T of `batch`) of the step; apart: something comes between the two calls. */
static void run_gqa_step(const gqa_step *s, const nbi_batch *batch, uint32_t first, bool apart,
                         float *out, uint16_t *out_k, uint16_t *out_v)
{
    const gqa_step_case *c = &s->c;
    const size_t T = batch->n_rows, nq = (size_t)c->heads * c->dim;
    const size_t nk = (size_t)c->kv_heads * c->dim, half = c->rope_dim / 2;
    const at_gqa_case shape = {c->heads, c->kv_heads, c->dim, NBI_BF16};
    nbi_limits limits = at_gqa_limits(&shape, batch->n_rows, batch->max_len);
    limits.max_seqs = batch->n_seqs;
    nbi_backend *b = gpu_open_graphs(&limits);
    gpu_buffer q = gpu_floats(b, s->q + first * nq, T * nq), o = gpu_poisoned(b, T * nq * 4);
    gpu_buffer k = gpu_floats(b, s->k + first * nk, T * nk);
    gpu_buffer v = gpu_floats(b, s->v + first * nk, T * nk);
    gpu_buffer qn = gpu_floats(b, s->q_norm, c->dim), kn = gpu_floats(b, s->k_norm, c->dim);
    gpu_buffer cs = gpu_floats(b, s->cs + first * half, T * half);
    gpu_buffer sn = gpu_floats(b, s->sn + first * half, T * half);
    gpu_buffer ck = gpu_bytes(b, s->cache_k, s->cache_bytes);
    gpu_buffer cv = gpu_bytes(b, s->cache_v, s->cache_bytes);
    const nbi_kv_layer layer = {.dtype = NBI_BF16, .k = ck.p, .v = cv.p};
    const nbi_rope_rows rope = {
        .cos = cs.p, .sin = sn.p, .dim = c->rope_dim, .interleaved = c->interleaved};
    const nbi_batch *device = gpu_step(b, batch);
    b->ops->gqa_append(b, &(nbi_gqa_append_args){.q = q.p,
                                                 .k = k.p,
                                                 .v = v.p,
                                                 .q_norm = c->normed ? qn.p : NULL,
                                                 .k_norm = c->normed ? kn.p : NULL,
                                                 .eps = 1e-4f,
                                                 .n_heads = c->heads,
                                                 .n_kv_heads = c->kv_heads,
                                                 .head_dim = c->dim,
                                                 .rope = &rope,
                                                 .cache = &layer,
                                                 .batch = device});
    if (apart) gpu_sync(b);
    b->ops->gqa_attend(b, &(nbi_gqa_attend_args){.out = o.p,
                                                 .q = q.p,
                                                 .n_heads = c->heads,
                                                 .n_kv_heads = c->kv_heads,
                                                 .head_dim = c->dim,
                                                 .scale = 0.1f,
                                                 .cache = &layer,
                                                 .batch = device});
    gpu_step_end(b);
    void *got[] = {gpu_read(&o), gpu_read(&ck), gpu_read(&cv)};
    memcpy(out, got[0], T * nq * sizeof(float));
    memcpy(out_k, got[1], s->cache_bytes);
    memcpy(out_v, got[2], s->cache_bytes);
    for (size_t i = 0; i < 3; i++) free(got[i]);
    gpu_buffer *buffers[] = {&q, &o, &k, &v, &qn, &kn, &cs, &sn, &ck, &cv};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) gpu_free(buffers[i]);
    gpu_close(b);
}

/* In one launch, apart, and row by row: the same bits, of the cache too. */
static void check_gqa_step(const gqa_step_case *c, const uint32_t *lengths, uint32_t n_seqs)
{
    gqa_step s;
    make_gqa_step(&s, c, lengths, n_seqs);
    const size_t width = (size_t)c->heads * c->dim, n = n_seqs * width;
    float *one = op_floats(n), *other = op_floats(n);
    uint16_t *keys[2], *values[2];
    for (size_t i = 0; i < 2; i++) {
        keys[i] = malloc(s.cache_bytes);
        values[i] = malloc(s.cache_bytes);
    }
    run_gqa_step(&s, &s.batch.b, 0, false, one, keys[0], values[0]);
    run_gqa_step(&s, &s.batch.b, 0, true, other, keys[1], values[1]);
    for (size_t i = 0; i < n; i++) assert_true(isfinite(one[i]));
    assert_memory_equal(one, other, n * sizeof *one);
    assert_memory_equal(keys[0], keys[1], s.cache_bytes);
    assert_memory_equal(values[0], values[1], s.cache_bytes);
    for (uint32_t t = 0; t < n_seqs; t++) {
        op_batch part;
        op_batch_slice(&part, &s.batch, t, t + 1);
        run_gqa_step(&s, &part.b, t, false, other + t * width, keys[1], values[1]);
        op_batch_free(&part);
    }
    assert_memory_equal(one, other, n * sizeof *one);
    for (size_t i = 0; i < 2; i++) {
        free(keys[i]);
        free(values[i]);
    }
    op_free(one);
    op_free(other);
    free_gqa_step(&s);
}

static void test_gqa_step(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 64, 65, 128, 129, 300}, longer[] = {8193, 8192};
    check_gqa_step(&(gqa_step_case){32, 4, 128, 128, true, false}, lengths + 5, 2);
    check_gqa_step(&(gqa_step_case){24, 1, 64, 32, false, false}, lengths, 7);
    check_gqa_step(&(gqa_step_case){3, 3, 128, 64, true, true}, lengths, 7);
    check_gqa_step(&(gqa_step_case){16, 1, 128, 128, true, false}, lengths + 2, 2);
    check_gqa_step(&(gqa_step_case){2, 1, 64, 64, true, false}, longer, 2);
}

/* ---------------------------------------------------------------- MLA */

typedef struct mla_step {
    at_mla d; /* q as the product left it */
    float *kv, *norm, *cs, *sn;
    bool interleaved;
    size_t latent_bytes;
} mla_step;

/* Rows of `batch`, which begin at row `first` of the step; apart as above. */
static void run_mla_step(const mla_step *s, const nbi_batch *batch, uint32_t first, bool apart,
                         float *out, void *latent)
{
    const at_mla_case *c = &s->d.c;
    const size_t T = batch->n_rows, nq = (size_t)c->heads * (c->nope + c->rope);
    const size_t width = c->lora + c->rope, half = c->rope / 2, no = (size_t)c->heads * c->v;
    nbi_limits limits = at_mla_limits(c, batch->n_rows, batch->max_len);
    limits.max_seqs = batch->n_seqs;
    nbi_backend *b = gpu_open_graphs(&limits);
    nb_error err = {0};
    nbi_weight *kv_b = NULL;
    assert_int_equal(b->ops->weight_prepare(b, &kv_b, &s->d.kv_b.host, &err), NB_OK);
    gpu_buffer q = gpu_floats(b, s->d.q + first * nq, T * nq), o = gpu_poisoned(b, T * no * 4);
    gpu_buffer kv = gpu_floats(b, s->kv + first * width, T * width);
    gpu_buffer norm = gpu_floats(b, s->norm, c->lora);
    gpu_buffer cs = gpu_floats(b, s->cs + first * half, T * half);
    gpu_buffer sn = gpu_floats(b, s->sn + first * half, T * half);
    gpu_buffer cache = gpu_bytes(b, s->d.kv.latent, s->latent_bytes);
    const nbi_kv_layer layer = {.dtype = c->cache, .latent = cache.p};
    const nbi_rope_rows rope = {
        .cos = cs.p, .sin = sn.p, .dim = c->rope, .interleaved = s->interleaved};
    const nbi_batch *device = gpu_step(b, batch);
    b->ops->mla_append(b, &(nbi_mla_append_args){.q = q.p,
                                                 .kv = kv.p,
                                                 .kv_norm = norm.p,
                                                 .eps = 1e-5f,
                                                 .n_heads = c->heads,
                                                 .nope_dim = c->nope,
                                                 .rope_dim = c->rope,
                                                 .kv_lora = c->lora,
                                                 .kv_stride = (uint32_t)width,
                                                 .rope = &rope,
                                                 .cache = &layer,
                                                 .batch = device});
    if (apart) gpu_sync(b);
    b->ops->mla_attend(b, &(nbi_mla_attend_args){.out = o.p,
                                                 .q = q.p,
                                                 .kv_b = kv_b,
                                                 .n_heads = c->heads,
                                                 .nope_dim = c->nope,
                                                 .rope_dim = c->rope,
                                                 .kv_lora = c->lora,
                                                 .v_dim = c->v,
                                                 .scale = s->d.scale,
                                                 .cache = &layer,
                                                 .batch = device});
    gpu_step_end(b);
    void *got[] = {gpu_read(&o), gpu_read(&cache)};
    memcpy(out, got[0], T * no * sizeof(float));
    memcpy(latent, got[1], s->latent_bytes);
    free(got[0]);
    free(got[1]);
    gpu_buffer *buffers[] = {&q, &o, &kv, &norm, &cs, &sn, &cache};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) gpu_free(buffers[i]);
    b->ops->weight_release(b, &kv_b);
    gpu_close(b);
}

/* Together, apart, and sequence by sequence: the same bits, of the cache too. */
static void check_mla_step(const at_mla_case *c, bool interleaved, const uint32_t *lengths,
                           const uint32_t *rows, uint32_t n_seqs)
{
    mla_step s = {.interleaved = interleaved};
    at_make_mla(&s.d, c, lengths, rows, n_seqs);
    const op_batch *b = &s.d.batch;
    const size_t T = b->b.n_rows, width = c->lora + c->rope, no = (size_t)c->heads * c->v;
    at_angles(&s.cs, &s.sn, b, c->rope);
    op_fill(s.kv = op_floats(T * width), T * width, 1);
    op_fill(s.norm = op_floats(c->lora), c->lora, 1);
    const size_t value = nbi_dtype_bits(c->cache) / 8;
    s.latent_bytes = (size_t)b->n_pages * NBI_PAGE_TOKENS * width * value;
    for (uint32_t t = 0; t < T; t++) { /* what the step writes is not a number before */
        const size_t slot = op_slot(b, (uint32_t)b->seq[t], (uint32_t)b->pos[t]);
        memset((char *)s.d.kv.latent + slot * width * value, 0xff, width * value);
    }
    float *one = op_floats(T * no), *other = op_floats(T * no);
    char *latent[2] = {malloc(s.latent_bytes), malloc(s.latent_bytes)};
    run_mla_step(&s, &b->b, 0, false, one, latent[0]);
    run_mla_step(&s, &b->b, 0, true, other, latent[1]);
    for (size_t i = 0; i < T * no; i++) assert_true(isfinite(one[i]));
    assert_memory_equal(one, other, T * no * sizeof *one);
    assert_memory_equal(latent[0], latent[1], s.latent_bytes);
    for (uint32_t i = 0; i < n_seqs; i++) {
        op_batch part;
        op_batch_slice(&part, b, (uint32_t)b->first[i], (uint32_t)b->first[i + 1]);
        run_mla_step(&s, &part.b, (uint32_t)b->first[i], false, other + (size_t)b->first[i] * no,
                     latent[1]);
        op_batch_free(&part);
    }
    assert_memory_equal(one, other, T * no * sizeof *one);
    free(latent[0]);
    free(latent[1]);
    float *floats[] = {one, other, s.kv, s.norm, s.cs, s.sn};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) op_free(floats[i]);
    at_free_mla(&s.d);
}

static void test_mla_step(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 33, 128, 129, 300}, ones[] = {1, 1, 1, 1, 1};
    static const uint32_t some[] = {1, 9, 2, 1, 1};
    check_mla_step(&(at_mla_case){20, 16, 64, 512, 80, NBI_BF16, NBI_WEIGHT_BF16, 0}, true, lengths,
                   ones, 5);
    check_mla_step(&(at_mla_case){3, 16, 64, 512, 16, NBI_BF16, NBI_WEIGHT_NVFP4, 0}, false,
                   lengths, some, 5);
    check_mla_step(&(at_mla_case){3, 16, 8, 64, 24, NBI_BF16, NBI_WEIGHT_BF16, 0}, false, lengths,
                   some, 5);
    check_mla_step(&(at_mla_case){3, 20, 8, 44, 24, NBI_F32, NBI_WEIGHT_F16, 0}, false, lengths,
                   some, 5);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gqa_step),
        cmocka_unit_test(test_mla_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
