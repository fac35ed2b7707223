/* A request's KV pages: private ones from the pool, full ones shared through the prefix tree.
 *
 * Invariant: pages[0 .. n_shared) are nodes of the tree that this request holds a reference to, in
 * order from the root; pages[n_shared .. n_pages) are its own. Called by the step only. The beams
 * of a search share their pages through the tree also where nothing is to be cached there; then it
 * is emptied of what they leave. */
#include "engine/engine.h"

uint32_t nbi_kv_pages_free(const nb_engine *e)
{
    return e->pool.n_free + e->prefix.n_cached;
}

int32_t nbi_kv_pages_take(nb_engine *e)
{
    int32_t page = nbi_kvpool_take(&e->pool);
    return page >= 0 ? page : nbi_prefix_evict(&e->prefix);
}

/* Whole pages of the prompt that may come from the tree: the last token is always computed, its
 * logits are wanted; with prompt log-probabilities every token's are. */
static uint32_t shareable_pages(const nb_engine *e, const nb_request *r)
{
    bool all_logits = r->sampling.prompt_logprobs && r->n_reported < r->n_prompt;
    if ((e->options.disable_prefix_cache && !r->beams) || all_logits) return 0;
    return (r->n_tokens - 1) / NBI_PAGE_TOKENS;
}

/* Blocks are whole pages, so a page is of one form. */
static uint32_t expanded_pages(const nb_request *r)
{
    return r->n_expanded / NBI_PAGE_TOKENS;
}

uint32_t nbi_request_peek_prefix(nb_engine *e, nb_request *r)
{
    return nbi_prefix_peek(&e->prefix, &r->peeked, r->tokens, shareable_pages(e, r),
                           expanded_pages(r), r->cache_salt);
}

void nbi_request_match_prefix(nb_engine *e, nb_request *r)
{
    NB_ASSERT(r->n_pages == 0);
    uint32_t n = nbi_prefix_match(&e->prefix, r->tokens, shareable_pages(e, r), expanded_pages(r),
                                  r->cache_salt, r->pages);
    r->n_pages = r->n_shared = n;
    r->n_cached = n * NBI_PAGE_TOKENS;
}

void nbi_request_share_pages(nb_engine *e, nb_request *r)
{
    if (e->options.disable_prefix_cache && !r->beams) return;
    while ((r->n_shared + 1) * NBI_PAGE_TOKENS <= r->n_cached) {
        int32_t own = r->pages[r->n_shared];
        int32_t parent = r->n_shared ? r->pages[r->n_shared - 1] : NBI_PREFIX_ROOT;
        int32_t page = nbi_prefix_insert(&e->prefix, parent, own,
                                         r->tokens + (size_t)r->n_shared * NBI_PAGE_TOKENS,
                                         r->n_shared < expanded_pages(r), r->cache_salt);
        if (page != own)
            nbi_kvpool_give(&e->pool, own); /* computed twice at the same time: the same bits */
        r->pages[r->n_shared++] = page;
    }
}

void nbi_request_drop_pages(nb_engine *e, nb_request *r)
{
    for (uint32_t i = r->n_pages; i-- > 0;) {
        if (i < r->n_shared) {
            nbi_prefix_release(&e->prefix, r->pages[i]);
        } else {
            nbi_kvpool_give(&e->pool, r->pages[i]);
        }
    }
    r->n_pages = r->n_shared = r->n_cached = r->n_drafts = 0;
    if (e->options.disable_prefix_cache && r->beams) nbi_kv_pages_flush(e);
}

void nbi_kv_pages_flush(nb_engine *e)
{
    for (int32_t page; (page = nbi_prefix_evict(&e->prefix)) >= 0;) nbi_kvpool_give(&e->pool, page);
}
