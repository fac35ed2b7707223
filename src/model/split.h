/* What a rank holds of a model (comm/comm.h: nbi_shard): ranges of heads, vocabulary, experts and
 * intermediate columns. Private to src/model.
 *
 * Attention by heads: q_b, kv_b, o of MLA; q, k, v, o of GQA; what is not per head (q_a, kv_a, the
 * indexer, norms) every rank has whole, or with shard.latents columns of what multiplies the
 * residual, whose results are then summed before anything is made of them. MLPs and experts by
 * intermediate columns: rows of gate and up, columns of down. Embedding and head by vocabulary.
 * Every rank ends with a part of the sum that attention, and then the MLP, adds to the residual.
 *
 * Ranges are as even as they can be: where a number does not divide, the first ranks have one unit
 * more (20 heads over 8 ranks: 3, 3, 3, 3, 2, 2, 2, 2), and with fewer units than ranks some have
 * none. A unit is what scales cannot be cut below: 128 rows or columns of FP8 blocks, 16 columns of
 * NVFP4; of heads, as many as make whole units. */
#pragma once

#include "comm/comm.h"
#include "format/config.h"
#include "tensor/load.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_range {
    uint32_t first, n;
} nbi_range;

typedef struct nbi_split {
    nbi_shard shard;
    nbi_range heads;                /* query heads */
    nbi_range kv_heads;             /* GQA; ranks share one where there are fewer than ranks */
    nbi_range vocab;                /* rows of embedding and head */
    uint32_t vocab_unit, vocab_max; /* where it is cut; most rows of any rank */
    nbi_range experts;              /* routed, whole or their columns */
    nbi_range latent; /* with shard.latents: columns of q_a, kv_a, indexer k, weights */
} nbi_split;

static inline bool nbi_split_alone(const nbi_split *s)
{
    return s->shard.tp_size == 1;
}

/* Part `rank` of `size` of [0, n), cut at multiples of `unit`. */
nbi_range nbi_split_part(uint32_t n, uint32_t unit, uint32_t rank, uint32_t size);

/* Of intermediate columns of an MLP whose gate, up and down have these kinds. */
nbi_range nbi_split_inter(uint32_t inter, const nbi_weight_kind kinds[3], uint32_t rank,
                          uint32_t size);

/* Vocabulary rows of another rank. */
nbi_range nbi_split_vocab(const nbi_split *s, uint32_t vocab, uint32_t rank);

/* From the shapes of the configuration and the kinds of the tensors of n_layers layers; reads no
 * weight. Names the layer that cannot be cut. */
nb_status nbi_split_make(nbi_split *out, const nbi_shard *shard, const nbi_config *c,
                         nbi_checkpoint *ckpt, uint32_t n_layers, nb_error *err);

/* Is the tensor `name` one that only other ranks look at: their whole experts; attention on a rank
 * without heads? */
bool nbi_split_foreign(const nbi_split *s, const char *name);

/* Bytes of the checkpoint's weights that the rank will hold, to within the units of its ranges. */
uint64_t nbi_split_bytes(const nbi_split *s, const nbi_config *c, const nbi_checkpoint *ckpt);

#ifdef __cplusplus
}
#endif
