/* Some rows: the weights of every expert that was chosen stream once for all of its rows. Three
 * kernels; same bits as moe_gemv.cu and moe_grouped.cu. Callers: moe_runners.cu.
 *
 *   gate_up  h of every (row, slot) pair
 *   down     y of every pair; asks for its first weights before gate_up has ended: gate_up lets it
 *            start only when the ids were there (its nbi_let_next() stands behind its
 *            nbi_wait_before()), and reads them past the L1 cache
 *   combine  y over the slots of a row, in their order
 *
 * Pairs are sorted by expert, in every block, and cut into entries of up to `cap` pairs of one
 * expert. The row tiles of all entries stand one behind the other and every block has an equal,
 * contiguous share of them, so that it needs x of few entries; a warp has every n-th tile of the
 * block, all chunks of it, and a ring of its own for its weights: no barriers but where x changes.
 * A shared expert has a pair of every row, more work in a tile than others: its tiles are shared
 * out apart. */
#include "backend/cuda/stream.h"
#include "moe/cuda/moe_tiles.h"

#define PAIRS_MAX 1152u
#define COLUMNS   8u  /* tokens of a matrix instruction */
#define ROW_PAD   64u /* bytes between converted rows: two neighbours never share banks */
#define SLOTS_MAX 64u /* converted rows */
#define BARRIERS  512u

/* Warps of a block. */
__host__ __device__ constexpr uint32_t warps_of(nbi_weight_kind kind)
{
    const uint32_t unit = nbi_stream_unit_bytes(kind);
    return unit > 4096 ? 8 : unit > 2304 ? 12 : 16;
}

/* Pairs of one expert: places first ... first + n - 1 of the sorted list. */
struct entry {
    uint32_t expert, first, n;
};

struct rows_args {
    nbi_moe_weights w;
    const float *x; /* rows of `cols` */
    float *out;     /* [pairs][rows of a matrix] */
    nbi_moe_slots slots;
    uint32_t n_pairs, n_experts; /* the shared one, too */
    uint32_t x_pairs;            /* pairs that share a row of x */
    uint32_t warps, stages;
    nbi_divisor rt;   /* row tiles of an entry */
    uint32_t cap;     /* pairs of an entry */
    uint32_t places;  /* converted rows that there is room for */
    uint32_t entries; /* of a block, most */
};

/* Shared memory of a block. */
struct rows_shared {
    uint64_t *full;            /* [warps][stages] */
    char *ring;                /* [warps][stages] units */
    char *x;                   /* [slots] */
    float *unit;               /* [chunks][slots + 2 COLUMNS] */
    uint32_t *count, *next;    /* [n_experts] pairs; next place */
    uint32_t *start;           /* [n_experts + 1] first place, entry << 16 */
    entry *mine;               /* entries of the block */
    uint16_t *pair, *unsorted; /* at a place */
};

__host__ __device__ inline uint32_t row_pitch(uint32_t n_kt)
{
    return n_kt * NBI_MOE_TILE_X_BYTES + ROW_PAD;
}

__host__ __device__ inline uint32_t unit_pitch(uint32_t slots)
{
    return slots + 2 * COLUMNS;
}

/* Bytes; with `base` also the places. */
__host__ __device__ inline uint32_t lay_out(rows_shared *s, char *base, const rows_args &a,
                                            uint32_t unit_bytes, uint32_t n_chunks)
{
    uint32_t at = 0;
    const auto take = [&](auto **to, uint32_t bytes) {
        *to = reinterpret_cast<decltype(*to + 0)>(base + at);
        at += (bytes + 15) / 16 * 16;
    };
    take(&s->full, BARRIERS);
    take(&s->ring, a.warps * a.stages * unit_bytes);
    take(&s->x, a.places * row_pitch(a.w.first.n_kt));
    take(&s->unit, n_chunks * unit_pitch(a.places) * 4);
    take(&s->count, a.n_experts * 4);
    take(&s->next, a.n_experts * 4);
    take(&s->start, (a.n_experts + 1) * 4);
    take(&s->mine, a.entries * (uint32_t)sizeof(entry));
    take(&s->pair, a.n_pairs * 2);
    take(&s->unsorted, a.n_pairs * 2);
    return at;
}

/* ---------------------------------------------------------------- pairs by expert */

static NBI_DEV uint32_t entries_of(uint32_t pairs, uint32_t cap)
{
    return (pairs + cap - 1) / cap;
}

/* One warp: start and next from the counts; a lane has experts one behind the other. */
static NBI_DEV void scan_experts(const rows_args &a, const rows_shared &s)
{
    const uint32_t lane = (uint32_t)nbi_lane(), each = (a.n_experts + 31) / 32;
    const uint32_t from = lane * each;
    const uint32_t to = from + each < a.n_experts ? from + each : a.n_experts;
    uint32_t own = 0; /* pairs, entries << 16 */
    for (uint32_t e = from; e < to; e++) own += s.count[e] | entries_of(s.count[e], a.cap) << 16;
    uint32_t sum = own;
#pragma unroll
    for (uint32_t d = 1; d < 32; d *= 2) {
        const uint32_t before = __shfl_up_sync(NBI_FULL_MASK, sum, d);
        if (lane >= d) sum += before;
    }
    if (lane == 31) s.start[a.n_experts] = sum;
    sum -= own;
    for (uint32_t e = from; e < to; e++) {
        s.start[e] = sum;
        s.next[e] = sum & 0xffffu;
        sum += s.count[e] | entries_of(s.count[e], a.cap) << 16;
    }
}

/* Pairs of an expert stand in order: blocks that share an entry must agree which pairs it has. Ids
 * are read past the L1 cache. */
static NBI_DEV void sort_pairs(const rows_args &a, const rows_shared &s)
{
    constexpr uint32_t EACH = (PAIRS_MAX + 255) / 256;
    int32_t id[EACH];
#pragma unroll
    for (uint32_t j = 0; j < EACH; j++) {
        const uint32_t i = j * blockDim.x + threadIdx.x;
        id[j] = i < a.n_pairs ? a.slots.expert_fresh(i) : -1;
    }
    const auto chosen = [&](uint32_t j) {
        return id[j] >= 0 && (uint32_t)id[j] < a.slots.n_experts;
    };
    for (uint32_t e = threadIdx.x; e < a.n_experts; e += blockDim.x)
        s.count[e] = e < a.slots.n_experts ? 0 : nbi_div(a.n_pairs, a.slots.by);
    __syncthreads();
#pragma unroll
    for (uint32_t j = 0; j < EACH; j++)
        if (chosen(j)) atomicAdd(&s.count[id[j]], 1u);
    __syncthreads();
    if (threadIdx.x < 32) scan_experts(a, s);
    __syncthreads();
#pragma unroll
    for (uint32_t j = 0; j < EACH; j++)
        if (chosen(j))
            s.unsorted[atomicAdd(&s.next[id[j]], 1u)] = (uint16_t)(j * blockDim.x + threadIdx.x);
    __syncthreads();
#pragma unroll
    for (uint32_t j = 0; j < EACH; j++) {
        if (id[j] < 0) continue;
        const uint32_t own = j * blockDim.x + threadIdx.x, n = s.count[id[j]];
        const uint32_t first = s.start[id[j]] & 0xffffu;
        uint32_t at = first;
        if (!chosen(j)) at += nbi_div(own, a.slots.by); /* every row has it */
        if (chosen(j))
            for (uint32_t q = first; q < first + n; q++) at += s.unsorted[q] < own;
        s.pair[at] = (uint16_t)own;
    }
}

/* Tiles of the block among those of entries that stand one behind the other. */
struct rows_share {
    uint32_t first, n; /* tiles, counted from the first of all entries */
    uint32_t entry, n_entries;

    NBI_DEV rows_share(const rows_args &a, uint32_t from_entry, uint32_t end_entry)
    {
        const uint32_t all = (end_entry - from_entry) * a.w.first.n_rt;
        const uint32_t begin = (uint32_t)((uint64_t)all * blockIdx.x / gridDim.x);
        const uint32_t end = (uint32_t)((uint64_t)all * (blockIdx.x + 1) / gridDim.x);
        first = from_entry * a.w.first.n_rt + begin;
        n = end - begin;
        entry = first / a.w.first.n_rt;
        n_entries = n ? (first + n - 1) / a.w.first.n_rt - entry + 1 : 0;
    }
};

/* The share's entries go to mine[at ...]. A barrier follows. */
static NBI_DEV void take_entries(const rows_args &a, const rows_shared &s, const rows_share &share,
                                 uint32_t at_mine)
{
    if (!share.n) return;
    const uint32_t first = share.entry, last = first + share.n_entries - 1;
    for (uint32_t e = threadIdx.x; e < a.n_experts; e += blockDim.x) {
        const uint32_t n = s.count[e], place = s.start[e] & 0xffffu, k0 = s.start[e] >> 16;
        const uint32_t end = k0 + entries_of(n, a.cap);
        for (uint32_t k = k0 > first ? k0 : first; k < end && k <= last; k++) {
            const uint32_t at = (k - k0) * a.cap;
            s.mine[at_mine + k - first] = {e, place + at, n - at < a.cap ? n - at : a.cap};
        }
    }
}

/* ---------------------------------------------------------------- products */

/* Places first ... first + n - 1 to slots slot0 ..., two chunks of a warp at a time. */
template <nbi_weight_kind KIND>
static NBI_DEV void convert_rows(const rows_args &a, const rows_shared &s, uint32_t first,
                                 uint32_t n, uint32_t slot0, uint32_t n_chunks)
{
    const uint32_t cols = a.w.first.cols, pitch = row_pitch(a.w.first.n_kt), all = n * n_chunks;
    const auto row = [&](uint32_t slot) {
        return a.x + (size_t)(s.pair[first + slot] / a.x_pairs) * cols;
    };
    const auto give = [&](nbi_moe_x_part &part, uint32_t slot, uint32_t c) {
        const float two_e = part.template give<KIND>(
            s.x + (slot0 + slot) * pitch + c * nbi_chunk_tiles(KIND) * NBI_MOE_TILE_X_BYTES, c,
            cols, 0);
        if (nbi_lane() == 0) s.unit[c * unit_pitch(a.places) + slot0 + slot] = two_e;
    };
    for (uint32_t i = threadIdx.x / 32; i < all; i += 2 * a.warps) {
        const uint32_t slot = i / n_chunks, c = i % n_chunks, j = i + a.warps;
        const uint32_t slot2 = j / n_chunks, c2 = j % n_chunks;
        nbi_moe_x_part one, two;
        one.take<KIND>(row(slot), c, cols);
        if (j < all) two.take<KIND>(row(slot2), c2, cols);
        give(one, slot, c);
        if (j < all) give(two, slot2, c2);
    }
}

/* A warp's tiles, one after the other: entry mine[e], row tile rt. */
struct rows_tiles {
    uint32_t e, rt, left;
    uint32_t i;                /* of the block's tiles */
    uint32_t n, first;         /* tiles of its first share, and where their entries begin */
    uint32_t second, e_second; /* of tile n and behind it, likewise */

    NBI_DEV rows_tiles(const rows_args &a, const rows_share &share, const rows_share &shared,
                       uint32_t warp)
        : i(warp), n(share.n), first(share.first - share.entry * a.rt.d),
          second(shared.first - shared.entry * a.rt.d - share.n), e_second(share.n_entries)
    {
        const uint32_t all = share.n + shared.n;
        left = all > warp ? (all - warp - 1) / a.warps + 1 : 0;
        find(a);
    }

    NBI_DEV void find(const rows_args &a)
    {
        const uint32_t at = i + (i < n ? first : second);
        e = nbi_div(at, a.rt);
        rt = at - e * a.rt.d;
        if (i >= n) e += e_second;
    }

    NBI_DEV void next(const rows_args &a)
    {
        left--;
        i += a.warps;
        find(a);
    }
};

/* What a warp asks for: the units of its tiles in order, the n-th of all into stage n % stages. */
template <nbi_weight_kind KIND> struct rows_asker {
    static constexpr uint32_t CT = nbi_chunk_tiles(KIND), TILE = nbi_tile_bytes(KIND);
    static constexpr uint32_t SCALES = KIND == NBI_WEIGHT_NVFP4 ? 64u : 0u;

    rows_tiles tiles;
    const char *data, *scales; /* of the next unit */
    uint32_t kt;

    NBI_DEV rows_asker(const rows_args &a, const rows_shared &s, const rows_tiles &t) : tiles(t)
    {
        begin(a, s);
    }

    NBI_DEV void begin(const rows_args &a, const rows_shared &s)
    {
        kt = 0;
        data = scales = nullptr;
        if (!tiles.left) return;
        const size_t first = (size_t)tiles.rt * a.w.first.n_kt;
        const size_t expert = s.mine[tiles.e].expert * a.w.stride;
        data = static_cast<const char *>(a.w.first.data) + expert + first * TILE;
        scales = static_cast<const char *>(a.w.first.scales) + expert + first * SCALES;
    }

    NBI_DEV void ask(const rows_args &a, const rows_shared &s, char *to, uint64_t *full)
    {
        if (!tiles.left) return;
        const uint32_t left = a.w.first.n_kt - kt, n = left < CT ? left : CT;
        if (nbi_lane() == 0) {
            nbi_bar_expect(full, n * (TILE + SCALES));
            nbi_copy_bulk(to, data, n * TILE, full);
            if (SCALES) nbi_copy_bulk(to + CT * TILE, scales, n * SCALES, full);
        }
        data += CT * TILE;
        scales += CT * SCALES;
        kt += CT;
        if (kt < a.w.first.n_kt) return;
        tiles.next(a);
        begin(a, s);
    }
};

/* A warp's ring. */
struct rows_ring {
    char *units;
    uint64_t *full;
    uint32_t stage, parity;

    NBI_DEV void next(uint32_t stages)
    {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

/* p += tile k of a unit; x[j] is where the lane's token of column tile j has the chunk. */
template <nbi_weight_kind KIND, uint32_t NT>
static NBI_DEV void add_tile(float p[NT][4], const nbi_tile<KIND> &tile, const char *const x[NT],
                             uint32_t k)
{
#pragma unroll
    for (uint32_t w = 0; w < NBI_TILE_STEPS; w += 2) {
        uint32_t a[2][4];
        tile.fragment(a[0], w);
        tile.fragment(a[1], w + 1);
#pragma unroll
        for (uint32_t j = 0; j < NT; j++) {
            const nbi_u32x4 b =
                *reinterpret_cast<const nbi_u32x4 *>(x[j] + k * NBI_MOE_TILE_X_BYTES + w / 2 * 64);
            nbi_tile_mma<KIND>(p[j], a[0], b.v);
            nbi_tile_mma<KIND>(p[j], a[1], b.v + 2);
        }
    }
}

/* y of a row tile, up to 8 NT pairs: slots slot ... slot + n - 1. A unit's weights go to registers
 * at once where there is room, so that its place in the ring is asked for again early. */
template <nbi_weight_kind KIND, uint32_t NT>
static NBI_DEV void multiply(float y[NT][4], const rows_args &a, const rows_shared &s,
                             rows_asker<KIND> *asker, rows_ring *ring, const nbi_cuda_packed &w,
                             uint32_t rt, uint32_t slot, uint32_t n)
{
    constexpr uint32_t CT = nbi_chunk_tiles(KIND), UNIT = nbi_stream_unit_bytes(KIND);
    constexpr bool EARLY = nbi_tile_bytes(KIND) <= 1024;
    const uint32_t lane = (uint32_t)nbi_lane(), t = lane % 4;
    const char *x[NT];
    const float *unit = s.unit + slot + 2 * t;
#pragma unroll
    for (uint32_t j = 0; j < NT; j++) {
        const uint32_t column = j * COLUMNS + lane / 4;
        x[j] = s.x + (slot + (column < n ? column : n - 1)) * row_pitch(w.n_kt) + t * 16;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) y[j][i] = 0;
    }
#pragma unroll 1
    for (uint32_t kt = 0, c = 0; kt < w.n_kt; kt += CT, c++) {
        const uint32_t tiles = w.n_kt - kt < CT ? w.n_kt - kt : CT;
        const nbi_f32x2 block = nbi_tile_block_scale<KIND>(w, rt, c);
        char *from = ring->units + ring->stage * UNIT;
        uint64_t *full = ring->full + ring->stage;
        const char *scales = from + CT * nbi_tile_bytes(KIND);
        float p[NT][4] = {};
        nbi_bar_wait(full, ring->parity);
        if (EARLY) {
            nbi_tile<KIND> tile[CT];
#pragma unroll
            for (uint32_t k = 0; k < CT; k++)
                if (k < tiles) nbi_stream_tile<KIND>(&tile[k], from, scales, k);
            __syncwarp();
            asker->ask(a, s, from, full);
#pragma unroll
            for (uint32_t k = 0; k < CT; k++)
                if (k < tiles) add_tile<KIND, NT>(p, tile[k], x, k);
        } else {
#pragma unroll 1
            for (uint32_t k = 0; k < tiles; k++) {
                nbi_tile<KIND> tile;
                nbi_stream_tile<KIND>(&tile, from, scales, k);
                add_tile<KIND, NT>(p, tile, x, k);
            }
            __syncwarp();
            asker->ask(a, s, from, full);
        }
        ring->next(a.stages);
#pragma unroll
        for (uint32_t j = 0; j < NT; j++) {
            const float two[2] = {unit[j * COLUMNS], unit[j * COLUMNS + 1]};
            nbi_chunk_add(y[j], p[j], two, block);
            x[j] += CT * NBI_MOE_TILE_X_BYTES;
        }
        unit += unit_pitch(a.places);
    }
}

/* One row tile of an entry, and out. */
template <nbi_weight_kind KIND, uint32_t NT, bool GATE_UP>
static NBI_DEV void do_tile(const rows_args &a, const rows_shared &s, rows_asker<KIND> *asker,
                            rows_ring *ring, const entry &k, uint32_t rt, uint32_t slot)
{
    const uint32_t g = (uint32_t)nbi_lane() / 4, t = (uint32_t)nbi_lane() % 4;
    const nbi_cuda_packed w = nbi_moe_expert(a.w, k.expert);
    const float low = w.row_scale[rt * 16 + g], high = w.row_scale[rt * 16 + 8 + g];
    float y[NT][4];
    multiply<KIND, NT>(y, a, s, asker, ring, w, rt, slot, k.n);
    const uint32_t row = rt * (GATE_UP ? 8 : 16) + g;
#pragma unroll
    for (uint32_t i = 0; i < 2 * NT; i++) {
        const uint32_t column = i / 2 * COLUMNS + 2 * t + i % 2;
        if (column >= k.n) continue;
        const float y_low = y[i / 2][i % 2] * low, y_high = y[i / 2][2 + i % 2] * high;
        float *to = a.out + (size_t)s.pair[k.first + column] * w.rows + row;
        if (GATE_UP) {
            if (row < w.rows) to[0] = nbi_moe_swiglu(y_low, y_high);
        } else {
            if (row < w.rows) to[0] = y_low;
            if (row + 8 < w.rows) to[8] = y_high;
        }
    }
}

/* Entries mine[from ... to - 1] of consecutive places for which there is room; returns their pairs.
 */
static NBI_DEV uint32_t take_run(const rows_shared &s, uint32_t from, uint32_t *to, uint32_t end,
                                 uint32_t room)
{
    uint32_t n = 0;
    for (*to = from; *to < end; ++*to) {
        const entry &k = s.mine[*to];
        if (k.first + k.n - s.mine[from].first > room) break;
        n = k.first + k.n - s.mine[from].first;
    }
    return n;
}

/* MOST: column tiles of an entry. */
template <nbi_weight_kind KIND, uint32_t MOST, bool GATE_UP>
static __global__ void __launch_bounds__(warps_of(KIND) * NBI_WARP, 1)
    rows_kernel(const __grid_constant__ rows_args a)
{
    constexpr uint32_t UNIT = nbi_stream_unit_bytes(KIND);
    const uint32_t n_chunks = nbi_chunks_of(KIND, a.w.first.n_kt);
    const uint32_t warp = __shfl_sync(NBI_FULL_MASK, threadIdx.x / NBI_WARP, 0);
    rows_shared s;
    lay_out(&s, nbi_shared<char>(), a, UNIT, n_chunks);
    if (threadIdx.x < a.warps * a.stages) nbi_bar_init(s.full + threadIdx.x, 1);
    nbi_bar_init_done();
    if (GATE_UP) nbi_wait_before();
    nbi_let_next(); /* of gate_up not before the wait: down reads the ids that we waited for */
    sort_pairs(a, s);

    const uint32_t end = s.start[a.n_experts] >> 16;
    const uint32_t routed = a.slots.n > a.slots.top_k ? s.start[a.n_experts - 1] >> 16 : end;
    const rows_share share(a, 0, routed), shared(a, routed, end);
    const uint32_t n_mine = share.n_entries + shared.n_entries;
    take_entries(a, s, share, 0);
    take_entries(a, s, shared, share.n_entries);
    __syncthreads();
    rows_tiles own(a, share, shared, warp);
    rows_asker<KIND> asker(a, s, own);
    rows_ring ring = {s.ring + warp * a.stages * UNIT, s.full + warp * a.stages, 0, 0};
    for (uint32_t i = 0; i < a.stages; i++) asker.ask(a, s, ring.units + i * UNIT, ring.full + i);
    if (!GATE_UP) nbi_wait_before();

    for (uint32_t from = 0, to = 0; from < n_mine; from = to) {
        const uint32_t split = share.n_entries;
        const uint32_t n = take_run(s, from, &to, from < split ? split : n_mine, a.places);
        const uint32_t cut = to, place = s.mine[from].first;
        const bool both = from < split && cut == split; /* and the shared expert's */
        const uint32_t n_shared = both ? take_run(s, cut, &to, n_mine, a.places - n) : 0;
        const uint32_t place_shared = n_shared ? s.mine[cut].first : 0;
        if (from) __syncthreads(); /* the rows before are done with */
        convert_rows<KIND>(a, s, place, n, 0, n_chunks);
        convert_rows<KIND>(a, s, place_shared, n_shared, n, n_chunks);
        __syncthreads();
        for (; own.left && own.e < to; own.next(a)) {
            const entry k = s.mine[own.e];
            const uint32_t slot = own.e < cut ? k.first - place : k.first - place_shared + n;
            if (MOST > 1 && k.n > COLUMNS)
                do_tile<KIND, MOST, GATE_UP>(a, s, &asker, &ring, k, own.rt, slot);
            else
                do_tile<KIND, 1, GATE_UP>(a, s, &asker, &ring, k, own.rt, slot);
        }
    }
}

/* out: over the slots of a row, in order; a thread has four columns. */
static __global__ void __launch_bounds__(128)
    rows_combine_kernel(float *out, const float *y, const nbi_moe_slots slots, uint32_t hidden)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t c = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    const uint32_t pair0 = blockIdx.y * slots.n;
    if (c >= hidden) return;
    nbi_f32x4 sum = {{0, 0, 0, 0}};
#pragma unroll 4
    for (uint32_t k = 0; k < slots.n; k++) {
        const int32_t e = slots.expert(pair0 + k);
        const float weight = slots.weight(pair0 + k);
        if (e < 0) continue;
        const nbi_f32x4 v =
            *reinterpret_cast<const nbi_f32x4 *>(y + (size_t)(pair0 + k) * hidden + c);
#pragma unroll
        for (int i = 0; i < 4; i++) sum.v[i] = fmaf(weight, v.v[i], sum.v[i]);
    }
    *reinterpret_cast<nbi_f32x4 *>(out + (size_t)blockIdx.y * hidden + c) = sum;
}

/* ---------------------------------------------------------------- launches */

/* Entries that pairs can make, most. */
static uint32_t most_entries(uint32_t n_pairs, uint32_t n_experts, uint32_t cap)
{
    const uint32_t n = n_pairs / cap + n_experts;
    return n < n_pairs ? n : n_pairs;
}

/* How a product is cut; false when it does not fit. Half of the shared memory, so that the next
 * kernel's rings fill while this one ends, where that leaves room for the rows of three entries. */
static bool divide(rows_args *k, uint32_t *shared, uint32_t *grid, const nbi_cuda *c,
                   const nbi_moe_weights &w, const nbi_moe_shape *s, uint32_t n_rows)
{
    const nbi_weight_kind kind = w.first.kind;
    const uint32_t unit = nbi_stream_unit_bytes(kind), n_chunks = nbi_chunks_of(kind, w.first.n_kt);
    const uint32_t each = n_rows * s->top_k / s->n_experts; /* pairs of an expert of the ids */
    *k = {};
    k->w = w;
    k->n_pairs = n_rows * nbi_moe_n_slots(s);
    k->n_experts = nbi_moe_n_all(s);
    k->warps = warps_of(kind);
    k->stages = unit > 2304 ? 2 : 3;
    k->rt = nbi_divisor_of(w.first.n_rt);
    k->cap = each >= 4 ? 2 * COLUMNS : COLUMNS;
    k->entries = k->n_pairs; /* more than enough, until the grid is known */
    rows_shared unused;
    const uint32_t fixed = lay_out(&unused, nullptr, *k, unit, n_chunks) + 64;
    const uint32_t row = row_pitch(w.first.n_kt) + n_chunks * 4;
    const uint32_t all = (uint32_t)c->rt.shared_max, two = all / 2 - 512;
    uint32_t slots = two > fixed ? (two - fixed) / row : 0;
    const uint32_t wanted = 3 * (each + 1);
    if (slots < (wanted < k->n_pairs ? wanted : k->n_pairs))
        slots = all > fixed ? (all - fixed) / row : 0;
    if (slots > SLOTS_MAX) slots = SLOTS_MAX;
    if (slots > k->n_pairs) slots = k->n_pairs;
    k->places = slots;
    if (slots < 2) return false;
    if (k->cap > slots) k->cap = slots;
    const uint32_t entries = most_entries(k->n_pairs, k->n_experts, k->cap);
    *grid = entries * w.first.n_rt;
    if (*grid > (uint32_t)c->rt.n_sms) *grid = (uint32_t)c->rt.n_sms;
    k->entries = entries / *grid + 3 + (s->n_shared ? nbi_ceil_div(n_rows, k->cap) / *grid + 2 : 0);
    if (k->entries > k->n_pairs) k->entries = k->n_pairs;
    *shared = lay_out(&unused, nullptr, *k, unit, n_chunks);
    return *shared <= all;
}

bool nbi_moe_rows_fits(const nbi_cuda *c, const nbi_moe_layer *l, uint32_t n_rows)
{
    const nbi_moe_shape *s = &l->shape;
    if (c->rt.sm < 90 || n_rows < 2 || s->w4a4 || nbi_moe_has_f32(s)) return false;
    if (n_rows * nbi_moe_n_slots(s) > PAIRS_MAX || s->hidden % 4 || s->inter % 4) return false;
    rows_args k;
    uint32_t shared, grid;
    return divide(&k, &shared, &grid, c, l->gate_up, s, n_rows) &&
           divide(&k, &shared, &grid, c, l->down, s, n_rows);
}

template <nbi_weight_kind KIND, bool GATE_UP>
static void launch(nbi_cuda *c, const rows_args &k, uint32_t shared, uint32_t grid)
{
    if (k.cap > COLUMNS)
        nbi_launch(&c->rt, dim3(grid), dim3(k.warps * NBI_WARP), shared,
                   rows_kernel<KIND, 2, GATE_UP>, k);
    else
        nbi_launch(&c->rt, dim3(grid), dim3(k.warps * NBI_WARP), shared,
                   rows_kernel<KIND, 1, GATE_UP>, k);
}

template <nbi_weight_kind KIND>
static void launch_gate_up(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, float *h)
{
    rows_args k;
    uint32_t shared, grid;
    divide(&k, &shared, &grid, c, l->gate_up, &l->shape, a->n_rows);
    k.x = static_cast<const float *>(a->x);
    k.slots = nbi_moe_slots_of(&l->shape, a);
    k.x_pairs = k.slots.n;
    k.out = h;
    launch<KIND, true>(c, k, shared, grid);
}

template <nbi_weight_kind KIND>
static void launch_down(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a, const float *h,
                        float *y)
{
    rows_args k;
    uint32_t shared, grid;
    divide(&k, &shared, &grid, c, l->down, &l->shape, a->n_rows);
    k.x = h;
    k.x_pairs = 1;
    k.out = y;
    k.slots = nbi_moe_slots_of(&l->shape, a);
    launch<KIND, false>(c, k, shared, grid);
}

size_t nbi_moe_rows_workspace(const nbi_moe_shape *s, uint32_t max_rows)
{
    const uint32_t most = PAIRS_MAX / nbi_moe_n_slots(s);
    const size_t pairs = (size_t)(max_rows < most ? max_rows : most) * nbi_moe_n_slots(s);
    return pairs * ((size_t)s->inter + s->hidden) * sizeof(float);
}

void nbi_moe_rows_run(nbi_cuda *c, const nbi_moe_layer *l, const nbi_moe_args *a)
{
    const nbi_moe_shape *s = &l->shape;
    float *h = static_cast<float *>(a->workspace);
    float *y = h + (size_t)a->n_rows * nbi_moe_n_slots(s) * s->inter;
    NBI_MOE_BY_KIND(s->kind_gate_up, launch_gate_up, c, l, a, h);
    NBI_MOE_BY_KIND(s->kind_down, launch_down, c, l, a, h, y);
    nbi_launch(&c->rt, dim3(nbi_ceil_div(s->hidden, 512), a->n_rows), dim3(128), 0,
               rows_combine_kernel, static_cast<float *>(a->out), static_cast<const float *>(y),
               nbi_moe_slots_of(s, a), s->hidden);
}
