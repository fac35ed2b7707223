/* The thread that watches the other ranks of a host. */
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "comm/shared_parts.h"

#define BEAT_NS 50000000u
/* A turn that took longer says nothing about others: this process, too, did not run. */
#define TURN_NS (4u * BEAT_NS)

/* ---------------------------------------------------------------- processes */

/* State and start of a process, 'X' when there is none. */
static char process_state(int32_t pid, uint64_t *started)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "re");
    if (!f) return 'X';
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    char *p = strrchr(text, ')'); /* the name may hold anything */
    if (!p || p[1] != ' ') return 'X';
    char state = p[2];
    p += 3;
    for (int field = 4; field <= 22 && p; field++) { /* proc(5): starttime is the 22nd */
        if (field == 22) *started = strtoull(p, NULL, 10);
        p = strchr(p + 1, ' ');
    }
    return state;
}

/* Tells apart containers whose processes do not see one another. */
static uint64_t pid_space(void)
{
    struct stat s;
    return stat("/proc/self/ns/pid", &s) ? 0 : (uint64_t)s.st_ino;
}

void nbi_shared_introduce(nbi_shared_area *own)
{
    own->pid = (int32_t)getpid();
    own->pid_space = pid_space();
    process_state(own->pid, &own->started);
    atomic_store(&own->there, true);
}

/* 'X' when the rank's process is gone, '?' when it cannot be seen from here. */
static char look_at(const nbi_shared *c, uint32_t rank)
{
    const nbi_shared_area *a = c->areas[rank], *own = c->areas[c->base.rank];
    uint64_t started = 0;
    if (!own->pid_space || a->pid_space != own->pid_space) return '?';
    char state = process_state(a->pid, &started);
    if (state == 'Z' || (state != 'X' && started != a->started)) return 'X';
    return state;
}

/* ---------------------------------------------------------------- losing */

void nbi_shared_wake(nbi_shared_area *area)
{
    syscall(SYS_futex, (void *)(uintptr_t)&area->number, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void nbi_shared_call(nbi_shared *c)
{
    if (!c->on_lost || c->called || !atomic_load_explicit(&c->lost, memory_order_acquire)) return;
    c->called = true;
    c->on_lost(c->on_lost_user, &c->why);
}

void nbi_shared_lose(nbi_shared *c, uint32_t rank, const char *why)
{
    pthread_mutex_lock(&c->lock);
    bool first = !atomic_load(&c->lost);
    if (first) {
        nbi_shared_area *own = c->areas[c->base.rank];
        nbi_fail(&c->why, NB_CLOSED, "%s", why);
        atomic_store(&own->lost_rank, rank);
        if (!atomic_load(&own->failed)) {
            memcpy(own->why, c->why.text, sizeof own->why);
            atomic_store(&own->heard, true);
        }
        /* Before anybody here sees it, since that may end the process. */
        if (c->o.tell) c->o.tell(c->o.user, rank, c->why.text);
        atomic_store_explicit(&c->lost, true, memory_order_release);
    }
    pthread_mutex_unlock(&c->lock);
    if (!first) return;
    for (uint32_t r = 0; r < c->base.size; r++) nbi_shared_wake(c->areas[r]);
    pthread_mutex_lock(&c->call_lock);
    nbi_shared_call(c);
    pthread_mutex_unlock(&c->call_lock);
}

/* A stopped process would stay when all others are gone. */
static void lose_silent(nbi_shared *c, uint32_t rank, char state)
{
    char why[160];
    snprintf(why, sizeof why, "rank %u (process %d) %s", nbi_shared_number(c, rank),
             (int)c->areas[rank]->pid,
             state == 'T'   ? "is stopped"
             : state == 'D' ? "waits for a device and does not answer"
                            : "does not answer");
    nbi_shared_lose(c, nbi_shared_number(c, rank), why);
    if (state != '?' && state != 'X') kill(c->areas[rank]->pid, SIGKILL);
}

static void watch_one(nbi_shared *c, uint32_t rank, uint64_t turn_ns)
{
    nbi_shared_area *a = c->areas[rank];
    nbi_peer *peer = &c->peers[rank];
    char why[NB_ERROR_TEXT_MAX];
    const bool left = atomic_load(&a->left); /* one that has failed may leave at once */
    if (!atomic_load(&a->there)) return;
    if (atomic_load(&a->failed) || atomic_load(&a->heard)) {
        char prefix[32] = "";
        if (atomic_load(&a->failed))
            snprintf(prefix, sizeof prefix, "rank %u: ", nbi_shared_number(c, rank));
        snprintf(why, sizeof why, "%s%s", prefix, a->why);
        nbi_shared_lose(c, atomic_load(&a->lost_rank), why);
        return;
    }
    if (left) return;
    char state = look_at(c, rank);
    if (state == 'X' &&
        (atomic_load(&a->left) || atomic_load(&a->failed) || atomic_load(&a->heard)))
        return; /* the next turn reads it */
    if (state == 'X') {
        snprintf(why, sizeof why, "rank %u (process %d) is gone: killed, or ended without a word",
                 nbi_shared_number(c, rank), (int)a->pid);
        nbi_shared_lose(c, nbi_shared_number(c, rank), why);
        return;
    }
    uint32_t pulse = atomic_load(&a->pulse);
    if (pulse != peer->pulse) {
        *peer = (nbi_peer){.pulse = pulse};
    } else {
        peer->silent_ns += turn_ns < TURN_NS ? turn_ns : 0;
    }
    const uint64_t limit_ms = state == 'T' ? NBI_STOPPED_MS : NBI_SILENCE_MS;
    if (peer->silent_ns > limit_ms * 1000000) lose_silent(c, rank, state);
}

uint32_t nbi_shared_behind(const nbi_shared *c)
{
    uint32_t last = 0;
    for (uint32_t r = 1; r < c->base.size; r++) {
        uint32_t number = atomic_load(&c->areas[r]->number);
        if ((int32_t)(number - atomic_load(&c->areas[last]->number)) < 0) last = r;
    }
    return last;
}

/* All live, but within what is expected no call ends: the rank that is behind holds it up. */
static void watch_step(nbi_shared *c, uint64_t turn_ns)
{
    const uint64_t limit = atomic_load(&c->limit_ns);
    const uint32_t last = nbi_shared_behind(c), number = atomic_load(&c->areas[last]->number),
                   seen = atomic_load(&c->expected) + number;
    char why[200];
    if (!limit || seen != c->expected_seen) c->expected_ns = 0;
    c->expected_seen = seen;
    c->expected_ns += turn_ns < TURN_NS ? turn_ns : 0;
    if (!limit || c->expected_ns < limit) return;
    const int32_t pid = c->areas[last]->pid;
    snprintf(why, sizeof why,
             "rank %u (process %d) does not get on: nothing for %.1f s in a step that takes %.3f s",
             nbi_shared_number(c, last), (int)pid, 1e-9 * (double)c->expected_ns,
             1e-9 * (double)atomic_load(&c->usual_ns));
    const char state = last == c->base.rank ? '?' : look_at(c, last);
    nbi_shared_lose(c, nbi_shared_number(c, last), why);
    if (state != 'X' && state != '?') kill(pid, SIGKILL);
}

/* mpiexec or Slurm has gone without ending us. */
static void watch_parent(nbi_shared *c)
{
    if (getppid() != c->parent)
        nbi_shared_lose(c, NBI_RANKS_MAX, "the process that started this rank is gone");
}

static void *watch(void *arg)
{
    nbi_shared *c = arg;
    uint64_t before = nbi_now_ns();
    pthread_mutex_lock(&c->lock);
    while (!c->stopping) {
        struct timespec until = nbi_timespec(nbi_now_ns() + BEAT_NS);
        pthread_cond_timedwait(&c->wake, &c->lock, &until);
        pthread_mutex_unlock(&c->lock);
        uint64_t now = nbi_now_ns();
        atomic_fetch_add(&c->areas[c->base.rank]->pulse, 1);
        bool was_lost = atomic_load(&c->lost);
        for (uint32_t r = 0; r < c->base.size && !was_lost; r++)
            if (r != c->base.rank) watch_one(c, r, now - before);
        if (!was_lost) watch_parent(c);
        if (!was_lost) watch_step(c, now - before);
        if (!was_lost && c->o.beat) c->o.beat(c->o.user, c, now - before);
        before = now;
        pthread_mutex_lock(&c->lock);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

nb_status nbi_shared_watch_start(nbi_shared *c, nb_error *err)
{
    c->parent = (int32_t)getppid();
    nbi_shared_introduce(c->areas[c->base.rank]);
    int rc = pthread_create(&c->thread, NULL, watch, c);
    if (rc) return nbi_fail(err, NB_INTERNAL, "comm: cannot start a thread: %s", strerror(rc));
    pthread_setname_np(c->thread, "ranks");
    c->has_thread = true;
    return NB_OK;
}

void nbi_shared_watch_stop(nbi_shared *c)
{
    pthread_mutex_lock(&c->lock);
    c->stopping = true;
    pthread_cond_broadcast(&c->wake);
    pthread_mutex_unlock(&c->lock);
    if (c->has_thread) pthread_join(c->thread, NULL);
    c->has_thread = false;
}
