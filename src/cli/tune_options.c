/* Where the files of `nibble tune` lie. Called by the commands that run a model. */
#include "cli/tune_options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

const char *nbi_tune_place(const char *asked)
{
    static char folder[4096];
    if (asked) return strcmp(asked, "none") == 0 ? NULL : asked;
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = 0;
    if (cache && cache[0] == '/') /* relative ones are to be ignored, as its specification says */
        n = snprintf(folder, sizeof folder, "%s/nibble/", cache);
    else if (home && home[0] == '/')
        n = snprintf(folder, sizeof folder, "%s/.cache/nibble/", home);
    return n > 0 && (size_t)n < sizeof folder ? folder : NULL;
}

nb_status nbi_tune_make_folder(const char *folder, nb_error *err)
{
    char path[4096];
    const size_t n = strlen(folder);
    if (n >= sizeof path)
        return nbi_fail(err, NB_TOO_LARGE, "the path of %.80s is too long", folder);
    for (size_t i = 1; i <= n; i++) {
        if (folder[i] != '/' && folder[i] != '\0') continue;
        memcpy(path, folder, i);
        path[i] = '\0';
        if (mkdir(path, 0700) != 0 && errno != EEXIST)
            return nbi_fail(err, NB_IO, "%s: cannot be created: %s", path, strerror(errno));
    }
    return NB_OK;
}
