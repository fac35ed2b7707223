/* Inside of a tokenizer, shared by its parser (tokenizer_parse.c) and its use (tokenizer.c). */
#pragma once

#include <pthread.h>

#include "text/added.h"
#include "text/bpe.h"
#include "text/normalize.h"
#include "text/pretok.h"
#include "text/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_TOKEN_ADDED   1
#define NBI_TOKEN_SPECIAL 2

/* What one encode needs besides the tokenizer; kept for the next one. */
typedef struct nbi_encoder {
    struct nbi_encoder *next;
    nbi_matcher *matcher;
    nbi_bpe_scratch *bpe;
    nbi_buf normal, spare, prefix;
} nbi_encoder;

/* Encoders that wait for use; behind a pointer, since a const tokenizer's stock still changes. */
typedef struct nbi_encoder_stock {
    pthread_mutex_t lock; /* guards the rest */
    nbi_encoder *idle;
    size_t n_idle;
} nbi_encoder_stock;

/* Tells whether a file is the same and unchanged. */
typedef struct nbi_tokenizer_file {
    uint64_t device, inode, bytes;
    int64_t seconds, nanoseconds; /* of its last change */
} nbi_tokenizer_file;

struct nbi_tokenizer {
    nbi_bpe *bpe;
    nbi_normalizer *normalizer; /* NULL: none */
    nbi_pretok *pretok;
    nbi_added_token *added; /* [n_added] */
    size_t n_added;
    nbi_added_set raw, normal; /* added tokens looked for before and after normalizing */
    uint8_t *flags;            /* [nbi_bpe_size(bpe)] NBI_TOKEN_* */
    nbi_arena texts;           /* of added tokens */
    nbi_encoder_stock *stock;
    nbi_tokenizer_file file; /* under the lock of nbi_tokenizer_open(), like the next two */
    nbi_tokenizer *next;     /* open ones that came from files */
    uint32_t refs;           /* 0: not from a file */
};

void nbi_tokenizer_destroy(nbi_tokenizer *t);

#ifdef __cplusplus
}
#endif
