/* Float32 products with AVX2 and FMA. Callers: linear.c. */
#define LANES          8
#define TOKENS         2
#define V              __m256
#define v_zero()       _mm256_setzero_ps()
#define v_load(p)      _mm256_loadu_ps(p)
#define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define v_sum(v)       sum8(v)

#include <immintrin.h>

static inline float sum8(__m256 v)
{
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}

#include "backend/cpu/linear_f32.h"

void nbi_lin_panel_avx2(const nbi_lin_panel *p)
{
    panel(p);
}
