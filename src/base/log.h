/* Log lines to the sink of nb_log_set_sink(). Safe from any thread. One call, one line. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

void nbi_log(nb_log_level level, const char *fmt, ...) NBI_PRINTF(2, 3);

/* True when a line of this level would reach the sink: guards costly formatting. */
bool nbi_log_wants(nb_log_level level);

#ifdef __cplusplus
}
#endif
