/* API keys: those of the options, and those of a file that can be read again while requests run.
 *
 * A given key is compared with every key, over a fixed number of bytes, so that neither the time
 * nor the place of a difference tells anything about a key. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_KEY_BYTES_MAX 512  /* of one key */
#define NBI_KEYS_MAX      4096 /* of one server */

typedef struct nbi_keys nbi_keys;

/* `fixed` [n_fixed] and the lines of `file` (NULL: none). In the file "#" begins a comment line;
 * blanks around a key and empty lines are skipped. Refused with the flag or the line's number: keys
 * that are empty, too long or have bytes other than printable ASCII, and a file without keys. The
 * strings are copied, but `file` must live as long as the object. */
nb_status nbi_keys_open(nbi_keys **out, const char *const *fixed, size_t n_fixed, const char *file,
                        nb_error *err);

/* Reads the file again; on failure the keys stay as they were. Any thread. */
nb_status nbi_keys_reload(nbi_keys *keys, nb_error *err);

/* The file, or NULL. */
const char *nbi_keys_file(const nbi_keys *keys);

/* How many there are now; 0: requests need none. Any thread. */
size_t nbi_keys_count(nbi_keys *keys);

/* Any thread. */
bool nbi_keys_match(nbi_keys *keys, const char *given);

void nbi_keys_close(nbi_keys **keys);

#ifdef __cplusplus
}
#endif
