/* Linear layers of few tokens: one launch for all matrices that multiply the same x. */
#include "backend/cuda/stream_linear.h"

#include "backend/cuda/pack.h"
#include "backend/cuda/stream.h"

struct job {
    nbi_cuda_packed m;
    float *y;
    const float *bias;
    uint32_t y_stride;
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
            j.y[(size_t)t * j.y_stride + row] = fmaf(r.y[i], r.scale[i / 2], bias);
        }
    }
};

template <nbi_weight_kind KIND, uint32_t NT>
static __global__ void __launch_bounds__((NBI_STREAM_WARPS + 1) * 32)
    stream_linear_kernel(const __grid_constant__ linear_work w,
                         const __grid_constant__ nbi_stream_plan plan)
{
    nbi_stream_run<KIND, NT>(w, plan);
}

static nbi_stream_plan plan_for(const nbi_cuda *c, const nbi_linear_args *a)
{
    const nbi_cuda_packed *p = nbi_cuda_packed_of(a->w);
    return nbi_stream_plan_for(p->kind, 1, nbi_chunks_of(p->kind, p->n_kt), a->n_rows,
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
    return nbi_stream_plan_fits(plan_for(c, &calls[0]));
}

template <nbi_weight_kind KIND>
static void launch(nbi_cuda *c, const linear_work &w, const nbi_stream_plan &plan)
{
    const dim3 grid = nbi_stream_grid((uint32_t)c->rt.n_sms, w.n_tiles);
    const dim3 block = nbi_stream_threads(plan);
    if (plan.pad_tokens > 8)
        nbi_launch(&c->rt, grid, block, plan.shared, stream_linear_kernel<KIND, 2>, w, plan);
    else
        nbi_launch(&c->rt, grid, block, plan.shared, stream_linear_kernel<KIND, 1>, w, plan);
}

void nbi_cuda_stream_linear(nbi_cuda *c, const nbi_linear_args *calls, uint32_t n)
{
    const nbi_linear_args *a = &calls[0];
    const nbi_cuda_packed *p = nbi_cuda_packed_of(a->w);
    linear_work w = {};
    for (uint32_t i = 0; i < n; i++) {
        w.jobs[i] = {*nbi_cuda_packed_of(calls[i].w), static_cast<float *>(calls[i].y),
                     calls[i].bias, calls[i].y_stride};
        w.n_tiles += w.jobs[i].m.n_rt;
    }
    w.base = static_cast<const float *>(a->x);
    w.x_stride = a->x_stride;
    w.n_jobs = n;
    w.n_parts = 1;
    w.n_chunks = nbi_chunks_of(p->kind, p->n_kt);
    w.cols = p->cols;
    w.n_tokens = a->n_rows;
    w.x_fast = nbi_x_fast(a->x, a->x_stride, p->cols);
    const nbi_stream_plan plan = plan_for(c, a);
    switch (p->kind) {
    case NBI_WEIGHT_NVFP4: launch<NBI_WEIGHT_NVFP4>(c, w, plan); break;
    case NBI_WEIGHT_BF16: launch<NBI_WEIGHT_BF16>(c, w, plan); break;
    case NBI_WEIGHT_F16: launch<NBI_WEIGHT_F16>(c, w, plan); break;
    case NBI_WEIGHT_FP8_BLOCK: launch<NBI_WEIGHT_FP8_BLOCK>(c, w, plan); break;
    default: launch<NBI_WEIGHT_FP8_TENSOR>(c, w, plan); break;
    }
}
