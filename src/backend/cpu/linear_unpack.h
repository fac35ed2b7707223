/* Weights to BF16 with AVX-512 (VBMI). Included by linear_avx512.c and linear_amx.c.
 *
 * NVFP4: a vector of 32 bf16 spans two blocks of 16, so a table of 32 entries (two rows of
 * nbi_lin_nvfp4_bf16, one per block) gives value times scale in one vpermw. The indices come from
 * four copies of the eight code words, shifted by 0, 4, 8 and 12 bits: no instruction of the
 * shuffle port but the look-up itself, at the price of the order nbi_lin_nvfp4_order(), which the
 * activations share. Measured on one 2.6 GHz Emerald Rapids core: docs in tests/kernel --bench. */
#pragma once

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <string.h>

#include "backend/cpu/linear_tables.h"

typedef struct nbi_unpack_nvfp4 {
    __m512i shifts, nibble, block;
} nbi_unpack_nvfp4;

static inline nbi_unpack_nvfp4 nbi_unpack_nvfp4_init(void)
{
    nbi_unpack_nvfp4 u;
    u.shifts = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008,
                                0x0008000800080008, 0x0004000400040004, 0x0004000400040004, 0, 0);
    u.nibble = _mm512_set1_epi16(15);
    u.block = _mm512_set_epi64(0x0010001000100010, 0, 0x0010001000100010, 0, 0x0010001000100010, 0,
                               0x0010001000100010, 0);
    return u;
}

/* 32 weights: 16 bytes of codes, two block scales. */
static inline __m512i nbi_unpack_nvfp4_32(const nbi_unpack_nvfp4 *u, const uint8_t *codes,
                                          uint32_t s0, uint32_t s1)
{
    __m512i words;
    /* Written out because compilers turn the intrinsic into a load and a shuffle. */
    __asm__("vbroadcasti32x4 %1, %0" : "=v"(words) : "m"(*(const __m128i_u *)codes));
    words = _mm512_srlv_epi16(words, u->shifts);
    const __m512i index = _mm512_ternarylogic_epi32(words, u->nibble, u->block, 0xea);
    const __m256i t0 = _mm256_load_si256((const void *)nbi_lin_nvfp4_bf16[s0]);
    const __m256i t1 = _mm256_load_si256((const void *)nbi_lin_nvfp4_bf16[s1]);
    return _mm512_permutexvar_epi16(index, _mm512_inserti64x4(_mm512_castsi256_si512(t0), t1, 1));
}

/* The last half: 16 weights, zero behind. */
static inline __m512i nbi_unpack_nvfp4_16(const nbi_unpack_nvfp4 *u, const uint8_t *codes,
                                          uint32_t scale)
{
    uint8_t both[16] = {0};
    memcpy(both, codes, 8);
    return nbi_unpack_nvfp4_32(u, both, scale, 0);
}

typedef struct nbi_unpack_fp8 {
    __m512i high0, high1, low0, low1, sign, quads;
} nbi_unpack_fp8;

static inline nbi_unpack_fp8 nbi_unpack_fp8_init(void)
{
    nbi_unpack_fp8 u;
    u.high0 = _mm512_load_si512(nbi_lin_e4m3_high);
    u.high1 = _mm512_load_si512(nbi_lin_e4m3_high + 64);
    u.low0 = _mm512_load_si512(nbi_lin_e4m3_low);
    u.low1 = _mm512_load_si512(nbi_lin_e4m3_low + 64);
    u.sign = _mm512_set1_epi8((char)0x80);
    u.quads = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    return u;
}

/* 64 weights in natural order; NaN bytes give NaN. */
static inline void nbi_unpack_fp8_64(const nbi_unpack_fp8 *u, __m512i bytes, __m512i out[2])
{
    /* The unpack instructions work inside quarters: quads 0-3 and 4-7 are put side by side first.
     */
    const __m512i b = _mm512_permutexvar_epi64(u->quads, bytes);
    const __m512i magnitude = _mm512_permutex2var_epi8(u->high0, b, u->high1);
    const __m512i low = _mm512_permutex2var_epi8(u->low0, b, u->low1);
    const __m512i high = _mm512_ternarylogic_epi32(b, u->sign, magnitude, 0xea);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}

/* First n of 64 bytes, zero behind. */
static inline __m512i nbi_load_tail64(const uint8_t *p, uint32_t n)
{
    const __mmask64 mask = n >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << n) - 1;
    return _mm512_maskz_loadu_epi8(mask, p);
}

#endif
