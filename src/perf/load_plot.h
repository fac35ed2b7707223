/* The picture of a load run. */
#pragma once

#include "perf/load_run.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Six panels: distribution of TTFT and of ITL, both over time, output tokens per second, requests
 * under way. To the end of `out`, as SVG. */
nb_status nbi_load_plot(nbi_buf *out, const nbi_load_result *result, nb_error *err);

#ifdef __cplusplus
}
#endif
