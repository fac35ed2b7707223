/* What the attention operators share: the cache from a kernel's side, rotation, kv_b on the device,
 * and softmax attention over lists of positions, the common part of MLA (one key row shared by all
 * heads, values are its front) and GQA. Private to src/backend/cuda.
 *
 * A row's context of n positions (all up to its own, or a list) is cut into splits whose length
 * depends on n alone; inside a split, tiles of 32 or 64 positions are folded into a running
 * softmax in ascending order; then the splits are, in ascending order. Whether one block walks over
 * all splits of a row or several share them and their results are merged, the arithmetic is the
 * same, so a row's bits depend on the row only. */
#pragma once

#include "backend/cuda/cuda_backend.h"
#include "backend/kv_shape.h"

#define NBI_ATTEND_SPLIT      128u /* positions of a split, for contexts up to 64 of them */
#define NBI_ATTEND_SPLITS_MAX 64u

/* One call over rows [first, first + n_rows) of the batch. Strides in elements. */
struct nbi_cuda_attend {
    const float *q; /* of row `first` */
    float *out;     /* of row `first`; may be q when out_head == q_head */
    const void *k, *v;
    bool bf16;          /* the cache, or what its codes stand for; else float */
    bool codes;         /* E4M3: elements are bytes */
    nbi_kv_shape shape; /* of k, and of v where it is not k */
    size_t q_row, q_head, out_row, out_head;
    size_t kv_page, kv_head, kv_slot;
    uint32_t n_heads, n_kv, k_width, v_width;
    float scale;
    const int32_t *select; /* of row `first`: [select_stride] positions, -1 behind; NULL: all */
    uint32_t select_stride;
    uint32_t first, n_rows, n_seqs, max_len;
    /* of the batch */
    const int32_t *pos, *row_seq, *seq_first, *page_table;
    uint32_t page_stride;
    float *partial; /* scratch of nbi_cuda_attend_row_bytes() per row */
    size_t partial_bytes;
};

/* Scratch that lets rows of up to n positions go in one launch. */
size_t nbi_cuda_attend_row_bytes(uint32_t n, uint32_t n_heads, uint32_t v_width);

/* 0, or: `out` is not written, a->partial holds the rows' splits, room for this many a row. */
uint32_t nbi_cuda_attend_run(nbi_cuda *c, const nbi_cuda_attend *a);

/* kv_b of MLA on the device, [rows][cols] row-major: BF16 for BF16 matrices and NVFP4 (codes times
 * block scales are exact in BF16; `scale` is the global one), float for the other kinds. A weight
 * of this form serves mla_attend only. */
struct nbi_cuda_kv_b {
    nbi_weight head;
    void *data;
    bool bf16;
    float scale; /* multiplies */
};

/* Scratch of the operators beside what attention itself takes. */
size_t nbi_cuda_mla_scratch(const nbi_limits *l);
size_t nbi_cuda_index_scratch(const nbi_limits *l);

extern "C" {
/* Whether a matrix is kv_b, by its module's name. */
bool nbi_cuda_is_kv_b(const nbi_matrix *m);
nb_status nbi_cuda_kv_b_prepare(nbi_backend *b, nbi_weight **out, const nbi_matrix *m,
                                nb_error *err);
void nbi_cuda_kv_b_release(nbi_backend *b, nbi_weight **w);
}

/* ---------------------------------------------------------------- inside kernels */

/* One value of the cache. */
template <bool BF16> NBI_DEV float nbi_kv_load(const void *p, size_t i)
{
    if (BF16) return nbi_from_bf16(static_cast<const uint16_t *>(p)[i]);
    return static_cast<const float *>(p)[i];
}

NBI_DEV void nbi_kv_store(void *p, size_t i, bool bf16, float x)
{
    if (bf16)
        static_cast<uint16_t *>(p)[i] = nbi_to_bf16(x);
    else
        static_cast<float *>(p)[i] = x;
}

/* Page of position p of sequence s. */
NBI_DEV size_t nbi_kv_page(const int32_t *page_table, uint32_t page_stride, int32_t s, uint32_t p)
{
    return (size_t)page_table[(size_t)s * page_stride + p / NBI_PAGE_TOKENS];
}

/* Rope settings by value. */
struct nbi_rope_arg {
    const float *cos, *sin;
    uint32_t dim;
    bool interleaved;
};

static inline nbi_rope_arg nbi_rope_of(const nbi_rope_rows *r)
{
    return {r->cos, r->sin, r->dim, r->interleaved};
}

/* The two members of pair i. */
NBI_DEV void nbi_rope_pair(const nbi_rope_arg &r, uint32_t i, uint32_t *a, uint32_t *b)
{
    *a = r.interleaved ? 2 * i : i;
    *b = r.interleaved ? 2 * i + 1 : i + r.dim / 2;
}

NBI_DEV void nbi_rope_turn_by(float cs, float sn, float *u, float *v)
{
    const float x = *u, y = *v;
    *u = fmaf(x, cs, -(y * sn));
    *v = fmaf(x, sn, y * cs);
}

NBI_DEV void nbi_rope_turn(const nbi_rope_arg &r, size_t t, uint32_t i, float *u, float *v)
{
    nbi_rope_turn_by(r.cos[t * (r.dim / 2) + i], r.sin[t * (r.dim / 2) + i], u, v);
}

/* Norm, rotation and append of the rows of a batch: grouped queries. */
struct nbi_gqa_append {
    float *q, *k;
    const float *v, *q_norm, *k_norm;
    float eps;
    uint32_t n_heads, n_kv, dim;
    nbi_rope_arg rope;
    void *cache_k, *cache_v;
    bool bf16, codes;
    nbi_kv_shape shape;
    const int32_t *pos, *row_seq, *page_table;
    uint32_t page_stride;
};

/* What a head is multiplied by, from a lane's part of the sum of squares: lane l has the values l,
 * l + 32, ... */
NBI_DEV float nbi_gqa_factor(float sum, uint32_t dim, float eps)
{
    return 1.0f / sqrtf(nbi_warp_sum(sum) / (float)dim + eps);
}

/* Two values as BF16 pairs whose sum has 16 bits of them. */
NBI_DEV void nbi_halves(float x, float y, uint32_t *hi, uint32_t *lo)
{
    *hi = nbi_to_bf16x2(x, y);
    *lo = nbi_to_bf16x2(x - nbi_bf16_lo(*hi), y - nbi_bf16_hi(*hi));
}
