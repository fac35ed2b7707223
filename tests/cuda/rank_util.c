#include "cuda/rank_util.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/thread.h"
#include "comm/device_ranks.h"
#include "comm/shared.h"

#define RANKS_MAX 8u

static uint32_t rank_now;

void rank_must(nb_status st, const nb_error *err)
{
    if (st == NB_OK) return;
    fprintf(stderr, "rank %u: %s\n", rank_now, err->text);
    _exit(3);
}

static int run_rank(uint32_t rank, uint32_t n, void *const areas[], rank_body body,
                    const void *user)
{
    nbi_comm *comm = NULL;
    nb_error err = {0};
    const nbi_shared_options o = {
        .rank = rank, .size = n, .areas = areas, .crowded = n > nbi_cores_available()};
    rank_now = rank;
    rank_must(nbi_comm_open_shared(&comm, &o, &err), &err);
    const int rc = body(comm, user);
    nbi_comm_close(&comm);
    return rc;
}

uint32_t ranks_run(uint32_t n, rank_body body, const void *user)
{
    const size_t bytes = (nbi_shared_area_bytes() + 4095) / 4096 * 4096;
    void *areas[RANKS_MAX];
    pid_t pids[RANKS_MAX];
    uint32_t failed = 0;
    if (n > RANKS_MAX) return n;
    char *block = mmap(NULL, n * bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) return n;
    for (uint32_t r = 0; r < n; r++) areas[r] = block + r * bytes;
    fflush(NULL);
    for (uint32_t r = 0; r < n; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            const int rc = run_rank(r, n, areas, body, user);
            fflush(NULL);
            _exit(rc);
        }
    }
    for (uint32_t r = 0; r < n; r++) {
        int status = 1;
        if (pids[r] < 0 || waitpid(pids[r], &status, 0) < 0 || status != 0) failed++;
    }
    munmap(block, n * bytes);
    return failed;
}

/* Can all ranks have a device each? Found out in processes that end: the caller forks. */
static int have_devices(nbi_comm *comm, const void *user)
{
    nbi_backend_options o = {.cpu_level = NBI_CPU_LEVEL_COUNT, .exchange = user};
    nbi_backend *b = NULL;
    nb_error err = {0};
    nbi_comm_device(comm, &o);
    nb_status st = nbi_backend_open(&b, "cuda", &o, &err);
    st = nbi_comm_agree(comm, st, &err, &err);
    if (st == NB_OK) st = nbi_comm_join_device(comm, b, &err);
    nbi_backend_close(&b);
    return st != NB_OK;
}

uint32_t ranks_per_device(uint32_t n)
{
    return ranks_run(n, have_devices, "staged") ? RANKS_MAX : 1;
}
