/* Float to NVFP4: weights as ModelOpt's max calibration does it, activations with a static input
 * scale.
 *
 * Called by quantize, synth, the W4A4 path's reference and tests. Every division is a float32
 * division, never a multiplication by a reciprocal: the two differ in the code for about 5 % of the
 * values that lie on a rounding edge. Rounding: base/numfmt.h. */
#include <math.h>
#include <string.h>

#include "base/numfmt.h"
#include "tensor/matrix.h"

#define BLOCK     NBI_NVFP4_BLOCK
#define SCALE_MIN 0x1p-9f                       /* smallest positive E4M3 value */
#define AMAX_MAX  (NBI_E2M1_MAX * NBI_E4M3_MAX) /* 2688 */

/* Largest magnitude of x[n] as bits: those of non-negative floats grow with their value, infinity
 * is 0x7f800000 and every NaN is above it. An integer maximum vectorises, a float one does not. */
static int32_t amax_bits(const float *x, uint64_t n)
{
    int32_t most = 0;
    for (uint64_t i = 0; i < n; i++) {
        int32_t bits = (int32_t)(nbi_f32_bits(x[i]) & 0x7fffffffu);
        most = bits > most ? bits : most;
    }
    return most;
}

static float block_amax(const float *x)
{
    return nbi_bits_f32((uint32_t)amax_bits(x, BLOCK));
}

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

/* codes = e2m1(x / step), two per byte, first in the low nibble. The rounding is that of
 * nbi_f32_e2m1(); a comparison of vectors is 0 or -1. */
static void encode_block(const float *x, float step, uint8_t *codes)
{
    int32_t code[BLOCK];
    for (uint32_t i = 0; i < BLOCK; i += 4) {
        f32x4 v;
        i32x4 bits;
        memcpy(&v, x + i, sizeof v);
        v /= step;
        memcpy(&bits, &v, sizeof bits);
        i32x4 sign = (v < 0.0f) & 8;
        bits &= 0x7fffffff;
        memcpy(&v, &bits, sizeof v);
        bits = sign - (v > 0.25f) - (v >= 0.75f) - (v > 1.25f) - (v >= 1.75f) - (v > 2.5f) -
               (v >= 3.5f) - (v > 5.0f);
        memcpy(code + i, &bits, sizeof bits);
    }
    for (uint32_t i = 0; i < BLOCK / 2; i++)
        codes[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
}

nb_status nbi_nvfp4_amax(float *out, const float *w, uint64_t n, nb_error *err)
{
    float amax = nbi_bits_f32((uint32_t)amax_bits(w, n));
    if (isfinite(amax)) {
        *out = amax;
        return NB_OK;
    }
    uint64_t at = 0;
    while (at < n && isfinite(w[at])) at++;
    return nbi_fail(err, NB_INVALID, "value %llu is %s", (unsigned long long)at,
                    isnan(w[at]) ? "NaN" : "infinite");
}

nb_status nbi_nvfp4_quantize(const float *w, uint32_t rows, uint32_t cols, float amax,
                             uint8_t *codes, uint8_t *scales, float *global_scale, nb_error *err)
{
    if (cols % BLOCK)
        return nbi_fail(err, NB_INVALID, "%u columns are not a multiple of %u", cols, BLOCK);
    uint64_t n = (uint64_t)rows * cols;
    float own;
    NB_TRY(nbi_nvfp4_amax(&own, w, n, err));
    if (!(amax > 0)) amax = own;
    /* A tensor of zeros has no scale (ModelOpt divides 0 by 0 there): 1 keeps every reader happy.
     */
    float global = amax / AMAX_MAX;
    if (global == 0) global = 1;
    for (uint64_t b = 0; b < n / BLOCK; b++) {
        const float *x = w + b * BLOCK;
        float scale = block_amax(x) / (NBI_E2M1_MAX * global);
        if (scale == 0) scale = 1;
        scales[b] = nbi_f32_e4m3(scale < SCALE_MIN      ? SCALE_MIN
                                 : scale > NBI_E4M3_MAX ? NBI_E4M3_MAX
                                                        : scale);
        encode_block(x, nbi_e4m3_f32(scales[b]) * global, codes + b * (BLOCK / 2));
    }
    *global_scale = global;
    return NB_OK;
}

void nbi_nvfp4_quantize_row(const float *x, uint32_t n, float input_scale, uint8_t *codes,
                            uint8_t *scales)
{
    for (uint32_t b = 0; b < n / BLOCK; b++) {
        scales[b] = nbi_f32_e4m3(block_amax(x + b * BLOCK) / (NBI_E2M1_MAX * input_scale));
        float step = nbi_e4m3_f32(scales[b]) * input_scale;
        if (step != 0)
            encode_block(x + b * BLOCK, step, codes + b * (BLOCK / 2));
        else
            for (uint32_t i = 0; i < BLOCK / 2; i++) codes[b * (BLOCK / 2) + i] = 0;
    }
}

void nbi_nvfp4_round_row(const float *x, uint32_t n, float input_scale, float *out)
{
    for (uint32_t b = 0; b < n / BLOCK; b++, x += BLOCK, out += BLOCK) {
        uint8_t codes[BLOCK / 2], scale;
        nbi_nvfp4_quantize_row(x, BLOCK, input_scale, codes, &scale);
        for (uint32_t i = 0; i < BLOCK; i++)
            out[i] = nbi_e2m1_table[codes[i / 2] >> (i % 2 * 4) & 15] * nbi_e4m3_f32(scale) *
                     input_scale;
    }
}
