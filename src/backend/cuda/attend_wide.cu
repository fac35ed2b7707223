/* Attention over latents as attend_mla.cu has it, on warpgroups (wgmma, compute capability 9.0).
 * Callers: attend_mla.cu.
 *
 * A block has 32 slots (pairs of a row and a head), which are 64 rows of both products: the upper
 * BF16 halves of eight slots' queries, or probabilities, then the lower ones, so that both are in
 * one thread and their products are added there. It walks over tiles of 64 positions. The first
 * warpgroup asks for positions, each of its warps for a quarter of every tile. The second
 * makes scores and probabilities, a quarter of the slots per warp. The other two have 256 of the
 * 512 columns of sums each, and take up one tile while the second is at the next. */
#include "backend/cuda/attend.h"

#define TILE    64
#define HALF    32
#define PART    16 /* positions of a tile that one warp asks for */
#define PARTS   (TILE / PART)
#define STAGES  2
#define LATENT  512
#define WIDTH   (LATENT + 64)
#define BLOCKS  (WIDTH / 64) /* of 64 columns: a row of one has 128 bytes */
#define SLOTS   32
#define GROUP   128 /* threads of a warpgroup */
#define THREADS (4 * GROUP)
#define SLOT    (LATENT + 16 + 2 * 64) /* bytes of a position in codes: kv_shape.h */

/* 128 * (first + second + 2 * third) are all that a multiprocessor has. */
#define PRODUCER_REGISTERS 32
#define SCORE_REGISTERS    64
#define SUM_REGISTERS      208

/* Tiles of a block, and what they are of. */
struct block_part {
    nbi_attend_group g;
    uint32_t slot0, begin, end;
};

/* Of a row of 128 bytes, the 16-byte piece q lies at q ^ row % 8. */
struct alignas(1024) block_memory {
    uint16_t q[BLOCKS][2 * SLOTS][64];
    uint16_t tile[STAGES][BLOCKS][TILE][64];
    uint16_t p[2 * SLOTS][TILE];
    float keep[SLOTS], m[SLOTS], sum[SLOTS]; /* as p: of one tile; m and sum where a split ends */
    nbi_attend_slot slot[SLOTS];
    block_part part;
    uint64_t full[STAGES], empty[STAGES][2]; /* empty: of half a tile */
    uint64_t queries, p_full, p_empty;
};

/* ---------------------------------------------------------------- positions on their way */

/* Where this lane's position of a part begins; -1 behind the last. */
NBI_DEV long long find_place(const nbi_cuda_attend &a, const nbi_attend_group &g, uint32_t part)
{
    const uint32_t j = part * PART + (uint32_t)nbi_lane() % PART;
    if (j >= g.n) return -1;
    return (long long)nbi_attend_place(a, g.seq, nbi_attend_position(a, g.row, j));
}

/* Piece q of a stage's row in block b. */
NBI_DEV uint16_t *piece_of(uint16_t *stage, int b, int row, int q)
{
    return stage + (b * TILE + row) * 64 + (q ^ row % 8) * 8;
}

NBI_DEV void load_bf16(const nbi_cuda_attend &a, long long place, uint16_t *stage)
{
    const uint16_t *from = static_cast<const uint16_t *>(a.k);
    const int q = nbi_lane() % 8;
#pragma unroll 2
    for (int i = 0; i < PART / 4; i++) {
        const int row = 4 * i + nbi_lane() / 8;
        const long long at = __shfl_sync(NBI_FULL_MASK, place, row);
        const uint16_t *p = from + (at < 0 ? 0 : at) + 8 * q;
        uint16_t *to = piece_of(stage, 0, row, q);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) nbi_copy_async(to + b * TILE * 64, p + 64 * b, at >= 0);
    }
}

/* Codes to where the second half of the latent will be, scales to its first bytes. */
NBI_DEV void load_codes(const nbi_cuda_attend &a, long long place, uint16_t *stage)
{
    const uint8_t *from = static_cast<const uint8_t *>(a.k);
    const int lane = nbi_lane(), q = lane % 8;
#pragma unroll 1
    for (int i = 0; i < PART / 4; i++) {
        const int row = 4 * i + lane / 8;
        const long long at = __shfl_sync(NBI_FULL_MASK, place, row);
        const uint8_t *p = from + (at < 0 ? 0 : at) + 16 * q;
#pragma unroll
        for (int b = 0; b < LATENT / 128; b++)
            nbi_copy_async(piece_of(stage, 4 + b, row, q), p + 128 * b, at >= 0);
        nbi_copy_async(piece_of(stage, BLOCKS - 1, row, q), p + LATENT + 16, at >= 0);
    }
    if (lane < PART)
        nbi_copy_async(piece_of(stage, 0, lane, 0), from + (place < 0 ? 0 : place) + LATENT,
                       place >= 0);
}

NBI_DEV void decode_codes(uint16_t *stage)
{
    const int lane = nbi_lane();
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < PART; row++) { /* more at once would take more than 32 registers */
        const nbi_u32x4 codes =
            *reinterpret_cast<const nbi_u32x4 *>(piece_of(stage, 4 + lane / 8, row, lane % 8));
        const float scale = reinterpret_cast<const float *>(piece_of(stage, 0, row, 0))[lane / 8];
        nbi_u32x4 out[2];
        __syncwarp();
        nbi_codes_decode16(codes, scale, out);
#pragma unroll
        for (int j = 0; j < 2; j++)
            *reinterpret_cast<nbi_u32x4 *>(piece_of(stage, lane / 4, row, lane % 4 * 2 + j)) =
                out[j];
    }
}

/* A warp of the first warpgroup: a part of every tile. What steps before left in the cache is asked
 * for while the kernel before still runs. */
template <bool CODES> NBI_DEV void produce(const nbi_cuda_attend &a, block_memory *s)
{
    const block_part &p = s->part; /* not in registers */
    const uint32_t old = a.select ? 0 : (uint32_t)a.pos[a.seq_first[p.g.seq]];
    bool waited = a.select != NULL; /* by latent_kernel() */
    nbi_let_next(); /* without a list: the next one reads nothing that the kernel before made */
    uint32_t part = PARTS * p.begin + threadIdx.x / NBI_WARP;
    long long place = find_place(a, p.g, part);
    for (; part < PARTS * p.end; part += PARTS) {
        if (!waited && (part + 1) * PART > old) {
            nbi_wait_before();
            waited = true;
        }
        const uint32_t count = part / PARTS - p.begin, at = count % STAGES,
                       row = part % PARTS * PART;
        uint16_t *stage = s->tile[at][0][row];
        nbi_bar_wait(&s->empty[at][row / HALF], (count / STAGES & 1) ^ 1);
        if (CODES)
            load_codes(a, place, stage);
        else
            load_bf16(a, place, stage);
        place = find_place(a, p.g, part + PARTS);
        if (CODES) {
            nbi_copy_commit();
            nbi_copy_wait<0>();
            decode_codes(stage);
            nbi_shared_to_async();
            nbi_bar_arrive(&s->full[at]);
        } else {
            nbi_copy_arrive(&s->full[at]);
        }
    }
    nbi_copy_commit();
    nbi_copy_wait<0>(); /* none is on its way when a thread ends */
    if (!waited) nbi_wait_before();
}

/* ---------------------------------------------------------------- queries */

/* The row of a slot's upper halves; those of the lower are 8 further. */
NBI_DEV uint32_t row_of(uint32_t slot)
{
    return slot / 8 * 16 + slot % 8;
}

/* The third and fourth warpgroup, behind the kernel before: all of a thread's values are asked for
 * at once. */
NBI_DEV void load_queries(const nbi_cuda_attend &a, block_memory *s)
{
    constexpr uint32_t PIECES = SLOTS * (WIDTH / 8) / (2 * GROUP); /* of eight values */
    static_assert(PIECES * 2 * GROUP == SLOTS * (WIDTH / 8), "whole pieces");
    const uint32_t thread = threadIdx.x - 2 * GROUP;
    const float *q[PIECES];
#pragma unroll
    for (uint32_t i = 0; i < PIECES; i++) {
        const uint32_t at = thread + i * 2 * GROUP;
        const nbi_attend_slot &slot = s->slot[at / (WIDTH / 8)];
        q[i] = slot.n ? a.q + slot.row * a.q_row + slot.head * a.q_head + 8 * (at % (WIDTH / 8))
                      : NULL;
    }
    nbi_wait_before();
    nbi_f32x4 x[PIECES][2] = {};
#pragma unroll
    for (uint32_t i = 0; i < PIECES; i++) {
        if (!q[i]) continue;
        x[i][0] = *reinterpret_cast<const nbi_f32x4 *>(q[i]);
        x[i][1] = *reinterpret_cast<const nbi_f32x4 *>(q[i] + 4);
    }
#pragma unroll
    for (uint32_t i = 0; i < PIECES; i++) {
        const uint32_t at = thread + i * 2 * GROUP, c = at % (WIDTH / 8);
        const uint32_t row = row_of(at / (WIDTH / 8));
        nbi_u32x4 hi, lo;
#pragma unroll
        for (int j = 0; j < 4; j++)
            nbi_halves(x[i][j / 2].v[j % 2 * 2], x[i][j / 2].v[j % 2 * 2 + 1], &hi.v[j], &lo.v[j]);
        uint16_t *to = s->q[c / 8][row] + (c % 8 ^ row % 8) * 8;
        *reinterpret_cast<nbi_u32x4 *>(to) = hi;
        *reinterpret_cast<nbi_u32x4 *>(to + 8 * 64) = lo;
    }
    nbi_shared_to_async();
}

/* ---------------------------------------------------------------- scores */

/* The thread's slot: four threads share it, each has every fourth pair of a tile's positions. */
NBI_DEV uint32_t own_slot()
{
    return threadIdx.x / NBI_WARP % 4 * 8 + (uint32_t)nbi_lane() / 4;
}

/* d[4 j + i]: upper halves (from i = 2 on lower) of positions 8 j + 2t + i % 2. */
NBI_DEV void score_tile(const block_memory *s, const uint16_t *tile, float (&d)[TILE / 2])
{
    const uint64_t q = nbi_wgmma_b(s->q), k = nbi_wgmma_b(tile);
    nbi_wgmma_hold(d);
    nbi_wgmma_begin();
#pragma unroll
    for (int c = 0; c < BLOCKS; c++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            nbi_wgmma_shared<TILE>(d, q + c * (2 * SLOTS * 128 / 16) + 2 * i,
                                   k + c * (TILE * 128 / 16) + 2 * i, c || i);
    nbi_wgmma_commit();
    nbi_wgmma_wait<0>();
    nbi_wgmma_hold(d);
}

/* A slot's running maximum, this thread's part of its sum. */
struct softmax {
    float m, l;
};

/* Probabilities relative to the new maximum, of the slot's first n positions of the tile. NaN is
 * left out of the maximum; what has it becomes NaN by itself. Gives what sums so far are multiplied
 * by. */
NBI_DEV float fold_tile(float (&d)[TILE / 2], int n, float scale, softmax &r)
{
    n -= nbi_lane() % 4 * 2;
    float most[4] = {r.m, r.m, r.m, r.m};
#pragma unroll
    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float &x = d[4 * j + e];
            x += d[4 * j + 2 + e];
            if (8 * j + e >= n) x = -INFINITY;
            most[j % 4] = fmaxf(most[j % 4], x);
        }
    float top = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    top = fmaxf(top, __shfl_xor_sync(NBI_FULL_MASK, top, 1));
    top = fmaxf(top, __shfl_xor_sync(NBI_FULL_MASK, top, 2));
    const float base = top == -INFINITY ? 0 : -(top * scale);
    const float keep = nbi_attend_keep(r.m, top, scale, base);
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float &x = d[4 * j + e];
            x = nbi_exp2(fmaf(x, scale, base));
            sum[j % 2 * 2 + e] += x;
        }
    r.m = top;
    r.l = fmaf(r.l, keep, (sum[0] + sum[1]) + (sum[2] + sum[3]));
    return keep;
}

/* Both halves of the probabilities to where the sums take them from. */
NBI_DEV void store_tile(block_memory *s, const float (&d)[TILE / 2])
{
    const uint32_t row = row_of(own_slot()), t = (uint32_t)nbi_lane() % 4;
    uint16_t *to = s->p[row] + 2 * t;
#pragma unroll
    for (uint32_t j = 0; j < TILE / 8; j++) {
        uint32_t upper, lower;
        nbi_halves(d[4 * j], d[4 * j + 1], &upper, &lower);
        uint16_t *at = to + (j ^ row % 8) * 8;
        *reinterpret_cast<uint32_t *>(at) = upper;
        *reinterpret_cast<uint32_t *>(at + 8 * TILE) = lower;
    }
}

NBI_DEV void make_probabilities(const nbi_cuda_attend &a, const block_part &p, block_memory *s)
{
    const uint32_t last = p.g.split / TILE - 1, slot = own_slot(); /* of a split: 1, 3, 7 ... */
    const float scale = nbi_attend_scale(a);
    const int n = (int)s->slot[slot].n;
    softmax r = {-INFINITY, 0};
#pragma unroll 1
    for (uint32_t tile = p.begin; tile < p.end; tile++) {
        const uint32_t count = tile - p.begin, at = count % STAGES;
        const bool ends = (tile & last) == last || tile + 1 == p.end;
        nbi_bar_wait(&s->full[at], count / STAGES & 1);
        nbi_shared_to_async(); /* of the copies */
        float d[TILE / 2];
        score_tile(s, s->tile[at][0][0], d);
        const float keep = fold_tile(d, n - (int)(tile * TILE), scale, r);
        nbi_bar_wait(&s->p_empty, (count & 1) ^ 1);
        store_tile(s, d);
        if (ends) {
            r.l += __shfl_xor_sync(NBI_FULL_MASK, r.l, 1);
            r.l += __shfl_xor_sync(NBI_FULL_MASK, r.l, 2);
        }
        if (nbi_lane() % 4 == 0) {
            s->keep[slot] = keep;
            s->m[slot] = r.m;
            s->sum[slot] = r.l;
        }
        if (ends) r = {-INFINITY, 0};
        nbi_shared_to_async();
        nbi_bar_arrive(&s->p_full);
    }
}

/* ---------------------------------------------------------------- sums */

/* o[b][4 j + i]: of the thread's slot, columns first_column() + 128 b + 8 j + i % 2; from i = 2 on
 * by the lower halves of probabilities. Of SHARE 2 blocks that have the same tiles each sums half
 * of the columns: only b = 0. */
struct sums {
    float o[2][64];
};

/* Columns 128 b + 8 j + 2t + i of the half. */
NBI_DEV float sum_of(const sums &x, int b, int j, int i)
{
    return x.o[b][4 * j + i] + x.o[b][4 * j + 2 + i];
}

/* The warpgroup's first column, so that the compiler sees it is one for the warp; all lanes. */
template <int SHARE> NBI_DEV uint32_t group_column()
{
    return (__shfl_sync(NBI_FULL_MASK, threadIdx.x / GROUP, 0) - 2) * (256 / SHARE) +
           blockIdx.z % SHARE * (LATENT / 2);
}

/* Where the thread's first columns lie in a slot's row of values. */
template <int SHARE> NBI_DEV uint32_t first_column()
{
    return group_column<SHARE>() + (uint32_t)nbi_lane() % 4 * 2;
}

/* This warp has read it. */
NBI_DEV void give_back(uint64_t *empty)
{
    __syncwarp();
    if (nbi_lane() == 0) nbi_bar_arrive(empty);
}

/* x += P V, or = of a split's first tile. Gives the tile's stages back. */
template <int SHARE>
NBI_DEV void add_values(sums &x, block_memory *s, uint32_t at, bool more, float keep)
{
    if (more && !__all_sync(NBI_FULL_MASK, keep == 1.0f))
#pragma unroll
        for (int i = 0; i < 128 / SHARE; i++) x.o[i / 64][i % 64] *= keep;
    const uint64_t p = nbi_wgmma_b(s->p);
    const uint64_t v = nbi_wgmma_lying(s->tile[at][group_column<SHARE>() / 64], TILE * 128);
    nbi_wgmma_hold(x.o[0]);
    if (SHARE == 1) nbi_wgmma_hold(x.o[1]);
    nbi_wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int b = 0; b < 2 / SHARE; b++)
            nbi_wgmma_across<128>(x.o[b], p + 2 * k, v + 128 * k + b * (TILE * 128 / 8), more || k);
        if (k % 2) nbi_wgmma_commit();
    }
    nbi_wgmma_wait<1>();
    give_back(&s->empty[at][0]);
    nbi_wgmma_wait<0>();
    nbi_wgmma_hold(x.o[0]);
    if (SHARE == 1) nbi_wgmma_hold(x.o[1]);
    give_back(&s->empty[at][1]);
}

/* ---------------------------------------------------------------- splits */

/* Sums over the splits so far: columns 8 j + 2t + i of run.x[2 j + i]. */
struct merged {
    float x[64];
    float m, l;
};

NBI_DEV void clear(merged &run)
{
    run.m = -INFINITY;
    run.l = 0;
#pragma unroll
    for (int i = 0; i < 64; i++) run.x[i] = 0;
}

/* A split that ends to the scratch. */
template <int SHARE>
NBI_DEV void store_split(const nbi_cuda_attend &a, const nbi_attend_slot &slot, const sums &x,
                         uint32_t splits, uint32_t tile, uint32_t tiles, float m, float l)
{
    const uint32_t column = first_column<SHARE>();
    if (slot.n <= tile / tiles * tiles * TILE) return;
    float *to = nbi_attend_partial(a, splits, slot.row, tile / tiles, slot.head);
    float *at = to + column;
#pragma unroll
    for (int b = 0; b < 2 / SHARE; b++)
#pragma unroll
        for (int j = 0; j < 16; j++)
            *reinterpret_cast<nbi_f32x2 *>(at + 128 * b +
                                           8 * j) = {{sum_of(x, b, j, 0), sum_of(x, b, j, 1)}};
    if (column == 0) *reinterpret_cast<nbi_f32x2 *>(to + LATENT) = {{m, l}};
}

/* The same into `run`. */
NBI_DEV void merge_split(const nbi_cuda_attend &a, const sums &x, merged &run, float m, float l)
{
    const nbi_attend_fold f = nbi_attend_merge(&run.m, &run.l, m, l, nbi_attend_scale(a));
#pragma unroll
    for (int i = 0; i < 64; i++)
        run.x[i] = nbi_attend_merged(f, run.x[i], sum_of(x, i / 32, i % 32 / 2, i % 2));
}

template <bool WALK, int SHARE>
NBI_DEV void add_tiles(const nbi_cuda_attend &a, const block_part &p, block_memory *s,
                       uint32_t splits)
{
    const uint32_t last = p.g.split / TILE - 1, own = own_slot();
    const nbi_attend_slot &slot = s->slot[own]; /* not in registers */
    sums x;
    merged run;
    if (WALK) clear(run);
#pragma unroll 1
    for (uint32_t tile = p.begin; tile < p.end; tile++) {
        const uint32_t count = tile - p.begin;
        const bool ends = (tile & last) == last || tile + 1 == p.end;
        nbi_bar_wait(&s->p_full, count & 1);
        nbi_shared_to_async();
        const float keep = s->keep[own], m = s->m[own], l = s->sum[own];
        add_values<SHARE>(x, s, count % STAGES, (tile & last) != 0, keep);
        nbi_bar_arrive(&s->p_empty);
        if (ends && WALK && slot.n > (tile & ~last) * TILE) merge_split(a, x, run, m, l);
        if (ends && !WALK) store_split<SHARE>(a, slot, x, splits, tile, last + 1, m, l);
        __syncwarp();
    }
    if (!WALK || !slot.n) return;
    const float inverse = 1.0f / run.l;
    float *to = a.out + slot.row * a.out_row + slot.head * a.out_head + first_column<1>();
#pragma unroll
    for (int j = 0; j < 32; j++)
        *reinterpret_cast<nbi_f32x2 *>(to + 8 * j) = {
            {run.x[2 * j] * inverse, run.x[2 * j + 1] * inverse}};
}

/* ---------------------------------------------------------------- the kernel */

/* A row whose list is empty. */
NBI_DEV void store_nothing(const nbi_cuda_attend &a, const nbi_attend_group &g, uint32_t slot0)
{
    for (uint32_t i = 0; i < SLOTS; i++) {
        const nbi_attend_slot slot = nbi_attend_slot_of(a, g, 0, slot0 + i);
        if (slot.row != g.row) break;
        for (uint32_t c = threadIdx.x; c < LATENT; c += THREADS)
            a.out[slot.row * a.out_row + slot.head * a.out_head + c] = 0;
    }
}

/* False: the block has nothing to do. */
template <bool WALK, int SHARE>
NBI_DEV bool find_part(const nbi_cuda_attend &a, uint32_t group_rows, block_part *p)
{
    /* the longest rows first */
    if (!nbi_attend_group_of(a, a.n_rows - 1 - blockIdx.x, group_rows, &p->g)) return false;
    p->slot0 = blockIdx.y * SLOTS;
    const uint32_t per_split = p->g.split / TILE, tiles = (p->g.n + TILE - 1) / TILE;
    const uint32_t many = (tiles + per_split - 1) / per_split;
    const uint32_t blocks = gridDim.z / SHARE, each = (many + blocks - 1) / blocks * per_split;
    p->begin = WALK ? 0 : blockIdx.z / SHARE * each;
    p->end = WALK || p->begin + each > tiles ? tiles : p->begin + each;
    return p->slot0 < p->g.n_rows * a.n_heads && (WALK || p->begin < tiles);
}

NBI_DEV void open_barriers(block_memory *s)
{
    const uint32_t i = threadIdx.x;
    if (i < STAGES) {
        nbi_bar_init(&s->full[i], PARTS * NBI_WARP);
        for (int h = 0; h < 2; h++) nbi_bar_init(&s->empty[i][h], 2 * GROUP / NBI_WARP);
    }
    if (i == STAGES) {
        nbi_bar_init(&s->queries, 2 * GROUP);
        nbi_bar_init(&s->p_full, GROUP);
        nbi_bar_init(&s->p_empty, 2 * GROUP);
    }
    nbi_bar_init_done();
}

/* Whole splits of a group per block; WALK: all of them. */
template <bool WALK, bool CODES, int SHARE>
static __global__ void __launch_bounds__(THREADS, 1)
    latent_kernel(nbi_cuda_attend a, uint32_t group_rows, uint32_t splits)
{
    if constexpr (!NBI_SM90A) {
        nbi_wait_before();
    } else {
        if (a.select) nbi_wait_before(); /* the batch is older than the kernel before, lists not */
        block_part p;
        const bool works = find_part<WALK, SHARE>(a, group_rows, &p);
        if (!works || p.g.n == 0) {
            nbi_wait_before();
            if (works && WALK) store_nothing(a, p.g, p.slot0);
            return;
        }
        block_memory *s = nbi_shared_1024<block_memory>();
        if (threadIdx.x < SLOTS)
            s->slot[threadIdx.x] = nbi_attend_slot_of(a, p.g, 0, p.slot0 + threadIdx.x);
        if (threadIdx.x == 0) s->part = p;
        open_barriers(s);
        __syncthreads();
        if (threadIdx.x < GROUP) {
            nbi_registers<PRODUCER_REGISTERS, false>();
            produce<CODES>(a, s);
        } else if (threadIdx.x < 2 * GROUP) {
            nbi_registers<SCORE_REGISTERS, false>();
            nbi_wait_before();
            nbi_bar_wait(&s->queries, 0);
            make_probabilities(a, s->part, s);
        } else {
            nbi_registers<SUM_REGISTERS, true>();
            load_queries(a, s);
            nbi_bar_arrive(&s->queries);
            add_tiles<WALK, SHARE>(a, s->part, s, splits);
        }
    }
}

/* ---------------------------------------------------------------- launches */

template <bool WALK, int SHARE>
static void launch(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t splits, uint32_t z)
{
    const nbi_attend_grid g = nbi_attend_grid_of(a, SLOTS);
    nbi_launch(&c->rt, dim3(a->n_rows, g.parts, z * SHARE), dim3(THREADS), sizeof(block_memory),
               a->codes ? latent_kernel<WALK, true, SHARE> : latent_kernel<WALK, false, SHARE>, *a,
               g.rows, splits);
}

/* Whether two blocks share the columns of z blocks a row. Those of more than one row must find
 * room beside the kernel before, or half of them begin late. */
static bool shares(const nbi_cuda *c, const nbi_cuda_attend *a, uint32_t z)
{
    const uint32_t blocks = nbi_attend_grid_of(a, SLOTS).blocks, sms = (uint32_t)c->rt.n_sms;
    return 2 * z * blocks <= (blocks == 1 ? sms : sms * 3 / 8);
}

bool nbi_cuda_attend_wide(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t *unmerged)
{
    if (c->base.sm != 90 || c->rt.shared_max < sizeof(block_memory) || (uintptr_t)a->q % 16 ||
        a->q_row % 4 || a->q_head % 4)
        return false;
    const uint32_t splits = nbi_attend_splits_most(a->max_len), sms = (uint32_t)c->rt.n_sms;
    const uint32_t room = sms / nbi_attend_grid_of(a, SLOTS).blocks;
    const uint32_t z = room < splits ? room : splits;
    const size_t row = nbi_cuda_attend_row_bytes(a->max_len, a->n_heads, a->v_width);
    /* two blocks a row would take longer: their partial sums go to memory and back */
    if (z > 2 && a->partial_bytes / row >= a->n_rows) {
        if (shares(c, a, z))
            launch<false, 2>(c, a, splits, z);
        else
            launch<false, 1>(c, a, splits, z);
        *unmerged = splits;
    } else {
        launch<true, 1>(c, a, splits, 1);
    }
    return true;
}
