/* Random numbers of the load tools: the same seed gives the same prompts and arrival times on every
 * machine. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_load_rng {
    uint64_t state; /* any value is a seed */
} nbi_load_rng;

uint64_t nbi_load_random(nbi_load_rng *rng);
/* Uniform in [0, 1). */
double nbi_load_random_unit(nbi_load_rng *rng);
/* Uniform in [low, high], low <= high. */
uint32_t nbi_load_random_range(nbi_load_rng *rng, uint32_t low, uint32_t high);
/* Gamma distribution of mean 1: shape 1 is exponential (a Poisson process), below 1 burstier, above
 * 1 more even. shape > 0. */
double nbi_load_random_gamma(nbi_load_rng *rng, double shape);

#ifdef __cplusplus
}
#endif
