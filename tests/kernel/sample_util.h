/* The sampler in float64, for the tests of every backend. */
#pragma once

#include "operator_util.h"

typedef struct sample_entry {
    double p;
    float logit;
    int32_t id;
} sample_entry;

/* No lists, no log-probabilities. */
nbi_sample_row sample_row_of(float t, int32_t k, float p, float m, uint64_t seed, uint64_t counter);

/* Sorted candidates after the filters; their number. Probabilities in float64. */
uint32_t sample_oracle(const float *x, uint32_t n, const nbi_sample_row *row, sample_entry *e);

/* Is `id` what u gives among the first n candidates, up to rounding of the running sums? */
bool sample_drawn(const sample_entry *e, uint32_t n, double u, int32_t id);

/* sample_drawn for the oracle's candidates; one more or less is allowed, because float32
 * probabilities may fall on the other side of a filter's edge. x are the logits after all changes.
 */
bool sample_agrees(const float *x, uint32_t n_valid, const nbi_sample_row *row, int32_t id);
