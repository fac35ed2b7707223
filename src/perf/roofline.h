/* The floor of a decode step: bytes and operations of every part of a model, split over ranks,
 * against what a device can do. Arithmetic alone; nothing is run.
 *
 * A step gives one token to each of `batch` sequences whose caches hold `context` tokens. A part
 * takes the longer of its bytes over the bandwidth and its operations over the peak; parts follow
 * one another, so the floor of the step is their sum. Figures are of one rank, the busiest where
 * ranks differ, and of the whole chain of stages with pipeline parallelism.
 *
 * Split over ranks: heads, MLP columns and the vocabulary over all `tp` ranks; experts whole over
 * `ep` groups and by columns inside of one (tp / ep ranks); router, norms and biases on every rank;
 * with `whole_latents` also q_a, kv_a and the indexer, as the public engines do it. The latent
 * cache is read whole by every rank.
 *
 * An indexer chooses only where there is something to choose: with at most index_topk tokens in
 * sight, its key is written and the rest of it is not run, as in model/forward.c. */
#pragma once

#include "backend/parts.h"
#include "format/config.h"
#include "model/synth.h"
#include "perf/devices.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The parts of backend/parts.h. */
typedef enum nbi_roof_part {
#define X(suffix, name) NBI_ROOF_##suffix,
    NBI_PART_LIST(X)
#undef X
        NBI_ROOF_PART_COUNT
} nbi_roof_part;

const char *nbi_roof_part_name(nbi_roof_part part);

#define NBI_ROOF_ALL_WEIGHTS UINT64_MAX

typedef struct nbi_roof_options {
    const nbi_config *config; /* with its MTP layers, if these are to count in memory */
    nbi_synth_weights weights;
    /* Of a checkpoint: bytes of every module in the order of nbi_modules_walk(config)
       (nbi_census.module_bytes). NULL: by `weights`. */
    const uint64_t *module_bytes;
    nbi_device device;
    double link_latency; /* seconds of one collective or hop beside its bytes */
    uint32_t tp, ep, pp; /* ranks; ep divides tp */
    uint32_t batch;
    uint64_t context;    /* tokens; NBI_ROOF_ALL_WEIGHTS: no cache, and every weight is read */
    nbi_dtype kv_dtype;  /* of latents or heads and of index keys: F32, BF16, E4M3 with scales
                            (backend/kv_shape.h) */
    bool whole_latents;  /* q_a, kv_a and the indexer on every rank */
    bool fp4_products;   /* NVFP4 weights meet NVFP4 activations: the device's FP4 peak */
    double memory_share; /* of the device's memory that weights and cache may fill, 0 to 1 */
} nbi_roof_options;

typedef struct nbi_roof_cost {
    double bytes; /* of memory; of the link for collectives */
    double flops; /* two per multiply-add */
    double seconds;
    bool by_flops; /* operations, not bytes, set the time */
} nbi_roof_cost;

typedef struct nbi_roofline {
    nbi_roof_cost parts[NBI_ROOF_PART_COUNT];
    nbi_roof_cost step;
    double experts_read;     /* distinct routed experts per layer of the busiest rank's group */
    double experts_balanced; /* the same if every group had an equal share */
    double tokens_per_s;     /* batch / step */
    uint64_t compute_batch;  /* smallest batch at which the operations of a step take longer than
                                its bytes; 0: none up to a million, or the peak is not known */
    uint64_t parameters, active; /* stored, MTP included; multiplied for one token */
    double weight_bytes;         /* of the fullest rank */
    double kv_bytes_per_token;   /* of one sequence, on the fullest rank */
    double cache_bytes;          /* batch x context */
    uint64_t longest_context; /* of `batch` sequences; 0: does not fit; at most the model's own */
} nbi_roofline;

/* NB_INVALID names the option that cannot be. */
nb_status nbi_roofline_run(nbi_roofline *out, const nbi_roof_options *options, nb_error *err);

/* Writes an SVG file: the roofs of the device with the parts below them, and a bar per part. */
nb_status nbi_roofline_plot(const nbi_roofline *roofline, const nbi_roof_options *options,
                            const char *title, const char *path, nb_error *err);

/* Bytes of one cached token over all layers, MTP layers included when the configuration has them,
 * unsplit. */
double nbi_roof_kv_bytes(const nbi_config *config, nbi_dtype dtype);

#ifdef __cplusplus
}
#endif
