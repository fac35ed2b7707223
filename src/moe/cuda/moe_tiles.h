/* Steps that the MoE kernels share, so that they give the same bits: rows of x as B fragments in
 * memory, and a warp's walk over weights. Included by moe_gemv.cu and moe_product.h. */
#pragma once

#include "moe/cuda/moe_cuda.h"

/* Converted rows. A tile's 64 columns take 128 bytes, in the order in which lanes read them: 32
 * columns are [t = 0..3][k-steps 2i, 2i+1][4 columns], so that a lane gets the B fragments of two
 * k-steps with one load of 16 bytes. */
#define NBI_MOE_TILE_X_BYTES 128u

/* One chunk of a row by one warp, in two steps: what was read, then what is written. */
struct nbi_moe_x_part {
    nbi_f32x4 even, odd;

    /* n: the row's columns, a multiple of 4; zeros behind. */
    template <nbi_weight_kind KIND> NBI_DEV void take(const float *row, uint32_t chunk, uint32_t n)
    {
        constexpr uint32_t TILES = nbi_chunk_tiles(KIND), LANES = TILES * NBI_MOE_TILE_X_BYTES / 16;
        const uint32_t lane = (uint32_t)nbi_lane();
        const uint32_t at = chunk * TILES * NBI_TILE_COLS + lane / 4 * 32 + lane % 4 * 4;
        even = nbi_x_load(row, at, lane < LANES ? n : 0, true);
        odd = nbi_x_load(row, at + 16, lane < LANES ? n : 0, true);
    }

    /* 16 bytes per lane to dst, the chunk's first byte. input_scale > 0: rounded to NVFP4 before.
     * Returns what the sums are multiplied by: 2^e, times the input scale. */
    template <nbi_weight_kind KIND>
    NBI_DEV float give(char *dst, uint32_t chunk, uint32_t n, float input_scale)
    {
        constexpr uint32_t TILES = nbi_chunk_tiles(KIND), LANES = TILES * NBI_MOE_TILE_X_BYTES / 16;
        const uint32_t lane = (uint32_t)nbi_lane();
        if (KIND == NBI_WEIGHT_NVFP4 && input_scale > 0) {
            nbi_x_round(&even, input_scale);
            nbi_x_round(&odd, input_scale);
        }
        int e = 0;
        if (KIND != NBI_WEIGHT_BF16) {
            uint32_t most = nbi_amax_bits(nbi_amax_bits(0, even), odd);
            e = nbi_chunk_exponent(nbi_warp_max(most));
        }
        /* the row ends within the chunk: tiles behind it have no place */
        const uint32_t n_tiles = (n + NBI_TILE_COLS - 1) / NBI_TILE_COLS;
        if (lane < LANES && chunk * TILES + lane / 8 < n_tiles) {
            const float unit = nbi_pow2(-e);
            nbi_u32x4 q;
            nbi_x_fragment<KIND>(q.v, even, unit);
            nbi_x_fragment<KIND>(q.v + 2, odd, unit);
            *reinterpret_cast<nbi_u32x4 *>(dst + lane * 16) = q;
        }
        const float two_e = nbi_pow2(e);
        return KIND == NBI_WEIGHT_NVFP4 && input_scale > 0 ? two_e * input_scale : two_e;
    }
};

template <nbi_weight_kind KIND>
NBI_DEV float nbi_moe_x_chunk(char *dst, const float *row, uint32_t chunk, uint32_t n,
                              float input_scale)
{
    nbi_moe_x_part part;
    part.take<KIND>(row, chunk, n);
    return part.give<KIND>(dst, chunk, n, input_scale);
}

/* i / n and i % n of a number that grows by a fixed step. */
struct nbi_moe_steps {
    uint32_t q, r, n, dq, dr;

    NBI_DEV nbi_moe_steps(uint32_t i, uint32_t step, uint32_t n_)
        : q(i / n_), r(i % n_), n(n_), dq(step / n_), dr(step % n_)
    {
    }

    NBI_DEV void next()
    {
        q += dq;
        r += dr;
        if (r >= n) {
            r -= n;
            q++;
        }
    }
};

/* A unit of work of one warp: a row tile's sum over one chunk, for up to 8 tokens. */
struct nbi_moe_unit {
    const char *data, *scales; /* of its first tile */
    const char *x;             /* in shared memory: the chunk of the lane's token */
    uint32_t tiles;            /* the last chunk of a row can have fewer */
    uint32_t tag, n;           /* the caller's */
};

/* Pieces that a walk loads ahead: 24 to 32 registers of a lane. */
constexpr uint32_t nbi_moe_piece_tiles(nbi_weight_kind kind)
{
    return kind == NBI_WEIGHT_NVFP4 ? 4 : kind == NBI_WEIGHT_BF16 || kind == NBI_WEIGHT_F16 ? 1 : 2;
}

/* A warp's walk over units, the weights of the next piece on their way while one is multiplied.
 * WHOLE: rows are whole chunks. */
template <nbi_weight_kind KIND, bool WHOLE> struct nbi_moe_walk {
    static constexpr uint32_t TILES = nbi_chunk_tiles(KIND), PIECE = nbi_moe_piece_tiles(KIND);
    static constexpr uint32_t PIECES = TILES / PIECE;

    nbi_tile<KIND> here[PIECE];
    nbi_moe_unit unit;

    NBI_DEV static void load(nbi_tile<KIND> *tiles, const nbi_moe_unit &u, uint32_t piece)
    {
        nbi_cuda_packed w = {};
        w.data = u.data;
        w.scales = u.scales;
#pragma unroll
        for (uint32_t i = 0; i < PIECE; i++)
            if (WHOLE || piece * PIECE + i < u.tiles)
                tiles[i].load(w, 0, piece * PIECE + i, (uint32_t)nbi_lane());
    }

    NBI_DEV void multiply(float d[4], uint32_t piece) const
    {
#pragma unroll
        for (uint32_t i = 0; i < PIECE; i++) {
            const uint32_t tile = piece * PIECE + i;
            if (!WHOLE && tile >= unit.tiles) continue;
#pragma unroll
            for (uint32_t w = 0; w < NBI_TILE_STEPS; w += 2) {
                const nbi_u32x4 b = *reinterpret_cast<const nbi_u32x4 *>(
                    unit.x + tile * NBI_MOE_TILE_X_BYTES + w / 2 * 64);
                uint32_t a[4];
                here[i].fragment(a, w);
                nbi_tile_mma<KIND>(d, a, b.v);
                here[i].fragment(a, w + 1);
                nbi_tile_mma<KIND>(d, a, b.v + 2);
            }
        }
    }

    /* Asks for the first weights. */
    NBI_DEV void begin(const nbi_moe_unit &first)
    {
        unit = first;
        load(here, unit, 0);
    }

    template <bool MORE, class Done> NBI_DEV void one(const nbi_moe_unit &after, Done done)
    {
        float d[4] = {0, 0, 0, 0};
#pragma unroll
        for (uint32_t piece = 0; piece < PIECES; piece++) {
            nbi_tile<KIND> next[PIECE];
            if (piece + 1 < PIECES)
                load(next, unit, piece + 1);
            else if (MORE)
                load(next, after, 0);
            multiply(d, piece);
            if (piece + 1 == PIECES && !MORE) break;
#pragma unroll
            for (uint32_t i = 0; i < PIECE; i++) here[i] = next[i];
        }
        done(unit, d);
    }

    /* n units; begin() was called for the first, next() describes the one after. done(unit, d)
     * takes a unit's sums. */
    template <class Next, class Done> NBI_DEV void run(uint32_t n, Next next, Done done)
    {
        if (!n) return;
#pragma unroll(PIECES > 1 || !WHOLE ? 1 : 2) /* here = next costs no moves */
        for (; n > 1; n--) {
            const nbi_moe_unit after = next();
            one<true>(after, done);
            unit = after;
        }
        one<false>(unit, done);
    }
};
