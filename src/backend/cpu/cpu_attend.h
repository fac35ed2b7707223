/* Softmax attention of query rows over a paged cache, the common part of MLA (one key row shared by
 * all heads, values are its front) and GQA. Callers: mla.c, gqa.c.
 *
 * A row's context of n positions is cut, from position 0, into pieces whose length depends on n
 * alone; inside a piece, blocks of NBI_ATTEND_BLOCK positions are folded into a running softmax in
 * ascending order; then the pieces are, in ascending order. Decode, prefill and every thread count
 * run exactly this arithmetic, so a row's bits depend on the row only. */
#pragma once

#include "backend/cpu/cpu_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_ATTEND_BLOCK      256u /* positions per softmax block */
#define NBI_ATTEND_PIECE      512u /* positions per piece of contexts up to 32 pieces */
#define NBI_ATTEND_PIECES_MAX 32u
#define NBI_ATTEND_HEADS      64u /* query vectors (rows x heads) an item takes at most */

typedef struct nbi_attend {
    const nbi_cpu_kernels *kernels;
    nbi_pool *pool;
    const nbi_batch *batch;
    const char *keys, *values; /* page 0 */
    nbi_kv_shape shape;        /* of both; the values may be the front of wider vectors */
    uint32_t k_width, v_width; /* at most k_width */
    uint32_t n_kv, ratio;      /* kv heads; query heads per kv head */
    float scale;
    const int32_t *select; /* [T][select_stride] or NULL */
    uint32_t select_stride;
    const float *q; /* first row of the block; heads k_width apart */
    size_t q_stride;
    float *out; /* first row of the block, normalised; heads out_head apart */
    size_t out_stride, out_head;
} nbi_attend;

/* Scratch of `threads` threads for these widths. */
size_t nbi_attend_thread_bytes(uint32_t threads, uint32_t k_width, uint32_t v_width);

/* Scratch of one row with n positions. */
size_t nbi_attend_row_bytes(uint32_t n_positions, uint32_t n_heads, uint32_t v_width);

/* The most that any row of a context of up to n positions needs: pieces grow longer, not more,
 * beyond NBI_ATTEND_PIECES_MAX, so the longest row is not the largest. */
static inline size_t nbi_attend_row_bytes_max(uint32_t n, uint32_t n_heads, uint32_t v_width)
{
    const uint32_t most = NBI_ATTEND_PIECE * NBI_ATTEND_PIECES_MAX;
    return nbi_attend_row_bytes(n < most ? n : most, n_heads, v_width);
}

/* Positions row t attends to. */
uint32_t nbi_attend_length(const nbi_attend *a, uint32_t t);

/* Rows from `first` on that fit in `bytes` of scratch when each also takes extra_row_bytes; at
 * least 1 is checked by the caller's workspace plan. */
uint32_t nbi_attend_rows(const nbi_attend *a, uint32_t first, size_t bytes, size_t extra_row_bytes);

/* Attention of rows [first, first + n_rows). `workspace` holds nbi_attend_thread_bytes() and the
 * rows' bytes. */
void nbi_attend_run(const nbi_attend *a, uint32_t first, uint32_t n_rows, void *workspace);

#ifdef __cplusplus
}
#endif
