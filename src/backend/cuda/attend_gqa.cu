/* Attention of heads of 64 or 128 values over a cache in BF16 or E4M3 by matrix units: many rows of
 * a sequence. Callers: attend.cu.
 *
 * A warp has 16 slots, pairs of a row and a query head of one kv head; a block's warps share the
 * positions. Few rows are attend_few.cu's, with the same bits. Queries and probabilities go in as
 * two BF16 halves: the cache is exact in BF16, so products keep 16 bits. */
#include "backend/cuda/attend.h"

#define TILE  64 /* positions: a page */
#define SLOTS 16 /* of a warp */

/* Rows in shared memory lie 16 bytes further apart, so that eight of them hit all banks. */
template <int D> constexpr int padded = D + 8;

template <int D, int NW> constexpr size_t shared_bytes()
{
    return (size_t)(2 * NW * SLOTS + 2 * 2 * TILE) * padded<D> * sizeof(uint16_t);
}

/* Running softmax of a warp's slots: lane (g, t) has rows g and g + 8. */
template <int D> struct softmax {
    float o[D / 8][4], m[2], l[2];
};

template <int D> NBI_DEV void start(softmax<D> &x)
{
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) x.o[i][j] = 0;
    x.m[0] = x.m[1] = -INFINITY;
    x.l[0] = x.l[1] = 0;
}

/* Queries of the warp's slots, halved, into hi and lo [SLOTS][padded]. */
template <int D>
NBI_DEV void load_queries(const nbi_cuda_attend &a, const nbi_attend_group &g, uint32_t kv,
                          uint32_t slot0, uint16_t *hi, uint16_t *lo)
{
    for (uint32_t i = 0; i < SLOTS; i++) {
        const nbi_attend_slot s = nbi_attend_slot_of(a, g, kv, slot0 + i);
        const float *q = a.q + s.row * a.q_row + s.head * a.q_head;
        for (uint32_t c = 2 * nbi_lane(); c < D; c += 2 * NBI_WARP)
            nbi_halves(s.n ? q[c] : 0, s.n ? q[c + 1] : 0,
                       reinterpret_cast<uint32_t *>(hi + i * padded<D> + c),
                       reinterpret_cast<uint32_t *>(lo + i * padded<D> + c));
    }
}

/* Keys and values of a tile on their way to `stage`; zeros behind the group's last position. */
template <int D, int NW, bool CODES>
NBI_DEV void load_tile(const nbi_cuda_attend &a, const nbi_attend_group &g, size_t head_at,
                       uint32_t tile, int32_t page, uint16_t *stage)
{
    const size_t at = (size_t)page * a.kv_page + head_at;
    if (CODES) {
        const uint8_t *keys = static_cast<const uint8_t *>(a.k) + at;
        const uint8_t *values = static_cast<const uint8_t *>(a.v) + at;
#pragma unroll 1
        for (int i = threadIdx.x; i < 2 * TILE * (D / 16); i += NW * NBI_WARP) {
            const int row = i / (D / 16), c = i % (D / 16) * 16, slot = row % TILE;
            const uint8_t *from = row < TILE ? keys : values;
            nbi_codes_copy<D>(stage + row * padded<D>, c, from + slot * D, from + TILE * D, slot,
                              tile * TILE + slot < g.n);
        }
        return;
    }
    const uint16_t *k = static_cast<const uint16_t *>(a.k) + at;
    const uint16_t *v = static_cast<const uint16_t *>(a.v) + at;
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE * (D / 8); i += NW * NBI_WARP) {
        const int row = i / (D / 8), c = i % (D / 8) * 8;
        const bool take = tile * TILE + row < g.n;
        nbi_copy_async(stage + row * padded<D> + c, k + row * D + c, take);
        nbi_copy_async(stage + (TILE + row) * padded<D> + c, v + row * D + c, take);
    }
}

/* Codes that have come, of the rows that the warp asked for. */
template <int D, int NW> NBI_DEV void decode_tile(uint16_t *stage)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * TILE * (D / 16);
         i += NW * NBI_WARP) { /* sums fill registers */
        const int row = i / (D / 16), slot[1] = {row};
        uint16_t *const rows[1] = {stage + row * padded<D>};
        nbi_codes_decode<D>(rows, slot, i % (D / 16) * 16);
    }
}

template <int D>
NBI_DEV void tile_scores(const uint16_t *hi, const uint16_t *lo, const uint16_t *k,
                         float s[TILE / 8][4])
{
    const int lane = nbi_lane();
    const int a_at = ((lane & 7) + (lane >> 3 & 1) * 8) * padded<D> + (lane >> 4) * 8;
    const int b_at = (lane & 7) * padded<D> + (lane >> 3) * 8;
#pragma unroll
    for (int i = 0; i < TILE / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) s[i][j] = 0;
#pragma unroll
    for (int c = 0; c < D; c += 32) {
        uint32_t qh[2][4], ql[2][4];
        for (int i = 0; i < 2; i++) {
            nbi_ldmatrix(qh[i], hi + a_at + c + 16 * i);
            nbi_ldmatrix(ql[i], lo + a_at + c + 16 * i);
        }
#pragma unroll
        for (int i = 0; i < TILE / 8; i++) {
            uint32_t b[4];
            nbi_ldmatrix(b, k + i * 8 * padded<D> + b_at + c);
            nbi_mma_bf16(s[i], qh[0], b);
            nbi_mma_bf16(s[i], ql[0], b);
            nbi_mma_bf16(s[i], qh[1], b + 2);
            nbi_mma_bf16(s[i], ql[1], b + 2);
        }
    }
}

/* Scores to probabilities relative to the new maximum, of the slot in rows g + 8 side; the sum and
 * the values so far are rescaled. n: positions from the tile's first on that the slot sees. */
template <int D>
NBI_DEV void fold_row(softmax<D> &x, float s[TILE / 8][4], int side, int n, float scale)
{
    const int t = nbi_lane() & 3;
    float top = x.m[side];
#pragma unroll
    for (int i = 0; i < TILE / 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float &y = s[i][2 * side + j];
            if (i * 8 + 2 * t + j >= n) y = -INFINITY;
            top = y > top ? y : top;
        }
    for (int d = 1; d < 4; d *= 2) {
        const float other = __shfl_xor_sync(NBI_FULL_MASK, top, d);
        top = other > top ? other : top;
    }
    const float base = top == -INFINITY ? 0 : -(top * scale);
    const float keep = nbi_attend_keep(x.m[side], top, scale, base);
    float sum[TILE / 8];
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) {
        float *y = &s[i][2 * side];
        y[0] = exp2f(fmaf(y[0], scale, base));
        y[1] = exp2f(fmaf(y[1], scale, base));
        sum[i] = y[0] + y[1];
    }
#pragma unroll
    for (int d = 1; d < TILE / 8; d *= 2)
#pragma unroll
        for (int i = 0; i < TILE / 8; i += 2 * d) sum[i] += sum[i + d];
    x.m[side] = top;
    x.l[side] = fmaf(x.l[side], keep, sum[0]);
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        x.o[i][2 * side] *= keep;
        x.o[i][2 * side + 1] *= keep;
    }
}

template <int D>
NBI_DEV void add_values(softmax<D> &x, const float s[TILE / 8][4], const uint16_t *v)
{
    const int lane = nbi_lane();
    const int at = ((lane & 7) + (lane >> 3 & 1) * 8) * padded<D> + (lane >> 4) * 8;
#pragma unroll
    for (int i = 0; i < TILE / 16; i++) {
        uint32_t ph[4], pl[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float *p = &s[2 * i + j / 2][j % 2 * 2];
            nbi_halves(p[0], p[1], &ph[j], &pl[j]);
        }
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            uint32_t b[4];
            nbi_ldmatrix_trans(b, v + i * 16 * padded<D> + at + c * 16);
            nbi_mma_bf16(x.o[2 * c], ph, b);
            nbi_mma_bf16(x.o[2 * c], pl, b);
            nbi_mma_bf16(x.o[2 * c + 1], ph, b + 2);
            nbi_mma_bf16(x.o[2 * c + 1], pl, b + 2);
        }
    }
}

/* The sums of a row's four lanes. */
NBI_DEV float quad_sum(float x)
{
    x += __shfl_xor_sync(NBI_FULL_MASK, x, 1);
    return x + __shfl_xor_sync(NBI_FULL_MASK, x, 2);
}

/* One split's result of the slot in rows g + 8 side. */
template <int D>
NBI_DEV void store_partial(const nbi_cuda_attend &a, const softmax<D> &x, int side,
                           const nbi_attend_slot &slot, uint32_t splits, uint32_t split)
{
    float *p = nbi_attend_partial(a, splits, slot.row, split, slot.head);
    const int t = nbi_lane() & 3;
#pragma unroll
    for (int i = 0; i < D / 8; i++)
        *reinterpret_cast<nbi_f32x2 *>(p + i * 8 +
                                       2 * t) = {{x.o[i][2 * side], x.o[i][2 * side + 1]}};
    if (t == 0) *reinterpret_cast<nbi_f32x2 *>(p + D) = {{x.m[side], x.l[side]}};
}

template <int D>
NBI_DEV void merge_split(softmax<D> &run, const softmax<D> &x, int side, float scale)
{
    const nbi_attend_fold f =
        nbi_attend_merge(&run.m[side], &run.l[side], x.m[side], x.l[side], scale);
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
        for (int j = 2 * side; j < 2 * side + 2; j++)
            run.o[i][j] = nbi_attend_merged(f, run.o[i][j], x.o[i][j]);
}

template <int D>
NBI_DEV void store_out(const nbi_cuda_attend &a, const softmax<D> &run, int side,
                       const nbi_attend_slot &slot)
{
    float *out = a.out + slot.row * a.out_row + slot.head * a.out_head;
    const int t = nbi_lane() & 3;
    const float inv = 1.0f / run.l[side];
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        out[i * 8 + 2 * t] = run.o[i][2 * side] * inv;
        out[i * 8 + 2 * t + 1] = run.o[i][2 * side + 1] * inv;
    }
}

/* Tiles [begin, end) of the group for one block; WALK: all of them, merged here. */
template <int D, int NW, bool WALK, bool CODES>
NBI_DEV void run_tiles(const nbi_cuda_attend &a, const nbi_attend_group &g, uint32_t kv,
                       const nbi_attend_slot slot[2], uint32_t begin, uint32_t end, uint32_t splits)
{
    uint16_t *shared = nbi_shared<uint16_t>();
    const uint32_t warp = threadIdx.x / NBI_WARP, per_split = g.split / TILE;
    const uint16_t *hi = shared + warp * 2 * SLOTS * padded<D>, *lo = hi + SLOTS * padded<D>;
    uint16_t *stages = shared + NW * 2 * SLOTS * padded<D>;
    const size_t head_at = kv * a.kv_head;
    const int32_t *pages = a.page_table + (size_t)g.seq * a.page_stride;
    const float scale = nbi_attend_scale(a);
    softmax<D> x, run;
    start(x);
    if (WALK) start(run);
    load_tile<D, NW, CODES>(a, g, head_at, begin, pages[begin], stages);
    nbi_copy_commit();
    int32_t page = begin + 1 < end ? pages[begin + 1] : 0;
    for (uint32_t tile = begin; tile < end; tile++) {
        uint16_t *k = stages + (tile - begin) % 2 * 2 * TILE * padded<D>;
        nbi_copy_wait<0>();
        if (CODES) decode_tile<D, NW>(k);
        __syncthreads();
        if (tile + 1 < end)
            load_tile<D, NW, CODES>(a, g, head_at, tile + 1, page,
                                    stages + (tile + 1 - begin) % 2 * 2 * TILE * padded<D>);
        nbi_copy_commit();
        if (tile + 2 < end) page = pages[tile + 2];
        float s[TILE / 8][4];
        tile_scores<D>(hi, lo, k, s);
#pragma unroll
        for (int side = 0; side < 2; side++)
            fold_row(x, s, side, (int)slot[side].n - (int)(tile * TILE), scale);
        add_values(x, s, k + TILE * padded<D>);
        if ((tile + 1) % per_split && tile + 1 < end) continue;
        const uint32_t split = tile / per_split;
        x.l[0] = quad_sum(x.l[0]);
        x.l[1] = quad_sum(x.l[1]);
#pragma unroll
        for (int side = 0; side < 2; side++) {
            if (slot[side].n <= split * g.split) continue;
            if (WALK)
                merge_split(run, x, side, scale);
            else
                store_partial(a, x, side, slot[side], splits, split);
        }
        start(x);
    }
    for (int side = 0; WALK && side < 2; side++)
        if (slot[side].n) store_out(a, run, side, slot[side]);
}

template <int D, int NW, bool WALK, bool CODES>
static __global__ void __launch_bounds__(NW *NBI_WARP)
    gqa_kernel(nbi_cuda_attend a, uint32_t group_rows, uint32_t splits)
{
    nbi_wait_before();
    nbi_let_next();
    nbi_attend_group g;
    /* the longest rows first */
    if (!nbi_attend_group_of(a, a.n_rows - 1 - blockIdx.x, group_rows, &g)) return;
    const uint32_t parts = gridDim.y / a.n_kv, kv = blockIdx.y / parts;
    const uint32_t slot0 = blockIdx.y % parts * NW * SLOTS, warp = threadIdx.x / NBI_WARP;
    if (slot0 >= g.n_rows * (a.n_heads / a.n_kv)) return;
    const uint32_t tiles = (g.n + TILE - 1) / TILE, per_split = g.split / TILE;
    if (!WALK && blockIdx.z * per_split >= tiles) return;

    const uint32_t own = slot0 + warp * SLOTS;
    uint16_t *hi = nbi_shared<uint16_t>() + warp * 2 * SLOTS * padded<D>;
    load_queries<D>(a, g, kv, own, hi, hi + SLOTS * padded<D>);
    const nbi_attend_slot slot[2] = {nbi_attend_slot_of(a, g, kv, own + nbi_lane() / 4),
                                     nbi_attend_slot_of(a, g, kv, own + nbi_lane() / 4 + 8)};
    if (WALK) {
        run_tiles<D, NW, WALK, CODES>(a, g, kv, slot, 0, tiles, splits);
        return;
    }
    const uint32_t begin = blockIdx.z * per_split;
    run_tiles<D, NW, WALK, CODES>(a, g, kv, slot, begin,
                                  begin + per_split < tiles ? begin + per_split : tiles, splits);
}

/* ---------------------------------------------------------------- launches */

template <int D, int NW, bool CODES> static void launch(nbi_cuda *c, const nbi_cuda_attend *a)
{
    const uint32_t ratio = a->n_heads / a->n_kv;
    const uint32_t rows = nbi_attend_group_rows(ratio, NW * SLOTS);
    const uint32_t parts = rows * ratio / (NW * SLOTS);
    const auto one = [=](const nbi_cuda_attend &part, bool walk, uint32_t splits, uint32_t grid) {
        nbi_launch(&c->rt, dim3(part.n_rows, part.n_kv * parts, grid), dim3(NW * NBI_WARP),
                   shared_bytes<D, NW>(),
                   walk ? gqa_kernel<D, NW, true, CODES> : gqa_kernel<D, NW, false, CODES>, part,
                   rows, splits);
    };
    nbi_attend_launches(c, a, a->n_kv * nbi_ceil_div(a->n_rows * ratio, NW * SLOTS), 2, one);
}

/* Rows of a sequence share blocks where there are many of them. */
template <int D, bool CODES> static void launch_shape(nbi_cuda *c, const nbi_cuda_attend *a)
{
    if (c->rt.shared_max >= shared_bytes<D, 4>())
        launch<D, 4, CODES>(c, a);
    else
        launch<D, 2, CODES>(c, a);
}

bool nbi_cuda_attend_by_mma(const nbi_cuda_attend *a)
{
    const bool aligned = ((uintptr_t)a->k | (uintptr_t)a->v) % 16 == 0;
    return a->bf16 && aligned && !a->select && a->k_width == a->v_width &&
           a->kv_slot == a->k_width && (a->k_width == 64 || a->k_width == 128);
}

bool nbi_cuda_attend_gqa(nbi_cuda *c, const nbi_cuda_attend *a)
{
    if (!nbi_cuda_attend_by_mma(a)) return false;
    if (a->n_rows < 4 * a->n_seqs && nbi_cuda_attend_few(c, a, NULL)) return true;
    if (a->k_width == 64)
        a->codes ? launch_shape<64, true>(c, a) : launch_shape<64, false>(c, a);
    else
        a->codes ? launch_shape<128, true>(c, a) : launch_shape<128, false>(c, a);
    return true;
}
