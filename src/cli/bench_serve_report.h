/* How `nibble bench serve` shows a load run: text for people, JSON for programs. */
#pragma once

#include "perf/load_figures.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What of the latencies is wanted. */
typedef struct nbi_report_choice {
    bool ttft, tpot, itl, e2el;
    double percentiles[NBI_LOAD_PERCENTILES_MAX];
    uint32_t n_percentiles;
    bool with_goodput;
} nbi_report_choice;

void nbi_bench_serve_print(const nbi_load_options *opt, const nbi_load_result *result,
                           const nbi_load_figures *f, const nbi_report_choice *choice);

/* One JSON object without a line end, to the end of `out`; with `details` also arrays that have one
 * value per request. */
nb_status nbi_bench_serve_json(nbi_buf *out, const nbi_load_options *opt,
                               const nbi_load_result *result, const nbi_load_figures *f,
                               const nbi_report_choice *choice, bool details);

#ifdef __cplusplus
}
#endif
