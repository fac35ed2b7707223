/* Reading below a root. Nothing here trusts a file: it may be a pipe, a loop of links, bytes. */
#include "perf/doctor_read.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TEXT_MAX  65536u
#define NAMES_MAX 4096u

void nbi_reader_free(nbi_reader *r)
{
    nbi_arena_free(&r->arena);
    *r = (nbi_reader){.root = r->root};
}

static void *take(nbi_reader *r, size_t bytes)
{
    void *p = nbi_arena_alloc(&r->arena, bytes);
    if (!p) r->no_memory = true;
    return p;
}

const char *nbi_reader_text(nbi_reader *r, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    const int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    char *text = n < 0 ? NULL : take(r, (size_t)n + 1);
    if (!text) return "";
    va_start(args, fmt);
    vsnprintf(text, (size_t)n + 1, fmt, args);
    va_end(args);
    return text;
}

void nbi_reader_unseen(nbi_reader *r, const char *what, const char *reason)
{
    for (const nbi_unseen *u = r->unseen; u; u = u->next)
        if (!strcmp(u->what, what)) return;
    nbi_unseen *u = take(r, sizeof *u);
    if (!u) return;
    u->what = nbi_reader_text(r, "%s", what);
    u->reason = nbi_reader_text(r, "%s", reason);
    if (r->last_unseen)
        r->last_unseen->next = u;
    else
        r->unseen = u;
    r->last_unseen = u;
}

/* "root/path" in out[PATH_MAX]; the path alone begins at *at. False when it is too long. */
static bool full_path(const nbi_reader *r, char out[PATH_MAX], const char **at, const char *fmt,
                      va_list args)
{
    const size_t n = strlen(r->root);
    if (n >= PATH_MAX) return false;
    memcpy(out, r->root, n);
    const int m = vsnprintf(out + n, PATH_MAX - n, fmt, args);
    *at = out + n;
    return m >= 0 && (size_t)m < PATH_MAX - n;
}

#define FULL_PATH(r, path, at, fmt, ok)               \
    do {                                              \
        va_list args_;                                \
        va_start(args_, fmt);                         \
        (ok) = full_path(r, path, &(at), fmt, args_); \
        va_end(args_);                                \
    } while (0)

/* Printable ASCII stays, white space and NULs at the end go. */
static void clean(char *text, size_t *n)
{
    for (size_t i = 0; i < *n; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (c == '\t') text[i] = ' ';
        if ((c < 0x20 && c != '\t' && c != '\n') || c >= 0x7f) text[i] = c ? '?' : '\n';
    }
    while (*n && (text[*n - 1] == '\n' || text[*n - 1] == ' ')) --*n;
    text[*n] = 0;
}

/* A regular file's first `max` bytes and a NUL, from nbi_malloc; NULL. */
static char *slurp(nbi_reader *r, const char *path, const char *shown, size_t max, size_t *n)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) {
        if (errno == EACCES || errno == EPERM) nbi_reader_unseen(r, shown, strerror(errno));
        return NULL;
    }
    struct stat st;
    char *text = NULL;
    ssize_t got = -1;
    *n = 0;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        text = nbi_malloc(max + 1);
        if (!text) r->no_memory = true;
    }
    if (text) {
        while (*n < max && (got = read(fd, text + *n, max - *n)) > 0) *n += (size_t)got;
        if (got < 0 && (errno == EACCES || errno == EPERM))
            nbi_reader_unseen(r, shown, strerror(errno));
        text[*n] = 0;
    }
    close(fd);
    if (got >= 0 || *n) return text;
    nbi_free(text);
    return NULL;
}

static const char *read_path(nbi_reader *r, const char *path, const char *shown)
{
    size_t n;
    char *text = slurp(r, path, shown, TEXT_MAX, &n);
    if (!text) return NULL;
    clean(text, &n);
    const char *kept = nbi_arena_strndup(&r->arena, text, n);
    if (!kept) r->no_memory = true;
    nbi_free(text);
    return kept;
}

const char *nbi_read_text(nbi_reader *r, const char *fmt, ...)
{
    char path[PATH_MAX];
    const char *at;
    bool ok;
    FULL_PATH(r, path, at, fmt, ok);
    return ok ? read_path(r, path, at) : NULL;
}

static int64_t number(const char *text)
{
    char *end;
    if (!text || !*text) return NBI_UNKNOWN;
    errno = 0;
    const long long v = strtoll(text, &end, text[0] == '0' && text[1] == 'x' ? 16 : 10);
    return end == text || errno ? NBI_UNKNOWN : v;
}

int64_t nbi_read_number(nbi_reader *r, const char *fmt, ...)
{
    char path[PATH_MAX];
    const char *at;
    bool ok;
    FULL_PATH(r, path, at, fmt, ok);
    return ok ? number(read_path(r, path, at)) : NBI_UNKNOWN;
}

const uint8_t *nbi_read_bytes(nbi_reader *r, size_t max, size_t *n, const char *fmt, ...)
{
    char path[PATH_MAX];
    const char *at;
    bool ok;
    FULL_PATH(r, path, at, fmt, ok);
    char *bytes = ok ? slurp(r, path, at, max, n) : NULL;
    uint8_t *kept = bytes ? take(r, *n + 1) : NULL;
    if (kept) memcpy(kept, bytes, *n + 1);
    nbi_free(bytes);
    return kept;
}

int64_t nbi_read_size(nbi_reader *r, const char *fmt, ...)
{
    char path[PATH_MAX];
    const char *at;
    struct stat st;
    bool ok;
    FULL_PATH(r, path, at, fmt, ok);
    return ok && stat(path, &st) == 0 && S_ISREG(st.st_mode) ? (int64_t)st.st_size : NBI_UNKNOWN;
}

const char *nbi_read_link(nbi_reader *r, const char *fmt, ...)
{
    char path[PATH_MAX], target[PATH_MAX];
    const char *at;
    bool ok;
    FULL_PATH(r, path, at, fmt, ok);
    const ssize_t n = ok ? readlink(path, target, sizeof target - 1) : -1;
    if (n <= 0) return NULL;
    target[n] = 0;
    size_t length = (size_t)n;
    clean(target, &length);
    return nbi_reader_text(r, "%s", target);
}

bool nbi_read_exists(nbi_reader *r, const char *fmt, ...)
{
    char path[PATH_MAX];
    const char *at;
    struct stat st;
    bool ok;
    FULL_PATH(r, path, at, fmt, ok);
    return ok && stat(path, &st) == 0;
}

/* By numbers where both names have one at the same place. */
static int by_number(const void *a, const void *b)
{
    return strverscmp(*(const char *const *)a, *(const char *const *)b);
}

nbi_names nbi_read_names(nbi_reader *r, const char *fmt, ...)
{
    char path[PATH_MAX];
    const char *at;
    nbi_names names = {0};
    bool ok;
    FULL_PATH(r, path, at, fmt, ok);
    DIR *dir = ok ? opendir(path) : NULL;
    if (!dir && ok && (errno == EACCES || errno == EPERM))
        nbi_reader_unseen(r, at, strerror(errno));
    if (!dir) return names;
    names.items = take(r, NAMES_MAX * sizeof *names.items);
    for (struct dirent *e; names.items && names.n < NAMES_MAX && (e = readdir(dir));) {
        if (e->d_name[0] == '.') continue;
        size_t n = strlen(e->d_name);
        clean(e->d_name, &n);
        names.items[names.n++] = nbi_reader_text(r, "%s", e->d_name);
    }
    closedir(dir);
    if (names.n) qsort(names.items, names.n, sizeof *names.items, by_number);
    return names;
}

/* ---------------------------------------------------------------- pieces of text */

const char *nbi_last_part(const char *path)
{
    const char *slash = path ? strrchr(path, '/') : NULL;
    return slash ? slash + 1 : path;
}

/* Behind the key at the start of a line, and the white space and colon that follow it; NULL. */
static const char *behind(const char *text, const char *key)
{
    const size_t n = strlen(key);
    for (const char *line = text; line && *line;) {
        if (!strncmp(line, key, n) && strchr(" :", line[n])) {
            line += n;
            while (*line == ' ' || *line == ':') line++;
            return line;
        }
        line += strcspn(line, "\n");
        if (*line) line++;
    }
    return NULL;
}

int64_t nbi_line_number(const char *text, const char *key)
{
    return number(behind(text, key));
}

const char *nbi_line_text(nbi_reader *r, const char *text, const char *key)
{
    const char *at = behind(text, key);
    return at ? nbi_reader_text(r, "%.*s", (int)strcspn(at, "\n"), at) : NULL;
}

bool nbi_has_word(const char *text, const char *word)
{
    const size_t n = strlen(word);
    for (const char *at = text; at && (at = strstr(at, word)); at += n) {
        const bool begins = at == text || strchr(" ,\n", at[-1]);
        if (begins && strchr(" ,\n", at[n])) return true; /* the NUL too */
    }
    return false;
}

const char *nbi_chosen_word(nbi_reader *r, const char *text)
{
    const char *open = text ? strchr(text, '[') : NULL;
    const size_t n = open ? strcspn(open + 1, "]") : 0;
    return open ? nbi_reader_text(r, "%.*s", (int)n, open + 1) : text;
}

void nbi_set_parse(nbi_set *out, const char *text)
{
    *out = (nbi_set){.text = text};
    for (const char *at = text; at && *at;) {
        char *end;
        const unsigned long first = strtoul(at, &end, 10);
        unsigned long last = first;
        const bool number = end != at;
        if (number && *end == '-') {
            at = end + 1;
            last = strtoul(at, &end, 10);
            if (end == at) last = first;
        }
        for (unsigned long i = first; number && i <= last && i < NBI_SET_MAX; i++) {
            out->n += !nbi_set_has(out, (uint32_t)i);
            out->bits[i / 64] |= 1ull << i % 64;
        }
        at = end + strcspn(end, ",");
        if (*at) at++;
    }
}

bool nbi_set_has(const nbi_set *s, uint32_t i)
{
    return i < NBI_SET_MAX && s->bits[i / 64] >> i % 64 & 1;
}

uint32_t nbi_set_common(const nbi_set *a, const nbi_set *b)
{
    uint32_t n = 0;
    for (size_t i = 0; i < NBI_SET_MAX / 64; i++)
        n += (uint32_t)__builtin_popcountll(a->bits[i] & b->bits[i]);
    return n;
}
