/* What a transport implements. Callers: comm.c; transports in their folders; transports of tests.
 */
#pragma once

#include "comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Contracts are those of the functions in comm.h. Not called with size 1 or with nothing to move.
 */
typedef struct nbi_comm_ops {
    const char *name;
    void (*close)(nbi_comm *comm); /* frees it */
    nb_status (*sum)(nbi_comm *comm, float *x, size_t n, nb_error *err);
    nb_status (*gather)(nbi_comm *comm, void *out, const void *in, size_t bytes, nb_error *err);
    nb_status (*broadcast)(nbi_comm *comm, void *data, size_t bytes, nb_error *err);
    nb_status (*barrier)(nbi_comm *comm, nb_error *err);
    void (*fail)(nbi_comm *comm, const char *why);
    nb_status (*lost)(nbi_comm *comm, nb_error *err);
    void (*on_lost)(nbi_comm *comm, void (*call)(void *user, const nb_error *why), void *user);
    void (*expect)(nbi_comm *comm, uint64_t limit_ns, uint64_t usual_ns);
    bool (*speaks)(const nbi_comm *comm);
} nbi_comm_ops;

/* The first member of every transport's own struct. */
struct nbi_comm {
    const nbi_comm_ops *ops;
    uint32_t rank, size, local_rank, local_size, host;
};

nb_status nbi_comm_open_self(nbi_comm **out, nb_error *err);
nb_status nbi_comm_open_mpi(nbi_comm **out, nb_error *err); /* in builds with MPI */

#ifdef __cplusplus
}
#endif
