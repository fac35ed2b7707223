/* tools, tool_choice and parallel_tool_calls of a request (see tool_choice.h). Called by the
 * server. */
#include "text/tool_choice.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "text/tool_json.h"
#include "text/tool_schema.h"

#define FIELD_MAX      96
#define NAME_MAX_BYTES 256

/* Fails with "FIELD: sentence"; `field` is filled by place(). */
static nb_status refuse(nb_error *err, const char *field, const char *fmt, ...) NBI_PRINTF(3, 4);

static nb_status refuse(nb_error *err, const char *field, const char *fmt, ...)
{
    char text[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return nbi_fail(err, NB_INVALID, "%s: %s", field, text);
}

static void place(char *field, const char *fmt, ...) NBI_PRINTF(2, 3);

static void place(char *field, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(field, FIELD_MAX, fmt, args);
    va_end(args);
}

static json_t *member(const json_t *object, const char *key)
{
    json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

/* ---------------------------------------------------------------- tools */

static nb_status check_name(const json_t *name, const char *field, nb_error *err)
{
    if (!json_is_string(name))
        return refuse(err, field, "expected a string, found %s", nbi_json_kind(name));
    size_t n = json_string_length(name);
    const char *s = json_string_value(name);
    if (n == 0 || n > NAME_MAX_BYTES)
        return refuse(err, field, "expected 1 to %d bytes, found %zu", NAME_MAX_BYTES, n);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)s[i] < ' ')
            return refuse(err, field, "holds a control character at byte %zu", i);
    return NB_OK;
}

static nb_status check_tool(const json_t *tool, size_t i, char *field, nb_error *err)
{
    place(field, "tools[%zu]", i);
    if (!json_is_object(tool))
        return refuse(err, field, "expected an object, found %s", nbi_json_kind(tool));
    const json_t *type = member(tool, "type"), *function = member(tool, "function");
    const char *inner = function ? ".function" : "";
    place(field, "tools[%zu].type", i);
    if (type && !json_is_string(type))
        return refuse(err, field, "expected a string, found %s", nbi_json_kind(type));
    if (type && strcmp(json_string_value(type), "function") != 0)
        return refuse(err, field, "is \"%.40s\", expected \"function\"", json_string_value(type));
    place(field, "tools[%zu].function", i);
    if (function && !json_is_object(function))
        return refuse(err, field, "expected an object, found %s", nbi_json_kind(function));
    if (!function && !member(tool, "name")) return refuse(err, field, "is missing");
    if (!function) function = tool;
    place(field, "tools[%zu]%s.name", i, inner);
    NB_TRY(check_name(member(function, "name"), field, err));
    const json_t *parameters = member(function, "parameters");
    place(field, "tools[%zu]%s.parameters", i, inner);
    if (parameters && !json_is_object(parameters))
        return refuse(err, field, "expected an object, found %s", nbi_json_kind(parameters));
    return NB_OK;
}

static nb_status read_tools(json_t **out, const json_t *body, char *field, nb_error *err)
{
    json_t *tools = member(body, "tools");
    const json_t *tool;
    size_t i;
    place(field, "tools");
    if (!tools) return NB_OK;
    if (!json_is_array(tools))
        return refuse(err, field, "expected an array, found %s", nbi_json_kind(tools));
    if (json_array_size(tools) > NBI_TOOLS_MAX)
        return refuse(err, field, "expected at most %d, found %zu", NBI_TOOLS_MAX,
                      json_array_size(tools));
    json_array_foreach(tools, i, tool) NB_TRY(check_tool(tool, i, field, err));
    if (json_array_size(tools)) *out = tools;
    return NB_OK;
}

/* ---------------------------------------------------------------- choice */

static nb_status read_mode(nbi_tool_choice *c, const char *word, const char *field, nb_error *err)
{
    if (strcmp(word, "none") == 0) {
        c->mode = NBI_TOOL_CHOICE_NONE;
    } else if (strcmp(word, "auto") == 0) {
        c->mode = c->tools ? NBI_TOOL_CHOICE_AUTO : NBI_TOOL_CHOICE_NONE;
    } else if (strcmp(word, "required") == 0) {
        if (!c->tools) return refuse(err, field, "\"required\" needs tools, found none");
        c->mode = NBI_TOOL_CHOICE_REQUIRED;
    } else {
        return refuse(err, field,
                      "is \"%.40s\", expected auto, none, required or an object that names a "
                      "function",
                      word);
    }
    return NB_OK;
}

static nb_status read_named(nbi_tool_choice *c, const json_t *choice, char *field, nb_error *err)
{
    const json_t *type = member(choice, "type"), *function = member(choice, "function");
    place(field, "tool_choice.type");
    if (!json_is_string(type) || strcmp(json_string_value(type), "function") != 0) {
        return json_is_string(type)
                   ? refuse(err, field, "is \"%.40s\", expected \"function\"",
                            json_string_value(type))
                   : refuse(err, field, "expected \"function\", found %s", nbi_json_kind(type));
    }
    place(field, "tool_choice.function");
    if (function && !json_is_object(function))
        return refuse(err, field, "expected an object, found %s", nbi_json_kind(function));
    place(field, function ? "tool_choice.function.name" : "tool_choice.name");
    const json_t *name = member(function ? function : choice, "name");
    NB_TRY(check_name(name, field, err));
    const char *text = json_string_value(name);
    if (!nbi_tool_find(c->tools, text, json_string_length(name)))
        return refuse(err, field, "\"%.64s\" is not the name of one of the %zu tools", text,
                      json_array_size(c->tools));
    c->mode = NBI_TOOL_CHOICE_NAMED;
    c->name = text;
    return NB_OK;
}

nb_status nbi_tool_choice_read(nbi_tool_choice *out, const json_t *body, char field[96],
                               nb_error *err)
{
    nbi_tool_choice c = {.parallel = true};
    NB_TRY(read_tools(&c.tools, body, field, err));
    c.mode = c.tools ? NBI_TOOL_CHOICE_AUTO : NBI_TOOL_CHOICE_NONE;
    const json_t *choice = member(body, "tool_choice"),
                 *parallel = member(body, "parallel_tool_calls");
    place(field, "tool_choice");
    if (json_is_string(choice)) {
        NB_TRY(read_mode(&c, json_string_value(choice), field, err));
    } else if (json_is_object(choice)) {
        NB_TRY(read_named(&c, choice, field, err));
    } else if (choice) {
        return refuse(err, field, "expected a string or an object, found %s",
                      nbi_json_kind(choice));
    }
    place(field, "parallel_tool_calls");
    if (parallel && !json_is_boolean(parallel))
        return refuse(err, field, "expected a boolean, found %s", nbi_json_kind(parallel));
    if (parallel) c.parallel = json_is_true(parallel);
    field[0] = '\0';
    *out = c;
    return NB_OK;
}

bool nbi_tool_choice_is_forced(const nbi_tool_choice *choice)
{
    return choice->mode == NBI_TOOL_CHOICE_REQUIRED || choice->mode == NBI_TOOL_CHOICE_NAMED;
}

/* ---------------------------------------------------------------- the schema of forced calls */

/* Points the references of a schema that moves to `base` there; returns how many there were, or -1
 * when out of memory. */
static int move_refs(json_t *schema, const char *base)
{
    int n = 0;
    size_t i;
    const char *key;
    json_t *value;
    void *next;
    json_array_foreach(schema, i, value)
    {
        int one = move_refs(value, base);
        if (one < 0) return -1;
        n += one;
    }
    json_object_foreach_safe(schema, next, key, value)
    {
        int one = 1;
        if (strcmp(key, "$ref") == 0 && json_is_string(value) &&
            json_string_value(value)[0] == '#') {
            json_t *moved = json_sprintf("%s%s", base, json_string_value(value) + 1);
            if (!moved || json_object_set_new(schema, key, moved) != 0) return -1;
        } else {
            one = move_refs(value, base);
        }
        if (one < 0) return -1;
        n += one;
    }
    return n;
}

/* {"name": NAME, "parameters": SCHEMA} of one tool. A schema with references goes into `defs`. */
static json_t *call_schema(const json_t *tool, size_t i, json_t *defs)
{
    char key[32], base[48];
    const json_t *declared = nbi_tool_parameters(tool);
    json_t *parameters = declared ? json_deep_copy(declared)
                                  : json_pack("{s:s, s:{}}", "type", "object", "properties");
    snprintf(key, sizeof key, "tool_%zu", i);
    snprintf(base, sizeof base, "#/$defs/%s", key);
    int n_refs = parameters ? move_refs(parameters, base) : -1;
    if (n_refs > 0) {
        if (json_object_set_new(defs, key, parameters) != 0) return NULL;
        parameters = json_pack("{s:s}", "$ref", base);
    } else if (n_refs < 0) {
        json_decref(parameters);
        return NULL;
    }
    return json_pack("{s:s, s:{s:{s:s, s:[s]}, s:o}, s:[s, s], s:b}", "type", "object",
                     "properties", "name", "type", "string", "enum", nbi_tool_name(tool),
                     "parameters", parameters, "required", "name", "parameters",
                     "additionalProperties", 0);
}

json_t *nbi_tool_choice_schema(const nbi_tool_choice *choice)
{
    size_t i;
    const json_t *tool;
    json_t *defs = json_object(), *any = json_array(), *schema = NULL;
    if (!defs || !any) goto fail;
    json_array_foreach(choice->tools, i, tool)
    {
        if (choice->mode == NBI_TOOL_CHOICE_NAMED && strcmp(nbi_tool_name(tool), choice->name) != 0)
            continue;
        if (json_array_append_new(any, call_schema(tool, i, defs)) != 0) goto fail;
    }
    schema =
        json_pack("{s:s, s:i, s:{s:O}}", "type", "array", "minItems", 1, "items", "anyOf", any);
    if (!schema) goto fail;
    bool one = !choice->parallel || choice->mode == NBI_TOOL_CHOICE_NAMED;
    if (one && json_object_set_new(schema, "maxItems", json_integer(1)) != 0) goto fail;
    if (json_object_size(defs) && json_object_set(schema, "$defs", defs) != 0) goto fail;
    json_decref(any);
    json_decref(defs);
    return schema;
fail:
    json_decref(schema);
    json_decref(any);
    json_decref(defs);
    return NULL;
}
