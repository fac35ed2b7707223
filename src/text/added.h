/* Added tokens: found in raw text before anything else looks at it. Callers: the tokenizer. */
#pragma once

#include "base/mem.h"
#include "text/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A trie over the texts of added tokens. Zeroed is empty. */
typedef struct nbi_added_node {
    uint32_t child, sibling; /* 0: none (node 0 is the root) */
    int32_t token;           /* index given to nbi_added_add(), -1 inside a word */
    uint8_t byte;
} nbi_added_node;

typedef struct nbi_added_set {
    nbi_added_node *nodes;
    uint32_t n, cap;
    uint32_t first[256]; /* node of the first byte, 0: none */
} nbi_added_set;

nb_status nbi_added_add(nbi_added_set *set, const char *text, size_t n, int32_t token);
void nbi_added_free(nbi_added_set *set);

/* The longest token text at s[0..n): its index and length, or -1. */
int32_t nbi_added_longest(const nbi_added_set *set, const uint8_t *s, size_t n, size_t *length);

/* The leftmost-longest token at or after `from`: index, *start and *length; -1 when there is none.
 */
int32_t nbi_added_next(const nbi_added_set *set, const char *text, size_t n, size_t from,
                       size_t *start, size_t *length);

#ifdef __cplusplus
}
#endif
