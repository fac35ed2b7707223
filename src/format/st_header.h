/* One parsed safetensors header, shared by the checkpoint reader and nbi_st_parse(). Private to
 * src/format. */
#pragma once

#include <string.h>

#include "format/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Longest header accepted: the limit of the reference implementation (100 MB, some 600,000
 * tensors). */
#define NBI_ST_HEADER_MAX 100000000u

typedef struct nbi_st_header {
    nbi_st_tensor *tensors; /* [n] in offset order; names point into `names` */
    size_t n, cap;
    char *names; /* NUL-terminated, one behind the other */
} nbi_st_header;

/* Parses and checks the header of a whole file. On failure *out is untouched. */
nb_status nbi_st_header_parse(nbi_st_header *out, const uint8_t *file, size_t n_bytes,
                              const char *name, nb_error *err);
void nbi_st_header_free(nbi_st_header *header);

/* Hash of a tensor name, for the tables of this folder. */
static inline uint64_t nbi_st_hash(const char *s, size_t n)
{
    /* Eight bytes a step: names share long prefixes, a bytewise hash costs 60 multiplications each.
     */
    uint64_t h = 0x9e3779b97f4a7c15u ^ n;
    while (n >= 8) {
        uint64_t v;
        memcpy(&v, s, 8);
        h = (h ^ v) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
        s += 8;
        n -= 8;
    }
    uint64_t v = 0;
    memcpy(&v, s, n);
    h = (h ^ v) * 0xc4ceb9fe1a85ec53u;
    return h ^ (h >> 29);
}

#ifdef __cplusplus
}
#endif
