/* The server's life: open, ready, stop, close. Called by the serve command. */
#include "server/server.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "server/reporter.h"
#include "server/sender.h"

#define STOP_WAIT_MS    2000
#define BODIES_BUFFERED 8           /* of the largest size at the same time */
#define LOAD_LOG_NS     2000000000u /* between two lines about the load */

void nbi_server_options_default(nbi_server_options *options)
{
    *options = (nbi_server_options){.host = "127.0.0.1",
                                    .port = 8000,
                                    .max_body_bytes = (uint64_t)64 << 20,
                                    .max_header_bytes = 32u << 10,
                                    .header_timeout_s = 20,
                                    .body_timeout_s = 120,
                                    .idle_timeout_s = 75,
                                    .max_connections = 4096,
                                    .n_threads = 2,
                                    .reasoning_parser = "auto",
                                    .tool_parser = "auto",
                                    .grammar_backend = "auto",
                                    .start_ns = nbi_now_ns()};
}

static nb_status init(nbi_server *server, const nbi_server_options *options)
{
    pthread_condattr_t attr;
    server->options = *options;
    if (!server->options.max_buffered_bytes) {
        server->options.max_buffered_bytes = BODIES_BUFFERED * options->max_body_bytes;
    }
    server->load_logged_ns = nbi_now_ns();
    server->watch_fd = server->watch_stop = server->quiesced_fd = -1;
    atomic_init(&server->phase, NBI_SERVER_LOADING);
    atomic_init(&server->buffered, 0);
    atomic_init(&server->served_there, false);
    atomic_init(&server->reasoning_tokens, 0);
    atomic_init(&server->load_done, 0);
    atomic_init(&server->load_total, 0);
    if (pthread_condattr_init(&attr) != 0) return NB_NO_MEMORY;
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    int failed = pthread_mutex_init(&server->lock, NULL);
    if (!failed) failed = pthread_cond_init(&server->drained, &attr);
    pthread_condattr_destroy(&attr);
    return failed ? NB_NO_MEMORY : NB_OK;
}

/* Who may connect, and how. */
static nb_status open_guards(nbi_server *server, nb_error *err)
{
    const nbi_server_options *o = &server->options;
    const nbi_peers_options peers = {.header_timeout_s = o->header_timeout_s,
                                     .body_timeout_s = o->body_timeout_s,
                                     .idle_timeout_s = o->idle_timeout_s,
                                     .max_per_address = o->max_connections_per_address};
    NB_TRY(nbi_peers_init(&server->peers, &peers, err));
    server->has_peers = true;
    NB_TRY(nbi_keys_open(&server->keys, o->api_keys, o->n_api_keys, o->api_key_file, err));
    if (!o->ssl_certfile) return NB_OK;
    return nbi_tls_open(&server->tls, o->ssl_certfile, o->ssl_keyfile, o->header_timeout_s, err);
}

static const char *scheme(const nbi_server *server)
{
    return server->tls ? "https" : "http";
}

static void log_listening(const nbi_server *server, int fd)
{
    const char *host = server->options.host;
    nbi_log(NB_LOG_INFO, "listening on %s://%s:%u, the model is loading", scheme(server), host,
            server->port);
    if (nbi_is_loopback(fd) || nbi_keys_count(server->keys)) return;
    nbi_log(NB_LOG_WARN,
            "everybody who can reach %s port %u is served; --api-key-file asks for a key", host,
            server->port);
}

static nb_status open_logs(nbi_server *server, nb_error *err)
{
    const nbi_server_options *o = &server->options;
    if (o->access_log) {
        NB_TRY(nbi_linelog_open(&server->access_log, o->access_log, "--access-log", err));
    }
    if (!o->request_log) return NB_OK;
    return nbi_linelog_open(&server->request_log, o->request_log, "--request-log", err);
}

nb_status nbi_server_open(nbi_server **out, const nbi_server_options *options, nb_error *err)
{
    nb_status status;
    int fd = -1;
    nbi_server *server = nbi_calloc(1, sizeof *server);
    if (!server || init(server, options) != NB_OK) {
        nbi_free(server);
        return nbi_fail(err, NB_NO_MEMORY, "no memory for the server");
    }
    NB_TRY_OR(status, open_guards(server, err), fail);
    NB_TRY_OR(status, open_logs(server, err), fail);
    NB_TRY_OR(status, nbi_profiling_open(server, err), fail);
    NB_TRY_OR(status, nbi_http_counts_create(&server->http_counts, err), fail);
    NB_TRY_OR(status, nbi_reporter_start(server, err), fail);
    NB_TRY_OR(status, nbi_watch_start(server, err), fail);
    NB_TRY_OR(status, nbi_sender_start(server, err), fail);
    NB_TRY_OR(status, nbi_listen(&fd, &server->port, options, err), fail);
    NB_TRY_OR(status, nbi_http_start(server, fd, err), fail);
    log_listening(server, fd);
    *out = server;
    return NB_OK;
fail:
    if (fd >= 0) close(fd);
    nbi_server_close(&server);
    return status;
}

uint16_t nbi_server_port(const nbi_server *server)
{
    return server->port;
}

void nbi_server_progress(void *user, uint64_t done_bytes, uint64_t total_bytes)
{
    nbi_server *server = user;
    atomic_store(&server->load_total, total_bytes);
    atomic_store(&server->load_done, done_bytes);
    uint64_t now = nbi_now_ns();
    if (now - server->load_logged_ns < LOAD_LOG_NS) return;
    server->load_logged_ns = now;
    nbi_log(NB_LOG_INFO, "loading: %.0f %% of %.2f GB",
            total_bytes ? 100.0 * (double)done_bytes / (double)total_bytes : 0.0,
            (double)total_bytes / 1e9);
}

/* ---------------------------------------------------------------- ready */

static void read_text(nbi_server *server)
{
    server->text_status =
        nbi_served_text_open(&server->text, server->prepare_dir, server->options.chat_template_file,
                             &server->text_error);
}

/* Detached: a process that a signal ends while it loads waits for nobody. */
static void *prepare_thread(void *arg)
{
    nbi_server *server = arg;
    read_text(server);
    sem_post(&server->prepared);
    return NULL;
}

static void wait_prepared(nbi_server *server)
{
    while (sem_wait(&server->prepared) != 0 && errno == EINTR) {}
    sem_destroy(&server->prepared);
    server->preparing = false;
}

void nbi_server_prepare(nbi_server *server, const char *model_dir)
{
    pthread_t thread;
    server->prepare_dir = model_dir;
    sem_init(&server->prepared, 0, 0);
    server->preparing = pthread_create(&thread, NULL, prepare_thread, server) == 0;
    if (server->preparing)
        pthread_detach(thread);
    else
        sem_destroy(&server->prepared);
}

/* The text part, read by now or read here. */
static nb_status finish_prepare(nbi_server *server, const nb_engine *engine, nb_error *err)
{
    if (server->preparing) {
        wait_prepared(server);
    } else {
        nb_engine_info info;
        nb_engine_get_info(engine, &info);
        server->prepare_dir = info.model_dir;
        read_text(server);
    }
    if (server->text_status != NB_OK && err) *err = server->text_error;
    return server->text_status;
}

nb_status nbi_server_ready(nbi_server *server, nb_engine *engine, nb_error *err)
{
    const nbi_server_options *o = &server->options;
    nbi_served_options options = {.names = o->names,
                                  .n_names = o->n_names,
                                  .reasoning_parser = o->reasoning_parser,
                                  .tool_parser = o->tool_parser,
                                  .grammar_backend = o->grammar_backend};
    NB_TRY(finish_prepare(server, engine, err));
    NB_TRY(nbi_served_create(&server->served, engine, &server->text, &options, err));
    server->served->request_timeout_ms = o->request_timeout_s * 1000;
    server->served->stream_interval = o->stream_interval;
    server->served->trust_templates = o->trust_templates;
    server->served->keep_text = o->request_log && o->log_content;
    atomic_store(&server->served_there, true);
    nb_engine_on_step(engine, nbi_sender_after_step, server);
    int loading = NBI_SERVER_LOADING; /* a server that is ending meanwhile stays so */
    atomic_compare_exchange_strong(&server->phase, &loading, NBI_SERVER_READY);
    nbi_log(NB_LOG_INFO, "ready after %.3f s: \"%s\" at %s://%s:%u",
            (double)(nbi_now_ns() - o->start_ns) / 1e9, server->served->facts.names[0],
            scheme(server), o->host, server->port);
    return NB_OK;
}

/* ---------------------------------------------------------------- reload */

static void reload_keys(nbi_server *server)
{
    nb_error err = {0};
    if (!nbi_keys_file(server->keys)) return;
    if (nbi_keys_reload(server->keys, &err) != NB_OK) {
        nbi_log(NB_LOG_ERROR, "the API keys stay as they were: %s", err.text);
        return;
    }
    nbi_log(NB_LOG_INFO, "reload: %zu API keys", nbi_keys_count(server->keys));
}

static void reload_certificate(nbi_server *server)
{
    nb_error err = {0};
    bool changed = false;
    if (!server->tls) return;
    if (nbi_tls_reload(server->tls, &changed, &err) != NB_OK) {
        nbi_log(NB_LOG_ERROR, "the certificate stays as it was: %s", err.text);
        return;
    }
    nbi_log(NB_LOG_INFO, "reload: the certificate is %s",
            changed ? "a new one" : "what it was before");
}

void nbi_server_reload(nbi_server *server)
{
    reload_keys(server);
    reload_certificate(server);
    if (server->access_log) nbi_linelog_reopen(server->access_log);
    if (server->request_log) nbi_linelog_reopen(server->request_log);
}

/* ---------------------------------------------------------------- stop */

/* Is a reply still owed? Called with the lock held. */
static bool is_busy(const nbi_server *server)
{
    for (const nbi_exchange *ex = server->live; ex; ex = ex->next) {
        if (atomic_load(&ex->started)) return true;
    }
    return false;
}

/* Until no reply is owed, or the time is over. Called with the lock held. */
static bool wait_drained(nbi_server *server, uint32_t wait_ms)
{
    struct timespec until = nbi_timespec(nbi_now_ns() + (uint64_t)wait_ms * 1000000u);
    int timed_out = 0;
    while (is_busy(server) && !timed_out) {
        timed_out = pthread_cond_timedwait(&server->drained, &server->lock, &until);
    }
    return !is_busy(server);
}

void nbi_server_stop(nbi_server *server, uint32_t wait_ms)
{
    if (atomic_exchange(&server->phase, NBI_SERVER_STOPPING) == NBI_SERVER_STOPPING) return;
    /* From here on connections are refused. The socket is closed after the threads have ended: one
     * of them may just be about to take it out of its epoll set, and libmicrohttpd aborts when that
     * fails. */
    server->quiesced_fd = server->daemon ? MHD_quiesce_daemon(server->daemon) : -1;
    if (server->quiesced_fd >= 0) shutdown(server->quiesced_fd, SHUT_RDWR);
    pthread_mutex_lock(&server->lock);
    for (nbi_exchange *ex = server->live; ex; ex = ex->next) nbi_exchange_wake(ex);
    if (!wait_drained(server, wait_ms)) {
        nbi_log(NB_LOG_WARN,
                "some clients did not take their last bytes, their connections are cut");
    }
    pthread_mutex_unlock(&server->lock);
}

void nbi_server_close(nbi_server **out)
{
    nbi_server *server = *out;
    if (!server) return;
    nbi_server_stop(server, STOP_WAIT_MS);
    nbi_sender_stop(server);
    if (server->daemon) MHD_stop_daemon(server->daemon);
    if (server->served) nb_engine_on_step(server->served->engine, NULL, NULL);
    if (server->quiesced_fd >= 0) close(server->quiesced_fd);
    nbi_watch_stop(server);
    nbi_reporter_stop(server);
    nbi_sender_free(server);
    if (server->preparing) wait_prepared(server);
    nbi_served_text_close(&server->text);
    nbi_served_destroy(&server->served);
    nbi_tls_close(&server->tls);
    nbi_keys_close(&server->keys);
    if (server->has_peers) nbi_peers_deinit(&server->peers);
    nbi_http_counts_destroy(&server->http_counts);
    nbi_linelog_close(&server->access_log);
    nbi_linelog_close(&server->request_log);
    nbi_profiling_close(server);
    pthread_cond_destroy(&server->drained);
    pthread_mutex_destroy(&server->lock);
    nbi_free(server);
    *out = NULL;
}
