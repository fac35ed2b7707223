/* The options of commands that run a model: which, on what, with how much memory. */
#pragma once

#include "cli/attention_options.h"
#include "cli/tune_options.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_run_options {
    nb_engine_options engine;
    const char *model;        /* --model */
    char *found;              /* the embedded model's folder, when it is used */
    const char *log_level;    /* --log-level */
    bool no_overlap, overlap; /* --disable-overlap-schedule, --async-scheduling */
} nbi_run_options;

/* Rows for an option table, in the spelling of SGLang and vLLM. `o` is an nbi_run_options *. */
#define NBI_RUN_OPTION_ROWS(o)                                                                     \
    {"model",                                                                                      \
     NBI_OPT_STRING,                                                                               \
     &(o)->model,                                                                                  \
     "DIR",                                                                                        \
     "folder with config.json and safetensors (default: the\nembedded model)",                     \
     false},                                                                                       \
        {"model-path", NBI_OPT_STRING, &(o)->model, "DIR", "the same", false},                     \
        {"device",                                                                                 \
         NBI_OPT_STRING,                                                                           \
         &(o)->engine.device,                                                                      \
         "NAME",                                                                                   \
         "auto (default): a GPU where there is one; cpu, cuda",                                    \
         false},                                                                                   \
        {"disable-cuda-graph",                                                                     \
         NBI_OPT_FLAG,                                                                             \
         &(o)->engine.disable_cuda_graph,                                                          \
         NULL,                                                                                     \
         "launch every operator of every step by itself",                                          \
         false},                                                                                   \
        {"moe-runner-backend",                                                                     \
         NBI_OPT_STRING,                                                                           \
         &(o)->engine.moe_runner,                                                                  \
         "NAME",                                                                                   \
         "auto (default), a runner's name or SGLang's name for one",                               \
         false},                                                                                   \
        NBI_TUNE_OPTION_ROW((o)->engine.tune_file),                                                \
        NBI_ATTENTION_OPTION_ROWS((o)->engine.attention, (o)->engine.prefill_attention,            \
                                  (o)->engine.decode_attention, (o)->engine.dsa_prefill,           \
                                  (o)->engine.dsa_decode),                                         \
        NBI_MLA_OPTION_ROWS((o)->engine.mla_prefill, (o)->engine.mla_prefill_block),               \
        {"cpu-level",                                                                              \
         NBI_OPT_STRING,                                                                           \
         &(o)->engine.cpu_level,                                                                   \
         "NAME",                                                                                   \
         "auto (default), or at most: reference, avx2, avx512, amx",                               \
         false},                                                                                   \
        {"activations",                                                                            \
         NBI_OPT_STRING,                                                                           \
         &(o)->engine.activations,                                                                 \
         "KIND",                                                                                   \
         "weight-only (default), or w4a4: NVFP4 activations where\nthe checkpoint has scales for " \
         "them",                                                                                   \
         false},                                                                                   \
        {"kv-cache-dtype",                                                                         \
         NBI_OPT_STRING,                                                                           \
         &(o)->engine.kv_dtype,                                                                    \
         "TYPE",                                                                                   \
         "auto (default: fp8_e4m3 where the checkpoint asks for FP8,\nelse bf16), bf16, "          \
         "fp8_e4m3, f32",                                                                          \
         false},                                                                                   \
        {"threads",                                                                                \
         NBI_OPT_U32,                                                                              \
         &(o)->engine.n_threads,                                                                   \
         "N",                                                                                      \
         "compute threads (default: one per core)",                                                \
         false},                                                                                   \
        {"context-length",                                                                         \
         NBI_OPT_U32,                                                                              \
         &(o)->engine.max_context,                                                                 \
         "N",                                                                                      \
         "tokens of prompt and answer together (default: the\nmodel's limit)",                     \
         false},                                                                                   \
        {"max-model-len", NBI_OPT_U32, &(o)->engine.max_context, "N", "the same", false},          \
        {"max-total-tokens",                                                                       \
         NBI_OPT_U64,                                                                              \
         &(o)->engine.kv_tokens,                                                                   \
         "N",                                                                                      \
         "tokens that the KV cache holds (default: up to 4 contexts)",                             \
         false},                                                                                   \
        {"chunked-prefill-size",                                                                   \
         NBI_OPT_U32,                                                                              \
         &(o)->engine.chunk_size,                                                                  \
         "N",                                                                                      \
         "prompt tokens per step (default 512)",                                                   \
         false},                                                                                   \
        {"max-running-requests",                                                                   \
         NBI_OPT_U32,                                                                              \
         &(o)->engine.max_running,                                                                 \
         "N",                                                                                      \
         "answers written together (default 64)",                                                  \
         false},                                                                                   \
        {"max-num-seqs", NBI_OPT_U32, &(o)->engine.max_running, "N", "the same", false},           \
        {"mem-fraction-static",                                                                    \
         NBI_OPT_F64,                                                                              \
         &(o)->engine.memory_fraction,                                                             \
         "F",                                                                                      \
         "share of the free memory for weights, KV cache and all\nelse that is planned (default "  \
         "0.9)",                                                                                   \
         false},                                                                                   \
        {"gpu-memory-utilization",                                                                 \
         NBI_OPT_F64,                                                                              \
         &(o)->engine.memory_fraction,                                                             \
         "F",                                                                                      \
         "the same",                                                                               \
         false},                                                                                   \
        {"max-queued-requests",                                                                    \
         NBI_OPT_U32,                                                                              \
         &(o)->engine.max_queued,                                                                  \
         "N",                                                                                      \
         "requests that may wait; one more gets 503 (default 1024)",                               \
         false},                                                                                   \
        {"num-continuous-decode-steps",                                                            \
         NBI_OPT_U32,                                                                              \
         &(o)->engine.decode_steps,                                                                \
         "N",                                                                                      \
         "steps between two looks at the queue while answers are\nwritten (default 1)",            \
         false},                                                                                   \
        {"disable-overlap-schedule",                                                               \
         NBI_OPT_FLAG,                                                                             \
         &(o)->no_overlap,                                                                         \
         NULL,                                                                                     \
         "write what a step gave before the next one begins, not\nbeside it (a GPU works beside "  \
         "the host, a CPU does not)",                                                              \
         false},                                                                                   \
        {"no-async-scheduling", NBI_OPT_FLAG, &(o)->no_overlap, NULL, "the same", false},          \
        {"async-scheduling",                                                                       \
         NBI_OPT_FLAG,                                                                             \
         &(o)->overlap,                                                                            \
         NULL,                                                                                     \
         "do it beside the next step on any device",                                               \
         false},                                                                                   \
        {"schedule-policy",                                                                        \
         NBI_OPT_STRING,                                                                           \
         &(o)->engine.schedule_policy,                                                             \
         "NAME",                                                                                   \
         "fcfs (default): first come, first served; lpm: longest\ncached prefix first",            \
         false},                                                                                   \
        {"disable-radix-cache",                                                                    \
         NBI_OPT_FLAG,                                                                             \
         &(o)->engine.disable_prefix_cache,                                                        \
         NULL,                                                                                     \
         "keep no KV pages for requests that begin alike",                                         \
         false},                                                                                   \
        {"speculative-algorithm",                                                                  \
         NBI_OPT_STRING,                                                                           \
         &(o)->engine.speculative_algorithm,                                                       \
         "NAME",                                                                                   \
         "none (default), mtp: draft with the checkpoint's MTP\nlayer; the answers stay the same " \
         "(NEXTN, EAGLE: the\nsame)",                                                              \
         false},                                                                                   \
        {"speculative-num-steps",                                                                  \
         NBI_OPT_U32,                                                                              \
         &(o)->engine.speculative_num_steps,                                                       \
         "N",                                                                                      \
         "drafts per step at most, 1 to 8 (default 3)",                                            \
         false},                                                                                   \
        {"oea-k0",                                                                                 \
         NBI_OPT_U32,                                                                              \
         &(o)->engine.oea_k0,                                                                      \
         "K0",                                                                                     \
         "a token of an answer keeps its first K0 experts and takes\nmore only of those that the " \
         "step reads anyway (default 0: off)",                                                     \
         false},                                                                                   \
    {                                                                                              \
        "log-level", NBI_OPT_STRING, &(o)->log_level, "LEVEL", "error, warn, info, debug", false   \
    }

void nbi_run_options_init(nbi_run_options *o, const char *log_level);

/* After parsing: starts the log, finds the model. Returns -1 to go on, else the exit status. */
int nbi_run_options_apply(nbi_run_options *o, const nbi_command *command);
void nbi_run_options_free(nbi_run_options *o);

#ifdef __cplusplus
}
#endif
