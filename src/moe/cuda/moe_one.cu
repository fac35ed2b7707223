/* One row, all weights of a block on their way at once: every warp asks for the units that it will
 * multiply (a unit is a row tile's chunk), so that nothing stands between the ids and the copies.
 * Two kernels; same bits as moe_gemv.cu. Callers: moe_runners.cu.
 *
 *   gate_up  an equal, contiguous share of the row tiles of all chosen experts; waits for the ids
 *   down     an equal share of the output's row tiles over all slots. It asks before gate_up has
 *            ended: gate_up lets it start only when the ids were there (its nbi_let_next() stands
 *            behind its nbi_wait_before()), and reads them past the L1 cache */
#include "backend/cuda/stream.h"
#include "moe/cuda/moe_cuda.h"

#define WARPS     16u
#define UNITS_MAX 64u          /* of a block */
#define MOST      (150u << 10) /* bytes of shared memory: down's are there beside gate_up's */

struct one_args {
    nbi_moe_weights w;
    const float *x; /* the row; down: h [top_k][inter] */
    float *out;     /* h; down: the row */
    const int32_t *ids;
    const float *weights; /* down */
    uint32_t top_k, n_experts, n_chunks;
    uint32_t n_tiles; /* gate_up: of all slots */
    uint32_t each;    /* units of a tile */
    uint32_t units;   /* of a block, most */
    bool x_fast;
};

/* Bytes; s with places from `base` on when it is not NULL. The barriers are s->full. */
__host__ __device__ inline uint32_t lay_out(nbi_stream_shared *s, char *base, uint32_t units,
                                            uint32_t x_units, uint32_t unit_bytes,
                                            uint32_t chunk_bytes)
{
    uint32_t at = UNITS_MAX * 8 + 64;
    s->full = reinterpret_cast<uint64_t *>(base);
    s->zero = reinterpret_cast<uint32_t *>(base + UNITS_MAX * 8);
    s->ring = base + at;
    at += units * unit_bytes;
    s->x = reinterpret_cast<uint32_t *>(base + at);
    at += x_units * chunk_bytes;
    s->sums = reinterpret_cast<float *>(base + at);
    at += units * 64;
    s->unit = reinterpret_cast<float *>(base + at);
    return at + x_units * 4;
}

/* Bytes of a chunk of x as B fragments. */
__host__ __device__ constexpr uint32_t chunk_bytes(nbi_weight_kind kind)
{
    return nbi_chunk_tiles(kind) * NBI_TILE_COLS * 2;
}

/* The tiles of block b are first_tile(b) ... first_tile(b + 1) - 1. */
static NBI_DEV uint32_t first_tile(const one_args &a, uint32_t b)
{
    return (uint32_t)((uint64_t)a.n_tiles * b / gridDim.x);
}

/* The ids, lane k that of slot k; UINT32_MAX: none. */
static NBI_DEV uint32_t load_ids(const one_args &a)
{
    const uint32_t lane = (uint32_t)nbi_lane();
    const uint32_t e = lane < a.top_k ? (uint32_t)nbi_load_fresh(a.ids + lane) : UINT32_MAX;
    return e < a.n_experts ? e : UINT32_MAX;
}

/* One lane: asks for the unit of chunk c of row tile rt. */
template <nbi_weight_kind KIND>
static NBI_DEV void ask(const one_args &a, const nbi_stream_shared &s, uint32_t u, uint32_t expert,
                        uint32_t rt, uint32_t c)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND), TILE = nbi_tile_bytes(KIND);
    constexpr uint32_t SCALES = KIND == NBI_WEIGHT_NVFP4 ? 64u : 0u;
    const uint32_t kt = c * CT, left = a.w.first.n_kt - kt, n = left < CT ? left : CT;
    const size_t tile = (size_t)rt * a.w.first.n_kt + kt, at = expert * a.w.stride;
    char *to = s.ring + u * nbi_stream_unit_bytes(KIND);
    nbi_bar_init(s.full + u, 1);
    nbi_bar_init_done();
    nbi_bar_expect(s.full + u, n * (TILE + SCALES));
    nbi_copy_bulk(to, static_cast<const char *>(a.w.first.data) + at + tile * TILE, n * TILE,
                  s.full + u);
    if (SCALES)
        nbi_copy_bulk(to + CT * TILE,
                      static_cast<const char *>(a.w.first.scales) + at + tile * SCALES, n * SCALES,
                      s.full + u);
}

/* The sums of unit u over chunk c, with chunk x_unit of x. */
template <nbi_weight_kind KIND>
static NBI_DEV void multiply(const one_args &a, const nbi_stream_plan &plan,
                             const nbi_stream_shared &s, uint32_t u, uint32_t c, uint32_t x_unit)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND);
    const char *codes = s.ring + u * nbi_stream_unit_bytes(KIND);
    const uint32_t left = a.w.first.n_kt - c * CT;
    const nbi_stream_x_at x = nbi_stream_x_place<1>(plan, s);
    float p[1][4];
    nbi_bar_wait(s.full + u, 0);
    nbi_stream_multiply<KIND, 1>(p, codes, codes + CT * nbi_tile_bytes(KIND), left < CT ? left : CT,
                                 {x.at + x_unit * CT * NBI_TILE_STEPS * x.step, x.step});
    nbi_stream_put_sums<1>(s.sums + u * 16, plan, p);
}

template <nbi_weight_kind KIND>
static NBI_DEV void load_x(nbi_f32x4 *v, const one_args &a, const float *row, uint32_t c)
{
    constexpr uint32_t COLS = nbi_chunk_tiles(KIND) * NBI_TILE_COLS, LOADS = COLS / 128;
#pragma unroll
    for (uint32_t k = 0; k < LOADS; k++)
        v[k] = nbi_x_load(row, c * COLS + k * 128 + 4 * (uint32_t)nbi_lane(),
                          row ? a.w.first.cols : 0, a.x_fast);
}

template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(WARPS *NBI_WARP, 1)
    one_gate_up_kernel(const __grid_constant__ one_args a)
{
    nbi_stream_shared s;
    nbi_stream_plan plan = {};
    plan.pad_tokens = 1;
    lay_out(&s, nbi_shared<char>(), a.units, a.n_chunks, nbi_stream_unit_bytes(KIND),
            chunk_bytes(KIND));
    const uint32_t lane = (uint32_t)nbi_lane(), n_rt = a.w.first.n_rt;
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
    const uint32_t t0 = first_tile(a, blockIdx.x), n = first_tile(a, blockIdx.x + 1) - t0;
    nbi_wait_before();
    nbi_let_next(); /* not before the wait: down reads the ids that we waited for */
    const uint32_t id = load_ids(a);
    nbi_f32x4 x[nbi_chunk_tiles(KIND) / 2];
    if (warp < a.n_chunks) load_x<KIND>(x, a, a.x, warp);
    for (uint32_t u = warp; u < n * a.n_chunks; u += WARPS) {
        const uint32_t tile = t0 + u / a.n_chunks;
        const uint32_t e = __shfl_sync(NBI_FULL_MASK, id, (int)(tile / n_rt));
        if (lane == 0 && e != UINT32_MAX) ask<KIND>(a, s, u, e, tile % n_rt, u % a.n_chunks);
    }
    if (threadIdx.x < 2) s.zero[threadIdx.x] = 0;
    for (uint32_t c = warp; c < a.n_chunks; c += WARPS) {
        if (c != warp) load_x<KIND>(x, a, a.x, c);
        nbi_stream_put<KIND>(plan, s, c, 0, x);
    }
    /* who ends a row: 8 rows of tile k */
    const uint32_t k = threadIdx.x / 8, g = threadIdx.x % 8, tile = t0 + k;
    const uint32_t slot = k < n ? tile / n_rt : 0, rt = tile % n_rt, row = rt * 8 + g;
    const int32_t e = k < n ? nbi_load_fresh(a.ids + slot) : -1;
    const bool ends = (uint32_t)e < a.n_experts && row < a.w.first.rows;
    nbi_cuda_packed m = a.w.first;
    float gate_scale = 0, up_scale = 0;
    if (ends) {
        m = nbi_moe_expert(a.w, (uint32_t)e);
        gate_scale = m.row_scale[rt * 16 + g];
        up_scale = m.row_scale[rt * 16 + 8 + g];
    }
    __syncthreads();
    for (uint32_t u = warp; u < n * a.n_chunks; u += WARPS) {
        const uint32_t at = (t0 + u / a.n_chunks) / n_rt;
        if (__shfl_sync(NBI_FULL_MASK, id, (int)at) == UINT32_MAX) continue;
        multiply<KIND>(a, plan, s, u, u % a.n_chunks, u % a.n_chunks);
    }
    __syncthreads();
    if (!ends) return;
    float gate = 0, up = 0;
#pragma unroll 4
    for (uint32_t c = 0; c < a.n_chunks; c++) {
        const nbi_f32x2 p =
            *reinterpret_cast<const nbi_f32x2 *>(s.sums + (k * a.n_chunks + c) * 16 + g * 2);
        const nbi_f32x2 block = nbi_tile_block_scale<KIND>(m, rt, c);
        gate = fmaf(p.v[0], s.unit[c] * block.v[0], gate);
        up = fmaf(p.v[1], s.unit[c] * block.v[1], up);
    }
    a.out[(size_t)slot * a.w.first.rows + row] = nbi_moe_swiglu(gate * gate_scale, up * up_scale);
}

/* One warp: row tile rt of the output, its sums from s.sums + first on. Slots 8 at a time: lane l
 * has slot l / 4, and rows 2 r, 2 r + 8, 2 r + 1, 2 r + 9, r = l % 4, as they lie in the sums. Then
 * the slots in their order. */
template <nbi_weight_kind KIND>
static NBI_DEV void sum_slots(const one_args &a, const nbi_stream_shared &s, uint32_t id,
                              float weight, uint32_t rt, uint32_t first)
{
    const uint32_t lane = (uint32_t)nbi_lane(), r = lane % 4;
    float sum[4] = {0, 0, 0, 0};
    for (uint32_t slot0 = 0; slot0 < a.top_k; slot0 += 8) {
        const uint32_t slot = slot0 + lane / 4, n = a.top_k - slot0 < 8 ? a.top_k - slot0 : 8;
        const uint32_t e = __shfl_sync(NBI_FULL_MASK, id, (int)(slot & 31));
        float y[4] = {0, 0, 0, 0};
        if (slot < a.top_k && e != UINT32_MAX) {
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
            for (uint32_t i = 0; i < 4; i++)
                y[i] *= m.row_scale[rt * 16 + 2 * r + i / 2 + i % 2 * 8];
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
static __global__ void __launch_bounds__(WARPS *NBI_WARP, 1)
    one_down_kernel(const __grid_constant__ one_args a)
{
    nbi_stream_shared s;
    nbi_stream_plan plan = {};
    plan.pad_tokens = 1;
    lay_out(&s, nbi_shared<char>(), a.units, a.units, nbi_stream_unit_bytes(KIND),
            chunk_bytes(KIND));
    const uint32_t lane = (uint32_t)nbi_lane(), n_warps = blockDim.x / NBI_WARP;
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
    const uint32_t t0 = first_tile(a, blockIdx.x), n = first_tile(a, blockIdx.x + 1) - t0;
    const uint32_t id = load_ids(a), units = n * a.each;
    const float weight = nbi_float((uint32_t)nbi_load_fresh(
        reinterpret_cast<const int32_t *>(a.weights) + (lane < a.top_k ? lane : 0)));
    for (uint32_t u = warp; u < units; u += n_warps) {
        const uint32_t slot = u % a.each / a.n_chunks;
        const uint32_t e = __shfl_sync(NBI_FULL_MASK, id, (int)slot);
        if (lane == 0 && e != UINT32_MAX) ask<KIND>(a, s, u, e, t0 + u / a.each, u % a.n_chunks);
    }
    if (threadIdx.x < 2) s.zero[threadIdx.x] = 0;
    __syncthreads(); /* the zeros; barriers are the warp's own */
    nbi_let_next();
    nbi_wait_before();
    const auto row = [&](uint32_t u) {
        const uint32_t slot = u % a.each / a.n_chunks;
        const bool none = __shfl_sync(NBI_FULL_MASK, id, (int)slot) == UINT32_MAX;
        return none ? nullptr : a.x + (size_t)slot * a.w.first.cols;
    };
    for (uint32_t u = warp; u < units; u += 2 * n_warps) {
        const uint32_t v = u + n_warps;
        nbi_f32x4 x[nbi_chunk_tiles(KIND) / 2], after[nbi_chunk_tiles(KIND) / 2] = {};
        const float *from = row(u), *then = v < units ? row(v) : nullptr;
        load_x<KIND>(x, a, from, u % a.n_chunks);
        if (then) load_x<KIND>(after, a, then, v % a.n_chunks);
        nbi_stream_put<KIND>(plan, s, u, 0, x);
        if (then) nbi_stream_put<KIND>(plan, s, v, 0, after);
        __syncwarp();
        if (from) multiply<KIND>(a, plan, s, u, u % a.n_chunks, u);
        if (then) multiply<KIND>(a, plan, s, v, v % a.n_chunks, v);
    }
    __syncthreads();
    for (uint32_t k = warp; k < n; k += n_warps)
        sum_slots<KIND>(a, s, id, weight, t0 + k, k * a.each);
}

/* ---------------------------------------------------------------- launches */

static uint32_t grid_of(const nbi_cuda *c, uint32_t n_tiles)
{
    return n_tiles < (uint32_t)c->rt.n_sms ? n_tiles : (uint32_t)c->rt.n_sms;
}

/* How a product is cut; its shared memory. */
static uint32_t divide(one_args *k, const nbi_cuda *c, const nbi_moe_weights &w, uint32_t top_k,
                       bool down)
{
    const nbi_weight_kind kind = w.first.kind;
    *k = {};
    k->w = w;
    k->top_k = top_k;
    k->n_chunks = nbi_chunks_of(kind, w.first.n_kt);
    k->n_tiles = w.first.n_rt * (down ? 1 : top_k);
    k->each = k->n_chunks * (down ? top_k : 1);
    k->units = nbi_ceil_div(k->n_tiles, grid_of(c, k->n_tiles)) * k->each;
    nbi_stream_shared unused;
    return lay_out(&unused, nullptr, k->units, down ? k->units : k->n_chunks,
                   nbi_stream_unit_bytes(kind), chunk_bytes(kind));
}

bool nbi_moe_one_fits(const nbi_cuda *c, const nbi_moe_layer *l, uint32_t n_rows)
{
    const nbi_moe_shape *s = &l->shape;
    if (c->rt.sm < 90 || n_rows != 1 || s->w4a4 || nbi_moe_has_f32(s)) return false;
    one_args up, down;
    const uint32_t up_bytes = divide(&up, c, l->gate_up, s->top_k, false);
    const uint32_t down_bytes = divide(&down, c, l->down, s->top_k, true);
    return up.units <= UNITS_MAX && down.units <= UNITS_MAX && up_bytes <= MOST &&
           down_bytes <= MOST && up.units / up.n_chunks * 8 <= WARPS * NBI_WARP;
}

template <nbi_weight_kind KIND>
static void launch_gate_up(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, float *h)
{
    one_args k;
    const uint32_t shared = divide(&k, c, l->gate_up, l->shape.top_k, false);
    k.x = static_cast<const float *>(a->x);
    k.out = h;
    k.ids = a->ids;
    k.n_experts = l->shape.n_experts;
    k.x_fast = nbi_x_fast(a->x, 0, k.w.first.cols);
    nbi_launch(&c->rt, dim3(grid_of(c, k.n_tiles)), dim3(WARPS * NBI_WARP), shared,
               one_gate_up_kernel<KIND>, k);
}

template <nbi_weight_kind KIND>
static void launch_down(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, const float *h)
{
    one_args k;
    const uint32_t shared = divide(&k, c, l->down, l->shape.top_k, true);
    k.x = h;
    k.out = static_cast<float *>(a->out);
    k.ids = a->ids;
    k.weights = a->weights;
    k.n_experts = l->shape.n_experts;
    k.x_fast = k.w.first.cols % 4 == 0;
    const uint32_t warps = k.units % 12 == 0 && k.units % 16 ? 12 : WARPS;
    nbi_launch(&c->rt, dim3(grid_of(c, k.n_tiles)), dim3(warps * NBI_WARP), shared,
               one_down_kernel<KIND>, k);
}

void nbi_moe_one_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    float *h = static_cast<float *>(a->workspace);
    NBI_MOE_BY_KIND(l->shape.kind_gate_up, launch_gate_up, c, l, a, h);
    NBI_MOE_BY_KIND(l->shape.kind_down, launch_down, c, l, a, h);
}
