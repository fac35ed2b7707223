/* One row, all weights of a block on their way at once: what moe_one.cu and moe_routed.cu share.
 * Names begin with one_. */
#pragma once

#include "backend/cuda/stream.h"
#include "moe/cuda/moe_cuda.h"

/* Registers of both kernels fit a multiprocessor: down begins while gate_up runs. */
#define ONE_WARPS      16u
#define ONE_DOWN_WARPS 12u
#define ONE_UNITS_MAX  64u          /* of a block */
#define ONE_MOST       (150u << 10) /* bytes of shared memory: down's are there beside gate_up's */

struct one_args {
    nbi_moe_weights w;
    const float *x; /* the row; down: h [slots][inter] */
    float *out;     /* h; down: the row */
    nbi_moe_slots slots;
    uint32_t n_chunks;
    nbi_divisor chunks, rt; /* by n_chunks, by the row tiles of an expert */
    uint32_t n_tiles;       /* gate_up: of the slots with ids */
    nbi_divisor each;       /* units of a tile */
    uint32_t units;         /* of a block, most */
    nbi_divisor group;      /* units of a copy: neighbours in a tile */
    bool x_fast;
};

/* Shared memory of a block. */
struct one_shared {
    uint64_t *full; /* [units] */
    char *ring;     /* [units] */
    float *sums;    /* [units][16] */
    float *unit;    /* 2^e: gate_up [n_chunks], down [units] */
};

/* Bytes; with `base` also the places. */
__host__ __device__ inline uint32_t one_lay_out(one_shared *s, char *base, uint32_t units,
                                                uint32_t unit_bytes)
{
    uint32_t at = ONE_UNITS_MAX * 8;
    s->full = reinterpret_cast<uint64_t *>(base);
    s->ring = base + at;
    at += units * unit_bytes;
    s->sums = reinterpret_cast<float *>(base + at);
    at += units * 64;
    s->unit = reinterpret_cast<float *>(base + at);
    return at + units * 4;
}

/* Of n tiles those of block b are one_first_tile(n, b) ... one_first_tile(n, b + 1) - 1. */
NBI_DEV uint32_t one_first_tile(uint32_t n, uint32_t b)
{
    return n * b / gridDim.x;
}

/* The tiles of a block of gate_up: the shared expert's, then those of the slots with ids. */
struct one_up_tiles {
    uint32_t n, n_shared; /* all of them; the shared expert's */
    uint32_t first, base; /* its first row tile; tile k behind them is tile base + k of the slots */

    NBI_DEV explicit one_up_tiles(const one_args &a)
    {
        const uint32_t b = blockIdx.x, all = a.slots.n > a.slots.top_k ? a.w.first.n_rt : 0;
        first = one_first_tile(all, b);
        n_shared = one_first_tile(all, b + 1) - first;
        base = one_first_tile(a.n_tiles, b) - n_shared;
        n = one_first_tile(a.n_tiles, b + 1) - base;
    }

    NBI_DEV uint32_t slot(const one_args &a, uint32_t k) const
    {
        return k < n_shared ? a.slots.top_k : nbi_div(base + k, a.rt);
    }

    NBI_DEV uint32_t row_tile(const one_args &a, uint32_t k) const
    {
        return k < n_shared ? first + k : nbi_mod(base + k, a.rt);
    }
};

/* The ids, lane k that of slot k; UINT32_MAX: none. */
NBI_DEV uint32_t one_load_ids(const one_args &a)
{
    const uint32_t lane = (uint32_t)nbi_lane();
    return lane < a.slots.n ? (uint32_t)a.slots.slot_expert(lane) : UINT32_MAX;
}

/* The group of units that a thread asks for: those that are multiplied first by the first lanes. */
NBI_DEV uint32_t one_own_group(uint32_t warp, uint32_t n_warps)
{
    return warp + (uint32_t)nbi_lane() * n_warps;
}

/* Tiles of n chunks from chunk c on. */
template <nbi_weight_kind KIND>
NBI_DEV uint32_t one_tiles_of(const one_args &a, uint32_t c, uint32_t n)
{
    const uint32_t left = a.w.first.n_kt - c * nbi_chunk_tiles(KIND);
    return left < n * nbi_chunk_tiles(KIND) ? left : n * nbi_chunk_tiles(KIND);
}

/* One thread: the barrier of group q, from chunk c on, waits for its bytes. */
template <nbi_weight_kind KIND>
NBI_DEV void one_open_group(const one_args &a, const one_shared &s, uint32_t q, uint32_t c)
{
    constexpr uint32_t SCALES = KIND == NBI_WEIGHT_NVFP4 ? 64u : 0u;
    nbi_bar_init(s.full + q, 1);
    nbi_bar_init_done();
    nbi_bar_expect(s.full + q,
                   one_tiles_of<KIND>(a, c, a.group.d) * (nbi_tile_bytes(KIND) + SCALES));
}

/* One thread: asks for group q, row tile rt from chunk c on. Scales first: copies arrive in order,
 * and behind the codes of all groups they would hold up the first. */
template <nbi_weight_kind KIND>
NBI_DEV void one_ask(const one_args &a, const one_shared &s, uint32_t q, uint32_t expert,
                     uint32_t rt, uint32_t c)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND), TILE = nbi_tile_bytes(KIND);
    constexpr uint32_t SCALES = KIND == NBI_WEIGHT_NVFP4 ? 64u : 0u;
    const uint32_t n = one_tiles_of<KIND>(a, c, a.group.d);
    const size_t tile = (size_t)rt * a.w.first.n_kt + c * CT, at = expert * a.w.stride;
    char *to = s.ring + q * a.group.d * nbi_stream_unit_bytes(KIND);
    if (SCALES)
        nbi_copy_bulk(to + a.group.d * CT * TILE,
                      static_cast<const char *>(a.w.first.scales) + at + tile * SCALES, n * SCALES,
                      s.full + q);
    nbi_copy_bulk(to, static_cast<const char *>(a.w.first.data) + at + tile * TILE, n * TILE,
                  s.full + q);
}

/* A chunk of x as loaded by a warp: lane l has columns 4 l ... and 128 + 4 l ... */
template <nbi_weight_kind KIND> struct one_row {
    static constexpr uint32_t LOADS = nbi_chunk_tiles(KIND) / 2;
    nbi_f32x4 v[LOADS];

    /* row NULL: zeros. */
    NBI_DEV void load(const one_args &a, const float *row, uint32_t c)
    {
#pragma unroll
        for (uint32_t k = 0; k < LOADS; k++)
            v[k] = nbi_x_load(row, (c * LOADS + k) * 128 + 4 * (uint32_t)nbi_lane(),
                              row ? a.w.first.cols : 0, a.x_fast);
    }
};

/* The same as B fragments in registers; columns but the first are zero. */
template <nbi_weight_kind KIND> struct one_x {
    static constexpr uint32_t STEPS = nbi_chunk_tiles(KIND) * NBI_TILE_STEPS;
    uint32_t b[STEPS][2];
    float two_e;

    NBI_DEV void make(const one_row<KIND> &x)
    {
        const uint32_t lane = (uint32_t)nbi_lane();
        int e = 0;
        if (KIND != NBI_WEIGHT_BF16) {
            uint32_t most = 0;
#pragma unroll
            for (uint32_t k = 0; k < x.LOADS; k++) most = nbi_amax_bits(most, x.v[k]);
            e = nbi_chunk_exponent(nbi_warp_max(most));
        }
        two_e = nbi_pow2(e);
#pragma unroll
        for (uint32_t k = 0; k < x.LOADS; k++) {
            uint32_t f[2];
            nbi_x_fragment<KIND>(f, x.v[k], nbi_pow2(-e));
#pragma unroll
            for (uint32_t w = 0; w < 8; w++)
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) {
                    const uint32_t one = __shfl_sync(NBI_FULL_MASK, f[i], (int)(4 * w + lane % 4));
                    b[8 * k + w][i] = lane < 4 ? one : 0;
                }
        }
    }
};

/* The sums of unit u, over chunk c. */
template <nbi_weight_kind KIND>
NBI_DEV void one_multiply(const one_args &a, const one_shared &s, uint32_t u, uint32_t c,
                          const one_x<KIND> &x)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND), TILE = nbi_tile_bytes(KIND);
    const uint32_t q = nbi_div(u, a.group), in = u - q * a.group.d, n = one_tiles_of<KIND>(a, c, 1);
    const char *group = s.ring + q * a.group.d * nbi_stream_unit_bytes(KIND);
    const char *codes = group + in * CT * TILE;
    const char *scales = group + a.group.d * CT * TILE + in * CT * 64;
    const uint32_t lane = (uint32_t)nbi_lane();
    float p[4] = {0, 0, 0, 0};
    nbi_bar_wait(s.full + q, 0);
#pragma unroll
    for (uint32_t k = 0; k < CT; k++) {
        if (k >= n) continue;
        nbi_tile<KIND> t;
        nbi_stream_tile<KIND>(&t, codes, scales, k);
#pragma unroll
        for (uint32_t w = 0; w < NBI_TILE_STEPS; w++) {
            uint32_t f[4];
            t.fragment(f, w);
            nbi_tile_mma<KIND>(p, f, x.b[k * NBI_TILE_STEPS + w]);
        }
    }
    if (lane % 4 == 0)
        *reinterpret_cast<nbi_f32x2 *>(s.sums + u * 16 + lane / 4 * 2) = {{p[0], p[2]}};
}

/* What a thread of gate_up knows before the ids. */
struct one_up {
    one_up_tiles tiles;
    uint32_t warp, units;
    uint32_t own, tile, c; /* the group that it asks for: its tile, its first chunk */
    bool asks;
};

/* gate_up: opens the block's barriers and asks for the shared expert's weights. A barrier
 * follows. */
template <nbi_weight_kind KIND> NBI_DEV one_up one_up_begin(const one_args &a, const one_shared &s)
{
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
    const one_up_tiles tiles(a);
    const uint32_t units = tiles.n * a.n_chunks, own = one_own_group(warp, ONE_WARPS);
    const uint32_t first = own * a.group.d;
    const one_up up = {
        tiles, warp, units, own, nbi_div(first, a.chunks), nbi_mod(first, a.chunks), first < units};
    if (up.asks) one_open_group<KIND>(a, s, own, up.c);
    if (up.tile < tiles.n_shared)
        one_ask<KIND>(a, s, own, a.slots.n_experts, tiles.first + up.tile, up.c);
    return up;
}

/* gate_up from the ids on (one_load_ids()), with the row x. */
template <nbi_weight_kind KIND>
NBI_DEV void one_up_end(const one_args &a, const one_shared &s, const one_up &up, uint32_t id,
                        const float *from)
{
    const uint32_t lane = (uint32_t)nbi_lane(), warp = up.warp, units = up.units;
    const one_up_tiles &tiles = up.tiles;
    uint32_t c = nbi_mod(warp, a.chunks);
    one_row<KIND> row_x;
    one_x<KIND> x;
    row_x.load(a, from, c);
    /* who ends a row: 8 rows of tile k */
    const uint32_t k = threadIdx.x / 8, g = threadIdx.x % 8, tile = k < tiles.n ? k : 0;
    const uint32_t slot = tiles.slot(a, tile), rt = tiles.row_tile(a, tile), row = rt * 8 + g;
    const uint32_t e = __shfl_sync(NBI_FULL_MASK, id, (int)slot);
    const bool ends = k < tiles.n && e != UINT32_MAX && row < a.w.first.rows;
    nbi_cuda_packed m = a.w.first;
    float gate_scale = 0, up_scale = 0;
    if (ends) {
        m = nbi_moe_expert(a.w, e);
        gate_scale = m.row_scale[rt * 16 + g];
        up_scale = m.row_scale[rt * 16 + 8 + g];
    }
    const uint32_t own_e = __shfl_sync(NBI_FULL_MASK, id, (int)(tiles.slot(a, up.tile) & 31));
    if (up.asks && up.tile >= tiles.n_shared && own_e != UINT32_MAX)
        one_ask<KIND>(a, s, up.own, own_e, tiles.row_tile(a, up.tile), up.c);
    /* bit j: unit warp + j ONE_WARPS has no expert */
    const uint32_t at = tiles.slot(a, nbi_div(warp + lane * ONE_WARPS, a.chunks)) & 31;
    const uint32_t none =
        __ballot_sync(NBI_FULL_MASK, __shfl_sync(NBI_FULL_MASK, id, (int)at) == UINT32_MAX);
    x.make(row_x);
    for (uint32_t u = warp; u < units; u += ONE_WARPS) {
        if (nbi_mod(u, a.chunks) != c) {
            c = nbi_mod(u, a.chunks);
            row_x.load(a, from, c);
            x.make(row_x);
        }
        if (u < a.n_chunks && lane == 0) s.unit[c] = x.two_e;
        if (!(none >> u / ONE_WARPS & 1)) one_multiply<KIND>(a, s, u, c, x);
    }
    __syncthreads();
    if (!ends) return;
    float gate = 0, up_sum = 0;
#pragma unroll 4
    for (c = 0; c < a.n_chunks; c++) {
        const nbi_f32x2 p =
            *reinterpret_cast<const nbi_f32x2 *>(s.sums + (k * a.n_chunks + c) * 16 + g * 2);
        const nbi_f32x2 block = nbi_tile_block_scale<KIND>(m, rt, c);
        gate = fmaf(p.v[0], s.unit[c] * block.v[0], gate);
        up_sum = fmaf(p.v[1], s.unit[c] * block.v[1], up_sum);
    }
    a.out[(size_t)slot * a.w.first.rows + row] =
        nbi_moe_swiglu(gate * gate_scale, up_sum * up_scale);
}

/* moe_one.cu: the arguments of gate_up (returned: its shared memory), its blocks, down; the shared
 * memory that a launch which needs `bytes` asks for. */
uint32_t nbi_moe_one_up(one_args *k, const nbi_cuda *c, const nbi_moe_layer *l,
                        const nbi_moe_args *a, float *h);
uint32_t nbi_moe_one_grid(const nbi_cuda *c, const one_args *k);
void nbi_moe_one_down(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, const float *h);
uint32_t nbi_moe_one_shared(const nbi_cuda *c, uint32_t bytes, bool down);
