/* Ranks that mpiexec or Slurm has started. On one host they share a window of memory
 * (comm/shared.h) and ask nothing of MPI between opening and closing. */
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/thread.h"
#include "comm/mpi/mpi_api.h"
#include "comm/shared.h"

#define PARTING_SECONDS 10u

#define CALL(f)                                                                                    \
    do {                                                                                           \
        int rc_ = (f);                                                                             \
        if (rc_ != MPI_SUCCESS) return nbi_fail(err, NB_INTERNAL, "MPI: %s returned %d", #f, rc_); \
    } while (0)

typedef struct window {
    const nbi_mpi *mpi;
    MPI_Comm host;
    MPI_Win win;
} window;

static void close_window(void *user, bool in_order)
{
    window *w = user;
    if (in_order) {
        alarm(PARTING_SECONDS); /* MPI waits for others, and without an end */
        w->mpi->win_free(&w->win);
        w->mpi->comm_free(&w->host);
        w->mpi->finalize();
        alarm(0);
    }
    nbi_free(w);
}

/* The areas begin somewhere in the window, at the same place of a page in every process. */
static nb_status open_window(window *w, int rank, int size, void **areas, nb_error *err)
{
    const nbi_mpi *mpi = w->mpi;
    const size_t bytes = nbi_shared_area_bytes(), align = 64;
    void *own = NULL;
    CALL(mpi->win_allocate_shared((MPI_Aint)(bytes + align), 1, mpi->info_null, w->host, &own,
                                  &w->win));
    for (int r = 0; r < size; r++) {
        MPI_Aint n;
        int unit;
        char *base;
        CALL(mpi->win_shared_query(w->win, r, &n, &unit, &base));
        if (n < (MPI_Aint)(bytes + align))
            return nbi_fail(err, NB_INTERNAL, "MPI: the window of rank %d has %lld bytes, not %zu",
                            r, (long long)n, bytes + align);
        areas[r] = base + (align - (uintptr_t)base % align) % align;
    }
    memset(areas[rank], 0, bytes);
    CALL(mpi->barrier(w->host));
    return NB_OK;
}

static nb_status open_ranks(nbi_comm **out, window *w, nb_error *err)
{
    const nbi_mpi *mpi = w->mpi;
    int rank, size, there, provided;
    void *areas[NBI_RANKS_MAX];
    CALL(mpi->initialized(&there));
    if (there) return nbi_fail(err, NB_INTERNAL, "comm: MPI is in use already");
    CALL(mpi->init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided));
    CALL(mpi->comm_rank(mpi->world, &rank));
    CALL(mpi->comm_size(mpi->world, &size));
    if ((uint32_t)size > NBI_RANKS_MAX)
        return nbi_fail(err, NB_UNSUPPORTED, "%d ranks; expected at most %u", size, NBI_RANKS_MAX);
    CALL(mpi->comm_split_type(mpi->world, MPI_COMM_TYPE_SHARED, rank, mpi->info_null, &w->host));
    int here;
    CALL(mpi->comm_size(w->host, &here));
    if (here != size)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "%d of %d ranks are on the host of rank %d; this build takes ranks of one "
                        "host only",
                        here, size, rank);
    NB_TRY(open_window(w, rank, size, areas, err));
    return nbi_comm_open_shared(
        out,
        &(nbi_shared_options){.rank = (uint32_t)rank,
                              .size = (uint32_t)size,
                              .areas = areas,
                              .crowded = (uint32_t)size > nbi_cores_available(),
                              .close = close_window,
                              .user = w},
        err);
}

nb_status nbi_comm_open_mpi(nbi_comm **out, nb_error *err)
{
    window *w = nbi_calloc(1, sizeof *w);
    if (!w) return nbi_fail(err, NB_NO_MEMORY, "comm: out of memory");
    nb_status st = nbi_mpi_load(&w->mpi, err);
    if (st == NB_OK) st = open_ranks(out, w, err);
    if (st != NB_OK) nbi_free(w);
    return st;
}
