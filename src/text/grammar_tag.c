/* Structural tags as trees of grammar_lark.h (see grammar_tag.h). One function per format. Caller:
 * grammar_source.c. */
#include "text/grammar_tag.h"

#include <string.h>

#include "text/grammar_tag_impl.h"

typedef nbi_lark_node node;
typedef nbi_tag_mark mark;
typedef nbi_tag_ends ends;
typedef nbi_tag_place place;
typedef nbi_tag_reader reader;

/* A format that was read. */
typedef struct part {
    node *node;
    bool open; /* free text at its end: has the ends that it was given in it */
} part;

/* ---------------------------------------------------------------- values */

static nb_status read_format(part *out, reader *r, const json_t *f, const ends *stop,
                             const place *at, unsigned depth);

/* "json_schema" of a format, "schema" of a structure; the schema may also stand in a string. */
static nb_status schema_node(node **out, reader *r, const json_t *value, const place *at)
{
    nbi_buf text = {0};
    json_t *schema = NULL;
    nb_status st = NB_OK;
    if (!value) return nbi_tag_bad(r, at, NB_INVALID, "is missing");
    if (json_is_string(value))
        st = nbi_json_parse(&schema, json_string_value(value), json_string_length(value),
                            "the schema", r->err);
    else
        schema = json_deep_copy(value);
    if (st == NB_OK && !schema) st = nbi_lark_no_memory(&r->lark);
    if (st == NB_OK) st = nbi_grammar_put_schema(&text, &schema, NULL, r->err);
    if (st == NB_OK) st = nbi_tag_new(out, r, NBI_LARK_JSON);
    if (st == NB_OK) {
        (*out)->text = nbi_arena_strndup(&r->lark.arena, text.data, text.len);
        if (!(*out)->text) st = nbi_lark_no_memory(&r->lark);
    }
    json_decref(schema);
    nbi_buf_free(&text);
    return st == NB_OK || st == NB_NO_MEMORY ? st : nbi_tag_placed(r, at, st);
}

static nb_status read_schema(part *out, reader *r, const json_t *f, const place *at)
{
    const place here = nbi_tag_member(at, "json_schema");
    const json_t *style = nbi_tag_find(f, "style");
    bool any_order = false;
    NB_TRY(nbi_tag_check_members(r, f, "type json_schema style any_order", at));
    NB_TRY(nbi_tag_read_flag(&any_order, r, f, "any_order", at));
    if (any_order) return nbi_tag_bad(r, at, NB_UNSUPPORTED, "\"any_order\" is not supported");
    if (style && (!json_is_string(style) || strcmp(json_string_value(style), "json") != 0))
        return nbi_tag_bad(r, at, NB_UNSUPPORTED, "\"style\" is not supported, but for \"json\"");
    return schema_node(&out->node, r, nbi_tag_find(f, "json_schema"), &here);
}

static nb_status read_regex(part *out, reader *r, const json_t *f, const place *at)
{
    const place here = nbi_tag_member(at, "pattern");
    nbi_buf text = {0};
    mark m = {0};
    NB_TRY(nbi_tag_check_members(r, f, "type pattern", at));
    NB_TRY(nbi_tag_need_string(&m, r, nbi_tag_find(f, "pattern"), &here));
    nb_status st = nbi_grammar_put_regex(&text, m.s, m.n, true, r->err);
    if (st == NB_OK) st = nbi_lark_text(&out->node, &r->lark, text.data, text.len);
    nbi_buf_free(&text);
    return st == NB_OK || st == NB_NO_MEMORY ? st : nbi_tag_placed(r, &here, st);
}

static nb_status read_grammar(part *out, reader *r, const json_t *f, const place *at)
{
    const place here = nbi_tag_member(at, "grammar");
    mark m = {0};
    NB_TRY(nbi_tag_check_members(r, f, "type grammar", at));
    NB_TRY(nbi_tag_need_string(&m, r, nbi_tag_find(f, "grammar"), &here));
    nb_status st = nbi_grammar_read_ebnf(&out->node, &r->lark, m.s, m.n);
    return st == NB_OK || st == NB_NO_MEMORY ? st : nbi_tag_placed(r, &here, st);
}

static nb_status read_const(part *out, reader *r, const json_t *f, const place *at)
{
    const place here = nbi_tag_member(at, "value");
    mark m = {0};
    NB_TRY(nbi_tag_check_members(r, f, "type value", at));
    NB_TRY(nbi_tag_need_string(&m, r, nbi_tag_find(f, "value"), &here));
    NB_TRY(nbi_tag_new(&out->node, r, NBI_LARK_SEQUENCE));
    return nbi_tag_add_mark(out->node, r, &m);
}

static nb_status read_single_token(part *out, reader *r, const json_t *f, const place *at)
{
    int32_t id;
    NB_TRY(nbi_tag_read_token_format(&id, r, f, at));
    return nbi_tag_token_node(&out->node, r, id);
}

static nb_status read_any(part *out, reader *r, const json_t *f, const ends *stop, const place *at)
{
    const char *text;
    bool tokens = strcmp(json_string_value(json_object_get(f, "type")), "any_tokens") == 0;
    NB_TRY(nbi_tag_check_members(r, f, tokens ? "type exclude_tokens" : "type excludes max_chars",
                                 at));
    NB_TRY(nbi_tag_check_excluded(r, f, at));
    NB_TRY(nbi_tag_read_free(&text, r, f, at));
    out->open = true;
    return nbi_tag_until(&out->node, r, &(nbi_tag_lead){.text = text}, stop);
}

/* ---------------------------------------------------------------- compositions */

static nb_status read_closed(node **out, reader *r, const json_t *f, const place *at,
                             unsigned depth)
{
    static const ends none = {.n = 0};
    part p = {0};
    NB_TRY(read_format(&p, r, f, &none, at, depth));
    if (p.open)
        return nbi_tag_bad(
            r, at, NB_UNSUPPORTED,
            "free text is only supported as the last element, or in a tag with an end");
    *out = p.node;
    return NB_OK;
}

static nb_status read_sequence(part *out, reader *r, const json_t *f, const ends *stop,
                               const place *at, unsigned depth)
{
    const json_t *list;
    const place here = nbi_tag_member(at, "elements");
    NB_TRY(nbi_tag_check_members(r, f, "type elements", at));
    NB_TRY(nbi_tag_need_list(&list, r, f, "elements", at));
    NB_TRY(nbi_tag_new(&out->node, r, NBI_LARK_SEQUENCE));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const place where = nbi_tag_entry(&here, i);
        part p = {0};
        if (i + 1 < json_array_size(list))
            NB_TRY(read_closed(&p.node, r, json_array_get(list, i), &where, depth));
        else
            NB_TRY(read_format(&p, r, json_array_get(list, i), stop, &where, depth));
        nbi_lark_add(out->node, p.node);
        out->open = p.open;
    }
    return NB_OK;
}

static nb_status read_or(part *out, reader *r, const json_t *f, const ends *stop, const place *at,
                         unsigned depth)
{
    const json_t *list;
    const place here = nbi_tag_member(at, "elements");
    NB_TRY(nbi_tag_check_members(r, f, "type elements", at));
    NB_TRY(nbi_tag_need_list(&list, r, f, "elements", at));
    NB_TRY(nbi_tag_new(&out->node, r, NBI_LARK_CHOICE));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const place where = nbi_tag_entry(&here, i);
        part p = {0};
        NB_TRY(read_format(&p, r, json_array_get(list, i), stop, &where, depth));
        if (i && p.open != out->open)
            return nbi_tag_bad(r, &where, NB_UNSUPPORTED,
                               "free text beside elements that end by themselves is not supported");
        nbi_lark_add(out->node, p.node);
        out->open = p.open;
    }
    return NB_OK;
}

static nb_status read_repeat(part *out, reader *r, const json_t *f, const char *type,
                             const place *at, unsigned depth)
{
    const place here = nbi_tag_member(at, "content");
    uint32_t min = strcmp(type, "plus") == 0, max = NBI_LARK_NO_MAX;
    node *child;
    if (strcmp(type, "optional") == 0) max = 1;
    if (strcmp(type, "repeat") == 0) {
        const json_t *most = nbi_tag_find(f, "max");
        NB_TRY(nbi_tag_check_members(r, f, "type content min max", at));
        NB_TRY(nbi_tag_read_count(&min, r, f, "min", at));
        if (!json_is_integer(most) || json_integer_value(most) != -1)
            NB_TRY(nbi_tag_read_count(&max, r, f, "max", at));
        if (max < min) return nbi_tag_bad(r, at, NB_INVALID, "\"max\" is less than \"min\"");
    } else {
        NB_TRY(nbi_tag_check_members(r, f, "type content", at));
    }
    NB_TRY(read_closed(&child, r, json_object_get(f, "content"), &here, depth));
    return nbi_lark_repeat(&out->node, &r->lark, child, min, max);
}

/* ---------------------------------------------------------------- tags */

/* A tag whose content and end are a rule. */
typedef struct tag {
    mark begin;
    uint32_t rest;
    bool open;
} tag;

static nb_status add_end(ends *out, const reader *r, const json_t *value, const place *at)
{
    mark m = {.token = -1};
    if (nbi_tag_is_token_format(value))
        NB_TRY(nbi_tag_read_token_format(&m.token, r, value, at));
    else
        NB_TRY(nbi_tag_need_string(&m, r, value, at));
    if (out->n == NBI_TAG_ENDS_MAX)
        return nbi_tag_bad(r, at, NB_TOO_LARGE, "more than %u ends", NBI_TAG_ENDS_MAX);
    out->at[out->n++] = m;
    return NB_OK;
}

/* *n_empty: ends that are the empty text. */
static nb_status read_ends(ends *out, size_t *n_empty, const reader *r, const json_t *f,
                           const place *at)
{
    const json_t *end = nbi_tag_find(f, "end"), *value;
    const place here = nbi_tag_member(at, "end");
    size_t i;
    if (!json_is_array(end)) {
        NB_TRY(add_end(out, r, end, &here));
    } else if (json_array_size(end) == 0) {
        return nbi_tag_bad(r, &here, NB_INVALID, "is empty");
    }
    json_array_foreach(end, i, value)
    {
        const place where = nbi_tag_entry(&here, i);
        NB_TRY(add_end(out, r, value, &where));
    }
    *n_empty = 0;
    for (i = 0; i < out->n; i++) *n_empty += out->at[i].token < 0 && out->at[i].n == 0;
    return NB_OK;
}

static nb_status rule_of(uint32_t *out, reader *r, node *body)
{
    NB_TRY(nbi_lark_new_rule(out, &r->lark));
    r->lark.rules[*out] = (nbi_lark_rule){body, nbi_lark_is_regular(&r->lark, body)};
    return NB_OK;
}

/* Content that is an expression ends with the first end behind it. */
static nb_status close_tag(tag *out, reader *r, node *content, const ends *end, size_t n_empty)
{
    nbi_tag_lead lead = {.text = NULL};
    node *body, *close;
    NB_TRY(rule_of(&lead.rule, r, content));
    if (r->lark.rules[lead.rule].regular && n_empty == 0) {
        NB_TRY(nbi_tag_until(&body, r, &lead, end));
    } else {
        NB_TRY(nbi_tag_new(&body, r, NBI_LARK_SEQUENCE));
        NB_TRY(nbi_tag_add_rule(body, r, lead.rule));
        NB_TRY(nbi_tag_any_end(&close, r, end));
        nbi_lark_add(body, close);
    }
    return rule_of(&out->rest, r, body);
}

static nb_status read_tag(tag *out, reader *r, const json_t *f, const ends *stop, const place *at,
                          unsigned depth)
{
    const place inside = nbi_tag_member(at, "content"), first = nbi_tag_member(at, "begin");
    const json_t *begin = nbi_tag_find(f, "begin"), *type = nbi_tag_find(f, "type");
    ends end = {.n = 0};
    size_t n_empty;
    part p = {0};
    if (!json_is_object(f)) return nbi_tag_bad(r, at, NB_INVALID, "must be an object");
    if (type && (!json_is_string(type) || strcmp(json_string_value(type), "tag") != 0))
        return nbi_tag_bad(r, at, NB_INVALID, "\"type\" must be \"tag\"");
    NB_TRY(nbi_tag_check_members(r, f, "type begin content end", at));
    out->begin.token = -1;
    if (nbi_tag_is_token_format(begin))
        NB_TRY(nbi_tag_read_token_format(&out->begin.token, r, begin, &first));
    else
        NB_TRY(nbi_tag_need_string(&out->begin, r, begin, &first));
    NB_TRY(read_ends(&end, &n_empty, r, f, at));
    NB_TRY(
        read_format(&p, r, json_object_get(f, "content"), n_empty ? stop : &end, &inside, depth));
    if (!p.open) return close_tag(out, r, p.node, &end, n_empty);
    if (n_empty && n_empty < end.n)
        return nbi_tag_bad(r, at, NB_UNSUPPORTED,
                           "\"end\" of free text may be empty or not, not both");
    out->open = n_empty > 0;
    return rule_of(&out->rest, r, p.node);
}

/* {"begin", "schema", "end"} */
static nb_status read_structure(tag *out, reader *r, const json_t *f, const place *at)
{
    const place first = nbi_tag_member(at, "begin"), schema = nbi_tag_member(at, "schema");
    ends end = {.n = 0};
    size_t n_empty;
    node *content;
    if (!json_is_object(f)) return nbi_tag_bad(r, at, NB_INVALID, "must be an object");
    NB_TRY(nbi_tag_check_members(r, f, "begin schema end", at));
    NB_TRY(nbi_tag_need_string(&out->begin, r, nbi_tag_find(f, "begin"), &first));
    NB_TRY(read_ends(&end, &n_empty, r, f, at));
    NB_TRY(schema_node(&content, r, nbi_tag_find(f, "schema"), &schema));
    return close_tag(out, r, content, &end, n_empty);
}

/* The whole tag, for where it has to come. */
static nb_status tag_node(node **out, reader *r, const tag *t)
{
    NB_TRY(nbi_tag_new(out, r, NBI_LARK_SEQUENCE));
    NB_TRY(nbi_tag_add_mark(*out, r, &t->begin));
    return nbi_tag_add_rule(*out, r, t->rest);
}

static nb_status read_one_tag(part *out, reader *r, const json_t *f, const ends *stop,
                              const place *at, unsigned depth)
{
    tag t = {0};
    NB_TRY(read_tag(&t, r, f, stop, at, depth));
    out->open = t.open;
    return tag_node(&out->node, r, &t);
}

/* ---------------------------------------------------------------- lists of tags */

typedef struct tags {
    tag at[NBI_TAG_LIST_MAX];
    size_t n;
} tags;

static nb_status read_tags(tags **out, reader *r, const json_t *f, bool structures, const place *at,
                           unsigned depth)
{
    static const ends none = {.n = 0};
    const json_t *list;
    const char *key = structures ? "structures" : "tags";
    const place here = nbi_tag_member(at, key);
    NB_TRY(nbi_tag_need_list(&list, r, f, key, at));
    *out = nbi_arena_alloc(&r->lark.arena, sizeof **out);
    if (!*out) return nbi_lark_no_memory(&r->lark);
    (*out)->n = json_array_size(list);
    for (size_t i = 0; i < (*out)->n; i++) {
        const place where = nbi_tag_entry(&here, i);
        const json_t *value = json_array_get(list, i);
        tag *t = &(*out)->at[i];
        NB_TRY(structures ? read_structure(t, r, value, &where)
                          : read_tag(t, r, value, &none, &where, depth));
        if (t->open)
            return nbi_tag_bad(r, &where, NB_UNSUPPORTED,
                               "free text needs an \"end\" that is not empty");
    }
    return NB_OK;
}

typedef struct triggers {
    mark at[NBI_TAG_LIST_MAX];
    size_t n;
    bool tokens;
} triggers;

static nb_status read_triggers(triggers **out, reader *r, const json_t *f, bool tokens,
                               const place *at)
{
    const json_t *list;
    const char *key = tokens ? "trigger_tokens" : "triggers";
    const place here = nbi_tag_member(at, key);
    NB_TRY(nbi_tag_need_list(&list, r, f, key, at));
    triggers *all = nbi_arena_alloc(&r->lark.arena, sizeof *all);
    if (!all) return nbi_lark_no_memory(&r->lark);
    all->tokens = tokens;
    all->n = json_array_size(list);
    for (size_t i = 0; i < all->n; i++) {
        const place where = nbi_tag_entry(&here, i);
        mark *m = &all->at[i];
        m->token = -1;
        if (tokens) {
            NB_TRY(nbi_tag_read_token(&m->token, r, json_array_get(list, i), &where));
            continue;
        }
        NB_TRY(nbi_tag_need_string(m, r, json_array_get(list, i), &where));
        if (m->n == 0) return nbi_tag_bad(r, &where, NB_INVALID, "is empty");
    }
    *out = all;
    return NB_OK;
}

static bool begins(const mark *trigger, const mark *begin)
{
    if (trigger->token >= 0) return trigger->token == begin->token;
    return trigger->n <= begin->n && memcmp(trigger->s, begin->s, trigger->n) == 0;
}

/* Exactly one trigger begins a tag. */
static nb_status check_begins(const reader *r, const triggers *all, const mark *begin,
                              const place *at)
{
    size_t n_hits = 0;
    if (all->tokens != (begin->token >= 0))
        return nbi_tag_bad(r, at, NB_INVALID, "\"begin\" must be a %s here",
                           all->tokens ? "token" : "text");
    for (size_t i = 0; i < all->n; i++) n_hits += begins(&all->at[i], begin);
    if (n_hits == 1) return NB_OK;
    return nbi_tag_bad(r, at, NB_INVALID, "\"begin\" begins with %s, expected exactly one",
                       n_hits ? "several triggers" : "no trigger");
}

/* One of the tags, whole. */
static nb_status one_of(node **out, reader *r, const tags *all)
{
    NB_TRY(nbi_tag_new(out, r, NBI_LARK_CHOICE));
    for (size_t i = 0; i < all->n; i++) {
        node *whole;
        NB_TRY(tag_node(&whole, r, &all->at[i]));
        nbi_lark_add(*out, whole);
    }
    return NB_OK;
}

/* Free text, a trigger, and the tags that it begins. */
static nb_status add_triggered(node *items, reader *r, const tags *all, const mark *trigger,
                               const char *text)
{
    const nbi_tag_lead lead = {.text = text};
    node *rests, *seq;
    uint32_t rule;
    NB_TRY(nbi_tag_new(&rests, r, NBI_LARK_CHOICE));
    for (size_t i = 0; i < all->n; i++) {
        const tag *t = &all->at[i];
        if (!begins(trigger, &t->begin)) continue;
        NB_TRY(nbi_tag_new(&seq, r, NBI_LARK_SEQUENCE));
        NB_TRY(nbi_tag_add_behind(seq, r, &t->begin, trigger->n));
        NB_TRY(nbi_tag_add_rule(seq, r, t->rest));
        nbi_lark_add(rests, seq);
        NB_TRY(nbi_tag_add_across(items, r, &lead, &t->begin, trigger->n, t->rest));
    }
    if (!rests->first) return NB_OK; /* free text, since it begins nothing */
    NB_TRY(rule_of(&rule, r, rests));
    return nbi_tag_add_ways(items, r, &lead, trigger, &rule);
}

static nb_status build_triggered(part *out, reader *r, const json_t *f, const tags *all,
                                 bool tokens, const ends *stop, const place *at)
{
    const place list = nbi_tag_member(at, at || tokens ? "tags" : "structures");
    triggers *begin;
    const char *text;
    bool first = false, once = false;
    node *items, *rest, *whole, *one;
    NB_TRY(read_triggers(&begin, r, f, tokens, at));
    NB_TRY(nbi_tag_read_flag(&first, r, f, "at_least_one", at));
    NB_TRY(nbi_tag_read_flag(&once, r, f, "stop_after_first", at));
    NB_TRY(nbi_tag_check_excluded(r, f, at));
    NB_TRY(nbi_tag_read_free(&text, r, f, at));
    for (size_t i = 0; i < all->n; i++) {
        const place where = nbi_tag_entry(&list, i);
        NB_TRY(check_begins(r, begin, &all->at[i].begin, &where));
    }
    NB_TRY(nbi_tag_new(&items, r, NBI_LARK_CHOICE));
    for (size_t i = 0; i < begin->n; i++) NB_TRY(add_triggered(items, r, all, &begin->at[i], text));
    NB_TRY(one_of(&one, r, all));
    if (first && once) {
        out->node = one;
        return NB_OK;
    }
    out->open = true;
    NB_TRY(nbi_tag_region(&rest, r, items, text, once, stop));
    if (!first) {
        out->node = rest;
        return NB_OK;
    }
    NB_TRY(nbi_tag_new(&whole, r, NBI_LARK_SEQUENCE));
    nbi_lark_add(whole, one);
    nbi_lark_add(whole, rest);
    out->node = whole;
    return NB_OK;
}

static nb_status read_triggered(part *out, reader *r, const json_t *f, const ends *stop,
                                const place *at, unsigned depth)
{
    tags *all;
    bool tokens = nbi_tag_find(f, "trigger_tokens");
    NB_TRY(nbi_tag_check_members(r, f,
                                 tokens
                                     ? "type trigger_tokens tags at_least_one stop_after_first "
                                       "exclude_tokens"
                                     : "type triggers tags at_least_one stop_after_first excludes",
                                 at));
    NB_TRY(read_tags(&all, r, f, false, at, depth));
    return build_triggered(out, r, f, all, tokens, stop, at);
}

static nb_status read_separated(part *out, reader *r, const json_t *f, const place *at,
                                unsigned depth)
{
    const place here = nbi_tag_member(at, "separator");
    bool first = false, once = false;
    node *one, *more, *again, *whole;
    mark separator = {0};
    tags *all;
    NB_TRY(nbi_tag_check_members(r, f, "type tags separator at_least_one stop_after_first", at));
    NB_TRY(nbi_tag_read_flag(&first, r, f, "at_least_one", at));
    NB_TRY(nbi_tag_read_flag(&once, r, f, "stop_after_first", at));
    NB_TRY(nbi_tag_need_string(&separator, r, nbi_tag_find(f, "separator"), &here));
    NB_TRY(read_tags(&all, r, f, false, at, depth));
    NB_TRY(one_of(&one, r, all));
    NB_TRY(nbi_tag_new(&whole, r, NBI_LARK_SEQUENCE));
    nbi_lark_add(whole, one);
    if (!once) {
        NB_TRY(nbi_tag_new(&more, r, NBI_LARK_SEQUENCE));
        NB_TRY(nbi_tag_add_mark(more, r, &separator));
        NB_TRY(one_of(&one, r, all));
        nbi_lark_add(more, one);
        NB_TRY(nbi_lark_repeat(&again, &r->lark, more, 0, NBI_LARK_NO_MAX));
        nbi_lark_add(whole, again);
    }
    out->node = whole;
    return first ? NB_OK : nbi_lark_repeat(&out->node, &r->lark, whole, 0, 1);
}

static nb_status dispatch_item(node *items, reader *r, const json_t *pair, bool tokens,
                               const char *text, const place *at, unsigned depth)
{
    const place first = nbi_tag_entry(at, 0), second = nbi_tag_entry(at, 1);
    mark m = {.token = -1};
    node *content;
    uint32_t rule;
    if (json_array_size(pair) != 2)
        return nbi_tag_bad(r, at, NB_INVALID, "must be a pair of a pattern and a format");
    if (tokens) {
        NB_TRY(nbi_tag_read_token(&m.token, r, json_array_get(pair, 0), &first));
    } else {
        NB_TRY(nbi_tag_need_string(&m, r, json_array_get(pair, 0), &first));
        if (m.n == 0) return nbi_tag_bad(r, &first, NB_INVALID, "is empty");
    }
    NB_TRY(read_closed(&content, r, json_array_get(pair, 1), &second, depth));
    NB_TRY(rule_of(&rule, r, content));
    return nbi_tag_add_ways(items, r, &(nbi_tag_lead){.text = text}, &m, &rule);
}

static nb_status read_dispatch(part *out, reader *r, const json_t *f, bool tokens, const ends *stop,
                               const place *at, unsigned depth)
{
    const json_t *rules;
    const char *text;
    const place here = nbi_tag_member(at, "rules");
    bool loop = true;
    node *items;
    NB_TRY(nbi_tag_check_members(
        r, f, tokens ? "type rules loop exclude_tokens" : "type rules loop excludes", at));
    NB_TRY(nbi_tag_need_list(&rules, r, f, "rules", at));
    NB_TRY(nbi_tag_read_flag(&loop, r, f, "loop", at));
    NB_TRY(nbi_tag_check_excluded(r, f, at));
    NB_TRY(nbi_tag_read_free(&text, r, f, at));
    NB_TRY(nbi_tag_new(&items, r, NBI_LARK_CHOICE));
    for (size_t i = 0; i < json_array_size(rules); i++) {
        const place where = nbi_tag_entry(&here, i);
        NB_TRY(dispatch_item(items, r, json_array_get(rules, i), tokens, text, &where, depth));
    }
    out->open = true;
    return nbi_tag_region(&out->node, r, items, text, !loop, stop);
}

/* ---------------------------------------------------------------- all of it */

static bool is_one_of(const char *type, const char *a, const char *b)
{
    return strcmp(type, a) == 0 || strcmp(type, b) == 0;
}

static nb_status read_format(part *out, reader *r, const json_t *f, const ends *stop,
                             const place *at, unsigned depth)
{
    const char *type = json_string_value(json_object_get(f, "type"));
    if (!json_is_object(f)) return nbi_tag_bad(r, at, NB_INVALID, "must be an object");
    if (!type) return nbi_tag_bad(r, at, NB_INVALID, "\"type\" must be a string");
    if (++depth > NBI_TAG_DEPTH_MAX)
        return nbi_tag_bad(r, at, NB_TOO_LARGE, "more than %u formats in one another",
                           NBI_TAG_DEPTH_MAX);
    if (strcmp(type, "const_string") == 0) return read_const(out, r, f, at);
    if (strcmp(type, "json_schema") == 0) return read_schema(out, r, f, at);
    if (strcmp(type, "regex") == 0) return read_regex(out, r, f, at);
    if (strcmp(type, "grammar") == 0) return read_grammar(out, r, f, at);
    if (strcmp(type, "token") == 0) return read_single_token(out, r, f, at);
    if (is_one_of(type, "any_text", "any_tokens")) return read_any(out, r, f, stop, at);
    if (strcmp(type, "sequence") == 0) return read_sequence(out, r, f, stop, at, depth);
    if (strcmp(type, "or") == 0) return read_or(out, r, f, stop, at, depth);
    if (is_one_of(type, "optional", "repeat") || is_one_of(type, "star", "plus"))
        return read_repeat(out, r, f, type, at, depth);
    if (strcmp(type, "tag") == 0) return read_one_tag(out, r, f, stop, at, depth);
    if (is_one_of(type, "triggered_tags", "token_triggered_tags"))
        return read_triggered(out, r, f, stop, at, depth);
    if (strcmp(type, "tags_with_separator") == 0) return read_separated(out, r, f, at, depth);
    if (is_one_of(type, "dispatch", "token_dispatch"))
        return read_dispatch(out, r, f, strcmp(type, "token_dispatch") == 0, stop, at, depth);
    return nbi_tag_bad(r, at, NB_UNSUPPORTED, "the format \"%.64s\" is not supported", type);
}

static nb_status read_structures(part *out, reader *r, const json_t *root)
{
    static const ends none = {.n = 0};
    tags *all;
    NB_TRY(nbi_tag_check_members(r, root, "type structures triggers", NULL));
    NB_TRY(read_tags(&all, r, root, true, NULL, 0));
    return build_triggered(out, r, root, all, false, &none, NULL);
}

static nb_status read_root(part *out, reader *r, const json_t *root)
{
    static const ends none = {.n = 0};
    const place at = nbi_tag_member(NULL, "format");
    const json_t *type = nbi_tag_find(root, "type");
    if (!json_is_object(root)) return nbi_tag_bad(r, NULL, NB_INVALID, "must be an object");
    if (type && (!json_is_string(type) || strcmp(json_string_value(type), "structural_tag") != 0))
        return nbi_tag_bad(r, NULL, NB_INVALID, "\"type\" must be \"structural_tag\"");
    if (nbi_tag_find(root, "structures")) return read_structures(out, r, root);
    if (!nbi_tag_find(root, "format"))
        return nbi_tag_bad(r, NULL, NB_INVALID,
                           "\"format\" is missing, or \"structures\" and \"triggers\"");
    NB_TRY(nbi_tag_check_members(r, root, "type format", NULL));
    return read_format(out, r, nbi_tag_find(root, "format"), &none, &at, 0);
}

nb_status nbi_grammar_from_tag(nbi_buf *text, const char *source, size_t n,
                               nbi_grammar_tokens *tokens, nb_error *err)
{
    reader r = {.tokens = tokens, .err = err};
    json_t *root = NULL;
    part all = {0};
    tokens->n_own = 0;
    NB_TRY(nbi_json_parse(&root, source, n, "the structural tag", err));
    nb_status st = nbi_lark_init(&r.lark, err);
    if (st == NB_OK) st = read_root(&all, &r, root);
    if (st == NB_OK) st = nbi_lark_write(text, &r.lark, all.node);
    nbi_lark_deinit(&r.lark);
    json_decref(root);
    return st;
}
