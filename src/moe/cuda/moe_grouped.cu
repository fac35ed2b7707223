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
 * from memory to fragments in registers, rows of x through a ring in shared memory. */
#include "moe/cuda/moe_grouped.h"
#include "moe/cuda/moe_tiles.h"

#define THREADS  256u
#define WARPS    (THREADS / NBI_WARP)
#define ROWS_MAX 4096u /* of one pass: the results of all its pairs are in memory */
#define STAGES   4u    /* k-tiles of x on their way or in use */
#define TILE_MAX 128u  /* tokens */
#define TOGETHER 4u    /* slots of a row */

/* Pairs of an expert from which warpgroups are ahead, where there are any. */
#define WIDE_PAIRS 12u

using work = nbi_moe_work;
using token_tile = nbi_moe_token_tile;

static NBI_DEV bool valid(int32_t id, uint32_t n_experts)
{
    return id >= 0 && (uint32_t)id < n_experts;
}

/* ---------------------------------------------------------------- sorting, conversion */

struct begin_args {
    work w;
    const float *input_scale; /* [n_experts]: x is converted for each pair, else for each row */
    uint32_t top_k;
    const int32_t *ids; /* [n_pairs] */
    const float *x;     /* [n_rows][cols] */
    uint32_t n_pairs, n_experts, n_rows, cols, segments;
};

/* Pairs of every expert among the THREADS pairs of a segment. */
static NBI_DEV void count_segment(const begin_args &a, uint32_t segment)
{
    __shared__ uint32_t count[NBI_MOE_EXPERTS_MAX];
    for (uint32_t e = threadIdx.x; e < a.n_experts; e += THREADS) count[e] = 0;
    __syncthreads();
    const uint32_t i = segment * THREADS + threadIdx.x;
    const int32_t id = i < a.n_pairs ? a.ids[i] : -1;
    if (valid(id, a.n_experts)) atomicAdd(&count[id], 1u);
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < a.n_experts; e += THREADS)
        a.w.count[(size_t)segment * a.n_experts + e] = count[e];
}

/* One chunk of the row at x, by one warp. */
template <nbi_weight_kind KIND>
static NBI_DEV void convert(char *to, float *unit, const float *x, uint32_t cols, uint32_t to_row,
                            uint32_t c, float input_scale)
{
    constexpr uint32_t TILES = nbi_chunk_tiles(KIND);
    const size_t n_kt = (cols + NBI_TILE_COLS - 1) / NBI_TILE_COLS;
    const size_t n_chunks = (n_kt + TILES - 1) / TILES;
    const float factor = nbi_moe_x_chunk<KIND>(
        to + (to_row * n_kt + c * TILES) * NBI_MOE_TILE_X_BYTES, x, c, cols, input_scale);
    if (nbi_lane() == 0) unit[to_row * n_chunks + c] = factor;
}

template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(THREADS) begin_kernel(const begin_args a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t warp = threadIdx.x / NBI_WARP;
    if (blockIdx.x < a.segments) return count_segment(a, blockIdx.x);
    const uint32_t item = (blockIdx.x - a.segments) * WARPS + warp;
    constexpr uint32_t CHUNK = nbi_chunk_tiles(KIND) * NBI_TILE_COLS;
    const uint32_t n_chunks = (a.cols + CHUNK - 1) / CHUNK, to_row = item / n_chunks;
    if (to_row >= (a.input_scale ? a.n_pairs : a.n_rows)) return;
    const size_t row = a.input_scale ? to_row / a.top_k : to_row;
    float scale = 0;
    if (a.input_scale) {
        const int32_t e = a.ids[to_row];
        if (!valid(e, a.n_experts)) return;
        scale = a.input_scale[e];
    }
    convert<KIND>(a.w.xc, a.w.xe, a.x + row * a.cols, a.cols, to_row, item % n_chunks, scale);
}

/* Of each expert. */
struct places {
    uint32_t count[NBI_MOE_EXPERTS_MAX];
    uint32_t first[NBI_MOE_EXPERTS_MAX]; /* place of its first pair of the segment */
    uint32_t tiles[NBI_MOE_EXPERTS_MAX];
};

/* counts, and what is before the block's segment. */
static NBI_DEV void add_segments(places &p, const work &w, uint32_t n_experts, uint32_t tile)
{
    for (uint32_t e = threadIdx.x; e < n_experts; e += THREADS) {
        uint32_t all = 0, before = 0;
#pragma unroll 8
        for (uint32_t s = 0; s < gridDim.x; s++) {
            const uint32_t n = w.count[(size_t)s * n_experts + e];
            all += n;
            before += s < blockIdx.x ? n : 0;
        }
        p.count[e] = all;
        p.first[e] = before;
        p.tiles[e] = (all + tile - 1) / tile;
    }
}

/* A block per segment; tiles of expert e are listed by block e % blocks. */
static __global__ void __launch_bounds__(THREADS)
    place_kernel(const work w, const int32_t *ids, uint32_t n_pairs, uint32_t n_experts,
                 uint32_t tile)
{
    __shared__ places p;
    __shared__ int32_t segment[THREADS];
    nbi_wait_before();
    nbi_let_next();
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    const int32_t id = i < n_pairs ? ids[i] : -1;
    segment[threadIdx.x] = id;
    add_segments(p, w, n_experts, tile);
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < n_experts; e += THREADS) {
        uint32_t first = 0, first_tile = 0;
        for (uint32_t k = 0; k < e; k++) {
            first += p.count[k];
            first_tile += p.tiles[k];
        }
        if (e % gridDim.x == blockIdx.x)
            for (uint32_t k = 0; k < p.tiles[e]; k++) {
                const uint32_t left = p.count[e] - k * tile;
                w.tiles[first_tile + k] = {e, first + k * tile, left < tile ? left : tile};
            }
        if (e + 1 == n_experts && blockIdx.x == 0)
            *w.total = {first_tile + p.tiles[e], first + p.count[e]};
        p.first[e] += first;
    }
    __syncthreads();
    if (!valid(id, n_experts)) return;
    uint32_t at = p.first[id];
    for (uint32_t k = 0; k < threadIdx.x; k++) at += segment[k] == id;
    w.pair[at] = i;
    w.place[i] = at;
}

template <nbi_weight_kind KIND>
static __global__ void __launch_bounds__(THREADS)
    convert_kernel(const work w, const float *input_scale, const int32_t *ids, uint32_t cols)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t item = blockIdx.x * WARPS + threadIdx.x / NBI_WARP;
    constexpr uint32_t CHUNK = nbi_chunk_tiles(KIND) * NBI_TILE_COLS;
    const uint32_t n_chunks = (cols + CHUNK - 1) / CHUNK, place = item / n_chunks;
    if (place >= w.total->n_places) return;
    const float scale = input_scale ? input_scale[ids[w.pair[place]]] : 0;
    convert<KIND>(w.hc, w.he, w.h + (size_t)place * cols, cols, place, item % n_chunks, scale);
}

static __global__ void __launch_bounds__(THREADS)
    combine_kernel(const work w, float *out, const int32_t *ids, const float *weights,
                   uint32_t top_k, uint32_t n_experts, uint32_t hidden)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t c = 4 * (blockIdx.x * THREADS + threadIdx.x);
    const size_t t = blockIdx.y;
    if (c >= hidden) return;
    nbi_f32x4 sum = {{0, 0, 0, 0}};
    for (uint32_t k0 = 0; k0 < top_k; k0 += TOGETHER) { /* their loads go out together */
        nbi_f32x4 y[TOGETHER] = {};
        float weight[TOGETHER] = {};
        bool here[TOGETHER];
#pragma unroll
        for (uint32_t j = 0; j < TOGETHER; j++) {
            const size_t p = t * top_k + k0 + j;
            here[j] = k0 + j < top_k && valid(ids[p], n_experts);
            if (!here[j]) continue;
            weight[j] = weights[p];
            y[j] = *reinterpret_cast<const nbi_f32x4 *>(w.y + (size_t)w.place[p] * hidden + c);
        }
#pragma unroll
        for (uint32_t j = 0; j < TOGETHER; j++) {
            if (!here[j]) continue;
#pragma unroll
            for (int i = 0; i < 4; i++) sum.v[i] = fmaf(weight[j], y[j].v[i], sum.v[i]);
        }
    }
    *reinterpret_cast<nbi_f32x4 *>(out + t * hidden + c) = sum;
}

/* ---------------------------------------------------------------- products */

/* How a block of 8 warps divides its work: MT row tiles and NT column tiles of 8 tokens per warp,
 * WM x WN warps; DEPTH k-tiles of weights on their way; BLOCKS of a multiprocessor at once. */
template <uint32_t MT_, uint32_t WM_, uint32_t NT_, uint32_t DEPTH_, uint32_t BLOCKS_>
struct division {
    static constexpr uint32_t MT = MT_, WM = WM_, WN = WARPS / WM_, NT = NT_, DEPTH = DEPTH_;
    static constexpr uint32_t BLOCKS = BLOCKS_;
    static constexpr uint32_t ROW_TILES = MT * WM, TOKENS = WN * NT * 8;
    static constexpr bool SKIP = BLOCKS > 1; /* columns without tokens; else whole warps only */
};
using large = division<2, 4, 8, 2, 1>;  /* 128 tokens */
using wide = division<2, 4, 6, 2, 1>;   /* 96: what registers leave beside larger weights */
using middle = division<2, 4, 4, 2, 1>; /* 64 */
using small = division<1, 8, 5, 2, 2>;  /* 40: on the way to the stream's bound */
using narrow = division<1, 8, 2, 4, 2>; /* 16: bound by the stream of weights */

struct product_args {
    nbi_moe_weights weights;
    work w;
    float *out;       /* [places][rows] */
    uint32_t x_pairs; /* gate_up: pairs that share a converted row of x */
};

/* Where the rows of a tile come from. */
struct source {
    const char *rows;
    const float *unit;
    uint32_t row_pieces; /* of 16 bytes */
    uint32_t n_chunks;
};

/* Row r of the tile: gate_up reads the pair's row of x, down the place's row of h. */
template <bool GATE_UP>
static NBI_DEV uint32_t source_row(const product_args &a, const token_tile &tile, uint32_t r)
{
    const uint32_t place = tile.first + r;
    return GATE_UP ? a.w.pair[place] / a.x_pairs : place;
}

/* The ring: a row of a stage is one k-tile, 8 pieces of 16 bytes; odd rows have their halves
 * exchanged, so that two rows that are read together share no banks. */
template <class D, bool GATE_UP> struct ring {
    static constexpr uint32_t PIECES = D::TOKENS * 8, EACH = (PIECES + THREADS - 1) / THREADS;
    static constexpr uint32_t ROWS = THREADS / 8; /* between a thread's pieces */
    const char *rows;
    uint32_t from[EACH]; /* in pieces */
    uint32_t n;          /* tokens */
    char *stages;

    NBI_DEV void open(const product_args &a, const token_tile &tile, const source &s)
    {
        rows = s.rows;
        n = tile.n;
        stages = nbi_shared<char>();
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            const uint32_t r = i * ROWS + threadIdx.x / 8;
            const uint32_t row = r < n ? source_row<GATE_UP>(a, tile, r) : 0;
            from[i] = row * s.row_pieces + threadIdx.x % 8;
        }
    }

    NBI_DEV void fetch(uint32_t kt, uint32_t n_kt)
    {
        const uint32_t r = threadIdx.x / 8, q = threadIdx.x % 8;
        char *to =
            stages + (kt % STAGES * D::TOKENS + r) * NBI_MOE_TILE_X_BYTES + (q ^ (r & 1) * 4) * 16;
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++)
            if (kt < n_kt && i * THREADS + threadIdx.x < PIECES)
                nbi_copy_async(to + i * ROWS * NBI_MOE_TILE_X_BYTES,
                               rows + ((size_t)from[i] + kt * 8) * 16, i * ROWS + r < n);
        nbi_copy_commit();
    }

    /* B fragments of k-steps 2 pair, 2 pair + 1 for the lane's token of column tile `first / 8`. */
    NBI_DEV nbi_u32x4 fragment(uint32_t kt, uint32_t first, uint32_t pair) const
    {
        const uint32_t r = first + (uint32_t)nbi_lane() / 4, q = pair * 4 + (nbi_lane() & 3);
        return *reinterpret_cast<const nbi_u32x4 *>(
            stages + (kt % STAGES * D::TOKENS + r) * NBI_MOE_TILE_X_BYTES + (q ^ (r & 1) * 4) * 16);
    }
};

/* One k-tile: weights of MT row tiles times the warp's tokens, `live` from token0 on. */
template <nbi_weight_kind KIND, class D, class R>
static NBI_DEV void multiply(float (&p)[D::MT][D::NT][4], const nbi_tile<KIND> (&weights)[D::MT],
                             const R &x, uint32_t kt, uint32_t token0, uint32_t live)
{
#pragma unroll
    for (uint32_t pair = 0; pair < 2; pair++) {
        uint32_t a[D::MT][2][4];
#pragma unroll
        for (uint32_t m = 0; m < D::MT; m++) {
            weights[m].fragment(a[m][0], 2 * pair);
            weights[m].fragment(a[m][1], 2 * pair + 1);
        }
#pragma unroll
        for (uint32_t n = 0; n < D::NT; n++) {
            if (D::SKIP && n * 8 >= live) continue;
            const nbi_u32x4 b = x.fragment(kt, token0 + n * 8, pair);
#pragma unroll
            for (uint32_t m = 0; m < D::MT; m++) {
                nbi_tile_mma<KIND>(p[m][n], a[m][0], b.v);
                nbi_tile_mma<KIND>(p[m][n], a[m][1], b.v + 2);
            }
        }
    }
}

/* y += the chunk's sums, which begin anew. */
template <nbi_weight_kind KIND, class D>
static NBI_DEV void add_chunk(float (&y)[D::MT][D::NT][4], float (&p)[D::MT][D::NT][4],
                              const nbi_cuda_packed &w, const uint32_t (&rt)[D::MT], uint32_t c,
                              const float *unit)
{
#pragma unroll
    for (uint32_t m = 0; m < D::MT; m++) {
        const nbi_f32x2 block = nbi_tile_block_scale<KIND>(w, rt[m], c);
#pragma unroll
        for (uint32_t n = 0; n < D::NT; n++) {
            const nbi_f32x2 two_e = *reinterpret_cast<const nbi_f32x2 *>(unit + n * 8);
            nbi_chunk_add(y[m][n], p[m][n], two_e.v, block);
#pragma unroll
            for (int i = 0; i < 4; i++) p[m][n][i] = 0;
        }
    }
}

template <class D, bool GATE_UP>
static NBI_DEV void store(const product_args &a, const nbi_cuda_packed &w, const token_tile &tile,
                          const float (&y)[D::MT][D::NT][4], uint32_t first_rt, uint32_t token0)
{
    const uint32_t g = (uint32_t)nbi_lane() / 4, t = (uint32_t)nbi_lane() % 4;
#pragma unroll
    for (uint32_t m = 0; m < D::MT; m++) {
        const uint32_t rt = first_rt + m, low = rt * NBI_TILE_ROWS + g;
        if (rt >= w.n_rt) continue;
        const float low_scale = w.row_scale[low], high_scale = w.row_scale[low + 8];
        const uint32_t row = GATE_UP ? rt * 8 + g : low;
#pragma unroll
        for (uint32_t n = 0; n < D::NT; n++) {
#pragma unroll
            for (uint32_t j = 0; j < 2; j++) {
                const uint32_t r = token0 + n * 8 + 2 * t + j;
                if (r >= tile.n) continue;
                float *to = a.out + (size_t)(tile.first + r) * w.rows + row;
                const float low_y = y[m][n][j] * low_scale, high_y = y[m][n][2 + j] * high_scale;
                if (GATE_UP) {
                    if (row < w.rows) to[0] = nbi_moe_swiglu(low_y, high_y);
                } else {
                    if (row < w.rows) to[0] = low_y;
                    if (row + 8 < w.rows) to[8] = high_y;
                }
            }
        }
    }
}

/* 2^e of the tile's tokens, [chunk][token]; zeros behind the last token. */
template <class D, bool GATE_UP>
static NBI_DEV void load_units(float *unit, const product_args &a, const token_tile &tile,
                               const source &s)
{
    for (uint32_t i = threadIdx.x; i < D::TOKENS * s.n_chunks; i += THREADS) {
        const uint32_t r = i / s.n_chunks, c = i % s.n_chunks;
        unit[c * D::TOKENS + r] =
            r < tile.n ? s.unit[(size_t)source_row<GATE_UP>(a, tile, r) * s.n_chunks + c] : 0;
    }
}

/* down asks for its first weights before the wait: the tiles were written by place, three kernels
 * back, which is complete when convert lets us start. gate_up comes right behind place. */
template <nbi_weight_kind KIND, class D, bool GATE_UP>
static __global__ void __launch_bounds__(THREADS, D::BLOCKS) product_kernel(const product_args a)
{
    constexpr uint32_t TILES = nbi_chunk_tiles(KIND), DEPTH = D::DEPTH;
    constexpr bool ONCE = D::WN == 1; /* else the warps beside read the same weights */
    if (GATE_UP) nbi_wait_before();
    const uint32_t n_tiles = nbi_load_fresh(&a.w.total->n_tiles);
    const bool work_here = blockIdx.y < n_tiles;
    token_tile tile = {0, 0, 0};
    if (work_here) {
        const token_tile *from = a.w.tiles + blockIdx.y;
        tile = {nbi_load_fresh(&from->expert), nbi_load_fresh(&from->first),
                nbi_load_fresh(&from->n)};
    }
    const nbi_cuda_packed w = nbi_moe_expert(a.weights, tile.expert);
    /* known to be the same in all lanes: no code for lanes that part */
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
    const uint32_t lane = (uint32_t)nbi_lane(), token0 = warp / D::WM * D::NT * 8;
    const uint32_t n_tokens = __shfl_sync(NBI_FULL_MASK, tile.n, 0);
    const uint32_t live = n_tokens > token0 ? n_tokens - token0 : 0;
    const uint32_t first_rt = (blockIdx.x * D::WM + warp % D::WM) * D::MT;
    uint32_t rt[D::MT]; /* behind the last: the last, and nothing is written */
    nbi_tile<KIND> weights[DEPTH][D::MT];
#pragma unroll
    for (uint32_t m = 0; m < D::MT; m++) {
        rt[m] = first_rt + m < w.n_rt ? first_rt + m : w.n_rt - 1;
#pragma unroll
        for (uint32_t i = 0; i < DEPTH; i++)
            if (work_here && i < w.n_kt) weights[i][m].template load<ONCE>(w, rt[m], i, lane);
    }
    if (!GATE_UP) nbi_wait_before();
    nbi_let_next();
    if (!work_here) return;

    const source s = {GATE_UP ? a.w.xc : a.w.hc, GATE_UP ? a.w.xe : a.w.he,
                      w.n_kt * NBI_MOE_TILE_X_BYTES / 16, (w.n_kt + TILES - 1) / TILES};
    ring<D, GATE_UP> x;
    x.open(a, tile, s);
#pragma unroll
    for (uint32_t i = 0; i + 1 < STAGES; i++) x.fetch(i, w.n_kt);
    float *unit = reinterpret_cast<float *>(x.stages + STAGES * D::TOKENS * NBI_MOE_TILE_X_BYTES);
    load_units<D, GATE_UP>(unit, a, tile, s);
    unit += token0 + lane % 4 * 2;

    float p[D::MT][D::NT][4] = {}, y[D::MT][D::NT][4] = {};
    for (uint32_t kt0 = 0; kt0 < w.n_kt; kt0 += DEPTH) {
#pragma unroll
        for (uint32_t i = 0; i < DEPTH; i++) {
            const uint32_t kt = kt0 + i;
            if (kt >= w.n_kt) break;
            nbi_copy_wait<STAGES - 2>();
            __syncthreads();
            x.fetch(kt + STAGES - 1, w.n_kt);
            if (live) {
                multiply<KIND, D>(p, weights[i], x, kt, token0, live);
#pragma unroll
                for (uint32_t m = 0; m < D::MT; m++)
                    if (kt + DEPTH < w.n_kt)
                        weights[i][m].template load<ONCE>(w, rt[m], kt + DEPTH, lane);
                if (kt % TILES == TILES - 1 || kt + 1 == w.n_kt)
                    add_chunk<KIND, D>(y, p, w, rt, kt / TILES, unit + kt / TILES * D::TOKENS);
            }
        }
    }
    if (live) store<D, GATE_UP>(a, w, tile, y, first_rt, token0);
}

/* ---------------------------------------------------------------- launches */

static uint32_t chunks_of(nbi_weight_kind kind, uint32_t cols)
{
    return nbi_chunks_of(kind, nbi_ceil_div(cols, NBI_TILE_COLS));
}

static size_t row_bytes_of(uint32_t cols)
{
    return (size_t)nbi_ceil_div(cols, NBI_TILE_COLS) * NBI_MOE_TILE_X_BYTES;
}

/* Most token tiles that pairs can make. */
static uint32_t most_tiles(uint32_t n_pairs, uint32_t n_experts, uint32_t tokens)
{
    const uint32_t n = n_pairs / tokens + n_experts;
    return n < n_pairs ? n : n_pairs;
}

static uint32_t segments_of(uint32_t n_pairs)
{
    return nbi_ceil_div(n_pairs, THREADS);
}

static size_t lay_out(work *w, char *base, const nbi_moe_shape *s, uint32_t n_rows)
{
    const size_t pairs = (size_t)n_rows * s->top_k;
    const bool by_pair = s->w4a4 && s->kind_gate_up == NBI_WEIGHT_NVFP4;
    const size_t x_rows = by_pair ? pairs : n_rows;
    const size_t width = s->hidden > s->inter ? s->hidden : s->inter;
    const struct {
        void **at;
        size_t bytes;
    } parts[] = {
        {reinterpret_cast<void **>(&w->count),
         (size_t)segments_of((uint32_t)pairs) * s->n_experts * sizeof *w->count},
        {reinterpret_cast<void **>(&w->pair), pairs * sizeof *w->pair},
        {reinterpret_cast<void **>(&w->place), pairs * sizeof *w->place},
        {reinterpret_cast<void **>(&w->tiles),
         most_tiles((uint32_t)pairs, s->n_experts, narrow::TOKENS) * sizeof *w->tiles},
        {reinterpret_cast<void **>(&w->total), sizeof *w->total},
        {reinterpret_cast<void **>(&w->xc), x_rows * row_bytes_of(s->hidden)},
        {reinterpret_cast<void **>(&w->hc), pairs * row_bytes_of(s->inter)},
        {reinterpret_cast<void **>(&w->xe),
         x_rows * chunks_of(s->kind_gate_up, s->hidden) * sizeof(float)},
        {reinterpret_cast<void **>(&w->he),
         pairs * chunks_of(s->kind_down, s->inter) * sizeof(float)},
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

size_t nbi_moe_grouped_workspace(const nbi_moe_shape *shape, uint32_t max_rows)
{
    work w = {};
    if (nbi_moe_has_f32(shape)) return nbi_moe_gemv_workspace(shape, max_rows);
    return lay_out(&w, NULL, shape, pass_rows(max_rows));
}

static size_t product_shared(uint32_t tokens, uint32_t n_chunks)
{
    return (size_t)tokens * (STAGES * NBI_MOE_TILE_X_BYTES + n_chunks * sizeof(float));
}

static uint32_t most_chunks(const nbi_moe_shape *s)
{
    const uint32_t x = chunks_of(s->kind_gate_up, s->hidden), h = chunks_of(s->kind_down, s->inter);
    return x > h ? x : h;
}

bool nbi_moe_grouped_fits(const nbi_cuda *c, const nbi_moe_shape *s)
{
    if (nbi_moe_has_f32(s)) return nbi_moe_gemv_fits(c, s);
    return product_shared(narrow::TOKENS, most_chunks(s)) <= c->rt.shared_max;
}

/* Pairs of an expert, on average. */
static uint32_t pairs_each(const nbi_moe_shape *s, uint32_t n_rows)
{
    return nbi_ceil_div(n_rows * s->top_k, s->n_experts);
}

/* Tokens of a tile. */
static uint32_t choose_tokens(const nbi_cuda *c, const nbi_moe_shape *s, uint32_t n_rows)
{
    const uint32_t each = pairs_each(s, n_rows), chunks = most_chunks(s);
    const bool fp4 = s->kind_gate_up == NBI_WEIGHT_NVFP4 && s->kind_down == NBI_WEIGHT_NVFP4;
    const uint32_t most = fp4 ? large::TOKENS : wide::TOKENS;
    if (each > 56 && product_shared(most, chunks) <= c->rt.shared_max) return most;
    if (each > 34 && product_shared(middle::TOKENS, chunks) <= c->rt.shared_max)
        return middle::TOKENS;
    if (each > 8 && product_shared(small::TOKENS, chunks) <= c->rt.shared_max) return small::TOKENS;
    return narrow::TOKENS;
}

template <nbi_weight_kind KIND, class D, bool GATE_UP>
static void launch_division(nbi_cuda *c, const product_args &a, uint32_t n_tiles)
{
    const nbi_cuda_packed &w = a.weights.first;
    nbi_launch(&c->rt, dim3(nbi_ceil_div(w.n_rt, D::ROW_TILES), n_tiles), dim3(THREADS),
               product_shared(D::TOKENS, nbi_ceil_div(w.n_kt, nbi_chunk_tiles(KIND))),
               product_kernel<KIND, D, GATE_UP>, a);
}

template <nbi_weight_kind KIND, bool GATE_UP>
static void launch_product(nbi_cuda *c, const product_args &a, uint32_t n_tiles, uint32_t tokens)
{
    if constexpr (KIND == NBI_WEIGHT_NVFP4)
        if (tokens == large::TOKENS) return launch_division<KIND, large, GATE_UP>(c, a, n_tiles);
    if (tokens == wide::TOKENS)
        launch_division<KIND, wide, GATE_UP>(c, a, n_tiles);
    else if (tokens == middle::TOKENS)
        launch_division<KIND, middle, GATE_UP>(c, a, n_tiles);
    else if (tokens == small::TOKENS)
        launch_division<KIND, small, GATE_UP>(c, a, n_tiles);
    else
        launch_division<KIND, narrow, GATE_UP>(c, a, n_tiles);
}

/* One pass: n_rows rows, at most ROWS_MAX. */
struct pass {
    nbi_cuda *c;
    const nbi_moe_layer *l;
    work w;
    const float *x, *weights;
    const int32_t *ids;
    float *out;
    uint32_t n_rows, n_pairs, tokens, n_tiles;
    bool wide; /* the products of moe_wide.cu */
};

static nbi_moe_wide_args wide_args(const pass &s)
{
    nbi_moe_wide_args a = {};
    a.w = s.w;
    a.ids = s.ids;
    a.x = s.x;
    a.top_k = s.l->shape.top_k;
    a.n_experts = s.l->shape.n_experts;
    a.n_rows = s.n_rows;
    a.n_pairs = s.n_pairs;
    a.n_tiles = s.n_tiles;
    return a;
}

template <nbi_weight_kind KIND> static void launch_up(const pass &s)
{
    const nbi_moe_shape &shape = s.l->shape;
    const bool by_pair = s.l->gate_up.input_scale != NULL;
    begin_args b = {};
    b.w = s.w;
    b.input_scale = s.l->gate_up.input_scale;
    b.top_k = shape.top_k;
    b.ids = s.ids;
    b.x = s.x;
    b.n_pairs = s.n_pairs;
    b.n_experts = shape.n_experts;
    b.n_rows = s.n_rows;
    b.cols = shape.hidden;
    b.segments = segments_of(s.n_pairs);
    uint32_t items = (by_pair ? s.n_pairs : s.n_rows) * chunks_of(KIND, shape.hidden);
    if (s.wide) items = 0; /* only counts */
    nbi_launch(&s.c->rt, dim3(b.segments + nbi_ceil_div(items, WARPS)), dim3(THREADS), 0,
               begin_kernel<KIND>, b);
    nbi_launch(&s.c->rt, dim3(b.segments), dim3(THREADS), 0, place_kernel, s.w, s.ids, s.n_pairs,
               shape.n_experts, s.tokens);
    if (s.wide) return nbi_moe_wide_gate_up(s.c, wide_args(s), s.l->gate_up);
    launch_product<KIND, true>(s.c, {s.l->gate_up, s.w, s.w.h, by_pair ? 1 : shape.top_k},
                               s.n_tiles, s.tokens);
}

template <nbi_weight_kind KIND> static void launch_down(const pass &s)
{
    if (s.wide) return nbi_moe_wide_down(s.c, wide_args(s), s.l->down);
    const nbi_moe_shape &shape = s.l->shape;
    const uint32_t items = s.n_pairs * chunks_of(KIND, shape.inter);
    nbi_launch(&s.c->rt, dim3(nbi_ceil_div(items, WARPS)), dim3(THREADS), 0, convert_kernel<KIND>,
               s.w, s.l->down.input_scale, s.ids, shape.inter);
    launch_product<KIND, false>(s.c, {s.l->down, s.w, s.w.y, 1}, s.n_tiles, s.tokens);
}

static void run_pass(const pass &s)
{
    const nbi_moe_shape &shape = s.l->shape;
    NBI_MOE_BY_KIND(shape.kind_gate_up, launch_up, s);
    NBI_MOE_BY_KIND(shape.kind_down, launch_down, s);
    nbi_launch(&s.c->rt, dim3(nbi_ceil_div(shape.hidden, 4 * THREADS), s.n_rows), dim3(THREADS), 0,
               combine_kernel, s.w, s.out, s.ids, s.weights, shape.top_k, shape.n_experts,
               shape.hidden);
}

void nbi_moe_grouped_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    if (nbi_moe_has_f32(&l->shape)) return nbi_moe_gemv_run(c, l, a); /* nothing to gain */
    pass s = {};
    s.c = c;
    s.l = l;
    lay_out(&s.w, static_cast<char *>(a->workspace), &l->shape, pass_rows(a->n_rows));
    for (uint32_t row = 0; row < a->n_rows; row += s.n_rows) {
        const size_t first = (size_t)row * l->shape.top_k;
        s.n_rows = pass_rows(a->n_rows - row);
        s.n_pairs = s.n_rows * l->shape.top_k;
        s.wide = c->rt.sm == 90 && pairs_each(&l->shape, s.n_rows) >= WIDE_PAIRS;
        s.tokens = s.wide ? NBI_MOE_WIDE_TOKENS : choose_tokens(c, &l->shape, s.n_rows);
        s.n_tiles = most_tiles(s.n_pairs, l->shape.n_experts, s.tokens);
        s.x = static_cast<const float *>(a->x) + (size_t)row * l->shape.hidden;
        s.out = static_cast<float *>(a->out) + (size_t)row * l->shape.hidden;
        s.ids = a->ids + first;
        s.weights = a->weights + first;
        run_pass(s);
    }
}
