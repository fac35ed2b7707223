/* Number formats: BF16, F16, FP8 E4M3FN, FP4 E2M1, and their rounding (round to nearest, ties to
 * even). E4M3FN: bias 7, no infinity, NaN 0x7F/0xFF, maximum 448. E2M1 magnitudes by code 0-7: 0 .5
 * 1 1.5 2 3 4 6, bit 3 is the sign. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_E4M3_MAX 448.0f
#define NBI_E2M1_MAX 6.0f

static inline float nbi_bits_f32(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t nbi_f32_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float nbi_bf16_f32(uint16_t h)
{
    return nbi_bits_f32((uint32_t)h << 16);
}

static inline uint16_t nbi_f32_bf16(float f)
{
    uint32_t u = nbi_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u); /* NaN stays NaN */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

float nbi_f16_f32(uint16_t h);
uint16_t nbi_f32_f16(float f);

/* All 256 values; NaN for 0x7f and 0xff. */
extern const float nbi_e4m3_table[256];
static inline float nbi_e4m3_f32(uint8_t v)
{
    return nbi_e4m3_table[v];
}
/* Saturates to +-448; NaN becomes 0x7f. */
uint8_t nbi_f32_e4m3(float f);

extern const float nbi_e2m1_table[16];
/* Low nibble of the result. Saturates to +-6. The sign bit is set iff f < 0 (ModelOpt: -0 becomes
 * code 0). f must not be NaN. */
uint8_t nbi_f32_e2m1(float f);

#ifdef __cplusplus
}
#endif
