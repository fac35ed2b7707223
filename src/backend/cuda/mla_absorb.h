/* The absorbing product of MLA by matrix units, and the append of latents, as parts of a launch.
 * Callers: attention_mla.cu, index_row.cu. */
#pragma once

#include "backend/cuda/attention.h"
#include "backend/cuda/codes.h"

#define NBI_MLA_THREADS 256u
#define NBI_MLA_WARPS   (NBI_MLA_THREADS / NBI_WARP)

/* ---------------------------------------------------------------- append */

struct nbi_mla_rows {
    float *q;
    const float *kv, *norm;
    float eps;
    uint32_t n_heads, nope, rope_dim, lora, kv_stride;
    nbi_rope_arg rope;
    void *latent;
    bool bf16, codes;
    nbi_kv_shape shape;
    const int32_t *pos, *row_seq, *page_table;
    uint32_t page_stride;
};

/* What a thread has of a row: values threadIdx.x + k * blockDim.x. All are asked for at once;
 * longer rows go value by value. */
#define NBI_MLA_OWN 4u

NBI_DEV bool nbi_mla_owns(uint32_t n)
{
    return n <= NBI_MLA_OWN * blockDim.x && (blockDim.x == 128 || blockDim.x == 256);
}

NBI_DEV void nbi_mla_own(const float *x, uint32_t n, float (&own)[NBI_MLA_OWN])
{
#pragma unroll
    for (uint32_t k = 0; k < NBI_MLA_OWN; k++) {
        const uint32_t i = threadIdx.x + k * blockDim.x;
        own[k] = nbi_mla_owns(n) && i < n ? x[i] : 0;
    }
}

/* Counts from the block's last thread: it has something else to do than the first. */
NBI_DEV uint32_t nbi_mla_last()
{
    return blockDim.x - 1 - threadIdx.x;
}

/* Cosine and sine of pair i of row t. */
NBI_DEV nbi_f32x2 nbi_mla_angle(const nbi_mla_rows &a, size_t t, uint32_t i)
{
    const size_t at = t * (a.rope.dim / 2) + i;
    if (i >= a.rope_dim / 2) return {{1, 0}};
    return {{a.rope.cos[at], a.rope.sin[at]}};
}

/* The sum of squares of n values, as 256 threads add it: 32 values apart by their warps, then the
 * warps in order. The block may have fewer. own: of nbi_mla_own(). */
NBI_DEV float nbi_mla_square_sum(const float *x, uint32_t n, const float (&own)[NBI_MLA_OWN])
{
    __shared__ float sums[NBI_MLA_WARPS];
    for (uint32_t i = threadIdx.x; i < NBI_MLA_THREADS; i += blockDim.x) {
        float sum = 0;
        if (!nbi_mla_owns(n)) {
            for (uint32_t j = i; j < n; j += NBI_MLA_THREADS) sum = fmaf(x[j], x[j], sum);
        } else if (blockDim.x == NBI_MLA_THREADS) {
#pragma unroll
            for (uint32_t k = 0; k < NBI_MLA_OWN; k++) sum = fmaf(own[k], own[k], sum);
        } else {
            const bool odd = i != threadIdx.x;
#pragma unroll
            for (uint32_t k = 0; k < NBI_MLA_OWN; k += 2) {
                const float y = odd ? own[k + 1] : own[k];
                sum = fmaf(y, y, sum);
            }
        }
        sum = nbi_warp_sum(sum);
        if (nbi_lane() == 0) sums[i / NBI_WARP] = sum;
    }
    __syncthreads();
    float sum = 0;
    for (uint32_t w = 0; w < NBI_MLA_WARPS; w++) sum += sums[w];
    __syncthreads(); /* for the next call */
    return sum;
}

/* The rope key of row t, turned; by the block's last threads, of whose first pair the angle is
 * there. */
NBI_DEV void nbi_mla_append_key(const nbi_mla_rows &a, size_t t, const float *kv, void *key,
                                size_t at, nbi_f32x2 turn)
{
    for (uint32_t i = nbi_mla_last(); i < a.rope_dim / 2; i += blockDim.x) {
        uint32_t iu, iv;
        nbi_rope_pair(a.rope, i, &iu, &iv);
        float u = kv[a.lora + iu], v = kv[a.lora + iv];
        if (i == nbi_mla_last())
            nbi_rope_turn_by(turn.v[0], turn.v[1], &u, &v);
        else
            nbi_rope_turn(a.rope, t, i, &u, &v);
        nbi_kv_store(key, at + iu, a.bf16, u);
        nbi_kv_store(key, at + iv, a.bf16, v);
    }
}

/* The latent of row t and its key. Weights, angles and the position's place are looked up before
 * the kernel before is waited for: they are older. early: the next one may begin before that. */
NBI_DEV void nbi_mla_append_latent(const nbi_mla_rows &a, size_t t, bool early)
{
    const float *kv = a.kv + t * a.kv_stride;
    const uint32_t p = (uint32_t)a.pos[t];
    float x[NBI_MLA_OWN], norm[NBI_MLA_OWN];
    nbi_mla_own(a.norm, a.lora, norm);
    const nbi_f32x2 turn = nbi_mla_angle(a, t, nbi_mla_last());
    const size_t page = nbi_kv_page(a.page_table, a.page_stride, a.row_seq[t], p);
    const size_t slot = page * NBI_PAGE_TOKENS + p % NBI_PAGE_TOKENS;
    const size_t at = slot * (a.lora + a.rope_dim);
    if (early) nbi_let_next();
    nbi_wait_before();
    if (!early) nbi_let_next();
    nbi_mla_own(kv, a.lora, x);
    uint8_t *to = static_cast<uint8_t *>(a.latent) + slot * (size_t)a.shape.slot;
    if (a.codes)
        nbi_mla_append_key(a, t, kv, to + a.shape.tail, 0, turn);
    else
        nbi_mla_append_key(a, t, kv, a.latent, at + a.lora, turn);
    const float r = 1.0f / sqrtf(nbi_mla_square_sum(kv, a.lora, x) / (float)a.lora + a.eps);
    if (a.codes) {
        const float *w = a.norm;
        nbi_codes_store(to, reinterpret_cast<float *>(to + a.shape.scales), a.lora,
                        threadIdx.x / NBI_WARP, blockDim.x / NBI_WARP,
                        [=](uint32_t i) { return kv[i] * r * w[i]; });
        return;
    }
    if (nbi_mla_owns(a.lora)) {
#pragma unroll
        for (uint32_t k = 0; k < NBI_MLA_OWN; k++) {
            const uint32_t i = threadIdx.x + k * blockDim.x;
            if (i < a.lora) nbi_kv_store(a.latent, at + i, a.bf16, x[k] * r * norm[k]);
        }
    } else {
        for (uint32_t i = threadIdx.x; i < a.lora; i += blockDim.x)
            nbi_kv_store(a.latent, at + i, a.bf16, kv[i] * r * a.norm[i]);
    }
}

/* ---------------------------------------------------------------- products */

/* Rows [first, first + n_rows) of the batch; x is queries or latent sums, y the other. */
struct nbi_mla_product {
    const float *x;
    float *y;
    const void *w; /* kv_b */
    float scale;
    uint32_t n_rows, n_heads, nope, rope_dim, v, lora;
    bool halves; /* 16 bits of x and y will do */
};

/* The same products for BF16 kv_b with sides in sixteens: 8 or 32 rows of the batch share what is
 * read of kv_b, with the same bits. Rows go in as two BF16 halves. Shared memory: a row of halves
 * is longer, so that no reads meet in a bank: of eight rows of 16 bytes (ldmatrix, absorb), or of
 * 16 bytes by four lanes of two rows (expand). */
#define NBI_MLA_ABSORB_PAD 8u
#define NBI_MLA_EXPAND_PAD 32u

/* Four values of a row in halves. */
NBI_DEV void nbi_mla_store_halves(const nbi_f32x4 &x, uint16_t *hi, uint16_t *lo)
{
    nbi_u32x2 upper, lower;
    nbi_halves(x.v[0], x.v[1], &upper.v[0], &lower.v[0]);
    nbi_halves(x.v[2], x.v[3], &upper.v[1], &lower.v[1]);
    *reinterpret_cast<nbi_u32x2 *>(hi) = upper;
    *reinterpret_cast<nbi_u32x2 *>(lo) = lower;
}

/* The first n of 8 NT rows of x (row stride x_row), the first k values, in halves of row stride
 * `stride`; zeros behind. A warp of W has every W-th row, and asks for two pieces of all of them at
 * once. */
template <int NT, int W>
NBI_DEV void nbi_mla_halves(const float *x, size_t x_row, uint32_t n, uint32_t k, uint32_t stride,
                            uint16_t *hi, uint16_t *lo)
{
    constexpr uint32_t ROWS = 8 * NT / W, PIECES = 2;
    static_assert(ROWS * W == 8 * NT, "whole rows");
    const bool whole = ((uintptr_t)x | x_row * sizeof *x) % sizeof(nbi_f32x4) == 0;
    const uint32_t warp = threadIdx.x / NBI_WARP;
    for (uint32_t c0 = nbi_lane() * 4; c0 < k; c0 += PIECES * NBI_WARP * 4) {
        nbi_f32x4 v[PIECES][ROWS] = {};
#pragma unroll
        for (uint32_t j = 0; j < PIECES; j++)
#pragma unroll
            for (uint32_t i = 0; i < ROWS; i++) {
                const uint32_t r = warp + i * W, c = c0 + j * NBI_WARP * 4;
                const float *from = x + r * x_row + c;
                if (r >= n || c >= k) continue;
                if (whole)
                    v[j][i] = *reinterpret_cast<const nbi_f32x4 *>(from);
                else
                    v[j][i] = {{from[0], from[1], from[2], from[3]}};
            }
#pragma unroll
        for (uint32_t j = 0; j < PIECES; j++)
#pragma unroll
            for (uint32_t i = 0; i < ROWS; i++) {
                const uint32_t at = (warp + i * W) * stride + c0 + j * NBI_WARP * 4;
                if (c0 + j * NBI_WARP * 4 < k) nbi_mla_store_halves(v[j][i], hi + at, lo + at);
            }
    }
}

/* A product's k-steps go to so many sums in turn: matrix units take 30 clocks until a sum can be
 * added to. */
#define NBI_MLA_SUMS 4

/* d: values m0 + g, m0 + g + 8 of rows 8 j + 2t, + 1; out has `most` values per row. */
template <int NT>
NBI_DEV void nbi_mla_store(const float d[NBI_MLA_SUMS][NT][4], float *y, size_t y_row, uint32_t n,
                           uint32_t m0, uint32_t most, float scale)
{
    const uint32_t g = nbi_lane() / 4, t = nbi_lane() % 4;
#pragma unroll
    for (uint32_t j = 0; j < NT; j++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t r = 8 * j + 2 * t + i % 2, m = m0 + g + i / 2 * 8;
            const float sum = (d[0][j][i] + d[1][j][i]) + (d[2][j][i] + d[3][j][i]);
            if (r < n && m < most) y[r * y_row + m] = sum * scale;
        }
}

template <int NT> inline size_t nbi_mla_absorb_shared(uint32_t nope, uint32_t columns)
{
    return (nope * (columns + 8) + 2 * 8 * NT * (nope + NBI_MLA_ABSORB_PAD)) * sizeof(uint16_t);
}

/* Columns of pair j of a row's rotated part; where it is turned already and only copied, any two.
 */
template <bool APPEND>
NBI_DEV void nbi_mla_rope_columns(const nbi_mla_rows &n, uint32_t j, uint32_t *iu, uint32_t *iv)
{
    *iu = 2 * j;
    *iv = 2 * j + 1;
    if (APPEND) nbi_rope_pair(n.rope, j, iu, iv);
}

/* The rotated part of the queries behind what was absorbed; turned here with APPEND, the first
 * row's first pair of a thread by `turn`. The last threads begin: they have no halves to make of
 * few rows. */
template <bool APPEND>
NBI_DEV void nbi_mla_copy_rope(const nbi_mla_product &a, const nbi_mla_rows &n, const float *x,
                               size_t x_row, float *y, size_t y_row, uint32_t r0, uint32_t n_rows,
                               nbi_f32x2 turn)
{
    const uint32_t half = a.rope_dim / 2;
    uint32_t r = 0, j = nbi_mla_last();
    for (bool first = true;; first = false, j += blockDim.x) {
        for (; j >= half; j -= half) r++;
        if (r >= n_rows) return;
        uint32_t iu, iv;
        nbi_mla_rope_columns<APPEND>(n, j, &iu, &iv);
        float u = x[r * x_row + a.nope + iu], v = x[r * x_row + a.nope + iv];
        if (APPEND && first && r == 0)
            nbi_rope_turn_by(turn.v[0], turn.v[1], &u, &v);
        else if (APPEND)
            nbi_rope_turn(n.rope, r0 + r, j, &u, &v);
        y[r * y_row + a.lora + iu] = u;
        y[r * y_row + a.lora + iv] = v;
    }
}

/* ql = qn . W_UK for one head, COLUMNS columns from col0 on, 16 a warp, and 8 NT rows from r0 on.
 * APPEND: queries are not turned yet. Waits for the kernel before; with few rows the next one may
 * begin before that. */
template <int NT, bool APPEND, uint32_t COLUMNS>
NBI_DEV void nbi_mla_absorb(const nbi_mla_product &a, const nbi_mla_rows &append, uint32_t h,
                            uint32_t col0, uint32_t r0)
{
    constexpr uint32_t ROW = COLUMNS + 8;
    const uint32_t stride = a.nope + NBI_MLA_ABSORB_PAD;
    const uint32_t lane = nbi_lane(), own = threadIdx.x / NBI_WARP * 16;
    uint16_t *w = nbi_shared<uint16_t>(); /* [nope][ROW] */
    uint16_t *hi = w + a.nope * ROW, *lo = hi + 8 * NT * stride;
    const uint16_t *from = static_cast<const uint16_t *>(a.w) + (size_t)h * (a.nope + a.v) * a.lora;
    for (uint32_t i = threadIdx.x; i < a.nope * (COLUMNS / 8); i += blockDim.x) {
        const uint32_t row = i / (COLUMNS / 8), c = i % (COLUMNS / 8) * 8;
        const bool take = col0 + c < a.lora;
        nbi_copy_async(w + row * ROW + c, take ? from + (size_t)row * a.lora + col0 + c : from,
                       take);
    }
    nbi_copy_commit();
    nbi_f32x2 turn = {{1, 0}};
    if (APPEND && col0 == 0) turn = nbi_mla_angle(append, r0, nbi_mla_last());
    if (NT == 1) nbi_let_next(); /* attention reads what is older still */
    nbi_wait_before();
    if (NT != 1) nbi_let_next();
    const uint32_t n = a.n_rows - r0 < 8 * NT ? a.n_rows - r0 : 8 * NT;
    const uint32_t head = a.nope + a.rope_dim, width = a.lora + a.rope_dim;
    const float *x = a.x + ((size_t)r0 * a.n_heads + h) * head;
    float *y = a.y + ((size_t)r0 * a.n_heads + h) * width;
    const size_t x_row = (size_t)a.n_heads * head, y_row = (size_t)a.n_heads * width;
    nbi_mla_halves<NT, COLUMNS / 16>(x, x_row, n, a.nope, stride, hi, lo);
    if (col0 == 0) nbi_mla_copy_rope<APPEND>(a, append, x, x_row, y, y_row, r0, n, turn);
    nbi_copy_wait<0>();
    __syncthreads();
    float d[NBI_MLA_SUMS][NT][4] = {};
    const uint16_t *w_at = w + ((lane & 7) + (lane >> 4) * 8) * ROW + own + (lane >> 3 & 1) * 8;
    const uint16_t *x_at = (lane < 16 ? hi : lo) + (lane & 7) * stride + (lane >> 3 & 1) * 8;
    const auto step = [&](float(&sum)[NT][4], uint32_t k) {
        uint32_t f[4];
        nbi_ldmatrix_trans(f, w_at + k * ROW);
#pragma unroll
        for (uint32_t j = 0; j < NT; j++) {
            uint32_t b[4]; /* upper halves, lower */
            nbi_ldmatrix(b, x_at + 8 * j * stride + k);
            nbi_mma_bf16(sum[j], f, b);
            nbi_mma_bf16(sum[j], f, b + 2);
        }
    };
    uint32_t k = 0;
    for (; k + 16 * NBI_MLA_SUMS <= a.nope; k += 16 * NBI_MLA_SUMS)
#pragma unroll
        for (uint32_t i = 0; i < NBI_MLA_SUMS; i++) step(d[i], k + 16 * i);
            /* what is left: with checks no step would begin before the last */
#pragma unroll
    for (uint32_t i = 0; i < NBI_MLA_SUMS; i++)
        if (k + 16 * i < a.nope) step(d[i], k + 16 * i);
    nbi_mla_store<NT>(d, y, y_row, n, col0 + own, a.lora, a.scale);
}
