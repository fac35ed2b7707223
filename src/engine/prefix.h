/* The prefix tree: full KV pages that later requests with the same beginning can share.
 *
 * A node is one page: 64 tokens behind the tokens of its parent, and the form of attention in which
 * they were computed: the same tokens in another form have other bits. Nodes are found by a hash of
 * (parent, form, tokens) and then compared token by token, so a collision costs time and never a
 * wrong answer. A node's index is its page, so nothing is allocated after init. Pages with
 * references are in use; those without stay cached in order of last use until eviction takes the
 * oldest, which is always a leaf: a request gives its pages back from the last to the first. Used
 * by the engine's step only, so without a lock. */
#pragma once

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_PREFIX_ROOT (-1)

typedef struct nbi_prefix_node {
    uint64_t hash;
    int32_t parent;       /* page of the parent or NBI_PREFIX_ROOT */
    int32_t chain;        /* next node of the bucket or -1 */
    int32_t older, newer; /* unreferenced nodes, by last use; -1 at the ends */
    uint32_t refs;        /* requests that use it */
    uint32_t children;    /* nodes below it */
    uint64_t born;        /* the tree's version that it came with: no two have the same */
    uint64_t salt;        /* of a node behind the root: whose it is; else 0 */
    bool present;         /* the page is a node */
    bool expanded;        /* its rows were computed in MLA's expanded form */
    int32_t tokens[NBI_PAGE_TOKENS];
} nbi_prefix_node;

typedef struct nbi_prefix {
    nbi_prefix_node *nodes; /* [n_pages] */
    int32_t *buckets;       /* [n_buckets] first node or -1 */
    uint32_t n_pages, n_buckets;
    uint64_t hash_mask;
    int32_t oldest, newest; /* ends of the unreferenced list */
    uint32_t n_cached;      /* its length */
    uint64_t version;       /* 1, and one more whenever a node comes or goes */
    uint64_t n_lookups;     /* pages that were looked for, ever: tests count them */
} nbi_prefix;

/* How far a prompt was followed the last time. Zeroed: it was not. */
typedef struct nbi_prefix_place {
    uint64_t version, born; /* of the tree then; of the last node on the way */
    int32_t page;           /* that node; NBI_PREFIX_ROOT when n_pages is 0 */
    uint32_t n_pages, max_pages;
} nbi_prefix_place;

/* hash_bits cuts the hash (1 to 64): tests make it collide. */
nb_status nbi_prefix_init(nbi_prefix *p, uint32_t n_pages, uint32_t hash_bits, nb_error *err);
void nbi_prefix_deinit(nbi_prefix *p);

/* Walks from the root along whole pages of tokens[0 .. 64 * max_pages), the first n_expanded of
 * them of the expanded form and the others of the absorbed one; writes the pages found to `pages`,
 * each with one more reference. What was inserted with
 * another salt is not found. */
uint32_t nbi_prefix_match(nbi_prefix *p, const int32_t *tokens, uint32_t max_pages,
                          uint32_t n_expanded, uint64_t salt, int32_t *pages);

/* How many pages nbi_prefix_match() would find; takes nothing. *place belongs to these tokens,
 * n_expanded and salt: while the tree stays as it is nothing is looked up again, and while the last
 * node is there only what may follow it. */
uint32_t nbi_prefix_peek(nbi_prefix *p, nbi_prefix_place *place, const int32_t *tokens,
                         uint32_t max_pages, uint32_t n_expanded, uint64_t salt);

/* Makes `page` (full, private) a node behind `parent` with one reference and returns it. When the
 * same node exists already, that one gets the reference and is returned: the caller uses it and
 * frees its own. The salt counts behind the root alone: what follows is told apart by its parent.
 */
int32_t nbi_prefix_insert(nbi_prefix *p, int32_t parent, int32_t page, const int32_t *tokens,
                          bool expanded, uint64_t salt);

/* One reference more to a node that has some. */
void nbi_prefix_retain(nbi_prefix *p, int32_t page);

/* One reference less. Pages of a request are released from the last to the first. */
void nbi_prefix_release(nbi_prefix *p, int32_t page);

/* Removes the node used least recently and returns its page; -1 when every node is in use. */
int32_t nbi_prefix_evict(nbi_prefix *p);

#ifdef __cplusplus
}
#endif
