/* Attention of few rows of each sequence, heads of 64 or 128 values over a cache in BF16 or E4M3.
 * Callers: attend_gqa.cu, attention_gqa.cu.
 *
 * A block of 8 warps has 16 slots, pairs of a row and a query head of one kv head, and walks over
 * tiles of 64 positions. Scores: a warp has 8 of the positions; probabilities: two of the slots;
 * values: an eighth of the columns. None of them cuts a sum of attend_gqa.cu in two, so the bits
 * are the same. Splits go to as many blocks as fill the device; the last block of a group to
 * arrive merges them.
 *
 * Where a row is its sequence's only one, its block norms and turns the queries, the key, and
 * appends: one launch instead of three. The cache of the steps before is asked for while the
 * kernel before still runs. */
#include "backend/cuda/attend.h"

#define TILE    64 /* positions: a page */
#define SLOTS   16
#define WARPS   8
#define THREADS (WARPS * NBI_WARP)
#define STAGES  2
#define P_ROW   (TILE + 8)

/* Rows in shared memory lie 16 bytes further apart, so that eight of them hit all banks. */
template <int D> struct alignas(16) block_memory {
    uint16_t k[STAGES][TILE][D + 8], v[STAGES][TILE][D + 8];
    uint16_t q_hi[SLOTS][D + 8], q_lo[SLOTS][D + 8];
    float score[SLOTS][P_ROW];
    uint16_t p_hi[SLOTS][P_ROW], p_lo[SLOTS][P_ROW];
    alignas(16) uint32_t new_k[D / 2]; /* pairs */
    uint16_t new_v[D];
    uint8_t new_codes[2][D]; /* E4M3: of the key, of the value, and their scales */
    float new_scale[2];
    float row[WARPS][D];
    float cos[D / 2], sin[D / 2];          /* of the new position */
    float keep[SLOTS], m[SLOTS], l[SLOTS]; /* m, l: of a split that ends */
    nbi_attend_slot slot[SLOTS];
    bool last;
};

/* What a block does: tiles [begin, end) of a group, whole splits. */
struct block_part {
    nbi_attend_group g;
    uint32_t kv, slot0, begin, end;
    uint32_t blocks; /* of the group, that do anything */
    uint32_t cached; /* positions whose keys and values are in the cache */
    const int32_t *pages;
    size_t head_at;
};

/* False: nothing. */
NBI_DEV bool find_part(const nbi_cuda_attend &a, uint32_t group_rows, bool appends, block_part *p)
{
    /* the longest rows first */
    if (!nbi_attend_group_of(a, a.n_rows - 1 - blockIdx.x, group_rows, &p->g)) return false;
    const uint32_t parts = gridDim.y / a.n_kv, per_split = p->g.split / TILE;
    p->kv = blockIdx.y / parts;
    p->slot0 = blockIdx.y % parts * SLOTS;
    if (p->slot0 >= p->g.n_rows * (a.n_heads / a.n_kv)) return false;
    const uint32_t tiles = (p->g.n + TILE - 1) / TILE, many = (tiles + per_split - 1) / per_split;
    const uint32_t each = (many + gridDim.z - 1) / gridDim.z;
    p->blocks = (many + each - 1) / each;
    p->begin = blockIdx.z * each * per_split;
    if (p->begin >= tiles) return false;
    p->end = p->begin + each * per_split < tiles ? p->begin + each * per_split : tiles;
    p->cached = appends ? p->g.n - 1 : p->g.n;
    p->pages = a.page_table + (size_t)p->g.seq * a.page_stride;
    p->head_at = p->kv * a.kv_head;
    return true;
}

/* Keys and values of a tile on their way to a stage; zeros behind what is cached. */
template <int D, bool CODES>
NBI_DEV void load_tile(const nbi_cuda_attend &a, const block_part &p, uint32_t tile, int32_t page,
                       block_memory<D> *s)
{
    const size_t at = (size_t)page * a.kv_page + p.head_at;
    if (CODES) {
        const uint8_t *k = static_cast<const uint8_t *>(a.k) + at;
        const uint8_t *v = static_cast<const uint8_t *>(a.v) + at;
        const uint32_t stage = (tile - p.begin) % STAGES;
#pragma unroll
        for (int i = threadIdx.x; i < TILE * (D / 16); i += THREADS) {
            const int row = i / (D / 16), c = i % (D / 16) * 16;
            const bool take = tile * TILE + row < p.cached;
            nbi_codes_copy<D>(s->k[stage][row], c, k + row * D, k + TILE * D, row, take);
            nbi_codes_copy<D>(s->v[stage][row], c, v + row * D, v + TILE * D, row, take);
        }
        return;
    }
    const uint16_t *k = static_cast<const uint16_t *>(a.k) + at;
    const uint16_t *v = static_cast<const uint16_t *>(a.v) + at;
    const uint32_t stage = (tile - p.begin) % STAGES;
#pragma unroll
    for (int i = threadIdx.x; i < TILE * (D / 8); i += THREADS) {
        const int row = i / (D / 8), c = i % (D / 8) * 8;
        const bool take = tile * TILE + row < p.cached;
        nbi_copy_async(&s->k[stage][row][c], k + row * D + c, take);
        nbi_copy_async(&s->v[stage][row][c], v + row * D + c, take);
    }
}

/* Codes that have come, of the rows that the warp asked for. */
template <int D> NBI_DEV void decode_tile(block_memory<D> *s, uint32_t stage)
{
#pragma unroll
    for (int i = threadIdx.x; i < TILE * (D / 16); i += THREADS) {
        const int row = i / (D / 16), slot[2] = {row, row};
        uint16_t *const rows[2] = {s->k[stage][row], s->v[stage][row]};
        nbi_codes_decode<D>(rows, slot, i % (D / 16) * 16);
    }
}

/* ---------------------------------------------------------------- queries */

template <int D> NBI_DEV void load_queries(const nbi_cuda_attend &a, block_memory<D> *s)
{
    for (uint32_t i = threadIdx.x / NBI_WARP; i < SLOTS; i += WARPS) {
        const nbi_attend_slot slot = s->slot[i];
        const float *q = a.q + slot.row * a.q_row + slot.head * a.q_head;
        for (uint32_t c = 2 * nbi_lane(); c < D; c += 2 * NBI_WARP)
            nbi_halves(slot.n ? q[c] : 0, slot.n ? q[c + 1] : 0,
                       reinterpret_cast<uint32_t *>(&s->q_hi[i][c]),
                       reinterpret_cast<uint32_t *>(&s->q_lo[i][c]));
    }
}

/* A head as the product before left it, in a warp's registers: values lane, lane + 32, ... */
template <int D> struct head_values {
    float x[D / NBI_WARP], weight[D / NBI_WARP];
    bool normed;
};

template <int D> NBI_DEV head_values<D> load_head(const float *x, const float *weight)
{
    head_values<D> h;
    h.normed = weight != NULL;
#pragma unroll
    for (int i = 0; i < D / NBI_WARP; i++) {
        h.x[i] = x[nbi_lane() + NBI_WARP * i];
        h.weight[i] = weight ? weight[nbi_lane() + NBI_WARP * i] : 1;
    }
    return h;
}

/* Normed and turned, as gqa_append_kernel does it, into the warp's row. */
template <int D>
NBI_DEV void turn_head(const nbi_gqa_append &n, const head_values<D> &h, const block_memory<D> *s,
                       float *row)
{
    float r = 1, sum = 0;
    if (h.normed) {
#pragma unroll
        for (int i = 0; i < D / NBI_WARP; i++) sum = fmaf(h.x[i], h.x[i], sum);
        r = nbi_gqa_factor(sum, D, n.eps);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / NBI_WARP; i++)
        row[nbi_lane() + NBI_WARP * i] = h.normed ? h.x[i] * r * h.weight[i] : h.x[i];
    __syncwarp();
#pragma unroll
    for (uint32_t j = 0; j < D / 2 / NBI_WARP; j++) {
        const uint32_t i = nbi_lane() + NBI_WARP * j;
        if (i >= n.rope.dim / 2) break;
        uint32_t iu, iv;
        nbi_rope_pair(n.rope, i, &iu, &iv);
        nbi_rope_turn_by(s->cos[i], s->sin[i], row + iu, row + iv);
    }
    __syncwarp();
}

/* The warp's row as a query, or as the new key. */
template <int D> NBI_DEV void put_query(const float *row, uint32_t slot, block_memory<D> *s)
{
#pragma unroll
    for (int c = 2 * nbi_lane(); c < D; c += 2 * NBI_WARP)
        nbi_halves(row[c], row[c + 1], reinterpret_cast<uint32_t *>(&s->q_hi[slot][c]),
                   reinterpret_cast<uint32_t *>(&s->q_lo[slot][c]));
}

template <int D> NBI_DEV void put_key(const float *row, block_memory<D> *s)
{
#pragma unroll
    for (int c = 2 * nbi_lane(); c < D; c += 2 * NBI_WARP)
        s->new_k[c / 2] = nbi_to_bf16x2(row[c], row[c + 1]);
}

/* A row as the new key or value of a cache of codes, by a warp: what the codes stand for, and
 * these. */
template <int D> NBI_DEV void put_codes(const float *row, int is_v, block_memory<D> *s)
{
    uint8_t *codes = s->new_codes[is_v];
    nbi_codes_store(codes, &s->new_scale[is_v], D, 0, 1, [=](uint32_t i) { return row[i]; });
    __syncwarp();
    uint32_t *to = is_v ? reinterpret_cast<uint32_t *>(s->new_v) : s->new_k;
    const float scale = s->new_scale[is_v];
    for (int c = nbi_lane(); c < D / 2; c += NBI_WARP)
        to[c] = nbi_to_bf16x2(nbi_from_e4m3(codes[2 * c]) * scale,
                              nbi_from_e4m3(codes[2 * c + 1]) * scale);
}

template <int D, bool CODES> NBI_DEV void put_new_key(const float *row, block_memory<D> *s)
{
    if (CODES)
        put_codes<D>(row, 0, s);
    else
        put_key<D>(row, s);
}

/* The slots' queries, and, where the block has the last position, the key and the value, from the
 * append's arguments: a warp takes head after head, the key behind the queries. */
template <int D, bool CODES>
NBI_DEV void make_rows(const nbi_cuda_attend &a, const nbi_gqa_append &n, const block_part &p,
                       block_memory<D> *s)
{
    const uint32_t ratio = a.n_heads / a.n_kv, warp = threadIdx.x / NBI_WARP;
    const uint32_t heads = ratio - p.slot0 < SLOTS ? ratio - p.slot0 : SLOTS;
    const size_t t = a.first + p.g.row, kv = t * a.n_kv + p.kv;
    const bool appends = p.end * TILE >= p.g.n;
    const float *q = n.q + (t * a.n_heads + p.kv * ratio + p.slot0) * D;
    float *row = s->row[warp];
    for (uint32_t i = warp; i < heads + appends; i += 2 * WARPS) {
        const uint32_t j = i + WARPS;
        const bool two = j < heads + appends;
        const head_values<D> x =
            i < heads ? load_head<D>(q + i * D, n.q_norm) : load_head<D>(n.k + kv * D, n.k_norm);
        head_values<D> y = {};
        if (two)
            y = j < heads ? load_head<D>(q + j * D, n.q_norm)
                          : load_head<D>(n.k + kv * D, n.k_norm);
        turn_head<D>(n, x, s, row);
        if (i < heads)
            put_query<D>(row, i, s);
        else
            put_new_key<D, CODES>(row, s);
        if (!two) continue;
        turn_head<D>(n, y, s, row);
        if (j < heads)
            put_query<D>(row, j, s);
        else
            put_new_key<D, CODES>(row, s);
    }
    if (CODES) {
        if (appends && warp == WARPS - 1) put_codes<D>(n.v + kv * D, 1, s);
        return;
    }
    if (appends && threadIdx.x >= THREADS - D)
        s->new_v[threadIdx.x - (THREADS - D)] =
            nbi_to_bf16(n.v[kv * D + threadIdx.x - (THREADS - D)]);
}

/* The new position into its stage, and, by the first of the blocks that have it, into the cache. */
template <int D, bool CODES>
NBI_DEV void put_new(const nbi_cuda_attend &a, const nbi_gqa_append &n, const block_part &p,
                     uint32_t tile, block_memory<D> *s)
{
    const uint32_t i = threadIdx.x, row = p.cached % TILE, stage = (tile - p.begin) % STAGES;
    if (i < D / 4) {
        const bool is_v = i >= D / 8;
        const uint32_t c = i % (D / 8) * 8;
        const void *from = is_v ? static_cast<void *>(s->new_v + c) : s->new_k + c / 2;
        const nbi_u32x4 x = *static_cast<const nbi_u32x4 *>(from);
        *reinterpret_cast<nbi_u32x4 *>((is_v ? s->v : s->k)[stage][row] + c) = x;
        const size_t at = (size_t)p.pages[tile] * a.kv_page + p.head_at + row * D + c;
        if (!CODES && p.slot0 == 0)
            *reinterpret_cast<nbi_u32x4 *>(static_cast<uint16_t *>(is_v ? n.cache_v : n.cache_k) +
                                           at) = x;
    }
    if (CODES && p.slot0 == 0 && i < D / 8) {
        const int is_v = i >= D / 16, c = i % (D / 16) * 16;
        uint8_t *to = static_cast<uint8_t *>(is_v ? n.cache_v : n.cache_k) +
                      (size_t)p.pages[tile] * a.kv_page + p.head_at;
        *reinterpret_cast<nbi_u32x4 *>(to + row * D + c) =
            *reinterpret_cast<const nbi_u32x4 *>(s->new_codes[is_v] + c);
        if (c == 0) reinterpret_cast<float *>(to + TILE * D)[row] = s->new_scale[is_v];
    }
    __syncthreads();
}

/* The slots' queries in a warp's registers. */
template <int D> struct queries {
    uint32_t hi[D / 16][4], lo[D / 16][4];
};

template <int D> NBI_DEV queries<D> take_queries(const block_memory<D> *s)
{
    const int row = nbi_lane() & 15, col = (nbi_lane() >> 4) * 8;
    queries<D> q;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        nbi_ldmatrix(q.hi[i], &s->q_hi[row][16 * i + col]);
        nbi_ldmatrix(q.lo[i], &s->q_lo[row][16 * i + col]);
    }
    return q;
}

/* ---------------------------------------------------------------- a tile */

/* Scores of the warp's 8 positions. */
template <int D>
NBI_DEV void score_tile(const queries<D> &q, const uint16_t (*k)[D + 8], block_memory<D> *s)
{
    const int lane = nbi_lane(), pos = threadIdx.x / NBI_WARP * 8, g = lane / 4, t = lane % 4;
    float d[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < D; c += 32) {
        uint32_t b[4];
        nbi_ldmatrix(b, &k[pos + (lane & 7)][c + (lane >> 3) * 8]);
        nbi_mma_bf16(d, q.hi[c / 16], b);
        nbi_mma_bf16(d, q.lo[c / 16], b);
        nbi_mma_bf16(d, q.hi[c / 16 + 1], b + 2);
        nbi_mma_bf16(d, q.lo[c / 16 + 1], b + 2);
    }
    *reinterpret_cast<nbi_f32x2 *>(&s->score[g][pos + 2 * t]) = {{d[0], d[1]}};
    *reinterpret_cast<nbi_f32x2 *>(&s->score[g + 8][pos + 2 * t]) = {{d[2], d[3]}};
}

/* A slot's running maximum, and this thread's share of its sum. 16 threads per slot: thread (j, t)
 * has positions 16 j + 2t, + 1, + 8, + 9; those of one t have the same share, what a lane of
 * attend_gqa.cu has. */
struct running {
    float m, l;
};

NBI_DEV int own_slot()
{
    return threadIdx.x / NBI_WARP * 2 + nbi_lane() / 16;
}

/* Scores of a tile to probabilities relative to the new maximum. n: positions from the tile's first
 * on that the slot sees. */
template <int D>
NBI_DEV void fold_tile(block_memory<D> *s, running *r, int n, float scale, bool ends)
{
    const int slot = own_slot(), t = nbi_lane() % 4, c = nbi_lane() % 16 / 4 * 16 + 2 * t;
    float x[4], top = r->m;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = c + i / 2 * 8 + i % 2;
        x[i] = at < n ? s->score[slot][at] : -INFINITY;
        top = x[i] > top ? x[i] : top;
    }
    for (int d = 1; d < 16; d *= 2) {
        const float other = __shfl_xor_sync(NBI_FULL_MASK, top, d);
        top = other > top ? other : top;
    }
    const float base = top == -INFINITY ? 0 : -(top * scale);
    const float keep = nbi_attend_keep(r->m, top, scale, base);
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = exp2f(fmaf(x[i], scale, base));
    float sum = (x[0] + x[1]) + (x[2] + x[3]);
    sum += __shfl_xor_sync(NBI_FULL_MASK, sum, 4);
    sum += __shfl_xor_sync(NBI_FULL_MASK, sum, 8);
    r->m = top;
    r->l = fmaf(r->l, keep, sum);
#pragma unroll
    for (int i = 0; i < 4; i += 2)
        nbi_halves(x[i], x[i + 1], reinterpret_cast<uint32_t *>(&s->p_hi[slot][c + 4 * i]),
                   reinterpret_cast<uint32_t *>(&s->p_lo[slot][c + 4 * i]));
    if (nbi_lane() % 16 == 0) s->keep[slot] = keep;
    if (!ends) return;
    float l = r->l + __shfl_xor_sync(NBI_FULL_MASK, r->l, 1);
    l += __shfl_xor_sync(NBI_FULL_MASK, l, 2);
    if (nbi_lane() % 16 == 0) {
        s->m[slot] = r->m;
        s->l[slot] = l;
    }
    *r = {-INFINITY, 0};
}

/* The warp's columns: of rows g (0, 1) and g + 8 (2, 3), columns 8 j + 2t, + 1. */
template <int D> struct columns {
    static constexpr int each = D / WARPS;
    float o[each / 8][4];
};

template <int D> NBI_DEV void clear(columns<D> &x)
{
#pragma unroll
    for (int j = 0; j < columns<D>::each / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) x.o[j][i] = 0;
}

template <int D>
NBI_DEV void add_values(columns<D> &x, const block_memory<D> *s, const uint16_t (*v)[D + 8])
{
    const int lane = nbi_lane(), g = lane / 4, col = threadIdx.x / NBI_WARP * columns<D>::each;
    const float upper = s->keep[g], lower = s->keep[g + 8];
#pragma unroll
    for (int j = 0; j < columns<D>::each / 8; j++) {
        x.o[j][0] *= upper;
        x.o[j][1] *= upper;
        x.o[j][2] *= lower;
        x.o[j][3] *= lower;
    }
    uint32_t b[4];
#pragma unroll
    for (int k = 0; k < TILE; k += 16) {
        uint32_t hi[4], lo[4];
        nbi_ldmatrix(hi, &s->p_hi[lane & 15][k + (lane >> 4) * 8]);
        nbi_ldmatrix(lo, &s->p_lo[lane & 15][k + (lane >> 4) * 8]);
        if (D == 128) {
            nbi_ldmatrix_trans(b, &v[k + (lane & 15)][col + (lane >> 4) * 8]);
            nbi_mma_bf16(x.o[0], hi, b);
            nbi_mma_bf16(x.o[0], lo, b);
            nbi_mma_bf16(x.o[columns<D>::each / 8 - 1], hi, b + 2);
            nbi_mma_bf16(x.o[columns<D>::each / 8 - 1], lo, b + 2);
        } else {
            if (k % 32 == 0) nbi_ldmatrix_trans(b, &v[k + lane][col]);
            nbi_mma_bf16(x.o[0], hi, b + k % 32 / 8);
            nbi_mma_bf16(x.o[0], lo, b + k % 32 / 8);
        }
    }
}

/* ---------------------------------------------------------------- splits */

/* Sums over the splits so far. */
template <int D> struct merged {
    columns<D> x;
    float m[2], l[2];
};

/* Takes the split that ends up into `run`, or into the scratch. */
template <int D, bool WALK>
NBI_DEV void end_split(const nbi_cuda_attend &a, const block_part &p, const block_memory<D> *s,
                       const columns<D> &x, merged<D> &run, uint32_t splits, uint32_t split)
{
    const int g = nbi_lane() / 4, t = nbi_lane() % 4;
    const int col = threadIdx.x / NBI_WARP * columns<D>::each + 2 * t;
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const int row = g + 8 * side;
        const nbi_attend_slot slot = s->slot[row];
        if (slot.n <= split * p.g.split) continue;
        if (WALK) {
            const nbi_attend_fold f = nbi_attend_merge(&run.m[side], &run.l[side], s->m[row],
                                                       s->l[row], nbi_attend_scale(a));
#pragma unroll
            for (int j = 0; j < columns<D>::each / 8; j++)
#pragma unroll
                for (int i = 2 * side; i < 2 * side + 2; i++)
                    run.x.o[j][i] = nbi_attend_merged(f, run.x.o[j][i], x.o[j][i]);
            continue;
        }
        float *to = nbi_attend_partial(a, splits, slot.row, split, slot.head);
#pragma unroll
        for (int j = 0; j < columns<D>::each / 8; j++)
            *reinterpret_cast<nbi_f32x2 *>(to + col +
                                           8 * j) = {{x.o[j][2 * side], x.o[j][2 * side + 1]}};
        if (threadIdx.x < NBI_WARP && t == 0)
            *reinterpret_cast<nbi_f32x2 *>(to + D) = {{s->m[row], s->l[row]}};
    }
}

/* What one block walked over. */
template <int D>
NBI_DEV void store_walked(const nbi_cuda_attend &a, const block_memory<D> *s, const merged<D> &run)
{
    const int g = nbi_lane() / 4;
    const int col = threadIdx.x / NBI_WARP * columns<D>::each + nbi_lane() % 4 * 2;
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const nbi_attend_slot slot = s->slot[g + 8 * side];
        if (!slot.n) continue;
        float *out = a.out + slot.row * a.out_row + slot.head * a.out_head + col;
        const float inv = 1.0f / run.l[side];
#pragma unroll
        for (int j = 0; j < columns<D>::each / 8; j++) {
            out[8 * j] = run.x.o[j][2 * side] * inv;
            out[8 * j + 1] = run.x.o[j][2 * side + 1] * inv;
        }
    }
}

#define MERGE 12 /* splits whose values are asked for at once */

/* The splits of a slot, ascending, by a warp. */
template <int D>
NBI_DEV void merge_slot(const nbi_cuda_attend &a, const nbi_attend_slot &slot, uint32_t split,
                        uint32_t splits)
{
    const uint32_t many = (slot.n + split - 1) / split, lane = (uint32_t)nbi_lane();
    const size_t step = (size_t)a.n_heads * (D + 2);
    const float *from = nbi_attend_partial(a, splits, slot.row, 0, slot.head);
    float o[D / NBI_WARP] = {}, m = -INFINITY, l = 0;
    for (uint32_t s0 = 0; s0 < many; s0 += MERGE) {
        const uint32_t n = many - s0 < MERGE ? many - s0 : MERGE;
        nbi_f32x2 x[MERGE][D / 64], ml = {{-INFINITY, 0}};
        if (lane < n) ml = *reinterpret_cast<const nbi_f32x2 *>(from + (s0 + lane) * step + D);
#pragma unroll
        for (uint32_t i = 0; i < MERGE; i++) {
            const float *at = from + (i < n ? s0 + i : s0) * step;
#pragma unroll
            for (int j = 0; j < D / 64; j++)
                x[i][j] = *reinterpret_cast<const nbi_f32x2 *>(at + 64 * j + 2 * lane);
        }
        float top;
        const nbi_attend_fold own = nbi_attend_lane_fold(ml.v[0], m, nbi_attend_scale(a), &top);
        m = __shfl_sync(NBI_FULL_MASK, top, NBI_WARP - 1);
#pragma unroll
        for (uint32_t i = 0; i < MERGE; i++) {
            const nbi_attend_fold f = {__shfl_sync(NBI_FULL_MASK, own.keep, (int)i),
                                       __shfl_sync(NBI_FULL_MASK, own.add, (int)i)};
            const float more = __shfl_sync(NBI_FULL_MASK, ml.v[1], (int)i);
            if (i >= n) continue;
            l = nbi_attend_merged(f, l, more);
#pragma unroll
            for (int j = 0; j < D / NBI_WARP; j++)
                o[j] = nbi_attend_merged(f, o[j], x[i][j / 2].v[j % 2]);
        }
    }
    float *out = a.out + slot.row * a.out_row + slot.head * a.out_head;
    const float inv = 1.0f / l;
#pragma unroll
    for (int j = 0; j < D / NBI_WARP; j++) out[j / 2 * 64 + 2 * lane + j % 2] = o[j] * inv;
}

/* ---------------------------------------------------------------- the kernel */

template <int D, bool WALK, bool APPEND, bool CODES>
NBI_DEV void run_tiles(const nbi_cuda_attend &a, const nbi_gqa_append &n, const block_part &p,
                       block_memory<D> *s, uint32_t splits)
{
    const uint32_t per_split = p.g.split / TILE;
    const float scale = nbi_attend_scale(a);
    const queries<D> q = take_queries(s);
    const int see = (int)s->slot[own_slot()].n;
    running r = {-INFINITY, 0};
    columns<D> x;
    merged<D> run;
    clear(x);
    clear(run.x);
    run.m[0] = run.m[1] = -INFINITY;
    run.l[0] = run.l[1] = 0;
    int32_t page = p.begin + STAGES < p.end ? p.pages[p.begin + STAGES] : 0;
    for (uint32_t tile = p.begin; tile < p.end; tile++) {
        const uint32_t stage = (tile - p.begin) % STAGES;
        if (tile == p.begin) { /* the second is on its way already */
            nbi_copy_wait<1>();
            if (CODES) decode_tile<D>(s, stage);
            __syncthreads();
        } else {
            nbi_copy_wait<0>();
            if (CODES) decode_tile<D>(s, stage);
            __syncthreads();
            if (tile + 1 < p.end) {
                load_tile<D, CODES>(a, p, tile + 1, page, s);
                page = tile + 2 < p.end ? p.pages[tile + 2] : 0;
            }
            nbi_copy_commit();
        }
        if (APPEND && tile == p.cached / TILE) put_new<D, CODES>(a, n, p, tile, s);
        score_tile<D>(q, s->k[stage], s);
        __syncthreads();
        const bool ends = (tile + 1) % per_split == 0 || tile + 1 == p.end;
        fold_tile<D>(s, &r, see - (int)(tile * TILE), scale, ends);
        __syncthreads();
        add_values<D>(x, s, s->v[stage]);
        if (!ends) continue;
        end_split<D, WALK>(a, p, s, x, run, splits, tile / per_split);
        clear(x);
    }
    if (WALK) store_walked<D>(a, s, run);
}

template <int D, bool WALK, bool APPEND, bool CODES>
static __global__ void __launch_bounds__(THREADS, 2)
    few_kernel(nbi_cuda_attend a, nbi_gqa_append n, uint32_t group_rows, uint32_t splits,
               uint32_t *arrivals)
{
    block_memory<D> *s = nbi_shared<block_memory<D>>();
    block_part p;
    /* the batch is older than the kernel before */
    const bool works = find_part(a, group_rows, APPEND, &p);
    if (!APPEND || !works) nbi_wait_before();
    if (!works) return;
    int32_t page[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) page[i] = p.begin + i < p.end ? p.pages[p.begin + i] : 0;
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        if (p.begin + i < p.end) load_tile<D, CODES>(a, p, p.begin + i, page[i], s);
        nbi_copy_commit();
    }
    if (threadIdx.x < SLOTS)
        s->slot[threadIdx.x] = nbi_attend_slot_of(a, p.g, p.kv, p.slot0 + threadIdx.x);
    if (APPEND && threadIdx.x < n.rope.dim / 2) { /* settled: nbi_cuda_rope_table() */
        const size_t at = (size_t)(a.first + p.g.row) * (n.rope.dim / 2) + threadIdx.x;
        s->cos[threadIdx.x] = n.rope.cos[at];
        s->sin[threadIdx.x] = n.rope.sin[at];
    }
    for (uint32_t i = threadIdx.x; APPEND && i < SLOTS * (D + 8) / 2; i += THREADS)
        reinterpret_cast<uint32_t *>(s->q_hi)[i] = reinterpret_cast<uint32_t *>(s->q_lo)[i] = 0;
    __syncthreads();
    if (APPEND) nbi_wait_before();
    nbi_let_next();
    if (APPEND)
        make_rows<D, CODES>(a, n, p, s);
    else
        load_queries<D>(a, s);
    __syncthreads();
    run_tiles<D, WALK, APPEND, CODES>(a, n, p, s, splits);
    arrivals += blockIdx.x * gridDim.y + blockIdx.y;
    if (!WALK && nbi_arrive_last(arrivals, p.blocks, &s->last))
        for (uint32_t i = threadIdx.x / NBI_WARP; i < SLOTS; i += WARPS)
            if (s->slot[i].n) merge_slot<D>(a, s->slot[i], p.g.split, splits);
}

/* ---------------------------------------------------------------- launches */

template <int D, bool APPEND, bool CODES>
static void launch(nbi_cuda *c, const nbi_cuda_attend *a, const nbi_gqa_append &n)
{
    const uint32_t ratio = a->n_heads / a->n_kv, splits = nbi_attend_splits_most(a->max_len);
    const uint32_t rows = APPEND ? 1 : nbi_attend_group_rows(ratio, SLOTS);
    const uint32_t parts = nbi_ceil_div(rows * ratio, SLOTS);
    const uint32_t fit = c->rt.shared_max / 2 > sizeof(block_memory<D>) + 1024 ? 2 : 1;
    const uint32_t room = (uint32_t)c->rt.n_sms * fit;
    const size_t row = nbi_cuda_attend_row_bytes(a->max_len, a->n_heads, a->v_width);
    const uint32_t blocks = nbi_ceil_div(a->n_rows * ratio, rows * ratio) * a->n_kv * parts;
    uint32_t z = room / blocks < splits ? room / blocks : splits;
    if (a->partial_bytes / row < a->n_rows || a->n_rows * a->n_kv * parts > NBI_CUDA_ARRIVALS)
        z = 1;
    nbi_launch(&c->rt, dim3(a->n_rows, a->n_kv * parts, z > 1 ? z : 1), dim3(THREADS),
               sizeof(block_memory<D>),
               z > 1 ? few_kernel<D, false, APPEND, CODES> : few_kernel<D, true, APPEND, CODES>, *a,
               n, rows, splits, c->arrivals);
}

template <int D, bool CODES>
static void launch_type(nbi_cuda *c, const nbi_cuda_attend *a, const nbi_gqa_append *append)
{
    if (append)
        launch<D, true, CODES>(c, a, *append);
    else
        launch<D, false, CODES>(c, a, nbi_gqa_append{});
}

bool nbi_cuda_attend_few(nbi_cuda *c, const nbi_cuda_attend *a, const nbi_gqa_append *append)
{
    if (!nbi_cuda_attend_by_mma(a) || c->rt.shared_max < sizeof(block_memory<128>)) return false;
    if (a->k_width == 64)
        a->codes ? launch_type<64, true>(c, a, append) : launch_type<64, false>(c, a, append);
    else
        a->codes ? launch_type<128, true>(c, a, append) : launch_type<128, false>(c, a, append);
    return true;
}
