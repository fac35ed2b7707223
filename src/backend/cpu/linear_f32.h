/* Float32 products, one body for 8 lanes (linear_avx2.c) and 16 lanes (linear_avx512_f32.c): the
 * level AVX2 for all kinds, and exact activations at the levels above.
 *
 * Per element: one vector accumulator of FMA in ascending columns, then a fixed tree over the
 * lanes. The including file defines LANES, V and the v_* macros. */
#if defined(LANES)

#include <immintrin.h>
#include <string.h>

#include "backend/cpu/linear.h"

#define ROWS_UNPACKED 16u

/* ---- one row of weights to float32, block scales multiplied in, global scale left out */

static inline void unpack_nvfp4(float *dst, const nbi_matrix *w, uint32_t row)
{
    /* Twice the values of e2m1, as int8. */
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i nibble = _mm_set1_epi8(15);
    const uint8_t *codes = (const uint8_t *)w->data + (size_t)row * (w->cols / 2);
    const uint8_t *scales = (const uint8_t *)w->scales + (size_t)row * (w->cols / 16);
    for (uint32_t b = 0; b < w->cols / 16; b++) {
        const __m128i v = _mm_loadl_epi64((const void *)(codes + 8 * (size_t)b));
        const __m128i lo = _mm_and_si128(v, nibble),
                      hi = _mm_and_si128(_mm_srli_epi16(v, 4), nibble);
        const __m128i q = _mm_shuffle_epi8(table, _mm_unpacklo_epi8(lo, hi));
        const __m256 s = _mm256_set1_ps(0.5f * nbi_e4m3_f32(scales[b]));
        const __m256i q0 = _mm256_cvtepi8_epi32(q), q1 = _mm256_cvtepi8_epi32(_mm_srli_si128(q, 8));
        _mm256_store_ps(dst + 16 * (size_t)b, _mm256_mul_ps(_mm256_cvtepi32_ps(q0), s));
        _mm256_store_ps(dst + 16 * (size_t)b + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(q1), s));
    }
}

static inline void unpack_fp8(float *dst, const nbi_matrix *w, uint32_t row)
{
    const uint8_t *bytes = (const uint8_t *)w->data + (size_t)row * w->cols;
    const uint32_t n_scales = (w->cols + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK;
    const char *scales = w->kind == NBI_WEIGHT_FP8_BLOCK ? w->scales : NULL;
    if (scales) scales += sizeof(float) * (row / NBI_FP8_BLOCK) * n_scales;
    for (uint32_t c0 = 0; c0 < w->cols; c0 += NBI_FP8_BLOCK) {
        const uint32_t c1 = w->cols - c0 < NBI_FP8_BLOCK ? w->cols : c0 + NBI_FP8_BLOCK;
        float scale = 1;
        if (scales) memcpy(&scale, scales + c0 / NBI_FP8_BLOCK * sizeof scale, sizeof scale);
        const __m256 s = _mm256_set1_ps(scale);
        uint32_t c = c0;
        for (; c + 8 <= c1; c += 8) {
            const __m256i i = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(bytes + c)));
            _mm256_storeu_ps(dst + c, _mm256_mul_ps(_mm256_i32gather_ps(nbi_e4m3_table, i, 4), s));
        }
        for (; c < c1; c++) dst[c] = nbi_e4m3_f32(bytes[c]) * scale;
    }
}

static inline void unpack_16(float *dst, const nbi_matrix *w, uint32_t row)
{
    const uint16_t *src = (const uint16_t *)w->data + (size_t)row * w->cols;
    uint32_t c = 0;
    for (; c + 8 <= w->cols; c += 8) {
        const __m128i v = _mm_loadu_si128((const void *)(src + c));
        const __m256 f = w->kind == NBI_WEIGHT_F16
                             ? _mm256_cvtph_ps(v)
                             : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
        _mm256_store_ps(dst + c, f);
    }
    for (; c < w->cols; c++) {
        uint16_t h;
        memcpy(&h, (const char *)src + 2 * (size_t)c, sizeof h);
        dst[c] = w->kind == NBI_WEIGHT_F16 ? nbi_f16_f32(h) : nbi_bf16_f32(h);
    }
}

static inline void unpack_row(float *dst, const nbi_matrix *w, uint32_t row)
{
    const uint32_t cols = w->cols;
    switch (w->kind) {
    case NBI_WEIGHT_NVFP4: unpack_nvfp4(dst, w, row); break;
    case NBI_WEIGHT_FP8_BLOCK:
    case NBI_WEIGHT_FP8_TENSOR: unpack_fp8(dst, w, row); break;
    case NBI_WEIGHT_F32:
        memcpy(dst, (const char *)w->data + (size_t)row * cols * sizeof(float),
               cols * sizeof(float));
        break;
    default: unpack_16(dst, w, row); break;
    }
    memset(dst + cols, 0, (nbi_lin_pad(cols) - cols) * sizeof *dst);
}

/* ---- R rows x N tokens */

static inline __attribute__((always_inline)) void block(int R, int N, const float *a,
                                                        const float *x, uint32_t pad, float alpha,
                                                        float *out, size_t out_stride)
{
    V acc[8][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < N; t++) acc[r][t] = v_zero();
    for (uint32_t c = 0; c < pad; c += LANES) {
        V b[4];
#pragma GCC unroll 4
        for (int t = 0; t < N; t++) b[t] = v_load(x + (size_t)t * pad + c);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const V w = v_load(a + (size_t)r * pad + c);
#pragma GCC unroll 4
            for (int t = 0; t < N; t++) acc[r][t] = v_fma(w, b[t], acc[r][t]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < N; t++) out[t * out_stride + r] = alpha * v_sum(acc[r][t]);
}

static inline void panel(const nbi_lin_panel *p)
{
    const nbi_matrix *w = p->w;
    const uint32_t pad = nbi_lin_pad(w->cols);
    const float *x = (const float *)p->x->data + (size_t)p->t0 * pad;
    const float alpha = w->global_scale * p->x->scale;
    float *a = p->scratch;
    for (uint32_t r0 = 0; r0 < p->n_rows; r0 += ROWS_UNPACKED) {
        const uint32_t n = p->n_rows - r0 < ROWS_UNPACKED ? p->n_rows - r0 : ROWS_UNPACKED;
        for (uint32_t r = 0; r < n; r++) unpack_row(a + (size_t)r * pad, w, p->row + r0 + r);
        for (uint32_t t = 0; t < p->n;) {
            const bool wide = p->n - t >= TOKENS;
            float *out = p->out + t * p->out_stride + r0;
            const float *xt = x + (size_t)t * pad;
            for (uint32_t r = 0; r < n;) {
                const float *ar = a + (size_t)r * pad;
                if (wide && n - r >= 4) {
                    block(4, TOKENS, ar, xt, pad, alpha, out + r, p->out_stride);
                    r += 4;
                } else if (wide) {
                    block(1, TOKENS, ar, xt, pad, alpha, out + r, p->out_stride);
                    r++;
                } else if (n - r >= 8) {
                    block(8, 1, ar, xt, pad, alpha, out + r, p->out_stride);
                    r += 8;
                } else {
                    block(1, 1, ar, xt, pad, alpha, out + r, p->out_stride);
                    r++;
                }
            }
            t += wide ? TOKENS : 1;
        }
    }
}

#endif
