/* dlopen() of libcurl. */
#include "perf/curl_api.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

/* All names since curl 7.16; the program's options need no newer ones. */
static const struct entry {
    const char *name;
    size_t offset;
} entries[] = {
#define ENTRY(name)                             \
    {                                           \
        "curl_" #name, offsetof(nbi_curl, name) \
    }
    ENTRY(global_init),      ENTRY(version_info),        ENTRY(easy_init),
    ENTRY(easy_cleanup),     ENTRY(easy_setopt),         ENTRY(easy_getinfo),
    ENTRY(easy_strerror),    ENTRY(slist_append),        ENTRY(slist_free_all),
    ENTRY(multi_init),       ENTRY(multi_cleanup),       ENTRY(multi_setopt),
    ENTRY(multi_add_handle), ENTRY(multi_remove_handle), ENTRY(multi_socket_action),
    ENTRY(multi_info_read),
#undef ENTRY
};

nb_status nbi_curl_load(const nbi_curl **out, nb_error *err)
{
    static nbi_curl table;
    static bool loaded;
    if (loaded) {
        *out = &table;
        return NB_OK;
    }
    void *library = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "libcurl.so.4 is needed for this command: install libcurl4 (%s)",
                        dlerror());
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        void *symbol = dlsym(library, entries[i].name);
        if (!symbol)
            return nbi_fail(err, NB_UNSUPPORTED, "libcurl.so.4 has no %s; version 7.16 is needed",
                            entries[i].name);
        memcpy((char *)&table + entries[i].offset, &symbol, sizeof symbol);
    }
    if (table.global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
        return nbi_fail(err, NB_UNSUPPORTED, "libcurl does not start");
    loaded = true;
    *out = &table;
    return NB_OK;
}
