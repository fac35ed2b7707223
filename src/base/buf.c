/* The growing byte buffer. Called by everything that builds text. A failed call leaves the buffer
 * as it was. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"

#define CAP_MIN 64u

static size_t most(const nbi_buf *buf)
{
    size_t max = buf->max ? buf->max : NBI_BUF_MAX_DEFAULT;
    return max == SIZE_MAX ? max - 1 : max; /* room for the NUL */
}

nb_status nbi_buf_reserve(nbi_buf *buf, size_t extra)
{
    size_t max = most(buf);
    if (buf->len > max || extra > max - buf->len) return NB_TOO_LARGE;
    size_t need = buf->len + extra + 1;
    if (need <= buf->cap) return NB_OK;
    size_t cap = buf->cap > max / 2 ? max + 1 : buf->cap * 2;
    if (cap < CAP_MIN) cap = CAP_MIN;
    if (cap < need) cap = need;
    char *data = nbi_realloc(buf->data, cap);
    if (!data) return NB_NO_MEMORY;
    data[buf->len] = '\0';
    buf->data = data;
    buf->cap = cap;
    return NB_OK;
}

nb_status nbi_buf_add(nbi_buf *buf, const void *data, size_t n)
{
    NB_TRY(nbi_buf_reserve(buf, n));
    if (n) memcpy(buf->data + buf->len, data, n);
    buf->len += n;
    buf->data[buf->len] = '\0';
    return NB_OK;
}

nb_status nbi_buf_addf(nbi_buf *buf, const char *fmt, ...)
{
    va_list args;
    size_t cap = buf->cap > most(buf) ? most(buf) + 1 : buf->cap;
    size_t room = buf->data && cap > buf->len ? cap - buf->len : 0;
    va_start(args, fmt);
    int n = vsnprintf(buf->data ? buf->data + buf->len : NULL, room, fmt, args);
    va_end(args);
    if (n >= 0 && (size_t)n < room) {
        buf->len += (size_t)n;
        return NB_OK;
    }
    if (room) buf->data[buf->len] = '\0';
    if (n < 0) return NB_INVALID;
    NB_TRY(nbi_buf_reserve(buf, (size_t)n));
    va_start(args, fmt);
    vsnprintf(buf->data + buf->len, (size_t)n + 1, fmt, args);
    va_end(args);
    buf->len += (size_t)n;
    return NB_OK;
}

void nbi_buf_clear(nbi_buf *buf)
{
    buf->len = 0;
    if (buf->data) buf->data[0] = '\0';
}

void nbi_buf_free(nbi_buf *buf)
{
    nbi_free(buf->data);
    buf->data = NULL;
    buf->len = buf->cap = 0;
}
