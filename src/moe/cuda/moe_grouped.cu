/* Many rows: (row, slot) pairs are sorted by expert, and every expert's rows are multiplied with
 * its weights on the matrix units. Callers: the runners cuda_grouped and cuda.
 *
 *   begin    pairs per expert are counted, in segments of 256; x is converted once (with
 *            NVFP4 activations once per pair: experts have their own scales)
 *   place    pairs go to their places: by expert, then in order; the list of token tiles is built
 *   gate_up  a block is (row tiles of an expert, token tile); SwiGLU in a thread; h in float32
 *   convert  h as x: its exponents need whole chunks, which no block of gate_up sees
 *   down     as gate_up, one result row per pair
 *   combine  over the slots of a row, in order
 *
 * Grids have the size that the counts allow; blocks behind the real work leave at once. Weights go
 * from memory to fragments in registers, rows of x through a ring in shared memory. A layer with
 * FP4 tiles has the products of moe_fp4.h, and rows as those take them; gate_up rounds h itself; up
 * to 256 pairs, begin and place are one kernel. */
#include "moe/cuda/moe_combine.h"
#include "moe/cuda/moe_fp4.h"
#include "moe/cuda/moe_sort.h"

#define ROWS_MAX 4096u /* of one pass: the results of all its pairs are in memory */

/* Pairs of an expert from which warpgroups are ahead, where there are any. */
#define WIDE_PAIRS 12u

using work = nbi_moe_work;

/* ---------------------------------------------------------------- sorting, conversion */

struct begin_args {
    work w;
    const float *input_scale; /* [n_experts]: x is converted for each pair, else for each row */
    nbi_moe_slots slots;
    const float *x; /* [n_rows][cols] */
    uint32_t n_pairs, n_rows, cols, segments;
    uint32_t n_experts; /* the shared one, too */
};

template <nbi_weight_kind KIND, bool FP4>
static __global__ void __launch_bounds__(NBI_MOE_THREADS) begin_kernel(const begin_args a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t warp = threadIdx.x / NBI_WARP;
    if (blockIdx.x < a.segments) return nbi_moe_count_segment(a, blockIdx.x);
    const uint32_t item = (blockIdx.x - a.segments) * NBI_MOE_WARPS + warp;
    constexpr uint32_t CHUNK = nbi_chunk_tiles(KIND) * NBI_TILE_COLS;
    const uint32_t n_chunks = (a.cols + CHUNK - 1) / CHUNK, to_row = item / n_chunks;
    if (to_row >= (a.input_scale ? a.n_pairs : a.n_rows)) return;
    const size_t row = a.input_scale ? to_row / a.slots.n : to_row;
    float scale = 0;
    if (a.input_scale) {
        const int32_t e = a.slots.expert(to_row);
        if (e < 0) return;
        scale = a.input_scale[e];
    }
    if constexpr (FP4)
        nbi_moe_fp4_convert(a.w.xc, a.x + row * a.cols, a.cols, to_row, item % n_chunks, scale);
    else
        nbi_moe_convert<KIND>(a.w.xc, a.w.xe, a.x + row * a.cols, a.cols, to_row, item % n_chunks,
                              scale);
}

/* Both steps before FP4 products where there is one segment: the first block counts and places, the
 * others convert. */
static __global__ void __launch_bounds__(NBI_MOE_THREADS)
    begin_few_kernel(const begin_args a, uint32_t tile)
{
    __shared__ nbi_moe_places p;
    __shared__ int32_t segment[NBI_MOE_THREADS];
    nbi_wait_before();
    nbi_let_next();
    const uint32_t t = threadIdx.x;
    if (blockIdx.x > 0) {
        const uint32_t item = (blockIdx.x - 1) * NBI_MOE_WARPS + t / NBI_WARP;
        const uint32_t n_chunks = (a.cols + NBI_MOE_FP4_COLS - 1) / NBI_MOE_FP4_COLS;
        const uint32_t pair = item / n_chunks;
        const int32_t e = pair < a.n_pairs ? a.slots.expert(pair) : -1;
        if (e < 0) return;
        nbi_moe_fp4_convert(a.w.xc, a.x + (size_t)(pair / a.slots.n) * a.cols, a.cols, pair,
                            item % n_chunks, a.input_scale[e]);
        return;
    }
    for (uint32_t e = t; e < a.n_experts; e += NBI_MOE_THREADS) p.count[e] = 0;
    segment[t] = t < a.n_pairs ? a.slots.expert(t) : -1;
    __syncthreads();
    if (segment[t] >= 0) atomicAdd(&p.count[segment[t]], 1u);
    __syncthreads();
    for (uint32_t e = t; e < a.n_experts; e += NBI_MOE_THREADS) {
        p.first[e] = 0;
        p.tiles[e] = (p.count[e] + tile - 1) / tile;
    }
    __syncthreads();
    nbi_moe_place_pairs(p, a.w, segment, a.n_experts, tile, 1);
}

template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(NBI_MOE_THREADS)
    convert_kernel(const work w, const float *input_scale, const nbi_moe_slots slots, uint32_t cols)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t item = blockIdx.x * NBI_MOE_WARPS + threadIdx.x / NBI_WARP;
    constexpr uint32_t CHUNK = nbi_chunk_tiles(KIND) * NBI_TILE_COLS;
    const uint32_t n_chunks = (cols + CHUNK - 1) / CHUNK, place = item / n_chunks;
    if (place >= w.total->n_places) return;
    const float scale = input_scale ? input_scale[slots.expert(w.pair[place])] : 0;
    nbi_moe_convert<KIND>(w.hc, w.he, w.h + (size_t)place * cols, cols, place, item % n_chunks,
                          scale);
}

/* ---------------------------------------------------------------- launches */

/* Most token tiles that pairs can make. */
static uint32_t most_tiles(uint32_t n_pairs, uint32_t n_experts, uint32_t tokens)
{
    const uint32_t n = n_pairs / tokens + n_experts;
    return n < n_pairs ? n : n_pairs;
}

static uint32_t segments_of(uint32_t n_pairs)
{
    return nbi_ceil_div(n_pairs, NBI_MOE_THREADS);
}

static size_t lay_out(work *w, char *base, const nbi_moe_shape *s, uint32_t n_rows, bool fp4)
{
    const size_t pairs = (size_t)n_rows * nbi_moe_n_slots(s);
    const uint32_t n_experts = nbi_moe_n_all(s);
    const bool by_pair = s->w4a4 && s->kind_gate_up == NBI_WEIGHT_NVFP4;
    const size_t x_rows = by_pair ? pairs : n_rows;
    const size_t width = s->hidden > s->inter ? s->hidden : s->inter;
    const struct {
        void **at;
        size_t bytes;
    } parts[] = {
        {reinterpret_cast<void **>(&w->count),
         (size_t)segments_of((uint32_t)pairs) * n_experts * sizeof *w->count},
        {reinterpret_cast<void **>(&w->pair), pairs * sizeof *w->pair},
        {reinterpret_cast<void **>(&w->place), pairs * sizeof *w->place},
        {reinterpret_cast<void **>(&w->tiles),
         most_tiles((uint32_t)pairs, n_experts, nbi_moe_narrow::TOKENS) * sizeof *w->tiles},
        {reinterpret_cast<void **>(&w->total), sizeof *w->total},
        {reinterpret_cast<void **>(&w->xc), x_rows * nbi_moe_form_bytes(s->hidden, fp4)},
        {reinterpret_cast<void **>(&w->hc), pairs * nbi_moe_form_bytes(s->inter, fp4)},
        {reinterpret_cast<void **>(&w->xe),
         x_rows * nbi_moe_chunks(s->kind_gate_up, s->hidden) * sizeof(float)},
        {reinterpret_cast<void **>(&w->he),
         pairs * nbi_moe_chunks(s->kind_down, s->inter) * sizeof(float)},
        {reinterpret_cast<void **>(&w->y), pairs * width * sizeof(float)},
    };
    size_t bytes = 0;
    for (const auto &part : parts) {
        if (base) *part.at = base + bytes;
        bytes += (part.bytes + 255) / 256 * 256;
    }
    w->h = w->y;
    return bytes;
}

static uint32_t pass_rows(uint32_t n_rows)
{
    return n_rows < ROWS_MAX ? n_rows : ROWS_MAX;
}

size_t nbi_moe_grouped_workspace(const nbi_moe_shape *shape, uint32_t max_rows, bool fp4)
{
    work w = {};
    if (nbi_moe_has_f32(shape)) return nbi_moe_gemv_workspace(shape, max_rows);
    return lay_out(&w, NULL, shape, pass_rows(max_rows), fp4);
}

bool nbi_moe_grouped_fits(const nbi_cuda *c, const nbi_moe_shape *s)
{
    if (nbi_moe_has_f32(s)) return nbi_moe_gemv_fits(c, s);
    return nbi_moe_product_shared(nbi_moe_narrow::TOKENS, nbi_moe_most_chunks(s)) <=
           c->rt.shared_max;
}

/* Pairs of an expert of the ids, on average. */
static uint32_t pairs_each(const nbi_moe_shape *s, uint32_t n_rows)
{
    return nbi_ceil_div(n_rows * s->top_k, s->n_experts);
}

/* Tokens of a tile. */
static uint32_t choose_tokens(const nbi_cuda *c, const nbi_moe_shape *s, uint32_t n_rows)
{
    const uint32_t each = pairs_each(s, n_rows), chunks = nbi_moe_most_chunks(s);
    const bool fp4 = s->kind_gate_up == NBI_WEIGHT_NVFP4 && s->kind_down == NBI_WEIGHT_NVFP4;
    const uint32_t most = fp4 ? nbi_moe_large::TOKENS : nbi_moe_wider::TOKENS;
    if (each > 56 && nbi_moe_product_shared(most, chunks) <= c->rt.shared_max) return most;
    if (each > 34 && nbi_moe_product_shared(nbi_moe_middle::TOKENS, chunks) <= c->rt.shared_max)
        return nbi_moe_middle::TOKENS;
    if (each > 8 && nbi_moe_product_shared(nbi_moe_small::TOKENS, chunks) <= c->rt.shared_max)
        return nbi_moe_small::TOKENS;
    return nbi_moe_narrow::TOKENS;
}

template <nbi_weight_kind KIND, bool GATE_UP>
static void launch_product(nbi_cuda *c, const nbi_moe_product_args &a, uint32_t n_tiles,
                           uint32_t tokens)
{
    if constexpr (KIND == NBI_WEIGHT_NVFP4)
        if (tokens == nbi_moe_large::TOKENS)
            return nbi_moe_launch_division<KIND, nbi_moe_large, GATE_UP, false>(c, a, n_tiles, 1);
    if (tokens == nbi_moe_wider::TOKENS)
        nbi_moe_launch_division<KIND, nbi_moe_wider, GATE_UP, false>(c, a, n_tiles, 1);
    else if (tokens == nbi_moe_middle::TOKENS)
        nbi_moe_launch_division<KIND, nbi_moe_middle, GATE_UP, false>(c, a, n_tiles, 1);
    else if (tokens == nbi_moe_small::TOKENS)
        nbi_moe_launch_division<KIND, nbi_moe_small, GATE_UP, false>(c, a, n_tiles, 1);
    else
        nbi_moe_launch_division<KIND, nbi_moe_narrow, GATE_UP, false>(c, a, n_tiles, 1);
}

/* One pass: n_rows rows, at most ROWS_MAX. */
struct pass {
    nbi_cuda *c;
    const nbi_moe_layer *l;
    work w;
    nbi_moe_slots slots;
    const float *x;
    float *out;
    uint32_t n_rows, n_pairs, tokens, n_tiles;
    bool wide; /* the products of moe_wide.cu */
};

static nbi_moe_wide_args wide_args(const pass &s)
{
    nbi_moe_wide_args a = {};
    a.w = s.w;
    a.ids = s.slots.ids; /* read with input scales, which layers with a shared expert have not */
    a.x = s.x;
    a.top_k = s.slots.n;
    a.n_experts = nbi_moe_n_all(&s.l->shape);
    a.n_rows = s.n_rows;
    a.n_pairs = s.n_pairs;
    a.n_tiles = s.n_tiles;
    return a;
}

template <nbi_weight_kind KIND, bool FP4 = false> static void launch_up(const pass &s)
{
    const nbi_moe_shape &shape = s.l->shape;
    const bool by_pair = s.l->gate_up.input_scale != NULL;
    begin_args b = {};
    b.w = s.w;
    b.input_scale = s.l->gate_up.input_scale;
    b.slots = s.slots;
    b.x = s.x;
    b.n_pairs = s.n_pairs;
    b.n_experts = nbi_moe_n_all(&shape);
    b.n_rows = s.n_rows;
    b.cols = shape.hidden;
    b.segments = segments_of(s.n_pairs);
    uint32_t items = (by_pair ? s.n_pairs : s.n_rows) * nbi_moe_chunks(KIND, shape.hidden);
    if (s.wide) items = 0; /* only counts */
    const dim3 grid(b.segments + nbi_ceil_div(items, NBI_MOE_WARPS)), block(NBI_MOE_THREADS);
    if (FP4 && b.segments == 1) {
        nbi_launch(&s.c->rt, grid, block, 0, begin_few_kernel, b, s.tokens);
    } else {
        nbi_launch(&s.c->rt, grid, block, 0, begin_kernel<KIND, FP4>, b);
        nbi_launch(&s.c->rt, dim3(b.segments), block, 0, nbi_moe_place_kernel, s.w, s.slots,
                   s.n_pairs, b.n_experts, s.tokens);
    }
    if (s.wide) return nbi_moe_wide_gate_up(s.c, wide_args(s), s.l->gate_up);
    const nbi_moe_product_args a = {
        s.l->gate_up, s.w, s.w.h, by_pair ? 1 : s.slots.n, NULL, 0, s.l->down.input_scale};
    if constexpr (FP4)
        nbi_moe_fp4_product(s.c, a, s.tokens, true, false, s.n_tiles, 1);
    else
        launch_product<KIND, true>(s.c, a, s.n_tiles, s.tokens);
}

template <nbi_weight_kind KIND, bool FP4 = false> static void launch_down(const pass &s)
{
    if (s.wide) return nbi_moe_wide_down(s.c, wide_args(s), s.l->down);
    const nbi_moe_shape &shape = s.l->shape;
    const uint32_t items = s.n_pairs * nbi_moe_chunks(KIND, shape.inter);
    const nbi_moe_product_args a = {s.l->down, s.w, s.w.y, 1, NULL, 0, NULL};
    if constexpr (FP4) return nbi_moe_fp4_product(s.c, a, s.tokens, false, false, s.n_tiles, 1);
    nbi_launch(&s.c->rt, dim3(nbi_ceil_div(items, NBI_MOE_WARPS)), dim3(NBI_MOE_THREADS), 0,
               convert_kernel<KIND>, s.w, s.l->down.input_scale, s.slots, shape.inter);
    launch_product<KIND, false>(s.c, a, s.n_tiles, s.tokens);
}

static void run_pass(const pass &s)
{
    const nbi_moe_shape &shape = s.l->shape;
    if (s.l->fp4) {
        launch_up<NBI_WEIGHT_NVFP4, true>(s);
        launch_down<NBI_WEIGHT_NVFP4, true>(s);
    } else {
        NBI_MOE_BY_KIND(shape.kind_gate_up, launch_up, s);
        NBI_MOE_BY_KIND(shape.kind_down, launch_down, s);
    }
    nbi_launch(&s.c->rt, dim3(nbi_ceil_div(shape.hidden, 4 * NBI_MOE_THREADS), s.n_rows),
               dim3(NBI_MOE_THREADS), 0, nbi_moe_combine_kernel, s.w, s.out, s.slots, shape.hidden);
}

void nbi_moe_grouped_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    if (nbi_moe_has_f32(&l->shape)) return nbi_moe_gemv_run(c, l, a); /* nothing to gain */
    pass s = {};
    s.c = c;
    s.l = l;
    lay_out(&s.w, static_cast<char *>(a->workspace), &l->shape, pass_rows(a->n_rows), l->fp4);
    for (uint32_t row = 0; row < a->n_rows; row += s.n_rows) {
        s.slots = nbi_moe_slots_of(&l->shape, a).from(row);
        s.n_rows = pass_rows(a->n_rows - row);
        s.n_pairs = s.n_rows * s.slots.n;
        const uint32_t each = pairs_each(&l->shape, s.n_rows);
        s.wide = !l->fp4 && c->rt.sm == 90 && each >= WIDE_PAIRS;
        s.tokens = s.wide   ? nbi_moe_wide_tokens(&l->shape)
                   : l->fp4 ? nbi_moe_fp4_tokens(each)
                            : choose_tokens(c, &l->shape, s.n_rows);
        s.n_tiles = most_tiles(s.n_pairs, nbi_moe_n_all(&l->shape), s.tokens);
        s.x = static_cast<const float *>(a->x) + (size_t)row * l->shape.hidden;
        s.out = static_cast<float *>(a->out) + (size_t)row * l->shape.hidden;
        run_pass(s);
    }
}
