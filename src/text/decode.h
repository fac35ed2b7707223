/* From token bytes to text that can be shown: whole characters, and nothing of a stop string.
 * Callers: engine, server, CLI.
 *
 * Fixed-size states, no heap in push, work proportional to the bytes pushed (never to the text so
 * far). */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- whole characters */

/* Zeroed is the start state. Invariant: `held` is the beginning of a character that may still be
 * completed. */
typedef struct nbi_decoder {
    uint8_t held[4];
    uint8_t n_held;
} nbi_decoder;

/* Bytes that a push of n bytes can write: every byte may become a U+FFFD. */
#define NBI_DECODER_ROOM(n) (3 * ((size_t)(n) + 4))

/* Adds n bytes; writes what is certain to out[NBI_DECODER_ROOM(n)] and returns its length. The
 * output is valid UTF-8 that ends at a character. Bytes that cannot be part of a character become
 * U+FFFD, one per maximal subpart, so that all outputs joined equal Python's bytes.decode("utf-8",
 * "replace") of all input joined. */
size_t nbi_decoder_push(nbi_decoder *decoder, const char *bytes, size_t n, char *out);

/* End of text: a held beginning becomes one U+FFFD. Writes at most 3 bytes; the state is the start
 * state again. */
size_t nbi_decoder_flush(nbi_decoder *decoder, char *out);

/* ---------------------------------------------------------------- stop strings */

typedef struct nbi_stop nbi_stop;

/* `n` stop strings (UTF-8, not empty, copied), at most NB_STOP_STRINGS_MAX of together 64 KiB. n =
 * 0 gives a matcher that passes everything. All memory is taken here. */
nb_status nbi_stop_create(nbi_stop **out, const char *const *strings, size_t n, nb_error *err);
void nbi_stop_destroy(nbi_stop **stop);

/* Expressions beside the strings (stop_regex.h), whose indices follow those of the strings; once,
 * before any text. What ends first counts, of a string and an expression the string. */
nb_status nbi_stop_add_regex(nbi_stop *stop, const char *const *patterns, size_t n, nb_error *err);

/* Bytes that a push of n bytes, or a flush, can write. */
size_t nbi_stop_room(const nbi_stop *stop, size_t n);

/* Adds text (the output of a decoder); writes what cannot belong to a stop string to `out` and
 * returns its length. *matched is the index of the string that ended first (the longest of several
 * that end at one byte, then the lowest index), else -1. On a match the output ends before the
 * string, or behind it with `include`; what follows it in `text` is dropped, and the matcher
 * accepts no more. */
size_t nbi_stop_push(nbi_stop *stop, const char *text, size_t n, bool include, char *out,
                     int *matched);

/* End of text without a match: the held part. */
size_t nbi_stop_flush(nbi_stop *stop, char *out);

#ifdef __cplusplus
}
#endif
