/* Files: read-only maps, whole small files, atomic writes. Errors name the path. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A file mapped read-only. `data` is NULL for an empty file. A file that is cut while mapped is the
 * operator's fault (SIGBUS); nibble never writes to a map. */
typedef struct nbi_map {
    const uint8_t *data;
    size_t bytes;
} nbi_map;

nb_status nbi_map_open(nbi_map *out, const char *path, nb_error *err);
void nbi_map_close(nbi_map *map);

/* Whole file, NUL appended; NB_TOO_LARGE above max_bytes. *text from nbi_malloc. */
nb_status nbi_file_read(char **text, size_t *n_bytes, const char *path, size_t max_bytes,
                        nb_error *err);

bool nbi_file_exists(const char *path);

/* Writes to path + ".tmp", syncs, renames: complete or absent. */
nb_status nbi_file_write(const char *path, const void *data, size_t bytes, nb_error *err);

/* "dir/name" from nbi_malloc; NULL when out of memory. */
char *nbi_path_join(const char *dir, const char *name);

/* Bytes of memory this process may still take: the smaller of the machine's and its cgroup's; 0
 * when unknown. */
uint64_t nbi_memory_available(void);

#ifdef __cplusplus
}
#endif
