/* `nibble report --compare`: what changed between two reports. Called by cmd_report.c. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/report_document.h"
#include "cli/report_write.h"

#define NOISE 0.03 /* smaller changes are none */

typedef enum better { LESS, MORE, NEITHER } better;

/* "better", "worse" or nothing. */
static const char *verdict(double a, double b, better which)
{
    const double change = b / a - 1;
    if (which == NEITHER || !isfinite(change) || fabs(change) < NOISE) return "";
    return (change < 0) == (which == LESS) ? "better" : "worse";
}

static void row(nbi_document *d, const char *what, double a, double b, double times,
                const char *unit, better which)
{
    if (!isfinite(a) && !isfinite(b)) return;
    char from[32] = "–", to[32] = "–", change[32] = "";
    if (isfinite(a)) snprintf(from, sizeof from, "%.3f", times * a);
    if (isfinite(b)) snprintf(to, sizeof to, "%.3f", times * b);
    if (isfinite(b / a)) snprintf(change, sizeof change, "%+.1f %%", 100 * (b / a - 1));
    nbi_document_row(d, "%s\t%s\t%s\t%s\t%s\t%s", what, from, to, unit, change,
                     verdict(a, b, which));
}

static void compare_figures(nbi_document *d, const json_t *a, const json_t *b)
{
    static const struct {
        const char *what, *path, *unit;
        double times;
        better which;
    } rows[] = {
        {"decode, model alone", "decode.ms_per_token", "ms per token", 1, LESS},
        {"decode, share of the floor", "decode.share_of_floor", "%", 100, MORE},
        {"read bandwidth", "decode.read_bandwidth", "GB/s", 1e-9, NEITHER},
        {"bytes per token", "decode.bytes_per_token", "MB", 1e-6, NEITHER},
        {"one stream, TTFT median", "stream.median_ttft_ms", "ms", 1, LESS},
        {"one stream, TPOT median", "stream.median_tpot_ms", "ms", 1, LESS},
        {"one stream, ITL p99", "stream.p99_itl_ms", "ms", 1, LESS},
        {"together, answer tokens", "load.output_throughput", "per second", 1, MORE},
        {"together, TTFT median", "load.median_ttft_ms", "ms", 1, LESS},
        {"together, TTFT p99", "load.p99_ttft_ms", "ms", 1, LESS},
        {"together, ITL median", "load.median_itl_ms", "ms", 1, LESS},
        {"together, ITL p99", "load.p99_itl_ms", "ms", 1, LESS},
        {"doctor, faults", "doctor.counts.fault", "", 1, NEITHER},
        {"doctor, warnings", "doctor.counts.warning", "", 1, NEITHER},
    };
    nbi_document_heading(d, "Figures");
    nbi_document_table(d, "figure\t>A\t>B\tunit\t>change\t");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        row(d, rows[i].what, nbi_report_number(a, rows[i].path), nbi_report_number(b, rows[i].path),
            rows[i].times, rows[i].unit, rows[i].which);
    nbi_document_table_end(d);
}

/* The member of a list of objects whose `key` is equal to that of `like`; NULL. */
static const json_t *same(const json_t *list, const json_t *like, const char *key)
{
    const json_t *item, *want = json_object_get(like, key);
    size_t i;
    json_array_foreach(list, i,
                       item) if (want && json_equal(json_object_get(item, key), want)) return item;
    return NULL;
}

static const json_t *components(const json_t *report)
{
    const json_t *decode = json_object_get(report, "decode");
    return json_object_get(json_object_get(decode, "breakdown"), "components");
}

static void compare_components(nbi_document *d, const json_t *a, const json_t *b)
{
    const json_t *item;
    size_t i;
    nbi_document_heading(d, "Components of a decode step");
    nbi_document_table(d, "component\t>A\t>B\tunit\t>change\t");
    json_array_foreach(components(a), i, item)
    {
        const json_t *other = same(components(b), item, "component");
        row(d, json_string_value(json_object_get(item, "component")), nbi_report_number(item, "ms"),
            nbi_report_number(other, "ms"), 1e3, "us", LESS);
    }
    json_array_foreach(components(b), i, item)
    {
        if (!same(components(a), item, "component"))
            row(d, json_string_value(json_object_get(item, "component")), (double)NAN,
                nbi_report_number(item, "ms"), 1e3, "us", LESS);
    }
    nbi_document_table_end(d);
}

static void compare_contexts(nbi_document *d, const json_t *a, const json_t *b)
{
    const json_t *item;
    size_t i;
    nbi_document_heading(d, "Decode by context");
    nbi_document_table(d, "context\t>A\t>B\tunit\t>change\t");
    json_array_foreach(json_object_get(a, "contexts"), i, item)
    {
        char what[32];
        const json_t *other = same(json_object_get(b, "contexts"), item, "context");
        snprintf(what, sizeof what, "%.0f", nbi_report_number(item, "context"));
        row(d, what, nbi_report_number(item, "ms_per_token"),
            nbi_report_number(other, "ms_per_token"), 1, "ms per token", LESS);
    }
    nbi_document_table_end(d);
}

static void describe(nbi_document *d, const char *name, const json_t *r)
{
    static const char *const keys[] = {"model", "device", "nibble", "date"};
    const char *s[4];
    for (size_t i = 0; i < 4; i++) {
        s[i] = json_string_value(json_object_get(r, keys[i]));
        if (!s[i]) s[i] = "?";
    }
    nbi_document_text(d, "%s: %s on %s, nibble %s, %s.", name, s[0], s[1], s[2], s[3]);
}

nb_status nbi_report_compare(nbi_buf *out, const json_t *a, const json_t *b, const char *dir,
                             nb_error *err)
{
    nbi_document d;
    nbi_document_open(&d, "nibble report: what changed", dir);
    describe(&d, "A", a);
    describe(&d, "B", b);
    nbi_document_text(&d, "Changes below %.0f %% are taken for noise.", 100 * NOISE);
    compare_figures(&d, a, b);
    compare_components(&d, a, b);
    compare_contexts(&d, a, b);
    nb_status st = d.status;
    if (st != NB_OK)
        nbi_fail(err, st, "%s", d.err.text);
    else if (dir)
        st = nbi_document_write(&d, "compare", err);
    if (st == NB_OK && nbi_buf_add(out, d.markdown.data, d.markdown.len) != NB_OK)
        st = nbi_fail(err, NB_NO_MEMORY, "no memory for the comparison");
    nbi_document_close(&d);
    return st;
}
