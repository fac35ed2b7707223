/* Decode and prefill of a real checkpoint against the floor that the machine's read bandwidth
 * gives. Callers: `nibble bench`, bench/. */
#pragma once

#include "backend/timing_report.h"
#include "model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_bench_options {
    const char *dir;
    const char *device;     /* NULL: cpu */
    const char *moe_runner; /* NULL: auto */
    const char *tune_file;  /* as nbi_model_options has it */
    nbi_attention_names attention;
    nbi_backend_options backend;
    const char *kv_dtype; /* as --kv-cache-dtype */
    bool prefill;         /* else decode */
    uint32_t batch;       /* decode: sequences together; prefill: prompts together */
    uint32_t context;     /* tokens in the cache of every sequence before the measured steps */
    uint32_t tokens;      /* decode: steps of a repeat; prefill: tokens of a prompt */
    uint32_t chunk;       /* prefill and filling: rows of a step */
    uint32_t repeat;      /* >= 1 */
    uint64_t seed;   /* of the token ids: random and fresh each step, so that routing spreads */
    uint32_t oea_k0; /* decode: as nbi_model_options has it; 0: off */
    bool breakdown;  /* a timed repeat behind every other one: where a step's time goes */
    nbi_comm
        *ranks; /* that run it together, each with the same options; NULL: this process alone */
    uint32_t ep_size;
    bool shard_latents; /* nbi_shard.latents */
    const char
        *trace; /* file for the events of the last timed repeat; NULL: none. With breakdown */
} nbi_bench_options;

/* A "token" is one token of one stream: with a batch of N a decode step makes N of them. Times are
 * medians over the repeats; the read bandwidth is the median of passes before each repeat. */
typedef struct nbi_bench_result {
    uint64_t bytes_per_token; /* bytes a step must read, over its tokens */
    double read_bandwidth;    /* bytes per second */
    double floor_ms;          /* of a token */
    double ms_per_token, ms_per_token_min, ms_per_token_max;
    double tokens_per_s;
    double share_of_floor; /* floor_ms / ms_per_token */
    double gmac_per_s;     /* attention over the cache left out */
    uint64_t weight_bytes;
    uint32_t n_threads; /* 0: not a CPU */
    char runner[96], device[64];
    /* with oea_k0: the same steps with all experts, in turns with the others; distinct experts of
     * a layer and step without and with */
    double full_ms_per_token, experts_before, experts_after;
    /* with breakdown */
    nbi_breakdown breakdown;
    double timed_ms_per_token; /* of the timed repeats: median, measured from outside */
} nbi_bench_result;

/* Prints nothing. NB_INVALID names the option. */
nb_status nbi_bench_run(nbi_bench_result *out, const nbi_bench_options *opt, nb_error *err);

#ifdef __cplusplus
}
#endif
