/* SGLang's /generate from inside: what the request asks for beside sampling. */
#pragma once

#include "server/job.h"

#ifdef __cplusplus
extern "C" {
#endif

/* job->state of /generate; in the arena. */
typedef struct nbi_generate {
    bool as_list;     /* the reply is an array: several prompts or answers */
    bool incremental; /* stream: events carry what is new, else all so far */
    bool logprobs, with_text;
    int32_t n_top;  /* top_logprobs_num */
    bool has_ids;   /* token_ids_logprob: they stand where the best would */
    bool has_limit; /* max_new_tokens was given */
} nbi_generate;

/* One name for the request, or one for every prompt. `rid` NULL: none. */
nb_status nbi_generate_read_rids(nbi_job *job, const json_t *rid, const json_t *prompt,
                                 nbi_api_error *e);

/* nbi_surface.write_delta, write_reply and write_end. */
nb_status nbi_generate_write_delta(nbi_job *job, nbi_choice *choice, nbi_buf *out);
nb_status nbi_generate_write_reply(nbi_job *job, nbi_buf *out);

/* `,"meta_info":{...}` of an answer of completions or chat. */
nb_status nbi_generate_write_meta(const nbi_job *job, const nbi_choice *choice, nbi_buf *out);

#ifdef __cplusplus
}
#endif
