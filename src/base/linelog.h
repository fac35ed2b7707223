/* A file of lines that never holds its writers up: nbi_linelog_write() copies into a bounded buffer
 * and a thread of its own writes the file. What does not fit, and what the file does not take (full
 * disk, closed pipe), is dropped and counted. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_linelog nbi_linelog;

/* `path` is appended to and made when absent; "-" is standard output. `name` is what messages call
 * it ("--access-log"); both strings must live as long as the log. NB_IO names the file. */
nb_status nbi_linelog_open(nbi_linelog **out, const char *path, const char *name, nb_error *err);

/* Queues a line (n bytes without its newline). Any thread; takes no time worth mentioning. */
void nbi_linelog_write(nbi_linelog *log, const char *line, size_t n);

/* Opens the path anew before the next line, for log rotation. When that fails the old file stays in
 * use and a warning is logged. Any thread. */
void nbi_linelog_reopen(nbi_linelog *log);

/* Lines lost so far. NULL: 0. */
uint64_t nbi_linelog_dropped(const nbi_linelog *log);

/* Waits until what is queued is written, at most a second. NULL is fine. */
void nbi_linelog_flush(nbi_linelog *log);

/* Writes what is queued, waiting a second for a file that does not take it; clears the pointer.
 * NULL is fine. */
void nbi_linelog_close(nbi_linelog **log);

#ifdef __cplusplus
}
#endif
