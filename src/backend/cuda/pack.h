/* Matrices of the mapped file into their packed form on the device (tile.h). Callers: linear.cu and
 * the MoE runners. */
#pragma once

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/tile.h"
#include "backend/cuda/weights.h"

/* A prepared matrix: an nbi_weight of this backend. */
struct nbi_cuda_weight {
    nbi_weight head;
    nbi_cuda_packed p;
    void *block; /* device memory */
};

static inline const nbi_cuda_packed *nbi_cuda_packed_of(const nbi_weight *w)
{
    return &reinterpret_cast<const nbi_cuda_weight *>(w)->p;
}

/* One matrix, or with `up` a pair of the same shape and kind whose rows are interleaved. `to` says
 * where it goes: nbi_packed_at(). */
struct nbi_cuda_pack_item {
    const nbi_matrix *m, *up;
    nbi_cuda_packed to;
};

/* Packs n matrices, in the order of the stream. What the matrices point to may go when it returns,
 * and may be at any address. Bytes travel in pieces of NBI_CUDA_STAGE_BYTES, and small matrices of
 * one call share them: hand in all experts of a layer at once. Failures show at nbi_rt_sync(). */
void nbi_cuda_pack(nbi_cuda *c, const nbi_cuda_pack_item *items, uint32_t n);

/* out[i][0 ... cols) = row ids[i] of the matrix as float32, scales included; out_stride in floats.
 * ids: device memory. */
void nbi_cuda_unpack_rows(nbi_cuda *c, float *out, const nbi_cuda_packed *p, const int32_t *ids,
                          uint32_t n, uint32_t out_stride);
