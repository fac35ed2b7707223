/* Byte-level BPE tokenizer read from tokenizer.json. Callers: engine, chat, CLI.
 *
 * Equal to the Hugging Face `tokenizers` library, id for id, on valid UTF-8. Where that library
 * cannot go, nibble decides:
 *  - Bytes that are not valid UTF-8 are encoded as the bytes they are; a run of them is one piece,
 * no added token is found in it.
 *  - No token is ever added: the post-processor is checked for being one we know and then left
 * aside (a chat template writes its own start tokens). Truncation and padding settings are ignored.
 * Understood: model BPE (vocab, merges as strings or pairs, ignore_merges, unk_token, fuse_unk);
 * pre-tokenizers Split, ByteLevel (last), Digits, Punctuation, WhitespaceSplit, CharDelimiterSplit,
 * Sequence; normalizers NFC, NFD, NFKC, NFKD, Lowercase, Replace, Prepend, Strip, StripAccents,
 * Sequence; added tokens with all their flags. Anything else is refused by its name.
 *
 * A tokenizer is immutable: any number of threads may encode and decode with it. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_tokenizer nbi_tokenizer;

/* Growing list of ids; zeroed is empty. */
typedef struct nbi_ids {
    int32_t *data; /* [len], from nbi_malloc */
    size_t len, cap;
    size_t max; /* most that encoding may make it, 0: any number */
} nbi_ids;

nb_status nbi_ids_grow(nbi_ids *ids); /* room for at least one more; NB_NO_MEMORY */
static inline nb_status nbi_ids_add(nbi_ids *ids, int32_t id)
{
    if (ids->len == ids->cap) NB_TRY(nbi_ids_grow(ids));
    ids->data[ids->len++] = id;
    return NB_OK;
}
void nbi_ids_free(nbi_ids *ids);

/* Reads dir/tokenizer.json. NB_NOT_FOUND when there is none, NB_CORRUPT or NB_UNSUPPORTED with the
 * place. While one of the same unchanged file is open, that one is shared: each open needs its
 * close. */
nb_status nbi_tokenizer_open(nbi_tokenizer **out, const char *dir, nb_error *err);
/* The same from memory; `name` is what errors call it. */
nb_status nbi_tokenizer_parse(nbi_tokenizer **out, const char *json, size_t n, const char *name,
                              nb_error *err);
void nbi_tokenizer_close(nbi_tokenizer **tokenizer);

/* Bytes [begin, end) of a text. */
typedef struct nbi_range {
    size_t begin, end;
} nbi_range;

/* Appends the ids of text[0..n) to *ids. `parse_special`: added tokens (special or not) in the text
 * become their ids, else all is plain text. On failure *ids keeps what it had. Time is linear in n
 * but for a factor log(piece length) in single pieces. NB_TOO_LARGE for n >= 2^31, a pattern beyond
 * its match limit, or as soon as there would be more than ids->max. */
nb_status nbi_tokenizer_encode(const nbi_tokenizer *tokenizer, const char *text, size_t n,
                               bool parse_special, nbi_ids *ids, nb_error *err);

/* As with parse_special, but no added token is recognised where it overlaps one of the `n_plain`
 * ranges (sorted, disjoint). */
nb_status nbi_tokenizer_encode_guarded(const nbi_tokenizer *tokenizer, const char *text, size_t n,
                                       const nbi_range *plain, size_t n_plain, nbi_ids *ids,
                                       nb_error *err);

/* Ids are 0 <= id < size; some in between may be unused. */
uint32_t nbi_tokenizer_size(const nbi_tokenizer *tokenizer);

/* The bytes of one token as they are appended to the output: raw bytes, perhaps half a character.
 * NULL for an unused id. Not NUL-terminated; lives as long as the tokenizer. */
const char *nbi_token_bytes(const nbi_tokenizer *tokenizer, int32_t id, size_t *n);
/* Longest of them. */
size_t nbi_token_bytes_max(const nbi_tokenizer *tokenizer);

bool nbi_token_is_special(const nbi_tokenizer *tokenizer,
                          int32_t id); /* added and marked special */
bool nbi_token_is_added(const nbi_tokenizer *tokenizer, int32_t id);

/* Id of an added token, or of a vocabulary entry with exactly these bytes; -1 when there is none.
 */
int32_t nbi_token_find(const nbi_tokenizer *tokenizer, const char *text, size_t n);

/* Added tokens in the order of the file. */
typedef struct nbi_added_token {
    int32_t id;
    const char *text; /* NUL-terminated, lives as long as the tokenizer */
    size_t n;
    bool special, normalized, lstrip, rstrip, single_word;
} nbi_added_token;
size_t nbi_added_tokens(const nbi_tokenizer *tokenizer, const nbi_added_token **tokens);

/* Concatenates token bytes into *text (from nbi_malloc, NUL behind its *n_bytes). Unused ids give
 * nothing; ids outside [0, size) are NB_INVALID. `skip_special` leaves special tokens out. */
nb_status nbi_tokenizer_decode(const nbi_tokenizer *tokenizer, const int32_t *ids, size_t n,
                               bool skip_special, char **text, size_t *n_bytes, nb_error *err);

#ifdef __cplusplus
}
#endif
