/* What a checkpoint holds, checked against what its model needs, without a backend: for `nibble
 * inspect` and tools. */
#pragma once

#include "format/quant.h"
#include "model/modules.h"
#include "tensor/load.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_census_cell {
    uint64_t modules, weights,
        bytes; /* linear layers or vectors, numbers in them, bytes with their scales */
} nbi_census_cell;

/* Vectors count as F32, the kind they are run in, with the bytes of the file. */
typedef struct nbi_census {
    nbi_config config;
    nbi_quant quant;           /* what the configuration files say */
    nbi_convention convention; /* what the tensors say; with several, the last in the order of
                                  nbi_convention */
    nbi_checkpoint *ckpt;
    nbi_arena arena;
    bool has_mtp;       /* an MTP layer is stored */
    bool stored_head;   /* tied, but lm_head is there and used */
    bool fused_experts; /* stacked expert tensors */
    nbi_census_cell cells[NBI_COMPONENT_COUNT][NBI_WEIGHT_KIND_COUNT];
    uint32_t n_sparse; /* layers with experts, MTP included */
    nbi_weight_kind (
        *expert_kinds)[2]; /* [n_layers + MTP] gate/up and down of expert 0; NONE in dense layers */
    uint64_t *module_bytes; /* [n_modules] as stored, in the order of nbi_modules_walk(); those of
                               MTP layers are [first_mtp, first_mtp + n_mtp) */
    size_t n_modules, first_mtp, n_mtp;
    uint32_t unequal_pairs;       /* experts whose gate and up have different global scales */
    uint32_t without_input_scale; /* NVFP4 matrices that have none */
} nbi_census;

/* Opens and checks a checkpoint: every module present, of the shape the configuration gives, with
 * its partners. `verify` reads every scale. The sentence of a failure names file and tensor. */
nb_status nbi_census_open(nbi_census *out, const char *dir, bool verify, nb_error *err);
void nbi_census_close(nbi_census *census);

/* Makes `config` that of what is stored and, without `mtp`, of the layers that a step runs: then
 * module_bytes belongs to nbi_modules_walk() of it. Sums and expert_kinds stay. */
void nbi_census_fit(nbi_census *census, bool mtp);

#ifdef __cplusplus
}
#endif
