/* A JSON value that a model writes, made strict while it streams: whatever has been written to the
 * output can at any byte be closed to valid JSON. Callers: the tool-call parsers.
 *
 * Taken and repaired: single-quoted strings, True / False / None, a comma before a closing bracket,
 * raw control characters and unknown escapes in strings, halves of surrogate pairs (U+FFFD).
 * Refused: everything else that is not JSON, numbers beyond a double, keys that repeat in one
 * object or hold U+0000, nesting beyond NBI_TOOL_JSON_DEPTH. White space between tokens is dropped.
 * A number, a literal, and a key with its comma are held back until they are complete; nothing else
 * is. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Below NBI_JSON_DEPTH, so that a reader with that limit takes the value inside an object. */
#define NBI_TOOL_JSON_DEPTH     120
#define NBI_TOOL_JSON_TOKEN_MAX 1024u             /* bytes of a number */
#define NBI_TOOL_JSON_HELD_MAX  ((size_t)1 << 16) /* bytes of a key, with white space around it */
/* Keys of one value that are compared; beyond, repetitions are not seen. */
#define NBI_TOOL_KEYS_MAX ((size_t)1 << 16)

/* Kinds of values, as bits. */
enum {
    NBI_TOOL_STRING = 1,
    NBI_TOOL_INTEGER = 2,
    NBI_TOOL_NUMBER = 4,
    NBI_TOOL_BOOLEAN = 8,
    NBI_TOOL_NULL = 16,
    NBI_TOOL_OBJECT = 32,
    NBI_TOOL_ARRAY = 64
};

/* A set of (object, key) pairs. Zeroed is empty. Keys are compared by a 64-bit hash: two different
 * keys are taken for one with probability below 2^-30 at the maximum. */
typedef struct nbi_tool_keys {
    uint64_t *slots;
    size_t n, n_slots; /* n_slots is a power of two or 0 */
} nbi_tool_keys;

/* *added: the pair was not there (or the set is full). */
nb_status nbi_tool_keys_add(nbi_tool_keys *keys, uint32_t object, const char *key, size_t n,
                            bool *added);
void nbi_tool_keys_clear(nbi_tool_keys *keys); /* keeps the memory */
void nbi_tool_keys_free(nbi_tool_keys *keys);

typedef enum nbi_tool_json_state {
    NBI_TOOL_JSON_MORE, /* more input is needed */
    NBI_TOOL_JSON_DONE,
    NBI_TOOL_JSON_BAD
} nbi_tool_json_state;

typedef struct nbi_tool_json {
    nbi_tool_json_state state;
    uint8_t kind;   /* NBI_TOOL_... of the value; 0 before it starts */
    uint8_t expect; /* tool_json.c */
    char quote;     /* of the string that is open */
    uint8_t depth;
    bool is_object[NBI_TOOL_JSON_DEPTH + 1]; /* by depth, from 1 */
    bool has_member[NBI_TOOL_JSON_DEPTH + 1];
    uint32_t object[NBI_TOOL_JSON_DEPTH + 1]; /* number of the object, for `keys` */
    uint32_t n_objects;
    nbi_buf key;  /* decoded; owed to the output before the next value */
    nbi_buf held; /* input that was consumed but has left no trace in the output */
    nbi_tool_keys keys;
} nbi_tool_json;

/* The start state; memory of an earlier use is kept. `j` was zeroed once. */
void nbi_tool_json_start(nbi_tool_json *j);
void nbi_tool_json_free(nbi_tool_json *j);

/* Reads from s[0, n) and appends strict JSON to `out`. *used bytes are consumed: the caller
 * presents the rest again, with more behind it. `final`: nothing comes behind s, a number or
 * literal that ends there is complete. Look at j->state afterwards. With NBI_TOOL_JSON_DONE *used
 * stands behind the value; with NBI_TOOL_JSON_BAD at the byte that is wrong, and j->held is what
 * stood before it without reaching the output. NB_NO_MEMORY, NB_TOO_LARGE (`out`). */
NBI_MUST_CHECK nb_status nbi_tool_json_feed(nbi_tool_json *j, const char *s, size_t n, bool final,
                                            size_t *used, nbi_buf *out);

/* Appends what closes the value. False when nothing of it was written. */
NBI_MUST_CHECK nb_status nbi_tool_json_close(nbi_tool_json *j, nbi_buf *out, bool *something);

/* Appends what a string that a DONE value wrote, s[0, n) with its quotes, says. Uses j's memory;
 * its value is over. */
NBI_MUST_CHECK nb_status nbi_tool_json_unquote(nbi_tool_json *j, const char *s, size_t n,
                                               nbi_buf *out);

/* Appends s as the inside of a JSON string; what is not UTF-8 becomes U+FFFD. */
NBI_MUST_CHECK nb_status nbi_tool_json_escape(nbi_buf *out, const char *s, size_t n);

#ifdef __cplusplus
}
#endif
