/* Prometheus series of the process: CPU time, memory, threads, descriptors, start. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

nb_status nbi_process_metrics_write(nbi_buf *out);

#ifdef __cplusplus
}
#endif
