/* Attention over latents of 512 values and keys of 64 behind them, in a cache in BF16 or E4M3, by
 * matrix units. Callers: attend.cu.
 *
 * A block of 8 warps has 16 or 32 slots, pairs of a row and a head, and walks over tiles of 32
 * positions. Scores: a warp sums a quarter of the 576 products, the quarters are added in order.
 * Values: a warp has 64 of the 512 columns. What a slot computes is the same with 16 slots (more
 * blocks, when rows are few) and 32 (a tile read once for twice the slots). Queries and
 * probabilities go in as two BF16 halves: the cache is exact in BF16, so products keep 16 bits. */
#include "backend/cuda/attend.h"

#define TILE    32
#define LATENT  512
#define WIDTH   (LATENT + 64)
#define WARPS   8
#define THREADS (WARPS * NBI_WARP)
/* Rows in shared memory lie 16 bytes further apart, so that eight of them hit all banks. */
#define ROW    (WIDTH + 8)
#define P_ROW  (TILE + 8)
#define COPIES (TILE / WARPS * (WIDTH / 8) / NBI_WARP) /* of 16 bytes, per lane and tile */
#define SLOT   (LATENT + 16 + 2 * 64) /* bytes of a position in codes: kv_shape.h */

/* Shared memory of a block with M times 16 slots. */
template <int M, int STAGES> struct alignas(16) block_memory {
    uint16_t q_hi[16 * M][ROW], q_lo[16 * M][ROW];
    uint16_t stage[STAGES][TILE][ROW];
    float part[4][16 * M][P_ROW]; /* scores, by quarter */
    uint16_t p_hi[16 * M][P_ROW], p_lo[16 * M][P_ROW];
    float keep[16 * M], m[16 * M], l[16 * M]; /* m, l: of a split that ends */
    nbi_attend_slot slot[16 * M];
};

template <int M> struct sums {
    float o[M][8][4];
};

template <int M> NBI_DEV void clear(sums<M> &x)
{
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) x.o[i][j][k] = 0;
}

template <int M, int STAGES>
NBI_DEV void load_queries(const nbi_cuda_attend &a, block_memory<M, STAGES> *s)
{
#pragma unroll 2
    for (uint32_t i = threadIdx.x / NBI_WARP; i < 16 * M; i += WARPS) {
        const nbi_attend_slot &slot = s->slot[i];
        const float *q = a.q + slot.row * a.q_row + slot.head * a.q_head;
#pragma unroll
        for (uint32_t c = 2 * nbi_lane(); c < WIDTH; c += 2 * NBI_WARP)
            nbi_halves(slot.n ? q[c] : 0, slot.n ? q[c + 1] : 0,
                       reinterpret_cast<uint32_t *>(&s->q_hi[i][c]),
                       reinterpret_cast<uint32_t *>(&s->q_lo[i][c]));
    }
}

/* Where lane i % 4's position of the warp's four of a tile begins; -1 behind the last. */
NBI_DEV long long find_place(const nbi_cuda_attend &a, const nbi_attend_group &g, uint32_t tile)
{
    const uint32_t j = tile * TILE + threadIdx.x / NBI_WARP * 4 + (nbi_lane() & 3);
    if (j >= g.n) return -1;
    return (long long)nbi_attend_place(a, g.seq, nbi_attend_position(a, g.row, j));
}

/* The warp's four positions on their way; zeros behind the last. */
NBI_DEV void load_positions(const nbi_cuda_attend &a, long long place, uint16_t (*stage)[ROW])
{
    const uint16_t *latent = static_cast<const uint16_t *>(a.k);
    const int first = threadIdx.x / NBI_WARP * 4, lane = nbi_lane();
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int e = lane + NBI_WARP * i, row = e / (WIDTH / 8), c = e % (WIDTH / 8) * 8;
        const long long at = __shfl_sync(NBI_FULL_MASK, place, row);
        nbi_copy_async(&stage[first + row][c], latent + (at < 0 ? 0 : at) + c, at >= 0);
    }
}

/* The same of a cache of codes: codes to the second half of where the latent will be, the rope key
 * to its place, scales behind it. */
NBI_DEV void load_codes(const nbi_cuda_attend &a, long long place, uint16_t (*stage)[ROW])
{
    const uint8_t *from = static_cast<const uint8_t *>(a.k);
    const int first = threadIdx.x / NBI_WARP * 4, lane = nbi_lane();
#pragma unroll
    for (int row = 0; row < 4; row++) {
        const long long at = __shfl_sync(NBI_FULL_MASK, place, row);
        nbi_copy_async(reinterpret_cast<uint8_t *>(stage[first + row]) + LATENT + 16 * lane,
                       from + (at < 0 ? 0 : at) + 16 * lane, at >= 0);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) { /* of each row a piece of scales and eight of the key */
        const int e = lane + NBI_WARP * i, row = e / 9 < 4 ? e / 9 : 3, c = e % 9;
        const long long at = __shfl_sync(NBI_FULL_MASK, place, row);
        if (e < 36)
            nbi_copy_async(c ? stage[first + row] + LATENT + 8 * (c - 1)
                             : stage[first + row] + WIDTH,
                           from + (at < 0 ? 0 : at) + LATENT + 16 * c, at >= 0);
    }
}

/* Codes that have come, of the warp's four positions. */
NBI_DEV void decode_codes(uint16_t (*stage)[ROW])
{
    const int first = threadIdx.x / NBI_WARP * 4, lane = nbi_lane();
    nbi_u32x4 codes[4];
    float scale[4];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint16_t *row = stage[first + i];
        codes[i] = *reinterpret_cast<const nbi_u32x4 *>(row + LATENT / 2 + 8 * lane);
        scale[i] = reinterpret_cast<const float *>(row + WIDTH)[lane / 8];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        nbi_u32x4 out[2];
        nbi_codes_decode16(codes[i], scale[i], out);
        *reinterpret_cast<nbi_u32x4 *>(stage[first + i] + 16 * lane) = out[0];
        *reinterpret_cast<nbi_u32x4 *>(stage[first + i] + 16 * lane + 8) = out[1];
    }
}

template <bool CODES>
NBI_DEV void load_tile(const nbi_cuda_attend &a, long long place, uint16_t (*stage)[ROW])
{
    if (CODES)
        load_codes(a, place, stage);
    else
        load_positions(a, place, stage);
}

/* Scores of a quarter of the width: with 16 slots a warp takes half of the positions, with 32 it
 * takes half of the slots. */
template <int M, int STAGES>
NBI_DEV void score_tile(block_memory<M, STAGES> *s, const uint16_t (*k)[ROW])
{
    const int warp = threadIdx.x / NBI_WARP, lane = nbi_lane(), quarter = warp & 3;
    const int slot0 = M == 1 ? 0 : warp / 4 * 16, pos0 = M == 1 ? warp / 4 * 16 : 0;
    const int a_row = slot0 + (lane & 15), a_col = (lane >> 4) * 8;
    const int b_row = pos0 + (lane & 7) + (lane >> 4) * 8, b_col = (lane >> 3 & 1) * 8;
    float d[2 * M][4], e[2 * M][4]; /* of the queries' upper halves, and lower */
#pragma unroll
    for (int i = 0; i < 2 * M; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) d[i][j] = e[i][j] = 0;
#pragma unroll 3
    for (int c = quarter * (WIDTH / 4); c < (quarter + 1) * (WIDTH / 4); c += 16) {
        uint32_t hi[4], lo[4];
        nbi_ldmatrix(hi, &s->q_hi[a_row][c + a_col]);
        nbi_ldmatrix(lo, &s->q_lo[a_row][c + a_col]);
#pragma unroll
        for (int i = 0; i < M; i++) {
            uint32_t b[4];
            nbi_ldmatrix(b, &k[b_row + 16 * i][c + b_col]);
            nbi_mma_bf16(d[2 * i], hi, b);
            nbi_mma_bf16(d[2 * i + 1], hi, b + 2);
            nbi_mma_bf16(e[2 * i], lo, b);
            nbi_mma_bf16(e[2 * i + 1], lo, b + 2);
        }
    }
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        float *to = &s->part[quarter][slot0 + g][pos0 + 8 * i + 2 * t];
        *reinterpret_cast<nbi_f32x2 *>(to) = {{d[i][0] + e[i][0], d[i][1] + e[i][1]}};
        *reinterpret_cast<nbi_f32x2 *>(to + 8 * P_ROW) = {{d[i][2] + e[i][2], d[i][3] + e[i][3]}};
    }
}

/* A slot's running maximum, and this thread's share of its sum: eight threads per slot. */
struct running {
    float m, l;
};

NBI_DEV float eight_sum(float x)
{
    for (int d = 1; d < 8; d *= 2) x += __shfl_xor_sync(NBI_FULL_MASK, x, d);
    return x;
}

/* Scores of a tile to probabilities relative to the new maximum. n: positions from the tile's first
 * on that the slot sees. */
template <int M, int STAGES>
NBI_DEV void fold_tile(block_memory<M, STAGES> *s, running *r, int n, float scale, bool ends)
{
    const int slot = threadIdx.x / 8, c = threadIdx.x % 8 * 4;
    float x[4], top = r->m;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = s->part[0][slot][c + i] + s->part[1][slot][c + i];
        x[i] = x[i] + s->part[2][slot][c + i] + s->part[3][slot][c + i];
        if (c + i >= n) x[i] = -INFINITY;
        top = x[i] > top ? x[i] : top;
    }
    for (int d = 1; d < 8; d *= 2) {
        const float other = __shfl_xor_sync(NBI_FULL_MASK, top, d);
        top = other > top ? other : top;
    }
    const float base = top == -INFINITY ? 0 : -(top * scale);
    const float keep = nbi_attend_keep(r->m, top, scale, base);
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = exp2f(fmaf(x[i], scale, base));
    r->m = top;
    r->l = fmaf(r->l, keep, (x[0] + x[1]) + (x[2] + x[3]));
    uint32_t *hi = reinterpret_cast<uint32_t *>(&s->p_hi[slot][c]);
    uint32_t *lo = reinterpret_cast<uint32_t *>(&s->p_lo[slot][c]);
    nbi_halves(x[0], x[1], hi, lo);
    nbi_halves(x[2], x[3], hi + 1, lo + 1);
    if (c == 0) s->keep[slot] = keep;
    if (!ends) return;
    const float l = eight_sum(r->l);
    if (c == 0) {
        s->m[slot] = r->m;
        s->l[slot] = l;
    }
    *r = {-INFINITY, 0};
}

template <int M, int STAGES>
NBI_DEV void add_values(sums<M> &x, const block_memory<M, STAGES> *s, const uint16_t (*v)[ROW])
{
    const int lane = nbi_lane(), g = lane / 4, col = threadIdx.x / NBI_WARP * 64 + (lane >> 4) * 8;
#pragma unroll
    for (int i = 0; i < M; i++) {
        const float upper = s->keep[16 * i + g], lower = s->keep[16 * i + g + 8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            x.o[i][j][0] *= upper;
            x.o[i][j][1] *= upper;
            x.o[i][j][2] *= lower;
            x.o[i][j][3] *= lower;
        }
    }
#pragma unroll
    for (int k = 0; k < TILE; k += 16) {
        uint32_t hi[M][4], lo[M][4];
#pragma unroll
        for (int i = 0; i < M; i++) {
            nbi_ldmatrix(hi[i], &s->p_hi[16 * i + (lane & 15)][k + (lane >> 4) * 8]);
            nbi_ldmatrix(lo[i], &s->p_lo[16 * i + (lane & 15)][k + (lane >> 4) * 8]);
        }
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t b[4];
            nbi_ldmatrix_trans(b, &v[k + (lane & 15)][col + 8 * j]);
#pragma unroll
            for (int i = 0; i < M; i++) {
                nbi_mma_bf16(x.o[i][j], hi[i], b);
                nbi_mma_bf16(x.o[i][j + 1], hi[i], b + 2);
                nbi_mma_bf16(x.o[i][j], lo[i], b);
                nbi_mma_bf16(x.o[i][j + 1], lo[i], b + 2);
            }
        }
    }
}

/* The warp's columns of a slot: row i * 16 + side * 8 + lane / 4. */
template <int M>
NBI_DEV void store_columns(const sums<M> &x, int i, int side, float factor, float *to)
{
    float *at = to + threadIdx.x / NBI_WARP * 64 + nbi_lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; j++)
        *reinterpret_cast<nbi_f32x2 *>(at + 8 * j) = {
            {x.o[i][j][2 * side] * factor, x.o[i][j][2 * side + 1] * factor}};
}

/* Sums over the splits so far. */
template <int M> struct merged {
    sums<M> x;
    float m[M][2], l[M][2];
};

template <int M> NBI_DEV void clear(merged<M> &run)
{
    clear(run.x);
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            run.m[i][side] = -INFINITY;
            run.l[i][side] = 0;
        }
}

/* Takes the split that ends up into `run`, or into the scratch. */
template <int M, int STAGES, bool WALK>
NBI_DEV void end_split(const nbi_cuda_attend &a, const block_memory<M, STAGES> *s,
                       const nbi_attend_group &g, const sums<M> &x, merged<M> &run, uint32_t splits,
                       uint32_t split)
{
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int row = 16 * i + 8 * side + nbi_lane() / 4;
            const nbi_attend_slot slot = s->slot[row];
            if (slot.n <= split * g.split) continue;
            if (!WALK) {
                float *to = nbi_attend_partial(a, splits, slot.row, split, slot.head);
                store_columns(x, i, side, 1, to);
                if (threadIdx.x < NBI_WARP && nbi_lane() % 4 == 0)
                    *reinterpret_cast<nbi_f32x2 *>(to + LATENT) = {{s->m[row], s->l[row]}};
                continue;
            }
            const nbi_attend_fold f = nbi_attend_merge(&run.m[i][side], &run.l[i][side], s->m[row],
                                                       s->l[row], nbi_attend_scale(a));
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int k = 2 * side; k < 2 * side + 2; k++)
                    run.x.o[i][j][k] = nbi_attend_merged(f, run.x.o[i][j][k], x.o[i][j][k]);
        }
}

/* Tiles [begin, end) of the group, of which the first STAGES are on their way; WALK: all of them,
 * merged here. */
template <int M, int STAGES, bool WALK, bool CODES>
NBI_DEV void run_tiles(const nbi_cuda_attend &a, const nbi_attend_group &g,
                       block_memory<M, STAGES> *s, uint32_t begin, uint32_t end, uint32_t splits)
{
    const uint32_t per_split = g.split / TILE;
    const bool folds = threadIdx.x < 128 * M;
    const int n = folds ? (int)s->slot[threadIdx.x / 8].n : 0;
    running r = {-INFINITY, 0};
    sums<M> x;
    merged<M> run;
    clear(x);
    if (WALK) clear(run);
    long long place = find_place(a, g, begin + STAGES);
    for (uint32_t tile = begin; tile < end; tile++) {
        if (tile == begin) {
            nbi_copy_wait<STAGES - 1>();
            if (CODES) decode_codes(s->stage[0]);
            __syncthreads();
        } else {
            const uint32_t next = tile - 1 + STAGES;
            if (STAGES > 1) {
                nbi_copy_wait<STAGES == 1 ? 0 : STAGES - 2>();
                if (CODES) decode_codes(s->stage[(tile - begin) % STAGES]);
            }
            __syncthreads();
            if (next < end) load_tile<CODES>(a, place, s->stage[(next - begin) % STAGES]);
            nbi_copy_commit();
            place = find_place(a, g, next + 1);
            if (STAGES == 1) {
                nbi_copy_wait<0>();
                if (CODES) decode_codes(s->stage[0]);
                __syncthreads();
            }
        }
        const uint16_t(*k)[ROW] = s->stage[(tile - begin) % STAGES];
        score_tile(s, k);
        __syncthreads();
        const bool ends = (tile + 1) % per_split == 0 || tile + 1 == end;
        if (folds) fold_tile(s, &r, n - (int)(tile * TILE), nbi_attend_scale(a), ends);
        __syncthreads();
        add_values(x, s, k);
        if (!ends) continue;
        end_split<M, STAGES, WALK>(a, s, g, x, run, splits, tile / per_split);
        clear(x);
    }
#pragma unroll
    for (int i = 0; WALK && i < M; i++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const nbi_attend_slot slot = s->slot[16 * i + 8 * side + nbi_lane() / 4];
            float *to = a.out + slot.row * a.out_row + slot.head * a.out_head;
            if (slot.n) store_columns(run.x, i, side, 1.0f / run.l[i][side], to);
        }
}

/* A row whose list is empty. */
template <int M, int STAGES>
NBI_DEV void store_nothing(const nbi_cuda_attend &a, const nbi_attend_group &g, uint32_t slot0)
{
    for (uint32_t i = 0; i < 16 * M; i++) {
        const nbi_attend_slot slot = nbi_attend_slot_of(a, g, 0, slot0 + i);
        if (slot.row != g.row) break;
        for (uint32_t c = threadIdx.x; c < LATENT; c += THREADS)
            a.out[slot.row * a.out_row + slot.head * a.out_head + c] = 0;
    }
}

/* The first STAGES tiles on their way: what steps before left in the cache while the kernel before
 * still runs. */
template <int M, int STAGES, bool CODES>
NBI_DEV void begin_tiles(const nbi_cuda_attend &a, const nbi_attend_group &g,
                         block_memory<M, STAGES> *s, uint32_t begin, uint32_t end)
{
    const uint32_t old = a.select ? 0 : (uint32_t)a.pos[a.seq_first[g.seq]];
    uint32_t sent = 0;
#pragma unroll
    for (uint32_t i = 0; i < STAGES; i++) {
        if (begin + i >= end || (begin + i + 1) * TILE > old) continue;
        load_tile<CODES>(a, find_place(a, g, begin + i), s->stage[i]);
        nbi_copy_commit();
        sent++;
    }
    nbi_wait_before();
    nbi_let_next();
#pragma unroll
    for (uint32_t i = 0; i < STAGES; i++) {
        if (i < sent) continue;
        if (begin + i < end) load_tile<CODES>(a, find_place(a, g, begin + i), s->stage[i]);
        nbi_copy_commit();
    }
}

/* Whole splits of a group per block; WALK: all of them. */
template <int M, int STAGES, bool WALK, bool CODES>
static __global__ void __launch_bounds__(THREADS, 1)
    mla_kernel(nbi_cuda_attend a, uint32_t group_rows, uint32_t splits)
{
    if (a.select) nbi_wait_before(); /* the batch is older than the kernel before, lists are not */
    nbi_attend_group g;
    /* the longest rows first */
    bool works = nbi_attend_group_of(a, a.n_rows - 1 - blockIdx.x, group_rows, &g);
    const uint32_t slot0 = blockIdx.y * 16 * M;
    uint32_t tiles = 0, each = 0;
    if (works) {
        const uint32_t per_split = g.split / TILE;
        tiles = (g.n + TILE - 1) / TILE;
        const uint32_t many = (tiles + per_split - 1) / per_split;
        each = (many + gridDim.z - 1) / gridDim.z * per_split;
        works = slot0 < g.n_rows * a.n_heads && (WALK || blockIdx.z * each < tiles);
    }
    if (!works || g.n == 0) {
        nbi_wait_before();
        if (works && WALK) store_nothing<M, STAGES>(a, g, slot0);
        return;
    }
    const uint32_t begin = WALK ? 0 : blockIdx.z * each;
    const uint32_t end = WALK || begin + each > tiles ? tiles : begin + each;
    block_memory<M, STAGES> *s = nbi_shared<block_memory<M, STAGES>>();
    if (threadIdx.x < 16 * M)
        s->slot[threadIdx.x] = nbi_attend_slot_of(a, g, 0, slot0 + threadIdx.x);
    begin_tiles<M, STAGES, CODES>(a, g, s, begin, end);
    __syncthreads();
    load_queries(a, s);
    run_tiles<M, STAGES, WALK, CODES>(a, g, s, begin, end, splits);
}

/* ---------------------------------------------------------------- launches */

template <int M, int STAGES, bool WALK, bool CODES>
static bool launch_type(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t splits, uint32_t z)
{
    if (c->rt.shared_max < sizeof(block_memory<M, STAGES>)) return false;
    const nbi_attend_grid g = nbi_attend_grid_of(a, 16 * M);
    nbi_launch(&c->rt, dim3(a->n_rows, g.parts, z), dim3(THREADS), sizeof(block_memory<M, STAGES>),
               mla_kernel<M, STAGES, WALK, CODES>, *a, g.rows, splits);
    return true;
}

template <int M, int STAGES, bool WALK>
static bool launch(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t splits, uint32_t z)
{
    return a->codes ? launch_type<M, STAGES, WALK, true>(c, a, splits, z)
                    : launch_type<M, STAGES, WALK, false>(c, a, splits, z);
}

bool nbi_cuda_attend_mla(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t *unmerged)
{
    if (!a->bf16 || a->k != a->v || a->n_kv != 1 || a->k_width != WIDTH || a->v_width != LATENT ||
        (uintptr_t)a->k % 16 || a->kv_slot != (a->codes ? SLOT : WIDTH) || a->out_head % 2 ||
        c->rt.shared_max < sizeof(block_memory<1, 1>))
        return false;
    if (nbi_cuda_attend_wide(c, a, unmerged)) return true;
    const uint32_t splits = nbi_attend_splits_most(a->max_len), sms = (uint32_t)c->rt.n_sms;
    const uint32_t room = sms / nbi_attend_grid_of(a, 16).blocks, z = room < splits ? room : splits;
    const size_t row = nbi_cuda_attend_row_bytes(a->max_len, a->n_heads, a->v_width);
    if (z > 1 && a->partial_bytes / row >= a->n_rows) {
        /* three stages leave room for the kernel before */
        if (!launch<1, 3, false>(c, a, splits, z) && !launch<1, 2, false>(c, a, splits, z))
            launch<1, 1, false>(c, a, splits, z);
        *unmerged = splits;
        return true;
    }
    const bool many = a->n_rows * a->n_heads / 32 >= sms * 3 / 4;
    if ((!many || !launch<2, 3, true>(c, a, splits, 1)) && !launch<1, 4, true>(c, a, splits, 1) &&
        !launch<1, 2, true>(c, a, splits, 1))
        launch<1, 1, true>(c, a, splits, 1);
    return true;
}
