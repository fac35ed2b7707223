/* Error sentences and the names of statuses. Called by everything; holds no state. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

#undef nbi_fail
#undef nbi_fail_prefix

const char *nb_status_text(nb_status status)
{
    switch (status) {
#define X(name, value, text) \
    case name: return text;
        NB_STATUS_LIST(X)
#undef X
    }
    return "unknown status";
}

const char *nb_version(void)
{
    return NB_VERSION;
}

/* A sentence that fills the array was probably cut: end it on a whole character. */
static void end_on_character(char *text, size_t bytes)
{
    size_t n = strlen(text);
    if (n + 1 == bytes) text[nbi_utf8_cut(text, n)] = '\0';
}

nb_status nbi_fail(nb_error *err, nb_status status, const char *fmt, ...)
{
    if (!err) return status;
    char text[NB_ERROR_TEXT_MAX]; /* the arguments may point into err->text */
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    end_on_character(text, sizeof text);
    memcpy(err->text, text, sizeof text);
    err->status = status;
    return status;
}

nb_status nbi_fail_prefix(nb_error *err, nb_status status, const char *fmt, ...)
{
    if (!err) return status;
    char text[NB_ERROR_TEXT_MAX];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (n >= 0 && (size_t)n < sizeof text) {
        snprintf(text + n, sizeof text - (size_t)n, ": %s", err->text);
    }
    end_on_character(text, sizeof text);
    memcpy(err->text, text, sizeof text);
    return err->status;
}

void nbi_assert_failed(const char *cond, const char *file, int line)
{
    fprintf(stderr, "nibble: %s:%d: broken invariant: %s\n", file, line, cond);
    abort();
}
