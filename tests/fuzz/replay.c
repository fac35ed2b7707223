/* Runs a fuzz target over files and folders named on the command line: the corpus as a plain test,
 * with any compiler. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned n_run;

static bool run_file(const char *path)
{
    char *text;
    size_t n;
    nb_error err;
    if (nbi_file_read(&text, &n, path, (size_t)64 << 20, &err) != NB_OK) {
        fprintf(stderr, "%s\n", err.text);
        return false;
    }
    /* An exact copy: a read beyond the input must be seen. */
    uint8_t *copy = malloc(n ? n : 1);
    if (!copy) abort();
    memcpy(copy, text, n);
    nbi_free(text);
    LLVMFuzzerTestOneInput(copy, n);
    free(copy);
    n_run++;
    return true;
}

static bool run_path(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir) return run_file(path);
    bool ok = true;
    for (const struct dirent *entry; ok && (entry = readdir(dir));) {
        if (entry->d_name[0] == '.') continue;
        char *file = nbi_path_join(path, entry->d_name);
        ok = file && run_file(file);
        nbi_free(file);
    }
    closedir(dir);
    return ok;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (!run_path(argv[i])) return 1;
    }
    printf("%u inputs\n", n_run);
    return n_run ? 0 : 1;
}
