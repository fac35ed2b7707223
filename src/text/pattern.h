/* Regular expressions of tokenizer.json. Callers: the pre-tokenizer and the normaliser of text/.
 *
 * The files are written for Oniguruma (through the Rust library); nibble runs them on PCRE2 with
 * JIT. What differs between the dialects is translated: `\s` `\w` `\h` `\b`, `\uHHHH`, `^` and `$`
 * (always per line), characters newer than PCRE2's Unicode tables. Nested character classes, `&&`,
 * and properties PCRE2 does not know are refused. Case folding to several characters
 * (`(?i:ss)` matching U+00DF) is not done by PCRE2. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_pattern nbi_pattern; /* immutable, shared by threads */
typedef struct nbi_matcher nbi_matcher; /* one thread at a time; works with every pattern */

/* `name` is what errors call the place the pattern comes from. */
nb_status nbi_pattern_compile(nbi_pattern **out, const char *regex, size_t n, const char *name,
                              nb_error *err);
void nbi_pattern_free(nbi_pattern **pattern);

nb_status nbi_matcher_create(nbi_matcher **out, nb_error *err);
void nbi_matcher_free(nbi_matcher **matcher);

/* The next match in text[0..n) (valid UTF-8) at or after byte `from`, in *start, *end. NB_NOT_FOUND
 * without touching err when there is none; NB_TOO_LARGE when the match needs more steps or memory
 * than allowed. */
nb_status nbi_pattern_find(const nbi_pattern *pattern, nbi_matcher *matcher, const char *text,
                           size_t n, size_t from, size_t *start, size_t *end, nb_error *err);

/* The same as the pattern translated for PCRE2, for tests and messages. */
const char *nbi_pattern_text(const nbi_pattern *pattern);

/* Length in bytes of the piece at the start of p[0..end), which is valid UTF-8 and not empty: a
 * match of the pattern, or all that lies before the next match. */
typedef size_t (*nbi_scan)(const uint8_t *p, const uint8_t *end);

/* A well-known pattern and its hand-written equal. */
typedef struct nbi_known_pattern {
    const char *name, *regex;
    nbi_scan scan;
    bool gaps; /* the pattern leaves text unmatched */
} nbi_known_pattern;

/* The known pattern whose text is exactly this; NULL when there is none. */
const nbi_known_pattern *nbi_pattern_known(const char *regex, size_t n);

/* All of them, for tests: index from 0; NULL beyond the last. */
const nbi_known_pattern *nbi_pattern_known_at(size_t index);

/* `\p{N}` and `\p{N}+`, for the step Digits. nbi_char_class_init() comes first. */
size_t nbi_scan_number(const uint8_t *p, const uint8_t *end);
size_t nbi_scan_number_run(const uint8_t *p, const uint8_t *end);

#ifdef __cplusplus
}
#endif
