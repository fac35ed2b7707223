/* Distributions that any number of threads may add to without a lock: fixed bounds, counts, a sum.
 * Observing takes some nanoseconds. */
#pragma once

#include <stdatomic.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_histogram {
    const double *bounds; /* [n_bounds] ascending; the upper ends of the buckets, inclusive */
    uint32_t n_bounds;
    double unit; /* what one whole number of nbi_histogram_add() is worth: 1e-9 for nanoseconds */
    atomic_uint_fast64_t counts[NB_HISTOGRAM_BOUNDS_MAX + 1]; /* not cumulative */
    atomic_uint_fast64_t sum;
} nbi_histogram;

/* `bounds` must live as long; n_bounds <= NB_HISTOGRAM_BOUNDS_MAX. */
void nbi_histogram_init(nbi_histogram *h, const double *bounds, uint32_t n_bounds, double unit);

/* Observes `times` values of `value` units each. */
void nbi_histogram_add(nbi_histogram *h, uint64_t value, uint64_t times);

void nbi_histogram_read(const nbi_histogram *h, nb_histogram *out);

#ifdef __cplusplus
}
#endif
