/* Output folders that are complete or absent. Called by synth and quantize. */
#include "model/outdir.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Is it a folder without entries? A path that is no folder is not. */
static bool is_empty_folder(const char *path)
{
    DIR *d = opendir(path);
    if (!d) return false;
    bool empty = true;
    for (struct dirent *e; empty && (e = readdir(d));)
        empty = !strcmp(e->d_name, ".") || !strcmp(e->d_name, "..");
    closedir(d);
    return empty;
}

/* mkdir -p */
static nb_status make_folders(char *path, nb_error *err)
{
    for (char *p = path + 1;; p++) {
        if (*p && *p != '/') continue;
        char c = *p;
        *p = 0;
        int failed = mkdir(path, 0777) && errno != EEXIST ? errno : 0;
        *p = c;
        if (failed)
            return nbi_fail(err, NB_IO, "%s: cannot create the folder: %s", path, strerror(failed));
        if (!c) break;
    }
    struct stat st;
    if (stat(path, &st) || !S_ISDIR(st.st_mode))
        return nbi_fail(err, NB_IO, "%s: is not a folder", path);
    return NB_OK;
}

nb_status nbi_outdir_open(nbi_outdir *out, const char *dir, nb_error *err)
{
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/') n--;
    if (n == 0) return nbi_fail(err, NB_INVALID, "the output folder has no name");
    nbi_outdir o = {.final = nbi_strndup(dir, n), .partial = nbi_malloc(n + sizeof ".partial")};
    nb_status st = NB_OK;
    struct stat info;
    if (!o.final || !o.partial) {
        st = nbi_fail(err, NB_NO_MEMORY, "out of memory for a path");
    } else if (lstat(o.final, &info) == 0 && !is_empty_folder(o.final)) {
        st = nbi_fail(err, NB_INVALID, "%s: already exists; the output folder must be new or empty",
                      o.final);
    } else {
        memcpy(o.partial, dir, n);
        memcpy(o.partial + n, ".partial", sizeof ".partial");
        st = make_folders(o.partial, err);
    }
    if (st == NB_OK)
        *out = o;
    else
        nbi_outdir_close(&o);
    return st;
}

nb_status nbi_outdir_commit(nbi_outdir *out, nb_error *err)
{
    if (rename(out->partial, out->final)) /* also replaces an empty folder */
        return nbi_fail(err, NB_IO, "%s: cannot rename to %s: %s", out->partial, out->final,
                        strerror(errno));
    return NB_OK;
}

void nbi_outdir_discard(nbi_outdir *out)
{
    DIR *d = opendir(out->partial);
    if (!d) return;
    for (struct dirent *e; (e = readdir(d));) {
        char *path = nbi_path_join(out->partial, e->d_name);
        if (path) unlink(path); /* fails on "." and "..", as it should */
        nbi_free(path);
    }
    closedir(d);
    rmdir(out->partial);
}

void nbi_outdir_close(nbi_outdir *out)
{
    nbi_free(out->final);
    nbi_free(out->partial);
    *out = (nbi_outdir){0};
}
