/* Load against an OpenAI-compatible server: which requests, when, and what came of each. Callers:
 * `nibble bench serve`. load_figures.h makes figures of the records. */
#pragma once

#include "perf/load_answer.h"
#include "perf/load_client.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nbi_load_dataset {
    NBI_LOAD_RANDOM,
    NBI_LOAD_SHARED_PREFIX,
    NBI_LOAD_FILE,
} nbi_load_dataset;

typedef struct nbi_load_progress {
    uint32_t done, failed, running, total;
    uint64_t output_tokens; /* chunks of answers that run, tokens of those that ended */
    double seconds;         /* since the first request */
} nbi_load_progress;

typedef struct nbi_load_options {
    nbi_load_client_options client;
    const char *endpoint; /* ends with "completions"; with "chat/completions": chat */
    const char *model;    /* NULL: the first that /v1/models has */
    double ready_wait_s;  /* for /v1/models to answer */

    nbi_load_dataset dataset;
    uint32_t n_prompts; /* 0: 1,000, or a file's own number when that is less */
    uint32_t input_len, output_len;
    double range_ratio;                 /* 0 <= r < 1: lengths are uniform in len * (1 -+ r) */
    uint32_t prefix_len, prefix_groups; /* SHARED_PREFIX: tokens in front of input_len */
    const char *path;                   /* FILE */
    uint32_t file_output_len;           /* FILE: in place of what the file says; 0: not */

    double request_rate;      /* per second; INFINITY: all at once */
    double burstiness;        /* shape of the gamma distribution of the gaps; 1: Poisson */
    uint32_t max_concurrency; /* 0: no limit */
    uint32_t n_warmup;
    uint64_t seed;
    bool stream, ignore_eos, as_text; /* as_text: no token ids even where they could be used */
    double temperature;               /* below 0: not sent */
    const char *extra_body;           /* JSON object whose members go into every body; NULL: none */

    void (*progress)(void *user, const nbi_load_progress *p); /* ten times a second; may be NULL */
    void (*note)(void *user, const char *sentence);           /* what is being done; may be NULL */
    void *user;
} nbi_load_options;

/* One request. Times are of nbi_now_ns(). */
typedef struct nbi_load_record {
    uint64_t planned_ns,
        sent_ns; /* sent is later under max_concurrency or when this program lags */
    uint32_t asked_input, asked_output; /* tokens; asked_input 0: not known */
    nbi_load_answer answer;
} nbi_load_record;

typedef struct nbi_load_result {
    nbi_load_record *records; /* [n] in the order of arrival */
    uint32_t n;
    uint64_t begin_ns, end_ns; /* the first request's time, the last answer's end */
    double idle_s;             /* of this program between the two */
    uint32_t peak_running;     /* requests under way at one moment */
    char *model;
    char prompts[256]; /* how the prompts were made, one sentence */
} nbi_load_result;

/* NB_INVALID names the option; NB_IO, NB_BAD_FILE and others when the server cannot be used or
 * the warm-up fails. Failures of single requests are in the records. */
nb_status nbi_load_run(nbi_load_result *out, const nbi_load_options *opt, nb_error *err);
void nbi_load_result_free(nbi_load_result *result);

#ifdef __cplusplus
}
#endif
