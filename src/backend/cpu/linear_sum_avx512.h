/* Lane sums of accumulators, four at a time: half the instructions of one by one, the same tree
 * (lanes 8, 4, 2 and 1 apart), so the same bits. Included by linear_avx512.c and
 * linear_few_avx512.c. */
#pragma once

#include <immintrin.h>

/* Lane sums of a, b, c, d, in that order. */
static inline __m128 nbi_lin_sum4(__m512 a, __m512 b, __m512 c, __m512 d)
{
    const __m512 ab =
        _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd =
        _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    /* Quarter i: what is left of vector i. */
    __m512 s =
        _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(first, s));
}

/* out[r] = alpha * sum of lanes of acc[r * stride], r < R; R is 8, 4 or 1. */
static inline __attribute__((always_inline)) void nbi_lin_put_rows(int R, float *out,
                                                                   const __m512 *acc, int stride,
                                                                   float alpha)
{
    if (R == 1) {
        out[0] = alpha * _mm512_reduce_add_ps(acc[0]);
        return;
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; r += 4) {
        const __m512 *v = acc + r * stride;
        const __m128 sum = nbi_lin_sum4(v[0], v[stride], v[2 * stride], v[3 * stride]);
        _mm_storeu_ps(out + r, _mm_mul_ps(_mm_set1_ps(alpha), sum));
    }
}
