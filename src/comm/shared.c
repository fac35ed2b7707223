/* Collectives over shared memory; shared.h explains them. */
#include "comm/shared.h"

#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "comm/shared_parts.h"

#define SPINS        4000 /* some 50 us: longer than ranks that do the same work differ */
#define YIELDS       20
#define SLEEP_NS     500000000           /* whoever has something to tell wakes us */
#define TWO_PASSES   ((size_t)128 << 10) /* bytes of all ranks' messages, see sum() */
#define TAG_KIND_BIT 56

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* ---------------------------------------------------------------- one operation */

static bool has_come(nbi_shared_area *a, uint32_t number)
{
    return (int32_t)(atomic_load_explicit(&a->number, memory_order_acquire) - number) >= 0;
}

nb_status nbi_shared_is_lost(const nbi_shared *c, nb_error *err)
{
    if (!atomic_load_explicit(&c->lost, memory_order_acquire)) return NB_OK;
    return nbi_fail(err, NB_CLOSED, "%s", c->why.text);
}

static nb_status sleep_for(nbi_shared *c, uint32_t peer, uint32_t number, nb_error *err)
{
    const struct timespec limit = {.tv_nsec = SLEEP_NS};
    nbi_shared_area *a = c->areas[peer];
    nb_status st = NB_OK;
    atomic_fetch_add(&a->sleepers, 1);
    while (st == NB_OK) {
        uint32_t seen = atomic_load(&a->number);
        if ((int32_t)(seen - number) >= 0) break;
        /* one that has failed leaves a sentence for the watch to read */
        if (atomic_load(&a->left) && !atomic_load(&a->failed) && !atomic_load(&a->heard)) {
            char why[80];
            const uint32_t named = nbi_shared_number(c, peer);
            snprintf(why, sizeof why, "rank %u has ended while others go on", named);
            if (!has_come(a, number)) nbi_shared_lose(c, named, why);
        }
        st = nbi_shared_is_lost(c, err);
        if (st == NB_OK)
            syscall(SYS_futex, (void *)(uintptr_t)&a->number, FUTEX_WAIT, seen, &limit, NULL, 0);
    }
    atomic_fetch_sub(&a->sleepers, 1);
    return st;
}

static nb_status wait_for(nbi_shared *c, uint32_t peer, uint32_t number, nb_error *err)
{
    nbi_shared_area *a = c->areas[peer];
    if (has_come(a, number)) return NB_OK;
    for (int i = 0; i < SPINS && !c->o.crowded; i++) {
        relax();
        if (has_come(a, number)) return NB_OK;
    }
    for (int i = 0; i < YIELDS; i++) {
        sched_yield();
        if (has_come(a, number)) return NB_OK;
    }
    return sleep_for(c, peer, number, err);
}

/* Begins the next operation: where the own message goes. */
static nb_status begin(nbi_shared *c, char **message, nb_error *err)
{
    NB_TRY(nbi_shared_is_lost(c, err));
    c->number++;
    for (uint32_t r = 0; r < c->base.size; r++) NB_TRY(wait_for(c, r, c->number - 1, err));
    *message = c->areas[c->base.rank]->message[c->number & 1];
    return NB_OK;
}

/* The own message is written. */
static void publish(nbi_shared *c, enum nbi_shared_kind kind, size_t bytes)
{
    nbi_shared_area *own = c->areas[c->base.rank];
    own->tags[c->number & 1] = (uint64_t)kind << TAG_KIND_BIT | bytes;
    atomic_store(&own->number, c->number);
    if (atomic_load(&own->sleepers)) nbi_shared_wake(own);
}

const char *nbi_shared_kind_name(uint32_t kind)
{
    static const char *const names[] = {"?", "barrier", "sum", "sum", "gather", "broadcast"};
    return kind < sizeof names / sizeof *names ? names[kind] : "?";
}

/* The message of a rank, which must be of the same call as ours. */
static nb_status take(nbi_shared *c, uint32_t peer, const char **message, nb_error *err)
{
    const uint64_t mask = ((uint64_t)1 << TAG_KIND_BIT) - 1;
    NB_TRY(wait_for(c, peer, c->number, err));
    uint64_t theirs = c->areas[peer]->tags[c->number & 1];
    uint64_t ours = c->areas[c->base.rank]->tags[c->number & 1];
    *message = c->areas[peer]->message[c->number & 1];
    if (theirs == ours) return NB_OK;
    char why[NB_ERROR_TEXT_MAX];
    snprintf(why, sizeof why,
             "ranks disagree: rank %u asks for %s of %llu bytes, rank %u for %s of %llu",
             nbi_shared_number(c, c->base.rank),
             nbi_shared_kind_name((uint32_t)(ours >> TAG_KIND_BIT)),
             (unsigned long long)(ours & mask), nbi_shared_number(c, peer),
             nbi_shared_kind_name((uint32_t)(theirs >> TAG_KIND_BIT)),
             (unsigned long long)(theirs & mask));
    nbi_shared_lose(c, nbi_shared_number(c, peer), why);
    return nbi_fail(err, NB_INTERNAL, "%s", why);
}

static nb_status take_all(nbi_shared *c, uint32_t size, const char *messages[], nb_error *err)
{
    for (uint32_t r = 0; r < size; r++) NB_TRY(take(c, r, &messages[r], err));
    return NB_OK;
}

/* ---------------------------------------------------------------- collectives */

static nb_status barrier(nbi_comm *comm, nb_error *err)
{
    nbi_shared *c = nbi_shared_of(comm);
    char *own;
    const char *message;
    NB_TRY(begin(c, &own, err));
    publish(c, NBI_SHARED_BARRIER, 0);
    for (uint32_t r = 0; r < comm->size; r++) NB_TRY(take(c, r, &message, err));
    return NB_OK;
}

nb_status nbi_shared_spread(nbi_shared *c, void *data, size_t bytes, nb_error *err)
{
    const uint32_t rank = c->base.rank;
    for (size_t at = 0; at < bytes; at += NBI_SHARED_PIECE) {
        size_t n = bytes - at < NBI_SHARED_PIECE ? bytes - at : NBI_SHARED_PIECE;
        char *own;
        const char *message;
        NB_TRY(begin(c, &own, err));
        if (rank == 0) memcpy(own, (char *)data + at, n);
        publish(c, NBI_SHARED_BROADCAST, bytes);
        if (rank == 0) continue;
        NB_TRY(take(c, 0, &message, err));
        memcpy((char *)data + at, message, n);
    }
    return NB_OK;
}

static nb_status broadcast(nbi_comm *comm, void *data, size_t bytes, nb_error *err)
{
    return nbi_shared_spread(nbi_shared_of(comm), data, bytes, err);
}

nb_status nbi_shared_collect(nbi_shared *c, enum nbi_shared_kind kind, const void *in, size_t bytes,
                             size_t whole, const char *messages[], nb_error *err)
{
    char *own;
    NB_ASSERT(bytes <= NBI_SHARED_PIECE);
    NB_TRY(begin(c, &own, err));
    if (bytes) memcpy(own, in, bytes);
    publish(c, kind, whole);
    return c->base.rank ? NB_OK : take_all(c, c->base.size, messages, err);
}

static nb_status gather(nbi_comm *comm, void *out, const void *in, size_t bytes, nb_error *err)
{
    nbi_shared *c = nbi_shared_of(comm);
    for (size_t at = 0; at < bytes; at += NBI_SHARED_PIECE) {
        size_t n = bytes - at < NBI_SHARED_PIECE ? bytes - at : NBI_SHARED_PIECE;
        char *own;
        const char *message;
        NB_TRY(begin(c, &own, err));
        memcpy(own, (const char *)in + at, n);
        publish(c, NBI_SHARED_GATHER, bytes);
        for (uint32_t r = 0; r < comm->size; r++) {
            NB_TRY(take(c, r, &message, err));
            memcpy((char *)out + r * bytes + at, message, n);
        }
    }
    return NB_OK;
}

void nbi_shared_add_up(float *out, const char *const messages[], uint32_t size, size_t from,
                       size_t to)
{
    const float *first = (const float *)(const void *)messages[0];
    for (size_t i = from; i < to; i++) out[i] = first[i];
    for (uint32_t r = 1; r < size; r++) {
        const float *next = (const float *)(const void *)messages[r];
        for (size_t i = from; i < to; i++) out[i] += next[i];
    }
}

static size_t share_begin(size_t n, uint32_t rank, uint32_t size)
{
    return n * rank / size;
}

/* Long messages: every rank adds up its share, the others fetch it. */
static nb_status sum_shares(nbi_shared *c, uint32_t size, float *x, size_t n,
                            const char *messages[], nb_error *err)
{
    const uint32_t rank = c->base.rank;
    const size_t from = share_begin(n, rank, size), to = share_begin(n, rank + 1, size);
    char *own;
    nbi_shared_add_up(x, messages, size, from, to);
    NB_TRY(begin(c, &own, err));
    memcpy(own + from * sizeof *x, x + from, (to - from) * sizeof *x);
    publish(c, NBI_SHARED_SHARES, n * sizeof *x);
    NB_TRY(take_all(c, size, messages, err));
    for (uint32_t r = 0; r < size; r++) {
        size_t a = share_begin(n, r, size), b = share_begin(n, r + 1, size);
        if (r != rank) memcpy(x + a, messages[r] + a * sizeof *x, (b - a) * sizeof *x);
    }
    return NB_OK;
}

static nb_status sum(nbi_comm *comm, float *x, size_t n, nb_error *err)
{
    nbi_shared *c = nbi_shared_of(comm);
    const char *messages[NBI_RANKS_MAX];
    const size_t piece = NBI_SHARED_PIECE / sizeof *x;
    const uint32_t size = comm->size;
    NB_ASSERT(size > 0);
    for (size_t at = 0; at < n; at += piece) {
        size_t m = n - at < piece ? n - at : piece;
        char *own;
        NB_TRY(begin(c, &own, err));
        memcpy(own, x + at, m * sizeof *x);
        publish(c, NBI_SHARED_SUM, n * sizeof *x);
        NB_TRY(take_all(c, size, messages, err));
        if (m * sizeof *x * size <= TWO_PASSES) {
            nbi_shared_add_up(x + at, messages, size, 0, m);
        } else {
            NB_TRY(sum_shares(c, size, x + at, m, messages, err));
        }
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- life */

static void fail(nbi_comm *comm, const char *why)
{
    nbi_shared *c = nbi_shared_of(comm);
    nbi_shared_area *own = c->areas[comm->rank];
    if (atomic_load(&c->lost) || atomic_load(&own->failed)) return;
    snprintf(own->why, sizeof own->why, "%s", why);
    atomic_store(&own->failed, true);
    nbi_shared_lose(c, nbi_shared_number(c, comm->rank), why);
}

static nb_status lost(nbi_comm *comm, nb_error *err)
{
    return nbi_shared_is_lost(nbi_shared_of(comm), err);
}

static void on_lost(nbi_comm *comm, void (*call)(void *user, const nb_error *why), void *user)
{
    nbi_shared *c = nbi_shared_of(comm);
    pthread_mutex_lock(&c->call_lock);
    c->on_lost = call;
    c->on_lost_user = user;
    nbi_shared_call(c);
    pthread_mutex_unlock(&c->call_lock);
}

static void expect(nbi_comm *comm, uint64_t limit_ns, uint64_t usual_ns)
{
    nbi_shared *c = nbi_shared_of(comm);
    atomic_store_explicit(&c->usual_ns, usual_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&c->expected, 1, memory_order_relaxed);
    atomic_store_explicit(&c->limit_ns, limit_ns, memory_order_relaxed);
}

/* Rank 0, unless it is the one that is lost. */
static bool speaks(const nbi_comm *comm)
{
    const nbi_shared *c = (const nbi_shared *)(const void *)comm;
    return comm->rank == (atomic_load(&c->areas[comm->rank]->lost_rank) == 0 ? 1 : 0);
}

static void close_shared(nbi_comm *comm)
{
    nbi_shared *c = nbi_shared_of(comm);
    const bool in_order = !atomic_load(&c->lost);
    nbi_shared_watch_stop(c);
    atomic_store(&c->areas[comm->rank]->left, true);
    nbi_shared_wake(c->areas[comm->rank]);
    if (c->o.close) c->o.close(c->o.user, in_order);
    pthread_mutex_destroy(&c->lock);
    pthread_mutex_destroy(&c->call_lock);
    pthread_cond_destroy(&c->wake);
    nbi_free(c->peers);
    nbi_free(c->areas);
    nbi_free(c);
}

static const nbi_comm_ops ops = {.name = "shared memory",
                                 .close = close_shared,
                                 .sum = sum,
                                 .gather = gather,
                                 .broadcast = broadcast,
                                 .barrier = barrier,
                                 .fail = fail,
                                 .lost = lost,
                                 .on_lost = on_lost,
                                 .expect = expect,
                                 .speaks = speaks};

size_t nbi_shared_area_bytes(void)
{
    return sizeof(nbi_shared_area);
}

nb_status nbi_comm_open_shared(nbi_comm **out, const nbi_shared_options *o, nb_error *err)
{
    NB_ASSERT(o->rank < o->size && o->size <= NBI_RANKS_MAX);
    nbi_shared *c = nbi_calloc(1, sizeof *c);
    if (c) c->areas = nbi_calloc(o->size, sizeof *c->areas);
    if (c) c->peers = nbi_calloc(o->size, sizeof *c->peers);
    if (!c || !c->areas || !c->peers) {
        if (c) nbi_free(c->areas);
        nbi_free(c);
        return nbi_fail(err, NB_NO_MEMORY, "comm: out of memory");
    }
    c->base = (nbi_comm){.ops = &ops,
                         .rank = o->rank,
                         .size = o->size,
                         .local_rank = o->rank,
                         .local_size = o->size};
    c->o = *o;
    for (uint32_t r = 0; r < o->size; r++) c->areas[r] = o->areas[r];
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->call_lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->wake, &attr);
    pthread_condattr_destroy(&attr);
    nbi_comm *comm = &c->base;
    atomic_store(&c->areas[o->rank]->lost_rank, NBI_RANKS_MAX);
    nb_status st = nbi_shared_watch_start(c, err);
    if (st == NB_OK && o->size > 1) st = barrier(comm, err);
    if (st != NB_OK) {
        c->o.close = NULL;
        close_shared(comm);
        return st;
    }
    *out = comm;
    return NB_OK;
}
