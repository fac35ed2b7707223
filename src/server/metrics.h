/* GET /metrics: what Prometheus reads. Called by http.c.
 *
 * Names are those of vLLM and SGLang under the prefix "nibble:"; docs/api.md lists them. */
#pragma once

#include "server/http.h"

#ifdef __cplusplus
extern "C" {
#endif

unsigned nbi_get_metrics(nbi_exchange *ex, nbi_buf *out);

#ifdef __cplusplus
}
#endif
