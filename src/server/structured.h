/* Structured output: the fields of a request that constrain its answer, read and checked. Callers:
 * the surfaces. Pure: nothing is compiled here.
 *
 *   response_format          {"type": "text" | "json_object" | "json_schema", "json_schema":
 *                            {"name", "schema", "strict"}} (OpenAI), {"type": "structural_tag",
 *                            ...} (SGLang, vLLM)
 *   json_schema, regex, ebnf, structural_tag (SGLang; schema and tag may be text or JSON)
 *   guided_json, guided_regex, guided_choice, guided_grammar (vLLM, older)
 *   structured_outputs       {"json", "regex", "choice", "grammar", "json_object",
 *                            "structural_tag"} (vLLM)
 *
 * At most one of them may ask for something. A schema always binds: "strict": false is no licence.
 */
#pragma once

#include "server/fields.h"
#include "text/grammar.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How JSON is written, and how schemas are read:
 *   structured_outputs       {"disable_any_whitespace", "whitespace_pattern",
 *                            "disable_additional_properties"} (vLLM)
 *   guided_whitespace_pattern (vLLM, older)
 * A pattern is one character of white space or a class of them, and how often at most: "[ \\n]?",
 * "\\s{0,4}", " *" (which is NBI_GRAMMAR_SPACE_MAX times), "" (never). */
typedef struct nbi_json_style {
    bool spaced;   /* white space is these characters, at most so many: */
    char chars[5]; /* of " \t\n\r" */
    uint32_t most;
    bool closed; /* objects have no properties but those that a schema names, unless it says so */
} nbi_json_style;

/* What the whole answer (behind the thinking) has to match. Strings live in the job's arena. */
typedef struct nbi_constraint {
    const char *field; /* of the request that asks for it; NULL: no constraint */
    nbi_grammar_kind kind;
    const char *source; /* [n_source] */
    size_t n_source;
    nbi_json_style style; /* in the source already */
} nbi_constraint;

/* ---- json_style.c, for structured.c */

/* `given`: the member structured_outputs of `obj`, or NULL; `inner` stands before its members. */
nb_status nbi_json_style_read(nbi_json_style *out, const json_t *obj, const char *prefix,
                              const json_t *given, const char *inner, nbi_api_error *e);
/* Changes a constraint that is JSON. A schema that cannot be read is left as it is: its compilation
 * says why. NB_NO_MEMORY. */
nb_status nbi_json_style_apply(nbi_constraint *c, nbi_arena *arena);

/* ---- structured.c */

/* Reads the fields above from `obj`; `prefix` stands before their names in errors ("" for a body,
 * "sampling_params." for SGLang's /generate). *out is overwritten. 400 names the field; two that
 * contradict each other are both named. */
nb_status nbi_structured_read(nbi_constraint *out, nbi_arena *arena, const json_t *obj,
                              const char *prefix, nbi_api_error *e);

/* Adds what a format says that stands alone and flat, {"type", "schema", ...}: `text.format` of
 * the Responses API, `output_config.format` of Anthropic's. NULL adds nothing. */
nb_status nbi_structured_add_format(nbi_constraint *out, nbi_arena *arena, const json_t *format,
                                    const char *place, nbi_api_error *e);

#ifdef __cplusplus
}
#endif
