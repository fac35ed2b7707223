/* One row, all weights of a block on their way at once: every warp asks for the units that it will
 * multiply (a unit is a row tile's chunk), so that nothing stands between the ids and the copies.
 * Two kernels; same bits as moe_gemv.cu. Callers: moe_runners.cu.
 *
 *   gate_up  an equal, contiguous share of the row tiles of all chosen experts; waits for the ids.
 *            As much of a shared expert's, which are asked for before the wait
 *   down     an equal share of the output's row tiles over all slots. It asks before gate_up has
 *            ended: gate_up lets it start only when the ids were there (its nbi_let_next() stands
 *            behind its nbi_wait_before()), and reads them past the L1 cache */
#include "backend/cuda/stream.h"
#include "moe/cuda/moe_cuda.h"

/* Registers of both kernels fit a multiprocessor: down begins while gate_up runs. */
#define WARPS      16u
#define DOWN_WARPS 12u
#define UNITS_MAX  64u          /* of a block */
#define MOST       (150u << 10) /* bytes of shared memory: down's are there beside gate_up's */

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
__host__ __device__ inline uint32_t lay_out(one_shared *s, char *base, uint32_t units,
                                            uint32_t unit_bytes)
{
    uint32_t at = UNITS_MAX * 8;
    s->full = reinterpret_cast<uint64_t *>(base);
    s->ring = base + at;
    at += units * unit_bytes;
    s->sums = reinterpret_cast<float *>(base + at);
    at += units * 64;
    s->unit = reinterpret_cast<float *>(base + at);
    return at + units * 4;
}

/* Of n tiles those of block b are first_tile(n, b) ... first_tile(n, b + 1) - 1. */
static NBI_DEV uint32_t first_tile(uint32_t n, uint32_t b)
{
    return n * b / gridDim.x;
}

/* The tiles of a block of gate_up: the shared expert's, then those of the slots with ids. */
struct up_tiles {
    uint32_t n, n_shared; /* all of them; the shared expert's */
    uint32_t first, base; /* its first row tile; tile k behind them is tile base + k of the slots */

    NBI_DEV explicit up_tiles(const one_args &a)
    {
        const uint32_t b = blockIdx.x, all = a.slots.n > a.slots.top_k ? a.w.first.n_rt : 0;
        first = first_tile(all, b);
        n_shared = first_tile(all, b + 1) - first;
        base = first_tile(a.n_tiles, b) - n_shared;
        n = first_tile(a.n_tiles, b + 1) - base;
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
static NBI_DEV uint32_t load_ids(const one_args &a)
{
    const uint32_t lane = (uint32_t)nbi_lane();
    return lane < a.slots.n ? (uint32_t)a.slots.slot_expert(lane) : UINT32_MAX;
}

/* The group of units that a thread asks for: those that are multiplied first by the first lanes. */
static NBI_DEV uint32_t own_group(uint32_t warp, uint32_t n_warps)
{
    return warp + (uint32_t)nbi_lane() * n_warps;
}

/* Tiles of n chunks from chunk c on. */
template <nbi_weight_kind KIND>
static NBI_DEV uint32_t tiles_of(const one_args &a, uint32_t c, uint32_t n)
{
    const uint32_t left = a.w.first.n_kt - c * nbi_chunk_tiles(KIND);
    return left < n * nbi_chunk_tiles(KIND) ? left : n * nbi_chunk_tiles(KIND);
}

/* One thread: the barrier of group q, from chunk c on, waits for its bytes. */
template <nbi_weight_kind KIND>
static NBI_DEV void open_group(const one_args &a, const one_shared &s, uint32_t q, uint32_t c)
{
    constexpr uint32_t SCALES = KIND == NBI_WEIGHT_NVFP4 ? 64u : 0u;
    nbi_bar_init(s.full + q, 1);
    nbi_bar_init_done();
    nbi_bar_expect(s.full + q, tiles_of<KIND>(a, c, a.group.d) * (nbi_tile_bytes(KIND) + SCALES));
}

/* One thread: asks for group q, row tile rt from chunk c on. Scales first: copies arrive in order,
 * and behind the codes of all groups they would hold up the first. */
template <nbi_weight_kind KIND>
static NBI_DEV void ask(const one_args &a, const one_shared &s, uint32_t q, uint32_t expert,
                        uint32_t rt, uint32_t c)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND), TILE = nbi_tile_bytes(KIND);
    constexpr uint32_t SCALES = KIND == NBI_WEIGHT_NVFP4 ? 64u : 0u;
    const uint32_t n = tiles_of<KIND>(a, c, a.group.d);
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
static NBI_DEV void multiply(const one_args &a, const one_shared &s, uint32_t u, uint32_t c,
                             const one_x<KIND> &x)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND), TILE = nbi_tile_bytes(KIND);
    const uint32_t q = nbi_div(u, a.group), in = u - q * a.group.d, n = tiles_of<KIND>(a, c, 1);
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

template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(WARPS *NBI_WARP, 2)
    one_gate_up_kernel(const __grid_constant__ one_args a)
{
    one_shared s;
    lay_out(&s, nbi_shared<char>(), a.units, nbi_stream_unit_bytes(KIND));
    const uint32_t lane = (uint32_t)nbi_lane();
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
    const up_tiles tiles(a);
    const uint32_t n = tiles.n, units = n * a.n_chunks;
    const uint32_t own = own_group(warp, WARPS), first = own * a.group.d;
    const uint32_t own_tile = nbi_div(first, a.chunks), own_c = nbi_mod(first, a.chunks);
    if (first < units) open_group<KIND>(a, s, own, own_c);
    if (own_tile < tiles.n_shared)
        ask<KIND>(a, s, own, a.slots.n_experts, tiles.first + own_tile, own_c);
    __syncthreads();
    nbi_wait_before();
    nbi_let_next(); /* not before the wait: down reads the ids that we waited for */
    const uint32_t id = load_ids(a);
    uint32_t c = nbi_mod(warp, a.chunks);
    one_row<KIND> row_x;
    one_x<KIND> x;
    row_x.load(a, a.x, c);
    /* who ends a row: 8 rows of tile k */
    const uint32_t k = threadIdx.x / 8, g = threadIdx.x % 8, tile = k < n ? k : 0;
    const uint32_t slot = tiles.slot(a, tile), rt = tiles.row_tile(a, tile), row = rt * 8 + g;
    const uint32_t e = __shfl_sync(NBI_FULL_MASK, id, (int)slot);
    const bool ends = k < n && e != UINT32_MAX && row < a.w.first.rows;
    nbi_cuda_packed m = a.w.first;
    float gate_scale = 0, up_scale = 0;
    if (ends) {
        m = nbi_moe_expert(a.w, e);
        gate_scale = m.row_scale[rt * 16 + g];
        up_scale = m.row_scale[rt * 16 + 8 + g];
    }
    const uint32_t own_e = __shfl_sync(NBI_FULL_MASK, id, (int)(tiles.slot(a, own_tile) & 31));
    if (first < units && own_tile >= tiles.n_shared && own_e != UINT32_MAX)
        ask<KIND>(a, s, own, own_e, tiles.row_tile(a, own_tile), own_c);
    /* bit j: unit warp + j WARPS has no expert */
    const uint32_t at = tiles.slot(a, nbi_div(warp + lane * WARPS, a.chunks)) & 31;
    const uint32_t none =
        __ballot_sync(NBI_FULL_MASK, __shfl_sync(NBI_FULL_MASK, id, (int)at) == UINT32_MAX);
    x.make(row_x);
    for (uint32_t u = warp; u < units; u += WARPS) {
        if (nbi_mod(u, a.chunks) != c) {
            c = nbi_mod(u, a.chunks);
            row_x.load(a, a.x, c);
            x.make(row_x);
        }
        if (u < a.n_chunks && lane == 0) s.unit[c] = x.two_e;
        if (!(none >> u / WARPS & 1)) multiply<KIND>(a, s, u, c, x);
    }
    __syncthreads();
    if (!ends) return;
    float gate = 0, up = 0;
#pragma unroll 4
    for (c = 0; c < a.n_chunks; c++) {
        const nbi_f32x2 p =
            *reinterpret_cast<const nbi_f32x2 *>(s.sums + (k * a.n_chunks + c) * 16 + g * 2);
        const nbi_f32x2 block = nbi_tile_block_scale<KIND>(m, rt, c);
        gate = fmaf(p.v[0], s.unit[c] * block.v[0], gate);
        up = fmaf(p.v[1], s.unit[c] * block.v[1], up);
    }
    a.out[(size_t)slot * a.w.first.rows + row] = nbi_moe_swiglu(gate * gate_scale, up * up_scale);
}

/* Row scales of the summing lanes: lane l has slot slot0 + l / 4, rows 2 r, 2 r + 8, 2 r + 1,
 * 2 r + 9 of row tile rt, r = l % 4. */
static NBI_DEV nbi_f32x4 load_scales(const one_args &a, uint32_t id, uint32_t slot0, uint32_t rt)
{
    const uint32_t lane = (uint32_t)nbi_lane(), slot = slot0 + lane / 4;
    const uint32_t e = __shfl_sync(NBI_FULL_MASK, id, (int)(slot & 31));
    nbi_f32x4 scale = {{0, 0, 0, 0}};
    if (slot >= a.slots.n || e == UINT32_MAX) return scale;
    const float *from = nbi_moe_expert(a.w, e).row_scale + rt * 16 + lane % 4 * 2;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) scale.v[i] = from[i / 2 + i % 2 * 8];
    return scale;
}

/* One warp: row tile rt of the output, its sums from unit `first` on. Slots 8 at a time, as
 * load_scales() divides them, whose values for the first 8 are `scale`; then the slots in their
 * order. */
template <nbi_weight_kind KIND>
static NBI_DEV void sum_slots(const one_args &a, const one_shared &s, uint32_t id, float weight,
                              uint32_t rt, uint32_t first, nbi_f32x4 scale)
{
    const uint32_t lane = (uint32_t)nbi_lane(), r = lane % 4;
    float sum[4] = {0, 0, 0, 0};
    const uint32_t n_slots = a.slots.n;
    for (uint32_t slot0 = 0; slot0 < n_slots; slot0 += 8) {
        const uint32_t slot = slot0 + lane / 4, n = n_slots - slot0 < 8 ? n_slots - slot0 : 8;
        const uint32_t e = __shfl_sync(NBI_FULL_MASK, id, (int)(slot & 31));
        float y[4] = {0, 0, 0, 0};
        if (slot0 > 0) scale = load_scales(a, id, slot0, rt);
        if (slot < n_slots && e != UINT32_MAX) {
            const nbi_cuda_packed m = nbi_moe_expert(a.w, e);
#pragma unroll 4
            for (uint32_t c = 0; c < a.n_chunks; c++) {
                const uint32_t u = first + slot * a.n_chunks + c;
                const nbi_f32x4 p = *reinterpret_cast<const nbi_f32x4 *>(s.sums + u * 16 + r * 4);
                const nbi_f32x2 block = nbi_tile_block_scale<KIND>(m, rt, c);
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                    y[i] = fmaf(p.v[i], s.unit[u] * block.v[i % 2], y[i]);
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) y[i] *= scale.v[i];
        }
        for (uint32_t k = 0; k < n; k++) {
            const bool none = __shfl_sync(NBI_FULL_MASK, id, (int)(slot0 + k)) == UINT32_MAX;
            const float by = __shfl_sync(NBI_FULL_MASK, weight, (int)(slot0 + k));
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const float v = __shfl_sync(NBI_FULL_MASK, y[i], (int)(k * 4 + r));
                sum[i] = none ? sum[i] : fmaf(by, v, sum[i]);
            }
        }
    }
    if (lane >= 4) return;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t row = rt * 16 + 2 * r + i / 2 + i % 2 * 8;
        if (row < a.w.first.rows) a.out[row] = sum[i];
    }
}

template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(DOWN_WARPS *NBI_WARP, 2)
    one_down_kernel(const __grid_constant__ one_args a)
{
    one_shared s;
    lay_out(&s, nbi_shared<char>(), a.units, nbi_stream_unit_bytes(KIND));
    const uint32_t lane = (uint32_t)nbi_lane();
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
    const uint32_t t0 = first_tile(a.n_tiles, blockIdx.x);
    const uint32_t n = first_tile(a.n_tiles, blockIdx.x + 1) - t0;
    const uint32_t units = n * a.each.d, own = own_group(warp, DOWN_WARPS), first = own * a.group.d;
    const uint32_t id = load_ids(a);
    const uint32_t own_e =
        __shfl_sync(NBI_FULL_MASK, id, (int)nbi_div(nbi_mod(first, a.each), a.chunks));
    if (first < units && own_e != UINT32_MAX) {
        open_group<KIND>(a, s, own, nbi_mod(first, a.chunks));
        ask<KIND>(a, s, own, own_e, t0 + nbi_div(first, a.each), nbi_mod(first, a.chunks));
    }
    const float weight = a.slots.slot_weight(lane);
    nbi_f32x4 scale = {{0, 0, 0, 0}};
    if (warp < n) scale = load_scales(a, id, 0, t0 + warp);
    __syncthreads();
    nbi_let_next();
    nbi_wait_before();
    const auto row = [&](uint32_t u) {
        const uint32_t slot = nbi_div(nbi_mod(u, a.each), a.chunks);
        const bool none = __shfl_sync(NBI_FULL_MASK, id, (int)slot) == UINT32_MAX;
        return u < units && !none ? a.x + (size_t)slot * a.w.first.cols : nullptr;
    };
    for (uint32_t u = warp; u < units; u += 2 * DOWN_WARPS) {
        const uint32_t v = u + DOWN_WARPS, c[2] = {nbi_mod(u, a.chunks), nbi_mod(v, a.chunks)};
        const float *from[2] = {row(u), row(v)};
        one_row<KIND> x[2];
        one_x<KIND> b;
        x[0].load(a, from[0], c[0]);
        x[1].load(a, from[1], c[1]);
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            if (!from[j]) continue;
            b.make(x[j]);
            if (lane == 0) s.unit[u + j * DOWN_WARPS] = b.two_e;
            multiply<KIND>(a, s, u + j * DOWN_WARPS, c[j], b);
        }
    }
    __syncthreads();
    for (uint32_t k = warp; k < n; k += DOWN_WARPS) {
        if (k != warp) scale = load_scales(a, id, 0, t0 + k);
        sum_slots<KIND>(a, s, id, weight, t0 + k, k * a.each.d, scale);
    }
}

/* ---------------------------------------------------------------- launches */

static uint32_t grid_of(const nbi_cuda *c, uint32_t n_tiles)
{
    return n_tiles < (uint32_t)c->rt.n_sms ? n_tiles : (uint32_t)c->rt.n_sms;
}

/* How a product is cut; its shared memory: so much that no multiprocessor takes two blocks of the
 * next kernel while another has none. */
static uint32_t divide(one_args *k, const nbi_cuda *c, const nbi_moe_layer *l, bool down)
{
    const nbi_moe_weights &w = down ? l->down : l->gate_up;
    const nbi_moe_shape *shape = &l->shape;
    const nbi_weight_kind kind = w.first.kind;
    *k = {};
    k->w = w;
    k->n_chunks = nbi_chunks_of(kind, w.first.n_kt);
    k->n_tiles = w.first.n_rt * (down ? 1 : shape->top_k);
    k->chunks = nbi_divisor_of(k->n_chunks);
    k->rt = nbi_divisor_of(w.first.n_rt);
    k->each = nbi_divisor_of(k->n_chunks * (down ? nbi_moe_n_slots(shape) : 1));
    const uint32_t grid = grid_of(c, k->n_tiles), shared = down ? 0 : shape->n_shared;
    k->units =
        (nbi_ceil_div(k->n_tiles, grid) + nbi_ceil_div(w.first.n_rt * shared, grid)) * k->each.d;
    k->group = nbi_divisor_of(nbi_stream_group(k->n_chunks, nbi_stream_unit_bytes(kind)));
    one_shared unused;
    const uint32_t bytes = lay_out(&unused, nullptr, k->units, nbi_stream_unit_bytes(kind));
    const uint32_t least = (uint32_t)c->rt.shared_max / (down ? 4 : 2) + 1024;
    return bytes > least ? bytes : least;
}

bool nbi_moe_one_fits(const nbi_cuda *c, const nbi_moe_layer *l, uint32_t n_rows)
{
    const nbi_moe_shape *s = &l->shape;
    if (c->rt.sm < 90 || n_rows != 1 || s->w4a4 || nbi_moe_has_f32(s)) return false;
    one_args up, down;
    const uint32_t up_bytes = divide(&up, c, l, false), down_bytes = divide(&down, c, l, true);
    const uint32_t most = c->rt.shared_max < MOST ? (uint32_t)c->rt.shared_max : MOST;
    return up.units <= UNITS_MAX && down.units <= UNITS_MAX && up_bytes <= most &&
           down_bytes <= most && up.units / up.n_chunks * 8 <= WARPS * NBI_WARP;
}

template <nbi_weight_kind KIND>
static void launch_gate_up(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, float *h)
{
    one_args k;
    const uint32_t shared = divide(&k, c, l, false);
    k.x = static_cast<const float *>(a->x);
    k.out = h;
    k.slots = nbi_moe_slots_of(&l->shape, a);
    k.x_fast = nbi_x_fast(a->x, 0, k.w.first.cols);
    nbi_launch(&c->rt, dim3(grid_of(c, k.n_tiles)), dim3(WARPS * NBI_WARP), shared,
               one_gate_up_kernel<KIND>, k);
}

template <nbi_weight_kind KIND>
static void launch_down(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, const float *h)
{
    one_args k;
    const uint32_t shared = divide(&k, c, l, true);
    k.x = h;
    k.out = static_cast<float *>(a->out);
    k.slots = nbi_moe_slots_of(&l->shape, a);
    k.x_fast = k.w.first.cols % 4 == 0;
    nbi_launch(&c->rt, dim3(grid_of(c, k.n_tiles)), dim3(DOWN_WARPS * NBI_WARP), shared,
               one_down_kernel<KIND>, k);
}

void nbi_moe_one_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    float *h = static_cast<float *>(a->workspace);
    NBI_MOE_BY_KIND(l->shape.kind_gate_up, launch_gate_up, c, l, a, h);
    NBI_MOE_BY_KIND(l->shape.kind_down, launch_down, c, l, a, h);
}
