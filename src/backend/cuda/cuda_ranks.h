/* Sums over ranks on devices: who exchanges how. Private to src/backend/cuda.
 *
 * Every form adds in the order of ranks, so they differ in time alone:
 *   one-shot  kernels write to the memory of the other GPUs of this host (cuda_peers.cu)
 *   nccl      NCCL carries the values, own kernels add them (cuda_nccl.cu)
 *   staged    pinned memory and the ranks' own transport; the host waits, no step is recorded */
#pragma once

#include "backend/cuda/cuda_backend.h"

#define NBI_PEERS_MAX 8u /* ranks of a one-shot exchange */

/* What one-shot kernels need of it. */
struct nbi_peer_view {
    uint32_t rank, size;
    const uint32_t *stop;
    uint32_t *epochs;             /* [chunks] exchanges of that chunk so far */
    char *buffers[NBI_PEERS_MAX]; /* where the other ranks' buffers lie here; the own one */
};

struct nbi_cuda_peers {
    nbi_peer_view view;
    size_t bytes;     /* of a buffer */
    float latency_us; /* of a sum of 24 KB, as measured at the start */
};

struct nbi_cuda_ranks {
    nbi_rank_link link;
    bool one_shot;
    nbi_cuda_peers peers;
    float *host;      /* pinned, [size][NBI_STAGED_VALUES]: of the staged form */
    nb_status status; /* of the staged form: behind a failure there are no more */
    nb_error why;
};

#define NBI_STAGED_VALUES 65536u

/* cuda_peers.cu. Opening is collective and comes to the same end on every rank; what it leaves
 * behind a failure, close takes. */
nb_status nbi_cuda_peers_open(nbi_cuda *c, nbi_cuda_peers *p, const nbi_rank_link *link,
                              nb_error *err);
void nbi_cuda_peers_close(nbi_cuda *c, nbi_cuda_peers *p);
void nbi_cuda_peers_sum(nbi_cuda *c, const nbi_cuda_peers *p, float *x, size_t n);
void nbi_cuda_peers_join(nbi_cuda *c, const nbi_cuda_peers *p, const nbi_join_ranks_args *a);
