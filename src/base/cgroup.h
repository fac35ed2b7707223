/* What the machine and the control groups (v1, v2 or both) leave to this process. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `root` is put before /proc and the mount points that /proc/self/mountinfo names: "" for this
 * machine, a folder for a recorded tree (tests). Every group from this process's own up to the
 * mounted one is asked; the tightest wins. Page cache of a group counts as free: the kernel gives
 * it back. */

/* Bytes; 0 when neither /proc/meminfo nor a group says anything. */
uint64_t nbi_memory_available_under(const char *root);

/* CPU time the groups grant per second of wall time, in thousandths of a CPU; 0 when unlimited. */
uint64_t nbi_cpu_quota_milli_under(const char *root);

#ifdef __cplusplus
}
#endif
