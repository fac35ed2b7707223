/* Kernel table of AVX2 with FMA: 8 lanes, tiles of 2 x 4. The body is cpu_kernels_simd.inc. */
#include <immintrin.h>

#include "backend/cpu/cpu_kernels.h"

#define VW 8u
#define DX 2u

typedef __m256 vf;
typedef __m256i vh; /* 16 BF16 values */

#define v_zero()       _mm256_setzero_ps()
#define v_set1(x)      _mm256_set1_ps(x)
#define v_load(p)      _mm256_loadu_ps(p)
#define v_store(p, v)  _mm256_storeu_ps(p, v)
#define v_add(a, b)    _mm256_add_ps(a, b)
#define v_sub(a, b)    _mm256_sub_ps(a, b)
#define v_mul(a, b)    _mm256_mul_ps(a, b)
#define v_div(a, b)    _mm256_div_ps(a, b)
#define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define v_max(a, b)    _mm256_max_ps(a, b)
#define v_min(a, b)    _mm256_min_ps(a, b)
#define v_round(a)     _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

/* First n lanes set, 0 <= n <= 8. */
static inline __m256i lanes(uint32_t n)
{
    static const int32_t bits[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
    return _mm256_loadu_si256((const __m256i *)(const void *)(bits + 8 - n));
}

static inline vf v_load_n(const float *p, uint32_t n)
{
    return _mm256_maskload_ps(p, lanes(n));
}

static inline void v_store_n(float *p, vf v, uint32_t n)
{
    _mm256_maskstore_ps(p, lanes(n), v);
}

static inline vf v_keep_n(vf v, uint32_t n)
{
    return _mm256_and_ps(v, _mm256_castsi256_ps(lanes(n)));
}

static inline float v_hsum(vf v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

static inline float v_hmax(vf v)
{
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

/* p * 2^n for integral n in [-150, 129], in two factors: neither leaves the range of exponents. */
static inline vf v_scale2(vf p, vf n)
{
    const __m256i k = _mm256_cvtps_epi32(n), a = _mm256_srai_epi32(k, 1);
    const __m256i b = _mm256_sub_epi32(k, a), bias = _mm256_set1_epi32(127);
    const vf fa = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(a, bias), 23));
    const vf fb = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(b, bias), 23));
    return v_mul(v_mul(p, fa), fb);
}

static inline vh v_load_h(const uint16_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

/* n may be 0 or more than 16. */
static inline vh v_load_h_n(const uint16_t *p, uint32_t n)
{
    if (n >= 16) return v_load_h(p);
    uint16_t h[16] = {0};
    memcpy(h, p, n * sizeof *h);
    return v_load_h(h);
}

/* 8 codes of E4M3 times 2^-8. */
static inline vf v_codes(const uint8_t *p)
{
    const __m128i c = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)p));
    const __m128i low = _mm_slli_epi16(_mm_and_si128(c, _mm_set1_epi16(0x7f)), 7);
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(c, _mm_set1_epi16(0x80)), 8);
    return _mm256_cvtph_ps(_mm_or_si128(low, sign));
}

/* The upper halves: values that are exact in BF16. */
static inline void v_store_high(uint16_t *p, vf v)
{
    const __m256i h = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(h, h), 0x08);
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_castsi256_si128(both));
}

static inline vf v_even(vh h)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(h, 16));
}

static inline vf v_odd(vh h)
{
    return _mm256_castsi256_ps(_mm256_and_si256(h, _mm256_set1_epi32((int)0xffff0000u)));
}

/* Natural order (a, b) to (even, odd) and back. */
static inline void v_split(vf *a, vf *b)
{
    const vf lo = _mm256_permute2f128_ps(*a, *b, 0x20), hi = _mm256_permute2f128_ps(*a, *b, 0x31);
    /* lo = a0..3 b0..3, hi = a4..7 b4..7 */
    const vf even = _mm256_shuffle_ps(lo, hi, 0x88), odd = _mm256_shuffle_ps(lo, hi, 0xdd);
    *a = even;
    *b = odd;
}

static inline void v_join(vf *a, vf *b)
{
    const vf lo = _mm256_unpacklo_ps(*a, *b), hi = _mm256_unpackhi_ps(*a, *b);
    *a = _mm256_permute2f128_ps(lo, hi, 0x20);
    *b = _mm256_permute2f128_ps(lo, hi, 0x31);
}

/* Lane sums of 8 accumulators [matrix row][x row], times scale, by one tree for all. */
static inline void reduce_tile(float sums[2][4], vf acc[4][2], float scale)
{
    vf q[4]; /* halves added: half i belongs to x row i */
    for (int j = 0; j < 4; j++)
        q[j] = v_add(_mm256_permute2f128_ps(acc[j][0], acc[j][1], 0x20),
                     _mm256_permute2f128_ps(acc[j][0], acc[j][1], 0x31));
    const vf u = v_add(_mm256_unpacklo_ps(q[0], q[1]), _mm256_unpackhi_ps(q[0], q[1]));
    const vf v = v_add(_mm256_unpacklo_ps(q[2], q[3]), _mm256_unpackhi_ps(q[2], q[3]));
    const vf s = v_add(_mm256_shuffle_ps(u, v, 0x44), _mm256_shuffle_ps(u, v, 0xee));
    v_store(&sums[0][0], v_mul(s, v_set1(scale)));
}

#include "backend/cpu/cpu_kernels_simd.inc"

const nbi_cpu_kernels nbi_cpu_kernels_avx2 = KERNEL_TABLE;
