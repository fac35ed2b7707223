/* Choice of the transport, and what needs none: jobs of one rank. */
#include "comm/comm.h"

#include <string.h>

#include "base/mem.h"
#include "comm/transport.h"

nb_status nbi_comm_open(nbi_comm **out, const char *name, nb_error *err)
{
    if (!strcmp(name, "self")) return nbi_comm_open_self(out, err);
    if (strcmp(name, "mpi"))
        return nbi_fail(err, NB_UNSUPPORTED, "comm: no transport \"%s\"; expected self or mpi",
                        name);
#if NBI_WITH_MPI
    return nbi_comm_open_mpi(out, err);
#else
    return nbi_fail(err, NB_UNSUPPORTED,
                    "this build runs on one rank: it was made without Open MPI (libopenmpi-dev)");
#endif
}

void nbi_comm_close(nbi_comm **comm)
{
    if (*comm) (*comm)->ops->close(*comm);
    *comm = NULL;
}

uint32_t nbi_comm_rank(const nbi_comm *comm)
{
    return comm->rank;
}

uint32_t nbi_comm_size(const nbi_comm *comm)
{
    return comm->size;
}

uint32_t nbi_comm_local_rank(const nbi_comm *comm)
{
    return comm->local_rank;
}

uint32_t nbi_comm_local_size(const nbi_comm *comm)
{
    return comm->local_size;
}

uint32_t nbi_comm_host(const nbi_comm *comm)
{
    return comm->host;
}

nb_status nbi_comm_sum(nbi_comm *comm, float *x, size_t n, nb_error *err)
{
    return comm->size == 1 || !n ? NB_OK : comm->ops->sum(comm, x, n, err);
}

nb_status nbi_comm_gather(nbi_comm *comm, void *out, const void *in, size_t bytes, nb_error *err)
{
    if (!bytes) return NB_OK;
    if (comm->size > 1) return comm->ops->gather(comm, out, in, bytes, err);
    memcpy(out, in, bytes);
    return NB_OK;
}

nb_status nbi_comm_broadcast(nbi_comm *comm, void *data, size_t bytes, nb_error *err)
{
    return comm->size == 1 || !bytes ? NB_OK : comm->ops->broadcast(comm, data, bytes, err);
}

nb_status nbi_comm_barrier(nbi_comm *comm, nb_error *err)
{
    return comm->size == 1 ? NB_OK : comm->ops->barrier(comm, err);
}

void nbi_comm_fail(nbi_comm *comm, const char *why)
{
    if (comm->size > 1) comm->ops->fail(comm, why);
}

nb_status nbi_comm_lost(nbi_comm *comm, nb_error *err)
{
    return comm->size == 1 ? NB_OK : comm->ops->lost(comm, err);
}

void nbi_comm_on_lost(nbi_comm *comm, void (*call)(void *user, const nb_error *why), void *user)
{
    if (comm->size > 1) comm->ops->on_lost(comm, call, user);
}

void nbi_comm_expect(nbi_comm *comm, uint64_t limit_ns, uint64_t usual_ns)
{
    if (comm->size > 1) comm->ops->expect(comm, limit_ns, usual_ns);
}

bool nbi_comm_speaks(const nbi_comm *comm)
{
    return comm->size == 1 || comm->ops->speaks(comm);
}

nb_status nbi_comm_agree(nbi_comm *comm, nb_status status, const nb_error *own, nb_error *err)
{
    typedef struct vote {
        int32_t status;
        char text[NB_ERROR_TEXT_MAX];
    } vote;
    nb_error theirs = {.status = status};
    if (status != NB_OK && own) theirs = *own;
    if (comm->size == 1) {
        if (status != NB_OK && err && err != own) *err = theirs;
        return status;
    }
    vote mine = {.status = (int32_t)status}, *all = nbi_calloc(comm->size, sizeof *all);
    memcpy(mine.text, theirs.text, sizeof mine.text);
    if (!all) {
        nbi_comm_fail(comm, "out of memory");
        return nbi_fail(err, NB_NO_MEMORY, "comm: out of memory");
    }
    nb_status st = nbi_comm_gather(comm, all, &mine, sizeof mine, err);
    for (uint32_t r = 0; r < comm->size && st == NB_OK; r++) {
        all[r].text[sizeof all[r].text - 1] = 0;
        if (all[r].status != NB_OK)
            st = nbi_fail(err, (nb_status)all[r].status, "rank %u: %s", r, all[r].text);
    }
    nbi_free(all);
    return st;
}

nb_status nbi_shard_make(nbi_shard *out, uint32_t rank, uint32_t size, uint32_t ep_size,
                         nb_error *err)
{
    if (!ep_size) ep_size = 1;
    NB_ASSERT(rank < size);
    if (size % ep_size)
        return nbi_fail(err, NB_INVALID, "ep_size is %u; expected a divisor of the %u ranks",
                        ep_size, size);
    *out = (nbi_shard){
        .tp_rank = rank, .tp_size = size, .ep_rank = rank / (size / ep_size), .ep_size = ep_size};
    return NB_OK;
}
