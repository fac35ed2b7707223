/* E4M3 parts of the cache inside kernels: backend/kv_shape.h says how they lie. Callers:
 * attend*.cu, attention_*.cu, indexer.cu.
 *
 * On the way to matrix units a row of D codes waits in the very place of the D BF16 values that it
 * becomes: codes in its second half, the 16 bytes that its scale is among behind it, where rows in
 * shared memory have room between them. The warp that asked for a row decodes it, before the
 * barrier that BF16 rows have too: no more memory, no more barriers, and the bits of a BF16 cache
 * of the same values. */
#pragma once

#include "backend/cuda/attention.h"

enum { NBI_CACHE_F32, NBI_CACHE_BF16, NBI_CACHE_CODES };

/* Value i of a vector of any type; `at`: where it begins, in elements, and `scales` of E4M3, in
 * bytes. */
template <int TYPE>
NBI_DEV float nbi_kv_value(const nbi_kv_shape &s, const void *part, size_t at, size_t scales,
                           uint32_t i)
{
    if (TYPE != NBI_CACHE_CODES) return nbi_kv_load<TYPE == NBI_CACHE_BF16>(part, at + i);
    const uint8_t *p = static_cast<const uint8_t *>(part);
    if (i >= s.coded)
        return nbi_from_bf16(
            *reinterpret_cast<const uint16_t *>(p + at + s.tail + 2 * (i - s.coded)));
    return nbi_from_e4m3(p[at + i]) *
           *reinterpret_cast<const float *>(p + scales + i / NBI_KV_GROUP * sizeof(float));
}

/* ---------------------------------------------------------------- writing */

/* A group's scale from the bits of its largest magnitude, and what values are multiplied by: 0 when
 * they are not all finite. */
NBI_DEV float nbi_codes_scale(uint32_t most, float *inverse)
{
    *inverse = 0;
    if (most >= 0x7f800000u) return nbi_float(0x7fc00000u);
    int e = (int)(most >> 23) - 127 - 8 + ((most & 0x7fffffu) > 0x600000u);
    e = e < NBI_KV_EXP_MIN ? NBI_KV_EXP_MIN : e > NBI_KV_EXP_MAX ? NBI_KV_EXP_MAX : e;
    *inverse = nbi_float((uint32_t)(127 - e) << 23);
    return nbi_float((uint32_t)(127 + e) << 23);
}

NBI_DEV uint8_t nbi_codes_of(float x, float inverse)
{
    return inverse == 0 ? 0 : nbi_to_e4m3(x * inverse);
}

/* Groups first, first + step, ... of n values, value(i), by a warp. */
template <class F>
NBI_DEV void nbi_codes_store(uint8_t *codes, float *scales, uint32_t n, uint32_t first,
                             uint32_t step, F value)
{
    for (uint32_t g = first; g * NBI_KV_GROUP < n; g += step) {
        float x[NBI_KV_GROUP / NBI_WARP], inverse;
        uint32_t most = 0;
#pragma unroll
        for (uint32_t j = 0; j < NBI_KV_GROUP / NBI_WARP; j++) {
            const uint32_t i = g * NBI_KV_GROUP + j * NBI_WARP + nbi_lane();
            x[j] = i < n ? value(i) : 0;
            const uint32_t bits = nbi_bits(x[j]) & 0x7fffffffu;
            most = bits > most ? bits : most;
        }
        const float scale = nbi_codes_scale(nbi_warp_max(most), &inverse);
#pragma unroll
        for (uint32_t j = 0; j < NBI_KV_GROUP / NBI_WARP; j++) {
            const uint32_t i = g * NBI_KV_GROUP + j * NBI_WARP + nbi_lane();
            if (i < n) codes[i] = nbi_codes_of(x[j], inverse);
        }
        if (nbi_lane() == 0) scales[g] = scale;
    }
}

/* ---------------------------------------------------------------- rows on their way */

/* Codes c to c + 15 of a row, with c = 0 its scale too; zeros unless `take`. `slot`: of the page.
 */
template <int D>
NBI_DEV void nbi_codes_copy(uint16_t *row, int c, const uint8_t *codes, const uint8_t *scales,
                            int slot, bool take)
{
    uint8_t *to = reinterpret_cast<uint8_t *>(row);
    nbi_copy_async(to + D + c, codes + c, take);
    if (c == 0) nbi_copy_async(to + 2 * D, scales + slot / 4 * 16, take);
}

/* 16 codes times their scale, in BF16. */
NBI_DEV void nbi_codes_decode16(const nbi_u32x4 &codes, float scale, nbi_u32x4 out[2])
{
    const float f = scale * 256.0f; /* halves are 2^-8 of what the codes are */
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t w = codes.v[i / 2] >> 16 * (i % 2);
        const uint32_t high = (w & 0xffu) << 8 | (w & 0xff00u) << 16;
        const uint32_t h = (high & 0x80008000u) | (high >> 1 & 0x3f803f80u);
        out[i / 4].v[i % 4] = nbi_to_bf16x2(nbi_from_f16((uint16_t)(h & 0xffffu)) * f,
                                            nbi_from_f16((uint16_t)(h >> 16)) * f);
    }
}

/* N rows, of which this lane decodes codes c to c + 15 as it asked for them: a whole warp, which
 * has all codes and scales of the rows. slot[i]: of the page. */
template <int D, int N>
NBI_DEV void nbi_codes_decode(uint16_t *const (&row)[N], const int (&slot)[N], int c)
{
    nbi_u32x4 codes[N];
    float scale[N];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++) {
        codes[i] =
            *reinterpret_cast<const nbi_u32x4 *>(reinterpret_cast<uint8_t *>(row[i]) + D + c);
        scale[i] = reinterpret_cast<const float *>(row[i] + D)[slot[i] & 3];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++) {
        nbi_u32x4 out[2];
        nbi_codes_decode16(codes[i], scale[i], out);
        *reinterpret_cast<nbi_u32x4 *>(row[i] + c) = out[0];
        *reinterpret_cast<nbi_u32x4 *>(row[i] + c + 8) = out[1];
    }
}
