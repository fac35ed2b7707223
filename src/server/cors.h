/* Cross-origin requests of browsers: off unless origins are named. */
#pragma once

#include "server/exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An OPTIONS request by which a browser asks for leave, with an origin that has it. */
bool nbi_cors_is_preflight(const nbi_exchange *ex, const char *method);
/* Its answer; no key is asked for, because browsers send none. */
enum MHD_Result nbi_cors_reply_preflight(nbi_exchange *ex);

/* On every other reply: lets the page read it when its origin may. */
void nbi_cors_add_headers(const nbi_exchange *ex, struct MHD_Response *response);

#ifdef __cplusplus
}
#endif
