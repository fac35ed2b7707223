// Truth for the laboratory's NVFP4 programs: values of the formats, a float64 oracle, and an
// emulation on the host of every packed form, so that an error of layout shows under its own name.
#pragma once
#include "fp4.cuh"

static inline double e2m1_value(uint32_t c)
{
    static const double v[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return c & 8 ? -v[c & 7] : v[c & 7];
}

static inline double e4m3_value(uint32_t b)
{
    double v = b & 0x78 ? ldexp(8 + (b & 7), (int)(b >> 3 & 15) - 10) : ldexp(b & 7, -9);
    return b & 0x80 ? -v : v;
}

// Row of the matrix times x in float64.
static inline double oracle_row(const Matrix &m, int expert, int row, const float *x)
{
    double y = 0;
    for (int k = 0; k < m.chunks * CHUNK; k += 16) {
        double group = 0;
        for (int h = 0; h < 2; ++h) {
            uint32_t c = codes_at(m, expert, row, k / 8 + h);
            for (int j = 0; j < 8; ++j) group += e2m1_value(c >> (4 * j) & 15) * x[k + 8 * h + j];
        }
        y += group * e4m3_value(scale_at(m, expert, row, k / 16));
    }
    return y;
}

static inline double fp16_value(uint32_t h)
{
    double v =
        h & 0x7C00 ? ldexp(1024 + (h & 1023), (int)(h >> 10 & 31) - 25) : ldexp(h & 1023, -24);
    return h & 0x8000 ? -v : v;
}

// FP16 bits of the scale of k-step j, as unpack_scales makes them; its value is scale *
// 2^scale_gap.
static inline uint32_t scale_half(int mode, uint32_t w, int j)
{
    uint32_t swapped = bswap16(w & 0xFFFF) | bswap16(w >> 16) << 16;
    uint32_t even = (mode == U_NIB ? w << 7 : w) & M_SCALE;
    uint32_t odd = (mode == U_NIB ? w >> 1 : swapped) & M_SCALE;
    return (j % 2 ? odd : even) >> (j / 2 * 16) & 0xFFFF;
}

static inline int scale_gap(int mode)
{
    return mode == U_NIB ? -8 : mode == U_PERM ? 7 : -1;
}

// One unit of each form, as a warp would read it: lanes, parts, k-steps and scales against the
// matrix.
static inline void check_unit(const Matrix &m, int expert, int tile, int chunk)
{
    for (int mode = 0; mode <= U_E4M3; ++mode) {
        std::vector<uint32_t> u;
        for (int i = 0; i < UNIT / 4; ++i) u.push_back(unit_word(mode, m, expert, tile, chunk, i));
        int bad = 0;
        for (int lane = 0; lane < 32; ++lane)
            for (int step = 0; step < 16; ++step) {
                int g = lane / 4, t = lane % 4, part = step / 4, j = step % 4;
                uint32_t a[4], w = u[(size_t)(part * 128 + lane * 4 + j)];
                if (mode == U_NIB) unpack_fp16<U_NIB>(w, a);
                if (mode == U_PERM) unpack_fp16<U_PERM>(w, a);
                if (mode == U_E4M3) unpack_e4m3(w, &a[0], &a[2]);
                for (int r = 0; r < 4;
                     ++r) { // register r: row g + 8 (r & 1), slots 2t, 2t + 1 (+ 8)
                    int row = tile_row(m, tile, g + r % 2 * 8),
                        k = chunk * 256 + step * 16 + 4 * t + r / 2 * 2;
                    uint32_t s = scale_half(mode, u[(size_t)(512 + g * 8 + part * 2 + r % 2)], j);
                    for (int odd = 0; odd < 2; ++odd) {
                        uint32_t c =
                            codes_at(m, expert, row, (k + odd) / 8) >> ((k + odd) % 8 * 4) & 15;
                        double want = e2m1_value(c) * e4m3_value(scale_at(m, expert, row, k / 16));
                        double v =
                            mode == U_E4M3
                                ? ldexp(e4m3_value(a[r / 2 * 2] >> (r % 2 * 16 + odd * 8) & 255), 6)
                                : ldexp(fp16_value(a[r] >> (16 * odd) & 0xFFFF), 14);
                        bad += v * ldexp(fp16_value(s), -scale_gap(mode)) != want;
                    }
                }
            }
        expect(!bad, "packing, form \"%s\": %d of 4096 weights of a unit are wrong",
               unpack_name[mode], bad);
    }
}

// Emulates every packed form on the host, all codes in all places, all scales.
static inline void check_packing()
{
    check_unit({5, 96, 8, 768}, 3, 41, 6); // gate and up rows interleaved
    check_unit({6, 128, 3, 0}, 2, 127, 2);
    for (int mode = 0; mode <= U_E4M3; ++mode) {
        int bad = 0, bad_scale = 0;
        for (uint32_t n = 0; n < 20000; ++n) {
            uint32_t lo[4], hi[4], r = (uint32_t)mix64(n), a[4];
            for (int j = 0; j < 4; ++j) {
                lo[j] = r >> (8 * j) & 15;
                hi[j] = r >> (8 * j + 4) & 15;
            }
            uint32_t w = pack_codes(mode, lo, hi);
            if (mode == U_NIB) unpack_fp16<U_NIB>(w, a);
            if (mode == U_PERM) unpack_fp16<U_PERM>(w, a);
            if (mode == U_E4M3) unpack_e4m3(w, &a[0], &a[2]);
            for (int j = 0; j < 4; ++j) {
                double l, h;
                if (mode == U_E4M3) {
                    uint32_t v = a[j / 2 * 2] >> (j % 2 * 16);
                    l = ldexp(e4m3_value(v & 255), 6);
                    h = ldexp(e4m3_value(v >> 8 & 255), 6);
                } else {
                    l = ldexp(fp16_value(a[j] & 0xFFFF), 14);
                    h = ldexp(fp16_value(a[j] >> 16), 14);
                }
                bad += l != e2m1_value(lo[j]) || h != e2m1_value(hi[j]);
            }
        }
        for (uint32_t b = 0; b < 0x7F; ++b) {
            uint32_t s[4] = {b, (b + 1) % 0x7F, (b + 50) % 0x7F, (b + 99) % 0x7F};
            uint32_t w = pack_scales(mode, s);
            for (int j = 0; j < 4; ++j)
                bad_scale +=
                    ldexp(fp16_value(scale_half(mode, w, j)), -scale_gap(mode)) != e4m3_value(s[j]);
        }
        expect(!bad, "packing, form \"%s\": %d codes unpack to another value", unpack_name[mode],
               bad);
        expect(!bad_scale, "packing, form \"%s\": %d scales unpack to another value",
               unpack_name[mode], bad_scale);
    }
}
