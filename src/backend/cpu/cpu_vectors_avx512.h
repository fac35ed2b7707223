/* The vector layer of cpu_kernels_simd.inc for AVX-512 (F, BW, VL, DQ): 16 lanes, tiles of 4 x 4.
 * Included by cpu_kernels_avx512.c and cpu_kernels_amx.c only. */
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define VW 16u
#define DX 4u

typedef __m512 vf;
typedef __m512i vh; /* 32 BF16 values */

#define v_zero()       _mm512_setzero_ps()
#define v_set1(x)      _mm512_set1_ps(x)
#define v_load(p)      _mm512_loadu_ps(p)
#define v_store(p, v)  _mm512_storeu_ps(p, v)
#define v_add(a, b)    _mm512_add_ps(a, b)
#define v_sub(a, b)    _mm512_sub_ps(a, b)
#define v_mul(a, b)    _mm512_mul_ps(a, b)
#define v_div(a, b)    _mm512_div_ps(a, b)
#define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define v_max(a, b)    _mm512_max_ps(a, b)
#define v_min(a, b)    _mm512_min_ps(a, b)
#define v_round(a)     _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define v_hsum(a)      _mm512_reduce_add_ps(a)
#define v_hmax(a)      _mm512_reduce_max_ps(a)
#define v_scale2(p, n) _mm512_scalef_ps(p, n)

/* First n lanes, 0 <= n <= 16. */
static inline __mmask16 lanes(uint32_t n)
{
    return (__mmask16)((1u << n) - 1);
}

static inline vf v_load_n(const float *p, uint32_t n)
{
    return _mm512_maskz_loadu_ps(lanes(n), p);
}

static inline void v_store_n(float *p, vf v, uint32_t n)
{
    _mm512_mask_storeu_ps(p, lanes(n), v);
}

static inline vf v_keep_n(vf v, uint32_t n)
{
    return _mm512_maskz_mov_ps(lanes(n), v);
}

static inline vh v_load_h(const uint16_t *p)
{
    return _mm512_loadu_si512(p);
}

/* n may be 0 or more than 32. */
static inline vh v_load_h_n(const uint16_t *p, uint32_t n)
{
    const __mmask32 m = n >= 32 ? 0xffffffffu : (1u << n) - 1;
    return _mm512_maskz_loadu_epi16(m, p);
}

/* 16 codes of E4M3 times 2^-8. */
static inline vf v_codes(const uint8_t *p)
{
    const __m256i c = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p));
    const __m256i low = _mm256_slli_epi16(_mm256_and_si256(c, _mm256_set1_epi16(0x7f)), 7);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(c, _mm256_set1_epi16(0x80)), 8);
    return _mm512_cvtph_ps(_mm256_or_si256(low, sign));
}

/* The upper halves: values that are exact in BF16. */
static inline void v_store_high(uint16_t *p, vf v)
{
    const __m512i h = _mm512_srli_epi32(_mm512_castps_si512(v), 16);
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(h));
}

static inline vf v_even(vh h)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(h, 16));
}

static inline vf v_odd(vh h)
{
    return _mm512_castsi512_ps(_mm512_and_si512(h, _mm512_set1_epi32((int)0xffff0000u)));
}

/* Natural order (a, b) to (even, odd) and back. */
static inline void v_split(vf *a, vf *b)
{
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const vf x = *a, y = *b;
    *a = _mm512_permutex2var_ps(x, even, y);
    *b = _mm512_permutex2var_ps(x, odd, y);
}

static inline void v_join(vf *a, vf *b)
{
    const __m512i lo = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i hi = _mm512_add_epi32(lo, _mm512_set1_epi32(8));
    const vf x = *a, y = *b;
    *a = _mm512_permutex2var_ps(x, lo, y);
    *b = _mm512_permutex2var_ps(x, hi, y);
}

/* Adds the 128-bit quarters of four vectors: quarter i of the result belongs to vector i. */
static inline vf add_quarters(vf a, vf b, vf c, vf d)
{
    const vf ab = v_add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const vf cd = v_add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    return v_add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

/* Lane sums of 16 accumulators [matrix row][x row], times scale, by one tree for all. */
static inline void reduce_tile(float sums[4][4], vf acc[4][4], float scale)
{
    vf q[4];
    for (int j = 0; j < 4; j++) q[j] = add_quarters(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
    const vf u = v_add(_mm512_unpacklo_ps(q[0], q[1]), _mm512_unpackhi_ps(q[0], q[1]));
    const vf v = v_add(_mm512_unpacklo_ps(q[2], q[3]), _mm512_unpackhi_ps(q[2], q[3]));
    const vf s = v_add(_mm512_shuffle_ps(u, v, 0x44), _mm512_shuffle_ps(u, v, 0xee));
    v_store(&sums[0][0], v_mul(s, v_set1(scale)));
}
