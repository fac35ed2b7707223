/* Output folders that are complete or absent: written beside their place as NAME.partial, renamed
 * at the end. */
#pragma once

#include "base/file.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_outdir {
    char *final, *partial; /* without a trailing slash */
} nbi_outdir;

/* Refuses a `dir` that exists and is not an empty folder. Creates NAME.partial (parents too); one
 * that is already there is kept as it is. */
nb_status nbi_outdir_open(nbi_outdir *out, const char *dir, nb_error *err);
/* NAME.partial becomes NAME. */
nb_status nbi_outdir_commit(nbi_outdir *out, nb_error *err);
/* Removes the files in NAME.partial and the folder (no subfolders are made by nibble). */
void nbi_outdir_discard(nbi_outdir *out);
/* Frees; keeps what is on the disk. Accepts a zeroed one. */
void nbi_outdir_close(nbi_outdir *out);

#ifdef __cplusplus
}
#endif
