/* nibble bench serve: load against any OpenAI-compatible server. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "cli/bench_serve_report.h"
#include "cli/cli.h"
#include "perf/load_plot.h"

static const nbi_command command = {
    .name = "bench serve",
    .summary = "Load against an OpenAI-compatible server, and the figures of it.",
    .usage = "[OPTIONS]",
    .text =
        "Open loop: --request-rate R sends requests at random times, R a second on average,\n"
        "whatever the server does. Closed loop: --max-concurrency N keeps N requests under way.\n"
        "Both together: the rate, as long as fewer than N are under way.\n"
        "\n"
        "Random prompts are token ids where the server has /tokenize and the endpoint takes ids,\n"
        "else words, as many as its own count of two prompts says; the report tells which.\n"
        "Tokens are counted by the server's usage, never by chunks of a stream or by encoding\n"
        "the text again. A file holds ShareGPT JSON (\"conversations\") or JSON lines with\n"
        "\"prompt\" or \"messages\" and \"output_len\". Figures have the names and definitions of\n"
        "vllm bench serve and sglang.bench_serving: docs/benchmarking.md.\n"
        "\n"
        "The exit status is 1 when no request succeeded.",
};

typedef struct args {
    nbi_load_options load;
    nbi_report_choice choice;
    nbi_load_goodput goodput;
    const char *base_url, *host, *request_rate, *dataset, *metrics, *percentiles;
    const char *output_file, *plot;
    nbi_opt_list bounds;
    uint32_t port;
    bool stream, no_stream, json, details, quiet;
    char url[512];
} args;

/* ---- progress */

static void show_note(void *user, const char *sentence)
{
    const args *a = user;
    if (!a->quiet) fprintf(stderr, "%s ...\n", sentence);
}

static void show_progress(void *user, const nbi_load_progress *p)
{
    enum { WIDTH = 30 };
    const args *a = user;
    if (a->quiet || !isatty(STDERR_FILENO)) return;
    char bar[WIDTH + 1];
    for (uint32_t i = 0; i < WIDTH; i++)
        bar[i] = (uint64_t)i * p->total < (uint64_t)p->done * WIDTH ? '#' : '.';
    bar[WIDTH] = 0;
    fprintf(stderr, "\r[%s] %u of %u, %u under way, %u failed, %.0f tokens/s, %.0f s  ", bar,
            p->done, p->total, p->running, p->failed,
            p->seconds > 0 ? (double)p->output_tokens / p->seconds : 0, p->seconds);
    if (p->done == p->total) fputc('\n', stderr);
}

/* ---- options */

static int settle_url(args *a)
{
    if (a->base_url) {
        size_t n = strlen(a->base_url);
        while (n && a->base_url[n - 1] == '/') n--;
        /* Clients are often given the URL with /v1, which is part of the endpoint here. */
        if (n >= 3 && !strncmp(a->base_url + n - 3, "/v1", 3) &&
            !strncmp(a->load.endpoint, "/v1/", 4))
            n -= 3;
        if (n >= sizeof a->url) return nbi_cli_usage(&command, "--base-url is too long");
        memcpy(a->url, a->base_url, n);
        a->url[n] = 0;
    } else {
        const bool v6 = strchr(a->host, ':') && a->host[0] != '[';
        int n = snprintf(a->url, sizeof a->url, "http://%s%s%s:%u", v6 ? "[" : "", a->host,
                         v6 ? "]" : "", a->port);
        if (n < 0 || (size_t)n >= sizeof a->url)
            return nbi_cli_usage(&command, "--host is too long");
    }
    a->load.client.base_url = a->url;
    return -1;
}

/* The next of a list with commas; NULL at its end. */
static const char *next_item(const char **list, size_t *n)
{
    const char *item = *list;
    if (!item || !*item) return NULL;
    *n = strcspn(item, ",");
    *list = item[*n] ? item + *n + 1 : NULL;
    return item;
}

static bool is(const char *item, size_t n, const char *name)
{
    return n == strlen(name) && !memcmp(item, name, n);
}

static int settle_metrics(args *a)
{
    nbi_report_choice *c = &a->choice;
    const char *list = a->metrics, *item;
    size_t n;
    while ((item = next_item(&list, &n))) {
        bool *wanted = is(item, n, "ttft")   ? &c->ttft
                       : is(item, n, "tpot") ? &c->tpot
                       : is(item, n, "itl")  ? &c->itl
                       : is(item, n, "e2el") ? &c->e2el
                                             : NULL;
        if (!wanted)
            return nbi_cli_usage(&command,
                                 "--percentile-metrics: \"%.*s\"; expected ttft, tpot, itl or e2el",
                                 (int)n, item);
        *wanted = true;
    }
    list = a->percentiles;
    while ((item = next_item(&list, &n))) {
        char *end;
        double p = strtod(item, &end);
        if (end != item + n || !(p > 0 && p <= 100))
            return nbi_cli_usage(&command,
                                 "--metric-percentiles: \"%.*s\"; expected a number above 0, at "
                                 "most 100",
                                 (int)n, item);
        if (c->n_percentiles == NBI_LOAD_PERCENTILES_MAX)
            return nbi_cli_usage(&command, "--metric-percentiles: more than %d",
                                 NBI_LOAD_PERCENTILES_MAX);
        c->percentiles[c->n_percentiles++] = p;
    }
    return -1;
}

static int settle_goodput(args *a)
{
    for (size_t i = 0; i < a->bounds.n; i++) {
        const char *text = a->bounds.items[i], *colon = strchr(text, ':');
        const size_t n = colon ? (size_t)(colon - text) : 0;
        double *bound = is(text, n, "ttft")   ? &a->goodput.ttft_ms
                        : is(text, n, "tpot") ? &a->goodput.tpot_ms
                        : is(text, n, "e2el") ? &a->goodput.e2el_ms
                                              : NULL;
        char *end = NULL;
        if (bound) *bound = strtod(colon + 1, &end);
        if (!bound || end == colon + 1 || *end || !(*bound > 0))
            return nbi_cli_usage(&command,
                                 "--goodput: \"%s\"; expected ttft:MS, tpot:MS or e2el:MS", text);
        a->choice.with_goodput = true;
    }
    return -1;
}

static int settle_dataset(args *a)
{
    nbi_load_options *o = &a->load;
    if (!strcmp(a->dataset, "random"))
        o->dataset = NBI_LOAD_RANDOM;
    else if (!strcmp(a->dataset, "shared-prefix"))
        o->dataset = NBI_LOAD_SHARED_PREFIX;
    else if (!strcmp(a->dataset, "file"))
        o->dataset = NBI_LOAD_FILE;
    else
        return nbi_cli_usage(
            &command, "--dataset-name: \"%s\"; expected random, shared-prefix or file", a->dataset);
    if (o->path && o->dataset != NBI_LOAD_FILE)
        return nbi_cli_usage(&command,
                             "--dataset-path is given, --dataset-name is \"%s\"; expected "
                             "file",
                             a->dataset);
    return -1;
}

/* -1 to go on, else the exit status. */
static int settle(args *a)
{
    nbi_load_options *o = &a->load;
    int status;
    if (a->stream && a->no_stream)
        return nbi_cli_usage(&command, "--stream and --no-stream exclude each other");
    o->stream = !a->no_stream;
    o->request_rate = (double)INFINITY;
    if (strcmp(a->request_rate, "inf") != 0) {
        char *end;
        o->request_rate = strtod(a->request_rate, &end);
        if (end == a->request_rate || *end)
            return nbi_cli_usage(&command, "--request-rate: \"%s\"; expected a number or inf",
                                 a->request_rate);
    }
    if ((status = settle_url(a)) >= 0) return status;
    if ((status = settle_dataset(a)) >= 0) return status;
    if ((status = settle_metrics(a)) >= 0) return status;
    if ((status = settle_goodput(a)) >= 0) return status;
    if (!o->client.api_key) o->client.api_key = getenv("OPENAI_API_KEY");
    if (o->client.api_key && !*o->client.api_key) o->client.api_key = NULL;
    o->progress = show_progress;
    o->note = show_note;
    o->user = a;
    a->quiet = !isatty(STDERR_FILENO);
    return -1;
}

/* ---- results */

static nb_status append_line(const char *path, nbi_buf *line, nb_error *err)
{
    NB_TRY(nbi_buf_add(line, "\n", 1));
    FILE *f = fopen(path, "a");
    if (!f) return nbi_fail(err, NB_IO, "%s: %s", path, strerror(errno));
    bool ok = fwrite(line->data, 1, line->len, f) == line->len;
    ok = fclose(f) == 0 && ok;
    return ok ? NB_OK : nbi_fail(err, NB_IO, "%s: %s", path, strerror(errno));
}

static nb_status write_results(args *a, const nbi_load_result *result, const nbi_load_figures *f,
                               nb_error *err)
{
    nb_status st = NB_OK;
    nbi_buf json = {.max = (size_t)8 << 30}, svg = {0};
    if (a->json || a->output_file) {
        st = nbi_bench_serve_json(&json, &a->load, result, f, &a->choice, a->details);
        if (st != NB_OK) nbi_fail(err, st, "no memory for the JSON report");
    }
    if (st == NB_OK && a->json) printf("%s\n", json.data);
    if (st == NB_OK && !a->json) nbi_bench_serve_print(&a->load, result, f, &a->choice);
    if (st == NB_OK && a->output_file) st = append_line(a->output_file, &json, err);
    if (st == NB_OK && a->plot) {
        st = nbi_load_plot(&svg, result, err);
        if (st == NB_OK) st = nbi_file_write(a->plot, svg.data, svg.len, err);
    }
    nbi_buf_free(&json);
    nbi_buf_free(&svg);
    return st;
}

static int run(args *a)
{
    nb_error err;
    nbi_load_result result;
    nbi_load_figures figures;
    if (nbi_load_run(&result, &a->load, &err) != NB_OK) return nbi_cli_fail(&command, &err);
    nb_status st = nbi_load_figures_make(&figures, &result, a->load.stream, a->choice.percentiles,
                                         a->choice.n_percentiles, &a->goodput, &err);
    if (st == NB_OK) st = write_results(a, &result, &figures, &err);
    nbi_load_result_free(&result);
    if (st != NB_OK) return nbi_cli_fail(&command, &err);
    return figures.completed ? NBI_EXIT_OK : NBI_EXIT_FAILED;
}

/* long: the table of options is the command's reference */
int nbi_cmd_bench_serve(int argc, char **argv)
{
    args a = {.load = {.client = {.timeout_s = 3600},
                       .endpoint = "/v1/completions",
                       .input_len = 1024,
                       .output_len = 128,
                       .prefix_len = 512,
                       .prefix_groups = 8,
                       .burstiness = 1,
                       .n_warmup = 1,
                       .seed = 42},
              .host = "127.0.0.1",
              .port = 8000,
              .request_rate = "inf",
              .dataset = "random",
              .metrics = "ttft,tpot,itl,e2el",
              .percentiles = "99"};
    nbi_load_options *o = &a.load;
    const nbi_opt options[] = {
        {"base-url", NBI_OPT_STRING, &a.base_url, "URL",
         "http://host:port or https://...; instead of", false},
        {"host", NBI_OPT_STRING, &a.host, "NAME", "default 127.0.0.1", false},
        {"port", NBI_OPT_U32, &a.port, "N", "default 8000", false},
        {"endpoint", NBI_OPT_STRING, &o->endpoint, "PATH",
         "/v1/completions (default) or /v1/chat/completions", false},
        {"model", NBI_OPT_STRING, &o->model, "NAME", "default: the first of /v1/models", false},
        {"api-key", NBI_OPT_STRING, &o->client.api_key, "KEY", "default: OPENAI_API_KEY", false},
        {"cacert", NBI_OPT_STRING, &o->client.ca_file, "FILE", "certificates to trust, PEM", false},
        {"insecure", NBI_OPT_FLAG, &o->client.insecure, NULL, "certificates are not checked",
         false},
        {"ready-check-timeout-sec", NBI_OPT_F64, &o->ready_wait_s, "S",
         "wait so long for the server to be ready (default 0)", false},
        {"timeout", NBI_OPT_F64, &o->client.timeout_s, "S", "of one request (default 3600)", false},
        {"request-rate", NBI_OPT_STRING, &a.request_rate, "R",
         "requests per second, or inf: all at once (default)", false},
        {"burstiness", NBI_OPT_F64, &o->burstiness, "B",
         "of the gaps between requests: 1 (default) Poisson,\nless is burstier, more is more even",
         false},
        {"max-concurrency", NBI_OPT_U32, &o->max_concurrency, "N",
         "requests under way at most (default: no limit)", false},
        {"num-prompts", NBI_OPT_U32, &o->n_prompts, "N",
         "requests (default 1000, or all of a smaller file)", false},
        {"warmup-requests", NBI_OPT_U32, &o->n_warmup, "N",
         "before the measured ones, with prompts of their own\n(default 1)", false},
        {"seed", NBI_OPT_U64, &o->seed, "N", "of prompts and times (default 42)", false},
        {"dataset-name", NBI_OPT_STRING, &a.dataset, "NAME",
         "random (default), shared-prefix or file", false},
        {"random-input-len", NBI_OPT_U32, &o->input_len, "N", "tokens of a prompt (default 1024)",
         false},
        {"random-output-len", NBI_OPT_U32, &o->output_len, "N", "tokens of an answer (default 128)",
         false},
        {"random-range-ratio", NBI_OPT_F64, &o->range_ratio, "R",
         "lengths between (1-R) and (1+R) times these (default 0)", false},
        {"shared-prefix-len", NBI_OPT_U32, &o->prefix_len, "N",
         "tokens in front of the prompt that a group shares\n(default 512)", false},
        {"shared-prefix-groups", NBI_OPT_U32, &o->prefix_groups, "N", "default 8", false},
        {"dataset-path", NBI_OPT_STRING, &o->path, "FILE", "of the data set file", false},
        {"output-len", NBI_OPT_U32, &o->file_output_len, "N",
         "answer length in place of the file's", false},
        {"text-prompts", NBI_OPT_FLAG, &o->as_text, NULL, "words even where ids could be sent",
         false},
        {"ignore-eos", NBI_OPT_FLAG, &o->ignore_eos, NULL,
         "answers go on to their length (nibble, SGLang, vLLM)", false},
        {"temperature", NBI_OPT_F64, &o->temperature, "T", "default 0; below 0: not sent", false},
        {"extra-body", NBI_OPT_STRING, &o->extra_body, "JSON",
         "object whose members go into every request", false},
        {"stream", NBI_OPT_FLAG, &a.stream, NULL, "answers as streams (default)", false},
        {"no-stream", NBI_OPT_FLAG, &a.no_stream, NULL, "whole answers: only E2EL and throughput",
         false},
        {"percentile-metrics", NBI_OPT_STRING, &a.metrics, "LIST",
         "blocks of the report (default ttft,tpot,itl,e2el)", false},
        {"metric-percentiles", NBI_OPT_STRING, &a.percentiles, "LIST",
         "default 99; for instance 50,90,99.9", false},
        {"goodput", NBI_OPT_LIST, &a.bounds, "NAME:MS",
         "count requests within ttft:MS, tpot:MS, e2el:MS; may be\ngiven several times", false},
        {"json", NBI_OPT_FLAG, &a.json, NULL, "one JSON object on stdout instead of the report",
         false},
        {"output-file", NBI_OPT_STRING, &a.output_file, "FILE",
         "the JSON object is appended to FILE as a line", false},
        {"output-details", NBI_OPT_FLAG, &a.details, NULL, "arrays with a value per request in it",
         false},
        {"plot", NBI_OPT_STRING, &a.plot, "FILE.svg", "draw TTFT, ITL and load", false},
        {0},
    };
    int status = nbi_cli_parse(&command, options, argc, argv, NULL);
    if (status < 0) status = settle(&a);
    if (status < 0) status = run(&a);
    nbi_opt_list_free(&a.bounds);
    return status;
}
