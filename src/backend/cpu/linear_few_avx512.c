/* Products of a few tokens with vdpbf16ps: the memory sets the time, so weights go from where the
 * file has them into the product without a stop, and rows further on are asked for early. Callers:
 * linear_avx512.c.
 *
 * Additions are those of block() in linear_avx512.c: one accumulator of 16 lanes per element, 32
 * columns a step in ascending order, then the tree of _mm512_reduce_add_ps.
 *
 * Fetching early into L2 (T1) the same columns of the rows a block or two ahead was the best of
 * twelve ways on a Zen 4 core: docs/performance.md. */
#include "backend/cpu/linear.h"

#include "backend/cpu/linear_sum_avx512.h"
#include "backend/cpu/linear_unpack.h"

#define ROWS       4u /* rows of a block */
#define ROWS_ONE   8u /* rows of a BF16 block of one token */
#define AHEAD_ROWS 8u

/* One call: rows of one panel, all of its tokens. */
typedef struct rows {
    const nbi_lin_panel *p;
    const uint16_t *x;
    uint32_t cols, pad;
    size_t row_bytes, n_scales;
    float alpha;
} rows;

/* Row r of a panel. Behind its end begins what the thread reads next; where that is not known, the
 * panel itself. */
static inline const char *row_ahead(const rows *s, uint32_t r)
{
    const nbi_lin_panel *p = s->p;
    if (r < p->n_rows) return (const char *)p->w->data + (p->row + r) * s->row_bytes;
    r -= p->n_rows;
    const bool known =
        p->next && r < p->next_rows && p->next->kind == p->w->kind && p->next->cols == p->w->cols;
    if (!known) return (const char *)p->w->data + p->row * s->row_bytes;
    return (const char *)p->next->data + (p->next_row + r) * s->row_bytes;
}

static inline __attribute__((always_inline)) void clear(int R, int N, __m512 acc[8][6])
{
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 6
        for (int t = 0; t < N; t++) acc[r][t] = _mm512_setzero_ps();
}

static inline __attribute__((always_inline)) void put(int R, int N, const rows *s, uint32_t row,
                                                      __m512 acc[8][6])
{
#pragma GCC unroll 6
    for (int t = 0; t < N; t++)
        nbi_lin_put_rows(R, s->p->out + t * s->p->out_stride + row, &acc[0][t], 6, s->alpha);
}

/* ---------------------------------------------------------------- BF16 */

/* Rows [row, row + R) of the panel x N tokens; cols is a multiple of 32. */
static inline __attribute__((always_inline)) void bf16(int R, int N, const rows *s, uint32_t row)
{
    const char *a = (const char *)s->p->w->data + (s->p->row + row) * s->row_bytes;
    const char *ahead = row_ahead(s, row + AHEAD_ROWS);
    const size_t row_bytes = s->row_bytes;
    __m512 acc[8][6];
    clear(R, N, acc);
    for (uint32_t c = 0; c < s->pad; c += 32) {
        __m512bh b[6];
#pragma GCC unroll 6
        for (int t = 0; t < N; t++)
            b[t] = (__m512bh)_mm512_load_si512(s->x + (size_t)t * s->pad + c);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const size_t at = r * row_bytes + (size_t)c * 2;
            _mm_prefetch(ahead + at, _MM_HINT_T1);
            const __m512bh w = (__m512bh)_mm512_loadu_si512(a + at);
#pragma GCC unroll 6
            for (int t = 0; t < N; t++) acc[r][t] = _mm512_dpbf16_ps(acc[r][t], w, b[t]);
        }
    }
    put(R, N, s, row, acc);
}

/* ---------------------------------------------------------------- NVFP4 */

/* 32 columns from c, of row r of the block at codes and scales. */
static inline __attribute__((always_inline)) void nvfp4_step(int N, const rows *s,
                                                             const nbi_unpack_nvfp4 *u,
                                                             const uint8_t *codes, uint32_t s0,
                                                             uint32_t s1, uint32_t c, __m512 *acc)
{
    const __m512bh w = (__m512bh)(c + 32 <= s->cols ? nbi_unpack_nvfp4_32(u, codes, s0, s1)
                                                    : nbi_unpack_nvfp4_16(u, codes, s0));
#pragma GCC unroll 6
    for (int t = 0; t < N; t++)
        acc[t] =
            _mm512_dpbf16_ps(acc[t], w, (__m512bh)_mm512_load_si512(s->x + (size_t)t * s->pad + c));
}

/* Rows [row, row + R) of the panel x N tokens. */
static inline __attribute__((always_inline)) void nvfp4(int R, int N, const rows *s, uint32_t row)
{
    const nbi_unpack_nvfp4 u = nbi_unpack_nvfp4_init();
    const size_t first = s->p->row + row;
    const uint8_t *codes = (const uint8_t *)s->p->w->data + first * s->row_bytes;
    const uint8_t *scales = (const uint8_t *)s->p->w->scales + first * s->n_scales;
    const char *ahead = row_ahead(s, row + AHEAD_ROWS);
    __m512 acc[8][6];
    clear(R, N, acc);
    uint32_t c = 0;
    for (; c + 128 <= s->cols; c += 128) { /* a cache line of codes, eight scales */
        uint64_t eight[8];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            memcpy(&eight[r], scales + r * s->n_scales + c / NBI_NVFP4_BLOCK, sizeof eight[r]);
            _mm_prefetch(ahead + r * s->row_bytes + c / 2, _MM_HINT_T1);
        }
#pragma GCC unroll 4
        for (uint32_t k = 0; k < 4; k++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++, eight[r - 1] >>= 16)
                nvfp4_step(N, s, &u, codes + r * s->row_bytes + c / 2 + 16 * k, eight[r] & 0xff,
                           eight[r] >> 8 & 0xff, c + 32 * k, acc[r]);
    }
    for (; c < s->cols; c += 32)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const uint8_t *two = scales + r * s->n_scales + c / NBI_NVFP4_BLOCK;
            nvfp4_step(N, s, &u, codes + r * s->row_bytes + c / 2, two[0],
                       c + 32 <= s->cols ? two[1] : 0, c, acc[r]);
        }
    put(R, N, s, row, acc);
}

/* ---------------------------------------------------------------- by number of tokens */

typedef void block_fn(const rows *s, uint32_t row);

#define BLOCK(kind, R, N)                                     \
    static void kind##_##R##x##N(const rows *s, uint32_t row) \
    {                                                         \
        kind(R, N, s, row);                                   \
    }
#define EACH(BLOCKS, kind) \
    BLOCKS(kind, 1) BLOCKS(kind, 2) BLOCKS(kind, 3) BLOCKS(kind, 4) BLOCKS(kind, 5) BLOCKS(kind, 6)
#define ROW(kind, N)  BLOCK(kind, 1, N)
#define FOUR(kind, N) BLOCK(kind, 4, N)
EACH(ROW, bf16)
EACH(ROW, nvfp4)
EACH(FOUR, nvfp4)
BLOCK(bf16, 8, 1)
BLOCK(bf16, 4, 2)
BLOCK(bf16, 4, 3)
BLOCK(bf16, 4, 4)
BLOCK(bf16, 4, 5)
BLOCK(bf16, 4, 6)

/* [tokens - 1][a block of rows, one row] */
static block_fn *const bf16_blocks[NBI_LIN_FEW][2] = {{bf16_8x1, bf16_1x1}, {bf16_4x2, bf16_1x2},
                                                      {bf16_4x3, bf16_1x3}, {bf16_4x4, bf16_1x4},
                                                      {bf16_4x5, bf16_1x5}, {bf16_4x6, bf16_1x6}};
static block_fn *const nvfp4_blocks[NBI_LIN_FEW][2] = {
    {nvfp4_4x1, nvfp4_1x1}, {nvfp4_4x2, nvfp4_1x2}, {nvfp4_4x3, nvfp4_1x3},
    {nvfp4_4x4, nvfp4_1x4}, {nvfp4_4x5, nvfp4_1x5}, {nvfp4_4x6, nvfp4_1x6}};

bool nbi_lin_few_avx512(const nbi_lin_panel *p)
{
    const nbi_matrix *w = p->w;
    const bool fp4 = w->kind == NBI_WEIGHT_NVFP4;
    const bool plain = w->kind == NBI_WEIGHT_BF16 && w->cols % 32 == 0;
    if (p->n > NBI_LIN_FEW || (!fp4 && !plain)) return false;
    const uint32_t pad = nbi_lin_pad(w->cols);
    const rows s = {.p = p,
                    .x = (const uint16_t *)p->x->data + (size_t)p->t0 * pad,
                    .cols = w->cols,
                    .pad = pad,
                    .row_bytes = nbi_matrix_row_bytes(w),
                    .n_scales = w->cols / NBI_NVFP4_BLOCK,
                    .alpha = w->global_scale * p->x->scale};
    block_fn *const *block = fp4 ? nvfp4_blocks[p->n - 1] : bf16_blocks[p->n - 1];
    const uint32_t step = plain && p->n == 1 ? ROWS_ONE : ROWS;
    for (uint32_t r = 0; r < p->n_rows;) {
        const bool whole = p->n_rows - r >= step;
        block[whole ? 0 : 1](&s, r);
        r += whole ? step : 1;
    }
    return true;
}
