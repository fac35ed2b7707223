/* Attention over latents as attend_mla.cu has it, on warpgroups (wgmma, compute capability 9.0).
 * Callers: attend_mla.cu.
 *
 * Positions are the rows of both products, slots (pairs of a row and a head) their columns: scores
 * are K Q^T, sums V^T P^T. A block has 16 or 32 slots and walks over tiles of 64 positions. The
 * first warpgroup asks for positions, each of its warps for half a tile in a stage of its own.
 * Scores: of every 64 columns one of the other two takes the first half, one the second, both from
 * shared memory; each makes the probabilities of half of the slots. Sums: each has 256 of the 512
 * columns, with values as A in its registers. Queries and probabilities are two BF16 halves;
 * those of the queries are columns of one product. Probabilities lie where a tile's last 64 columns
 * were, which only scores need. What a slot computes does not depend on how many there are. */
#include "backend/cuda/attend.h"

#define TILE          64
#define HALF          32 /* positions of a stage, half of a tile */
#define STAGES        4
#define LATENT        512
#define WIDTH         (LATENT + 64)
#define BLOCKS        (WIDTH / 64) /* of 64 columns: a row of one has 128 bytes */
#define GROUP         128          /* threads of a warpgroup */
#define THREADS       (3 * GROUP)
#define SLOT          (LATENT + 16 + 2 * 64) /* bytes of a position in codes: kv_shape.h */

#define ALL_CONSUMERS 1 /* named barriers; 2 and 3: of one warpgroup */

/* 128 * (first + 2 * second) are all that a multiprocessor has but 1,024. */
template <bool CODES> constexpr int producer_registers = CODES ? 56 : 40;
template <bool CODES> constexpr int consumer_registers = CODES ? 224 : 232;

/* Of a row of 128 bytes, the 16-byte piece q lies at q ^ row % 8. */
template <int SLOTS> struct alignas(1024) block_memory {
    uint16_t q[BLOCKS][2 * SLOTS][64]; /* upper halves of the slots, then lower */
    uint16_t tile[STAGES / 2][BLOCKS][TILE][64];
    nbi_f32x4 part[2][SLOTS / 16][GROUP]; /* scores for the slots of a warpgroup from the other */
    float top[4][SLOTS], sum[4][SLOTS];   /* of 16 positions each */
    float keep[SLOTS], m[SLOTS];
    nbi_attend_slot slot[SLOTS];
    uint64_t full[STAGES], empty[STAGES];
};

/* Tiles of a block, and what they are of. */
struct block_part {
    nbi_attend_group g;
    uint32_t slot0, begin, end;
};

/* ---------------------------------------------------------------- positions on their way */

/* Where this lane's position of a half tile begins; -1 behind the last. */
NBI_DEV long long find_place(const nbi_cuda_attend &a, const nbi_attend_group &g,
                             uint32_t half_tile)
{
    const uint32_t j = half_tile * HALF + (uint32_t)nbi_lane();
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
    for (int i = 0; i < HALF / 4; i++) {
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
    const int q = nbi_lane() % 8;
#pragma unroll 2
    for (int i = 0; i < HALF / 4; i++) {
        const int row = 4 * i + nbi_lane() / 8;
        const long long at = __shfl_sync(NBI_FULL_MASK, place, row);
        const uint8_t *p = from + (at < 0 ? 0 : at) + 16 * q;
#pragma unroll
        for (int b = 0; b < LATENT / 128; b++)
            nbi_copy_async(piece_of(stage, 4 + b, row, q), p + 128 * b, at >= 0);
        nbi_copy_async(piece_of(stage, BLOCKS - 1, row, q), p + LATENT + 16, at >= 0);
    }
    nbi_copy_async(piece_of(stage, 0, nbi_lane(), 0), from + (place < 0 ? 0 : place) + LATENT,
                   place >= 0);
}

NBI_DEV void decode_codes(uint16_t *stage)
{
    const int lane = nbi_lane();
    __syncwarp();
#pragma unroll 1
    for (int row0 = 0; row0 < HALF; row0 += 2) {
        nbi_u32x4 codes[2];
        float scale[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint16_t *from = piece_of(stage, 4 + lane / 8, row0 + i, lane % 8);
            const uint16_t *scales = piece_of(stage, 0, row0 + i, 0);
            codes[i] = *reinterpret_cast<const nbi_u32x4 *>(from);
            scale[i] = reinterpret_cast<const float *>(scales)[lane / 8];
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            nbi_u32x4 out[2];
            nbi_codes_decode16(codes[i], scale[i], out);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint16_t *to = piece_of(stage, lane / 4, row0 + i, lane % 4 * 2 + j);
                *reinterpret_cast<nbi_u32x4 *>(to) = out[j];
            }
        }
    }
}

/* A warp of the first warpgroup: every fourth half tile. What steps before left in the cache is
 * asked for while the kernel before still runs. */
template <int SLOTS, bool CODES>
NBI_DEV void produce(const nbi_cuda_attend &a, const block_part &p, block_memory<SLOTS> *s)
{
    const uint32_t warp = threadIdx.x / NBI_WARP;
    const uint32_t old = a.select ? 0 : (uint32_t)a.pos[a.seq_first[p.g.seq]];
    uint16_t *stage = s->tile[warp / 2][0][warp % 2 * HALF];
    bool waited = a.select != NULL; /* by latent_kernel() */
    if (waited) nbi_let_next();
    uint32_t half_tile = 2 * p.begin + warp, round = 0;
    long long place = find_place(a, p.g, half_tile);
    for (; half_tile < 2 * p.end; half_tile += STAGES, round++) {
        if (!waited && (half_tile + 1) * HALF > old) {
            nbi_wait_before();
            nbi_let_next();
            waited = true;
        }
        nbi_bar_wait(&s->empty[warp], (round & 1) ^ 1);
        if (CODES)
            load_codes(a, place, stage);
        else
            load_bf16(a, place, stage);
        nbi_copy_commit();
        place = find_place(a, p.g, half_tile + STAGES);
        nbi_copy_wait<0>();
        if (CODES) decode_codes(stage);
        __syncwarp();
        if (nbi_lane() == 0) nbi_bar_arrive(&s->full[warp]);
    }
    if (!waited) {
        nbi_wait_before();
        nbi_let_next();
    }
}

/* ---------------------------------------------------------------- queries */

NBI_DEV uint32_t consumer()
{
    return threadIdx.x / GROUP - 1;
}

/* The same so that the compiler sees it is one for the warp; all lanes. */
NBI_DEV uint32_t warp_consumer()
{
    return __shfl_sync(NBI_FULL_MASK, threadIdx.x / GROUP, 0) - 1;
}

template <int SLOTS> NBI_DEV void load_queries(const nbi_cuda_attend &a, block_memory<SLOTS> *s)
{
#pragma unroll 3
    for (uint32_t i = threadIdx.x - GROUP; i < SLOTS * (WIDTH / 8); i += 2 * GROUP) {
        const uint32_t row = i / (WIDTH / 8), c = i % (WIDTH / 8);
        const nbi_attend_slot &slot = s->slot[row];
        const float *q = a.q + slot.row * a.q_row + slot.head * a.q_head + 8 * c;
        nbi_f32x4 x[2] = {};
        if (slot.n) {
            x[0] = *reinterpret_cast<const nbi_f32x4 *>(q);
            x[1] = *reinterpret_cast<const nbi_f32x4 *>(q + 4);
        }
        nbi_u32x4 hi, lo;
#pragma unroll
        for (int j = 0; j < 4; j++)
            nbi_halves(x[j / 2].v[j % 2 * 2], x[j / 2].v[j % 2 * 2 + 1], &hi.v[j], &lo.v[j]);
        uint16_t *to = s->q[c / 8][row] + (c % 8 ^ row % 8) * 8;
        *reinterpret_cast<nbi_u32x4 *>(to) = hi;
        *reinterpret_cast<nbi_u32x4 *>(to + SLOTS * 64) = lo;
    }
}

/* ---------------------------------------------------------------- scores */

/* d: positions 16 warp + g, + 8, columns of q; the warpgroup's half of the products. */
template <int SLOTS>
NBI_DEV void score_tile(const block_memory<SLOTS> *s, const uint16_t *tile, float (&d)[SLOTS])
{
    const uint32_t first = warp_consumer() * 4;
    const uint64_t k = nbi_wgmma_b(tile) + first, q = nbi_wgmma_b(s->q) + first;
    nbi_shared_to_async(); /* of the first warpgroup's copies */
    nbi_wgmma_hold(d);
    nbi_wgmma_begin();
#pragma unroll
    for (int c = 0; c < BLOCKS; c++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            nbi_wgmma_shared<2 * SLOTS>(d, k + c * (TILE * 128 / 16) + 2 * i,
                                        q + c * (2 * SLOTS * 128 / 16) + 2 * i, c || i);
    nbi_wgmma_commit();
    nbi_wgmma_wait<0>();
    nbi_wgmma_hold(d);
}

/* The slots that this thread makes probabilities of: 8 (own + j) + 2t + e, and which positions they
 * see. */
template <int SLOTS> struct softmax {
    static constexpr int OWN = SLOTS / 16;
    float m[2 * OWN], l[2 * OWN]; /* l: of this thread's positions */
    int n[2 * OWN];
};

/* NaN is left out; what has it becomes NaN by itself. */
NBI_DEV float eight_max(float x)
{
    for (int d = 4; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(NBI_FULL_MASK, x, d));
    return x;
}

NBI_DEV float eight_sum(float x)
{
    for (int d = 4; d < 32; d *= 2) x += __shfl_xor_sync(NBI_FULL_MASK, x, d);
    return x;
}

/* Both warpgroups' parts of the own slots' scores; positions behind what a slot sees are gone. */
template <int SLOTS>
NBI_DEV void add_parts(block_memory<SLOTS> *s, const float (&d)[SLOTS], const softmax<SLOTS> &r,
                       uint32_t tile, nbi_f32x4 (&x)[softmax<SLOTS>::OWN])
{
    constexpr int OWN = softmax<SLOTS>::OWN;
    const uint32_t who = consumer(), thread = threadIdx.x % GROUP;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        nbi_f32x4 other;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = 4 * j + i;
            const float first = d[at] + d[at + SLOTS / 2];
            const float second = d[at + 4 * OWN] + d[at + 4 * OWN + SLOTS / 2];
            x[j].v[i] = who ? second : first;
            other.v[i] = who ? first : second;
        }
        s->part[1 - who][j][thread] = other;
    }
    nbi_sync_some(ALL_CONSUMERS, 2 * GROUP);
    const int pos = (int)(tile * TILE + thread / NBI_WARP * 16) + nbi_lane() / 4;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const nbi_f32x4 other = s->part[who][j][thread];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[j].v[i] += other.v[i];
            if (pos + i / 2 * 8 >= r.n[2 * j + i % 2]) x[j].v[i] = -INFINITY;
        }
    }
}

/* Of half a tile's positions, where its last columns were: a row of a slot has the 32 upper halves,
 * then the lower. */
template <class T> NBI_DEV T *probabilities(T *tile, uint32_t half_tile)
{
    return tile + ((BLOCKS - 1) * TILE + half_tile * HALF) * 64;
}

/* Probabilities of the own slots relative to the new maximum. */
template <int SLOTS>
NBI_DEV void fold_tile(block_memory<SLOTS> *s, uint16_t *values, uint32_t tile, bool ends,
                       float scale, const float (&d)[SLOTS], softmax<SLOTS> &r)
{
    constexpr int OWN = softmax<SLOTS>::OWN;
    const int lane = nbi_lane(), g = lane / 4, warp = threadIdx.x / NBI_WARP % 4;
    const int slot0 = (int)consumer() * SLOTS / 2 + lane % 4 * 2;
    nbi_f32x4 x[OWN];
    add_parts(s, d, r, tile, x);
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        nbi_f32x2 top;
#pragma unroll
        for (int e = 0; e < 2; e++) top.v[e] = eight_max(fmaxf(x[j].v[e], x[j].v[2 + e]));
        if (g == 0) *reinterpret_cast<nbi_f32x2 *>(&s->top[warp][slot0 + 8 * j]) = top;
    }
    nbi_sync_some(2 + consumer(), GROUP);
    uint16_t *rows = probabilities(values, warp / 2) + slot0 * 64 + g;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        /* pieces of the row: 2 (warp % 2), + 1 of the upper halves, + 4, + 5 of the lower */
        uint16_t *to = rows + e * 64;
        const int at = ((warp % 2 * 2) ^ (slot0 + e) % 8) * 8;
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const int slot = slot0 + 8 * j + e;
            float &m = r.m[2 * j + e], &l = r.l[2 * j + e];
            const float top = fmaxf(fmaxf(m, fmaxf(s->top[0][slot], s->top[1][slot])),
                                    fmaxf(s->top[2][slot], s->top[3][slot]));
            const float base = top == -INFINITY ? 0 : -(top * scale);
            const float keep = nbi_attend_keep(m, top, scale, base);
            const float p = exp2f(fmaf(x[j].v[e], scale, base));
            const float q = exp2f(fmaf(x[j].v[2 + e], scale, base));
            m = top;
            l = fmaf(l, keep, p + q);
            uint32_t upper, lower;
            nbi_halves(p, q, &upper, &lower);
            to[8 * j * 64 + at] = (uint16_t)upper;
            to[8 * j * 64 + (at ^ 8)] = (uint16_t)(upper >> 16);
            to[8 * j * 64 + (at ^ 32)] = (uint16_t)lower;
            to[8 * j * 64 + (at ^ 40)] = (uint16_t)(lower >> 16);
            if (warp == 0 && g == 0) {
                s->keep[slot] = keep;
                s->m[slot] = m;
            }
            if (!ends) continue;
            l = eight_sum(l);
            if (g == 0) s->sum[warp][slot] = l;
            m = -INFINITY;
            l = 0;
        }
    }
    nbi_shared_to_async();
    nbi_sync_some(ALL_CONSUMERS, 2 * GROUP);
}

/* ---------------------------------------------------------------- values */

/* o[b][4 j + i]: columns 64 (4 consumer + b) + 16 warp + g (+ 8 from i = 2 on), slots 8 j + 2t + i
 * % 2. */
template <int SLOTS> struct sums {
    float o[4][SLOTS / 2];
};

/* Values of the warpgroup's columns and 16 positions, as A. */
NBI_DEV void load_values(uint32_t (&x)[4][4], const uint16_t *v)
{
#pragma unroll
    for (int b = 0; b < 4; b++) nbi_ldmatrix_trans(x[b], v + b * TILE * 64);
}

/* A stage is read, by this warp. */
NBI_DEV void give_back(uint64_t *empty)
{
    __syncwarp();
    if (nbi_lane() == 0) nbi_bar_arrive(empty);
}

template <int SLOTS> NBI_DEV void rescale(sums<SLOTS> &x, const block_memory<SLOTS> *s)
{
    nbi_f32x2 keep[SLOTS / 8];
    bool same = true;
#pragma unroll
    for (int j = 0; j < SLOTS / 8; j++) {
        keep[j] = *reinterpret_cast<const nbi_f32x2 *>(&s->keep[8 * j + nbi_lane() % 4 * 2]);
        same = same && keep[j].v[0] == 1.0f && keep[j].v[1] == 1.0f;
    }
    if (__all_sync(NBI_FULL_MASK, same)) return;
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
        for (int i = 0; i < SLOTS / 2; i++) x.o[b][i] *= keep[i / 4].v[i % 2];
}

/* x += V^T P^T, or = of a split's first tile. Gives the tile's stages back. */
template <int SLOTS>
NBI_DEV void add_values(sums<SLOTS> &x, block_memory<SLOTS> *s, uint32_t at, bool more)
{
    const uint32_t lane = (uint32_t)nbi_lane(), warp = threadIdx.x / NBI_WARP % 4;
    const uint16_t *tile = s->tile[at][0][0];
    const uint16_t *v = tile + consumer() * 4 * TILE * 64 + (lane / 16 * 8 + lane % 8) * 64 +
                        ((2 * warp + lane / 8 % 2) ^ lane % 8) * 8;
    const uint64_t p[2] = {nbi_wgmma_b(probabilities(tile, 0)),
                           nbi_wgmma_b(probabilities(tile, 1))};
    uint32_t a[2][4][4];
    load_values(a[0], v);
    if (more) rescale(x, s);
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int b = 0; b < 4; b++) nbi_wgmma_hold(x.o[b]);
        nbi_wgmma_begin();
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int b = 0; b < 4; b++) /* sums in turn */
                nbi_wgmma<SLOTS, true>(x.o[b], a[k % 2][b], p[k / 2] + 4 * h + k % 2 * 2,
                                       more || k || h);
        nbi_wgmma_commit();
        if (k == 3) break;
        nbi_wgmma_wait<1>();
        if (k == 2) give_back(&s->empty[2 * at]);
        load_values(a[(k + 1) % 2], v + (k + 1) * 16 * 64);
    }
    nbi_wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < 4; b++) nbi_wgmma_hold(x.o[b]);
    give_back(&s->empty[2 * at + 1]);
}

/* ---------------------------------------------------------------- splits */

/* Sums over the splits so far; m and l of slot lane % SLOTS. */
template <int SLOTS> struct merged {
    sums<SLOTS> x;
    float m, l;
};

/* The thread's slot i, of SLOTS / 4. */
NBI_DEV int slot_of(int i)
{
    return i / 2 * 8 + nbi_lane() % 4 * 2 + i % 2;
}

NBI_DEV uint32_t first_column()
{
    return consumer() * 256 + threadIdx.x / NBI_WARP % 4 * 16 + (uint32_t)nbi_lane() / 4;
}

/* The thread's columns of its slot i. */
template <int SLOTS>
NBI_DEV void store_columns(const sums<SLOTS> &x, int i, float factor, float *to)
{
    float *at = to + first_column();
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
        for (int h = 0; h < 2; h++) at[64 * b + 8 * h] = x.o[b][i / 2 * 4 + i % 2 + 2 * h] * factor;
}

template <int SLOTS> NBI_DEV float split_sum(const block_memory<SLOTS> *s, int slot)
{
    return (s->sum[0][slot] + s->sum[1][slot]) + (s->sum[2][slot] + s->sum[3][slot]);
}

/* A split that ends to the scratch. */
template <int SLOTS>
NBI_DEV void store_split(const nbi_cuda_attend &a, const block_memory<SLOTS> *s,
                         const nbi_attend_group &g, const sums<SLOTS> &x, uint32_t splits,
                         uint32_t split)
{
#pragma unroll
    for (int i = 0; i < SLOTS / 4; i++) {
        const nbi_attend_slot slot = s->slot[slot_of(i)];
        if (slot.n <= split * g.split) continue;
        float *to = nbi_attend_partial(a, splits, slot.row, split, slot.head);
        store_columns(x, i, 1, to);
        if (threadIdx.x / NBI_WARP == GROUP / NBI_WARP && nbi_lane() < 4)
            *reinterpret_cast<nbi_f32x2 *>(to +
                                           LATENT) = {{s->m[slot_of(i)], split_sum(s, slot_of(i))}};
    }
}

/* The same into `run`: a lane has the factors of a slot. */
template <int SLOTS>
NBI_DEV void merge_split(const nbi_cuda_attend &a, const block_memory<SLOTS> *s,
                         const nbi_attend_group &g, const sums<SLOTS> &x, merged<SLOTS> &run,
                         uint32_t split)
{
    const int own = nbi_lane() % SLOTS;
    const bool sees = s->slot[own].n > split * g.split;
    nbi_attend_fold f = {1, 0};
    if (sees)
        f = nbi_attend_merge(&run.m, &run.l, s->m[own], split_sum(s, own), nbi_attend_scale(a));
    const uint32_t all = __ballot_sync(NBI_FULL_MASK, sees);
#pragma unroll
    for (int i = 0; i < SLOTS / 4; i++) {
        const nbi_attend_fold k = {__shfl_sync(NBI_FULL_MASK, f.keep, slot_of(i)),
                                   __shfl_sync(NBI_FULL_MASK, f.add, slot_of(i))};
        if (!(all >> slot_of(i) & 1)) continue;
#pragma unroll
        for (int b = 0; b < 4; b++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int j = i / 2 * 4 + i % 2 + 2 * h;
                run.x.o[b][j] = nbi_attend_merged(k, run.x.o[b][j], x.o[b][j]);
            }
    }
}

template <int SLOTS> NBI_DEV void clear(merged<SLOTS> &run)
{
    run.m = -INFINITY;
    run.l = 0;
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
        for (int i = 0; i < SLOTS / 2; i++) run.x.o[b][i] = 0;
}

template <int SLOTS> NBI_DEV void begin_softmax(const block_memory<SLOTS> *s, softmax<SLOTS> &r)
{
#pragma unroll
    for (int i = 0; i < 2 * softmax<SLOTS>::OWN; i++) {
        r.m[i] = -INFINITY;
        r.l[i] = 0;
        r.n[i] = (int)s->slot[consumer() * SLOTS / 2 + i / 2 * 8 + nbi_lane() % 4 * 2 + i % 2].n;
    }
}

template <int SLOTS, bool WALK>
NBI_DEV void consume(const nbi_cuda_attend &a, const block_part &p, block_memory<SLOTS> *s,
                     uint32_t splits)
{
    nbi_wait_before();
    nbi_let_next();
    load_queries(a, s);
    nbi_shared_to_async();
    nbi_sync_some(ALL_CONSUMERS, 2 * GROUP);
    const uint32_t per_split = p.g.split / TILE;
    const float scale = nbi_attend_scale(a);
    softmax<SLOTS> r;
    sums<SLOTS> x;
    merged<SLOTS> run;
    begin_softmax(s, r);
    if (WALK) clear(run);
#pragma unroll 1
    for (uint32_t tile = p.begin; tile < p.end; tile++) {
        const uint32_t count = tile - p.begin, at = count % 2, parity = count / 2 & 1;
        const bool ends = (tile + 1) % per_split == 0 || tile + 1 == p.end;
        uint16_t *here = s->tile[at][0][0];
        nbi_bar_wait(&s->full[2 * at], parity);
        nbi_bar_wait(&s->full[2 * at + 1], parity);
        float d[SLOTS];
        score_tile(s, here, d);
        fold_tile(s, here, tile, ends, scale, d, r);
        add_values(x, s, at, tile % per_split != 0);
        if (!ends) continue;
        if (WALK)
            merge_split(a, s, p.g, x, run, tile / per_split);
        else
            store_split(a, s, p.g, x, splits, tile / per_split);
    }
    if (!WALK) return;
    const float inverse = 1.0f / run.l;
#pragma unroll
    for (int i = 0; i < SLOTS / 4; i++) {
        const nbi_attend_slot slot = s->slot[slot_of(i)];
        const float factor = __shfl_sync(NBI_FULL_MASK, inverse, slot_of(i));
        if (slot.n)
            store_columns(run.x, i, factor, a.out + slot.row * a.out_row + slot.head * a.out_head);
    }
}

/* ---------------------------------------------------------------- the kernel */

/* A row whose list is empty. */
template <int SLOTS>
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
template <int SLOTS, bool WALK>
NBI_DEV bool find_part(const nbi_cuda_attend &a, uint32_t group_rows, block_part *p)
{
    /* the longest rows first */
    if (!nbi_attend_group_of(a, a.n_rows - 1 - blockIdx.x, group_rows, &p->g)) return false;
    p->slot0 = blockIdx.y * SLOTS;
    const uint32_t per_split = p->g.split / TILE, tiles = (p->g.n + TILE - 1) / TILE;
    const uint32_t many = (tiles + per_split - 1) / per_split;
    const uint32_t each = (many + gridDim.z - 1) / gridDim.z * per_split;
    p->begin = WALK ? 0 : blockIdx.z * each;
    p->end = WALK || p->begin + each > tiles ? tiles : p->begin + each;
    return p->slot0 < p->g.n_rows * a.n_heads && (WALK || p->begin < tiles);
}

/* Whole splits of a group per block; WALK: all of them. */
template <int SLOTS, bool WALK, bool CODES>
static __global__ void __launch_bounds__(THREADS, 1)
    latent_kernel(nbi_cuda_attend a, uint32_t group_rows, uint32_t splits)
{
    if constexpr (!NBI_SM90A) {
        nbi_wait_before();
    } else {
        if (a.select) nbi_wait_before(); /* the batch is older than the kernel before, lists not */
        block_part p;
        const bool works = find_part<SLOTS, WALK>(a, group_rows, &p);
        if (!works || p.g.n == 0) {
            nbi_wait_before();
            if (works && WALK) store_nothing<SLOTS>(a, p.g, p.slot0);
            return;
        }
        block_memory<SLOTS> *s = nbi_shared_1024<block_memory<SLOTS>>();
        if (threadIdx.x < SLOTS)
            s->slot[threadIdx.x] = nbi_attend_slot_of(a, p.g, 0, p.slot0 + threadIdx.x);
        if (threadIdx.x < STAGES) {
            nbi_bar_init(&s->full[threadIdx.x], 1);
            nbi_bar_init(&s->empty[threadIdx.x], 2 * GROUP / NBI_WARP);
        }
        nbi_bar_init_done();
        __syncthreads();
        if (threadIdx.x < GROUP) {
            nbi_registers<producer_registers<CODES>, false>();
            produce<SLOTS, CODES>(a, p, s);
        } else {
            nbi_registers<consumer_registers<CODES>, true>();
            consume<SLOTS, WALK>(a, p, s, splits);
        }
    }
}

/* ---------------------------------------------------------------- launches */

template <int SLOTS, bool WALK>
static void launch(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t splits, uint32_t z)
{
    const nbi_attend_grid g = nbi_attend_grid_of(a, SLOTS);
    nbi_launch(&c->rt, dim3(a->n_rows, g.parts, z), dim3(THREADS), sizeof(block_memory<SLOTS>),
               a->codes ? latent_kernel<SLOTS, WALK, true> : latent_kernel<SLOTS, WALK, false>, *a,
               g.rows, splits);
}

bool nbi_cuda_attend_wide(nbi_cuda *c, const nbi_cuda_attend *a, uint32_t *unmerged)
{
    if (c->base.sm != 90 || c->rt.shared_max < sizeof(block_memory<32>) || (uintptr_t)a->q % 16 ||
        a->q_row % 4 || a->q_head % 4)
        return false;
    const uint32_t splits = nbi_attend_splits_most(a->max_len), sms = (uint32_t)c->rt.n_sms;
    const uint32_t room = sms / nbi_attend_grid_of(a, 16).blocks, z = room < splits ? room : splits;
    const size_t row = nbi_cuda_attend_row_bytes(a->max_len, a->n_heads, a->v_width);
    if (z > 1 && a->partial_bytes / row >= a->n_rows) {
        launch<16, false>(c, a, splits, z);
        *unmerged = splits;
    } else if (nbi_attend_grid_of(a, 16).blocks > sms) {
        launch<32, true>(c, a, splits, 1);
    } else {
        launch<16, true>(c, a, splits, 1);
    }
    return true;
}
