/* Free list of KV pages. */
#include "engine/kvpool.h"

nb_status nbi_kvpool_init(nbi_kvpool *pool, uint32_t n_pages, nb_error *err)
{
    pool->free_pages = nbi_malloc(n_pages * sizeof *pool->free_pages);
    if (!pool->free_pages)
        return nbi_fail(err, NB_NO_MEMORY, "KV pool: no memory for the list of %u pages", n_pages);
    pool->n_pages = pool->n_free = n_pages;
    for (uint32_t i = 0; i < n_pages; i++)
        pool->free_pages[i] = (int32_t)(n_pages - 1 - i); /* page 0 goes first */
    return NB_OK;
}

void nbi_kvpool_deinit(nbi_kvpool *pool)
{
    nbi_free(pool->free_pages);
    *pool = (nbi_kvpool){0};
}

int32_t nbi_kvpool_take(nbi_kvpool *pool)
{
    return pool->n_free ? pool->free_pages[--pool->n_free] : -1;
}

void nbi_kvpool_give(nbi_kvpool *pool, int32_t page)
{
    NB_ASSERT(page >= 0 && (uint32_t)page < pool->n_pages && pool->n_free < pool->n_pages);
    pool->free_pages[pool->n_free++] = page;
}
