/* Random bytes of synthetic weights. A counter-based generator (the output function of SplitMix64
 * over key + position): any piece of any tensor can be made by any thread. */
#include <math.h>
#include <string.h>

#include "base/numfmt.h"
#include "model/synth_parts.h"

#define BATCH 256 /* words made at once */

static inline uint64_t random_word(uint64_t key, uint64_t i)
{
    uint64_t z = key + (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Words [first, first + BATCH) of the stream. */
static void random_words(uint64_t key, uint64_t first, uint64_t out[BATCH])
{
    for (uint64_t i = 0; i < BATCH; i++) out[i] = random_word(key, first + i);
}

/* Random bits to tensor bytes of the kind, in place: loops without branches, which the compiler
 * vectorises. */
static void shape_words(const nbi_fill *f, uint64_t words[BATCH])
{
    union {
        uint64_t words[BATCH];
        int32_t i32[BATCH * 2];
        float f32[BATCH * 2];
        int16_t i16[BATCH * 4];
        uint16_t u16[BATCH * 4];
    } u;
    const float center = f->center, spread = f->spread;
    memcpy(u.words, words, sizeof u.words);
    switch (f->kind) {
    case NBI_FILL_CODES: return;
    case NBI_FILL_E4M3_NEAR: /* 1, 1.125, ... 1.875 */
        for (int i = 0; i < BATCH; i++)
            words[i] = 0x3838383838383838u | (words[i] & 0x0707070707070707u);
        return;
    case NBI_FILL_FP8:
        for (int i = 0; i < BATCH; i++) words[i] &= 0xbfbfbfbfbfbfbfbfu;
        return;
    case NBI_FILL_BF16:
        for (int i = 0; i < BATCH * 4; i++) { /* nbi_f32_bf16() without its NaN case */
            uint32_t bits = nbi_f32_bits(center + spread * ((float)u.i16[i] * 0x1p-15f));
            u.u16[i] = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
        }
        break;
    case NBI_FILL_F32:
        for (int i = 0; i < BATCH * 2; i++)
            u.f32[i] = center + spread * ((float)u.i32[i] * 0x1p-31f);
        break;
    }
    memcpy(words, u.words, sizeof u.words);
}

void nbi_fill_bytes(const nbi_fill *fill, uint64_t begin, uint8_t *out, size_t n)
{
    uint64_t words[BATCH], skip = begin % sizeof words;
    for (size_t i = 0; i < n;) {
        size_t take = sizeof words - skip < n - i ? sizeof words - skip : n - i;
        random_words(fill->key, (begin + i - skip) / 8, words);
        shape_words(fill, words);
        memcpy(out + i, (const uint8_t *)words + skip, take);
        i += take;
        skip = 0;
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
