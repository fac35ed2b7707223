/* Chat templates: Jinja2's immutable sandbox in an embedded CPython. Callers: chat.c, server, CLI.
 *
 * The environment is that of transformers: trim_blocks, lstrip_blocks, loop controls, {% generation
 * %} blocks, tojson without HTML escapes, raise_exception(), strftime_now(); the special tokens of
 * tokenizer_config.json (bos_token, ...) are variables.
 *
 * Python lives in one thread of its own, started by the first render or by nbi_template_warm();
 * nothing else in nibble touches it. It is the distribution's interpreter with an isolated
 * configuration: no environment variables, no user site, no signal handlers. Renders run one after
 * another. Each is bounded: NBI_TEMPLATE_SECONDS, NBI_TEMPLATE_HEAP_BYTES of Python heap,
 * NBI_TEMPLATE_OUTPUT_BYTES of text, and the sandbox's limits on range() and **. A single built-in
 * operation cannot be interrupted, but the heap bound keeps it short.
 *
 * Built without Python, everything here but opening and closing returns NB_UNSUPPORTED. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_TEMPLATE_SECONDS      2  /* of a processor */
#define NBI_TEMPLATE_WALL_SECONDS 10 /* in all, on a busy machine */
#define NBI_TEMPLATE_HEAP_BYTES   ((size_t)256 << 20)
#define NBI_TEMPLATE_OUTPUT_BYTES ((size_t)64 << 20)

typedef struct nbi_template nbi_template; /* immutable, shared by threads */

/* From dir/chat_template.jinja, else dir/tokenizer_config.json "chat_template" (a string, or a list
 * of {name, template}: then "default", and "tool_use" for requests with tools). NB_NOT_FOUND when
 * the folder has none. Does not start Python. */
nb_status nbi_template_open(nbi_template **out, const char *dir, nb_error *err);

/* From memory. `variables` is a JSON object of variables for every render, or NULL. */
nb_status nbi_template_create(nbi_template **out, const char *source, size_t n,
                              const char *variables, nb_error *err);
void nbi_template_close(nbi_template **tmpl);

/* The template's text, for requests with tools if `tools`. */
const char *nbi_template_source(const nbi_template *tmpl, bool tools);

/* Its variables, a JSON object as for nbi_template_create(). */
const char *nbi_template_variables(const nbi_template *tmpl);

/* Starts Python, imports Jinja2 and compiles the template, in the background. Returns at once;
 * never fails. NULL: no template to compile. */
void nbi_template_warm(const nbi_template *tmpl);

/* Renders with the members of the JSON object `context[0..n)` as variables; appends to *text. Any
 * thread. NB_INVALID: the template raised an error or does not compile, with its message.
 * NB_TOO_LARGE: a bound was reached. NB_UNSUPPORTED: no Python or no Jinja2, with what to install.
 */
nb_status nbi_template_render(const nbi_template *tmpl, const char *context, size_t n,
                              nbi_buf *text, nb_error *err);

/* Ends the thread of Python after the jobs it has; no render may run or follow. False: it was not
 * done after wait_ms. Before the process calls exit(): what Python has loaded (OpenSSL, through
 * hashlib) takes itself down in there, and must not be in use meanwhile. */
bool nbi_template_stop(uint32_t wait_ms);

/* ---- between template.c and template_python.c */

/* One text: what the Python side needs to know. `id` is never used twice in a process. */
typedef struct nbi_template_text {
    uint64_t id;
    const char *source;
    size_t n_source;
    const char *variables; /* JSON object */
} nbi_template_text;

nb_status nbi_python_render(const nbi_template_text *text, const char *context, size_t n,
                            nbi_buf *out, nb_error *err);
void nbi_python_warm(
    const nbi_template_text *text); /* may outlive the call: copies what it needs */
void nbi_python_forget(uint64_t id);
bool nbi_python_stop(uint32_t wait_ms);

#ifdef __cplusplus
}
#endif
