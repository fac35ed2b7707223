/* Collectives of ranks that share memory: processes of one host, or threads of a test. Callers:
 * comm/mpi, tests.
 *
 * Every rank has an area that it alone writes and all read. It holds two messages, by the parity of
 * the operation's number, and the number of the newest one. A rank writes its message, then the
 * number; it goes on when those that it needs have written theirs. Before message n is written, all
 * others must have come to n - 1: nobody reads n - 2 any more, which lay in its place. Waiting is
 * spinning for a moment, then sleeping on the number (a futex).
 *
 * A thread of each rank counts up a pulse in its area and watches those of the others: a process
 * that is gone or does not count for a while fails the job in every rank. */
#pragma once

#include "comm/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Without a pulse: of a stopped process, of one that may only be short of processors. */
#define NBI_STOPPED_MS 1500u
#define NBI_SILENCE_MS 10000u

struct nbi_shared;

typedef struct nbi_shared_options {
    uint32_t rank, size;
    void *const *areas; /* [size] where each rank's area lies here; zeroed by its owner before */
    bool crowded;       /* fewer cores than ranks: sleep at once */
    /* [size] the ranks' numbers in a job of several hosts, ascending, where areas[0] belongs to the
     * one that speaks with the others. NULL: they are 0 to size - 1, and all. */
    const uint32_t *numbers;
    /* In the thread that watches, every 50 ms; `turn_ns` since the last time. NULL: none. */
    void (*beat)(void *user, struct nbi_shared *shared, uint64_t turn_ns);
    /* Once, when the job has failed, before anybody here acts on it; any thread. NULL: none. */
    void (*tell)(void *user, uint32_t rank, const char *why);
    /* Called when the ranks have parted, before the comm is freed; `in_order`: all are well. */
    void (*close)(void *user, bool in_order);
    void *user;
} nbi_shared_options;

size_t nbi_shared_area_bytes(void);

/* Collective. Returns when all ranks are there. */
nb_status nbi_comm_open_shared(nbi_comm **out, const nbi_shared_options *o, nb_error *err);

#ifdef __cplusplus
}
#endif
