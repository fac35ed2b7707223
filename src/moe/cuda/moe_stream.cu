/* One row: the weights of its experts stream (stream.h). Two kernels; same bits as moe_gemv.cu.
 * Callers: moe_runners.cu.
 *
 *   gate_up  tiles of all chosen experts, one behind the other; waits for the ids
 *   down     a tile of the output has a part for every slot, summed in their order. It asks for
 *            weights before gate_up has ended: gate_up lets it start only when the ids were there
 *            (its nbi_let_next() stands behind its nbi_wait_before()), and reads them past the L1
 *            cache */
#include "backend/cuda/stream.h"
#include "moe/cuda/moe_cuda.h"

#define SLOTS NBI_MOE_TOP_K_MAX /* of a row */
#define NONE  0xffffffffu       /* a slot without an expert */

/* notes[slot]: the expert; notes[SLOTS + slot]: its weight. Read past the L1 cache: down does this
 * before gate_up has ended. */
static NBI_DEV void note_experts(uint32_t *notes, const nbi_moe_slots &slots, bool weights)
{
    if (threadIdx.x >= slots.n) return;
    notes[threadIdx.x] = (uint32_t)slots.slot_expert(threadIdx.x);
    if (weights) notes[SLOTS + threadIdx.x] = nbi_bits(slots.slot_weight(threadIdx.x));
}

struct gate_up_work {
    static constexpr bool WAITS = true;
    struct result {
        float y[4];
    };

    nbi_moe_weights w;
    const float *row; /* [hidden] */
    float *h;         /* [slots][inter] */
    nbi_moe_slots slots;
    uint32_t n_tiles, n_parts, n_chunks, cols, n_tokens;
    bool x_fast;

    NBI_DEV void begin(uint32_t *notes) const
    {
        note_experts(notes, slots, false);
    }

    NBI_DEV uint32_t at(const uint32_t *notes, uint32_t tile, uint32_t, nbi_cuda_packed *m) const
    {
        const uint32_t e = notes[tile / w.first.n_rt];
        *m = nbi_moe_expert(w, e == NONE ? 0 : e); /* of no expert: read, not used */
        return tile % w.first.n_rt;
    }

    NBI_DEV const float *x(const uint32_t *, uint32_t, uint32_t) const
    {
        return row;
    }

    NBI_DEV void part(const uint32_t *, result *out, const float y[4], const float scale[2],
                      uint32_t) const
    {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) out->y[i] = y[i] * scale[i / 2];
    }

    NBI_DEV void finish(const uint32_t *notes, const result &r, uint32_t tile, uint32_t g,
                        uint32_t token) const
    {
        const uint32_t slot = tile / w.first.n_rt, at_row = tile % w.first.n_rt * 8 + g;
        if (token || at_row >= w.first.rows || notes[slot] == NONE) return;
        h[(size_t)slot * w.first.rows + at_row] = nbi_moe_swiglu(r.y[0], r.y[2]);
    }
};

struct down_work {
    static constexpr bool WAITS = false;

    nbi_moe_weights w;
    const float *h;
    float *out;
    nbi_moe_slots slots;
    uint32_t n_tiles, n_parts, n_chunks, cols, n_tokens;
    bool x_fast;

    NBI_DEV void begin(uint32_t *notes) const
    {
        note_experts(notes, slots, true);
    }

    NBI_DEV uint32_t at(const uint32_t *notes, uint32_t tile, uint32_t slot,
                        nbi_cuda_packed *m) const
    {
        *m = nbi_moe_expert(w, notes[slot] == NONE ? 0 : notes[slot]);
        return tile;
    }

    NBI_DEV const float *x(const uint32_t *notes, uint32_t, uint32_t slot) const
    {
        return notes[slot] == NONE ? nullptr : h + (size_t)slot * w.first.cols;
    }

    /* Slots 8 at a time: lane l has slot l / 4, and rows 2 r, 2 r + 8, 2 r + 1, 2 r + 9 of the
     * tile, r = l % 4, as they lie in the sums. Then the slots in their order. */
    template <nbi_weight_kind KIND>
    NBI_DEV void reduce(const nbi_stream_plan &plan, const nbi_stream_shared &s, const float *sums,
                        uint32_t tile) const
    {
        const uint32_t lane = (uint32_t)nbi_lane(), r = lane % 4;
        float sum[4] = {0, 0, 0, 0};
        for (uint32_t first = 0; first < n_parts; first += 8) {
            const uint32_t slot = first + lane / 4, n = n_parts - first < 8 ? n_parts - first : 8;
            float y[4] = {0, 0, 0, 0};
            if (slot < n_parts) sum_chunks<KIND>(y, plan, s, sums, tile, slot, r);
            for (uint32_t k = 0; k < n; k++) {
                const bool none = s.notes[first + k] == NONE;
                const float weight = nbi_float(s.notes[SLOTS + first + k]);
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                    const float v = __shfl_sync(NBI_FULL_MASK, y[i], (int)(k * 4 + r));
                    sum[i] = none ? sum[i] : fmaf(weight, v, sum[i]);
                }
            }
        }
        if (lane >= 4) return;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t at_row = tile * 16 + 2 * r + i / 2 + i % 2 * 8;
            if (at_row < w.first.rows) out[at_row] = sum[i];
        }
    }

    template <nbi_weight_kind KIND>
    NBI_DEV void sum_chunks(float y[4], const nbi_stream_plan &plan, const nbi_stream_shared &s,
                            const float *sums, uint32_t tile, uint32_t slot, uint32_t r) const
    {
        const float *from = sums + slot * n_chunks * plan.sum_floats + r * 4;
        const float *unit = s.unit + slot * n_chunks;
        const float *rows = sums + n_parts * n_chunks * plan.sum_floats + slot * NBI_TILE_ROWS;
        const nbi_cuda_packed m = nbi_moe_expert(w, s.notes[slot] == NONE ? 0 : s.notes[slot]);
#pragma unroll 4
        for (uint32_t c = 0; c < n_chunks; c++) {
            const nbi_f32x4 p = *reinterpret_cast<const nbi_f32x4 *>(from + c * plan.sum_floats);
            const nbi_f32x2 block = nbi_tile_block_scale<KIND>(m, tile, c);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) y[i] = fmaf(p.v[i], unit[c] * block.v[i % 2], y[i]);
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) y[i] *= rows[2 * r + i / 2 + i % 2 * 8];
    }
};

template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__((NBI_STREAM_WARPS + 1) * 32)
    stream_gate_up_kernel(const __grid_constant__ gate_up_work w,
                          const __grid_constant__ nbi_stream_plan plan)
{
    nbi_stream_run<KIND, 0>(w, plan);
}

template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__((NBI_STREAM_WARPS + 1) * 32)
    stream_down_kernel(const __grid_constant__ down_work w,
                       const __grid_constant__ nbi_stream_plan plan)
{
    nbi_stream_run<KIND, 0>(w, plan);
}

static nbi_stream_plan plan_for(const nbi_cuda *c, const nbi_cuda_packed *p, uint32_t parts)
{
    return nbi_stream_plan_for(p->kind, parts, nbi_chunks_of(p->kind, p->n_kt), 1, 0,
                               (uint32_t)c->rt.shared_max);
}

bool nbi_moe_stream_fits(const nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    const nbi_moe_shape *s = &l->shape;
    if (c->rt.sm < 90 || a->n_rows != 1 || s->w4a4 || nbi_moe_has_f32(s)) return false;
    return nbi_stream_plan_fits(plan_for(c, &l->gate_up.first, 1)) &&
           nbi_stream_plan_fits(plan_for(c, &l->down.first, nbi_moe_n_slots(s)));
}

template <nbi_weight_kind KIND>
static void launch_gate_up(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, float *h)
{
    const nbi_cuda_packed &m = l->gate_up.first;
    gate_up_work w = {};
    w.w = l->gate_up;
    w.row = static_cast<const float *>(a->x);
    w.h = h;
    w.slots = nbi_moe_slots_of(&l->shape, a);
    w.n_tiles = w.slots.n * m.n_rt;
    w.n_parts = w.n_tokens = 1;
    w.n_chunks = nbi_chunks_of(KIND, m.n_kt);
    w.cols = m.cols;
    w.x_fast = nbi_x_fast(a->x, 0, m.cols);
    const nbi_stream_plan plan = plan_for(c, &m, 1);
    nbi_launch(&c->rt, nbi_stream_grid((uint32_t)c->rt.n_sms, w.n_tiles), nbi_stream_threads(plan),
               plan.shared, stream_gate_up_kernel<KIND>, w, plan);
}

template <nbi_weight_kind KIND>
static void launch_down(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, const float *h)
{
    const nbi_cuda_packed &m = l->down.first;
    down_work w = {};
    w.w = l->down;
    w.h = h;
    w.out = static_cast<float *>(a->out);
    w.slots = nbi_moe_slots_of(&l->shape, a);
    w.n_tiles = m.n_rt;
    w.n_parts = w.slots.n;
    w.n_chunks = nbi_chunks_of(KIND, m.n_kt);
    w.n_tokens = 1;
    w.cols = m.cols;
    w.x_fast = m.cols % 4 == 0;
    const nbi_stream_plan plan = plan_for(c, &m, w.n_parts);
    nbi_launch(&c->rt, nbi_stream_grid((uint32_t)c->rt.n_sms, w.n_tiles), nbi_stream_threads(plan),
               plan.shared, stream_down_kernel<KIND>, w, plan);
}

void nbi_moe_stream_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    float *h = static_cast<float *>(a->workspace);
    NBI_MOE_BY_KIND(l->shape.kind_gate_up, launch_gate_up, c, l, a, h);
    NBI_MOE_BY_KIND(l->shape.kind_down, launch_down, c, l, a, h);
}
