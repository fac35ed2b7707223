/* Monotonic time from the kernel's vDSO. */
#include "base/clock.h"

#include <time.h>

uint64_t nbi_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t); /* cannot fail with this clock and a valid pointer */
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
