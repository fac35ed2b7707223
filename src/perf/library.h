/* Libraries that are opened when a command needs them: neither the server nor libnibble.so depends
 * on them, and a machine without one is told so. Callers: the audit. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A function pointer of a table, and the symbol that belongs into it. */
typedef struct nbi_symbol {
    const char *name;
    size_t offset;
    bool optional; /* stays NULL where the library has none of that name */
} nbi_symbol;

/* Opens `file` for the rest of the process and fills `table`, whose symbols end with a row of
 * zeros. NB_UNSUPPORTED names the file or the symbol that is missing. */
nb_status nbi_library_load(void *table, const nbi_symbol *symbols, const char *file, nb_error *err);

#ifdef __cplusplus
}
#endif
