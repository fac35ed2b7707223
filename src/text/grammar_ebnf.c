/* EBNF as XGrammar and llama.cpp read it, to the Lark dialect of the grammar library. Caller:
 * grammar_source.c.
 *
 *   rule ::= item* ( "|" item* )*          item ::= atom ( "*" | "+" | "?" | "{" n ( "," m? )? "}"
 * )* atom ::= "text" | [a-z^...] | . | name | ( ... )          # comment
 *
 * The library splits text into lexemes, longest first, which is not what these rules mean. So
 * whatever does not depend on recursion becomes a single lexeme: a rule that reaches no cycle is
 * a terminal, and inside the other rules the longest runs of such items are. Names are replaced by
 * numbers: Lark tells rules and terminals apart by their case. */
#include "text/grammar_source.h"

#include <string.h>

#include "base/utf8.h"

#define RULES_MAX   512u
#define NESTING_MAX 64u /* groups in groups */
#define STACKED_MAX 4u  /* operators behind one item */
#define REPEAT_MAX  100000u

typedef enum node_kind { NODE_TEXT, NODE_RULE, NODE_SEQUENCE, NODE_CHOICE, NODE_REPEAT } node_kind;

typedef struct node {
    node_kind kind;
    struct node *next;          /* among its parent's children */
    struct node *first, **last; /* children */
    const char *text;           /* NODE_TEXT: a regular expression */
    uint32_t rule;
    uint32_t min, max; /* NODE_REPEAT; max UINT32_MAX: none */
} node;

typedef struct rule {
    const char *name; /* in the source */
    size_t n;
    node *body;   /* NULL: not defined yet */
    bool regular; /* reaches no cycle */
} rule;

typedef struct ebnf {
    const char *source, *at, *end;
    nbi_arena arena;
    rule *rules; /* [RULES_MAX] */
    uint32_t n_rules, n_terminals;
    nbi_buf scratch, terminals; /* one literal; lines for terminals made of parts of rules */
    nb_error *err;
} ebnf;

/* ---------------------------------------------------------------- reading */

static nb_status bad(ebnf *e, const char *what)
{
    unsigned line = 1;
    for (const char *p = e->source; p < e->at; p++) line += *p == '\n';
    return nbi_fail(e->err, NB_INVALID, "the grammar, line %u: %s", line, what);
}

static nb_status no_memory(ebnf *e)
{
    return nbi_fail(e->err, NB_NO_MEMORY, "the grammar: out of memory");
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
    for (uint32_t i = 0; i < e->n_rules; i++) {
        if (e->rules[i].n != n || memcmp(e->rules[i].name, e->at, n) != 0) continue;
        e->at += n;
        *out = i;
        return NB_OK;
    }
    if (e->n_rules == RULES_MAX)
        return nbi_fail(e->err, NB_TOO_LARGE, "the grammar has more than %u rules", RULES_MAX);
    *out = e->n_rules;
    e->rules[e->n_rules++] = (rule){.name = e->at, .n = n};
    e->at += n;
    return NB_OK;
}

static nb_status new_node(node **out, ebnf *e, node_kind kind)
{
    node *n = nbi_arena_alloc(&e->arena, sizeof *n);
    if (!n) return no_memory(e);
    n->kind = kind;
    n->last = &n->first;
    *out = n;
    return NB_OK;
}

static void add_child(node *parent, node *child)
{
    NB_ASSERT(child);
    *parent->last = child;
    parent->last = &child->next;
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
    NB_TRY(new_node(out, e, NODE_TEXT));
    (*out)->text = nbi_arena_strndup(&e->arena, e->scratch.data, e->scratch.len);
    return (*out)->text ? NB_OK : no_memory(e);
}

static nb_status read_string(node **out, ebnf *e)
{
    e->at++;
    nbi_buf_clear(&e->scratch);
    NB_TRY(nbi_buf_add(&e->scratch, "", 0));
    while (peek(e) != '"') {
        uint32_t code;
        NB_TRY(read_char(&code, e));
        NB_TRY(nbi_buf_addf(&e->scratch, "\\x{%x}", code));
    }
    e->at++;
    if (e->scratch.len == 0) return new_node(out, e, NODE_SEQUENCE); /* "": the empty sequence */
    return text_node(out, e);
}

static nb_status read_class(node **out, ebnf *e)
{
    e->at++;
    nbi_buf_clear(&e->scratch);
    NB_TRY(nbi_buf_add(&e->scratch, "[", 1));
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
        if (value > REPEAT_MAX)
            return nbi_fail(e->err, NB_TOO_LARGE,
                            "the grammar repeats something more than %u times", REPEAT_MAX);
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
        *max = UINT32_MAX;
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
        uint32_t min = c == '+', max = c == '?' ? 1 : UINT32_MAX;
        if (c == '{') {
            NB_TRY(read_braces(&min, &max, e));
        } else if (c == '*' || c == '+' || c == '?') {
            e->at++;
        } else {
            return NB_OK;
        }
        if (n == STACKED_MAX) return bad(e, "too many operators behind one item");
        node *repeat;
        NB_TRY(new_node(&repeat, e, NODE_REPEAT));
        repeat->min = min;
        repeat->max = max;
        add_child(repeat, *item);
        *item = repeat;
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
        NB_TRY(nbi_buf_add(&e->scratch, "(?s:.)", 6));
        return text_node(out, e);
    }
    if (!is_name(c, true))
        return bad(e, "expected \"text\", [class], (group), a rule's name or \"|\"");
    NB_TRY(new_node(out, e, NODE_RULE));
    return find_rule(&(*out)->rule, e);
}

static nb_status read_sequence(node **out, ebnf *e, unsigned depth)
{
    NB_TRY(new_node(out, e, NODE_SEQUENCE));
    for (;;) {
        skip_space(e);
        if (e->at == e->end || *e->at == '|' || *e->at == ')' || at_definition(e)) return NB_OK;
        node *item = NULL;
        NB_TRY(read_atom(&item, e, depth));
        NB_TRY(read_repeats(&item, e));
        add_child(*out, item);
    }
}

static nb_status read_choice(node **out, ebnf *e, unsigned depth)
{
    if (depth > NESTING_MAX)
        return nbi_fail(e->err, NB_TOO_LARGE, "the grammar nests groups deeper than %u",
                        NESTING_MAX);
    NB_TRY(new_node(out, e, NODE_CHOICE));
    for (;;) {
        node *sequence;
        NB_TRY(read_sequence(&sequence, e, depth));
        add_child(*out, sequence);
        if (peek(e) != '|') return NB_OK;
        e->at++;
    }
}

static nb_status read_rules(ebnf *e)
{
    for (skip_space(e); e->at < e->end; skip_space(e)) {
        uint32_t index;
        if (!at_definition(e)) return bad(e, "expected a rule: name ::= ...");
        NB_TRY(find_rule(&index, e));
        if (e->rules[index].body) return bad(e, "a rule is defined twice");
        skip_space(e);
        e->at += 3; /* at_definition() saw "::=" */
        node *body;
        NB_TRY(read_choice(&body, e, 0));
        if (e->at < e->end && *e->at == ')') return bad(e, "a \")\" has no \"(\"");
        e->rules[index].body = body;
    }
    for (uint32_t i = 0; i < e->n_rules; i++) {
        const rule *r = &e->rules[i];
        if (!r->body)
            return nbi_fail(e->err, NB_INVALID, "the grammar has no rule \"%.*s\"",
                            (int)(r->n < 100 ? r->n : 100), r->name);
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- writing */

/* Recursion here and below is bounded by NESTING_MAX and STACKED_MAX. */
static bool is_regular(const ebnf *e, const node *n)
{
    if (n->kind == NODE_RULE) return e->rules[n->rule].regular;
    for (const node *c = n->first; c; c = c->next) {
        if (!is_regular(e, c)) return false;
    }
    return true;
}

/* The smallest set: what never gets in depends on a cycle. */
static void find_regular(ebnf *e)
{
    for (bool changed = true; changed;) {
        changed = false;
        for (uint32_t i = 0; i < e->n_rules; i++) {
            if (e->rules[i].regular || !is_regular(e, e->rules[i].body)) continue;
            changed = e->rules[i].regular = true;
        }
    }
}

static nb_status put_repeat(nbi_buf *out, const node *n)
{
    if (n->max != UINT32_MAX) return nbi_buf_addf(out, "{%u,%u}", n->min, n->max);
    if (n->min > 1) return nbi_buf_addf(out, "{%u,}", n->min);
    return nbi_buf_add(out, n->min ? "+" : "*", 1);
}

/* A regular node as a part of a terminal. */
static nb_status put_terminal(nbi_buf *out, const ebnf *e, const node *n)
{
    if (n->kind == NODE_TEXT) return nbi_buf_addf(out, "/%s/", n->text);
    if (n->kind == NODE_RULE) return nbi_buf_addf(out, "T%u", n->rule);
    if (!n->first) return nbi_buf_add(out, "\"\"", 2);
    NB_TRY(nbi_buf_add(out, "(", 1));
    for (const node *c = n->first; c; c = c->next) {
        if (c != n->first)
            NB_TRY(n->kind == NODE_CHOICE ? nbi_buf_add(out, " | ", 3) : nbi_buf_add(out, " ", 1));
        NB_TRY(put_terminal(out, e, c));
    }
    NB_TRY(nbi_buf_add(out, ")", 1));
    return n->kind == NODE_REPEAT ? put_repeat(out, n) : NB_OK;
}

/* A run of regular children of `parent` from `first` up to `end`, as one terminal. In a choice all
 * regular ones are taken, wherever they stand. */
static nb_status put_run(nbi_buf *out, ebnf *e, const node *parent, const node *first,
                         const node *end)
{
    bool choice = parent->kind == NODE_CHOICE, any = false;
    NB_TRY(nbi_buf_addf(out, "X%u", e->n_terminals));
    NB_TRY(nbi_buf_addf(&e->terminals, "X%u: ", e->n_terminals++));
    for (const node *c = first; c != end; c = c->next) {
        if (choice && !is_regular(e, c)) continue;
        if (any)
            NB_TRY(choice ? nbi_buf_add(&e->terminals, " | ", 3)
                          : nbi_buf_add(&e->terminals, " ", 1));
        NB_TRY(put_terminal(&e->terminals, e, c));
        any = true;
    }
    return nbi_buf_add(&e->terminals, "\n", 1);
}

static nb_status put_rule(nbi_buf *out, ebnf *e, const node *n);

static nb_status put_sequence(nbi_buf *out, ebnf *e, const node *n)
{
    for (const node *c = n->first; c;) {
        if (c != n->first) NB_TRY(nbi_buf_add(out, " ", 1));
        const node *end = c;
        while (end && is_regular(e, end)) end = end->next;
        if (end != c) {
            NB_TRY(put_run(out, e, n, c, end));
            c = end;
        } else {
            NB_TRY(put_rule(out, e, c));
            c = c->next;
        }
    }
    return NB_OK;
}

static nb_status put_choice(nbi_buf *out, ebnf *e, const node *n)
{
    bool any = false, run = false;
    for (const node *c = n->first; c; c = c->next) {
        bool regular = is_regular(e, c);
        if (regular && run) continue;
        if (any) NB_TRY(nbi_buf_add(out, " | ", 3));
        if (regular)
            NB_TRY(put_run(out, e, n, c, NULL));
        else
            NB_TRY(put_rule(out, e, c));
        run |= regular;
        any = true;
    }
    return NB_OK;
}

/* A node that is not regular. */
static nb_status put_rule(nbi_buf *out, ebnf *e, const node *n)
{
    if (n->kind == NODE_RULE) return nbi_buf_addf(out, "r%u", n->rule);
    NB_TRY(nbi_buf_add(out, "(", 1));
    if (n->kind == NODE_CHOICE)
        NB_TRY(put_choice(out, e, n));
    else
        NB_TRY(put_sequence(out, e, n));
    NB_TRY(nbi_buf_add(out, ")", 1));
    return n->kind == NODE_REPEAT ? put_repeat(out, n) : NB_OK;
}

static nb_status put_grammar(nbi_buf *out, ebnf *e)
{
    for (uint32_t i = 0; i < e->n_rules; i++) {
        const rule *r = &e->rules[i];
        bool root = r->n == 4 && memcmp(r->name, "root", 4) == 0;
        if (root) NB_TRY(nbi_buf_addf(out, "start: %c%u\n", r->regular ? 'T' : 'r', i));
        NB_TRY(nbi_buf_addf(out, "%c%u: ", r->regular ? 'T' : 'r', i));
        if (r->regular)
            NB_TRY(put_terminal(out, e, r->body));
        else
            NB_TRY(put_rule(out, e, r->body));
        NB_TRY(nbi_buf_add(out, "\n", 1));
    }
    return nbi_buf_add(out, e->terminals.data, e->terminals.len);
}

static nb_status check_root(ebnf *e)
{
    for (uint32_t i = 0; i < e->n_rules; i++) {
        if (e->rules[i].n == 4 && memcmp(e->rules[i].name, "root", 4) == 0) return NB_OK;
    }
    return nbi_fail(e->err, NB_INVALID,
                    "the grammar has no rule \"root\" (or, as Lark, \"start\")");
}

nb_status nbi_grammar_from_ebnf(nbi_buf *text, const char *source, size_t n, nb_error *err)
{
    ebnf e = {.source = source, .at = source, .end = source + n, .err = err};
    e.arena.max_bytes = (size_t)64 << 20;
    e.rules = nbi_arena_alloc(&e.arena, RULES_MAX * sizeof *e.rules);
    nb_status st = e.rules ? read_rules(&e) : no_memory(&e);
    if (st == NB_OK) st = check_root(&e);
    if (st == NB_OK) {
        find_regular(&e);
        st = put_grammar(text, &e);
    }
    nbi_buf_free(&e.scratch);
    nbi_buf_free(&e.terminals);
    nbi_arena_free(&e.arena);
    return st;
}
