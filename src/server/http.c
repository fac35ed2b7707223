/* libmicrohttpd: threads, routing, checks on headers, collection of bodies. Called by server.c.
 *
 * A reply that is decided before the body has come waits for the body (and drops it), so that the
 * client reads the reply and the connection stays usable; a body too large to wait for ends the
 * connection. */
#include "server/http.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>

#include "base/log.h"
#include "server/client.h"
#include "server/cors.h"
#include "server/metrics.h"
#include "server/page.h"

#define DISCARD_MAX    ((uint64_t)1 << 30) /* body bytes read only to be dropped */
#define POOL_EXTRA     8192u               /* of a connection's memory that headers do not get */
#define TLS_PRIORITIES "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2"
#define OTHER_FILES    64u /* descriptors kept for everything but connections */

static const nbi_route routes[] = {
    {.path = "/health", .open = true, .get = nbi_get_health},
    {.path = "/health_generate", .open = true, .when_ready = true, .surface = &nbi_surface_health},
    {.path = "/metrics", .open = true, .get = nbi_get_metrics},
    {.path = "/v1/models", .when_ready = true, .get = nbi_get_models},
    {.path = "/v1/models/", .prefix = true, .when_ready = true, .get = nbi_get_model},
    {.path = "/v1/completions", .when_ready = true, .surface = &nbi_surface_completions},
    {.path = "/v1/chat/completions", .when_ready = true, .surface = &nbi_surface_chat},
    {.path = "/v1/responses", .when_ready = true, .surface = &nbi_surface_responses},
    {.path = "/v1/messages", .when_ready = true, .surface = &nbi_surface_messages},
    {.path = "/v1/messages/count_tokens", .when_ready = true, .surface = &nbi_surface_count_tokens},
    {.path = "/generate", .when_ready = true, .surface = &nbi_surface_generate},
    {.path = "/tokenize", .when_ready = true, .surface = &nbi_surface_tokenize},
    {.path = "/v1/tokenize", .when_ready = true, .surface = &nbi_surface_tokenize},
    {.path = "/detokenize", .when_ready = true, .surface = &nbi_surface_detokenize},
    {.path = "/v1/detokenize", .when_ready = true, .surface = &nbi_surface_detokenize},
    {.path = "/model_info", .when_ready = true, .get = nbi_get_model_info},
    {.path = "/get_model_info", .when_ready = true, .get = nbi_get_model_info},
    {.path = "/server_info", .when_ready = true, .get = nbi_get_server_info},
    {.path = "/get_server_info", .when_ready = true, .get = nbi_get_server_info},
    {.path = "/flush_cache",
     .when_ready = true,
     .get = nbi_get_flush_cache,
     .post = nbi_post_flush_cache},
    {.path = "/reset_prefix_cache", .when_ready = true, .post = nbi_post_reset_prefix_cache},
    {.path = "/v1/loads", .when_ready = true, .get = nbi_get_loads},
    {.path = "/get_load", .when_ready = true, .get = nbi_get_load},
    {.path = "/load", .when_ready = true, .get = nbi_get_server_load},
    {.path = "/start_profile",
     .when_ready = true,
     .get = nbi_get_start_profile,
     .post = nbi_post_start_profile},
    {.path = "/stop_profile",
     .when_ready = true,
     .get = nbi_get_stop_profile,
     .post = nbi_post_stop_profile},
    {.path = "/abort_request", .when_ready = true, .post = nbi_post_abort_request},
    {.path = "/version", .get = nbi_get_version},
    {.path = "/ping", .open = true, .get = nbi_get_ping},
    {.path = "/openapi.json", .open = true, .get = nbi_get_openapi},
    {.path = "/", .open = true, .page = true, .get = nbi_get_page},
    {.path = "/ui/log", .page = true, .get = nbi_get_page_log},
    {.path = "/ui/", .prefix = true, .open = true, .page = true, .get = nbi_get_page_file},
};

uint32_t nbi_http_n_routes(void)
{
    return sizeof routes / sizeof *routes;
}

const nbi_route *nbi_http_route(uint32_t i)
{
    return i < nbi_http_n_routes() ? &routes[i] : NULL;
}

uint32_t nbi_http_route_index(const nbi_route *route)
{
    return (uint32_t)(route - routes);
}

/* ---------------------------------------------------------------- routing */

static const nbi_route *find_route(const nbi_server *server, const char *url, const char **rest)
{
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        size_t n = strlen(routes[i].path);
        bool hit = routes[i].prefix ? strncmp(url, routes[i].path, n) == 0 && url[n]
                                    : strcmp(url, routes[i].path) == 0;
        if (!hit || (routes[i].page && server->options.no_ui)) continue;
        *rest = url + n;
        return &routes[i];
    }
    return NULL;
}

static nb_status check_route(nbi_exchange *ex, const char *url, const char *method)
{
    ex->route = find_route(ex->server, url, &ex->rest);
    if (!ex->route) {
        return nbi_api_fail(&ex->error, 404, "unknown_url", NULL, "there is no %.100s here", url);
    }
    bool get = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
    const nbi_surface *surface = ex->route->surface;
    bool takes_get = ex->route->get || (surface && surface->bodyless);
    bool takes_post = surface || ex->route->post;
    ex->is_post = strcmp(method, "POST") == 0;
    if (ex->is_post ? takes_post : get && takes_get) return NB_OK;
    ex->allow = !takes_post ? "GET, HEAD" : takes_get ? "GET, HEAD, POST" : "POST";
    return nbi_api_fail(&ex->error, 405, "method_not_allowed", NULL, "%.100s takes %s, not %.32s",
                        url, ex->allow, method);
}

/* ---------------------------------------------------------------- headers */

static const char *header(const nbi_exchange *ex, const char *name)
{
    return MHD_lookup_connection_value(ex->conn, MHD_HEADER_KIND, name);
}

/* Behind "Authorization: Bearer", or in "X-Api-Key" as Anthropic's clients send it; NULL when there
 * is none. */
static const char *given_key(const nbi_exchange *ex)
{
    const char *given = header(ex, "Authorization");
    if (!given || strncasecmp(given, "Bearer ", 7) != 0) return header(ex, "X-Api-Key");
    return given + 7 + strspn(given + 7, " ");
}

static nb_status check_key(nbi_exchange *ex)
{
    nbi_keys *keys = ex->server->keys;
    const char *given = given_key(ex);
    if (ex->route->open || !nbi_keys_count(keys)) {
        ex->client = nbi_client_of(ex, NULL);
        return NB_OK;
    }
    if (!given) {
        return nbi_api_fail(&ex->error, 401, "invalid_api_key", NULL,
                            "this server needs an API key: Authorization: Bearer KEY");
    }
    if (nbi_keys_match(keys, given)) {
        ex->client = nbi_client_of(ex, given);
        return NB_OK;
    }
    return nbi_api_fail(&ex->error, 401, "invalid_api_key", NULL, "the API key is not known here");
}

static nb_status check_phase(nbi_exchange *ex)
{
    nbi_server *server = ex->server;
    int phase = atomic_load(&server->phase);
    if (!ex->route->when_ready || phase == NBI_SERVER_READY) return NB_OK;
    if (phase >= NBI_SERVER_DRAINING) {
        return nbi_api_fail(&ex->error, 503, "shutting_down", NULL, "the server is shutting down");
    }
    uint64_t done = atomic_load(&server->load_done), total = atomic_load(&server->load_total);
    return nbi_api_fail(&ex->error, 503, "loading", NULL,
                        "the model is loading (%.0f %%), see /health",
                        total ? 100.0 * (double)done / (double)total : 0.0);
}

/* "application/json" or "application/anything+json", parameters aside. */
static bool is_json_type(const char *type)
{
    size_t n = strcspn(type, "; \t");
    if (n == 16 && strncasecmp(type, "application/json", n) == 0) return true;
    return n > 5 && strncasecmp(type + n - 5, "+json", 5) == 0;
}

static bool is_bodyless(const nbi_exchange *ex)
{
    return ex->route && ex->route->surface && ex->route->surface->bodyless;
}

static nb_status check_body_headers(nbi_exchange *ex)
{
    const char *type = header(ex, "Content-Type"), *encoding = header(ex, "Content-Encoding");
    const char *length = header(ex, "Content-Length");
    uint64_t max = ex->server->options.max_body_bytes;
    if (!ex->is_post || is_bodyless(ex)) return NB_OK;
    if (type && !is_json_type(type)) {
        return nbi_api_fail(&ex->error, 415, "unsupported_media_type", NULL,
                            "Content-Type is %.64s, expected application/json", type);
    }
    if (encoding && strcasecmp(encoding, "identity") != 0) {
        return nbi_api_fail(&ex->error, 415, "unsupported_media_type", NULL,
                            "Content-Encoding %.64s is not supported", encoding);
    }
    if (ex->route->surface && !length && !header(ex, "Transfer-Encoding")) {
        return nbi_api_fail(&ex->error, 411, "length_required", NULL,
                            "the request has neither Content-Length nor a chunked body");
    }
    if (length && strtoull(length, NULL, 10) > max) {
        return nbi_api_fail(&ex->error, 413, "request_too_large", NULL,
                            "the body has %.20s bytes, at most %llu are read", length,
                            (unsigned long long)max);
    }
    return NB_OK;
}

/* The reply is decided and the body is not worth waiting for, or the client asks before it sends.
 */
static bool reply_at_once(const nbi_exchange *ex)
{
    const char *length = header(ex, "Content-Length");
    if (header(ex, "Expect")) return true;
    return length && strtoull(length, NULL, 10) > DISCARD_MAX;
}

/* ---------------------------------------------------------------- requests */

static enum MHD_Result first_call(nbi_exchange *ex, const char *url, const char *method)
{
    nbi_peers_step(&ex->server->peers, ex->conn, NBI_PEER_BODY, 0);
    ex->preflight = nbi_cors_is_preflight(ex, method);
    if (ex->preflight) return MHD_YES;
    if (check_route(ex, url, method) == NB_OK && check_key(ex) == NB_OK &&
        check_phase(ex) == NB_OK && check_body_headers(ex) == NB_OK) {
        return MHD_YES;
    }
    return reply_at_once(ex) ? nbi_exchange_reply_error(ex) : MHD_YES;
}

static enum MHD_Result take_body(nbi_exchange *ex, const char *data, size_t n)
{
    if (ex->error.http == 0 && ex->is_post && !is_bodyless(ex)) {
        nb_status status = nbi_exchange_add_body(ex, data, n);
        if (status == NB_OK) return MHD_YES;
        nbi_exchange_drop_body(ex);
        if (status == NB_BUSY) {
            nbi_api_fail(&ex->error, 503, "too_many_bodies", NULL,
                         "the bodies of other requests fill the %llu bytes that are kept for them",
                         (unsigned long long)ex->server->options.max_buffered_bytes);
        } else if (status == NB_TOO_LARGE) {
            nbi_api_fail(&ex->error, 413, "request_too_large", NULL,
                         "the body is larger than the %llu bytes that are read",
                         (unsigned long long)ex->server->options.max_body_bytes);
        } else {
            nbi_api_no_memory(&ex->error, "the request body");
        }
    }
    ex->discarded += n;
    return ex->discarded > DISCARD_MAX ? MHD_NO : MHD_YES;
}

/* A POST that is answered at once. */
static unsigned answer_post(nbi_exchange *ex, nbi_buf *out)
{
    json_t *body = NULL;
    if (ex->body.len && nbi_body_parse(&body, ex->body.data, ex->body.len, &ex->error) != NB_OK) {
        return 0;
    }
    unsigned http = ex->route->post(ex, body, out);
    json_decref(body);
    return http;
}

static enum MHD_Result last_call(nbi_exchange *ex)
{
    nbi_buf out = {0};
    atomic_store(&ex->started, true);
    if (ex->preflight) return nbi_cors_reply_preflight(ex);
    nbi_peers_step(&ex->server->peers, ex->conn, NBI_PEER_WORK, 0);
    if (ex->error.http) return nbi_exchange_reply_error(ex);
    if (ex->job) return nbi_exchange_continue(ex);
    if (check_phase(ex) != NB_OK) return nbi_exchange_reply_error(ex); /* since its headers came */
    if (ex->route->surface) return nbi_exchange_begin(ex, ex->route->surface);
    unsigned http = ex->is_post ? answer_post(ex, &out) : ex->route->get(ex, &out);
    if (http) return nbi_exchange_reply(ex, http, &out);
    nbi_buf_free(&out);
    return nbi_exchange_reply_error(ex);
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *conn, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *n_data, void **slot)
{
    nbi_exchange *ex = *slot;
    if (!ex) {
        *slot = ex = nbi_exchange_create(cls, conn);
        if (!ex) return MHD_NO;
        ex->http_1_1 = strcmp(version, MHD_HTTP_VERSION_1_1) == 0;
        nbi_trace_begin(ex, url, method);
        return first_call(ex, url, method);
    }
    if (*n_data) {
        enum MHD_Result result = take_body(ex, data, *n_data);
        *n_data = 0;
        return result;
    }
    return last_call(ex);
}

static void on_completed(void *cls, struct MHD_Connection *conn, void **slot,
                         enum MHD_RequestTerminationCode why)
{
    nbi_server *server = cls;
    (void)why;
    if (*slot) nbi_exchange_destroy(*slot);
    *slot = NULL;
    nbi_peers_step(&server->peers, conn, NBI_PEER_KEPT, 0);
}

/* ---------------------------------------------------------------- start */

static void on_log(void *cls, const char *fmt, va_list args) NBI_PRINTF(2, 0);
static void on_log(void *cls, const char *fmt, va_list args)
{
    char line[512];
    (void)cls;
    int n = vsnprintf(line, sizeof line, fmt, args);
    while (n > 0 && n < (int)sizeof line && line[n - 1] == '\n') line[--n] = '\0';
    nbi_log(NB_LOG_DEBUG, "http: %s", line);
}

/* A decoded NUL would end the path there, and another route would answer. */
static size_t on_unescape(void *cls, struct MHD_Connection *conn, char *s)
{
    (void)cls;
    (void)conn;
    return strstr(s, "%00") ? strlen(s) : MHD_http_unescape(s);
}

static unsigned connection_limit(unsigned wanted)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return wanted;
    if (limit.rlim_cur >= (rlim_t)wanted + OTHER_FILES) return wanted;
    unsigned fits =
        limit.rlim_cur > 2 * OTHER_FILES ? (unsigned)limit.rlim_cur - OTHER_FILES : OTHER_FILES;
    if (fits >= wanted) return wanted;
    nbi_log(NB_LOG_WARN, "at most %u connections instead of %u: the limit of open files is %llu",
            fits, wanted, (unsigned long long)limit.rlim_cur);
    return fits;
}

static nb_status check_https(const nbi_server *server, nb_error *err)
{
    if (!server->tls || MHD_is_feature_supported(MHD_FEATURE_TLS) == MHD_YES) return NB_OK;
    return nbi_fail(err, NB_UNSUPPORTED,
                    "--ssl-certfile: this libmicrohttpd (%s) was built without GnuTLS",
                    MHD_get_version());
}

nb_status nbi_http_start(nbi_server *server, int listen_fd, nb_error *err)
{
    const nbi_server_options *o = &server->options;
    unsigned flags =
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ITC | MHD_USE_ERROR_LOG;
    struct MHD_OptionItem https[] = {
        {MHD_OPTION_HTTPS_PRIORITIES, 0, (void *)(uintptr_t)TLS_PRIORITIES},
        {MHD_OPTION_HTTPS_CERT_CALLBACK, 0, nbi_tls_callback()},
        {MHD_OPTION_END, 0, NULL},
    };
    NB_TRY(check_https(server, err));
    if (!server->tls) https[0].option = MHD_OPTION_END;
    if (server->tls) flags |= MHD_USE_TLS;
    size_t pool = (size_t)o->max_header_bytes + POOL_EXTRA;
    server->daemon =
        MHD_start_daemon(flags, 0, nbi_peers_accept, &server->peers, on_request, server, /* */
                         MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL, /* first: it hears the others */
                         MHD_OPTION_LISTEN_SOCKET, listen_fd,      /* */
                         MHD_OPTION_UNESCAPE_CALLBACK, on_unescape, NULL,                   /* */
                         MHD_OPTION_NOTIFY_COMPLETED, on_completed, server,                 /* */
                         MHD_OPTION_NOTIFY_CONNECTION, nbi_peers_notify, &server->peers,    /* */
                         MHD_OPTION_THREAD_POOL_SIZE, o->n_threads,                         /* */
                         MHD_OPTION_CONNECTION_LIMIT, connection_limit(o->max_connections), /* */
                         MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)o->idle_timeout_s,        /* */
                         MHD_OPTION_CONNECTION_MEMORY_LIMIT, pool,                          /* */
                         MHD_OPTION_STRICT_FOR_CLIENT, 1,                                   /* */
                         MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1,                              /* */
                         MHD_OPTION_ARRAY, https,                                           /* */
                         MHD_OPTION_END);
    if (!server->daemon) {
        return nbi_fail(err, NB_IO, "cannot start the HTTP server: %s", strerror(errno));
    }
    return NB_OK;
}
