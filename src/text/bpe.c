/* Byte-pair encoding (see bpe.h).
 *
 * A piece takes the first of these ways that applies: single byte; whole token (always when
 * ignore_merges, else when merging is known to end in that one token, which is found out once per
 * token); piece cache; merging. Short pieces merge by scanning for the lowest rank, long ones with
 * a heap, so that a megabyte without a break costs n log n. */
#include "text/bpe.h"

#include <stdatomic.h>
#include <string.h>

#define NO_ID       UINT32_MAX
#define NO_RANK     UINT32_MAX
#define SHORT_PIECE 40   /* bytes: where the quadratic scan meets the heap (measured) */
#define CACHE_SLOTS 8192 /* 64 bytes each: stays in the second-level cache */
#define CACHE_PIECE 31
#define CACHE_IDS   7

typedef struct token {
    uint32_t offset, n; /* into bytes */
    bool used, mapped;
} token;

typedef struct merge {
    uint32_t left, right; /* NO_ID: free slot */
    uint32_t rank, id;
} merge;

typedef struct slot {
    uint32_t hash, id; /* id NO_ID: free */
} slot;

enum { WHOLE_UNKNOWN, WHOLE_YES, WHOLE_NO };

struct nbi_bpe {
    nbi_buf bytes;
    token *tokens; /* [size] */
    uint32_t size, cap;
    size_t longest, longest_mapped;
    slot *slots; /* [slot_mask + 1] mapped tokens by bytes */
    uint32_t slot_mask;
    merge *merges; /* [merge_mask + 1] by pair */
    uint32_t merge_mask, n_merges;
    _Atomic uint8_t *whole; /* [size] does merging the token's bytes give the token? */
    uint32_t byte_id[256];
    int32_t unk;
    bool ignore_merges, fuse_unk;
};

typedef struct cached {
    uint8_t n, n_ids; /* n 0: empty */
    uint8_t piece[CACHE_PIECE];
    int32_t ids[CACHE_IDS];
} cached;

typedef struct symbol {
    uint32_t id, prev, next; /* next: NO_ID at the end; id NO_ID: merged away */
} symbol;

typedef struct candidate {
    uint32_t rank, pos;
} candidate;

struct nbi_bpe_scratch {
    cached cache[CACHE_SLOTS];
    symbol *symbols;
    candidate *heap;
    size_t cap, heap_n, heap_cap;
};

/* ---------------------------------------------------------------- tables */

static inline uint64_t load(const uint8_t *p, size_t n)
{
    uint64_t v = 0;
    memcpy(&v, p, n);
    return v;
}

/* Not keyed: tables are filled from the file alone, and the cache has one slot per hash, so text
 * cannot make chains. */
static inline uint64_t hash_bytes(const uint8_t *p, size_t n)
{
    uint64_t h = 0x9E3779B97F4A7C15ull * (n + 1);
    while (n > 8) {
        h = (h ^ load(p, 8)) * 0xD6E8FEB86659FD93ull;
        h ^= h >> 32;
        p += 8;
        n -= 8;
    }
    uint64_t tail = n >= 4 ? load(p, 4) | load(p + n - 4, 4) << 32
                           : (uint64_t)p[0] | (uint64_t)p[n >> 1] << 8 | (uint64_t)p[n - 1] << 16;
    h = (h ^ tail) * 0xD6E8FEB86659FD93ull;
    return h ^ h >> 32;
}

static inline uint32_t hash_pair(uint32_t left, uint32_t right)
{
    uint64_t h = ((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15ull;
    return (uint32_t)(h >> 32);
}

static uint32_t table_mask(size_t n)
{
    uint32_t mask = 15;
    while (mask < 2 * n) mask = mask * 2 + 1;
    return mask;
}

nb_status nbi_bpe_create(nbi_bpe **out)
{
    nbi_bpe *b = nbi_calloc(1, sizeof *b);
    if (!b) return NB_NO_MEMORY;
    b->unk = -1;
    for (int i = 0; i < 256; i++) b->byte_id[i] = NO_ID;
    *out = b;
    return NB_OK;
}

void nbi_bpe_destroy(nbi_bpe **bpe)
{
    nbi_bpe *b = *bpe;
    if (!b) return;
    nbi_buf_free(&b->bytes);
    nbi_free(b->tokens);
    nbi_free(b->slots);
    nbi_free(b->merges);
    nbi_free((void *)(uintptr_t)b->whole);
    nbi_free(b);
    *bpe = NULL;
}

static nb_status grow(nbi_bpe *b, uint32_t id)
{
    if (id < b->cap) return NB_OK;
    uint32_t cap = b->cap ? b->cap : 1024;
    while (cap <= id) cap *= 2;
    token *tokens = nbi_realloc(b->tokens, cap * sizeof *tokens);
    if (!tokens) return NB_NO_MEMORY;
    memset(tokens + b->cap, 0, (cap - b->cap) * sizeof *tokens);
    b->tokens = tokens;
    b->cap = cap;
    return NB_OK;
}

nb_status nbi_bpe_add(nbi_bpe *bpe, uint32_t id, const char *bytes, size_t n, bool mapped)
{
    if (id >= NBI_ID_MAX) return NB_INVALID;
    NB_TRY(grow(bpe, id));
    token *t = &bpe->tokens[id];
    if (t->used) return NB_INVALID;
    size_t offset = bpe->bytes.len;
    NB_TRY(nbi_buf_add(&bpe->bytes, bytes, n));
    *t = (token){.offset = (uint32_t)offset, .n = (uint32_t)n, .used = true, .mapped = mapped};
    if (id >= bpe->size) bpe->size = id + 1;
    if (n > bpe->longest) bpe->longest = n;
    if (mapped && n > bpe->longest_mapped) bpe->longest_mapped = n;
    if (mapped && n == 1) bpe->byte_id[(uint8_t)bytes[0]] = id;
    return NB_OK;
}

nb_status nbi_bpe_index(nbi_bpe *bpe, size_t n_merges)
{
    if (n_merges >= NBI_ID_MAX * 4) return NB_TOO_LARGE;
    bpe->slot_mask = table_mask(bpe->size);
    bpe->merge_mask = table_mask(n_merges);
    bpe->slots = nbi_malloc(((size_t)bpe->slot_mask + 1) * sizeof *bpe->slots);
    bpe->merges = nbi_malloc(((size_t)bpe->merge_mask + 1) * sizeof *bpe->merges);
    bpe->whole = nbi_calloc(bpe->size ? bpe->size : 1, sizeof *bpe->whole);
    if (!bpe->slots || !bpe->merges || !bpe->whole) return NB_NO_MEMORY;
    memset(bpe->slots, 0xFF, ((size_t)bpe->slot_mask + 1) * sizeof *bpe->slots);
    memset(bpe->merges, 0xFF, ((size_t)bpe->merge_mask + 1) * sizeof *bpe->merges);
    for (uint32_t id = 0; id < bpe->size; id++) {
        const token *t = &bpe->tokens[id];
        if (!t->used || !t->mapped || t->n == 0) continue;
        uint32_t hash = (uint32_t)hash_bytes((const uint8_t *)bpe->bytes.data + t->offset, t->n);
        uint32_t i = hash & bpe->slot_mask;
        while (bpe->slots[i].id != NO_ID) i = (i + 1) & bpe->slot_mask;
        bpe->slots[i] = (slot){hash, id};
    }
    return NB_OK;
}

nb_status nbi_bpe_add_merge(nbi_bpe *bpe, uint32_t left, uint32_t right, uint32_t id)
{
    uint32_t i = hash_pair(left, right) & bpe->merge_mask;
    for (; bpe->merges[i].left != NO_ID; i = (i + 1) & bpe->merge_mask)
        if (bpe->merges[i].left == left && bpe->merges[i].right == right)
            break; /* a repeated pair: the last one counts */
    bpe->merges[i] = (merge){left, right, bpe->n_merges++, id};
    return NB_OK;
}

void nbi_bpe_set(nbi_bpe *bpe, bool ignore_merges, int32_t unk, bool fuse_unk)
{
    bpe->ignore_merges = ignore_merges;
    bpe->unk = unk;
    bpe->fuse_unk = fuse_unk;
}

uint32_t nbi_bpe_size(const nbi_bpe *bpe)
{
    return bpe->size;
}

const char *nbi_bpe_bytes(const nbi_bpe *bpe, uint32_t id, size_t *n)
{
    if (id >= bpe->size || !bpe->tokens[id].used) return NULL;
    *n = bpe->tokens[id].n;
    return bpe->bytes.data ? bpe->bytes.data + bpe->tokens[id].offset : "";
}

size_t nbi_bpe_bytes_max(const nbi_bpe *bpe)
{
    return bpe->longest;
}

static inline uint32_t find_hashed(const nbi_bpe *b, const uint8_t *p, size_t n, uint32_t hash)
{
    if (n > b->longest_mapped) return NO_ID;
    for (uint32_t i = hash & b->slot_mask; b->slots[i].id != NO_ID; i = (i + 1) & b->slot_mask) {
        if (b->slots[i].hash != hash) continue;
        const token *t = &b->tokens[b->slots[i].id];
        if (t->n == n && memcmp(b->bytes.data + t->offset, p, n) == 0) return b->slots[i].id;
    }
    return NO_ID;
}

int32_t nbi_bpe_find(const nbi_bpe *bpe, const char *bytes, size_t n)
{
    if (n == 0) return -1;
    uint32_t id = find_hashed(bpe, (const uint8_t *)bytes, n,
                              (uint32_t)hash_bytes((const uint8_t *)bytes, n));
    return id == NO_ID ? -1 : (int32_t)id;
}

static inline const merge *find_merge(const nbi_bpe *b, uint32_t left, uint32_t right)
{
    for (uint32_t i = hash_pair(left, right) & b->merge_mask; b->merges[i].left != NO_ID;
         i = (i + 1) & b->merge_mask)
        if (b->merges[i].left == left && b->merges[i].right == right) return &b->merges[i];
    return NULL;
}

/* ---------------------------------------------------------------- merging */

nb_status nbi_bpe_scratch_create(nbi_bpe_scratch **out)
{
    nbi_bpe_scratch *s = nbi_calloc(1, sizeof *s);
    if (!s) return NB_NO_MEMORY;
    *out = s;
    return NB_OK;
}

void nbi_bpe_scratch_destroy(nbi_bpe_scratch **scratch)
{
    if (!*scratch) return;
    nbi_free((*scratch)->symbols);
    nbi_free((*scratch)->heap);
    nbi_free(*scratch);
    *scratch = NULL;
}

void nbi_bpe_scratch_trim(nbi_bpe_scratch *scratch, size_t bytes)
{
    if (scratch->cap * sizeof *scratch->symbols + scratch->heap_cap * sizeof *scratch->heap <=
        bytes)
        return;
    nbi_free(scratch->symbols);
    nbi_free(scratch->heap);
    scratch->symbols = NULL;
    scratch->heap = NULL;
    scratch->cap = scratch->heap_cap = 0;
}

/* Turns bytes into symbols: out[] has room for n. Bytes without a token become unk or vanish. */
static size_t first_symbols(const nbi_bpe *b, const uint8_t *p, size_t n, uint32_t *out)
{
    size_t k = 0;
    bool last_unk = false;
    for (size_t i = 0; i < n; i++) {
        uint32_t id = b->byte_id[p[i]];
        if (id != NO_ID) {
            out[k++] = id;
            last_unk = false;
        } else if (b->unk >= 0) {
            if (!(b->fuse_unk && last_unk)) out[k++] = (uint32_t)b->unk;
            last_unk = true;
        }
    }
    return k;
}

/* Merges ids[0..n), n <= SHORT_PIECE, in place; returns how many are left. */
static size_t merge_short(const nbi_bpe *b, uint32_t *ids, size_t n)
{
    uint32_t rank[SHORT_PIECE], merged[SHORT_PIECE]; /* of the pair (i, i + 1) */
    for (size_t i = 0; i + 1 < n; i++) {
        const merge *m = find_merge(b, ids[i], ids[i + 1]);
        rank[i] = m ? m->rank : NO_RANK;
        merged[i] = m ? m->id : 0;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == NO_RANK) break;
        ids[best] = merged[best];
        n--;
        memmove(ids + best + 1, ids + best + 2, (n - best - 1) * sizeof *ids);
        if (best + 1 < n) {
            memmove(rank + best + 1, rank + best + 2, (n - best - 2) * sizeof *rank);
            memmove(merged + best + 1, merged + best + 2, (n - best - 2) * sizeof *merged);
        }
        for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const merge *m = find_merge(b, ids[i], ids[i + 1]);
            rank[i] = m ? m->rank : NO_RANK;
            merged[i] = m ? m->id : 0;
        }
    }
    return n;
}

static inline bool before(candidate a, candidate b)
{
    return a.rank != b.rank ? a.rank < b.rank : a.pos < b.pos;
}

static nb_status heap_push(nbi_bpe_scratch *s, candidate c)
{
    if (s->heap_n == s->heap_cap) {
        size_t cap = s->heap_cap ? s->heap_cap * 2 : 256;
        candidate *heap = nbi_realloc(s->heap, cap * sizeof *heap);
        if (!heap) return NB_NO_MEMORY;
        s->heap = heap;
        s->heap_cap = cap;
    }
    size_t i = s->heap_n++;
    for (; i > 0 && before(c, s->heap[(i - 1) / 2]); i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = c;
    return NB_OK;
}

static candidate heap_pop(nbi_bpe_scratch *s)
{
    candidate top = s->heap[0], last = s->heap[--s->heap_n];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < s->heap_n; i = child) {
        if (child + 1 < s->heap_n && before(s->heap[child + 1], s->heap[child])) child++;
        if (!before(s->heap[child], last)) break;
        s->heap[i] = s->heap[child];
    }
    s->heap[i] = last;
    return top;
}

static nb_status push_pair(const nbi_bpe *b, nbi_bpe_scratch *s, uint32_t pos)
{
    uint32_t next = s->symbols[pos].next;
    const merge *m = next == NO_ID ? NULL : find_merge(b, s->symbols[pos].id, s->symbols[next].id);
    return m ? heap_push(s, (candidate){m->rank, pos}) : NB_OK;
}

/* Merges symbols[0..n) through a heap of candidates; a popped one counts only if its pair still has
 * that rank. */
static nb_status merge_long(const nbi_bpe *b, nbi_bpe_scratch *s, size_t n)
{
    symbol *y = s->symbols;
    s->heap_n = 0;
    for (uint32_t i = 0; i + 1 < n; i++) NB_TRY(push_pair(b, s, i));
    while (s->heap_n > 0) {
        candidate c = heap_pop(s);
        uint32_t next = y[c.pos].next;
        if (y[c.pos].id == NO_ID || next == NO_ID) continue;
        const merge *m = find_merge(b, y[c.pos].id, y[next].id);
        if (!m || m->rank != c.rank) continue;
        y[c.pos].id = m->id;
        y[c.pos].next = y[next].next;
        y[next].id = NO_ID;
        if (y[c.pos].next != NO_ID) y[y[c.pos].next].prev = c.pos;
        NB_TRY(push_pair(b, s, c.pos));
        if (y[c.pos].prev != NO_ID) NB_TRY(push_pair(b, s, y[c.pos].prev));
    }
    return NB_OK;
}

static nb_status encode_long(const nbi_bpe *b, nbi_bpe_scratch *s, const uint8_t *p, size_t n,
                             nbi_ids *ids)
{
    if (n > s->cap) {
        symbol *symbols = nbi_realloc(s->symbols, n * sizeof *symbols);
        if (!symbols) return NB_NO_MEMORY;
        s->symbols = symbols;
        s->cap = n;
    }
    uint32_t *first = nbi_malloc(n * sizeof *first);
    if (!first) return NB_NO_MEMORY;
    size_t k = first_symbols(b, p, n, first);
    for (uint32_t i = 0; i < k; i++)
        s->symbols[i] = (symbol){first[i], i ? i - 1 : NO_ID, i + 1 < k ? i + 1 : NO_ID};
    nbi_free(first);
    NB_TRY(merge_long(b, s, k));
    for (uint32_t i = 0; k > 0 && i != NO_ID; i = s->symbols[i].next)
        NB_TRY(nbi_ids_add(ids, (int32_t)s->symbols[i].id));
    return NB_OK;
}

static nb_status encode_short(const nbi_bpe *b, const uint8_t *p, size_t n, nbi_ids *ids)
{
    uint32_t symbols[SHORT_PIECE];
    size_t k = merge_short(b, symbols, first_symbols(b, p, n, symbols));
    for (size_t i = 0; i < k; i++) NB_TRY(nbi_ids_add(ids, (int32_t)symbols[i]));
    return NB_OK;
}

/* ---------------------------------------------------------------- pieces */

static void remember(cached *c, const uint8_t *p, size_t n, const int32_t *ids, size_t n_ids)
{
    if (n > CACHE_PIECE || n_ids > CACHE_IDS) return;
    c->n = (uint8_t)n;
    c->n_ids = (uint8_t)n_ids;
    memcpy(c->piece, p, n);
    memcpy(c->ids, ids, n_ids * sizeof *ids);
}

nb_status nbi_bpe_encode(const nbi_bpe *bpe, nbi_bpe_scratch *scratch, const uint8_t *piece,
                         size_t n, nbi_ids *ids)
{
    if (n == 1 && bpe->byte_id[piece[0]] != NO_ID)
        return nbi_ids_add(ids, (int32_t)bpe->byte_id[piece[0]]);
    uint64_t hash = hash_bytes(piece, n);
    uint32_t id = find_hashed(bpe, piece, n, (uint32_t)hash);
    if (id != NO_ID) {
        if (bpe->ignore_merges ||
            atomic_load_explicit(&bpe->whole[id], memory_order_relaxed) == WHOLE_YES)
            return nbi_ids_add(ids, (int32_t)id);
    }
    cached *c = &scratch->cache[(hash >> 20) % CACHE_SLOTS];
    if (c->n == n && memcmp(c->piece, piece, n) == 0) {
        for (size_t i = 0; i < c->n_ids; i++) NB_TRY(nbi_ids_add(ids, c->ids[i]));
        return NB_OK;
    }
    size_t first = ids->len;
    NB_TRY(n <= SHORT_PIECE ? encode_short(bpe, piece, n, ids)
                            : encode_long(bpe, scratch, piece, n, ids));
    size_t made = ids->len - first;
    if (id != NO_ID)
        atomic_store_explicit(&bpe->whole[id],
                              made == 1 && ids->data[first] == (int32_t)id ? WHOLE_YES : WHOLE_NO,
                              memory_order_relaxed);
    if (made == 0) return NB_OK; /* no byte of it is known, and no unknown token is declared */
    remember(c, piece, n, ids->data + first, made);
    return NB_OK;
}
