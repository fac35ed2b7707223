/* Products with many tokens on warpgroups (wgmma, compute capability 9.0). Callers: linear_wide.cu
 * and the MoE runners. Numerics and bits are those of tile.h.
 *
 * A block is three warpgroups. The first asks for rows of converted activations, 128 tokens by 64
 * columns a stage, into a ring in shared memory; each of the other two multiplies them with 64 rows
 * of weights, which go from memory to A fragments in its registers, a few tiles ahead. While four
 * k-steps are under way, the fragments of the next four are unpacked. A block takes one unit (128
 * rows, up to 128 tokens) after the other; the ring and the weights run ahead into the next unit.
 *
 * Converted rows lie in memory as [row][n_kt][128 bytes]: 16 bytes for each half of a k-step, in
 * the order of columns 0 1 4 5 8 9 12 13, then 2 3 6 7 10 11 14 15, so that column c of a k-step is
 * at the k where the packed weights have it. */
#pragma once

#include "backend/cuda/tile.h"

#define NBI_WIDE_TOKENS    128u
#define NBI_WIDE_ROW_TILES 8u /* of a block */
#define NBI_WIDE_THREADS   384u
#define NBI_WIDE_STAGES    8u
#define NBI_WIDE_LAG       4u /* stages on their way before the first of them is waited for */
#define NBI_WIDE_K_BYTES   128u

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
    char pad[512];                              /* to 1,024 */
};

/* Tokens that a unit multiplies. */
NBI_DEV uint32_t nbi_wide_padded(uint32_t n_tokens)
{
    return n_tokens > 64 ? 128 : n_tokens > 32 ? 64 : 32;
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
 * and of every 16th row behind it, and 2^e of row threadIdx.x. */
struct nbi_wide_producer {
    nbi_wide_shared *shared;
    uint32_t it; /* stages so far, over all units */

    NBI_DEV void signal(uint32_t i)
    {
        nbi_bar_arrive(&shared->full[i % NBI_WIDE_STAGES]);
    }

    /* rows: converted activations; row(r): which of them token r of the unit is, for r < n_tokens;
     * units: 2^e, [row][chunk]. */
    template <nbi_weight_kind KIND, class Row>
    NBI_DEV void unit(const char *rows, const float *units, uint32_t n_tokens, uint32_t n_kt,
                      Row row)
    {
        constexpr uint32_t TILES = nbi_chunk_tiles(KIND);
        const uint32_t r0 = threadIdx.x / 8, q = threadIdx.x % 8,
                       n_chunks = (n_kt + TILES - 1) / TILES;
        uint32_t from[8]; /* in pieces of 16 bytes */
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t r = r0 + 16 * i;
            from[i] = (r < n_tokens ? row(r) : 0) * n_kt * 8 + q;
        }
        const uint32_t n_padded = nbi_wide_padded(n_tokens);
        const bool mine = threadIdx.x < n_tokens;
        units += mine ? (size_t)row(threadIdx.x) * n_chunks : 0;
        const uint32_t to = r0 * NBI_WIDE_K_BYTES + (q ^ r0 % 8) * 16;
        for (uint32_t c = 0; c < n_chunks; c++) {
            const float two_e = mine ? units[c] : 0;
#pragma unroll 1
            for (uint32_t j = 0; j < TILES; j++) {
                const uint32_t kt = c * TILES + j;
                nbi_wide_stage *stage = &shared->stages[it % NBI_WIDE_STAGES];
                nbi_bar_wait(&shared->empty[it % NBI_WIDE_STAGES], (it / NBI_WIDE_STAGES & 1) ^ 1);
#pragma unroll
                for (uint32_t i = 0; i < 8; i++)
                    if (16 * i < n_padded)
                        nbi_copy_async(stage->x + to + i * 16 * NBI_WIDE_K_BYTES,
                                       rows + ((size_t)from[i] + (kt < n_kt ? kt : 0) * 8) * 16,
                                       kt < n_kt && r0 + 16 * i < n_tokens);
                nbi_copy_commit();
                if (j == TILES - 1) stage->unit[threadIdx.x] = two_e;
                if (it >= NBI_WIDE_LAG) {
                    nbi_copy_wait<NBI_WIDE_LAG>();
                    nbi_shared_to_async();
                    signal(it - NBI_WIDE_LAG);
                }
                it++;
            }
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

    nbi_wide_shared *shared;
    uint32_t it; /* as the producer's */
    uint32_t n_kt, n_chunks;
    nbi_wide_row here, next;
    nbi_tile<KIND> ahead[AHEAD];
    uint32_t a[2][NBI_TILE_STEPS][4];

    NBI_DEV static nbi_wide_row row_tile(const nbi_cuda_packed &w, uint32_t rt)
    {
        const size_t tile = (size_t)rt * w.n_kt;
        return {static_cast<const char *>(w.data) + tile * nbi_tile_bytes(KIND),
                static_cast<const char *>(w.scales) + tile * 64};
    }

    /* Tile kt of this unit, or of the next one behind its last chunk; no further. */
    NBI_DEV void load(nbi_tile<KIND> &to, uint32_t kt)
    {
        const bool over = kt >= n_chunks * TILES;
        const uint32_t at = over ? kt - n_chunks * TILES : kt;
        nbi_cuda_packed w = {};
        w.data = over ? next.data : here.data;
        w.scales = over ? next.scales : here.scales;
        if (at < n_kt)
            to.load(w, 0, at, (uint32_t)nbi_lane());
        else
            to = nbi_tile<KIND>{};
    }

    NBI_DEV void unpack(uint32_t (&to)[NBI_TILE_STEPS][4], const nbi_tile<KIND> &from)
    {
#pragma unroll
        for (uint32_t k = 0; k < NBI_TILE_STEPS; k++) from.fragment(to[k], k);
    }

    /* Asks for the weights of the first unit: row tile rt of w. */
    NBI_DEV void open(nbi_wide_shared *s, const nbi_cuda_packed &w, uint32_t rt)
    {
        shared = s;
        it = 0;
        n_kt = w.n_kt;
        n_chunks = (n_kt + TILES - 1) / TILES;
        here = next = row_tile(w, rt);
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++) load(ahead[i], i);
        unpack(a[0], ahead[0]);
    }

    NBI_DEV void release(uint32_t i)
    {
        __syncwarp();
        if (nbi_lane() == 0) nbi_bar_arrive(&shared->empty[i % NBI_WIDE_STAGES]);
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
        here = row_tile(w, rt);
        next = row_tile(after, after_rt);
#pragma unroll
        for (uint32_t i = 0; i < N / 2; i++) y[i] = 0;
        float p[N / 2];
#pragma unroll 1
        for (uint32_t c = 0; c < n_chunks; c++) {
            const nbi_f32x2 block = nbi_tile_block_scale<KIND>(w, rt, c);
#pragma unroll
            for (uint32_t j = 0; j < TILES; j++) {
                nbi_wide_stage *stage = &shared->stages[it % NBI_WIDE_STAGES];
                nbi_bar_wait(&shared->full[it % NBI_WIDE_STAGES], it / NBI_WIDE_STAGES & 1);
                const uint64_t b = nbi_wgmma_b(stage->x);
                nbi_wgmma_hold(p);
                nbi_wgmma_begin();
#pragma unroll
                for (uint32_t k = 0; k < NBI_TILE_STEPS; k++)
                    nbi_wgmma<N, KIND == NBI_WEIGHT_BF16>(p, a[j % 2][k], b + 2 * k, j || k);
                nbi_wgmma_commit();
                nbi_wgmma_wait<1>();
                if (j) release(it - 1);
                load(ahead[j % AHEAD], c * TILES + j + AHEAD);
                unpack(a[(j + 1) % 2], ahead[(j + 1) % AHEAD]);
                if (j == TILES - 1) {
                    nbi_wgmma_wait<0>();
                    nbi_wgmma_hold(p);
                    add_chunk<N>(y, p, stage->unit, block);
                    release(it);
                }
                it++;
            }
        }
    }
};

/* Registers: 128 * (40 + 2 * 232) are all that a multiprocessor has but 1,024. */
#define NBI_WIDE_PRODUCER_REGISTERS 40
#define NBI_WIDE_CONSUMER_REGISTERS 232

/* body.run<N>() for a unit of n_tokens. */
template <class Body> NBI_DEV void nbi_wide_by_tokens(uint32_t n_tokens, Body body)
{
    const uint32_t n = nbi_wide_padded(n_tokens);
    if (n == 128)
        body.template operator()<128>();
    else if (n == 64)
        body.template operator()<64>();
    else
        body.template operator()<32>();
}
