// NVFP4 weights of the laboratory: random codes and scales, packed forms, unpacking, one unit of
// work.
//
// A matrix is cut in tiles of 16 rows and chunks of 256 columns. One tile of one chunk is a unit of
// 2,304 contiguous bytes: 2,048 B of codes, then 256 B of scales. Codes: four parts of 64 columns,
// in a part 16 B per lane: word j is the lane's A fragment of mma m16n8k16 for k-step j. With g =
// lane / 4, t = lane % 4, that is rows g and g + 8, columns 16 j + 4 t .. + 3. Scales: 32 B per g,
// 8 B per part: one word for row g, one for row g + 8, each with the four k-steps of the part.
//
// Canonical sum. Activations of a chunk are scaled by 2^-e so that the largest magnitude lies in
// [2^14, 2^15), then rounded to FP16. The chunk's partial sum is 16 mma k-steps in ascending order
// from zero, weights being w * s * 2^-7 (exact in FP16). y = chunks in ascending order of
// fma(partial, 2^e, y); then times global * 2^7. Bits depend on nothing else.
#pragma once
#include "lab.h"
#include "ptx.cuh"
#include <cuda_fp16.h>

enum Unpack { U_NIB, U_PERM, U_E4M3, U_RAW };
static const char *const unpack_name[] = {"nibble", "permuted", "e4m3+cvt", "none (bytes)"};

constexpr int CHUNK = 256, UNIT = 2304;
constexpr uint32_t M_FP16 = 0x8E008E00, M_SCALE = 0x7F807F80;

// ---- the random matrices ----

// Matrices [expert][row][column]. gate_rows > 0: rows 0 .. gate_rows - 1 are gate, the rest up, and
// a tile holds 8 gate rows and the 8 up rows that belong to them.
struct Matrix {
    uint64_t seed;
    int tiles, chunks; // per expert
    int gate_rows;
};

__host__ __device__ inline int tile_row(const Matrix &m, int tile, int i)
{
    if (!m.gate_rows) return tile * 16 + i;
    return i < 8 ? tile * 8 + i : m.gate_rows + tile * 8 + i - 8;
}

// Eight codes of columns 8 k8 .. 8 k8 + 7.
__host__ __device__ inline uint32_t codes_at(const Matrix &m, int expert, int row, int k8)
{
    return (uint32_t)mix64(m.seed ^ ((uint64_t)expert << 40 | (uint64_t)row << 16 | (uint64_t)k8));
}

// UE4M3 byte: mostly 2^-3 .. 2, one in 64 anything from zero to 7.5.
__host__ __device__ inline uint32_t scale_at(const Matrix &m, int expert, int row, int group)
{
    uint64_t h = mix64(~m.seed ^ ((uint64_t)expert << 40 | (uint64_t)row << 16 | (uint64_t)group));
    return (h & 63) ? 0x20 + (uint32_t)(h >> 8) % 0x20 : (uint32_t)(h >> 8) % 0x50;
}

// ---- packing ----

// Four codes of one 16-bit half, in fragment order a0 .. a3. U_E4M3 is arranged by word, see below.
__host__ __device__ inline uint32_t pack_half(int mode, const uint32_t c[4])
{
    if (mode == U_NIB) return c[0] | c[1] << 4 | c[2] << 8 | c[3] << 12;
    // Permuted: signs at 15, 12, 14, 13, magnitudes at 11..9, 8..6, 5..3, 2..0.
    return (c[0] >> 3) << 15 | (c[0] & 7) << 9 | (c[1] >> 3) << 12 | (c[1] & 7) << 6 |
           (c[2] >> 3) << 14 | (c[2] & 7) << 3 | (c[3] >> 3) << 13 | (c[3] & 7);
}

// A byte with two codes: a as an E4M3 value in place, b spread over the bits that a leaves.
__host__ __device__ inline uint32_t pack_byte(uint32_t a, uint32_t b)
{
    return (a >> 3) << 7 | (a & 7) << 2 | (b >> 3) << 5 | (b >> 2 & 1) << 6 | (b & 3);
}

// lo and hi: the codes of the even and the odd column of each fragment register.
__host__ __device__ inline uint32_t pack_codes(int mode, const uint32_t lo[4], const uint32_t hi[4])
{
    if (mode == U_E4M3)
        return pack_byte(lo[0], lo[2]) | pack_byte(hi[0], hi[2]) << 8 |
               pack_byte(lo[1], lo[3]) << 16 | pack_byte(hi[1], hi[3]) << 24;
    return pack_half(mode, lo) | pack_half(mode, hi) << 16;
}

// The upper half of FP16(scale * 2^gap) without its sign: five exponent bits, three of mantissa.
__host__ __device__ inline uint32_t e5m3(uint32_t b, int gap)
{
    uint32_t e = b >> 3 & 15, m = b & 7;
    if (!e && !m) return 0;
    if (e) return (e + 8 + gap) << 3 | m;
    int h = m >= 4 ? 2 : m >= 2 ? 1 : 0;
    return (uint32_t)(h + 6 + gap) << 3 | ((m << (3 - h)) & 7);
}

__host__ __device__ inline uint32_t bswap16(uint32_t x)
{
    return (x << 8 | x >> 8) & 0xFFFF;
}

// Four scales of a row's part. Natural bytes for U_NIB; else E5M3, the even k-steps in place, the
// odd ones byte-swapped within the half.
__host__ __device__ inline uint32_t pack_scales(int mode, const uint32_t s[4])
{
    if (mode == U_NIB) return s[0] | s[1] << 8 | s[2] << 16 | s[3] << 24;
    int gap = mode == U_E4M3 ? -1 : 7;
    return e5m3(s[0], gap) << 7 | bswap16(e5m3(s[1], gap) << 7) |
           (e5m3(s[2], gap) << 7 | bswap16(e5m3(s[3], gap) << 7)) << 16;
}

// Word `i` (0 .. 575) of a unit.
__host__ __device__ inline uint32_t unit_word(int mode, const Matrix &m, int expert, int tile,
                                              int chunk, int i)
{
    uint32_t v[8];
    if (i < 512) {
        int part = i / 128, lane = i % 128 / 4, step = part * 4 + i % 4, t = lane % 4;
        for (int r = 0; r < 2; ++r) {
            int row = tile_row(m, tile, lane / 4 + 8 * r);
            uint32_t c = codes_at(m, expert, row, chunk * 32 + step * 2 + t / 2) >> (t % 2 * 16);
            for (int j = 0; j < 4; ++j) v[r * 4 + j] = c >> (4 * j) & 15;
        }
        uint32_t lo[4] = {v[0], v[4], v[2], v[6]}, hi[4] = {v[1], v[5], v[3], v[7]};
        return pack_codes(mode, lo, hi);
    }
    i -= 512;
    int row = tile_row(m, tile, i / 8 + i % 2 * 8), part = i % 8 / 2;
    for (int j = 0; j < 4; ++j) v[j] = scale_at(m, expert, row, chunk * 16 + part * 4 + j);
    return pack_scales(mode, v);
}

static __global__ void pack_kernel(int mode, Matrix m, int experts, uint32_t *out)
{
    size_t n = (size_t)experts * m.tiles * m.chunks * (UNIT / 4);
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        size_t unit = i / (UNIT / 4), tile = unit / m.chunks;
        out[i] = unit_word(mode, m, (int)(tile / m.tiles), (int)(tile % m.tiles),
                           (int)(unit % m.chunks), (int)(i % (UNIT / 4)));
    }
}

static inline size_t packed_bytes(const Matrix &m, int experts)
{
    return (size_t)experts * m.tiles * m.chunks * UNIT;
}

static inline void pack(int mode, const Matrix &m, int experts, uint8_t *out)
{
    pack_kernel<<<sm_count() * 4, 512>>>(mode, m, experts, (uint32_t *)out);
    CK(cudaGetLastError());
    CK(cudaDeviceSynchronize());
}

// ---- unpacking ----

// Integer part for the FP16 targets; the host checks it too. Values come out as w * 2^-14.
template <int U> __host__ __device__ inline void unpack_fp16(uint32_t w, uint32_t a[4])
{
    if (U == U_NIB) {
        const uint32_t S = 0x80008000, M = 0x0E000E00;
        a[0] = (w << 12 & S) | (w << 9 & M);
        a[1] = (w << 8 & S) | (w << 5 & M);
        a[2] = (w << 4 & S) | (w << 1 & M);
        a[3] = (w & S) | (w >> 3 & M);
    } else {
        a[0] = w & M_FP16;
        a[1] = w << 3 & M_FP16;
        a[2] = (w & 0x40384038) * 66u & M_FP16;  // times 2^6 + 2^1: magnitude and sign at once
        a[3] = (w & 0x20072007) * 516u & M_FP16; // times 2^9 + 2^2
    }
}

// E4M3 bytes worth w * 2^-6: va holds a0 and a1, vb a2 and a3.
__host__ __device__ inline void unpack_e4m3(uint32_t w, uint32_t *va, uint32_t *vb)
{
    *va = w & 0x9C9C9C9C;
    *vb = (w << 2 & 0x8C8C8C8C) | (w >> 2 & 0x10101010);
}

__device__ inline uint32_t e4m3x2_to_half2(uint32_t v)
{
    uint32_t r;
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, lo; }"
        : "=r"(r)
        : "r"(v));
    return r;
}

__device__ inline uint32_t e4m3x2_hi_to_half2(uint32_t v)
{
    uint32_t r;
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, hi; }"
        : "=r"(r)
        : "r"(v));
    return r;
}

template <int U> __device__ inline void unpack_word(uint32_t w, uint32_t a[4])
{
    if (U == U_RAW) {
        for (int j = 0; j < 4; ++j) a[j] = w;
    } else if (U == U_E4M3) {
        uint32_t va, vb;
        unpack_e4m3(w, &va, &vb);
        a[0] = e4m3x2_to_half2(va);
        a[1] = e4m3x2_hi_to_half2(va);
        a[2] = e4m3x2_to_half2(vb);
        a[3] = e4m3x2_hi_to_half2(vb);
    } else {
        unpack_fp16<U>(w, a);
    }
}

__device__ inline __half2 as_half2(uint32_t v)
{
    __half2 h;
    memcpy(&h, &v, 4);
    return h;
}

__device__ inline uint32_t as_u32(__half2 h)
{
    uint32_t v;
    memcpy(&v, &h, 4);
    return v;
}

// Scales of k-steps 0 and 2 in *even, of 1 and 3 in *odd.
template <int U> __device__ inline void unpack_scales(uint32_t w, __half2 *even, __half2 *odd)
{
    if (U == U_NIB) { // UE4M3 under FP16 is scale * 2^-8; 2^15 more gives * 2^7
        const __half2 up = as_half2(0x78007800);
        *even = __hmul2(as_half2(w << 7 & M_SCALE), up);
        *odd = __hmul2(as_half2(w >> 1 & M_SCALE), up);
    } else {
        *even = as_half2(w & M_SCALE);
        *odd = as_half2(__byte_perm(w, 0, 0x2301) & M_SCALE);
    }
}

__device__ inline void mma16816(float d[4], const uint32_t a[4], uint2 b)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// One part (64 columns): codes c, scale words of rows g and g + 8. x[nt] points at the lane's row
// of activations, at column 4 t of the part. AFTER: scale applied to the sum of each k-step in
// FP32.
template <int U, bool AFTER, int NT>
__device__ inline void part_mma(uint4 c, uint32_t sg, uint32_t sg8, const __half *const x[NT],
                                int column, float acc[NT][4])
{
    __half2 s[2][2];
    unpack_scales<U>(sg, &s[0][0], &s[0][1]);
    unpack_scales<U>(sg8, &s[1][0], &s[1][1]);
    const uint32_t w[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
        unpack_word<U>(w[j], a);
        __half2 s0 = j / 2 ? __high2half2(s[0][j % 2]) : __low2half2(s[0][j % 2]);
        __half2 s1 = j / 2 ? __high2half2(s[1][j % 2]) : __low2half2(s[1][j % 2]);
        if (!AFTER && U != U_RAW) {
            a[0] = as_u32(__hmul2(as_half2(a[0]), s0));
            a[1] = as_u32(__hmul2(as_half2(a[1]), s1));
            a[2] = as_u32(__hmul2(as_half2(a[2]), s0));
            a[3] = as_u32(__hmul2(as_half2(a[3]), s1));
        }
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            uint2 b = *(const uint2 *)(x[nt] + column + 16 * j);
            if (AFTER) {
                float d[4] = {0, 0, 0, 0}, f0 = __low2float(s0), f1 = __low2float(s1);
                mma16816(d, a, b);
                acc[nt][0] = fmaf(d[0], f0, acc[nt][0]);
                acc[nt][1] = fmaf(d[1], f0, acc[nt][1]);
                acc[nt][2] = fmaf(d[2], f1, acc[nt][2]);
                acc[nt][3] = fmaf(d[3], f1, acc[nt][3]);
            } else {
                mma16816(acc[nt], a, b);
            }
        }
    }
}

// ---- activations ----

// Bytes from one row of FP16 activations to the next: 32 more than the data, so that the 8-byte
// reads of four rows fall into different banks.
__host__ __device__ constexpr int x_pitch(int columns)
{
    return columns * 2 + 32;
}

// One warp scales and rounds one chunk. Returns 2^e. `x` was possibly written by another block of
// the same launch, so it is read from L2.
__device__ inline float normalize_chunk(const float *x, __half *out)
{
    int lane = threadIdx.x % 32;
    float4 v[2];
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        v[i] = __ldcg((const float4 *)x + lane + 32 * i);
        float m = fmaxf(fmaxf(fabsf(v[i].x), fabsf(v[i].y)), fmaxf(fabsf(v[i].z), fabsf(v[i].w)));
        top = max(top, __float_as_uint(m));
    }
    top = __reduce_max_sync(0xFFFFFFFF, top);
    int e = max((int)(top >> 23) - 127, -112) - 14;
    float down = __uint_as_float((uint32_t)(127 - e) << 23);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        __half2 h[2] = {__floats2half2_rn(v[i].x * down, v[i].y * down),
                        __floats2half2_rn(v[i].z * down, v[i].w * down)};
        *(uint2 *)(out + (lane + 32 * i) * 4) = make_uint2(as_u32(h[0]), as_u32(h[1]));
    }
    return __uint_as_float((uint32_t)(127 + e) << 23);
}
