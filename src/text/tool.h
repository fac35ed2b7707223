/* Tool calls in model output: content and calls told apart while the text streams. Callers: server,
 * chat.
 *
 * Forms:
 *   glm45, glm47  <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>; white
 *                 space (the newlines of 4.5 and 4.6) may stand between the parts
 *   hermes        <tool_call>{"name": NAME, "arguments": {...}}</tool_call> (Qwen 2.5, Qwen 3)
 *   deepseekv3    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, a newline
 * and the arguments in a ```json fence, <｜tool▁call▁end｜>...<｜tool▁calls▁end｜> deepseekv31
 * <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>... Both
 * kinds take both shapes; the outer pair of tags may be missing. deepseekv32
 * <｜DSML｜function_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="K"
 *                 string="true|false">V</｜DSML｜parameter>...</｜DSML｜invoke>...; the outer tag
 * may be missing or tool_calls (V4); the body of an invoke may be a JSON object json [{"name":
 * NAME, "parameters": {...}}, ...] from the first byte on: what a grammar makes of tool_choice
 * "required" or a named function
 *
 * Rules:
 *  - The same text gives the same content, calls and arguments however it is cut, streamed or
 *    whole.
 *  - Calls are numbered from 0 in the order of the text. The fragments of a call's arguments joined
 *    are one valid JSON object without repeated keys, always: {} when there are none.
 *  - A call begins when its name is complete. A name that the tools do not declare makes a call
 *    too, unless options.undeclared says content; it then has to look like a name (no white space,
 *    quotes, brackets).
 *  - What is not a call in the form above is content, byte for byte, tags included. That holds
 *    inside a call for parts that do not belong (an <arg_value> without key, a key given twice) and
 *    for what stands behind the point where JSON arguments break; such a call is closed there and
 *    is not `complete`. White space that touches a call (up to 256 bytes on each side) is dropped.
 *  - Types in the tagged forms come from the declared schema. A string is the text as it stands,
 *    never trimmed, whatever it looks like. Other kinds are read as JSON (Python's True, None and
 *    single quotes too; a quoted value is unquoted); null is always taken; text that is not of the
 *    declared kind falls back to a string. Where string and other kinds are allowed, the text is
 *    the string unless all of it is an object, array or null that is allowed. Where nothing is
 *    declared, JSON is taken as JSON and everything else as a string. string="true" of DSML
 *    overrides the schema, string="false" asks for JSON first.
 *  - String values are given out as they come. Other values are held until complete; one longer
 *    than options.max_held bytes is given as a string instead. The same bound holds for a call
 *    whose name comes behind its arguments; beyond it is content.
 *  - A parser holds at most about twice options.max_held, 3 MiB more for keys of arguments, and
 *    the text of one push.
 *  - Output that ends inside a call: what exists is closed to valid JSON and the call is not
 *    `complete`. When the model stopped by itself, a last value without its end tag counts and
 *    other rests are content. When it was cut off, a number, literal, key or tag that is cut is
 *    left out. */
#pragma once

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nbi_tool_form {
    NBI_TOOL_FORM_NONE, /* all is content */
    NBI_TOOL_FORM_GLM,
    NBI_TOOL_FORM_HERMES,
    NBI_TOOL_FORM_DEEPSEEK, /* V3, V3.1 */
    NBI_TOOL_FORM_DSML,     /* DeepSeek V3.2, V4 */
    NBI_TOOL_FORM_JSON,
    NBI_TOOL_FORM_COUNT
} nbi_tool_form;

/* From the names that users of SGLang and vLLM type for --tool-call-parser: none; glm, glm45,
 * glm47, glm5, glm4_moe; hermes, qwen, qwen25, qwen3; deepseekv3, deepseekv31, deepseekv32,
 * deepseekv4, and these with an underscore behind "deepseek"; json. NB_INVALID lists them. */
nb_status nbi_tool_form_by_name(nbi_tool_form *out, const char *name, nb_error *err);

typedef enum nbi_tool_undeclared {
    NBI_TOOL_UNDECLARED_CALL,   /* a name that no tool has is a call all the same */
    NBI_TOOL_UNDECLARED_CONTENT /* it is content */
} nbi_tool_undeclared;

/* Zeroed is the default. */
typedef struct nbi_tool_options {
    nbi_tool_undeclared undeclared;
    uint32_t max_calls; /* calls beyond are content; 0: no limit. 1 for parallel_tool_calls false */
    size_t max_held;    /* bytes; 0 means NBI_TOOL_HELD_DEFAULT */
} nbi_tool_options;
#define NBI_TOOL_HELD_DEFAULT ((size_t)1 << 20)

typedef enum nbi_tool_item_kind {
    NBI_TOOL_CONTENT, /* text */
    NBI_TOOL_BEGIN,   /* text is the name */
    NBI_TOOL_ARGS,    /* text is a fragment of the arguments */
    NBI_TOOL_END
} nbi_tool_item_kind;

#define NBI_TOOL_ID_SIZE 30 /* "call_", 24 hex digits, NUL */

/* Every BEGIN has its ARGS (at least one) and END before the next BEGIN; CONTENT may stand
 * anywhere. */
typedef struct nbi_tool_item {
    nbi_tool_item_kind kind;
    bool complete;             /* END: the call was whole and well-formed */
    uint32_t call;             /* BEGIN, ARGS, END: ordinal of the call */
    const char *text;          /* NUL-terminated only for BEGIN */
    size_t n;                  /* >= 1 except for END */
    char id[NBI_TOOL_ID_SIZE]; /* BEGIN */
} nbi_tool_item;

typedef struct nbi_tool_parser nbi_tool_parser;

/* `tools` is the array of the request (its reference count is raised, it is only read), or NULL. */
nb_status nbi_tool_parser_create(nbi_tool_parser **out, nbi_tool_form form, json_t *tools,
                                 const nbi_tool_options *options, nb_error *err);
void nbi_tool_parser_destroy(nbi_tool_parser **parser);

/* Adds text; *items are *n_items items, valid until the next call. Work is proportional to the text
 * pushed, save that up to about 2 KiB that are held may be looked at again. NB_NO_MEMORY: the
 * parser is then of no more use. */
nb_status nbi_tool_parser_push(nbi_tool_parser *parser, const char *text, size_t n,
                               const nbi_tool_item **items, size_t *n_items, nb_error *err);

/* End of output. `stopped`: the model stopped by itself (not length, abort or error). Nothing may
 * be pushed behind it. */
nb_status nbi_tool_parser_finish(nbi_tool_parser *parser, bool stopped, const nbi_tool_item **items,
                                 size_t *n_items, nb_error *err);

/* Calls begun so far. A finish reason "stop" becomes "tool_calls" when it is not 0. */
uint32_t nbi_tool_parser_calls(const nbi_tool_parser *parser);

/* ---------------------------------------------------------------- whole answers */

typedef struct nbi_tool_call {
    char id[NBI_TOOL_ID_SIZE];
    bool complete;
    char *name;
    nbi_buf arguments; /* JSON */
} nbi_tool_call;

/* Zeroed is empty. */
typedef struct nbi_tool_answer {
    nbi_buf content; /* data is NULL when there is none */
    nbi_tool_call *calls;
    size_t n_calls, cap_calls;
} nbi_tool_answer;

/* Appends what items say. */
nb_status nbi_tool_answer_add(nbi_tool_answer *answer, const nbi_tool_item *items, size_t n_items,
                              nb_error *err);
void nbi_tool_answer_free(nbi_tool_answer *answer);

/* A whole text at once; *answer was zeroed, and is released by the caller also on failure. */
nb_status nbi_tool_parse(nbi_tool_answer *answer, nbi_tool_form form, json_t *tools,
                         const nbi_tool_options *options, const char *text, size_t n, bool stopped,
                         nb_error *err);

/* A new random id: "call_" and 24 hexadecimal digits. */
void nbi_tool_call_id(char out[NBI_TOOL_ID_SIZE]);

#ifdef __cplusplus
}
#endif
