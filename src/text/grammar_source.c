/* Checks of what clients send as grammars (see grammar_source.h). Callers: grammar.c. */
#include "text/grammar_source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"
#include "text/grammar_tag.h"

#define STR_(x)      #x
#define STR(x)       STR_(x)
#define NODES_MAX    20000u /* values in a schema */
#define MULTIPLE_MAX 50000u
#define NESTING_MAX  200u /* brackets in a Lark grammar: its parser is recursive */

const char *nbi_grammar_noun(nbi_grammar_kind kind)
{
    switch (kind) {
    case NBI_GRAMMAR_JSON_OBJECT: return "the JSON grammar";
    case NBI_GRAMMAR_JSON_SCHEMA:
    case NBI_GRAMMAR_JSON_TIGHT:
    case NBI_GRAMMAR_JSON_SPACED: return "the schema";
    case NBI_GRAMMAR_REGEX: return "the expression";
    case NBI_GRAMMAR_CHOICE: return "the list of choices";
    case NBI_GRAMMAR_EBNF: return "the grammar";
    case NBI_GRAMMAR_TAG: return "the structural tag";
    case NBI_GRAMMAR_KIND_COUNT: break;
    }
    return "the grammar";
}

/* ---------------------------------------------------------------- JSON Schema */

typedef struct schema_walk {
    unsigned n_nodes;
    uint64_t multiple; /* least common multiple of the digits of all "multipleOf", 0: none */
    int min_exponent, max_exponent;
    nb_error *err;
} schema_walk;

/* Objects may repeat a key that is not in "properties" (the library does not remember keys), so
 * that only named properties count towards "minProperties", and one more. */
static nb_status check_min_properties(const json_t *schema, nb_error *err)
{
    const json_t *min = json_object_get(schema, "minProperties");
    if (!json_is_integer(min)) return NB_OK;
    size_t named = json_array_size(json_object_get(schema, "required"));
    bool open = !json_is_false(json_object_get(schema, "additionalProperties")) ||
                json_object_get(schema, "patternProperties");
    if (open && json_integer_value(min) > (json_int_t)named + 1)
        return nbi_fail(
            err, NB_UNSUPPORTED,
            "the schema's keyword \"minProperties\" is not supported above the number "
            "of required properties plus one, unless \"additionalProperties\" is false");
    return NB_OK;
}

static bool is_data(const char *key)
{
    return strcmp(key, "const") == 0 || strcmp(key, "enum") == 0 || strcmp(key, "default") == 0 ||
           strcmp(key, "examples") == 0;
}

/* The library counts remainders: as many states as the number has digits' value, and for several
 * that may meet (allOf) as their common multiple, on one scale. */
static nb_status check_multiple(schema_walk *w, double value)
{
    char text[32];
    if (!(value > 0)) return NB_OK; /* the library says what is wrong */
    snprintf(text, sizeof text, "%.15e", value);
    uint64_t digits = 0;
    int exponent = atoi(strchr(text, 'e') + 1) - 15;
    for (const char *p = text; *p != 'e'; p++) {
        if (*p != '.') digits = digits * 10 + (uint64_t)(*p - '0');
    }
    for (; digits % 10 == 0 && exponent < 0; exponent++) digits /= 10;
    for (; exponent > 0 && digits <= MULTIPLE_MAX; exponent--) digits *= 10;
    NB_ASSERT(digits > 0); /* multipleOf is positive */
    uint64_t a = w->multiple ? w->multiple : digits, b = digits;
    if (!w->multiple || exponent < w->min_exponent) w->min_exponent = exponent;
    if (!w->multiple || exponent > w->max_exponent) w->max_exponent = exponent;
    w->multiple = a;
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    if (digits <= MULTIPLE_MAX) w->multiple *= digits / a;
    uint64_t scaled = digits > MULTIPLE_MAX ? digits : w->multiple;
    for (int i = w->min_exponent; i < w->max_exponent && scaled <= MULTIPLE_MAX; i++) scaled *= 10;
    if (scaled > MULTIPLE_MAX)
        return nbi_fail(w->err, NB_TOO_LARGE,
                        "the schema's \"multipleOf\" has too many digits: %g (together with all "
                        "others at most %u)",
                        value, MULTIPLE_MAX);
    return NB_OK;
}

static nb_status check_member(schema_walk *w, const char *key, const json_t *value)
{
    if (strcmp(key, "pattern") == 0 && json_string_length(value) > NBI_GRAMMAR_REGEX_MAX)
        return nbi_fail(w->err, NB_TOO_LARGE,
                        "a \"pattern\" of the schema has %zu bytes, more than %zu",
                        json_string_length(value), NBI_GRAMMAR_REGEX_MAX);
    if (strcmp(key, "multipleOf") == 0 && json_is_number(value))
        return check_multiple(w, json_number_value(value));
    return NB_OK;
}

/* Depth is bounded by the JSON parser. */
static nb_status check_schema(schema_walk *w, const json_t *value, bool data)
{
    if (++w->n_nodes > NODES_MAX)
        return nbi_fail(w->err, NB_TOO_LARGE, "the schema holds more than %u values", NODES_MAX);
    if (json_is_array(value)) {
        for (size_t i = 0; i < json_array_size(value); i++)
            NB_TRY(check_schema(w, json_array_get(value, i), data));
    } else if (json_is_object(value)) {
        if (!data) NB_TRY(check_min_properties(value, w->err));
        void *at = json_object_iter((json_t *)(uintptr_t)value);
        for (; at; at = json_object_iter_next((json_t *)(uintptr_t)value, at)) {
            const char *key = json_object_iter_key(at);
            if (!data) NB_TRY(check_member(w, key, json_object_iter_value(at)));
            NB_TRY(check_schema(w, json_object_iter_value(at), data || is_data(key)));
        }
    }
    return NB_OK;
}

static json_t *space_options(const nbi_grammar_space *space)
{
    static const nbi_grammar_space any = {.chars = " \t\n\r", .most = NBI_GRAMMAR_SPACE_MAX};
    char pattern[64] = "[";
    if (!space) space = &any;
    if (!space->chars[0] || !space->most) return json_pack("{s:b}", "whitespace_flexible", 0);
    for (const char *p = space->chars; *p && strlen(pattern) < 32; p++)
        snprintf(pattern + strlen(pattern), 5, "\\x%02X", (unsigned)*p);
    size_t n = strlen(pattern);
    snprintf(pattern + n, sizeof pattern - n, "]{1,%u}", space->most);
    return json_pack("{s:s}", "whitespace_pattern", pattern);
}

/* Options of the library ride in the schema; a client's own are dropped. */
static nb_status put_schema(nbi_buf *text, json_t *schema, const nbi_grammar_space *space,
                            nb_error *err)
{
    json_t *options = space_options(space);
    char *dump = NULL;
    if (options && json_object_set_new(schema, "x-guidance", options) == 0)
        dump = nbi_json_dumps(schema);
    nb_status st = dump ? nbi_buf_add(text, dump, strlen(dump)) : NB_NO_MEMORY;
    nbi_free(dump);
    return st == NB_OK ? NB_OK : nbi_fail(err, st, "the schema: out of memory");
}

nb_status nbi_grammar_put_schema(nbi_buf *text, json_t **schema, const nbi_grammar_space *space,
                                 nb_error *err)
{
    schema_walk walk = {.err = err};
    if (json_is_true(*schema)) {
        json_decref(*schema);
        *schema = json_object();
        if (!*schema) return nbi_fail(err, NB_NO_MEMORY, "the schema: out of memory");
    }
    if (json_is_false(*schema))
        return nbi_fail(err, NB_INVALID, "the schema is false: no value is valid");
    if (!json_is_object(*schema))
        return nbi_fail(err, NB_INVALID, "the schema must be a JSON object");
    NB_TRY(check_schema(&walk, *schema, false));
    return put_schema(text, *schema, space, err);
}

static nb_status prepare_schema(nbi_buf *text, const char *source, size_t n,
                                const nbi_grammar_space *space, nb_error *err)
{
    json_t *schema = NULL;
    NB_TRY(nbi_json_parse(&schema, source, n, "the schema", err));
    nb_status st = nbi_grammar_put_schema(text, &schema, space, err);
    json_decref(schema);
    return st;
}

static nb_status prepare_spaced(nbi_buf *text, const char *source, size_t n, nb_error *err)
{
    json_t *all = NULL;
    NB_TRY(nbi_json_parse(&all, source, n, "the schema", err));
    const json_t *most = json_object_get(all, "most");
    json_t *schema = json_incref(json_object_get(all, "schema"));
    nbi_grammar_space space = {.chars = json_string_value(json_object_get(all, "chars")),
                               .most = (uint32_t)json_integer_value(most)};
    nb_status st = NB_OK;
    if (!space.chars || strspn(space.chars, " \t\n\r") != strlen(space.chars) ||
        json_integer_value(most) < 0 || json_integer_value(most) > NBI_GRAMMAR_SPACE_MAX)
        st = nbi_fail(err, NB_INVALID, "the schema's white space is not known");
    if (st == NB_OK) st = nbi_grammar_put_schema(text, &schema, &space, err);
    json_decref(schema);
    json_decref(all);
    return st;
}

/* ---------------------------------------------------------------- expressions, choices, grammars
 */

static bool utf8_valid(const char *s, size_t n)
{
    uint32_t code = 0;
    for (size_t i = 0; i < n && code != NBI_UTF8_BAD;) i += nbi_utf8_next(s + i, n - i, &code);
    return code != NBI_UTF8_BAD;
}

static nb_status check_text(nbi_grammar_kind kind, const char *source, size_t n, nb_error *err)
{
    if (memchr(source, 0, n))
        return nbi_fail(err, NB_INVALID, "%s holds a NUL character", nbi_grammar_noun(kind));
    if (!utf8_valid(source, n))
        return nbi_fail(err, NB_INVALID, "%s is not valid UTF-8", nbi_grammar_noun(kind));
    return NB_OK;
}

/* \d, \w and \s mean ASCII, as in JSON Schema and in what other servers do; in Rust they are
 * Unicode's. A class may stand in a class, so what replaces them fits everywhere. */
static const char *ascii_class(char c)
{
    switch (c) {
    case 'd': return "[0-9]";
    case 'D': return "[^0-9]";
    case 'w': return "[0-9A-Za-z_]";
    case 'W': return "[^0-9A-Za-z_]";
    case 's': return "[ \\t\\n\\r\\x0b\\x0c]";
    case 'S': return "[^ \\t\\n\\r\\x0b\\x0c]";
    default: return NULL;
    }
}

/* One item of an expression: a character, or two with a backslash. In a Lark grammar a slash would
 * end the expression, and so would the end of a line. */
static nb_status put_item(nbi_buf *text, const char *s, size_t n, bool slashes)
{
    const char *class = n == 2 ? ascii_class(s[1]) : NULL;
    if (class) return nbi_buf_add(text, class, strlen(class));
    if (slashes && (s[n - 1] == '\n' || s[n - 1] == '\r'))
        return nbi_buf_addf(text, "\\x{%x}", (unsigned)s[n - 1]);
    if (slashes && n == 1 && *s == '/') return nbi_buf_add(text, "\\/", 2);
    return nbi_buf_add(text, s, n);
}

nb_status nbi_grammar_put_regex(nbi_buf *text, const char *source, size_t n, bool slashes,
                                nb_error *err)
{
    if (n > NBI_GRAMMAR_REGEX_MAX)
        return nbi_fail(err, NB_TOO_LARGE, "the expression has %zu bytes, more than %zu", n,
                        NBI_GRAMMAR_REGEX_MAX);
    NB_TRY(check_text(NBI_GRAMMAR_REGEX, source, n, err));
    if (slashes) NB_TRY(nbi_buf_add(text, "/", 1));
    for (size_t i = 0; i < n;) {
        size_t taken = i + 1 < n && source[i] == '\\' ? 2 : 1;
        NB_TRY(put_item(text, source + i, taken, slashes));
        i += taken;
    }
    return slashes ? nbi_buf_add(text, "/", 1) : NB_OK;
}

/* Everything but letters, digits and bytes of longer characters is escaped; control characters by
 * number. */
static nb_status add_literal(nbi_buf *text, const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        bool plain =
            c >= 0x80 || (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_';
        if (plain)
            NB_TRY(nbi_buf_add(text, s + i, 1));
        else
            NB_TRY(nbi_buf_addf(text, "\\x{%x}", c));
    }
    return NB_OK;
}

static nb_status add_choices(nbi_buf *text, const json_t *list, nb_error *err)
{
    size_t n = json_array_size(list);
    if (!json_is_array(list) || n == 0)
        return nbi_fail(err, NB_INVALID,
                        "the list of choices must be an array of strings, not empty");
    if (n > NBI_GRAMMAR_CHOICES_MAX)
        return nbi_fail(err, NB_TOO_LARGE, "the list of choices has %zu entries, more than %u", n,
                        NBI_GRAMMAR_CHOICES_MAX);
    for (size_t i = 0; i < n; i++) {
        const json_t *entry = json_array_get(list, i);
        if (!json_is_string(entry))
            return nbi_fail(err, NB_INVALID, "entry %zu of the list of choices is not a string", i);
        if (i) NB_TRY(nbi_buf_add(text, "|", 1));
        NB_TRY(add_literal(text, json_string_value(entry), json_string_length(entry)));
    }
    return NB_OK;
}

static nb_status prepare_choices(nbi_buf *text, const char *source, size_t n, nb_error *err)
{
    json_t *list = NULL;
    NB_TRY(nbi_json_parse(&list, source, n, "the list of choices", err));
    nb_status st = add_choices(text, list, err);
    json_decref(list);
    return st;
}

/* A Lark grammar has a rule `start:`; the other form has `::=`. */
static bool is_lark(const char *source, size_t n)
{
    const char *end = source + n;
    for (const char *line = source; line && line < end;) {
        while (line < end && (*line == ' ' || *line == '\t')) line++;
        if (end - line > 5 && memcmp(line, "start", 5) == 0) {
            const char *p = line + 5;
            while (p < end && (*p == ' ' || *p == '\t')) p++;
            if (p < end && *p == ':' && !(end - p > 2 && memcmp(p, "::=", 3) == 0)) return true;
        }
        line = memchr(line, '\n', (size_t)(end - line));
        if (line) line++;
    }
    return false;
}

static nb_status prepare_grammar(nbi_buf *text, const char *source, size_t n, nb_error *err)
{
    NB_TRY(check_text(NBI_GRAMMAR_EBNF, source, n, err));
    if (!is_lark(source, n)) return nbi_grammar_from_ebnf(text, source, n, err);
    unsigned depth = 0;
    for (size_t i = 0; i < n; i++) {
        if (memchr("([{", source[i], 3) && ++depth > NESTING_MAX)
            return nbi_fail(err, NB_TOO_LARGE, "the grammar has more than %u open brackets",
                            NESTING_MAX);
        if (memchr(")]}", source[i], 3) && depth) depth--;
    }
    return nbi_buf_add(text, source, n);
}

nb_status nbi_grammar_check_size(nbi_grammar_kind kind, size_t n, nb_error *err)
{
    if (n <= NBI_GRAMMAR_SOURCE_MAX) return NB_OK;
    return nbi_fail(err, NB_TOO_LARGE, "%s has %zu bytes, more than %zu", nbi_grammar_noun(kind), n,
                    NBI_GRAMMAR_SOURCE_MAX);
}

nb_status nbi_grammar_prepare(nbi_buf *text, const char **type, nbi_grammar_kind kind,
                              const char *source, size_t n, nbi_grammar_tokens *tokens,
                              nb_error *err)
{
    static const char any_object[] = "{\"type\":\"object\"}";
    static const nbi_grammar_space none = {.chars = "", .most = 0};
    NB_TRY(nbi_grammar_check_size(kind, n, err));
    tokens->n_own = 0;
    *type = "json_schema";
    switch (kind) {
    case NBI_GRAMMAR_JSON_OBJECT:
        return prepare_schema(text, any_object, sizeof any_object - 1, NULL, err);
    case NBI_GRAMMAR_JSON_SCHEMA: return prepare_schema(text, source, n, NULL, err);
    case NBI_GRAMMAR_JSON_TIGHT: return prepare_schema(text, source, n, &none, err);
    case NBI_GRAMMAR_JSON_SPACED: return prepare_spaced(text, source, n, err);
    case NBI_GRAMMAR_REGEX:
        *type = "regex";
        return nbi_grammar_put_regex(text, source, n, false, err);
    case NBI_GRAMMAR_CHOICE: *type = "regex"; return prepare_choices(text, source, n, err);
    case NBI_GRAMMAR_EBNF: *type = "lark"; return prepare_grammar(text, source, n, err);
    case NBI_GRAMMAR_TAG: *type = "lark"; return nbi_grammar_from_tag(text, source, n, tokens, err);
    case NBI_GRAMMAR_KIND_COUNT: break;
    }
    return nbi_fail(err, NB_INVALID, "unknown kind of grammar %d", (int)kind);
}

/* ---------------------------------------------------------------- complaints */

/* White space becomes single blanks; cut to the buffer. */
static void one_line(char *out, size_t cap, const char *message)
{
    size_t n = 0;
    for (const char *p = message; *p && n + 1 < cap; p++) {
        bool space = (unsigned char)*p <= ' ';
        if (space && (n == 0 || out[n - 1] == ' ')) continue;
        out[n++] = space ? ' ' : *p;
    }
    n = nbi_utf8_cut(out, n);
    while (n && out[n - 1] == ' ') n--;
    out[n] = 0;
}

/* "Unimplemented keys: ["a", "b"]" */
static nb_status refuse_keywords(const char *list, nb_error *err)
{
    char names[256];
    size_t n = strcspn(list, "]");
    snprintf(names, sizeof names, "%.*s", (int)(n < 200 ? n : 200), list);
    return nbi_fail(err, NB_UNSUPPORTED, "the schema uses keywords that are not supported: %s",
                    names);
}

/* A regular expression's fault is in the line "error: ..."; behind it follow excerpts. */
static void shorten(char *out, size_t cap, const char *message)
{
    const char *line = strstr(message, "\nerror: ");
    one_line(out, cap, line ? line + 8 : message);
    char *excerpt = strstr(out, " 1 | ");
    if (excerpt) *excerpt = 0;
    char *names = strstr(out, "; following special tokens");
    if (names) *names = 0;
}

nb_status nbi_grammar_refuse(nbi_grammar_kind kind, const char *message, nb_error *err)
{
    static const char keywords[] = "Unimplemented keys: [", format[] = "Unknown format: ";
    static const char *const unsupported[] = {"not supported", "look-around", "lookaround"};
    static const char *const large[] = {"too big", "too large", "too many", "fuel", "limit"};
    char text[320];
    const char *at = strstr(message, keywords);
    if (at) return refuse_keywords(at + sizeof keywords - 1, err);
    shorten(text, sizeof text, message);
    if (strstr(text, "NoExtension"))
        return nbi_fail(err, NB_INVALID, "%s is not valid: no text can match it",
                        nbi_grammar_noun(kind));
    if (strncmp(text, format, sizeof format - 1) == 0)
        return nbi_fail(err, NB_UNSUPPORTED, "the schema's \"format\" %.200s is not supported",
                        text + sizeof format - 1);
    if (strstr(text, "oneOf constraints"))
        return nbi_fail(err, NB_UNSUPPORTED,
                        "the schema's keyword \"oneOf\" is not supported where its options may "
                        "overlap; use \"anyOf\"");
    for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported; i++) {
        if (strstr(text, unsupported[i]))
            return nbi_fail(err, NB_UNSUPPORTED, "%s is not supported: %s", nbi_grammar_noun(kind),
                            text);
    }
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        if (strstr(text, large[i]))
            return nbi_fail(err, NB_TOO_LARGE, "%s is too complex: %s", nbi_grammar_noun(kind),
                            text);
    }
    return nbi_fail(err, NB_INVALID, "%s is not valid: %s", nbi_grammar_noun(kind), text);
}
