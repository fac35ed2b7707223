/* DSA lightning indexer: append keys; score all visible keys and choose the topk; reuse a choice.
 *
 * Callers: the table in cpu.c.
 * Invariants: a row's scores are computed in blocks of INDEX_BLOCK positions counted from 0 and
 * never depend on other rows; the choice is exact: the topk largest, ties (and -0 against 0) to the
 * lower position, NaN below everything. Scores may be negative. */
#include "backend/cpu/cpu_kernels.h"
#include "backend/cpu/cpu_scratch.h"

#define INDEX_BLOCK 256u

/* ---------------------------------------------------------------- append */

static void append_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const nbi_index_append_args *a = arg;
    const nbi_batch *b = a->batch;
    const uint32_t n = a->index_dim;
    const nbi_kv_shape shape = nbi_kv_head_shape(a->cache->dtype, 1, n);
    float key[NBI_CPU_WIDTH_MAX];
    for (uint32_t t = begin; t < end; t++) {
        const float *k = (const float *)a->k + (size_t)t * n;
        double sum = 0, squares = 0;
        for (uint32_t i = 0; i < n; i++) sum += (double)k[i];
        const double mean = sum / n;
        for (uint32_t i = 0; i < n; i++) squares += ((double)k[i] - mean) * ((double)k[i] - mean);
        const double r = 1.0 / sqrt(squares / n + (double)a->eps);
        for (uint32_t i = 0; i < n; i++)
            key[i] = (float)(((double)k[i] - mean) * r) * a->norm_weight[i] + a->norm_bias[i];
        nbi_cpu_rotate(key, a->rope, t);
        const uint32_t p = (uint32_t)b->pos[t];
        const size_t page = nbi_cpu_page(b, (uint32_t)b->row_seq[t], p);
        nbi_kv_write(&shape, a->cache->index_k, page, 0, p % NBI_PAGE_TOKENS, 0, key, n);
    }
}

void nbi_cpu_index_append(nbi_backend *b, const nbi_index_append_args *a)
{
    NB_ASSERT(a->rope->dim <= a->index_dim && a->index_dim <= NBI_CPU_WIDTH_MAX);
    nbi_index_append_args args = *a;
    nbi_pool_run(nbi_cpu_of(b)->pool, append_task, &args, a->batch->n_rows, 4);
}

/* ---------------------------------------------------------------- scores */

typedef struct indexing {
    const nbi_index_select_args *a;
    const nbi_cpu_kernels *k;
    uint32_t first, n_rows; /* block of rows */
    uint32_t blocks;        /* blocks of positions of the longest row */
    uint32_t stride;        /* floats per row of scores */
    float *scores;          /* [n_rows][stride]; sortable keys once scored */
    char *threads;
    size_t thread_bytes;
} indexing;

typedef struct index_scratch {
    float *dots;       /* [heads][INDEX_BLOCK] */
    const void **rows; /* [INDEX_BLOCK] */
    uint16_t *decoded; /* [INDEX_BLOCK][index_dim] those of an E4M3 cache */
} index_scratch;

static size_t index_layout(index_scratch *s, char *base, uint32_t n_heads, uint32_t dim)
{
    nbi_plan p = {0};
    const size_t dots = nbi_plan_add(&p, (size_t)n_heads * INDEX_BLOCK * sizeof(float));
    const size_t rows = nbi_plan_add(&p, INDEX_BLOCK * sizeof(void *));
    const size_t decoded = nbi_plan_add(&p, (size_t)INDEX_BLOCK * dim * sizeof(uint16_t));
    if (s)
        *s = (index_scratch){.dots = (float *)(void *)(base + dots),
                             .rows = (const void **)(void *)(base + rows),
                             .decoded = (uint16_t *)(void *)(base + decoded)};
    return p.bytes;
}

static void rotate_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const nbi_index_select_args *a = arg;
    for (uint32_t t = begin; t < end; t++)
        for (uint32_t h = 0; h < a->n_heads; h++)
            nbi_cpu_rotate((float *)a->q + ((size_t)t * a->n_heads + h) * a->index_dim, a->rope, t);
}

/* Larger float, larger key; NaN as -inf, -0 as 0. */
static uint32_t sortable(float f)
{
    if (isnan(f)) f = -INFINITY;
    const uint32_t u = nbi_f32_bits(f + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

static void score_block(const indexing *x, index_scratch *sc, uint32_t t, uint32_t begin,
                        uint32_t n, float *out)
{
    const nbi_index_select_args *a = x->a;
    const nbi_batch *b = a->batch;
    const nbi_kv_shape shape = nbi_kv_head_shape(a->cache->dtype, 1, a->index_dim);
    for (uint32_t j = 0; j < n; j++) {
        const uint32_t p = begin + j;
        const size_t page = nbi_cpu_page(b, (uint32_t)b->row_seq[t], p);
        const uint32_t slot = p % NBI_PAGE_TOKENS;
        sc->rows[j] = (const char *)a->cache->index_k + nbi_kv_at(&shape, page, 0, slot);
        if (shape.dtype != NBI_F8_E4M3) continue;
        uint16_t *row = sc->decoded + (size_t)j * a->index_dim;
        nbi_cpu_decode(x->k, &shape, a->cache->index_k, page, 0, slot, row);
        sc->rows[j] = row;
    }
    const float *q = (const float *)a->q + (size_t)t * a->n_heads * a->index_dim;
    const float *w = a->w + (size_t)t * a->n_heads;
    const float head_scale = (float)(1.0 / sqrt((double)a->n_heads));
    x->k->dots(sc->dots, INDEX_BLOCK, q, a->index_dim, a->n_heads, (const void *const *)sc->rows,
               nbi_cpu_row_dtype(a->cache->dtype), n, a->index_dim,
               (float)(1.0 / sqrt((double)a->index_dim)));
    memset(out, 0, n * sizeof *out);
    for (uint32_t h = 0; h < a->n_heads; h++)
        x->k->relu_add(out, sc->dots + (size_t)h * INDEX_BLOCK, n, w[h] * head_scale);
    for (uint32_t j = 0; j < n; j++) {
        const uint32_t key = sortable(out[j]);
        memcpy(&out[j], &key, sizeof key);
    }
}

/* Item: (row, block of positions). */
static void score_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    const indexing *x = arg;
    index_scratch sc;
    index_layout(&sc, x->threads + thread * x->thread_bytes, x->a->n_heads, x->a->index_dim);
    for (uint32_t i = begin; i < end; i++) {
        const uint32_t r = i / x->blocks, at = i % x->blocks * INDEX_BLOCK;
        const uint32_t len = (uint32_t)x->a->batch->pos[x->first + r] + 1;
        if (len <= x->a->topk || len <= at) continue;
        score_block(x, &sc, x->first + r, at, len - at < INDEX_BLOCK ? len - at : INDEX_BLOCK,
                    x->scores + (size_t)r * x->stride + at);
    }
}

/* ---------------------------------------------------------------- selection */

static uint32_t key_at(const float *scores, uint32_t i)
{
    return nbi_f32_bits(scores[i]);
}

/* The k-th largest key, 1 <= k <= n, digit by digit (11, 11 and 10 bits); *above counts the larger
 * ones. */
static uint32_t kth_key(const float *scores, uint32_t n, uint32_t k, uint32_t *above)
{
    static const uint32_t shifts[3] = {21, 10, 0}, masks[3] = {0x7ff, 0x7ff, 0x3ff};
    uint32_t prefix = 0, fixed = 0, larger = 0; /* bits chosen so far, their mask */
    uint32_t count[2048];
    for (int d = 0; d < 3; d++) {
        memset(count, 0, sizeof count);
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t key = key_at(scores, i);
            if ((key & fixed) == prefix) count[key >> shifts[d] & masks[d]]++;
        }
        uint32_t digit = masks[d];
        while (larger + count[digit] < k) larger += count[digit--];
        prefix |= digit << shifts[d];
        fixed |= masks[d] << shifts[d];
    }
    *above = larger;
    return prefix;
}

static void choose(int32_t *out, const float *scores, uint32_t n, uint32_t k)
{
    uint32_t above = 0, taken = 0;
    const uint32_t edge = kth_key(scores, n, k, &above);
    uint32_t ties = k - above;
    for (uint32_t i = 0; i < n && taken < k; i++) {
        const uint32_t key = key_at(scores, i);
        if (key > edge)
            out[taken++] = (int32_t)i;
        else if (key == edge && ties) {
            out[taken++] = (int32_t)i;
            ties--;
        }
    }
}

static void select_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const indexing *x = arg;
    const uint32_t topk = x->a->topk;
    for (uint32_t r = begin; r < end; r++) {
        const uint32_t len = (uint32_t)x->a->batch->pos[x->first + r] + 1;
        int32_t *out = x->a->select + (size_t)(x->first + r) * topk;
        if (len > topk) {
            choose(out, x->scores + (size_t)r * x->stride, len, topk);
            continue;
        }
        for (uint32_t i = 0; i < len; i++) out[i] = (int32_t)i;
        for (uint32_t i = len; i < topk; i++) out[i] = -1;
    }
}

size_t nbi_cpu_index_fixed(uint32_t threads, const nbi_limits *l)
{
    return threads * index_layout(NULL, NULL, l->index_heads, l->index_dim);
}

size_t nbi_cpu_index_row(uint32_t n_positions)
{
    return ((size_t)n_positions + INDEX_BLOCK) * sizeof(float);
}

void nbi_cpu_index_select(nbi_backend *b, const nbi_index_select_args *a)
{
    nbi_cpu *cpu = nbi_cpu_of(b);
    const nbi_batch *batch = a->batch;
    const uint32_t threads = nbi_pool_threads(cpu->pool), T = batch->n_rows;
    nbi_index_select_args args = *a;
    nbi_pool_run(cpu->pool, rotate_task, &args, T, 4);

    indexing x = {.a = a, .k = nbi_cpu_kernels_many(cpu->level, a->n_heads)};
    x.threads = cpu->attention;
    x.thread_bytes = index_layout(NULL, NULL, a->n_heads, a->index_dim);
    const size_t fixed = threads * x.thread_bytes;
    NB_ASSERT(fixed < cpu->attention_bytes);
    x.scores = (float *)(void *)((char *)cpu->attention + fixed);
    for (; x.first < T; x.first += x.n_rows) {
        uint32_t longest = 0;
        for (x.n_rows = 0; x.first + x.n_rows < T; x.n_rows++) {
            const uint32_t len = (uint32_t)batch->pos[x.first + x.n_rows] + 1;
            const uint32_t top = len <= a->topk || len < longest ? longest : len;
            if ((x.n_rows + 1) * nbi_cpu_index_row(top) > cpu->attention_bytes - fixed) break;
            longest = top;
        }
        NB_ASSERT(x.n_rows > 0);
        x.blocks = (longest + INDEX_BLOCK - 1) / INDEX_BLOCK;
        x.stride = x.blocks * INDEX_BLOCK;
        if (x.blocks) nbi_pool_run(cpu->pool, score_task, &x, x.n_rows * x.blocks, 1);
        nbi_pool_run(cpu->pool, select_task, &x, x.n_rows, 1);
    }
}

/* ---------------------------------------------------------------- lists of an earlier pass */

void nbi_cpu_index_reuse(nbi_backend *b, const nbi_index_reuse_args *a)
{
    (void)b;
    const uint32_t K = a->topk;
    for (uint32_t t = 0; t < a->batch->n_rows; t++) {
        const int32_t *from = a->from ? a->from + (size_t)a->batch->list_rows[t] * K : NULL;
        int32_t *out = a->select + (size_t)t * K;
        for (uint32_t i = 0; i < K; i++) {
            const int32_t at = from ? from[i] : -1;
            out[i] = at >= 0 ? at : (int32_t)i <= a->batch->pos[t] ? (int32_t)i : -1;
        }
    }
}
