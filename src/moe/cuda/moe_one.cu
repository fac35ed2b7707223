/* One row, all weights of a block on their way at once: every warp asks for the units that it will
 * multiply (a unit is a row tile's chunk), so that nothing stands between the ids and the copies.
 * Two kernels; same bits as moe_gemv.cu. Callers: moe_runners.cu.
 *
 *   gate_up  an equal, contiguous share of the row tiles of all chosen experts; waits for the ids.
 *            As much of a shared expert's, which are asked for before the wait
 *   down     an equal share of the output's row tiles over all slots. It asks before gate_up has
 *            ended: gate_up lets it start only when the ids were there (its nbi_let_next() stands
 *            behind its nbi_wait_before()), and reads them past the L1 cache */
#include "moe/cuda/moe_one.h"

template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(ONE_WARPS *NBI_WARP, 2)
    one_gate_up_kernel(const __grid_constant__ one_args a)
{
    one_shared s;
    one_lay_out(&s, nbi_shared<char>(), a.units, nbi_stream_unit_bytes(KIND));
    const one_up up = one_up_begin<KIND>(a, s);
    __syncthreads();
    nbi_wait_before();
    nbi_let_next(); /* not before the wait: down reads the ids that we waited for */
    one_up_end<KIND>(a, s, up, one_load_ids(a), a.x);
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
static __global__ void __launch_bounds__(ONE_DOWN_WARPS *NBI_WARP, 2)
    one_down_kernel(const __grid_constant__ one_args a)
{
    one_shared s;
    one_lay_out(&s, nbi_shared<char>(), a.units, nbi_stream_unit_bytes(KIND));
    const uint32_t lane = (uint32_t)nbi_lane();
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
    const uint32_t t0 = one_first_tile(a.n_tiles, blockIdx.x);
    const uint32_t n = one_first_tile(a.n_tiles, blockIdx.x + 1) - t0;
    const uint32_t units = n * a.each.d, own = one_own_group(warp, ONE_DOWN_WARPS),
                   first = own * a.group.d;
    const uint32_t id = one_load_ids(a);
    const uint32_t own_e =
        __shfl_sync(NBI_FULL_MASK, id, (int)nbi_div(nbi_mod(first, a.each), a.chunks));
    if (first < units && own_e != UINT32_MAX) {
        one_open_group<KIND>(a, s, own, nbi_mod(first, a.chunks));
        one_ask<KIND>(a, s, own, own_e, t0 + nbi_div(first, a.each), nbi_mod(first, a.chunks));
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
    for (uint32_t u = warp; u < units; u += 2 * ONE_DOWN_WARPS) {
        const uint32_t v = u + ONE_DOWN_WARPS, c[2] = {nbi_mod(u, a.chunks), nbi_mod(v, a.chunks)};
        const float *from[2] = {row(u), row(v)};
        one_row<KIND> x[2];
        one_x<KIND> b;
        x[0].load(a, from[0], c[0]);
        x[1].load(a, from[1], c[1]);
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            if (!from[j]) continue;
            b.make(x[j]);
            if (lane == 0) s.unit[u + j * ONE_DOWN_WARPS] = b.two_e;
            one_multiply<KIND>(a, s, u + j * ONE_DOWN_WARPS, c[j], b);
        }
    }
    __syncthreads();
    for (uint32_t k = warp; k < n; k += ONE_DOWN_WARPS) {
        if (k != warp) scale = load_scales(a, id, 0, t0 + k);
        sum_slots<KIND>(a, s, id, weight, t0 + k, k * a.each.d, scale);
    }
}

/* ---------------------------------------------------------------- launches */

static uint32_t grid_of(const nbi_cuda *c, uint32_t n_tiles)
{
    return n_tiles < (uint32_t)c->rt.n_sms ? n_tiles : (uint32_t)c->rt.n_sms;
}

uint32_t nbi_moe_one_grid(const nbi_cuda *c, const one_args *k)
{
    return grid_of(c, k->n_tiles);
}

/* So much that no multiprocessor takes two blocks of the next kernel while another has none. */
uint32_t nbi_moe_one_shared(const nbi_cuda *c, uint32_t bytes, bool down)
{
    const uint32_t least = (uint32_t)c->rt.shared_max / (down ? 4 : 2) + 1024;
    return bytes > least ? bytes : least;
}

/* How a product is cut; its shared memory. */
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
    const uint32_t bytes = one_lay_out(&unused, nullptr, k->units, nbi_stream_unit_bytes(kind));
    return nbi_moe_one_shared(c, bytes, down);
}

bool nbi_moe_one_fits(const nbi_cuda *c, const nbi_moe_layer *l, uint32_t n_rows)
{
    const nbi_moe_shape *s = &l->shape;
    if (c->rt.sm < 90 || n_rows != 1 || s->w4a4 || nbi_moe_has_f32(s)) return false;
    one_args up, down;
    const uint32_t up_bytes = divide(&up, c, l, false), down_bytes = divide(&down, c, l, true);
    const uint32_t most = c->rt.shared_max < ONE_MOST ? (uint32_t)c->rt.shared_max : ONE_MOST;
    return up.units <= ONE_UNITS_MAX && down.units <= ONE_UNITS_MAX && up_bytes <= most &&
           down_bytes <= most && up.units / up.n_chunks * 8 <= ONE_WARPS * NBI_WARP;
}

uint32_t nbi_moe_one_up(one_args *k, const nbi_cuda *c, const nbi_moe_layer *l,
                        const nbi_moe_args *a, float *h)
{
    const uint32_t shared = divide(k, c, l, false);
    k->x = static_cast<const float *>(a->x);
    k->out = h;
    k->slots = nbi_moe_slots_of(&l->shape, a);
    k->x_fast = nbi_x_fast(a->x, 0, k->w.first.cols);
    return shared;
}

template <nbi_weight_kind KIND>
static void launch_gate_up(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, float *h)
{
    one_args k;
    const uint32_t shared = nbi_moe_one_up(&k, c, l, a, h);
    nbi_launch(&c->rt, dim3(grid_of(c, k.n_tiles)), dim3(ONE_WARPS * NBI_WARP), shared,
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
    nbi_launch(&c->rt, dim3(grid_of(c, k.n_tiles)), dim3(ONE_DOWN_WARPS * NBI_WARP), shared,
               one_down_kernel<KIND>, k);
}

void nbi_moe_one_down(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, const float *h)
{
    NBI_MOE_BY_KIND(l->shape.kind_down, launch_down, c, l, a, h);
}

void nbi_moe_one_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    float *h = static_cast<float *>(a->workspace);
    NBI_MOE_BY_KIND(l->shape.kind_gate_up, launch_gate_up, c, l, a, h);
    nbi_moe_one_down(c, l, a, h);
}
