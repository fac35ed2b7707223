/* A grammar as a tree of nodes, written in the library's Lark dialect. Private to
 * src/text/grammar*.c: grammar_ebnf.c and grammar_tag.c make the trees.
 *
 * The library splits text into lexemes, longest first, which is not what rules mean. So whatever
 * does not depend on recursion, on JSON or on single tokens (it is regular) becomes one lexeme: a
 * rule that reaches no cycle is a terminal, and inside the other rules the longest runs of such
 * items are. Names are numbers: Lark tells rules and terminals apart by their case. */
#pragma once

#include "base/mem.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_LARK_RULES_MAX  512u
#define NBI_LARK_REPEAT_MAX 100000u
#define NBI_LARK_NO_MAX     UINT32_MAX

typedef enum nbi_lark_kind {
    NBI_LARK_TEXT, /* a regular expression, or an expression over such */
    NBI_LARK_RULE,
    NBI_LARK_SEQUENCE, /* without children: nothing */
    NBI_LARK_CHOICE,
    NBI_LARK_REPEAT,
    NBI_LARK_LAZY, /* one child, which is regular: ends with its first match */
    NBI_LARK_JSON, /* a value that fits a schema */
    NBI_LARK_TOKEN /* one token of the vocabulary, by id */
} nbi_lark_kind;

typedef struct nbi_lark_node {
    nbi_lark_kind kind;
    struct nbi_lark_node *next;          /* among its parent's children */
    struct nbi_lark_node *first, **last; /* children */
    const char *text;  /* TEXT: as it stands in a terminal, with its slashes; JSON: the schema */
    uint32_t id;       /* RULE: of the rule; TOKEN: of the token */
    uint32_t min, max; /* REPEAT; NBI_LARK_NO_MAX: no end */
} nbi_lark_node;

typedef struct nbi_lark_rule {
    nbi_lark_node *body;
    bool regular;
} nbi_lark_rule;

/* Zeroed but for arena.max_bytes before nbi_lark_init(). Nodes live as long as it does. */
typedef struct nbi_lark {
    nbi_arena arena;
    nbi_lark_rule *rules; /* [NBI_LARK_RULES_MAX] */
    uint32_t n_rules, n_terminals;
    nbi_buf terminals; /* lines for terminals made of parts of rules */
    nb_error *err;     /* of all calls; sentences begin with "the grammar" */
} nbi_lark;

nb_status nbi_lark_init(nbi_lark *l, nb_error *err);
void nbi_lark_deinit(nbi_lark *l);

nb_status nbi_lark_no_memory(nbi_lark *l);
nb_status nbi_lark_new(nbi_lark_node **out, nbi_lark *l, nbi_lark_kind kind);
/* Children are added while a tree is built: a node has one parent. */
void nbi_lark_add(nbi_lark_node *parent, nbi_lark_node *child);
/* TEXT; `text` is copied. */
nb_status nbi_lark_text(nbi_lark_node **out, nbi_lark *l, const char *text, size_t n);
/* The bytes s[0..n) and nothing else: TEXT, or the empty sequence. */
nb_status nbi_lark_literal(nbi_lark_node **out, nbi_lark *l, const char *s, size_t n);
nb_status nbi_lark_repeat(nbi_lark_node **out, nbi_lark *l, nbi_lark_node *child, uint32_t min,
                          uint32_t max);
/* A rule of its own, so that a node may be referred to several times. */
nb_status nbi_lark_new_rule(uint32_t *out, nbi_lark *l);
nb_status nbi_lark_ref(nbi_lark_node **out, nbi_lark *l, uint32_t rule);

/* Which of the rules from `first` on reach no cycle. They have bodies and refer to earlier ones,
 * of which it is known, and to each other. */
void nbi_lark_find_regular(nbi_lark *l, uint32_t first);
bool nbi_lark_is_regular(const nbi_lark *l, const nbi_lark_node *node);

/* Appends the whole grammar; what `start` matches is its language. */
nb_status nbi_lark_write(nbi_buf *out, nbi_lark *l, const nbi_lark_node *start);

/* As in base/status.h. */
#ifdef __clang_analyzer__
#define nbi_lark_no_memory(l) (nbi_lark_no_memory(l), NB_NO_MEMORY)
#endif

#ifdef __cplusplus
}
#endif
