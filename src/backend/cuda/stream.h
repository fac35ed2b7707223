/* Products of few tokens at the rate of the memory: weights come by bulk copies into a ring in
 * shared memory, asked for by one thread as far ahead as the ring holds, also across the end of
 * the kernel before. Callers: stream_linear.cu and the MoE runners.
 *
 * A unit is a chunk (256 columns; FP8_BLOCK 128) of a row tile; a stage of the ring holds a few
 * units, so that copies are some KB long (one thread does not ask faster than once in about 150
 * clocks). A tile has n_parts x n_chunks units: one part for a matrix, one for each expert of a row
 * where experts are summed. Warps take units in turn; the sums of a unit (p_c of tile.h) meet in
 * shared memory, and one warp adds the chunks of a tile in ascending order: numerics are those of
 * tile.h, whatever the number of warps and blocks.
 *
 * WORK tells what to do:
 *   WAITS                        weights' addresses are known only behind nbi_wait_before()
 *   n_tiles, n_parts, n_chunks, cols, n_tokens
 *   begin(notes)                 all threads: what at() and x() need into 256 bytes of notes, also
 *                                behind the wait if WAITS; a barrier follows
 *   at(notes, tile, part, &w)    the packed matrix and the row tile in it (returned)
 *   x(notes, token, part)        its row of activations, or NULL for zeros
 *   x_fast                       rows of x may be read 16 bytes at a time
 *   take(plan, s, warp)          may be there instead of x() and x_fast: the warps that multiply
 *                                wait and make all of x, by nbi_stream_put()
 *   result, part(), finish()     what becomes of the sums: see nbi_stream_reduce
 *   reduce(plan, s, sums, tile)  may be there instead of them
 *   place, place_of(tile, row)   may be there beside them, for one token: where a row's sum goes,
 *                                found before the wait; put_row(place, sum, scale)
 *                                stores it
 *
 * NT: what a launch has room for: 0 one token, 1 eight, 2 sixteen. */
#pragma once

#include <type_traits>

#include "backend/cuda/tile.h"

#define NBI_STREAM_TOKENS 16u
#define NBI_STREAM_RING   (160u << 10) /* bytes at most; of a block with many tiles 96 KB */
#define NBI_STREAM_MANY   16u          /* tiles of a block */
#define NBI_STREAM_STAGES 64u
/* Words of zeros: what a unit of one token reads. */
#define NBI_STREAM_ZEROS 128u
#define NBI_STREAM_WARPS 16u /* at most, and one that asks for weights */
/* Units between two times of adding up, where a tile has fewer; of one token, whose sums are small,
 * twice as many. */
#define NBI_STREAM_ROUND 24u

__host__ __device__ constexpr uint32_t nbi_stream_unit_bytes(nbi_weight_kind kind)
{
    return nbi_chunk_tiles(kind) * (nbi_tile_bytes(kind) + (kind == NBI_WEIGHT_NVFP4 ? 64u : 0u));
}

/* How a launch is cut; the same on both sides. */
struct nbi_stream_plan {
    uint32_t warps;            /* that multiply */
    uint32_t round_tiles;      /* tiles whose chunks are added up together */
    nbi_divisor units, chunks; /* of a tile; chunks of a part */
    nbi_divisor group;         /* units of a stage; divides the chunks of a tile */
    uint32_t stages;           /* of the ring; with fewer units than `warps` it does not fit */
    uint32_t stage_bytes;
    uint32_t window;     /* units between two barriers: at most the ring, so that whoever waits for
                            a stage knows that the unit before in it is done with */
    uint32_t pad_tokens; /* tokens that x has room for: 1, 8 or 16 */
    uint32_t sum_floats; /* of a unit */
    uint32_t x_bytes, scale_bytes, shared; /* of shared memory */
};

/* Tiles that give every warp the same number of units, if that takes no more than a round. */
inline uint32_t nbi_stream_round_tiles(uint32_t units, uint32_t warps, uint32_t round)
{
    uint32_t n = 1;
    while (n * units % warps && (n + 1) * units <= round) n++;
    if (n * units % warps) n = units < round ? round / units : 1;
    while (n * units * 2 <= round && n * 2 <= warps) n *= 2;
    return n < warps ? n : warps;
}

/* Units of a stage: up to about 9 KB. */
inline uint32_t nbi_stream_group(uint32_t n_chunks, uint32_t unit_bytes)
{
    uint32_t n = 9216 / unit_bytes;
    if (!n) n = 1;
    while (n_chunks % n) n--;
    return n;
}

/* Bytes of a ring beside `rest` bytes. `tiles` of a block, at most, whose weights are asked for
 * before the kernel before has ended: as many as it needs. 0: not before; half of what there is, so
 * that the next kernel's ring fills while this one ends. */
inline uint32_t nbi_stream_ring(const nbi_stream_plan &p, uint32_t tiles, uint32_t rest,
                                uint32_t shared_max)
{
    const uint32_t least = (p.warps + p.group.d - 1) / p.group.d, even = shared_max / 2 - 512;
    const uint32_t need = tiles * (p.units.d / p.group.d);
    const uint32_t all = shared_max > rest ? shared_max - rest : 0;
    uint32_t ring = tiles ? all : even > rest ? even - rest : 0;
    if (ring < 4 * p.stage_bytes) ring = all;
    const uint32_t most = tiles < NBI_STREAM_MANY ? NBI_STREAM_RING : 96u << 10;
    if (ring > most) ring = most;
    const uint32_t stages = need > least ? need : least > 2 ? least : 2;
    return !tiles || ring / p.stage_bytes < stages ? ring : stages * p.stage_bytes;
}

inline nbi_stream_plan nbi_stream_plan_for(nbi_weight_kind kind, uint32_t n_parts,
                                           uint32_t n_chunks, uint32_t n_tokens, uint32_t tiles,
                                           uint32_t shared_max)
{
    nbi_stream_plan p = {};
    const uint32_t units = n_parts * n_chunks, unit_bytes = nbi_stream_unit_bytes(kind);
    p.pad_tokens = n_tokens == 1 ? 1 : n_tokens <= 8 ? 8 : 16;
    p.sum_floats = p.pad_tokens == 1 ? 16 : p.pad_tokens * 16;
    p.x_bytes = units * nbi_chunk_tiles(kind) * NBI_TILE_COLS * 2 * p.pad_tokens;
    p.scale_bytes = (units * p.pad_tokens * 4 + 127) / 128 * 128;
    p.units = nbi_divisor_of(units);
    p.chunks = nbi_divisor_of(n_chunks);
    p.group = nbi_divisor_of(nbi_stream_group(n_chunks, unit_bytes));
    p.stage_bytes = p.group.d * unit_bytes + 64; /* and row scales, in the first stage of a tile */
    p.warps = units % 3 == 0 && units % 16 ? 12 : 16;
    for (; p.warps >= 4; p.warps -= 4) { /* many warps want a ring of as many units */
        p.round_tiles =
            nbi_stream_round_tiles(units, p.warps, NBI_STREAM_ROUND * (n_tokens == 1 ? 2 : 1));
        const uint32_t sums = units * p.sum_floats + n_parts * NBI_TILE_ROWS; /* floats of a tile */
        const uint32_t rest =
            2048 + p.x_bytes + p.scale_bytes + 2 * p.round_tiles * sums * (uint32_t)sizeof(float);
        p.stages = nbi_stream_ring(p, tiles, rest, shared_max) / p.stage_bytes;
        if (p.stages > NBI_STREAM_STAGES) p.stages = NBI_STREAM_STAGES;
        p.shared = rest + p.stages * p.stage_bytes;
        if (p.stages * p.group.d >= p.warps) break;
    }
    p.window = p.stages * p.group.d / (p.warps ? p.warps : 1) * p.warps;
    return p;
}

inline bool nbi_stream_plan_fits(const nbi_stream_plan &p)
{
    return p.warps >= 4 && p.stages >= 2 && p.stages * p.group.d >= p.warps;
}

/* Threads of a launch, and blocks for n_tiles. */
inline dim3 nbi_stream_threads(const nbi_stream_plan &p)
{
    return dim3(p.warps * 32 + 32);
}

inline dim3 nbi_stream_grid(uint32_t n_sms, uint32_t n_tiles)
{
    return dim3(n_tiles < n_sms ? n_tiles : n_sms);
}

/* Shared memory of a block. */
struct nbi_stream_shared {
    uint64_t *full, *empty; /* [stages] */
    char *ring;
    uint32_t *x; /* [k-steps of all parts][pad_tokens][4 lanes][2 words]; of one token
                    [pairs of k-steps][4 lanes][2 k-steps][2 words] */
    float *unit; /* [part][chunk][pad_tokens]: 2^e */
    float *sums; /* [2][tiles of a round], each [units][sum_floats], then [parts][16] row scales */
    uint32_t *notes; /* WORK's */
    uint32_t *zero;  /* [NBI_STREAM_ZEROS] */
};

template <nbi_weight_kind KIND> NBI_DEV nbi_stream_shared nbi_stream_carve(const nbi_stream_plan &p)
{
    char *at = nbi_shared<char>();
    nbi_stream_shared s;
    s.full = reinterpret_cast<uint64_t *>(at);
    s.empty = s.full + NBI_STREAM_STAGES;
    s.notes = reinterpret_cast<uint32_t *>(s.empty + NBI_STREAM_STAGES);
    s.zero = s.notes + 64;
    at += 2048;
    s.ring = at;
    at += p.stages * p.stage_bytes;
    s.x = reinterpret_cast<uint32_t *>(at);
    at += p.x_bytes;
    s.unit = reinterpret_cast<float *>(at);
    at += p.scale_bytes;
    s.sums = reinterpret_cast<float *>(at);
    return s;
}

/* The tiles of a block: blockIdx.x, and every gridDim.x-th behind it. */
template <class WORK> NBI_DEV uint32_t nbi_stream_own_tiles(const WORK &w)
{
    return w.n_tiles > blockIdx.x ? (w.n_tiles - blockIdx.x - 1) / gridDim.x + 1 : 0;
}

/* Asks for the units of stage `stage`: group of chunks from chunk c on, of a part of a tile. */
template <nbi_weight_kind KIND, class WORK>
NBI_DEV void nbi_stream_ask_stage(const WORK &w, const nbi_stream_plan &plan,
                                  const nbi_stream_shared &s, uint32_t tile, uint32_t part,
                                  uint32_t c, uint32_t stage)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND), TILE = nbi_tile_bytes(KIND);
    constexpr uint32_t SCALES = KIND == NBI_WEIGHT_NVFP4 ? 64u : 0u;
    nbi_cuda_packed m;
    const size_t first = (size_t)w.at(s.notes, tile, part, &m) * m.n_kt;
    const uint32_t kt = c * CT, all = plan.group.d * CT, left = m.n_kt - kt;
    const uint32_t tiles = left < all ? left : all;
    char *to = s.ring + stage * plan.stage_bytes;
    nbi_bar_expect(&s.full[stage], tiles * (TILE + SCALES) + (c ? 0 : 64));
    nbi_copy_bulk(to, static_cast<const char *>(m.data) + (first + kt) * TILE, tiles * TILE,
                  &s.full[stage]);
    if (SCALES)
        nbi_copy_bulk(to + all * TILE, static_cast<const char *>(m.scales) + (first + kt) * SCALES,
                      tiles * SCALES, &s.full[stage]);
    if (c == 0)
        nbi_copy_bulk(to + all * (TILE + SCALES), m.row_scale + first / m.n_kt * NBI_TILE_ROWS, 64,
                      &s.full[stage]);
}

/* One lane: asks for the units of all tiles of the block, in order: they come in the order of
 * asking, and are wanted in it. */
template <nbi_weight_kind KIND, class WORK>
NBI_DEV void nbi_stream_ask(const WORK &w, const nbi_stream_plan &plan, const nbi_stream_shared &s)
{
    const uint32_t n = nbi_stream_own_tiles(w);
    uint32_t stage = 0, turn = 0;
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t part = 0; part < w.n_parts; part++) {
            for (uint32_t c = 0; c < w.n_chunks; c += plan.group.d) {
                if (turn) nbi_bar_wait(&s.empty[stage], (turn - 1) & 1u);
                nbi_stream_ask_stage<KIND>(w, plan, s, blockIdx.x + i * gridDim.x, part, c, stage);
                if (++stage == plan.stages) stage = 0, turn++;
            }
        }
    }
}

/* One warp: a chunk of a token's x, lane l with columns 4 l ... (and 128 + 4 l ...), to B fragments
 * in shared memory, and its 2^e. */
template <nbi_weight_kind KIND>
NBI_DEV void nbi_stream_put(const nbi_stream_plan &plan, const nbi_stream_shared &s, uint32_t unit,
                            uint32_t token, const nbi_f32x4 *v)
{
    constexpr uint32_t COLS = nbi_chunk_tiles(KIND) * NBI_TILE_COLS, LOADS = COLS / 128;
    const uint32_t lane = (uint32_t)nbi_lane();
    int e = 0;
    if (KIND != NBI_WEIGHT_BF16) {
        uint32_t most = 0;
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) most = nbi_amax_bits(most, v[i]);
        e = nbi_chunk_exponent(nbi_warp_max(most));
    }
#pragma unroll
    for (uint32_t i = 0; i < LOADS; i++) {
        uint32_t b[2];
        nbi_x_fragment<KIND>(b, v[i], nbi_pow2(-e));
        const uint32_t step = unit * (COLS / 16) + (i * 32 + lane) / 4;
        uint32_t *to =
            s.x + (plan.pad_tokens == 1 ? (step / 2 * 4 + lane % 4) * 4 + step % 2 * 2
                                        : ((step * plan.pad_tokens + token) * 4 + lane % 4) * 2);
        to[0] = b[0];
        to[1] = b[1];
    }
    if (lane == 0) s.unit[unit * plan.pad_tokens + token] = nbi_pow2(e);
}

/* Where a chunk of a token's x lies: of item i, chunk i % units of token i / units. */
struct nbi_stream_item {
    const float *row; /* NULL: zeros */
    uint32_t first;   /* the lane's column */
};

template <nbi_weight_kind KIND, uint32_t NT, class WORK>
NBI_DEV nbi_stream_item nbi_stream_item_of(const WORK &w, const nbi_stream_plan &plan,
                                           const nbi_stream_shared &s, uint32_t i)
{
    const uint32_t token = NT == 0 ? 0 : nbi_div(i, plan.units), unit = i - token * plan.units.d;
    const uint32_t part = nbi_div(unit, plan.chunks);
    const uint32_t c = (unit - part * plan.chunks.d) * nbi_chunk_tiles(KIND) * NBI_TILE_COLS;
    return {token < w.n_tokens && unit < plan.units.d ? w.x(s.notes, token, part) : nullptr,
            c + 4 * (uint32_t)nbi_lane()};
}

/* It as nbi_stream_put() takes it. */
template <nbi_weight_kind KIND, class WORK>
NBI_DEV void nbi_stream_load_x(nbi_f32x4 *v, const WORK &w, const nbi_stream_item &at)
{
#pragma unroll
    for (uint32_t k = 0; k < nbi_chunk_tiles(KIND) / 2; k++)
        v[k] = nbi_x_load(at.row, at.first + k * 128, at.row ? w.cols : 0, w.x_fast);
}

/* The warps that multiply: all of x, a warp two chunks at a time; where the first two lie is found
 * before the wait. A barrier follows. */
template <nbi_weight_kind KIND, uint32_t NT, class WORK>
NBI_DEV void nbi_stream_take_x(const WORK &w, const nbi_stream_plan &plan,
                               const nbi_stream_shared &s, uint32_t warp)
{
    constexpr uint32_t LOADS = nbi_chunk_tiles(KIND) / 2;
    const uint32_t all = plan.units.d * plan.pad_tokens;
    nbi_stream_item at[2];
#pragma unroll
    for (uint32_t k = 0; k < 2; k++)
        at[k] = nbi_stream_item_of<KIND, NT>(w, plan, s, warp + k * plan.warps);
    if (!WORK::WAITS) nbi_wait_before();
    for (uint32_t i = warp; i < all;) {
        const uint32_t j = i + plan.warps;
        nbi_f32x4 v[LOADS], after[LOADS] = {};
        nbi_stream_load_x<KIND>(v, w, at[0]);
        if (j < all) nbi_stream_load_x<KIND>(after, w, at[1]);
        nbi_stream_put<KIND>(plan, s, nbi_mod(i, plan.units), nbi_div(i, plan.units), v);
        if (j < all)
            nbi_stream_put<KIND>(plan, s, nbi_mod(j, plan.units), nbi_div(j, plan.units), after);
        i += 2 * plan.warps;
        if (i >= all) break;
#pragma unroll
        for (uint32_t k = 0; k < 2; k++)
            at[k] = nbi_stream_item_of<KIND, NT>(w, plan, s, i + k * plan.warps);
    }
}

/* Where a lane reads x, in words of the block's shared memory. Of one token there is one column:
 * the lanes of the others read zeros, wherever the unit is (loads of four lanes alone are slower).
 */
struct nbi_stream_x_at {
    uint32_t at, step, unit; /* step, unit: words from a k-step, a unit to the next */
};

template <nbi_weight_kind KIND, uint32_t NT>
NBI_DEV nbi_stream_x_at nbi_stream_x_place(const nbi_stream_plan &plan, const nbi_stream_shared &s)
{
    constexpr uint32_t STEPS = nbi_chunk_tiles(KIND) * NBI_TILE_STEPS;
    const uint32_t lane = (uint32_t)nbi_lane();
    const uint32_t x = (uint32_t)(s.x - nbi_shared<uint32_t>());
    const uint32_t zero = (uint32_t)(s.zero - nbi_shared<uint32_t>());
    if (NT == 0) return {lane < 4 ? x + lane * 4 : zero, 8, lane < 4 ? STEPS * 8 : 0};
    return {x + lane * 2, plan.pad_tokens * 8, STEPS * plan.pad_tokens * 8};
}

template <uint32_t NT> NBI_DEV void nbi_stream_x(uint32_t b[NT][2], uint32_t at)
{
#pragma unroll
    for (uint32_t j = 0; j < NT; j++) {
        const nbi_u32x2 v =
            *reinterpret_cast<const nbi_u32x2 *>(nbi_shared<uint32_t>() + at + j * 64);
        b[j][0] = v.v[0];
        b[j][1] = v.v[1];
    }
}

/* One lane's part of a tile that lies in the ring. */
template <nbi_weight_kind KIND>
NBI_DEV void nbi_stream_tile(nbi_tile<KIND> *t, const char *unit, const char *scales, uint32_t tile)
{
    const uint32_t lane = (uint32_t)nbi_lane();
    const char *at = unit + tile * nbi_tile_bytes(KIND) + lane * 16;
    if constexpr (KIND == NBI_WEIGHT_NVFP4) {
        t->codes = *reinterpret_cast<const nbi_u32x4 *>(at);
        t->scales = *reinterpret_cast<const nbi_u32x2 *>(scales + tile * 64 + lane / 4 * 8);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < nbi_tile_bytes(KIND) / 512; i++)
            t->v[i] = *reinterpret_cast<const nbi_u32x4 *>(at + i * 512);
    }
}

/* Adds tile k of a unit to p; x is at the unit's first k-step. */
template <nbi_weight_kind KIND, uint32_t NT>
NBI_DEV void nbi_stream_add_tile(float p[][4], const char *unit, const char *scales, uint32_t k,
                                 nbi_stream_x_at x)
{
    constexpr uint32_t N = NT ? NT : 1;
    nbi_tile<KIND> t;
    nbi_stream_tile<KIND>(&t, unit, scales, k);
    nbi_u32x4 pair[2]; /* x of two k-steps each */
    if constexpr (NT == 0) {
        const uint32_t *at = nbi_shared<uint32_t>() + x.at + k * NBI_TILE_STEPS * 8;
        pair[0] = *reinterpret_cast<const nbi_u32x4 *>(at);
        pair[1] = *reinterpret_cast<const nbi_u32x4 *>(at + 16);
    }
#pragma unroll
    for (uint32_t q = 0; q < NBI_TILE_STEPS; q++) {
        uint32_t a[4], b[N][2];
        if constexpr (NT == 0) {
            b[0][0] = pair[q / 2].v[q % 2 * 2];
            b[0][1] = pair[q / 2].v[q % 2 * 2 + 1];
        } else {
            nbi_stream_x<NT>(b, x.at + (k * NBI_TILE_STEPS + q) * x.step);
        }
        t.fragment(a, q);
#pragma unroll
        for (uint32_t j = 0; j < N; j++) nbi_tile_mma<KIND>(p[j], a, b[j]);
    }
}

/* p of a unit; x is at its first k-step. */
template <nbi_weight_kind KIND, uint32_t NT>
NBI_DEV void nbi_stream_multiply(float p[][4], const char *unit, const char *scales, uint32_t tiles,
                                 nbi_stream_x_at x)
{
#pragma unroll
    for (uint32_t j = 0; j < (NT ? NT : 1); j++) p[j][0] = p[j][1] = p[j][2] = p[j][3] = 0;
    if (tiles == nbi_chunk_tiles(KIND)) { /* nothing between the tiles: loads go ahead */
#pragma unroll
        for (uint32_t k = 0; k < nbi_chunk_tiles(KIND); k++)
            nbi_stream_add_tile<KIND, NT>(p, unit, scales, k, x);
        return;
    }
#pragma unroll 1
    for (uint32_t k = 0; k < tiles; k++) nbi_stream_add_tile<KIND, NT>(p, unit, scales, k, x);
}

/* p of a unit to shared memory and back. Of one token there is one column, in lanes with t = 0. */
template <uint32_t NT> NBI_DEV void nbi_stream_put_sums(float *sums, const float p[][4])
{
    const uint32_t lane = (uint32_t)nbi_lane();
    if constexpr (NT == 0) {
        if (lane % 4 == 0)
            *reinterpret_cast<nbi_f32x2 *>(sums + lane / 4 * 2) = {{p[0][0], p[0][2]}};
    } else {
#pragma unroll
        for (uint32_t j = 0; j < NT; j++)
            *reinterpret_cast<nbi_f32x4 *>(sums + (j * 32 + lane) *
                                                      4) = {{p[j][0], p[j][1], p[j][2], p[j][3]}};
    }
}

/* Of one token: its sums in the first column; the others repeat it and nobody takes them. */
template <nbi_weight_kind KIND, class WORK>
NBI_DEV void nbi_stream_add_one(float y[4], const WORK &w, const nbi_stream_shared &s,
                                const float *sums, uint32_t part, const nbi_cuda_packed &m,
                                uint32_t rt)
{
    const uint32_t first = part * w.n_chunks;
    const float *at = sums + first * 16 + nbi_lane() / 4 * 2, *unit = s.unit + first;
#pragma unroll 8
    for (uint32_t c = 0; c < w.n_chunks; c++) {
        const nbi_f32x2 p = *reinterpret_cast<const nbi_f32x2 *>(at + c * 16);
        const nbi_f32x2 block = nbi_tile_block_scale<KIND>(m, rt, c);
        y[0] = fmaf(p.v[0], unit[c] * block.v[0], y[0]);
        y[2] = fmaf(p.v[1], unit[c] * block.v[1], y[2]);
    }
}

template <nbi_weight_kind KIND, uint32_t NT, class WORK>
NBI_DEV void nbi_stream_add_chunks(float y[NT][4], const WORK &w, const nbi_stream_plan &plan,
                                   const nbi_stream_shared &s, const float *sums, uint32_t part,
                                   const nbi_cuda_packed &m, uint32_t rt)
{
    const uint32_t lane = (uint32_t)nbi_lane();
#pragma unroll 4
    for (uint32_t c = 0; c < w.n_chunks; c++) {
        const uint32_t unit = part * w.n_chunks + c;
        const nbi_f32x2 block = nbi_tile_block_scale<KIND>(m, rt, c);
#pragma unroll
        for (uint32_t j = 0; j < NT; j++) {
            const nbi_f32x4 p = *reinterpret_cast<const nbi_f32x4 *>(sums + unit * plan.sum_floats +
                                                                     (j * 32 + lane) * 4);
            const nbi_f32x2 two = *reinterpret_cast<const nbi_f32x2 *>(
                s.unit + unit * plan.pad_tokens + j * 8 + lane % 4 * 2);
            nbi_chunk_add(y[j], p.v, two.v, block);
        }
    }
}

/* Of one token, by a lane for each row: its sum over the chunks of a tile that has one part. */
template <nbi_weight_kind KIND, class WORK>
NBI_DEV float nbi_stream_add_row(const WORK &w, const nbi_stream_shared &s, const float *sums,
                                 uint32_t tile, uint32_t row)
{
    const float *at = sums + row % 8 * 2 + row / 8;
    nbi_cuda_packed m;
    uint32_t rt = 0;
    float y = 0;
    if (KIND == NBI_WEIGHT_FP8_BLOCK) rt = w.at(s.notes, tile, 0, &m);
#pragma unroll 8
    for (uint32_t c = 0; c < w.n_chunks; c++) {
        const float unit = KIND == NBI_WEIGHT_BF16 ? 1.0f : s.unit[c];
        y = fmaf(at[c * 16], unit * nbi_tile_block_scale<KIND>(m, rt, c).v[row / 8], y);
    }
    return y;
}

/* One warp: adds the chunks of every part of a tile and hands the sums to WORK::finish(), which
 * gets them part by part in ascending order: y[i] of token 2 (lane % 4) + i % 2 (+ 8 j), row
 * lane / 4 (+ 8 for i >= 2) of the tile; scale: row_scale of the two rows. */
template <nbi_weight_kind KIND, uint32_t NT, class WORK>
NBI_DEV void nbi_stream_reduce(const WORK &w, const nbi_stream_plan &plan,
                               const nbi_stream_shared &s, const float *sums, uint32_t tile)
{
    const uint32_t lane = (uint32_t)nbi_lane(), t = lane % 4, units = w.n_parts * w.n_chunks;
    constexpr uint32_t N = NT ? NT : 1;
    typename WORK::result out[N] = {};
    for (uint32_t part = 0; part < w.n_parts; part++) {
        nbi_cuda_packed m;
        uint32_t rt = 0;
        if (KIND == NBI_WEIGHT_FP8_BLOCK) rt = w.at(s.notes, tile, part, &m);
        const float *rows = sums + units * plan.sum_floats + part * NBI_TILE_ROWS;
        const float scale[2] = {rows[lane / 4], rows[lane / 4 + 8]};
        float y[N][4] = {};
        if constexpr (NT == 0)
            nbi_stream_add_one<KIND>(y[0], w, s, sums, part, m, rt);
        else
            nbi_stream_add_chunks<KIND, NT>(y, w, plan, s, sums, part, m, rt);
#pragma unroll
        for (uint32_t j = 0; j < N; j++) w.part(s.notes, &out[j], y[j], scale, part);
    }
#pragma unroll
    for (uint32_t j = 0; j < N; j++) w.finish(s.notes, out[j], tile, lane / 4, j * 8 + 2 * t);
}

/* Where the sums of a tile go, if WORK can say so; else nothing. */
struct nbi_stream_nowhere {
};

template <class WORK, uint32_t NT> NBI_DEV auto nbi_stream_place_of(const WORK &w, uint32_t tile)
{
    if constexpr (NT == 0 && requires { w.place_of(tile, 0u); })
        return w.place_of(tile, (uint32_t)nbi_lane());
    else
        return nbi_stream_nowhere();
}

/* One warp: unit u of the block, which lies at place `at` of the ring and is number `unit` of its
 * tile; its sums go to `to`, those of the tile. Returns its stage. */
template <nbi_weight_kind KIND, uint32_t NT, class WORK>
NBI_DEV uint32_t nbi_stream_unit(const WORK &w, const nbi_stream_plan &plan,
                                 const nbi_stream_shared &s, uint32_t at, uint32_t turn,
                                 uint32_t unit, float *to)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND), TILE = nbi_tile_bytes(KIND);
    const nbi_stream_x_at x = nbi_stream_x_place<KIND, NT>(plan, s);
    const uint32_t lane = (uint32_t)nbi_lane(), units = w.n_parts * w.n_chunks;
    const uint32_t n_kt = (w.cols + NBI_TILE_COLS - 1) / NBI_TILE_COLS;
    const uint32_t part = nbi_div(unit, plan.chunks), kt = (unit - part * plan.chunks.d) * CT;
    const uint32_t stage = nbi_div(at, plan.group), own = at - stage * plan.group.d;
    const char *codes = s.ring + stage * plan.stage_bytes;
    const char *scales = codes + plan.group.d * CT * TILE;
    const char *row_scales = codes + plan.stage_bytes - 64;
    float p[NT ? NT : 1][4];
    nbi_bar_wait(&s.full[stage], turn & 1u);
    nbi_stream_multiply<KIND, NT>(p, codes + own * CT * TILE, scales + own * CT * 64,
                                  n_kt - kt < CT ? n_kt - kt : CT,
                                  {x.at + unit * x.unit, x.step, x.unit});
    if (kt == 0 && lane < NBI_TILE_ROWS)
        to[units * plan.sum_floats + part * NBI_TILE_ROWS + lane] =
            reinterpret_cast<const float *>(row_scales)[lane];
    nbi_stream_put_sums<NT>(to + unit * plan.sum_floats, p);
    return stage;
}

/* One warp: a tile whose sums are there. */
template <nbi_weight_kind KIND, uint32_t NT, class WORK, class PLACE>
NBI_DEV void nbi_stream_end_tile(const WORK &w, const nbi_stream_plan &plan,
                                 const nbi_stream_shared &s, const float *sums, uint32_t tile,
                                 const PLACE &place)
{
    const uint32_t lane = (uint32_t)nbi_lane();
    if constexpr (!std::is_same_v<PLACE, nbi_stream_nowhere>) {
        if (lane < NBI_TILE_ROWS)
            w.put_row(place, nbi_stream_add_row<KIND>(w, s, sums, tile, lane),
                      sums[w.n_chunks * 16 + lane]);
    } else if constexpr (requires { w.template reduce<KIND>(plan, s, sums, tile); }) {
        w.template reduce<KIND>(plan, s, sums, tile);
    } else {
        nbi_stream_reduce<KIND, NT>(w, plan, s, sums, tile);
    }
}

/* The warps that multiply, over the block's n tiles, which all fit the ring and a round. place: of
 * the tile that the warp adds up. */
template <nbi_weight_kind KIND, uint32_t NT, class WORK, class PLACE>
NBI_DEV void nbi_stream_consume_once(const WORK &w, const nbi_stream_plan &plan,
                                     const nbi_stream_shared &s, uint32_t warp, uint32_t n,
                                     const PLACE &place)
{
    const uint32_t units = w.n_parts * w.n_chunks, all = n * units;
    const uint32_t tile_floats = units * plan.sum_floats + w.n_parts * NBI_TILE_ROWS;
#pragma unroll 1
    for (uint32_t u = warp; u < all; u += plan.warps) {
        const uint32_t tile = nbi_div(u, plan.units);
        nbi_stream_unit<KIND, NT>(w, plan, s, u, 0, u - tile * units, s.sums + tile * tile_floats);
    }
    nbi_sync_some(1, plan.warps * 32);
    if (warp < n)
        nbi_stream_end_tile<KIND, NT>(w, plan, s, s.sums + warp * tile_floats,
                                      blockIdx.x + warp * gridDim.x, place);
}

/* The same for any number of tiles. */
template <nbi_weight_kind KIND, uint32_t NT, class WORK>
NBI_DEV void nbi_stream_consume(const WORK &w, const nbi_stream_plan &plan,
                                const nbi_stream_shared &s, uint32_t warp, uint32_t n)
{
    const uint32_t units = w.n_parts * w.n_chunks;
    const uint32_t tile_floats = units * plan.sum_floats + w.n_parts * NBI_TILE_ROWS;
    const uint32_t ring = plan.stages * plan.group.d; /* units */
    uint32_t place = 0, turn = 0;                     /* of the round's first unit */
    for (uint32_t first = 0, side = 0; first < n; first += plan.round_tiles, side ^= 1) {
        const uint32_t left = n - first, tiles = left < plan.round_tiles ? left : plan.round_tiles;
        const uint32_t all = tiles * units;
        float *sums = s.sums + side * plan.round_tiles * tile_floats;
        /* the warp's unit: in which tile, which chunk of which part, where in the ring; counted on
         * rather than divided */
        uint32_t at = place + warp, at_turn = turn, unit = warp, tile = 0, next = plan.window;
        for (uint32_t u = warp;; u += plan.warps) {
            while (at >= ring) at -= ring, at_turn++;
            while (unit >= units) unit -= units, tile++;
            while (next <= u && next < all) {
                nbi_sync_some(1, plan.warps * 32);
                next += plan.window;
            }
            if (u >= all) break;
            const uint32_t stage =
                nbi_stream_unit<KIND, NT>(w, plan, s, at, at_turn, unit, sums + tile * tile_floats);
            __syncwarp();
            nbi_bar_arrive(&s.empty[stage]);
            at += plan.warps;
            unit += plan.warps;
        }
        nbi_sync_some(1, plan.warps * 32);
        for (place += all; place >= ring; turn++) place -= ring;
        if (warp >= tiles) continue;
        const uint32_t own = blockIdx.x + (first + warp) * gridDim.x;
        nbi_stream_end_tile<KIND, NT>(w, plan, s, sums + warp * tile_floats, own,
                                      nbi_stream_place_of<WORK, NT>(w, own));
    }
}

/* The whole kernel: nbi_stream_threads(). */
template <nbi_weight_kind KIND, uint32_t NT, class WORK>
NBI_DEV void nbi_stream_run(const WORK &w, const nbi_stream_plan &plan)
{
    const nbi_stream_shared s = nbi_stream_carve<KIND>(plan);
    const uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x < plan.stages) { /* no more than there are threads */
        nbi_bar_init(&s.full[threadIdx.x], 1);
        nbi_bar_init(&s.empty[threadIdx.x], plan.group.d * 32); /* every lane that read */
    }
    if (threadIdx.x < NBI_STREAM_ZEROS) s.zero[threadIdx.x] = 0; /* there are as many threads */
    nbi_bar_init_done();
    if (WORK::WAITS) nbi_wait_before();
    w.begin(s.notes);
    __syncthreads();
    nbi_let_next(); /* if WAITS, the next kernel may count on what we waited for */
    if (warp == plan.warps) {
        if (nbi_lane() == 0) nbi_stream_ask<KIND>(w, plan, s);
        __syncwarp();
        if (!WORK::WAITS) nbi_wait_before();
        return;
    }
    const uint32_t n = nbi_stream_own_tiles(w); /* a division that nobody waits for here */
    const auto place =
        nbi_stream_place_of<WORK, NT>(w, blockIdx.x + (warp < n ? warp : 0) * gridDim.x);
    if constexpr (requires { w.template take<KIND, NT>(plan, s, warp); })
        w.template take<KIND, NT>(plan, s, warp);
    else
        nbi_stream_take_x<KIND, NT>(w, plan, s, warp);
    nbi_sync_some(1, plan.warps * 32);
    if (n <= plan.round_tiles && n * plan.units.d <= plan.stages * plan.group.d)
        nbi_stream_consume_once<KIND, NT>(w, plan, s, warp, n, place);
    else
        nbi_stream_consume<KIND, NT>(w, plan, s, warp, n);
}
