/* model.safetensors.index.json: which tensor is in which file. Private to src/format. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_st_entry {
    const char *tensor, *file;
} nbi_st_entry;

typedef struct nbi_st_index {
    nbi_st_entry *entries; /* [n] in the file's order */
    size_t n, cap;
    char *pool; /* what the entries point into */
} nbi_st_index;

/* Reads weight_map; file names are checked to be safetensors in the same folder. NB_CORRUPT names
 * path and tensor. */
nb_status nbi_st_index_load(nbi_st_index *out, const char *path, nb_error *err);
/* The same from memory (fuzzed). */
nb_status nbi_st_index_parse(nbi_st_index *out, const char *text, size_t n, const char *path,
                             nb_error *err);
void nbi_st_index_free(nbi_st_index *index);

#ifdef __cplusplus
}
#endif
