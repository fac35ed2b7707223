/* Tables of runners by rows: lookup, and the choice from measured times. */
#include "moe/table.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MARGIN 0.97 /* of the time of an earlier one: below it is faster */

bool nbi_moe_same_class(const nbi_moe_runner_ops *a, const nbi_moe_runner_ops *b)
{
    if (a == b) return true;
    return a->numerics && b->numerics && strcmp(a->numerics, b->numerics) == 0 &&
           a->prepare == b->prepare && a->release == b->release;
}

void nbi_moe_table_one(nbi_moe_table *out, const nbi_moe_runner_ops *r)
{
    *out = (nbi_moe_table){.n = 1};
    out->buckets[0] = (nbi_moe_bucket){.rows = UINT32_MAX, .runner = r};
}

const nbi_moe_runner_ops *nbi_moe_table_runner(const nbi_moe_table *t, uint32_t rows)
{
    uint32_t i = 0;
    while (i + 1 < t->n && rows > t->buckets[i].rows) i++;
    return t->buckets[i].runner;
}

bool nbi_moe_table_has(const nbi_moe_table *t, const nbi_moe_runner_ops *r)
{
    for (uint32_t i = 0; i < t->n; i++)
        if (t->buckets[i].runner == r) return true;
    return false;
}

size_t nbi_moe_table_workspace(const nbi_moe_table *t, const nbi_backend *b,
                               const nbi_moe_shape *shape, uint32_t max_rows)
{
    size_t most = 0;
    uint32_t above = 0; /* the bucket begins behind it */
    for (uint32_t i = 0; i < t->n && above < max_rows; i++) {
        const nbi_moe_bucket *k = &t->buckets[i];
        const uint32_t rows = k->rows < max_rows ? k->rows : max_rows;
        const size_t bytes = k->runner->workspace_bytes(b, shape, rows);
        if (bytes > most) most = bytes;
        above = k->rows;
    }
    return most;
}

void nbi_moe_table_join(nbi_moe_table *t)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->n; i++) {
        if (n && t->buckets[n - 1].runner == t->buckets[i].runner)
            t->buckets[n - 1].rows = t->buckets[i].rows;
        else
            t->buckets[n++] = t->buckets[i];
    }
    t->n = n;
}

static void add(char *out, size_t n, const char *text)
{
    const size_t at = strlen(out);
    if (at + 1 < n) snprintf(out + at, n - at, "%s", text);
}

void nbi_moe_table_text(const nbi_moe_table *t, char *out, size_t n)
{
    if (n) out[0] = '\0';
    for (uint32_t i = 0; i < t->n; i++) {
        const nbi_moe_bucket *k = &t->buckets[i];
        char part[96];
        if (t->n == 1)
            snprintf(part, sizeof part, "%s", k->runner->name);
        else if (i + 1 == t->n)
            snprintf(part, sizeof part, ", more %s", k->runner->name);
        else if (i)
            snprintf(part, sizeof part, ", to %u %s", k->rows, k->runner->name);
        else if (k->rows == 1)
            snprintf(part, sizeof part, "1 row %s", k->runner->name);
        else
            snprintf(part, sizeof part, "1 to %u rows %s", k->rows, k->runner->name);
        add(out, n, part);
    }
}

void nbi_moe_table_names(const nbi_moe_table *t, char *out, size_t n)
{
    snprintf(out, n, "%s", t->n ? "" : "none");
    for (uint32_t i = 0; i < t->n; i++) {
        bool before = false;
        for (uint32_t k = 0; k < i; k++)
            before = before || t->buckets[k].runner == t->buckets[i].runner;
        if (before) continue;
        if (i) add(out, n, "+");
        add(out, n, t->buckets[i].runner->name);
    }
}

/* ---------------------------------------------------------------- the choice */

/* The table of the class of `first`; returns the sum of the logarithms of its times, infinite with
 * a gap. */
static double class_table(nbi_moe_table *out, const nbi_moe_times *times, uint32_t n_times,
                          const nbi_moe_runner_ops *first, const uint32_t *rows, uint32_t n_buckets)
{
    double sum = 0;
    *out = (nbi_moe_table){.n = n_buckets};
    for (uint32_t i = 0; i < n_buckets; i++) {
        const nbi_moe_times *best = NULL;
        for (uint32_t k = 0; k < n_times; k++) {
            const nbi_moe_times *t = &times[k];
            if (!nbi_moe_same_class(t->runner, first) || !(t->seconds[i] > 0)) continue;
            if (!best || t->seconds[i] < MARGIN * best->seconds[i]) best = t;
        }
        const nbi_moe_runner_ops *before = i ? out->buckets[i - 1].runner : first;
        out->buckets[i].rows = i + 1 < n_buckets ? rows[i] : UINT32_MAX;
        out->buckets[i].runner = best ? best->runner : before;
        sum += best ? log(best->seconds[i]) : (double)INFINITY;
    }
    return sum;
}

bool nbi_moe_table_choose(nbi_moe_table *out, const nbi_moe_times *times, uint32_t n_times,
                          const uint32_t *rows, uint32_t n_buckets)
{
    NB_ASSERT(n_buckets && n_buckets <= NBI_MOE_BUCKETS);
    bool any = false;
    double least = INFINITY;
    for (uint32_t k = 0; k < n_times; k++) {
        nbi_moe_table t;
        if (!(times[k].seconds[0] > 0)) continue;
        const double sum = class_table(&t, times, n_times, times[k].runner, rows, n_buckets);
        if (any && !(sum < least + n_buckets * log(MARGIN))) continue;
        any = true;
        least = sum;
        *out = t;
    }
    return any;
}
