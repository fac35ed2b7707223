/* Tokenizer of safetensors headers: {name: {dtype, shape, data_offsets}} and nothing else.
 *
 * Called by the checkpoint reader for each shard and by the fuzzer. Not jansson: a header of
 * 250,000 tensors is 30 MB of JSON, and building a tree of it costs 10 times what this single pass
 * does. Every byte read is inside [p, end); every number that leaves here was compared with the
 * file. */
#include "format/st_header.h"

#include <stdlib.h>
#include <string.h>

#include "format/st_reader.h"

/* [a, b, ...]: at most max numbers. */
static nb_status read_numbers(nbi_st_reader *r, uint64_t *out, uint32_t max, uint32_t *n)
{
    *n = 0;
    if (!nbi_st_take(r, '[')) return nbi_st_bad(r, "expected a list");
    if (nbi_st_take(r, ']')) return NB_OK;
    do {
        if (*n == max) return nbi_st_bad(r, "list is too long");
        NB_TRY(nbi_st_u64(r, &out[(*n)++]));
    } while (nbi_st_take(r, ','));
    return nbi_st_take(r, ']') ? NB_OK : nbi_st_bad(r, "expected , or ]");
}

static nb_status read_dtype(nbi_st_reader *r, nbi_st_tensor *t)
{
    const char *s;
    size_t used = r->used;
    NB_TRY(nbi_st_string(r, &s));
    t->dtype = nbi_dtype_parse(s, strlen(s));
    if (t->dtype == NBI_DTYPE_COUNT)
        return nbi_fail(r->err, NB_UNSUPPORTED, "%s: tensor %.*s: dtype \"%.*s\" is not known",
                        r->file, NBI_ST_TEXT_SHOWN, t->name, NBI_ST_TEXT_SHOWN, s);
    r->used = used;
    return NB_OK;
}

/* {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, keys in any order. offsets relative
 * to the data. */
static nb_status read_entry(nbi_st_reader *r, nbi_st_tensor *t, uint64_t offsets[2])
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4, ALL = 7 };
    unsigned seen = 0;
    if (!nbi_st_take(r, '{')) return nbi_st_bad(r, "expected an object for the tensor");
    do {
        const char *key;
        size_t used = r->used;
        NB_TRY(nbi_st_string(r, &key));
        unsigned bit = !strcmp(key, "dtype")          ? DTYPE
                       : !strcmp(key, "shape")        ? SHAPE
                       : !strcmp(key, "data_offsets") ? OFFSETS
                                                      : 0;
        if (!bit || (seen & bit))
            return nbi_fail(r->err, NB_CORRUPT, "%s: tensor %.*s: %s key \"%.*s\"", r->file,
                            NBI_ST_TEXT_SHOWN, t->name, bit ? "repeated" : "unknown",
                            NBI_ST_TEXT_SHOWN, key);
        r->used = used; /* keys are not kept */
        seen |= bit;
        if (!nbi_st_take(r, ':')) return nbi_st_bad(r, "expected :");
        uint32_t count;
        if (bit == DTYPE) {
            NB_TRY(read_dtype(r, t));
        } else if (bit == SHAPE) {
            NB_TRY(read_numbers(r, t->shape, NBI_TENSOR_DIMS_MAX, &t->n_dims));
        } else {
            NB_TRY(read_numbers(r, offsets, 2, &count));
            if (count != 2) return nbi_st_bad(r, "data_offsets must have two numbers");
        }
    } while (nbi_st_take(r, ','));
    if (!nbi_st_take(r, '}')) return nbi_st_bad(r, "expected , or }");
    if (seen != ALL)
        return nbi_fail(r->err, NB_CORRUPT, "%s: tensor %.*s: %s is missing", r->file,
                        NBI_ST_TEXT_SHOWN, t->name,
                        !(seen & DTYPE)   ? "dtype"
                        : !(seen & SHAPE) ? "shape"
                                          : "data_offsets");
    return NB_OK;
}

/* Compares dtype x shape with the span and the span with the file. */
static nb_status place(nbi_st_reader *r, nbi_st_tensor *t, const uint64_t offsets[2],
                       const uint8_t *data, uint64_t data_bytes)
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
                        NBI_ST_TEXT_SHOWN, t->name);
    if (offsets[1] < offsets[0] || offsets[1] - offsets[0] != bits / 8)
        return nbi_fail(r->err, NB_CORRUPT,
                        "%s: tensor %.*s: data_offsets [%llu, %llu] do not span the %llu bytes of "
                        "its dtype and shape",
                        r->file, NBI_ST_TEXT_SHOWN, t->name, (unsigned long long)offsets[0],
                        (unsigned long long)offsets[1], (unsigned long long)(bits / 8));
    if (offsets[1] > data_bytes)
        return nbi_fail(
            r->err, NB_CORRUPT,
            "%s: tensor %.*s: ends at byte %llu of the data, the file has %llu (truncated?)",
            r->file, NBI_ST_TEXT_SHOWN, t->name, (unsigned long long)offsets[1],
            (unsigned long long)data_bytes);
    t->data = data + offsets[0];
    t->bytes = bits / 8;
    return NB_OK;
}

/* {"key": "value", ...}: checked and dropped. */
static nb_status skip_metadata(nbi_st_reader *r)
{
    if (!nbi_st_take(r, '{')) return nbi_st_bad(r, "__metadata__ must be an object");
    if (nbi_st_take(r, '}')) return NB_OK;
    do {
        const char *s;
        size_t used = r->used;
        NB_TRY(nbi_st_string(r, &s));
        if (!nbi_st_take(r, ':')) return nbi_st_bad(r, "expected :");
        NB_TRY(nbi_st_string(r, &s));
        r->used = used;
    } while (nbi_st_take(r, ','));
    return nbi_st_take(r, '}') ? NB_OK : nbi_st_bad(r, "expected , or }");
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

static nb_status read_tensors(nbi_st_reader *r, nbi_st_header *h, const uint8_t *data,
                              uint64_t data_bytes)
{
    bool metadata = false;
    if (!nbi_st_take(r, '{')) return nbi_st_bad(r, "expected {");
    if (nbi_st_peek(r) != '}') {
        do {
            const char *name;
            uint64_t offsets[2] = {0, 0};
            NB_TRY(nbi_st_string(r, &name));
            if (!nbi_st_take(r, ':')) return nbi_st_bad(r, "expected :");
            if (!strcmp(name, "__metadata__")) {
                if (metadata) return nbi_st_bad(r, "__metadata__ is there twice");
                metadata = true;
                NB_TRY(skip_metadata(r));
                continue;
            }
            if (!*name) return nbi_st_bad(r, "tensor without a name");
            NB_TRY(grow(h, r->err));
            nbi_st_tensor *t = &h->tensors[h->n];
            *t = (nbi_st_tensor){.name = name};
            NB_TRY(read_entry(r, t, offsets));
            NB_TRY(place(r, t, offsets, data, data_bytes));
            h->n++;
        } while (nbi_st_take(r, ','));
    }
    if (!nbi_st_take(r, '}')) return nbi_st_bad(r, "expected , or }");
    return nbi_st_peek(r) == 0 && r->p == r->end ? NB_OK : nbi_st_bad(r, "text behind the last }");
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
            return nbi_fail(err, NB_CORRUPT, "%s: tensors %.*s and %.*s overlap", file,
                            NBI_ST_TEXT_SHOWN, h->tensors[i - 1].name, NBI_ST_TEXT_SHOWN, t->name);
        if (t->data > at)
            return nbi_fail(err, NB_CORRUPT, "%s: hole of %llu bytes before tensor %.*s", file,
                            (unsigned long long)(t->data - at), NBI_ST_TEXT_SHOWN, t->name);
        at = t->data + t->bytes;
    }
    if (at != data + data_bytes)
        return nbi_fail(err, NB_CORRUPT, "%s: %llu bytes behind the last tensor%s%.*s", file,
                        (unsigned long long)(data + data_bytes - at), h->n ? " " : "",
                        NBI_ST_TEXT_SHOWN, h->n ? h->tensors[h->n - 1].name : "");
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
                st = nbi_fail(err, NB_CORRUPT, "%s: tensor %.*s is there twice", file,
                              NBI_ST_TEXT_SHOWN, name);
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
    nbi_st_reader r = {.begin = file + 8,
                       .p = file + 8,
                       .end = file + 8 + len,
                       .file = name,
                       .what = "header",
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
