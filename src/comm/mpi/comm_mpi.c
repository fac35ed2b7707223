/* Ranks that mpiexec or Slurm has started. On one host they share a window of memory
 * (comm/shared.h) and ask nothing of MPI between opening and closing; several hosts are joined by
 * hosts.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/thread.h"
#include "comm/mpi/hosts.h"

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

/* The name of this host. NIBBLE_COMM_HOST makes ranks of one machine take it for several. */
static nb_status name_host(const nbi_mpi *mpi, char name[NBI_HOST_NAME_MAX], nb_error *err)
{
    char own[MPI_MAX_PROCESSOR_NAME + 1] = "";
    const char *given = getenv(NBI_HOSTS_VARIABLE);
    int length = 0;
    if (!given) CALL(mpi->get_processor_name(own, &length));
    snprintf(name, NBI_HOST_NAME_MAX, "%s", given ? given : own);
    return NB_OK;
}

/* The ranks that share memory with this one, and where all are. */
static nb_status find_places(window *w, int rank, int size, nbi_place places[], nb_error *err)
{
    const nbi_mpi *mpi = w->mpi;
    MPI_Comm machine;
    nbi_place own = {.leader = rank};
    int here, color = 0;
    NB_TRY(name_host(mpi, own.host, err));
    CALL(mpi->comm_split_type(mpi->world, MPI_COMM_TYPE_SHARED, rank, mpi->info_null, &machine));
    CALL(mpi->comm_size(machine, &here));
    NB_ASSERT(here <= size);
    CALL(mpi->allgather(&own, sizeof own, mpi->byte, places, sizeof own, mpi->byte, machine));
    while (color < here - 1 && strcmp(places[color].host, own.host) != 0) color++;
    own.leader = places[color].leader;
    CALL(mpi->comm_split(machine, color, rank, &w->host));
    CALL(mpi->comm_free(&machine));
    CALL(mpi->allgather(&own, sizeof own, mpi->byte, places, sizeof own, mpi->byte, mpi->world));
    return NB_OK;
}

static nb_status join(nbi_comm **out, window *w, int rank, int size, nbi_place places[],
                      nb_error *err)
{
    const nbi_mpi *mpi = w->mpi;
    int here, local;
    void *areas[NBI_RANKS_MAX];
    NB_TRY(find_places(w, rank, size, places, err));
    CALL(mpi->comm_size(w->host, &here));
    CALL(mpi->comm_rank(w->host, &local));
    NB_TRY(open_window(w, local, here, areas, err));
    const nbi_shared_options shared = {.rank = (uint32_t)local,
                                       .size = (uint32_t)here,
                                       .areas = areas,
                                       .crowded = (uint32_t)here > nbi_cores_available(),
                                       .close = close_window,
                                       .user = w};
    if (here == size) return nbi_comm_open_shared(out, &shared, err);
    CALL(mpi->comm_set_errhandler(mpi->world, mpi->errors_return));
    return nbi_comm_open_hosts(out,
                               &(nbi_hosts_options){.mpi = mpi,
                                                    .rank = (uint32_t)rank,
                                                    .size = (uint32_t)size,
                                                    .places = places,
                                                    .local = shared},
                               err);
}

static nb_status open_ranks(nbi_comm **out, window *w, nb_error *err)
{
    const nbi_mpi *mpi = w->mpi;
    int rank, size, there, provided;
    CALL(mpi->initialized(&there));
    if (there) return nbi_fail(err, NB_INTERNAL, "comm: MPI is in use already");
    CALL(mpi->init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided));
    CALL(mpi->comm_rank(mpi->world, &rank));
    CALL(mpi->comm_size(mpi->world, &size));
    if ((uint32_t)size > NBI_RANKS_MAX)
        return nbi_fail(err, NB_UNSUPPORTED, "%d ranks; expected at most %u", size, NBI_RANKS_MAX);
    if (provided < MPI_THREAD_SERIALIZED)
        return nbi_fail(err, NB_UNSUPPORTED, "this Open MPI was built without threads");
    nbi_place *places = nbi_calloc((size_t)size, sizeof *places);
    if (!places) return nbi_fail(err, NB_NO_MEMORY, "comm: out of memory");
    nb_status st = join(out, w, rank, size, places, err);
    nbi_free(places);
    return st;
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
