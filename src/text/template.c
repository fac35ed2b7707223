/* Finds the chat template of a checkpoint (see template.h); rendering is in template_python.c. */
#include "text/template.h"

#include <stdatomic.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"

#define FILE_MAX ((size_t)16 << 20)

struct nbi_template {
    nbi_template_text plain, tools; /* tools.source NULL: the same text */
    nbi_arena arena;
};

static atomic_uint_fast64_t next_id = 1;

static nb_status no_memory(nb_error *err)
{
    return nbi_fail(err, NB_NO_MEMORY, "out of memory for a chat template");
}

static nb_status set_text(nbi_template *t, nbi_template_text *text, const char *source, size_t n,
                          nb_error *err)
{
    text->id = atomic_fetch_add(&next_id, 1);
    text->n_source = n;
    text->source = nbi_arena_strndup(&t->arena, source, n);
    return text->source ? NB_OK : no_memory(err);
}

static nb_status set_variables(nbi_template *t, const char *json, nb_error *err)
{
    const char *copy = nbi_arena_strndup(&t->arena, json, strlen(json));
    if (!copy) return no_memory(err);
    t->plain.variables = t->tools.variables = copy;
    return NB_OK;
}

nb_status nbi_template_create(nbi_template **out, const char *source, size_t n,
                              const char *variables, nb_error *err)
{
    nbi_template *t = nbi_calloc(1, sizeof *t);
    if (!t) return no_memory(err);
    nb_status st = set_text(t, &t->plain, source, n, err);
    if (st == NB_OK) st = set_variables(t, variables ? variables : "{}", err);
    if (st == NB_OK)
        *out = t;
    else
        nbi_template_close(&t);
    return st;
}

void nbi_template_close(nbi_template **tmpl)
{
    nbi_template *t = *tmpl;
    if (!t) return;
    if (t->plain.id) nbi_python_forget(t->plain.id);
    if (t->tools.id) nbi_python_forget(t->tools.id);
    nbi_arena_free(&t->arena);
    nbi_free(t);
    *tmpl = NULL;
}

/* bos_token and its like: a string, or an added token object with "content". */
static nb_status read_variables(nbi_template *t, const json_t *config, nb_error *err)
{
    static const char *const names[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                        "pad_token", "cls_token", "mask_token"};
    json_t *variables = json_object();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        json_t *value = json_object_get(config, names[i]);
        if (json_is_object(value)) value = json_object_get(value, "content");
        if (json_is_string(value)) (void)json_object_set(variables, names[i], value);
    }
    char *text = variables ? nbi_json_dumps(variables) : NULL;
    json_decref(variables);
    nb_status st = text ? set_variables(t, text, err) : no_memory(err);
    nbi_free(text);
    return st;
}

static nb_status read_named(nbi_template *t, const json_t *list, const char *path, nb_error *err)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i), *source = json_object_get(entry, "template");
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (!name || !json_is_string(source))
            return nbi_fail(err, NB_CORRUPT,
                            "%s: chat_template entry %zu has no string \"name\" and \"template\"",
                            path, i);
        nbi_template_text *text = strcmp(name, "default") == 0    ? &t->plain
                                  : strcmp(name, "tool_use") == 0 ? &t->tools
                                                                  : NULL;
        if (text)
            NB_TRY(set_text(t, text, json_string_value(source), json_string_length(source), err));
    }
    return t->plain.source
               ? NB_OK
               : nbi_fail(err, NB_NOT_FOUND, "%s: no chat_template is named \"default\"", path);
}

static nb_status read_all(nbi_template *t, const char *jinja, const char *config_path,
                          json_t **config, nb_error *err)
{
    if (nbi_file_exists(config_path)) NB_TRY(nbi_json_load(config, config_path, FILE_MAX, err));
    NB_TRY(read_variables(t, *config, err));
    if (nbi_file_exists(jinja)) {
        char *text;
        size_t n;
        NB_TRY(nbi_file_read(&text, &n, jinja, FILE_MAX, err));
        nb_status st = set_text(t, &t->plain, text, n, err);
        nbi_free(text);
        return st;
    }
    const json_t *source = json_object_get(*config, "chat_template");
    if (json_is_array(source)) return read_named(t, source, config_path, err);
    if (json_is_string(source))
        return set_text(t, &t->plain, json_string_value(source), json_string_length(source), err);
    return nbi_fail(err, NB_NOT_FOUND,
                    "%s: no such file, and no \"chat_template\" in tokenizer_config.json beside it",
                    jinja);
}

nb_status nbi_template_open(nbi_template **out, const char *dir, nb_error *err)
{
    char *jinja = nbi_path_join(dir, "chat_template.jinja"),
         *config_path = nbi_path_join(dir, "tokenizer_config.json");
    nbi_template *t = nbi_calloc(1, sizeof *t);
    json_t *config = NULL;
    nb_status st =
        jinja && config_path && t ? read_all(t, jinja, config_path, &config, err) : no_memory(err);
    json_decref(config);
    nbi_free(jinja);
    nbi_free(config_path);
    if (st == NB_OK)
        *out = t;
    else
        nbi_template_close(&t);
    return st;
}

bool nbi_template_stop(uint32_t wait_ms)
{
    return nbi_python_stop(wait_ms);
}

static const nbi_template_text *text_for(const nbi_template *t, bool tools)
{
    return tools && t->tools.source ? &t->tools : &t->plain;
}

const char *nbi_template_source(const nbi_template *tmpl, bool tools)
{
    return text_for(tmpl, tools)->source;
}

const char *nbi_template_variables(const nbi_template *tmpl)
{
    return tmpl->plain.variables;
}

void nbi_template_warm(const nbi_template *tmpl)
{
    nbi_python_warm(tmpl ? &tmpl->plain : NULL);
}

nb_status nbi_template_render(const nbi_template *tmpl, const char *context, size_t n,
                              nbi_buf *text, nb_error *err)
{
    bool tools = false;
    if (tmpl->tools.source) { /* only then is it worth a look */
        json_t *root = NULL;
        NB_TRY(nbi_json_parse(&root, context, n, "chat template variables", err));
        tools = json_array_size(json_object_get(root, "tools")) > 0;
        json_decref(root);
    }
    return nbi_python_render(text_for(tmpl, tools), context, n, text, err);
}
