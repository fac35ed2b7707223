/* Names and sizes of element types, from the one list in dtype.h. */
#include "base/dtype.h"

#include <string.h>

static const struct {
    const char *name;
    uint32_t bits;
} dtypes[NBI_DTYPE_COUNT] = {
#define X(suffix, name, bits) {name, bits},
    NBI_DTYPE_LIST(X)
#undef X
};

const char *nbi_dtype_name(nbi_dtype dtype)
{
    return (unsigned)dtype < NBI_DTYPE_COUNT ? dtypes[dtype].name : "unknown";
}

uint32_t nbi_dtype_bits(nbi_dtype dtype)
{
    return (unsigned)dtype < NBI_DTYPE_COUNT ? dtypes[dtype].bits : 0;
}

nbi_dtype nbi_dtype_parse(const char *name, size_t n)
{
    for (unsigned i = 0; i < NBI_DTYPE_COUNT; i++) {
        if (strlen(dtypes[i].name) == n && memcmp(dtypes[i].name, name, n) == 0) {
            return (nbi_dtype)i;
        }
    }
    return NBI_DTYPE_COUNT;
}
