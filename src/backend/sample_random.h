/* Random numbers of the samplers: every backend draws with the same. Source: Salmon et al.,
 * "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), generator philox4x32-10. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

void nbi_philox4x32(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]);

/* u in [0, 1), 53 bits: key is the seed, the counter's low 64 bits are `counter`. */
double nbi_sample_uniform(uint64_t seed, uint64_t counter);

#ifdef __cplusplus
}
#endif
