/* Access to parsed JSON (jansson) with errors that say which file and key. Lives in base because
 * every room above reads JSON.
 *
 * Objects keep the order of their keys; duplicate keys, invalid UTF-8 and depth above
 * NBI_JSON_DEPTH are refused. */
#pragma once

#include <jansson.h>

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_JSON_DEPTH 128

/* `name` is what errors call it (a path, "request body"). */
nb_status nbi_json_parse(json_t **out, const char *text, size_t n_bytes, const char *name,
                         nb_error *err);

/* What clients send and the parser refuses without naming a field: half surrogate pairs, as they
 * cut strings between the halves, and \u0000, which programs print. Each becomes \ufffd, in place.
 */
void nbi_json_mend(char *text, size_t n);
/* Of a text that stays as it is. */
nb_status nbi_json_parse_mended(json_t **out, const char *text, size_t n_bytes, const char *name,
                                nb_error *err);
nb_status nbi_json_load(json_t **out, const char *path, size_t max_bytes, nb_error *err);

/* Optional members: absent or null leaves *out as it is. A wrong type is NB_INVALID naming `name`
 * and the key. */
nb_status nbi_json_u32(uint32_t *out, const json_t *obj, const char *key, const char *name,
                       nb_error *err);
nb_status nbi_json_f64(double *out, const json_t *obj, const char *key, const char *name,
                       nb_error *err);
nb_status nbi_json_bool(bool *out, const json_t *obj, const char *key, const char *name,
                        nb_error *err);
/* Borrowed from obj. */
nb_status nbi_json_str(const char **out, const json_t *obj, const char *key, const char *name,
                       nb_error *err);

/* "an integer", "a string": what errors call a value's type; "nothing" for NULL. */
const char *nbi_json_kind(const json_t *value);

/* Appends compact JSON. NB_NO_MEMORY, also where jansson's own json_dumps() would go on without the
 * bytes it had no room for; NB_INVALID: not valid UTF-8. */
nb_status nbi_json_dump(nbi_buf *buf, const json_t *value);
/* The same as a string, freed by nbi_free(); NULL: no memory. */
char *nbi_json_dumps(const json_t *value);

/* Appends `s` as a JSON string with quotes; invalid UTF-8 becomes U+FFFD. */
nb_status nbi_json_quote(nbi_buf *buf, const char *s, size_t n);

#ifdef __cplusplus
}
#endif
