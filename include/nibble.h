/* nibble: public C API.
 *
 * Two nouns: an engine (a loaded model on a device) and requests on it. Text goes in, text comes
 * out; or token ids in, token ids out. Nothing here knows HTTP, Python or a tensor. The server and
 * the CLI are written against this header.
 *
 * Threads: an engine may be used from any number of threads after nb_engine_open(). One thread at a
 * time may call nb_engine_step(); nb_engine_start() makes the engine step in a thread of its own
 * instead. A request is read by one thread at a time; nb_request_cancel() may be called from any
 * thread.
 *
 * Lifetime: requests must be closed before their engine. Strings handed in are copied, strings
 * handed out belong to the object they came from and live as long as the header says.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define NB_VERSION_MAJOR 0
#define NB_VERSION_MINOR 1
#define NB_VERSION_PATCH 0
#define NB_VERSION       "0.1.0"

/* ---------------------------------------------------------------- status and errors */

/* name, value, text. Negative is an error; NB_AGAIN is "would block", not a failure. */
#define NB_STATUS_LIST(X)                                          \
    X(NB_OK, 0, "ok")                                              \
    X(NB_AGAIN, 1, "nothing available yet")                        \
    X(NB_INVALID, -1, "invalid argument or input")                 \
    X(NB_NO_MEMORY, -2, "out of memory")                           \
    X(NB_IO, -3, "input/output error")                             \
    X(NB_CORRUPT, -4, "file contents are not valid")               \
    X(NB_UNSUPPORTED, -5, "not supported")                         \
    X(NB_NOT_FOUND, -6, "not found")                               \
    X(NB_TOO_LARGE, -7, "exceeds a limit")                         \
    X(NB_CANCELLED, -8, "cancelled")                               \
    X(NB_NUMERIC, -9, "non-finite value in the computation")       \
    X(NB_BUSY, -10, "no capacity left")                            \
    X(NB_CLOSED, -11, "the engine is shutting down or has failed") \
    X(NB_INTERNAL, -12, "internal error")

typedef enum nb_status {
#define X(name, value, text) name = value,
    NB_STATUS_LIST(X)
#undef X
} nb_status;

#define NB_ERROR_TEXT_MAX 512

/* Filled by a failing call; untouched on success. Every `nb_error *` parameter may be NULL. */
typedef struct nb_error {
    nb_status status;
    char text[NB_ERROR_TEXT_MAX]; /* one sentence: what, where, found, expected; NUL-terminated
                                     UTF-8 */
} nb_error;

/* Static text of a status, never NULL. */
const char *nb_status_text(nb_status status);

/* Version of the library as "major.minor.patch". */
const char *nb_version(void);

/* ---------------------------------------------------------------- log */

typedef enum nb_log_level {
    NB_LOG_ERROR,
    NB_LOG_WARN,
    NB_LOG_INFO,
    NB_LOG_DEBUG,
    NB_LOG_COUNT
} nb_log_level;

/* The library prints nothing itself: lines (without newline) go to this sink, from any thread. NULL
 * drops them. Set before anything else; `user` is handed through. */
typedef void (*nb_log_sink)(void *user, nb_log_level level, const char *line);
void nb_log_set_sink(nb_log_sink sink, void *user, nb_log_level max_level);

/* ---------------------------------------------------------------- engine */

typedef struct nb_engine nb_engine;
typedef struct nb_request nb_request;

/* Called from the opening thread while loading: bytes of weights made ready so far, of how many. */
typedef void (*nb_progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);

/* Processes that run one model together. Made by the program; its calls are not public. */
typedef struct nbi_comm nb_ranks;

#define NB_TIMING_USUAL UINT32_MAX

typedef struct nb_engine_options {
    const char *model_dir;   /* folder in Hugging Face layout; required */
    const char *device;      /* "auto" (a GPU where there is one), "cpu", "cuda" */
    const char *moe_runner;  /* "auto" or the name or alias of a runner */
    const char *tune_file;   /* with runner "auto": what `nibble tune` has written, a file, or a
                                folder of such files (an ending '/' says so); NULL: none. One that
                                does not fit here is logged and not used */
    const char *cpu_level;   /* "auto", or a cap: "reference", "avx2", "avx512", "amx" */
    const char *activations; /* "weight-only" or "w4a4" (NVFP4 activations as the checkpoint's input
                                scales say) */
    const char *kv_dtype;    /* "auto" (f32 at level reference; else fp8_e4m3 if the checkpoint
                                asks for FP8, else bf16), "bf16", "fp8_e4m3", "f32" */
    const char *attention;   /* "auto" or the name of an attention backend as other engines have
                                them: refused when it cannot be meant on this device and model */
    const char *prefill_attention, *decode_attention; /* the same of one phase */
    const char *dsa_prefill, *dsa_decode;             /* the same of sparse attention */
    const char *mla_prefill;    /* latent attention of prompts: "absorbed", "expanded" or "auto":
                                   expanded with disable_prefix_cache, where that is faster */
    uint32_t mla_prefill_block; /* expanded as far as whole blocks of so many tokens of the prompt
                                   go: a power of two, at least 64; 0: 512 */
    uint32_t n_threads;         /* compute threads; 0: one per core this process may use */
    uint32_t max_running;       /* sequences decoded together; default 64 */
    uint32_t chunk_size;        /* prompt tokens per step; default 512 */
    uint32_t max_context;  /* 0: the model's own limit, lowered to the KV pool if that is smaller */
    uint64_t kv_tokens;    /* tokens of the KV pool; 0: as many as the memory plan allows, at most 4
                              contexts */
    uint64_t memory_bytes; /* 0: what the machine (or its cgroup) has free */
    double memory_fraction; /* of it, for everything planned: 0 < f <= 1; 0: 0.9 */
    uint32_t max_queued;    /* requests that may wait; one more is NB_BUSY; 0: 1024 */
    uint32_t decode_steps;  /* steps between two looks at the queue while answers are written; 0: 1
                             */
    const char *schedule_policy;  /* "fcfs" (default): first come, first served; "lpm": longest
                                     cached prefix first */
    const char *overlap_schedule; /* "auto": events of a step are written beside the next one where
                                     the device works while the host goes on; "on", "off" */
    const char
        *speculative_algorithm; /* "none" (default), "mtp": draft with the checkpoint's MTP layer */
    uint32_t speculative_num_steps; /* drafts per step at most, 1 to 8; 0: 3 */
    uint32_t oea_k0; /* opportunistic expert activation: a token of an answer keeps its first oea_k0
                        experts and takes more only of those that the step reads anyway; 0: off */
    bool disable_cuda_graph; /* launch every operator of every step by itself */
    bool
        check_kernels; /* compare kernels with sums in double first; NB_NUMERIC when one is wrong */
    bool disable_prefix_cache; /* do not keep pages for requests that begin alike */
    uint32_t timing_interval;  /* every so-manieth step is timed for nb_engine_get_components(); 0
                                  (default): only those of profiles; NB_TIMING_USUAL: every 64th, but
                                  none on a GPU whose launches cannot be stamped (below 9.0, or with
                                  disable_cuda_graph) */
    nb_progress progress;      /* optional */
    void *progress_user;
    /* The ranks that run the model together; borrowed, outlives the engine. Every rank opens an
     * engine with the same options; rank 0 serves, the others call nb_engine_follow(). NULL: this
     * process alone. */
    nb_ranks *ranks;
    uint32_t ep_size;         /* parts that whole experts are dealt to; 0: 1 */
    bool shard_latents;       /* MLA: ranks split q_a, kv_a and the indexer's products, too */
    uint32_t ranks_per_gpu;   /* ranks of a host that share a GPU; 0: 1 */
    const char *gpu_exchange; /* how GPUs of ranks exchange: "auto", "one-shot", "nccl", "staged" */
    bool disable_single_batch_overlap; /* GPUs: nothing overlaps a sum over ranks */
} nb_engine_options;

void nb_engine_options_default(nb_engine_options *options);

/* Opens a checkpoint: validates every file, plans memory, refuses what does not fit before reading
 * a weight. On failure *out is untouched, nothing is left open. */
nb_status nb_engine_open(nb_engine **out, const nb_engine_options *options, nb_error *error);

/* Cancels what is in flight, stops the thread, frees everything, clears the pointer. NULL is fine.
 */
void nb_engine_close(nb_engine **engine);

typedef struct nb_moe_choice {
    uint32_t max_rows; /* steps of at most so many rows, and more than the one before; UINT32_MAX
                          in the last */
    const char *runner;
} nb_moe_choice;

#define NB_MOE_CHOICES_MAX 16

/* Facts of a loaded model; pointers live as long as the engine. */
typedef struct nb_engine_info {
    const char *model_dir;
    const char *model_name; /* last part of the folder's path */
    const char *family;     /* model_type, e.g. "glm_moe_dsa" */
    const char *device;     /* e.g. "cpu (amx)" */
    const char *moe_runner; /* the runner in use, "a+b" where several take turns, "none" for a model
                               without experts */
    const char *kv_dtype;   /* of the cache: "bf16", "fp8_e4m3", "f32" */
    nb_moe_choice moe_choices[NB_MOE_CHOICES_MAX]; /* [n_moe_choices] by the rows of a step */
    uint32_t n_moe_choices;
    const char *moe_choice_source; /* "tuned": by `nibble tune`; "rule"; "named": by the options */
    uint32_t n_layers;
    uint32_t vocab_size;  /* rows of the output head */
    uint32_t max_context; /* tokens a request may hold, prompt and answer together */
    uint64_t kv_tokens;   /* tokens the KV pool holds */
    uint64_t weight_bytes;
    uint64_t kv_bytes;
    uint64_t workspace_bytes;
    uint64_t request_bytes;           /* that all requests together may take */
    uint64_t tree_bytes, batch_bytes; /* of the prefix tree and of the batches of steps */
    uint64_t available_bytes;         /* what was planned into, of the device; 0: not known */
    uint32_t max_running, max_queued;
    const int32_t *eos_ids; /* [n_eos] ids that end an answer */
    uint32_t n_eos;
    bool has_tokenizer;
} nb_engine_info;

void nb_engine_get_info(const nb_engine *engine, nb_engine_info *info);

/* With check_kernels: what serving takes, compared with sums in double, and the MoE runners it does
 * not take. Strings live as long as the engine. */
typedef struct nb_check_result {
    const char *kind;  /* "linear", "mlp", "attention", "runner" */
    const char *path;  /* e.g. "latent, decode"; of a runner its name */
    const char *where; /* layer or module */
    const char *why;   /* why not supported, else "" */
    bool chosen, supported;
    bool compared;       /* else without the two below */
    double error, bound; /* largest difference of one value, over the root mean square of its row */
} nb_check_result;

/* Result i in the order they were found; false behind the last. */
bool nb_engine_get_check(const nb_engine *engine, uint32_t i, nb_check_result *out);

/* Makes the engine step in a thread of its own until nb_engine_close(). */
nb_status nb_engine_start(nb_engine *engine, nb_error *error);

/* `after` is called from the engine's thread behind a step that wrote events, once, when every
 * request's own `notify` was: wake-ups can be left to it. Must not block. NULL: none; when that
 * returns, the one before is not called any more. */
void nb_engine_on_step(nb_engine *engine, void (*after)(void *user), void *user);

/* One step by the caller. *worked is false when nothing was waiting or running. */
nb_status nb_engine_step(nb_engine *engine, bool *worked, nb_error *error);

/* On a rank that is not 0: does what rank 0 says until that closes its engine. An error when a rank
 * has failed; the engine is of no use then. */
nb_status nb_engine_follow(nb_engine *engine, nb_error *error);

/* How a request ends. */
typedef enum nb_finish {
    NB_FINISH_NONE,   /* still going */
    NB_FINISH_STOP,   /* EOS, stop id or stop string */
    NB_FINISH_LENGTH, /* max_tokens or the context limit */
    NB_FINISH_CANCELLED,
    NB_FINISH_ERROR,      /* see nb_request_error() */
    NB_FINISH_TIMEOUT,    /* timeout_ms was over; see nb_request_error() */
    NB_FINISH_REPETITION, /* nb_sampling.repeat_count */
    NB_FINISH_COUNT
} nb_finish;

#define NB_DRAFTS_MAX 8

/* Counters for health and metrics, a snapshot. `generated_tokens` and what is per request leaves
 * out what nb_request_options.count says; `prompt_tokens` are those computed, again after a
 * preemption. */
typedef struct nb_engine_stats {
    uint32_t n_running, n_waiting;
    uint64_t kv_tokens_used;
    uint64_t waiting_tokens; /* of the n_waiting: prompts, and answers of those put back */
    uint64_t n_steps, prompt_tokens, generated_tokens;
    uint64_t requests_finished, requests_failed, requests_cancelled;
    uint64_t kv_tokens_cached; /* in pages nobody uses now, ready for a request that begins alike */
    uint64_t prefix_hit_tokens,
        prefix_query_tokens; /* prompt tokens found in the cache, of all prompt tokens */
    uint64_t draft_steps, draft_tokens,
        draft_accepted;   /* speculative decoding: verifications, drafts, and how many were right */
    uint64_t preemptions; /* requests put back into the queue for want of pages */
    uint64_t draft_accepted_at[NB_DRAFTS_MAX]; /* of draft_accepted, by place in the draft */
    /* of requests with their first token, and those that nb_request_options.count leaves out not
     * among them: whole prompts, and how much of them the cache held */
    uint64_t request_prompt_tokens, request_cached_tokens;
    uint64_t requests_ended[NB_FINISH_COUNT]; /* by how they ended; `count` none left out */
    /* Steps in which every row is a sequence's newest token or a draft: their time, and the bytes
     * of weights and cache that they had to read. Over read_bandwidth (bytes per second, 0: not
     * known) that is their floor. */
    uint64_t decode_steps, decode_ns, decode_bytes;
    double read_bandwidth;
    /* of a GPU: forward passes replayed from a recorded graph, and those that were launched
     * operator by operator (the first of its shape, many rows, disable_cuda_graph) */
    uint64_t passes_recorded, passes_launched;
    /* with oea_k0, summed over layers of steps in which it was at work: distinct experts that the
     * router chose, and those that were read */
    uint64_t oea_layers, oea_experts_before, oea_experts_after;
} nb_engine_stats;

void nb_engine_get_stats(nb_engine *engine, nb_engine_stats *stats);

/* Distributions since the engine was opened: id, unit, what is observed. Those of a whole request
 * are of requests that ended with NB_FINISH_STOP or NB_FINISH_LENGTH. */
#define NB_HISTOGRAM_LIST(X)                                                                       \
    X(NB_HIST_TTFT, "s")                 /* arrival to the first token */                          \
    X(NB_HIST_INTER_TOKEN, "s")          /* token to token; tokens of one step share its time */   \
    X(NB_HIST_E2E, "s")                  /* arrival to the last token */                           \
    X(NB_HIST_QUEUE, "s")                /* submission to admission */                             \
    X(NB_HIST_PREFILL, "s")              /* admission to the first token */                        \
    X(NB_HIST_DECODE, "s")               /* first token to the last */                             \
    X(NB_HIST_INFERENCE, "s")            /* admission to the last token */                         \
    X(NB_HIST_TIME_PER_TOKEN, "s")       /* decode time over tokens - 1; of two tokens and more */ \
    X(NB_HIST_PROMPT_TOKENS, "tokens")   /* of a request */                                        \
    X(NB_HIST_UNCACHED_TOKENS, "tokens") /* of its prompt, not found in the prefix cache */        \
    X(NB_HIST_GENERATION_TOKENS, "tokens") /* of a request */                                      \
    X(NB_HIST_STEP, "s")                   /* one step of the engine */                            \
    X(NB_HIST_STEP_TOKENS, "tokens")       /* rows of one step: prompt tokens, decoded, drafts */

typedef enum nb_histogram_id {
#define X(name, unit) name,
    NB_HISTOGRAM_LIST(X)
#undef X
        NB_HIST_COUNT
} nb_histogram_id;

#define NB_HISTOGRAM_BOUNDS_MAX 40

typedef struct nb_histogram {
    const double *bounds; /* [n_bounds] ascending, inclusive; static */
    uint32_t n_bounds;
    uint64_t counts[NB_HISTOGRAM_BOUNDS_MAX + 1]; /* [n_bounds + 1]; the last: above all bounds */
    double sum;
} nb_histogram;

void nb_engine_get_histogram(const nb_engine *engine, nb_histogram_id id, nb_histogram *out);

/* What the memory gives to plain reads, in bytes per second: nb_engine_stats has it, profiles take
 * it for their floors. An engine on a GPU has measured it itself. */
void nb_engine_set_read_bandwidth(nb_engine *engine, double bytes_per_s);

/* ---------------------------------------------------------------- profiles */

typedef struct nb_profile_options {
    uint32_t n_steps;    /* timed; 0: until nb_engine_profile_stop() */
    uint32_t skip_steps; /* before the first one */
    bool by_stage;       /* until there are n_steps of decode and n_steps with prompts in them */
} nb_profile_options;

/* From the next step on every operator is timed. Costs little on a CPU; on a GPU with
 * disable_cuda_graph steps take longer. NB_BUSY: a profile runs. One that has taken its
 * n_steps and was not stopped is forgotten. */
nb_status nb_engine_profile_start(nb_engine *engine, const nb_profile_options *options,
                                  nb_error *error);

/* Has one taken its n_steps, and waits to be stopped? */
bool nb_engine_profile_is_done(nb_engine *engine);

/* What a profile has found, as JSON texts. */
typedef struct nb_profile {
    char *trace; /* the last calls, in the Trace Event Format of Perfetto; has the tables, too, as
                    its member "breakdown" */
    size_t n_trace;
    char *breakdown; /* an array with a table of each stage: docs/performance.md, "Profiles" */
    size_t n_breakdown;
} nb_profile;

/* Ends the profile with the step under way. NB_NOT_FOUND: none was started. */
nb_status nb_engine_profile_stop(nb_engine *engine, nb_profile *profile, nb_error *error);
void nb_profile_free(nb_profile *profile);

#define NB_COMPONENTS_MAX 16

/* Sums over the steps that were timed, by a profile or by timing_interval: components by name, with
 * "launch gaps" and "host gaps" behind them; their ns add up to step_ns. */
typedef struct nb_component_stats {
    uint64_t steps, step_ns;
    uint32_t n;
    struct {
        const char *name;
        uint64_t calls, ns;
        double bytes;
    } components[NB_COMPONENTS_MAX];
} nb_component_stats;

void nb_engine_get_components(nb_engine *engine, nb_component_stats *stats);

/* Forgets every cached prefix before the next step. NB_BUSY, and nothing happens, while requests
 * run or wait. */
nb_status nb_engine_flush_cache(nb_engine *engine, nb_error *error);

/* Non-NULL once the engine cannot serve any more (the sentence why). */
const char *nb_engine_failure(nb_engine *engine);

/* ---------------------------------------------------------------- text */

/* Encodes UTF-8 text (invalid bytes are encoded as the bytes they are). `parse_special`: added
 * tokens in the text become their ids; otherwise they are plain text. No token is ever added. *ids
 * is malloc'ed, freed by nb_free(). NB_TOO_LARGE as soon as there would be more than max_ids (0:
 * any number). */
nb_status nb_tokenize(const nb_engine *engine, const char *text, size_t n_bytes, bool parse_special,
                      size_t max_ids, int32_t **ids, size_t *n_ids, nb_error *error);

/* Decodes ids to bytes (whole characters are not guaranteed at the ends). *text is NUL-terminated,
 * freed by nb_free(). */
nb_status nb_detokenize(const nb_engine *engine, const int32_t *ids, size_t n_ids,
                        bool skip_special, char **text, size_t *n_bytes, nb_error *error);

/* The bytes of one token; NULL for an id without any (padding rows). Lives as long as the engine.
 */
const char *nb_token_bytes(const nb_engine *engine, int32_t id, size_t *n_bytes);

void nb_free(void *pointer);

/* ---------------------------------------------------------------- requests */

#define NB_TOP_LOGPROBS_MAX 20
#define NB_STOP_STRINGS_MAX 16
#define NB_STOP_IDS_MAX     64
#define NB_STOP_REGEX_MAX   4

#define NB_LOGIT_BIAS_MAX   1024

typedef struct nb_logit_bias {
    int32_t id;
    float bias; /* added to the logit, -100 to 100 */
} nb_logit_bias;

/* Token ids in a row. */
typedef struct nb_ids {
    const int32_t *ids;
    uint32_t n;
} nb_ids;

#define NB_BAD_WORDS_MAX        2048
#define NB_BAD_WORD_IDS_MAX     16384 /* of all of them */

#define NB_GRAMMAR_ROLLBACK_MAX 8

/* A constraint on what may be generated: bits over the vocabulary before every token. Called from
 * the engine's thread, in the token loop: must not allocate through nibble and should take well
 * under a millisecond. */
typedef struct nb_grammar {
    void *user;
    /* Sets bit id % 32 of bits[id / 32] for every id that may come next; the array is zeroed
     * before. At least one must be allowed. */
    void (*mask)(void *user, uint32_t *bits, size_t n_words);
    void (*accept)(void *user, int32_t id); /* this token was chosen */
    /* Optional: takes back the last n <= NB_GRAMMAR_ROLLBACK_MAX tokens accepted. Without it
     * speculative decoding makes no drafts for the request. */
    void (*rollback)(void *user, uint32_t n);
    /* Optional: the engine will not call again; from any thread, once, at some time after the
     * request was closed. Never called for a request whose submission failed. */
    void (*release)(void *user);
} nb_grammar;

/* How tokens are chosen. nb_sampling_default() fills in the model's generation_config. */
typedef struct nb_sampling {
    float temperature;   /* >= 0; below 1e-6 is greedy */
    float top_p;         /* (0, 1] */
    float min_p;         /* [0, 1] */
    int32_t top_k;       /* -1 or 0: off */
    bool has_seed;       /* false: the engine draws one */
    uint64_t seed;       /* token n of a request depends on (seed, n) alone */
    uint32_t max_tokens; /* 0: up to the context limit */
    uint32_t min_tokens; /* EOS, stop ids and stop strings are not taken before this many */
    bool ignore_eos;
    bool
        disable_oea; /* its tokens have all their experts, whatever nb_engine_options.oea_k0 says */
    bool skip_special; /* special tokens give no text (default true) */
    bool include_stop; /* keep the stop string in the text */
    uint32_t n_stop_strings, n_stop_ids, n_stop_regex;
    int32_t n_logprobs;       /* -1: none; 0: of the chosen token; k <= 20: and the k best */
    uint32_t n_logprob_ids;   /* with n_logprobs >= 0: log-probabilities of these instead of the
                                 best; in nb_event.top in this order */
    float frequency_penalty;  /* [-2, 2]; per occurrence in the answer */
    float presence_penalty;   /* [-2, 2]; once per token of the answer */
    float repetition_penalty; /* (0, 2]; 1 is off; tokens of prompt and answer */
    uint32_t n_logit_bias;
    const nb_logit_bias *logit_bias; /* [n_logit_bias], copied */
    bool prompt_logprobs;            /* the same for every prompt token but the first */
    /* The three below give way at a place where nothing else is left: bad words to all, allowed ids
     * to a grammar, the end of thinking to a grammar that has no thinking. */
    uint32_t n_allowed;
    const int32_t *allowed; /* [n_allowed] no other id may come, not even an end; copied; 0: all */
    uint32_t n_bad_words;
    const nb_ids *bad_words; /* [n_bad_words], copied: the last id of one may not come where the
                                answer ends with those before it */
    bool has_think_budget;
    bool think_open;                /* the prompt has opened the thinking */
    uint32_t think_budget;          /* tokens between think_begin and think_end, of all the answer's
                                       thinking; behind them think_end is all that may come */
    int32_t think_begin, think_end; /* ids */
    int32_t think_call;             /* ends thinking too, as a tool call does; -1: none */
    /* The answer ends where its last tokens are repeat_count times the same piece of repeat_min
     * (0 is 1) to repeat_max tokens; not before min_tokens. repeat_count 0: off, else at least 2 */
    uint32_t repeat_min, repeat_max, repeat_count;
    /* [n_...] The arrays stand behind what every step looks at. */
    const char *stop_strings[NB_STOP_STRINGS_MAX]; /* UTF-8, not empty */
    const char *stop_regex[NB_STOP_REGEX_MAX];     /* PCRE2, UTF-8: the answer ends with the first
                                                      character that completes a match of at most 256
                                                      bytes, and is cut before the match */
    int32_t stop_ids[NB_STOP_IDS_MAX];
    int32_t logprob_ids[NB_TOP_LOGPROBS_MAX];
} nb_sampling;

void nb_sampling_default(const nb_engine *engine, nb_sampling *sampling);

/* What counters and distributions take of a request. */
typedef enum nb_count {
    NB_COUNT_ALL,
    NB_COUNT_PROMPT, /* its one token is a by-product of what is asked about the prompt */
    NB_COUNT_NONE    /* health checks */
} nb_count;

typedef struct nb_request_options {
    const int32_t *prompt; /* [n_prompt] ids, 0 <= id < vocab_size */
    size_t n_prompt;       /* >= 1 */
    nb_sampling sampling;
    int32_t priority; /* lower goes first; 0 is usual */
    uint64_t client;  /* who asks: those of one priority take turns by it; any number, e.g. a hash
                       */
    uint64_t cache_salt; /* cached prefixes are shared by requests of the same value alone, e.g. a
                            hash; 0 is one of them */
    uint32_t timeout_ms; /* from submit to the last token; 0: none */
    const nb_grammar *grammar;  /* optional; the struct is copied, its user must live until it is
                                   released: a step may be under way when a request is closed */
    void (*notify)(void *user); /* optional: called from the engine's thread when something can be
                                   read; must not block */
    void *notify_user;
    uint64_t arrival_ns; /* when it came in, on CLOCK_MONOTONIC; 0: now. For the distributions */
    nb_count count;
    uint32_t notify_events; /* notify only for the first token, for the end, and when so many events
                               wait (at most 64); 0 is 1 */
} nb_request_options;

/* Checks and queues a request; everything it will need is allocated here. NB_INVALID names the
 * field; NB_TOO_LARGE names the context limit and both counts; NB_BUSY when the queue or the memory
 * planned for requests is full. */
nb_status nb_request_submit(nb_request **out, nb_engine *engine, const nb_request_options *options,
                            nb_error *error);

/* Beam search. */
#define NB_BEAM_WIDTH_MAX 10

typedef struct nb_beam_options {
    uint32_t width;        /* beams, and answers: 1 to NB_BEAM_WIDTH_MAX, at most max_running */
    double length_penalty; /* answers rank by log-probability / tokens^length_penalty, the prompt
                              counted in and the token that ends it left out */
    bool early_stopping;   /* stop at `width` ended answers; false: when none can be better */
    void *const *notify_users; /* optional [width]: instead of the options' notify_user */
} nb_beam_options;

/* Searches the likeliest answers. out[width]: requests, the first reads the best answer and so on;
 * each is read and closed like any other, and has no event before the search is over. Of the
 * sampling only max_tokens, ignore_eos, stop_ids, skip_special, include_stop and n_logprobs have a
 * meaning: what else would change the answer is refused (NB_UNSUPPORTED), what says how to draw has
 * no effect. Cancelling one before the search is over cancels all. NB_TOO_LARGE when the beams
 * might not fit the KV cache. Counters and distributions take it as one request. */
nb_status nb_beams_submit(nb_request **out, nb_engine *engine, const nb_request_options *options,
                          const nb_beam_options *beam, nb_error *error);

typedef struct nb_logprob {
    int32_t id;
    float logprob; /* natural log; finite: at least -9999 */
} nb_logprob;

/* One generated token (or, with is_prompt, one prompt token when prompt_logprobs was asked for). */
typedef struct nb_event {
    int32_t id;
    bool is_prompt;
    bool has_logprob; /* false for the first prompt token */
    float logprob;
    const char *text; /* bytes that became certain with this token: whole UTF-8 characters, stop
                         strings held back; may be empty; valid until the next nb_request_read() */
    size_t n_text;
    nb_finish
        finish; /* on the last event; an event may carry finish without a token: then id is -1 */
    int32_t matched_id;     /* EOS or stop id that ended it, else -1 */
    int32_t matched_string; /* index into stop_strings, with those of stop_regex behind them, else
                               -1 */
    uint32_t n_top;
    nb_logprob top[NB_TOP_LOGPROBS_MAX]; /* [n_top]; what lies behind is not written */
} nb_event;

/* Takes the next event. NB_AGAIN when none is there within timeout_ms (0: do not wait, negative:
 * wait for ever). After the event that carries a finish, NB_CLOSED. */
nb_status nb_request_read(nb_request *request, nb_event *event, int timeout_ms, nb_error *error);

/* Hints, never needed, for who reads many requests in turn: this one will be read soon. Asks for
 * its memory, and with `event`, a little later, for that of its next event. NULL is fine. */
void nb_request_prefetch(const nb_request *request, bool event);

/* Ends a request: its pages are free within one step, the next event read carries
 * NB_FINISH_CANCELLED. */
void nb_request_cancel(nb_request *request);

/* Prompt tokens that were found in the prefix cache; 0 until the request was first admitted. */
uint32_t nb_request_cached_tokens(const nb_request *request);

/* When what happened, in ns on CLOCK_MONOTONIC; 0: not yet. */
typedef struct nb_request_times {
    uint64_t arrival_ns, submitted_ns;
    uint64_t admitted_ns; /* the first time */
    uint64_t first_token_ns, last_token_ns;
} nb_request_times;

/* Any thread. */
void nb_request_get_times(const nb_request *request, nb_request_times *times);

/* The sentence of NB_FINISH_ERROR; empty otherwise. */
const char *nb_request_error(const nb_request *request);

/* Cancels if it still runs, frees, clears the pointer. NULL is fine. */
void nb_request_close(nb_request **request);

#ifdef __cplusplus
}
#endif

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
