/* Ranks: the processes that run one model together, and what they tell one another.
 *
 * One rank is one process with one device or one share of a CPU. Rank 0 decides; the others do what
 * it says. Every call here is collective: all ranks make the same calls in the same order with the
 * same sizes. One thread of a rank at a time calls. Only open and agree take memory.
 *
 * A call fails with NB_CLOSED when another rank is gone, has failed or does not answer; the
 * sentence names the rank. The job is then over: no call succeeds afterwards. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_comm nbi_comm;

#define NBI_RANKS_MAX 256u

/* `name`: "self" (this process alone), "mpi" (the processes that mpiexec or Slurm has started
 * together). NB_UNSUPPORTED with the reason when this build or machine has no such transport.
 * "mpi": once per process, opened and closed by its main thread. */
nb_status nbi_comm_open(nbi_comm **out, const char *name, nb_error *err);
void nbi_comm_close(nbi_comm **comm);

uint32_t nbi_comm_rank(const nbi_comm *comm);
uint32_t nbi_comm_size(const nbi_comm *comm);
/* The same among the ranks of this host. */
uint32_t nbi_comm_local_rank(const nbi_comm *comm);
uint32_t nbi_comm_local_size(const nbi_comm *comm);
/* The lowest rank of this host: what tells it from others. */
uint32_t nbi_comm_host(const nbi_comm *comm);

/* x[n] := sum over ranks, in float32, added in the order of ranks beginning with the value of rank
 * 0: the same bits on every rank and in every run. */
NBI_MUST_CHECK nb_status nbi_comm_sum(nbi_comm *comm, float *x, size_t n, nb_error *err);

/* out[size][bytes] := `in` of every rank. `in` must not lie in `out`. */
NBI_MUST_CHECK nb_status nbi_comm_gather(nbi_comm *comm, void *out, const void *in, size_t bytes,
                                         nb_error *err);

/* data[bytes] of rank 0 to every rank. */
NBI_MUST_CHECK nb_status nbi_comm_broadcast(nbi_comm *comm, void *data, size_t bytes,
                                            nb_error *err);

/* Returns when all ranks have come here. */
NBI_MUST_CHECK nb_status nbi_comm_barrier(nbi_comm *comm, nb_error *err);

/* ---- when something goes wrong; any thread */

/* This rank cannot go on: the others hear `why` and fail, and whoever waits in a call here. */
void nbi_comm_fail(nbi_comm *comm, const char *why);
/* NB_OK while all are well, else NB_CLOSED and what has happened. */
nb_status nbi_comm_lost(nbi_comm *comm, nb_error *err);
/* `call` is called once when the job has failed, by any thread; at once when it has already. NULL:
 * none; when that returns, the one before is not called any more. */
void nbi_comm_on_lost(nbi_comm *comm, void (*call)(void *user, const nb_error *why), void *user);

/* From here to nbi_comm_expect(comm, 0, 0) no two calls are limit_ns apart on any rank. Where they
 * are, the one that is behind fails the job; `usual_ns` is for the sentence. */
void nbi_comm_expect(nbi_comm *comm, uint64_t limit_ns, uint64_t usual_ns);

/* Is it for this rank to tell people what has happened? One of those that are left. */
bool nbi_comm_speaks(const nbi_comm *comm);

/* Collective. NB_OK when every rank comes with NB_OK. Else all return the failure of the lowest one
 * that failed, "rank 2: sentence"; with one rank, its own. `own` may be `err`. */
nb_status nbi_comm_agree(nbi_comm *comm, nb_status status, const nb_error *own, nb_error *err);

/* ---- who holds what */

/* The place of a rank among tp_size ranks. Everything but routed experts is split over all of them
 * (tp_rank of tp_size). ep_size divides tp_size: routed experts are split into ep_size runs of
 * whole experts, each held by the tp_size / ep_size neighbouring ranks of one group, which split
 * its experts by intermediate columns. So ep_rank = tp_rank / (tp_size / ep_size), and the rank's
 * part of the columns is nbi_shard_moe_rank() of nbi_shard_moe_size(). */
typedef struct nbi_shard {
    uint32_t tp_rank, tp_size, ep_rank, ep_size;
    /* q_a, kv_a and the indexer's products of the residual are split by its columns */
    bool latents;
} nbi_shard;

/* ep_size 0 means 1. NB_INVALID when it does not divide the number of ranks. */
nb_status nbi_shard_make(nbi_shard *out, uint32_t rank, uint32_t size, uint32_t ep_size,
                         nb_error *err);

static inline uint32_t nbi_shard_moe_size(const nbi_shard *s)
{
    return s->tp_size / s->ep_size;
}

static inline uint32_t nbi_shard_moe_rank(const nbi_shard *s)
{
    return s->tp_rank % nbi_shard_moe_size(s);
}

#ifdef __cplusplus
}
#endif
