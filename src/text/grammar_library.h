/* Finding and calling llguidance, the grammar library. Callers: grammar.c, grammar_compile.c.
 *
 * The package comes from PyPI: `pip install --target <folder> llguidance==1.9.1`. Its extension
 * module also exports the library's C interface, and that is all nibble calls: no Python code runs
 * and no interpreter lock is taken. It is looked for as <folder>/llguidance/_lib.abi3.so in
 *   1. the folder given (nothing else is then tried),
 *   2. <prefix>/lib/nibble/python, where the running file is <prefix>/bin/...,
 *   3. for a program inside the source tree: <tree>/build/python (`scripts/setup grammar`),
 *      <tree>/.venv/lib/python3.*\/site-packages (`scripts/setup test`). The module refers to
 * symbols of libpython, which a nibble built with chat templates has loaded.
 *
 * The structs below are the library's (parser/llguidance.h, versions 1.9.x). */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_GRAMMAR_PACKAGE "llguidance==1.9.1"

typedef struct nbi_llg_tokenizer nbi_llg_tokenizer; /* shared, counted */
typedef struct nbi_llg_matcher nbi_llg_matcher;

typedef size_t (*nbi_llg_tokenize)(const void *user, const uint8_t *bytes, size_t n, uint32_t *ids,
                                   size_t cap);

typedef struct nbi_llg_tokenizer_init {
    size_t struct_size;
    uint32_t vocab_size, tok_eos;
    const uint32_t *token_lens; /* [vocab_size] */
    const uint8_t *token_bytes; /* one behind the other; 0xff before the name of a special token */
    const char *tokenizer_json;
    bool tokenize_assumes_string;
    nbi_llg_tokenize tokenize_fn;
    bool use_approximate_greedy_tokenize_fn;
    const void *tokenize_user_data;
    const char *const *slices;
    const uint32_t *tok_eos_extra;
    uint32_t tok_eos_extra_count;
} nbi_llg_tokenizer_init;

typedef struct nbi_llg_limits {
    size_t max_items_in_row;
    uint64_t initial_lexer_fuel; /* building the expressions; 50k a millisecond */
    uint64_t step_lexer_fuel;    /* one mask; 14k a millisecond */
    size_t step_max_items;       /* one mask; 20k a millisecond */
    size_t max_lexer_states;     /* 1-2 kB each */
    size_t max_grammar_size;     /* symbols */
    bool precompute_large_lexemes;
    bool verbose_errors;
} nbi_llg_limits;

typedef struct nbi_llg_init {
    const nbi_llg_tokenizer *tokenizer;
    uint32_t log_buffer_level, log_stderr_level;
    bool ff_tokens_ok, backtrack_ok;
    nbi_llg_limits limits; /* 0: the library's default */
    char reserved[256];    /* what a later 1.9.x may append; zero */
} nbi_llg_init;

typedef struct nbi_llg {
    const char *(*version)(void);
    nbi_llg_tokenizer *(*new_tokenizer)(const nbi_llg_tokenizer_init *init, char *error, size_t n);
    void (*free_tokenizer)(nbi_llg_tokenizer *tokenizer);
    nbi_llg_matcher *(*new_matcher)(const nbi_llg_init *init, const char *type, const char *data);
    nbi_llg_matcher *(*clone_matcher)(const nbi_llg_matcher *matcher);
    void (*free_matcher)(nbi_llg_matcher *matcher);
    int32_t (*compute_mask)(nbi_llg_matcher *matcher, uint32_t *mask, size_t n_bytes);
    int32_t (*consume)(nbi_llg_matcher *matcher, uint32_t id);
    int32_t (*rollback)(nbi_llg_matcher *matcher, size_t n_tokens);
    bool (*is_accepting)(nbi_llg_matcher *matcher);
    bool (*is_stopped)(const nbi_llg_matcher *matcher);
    bool (*is_error)(const nbi_llg_matcher *matcher);
    const char *(*error)(nbi_llg_matcher *matcher);
} nbi_llg;

/* Loads the library, once per process for each path; it is never unloaded. NB_UNSUPPORTED says how
 * to install it, or why what was found cannot be used. */
nb_status nbi_llg_load(const nbi_llg **out, const char *folder, nb_error *err);

#ifdef __cplusplus
}
#endif
