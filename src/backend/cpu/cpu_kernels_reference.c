/* Reference kernels: plain C, float32 data, double accumulators. Always built, always right; the
 * oracle of the SIMD tables in tests/kernel.
 * Invariant: each output element is one loop of its own, in ascending order. */
#include "backend/cpu/cpu_kernels.h"

static inline double load(const void *row, nbi_dtype dtype, uint32_t i)
{
    if (dtype == NBI_BF16) {
        uint16_t h;
        memcpy(&h, (const char *)row + (size_t)i * 2, 2);
        return (double)nbi_bf16_f32(h);
    }
    float f;
    memcpy(&f, (const char *)row + (size_t)i * 4, 4);
    return (double)f;
}

static void dots(float *out, size_t ldo, const float *x, size_t ldx, uint32_t n_x,
                 const void *const *rows, nbi_dtype dtype, uint32_t n_rows, uint32_t n, float scale)
{
    for (uint32_t i = 0; i < n_x; i++)
        for (uint32_t j = 0; j < n_rows; j++) {
            double sum = 0;
            for (uint32_t c = 0; c < n; c++)
                sum += (double)x[i * ldx + c] * load(rows[j], dtype, c);
            out[i * ldo + j] = (float)(sum * (double)scale);
        }
}

static void mix(float *out, size_t ldo, const float *p, size_t ldp, uint32_t n_p,
                const void *const *rows, nbi_dtype dtype, uint32_t n_rows, uint32_t n)
{
    enum { STRIP = 64 };
    double acc[STRIP];
    for (uint32_t i = 0; i < n_p; i++)
        for (uint32_t c0 = 0; c0 < n; c0 += STRIP) {
            const uint32_t w = n - c0 < STRIP ? n - c0 : STRIP;
            for (uint32_t c = 0; c < w; c++) acc[c] = (double)out[i * ldo + c0 + c];
            for (uint32_t j = 0; j < n_rows; j++)
                for (uint32_t c = 0; c < w; c++)
                    acc[c] += (double)p[i * ldp + j] * load(rows[j], dtype, c0 + c);
            for (uint32_t c = 0; c < w; c++) out[i * ldo + c0 + c] = (float)acc[c];
        }
}

static void product(float *c, size_t ldc, const float *a, size_t lda, const float *b, uint32_t m,
                    uint32_t n_k, bool add)
{
    double acc[NBI_CPU_PANEL];
    for (uint32_t i = 0; i < m; i++) {
        for (uint32_t j = 0; j < NBI_CPU_PANEL; j++) acc[j] = add ? (double)c[i * ldc + j] : 0;
        for (uint32_t k = 0; k < n_k; k++)
            for (uint32_t j = 0; j < NBI_CPU_PANEL; j++)
                acc[j] += (double)a[i * lda + k] * (double)b[k * NBI_CPU_PANEL + j];
        for (uint32_t j = 0; j < NBI_CPU_PANEL; j++) c[i * ldc + j] = (float)acc[j];
    }
}

static float max_of(const float *x, uint32_t n)
{
    float m = -INFINITY;
    for (uint32_t i = 0; i < n; i++)
        if (x[i] > m) m = x[i];
    return m;
}

static float exp_sum(float *x, uint32_t n, float max)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = expf(x[i] - max);
        sum += (double)x[i];
    }
    return (float)sum;
}

static double log_sum(const float *x, uint32_t n, float max)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += exp((double)x[i] - (double)max);
    return sum;
}

static void exp_to(float *out, const float *x, uint32_t n, float scale, float max)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = (float)exp(((double)x[i] - (double)max) * (double)scale);
}

static void codes_bf16(uint16_t *out, const uint8_t *codes, float scale, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) out[i] = nbi_f32_bf16(nbi_e4m3_f32(codes[i]) * scale);
}

static void relu_add(float *acc, const float *s, uint32_t n, float w)
{
    for (uint32_t i = 0; i < n; i++) acc[i] += w * (s[i] > 0 || isnan(s[i]) ? s[i] : 0.0f);
}

static float add_squares(float *x, const float *delta, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (delta) x[i] += delta[i];
        sum += (double)x[i] * (double)x[i];
    }
    return (float)sum;
}

static void scale_weight(float *out, const float *x, const float *weight, float scale, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

static void swiglu(float *out, const float *gate, const float *up, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

const nbi_cpu_kernels nbi_cpu_kernels_reference = {
    .tile = 1,
    .max_group = 1,
    .dots = dots,
    .mix = mix,
    .product = product,
    .codes_bf16 = codes_bf16,
    .max = max_of,
    .exp_sum = exp_sum,
    .log_sum = log_sum,
    .exp_to = exp_to,
    .relu_add = relu_add,
    .add_squares = add_squares,
    .scale_weight = scale_weight,
    .swiglu = swiglu,
};
