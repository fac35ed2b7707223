/* Masked products: every expert has a fixed capacity of places, of which the first masked_m are
 * taken, as flashinfer_cutedsl_moe_masked has it. Callers: the runner cuda_masked.
 *
 *   assign    rows of each expert get its places, in order; masked_m, [n_experts]
 *   dispatch  x as operand, [n_experts][capacity][hidden]; with NVFP4 activations rounded by the
 *             expert's input scale
 *   gate_up   masked product: blocks behind masked_m leave; SwiGLU in a thread; h in float32
 *   dispatch  h as operand: rounded again by the scale of the down product
 *   down      masked product, [n_experts][capacity][hidden]
 *   combine   over the slots of a row, in order
 *
 * A row that names an expert twice has one place there, so an expert never has more rows than the
 * pass: its capacity is that number, nothing can overflow, and more rows are more passes. The
 * alphas (input scale times second-level weight scale) are in the units of the converted rows and
 * the scales of the packed rows. Where FlashInfer rounds the results of both products to BF16, they
 * stay float32 here: sums and bits are those of moe_grouped.cu. A layer with FP4 tiles has the
 * products of moe_fp4.h, and rows as those take them; gate_up rounds h itself. */
#include "moe/cuda/moe_combine.h"
#include "moe/cuda/moe_fp4.h"

#define CAPACITY_MAX   128u /* rows of a pass */
#define CAPACITY_LEAST 16u
#define BYTES_MAX      ((size_t)1 << 30) /* of a pass; above it has fewer rows */

/* Rows of an expert, on average, from which a block takes 40. */
#define SMALL_ROWS 8u

struct masked_work {
    uint32_t *masked_m; /* [n_experts] */
    uint32_t *row;      /* [n_experts][capacity] row of x at a place */
    nbi_moe_work w;     /* place, xc, xe, hc, he, h, y */
};

/* ---------------------------------------------------------------- places, conversion */

/* A block per expert, a thread per row. */
static __global__ void __launch_bounds__(CAPACITY_MAX)
    assign_kernel(const masked_work m, const nbi_moe_slots slots, uint32_t n_rows,
                  uint32_t capacity)
{
    __shared__ uint32_t of_warp[CAPACITY_MAX / NBI_WARP];
    nbi_wait_before();
    nbi_let_next();
    const int32_t e = (int32_t)blockIdx.x;
    const uint32_t t = threadIdx.x, warp = t / NBI_WARP, lane = (uint32_t)nbi_lane();
    bool here = false;
    for (uint32_t k = 0; k < slots.n && t < n_rows; k++)
        here = here || slots.expert(t * slots.n + k) == e;
    const uint32_t all = __ballot_sync(NBI_FULL_MASK, here);
    if (lane == 0) of_warp[warp] = (uint32_t)__popc(all);
    __syncthreads();
    uint32_t before = (uint32_t)__popc(all & ((1u << lane) - 1)), total = 0;
    for (uint32_t i = 0; i < CAPACITY_MAX / NBI_WARP; i++) {
        if (i < warp) before += of_warp[i];
        total += of_warp[i];
    }
    if (t == 0) m.masked_m[e] = total;
    if (!here) return;
    const uint32_t place = blockIdx.x * capacity + before;
    m.row[place] = t;
    for (uint32_t k = 0; k < slots.n; k++)
        if (slots.expert(t * slots.n + k) == e) m.w.place[(size_t)t * slots.n + k] = place;
}

struct dispatch_args {
    masked_work m;
    const float *from;        /* x by rows, or h by places */
    const float *input_scale; /* [n_experts] or NULL */
    char *to;
    float *unit;
    uint32_t capacity, n_places, cols;
    bool by_place;
};

/* A warp per chunk of a place. */
template <nbi_weight_kind KIND, bool FP4>
static __global__ void __launch_bounds__(NBI_MOE_THREADS) dispatch_kernel(const dispatch_args a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t item = blockIdx.x * NBI_MOE_WARPS + threadIdx.x / NBI_WARP;
    constexpr uint32_t CHUNK = nbi_chunk_tiles(KIND) * NBI_TILE_COLS;
    const uint32_t n_chunks = (a.cols + CHUNK - 1) / CHUNK, place = item / n_chunks;
    if (place >= a.n_places) return;
    const uint32_t e = place / a.capacity;
    if (place % a.capacity >= a.m.masked_m[e]) return;
    const size_t row = a.by_place ? place : a.m.row[place];
    const float scale = a.input_scale ? a.input_scale[e] : 0, *x = a.from + row * a.cols;
    if constexpr (FP4)
        nbi_moe_fp4_convert(a.to, x, a.cols, place, item % n_chunks, scale);
    else
        nbi_moe_convert<KIND>(a.to, a.unit, x, a.cols, place, item % n_chunks, scale);
}

/* ---------------------------------------------------------------- memory */

static size_t lay_out(masked_work *m, char *base, const nbi_moe_shape *s, uint32_t capacity,
                      bool fp4)
{
    const uint32_t n_experts = nbi_moe_n_all(s);
    const size_t places = (size_t)n_experts * capacity;
    const size_t width = s->hidden > s->inter ? s->hidden : s->inter;
    const struct {
        void **at;
        size_t bytes;
    } parts[] = {
        {reinterpret_cast<void **>(&m->masked_m), n_experts * sizeof *m->masked_m},
        {reinterpret_cast<void **>(&m->row), places * sizeof *m->row},
        {reinterpret_cast<void **>(&m->w.place),
         (size_t)capacity * nbi_moe_n_slots(s) * sizeof *m->w.place},
        {reinterpret_cast<void **>(&m->w.xc), places * nbi_moe_form_bytes(s->hidden, fp4)},
        {reinterpret_cast<void **>(&m->w.hc), places * nbi_moe_form_bytes(s->inter, fp4)},
        {reinterpret_cast<void **>(&m->w.xe),
         places * nbi_moe_chunks(s->kind_gate_up, s->hidden) * sizeof(float)},
        {reinterpret_cast<void **>(&m->w.he),
         places * nbi_moe_chunks(s->kind_down, s->inter) * sizeof(float)},
        {reinterpret_cast<void **>(&m->w.y), places * width * sizeof(float)},
    };
    size_t bytes = 0;
    for (const auto &part : parts) {
        if (base) *part.at = base + bytes;
        bytes += (part.bytes + 255) / 256 * 256;
    }
    m->w.h = m->w.y; /* h ends where y begins to live */
    return bytes;
}

/* Rows of a pass: by the shape alone, no more than there are. */
static uint32_t pass_rows(const nbi_moe_shape *s, uint32_t n_rows, bool fp4)
{
    masked_work m = {};
    uint32_t capacity = CAPACITY_MAX;
    while (capacity > CAPACITY_LEAST && lay_out(&m, NULL, s, capacity, fp4) > BYTES_MAX)
        capacity /= 2;
    return n_rows < capacity ? n_rows : capacity;
}

size_t nbi_moe_masked_workspace(const nbi_moe_shape *s, uint32_t max_rows, bool fp4)
{
    masked_work m = {};
    return lay_out(&m, NULL, s, pass_rows(s, max_rows, fp4), fp4);
}

bool nbi_moe_masked_fits(const nbi_cuda *c, const nbi_moe_shape *s)
{
    return nbi_moe_product_shared(nbi_moe_narrow::TOKENS, nbi_moe_most_chunks(s)) <=
           c->rt.shared_max;
}

/* ---------------------------------------------------------------- launches */

struct masked_pass {
    nbi_cuda *c;
    const nbi_moe_layer *l;
    masked_work m;
    uint32_t capacity;
    bool small; /* tiles of 40 rows, else 16 */
};

template <nbi_weight_kind KIND, bool FP4>
static void launch_dispatch(const masked_pass &s, const float *from, bool by_place)
{
    const nbi_moe_shape &shape = s.l->shape;
    dispatch_args a = {};
    a.m = s.m;
    a.from = from;
    a.input_scale = by_place ? s.l->down.input_scale : s.l->gate_up.input_scale;
    a.to = by_place ? s.m.w.hc : s.m.w.xc;
    a.unit = by_place ? s.m.w.he : s.m.w.xe;
    a.capacity = s.capacity;
    a.n_places = nbi_moe_n_all(&shape) * s.capacity;
    a.cols = by_place ? shape.inter : shape.hidden;
    a.by_place = by_place;
    nbi_launch(&s.c->rt,
               dim3(nbi_ceil_div(a.n_places * nbi_moe_chunks(KIND, a.cols), NBI_MOE_WARPS)),
               dim3(NBI_MOE_THREADS), 0, dispatch_kernel<KIND, FP4>, a);
}

template <nbi_weight_kind KIND, bool GATE_UP, bool FP4>
static void launch_product(const masked_pass &s)
{
    const uint32_t n_experts = nbi_moe_n_all(&s.l->shape);
    nbi_moe_product_args a = {};
    a.weights = GATE_UP ? s.l->gate_up : s.l->down;
    a.w = s.m.w;
    a.out = GATE_UP ? s.m.w.h : s.m.w.y;
    a.masked_m = s.m.masked_m;
    a.capacity = s.capacity;
    if constexpr (FP4) {
        a.h_scale = s.l->down.input_scale;
        const uint32_t tokens = s.small ? nbi_moe_small::TOKENS : nbi_moe_narrow::TOKENS;
        return nbi_moe_fp4_product(s.c, a, tokens, GATE_UP, true, nbi_ceil_div(s.capacity, tokens),
                                   n_experts);
    }
    if (s.small)
        nbi_moe_launch_division<KIND, nbi_moe_small, GATE_UP, true>(
            s.c, a, nbi_ceil_div(s.capacity, nbi_moe_small::TOKENS), n_experts);
    else
        nbi_moe_launch_division<KIND, nbi_moe_narrow, GATE_UP, true>(
            s.c, a, nbi_ceil_div(s.capacity, nbi_moe_narrow::TOKENS), n_experts);
}

template <nbi_weight_kind KIND, bool FP4 = false>
static void launch_up(const masked_pass &s, const float *x)
{
    launch_dispatch<KIND, FP4>(s, x, false);
    launch_product<KIND, true, FP4>(s);
}

template <nbi_weight_kind KIND, bool FP4 = false> static void launch_down(const masked_pass &s)
{
    if (!FP4) launch_dispatch<KIND, false>(s, s.m.w.h, true);
    launch_product<KIND, false, FP4>(s);
}

static void launch_products(const masked_pass &s, const float *x)
{
    const nbi_moe_shape &shape = s.l->shape;
    if (s.l->fp4) {
        launch_up<NBI_WEIGHT_NVFP4, true>(s, x);
        launch_down<NBI_WEIGHT_NVFP4, true>(s);
        return;
    }
    NBI_MOE_BY_KIND(shape.kind_gate_up, launch_up, s, x);
    NBI_MOE_BY_KIND(shape.kind_down, launch_down, s);
}

void nbi_moe_masked_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    const nbi_moe_shape *shape = &l->shape;
    masked_pass s = {};
    s.c = c;
    s.l = l;
    s.capacity = pass_rows(shape, a->n_rows, l->fp4);
    lay_out(&s.m, static_cast<char *>(a->workspace), shape, s.capacity, l->fp4);
    s.small = s.capacity * shape->top_k > SMALL_ROWS * shape->n_experts &&
              (l->fp4 || nbi_moe_product_shared(nbi_moe_small::TOKENS,
                                                nbi_moe_most_chunks(shape)) <= c->rt.shared_max);
    for (uint32_t row = 0; row < a->n_rows; row += s.capacity) {
        const uint32_t left = a->n_rows - row, n = left < s.capacity ? left : s.capacity;
        const nbi_moe_slots slots = nbi_moe_slots_of(shape, a).from(row);
        nbi_launch(&c->rt, dim3(nbi_moe_n_all(shape)), dim3(CAPACITY_MAX), 0, assign_kernel, s.m,
                   slots, n, s.capacity);
        launch_products(s, static_cast<const float *>(a->x) + (size_t)row * shape->hidden);
        nbi_launch(&c->rt, dim3(nbi_ceil_div(shape->hidden, 4 * NBI_MOE_THREADS), n),
                   dim3(NBI_MOE_THREADS), 0, nbi_moe_combine_kernel, s.m.w,
                   static_cast<float *>(a->out) + (size_t)row * shape->hidden, slots,
                   shape->hidden);
    }
}
