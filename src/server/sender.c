/* The sender thread (sender.h). Called by exchange.c, server.c and the engine's thread. */
#include "server/sender.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#define FRAME_ROOM 18u /* before a chunk: its size in hexadecimal and a line end */
#define INLINE_MAX 2u  /* so many exchanges cost less than waking the thread */

struct nbi_sender {
    nbi_server *server;
    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t work;
    nbi_exchange **queue; /* [capacity], n_queued in use */
    uint32_t n_queued, n_direct;
    uint64_t round; /* how often the queue was taken; it is what is queued in this one */
    bool sleeping;
    atomic_bool stopping;
    pthread_mutex_t turn; /* held while exchanges are worked on; before every other lock */
    nbi_exchange **taken; /* [capacity] of who has the turn */
    uint32_t capacity;
};

/* ---------------------------------------------------------------- queue */

bool nbi_sender_take(nbi_exchange *ex)
{
    nbi_sender *s = ex->server->sender;
    if (!s || !s->started || atomic_load(&s->stopping) || !ex->watched) return false;
    if (ex->job->params.stream && !ex->plain_chunks) return false;
    pthread_mutex_lock(&s->lock);
    bool fits = s->n_direct < s->capacity;
    s->n_direct += fits;
    pthread_mutex_unlock(&s->lock);
    return fits;
}

void nbi_sender_push(nbi_exchange *ex)
{
    nbi_sender *s = ex->server->sender;
    pthread_mutex_lock(&s->lock);
    if (ex->queued_round != s->round) {
        NB_ASSERT(s->n_queued < s->capacity);
        ex->queued_round = s->round;
        ex->queued_at = s->n_queued;
        s->queue[s->n_queued++] = ex;
    }
    pthread_mutex_unlock(&s->lock);
}

/* Called with the sender's lock held. */
static void unlink_queued(nbi_sender *s, nbi_exchange *ex)
{
    if (ex->queued_round != s->round) return;
    nbi_exchange *last = s->queue[--s->n_queued];
    s->queue[ex->queued_at] = last;
    last->queued_at = ex->queued_at;
    ex->queued_round = 0;
}

void nbi_sender_kick(nbi_server *server)
{
    nbi_sender *s = server->sender;
    pthread_mutex_lock(&s->lock);
    bool wake = s->sleeping && s->n_queued;
    if (wake) s->sleeping = false;
    pthread_mutex_unlock(&s->lock);
    if (wake) pthread_cond_signal(&s->work);
}

/* ---------------------------------------------------------------- one exchange */

/* Resumes the connection; the exchange may be gone when this returns. */
static void give_back(nbi_sender *s, nbi_exchange *ex)
{
    if (ex->out_done < ex->out.len) {
        nbi_peers_step(&ex->server->peers, ex->conn, NBI_PEER_REPLY, ex->out.len - ex->out_done);
    }
    pthread_mutex_lock(&ex->lock);
    pthread_mutex_lock(&s->lock);
    unlink_queued(s, ex);
    s->n_direct--;
    pthread_mutex_unlock(&s->lock);
    ex->direct = ex->suspended = false;
    MHD_resume_connection(ex->conn);
    pthread_mutex_unlock(&ex->lock);
}

static bool begin_chunk(nbi_exchange *ex)
{
    static const char room[FRAME_ROOM] = {0};
    nbi_buf_clear(&ex->out);
    ex->out_done = 0;
    if (nbi_buf_add(&ex->out, room, sizeof room) != NB_OK) return false;
    ex->out_done = sizeof room;
    return true;
}

/* Puts size and line ends around what begin_chunk() left room for. */
static bool end_chunk(nbi_exchange *ex)
{
    size_t size = ex->out.len - FRAME_ROOM, at = FRAME_ROOM - 2;
    if (nbi_buf_add(&ex->out, "\r\n", 2) != NB_OK) return false;
    memcpy(ex->out.data + at, "\r\n", 2);
    for (; size; size >>= 4) ex->out.data[--at] = "0123456789abcdef"[size & 15];
    ex->out_done = at;
    return true;
}

typedef enum send_result { SENT, BLOCKED, BROKEN } send_result;

static send_result send_chunk(nbi_exchange *ex)
{
    while (ex->out_done < ex->out.len) {
        ssize_t n = send(ex->socket, ex->out.data + ex->out_done, ex->out.len - ex->out_done,
                         MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n >= 0) {
            ex->out_done += (size_t)n;
        } else if (errno == EAGAIN) {
            return BLOCKED;
        } else if (errno != EINTR) {
            return BROKEN;
        }
    }
    ex->trace.bytes += ex->out.len - FRAME_ROOM - 2; /* without what frames it */
    return SENT;
}

/* Nothing more can be sent in order: libmicrohttpd is to close the connection. */
static void give_back_broken(nbi_sender *s, nbi_exchange *ex)
{
    ex->broken = true;
    nbi_job_cancel(ex->job);
    give_back(s, ex);
}

/* A client that does not read has as long as libmicrohttpd would give it. */
static void set_blocked(nbi_exchange *ex, bool blocked)
{
    if (ex->blocked == blocked) return;
    ex->blocked = blocked;
    nbi_watch_writable(ex, blocked);
    nbi_peers_step(&ex->server->peers, ex->conn, blocked ? NBI_PEER_REPLY : NBI_PEER_WORK,
                   ex->out.len - ex->out_done);
}

/* Sends what is framed. False when the exchange waits for its client or is not ours any more. */
static bool flush(nbi_sender *s, nbi_exchange *ex)
{
    if (ex->blocked && !atomic_load(&ex->gone) && !atomic_exchange(&ex->writable, false))
        return false;
    send_result result = atomic_load(&ex->gone) ? BROKEN : send_chunk(ex);
    if (result == BROKEN) {
        give_back_broken(s, ex);
        return false;
    }
    if (result == BLOCKED && ex->blocked) nbi_watch_writable(ex, true); /* it was for once */
    set_blocked(ex, result == BLOCKED);
    return result == SENT;
}

/* Moves one exchange on as far as it goes. */
static void process(nbi_sender *s, nbi_exchange *ex)
{
    bool streams = ex->job->params.stream;
    while (ex->out_done == ex->out.len || flush(s, ex)) {
        if (streams && !begin_chunk(ex)) {
            give_back_broken(s, ex);
            return;
        }
        nbi_exchange_work(ex);
        if (atomic_load(&ex->gone) || nbi_job_finished(ex->job)) {
            give_back(s, ex); /* with the last bytes, not framed */
            return;
        }
        if (ex->out_done == ex->out.len) return;
        if (!end_chunk(ex)) {
            give_back_broken(s, ex);
            return;
        }
    }
}

/* Takes all that is queued, unless that is more than `most`; returns how many. Called with the
 * turn. */
static uint32_t take_queued(nbi_sender *s, uint32_t most)
{
    pthread_mutex_lock(&s->lock);
    uint32_t n = s->n_queued <= most ? s->n_queued : 0;
    if (n) {
        nbi_exchange **queue = s->queue;
        s->queue = s->taken;
        s->taken = queue;
        s->n_queued = 0;
        s->round++;
    }
    pthread_mutex_unlock(&s->lock);
    return n;
}

static void process_all(nbi_sender *s, uint32_t n)
{
    for (uint32_t i = 0; i < n + NBI_EXCHANGE_STEPS && !atomic_load(&s->stopping); i++) {
        for (uint32_t steps = NBI_EXCHANGE_STEPS; steps; steps--) {
            uint32_t k = i - (NBI_EXCHANGE_STEPS - steps);
            if (k < n) nbi_exchange_prefetch(s->taken[k], steps);
        }
        if (i >= NBI_EXCHANGE_STEPS) process(s, s->taken[i - NBI_EXCHANGE_STEPS]);
    }
}

/* Called by the engine's thread. */
void nbi_sender_after_step(void *user)
{
    nbi_server *server = user;
    nbi_sender *s = server->sender;
    pthread_mutex_lock(&s->lock);
    bool few = s->sleeping && s->n_queued <= INLINE_MAX && !atomic_load(&s->stopping);
    pthread_mutex_unlock(&s->lock);
    if (!few || pthread_mutex_trylock(&s->turn) != 0) {
        nbi_sender_kick(server);
        return;
    }
    uint32_t n = take_queued(s, INLINE_MAX);
    for (uint32_t i = 0; i < n; i++) process(s, s->taken[i]);
    pthread_mutex_unlock(&s->turn);
    nbi_sender_kick(server); /* what came meanwhile */
}

/* ---------------------------------------------------------------- thread */

/* Gives up the turn meanwhile. */
static void wait_for_work(nbi_sender *s)
{
    pthread_mutex_unlock(&s->turn);
    pthread_mutex_lock(&s->lock);
    if (!s->n_queued && !atomic_load(&s->stopping)) {
        s->sleeping = true;
        pthread_cond_wait(&s->work, &s->lock);
        s->sleeping = false;
    }
    pthread_mutex_unlock(&s->lock);
    pthread_mutex_lock(&s->turn);
}

/* Exchanges of a server that ends: libmicrohttpd closes their connections. */
static void give_back_all(nbi_sender *s)
{
    pthread_mutex_lock(&s->server->lock);
    for (nbi_exchange *ex = s->server->live, *next; ex; ex = next) {
        next = ex->next;
        pthread_mutex_lock(&ex->lock);
        bool direct = ex->direct;
        pthread_mutex_unlock(&ex->lock);
        if (!direct) continue;
        ex->broken = ex->blocked;
        give_back(s, ex); /* it stays in the list until we let go of the server's lock */
    }
    pthread_mutex_unlock(&s->server->lock);
}

static void *run(void *arg)
{
    nbi_sender *s = arg;
    pthread_mutex_lock(&s->turn);
    while (!atomic_load(&s->stopping)) {
        uint32_t n;
        while (!atomic_load(&s->stopping) && (n = take_queued(s, UINT32_MAX))) process_all(s, n);
        wait_for_work(s);
    }
    give_back_all(s);
    pthread_mutex_unlock(&s->turn);
    return NULL;
}

nb_status nbi_sender_start(nbi_server *server, nb_error *err)
{
    nbi_sender *s = nbi_calloc(1, sizeof *s);
    if (!s) return nbi_fail(err, NB_NO_MEMORY, "no memory for the server");
    s->server = server;
    s->round = 1;
    s->capacity = server->options.max_connections;
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->turn, NULL);
    pthread_cond_init(&s->work, NULL);
    server->sender = s;
    s->queue = nbi_calloc(s->capacity, sizeof(nbi_exchange *));
    s->taken = nbi_calloc(s->capacity, sizeof(nbi_exchange *));
    if (!s->queue || !s->taken) return nbi_fail(err, NB_NO_MEMORY, "no memory for the server");
    int failed = pthread_create(&s->thread, NULL, run, s);
    if (failed) return nbi_fail(err, NB_IO, "cannot start a thread: %s", strerror(failed));
    pthread_setname_np(s->thread, "sender");
    s->started = true;
    return NB_OK;
}

void nbi_sender_stop(nbi_server *server)
{
    nbi_sender *s = server->sender;
    if (!s || !s->started || atomic_load(&s->stopping)) return;
    pthread_mutex_lock(&s->lock);
    atomic_store(&s->stopping, true);
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
}

void nbi_sender_free(nbi_server *server)
{
    nbi_sender *s = server->sender;
    if (!s) return;
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->turn);
    pthread_cond_destroy(&s->work);
    nbi_free((void *)s->queue);
    nbi_free((void *)s->taken);
    nbi_free(s);
    server->sender = NULL;
}
