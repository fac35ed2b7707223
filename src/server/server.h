/* The HTTP server: opens its port first, answers 503 while a model loads, serves it when told.
 *
 * Called by the serve command. Owns its HTTP threads; the engine is the caller's and must outlive
 * nbi_server_close(). */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_server nbi_server;

typedef struct nbi_server_options {
    const char *host;            /* name or address; default "127.0.0.1" */
    uint16_t port;               /* default 8000; 0: any free one */
    const char *const *api_keys; /* [n_api_keys]; none: every request is served */
    uint32_t n_api_keys;
    uint64_t max_body_bytes;  /* default 64 MiB */
    uint32_t n_threads;       /* HTTP threads; default 2 */
    const char *const *names; /* [n_names] served model names; none: the folder's name */
    uint32_t n_names;
    const char *chat_template_file; /* NULL: the checkpoint's */
    const char *reasoning_parser;   /* "auto", "none" or a parser's name */
    const char *tool_parser;        /* the same for tool calls */
    const char *grammar_backend;    /* "auto", "llguidance", "none" or another library's name */
    uint64_t start_ns; /* when the process started, on the clock of nbi_now_ns(); for the log */
} nbi_server_options;

void nbi_server_options_default(nbi_server_options *options);

/* Binds and starts to answer. NB_IO names host and port when they cannot be had. Strings of the
 * options must live as long as the server. */
nb_status nbi_server_open(nbi_server **out, const nbi_server_options *options, nb_error *err);

uint16_t nbi_server_port(const nbi_server *server);

/* An nb_progress: `user` is the server. Shown by /health and the log. */
void nbi_server_progress(void *user, uint64_t done_bytes, uint64_t total_bytes);

/* Begins to read tokenizer and chat template in the background, beside the weights. Optional, once:
 * nbi_server_ready() does it otherwise, and reports what went wrong. `model_dir` must live until
 * then. */
void nbi_server_prepare(nbi_server *server, const char *model_dir);

/* Begins to serve an engine that has a thread of its own (nb_engine_start()). */
nb_status nbi_server_ready(nbi_server *server, nb_engine *engine, nb_error *err);

/* Takes no new connections, ends requests in flight with an error, waits for that (at most
 * wait_ms). */
void nbi_server_stop(nbi_server *server, uint32_t wait_ms);

/* Stops if need be, frees, clears the pointer. NULL is fine. */
void nbi_server_close(nbi_server **server);

#ifdef __cplusplus
}
#endif
