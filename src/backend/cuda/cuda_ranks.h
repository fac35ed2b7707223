/* Sums over ranks on devices: who exchanges how. Private to src/backend/cuda.
 *
 * Every form adds in the order of ranks, so they differ in time alone:
 *   one-shot  kernels write to the memory of the other GPUs of this host (cuda_peers.cu)
 *   nccl      NCCL, in the stream and in recorded steps; across hosts, too (cuda_nccl.cu)
 *   staged    pinned memory and the ranks' own transport; the host waits, no step is recorded */
#pragma once

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_peers.h"
#include "backend/nccl_api.h"

struct nbi_cuda_peers {
    nbi_peer_view view, norms; /* norms: of sums that norms take along, beside the others */
    size_t bytes;              /* of a buffer, for both */
};

struct nbi_cuda_nccl_call;

struct nbi_cuda_nccl {
    const nbi_nccl *api;
    nbi_nccl_comm *comm; /* NULL: not connected */
    uint32_t rank, size;
    bool slices;                 /* as more than two ranks do it, also with two */
    float *scratch;              /* device: what others have sent */
    nbi_cuda_nccl_call *leaving; /* the comm is no longer to be used */
    char failed[128];            /* what NCCL says of a connection; "" while all is well */
};

struct nbi_cuda_ranks {
    nbi_rank_link link;
    bool one_shot, use_nccl;
    bool norms_sum;   /* with one-shot: norms take sums along (norm.h) */
    size_t nccl_from; /* with both: sums of so many values and more are NCCL's */
    nbi_cuda_peers peers;
    nbi_cuda_nccl nccl;
    float *host;      /* pinned, [size][NBI_STAGED_VALUES]: of the staged form */
    nb_status status; /* of the staged form: behind a failure there are no more */
    nb_error why;
};

#define NBI_STAGED_VALUES 65536u

/* cuda_peers.cu. Opening is collective and comes to the same end on every rank; what it leaves
 * behind a failure, close takes. What was opened is not proven yet. */
nb_status nbi_cuda_peers_open(nbi_cuda *c, nbi_cuda_peers *p, const nbi_rank_link *link,
                              nb_error *err);
void nbi_cuda_peers_close(nbi_cuda *c, nbi_cuda_peers *p);
void nbi_cuda_peers_sum(nbi_cuda *c, const nbi_cuda_peers *p, float *x, size_t n);
void nbi_cuda_peers_join(nbi_cuda *c, const nbi_cuda_peers *p, const nbi_join_ranks_args *a);

/* cuda_nccl.cu. The same contracts. */
nb_status nbi_cuda_nccl_open(nbi_cuda *c, nbi_cuda_nccl *p, const nbi_rank_link *link, bool slices,
                             nb_error *err);
void nbi_cuda_nccl_close(nbi_cuda *c, nbi_cuda_nccl *p);
void nbi_cuda_nccl_sum(nbi_cuda *c, const nbi_cuda_nccl *p, float *x, size_t n);
void nbi_cuda_nccl_join(nbi_cuda *c, const nbi_cuda_nccl *p, const nbi_join_ranks_args *a);
/* Has a connection broken? Says so in p->failed. */
bool nbi_cuda_nccl_failed(nbi_cuda_nccl *p);
/* Kernels that wait for another rank end; there are no more sums. */
void nbi_cuda_nccl_abort(nbi_cuda *c, nbi_cuda_nccl *p);

/* cuda_probe.cu */
typedef void (*nbi_cuda_sum)(nbi_cuda *c, float *x, size_t n);
/* Collective: sums of different sizes, compared bit by bit, in and outside of recorded steps. The
 * ranks' agreement. */
nb_status nbi_cuda_prove_sums(nbi_cuda *c, nbi_cuda_sum sum, nb_error *err);
/* Collective: what sums take in recorded steps, the longest of all ranks; false: no memory. */
nb_status nbi_cuda_time_sums(nbi_cuda *c, nbi_cuda_sum one_shot, nbi_cuda_sum nccl,
                             nbi_exchange_times *t, nb_error *err);
