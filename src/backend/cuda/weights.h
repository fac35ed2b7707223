/* Prepared weights of the CUDA backend beyond the table. Callers: MoE runners and tests. */
#pragma once

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* weight_prepare for a pair of matrices of one shape and kind, rows interleaved in groups of 8:
 * rows 16 i ... 16 i + 7 of the weight are rows 8 i ... of m, the next eight those of `up`. `up`
 * NULL: m alone. NB_INVALID when they differ. */
nb_status nbi_cuda_weight_prepare_pair(nbi_backend *b, nbi_weight **out, const nbi_matrix *m,
                                       const nbi_matrix *up, nb_error *err);

/* out[i][0 ... cols) = row ids[i] of a prepared weight as float32, scales included. Pointers are of
 * the device; out_stride in floats. */
void nbi_cuda_weight_rows(nbi_backend *b, float *out, const nbi_weight *w, const int32_t *ids,
                          uint32_t n, uint32_t out_stride);

#ifdef __cplusplus
}
#endif
