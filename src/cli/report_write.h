/* From the figures of `nibble report` to its pages; and from two of them to what changed. */
#pragma once

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A number by its path, "load.median_ttft_ms"; NaN where there is none. */
double nbi_report_number(const json_t *report, const char *path);

/* Writes report.md and report.html, and the pictures of the first, into `dir`. What a section lacks
 * is said in its place. */
nb_status nbi_report_write(const json_t *report, const char *dir, nb_error *err);

/* Appends as Markdown what changed from `a` to `b`; with `dir` also writes compare.md and
 * compare.html there. */
nb_status nbi_report_compare(nbi_buf *out, const json_t *a, const json_t *b, const char *dir,
                             nb_error *err);

#ifdef __cplusplus
}
#endif
