/* Keeps control words of user text from becoming control tokens (see chat.h). Callers:
 * chat_encode.c. */
#pragma once

#include "base/json.h"

#include "text/added.h"
#include "text/template.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_guard {
    const nbi_added_token *tokens; /* of the tokenizer */
    nbi_added_set words,
        assistant_words; /* token indices; the second without <think> and </think> */
    uint32_t n_words;
    uint32_t base; /* token i is the character base + i */
} nbi_guard;

/* Words are taken from the tokenizer; the block of private-use characters is one that neither text
 * contains. NB_INVALID when every block is used. */
nb_status nbi_guard_init(nbi_guard *guard, const nbi_tokenizer *tokenizer, const char *request,
                         size_t n_request, const char *source, nb_error *err);
void nbi_guard_deinit(nbi_guard *guard);

/* A copy of `value` in which words are replaced, in strings and keys; `role` members stay. NULL:
 * out of memory. */
json_t *nbi_guard_apply(const nbi_guard *guard, json_t *value, bool assistant);

typedef struct nbi_ranges {
    nbi_range *data; /* [n] from nbi_malloc */
    size_t n, cap;
} nbi_ranges;

/* Puts the words back: appends the final text to *out and where words of users stand in it to
 * *ranges. */
nb_status nbi_guard_undo(const nbi_guard *guard, const nbi_buf *rendered, nbi_buf *out,
                         nbi_ranges *ranges);

#ifdef __cplusplus
}
#endif
