/* Fuzz target: safetensors headers and shard indexes. The input is taken as a file; as a header (up
 * to the first NUL) with data behind it; and as an index. What is accepted must lie inside of the
 * input, without overlaps and holes. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "format/safetensors.h"
#include "format/st_index.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct seen {
    const uint8_t *at, *end;
    unsigned sum;
} seen;

static nb_status check(void *user, const nbi_st_tensor *t, nb_error *err)
{
    seen *s = user;
    uint64_t bits = nbi_dtype_bits(t->dtype);
    (void)err;
    for (uint32_t i = 0; i < t->n_dims; i++) bits *= t->shape[i];
    NB_ASSERT(t->n_dims <= NBI_TENSOR_DIMS_MAX && bits == t->bytes * 8);
    NB_ASSERT(s->at == NULL || t->data == s->at);
    NB_ASSERT(t->data <= s->end && t->bytes <= (uint64_t)(s->end - t->data) && strlen(t->name) > 0);
    for (uint64_t i = 0; i < t->bytes; i += 61) s->sum += t->data[i];
    s->at = t->data + t->bytes;
    return NB_OK;
}

static void as_file(const uint8_t *data, size_t size)
{
    nb_error err = {0};
    seen s = {.end = data + size};
    nb_status st = nbi_st_parse(data, size, "input", check, &s, &err);
    NB_ASSERT(st == NB_OK || err.text[0]);
    NB_ASSERT(st != NB_OK || s.at == NULL || s.at == data + size);
}

static void as_header(const uint8_t *data, size_t size)
{
    const uint8_t *nul = memchr(data, 0, size);
    size_t n = nul ? (size_t)(nul - data) : size, rest = nul ? size - n - 1 : 0;
    uint8_t *file = malloc(8 + n + rest);
    NB_ASSERT(file);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)n >> (8 * i));
    memcpy(file + 8, data, n);
    if (rest) memcpy(file + 8 + n, nul + 1, rest);
    as_file(file, 8 + n + rest);
    free(file);
}

static void as_index(const uint8_t *data, size_t size)
{
    nb_error err = {0};
    nbi_st_index index;
    nb_status st = nbi_st_index_parse(&index, (const char *)data, size, "input", &err);
    NB_ASSERT(st == NB_OK || err.text[0]);
    if (st != NB_OK) return;
    NB_ASSERT(index.n > 0);
    for (size_t i = 0; i < index.n; i++)
        NB_ASSERT(!strchr(index.entries[i].file, '/') && strlen(index.entries[i].tensor) <= size);
    nbi_st_index_free(&index);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    as_file(data, size);
    if (size == 0) return 0;
    as_header(data, size);
    as_index(data, size);
    return 0;
}
