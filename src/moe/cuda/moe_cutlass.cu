/* Grouped products through CUTLASS, which knows none of the forms of weights here: those of the
 * chosen experts are unpacked to 16 bits in front of every product. Callers: the runner cutlass, in
 * builds that have it (NIBBLE_WITH_CUTLASS).
 *
 *   count    pairs per expert, as moe_grouped.cu
 *   place    pairs go to their places; a list of the experts that have any
 *   convert  x to 16 bits at every place
 *   unpack   weights of some of those experts, and the list of products
 *   product  x to sums of gate and up     these two once for every slice of experts
 *   swiglu   sums of gate and up to h, in 16 bits
 *   unpack, product   h to sums of y
 *   combine  over the slots of a row, in order
 *
 * Numerics. Weights are exact: a fragment of tile.h holds them in FP16 or BF16, without the factor
 * of their row, which combine and swiglu apply in float32. Rows of x and h are FP16 times 2^e with
 * one exponent for a row, its largest magnitude in [2^14, 2^15): values down to 2^-28 of it keep 11
 * bits. With BF16 weights they are BF16, without an exponent. Sums run over all columns in float32.
 * FP8 with scales of blocks has a factor within a row, so there is no such product. */
#include "moe/cuda/moe_cutlass.h"

#include <stdio.h>

#include "moe/cuda/moe_sort.h"

#define ROWS_MAX 4096u /* of one pass */
#define THREADS  128u
#define UNPACKED 4u /* tiles of a warp, next to each other in a row of tiles */

/* Unpacked weights at most, where an expert fits. Little where kernels are emulated, so that tests
 * with small experts have several slices. */
#ifndef NBI_MOE_CUTLASS_BYTES
#define NBI_MOE_CUTLASS_BYTES ((size_t)(NBI_EMULATED ? 24 << 10 : 256 << 20))
#endif

/* Pairs of an expert, on average, up to which tiles are for few. */
#define FEW_PAIRS 32u

/* Device memory of one pass. The list of tiles is that of experts, each with all its places; xc and
 * xe are the rows of both products, y the sums of both. */
struct memory {
    nbi_moe_work w;
    nbi_moe_problems problems;
    char *weights;
};

struct pass {
    nbi_cuda *c;
    const nbi_moe_layer *l;
    memory m;
    nbi_moe_slots slots;
    const float *x;
    float *out;
    uint32_t n_rows, n_pairs;
};

/* ---------------------------------------------------------------- rows to 16 bits */

static NBI_DEV uint32_t block_max(uint32_t x)
{
    __shared__ uint32_t of_warp[THREADS / NBI_WARP];
    x = nbi_warp_max(x);
    if (nbi_lane() == 0) of_warp[threadIdx.x / NBI_WARP] = x;
    __syncthreads();
    for (uint32_t i = 0; i < THREADS / NBI_WARP; i++) x = of_warp[i] > x ? of_warp[i] : x;
    return x;
}

/* Four columns from c on, zeros behind the last: of a row of x, and of h by the sums at a place. */
struct x_row {
    const float *row;
    uint32_t cols;

    NBI_DEV nbi_f32x4 at(uint32_t c) const
    {
        return nbi_x_load(row, c, cols, true);
    }
};

struct h_row {
    const float *sums, *row_scale; /* [cols / 8][gate, up][8] */
    float unit;
    uint32_t cols;

    NBI_DEV nbi_f32x4 at(uint32_t c) const
    {
        nbi_f32x4 h = {{0, 0, 0, 0}};
        if (c >= cols) return h;
        const uint32_t i = c / 8 * 16 + c % 8;
        const nbi_f32x4 gate = *reinterpret_cast<const nbi_f32x4 *>(sums + i);
        const nbi_f32x4 up = *reinterpret_cast<const nbi_f32x4 *>(sums + i + 8);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            h.v[j] = nbi_moe_swiglu(gate.v[j] * unit * row_scale[i + j],
                                    up.v[j] * unit * row_scale[i + 8 + j]);
        return h;
    }
};

/* input_scale > 0: rounded to NVFP4. All lanes call. */
template <class Row> static NBI_DEV nbi_f32x4 take(const Row &from, uint32_t c, float input_scale)
{
    nbi_f32x4 x = from.at(c);
    if (input_scale > 0) nbi_x_round(&x, input_scale);
    return x;
}

/* A row by a block. unit: what sums of it are multiplied by. */
template <nbi_weight_kind KIND, class Row>
static NBI_DEV void convert_row(char *to, float *unit, const Row &from, float input_scale)
{
    int e = 0;
    if (KIND != NBI_WEIGHT_BF16) {
        uint32_t most = 0;
        for (uint32_t c = 0; c < from.cols; c += 4 * THREADS)
            most = nbi_amax_bits(most, take(from, c + 4 * threadIdx.x, input_scale));
        e = nbi_chunk_exponent(block_max(most));
    }
    for (uint32_t c0 = 0; c0 < from.cols; c0 += 4 * THREADS) {
        const uint32_t c = c0 + 4 * threadIdx.x;
        const nbi_f32x4 x = take(from, c, input_scale);
        nbi_u32x2 q;
        nbi_x_fragment<KIND>(q.v, x, nbi_pow2(-e));
        if (c < from.cols) *reinterpret_cast<nbi_u32x2 *>(to + (size_t)c * 2) = q;
    }
    if (threadIdx.x == 0) *unit = input_scale > 0 ? nbi_pow2(e) * input_scale : nbi_pow2(e);
}

/* A block per place. */
template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(THREADS)
    convert_kernel(const nbi_moe_work w, const nbi_moe_weights weights, const nbi_moe_slots slots,
                   const float *x)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t place = blockIdx.x, cols = weights.first.cols;
    if (place >= w.total->n_places) return;
    const uint32_t pair = w.pair[place];
    const float scale = weights.input_scale ? weights.input_scale[slots.expert(pair)] : 0.0f;
    const x_row from = {x + (size_t)nbi_div(pair, slots.by) * cols, cols};
    convert_row<KIND>(w.xc + (size_t)place * cols * 2, w.xe + place, from, scale);
}

/* Sums of gate and up of a place to h; KIND of down. */
template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(THREADS)
    swiglu_kernel(const nbi_moe_work w, const nbi_moe_weights gate_up, const nbi_moe_weights down,
                  const nbi_moe_slots slots)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t place = blockIdx.x, inter = gate_up.first.rows;
    if (place >= w.total->n_places) return;
    const uint32_t e = (uint32_t)slots.expert(w.pair[place]);
    const h_row from = {w.h + (size_t)place * 2 * inter, nbi_moe_expert(gate_up, e).row_scale,
                        w.xe[place], inter};
    convert_row<KIND>(w.hc + (size_t)place * inter * 2, w.he + place, from,
                      nbi_moe_input_scale(down, e));
}

/* ---------------------------------------------------------------- weights, products */

/* Slice of experts: from the first'th of the list on, slot i of the unpacked ones is its i'th. */
struct unpack_args {
    memory m;
    nbi_moe_weights weights;
    const char *rows; /* of the product */
    float *sums;
    uint32_t first, n_rows; /* of weights, of an expert */
};

static NBI_DEV void list_product(const unpack_args &a, uint32_t slot, bool here,
                                 const nbi_moe_token_tile &places, char *weights)
{
    const uint32_t cols = a.weights.first.cols;
    const nbi_moe_problems &p = a.m.problems;
    p.size[3 * slot] = here ? (int32_t)places.n : 0;
    p.size[3 * slot + 1] = (int32_t)a.n_rows;
    p.size[3 * slot + 2] = (int32_t)cols;
    p.k[slot] = cols;
    p.n[slot] = a.n_rows;
    p.a[slot] = const_cast<char *>(a.rows) + (size_t)places.first * cols * 2;
    p.b[slot] = weights;
    p.d[slot] = a.sums + (size_t)places.first * a.n_rows;
}

/* UNPACKED tiles of a warp, of the expert of slot blockIdx.y: rows of tiles lie one below the
 * other, columns in order. */
template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(NBI_MOE_THREADS) unpack_kernel(const unpack_args a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t slot = blockIdx.y, lane = (uint32_t)nbi_lane();
    const nbi_cuda_packed &shape = a.weights.first;
    char *to = a.m.weights + slot * ((size_t)shape.n_rt * NBI_TILE_ROWS * shape.cols * 2);
    const bool here = a.first + slot < a.m.w.total->n_tiles;
    nbi_moe_token_tile places = {0, 0, 0};
    if (here) places = a.m.w.tiles[a.first + slot];
    if (blockIdx.x == 0 && threadIdx.x == 0) list_product(a, slot, here, places, to);
    if (!here) return;
    const nbi_cuda_packed w = nbi_moe_expert(a.weights, places.expert);
    const uint32_t across = (w.n_kt + UNPACKED - 1) / UNPACKED;
    const uint32_t item = blockIdx.x * NBI_MOE_WARPS + threadIdx.x / NBI_WARP;
    const uint32_t rt = item / across, kt0 = item % across * UNPACKED;
    if (rt >= w.n_rt) return;
    nbi_tile<KIND> tile[UNPACKED];
#pragma unroll
    for (uint32_t i = 0; i < UNPACKED; i++)
        if (kt0 + i < w.n_kt) tile[i].load(w, rt, kt0 + i, lane);
#pragma unroll
    for (uint32_t i = 0; i < UNPACKED; i++) {
        const uint32_t first = (kt0 + i) * NBI_TILE_COLS + lane % 4 * 4;
        char *low = to + ((size_t)(rt * NBI_TILE_ROWS + lane / 4) * w.cols + first) * 2;
#pragma unroll
        for (uint32_t k = 0; k < NBI_TILE_STEPS; k++) {
            if (first + k * 16 >= w.cols) break; /* tiles behind the last, too */
            uint32_t q[4];
            tile[i].fragment(q, k);
            *reinterpret_cast<nbi_u32x2 *>(low + k * 32) = {{q[0], q[2]}};
            *reinterpret_cast<nbi_u32x2 *>(low + (size_t)w.cols * 16 + k * 32) = {{q[1], q[3]}};
        }
    }
}

/* y of the pairs of a row, at their places, in the order of its slots. */
static __global__ void __launch_bounds__(NBI_MOE_THREADS)
    combine_kernel(const nbi_moe_work w, const nbi_moe_weights down, const nbi_moe_slots slots,
                   float *out)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t c = 4 * (blockIdx.x * NBI_MOE_THREADS + threadIdx.x), hidden = down.first.rows;
    const size_t row = blockIdx.y;
    if (c >= hidden) return;
    nbi_f32x4 sum = {{0, 0, 0, 0}};
    for (uint32_t slot = 0; slot < slots.n; slot++) {
        const uint32_t pair = (uint32_t)row * slots.n + slot;
        const int32_t e = slots.expert(pair);
        if (e < 0) continue;
        const uint32_t place = w.place[pair];
        const float weight = slots.weight(pair), unit = w.he[place];
        const nbi_f32x4 y = *reinterpret_cast<const nbi_f32x4 *>(w.y + (size_t)place * hidden + c);
        const nbi_f32x4 scale =
            *reinterpret_cast<const nbi_f32x4 *>(nbi_moe_expert(down, (uint32_t)e).row_scale + c);
#pragma unroll
        for (int i = 0; i < 4; i++) sum.v[i] = fmaf(weight, y.v[i] * unit * scale.v[i], sum.v[i]);
    }
    *reinterpret_cast<nbi_f32x4 *>(out + row * hidden + c) = sum;
}

struct count_args {
    nbi_moe_work w;
    nbi_moe_slots slots;
    uint32_t n_pairs, n_experts;
};

static __global__ void __launch_bounds__(NBI_MOE_THREADS) count_kernel(const count_args a)
{
    nbi_wait_before();
    nbi_let_next();
    nbi_moe_count_segment(a, blockIdx.x);
}

/* ---------------------------------------------------------------- memory */

static uint32_t pass_rows(uint32_t n_rows)
{
    return n_rows < ROWS_MAX ? n_rows : ROWS_MAX;
}

/* Experts that pairs can have. */
static uint32_t most_experts(const nbi_moe_shape *s, size_t n_pairs)
{
    const uint32_t n = nbi_moe_n_all(s);
    return n_pairs < n ? (uint32_t)n_pairs : n;
}

/* Of one expert, unpacked; whole tiles of rows. */
static size_t unpacked_bytes(uint32_t rows, uint32_t cols)
{
    return (size_t)nbi_ceil_div(rows, NBI_TILE_ROWS) * NBI_TILE_ROWS * cols * 2;
}

/* Experts whose weights of `bytes` are unpacked at once, of n. */
static uint32_t slice_of(size_t bytes, uint32_t n)
{
    const size_t fit = NBI_MOE_CUTLASS_BYTES / bytes;
    return fit < 1 ? 1 : fit < n ? (uint32_t)fit : n;
}

static size_t lay_out(memory *m, char *base, const nbi_moe_shape *s, uint32_t n_rows)
{
    const size_t pairs = (size_t)n_rows * nbi_moe_n_slots(s);
    const uint32_t n = most_experts(s, pairs);
    const size_t gate_up = unpacked_bytes(2 * s->inter, s->hidden),
                 down = unpacked_bytes(s->hidden, s->inter);
    const size_t weights[2] = {slice_of(gate_up, n) * gate_up, slice_of(down, n) * down};
    const size_t sums = 2 * s->inter > s->hidden ? 2 * s->inter : s->hidden;
    const size_t wide = s->hidden > s->inter ? s->hidden : s->inter;
    nbi_moe_work *w = &m->w;
    nbi_moe_problems *p = &m->problems;
    const struct {
        void **at;
        size_t bytes;
    } parts[] = {
        {reinterpret_cast<void **>(&w->count), nbi_ceil_div((uint32_t)pairs, NBI_MOE_THREADS) *
                                                   (size_t)nbi_moe_n_all(s) * sizeof *w->count},
        {reinterpret_cast<void **>(&w->pair), pairs * sizeof *w->pair},
        {reinterpret_cast<void **>(&w->place), pairs * sizeof *w->place},
        {reinterpret_cast<void **>(&w->tiles), n * sizeof *w->tiles},
        {reinterpret_cast<void **>(&w->total), sizeof *w->total},
        {reinterpret_cast<void **>(&w->xe), pairs * sizeof *w->xe},
        {reinterpret_cast<void **>(&w->he), pairs * sizeof *w->he},
        {reinterpret_cast<void **>(&p->size), 3 * n * sizeof *p->size},
        {reinterpret_cast<void **>(&p->a), n * sizeof *p->a},
        {reinterpret_cast<void **>(&p->b), n * sizeof *p->b},
        {reinterpret_cast<void **>(&p->d), n * sizeof *p->d},
        {reinterpret_cast<void **>(&p->k), n * sizeof *p->k},
        {reinterpret_cast<void **>(&p->n), n * sizeof *p->n},
        {reinterpret_cast<void **>(&w->xc), pairs * wide * 2},
        {reinterpret_cast<void **>(&w->y), pairs * sums * sizeof *w->y},
        {reinterpret_cast<void **>(&m->weights), weights[0] > weights[1] ? weights[0] : weights[1]},
    };
    size_t bytes = 0;
    for (const auto &part : parts) {
        if (base) *part.at = base + bytes;
        bytes += (part.bytes + 255) / 256 * 256;
    }
    w->hc = w->xc; /* x is done with when h begins */
    w->h = w->y;
    return bytes;
}

/* ---------------------------------------------------------------- launches */

template <nbi_weight_kind KIND> static void launch_product(const pass &s, bool gate_up)
{
    const nbi_moe_shape &shape = s.l->shape;
    unpack_args a = {};
    a.m = s.m;
    a.weights = gate_up ? s.l->gate_up : s.l->down;
    a.rows = gate_up ? s.m.w.xc : s.m.w.hc;
    a.sums = gate_up ? s.m.w.h : s.m.w.y;
    a.n_rows = gate_up ? 2 * shape.inter : shape.hidden;
    const nbi_cuda_packed &w = a.weights.first;
    const uint32_t n = most_experts(&shape, s.n_pairs);
    const uint32_t slices = nbi_ceil_div(n, slice_of(unpacked_bytes(a.n_rows, w.cols), n));
    const uint32_t slots = nbi_ceil_div(n, slices);
    const uint32_t blocks = nbi_ceil_div(w.n_rt * nbi_ceil_div(w.n_kt, UNPACKED), NBI_MOE_WARPS);
    for (; a.first < n; a.first += slots) {
        nbi_launch(&s.c->rt, dim3(blocks, slots), dim3(NBI_MOE_THREADS), 0, unpack_kernel<KIND>, a);
        nbi_moe_cutlass_product(s.c, s.m.problems, slots, KIND == NBI_WEIGHT_BF16,
                                s.n_pairs <= FEW_PAIRS * nbi_moe_n_all(&shape));
    }
}

template <nbi_weight_kind KIND> static void launch_up(const pass &s)
{
    const uint32_t n_experts = nbi_moe_n_all(&s.l->shape);
    const dim3 segments(nbi_ceil_div(s.n_pairs, NBI_MOE_THREADS)), block(NBI_MOE_THREADS);
    nbi_launch(&s.c->rt, segments, block, 0, count_kernel,
               count_args{s.m.w, s.slots, s.n_pairs, n_experts});
    nbi_launch(&s.c->rt, segments, block, 0, nbi_moe_place_kernel, s.m.w, s.slots, s.n_pairs,
               n_experts, s.n_pairs); /* one tile for all pairs of an expert */
    nbi_launch(&s.c->rt, dim3(s.n_pairs), dim3(THREADS), 0, convert_kernel<KIND>, s.m.w,
               s.l->gate_up, s.slots, s.x);
    launch_product<KIND>(s, true);
}

template <nbi_weight_kind KIND> static void launch_down(const pass &s)
{
    nbi_launch(&s.c->rt, dim3(s.n_pairs), dim3(THREADS), 0, swiglu_kernel<KIND>, s.m.w,
               s.l->gate_up, s.l->down, s.slots);
    launch_product<KIND>(s, false);
    nbi_launch(&s.c->rt, dim3(nbi_ceil_div(s.l->shape.hidden, 4 * NBI_MOE_THREADS), s.n_rows),
               dim3(NBI_MOE_THREADS), 0, combine_kernel, s.m.w, s.l->down, s.slots, s.out);
}

/* ---------------------------------------------------------------- the runner */

static bool supports(const nbi_backend *b, const nbi_moe_shape *s, char *why, size_t n)
{
    if (!nbi_moe_cuda_supports(b, s, why, n)) return false;
    if (nbi_moe_has_f32(s)) {
        snprintf(why, n, "its products are on the matrix units, which do not take f32 experts");
        return false;
    }
    if (s->kind_gate_up != NBI_WEIGHT_FP8_BLOCK && s->kind_down != NBI_WEIGHT_FP8_BLOCK)
        return true;
    snprintf(why, n,
             "it unpacks weights to 16 bits, which do not hold an FP8 value times the scale of "
             "its block");
    return false;
}

static size_t workspace(const nbi_backend *b, const nbi_moe_shape *s, uint32_t max_rows)
{
    (void)b;
    memory m = {};
    return lay_out(&m, NULL, s, pass_rows(max_rows));
}

static void run(nbi_backend *b, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    pass s = {};
    s.c = nbi_cuda_of(b);
    s.l = l;
    nbi_cuda_flush(s.c);
    lay_out(&s.m, static_cast<char *>(a->workspace), &l->shape, pass_rows(a->n_rows));
    for (uint32_t row = 0; row < a->n_rows; row += s.n_rows) {
        s.slots = nbi_moe_slots_of(&l->shape, a).from(row);
        s.n_rows = pass_rows(a->n_rows - row);
        s.n_pairs = s.n_rows * s.slots.n;
        s.x = static_cast<const float *>(a->x) + (size_t)row * l->shape.hidden;
        s.out = static_cast<float *>(a->out) + (size_t)row * l->shape.hidden;
        NBI_MOE_BY_KIND(l->shape.kind_gate_up, launch_up, s);
        NBI_MOE_BY_KIND(l->shape.kind_down, launch_down, s);
    }
}

static const char *const aliases[] = {"flashinfer_cutlass", NULL};

const nbi_moe_runner_ops nbi_moe_runner_cutlass = {
    .version = 1,
    .size = sizeof(nbi_moe_runner_ops),
    .name = "cutlass",
    .aliases = aliases,
    .summary = NBI_MOE_CUTLASS_SUMMARY,
    .numerics = "cutlass",
    .supports = supports,
    .prepare = nbi_moe_cuda_prepare,
    .release = nbi_moe_cuda_release,
    .workspace_bytes = workspace,
    .run = run,
};
