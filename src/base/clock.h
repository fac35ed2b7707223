/* Monotonic time. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

uint64_t nbi_now_ns(void);

#ifdef __cplusplus
}
#endif
