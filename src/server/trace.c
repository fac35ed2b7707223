/* Request ids, the access log, HTTP counters. Called by http.c and exchange.c. */
#include "server/trace.h"

#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>

#include "base/clock.h"
#include "base/json.h"
#include "server/http.h"
#include "server/request_log.h"

/* ---------------------------------------------------------------- ids */

static void make_id(char out[NBI_REQUEST_ID_MAX + 1])
{
    uint64_t words[2];
    if (getrandom(words, sizeof words, 0) != sizeof words) words[0] = words[1] = nbi_now_ns();
    snprintf(out, NBI_REQUEST_ID_MAX + 1, "%016llx%016llx", (unsigned long long)words[0],
             (unsigned long long)words[1]);
}

/* Keeps what is safe in a header, a log and a file name; the rest of the client's id is dropped. */
static void take_id(char out[NBI_REQUEST_ID_MAX + 1], const char *given)
{
    static const char others[] = "-_.:/+=@";
    size_t n = 0;
    for (const char *c = given; c && *c && n < NBI_REQUEST_ID_MAX; c++) {
        bool plain = (*c >= '0' && *c <= '9') || (*c >= 'a' && *c <= 'z') ||
                     (*c >= 'A' && *c <= 'Z') || strchr(others, *c);
        if (plain) out[n++] = *c;
    }
    out[n] = '\0';
    if (!n) make_id(out);
}

/* ---------------------------------------------------------------- counters */

/* Statuses that this server sends; anything else is counted under the last, 0. */
static const unsigned statuses[NBI_HTTP_STATUSES] = {200, 206, 304, 400, 401, 403, 404,
                                                     405, 408, 409, 411, 413, 415, 422,
                                                     429, 431, 500, 503, 504, 0};

typedef struct endpoint_counts {
    atomic_uint_fast64_t requests, responses[NBI_HTTP_STATUSES];
} endpoint_counts;

struct nbi_http_counts {
    uint32_t n_routes;
    endpoint_counts at[]; /* [n_routes + 1]; the last: paths that are not routes */
};

nb_status nbi_http_counts_create(nbi_http_counts **out, nb_error *err)
{
    uint32_t n = nbi_http_n_routes();
    nbi_http_counts *c = nbi_calloc(1, sizeof *c + (n + 1) * sizeof c->at[0]);
    if (!c) return nbi_fail(err, NB_NO_MEMORY, "no memory for the HTTP counters");
    c->n_routes = n;
    *out = c;
    return NB_OK;
}

void nbi_http_counts_destroy(nbi_http_counts **counts)
{
    nbi_free(*counts);
    *counts = NULL;
}

static endpoint_counts *counts_of(const nbi_exchange *ex)
{
    nbi_http_counts *c = ex->server->http_counts;
    return &c->at[ex->route ? nbi_http_route_index(ex->route) : c->n_routes];
}

static uint32_t status_index(unsigned http)
{
    uint32_t i = 0;
    while (statuses[i] && statuses[i] != http) i++;
    return i;
}

static const char *endpoint_name(uint32_t i)
{
    const nbi_route *route = nbi_http_route(i);
    return route ? route->path : "other";
}

nb_status nbi_http_counts_write(const nbi_server *server, nbi_buf *out)
{
    const nbi_http_counts *c = server->http_counts;
    NB_TRY(nbi_buf_addf(out, "# HELP nibble:http_requests_total HTTP requests by endpoint.\n"
                             "# TYPE nibble:http_requests_total counter\n"));
    for (uint32_t i = 0; i <= c->n_routes; i++) {
        NB_TRY(nbi_buf_addf(out, "nibble:http_requests_total{endpoint=\"%s\"} %llu\n",
                            endpoint_name(i), (unsigned long long)atomic_load(&c->at[i].requests)));
    }
    NB_TRY(nbi_buf_addf(out,
                        "# HELP nibble:http_responses_total HTTP replies by endpoint and status.\n"
                        "# TYPE nibble:http_responses_total counter\n"));
    for (uint32_t i = 0; i <= c->n_routes; i++) {
        for (uint32_t s = 0; s < NBI_HTTP_STATUSES; s++) {
            uint64_t n = atomic_load(&c->at[i].responses[s]);
            if (!n) continue;
            NB_TRY(nbi_buf_addf(
                out, "nibble:http_responses_total{endpoint=\"%s\",status_code=\"%u\"} %llu\n",
                endpoint_name(i), statuses[s], (unsigned long long)n));
        }
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- the life of a trace */

void nbi_trace_begin(nbi_exchange *ex, const char *url, const char *method)
{
    nbi_trace *t = &ex->trace;
    take_id(t->id, MHD_lookup_connection_value(ex->conn, MHD_HEADER_KIND, "X-Request-Id"));
    snprintf(t->method, sizeof t->method, "%s", method);
    snprintf(t->path, sizeof t->path, "%s", url);
}

void nbi_trace_reply(nbi_exchange *ex, struct MHD_Response *response, unsigned http)
{
    ex->trace.status = http;
    MHD_add_response_header(response, "X-Request-Id", ex->trace.id);
    atomic_fetch_add(&counts_of(ex)->requests, 1);
    atomic_fetch_add(&counts_of(ex)->responses[status_index(http)], 1);
}

/* "192.0.2.1:4711" */
static void remote_address(const nbi_exchange *ex, char out[80])
{
    char host[64], port[8];
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(ex->conn, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    snprintf(out, 80, "?");
    if (!info || !info->client_addr) return;
    bool v6 = info->client_addr->sa_family == AF_INET6;
    socklen_t n = v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    if (getnameinfo(info->client_addr, n, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return;
    }
    snprintf(out, 80, v6 ? "[%s]:%s" : "%s:%s", host, port);
}

nb_status nbi_trace_time(nbi_buf *line)
{
    struct timespec now;
    struct tm utc;
    char text[32];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    return nbi_buf_addf(line, "{\"ts\":\"%s.%03ldZ\"", text, now.tv_nsec / 1000000);
}

static nb_status access_line(const nbi_exchange *ex, nbi_buf *line)
{
    const nbi_trace *t = &ex->trace;
    char remote[80];
    remote_address(ex, remote);
    NB_TRY(nbi_trace_time(line));
    NB_TRY(nbi_buf_addf(line, ",\"remote\":\"%s\",\"method\":", remote));
    NB_TRY(nbi_json_quote(line, t->method, strlen(t->method)));
    NB_TRY(nbi_buf_addf(line, ",\"path\":"));
    NB_TRY(nbi_json_quote(line, t->path, strlen(t->path)));
    return nbi_buf_addf(line, ",\"status\":%u,\"bytes\":%llu,\"ms\":%.3f,\"request_id\":\"%s\"}",
                        t->status ? t->status : 499, (unsigned long long)t->bytes,
                        (double)(nbi_now_ns() - ex->begin_ns) / 1e6, t->id);
}

/* What an ended job adds to counters and the request log. */
static void end_job(nbi_exchange *ex, nbi_buf *line)
{
    nbi_server *server = ex->server;
    const nbi_job *job = ex->job;
    for (uint32_t i = 0; i < job->n_choices; i++) {
        const nbi_choice *c = &job->choices[i];
        if (c->has_reasoning) atomic_fetch_add(&server->reasoning_tokens, c->n_reasoning);
    }
    if (!server->request_log || !job->n_choices || job->count == NB_COUNT_NONE) return;
    if (nbi_request_line(ex, server->options.log_content, line) == NB_OK) {
        nbi_linelog_write(server->request_log, line->data, line->len);
    }
}

void nbi_trace_end(nbi_exchange *ex)
{
    nbi_linelog *log = ex->server->access_log;
    nbi_buf line = {0};
    if (!ex->trace.status) atomic_fetch_add(&counts_of(ex)->requests, 1);
    if (log && access_line(ex, &line) == NB_OK) nbi_linelog_write(log, line.data, line.len);
    nbi_buf_clear(&line);
    if (ex->job) end_job(ex, &line);
    nbi_buf_free(&line);
}
