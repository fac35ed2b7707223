/* NVFP4 experts times NVFP4 rows by FP4 products (device_fp4.h): a numerics class of its own.
 * Callers: moe_masked.cu and moe_grouped.cu, which say how a pass goes.
 *
 * Weights. The tiles of tile.h, in place, for lanes of m16n8k64: data [n_rt][n_kt][32 lanes]
 * [a[0] ... a[3]], scales [n_rt][n_kt][8 g][row g, row g+8][4 UE4M3].
 * Rows, of x and of h. A chunk of 256 columns has 144 bytes: [4 t][4 k-tiles][b[0], b[1]], then [4
 * k-tiles] [4 UE4M3]; zeros behind the row's end.
 *
 * Numerics. x is rounded as nbi_nvfp4_quantize_row() does it, by the expert's input scale; what is
 * not finite makes the scale of its 16 values NaN. One chain of products over K, k-tiles ascending
 * from zero; the sum times 2^-7 input scale, then times row_scale. The order and rounding within a
 * k-tile are the device's (device_fp4.h), so bits differ from those of other classes, but never by
 * batch, place or the other rows of a tile. */
#pragma once

#include "backend/cuda/device_fp4.h"
#include "moe/cuda/moe_product.h"

#define NBI_MOE_FP4_TILES       4u /* of a chunk */
#define NBI_MOE_FP4_COLS        (NBI_MOE_FP4_TILES * NBI_TILE_COLS)
#define NBI_MOE_FP4_CHUNK_BYTES 144u

static inline size_t nbi_moe_fp4_row_bytes(uint32_t cols)
{
    return (size_t)nbi_ceil_div(cols, NBI_MOE_FP4_COLS) * NBI_MOE_FP4_CHUNK_BYTES;
}

/* Of a converted row; fp4: as the products here take it, else as those of moe_product.h. */
static inline size_t nbi_moe_form_bytes(uint32_t cols, bool fp4)
{
    return fp4 ? nbi_moe_fp4_row_bytes(cols) : nbi_moe_row_bytes(cols);
}

/* E2M1 of x / step, ties as nbi_x_round_to() has them. */
static NBI_DEV uint32_t nbi_moe_fp4_code(float x, float step)
{
    const float v = step != 0 ? x / step : 0, a = fabsf(v);
    const uint32_t size = a > 5.0f     ? 7
                          : a >= 3.5f  ? 6
                          : a > 2.5f   ? 5
                          : a >= 1.75f ? 4
                          : a > 1.25f  ? 3
                          : a >= 0.75f ? 2
                          : a > 0.25f  ? 1
                                       : 0;
    return v < 0 ? size | 8u : size;
}

/* A lane's eight neighbouring values, the other half of their 16 in the lane beside (lane ^ 1). */
struct nbi_moe_fp4_octet {
    uint32_t codes;
    uint8_t scale; /* the same in both lanes */

    NBI_DEV nbi_moe_fp4_octet(const nbi_f32x4 &first, const nbi_f32x4 &next, float input_scale)
    {
        uint32_t most = nbi_amax_bits(nbi_amax_bits(0, first), next);
        const uint32_t other = __shfl_xor_sync(NBI_FULL_MASK, most, 1);
        most = other > most ? other : most;
        scale = most >= 0x7f800000u ? 0x7f : nbi_to_e4m3(nbi_float(most) / (6.0f * input_scale));
        const float step = nbi_from_e4m3(scale) * input_scale;
        codes = 0;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            codes |= nbi_moe_fp4_code(first.v[i], step) << 4 * i | nbi_moe_fp4_code(next.v[i], step)
                                                                       << (16 + 4 * i);
    }

    /* To k-tile kt of a chunk, columns 8 at ... 8 at + 7 of its 64. */
    NBI_DEV void store(char *chunk, uint32_t kt, uint32_t at) const
    {
        *reinterpret_cast<uint32_t *>(chunk + at % 4 * 32 + kt * 8 + at / 4 * 4) = codes;
        if (at % 2 == 0) reinterpret_cast<uint8_t *>(chunk)[128 + kt * 4 + at / 2] = scale;
    }
};

/* Chunk c of the row at x, of `cols` values (a multiple of 16), by one warp; `to`: of row 0. */
static NBI_DEV void nbi_moe_fp4_convert(char *to, const float *x, uint32_t cols, uint32_t to_row,
                                        uint32_t c, float input_scale)
{
    const uint32_t lane = (uint32_t)nbi_lane(), at = c * NBI_MOE_FP4_COLS + lane * 8;
    const uint32_t n_chunks = (cols + NBI_MOE_FP4_COLS - 1) / NBI_MOE_FP4_COLS;
    const nbi_moe_fp4_octet octet(nbi_x_load(x, at, cols, true), nbi_x_load(x, at + 4, cols, true),
                                  input_scale);
    octet.store(to + ((size_t)to_row * n_chunks + c) * NBI_MOE_FP4_CHUNK_BYTES, lane / 8, lane % 8);
}

/* moe_fp4.cu. Rows of a tile, for so many rows of an expert on average: 16, 40, 64 or 128. */
uint32_t nbi_moe_fp4_tokens(uint32_t rows_each);

/* A product, as nbi_moe_launch_division() launches it. Masked: tokens is 16 or 40. gate_up gives h
 * as rows for down, a.w.hc, rounded by a.h_scale; a.out is for down. */
void nbi_moe_fp4_product(nbi_cuda *c, const nbi_moe_product_args &a, uint32_t tokens, bool gate_up,
                         bool masked, uint32_t n_tiles, uint32_t n_experts);
