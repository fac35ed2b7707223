/* NCCL at run time (nccl_api.h). Callers: backend/cuda. */
#include "backend/nccl_api.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libnccl.so.2"

static const struct entry {
    const char *name;
    size_t offset;
} entries[] = {
    {"ncclGetVersion", offsetof(nbi_nccl, get_version)},
    {"ncclGetUniqueId", offsetof(nbi_nccl, get_unique_id)},
    {"ncclCommInitRank", offsetof(nbi_nccl, comm_init_rank)},
    {"ncclCommDestroy", offsetof(nbi_nccl, comm_destroy)},
    {"ncclCommAbort", offsetof(nbi_nccl, comm_abort)},
    {"ncclCommGetAsyncError", offsetof(nbi_nccl, comm_get_async_error)},
    {"ncclGetErrorString", offsetof(nbi_nccl, get_error_string)},
    {"ncclGetLastError", offsetof(nbi_nccl, get_last_error)},
    {"ncclAllReduce", offsetof(nbi_nccl, all_reduce)},
    {"ncclAllGather", offsetof(nbi_nccl, all_gather)},
    {"ncclSend", offsetof(nbi_nccl, send)},
    {"ncclRecv", offsetof(nbi_nccl, recv)},
    {"ncclGroupStart", offsetof(nbi_nccl, group_start)},
    {"ncclGroupEnd", offsetof(nbi_nccl, group_end)},
};

static nb_status find_all(nbi_nccl *table, void *library, const char *file, nb_error *err)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        void *symbol = dlsym(library, entries[i].name);
        if (!symbol)
            return nbi_fail(err, NB_UNSUPPORTED, "%s has no %s; NCCL 2.18 or later is needed", file,
                            entries[i].name);
        memcpy((char *)table + entries[i].offset, &symbol, sizeof symbol);
    }
    int version = 0;
    if (table->get_version(&version) != NBI_NCCL_SUCCESS) version = 0;
    snprintf(table->version, sizeof table->version, "%d.%d.%d", version / 10000,
             version / 100 % 100, version % 100);
    if (version >= NBI_NCCL_OLDEST) return NB_OK;
    return nbi_fail(err, NB_UNSUPPORTED, "%s is NCCL %s; 2.18 or later is needed", file,
                    table->version);
}

nb_status nbi_nccl_load(const nbi_nccl **out, const char *file, nb_error *err)
{
    static nbi_nccl table;
    nbi_nccl found = {0};
    const char *name = file ? file : LIBRARY;
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    setenv("NCCL_RUNTIME_CONNECT", "0", 0);
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "NCCL is not there: install it (libnccl2, or nvidia-nccl-cu13 with its "
                        "folder in LD_LIBRARY_PATH): %s",
                        dlerror());
    const nb_status st = find_all(&found, library, name, err);
    if (st != NB_OK) {
        dlclose(library);
        return st;
    }
    table = found;
    *out = &table;
    return NB_OK;
}

size_t nbi_exchange_nccl_from(const nbi_exchange_times *t)
{
    size_t from = SIZE_MAX;
    for (uint32_t i = NBI_EXCHANGE_SIZES; i-- > 0;) {
        if (t->nccl_us[i] >= 0.95f * t->one_shot_us[i]) break;
        from = t->values[i];
    }
    return from;
}

void nbi_exchange_describe(const nbi_exchange_times *t, char *text, size_t bytes)
{
    size_t at = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < NBI_EXCHANGE_SIZES && at < bytes; i++) {
        const double a = (double)t->one_shot_us[i], b = (double)t->nccl_us[i];
        const size_t kb = t->values[i] * sizeof(float) / 1024;
        const char *comma = i ? ", " : "";
        const int n =
            a > 0 && b > 0
                ? snprintf(text + at, bytes - at, "%s%zu KB %.1f and %.1f us", comma, kb, a, b)
                : snprintf(text + at, bytes - at, "%s%zu KB %.1f us", comma, kb, a + b);
        if (n < 0) break;
        at += (size_t)n;
    }
}
