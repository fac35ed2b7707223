/* nibble report: what a model does on this machine, in one page. Called by main.c.
 *
 * Every part is a subcommand of its own that prints JSON, run as a process of its own, one after
 * another: what one leaves in memory does not stand in the way of the next, and one that fails is a
 * sentence in the report. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "base/file.h"
#include "base/log.h"
#include "cli/cli.h"
#include "cli/report_run.h"
#include "cli/report_write.h"
#include "format/config.h"

#define REPORT_MAX   ((size_t)64 << 20)
#define CONTEXTS_MAX 16u
#define SWEEP_REPEAT 3u

static const nbi_command command = {
    .name = "report",
    .summary = "Checks, measures and explains a model on this machine, in one page.",
    .usage = "--model DIR --out DIR [OPTIONS]\n       nibble report --compare A B [--out DIR]",
    .text = "Runs check, bench decode with its breakdown, roofline, a sweep of contexts, a server\n"
            "with one stream and with 64 requests of 256 tokens in and 256 out, and doctor, and\n"
            "writes into the folder of --out:\n"
            "  report.html   one page, with its plots in it\n"
            "  report.md     the same for a repository, with the plots as SVG files\n"
            "  report.json   all figures\n"
            "  trace.json    the calls of the last timed steps, for Perfetto\n"
            "Takes from a minute to half an hour. Nothing else should run meanwhile.\n\n"
            "--compare takes the folders of two reports and prints what changed from A to B, as\n"
            "Markdown; with --out also as compare.md and compare.html.\n\n"
            "The exit status is 1 when a part failed; the others are in the report all the same.",
    .operands = "two folders, with --compare",
};

typedef struct args {
    const char *model, *out, *device, *contexts;
    uint32_t threads, requests, input, output, tokens, repeat;
    bool compare, no_serve;
    char words[8][16]; /* numbers as text, of `number()` */
    uint32_t n_words;
    json_t *report;
    bool failed;
} args;

/* ---------------------------------------------------------------- parts */

static void start_words(const args *a, nbi_report_words *w, const char *first, const char *second)
{
    *w = (nbi_report_words){0};
    nbi_report_add(w, first);
    if (second) nbi_report_add(w, second);
    nbi_report_add(w, "--model", a->model);
}

/* A number as a word that lives until the next part. */
static const char *number(args *a, uint32_t n)
{
    char *word = a->words[a->n_words++ % 8];
    snprintf(word, sizeof a->words[0], "%u", n);
    return word;
}

static void add_device(args *a, nbi_report_words *w)
{
    nbi_report_add(w, "--device", a->device);
    if (a->threads) nbi_report_add(w, "--threads", number(a, a->threads));
}

/* A part's figures, or the sentence of its failure. Takes `value`. */
static void put(args *a, const char *key, json_t *value, const nb_error *err)
{
    if (value) {
        json_object_set_new(a->report, key, value);
        return;
    }
    fprintf(stderr, "nibble report: %s\n", err->text);
    a->failed = true;
    json_object_set_new(json_object_get(a->report, "failures"), key, json_string(err->text));
}

static void run_part(args *a, const char *key, const nbi_report_words *w, int max_status)
{
    json_t *value = NULL;
    nb_error err = {0};
    fprintf(stderr, "%s ...\n", key);
    if (nbi_report_json(&value, w, max_status, &err) != NB_OK) value = NULL;
    put(a, key, value, &err);
}

static void run_check(args *a)
{
    nbi_report_words w;
    start_words(a, &w, "check", NULL);
    add_device(a, &w);
    nbi_report_add(&w, "--json");
    run_part(a, "check", &w, 1);
}

static void run_decode(args *a, const char *trace)
{
    nbi_report_words w;
    start_words(a, &w, "bench", "decode");
    add_device(a, &w);
    nbi_report_add(&w, "--tokens", number(a, a->tokens), "--repeat", number(a, a->repeat),
                   "--trace", trace, "--json");
    run_part(a, "decode", &w, 0);
}

static void run_roofline(args *a)
{
    char bandwidth[32];
    nbi_report_words w;
    const double measured = nbi_report_number(a->report, "decode.read_bandwidth");
    if (!(measured > 0)) return;
    snprintf(bandwidth, sizeof bandwidth, "%.6g", measured);
    start_words(a, &w, "roofline", NULL);
    nbi_report_add(&w, "--bandwidth", bandwidth, "--json");
    run_part(a, "roofline", &w, 0);
}

/* Tokens that a sequence of this model may have; 0: not known. */
static uint32_t limit_of(const args *a)
{
    nbi_config config;
    nb_error ignored;
    if (nbi_config_load(&config, a->model, &ignored) != NB_OK) return 0;
    const uint32_t limit = config.max_positions;
    nbi_config_free(&config);
    return limit;
}

/* `--contexts 0,1024`: one decode run for each that the model has room for. */
static void run_contexts(args *a)
{
    const uint32_t limit = limit_of(a), room = (SWEEP_REPEAT + 1) * a->tokens;
    json_t *list = json_array();
    nb_error err = {0};
    uint32_t n = 0;
    for (const char *at = a->contexts; *at && n < CONTEXTS_MAX; n++) {
        char context[16];
        nbi_report_words w;
        json_t *value = NULL;
        const size_t length = strcspn(at, ",");
        snprintf(context, sizeof context, "%.*s", (int)length, at);
        at += length + (at[length] == ',');
        if (limit && strtoull(context, NULL, 10) + room > limit) continue;
        fprintf(stderr, "context %s ...\n", context);
        start_words(a, &w, "bench", "decode");
        add_device(a, &w);
        nbi_report_add(&w, "--context", context, "--tokens", number(a, a->tokens), "--repeat",
                       number(a, SWEEP_REPEAT), "--json");
        if (nbi_report_json(&value, &w, 0, &err) != NB_OK) break;
        json_object_set_new(value, "context", json_integer(strtoll(context, NULL, 10)));
        json_array_append_new(list, value);
    }
    if (json_array_size(list) || !err.text[0]) json_object_set(a->report, "contexts", list);
    if (err.text[0]) put(a, "contexts", NULL, &err); /* the longer ones are missing */
    json_decref(list);
}

/* With the picture that bench serve draws, as KEY.svg. */
static void run_load(args *a, const char *key, const char *url, uint32_t requests, bool one)
{
    nbi_report_words w = {0};
    char file[32];
    snprintf(file, sizeof file, "%s.svg", key);
    char *plot = nbi_path_join(a->out, file);
    if (!plot) return;
    nbi_report_add(&w, "bench", "serve", "--base-url", url, "--num-prompts", number(a, requests),
                   "--random-input-len", number(a, a->input), "--random-output-len",
                   number(a, a->output), "--ignore-eos", "--metric-percentiles", "50,90,99",
                   "--plot", plot, "--json");
    if (one) nbi_report_add(&w, "--max-concurrency", "1");
    run_part(a, key, &w, 0);
    nbi_free(plot);
}

static void run_served(args *a)
{
    nbi_report_server server;
    nbi_report_words w;
    nb_error err = {0};
    char *log = nbi_path_join(a->out, "serve.log");
    if (!log) return;
    start_words(a, &w, "serve", NULL);
    add_device(a, &w);
    nbi_report_add(&w, "--port", "0");
    fprintf(stderr, "serve ...\n");
    if (nbi_report_serve(&server, &w, log, &err) == NB_OK) {
        run_load(a, "stream", server.url, 4, true);
        run_load(a, "load", server.url, a->requests, false);
        nbi_report_serve_end(&server);
    } else {
        put(a, "stream", NULL, &err);
        put(a, "load", NULL, &err);
    }
    nbi_free(log);
}

static void run_doctor(args *a)
{
    nbi_report_words w;
    start_words(a, &w, "doctor", NULL);
    nbi_report_add(&w, "--json");
    run_part(a, "doctor", &w, 2);
}

/* ---------------------------------------------------------------- the whole */

static nb_status write_json(const args *a, nb_error *err)
{
    nbi_buf text = {0};
    char *path = nbi_path_join(a->out, "report.json");
    nb_status st = path ? nbi_json_dump(&text, a->report) : NB_NO_MEMORY;
    if (st == NB_OK)
        st = nbi_file_write(path, text.data, text.len, err);
    else
        nbi_fail(err, st, "no memory for the report");
    nbi_buf_free(&text);
    nbi_free(path);
    return st;
}

static void describe(args *a)
{
    char date[32] = "";
    const time_t now = time(NULL);
    struct tm utc;
    const json_t *decode = json_object_get(a->report, "decode");
    const char *device = json_string_value(json_object_get(decode, "device"));
    if (gmtime_r(&now, &utc)) strftime(date, sizeof date, "%Y-%m-%d %H:%M UTC", &utc);
    json_object_set_new(a->report, "nibble", json_string(nb_version()));
    json_object_set_new(a->report, "model", json_string(a->model));
    json_object_set_new(a->report, "date", json_string(date));
    json_object_set_new(a->report, "device", json_string(device ? device : "an unknown device"));
}

static nb_status make(args *a, nb_error *err)
{
    if (mkdir(a->out, 0777) != 0 && errno != EEXIST)
        return nbi_fail(err, NB_IO, "%s: cannot be made: %s", a->out, strerror(errno));
    char *trace = nbi_path_join(a->out, "trace.json");
    a->report = json_pack("{s:{}}", "failures");
    if (!trace || !a->report) {
        nbi_free(trace);
        return nbi_fail(err, NB_NO_MEMORY, "no memory for the report");
    }
    run_doctor(a);
    run_check(a);
    run_decode(a, trace);
    run_roofline(a);
    run_contexts(a);
    if (!a->no_serve) run_served(a);
    nbi_free(trace);
    describe(a);
    NB_TRY(write_json(a, err));
    return nbi_report_write(a->report, a->out, err);
}

static nb_status load(json_t **out, const char *dir, nb_error *err)
{
    char *path = nbi_path_join(dir, "report.json");
    if (!path) return nbi_fail(err, NB_NO_MEMORY, "no memory for %s", dir);
    const nb_status st = nbi_json_load(out, path, REPORT_MAX, err);
    nbi_free(path);
    return st;
}

static nb_status compare(const args *a, const char *first, const char *second, nb_error *err)
{
    json_t *from = NULL, *to = NULL;
    nbi_buf text = {0};
    nb_status st = load(&from, first, err);
    if (st == NB_OK) st = load(&to, second, err);
    if (st == NB_OK && a->out && mkdir(a->out, 0777) != 0 && errno != EEXIST)
        st = nbi_fail(err, NB_IO, "%s: cannot be made: %s", a->out, strerror(errno));
    if (st == NB_OK) st = nbi_report_compare(&text, from, to, a->out, err);
    if (st == NB_OK) fputs(text.data, stdout);
    nbi_buf_free(&text);
    json_decref(from);
    json_decref(to);
    return st;
}

int nbi_cmd_report(int argc, char **argv)
{
    args a = {.device = "auto",
              .contexts = "0,256,1024,4096",
              .requests = 64,
              .input = 256,
              .output = 256,
              .tokens = 32,
              .repeat = 5};
    const nbi_opt options[] = {
        {"model", NBI_OPT_STRING, &a.model, "DIR", "checkpoint in Hugging Face layout", false},
        {"out", NBI_OPT_STRING, &a.out, "DIR", "folder to write to; made when it is not there",
         false},
        {"compare", NBI_OPT_FLAG, &a.compare, NULL, "what changed between two reports", false},
        {"device", NBI_OPT_STRING, &a.device, "NAME",
         "auto (default): a GPU where there is one; cpu, cuda", false},
        {"threads", NBI_OPT_U32, &a.threads, "N", "default: all cores this process may use", false},
        {"contexts", NBI_OPT_STRING, &a.contexts, "LIST",
         "of the sweep, ascending (default 0,256,1024,4096)", false},
        {"requests", NBI_OPT_U32, &a.requests, "N", "sent together (default 64)", false},
        {"input-len", NBI_OPT_U32, &a.input, "N", "tokens of their prompts (default 256)", false},
        {"output-len", NBI_OPT_U32, &a.output, "N", "and of their answers (default 256)", false},
        {"tokens", NBI_OPT_U32, &a.tokens, "N", "steps of a repeat of bench (default 32)", false},
        {"repeat", NBI_OPT_U32, &a.repeat, "N", "repeats of bench (default 5)", false},
        {"no-serve", NBI_OPT_FLAG, &a.no_serve, NULL, "leave the server's parts out", false},
        {0},
    };
    int n_operands = 0;
    nb_error err = {0};
    const int status = nbi_cli_parse(&command, options, argc, argv, &n_operands);
    if (status >= 0) return status;
    if (a.compare ? n_operands != 2 : n_operands != 0)
        return nbi_cli_usage(&command, "--compare takes two folders, a report none");
    if (!a.compare && (!a.model || !a.out))
        return nbi_cli_usage(&command, "expected --model and --out, or --compare A B");
    nbi_cli_log_start(NB_LOG_WARN);
    const nb_status st = a.compare ? compare(&a, argv[1], argv[2], &err) : make(&a, &err);
    json_decref(a.report);
    if (st != NB_OK) return nbi_cli_fail(&command, &err);
    if (!a.compare) printf("%s/report.html, report.md, report.json\n", a.out);
    return a.failed ? NBI_EXIT_FAILED : NBI_EXIT_OK;
}
