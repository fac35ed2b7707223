/* The thread of st_ahead.h. One lock for what both sides know; reading is outside of it. */
#include "format/st_ahead.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/clock.h"

#define PROBE_BYTES ((uint64_t)128 << 10) /* one byte in so many is asked for */

typedef struct range {
    uint32_t file;
    uint64_t at, bytes;
} range;

struct nbi_st_ahead {
    const nbi_checkpoint *checkpoint;
    void (*piece)(void *user, uint32_t file, uint64_t at, uint64_t bytes);
    void *user;
    uint32_t n_units;
    range *ranges;   /* by unit, then file and offset */
    size_t *first;   /* [n_units + 1] */
    uint8_t *buffer; /* NBI_ST_PIECE */
    int fd;          /* of `file` */
    uint32_t file;
    pthread_t thread;
    bool started;
    pthread_mutex_t lock;
    pthread_cond_t change;
    /* under lock */
    uint32_t wanted, done; /* units */
    bool ending;
    nb_status status;
    nb_error error;
    nbi_st_ahead_sum sum;
};

/* ---- which bytes */

static nb_status find_ranges(nbi_st_ahead *a, const nbi_st_ahead_plan *plan, nb_error *err)
{
    const size_t n = nbi_checkpoint_count(a->checkpoint);
    uint32_t *unit = nbi_malloc((n + 1) * sizeof *unit);
    a->first = nbi_calloc((size_t)a->n_units + 1, sizeof *a->first);
    a->ranges = nbi_malloc((n + 1) * sizeof *a->ranges);
    if (!unit || !a->first || !a->ranges) {
        nbi_free(unit);
        return nbi_fail(err, NB_NO_MEMORY, "loading: out of memory for %zu ranges", n);
    }
    size_t at = 0;
    for (size_t i = 0; i < n; i++)
        unit[i] = plan->unit_of(plan->user, nbi_checkpoint_at(a->checkpoint, i));
    for (uint32_t u = 0; u < a->n_units; u++) {
        a->first[u] = at;
        for (size_t i = 0; i < n; i++) { /* by file, then offset */
            const nbi_st_tensor *t = nbi_checkpoint_at(a->checkpoint, i);
            if (unit[i] != u || !t->bytes) continue;
            const uint64_t begin = nbi_checkpoint_offset(a->checkpoint, t);
            range *last = at > a->first[u] ? &a->ranges[at - 1] : NULL;
            if (last && last->file == t->file && begin - last->at - last->bytes <= NBI_ST_GAP)
                last->bytes = begin + t->bytes - last->at;
            else
                a->ranges[at++] = (range){t->file, begin, t->bytes};
        }
    }
    a->first[a->n_units] = at;
    nbi_free(unit);
    return NB_OK;
}

/* ---- reading */

static nb_status open_file(nbi_st_ahead *a, uint32_t file, nb_error *err)
{
    if (a->fd >= 0 && a->file == file) return NB_OK;
    if (a->fd >= 0) close(a->fd);
    const char *dir = nbi_checkpoint_dir(a->checkpoint);
    char *path = nbi_path_join(dir, nbi_checkpoint_file(a->checkpoint, file));
    if (!path) return nbi_fail(err, NB_NO_MEMORY, "out of memory for a path");
    a->fd = open(path, O_RDONLY | O_CLOEXEC);
    a->file = file;
    nb_status st = NB_OK;
    if (a->fd < 0) st = nbi_fail(err, NB_IO, "%s: cannot open: %s", path, strerror(errno));
    nbi_free(path);
    /* advice: a refusal costs speed only */
    if (a->fd >= 0) (void)posix_fadvise(a->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    return st;
}

/* In the page cache, as far as a byte in 128 KiB says. A system that cannot tell says no. */
static bool is_cached(const nbi_st_ahead *a, uint64_t at, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += PROBE_BYTES) {
        struct iovec one = {a->buffer, 1};
        if (preadv2(a->fd, &one, 1, (off_t)(at + i), RWF_NOWAIT) != 1) return false;
    }
    return true;
}

static nb_status read_piece(nbi_st_ahead *a, uint64_t at, uint64_t bytes, nb_error *err)
{
    for (uint64_t done = 0; done < bytes;) {
        const ssize_t n = pread(a->fd, a->buffer, bytes - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return nbi_fail(err, NB_IO, "%s/%s: cannot read at byte %llu: %s",
                            nbi_checkpoint_dir(a->checkpoint),
                            nbi_checkpoint_file(a->checkpoint, a->file),
                            (unsigned long long)(at + done),
                            n < 0 ? strerror(errno) : "the file has become shorter");
        done += (uint64_t)n;
    }
    return NB_OK;
}

static bool is_ending(nbi_st_ahead *a)
{
    pthread_mutex_lock(&a->lock);
    const bool ending = a->ending;
    pthread_mutex_unlock(&a->lock);
    return ending;
}

static nb_status read_unit(nbi_st_ahead *a, uint32_t unit, nbi_st_ahead_sum *sum, nb_error *err)
{
    for (size_t r = a->first[unit]; r < a->first[unit + 1]; r++) {
        const range it = a->ranges[r];
        NB_TRY(open_file(a, it.file, err));
        for (uint64_t i = 0; i < it.bytes && !is_ending(a); i += NBI_ST_PIECE) {
            const uint64_t left = it.bytes - i, n = left < NBI_ST_PIECE ? left : NBI_ST_PIECE;
            if (a->piece) a->piece(a->user, it.file, it.at + i, n);
            sum->bytes += n;
            if (is_cached(a, it.at + i, n)) continue;
            const uint64_t begin = nbi_now_ns();
            NB_TRY(read_piece(a, it.at + i, n, err));
            sum->seconds += (double)(nbi_now_ns() - begin) * 1e-9;
            sum->read_bytes += n;
        }
    }
    return NB_OK;
}

static void *run(void *arg)
{
    nbi_st_ahead *a = arg;
    nbi_st_ahead_sum sum = {0};
    nb_error err = {0};
    pthread_mutex_lock(&a->lock);
    while (a->status == NB_OK && a->done < a->n_units) {
        while (!a->ending && a->done >= a->wanted) pthread_cond_wait(&a->change, &a->lock);
        if (a->ending) break;
        const uint32_t unit = a->done;
        pthread_mutex_unlock(&a->lock);
        const nb_status st = read_unit(a, unit, &sum, &err);
        pthread_mutex_lock(&a->lock);
        a->status = st;
        a->error = err;
        a->sum = sum;
        if (st == NB_OK) a->done++;
        pthread_cond_broadcast(&a->change);
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

/* ---- the other side */

nb_status nbi_st_ahead_start(nbi_st_ahead **out, const nbi_checkpoint *checkpoint,
                             const nbi_st_ahead_plan *plan, nb_error *err)
{
    nbi_st_ahead *a = nbi_calloc(1, sizeof *a);
    if (!a) return nbi_fail(err, NB_NO_MEMORY, "loading: out of memory");
    a->checkpoint = checkpoint;
    a->piece = plan->piece;
    a->user = plan->user;
    a->n_units = plan->n_units;
    a->fd = -1;
    a->wanted = 1;
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->change, NULL);
    nb_status st = find_ranges(a, plan, err);
    if (st == NB_OK && !(a->buffer = nbi_malloc(NBI_ST_PIECE)))
        st = nbi_fail(err, NB_NO_MEMORY, "loading: out of memory to read with");
    if (st == NB_OK) {
        const int rc = pthread_create(&a->thread, NULL, run, a);
        a->started = rc == 0;
        if (rc) st = nbi_fail(err, NB_NO_MEMORY, "loading: no thread to read: %s", strerror(rc));
    }
    if (st != NB_OK)
        nbi_st_ahead_stop(&a, NULL);
    else
        *out = a;
    return st;
}

nb_status nbi_st_ahead_need(nbi_st_ahead *a, uint32_t unit, nb_error *err)
{
    NB_ASSERT(unit < a->n_units);
    pthread_mutex_lock(&a->lock);
    if (a->wanted < unit + 2) a->wanted = unit + 2;
    pthread_cond_broadcast(&a->change);
    while (a->status == NB_OK && a->done <= unit) pthread_cond_wait(&a->change, &a->lock);
    const nb_status st = a->done > unit ? NB_OK : a->status;
    if (st != NB_OK) *err = a->error;
    pthread_mutex_unlock(&a->lock);
    return st;
}

void nbi_st_ahead_stop(nbi_st_ahead **ahead, nbi_st_ahead_sum *sum)
{
    nbi_st_ahead *a = *ahead;
    if (!a) return;
    if (a->started) {
        pthread_mutex_lock(&a->lock);
        a->ending = true;
        pthread_cond_broadcast(&a->change);
        pthread_mutex_unlock(&a->lock);
        pthread_join(a->thread, NULL);
    }
    if (sum) *sum = a->sum;
    if (a->fd >= 0) close(a->fd);
    pthread_cond_destroy(&a->change);
    pthread_mutex_destroy(&a->lock);
    nbi_free(a->buffer);
    nbi_free(a->ranges);
    nbi_free(a->first);
    nbi_free(a);
    *ahead = NULL;
}
