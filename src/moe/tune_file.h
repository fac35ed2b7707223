/* What `nibble tune` has measured, as a file. Callers: model (reads), `nibble tune` (writes).
 *
 * A JSON object: "format" "nibble tune", "version", the key, "numerics", "buckets": [{"rows",
 * "runner", "us": {runner: microseconds}}]. docs/formats/tune.md. */
#pragma once

#include "moe/table.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_TUNE_VERSION 1u

/* What times hold for. */
typedef struct nbi_tune_key {
    const char *build;  /* nbi_build_id() */
    const char *device; /* nbi_backend.description */
    const char *driver; /* nbi_backend.driver */
    uint32_t sm;
    nbi_moe_shape shape;
} nbi_tune_key;

nbi_tune_key nbi_tune_key_of(const nbi_backend *b, const nbi_moe_shape *shape);

/* The file that `path` means, from nbi_malloc: itself, or when it is a folder or ends with '/' the
 * one in it whose name is made of device and shape. NULL when out of memory. */
char *nbi_tune_path(const char *path, const nbi_tune_key *key);

/* Writes it whole or not at all. `times` are [n_times] for the table's buckets as they were
 * measured, before nbi_moe_table_join(). */
nb_status nbi_tune_write(const char *file, const nbi_tune_key *key, const nbi_moe_table *table,
                         const nbi_moe_times *times, uint32_t n_times, nb_error *err);

/* The table, joined. NB_NOT_FOUND: there is no file. NB_UNSUPPORTED: it is of another version,
 * build, device, driver or shape. NB_CORRUPT: it is damaged, or names runners that are unknown,
 * cannot run this or would give other bits. The sentence says which; *out is untouched then. */
nb_status nbi_tune_read(nbi_moe_table *out, const char *file, const nbi_tune_key *key,
                        const nbi_backend *b, nb_error *err);

#ifdef __cplusplus
}
#endif
