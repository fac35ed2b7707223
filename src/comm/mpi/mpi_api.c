/* dlopen() of Open MPI. Its parts are libraries of their own that look for its symbols: it is
 * opened for all to see. */
#include "comm/mpi/mpi_api.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#define LIBRARY "libmpi.so.40" /* Open MPI 4 and 5 */

static const struct entry {
    const char *name;
    size_t offset;
} entries[] = {
    {"MPI_Initialized", offsetof(nbi_mpi, initialized)},
    {"MPI_Init_thread", offsetof(nbi_mpi, init_thread)},
    {"MPI_Finalize", offsetof(nbi_mpi, finalize)},
    {"MPI_Comm_size", offsetof(nbi_mpi, comm_size)},
    {"MPI_Comm_rank", offsetof(nbi_mpi, comm_rank)},
    {"MPI_Comm_split_type", offsetof(nbi_mpi, comm_split_type)},
    {"MPI_Comm_split", offsetof(nbi_mpi, comm_split)},
    {"MPI_Comm_free", offsetof(nbi_mpi, comm_free)},
    {"MPI_Comm_set_errhandler", offsetof(nbi_mpi, comm_set_errhandler)},
    {"MPI_Get_processor_name", offsetof(nbi_mpi, get_processor_name)},
    {"MPI_Barrier", offsetof(nbi_mpi, barrier)},
    {"MPI_Allgather", offsetof(nbi_mpi, allgather)},
    {"MPI_Isend", offsetof(nbi_mpi, isend)},
    {"MPI_Irecv", offsetof(nbi_mpi, irecv)},
    {"MPI_Testall", offsetof(nbi_mpi, testall)},
    {"MPI_Win_allocate_shared", offsetof(nbi_mpi, win_allocate_shared)},
    {"MPI_Win_shared_query", offsetof(nbi_mpi, win_shared_query)},
    {"MPI_Win_free", offsetof(nbi_mpi, win_free)},
    {"ompi_mpi_comm_world", offsetof(nbi_mpi, world)},
    {"ompi_mpi_info_null", offsetof(nbi_mpi, info_null)},
    {"ompi_mpi_byte", offsetof(nbi_mpi, byte)},
    {"ompi_mpi_errors_return", offsetof(nbi_mpi, errors_return)},
};

nb_status nbi_mpi_load(const nbi_mpi **out, nb_error *err)
{
    static nbi_mpi table;
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "several ranks need Open MPI: install openmpi-bin (%s)", dlerror());
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        void *symbol = dlsym(library, entries[i].name);
        if (!symbol)
            return nbi_fail(err, NB_UNSUPPORTED, "%s has no %s; Open MPI 4 or 5 is needed", LIBRARY,
                            entries[i].name);
        memcpy((char *)&table + entries[i].offset, &symbol, sizeof symbol);
    }
    *out = &table;
    return NB_OK;
}
