/* nibble serve: the HTTP server. Called by main.c.
 *
 * The port opens first; a thread of its own loads the model while the main thread waits for
 * signals. The first SIGINT or SIGTERM lets what runs finish and ends the server in order, the
 * second ends it at once; SIGHUP reloads. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "cli/http_options.h"
#include "cli/ranks.h"
#include "cli/run_options.h"
#include "cli/serve_bandwidth.h"
#include "cli/service.h"

#define STOP_WAIT_MS    2000
#define AT_ONCE_WAIT_MS 300 /* for the error events of cut requests */
#define DRAIN_SECONDS   25  /* below the 30 s that Kubernetes waits */
#define DRAIN_TICK_NS   20000000
#define LOST_TICK_NS    50000000 /* between two looks at the other ranks */
#define LOST_WAIT_MS    1500     /* for clients to be told that a rank is lost */

static const nbi_command command = {
    .name = "serve",
    .summary = "Serves a model over the OpenAI API.",
    .usage = "[--model DIR] [--host HOST] [--port N] [OPTIONS]",
    .text = "Answers GET /health, GET /v1/models, POST /v1/completions, /v1/chat/completions,\n"
            "/v1/responses, /v1/messages (Anthropic's) and /v1/messages/count_tokens, streaming "
            "and not;\n"
            "SGLang's /generate; /tokenize, /detokenize, /model_info, /server_info, /flush_cache,\n"
            "/abort_request, /v1/loads, /start_profile, /stop_profile, /version, /ping.\n"
            "/openapi.json describes them all, docs/api.md explains them.\n"
            "GET / is a page for the browser: chat, live charts, what the server is.\n"
            "The port opens at once; until the model is loaded requests get 503 and\n"
            "/health shows how far it is. SIGINT or SIGTERM takes no new requests, lets those\n"
            "that run finish and ends the server; a second one ends it at once. SIGHUP reads API\n"
            "keys and certificate again and opens the log files anew.\n\n"
            "Example: nibble serve --port 8000\n"
            "         curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: "
            "application/json' \\\n"
            "              -d '{\"messages\": [{\"role\": \"user\", \"content\": \"What is "
            "3+5?\"}]}'",
    .operands = "MODEL",
};

typedef struct serving {
    nbi_run_options model;
    nbi_server_options options;
    nbi_server *server;
    uint32_t drain_seconds;
    bool skip_check;
    nb_engine *engine; /* the loader's until `loaded` */
    double bandwidth;  /* --memory-bandwidth; 0: to be measured */
    nbi_bandwidth_watch *watch;
    pthread_t main_thread, loader;
    bool loaded; /* written by the loader before it sends SIGUSR1 */
    nbi_ranks_options ranks;
    nbi_comm *comm; /* NULL: one rank */
    nb_status status;
    nb_error err;
} serving;

/* ---------------------------------------------------------------- loading */

static nb_status load(serving *s)
{
    nbi_server_prepare(s->server, s->model.engine.model_dir);
    s->model.engine.progress = nbi_server_progress;
    s->model.engine.progress_user = s->server;
    s->model.engine.check_kernels = !s->skip_check;
    NB_TRY(nb_engine_open(&s->engine, &s->model.engine, &s->err));
    if (s->bandwidth > 0) nb_engine_set_read_bandwidth(s->engine, s->bandwidth);
    NB_TRY(nb_engine_start(s->engine, &s->err));
    return nbi_server_ready(s->server, s->engine, &s->err);
}

static void *run_loader(void *arg)
{
    serving *s = arg;
    s->status = load(s);
    s->loaded = true;
    pthread_kill(s->main_thread, SIGUSR1);
    return NULL;
}

/* ---------------------------------------------------------------- signals */

static sigset_t signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGHUP);
    return set;
}

static void end_now(int number)
{
    (void)number;
    _exit(NBI_EXIT_OK);
}

/* From here on a signal ends the process. */
static void let_signals_end(const sigset_t *set)
{
    signal(SIGINT, end_now);
    signal(SIGTERM, end_now);
    signal(SIGHUP, SIG_IGN);
    signal(SIGUSR1, SIG_IGN); /* the loader may still say that it is done */
    pthread_sigmask(SIG_UNBLOCK, set, NULL);
}

static bool is_lost(const serving *s)
{
    return s->comm && nbi_comm_lost(s->comm, NULL) != NB_OK;
}

/* A rank is lost: the engine has failed what ran, or would have; readers are told, and that is all.
 */
static void end_lost(serving *s, bool joined)
{
    nb_error why = {0};
    (void)nbi_comm_lost(s->comm, &why);
    if (!joined || s->status != NB_OK) nbi_log(NB_LOG_ERROR, "%s", why.text);
    const uint64_t end_ns = nbi_now_ns() + LOST_WAIT_MS * 1000000ull;
    while (nbi_server_owed(s->server) && nbi_now_ns() < end_ns)
        nanosleep(&(struct timespec){.tv_nsec = DRAIN_TICK_NS}, NULL);
    nbi_server_stop(s->server, AT_ONCE_WAIT_MS);
    nbi_server_flush_logs(s->server);
    _exit(NBI_EXIT_FAILED);
}

/* Takes nothing new and waits until what runs has finished or the time is over. False when a second
 * signal came. */
static bool drain(serving *s, const sigset_t *set)
{
    const struct timespec tick = {.tv_nsec = DRAIN_TICK_NS};
    uint64_t end_ns = nbi_now_ns() + (uint64_t)s->drain_seconds * 1000000000u;
    nbi_server_drain(s->server);
    uint32_t owed = nbi_server_owed(s->server);
    if (owed && s->drain_seconds && !is_lost(s)) {
        nbi_log(NB_LOG_INFO,
                "draining: %u requests may finish within %u s; a second signal ends "
                "them at once",
                owed, s->drain_seconds);
    }
    while (nbi_server_owed(s->server) && nbi_now_ns() < end_ns && !is_lost(s)) {
        int number = sigtimedwait(set, NULL, &tick);
        if (number == SIGINT || number == SIGTERM) return false;
        if (number == SIGHUP) nbi_server_reload(s->server);
    }
    owed = nbi_server_owed(s->server);
    if (owed) nbi_log(NB_LOG_WARN, "%u requests have not finished, they are cut", owed);
    return true;
}

/* Ends the server after a signal. `joined`: the loader is no more. */
static int end(serving *s, const sigset_t *set, bool joined)
{
    bool in_order = drain(s, set);
    if (is_lost(s)) end_lost(s, joined);
    let_signals_end(set);
    nbi_server_stop(s->server, in_order ? STOP_WAIT_MS : AT_ONCE_WAIT_MS);
    if (in_order && joined) return NBI_EXIT_OK;
    /* nothing needs to be saved: not by a loader, which cannot be stopped, nor by the step of an
     * engine, which may be long */
    nbi_server_flush_logs(s->server);
    nbi_bandwidth_watch_stop(&s->watch);
    if (!joined) pthread_detach(s->loader);
    if (s->comm) nbi_comm_fail(s->comm, "was told to end at once");
    _exit(NBI_EXIT_OK);
}

/* The next signal; with several ranks 0 now and then. A rank that dies makes mpiexec send SIGTERM:
 * the loss comes first. */
static int next_signal(const serving *s, const sigset_t *set)
{
    const struct timespec tick = {.tv_nsec = LOST_TICK_NS};
    int number = 0;
    if (!s->comm) return sigwait(set, &number) == 0 ? number : 0;
    number = sigtimedwait(set, NULL, &tick);
    if (number == SIGTERM) nanosleep(&(struct timespec){.tv_nsec = 4 * LOST_TICK_NS}, NULL);
    return number > 0 ? number : 0;
}

/* Waits for the end: a signal, or a model that cannot be loaded. Joins the loader when it is done.
 */
static int wait_for_end(serving *s, const sigset_t *set)
{
    bool joined = false;
    for (;;) {
        int number = next_signal(s, set);
        if (is_lost(s) && !(number == SIGUSR1 && s->status != NB_OK)) end_lost(s, joined);
        if (!number) continue;
        if (number == SIGUSR1) {
            if (!joined) pthread_join(s->loader, NULL);
            joined = true;
            if (s->status == NB_OK) {
                nbi_service_say("READY=1\nSTATUS=serving");
                nbi_bandwidth_watch_start(&s->watch, s->engine, s->model.engine.model_dir,
                                          s->model.engine.n_threads);
                continue;
            }
            return nbi_cli_fail(&command, &s->err);
        }
        if (number == SIGHUP) {
            nbi_log(NB_LOG_INFO, "SIGHUP: reading files again");
            nbi_server_reload(s->server);
            continue;
        }
        nbi_service_say("STOPPING=1");
        nbi_log(NB_LOG_INFO, "%s: ending", number == SIGINT ? "SIGINT" : "SIGTERM");
        return end(s, set, joined);
    }
}

static int serve(serving *s)
{
    sigset_t set = signals();
    int status = NBI_EXIT_FAILED;
    signal(SIGPIPE, SIG_IGN);
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* for every thread that is started from here on */
    s->main_thread = pthread_self();
    if (nbi_server_open(&s->server, &s->options, &s->err) != NB_OK) {
        return nbi_cli_fail(&command, &s->err);
    }
    int failed = pthread_create(&s->loader, NULL, run_loader, s);
    if (failed) {
        nbi_fail(&s->err, NB_IO, "cannot start a thread: %s", strerror(failed));
        nbi_cli_fail(&command, &s->err);
    } else {
        status = wait_for_end(s, &set);
    }
    nbi_bandwidth_watch_stop(&s->watch);
    nbi_server_close(&s->server);
    nb_engine_close(&s->engine);
    nbi_comm_close(&s->comm);
    return status;
}

/* ---------------------------------------------------------------- options */

static int apply(serving *s, nbi_http_options *http, const nbi_opt_list *names, int n_operands,
                 char **argv)
{
    if (n_operands > 1) return nbi_cli_usage(&command, "more than one MODEL");
    if (n_operands && s->model.model) {
        return nbi_cli_usage(&command, "the model is named twice: %s and %s", argv[1],
                             s->model.model);
    }
    if (n_operands) s->model.model = argv[1];
    s->options.names = names->items;
    s->options.n_names = (uint32_t)names->n;
    int status = nbi_http_options_apply(http, &command);
    if (status >= 0) return status;
    return nbi_run_options_apply(&s->model, &command);
}

static int follow(serving *s)
{
    s->model.engine.check_kernels = !s->skip_check;
    return nbi_ranks_follow(s->comm, &s->model.engine);
}

int nbi_cmd_serve(int argc, char **argv)
{
    serving s = {.drain_seconds = DRAIN_SECONDS};
    nbi_opt_list names = {0};
    nbi_http_options http;
    int n_operands = 0;
    nbi_server_options_default(&s.options);
    nbi_http_options_init(&http, &s.options);
    nbi_run_options_init(&s.model, "info");
    char **kept = nbi_ranks_keep(argc, argv);
    s.model.engine.timing_interval = NB_TIMING_USUAL;
    const nbi_opt options[] = {
        NBI_RUN_OPTION_ROWS(&s.model),
        NBI_RANKS_OPTION_ROWS(&s.ranks),
        NBI_HTTP_OPTION_ROWS(&http),
        {"served-model-name", NBI_OPT_LIST, &names, "NAME",
         "what clients call the model (default: its folder's name);\nmay be repeated", false},
        {"chat-template", NBI_OPT_STRING, &s.options.chat_template_file, "FILE",
         "Jinja file instead of the checkpoint's", false},
        {"trust-request-chat-template", NBI_OPT_FLAG, &s.options.trust_templates, NULL,
         "requests may bring a template of their own (chat_template)", false},
        {"reasoning-parser", NBI_OPT_STRING, &s.options.reasoning_parser, "NAME",
         "auto (default), none, glm45, deepseek-r1, qwen3", false},
        {"tool-call-parser", NBI_OPT_STRING, &s.options.tool_parser, "NAME",
         "auto (default: by template and family), none, glm45, glm47, hermes, deepseekv3,\n"
         "deepseekv31, deepseekv32",
         false},
        {"grammar-backend", NBI_OPT_STRING, &s.options.grammar_backend, "NAME",
         "structured output: auto (default: llguidance where it is installed), llguidance (not to "
         "start\nwithout it), none; xgrammar, outlines and guidance are taken as auto",
         false},
        {"drain-timeout", NBI_OPT_U32, &s.drain_seconds, "SECONDS",
         "time for running requests to finish after SIGTERM or SIGINT (default 25)", false},
        {"skip-check", NBI_OPT_FLAG, &s.skip_check, NULL,
         "do not compare the device's kernels with sums in double before serving", false},
        {"access-log", NBI_OPT_STRING, &s.options.access_log, "FILE",
         "a JSON line per HTTP request; - is standard output. SIGHUP opens it anew", false},
        {"request-log", NBI_OPT_STRING, &s.options.request_log, "FILE",
         "a JSON line per generation: tokens, times, parameters; likewise", false},
        {"log-content", NBI_OPT_FLAG, &s.options.log_content, NULL,
         "prompts and answers go to the request log, too", false},
        {"profile-dir", NBI_OPT_STRING, &s.options.profile_dir, "DIR",
         "folder for what /start_profile and /stop_profile find; without it the\nreply to "
         "/stop_profile is the profile, and nothing is written",
         false},
        {"timing-interval", NBI_OPT_U32, &s.model.engine.timing_interval, "N",
         "every N-th step is timed by component for /metrics; 0: none (default 64; 0 on a\nGPU "
         "before Hopper and with --disable-cuda-graph)",
         false},
        {"memory-bandwidth", NBI_OPT_F64, &s.bandwidth, "B",
         "bytes per second that plain reads get, for shares of the floor (default: measured,\n"
         "once nothing runs)",
         false},
        {0},
    };
    nbi_buf flags = {0};
    int status = nbi_cli_parse(&command, options, argc, argv, &n_operands);
    if (status < 0) status = nbi_ranks_enter(&s.comm, &s.ranks, &command, kept, false);
    if (status < 0) status = apply(&s, &http, &names, n_operands, argv);
    nbi_ranks_apply(s.comm, &s.ranks, &s.model.engine);
    if (status < 0 && nbi_ranks_follows(s.comm)) status = follow(&s);
    if (status < 0 && nbi_cli_options_json(options, &flags) == NB_OK) {
        s.options.flags_json = flags.data;
    }
    if (status < 0) status = serve(&s);
    nbi_free(kept);
    nbi_buf_free(&flags);
    nbi_run_options_free(&s.model);
    nbi_opt_list_free(&names);
    nbi_http_options_free(&http);
    return status;
}
