/* API errors: filling, translating and printing them. Called by every file of the server. */
#include "server/errors.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"

/* Formats into a fixed field; a cut never leaves half a character. */
static void vput(char *out, size_t n, const char *fmt, va_list args)
{
    int len = vsnprintf(out, n, fmt, args);
    if (len < 0) out[0] = '\0';
    if (len >= (int)n) out[nbi_utf8_cut(out, n - 1)] = '\0';
}

static nb_status fill(nbi_api_error *e, unsigned http, const char *code, const char *param,
                      const char *fmt, va_list args)
{
    nb_status status = http >= 500 ? NB_INTERNAL : NB_INVALID;
    if (!e) return status;
    e->http = http;
    e->code = code;
    snprintf(e->param, sizeof e->param, "%s", param ? param : "");
    vput(e->message, sizeof e->message, fmt, args);
    return status;
}

nb_status nbi_api_fail(nbi_api_error *e, unsigned http, const char *code, const char *param,
                       const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    nb_status status = fill(e, http, code, param, fmt, args);
    va_end(args);
    return status;
}

nb_status nbi_api_field(nbi_api_error *e, const char *param, const char *fmt, ...)
{
    char sentence[NB_ERROR_TEXT_MAX];
    va_list args;
    va_start(args, fmt);
    vput(sentence, sizeof sentence, fmt, args);
    va_end(args);
    return nbi_api_fail(e, 400, NULL, param, "%s: %s", param, sentence);
}

nb_status nbi_api_no_memory(nbi_api_error *e, const char *what)
{
    return nbi_api_fail(e, 503, NULL, NULL, "no memory for %s", what);
}

/* HTTP status of a failure below the server. */
static unsigned http_of(nb_status status)
{
    switch (status) {
    case NB_INVALID:
    case NB_UNSUPPORTED:
    case NB_TOO_LARGE: return 400;
    case NB_NOT_FOUND: return 404;
    case NB_BUSY:
    case NB_NO_MEMORY:
    case NB_CLOSED:
    case NB_CANCELLED: return 503;
    default: return 500;
    }
}

nb_status nbi_api_from(nbi_api_error *e, nb_status status, const nb_error *err, const char *param)
{
    const char *text = err && err->text[0] ? err->text : nb_status_text(status);
    const char *code = status == NB_TOO_LARGE ? "context_length_exceeded" : NULL;
    if (status == NB_BUSY) code = "queue_full";
    unsigned http = http_of(status);
    return nbi_api_fail(e, http, code, http == 400 ? param : NULL, "%s", text);
}

static const char *type_of(unsigned http)
{
    if (http == 503) return "service_unavailable";
    if (http == 504) return "timeout_error";
    return http >= 500 ? "server_error" : "invalid_request_error";
}

/* A string or null, after `key`. */
static nb_status member(nbi_buf *out, const char *key, const char *value)
{
    NB_TRY(nbi_buf_add(out, key, strlen(key)));
    if (!value || !value[0]) return nbi_buf_add(out, "null", 4);
    return nbi_json_quote(out, value, strlen(value));
}

nb_status nbi_api_error_json(nbi_buf *out, const nbi_api_error *e)
{
    NB_TRY(nbi_buf_add(out, "{\"error\":{\"message\":", 20));
    NB_TRY(nbi_json_quote(out, e->message, strlen(e->message)));
    NB_TRY(member(out, ",\"type\":", type_of(e->http)));
    NB_TRY(member(out, ",\"param\":", e->param));
    NB_TRY(member(out, ",\"code\":", e->code));
    return nbi_buf_add(out, "}}", 2);
}
