/* Reads data sets of prompts. */
#include "perf/load_file.h"

#include <stdio.h>
#include <string.h>

#include "base/file.h"

static const size_t MAX_FILE = (size_t)4 << 30;

typedef struct reader {
    nbi_load_file *out;
    uint32_t cap;
    bool chat;
} reader;

/* ---- one object */

static nb_status take_prompt(json_t **out, json_t *prompt, bool chat, const char *name,
                             nb_error *err)
{
    if (json_is_string(prompt)) {
        *out = json_incref(prompt);
        return NB_OK;
    }
    if (!json_is_array(prompt) || !json_array_size(prompt))
        return nbi_fail(err, NB_CORRUPT,
                        "%s: \"prompt\" is %s; expected a string or an array of token ids", name,
                        json_is_array(prompt) ? "empty" : nbi_json_kind(prompt));
    if (chat)
        return nbi_fail(err, NB_CORRUPT,
                        "%s: \"prompt\" holds token ids; the chat endpoint takes text", name);
    size_t i;
    const json_t *id;
    json_array_foreach(prompt, i, id)
    {
        if (!json_is_integer(id) || json_integer_value(id) < 0)
            return nbi_fail(err, NB_CORRUPT, "%s: \"prompt\"[%zu] is %s; expected a token id", name,
                            i, nbi_json_kind(id));
    }
    *out = json_incref(prompt);
    return NB_OK;
}

static const json_t *turn_text(const json_t *turn)
{
    const json_t *value = json_object_get(turn, "value");
    return value ? value : json_object_get(turn, "content");
}

static nb_status take_turns(nbi_load_entry *e, const json_t *turns, const char *name, nb_error *err)
{
    if (!json_is_array(turns))
        return nbi_fail(err, NB_CORRUPT, "%s: \"conversations\" is %s; expected an array", name,
                        nbi_json_kind(turns));
    if (json_array_size(turns) < 2) return NB_OK;
    for (size_t i = 0; i < 2; i++) {
        const json_t *text = turn_text(json_array_get(turns, i));
        if (!json_is_string(text))
            return nbi_fail(err, NB_CORRUPT,
                            "%s: \"conversations\"[%zu] has %s as \"value\"; expected a string",
                            name, i, nbi_json_kind(text));
        if (i == 0)
            e->prompt = json_stringn(json_string_value(text), json_string_length(text));
        else
            e->answer_bytes = (uint32_t)json_string_length(text);
    }
    return e->prompt ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "out of memory for %s", name);
}

static nb_status take_object(nbi_load_entry *e, const json_t *obj, bool chat, const char *name,
                             nb_error *err)
{
    static const char *const lengths[] = {"output_len", "output_tokens", "max_tokens"};
    if (!json_is_object(obj))
        return nbi_fail(err, NB_CORRUPT, "%s is %s; expected an object", name, nbi_json_kind(obj));
    json_t *prompt = json_object_get(obj, "prompt"), *messages = json_object_get(obj, "messages");
    const json_t *turns = json_object_get(obj, "conversations");
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths && !e->output_tokens; i++)
        NB_TRY(nbi_json_u32(&e->output_tokens, obj, lengths[i], name, err));
    if (turns) return take_turns(e, turns, name, err);
    if (messages && (chat || !prompt)) {
        if (!chat)
            return nbi_fail(err, NB_CORRUPT,
                            "%s has \"messages\"; they need --endpoint /v1/chat/completions", name);
        if (!json_is_array(messages) || !json_array_size(messages))
            return nbi_fail(err, NB_CORRUPT, "%s: \"messages\" is %s; expected an array of them",
                            name, json_is_array(messages) ? "empty" : nbi_json_kind(messages));
        e->prompt = json_incref(messages);
        return NB_OK;
    }
    if (!prompt)
        return nbi_fail(err, NB_CORRUPT,
                        "%s has neither \"prompt\" nor \"messages\" nor \"conversations\"", name);
    return take_prompt(&e->prompt, prompt, chat, name, err);
}

static nb_status add(reader *r, const json_t *obj, const char *name, nb_error *err)
{
    nbi_load_file *f = r->out;
    if (f->n == r->cap) {
        uint32_t cap = r->cap ? r->cap * 2 : 256;
        nbi_load_entry *more = nbi_realloc(f->entries, cap * sizeof *more);
        if (!more) return nbi_fail(err, NB_NO_MEMORY, "out of memory for %s", name);
        f->entries = more;
        r->cap = cap;
    }
    nbi_load_entry *e = &f->entries[f->n];
    *e = (nbi_load_entry){0};
    NB_TRY(take_object(e, obj, r->chat, name, err));
    f->n += e->prompt != NULL;
    return NB_OK;
}

/* ---- the file */

static nb_status read_array(reader *r, const char *text, size_t n, const char *path, nb_error *err)
{
    json_t *root;
    NB_TRY(nbi_json_parse(&root, text, n, path, err));
    nb_status st = NB_OK;
    char name[512];
    for (size_t i = 0; st == NB_OK && i < json_array_size(root); i++) {
        snprintf(name, sizeof name, "%s: entry %zu", path, i);
        st = add(r, json_array_get(root, i), name, err);
    }
    json_decref(root);
    return st;
}

static nb_status read_lines(reader *r, const char *text, const char *path, nb_error *err)
{
    char name[512];
    size_t number = 0;
    for (const char *line = text, *next; line; line = next) {
        const char *end = strchr(line, '\n');
        size_t n = end ? (size_t)(end - line) : strlen(line);
        next = end ? end + 1 : NULL;
        number++;
        if (strspn(line, " \t\r") >= n) continue;
        snprintf(name, sizeof name, "%s: line %zu", path, number);
        json_t *obj;
        NB_TRY(nbi_json_parse(&obj, line, n, name, err));
        nb_status st = add(r, obj, name, err);
        json_decref(obj);
        NB_TRY(st);
    }
    return NB_OK;
}

nb_status nbi_load_file_read(nbi_load_file *out, const char *path, bool chat, nb_error *err)
{
    char *text;
    size_t n;
    nbi_load_file file = {0};
    reader r = {.out = &file, .chat = chat};
    NB_TRY(nbi_file_read(&text, &n, path, MAX_FILE, err));
    nb_status st = text[strspn(text, " \t\r\n")] == '[' ? read_array(&r, text, n, path, err)
                                                        : read_lines(&r, text, path, err);
    nbi_free(text);
    if (st == NB_OK && !file.n) st = nbi_fail(err, NB_CORRUPT, "%s: no prompts", path);
    if (st != NB_OK)
        nbi_load_file_free(&file);
    else
        *out = file;
    return st;
}

void nbi_load_file_free(nbi_load_file *file)
{
    for (uint32_t i = 0; i < file->n; i++) json_decref(file->entries[i].prompt);
    nbi_free(file->entries);
    *file = (nbi_load_file){0};
}
