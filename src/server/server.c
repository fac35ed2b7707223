/* The server's life: open, ready, stop, close. Called by the serve command. */
#include "server/server.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "server/exchange.h"

#define STOP_WAIT_MS 2000
#define LOAD_LOG_NS  2000000000u /* between two lines about the load */

void nbi_server_options_default(nbi_server_options *options)
{
    *options = (nbi_server_options){.host = "127.0.0.1",
                                    .port = 8000,
                                    .max_body_bytes = (uint64_t)64 << 20,
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
    server->load_logged_ns = nbi_now_ns();
    server->watch_fd = server->watch_stop = -1;
    atomic_init(&server->phase, NBI_SERVER_LOADING);
    atomic_init(&server->load_done, 0);
    atomic_init(&server->load_total, 0);
    if (pthread_condattr_init(&attr) != 0) return NB_NO_MEMORY;
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    int failed = pthread_mutex_init(&server->lock, NULL);
    if (!failed) failed = pthread_cond_init(&server->drained, &attr);
    pthread_condattr_destroy(&attr);
    return failed ? NB_NO_MEMORY : NB_OK;
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
    NB_TRY_OR(status, nbi_watch_start(server, err), fail);
    NB_TRY_OR(status, nbi_listen(&fd, &server->port, options, err), fail);
    NB_TRY_OR(status, nbi_http_start(server, fd, err), fail);
    nbi_log(NB_LOG_INFO, "listening on http://%s:%u, the model is loading", options->host,
            server->port);
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

static void *run_prepare(void *arg)
{
    nbi_server *server = arg;
    server->text_status =
        nbi_served_text_open(&server->text, server->prepare_dir, server->options.chat_template_file,
                             &server->text_error);
    return NULL;
}

void nbi_server_prepare(nbi_server *server, const char *model_dir)
{
    server->prepare_dir = model_dir;
    server->preparing = pthread_create(&server->prepare_thread, NULL, run_prepare, server) == 0;
}

/* The text part, read by now or read here. */
static nb_status finish_prepare(nbi_server *server, const nb_engine *engine, nb_error *err)
{
    if (server->preparing) {
        pthread_join(server->prepare_thread, NULL);
        server->preparing = false;
    } else {
        nb_engine_info info;
        nb_engine_get_info(engine, &info);
        server->prepare_dir = info.model_dir;
        run_prepare(server);
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
    int loading = NBI_SERVER_LOADING; /* a server that is ending meanwhile stays so */
    atomic_compare_exchange_strong(&server->phase, &loading, NBI_SERVER_READY);
    nbi_log(NB_LOG_INFO, "ready after %.3f s: \"%s\" at http://%s:%u",
            (double)(nbi_now_ns() - o->start_ns) / 1e9, server->served->facts.names[0], o->host,
            server->port);
    return NB_OK;
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
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += wait_ms / 1000;
    until.tv_nsec += (long)(wait_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    int timed_out = 0;
    while (is_busy(server) && !timed_out) {
        timed_out = pthread_cond_timedwait(&server->drained, &server->lock, &until);
    }
    return !is_busy(server);
}

void nbi_server_stop(nbi_server *server, uint32_t wait_ms)
{
    if (atomic_exchange(&server->phase, NBI_SERVER_STOPPING) == NBI_SERVER_STOPPING) return;
    int fd = server->daemon ? MHD_quiesce_daemon(server->daemon) : -1;
    if (fd >= 0) close(fd);
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
    if (server->daemon) MHD_stop_daemon(server->daemon);
    nbi_watch_stop(server);
    if (server->preparing) pthread_join(server->prepare_thread, NULL);
    nbi_served_text_close(&server->text);
    nbi_served_destroy(&server->served);
    pthread_cond_destroy(&server->drained);
    pthread_mutex_destroy(&server->lock);
    nbi_free(server);
    *out = NULL;
}
