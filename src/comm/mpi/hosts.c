/* Collectives of several hosts; hosts.h explains them. */
#include "comm/mpi/hosts.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "comm/mpi/hosts_parts.h"

#define TAG_DATA     1
#define BLOCKS_BYTES ((size_t)8 << 20) /* of all ranks' pieces together */
#define ALIGN        ((size_t)64)
/* Waiting for a link: asking MPI without pause, then between other threads, then rarely. */
#define SPINS    300
#define YIELDS   100
#define NAPS     400
#define NAP_NS   50000
#define SLEEP_NS 500000

/* The head of a block: leaders that are not in the same call find out. */
typedef struct head {
    uint32_t number, kind;
    uint64_t bytes, whole;
} head;

static nbi_hosts *self(nbi_comm *comm)
{
    return (nbi_hosts *)(void *)comm;
}

static size_t block_bytes(const nbi_hosts *h, uint32_t ranks)
{
    return ALIGN + ranks * h->room;
}

/* ---------------------------------------------------------------- between leaders */

static nb_status broken(nbi_hosts *h, int rc, nb_error *err)
{
    char why[80];
    snprintf(why, sizeof why, "rank %u: MPI returns %d between hosts", h->base.rank, rc);
    nbi_shared_lose(h->local, NBI_RANKS_MAX, why);
    return nbi_fail(err, NB_CLOSED, "%s", why);
}

static void rest(const nbi_hosts *h, uint32_t turn)
{
    const uint32_t spins = h->o.local.crowded ? 0 : SPINS;
    if (turn < spins) return;
    if (turn < spins + YIELDS) {
        sched_yield();
        return;
    }
    const struct timespec nap = {.tv_nsec = turn < spins + YIELDS + NAPS ? NAP_NS : SLEEP_NS};
    nanosleep(&nap, NULL);
}

static nb_status wait_for(nbi_hosts *h, MPI_Request *requests, int n, nb_error *err)
{
    for (uint32_t turn = 0;; turn += turn < UINT32_MAX) {
        int done = 0;
        pthread_mutex_lock(&h->lock);
        int rc = h->o.mpi->testall(n, requests, &done, MPI_STATUSES_IGNORE);
        pthread_mutex_unlock(&h->lock);
        if (rc != MPI_SUCCESS) return broken(h, rc, err);
        if (done) return NB_OK;
        NB_TRY(nbi_shared_is_lost(h->local, err));
        rest(h, turn);
    }
}

static nb_status check_head(nbi_hosts *h, uint32_t host, const head *ours, nb_error *err)
{
    head theirs;
    char why[NB_ERROR_TEXT_MAX];
    memcpy(&theirs, h->hosts[host].block, sizeof theirs);
    if (!memcmp(&theirs, ours, sizeof theirs)) return NB_OK;
    snprintf(why, sizeof why,
             "ranks disagree: rank %u is in exchange %u, %s of %llu bytes, rank %u in %u, %s of "
             "%llu bytes",
             h->base.rank, ours->number, nbi_shared_kind_name(ours->kind),
             (unsigned long long)ours->whole, h->hosts[host].leader, theirs.number,
             nbi_shared_kind_name(theirs.kind), (unsigned long long)theirs.whole);
    nbi_shared_lose(h->local, h->hosts[host].leader, why);
    return nbi_fail(err, NB_INTERNAL, "%s", why);
}

/* Leaders: the own host's block to those hosts, theirs to here. `bytes` of each rank, or of the
 * whole block in a broadcast. */
static nb_status exchange(nbi_hosts *h, enum nbi_shared_kind kind, size_t bytes, size_t whole,
                          bool sends, bool receives, nb_error *err)
{
    const nbi_mpi *mpi = h->o.mpi;
    const bool one = kind == NBI_SHARED_BROADCAST;
    const head ours = {.number = atomic_fetch_add(&h->calls, 1) + 1,
                       .kind = (uint32_t)kind,
                       .bytes = bytes,
                       .whole = whole};
    nbi_host *own = &h->hosts[h->own];
    MPI_Request requests[2 * NBI_RANKS_MAX];
    int n = 0, rc = MPI_SUCCESS;
    memcpy(own->block, &ours, sizeof ours);
    pthread_mutex_lock(&h->lock);
    for (uint32_t i = 0; i < h->n_hosts && rc == MPI_SUCCESS; i++) {
        const nbi_host *to = &h->hosts[i];
        if (i == h->own) continue;
        if (receives && (!one || i == 0))
            rc = mpi->irecv(to->block, (int)block_bytes(h, to->n), mpi->byte, (int)to->leader,
                            TAG_DATA, mpi->world, &requests[n++]);
        if (sends && rc == MPI_SUCCESS)
            rc = mpi->isend(own->block, (int)(ALIGN + bytes * (one ? 1 : own->n)), mpi->byte,
                            (int)to->leader, TAG_DATA, mpi->world, &requests[n++]);
    }
    pthread_mutex_unlock(&h->lock);
    if (rc != MPI_SUCCESS) return broken(h, rc, err);
    NB_TRY(wait_for(h, requests, n, err));
    for (uint32_t i = 0; i < h->n_hosts; i++)
        if (i != h->own && receives && (!one || i == 0)) NB_TRY(check_head(h, i, &ours, err));
    return NB_OK;
}

/* Collective. On a leader messages[size] are what all ranks of all hosts have brought. */
static nb_status bring(nbi_hosts *h, enum nbi_shared_kind kind, const void *in, size_t bytes,
                       size_t whole, const char *messages[], nb_error *err)
{
    uint32_t seen[NBI_RANKS_MAX] = {0};
    const char *local[NBI_RANKS_MAX];
    NB_ASSERT(bytes <= h->room);
    NB_TRY(nbi_shared_collect(h->local, kind, in, bytes, whole, local, err));
    if (!h->leads) return NB_OK;
    char *block = h->hosts[h->own].block + ALIGN;
    for (uint32_t r = 0; r < h->base.local_size && bytes; r++)
        memcpy(block + r * bytes, local[r], bytes);
    NB_TRY(exchange(h, kind, bytes, whole, true, true, err));
    for (uint32_t r = 0; r < h->base.size; r++) {
        const uint32_t host = h->host_of[r];
        messages[r] = h->hosts[host].block + ALIGN + seen[host]++ * bytes;
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- collectives */

static nb_status sum(nbi_comm *comm, float *x, size_t n, nb_error *err)
{
    nbi_hosts *h = self(comm);
    const char *messages[NBI_RANKS_MAX];
    const size_t piece = h->room / sizeof *x;
    for (size_t at = 0; at < n; at += piece) {
        const size_t m = n - at < piece ? n - at : piece;
        NB_TRY(bring(h, NBI_SHARED_SUM, x + at, m * sizeof *x, n * sizeof *x, messages, err));
        if (h->leads) nbi_shared_add_up(x + at, messages, comm->size, 0, m);
        NB_TRY(nbi_shared_spread(h->local, x + at, m * sizeof *x, err));
    }
    return NB_OK;
}

static nb_status gather(nbi_comm *comm, void *out, const void *in, size_t bytes, nb_error *err)
{
    nbi_hosts *h = self(comm);
    const char *messages[NBI_RANKS_MAX];
    const size_t piece = NBI_SHARED_PIECE / comm->size & ~(ALIGN - 1);
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t n = bytes - at < piece ? bytes - at : piece;
        NB_TRY(bring(h, NBI_SHARED_GATHER, (const char *)in + at, n, bytes, messages, err));
        for (uint32_t r = 0; r < comm->size && h->leads; r++)
            memcpy(h->all + r * n, messages[r], n);
        NB_TRY(nbi_shared_spread(h->local, h->all, comm->size * n, err));
        for (uint32_t r = 0; r < comm->size; r++)
            memcpy((char *)out + r * bytes + at, h->all + r * n, n);
    }
    return NB_OK;
}

/* Rank 0 leads its host. */
static nb_status broadcast(nbi_comm *comm, void *data, size_t bytes, nb_error *err)
{
    nbi_hosts *h = self(comm);
    for (size_t at = 0; at < bytes; at += h->room) {
        const size_t n = bytes - at < h->room ? bytes - at : h->room;
        if (h->leads) {
            if (h->own == 0) memcpy(h->hosts[0].block + ALIGN, (char *)data + at, n);
            NB_TRY(exchange(h, NBI_SHARED_BROADCAST, n, bytes, h->own == 0, h->own != 0, err));
            if (h->own != 0) memcpy((char *)data + at, h->hosts[0].block + ALIGN, n);
        }
        NB_TRY(nbi_shared_spread(h->local, (char *)data + at, n, err));
    }
    return NB_OK;
}

static nb_status barrier(nbi_comm *comm, nb_error *err)
{
    nbi_hosts *h = self(comm);
    const char *messages[NBI_RANKS_MAX];
    char none = 0;
    NB_TRY(bring(h, NBI_SHARED_BARRIER, NULL, 0, 0, messages, err));
    return nbi_shared_spread(h->local, &none, 1, err);
}

/* ---------------------------------------------------------------- life */

static void fail(nbi_comm *comm, const char *why)
{
    nbi_comm *local = &self(comm)->local->base;
    local->ops->fail(local, why);
}

static nb_status lost(nbi_comm *comm, nb_error *err)
{
    return nbi_shared_is_lost(self(comm)->local, err);
}

static void on_lost(nbi_comm *comm, void (*call)(void *user, const nb_error *why), void *user)
{
    nbi_comm *local = &self(comm)->local->base;
    local->ops->on_lost(local, call, user);
}

static void expect(nbi_comm *comm, uint64_t limit_ns, uint64_t usual_ns)
{
    nbi_hosts *h = self(comm);
    atomic_store_explicit(&h->usual_ns, usual_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->expected, 1, memory_order_relaxed);
    atomic_store_explicit(&h->limit_ns, limit_ns, memory_order_relaxed);
}

/* Rank 0. When it is lost, one beside it, which knows first; when its host is, one of the others.
 */
static bool speaks(const nbi_comm *comm)
{
    const nbi_hosts *h = (const nbi_hosts *)(const void *)comm;
    const uint32_t silent = atomic_load(&h->silent_host);
    uint32_t speaker = 0;
    if (atomic_load(&h->local->areas[comm->local_rank]->lost_rank) == 0) {
        const bool gone = silent == h->host_of[0];
        for (speaker = 1; speaker < comm->size; speaker++)
            if ((h->host_of[speaker] == h->host_of[0]) != gone) break;
        if (speaker == comm->size) speaker = 1;
    }
    return comm->rank == speaker;
}

static void free_hosts(nbi_hosts *h)
{
    nbi_hosts_end_close(h);
    pthread_mutex_destroy(&h->lock);
    nbi_free(h->all);
    nbi_free(h->blocks);
    nbi_free(h->numbers);
    nbi_free(h->host_of);
    nbi_free(h->hosts);
    nbi_free(h);
}

static void close_local(void *user, bool in_order)
{
    nbi_hosts *h = user;
    if (in_order && h->leads) in_order = nbi_hosts_part(h);
    if (h->o.local.close) h->o.local.close(h->o.local.user, in_order);
}

static void close_hosts(nbi_comm *comm)
{
    nbi_hosts *h = self(comm);
    nbi_comm *local = &h->local->base;
    local->ops->close(local);
    free_hosts(h);
}

static const nbi_comm_ops ops = {.name = "hosts",
                                 .close = close_hosts,
                                 .sum = sum,
                                 .gather = gather,
                                 .broadcast = broadcast,
                                 .barrier = barrier,
                                 .fail = fail,
                                 .lost = lost,
                                 .on_lost = on_lost,
                                 .expect = expect,
                                 .speaks = speaks};

/* ---------------------------------------------------------------- opening */

static void find_hosts(nbi_hosts *h)
{
    const nbi_place *places = h->o.places;
    for (uint32_t r = 0; r < h->base.size; r++) {
        const uint32_t leader = (uint32_t)places[r].leader;
        NB_ASSERT(leader <= r);
        if (leader == r) {
            nbi_host *host = &h->hosts[h->n_hosts];
            *host = (nbi_host){.leader = r};
            memcpy(host->name, places[r].host, sizeof host->name);
            host->name[sizeof host->name - 1] = 0;
            h->host_of[r] = h->n_hosts++;
        }
        h->host_of[r] = h->host_of[leader];
        h->hosts[h->host_of[r]].n++;
    }
    h->own = h->host_of[h->base.rank];
    h->leads = h->hosts[h->own].leader == h->base.rank;
    uint32_t n = 0;
    for (uint32_t r = 0; r < h->base.size && n < h->base.local_size; r++)
        if (h->host_of[r] == h->own) h->numbers[n++] = r;
}

/* A leader has a block for every host, the others none. */
static bool take_memory(nbi_hosts *h)
{
    const size_t room = BLOCKS_BYTES / h->base.size & ~(ALIGN - 1);
    h->room = room < NBI_SHARED_PIECE ? room : NBI_SHARED_PIECE;
    h->all = nbi_calloc(1, NBI_SHARED_PIECE);
    if (!h->all || !h->leads) return h->all != NULL;
    size_t bytes = 0, at = 0;
    for (uint32_t i = 0; i < h->n_hosts; i++) bytes += block_bytes(h, h->hosts[i].n);
    h->blocks = nbi_calloc(1, bytes);
    for (uint32_t i = 0; i < h->n_hosts && h->blocks; i++) {
        h->hosts[i].block = h->blocks + at;
        at += block_bytes(h, h->hosts[i].n);
    }
    return h->blocks != NULL;
}

nb_status nbi_comm_open_hosts(nbi_comm **out, const nbi_hosts_options *o, nb_error *err)
{
    nbi_comm *local;
    nbi_hosts *h = nbi_calloc(1, sizeof *h);
    if (!h) return nbi_fail(err, NB_NO_MEMORY, "comm: out of memory");
    pthread_mutex_init(&h->lock, NULL);
    h->o = *o;
    h->end_word = -1;
    h->base = (nbi_comm){.ops = &ops,
                         .rank = o->rank,
                         .size = o->size,
                         .local_rank = o->local.rank,
                         .local_size = o->local.size};
    h->hosts = nbi_calloc(o->size, sizeof *h->hosts);
    h->host_of = nbi_calloc(o->size, sizeof *h->host_of);
    h->numbers = nbi_calloc(o->local.size, sizeof *h->numbers);
    nb_status st = NB_OK;
    h->base.host = (uint32_t)o->places[o->rank].leader;
    if (h->hosts && h->host_of && h->numbers) find_hosts(h);
    if (!h->hosts || !h->host_of || !h->numbers || !take_memory(h))
        st = nbi_fail(err, NB_NO_MEMORY, "comm: out of memory");
    h->o.places = NULL;
    atomic_store(&h->silent_host, h->n_hosts);
    if (st == NB_OK && h->leads) st = nbi_hosts_listen(h, err);
    if (st == NB_OK && h->leads) nbi_hosts_end_prepare(h);
    if (st == NB_OK) {
        nbi_shared_options shared = h->o.local;
        shared.numbers = h->numbers;
        shared.beat = h->leads ? nbi_hosts_beat : NULL;
        shared.tell = h->leads ? nbi_hosts_tell : NULL;
        shared.close = close_local;
        shared.user = h;
        st = nbi_comm_open_shared(&local, &shared, err);
    }
    if (st != NB_OK) {
        free_hosts(h);
        return st;
    }
    h->local = nbi_shared_of(local);
    st = barrier(&h->base, err);
    if (st == NB_OK) {
        *out = &h->base;
        return NB_OK;
    }
    h->o.local.close = NULL;
    close_hosts(&h->base);
    return st;
}
