/* Products of a few tokens with vdpbf16ps: the memory sets the time, so weights go from where the
 * file has them into the product without a stop, and rows further on are asked for early. Callers:
 * linear_avx512.c.
 *
 * Additions are those of block() in linear_avx512.c: one accumulator of 16 lanes per element, 32
 * columns a step in ascending order, then the tree of _mm512_reduce_add_ps.
 *
 * How far ahead and in which order lines are asked for was measured on Zen 4 and Zen 5 cores:
 * docs/performance.md. */
#include "backend/cpu/linear.h"

#include "backend/cpu/linear_sum_avx512.h"
#include "backend/cpu/linear_unpack.h"

#define ROWS        4u /* rows of a block */
#define ROWS_ONE    8u /* rows of a BF16 block of one token */
#define AHEAD_ROWS  8u
#define AHEAD_ONE   4096u /* bytes, BF16 rows of one token */
#define AHEAD_CODES 8192u /* bytes, NVFP4 rows */

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

/* How many blocks of `bytes` make at least `ahead`. */
static inline uint32_t blocks_of(uint32_t ahead, size_t bytes)
{
    return (uint32_t)((ahead + bytes - 1) / bytes);
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

/* ROWS_ONE rows of the panel, one token: one row after the other, as plain reading does. One chain
 * of products keeps up with the memory, and one stream of lines is what its prefetcher follows. */
static void bf16_8x1(const rows *s, uint32_t row)
{
    const size_t row_bytes = s->row_bytes;
    const char *a = (const char *)s->p->w->data + (s->p->row + row) * row_bytes;
    const uint32_t far = blocks_of(AHEAD_ONE, row_bytes);
    __m512 acc[8][6];
    clear(8, 1, acc);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < 8; r++) {
        const char *w = a + r * row_bytes, *ahead = row_ahead(s, row + r + far);
#pragma GCC unroll 4
        for (uint32_t c = 0; c < s->pad; c += 32) {
            _mm_prefetch(ahead + (size_t)c * 2, _MM_HINT_T0);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], (__m512bh)_mm512_loadu_si512(w + (size_t)c * 2),
                                         (__m512bh)_mm512_load_si512(s->x + c));
        }
    }
    put(8, 1, s, row, acc);
}

/* ---------------------------------------------------------------- NVFP4 */

/* 32 weights of a row times the tokens at x, `pad` values apart. */
static inline __attribute__((always_inline)) void multiply(int N, const uint16_t *x, size_t pad,
                                                           __m512i w, __m512 *acc)
{
#pragma GCC unroll 6
    for (int t = 0; t < N; t++)
        acc[t] = _mm512_dpbf16_ps(acc[t], (__m512bh)w, (__m512bh)_mm512_load_si512(x + t * pad));
}

/* Rows [row, row + R) of the panel x N tokens, 128 columns a step: a cache line of codes and eight
 * scales per row. Pointers move along: with indices instead the compiler runs out of registers. */
static inline __attribute__((always_inline)) void nvfp4(int R, int N, const rows *s, uint32_t row)
{
    const nbi_unpack_nvfp4 u = nbi_unpack_nvfp4_init();
    const size_t first = s->p->row + row, row_bytes = s->row_bytes, n_scales = s->n_scales;
    const uint8_t *codes = (const uint8_t *)s->p->w->data + first * row_bytes;
    const uint8_t *scales = (const uint8_t *)s->p->w->scales + first * n_scales;
    const char *ahead = row_ahead(s, row + ROWS * blocks_of(AHEAD_CODES, ROWS * row_bytes));
    __m512 acc[8][6];
    clear(R, N, acc);
    const uint16_t *x = s->x;
    const size_t pad = s->pad;
    uint32_t c = 0;
    for (; c + 128 <= s->cols; c += 128, codes += 64, scales += 8, ahead += R * 64, x += 128) {
        uint64_t eight[8];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            memcpy(&eight[r], scales + r * n_scales, sizeof eight[r]);
            _mm_prefetch(ahead + r * 64, _MM_HINT_T0);
        }
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const uint8_t *at = codes + r * row_bytes + 16 * k;
                const uint32_t s0 = eight[r] >> 16 * k & 0xff, s1 = eight[r] >> (16 * k + 8) & 0xff;
                multiply(N, x + 32 * k, pad, nbi_unpack_nvfp4_32(&u, at, s0, s1), acc[r]);
            }
    }
    for (; c < s->cols; c += 32, codes += 16, scales += 2, x += 32)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const uint8_t *two = scales + r * n_scales, *at = codes + r * row_bytes;
            const __m512i w = c + 32 <= s->cols ? nbi_unpack_nvfp4_32(&u, at, two[0], two[1])
                                                : nbi_unpack_nvfp4_16(&u, at, two[0]);
            multiply(N, x, pad, w, acc[r]);
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
