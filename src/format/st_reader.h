/* Reader of the two JSON texts of safetensors: file headers and the shard index. Private to
 * src/format.
 *
 * Not jansson: a header or index of 250,000 tensors is 20 to 30 MB, and a tree of it takes jansson
 * about a second. This makes one pass and puts strings into one pool. White space is skipped before
 * every token. */
#pragma once

#include <string.h>

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_ST_TEXT_SHOWN 120 /* bytes of a foreign name that an error repeats */

typedef struct nbi_st_reader {
    const uint8_t *begin, *p, *end; /* JSON text */
    const char *file;               /* what errors call it */
    const char *what;               /* "header", "index" */
    char *pool;                     /* strings; as large as the text, so it cannot overflow */
    size_t used;
    nb_error *err;
} nbi_st_reader;

/* "FILE: header byte N: text" */
nb_status nbi_st_bad(nbi_st_reader *r, const char *text);
/* Next byte that is not white space, without taking it; 0 at the end. */
int nbi_st_peek(nbi_st_reader *r);
/* Takes that byte if it is c. */
bool nbi_st_take(nbi_st_reader *r, int c);
/* A string, decoded, with a NUL behind it; lives in the pool. Control characters, NUL, invalid
 * UTF-8 and half surrogates are refused. */
nb_status nbi_st_string(nbi_st_reader *r, const char **text);
/* A whole number without sign or exponent. */
nb_status nbi_st_u64(nbi_st_reader *r, uint64_t *out);
/* Any value; checked only as far as needed to find its end. */
nb_status nbi_st_skip(nbi_st_reader *r);

#ifdef __cplusplus
}
#endif
