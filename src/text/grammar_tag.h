/* Structural tags: free text in which tags with fixed beginnings and ends hold what a schema, an
 * expression or a grammar says. Caller: grammar_source.c.
 *
 * Both forms of SGLang and vLLM: {"structures": [{"begin", "schema", "end"}], "triggers": [...]},
 * and XGrammar's {"format": {...}}, a tree of
 *   const_string {value}              json_schema {json_schema}      regex {pattern}
 *   grammar {grammar}                 any_text {excludes, max_chars} any_tokens
 *   sequence, or {elements}           optional, star, plus {content} repeat {min, max, content}
 *   tag {begin, content, end}         token {token}
 *   triggered_tags {triggers, tags, at_least_one, stop_after_first, excludes}
 *   token_triggered_tags {trigger_tokens, tags, ...}
 *   tags_with_separator {tags, separator, at_least_one, stop_after_first}
 *   dispatch {rules, loop, excludes}  token_dispatch {rules, loop}
 * Whatever else they say is refused by its name, never ignored.
 *
 * What is free (any_text, any_tokens, the triggered and dispatched) goes on to the end of the tag
 * around it, or of the answer, and can be nothing but the last element of a sequence. A trigger or
 * an end counts where it is complete for the first time; so does the end of a tag that holds an
 * expression. Where a fixed text (a trigger, beginning, end, constant) contains the text of an
 * added token of the model (<tool_call>), that token may stand for it; no other added token
 * is possible, and never one that ends the answer. */
#pragma once

#include "base/mem.h"
#include "text/grammar_source.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_TAG_DEPTH_MAX    24u
#define NBI_TAG_ENDS_MAX     8u   /* of one tag */
#define NBI_TAG_LIST_MAX     256u /* tags, triggers, elements of one list */
#define NBI_TAG_EXCLUDES_MAX 16u

/* Appends the Lark grammar of the tag. tokens->own becomes the added tokens that it uses. */
nb_status nbi_grammar_from_tag(nbi_buf *text, const char *source, size_t n,
                               nbi_grammar_tokens *tokens, nb_error *err);

#ifdef __cplusplus
}
#endif
