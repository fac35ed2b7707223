/* Cross-origin requests (see cors.h). Called by http.c and exchange.c. */
#include "server/cors.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

#define MAX_AGE "600" /* seconds for which a browser need not ask again */

nb_status nbi_server_check_origin(const char *origin, nb_error *err)
{
    const char *host = strstr(origin, "://");
    bool fits = strcmp(origin, "*") == 0 || (host && host > origin && host[3]);
    for (const char *c = host ? host + 3 : origin; fits && *c; c++) {
        fits = isgraph((unsigned char)*c) && !strchr("/?#@\"", *c);
    }
    if (fits) return NB_OK;
    return nbi_fail(err, NB_INVALID,
                    "--cors-origin: \"%s\" is not an origin, expected * or scheme://host[:port] "
                    "without a path",
                    origin);
}

static const char *header(const nbi_exchange *ex, const char *name)
{
    return MHD_lookup_connection_value(ex->conn, MHD_HEADER_KIND, name);
}

/* What the reply says about the origin of the request; NULL: nothing. */
static const char *allowed(const nbi_exchange *ex)
{
    const nbi_server_options *o = &ex->server->options;
    const char *origin = o->n_cors_origins ? header(ex, "Origin") : NULL;
    for (uint32_t i = 0; origin && i < o->n_cors_origins; i++) {
        if (strcmp(o->cors_origins[i], "*") == 0) return "*";
        if (strcasecmp(o->cors_origins[i], origin) == 0) return origin;
    }
    return NULL;
}

bool nbi_cors_is_preflight(const nbi_exchange *ex, const char *method)
{
    return strcmp(method, "OPTIONS") == 0 && header(ex, "Access-Control-Request-Method") &&
           allowed(ex);
}

void nbi_cors_add_headers(const nbi_exchange *ex, struct MHD_Response *response)
{
    const char *origin = allowed(ex);
    if (!ex->server->options.n_cors_origins) return;
    MHD_add_response_header(response, "Vary", "Origin");
    if (!origin) return;
    MHD_add_response_header(response, "Access-Control-Allow-Origin", origin);
    MHD_add_response_header(response, "Access-Control-Expose-Headers", "Retry-After, X-Request-Id");
}

enum MHD_Result nbi_cors_reply_preflight(nbi_exchange *ex)
{
    const char *wanted = header(ex, "Access-Control-Request-Headers");
    struct MHD_Response *response =
        MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    if (!response) return MHD_NO;
    nbi_cors_add_headers(ex, response);
    MHD_add_response_header(response, "Access-Control-Allow-Methods", "GET, HEAD, POST");
    /* Whatever the client's library sends along: keys are checked, nothing else gives power. */
    if (wanted) MHD_add_response_header(response, "Access-Control-Allow-Headers", wanted);
    MHD_add_response_header(response, "Access-Control-Max-Age", MAX_AGE);
    enum MHD_Result result = MHD_queue_response(ex->conn, MHD_HTTP_NO_CONTENT, response);
    MHD_destroy_response(response);
    return result;
}
