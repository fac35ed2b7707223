/* From the messages of a chat request to prompt ids. Callers: server, `nibble chat`, `nibble
 * tokenize`. */
#pragma once

#include "base/json.h"

#include "text/reasoning.h"
#include "text/template.h"
#include "text/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Brings `messages` (changed in place) into the one form templates are written for:
 *  - every message is an object with a "role" of system, developer, user, assistant, tool or
 * function; developer becomes system, function becomes tool;
 *  - "content" is a string: null or absent becomes "", a list of text parts ({type:
 * text|input_text|output_text, text}, {type: refusal, refusal} or plain strings) becomes its texts
 * joined without anything between; parts of another type are refused;
 *  - "reasoning" is renamed "reasoning_content" unless that is there; null is removed;
 *  - "tool_calls" null or empty is removed; in the others function.arguments given as a JSON string
 * is parsed to an object,
 *    "" and null to {}.
 * NB_INVALID names the place, e.g. "messages[2].tool_calls[0].function.arguments". */
nb_status nbi_chat_normalise(json_t *messages, nb_error *err);

typedef struct nbi_chat_options {
    /* Added tokens spelled in message text, tool declarations and tool results become control
     * tokens. Default false: they are encoded as the text they are, so that a user cannot open a
     * turn. */
    bool parse_special_in_content;
    nbi_reasoning_kind reasoning; /* for thinking_open */
    /* The prompt ends behind the content of the last message, so that the answer goes on with it.
     * NB_INVALID when the template does not show that content. Wants add_generation_prompt false.
     */
    bool continue_final;
    size_t max_ids; /* most tokens, 0: any number */
} nbi_chat_options;

/* Zero before the first use; nbi_chat_prompt_free() after. */
typedef struct nbi_chat_prompt {
    nbi_buf text; /* rendered prompt */
    nbi_ids ids;
    bool thinking_open; /* output begins inside reasoning */
} nbi_chat_prompt;
void nbi_chat_prompt_free(nbi_chat_prompt *prompt);

/* Renders and encodes. `request` (not changed) is an object with
 *   messages (required), tools, documents, add_generation_prompt (default true),
 *   chat_template_kwargs (an object: further variables, they win over the others).
 * Only these members are looked at. On failure *prompt is empty. Statuses of nbi_chat_normalise(),
 * nbi_template_render() and nbi_tokenizer_encode(), but that a bound of rendering is NB_INVALID and
 * not NB_TOO_LARGE.
 *
 * How control words are kept out: before rendering, each added token's text that occurs in a string
 * of the request is replaced by one private-use character that occurs nowhere in request or
 * template; after rendering it is replaced back and its place noted, and no added token is
 * recognised there. Words are added tokens that are special or look like <a tag>; others (GLM's
 * "/nothink") are for users to write. In assistant messages <think> and </think> stay, because
 * templates cut reasoning out of content at them. */
nb_status nbi_chat_encode(nbi_chat_prompt *prompt, const nbi_template *tmpl,
                          const nbi_tokenizer *tokenizer, const json_t *request,
                          const nbi_chat_options *options, nb_error *err);

#ifdef __cplusplus
}
#endif
