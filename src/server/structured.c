/* Fields that constrain answers (see structured.h). Called by the API surfaces. */
#include "server/structured.h"

#include <stdio.h>
#include <string.h>

static nb_status no_memory(nbi_api_error *e)
{
    return nbi_api_no_memory(e, "the constraint of this request");
}

static nb_status wrong_type(nbi_api_error *e, const char *field, const json_t *value,
                            const char *expected)
{
    return nbi_api_field(e, field, "expected %s, found %s", expected, nbi_json_kind(value));
}

/* The text is copied. */
static nb_status set(nbi_constraint *out, nbi_arena *arena, nbi_grammar_kind kind,
                     const char *field, const char *text, size_t n, nbi_api_error *e)
{
    if (out->field)
        return nbi_api_field(e, field, "cannot be combined with %s; one constraint is possible",
                             out->field);
    out->kind = kind;
    out->source = nbi_arena_strndup(arena, text, n);
    out->n_source = n;
    out->field = nbi_arena_strndup(arena, field, strlen(field));
    if (!out->source || !out->field) return no_memory(e);
    return nbi_json_style_apply(out, arena) == NB_OK ? NB_OK : no_memory(e);
}

static nb_status set_json(nbi_constraint *out, nbi_arena *arena, nbi_grammar_kind kind,
                          const char *field, const json_t *value, nbi_api_error *e)
{
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
    if (!text) return no_memory(e);
    nb_status status = set(out, arena, kind, field, text, strlen(text), e);
    nbi_free(text); /* jansson allocates through base/mem.h */
    return status;
}

/* ---------------------------------------------------------------- values */

/* `text_too`: the schema may also stand in a string. */
static nb_status add_schema(nbi_constraint *out, nbi_arena *arena, const char *field,
                            const json_t *value, bool text_too, nbi_api_error *e)
{
    if (json_is_string(value) && text_too)
        return set(out, arena, NBI_GRAMMAR_JSON_SCHEMA, field, json_string_value(value),
                   json_string_length(value), e);
    if (json_is_object(value) || json_is_boolean(value))
        return set_json(out, arena, NBI_GRAMMAR_JSON_SCHEMA, field, value, e);
    return wrong_type(e, field, value,
                      text_too ? "a JSON schema, as an object or as text" : "a JSON schema");
}

static nb_status add_text(nbi_constraint *out, nbi_arena *arena, nbi_grammar_kind kind,
                          const char *field, const json_t *value, nbi_api_error *e)
{
    if (!json_is_string(value)) return wrong_type(e, field, value, "a string");
    if (!json_string_length(value)) return nbi_api_field(e, field, "is empty");
    return set(out, arena, kind, field, json_string_value(value), json_string_length(value), e);
}

static nb_status add_choices(nbi_constraint *out, nbi_arena *arena, const char *field,
                             const json_t *value, nbi_api_error *e)
{
    if (!json_is_array(value)) return wrong_type(e, field, value, "an array of strings");
    return set_json(out, arena, NBI_GRAMMAR_CHOICE, field, value, e);
}

static nb_status add_object(nbi_constraint *out, nbi_arena *arena, const char *field,
                            const json_t *value, nbi_api_error *e)
{
    if (!json_is_boolean(value)) return wrong_type(e, field, value, "a boolean");
    if (json_is_false(value)) return NB_OK;
    return set(out, arena, NBI_GRAMMAR_JSON_OBJECT, field, "", 0, e);
}

/* As text or as JSON. */
static nb_status add_tag(nbi_constraint *out, nbi_arena *arena, const char *field,
                         const json_t *value, nbi_api_error *e)
{
    if (json_is_object(value)) return set_json(out, arena, NBI_GRAMMAR_TAG, field, value, e);
    return add_text(out, arena, NBI_GRAMMAR_TAG, field, value, e);
}

static nb_status add_kind(nbi_constraint *out, nbi_arena *arena, nbi_grammar_kind kind,
                          const char *field, const json_t *value, nbi_api_error *e)
{
    switch (kind) {
    case NBI_GRAMMAR_JSON_OBJECT: return add_object(out, arena, field, value, e);
    case NBI_GRAMMAR_JSON_SCHEMA: return add_schema(out, arena, field, value, true, e);
    case NBI_GRAMMAR_CHOICE: return add_choices(out, arena, field, value, e);
    case NBI_GRAMMAR_TAG: return add_tag(out, arena, field, value, e);
    default: return add_text(out, arena, kind, field, value, e);
    }
}

/* ---------------------------------------------------------------- formats */

/* Name and strictness are checked and change nothing. `at` is where they stand. */
static nb_status add_format_schema(nbi_constraint *out, nbi_arena *arena, const json_t *obj,
                                   const char *at, nbi_api_error *e)
{
    char prefix[NBI_PARAM_MAX], field[NBI_PARAM_MAX];
    const char *text = NULL;
    bool strict = false;
    snprintf(prefix, sizeof prefix, "%.*s.", NBI_PARAM_MAX - 16, at);
    snprintf(field, sizeof field, "%.*s.schema", NBI_PARAM_MAX - 16, at);
    NB_TRY(nbi_field_str(&text, obj, prefix, "name", e));
    NB_TRY(nbi_field_str(&text, obj, prefix, "description", e));
    NB_TRY(nbi_field_bool(&strict, obj, prefix, "strict", e));
    const json_t *schema = nbi_field(obj, "schema");
    if (!schema) return nbi_api_field(e, field, "is missing");
    return add_schema(out, arena, field, schema, false, e);
}

/* `flat`: the schema stands beside the type, not in a member "json_schema". */
static nb_status add_format(nbi_constraint *out, nbi_arena *arena, const json_t *format,
                            const char *place, bool flat, nbi_api_error *e)
{
    char at[NBI_PARAM_MAX], prefix[NBI_PARAM_MAX];
    const char *type;
    json_t *nested = NULL;
    NB_TRY(nbi_field_need_str(&type, format, place, "type", e));
    if (strcmp(type, "text") == 0) return NB_OK;
    snprintf(at, sizeof at, "%.*s.type", NBI_PARAM_MAX - 16, place);
    if (strcmp(type, "json_object") == 0)
        return set(out, arena, NBI_GRAMMAR_JSON_OBJECT, place, "", 0, e);
    if (strcmp(type, "structural_tag") == 0 && !flat)
        return set_json(out, arena, NBI_GRAMMAR_TAG, place, format, e);
    if (strcmp(type, "json_schema") != 0)
        return nbi_api_field(e, at,
                             "\"%.64s\" is not supported, expected \"text\", \"json_object\"%s "
                             "or \"json_schema\"",
                             type, flat ? "" : ", \"structural_tag\"");
    if (flat) return add_format_schema(out, arena, format, place, e);
    snprintf(prefix, sizeof prefix, "%.*s.", NBI_PARAM_MAX - 16, place);
    snprintf(at, sizeof at, "%.*s.json_schema", NBI_PARAM_MAX - 16, place);
    NB_TRY(nbi_field_object(&nested, format, prefix, "json_schema", e));
    if (!nested) return nbi_api_field(e, at, "is missing");
    return add_format_schema(out, arena, nested, at, e);
}

nb_status nbi_structured_add_format(nbi_constraint *out, nbi_arena *arena, const json_t *format,
                                    const char *place, nbi_api_error *e)
{
    if (!format) return NB_OK;
    if (!json_is_object(format)) return wrong_type(e, place, format, "an object");
    return add_format(out, arena, format, place, true, e);
}

/* ---------------------------------------------------------------- the fields */

typedef struct named_kind {
    const char *key;
    nbi_grammar_kind kind;
} named_kind;

static nb_status add_members(nbi_constraint *out, nbi_arena *arena, const json_t *obj,
                             const char *prefix, const named_kind *kinds, size_t n,
                             nbi_api_error *e)
{
    for (size_t i = 0; i < n; i++) {
        char field[NBI_PARAM_MAX];
        const json_t *value = nbi_field(obj, kinds[i].key);
        if (!value) continue;
        snprintf(field, sizeof field, "%s%s", prefix, kinds[i].key);
        NB_TRY(add_kind(out, arena, kinds[i].kind, field, value, e));
    }
    return NB_OK;
}

static nb_status add_structured(nbi_constraint *out, nbi_arena *arena, const json_t *given,
                                const char *prefix, nbi_api_error *e)
{
    static const named_kind kinds[] = {
        {"json", NBI_GRAMMAR_JSON_SCHEMA},        {"regex", NBI_GRAMMAR_REGEX},
        {"choice", NBI_GRAMMAR_CHOICE},           {"grammar", NBI_GRAMMAR_EBNF},
        {"json_object", NBI_GRAMMAR_JSON_OBJECT}, {"structural_tag", NBI_GRAMMAR_TAG}};
    return add_members(out, arena, given, prefix, kinds, sizeof kinds / sizeof *kinds, e);
}

nb_status nbi_structured_read(nbi_constraint *out, nbi_arena *arena, const json_t *obj,
                              const char *prefix, nbi_api_error *e)
{
    static const named_kind kinds[] = {{"json_schema", NBI_GRAMMAR_JSON_SCHEMA},
                                       {"regex", NBI_GRAMMAR_REGEX},
                                       {"ebnf", NBI_GRAMMAR_EBNF},
                                       {"structural_tag", NBI_GRAMMAR_TAG},
                                       {"guided_json", NBI_GRAMMAR_JSON_SCHEMA},
                                       {"guided_regex", NBI_GRAMMAR_REGEX},
                                       {"guided_choice", NBI_GRAMMAR_CHOICE},
                                       {"guided_grammar", NBI_GRAMMAR_EBNF},
                                       {"guided_json_object", NBI_GRAMMAR_JSON_OBJECT}};
    char place[NBI_PARAM_MAX], inner[NBI_PARAM_MAX];
    json_t *format = NULL, *given = NULL;
    *out = (nbi_constraint){0};
    NB_TRY(nbi_field_object(&given, obj, prefix, "structured_outputs", e));
    snprintf(inner, sizeof inner, "%.64sstructured_outputs.", prefix);
    NB_TRY(nbi_json_style_read(&out->style, obj, prefix, given, inner, e));
    NB_TRY(nbi_field_object(&format, obj, prefix, "response_format", e));
    snprintf(place, sizeof place, "%.64sresponse_format", prefix);
    if (format) NB_TRY(add_format(out, arena, format, place, false, e));
    NB_TRY(add_members(out, arena, obj, prefix, kinds, sizeof kinds / sizeof *kinds, e));
    return given ? add_structured(out, arena, given, inner, e) : NB_OK;
}
