/* Products with AMX BF16 tiles. Callers: linear.c.
 *
 * A holds 16 rows of weights x 32 columns, B the pairs of 32 columns x up to 16 tokens, C the 16 x
 * 16 results. tdpbf16ps adds, per element, one chain over the even and one over the odd columns of
 * the 32, then their sum to C: nothing depends on the other elements, so one token and 512 take the
 * same path and give the same bits. C is kept in tiles or, exactly, in memory between steps.
 * FP8_BLOCK starts C anew every 128 columns and adds it, scaled, in float32.
 *
 * Two loops: `few` (one group of tokens, memory-bound: unpacking of the next 128 columns runs
 * beside the tile products, the next panel is fetched ahead in linear order) and `many`
 * (compute-bound: 32 rows x 1024 columns are unpacked once for all tokens, 2 x 2 tiles of C). */
#include "backend/cpu/linear.h"

#include "backend/cpu/linear_unpack.h"

#define TILE_ROWS   16u
#define PANEL_ROWS  32u   /* two A tiles */
#define SPAN        128u  /* columns unpacked at a time: one cache line of NVFP4 codes per row */
#define SPAN_STEPS  4u    /* SPAN / 32 */
#define DEEP        1024u /* columns unpacked at a time by `many` */
#define TILE_VALUES 512u  /* bf16 in an A tile */
#define STEP_VALUES 1024u /* bf16 of 32 rows x 32 columns */

/* Tile registers, and their instructions. The intrinsics of common compilers do not tell the
 * compiler that memory is read and written. */
#define C00 "0"
#define C01 "1"
#define C10 "2"
#define C11 "3"
#define A0  "4"
#define A1  "5"
#define B0  "6"
#define B1  "7"
#define tile_load(tile, base, stride)                                               \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" tile ::"r"((const void *)(base)), \
                     "r"((long)(stride))                                            \
                     : "memory")
#define tile_store(base, stride, tile)                                            \
    __asm__ volatile("tilestored %%tmm" tile ", (%0,%1,1)" ::"r"((void *)(base)), \
                     "r"((long)(stride))                                          \
                     : "memory")
#define tile_zero(tile)       __asm__ volatile("tilezero %%tmm" tile ::)
#define tile_product(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" b ", %%tmm" a ", %%tmm" c ::)

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} tile_config;

/* n0, n1: tokens of the two groups. */
static void configure(uint32_t n0, uint32_t n1)
{
    tile_config c;
    memset(&c, 0, sizeof c);
    c.palette = 1;
    const uint16_t w0 = (uint16_t)(4 * n0), w1 = (uint16_t)(4 * (n1 ? n1 : 1));
    const uint16_t width[8] = {w0, w1, w0, w1, 64, 64, w0, w1};
    for (int i = 0; i < 8; i++) {
        c.colsb[i] = width[i];
        c.rows[i] = TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
}

/* ---------------------------------------------------------------- fetching ahead */

/* Linear walk over bytes that will be read next. */
typedef struct walk {
    const char *at, *end;
} walk;

static inline void fetch(walk *w, size_t bytes)
{
    const char *stop = w->at + bytes < w->end ? w->at + bytes : w->end;
    for (; w->at < stop; w->at += 64) _mm_prefetch(w->at, _MM_HINT_T1);
}

typedef struct ahead {
    walk data, scales;
    size_t data_step, scale_step; /* bytes per 8 rows x SPAN columns */
} ahead;

static ahead ahead_of(const nbi_matrix *m, uint32_t row, uint32_t n)
{
    ahead h;
    memset(&h, 0, sizeof h);
    /* BF16 rows are read in runs that the hardware follows by itself: asking ahead costs a fifth.
     */
    if (!m || n == 0 || m->kind == NBI_WEIGHT_BF16) return h;
    const size_t bytes = nbi_matrix_row_bytes(m);
    h.data.at = (const char *)m->data + row * bytes;
    h.data.end = h.data.at + n * bytes;
    h.data_step = 8 * SPAN * bytes / m->cols;
    if (m->kind == NBI_WEIGHT_NVFP4) {
        h.scales.at = (const char *)m->scales + row * (size_t)(m->cols / NBI_NVFP4_BLOCK);
        h.scales.end = h.scales.at + n * (size_t)(m->cols / NBI_NVFP4_BLOCK);
        h.scale_step = 64;
    }
    return h;
}

static inline void fetch_step(ahead *h)
{
    fetch(&h->data, h->data_step);
    fetch(&h->scales, h->scale_step);
}

/* ---------------------------------------------------------------- unpacking */

/* What is multiplied: rows [row, row + n) of w, n <= 32. */
typedef struct source {
    const nbi_matrix *w;
    uint32_t row, n;
    nbi_unpack_nvfp4 nvfp4;
    nbi_unpack_fp8 fp8;
} source;

/* Rows [r0, r1) of the source, columns [c0, c0 + SPAN) (zeros behind the last) into
 * dst[step][32 rows][32 columns]. */
static inline void unpack_nvfp4(uint16_t *dst, const source *s, uint32_t r0, uint32_t r1,
                                uint32_t c0)
{
    const uint32_t cols = s->w->cols;
    const uint8_t *codes =
        (const uint8_t *)s->w->data + (size_t)(s->row + r0) * (cols / 2) + c0 / 2;
    const uint8_t *scales =
        (const uint8_t *)s->w->scales + (size_t)(s->row + r0) * (cols / 16) + c0 / 16;
    const bool whole = c0 + SPAN <= cols;
    const nbi_unpack_nvfp4 u = s->nvfp4;
    for (uint32_t r = r0; r < r1; r++, codes += cols / 2, scales += cols / 16) {
        uint16_t *out = dst + (size_t)r * 32;
        if (whole) {
            uint64_t sc;
            memcpy(&sc, scales, sizeof sc);
#pragma GCC unroll 4
            for (uint32_t k = 0; k < SPAN_STEPS; k++, sc >>= 16) {
                _mm512_store_si512(
                    out + k * STEP_VALUES,
                    nbi_unpack_nvfp4_32(&u, codes + 16 * k, sc & 0xff, sc >> 8 & 0xff));
            }
            continue;
        }
        for (uint32_t c = c0, k = 0; c < cols; c += 32, k++) {
            const __m512i v =
                c + 32 <= cols
                    ? nbi_unpack_nvfp4_32(&u, codes + 16 * k, scales[2 * k], scales[2 * k + 1])
                    : nbi_unpack_nvfp4_16(&u, codes + 16 * k, scales[2 * k]);
            _mm512_store_si512(out + k * STEP_VALUES, v);
        }
    }
}

static inline void unpack_fp8(uint16_t *dst, const source *s, uint32_t r0, uint32_t r1, uint32_t c0)
{
    const uint32_t cols = s->w->cols, end = cols - c0 < SPAN ? cols : c0 + SPAN;
    for (uint32_t r = r0; r < r1; r++) {
        const uint8_t *bytes = (const uint8_t *)s->w->data + (size_t)(s->row + r) * cols;
        uint16_t *out = dst + (size_t)r * 32;
        for (uint32_t c = c0; c < end; c += 64, out += 2 * STEP_VALUES) {
            __m512i v[2];
            nbi_unpack_fp8_64(&s->fp8, nbi_load_tail64(bytes + c, cols - c), v);
            _mm512_store_si512(out, v[0]);
            _mm512_store_si512(out + STEP_VALUES, v[1]);
        }
    }
}

static inline void copy_bf16(uint16_t *dst, const source *s, uint32_t r0, uint32_t r1, uint32_t c0)
{
    const uint32_t cols = s->w->cols, end = cols - c0 < SPAN ? cols : c0 + SPAN;
    for (uint32_t r = r0; r < r1; r++) {
        const char *row = (const char *)s->w->data + (size_t)(s->row + r) * cols * 2;
        uint16_t *out = dst + (size_t)r * 32;
        for (uint32_t c = c0; c < end; c += 32, out += STEP_VALUES) {
            const uint32_t left = cols - c;
            const __mmask32 mask = left >= 32 ? ~(__mmask32)0 : ((__mmask32)1 << left) - 1;
            _mm512_store_si512(out, _mm512_maskz_loadu_epi16(mask, row + (size_t)c * 2));
        }
    }
}

static inline __attribute__((always_inline)) void unpack(nbi_weight_kind kind, uint16_t *dst,
                                                         const source *s, uint32_t r0, uint32_t r1,
                                                         uint32_t c0)
{
    if (r1 > s->n) r1 = s->n;
    if (kind == NBI_WEIGHT_NVFP4)
        unpack_nvfp4(dst, s, r0, r1, c0);
    else if (kind == NBI_WEIGHT_BF16)
        copy_bf16(dst, s, r0, r1, c0);
    else
        unpack_fp8(dst, s, r0, r1, c0);
}

/* ---------------------------------------------------------------- results */

/* FP8 scale of a row's 128 columns. */
static inline float block_scale(const nbi_matrix *w, uint32_t row, uint32_t c)
{
    const size_t n = (w->cols + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK;
    float scale; /* mapped: may be unaligned */
    memcpy(&scale,
           (const char *)w->scales + sizeof scale * (row / NBI_FP8_BLOCK * n + c / NBI_FP8_BLOCK),
           sizeof scale);
    return scale;
}

/* sum[32][width] += c[32][width] * scale of each row for the 128 columns at c0. */
static inline void add_scaled(float *sum, const float *c, uint32_t width, const source *s,
                              uint32_t c0)
{
    for (uint32_t r = 0; r < s->n; r++) {
        const float scale = block_scale(s->w, s->row + r, c0);
        for (uint32_t t = 0; t < width; t++)
            sum[r * width + t] = __builtin_fmaf(c[r * width + t], scale, sum[r * width + t]);
    }
}

/* out[t][r] = alpha * c[r][t] */
static void put(float *out, size_t out_stride, const float *c, uint32_t width, uint32_t n_rows,
                uint32_t n, float alpha)
{
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t r = 0; r < n_rows; r++) out[t * out_stride + r] = alpha * c[r * width + t];
}

/* ---------------------------------------------------------------- few: one group of tokens */

/* Scratch of `few`. */
typedef struct few_scratch {
    uint16_t a[2][SPAN_STEPS * STEP_VALUES];
    float c[PANEL_ROWS * TILE_ROWS];   /* [32][n] */
    float sum[PANEL_ROWS * TILE_ROWS]; /* FP8_BLOCK */
} few_scratch;

static inline __attribute__((always_inline)) void few_span(const uint16_t *a, const uint16_t *b,
                                                           uint32_t step, uint32_t n)
{
    tile_load(B0, b + (size_t)step * 32 * n, 4 * n);
    tile_load(A0, a, 64);
    tile_product(C00, A0, B0);
    tile_load(A1, a + TILE_VALUES, 64);
    tile_product(C10, A1, B0);
}

static inline __attribute__((always_inline)) void few_rows(nbi_weight_kind kind, const source *s,
                                                           const uint16_t *b, uint32_t n,
                                                           ahead *next, few_scratch *m)
{
    const uint32_t cols = s->w->cols, steps = nbi_lin_pad(cols) / 32;
    const uint32_t spans = (steps + SPAN_STEPS - 1) / SPAN_STEPS;
    tile_zero(C00);
    tile_zero(C10);
    if (kind == NBI_WEIGHT_FP8_BLOCK) memset(m->sum, 0, sizeof m->sum);
    unpack(kind, m->a[0], s, 0, PANEL_ROWS, 0);
    for (uint32_t i = 0; i < spans; i++) {
        const uint16_t *a = m->a[i & 1];
        for (uint32_t k = 0; k < SPAN_STEPS; k++) {
            fetch_step(next);
            if (i + 1 < spans) unpack(kind, m->a[(i + 1) & 1], s, 8 * k, 8 * k + 8, (i + 1) * SPAN);
            const uint32_t step = i * SPAN_STEPS + k;
            if (step < steps) few_span(a + k * STEP_VALUES, b, step, n);
        }
        if (kind == NBI_WEIGHT_FP8_BLOCK) {
            tile_store(m->c, 4 * n, C00);
            tile_store(m->c + TILE_ROWS * n, 4 * n, C10);
            tile_zero(C00);
            tile_zero(C10);
            add_scaled(m->sum, m->c, n, s, i * SPAN);
        }
    }
    if (kind != NBI_WEIGHT_FP8_BLOCK) {
        tile_store(m->c, 4 * n, C00);
        tile_store(m->c + TILE_ROWS * n, 4 * n, C10);
    }
}

static inline __attribute__((always_inline)) void few(nbi_weight_kind kind, const nbi_lin_panel *p)
{
    few_scratch *m = p->scratch;
    source s = {.w = p->w, .nvfp4 = nbi_unpack_nvfp4_init(), .fp8 = nbi_unpack_fp8_init()};
    const uint16_t *b = (const uint16_t *)p->x->data + (size_t)p->t0 * nbi_lin_pad(p->w->cols);
    const float alpha = p->w->global_scale * p->x->scale;
    configure(p->n, 0);
    for (uint32_t r = 0; r < p->n_rows; r += PANEL_ROWS) {
        s.row = p->row + r;
        s.n = p->n_rows - r < PANEL_ROWS ? p->n_rows - r : PANEL_ROWS;
        const uint32_t behind = p->n_rows - r - s.n;
        ahead next = behind ? ahead_of(p->w, s.row + s.n, behind < PANEL_ROWS ? behind : PANEL_ROWS)
                            : ahead_of(p->next, p->next_row,
                                       p->next_rows < PANEL_ROWS ? p->next_rows : PANEL_ROWS);
        few_rows(kind, &s, b, p->n, &next, m);
        put(p->out + r, p->out_stride, kind == NBI_WEIGHT_FP8_BLOCK ? m->sum : m->c, p->n, s.n,
            p->n, alpha);
    }
    __asm__ volatile("tilerelease" ::);
}

/* ---------------------------------------------------------------- many: pairs of groups */

/* 32 rows x 32 tokens of results: four tiles. */
typedef struct result {
    float c[2][2][TILE_ROWS * TILE_ROWS]; /* [row tile][group][row][token] */
} result;

typedef struct many_scratch {
    uint16_t a[DEEP / 32 * STEP_VALUES];
    result part;
    result c[NBI_LIN_ROWS / PANEL_ROWS][NBI_LIN_TOKENS / 32];
} many_scratch;

static inline __attribute__((always_inline)) void load_c(const result *c, bool two)
{
    tile_load(C00, c->c[0][0], 64);
    tile_load(C10, c->c[1][0], 64);
    if (!two) return;
    tile_load(C01, c->c[0][1], 64);
    tile_load(C11, c->c[1][1], 64);
}

static inline __attribute__((always_inline)) void store_c(result *c, bool two)
{
    tile_store(c->c[0][0], 64, C00);
    tile_store(c->c[1][0], 64, C10);
    if (!two) return;
    tile_store(c->c[0][1], 64, C01);
    tile_store(c->c[1][1], 64, C11);
}

static inline void zero_c(void)
{
    tile_zero(C00);
    tile_zero(C10);
    tile_zero(C01);
    tile_zero(C11);
}

/* `steps` steps of 32 columns for one pair of groups; b0, b1 at the first step; n1 = 0: one group.
 */
static inline __attribute__((always_inline)) void many_steps(const uint16_t *a, const uint16_t *b0,
                                                             const uint16_t *b1, uint32_t n0,
                                                             uint32_t n1, uint32_t steps)
{
    for (uint32_t k = 0; k < steps; k++, a += STEP_VALUES) {
        tile_load(A0, a, 64);
        tile_load(B0, b0 + (size_t)k * 32 * n0, 4 * n0);
        tile_product(C00, A0, B0);
        tile_load(A1, a + TILE_VALUES, 64);
        tile_product(C10, A1, B0);
        if (!n1) continue;
        tile_load(B1, b1 + (size_t)k * 32 * n1, 4 * n1);
        tile_product(C01, A0, B1);
        tile_product(C11, A1, B1);
    }
}

/* One pair of groups, columns [c0, c0 + 32 * steps), into c. */
static inline __attribute__((always_inline)) void many_pair(nbi_weight_kind kind, const source *s,
                                                            const uint16_t *x, uint32_t t,
                                                            uint32_t n, uint32_t c0, uint32_t steps,
                                                            many_scratch *m, result *c)
{
    const uint32_t pad = nbi_lin_pad(s->w->cols);
    const uint32_t n0 = n - t < 16 ? n - t : 16, n1 = n - t - n0 < 16 ? n - t - n0 : 16;
    const uint16_t *b0 = x + (size_t)t * pad + (size_t)c0 * n0;
    const uint16_t *b1 = n1 ? x + (size_t)(t + 16) * pad + (size_t)c0 * n1 : b0;
    if (kind != NBI_WEIGHT_FP8_BLOCK) {
        if (c0)
            load_c(c, n1 != 0);
        else
            zero_c();
        many_steps(m->a, b0, b1, n0, n1, steps);
        store_c(c, n1 != 0);
        return;
    }
    if (c0 == 0) memset(c, 0, sizeof *c);
    for (uint32_t k = 0; k < steps; k += SPAN_STEPS) {
        zero_c();
        many_steps(m->a + k * STEP_VALUES, b0 + (size_t)k * 32 * n0, b1 + (size_t)k * 32 * n1, n0,
                   n1, steps - k < SPAN_STEPS ? steps - k : SPAN_STEPS);
        store_c(&m->part, n1 != 0);
        for (uint32_t r = 0; r < s->n; r++) {
            const __m512 scale = _mm512_set1_ps(block_scale(s->w, s->row + r, c0 + 32 * k));
            for (uint32_t g = 0; g < 2; g++) {
                float *sum = c->c[r / 16][g] + r % 16 * 16;
                const float *add = m->part.c[r / 16][g] + r % 16 * 16;
                _mm512_store_ps(sum,
                                _mm512_fmadd_ps(_mm512_load_ps(add), scale, _mm512_load_ps(sum)));
            }
        }
    }
}

static void put_pair(const nbi_lin_panel *p, const result *c, uint32_t r, uint32_t n_rows,
                     uint32_t t)
{
    const float alpha = p->w->global_scale * p->x->scale;
    for (uint32_t g = 0; g < 2 && t + 16 * g < p->n; g++) {
        const uint32_t first = t + 16 * g, n = p->n - first < 16 ? p->n - first : 16;
        for (uint32_t half = 0; half < 2 && half * TILE_ROWS < n_rows; half++) {
            const uint32_t rows = n_rows - half * 16 < 16 ? n_rows - half * 16 : 16;
            put(p->out + first * p->out_stride + r + half * 16, p->out_stride, c->c[half][g], 16,
                rows, n, alpha);
        }
    }
}

static inline __attribute__((always_inline)) void many(nbi_weight_kind kind, const nbi_lin_panel *p)
{
    many_scratch *m = p->scratch;
    const uint32_t cols = p->w->cols, pad = nbi_lin_pad(cols);
    const uint16_t *x = (const uint16_t *)p->x->data + (size_t)p->t0 * pad;
    source s = {.w = p->w, .nvfp4 = nbi_unpack_nvfp4_init(), .fp8 = nbi_unpack_fp8_init()};
    const uint32_t last = p->n % 32; /* tokens of the incomplete pair */
    for (uint32_t c0 = 0; c0 < cols; c0 += DEEP) {
        const uint32_t steps = (pad - c0 < DEEP ? pad - c0 : DEEP) / 32;
        for (uint32_t r = 0; r < p->n_rows; r += PANEL_ROWS) {
            s.row = p->row + r;
            s.n = p->n_rows - r < PANEL_ROWS ? p->n_rows - r : PANEL_ROWS;
            for (uint32_t k = 0; k < steps; k += SPAN_STEPS)
                unpack(kind, m->a + k * STEP_VALUES, &s, 0, PANEL_ROWS, c0 + 32 * k);
            result *c = m->c[r / PANEL_ROWS];
            if (p->n >= 32) configure(16, 16);
            uint32_t t = 0;
            for (; t + 32 <= p->n; t += 32)
                many_pair(kind, &s, x, t, p->n, c0, steps, m, &c[t / 32]);
            if (last) {
                configure(last < 16 ? last : 16, last > 16 ? last - 16 : 0);
                many_pair(kind, &s, x, t, p->n, c0, steps, m, &c[t / 32]);
            }
        }
    }
    __asm__ volatile("tilerelease" ::);
    for (uint32_t r = 0; r < p->n_rows; r += PANEL_ROWS) {
        const uint32_t n = p->n_rows - r < PANEL_ROWS ? p->n_rows - r : PANEL_ROWS;
        for (uint32_t t = 0; t < p->n; t += 32) put_pair(p, &m->c[r / PANEL_ROWS][t / 32], r, n, t);
    }
}

_Static_assert(sizeof(many_scratch) <= 256u << 10, "fits a thread's scratch");

/* ---------------------------------------------------------------- by kind */

void nbi_lin_panel_amx(const nbi_lin_panel *p)
{
    const bool is_few = p->n <= 16;
#define BY_KIND(kind)      \
    case kind: {           \
        if (is_few)        \
            few(kind, p);  \
        else               \
            many(kind, p); \
        break;             \
    }
    switch (p->w->kind) {
        BY_KIND(NBI_WEIGHT_NVFP4)
        BY_KIND(NBI_WEIGHT_FP8_BLOCK)
        BY_KIND(NBI_WEIGHT_FP8_TENSOR)
        BY_KIND(NBI_WEIGHT_BF16)
    default: NB_ASSERT(!"weight kind without an AMX kernel");
    }
#undef BY_KIND
}
