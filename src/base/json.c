/* JSON in (jansson, with limits) and JSON strings out. Called by loaders and servers.
 *
 * jansson allocates through nbi_malloc(), so that fault tests and the heap ban see it. */
#include "base/json.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/utf8.h"

/* ---------------------------------------------------------------- memory of jansson
 *
 * jansson takes the failure of every allocation but one: the buffer of the token it reads. There it
 * goes on without the byte and stops the process by an assertion. So while a document is parsed
 * that buffer is told apart (the first block; it grows by a block twice as large, after which the
 * old one is freed) and has a reserve; the parse then counts as failed. */

typedef struct token_memory {
    char *reserve; /* NULL: nothing is being parsed */
    size_t n_reserve, used;
    bool failed;
    const void *token; /* the buffer */
    size_t n_token;
    const void *last; /* allocated by the last call, if that was an allocation */
    size_t n_last;
} token_memory;

static _Thread_local token_memory tokens;

static void *from_reserve(size_t n)
{
    token_memory *t = &tokens;
    t->failed = true;
    if (n != 2 * t->n_token || n > t->n_reserve - t->used) return NULL;
    void *p = t->reserve + t->used;
    t->used += n;
    return p;
}

static void *json_alloc(size_t n)
{
    token_memory *t = &tokens;
    void *p = t->failed ? NULL : nbi_malloc(n);
    if (!t->reserve) return p;
    if (!p) p = from_reserve(n);
    if (!t->token) {
        t->token = p;
        t->n_token = n;
    }
    t->last = p;
    t->n_last = n;
    return p;
}

static void json_release(void *p)
{
    token_memory *t = &tokens;
    if (t->reserve && p && p == t->token && t->last && t->n_last == 2 * t->n_token) {
        t->token = t->last;
        t->n_token = t->n_last;
    }
    t->last = NULL;
    bool reserved = t->reserve && (char *)p >= t->reserve && (char *)p < t->reserve + t->n_reserve;
    if (!reserved) nbi_free(p);
}

/* Before main, because other threads may already use jansson when the first document is parsed. */
__attribute__((constructor)) static void use_our_heap(void)
{
    json_set_alloc_funcs(json_alloc, json_release);
}

/* json_loadb() where no token is longer than `longest` bytes; false: out of memory. */
static bool load_guarded(json_t **root, const char *text, size_t n, size_t longest,
                         json_error_t *error)
{
    /* a buffer of 16 bytes doubled until it holds the token: less than 4 times that in sum; and
     * room for a block that only has the size of one */
    size_t bytes = longest < SIZE_MAX / 16 ? 6 * longest + 256 : 0;
    char *reserve = bytes ? nbi_malloc(bytes) : NULL;
    if (!reserve) return false;
    tokens = (token_memory){.reserve = reserve, .n_reserve = bytes};
    *root = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, error);
    bool failed = tokens.failed;
    if (failed) {
        json_decref(*root);
        *root = NULL;
    }
    tokens = (token_memory){0};
    nbi_free(reserve);
    return !failed;
}

/* ---------------------------------------------------------------- before parsing */

/* The end of the string that starts at text[i] == '"': index behind the closing quote, or n. */
static size_t skip_string(const char *text, size_t i, size_t n)
{
    for (i++; i < n; i++) {
        if (text[i] == '\\') {
            i++;
        } else if (text[i] == '"') {
            return i + 1;
        }
    }
    return n;
}

static bool is_number_char(char c)
{
    return (c >= '0' && c <= '9') || c == '+' || c == '-' || c == '.' || c == 'e' || c == 'E';
}

/* Is text[0, n) an integer that does not fit 64 bits? */
static bool is_big_integer(const char *text, size_t n)
{
    char digits[32];
    if (n < 19) return false;
    for (size_t i = 0; i < n; i++) {
        if (text[i] == '.' || text[i] == 'e' || text[i] == 'E') return false;
    }
    if (n >= sizeof digits) return true;
    memcpy(digits, text, n);
    digits[n] = '\0';
    errno = 0;
    (void)strtoll(digits, NULL, 10);
    return errno == ERANGE;
}

static bool is_word_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

typedef struct shape {
    size_t n_big;   /* integers beyond 64 bits */
    size_t longest; /* bytes of a token at most */
} shape;

/* One walk over the bytes before parsing: depth, the longest token, and integers beyond 64 bits.
 * Those are legal JSON and real (tokenizer configurations write 10^30 for "no limit") but jansson
 * refuses them: `wide`, when not NULL, gets a copy where they are reals. */
static nb_status scan(const char *text, size_t n, const char *name, nbi_buf *wide, shape *found,
                      nb_error *err)
{
    size_t depth = 0, copied = 0, start = 0;
    for (size_t i = 0; i < n;) {
        char c = text[i];
        /* the token before; a number grows by the two bytes that make it a real */
        if (i - start + 2 > found->longest) found->longest = i - start + 2;
        start = i;
        if (c == '"') {
            i = skip_string(text, i, n);
            if (i > n) i = n;
        } else if (c == '{' || c == '[') {
            if (++depth > NBI_JSON_DEPTH) {
                return nbi_fail(err, NB_INVALID,
                                "%s: JSON nested deeper than %d levels at byte %zu", name,
                                NBI_JSON_DEPTH, i);
            }
            i++;
        } else if (c == '}' || c == ']') {
            if (depth) depth--;
            i++;
        } else if (is_number_char(c)) {
            size_t begin = i;
            while (i < n && is_number_char(text[i])) i++;
            if (!is_big_integer(text + begin, i - begin)) continue;
            found->n_big++;
            if (!wide) continue;
            nb_status st = nbi_buf_add(wide, text + copied, i - copied);
            if (st == NB_OK) st = nbi_buf_add(wide, ".0", 2);
            if (st != NB_OK) return nbi_fail(err, st, "%s: %s", name, nb_status_text(st));
            copied = i;
        } else if (is_word_char(c)) {
            while (i < n && is_word_char(text[i])) i++;
        } else {
            i++;
        }
    }
    if (n - start + 2 > found->longest) found->longest = n - start + 2;
    if (wide && nbi_buf_add(wide, text + copied, n - copied) != NB_OK) {
        return nbi_fail(err, NB_NO_MEMORY, "%s: no memory to parse", name);
    }
    return NB_OK;
}

nb_status nbi_json_parse(json_t **out, const char *text, size_t n_bytes, const char *name,
                         nb_error *err)
{
    shape found = {0};
    NB_TRY(scan(text, n_bytes, name, NULL, &found, err));
    nbi_buf wide = {.max = SIZE_MAX};
    if (found.n_big) {
        nb_status st = scan(text, n_bytes, name, &wide, &found, err);
        if (st != NB_OK) {
            nbi_buf_free(&wide);
            return st;
        }
        text = wide.data;
        n_bytes = wide.len;
    }
    json_error_t error = {0};
    json_t *root = NULL;
    bool enough = load_guarded(&root, text, n_bytes, found.longest, &error);
    nbi_buf_free(&wide);
    if (!enough) return nbi_fail(err, NB_NO_MEMORY, "%s: no memory to parse", name);
    if (!root) {
        return nbi_fail(err, NB_INVALID, "%s: line %d, column %d: %s", name, error.line,
                        error.column, error.text);
    }
    *out = root;
    return NB_OK;
}

/* The code unit of "\uXXXX" at s[0, n), or -1. */
static int32_t unit_at(const char *s, size_t n)
{
    return n >= 6 && s[0] == '\\' && s[1] == 'u' ? nbi_hex4(s + 2) : -1;
}

void nbi_json_mend(char *text, size_t n)
{
    for (size_t i = 0; i < n;) {
        char *backslash = memchr(text + i, '\\', n - i);
        if (!backslash) return;
        i = (size_t)(backslash - text);
        int32_t unit = unit_at(text + i, n - i);
        if (unit != 0 && (unit < 0xd800 || unit > 0xdfff)) {
            i += unit < 0 ? 2 : 6;
            continue;
        }
        int32_t next = n - i > 6 ? unit_at(text + i + 6, n - i - 6) : -1;
        if (unit != 0 && unit < 0xdc00 && next >= 0xdc00 && next <= 0xdfff) {
            i += 12;
        } else {
            memcpy(text + i, "\\ufffd", 6);
            i += 6;
        }
    }
}

nb_status nbi_json_parse_mended(json_t **out, const char *text, size_t n_bytes, const char *name,
                                nb_error *err)
{
    char *copy = nbi_malloc(n_bytes + 1);
    if (!copy) return nbi_fail(err, NB_NO_MEMORY, "%s: no memory to parse", name);
    if (n_bytes) memcpy(copy, text, n_bytes);
    nbi_json_mend(copy, n_bytes);
    nb_status status = nbi_json_parse(out, copy, n_bytes, name, err);
    nbi_free(copy);
    return status;
}

nb_status nbi_json_load(json_t **out, const char *path, size_t max_bytes, nb_error *err)
{
    char *text;
    size_t n_bytes;
    NB_TRY(nbi_file_read(&text, &n_bytes, path, max_bytes, err));
    nb_status st = nbi_json_parse(out, text, n_bytes, path, err);
    nbi_free(text);
    return st;
}

const char *nbi_json_kind(const json_t *value)
{
    if (!value) return "nothing";
    switch (json_typeof(value)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "an array";
    case JSON_STRING: return "a string";
    case JSON_INTEGER: return "an integer";
    case JSON_REAL: return "a number";
    case JSON_TRUE:
    case JSON_FALSE: return "a boolean";
    case JSON_NULL: return "null";
    }
    return "unknown";
}

/* The member, or NULL when it is absent or null. */
static const json_t *member(const json_t *obj, const char *key)
{
    const json_t *value = json_object_get(obj, key);
    return json_is_null(value) ? NULL : value;
}

static nb_status wrong_type(nb_error *err, const json_t *value, const char *key, const char *name,
                            const char *expected)
{
    return nbi_fail(err, NB_INVALID, "%s: \"%s\" is %s, expected %s", name, key,
                    nbi_json_kind(value), expected);
}

nb_status nbi_json_u32(uint32_t *out, const json_t *obj, const char *key, const char *name,
                       nb_error *err)
{
    const json_t *value = member(obj, key);
    if (!value) return NB_OK;
    double number = json_number_value(value);
    if (!json_is_number(value) || number != floor(number)) {
        return wrong_type(err, value, key, name, "an integer");
    }
    if (number < 0 || number > UINT32_MAX) {
        return nbi_fail(err, NB_INVALID, "%s: \"%s\" is %.17g, expected 0 to %u", name, key, number,
                        UINT32_MAX);
    }
    *out = (uint32_t)number;
    return NB_OK;
}

nb_status nbi_json_f64(double *out, const json_t *obj, const char *key, const char *name,
                       nb_error *err)
{
    const json_t *value = member(obj, key);
    if (!value) return NB_OK;
    if (!json_is_number(value)) return wrong_type(err, value, key, name, "a number");
    *out = json_number_value(value);
    return NB_OK;
}

nb_status nbi_json_bool(bool *out, const json_t *obj, const char *key, const char *name,
                        nb_error *err)
{
    const json_t *value = member(obj, key);
    if (!value) return NB_OK;
    if (!json_is_boolean(value)) return wrong_type(err, value, key, name, "a boolean");
    *out = json_is_true(value);
    return NB_OK;
}

nb_status nbi_json_str(const char **out, const json_t *obj, const char *key, const char *name,
                       nb_error *err)
{
    const json_t *value = member(obj, key);
    if (!value) return NB_OK;
    if (!json_is_string(value)) return wrong_type(err, value, key, name, "a string");
    *out = json_string_value(value);
    return NB_OK;
}

/* The escape of a byte below 0x80 that needs one, in out[7]; NULL when it stands for itself. */
static const char *escape(unsigned char c, char out[7])
{
    static const char hex[] = "0123456789abcdef";
    switch (c) {
    case '"': return "\\\"";
    case '\\': return "\\\\";
    case '\b': return "\\b";
    case '\f': return "\\f";
    case '\n': return "\\n";
    case '\r': return "\\r";
    case '\t': return "\\t";
    default: break;
    }
    if (c >= 0x20) return NULL;
    memcpy(out, "\\u00", 4);
    out[4] = hex[c >> 4];
    out[5] = hex[c & 15];
    out[6] = '\0';
    return out;
}

static nb_status quote_body(nbi_buf *buf, const char *s, size_t n)
{
    size_t done = 0;
    NB_TRY(nbi_buf_add(buf, "\"", 1));
    for (size_t i = 0; i < n;) {
        uint32_t code;
        char scratch[7];
        size_t taken = nbi_utf8_next(s + i, n - i, &code);
        const char *instead = code == NBI_UTF8_BAD ? "\xef\xbf\xbd"
                              : code < 0x80        ? escape((unsigned char)code, scratch)
                                                   : NULL;
        if (instead) {
            NB_TRY(nbi_buf_add(buf, s + done, i - done));
            NB_TRY(nbi_buf_add(buf, instead, strlen(instead)));
            done = i + taken;
        }
        i += taken;
    }
    NB_TRY(nbi_buf_add(buf, s + done, n - done));
    return nbi_buf_add(buf, "\"", 1);
}

nb_status nbi_json_quote(nbi_buf *buf, const char *s, size_t n)
{
    size_t before = buf->len;
    nb_status st = quote_body(buf, s, n);
    if (st != NB_OK && buf->data) { /* unchanged on failure, like every addition */
        buf->len = before;
        buf->data[before] = '\0';
    }
    return st;
}

typedef struct dump {
    nbi_buf *out;
    nb_status status; /* of the first addition that failed: jansson forgets some */
} dump;

static int dump_piece(const char *s, size_t n, void *user)
{
    dump *d = user;
    if (d->status == NB_OK) d->status = nbi_buf_add(d->out, s, n);
    return d->status == NB_OK ? 0 : -1;
}

nb_status nbi_json_dump(nbi_buf *buf, const json_t *value)
{
    dump d = {.out = buf, .status = NB_OK};
    int failed = json_dump_callback(value, dump_piece, &d, JSON_COMPACT | JSON_ENCODE_ANY);
    if (d.status != NB_OK) return d.status;
    return failed ? NB_INVALID : NB_OK;
}

char *nbi_json_dumps(const json_t *value)
{
    nbi_buf out = {0};
    if (nbi_json_dump(&out, value) == NB_OK) return out.data;
    nbi_buf_free(&out);
    return NULL;
}
