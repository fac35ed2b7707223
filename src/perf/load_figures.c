/* Plain arithmetic over the records. */
#include "perf/load_figures.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- one request */

static double ms_between(uint64_t from, uint64_t to)
{
    return to > from ? (double)(to - from) * 1e-6 : 0;
}

double nbi_load_ttft_ms(const nbi_load_record *r)
{
    return r->answer.first_ns ? ms_between(r->sent_ns, r->answer.first_ns) : (double)NAN;
}

double nbi_load_e2el_ms(const nbi_load_record *r)
{
    return ms_between(r->sent_ns, r->answer.end_ns);
}

double nbi_load_tpot_ms(const nbi_load_record *r)
{
    const nbi_load_answer *a = &r->answer;
    if (!a->first_ns || a->output_tokens < 2) return NAN;
    return ms_between(a->first_ns, a->end_ns) / (a->output_tokens - 1);
}

/* ---- statistics */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile(const double *sorted, uint64_t n, double p)
{
    double at = p / 100 * (double)(n - 1);
    uint64_t i = (uint64_t)at;
    if (i + 1 >= n) return sorted[n - 1];
    return sorted[i] + (at - (double)i) * (sorted[i + 1] - sorted[i]);
}

void nbi_load_stat_make(nbi_load_stat *out, double *values, uint64_t n, const double *percentiles,
                        uint32_t n_percentiles)
{
    *out = (nbi_load_stat){.n = n};
    if (!n) return;
    qsort(values, n, sizeof *values, ascending);
    double sum = 0, squares = 0;
    for (uint64_t i = 0; i < n; i++) sum += values[i];
    out->mean = sum / (double)n;
    for (uint64_t i = 0; i < n; i++) squares += (values[i] - out->mean) * (values[i] - out->mean);
    out->std = sqrt(squares / (double)n);
    out->min = values[0];
    out->max = values[n - 1];
    out->median = percentile(values, n, 50);
    for (uint32_t i = 0; i < n_percentiles; i++)
        out->percentiles[i] = percentile(values, n, percentiles[i]);
}

typedef struct values {
    double *data; /* room for the gaps of all records, and at least one value per record */
    uint64_t n;
    const double *percentiles;
    uint32_t n_percentiles;
} values;

static void settle(nbi_load_stat *out, values *v)
{
    nbi_load_stat_make(out, v->data, v->n, v->percentiles, v->n_percentiles);
    v->n = 0;
}

/* ---- counts */

static void count_failure(nbi_load_figures *f, const nbi_load_answer *a)
{
    const unsigned http = a->failure == NBI_LOAD_HTTP ? a->http : 0;
    f->failed++;
    for (uint32_t i = 0; i < f->n_groups; i++)
        if (f->groups[i].kind == a->failure && f->groups[i].http == http) {
            f->groups[i].n++;
            return;
        }
    if (f->n_groups == NBI_LOAD_GROUPS_MAX) {
        f->groups[f->n_groups - 1].n++;
        return;
    }
    f->groups[f->n_groups++] =
        (nbi_load_group){.kind = a->failure, .http = http, .n = 1, .sample = a->why};
}

static bool within(double value, double bound)
{
    return !(bound > 0) || !(value > bound); /* a time that does not exist is within */
}

/* Of one completed request. Returns the tokens of its chunks. */
static uint64_t count_completed(nbi_load_figures *f, const nbi_load_record *r, bool stream,
                                uint32_t *good, const nbi_load_goodput *goodput)
{
    const nbi_load_answer *a = &r->answer;
    f->completed++;
    f->input_tokens += a->has_usage ? a->input_tokens : r->asked_input;
    f->output_tokens += a->output_tokens;
    f->reasoning_tokens += a->reasoning_tokens;
    f->cached_tokens += a->cached_tokens;
    f->no_usage += !a->has_usage;
    f->no_tokens += a->output_tokens == 0;
    f->shorter += a->has_usage && a->output_tokens < r->asked_output;
    f->longer += a->has_usage && a->output_tokens > r->asked_output;
    f->not_streamed += stream && !a->sse;
    f->no_chunks += a->sse && a->output_tokens && !a->n_chunks;
    *good += within(nbi_load_ttft_ms(r), goodput->ttft_ms) &&
             within(nbi_load_tpot_ms(r), goodput->tpot_ms) &&
             within(nbi_load_e2el_ms(r), goodput->e2el_ms);
    if (!a->sse) return 0;
    f->chunks += a->n_chunks;
    return a->n_chunks ? a->output_tokens : 0;
}

/* Tokens by second: each chunk of an answer stands for as many tokens as the others. */
static nb_status find_peak(nbi_load_figures *f, const nbi_load_result *result, nb_error *err)
{
    const uint64_t n_seconds = (uint64_t)f->duration_s + 1;
    double *tokens = nbi_calloc(n_seconds, sizeof *tokens);
    if (!tokens) return nbi_fail(err, NB_NO_MEMORY, "out of memory for the figures");
    for (uint32_t i = 0; i < result->n; i++) {
        const nbi_load_answer *a = &result->records[i].answer;
        if (a->failure) continue;
        double at =
            (double)((a->n_gaps || a->first_ns ? a->first_ns : a->end_ns) - result->begin_ns) *
            1e-9;
        const uint32_t n = a->first_ns ? a->n_gaps + 1 : 1;
        for (uint32_t k = 0; k < n; k++) {
            if (k) at += (double)a->gaps[k - 1];
            uint64_t second = at > 0 ? (uint64_t)at : 0;
            tokens[second < n_seconds ? second : n_seconds - 1] += (double)a->output_tokens / n;
        }
    }
    for (uint64_t s = 0; s < n_seconds; s++) f->peak_output = fmax(f->peak_output, tokens[s]);
    /* A run of less than a second has no best second. */
    if (f->duration_s < 1) f->peak_output = f->output_throughput;
    nbi_free(tokens);
    return NB_OK;
}

/* ---- all */

static void make_stats(nbi_load_figures *f, const nbi_load_result *result, values *v)
{
    double (*const of_one[])(const nbi_load_record *) = {nbi_load_ttft_ms, nbi_load_tpot_ms,
                                                         nbi_load_e2el_ms};
    nbi_load_stat *const stats[] = {&f->ttft, &f->tpot, &f->e2el};
    double sum_e2el = 0;
    uint64_t zeros = 0;
    for (size_t s = 0; s < sizeof stats / sizeof *stats; s++) {
        for (uint32_t i = 0; i < result->n; i++) {
            double ms = of_one[s](&result->records[i]);
            if (result->records[i].answer.failure || isnan(ms)) continue;
            v->data[v->n++] = ms;
            if (stats[s] == &f->e2el) sum_e2el += ms;
        }
        settle(stats[s], v);
    }
    for (uint32_t i = 0; i < result->n; i++) {
        const nbi_load_answer *a = &result->records[i].answer;
        if (a->failure) continue;
        zeros += a->n_together;
        for (uint32_t k = 0; k < a->n_gaps; k++) v->data[v->n++] = (double)a->gaps[k] * 1e3;
    }
    f->together = v->n ? (double)zeros / (double)v->n : 0;
    settle(&f->itl, v);
    for (uint32_t i = 0; i < result->n; i++)
        v->data[v->n++] = ms_between(result->records[i].planned_ns, result->records[i].sent_ns);
    settle(&f->delay, v);
    f->concurrency = f->duration_s > 0 ? sum_e2el * 1e-3 / f->duration_s : 0;
}

nb_status nbi_load_figures_make(nbi_load_figures *out, const nbi_load_result *result, bool stream,
                                const double *percentiles, uint32_t n_percentiles,
                                const nbi_load_goodput *goodput, nb_error *err)
{
    nbi_load_figures f = {.peak_running = result->peak_running};
    uint64_t n_values = result->n, chunk_tokens = 0;
    uint32_t good = 0;
    f.duration_s = (double)(result->end_ns - result->begin_ns) * 1e-9;
    for (uint32_t i = 0; i < result->n; i++) {
        const nbi_load_record *r = &result->records[i];
        n_values += r->answer.n_gaps;
        if (r->answer.failure)
            count_failure(&f, &r->answer);
        else
            chunk_tokens += count_completed(&f, r, stream, &good, goodput);
    }
    const double per_s = f.duration_s > 0 ? 1 / f.duration_s : 0;
    f.request_throughput = f.completed * per_s;
    f.input_throughput = (double)f.input_tokens * per_s;
    f.output_throughput = (double)f.output_tokens * per_s;
    f.total_throughput = f.input_throughput + f.output_throughput;
    f.goodput = good * per_s;
    f.tokens_per_chunk = f.chunks ? (double)chunk_tokens / (double)f.chunks : 0;
    f.busy = fmax(0, 1 - result->idle_s * per_s);
    values v = {.percentiles = percentiles, .n_percentiles = n_percentiles};
    v.data = nbi_malloc((n_values + 1) * sizeof *v.data);
    if (!v.data) return nbi_fail(err, NB_NO_MEMORY, "out of memory for the figures");
    make_stats(&f, result, &v);
    nbi_free(v.data);
    NB_TRY(find_peak(&f, result, err));
    *out = f;
    return NB_OK;
}
