/* Random bytes of synthetic weights. A counter-based generator (the output function of SplitMix64
 * over key + position): any piece of any tensor can be made by any thread. */
#include <math.h>
#include <string.h>

#include "base/numfmt.h"
#include "model/synth_parts.h"

static inline uint64_t random_word(uint64_t key, uint64_t i)
{
    uint64_t z = key + (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* A random word as tensor bytes of the kind. */
static inline uint64_t shape_word(const nbi_fill *f, uint64_t r)
{
    switch (f->kind) {
    case NBI_FILL_CODES: return r;
    case NBI_FILL_E4M3_NEAR:
        return 0x3838383838383838u | (r & 0x0707070707070707u); /* 1, 1.125, ... 1.875 */
    case NBI_FILL_FP8: return r & 0xbfbfbfbfbfbfbfbfu;
    case NBI_FILL_BF16: {
        uint64_t out = 0;
        for (int k = 0; k < 4; k++) {
            float unit = (float)(int16_t)(r >> (16 * k)) * 0x1p-15f;
            out |= (uint64_t)nbi_f32_bf16(f->center + f->spread * unit) << (16 * k);
        }
        return out;
    }
    default: {
        uint64_t out = 0;
        for (int k = 0; k < 2; k++) {
            float unit = (float)(int32_t)(r >> (32 * k)) * 0x1p-31f;
            out |= (uint64_t)nbi_f32_bits(f->center + f->spread * unit) << (32 * k);
        }
        return out;
    }
    }
}

void nbi_fill_bytes(const nbi_fill *fill, uint64_t begin, uint8_t *out, size_t n)
{
    nbi_fill f = *fill; /* a copy the compiler can keep in registers */
    uint64_t word = begin / 8;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t v = shape_word(&f, random_word(f.key, word++));
        memcpy(out + i, &v, 8);
    }
    if (i < n) {
        uint64_t v = shape_word(&f, random_word(f.key, word));
        memcpy(out + i, &v, n - i);
    }
}

float nbi_fill_rms_nvfp4(void)
{
    double codes = 0, scales = 0;
    for (int i = 0; i < 16; i++)
        codes += (double)nbi_e2m1_table[i] * (double)nbi_e2m1_table[i] / 16;
    for (int i = 0; i < 8; i++)
        scales += (double)nbi_e4m3_table[0x38 + i] * (double)nbi_e4m3_table[0x38 + i] / 8;
    return (float)sqrt(codes * scales);
}

float nbi_fill_rms_fp8(void)
{
    double sum = 0;
    for (int i = 0; i < 64; i++) sum += (double)nbi_e4m3_table[i] * (double)nbi_e4m3_table[i] / 64;
    return (float)sqrt(sum);
}
