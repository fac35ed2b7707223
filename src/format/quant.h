/* Quantisation description of a checkpoint: hf_quant_config.json (ModelOpt) and config.json's
 * quantization_config (ModelOpt, compressed-tensors, fp8). Advisory: what a tensor is, the tensors
 * themselves say; this is for reports and cross-checks. */
#pragma once

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nbi_convention {
    NBI_CONVENTION_NONE,
    NBI_CONVENTION_MODELOPT,           /* weight, weight_scale, weight_scale_2 multiplies */
    NBI_CONVENTION_COMPRESSED_TENSORS, /* weight_packed, weight_scale, weight_global_scale divides
                                        */
    NBI_CONVENTION_FP8,                /* weight, weight_scale_inv multiplies */
    NBI_CONVENTION_COUNT
} nbi_convention;

const char *nbi_convention_name(nbi_convention convention);

typedef struct nbi_quant {
    nbi_convention convention;
    char algo[64]; /* as the file says, e.g. "NVFP4", "W4A16_NVFP4", "nvfp4-pack-quantized", "fp8";
                      "" when absent */
    char producer[64];
    char kv_algo[32]; /* "FP8" or "" */
    uint32_t group_size;
    uint32_t block_rows, block_cols; /* fp8 */
    char **ignore;                   /* [n_ignore] patterns as written */
    uint32_t n_ignore;
} nbi_quant;

nb_status nbi_quant_load(nbi_quant *out, const char *dir, nb_error *err);
nb_status nbi_quant_parse(nbi_quant *out, const json_t *config, const json_t *hf_quant,
                          const char *name, nb_error *err);
void nbi_quant_free(nbi_quant *quant);

/* Does a pattern of the list name this module ("model.layers.3.self_attn.o_proj")? Shell wildcards;
 * exact names; "re:" regular expressions anchored at the start. */
bool nbi_quant_ignored(const nbi_quant *quant, const char *module);

#ifdef __cplusplus
}
#endif
