/* What the memory gives to plain reads, for a server's shares of the floor. */
#pragma once

#include "nibble.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_bandwidth_watch nbi_bandwidth_watch;

/* A thread that waits until the engine has nothing to do, reads at most half a gigabyte of the
 * mapped weights twice, and tells the engine the rate of the second time. It begins again when a
 * request comes in between. Nothing is done, and *out is NULL, where the engine knows its
 * bandwidth. A failure is a line in the log: shares are then not known. */
void nbi_bandwidth_watch_start(nbi_bandwidth_watch **out, nb_engine *engine, const char *model_dir,
                               uint32_t n_threads);
/* Ends it within milliseconds, or what the disk takes for 32 MB. NULL is fine. */
void nbi_bandwidth_watch_stop(nbi_bandwidth_watch **watch);

#ifdef __cplusplus
}
#endif
