/* The router of one row and gate_up of the experts that it chooses, as one launch; down follows
 * (moe_one.cu). The bits are those of norm, product, choice and gate_up apart. Callers:
 * moe_runners.cu.
 *
 * Every block norms the row by itself and makes the logits of one or two experts, whose weights it
 * has asked for before the wait. Logits go to all by way of memory, each with the launch's number
 * beside it, which every block counts for itself; when all are there, each block chooses by itself
 * and asks for its share of the chosen experts. So all blocks of the launch must be there together:
 * there are no more than multiprocessors, and they wait for nobody else. The first block leaves ids
 * and weights for down before it lets down start.
 *
 * The emulation runs one block after the other: there every block makes all logits. */
#include "backend/cuda/norm.h"
#include "backend/cuda/pack.h"
#include "backend/cuda/route_row.h"
#include "moe/cuda/moe_one.h"

#define BLOCK_ROWS 2u /* of the router, at most */
#define CHOOSER    2u /* the warp that chooses; those before it multiply */

struct routed_args {
    one_args up;
    nbi_norm_args norm;
    nbi_cuda_packed w; /* the router's */
    nbi_route_args route;
    float *logits;
    uint32_t n_chunks; /* of the row, 256 columns each */
    nbi_cuda_routed *shared;
};

/* Shared memory behind one_shared's. */
template <uint32_t HAS> struct alignas(16) routed_choice {
    nbi_route_shared<HAS> route;
    alignas(16) uint32_t order[HAS * NBI_WARP];
    uint32_t ids[NBI_WARP];
    float parts[NBI_WARP];
};

struct routed_shared {
    char *weights; /* [BLOCK_ROWS][k-steps][4 lanes][16 bytes] */
    float *x;
    void *choice;
};

static __host__ __device__ uint32_t row_bytes(const routed_args &a)
{
    return a.n_chunks * (NBI_NORM_COLS / 16) * 64u;
}

/* Bytes; with `base` also the places. */
template <uint32_t HAS>
static __host__ __device__ uint32_t lay_out(routed_shared *s, one_shared *one, char *base,
                                            const routed_args &a, uint32_t unit_bytes)
{
    uint32_t at = (one_lay_out(one, base, a.up.units, unit_bytes) + 127u) / 128u * 128u;
    s->weights = base + at;
    at += BLOCK_ROWS * row_bytes(a);
    s->x = reinterpret_cast<float *>(base + at);
    at += a.n_chunks * NBI_NORM_COLS * 4u;
    s->choice = base + at;
    return at + (uint32_t)sizeof(routed_choice<HAS>);
}

/* Expert `row` of the router: its 16 bytes of k-step 0 and lane 0; the next step is 512 on. The
 * other row in them is 8 away. */
static NBI_DEV const char *router_row(const routed_args &a, uint32_t row)
{
    return static_cast<const char *>(a.w.data) + (size_t)(row / 16) * a.w.n_kt * 2048 +
           row % 8 * 64;
}

static NBI_DEV void ask_router(const routed_args &a, const routed_shared &s)
{
    if (NBI_EMULATED) return;
    const uint32_t n = row_bytes(a) / 16;
    for (uint32_t i = threadIdx.x; i < BLOCK_ROWS * n; i += ONE_WARPS * NBI_WARP) {
        const uint32_t j = i < n ? 0 : 1, at = i - j * n, row = blockIdx.x + j * gridDim.x;
        const char *from = router_row(a, row < a.w.rows ? row : 0);
        nbi_copy_async(s.weights + i * 16, from + at / 4 * 512 + at % 4 * 16, row < a.w.rows);
    }
    nbi_copy_commit();
}

/* One warp: the logit of expert `row`, as router.cu makes it. `step`: bytes from a k-step to the
 * next. Every four lanes have a chunk. */
static NBI_DEV float logit_of(const routed_args &a, const float *x, const char *w, uint32_t step,
                              uint32_t row, float factor)
{
    constexpr uint32_t STEPS = NBI_NORM_COLS / 16;
    const uint32_t lane = (uint32_t)nbi_lane(), t = lane % 4, high = row / 8 % 2;
    float y = 0;
    for (uint32_t c0 = 0; c0 < a.n_chunks; c0 += 8) {
        const uint32_t c = c0 + lane / 4 < a.n_chunks ? c0 + lane / 4 : c0;
        const char *from = w + c * STEPS * step + t * 16;
        const float *at = x + c * NBI_NORM_COLS + t * 4;
        float sum = 0;
#pragma unroll 8
        for (uint32_t k = 0; k < STEPS; k++) {
            const nbi_u32x4 v = *reinterpret_cast<const nbi_u32x4 *>(from + k * step);
            const nbi_f32x4 f = *reinterpret_cast<const nbi_f32x4 *>(at + k * 16);
            const uint32_t lo = high ? v.v[1] : v.v[0], hi = high ? v.v[3] : v.v[2];
            sum = fmaf(nbi_bf16_lo(lo), f.v[0], sum);
            sum = fmaf(nbi_bf16_hi(lo), f.v[1], sum);
            sum = fmaf(nbi_bf16_lo(hi), f.v[2], sum);
            sum = fmaf(nbi_bf16_hi(hi), f.v[3], sum);
        }
        sum += __shfl_xor_sync(NBI_FULL_MASK, sum, 1);
        sum += __shfl_xor_sync(NBI_FULL_MASK, sum, 2);
        for (uint32_t j = 0; j < 8 && c0 + j < a.n_chunks; j++)
            y += __shfl_sync(NBI_FULL_MASK, sum, (int)(4 * j));
    }
    return fmaf(y, factor, 0);
}

/* The warps in front of the chooser: the block's logits. */
static NBI_DEV void make_logits(const routed_args &a, const routed_shared &s, uint32_t warp,
                                float factor, uint32_t number)
{
    const uint32_t row = blockIdx.x + warp * gridDim.x;
    if (row >= a.w.rows) return;
    const float y = logit_of(a, s.x, s.weights + warp * row_bytes(a), 64, row, factor);
    if (nbi_lane() != 0) return;
    nbi_whole_send(a.shared->logits + row, (uint64_t)number << 32 | nbi_bits(y));
    a.logits[row] = y;
}

static NBI_DEV void make_all_logits(const routed_args &a, const routed_shared &s, uint32_t warp)
{
    for (uint32_t row = warp; row < a.w.rows; row += ONE_WARPS) {
        const float y = logit_of(a, s.x, router_row(a, row), 512, row, a.w.row_scale[row]);
        if (nbi_lane() == 0) a.logits[row] = y;
    }
    __syncthreads();
}

/* The lane's logits, when they are there. */
template <uint32_t HAS>
static NBI_DEV void look_for_logits(const routed_args &a, uint32_t number, float score[HAS])
{
    const uint32_t lane = (uint32_t)nbi_lane();
    for (bool all = false; !all;) {
        uint64_t got[HAS];
#pragma unroll
        for (uint32_t i = 0; i < HAS; i++) {
            const uint32_t e = i * NBI_WARP + lane;
            got[i] = (uint64_t)number << 32;
            if (e >= a.route.n_experts) continue;
            got[i] = NBI_EMULATED ? got[i] | nbi_bits(a.logits[e])
                                  : nbi_whole_look(a.shared->logits + e);
        }
        all = true;
#pragma unroll
        for (uint32_t i = 0; i < HAS; i++) {
            score[i] = nbi_float((uint32_t)got[i]);
            all = all && (uint32_t)(got[i] >> 32) == number;
        }
    }
    __syncwarp();
}

/* One warp: the order of all experts in this launch. */
template <uint32_t HAS>
static NBI_DEV void order_experts(const routed_args &a, uint32_t number, const float bias[HAS],
                                  routed_choice<HAS> *s)
{
    const uint32_t lane = (uint32_t)nbi_lane();
    float score[HAS];
    uint32_t order[HAS];
    look_for_logits<HAS>(a, number, score);
    nbi_route_order<HAS>(a.route, score, bias, order, &s->route);
#pragma unroll
    for (uint32_t i = 0; i < HAS; i++) s->order[i * NBI_WARP + lane] = order[i];
}

/* All threads: an expert's place is how many come before it, the lower number among equals. */
template <uint32_t HAS>
static NBI_DEV void choose_experts(const routed_args &a, routed_choice<HAS> *s)
{
    constexpr uint32_t N = HAS * NBI_WARP, PARTS = ONE_WARPS * NBI_WARP / N;
    const uint32_t e = threadIdx.x / PARTS, part = threadIdx.x % PARTS, own = s->order[e];
    uint32_t place = 0;
#pragma unroll 8
    for (uint32_t k = part * 4; k < N; k += PARTS * 4) {
        const nbi_u32x4 other = *reinterpret_cast<const nbi_u32x4 *>(s->order + k);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            place += other.v[i] > own || (other.v[i] == own && k + i < e);
    }
#pragma unroll
    for (uint32_t d = 1; d < PARTS; d *= 2) place += __shfl_xor_sync(NBI_FULL_MASK, place, (int)d);
    if (part == 0 && place < a.route.top_k) s->ids[place] = e;
}

/* One warp: ids and weights to memory, for down. */
template <uint32_t HAS>
static NBI_DEV void store_choice(const routed_args &a, const routed_choice<HAS> *s)
{
    const uint32_t lane = (uint32_t)nbi_lane(), id = s->ids[lane < a.route.top_k ? lane : 0];
    const float score = s->route.scores[id];
    double sum = 0;
    for (uint32_t k = 0; k < a.route.top_k; k++)
        sum += static_cast<double>(__shfl_sync(NBI_FULL_MASK, score, (int)k));
    if (lane < a.route.top_k) {
        a.route.ids[lane] = static_cast<int32_t>(id);
        a.route.weights[lane] = nbi_route_weight(a.route, score, sum);
    }
    __threadfence();
    __syncwarp();
}

/* The launch's number, until the block has counted it. */
static NBI_DEV uint32_t number_of(const routed_args &a)
{
    return nbi_load_fresh(&a.shared->numbers[blockIdx.x]) + 1;
}

/* x + delta, normed, into shared memory; a warp has a chunk. For the warps up to the chooser,
 * returns the launch's number. */
static NBI_DEV uint32_t norm_row(const routed_args &a, const routed_shared &s, float *parts,
                                 uint32_t warp)
{
    nbi_norm_one row = {};
    row.load(a.norm, warp);
    nbi_wait_before();
    const uint32_t number = warp <= CHOOSER ? number_of(a) : 0;
    row.take(a.norm, parts);
    nbi_copy_wait<0>();
    __syncthreads();
    if (row.has) {
        row.end(a.norm, parts, a.n_chunks);
        row.x.store(s.x + row.first, 0, NBI_NORM_COLS, true);
        row.leave(a.norm);
    }
    __syncthreads();
    return number;
}

/* One warp: for the block, and for blocks that only other launches have. */
static NBI_DEV void count_launch(const routed_args &a)
{
    const uint32_t number = number_of(a), step = NBI_WARP * gridDim.x;
    __syncwarp();
    for (uint32_t i = blockIdx.x + (uint32_t)nbi_lane() * gridDim.x; i < NBI_CUDA_ROUTED_BLOCKS;
         i += step)
        a.shared->numbers[i] = number;
}

template <nbi_weight_kind KIND, uint32_t HAS>
static __global__ void __launch_bounds__(ONE_WARPS *NBI_WARP, 2)
    routed_gate_up_kernel(const __grid_constant__ routed_args a)
{
    routed_shared s;
    one_shared one;
    lay_out<HAS>(&s, &one, nbi_shared<char>(), a, nbi_stream_unit_bytes(KIND));
    routed_choice<HAS> *choice = static_cast<routed_choice<HAS> *>(s.choice);
    ask_router(a, s);
    const one_up up = one_up_begin<KIND>(a.up, one);
    const uint32_t lane = (uint32_t)nbi_lane(), row = blockIdx.x + up.warp * gridDim.x;
    float bias[HAS] = {}, factor = 0;
    if (up.warp == CHOOSER) nbi_route_bias<HAS>(a.route, bias);
    if (up.warp < CHOOSER && row < a.w.rows) factor = a.w.row_scale[row];
    __syncthreads();
    const uint32_t number = norm_row(a, s, choice->parts, up.warp);
    if (NBI_EMULATED)
        make_all_logits(a, s, up.warp);
    else if (up.warp < CHOOSER)
        make_logits(a, s, up.warp, factor, number);
    if (up.warp == CHOOSER) order_experts<HAS>(a, number, bias, choice);
    __syncthreads();
    choose_experts<HAS>(a, choice);
    __syncthreads();
    if (up.warp == CHOOSER + 1) count_launch(a);
    if (blockIdx.x) nbi_let_next(); /* down may read the ids when all blocks have come here */
    if (blockIdx.x == 0 && up.warp == CHOOSER) {
        store_choice<HAS>(a, choice);
        nbi_let_next();
    }
    uint32_t id = lane < a.route.top_k ? choice->ids[lane] : UINT32_MAX;
    if (lane >= a.route.top_k && lane < a.up.slots.n) id = a.up.slots.n_experts;
    one_up_end<KIND>(a.up, one, up, id, s.x);
}

/* ---------------------------------------------------------------- launches */

static routed_args args_of(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, float *h)
{
    routed_args k = {};
    nbi_moe_one_up(&k.up, c, l, a, h);
    k.norm = nbi_norm_of(&c->norm, NULL);
    k.w = *nbi_cuda_packed_of(c->router.w);
    k.route = c->route;
    k.logits = static_cast<float *>(c->router.y);
    k.n_chunks = k.w.cols / NBI_NORM_COLS;
    k.shared = c->routed;
    return k;
}

/* Up to 128 experts are four to a lane of the warp that chooses, more are eight. */
static bool is_few(const routed_args &k)
{
    return k.route.n_experts <= 4 * NBI_WARP;
}

static uint32_t bytes_of(const routed_args &k, nbi_weight_kind kind)
{
    routed_shared s;
    one_shared one;
    const uint32_t unit = nbi_stream_unit_bytes(kind);
    return is_few(k) ? lay_out<4>(&s, &one, nullptr, k, unit)
                     : lay_out<8>(&s, &one, nullptr, k, unit);
}

template <nbi_weight_kind KIND> static void launch(nbi_cuda *c, const routed_args &k)
{
    nbi_launch(&c->rt, dim3(nbi_moe_one_grid(c, &k.up)), dim3(ONE_WARPS * NBI_WARP),
               nbi_moe_one_shared(c, bytes_of(k, KIND), false),
               is_few(k) ? routed_gate_up_kernel<KIND, 4> : routed_gate_up_kernel<KIND, 8>, k);
}

bool nbi_moe_routed_fits(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    /* blocks of two ranks on a device might wait for each other's places */
    if (!c->route_pending || c->norm_peers || (c->ranks_per_device > 1 && !NBI_EMULATED))
        return false;
    const nbi_route_args *r = &c->route;
    const nbi_cuda_packed *w = nbi_cuda_packed_of(c->router.w);
    if (w->kind != NBI_WEIGHT_BF16 || w->cols % NBI_NORM_COLS ||
        w->cols / NBI_NORM_COLS > ONE_WARPS || w->cols != l->shape.hidden)
        return false;
    if (r->ids != a->ids || r->weights != a->weights || a->x != c->norm.out ||
        r->top_k != l->shape.top_k || r->n_experts != l->shape.n_experts ||
        r->n_experts > NBI_CUDA_ROUTED_EXPERTS || (r->n_group > 1 && r->topk_group < r->n_group))
        return false;
    const routed_args k = args_of(c, l, a, static_cast<float *>(a->workspace));
    const uint32_t grid = nbi_moe_one_grid(c, &k.up);
    return (NBI_EMULATED || r->n_experts <= BLOCK_ROWS * grid) && grid <= NBI_CUDA_ROUTED_BLOCKS &&
           bytes_of(k, l->shape.kind_gate_up) <= (uint32_t)c->rt.shared_max;
}

void nbi_moe_routed_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    float *h = static_cast<float *>(a->workspace);
    const routed_args k = args_of(c, l, a, h);
    c->norm_pending = c->router_pending = c->route_pending = false;
    NBI_MOE_BY_KIND(l->shape.kind_gate_up, launch, c, k);
    nbi_moe_one_down(c, l, a, h);
}
