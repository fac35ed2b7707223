/* The functions of Open MPI that ranks call, found at run time: a server of one rank needs no MPI.
 * Private to comm/mpi. */
#pragma once

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_mpi {
    int (*initialized)(int *flag);
    int (*init_thread)(int *argc, char ***argv, int required, int *provided);
    int (*finalize)(void);
    int (*comm_size)(MPI_Comm comm, int *size);
    int (*comm_rank)(MPI_Comm comm, int *rank);
    int (*comm_split_type)(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm *out);
    int (*comm_split)(MPI_Comm comm, int color, int key, MPI_Comm *out);
    int (*comm_free)(MPI_Comm *comm);
    int (*comm_set_errhandler)(MPI_Comm comm, MPI_Errhandler handler);
    int (*get_processor_name)(char *name, int *length);
    int (*barrier)(MPI_Comm comm);
    int (*allgather)(const void *in, int n_in, MPI_Datatype in_type, void *out, int n_out,
                     MPI_Datatype out_type, MPI_Comm comm);
    int (*isend)(const void *data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                 MPI_Request *request);
    int (*irecv)(void *data, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm,
                 MPI_Request *request);
    int (*testall)(int n, MPI_Request requests[], int *done, MPI_Status statuses[]);
    int (*win_allocate_shared)(MPI_Aint bytes, int unit, MPI_Info info, MPI_Comm comm, void *base,
                               MPI_Win *win);
    int (*win_shared_query)(MPI_Win win, int rank, MPI_Aint *bytes, int *unit, void *base);
    int (*win_free)(MPI_Win *win);
    MPI_Comm world;
    MPI_Info info_null;
    MPI_Datatype byte;
    MPI_Errhandler errors_return;
} nbi_mpi;

/* Loads the library once per process; it stays. NB_UNSUPPORTED says what to install. */
nb_status nbi_mpi_load(const nbi_mpi **out, nb_error *err);

#ifdef __cplusplus
}
#endif
