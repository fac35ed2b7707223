/* Model output and what has to come of it, for the tool-call parsers. Used by their unit test. */
#pragma once

#include "text/tool.h"

typedef struct tool_case {
    nbi_tool_form form;
    bool cut;         /* ended by the length limit instead of the model */
    const char *text; /* model output */
    const char *want; /* content, then per call " [NAME ARGUMENTS]", with "..." when not complete */
} tool_case;

/* The tools of the request, as JSON. */
extern const char tool_corpus_tools[];
extern const tool_case tool_corpus[];
extern const size_t n_tool_corpus;
