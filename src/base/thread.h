/* Compute threads: a fixed pool that runs one parallel region at a time.
 *
 * Work is split by index only: what a task computes must not depend on how many threads there are,
 * so that results are the same for every thread count. Workers spin briefly after a region, then
 * sleep, so that back-to-back operators pay no wake-up. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_pool nbi_pool;

/* Cores this process may run on (affinity and cgroup quota), at least 1. */
uint32_t nbi_cores_available(void);

/* n_threads includes the calling thread; 0: nbi_cores_available(). */
nb_status nbi_pool_create(nbi_pool **out, uint32_t n_threads, nb_error *err);
void nbi_pool_destroy(nbi_pool **pool);
uint32_t nbi_pool_threads(const nbi_pool *pool);

/* Task function: does items [begin, end) of n; `thread` in [0, threads) selects scratch memory. */
typedef void (*nbi_task)(void *arg, uint32_t begin, uint32_t end, uint32_t thread);

/* Splits [0, n) into pieces of `grain` items that the threads take in turn; returns when all are
 * done. Called by one thread at a time. A NULL pool runs in the caller. */
void nbi_pool_run(nbi_pool *pool, nbi_task task, void *arg, uint32_t n, uint32_t grain);

#ifdef __cplusplus
}
#endif
