/* Synthetic checkpoints: random weights in the shape of a real model, so that speed and memory can
 * be tried without the real files.
 *
 * Values are chosen so that activations stay finite and of order one in every layer and routing is
 * spread over the experts; the text a model of random weights writes has no meaning. The same
 * options give the same bytes, whatever the number of threads. */
#pragma once

#include "model/modules.h"
#include "tensor/matrix.h"

#ifdef __cplusplus
extern "C" {
#endif

/* enum suffix, name, what is quantised */
#define NBI_SYNTH_WEIGHTS_LIST(X)                                                        \
    X(NVFP4_EXPERTS, "nvfp4-experts", "routed experts in NVFP4, the rest BF16")          \
    X(NVFP4_MLP, "nvfp4-mlp", "routed and shared experts and dense MLPs in NVFP4")       \
    X(NVFP4_ALL, "nvfp4-all", "attention and indexer projections in NVFP4 too")          \
    X(FP8, "fp8", "all linear layers in FP8 with 128 x 128 blocks, but router and head") \
    X(BF16, "bf16", "nothing")

typedef enum nbi_synth_weights {
#define X(suffix, name, text) NBI_SYNTH_##suffix,
    NBI_SYNTH_WEIGHTS_LIST(X)
#undef X
        NBI_SYNTH_WEIGHTS_COUNT
} nbi_synth_weights;

const char *nbi_synth_weights_name(nbi_synth_weights weights);
const char *nbi_synth_weights_text(nbi_synth_weights weights);
/* NBI_SYNTH_WEIGHTS_COUNT for an unknown name. */
nbi_synth_weights nbi_synth_weights_parse(const char *name);

/* The kind in which a module of a checkpoint with these weights is stored. */
nbi_weight_kind nbi_synth_kind(nbi_synth_weights weights, const nbi_module *module);

/* Names of the shapes, NULL behind the last. */
const char *nbi_synth_shape_name(size_t i);

/* The configuration of a shape with "key=value" overrides, see nbi_synth_options; `mtp`: with its
 * MTP layer. */
nb_status nbi_synth_shape(nbi_config *out, const char *like, const char *const *sets, size_t n_sets,
                          bool mtp, nb_error *err);

typedef struct nbi_synth_options {
    const char *like;          /* a shape, see nbi_synth_shape_name() */
    const char *out_dir;       /* new or empty */
    const char *tokenizer_dir; /* optional: its tokenizer files are copied */
    uint32_t n_layers;         /* 0: as the shape */
    uint32_t n_experts;        /* 0: as the shape */
    const char *const *sets;   /* [n_sets] "key=value" for config.json; value is JSON or else a
                                  string; a.b reaches into an object */
    size_t n_sets;
    uint32_t shard_of_tp; /* N > 1: what one of N ranks of tensor parallelism holds */
    bool mtp;             /* write the MTP layer too */
    uint64_t seed;
    nbi_synth_weights weights;
    uint64_t max_bytes; /* of tensor data; 0: no limit. Cuts layers, then experts, until it fits */
    uint64_t shard_bytes; /* 0: 4 GiB */
    uint32_t n_threads;   /* 0: all cores */
    nb_progress progress; /* optional */
    void *progress_user;
} nbi_synth_options;

typedef struct nbi_synth_result {
    uint32_t n_layers, n_experts;
    uint64_t bytes, n_tensors;
} nbi_synth_result;

nb_status nbi_synth(nbi_synth_result *out, const nbi_synth_options *options, nb_error *err);

#ifdef __cplusplus
}
#endif
