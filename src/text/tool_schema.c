/* Types of tool parameters (see tool_schema.h). Nothing is cached: schemas are small, and a walk
 * happens once per argument. */
#include "text/tool_schema.h"

#include <string.h>

#include "text/tool_json.h"

#define STEPS_MAX 512
#define DEPTH_MAX 24
#define ANY_KIND                                                                               \
    (NBI_TOOL_STRING | NBI_TOOL_INTEGER | NBI_TOOL_NUMBER | NBI_TOOL_BOOLEAN | NBI_TOOL_NULL | \
     NBI_TOOL_OBJECT | NBI_TOOL_ARRAY)

const json_t *nbi_tool_function(const json_t *tool)
{
    const json_t *function = json_object_get(tool, "function");
    if (json_is_object(function)) return function;
    return json_is_object(tool) ? tool : NULL;
}

const char *nbi_tool_name(const json_t *tool)
{
    return json_string_value(json_object_get(nbi_tool_function(tool), "name"));
}

const json_t *nbi_tool_parameters(const json_t *tool)
{
    const json_t *function = nbi_tool_function(tool);
    const json_t *schema = json_object_get(function, "parameters");
    if (!schema) schema = json_object_get(function, "input_schema");
    return json_is_object(schema) ? schema : NULL;
}

const json_t *nbi_tool_find(const json_t *tools, const char *name, size_t n)
{
    size_t i;
    const json_t *tool;
    json_array_foreach(tools, i, tool)
    {
        const json_t *known = json_object_get(nbi_tool_function(tool), "name");
        if (json_is_string(known) && json_string_length(known) == n &&
            memcmp(json_string_value(known), name, n) == 0)
            return tool;
    }
    return NULL;
}

/* ---------------------------------------------------------------- schemas */

typedef struct walk {
    const json_t *root;
    unsigned steps; /* left */
} walk;

/* One step of a JSON pointer, unescaped ("~1" is '/', "~0" is '~'). */
static const json_t *pointer_step(const json_t *at, const char *part, size_t n)
{
    char key[256];
    size_t len = 0;
    if (n >= sizeof key) return NULL;
    for (size_t i = 0; i < n; i++) {
        bool escaped = part[i] == '~' && i + 1 < n && (part[i + 1] == '0' || part[i + 1] == '1');
        key[len++] = !escaped ? part[i] : part[++i] == '1' ? '/' : '~';
    }
    key[len] = '\0';
    if (!json_is_array(at)) return json_object_get(at, key);
    size_t index = 0;
    for (size_t i = 0; i < len; i++) {
        if (key[i] < '0' || key[i] > '9' || index > 9999) return NULL;
        index = index * 10 + (size_t)(key[i] - '0');
    }
    return len ? json_array_get(at, index) : NULL;
}

/* "#", "#/$defs/City"; only into the schema itself. */
static const json_t *resolve(const walk *w, const char *ref)
{
    const json_t *at = w->root;
    if (!ref || *ref++ != '#') return NULL;
    while (at && *ref == '/') {
        size_t n = strcspn(++ref, "/");
        at = pointer_step(at, ref, n);
        ref += n;
    }
    return *ref ? NULL : at;
}

/* Names of JSON schema, and those of programming languages that tools in the field use. */
static unsigned kind_of_name(const char *name)
{
    static const struct {
        const char *name;
        unsigned kinds;
    } names[] = {
        {"string", NBI_TOOL_STRING},   {"integer", NBI_TOOL_INTEGER}, {"number", NBI_TOOL_NUMBER},
        {"boolean", NBI_TOOL_BOOLEAN}, {"null", NBI_TOOL_NULL},       {"object", NBI_TOOL_OBJECT},
        {"array", NBI_TOOL_ARRAY},     {"str", NBI_TOOL_STRING},      {"text", NBI_TOOL_STRING},
        {"int", NBI_TOOL_INTEGER},     {"float", NBI_TOOL_NUMBER},    {"double", NBI_TOOL_NUMBER},
        {"bool", NBI_TOOL_BOOLEAN},    {"dict", NBI_TOOL_OBJECT},     {"list", NBI_TOOL_ARRAY},
    };
    for (size_t i = 0; name && i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i].name, name) == 0) return names[i].kinds;
    return 0;
}

static unsigned kind_of_value(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT: return NBI_TOOL_OBJECT;
    case JSON_ARRAY: return NBI_TOOL_ARRAY;
    case JSON_STRING: return NBI_TOOL_STRING;
    case JSON_INTEGER: return NBI_TOOL_INTEGER;
    case JSON_REAL: return NBI_TOOL_NUMBER;
    case JSON_TRUE:
    case JSON_FALSE: return NBI_TOOL_BOOLEAN;
    case JSON_NULL: return NBI_TOOL_NULL;
    }
    return 0;
}

static unsigned kinds_of_type(const json_t *type)
{
    size_t i;
    const json_t *item;
    unsigned kinds = 0;
    if (json_is_string(type)) return kind_of_name(json_string_value(type));
    json_array_foreach(type, i, item) kinds |= kind_of_name(json_string_value(item));
    return kinds;
}

static unsigned kinds_of_members(const json_t *values)
{
    size_t i;
    const json_t *item;
    unsigned kinds = 0;
    json_array_foreach(values, i, item) kinds |= kind_of_value(item);
    return kinds;
}

/* Keywords that mean something for one kind only. */
static unsigned kinds_of_keywords(const json_t *schema)
{
    static const struct {
        const char *keyword;
        unsigned kind;
    } hints[] = {
        {"properties", NBI_TOOL_OBJECT}, {"additionalProperties", NBI_TOOL_OBJECT},
        {"required", NBI_TOOL_OBJECT},   {"patternProperties", NBI_TOOL_OBJECT},
        {"items", NBI_TOOL_ARRAY},       {"prefixItems", NBI_TOOL_ARRAY},
        {"minItems", NBI_TOOL_ARRAY},    {"maxItems", NBI_TOOL_ARRAY},
        {"pattern", NBI_TOOL_STRING},    {"minLength", NBI_TOOL_STRING},
        {"maxLength", NBI_TOOL_STRING},  {"minimum", NBI_TOOL_NUMBER},
        {"maximum", NBI_TOOL_NUMBER},    {"multipleOf", NBI_TOOL_NUMBER},
    };
    for (size_t i = 0; i < sizeof hints / sizeof *hints; i++)
        if (json_object_get(schema, hints[i].keyword)) return hints[i].kind;
    return 0;
}

/* 0 is "says nothing" in what follows. An integer is a number. */
static unsigned widen(unsigned kinds)
{
    return kinds & NBI_TOOL_NUMBER ? kinds | NBI_TOOL_INTEGER : kinds;
}

static unsigned kinds_of(walk *w, const json_t *schema, unsigned depth);

/* One of them holds: joined; silent as soon as one is. */
static unsigned kinds_of_any(walk *w, const json_t *list, unsigned depth)
{
    size_t i;
    const json_t *item;
    unsigned kinds = 0;
    json_array_foreach(list, i, item)
    {
        unsigned one = kinds_of(w, item, depth + 1);
        if (!one) return 0;
        kinds |= one;
    }
    return kinds;
}

/* All of them hold: what all that speak allow; a contradiction is taken as silence. */
static unsigned kinds_of_all(walk *w, const json_t *list, unsigned depth)
{
    size_t i;
    const json_t *item;
    unsigned kinds = ANY_KIND;
    json_array_foreach(list, i, item)
    {
        unsigned one = kinds_of(w, item, depth + 1);
        if (one) kinds &= widen(one);
    }
    return kinds == ANY_KIND ? 0 : kinds;
}

static unsigned kinds_of(walk *w, const json_t *schema, unsigned depth)
{
    if (!json_is_object(schema) || depth > DEPTH_MAX || w->steps == 0) return 0;
    w->steps--;
    const json_t *part;
    unsigned kinds = kinds_of_type(json_object_get(schema, "type"));
    if (!kinds && (part = json_object_get(schema, "const"))) kinds = kind_of_value(part);
    if (!kinds) kinds = kinds_of_members(json_object_get(schema, "enum"));
    if (!kinds && (part = json_object_get(schema, "$ref")))
        kinds = kinds_of(w, resolve(w, json_string_value(part)), depth + 1);
    if (!kinds) kinds = kinds_of_any(w, json_object_get(schema, "anyOf"), depth);
    if (!kinds) kinds = kinds_of_any(w, json_object_get(schema, "oneOf"), depth);
    if (!kinds) kinds = kinds_of_all(w, json_object_get(schema, "allOf"), depth);
    if (!kinds) kinds = kinds_of_keywords(schema);
    if (kinds && json_is_true(json_object_get(schema, "nullable"))) kinds |= NBI_TOOL_NULL;
    return widen(kinds);
}

/* The schema of a property: in the schema itself, or in what it is made of. */
static const json_t *property(walk *w, const json_t *schema, const char *key, unsigned depth)
{
    static const char *const lists[] = {"allOf", "anyOf", "oneOf"};
    if (!json_is_object(schema) || depth > DEPTH_MAX || w->steps == 0) return NULL;
    w->steps--;
    const json_t *found = json_object_get(json_object_get(schema, "properties"), key), *part;
    if (!found && (part = json_object_get(schema, "$ref")))
        found = property(w, resolve(w, json_string_value(part)), key, depth + 1);
    for (size_t l = 0; !found && l < sizeof lists / sizeof *lists; l++) {
        const json_t *list = json_object_get(schema, lists[l]);
        for (size_t i = 0; !found && i < json_array_size(list); i++)
            found = property(w, json_array_get(list, i), key, depth + 1);
    }
    if (!found) found = json_object_get(schema, "additionalProperties");
    return json_is_object(found) ? found : NULL;
}

unsigned nbi_tool_kinds(const json_t *tool, const char *key, size_t n)
{
    char name[1025];
    walk w = {nbi_tool_parameters(tool), STEPS_MAX};
    if (!w.root || n >= sizeof name || memchr(key, '\0', n)) return 0;
    memcpy(name, key, n);
    name[n] = '\0';
    const json_t *schema = property(&w, w.root, name, 0);
    w.steps = STEPS_MAX;
    return kinds_of(&w, schema, 0);
}
