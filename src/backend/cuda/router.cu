/* The router of a decoded row as one launch: the norm, the exact product, the choice of experts.
 * The same bits as the three operators. Callers: linear.cu.
 *
 * A block has four experts, rows 2 q, 2 q + 1 and these + 8 of a row tile (q of four), and norms
 * the few rows itself, a warp a chunk of 256 columns. Eight lanes multiply a chunk as the warp of
 * linear_exact.cu does: lane (g, t), t = l % 4. The last block to be done chooses the experts. */
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/norm.h"
#include "backend/cuda/pack.h"
#include "backend/cuda/route_row.h"
#include "backend/cuda/router.h"

#define WARPS   8u
#define ROWS    4u /* of a block */
#define TOKENS  8u
#define EXPERTS 256u

/* Chunks of one token at most that have a warp each. */
#define ONE_WARPS 24u

struct router_work {
    nbi_norm_args norm;
    nbi_cuda_packed w;
    nbi_route_args route;
    float *logits;
    uint32_t logit_stride, n_tokens, n_chunks;
    nbi_divisor chunks; /* by n_chunks */
    uint32_t pitch;     /* F32 weights: floats of a row in shared memory */
    uint32_t *arrived;  /* blocks that are done; zero between kernels */
};

/* Shared memory of a block, all of it dynamic: what is more than 48 KB has to be asked for. */
struct router_shared {
    char *weights;
    float *x;     /* [token][chunk][256]; then what the choice needs */
    float *parts; /* [token][chunk]: squares */
    float *sums;  /* [token][chunk][4] */
};

static __host__ __device__ uint32_t weight_bytes(const router_work &a)
{
    return a.w.kind == NBI_WEIGHT_F32 ? ROWS * a.pitch * 4u : a.w.n_kt * NBI_TILE_STEPS * 128u;
}

static __host__ __device__ uint32_t x_floats(const router_work &a)
{
    const uint32_t x = a.n_chunks * NBI_NORM_COLS;
    const uint32_t choice = sizeof(nbi_route_shared<EXPERTS / NBI_WARP>) / sizeof(float);
    return a.n_tokens * (x > choice ? x : choice);
}

static size_t shared_bytes(const router_work &a)
{
    const size_t n = (size_t)a.n_tokens * a.n_chunks;
    return weight_bytes(a) + (x_floats(a) + n * (1 + ROWS)) * sizeof(float);
}

static NBI_DEV router_shared carve(const router_work &a)
{
    router_shared s;
    s.weights = nbi_shared<char>();
    s.x = reinterpret_cast<float *>(s.weights + weight_bytes(a));
    s.parts = s.x + x_floats(a);
    s.sums = s.parts + a.n_tokens * a.n_chunks;
    return s;
}

/* Row i of the block's four. */
static NBI_DEV uint32_t row_of(uint32_t i)
{
    return blockIdx.x / 4 * NBI_TILE_ROWS + blockIdx.x % 4 * 2 + i % 2 + i / 2 * 8;
}

/* Asks for the block's weights. BF16: [k-step][8 lanes][16 bytes]; F32: rows. */
template <nbi_weight_kind KIND>
static NBI_DEV void ask_weights(const router_work &a, const router_shared &s)
{
    if (KIND == NBI_WEIGHT_F32) {
        const uint32_t groups = (a.w.cols + 15) / 16 * 4; /* of 4; zeros behind the row */
        for (uint32_t i = threadIdx.x; i < ROWS * groups; i += blockDim.x) {
            const uint32_t r = i / groups, at = i % groups * 4, row = row_of(r);
            const bool real = row < a.w.rows && at < a.w.cols;
            nbi_copy_async(s.weights + (size_t)(r * a.pitch + at) * 4,
                           static_cast<const float *>(a.w.data) +
                               (real ? (size_t)row * a.w.cols + at : 0),
                           real);
        }
    } else {
        const char *from = static_cast<const char *>(a.w.data) +
                           (size_t)(blockIdx.x / 4) * a.w.n_kt * 2048 + blockIdx.x % 4 * 128;
        for (uint32_t i = threadIdx.x; i < a.w.n_kt * NBI_TILE_STEPS * 8; i += blockDim.x)
            nbi_copy_async(s.weights + i * 16, from + (size_t)(i / 8) * 512 + i % 8 * 16);
    }
    nbi_copy_commit();
}

/* Weights of rows g and g+8 from column c = 16 step + 4 t on. */
template <nbi_weight_kind KIND>
static NBI_DEV void read_weights(float w[2][4], const router_work &a, const router_shared &s,
                                 uint32_t step)
{
    const uint32_t l = (uint32_t)nbi_lane() % 8;
    if (KIND == NBI_WEIGHT_F32) {
        const float *row = reinterpret_cast<const float *>(s.weights) + l / 4 * a.pitch;
#pragma unroll
        for (uint32_t high = 0; high < 2; high++) {
            const nbi_f32x4 v = *reinterpret_cast<const nbi_f32x4 *>(row + 2 * high * a.pitch +
                                                                     step * 16 + l % 4 * 4);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) w[high][i] = v.v[i];
        }
    } else {
        const nbi_u32x4 v = *reinterpret_cast<const nbi_u32x4 *>(s.weights + (step * 8 + l) * 16);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            w[i % 2][i / 2 * 2] = nbi_bf16_lo(v.v[i]);
            w[i % 2][i / 2 * 2 + 1] = nbi_bf16_hi(v.v[i]);
        }
    }
}

/* Item i is chunk i % n_chunks of token i / n_chunks: x + delta and its squares. */
template <bool RANKS>
static NBI_DEV void take(const router_work &a, const router_shared &s, uint32_t i, uint32_t epoch)
{
    const uint32_t token = nbi_div(i, a.chunks), first = nbi_mod(i, a.chunks) * NBI_NORM_COLS;
    nbi_norm_part p;
    nbi_norm_take<RANKS>(&p, a.norm, token, first, true, epoch);
    if (a.norm.delta && nbi_is_own(i))
        p.store(a.norm.x_out + (size_t)token * a.norm.x_stride, first, a.norm.width, true);
    p.store(s.x + i * NBI_NORM_COLS, 0, NBI_NORM_COLS, true);
    const float squares = nbi_warp_sum(p.squares(0));
    if (nbi_lane() == 0) s.parts[i] = squares;
}

static NBI_DEV void apply_norm(const router_work &a, const router_shared &s, uint32_t i,
                               const nbi_norm_part &weight)
{
    const uint32_t token = nbi_div(i, a.chunks), chunk = nbi_mod(i, a.chunks);
    const float squares = nbi_norm_sum(s.parts + token * a.n_chunks, a.n_chunks);
    if (blockIdx.x == 0 && chunk == 0 && nbi_lane() == 0) nbi_norm_guard(a.norm, token, squares);
    nbi_norm_part p;
    p.load(s.x + i * NBI_NORM_COLS, 0, NBI_NORM_COLS, true);
    p.scale(nbi_norm_factor(a.norm, squares), weight);
    p.store(s.x + i * NBI_NORM_COLS, 0, NBI_NORM_COLS, true);
    if (nbi_is_own(i))
        p.store(a.norm.out + (size_t)token * a.norm.out_stride, chunk * NBI_NORM_COLS, a.norm.width,
                true);
}

/* Step k of item i, which is step `step` of its row, to a lane's two sums. */
template <nbi_weight_kind KIND>
static NBI_DEV void add_step(float sum[2], const router_work &a, const router_shared &s, uint32_t i,
                             uint32_t step, uint32_t k)
{
    const uint32_t at = i * NBI_NORM_COLS + k * 16 + (uint32_t)nbi_lane() % 4 * 4;
    float w[2][4];
    read_weights<KIND>(w, a, s, step);
    const nbi_f32x4 x = *reinterpret_cast<const nbi_f32x4 *>(s.x + at);
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        sum[0] = fmaf(w[0][j], x.v[j], sum[0]);
        sum[1] = fmaf(w[1][j], x.v[j], sum[1]);
    }
}

/* Eight lanes' sums of item i to shared memory. All lanes call. */
static NBI_DEV void put_sums(float sum[2], const router_shared &s, uint32_t i, bool real)
{
    const uint32_t l = (uint32_t)nbi_lane() % 8;
#pragma unroll
    for (uint32_t high = 0; high < 2; high++) {
        sum[high] += __shfl_xor_sync(NBI_FULL_MASK, sum[high], 1);
        sum[high] += __shfl_xor_sync(NBI_FULL_MASK, sum[high], 2);
        if (real && l % 4 == 0) s.sums[i * ROWS + high * 2 + l / 4] = sum[high];
    }
}

/* Eight lanes: the sums of item i for the block's rows. All lanes call. */
template <nbi_weight_kind KIND>
static NBI_DEV void multiply(const router_work &a, const router_shared &s, uint32_t i, bool real)
{
    const uint32_t first = nbi_mod(i, a.chunks) * (NBI_NORM_COLS / 16);
    float sum[2] = {0, 0};
#pragma unroll 4
    for (uint32_t k = 0; k < NBI_NORM_COLS / 16; k++) {
        if (!real || (first + k) * 16 >= a.w.cols) continue;
        add_step<KIND>(sum, a, s, i, first + k, k);
    }
    put_sums(sum, s, i, real);
}

/* A whole chunk of the one token, the same way: every eight lanes do it. */
template <nbi_weight_kind KIND>
static NBI_DEV void multiply_whole(const router_work &a, const router_shared &s, uint32_t chunk)
{
    constexpr uint32_t STEPS = NBI_NORM_COLS / 16;
    float sum[2] = {0, 0};
#pragma unroll
    for (uint32_t k = 0; k < STEPS; k++) add_step<KIND>(sum, a, s, chunk, chunk * STEPS + k, k);
    put_sums(sum, s, chunk, nbi_lane() < 8);
}

/* A thread's row of a token: its chunks' sums in ascending order. */
static NBI_DEV float add_chunks(const router_work &a, const router_shared &s, uint32_t token)
{
    float y = 0;
#pragma unroll 8
    for (uint32_t c = 0; c < a.n_chunks; c++)
        y += s.sums[(token * a.n_chunks + c) * ROWS + threadIdx.x % ROWS];
    return y;
}

template <uint32_t HAS>
static NBI_DEV void choose(const router_work &a, const router_shared &s, const float bias[HAS])
{
    nbi_route_shared<HAS> *shared = reinterpret_cast<nbi_route_shared<HAS> *>(s.x);
    const uint32_t t = threadIdx.x / NBI_WARP, lane = (uint32_t)nbi_lane();
    if (t >= a.n_tokens) return;
    float score[HAS];
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) {
        const uint32_t e = i * NBI_WARP + lane;
        score[i] = 0;
        if (e < a.route.n_experts)
            score[i] = nbi_float(nbi_load_fresh(reinterpret_cast<const uint32_t *>(a.logits) +
                                                (size_t)t * a.logit_stride + e));
    }
    nbi_route_row<HAS>(a.route, t, score, bias, &shared[t]);
}

template <nbi_weight_kind KIND, uint32_t HAS, bool RANKS>
static __global__ void __launch_bounds__(WARPS *NBI_WARP)
    router_kernel(const __grid_constant__ router_work a)
{
    const router_shared s = carve(a);
    const uint32_t warp = threadIdx.x / NBI_WARP, all = a.n_tokens * a.n_chunks;
    ask_weights<KIND>(a, s);
    float bias[HAS];
    nbi_route_bias<HAS>(a.route, bias);
    nbi_norm_part weight;
    weight.load(a.norm.weight, nbi_mod(warp, a.chunks) * NBI_NORM_COLS, a.norm.width, true);
    nbi_let_next();
    nbi_wait_before();
    const uint32_t epoch = RANKS ? nbi_norm_epoch(a.norm) : 0;
    if constexpr (RANKS) nbi_norm_send_all(a.norm, a.n_tokens, warp, WARPS, epoch);
#pragma unroll 1
    for (uint32_t i = warp; i < all; i += WARPS) take<RANKS>(a, s, i, epoch);
    nbi_copy_wait<0>();
    __syncthreads();
    if (RANKS && warp == 0) nbi_norm_count(a.norm, epoch);
#pragma unroll 1
    for (uint32_t i = warp; i < all; i += WARPS) {
        if (i != warp)
            weight.load(a.norm.weight, nbi_mod(i, a.chunks) * NBI_NORM_COLS, a.norm.width, true);
        apply_norm(a, s, i, weight);
    }
    __syncwarp();
    const uint32_t group = (uint32_t)nbi_lane() / 8; /* of eight lanes: an item each */
#pragma unroll 1
    for (uint32_t i = warp; i < all; i += 4 * WARPS)
        multiply<KIND>(a, s, i + group * WARPS, i + group * WARPS < all);
    __syncthreads();
    const uint32_t token = threadIdx.x / ROWS, row = row_of(threadIdx.x % ROWS);
    if (token < a.n_tokens && row < a.w.rows) {
        const float y = add_chunks(a, s, token);
        const float factor = KIND == NBI_WEIGHT_F32 ? 1.0f : a.w.row_scale[row];
        a.logits[(size_t)token * a.logit_stride + row] = fmaf(y, factor, 0);
    }
    __shared__ bool last;
    if (nbi_arrive_last(a.arrived, gridDim.x, &last)) choose<HAS>(a, s, bias);
}

/* The same for one token whose chunks are whole: a warp has one, and holds it in registers. */
template <nbi_weight_kind KIND, uint32_t HAS>
static __global__ void __launch_bounds__(ONE_WARPS *NBI_WARP)
    router_one_kernel(const __grid_constant__ router_work a)
{
    const router_shared s = carve(a);
    const uint32_t warp = threadIdx.x / NBI_WARP, row = row_of(threadIdx.x % ROWS);
    const bool ends = threadIdx.x < ROWS && row < a.w.rows;
    ask_weights<KIND>(a, s);
    float bias[HAS], factor = 1;
    nbi_route_bias<HAS>(a.route, bias);
    if (ends && KIND != NBI_WEIGHT_F32) factor = a.w.row_scale[row];
    nbi_norm_one norm;
    norm.load(a.norm, warp);
    nbi_let_next();
    nbi_wait_before();
    norm.take(a.norm, s.parts);
    nbi_copy_wait<0>();
    __syncthreads();
    norm.end(a.norm, s.parts, a.n_chunks);
    norm.x.store(s.x + norm.first, 0, NBI_NORM_COLS, true);
    norm.leave(a.norm);
    __syncwarp();
    multiply_whole<KIND>(a, s, warp);
    __syncthreads();
    if (ends) a.logits[row] = fmaf(add_chunks(a, s, 0), factor, 0);
    __shared__ bool last;
    if (nbi_arrive_last(a.arrived, gridDim.x, &last)) choose<HAS>(a, s, bias);
}

static router_work work_of(const nbi_cuda *c, const nbi_rmsnorm_args *norm,
                           const nbi_linear_args *linear, const nbi_peer_view *peers)
{
    router_work k = {};
    k.norm = nbi_norm_of(norm, peers);
    k.w = *nbi_cuda_packed_of(linear->w);
    k.logits = static_cast<float *>(linear->y);
    k.logit_stride = linear->y_stride;
    k.n_tokens = linear->n_rows;
    k.n_chunks = nbi_ceil_div(k.w.cols, NBI_NORM_COLS);
    k.chunks = nbi_divisor_of(k.n_chunks);
    k.pitch = nbi_ceil_div(k.w.cols, 32) * 32 + 16; /* two rows' columns in different banks */
    k.arrived = c->arrivals;
    return k;
}

bool nbi_cuda_router_waits(const nbi_cuda *c, const nbi_rmsnorm_args *norm,
                           const nbi_linear_args *linear)
{
    const nbi_cuda_packed *w = nbi_cuda_packed_of(linear->w);
    if (w->kind != NBI_WEIGHT_BF16 && w->kind != NBI_WEIGHT_F32) return false;
    if (!linear->x_exact || linear->bias || linear->n_rows > TOKENS || w->rows > EXPERTS)
        return false;
    return shared_bytes(work_of(c, norm, linear, NULL)) <= c->rt.shared_max;
}

bool nbi_cuda_router_fits(const nbi_linear_args *linear, const nbi_route_args *route)
{
    return route->logits == linear->y && route->n_rows == linear->n_rows && route->top_k &&
           route->n_experts == nbi_cuda_packed_of(linear->w)->rows &&
           route->n_experts == linear->y_stride && nbi_route_fits(route);
}

template <bool RANKS> static auto kernel_for(bool f32, bool few)
{
    return f32   ? few ? router_kernel<NBI_WEIGHT_F32, 4, RANKS>
                       : router_kernel<NBI_WEIGHT_F32, EXPERTS / NBI_WARP, RANKS>
             : few ? router_kernel<NBI_WEIGHT_BF16, 4, RANKS>
                 : router_kernel<NBI_WEIGHT_BF16, EXPERTS / NBI_WARP, RANKS>;
}

static auto kernel_for_one(bool f32, bool few)
{
    return f32   ? few ? router_one_kernel<NBI_WEIGHT_F32, 4>
                       : router_one_kernel<NBI_WEIGHT_F32, EXPERTS / NBI_WARP>
             : few ? router_one_kernel<NBI_WEIGHT_BF16, 4>
                 : router_one_kernel<NBI_WEIGHT_BF16, EXPERTS / NBI_WARP>;
}

void nbi_cuda_router(nbi_cuda *c, const nbi_rmsnorm_args *norm, const nbi_linear_args *linear,
                     const nbi_route_args *route, const nbi_peer_view *peers)
{
    router_work k = work_of(c, norm, linear, peers);
    k.route = *route;
    const bool f32 = k.w.kind == NBI_WEIGHT_F32, few = route->n_experts <= 4 * NBI_WARP;
    const dim3 grid(nbi_ceil_div(k.w.rows, NBI_TILE_ROWS) * 4);
    if (!peers && k.n_tokens == 1 && k.n_chunks <= ONE_WARPS && k.w.cols % NBI_NORM_COLS == 0)
        nbi_launch(&c->rt, grid, dim3(k.n_chunks * NBI_WARP), shared_bytes(k),
                   kernel_for_one(f32, few), k);
    else
        nbi_launch(&c->rt, grid, dim3(WARPS * NBI_WARP), shared_bytes(k),
                   peers ? kernel_for<true>(f32, few) : kernel_for<false>(f32, few), k);
}
