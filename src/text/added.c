/* Trie of added tokens (see added.h). Files have tens to a thousand of them, so siblings are a
 * list. */
#include "text/added.h"

#include <string.h>

static nb_status new_node(nbi_added_set *set, uint8_t byte, uint32_t *out)
{
    if (set->n == set->cap) {
        uint32_t cap = set->cap ? set->cap * 2 : 256;
        nbi_added_node *nodes = nbi_realloc(set->nodes, cap * sizeof *nodes);
        if (!nodes) return NB_NO_MEMORY;
        set->nodes = nodes;
        set->cap = cap;
    }
    if (set->n == 0) set->nodes[set->n++] = (nbi_added_node){.token = -1};
    if (set->n == set->cap) return new_node(set, byte, out);
    set->nodes[set->n] = (nbi_added_node){.token = -1, .byte = byte};
    *out = set->n++;
    return NB_OK;
}

static uint32_t child_of(const nbi_added_set *set, uint32_t node, uint8_t byte)
{
    uint32_t c = set->nodes[node].child;
    while (c && set->nodes[c].byte != byte) c = set->nodes[c].sibling;
    return c;
}

nb_status nbi_added_add(nbi_added_set *set, const char *text, size_t n, int32_t token)
{
    uint32_t node = 0;
    for (size_t i = 0; i < n; i++) {
        uint8_t byte = (uint8_t)text[i];
        uint32_t next = i == 0 ? set->first[byte] : child_of(set, node, byte);
        if (!next) {
            NB_TRY(new_node(set, byte, &next));
            if (i == 0) {
                set->first[byte] = next;
            } else {
                set->nodes[next].sibling = set->nodes[node].child;
                set->nodes[node].child = next;
            }
        }
        node = next;
    }
    if (n > 0) set->nodes[node].token = token;
    return NB_OK;
}

void nbi_added_free(nbi_added_set *set)
{
    nbi_free(set->nodes);
    memset(set, 0, sizeof *set);
}

int32_t nbi_added_longest(const nbi_added_set *set, const uint8_t *s, size_t n, size_t *length)
{
    int32_t token = -1;
    uint32_t node = set->first[s[0]];
    for (size_t i = 0; node; node = child_of(set, node, s[i])) {
        i++;
        if (set->nodes[node].token >= 0) {
            token = set->nodes[node].token;
            *length = i;
        }
        if (i == n) break;
    }
    return token;
}

int32_t nbi_added_next(const nbi_added_set *set, const char *text, size_t n, size_t from,
                       size_t *start, size_t *length)
{
    const uint8_t *s = (const uint8_t *)text;
    if (set->n == 0) return -1;
    for (size_t i = from; i < n; i++) {
        if (!set->first[s[i]]) continue;
        int32_t token = nbi_added_longest(set, s + i, n - i, length);
        if (token < 0) continue;
        *start = i;
        return token;
    }
    return -1;
}
