/* Normalizers of tokenizer.json. Callers: the tokenizer. */
#pragma once

#include "base/json.h"

#include "base/mem.h"
#include "text/pattern.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_normalizer nbi_normalizer; /* immutable, shared by threads */

/* `spec` is the member "normalizer"; null or absent (NULL) gives *out = NULL. */
nb_status nbi_normalizer_parse(nbi_normalizer **out, const json_t *spec, const char *name,
                               nb_error *err);
void nbi_normalizer_free(nbi_normalizer **normalizer);

/* Replaces *text (valid UTF-8) by its normal form; `scratch` is overwritten. */
nb_status nbi_normalizer_run(const nbi_normalizer *normalizer, nbi_matcher *matcher, nbi_buf *text,
                             nbi_buf *scratch, nb_error *err);

#ifdef __cplusplus
}
#endif
