/* Append and attention of one layer as the model calls them: together, when they may be one launch,
 * and apart they give the same bits. `--bench` times recorded steps of many layers. */
#include "cuda/gpu_util.h"
#include "kernel/attention_util.h"

/* ---------------------------------------------------------------- GQA */

typedef struct gqa_step_case {
    uint32_t heads, kv_heads, dim, rope_dim;
    bool normed, interleaved;
    nbi_dtype cache;
} gqa_step_case;

/* One layer of a decode step: the last row of every sequence. */
typedef struct gqa_step {
    gqa_step_case c;
    op_batch batch;
    float *q, *k, *v, *q_norm, *k_norm, *cs, *sn;
    op_kv cache_k, cache_v; /* before the step */
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
    float *x = op_floats(n), *y = op_floats(n);
    op_fill(x, n, 1);
    op_fill(y, n, 1);
    for (uint32_t t = 0; t < n_seqs; t++) { /* what the step writes is not a number before */
        const size_t slot = op_slot(&s->batch, t, (uint32_t)s->batch.pos[t]);
        for (uint32_t h = 0; h < c->kv_heads; h++) {
            const size_t at = ((slot / 64 * c->kv_heads + h) * 64 + slot % 64) * c->dim;
            for (uint32_t i = 0; i < c->dim; i++) x[at + i] = y[at + i] = NAN;
        }
    }
    s->cache_k = op_kv_make(c->cache, s->batch.n_pages, c->kv_heads, c->dim, c->dim, x);
    s->cache_v = op_kv_make(c->cache, s->batch.n_pages, c->kv_heads, c->dim, c->dim, y);
    s->cache_bytes = s->cache_k.bytes;
    op_free(x);
    op_free(y);
}

static void free_gqa_step(gqa_step *s)
{
    float *floats[] = {s->q, s->k, s->v, s->q_norm, s->k_norm, s->cs, s->sn};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) op_free(floats[i]);
    op_free(s->cache_k.data);
    op_free(s->cache_v.data);
    op_batch_free(&s->batch);
}

/* Rows [first, first + T of `batch`) of the step; apart: something comes between the two calls. */
static void run_gqa_step(const gqa_step *s, const nbi_batch *batch, uint32_t first, bool apart,
                         float *out, uint16_t *out_k, uint16_t *out_v)
{
    const gqa_step_case *c = &s->c;
    const size_t T = batch->n_rows, nq = (size_t)c->heads * c->dim;
    const size_t nk = (size_t)c->kv_heads * c->dim, half = c->rope_dim / 2;
    const at_gqa_case shape = {c->heads, c->kv_heads, c->dim, c->cache};
    nbi_limits limits = at_gqa_limits(&shape, batch->n_rows, batch->max_len);
    limits.max_seqs = batch->n_seqs;
    nbi_backend *b = gpu_open_graphs(&limits, false);
    gpu_buffer q = gpu_floats(b, s->q + first * nq, T * nq), o = gpu_poisoned(b, T * nq * 4);
    gpu_buffer k = gpu_floats(b, s->k + first * nk, T * nk);
    gpu_buffer v = gpu_floats(b, s->v + first * nk, T * nk);
    gpu_buffer qn = gpu_floats(b, s->q_norm, c->dim), kn = gpu_floats(b, s->k_norm, c->dim);
    gpu_buffer cs = gpu_floats(b, s->cs + first * half, T * half);
    gpu_buffer sn = gpu_floats(b, s->sn + first * half, T * half);
    gpu_buffer ck = gpu_bytes(b, s->cache_k.data, s->cache_bytes);
    gpu_buffer cv = gpu_bytes(b, s->cache_v.data, s->cache_bytes);
    const nbi_kv_layer layer = {.dtype = c->cache, .k = ck.p, .v = cv.p};
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
    for (int i = 0; i < 2; i++) {
        const nbi_dtype t = i ? NBI_F8_E4M3 : NBI_BF16;
        check_gqa_step(&(gqa_step_case){32, 4, 128, 128, true, false, t}, lengths + 5, 2);
        check_gqa_step(&(gqa_step_case){24, 1, 64, 32, false, false, t}, lengths, 7);
        check_gqa_step(&(gqa_step_case){3, 3, 128, 64, true, true, t}, lengths, 7);
    }
    check_gqa_step(&(gqa_step_case){16, 1, 128, 128, true, false, NBI_BF16}, lengths + 2, 2);
    check_gqa_step(&(gqa_step_case){2, 1, 64, 64, true, false, NBI_BF16}, longer, 2);
}

/* ---------------------------------------------------------------- MLA */

typedef struct mla_step {
    at_mla d; /* q as the product left it */
    float *kv, *norm, *cs, *sn;
    bool interleaved;
    size_t latent_bytes;
    uint32_t topk; /* of an indexer in between; 0: none */
    float *index_q, *index_w;
    uint16_t *index_keys;
} mla_step;

enum { INDEX_HEADS = 32, INDEX_DIM = 128 };

/* What the indexer of a step has on the device. */
typedef struct index_step {
    gpu_buffer q, w, keys, select;
} index_step;

static size_t index_keys_bytes(const mla_step *s)
{
    return (size_t)s->d.batch.n_pages * NBI_PAGE_TOKENS * INDEX_DIM * sizeof *s->index_keys;
}

static index_step open_index(nbi_backend *b, const mla_step *s, uint32_t first, size_t T)
{
    const size_t nq = (size_t)INDEX_HEADS * INDEX_DIM;
    return (index_step){gpu_floats(b, s->index_q + first * nq, T * nq),
                        gpu_floats(b, s->index_w + (size_t)first * INDEX_HEADS, T * INDEX_HEADS),
                        gpu_bytes(b, s->index_keys, index_keys_bytes(s)),
                        gpu_poisoned(b, T * s->topk * sizeof(int32_t))};
}

static void choose(nbi_backend *b, const mla_step *s, const index_step *i,
                   const nbi_rope_rows *rope, const nbi_batch *device)
{
    const nbi_kv_layer layer = {.dtype = NBI_BF16, .index_k = i->keys.p};
    b->ops->index_select(b, &(nbi_index_select_args){.select = i->select.p,
                                                     .q = i->q.p,
                                                     .w = i->w.p,
                                                     .n_heads = INDEX_HEADS,
                                                     .index_dim = INDEX_DIM,
                                                     .topk = s->topk,
                                                     .rope = rope,
                                                     .cache = &layer,
                                                     .batch = device});
}

/* Rows of `batch`, which begin at row `first` of the step; apart as above. */
static void run_mla_step(const mla_step *s, const nbi_batch *batch, uint32_t first, bool apart,
                         float *out, void *latent)
{
    const at_mla_case *c = &s->d.c;
    const size_t T = batch->n_rows, nq = (size_t)c->heads * (c->nope + c->rope);
    const size_t width = c->lora + c->rope, half = c->rope / 2, no = (size_t)c->heads * c->v;
    nbi_limits limits = at_mla_limits(c, batch->n_rows, batch->max_len);
    limits.max_seqs = batch->n_seqs;
    nbi_backend *b = gpu_open_graphs(&limits, false);
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
    index_step index = {0};
    if (s->topk) index = open_index(b, s, first, T);
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
    if (s->topk) choose(b, s, &index, &rope, device);
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
                                                 .select = s->topk ? index.select.p : NULL,
                                                 .select_stride = s->topk,
                                                 .batch = device});
    gpu_step_end(b);
    void *got[] = {gpu_read(&o), gpu_read(&cache)};
    memcpy(out, got[0], T * no * sizeof(float));
    memcpy(latent, got[1], s->latent_bytes);
    free(got[0]);
    free(got[1]);
    gpu_buffer *buffers[] = {&q, &o, &kv, &norm, &cs, &sn, &cache};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) gpu_free(buffers[i]);
    gpu_buffer *of_index[] = {&index.q, &index.w, &index.keys, &index.select};
    for (size_t i = 0; s->topk && i < sizeof of_index / sizeof *of_index; i++)
        gpu_free(of_index[i]);
    b->ops->weight_release(b, &kv_b);
    gpu_close(b);
}

static void make_index(mla_step *s)
{
    const size_t T = s->d.batch.b.n_rows, n = index_keys_bytes(s) / sizeof *s->index_keys;
    const size_t nq = T * INDEX_HEADS * INDEX_DIM, nw = T * INDEX_HEADS;
    op_fill(s->index_q = op_floats(nq), nq, 1);
    op_fill(s->index_w = op_floats(nw), nw, 1);
    s->index_keys = malloc(n * sizeof *s->index_keys);
    for (size_t i = 0; i < n; i++) s->index_keys[i] = nbi_f32_bf16(op_normal());
}

/* Together, apart, and sequence by sequence: the same bits, of the cache too. */
static void check_mla_step(const at_mla_case *c, bool interleaved, const uint32_t *lengths,
                           const uint32_t *rows, uint32_t n_seqs, uint32_t topk)
{
    mla_step s = {.interleaved = interleaved, .topk = topk};
    at_make_mla(&s.d, c, lengths, rows, n_seqs);
    make_index(&s);
    const op_batch *b = &s.d.batch;
    const size_t T = b->b.n_rows, width = c->lora + c->rope, no = (size_t)c->heads * c->v;
    at_angles(&s.cs, &s.sn, b, c->rope);
    op_fill(s.kv = op_floats(T * width), T * width, 1);
    op_fill(s.norm = op_floats(c->lora), c->lora, 1);
    s.latent_bytes = s.d.cache.bytes;
    float *x = op_floats(s.d.cache.n);
    for (size_t i = 0; i < s.d.cache.n; i++)
        x[i] = (float)op_kv_at(&s.d.cache, i / width, (uint32_t)(i % width));
    for (uint32_t t = 0; t < T; t++) { /* what the step writes is not a number before */
        const size_t slot = op_slot(b, (uint32_t)b->seq[t], (uint32_t)b->pos[t]);
        for (uint32_t i = 0; i < width; i++) x[slot * width + i] = NAN;
    }
    op_free(s.d.cache.data);
    s.d.cache = op_kv_make(c->cache, b->n_pages, 1, (uint32_t)width, c->lora, x);
    s.d.kv.latent = s.d.cache.data;
    op_free(x);
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
    free(s.index_keys);
    float *floats[] = {one, other, s.kv, s.norm, s.cs, s.sn, s.index_q, s.index_w};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) op_free(floats[i]);
    at_free_mla(&s.d);
}

static void test_mla_step(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 33, 128, 129, 300}, ones[] = {1, 1, 1, 1, 1};
    static const uint32_t some[] = {1, 9, 2, 1, 1};
    check_mla_step(&(at_mla_case){20, 16, 64, 512, 80, NBI_BF16, NBI_WEIGHT_BF16, 0}, true, lengths,
                   ones, 5, 0);
    check_mla_step(&(at_mla_case){3, 16, 64, 512, 16, NBI_BF16, NBI_WEIGHT_NVFP4, 0}, false,
                   lengths, some, 5, 0);
    check_mla_step(&(at_mla_case){3, 16, 8, 64, 24, NBI_BF16, NBI_WEIGHT_BF16, 0}, false, lengths,
                   some, 5, 0);
    check_mla_step(&(at_mla_case){20, 16, 64, 512, 80, NBI_F8_E4M3, NBI_WEIGHT_BF16, 0}, true,
                   lengths, ones, 5, 0);
    check_mla_step(&(at_mla_case){3, 16, 8, 140, 24, NBI_F8_E4M3, NBI_WEIGHT_BF16, 0}, false,
                   lengths, some, 5, 0);
    check_mla_step(&(at_mla_case){3, 20, 8, 44, 24, NBI_F32, NBI_WEIGHT_F16, 0}, false, lengths,
                   some, 5, 0);
    check_mla_step(&(at_mla_case){8, 32, 64, 512, 32, NBI_BF16, NBI_WEIGHT_BF16, 0}, true, lengths,
                   ones, 5, 100);
    check_mla_step(&(at_mla_case){3, 16, 8, 64, 24, NBI_BF16, NBI_WEIGHT_BF16, 0}, false, lengths,
                   some, 5, 20);
}

/* ---------------------------------------------------------------- speed */

/* A step of layers that are attention only, each with a cache of its own: together larger than any
 * L2. */
typedef struct bench_step {
    nbi_backend *b;
    const nbi_batch *batch;
    uint32_t n_layers;
    char *cache;
    size_t cache_bytes; /* of a layer */
    nbi_kv_layer layer;
    nbi_rope_rows rope;
    nbi_gqa_append_args gqa_append; /* one of the two is given */
    nbi_gqa_attend_args gqa;
    nbi_mla_append_args mla_append;
    nbi_mla_attend_args mla;
} bench_step;

static void bench_run(void *arg)
{
    bench_step *s = arg;
    const nbi_batch *device = NULL;
    if (s->b->ops->step_begin(s->b, s->batch, 0, &device))
        for (uint32_t i = 0; i < s->n_layers; i++) {
            char *cache = s->cache + i * s->cache_bytes;
            s->layer.latent = s->layer.k = cache;
            s->layer.v = cache + s->cache_bytes / 2;
            s->gqa_append.batch = s->gqa.batch = s->mla_append.batch = s->mla.batch = device;
            if (s->gqa.n_heads) {
                s->b->ops->gqa_append(s->b, &s->gqa_append);
                s->b->ops->gqa_attend(s->b, &s->gqa);
            } else {
                s->b->ops->mla_append(s->b, &s->mla_append);
                s->b->ops->mla_attend(s->b, &s->mla);
            }
        }
    gpu_step_end(s->b);
}

/* The last row of each of n sequences of `length`; layers so that the caches are 256 MB. */
static void bench_open(bench_step *s, op_batch *batch, nbi_limits limits, uint32_t n_seqs,
                       uint32_t length, size_t page_bytes)
{
    uint32_t lengths[64], ones[64];
    for (uint32_t i = 0; i < n_seqs; i++) lengths[i] = length, ones[i] = 1;
    op_batch_make(batch, lengths, ones, n_seqs);
    limits.max_seqs = n_seqs;
    *s = (bench_step){.b = gpu_open_graphs(&limits, false), .batch = &batch->b};
    const bool emulated = strstr(s->b->description, "emulated") != NULL;
    s->cache_bytes = (batch->n_pages * page_bytes + 511) / 512 * 512;
    s->n_layers = emulated ? 1 : (uint32_t)(((size_t)256 << 20) / s->cache_bytes) + 1;
    if (s->n_layers > 48) s->n_layers = 48;
    const size_t all = s->n_layers * s->cache_bytes, n = (size_t)1 << 20;
    assert_non_null(s->cache = s->b->ops->alloc(s->b, all));
    uint16_t *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = nbi_f32_bf16(op_normal());
    for (size_t at = 0; at < all; at += n * sizeof *x)
        s->b->ops->upload(s->b, s->cache + at, x,
                          all - at < n * sizeof *x ? all - at : n * sizeof *x);
    free(x);
    s->layer.dtype = NBI_BF16;
}

static void bench_close(bench_step *s, op_batch *batch, const char *what, uint32_t length,
                        size_t position_bytes)
{
    for (int i = 0; i < 3; i++) bench_run(s); /* launched, recorded, replayed */
    const double t = op_time(bench_run, s, s->n_layers == 1 ? 1 : 15) / s->n_layers;
    const double bytes = (double)batch->b.n_rows * length * (double)position_bytes;
    printf("  %-26s rows %3u len %5u %8.2f us a layer (of %u), cache at %6.0f GB/s\n", what,
           batch->b.n_rows, length, t * 1e6, s->n_layers, bytes / t * 1e-9);
    s->b->ops->release(s->b, s->cache, s->n_layers * s->cache_bytes);
}

static gpu_buffer bench_floats(nbi_backend *b, size_t n)
{
    float *x = op_floats(n);
    for (size_t i = 0; i < n; i++) x[i] = op_uniform(-1, 1);
    const gpu_buffer g = gpu_floats(b, x, n);
    op_free(x);
    return g;
}

static void bench_gqa(uint32_t heads, uint32_t kv, uint32_t n_seqs, uint32_t length)
{
    op_batch batch;
    bench_step s;
    const at_gqa_case c = {heads, kv, 128, NBI_BF16};
    bench_open(&s, &batch, at_gqa_limits(&c, n_seqs, length), n_seqs, length,
               (size_t)kv * 64 * 128 * 4);
    gpu_buffer q = bench_floats(s.b, (size_t)n_seqs * heads * 128), k, v, o, norm, turn;
    k = bench_floats(s.b, (size_t)n_seqs * kv * 128);
    v = bench_floats(s.b, (size_t)n_seqs * kv * 128);
    o = gpu_poisoned(s.b, (size_t)n_seqs * heads * 128 * 4);
    norm = bench_floats(s.b, 128);
    turn = bench_floats(s.b, (size_t)n_seqs * 64);
    s.rope = (nbi_rope_rows){.cos = turn.p, .sin = turn.p, .dim = 128};
    s.gqa_append = (nbi_gqa_append_args){.q = q.p,
                                         .k = k.p,
                                         .v = v.p,
                                         .q_norm = norm.p,
                                         .k_norm = norm.p,
                                         .eps = 1e-6f,
                                         .n_heads = heads,
                                         .n_kv_heads = kv,
                                         .head_dim = 128,
                                         .rope = &s.rope,
                                         .cache = &s.layer};
    s.gqa = (nbi_gqa_attend_args){.out = o.p,
                                  .q = q.p,
                                  .n_heads = heads,
                                  .n_kv_heads = kv,
                                  .head_dim = 128,
                                  .scale = 0.09f,
                                  .cache = &s.layer};
    char what[64];
    snprintf(what, sizeof what, "gqa %u/%u heads of 128", heads, kv);
    bench_close(&s, &batch, what, length, (size_t)kv * 512);
    gpu_buffer *buffers[] = {&q, &k, &v, &o, &norm, &turn};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) gpu_free(buffers[i]);
    gpu_close(s.b);
    op_batch_free(&batch);
}

static void bench_mla(uint32_t heads, uint32_t nope, uint32_t v, uint32_t n_seqs, uint32_t length)
{
    op_batch batch;
    bench_step s;
    const at_mla_case c = {heads, nope, 64, 512, v, NBI_BF16, NBI_WEIGHT_BF16, 0};
    bench_open(&s, &batch, at_mla_limits(&c, n_seqs, length), n_seqs, length, 64 * 576 * 2);
    const size_t nw = (size_t)heads * (nope + v) * 512;
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
    assert_int_equal(s.b->ops->weight_prepare(s.b, &kv_b, &m, &err), NB_OK);
    gpu_buffer q = bench_floats(s.b, (size_t)n_seqs * heads * (nope + 64));
    gpu_buffer kv = bench_floats(s.b, (size_t)n_seqs * 576), norm = bench_floats(s.b, 512);
    gpu_buffer o = gpu_poisoned(s.b, (size_t)n_seqs * heads * v * 4);
    gpu_buffer turn = bench_floats(s.b, (size_t)n_seqs * 32);
    s.rope = (nbi_rope_rows){.cos = turn.p, .sin = turn.p, .dim = 64, .interleaved = true};
    s.mla_append = (nbi_mla_append_args){.q = q.p,
                                         .kv = kv.p,
                                         .kv_norm = norm.p,
                                         .eps = 1e-6f,
                                         .n_heads = heads,
                                         .nope_dim = nope,
                                         .rope_dim = 64,
                                         .kv_lora = 512,
                                         .kv_stride = 576,
                                         .rope = &s.rope,
                                         .cache = &s.layer};
    s.mla = (nbi_mla_attend_args){.out = o.p,
                                  .q = q.p,
                                  .kv_b = kv_b,
                                  .n_heads = heads,
                                  .nope_dim = nope,
                                  .rope_dim = 64,
                                  .kv_lora = 512,
                                  .v_dim = v,
                                  .scale = 0.0625f,
                                  .cache = &s.layer};
    char what[64];
    snprintf(what, sizeof what, "mla %u heads", heads);
    bench_close(&s, &batch, what, length, 1152);
    s.b->ops->weight_release(s.b, &kv_b);
    gpu_buffer *buffers[] = {&q, &kv, &norm, &o, &turn};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) gpu_free(buffers[i]);
    gpu_close(s.b);
    free(w);
    op_batch_free(&batch);
}

static void bench(void)
{
    const nbi_limits none = {.max_rows = 1, .max_seqs = 1, .max_context = 64};
    nbi_backend *b = gpu_open(&none);
    const bool emulated = strstr(b->description, "emulated") != NULL; /* then only that it runs */
    gpu_close(b);
    const uint32_t less = emulated ? 8 : 1, most = emulated ? 1 : 64;
    for (uint32_t n = 1; n <= most; n *= 4) bench_gqa(32, 4, n, 1024 / less);
    bench_gqa(32, 4, 1, 8192 / less);
    for (uint32_t n = 1; n <= most; n *= 4) bench_mla(20, 192, 256, n, 1024 / less);
    bench_mla(20, 192, 256, 1, 8192 / less);
    bench_mla(8, 192, 256, 1, 1024 / less); /* glm-5, one of eight ranks */
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    if (op_bench) {
        bench();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gqa_step),
        cmocka_unit_test(test_mla_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
