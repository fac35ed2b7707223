/* API keys (see auth.h). Called by http.c and server.c. */
#include "server/auth.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"

#define FILE_BYTES_MAX ((size_t)4 << 20)

typedef union key {
    char bytes[NBI_KEY_BYTES_MAX]; /* filled up with zeros */
    uint64_t words[NBI_KEY_BYTES_MAX / 8];
} key;

typedef struct key_list {
    key *items; /* [n] */
    size_t n;
} key_list;

struct nbi_keys {
    const char *file;
    pthread_rwlock_t lock; /* guards from_file */
    key_list fixed, from_file;
};

/* ---------------------------------------------------------------- reading */

static void list_free(key_list *list)
{
    if (list->items) explicit_bzero(list->items, list->n * sizeof *list->items);
    nbi_free(list->items);
    *list = (key_list){0};
}

/* `room` keys fit; `where` names the key in errors. */
static nb_status list_add(key_list *list, size_t room, const char *text, size_t n,
                          const char *where, nb_error *err)
{
    if (n == 0) return nbi_fail(err, NB_INVALID, "%s: the key is empty", where);
    if (n > NBI_KEY_BYTES_MAX) {
        return nbi_fail(err, NB_INVALID, "%s: the key has %zu bytes, at most %d", where, n,
                        NBI_KEY_BYTES_MAX);
    }
    for (size_t i = 0; i < n; i++) {
        if (text[i] > ' ' && text[i] < 127) continue;
        return nbi_fail(err, NB_INVALID,
                        "%s: byte %zu of the key is 0x%02x, expected printable ASCII without "
                        "blanks",
                        where, i + 1, (unsigned)(unsigned char)text[i]);
    }
    if (list->n >= room) return nbi_fail(err, NB_INVALID, "%s: more than %zu keys", where, room);
    memcpy(list->items[list->n++].bytes, text, n);
    return NB_OK;
}

static nb_status list_init(key_list *list, size_t room, nb_error *err)
{
    list->items = nbi_calloc(room ? room : 1, sizeof *list->items);
    return list->items ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "no memory for API keys");
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

static nb_status read_lines(key_list *list, size_t room, const char *text, size_t n,
                            const char *path, nb_error *err)
{
    size_t line = 0;
    for (size_t i = 0; i < n;) {
        const char *nl = memchr(text + i, '\n', n - i);
        size_t begin = i, end = nl ? (size_t)(nl - text) : n;
        char where[NB_ERROR_TEXT_MAX / 2];
        line++;
        i = end + 1;
        while (begin < end && is_blank(text[begin])) begin++;
        while (end > begin && is_blank(text[end - 1])) end--;
        if (begin == end || text[begin] == '#') continue;
        snprintf(where, sizeof where, "--api-key-file %s, line %zu", path, line);
        NB_TRY(list_add(list, room, text + begin, end - begin, where, err));
    }
    if (list->n == 0) return nbi_fail(err, NB_INVALID, "--api-key-file %s has no keys", path);
    return NB_OK;
}

static size_t count_lines(const char *text, size_t n)
{
    size_t lines = 1;
    for (size_t i = 0; i < n; i++) lines += text[i] == '\n';
    return lines < NBI_KEYS_MAX ? lines : NBI_KEYS_MAX;
}

static nb_status read_file(key_list *out, const char *path, nb_error *err)
{
    char *text = NULL;
    size_t n = 0;
    key_list list = {0};
    nb_status status = nbi_file_read(&text, &n, path, FILE_BYTES_MAX, err);
    if (status != NB_OK) return nbi_fail_prefix(err, status, "--api-key-file");
    size_t room = count_lines(text, n);
    status = list_init(&list, room, err);
    if (status == NB_OK) status = read_lines(&list, room, text, n, path, err);
    explicit_bzero(text, n);
    nbi_free(text);
    if (status != NB_OK) {
        list_free(&list);
        return status;
    }
    *out = list;
    return NB_OK;
}

static nb_status read_fixed(key_list *list, const char *const *fixed, size_t n, nb_error *err)
{
    if (n > NBI_KEYS_MAX) return nbi_fail(err, NB_INVALID, "--api-key: more than %d", NBI_KEYS_MAX);
    NB_TRY(list_init(list, n, err));
    for (size_t i = 0; i < n; i++) {
        NB_TRY(list_add(list, n, fixed[i], strlen(fixed[i]), "--api-key", err));
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- life */

nb_status nbi_keys_open(nbi_keys **out, const char *const *fixed, size_t n_fixed, const char *file,
                        nb_error *err)
{
    nbi_keys *keys = nbi_calloc(1, sizeof *keys);
    if (!keys || pthread_rwlock_init(&keys->lock, NULL) != 0) {
        nbi_free(keys);
        return nbi_fail(err, NB_NO_MEMORY, "no memory for API keys");
    }
    keys->file = file;
    nb_status status = read_fixed(&keys->fixed, fixed, n_fixed, err);
    if (status == NB_OK && file) status = read_file(&keys->from_file, file, err);
    if (status != NB_OK) {
        nbi_keys_close(&keys);
        return status;
    }
    *out = keys;
    return NB_OK;
}

nb_status nbi_keys_reload(nbi_keys *keys, nb_error *err)
{
    key_list list = {0};
    if (!keys->file) return NB_OK;
    NB_TRY(read_file(&list, keys->file, err));
    pthread_rwlock_wrlock(&keys->lock);
    key_list old = keys->from_file;
    keys->from_file = list;
    pthread_rwlock_unlock(&keys->lock);
    list_free(&old);
    return NB_OK;
}

const char *nbi_keys_file(const nbi_keys *keys)
{
    return keys->file;
}

void nbi_keys_close(nbi_keys **out)
{
    nbi_keys *keys = *out;
    if (!keys) return;
    list_free(&keys->fixed);
    list_free(&keys->from_file);
    pthread_rwlock_destroy(&keys->lock);
    nbi_free(keys);
    *out = NULL;
}

/* ---------------------------------------------------------------- asking */

size_t nbi_keys_count(nbi_keys *keys)
{
    pthread_rwlock_rdlock(&keys->lock);
    size_t n = keys->fixed.n + keys->from_file.n;
    pthread_rwlock_unlock(&keys->lock);
    return n;
}

static unsigned equals(const key *a, const key *b)
{
    uint64_t difference = 0;
    for (size_t i = 0; i < NBI_KEY_BYTES_MAX / 8; i++) difference |= a->words[i] ^ b->words[i];
    volatile uint64_t all = difference; /* the loop has no end before its end */
    return all == 0;
}

/* No branch depends on a key. */
static unsigned any_equals(const key_list *list, const key *given)
{
    unsigned found = 0;
    for (size_t i = 0; i < list->n; i++) found |= equals(&list->items[i], given);
    return found;
}

bool nbi_keys_match(nbi_keys *keys, const char *given)
{
    key padded = {0};
    size_t n = strlen(given);
    if (n == 0 || n > NBI_KEY_BYTES_MAX) return false;
    memcpy(padded.bytes, given, n);
    pthread_rwlock_rdlock(&keys->lock);
    unsigned found = any_equals(&keys->fixed, &padded) | any_equals(&keys->from_file, &padded);
    pthread_rwlock_unlock(&keys->lock);
    return found != 0;
}
