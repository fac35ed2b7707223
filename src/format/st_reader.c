/* Tokens of safetensors JSON. Called by st_header.c and st_index.c. */
#include "format/st_reader.h"

#include "base/utf8.h"

#define DEPTH_MAX 64 /* of a value that is skipped */

nb_status nbi_st_bad(nbi_st_reader *r, const char *text)
{
    return nbi_fail(r->err, NB_CORRUPT, "%s: %s byte %zu: %s", r->file, r->what,
                    (size_t)(r->p - r->begin), text);
}

static void skip_space(nbi_st_reader *r)
{
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t'))
        r->p++;
}

int nbi_st_peek(nbi_st_reader *r)
{
    skip_space(r);
    return r->p < r->end ? *r->p : 0;
}

bool nbi_st_take(nbi_st_reader *r, int c)
{
    if (nbi_st_peek(r) != c || r->p == r->end) return false;
    r->p++;
    return true;
}

/* The escape behind a backslash; appends to out. */
static nb_status read_escape(nbi_st_reader *r, char **out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (r->p == r->end) return nbi_st_bad(r, "string without end");
    int c = *r->p++;
    const char *at = c ? strchr(from, c) : NULL;
    if (at) {
        *(*out)++ = to[at - from];
        return NB_OK;
    }
    if (c != 'u' || r->end - r->p < 4) return nbi_st_bad(r, "unknown escape");
    int32_t v = nbi_hex4((const char *)r->p);
    if (v < 0) return nbi_st_bad(r, "unknown escape");
    r->p += 4;
    if (v >= 0xd800 && v < 0xdc00) {
        int32_t low = r->end - r->p >= 6 && r->p[0] == '\\' && r->p[1] == 'u'
                          ? nbi_hex4((const char *)r->p + 2)
                          : -1;
        if (low < 0xdc00 || low > 0xdfff) return nbi_st_bad(r, "half a surrogate");
        v = 0x10000 + ((v - 0xd800) << 10) + (low - 0xdc00);
        r->p += 6;
    } else if (v >= 0xdc00 && v < 0xe000) {
        return nbi_st_bad(r, "half a surrogate");
    }
    if (v == 0) return nbi_st_bad(r, "NUL in a string");
    *out += nbi_utf8_put(*out, (uint32_t)v);
    return NB_OK;
}

/* A string into the pool. Decoded text is never longer than its escaped form, and the quotes pay
 * for the NUL. */
nb_status nbi_st_string(nbi_st_reader *r, const char **text)
{
    if (!nbi_st_take(r, '"')) return nbi_st_bad(r, "expected a string");
    char *start = r->pool + r->used, *out = start;
    for (;;) {
        if (r->p == r->end) return nbi_st_bad(r, "string without end");
        int c = *r->p;
        if (c == '"') break;
        if (c == '\\') {
            r->p++;
            NB_TRY(read_escape(r, &out));
        } else if (c < 0x20) {
            return nbi_st_bad(r, "control character in a string");
        } else if (c < 0x80) {
            *out++ = (char)c;
            r->p++;
        } else {
            uint32_t code;
            size_t k = nbi_utf8_next((const char *)r->p, (size_t)(r->end - r->p), &code);
            if (code == NBI_UTF8_BAD) return nbi_st_bad(r, "invalid UTF-8");
            memcpy(out, r->p, k);
            out += k;
            r->p += k;
        }
    }
    r->p++;
    *out++ = 0;
    *text = start;
    r->used += (size_t)(out - start);
    return NB_OK;
}

nb_status nbi_st_u64(nbi_st_reader *r, uint64_t *out)
{
    int c = nbi_st_peek(r);
    if (c < '0' || c > '9') return nbi_st_bad(r, "expected a whole number");
    const uint8_t *start = r->p;
    uint64_t v = 0;
    while (r->p < r->end && *r->p >= '0' && *r->p <= '9') {
        if (__builtin_mul_overflow(v, (uint64_t)10, &v) ||
            __builtin_add_overflow(v, (uint64_t)(*r->p - '0'), &v))
            return nbi_st_bad(r, "number too large");
        r->p++;
    }
    if (*start == '0' && r->p - start > 1) return nbi_st_bad(r, "number with a leading zero");
    if (r->p < r->end && (*r->p == '.' || *r->p == 'e' || *r->p == 'E'))
        return nbi_st_bad(r, "expected a whole number");
    *out = v;
    return NB_OK;
}

/* A number or word: up to the next delimiter. */
static nb_status skip_word(nbi_st_reader *r)
{
    const uint8_t *start = r->p;
    while (r->p<r->end && * r->p> ' ' && *r->p != ',' && *r->p != '}' && *r->p != ']') r->p++;
    return r->p > start ? NB_OK : nbi_st_bad(r, "expected a value");
}

nb_status nbi_st_skip(nbi_st_reader *r)
{
    char open[DEPTH_MAX]; /* brackets that are open */
    int depth = 0;
    do {
        const char *s;
        size_t used = r->used;
        int c = nbi_st_peek(r);
        if (c == '{' || c == '[') {
            if (depth == DEPTH_MAX) return nbi_st_bad(r, "nested too deeply");
            open[depth++] = (char)c;
            r->p++;
        } else if (c == '}' || c == ']') {
            if (!depth || open[depth - 1] != (c == '}' ? '{' : '['))
                return nbi_st_bad(r, "bracket without its partner");
            depth--;
            r->p++;
        } else if (depth && (c == ',' || c == ':')) {
            r->p++;
        } else if (c == '"') {
            NB_TRY(nbi_st_string(r, &s));
            r->used = used;
        } else {
            NB_TRY(skip_word(r));
        }
    } while (depth);
    return NB_OK;
}
