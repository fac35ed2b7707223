/* White space and additional properties of JSON that a client asks for (see structured.h). Called
 * by structured.c. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "server/structured.h"

/* ---------------------------------------------------------------- patterns */

/* Adds what a character of the pattern stands for; returns how many bytes it has, 0: none of white
 * space. */
static size_t add_chars(nbi_json_style *s, const char *at)
{
    static const char from[] = "ntrs", *const to[] = {"\n", "\t", "\r", " \t\n\r"};
    char one[2] = {at[0], 0};
    const char *chars = one, *name = at[0] == '\\' && at[1] ? strchr(from, at[1]) : NULL;
    if (name) chars = to[name - from];
    if (at[0] == '\\' && at[1] == ' ') chars = " ";
    if (!*chars || strspn(chars, " \t\n\r") != strlen(chars)) return 0;
    for (; *chars; chars++) {
        size_t n = strlen(s->chars);
        if (!strchr(s->chars, *chars)) s->chars[n] = *chars;
    }
    return at[0] == '\\' ? 2 : 1;
}

static bool read_most(uint32_t *out, const char *at)
{
    uint32_t most = 0;
    size_t n = 3;
    if (strcmp(at, "?") == 0) *out = 1;
    if (strcmp(at, "*") == 0) *out = NBI_GRAMMAR_SPACE_MAX;
    if (strcmp(at, "?") == 0 || strcmp(at, "*") == 0) return true;
    if (strcmp(at, "{0,}") == 0) return *out = NBI_GRAMMAR_SPACE_MAX, true;
    if (strncmp(at, "{0,", 3) != 0) return false;
    for (; at[n] >= '0' && at[n] <= '9' && n < 12; n++) {
        most = most * 10 + (uint32_t)(at[n] - '0');
        if (most > NBI_GRAMMAR_SPACE_MAX) most = NBI_GRAMMAR_SPACE_MAX;
    }
    *out = most;
    return n > 3 && strcmp(at + n, "}") == 0;
}

static bool read_pattern(nbi_json_style *s, const char *at)
{
    bool in_class = at[0] == '[';
    s->spaced = true;
    if (!*at) return true;
    at += in_class;
    do {
        size_t n = add_chars(s, at);
        if (!n) return false;
        at += n;
    } while (in_class && *at != ']');
    return read_most(&s->most, at + in_class);
}

static nb_status add_pattern(nbi_json_style *s, const json_t *obj, const char *prefix,
                             const char *key, const char **other, nbi_api_error *e)
{
    char field[NBI_PARAM_MAX];
    const char *pattern = NULL;
    NB_TRY(nbi_field_str(&pattern, obj, prefix, key, e));
    if (!pattern) return NB_OK;
    snprintf(field, sizeof field, "%.64s%s", prefix, key);
    if (*other) return nbi_api_field(e, field, "cannot be combined with %s", *other);
    *other = key;
    if (read_pattern(s, pattern)) return NB_OK;
    return nbi_api_field(e, field,
                         "\"%.64s\" is not supported, expected a character of white space or a "
                         "class of them that may be absent, as in \"[ \\n]?\", \" *\" or "
                         "\"\\s{0,4}\"",
                         pattern);
}

nb_status nbi_json_style_read(nbi_json_style *out, const json_t *obj, const char *prefix,
                              const json_t *given, const char *inner, nbi_api_error *e)
{
    bool tight = false;
    const char *other = NULL;
    if (given) NB_TRY(nbi_field_bool(&tight, given, inner, "disable_any_whitespace", e));
    if (given)
        NB_TRY(nbi_field_bool(&out->closed, given, inner, "disable_additional_properties", e));
    out->spaced = tight;
    if (tight) other = "disable_any_whitespace";
    NB_TRY(add_pattern(out, obj, prefix, "guided_whitespace_pattern", &other, e));
    return given ? add_pattern(out, given, inner, "whitespace_pattern", &other, e) : NB_OK;
}

/* ---------------------------------------------------------------- schemas */

static bool is_one_of(const char *key, const char *const *words, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(key, words[i]) == 0) return true;
    }
    return false;
}

/* Depth is bounded by the JSON parser. `map`: the members are names of the schema's own. */
static nb_status close_objects(json_t *value, bool map)
{
    static const char *const data[] = {"const", "enum", "default", "examples"};
    static const char *const maps[] = {"properties", "patternProperties", "$defs", "definitions",
                                       "dependentSchemas"};
    for (size_t i = 0; i < json_array_size(value); i++)
        NB_TRY(close_objects(json_array_get(value, i), false));
    if (!json_is_object(value)) return NB_OK;
    for (void *at = json_object_iter(value); at; at = json_object_iter_next(value, at)) {
        const char *key = json_object_iter_key(at);
        if (!map && is_one_of(key, data, sizeof data / sizeof *data)) continue;
        NB_TRY(close_objects(json_object_iter_value(at),
                             !map && is_one_of(key, maps, sizeof maps / sizeof *maps)));
    }
    if (map || json_object_get(value, "additionalProperties")) return NB_OK;
    if (!json_object_get(value, "properties") && !json_object_get(value, "patternProperties"))
        return NB_OK;
    return json_object_set_new(value, "additionalProperties", json_false()) == 0 ? NB_OK
                                                                                 : NB_NO_MEMORY;
}

/* Takes the schema. */
static nb_status write_source(nbi_constraint *c, nbi_arena *arena, json_t *schema)
{
    const nbi_json_style *s = &c->style;
    bool wrap = s->spaced && s->most;
    nb_status st = s->closed ? close_objects(schema, false) : NB_OK;
    json_t *all = wrap ? json_pack("{s:s, s:i, s:o}", "chars", s->chars, "most", (int)s->most,
                                   "schema", schema)
                       : schema;
    char *text = st == NB_OK && all ? nbi_json_dumps(all) : NULL;
    json_decref(all);
    if (!text) return NB_NO_MEMORY;
    c->n_source = strlen(text);
    c->source = nbi_arena_strndup(arena, text, c->n_source);
    c->kind = wrap        ? NBI_GRAMMAR_JSON_SPACED
              : s->spaced ? NBI_GRAMMAR_JSON_TIGHT
                          : NBI_GRAMMAR_JSON_SCHEMA;
    nbi_free(text);
    return c->source ? NB_OK : NB_NO_MEMORY;
}

nb_status nbi_json_style_apply(nbi_constraint *c, nbi_arena *arena)
{
    static const char any_object[] = "{\"type\":\"object\"}";
    bool object = c->kind == NBI_GRAMMAR_JSON_OBJECT;
    json_t *schema = NULL;
    if (!object && c->kind != NBI_GRAMMAR_JSON_SCHEMA) return NB_OK;
    if (!c->style.spaced && (object || !c->style.closed)) return NB_OK;
    if (c->n_source > NBI_GRAMMAR_SOURCE_MAX) return NB_OK;
    nb_status st =
        object ? nbi_json_parse(&schema, any_object, sizeof any_object - 1, "the schema", NULL)
               : nbi_json_parse(&schema, c->source, c->n_source, "the schema", NULL);
    if (st == NB_NO_MEMORY) return st;
    return st == NB_OK ? write_source(c, arena, schema) : NB_OK;
}
