/* Products with vdpbf16ps (AVX-512 BF16), and the packing of activations that the AMX level shares.
 * Callers: linear.c, linear_pack.c.
 *
 * Per element: one accumulator of 16 lanes, 32 columns a step in ascending order, then a fixed tree
 * over the lanes. FP8_BLOCK starts a fresh accumulator every 128 columns and adds it, scaled, to a
 * second one. Blocking over rows and tokens changes only how often an operand is loaded. */
#include "backend/cpu/linear.h"

#include "backend/cpu/linear_sum_avx512.h"
#include "backend/cpu/linear_unpack.h"

#define ROWS_UNPACKED 32u /* rows unpacked together: half a megabyte at 8192 columns, in L2 */

/* ---------------------------------------------------------------- activations */

void nbi_lin_round_avx512(uint16_t *dst, const float *src, uint32_t cols, bool nvfp4_order)
{
    uint16_t order[32];
    for (uint32_t p = 0; p < 32; p++)
        order[p] = (uint16_t)(nvfp4_order ? nbi_lin_nvfp4_order(p) : p);
    const __m512i index = _mm512_loadu_si512(order);
    for (uint32_t c = 0; c < cols; c += 32) {
        const uint32_t left = cols - c;
        const __mmask16 m0 = left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1);
        const __mmask16 m1 = left >= 32   ? 0xffff
                             : left <= 16 ? 0
                                          : (__mmask16)((1u << (left - 16)) - 1);
        const __m512 lo = _mm512_maskz_loadu_ps(m0, src + c);
        const __m512 hi = _mm512_maskz_loadu_ps(m1, src + c + 16);
        const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(hi, lo);
        _mm512_storeu_si512(dst + c, _mm512_permutexvar_epi16(index, pair));
    }
}

void nbi_lin_pairs_avx512(uint16_t *dst, const uint16_t *rows, uint32_t n, uint32_t cols)
{
    const uint32_t pad = nbi_lin_pad(cols);
    if (n < 16) {
        for (uint32_t c = 0; c < pad; c += 2)
            for (uint32_t t = 0; t < n; t++)
                memcpy(dst + (size_t)c * n + 2 * t, rows + (size_t)t * pad + c, 4);
        return;
    }
    for (uint32_t c = 0; c < pad; c += 32) {
        __m512i r[16], s[16];
        for (int t = 0; t < 16; t++) r[t] = _mm512_loadu_si512(rows + (size_t)t * pad + c);
        /* 16 x 16 transposition of 32-bit pairs: by 1, 2, then quarters. */
        for (int t = 0; t < 16; t += 2) {
            s[t] = _mm512_unpacklo_epi32(r[t], r[t + 1]);
            s[t + 1] = _mm512_unpackhi_epi32(r[t], r[t + 1]);
        }
        for (int t = 0; t < 16; t += 4) {
            r[t] = _mm512_unpacklo_epi64(s[t], s[t + 2]);
            r[t + 1] = _mm512_unpackhi_epi64(s[t], s[t + 2]);
            r[t + 2] = _mm512_unpacklo_epi64(s[t + 1], s[t + 3]);
            r[t + 3] = _mm512_unpackhi_epi64(s[t + 1], s[t + 3]);
        }
        for (int i = 0; i < 4; i++) {
            const __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
            const __m512i b = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
            const __m512i d = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
            const __m512i e = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
            uint16_t *out = dst + (size_t)c * 16 + i * 32;
            _mm512_storeu_si512(out, _mm512_shuffle_i32x4(a, b, 0x88));
            _mm512_storeu_si512(out + 8 * 32, _mm512_shuffle_i32x4(a, b, 0xdd));
            _mm512_storeu_si512(out + 4 * 32, _mm512_shuffle_i32x4(d, e, 0x88));
            _mm512_storeu_si512(out + 12 * 32, _mm512_shuffle_i32x4(d, e, 0xdd));
        }
    }
}

/* ---------------------------------------------------------------- weights */

static void unpack_nvfp4(uint16_t *dst, const nbi_matrix *w, uint32_t row)
{
    const nbi_unpack_nvfp4 u = nbi_unpack_nvfp4_init();
    const uint32_t cols = w->cols;
    const uint8_t *codes = (const uint8_t *)w->data + (size_t)row * (cols / 2);
    const uint8_t *scales = (const uint8_t *)w->scales + (size_t)row * (cols / 16);
    uint32_t c = 0;
    for (; c + 32 <= cols; c += 32)
        _mm512_store_si512(
            dst + c, nbi_unpack_nvfp4_32(&u, codes + c / 2, scales[c / 16], scales[c / 16 + 1]));
    if (c < cols)
        _mm512_store_si512(dst + c, nbi_unpack_nvfp4_16(&u, codes + c / 2, scales[c / 16]));
}

static void unpack_fp8(uint16_t *dst, const nbi_matrix *w, uint32_t row)
{
    const nbi_unpack_fp8 u = nbi_unpack_fp8_init();
    const uint8_t *bytes = (const uint8_t *)w->data + (size_t)row * w->cols;
    const uint32_t pad = nbi_lin_pad(w->cols);
    for (uint32_t c = 0; c < w->cols; c += 64) {
        __m512i out[2];
        nbi_unpack_fp8_64(&u, nbi_load_tail64(bytes + c, w->cols - c), out);
        _mm512_store_si512(dst + c, out[0]);
        if (c + 32 < pad) _mm512_store_si512(dst + c + 32, out[1]);
    }
}

static void copy_bf16(uint16_t *dst, const nbi_matrix *w, uint32_t row)
{
    const uint32_t cols = w->cols;
    memcpy(dst, (const char *)w->data + (size_t)row * cols * 2, (size_t)cols * 2);
    memset(dst + cols, 0, (nbi_lin_pad(cols) - cols) * sizeof *dst);
}

static void unpack_row(uint16_t *dst, const nbi_matrix *w, uint32_t row)
{
    switch (w->kind) {
    case NBI_WEIGHT_NVFP4: unpack_nvfp4(dst, w, row); break;
    case NBI_WEIGHT_FP8_BLOCK:
    case NBI_WEIGHT_FP8_TENSOR: unpack_fp8(dst, w, row); break;
    default: copy_bf16(dst, w, row); break;
    }
}

/* ---------------------------------------------------------------- products */

static inline __m512bh load_bf16(const uint16_t *p)
{
    return (__m512bh)_mm512_loadu_si512(p);
}

/* R rows x N tokens. `scales`: per row, the FP8 scale of each 128 columns; NULL for other kinds. */
static inline __attribute__((always_inline)) void block(int R, int N, const uint16_t *a,
                                                        const uint16_t *x, uint32_t pad,
                                                        const void *const *scales, float alpha,
                                                        float *out, size_t out_stride)
{
    __m512 acc[8][6], total[8][6];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 6
        for (int t = 0; t < N; t++) acc[r][t] = total[r][t] = _mm512_setzero_ps();
    const uint32_t span = scales ? NBI_FP8_BLOCK : pad;
    for (uint32_t c0 = 0; c0 < pad; c0 += span) {
        const uint32_t c1 = pad - c0 < span ? pad : c0 + span;
        for (uint32_t c = c0; c < c1; c += 32) {
            __m512bh b[6];
#pragma GCC unroll 6
            for (int t = 0; t < N; t++) b[t] = load_bf16(x + (size_t)t * pad + c);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m512bh w = load_bf16(a + (size_t)r * pad + c);
#pragma GCC unroll 6
                for (int t = 0; t < N; t++) acc[r][t] = _mm512_dpbf16_ps(acc[r][t], w, b[t]);
            }
        }
        if (!scales) break;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            float scale; /* mapped: may be unaligned */
            memcpy(&scale, (const char *)scales[r] + c0 / NBI_FP8_BLOCK * sizeof scale,
                   sizeof scale);
            const __m512 s = _mm512_set1_ps(scale);
#pragma GCC unroll 6
            for (int t = 0; t < N; t++) {
                total[r][t] = _mm512_fmadd_ps(acc[r][t], s, total[r][t]);
                acc[r][t] = _mm512_setzero_ps();
            }
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < N; t++)
        nbi_lin_put_rows(R, out + t * out_stride, scales ? &total[0][t] : &acc[0][t], 6, alpha);
}

typedef void block_fn(const uint16_t *a, const uint16_t *x, uint32_t pad, const void *const *scales,
                      float alpha, float *out, size_t out_stride);

#define PLAIN(R, N)                                                                            \
    static void block_##R##x##N(const uint16_t *a, const uint16_t *x, uint32_t pad,            \
                                const void *const *scales, float alpha, float *out, size_t os) \
    {                                                                                          \
        block(R, N, a, x, pad, NULL, alpha, out, os);                                          \
        (void)scales;                                                                          \
    }
#define FP8(R, N)                                                                            \
    static void fp8_##R##x##N(const uint16_t *a, const uint16_t *x, uint32_t pad,            \
                              const void *const *scales, float alpha, float *out, size_t os) \
    {                                                                                        \
        block(R, N, a, x, pad, scales, alpha, out, os);                                      \
    }
PLAIN(8, 1)
PLAIN(1, 1)
PLAIN(4, 2)
PLAIN(1, 2)
PLAIN(4, 3)
PLAIN(1, 3)
PLAIN(4, 4)
PLAIN(1, 4)
PLAIN(4, 5)
PLAIN(1, 5)
PLAIN(4, 6)
PLAIN(1, 6)
FP8(8, 1)
FP8(1, 1)
FP8(4, 2)
FP8(1, 2)
FP8(4, 3)
FP8(1, 3)
#undef PLAIN
#undef FP8

/* FP8 blocks keep two accumulators per element: at most 4 x 3. */
typedef struct shape {
    uint32_t rows, tokens;
    block_fn *many, *one; /* `rows` rows, a single row */
} shape;

static const shape plain_shapes[] = {{4, 6, block_4x6, block_1x6}, {4, 5, block_4x5, block_1x5},
                                     {4, 4, block_4x4, block_1x4}, {4, 3, block_4x3, block_1x3},
                                     {4, 2, block_4x2, block_1x2}, {8, 1, block_8x1, block_1x1}};
static const shape fp8_shapes[] = {
    {4, 3, fp8_4x3, fp8_1x3}, {4, 2, fp8_4x2, fp8_1x2}, {8, 1, fp8_8x1, fp8_1x1}};

/* Asks for the codes, or whatever the file has, of row r of the panel. */
static void fetch_row(const nbi_lin_panel *p, uint32_t r)
{
    if (r >= p->n_rows) return;
    const size_t bytes = nbi_matrix_row_bytes(p->w);
    const char *row = (const char *)p->w->data + (p->row + r) * bytes;
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(row + i, _MM_HINT_T1);
}

/* Rows r0 .. of the panel, unpacked at `a`, times all tokens. */
static void multiply(const nbi_lin_panel *p, const uint16_t *a, uint32_t r0, uint32_t n_rows,
                     const void *const *scales)
{
    const uint32_t pad = nbi_lin_pad(p->w->cols);
    const uint16_t *x = (const uint16_t *)p->x->data + (size_t)p->t0 * pad;
    const float alpha = p->w->global_scale * p->x->scale;
    const shape *s = scales ? fp8_shapes : plain_shapes;
    for (uint32_t t = 0; t < p->n; t += s->tokens) {
        while (s->tokens > p->n - t) s++;
        for (uint32_t r = 0; r < n_rows;) {
            const bool many = n_rows - r >= s->rows;
            (many ? s->many : s->one)(a + (size_t)r * pad, x + (size_t)t * pad, pad,
                                      scales ? scales + r : NULL, alpha,
                                      p->out + t * p->out_stride + r0 + r, p->out_stride);
            r += many ? s->rows : 1;
        }
    }
}

void nbi_lin_panel_avx512(const nbi_lin_panel *p)
{
    if (nbi_lin_few_avx512(p)) return;
    const nbi_matrix *w = p->w;
    const uint32_t pad = nbi_lin_pad(w->cols);
    const bool fp8 = w->kind == NBI_WEIGHT_FP8_BLOCK;
    const uint32_t n_scales = (w->cols + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK;
    uint16_t *a = p->scratch;
    for (uint32_t r0 = 0; r0 < p->n_rows; r0 += ROWS_UNPACKED) {
        const uint32_t n = p->n_rows - r0 < ROWS_UNPACKED ? p->n_rows - r0 : ROWS_UNPACKED;
        const void *scales[ROWS_UNPACKED] = {0};
        for (uint32_t r = 0; r < n; r++) {
            const uint32_t row = p->row + r0 + r;
            fetch_row(p, r0 + r + 4);
            unpack_row(a + (size_t)r * pad, w, row);
            if (fp8)
                scales[r] =
                    (const char *)w->scales + sizeof(float) * (row / NBI_FP8_BLOCK) * n_scales;
        }
        multiply(p, a, r0, n, fp8 ? scales : NULL);
    }
}
