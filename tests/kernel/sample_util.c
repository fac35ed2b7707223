/* See sample_util.h. */
#include "sample_util.h"

#include "backend/sample_random.h"

nbi_sample_row sample_row_of(float t, int32_t k, float p, float m, uint64_t seed, uint64_t counter)
{
    return (nbi_sample_row){.temperature = t,
                            .top_k = k,
                            .top_p = p,
                            .min_p = m,
                            .seed = seed,
                            .counter = counter,
                            .n_logprobs = -1};
}

static int by_rank(const void *a, const void *b)
{
    const sample_entry *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

uint32_t sample_oracle(const float *x, uint32_t n, const nbi_sample_row *row, sample_entry *e)
{
    double max = -INFINITY;
    for (uint32_t i = 0; i < n; i++) max = fmax(max, (double)x[i]);
    for (uint32_t i = 0; i < n; i++)
        e[i] =
            (sample_entry){exp(((double)x[i] - max) / (double)row->temperature), x[i], (int32_t)i};
    qsort(e, n, sizeof *e, by_rank);
    if (row->top_k > 0 && (uint32_t)row->top_k < n) n = (uint32_t)row->top_k;
    double sum = 0, mass = 0;
    for (uint32_t i = 0; i < n; i++) sum += e[i].p;
    if (row->top_p < 1) {
        uint32_t keep = 0;
        while (keep < n && (keep == 0 || mass < (double)row->top_p * sum)) mass += e[keep++].p;
        n = keep;
    }
    if (row->min_p > 0) {
        uint32_t keep = 0;
        while (keep < n && e[keep].p >= (double)row->min_p) keep++;
        n = keep;
    }
    return n;
}

bool sample_drawn(const sample_entry *e, uint32_t n, double u, int32_t id)
{
    double sum = 0, mass = 0;
    for (uint32_t i = 0; i < n; i++) sum += e[i].p;
    for (uint32_t i = 0; i < n; i++) {
        const double before = mass / sum;
        mass += e[i].p;
        if (e[i].id == id && before - 1e-5 <= u && u < mass / sum + 1e-5) return true;
    }
    return false;
}

bool sample_agrees(const float *x, uint32_t n_valid, const nbi_sample_row *row, int32_t id)
{
    sample_entry *e = malloc(n_valid * sizeof *e);
    const uint32_t n = sample_oracle(x, n_valid, row, e);
    const double u = nbi_sample_uniform(row->seed, row->counter);
    const bool agrees = sample_drawn(e, n, u, id) || (n > 1 && sample_drawn(e, n - 1, u, id)) ||
                        (n < n_valid && sample_drawn(e, n + 1, u, id));
    free(e);
    return agrees;
}
