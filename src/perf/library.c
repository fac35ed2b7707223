/* dlopen() and dlsym(). */
#include "perf/library.h"

#include <dlfcn.h>
#include <string.h>

nb_status nbi_library_load(void *table, const nbi_symbol *symbols, const char *file, nb_error *err)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!library) return nbi_fail(err, NB_UNSUPPORTED, "%s", dlerror());
    for (const nbi_symbol *s = symbols; s->name; s++) {
        void *symbol = dlsym(library, s->name);
        if (!symbol && !s->optional)
            return nbi_fail(err, NB_UNSUPPORTED, "%s has no %s", file, s->name);
        memcpy((char *)table + s->offset, &symbol, sizeof symbol);
    }
    return NB_OK;
}
