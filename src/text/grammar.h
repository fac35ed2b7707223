/* Grammars over the tokens of an answer: JSON, JSON Schema, regular expressions, lists of choices,
 * EBNF, structural tags, as the masks of nb_grammar. Callers: server.
 *
 * The work is done by llguidance (an optional package, see grammar_library.h); without it compiling
 * is NB_UNSUPPORTED with a sentence that says how to install it.
 *
 * Rules:
 *  - An end token (EOS) is allowed exactly when the text so far is complete. When nothing can
 * follow it is all that is allowed.
 *  - Added tokens (<think>, <tool_call>, <|user|>, ...) are never allowed inside a grammar, but for
 *    those that the fixed texts of a structural tag contain: such a token neither opens reasoning
 *    nor a call, and reasoning cannot have it.
 *  - `while thinking` (nbi_grammar_options.after_think) everything is allowed but the end tokens
 * and the tokens of `banned`; the grammar begins behind the token that closes reasoning.
 *  - With may_think the first token may be the one that opens reasoning; with may_call the
 * grammar's first token, or one of the thinking, may be the one that opens a tool call: behind it
 *    everything is allowed.
 *  - JSON: at most NBI_GRAMMAR_SPACE_MAX characters of white space between two tokens of the
 *    language (none in the tight kind), none before the first. Properties come in the order of the
 * schema.
 *  - Regular expressions match the whole answer; the dialect is that of Rust's `regex` (no
 * look-around, no back-references).
 *  - Should a step exceed the library's bounds, or the text run into a dead end, the answer ends
 *    there and nbi_grammar_failure() says why. A bound that is exceeded while drafts are tried
 *    counts, although the drafts are taken back.
 *
 * Bounds of what a client may send: NBI_GRAMMAR_*_MAX below, the library's own limits on work per
 * compilation and per mask, and NBI_GRAMMAR_SECONDS of processor time (five times as much of the
 * clock on the wall, which is also how long an order waits for its turn), after which an order is
 * refused. What was compiled is kept (the least recently used goes first), refusals too; the same
 * source ordered several times at once is compiled once.
 *
 * Threads: a compiler is used by any number of threads, and starts its own with the first orders.
 * mask, accept and rollback of one grammar
 * are called by one thread at a time; nothing in them touches nibble's heap. */
#pragma once

#include "base/status.h"
#include "text/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_GRAMMAR_SECONDS      2
#define NBI_GRAMMAR_SOURCE_MAX   ((size_t)256 << 10) /* bytes of a schema, grammar, list */
#define NBI_GRAMMAR_REGEX_MAX    ((size_t)16 << 10)  /* bytes of one expression */
#define NBI_GRAMMAR_CHOICES_MAX  4096u
#define NBI_GRAMMAR_SPACE_MAX    32
#define NBI_GRAMMAR_CACHED_MAX   32u /* compiled grammars kept */
#define NBI_GRAMMAR_COMPILES_MAX 4u  /* at once, as many threads; more wait */
#define NBI_GRAMMAR_ORDERS_MAX   256 /* at once */
#define NBI_GRAMMAR_BANNED_MAX   8u
#define NBI_GRAMMAR_OWN_MAX      32u /* added tokens in a structural tag */

typedef enum nbi_grammar_kind {
    NBI_GRAMMAR_JSON_OBJECT, /* any JSON object; no source */
    NBI_GRAMMAR_JSON_SCHEMA, /* source: the schema, a JSON object or boolean */
    NBI_GRAMMAR_JSON_TIGHT,  /* the same without white space between tokens of the language */
    NBI_GRAMMAR_JSON_SPACED, /* source: {"chars", "most", "schema"}: at most so many of these
                                characters between two tokens of the language */
    NBI_GRAMMAR_REGEX,       /* source: the expression */
    NBI_GRAMMAR_CHOICE,      /* source: JSON list of strings */
    NBI_GRAMMAR_EBNF, /* source: rules `name ::= ...` with `root`, or a Lark grammar with `start` */
    NBI_GRAMMAR_TAG,  /* source: a structural tag (grammar_tag.h) */
    NBI_GRAMMAR_KIND_COUNT
} nbi_grammar_kind;

typedef struct nbi_grammar_compiler nbi_grammar_compiler;
typedef struct nbi_grammar nbi_grammar; /* of one request */

typedef struct nbi_grammar_setup {
    const nbi_tokenizer *tokenizer; /* must outlive the compiler */
    const int32_t *eos;             /* [n_eos] ids that end an answer; copied */
    uint32_t n_eos;                 /* >= 1 */
    uint32_t vocab;                 /* ids the model has logits for; 0: nbi_tokenizer_size() */
    const char *folder; /* where the package lies; NULL: looked for (grammar_library.h) */
} nbi_grammar_setup;

/* Fast: the library is loaded by the first compilation, or by nbi_grammar_compiler_load(). */
nb_status nbi_grammar_compiler_open(nbi_grammar_compiler **out, const nbi_grammar_setup *setup,
                                    nb_error *err);
/* Loads the library and gives it the vocabulary (about half a second for 150k tokens). Done once;
 * later calls repeat the answer. NB_UNSUPPORTED: not installed, or a version that nibble does not
 * know. */
nb_status nbi_grammar_compiler_load(nbi_grammar_compiler *compiler, nb_error *err);
/* After all orders are closed; waits for what is being compiled, which is bounded. Grammars made
 * with it live on; the tokenizer need not. */
void nbi_grammar_compiler_close(nbi_grammar_compiler **compiler);

typedef struct nbi_grammar_options {
    int32_t after_think;                    /* the grammar begins behind this token; -1: at once */
    int32_t banned[NBI_GRAMMAR_BANNED_MAX]; /* not allowed before it (<tool_call>) */
    uint32_t n_banned;
    bool may_think;      /* the grammar begins at once, unless the first token is think_begin: then
                            behind after_think */
    int32_t think_begin; /* with may_think */
    bool may_call;
    int32_t call_begin; /* with may_call */
} nbi_grammar_options;

/* `options` NULL: the grammar begins at once. An order and the wait for it.
 * NB_INVALID: not valid, or nothing can match. NB_UNSUPPORTED: no library, or a keyword that is not
 * supported, by name. NB_TOO_LARGE: a bound. NB_BUSY: too many others compile. The sentences say
 * "the schema", "the expression", ...: the caller puts the field's name before them. */
nb_status nbi_grammar_compile(nbi_grammar **out, nbi_grammar_compiler *compiler,
                              nbi_grammar_kind kind, const char *source, size_t n,
                              const nbi_grammar_options *options, nb_error *err);
/* The same from what is kept, without waiting. *known false: it is not kept. */
nb_status nbi_grammar_recall(nbi_grammar **out, bool *known, nbi_grammar_compiler *compiler,
                             nbi_grammar_kind kind, const char *source, size_t n,
                             const nbi_grammar_options *options, nb_error *err);
void nbi_grammar_close(nbi_grammar **grammar);

/* ---- orders, of callers that must not wait. Each is used by one thread at a time. */
typedef struct nbi_grammar_order nbi_grammar_order;

/* Orders n_grammars grammars of one source, which is copied. `notify` (may be NULL) comes from any
 * thread when it is done; it must not block, and must not open or close orders. NB_BUSY: too many.
 */
nb_status nbi_grammar_order_open(nbi_grammar_order **out, nbi_grammar_compiler *compiler,
                                 nbi_grammar_kind kind, const char *source, size_t n,
                                 const nbi_grammar_options *options, uint32_t n_grammars,
                                 void (*notify)(void *user), void *user, nb_error *err);
bool nbi_grammar_order_is_done(nbi_grammar_order *order);
/* What a done order came to: grammars[n_grammars], the caller's from then on, or the statuses of
 * nbi_grammar_compile(). Once. */
nb_status nbi_grammar_order_take(nbi_grammar_order *order, nbi_grammar **grammars, nb_error *err);
/* At any time; no notify comes after it. */
void nbi_grammar_order_close(nbi_grammar_order **order);
/* Ends the orders whose time is over. To be called about once a second while there are any. */
void nbi_grammar_look_at_clock(nbi_grammar_compiler *compiler);

/* For nb_request_options.grammar. After a submission that succeeded nbi_grammar_retain() has to
 * follow: the engine then shares the grammar, and its release closes it once more. */
nb_grammar nbi_grammar_hooks(nbi_grammar *grammar);
void nbi_grammar_retain(nbi_grammar *grammar);

/* Is the text complete? False while thinking. Same thread rule as mask. */
bool nbi_grammar_complete(nbi_grammar *grammar);
/* Why the answer was ended early, NULL when it was not. Any thread; lives as long as the grammar.
 */
const char *nbi_grammar_failure(const nbi_grammar *grammar);

#ifdef __cplusplus
}
#endif
