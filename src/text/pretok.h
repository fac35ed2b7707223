/* Pre-tokenizer: cuts text into the pieces that BPE encodes one by one. Callers: the tokenizer. */
#pragma once

#include "base/json.h"

#include "base/mem.h"
#include "text/pattern.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_pretok nbi_pretok; /* immutable, shared by threads */

/* `spec` is the member "pre_tokenizer"; ByteLevel must be its last step. */
nb_status nbi_pretok_parse(nbi_pretok **out, const json_t *spec, const char *name, nb_error *err);
void nbi_pretok_free(nbi_pretok **pretok);

/* Gets every piece in order, n >= 1. */
typedef nb_status (*nbi_piece_fn)(void *arg, const uint8_t *piece, size_t n);

/* Cuts text[0..n), valid UTF-8. `scratch` is overwritten when the file asks for a leading space. */
nb_status nbi_pretok_run(const nbi_pretok *pretok, nbi_matcher *matcher, nbi_buf *scratch,
                         const char *text, size_t n, nbi_piece_fn fn, void *arg, nb_error *err);

#ifdef __cplusplus
}
#endif
