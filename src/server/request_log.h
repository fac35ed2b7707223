/* One JSON line per request that the model worked on. Called by trace.c when the exchange ends. */
#pragma once

#include "server/exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Appends `{"ts":"2026-01-31T12:00:00.000Z"`. */
nb_status nbi_trace_time(nbi_buf *line);

/* Appends the line of ex->job. `content`: with the text of prompts and answers. */
nb_status nbi_request_line(const nbi_exchange *ex, bool content, nbi_buf *line);

#ifdef __cplusplus
}
#endif
