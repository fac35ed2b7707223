/* What the files of the grammar compiler share. Private to src/text/grammar*.c. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "base/mem.h"
#include "text/grammar.h"
#include "text/grammar_library.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of the library, for one step of an answer. */
#define NBI_GRAMMAR_STEP_FUEL    200000u /* a mask: 14 ms at worst */
#define NBI_GRAMMAR_STEP_ITEMS   50000u  /* a mask: 3 ms at worst */
#define NBI_GRAMMAR_LEXER_STATES 50000u  /* of one request */

typedef struct nbi_grammar_work nbi_grammar_work;

/* Added tokens that a grammar names. */
typedef struct nbi_grammar_own {
    uint32_t n;
    int32_t ids[NBI_GRAMMAR_OWN_MAX];
} nbi_grammar_own;

/* What a source came to: a matcher in its first state, or why there is none. */
typedef struct nbi_grammar_entry {
    nbi_grammar_kind kind;
    char *source; /* NULL: free */
    size_t n;
    uint64_t used; /* of compiler.clock */
    nbi_llg_matcher *matcher;
    nbi_grammar_own own;
    nb_error *refusal;
} nbi_grammar_entry;

struct nbi_grammar_compiler {
    atomic_uint refs; /* its owner's, one of each grammar, one of each thread */
    const nbi_tokenizer *tokenizer;
    char *folder; /* or NULL */
    int32_t *eos;
    uint32_t n_eos, vocab, n_tokens; /* n_tokens: ids that the library knows */
    uint32_t n_words;                /* of the masks below, over the model's vocabulary */
    uint32_t *text_ids;              /* ids that stand for text */
    uint32_t *free_ids;              /* everything but the end tokens */

    pthread_mutex_t load_lock;
    bool load_tried;
    nb_error load_error; /* status NB_OK: loaded */
    const nbi_llg *llg;
    nbi_llg_tokenizer *vocabulary;

    pthread_mutex_t lock; /* what follows (grammar_compile.c) */
    pthread_cond_t more;  /* work, or the end */
    pthread_cond_t changed;
    nbi_grammar_work *first, **last; /* waits */
    nbi_grammar_work *running;
    uint32_t n_waiting, n_orders;       /* works that wait; orders that are not done */
    uint32_t n_threads, n_idle, n_late; /* n_late: threads whose work was given up */
    bool ending;
    uint64_t time_ns; /* of a processor, for one source */
    uint64_t clock;
    nbi_grammar_entry cache[NBI_GRAMMAR_CACHED_MAX];
};

static inline size_t nbi_grammar_words(uint32_t n)
{
    return ((size_t)n + 31) / 32;
}

/* grammar.c: a grammar of its own for one answer; the matcher is copied. */
nb_status nbi_grammar_create(nbi_grammar **out, nbi_grammar_compiler *compiler,
                             const nbi_grammar_options *options, const nbi_llg_matcher *matcher,
                             const nbi_grammar_own *own, nb_error *err);
nb_status nbi_grammar_check_options(const nbi_grammar_compiler *compiler,
                                    const nbi_grammar_options *options, nb_error *err);
void nbi_grammar_compiler_release(nbi_grammar_compiler *compiler);

/* grammar_compile.c: ends the threads, but for those whose work was given up. */
void nbi_grammar_end_threads(nbi_grammar_compiler *compiler);
void nbi_grammar_free_entry(const nbi_grammar_compiler *compiler, nbi_grammar_entry *entry);

#ifdef __cplusplus
}
#endif
