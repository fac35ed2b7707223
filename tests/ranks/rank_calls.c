/* One rank of a job under mpiexec: every collective checked, then timed with --bench. Prints "ok"
 * on rank 0. With "die FILE", "stop FILE" or "error FILE" the last rank does that in the middle of
 * the run, and the others write to the file how they heard of it: mpiexec may drop what they print.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/comm.h"

#define LENGTH 300000u

static nbi_comm *comm;
static uint32_t rank, size;
static const char *heard;

static void must(nb_status st, const nb_error *err)
{
    if (st == NB_OK) return;
    FILE *f = heard ? fopen(heard, "a") : stdout;
    if (f) {
        fprintf(f, "rank %u: %s\n", rank, err->text);
        fflush(f);
    }
    _exit(3);
}

static float value(uint32_t r, uint32_t i)
{
    uint32_t v = (r * 2654435761u) ^ (i * 40503u + 7);
    v ^= v >> 15;
    v *= 2246822519u;
    return ((float)(v >> 8) * 0x1p-24f - 0.5f) * (i % 7 ? 1.0f : 1e6f);
}

static void check(void)
{
    static const uint32_t lengths[] = {1, 6144, 50001, LENGTH};
    float *x = malloc(LENGTH * sizeof *x), *all = malloc(LENGTH * size * sizeof *all);
    nb_error err;
    uint32_t wrong = 0;
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        for (uint32_t i = 0; i < lengths[k]; i++) x[i] = value(rank, i);
        must(nbi_comm_sum(comm, x, lengths[k], &err), &err);
        for (uint32_t i = 0; i < lengths[k]; i++) {
            float want = value(0, i);
            for (uint32_t r = 1; r < size; r++) want += value(r, i);
            wrong += memcmp(&want, &x[i], sizeof want) != 0;
        }
    }
    for (uint32_t i = 0; i < LENGTH; i++) x[i] = value(rank, i);
    must(nbi_comm_gather(comm, all, x, LENGTH * sizeof *x, &err), &err);
    for (uint32_t i = 0; i < LENGTH * size; i++) wrong += all[i] != value(i / LENGTH, i % LENGTH);
    must(nbi_comm_broadcast(comm, x, LENGTH * sizeof *x, &err), &err);
    for (uint32_t i = 0; i < LENGTH; i++) wrong += x[i] != value(0, i);
    must(nbi_comm_agree(comm, NB_OK, NULL, &err), &err);
    nb_status st = nbi_comm_agree(
        comm, rank == size - 1 ? nbi_fail(&err, NB_TOO_LARGE, "3 GB too much") : NB_OK, &err, &err);
    char want[64] = "3 GB too much"; /* alone one needs no number */
    if (size > 1) snprintf(want, sizeof want, "rank %u: 3 GB too much", size - 1);
    wrong += st != NB_TOO_LARGE || strcmp(err.text, want) != 0;
    if (wrong) {
        printf("rank %u: %u values are wrong\n", rank, wrong);
        exit(1);
    }
    free(x);
    free(all);
}

static void bench(void)
{
    static const uint32_t lengths[] = {256, 1536, 6144, 65536, LENGTH};
    float *x = calloc(LENGTH, sizeof *x);
    nb_error err;
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        uint32_t n = lengths[k] > 10000 ? 200 : 2000;
        must(nbi_comm_barrier(comm, &err), &err);
        uint64_t begin = nbi_now_ns();
        for (uint32_t i = 0; i < n; i++) must(nbi_comm_sum(comm, x, lengths[k], &err), &err);
        if (rank == 0)
            printf("sum of %u KB over %u ranks: %.1f us\n", lengths[k] / 256, size,
                   1e-3 * (double)(nbi_now_ns() - begin) / n);
    }
    static const uint32_t sizes[] = {256, 1024, 2048, 8192, 40000};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        uint64_t begin = nbi_now_ns();
        for (uint32_t i = 0; i < 2000; i++) {
            must(nbi_comm_broadcast(comm, x, sizes[k], &err), &err);
            must(nbi_comm_sum(comm, x, 1, &err), &err); /* as in a step, nobody runs ahead */
        }
        if (rank == 0)
            printf("broadcast of %u bytes and a sum of one value over %u ranks: %.1f us\n",
                   sizes[k], size, 1e-3 * (double)(nbi_now_ns() - begin) / 2000);
    }
    free(x);
}

static void go_wrong(const char *how)
{
    nb_error err;
    float x[256] = {0};
    for (uint32_t i = 0;; i++) {
        if (rank == size - 1 && i == 100) {
            if (!strcmp(how, "die")) raise(SIGKILL);
            if (!strcmp(how, "stop")) raise(SIGSTOP);
            nbi_comm_fail(comm, "the disk is on fire");
            sleep(2); /* still there when the others hear of it */
            _exit(3);
        }
        must(nbi_comm_sum(comm, x, 256, &err), &err);
    }
}

int main(int argc, char **argv)
{
    nb_error err;
    const char *what = argc > 1 ? argv[1] : "";
    heard = argc > 2 ? argv[2] : NULL;
    signal(SIGTERM, SIG_IGN); /* of mpiexec, when a rank is gone */
    must(nbi_comm_open(&comm, "mpi", &err), &err);
    rank = nbi_comm_rank(comm);
    size = nbi_comm_size(comm);
    check();
    if (!strcmp(what, "--bench")) {
        bench();
    } else if (*what) {
        go_wrong(what);
    }
    must(nbi_comm_barrier(comm, &err), &err);
    if (rank == 0) printf("ok\n");
    nbi_comm_close(&comm);
    return 0;
}
