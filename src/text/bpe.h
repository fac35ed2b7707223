/* The BPE model inside the tokenizer: vocabulary of byte strings, ranked merges, a cache of encoded
 * pieces. Callers: tokenizer.c and its parser. */
#pragma once

#include "base/mem.h"
#include "text/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_ID_MAX ((uint32_t)1 << 24) /* ids are below this */

typedef struct nbi_bpe nbi_bpe; /* immutable once merges are in, but for its atomics */
typedef struct nbi_bpe_scratch
    nbi_bpe_scratch; /* one thread at a time: heap of the merge loop and piece cache */

nb_status nbi_bpe_create(nbi_bpe **out);
void nbi_bpe_destroy(nbi_bpe **bpe);

/* `n` token bytes under `id` < NBI_ID_MAX. `mapped`: the token is spelled in the byte alphabet, so
 * that text can contain it; others can only be decoded. NB_INVALID when the id is taken. */
nb_status nbi_bpe_add(nbi_bpe *bpe, uint32_t id, const char *bytes, size_t n, bool mapped);

/* Ends adding and builds the look-up of pieces. */
nb_status nbi_bpe_index(nbi_bpe *bpe, size_t n_merges);

/* The merge (left, right) -> id of the next rank. */
nb_status nbi_bpe_add_merge(nbi_bpe *bpe, uint32_t left, uint32_t right, uint32_t id);

/* `unk` is -1 for none: then bytes without a token are dropped, as the reference does. */
void nbi_bpe_set(nbi_bpe *bpe, bool ignore_merges, int32_t unk, bool fuse_unk);

uint32_t nbi_bpe_size(const nbi_bpe *bpe); /* largest id + 1 */
const char *nbi_bpe_bytes(const nbi_bpe *bpe, uint32_t id, size_t *n);
size_t nbi_bpe_bytes_max(const nbi_bpe *bpe);
int32_t nbi_bpe_find(const nbi_bpe *bpe, const char *bytes, size_t n); /* mapped tokens only; -1 */

nb_status nbi_bpe_scratch_create(nbi_bpe_scratch **out);
void nbi_bpe_scratch_destroy(nbi_bpe_scratch **scratch);
/* Gives back working memory beyond `bytes`; the cache stays. */
void nbi_bpe_scratch_trim(nbi_bpe_scratch *scratch, size_t bytes);

/* Appends the ids of one piece of n >= 1 bytes. NB_NO_MEMORY. */
nb_status nbi_bpe_encode(const nbi_bpe *bpe, nbi_bpe_scratch *scratch, const uint8_t *piece,
                         size_t n, nbi_ids *ids);

#ifdef __cplusplus
}
#endif
