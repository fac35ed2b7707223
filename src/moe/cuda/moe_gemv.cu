/* Few rows: the weights of every expert that was chosen are streamed once for all of its rows. Two
 * kernels; up to 8 rows are looked at together. Callers: the runners cuda_gemv and cuda.
 *
 *   gate_up  a block is (chosen expert, a few row tiles): warps take (row tile, chunk of K) units,
 *            partial sums meet in shared memory in the order of chunks, SwiGLU in a thread
 *   down     a block is a row tile of the output over all chosen experts of its rows, so that
 *            weights and sums over the slots meet in one block, in order
 *
 * Bytes decide: a warp has the next unit's weights (2.3 KB in NVFP4) on their way while it
 * multiplies. x is converted once per block into shared memory. */
#include "moe/cuda/moe_tiles.h"

#define ROWS           8u                         /* looked at together, most */
#define PAIRS_MAX      (ROWS * NBI_MOE_TOP_K_MAX) /* (row, slot) */
#define COLUMNS        8u                         /* tokens of a matrix instruction */
#define GATE_UP_WARPS  8u
#define GATE_UP_BLOCKS 2u /* of a multiprocessor at once */
#define DOWN_WARPS     16u
#define ROW_PAD        64u /* bytes between converted rows: two neighbours never share banks */

struct gate_up_args {
    nbi_moe_weights w;
    const float *x; /* [T][hidden] */
    float *h;       /* [pairs][inter] */
    nbi_moe_slots slots;
    uint32_t n_rows;
    uint32_t rows;      /* looked at together */
    uint32_t row_tiles; /* of a block */
    uint32_t columns;   /* tokens at a time */
};

struct down_args {
    nbi_moe_weights w;
    const float *h; /* [pairs][inter] */
    float *out;     /* [T][hidden] */
    nbi_moe_slots slots;
    uint32_t n_rows, rows;
};

static NBI_DEV uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Known to be the same in all lanes. */
static NBI_DEV uint32_t warp_index()
{
    return __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
}

/* ---------------------------------------------------------------- gate and up */

/* The expert of `pair` and its pairs in order, when `pair` is its first and n_pairs at most
 * PAIRS_MAX; otherwise -1: the block of an earlier pair does the expert, or there is none. All ids
 * are asked for at once. The same answer in every warp; warp 0 writes the list. */
static NBI_DEV int32_t list_pairs(uint32_t *list, uint32_t *n_list, const nbi_moe_slots &slots,
                                  uint32_t n_pairs, uint32_t pair)
{
    const uint32_t lane = (uint32_t)nbi_lane();
    int32_t id[PAIRS_MAX / NBI_WARP];
#pragma unroll
    for (uint32_t j = 0; j < PAIRS_MAX / NBI_WARP; j++)
        id[j] = j * NBI_WARP + lane < n_pairs ? slots.expert(j * NBI_WARP + lane) : -1;
    int32_t e = -1;
#pragma unroll
    for (uint32_t j = 0; j < PAIRS_MAX / NBI_WARP; j++)
        if (pair / NBI_WARP == j) e = __shfl_sync(NBI_FULL_MASK, id[j], (int)(pair % NBI_WARP));
    if (e < 0) return -1;
    uint32_t n = 0;
#pragma unroll
    for (uint32_t j = 0; j < PAIRS_MAX / NBI_WARP; j++) {
        if (j * NBI_WARP >= n_pairs) continue;
        const uint32_t all = __ballot_sync(NBI_FULL_MASK, id[j] == e);
        const uint32_t i = j * NBI_WARP + lane;
        if (threadIdx.x < NBI_WARP && id[j] == e)
            list[n + (uint32_t)__popc(all & ((1u << lane) - 1))] = i;
        if (!n && all && j * NBI_WARP + (uint32_t)__ffs((int)all) - 1 != pair) return -1;
        n += (uint32_t)__popc(all);
    }
    if (threadIdx.x == 0) *n_list = n;
    return e;
}

/* Rows list[0 .. m) of x into shared memory. */
template <nbi_weight_kind KIND>
static NBI_DEV void convert_rows(char *xs, float *unit, const gate_up_args &a, uint32_t row0,
                                 const uint32_t *list, uint32_t m, uint32_t n_chunks,
                                 float input_scale)
{
    const uint32_t pitch = a.w.first.n_kt * NBI_MOE_TILE_X_BYTES + ROW_PAD;
    nbi_moe_steps at(threadIdx.x / NBI_WARP, GATE_UP_WARPS, n_chunks);
    for (; at.q < m; at.next()) {
        const uint32_t c = at.r, column = at.q;
        const size_t row = row0 + list[column] / a.slots.n;
        const float two_e = nbi_moe_x_chunk<KIND>(
            xs + column * pitch + c * nbi_chunk_tiles(KIND) * NBI_MOE_TILE_X_BYTES,
            a.x + row * a.w.first.cols, c, a.w.first.cols, input_scale);
        if (nbi_lane() == 0) unit[c * COLUMNS + column] = two_e;
    }
}

/* Sums of one row tile over the chunks, SwiGLU, and out. */
template <nbi_weight_kind KIND>
static NBI_DEV void finish_gate_up(const gate_up_args &a, const nbi_cuda_packed &w, uint32_t rt,
                                   const nbi_f32x4 *part, uint32_t part_step, const float *unit,
                                   size_t pair0, const uint32_t *list, uint32_t m)
{
    const uint32_t lane = (uint32_t)nbi_lane(), g = lane / 4, t = lane % 4;
    const uint32_t n_chunks = nbi_chunks_of(KIND, w.n_kt);
    float y[4] = {0, 0, 0, 0};
    for (uint32_t c = 0; c < n_chunks; c++)
        nbi_chunk_add(y, part[(size_t)c * part_step + lane].v, unit + c * COLUMNS + 2 * t,
                      nbi_tile_block_scale<KIND>(w, rt, c));
    const float gate_scale = w.row_scale[rt * 16 + g], up_scale = w.row_scale[rt * 16 + 8 + g];
    const uint32_t row = rt * 8 + g;
    if (row >= w.rows) return;
#pragma unroll
    for (uint32_t j = 0; j < 2; j++)
        if (2 * t + j < m)
            a.h[(pair0 + list[2 * t + j]) * w.rows + row] =
                nbi_moe_swiglu(y[j] * gate_scale, y[2 + j] * up_scale);
}

template <nbi_weight_kind KIND, bool WHOLE>
static __global__ void __launch_bounds__(GATE_UP_WARPS *NBI_WARP, GATE_UP_BLOCKS)
    gate_up_kernel(const gate_up_args a)
{
    constexpr uint32_t TILES = nbi_chunk_tiles(KIND);
    nbi_wait_before();
    nbi_let_next(); /* not before the wait: down reads the ids that we waited for */
    __shared__ uint32_t list[PAIRS_MAX], n_list;
    const uint32_t lane = (uint32_t)nbi_lane(), warp = warp_index();
    const uint32_t row0 = blockIdx.z * a.rows, pair = blockIdx.y;
    const uint32_t n_pairs = least(a.rows, a.n_rows - row0) * a.slots.n;
    const size_t pair0 = (size_t)row0 * a.slots.n;
    if (pair >= n_pairs) return;
    const int32_t e = list_pairs(list, &n_list, a.slots.from(row0), n_pairs, pair);
    if (e < 0) return;

    const nbi_cuda_packed w = nbi_moe_expert(a.w, (uint32_t)e);
    const float input_scale = nbi_moe_input_scale(a.w, (uint32_t)e);
    const uint32_t rt0 = blockIdx.x * a.row_tiles, n_rt = least(a.row_tiles, w.n_rt - rt0);
    const uint32_t n_chunks = nbi_chunks_of(KIND, w.n_kt), n_units = n_chunks * n_rt;
    const uint32_t pitch = w.n_kt * NBI_MOE_TILE_X_BYTES + ROW_PAD;
    nbi_f32x4 *part = nbi_shared<nbi_f32x4>();
    float *unit = reinterpret_cast<float *>(part + n_chunks * a.row_tiles * NBI_WARP);
    char *xs = reinterpret_cast<char *>(unit + n_chunks * COLUMNS);

    nbi_moe_walk<KIND, WHOLE> walk;
    const uint32_t n_mine = warp < n_units ? (n_units - warp - 1) / GATE_UP_WARPS + 1 : 0;
    uint32_t first = 0;
    do {
        nbi_moe_steps at(warp, GATE_UP_WARPS, n_rt); /* chunk q, row tile r */
        const char *x = xs;
        const auto here = [&]() {
            const size_t tile = (size_t)(rt0 + at.r) * w.n_kt + at.q * TILES;
            return nbi_moe_unit{static_cast<const char *>(w.data) + tile * nbi_tile_bytes(KIND),
                                static_cast<const char *>(w.scales) + tile * 64,
                                x + at.q * (TILES * NBI_MOE_TILE_X_BYTES),
                                w.n_kt - at.q * TILES,
                                (at.q * n_rt + at.r) * NBI_WARP,
                                0};
        };
        if (n_mine) walk.begin(here());
        __syncthreads(); /* the list; what the round before reads */
        const uint32_t m = least(a.columns, n_list - first);
        x += least(lane / 4, m - 1) * pitch + lane % 4 * 16;
        walk.unit.x = x + at.q * (TILES * NBI_MOE_TILE_X_BYTES);
        convert_rows<KIND>(xs, unit, a, row0, list + first, m, n_chunks, input_scale);
        __syncthreads();
        walk.run(
            n_mine,
            [&]() {
                at.next();
                return here();
            },
            [&](const nbi_moe_unit &u, const float d[4]) {
                part[u.tag + lane] = {{d[0], d[1], d[2], d[3]}};
            });
        __syncthreads();
        for (uint32_t r = warp; r < n_rt; r += GATE_UP_WARPS)
            finish_gate_up<KIND>(a, w, rt0 + r, part + r * NBI_WARP, n_rt * NBI_WARP, unit, pair0,
                                 list + first, m);
        first += a.columns;
    } while (first < n_list);
}

/* ---------------------------------------------------------------- down */

/* Pairs by expert: experts in the order of their first pair, pairs of an expert in order, cut into
 * columns of a matrix instruction. */
struct groups {
    alignas(16) int32_t expert[PAIRS_MAX];  /* of a pair; -1: none */
    alignas(16) uint32_t leader[PAIRS_MAX]; /* first pair of its expert; PAIRS_MAX: none */
    uint32_t place[PAIRS_MAX];              /* of a pair; only with an expert */
    uint32_t pair[PAIRS_MAX];               /* at a place */
    uint32_t set_first[PAIRS_MAX + 1];      /* first place of up to 8 tokens of one expert */
    uint32_t n_places, n_sets;
};

static NBI_DEV void group_pairs(groups *s, const nbi_moe_slots &slots, uint32_t n_pairs)
{
    const uint32_t whole = (n_pairs + 3) / 4 * 4;
    for (uint32_t p = threadIdx.x; p < whole; p += blockDim.x)
        s->expert[p] = p < n_pairs ? slots.expert_fresh(p) : -1;
    __syncthreads();
    for (uint32_t p = threadIdx.x; p < whole; p += blockDim.x) {
        const uint32_t own = (uint32_t)s->expert[p];
        uint32_t leader = PAIRS_MAX;
        for (uint32_t q = 0; q < whole; q += 4) {
            const nbi_u32x4 e = *reinterpret_cast<const nbi_u32x4 *>(s->expert + q);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                leader = e.v[i] == own && q + i < leader ? q + i : leader;
        }
        s->leader[p] = s->expert[p] < 0 ? PAIRS_MAX : leader;
    }
    __syncthreads();
    for (uint32_t p = threadIdx.x; p < n_pairs; p += blockDim.x) {
        const uint32_t own = s->leader[p];
        uint32_t place = 0;
        for (uint32_t q = 0; q < whole; q += 4) {
            const nbi_u32x4 l = *reinterpret_cast<const nbi_u32x4 *>(s->leader + q);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) place += l.v[i] < own || (l.v[i] == own && q + i < p);
        }
        if (own == PAIRS_MAX) continue;
        s->place[p] = place;
        s->pair[place] = p;
    }
    __syncthreads();
    if (threadIdx.x < NBI_WARP) { /* sets: a place begins one at an expert's first and every 8th */
        const uint32_t lane = (uint32_t)nbi_lane();
        uint32_t n_places = 0, n_sets = 0;
        for (uint32_t p0 = 0; p0 < n_pairs; p0 += NBI_WARP)
            n_places += (uint32_t)__popc(
                __ballot_sync(NBI_FULL_MASK, p0 + lane < n_pairs && s->expert[p0 + lane] >= 0));
        for (uint32_t i0 = 0; i0 < n_places; i0 += NBI_WARP) {
            const uint32_t i = i0 + lane;
            bool begins = false;
            if (i < n_places) {
                const uint32_t first = s->place[s->leader[s->pair[i]]];
                begins = (i - first) % COLUMNS == 0;
            }
            const uint32_t all = __ballot_sync(NBI_FULL_MASK, begins);
            if (begins) s->set_first[n_sets + (uint32_t)__popc(all & ((1u << lane) - 1))] = i;
            n_sets += (uint32_t)__popc(all);
        }
        if (lane == 0) {
            s->set_first[n_sets] = n_places;
            s->n_places = n_places;
            s->n_sets = n_sets;
        }
    }
    __syncthreads();
}

template <nbi_weight_kind KIND>
static NBI_DEV void convert_h(char *xs, float *unit, const down_args &a, const groups *s,
                              size_t pair0, uint32_t n_chunks)
{
    const uint32_t pitch = a.w.first.n_kt * NBI_MOE_TILE_X_BYTES + ROW_PAD;
    nbi_moe_steps at(threadIdx.x / NBI_WARP, blockDim.x / NBI_WARP, n_chunks);
    for (; at.q < s->n_places; at.next()) {
        const uint32_t c = at.r, place = at.q;
        const float two_e = nbi_moe_x_chunk<KIND>(
            xs + place * pitch + c * nbi_chunk_tiles(KIND) * NBI_MOE_TILE_X_BYTES,
            a.h + (pair0 + s->pair[place]) * a.w.first.cols, c, a.w.first.cols,
            nbi_moe_input_scale(a.w, (uint32_t)s->expert[s->pair[place]]));
        if (nbi_lane() == 0) unit[place * n_chunks + c] = two_e;
    }
}

/* y[place][16 rows]: sums over the chunks. */
template <nbi_weight_kind KIND>
static NBI_DEV void sum_chunks(float *y, const float *part, const float *unit, const down_args &a,
                               const groups *s, uint32_t rt, uint32_t n_chunks)
{
    for (uint32_t i = threadIdx.x; i < s->n_places * NBI_TILE_ROWS; i += blockDim.x) {
        const uint32_t place = i / NBI_TILE_ROWS, row = i % NBI_TILE_ROWS;
        const nbi_cuda_packed w = nbi_moe_expert(a.w, (uint32_t)s->expert[s->pair[place]]);
        float sum = 0;
        for (uint32_t c = 0; c < n_chunks; c++) {
            const float block = nbi_tile_block_scale<KIND>(w, rt, c).v[row / 8];
            sum = fmaf(part[(place * n_chunks + c) * NBI_TILE_ROWS + row],
                       unit[place * n_chunks + c] * block, sum);
        }
        y[i] = sum * w.row_scale[rt * NBI_TILE_ROWS + row];
    }
}

/* out: over the slots of a row, in order. */
static NBI_DEV void sum_slots(const float *y, const down_args &a, const groups *s, uint32_t row0,
                              uint32_t n_rows, uint32_t rt)
{
    const nbi_moe_slots slots = a.slots.from(row0);
    for (uint32_t i = threadIdx.x; i < n_rows * NBI_TILE_ROWS; i += blockDim.x) {
        const uint32_t t = i / NBI_TILE_ROWS, row = i % NBI_TILE_ROWS;
        if (rt * NBI_TILE_ROWS + row >= a.w.first.rows) continue;
        float sum = 0;
        for (uint32_t k = 0; k < slots.n; k++) {
            const uint32_t p = t * slots.n + k;
            if (s->expert[p] < 0) continue;
            sum = fmaf(slots.weight(p), y[s->place[p] * NBI_TILE_ROWS + row], sum);
        }
        a.out[(size_t)(row0 + t) * a.w.first.rows + rt * NBI_TILE_ROWS + row] = sum;
    }
}

/* Before the wait the block sorts the pairs and asks for its first weights. The ids are complete by
 * then: gate_up lets us start only after its own wait for their writer (its nbi_let_next() stands
 * behind its nbi_wait_before()), and they are read past the L1 cache, where an older copy could
 * lie. */
template <nbi_weight_kind KIND, bool WHOLE>
static __global__ void __launch_bounds__(DOWN_WARPS *NBI_WARP, 1) down_kernel(const down_args a)
{
    constexpr uint32_t TILES = nbi_chunk_tiles(KIND);
    __shared__ groups s;
    const uint32_t lane = (uint32_t)nbi_lane(), warp = warp_index();
    const uint32_t rt = blockIdx.x, row0 = blockIdx.y * a.rows, n_warps = blockDim.x / NBI_WARP;
    const uint32_t n_rows = least(a.rows, a.n_rows - row0), n_pairs = n_rows * a.slots.n;
    const size_t pair0 = (size_t)row0 * a.slots.n;
    group_pairs(&s, a.slots.from(row0), n_pairs);

    const nbi_cuda_packed &w = a.w.first;
    const uint32_t n_chunks = nbi_chunks_of(KIND, w.n_kt);
    const uint32_t pitch = w.n_kt * NBI_MOE_TILE_X_BYTES + ROW_PAD;
    const uint32_t n_units = s.n_sets * n_chunks, most = a.rows * a.slots.n;
    char *xs = nbi_shared<char>();
    float *unit = reinterpret_cast<float *>(xs + (size_t)most * pitch);
    float *part = unit + most * n_chunks, *y = part + most * n_chunks * NBI_TILE_ROWS;
    const size_t tile0 = (size_t)rt * w.n_kt;
    const char *data = static_cast<const char *>(w.data) + tile0 * nbi_tile_bytes(KIND);
    const char *scales = static_cast<const char *>(w.scales) + tile0 * 64;
    nbi_moe_steps at(warp, n_warps, n_chunks); /* set q, chunk r */
    const auto here = [&]() {
        const uint32_t first = s.set_first[at.q], n = s.set_first[at.q + 1] - first;
        const size_t expert = (uint32_t)s.expert[s.pair[first]] * a.w.stride;
        const uint32_t kt = at.r * TILES;
        return nbi_moe_unit{data + expert + kt * nbi_tile_bytes(KIND),
                            scales + expert + kt * 64,
                            xs + (first + least(lane / 4, n - 1)) * pitch +
                                kt * NBI_MOE_TILE_X_BYTES + lane % 4 * 16,
                            w.n_kt - kt,
                            (first * n_chunks + at.r) * NBI_TILE_ROWS,
                            n};
    };
    nbi_moe_walk<KIND, WHOLE> walk;
    const uint32_t n_mine = warp < n_units ? (n_units - warp - 1) / n_warps + 1 : 0;
    if (n_mine) walk.begin(here());

    nbi_wait_before();
    nbi_let_next();
    convert_h<KIND>(xs, unit, a, &s, pair0, n_chunks);
    __syncthreads();
    walk.run(
        n_mine,
        [&]() {
            at.next();
            return here();
        },
        [&](const nbi_moe_unit &u, const float d[4]) {
            const uint32_t t = lane % 4;
#pragma unroll
            for (uint32_t j = 0; j < 2; j++) {
                if (2 * t + j >= u.n) continue;
                float *to = part + u.tag + (2 * t + j) * n_chunks * NBI_TILE_ROWS + lane / 4;
                to[0] = d[j];
                to[8] = d[2 + j];
            }
        });
    __syncthreads();
    sum_chunks<KIND>(y, part, unit, a, &s, rt, n_chunks);
    __syncthreads();
    sum_slots(y, a, &s, row0, n_rows, rt);
}

/* ---------------------------------------------------------------- launches */

/* Shared memory of gate_up without converted rows. */
static size_t gate_up_shared(uint32_t n_chunks, uint32_t row_tiles)
{
    return (size_t)n_chunks * (row_tiles * sizeof(nbi_f32x4) * NBI_WARP + COLUMNS * sizeof(float));
}

/* Row tiles of a block: all blocks there at once while that takes few, else enough to share what
 * x costs; partial sums within 32 KB. */
static uint32_t choose_row_tiles(const nbi_cuda *c, uint32_t pairs, uint32_t n_rt,
                                 uint32_t n_chunks)
{
    const uint32_t resident = GATE_UP_BLOCKS * (uint32_t)c->rt.n_sms;
    uint32_t n = (uint32_t)(((uint64_t)pairs * n_rt + resident - 1) / resident);
    if (n > 8) n = 4;
    while (n > 1 && gate_up_shared(n_chunks, n) > 32u << 10) n--;
    return n;
}

/* Tokens at a time, so that two blocks of a multiprocessor are there at once. */
static uint32_t choose_columns(const nbi_cuda *c, uint32_t n_rows, size_t pitch, size_t rest)
{
    const size_t room = c->rt.shared_max / GATE_UP_BLOCKS - 2048;
    uint32_t n = n_rows < COLUMNS ? n_rows : COLUMNS;
    while (n > 1 && n * pitch + rest > room) n--;
    return n;
}

template <nbi_weight_kind KIND>
static void launch_gate_up(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *r, float *h)
{
    gate_up_args a = {};
    a.w = l->gate_up;
    a.x = static_cast<const float *>(r->x);
    a.h = h;
    a.slots = nbi_moe_slots_of(&l->shape, r);
    a.n_rows = r->n_rows;
    a.rows = r->n_rows < ROWS ? r->n_rows : ROWS;
    const nbi_cuda_packed &w = a.w.first;
    const uint32_t pairs = a.rows * a.slots.n;
    const uint32_t n_chunks = nbi_chunks_of(KIND, w.n_kt);
    const size_t pitch = (size_t)w.n_kt * NBI_MOE_TILE_X_BYTES + ROW_PAD;
    a.row_tiles = choose_row_tiles(c, pairs, w.n_rt, n_chunks);
    const size_t rest = gate_up_shared(n_chunks, a.row_tiles);
    a.columns = choose_columns(c, a.rows, pitch, rest);
    nbi_launch(
        &c->rt, dim3(nbi_ceil_div(w.n_rt, a.row_tiles), pairs, nbi_ceil_div(a.n_rows, a.rows)),
        dim3(GATE_UP_WARPS * NBI_WARP), rest + a.columns * pitch,
        w.n_kt % nbi_chunk_tiles(KIND) ? gate_up_kernel<KIND, false> : gate_up_kernel<KIND, true>,
        a);
}

static size_t down_shared(const nbi_moe_shape *s, uint32_t rows)
{
    const size_t n_kt = (s->inter + NBI_TILE_COLS - 1) / NBI_TILE_COLS;
    const size_t n_chunks = nbi_chunks_of(s->kind_down, (uint32_t)n_kt);
    return (size_t)rows * nbi_moe_n_slots(s) *
           (n_kt * NBI_MOE_TILE_X_BYTES + ROW_PAD + 4 * n_chunks * (1 + NBI_TILE_ROWS) +
            4 * NBI_TILE_ROWS);
}

/* Shared memory of a block beside what it asks for. */
static size_t down_room(const nbi_cuda *c)
{
    return c->rt.shared_max - sizeof(groups) - 1024;
}

bool nbi_moe_gemv_fits(const nbi_cuda *c, const nbi_moe_shape *s)
{
    const uint32_t n_kt = nbi_ceil_div(s->hidden, NBI_TILE_COLS);
    const uint32_t n_chunks = nbi_ceil_div(n_kt, nbi_chunk_tiles(s->kind_gate_up));
    const size_t up = gate_up_shared(n_chunks, 1) + n_kt * NBI_MOE_TILE_X_BYTES + ROW_PAD;
    return up <= c->rt.shared_max - 2048 && down_shared(s, 1) <= down_room(c);
}

template <nbi_weight_kind KIND>
static void launch_down(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *r, const float *h)
{
    down_args a = {};
    a.w = l->down;
    a.h = h;
    a.out = static_cast<float *>(r->out);
    a.slots = nbi_moe_slots_of(&l->shape, r);
    a.n_rows = r->n_rows;
    a.rows = r->n_rows < ROWS ? r->n_rows : ROWS;
    while (a.rows > 1 && down_shared(&l->shape, a.rows) > down_room(c)) a.rows--;
    const uint32_t units = a.rows * a.slots.n * nbi_chunks_of(KIND, a.w.first.n_kt);
    uint32_t warps = nbi_ceil_div(units, nbi_ceil_div(units, DOWN_WARPS));
    if (warps < 4) warps = 4;
    nbi_launch(&c->rt, dim3(a.w.first.n_rt, nbi_ceil_div(a.n_rows, a.rows)), dim3(warps * NBI_WARP),
               down_shared(&l->shape, a.rows),
               a.w.first.n_kt % nbi_chunk_tiles(KIND) ? down_kernel<KIND, false>
                                                      : down_kernel<KIND, true>,
               a);
}

size_t nbi_moe_gemv_workspace(const nbi_moe_shape *shape, uint32_t max_rows)
{
    return (size_t)max_rows * nbi_moe_n_slots(shape) * shape->inter * sizeof(float);
}

void nbi_moe_gemv_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    if (!a->n_rows) return;
    float *h = static_cast<float *>(a->workspace);
    if (l->shape.kind_gate_up == NBI_WEIGHT_F32)
        nbi_moe_plain_gate_up(c, l, a, h);
    else
        NBI_MOE_BY_KIND(l->shape.kind_gate_up, launch_gate_up, c, l, a, h);
    if (l->shape.kind_down == NBI_WEIGHT_F32)
        nbi_moe_plain_down(c, l, a, h);
    else
        NBI_MOE_BY_KIND(l->shape.kind_down, launch_down, c, l, a, h);
}
