/* Prefix tree over KV pages: a hash table of nodes and a list by last use. */
#include "engine/prefix.h"

#include <string.h>

/* FNV-1a over 32-bit words, then a finalising mix. */
static uint64_t hash_node(int32_t parent, const int32_t *tokens, bool expanded, uint64_t salt)
{
    uint64_t h = 0xcbf29ce484222325ull ^ (uint32_t)parent ^ (uint64_t)expanded << 32 ^ salt;
    for (uint32_t i = 0; i < NBI_PAGE_TOKENS; i++) h = (h ^ (uint32_t)tokens[i]) * 0x100000001b3ull;
    h ^= h >> 32;
    h *= 0x9e3779b97f4a7c15ull;
    return h ^ h >> 29;
}

nb_status nbi_prefix_init(nbi_prefix *p, uint32_t n_pages, uint32_t hash_bits, nb_error *err)
{
    *p = (nbi_prefix){.n_pages = n_pages, .n_buckets = 1, .oldest = -1, .newest = -1, .version = 1};
    while (p->n_buckets < n_pages) p->n_buckets *= 2;
    p->hash_mask = hash_bits >= 64 ? UINT64_MAX : ((uint64_t)1 << hash_bits) - 1;
    p->nodes = nbi_calloc(n_pages, sizeof *p->nodes);
    p->buckets = nbi_malloc(p->n_buckets * sizeof *p->buckets);
    if (!p->nodes || !p->buckets) {
        nbi_prefix_deinit(p);
        return nbi_fail(err, NB_NO_MEMORY, "prefix tree: no memory for %u nodes", n_pages);
    }
    memset(p->buckets, 0xff, p->n_buckets * sizeof *p->buckets); /* -1 */
    return NB_OK;
}

void nbi_prefix_deinit(nbi_prefix *p)
{
    nbi_free(p->nodes);
    nbi_free(p->buckets);
    *p = (nbi_prefix){0};
}

/* ---------------------------------------------------------------- the list of unreferenced nodes
 */

static void list_add_newest(nbi_prefix *p, int32_t page)
{
    nbi_prefix_node *n = &p->nodes[page];
    n->older = p->newest;
    n->newer = -1;
    if (p->newest >= 0)
        p->nodes[p->newest].newer = page;
    else
        p->oldest = page;
    p->newest = page;
    p->n_cached++;
}

static void list_remove(nbi_prefix *p, int32_t page)
{
    nbi_prefix_node *n = &p->nodes[page];
    if (n->older >= 0)
        p->nodes[n->older].newer = n->newer;
    else
        p->oldest = n->newer;
    if (n->newer >= 0)
        p->nodes[n->newer].older = n->older;
    else
        p->newest = n->older;
    p->n_cached--;
}

void nbi_prefix_retain(nbi_prefix *p, int32_t page)
{
    if (p->nodes[page].refs++ == 0) list_remove(p, page);
}

/* ---------------------------------------------------------------- lookup */

static int32_t find(const nbi_prefix *p, int32_t parent, const int32_t *tokens, bool expanded,
                    uint64_t salt, uint64_t hash)
{
    for (int32_t at = p->buckets[hash & (p->n_buckets - 1)]; at >= 0; at = p->nodes[at].chain) {
        const nbi_prefix_node *n = &p->nodes[at];
        if (n->hash == hash && n->parent == parent && n->expanded == expanded && n->salt == salt &&
            !memcmp(n->tokens, tokens, sizeof n->tokens))
            return at;
    }
    return -1;
}

/* The node of page i of a prompt behind `parent`, or -1. */
static int32_t follow(nbi_prefix *p, int32_t parent, const int32_t *tokens, uint32_t i,
                      uint32_t n_expanded, uint64_t salt)
{
    const int32_t *page_tokens = tokens + (size_t)i * NBI_PAGE_TOKENS;
    const bool form = i < n_expanded;
    if (i) salt = 0;
    p->n_lookups++;
    return find(p, parent, page_tokens, form, salt,
                hash_node(parent, page_tokens, form, salt) & p->hash_mask);
}

/* A node's parents stay as long as it does. */
static bool is_there(const nbi_prefix *p, const nbi_prefix_place *place)
{
    if (place->n_pages == 0) return true;
    return p->nodes[place->page].present && p->nodes[place->page].born == place->born;
}

uint32_t nbi_prefix_peek(nbi_prefix *p, nbi_prefix_place *place, const int32_t *tokens,
                         uint32_t max_pages, uint32_t n_expanded, uint64_t salt)
{
    if (place->version == p->version && place->max_pages == max_pages) return place->n_pages;
    if (!place->version || place->n_pages > max_pages || !is_there(p, place))
        *place = (nbi_prefix_place){.page = NBI_PREFIX_ROOT};
    place->version = p->version;
    place->max_pages = max_pages;
    while (place->n_pages < max_pages) {
        int32_t next = follow(p, place->page, tokens, place->n_pages, n_expanded, salt);
        if (next < 0) break;
        place->page = next;
        place->born = p->nodes[next].born;
        place->n_pages++;
    }
    return place->n_pages;
}

uint32_t nbi_prefix_match(nbi_prefix *p, const int32_t *tokens, uint32_t max_pages,
                          uint32_t n_expanded, uint64_t salt, int32_t *pages)
{
    int32_t parent = NBI_PREFIX_ROOT;
    for (uint32_t i = 0; i < max_pages; i++) {
        parent = follow(p, parent, tokens, i, n_expanded, salt);
        if (parent < 0) return i;
        nbi_prefix_retain(p, parent);
        pages[i] = parent;
    }
    return max_pages;
}

/* ---------------------------------------------------------------- change */

int32_t nbi_prefix_insert(nbi_prefix *p, int32_t parent, int32_t page, const int32_t *tokens,
                          bool expanded, uint64_t salt)
{
    if (parent != NBI_PREFIX_ROOT) salt = 0;
    uint64_t hash = hash_node(parent, tokens, expanded, salt) & p->hash_mask;
    int32_t twin = find(p, parent, tokens, expanded, salt, hash);
    if (twin >= 0) {
        nbi_prefix_retain(p, twin);
        return twin;
    }
    nbi_prefix_node *n = &p->nodes[page];
    NB_ASSERT(!n->present);
    int32_t *bucket = &p->buckets[hash & (p->n_buckets - 1)];
    *n = (nbi_prefix_node){.hash = hash,
                           .parent = parent,
                           .chain = *bucket,
                           .older = -1,
                           .newer = -1,
                           .refs = 1,
                           .born = ++p->version,
                           .salt = salt,
                           .present = true,
                           .expanded = expanded};
    memcpy(n->tokens, tokens, sizeof n->tokens);
    *bucket = page;
    if (parent >= 0) p->nodes[parent].children++;
    return page;
}

void nbi_prefix_release(nbi_prefix *p, int32_t page)
{
    NB_ASSERT(p->nodes[page].present && p->nodes[page].refs > 0);
    if (--p->nodes[page].refs == 0) list_add_newest(p, page);
}

int32_t nbi_prefix_evict(nbi_prefix *p)
{
    int32_t page = p->oldest;
    if (page < 0) return -1;
    nbi_prefix_node *n = &p->nodes[page];
    NB_ASSERT(n->children == 0); /* a parent is always newer than its children */
    list_remove(p, page);
    int32_t *at = &p->buckets[n->hash & (p->n_buckets - 1)];
    while (*at != page) at = &p->nodes[*at].chain;
    *at = n->chain;
    if (n->parent >= 0) p->nodes[n->parent].children--;
    n->present = false;
    p->version++;
    return page;
}
