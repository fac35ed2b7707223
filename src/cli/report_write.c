/* The pages of `nibble report`. Called by cmd_report.c. */
#include "cli/report_write.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "cli/report_document.h"
#include "perf/svg.h"

#define BARS_MAX    32u
#define PICTURE_MAX ((size_t)16 << 20)

static const json_t *find(const json_t *report, const char *path)
{
    const json_t *at = report;
    while (at && *path) {
        char key[64];
        const size_t n = strcspn(path, ".");
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        at = json_object_get(at, key);
        path += n + (path[n] == '.');
    }
    return at;
}

double nbi_report_number(const json_t *report, const char *path)
{
    const json_t *value = find(report, path);
    return json_is_number(value) ? json_number_value(value) : (double)NAN;
}

static double number(const json_t *object, const char *key)
{
    return nbi_report_number(object, key);
}

static const char *string(const json_t *object, const char *path)
{
    const char *s = json_string_value(find(object, path));
    return s ? s : "";
}

/* The section, or NULL with the sentence why it is not there. */
static const json_t *section(nbi_document *d, const json_t *report, const char *key,
                             const char *heading)
{
    char path[96];
    nbi_document_heading(d, heading);
    const json_t *s = json_object_get(report, key);
    if (s) return s;
    snprintf(path, sizeof path, "failures.%s", key);
    const char *why = string(report, path);
    nbi_document_text(d, "Not there: %s.", why[0] ? why : "it was left out");
    return NULL;
}

/* ---------------------------------------------------------------- pictures */

typedef struct bars {
    double x[BARS_MAX], y[BARS_MAX];
    char text[BARS_MAX][64];
    const char *labels[BARS_MAX];
    size_t n;
    double right;
} bars;

static void add_bar(bars *b, double value, const char *text)
{
    if (b->n == BARS_MAX || !(value > 0)) return;
    b->x[b->n] = value;
    b->y[b->n] = -(double)b->n;
    snprintf(b->text[b->n], sizeof b->text[0], "%s", text);
    b->labels[b->n] = b->text[b->n];
    if (value > b->right) b->right = value;
    b->n++;
}

static void draw(nbi_document *d, const char *name, const char *title, const nbi_svg_panel *panels,
                 size_t n)
{
    nbi_buf svg = {0};
    nb_error err;
    if (nbi_svg_write(&svg, title, panels, n, n, &err) == NB_OK)
        nbi_document_picture(d, name, title, &svg);
    nbi_buf_free(&svg);
}

static void draw_bars(nbi_document *d, const char *name, const char *title, const bars *b,
                      const char *unit)
{
    const double right = 1.6 * b->right, above = 1, below = -(double)b->n;
    if (!b->n) return;
    const nbi_svg_series series[] = {{NULL, b->x, b->y, b->n, NBI_SVG_BARS, b->labels},
                                     {NULL, &right, &above, 1, NBI_SVG_LINE, NULL},
                                     {NULL, &right, &below, 1, NBI_SVG_LINE, NULL}};
    const nbi_svg_panel panel = {.x_label = unit, .bare_y = true, .series = series, .n_series = 3};
    draw(d, name, title, &panel, 1);
}

/* One that is a file already. */
static void place_file(nbi_document *d, const char *name, const char *title)
{
    char file[64];
    nbi_buf svg = {0};
    snprintf(file, sizeof file, "%s.svg", name);
    char *path = nbi_path_join(d->dir, file);
    if (path && nbi_file_read(&svg.data, &svg.len, path, PICTURE_MAX, NULL) == NB_OK)
        nbi_document_picture(d, name, title, &svg);
    nbi_free(svg.data);
    nbi_free(path);
}

/* ---------------------------------------------------------------- sections */

static void write_summary(nbi_document *d, const json_t *r)
{
    static const struct {
        const char *what, *path, *unit;
        double times;
    } rows[] = {
        {"one stream, the model alone", "decode.ms_per_token", "ms per token", 1},
        {"of it, the floor", "decode.floor_ms", "ms", 1},
        {"share of the floor", "decode.share_of_floor", "%", 100},
        {"read bandwidth", "decode.read_bandwidth", "GB/s", 1e-9},
        {"one stream over HTTP, first token (median)", "stream.median_ttft_ms", "ms", 1},
        {"one stream over HTTP, per token (median TPOT)", "stream.median_tpot_ms", "ms", 1},
        {"one stream over HTTP, between tokens, 99 of 100", "stream.p99_itl_ms", "ms", 1},
        {"all requests together, tokens", "load.output_throughput", "per second", 1},
        {"all requests together, first token (median)", "load.median_ttft_ms", "ms", 1},
        {"all requests together, between tokens (median)", "load.median_itl_ms", "ms", 1},
        {"all requests together, between tokens, 99 of 100", "load.p99_itl_ms", "ms", 1},
    };
    nbi_document_text(d, "%s on %s, nibble %s, %s.", string(r, "model"), string(r, "device"),
                      string(r, "nibble"), string(r, "date"));
    nbi_document_table(d, "figure\t>value\tunit");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const double v = rows[i].times * nbi_report_number(r, rows[i].path);
        if (isfinite(v)) nbi_document_row(d, "%s\t%.3f\t%s", rows[i].what, v, rows[i].unit);
    }
    nbi_document_table_end(d);
}

static void write_breakdown(nbi_document *d, const json_t *r)
{
    const json_t *decode = section(d, r, "decode", "Where a decode step's time goes");
    const json_t *b = json_object_get(decode, "breakdown"), *row;
    size_t i;
    bars times = {0};
    if (!b) return;
    nbi_document_text(d,
                      "%.0f timed steps of one stream; bytes are those of weights and cache, the "
                      "floor is bytes over %.1f GB/s of plain reads in the same run. Timed steps "
                      "took %.3f ms a token, untimed ones %.3f ms.",
                      number(b, "steps"), 1e-9 * number(b, "read_bandwidth"),
                      number(decode, "timed_ms_per_token"), number(decode, "ms_per_token"));
    nbi_document_table(d, "component\t>calls\t>time us\t>of step\t>MB\t>floor us\t>of floor");
    json_array_foreach(json_object_get(b, "components"), i, row)
    {
        const double ms = number(row, "ms");
        nbi_document_row(d, "%s\t%.0f\t%.1f\t%.1f %%\t%.3f\t%.1f\t%.1f %%",
                         string(row, "component"), number(row, "calls"), 1e3 * ms,
                         100 * number(row, "share_of_step"), 1e-6 * number(row, "bytes"),
                         1e3 * number(row, "floor_ms"), 100 * number(row, "share_of_floor"));
        char text[64];
        snprintf(text, sizeof text, "%s, %.0f us", string(row, "component"), 1e3 * ms);
        add_bar(&times, 1e3 * ms, text);
    }
    const json_t *step = json_object_get(b, "step");
    nbi_document_row(d, "step\t%.0f\t%.1f\t100 %%\t%.3f\t%.1f\t%.1f %%", number(step, "calls"),
                     1e3 * number(step, "ms"), 1e-6 * number(step, "bytes"),
                     1e3 * number(step, "floor_ms"), 100 * number(step, "share_of_floor"));
    nbi_document_table_end(d);
    draw_bars(d, "breakdown", "time of a decode step by component", &times, "us");
    nbi_document_text(d, "Most time above the floor:");
    nbi_document_table(d, "component\toperator\t>lost us\tlikely reason");
    json_array_foreach(json_object_get(b, "slowest"), i, row)
    {
        nbi_document_row(d, "%s\t%s\t%.1f\t%s", string(row, "component"), string(row, "operator"),
                         1e3 * number(row, "lost_ms"), string(row, "reason"));
    }
    nbi_document_table_end(d);
    nbi_document_text(d, "trace.json beside this page opens in ui.perfetto.dev.");
}

static void write_contexts(nbi_document *d, const json_t *r)
{
    const json_t *list = section(d, r, "contexts", "Decode by context"), *row;
    double x[64], ms[64], floor[64];
    size_t i, n = 0;
    if (!list) return;
    nbi_document_table(d, ">context\t>ms per token\t>floor ms\t>of floor\t>tokens/s");
    json_array_foreach(list, i, row)
    {
        nbi_document_row(d, "%.0f\t%.3f\t%.3f\t%.1f %%\t%.1f", number(row, "context"),
                         number(row, "ms_per_token"), number(row, "floor_ms"),
                         100 * number(row, "share_of_floor"), number(row, "tokens_per_s"));
        if (n == 64) continue;
        x[n] = number(row, "context");
        ms[n] = number(row, "ms_per_token");
        floor[n++] = number(row, "floor_ms");
    }
    nbi_document_table_end(d);
    const nbi_svg_series series[] = {{"measured", x, ms, n, NBI_SVG_LINE, NULL},
                                     {"floor", x, floor, n, NBI_SVG_LINE, NULL}};
    const nbi_svg_panel panel = {.x_label = "tokens in the cache",
                                 .y_label = "ms per token",
                                 .series = series,
                                 .n_series = 2};
    if (n > 1) draw(d, "contexts", "time of a token by context", &panel, 1);
}

static void write_load(nbi_document *d, const json_t *r, const char *key, const char *heading)
{
    static const char *const metrics[] = {"ttft", "tpot", "itl", "e2el"};
    const json_t *s = section(d, r, key, heading);
    if (!s) return;
    nbi_document_text(d,
                      "%.0f of %.0f requests, %.0f prompt and %.0f answer tokens in %.2f s: %.1f "
                      "answer tokens/s, %.2f requests/s.",
                      number(s, "completed"), number(s, "num_prompts"),
                      number(s, "total_input_tokens"), number(s, "total_output_tokens"),
                      number(s, "duration"), number(s, "output_throughput"),
                      number(s, "request_throughput"));
    nbi_document_table(d, "ms\t>mean\t>median\t>p90\t>p99\t>max");
    for (size_t i = 0; i < sizeof metrics / sizeof *metrics; i++) {
        static const char *const stats[] = {"mean", "median", "p90", "p99", "max"};
        double v[5];
        for (size_t k = 0; k < 5; k++) {
            char name[64];
            snprintf(name, sizeof name, "%s_%s_ms", stats[k], metrics[i]);
            v[k] = number(s, name);
        }
        nbi_document_row(d, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f", metrics[i], v[0], v[1], v[2], v[3],
                         v[4]);
    }
    nbi_document_table_end(d);
    place_file(d, key, heading);
}

static void write_roofline(nbi_document *d, const json_t *r)
{
    const json_t *s = section(d, r, "roofline", "The floor by arithmetic"), *row;
    size_t i;
    if (!s) return;
    nbi_document_text(d,
                      "%.3f MB a step without a cache, at least %.3f ms a token, at the bandwidth "
                      "measured here.",
                      1e-6 * number(s, "bytes_per_step"), number(s, "floor_ms"));
    nbi_document_table(d, "component\t>MB\t>MFLOP\t>floor us");
    json_array_foreach(json_object_get(s, "components"), i, row) if (number(row, "bytes") > 0)
        nbi_document_row(d, "%s\t%.3f\t%.3f\t%.1f", string(row, "component"),
                         1e-6 * number(row, "bytes"), 1e-6 * number(row, "flops"),
                         1e3 * number(row, "floor_ms"));
    nbi_document_table_end(d);
}

static void write_check(nbi_document *d, const json_t *r)
{
    const json_t *s = section(d, r, "check", "Are the kernels right"), *row;
    size_t i, ran = 0;
    if (!s) return;
    nbi_document_text(d, json_is_true(json_object_get(s, "ok")) ? "All are." : "No: %s",
                      string(s, "failure"));
    nbi_document_table(d, "kind\tpath\twhere\t>rows\t>context\t>error\t>bound\t");
    json_array_foreach(json_object_get(s, "results"), i, row)
    {
        if (!json_is_true(json_object_get(row, "supported"))) continue;
        ran++;
        nbi_document_row(d, "%s\t%s\t%s\t%.0f\t%.0f\t%.2g\t%.2g\t%s", string(row, "kind"),
                         string(row, "path"), string(row, "where"), number(row, "rows"),
                         number(row, "context"), number(row, "error"), number(row, "bound"),
                         json_is_true(json_object_get(row, "ok")) ? "ok" : "WRONG");
    }
    nbi_document_table_end(d);
    nbi_document_text(d, "%zu comparisons with sums in double.", ran);
}

static void write_doctor(nbi_document *d, const json_t *r)
{
    const json_t *s = section(d, r, "doctor", "The machine"), *row;
    size_t i;
    if (!s) return;
    nbi_document_text(d, "%s, %.0f CPUs, kernel %s: %.0f faults, %.0f warnings, %.0f notes.",
                      string(s, "machine.cpu"), number(s, "machine.cpus"),
                      string(s, "machine.kernel"), number(s, "counts.fault"),
                      number(s, "counts.warning"), number(s, "counts.note"));
    nbi_document_table(d, "level\twhat\tfound\twhy it matters\tmends it");
    json_array_foreach(json_object_get(s, "findings"), i, row)
    {
        const char *command = string(row, "command"), *setting = string(row, "setting");
        if (!strcmp(string(row, "level"), "ok")) continue;
        nbi_document_row(d, "%s\t%s %s\t%s\t%s\t%s", string(row, "level"), string(row, "title"),
                         string(row, "subject"), string(row, "found"), string(row, "why"),
                         command[0] ? command : setting);
    }
    nbi_document_table_end(d);
}

nb_status nbi_report_write(const json_t *r, const char *dir, nb_error *err)
{
    nbi_document d;
    nbi_document_open(&d, "nibble report", dir);
    write_summary(&d, r);
    write_breakdown(&d, r);
    write_contexts(&d, r);
    write_load(&d, r, "stream", "One stream over HTTP");
    write_load(&d, r, "load", "Requests together over HTTP");
    write_roofline(&d, r);
    write_check(&d, r);
    write_doctor(&d, r);
    const nb_status st = nbi_document_write(&d, "report", err);
    nbi_document_close(&d);
    return st;
}
