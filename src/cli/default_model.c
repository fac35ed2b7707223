/* The embedded model's folder. Called by serve, chat and the other commands that run a model. */
#include "cli/default_model.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"

#define NAME "models/glm5-tiny"

#ifndef NBI_DATA_DIR
#define NBI_DATA_DIR "/usr/local/share/nibble"
#endif

/* dir/between/models/glm5-tiny when a model is there, else NULL. */
static char *try_folder(const char *dir, const char *between)
{
    nbi_buf path = {0};
    nb_status status = nbi_buf_addf(&path, "%s%s/%s", dir, between, NAME);
    size_t n = path.len;
    if (status == NB_OK) status = nbi_buf_addf(&path, "/config.json");
    if (status != NB_OK || !nbi_file_exists(path.data)) {
        nbi_buf_free(&path);
        return NULL;
    }
    path.data[n] = '\0';
    return path.data;
}

nb_status nbi_default_model(char **out, nb_error *err)
{
    /* Beside the program; build/PRESET/nibble; PREFIX/bin/nibble. */
    static const char *const between[] = {"", "/..", "/../..", "/../share/nibble"};
    char dir[4096];
    char *found = NULL;
    ssize_t n = readlink("/proc/self/exe", dir, sizeof dir - 1);
    if (n > 0) {
        dir[n] = '\0';
        char *slash = strrchr(dir, '/');
        if (slash) *slash = '\0';
        for (size_t i = 0; i < sizeof between / sizeof *between && !found; i++) {
            found = try_folder(dir, between[i]);
        }
    }
    if (!found) found = try_folder(NBI_DATA_DIR, "");
    if (!found) {
        return nbi_fail(err, NB_NOT_FOUND,
                        "the embedded model (%s) is not installed, name a model with --model DIR",
                        NAME);
    }
    *out = found;
    return NB_OK;
}
