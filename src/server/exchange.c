/* Replies, streams, and waiting without a thread. Called by http.c and watch.c. */
#include "server/exchange.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "server/cors.h"
#include "server/http.h"
#include "server/page.h"
#include "server/sender.h"

/* libmicrohttpd takes at most this much of a stream at a time. */
#define STREAM_BLOCK_BYTES 16384
#define LOOK_NS            1000000000u
#define NBI_CHUNK_BYTES    320 /* of a stream, about */

/* ---------------------------------------------------------------- life */

static void enter(nbi_server *server, nbi_exchange *ex)
{
    pthread_mutex_lock(&server->lock);
    ex->serial = ++server->next_serial;
    ex->next = server->live;
    if (ex->next) ex->next->prev = ex;
    server->live = ex;
    pthread_mutex_unlock(&server->lock);
}

static void leave(nbi_server *server, nbi_exchange *ex)
{
    pthread_mutex_lock(&server->lock);
    if (ex->prev) {
        ex->prev->next = ex->next;
    } else {
        server->live = ex->next;
    }
    if (ex->next) ex->next->prev = ex->prev;
    if (atomic_load(&server->phase) >= NBI_SERVER_DRAINING) {
        pthread_cond_broadcast(&server->drained);
    }
    pthread_mutex_unlock(&server->lock);
}

static int socket_of(struct MHD_Connection *conn)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CONNECTION_FD);
    return info ? info->connect_fd : -1;
}

nbi_exchange *nbi_exchange_create(nbi_server *server, struct MHD_Connection *conn)
{
    nbi_exchange *ex = nbi_calloc(1, sizeof *ex);
    if (!ex) return NULL;
    ex->server = server;
    ex->conn = conn;
    ex->socket = socket_of(conn);
    ex->begin_ns = nbi_now_ns();
    ex->body.max = server->options.max_body_bytes;
    atomic_init(&ex->gone, false);
    atomic_init(&ex->look_ns, 0);
    atomic_init(&ex->started, false);
    atomic_init(&ex->writable, false);
    pthread_mutex_init(&ex->lock, NULL);
    enter(server, ex);
    return ex;
}

void nbi_exchange_destroy(nbi_exchange *ex)
{
    nbi_trace_end(ex);
    nbi_watch_remove(ex);
    leave(ex->server, ex);
    nbi_job_close(&ex->job);
    nbi_exchange_drop_body(ex);
    nbi_buf_free(&ex->out);
    /* who resumed the connection may still be about to let go of the lock */
    pthread_mutex_lock(&ex->lock);
    pthread_mutex_unlock(&ex->lock);
    pthread_mutex_destroy(&ex->lock);
    nbi_free(ex);
}

/* ---------------------------------------------------------------- bodies */

nb_status nbi_exchange_add_body(nbi_exchange *ex, const char *data, size_t n)
{
    atomic_uint_fast64_t *all = &ex->server->buffered;
    ex->buffered += n;
    if (atomic_fetch_add(all, n) + n > ex->server->options.max_buffered_bytes) return NB_BUSY;
    return nbi_buf_add(&ex->body, data, n);
}

void nbi_exchange_drop_body(nbi_exchange *ex)
{
    nbi_buf_free(&ex->body);
    atomic_fetch_sub(&ex->server->buffered, ex->buffered);
    ex->buffered = 0;
}

/* ---------------------------------------------------------------- abort */

uint32_t nbi_exchanges_abort(nbi_server *server, const char *id)
{
    uint32_t n = 0;
    pthread_mutex_lock(&server->lock);
    for (nbi_exchange *ex = server->live; ex; ex = ex->next) {
        if (!ex->job) continue;
        bool whole = id && strcmp(ex->trace.id, id) == 0; /* X-Request-Id */
        n += nbi_job_abort(ex->job, whole ? NULL : id);
    }
    pthread_mutex_unlock(&server->lock);
    return n;
}

/* ---------------------------------------------------------------- waiting */

/* The sender is not woken yet: the engine does that once, when a step has told every request. */
static void on_event(void *user)
{
    nbi_exchange *ex = user;
    pthread_mutex_lock(&ex->lock);
    ex->signalled = true;
    if (ex->direct) {
        nbi_sender_push(ex);
    } else if (ex->suspended) {
        ex->suspended = false;
        MHD_resume_connection(ex->conn);
    }
    pthread_mutex_unlock(&ex->lock);
}

void nbi_exchange_wake(nbi_exchange *ex)
{
    nbi_server *server = ex->server; /* the exchange may be gone behind on_event() */
    on_event(ex);
    if (server->sender) nbi_sender_kick(server);
}

static void on_notify(void *user)
{
    nbi_exchange_wake(user);
}

/* From here on a wake-up means something new. The sender need not say so: who suspends does. */
static void begin_work(nbi_exchange *ex)
{
    pthread_mutex_lock(&ex->lock);
    ex->signalled = false;
    pthread_mutex_unlock(&ex->lock);
}

/* False when there was a wake-up since begin_work(): look again. */
static bool suspend(nbi_exchange *ex)
{
    nbi_watch_add(ex);
    pthread_mutex_lock(&ex->lock);
    bool wait = !ex->signalled;
    if (wait) {
        ex->suspended = true;
        ex->direct = nbi_sender_take(ex);
        MHD_suspend_connection(ex->conn);
    }
    pthread_mutex_unlock(&ex->lock);
    return wait;
}

/* The jobs that watch the clock do it once a second (reporter.c wakes them). */
static void look_at_clock(nbi_exchange *ex)
{
    const nbi_surface *surface = ex->job->surface;
    if (!surface->tick || nbi_job_finished(ex->job)) return;
    uint64_t now = nbi_now_ns(), due = atomic_load(&ex->look_ns);
    if (now < due) return;
    if (due) surface->tick(ex->job);
    atomic_store(&ex->look_ns, now + LOOK_NS);
}

void nbi_exchange_prefetch(const nbi_exchange *ex, uint32_t steps)
{
    const nbi_job *job = ex->job;
    switch (steps) {
    case 5: nbi_prefetch(ex, offsetof(nbi_exchange, trace) + sizeof ex->trace.bytes); break;
    case 4:
        nbi_prefetch(ex->out.data, NBI_CHUNK_BYTES);
        nbi_job_prefetch(job, steps);
        break;
    default: nbi_job_prefetch(job, steps);
    }
}

void nbi_exchange_work(nbi_exchange *ex)
{
    if (atomic_load(&ex->server->phase) == NBI_SERVER_STOPPING && !nbi_job_finished(ex->job)) {
        nbi_api_error e = {0};
        nbi_api_fail(&e, 503, "shutting_down", NULL, "the server is shutting down");
        nbi_job_fail(ex->job, &e);
    }
    nbi_job_pump(ex->job, &ex->out);
    look_at_clock(ex);
}

/* ---------------------------------------------------------------- replies */

static void add_headers(nbi_exchange *ex, struct MHD_Response *response, unsigned http)
{
    nbi_cors_add_headers(ex, response);
    const char *type = http < 400 && ex->content_type ? ex->content_type : "application/json";
    MHD_add_response_header(response, "Content-Type", type);
    nbi_trace_reply(ex, response, http);
    if (atomic_load(&ex->server->phase) >= NBI_SERVER_DRAINING) {
        MHD_add_response_header(response, "Connection", "close");
    }
    if (ex->route && ex->route->page) nbi_page_add_headers(response);
    if (http == 401) MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (http == 405 && ex->allow) MHD_add_response_header(response, "Allow", ex->allow);
    if (http == 503) MHD_add_response_header(response, "Retry-After", "1");
}

enum MHD_Result nbi_exchange_reply(nbi_exchange *ex, unsigned http, nbi_buf *body)
{
    struct MHD_Response *response =
        MHD_create_response_from_buffer_with_free_callback(body->len, body->data, nbi_free);
    if (!response) {
        nbi_buf_free(body);
        return MHD_NO;
    }
    nbi_peers_step(&ex->server->peers, ex->conn, NBI_PEER_REPLY, body->len);
    ex->trace.bytes = body->len;
    *body = (nbi_buf){0};
    add_headers(ex, response, http);
    enum MHD_Result result = MHD_queue_response(ex->conn, http, response);
    MHD_destroy_response(response);
    if (nbi_log_wants(NB_LOG_DEBUG)) {
        nbi_log(NB_LOG_DEBUG, "http: request %llu answered %u after %.3f ms",
                (unsigned long long)ex->serial, http, (double)(nbi_now_ns() - ex->begin_ns) / 1e6);
    }
    return result;
}

enum MHD_Result nbi_exchange_reply_error(nbi_exchange *ex)
{
    nbi_buf body = {0};
    const nbi_surface *surface = ex->route ? ex->route->surface : NULL;
    nb_status status = surface && surface->write_error ? surface->write_error(&body, &ex->error)
                                                       : nbi_api_error_json(&body, &ex->error);
    if (status != NB_OK) {
        nbi_buf_free(&body);
        return MHD_NO; /* no memory for a sentence: the connection is closed */
    }
    return nbi_exchange_reply(ex, ex->error.http, &body);
}

/* ---------------------------------------------------------------- streams */

/* Gives libmicrohttpd bytes of the stream; 0 with the connection suspended when there are none.
 * `out` is filled again only when the client has taken all of it; until then the events wait in the
 * requests' rings, and behind full rings the requests wait. A client that takes too long is cut. */
static ssize_t read_stream(void *cls, uint64_t pos, char *buf, size_t max)
{
    nbi_exchange *ex = cls;
    (void)pos;
    if (ex->broken) return MHD_CONTENT_READER_END_WITH_ERROR;
    while (ex->out_done == ex->out.len) {
        nbi_buf_clear(&ex->out);
        ex->out_done = 0;
        if (ex->job->ended) {
            nbi_peers_step(&ex->server->peers, ex->conn, NBI_PEER_REPLY, 0);
            return ex->job->cut ? MHD_CONTENT_READER_END_WITH_ERROR
                                : MHD_CONTENT_READER_END_OF_STREAM;
        }
        begin_work(ex);
        nbi_exchange_work(ex);
        if (atomic_load(&ex->gone)) return MHD_CONTENT_READER_END_WITH_ERROR;
        bool idle = !ex->out.len && !ex->job->ended;
        nbi_peers_step(&ex->server->peers, ex->conn, idle ? NBI_PEER_WORK : NBI_PEER_REPLY,
                       ex->out.len);
        if (idle && suspend(ex)) return 0;
    }
    size_t n = ex->out.len - ex->out_done;
    if (n > max) n = max;
    memcpy(buf, ex->out.data + ex->out_done, n);
    ex->out_done += n;
    ex->trace.bytes += n;
    return (ssize_t)n;
}

static enum MHD_Result begin_stream(nbi_exchange *ex)
{
    struct MHD_Response *response = MHD_create_response_from_callback(
        MHD_SIZE_UNKNOWN, STREAM_BLOCK_BYTES, read_stream, ex, NULL);
    if (!response) return MHD_NO;
    MHD_add_response_header(response, "Content-Type", "text/event-stream; charset=utf-8");
    MHD_add_response_header(response, "Cache-Control", "no-cache");
    MHD_add_response_header(response, "X-Accel-Buffering", "no");
    nbi_cors_add_headers(ex, response);
    nbi_trace_reply(ex, response, MHD_HTTP_OK);
    ex->plain_chunks =
        ex->http_1_1 && !MHD_get_connection_info(ex->conn, MHD_CONNECTION_INFO_PROTOCOL);
    enum MHD_Result result = MHD_queue_response(ex->conn, MHD_HTTP_OK, response);
    MHD_destroy_response(response);
    return result;
}

/* ---------------------------------------------------------------- jobs */

/* Parse, validate, encode, submit; NB_OK with ex->job set, or ex->error. */
static nb_status open_job(nbi_exchange *ex, const nbi_surface *surface)
{
    json_t *root = NULL;
    nbi_job *job = NULL;
    if (!surface->bodyless) {
        NB_TRY(nbi_body_parse(&root, ex->body.data, ex->body.len, &ex->error));
    }
    nbi_exchange_drop_body(ex);
    const nbi_job_hooks hooks = {
        .notify = on_notify, .event = on_event, .user = ex, .client = ex->client};
    nb_status status = nbi_job_open(&job, surface, ex->server->served, root, &hooks, &ex->error);
    json_decref(root);
    pthread_mutex_lock(&ex->server->lock);
    ex->job = job;
    pthread_mutex_unlock(&ex->server->lock);
    return status;
}

enum MHD_Result nbi_exchange_begin(nbi_exchange *ex, const nbi_surface *surface)
{
    if (open_job(ex, surface) != NB_OK) return nbi_exchange_reply_error(ex);
    return nbi_exchange_continue(ex);
}

enum MHD_Result nbi_exchange_continue(nbi_exchange *ex)
{
    nbi_job *job = ex->job;
    for (;;) {
        if (job->params.stream && !job->error.http && !nbi_job_is_pending(job))
            return begin_stream(ex);
        begin_work(ex);
        nbi_exchange_work(ex);
        if (atomic_load(&ex->gone)) return MHD_NO;
        if (job->error.http || (!job->params.stream && nbi_job_finished(job))) {
            nbi_buf body = {0};
            if (nbi_job_reply(job, &body)) return nbi_exchange_reply(ex, MHD_HTTP_OK, &body);
            nbi_buf_free(&body);
            ex->error = job->error;
            if (job->surface->bodyless) ex->error.http = 503;
            return nbi_exchange_reply_error(ex);
        }
        bool begins = job->params.stream && !nbi_job_is_pending(job);
        if (!begins && suspend(ex)) return MHD_YES;
    }
}
