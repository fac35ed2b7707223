/* The model as the API sees it. Called by server.c and the surfaces; the text part by `nibble chat`
 * too. */
#include "server/served.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"

#define TEMPLATE_BYTES_MAX ((size_t)16 << 20)

/* ---------------------------------------------------------------- text */

/* A template of the user's own still has the special tokens of the checkpoint as variables only
 * when it does not name them: such templates write them out. */
static nb_status open_template_file(nbi_template **out, const char *path, nb_error *err)
{
    char *source = NULL;
    size_t n = 0;
    NB_TRY(nbi_file_read(&source, &n, path, TEMPLATE_BYTES_MAX, err));
    nb_status status = nbi_template_create(out, source, n, NULL, err);
    nbi_free(source);
    return status == NB_OK ? NB_OK : nbi_fail_prefix(err, status, "--chat-template %s", path);
}

static nb_status open_template(nbi_template **out, const char *model_dir, const char *file,
                               nb_error *err)
{
    return file ? open_template_file(out, file, err) : nbi_template_open(out, model_dir, err);
}

nb_status nbi_served_text_open(nbi_served_text *out, const char *model_dir,
                               const char *template_file, nb_error *err)
{
    nbi_served_text text = {0};
    nb_error why = {0};
    nb_status status = open_template(&text.tmpl, model_dir, template_file, &why);
    if (status == NB_OK) {
        nbi_template_warm(text.tmpl);
        status = nbi_tokenizer_open(&text.tokenizer, model_dir, &why);
    }
    if (status != NB_OK) {
        nbi_served_text_close(&text);
        if (status != NB_NOT_FOUND || template_file) {
            if (err) *err = why;
            return status;
        }
        snprintf(text.why, sizeof text.why, "%s", why.text);
    }
    *out = text;
    return NB_OK;
}

void nbi_served_text_close(nbi_served_text *text)
{
    nbi_template_close(&text->tmpl);
    nbi_tokenizer_close(&text->tokenizer);
}

nb_status nbi_served_too_long(const nbi_served *served, const nb_error *err, const char *field,
                              nbi_api_error *e)
{
    return nbi_api_fail(e, 400, "context_length_exceeded", field, "%s: %s; the context holds %u",
                        field, err->text, served->facts.max_context);
}

/* The request's own template; *out stays NULL without one. */
static nb_status open_own_template(nbi_template **out, const nbi_served *served,
                                   const json_t *request, nbi_api_error *e)
{
    const char *source = json_string_value(json_object_get(request, "chat_template"));
    nb_error err = {0};
    if (!source) return NB_OK;
    if (!served->trust_templates) {
        return nbi_api_field(e, "chat_template",
                             "templates of clients are not taken by this server "
                             "(--trust-request-chat-template)");
    }
    nb_status status = nbi_template_create(out, source, strlen(source),
                                           nbi_template_variables(served->text.tmpl), &err);
    return status == NB_OK ? NB_OK : nbi_api_from(e, status, &err, "chat_template");
}

/* Documents that the template does not look at would be left out without a word. */
static nb_status check_documents(const nbi_template *tmpl, const json_t *request, nbi_api_error *e)
{
    bool tools = json_array_size(json_object_get(request, "tools")) > 0;
    if (!json_array_size(json_object_get(request, "documents"))) return NB_OK;
    if (strstr(nbi_template_source(tmpl, tools), "documents")) return NB_OK;
    return nbi_api_field(e, "documents", "the chat template does not show documents");
}

static nb_status encode_chat(const nbi_served *served, const nbi_template *tmpl,
                             const json_t *request, const char *field, size_t max_ids,
                             nbi_chat_prompt *prompt, nbi_api_error *e)
{
    NB_TRY(check_documents(tmpl, request, e));
    nb_error err = {0};
    nbi_chat_options options = {
        .reasoning = served->reasoning,
        .max_ids = max_ids,
        .continue_final = json_is_true(json_object_get(request, "continue_final_message"))};
    nb_status status =
        nbi_chat_encode(prompt, tmpl, served->text.tokenizer, request, &options, &err);
    if (status == NB_OK) return NB_OK;
    if (status == NB_TOO_LARGE) return nbi_served_too_long(served, &err, field, e);
    if (status == NB_INVALID && tmpl != served->text.tmpl)
        return nbi_api_field(e, "chat_template", "%s", err.text);
    return nbi_api_from(e, status, &err, field);
}

nb_status nbi_served_encode_chat(const nbi_served *served, const json_t *request, const char *field,
                                 size_t max_ids, nbi_chat_prompt *prompt, nbi_api_error *e)
{
    nbi_template *own = NULL;
    NB_TRY(open_own_template(&own, served, request, e));
    nb_status status =
        encode_chat(served, own ? own : served->text.tmpl, request, field, max_ids, prompt, e);
    nbi_template_close(&own);
    return status;
}

nbi_reasoning_kind nbi_reasoning_of_family(const char *family)
{
    if (strncmp(family, "glm", 3) == 0) return NBI_REASONING_GLM45;
    if (strncmp(family, "deepseek", 8) == 0) return NBI_REASONING_THINK;
    if (strncmp(family, "qwen3", 5) == 0) return NBI_REASONING_THINK;
    return NBI_REASONING_NONE;
}

nbi_tool_form nbi_tool_form_of_family(const char *family, const char *template_source)
{
    static const struct {
        const char *text;
        nbi_tool_form form;
    } shown[] = {
        {"<arg_key>", NBI_TOOL_FORM_GLM},
        {"\xef\xbd\x9c"
         "DSML\xef\xbd\x9c",
         NBI_TOOL_FORM_DSML},
        {"tool\xe2\x96\x81"
         "calls\xe2\x96\x81"
         "begin",
         NBI_TOOL_FORM_DEEPSEEK},
    };
    for (size_t i = 0; template_source && i < sizeof shown / sizeof *shown; i++) {
        if (strstr(template_source, shown[i].text)) return shown[i].form;
    }
    if (strncmp(family, "glm", 3) == 0) return NBI_TOOL_FORM_GLM;
    if (strcmp(family, "deepseek_v32") == 0) return NBI_TOOL_FORM_DSML;
    if (strncmp(family, "deepseek", 8) == 0) return NBI_TOOL_FORM_DEEPSEEK;
    if (strncmp(family, "qwen3", 5) == 0) return NBI_TOOL_FORM_HERMES;
    return NBI_TOOL_FORM_NONE;
}

/* ---------------------------------------------------------------- identities */

static uint64_t mix(uint64_t x) /* the finaliser of splitmix64, a bijection */
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

void nbi_served_next_id(const nbi_served *served, char out[NBI_ID_BYTES])
{
    static atomic_uint_fast64_t counter;
    uint64_t n = atomic_fetch_add(&counter, 1) + 1;
    snprintf(out, NBI_ID_BYTES, "%016llx%016llx",
             (unsigned long long)mix(served->id_key + n * 0x9e3779b97f4a7c15u),
             (unsigned long long)mix(served->id_key ^ mix(n)));
}

/* ---------------------------------------------------------------- life */

static nb_status set_names(nbi_served *s, const nbi_served_options *o, nb_error *err)
{
    uint32_t n = o->n_names ? o->n_names : 1;
    s->names = nbi_calloc(n, sizeof *s->names);
    if (!s->names) return nbi_fail(err, NB_NO_MEMORY, "no memory for the model's names");
    for (uint32_t i = 0; i < o->n_names; i++) s->names[i] = o->names[i];
    if (!o->n_names) s->names[0] = s->info.model_name;
    s->facts.names = s->names;
    s->facts.n_names = n;
    return NB_OK;
}

static nb_status set_reasoning(nbi_served *s, const char *name, nb_error *err)
{
    if (name && strcmp(name, "auto") != 0) return nbi_reasoning_by_name(&s->reasoning, name, err);
    s->reasoning = nbi_reasoning_of_family(s->info.family);
    return NB_OK;
}

static nb_status set_tool_form(nbi_served *s, const char *name, nb_error *err)
{
    if (name && strcmp(name, "auto") != 0) return nbi_tool_form_by_name(&s->tool_form, name, err);
    const char *source = s->text.tmpl ? nbi_template_source(s->text.tmpl, true) : NULL;
    s->tool_form = nbi_tool_form_of_family(s->info.family, source);
    return NB_OK;
}

nb_status nbi_grammar_backend_read(nbi_grammar_backend *out, const char *name, nb_error *err)
{
    static const char *const others[] = {"xgrammar", "outlines", "guidance", "lm-format-enforcer"};
    if (!name || strcmp(name, "auto") == 0) {
        *out = NBI_GRAMMAR_BACKEND_AUTO;
    } else if (strcmp(name, "none") == 0) {
        *out = NBI_GRAMMAR_BACKEND_NONE;
    } else if (strcmp(name, "llguidance") == 0) {
        *out = NBI_GRAMMAR_BACKEND_LLGUIDANCE;
    } else {
        for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
            if (strcmp(name, others[i]) != 0) continue;
            nbi_log(NB_LOG_INFO, "--grammar-backend %s: llguidance does it here", name);
            *out = NBI_GRAMMAR_BACKEND_AUTO;
            return NB_OK;
        }
        return nbi_fail(err, NB_INVALID,
                        "--grammar-backend: \"%s\" is unknown, expected auto, llguidance, none, or "
                        "a name from other servers that stands for auto: xgrammar, outlines, "
                        "guidance, lm-format-enforcer",
                        name);
    }
    return NB_OK;
}

/* The library itself is loaded by the first request that needs it, unless it is asked for by name.
 */
static nb_status open_grammars(nbi_served *s, const char *name, nb_error *err)
{
    nbi_grammar_backend backend;
    NB_TRY(nbi_grammar_backend_read(&backend, name, err));
    s->no_grammars = backend == NBI_GRAMMAR_BACKEND_NONE
                         ? "structured output is off on this server (--grammar-backend none)"
                         : "this model has no tokenizer or no end token";
    if (backend == NBI_GRAMMAR_BACKEND_NONE || !s->text.tokenizer || !s->info.n_eos) return NB_OK;
    const nbi_grammar_setup setup = {.tokenizer = s->text.tokenizer,
                                     .eos = s->info.eos_ids,
                                     .n_eos = s->info.n_eos,
                                     .vocab = s->info.vocab_size};
    NB_TRY(nbi_grammar_compiler_open(&s->grammars, &setup, err));
    if (backend == NBI_GRAMMAR_BACKEND_AUTO) return NB_OK;
    nb_status status = nbi_grammar_compiler_load(s->grammars, err);
    return status == NB_OK ? NB_OK : nbi_fail_prefix(err, status, "--grammar-backend %s", name);
}

/* Only to be shown: a config.json without them is fine. */
static nb_status read_architectures(nbi_served *s, nb_error *err)
{
    json_t *config = NULL;
    char *path = nbi_path_join(s->info.model_dir, "config.json");
    if (!path) return nbi_fail(err, NB_NO_MEMORY, "no memory for the model's description");
    nb_status status = nbi_json_load(&config, path, TEMPLATE_BYTES_MAX, err);
    nbi_free(path);
    NB_TRY(status);
    const json_t *names = json_object_get(config, "architectures");
    s->architectures = json_is_array(names) ? json_dumps(names, JSON_COMPACT) : NULL;
    json_decref(config);
    return NB_OK;
}

static nb_status fill(nbi_served *s, const nbi_served_options *options, nb_error *err)
{
    s->created = (int64_t)time(NULL);
    if (getrandom(&s->id_key, sizeof s->id_key, 0) != sizeof s->id_key) s->id_key = nbi_now_ns();
    nb_engine_get_info(s->engine, &s->info);
    NB_TRY(read_architectures(s, err));
    nb_sampling_default(s->engine, &s->facts.defaults);
    s->facts.vocab_size = s->info.vocab_size;
    s->facts.max_context = s->info.max_context;
    s->facts.max_running = s->info.max_running;
    s->facts.has_text = s->info.has_tokenizer;
    s->facts.has_chat = s->text.tmpl && s->text.tokenizer;
    s->facts.no_chat = s->text.why;
    if (!s->facts.has_chat) nbi_log(NB_LOG_WARN, "no chat: %s", s->text.why);
    NB_TRY(set_reasoning(s, options->reasoning_parser, err));
    NB_TRY(set_tool_form(s, options->tool_parser, err));
    NB_TRY(open_grammars(s, options->grammar_backend, err));
    return set_names(s, options, err);
}

nb_status nbi_served_create(nbi_served **out, nb_engine *engine, nbi_served_text *text,
                            const nbi_served_options *options, nb_error *err)
{
    nbi_served *s = nbi_calloc(1, sizeof *s);
    if (!s) {
        nbi_served_text_close(text);
        return nbi_fail(err, NB_NO_MEMORY, "no memory for the model's description");
    }
    s->engine = engine;
    s->text = *text;
    *text = (nbi_served_text){0};
    nb_status status = fill(s, options, err);
    if (status != NB_OK) {
        nbi_served_destroy(&s);
        return status;
    }
    *out = s;
    return NB_OK;
}

void nbi_served_destroy(nbi_served **out)
{
    nbi_served *s = *out;
    if (!s) return;
    nbi_grammar_compiler_close(&s->grammars); /* it uses the tokenizer */
    nbi_served_text_close(&s->text);
    nbi_free(s->names);
    nbi_free(s->architectures);
    nbi_free(s);
    *out = NULL;
}
