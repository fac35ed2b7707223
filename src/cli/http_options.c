/* Options of the HTTP side. Called by cmd_serve.c. */
#include "cli/http_options.h"

#include <stdlib.h>
#include <string.h>

#define SECONDS_MAX     86400u
#define CONNECTIONS_MAX 1000000u
#define HEADERS_MIN     4096u
#define HEADERS_MAX     (1u << 20)

void nbi_http_options_init(nbi_http_options *o, nbi_server_options *server)
{
    *o = (nbi_http_options){.server = server, .port = server->port};
}

static int check_range(const nbi_command *command, const char *flag, uint32_t value, uint32_t min,
                       uint32_t max)
{
    if (value >= min && value <= max) return -1;
    return nbi_cli_usage(command, "--%s: found %u, expected %u to %u", flag, value, min, max);
}

static int check_ranges(const nbi_http_options *o, const nbi_command *command)
{
    const nbi_server_options *s = o->server;
    const struct {
        const char *flag;
        uint32_t value, min, max;
    } ranges[] = {
        {"header-timeout", s->header_timeout_s, 1, SECONDS_MAX},
        {"body-timeout", s->body_timeout_s, 1, SECONDS_MAX},
        {"request-timeout", s->request_timeout_s, 0, SECONDS_MAX},
        {"idle-timeout", s->idle_timeout_s, 1, SECONDS_MAX},
        {"max-header-bytes", s->max_header_bytes, HEADERS_MIN, HEADERS_MAX},
        {"max-connections", s->max_connections, 1, CONNECTIONS_MAX},
        {"max-connections-per-address", s->max_connections_per_address, 0, CONNECTIONS_MAX},
        {"http-threads", s->n_threads, 1, 1024},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        int status =
            check_range(command, ranges[i].flag, ranges[i].value, ranges[i].min, ranges[i].max);
        if (status >= 0) return status;
    }
    return -1;
}

/* libmicrohttpd gives every thread the same share of the connections, at least one. */
static int check_combinations(const nbi_http_options *o, const nbi_command *command)
{
    const nbi_server_options *s = o->server;
    if (s->ssl_keyfile && !s->ssl_certfile) {
        return nbi_cli_usage(command, "--ssl-keyfile needs --ssl-certfile");
    }
    if (s->max_connections < s->n_threads) {
        return nbi_cli_usage(command, "--max-connections: %u is less than the %u of --http-threads",
                             s->max_connections, s->n_threads);
    }
    if (s->max_buffered_bytes && s->max_buffered_bytes < s->max_body_bytes) {
        return nbi_cli_usage(command,
                             "--max-buffered-bytes: %llu is less than one body of "
                             "--max-body-bytes, %llu",
                             (unsigned long long)s->max_buffered_bytes,
                             (unsigned long long)s->max_body_bytes);
    }
    return -1;
}

static int take_keys(nbi_http_options *o, const nbi_command *command)
{
    const char *environment = getenv("NIBBLE_API_KEY");
    size_t n = o->keys.n;
    for (size_t i = 0; i < n; i++) {
        if (!o->keys.items[i][0]) return nbi_cli_usage(command, "--api-key: the key is empty");
    }
    o->all_keys = nbi_calloc(n + 1, sizeof *o->all_keys);
    if (!o->all_keys) return nbi_cli_usage(command, "no memory for the keys");
    if (n) memcpy(o->all_keys, o->keys.items, n * sizeof *o->all_keys);
    if (environment && environment[0]) o->all_keys[n++] = environment;
    o->server->api_keys = o->all_keys;
    o->server->n_api_keys = (uint32_t)n;
    return -1;
}

int nbi_http_options_apply(nbi_http_options *o, const nbi_command *command)
{
    nb_error err = {0};
    if (o->port > 65535) {
        return nbi_cli_usage(command, "--port: %u is more than 65535", o->port);
    }
    for (size_t i = 0; i < o->origins.n; i++) {
        if (nbi_server_check_origin(o->origins.items[i], &err) != NB_OK) {
            return nbi_cli_usage(command, "%s", err.text);
        }
    }
    o->server->port = (uint16_t)o->port;
    o->server->cors_origins = o->origins.items;
    o->server->n_cors_origins = (uint32_t)o->origins.n;
    int status = check_ranges(o, command);
    if (status < 0) status = check_combinations(o, command);
    return status < 0 ? take_keys(o, command) : status;
}

void nbi_http_options_free(nbi_http_options *o)
{
    nbi_opt_list_free(&o->keys);
    nbi_opt_list_free(&o->origins);
    nbi_free(o->all_keys);
    o->all_keys = NULL;
}
