/* The series of /metrics, from snapshots of the engine's counters. */
#include "server/metrics.h"

#include <stdio.h>
#include <string.h>

#include "server/process_metrics.h"
#include "server/reporter.h"

#define LABELS_MAX 512

/* What one reply is written from. */
typedef struct page {
    nbi_buf *out;
    nbi_server *server;
    const nbi_served *served; /* NULL until the model is loaded */
    nb_engine_stats stats;
    nbi_rates rates;
    char model[LABELS_MAX]; /* model_name="..." */
} page;

/* ---------------------------------------------------------------- text form */

static nb_status head(nbi_buf *out, const char *name, const char *type, const char *help)
{
    return nbi_buf_addf(out, "# HELP nibble:%s %s\n# TYPE nibble:%s %s\n", name, help, name, type);
}

static nb_status one(const page *p, const char *name, const char *type, const char *help,
                     double value)
{
    NB_TRY(head(p->out, name, type, help));
    return nbi_buf_addf(p->out, "nibble:%s{%s} %.17g\n", name, p->model, value);
}

static nb_status counter(const page *p, const char *name, const char *help, uint64_t value)
{
    return one(p, name, "counter", help, (double)value);
}

static nb_status gauge(const page *p, const char *name, const char *help, double value)
{
    return one(p, name, "gauge", help, value);
}

static nb_status labelled(const page *p, const char *name, const char *label, const char *value,
                          uint64_t n)
{
    return nbi_buf_addf(p->out, "nibble:%s{%s,%s=\"%s\"} %llu\n", name, p->model, label, value,
                        (unsigned long long)n);
}

static nb_status labelled_number(const page *p, const char *name, const char *label,
                                 const char *value, double number)
{
    return nbi_buf_addf(p->out, "nibble:%s{%s,%s=\"%s\"} %.17g\n", name, p->model, label, value,
                        number);
}

static nb_status histogram(const page *p, const char *name, const char *help, nb_histogram_id id)
{
    nb_histogram h;
    uint64_t sum = 0;
    nb_engine_get_histogram(p->served->engine, id, &h);
    NB_TRY(head(p->out, name, "histogram", help));
    for (uint32_t i = 0; i < h.n_bounds; i++) {
        sum += h.counts[i];
        NB_TRY(nbi_buf_addf(p->out, "nibble:%s_bucket{%s,le=\"%g\"} %llu\n", name, p->model,
                            h.bounds[i], (unsigned long long)sum));
    }
    sum += h.counts[h.n_bounds];
    return nbi_buf_addf(p->out,
                        "nibble:%s_bucket{%s,le=\"+Inf\"} %llu\nnibble:%s_sum{%s} %.17g\n"
                        "nibble:%s_count{%s} %llu\n",
                        name, p->model, (unsigned long long)sum, name, p->model, h.sum, name,
                        p->model, (unsigned long long)sum);
}

/* model_name="...", escaped. */
static void set_model(page *p, const char *name)
{
    size_t n = (size_t)snprintf(p->model, LABELS_MAX, "model_name=\"");
    for (const char *c = name; *c && n < LABELS_MAX - 4; c++) {
        if (*c == '\\' || *c == '"') p->model[n++] = '\\';
        p->model[n++] = *c == '\n' ? ' ' : *c;
    }
    p->model[n++] = '"';
    p->model[n] = '\0';
}

/* ---------------------------------------------------------------- the series */

static double share(uint64_t a, uint64_t b)
{
    return b ? (double)a / (double)b : 0.0;
}

static nb_status write_queue(const page *p)
{
    const nb_engine_stats *s = &p->stats;
    const char *running = "Requests that run.", *waiting = "Requests in the queue.";
    NB_TRY(gauge(p, "num_requests_running", running, s->n_running));
    NB_TRY(gauge(p, "num_requests_waiting", waiting, s->n_waiting));
    NB_TRY(gauge(p, "num_running_reqs", running, s->n_running));
    return gauge(p, "num_queue_reqs", waiting, s->n_waiting);
}

static nb_status write_kv(const page *p)
{
    const nb_engine_stats *s = &p->stats;
    uint64_t total = p->served->info.kv_tokens;
    double use = share(s->kv_tokens_used, total);
    const char *help = "Share of the KV cache that requests use, 0 to 1.";
    NB_TRY(gauge(p, "kv_cache_usage_perc", help, use));
    NB_TRY(gauge(p, "token_usage", help, use));
    NB_TRY(gauge(p, "num_used_tokens", "KV tokens that requests use, in whole pages.",
                 (double)s->kv_tokens_used));
    NB_TRY(gauge(p, "kv_evictable_tokens", "KV tokens that nobody uses and the prefix cache keeps.",
                 (double)s->kv_tokens_cached));
    NB_TRY(gauge(p, "max_total_num_tokens", "Tokens that the KV cache holds.", (double)total));
    NB_TRY(
        gauge(p, "context_len", "Tokens that one request may hold.", p->served->facts.max_context));
    NB_TRY(counter(p, "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.",
                   s->prefix_query_tokens));
    NB_TRY(counter(p, "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.",
                   s->prefix_hit_tokens));
    NB_TRY(gauge(p, "cache_hit_rate", "Prefix cache hits over queries, last ten seconds.",
                 p->rates.hit_rate));
    NB_TRY(counter(p, "num_preemptions_total", "Requests put back into the queue for want of KV.",
                   s->preemptions));
    return counter(p, "num_retracted_requests_total", "The same under SGLang's name.",
                   s->preemptions);
}

static nb_status write_tokens(const page *p)
{
    const nb_engine_stats *s = &p->stats;
    uint64_t computed = s->request_prompt_tokens - s->request_cached_tokens;
    NB_TRY(counter(p, "prompt_tokens_total", "Tokens of prompts whose answer has begun.",
                   s->request_prompt_tokens));
    NB_TRY(counter(p, "cached_tokens_total", "Of them, found in the prefix cache.",
                   s->request_cached_tokens));
    NB_TRY(counter(p, "prompt_tokens_cached_total", "The same under vLLM's name.",
                   s->request_cached_tokens));
    NB_TRY(head(p->out, "prompt_tokens_by_source_total", "counter",
                "prompt_tokens_total by where they came from."));
    NB_TRY(labelled(p, "prompt_tokens_by_source_total", "source", "local_compute", computed));
    NB_TRY(labelled(p, "prompt_tokens_by_source_total", "source", "local_cache_hit",
                    s->request_cached_tokens));
    NB_TRY(counter(p, "generation_tokens_total", "Tokens of answers, thinking included.",
                   s->generated_tokens));
    NB_TRY(counter(p, "reasoning_tokens_total", "Of them, thinking, of requests that have ended.",
                   atomic_load(&p->server->reasoning_tokens)));
    NB_TRY(head(p->out, "realtime_tokens_total", "counter",
                "Tokens as steps handle them: prompts in parts and again after a preemption."));
    NB_TRY(labelled(p, "realtime_tokens_total", "mode", "prefill_compute", s->prompt_tokens));
    NB_TRY(labelled(p, "realtime_tokens_total", "mode", "prefill_cache", s->prefix_hit_tokens));
    NB_TRY(labelled(p, "realtime_tokens_total", "mode", "decode", s->generated_tokens));
    return gauge(p, "gen_throughput", "Tokens generated per second, last ten seconds.",
                 p->rates.generation);
}

static nb_status write_requests(const page *p)
{
    static const struct {
        const char *name;
        nb_finish finish;
    } ends[] = {{"stop", NB_FINISH_STOP},
                {"length", NB_FINISH_LENGTH},
                {"abort", NB_FINISH_CANCELLED},
                {"error", NB_FINISH_ERROR},
                {"repetition", NB_FINISH_REPETITION}};
    uint64_t all = 0;
    NB_TRY(head(p->out, "request_success_total", "counter", "Requests that have ended, by how."));
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        uint64_t n = p->stats.requests_ended[ends[i].finish];
        all += n;
        NB_TRY(labelled(p, "request_success_total", "finished_reason", ends[i].name, n));
    }
    NB_TRY(counter(p, "num_requests_total", "Requests that have ended.", all));
    return counter(p, "num_aborted_requests_total",
                   "Requests whose client left or that were cancelled.",
                   p->stats.requests_ended[NB_FINISH_CANCELLED]);
}

static nb_status write_drafts(const page *p)
{
    const nb_engine_stats *s = &p->stats;
    NB_TRY(
        counter(p, "spec_decode_num_drafts_total", "Drafts that were verified.", s->draft_steps));
    NB_TRY(counter(p, "spec_verify_calls_total", "The same under SGLang's name.", s->draft_steps));
    NB_TRY(counter(p, "spec_decode_num_draft_tokens_total", "Tokens drafted.", s->draft_tokens));
    NB_TRY(counter(p, "spec_decode_num_accepted_tokens_total", "Drafted tokens that were right.",
                   s->draft_accepted));
    NB_TRY(head(p->out, "spec_decode_num_accepted_tokens_per_pos_total", "counter",
                "Drafted tokens that were right, by place in the draft."));
    for (int i = 0; i < NB_DRAFTS_MAX; i++) {
        char place[8];
        snprintf(place, sizeof place, "%d", i);
        NB_TRY(labelled(p, "spec_decode_num_accepted_tokens_per_pos_total", "position", place,
                        s->draft_accepted_at[i]));
    }
    NB_TRY(gauge(p, "spec_accept_rate", "Drafted tokens that were right, last ten seconds, 0 to 1.",
                 p->rates.accept_rate));
    return gauge(p, "spec_accept_length",
                 "Tokens per verified draft, the model's own included, last ten seconds.",
                 p->rates.accept_length);
}

/* Decode steps against what the memory allows; where the time of timed steps went. */
static nb_status write_floor(const page *p)
{
    const nb_engine_stats *s = &p->stats;
    nb_component_stats c;
    nb_engine_get_components(p->served->engine, &c);
    NB_TRY(counter(p, "decode_steps_total", "Steps that only write answers.", s->decode_steps));
    NB_TRY(
        one(p, "decode_step_seconds_total", "counter", "Their time.", (double)s->decode_ns / 1e9));
    NB_TRY(counter(p, "decode_step_bytes_total", "Bytes that they had to read.", s->decode_bytes));
    NB_TRY(gauge(p, "achieved_bandwidth_bytes_per_second", "The same per second, last ten seconds.",
                 p->rates.read_rate));
    NB_TRY(gauge(p, "read_bandwidth_bytes_per_second",
                 "What plain reads of the memory get; 0 while it is not known.",
                 s->read_bandwidth));
    NB_TRY(gauge(p, "decode_share_of_floor",
                 "The one over the other, 0 to 1; 0 without decode steps in the last ten seconds.",
                 p->rates.share_of_floor));
    NB_TRY(counter(p, "passes_recorded_total",
                   "Forward passes on a GPU that were replayed from a recorded graph.",
                   s->passes_recorded));
    NB_TRY(counter(p, "passes_launched_total",
                   "Forward passes on a GPU that were launched operator by operator.",
                   s->passes_launched));
    NB_TRY(counter(p, "timed_steps_total", "Steps whose operators were timed.", c.steps));
    NB_TRY(one(p, "timed_step_seconds_total", "counter", "Their time.", (double)c.step_ns / 1e9));
    NB_TRY(head(p->out, "step_component_seconds_total", "counter",
                "timed_step_seconds_total by component."));
    for (uint32_t i = 0; i < c.n; i++)
        NB_TRY(labelled_number(p, "step_component_seconds_total", "component", c.components[i].name,
                               (double)c.components[i].ns / 1e9));
    NB_TRY(head(p->out, "step_component_bytes_total", "counter",
                "Bytes of weights and cache in timed steps by component."));
    for (uint32_t i = 0; i < c.n; i++)
        NB_TRY(labelled_number(p, "step_component_bytes_total", "component", c.components[i].name,
                               c.components[i].bytes));
    return NB_OK;
}

static nb_status write_sharing(const page *p)
{
    const nb_engine_stats *s = &p->stats;
    NB_TRY(counter(p, "oea_layers_total", "Layers of steps in which answers shared experts.",
                   s->oea_layers));
    NB_TRY(counter(p, "oea_experts_before_total", "Distinct experts that their routers chose.",
                   s->oea_experts_before));
    return counter(p, "oea_experts_after_total", "Distinct experts that they read.",
                   s->oea_experts_after);
}

static nb_status write_histograms(const page *p)
{
    static const struct {
        nb_histogram_id id;
        const char *name, *help;
    } all[] = {
        {NB_HIST_TTFT, "time_to_first_token_seconds", "Arrival to the first token."},
        {NB_HIST_INTER_TOKEN, "inter_token_latency_seconds",
         "Between two tokens of an answer; tokens of one step share its time."},
        {NB_HIST_TIME_PER_TOKEN, "request_time_per_output_token_seconds",
         "Mean time between the tokens of an answer."},
        {NB_HIST_E2E, "e2e_request_latency_seconds", "Arrival to the last token."},
        {NB_HIST_QUEUE, "queue_time_seconds", "Submission to admission."},
        {NB_HIST_QUEUE, "request_queue_time_seconds", "The same under vLLM's name."},
        {NB_HIST_PREFILL, "request_prefill_time_seconds", "Admission to the first token."},
        {NB_HIST_DECODE, "request_decode_time_seconds", "First token to the last."},
        {NB_HIST_INFERENCE, "request_inference_time_seconds", "Admission to the last token."},
        {NB_HIST_PROMPT_TOKENS, "request_prompt_tokens", "Prompt tokens of a request."},
        {NB_HIST_UNCACHED_TOKENS, "request_prefill_kv_computed_tokens",
         "Prompt tokens of a request that the prefix cache did not hold."},
        {NB_HIST_GENERATION_TOKENS, "request_generation_tokens", "Answer tokens of a request."},
        {NB_HIST_STEP, "step_time_seconds", "One step of the engine."},
        {NB_HIST_STEP_TOKENS, "iteration_tokens_total", "Tokens in one step of the engine."},
    };
    nb_histogram steps;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        NB_TRY(histogram(p, all[i].name, all[i].help, all[i].id));
    }
    nb_engine_get_histogram(p->served->engine, NB_HIST_STEP, &steps);
    return one(p, "forward_execution_seconds_total", "counter", "Time spent in steps.", steps.sum);
}

/* ---------------------------------------------------------------- the server */

static nb_status write_server(const page *p)
{
    static const char *const names[] = {[NBI_SERVER_LOADING] = "loading",
                                        [NBI_SERVER_READY] = "ready",
                                        [NBI_SERVER_DRAINING] = "draining",
                                        [NBI_SERVER_STOPPING] = "stopping"};
    const nbi_server *server = p->server;
    int phase = atomic_load(&server->phase);
    bool failed = p->served && nb_engine_failure(p->served->engine);
    NB_TRY(head(p->out, "server_state", "gauge", "1 for the state the server is in."));
    for (int i = 0; i <= NBI_SERVER_STOPPING; i++) {
        NB_TRY(nbi_buf_addf(p->out, "nibble:server_state{state=\"%s\"} %d\n", names[i],
                            i == phase && !failed));
    }
    NB_TRY(nbi_buf_addf(p->out, "nibble:server_state{state=\"failed\"} %d\n", failed));
    NB_TRY(head(p->out, "build_info", "gauge", "1."));
    NB_TRY(nbi_buf_addf(p->out, "nibble:build_info{version=\"%s\"} 1\n", nb_version()));
    NB_TRY(head(p->out, "log_lines_dropped_total", "counter",
                "Lines that the access log and the request log could not take."));
    NB_TRY(nbi_buf_addf(p->out, "nibble:log_lines_dropped_total{log=\"access\"} %llu\n",
                        (unsigned long long)nbi_linelog_dropped(server->access_log)));
    NB_TRY(nbi_buf_addf(p->out, "nibble:log_lines_dropped_total{log=\"request\"} %llu\n",
                        (unsigned long long)nbi_linelog_dropped(server->request_log)));
    NB_TRY(nbi_http_counts_write(server, p->out));
    return nbi_process_metrics_write(p->out);
}

static nb_status write_page(page *p)
{
    NB_TRY(write_server(p));
    if (!p->served) return NB_OK;
    nb_engine_get_stats(p->served->engine, &p->stats);
    nbi_reporter_rates(p->server, &p->rates);
    set_model(p, p->served->facts.names[0]);
    NB_TRY(write_queue(p));
    NB_TRY(write_kv(p));
    NB_TRY(write_tokens(p));
    NB_TRY(write_requests(p));
    NB_TRY(write_drafts(p));
    NB_TRY(write_floor(p));
    NB_TRY(write_sharing(p));
    return write_histograms(p);
}

unsigned nbi_get_metrics(nbi_exchange *ex, nbi_buf *out)
{
    nbi_server *server = ex->server;
    page p = {.out = out, .server = server};
    if (atomic_load(&server->served_there)) p.served = server->served;
    ex->content_type = "text/plain; version=0.0.4; charset=utf-8";
    if (write_page(&p) == NB_OK) return 200;
    ex->content_type = NULL;
    nbi_api_no_memory(&ex->error, "the reply");
    return 0;
}
