/* Inner loops of the CPU backend's attention, norms and sampler, one table per instruction level.
 *
 * Callers: elementwise.c, cpu_attend.c, mla.c, mla_expanded.c, gqa.c, indexer.c, sample.c.
 * Invariant: what a kernel writes for one output element is the same bits whatever the other
 * elements of the call are (tile edges repeat a neighbour instead of changing the arithmetic), so
 * drivers may cut rows, heads and positions as threads need.
 *
 * The reference table is plain C with double accumulators; the SIMD tables share one body
 * (cpu_kernels_simd.inc) compiled for 8 and 16 lanes. */
#pragma once

#include "backend/cpu/cpu_backend.h"
#include "backend/kv_shape.h"
#include "base/numfmt.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_CPU_PANEL 64u /* columns of `product` */

typedef struct nbi_cpu_kernels {
    /* Vectors per tile: chunks of heads are multiples of it. */
    uint32_t tile;

    /* How many query rows of one sequence one attention item may take: 1 where a `mix`
     * is one sum per call (reference, AMX). */
    uint32_t max_group;

    /* out[i * ldo + j] = scale * sum_c x[i * ldx + c] * rows[j][c]; c < n, i < n_x, j < n_rows.
     * Rows are F32 or BF16 and may be unaligned. */
    void (*dots)(float *out, size_t ldo, const float *x, size_t ldx, uint32_t n_x,
                 const void *const *rows, nbi_dtype dtype, uint32_t n_rows, uint32_t n,
                 float scale);

    /* out[i * ldo + c] += sum_j p[i * ldp + j] * rows[j][c], j ascending. */
    void (*mix)(float *out, size_t ldo, const float *p, size_t ldp, uint32_t n_p,
                const void *const *rows, nbi_dtype dtype, uint32_t n_rows, uint32_t n);

    /* out[i] = codes[i] (E4M3) * scale in BF16, exact: kv_shape.h. */
    void (*codes_bf16)(uint16_t *out, const uint8_t *codes, float scale, uint32_t n);

    /* c[i * ldc + j] = sum_k a[i * lda + k] * b[k * NBI_CPU_PANEL + j] (+ c before, when `add`);
     * i < m, k < n_k, j < NBI_CPU_PANEL. With max_group 1 one sum per call, else calls that
     * continue each other give the same bits as one. */
    void (*product)(float *c, size_t ldc, const float *a, size_t lda, const float *b, uint32_t m,
                    uint32_t n_k, bool add);

    /* Largest value; NaN is skipped; -inf for n = 0. */
    float (*max)(const float *x, uint32_t n);

    /* x[i] = exp(x[i] - max); returns their sum. */
    float (*exp_sum)(float *x, uint32_t n, float max);

    /* Sum of exp(x[i] - max) in double; x is left alone. */
    double (*log_sum)(const float *x, uint32_t n, float max);

    /* out[i] = exp((x[i] - max) * scale). */
    void (*exp_to)(float *out, const float *x, uint32_t n, float scale, float max);

    /* acc[i] += w * max(s[i], 0) */
    void (*relu_add)(float *acc, const float *s, uint32_t n, float w);

    /* x += delta when given; returns the sum of squares of the new x. */
    float (*add_squares)(float *x, const float *delta, uint32_t n);

    /* out = x * scale * weight */
    void (*scale_weight)(float *out, const float *x, const float *weight, float scale, uint32_t n);

    /* out = gate / (1 + exp(-gate)) * up */
    void (*swiglu)(float *out, const float *gate, const float *up, uint32_t n);
} nbi_cpu_kernels;

#define NBI_CPU_GROUP_MAX 64u /* max_group of the SIMD tables */

extern const nbi_cpu_kernels nbi_cpu_kernels_reference;
#if defined(__x86_64__)
extern const nbi_cpu_kernels nbi_cpu_kernels_avx2;
extern const nbi_cpu_kernels nbi_cpu_kernels_avx512;
extern const nbi_cpu_kernels nbi_cpu_kernels_amx;
#endif

static inline const nbi_cpu_kernels *nbi_cpu_kernels_of(nbi_cpu_level level)
{
#if defined(__x86_64__)
    if (level >= NBI_CPU_AVX512) return &nbi_cpu_kernels_avx512;
    if (level >= NBI_CPU_AVX2) return &nbi_cpu_kernels_avx2;
#endif
    (void)level;
    return &nbi_cpu_kernels_reference;
}

/* The same for n_vectors float32 vectors that always meet the same rows (the heads of a query):
 * with enough of them AMX tiles pay. Measured, one thread of a Sapphire Rapids guest, 576 wide, AMX
 * against AVX-512: 64 vectors 129 against 49 GMAC/s, 20 vectors 84 against 48, 1 vector 9
 * against 24. Depends on the model's shape only, so bits do not depend on the batch. */
static inline const nbi_cpu_kernels *nbi_cpu_kernels_many(nbi_cpu_level level, uint32_t n_vectors)
{
#if defined(__x86_64__)
    if (level >= NBI_CPU_AMX && n_vectors >= 16) return &nbi_cpu_kernels_amx;
#endif
    (void)n_vectors;
    return nbi_cpu_kernels_of(level);
}

/* ---- small pieces shared by the append operators */

/* Rotates x[0 .. rope->dim) in place with the angles of row t. */
static inline void nbi_cpu_rotate(float *x, const nbi_rope_rows *rope, uint32_t t)
{
    const uint32_t half = rope->dim / 2;
    const float *cs = rope->cos + (size_t)t * half, *sn = rope->sin + (size_t)t * half;
    const uint32_t step = rope->interleaved ? 2 : 1, other = rope->interleaved ? 1 : half;
    for (uint32_t i = 0; i < half; i++) {
        const float u = x[i * step], v = x[i * step + other];
        x[i * step] = u * cs[i] - v * sn[i];
        x[i * step + other] = u * sn[i] + v * cs[i];
    }
}

/* Type of the rows that attention's kernels get: those of an E4M3 cache are decoded first. */
static inline nbi_dtype nbi_cpu_row_dtype(nbi_dtype cache)
{
    return cache == NBI_F8_E4M3 ? NBI_BF16 : cache;
}

/* A vector of an E4M3 cache in BF16. */
static inline void nbi_cpu_decode(const nbi_cpu_kernels *k, const nbi_kv_shape *s, const void *part,
                                  size_t page, uint32_t head, uint32_t slot, uint16_t *out)
{
    const char *from = (const char *)part + nbi_kv_at(s, page, head, slot);
    const char *at = (const char *)part + nbi_kv_scales_at(s, page, head, slot);
    const float *scales = (const float *)(const void *)at;
    for (uint32_t i = 0; i < s->coded; i += NBI_KV_GROUP)
        k->codes_bf16(out + i, (const uint8_t *)from + i, scales[i / NBI_KV_GROUP],
                      s->coded - i < NBI_KV_GROUP ? s->coded - i : NBI_KV_GROUP);
    memcpy(out + s->coded, from + s->tail, (s->width - s->coded) * sizeof *out);
}

/* Page of position p of sequence s. */
static inline size_t nbi_cpu_page(const nbi_batch *b, uint32_t s, uint32_t p)
{
    return (size_t)b->page_table[(size_t)s * b->page_stride + p / NBI_PAGE_TOKENS];
}

#ifdef __cplusplus
}
#endif
