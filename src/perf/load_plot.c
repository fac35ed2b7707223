/* Collects the points of the panels. */
#include "perf/load_plot.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "perf/load_figures.h"
#include "perf/svg.h"

enum { N_TIMES = 120 }; /* points of the panels over time */

/* All arrays are parts of one block. */
typedef struct points {
    double *ttft, *ttft_share, *ttft_at, *ttft_ms; /* [n_ttft] sorted, its share; by arrival */
    double *itl, *itl_share;                       /* [n_itl] */
    double at[N_TIMES], tokens[N_TIMES], running[N_TIMES], gap_p50[N_TIMES], gap_p99[N_TIMES];
    size_t n_ttft, n_itl, n_times;
} points;

/* A gap and when it ended. */
typedef struct gap {
    double at, ms;
} gap;

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int by_time(const void *a, const void *b)
{
    double x = ((const gap *)a)->at, y = ((const gap *)b)->at;
    return (x > y) - (x < y);
}

static double seconds(const nbi_load_result *r, uint64_t ns)
{
    return ns > r->begin_ns ? (double)(ns - r->begin_ns) * 1e-9 : 0;
}

static void sort_with_shares(double *values, double *shares, size_t n)
{
    qsort(values, n, sizeof *values, by_value);
    for (size_t i = 0; i < n; i++) shares[i] = 100 * (double)(i + 1) / (double)n;
}

/* Adds a request's tokens and presence to the times. */
static void add_over_time(points *p, const nbi_load_result *result, const nbi_load_record *r,
                          double step)
{
    const nbi_load_answer *a = &r->answer;
    double begin = seconds(result, r->sent_ns), end = seconds(result, a->end_ns);
    for (size_t t = (size_t)(begin / step); t < p->n_times && p->at[t] <= end; t++)
        p->running[t] += 1;
    if (a->failure || !a->first_ns) return;
    double at = seconds(result, a->first_ns);
    const double each = (double)a->output_tokens / (a->n_gaps + 1) / step;
    for (uint32_t k = 0; k <= a->n_gaps; k++) {
        if (k) at += (double)a->gaps[k - 1];
        size_t t = (size_t)(at / step);
        p->tokens[t < p->n_times ? t : p->n_times - 1] += each;
    }
}

/* Median and 99th percentile of the gaps that end in each of the times. */
static void gaps_over_time(points *p, gap *gaps, double step)
{
    double *scratch = p->itl; /* filled afterwards */
    qsort(gaps, p->n_itl, sizeof *gaps, by_time);
    for (size_t t = 0, i = 0; t < p->n_times; t++) {
        const double percentiles[] = {99};
        nbi_load_stat stat;
        size_t n = 0;
        while (i < p->n_itl && (gaps[i].at < (double)(t + 1) * step || t + 1 == p->n_times))
            scratch[n++] = gaps[i++].ms;
        nbi_load_stat_make(&stat, scratch, n, percentiles, 1);
        p->gap_p50[t] = n ? stat.median : (double)NAN;
        p->gap_p99[t] = n ? stat.percentiles[0] : (double)NAN;
    }
}

static void collect(points *p, const nbi_load_result *result, gap *gaps)
{
    const double duration = fmax(seconds(result, result->end_ns), 1e-9);
    /* Steps that hold several tokens: of a tenth of a second, or with 64 gaps. */
    p->n_times =
        (size_t)fmin(N_TIMES, fmax(1, fmax(ceil(duration / 0.1), floor((double)p->n_itl / 64))));
    const double step = duration / (double)p->n_times;
    size_t n_ttft = 0, n_itl = 0;
    for (size_t t = 0; t < p->n_times; t++) p->at[t] = (double)t * step;
    for (uint32_t i = 0; i < result->n; i++) {
        const nbi_load_record *r = &result->records[i];
        add_over_time(p, result, r, step);
        if (r->answer.failure || !r->answer.first_ns) continue;
        p->ttft[n_ttft] = p->ttft_ms[n_ttft] = nbi_load_ttft_ms(r);
        p->ttft_at[n_ttft++] = seconds(result, r->sent_ns);
        double at = seconds(result, r->answer.first_ns);
        for (uint32_t k = 0; k < r->answer.n_gaps; k++) {
            at += (double)r->answer.gaps[k];
            gaps[n_itl++] = (gap){at, (double)r->answer.gaps[k] * 1e3};
        }
    }
    gaps_over_time(p, gaps, step);
    for (size_t i = 0; i < n_itl; i++) p->itl[i] = gaps[i].ms;
    sort_with_shares(p->ttft, p->ttft_share, n_ttft);
    sort_with_shares(p->itl, p->itl_share, n_itl);
}

static nb_status draw(nbi_buf *out, const points *p, const nbi_load_result *result, nb_error *err)
{
    const nbi_svg_series ttft = {
        .x = p->ttft, .y = p->ttft_share, .n = p->n_ttft, .style = NBI_SVG_STEPS};
    const nbi_svg_series itl = {
        .x = p->itl, .y = p->itl_share, .n = p->n_itl, .style = NBI_SVG_STEPS};
    const nbi_svg_series ttfts = {
        .x = p->ttft_at, .y = p->ttft_ms, .n = p->n_ttft, .style = NBI_SVG_POINTS};
    const nbi_svg_series itls[] = {
        {.name = "99th percentile", .x = p->at, .y = p->gap_p99, .n = p->n_times},
        {.name = "median", .x = p->at, .y = p->gap_p50, .n = p->n_times}};
    const nbi_svg_series tokens = {
        .x = p->at, .y = p->tokens, .n = p->n_times, .style = NBI_SVG_STEPS};
    const nbi_svg_series running = {
        .x = p->at, .y = p->running, .n = p->n_times, .style = NBI_SVG_STEPS};
    const nbi_svg_panel panels[] = {
        {"Time to first token", "ms", "% of requests", false, false, 100, &ttft, 1, false},
        {"Inter-token latency", "ms", "% of gaps", true, false, 100, &itl, 1, false},
        {"Time to first token, by sending time", "s", "ms", false, false, 0, &ttfts, 1, false},
        {"Inter-token latency over time", "s", "ms", false, true, 0, itls, 2, false},
        {"Output", "s", "tokens per second", false, false, 0, &tokens, 1, false},
        {"Requests under way", "s", "requests", false, false, 0, &running, 1, false},
    };
    char title[256];
    snprintf(title, sizeof title, "%.120s: %u requests in %.2f s", result->model, result->n,
             seconds(result, result->end_ns));
    return nbi_svg_write(out, title, panels, sizeof panels / sizeof *panels, 2, err);
}

nb_status nbi_load_plot(nbi_buf *out, const nbi_load_result *result, nb_error *err)
{
    points *p = nbi_calloc(1, sizeof *p);
    for (uint32_t i = 0; p && i < result->n; i++) {
        const nbi_load_answer *a = &result->records[i].answer;
        if (a->failure || !a->first_ns) continue;
        p->n_ttft++;
        p->n_itl += a->n_gaps;
    }
    double *block = p ? nbi_malloc((4 * p->n_ttft + 2 * p->n_itl + 1) * sizeof *block) : NULL;
    gap *gaps = block ? nbi_malloc((p->n_itl + 1) * sizeof *gaps) : NULL;
    nb_status st = gaps ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "out of memory for the plot");
    if (gaps) {
        p->ttft = block;
        p->ttft_share = p->ttft + p->n_ttft;
        p->ttft_at = p->ttft_share + p->n_ttft;
        p->ttft_ms = p->ttft_at + p->n_ttft;
        p->itl = p->ttft_ms + p->n_ttft;
        p->itl_share = p->itl + p->n_itl;
        collect(p, result, gaps);
        st = draw(out, p, result, err);
    }
    nbi_free(gaps);
    nbi_free(block);
    nbi_free(p);
    return st;
}
