/* The compute pool. Called by every operator through backend and model code.
 *
 * A region is published in one 32-bit word, `state`: open flag, epoch, number of workers inside. A
 * worker enters by a compare-and-swap that adds itself while the flag is set, and leaves by
 * subtracting itself. The caller takes pieces too; when none are left it closes the region and
 * waits only for workers that are inside. A worker that wakes late finds the region closed and
 * costs nothing. `task`, `arg`, `n`, `grain` are plain fields: written while nobody can be inside,
 * published by `state`. */
#include "base/thread.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/clock.h"
#include "base/mem.h"

#define STATE_OPEN   0x80000000u
#define STATE_EPOCH  0x7fff0000u
#define EPOCH_ONE    0x00010000u
#define STATE_INSIDE 0x0000ffffu
#define THREADS_MAX  4096u

/* The gaps between the operators of a token are a few microseconds; a wake-up through the kernel
 * costs about fifty. */
#define SPIN_NS 100000u

typedef struct worker {
    nbi_pool *pool;
    pthread_t thread;
    uint32_t index; /* 1 and up; the caller is 0 */
} worker;

struct nbi_pool {
    /* Written by the caller at each region, read by all. */
    _Alignas(64) _Atomic uint32_t state;
    _Atomic uint32_t signal; /* changes with each region and at the end; workers sleep on it */
    _Atomic uint32_t sleeping;
    _Atomic uint32_t caller_sleeps;
    _Atomic uint32_t stop;
    _Atomic uint32_t busy; /* a region runs: catches nested and concurrent calls */
    nbi_task task;
    void *arg;
    uint32_t n, grain;
    /* Hammered by all. */
    _Alignas(64) _Atomic uint64_t next;
    /* Constant after creation. */
    _Alignas(64) uint32_t n_threads;
    uint32_t n_started; /* workers that run: what destroy joins */
    uint64_t spin_ns;
    worker *workers; /* [n_threads - 1] */
};

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Cores in the affinity mask; the mask may be larger than cpu_set_t. */
static uint32_t cores_by_affinity(void)
{
    for (int n = 1024; n <= 1 << 20; n *= 2) {
        cpu_set_t *set = CPU_ALLOC((size_t)n);
        if (!set) return 1;
        size_t bytes = CPU_ALLOC_SIZE((size_t)n);
        int rc = sched_getaffinity(0, bytes, set);
        int error = errno;
        int count = rc == 0 ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (rc == 0) return count > 0 ? (uint32_t)count : 1;
        if (error != EINVAL) return 1;
    }
    return 1;
}

uint32_t nbi_cores_available(void)
{
    uint32_t cores = cores_by_affinity();
    uint64_t milli = nbi_cpu_quota_milli_under("");
    if (milli == 0) return cores;
    /* Rounded down: a thread beyond the quota is stopped in the middle of a region, and all others
     * wait for it. */
    uint64_t quota = milli < 1000 ? 1 : milli / 1000;
    return quota < cores ? (uint32_t)quota : cores;
}

/* Takes pieces until none are left. */
static void take_pieces(nbi_pool *pool, uint32_t thread)
{
    const uint32_t n = pool->n, grain = pool->grain;
    for (;;) {
        uint64_t begin = atomic_fetch_add_explicit(&pool->next, grain, memory_order_relaxed);
        if (begin >= n) return;
        uint32_t left = n - (uint32_t)begin;
        uint32_t end = (uint32_t)begin + (left < grain ? left : grain);
        pool->task(pool->arg, (uint32_t)begin, end, thread);
    }
}

/* Enters the open region, if there is one other than `seen`; works; leaves. Returns whether it
 * entered. */
static bool join_region(nbi_pool *pool, uint32_t thread, uint32_t *seen)
{
    uint32_t state = atomic_load_explicit(&pool->state, memory_order_relaxed);
    do {
        if (!(state & STATE_OPEN) || (state & STATE_EPOCH) == *seen) return false;
    } while (!atomic_compare_exchange_weak_explicit(&pool->state, &state, state + 1,
                                                    memory_order_acquire, memory_order_relaxed));
    *seen = state & STATE_EPOCH;
    take_pieces(pool, thread);
    uint32_t before = atomic_fetch_sub(&pool->state, 1);
    bool last = (before & STATE_INSIDE) == 1 && !(before & STATE_OPEN);
    if (last && atomic_load(&pool->caller_sleeps)) futex_wake(&pool->state, 1);
    return true;
}

/* Waits for `signal` to differ from `seen`: spins first, then sleeps. Returns its new value. */
static uint32_t wait_signal(nbi_pool *pool, uint32_t seen)
{
    uint32_t value;
    uint64_t until = pool->spin_ns ? nbi_now_ns() + pool->spin_ns : 0;
    while (until) {
        for (int i = 0; i < 32; i++) {
            value = atomic_load_explicit(&pool->signal, memory_order_acquire);
            if (value != seen) return value;
            relax();
        }
        if (nbi_now_ns() >= until) break;
    }
    /* Order matters: announce, look again, sleep. The caller changes the word, then looks for
     * sleepers. */
    atomic_fetch_add(&pool->sleeping, 1);
    while ((value = atomic_load(&pool->signal)) == seen) futex_wait(&pool->signal, seen);
    atomic_fetch_sub(&pool->sleeping, 1);
    return value;
}

static void *worker_main(void *arg)
{
    worker *w = arg;
    nbi_pool *pool = w->pool;
    uint32_t epoch = 0, signal = 0; /* what pool creation sets */
    for (;;) {
        signal = wait_signal(pool, signal);
        if (atomic_load_explicit(&pool->stop, memory_order_acquire)) return NULL;
        join_region(pool, w->index, &epoch);
    }
}

static void signal_workers(nbi_pool *pool)
{
    atomic_fetch_add(&pool->signal, 1);
    if (atomic_load(&pool->sleeping)) futex_wake(&pool->signal, INT32_MAX);
}

/* Signals belong to the threads of the program, not to workers. */
static bool start_worker(worker *w)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&w->thread, NULL, worker_main, w);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0) return false;
    char name[16];
    snprintf(name, sizeof name, "nibble-%u", w->index);
    pthread_setname_np(w->thread, name);
    return true;
}

nb_status nbi_pool_create(nbi_pool **out, uint32_t n_threads, nb_error *err)
{
    uint32_t cores = nbi_cores_available();
    if (n_threads == 0) n_threads = cores < THREADS_MAX ? cores : THREADS_MAX;
    if (n_threads > THREADS_MAX) {
        return nbi_fail(err, NB_INVALID, "%u compute threads, expected at most %u", n_threads,
                        THREADS_MAX);
    }
    nbi_pool *pool = nbi_malloc_aligned(sizeof *pool, 64);
    if (!pool) return nbi_fail(err, NB_NO_MEMORY, "no memory for the thread pool");
    memset(pool, 0, sizeof *pool);
    pool->n_threads = n_threads;
    /* With more threads than cores a spinning thread keeps a working one from its core. */
    pool->spin_ns = n_threads > cores ? 0 : SPIN_NS;
    pool->workers = nbi_calloc(n_threads, sizeof *pool->workers);
    if (!pool->workers) {
        nbi_pool_destroy(&pool);
        return nbi_fail(err, NB_NO_MEMORY, "no memory for %u compute threads", n_threads);
    }
    for (uint32_t i = 0; i + 1 < n_threads; i++) {
        pool->workers[i] = (worker){.pool = pool, .index = i + 1};
        if (!start_worker(&pool->workers[i])) {
            nbi_pool_destroy(&pool);
            return nbi_fail(err, NB_NO_MEMORY, "cannot start compute thread %u of %u", i + 2,
                            n_threads);
        }
        pool->n_started++;
    }
    *out = pool;
    return NB_OK;
}

void nbi_pool_destroy(nbi_pool **pool)
{
    nbi_pool *p = *pool;
    if (!p) return;
    atomic_store(&p->stop, 1);
    signal_workers(p);
    for (uint32_t i = 0; i < p->n_started; i++) pthread_join(p->workers[i].thread, NULL);
    nbi_free(p->workers);
    nbi_free_aligned(p);
    *pool = NULL;
}

uint32_t nbi_pool_threads(const nbi_pool *pool)
{
    return pool ? pool->n_threads : 1;
}

/* Closes the region and waits until no worker is inside. */
static void close_region(nbi_pool *pool)
{
    uint32_t state = atomic_fetch_and(&pool->state, ~STATE_OPEN) & ~STATE_OPEN;
    uint64_t until = 0;
    for (uint32_t i = 1; state & STATE_INSIDE; i++) {
        relax();
        if (i % 32 == 0) {
            uint64_t now = nbi_now_ns();
            if (until == 0) until = now + pool->spin_ns;
            if (now >= until) break;
        }
        state = atomic_load_explicit(&pool->state, memory_order_acquire);
    }
    if (!(state & STATE_INSIDE)) return;
    atomic_store(&pool->caller_sleeps, 1);
    while ((state = atomic_load(&pool->state)) & STATE_INSIDE) futex_wait(&pool->state, state);
    atomic_store(&pool->caller_sleeps, 0);
}

void nbi_pool_run(nbi_pool *pool, nbi_task task, void *arg, uint32_t n, uint32_t grain)
{
    if (grain == 0) grain = 1;
    if (!pool || pool->n_threads == 1 || n <= grain) {
        for (uint32_t begin = 0; begin < n;) {
            uint32_t end = n - begin < grain ? n : begin + grain;
            task(arg, begin, end, 0);
            begin = end;
        }
        return;
    }
    NB_ASSERT(!atomic_exchange_explicit(&pool->busy, 1, memory_order_acquire));
    pool->task = task;
    pool->arg = arg;
    pool->n = n;
    pool->grain = grain;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    uint32_t state = atomic_load_explicit(&pool->state, memory_order_relaxed);
    atomic_store(&pool->state, STATE_OPEN | ((state + EPOCH_ONE) & STATE_EPOCH));
    signal_workers(pool);
    take_pieces(pool, 0);
    close_region(pool);
    atomic_store_explicit(&pool->busy, 0, memory_order_release);
}
