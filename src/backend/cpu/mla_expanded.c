/* Latent attention in the expanded form: keys and values of one head are built from the latents,
 * block by block of positions, and met by all rows of the sequence before the next block is built.
 *
 * Callers: mla.c, for rows below batch->expanded.
 * A work item is (head, span of rows); spans are as long as the threads allow, since each builds
 * for itself. Nothing is shared between items and the sums of a row wait in `out`, so there is no
 * merge.
 *
 * Order of reductions: blocks of NBI_ATTEND_BLOCK positions from position 0, in ascending order,
 * into one running softmax; inside a block positions ascend. A key or value is one sum over the
 * latent, whoever builds it. So the bits of a row depend on the row alone. */
#include "backend/cpu/cpu_attend.h"
#include "backend/cpu/cpu_mla.h"

#define BLOCK    NBI_ATTEND_BLOCK
#define PANEL    NBI_CPU_PANEL
#define TILE     48u /* rows that meet a block together */
#define GROUP    6u  /* of them, rows that meet the positions they do not all see together */
#define BUILD    96u /* positions built at once: their latents stay in the second-level cache */
#define ROWS_MAX 4096u

typedef struct expanded {
    const nbi_mla_attend_args *a;
    const nbi_cpu_kernels *k;
    uint32_t first, n_rows; /* of the batch: one sequence */
    uint32_t span;          /* rows per item */
    char *threads;
    size_t thread_bytes;
} expanded;

typedef struct scratch {
    float *weights; /* [panels of nope, then of v][kv_lora][PANEL] */
    float *latents; /* [BUILD][kv_lora] */
    float *rows;    /* [BUILD][panels of nope * PANEL] keys before they are turned */
    float *keys;    /* [BLOCK / PANEL][nope + rope][PANEL] */
    float *values;  /* [panels of v][BLOCK][PANEL] */
    float *q;       /* [TILE][nope + rope], scaled */
    float *s;       /* [TILE][BLOCK] scores, then probabilities */
    float *o;       /* [TILE][panels of v * PANEL] */
    float *m, *l;   /* [ROWS_MAX] running maximum and sum */
} scratch;

static uint32_t panels(uint32_t n)
{
    return (n + PANEL - 1) / PANEL;
}

static size_t layout(scratch *sc, char *base, uint32_t nope, uint32_t rope, uint32_t v,
                     uint32_t kv_lora)
{
    const uint32_t np = panels(nope), vp = panels(v), qk = nope + rope;
    const size_t floats[] = {(size_t)(np + vp) * kv_lora * PANEL,
                             (size_t)BUILD * kv_lora,
                             (size_t)BUILD * np * PANEL,
                             (size_t)BLOCK * qk,
                             (size_t)BLOCK * vp * PANEL,
                             (size_t)TILE * qk,
                             (size_t)TILE * BLOCK,
                             (size_t)TILE * vp * PANEL,
                             ROWS_MAX,
                             ROWS_MAX};
    float *at[sizeof floats / sizeof *floats] = {0};
    nbi_plan p = {0};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        const size_t offset = nbi_plan_add(&p, floats[i] * sizeof(float));
        if (base) at[i] = (float *)(void *)(base + offset);
    }
    if (sc)
        *sc = (scratch){.weights = at[0],
                        .latents = at[1],
                        .rows = at[2],
                        .keys = at[3],
                        .values = at[4],
                        .q = at[5],
                        .s = at[6],
                        .o = at[7],
                        .m = at[8],
                        .l = at[9]};
    return p.bytes;
}

size_t nbi_cpu_mla_expanded_bytes(uint32_t threads, const nbi_limits *l)
{
    return threads * layout(NULL, NULL, l->nope_dim, l->rope_dim, l->v_dim, l->kv_lora);
}

/* ---------------------------------------------------------------- building */

/* n rows of kv_b from `row` on become the columns of panels. */
static void turn_weights(const nbi_mla_attend_args *a, float *to, float *row_buffer, uint32_t row,
                         uint32_t n)
{
    const size_t panel = (size_t)a->kv_lora * PANEL;
    if (n % PANEL) memset(to + n / PANEL * panel, 0, panel * sizeof *to);
    for (uint32_t j = 0; j < n; j++) {
        nbi_matrix_row(&a->kv_b->host, row + j, row_buffer);
        float *column = to + j / PANEL * panel + j % PANEL;
        for (uint32_t i = 0; i < a->kv_lora; i++) column[(size_t)i * PANEL] = row_buffer[i];
    }
}

/* A position's latent and rope key. */
static void load(const expanded *e, const nbi_kv_shape *shape, size_t page, uint32_t slot,
                 float *latent, float *rope)
{
    const nbi_mla_attend_args *a = e->a;
    const char *from = (const char *)a->cache->latent + nbi_kv_at(shape, page, 0, slot);
    uint16_t decoded[NBI_CPU_WIDTH_MAX];
    if (shape->dtype == NBI_F32) {
        memcpy(latent, from, a->kv_lora * sizeof *latent);
        memcpy(rope, from + a->kv_lora * sizeof *latent, a->rope_dim * sizeof *rope);
        return;
    }
    const uint16_t *h = (const uint16_t *)(const void *)from;
    if (shape->dtype == NBI_F8_E4M3) {
        nbi_cpu_decode(e->k, shape, a->cache->latent, page, 0, slot, decoded);
        h = decoded;
    }
    for (uint32_t i = 0; i < a->kv_lora; i++) latent[i] = nbi_bf16_f32(h[i]);
    for (uint32_t i = 0; i < a->rope_dim; i++) rope[i] = nbi_bf16_f32(h[a->kv_lora + i]);
}

/* Latents of positions [p0, p0 + n), and their rope keys into columns of `keys`. */
static void load_positions(const expanded *e, const scratch *sc, uint32_t p0, uint32_t n,
                           uint32_t block)
{
    const nbi_mla_attend_args *a = e->a;
    const uint32_t qk = a->nope_dim + a->rope_dim;
    const nbi_kv_shape shape = nbi_kv_latent_shape(a->cache->dtype, a->kv_lora, a->rope_dim);
    const uint32_t seq = (uint32_t)a->batch->row_seq[e->first];
    float rope[NBI_CPU_WIDTH_MAX];
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t p = p0 + i, at = p - block;
        load(e, &shape, nbi_cpu_page(a->batch, seq, p), p % NBI_PAGE_TOKENS,
             sc->latents + (size_t)i * a->kv_lora, rope);
        float *column = sc->keys + ((size_t)(at / PANEL) * qk + a->nope_dim) * PANEL + at % PANEL;
        for (uint32_t c = 0; c < a->rope_dim; c++) column[(size_t)c * PANEL] = rope[c];
    }
}

/* Keys and values of positions [block, block + n). */
static void build(const expanded *e, const scratch *sc, uint32_t block, uint32_t n)
{
    const nbi_mla_attend_args *a = e->a;
    const uint32_t np = panels(a->nope_dim), vp = panels(a->v_dim);
    const uint32_t qk = a->nope_dim + a->rope_dim;
    const size_t panel = (size_t)a->kv_lora * PANEL;
    for (uint32_t i0 = 0; i0 < n; i0 += BUILD) {
        const uint32_t ni = n - i0 < BUILD ? n - i0 : BUILD;
        load_positions(e, sc, block + i0, ni, block);
        for (uint32_t j = 0; j < np; j++)
            e->k->product(sc->rows + j * PANEL, np * PANEL, sc->latents, a->kv_lora,
                          sc->weights + j * panel, ni, a->kv_lora, false);
        for (uint32_t i = 0; i < ni; i++) {
            const uint32_t at = i0 + i;
            const float *row = sc->rows + (size_t)i * np * PANEL;
            float *column = sc->keys + (size_t)(at / PANEL) * qk * PANEL + at % PANEL;
            for (uint32_t c = 0; c < a->nope_dim; c++) column[(size_t)c * PANEL] = row[c];
        }
        for (uint32_t j = 0; j < vp; j++)
            e->k->product(sc->values + ((size_t)j * BLOCK + i0) * PANEL, PANEL, sc->latents,
                          a->kv_lora, sc->weights + (np + j) * panel, ni, a->kv_lora, false);
    }
}

/* ---------------------------------------------------------------- attending */

/* Positions of the block [block, block + BLOCK) that row t sees. */
static uint32_t visible(const expanded *e, uint32_t t, uint32_t block)
{
    const uint32_t len = (uint32_t)e->a->batch->pos[t] + 1;
    if (len <= block) return 0;
    return len - block < BLOCK ? len - block : BLOCK;
}

static float *out_of(const expanded *e, uint32_t t, uint32_t head)
{
    return (float *)e->a->out + ((size_t)t * e->a->n_heads + head) * e->a->v_dim;
}

/* Folds a row's scores into its running softmax; its sums so far, rescaled, go to o. */
static void fold(const expanded *e, const scratch *sc, uint32_t i, uint32_t at, uint32_t n,
                 const float *sums, bool fresh)
{
    const uint32_t v = e->a->v_dim;
    float *s = sc->s + (size_t)i * BLOCK, *o = sc->o + (size_t)i * panels(v) * PANEL;
    const float block_max = e->k->max(s, n);
    if (fresh) {
        sc->m[at] = block_max;
        sc->l[at] = e->k->exp_sum(s, n, block_max);
        memset(o, 0, (size_t)panels(v) * PANEL * sizeof *o);
        return;
    }
    const float m = block_max > sc->m[at] ? block_max : sc->m[at];
    const float keep = expf(sc->m[at] - m);
    sc->m[at] = m;
    sc->l[at] = sc->l[at] * keep + e->k->exp_sum(s, n, m);
    for (uint32_t c = 0; c < v; c++) o[c] = sums[c] * keep;
}

/* o += probabilities of rows [i, i + n) of the tile, at positions [from, to), times the values. */
static void add_values(const expanded *e, const scratch *sc, uint32_t i, uint32_t n, uint32_t from,
                       uint32_t to)
{
    const uint32_t vp = panels(e->a->v_dim);
    if (from == to) return;
    for (uint32_t j = 0; j < vp; j++)
        e->k->product(sc->o + ((size_t)i * vp + j) * PANEL, (size_t)vp * PANEL,
                      sc->s + (size_t)i * BLOCK + from, BLOCK,
                      sc->values + ((size_t)j * BLOCK + from) * PANEL, n, to - from, true);
}

/* What the rows of a group see together, then what the later ones see beyond: a row never meets a
 * value behind it, be it as bad as it may. */
static void mix_values(const expanded *e, const scratch *sc, uint32_t t, uint32_t n, uint32_t block)
{
    if (visible(e, t, block) == BLOCK) {
        add_values(e, sc, 0, n, 0, BLOCK);
        return;
    }
    const uint32_t group = e->k->max_group == 1 ? 1 : GROUP;
    for (uint32_t g = 0; g < n; g += group) {
        const uint32_t rows = n - g < group ? n - g : group, common = visible(e, t + g, block);
        add_values(e, sc, g, rows, 0, common);
        for (uint32_t i = 1; i < rows; i++)
            add_values(e, sc, g + i, 1, common, visible(e, t + g + i, block));
    }
}

/* Rows [t, t + n) of the batch, the first of which is row `at` of the item, and one block. */
static void attend_tile(const expanded *e, const scratch *sc, uint32_t head, uint32_t t, uint32_t n,
                        uint32_t at, uint32_t block)
{
    const nbi_mla_attend_args *a = e->a;
    const uint32_t qk = a->nope_dim + a->rope_dim, v = a->v_dim, vp = panels(v);
    const uint32_t most = visible(e, t + n - 1, block);
    if (!most) return;
    while (!visible(e, t, block)) { /* rows before the block */
        t++;
        at++;
        n--;
    }
    for (uint32_t i = 0; i < n; i++) {
        const float *q = (const float *)a->q + ((size_t)(t + i) * a->n_heads + head) * qk;
        for (uint32_t c = 0; c < qk; c++) sc->q[(size_t)i * qk + c] = q[c] * a->scale;
    }
    for (uint32_t j = 0; j * PANEL < most; j++)
        e->k->product(sc->s + j * PANEL, BLOCK, sc->q, qk, sc->keys + (size_t)j * qk * PANEL, n, qk,
                      false);
    for (uint32_t i = 0; i < n; i++)
        fold(e, sc, i, at + i, visible(e, t + i, block), out_of(e, t + i, head), block == 0);
    mix_values(e, sc, t, n, block);
    for (uint32_t i = 0; i < n; i++)
        memcpy(out_of(e, t + i, head), sc->o + (size_t)i * vp * PANEL, v * sizeof(float));
}

static void attend_item(const expanded *e, const scratch *sc, uint32_t head, uint32_t first,
                        uint32_t n_rows)
{
    const nbi_mla_attend_args *a = e->a;
    const uint32_t row = head * (a->nope_dim + a->v_dim);
    const uint32_t len = (uint32_t)a->batch->pos[first + n_rows - 1] + 1;
    turn_weights(a, sc->weights, sc->latents, row, a->nope_dim);
    turn_weights(a, sc->weights + (size_t)panels(a->nope_dim) * a->kv_lora * PANEL, sc->latents,
                 row + a->nope_dim, a->v_dim);
    for (uint32_t block = 0; block < len; block += BLOCK) {
        build(e, sc, block, len - block < BLOCK ? len - block : BLOCK);
        for (uint32_t i = 0; i < n_rows; i += TILE)
            attend_tile(e, sc, head, first + i, n_rows - i < TILE ? n_rows - i : TILE, i, block);
    }
    for (uint32_t i = 0; i < n_rows; i++) {
        float *out = out_of(e, first + i, head);
        const float inv = 1.0f / sc->l[i];
        for (uint32_t c = 0; c < a->v_dim; c++) out[c] *= inv;
    }
}

static void attend_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    const expanded *e = arg;
    const uint32_t spans = (e->n_rows + e->span - 1) / e->span;
    const nbi_mla_attend_args *a = e->a;
    scratch sc;
    layout(&sc, e->threads + thread * e->thread_bytes, a->nope_dim, a->rope_dim, a->v_dim,
           a->kv_lora);
    for (uint32_t i = begin; i < end; i++) {
        const uint32_t at = i % spans * e->span;
        attend_item(e, &sc, i / spans, e->first + at,
                    e->n_rows - at < e->span ? e->n_rows - at : e->span);
    }
}

void nbi_cpu_mla_expanded(nbi_cpu *cpu, const nbi_mla_attend_args *a, uint32_t first,
                          uint32_t n_rows)
{
    const uint32_t threads = nbi_pool_threads(cpu->pool);
    expanded e = {.a = a,
                  .k = nbi_cpu_kernels_of(cpu->level),
                  .first = first,
                  .n_rows = n_rows,
                  .threads = cpu->attention};
    e.thread_bytes = layout(NULL, NULL, a->nope_dim, a->rope_dim, a->v_dim, a->kv_lora);
    NB_ASSERT(a->kv_lora + a->rope_dim <= NBI_CPU_WIDTH_MAX);
    NB_ASSERT(!a->select && threads * e.thread_bytes <= cpu->attention_bytes);
    const uint32_t want = (2 * threads + a->n_heads - 1) / a->n_heads; /* spans for all threads */
    e.span = (n_rows + want - 1) / want;
    e.span = (e.span + TILE - 1) / TILE * TILE;
    if (e.span > ROWS_MAX / TILE * TILE) e.span = ROWS_MAX / TILE * TILE;
    nbi_pool_run(cpu->pool, attend_task, &e, a->n_heads * ((n_rows + e.span - 1) / e.span), 1);
}
