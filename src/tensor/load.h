/* From checkpoint tensors to nbi_matrix and float vectors. What a tensor is, it says itself: names
 * beside it and its dtype. */
#pragma once

#include "format/safetensors.h"
#include "tensor/matrix.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Finds module `name` ("model.layers.0.mlp.up_proj", no ".weight") and checks it is [rows, cols].
 * Handles ModelOpt NVFP4, compressed-tensors NVFP4, FP8 block (weight_scale_inv, or weight_scale of
 * that shape), FP8 per tensor, BF16, F16, F32. Missing partners (a scale) are refused by name. With
 * rows == 0 the file's own shape is taken. Scales are checked by nbi_matrix_check(). `arena` holds
 * the name. */
nb_status nbi_matrix_load(nbi_matrix *out, nbi_checkpoint *ckpt, nbi_arena *arena, const char *name,
                          uint32_t rows, uint32_t cols, nb_error *err);

/* Does the module exist in any form? Does not mark. */
bool nbi_matrix_present(const nbi_checkpoint *ckpt, const char *name);

/* One expert out of fused tensors. `base` is "model.layers.3.mlp.experts"; part 0 gate, 1 up, 2
 * down. Forms: gate_up_proj [E, 2I, H] and down_proj [E, H, I] (transformers v5), with their scales
 * when quantised. NB_NOT_FOUND when there are no fused tensors. */
nb_status nbi_matrix_load_fused(nbi_matrix *out, nbi_checkpoint *ckpt, nbi_arena *arena,
                                const char *base, uint32_t n_experts, uint32_t expert,
                                uint32_t part, uint32_t inter, uint32_t hidden, nb_error *err);

/* Reads every scale: NaN, infinite, negative, or zero where zero is not a value the format writes
 * (global, input and FP8 scales) is NB_CORRUPT naming tensor and index. Runs over `pool` (may be
 * NULL) in the caller's loop: this checks one matrix. */
nb_status nbi_matrix_check(const nbi_matrix *m, nb_error *err);

/* A vector tensor (full name) converted to float32 in `arena`. n == 0: any length. NULL allowed for
 * n_out. */
nb_status nbi_vector_load(const float **out, uint32_t *n_out, nbi_checkpoint *ckpt,
                          nbi_arena *arena, const char *name, uint32_t n, nb_error *err);

/* Why a tensor that nothing reads is harmless (FP8 cache scales, rotary tables, ...): static text;
 * NULL for a tensor that should have been read. For reports over nbi_checkpoint_unused(). */
const char *nbi_tensor_note(const char *name);

#ifdef __cplusplus
}
#endif
