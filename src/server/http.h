/* The routes of the HTTP surface. */
#pragma once

#include "server/exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A path, or with `prefix` everything behind it. Either `get` answers at once, or `surface` runs a
 * job on the body of a POST. */
struct nbi_route {
    const char *path;
    bool prefix;
    bool open;       /* no API key needed */
    bool when_ready; /* 503 until the model is loaded */
    /* Appends the JSON of the reply and returns its HTTP status; 0 with ex->error filled. */
    unsigned (*get)(nbi_exchange *ex, nbi_buf *out);
    const nbi_surface *surface;
};

unsigned nbi_get_health(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_get_models(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_get_model(nbi_exchange *ex, nbi_buf *out);

#ifdef __cplusplus
}
#endif
