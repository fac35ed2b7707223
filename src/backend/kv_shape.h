/* How the vectors of a cache lie in memory, for each type of its elements: docs/formats/kv-pages.md
 * has the drawings. Callers: the backends' attention, model (memory), tests.
 *
 * E4M3: codes in groups of 128 values, for each group a float32 scale that is a power of two: the
 * smallest with which the largest value of the group is at most 448. So code times scale is exact
 * in BF16, and a cache of codes is read as a BF16 cache of these values would be. What a vector
 * becomes depends on that vector alone. A group with an infinity or NaN has the scale NaN. The
 * codes 0x7f and 0xff (NaN) do not occur. */
#pragma once

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_KV_GROUP   128u /* values of a scale */
#define NBI_KV_EXP_MIN (-100)
#define NBI_KV_EXP_MAX 119 /* 448 * 2^119 is finite */

/* One part of a layer's cache: [pages][heads][64] vectors of `width` values. Offsets in bytes. */
typedef struct nbi_kv_shape {
    nbi_dtype dtype;
    uint32_t width;
    uint32_t page, head, slot; /* from one to the next */
    /* E4M3 only: */
    uint32_t coded; /* values in codes; those behind are BF16 */
    uint32_t scales,
        scale_slot; /* from a head's first code to its first scale; to the next slot's */
    uint32_t tail;  /* from a vector's first code to its BF16 values */
} nbi_kv_shape;

/* MLA: a latent, then a rope key. E4M3: codes | scales | rope key in BF16, to 16 bytes. */
nbi_kv_shape nbi_kv_latent_shape(nbi_dtype dtype, uint32_t kv_lora, uint32_t rope);
/* Keys or values of GQA; with one head, keys of an index. E4M3: codes of 64 slots, then scales. */
nbi_kv_shape nbi_kv_head_shape(nbi_dtype dtype, uint32_t n_heads, uint32_t dim);

/* Bytes of one position. */
static inline uint32_t nbi_kv_position_bytes(const nbi_kv_shape *s)
{
    return s->page / NBI_PAGE_TOKENS;
}

static inline size_t nbi_kv_at(const nbi_kv_shape *s, size_t page, uint32_t head, uint32_t slot)
{
    return page * s->page + (size_t)head * s->head + (size_t)slot * s->slot;
}

/* From a part's begin to the scales of a vector. */
static inline size_t nbi_kv_scales_at(const nbi_kv_shape *s, size_t page, uint32_t head,
                                      uint32_t slot)
{
    return page * s->page + (size_t)head * s->head + s->scales + (size_t)slot * s->scale_slot;
}

/* Writes values [first, first + n) of a vector; with E4M3 whole groups, or what lies behind them.
 * `part`: host memory. */
void nbi_kv_write(const nbi_kv_shape *s, void *part, size_t page, uint32_t head, uint32_t slot,
                  uint32_t first, const float *x, uint32_t n);
/* A whole vector, exactly. */
void nbi_kv_read(const nbi_kv_shape *s, const void *part, size_t page, uint32_t head, uint32_t slot,
                 float *out);

#ifdef __cplusplus
}
#endif
