/* Choice of the transport, and what needs none: jobs of one rank. */
#include "comm/comm.h"

#include <string.h>

#include "comm/transport.h"

nb_status nbi_comm_open(nbi_comm **out, const char *name, nb_error *err)
{
    if (!strcmp(name, "self")) return nbi_comm_open_self(out, err);
    return nbi_fail(err, NB_UNSUPPORTED, "comm: no transport \"%s\"; expected self", name);
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
