/* The routes of the HTTP surface. */
#pragma once

#include "server/exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A path, or with `prefix` everything behind it. `get` and `post` answer at once, `surface` runs a
 * job on the body of a POST (and there is no `post` then). */
struct nbi_route {
    const char *path;
    bool prefix;
    bool open;       /* no API key needed */
    bool when_ready; /* 503 until the model is loaded */
    bool page;       /* of the web page (page.h): not there with --no-ui */
    /* Appends the JSON of the reply and returns its HTTP status; 0 with ex->error filled. */
    unsigned (*get)(nbi_exchange *ex, nbi_buf *out);
    /* The same for a POST; `body` is its object, NULL when nothing was sent. */
    unsigned (*post)(nbi_exchange *ex, const json_t *body, nbi_buf *out);
    const nbi_surface *surface;
};

/* The table of routes. */
uint32_t nbi_http_n_routes(void);
const nbi_route *nbi_http_route(uint32_t i); /* NULL behind the last */
uint32_t nbi_http_route_index(const nbi_route *route);

unsigned nbi_get_health(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_get_models(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_get_model(nbi_exchange *ex, nbi_buf *out);
/* info.c */
unsigned nbi_get_ping(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_get_version(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_get_model_info(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_get_server_info(nbi_exchange *ex, nbi_buf *out);
/* control.c */
unsigned nbi_get_flush_cache(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_post_flush_cache(nbi_exchange *ex, const json_t *body, nbi_buf *out);
unsigned nbi_post_abort_request(nbi_exchange *ex, const json_t *body, nbi_buf *out);
unsigned nbi_post_reset_prefix_cache(nbi_exchange *ex, const json_t *body, nbi_buf *out);
/* loads.c */
unsigned nbi_get_loads(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_get_load(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_get_server_load(nbi_exchange *ex, nbi_buf *out);
/* profiling.c */
unsigned nbi_get_start_profile(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_post_start_profile(nbi_exchange *ex, const json_t *body, nbi_buf *out);
unsigned nbi_get_stop_profile(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_post_stop_profile(nbi_exchange *ex, const json_t *body, nbi_buf *out);
/* openapi.c */
unsigned nbi_get_openapi(nbi_exchange *ex, nbi_buf *out);

#ifdef __cplusplus
}
#endif
