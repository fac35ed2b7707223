/* What the indexer's kernels share. Callers: indexer.cu, index_row.cu.
 *
 * A score depends on its row and position alone; the choice is exact: the topk largest, ties (and
 * -0 against 0) to the lower position, NaN below everything. Scores may be negative. */
#pragma once

#include "backend/cuda/attention.h"
#include "backend/cuda/mla_absorb.h"

#define NBI_INDEX_DIM 128 /* values of a head where matrix units score */
#define NBI_INDEX_ROW \
    (NBI_INDEX_DIM + 8) /* in shared memory 16 bytes further apart: no conflicts */

/* ---------------------------------------------------------------- keys */

struct nbi_index_keys {
    const float *k, *weight, *bias;
    float eps;
    uint32_t dim;
    nbi_rope_arg rope;
    void *cache;
    bool bf16, codes;
    nbi_kv_shape shape;
    uint32_t n_rows;
    const int32_t *pos, *row_seq, *page_table;
    uint32_t page_stride;
};

NBI_DEV double nbi_index_sum(double x)
{
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(NBI_FULL_MASK, x, d);
    return x;
}

struct nbi_index_norm {
    double mean, r;
};

/* A warp: keys may lie far from zero, close to each other, so mean and variance in double. */
NBI_DEV nbi_index_norm nbi_index_norm_of(const nbi_index_keys &a, const float *k)
{
    double sum = 0, squares = 0;
    for (uint32_t i = (uint32_t)nbi_lane(); i < a.dim; i += NBI_WARP) sum += (double)k[i];
    nbi_index_norm n;
    n.mean = nbi_index_sum(sum) / a.dim;
    for (uint32_t i = (uint32_t)nbi_lane(); i < a.dim; i += NBI_WARP) {
        const double d = (double)k[i] - n.mean;
        squares += d * d;
    }
    n.r = 1.0 / sqrt(nbi_index_sum(squares) / a.dim + (double)a.eps);
    return n;
}

NBI_DEV float nbi_index_normed(const nbi_index_keys &a, const float *k, const nbi_index_norm &n,
                               uint32_t i)
{
    return fmaf((float)(((double)k[i] - n.mean) * n.r), a.weight[i], a.bias[i]);
}

/* A warp: put(i, value i of the key of row t), normed and turned. */
template <class PUT> NBI_DEV void nbi_index_key(const nbi_index_keys &a, size_t t, const PUT &put)
{
    const float *k = a.k + t * a.dim;
    const nbi_index_norm n = nbi_index_norm_of(a, k);
    for (uint32_t i = (uint32_t)nbi_lane(); i < a.rope.dim / 2; i += NBI_WARP) {
        uint32_t iu, iv;
        nbi_rope_pair(a.rope, i, &iu, &iv);
        float u = nbi_index_normed(a, k, n, iu), v = nbi_index_normed(a, k, n, iv);
        nbi_rope_turn(a.rope, t, i, &u, &v);
        put(iu, u);
        put(iv, v);
    }
    for (uint32_t i = a.rope.dim / 2 * 2 + (uint32_t)nbi_lane(); i < a.dim; i += NBI_WARP)
        put(i, nbi_index_normed(a, k, n, i));
}

/* ---------------------------------------------------------------- the choice */

/* Of the four keys from position i on, of n: how many are above the edge; how many equal it, in the
 * high half. */
NBI_DEV uint32_t nbi_index_taken(const nbi_u32x4 &x, uint32_t i, uint32_t n, uint32_t edge)
{
    uint32_t own = 0;
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
        if (i + j < n) own += (uint32_t)(x.v[j] > edge) + ((uint32_t)(x.v[j] == edge) << 16);
    return own;
}

/* Those positions into the list, of the ones that equal the edge the first `ties`: `above` and
 * `equal` are how many came before. */
NBI_DEV void nbi_index_list(int32_t *out, const nbi_u32x4 &x, uint32_t i, uint32_t n, uint32_t edge,
                            uint32_t ties, uint32_t above, uint32_t equal)
{
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        if (i + j >= n || x.v[j] < edge) continue;
        const bool tie = x.v[j] == edge;
        if (!tie || equal < ties) out[above + (equal < ties ? equal : ties)] = (int32_t)(i + j);
        above += !tie;
        equal += tie;
    }
}

/* ---------------------------------------------------------------- scores */

/* Rows [first, first + n_rows) of the batch. */
struct nbi_index_rows {
    int32_t *select;
    float *q;
    const float *w;
    uint32_t n_heads, dim, topk;
    float dim_scale, head_scale; /* dim^-0.5, n_heads^-0.5 */
    nbi_rope_arg rope;
    const void *keys;
    nbi_kv_shape shape;
    uint32_t first, n_rows;
    const int32_t *pos, *row_seq, *seq_first, *page_table;
    uint32_t page_stride;
    uint32_t *scores; /* [n_rows][stride], sortable */
    uint32_t stride;
    size_t room; /* bytes from `scores` on */
};

/* Larger float, larger key; NaN as -inf, -0 as 0. */
NBI_DEV uint32_t nbi_index_sortable(float f)
{
    if (!(f == f)) f = -INFINITY;
    const uint32_t u = nbi_bits(f + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* Adds a head's share of a score. NaN stays NaN: of a comparison that fails the sum is kept. */
NBI_DEV float nbi_index_add_head(float score, float dot, float weight)
{
    return fmaf(weight, dot < 0 ? 0 : dot, score);
}

/* ---------------------------------------------------------------- decoded rows, one launch */

/* What else the launch of a choice does. NULL: it does not. */
struct nbi_index_beside {
    const nbi_index_keys *append;
    const nbi_linear_args *weigh;  /* nbi_index_row_weighs(); w of the choice */
    const nbi_mla_product *absorb; /* of the same rows, by matrix units; */
    const nbi_mla_rows *latents;   /* and the append of their latents, always with it */
};

/* Does all of it, where it can: one row of each sequence, few rows, keys in BF16, 32 or 64 heads of
 * 128, not too many positions. Same lists as by the kernels of many rows. */
bool nbi_index_row_fits(const nbi_cuda *c, const nbi_index_rows *a, uint32_t n_seqs,
                        const nbi_index_beside *beside);
void nbi_index_row_run(nbi_cuda *c, const nbi_index_rows *a, const nbi_index_beside *beside);
/* Whether a product may wait for the choice that it weighs. It is not done for rows that see no
 * more than topk positions. */
bool nbi_index_row_weighs(const nbi_linear_args *a);
size_t nbi_index_row_scratch(const nbi_limits *l);

/* The choice that waits together with this product of MLA, whose result takes the first `used`
 * bytes of the scratch. False: it does not wait, or cannot. */
bool nbi_index_absorb(nbi_cuda *c, const nbi_mla_product *absorb, const nbi_mla_rows *latents,
                      const nbi_batch *batch, size_t used);
