/* Tokenizer of safetensors headers: {name: {dtype, shape, data_offsets}} and nothing else.
 *
 * Called by the checkpoint reader for each shard and by the fuzzer. Not jansson: a header of
 * 250,000 tensors is 30 MB of JSON, and building a tree of it costs 10 times what this single pass
 * does. Every byte read is inside [p, end); every number that leaves here was compared with the
 * file. */
#include "format/st_header.h"

#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

#define TEXT_SHOWN 120 /* bytes of a foreign name that an error repeats */

typedef struct reader {
    const uint8_t *begin, *p, *end; /* JSON text */
    const char *file;
    char *pool; /* names; as large as the text, so it cannot overflow */
    size_t used;
    nb_error *err;
} reader;

static nb_status bad(reader *r, const char *what)
{
    return nbi_fail(r->err, NB_CORRUPT, "%s: header byte %zu: %s", r->file,
                    (size_t)(r->p - r->begin), what);
}

static void skip_space(reader *r)
{
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t'))
        r->p++;
}

/* Next byte that is not white space, without taking it; 0 at the end. */
static int peek(reader *r)
{
    skip_space(r);
    return r->p < r->end ? *r->p : 0;
}

static bool take(reader *r, int c)
{
    if (peek(r) != c || r->p == r->end) return false;
    r->p++;
    return true;
}

static int hex4(const uint8_t *p)
{
    int v = 0;
    for (int i = 0; i < 4; i++) {
        int c = p[i], d;
        if (c >= '0' && c <= '9')
            d = c - '0';
        else if (c >= 'a' && c <= 'f')
            d = c - 'a' + 10;
        else if (c >= 'A' && c <= 'F')
            d = c - 'A' + 10;
        else
            return -1;
        v = v * 16 + d;
    }
    return v;
}

/* The escape behind a backslash; appends to out. */
static nb_status read_escape(reader *r, char **out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (r->p == r->end) return bad(r, "string without end");
    int c = *r->p++;
    const char *at = c ? strchr(from, c) : NULL;
    if (at) {
        *(*out)++ = to[at - from];
        return NB_OK;
    }
    if (c != 'u' || r->end - r->p < 4) return bad(r, "unknown escape");
    int32_t v = hex4(r->p);
    if (v < 0) return bad(r, "unknown escape");
    r->p += 4;
    if (v >= 0xd800 && v < 0xdc00) {
        int32_t low = r->end - r->p >= 6 && r->p[0] == '\\' && r->p[1] == 'u' ? hex4(r->p + 2) : -1;
        if (low < 0xdc00 || low > 0xdfff) return bad(r, "half a surrogate");
        v = 0x10000 + ((v - 0xd800) << 10) + (low - 0xdc00);
        r->p += 6;
    } else if (v >= 0xdc00 && v < 0xe000) {
        return bad(r, "half a surrogate");
    }
    if (v == 0) return bad(r, "NUL in a string");
    *out += nbi_utf8_put(*out, (uint32_t)v);
    return NB_OK;
}

/* A string into the pool. Decoded text is never longer than its escaped form, and the quotes pay
 * for the NUL. */
static nb_status read_string(reader *r, const char **text, size_t *n)
{
    if (!take(r, '"')) return bad(r, "expected a string");
    char *start = r->pool + r->used, *out = start;
    for (;;) {
        if (r->p == r->end) return bad(r, "string without end");
        int c = *r->p;
        if (c == '"') break;
        if (c == '\\') {
            r->p++;
            NB_TRY(read_escape(r, &out));
        } else if (c < 0x20) {
            return bad(r, "control character in a string");
        } else if (c < 0x80) {
            *out++ = (char)c;
            r->p++;
        } else {
            uint32_t code;
            size_t k = nbi_utf8_next((const char *)r->p, (size_t)(r->end - r->p), &code);
            if (code == NBI_UTF8_BAD) return bad(r, "invalid UTF-8");
            memcpy(out, r->p, k);
            out += k;
            r->p += k;
        }
    }
    r->p++;
    *out++ = 0;
    *text = start;
    *n = (size_t)(out - start) - 1;
    r->used += (size_t)(out - start);
    return NB_OK;
}

static nb_status read_u64(reader *r, uint64_t *out)
{
    int c = peek(r);
    if (c < '0' || c > '9') return bad(r, "expected a whole number");
    const uint8_t *start = r->p;
    uint64_t v = 0;
    while (r->p < r->end && *r->p >= '0' && *r->p <= '9') {
        if (__builtin_mul_overflow(v, (uint64_t)10, &v) ||
            __builtin_add_overflow(v, (uint64_t)(*r->p - '0'), &v))
            return bad(r, "number too large");
        r->p++;
    }
    if (*start == '0' && r->p - start > 1) return bad(r, "number with a leading zero");
    if (r->p < r->end && (*r->p == '.' || *r->p == 'e' || *r->p == 'E'))
        return bad(r, "expected a whole number");
    *out = v;
    return NB_OK;
}

/* [a, b, ...]: at most max numbers. */
static nb_status read_numbers(reader *r, uint64_t *out, uint32_t max, uint32_t *n)
{
    *n = 0;
    if (!take(r, '[')) return bad(r, "expected a list");
    if (take(r, ']')) return NB_OK;
    do {
        if (*n == max) return bad(r, "list is too long");
        NB_TRY(read_u64(r, &out[(*n)++]));
    } while (take(r, ','));
    return take(r, ']') ? NB_OK : bad(r, "expected , or ]");
}

static nb_status read_dtype(reader *r, nbi_st_tensor *t)
{
    const char *s;
    size_t n, used = r->used;
    NB_TRY(read_string(r, &s, &n));
    t->dtype = nbi_dtype_parse(s, n);
    if (t->dtype == NBI_DTYPE_COUNT)
        return nbi_fail(r->err, NB_UNSUPPORTED, "%s: tensor %.*s: dtype \"%.*s\" is not known",
                        r->file, TEXT_SHOWN, t->name, TEXT_SHOWN, s);
    r->used = used;
    return NB_OK;
}

/* {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, keys in any order. offsets relative
 * to the data. */
static nb_status read_entry(reader *r, nbi_st_tensor *t, uint64_t offsets[2])
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4, ALL = 7 };
    unsigned seen = 0;
    if (!take(r, '{')) return bad(r, "expected an object for the tensor");
    do {
        const char *key;
        size_t n, used = r->used;
        NB_TRY(read_string(r, &key, &n));
        unsigned bit = !strcmp(key, "dtype")          ? DTYPE
                       : !strcmp(key, "shape")        ? SHAPE
                       : !strcmp(key, "data_offsets") ? OFFSETS
                                                      : 0;
        if (!bit || (seen & bit))
            return nbi_fail(r->err, NB_CORRUPT, "%s: tensor %.*s: %s key \"%.*s\"", r->file,
                            TEXT_SHOWN, t->name, bit ? "repeated" : "unknown", TEXT_SHOWN, key);
        r->used = used; /* keys are not kept */
        seen |= bit;
        if (!take(r, ':')) return bad(r, "expected :");
        uint32_t count;
        if (bit == DTYPE) {
            NB_TRY(read_dtype(r, t));
        } else if (bit == SHAPE) {
            NB_TRY(read_numbers(r, t->shape, NBI_TENSOR_DIMS_MAX, &t->n_dims));
        } else {
            NB_TRY(read_numbers(r, offsets, 2, &count));
            if (count != 2) return bad(r, "data_offsets must have two numbers");
        }
    } while (take(r, ','));
    if (!take(r, '}')) return bad(r, "expected , or }");
    if (seen != ALL)
        return nbi_fail(r->err, NB_CORRUPT, "%s: tensor %.*s: %s is missing", r->file, TEXT_SHOWN,
                        t->name,
                        !(seen & DTYPE)   ? "dtype"
                        : !(seen & SHAPE) ? "shape"
                                          : "data_offsets");
    return NB_OK;
}

/* Compares dtype x shape with the span and the span with the file. */
static nb_status place(reader *r, nbi_st_tensor *t, const uint64_t offsets[2], const uint8_t *data,
                       uint64_t data_bytes)
{
    uint64_t bits = nbi_dtype_bits(t->dtype);
    bool overflow = false, zero = false;
    for (uint32_t i = 0; i < t->n_dims; i++) zero |= t->shape[i] == 0;
    for (uint32_t i = 0; i < t->n_dims && !zero; i++)
        overflow |= __builtin_mul_overflow(bits, t->shape[i], &bits);
    if (zero) bits = 0;
    if (overflow || bits % 8)
        return nbi_fail(r->err, NB_CORRUPT,
                        "%s: tensor %.*s: shape is not a whole number of bytes below 2^61", r->file,
                        TEXT_SHOWN, t->name);
    if (offsets[1] < offsets[0] || offsets[1] - offsets[0] != bits / 8)
        return nbi_fail(r->err, NB_CORRUPT,
                        "%s: tensor %.*s: data_offsets [%llu, %llu] do not span the %llu bytes of "
                        "its dtype and shape",
                        r->file, TEXT_SHOWN, t->name, (unsigned long long)offsets[0],
                        (unsigned long long)offsets[1], (unsigned long long)(bits / 8));
    if (offsets[1] > data_bytes)
        return nbi_fail(
            r->err, NB_CORRUPT,
            "%s: tensor %.*s: ends at byte %llu of the data, the file has %llu (truncated?)",
            r->file, TEXT_SHOWN, t->name, (unsigned long long)offsets[1],
            (unsigned long long)data_bytes);
    t->data = data + offsets[0];
    t->bytes = bits / 8;
    return NB_OK;
}

/* {"key": "value", ...}: checked and dropped. */
static nb_status skip_metadata(reader *r)
{
    if (!take(r, '{')) return bad(r, "__metadata__ must be an object");
    if (take(r, '}')) return NB_OK;
    do {
        const char *s;
        size_t n, used = r->used;
        NB_TRY(read_string(r, &s, &n));
        if (!take(r, ':')) return bad(r, "expected :");
        NB_TRY(read_string(r, &s, &n));
        r->used = used;
    } while (take(r, ','));
    return take(r, '}') ? NB_OK : bad(r, "expected , or }");
}

static nb_status grow(nbi_st_header *h, nb_error *err)
{
    if (h->n < h->cap) return NB_OK;
    size_t cap = h->cap ? h->cap * 2 : 64;
    nbi_st_tensor *more = nbi_realloc(h->tensors, cap * sizeof *more);
    if (!more) return nbi_fail(err, NB_NO_MEMORY, "out of memory for %zu tensors", cap);
    h->tensors = more;
    h->cap = cap;
    return NB_OK;
}

static nb_status read_tensors(reader *r, nbi_st_header *h, const uint8_t *data, uint64_t data_bytes)
{
    bool metadata = false;
    if (!take(r, '{')) return bad(r, "expected {");
    if (peek(r) != '}') {
        do {
            const char *name;
            size_t n;
            uint64_t offsets[2];
            NB_TRY(read_string(r, &name, &n));
            if (!take(r, ':')) return bad(r, "expected :");
            if (!strcmp(name, "__metadata__")) {
                if (metadata) return bad(r, "__metadata__ is there twice");
                metadata = true;
                NB_TRY(skip_metadata(r));
                continue;
            }
            if (n == 0) return bad(r, "tensor without a name");
            NB_TRY(grow(h, r->err));
            nbi_st_tensor *t = &h->tensors[h->n];
            *t = (nbi_st_tensor){.name = name};
            NB_TRY(read_entry(r, t, offsets));
            NB_TRY(place(r, t, offsets, data, data_bytes));
            h->n++;
        } while (take(r, ','));
    }
    if (!take(r, '}')) return bad(r, "expected , or }");
    return peek(r) == 0 && r->p == r->end ? NB_OK : bad(r, "text behind the last }");
}

static int by_offset(const void *a, const void *b)
{
    const nbi_st_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* Sorts by offset and refuses overlaps, holes and bytes that belong to no tensor. */
static nb_status check_spans(nbi_st_header *h, const uint8_t *data, uint64_t data_bytes,
                             const char *file, nb_error *err)
{
    bool sorted = true;
    for (size_t i = 1; i < h->n && sorted; i++)
        sorted = by_offset(&h->tensors[i - 1], &h->tensors[i]) < 0;
    if (!sorted) qsort(h->tensors, h->n, sizeof *h->tensors, by_offset);
    const uint8_t *at = data;
    for (size_t i = 0; i < h->n; i++) {
        const nbi_st_tensor *t = &h->tensors[i];
        if (t->data < at)
            return nbi_fail(err, NB_CORRUPT, "%s: tensors %.*s and %.*s overlap", file, TEXT_SHOWN,
                            h->tensors[i - 1].name, TEXT_SHOWN, t->name);
        if (t->data > at)
            return nbi_fail(err, NB_CORRUPT, "%s: hole of %llu bytes before tensor %.*s", file,
                            (unsigned long long)(t->data - at), TEXT_SHOWN, t->name);
        at = t->data + t->bytes;
    }
    if (at != data + data_bytes)
        return nbi_fail(err, NB_CORRUPT, "%s: %llu bytes behind the last tensor%s%.*s", file,
                        (unsigned long long)(data + data_bytes - at), h->n ? " " : "", TEXT_SHOWN,
                        h->n ? h->tensors[h->n - 1].name : "");
    return NB_OK;
}

static nb_status check_names(const nbi_st_header *h, const char *file, nb_error *err)
{
    size_t size = 16;
    while (size < h->n * 2) size *= 2;
    uint32_t *slots = nbi_calloc(size, sizeof *slots); /* index + 1 */
    if (!slots)
        return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory for %zu tensor names", file, h->n);
    nb_status st = NB_OK;
    for (size_t i = 0; i < h->n && st == NB_OK; i++) {
        const char *name = h->tensors[i].name;
        size_t at = nbi_st_hash(name, strlen(name)) & (size - 1);
        for (; slots[at] && st == NB_OK; at = (at + 1) & (size - 1))
            if (!strcmp(h->tensors[slots[at] - 1].name, name))
                st = nbi_fail(err, NB_CORRUPT, "%s: tensor %.*s is there twice", file, TEXT_SHOWN,
                              name);
        slots[at] = (uint32_t)i + 1;
    }
    nbi_free(slots);
    return st;
}

nb_status nbi_st_header_parse(nbi_st_header *out, const uint8_t *file, size_t n_bytes,
                              const char *name, nb_error *err)
{
    if (n_bytes < 8)
        return nbi_fail(err, NB_CORRUPT, "%s: %zu bytes are too few for a safetensors file", name,
                        n_bytes);
    uint64_t len = 0;
    for (int i = 7; i >= 0; i--) len = len << 8 | file[i];
    if (len > NBI_ST_HEADER_MAX)
        return nbi_fail(err, NB_CORRUPT,
                        "%s: header length %llu is above %u (not a safetensors file?)", name,
                        (unsigned long long)len, NBI_ST_HEADER_MAX);
    if (len < 2 || len > n_bytes - 8)
        return nbi_fail(err, NB_CORRUPT,
                        "%s: header length %llu does not fit the file of %zu bytes (truncated?)",
                        name, (unsigned long long)len, n_bytes);
    nbi_st_header h = {.names = nbi_malloc((size_t)len)};
    if (!h.names)
        return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory for a header of %llu bytes", name,
                        (unsigned long long)len);
    reader r = {.begin = file + 8,
                .p = file + 8,
                .end = file + 8 + len,
                .file = name,
                .pool = h.names,
                .err = err};
    const uint8_t *data = file + 8 + len;
    nb_status st;
    NB_TRY_OR(st, read_tensors(&r, &h, data, n_bytes - 8 - len), fail);
    NB_TRY_OR(st, check_spans(&h, data, n_bytes - 8 - len, name, err), fail);
    NB_TRY_OR(st, check_names(&h, name, err), fail);
    *out = h;
    return NB_OK;
fail:
    nbi_st_header_free(&h);
    return st;
}

void nbi_st_header_free(nbi_st_header *header)
{
    nbi_free(header->tensors);
    nbi_free(header->names);
    *header = (nbi_st_header){0};
}

nb_status nbi_st_parse(const uint8_t *file, size_t n_bytes, const char *name, nbi_st_each each,
                       void *user, nb_error *err)
{
    nbi_st_header h;
    NB_TRY(nbi_st_header_parse(&h, file, n_bytes, name, err));
    nb_status st = NB_OK;
    for (size_t i = 0; i < h.n && st == NB_OK; i++) st = each(user, &h.tensors[i], err);
    nbi_st_header_free(&h);
    return st;
}
