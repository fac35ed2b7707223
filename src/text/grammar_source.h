/* What a client sends as a grammar, checked and turned into what the library reads; and the
 * library's complaints turned into sentences. Caller: grammar_compile.c. */
#pragma once

#include "base/mem.h"
#include "text/grammar.h"

#ifdef __cplusplus
extern "C" {
#endif

/* NB_TOO_LARGE for a source that is not looked at. */
nb_status nbi_grammar_check_size(nbi_grammar_kind kind, size_t n, nb_error *err);

/* Appends the library's text to *text (NUL behind it) and sets *type to its static name. Checks
 * sizes, JSON, UTF-8, and the keywords that the library takes but cannot keep. */
nb_status nbi_grammar_prepare(nbi_buf *text, const char **type, nbi_grammar_kind kind,
                              const char *source, size_t n, nb_error *err);

/* The library's message for a source of this kind as a status and one sentence. */
nb_status nbi_grammar_refuse(nbi_grammar_kind kind, const char *message, nb_error *err);

/* "the schema", "the expression", ... */
const char *nbi_grammar_noun(nbi_grammar_kind kind);

/* grammar_ebnf.c: rules `name ::= ...` to the library's Lark dialect. */
nb_status nbi_grammar_from_ebnf(nbi_buf *text, const char *source, size_t n, nb_error *err);

#ifdef __cplusplus
}
#endif
