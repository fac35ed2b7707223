/* Activations into the forms that panels read. Callers: linear.c, moe/cpu. Each token is packed on
 * its own, so its bits do not depend on the others. */
#include <string.h>

#include "backend/cpu/linear.h"

static bool is_pairs(nbi_lin_form form)
{
    return form == NBI_LIN_PAIRS || form == NBI_LIN_PAIRS_NVFP4;
}

nbi_lin_form nbi_lin_form_of(nbi_cpu_level level, nbi_weight_kind kind, bool exact)
{
    if (level < NBI_CPU_AVX512 || exact || kind == NBI_WEIGHT_F32 || kind == NBI_WEIGHT_F16)
        return NBI_LIN_F32;
    const bool nvfp4 = kind == NBI_WEIGHT_NVFP4;
    if (level < NBI_CPU_AMX) return nvfp4 ? NBI_LIN_BF16_NVFP4 : NBI_LIN_BF16;
    return nvfp4 ? NBI_LIN_PAIRS_NVFP4 : NBI_LIN_PAIRS;
}

size_t nbi_lin_pack_bytes(nbi_lin_form form, uint32_t n, uint32_t cols)
{
    const size_t element = form == NBI_LIN_F32 ? sizeof(float) : sizeof(uint16_t);
    return (size_t)n * nbi_lin_pad(cols) * element;
}

/* Codes times block scales of one token; the input scale is left to the product's end. */
static const float *round_nvfp4(const float *x, uint32_t cols, float input_scale, void *scratch)
{
    float *out = scratch;
    uint8_t *codes = (uint8_t *)(out + nbi_lin_pad(cols)), *scales = codes + cols / 2;
    nbi_nvfp4_quantize_row(x, cols, input_scale, codes, scales);
    for (uint32_t c = 0; c < cols; c++) {
        const uint8_t code = (uint8_t)(codes[c / 2] >> (c % 2 * 4) & 15u);
        out[c] = nbi_e2m1_table[code] * nbi_e4m3_f32(scales[c / NBI_NVFP4_BLOCK]);
    }
    return out;
}

static void pack_group(nbi_cpu_level level, const nbi_lin_x *x, uint32_t t0, uint32_t n,
                       const float *src, size_t stride, const int32_t *rows, float input_scale,
                       void *scratch)
{
    const uint32_t pad = nbi_lin_pad(x->cols);
    const bool pairs = is_pairs(x->form);
    const bool nvfp4 = x->form == NBI_LIN_BF16_NVFP4 || x->form == NBI_LIN_PAIRS_NVFP4;
    char *const bytes = scratch;
    uint16_t *const packed = (uint16_t *)x->data + (size_t)t0 * pad;
    /* A group of one token needs no transposition: its pairs are the row itself. */
    uint16_t *const group = pairs && n > 1 ? scratch : packed;
    void *const rest = bytes + 16 * (size_t)pad * sizeof(uint16_t);
    for (uint32_t t = 0; t < n; t++) {
        const float *row = src + (rows ? (size_t)rows[t0 + t] : t0 + t) * stride;
        if (input_scale > 0) row = round_nvfp4(row, x->cols, input_scale, rest);
        if (x->form == NBI_LIN_F32) {
            float *dst = (float *)x->data + (size_t)(t0 + t) * pad;
            memcpy(dst, row, x->cols * sizeof *dst);
            memset(dst + x->cols, 0, (pad - x->cols) * sizeof *dst);
            continue;
        }
#if defined(__x86_64__)
        nbi_lin_round_avx512(group + (size_t)t * pad, row, x->cols, nvfp4);
#endif
    }
#if defined(__x86_64__)
    if (pairs && n > 1) nbi_lin_pairs_avx512(packed, group, n, x->cols);
#else
    (void)nvfp4, (void)group;
#endif
    (void)level;
}

void nbi_lin_pack(nbi_cpu_level level, const nbi_lin_x *x, uint32_t t0, uint32_t n,
                  const float *src, size_t stride, const int32_t *rows, float input_scale,
                  void *scratch)
{
    for (uint32_t t = t0; t < t0 + n; t += 16) {
        const uint32_t group = t0 + n - t < 16 ? t0 + n - t : 16;
        pack_group(level, x, t, group, src, stride, rows, input_scale, scratch);
    }
}
