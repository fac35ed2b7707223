/* The absorbing and the expanding product of MLA for batches whose blocks fill the device: a block
 * has 64 rows, so that kv_b is read once for all of them, and a warp 32 x 32 of the products, so
 * that matrix units and not shared memory are what they wait for. The bits are those of
 * mla_absorb.h and of attention_mla.cu. Callers: attention_mla.cu. */
#pragma once

#include "backend/cuda/mla_absorb.h"

#define NBI_MLA_MANY_ROWS    64u
#define NBI_MLA_MANY_THREADS 256u
#define NBI_MLA_MANY_COLUMNS 256u /* of W_UK per block */
#define NBI_MLA_MANY_OUTPUTS 128u /* of W_UV per block */
#define NBI_MLA_MANY_CHUNK   128u /* columns of W_UV and of x that arrive together */
#define NBI_MLA_MANY_CHUNKS  4    /* the last has all that is left */

/* 32 x 32 of a warp: [16 values of kv_b][k-steps in turn][8 rows][mma]. */
struct nbi_mla_warp_sums {
    float d[2][NBI_MLA_SUMS][4][4];
};

/* Values m0 ... m0 + 31 of rows r0 ... r0 + 31 of n. */
NBI_DEV void nbi_mla_store_warp(const nbi_mla_warp_sums &x, float *y, size_t y_row, uint32_t r0,
                                uint32_t n, uint32_t m0, uint32_t most, float scale)
{
    const uint32_t rows = n > r0 ? n - r0 : 0;
#pragma unroll
    for (uint32_t m = 0; m < 2; m++)
        nbi_mla_store<4>(x.d[m], y + r0 * y_row, y_row, rows, m0 + 16 * m, most, scale);
}

/* ---------------------------------------------------------------- absorb */

constexpr uint32_t nbi_mla_many_row = NBI_MLA_MANY_COLUMNS + 8; /* of W_UK in shared memory */

inline size_t nbi_mla_absorb_many_shared(uint32_t nope)
{
    return (nope * nbi_mla_many_row + 2 * NBI_MLA_MANY_ROWS * (nope + NBI_MLA_ABSORB_PAD)) *
           sizeof(uint16_t);
}

/* Columns [c0, c0 + 128) of the block's part of W_UK are a group of copies. */
NBI_DEV void nbi_mla_many_ask(const nbi_mla_product &a, uint32_t h, uint32_t col0, uint32_t c0,
                              uint16_t *w)
{
    const uint16_t *from = static_cast<const uint16_t *>(a.w) + (size_t)h * (a.nope + a.v) * a.lora;
    for (uint32_t i = threadIdx.x; i < a.nope * 16; i += NBI_MLA_MANY_THREADS) {
        const uint32_t row = i / 16, c = c0 + i % 16 * 8;
        const bool take = col0 + c < a.lora;
        nbi_copy_async(w + row * nbi_mla_many_row + c,
                       take ? from + (size_t)row * a.lora + col0 + c : from, take);
    }
    nbi_copy_commit();
}

/* Pairs of the rotated part of the queries, i, i + NBI_MLA_MANY_THREADS and so on of n: on their
 * way while halves are made. As nbi_mla_copy_rope(). */
struct nbi_mla_rope_pairs {
    float u[4], v[4];
};

/* Pair `at` of n: of which row, at which columns of it. */
struct nbi_mla_rope_place {
    uint32_t r, j, iu, iv;
};

template <bool APPEND>
NBI_DEV bool nbi_mla_rope_find(nbi_mla_rope_place *p, const nbi_mla_rows &append, uint32_t n_angles,
                               uint32_t at, uint32_t n)
{
    p->r = at / n_angles;
    p->j = at % n_angles;
    if (at < n) nbi_mla_rope_columns<APPEND>(append, p->j, &p->iu, &p->iv);
    return at < n;
}

/* x: at the rotated part of the first row, which is row r0 of the batch. */
template <bool APPEND>
NBI_DEV void nbi_mla_rope_load(nbi_mla_rope_pairs &p, const nbi_mla_rows &append, uint32_t n_angles,
                               const float *x, size_t x_row, uint32_t r0, uint32_t i, uint32_t n)
{
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        nbi_mla_rope_place at;
        if (!nbi_mla_rope_find<APPEND>(&at, append, n_angles, i + k * NBI_MLA_MANY_THREADS, n))
            continue;
        p.u[k] = x[at.r * x_row + at.iu];
        p.v[k] = x[at.r * x_row + at.iv];
        if (APPEND) nbi_rope_turn(append.rope, r0 + at.r, at.j, &p.u[k], &p.v[k]);
    }
}

template <bool APPEND>
NBI_DEV void nbi_mla_rope_store(const nbi_mla_rope_pairs &p, const nbi_mla_rows &append,
                                uint32_t n_angles, float *y, size_t y_row, uint32_t i, uint32_t n)
{
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        nbi_mla_rope_place at;
        if (!nbi_mla_rope_find<APPEND>(&at, append, n_angles, i + k * NBI_MLA_MANY_THREADS, n))
            continue;
        y[at.r * y_row + at.iu] = p.u[k];
        y[at.r * y_row + at.iv] = p.v[k];
    }
}

/* w: at the warp's first column; hi, lo: at its first row. */
NBI_DEV void nbi_mla_absorb_warp(nbi_mla_warp_sums &x, const uint16_t *w, const uint16_t *hi,
                                 const uint16_t *lo, uint32_t nope)
{
    const uint32_t lane = nbi_lane(), stride = nope + NBI_MLA_ABSORB_PAD;
    const uint16_t *w_at =
        w + ((lane & 7) + (lane >> 4) * 8) * nbi_mla_many_row + (lane >> 3 & 1) * 8;
    const uint16_t *x_at = (lane < 16 ? hi : lo) + (lane & 7) * stride + (lane >> 3 & 1) * 8;
    x = {};
    for (uint32_t k0 = 0; k0 < nope; k0 += 16 * NBI_MLA_SUMS)
#pragma unroll
        for (uint32_t i = 0; i < NBI_MLA_SUMS; i++) {
            const uint32_t k = k0 + 16 * i;
            if (k >= nope) break;
            uint32_t f[2][4], b[4][4]; /* b: upper halves, lower */
#pragma unroll
            for (uint32_t m = 0; m < 2; m++)
                nbi_ldmatrix_trans(f[m], w_at + k * nbi_mla_many_row + 16 * m);
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) nbi_ldmatrix(b[j], x_at + 8 * j * stride + k);
#pragma unroll
            for (uint32_t lower = 0; lower < 2; lower++)
#pragma unroll
                for (uint32_t j = 0; j < 4; j++)
#pragma unroll
                    for (uint32_t m = 0; m < 2; m++)
                        nbi_mma_bf16(x.d[m][i][j], f[m], b[j] + 2 * lower);
        }
}

/* ql = qn . W_UK for one head, NBI_MLA_MANY_COLUMNS columns from col0 on, and NBI_MLA_MANY_ROWS
 * rows from r0 on. As nbi_mla_absorb(). */
template <bool APPEND>
NBI_DEV void nbi_mla_absorb_many(const nbi_mla_product &a, const nbi_mla_rows &append, uint32_t h,
                                 uint32_t col0, uint32_t r0)
{
    const uint32_t stride = a.nope + NBI_MLA_ABSORB_PAD, warp = threadIdx.x / NBI_WARP;
    uint16_t *w = nbi_shared<uint16_t>(); /* [nope][nbi_mla_many_row] */
    uint16_t *hi = w + a.nope * nbi_mla_many_row, *lo = hi + NBI_MLA_MANY_ROWS * stride;
    nbi_mla_many_ask(a, h, col0, 0, w);
    nbi_mla_many_ask(a, h, col0, 128, w);
    nbi_wait_before();
    nbi_let_next();
    const uint32_t n = a.n_rows - r0 < NBI_MLA_MANY_ROWS ? a.n_rows - r0 : NBI_MLA_MANY_ROWS;
    const uint32_t head = a.nope + a.rope_dim, width = a.lora + a.rope_dim;
    const float *x = a.x + ((size_t)r0 * a.n_heads + h) * head;
    float *y = a.y + ((size_t)r0 * a.n_heads + h) * width;
    const size_t x_row = (size_t)a.n_heads * head, y_row = (size_t)a.n_heads * width;
    /* every part of the columns turns its part of the rows */
    const uint32_t parts = (a.lora + NBI_MLA_MANY_COLUMNS - 1) / NBI_MLA_MANY_COLUMNS;
    const uint32_t each = (n + parts - 1) / parts, first = col0 / NBI_MLA_MANY_COLUMNS * each;
    const uint32_t n_angles = a.rope_dim / 2, turned = first + each < n ? each : n - first;
    const uint32_t pairs = first < n ? turned * n_angles : 0;
    const float *rope_x = x + first * x_row + a.nope;
    float *rope_y = y + first * y_row + a.lora;
    nbi_mla_rope_pairs p;
    nbi_mla_rope_load<APPEND>(p, append, n_angles, rope_x, x_row, r0 + first, threadIdx.x, pairs);
    nbi_mla_halves<NBI_MLA_MANY_ROWS / 8, NBI_MLA_MANY_THREADS / NBI_WARP>(x, x_row, n, a.nope,
                                                                           stride, hi, lo);
    for (uint32_t i = threadIdx.x;; i += 4 * NBI_MLA_MANY_THREADS) {
        nbi_mla_rope_store<APPEND>(p, append, n_angles, rope_y, y_row, i, pairs);
        const uint32_t more = i + 4 * NBI_MLA_MANY_THREADS;
        if (more >= pairs) break;
        nbi_mla_rope_load<APPEND>(p, append, n_angles, rope_x, x_row, r0 + first, more, pairs);
    }
    const uint32_t own = warp % 4 * 32, row = warp / 4 * 32;
#pragma unroll 1
    for (uint32_t c0 = 0; c0 < NBI_MLA_MANY_COLUMNS; c0 += 128) {
        if (c0)
            nbi_copy_wait<0>();
        else
            nbi_copy_wait<1>();
        __syncthreads();
        nbi_mla_warp_sums sums;
        nbi_mla_absorb_warp(sums, w + c0 + own, hi + row * stride, lo + row * stride, a.nope);
        nbi_mla_store_warp(sums, y, y_row, row, n, col0 + c0 + own, a.lora, a.scale);
    }
}

/* ---------------------------------------------------------------- expand */

/* A row of a chunk of halves: as NBI_MLA_EXPAND_PAD has it. */
constexpr uint32_t nbi_mla_chunk_row = NBI_MLA_MANY_CHUNK + NBI_MLA_EXPAND_PAD;
constexpr uint32_t nbi_mla_chunk_half = NBI_MLA_MANY_ROWS * nbi_mla_chunk_row;

inline size_t nbi_mla_expand_many_shared(uint32_t lora)
{
    return (NBI_MLA_MANY_OUTPUTS * (lora + NBI_MLA_EXPAND_PAD) + 2 * 2 * nbi_mla_chunk_half) *
           sizeof(uint16_t);
}

/* The block's part of W_UV, as NBI_MLA_MANY_CHUNKS groups of copies. */
NBI_DEV void nbi_mla_expand_ask(const nbi_mla_product &a, uint32_t h, uint32_t m0, uint16_t *w)
{
    const uint16_t *from =
        static_cast<const uint16_t *>(a.w) + ((size_t)h * (a.nope + a.v) + a.nope) * a.lora;
    for (uint32_t g = 0; g < NBI_MLA_MANY_CHUNKS; g++) {
        const uint32_t begin = g * NBI_MLA_MANY_CHUNK;
        const uint32_t end = g + 1 < NBI_MLA_MANY_CHUNKS && begin + NBI_MLA_MANY_CHUNK < a.lora
                                 ? begin + NBI_MLA_MANY_CHUNK
                                 : a.lora;
        const uint32_t pieces = begin < end ? (end - begin) / 8 : 0;
        for (uint32_t i = threadIdx.x; i < NBI_MLA_MANY_OUTPUTS * pieces;
             i += NBI_MLA_MANY_THREADS) {
            const uint32_t row = i / pieces, c = begin + i % pieces * 8;
            const bool take = m0 + row < a.v;
            nbi_copy_async(w + row * (a.lora + NBI_MLA_EXPAND_PAD) + c,
                           take ? from + (size_t)(m0 + row) * a.lora + c : from, take);
        }
        nbi_copy_commit();
    }
}

/* Four columns, 4 lane ... of a chunk, of every eighth row. */
struct nbi_mla_chunk {
    nbi_f32x4 v[NBI_MLA_MANY_ROWS / 8];
};

NBI_DEV void nbi_mla_chunk_load(nbi_mla_chunk &x, const float *from, size_t row, uint32_t n,
                                uint32_t left)
{
    const uint32_t warp = threadIdx.x / NBI_WARP, c = nbi_lane() * 4;
    const bool whole = ((uintptr_t)from | row * sizeof *from) % sizeof(nbi_f32x4) == 0;
#pragma unroll
    for (uint32_t i = 0; i < NBI_MLA_MANY_ROWS / 8; i++) {
        const float *p = from + (warp + 8 * i) * row + c;
        x.v[i] = {};
        if (warp + 8 * i >= n || c >= left) continue;
        if (whole)
            x.v[i] = *reinterpret_cast<const nbi_f32x4 *>(p);
        else
            x.v[i] = {{p[0], p[1], p[2], p[3]}};
    }
}

NBI_DEV void nbi_mla_chunk_store(const nbi_mla_chunk &x, uint16_t *hi)
{
    const uint32_t warp = threadIdx.x / NBI_WARP;
#pragma unroll
    for (uint32_t i = 0; i < NBI_MLA_MANY_ROWS / 8; i++) {
        uint16_t *to = hi + (warp + 8 * i) * nbi_mla_chunk_row + nbi_lane() * 4;
        nbi_mla_store_halves(x.v[i], to, to + nbi_mla_chunk_half);
    }
}

/* The first `left` columns of a chunk. w: at the warp's first output and the chunk's first column;
 * hi: at the warp's first row. */
NBI_DEV void nbi_mla_expand_warp(nbi_mla_warp_sums &x, const uint16_t *w, uint32_t w_row,
                                 const uint16_t *hi, uint32_t left)
{
    const uint32_t g = nbi_lane() / 4, c = nbi_lane() % 4 * 8;
#pragma unroll
    for (uint32_t p = 0; p < NBI_MLA_SUMS; p++) {
        if (32 * p >= left) break;
        nbi_u32x4 f[2][2];
#pragma unroll
        for (uint32_t m = 0; m < 4; m++)
            f[m / 2][m % 2] =
                *reinterpret_cast<const nbi_u32x4 *>(w + (8 * m + g) * w_row + 32 * p + c);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const uint16_t *at = hi + (8 * j + g) * nbi_mla_chunk_row + 32 * p + c;
            const nbi_u32x4 u = *reinterpret_cast<const nbi_u32x4 *>(at);
            const nbi_u32x4 v = *reinterpret_cast<const nbi_u32x4 *>(at + nbi_mla_chunk_half);
#pragma unroll
            for (uint32_t i = 0; i < 4; i += 2)
#pragma unroll
                for (uint32_t lower = 0; lower < 2; lower++)
#pragma unroll
                    for (uint32_t m = 0; m < 2; m++) {
                        const uint32_t fm[4] = {f[m][0].v[i], f[m][1].v[i], f[m][0].v[i + 1],
                                                f[m][1].v[i + 1]};
                        nbi_mma_bf16(x.d[m][p][j], fm, (lower ? v.v : u.v) + i);
                    }
        }
    }
}

/* out = W_UV . ol for one head, NBI_MLA_MANY_OUTPUTS values from m0 on, and NBI_MLA_MANY_ROWS rows
 * from r0 on. W_UV is asked for while the kernel before still runs. */
NBI_DEV void nbi_mla_expand_many(const nbi_mla_product &a, uint32_t h, uint32_t m0, uint32_t r0)
{
    const uint32_t stride = a.lora + NBI_MLA_EXPAND_PAD, width = a.lora + a.rope_dim;
    const uint32_t warp = threadIdx.x / NBI_WARP, own = warp % 4 * 32, row = warp / 4 * 32;
    uint16_t *w = nbi_shared<uint16_t>();            /* [NBI_MLA_MANY_OUTPUTS][stride] */
    uint16_t *x = w + NBI_MLA_MANY_OUTPUTS * stride; /* two chunks in halves */
    nbi_mla_expand_ask(a, h, m0, w);
    nbi_wait_before();
    nbi_let_next();
    const uint32_t n = a.n_rows - r0 < NBI_MLA_MANY_ROWS ? a.n_rows - r0 : NBI_MLA_MANY_ROWS;
    const float *from = a.x + ((size_t)r0 * a.n_heads + h) * width;
    const size_t from_row = (size_t)a.n_heads * width;
    nbi_mla_chunk next;
    nbi_mla_chunk_load(next, from, from_row, n, a.lora);
    nbi_mla_warp_sums sums = {};
#pragma unroll 1
    for (uint32_t c0 = 0, chunk = 0; c0 < a.lora; c0 += NBI_MLA_MANY_CHUNK, chunk++) {
        uint16_t *hi = x + chunk % 2 * 2 * nbi_mla_chunk_half;
        nbi_mla_chunk_store(next, hi);
        const uint32_t behind = c0 + NBI_MLA_MANY_CHUNK;
        if (behind < a.lora) nbi_mla_chunk_load(next, from + behind, from_row, n, a.lora - behind);
        if (chunk == 0)
            nbi_copy_wait<3>();
        else if (chunk == 1)
            nbi_copy_wait<2>();
        else if (chunk == 2)
            nbi_copy_wait<1>();
        else
            nbi_copy_wait<0>();
        __syncthreads();
        nbi_mla_expand_warp(sums, w + own * stride + c0, stride, hi + row * nbi_mla_chunk_row,
                            a.lora - c0);
    }
    nbi_mla_store_warp(sums, a.y + ((size_t)r0 * a.n_heads + h) * a.v, (size_t)a.n_heads * a.v, row,
                       n, m0 + own, a.v, a.scale);
}
