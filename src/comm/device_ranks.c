/* Devices of ranks (device_ranks.h). */
#include "comm/device_ranks.h"

static nb_status sum(void *user, float *x, size_t n, nb_error *err)
{
    return nbi_comm_sum(user, x, n, err);
}

static nb_status gather(void *user, void *out, const void *in, size_t bytes, nb_error *err)
{
    return nbi_comm_gather(user, out, in, bytes, err);
}

static nb_status agree(void *user, nb_status status, const nb_error *own, nb_error *err)
{
    return nbi_comm_agree(user, status, own, err);
}

static nb_status lost(void *user, nb_error *err)
{
    return nbi_comm_lost(user, err);
}

void nbi_comm_device(const nbi_comm *comm, nbi_backend_options *o)
{
    if (comm) o->local_rank = nbi_comm_local_rank(comm);
}

nb_status nbi_comm_join_device(nbi_comm *comm, nbi_backend *b, nb_error *err)
{
    if (!b->ops->join) return NB_OK;
    const nbi_rank_link link = {.user = comm,
                                .rank = nbi_comm_rank(comm),
                                .size = nbi_comm_size(comm),
                                .host = nbi_comm_host(comm),
                                .one_host = nbi_comm_local_size(comm) == nbi_comm_size(comm),
                                .sum = sum,
                                .gather = gather,
                                .agree = agree,
                                .lost = lost};
    return b->ops->join(b, &link, err);
}
