/* Log-probabilities in the two shapes of the OpenAI API. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nbi_logprob_shape {
    NBI_LOGPROBS_CHAT,       /* content: [{token, logprob, bytes, top_logprobs}] */
    NBI_LOGPROBS_COMPLETIONS /* four parallel arrays and text offsets */
} nbi_logprob_shape;

/* JSON items of tokens, separated by commas, without the brackets around them. */
typedef struct nbi_logprobs {
    uint32_t n;
    nbi_buf tokens;                /* chat: whole entries */
    nbi_buf values, tops, offsets; /* completions only */
} nbi_logprobs;

/* Adds the event's token. `offset`: characters of text before it. */
nb_status nbi_logprobs_add(nbi_logprobs *lp, nbi_logprob_shape shape, const nb_engine *engine,
                           const nb_event *event, size_t offset);

/* Appends the "logprobs" object of what was added, and empties it. */
nb_status nbi_logprobs_write(nbi_logprobs *lp, nbi_logprob_shape shape, nbi_buf *out);
void nbi_logprobs_free(nbi_logprobs *lp);

/* Characters that the token's bytes begin (a character counts where its first byte is). */
size_t nbi_token_chars(const nb_engine *engine, int32_t id);

#ifdef __cplusplus
}
#endif
