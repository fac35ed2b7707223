/* --tune-file of the commands that run a model, and where `nibble tune` keeps its files. */
#pragma once

#include "cli/cli.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A row of an option table; `p` is a const char *. */
#define NBI_TUNE_OPTION_ROW(p)                                                              \
    {                                                                                       \
        "tune-file", NBI_OPT_STRING, &(p), "PATH",                                          \
            "what nibble tune has written, used with runner auto: a\nfile, a folder, none " \
            "(default: $XDG_CACHE_HOME/nibble/\nor ~/.cache/nibble/)",                      \
            false                                                                           \
    }

/* The path that `asked` means: NULL gives the default folder, with an ending '/'; "none", or no
 * home, gives NULL. Static text or `asked`; one thread. */
const char *nbi_tune_place(const char *asked);

/* Makes the default folder and what is above it. */
nb_status nbi_tune_make_folder(const char *folder, nb_error *err);

#ifdef __cplusplus
}
#endif
