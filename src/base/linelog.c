/* A ring of bytes between the writers and one thread that owns the file.
 *
 * The lock is held for a copy, never for a system call that can block. The log has two references,
 * the owner's and the thread's: a thread that hangs in a write to a dead disk is left behind and
 * frees what it holds should it ever come back. */
#include "base/linelog.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

#define RING_BYTES  ((size_t)1 << 20)
#define PIECE_BYTES 4096u /* at most this much at a time: what a pipe takes without blocking */
#define POLL_MS     100
#define WARN_NS     60000000000u /* between two warnings */

struct nbi_linelog {
    const char *path, *name;
    pthread_mutex_t lock;
    pthread_cond_t change; /* lines came, the log ends, or the thread has ended */
    char *ring;            /* [RING_BYTES] whole lines with their newlines */
    size_t begin, used;
    bool reopen, closing, ended, busy; /* busy: the thread has lines in hand */
    int refs;
    atomic_uint_fast64_t dropped;

    /* the thread's */
    int fd;
    bool mid_line; /* the file ends in the middle of a line */
    bool torn;     /* and the rest of it is lost */
    bool skip;     /* the ring begins in the middle of a lost line */
    uint64_t warned_ns;
};

static int open_path(const char *path)
{
    if (!strcmp(path, "-")) return fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0);
    return open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0640);
}

static void unref(nbi_linelog *log) /* called with the lock held */
{
    bool last = --log->refs == 0;
    pthread_mutex_unlock(&log->lock);
    if (!last) return;
    if (log->fd >= 0) close(log->fd);
    pthread_mutex_destroy(&log->lock);
    pthread_cond_destroy(&log->change);
    nbi_free(log->ring);
    nbi_free(log);
}

/* ---------------------------------------------------------------- the thread */

static void warn(nbi_linelog *log, const char *what, int why)
{
    uint64_t now = nbi_now_ns();
    if (log->warned_ns && now - log->warned_ns < WARN_NS) return;
    log->warned_ns = now;
    nbi_log(NB_LOG_WARN, "%s %s: %s: %s; %llu lines lost so far", log->name, log->path, what,
            strerror(why), (unsigned long long)atomic_load(&log->dropped));
}

static void do_reopen(nbi_linelog *log)
{
    int fd = open_path(log->path);
    if (fd < 0) {
        warn(log, "cannot be opened anew", errno);
        return;
    }
    close(log->fd);
    log->fd = fd;
    log->torn = log->mid_line = false;
}

static size_t count_lines(const char *s, size_t n)
{
    size_t lines = 0;
    for (size_t i = 0; i < n; i++) lines += s[i] == '\n';
    return lines;
}

static bool is_closing(nbi_linelog *log)
{
    pthread_mutex_lock(&log->lock);
    bool closing = log->closing;
    pthread_mutex_unlock(&log->lock);
    return closing;
}

/* Waits until the file takes bytes. False when it does not and the log ends. */
static bool wait_writable(nbi_linelog *log)
{
    struct pollfd p = {.fd = log->fd, .events = POLLOUT};
    while (poll(&p, 1, POLL_MS) <= 0) {
        if (is_closing(log)) return false;
    }
    return true;
}

/* What is left of a piece is lost, and with it the rest of its last line, which is still to come.
 */
static void drop(nbi_linelog *log, const char *s, size_t n)
{
    atomic_fetch_add(&log->dropped, count_lines(s, n));
    log->torn = log->torn || log->mid_line;
    log->skip = s[n - 1] != '\n';
}

/* Writes a piece (n > 0); what cannot be written is dropped. */
static void put(nbi_linelog *log, const char *s, size_t n)
{
    size_t done = 0;
    if (log->skip) {
        const char *end = memchr(s, '\n', n);
        done = end ? (size_t)(end - s) + 1 : n;
        atomic_fetch_add(&log->dropped, end != NULL);
        log->skip = !end;
    }
    if (log->torn && wait_writable(log) && write(log->fd, "\n", 1) == 1) log->torn = false;
    while (done < n) {
        if (!wait_writable(log)) break;
        ssize_t wrote = write(log->fd, s + done, n - done);
        if (wrote > 0) {
            done += (size_t)wrote;
            log->mid_line = s[done - 1] != '\n';
        } else if (wrote < 0 && errno != EINTR && errno != EAGAIN) {
            int why = errno;
            drop(log, s + done, n - done);
            warn(log, "a line cannot be written", why);
            return;
        }
    }
    if (done < n) drop(log, s + done, n - done);
}

/* Takes up to a piece out of the ring. Called with the lock held. */
static size_t take(nbi_linelog *log, char *piece)
{
    size_t n = log->used < PIECE_BYTES ? log->used : PIECE_BYTES;
    size_t first = RING_BYTES - log->begin < n ? RING_BYTES - log->begin : n;
    memcpy(piece, log->ring + log->begin, first);
    memcpy(piece + first, log->ring, n - first);
    log->begin = (log->begin + n) % RING_BYTES;
    log->used -= n;
    return n;
}

static void *run(void *arg)
{
    nbi_linelog *log = arg;
    char piece[PIECE_BYTES];
    pthread_mutex_lock(&log->lock);
    for (;;) {
        while (!log->used && !log->closing && !log->reopen) {
            pthread_cond_wait(&log->change, &log->lock);
        }
        if (!log->used && log->closing) break;
        bool reopen = log->reopen;
        log->reopen = false;
        size_t n = take(log, piece);
        log->busy = true;
        pthread_mutex_unlock(&log->lock);
        if (n) put(log, piece, n);
        bool whole = !log->mid_line || log->torn; /* else the rest of the line is in the ring */
        if (reopen && whole) do_reopen(log);
        pthread_mutex_lock(&log->lock);
        if (reopen && !whole) log->reopen = true;
        log->busy = false;
        if (!log->used) pthread_cond_broadcast(&log->change);
    }
    log->ended = true;
    pthread_cond_broadcast(&log->change);
    unref(log);
    return NULL;
}

/* ---------------------------------------------------------------- the owner */

static nb_status start(nbi_linelog *log, nb_error *err)
{
    pthread_condattr_t attr;
    pthread_attr_t detached;
    pthread_t thread;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&log->lock, NULL);
    pthread_cond_init(&log->change, &attr);
    pthread_condattr_destroy(&attr);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    log->refs = 2;
    int failed = pthread_create(&thread, &detached, run, log);
    pthread_attr_destroy(&detached);
    if (!failed) return NB_OK;
    pthread_mutex_destroy(&log->lock);
    pthread_cond_destroy(&log->change);
    return nbi_fail(err, NB_IO, "%s: cannot start a thread: %s", log->name, strerror(failed));
}

nb_status nbi_linelog_open(nbi_linelog **out, const char *path, const char *name, nb_error *err)
{
    nb_status status = NB_OK;
    nbi_linelog *log = nbi_calloc(1, sizeof *log);
    if (log) log->ring = nbi_malloc(RING_BYTES);
    if (!log || !log->ring) {
        nbi_free(log);
        return nbi_fail(err, NB_NO_MEMORY, "%s: no memory for its buffer", name);
    }
    log->path = path;
    log->name = name;
    log->fd = open_path(path);
    atomic_init(&log->dropped, 0);
    if (log->fd < 0) {
        status = nbi_fail(err, NB_IO, "%s %s: %s", name, path, strerror(errno));
    } else {
        status = start(log, err);
    }
    if (status != NB_OK) {
        if (log->fd >= 0) close(log->fd);
        nbi_free(log->ring);
        nbi_free(log);
        return status;
    }
    *out = log;
    return NB_OK;
}

static void ring_put(nbi_linelog *log, const char *s, size_t n)
{
    size_t at = (log->begin + log->used) % RING_BYTES;
    size_t first = RING_BYTES - at < n ? RING_BYTES - at : n;
    memcpy(log->ring + at, s, first);
    memcpy(log->ring, s + first, n - first);
    log->used += n;
}

void nbi_linelog_write(nbi_linelog *log, const char *line, size_t n)
{
    pthread_mutex_lock(&log->lock);
    bool fits = n < RING_BYTES && log->used + n + 1 <= RING_BYTES;
    if (fits) {
        ring_put(log, line, n);
        ring_put(log, "\n", 1);
        pthread_cond_broadcast(&log->change);
    }
    pthread_mutex_unlock(&log->lock);
    if (!fits) atomic_fetch_add(&log->dropped, 1);
}

void nbi_linelog_reopen(nbi_linelog *log)
{
    pthread_mutex_lock(&log->lock);
    log->reopen = true;
    pthread_cond_broadcast(&log->change);
    pthread_mutex_unlock(&log->lock);
}

uint64_t nbi_linelog_dropped(const nbi_linelog *log)
{
    return log ? atomic_load(&log->dropped) : 0;
}

static struct timespec in_a_second(void)
{
    return nbi_timespec(nbi_now_ns() + 1000000000u);
}

void nbi_linelog_flush(nbi_linelog *log)
{
    struct timespec until = in_a_second();
    int timed_out = 0;
    if (!log) return;
    pthread_mutex_lock(&log->lock);
    while ((log->used || log->busy) && !timed_out) {
        timed_out = pthread_cond_timedwait(&log->change, &log->lock, &until);
    }
    pthread_mutex_unlock(&log->lock);
}

void nbi_linelog_close(nbi_linelog **out)
{
    nbi_linelog *log = *out;
    struct timespec until = in_a_second();
    int timed_out = 0;
    if (!log) return;
    pthread_mutex_lock(&log->lock);
    log->closing = true;
    pthread_cond_broadcast(&log->change);
    while (!log->ended && !timed_out) {
        timed_out = pthread_cond_timedwait(&log->change, &log->lock, &until);
    }
    unref(log);
    *out = NULL;
}
