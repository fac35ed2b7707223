/* Figures of a load run, with the names and definitions of sglang.bench_serving and vllm bench
 * serve; docs/benchmarking.md says where those two differ. */
#pragma once

#include "perf/load_run.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { NBI_LOAD_PERCENTILES_MAX = 8, NBI_LOAD_GROUPS_MAX = 32 };

/* Percentiles lie between two neighbours in proportion, as numpy's do; the deviation is of the
 * values themselves (n, not n - 1). */
typedef struct nbi_load_stat {
    uint64_t n; /* values; 0: all figures are 0 */
    double mean, median, std, min, max;
    double percentiles[NBI_LOAD_PERCENTILES_MAX];
} nbi_load_stat;

/* Failures of one kind; of HTTP also one status. */
typedef struct nbi_load_group {
    nbi_load_failure kind;
    unsigned http;
    uint32_t n;
    const char *sample; /* sentence of the first; in the records */
} nbi_load_group;

typedef struct nbi_load_goodput {
    double ttft_ms, tpot_ms, e2el_ms; /* at most; 0: no bound */
} nbi_load_goodput;

typedef struct nbi_load_figures {
    uint32_t completed, failed;
    uint32_t no_tokens;       /* completed, with 0 output tokens */
    uint32_t no_chunks;       /* completed and streamed, with tokens but no chunk: no TTFT */
    uint32_t not_streamed;    /* completed, came whole although asked to stream */
    uint32_t shorter, longer; /* completed, fewer or more output tokens than asked for */
    uint32_t no_usage;        /* completed, output tokens counted by chunks, input as asked */
    double duration_s;
    uint64_t input_tokens, output_tokens, reasoning_tokens, cached_tokens; /* of the completed */
    double request_throughput, input_throughput, output_throughput, total_throughput; /* per s */
    double goodput;          /* completed requests within the bounds, per second */
    double peak_output;      /* tokens in the best second after the begin */
    uint32_t peak_running;   /* requests under way at one moment */
    double concurrency;      /* sum of e2el / duration */
    uint64_t chunks;         /* of the completed that were streamed */
    double tokens_per_chunk; /* of those; 0 without chunks */
    double together;         /* share of the gaps that are 0: chunks read in one piece */
    double busy;             /* share of the duration in which this program worked */
    nbi_load_stat ttft, tpot, itl, e2el; /* ms */
    nbi_load_stat delay;                 /* ms from the planned time to sending */
    nbi_load_group groups[NBI_LOAD_GROUPS_MAX];
    uint32_t n_groups;
} nbi_load_figures;

/* percentiles: [n] in (0, 100]. The figures point into `result`. `stream`: chunks were asked for.
 */
nb_status nbi_load_figures_make(nbi_load_figures *out, const nbi_load_result *result, bool stream,
                                const double *percentiles, uint32_t n_percentiles,
                                const nbi_load_goodput *goodput, nb_error *err);

/* Times of one completed request in ms; NaN where there is none: TTFT without a chunk, TPOT below
 * two tokens or without a chunk. */
double nbi_load_ttft_ms(const nbi_load_record *r);
double nbi_load_tpot_ms(const nbi_load_record *r);
double nbi_load_e2el_ms(const nbi_load_record *r);

/* Values are sorted. */
void nbi_load_stat_make(nbi_load_stat *out, double *values, uint64_t n, const double *percentiles,
                        uint32_t n_percentiles);

#ifdef __cplusplus
}
#endif
