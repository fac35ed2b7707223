/* The web page: GET / and its files below /ui/, the tail of the log. --no-ui switches all of it
 * off. */
#pragma once

#include "server/exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Appends the reply, as in nbi_route. */
unsigned nbi_get_page(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_get_page_file(nbi_exchange *ex, nbi_buf *out);
unsigned nbi_get_page_log(nbi_exchange *ex, nbi_buf *out);

/* What the browser may do on the page: load its own files, call this server, nothing else. */
void nbi_page_add_headers(struct MHD_Response *response);

#ifdef __cplusplus
}
#endif
