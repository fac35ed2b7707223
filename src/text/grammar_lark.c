/* Trees of grammars and their text (see grammar_lark.h). Callers: grammar_ebnf.c, grammar_tag.c. */
#include "text/grammar_lark.h"

#include <string.h>

#undef nbi_lark_no_memory

nb_status nbi_lark_no_memory(nbi_lark *l)
{
    return nbi_fail(l->err, NB_NO_MEMORY, "the grammar: out of memory");
}

nb_status nbi_lark_init(nbi_lark *l, nb_error *err)
{
    *l = (nbi_lark){.err = err};
    l->arena.max_bytes = (size_t)64 << 20;
    l->rules = nbi_arena_alloc(&l->arena, NBI_LARK_RULES_MAX * sizeof *l->rules);
    return l->rules ? NB_OK : nbi_lark_no_memory(l);
}

void nbi_lark_deinit(nbi_lark *l)
{
    nbi_buf_free(&l->terminals);
    nbi_arena_free(&l->arena);
}

/* ---------------------------------------------------------------- building */

nb_status nbi_lark_new(nbi_lark_node **out, nbi_lark *l, nbi_lark_kind kind)
{
    nbi_lark_node *n = nbi_arena_alloc(&l->arena, sizeof *n);
    if (!n) return nbi_lark_no_memory(l);
    n->kind = kind;
    n->last = &n->first;
    *out = n;
    return NB_OK;
}

void nbi_lark_add(nbi_lark_node *parent, nbi_lark_node *child)
{
    NB_ASSERT(child && !child->next);
    *parent->last = child;
    parent->last = &child->next;
}

nb_status nbi_lark_text(nbi_lark_node **out, nbi_lark *l, const char *text, size_t n)
{
    NB_TRY(nbi_lark_new(out, l, NBI_LARK_TEXT));
    (*out)->text = nbi_arena_strndup(&l->arena, text, n);
    return (*out)->text ? NB_OK : nbi_lark_no_memory(l);
}

nb_status nbi_lark_literal(nbi_lark_node **out, nbi_lark *l, const char *s, size_t n)
{
    if (n == 0) return nbi_lark_new(out, l, NBI_LARK_SEQUENCE);
    nbi_buf text = {0};
    nb_status st = nbi_buf_add(&text, "/", 1);
    for (size_t i = 0; i < n && st == NB_OK; i++) {
        unsigned char c = (unsigned char)s[i];
        st = c < 0x80 ? nbi_buf_addf(&text, "\\x{%x}", c) : nbi_buf_add(&text, s + i, 1);
    }
    if (st == NB_OK) st = nbi_buf_add(&text, "/", 1);
    st = st == NB_OK ? nbi_lark_text(out, l, text.data, text.len) : nbi_lark_no_memory(l);
    nbi_buf_free(&text);
    return st;
}

nb_status nbi_lark_repeat(nbi_lark_node **out, nbi_lark *l, nbi_lark_node *child, uint32_t min,
                          uint32_t max)
{
    NB_TRY(nbi_lark_new(out, l, NBI_LARK_REPEAT));
    (*out)->min = min;
    (*out)->max = max;
    nbi_lark_add(*out, child);
    return NB_OK;
}

nb_status nbi_lark_new_rule(uint32_t *out, nbi_lark *l)
{
    if (l->n_rules == NBI_LARK_RULES_MAX)
        return nbi_fail(l->err, NB_TOO_LARGE, "the grammar has more than %u rules",
                        NBI_LARK_RULES_MAX);
    *out = l->n_rules++;
    return NB_OK;
}

nb_status nbi_lark_ref(nbi_lark_node **out, nbi_lark *l, uint32_t rule)
{
    NB_TRY(nbi_lark_new(out, l, NBI_LARK_RULE));
    (*out)->id = rule;
    return NB_OK;
}

/* ---------------------------------------------------------------- what is regular */

/* Recursion here and below is bounded by what the builders nest. */
bool nbi_lark_is_regular(const nbi_lark *l, const nbi_lark_node *n)
{
    if (n->kind == NBI_LARK_RULE) return l->rules[n->id].regular;
    if (n->kind == NBI_LARK_LAZY || n->kind == NBI_LARK_JSON || n->kind == NBI_LARK_TOKEN)
        return false;
    for (const nbi_lark_node *c = n->first; c; c = c->next) {
        if (!nbi_lark_is_regular(l, c)) return false;
    }
    return true;
}

/* The smallest set: what never gets in depends on a cycle. */
void nbi_lark_find_regular(nbi_lark *l, uint32_t first)
{
    for (bool changed = true; changed;) {
        changed = false;
        for (uint32_t i = first; i < l->n_rules; i++) {
            nbi_lark_rule *r = &l->rules[i];
            if (r->regular || !nbi_lark_is_regular(l, r->body)) continue;
            changed = r->regular = true;
        }
    }
}

/* ---------------------------------------------------------------- writing */

static nb_status put_repeat(nbi_buf *out, const nbi_lark_node *n)
{
    if (n->max != NBI_LARK_NO_MAX) return nbi_buf_addf(out, "{%u,%u}", n->min, n->max);
    if (n->min > 1) return nbi_buf_addf(out, "{%u,}", n->min);
    return nbi_buf_add(out, n->min ? "+" : "*", 1);
}

/* A regular node as a part of a terminal. */
static nb_status put_terminal(nbi_buf *out, const nbi_lark_node *n)
{
    if (n->kind == NBI_LARK_TEXT) return nbi_buf_add(out, n->text, strlen(n->text));
    if (n->kind == NBI_LARK_RULE) return nbi_buf_addf(out, "T%u", n->id);
    if (!n->first) return nbi_buf_add(out, "\"\"", 2);
    NB_TRY(nbi_buf_add(out, "(", 1));
    for (const nbi_lark_node *c = n->first; c; c = c->next) {
        if (c != n->first)
            NB_TRY(n->kind == NBI_LARK_CHOICE ? nbi_buf_add(out, " | ", 3)
                                              : nbi_buf_add(out, " ", 1));
        NB_TRY(put_terminal(out, c));
    }
    NB_TRY(nbi_buf_add(out, ")", 1));
    return n->kind == NBI_LARK_REPEAT ? put_repeat(out, n) : NB_OK;
}

/* A run of regular children of `parent` from `first` up to `end`, as one terminal. In a choice all
 * regular ones are taken, wherever they stand. */
static nb_status put_run(nbi_buf *out, nbi_lark *l, const nbi_lark_node *parent,
                         const nbi_lark_node *first, const nbi_lark_node *end)
{
    bool choice = parent->kind == NBI_LARK_CHOICE, any = false;
    NB_TRY(nbi_buf_addf(out, "X%u", l->n_terminals));
    NB_TRY(nbi_buf_addf(&l->terminals, "X%u: ", l->n_terminals++));
    for (const nbi_lark_node *c = first; c != end; c = c->next) {
        if (choice && !nbi_lark_is_regular(l, c)) continue;
        if (any)
            NB_TRY(choice ? nbi_buf_add(&l->terminals, " | ", 3)
                          : nbi_buf_add(&l->terminals, " ", 1));
        NB_TRY(put_terminal(&l->terminals, c));
        any = true;
    }
    return nbi_buf_add(&l->terminals, "\n", 1);
}

/* A rule with an attribute stands alone. */
static nb_status put_lazy(nbi_buf *out, nbi_lark *l, const nbi_lark_node *n)
{
    uint32_t index = l->n_terminals++;
    NB_TRY(nbi_buf_addf(out, "l%u", index));
    NB_TRY(nbi_buf_addf(&l->terminals, "l%u[lazy]: X%u\nX%u: ", index, index, index));
    NB_TRY(put_terminal(&l->terminals, n->first));
    return nbi_buf_add(&l->terminals, "\n", 1);
}

static nb_status put_rule(nbi_buf *out, nbi_lark *l, const nbi_lark_node *n);

static nb_status put_sequence(nbi_buf *out, nbi_lark *l, const nbi_lark_node *n)
{
    for (const nbi_lark_node *c = n->first; c;) {
        if (c != n->first) NB_TRY(nbi_buf_add(out, " ", 1));
        const nbi_lark_node *end = c;
        while (end && nbi_lark_is_regular(l, end)) end = end->next;
        if (end != c) {
            NB_TRY(put_run(out, l, n, c, end));
            c = end;
        } else {
            NB_TRY(put_rule(out, l, c));
            c = c->next;
        }
    }
    return NB_OK;
}

static nb_status put_choice(nbi_buf *out, nbi_lark *l, const nbi_lark_node *n)
{
    bool any = false, run = false;
    for (const nbi_lark_node *c = n->first; c; c = c->next) {
        bool regular = nbi_lark_is_regular(l, c);
        if (regular && run) continue;
        if (any) NB_TRY(nbi_buf_add(out, " | ", 3));
        if (regular)
            NB_TRY(put_run(out, l, n, c, NULL));
        else
            NB_TRY(put_rule(out, l, c));
        run |= regular;
        any = true;
    }
    return NB_OK;
}

/* A node that is not regular. */
static nb_status put_rule(nbi_buf *out, nbi_lark *l, const nbi_lark_node *n)
{
    switch (n->kind) {
    case NBI_LARK_RULE: return nbi_buf_addf(out, "r%u", n->id);
    case NBI_LARK_LAZY: return put_lazy(out, l, n);
    case NBI_LARK_TOKEN: return nbi_buf_addf(out, "<[%u]>", n->id);
    case NBI_LARK_JSON:
        NB_TRY(nbi_buf_add(out, "%json ", 6));
        return nbi_buf_add(out, n->text, strlen(n->text));
    default: break;
    }
    NB_TRY(nbi_buf_add(out, "(", 1));
    if (n->kind == NBI_LARK_CHOICE)
        NB_TRY(put_choice(out, l, n));
    else
        NB_TRY(put_sequence(out, l, n));
    NB_TRY(nbi_buf_add(out, ")", 1));
    return n->kind == NBI_LARK_REPEAT ? put_repeat(out, n) : NB_OK;
}

static nb_status put_start(nbi_buf *out, nbi_lark *l, const nbi_lark_node *start)
{
    NB_TRY(nbi_buf_add(out, "start: ", 7));
    if (!nbi_lark_is_regular(l, start)) {
        NB_TRY(put_rule(out, l, start));
    } else if (start->kind == NBI_LARK_RULE) {
        NB_TRY(nbi_buf_addf(out, "T%u", start->id));
    } else {
        NB_TRY(nbi_buf_addf(out, "X%u", l->n_terminals));
        NB_TRY(nbi_buf_addf(&l->terminals, "X%u: ", l->n_terminals++));
        NB_TRY(put_terminal(&l->terminals, start));
        NB_TRY(nbi_buf_add(&l->terminals, "\n", 1));
    }
    return nbi_buf_add(out, "\n", 1);
}

static nb_status put_grammar(nbi_buf *out, nbi_lark *l, const nbi_lark_node *start)
{
    NB_TRY(put_start(out, l, start));
    for (uint32_t i = 0; i < l->n_rules; i++) {
        const nbi_lark_rule *r = &l->rules[i];
        NB_TRY(nbi_buf_addf(out, "%c%u: ", r->regular ? 'T' : 'r', i));
        if (r->regular)
            NB_TRY(put_terminal(out, r->body));
        else
            NB_TRY(put_rule(out, l, r->body));
        NB_TRY(nbi_buf_add(out, "\n", 1));
    }
    return l->terminals.len ? nbi_buf_add(out, l->terminals.data, l->terminals.len) : NB_OK;
}

nb_status nbi_lark_write(nbi_buf *out, nbi_lark *l, const nbi_lark_node *start)
{
    return put_grammar(out, l, start) == NB_OK ? NB_OK : nbi_lark_no_memory(l);
}
