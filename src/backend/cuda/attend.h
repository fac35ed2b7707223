/* Attention kernels' common parts. Callers: attend*.cu. */
#pragma once

#include "backend/cuda/attention.h"

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
    uint32_t lo = 0, hi = a.select_stride; /* first -1 */
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
