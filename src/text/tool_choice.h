/* The tool part of a request: tools, tool_choice, parallel_tool_calls. Callers: server. */
#pragma once

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_TOOLS_MAX 4096

typedef enum nbi_tool_choice_mode {
    NBI_TOOL_CHOICE_NONE,     /* no tools, or "none": the template sees none, nothing is parsed */
    NBI_TOOL_CHOICE_AUTO,     /* the default with tools */
    NBI_TOOL_CHOICE_REQUIRED, /* at least one call */
    NBI_TOOL_CHOICE_NAMED     /* calls of one function */
} nbi_tool_choice_mode;

typedef struct nbi_tool_choice {
    nbi_tool_choice_mode mode;
    json_t *tools;    /* array with at least one; NULL when there is none. Borrowed from the body */
    const char *name; /* NAMED: borrowed from the body; declared in tools */
    bool parallel;    /* several calls allowed; default true */
} nbi_tool_choice;

/* Reads the members of a request body. Absent and null are the same, an empty tools array is no
 * tools. tool_choice is "auto", "none", "required" or {"type": "function", "function": {"name"}},
 * also {"type": "function", "name"}; "required" and a function need tools, the function has to be
 * one of them. NB_INVALID: the sentence says what was found and expected, and `field` names where,
 * e.g. "tools[1].function.name". */
nb_status nbi_tool_choice_read(nbi_tool_choice *out, const json_t *body, char field[96],
                               nb_error *err);

/* Does the answer have to be the JSON array of calls (form "json" of tool.h) that a grammar
 * enforces? */
bool nbi_tool_choice_is_forced(const nbi_tool_choice *choice);

/* The JSON schema of that array, a new object: objects {"name", "parameters"} of the tools that may
 * be called, at least one, with !parallel exactly one. Definitions that the tools' schemas refer to
 * are kept where their references find them. NULL when out of memory. */
json_t *nbi_tool_choice_schema(const nbi_tool_choice *choice);

#ifdef __cplusplus
}
#endif
