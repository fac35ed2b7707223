/* Log lines to the sink of nb_log_set_sink(), and the last of them for who asks later. Safe from
 * any thread. One call, one line. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

void nbi_log(nb_log_level level, const char *fmt, ...) NBI_PRINTF(2, 3);

/* True when a line of this level would reach the sink: guards costly formatting. */
bool nbi_log_wants(nb_log_level level);

/* The tail: what the sink was given lately, but no debug lines, which may quote what clients sent.
 */
#define NBI_LOG_TAIL_LINES 200
#define NBI_LOG_TAIL_BYTES 512 /* of one line, which is cut */

typedef struct nbi_log_line {
    uint64_t n; /* of all such lines, from 0 */
    uint64_t unix_ms;
    nb_log_level level;
    char text[NBI_LOG_TAIL_BYTES]; /* valid UTF-8 if the line was */
} nbi_log_line;

/* The oldest line that is kept, number n or later; false when there is none. */
bool nbi_log_tail(uint64_t n, nbi_log_line *out);

#ifdef __cplusplus
}
#endif
