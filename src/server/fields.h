/* Typed access to the members of a request body. Absent and null are the same: *out stays as it is
 * (clients send null for "not set"). A wrong type or range is a 400 that names the field.
 *
 * `prefix` is what stands before the key in the name of the field: "" at the top, else
 * "stream_options." and the like. Functions return NB_OK or NB_INVALID with *e filled. */
#pragma once

#include "base/json.h"
#include "server/errors.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of one request body. A prompt of token ids has one value each. */
#define NBI_BODY_VALUES_MAX     (4 << 20)
#define NBI_BODY_CONTAINERS_MAX (512 << 10) /* objects and arrays */

/* The member, or NULL when it is absent or null. Borrowed. */
json_t *nbi_field(const json_t *obj, const char *key);

nb_status nbi_field_bool(bool *out, const json_t *obj, const char *prefix, const char *key,
                         nbi_api_error *e);
/* Takes 3 and 3.0, refuses 3.5 and everything outside [min, max]. */
nb_status nbi_field_int(int64_t *out, const json_t *obj, const char *prefix, const char *key,
                        int64_t min, int64_t max, nbi_api_error *e);
nb_status nbi_field_num(double *out, const json_t *obj, const char *prefix, const char *key,
                        nbi_api_error *e);
/* Borrowed from obj. */
nb_status nbi_field_str(const char **out, const json_t *obj, const char *prefix, const char *key,
                        nbi_api_error *e);
nb_status nbi_field_array(json_t **out, const json_t *obj, const char *prefix, const char *key,
                          nbi_api_error *e);
nb_status nbi_field_object(json_t **out, const json_t *obj, const char *prefix, const char *key,
                           nbi_api_error *e);

/* A string that has to be there; `place` is the path of obj, without a dot. */
nb_status nbi_field_need_str(const char **out, const json_t *obj, const char *place,
                             const char *key, nbi_api_error *e);

/* An integer value in [min, max]; `param` names it. */
nb_status nbi_value_int(int64_t *out, const json_t *value, const char *param, int64_t min,
                        int64_t max, nbi_api_error *e);

/* Parses a request body: an object, or 400. Halves of surrogate pairs in string escapes become
 * U+FFFD in `text` first. *out is released by json_decref(). */
nb_status nbi_body_parse(json_t **out, char *text, size_t n_bytes, nbi_api_error *e);

#ifdef __cplusplus
}
#endif
