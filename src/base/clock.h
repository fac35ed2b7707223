/* Monotonic time. */
#pragma once

#include <stdint.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

uint64_t nbi_now_ns(void);

/* A moment of nbi_now_ns(), for pthread_cond_clockwait(CLOCK_MONOTONIC) and conditions of that
 * clock. */
struct timespec nbi_timespec(uint64_t ns);

#ifdef __cplusplus
}
#endif
