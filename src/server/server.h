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
    const char *api_key_file;        /* more keys, one per line; NULL: none */
    const char *ssl_certfile;        /* PEM; NULL: plain HTTP */
    const char *ssl_keyfile;         /* PEM; NULL: in ssl_certfile */
    const char *const *cors_origins; /* [n_cors_origins] as nbi_server_check_origin() takes them */
    uint32_t n_cors_origins;
    uint64_t max_body_bytes;     /* default 64 MiB */
    uint64_t max_buffered_bytes; /* bodies of all requests together; 0 (default): 8 bodies */
    uint32_t max_header_bytes;   /* request line and headers; default 32 KiB */
    uint32_t request_timeout_s;  /* from submit to the last token; 0 (default): none */
    uint32_t stream_interval;    /* tokens per event of a stream; 0 (default): 1 */
    uint32_t header_timeout_s, body_timeout_s, idle_timeout_s; /* > 0; defaults 20, 120, 75 */
    uint32_t max_connections;             /* default 4096; less where the descriptors end */
    uint32_t max_connections_per_address; /* 0 (default): no limit */
    uint32_t n_threads;                   /* HTTP threads; default 2 */
    const char *const *names; /* [n_names] served model names; none: the folder's name */
    uint32_t n_names;
    const char *chat_template_file; /* NULL: the checkpoint's */
    bool trust_templates;           /* a request may bring its own */
    const char *reasoning_parser;   /* "auto", "none" or a parser's name */
    const char *tool_parser;        /* the same for tool calls */
    const char *grammar_backend;    /* "auto", "llguidance", "none" or another library's name */
    const char *flags_json;  /* object of the command's flags, for /server_info; NULL: none */
    const char *access_log;  /* file of JSON lines, "-": standard output; NULL: none */
    const char *request_log; /* the same */
    bool log_content;        /* the request log has prompts and answers */
    const char *profile_dir; /* folder that profiles are written to; NULL: nothing is written */
    bool no_ui;              /* no web page: GET / and /ui/ are unknown */
    uint64_t start_ns; /* when the process started, on the clock of nbi_now_ns(); for the log */
} nbi_server_options;

void nbi_server_options_default(nbi_server_options *options);

/* "*", or scheme://host[:port] without a path, as browsers write it. NB_INVALID names the flag. */
nb_status nbi_server_check_origin(const char *origin, nb_error *err);

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

/* What SIGHUP asks for: reads keys and certificate again, opens the log files anew. What cannot be
 * read stays as it was, with an error line. Any thread but those of the server. */
void nbi_server_reload(nbi_server *server);

/* Begins to serve an engine that has a thread of its own (nb_engine_start()). */
nb_status nbi_server_ready(nbi_server *server, nb_engine *engine, nb_error *err);

/* From here on requests get 503 (Retry-After: 1); those that were begun go on, /health says
 * "draining". Any thread. */
void nbi_server_drain(nbi_server *server);

/* Requests whose reply is not complete yet. Any thread. */
uint32_t nbi_server_owed(nbi_server *server);

/* For a process that ends without nbi_server_close(), after nbi_server_stop(): what the log files
 * are owed is written. */
void nbi_server_flush_logs(nbi_server *server);

/* Takes no new connections, ends requests in flight with an error, waits for that (at most
 * wait_ms). */
void nbi_server_stop(nbi_server *server, uint32_t wait_ms);

/* Stops if need be, frees, clears the pointer. NULL is fine. */
void nbi_server_close(nbi_server **server);

#ifdef __cplusplus
}
#endif
