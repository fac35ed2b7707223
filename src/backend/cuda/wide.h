/* Products with many tokens on warpgroups (wgmma, compute capability 9.0). Callers: linear_wide.cu
 * and the MoE runners. Numerics and bits are those of tile.h.
 *
 * A block is three warpgroups. The first asks for rows of converted activations, 160 tokens by 64
 * columns a stage, into a ring in shared memory; each of the other two multiplies them with 64 rows
 * of weights, which go from memory to A fragments in its registers, a few tiles ahead. While two
 * k-steps are under way, the fragments of the next two are unpacked. A block takes one unit (128
 * rows, up to 160 tokens) after the other; the ring and the weights run ahead into the next unit.
 *
 * Converted rows lie in memory as [row][n_kt][128 bytes]: 16 bytes for each half of a k-step, in
 * the order of columns 0 1 4 5 8 9 12 13, then 2 3 6 7 10 11 14 15, so that column c of a k-step is
 * at the k where the packed weights have it. */
#pragma once

#include "backend/cuda/tile.h"

#define NBI_WIDE_TOKENS    160u
#define NBI_WIDE_ROW_TILES 8u /* of a block */
#define NBI_WIDE_THREADS   384u
#define NBI_WIDE_STAGES    8u
#define NBI_WIDE_LAG       4u /* stages on their way before the first of them is waited for */
#define NBI_WIDE_K_BYTES   128u
#define NBI_WIDE_GROUP     2u /* k-steps that go to the matrix units together */
#define NBI_WIDE_RING      4u /* k-steps whose fragments are in registers */

/* ---------------------------------------------------------------- activations */

/* Lanes that convert one chunk of a row, 16 columns each. */
__host__ __device__ constexpr uint32_t nbi_wide_lanes(nbi_weight_kind kind)
{
    return nbi_chunk_tiles(kind) * 4;
}

/* One chunk of a row of n values to `to`, the converted row, by nbi_wide_lanes() lanes in a row;
 * all lanes of the warp call, row NULL: nothing to do. input_scale > 0: rounded to NVFP4 before.
 * EXPONENT: scaled by 2^-e. Returns 2^e. */
template <nbi_weight_kind KIND, bool EXPONENT>
NBI_DEV float nbi_wide_chunk(char *to, const float *row, uint32_t chunk, uint32_t n, bool fast,
                             float input_scale)
{
    constexpr uint32_t LANES = nbi_wide_lanes(KIND);
    const uint32_t at =
        chunk * nbi_chunk_tiles(KIND) * NBI_TILE_COLS + (uint32_t)nbi_lane() % LANES * 16;
    const uint32_t end = row ? n : 0;
    nbi_f32x4 x[4];
    uint32_t most = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        x[i] = nbi_x_load(row, at + 4 * i, end, fast);
        most = nbi_amax_bits(most, x[i]);
    }
    if (KIND == NBI_WEIGHT_NVFP4 && input_scale > 0) {
        const float scale = nbi_x_scale(most, input_scale);
        most = 0;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            nbi_x_round_to(&x[i], scale, input_scale);
            most = nbi_amax_bits(most, x[i]);
        }
    }
    int e = 0;
    if (EXPONENT && KIND != NBI_WEIGHT_BF16) {
#pragma unroll
        for (uint32_t d = 1; d < LANES; d *= 2) {
            const uint32_t other = __shfl_xor_sync(NBI_FULL_MASK, most, (int)d);
            most = other > most ? other : most;
        }
        e = nbi_chunk_exponent(most);
    }
    if (at / NBI_TILE_COLS * NBI_TILE_COLS < end) {
        const float unit = nbi_pow2(-e);
        nbi_u32x4 half[2];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t b[2];
            nbi_x_fragment<KIND>(b, x[i], unit);
            half[0].v[i] = b[0];
            half[1].v[i] = b[1];
        }
        nbi_u32x4 *p = reinterpret_cast<nbi_u32x4 *>(to + (size_t)at * 2);
        p[0] = half[0];
        p[1] = half[1];
    }
    return nbi_pow2(e);
}

/* ---------------------------------------------------------------- the ring */

struct nbi_wide_stage {
    char x[NBI_WIDE_TOKENS * NBI_WIDE_K_BYTES]; /* as nbi_wgmma_b() says */
    float unit[NBI_WIDE_TOKENS];                /* of the last stage of a chunk: 2^e */
    char pad[1024 - NBI_WIDE_TOKENS * 4];
};

/* Tokens of a unit at most: 16-bit weights need registers of their own. */
__host__ __device__ constexpr uint32_t nbi_wide_tokens(nbi_weight_kind kind)
{
    return kind == NBI_WEIGHT_BF16 || kind == NBI_WEIGHT_F16 ? 128 : NBI_WIDE_TOKENS;
}

/* Tokens that a unit multiplies. */
NBI_DEV uint32_t nbi_wide_padded(uint32_t n_tokens)
{
    if (n_tokens > 128) return n_tokens > 144 ? 160 : 144;
    return n_tokens > 96 ? 128 : n_tokens > 64 ? 96 : n_tokens > 32 ? 64 : 32;
}

struct nbi_wide_shared {
    nbi_wide_stage stages[NBI_WIDE_STAGES];
    uint64_t full[NBI_WIDE_STAGES], empty[NBI_WIDE_STAGES];
};

/* All threads of the block. */
NBI_DEV void nbi_wide_open(nbi_wide_shared *s)
{
    if (threadIdx.x < NBI_WIDE_STAGES) {
        nbi_bar_init(&s->full[threadIdx.x], 128);
        nbi_bar_init(&s->empty[threadIdx.x], 8);
    }
    nbi_bar_init_done();
    __syncthreads();
}

/* A thread of the first warpgroup. Of a unit it copies 16 bytes of the stage's row threadIdx.x / 8
 * and of every 16th row behind it, and 2^e of row threadIdx.x and of row 128 behind it. */
struct nbi_wide_producer {
    nbi_wide_shared *shared;
    uint32_t it; /* stages so far, over all units */

    NBI_DEV void signal(uint32_t i)
    {
        nbi_bar_arrive(&shared->full[i % NBI_WIDE_STAGES]);
    }

    /* rows: converted activations; row(r): which of them token r of the unit is, for r < n_tokens;
     * units: 2^e, [row][chunk]. N: nbi_wide_padded(n_tokens); tokens behind the last are the first.
     */
    template <nbi_weight_kind KIND, uint32_t N, class Row>
    NBI_DEV void unit(const char *rows, const float *units, uint32_t n_tokens, uint32_t n_kt,
                      Row row)
    {
        constexpr uint32_t TILES = nbi_chunk_tiles(KIND);
        const uint32_t r0 = threadIdx.x / 8, q = threadIdx.x % 8,
                       n_chunks = (n_kt + TILES - 1) / TILES;
        const auto inside = [&](uint32_t r) { return row(r < n_tokens ? r : 0); };
        const char *from[N / 16];
#pragma unroll
        for (uint32_t i = 0; i < N / 16; i++)
            from[i] = rows + ((size_t)inside(r0 + 16 * i) * n_kt * 8 + q) * 16;
        const float *unit[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            unit[i] = units + (size_t)inside(threadIdx.x + 128 * i) * n_chunks;
        const uint32_t to = r0 * NBI_WIDE_K_BYTES + (q ^ r0 % 8) * 16;
        for (uint32_t c = 0; c < n_chunks; c++) {
            const float low = unit[0][c], high = N > 128 ? unit[1][c] : 0;
            nbi_wide_stage *stage = &shared->stages[it % NBI_WIDE_STAGES];
            const uint32_t slot = it % NBI_WIDE_STAGES, phase = it / NBI_WIDE_STAGES & 1;
#pragma unroll
            for (uint32_t j = 0; j < TILES; j++) {
                nbi_bar_wait(&shared->empty[slot + j], phase ^ 1);
                copy<N>(stage[j].x + to, from, j, c * TILES + j < n_kt);
                nbi_copy_commit();
                if (j == TILES - 1) {
                    stage[j].unit[threadIdx.x] = low;
                    if (N > 128 && threadIdx.x + 128 < NBI_WIDE_TOKENS)
                        stage[j].unit[threadIdx.x + 128] = high;
                }
                if (it + j >= NBI_WIDE_LAG) {
                    nbi_copy_wait<NBI_WIDE_LAG>();
                    nbi_shared_to_async();
                    signal(it + j - NBI_WIDE_LAG);
                }
            }
            it += TILES;
#pragma unroll
            for (uint32_t i = 0; i < N / 16; i++) from[i] += TILES * NBI_WIDE_K_BYTES;
        }
    }

    /* Columns of tile j of a chunk; zeros behind a row's last tile. */
    template <uint32_t N>
    NBI_DEV static void copy(char *to, const char *const (&from)[N / 16], uint32_t j, bool here)
    {
        if (here) {
#pragma unroll
            for (uint32_t i = 0; i < N / 16; i++)
                nbi_copy_async(to + i * 16 * NBI_WIDE_K_BYTES, from[i] + j * NBI_WIDE_K_BYTES);
        } else {
#pragma unroll
            for (uint32_t i = 0; i < N / 16; i++)
                nbi_copy_async(to + i * 16 * NBI_WIDE_K_BYTES, from[i], false);
        }
    }

    NBI_DEV void end()
    {
        nbi_copy_wait<0>();
        nbi_shared_to_async();
        for (uint32_t i = it < NBI_WIDE_LAG ? 0 : it - NBI_WIDE_LAG; i < it; i++) signal(i);
    }
};

/* ---------------------------------------------------------------- products */

/* Tiles of weights that are in registers or on their way, beside those being multiplied. */
constexpr uint32_t nbi_wide_ahead(nbi_weight_kind kind)
{
    return kind == NBI_WEIGHT_BF16 || kind == NBI_WEIGHT_F16 ? 2 : nbi_chunk_tiles(kind);
}

/* Where the tiles of a row tile lie. */
struct nbi_wide_row {
    const char *data, *scales;
};

/* A warp of the second or third warpgroup: 16 rows of a unit. */
template <nbi_weight_kind KIND> struct nbi_wide_consumer {
    static constexpr uint32_t TILES = nbi_chunk_tiles(KIND), AHEAD = nbi_wide_ahead(KIND);

    static constexpr uint32_t LEAD = NBI_WIDE_RING - NBI_WIDE_GROUP; /* k-steps unpacked ahead */
    static constexpr uint32_t BACK = 1; /* groups under way while one is unpacked */
    static_assert(NBI_WIDE_STAGES % TILES == 0, "a chunk's stages lie in a row");

    nbi_wide_shared *shared;
    uint32_t slot, phase; /* of the chunk's first stage */
    uint32_t n_kt, n_chunks;
    nbi_tile<KIND> ahead[AHEAD];  /* tile i of a chunk in i % AHEAD */
    uint32_t a[NBI_WIDE_RING][4]; /* k-step i in i % NBI_WIDE_RING */

    NBI_DEV static nbi_wide_row row_tile(const nbi_cuda_packed &w, uint32_t rt)
    {
        const size_t tile = (size_t)rt * w.n_kt;
        return {static_cast<const char *>(w.data) + tile * nbi_tile_bytes(KIND),
                static_cast<const char *>(w.scales) + tile * 64};
    }

    /* Tile i of a chunk at `from`. Behind the n tiles that the row still has: any finite values,
     * there x is zero. */
    NBI_DEV static void load(nbi_tile<KIND> &to, const nbi_wide_row &from, uint32_t i, uint32_t n)
    {
        nbi_cuda_packed w = {};
        w.data = from.data;
        w.scales = from.scales;
        if (KIND != NBI_WEIGHT_BF16 && KIND != NBI_WEIGHT_F16)
            to.load(w, 0, i < n ? i : n - 1, (uint32_t)nbi_lane());
        else if (i < n)
            to.load(w, 0, i, (uint32_t)nbi_lane());
        else
            to = nbi_tile<KIND>{};
    }

    /* Asks for the weights of the first unit: row tile rt of w. */
    NBI_DEV void open(nbi_wide_shared *s, const nbi_cuda_packed &w, uint32_t rt)
    {
        shared = s;
        slot = phase = 0;
        n_kt = w.n_kt;
        n_chunks = (n_kt + TILES - 1) / TILES;
        const nbi_wide_row row = row_tile(w, rt);
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++) load(ahead[i], row, i, n_kt);
#pragma unroll
        for (uint32_t k = 0; k < LEAD; k++) ahead[0].fragment(a[k], k);
    }

    /* Stages [first, end) of the chunk in `slot` are free again. */
    NBI_DEV void release(uint32_t first, uint32_t end)
    {
        __syncwarp();
        if (nbi_lane() == 0)
#pragma unroll
            for (uint32_t j = first; j < end; j++) nbi_bar_arrive(&shared->empty[slot + j]);
    }

    template <uint32_t N>
    NBI_DEV void add_chunk(float (&y)[N / 2], const float (&p)[N / 2], const float *unit,
                           const nbi_f32x2 &block)
    {
        unit += (uint32_t)nbi_lane() % 4 * 2;
#pragma unroll
        for (uint32_t n = 0; n < N / 8; n++) {
            const nbi_f32x2 two_e = *reinterpret_cast<const nbi_f32x2 *>(unit + n * 8);
            nbi_chunk_add(y + 4 * n, p + 4 * n, two_e.v, block);
        }
    }

    /* y = the sums of a unit with up to N tokens: y[4 n + i] is d[i] of nbi_mma_f16() for tokens
     * 8 n ... 8 n + 7. w, rt: this unit's; after, after_rt: the next one's (any, if there is none).
     */
    template <uint32_t N>
    NBI_DEV void unit(float (&y)[N / 2], const nbi_cuda_packed &w, uint32_t rt,
                      const nbi_cuda_packed &after, uint32_t after_rt)
    {
        nbi_wide_row here = row_tile(w, rt);
        const nbi_wide_row next = row_tile(after, after_rt);
#pragma unroll
        for (uint32_t i = 0; i < N / 2; i++) y[i] = 0;
        float p[N / 2];
        uint32_t left = n_kt;
#pragma unroll 1
        for (uint32_t c = 0; c < n_chunks; c++) {
            const nbi_f32x2 block = nbi_tile_block_scale<KIND>(w, rt, c);
            const bool last = c + 1 == n_chunks;
            const nbi_wide_row then = {last ? next.data : here.data + TILES * nbi_tile_bytes(KIND),
                                       last ? next.scales : here.scales + TILES * 64};
            const uint32_t then_left = last ? n_kt : left - TILES;
            multiply<N>(p, here, left, then, then_left);
            nbi_wgmma_wait<0>();
            nbi_wgmma_hold(p);
            add_chunk<N>(y, p, shared->stages[slot + TILES - 1].unit, block);
            release(TILES - 1, TILES);
            slot = slot + TILES == NBI_WIDE_STAGES ? 0 : slot + TILES;
            phase ^= slot == 0;
            here = then;
            left = then_left;
        }
    }

    /* p: the sums of the chunk in `slot`, under way. Its weights begin at `here`, the row has
     * `left` tiles from there; `then`, then_left: the next chunk's. */
    template <uint32_t N>
    NBI_DEV void multiply(float (&p)[N / 2], const nbi_wide_row &here, uint32_t left,
                          const nbi_wide_row &then, uint32_t then_left)
    {
        const uint64_t b0 = nbi_wgmma_b(shared->stages[slot].x);
        nbi_wgmma_hold(p);
#pragma unroll
        for (uint32_t s = 0; s < TILES * NBI_TILE_STEPS; s += NBI_WIDE_GROUP) {
            const uint32_t j = s / NBI_TILE_STEPS, k = s % NBI_TILE_STEPS;
            const uint32_t j2 = (s + LEAD) / NBI_TILE_STEPS, k2 = (s + LEAD) % NBI_TILE_STEPS;
            if (k == 0) nbi_bar_wait(&shared->full[slot + j], phase);
            const uint64_t b = b0 + j * (sizeof(nbi_wide_stage) / 16) + 2 * k;
            nbi_wgmma_begin();
#pragma unroll
            for (uint32_t i = 0; i < NBI_WIDE_GROUP; i++)
                nbi_wgmma<N, KIND == NBI_WEIGHT_BF16>(p, a[(s + i) % NBI_WIDE_RING], b + 2 * i,
                                                      s + i > 0);
            nbi_wgmma_commit();
            nbi_wgmma_wait<BACK>();
            if (k2 == 0) { /* the tile before is unpacked */
                const uint32_t i = j2 - 1 + AHEAD;
                if (i < TILES)
                    load(ahead[i % AHEAD], here, i, left);
                else
                    load(ahead[i % AHEAD], then, i - TILES, then_left);
            }
#pragma unroll
            for (uint32_t i = 0; i < NBI_WIDE_GROUP; i++)
                ahead[j2 % AHEAD].fragment(a[(s + LEAD + i) % NBI_WIDE_RING], k2 + i);
            if (s && k == 0) release(j - 1, j); /* BACK is one group */
        }
    }
};

/* Registers: 128 * (56 + 2 * 224) are all that a multiprocessor has but 1,024. */
#define NBI_WIDE_PRODUCER_REGISTERS 56
#define NBI_WIDE_CONSUMER_REGISTERS 224

/* body.operator()<N>() for a unit of n_tokens. */
template <nbi_weight_kind KIND, class Body>
NBI_DEV void nbi_wide_by_tokens(uint32_t n_tokens, Body body)
{
    const uint32_t n = nbi_wide_padded(n_tokens);
    if constexpr (nbi_wide_tokens(KIND) > 128) {
        if (n == 160) return body.template operator()<160>();
        if (n == 144) return body.template operator()<144>();
    }
    if (n == 128) return body.template operator()<128>();
    if (n == 96) return body.template operator()<96>();
    if (n == 64) return body.template operator()<64>();
    body.template operator()<32>();
}
