/* Pairs of (row, slot) sorted by expert: counts in segments of NBI_MOE_THREADS pairs, then places
 * and a list of token tiles. Included by the runners that sort. */
#pragma once

#include "moe/cuda/moe_product.h"

/* Pairs of every expert among the NBI_MOE_THREADS pairs of a segment. Args: a kernel's, with w,
 * slots, n_pairs and n_experts; taken whole, they are read where they lie. */
template <class Args> static NBI_DEV void nbi_moe_count_segment(const Args &a, uint32_t segment)
{
    __shared__ uint32_t count[NBI_MOE_EXPERTS_MAX];
    for (uint32_t e = threadIdx.x; e < a.n_experts; e += NBI_MOE_THREADS) count[e] = 0;
    __syncthreads();
    const uint32_t i = segment * NBI_MOE_THREADS + threadIdx.x;
    const int32_t id = i < a.n_pairs ? a.slots.expert(i) : -1;
    if (id >= 0) atomicAdd(&count[id], 1u);
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < a.n_experts; e += NBI_MOE_THREADS)
        a.w.count[(size_t)segment * a.n_experts + e] = count[e];
}

/* Of each expert. */
struct nbi_moe_places {
    uint32_t count[NBI_MOE_EXPERTS_MAX];
    uint32_t first[NBI_MOE_EXPERTS_MAX]; /* place of its first pair of the segment */
    uint32_t tiles[NBI_MOE_EXPERTS_MAX];
};

/* counts, and what is before the block's segment. */
static NBI_DEV void nbi_moe_add_segments(nbi_moe_places &p, const nbi_moe_work &w,
                                         uint32_t n_experts, uint32_t tile)
{
    for (uint32_t e = threadIdx.x; e < n_experts; e += NBI_MOE_THREADS) {
        uint32_t all = 0, before = 0;
#pragma unroll 8
        for (uint32_t s = 0; s < gridDim.x; s++) {
            const uint32_t n = w.count[(size_t)s * n_experts + e];
            all += n;
            before += s < blockIdx.x ? n : 0;
        }
        p.count[e] = all;
        p.first[e] = before;
        p.tiles[e] = (all + tile - 1) / tile;
    }
}

/* The n_tiles tiles of an expert that has `count` pairs: about as many of them in each, in steps of
 * 16. */
static NBI_DEV void nbi_moe_list_tiles(nbi_moe_token_tile *to, uint32_t e, uint32_t first,
                                       uint32_t count, uint32_t n_tiles, uint32_t most)
{
    if (!n_tiles) return;
    const uint32_t even = ((count + n_tiles - 1) / n_tiles + 15) / 16 * 16;
    const uint32_t tile = even < most ? even : most;
    for (uint32_t k = 0; k < n_tiles; k++) {
        const uint32_t left = count - k * tile;
        to[k] = {e, first + k * tile, left < tile ? left : tile};
    }
}

/* Places of the block's segment, whose ids are at `segment`, behind nbi_moe_add_segments(); tiles
 * of expert e are listed by block e % n_blocks. */
static NBI_DEV void nbi_moe_place_pairs(nbi_moe_places &p, const nbi_moe_work &w,
                                        const int32_t *segment, uint32_t n_experts, uint32_t tile,
                                        uint32_t n_blocks)
{
    for (uint32_t e = threadIdx.x; e < n_experts; e += NBI_MOE_THREADS) {
        uint32_t first = 0, first_tile = 0;
        for (uint32_t k = 0; k < e; k++) {
            first += p.count[k];
            first_tile += p.tiles[k];
        }
        if (e % n_blocks == blockIdx.x)
            nbi_moe_list_tiles(w.tiles + first_tile, e, first, p.count[e], p.tiles[e], tile);
        if (e + 1 == n_experts && blockIdx.x == 0)
            *w.total = {first_tile + p.tiles[e], first + p.count[e]};
        p.first[e] += first;
    }
    __syncthreads();
    const int32_t id = segment[threadIdx.x];
    if (id < 0) return;
    uint32_t at = p.first[id];
    for (uint32_t k = 0; k < threadIdx.x; k++) at += segment[k] == id;
    const uint32_t i = blockIdx.x * NBI_MOE_THREADS + threadIdx.x;
    w.pair[at] = i;
    w.place[i] = at;
}

/* A block per segment. */
static __global__ void __launch_bounds__(NBI_MOE_THREADS)
    nbi_moe_place_kernel(const nbi_moe_work w, const nbi_moe_slots slots, uint32_t n_pairs,
                         uint32_t n_experts, uint32_t tile)
{
    __shared__ nbi_moe_places p;
    __shared__ int32_t segment[NBI_MOE_THREADS];
    nbi_wait_before();
    nbi_let_next();
    const uint32_t i = blockIdx.x * NBI_MOE_THREADS + threadIdx.x;
    segment[threadIdx.x] = i < n_pairs ? slots.expert(i) : -1;
    nbi_moe_add_segments(p, w, n_experts, tile);
    __syncthreads();
    nbi_moe_place_pairs(p, w, segment, n_experts, tile, gridDim.x);
}
