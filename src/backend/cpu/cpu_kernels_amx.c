/* Kernel table of AMX: products of BF16 rows with float32 vectors on BF16 tiles; everything else is
 * the AVX-512 body.
 *
 * A float32 vector x goes in as two BF16 vectors, hi = bf16(x) and lo = bf16(x - hi): their
 * products are summed in separate tiles and added at the end, which keeps 16 bits of x (BF16 rows
 * are exact). Which path a product takes depends on its row type and width only, and a tile's rows
 * and columns do not meet, so bits do not depend on neighbours. A `mix` is one sum per call: groups
 * of rows are not split (max_group 1).
 *
 * Source: Intel Architecture Instruction Set Extensions Programming Reference, chapter on AMX
 * (TDPBF16PS: C[m][n] += A[m][2k] B[k][2n] + A[m][2k+1] B[k][2n+1]). */
#include "backend/cpu/cpu_kernels.h"
#include "backend/cpu/cpu_vectors_avx512.h"

#include "backend/cpu/cpu_kernels_simd.inc"

#define TK 32u /* BF16 values along the sum per tile */
#define TR 16u /* rows of a tile */

/* Tiles: 0-3 sums, 4-7 operands. a_rows rows of A and C; B always has 16. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} tile_config;

static void configure(uint32_t a_rows)
{
    _Alignas(64) tile_config c = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        c.colsb[t] = 64;
        c.rows[t] = (uint8_t)(t < 6 ? a_rows : TR);
    }
    _tile_loadconfig(&c);
}

/* 16 floats to hi and lo. */
static inline void split_bf16(__m256i *hi, __m256i *lo, __m512 x)
{
    const __m256bh h = _mm512_cvtneps_pbh(x);
    const __m512 back =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16));
    *hi = (__m256i)h;
    *lo = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x, back));
}

/* hi[r * ld + c], lo likewise, of 32 values of one row; values behind n are zero. */
static inline void split_row(uint16_t *hi, uint16_t *lo, const float *x, uint32_t n)
{
    __m256i h[2], l[2];
    split_bf16(&h[0], &l[0], n >= 16 ? v_load(x) : v_load_n(x, n));
    split_bf16(&h[1], &l[1],
               n >= 32  ? v_load(x + 16)
               : n > 16 ? v_load_n(x + 16, n - 16)
                        : v_zero());
    _mm512_storeu_si512(hi, _mm512_inserti64x4(_mm512_castsi256_si512(h[0]), h[1], 1));
    _mm512_storeu_si512(lo, _mm512_inserti64x4(_mm512_castsi256_si512(l[0]), l[1], 1));
}

/* Transposes 16 x 16 32-bit values in place. */
static inline void transpose16(__m512i r[16])
{
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; k++) {
            r[i + 2 * k] = _mm512_unpacklo_epi64(t[i + k], t[i + 2 + k]);
            r[i + 2 * k + 1] = _mm512_unpackhi_epi64(t[i + k], t[i + 2 + k]);
        }
    /* r[4 g + c] holds column c of each quarter of rows 4 g .. 4 g + 3 */
    for (int c = 0; c < 4; c++) {
        const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        const __m512i e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(a, d, 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
        t[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

/* ---------------------------------------------------------------- dots */

/* Up to 16 rows of x as B tiles [n / 32][16 pairs][16 rows of x][2]. */
static void pack_x(uint32_t *hi, uint32_t *lo, const float *x, size_t ldx, uint32_t n_x, uint32_t n)
{
    for (uint32_t c = 0; c < n; c += TK) {
        _Alignas(64) uint16_t h[TK], l[TK];
        __m512i rh[16], rl[16];
        for (uint32_t i = 0; i < TR; i++) {
            rh[i] = rl[i] = _mm512_setzero_si512();
            if (i >= n_x) continue;
            split_row(h, l, x + i * ldx + c, TK);
            rh[i] = _mm512_load_si512(h);
            rl[i] = _mm512_load_si512(l);
        }
        transpose16(rh);
        transpose16(rl);
        for (uint32_t k = 0; k < TR; k++) {
            _mm512_store_si512(hi + (c / TK * TR + k) * TR, rh[k]);
            _mm512_store_si512(lo + (c / TK * TR + k) * TR, rl[k]);
        }
    }
}

/* 16 matrix rows as an A operand: where they lie when they are evenly spaced, else copied to buf
 * (rows that lack are zero). */
static const uint8_t *find_a(uint8_t *buf, size_t *stride, const void *const *rows, uint32_t n_rows,
                             uint32_t n)
{
    const uint8_t *first = rows[0];
    if (n_rows >= TR) {
        const ptrdiff_t step = (const uint8_t *)rows[1] - first;
        uint32_t i = 2;
        while (i < TR && (const uint8_t *)rows[i] - first == (ptrdiff_t)i * step) i++;
        if (i == TR) {
            *stride = (size_t)step;
            return first;
        }
    }
    *stride = (size_t)n * 2;
    for (uint32_t i = 0; i < TR; i++) {
        if (i < n_rows)
            memcpy(buf + i * *stride, rows[i], *stride);
        else
            memset(buf + i * *stride, 0, *stride);
    }
    return buf;
}

/* Sums of one tile pair (hi, lo), scaled and turned: out[x row][matrix row]. */
static void store_dots(float *out, size_t ldo, const float *hi, const float *lo, uint32_t n_x,
                       uint32_t n_rows, float scale)
{
    __m512i r[16];
    for (uint32_t j = 0; j < TR; j++)
        r[j] = _mm512_castps_si512(
            v_mul(v_add(v_load(hi + j * TR), v_load(lo + j * TR)), v_set1(scale)));
    transpose16(r);
    for (uint32_t i = 0; i < n_x; i++)
        v_store_n(out + i * ldo, _mm512_castsi512_ps(r[i]), n_rows < TR ? n_rows : TR);
}

/* 32 matrix rows x 16 rows of x. */
static void dots_block(float *out, size_t ldo, const uint32_t *hi, const uint32_t *lo, uint32_t n_x,
                       const void *const *rows, uint32_t n_rows, uint32_t n, float scale)
{
    _Alignas(64) uint8_t copy[2][TR * NBI_CPU_WIDTH_MAX * 2];
    _Alignas(64) float sums[4][TR * TR];
    const bool two = n_rows > TR;
    size_t s0, s1 = 0;
    const uint8_t *a0 = find_a(copy[0], &s0, rows, n_rows, n), *a1 = a0;
    if (two) a1 = find_a(copy[1], &s1, rows + TR, n_rows - TR, n);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t c = 0; c < n; c += TK) {
        _tile_loadd(6, hi + c / TK * TR * TR, 64);
        _tile_loadd(7, lo + c / TK * TR * TR, 64);
        _tile_loadd(4, a0 + c * 2, s0);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, a1 + c * 2, s1);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    store_dots(out, ldo, sums[0], sums[1], n_x, n_rows, scale);
    if (!two) return;
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    store_dots(out + TR, ldo, sums[2], sums[3], n_x, n_rows - TR, scale);
}

static void dots_amx(float *out, size_t ldo, const float *x, size_t ldx, uint32_t n_x,
                     const void *const *rows, nbi_dtype dtype, uint32_t n_rows, uint32_t n,
                     float scale)
{
    if (dtype != NBI_BF16 || n % TK) {
        dots(out, ldo, x, ldx, n_x, rows, dtype, n_rows, n, scale);
        return;
    }
    NB_ASSERT(n <= NBI_CPU_WIDTH_MAX);
    _Alignas(64) uint32_t hi[NBI_CPU_WIDTH_MAX / 2 * TR], lo[NBI_CPU_WIDTH_MAX / 2 * TR];
    configure(TR);
    for (uint32_t i = 0; i < n_x; i += TR) {
        const uint32_t ni = n_x - i < TR ? n_x - i : TR;
        pack_x(hi, lo, x + i * ldx, ldx, ni, n);
        for (uint32_t j = 0; j < n_rows; j += 2 * TR)
            dots_block(out + i * ldo + j, ldo, hi, lo, ni, rows + j,
                       n_rows - j < 2 * TR ? n_rows - j : 2 * TR, n, scale);
    }
    _tile_release();
}

/* ---------------------------------------------------------------- mix */

#define MIX_ROWS 256u /* matrix rows per pass: bounds the packed operands */
#define MIX_X    64u  /* rows of p per pass */

/* Columns [c, c + 32) of 32 matrix rows as two B tiles: [16 pairs of rows][16 columns][2]. The
 * unpacking leaves columns 0-3 8-11 16-19 24-27 in the first tile, the others in the second. */
static void pack_rows(uint16_t *to, const void *const *rows, uint32_t n_rows, uint32_t c)
{
    for (uint32_t k = 0; k < TR; k++) {
        const __m512i zero = _mm512_setzero_si512();
        const __m512i a =
            2 * k < n_rows ? _mm512_loadu_si512((const uint16_t *)rows[2 * k] + c) : zero;
        const __m512i b =
            2 * k + 1 < n_rows ? _mm512_loadu_si512((const uint16_t *)rows[2 * k + 1] + c) : zero;
        _mm512_store_si512(to + k * TK, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + TR * TK + k * TK, _mm512_unpackhi_epi16(a, b));
    }
}

/* out[i][0, 32) += the four sum tiles (hi and lo of both column sets), back in natural order. */
static void add_mixed(float *out, size_t ldo, float sums[4][TR * TR], uint32_t n_p)
{
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (uint32_t i = 0; i < n_p; i++) {
        const vf a = v_add(v_load(sums[0] + i * TR), v_load(sums[1] + i * TR));
        const vf b = v_add(v_load(sums[2] + i * TR), v_load(sums[3] + i * TR));
        float *o = out + i * ldo;
        v_store(o, v_add(v_load(o), _mm512_permutex2var_ps(a, first, b)));
        v_store(o + TR, v_add(v_load(o + TR), _mm512_permutex2var_ps(a, second, b)));
    }
}

/* At most MIX_ROWS matrix rows and MIX_X rows of p, in tiles of `height` rows. */
static void mix_pass(float *out, size_t ldo, const float *p, size_t ldp, uint32_t n_p,
                     const void *const *rows, uint32_t n_rows, uint32_t n, uint32_t height)
{
    _Alignas(64) uint16_t hi[MIX_X][MIX_ROWS], lo[MIX_X][MIX_ROWS];
    _Alignas(64) uint16_t strip[MIX_ROWS / TK][2 * TR * TK];
    _Alignas(64) float sums[4][TR * TR];
    const uint32_t steps = (n_rows + TK - 1) / TK, tiles = (n_p + height - 1) / height;
    for (uint32_t i = 0; i < tiles * height; i++)
        for (uint32_t k = 0; k < steps; k++)
            if (i < n_p)
                split_row(&hi[i][k * TK], &lo[i][k * TK], p + i * ldp + k * TK, n_rows - k * TK);
            else {
                memset(&hi[i][k * TK], 0, TK * 2);
                memset(&lo[i][k * TK], 0, TK * 2);
            }
    for (uint32_t c = 0; c < n; c += TK) {
        for (uint32_t k = 0; k < steps; k++) pack_rows(strip[k], rows + k * TK, n_rows - k * TK, c);
        for (uint32_t i = 0; i < n_p; i += height) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (uint32_t k = 0; k < steps; k++) {
                _tile_loadd(4, &hi[i][k * TK], sizeof hi[0]);
                _tile_loadd(5, &lo[i][k * TK], sizeof lo[0]);
                _tile_loadd(6, strip[k], 64);
                _tile_loadd(7, strip[k] + TR * TK, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            add_mixed(out + i * ldo + c, ldo, sums, n_p - i < height ? n_p - i : height);
        }
    }
}

static void mix_amx(float *out, size_t ldo, const float *p, size_t ldp, uint32_t n_p,
                    const void *const *rows, nbi_dtype dtype, uint32_t n_rows, uint32_t n)
{
    if (dtype != NBI_BF16 || n % TK) {
        mix(out, ldo, p, ldp, n_p, rows, dtype, n_rows, n);
        return;
    }
    for (uint32_t i = 0; i < n_p; i += MIX_X) {
        const uint32_t ni = n_p - i < MIX_X ? n_p - i : MIX_X;
        /* Tiles of equal height: the time of a tile product is that of its rows. */
        /* cppcheck-suppress zerodiv ; ni is 1 or more: the loop ends at n_p */
        const uint32_t tiles = (ni + TR - 1) / TR, height = (ni + tiles - 1) / tiles;
        configure(height);
        for (uint32_t j = 0; j < n_rows; j += MIX_ROWS)
            mix_pass(out + i * ldo, ldo, p + i * ldp + j, ldp, ni, rows + j,
                     n_rows - j < MIX_ROWS ? n_rows - j : MIX_ROWS, n, height);
    }
    _tile_release();
}

const nbi_cpu_kernels nbi_cpu_kernels_amx = {
    .tile = TR,
    .max_group = 1,
    .dots = dots_amx,
    .mix = mix_amx,
    .product = product,
    .codes_bf16 = codes_bf16,
    .max = max_of,
    .exp_sum = exp_sum,
    .log_sum = log_sum,
    .exp_to = exp_to,
    .relu_add = relu_add,
    .add_squares = add_squares,
    .scale_weight = scale_weight,
    .swiglu = swiglu,
};
