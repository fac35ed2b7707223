/* Linear layers of few tokens: one launch for all matrices that multiply the same x. */
#include "backend/cuda/stream_linear.h"

#include <type_traits>

#include "backend/cuda/norm.h"
#include "backend/cuda/pack.h"
#include "backend/cuda/stream.h"

/* Values of all rows together that blocks norm on their own, each of them. */
#define NORM_MAX 8192u

struct job {
    nbi_cuda_packed m;
    float *y;
    const float *bias;
    uint32_t y_stride;
    bool add; /* y += */
};

/* WORK of stream.h. */
struct linear_work {
    static constexpr bool WAITS = false;
    struct result {
        float y[4], scale[2];
    };

    job jobs[NBI_STREAM_JOBS]; /* tiles of one behind those of the other */
    const float *base;         /* x */
    uint32_t x_stride, n_jobs;
    uint32_t n_tiles, n_parts, n_chunks, cols, n_tokens;
    bool x_fast;

    NBI_DEV const job &find(uint32_t tile, uint32_t *rt) const
    {
        uint32_t j = 0;
        while (j + 1 < n_jobs && tile >= jobs[j].m.n_rt) tile -= jobs[j++].m.n_rt;
        *rt = tile;
        return jobs[j];
    }

    NBI_DEV void begin(uint32_t *) const
    {
    }

    NBI_DEV uint32_t at(const uint32_t *, uint32_t tile, uint32_t, nbi_cuda_packed *m) const
    {
        uint32_t rt;
        *m = find(tile, &rt).m;
        return rt;
    }

    NBI_DEV const float *x(const uint32_t *, uint32_t token, uint32_t) const
    {
        return base + (size_t)token * x_stride;
    }

    NBI_DEV void part(const uint32_t *, result *out, const float y[4], const float scale[2],
                      uint32_t) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out->y[i] = y[i];
            out->scale[i / 2] = scale[i / 2];
        }
    }

    /* Of one token: where a row of a tile goes. */
    struct place {
        float *y; /* NULL: nowhere */
        float bias;
        bool add;
    };

    NBI_DEV place place_of(uint32_t tile, uint32_t at) const
    {
        uint32_t rt;
        const job &j = find(tile, &rt);
        const uint32_t row = rt * NBI_TILE_ROWS + at;
        if (at >= NBI_TILE_ROWS || row >= j.m.rows) return {nullptr, 0.0f, false};
        return {j.y + row, j.bias ? j.bias[row] : 0.0f, j.add};
    }

    NBI_DEV void put_row(const place &to, float sum, float scale) const
    {
        if (!to.y) return;
        const float v = fmaf(sum, scale, to.bias);
        *to.y = to.add ? *to.y + v : v;
    }

    NBI_DEV void finish(const uint32_t *, const result &r, uint32_t tile, uint32_t g,
                        uint32_t token) const
    {
        uint32_t rt;
        const job &j = find(tile, &rt);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t row = rt * NBI_TILE_ROWS + g + i / 2 * 8, t = token + i % 2;
            if (row >= j.m.rows || t >= n_tokens) continue;
            const float bias = j.bias ? j.bias[row] : 0.0f;
            const float v = fmaf(r.y[i], r.scale[i / 2], bias);
            float *y = j.y + (size_t)t * j.y_stride + row;
            *y = j.add ? *y + v : v;
        }
    }
};

/* x is the RMSNorm of other rows, which every block makes on its own; each chunk of what the norm
 * leaves in memory is written by one of them. RANKS: it takes a sum over ranks along. */
template <bool RANKS> struct norm_work : linear_work {
    nbi_norm_args norm;
    nbi_divisor norm_chunks;

    template <nbi_weight_kind KIND>
    NBI_DEV void put(const nbi_stream_plan &plan, const nbi_stream_shared &s, uint32_t chunk,
                     uint32_t token, const nbi_norm_part &p) const
    {
        constexpr uint32_t LOADS = nbi_chunk_tiles(KIND) / 2;
#pragma unroll
        for (uint32_t k = 0; k < 2 / LOADS; k++)
            if (LOADS == 2 || 2 * chunk + k < n_chunks)
                nbi_stream_put<KIND>(plan, s, chunk * (2 / LOADS) + k, token, p.v + k);
    }

    /* Item i is chunk i % n of token i / n. Behind the last token there are zeros. */
    NBI_DEV void read(nbi_norm_part *p, uint32_t i, uint32_t n, float *parts, uint32_t epoch) const
    {
        const uint32_t token = nbi_div(i, norm_chunks), first = (i - token * n) * NBI_NORM_COLS;
        *p = {};
        if (token >= n_tokens) return;
        nbi_norm_take<RANKS>(p, norm, token, first, true, epoch);
        if (!parts) return;
        const float squares = nbi_warp_sum(p->squares(0));
        if (nbi_lane() == 0) parts[i] = squares;
        if (norm.delta && nbi_is_own(i))
            p->store(norm.x_out + (size_t)token * norm.x_stride, first, cols, true);
    }

    template <nbi_weight_kind KIND>
    NBI_DEV void give(const nbi_stream_plan &plan, const nbi_stream_shared &s, nbi_norm_part *p,
                      const nbi_norm_part &weight, uint32_t i, uint32_t n, const float *parts) const
    {
        const uint32_t token = nbi_div(i, norm_chunks), chunk = i - token * n;
        if (token < n_tokens) {
            const float squares = nbi_norm_sum(parts + token * n, n);
            if (blockIdx.x == 0 && chunk == 0 && nbi_lane() == 0)
                nbi_norm_guard(norm, token, squares);
            p->scale(nbi_norm_factor(norm, squares), weight);
            if (nbi_is_own(i))
                p->store(norm.out + (size_t)token * norm.out_stride, chunk * NBI_NORM_COLS, cols,
                         true);
        }
        put<KIND>(plan, s, chunk, token, *p);
    }

    /* One token, and a warp for each of its chunks. */
    template <nbi_weight_kind KIND>
    NBI_DEV void take_one(const nbi_stream_plan &plan, const nbi_stream_shared &s,
                          uint32_t warp) const
    {
        nbi_norm_one row = {};
        row.load(norm, warp);
        nbi_wait_before();
        row.take(norm, s.sums); /* free until the first products */
        nbi_sync_some(1, plan.warps * 32);
        if (!row.has) return;
        row.end(norm, s.sums, norm_chunks.d);
        put<KIND>(plan, s, warp, 0, row.x);
        row.leave(norm);
    }

    template <nbi_weight_kind KIND, uint32_t NT>
    NBI_DEV void take(const nbi_stream_plan &plan, const nbi_stream_shared &s, uint32_t warp) const
    {
        if constexpr (NT == 0 && !RANKS) {
            if (norm_chunks.d <= plan.warps) return take_one<KIND>(plan, s, warp);
        }
        const uint32_t n = norm_chunks.d, all = n * plan.pad_tokens;
        constexpr uint32_t KEPT = KIND == NBI_WEIGHT_FP8_BLOCK ? 1 : 2; /* in registers */
        float *parts = s.sums;            /* free until the first products */
        nbi_norm_part kept[KEPT], weight; /* of the warp's first chunk: before the wait */
        weight.load(norm.weight, nbi_mod(warp, norm_chunks) * NBI_NORM_COLS, cols, true);
        nbi_wait_before();
        const uint32_t epoch = RANKS ? nbi_norm_epoch(norm) : 0;
        if constexpr (RANKS) nbi_norm_send_all(norm, n_tokens, warp, plan.warps, epoch);
#pragma unroll
        for (uint32_t k = 0; k < KEPT; k++)
            if (warp + k * plan.warps < all) read(&kept[k], warp + k * plan.warps, n, parts, epoch);
#pragma unroll 1
        for (uint32_t i = warp + KEPT * plan.warps; i < all; i += plan.warps) {
            nbi_norm_part p;
            read(&p, i, n, parts, epoch);
        }
        nbi_sync_some(1, plan.warps * 32);
        if (RANKS && warp == 0) nbi_norm_count(norm, epoch);
#pragma unroll 1
        for (uint32_t i = warp, k = 0; i < all; i += plan.warps, k++) {
            if (k) weight.load(norm.weight, nbi_mod(i, norm_chunks) * NBI_NORM_COLS, cols, true);
            if (k >= KEPT) read(&kept[0], i, n, nullptr, epoch);
            give<KIND>(plan, s, &kept[0], weight, i, n, parts);
#pragma unroll
            for (uint32_t j = 0; j + 1 < KEPT; j++) kept[j] = kept[j + 1];
        }
    }
};

/* x is silu(gate) * up, which is not left in memory. */
struct swiglu_work : linear_work {
    const float *gate, *up;
    uint32_t stride;

    template <nbi_weight_kind KIND, uint32_t>
    NBI_DEV void take(const nbi_stream_plan &plan, const nbi_stream_shared &s, uint32_t warp) const
    {
        constexpr uint32_t LOADS = nbi_chunk_tiles(KIND) / 2;
        nbi_wait_before();
#pragma unroll 2
        for (uint32_t i = warp; i < n_chunks * plan.pad_tokens; i += plan.warps) {
            const uint32_t token = nbi_div(i, plan.chunks), unit = i - token * n_chunks;
            const uint32_t end = token < n_tokens ? cols : 0;
            const size_t row = (size_t)(token < n_tokens ? token : 0) * stride;
            nbi_f32x4 g[LOADS], u[LOADS];
#pragma unroll
            for (uint32_t k = 0; k < LOADS; k++) {
                const uint32_t c = (unit * LOADS + k) * 128 + 4 * (uint32_t)nbi_lane();
                g[k] = nbi_x_load(gate + row, c, end, true);
                u[k] = nbi_x_load(up + row, c, end, true);
            }
#pragma unroll
            for (uint32_t k = 0; k < 4 * LOADS; k++)
                g[k / 4].v[k % 4] = nbi_swiglu(g[k / 4].v[k % 4], u[k / 4].v[k % 4]);
            nbi_stream_put<KIND>(plan, s, unit, token, g);
        }
    }
};

/* Two blocks of a multiprocessor: the next kernel's ring fills while this one ends. */
template <nbi_weight_kind KIND, uint32_t NT, class WORK>
static __global__ void __launch_bounds__((NBI_STREAM_WARPS + 1) * 32, NT < 2 ? 2 : 1)
    stream_linear_kernel(const __grid_constant__ WORK w,
                         const __grid_constant__ nbi_stream_plan plan)
{
    nbi_stream_run<KIND, NT>(w, plan);
}

static nbi_stream_plan plan_for(const nbi_cuda *c, const nbi_linear_args *a, uint32_t n_tiles)
{
    const nbi_cuda_packed *p = nbi_cuda_packed_of(a->w);
    return nbi_stream_plan_for(p->kind, 1, nbi_chunks_of(p->kind, p->n_kt), a->n_rows,
                               nbi_ceil_div(n_tiles, (uint32_t)c->rt.n_sms),
                               (uint32_t)c->rt.shared_max);
}

bool nbi_cuda_stream_fits(const nbi_cuda *c, const nbi_linear_args *calls, uint32_t n)
{
    const nbi_cuda_packed *first = nbi_cuda_packed_of(calls[0].w);
    if (c->rt.sm < 90 || !n || n > NBI_STREAM_JOBS) return false;
    for (uint32_t i = 0; i < n; i++) {
        const nbi_linear_args *a = &calls[i];
        const nbi_cuda_packed *p = nbi_cuda_packed_of(a->w);
        if (a->x_exact || p->kind == NBI_WEIGHT_F32 || p->kind != first->kind ||
            p->cols != first->cols || p->interleaved)
            return false;
        if (a->x != calls[0].x || a->x_stride != calls[0].x_stride ||
            a->n_rows != calls[0].n_rows || a->n_rows > NBI_STREAM_TOKENS)
            return false;
        if (c->base.w4a4 && p->kind == NBI_WEIGHT_NVFP4) return false;
    }
    /* Tall 16-bit matrices with several tokens: measured, linear_few.cu is a fifth faster. */
    const bool wide = first->kind == NBI_WEIGHT_BF16 || first->kind == NBI_WEIGHT_F16;
    if (wide && calls[0].n_rows > 1 && first->n_rt > 8u * (uint32_t)c->rt.n_sms) return false;
    return nbi_stream_plan_fits(plan_for(c, &calls[0], first->n_rt));
}

static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    const uintptr_t p = reinterpret_cast<uintptr_t>(a), q = reinterpret_cast<uintptr_t>(b);
    return p < q + b_bytes && q < p + a_bytes;
}

static size_t row_bytes(uint32_t n_rows, uint32_t width, uint32_t stride)
{
    return (static_cast<size_t>(n_rows - 1) * stride + width) * sizeof(float);
}

static size_t y_bytes(const nbi_linear_args *a)
{
    return row_bytes(a->n_rows, a->w->host.rows, a->y_stride);
}

bool nbi_cuda_norm_waits(const nbi_cuda *c, const nbi_rmsnorm_args *a)
{
    if (c->rt.sm < 90 || !a->out || !a->n_rows || a->n_rows > 8) return false;
    if (a->n_rows > 1 && a->n_rows * a->width > NORM_MAX) return false;
    if (a->width > NBI_NORM_COLS * NBI_NORM_WARPS) return false;
    if (a->delta && (!a->x_out || a->x_out == a->x)) return false;
    if (!nbi_norm_of(a, NULL).vec) return false;
    return !overlap(a->out, row_bytes(a->n_rows, a->width, a->out_stride), a->x,
                    row_bytes(a->n_rows, a->width, a->x_stride));
}

bool nbi_cuda_norm_before(const nbi_rmsnorm_args *norm, const nbi_linear_args *a)
{
    if (a->x != norm->out || a->x_stride != norm->out_stride || a->n_rows != norm->n_rows ||
        a->w->host.cols != norm->width)
        return false;
    const size_t y = y_bytes(a), x = row_bytes(norm->n_rows, norm->width, norm->x_stride);
    return !overlap(a->y, y, norm->x, x) &&
           !(norm->delta &&
             (overlap(a->y, y, norm->x_out, x) ||
              overlap(a->y, y, norm->delta, row_bytes(norm->n_rows, norm->width, norm->width))));
}

bool nbi_cuda_swiglu_waits(const nbi_cuda *c, const nbi_swiglu_args *a)
{
    return c->rt.sm >= 90 && a->once && a->n_rows && a->n_rows <= 8 &&
           nbi_x_fast(a->gate, a->in_stride, a->width) && nbi_x_fast(a->up, a->in_stride, a->width);
}

bool nbi_cuda_swiglu_before(const nbi_swiglu_args *swiglu, const nbi_linear_args *a)
{
    const size_t in = row_bytes(swiglu->n_rows, swiglu->width, swiglu->in_stride);
    return a->x == swiglu->out && a->x_stride == swiglu->out_stride &&
           a->n_rows == swiglu->n_rows && a->w->host.cols == swiglu->width &&
           !overlap(a->y, y_bytes(a), swiglu->gate, in) &&
           !overlap(a->y, y_bytes(a), swiglu->up, in);
}

bool nbi_cuda_add_behind(const nbi_linear_args *a, const nbi_swiglu_args *swiglu,
                         const nbi_add_args *add)
{
    const size_t n = (size_t)a->n_rows * a->y_stride, bytes = n * sizeof(float);
    if (!add->once || add->y != a->y || add->n != n || a->y_stride != a->w->host.rows) return false;
    if (overlap(add->x, bytes, a->y, bytes)) return false;
    if (!swiglu)
        return !overlap(add->x, bytes, a->x, row_bytes(a->n_rows, a->w->host.cols, a->x_stride));
    const size_t in = row_bytes(swiglu->n_rows, swiglu->width, swiglu->in_stride);
    return !overlap(add->x, bytes, swiglu->gate, in) && !overlap(add->x, bytes, swiglu->up, in);
}

template <nbi_weight_kind KIND, class WORK>
static void launch(nbi_cuda *c, const WORK &w, const nbi_stream_plan &plan)
{
    const dim3 grid = nbi_stream_grid((uint32_t)c->rt.n_sms, w.n_tiles);
    const dim3 block = nbi_stream_threads(plan);
    if constexpr (std::is_same_v<WORK, linear_work>) {
        if (plan.pad_tokens > 8)
            return nbi_launch(&c->rt, grid, block, plan.shared, stream_linear_kernel<KIND, 2, WORK>,
                              w, plan);
    }
    nbi_launch(&c->rt, grid, block, plan.shared,
               plan.pad_tokens == 1 ? stream_linear_kernel<KIND, 0, WORK>
                                    : stream_linear_kernel<KIND, 1, WORK>,
               w, plan);
}

template <class WORK>
static void launch_kind(nbi_cuda *c, const WORK &w, const nbi_stream_plan &plan)
{
    switch (w.jobs[0].m.kind) {
    case NBI_WEIGHT_NVFP4: return launch<NBI_WEIGHT_NVFP4>(c, w, plan);
    case NBI_WEIGHT_BF16: return launch<NBI_WEIGHT_BF16>(c, w, plan);
    case NBI_WEIGHT_F16: return launch<NBI_WEIGHT_F16>(c, w, plan);
    case NBI_WEIGHT_FP8_BLOCK: return launch<NBI_WEIGHT_FP8_BLOCK>(c, w, plan);
    default: return launch<NBI_WEIGHT_FP8_TENSOR>(c, w, plan);
    }
}

void nbi_cuda_stream_linear(nbi_cuda *c, const nbi_linear_args *calls, uint32_t n,
                            const nbi_stream_around *around)
{
    const nbi_linear_args *a = &calls[0];
    const nbi_cuda_packed *p = nbi_cuda_packed_of(a->w);
    linear_work w = {};
    for (uint32_t i = 0; i < n; i++) {
        w.jobs[i] = {*nbi_cuda_packed_of(calls[i].w), static_cast<float *>(calls[i].y),
                     calls[i].bias, calls[i].y_stride, false};
        w.n_tiles += w.jobs[i].m.n_rt;
    }
    if (around->add) {
        w.jobs[n - 1].y = static_cast<float *>(around->add->x);
        w.jobs[n - 1].add = true;
    }
    w.base = static_cast<const float *>(a->x);
    w.x_stride = a->x_stride;
    w.n_jobs = n;
    w.n_parts = 1;
    w.n_chunks = nbi_chunks_of(p->kind, p->n_kt);
    w.cols = p->cols;
    w.n_tokens = a->n_rows;
    w.x_fast = nbi_x_fast(a->x, a->x_stride, p->cols);
    const nbi_stream_plan plan = plan_for(c, a, w.n_tiles);
    if (around->norm) {
        const nbi_norm_args norm = nbi_norm_of(around->norm, around->peers);
        const nbi_divisor chunks = nbi_divisor_of(nbi_ceil_div(p->cols, NBI_NORM_COLS));
        if (around->peers)
            launch_kind(c, norm_work<true>{{w}, norm, chunks}, plan);
        else
            launch_kind(c, norm_work<false>{{w}, norm, chunks}, plan);
    } else if (around->swiglu) {
        const swiglu_work k = {{w},
                               static_cast<const float *>(around->swiglu->gate),
                               static_cast<const float *>(around->swiglu->up),
                               around->swiglu->in_stride};
        launch_kind(c, k, plan);
    } else {
        launch_kind(c, w, plan);
    }
}
