/* The fields that both OpenAI surfaces share: how to sample, how many answers, how to stream.
 *
 * Reading is pure: it needs the facts of the model, not the engine, so that it can be fuzzed. */
#pragma once

#include "server/fields.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_CHOICES_MAX        1024 /* prompts times n of one HTTP request */
#define NBI_N_MAX              128
#define NBI_STOP_BYTES_MAX     1024 /* of one stop string */
#define NBI_LENGTH_PENALTY_MAX 16

/* What validation needs to know. Immutable once the model is loaded. */
typedef struct nbi_api_facts {
    nb_sampling defaults; /* the model's generation_config */
    uint32_t vocab_size;
    uint32_t max_context;
    uint32_t max_running;     /* requests that run together */
    const char *const *names; /* [n_names] names the model is served under, the first is its id */
    uint32_t n_names;
    bool has_text;       /* a tokenizer is there */
    bool has_chat;       /* and a chat template */
    const char *no_chat; /* the sentence why not */
} nbi_api_facts;

typedef struct nbi_params {
    /* What is looked at for every piece of a stream comes first. */
    uint32_t n;       /* answers per prompt */
    uint32_t best_of; /* of how many that are computed; n unless the surface ranks them */
    bool has_max_tokens;
    uint32_t max_tokens;          /* when has_max_tokens; may be 0 where the surface allows it */
    const char *max_tokens_field; /* the name the client used; static */
    const char *prefix;           /* of the fields of sampling: "" or "sampling_params."; static */
    bool stream, include_usage, continuous_usage;
    bool beams; /* beam search; best_of is the width */
    double length_penalty;
    bool early_stopping;
    uint32_t stream_interval; /* tokens per event of a stream; 0: the server's */
    /* Log-probabilities of the answer and of the prompt: -1 none, 0 of the token, k and the k best.
     * sampling.n_logprobs is filled from them when the request is submitted. */
    int32_t n_logprobs, n_prompt_logprobs;
    bool name_by_id;               /* tokens of log-probabilities are called "token_id:7" */
    bool return_ids;               /* the reply has the ids of prompt and answer */
    bool return_prompt_ids;        /* of the prompt, in every choice */
    bool return_meta;              /* every choice has SGLang's meta_info; no stream */
    bool return_prompt_text;       /* chat: the reply has the rendered prompt */
    uint32_t prompt_logprobs_from; /* prompt tokens before it are left out */
    int64_t truncate_prompt;       /* tokens kept of a longer prompt; 0: all; -1: what fits */
    bool truncate_end;             /* the first of them, else the last */
    int32_t priority;              /* as in nb_request_options */
    const json_t *allowed;         /* allowed_token_ids, borrowed from the body; NULL: none */
    const json_t *bad_words;       /* the same */
    const json_t *salts[2];        /* the same of cache_salt, extra_key: a string, or a list */
    nb_sampling sampling;          /* stop strings are borrowed from the body */
    nb_logit_bias bias[NB_LOGIT_BIAS_MAX]; /* what sampling.logit_bias points to */
} nbi_params;

/* The names of fields that differ between the APIs. */
typedef struct nbi_param_names {
    const char *prefix; /* "" or "sampling_params." */
    const char *max_tokens, *min_tokens, *seed;
} nbi_param_names;

/* Reads and checks: model, max_tokens, max_completion_tokens, temperature, top_p, top_k, min_p,
 * frequency_penalty, presence_penalty, repetition_penalty, logit_bias, seed, n, best_of, stop,
 * stop_regex, stop_token_ids, allowed_token_ids, bad_words, thinking_token_budget,
 * include_stop_str_in_output, no_stop_trim, min_tokens, ignore_eos, disable_oea,
 * skip_special_tokens, stream, stream_options, stream_interval, prompt_logprobs,
 * truncate_prompt_tokens, truncation_side, priority, use_beam_search, length_penalty,
 * early_stopping (surfaces without beam search refuse params.beams); checks the type of fields that
 * have no effect (user, metadata, store, service_tier, spaces_between_special_tokens, ...); refuses
 * what would change the answer and is not supported. `min_max_tokens` is the smallest max_tokens
 * the surface takes. */
nb_status nbi_params_read(nbi_params *out, const json_t *body, const nbi_api_facts *facts,
                          uint32_t min_max_tokens, nbi_api_error *e);

/* `model` alone: 404 for a name that is not served. */
nb_status nbi_params_read_model(const json_t *body, const nbi_api_facts *facts, nbi_api_error *e);

/* For completions and chat, after n_logprobs is set: return_token_ids, return_prompt_token_ids,
 * return_tokens_as_token_ids, return_meta_info, logprob_token_ids, repetition_detection. */
nb_status nbi_params_read_openai(nbi_params *params, const json_t *body, const nbi_api_facts *facts,
                                 nbi_api_error *e);
/* cache_salt and extra_key; a part of nbi_params_read(). */
nb_status nbi_params_read_salts(nbi_params *params, const json_t *body, nbi_api_error *e);
/* For the others. */
nb_status nbi_params_refuse_openai(const json_t *body, nbi_api_error *e);
/* "logprob_token_ids", or /generate's own name; changes n_logprobs. */
nb_status nbi_params_read_logprob_ids(nbi_params *params, const json_t *body, const char *field,
                                      const nbi_api_facts *facts, nbi_api_error *e);

/* The same for SGLang's sampling_params object `obj` (NULL: all defaults): what it shares with the
 * above, max_new_tokens, min_new_tokens and sampling_seed. */
nb_status nbi_params_read_native(nbi_params *out, const json_t *obj, const nbi_api_facts *facts,
                                 nbi_api_error *e);

/* 400 unless prompt and answer fit the context (names the limit and both counts). */
nb_status nbi_params_check_length(const nbi_params *params, const nbi_api_facts *facts,
                                  size_t n_prompt, const char *prompt_field, nbi_api_error *e);

#ifdef __cplusplus
}
#endif
