/* Expressions that end an answer, searched character by character. Callers: decode.c; the server,
 * which checks them.
 *
 * PCRE2 with Unicode classes. A match ends with the first character that makes one complete: `\d+`
 * ends with the first digit, and `$`, `\b` and look-ahead see the end of the text so far. So what
 * is found does not depend on how the text was cut.
 *
 * Bounds: a match has at most NBI_STOP_REGEX_BYTES bytes, and looks back at most as far again; the
 * work for each of its beginnings is bounded, and one that takes more is no match. No heap once
 * created. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_STOP_REGEX_BYTES       256
#define NBI_STOP_REGEX_PATTERN_MAX 1024 /* bytes of an expression */

typedef struct nbi_stop_regex nbi_stop_regex;

/* n <= NB_STOP_REGEX_MAX expressions, UTF-8, copied. NB_INVALID: one that PCRE2 refuses, that is
 * too long or that matches the empty text; the sentence does not name the field. */
nb_status nbi_stop_regex_create(nbi_stop_regex **out, const char *const *patterns, size_t n,
                                nb_error *err);
void nbi_stop_regex_destroy(nbi_stop_regex **regex);

/* Adds one character of n <= 4 bytes. Returns the index of the expression whose match ends with it
 * (of several the lowest), its length in bytes in *length; else -1. */
int nbi_stop_regex_push(nbi_stop_regex *regex, const char *character, size_t n, size_t *length);

/* Memory of one, without the compiled expressions. */
size_t nbi_stop_regex_bytes(void);

/* Bytes at the end of the text that may belong to a match, at most NBI_STOP_REGEX_BYTES. */
size_t nbi_stop_regex_held(const nbi_stop_regex *regex);

#ifdef __cplusplus
}
#endif
