/* Reads mapped weights as fast as plain loads go. The floor of a token is its bytes over this rate.
 */
#include "perf/bandwidth.h"

#include <dirent.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"

#define PIECE ((size_t)1 << 20) /* bytes a thread reads at a time */

struct nbi_bandwidth {
    nbi_pool *pool;
    nbi_map *maps; /* [n_maps] */
    size_t n_maps, cap;
    uint64_t n_pieces, at; /* whole pieces over all maps; where the next pass begins */
    uint64_t pass_begin;
    void *own; /* of nbi_bandwidth_open_memory(); maps[0] is its view */
    size_t own_bytes;
    _Atomic uint64_t sum; /* keeps the loads */
};

static bool is_shard(const char *name)
{
    static const char ending[] = ".safetensors";
    const size_t n = strlen(name), m = sizeof ending - 1;
    return n > m && strcmp(name + n - m, ending) == 0;
}

static nb_status add_map(nbi_bandwidth *b, const char *dir, const char *name, nb_error *err)
{
    if (b->n_maps == b->cap) {
        const size_t cap = b->cap ? 2 * b->cap : 16;
        nbi_map *maps = nbi_realloc(b->maps, cap * sizeof *maps);
        if (!maps) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", dir);
        b->maps = maps;
        b->cap = cap;
    }
    char *path = nbi_path_join(dir, name);
    if (!path) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", dir);
    const nb_status st = nbi_map_open(&b->maps[b->n_maps], path, err);
    nbi_free(path);
    if (st != NB_OK) return st;
    b->n_pieces += b->maps[b->n_maps++].bytes / PIECE;
    return NB_OK;
}

static nb_status map_all(nbi_bandwidth *b, const char *dir, nb_error *err)
{
    DIR *d = opendir(dir);
    if (!d) return nbi_fail(err, NB_IO, "%s: cannot be read as a folder", dir);
    nb_status st = NB_OK;
    for (struct dirent *e; st == NB_OK && (e = readdir(d));)
        if (is_shard(e->d_name)) st = add_map(b, dir, e->d_name, err);
    closedir(d);
    if (st == NB_OK && b->n_pieces == 0)
        st = nbi_fail(err, NB_NOT_FOUND, "%s: no safetensors of a megabyte or more", dir);
    return st;
}

static const uint8_t *piece_at(const nbi_bandwidth *b, uint64_t i)
{
    for (size_t m = 0; m < b->n_maps; m++) {
        const uint64_t here = b->maps[m].bytes / PIECE;
        if (i < here) return b->maps[m].data + i * PIECE;
        i -= here;
    }
    return b->maps[0].data;
}

#if defined(__x86_64__) && defined(__GNUC__)
/* Built for the baseline and for the two wider vectors; the loader picks one. */
#ifndef __SANITIZE_THREAD__ /* its runtime is not up yet when the resolver of the clones runs */
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
static uint64_t
read_piece(const uint8_t *p)
{
    typedef uint64_t line __attribute__((vector_size(64), aligned(1), may_alias));
    line a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i < PIECE; i += 256) {
        /* Four kilobytes ahead was the best distance of 512 .. 8192 on an Emerald Rapids core. */
        for (size_t k = 0; k < 256; k += 64) __builtin_prefetch(p + i + k + 4096);
        a ^= *(const line *)(const void *)(p + i);
        b ^= *(const line *)(const void *)(p + i + 64);
        c ^= *(const line *)(const void *)(p + i + 128);
        d ^= *(const line *)(const void *)(p + i + 192);
    }
    a ^= b ^ c ^ d;
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

static void read_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    nbi_bandwidth *b = arg;
    uint64_t sum = 0;
    for (uint32_t i = begin; i < end; i++)
        sum ^= read_piece(piece_at(b, (b->pass_begin + i) % b->n_pieces));
    b->sum ^= sum;
}

nb_status nbi_bandwidth_open(nbi_bandwidth **out, const char *dir, uint32_t n_threads,
                             uint64_t max_bytes, nb_error *err)
{
    nb_status st;
    nbi_bandwidth *b = nbi_calloc(1, sizeof *b);
    if (!b) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", dir);
    NB_TRY_OR(st, nbi_pool_create(&b->pool, n_threads, err), fail);
    NB_TRY_OR(st, map_all(b, dir, err), fail);
    const uint64_t most = max_bytes > PIECE ? max_bytes / PIECE : 1;
    if (!max_bytes) nbi_bandwidth_pass(b, b->n_pieces * PIECE);
    if (max_bytes && most < b->n_pieces) b->n_pieces = most;
    *out = b;
    return NB_OK;
fail:
    nbi_bandwidth_close(&b);
    return st;
}

static void write_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    nbi_bandwidth *b = arg;
    memset((uint8_t *)b->own + begin * PIECE, 1, (end - begin) * PIECE);
}

nb_status nbi_bandwidth_open_memory(nbi_bandwidth **out, uint64_t bytes, uint32_t n_threads,
                                    nb_error *err)
{
    nb_status st;
    nbi_bandwidth *b = nbi_calloc(1, sizeof *b);
    if (!b) return nbi_fail(err, NB_NO_MEMORY, "out of memory");
    NB_TRY_OR(st, nbi_pool_create(&b->pool, n_threads, err), fail);
    b->n_pieces = bytes / PIECE;
    if (b->n_pieces == 0 || b->n_pieces > UINT32_MAX) {
        st = nbi_fail(err, NB_INVALID, "%llu bytes: expected 1 MiB to 4 PiB",
                      (unsigned long long)bytes);
        goto fail;
    }
    b->own_bytes = (size_t)b->n_pieces * PIECE;
    b->own = nbi_pages_alloc(b->own_bytes);
    b->maps = nbi_calloc(1, sizeof *b->maps);
    if (!b->own || !b->maps) {
        st = nbi_fail(err, NB_NO_MEMORY, "out of memory");
        goto fail;
    }
    nbi_pool_run(b->pool, write_task, b, (uint32_t)b->n_pieces, 4);
    b->maps[0] = (nbi_map){.data = b->own, .bytes = b->own_bytes};
    b->n_maps = 1;
    nbi_bandwidth_pass(b, b->own_bytes);
    *out = b;
    return NB_OK;
fail:
    nbi_bandwidth_close(&b);
    return st;
}

void nbi_bandwidth_close(nbi_bandwidth **b)
{
    if (!*b) return;
    for (size_t i = 0; !(*b)->own && i < (*b)->n_maps; i++) nbi_map_close(&(*b)->maps[i]);
    nbi_pages_free((*b)->own, (*b)->own_bytes);
    nbi_free((*b)->maps);
    nbi_pool_destroy(&(*b)->pool);
    nbi_free(*b);
    *b = NULL;
}

uint32_t nbi_bandwidth_threads(const nbi_bandwidth *b)
{
    return nbi_pool_threads(b->pool);
}

double nbi_bandwidth_pass(nbi_bandwidth *b, uint64_t bytes)
{
    uint64_t n = bytes / PIECE;
    if (n == 0) n = 1;
    if (n > b->n_pieces) n = b->n_pieces;
    if (n > UINT32_MAX) n = UINT32_MAX;
    b->pass_begin = b->at;
    const uint64_t start = nbi_now_ns();
    nbi_pool_run(b->pool, read_task, b, (uint32_t)n, 4);
    const uint64_t ns = nbi_now_ns() - start;
    b->at = (b->at + n) % b->n_pieces;
    return (double)(n * PIECE) / ((double)(ns ? ns : 1) * 1e-9);
}
