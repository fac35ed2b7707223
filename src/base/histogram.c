/* Histograms with atomic counts. A reader may see a count whose value is not in the sum yet. */
#include "base/histogram.h"

void nbi_histogram_init(nbi_histogram *h, const double *bounds, uint32_t n_bounds, double unit)
{
    NB_ASSERT(n_bounds <= NB_HISTOGRAM_BOUNDS_MAX);
    h->bounds = bounds;
    h->n_bounds = n_bounds;
    h->unit = unit;
    for (uint32_t i = 0; i <= n_bounds; i++) atomic_init(&h->counts[i], 0);
    atomic_init(&h->sum, 0);
}

/* First bucket whose end is not below x. */
static uint32_t bucket_of(const nbi_histogram *h, double x)
{
    uint32_t low = 0, high = h->n_bounds;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (h->bounds[middle] < x) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

void nbi_histogram_add(nbi_histogram *h, uint64_t value, uint64_t times)
{
    uint32_t bucket = bucket_of(h, (double)value * h->unit);
    atomic_fetch_add_explicit(&h->counts[bucket], times, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->sum, value * times, memory_order_relaxed);
}

void nbi_histogram_read(const nbi_histogram *h, nb_histogram *out)
{
    *out = (nb_histogram){.bounds = h->bounds, .n_bounds = h->n_bounds};
    for (uint32_t i = 0; i <= h->n_bounds; i++) {
        out->counts[i] = atomic_load_explicit(&h->counts[i], memory_order_relaxed);
    }
    out->sum = (double)atomic_load_explicit(&h->sum, memory_order_relaxed) * h->unit;
}
