/* Structured output: the fields of a request that constrain its answer, read and checked. Callers:
 * the surfaces. Pure: nothing is compiled here.
 *
 *   response_format          {"type": "text" | "json_object" | "json_schema", "json_schema":
 *                            {"name", "schema", "strict"}} (OpenAI)
 *   json_schema, regex, ebnf (SGLang; a schema may be text or JSON)
 *   guided_json, guided_regex, guided_choice, guided_grammar (vLLM, older)
 *   structured_outputs       {"json", "regex", "choice", "grammar", "json_object"} (vLLM)
 *
 * At most one of them may ask for something. A schema always binds: "strict": false is no licence.
 */
#pragma once

#include "server/fields.h"
#include "text/grammar.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the whole answer (behind the thinking) has to match. Strings live in the job's arena. */
typedef struct nbi_constraint {
    const char *field; /* of the request that asks for it; NULL: no constraint */
    nbi_grammar_kind kind;
    const char *source; /* [n_source] */
    size_t n_source;
} nbi_constraint;

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
