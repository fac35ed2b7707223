/* Members of a request body, read with their types checked. Called by the API surfaces. */
#include "server/fields.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define INT_EXACT 9007199254740992.0 /* 2^53: above it a real need not be the integer it shows */

json_t *nbi_field(const json_t *obj, const char *key)
{
    json_t *value = json_object_get(obj, key);
    return json_is_null(value) ? NULL : value;
}

static nb_status wrong_type(nbi_api_error *e, const char *param, const json_t *value,
                            const char *expected)
{
    return nbi_api_field(e, param, "expected %s, found %s", expected, nbi_json_kind(value));
}

/* prefix + key, cut where it does not fit. */
static const char *name(char out[NBI_PARAM_MAX], const char *prefix, const char *key)
{
    snprintf(out, NBI_PARAM_MAX, "%s%s", prefix, key);
    return out;
}

nb_status nbi_field_bool(bool *out, const json_t *obj, const char *prefix, const char *key,
                         nbi_api_error *e)
{
    char param[NBI_PARAM_MAX];
    const json_t *value = nbi_field(obj, key);
    if (!value) return NB_OK;
    if (!json_is_boolean(value)) return wrong_type(e, name(param, prefix, key), value, "a boolean");
    *out = json_is_true(value);
    return NB_OK;
}

nb_status nbi_value_int(int64_t *out, const json_t *value, const char *param, int64_t min,
                        int64_t max, nbi_api_error *e)
{
    if (!json_is_number(value)) return wrong_type(e, param, value, "an integer");
    if (json_is_real(value)) {
        double real = json_real_value(value);
        if (real != floor(real)) return wrong_type(e, param, value, "an integer");
        if (!(fabs(real) <= INT_EXACT) || real < (double)min || real > (double)max) {
            return nbi_api_field(e, param, "%.17g is outside of %lld to %lld", real, (long long)min,
                                 (long long)max);
        }
        *out = (int64_t)real;
        return NB_OK;
    }
    int64_t integer = json_integer_value(value);
    if (integer < min || integer > max) {
        return nbi_api_field(e, param, "%lld is outside of %lld to %lld", (long long)integer,
                             (long long)min, (long long)max);
    }
    *out = integer;
    return NB_OK;
}

nb_status nbi_field_int(int64_t *out, const json_t *obj, const char *prefix, const char *key,
                        int64_t min, int64_t max, nbi_api_error *e)
{
    char param[NBI_PARAM_MAX];
    const json_t *value = nbi_field(obj, key);
    if (!value) return NB_OK;
    return nbi_value_int(out, value, name(param, prefix, key), min, max, e);
}

nb_status nbi_field_num(double *out, const json_t *obj, const char *prefix, const char *key,
                        nbi_api_error *e)
{
    char param[NBI_PARAM_MAX];
    const json_t *value = nbi_field(obj, key);
    if (!value) return NB_OK;
    if (!json_is_number(value)) return wrong_type(e, name(param, prefix, key), value, "a number");
    *out = json_number_value(value);
    return NB_OK;
}

nb_status nbi_field_str(const char **out, const json_t *obj, const char *prefix, const char *key,
                        nbi_api_error *e)
{
    char param[NBI_PARAM_MAX];
    const json_t *value = nbi_field(obj, key);
    if (!value) return NB_OK;
    if (!json_is_string(value)) return wrong_type(e, name(param, prefix, key), value, "a string");
    *out = json_string_value(value);
    return NB_OK;
}

nb_status nbi_field_need_str(const char **out, const json_t *obj, const char *place,
                             const char *key, nbi_api_error *e)
{
    char prefix[NBI_PARAM_MAX], param[NBI_PARAM_MAX];
    snprintf(prefix, sizeof prefix, "%.*s.", NBI_PARAM_MAX - 32, place);
    *out = NULL;
    NB_TRY(nbi_field_str(out, obj, prefix, key, e));
    return *out ? NB_OK : nbi_api_field(e, name(param, prefix, key), "is missing");
}

nb_status nbi_field_array(json_t **out, const json_t *obj, const char *prefix, const char *key,
                          nbi_api_error *e)
{
    char param[NBI_PARAM_MAX];
    json_t *value = nbi_field(obj, key);
    if (!value) return NB_OK;
    if (!json_is_array(value)) return wrong_type(e, name(param, prefix, key), value, "an array");
    *out = value;
    return NB_OK;
}

nb_status nbi_field_object(json_t **out, const json_t *obj, const char *prefix, const char *key,
                           nbi_api_error *e)
{
    char param[NBI_PARAM_MAX];
    json_t *value = nbi_field(obj, key);
    if (!value) return NB_OK;
    if (!json_is_object(value)) return wrong_type(e, name(param, prefix, key), value, "an object");
    *out = value;
    return NB_OK;
}

/* A value of three bytes costs up to two hundred in memory, so that a body within its limit could
 * fill it. One walk over the bytes; what is not JSON is left to the parser. */
static nb_status check_amount(const char *text, size_t n, nbi_api_error *e)
{
    size_t values = 1, containers = 0;
    bool inside = false; /* a string */
    for (size_t i = 0; i < n; i++) {
        char c = text[i];
        if (c == '"') {
            inside = !inside;
        } else if (inside) {
            i += c == '\\';
        } else {
            values += c == ',';
            containers += c == '[' || c == '{';
        }
    }
    if (values > NBI_BODY_VALUES_MAX) {
        return nbi_api_fail(e, 400, NULL, NULL, "request body: %zu JSON values, at most %d", values,
                            NBI_BODY_VALUES_MAX);
    }
    if (containers > NBI_BODY_CONTAINERS_MAX) {
        return nbi_api_fail(e, 400, NULL, NULL,
                            "request body: %zu JSON objects and arrays, at most %d", containers,
                            NBI_BODY_CONTAINERS_MAX);
    }
    return NB_OK;
}

nb_status nbi_body_parse(json_t **out, char *text, size_t n_bytes, nbi_api_error *e)
{
    nb_error err = {0};
    json_t *root = NULL;
    if (n_bytes == 0) return nbi_api_fail(e, 400, NULL, NULL, "the request body is empty");
    NB_TRY(check_amount(text, n_bytes, e));
    nbi_json_mend(text, n_bytes);
    nb_status status = nbi_json_parse(&root, text, n_bytes, "request body", &err);
    if (status != NB_OK) return nbi_api_from(e, status, &err, NULL);
    if (!json_is_object(root)) {
        nbi_api_fail(e, 400, NULL, NULL, "request body: expected an object, found %s",
                     nbi_json_kind(root));
        json_decref(root);
        return NB_INVALID;
    }
    *out = root;
    return NB_OK;
}
