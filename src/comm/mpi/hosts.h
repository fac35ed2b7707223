/* Ranks of several hosts. Those of one host share memory (comm/shared.h); the lowest of them leads:
 * it exchanges with the leaders of the other hosts what its host's ranks have brought.
 *
 * A sum brings every rank's values to every leader, which adds them in the order of ranks: the same
 * bits as on one host, wherever the ranks are. What goes over the link per sum and host is
 * (ranks elsewhere) x bytes each way.
 *
 * Leaders send one another a pulse. A host whose pulse stays away for NBI_LINK_MS is lost with all
 * of its ranks; a rank that is lost on its own host is told to the others at once. Private to
 * comm/mpi. */
#pragma once

#include "comm/mpi/mpi_api.h"
#include "comm/shared.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_LINK_MS        2500u
#define NBI_HOST_NAME_MAX  64u
#define NBI_HOSTS_VARIABLE "NIBBLE_COMM_HOST"

/* Where a rank runs. */
typedef struct nbi_place {
    int leader; /* the lowest rank of its host */
    char host[NBI_HOST_NAME_MAX];
} nbi_place;

typedef struct nbi_hosts_options {
    const nbi_mpi *mpi;
    uint32_t rank, size;
    const nbi_place *places;  /* [size] */
    nbi_shared_options local; /* without numbers, beat and tell; close and user as there */
} nbi_hosts_options;

/* Collective. MPI is called by one thread of a rank at a time from here to local.close(). */
nb_status nbi_comm_open_hosts(nbi_comm **out, const nbi_hosts_options *o, nb_error *err);

#ifdef __cplusplus
}
#endif
