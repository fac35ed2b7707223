/* What a client sends as a grammar, checked and turned into what the library reads; and the
 * library's complaints turned into sentences. Caller: grammar_compile.c. */
#pragma once

#include "base/json.h"
#include "base/mem.h"
#include "text/grammar.h"
#include "text/grammar_lark.h"

#ifdef __cplusplus
extern "C" {
#endif

/* NB_TOO_LARGE for a source that is not looked at. */
nb_status nbi_grammar_check_size(nbi_grammar_kind kind, size_t n, nb_error *err);

/* Added tokens that a grammar may name, and those that it does. */
typedef struct nbi_grammar_tokens {
    const nbi_tokenizer *tokenizer;
    const int32_t *eos; /* [n_eos] never named */
    uint32_t n_eos, n_tokens;
    uint32_t n_own;
    int32_t own[NBI_GRAMMAR_OWN_MAX];
} nbi_grammar_tokens;

/* White space between two tokens of JSON: at most `most` of these characters. */
typedef struct nbi_grammar_space {
    const char *chars; /* of " \t\n\r"; without any, or with most 0: none */
    uint32_t most;
} nbi_grammar_space;

/* Appends the library's text to *text (NUL behind it) and sets *type to its static name. Checks
 * sizes, JSON, UTF-8, and the keywords that the library takes but cannot keep. Sets
 * tokens->own; every kind but NBI_GRAMMAR_TAG has none. */
nb_status nbi_grammar_prepare(nbi_buf *text, const char **type, nbi_grammar_kind kind,
                              const char *source, size_t n, nbi_grammar_tokens *tokens,
                              nb_error *err);

/* Checks a schema and appends it as the library reads it; *schema is changed, or another. `space`
 * NULL: NBI_GRAMMAR_SPACE_MAX of any. */
nb_status nbi_grammar_put_schema(nbi_buf *text, json_t **schema, const nbi_grammar_space *space,
                                 nb_error *err);
/* Checks an expression and appends it as the library reads it, `slashes`: as a part of a Lark
 * grammar. */
nb_status nbi_grammar_put_regex(nbi_buf *text, const char *source, size_t n, bool slashes,
                                nb_error *err);

/* The library's message for a source of this kind as a status and one sentence. */
nb_status nbi_grammar_refuse(nbi_grammar_kind kind, const char *message, nb_error *err);

/* "the schema", "the expression", ... */
const char *nbi_grammar_noun(nbi_grammar_kind kind);

/* grammar_ebnf.c: rules `name ::= ...` to the library's Lark dialect. */
nb_status nbi_grammar_from_ebnf(nbi_buf *text, const char *source, size_t n, nb_error *err);
/* As rules of a larger grammar; *root is what they match. The source is valid UTF-8 without NUL. */
nb_status nbi_grammar_read_ebnf(nbi_lark_node **root, nbi_lark *lark, const char *source, size_t n);

#ifdef __cplusplus
}
#endif
