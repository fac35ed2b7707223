/* The names are those of vllm bench serve and sglang.bench_serving. */
#include "cli/bench_serve_report.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"

/* A latency: name and title of its block, and where its figures are. */
typedef struct latency {
    const char *key, *title, *unit_name;
    const nbi_load_stat *stat;
    bool wanted;
} latency;

enum { N_LATENCIES = 4 };

static void list_latencies(latency out[N_LATENCIES], const nbi_load_figures *f,
                           const nbi_report_choice *c)
{
    out[0] = (latency){"ttft", "Time to First Token", "TTFT", &f->ttft, c->ttft};
    out[1] =
        (latency){"tpot", "Time per Output Token (excl. 1st token)", "TPOT", &f->tpot, c->tpot};
    out[2] = (latency){"itl", "Inter-token Latency", "ITL", &f->itl, c->itl};
    out[3] = (latency){"e2el", "End-to-end Latency", "E2EL", &f->e2el, c->e2el};
}

/* ---- text */

enum { WIDTH = 54, LABEL = 40 };

static void rule(const char *title, char c)
{
    int n = title ? (int)strlen(title) : 0, left = (WIDTH - n) / 2;
    for (int i = 0; i < left; i++) putchar(c);
    if (title) fputs(title, stdout);
    for (int i = left + n; i < WIDTH; i++) putchar(c);
    putchar('\n');
}

static void count(const char *label, uint64_t n)
{
    printf("%-*s %llu\n", LABEL, label, (unsigned long long)n);
}

static void number(const char *label, double v)
{
    printf("%-*s %.2f\n", LABEL, label, v);
}

static void print_latency(const latency *l, const nbi_report_choice *c)
{
    char label[64];
    if (!l->wanted) return;
    rule(l->title, '-');
    if (!l->stat->n) {
        printf("no values\n");
        return;
    }
    snprintf(label, sizeof label, "Mean %s (ms):", l->unit_name);
    number(label, l->stat->mean);
    snprintf(label, sizeof label, "Median %s (ms):", l->unit_name);
    number(label, l->stat->median);
    for (uint32_t i = 0; i < c->n_percentiles; i++) {
        snprintf(label, sizeof label, "P%g %s (ms):", c->percentiles[i], l->unit_name);
        number(label, l->stat->percentiles[i]);
    }
    if (!strcmp(l->key, "itl")) number("Max ITL (ms):", l->stat->max);
}

/* What a reader of the figures should know before believing them. */
static void print_notes(const nbi_load_options *opt, const nbi_load_figures *f)
{
    if (f->no_usage)
        printf("note: %u answers came without usage: their output tokens are their chunks, their "
               "input tokens what was asked for\n",
               f->no_usage);
    if (f->no_tokens) printf("note: %u answers have no tokens; they have no TTFT\n", f->no_tokens);
    if (f->no_chunks)
        printf("note: %u answers have tokens but no text; they have no TTFT\n", f->no_chunks);
    if (f->not_streamed)
        printf("note: %u answers came whole although a stream was asked for\n", f->not_streamed);
    if (f->shorter)
        printf("note: %u answers are shorter than asked for%s\n", f->shorter,
               opt->ignore_eos ? "" : "; --ignore-eos makes the lengths equal");
    if (f->longer) printf("note: %u answers are longer than asked for\n", f->longer);
    if (f->tokens_per_chunk > 1.05)
        printf("note: a chunk carries %.2f tokens: ITL is the time between chunks, TPOT the time "
               "per token\n",
               f->tokens_per_chunk);
    if (f->together > 0.2)
        printf("note: %.0f %% of the chunks came together with the one before; something between "
               "holds them back, or this program is too slow\n",
               f->together * 100);
    if (f->busy > 0.8)
        printf("note: this program was busy %.0f %% of the time: the latencies contain its own\n",
               f->busy * 100);
    if (isfinite(opt->request_rate) && !opt->max_concurrency && f->delay.n && f->delay.max > 20)
        printf("note: requests were sent up to %.1f ms late\n", f->delay.max);
}

static void print_failures(const nbi_load_figures *f)
{
    for (uint32_t i = 0; i < f->n_groups; i++) {
        const nbi_load_group *g = &f->groups[i];
        printf("failed: %u x %s", g->n, nbi_load_failure_name(g->kind));
        if (g->http) printf(" %u", g->http);
        printf(", for instance: %s\n", g->sample);
    }
}

static void print_counts(const nbi_load_figures *f)
{
    count("Successful requests:", f->completed);
    count("Failed requests:", f->failed);
    number("Benchmark duration (s):", f->duration_s);
    count("Total input tokens:", f->input_tokens);
    if (f->cached_tokens) count("  of these cached:", f->cached_tokens);
    count("Total generated tokens:", f->output_tokens);
    if (f->reasoning_tokens) count("  of these reasoning:", f->reasoning_tokens);
}

void nbi_bench_serve_print(const nbi_load_options *opt, const nbi_load_result *result,
                           const nbi_load_figures *f, const nbi_report_choice *choice)
{
    latency latencies[N_LATENCIES];
    list_latencies(latencies, f, choice);
    rule(" Serving Benchmark Result ", '=');
    printf("%-*s %s\n", LABEL, "Model:", result->model);
    printf("%-*s %s%s\n", LABEL, "Server:", opt->client.base_url, opt->endpoint);
    printf("%-*s %s\n", LABEL, "Prompts:", result->prompts);
    if (isfinite(opt->request_rate))
        printf("%-*s %g, burstiness %g\n", LABEL,
               "Traffic request rate (req/s):", opt->request_rate, opt->burstiness);
    else
        printf("%-*s inf\n", LABEL, "Traffic request rate (req/s):");
    if (opt->max_concurrency) count("Maximum request concurrency:", opt->max_concurrency);
    print_counts(f);
    number("Request throughput (req/s):", f->request_throughput);
    if (choice->with_goodput) number("Request goodput (req/s):", f->goodput);
    number("Input token throughput (tok/s):", f->input_throughput);
    number("Output token throughput (tok/s):", f->output_throughput);
    number("Peak output token throughput (tok/s):", f->peak_output);
    number("Total token throughput (tok/s):", f->total_throughput);
    count("Peak concurrent requests:", f->peak_running);
    number("Concurrency:", f->concurrency);
    if (f->chunks) number("Tokens per chunk:", f->tokens_per_chunk);
    for (size_t i = 0; i < N_LATENCIES; i++) print_latency(&latencies[i], choice);
    rule(NULL, '=');
    print_notes(opt, f);
    print_failures(f);
}

/* ---- JSON */

static nb_status key_string(nbi_buf *out, const char *key, const char *text)
{
    NB_TRY(nbi_buf_addf(out, "\"%s\":", key));
    if (text)
        NB_TRY(nbi_json_quote(out, text, strlen(text)));
    else
        NB_TRY(nbi_buf_addf(out, "null"));
    return nbi_buf_addf(out, ",");
}

static nb_status key_number(nbi_buf *out, const char *key, double v)
{
    return isfinite(v) ? nbi_buf_addf(out, "\"%s\":%.10g,", key, v)
                       : nbi_buf_addf(out, "\"%s\":null,", key);
}

/* "p99", "p99.9". A latency without values has null figures. */
static nb_status json_latency(nbi_buf *out, const latency *l, const nbi_report_choice *c)
{
    char key[48];
    const char *const names[] = {"mean", "median", "std", "min", "max"};
    const nbi_load_stat *s = l->stat;
    const double figures[] = {s->mean, s->median, s->std, s->min, s->max};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(key, sizeof key, "%s_%s_ms", names[i], l->key);
        NB_TRY(key_number(out, key, s->n ? figures[i] : (double)NAN));
    }
    for (uint32_t i = 0; i < c->n_percentiles; i++) {
        snprintf(key, sizeof key, "p%g_%s_ms", c->percentiles[i], l->key);
        NB_TRY(key_number(out, key, s->n ? s->percentiles[i] : (double)NAN));
    }
    return NB_OK;
}

static nb_status json_errors(nbi_buf *out, const nbi_load_figures *f)
{
    NB_TRY(nbi_buf_addf(out, "\"errors\":["));
    for (uint32_t i = 0; i < f->n_groups; i++) {
        const nbi_load_group *g = &f->groups[i];
        NB_TRY(nbi_buf_addf(out, "%s{", i ? "," : ""));
        NB_TRY(key_string(out, "kind", nbi_load_failure_name(g->kind)));
        if (g->http) NB_TRY(key_number(out, "status", g->http));
        NB_TRY(key_string(out, "sample", g->sample));
        NB_TRY(nbi_buf_addf(out, "\"count\":%u}", g->n));
    }
    return nbi_buf_addf(out, "],");
}

static nb_status json_setting(nbi_buf *out, const nbi_load_options *opt,
                              const nbi_load_result *result)
{
    static const char *const datasets[] = {"random", "shared-prefix", "file"};
    NB_TRY(key_string(out, "backend", "openai"));
    NB_TRY(key_string(out, "model", result->model));
    NB_TRY(key_string(out, "base_url", opt->client.base_url));
    NB_TRY(key_string(out, "endpoint", opt->endpoint));
    NB_TRY(key_string(out, "dataset_name", datasets[opt->dataset]));
    NB_TRY(key_string(out, "prompts", result->prompts));
    NB_TRY(key_number(out, "num_prompts", result->n));
    if (isfinite(opt->request_rate))
        NB_TRY(key_number(out, "request_rate", opt->request_rate));
    else
        NB_TRY(key_string(out, "request_rate", "inf"));
    NB_TRY(key_number(out, "burstiness", opt->burstiness));
    NB_TRY(key_number(out, "max_concurrency",
                      opt->max_concurrency ? opt->max_concurrency : (double)NAN));
    return key_number(out, "seed", (double)opt->seed);
}

static nb_status json_figures(nbi_buf *out, const nbi_load_figures *f,
                              const nbi_report_choice *choice)
{
    const struct {
        const char *key;
        double value;
    } rows[] = {
        {"completed", f->completed},
        {"failed", f->failed},
        {"duration", f->duration_s},
        {"total_input_tokens", (double)f->input_tokens},
        {"total_output_tokens", (double)f->output_tokens},
        {"total_reasoning_tokens", (double)f->reasoning_tokens},
        {"total_cached_tokens", (double)f->cached_tokens},
        {"request_throughput", f->request_throughput},
        {"request_goodput", choice->with_goodput ? f->goodput : (double)NAN},
        {"input_throughput", f->input_throughput},
        {"output_throughput", f->output_throughput},
        {"total_token_throughput", f->total_throughput},
        {"max_output_tokens_per_s", f->peak_output},
        {"max_concurrent_requests", f->peak_running},
        {"concurrency", f->concurrency},
        {"chunks", (double)f->chunks},
        {"tokens_per_chunk", f->chunks ? f->tokens_per_chunk : (double)NAN},
        {"chunks_together", f->together},
        {"answers_without_usage", f->no_usage},
        {"answers_without_tokens", f->no_tokens},
        {"answers_without_text", f->no_chunks},
        {"answers_not_streamed", f->not_streamed},
        {"answers_shorter", f->shorter},
        {"answers_longer", f->longer},
        {"client_busy", f->busy},
        {"mean_send_delay_ms", f->delay.mean},
        {"max_send_delay_ms", f->delay.max},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        NB_TRY(key_number(out, rows[i].key, rows[i].value));
    latency latencies[N_LATENCIES];
    list_latencies(latencies, f, choice);
    for (size_t i = 0; i < N_LATENCIES; i++) NB_TRY(json_latency(out, &latencies[i], choice));
    return json_errors(out, f);
}

/* ---- per request */

typedef double (*value_of)(const nbi_load_result *result, const nbi_load_record *r);

static double start_of(const nbi_load_result *result, const nbi_load_record *r)
{
    return (double)(r->sent_ns - result->begin_ns) * 1e-9;
}

static double planned_of(const nbi_load_result *result, const nbi_load_record *r)
{
    return (double)(r->planned_ns - result->begin_ns) * 1e-9;
}

static double input_of(const nbi_load_result *result, const nbi_load_record *r)
{
    (void)result;
    return r->answer.has_usage ? r->answer.input_tokens : r->asked_input;
}

static double output_of(const nbi_load_result *result, const nbi_load_record *r)
{
    (void)result;
    return r->answer.output_tokens;
}

static double ttft_of(const nbi_load_result *result, const nbi_load_record *r)
{
    (void)result;
    return nbi_load_ttft_ms(r) * 1e-3;
}

static double e2el_of(const nbi_load_result *result, const nbi_load_record *r)
{
    (void)result;
    return nbi_load_e2el_ms(r) * 1e-3;
}

static nb_status json_gaps(nbi_buf *out, const nbi_load_result *result)
{
    NB_TRY(nbi_buf_addf(out, "\"itls\":["));
    for (uint32_t i = 0; i < result->n; i++) {
        const nbi_load_answer *a = &result->records[i].answer;
        NB_TRY(nbi_buf_addf(out, "%s[", i ? "," : ""));
        for (uint32_t k = 0; k < a->n_gaps; k++)
            NB_TRY(nbi_buf_addf(out, "%s%.7g", k ? "," : "", (double)a->gaps[k]));
        NB_TRY(nbi_buf_addf(out, "]"));
    }
    return nbi_buf_addf(out, "],");
}

/* Arrays in the order of arrival, times in seconds. */
static nb_status json_details(nbi_buf *out, const nbi_load_result *result)
{
    static const struct {
        const char *key;
        value_of of;
    } arrays[] = {
        {"planned_times", planned_of}, {"start_times", start_of}, {"input_lens", input_of},
        {"output_lens", output_of},    {"ttfts", ttft_of},        {"e2els", e2el_of}};
    for (size_t k = 0; k < sizeof arrays / sizeof *arrays; k++) {
        NB_TRY(nbi_buf_addf(out, "\"%s\":[", arrays[k].key));
        for (uint32_t i = 0; i < result->n; i++) {
            double v = arrays[k].of(result, &result->records[i]);
            if (i) NB_TRY(nbi_buf_addf(out, ","));
            NB_TRY(isfinite(v) ? nbi_buf_addf(out, "%.10g", v) : nbi_buf_addf(out, "null"));
        }
        NB_TRY(nbi_buf_addf(out, "],"));
    }
    NB_TRY(nbi_buf_addf(out, "\"failures\":["));
    for (uint32_t i = 0; i < result->n; i++) {
        const nbi_load_answer *a = &result->records[i].answer;
        if (i) NB_TRY(nbi_buf_addf(out, ","));
        if (!a->failure)
            NB_TRY(nbi_buf_addf(out, "null"));
        else
            NB_TRY(nbi_json_quote(out, a->why, strlen(a->why)));
    }
    NB_TRY(nbi_buf_addf(out, "],"));
    return json_gaps(out, result);
}

nb_status nbi_bench_serve_json(nbi_buf *out, const nbi_load_options *opt,
                               const nbi_load_result *result, const nbi_load_figures *f,
                               const nbi_report_choice *choice, bool details)
{
    NB_TRY(nbi_buf_addf(out, "{"));
    NB_TRY(json_setting(out, opt, result));
    NB_TRY(json_figures(out, f, choice));
    if (details) NB_TRY(json_details(out, result));
    out->data[out->len - 1] = '}'; /* in place of the last comma */
    return NB_OK;
}
