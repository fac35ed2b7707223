/* The loaded model as the API sees it: engine, names, facts for validation, chat template. Filled
 * once, immutable from then on, shared by all HTTP threads.
 *
 * The text part (nbi_served_text) does not need the engine, so that it can be read while the
 * weights are. */
#pragma once

#include "server/sampling_params.h"
#include "text/chat.h"
#include "text/grammar.h"
#include "text/tool.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_ID_BYTES 33 /* 32 hexadecimal digits and a NUL */

/* Chat: tokenizer and template of a model folder. */
typedef struct nbi_served_text {
    nbi_tokenizer *tokenizer;
    nbi_template *tmpl;
    char why[NB_ERROR_TEXT_MAX]; /* the sentence when there is no chat, else empty */
} nbi_served_text;

/* `template_file` NULL: the checkpoint's. A folder without tokenizer or template is no error (see
 * `why`); one that cannot be read is. Starts the interpreter of the templates in the background. */
nb_status nbi_served_text_open(nbi_served_text *out, const char *model_dir,
                               const char *template_file, nb_error *err);
void nbi_served_text_close(nbi_served_text *text);

typedef enum nbi_grammar_backend {
    NBI_GRAMMAR_BACKEND_AUTO,       /* llguidance when it is installed */
    NBI_GRAMMAR_BACKEND_LLGUIDANCE, /* and not to start without it */
    NBI_GRAMMAR_BACKEND_NONE
} nbi_grammar_backend;

/* NULL is "auto". The names of other servers' libraries mean the same, with a line in the log. */
nb_status nbi_grammar_backend_read(nbi_grammar_backend *out, const char *name, nb_error *err);

typedef struct nbi_served_options {
    const char *const *names; /* [n_names]; none: the name of the model's folder */
    uint32_t n_names;
    const char *reasoning_parser; /* "auto", "none" or a parser's name */
    const char *tool_parser;      /* the same */
    const char *grammar_backend;  /* a name of nbi_grammar_backend_read() */
} nbi_served_options;

typedef struct nbi_served {
    nb_engine *engine; /* borrowed */
    nb_engine_info info;
    nbi_api_facts facts;
    nbi_served_text text;
    nbi_reasoning_kind reasoning;
    nbi_tool_form tool_form;
    nbi_grammar_compiler *grammars; /* NULL: see no_grammars */
    const char *no_grammars;        /* the sentence why not; static */
    int64_t created;                /* seconds since 1970 when it became ready */
    uint64_t id_key;
    uint32_t request_timeout_ms; /* 0: none */
    uint32_t stream_interval;    /* tokens per event of a stream; 0: 1 */
    bool trust_templates;        /* of requests */
    bool keep_text;              /* jobs keep the text of their answers for the log */
    const char **names;
    char *architectures; /* of config.json, a JSON list; NULL: none */
} nbi_served;

/* Takes *text, also on failure. */
nb_status nbi_served_create(nbi_served **out, nb_engine *engine, nbi_served_text *text,
                            const nbi_served_options *options, nb_error *err);
void nbi_served_destroy(nbi_served **served);

/* The error about a prompt that was not encoded to its end; err: how far it was. */
nb_status nbi_served_too_long(const nbi_served *served, const nb_error *err, const char *field,
                              nbi_api_error *e);

/* Renders and encodes a chat request (messages.h). `field` is what errors of the template name.
 * *prompt is freed by nbi_chat_prompt_free(). */
nb_status nbi_served_encode_chat(const nbi_served *served, const json_t *request, const char *field,
                                 size_t max_ids, nbi_chat_prompt *prompt, nbi_api_error *e);

/* A new identity for a request. */
void nbi_served_next_id(const nbi_served *served, char out[NBI_ID_BYTES]);

/* The parser of a model family: what "auto" means. */
nbi_reasoning_kind nbi_reasoning_of_family(const char *family);
/* The same for tool calls. A template that shows a form wins over the family; it may be NULL. */
nbi_tool_form nbi_tool_form_of_family(const char *family, const char *template_source);

#ifdef __cplusplus
}
#endif
