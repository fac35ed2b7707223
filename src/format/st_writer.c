/* Writer of safetensors checkpoints: declared first, then written in that order, complete or
 * absent.
 *
 * Used by synth, quantize and tests. A shard is a run of declared tensors; its header is known
 * before its first byte. Shards are written as NAME.tmp and renamed by finish(), or, in resume
 * mode, each as soon as it is complete. The index comes last, so a folder without it is unfinished.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/json.h"
#include "format/st_header.h"

#define WRITE_MAX ((size_t)64 << 20) /* bytes per write(2) */

typedef struct w_tensor {
    char *name;
    nbi_dtype dtype;
    uint32_t n_dims, shard;
    uint64_t shape[NBI_TENSOR_DIMS_MAX], bytes;
} w_tensor;

typedef struct w_shard {
    size_t begin, end; /* tensors */
    uint64_t bytes;
    char *path, *tmp;
    const char *base; /* file name within path */
    bool open, written, renamed;
} w_shard;

struct nbi_st_writer {
    char *dir;
    uint64_t shard_bytes;
    w_tensor *tensors;
    size_t n, cap, at; /* `at`: tensor whose data comes next */
    uint64_t at_bytes; /* of it, written so far */
    w_shard *shards;
    uint32_t n_shards;
    int fd;
    bool planned, keep, finished;
};

nb_status nbi_st_writer_create(nbi_st_writer **out, const char *dir, uint64_t shard_bytes,
                               nb_error *err)
{
    nbi_st_writer *w = nbi_calloc(1, sizeof *w);
    if (!w || !(w->dir = nbi_strdup(dir))) {
        nbi_free(w);
        return nbi_fail(err, NB_NO_MEMORY, "out of memory for a writer");
    }
    w->shard_bytes = shard_bytes;
    w->fd = -1;
    *out = w;
    return NB_OK;
}

nb_status nbi_st_writer_add(nbi_st_writer *w, const char *name, nbi_dtype dtype, uint32_t n_dims,
                            const uint64_t *shape, nb_error *err)
{
    NB_ASSERT(!w->planned);
    if (n_dims > NBI_TENSOR_DIMS_MAX || dtype >= NBI_DTYPE_COUNT)
        return nbi_fail(err, NB_INVALID, "tensor %s: %u dimensions, at most %u", name, n_dims,
                        NBI_TENSOR_DIMS_MAX);
    if (w->n == w->cap) {
        size_t cap = w->cap ? w->cap * 2 : 64;
        w_tensor *more = nbi_realloc(w->tensors, cap * sizeof *more);
        if (!more) return nbi_fail(err, NB_NO_MEMORY, "out of memory for %zu tensors", cap);
        w->tensors = more;
        w->cap = cap;
    }
    w_tensor t = {.dtype = dtype, .n_dims = n_dims, .bytes = nbi_dtype_bits(dtype)};
    for (uint32_t i = 0; i < n_dims; i++) {
        t.shape[i] = shape[i];
        if (__builtin_mul_overflow(t.bytes, shape[i], &t.bytes))
            return nbi_fail(err, NB_TOO_LARGE, "tensor %s is too large", name);
    }
    if (t.bytes % 8)
        return nbi_fail(err, NB_INVALID, "tensor %s is not a whole number of bytes", name);
    t.bytes /= 8;
    if (!(t.name = nbi_strdup(name)))
        return nbi_fail(err, NB_NO_MEMORY, "out of memory for a tensor name");
    w->tensors[w->n++] = t;
    return NB_OK;
}

/* ---- plan */

static nb_status name_shards(nbi_st_writer *w, nb_error *err)
{
    for (uint32_t i = 0; i < w->n_shards; i++) {
        char base[64], tmp[72];
        if (w->n_shards == 1)
            snprintf(base, sizeof base, "model.safetensors");
        else
            snprintf(base, sizeof base, "model-%05u-of-%05u.safetensors", i + 1, w->n_shards);
        snprintf(tmp, sizeof tmp, "%s.tmp", base);
        w_shard *s = &w->shards[i];
        s->path = nbi_path_join(w->dir, base);
        s->tmp = nbi_path_join(w->dir, tmp);
        if (!s->path || !s->tmp) return nbi_fail(err, NB_NO_MEMORY, "out of memory for a path");
        s->base = s->path + strlen(s->path) - strlen(base);
    }
    return NB_OK;
}

/* Cuts the tensors into shards. */
static nb_status plan(nbi_st_writer *w, nb_error *err)
{
    w->planned = true;
    uint32_t shards = 1;
    uint64_t bytes = 0;
    for (size_t i = 0; i < w->n; i++) {
        uint64_t more = w->tensors[i].bytes;
        if (w->shard_bytes && bytes && (more > w->shard_bytes || bytes > w->shard_bytes - more)) {
            shards++;
            bytes = 0;
        }
        bytes += more;
        w->tensors[i].shard = shards - 1;
    }
    if (shards > 99999) return nbi_fail(err, NB_TOO_LARGE, "%u shards, at most 99999", shards);
    if (!(w->shards = nbi_calloc(shards, sizeof *w->shards)))
        return nbi_fail(err, NB_NO_MEMORY, "out of memory for %u shards", shards);
    w->n_shards = shards;
    for (size_t i = 0; i < w->n; i++) {
        w_shard *s = &w->shards[w->tensors[i].shard];
        if (s->end == 0) s->begin = i;
        s->end = i + 1;
        s->bytes += w->tensors[i].bytes;
    }
    return name_shards(w, err);
}

/* Length, JSON, spaces up to a multiple of 64 (so that data of whole cache lines stays aligned in
 * the map). */
static nb_status make_header(const nbi_st_writer *w, const w_shard *s, nbi_buf *buf)
{
    NB_TRY(nbi_buf_add(buf, "\0\0\0\0\0\0\0\0{\"__metadata__\":{\"format\":\"pt\"}", 39));
    uint64_t offset = 0;
    for (size_t i = s->begin; i < s->end; i++) {
        const w_tensor *t = &w->tensors[i];
        NB_TRY(nbi_buf_add(buf, ",", 1));
        NB_TRY(nbi_json_quote(buf, t->name, strlen(t->name)));
        NB_TRY(nbi_buf_addf(buf, ":{\"dtype\":\"%s\",\"shape\":[", nbi_dtype_name(t->dtype)));
        for (uint32_t k = 0; k < t->n_dims; k++)
            NB_TRY(nbi_buf_addf(buf, k ? ",%llu" : "%llu", (unsigned long long)t->shape[k]));
        NB_TRY(nbi_buf_addf(buf, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)offset,
                            (unsigned long long)(offset + t->bytes)));
        offset += t->bytes;
    }
    NB_TRY(nbi_buf_add(buf, "}", 1));
    while (buf->len % 64) NB_TRY(nbi_buf_add(buf, " ", 1));
    uint64_t len = buf->len - 8;
    if (len > NBI_ST_HEADER_MAX) return NB_TOO_LARGE;
    for (int i = 0; i < 8; i++) buf->data[i] = (char)(len >> (8 * i));
    return NB_OK;
}

static nb_status header(const nbi_st_writer *w, const w_shard *s, nbi_buf *buf, nb_error *err)
{
    nb_status st = make_header(w, s, buf);
    return st == NB_OK ? NB_OK
                       : nbi_fail(err, st, "%s: header of %zu tensors: %s", s->path,
                                  s->end - s->begin, nb_status_text(st));
}

/* ---- shards on disk */

static nb_status put(nbi_st_writer *w, const w_shard *s, const void *data, uint64_t bytes,
                     nb_error *err)
{
    const char *p = data;
    while (bytes) {
        ssize_t k = write(w->fd, p, bytes < WRITE_MAX ? (size_t)bytes : WRITE_MAX);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return nbi_fail(err, NB_IO, "%s: cannot write: %s", s->tmp, strerror(errno));
        p += k;
        bytes -= (uint64_t)k;
    }
    return NB_OK;
}

static nb_status open_shard(nbi_st_writer *w, w_shard *s, nb_error *err)
{
    w->fd = open(s->tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (w->fd < 0) return nbi_fail(err, NB_IO, "%s: cannot create: %s", s->tmp, strerror(errno));
    s->open = true;
    nbi_buf buf = {0};
    nb_status st = header(w, s, &buf, err);
    if (st == NB_OK) st = put(w, s, buf.data, buf.len, err);
    nbi_buf_free(&buf);
    return st;
}

static nb_status rename_shard(w_shard *s, nb_error *err)
{
    if (s->renamed) return NB_OK;
    if (rename(s->tmp, s->path))
        return nbi_fail(err, NB_IO, "%s: cannot rename: %s", s->tmp, strerror(errno));
    s->renamed = true;
    return NB_OK;
}

static nb_status close_shard(nbi_st_writer *w, w_shard *s, nb_error *err)
{
    /* Only what a later run will trust has to be on the disk; finish() of a fresh run leaves that
     * to the system. */
    bool failed = w->keep && fsync(w->fd);
    failed |= close(w->fd) != 0;
    w->fd = -1;
    if (failed) return nbi_fail(err, NB_IO, "%s: cannot write: %s", s->tmp, strerror(errno));
    s->written = true;
    return w->keep ? rename_shard(s, err) : NB_OK;
}

/* Opens the shard of the next tensor; closes it behind its last. Also passes over tensors without
 * bytes. */
static nb_status advance(nbi_st_writer *w, nb_error *err)
{
    while (w->at < w->n) {
        w_tensor *t = &w->tensors[w->at];
        w_shard *s = &w->shards[t->shard];
        if (!s->open) NB_TRY(open_shard(w, s, err));
        if (w->at_bytes < t->bytes) return NB_OK;
        w->at++;
        w->at_bytes = 0;
        if (w->at == s->end) NB_TRY(close_shard(w, s, err));
    }
    return NB_OK;
}

static nb_status start(nbi_st_writer *w, nb_error *err)
{
    if (!w->planned) NB_TRY(plan(w, err));
    return NB_OK;
}

/* Is the finished file of this shard there, with this very header and size? */
static nb_status shard_is_there(const nbi_st_writer *w, const w_shard *s, bool *there,
                                nb_error *err)
{
    *there = false;
    if (!nbi_file_exists(s->path)) return NB_OK;
    nbi_map map;
    NB_TRY(nbi_map_open(&map, s->path, err));
    nbi_buf buf = {0};
    nb_status st = header(w, s, &buf, err);
    if (st == NB_OK)
        *there = map.bytes == buf.len + s->bytes && !memcmp(map.data, buf.data, buf.len);
    nbi_buf_free(&buf);
    nbi_map_close(&map);
    return st;
}

nb_status nbi_st_writer_resume(nbi_st_writer *w, size_t *n_done, nb_error *err)
{
    NB_TRY(start(w, err));
    w->keep = true;
    bool there = w->n > 0;
    for (uint32_t i = 0; i < w->n_shards && there; i++) {
        w_shard *s = &w->shards[i];
        NB_TRY(shard_is_there(w, s, &there, err));
        if (!there) break;
        s->open = s->written = s->renamed = true;
        w->at = s->end;
    }
    *n_done = w->at;
    return NB_OK;
}

nb_status nbi_st_writer_data(nbi_st_writer *w, const void *data, uint64_t bytes, nb_error *err)
{
    NB_TRY(start(w, err));
    const char *p = data;
    while (bytes) {
        NB_TRY(advance(w, err));
        if (w->at == w->n)
            return nbi_fail(err, NB_INVALID, "%s: more data than the declared tensors hold",
                            w->dir);
        w_tensor *t = &w->tensors[w->at];
        uint64_t left = t->bytes - w->at_bytes, k = bytes < left ? bytes : left;
        NB_TRY(put(w, &w->shards[t->shard], p, k, err));
        w->at_bytes += k;
        p += k;
        bytes -= k;
    }
    return NB_OK;
}

static nb_status write_index(const nbi_st_writer *w, nb_error *err)
{
    nbi_buf buf = {0};
    uint64_t total = 0;
    for (size_t i = 0; i < w->n; i++) total += w->tensors[i].bytes;
    nb_status st =
        nbi_buf_addf(&buf, "{\n  \"metadata\": {\"total_size\": %llu},\n  \"weight_map\": {",
                     (unsigned long long)total);
    for (size_t i = 0; i < w->n && st == NB_OK; i++) {
        st = nbi_buf_addf(&buf, i ? ",\n    " : "\n    ");
        if (st == NB_OK) st = nbi_json_quote(&buf, w->tensors[i].name, strlen(w->tensors[i].name));
        if (st == NB_OK) st = nbi_buf_addf(&buf, ": \"%s\"", w->shards[w->tensors[i].shard].base);
    }
    if (st == NB_OK) st = nbi_buf_addf(&buf, "\n  }\n}\n");
    char *path = nbi_path_join(w->dir, "model.safetensors.index.json");
    if (st != NB_OK || !path)
        st = nbi_fail(err, NB_NO_MEMORY, "%s: out of memory for the index", w->dir);
    else
        st = nbi_file_write(path, buf.data, buf.len, err);
    nbi_free(path);
    nbi_buf_free(&buf);
    return st;
}

nb_status nbi_st_writer_finish(nbi_st_writer *w, nb_error *err)
{
    NB_TRY(start(w, err));
    if (w->n == 0) return nbi_fail(err, NB_INVALID, "%s: a checkpoint without tensors", w->dir);
    NB_TRY(advance(w, err));
    if (w->at < w->n)
        return nbi_fail(err, NB_INVALID, "%s: data of tensor %s is missing (%llu of %llu bytes)",
                        w->dir, w->tensors[w->at].name, (unsigned long long)w->at_bytes,
                        (unsigned long long)w->tensors[w->at].bytes);
    for (uint32_t i = 0; i < w->n_shards; i++) NB_TRY(rename_shard(&w->shards[i], err));
    if (w->n_shards > 1) NB_TRY(write_index(w, err));
    w->finished = true;
    return NB_OK;
}

void nbi_st_writer_destroy(nbi_st_writer **writer)
{
    nbi_st_writer *w = *writer;
    if (!w) return;
    if (w->fd >= 0) close(w->fd);
    for (uint32_t i = 0; i < w->n_shards; i++) {
        w_shard *s = &w->shards[i];
        if (s->open && !s->renamed)
            unlink(s->tmp);
        else if (s->renamed && !w->finished && !w->keep)
            unlink(s->path);
        nbi_free(s->path);
        nbi_free(s->tmp);
    }
    for (size_t i = 0; i < w->n; i++) nbi_free(w->tensors[i].name);
    nbi_free(w->tensors);
    nbi_free(w->shards);
    nbi_free(w->dir);
    nbi_free(w);
    *writer = NULL;
}
