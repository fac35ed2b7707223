/* The products of many rows on warpgroups (backend/cuda/wide.h). Callers: moe_grouped.cu.
 *
 * A unit is 128 rows of an expert's weights with up to 160 of its tokens. Units of the same tokens
 * come one after the other, so that their rows of x and the expert's weights stay in L2. */
#include "backend/cuda/wide.h"
#include "moe/cuda/moe_grouped.h"

#define CONVERT_THREADS 256u

/* ---------------------------------------------------------------- conversion */

struct wide_convert_args {
    const float *x, *input_scale; /* [n_experts], or NULL */
    char *to;
    float *unit;
    const int32_t *ids;
    const uint32_t *pair;        /* of a row, or NULL: the row's number is the pair's */
    const nbi_moe_totals *total; /* rows are places: this many; or NULL */
    uint32_t n_rows, x_rows, cols, n_chunks, n_experts; /* x_rows: rows that share one of x */
};

/* Row r of `to` from row r / x_rows of x. */
template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(CONVERT_THREADS) convert_kernel(const wide_convert_args a)
{
    nbi_wait_before();
    nbi_let_next();
    constexpr uint32_t LANES = nbi_wide_lanes(KIND);
    const uint32_t i = (blockIdx.x * CONVERT_THREADS + threadIdx.x) / LANES;
    const uint32_t r = i / a.n_chunks, chunk = i % a.n_chunks;
    bool here = r < (a.total ? a.total->n_places : a.n_rows);
    float scale = 0;
    if (here && a.input_scale) {
        const int32_t e = a.ids[a.pair ? a.pair[r] : r];
        here = e >= 0 && (uint32_t)e < a.n_experts;
        if (here) scale = a.input_scale[e];
    }
    const uint32_t to = here ? r : 0;
    const size_t pitch = (size_t)((a.cols + NBI_TILE_COLS - 1) / NBI_TILE_COLS) * NBI_WIDE_K_BYTES;
    const float factor = nbi_wide_chunk<KIND, true>(
        a.to + to * pitch, here ? a.x + (size_t)(r / a.x_rows) * a.cols : NULL, chunk, a.cols, true,
        scale);
    if (here && threadIdx.x % LANES == 0)
        a.unit[(size_t)to * a.n_chunks + chunk] = scale > 0 ? factor * scale : factor;
}

template <nbi_weight_kind KIND> static void launch_convert(nbi_cuda *c, const wide_convert_args &a)
{
    const uint64_t threads = (uint64_t)a.n_rows * a.n_chunks * nbi_wide_lanes(KIND);
    nbi_launch(&c->rt, dim3((uint32_t)((threads + CONVERT_THREADS - 1) / CONVERT_THREADS)),
               dim3(CONVERT_THREADS), 0, convert_kernel<KIND>, a);
}

/* ---------------------------------------------------------------- products */

struct wide_product_args {
    nbi_moe_weights weights;
    nbi_moe_work w;
    const char *rows;
    const float *unit;
    float *out;       /* [places][rows] */
    uint32_t x_pairs; /* gate_up: pairs that share a converted row of x */
    uint32_t row_blocks;
};

template <nbi_weight_kind KIND, bool GATE_UP>
static NBI_DEV void produce(const wide_product_args &a, nbi_wide_shared *shared)
{
    nbi_registers<NBI_WIDE_PRODUCER_REGISTERS, false>();
    nbi_wait_before();
    nbi_let_next();
    nbi_wide_producer p = {shared, 0};
    const uint32_t n_units = a.w.total->n_tiles * a.row_blocks;
    for (uint32_t i = blockIdx.x; i < n_units; i += gridDim.x) {
        const nbi_moe_token_tile tile = a.w.tiles[i / a.row_blocks];
        nbi_wide_by_tokens<KIND>(tile.n, [&]<uint32_t N>() {
            p.unit<KIND, N>(a.rows, a.unit, tile.n, a.weights.first.n_kt, [&](uint32_t r) {
                return GATE_UP ? a.w.pair[tile.first + r] / a.x_pairs : tile.first + r;
            });
        });
    }
    p.end();
}

/* h[2 n + j] = swiglu of the gate in y[4 n + j] and the up in y[4 n + 2 + j], in the thread's
 * n_here first tokens. */
template <uint32_t N>
NBI_DEV void swiglu_rows(float (&h)[N / 4], const float (&y)[N / 2], float gate_scale,
                         float up_scale, uint32_t n_here)
{
    bool slow = false;
#pragma unroll
    for (uint32_t i = 0; i < N / 4; i++) {
        const float gate = y[i / 2 * 4 + i % 2] * gate_scale;
        const float up = y[i / 2 * 4 + i % 2 + 2] * up_scale;
        const bool far = !(fabsf(gate) >= 0x1p-60f && fabsf(gate) <= 40.0f);
        slow |= i / 2 * 8 + i % 2 < n_here && far;
        h[i] = nbi_divide_in_range(gate, __fadd_rn(1.0f, expf(-gate))) * up;
    }
    if (!slow) return;
#pragma unroll
    for (uint32_t i = 0; i < N / 4; i++)
        h[i] =
            nbi_moe_swiglu(y[i / 2 * 4 + i % 2] * gate_scale, y[i / 2 * 4 + i % 2 + 2] * up_scale);
}

template <uint32_t N, bool GATE_UP>
[[maybe_unused]] static NBI_DEV void put_rows(const wide_product_args &a, const nbi_cuda_packed &w,
                                              const nbi_moe_token_tile &tile,
                                              const float (&y)[N / 2], uint32_t rt)
{
    if (rt >= w.n_rt) return;
    const uint32_t g = (uint32_t)nbi_lane() / 4, t = (uint32_t)nbi_lane() % 4;
    const uint32_t low = rt * NBI_TILE_ROWS + g, row = GATE_UP ? rt * 8 + g : low;
    const float low_scale = w.row_scale[low], high_scale = w.row_scale[low + 8];
    /* the thread's tokens are 8 n + j from 2 t on */
    const uint32_t n_here = tile.n > 2 * t && row < w.rows ? tile.n - 2 * t : 0;
    float *to = a.out + (size_t)(tile.first + 2 * t) * w.rows + row;
    float h[N / 4];
    if (GATE_UP) swiglu_rows<N>(h, y, low_scale, high_scale, n_here);
#pragma unroll
    for (uint32_t i = 0; i < N / 4; i++) {
        const uint32_t token = i / 2 * 8 + i % 2;
        float *at = to + (size_t)token * w.rows;
        if (token < n_here) at[0] = GATE_UP ? h[i] : y[i / 2 * 4 + i % 2] * low_scale;
        if (!GATE_UP && token < n_here && row + 8 < w.rows)
            at[8] = y[i / 2 * 4 + i % 2 + 2] * high_scale;
    }
}

/* Unit i; behind the last: the last. */
struct wide_unit {
    nbi_moe_token_tile tile;
    uint32_t rt; /* of the warp; behind the last row tile */
};

template <nbi_weight_kind KIND, bool GATE_UP>
static NBI_DEV void consume(const wide_product_args &a, nbi_wide_shared *shared)
{
    nbi_registers<NBI_WIDE_CONSUMER_REGISTERS, true>();
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0) - 4;
    nbi_wait_before();
    nbi_let_next();
    const uint32_t n_units = a.w.total->n_tiles * a.row_blocks, n_rt = a.weights.first.n_rt;
    if (blockIdx.x >= n_units) return;
    const auto find = [&](uint32_t i) {
        const uint32_t u = i < n_units ? i : n_units - 1;
        return wide_unit{a.w.tiles[u / a.row_blocks], u % a.row_blocks * NBI_WIDE_ROW_TILES + warp};
    };
    const auto inside = [&](uint32_t rt) { return rt < n_rt ? rt : n_rt - 1; };
    wide_unit at = find(blockIdx.x);
    nbi_cuda_packed w = nbi_moe_expert(a.weights, at.tile.expert);
    nbi_wide_consumer<KIND> k;
    k.open(shared, w, inside(at.rt));
    for (uint32_t i = blockIdx.x; i < n_units; i += gridDim.x) {
        const wide_unit next = find(i + gridDim.x);
        const nbi_cuda_packed after = nbi_moe_expert(a.weights, next.tile.expert);
        nbi_wide_by_tokens<KIND>(at.tile.n, [&]<uint32_t N>() {
            float y[N / 2];
            k.template unit<N>(y, w, inside(at.rt), after, inside(next.rt));
            put_rows<N, GATE_UP>(a, w, at.tile, y, at.rt);
        });
        at = next;
        w = after;
    }
}

template <nbi_weight_kind KIND, bool GATE_UP>
static __global__ void __launch_bounds__(NBI_WIDE_THREADS, 1)
    product_kernel(const wide_product_args a)
{
    if constexpr (!NBI_SM90A) {
        nbi_wait_before();
    } else {
        nbi_wide_shared *shared = nbi_shared_1024<nbi_wide_shared>();
        nbi_wide_open(shared);
        if (threadIdx.x < 128)
            produce<KIND, GATE_UP>(a, shared);
        else
            consume<KIND, GATE_UP>(a, shared);
    }
}

template <nbi_weight_kind KIND, bool GATE_UP>
static void launch_product(nbi_cuda *c, wide_product_args a, uint32_t n_tiles)
{
    a.row_blocks = nbi_ceil_div(a.weights.first.n_rt, NBI_WIDE_ROW_TILES);
    const uint64_t most = (uint64_t)a.row_blocks * n_tiles;
    const uint32_t n_sms = (uint32_t)c->rt.n_sms;
    nbi_launch(&c->rt, dim3(most < n_sms ? (uint32_t)most : n_sms), dim3(NBI_WIDE_THREADS),
               sizeof(nbi_wide_shared), product_kernel<KIND, GATE_UP>, a);
}

/* ---------------------------------------------------------------- both halves */

template <nbi_weight_kind KIND>
static void gate_up(nbi_cuda *c, const nbi_moe_wide_args &a, const nbi_moe_weights &weights)
{
    const nbi_cuda_packed &w = weights.first;
    const bool by_pair = weights.input_scale != NULL;
    wide_convert_args x = {};
    x.x = a.x;
    x.input_scale = weights.input_scale;
    x.to = a.w.xc;
    x.unit = a.w.xe;
    x.ids = a.ids;
    x.n_rows = by_pair ? a.n_pairs : a.n_rows;
    x.x_rows = by_pair ? a.top_k : 1;
    x.cols = w.cols;
    x.n_chunks = nbi_chunks_of(KIND, w.n_kt);
    x.n_experts = a.n_experts;
    launch_convert<KIND>(c, x);
    launch_product<KIND, true>(c, {weights, a.w, a.w.xc, a.w.xe, a.w.h, by_pair ? 1 : a.top_k, 0},
                               a.n_tiles);
}

template <nbi_weight_kind KIND>
static void down(nbi_cuda *c, const nbi_moe_wide_args &a, const nbi_moe_weights &weights)
{
    const nbi_cuda_packed &w = weights.first;
    wide_convert_args h = {};
    h.x = a.w.h;
    h.input_scale = weights.input_scale;
    h.to = a.w.hc;
    h.unit = a.w.he;
    h.ids = a.ids;
    h.pair = a.w.pair;
    h.total = a.w.total;
    h.n_rows = a.n_pairs;
    h.x_rows = 1;
    h.cols = w.cols;
    h.n_chunks = nbi_chunks_of(KIND, w.n_kt);
    h.n_experts = a.n_experts;
    launch_convert<KIND>(c, h);
    launch_product<KIND, false>(c, {weights, a.w, a.w.hc, a.w.he, a.w.y, 1, 0}, a.n_tiles);
}

uint32_t nbi_moe_wide_tokens(const nbi_moe_shape *shape)
{
    const uint32_t up = nbi_wide_tokens(shape->kind_gate_up),
                   down = nbi_wide_tokens(shape->kind_down);
    return up < down ? up : down;
}

void nbi_moe_wide_gate_up(nbi_cuda *c, const nbi_moe_wide_args &a, const nbi_moe_weights &weights)
{
    NBI_MOE_BY_KIND(weights.first.kind, gate_up, c, a, weights);
}

void nbi_moe_wide_down(nbi_cuda *c, const nbi_moe_wide_args &a, const nbi_moe_weights &weights)
{
    NBI_MOE_BY_KIND(weights.first.kind, down, c, a, weights);
}
