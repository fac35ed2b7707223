/* One rank: the process itself. comm.c has nothing to ask of it. */
#include "base/mem.h"
#include "comm/transport.h"

static void close_self(nbi_comm *comm)
{
    nbi_free(comm);
}

static const nbi_comm_ops ops = {.name = "self", .close = close_self};

nb_status nbi_comm_open_self(nbi_comm **out, nb_error *err)
{
    nbi_comm *comm = nbi_calloc(1, sizeof *comm);
    if (!comm) return nbi_fail(err, NB_NO_MEMORY, "comm: out of memory");
    comm->ops = &ops;
    comm->size = comm->local_size = 1;
    *out = comm;
    return NB_OK;
}
