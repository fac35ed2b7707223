/* The options of the HTTP side of `nibble serve`: address, keys, TLS, limits. */
#pragma once

#include "cli/cli.h"
#include "server/server.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_http_options {
    nbi_server_options *server;
    nbi_opt_list keys, origins;
    const char **all_keys; /* [keys.n + 1] with the environment's */
    uint32_t port;
} nbi_http_options;

/* clang-format off */
/* Rows for an option table, names as in SGLang, vLLM and uvicorn. `o` is an nbi_http_options *. */
#define NBI_HTTP_OPTION_ROWS(o)                                                                    \
    {"host", NBI_OPT_STRING, &(o)->server->host, "HOST",                                           \
     "name or address to listen on (default 127.0.0.1)", false},                                   \
    {"port", NBI_OPT_U32, &(o)->port, "N", "default 8000; 0: any free one, see the log", false},   \
    {"api-key", NBI_OPT_LIST, &(o)->keys, "KEY",                                                   \
     "requests need \"Authorization: Bearer KEY\"; may be repeated. Others on\n"                   \
     "this machine can see it: NIBBLE_API_KEY in the environment or a file\n"                      \
     "keeps it to itself", false},                                                                 \
    {"api-key-file", NBI_OPT_STRING, &(o)->server->api_key_file, "FILE",                           \
     "more keys, one per line, # begins a comment line; read again at SIGHUP", false},             \
    {"ssl-certfile", NBI_OPT_STRING, &(o)->server->ssl_certfile, "FILE",                           \
     "HTTPS: PEM with the server's certificate and those between it and the\n"                     \
     "root; read again at SIGHUP", false},                                                         \
    {"ssl-keyfile", NBI_OPT_STRING, &(o)->server->ssl_keyfile, "FILE",                             \
     "its private key, without passphrase (default: in --ssl-certfile)", false},                   \
    {"cors-origin", NBI_OPT_LIST, &(o)->origins, "ORIGIN",                                         \
     "pages of this origin may call the API from a browser; may be repeated;\n"                    \
     "*: of every origin (default: none)", false},                                                 \
    {"no-ui", NBI_OPT_FLAG, &(o)->server->no_ui, NULL,                                             \
     "no web page at / (and no log under /ui/log)", false},                                        \
    {"max-body-bytes", NBI_OPT_BYTES, &(o)->server->max_body_bytes, "N",                           \
     "size of a request body at most (default 64Mi)", false},                                      \
    {"max-buffered-bytes", NBI_OPT_BYTES, &(o)->server->max_buffered_bytes, "N",                   \
     "bodies of all requests together, while they are read (default: 8 of\n"                       \
     "the largest)", false},                                                                       \
    {"max-header-bytes", NBI_OPT_U32, &(o)->server->max_header_bytes, "N",                         \
     "request line and headers at most (default 32Ki)", false},                                    \
    {"header-timeout", NBI_OPT_U32, &(o)->server->header_timeout_s, "SECONDS",                     \
     "for the TLS handshake and the headers of a request (default 20)", false},                    \
    {"body-timeout", NBI_OPT_U32, &(o)->server->body_timeout_s, "SECONDS",                         \
     "for the body of a request (default 120)", false},                                            \
    {"request-timeout", NBI_OPT_U32, &(o)->server->request_timeout_s, "SECONDS",                   \
     "for a request from its arrival to its last token, the queue included; then\n"                \
     "504 and its memory is free (default 0: none)", false},                                       \
    {"stream-interval", NBI_OPT_U32, &(o)->server->stream_interval, "N",                           \
     "tokens per event of a stream, the first one apart; at most 64 (default 1)", false},          \
    {"idle-timeout", NBI_OPT_U32, &(o)->server->idle_timeout_s, "SECONDS",                         \
     "without a byte, between requests, and for a client to take what is\n"                        \
     "ready for it (default 75)", false},                                                          \
    {"max-connections", NBI_OPT_U32, &(o)->server->max_connections, "N",                           \
     "more wait until others end (default 4096)", false},                                          \
    {"max-connections-per-address", NBI_OPT_U32, &(o)->server->max_connections_per_address, "N",   \
     "more from one address (IPv6: one /64) are closed (default 0: no limit,\n"                    \
     "as behind a gateway)", false},                                                               \
    {"http-threads", NBI_OPT_U32, &(o)->server->n_threads, "N",                                    \
     "threads that read and write requests (default 2)", false}
/* clang-format on */

void nbi_http_options_init(nbi_http_options *o, nbi_server_options *server);

/* After parsing: checks and completes *o->server. -1, or the exit status of wrong usage. */
int nbi_http_options_apply(nbi_http_options *o, const nbi_command *command);

void nbi_http_options_free(nbi_http_options *o);

#ifdef __cplusplus
}
#endif
