/* Matrix products of the CPU backend from inside. Callers: linear.c (the operator) and moe/cpu (the
 * expert runner), which share packed activations and panels.
 *
 * A product is cut into panels: some rows of the weight matrix times all packed tokens of a call.
 * Activations are packed once per call into the form that the panel kernel of the level and weight
 * kind wants; weights are read as the file has them.
 *
 * Numerics: out[t][r] is the same bits whatever the other tokens, rows, panels and threads are.
 * Each kernel has one order of additions per element, given by the number of columns alone: F32
 * forms   level reference: double, ascending k. AVX2 and AVX-512: lanes of float32 FMA. BF16 rows
 * vdpbf16ps, 16 lanes, 32 columns at a time in ascending order, then a fixed tree. BF16 pairs  AMX
 * tdpbf16ps, 32 columns at a time in ascending order, added to the C tile. FP8_BLOCK sums each 128
 * columns on their own, times the block's scale, then adds. The global scale multiplies at the end.
 */
#pragma once

#include "backend/cpu/cpu_backend.h"
#include "base/numfmt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How packed activations lie. Tokens are in groups of 16; unused columns are zero. */
typedef enum nbi_lin_form {
    NBI_LIN_F32,         /* [n][pad32(cols)] float32 */
    NBI_LIN_BF16,        /* [n][pad32(cols)] bf16 */
    NBI_LIN_BF16_NVFP4,  /* the same, each 32 columns in the order of nbi_lin_nvfp4_order */
    NBI_LIN_PAIRS,       /* per group: [pad32(cols) / 32][16 pairs][tokens of the group][2] bf16 */
    NBI_LIN_PAIRS_NVFP4, /* the same, each 32 columns in the order of nbi_lin_nvfp4_order */
    NBI_LIN_FORM_COUNT
} nbi_lin_form;

/* Place p of 32 holds column order(p): four copies of eight code words, shifted by 0, 4, 8, 12
 * bits, give the nibbles in this order (linear_unpack.h). */
static inline uint32_t nbi_lin_nvfp4_order(uint32_t p)
{
    return p % 8 * 4 + p / 8;
}

static inline uint32_t nbi_lin_pad(uint32_t cols)
{
    return (cols + 31u) & ~31u;
}

/* Packed activations of one call. */
typedef struct nbi_lin_x {
    nbi_lin_form form;
    uint32_t n, cols;
    float scale; /* multiplies the product: input scale of NVFP4 activations, else 1 */
    void *data;  /* 64-byte aligned, nbi_lin_pack_bytes() */
} nbi_lin_x;

/* Rows [row, row + n_rows) of w times tokens [t0, t0 + n) of x. t0 is a multiple of 16.
 *   out[t * out_stride + r] = product of token t0 + t and row `row` + r. */
typedef struct nbi_lin_panel {
    const nbi_matrix *w;
    uint32_t row, n_rows;
    const nbi_lin_x *x;
    uint32_t t0, n;
    float *out;
    size_t out_stride;
    void *scratch;          /* nbi_lin_thread_bytes() of this thread, 64-byte aligned */
    const nbi_matrix *next; /* what this thread will read next, fetched early; NULL: unknown */
    uint32_t next_row, next_rows;
} nbi_lin_panel;

/* `exact`: activations keep all their bits (F32 form). */
nbi_lin_form nbi_lin_form_of(nbi_cpu_level level, nbi_weight_kind kind, bool exact);
size_t nbi_lin_pack_bytes(nbi_lin_form form, uint32_t n, uint32_t cols);

/* Packs tokens [t0, t0 + n) of `x` (t0 a multiple of 16). Token t is row rows[t] of `src` (row t
 * when rows is NULL), `stride` floats apart. input_scale > 0 rounds them to NVFP4 first (cols a
 * multiple of 16); x->scale must then be input_scale. `scratch` as in a panel. */
void nbi_lin_pack(nbi_cpu_level level, const nbi_lin_x *x, uint32_t t0, uint32_t n,
                  const float *src, size_t stride, const int32_t *rows, float input_scale,
                  void *scratch);

/* Any level; x must have the form of (level, kind). */
void nbi_lin_run_panel(nbi_cpu_level level, const nbi_lin_panel *p);

/* Scratch of one thread for matrices of at most max_cols columns. */
size_t nbi_lin_thread_bytes(uint32_t max_cols);

/* Most tokens one panel call takes. Larger numbers are cut by the callers. */
#define NBI_LIN_TOKENS 256u
/* Most rows one panel call takes. */
#define NBI_LIN_ROWS 128u

/* Rows per piece of work for `rows` rows of several matrices: whole panels, enough pieces for the
 * threads. */
uint32_t nbi_lin_rows_per_item(uint64_t total_rows, uint32_t n_tokens, uint32_t n_threads);
/* Items a thread takes at once: with few tokens memory is read at full speed only in long runs. */
uint32_t nbi_lin_grain(uint32_t n_items, uint32_t n_tokens, uint32_t n_threads);

/* True when the input scale of `w` is to be used. */
static inline bool nbi_lin_w4a4(const nbi_cpu *cpu, const nbi_matrix *w)
{
    return cpu->w4a4 && w->kind == NBI_WEIGHT_NVFP4 && w->input_scale > 0;
}

/* ---- kernels by level */
void nbi_lin_panel_reference(const nbi_lin_panel *p);
#if defined(__x86_64__)
void nbi_lin_panel_avx2(const nbi_lin_panel *p);
void nbi_lin_panel_avx512_f32(const nbi_lin_panel *p);
void nbi_lin_panel_avx512(const nbi_lin_panel *p);
void nbi_lin_panel_amx(const nbi_lin_panel *p);
/* Panels of at most NBI_LIN_FEW tokens read in place: the same bits as nbi_lin_panel_avx512. False
 * where the weight kind or the number of columns or tokens is not for it. */
#define NBI_LIN_FEW 6u
bool nbi_lin_few_avx512(const nbi_lin_panel *p);
/* One token's floats to bf16 in the order of the form, zero behind the end: dst[pad32(cols)]. */
void nbi_lin_round_avx512(uint16_t *dst, const float *src, uint32_t cols, bool nvfp4_order);
/* [n][pad32] rows of bf16 to one group of pairs. */
void nbi_lin_pairs_avx512(uint16_t *dst, const uint16_t *rows, uint32_t n, uint32_t cols);
#endif

#ifdef __cplusplus
}
#endif
