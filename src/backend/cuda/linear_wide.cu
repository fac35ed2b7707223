/* Products with many tokens on warpgroups (wide.h). Callers: linear_many.cu. */
#include "backend/cuda/cuda_linear.h"
#include "backend/cuda/wide.h"

#define CONVERT_THREADS 256u
#define GROUP           8u /* row blocks whose units come one after the other: what L2 keeps */

struct wide_x {
    char *x;     /* [token][n_kt][128 bytes] */
    float *unit; /* [token][n_chunks]: 2^e */
    uint32_t n_chunks;
    uint32_t tokens; /* of a unit */
};

static size_t x_bytes(uint32_t n_tokens, uint32_t cols)
{
    return (size_t)n_tokens * nbi_ceil_div(cols, NBI_TILE_COLS) * NBI_WIDE_K_BYTES;
}

template <nbi_weight_kind KIND, bool W4A4>
static __global__ void __launch_bounds__(CONVERT_THREADS)
    convert_kernel(nbi_linear_call a, wide_x to)
{
    nbi_wait_before();
    nbi_let_next();
    constexpr uint32_t LANES = nbi_wide_lanes(KIND);
    const uint32_t i = (blockIdx.x * CONVERT_THREADS + threadIdx.x) / LANES;
    const uint32_t token = i / to.n_chunks, chunk = i % to.n_chunks;
    const bool here = token < a.n_tokens;
    const float *row = here ? a.x + (size_t)token * a.x_stride : NULL;
    const float two_e =
        nbi_wide_chunk<KIND, !W4A4>(to.x + (here ? token : 0) * (size_t)a.w.n_kt * NBI_WIDE_K_BYTES,
                                    row, chunk, a.w.cols, a.fast, W4A4 ? a.input_scale : 0);
    if (here && threadIdx.x % LANES == 0) to.unit[(size_t)token * to.n_chunks + chunk] = two_e;
}

/* Unit i: where it is. */
struct wide_at {
    uint32_t rt, token; /* the first of each */
    uint32_t n;         /* tokens */
};

[[maybe_unused]] static NBI_DEV wide_at unit_at(const nbi_linear_call &a, const wide_x &x,
                                                uint32_t i)
{
    const uint32_t n_rows = (a.w.n_rt + NBI_WIDE_ROW_TILES - 1) / NBI_WIDE_ROW_TILES;
    const uint32_t n_tokens = (a.n_tokens + x.tokens - 1) / x.tokens;
    const uint32_t group = i / (GROUP * n_tokens), in = i % (GROUP * n_tokens);
    const uint32_t below = n_rows - group * GROUP, height = below < GROUP ? below : GROUP;
    const uint32_t token = in / height * x.tokens, left = a.n_tokens - token;
    return {(group * GROUP + in % height) * NBI_WIDE_ROW_TILES, token,
            left < x.tokens ? left : x.tokens};
}

template <uint32_t N>
[[maybe_unused]] static NBI_DEV void put_rows(const nbi_linear_call &a, const float (&y)[N / 2],
                                              uint32_t rt, const wide_at &unit)
{
    const uint32_t g = (uint32_t)nbi_lane() / 4, t = (uint32_t)nbi_lane() % 4;
#pragma unroll
    for (uint32_t high = 0; high < 2; high++) {
        const uint32_t row = rt * NBI_TILE_ROWS + high * 8 + g;
        if (row >= a.w.rows) continue;
        const float factor = nbi_linear_factor(a, row), bias = a.bias ? a.bias[row] : 0;
#pragma unroll
        for (uint32_t n = 0; n < N / 8; n++)
#pragma unroll
            for (uint32_t j = 0; j < 2; j++) {
                const uint32_t token = n * 8 + 2 * t + j;
                if (token < unit.n)
                    a.y[(size_t)(unit.token + token) * a.y_stride + row] =
                        fmaf(y[4 * n + 2 * high + j], factor, bias);
            }
    }
}

template <nbi_weight_kind KIND>
static NBI_DEV void consume(const nbi_linear_call &a, const wide_x &x, nbi_wide_shared *shared,
                            uint32_t n_units)
{
    nbi_registers<NBI_WIDE_CONSUMER_REGISTERS, true>();
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0) - 4;
    /* behind the last: the last, and nothing is written */
    const auto row_tile = [&](uint32_t i) {
        const uint32_t rt = unit_at(a, x, i < n_units ? i : n_units - 1).rt + warp;
        return rt < a.w.n_rt ? rt : a.w.n_rt - 1;
    };
    nbi_wide_consumer<KIND> k;
    k.open(shared, a.w, row_tile(blockIdx.x));
    nbi_wait_before();
    nbi_let_next();
    for (uint32_t i = blockIdx.x; i < n_units; i += gridDim.x) {
        const wide_at at = unit_at(a, x, i);
        nbi_wide_by_tokens<KIND>(at.n, [&]<uint32_t N>() {
            float y[N / 2];
            k.template unit<N>(y, a.w, row_tile(i), a.w, row_tile(i + gridDim.x));
            put_rows<N>(a, y, at.rt + warp, at);
        });
    }
}

template <nbi_weight_kind KIND>
static NBI_DEV void produce(const nbi_linear_call &a, const wide_x &x, nbi_wide_shared *shared,
                            uint32_t n_units)
{
    nbi_registers<NBI_WIDE_PRODUCER_REGISTERS, false>();
    nbi_wait_before();
    nbi_let_next();
    nbi_wide_producer p = {shared, 0};
    for (uint32_t i = blockIdx.x; i < n_units; i += gridDim.x) {
        const wide_at at = unit_at(a, x, i);
        nbi_wide_by_tokens<KIND>(at.n, [&]<uint32_t N>() {
            p.unit<KIND, N>(x.x, x.unit, at.n, a.w.n_kt, [&](uint32_t r) { return at.token + r; });
        });
    }
    p.end();
}

template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(NBI_WIDE_THREADS, 1)
    wide_kernel(nbi_linear_call a, wide_x x, uint32_t n_units)
{
    if constexpr (!NBI_SM90A) {
        nbi_wait_before();
    } else {
        nbi_wide_shared *shared = nbi_shared_1024<nbi_wide_shared>();
        nbi_wide_open(shared);
        if (threadIdx.x < 128)
            produce<KIND>(a, x, shared, n_units);
        else
            consume<KIND>(a, x, shared, n_units);
    }
}

/* Kinds of the same form have the same converted x. */
static uint32_t form(nbi_weight_kind kind)
{
    return kind == NBI_WEIGHT_BF16 ? 1 : kind == NBI_WEIGHT_FP8_BLOCK ? 2 : 3;
}

static bool same(const nbi_cuda_converted &a, const nbi_cuda_converted &b)
{
    return a.x == b.x && a.n_rows == b.n_rows && a.cols == b.cols && a.stride == b.stride &&
           a.form == b.form && a.input_scale == b.input_scale;
}

static bool writes_x(const nbi_linear_call *a)
{
    const float *x_end = a->x + (size_t)a->n_tokens * a->x_stride;
    const float *y_end = a->y + (size_t)a->n_tokens * a->y_stride;
    return a->y < x_end && a->x < y_end;
}

/* Tokens of a unit: units of about the same size, in steps of 16. */
static uint32_t unit_tokens(nbi_weight_kind kind, uint32_t n_tokens)
{
    const uint32_t even = nbi_ceil_div(n_tokens, nbi_ceil_div(n_tokens, nbi_wide_tokens(kind)));
    return nbi_ceil_div(even, 16u) * 16;
}

template <nbi_weight_kind KIND, bool W4A4 = false>
static void run(nbi_cuda *c, const nbi_linear_call *a, uint32_t n_units)
{
    wide_x x;
    x.tokens = unit_tokens(KIND, a->n_tokens);
    x.x = static_cast<char *>(c->scratch);
    x.unit = reinterpret_cast<float *>(x.x + x_bytes(a->n_tokens, a->w.cols));
    x.n_chunks = nbi_linear_chunks(&a->w);
    const nbi_cuda_converted was = c->converted;
    c->converted = {0, a->x, a->n_tokens, a->w.cols, a->x_stride, form(KIND), a->input_scale};
    if (!same(was, c->converted) || was.n_calls != c->rt.n_calls) {
        const uint32_t threads = a->n_tokens * x.n_chunks * nbi_wide_lanes(KIND);
        nbi_launch(&c->rt, dim3(nbi_ceil_div(threads, CONVERT_THREADS)), dim3(CONVERT_THREADS), 0,
                   convert_kernel<KIND, W4A4>, *a, x);
    }
    const uint32_t n_sms = (uint32_t)c->rt.n_sms;
    nbi_launch(&c->rt, dim3(n_units < n_sms ? n_units : n_sms), dim3(NBI_WIDE_THREADS),
               sizeof(nbi_wide_shared), wide_kernel<KIND>, *a, x, n_units);
    if (!writes_x(a)) c->converted.n_calls = c->rt.n_calls;
}

bool nbi_linear_wide(nbi_cuda *c, const nbi_linear_call *a)
{
    const uint32_t n_units = nbi_ceil_div(a->w.n_rt, NBI_WIDE_ROW_TILES) *
                             nbi_ceil_div(a->n_tokens, unit_tokens(a->w.kind, a->n_tokens));
    if (c->rt.sm != 90 || a->n_tokens <= 64 || n_units * 3 < (uint32_t)c->rt.n_sms) return false;
    switch (a->w.kind) {
    case NBI_WEIGHT_NVFP4:
        if (a->input_scale > 0)
            run<NBI_WEIGHT_NVFP4, true>(c, a, n_units);
        else
            run<NBI_WEIGHT_NVFP4>(c, a, n_units);
        break;
    case NBI_WEIGHT_FP8_BLOCK: run<NBI_WEIGHT_FP8_BLOCK>(c, a, n_units); break;
    case NBI_WEIGHT_FP8_TENSOR: run<NBI_WEIGHT_FP8_TENSOR>(c, a, n_units); break;
    case NBI_WEIGHT_BF16: run<NBI_WEIGHT_BF16>(c, a, n_units); break;
    default: run<NBI_WEIGHT_F16>(c, a, n_units); break;
    }
    return true;
}
