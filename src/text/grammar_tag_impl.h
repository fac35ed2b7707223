/* What the files of structural tags share: where a format stands, its members, fixed texts, free
 * text. Private to grammar_tag*.c. */
#pragma once

#include "base/json.h"
#include "text/grammar_tag.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A fixed text, or one token. */
typedef struct nbi_tag_mark {
    const char *s;
    size_t n;
    int32_t token; /* -1: the text */
} nbi_tag_mark;

/* What ends the free text within. n 0: the end of the answer. */
typedef struct nbi_tag_ends {
    nbi_tag_mark at[NBI_TAG_ENDS_MAX];
    size_t n;
} nbi_tag_ends;

/* Where a format stands: for sentences. */
typedef struct nbi_tag_place {
    const struct nbi_tag_place *up;
    const char *key;
    size_t index;
    bool in_list;
} nbi_tag_place;

typedef struct nbi_tag_reader {
    nbi_lark lark;
    nbi_grammar_tokens *tokens;
    nb_error *err;
} nbi_tag_reader;

/* What stands before a mark: free text (its expression, as in a terminal), or a rule. */
typedef struct nbi_tag_lead {
    const char *text; /* NULL: the rule */
    uint32_t rule;
} nbi_tag_lead;

nbi_tag_place nbi_tag_member(const nbi_tag_place *up, const char *key);
nbi_tag_place nbi_tag_entry(const nbi_tag_place *up, size_t index);
/* "the structural tag, PLACE: ..." */
nb_status nbi_tag_bad(const nbi_tag_reader *r, const nbi_tag_place *at, nb_status st,
                      const char *fmt, ...) NBI_PRINTF(4, 5);
/* Puts the place before a sentence of others. */
nb_status nbi_tag_placed(const nbi_tag_reader *r, const nbi_tag_place *at, nb_status st);

/* null is the same as absent. */
const json_t *nbi_tag_find(const json_t *obj, const char *key);
/* Refuses members that are not in `known`, words between blanks. */
nb_status nbi_tag_check_members(const nbi_tag_reader *r, const json_t *f, const char *known,
                                const nbi_tag_place *at);
/* An array with 1 to NBI_TAG_LIST_MAX entries. */
nb_status nbi_tag_need_list(const json_t **out, const nbi_tag_reader *r, const json_t *f,
                            const char *key, const nbi_tag_place *at);
nb_status nbi_tag_need_string(nbi_tag_mark *out, const nbi_tag_reader *r, const json_t *value,
                              const nbi_tag_place *at);
nb_status nbi_tag_read_flag(bool *out, const nbi_tag_reader *r, const json_t *f, const char *key,
                            const nbi_tag_place *at);
/* 0 to NBI_LARK_REPEAT_MAX. */
nb_status nbi_tag_read_count(uint32_t *out, const nbi_tag_reader *r, const json_t *f,
                             const char *key, const nbi_tag_place *at);

/* An added token that ends no answer, by id or by its text. */
nb_status nbi_tag_read_token(int32_t *out, const nbi_tag_reader *r, const json_t *value,
                             const nbi_tag_place *at);
bool nbi_tag_is_token_format(const json_t *f);
nb_status nbi_tag_read_token_format(int32_t *out, const nbi_tag_reader *r, const json_t *f,
                                    const nbi_tag_place *at);
/* "exclude_tokens": added ones never come in free text, others cannot be excluded. */
nb_status nbi_tag_check_excluded(const nbi_tag_reader *r, const json_t *f, const nbi_tag_place *at);

nb_status nbi_tag_new(nbi_lark_node **out, nbi_tag_reader *r, nbi_lark_kind kind);
nb_status nbi_tag_token_node(nbi_lark_node **out, nbi_tag_reader *r, int32_t id);
/* Appends a fixed text: letter by letter, or its added tokens by themselves. */
nb_status nbi_tag_add_mark(nbi_lark_node *seq, nbi_tag_reader *r, const nbi_tag_mark *m);
/* What follows the first n bytes of a mark; nothing behind a token. */
nb_status nbi_tag_add_behind(nbi_lark_node *seq, nbi_tag_reader *r, const nbi_tag_mark *m,
                             size_t n);
nb_status nbi_tag_add_rule(nbi_lark_node *seq, nbi_tag_reader *r, uint32_t rule);

/* "excludes" and "max_chars" of a format as the expression of its free text. */
nb_status nbi_tag_read_free(const char **out, nbi_tag_reader *r, const json_t *f,
                            const nbi_tag_place *at);
/* The lead up to a mark, the mark, and the rule `rest`, which may be NULL: one alternative of
 * `choice` for each way to write the mark. */
nb_status nbi_tag_add_ways(nbi_lark_node *choice, nbi_tag_reader *r, const nbi_tag_lead *lead,
                           const nbi_tag_mark *m, const uint32_t *rest);
/* The same by an added token that reaches over the first n_first bytes of the mark and beyond, if
 * there is one. */
nb_status nbi_tag_add_across(nbi_lark_node *choice, nbi_tag_reader *r, const nbi_tag_lead *lead,
                             const nbi_tag_mark *m, size_t n_first, uint32_t rest);
/* The lead up to one of the ends, with it. */
nb_status nbi_tag_until(nbi_lark_node **out, nbi_tag_reader *r, const nbi_tag_lead *lead,
                        const nbi_tag_ends *stop);
/* One of the ends. */
nb_status nbi_tag_any_end(nbi_lark_node **out, nbi_tag_reader *r, const nbi_tag_ends *stop);
/* Free text in which `items` (a choice, each beginning with the text before it) may come: any
 * number of them, or with `once` at most one, which is the end. */
nb_status nbi_tag_region(nbi_lark_node **out, nbi_tag_reader *r, nbi_lark_node *items,
                         const char *text, bool once, const nbi_tag_ends *stop);

/* As in base/status.h. */
#ifdef __clang_analyzer__
#define nbi_tag_bad(r, at, st, ...) (nbi_tag_bad(r, at, st, __VA_ARGS__), (st))
#define nbi_tag_placed(r, at, st)   (nbi_tag_placed(r, at, st), (st))
#endif

#ifdef __cplusplus
}
#endif
