/* EBNF as XGrammar and llama.cpp read it, as a tree of grammar_lark.h. Callers: grammar_source.c,
 * grammar_tag.c.
 *
 *   rule ::= item* ( "|" item* )*          item ::= atom ( "*" | "+" | "?" | "{" n ( "," m? )? "}"
 * )* atom ::= "text" | [a-z^...] | . | name | ( ... )          # comment */
#include <string.h>

#include "base/utf8.h"
#include "text/grammar_source.h"

#define NESTING_MAX 64u /* groups in groups */
#define STACKED_MAX 4u  /* operators behind one item */

typedef nbi_lark_node node;

typedef struct name {
    const char *at; /* in the source */
    size_t n;
} name;

typedef struct ebnf {
    const char *source, *at, *end;
    nbi_lark *lark;
    uint32_t first;  /* of the rules that are this source's */
    name *names;     /* [NBI_LARK_RULES_MAX], by rule */
    nbi_buf scratch; /* one literal or class */
    nb_error *err;
} ebnf;

/* ---------------------------------------------------------------- reading */

static nb_status bad(ebnf *e, const char *what)
{
    unsigned line = 1;
    for (const char *p = e->source; p < e->at; p++) line += *p == '\n';
    return nbi_fail(e->err, NB_INVALID, "the grammar, line %u: %s", line, what);
}

static char peek(const ebnf *e)
{
    return e->at < e->end ? *e->at : 0;
}

static void skip_space(ebnf *e)
{
    for (; e->at < e->end; e->at++) {
        if (*e->at == '#') {
            while (e->at < e->end && *e->at != '\n') e->at++;
            if (e->at == e->end) return;
        } else if (!strchr(" \t\r\n", *e->at)) {
            return;
        }
    }
}

static bool is_name(char c, bool first)
{
    if (((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_') return true;
    return !first && ((c >= '0' && c <= '9') || c == '-');
}

static size_t name_length(const char *at, const char *end)
{
    size_t n = 0;
    while (at + n < end && is_name(at[n], n == 0)) n++;
    return n;
}

/* Does a definition begin here? */
static bool at_definition(const ebnf *e)
{
    const char *p = e->at + name_length(e->at, e->end);
    if (p == e->at) return false;
    while (p < e->end && strchr(" \t\r\n", *p)) p++;
    return e->end - p >= 3 && memcmp(p, "::=", 3) == 0;
}

static nb_status find_rule(uint32_t *out, ebnf *e)
{
    size_t n = name_length(e->at, e->end);
    const char *at = e->at;
    e->at += n;
    for (*out = e->first; *out < e->lark->n_rules; ++*out) {
        if (e->names[*out].n == n && memcmp(e->names[*out].at, at, n) == 0) return NB_OK;
    }
    NB_TRY(nbi_lark_new_rule(out, e->lark));
    e->names[*out] = (name){.at = at, .n = n};
    return NB_OK;
}

static nb_status read_hex(uint32_t *out, ebnf *e, unsigned digits)
{
    uint32_t value = 0;
    for (unsigned i = 0; i < digits; i++) {
        const char *hex = "0123456789abcdef";
        char c = peek(e);
        const char *at = c ? strchr(hex, c >= 'A' && c <= 'F' ? c | 32 : c) : NULL;
        if (!at) return bad(e, "hexadecimal digits are missing behind a backslash");
        value = value << 4 | (uint32_t)(at - hex);
        e->at++;
    }
    if (value > 0x10ffff || (value >= 0xd800 && value < 0xe000))
        return bad(e, "an escape is not a character of Unicode");
    *out = value;
    return NB_OK;
}

/* One character of a literal or a class, escaped or not. The source is valid UTF-8. */
static nb_status read_char(uint32_t *out, ebnf *e)
{
    static const char from[] = "nrtfv0", to[] = "\n\r\t\f\v";
    if (e->at == e->end) return bad(e, "a string or class is not closed");
    if (*e->at != '\\') {
        e->at += nbi_utf8_next(e->at, (size_t)(e->end - e->at), out);
        return NB_OK;
    }
    e->at++;
    char c = peek(e);
    if (!c) return bad(e, "nothing follows a backslash");
    if (c == 'x' || c == 'u' || c == 'U') {
        e->at++;
        return read_hex(out, e, c == 'x' ? 2 : c == 'u' ? 4 : 8);
    }
    const char *known = strchr(from, c);
    if (!known && (((c | 32) >= 'a' && (c | 32) <= 'z') || (c >= '0' && c <= '9')))
        return bad(e,
                   "an escape is not known; \\n \\r \\t \\f \\v \\0 \\xHH \\uHHHH \\UHHHHHHHH are");
    if (known) {
        *out = (unsigned char)to[known - from];
        e->at++;
        return NB_OK;
    }
    e->at += nbi_utf8_next(e->at, (size_t)(e->end - e->at), out);
    return NB_OK;
}

static nb_status text_node(node **out, ebnf *e)
{
    NB_TRY(nbi_buf_add(&e->scratch, "/", 1));
    return nbi_lark_text(out, e->lark, e->scratch.data, e->scratch.len);
}

static nb_status read_string(node **out, ebnf *e)
{
    e->at++;
    nbi_buf_clear(&e->scratch);
    NB_TRY(nbi_buf_add(&e->scratch, "/", 1));
    while (peek(e) != '"') {
        uint32_t code = 0;
        NB_TRY(read_char(&code, e));
        NB_TRY(nbi_buf_addf(&e->scratch, "\\x{%x}", code));
    }
    e->at++;
    if (e->scratch.len == 1)
        return nbi_lark_new(out, e->lark, NBI_LARK_SEQUENCE); /* "": the empty sequence */
    return text_node(out, e);
}

static nb_status read_class(node **out, ebnf *e)
{
    e->at++;
    nbi_buf_clear(&e->scratch);
    NB_TRY(nbi_buf_add(&e->scratch, "/[", 2));
    if (peek(e) == '^') {
        NB_TRY(nbi_buf_add(&e->scratch, "^", 1));
        e->at++;
    }
    if (peek(e) == ']') return bad(e, "a class [...] is empty");
    while (peek(e) != ']') {
        uint32_t from = 0, to = 0;
        NB_TRY(read_char(&from, e));
        NB_TRY(nbi_buf_addf(&e->scratch, "\\x{%x}", from));
        if (peek(e) != '-' || e->end - e->at < 2 || e->at[1] == ']') continue;
        e->at++;
        NB_TRY(read_char(&to, e));
        if (to < from) return bad(e, "a range in a class runs backwards");
        NB_TRY(nbi_buf_addf(&e->scratch, "-\\x{%x}", to));
    }
    e->at++;
    NB_TRY(nbi_buf_add(&e->scratch, "]", 1));
    return text_node(out, e);
}

static nb_status read_number(uint32_t *out, ebnf *e)
{
    uint32_t value = 0;
    if (peek(e) < '0' || peek(e) > '9') return bad(e, "a number is missing in {...}");
    for (; peek(e) >= '0' && peek(e) <= '9'; e->at++) {
        value = value * 10 + (uint32_t)(*e->at - '0');
        if (value > NBI_LARK_REPEAT_MAX)
            return nbi_fail(e->err, NB_TOO_LARGE,
                            "the grammar repeats something more than %u times",
                            NBI_LARK_REPEAT_MAX);
    }
    *out = value;
    return NB_OK;
}

static nb_status read_braces(uint32_t *min, uint32_t *max, ebnf *e)
{
    e->at++;
    skip_space(e);
    NB_TRY(read_number(min, e));
    *max = *min;
    skip_space(e);
    if (peek(e) == ',') {
        e->at++;
        skip_space(e);
        *max = NBI_LARK_NO_MAX;
        if (peek(e) != '}') NB_TRY(read_number(max, e));
        skip_space(e);
    }
    if (peek(e) != '}') return bad(e, "a repetition {...} is not closed");
    if (*max < *min) return bad(e, "a repetition {n,m} has m < n");
    e->at++;
    return NB_OK;
}

/* Postfix operators; *item is replaced by what repeats it. */
static nb_status read_repeats(node **item, ebnf *e)
{
    for (unsigned n = 0;; n++) {
        char c = peek(e);
        uint32_t min = c == '+', max = c == '?' ? 1 : NBI_LARK_NO_MAX;
        if (c == '{') {
            NB_TRY(read_braces(&min, &max, e));
        } else if (c == '*' || c == '+' || c == '?') {
            e->at++;
        } else {
            return NB_OK;
        }
        if (n == STACKED_MAX) return bad(e, "too many operators behind one item");
        NB_TRY(nbi_lark_repeat(item, e->lark, *item, min, max));
    }
}

static nb_status read_choice(node **out, ebnf *e, unsigned depth);

static nb_status read_group(node **out, ebnf *e, unsigned depth)
{
    e->at++;
    if (peek(e) == '=')
        return nbi_fail(e->err, NB_UNSUPPORTED, "the grammar's look-ahead (=...) is not supported");
    NB_TRY(read_choice(out, e, depth + 1));
    if (peek(e) != ')') return bad(e, "a \")\" is missing");
    e->at++;
    return NB_OK;
}

static nb_status read_atom(node **out, ebnf *e, unsigned depth)
{
    char c = peek(e);
    if (c == '"') return read_string(out, e);
    if (c == '[') return read_class(out, e);
    if (c == '(') return read_group(out, e, depth);
    if (c == '.') {
        e->at++;
        nbi_buf_clear(&e->scratch);
        NB_TRY(nbi_buf_add(&e->scratch, "/(?s:.)", 7));
        return text_node(out, e);
    }
    if (!is_name(c, true))
        return bad(e, "expected \"text\", [class], (group), a rule's name or \"|\"");
    NB_TRY(nbi_lark_new(out, e->lark, NBI_LARK_RULE));
    return find_rule(&(*out)->id, e);
}

static nb_status read_sequence(node **out, ebnf *e, unsigned depth)
{
    NB_TRY(nbi_lark_new(out, e->lark, NBI_LARK_SEQUENCE));
    for (;;) {
        skip_space(e);
        if (e->at == e->end || *e->at == '|' || *e->at == ')' || at_definition(e)) return NB_OK;
        node *item = NULL;
        NB_TRY(read_atom(&item, e, depth));
        NB_TRY(read_repeats(&item, e));
        nbi_lark_add(*out, item);
    }
}

static nb_status read_choice(node **out, ebnf *e, unsigned depth)
{
    if (depth > NESTING_MAX)
        return nbi_fail(e->err, NB_TOO_LARGE, "the grammar nests groups deeper than %u",
                        NESTING_MAX);
    NB_TRY(nbi_lark_new(out, e->lark, NBI_LARK_CHOICE));
    for (;;) {
        node *sequence;
        NB_TRY(read_sequence(&sequence, e, depth));
        nbi_lark_add(*out, sequence);
        if (peek(e) != '|') return NB_OK;
        e->at++;
    }
}

static nb_status read_rules(ebnf *e)
{
    nbi_lark_rule *rules = e->lark->rules;
    for (skip_space(e); e->at < e->end; skip_space(e)) {
        uint32_t index;
        if (!at_definition(e)) return bad(e, "expected a rule: name ::= ...");
        NB_TRY(find_rule(&index, e));
        if (rules[index].body) return bad(e, "a rule is defined twice");
        skip_space(e);
        e->at += 3; /* at_definition() saw "::=" */
        node *body;
        NB_TRY(read_choice(&body, e, 0));
        if (e->at < e->end && *e->at == ')') return bad(e, "a \")\" has no \"(\"");
        rules[index].body = body;
    }
    for (uint32_t i = e->first; i < e->lark->n_rules; i++) {
        const name *r = &e->names[i];
        if (!rules[i].body)
            return nbi_fail(e->err, NB_INVALID, "the grammar has no rule \"%.*s\"",
                            (int)(r->n < 100 ? r->n : 100), r->at);
    }
    return NB_OK;
}

static nb_status find_root(node **out, ebnf *e)
{
    for (uint32_t i = e->first; i < e->lark->n_rules; i++) {
        if (e->names[i].n == 4 && memcmp(e->names[i].at, "root", 4) == 0)
            return nbi_lark_ref(out, e->lark, i);
    }
    return nbi_fail(e->err, NB_INVALID,
                    "the grammar has no rule \"root\" (or, as Lark, \"start\")");
}

nb_status nbi_grammar_read_ebnf(nbi_lark_node **root, nbi_lark *lark, const char *source, size_t n)
{
    ebnf e = {.source = source,
              .at = source,
              .end = source + n,
              .lark = lark,
              .first = lark->n_rules,
              .err = lark->err};
    e.names = nbi_arena_alloc(&lark->arena, NBI_LARK_RULES_MAX * sizeof *e.names);
    if (!e.names) return nbi_lark_no_memory(lark);
    nb_status st = read_rules(&e);
    if (st == NB_OK) st = find_root(root, &e);
    if (st == NB_OK) nbi_lark_find_regular(lark, e.first);
    nbi_buf_free(&e.scratch);
    return st;
}

nb_status nbi_grammar_from_ebnf(nbi_buf *text, const char *source, size_t n, nb_error *err)
{
    nbi_lark lark;
    nbi_lark_node *root = NULL;
    nb_status st = nbi_lark_init(&lark, err);
    if (st == NB_OK) st = nbi_grammar_read_ebnf(&root, &lark, source, n);
    if (st == NB_OK) st = nbi_lark_write(text, &lark, root);
    nbi_lark_deinit(&lark);
    return st;
}
