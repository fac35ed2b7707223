/* Log-probabilities in the shapes of the APIs. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nbi_logprob_shape {
    NBI_LOGPROBS_CHAT,        /* content: [{token, logprob, bytes, top_logprobs}] */
    NBI_LOGPROBS_COMPLETIONS, /* four parallel arrays and text offsets */
    NBI_LOGPROBS_PROMPT,      /* vLLM's: [{"id": {logprob, rank, decoded_token}}], null the first */
    NBI_LOGPROBS_NATIVE       /* SGLang's: [[logprob, id, text]] in `tokens`, a list of those in
                                 `tops`; written by generate_reply.c */
} nbi_logprob_shape;

/* JSON items of tokens, separated by commas, without the brackets around them. */
typedef struct nbi_logprobs {
    uint32_t n;
    nbi_buf tokens;                /* chat: whole entries */
    nbi_buf values, tops, offsets; /* completions only; native: tops */
    bool with_text;                /* native: the text of tokens, else null */
    bool by_id;                    /* chat, completions: tokens are called "token_id:7" */
} nbi_logprobs;

/* Adds the event's token and at most `n_top` of the best. `offset`: characters of text before it.
 */
nb_status nbi_logprobs_add(nbi_logprobs *lp, nbi_logprob_shape shape, const nb_engine *engine,
                           const nb_event *event, uint32_t n_top, size_t offset);

/* Appends the "logprobs" object of what was added, and empties it. */
nb_status nbi_logprobs_write(nbi_logprobs *lp, nbi_logprob_shape shape, nbi_buf *out);
/* Forgets what was added. */
void nbi_logprobs_clear(nbi_logprobs *lp);
void nbi_logprobs_free(nbi_logprobs *lp);

/* Appends the name of a token as a JSON string: its text, or "bytes:\xf0\x9f" where that is no
 * whole character, or "token_id:7" without any. */
nb_status nbi_token_write_name(nbi_buf *out, const nb_engine *engine, int32_t id);

/* Characters that the token's bytes begin (a character counts where its first byte is). */
size_t nbi_token_chars(const nb_engine *engine, int32_t id);

#ifdef __cplusplus
}
#endif
