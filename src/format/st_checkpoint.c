/* A folder of safetensors: which files, index against files in both directions, one table of names.
 *
 * Used by the weight loader, inspect and quantize. Invariants: every tensor in `tensors` was
 * checked by nbi_st_header_parse(); names are unique over all files; when there is an index it
 * names exactly these tensors in exactly these files. */
#include "format/st_header.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "format/st_index.h"

#define INDEX_NAME "model.safetensors.index.json"
#define FILES_MAX  65536u
#define LISTED_MAX 4 /* file names an error repeats before "and N more" */

typedef struct st_file {
    char *name;
    nbi_map map;
    nbi_st_header header;
    bool present;
} st_file;

struct nbi_checkpoint {
    char *dir;
    st_file *files; /* [n_files], by name */
    size_t n_files;
    nbi_st_tensor *tensors; /* [n] */
    size_t n;
    uint32_t *slots; /* [mask + 1] index + 1, 0: free */
    size_t mask;
    uint64_t bytes;
};

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), k = strlen(tail);
    return n > k && !strcmp(s + n - k, tail);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const st_file *)a)->name, ((const st_file *)b)->name);
}

static int name_and_file(const void *name, const void *file)
{
    return strcmp(name, ((const st_file *)file)->name);
}

static st_file *find_file(st_file *files, size_t n, const char *name)
{
    return n ? bsearch(name, files, n, sizeof *files, name_and_file) : NULL;
}

static nb_status add_file(st_file **files, size_t *n, size_t *cap, const char *name, nb_error *err)
{
    if (*n == FILES_MAX)
        return nbi_fail(err, NB_TOO_LARGE, "more than %u safetensors files", FILES_MAX);
    if (*n == *cap) {
        size_t more = *cap ? *cap * 2 : 16;
        st_file *grown = nbi_realloc(*files, more * sizeof *grown);
        if (!grown) return nbi_fail(err, NB_NO_MEMORY, "out of memory for %zu file names", more);
        *files = grown;
        *cap = more;
    }
    char *copy = nbi_strdup(name);
    if (!copy) return nbi_fail(err, NB_NO_MEMORY, "out of memory for a file name");
    (*files)[(*n)++] = (st_file){.name = copy};
    return NB_OK;
}

static void free_files(st_file *files, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        nbi_map_close(&files[i].map);
        nbi_st_header_free(&files[i].header);
        nbi_free(files[i].name);
    }
    nbi_free(files);
}

/* All *.safetensors of the folder, by name. */
static nb_status list_files(st_file **files, size_t *n, const char *dir, nb_error *err)
{
    DIR *d = opendir(dir);
    if (!d)
        return nbi_fail(err, errno == ENOENT ? NB_NOT_FOUND : NB_IO,
                        "%s: cannot open the folder: %s", dir, strerror(errno));
    size_t cap = 0;
    nb_status st = NB_OK;
    for (struct dirent *e; st == NB_OK && (e = readdir(d));)
        if (e->d_name[0] != '.' && ends_with(e->d_name, ".safetensors"))
            st = add_file(files, n, &cap, e->d_name, err);
    closedir(d);
    if (st == NB_OK && *n) qsort(*files, *n, sizeof **files, by_name);
    return st;
}

/* "a, b, c and 5 more" of the files whose `present` is `which`. */
static void name_some(nbi_buf *buf, const st_file *files, size_t n, bool which)
{
    size_t shown = 0, total = 0;
    for (size_t i = 0; i < n; i++) total += files[i].present == which;
    for (size_t i = 0; i < n && shown < LISTED_MAX; i++)
        if (files[i].present == which &&
            nbi_buf_addf(buf, "%s%.60s", shown++ ? ", " : "", files[i].name) != NB_OK)
            return;
    if (total > shown && nbi_buf_addf(buf, " and %zu more", total - shown) != NB_OK) return;
}

/* ---- with an index */

static int name_and_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The distinct files of the index, by name. */
static nb_status indexed_files(st_file **files, size_t *n, const nbi_st_index *index, nb_error *err)
{
    size_t n_names = 0, cap = 0;
    const char **names = nbi_malloc(index->n * sizeof *names); /* one per run of entries */
    if (!names) return nbi_fail(err, NB_NO_MEMORY, "out of memory for file names");
    for (size_t i = 0; i < index->n; i++)
        if (!i || index->entries[i].file != index->entries[i - 1].file)
            names[n_names++] = index->entries[i].file;
    qsort(names, n_names, sizeof *names, name_and_name);
    nb_status st = NB_OK;
    for (size_t i = 0; i < n_names && st == NB_OK; i++)
        if (!i || strcmp(names[i], names[i - 1])) st = add_file(files, n, &cap, names[i], err);
    nbi_free(names);
    return st;
}

/* A file of the folder that the index does not list is a stale shard when it is named like one;
 * another (an adapter, a consolidated copy) is only mentioned. */
static bool named_like_shard(const char *name)
{
    return !strncmp(name, "model", 5);
}

/* Marks listed files that are there. Refuses absent ones (C13) and shards that nobody lists (C15).
 */
static nb_status compare_with_folder(st_file *listed, size_t n_listed, st_file *found,
                                     size_t n_found, const char *dir, nb_error *err)
{
    size_t absent = n_listed, unlisted = 0;
    for (size_t i = 0; i < n_found; i++) {
        st_file *f = find_file(listed, n_listed, found[i].name);
        if (f) {
            f->present = true;
            absent--;
        }
        found[i].present = f != NULL || !named_like_shard(found[i].name);
        unlisted += !found[i].present;
    }
    if (!absent && !unlisted) {
        for (size_t i = 0; i < n_found; i++)
            if (!find_file(listed, n_listed, found[i].name))
                nbi_log(NB_LOG_WARN, "%s/%s is not in " INDEX_NAME " and is not read", dir,
                        found[i].name);
        return NB_OK;
    }
    nbi_buf missing = {0}, extra = {0};
    name_some(&missing, listed, n_listed, false);
    name_some(&extra, found, n_found, false);
    nb_status st =
        nbi_fail(err, absent ? NB_NOT_FOUND : NB_CORRUPT, "%s/" INDEX_NAME ": %s%s%s%s%s", dir,
                 absent ? "listed but not in the folder: " : "", absent ? missing.data : "",
                 absent && unlisted ? "; " : "", unlisted ? "in the folder but not listed: " : "",
                 unlisted ? extra.data : "");
    nbi_buf_free(&missing);
    nbi_buf_free(&extra);
    return st;
}

static nbi_st_tensor *lookup(const nbi_checkpoint *c, const char *name)
{
    size_t at = nbi_st_hash(name, strlen(name)) & c->mask;
    for (; c->slots[at]; at = (at + 1) & c->mask) {
        nbi_st_tensor *t = &c->tensors[c->slots[at] - 1];
        if (!strcmp(t->name, name)) return t;
    }
    return NULL;
}

/* The index against the tensors, after all files are read. `used` marks the listed ones meanwhile.
 */
static nb_status check_index(nbi_checkpoint *c, const nbi_st_index *index, const char *path,
                             nb_error *err)
{
    for (size_t i = 0; i < index->n; i++) {
        const nbi_st_entry *e = &index->entries[i];
        nbi_st_tensor *t = lookup(c, e->tensor);
        if (!t)
            return nbi_fail(err, NB_CORRUPT, "%s: tensor %.120s is listed in %s but is not there",
                            path, e->tensor, e->file);
        if (strcmp(e->file, c->files[t->file].name))
            return nbi_fail(err, NB_CORRUPT, "%s: tensor %.120s is listed in %s but is in %s", path,
                            e->tensor, e->file, c->files[t->file].name);
        if (t->used)
            return nbi_fail(err, NB_CORRUPT, "%s: tensor %.120s is listed twice", path, e->tensor);
        t->used = true;
    }
    for (size_t i = 0; i < c->n; i++) {
        if (!c->tensors[i].used)
            return nbi_fail(err, NB_CORRUPT, "%s: tensor %.120s of %s is not listed", path,
                            c->tensors[i].name, c->files[c->tensors[i].file].name);
        c->tensors[i].used = false;
    }
    return NB_OK;
}

/* ---- files to tensors */

static nb_status read_files(nbi_checkpoint *c, nb_error *err)
{
    for (size_t i = 0; i < c->n_files; i++) {
        st_file *f = &c->files[i];
        char *path = nbi_path_join(c->dir, f->name);
        if (!path) return nbi_fail(err, NB_NO_MEMORY, "out of memory for a path");
        nb_status st = nbi_map_open(&f->map, path, err);
        if (st == NB_OK) st = nbi_st_header_parse(&f->header, f->map.data, f->map.bytes, path, err);
        nbi_free(path);
        NB_TRY(st);
        c->n += f->header.n;
    }
    if (c->n > UINT32_MAX / 4) return nbi_fail(err, NB_TOO_LARGE, "%s: %zu tensors", c->dir, c->n);
    c->tensors = nbi_malloc((c->n + 1) * sizeof *c->tensors);
    if (!c->tensors)
        return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory for %zu tensors", c->dir, c->n);
    size_t at = 0;
    for (size_t i = 0; i < c->n_files; i++) {
        nbi_st_header *h = &c->files[i].header;
        for (size_t k = 0; k < h->n; k++) {
            c->tensors[at] = h->tensors[k];
            c->tensors[at].file = (uint32_t)i;
            c->bytes += h->tensors[k].bytes;
            at++;
        }
        nbi_free(h->tensors);
        h->tensors = NULL;
    }
    return NB_OK;
}

static nb_status build_table(nbi_checkpoint *c, nb_error *err)
{
    size_t size = 16;
    while (size < c->n * 2) size *= 2;
    c->slots = nbi_calloc(size, sizeof *c->slots);
    if (!c->slots)
        return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory for %zu tensor names", c->dir, c->n);
    c->mask = size - 1;
    for (size_t i = 0; i < c->n; i++) {
        const char *name = c->tensors[i].name;
        size_t at = nbi_st_hash(name, strlen(name)) & c->mask;
        for (; c->slots[at]; at = (at + 1) & c->mask) {
            const nbi_st_tensor *other = &c->tensors[c->slots[at] - 1];
            if (!strcmp(other->name, name))
                return nbi_fail(err, NB_CORRUPT, "%s: tensor %.120s is in %s and in %s", c->dir,
                                name, c->files[other->file].name,
                                c->files[c->tensors[i].file].name);
        }
        c->slots[at] = (uint32_t)i + 1;
    }
    return NB_OK;
}

static nb_status open_indexed(nbi_checkpoint *c, const char *path, st_file *found, size_t n_found,
                              nb_error *err)
{
    nbi_st_index index = {0};
    NB_TRY(nbi_st_index_load(&index, path, err));
    nb_status st = indexed_files(&c->files, &c->n_files, &index, err);
    if (st == NB_OK) st = compare_with_folder(c->files, c->n_files, found, n_found, c->dir, err);
    if (st == NB_OK) st = read_files(c, err);
    if (st == NB_OK) st = build_table(c, err);
    if (st == NB_OK) st = check_index(c, &index, path, err);
    nbi_st_index_free(&index);
    return st;
}

/* Without an index: model.safetensors, or the only file there is. */
static nb_status open_single(nbi_checkpoint *c, st_file *found, size_t n_found, nb_error *err)
{
    if (!n_found)
        return nbi_fail(err, NB_NOT_FOUND, "%s: no safetensors file in the folder", c->dir);
    const char *name = n_found == 1 || !find_file(found, n_found, "model.safetensors")
                           ? found[0].name
                           : "model.safetensors";
    size_t others = 0;
    for (size_t i = 0; i < n_found; i++) {
        if (!strcmp(found[i].name, name)) continue;
        if (named_like_shard(found[i].name) || strcmp(name, "model.safetensors"))
            others++;
        else
            nbi_log(NB_LOG_WARN, "%s/%s is beside model.safetensors and is not read", c->dir,
                    found[i].name);
    }
    if (others)
        return nbi_fail(err, NB_NOT_FOUND, "%s: %zu safetensors files but no " INDEX_NAME, c->dir,
                        n_found);
    if (strstr(name, "-of-") && !strstr(name, "00001-of-00001"))
        return nbi_fail(err, NB_NOT_FOUND,
                        "%s: %s is one shard of several and there is no " INDEX_NAME, c->dir, name);
    size_t cap = 0;
    NB_TRY(add_file(&c->files, &c->n_files, &cap, name, err));
    NB_TRY(read_files(c, err));
    return build_table(c, err);
}

nb_status nbi_checkpoint_open(nbi_checkpoint **out, const char *dir, nb_error *err)
{
    st_file *found = NULL;
    size_t n_found = 0;
    char *index = nbi_path_join(dir, INDEX_NAME);
    nbi_checkpoint *c = nbi_calloc(1, sizeof *c);
    nb_status st = NB_OK;
    if (!index || !c || !(c->dir = nbi_strdup(dir)))
        st = nbi_fail(err, NB_NO_MEMORY, "out of memory");
    if (st == NB_OK) st = list_files(&found, &n_found, dir, err);
    if (st == NB_OK)
        st = nbi_file_exists(index) ? open_indexed(c, index, found, n_found, err)
                                    : open_single(c, found, n_found, err);
    free_files(found, n_found);
    nbi_free(index);
    if (st == NB_OK)
        *out = c;
    else
        nbi_checkpoint_close(&c);
    return st;
}

void nbi_checkpoint_close(nbi_checkpoint **checkpoint)
{
    nbi_checkpoint *c = *checkpoint;
    if (!c) return;
    free_files(c->files, c->n_files);
    nbi_free(c->tensors);
    nbi_free(c->slots);
    nbi_free(c->dir);
    nbi_free(c);
    *checkpoint = NULL;
}

size_t nbi_checkpoint_count(const nbi_checkpoint *checkpoint)
{
    return checkpoint->n;
}

const nbi_st_tensor *nbi_checkpoint_at(const nbi_checkpoint *checkpoint, size_t i)
{
    NB_ASSERT(i < checkpoint->n);
    return &checkpoint->tensors[i];
}

size_t nbi_checkpoint_index(const nbi_checkpoint *checkpoint, const nbi_st_tensor *tensor)
{
    NB_ASSERT(tensor >= checkpoint->tensors && tensor < checkpoint->tensors + checkpoint->n);
    return (size_t)(tensor - checkpoint->tensors);
}

size_t nbi_checkpoint_unused(const nbi_checkpoint *checkpoint, size_t from)
{
    while (from < checkpoint->n && checkpoint->tensors[from].used) from++;
    return from;
}

size_t nbi_checkpoint_files(const nbi_checkpoint *checkpoint)
{
    return checkpoint->n_files;
}

uint64_t nbi_checkpoint_offset(const nbi_checkpoint *checkpoint, const nbi_st_tensor *tensor)
{
    NB_ASSERT(tensor->file < checkpoint->n_files);
    return (uint64_t)(tensor->data - checkpoint->files[tensor->file].map.data);
}

const char *nbi_checkpoint_file(const nbi_checkpoint *checkpoint, uint32_t file)
{
    NB_ASSERT(file < checkpoint->n_files);
    return checkpoint->files[file].name;
}

const char *nbi_checkpoint_dir(const nbi_checkpoint *checkpoint)
{
    return checkpoint->dir;
}

uint64_t nbi_checkpoint_bytes(const nbi_checkpoint *checkpoint)
{
    return checkpoint->bytes;
}

const nbi_st_tensor *nbi_checkpoint_find(nbi_checkpoint *checkpoint, const char *name)
{
    nbi_st_tensor *t = lookup(checkpoint, name);
    if (t) t->used = true;
    return t;
}

const nbi_st_tensor *nbi_checkpoint_peek(const nbi_checkpoint *checkpoint, const char *name)
{
    return lookup(checkpoint, name);
}
