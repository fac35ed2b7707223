/* What a request's tools say about their parameters. Callers: the tool-call parsers, tool choice.
 *
 * A tool is {"type": "function", "function": {"name", "parameters"}}, or flat {"name",
 * "parameters" | "input_schema"}. Schemas come from clients: every walk has a bounded number of
 * steps. */
#pragma once

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The object that holds name and parameters; NULL when the tool is none. Borrowed. */
const json_t *nbi_tool_function(const json_t *tool);
/* NULL when there is none. Borrowed. */
const char *nbi_tool_name(const json_t *tool);
/* The schema of all parameters, NULL when there is none. Borrowed. */
const json_t *nbi_tool_parameters(const json_t *tool);
/* The first tool of that name, NULL when there is none. Borrowed. */
const json_t *nbi_tool_find(const json_t *tools, const char *name, size_t n);

/* The kinds (NBI_TOOL_STRING, ... of tool_json.h, joined) that the schema of parameter `key`
 * allows; 0 when nothing is said, which means every kind. Read are type (one name or several),
 * enum, const, anyOf, oneOf, allOf, nullable, $ref into the same schema, and where those are silent
 * the keywords that belong to one kind (properties, items, ...). `tool` may be NULL. */
unsigned nbi_tool_kinds(const json_t *tool, const char *key, size_t n);

#ifdef __cplusplus
}
#endif
