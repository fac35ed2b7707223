/* RMSNorm of a row by warps: the operator itself (elementwise.cu), and products that norm what they
 * multiply on their own (stream_linear.cu). One order of additions for all: a warp
 * has a chunk of 256 columns, a lane of it the columns 4 l ... and 128 + 4 l ...; its squares in
 * this order, then those of the lanes by a tree, then the chunks in ascending order.
 *
 * A norm may take along the sum of its delta over two ranks (RANKS), by packets (cuda_peers.h): a
 * packet of two neighbouring values, in the order of the values. Each packet is sent by one warp of
 * a launch, and every block looks for all that it needs, so blocks of a launch have to be there
 * together. A block counts for itself; counters of blocks that a launch does not have are set by
 * those it has. The bits are those of the sum and the norm apart. */
#pragma once

#include "backend/backend.h"
#include "backend/cuda/cuda_peers.h"
#include "backend/cuda/tile.h"

#define NBI_NORM_COLS   256u
#define NBI_NORM_WARPS  32u /* of a wider row, a warp goes on with chunk w + 32 */

#define NBI_NORM_EPOCHS 512u /* blocks of a launch that takes a sum along, at most */

struct nbi_norm_args {
    float *out, *x_out; /* x_out: where x + delta goes */
    const float *x, *delta, *weight;
    float eps;
    uint32_t width, x_stride, out_stride;
    int32_t *row_fault, fault;
    bool vec;            /* all rows start at multiples of 16 bytes, width is a multiple of 4 */
    nbi_peer_view peers; /* RANKS: delta is to be summed over these two */
};

/* peers: NULL without a sum. */
inline nbi_norm_args nbi_norm_of(const nbi_rmsnorm_args *a, const nbi_peer_view *peers)
{
    nbi_norm_args k = {};
    k.out = static_cast<float *>(a->out);
    k.x = static_cast<const float *>(a->x);
    k.x_out = static_cast<float *>(a->x_out ? a->x_out : a->x);
    k.delta = static_cast<const float *>(a->delta);
    k.weight = a->weight;
    k.eps = a->eps;
    k.width = a->width;
    k.x_stride = a->x_stride;
    k.out_stride = a->out_stride;
    k.row_fault = a->row_fault;
    k.fault = static_cast<int32_t>(1 + a->layer * NBI_WHERE_COUNT + a->where);
    k.vec = nbi_x_fast(k.x, k.x_stride, k.width) && nbi_x_fast(k.x_out, k.x_stride, k.width) &&
            nbi_x_fast(k.delta, k.width, k.width) && nbi_x_fast(k.weight, 0, k.width) &&
            nbi_x_fast(k.out, k.out_stride, k.width);
    if (peers) k.peers = *peers;
    return k;
}

/* A lane's two groups of the chunk that begins at column `first`. vec: n is a multiple of 4, and
 * the row starts at a multiple of 16 bytes. */
struct nbi_norm_part {
    nbi_f32x4 v[2];

    NBI_DEV void load(const float *row, uint32_t first, uint32_t n, bool vec)
    {
        const uint32_t i = first + 4 * (uint32_t)nbi_lane();
        v[0] = nbi_x_load(row, i, n, vec);
        v[1] = nbi_x_load(row, i + 128, n, vec);
    }

    NBI_DEV void store(float *row, uint32_t first, uint32_t n, bool vec) const
    {
        const uint32_t i = first + 4 * (uint32_t)nbi_lane();
        nbi_x_store(row, i, n, vec, v[0]);
        nbi_x_store(row, i + 128, n, vec, v[1]);
    }

    NBI_DEV void add(const nbi_norm_part &d)
    {
#pragma unroll
        for (int k = 0; k < 8; k++) v[k / 4].v[k % 4] += d.v[k / 4].v[k % 4];
    }

    NBI_DEV float squares(float sum) const
    {
#pragma unroll
        for (int k = 0; k < 8; k++) sum = fmaf(v[k / 4].v[k % 4], v[k / 4].v[k % 4], sum);
        return sum;
    }

    NBI_DEV void scale(float by, const nbi_norm_part &weight)
    {
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k / 4].v[k % 4] = v[k / 4].v[k % 4] * by * weight.v[k / 4].v[k % 4];
    }
};

/* ---- a sum over two ranks */

NBI_DEV uint32_t nbi_norm_epoch(const nbi_norm_args &a)
{
    return nbi_load_fresh(&a.peers.epochs[blockIdx.x]) + 1;
}

/* The chunk of row t that begins at column `first`, to the other one. */
NBI_DEV void nbi_norm_send(const nbi_norm_part &p, const nbi_norm_args &a, uint32_t t,
                           uint32_t first, uint32_t epoch)
{
    const uint32_t column = first + 4 * (uint32_t)nbi_lane(), rank = a.peers.rank;
    nbi_u32x4 *to =
        nbi_peer_turn(a.peers.buffers[1 - rank], rank, epoch) + (t * a.width + column) / 2;
#pragma unroll
    for (uint32_t k = 0; k < 4; k++)
        if (column + k / 2 * 128 < a.width)
            nbi_packet_send(
                to + k / 2 * 64 + k % 2,
                nbi_peer_packet(p.v[k / 2].v[k % 2 * 2], p.v[k / 2].v[k % 2 * 2 + 1], epoch));
}

/* A lane's N groups of four from value `at` of all and column `column` of the row on, as the other
 * one has sent them, added to the own ones: two values have one sum. N is 1: the lane has them. */
template <uint32_t N>
NBI_DEV void nbi_norm_receive(nbi_f32x4 *own, const nbi_norm_args &a, uint32_t at, uint32_t column,
                              uint32_t epoch)
{
    const uint32_t rank = a.peers.rank;
    const nbi_u32x4 *from = nbi_peer_turn(a.peers.buffers[rank], 1 - rank, epoch) + at / 2;
    nbi_u32x4 got[2 * N] = {};
    for (uint32_t looks = 1;; looks++) {
        bool all = true;
#pragma unroll
        for (uint32_t k = 0; k < 2 * N; k++) {
            if (N > 1 && column + k / 2 * 128 >= a.width) continue;
            got[k] = nbi_packet_look(from + k / 2 * 64 + k % 2);
            all = all && nbi_peer_is(got[k], epoch);
        }
        if (all || nbi_peer_stops(a.peers, looks)) break;
        nbi_spin();
    }
#pragma unroll
    for (uint32_t k = 0; k < 2 * N; k++) {
        own[k / 2].v[k % 2 * 2] += nbi_float(got[k].v[0]);
        own[k / 2].v[k % 2 * 2 + 1] += nbi_float(got[k].v[2]);
    }
}

/* x + the sum of delta; four values at a time, which is what registers of products have room for.
 */
NBI_DEV void nbi_norm_take_sum(nbi_norm_part *p, const nbi_norm_args &a, uint32_t t, uint32_t first,
                               uint32_t epoch)
{
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        const uint32_t i = first + 128 * h + 4 * (uint32_t)nbi_lane();
        p->v[h] = {};
        if (i >= a.width) continue;
        const nbi_f32x4 x = nbi_x_load(a.x + (size_t)t * a.x_stride, i, a.width, true);
        p->v[h] = nbi_x_load(a.delta + (size_t)t * a.width, i, a.width, true);
        nbi_norm_receive<1>(&p->v[h], a, t * a.width + i, i, epoch);
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) p->v[h].v[k] += x.v[k];
    }
}

/* The same by one block of the row: sends its chunk itself, and all of it at a time. */
NBI_DEV void nbi_norm_swap(nbi_norm_part *p, const nbi_norm_args &a, uint32_t t, uint32_t first,
                           uint32_t epoch)
{
    const uint32_t i = first + 4 * (uint32_t)nbi_lane();
    nbi_norm_part x;
    p->load(a.delta + (size_t)t * a.width, first, a.width, true);
    nbi_norm_send(*p, a, t, first, epoch);
    x.load(a.x + (size_t)t * a.x_stride, first, a.width, true);
    nbi_norm_receive<2>(p->v, a, t * a.width + i, i, epoch);
    p->add(x);
}

/* What a launch sends, before any of its warps waits: item i is chunk i % n of token i / n. A few
 * warps of all blocks; those that have the fewest chunks themselves. In the emulation, which runs
 * one block and one thread after the other, the first warp of every block sends all. */
NBI_DEV void nbi_norm_send_all(const nbi_norm_args &a, uint32_t n_tokens, uint32_t warp,
                               uint32_t warps, uint32_t epoch)
{
    const uint32_t n = (a.width + NBI_NORM_COLS - 1) / NBI_NORM_COLS, all = n * n_tokens;
    const uint32_t begin =
        NBI_EMULATED ? (warp ? all : 0) : blockIdx.x + (warps - 1 - warp) * gridDim.x;
    const uint32_t step = NBI_EMULATED ? 1 : warps * gridDim.x;
#pragma unroll 1
    for (uint32_t i = begin; i < all; i += step) {
        const uint32_t t = i < n ? 0 : i / n, first = (i - t * n) * NBI_NORM_COLS;
        nbi_norm_part p;
        p.load(a.delta + (size_t)t * a.width, first, a.width, true);
        nbi_norm_send(p, a, t, first, epoch);
    }
}

/* One warp, when all of the block have their epoch. */
NBI_DEV void nbi_norm_count(const nbi_norm_args &a, uint32_t epoch)
{
    for (uint32_t i = blockIdx.x + (uint32_t)nbi_lane() * gridDim.x; i < NBI_NORM_EPOCHS;
         i += NBI_WARP * gridDim.x)
        a.peers.epochs[i] = epoch;
}

/* ---- */

/* x + delta of row t. vec: of both. */
template <bool RANKS>
NBI_DEV void nbi_norm_take(nbi_norm_part *p, const nbi_norm_args &a, uint32_t t, uint32_t first,
                           bool vec, uint32_t epoch)
{
    if constexpr (RANKS) {
        nbi_norm_take_sum(p, a, t, first, epoch);
    } else {
        p->load(a.x + (size_t)t * a.x_stride, first, a.width, vec);
        if (!a.delta) return;
        nbi_norm_part d;
        d.load(a.delta + (size_t)t * a.width, first, a.width, vec);
        p->add(d);
    }
}

NBI_DEV float nbi_norm_sum(const float *parts, uint32_t n)
{
    float sum = 0;
#pragma unroll 8
    for (uint32_t i = 0; i < n; i++) sum += parts[i];
    return sum;
}

NBI_DEV float nbi_norm_factor(const nbi_norm_args &a, float squares)
{
    return 1.0f / sqrtf(squares / static_cast<float>(a.width) + a.eps);
}

NBI_DEV void nbi_norm_guard(const nbi_norm_args &a, uint32_t t, float squares)
{
    if (a.row_fault && !nbi_finite(squares) && !a.row_fault[t]) a.row_fault[t] = a.fault;
}

/* ---- one row, a warp for each of its chunks: load(), the launch's wait, take(), a barrier, end()
 */

struct nbi_norm_one {
    nbi_norm_part x, weight;
    uint32_t first; /* column of the warp's chunk */
    bool has, own;  /* the warp has one; the block leaves it in memory */

    NBI_DEV void load(const nbi_norm_args &a, uint32_t warp)
    {
        first = warp * NBI_NORM_COLS;
        has = first < a.width;
        own = nbi_is_own(warp);
        if (has) weight.load(a.weight, first, a.width, true);
    }

    /* x + delta; parts[warp] becomes its squares. */
    NBI_DEV void take(const nbi_norm_args &a, float *parts)
    {
        if (!has) return;
        nbi_norm_take<false>(&x, a, 0, first, true, 0);
        const float squares = nbi_warp_sum(x.squares(0));
        if (nbi_lane() == 0) parts[first / NBI_NORM_COLS] = squares;
        if (a.delta && own) x.store(a.x_out, first, a.width, true);
    }

    /* Normed, from the squares of all n chunks; has. */
    NBI_DEV void end(const nbi_norm_args &a, const float *parts, uint32_t n)
    {
        const float squares = nbi_norm_sum(parts, n);
        if (blockIdx.x == 0 && threadIdx.x == 0) nbi_norm_guard(a, 0, squares);
        x.scale(nbi_norm_factor(a, squares), weight);
    }

    /* The normed chunk to memory. */
    NBI_DEV void leave(const nbi_norm_args &a) const
    {
        if (own) x.store(a.out, first, a.width, true);
    }
};
