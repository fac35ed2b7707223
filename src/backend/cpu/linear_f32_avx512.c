/* Float32 products with AVX-512: exact activations (router) and F32 or F16 weights. Callers:
 * linear.c. */
#define LANES          16
#define TOKENS         4
#define V              __m512
#define v_zero()       _mm512_setzero_ps()
#define v_load(p)      _mm512_loadu_ps(p)
#define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define v_sum(v)       _mm512_reduce_add_ps(v)

#include "backend/cpu/linear_f32.h"

void nbi_lin_panel_avx512_f32(const nbi_lin_panel *p)
{
    panel(p);
}
