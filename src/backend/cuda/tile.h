/* Packed weights: how a matrix lies on the device, and the steps that all products share, so that
 * they give the same bits. Callers: pack.cu, the products of linear_*.cu and the MoE runners.
 *
 * Layout. Tiles of 16 rows x 64 columns, zeros behind the matrix; tile (rt, kt) has index
 * rt * n_kt + kt. A tile is four k-steps of 16 columns, each the A fragment of mma.m16n8k16. Lane
 * l, g = l / 4, t = l % 4, holds of k-step w the columns c = 64 kt + 16 w + 4 t ... c + 3:
 *   a[0] row g, c c+1    a[1] row g+8, c c+1    a[2] row g, c+2 c+3    a[3] row g+8, c+2 c+3
 * so the B fragment of token g is x[c ... c+3], eight bytes in a row.
 *   NVFP4     data [n_rt][n_kt][32 lanes][4 words]: word w, 16 bits of each column of the pairs:
 *             a[0] at 15, 11-9; a[1] at 12, 8-6; a[2] at 14, 5-3; a[3] at 13, 2-0 (sign, code)
 *             scales [n_rt][n_kt][8 g][8 bytes]: four k-steps of row g, then of row g+8, each the
 *             bits 14-7 of FP16(scale * 2^7); signs of scales are moved into the codes
 *   BF16 F16  data [n_rt][n_kt][4 k-steps][32 lanes][a[0] ... a[3]]
 *   FP8       data [n_rt][n_kt][2][32 lanes][k-steps 2i, 2i+1: words a[0] a[1] and a[2] a[3]], 16
 *             bits of each column: the first at 15, 13-7, the second at 14, 6-0
 *             scales, FP8_BLOCK: float [n_rt][ceil(cols / 128)][2], of rows g and of rows g+8
 *   F32       data row-major float; nothing else
 * row_scale float [n_rt * 16]: what a row's sum is multiplied by: the global scale and the power of
 * two that the fragments leave out (NVFP4 2^7, FP8 2^8); NaN for a row with a NaN among FP8 codes.
 * Interleaved (gate and up of an MLP): rows g of tile rt are rows 8 rt + g of the first matrix,
 * rows g+8 the same of the second.
 *
 * Numerics. K is cut in chunks of 256 columns, FP8_BLOCK 128. In a chunk x is scaled by 2^-e, its
 * largest magnitude then in [2^14, 2^15), and rounded to FP16; for BF16 weights x is rounded to
 * BF16 and e = 0. p_c: k-steps in ascending order from zero. y = fmaf(p_c, 2^e_c * block scale, y),
 * c ascending from y = 0; then fmaf(y, row_scale, bias). Weights are exact. */
#pragma once

#include "backend/cuda/device.h"
#include "tensor/matrix.h"

#define NBI_TILE_ROWS  16u
#define NBI_TILE_COLS  64u
#define NBI_TILE_STEPS 4u /* k-steps of a tile */
#define NBI_CHUNK_COLS 256u

/* A packed matrix; pointers are of the device. */
struct nbi_cuda_packed {
    nbi_weight_kind kind;
    bool interleaved;
    uint32_t rows; /* of one matrix: an interleaved pair has twice as many */
    uint32_t cols, n_rt, n_kt;
    const void *data, *scales;
    const float *row_scale;
};

/* ---------------------------------------------------------------- sizes */

__host__ __device__ constexpr uint32_t nbi_tile_bytes(nbi_weight_kind kind)
{
    switch (kind) {
    case NBI_WEIGHT_NVFP4: return 512;
    case NBI_WEIGHT_FP8_BLOCK:
    case NBI_WEIGHT_FP8_TENSOR: return 1024;
    default: return 2048;
    }
}

/* Tiles of a chunk. */
__host__ __device__ constexpr uint32_t nbi_chunk_tiles(nbi_weight_kind kind)
{
    return kind == NBI_WEIGHT_FP8_BLOCK ? 2 : 4;
}

/* Chunks of a row of n_kt tiles. */
__host__ __device__ constexpr uint32_t nbi_chunks_of(nbi_weight_kind kind, uint32_t n_kt)
{
    return (n_kt + nbi_chunk_tiles(kind) - 1) / nbi_chunk_tiles(kind);
}

inline size_t nbi_packed_pad(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

inline size_t nbi_packed_data_bytes(const nbi_cuda_packed *p)
{
    if (p->kind == NBI_WEIGHT_F32) return nbi_packed_pad((size_t)p->rows * p->cols * 4);
    return nbi_packed_pad((size_t)p->n_rt * p->n_kt * nbi_tile_bytes(p->kind));
}

inline size_t nbi_packed_scale_bytes(const nbi_cuda_packed *p)
{
    if (p->kind == NBI_WEIGHT_NVFP4) return nbi_packed_pad((size_t)p->n_rt * p->n_kt * 64);
    if (p->kind != NBI_WEIGHT_FP8_BLOCK) return 0;
    return nbi_packed_pad((size_t)p->n_rt * ((p->cols + 127) / 128) * 8);
}

inline size_t nbi_packed_bytes(const nbi_cuda_packed *p)
{
    const size_t row = p->kind == NBI_WEIGHT_F32 ? 0 : (size_t)p->n_rt * NBI_TILE_ROWS * 4;
    return nbi_packed_data_bytes(p) + nbi_packed_scale_bytes(p) + nbi_packed_pad(row);
}

/* The description of a matrix, or of a pair, that lies at `base` (aligned to 256 bytes; NULL: only
 * the shape, for nbi_packed_bytes()). */
inline nbi_cuda_packed nbi_packed_at(const void *base, nbi_weight_kind kind, uint32_t rows,
                                     uint32_t cols, bool interleaved)
{
    nbi_cuda_packed p = {};
    p.kind = kind;
    p.interleaved = interleaved;
    p.rows = rows;
    p.cols = cols;
    const uint32_t height = interleaved ? NBI_TILE_ROWS / 2 : NBI_TILE_ROWS;
    p.n_rt = (rows + height - 1) / height;
    p.n_kt = (cols + NBI_TILE_COLS - 1) / NBI_TILE_COLS;
    if (!base) return p;
    const char *at = static_cast<const char *>(base);
    p.data = at;
    p.scales = at + nbi_packed_data_bytes(&p);
    p.row_scale = reinterpret_cast<const float *>(at + nbi_packed_data_bytes(&p) +
                                                  nbi_packed_scale_bytes(&p));
    return p;
}

/* ---------------------------------------------------------------- weights to fragments */

NBI_DEV uint32_t nbi_nvfp4_place(uint32_t code, int i)
{
    const uint32_t s = code >> 3, m = code & 7u;
    return i == 0   ? s << 15 | m << 9
           : i == 1 ? s << 12 | m << 6
           : i == 2 ? s << 14 | m << 3
                    : s << 13 | m;
}

/* The k-step's codes to FP16 times 2^-14. */
NBI_DEV void nbi_nvfp4_codes(uint32_t a[4], uint32_t word)
{
    const uint32_t mask = 0x8e008e00u;
    a[0] = word & mask;
    a[1] = word * 8u & mask;
    /* Products put sign and magnitude into place; what else they make stays below bit 8. */
    a[2] = (word & 0x40384038u) * 66u & mask;
    a[3] = (word & 0x20072007u) * 516u & mask;
}

/* Four scale bytes of a row to FP16: the even k-steps in one word, the odd ones in the other. */
NBI_DEV void nbi_nvfp4_scales(uint32_t s[2], uint32_t four)
{
    s[0] = (four & 0x00ff00ffu) << 7;
    s[1] = (four & 0xff00ff00u) >> 1;
}

NBI_DEV void nbi_fp8_codes(uint32_t a[2], uint32_t word)
{
    a[0] = word & 0xbf80bf80u;
    a[1] = (word << 1 & 0x80008000u) | (word << 7 & 0x3f803f80u);
}

template <bool ONCE> NBI_DEV nbi_u32x4 nbi_load16(const void *p)
{
    return ONCE ? nbi_load_once(p) : *static_cast<const nbi_u32x4 *>(p);
}

template <bool ONCE> NBI_DEV nbi_u32x2 nbi_load8(const void *p)
{
    return ONCE ? nbi_load_once8(p) : *static_cast<const nbi_u32x2 *>(p);
}

/* One lane's part of a tile, as loaded. ONCE: nobody else of the block reads it. */
template <nbi_weight_kind KIND> struct nbi_tile {
    nbi_u32x4 v[4]; /* BF16, F16: k-step w */

    template <bool ONCE = true>
    NBI_DEV void load(const nbi_cuda_packed &p, uint32_t rt, uint32_t kt, uint32_t lane)
    {
        const char *at = static_cast<const char *>(p.data) + ((size_t)rt * p.n_kt + kt) * 2048;
#pragma unroll
        for (uint32_t w = 0; w < 4; w++) v[w] = nbi_load16<ONCE>(at + w * 512 + lane * 16);
    }

    NBI_DEV void fragment(uint32_t a[4], uint32_t w) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = v[w].v[i];
    }
};

template <> struct nbi_tile<NBI_WEIGHT_NVFP4> {
    nbi_u32x4 codes;
    nbi_u32x2 scales; /* rows g, g+8 */

    template <bool ONCE = true>
    NBI_DEV void load(const nbi_cuda_packed &p, uint32_t rt, uint32_t kt, uint32_t lane)
    {
        const size_t tile = (size_t)rt * p.n_kt + kt;
        codes = nbi_load16<ONCE>(static_cast<const char *>(p.data) + tile * 512 + lane * 16);
        scales = nbi_load8<ONCE>(static_cast<const char *>(p.scales) + tile * 64 + (lane / 4) * 8);
    }

    NBI_DEV void fragment(uint32_t a[4], uint32_t w) const
    {
        uint32_t lo[2], hi[2];
        nbi_nvfp4_codes(a, codes.v[w]);
        nbi_nvfp4_scales(lo, scales.v[0]);
        nbi_nvfp4_scales(hi, scales.v[1]);
        if (w < 2) {
            a[0] = nbi_mul_f16x2_lo(a[0], lo[w % 2]);
            a[1] = nbi_mul_f16x2_lo(a[1], hi[w % 2]);
            a[2] = nbi_mul_f16x2_lo(a[2], lo[w % 2]);
            a[3] = nbi_mul_f16x2_lo(a[3], hi[w % 2]);
        } else {
            a[0] = nbi_mul_f16x2_hi(a[0], lo[w % 2]);
            a[1] = nbi_mul_f16x2_hi(a[1], hi[w % 2]);
            a[2] = nbi_mul_f16x2_hi(a[2], lo[w % 2]);
            a[3] = nbi_mul_f16x2_hi(a[3], hi[w % 2]);
        }
    }
};

struct nbi_tile_fp8 {
    nbi_u32x4 v[2];

    template <bool ONCE = true>
    NBI_DEV void load(const nbi_cuda_packed &p, uint32_t rt, uint32_t kt, uint32_t lane)
    {
        const char *at = static_cast<const char *>(p.data) + ((size_t)rt * p.n_kt + kt) * 1024;
        v[0] = nbi_load16<ONCE>(at + lane * 16);
        v[1] = nbi_load16<ONCE>(at + 512 + lane * 16);
    }

    NBI_DEV void fragment(uint32_t a[4], uint32_t w) const
    {
        nbi_fp8_codes(a, v[w / 2].v[w % 2 * 2]);
        nbi_fp8_codes(a + 2, v[w / 2].v[w % 2 * 2 + 1]);
    }
};

template <> struct nbi_tile<NBI_WEIGHT_FP8_BLOCK> : nbi_tile_fp8 {
};
template <> struct nbi_tile<NBI_WEIGHT_FP8_TENSOR> : nbi_tile_fp8 {
};

/* d += a b of one k-step in the weights' own product type. */
template <nbi_weight_kind KIND>
NBI_DEV void nbi_tile_mma(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    if (KIND == NBI_WEIGHT_BF16)
        nbi_mma_bf16(d, a, b);
    else
        nbi_mma_f16(d, a, b);
}

/* Block scales of chunk c for rows g and g+8 of row tile rt; 1 where the kind has none. */
template <nbi_weight_kind KIND>
NBI_DEV nbi_f32x2 nbi_tile_block_scale(const nbi_cuda_packed &p, uint32_t rt, uint32_t c)
{
    nbi_f32x2 one = {{1.0f, 1.0f}};
    if (KIND != NBI_WEIGHT_FP8_BLOCK) return one;
    const uint32_t n = (p.cols + 127u) / 128u;
    return static_cast<const nbi_f32x2 *>(p.scales)[(size_t)rt * n + c];
}

/* ---------------------------------------------------------------- activations to fragments */

/* Largest magnitude so far, as bits: infinity and NaN are above every number. */
NBI_DEV uint32_t nbi_amax_bits(uint32_t most, const nbi_f32x4 &x)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t b = nbi_bits(x.v[i]) & 0x7fffffffu;
        most = b > most ? b : most;
    }
    return most;
}

/* Over the four lanes of a token. */
NBI_DEV uint32_t nbi_quad_max(uint32_t x)
{
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
        const uint32_t other = __shfl_xor_sync(NBI_FULL_MASK, x, d);
        x = other > x ? other : x;
    }
    return x;
}

/* e of a chunk: 2^-e brings its largest magnitude into [2^14, 2^15). 0 for zeros and for chunks
 * that are not finite. */
NBI_DEV int nbi_chunk_exponent(uint32_t amax_bits)
{
    if (amax_bits == 0 || amax_bits >= 0x7f800000u) return 0;
    const int e = (int)(amax_bits >> 23) - 141;
    return e < -126 ? -126 : e;
}

/* Four neighbouring values of x to the B fragment: times `unit` = 2^-e in FP16, or BF16. */
template <nbi_weight_kind KIND>
NBI_DEV void nbi_x_fragment(uint32_t b[2], const nbi_f32x4 &x, float unit)
{
    if (KIND == NBI_WEIGHT_BF16) {
        b[0] = nbi_to_bf16x2(x.v[0], x.v[1]);
        b[1] = nbi_to_bf16x2(x.v[2], x.v[3]);
    } else {
        b[0] = nbi_to_f16x2(x.v[0] * unit, x.v[1] * unit);
        b[1] = nbi_to_f16x2(x.v[2] * unit, x.v[3] * unit);
    }
}

/* x[at ... at + 3] of a row of n values, zeros behind it. `fast`: the row is aligned to 16 bytes
 * and n is a multiple of 4. */
NBI_DEV nbi_f32x4 nbi_x_load(const float *row, uint32_t at, uint32_t n, bool fast)
{
    nbi_f32x4 x = {{0, 0, 0, 0}};
    if (fast) {
        if (at < n) x = *reinterpret_cast<const nbi_f32x4 *>(row + at);
        return x;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (at + i < n) x.v[i] = row[at + i];
    return x;
}

/* silu(gate) * up. The sum is never joined with the product inside expf: every kernel must round
 * alike. */
NBI_DEV float nbi_swiglu(float gate, float up)
{
    return gate / __fadd_rn(1.0f, expf(-gate)) * up;
}

/* nbi_x_load(), written. */
NBI_DEV void nbi_x_store(float *row, uint32_t at, uint32_t n, bool fast, const nbi_f32x4 &x)
{
    if (fast) {
        if (at < n) *reinterpret_cast<nbi_f32x4 *>(row + at) = x;
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (at + i < n) row[at + i] = x.v[i];
}

/* nbi_x_load(), read again even where the compiler knows the values. */
NBI_DEV nbi_f32x4 nbi_x_load_again(const float *row, uint32_t at, uint32_t n, bool fast)
{
    nbi_f32x4 x = {{0, 0, 0, 0}};
    if (fast) {
        if (at < n) x = nbi_load_again(row + at);
        return x;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (at + i < n) x.v[i] = *static_cast<const volatile float *>(row + at + i);
    return x;
}

__host__ __device__ inline bool nbi_x_fast(const void *x, uint32_t stride, uint32_t cols)
{
    return ((uintptr_t)x & 15u) == 0 && stride % 4 == 0 && cols % 4 == 0;
}

/* The chunk that begins at column `first` of the row of token g = lane / 4 as B fragments of its
 * k-steps. row NULL: zeros. Returns the token's e, in all four lanes of it. All lanes call. TWICE:
 * reads x again for the conversion, for kernels that lack 64 registers. */
template <nbi_weight_kind KIND, bool TWICE = false>
NBI_DEV int nbi_x_chunk(uint32_t b[][2], const float *row, uint32_t first, uint32_t n, bool fast)
{
    constexpr uint32_t STEPS = nbi_chunk_tiles(KIND) * NBI_TILE_STEPS;
    const uint32_t t = (uint32_t)nbi_lane() & 3u;
    nbi_f32x4 x[STEPS];
    uint32_t most = 0;
    const uint32_t end = row ? n : 0;
    if (TWICE) {
#pragma unroll
        for (uint32_t w = 0; w < STEPS; w++)
            most = nbi_amax_bits(most, nbi_x_load(row, first + 16 * w + 4 * t, end, fast));
    } else if (fast) { /* one branch, so that all loads go out together */
#pragma unroll
        for (uint32_t w = 0; w < STEPS; w++)
            x[w] = nbi_x_load(row, first + 16 * w + 4 * t, end, true);
    } else {
#pragma unroll
        for (uint32_t w = 0; w < STEPS; w++)
            x[w] = nbi_x_load(row, first + 16 * w + 4 * t, end, false);
    }
    if (!TWICE && KIND != NBI_WEIGHT_BF16) {
#pragma unroll
        for (uint32_t w = 0; w < STEPS; w++) most = nbi_amax_bits(most, x[w]);
    }
    int e = 0;
    if (KIND != NBI_WEIGHT_BF16) {
        most = nbi_quad_max(most);
        e = nbi_chunk_exponent(most);
    }
    const float unit = nbi_pow2(-e);
#pragma unroll
    for (uint32_t w = 0; w < STEPS; w++) {
        if (TWICE) x[w] = nbi_x_load_again(row, first + 16 * w + 4 * t, end, fast);
        nbi_x_fragment<KIND>(b[w], x[w], unit);
    }
    return e;
}

/* The block scale of 16 values as nbi_nvfp4_quantize_row() chooses it, by their largest magnitude.
 */
NBI_DEV float nbi_x_scale(uint32_t amax_bits, float input_scale)
{
    return nbi_from_e4m3(nbi_to_e4m3(nbi_float(amax_bits) / (6.0f * input_scale)));
}

/* Values rounded to NVFP4 as nbi_nvfp4_quantize_row() does it: code * block scale, exact in FP16;
 * input_scale is left out. */
NBI_DEV void nbi_x_round_to(nbi_f32x4 *x, float scale, float input_scale)
{
    const float step = scale * input_scale;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float v = step != 0 ? x->v[i] / step : 0, a = fabsf(v);
        const float size = a > 5.0f     ? 6.0f
                           : a >= 3.5f  ? 4.0f
                           : a > 2.5f   ? 3.0f
                           : a >= 1.75f ? 2.0f
                           : a > 1.25f  ? 1.5f
                           : a >= 0.75f ? 1.0f
                           : a > 0.25f  ? 0.5f
                                        : 0.0f;
        x->v[i] = (v < 0 ? -size : size) * scale;
    }
}

/* A quarter of 16 values, the four lanes of a token together. */
NBI_DEV void nbi_x_round(nbi_f32x4 *x, float input_scale)
{
    const uint32_t most = nbi_quad_max(nbi_amax_bits(0, *x));
    nbi_x_round_to(x, nbi_x_scale(most, input_scale), input_scale);
}

/* nbi_x_chunk() for NVFP4 activations: e is 0, and the row's sum still lacks input_scale. */
NBI_DEV void nbi_x_chunk_w4a4(uint32_t b[][2], const float *row, uint32_t first, uint32_t n,
                              bool fast, float input_scale)
{
    const uint32_t t = (uint32_t)nbi_lane() & 3u, end = row ? n : 0;
#pragma unroll
    for (uint32_t w = 0; w < NBI_CHUNK_COLS / 16; w++) {
        nbi_f32x4 x = nbi_x_load(row, first + 16 * w + 4 * t, end, fast);
        nbi_x_round(&x, input_scale);
        nbi_x_fragment<NBI_WEIGHT_NVFP4>(b[w], x, 1.0f);
    }
}

/* ---------------------------------------------------------------- sums */

/* y += p of a chunk for the two tokens of this lane's part of d: unit[j] = 2^e of token 2t + j.
 * block: of rows g and g+8, nbi_tile_block_scale(). */
NBI_DEV void nbi_chunk_add(float y[4], const float p[4], const float unit[2],
                           const nbi_f32x2 &block)
{
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = fmaf(p[i], unit[i % 2] * block.v[i / 2], y[i]);
}

/* ---------------------------------------------------------------- single values */

/* W[r][c] without the row's scale; rows as they lie in tiles. */
NBI_DEV float nbi_tile_value(const nbi_cuda_packed &p, uint32_t r, uint32_t c)
{
    if (p.kind == NBI_WEIGHT_F32) return static_cast<const float *>(p.data)[(size_t)r * p.cols + c];
    const size_t tile = (size_t)(r / 16) * p.n_kt + c / 64;
    const uint32_t g = r % 8, high = r / 8 % 2, w = c / 16 % 4, lane = g * 4 + c % 16 / 4;
    const uint32_t i = high + 2 * (c % 4 / 2), h = c % 2; /* register and half of the fragment */
    const char *at = static_cast<const char *>(p.data) + tile * nbi_tile_bytes(p.kind);
    if (p.kind == NBI_WEIGHT_NVFP4) {
        const uint32_t word = reinterpret_cast<const uint32_t *>(at)[lane * 4 + w];
        uint32_t a[4];
        nbi_nvfp4_codes(a, word);
        const uint32_t pair = i == 0 ? a[0] : i == 1 ? a[1] : i == 2 ? a[2] : a[3];
        const uint32_t s = static_cast<const uint8_t *>(p.scales)[tile * 64 + g * 8 + high * 4 + w];
        return nbi_from_f16((uint16_t)(pair >> 16 * h)) * nbi_from_f16((uint16_t)(s << 7));
    }
    if (p.kind == NBI_WEIGHT_BF16 || p.kind == NBI_WEIGHT_F16) {
        const uint16_t v =
            reinterpret_cast<const uint16_t *>(at)[((w * 32 + lane) * 4 + i) * 2 + h];
        return p.kind == NBI_WEIGHT_BF16 ? nbi_from_bf16(v) : nbi_from_f16(v);
    }
    uint32_t a[2];
    nbi_fp8_codes(
        a, reinterpret_cast<const uint32_t *>(at)[(w / 2 * 32 + lane) * 4 + w % 2 * 2 + i / 2]);
    const float v = nbi_from_f16((uint16_t)((i % 2 ? a[1] : a[0]) >> 16 * h));
    if (p.kind == NBI_WEIGHT_FP8_TENSOR) return v;
    const uint32_t n = (p.cols + 127u) / 128u;
    return v * static_cast<const float *>(p.scales)[((size_t)(r / 16) * n + c / 128) * 2 + high];
}

/* W[r][c], all scales included. */
NBI_DEV float nbi_tile_row_value(const nbi_cuda_packed &p, uint32_t r, uint32_t c)
{
    const float v = nbi_tile_value(p, r, c);
    return p.kind == NBI_WEIGHT_F32 ? v : v * p.row_scale[r];
}
