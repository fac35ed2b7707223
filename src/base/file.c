/* Files. Called by loaders, servers and tools. Errors name the path and what the system said. */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cgroup.h"

/* The system's sentence for errno; the status follows from it. */
static nb_status fail_errno(nb_error *err, const char *path, const char *what)
{
    int code = errno;
    char text[128];
    nb_status status = code == ENOENT ? NB_NOT_FOUND : code == ENOMEM ? NB_NO_MEMORY : NB_IO;
    return nbi_fail(err, status, "%s: %s: %s", path, what, strerror_r(code, text, sizeof text));
}

/* Opens a regular file. O_NONBLOCK: a pipe in its place must not hang us. */
static nb_status open_regular(int *out, size_t *bytes, const char *path, nb_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return fail_errno(err, path, "cannot open");
    struct stat st;
    nb_status status = NB_OK;
    if (fstat(fd, &st) != 0) {
        status = fail_errno(err, path, "cannot stat");
    } else if (!S_ISREG(st.st_mode)) {
        status = nbi_fail(err, NB_INVALID, "%s: is %s, expected a regular file", path,
                          S_ISDIR(st.st_mode) ? "a folder" : "no file");
    } else if ((uintmax_t)st.st_size > SIZE_MAX) {
        status = nbi_fail(err, NB_TOO_LARGE, "%s: too large for the address space", path);
    }
    if (status != NB_OK) {
        close(fd);
        return status;
    }
    *out = fd;
    *bytes = (size_t)st.st_size;
    return NB_OK;
}

nb_status nbi_map_open(nbi_map *out, const char *path, nb_error *err)
{
    int fd;
    size_t bytes;
    NB_TRY(open_regular(&fd, &bytes, path, err));
    void *data = NULL;
    if (bytes > 0) {
        data = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED) {
            nb_status status = fail_errno(err, path, "cannot map");
            close(fd);
            return status;
        }
    }
    close(fd);
    out->data = data;
    out->bytes = bytes;
    return NB_OK;
}

void nbi_map_close(nbi_map *map)
{
    if (map->data) munmap((void *)(uintptr_t)map->data, map->bytes);
    map->data = NULL;
    map->bytes = 0;
}

/* Reads to the end: the size that stat gives may be 0 (proc files) or change. One byte more than
 * allowed is asked for, to tell "exactly the maximum" from "more". */
static nb_status read_all(nbi_buf *buf, int fd, size_t hint, const char *path, size_t max_bytes,
                          nb_error *err)
{
    size_t chunk = hint + 1;
    for (;;) {
        size_t room = max_bytes - buf->len + 1;
        nb_status st = nbi_buf_reserve(buf, chunk < room ? chunk : room);
        if (st != NB_OK) return nbi_fail(err, st, "%s: %s", path, nb_status_text(st));
        ssize_t n = read(fd, buf->data + buf->len, chunk < room ? chunk : room);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fail_errno(err, path, "cannot read");
        if (n == 0) return NB_OK;
        buf->len += (size_t)n;
        buf->data[buf->len] = '\0';
        if (buf->len > max_bytes) {
            return nbi_fail(err, NB_TOO_LARGE, "%s: larger than the limit of %zu bytes", path,
                            max_bytes);
        }
        chunk = 65536;
    }
}

nb_status nbi_file_read(char **text, size_t *n_bytes, const char *path, size_t max_bytes,
                        nb_error *err)
{
    int fd;
    size_t bytes;
    if (max_bytes > SIZE_MAX / 2) max_bytes = SIZE_MAX / 2;
    NB_TRY(open_regular(&fd, &bytes, path, err));
    nb_status st;
    nbi_buf buf = {.max = max_bytes + 1};
    if (bytes > max_bytes) {
        st = nbi_fail(err, NB_TOO_LARGE, "%s: %zu bytes, larger than the limit of %zu bytes", path,
                      bytes, max_bytes);
    } else {
        st = read_all(&buf, fd, bytes, path, max_bytes, err);
    }
    close(fd);
    if (st != NB_OK) {
        nbi_buf_free(&buf);
        return st;
    }
    *text = buf.data;
    if (n_bytes) *n_bytes = buf.len;
    return NB_OK;
}

bool nbi_file_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

static nb_status write_all(int fd, const char *data, size_t bytes, const char *path, nb_error *err)
{
    while (bytes > 0) {
        ssize_t n = write(fd, data, bytes < SSIZE_MAX ? bytes : SSIZE_MAX);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fail_errno(err, path, "cannot write");
        data += n;
        bytes -= (size_t)n;
    }
    if (fsync(fd) != 0) return fail_errno(err, path, "cannot sync");
    return NB_OK;
}

/* The new name is in the folder, not in the file: the folder is synced too. Best effort: some file
 * systems refuse. */
static void sync_folder(const char *path)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) : 0;
    if (n >= sizeof folder) return;
    memcpy(folder, path, n);
    folder[n] = '\0';
    int fd = open(n ? folder : slash ? "/" : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    (void)fsync(fd);
    close(fd);
}

nb_status nbi_file_write(const char *path, const void *data, size_t bytes, nb_error *err)
{
    char tmp[PATH_MAX];
    int n = snprintf(tmp, sizeof tmp, "%s.tmp", path);
    if (n < 0 || (size_t)n >= sizeof tmp) {
        return nbi_fail(err, NB_INVALID, "%s: path too long", path);
    }
    int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) return fail_errno(err, tmp, "cannot create");
    nb_status st = write_all(fd, data, bytes, tmp, err);
    if (close(fd) != 0 && st == NB_OK) st = fail_errno(err, tmp, "cannot close");
    if (st == NB_OK && rename(tmp, path) != 0) st = fail_errno(err, path, "cannot rename to");
    if (st != NB_OK) {
        unlink(tmp);
        return st;
    }
    sync_folder(path);
    return NB_OK;
}

char *nbi_path_join(const char *dir, const char *name)
{
    size_t n_dir = strlen(dir), n_name = strlen(name);
    bool slash = n_dir > 0 && dir[n_dir - 1] != '/';
    char *path = nbi_malloc(n_dir + slash + n_name + 1);
    if (!path) return NULL;
    memcpy(path, dir, n_dir);
    if (slash) path[n_dir] = '/';
    memcpy(path + n_dir + slash, name, n_name + 1);
    return path;
}

uint64_t nbi_memory_available(void)
{
    return nbi_memory_available_under("");
}
