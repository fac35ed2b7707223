/* What is remembered of an HTTP request for its log lines and counters. Private to src/server.
 *
 * Lines are made when the request has ended, on its HTTP thread, and handed to base/linelog.h. */
#pragma once

#include <microhttpd.h>

#include "base/linelog.h"
#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_exchange nbi_exchange;
typedef struct nbi_server nbi_server;

#define NBI_REQUEST_ID_MAX 128

typedef struct nbi_trace {
    uint64_t bytes;  /* of the reply's body: whole, or what a stream has given so far */
    unsigned status; /* of the reply that was queued; 0: none */
    char id[NBI_REQUEST_ID_MAX + 1]; /* X-Request-Id, the client's or made here */
    char method[16];
    char path[256]; /* cut where it is longer */
} nbi_trace;

/* The request's headers are there. */
void nbi_trace_begin(nbi_exchange *ex, const char *url, const char *method);
/* A reply is about to be queued: names the request in it, counts it. */
void nbi_trace_reply(nbi_exchange *ex, struct MHD_Response *response, unsigned http);
/* The exchange ends: writes the lines. */
void nbi_trace_end(nbi_exchange *ex);

/* ---- counters of HTTP, by endpoint and status */

#define NBI_HTTP_STATUSES 20u

typedef struct nbi_http_counts nbi_http_counts;

nb_status nbi_http_counts_create(nbi_http_counts **out, nb_error *err);
void nbi_http_counts_destroy(nbi_http_counts **counts);
/* Appends the Prometheus families. */
nb_status nbi_http_counts_write(const nbi_server *server, nbi_buf *out);

#ifdef __cplusplus
}
#endif
