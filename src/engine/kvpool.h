/* Pages of the KV cache: which are free. Used by the engine's step only, so without a lock. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_kvpool {
    int32_t *free_pages; /* [n_free], a stack */
    uint32_t n_free, n_pages;
} nbi_kvpool;

nb_status nbi_kvpool_init(nbi_kvpool *pool, uint32_t n_pages, nb_error *err);
void nbi_kvpool_deinit(nbi_kvpool *pool);

/* -1 when none is free. */
int32_t nbi_kvpool_take(nbi_kvpool *pool);
void nbi_kvpool_give(nbi_kvpool *pool, int32_t page);

#ifdef __cplusplus
}
#endif
