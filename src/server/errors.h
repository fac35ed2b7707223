/* Errors of the API: an HTTP status, OpenAI's type and code, the field, and a sentence.
 *
 * Written by whatever finds the fault, turned into a reply by http.c or into an event by job.c. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_PARAM_MAX 128

typedef struct nbi_api_error {
    unsigned http;             /* HTTP status; 0: none */
    const char *code;          /* static; NULL: null */
    char param[NBI_PARAM_MAX]; /* path of the field, "messages[2].content"; empty: null */
    char message[NB_ERROR_TEXT_MAX];
} nbi_api_error;

/* Fills *e and returns NB_INVALID (4xx) or NB_INTERNAL (5xx), so that callers can write `return
 * nbi_api_fail(...)`. `code` must be static, `param` is copied; both may be NULL. */
nb_status nbi_api_fail(nbi_api_error *e, unsigned http, const char *code, const char *param,
                       const char *fmt, ...) NBI_PRINTF(5, 6);

/* 400 for a field: "<param>: <sentence>". */
nb_status nbi_api_field(nbi_api_error *e, const char *param, const char *fmt, ...) NBI_PRINTF(3, 4);

/* 503: "no memory for <what>". */
nb_status nbi_api_no_memory(nbi_api_error *e, const char *what);

/* Translates a failure of the engine or of the text room. `param`: the field that is to blame when
 * the input is. */
nb_status nbi_api_from(nbi_api_error *e, nb_status status, const nb_error *err, const char *param);

/* Appends {"error":{"message","type","param","code"}}. */
NBI_MUST_CHECK nb_status nbi_api_error_json(nbi_buf *out, const nbi_api_error *e);

#ifdef __cplusplus
}
#endif
