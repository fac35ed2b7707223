/* Pieces of nbi_synth(): shapes, the list of tensors, random bytes. Private to src/model/synth*.c.
 */
#pragma once

#include "format/safetensors.h"
#include "model/synth.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- synth_shapes.c */

/* config.json of the shape with the overrides of the options applied. */
nb_status nbi_synth_config(json_t **out, const nbi_synth_options *options, nb_error *err);
/* The same with other numbers of layers and experts. */
nb_status nbi_synth_resize(json_t *config, uint32_t n_layers, uint32_t n_experts, nb_error *err);
/* Adds quantization_config; *hf_quant is hf_quant_config.json, NULL when the weights have none. */
nb_status nbi_synth_describe(json_t *config, json_t **hf_quant, nbi_synth_weights weights,
                             nb_error *err);

/* ---- synth_fill.c */

typedef enum nbi_fill_kind {
    NBI_FILL_CODES,     /* NVFP4 codes: random bytes */
    NBI_FILL_E4M3_NEAR, /* NVFP4 block scales: 1 to 1.875 */
    NBI_FILL_FP8,       /* FP8 weights, magnitudes below 2 */
    NBI_FILL_BF16,      /* uniform in center +- spread */
    NBI_FILL_F32,       /* uniform in center +- spread */
} nbi_fill_kind;

typedef struct nbi_fill {
    nbi_fill_kind kind;
    float center, spread;
    uint64_t key; /* of the generator: seed and tensor */
    uint64_t bytes;
} nbi_fill;

/* Bytes [begin, begin + n) of the tensor. They depend on key and position alone. */
void nbi_fill_bytes(const nbi_fill *fill, uint64_t begin, uint8_t *out, size_t n);
/* Root mean square of what the kinds CODES (times E4M3_NEAR) and FP8 give. */
float nbi_fill_rms_nvfp4(void);
float nbi_fill_rms_fp8(void);

/* ---- synth_plan.c */

typedef struct nbi_synth_plan {
    const nbi_config *config;
    nbi_synth_weights weights;
    uint64_t seed;
    nbi_st_writer *writer; /* NULL: count only */
    uint64_t bytes, n_tensors;
    nbi_fill *fills; /* [n_fills] in the order of the writer's tensors */
    size_t n_fills, fills_cap;
    bool scalars; /* pass: tensors of one number come last, so that all others stay aligned */
    nb_status st;
    nb_error *err;
} nbi_synth_plan;

/* Walks over all tensors: counts bytes, and with a writer declares them and records their fills. */
nb_status nbi_synth_plan_run(nbi_synth_plan *plan);

#ifdef __cplusplus
}
#endif
