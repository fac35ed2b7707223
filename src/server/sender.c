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
    nbi_exchange *head, *tail;
    uint32_t n_queued;
    bool sleeping;
    atomic_bool stopping;
    pthread_mutex_t turn; /* held while exchanges are worked on; before every other lock */
};

/* ---------------------------------------------------------------- queue */

bool nbi_sender_takes(const nbi_exchange *ex)
{
    const nbi_sender *s = ex->server->sender;
    if (!s || !s->started || atomic_load(&s->stopping) || !ex->watched) return false;
    return !ex->job->params.stream || ex->plain_chunks;
}

void nbi_sender_push(nbi_exchange *ex)
{
    nbi_sender *s = ex->server->sender;
    pthread_mutex_lock(&s->lock);
    if (!ex->queued) {
        ex->queued = true;
        ex->send_next = NULL;
        ex->send_prev = s->tail;
        if (s->tail) {
            s->tail->send_next = ex;
        } else {
            s->head = ex;
        }
        s->tail = ex;
        s->n_queued++;
    }
    pthread_mutex_unlock(&s->lock);
}

/* Called with the sender's lock held. */
static void unlink_queued(nbi_sender *s, nbi_exchange *ex)
{
    if (!ex->queued) return;
    ex->queued = false;
    s->n_queued--;
    if (ex->send_prev) {
        ex->send_prev->send_next = ex->send_next;
    } else {
        s->head = ex->send_next;
    }
    if (ex->send_next) {
        ex->send_next->send_prev = ex->send_prev;
    } else {
        s->tail = ex->send_prev;
    }
}

void nbi_sender_kick(nbi_server *server)
{
    nbi_sender *s = server->sender;
    pthread_mutex_lock(&s->lock);
    bool wake = s->sleeping && s->head;
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

static nbi_exchange *take_queued(nbi_sender *s)
{
    pthread_mutex_lock(&s->lock);
    nbi_exchange *ex = s->head;
    if (ex) unlink_queued(s, ex);
    pthread_mutex_unlock(&s->lock);
    return ex;
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
    nbi_exchange *ex;
    for (uint32_t i = 0; i < INLINE_MAX && (ex = take_queued(s)); i++) process(s, ex);
    pthread_mutex_unlock(&s->turn);
    nbi_sender_kick(server); /* what came meanwhile */
}

/* ---------------------------------------------------------------- thread */

/* Gives up the turn meanwhile. */
static void wait_for_work(nbi_sender *s)
{
    pthread_mutex_unlock(&s->turn);
    pthread_mutex_lock(&s->lock);
    if (!s->head && !atomic_load(&s->stopping)) {
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
        nbi_exchange *ex;
        while (!atomic_load(&s->stopping) && (ex = take_queued(s))) process(s, ex);
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
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->turn, NULL);
    pthread_cond_init(&s->work, NULL);
    server->sender = s;
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
    nbi_free(s);
    server->sender = NULL;
}
