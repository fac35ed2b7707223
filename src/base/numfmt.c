/* Conversions and tables of the number formats. Called by loaders, kernels and tests. All rounding
 * is to nearest, ties to even: on bits, or by one float32 addition in the default rounding mode,
 * which nibble never changes. */
#include "base/numfmt.h"

/* Magnitude of an E4M3 code without its sign: m / 2^9 below the first exponent, (8 + m) * 2^(e -
 * 10) above. */
#define E4M3_ABS(v)                                   \
    ((((v) >> 3) & 15) == 0 ? (float)((v)&7) / 512.0f \
                            : (float)((8 + ((v)&7)) << (((v) >> 3) & 15)) / 1024.0f)
#define E4M3(v)    (((v)&0x7f) == 0x7f ? NAN : ((v)&0x80) ? -E4M3_ABS(v) : E4M3_ABS(v))
#define E4M3_4(v)  E4M3(v), E4M3((v) + 1), E4M3((v) + 2), E4M3((v) + 3)
#define E4M3_16(v) E4M3_4(v), E4M3_4((v) + 4), E4M3_4((v) + 8), E4M3_4((v) + 12)
#define E4M3_64(v) E4M3_16(v), E4M3_16((v) + 16), E4M3_16((v) + 32), E4M3_16((v) + 48)

const float nbi_e4m3_table[256] = {E4M3_64(0), E4M3_64(64), E4M3_64(128), E4M3_64(192)};

const float nbi_e2m1_table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

float nbi_f16_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 31u;
    uint32_t mantissa = h & 0x3ffu;
    if (exponent == 31) return nbi_bits_f32(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-24f; /* exact */
        return nbi_bits_f32(sign | nbi_f32_bits(magnitude));
    }
    return nbi_bits_f32(sign | (exponent + 112u) << 23 | mantissa << 13);
}

uint16_t nbi_f32_f16(float f)
{
    uint32_t u = nbi_f32_bits(f);
    uint32_t sign = u >> 16 & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (u >> 13 & 0x3ffu)); /* stays a NaN */
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
    if (u < 0x38800000u) {                                   /* below 2^-14: a multiple of 2^-24 */
        if (u < 0x33000000u) return (uint16_t)sign;          /* below 2^-25 */
        uint32_t shift = 126u - (u >> 23);                   /* 14 to 24 */
        uint32_t mantissa = (u & 0x7fffffu) | 0x800000u;
        uint32_t half = 1u << (shift - 1);
        uint32_t odd = mantissa >> shift & 1u;
        return (uint16_t)(sign | (mantissa + half - 1u + odd) >> shift);
    }
    uint32_t odd = u >> 13 & 1u;
    return (uint16_t)(sign | (u - 0x38000000u + 0xfffu + odd) >> 13);
}

uint8_t nbi_f32_e4m3(float f)
{
    uint32_t u = nbi_f32_bits(f);
    uint32_t sign = u >> 24 & 0x80u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return 0x7f;
    if (u >= 0x43e00000u) return (uint8_t)(sign | 0x7e); /* 448 and above */
    if (u < 0x3c800000u) {                               /* below 2^-6: a multiple of 2^-9 */
        /* Adding 2^14 leaves exactly the multiples of 2^-9 in the mantissa, rounded to nearest
         * even. */
        float rounded = nbi_bits_f32(u) + 16384.0f;
        return (uint8_t)(sign | (nbi_f32_bits(rounded) & 0xffu));
    }
    uint32_t odd = u >> 20 & 1u;
    return (uint8_t)(sign | (((u + 0x7ffffu + odd) >> 20) - (120u << 3)));
}

uint8_t nbi_f32_e2m1(float f)
{
    float a = fabsf(f);
    /* Midpoints between codes; where the code above is even, the tie goes up. */
    unsigned code = (unsigned)(a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                    (a >= 3.5f) + (a > 5.0f);
    return (uint8_t)(code | (f < 0.0f ? 8u : 0u));
}
