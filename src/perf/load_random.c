/* splitmix64; Box-Muller; Marsaglia and Tsang's method for the gamma distribution. */
#include "perf/load_random.h"

#include <math.h>

uint64_t nbi_load_random(nbi_load_rng *rng)
{
    uint64_t z = rng->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double nbi_load_random_unit(nbi_load_rng *rng)
{
    return (double)(nbi_load_random(rng) >> 11) * 0x1p-53;
}

uint32_t nbi_load_random_range(nbi_load_rng *rng, uint32_t low, uint32_t high)
{
    uint64_t n = (uint64_t)high - low + 1;
    return low + (uint32_t)(((nbi_load_random(rng) >> 32) * n) >> 32);
}

static double normal(nbi_load_rng *rng)
{
    double u = 1 - nbi_load_random_unit(rng), v = nbi_load_random_unit(rng);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

double nbi_load_random_gamma(nbi_load_rng *rng, double shape)
{
    if (shape == 1) return -log(1 - nbi_load_random_unit(rng));
    /* Below 1: draw for shape + 1 and scale by a power of a uniform number. */
    double boost = shape < 1 ? pow(1 - nbi_load_random_unit(rng), 1 / shape) : 1;
    double d = (shape < 1 ? shape + 1 : shape) - 1.0 / 3, c = 1 / sqrt(9 * d);
    for (;;) {
        double x = normal(rng), v = 1 + c * x;
        if (v <= 0) continue;
        v = v * v * v;
        double u = 1 - nbi_load_random_unit(rng);
        if (log(u) < 0.5 * x * x + d - d * v + d * log(v)) return d * v * boost / shape;
    }
}
