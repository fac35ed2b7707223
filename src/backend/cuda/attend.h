/* Attention kernels' common parts. Callers: attend*.cu. */
#pragma once

#include "backend/cuda/attention.h"
#include "backend/cuda/codes.h"

/* Positions of a split of a context of n. */
__host__ __device__ static inline uint32_t nbi_attend_split(uint32_t n)
{
    uint32_t len = NBI_ATTEND_SPLIT;
    while ((uint64_t)len * NBI_ATTEND_SPLITS_MAX < n) len *= 2;
    return len;
}

/* The most splits that a context of up to n positions has: splits grow longer, not more. */
static inline uint32_t nbi_attend_splits_most(uint32_t n)
{
    const uint32_t most = nbi_ceil_div(n, NBI_ATTEND_SPLIT);
    return most < NBI_ATTEND_SPLITS_MAX ? most : NBI_ATTEND_SPLITS_MAX;
}

/* Positions row r (from a.first) attends to. */
NBI_DEV uint32_t nbi_attend_length(const nbi_cuda_attend &a, uint32_t r)
{
    if (!a.select) return (uint32_t)a.pos[a.first + r] + 1;
    const int32_t *sel = a.select + (size_t)r * a.select_stride;
    /* as the indexer makes them; else the first -1 is searched for */
    const uint32_t see = (uint32_t)a.pos[a.first + r] + 1;
    uint32_t lo = 0, hi = a.select_stride;
    const uint32_t most = see < hi ? see : hi;
    if (sel[most - 1] >= 0 && (most == hi || sel[most] < 0)) return most;
    while (lo < hi) {
        const uint32_t mid = (lo + hi) / 2;
        if (sel[mid] >= 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Position of entry j of row r's list. */
NBI_DEV uint32_t nbi_attend_position(const nbi_cuda_attend &a, uint32_t r, uint32_t j)
{
    return a.select ? (uint32_t)a.select[(size_t)r * a.select_stride + j] : j;
}

/* Element of the cache at which position p of sequence s begins, in kv head 0. */
NBI_DEV size_t nbi_attend_place(const nbi_cuda_attend &a, int32_t s, uint32_t p)
{
    return nbi_kv_page(a.page_table, a.page_stride, s, p) * a.kv_page +
           p % NBI_PAGE_TOKENS * a.kv_slot;
}

/* Byte at which the position's scales begin, E4M3. */
NBI_DEV size_t nbi_attend_scales(const nbi_cuda_attend &a, int32_t s, uint32_t p)
{
    return nbi_kv_page(a.page_table, a.page_stride, s, p) * a.kv_page + a.shape.scales +
           p % NBI_PAGE_TOKENS * a.shape.scale_slot;
}

/* ---------------------------------------------------------------- groups of rows, splits */

/* Rows of one sequence that share a block's positions: their (row, head) pairs are its slots. */
struct nbi_attend_group {
    uint32_t row, n_rows; /* from a.first */
    uint32_t n, split;    /* positions of the longest row, and of a split of all of them */
    int32_t seq;
};

/* The group that begins at row r, of at most `most` rows; false when r lies inside another's. */
NBI_DEV bool nbi_attend_group_of(const nbi_cuda_attend &a, uint32_t r, uint32_t most,
                                 nbi_attend_group *g)
{
    const uint32_t t = a.first + r;
    g->row = r;
    g->n_rows = 1;
    g->seq = a.row_seq[t];
    g->n = nbi_attend_length(a, r);
    g->split = nbi_attend_split(g->n);
    if (most == 1) return true;
    const uint32_t begin = (uint32_t)a.seq_first[g->seq], end = (uint32_t)a.seq_first[g->seq + 1];
    const uint32_t at = (t - (begin > a.first ? begin : a.first)) % most;
    if (at && nbi_attend_split(nbi_attend_length(a, r - 1)) == g->split) return false;
    uint32_t many = most - at;
    if (many > end - t) many = end - t;
    if (many > a.n_rows - r) many = a.n_rows - r;
    while (many > 1 && nbi_attend_split(nbi_attend_length(a, r + many - 1)) != g->split) many--;
    g->n_rows = many;
    g->n = nbi_attend_length(a, r + many - 1);
    return true;
}

/* Rows of a group so that whole blocks of `slots` are filled by them. */
static inline uint32_t nbi_attend_group_rows(uint32_t heads, uint32_t slots)
{
    uint32_t x = heads, y = slots;
    while (y) {
        const uint32_t z = x % y;
        x = y;
        y = z;
    }
    return slots / x;
}

/* MLA: rows that share blocks of so many slots, such blocks of a group, and of all. */
struct nbi_attend_grid {
    uint32_t rows, parts, blocks;
};

static inline nbi_attend_grid nbi_attend_grid_of(const nbi_cuda_attend *a, uint32_t slots)
{
    /* rows with lists of their own share no tiles, nor do rows of different sequences */
    const bool alone = a->select || a->n_rows == a->n_seqs;
    const uint32_t rows = alone ? 1 : nbi_attend_group_rows(a->n_heads, slots);
    const uint32_t parts = nbi_ceil_div(rows * a->n_heads, slots);
    return {rows, parts, nbi_ceil_div(a->n_rows, rows) * parts};
}

/* A slot's row and head; n = 0: there is none. */
struct nbi_attend_slot {
    uint32_t row, head, n;
};

NBI_DEV nbi_attend_slot nbi_attend_slot_of(const nbi_cuda_attend &a, const nbi_attend_group &g,
                                           uint32_t kv, uint32_t slot)
{
    const uint32_t ratio = a.n_heads / a.n_kv, i = slot / ratio;
    nbi_attend_slot s = {g.row + i, kv * ratio + slot % ratio, 0};
    if (i < g.n_rows) s.n = nbi_attend_length(a, s.row);
    return s;
}

/* Splits that the scratch has room for, per row. */
NBI_DEV float *nbi_attend_partial(const nbi_cuda_attend &a, uint32_t splits, uint32_t row,
                                  uint32_t split, uint32_t head)
{
    return a.partial + (((size_t)row * splits + split) * a.n_heads + head) * (a.v_width + 2);
}

/* Scores times this are powers of two. */
NBI_DEV float nbi_attend_scale(const nbi_cuda_attend &a)
{
    return a.scale * 1.44269504f;
}

/* What values relative to the maximum m are multiplied by when it becomes `top`; base = -(top *
 * scale). Exactly 1 when it stays: tiles that a row does not see leave its bits alone. */
NBI_DEV float nbi_attend_keep(float m, float top, float scale, float base)
{
    return m == top ? 1.0f : exp2f(fmaf(m, scale, base));
}

/* How a running softmax (maximum of the scores before they are scaled, sum, values) takes up
 * another. */
struct nbi_attend_fold {
    float keep, add;
};

NBI_DEV nbi_attend_fold nbi_attend_merge(float *m, float *l, float more_m, float more_l,
                                         float scale)
{
    const float top = more_m > *m ? more_m : *m, base = top == -INFINITY ? 0 : -(top * scale);
    const nbi_attend_fold f = {nbi_attend_keep(*m, top, scale, base),
                               nbi_attend_keep(more_m, top, scale, base)};
    *m = top;
    *l = fmaf(more_l, f.add, *l * f.keep);
    return f;
}

NBI_DEV float nbi_attend_merged(const nbi_attend_fold &f, float o, float more)
{
    return fmaf(more, f.add, o * f.keep);
}

/* What nbi_attend_merge() gives one split after the other, by a lane for each of up to 32: m, l of
 * its split (-INFINITY where there is none); last: of those before. */
NBI_DEV nbi_attend_fold nbi_attend_lane_fold(float m, float last, float scale, float *top)
{
    const int lane = nbi_lane();
    float most = m > last ? m : last;
#pragma unroll
    for (int d = 1; d < NBI_WARP; d *= 2) {
        const float y = __shfl_sync(NBI_FULL_MASK, most, lane >= d ? lane - d : lane);
        most = y > most ? y : most;
    }
    const float up = __shfl_sync(NBI_FULL_MASK, most, lane ? lane - 1 : 0);
    const float base = most == -INFINITY ? 0 : -(most * scale);
    *top = most;
    return {nbi_attend_keep(lane ? up : last, most, scale, base),
            nbi_attend_keep(m, most, scale, base)};
}

/* Whole shapes in one launch or more, and the merge: attend.cu, attend_gqa.cu, attend_mla.cu. False
 * when the shape is not theirs. */
bool nbi_cuda_attend_gqa(nbi_cuda *c, const nbi_cuda_attend *a);
/* *unmerged: as nbi_cuda_attend_run() returns it. */
bool nbi_cuda_attend_mla(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t *unmerged);
/* The same by warpgroups, of the shape that nbi_cuda_attend_mla() takes. */
bool nbi_cuda_attend_wide(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t *unmerged);
/* Whether the shape is that of attend_gqa.cu and attend_few.cu. */
bool nbi_cuda_attend_by_mma(const nbi_cuda_attend *a);
/* Few rows of each sequence, heads of 64 or 128: attend_few.cu. With `append` (one row a sequence)
 * the rows' queries, keys and values come from there, and go to the cache; q and k stay as they
 * are. */
bool nbi_cuda_attend_few(nbi_cuda *c, const nbi_cuda_attend *a, const nbi_gqa_append *append);
void nbi_cuda_attend_merge(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t splits);

/* What a launch covers: all splits of a row by one block when such blocks fill the device
 * (per_sm fit at once), otherwise a block per split and a merge, for as many rows at once as the
 * scratch holds. launch(a, walk, splits, grid_splits). */
template <class F>
static inline void nbi_attend_launches(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t blocks,
                                       uint32_t per_sm, F launch)
{
    const uint32_t splits = nbi_attend_splits_most(a->max_len);
    const uint32_t room = (uint32_t)c->rt.n_sms * per_sm, waves = nbi_ceil_div(blocks, room);
    if (splits == 1 || blocks >= waves * room / 10 * 7) {
        launch(*a, true, splits, 1u);
        return;
    }
    const size_t row = nbi_cuda_attend_row_bytes(a->max_len, a->n_heads, a->v_width);
    const size_t fit = a->partial_bytes / row;
    NB_ASSERT(fit > 0);
    nbi_cuda_attend part = *a;
    for (uint32_t at = 0; at < a->n_rows; at += part.n_rows) {
        part.first = a->first + at;
        part.n_rows = a->n_rows - at < fit ? a->n_rows - at : (uint32_t)fit;
        part.q = a->q + at * a->q_row;
        part.out = a->out + at * a->out_row;
        if (a->select) part.select = a->select + (size_t)at * a->select_stride;
        launch(part, false, splits, splits);
        nbi_cuda_attend_merge(c, &part, splits);
    }
}
