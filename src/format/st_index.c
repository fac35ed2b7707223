/* Reader of the shard index. Called by st_checkpoint.c. */
#include "format/st_index.h"

#include <string.h>

#include "base/file.h"
#include "format/st_reader.h"

#define INDEX_BYTES_MAX ((size_t)256 << 20)

static bool is_plain_file(const char *name)
{
    size_t n = strlen(name), k = strlen(".safetensors");
    return n > k && !strcmp(name + n - k, ".safetensors") && !strchr(name, '/') && name[0] != '.';
}

static nb_status add_entry(nbi_st_index *x, const char *tensor, const char *file, nb_error *err)
{
    if (x->n == x->cap) {
        size_t cap = x->cap ? x->cap * 2 : 256;
        nbi_st_entry *more = nbi_realloc(x->entries, cap * sizeof *more);
        if (!more)
            return nbi_fail(err, NB_NO_MEMORY, "out of memory for an index of %zu tensors", cap);
        x->entries = more;
        x->cap = cap;
    }
    x->entries[x->n++] = (nbi_st_entry){tensor, file};
    return NB_OK;
}

/* {"tensor": "file", ...} */
static nb_status read_map(nbi_st_reader *r, nbi_st_index *x)
{
    const char *last = "";
    if (!nbi_st_take(r, '{')) return nbi_st_bad(r, "weight_map is not an object");
    if (nbi_st_peek(r) != '}') {
        do {
            const char *tensor, *file;
            NB_TRY(nbi_st_string(r, &tensor));
            if (!nbi_st_take(r, ':')) return nbi_st_bad(r, "expected :");
            if (nbi_st_peek(r) != '"')
                return nbi_fail(r->err, NB_CORRUPT, "%s: weight_map[\"%.*s\"] is not a file name",
                                r->file, NBI_ST_TEXT_SHOWN, tensor);
            size_t used = r->used;
            NB_TRY(nbi_st_string(r, &file));
            if (!strcmp(file,
                        last)) { /* entries of one file come in runs: one copy of the name does */
                r->used = used;
                file = last;
            } else if (!is_plain_file(file)) {
                return nbi_fail(r->err, NB_CORRUPT,
                                "%s: weight_map[\"%.*s\"] is \"%.80s\", expected a safetensors "
                                "file in the same folder",
                                r->file, NBI_ST_TEXT_SHOWN, tensor, file);
            }
            last = file;
            NB_TRY(add_entry(x, tensor, file, r->err));
        } while (nbi_st_take(r, ','));
    }
    return nbi_st_take(r, '}') ? NB_OK : nbi_st_bad(r, "expected , or }");
}

static nb_status read_index(nbi_st_reader *r, nbi_st_index *x)
{
    bool found = false;
    if (!nbi_st_take(r, '{')) return nbi_st_bad(r, "expected {");
    if (nbi_st_peek(r) != '}') {
        do {
            const char *key;
            NB_TRY(nbi_st_string(r, &key));
            if (!nbi_st_take(r, ':')) return nbi_st_bad(r, "expected :");
            bool map = !strcmp(key, "weight_map");
            if (map && found) return nbi_st_bad(r, "weight_map is there twice");
            found |= map;
            NB_TRY(map ? read_map(r, x) : nbi_st_skip(r));
        } while (nbi_st_take(r, ','));
    }
    if (!nbi_st_take(r, '}')) return nbi_st_bad(r, "expected , or }");
    if (nbi_st_peek(r) || r->p != r->end) return nbi_st_bad(r, "text behind the last }");
    if (!x->n)
        return nbi_fail(r->err, NB_CORRUPT, "%s: weight_map is %s", r->file,
                        found ? "empty" : "missing");
    return NB_OK;
}

nb_status nbi_st_index_parse(nbi_st_index *out, const char *text, size_t n, const char *path,
                             nb_error *err)
{
    const uint8_t *begin = (const uint8_t *)text;
    nbi_st_index x = {.pool = nbi_malloc(n + 1)};
    if (!x.pool) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", path);
    nbi_st_reader r = {.begin = begin,
                       .p = begin,
                       .end = begin + n,
                       .file = path,
                       .what = "index",
                       .pool = x.pool,
                       .err = err};
    nb_status st = read_index(&r, &x);
    if (st == NB_OK)
        *out = x;
    else
        nbi_st_index_free(&x);
    return st;
}

nb_status nbi_st_index_load(nbi_st_index *out, const char *path, nb_error *err)
{
    char *text = NULL;
    size_t n = 0;
    NB_TRY(nbi_file_read(&text, &n, path, INDEX_BYTES_MAX, err));
    nb_status st = nbi_st_index_parse(out, text, n, path, err);
    nbi_free(text);
    return st;
}

void nbi_st_index_free(nbi_st_index *index)
{
    nbi_free(index->entries);
    nbi_free(index->pool);
    *index = (nbi_st_index){0};
}
