/* Attention over a paged cache in pieces; see cpu_attend.h for the rule of reductions.
 * Callers: mla.c, gqa.c.
 *
 * Work items are (group of rows of one sequence) x (piece) x (kv head) x (chunk of its query
 * heads), so that one decode row over a long context and many prefill rows both fill all threads.
 * Each item reads its part of the cache once for all its query vectors. Partial results (max, sum,
 * values) wait in the workspace for the merge. */
#include "backend/cpu/cpu_attend.h"

/* Consecutive rows of one sequence whose pieces have the same length. */
typedef struct group {
    uint32_t row, n_rows; /* relative to the block of rows */
    uint32_t n;           /* positions of the last (longest) row */
    uint32_t piece, n_pieces;
    uint32_t first_item;
} group;

/* What a row needs to be found again. */
typedef struct row_info {
    size_t partial; /* float offset of [n_pieces][heads][v_width + 2] */
    uint32_t n;     /* positions */
} row_info;

typedef struct run {
    const nbi_attend *a;
    uint32_t first, n_rows, n_groups, n_heads;
    uint32_t chunk, n_chunks; /* query heads of one kv head per item */
    group *groups;            /* [n_groups] */
    row_info *rows;           /* [n_rows] */
    float *partial;
    char *threads; /* per-thread scratch */
    size_t thread_bytes;
} run;

/* Per-thread scratch of an item: M = rows x heads query vectors. */
typedef struct scratch {
    float *q;            /* [M, k_width] */
    float *s;            /* [M, NBI_ATTEND_BLOCK] scores, then probabilities */
    float *o;            /* [M, v_width] */
    float *m, *l;        /* [M] running maximum and sum */
    const void **k, **v; /* [NBI_ATTEND_BLOCK] rows of the cache */
    uint16_t *decoded;   /* [NBI_ATTEND_BLOCK, k_width] those of an E4M3 cache */
} scratch;

static size_t scratch_layout(scratch *s, char *base, uint32_t k_width, uint32_t v_width)
{
    nbi_plan p = {0};
    const size_t f = sizeof(float), M = NBI_ATTEND_HEADS;
    const size_t q = nbi_plan_add(&p, M * k_width * f);
    const size_t sc = nbi_plan_add(&p, M * NBI_ATTEND_BLOCK * f);
    const size_t o = nbi_plan_add(&p, M * v_width * f);
    const size_t m = nbi_plan_add(&p, M * f), l = nbi_plan_add(&p, M * f);
    const size_t k = nbi_plan_add(&p, NBI_ATTEND_BLOCK * sizeof(void *));
    const size_t v = nbi_plan_add(&p, NBI_ATTEND_BLOCK * sizeof(void *));
    const size_t decoded = nbi_plan_add(&p, (size_t)NBI_ATTEND_BLOCK * k_width * sizeof(uint16_t));
    if (s)
        *s = (scratch){.q = (float *)(void *)(base + q),
                       .s = (float *)(void *)(base + sc),
                       .o = (float *)(void *)(base + o),
                       .m = (float *)(void *)(base + m),
                       .l = (float *)(void *)(base + l),
                       .k = (const void **)(void *)(base + k),
                       .v = (const void **)(void *)(base + v),
                       .decoded = (uint16_t *)(void *)(base + decoded)};
    return p.bytes;
}

static uint32_t piece_length(uint32_t n)
{
    if (n <= NBI_ATTEND_PIECE * NBI_ATTEND_PIECES_MAX) return NBI_ATTEND_PIECE;
    const uint32_t per = (n + NBI_ATTEND_PIECES_MAX - 1) / NBI_ATTEND_PIECES_MAX;
    return (per + NBI_ATTEND_PIECE - 1) / NBI_ATTEND_PIECE * NBI_ATTEND_PIECE;
}

static uint32_t piece_count(uint32_t n)
{
    const uint32_t len = piece_length(n);
    return (n + len - 1) / len;
}

size_t nbi_attend_thread_bytes(uint32_t threads, uint32_t k_width, uint32_t v_width)
{
    return threads * scratch_layout(NULL, NULL, k_width, v_width);
}

size_t nbi_attend_row_bytes(uint32_t n_positions, uint32_t n_heads, uint32_t v_width)
{
    const size_t partial = (size_t)piece_count(n_positions) * n_heads * (v_width + 2);
    /* 64: alignment of the three arrays, spread over the rows */
    return partial * sizeof(float) + sizeof(group) + sizeof(row_info) + 3 * 64;
}

uint32_t nbi_attend_length(const nbi_attend *a, uint32_t t)
{
    if (!a->select) return (uint32_t)a->batch->pos[t] + 1;
    const int32_t *sel = a->select + (size_t)t * a->select_stride;
    uint32_t lo = 0, hi = a->select_stride; /* first -1 */
    while (lo < hi) {
        const uint32_t mid = (lo + hi) / 2;
        if (sel[mid] >= 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

uint32_t nbi_attend_rows(const nbi_attend *a, uint32_t first, size_t bytes, size_t extra_row_bytes)
{
    size_t used = 0;
    uint32_t t = first;
    for (; t < a->batch->n_rows; t++) {
        used += extra_row_bytes +
                nbi_attend_row_bytes(nbi_attend_length(a, t), a->n_kv * a->ratio, a->v_width);
        if (used > bytes) break;
    }
    return t - first;
}

/* ---------------------------------------------------------------- one item */

/* Pointers to the cache rows of list entries [begin, begin + n) of row t in `part`, keys or values;
 * E4M3: decoded ones, until the next call. */
static void find_rows(const nbi_attend *a, const scratch *sc, const char *part, const void **rows,
                      uint32_t t, uint32_t kv, uint32_t begin, uint32_t n)
{
    const nbi_batch *b = a->batch;
    const uint32_t s = (uint32_t)b->row_seq[t];
    const int32_t *sel = a->select ? a->select + (size_t)t * a->select_stride : NULL;
    for (uint32_t j = 0; j < n; j++) {
        const uint32_t p = sel ? (uint32_t)sel[begin + j] : begin + j;
        const size_t page = nbi_cpu_page(b, s, p);
        if (a->shape.dtype == NBI_F8_E4M3) {
            uint16_t *row = sc->decoded + (size_t)j * a->k_width;
            nbi_cpu_decode(a->kernels, &a->shape, part, page, kv, p % NBI_PAGE_TOKENS, row);
            rows[j] = row;
        } else {
            rows[j] = part + nbi_kv_at(&a->shape, page, kv, p % NBI_PAGE_TOKENS);
        }
    }
}

/* Folds one block's scores of query vector i into its running softmax: scores become probabilities
 * relative to the new maximum, the values so far are rescaled. */
static void fold_scores(const nbi_attend *a, scratch *sc, uint32_t i, uint32_t n, bool fresh)
{
    float *s = sc->s + (size_t)i * NBI_ATTEND_BLOCK, *o = sc->o + (size_t)i * a->v_width;
    const float block_max = a->kernels->max(s, n);
    if (fresh) {
        sc->m[i] = block_max;
        sc->l[i] = a->kernels->exp_sum(s, n, block_max);
        return;
    }
    const float m = block_max > sc->m[i] ? block_max : sc->m[i];
    const float keep = expf(sc->m[i] - m);
    sc->m[i] = m;
    sc->l[i] = sc->l[i] * keep + a->kernels->exp_sum(s, n, m);
    if (keep != 1.0f)
        for (uint32_t c = 0; c < a->v_width; c++) o[c] *= keep;
}

/* Positions of the block [begin, begin + n) that a row of length len sees. */
static uint32_t visible(uint32_t len, uint32_t begin, uint32_t n)
{
    if (len <= begin) return 0;
    return len - begin < n ? len - begin : n;
}

/* One block for all query vectors of the item: rows [g->row, +n_rows) x `heads` heads. */
static void attend_block(const run *r, scratch *sc, const group *g, uint32_t kv, uint32_t heads,
                         uint32_t begin, uint32_t n, bool fresh)
{
    const nbi_attend *a = r->a;
    const nbi_cpu_kernels *k = a->kernels;
    const nbi_dtype dtype = nbi_cpu_row_dtype(a->shape.dtype);
    const uint32_t last = r->first + g->row + g->n_rows - 1;
    find_rows(a, sc, a->keys, sc->k, last, kv, begin, n);
    k->dots(sc->s, NBI_ATTEND_BLOCK, sc->q, a->k_width, g->n_rows * heads,
            (const void *const *)sc->k, dtype, n, a->k_width, a->scale);
    const void **v = sc->k;
    if (a->values != a->keys) {
        v = sc->v;
        find_rows(a, sc, a->values, v, last, kv, begin, n);
    }
    for (uint32_t i = 0; i < g->n_rows * heads; i++) {
        const uint32_t see = visible(r->rows[g->row + i / heads].n, begin, n);
        if (see) fold_scores(a, sc, i, see, fresh);
    }
    /* What all rows see together, then what the later rows see beyond: each value keeps its order.
     */
    const uint32_t common = visible(r->rows[g->row].n, begin, n);
    if (common)
        k->mix(sc->o, a->v_width, sc->s, NBI_ATTEND_BLOCK, g->n_rows * heads,
               (const void *const *)v, dtype, common, a->v_width);
    for (uint32_t i = 1; i < g->n_rows; i++) {
        const uint32_t see = visible(r->rows[g->row + i].n, begin, n);
        if (see > common)
            k->mix(sc->o + (size_t)i * heads * a->v_width, a->v_width,
                   sc->s + (size_t)i * heads * NBI_ATTEND_BLOCK + common, NBI_ATTEND_BLOCK, heads,
                   (const void *const *)v + common, dtype, see - common, a->v_width);
    }
}

static float *partial_of(const run *r, uint32_t row, uint32_t piece, uint32_t head)
{
    return r->partial + r->rows[row].partial +
           ((size_t)piece * r->n_heads + head) * (r->a->v_width + 2);
}

static void attend_item(const run *r, scratch *sc, const group *g, uint32_t piece, uint32_t kv,
                        uint32_t chunk)
{
    const nbi_attend *a = r->a;
    const uint32_t h0 = chunk * r->chunk;
    const uint32_t heads = a->ratio - h0 < r->chunk ? a->ratio - h0 : r->chunk;
    const uint32_t head = kv * a->ratio + h0;
    for (uint32_t i = 0; i < g->n_rows; i++)
        memcpy(sc->q + (size_t)i * heads * a->k_width,
               a->q + (g->row + i) * a->q_stride + (size_t)head * a->k_width,
               (size_t)heads * a->k_width * sizeof(float));
    memset(sc->o, 0, (size_t)g->n_rows * heads * a->v_width * sizeof(float));

    const uint32_t begin = piece * g->piece;
    const uint32_t end = g->n - begin < g->piece ? g->n : begin + g->piece;
    for (uint32_t at = begin; at < end; at += NBI_ATTEND_BLOCK) {
        const uint32_t n = end - at < NBI_ATTEND_BLOCK ? end - at : NBI_ATTEND_BLOCK;
        attend_block(r, sc, g, kv, heads, at, n, at == begin);
    }
    for (uint32_t i = 0; i < g->n_rows * heads; i++) {
        const uint32_t row = g->row + i / heads;
        if (r->rows[row].n <= begin) continue;
        float *p = partial_of(r, row, piece, head + i % heads);
        memcpy(p, sc->o + (size_t)i * a->v_width, a->v_width * sizeof(float));
        p[a->v_width] = sc->m[i];
        p[a->v_width + 1] = sc->l[i];
    }
}

static void attend_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    const run *r = arg;
    scratch sc;
    scratch_layout(&sc, r->threads + thread * r->thread_bytes, r->a->k_width, r->a->v_width);
    for (uint32_t i = begin; i < end; i++) {
        uint32_t lo = 0, hi = r->n_groups; /* last group with first_item <= i */
        while (hi - lo > 1) {
            const uint32_t mid = (lo + hi) / 2;
            if (r->groups[mid].first_item <= i)
                lo = mid;
            else
                hi = mid;
        }
        const group *g = &r->groups[lo];
        const uint32_t at = i - g->first_item, per_piece = r->a->n_kv * r->n_chunks;
        attend_item(r, &sc, g, at / per_piece, at % per_piece / r->n_chunks, at % r->n_chunks);
    }
}

/* ---------------------------------------------------------------- merge */

static void merge_head(const run *r, uint32_t row, uint32_t head)
{
    const nbi_attend *a = r->a;
    const uint32_t w = a->v_width, n_pieces = piece_count(r->rows[row].n);
    float *out = a->out + row * a->out_stride + head * a->out_head;
    if (n_pieces == 0) { /* an empty list */
        memset(out, 0, w * sizeof *out);
        return;
    }
    float *o = partial_of(r, row, 0, head);
    float m = o[w], l = o[w + 1];
    for (uint32_t p = 1; p < n_pieces; p++) {
        const float *x = partial_of(r, row, p, head);
        const float top = x[w] > m ? x[w] : m;
        const float keep = expf(m - top), add = expf(x[w] - top);
        for (uint32_t c = 0; c < w; c++) o[c] = o[c] * keep + x[c] * add;
        l = l * keep + x[w + 1] * add;
        m = top;
    }
    const float inv = 1.0f / l;
    for (uint32_t c = 0; c < w; c++) out[c] = o[c] * inv;
}

static void merge_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const run *r = arg;
    for (uint32_t i = begin; i < end; i++) merge_head(r, i / r->n_heads, i % r->n_heads);
}

/* ---------------------------------------------------------------- planning a block of rows */

/* Rows share an item when they are neighbours in one sequence, see the same list and are cut alike.
 */
static bool joins(const run *r, const group *g, uint32_t i, uint32_t max_rows)
{
    const int32_t *seq = r->a->batch->row_seq + r->first;
    return !r->a->select && g->n_rows < max_rows && seq[i] == seq[g->row] &&
           r->rows[i].n == g->n + 1 && piece_length(r->rows[i].n) == g->piece;
}

static void make_groups(run *r, uint32_t max_rows)
{
    size_t partial = 0;
    for (uint32_t i = 0; i < r->n_rows; i++) {
        const uint32_t n = nbi_attend_length(r->a, r->first + i);
        r->rows[i] = (row_info){.partial = partial, .n = n};
        partial += (size_t)piece_count(n) * r->n_heads * (r->a->v_width + 2);
        group *g = r->n_groups ? &r->groups[r->n_groups - 1] : NULL;
        if (!g || !joins(r, g, i, max_rows)) {
            g = &r->groups[r->n_groups++];
            *g = (group){.row = i, .piece = piece_length(n)};
        }
        g->n_rows++;
        g->n = n;
    }
}

/* Numbers the items; returns how many. */
static uint32_t number_items(run *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n_groups; i++) {
        r->groups[i].first_item = n;
        r->groups[i].n_pieces = piece_count(r->groups[i].n);
        n += r->groups[i].n_pieces * r->a->n_kv * r->n_chunks;
    }
    return n;
}

/* Heads per item: all of a kv head's, fewer (in whole tiles of the kernels) when items are scarcer
 * than threads. */
static void choose_chunk(run *r, uint32_t n_items)
{
    const uint32_t ratio = r->a->ratio, want = 2 * nbi_pool_threads(r->a->pool);
    r->chunk = ratio < NBI_ATTEND_HEADS ? ratio : NBI_ATTEND_HEADS;
    if (n_items > 0 && n_items < want) {
        const uint32_t parts = (want + n_items - 1) / n_items;
        const uint32_t tile = r->a->kernels->tile;
        const uint32_t chunk = ((ratio + parts - 1) / parts + tile - 1) / tile * tile;
        if (chunk < r->chunk) r->chunk = chunk;
    }
    r->n_chunks = (ratio + r->chunk - 1) / r->chunk;
}

void nbi_attend_run(const nbi_attend *a, uint32_t first, uint32_t n_rows, void *workspace)
{
    run r = {.a = a, .first = first, .n_rows = n_rows, .n_heads = a->n_kv * a->ratio};
    r.thread_bytes = scratch_layout(NULL, NULL, a->k_width, a->v_width);
    nbi_plan p = {0};
    const size_t threads = nbi_plan_add(&p, nbi_pool_threads(a->pool) * r.thread_bytes);
    const size_t groups = nbi_plan_add(&p, n_rows * sizeof(group));
    const size_t rows = nbi_plan_add(&p, n_rows * sizeof(row_info));
    r.threads = (char *)workspace + threads;
    r.groups = (group *)(void *)((char *)workspace + groups);
    r.rows = (row_info *)(void *)((char *)workspace + rows);
    r.partial = (float *)(void *)((char *)workspace + p.bytes);

    uint32_t max_rows = a->ratio < NBI_ATTEND_HEADS ? NBI_ATTEND_HEADS / a->ratio : 1;
    if (max_rows > a->kernels->max_group) max_rows = a->kernels->max_group;
    make_groups(&r, max_rows);
    r.n_chunks = 1;
    choose_chunk(&r, number_items(&r));
    nbi_pool_run(a->pool, attend_task, &r, number_items(&r), 1);
    nbi_pool_run(a->pool, merge_task, &r, n_rows * r.n_heads, 8);
}
