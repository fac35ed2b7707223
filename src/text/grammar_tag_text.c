/* Members, fixed texts and free text of structural tags (see grammar_tag_impl.h). Caller:
 * grammar_tag.c. */
#include "text/grammar_tag_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#undef nbi_tag_bad
#undef nbi_tag_placed

typedef nbi_lark_node node;
typedef nbi_tag_mark mark;
typedef nbi_tag_place place;
typedef nbi_tag_reader reader;

/* ---------------------------------------------------------------- sentences */

static void put_place(char *out, size_t cap, const place *at)
{
    size_t n = 0;
    if (!at) return;
    put_place(out, cap, at->up);
    n = strlen(out);
    if (at->in_list)
        snprintf(out + n, cap - n, "[%zu]", at->index);
    else
        snprintf(out + n, cap - n, "%s%s", n ? "." : "", at->key);
}

nb_status nbi_tag_bad(const reader *r, const place *at, nb_status st, const char *fmt, ...)
{
    char where[160] = "", what[320];
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    put_place(where, sizeof where, at);
    return nbi_fail(r->err, st, "the structural tag%s%s: %s", *where ? ", " : "", where, what);
}

/* A sentence of others, with its place before it. */
nb_status nbi_tag_placed(const reader *r, const place *at, nb_status st)
{
    char where[160] = "";
    put_place(where, sizeof where, at);
    return nbi_fail_prefix(r->err, st, "the structural tag, %s", where);
}

place nbi_tag_member(const place *up, const char *key)
{
    return (place){.up = up, .key = key};
}

place nbi_tag_entry(const place *up, size_t index)
{
    return (place){.up = up, .index = index, .in_list = true};
}

/* ---------------------------------------------------------------- members */

const json_t *nbi_tag_find(const json_t *obj, const char *key)
{
    const json_t *value = json_object_get(obj, key);
    return json_is_null(value) ? NULL : value;
}

static bool is_word(const char *words, const char *key, size_t n)
{
    for (const char *at = words; *at; at += strspn(at, " ")) {
        size_t length = strcspn(at, " ");
        if (length == n && memcmp(at, key, n) == 0) return true;
        at += length;
    }
    return false;
}

nb_status nbi_tag_check_members(const reader *r, const json_t *f, const char *known,
                                const place *at)
{
    void *it = json_object_iter((json_t *)(uintptr_t)f);
    for (; it; it = json_object_iter_next((json_t *)(uintptr_t)f, it)) {
        const char *key = json_object_iter_key(it);
        if (json_is_null(json_object_iter_value(it)) || is_word(known, key, strlen(key))) continue;
        return nbi_tag_bad(r, at, NB_UNSUPPORTED, "\"%.64s\" is not supported", key);
    }
    return NB_OK;
}

nb_status nbi_tag_need_list(const json_t **out, const reader *r, const json_t *f, const char *key,
                            const place *at)
{
    *out = nbi_tag_find(f, key);
    if (!json_is_array(*out) || json_array_size(*out) == 0)
        return nbi_tag_bad(r, at, NB_INVALID, "\"%s\" must be an array that is not empty", key);
    if (json_array_size(*out) > NBI_TAG_LIST_MAX)
        return nbi_tag_bad(r, at, NB_TOO_LARGE, "\"%s\" has %zu entries, more than %u", key,
                           json_array_size(*out), NBI_TAG_LIST_MAX);
    return NB_OK;
}

nb_status nbi_tag_need_string(mark *out, const reader *r, const json_t *value, const place *at)
{
    if (!json_is_string(value)) return nbi_tag_bad(r, at, NB_INVALID, "must be a string");
    *out = (mark){.s = json_string_value(value), .n = json_string_length(value), .token = -1};
    return NB_OK;
}

nb_status nbi_tag_read_flag(bool *out, const reader *r, const json_t *f, const char *key,
                            const place *at)
{
    const json_t *value = nbi_tag_find(f, key);
    if (value && !json_is_boolean(value))
        return nbi_tag_bad(r, at, NB_INVALID, "\"%s\" must be a boolean", key);
    if (value) *out = json_is_true(value);
    return NB_OK;
}

nb_status nbi_tag_read_count(uint32_t *out, const reader *r, const json_t *f, const char *key,
                             const place *at)
{
    const json_t *value = nbi_tag_find(f, key);
    json_int_t n = json_integer_value(value);
    if (!json_is_integer(value) || n < 0)
        return nbi_tag_bad(r, at, NB_INVALID, "\"%s\" must be a number of at least 0", key);
    if (n > NBI_LARK_REPEAT_MAX)
        return nbi_tag_bad(r, at, NB_TOO_LARGE, "\"%s\" is more than %u", key, NBI_LARK_REPEAT_MAX);
    *out = (uint32_t)n;
    return NB_OK;
}

/* ---------------------------------------------------------------- tokens and fixed texts */

static bool may_come(const nbi_grammar_tokens *t, int32_t id)
{
    if (id < 0 || (uint32_t)id >= t->n_tokens || !nbi_token_is_added(t->tokenizer, id))
        return false;
    for (uint32_t i = 0; i < t->n_eos; i++) {
        if (t->eos[i] == id) return false;
    }
    return true;
}

nb_status nbi_tag_token_node(node **out, reader *r, int32_t id)
{
    nbi_grammar_tokens *t = r->tokens;
    uint32_t i = 0;
    while (i < t->n_own && t->own[i] != id) i++;
    if (i == NBI_GRAMMAR_OWN_MAX)
        return nbi_tag_bad(r, NULL, NB_TOO_LARGE, "more than %u different added tokens",
                           NBI_GRAMMAR_OWN_MAX);
    t->own[i] = id;
    if (i == t->n_own) t->n_own++;
    NB_TRY(nbi_lark_new(out, &r->lark, NBI_LARK_TOKEN));
    (*out)->id = (uint32_t)id;
    return NB_OK;
}

/* The longest added token that begins here; its bytes, or 0. */
static size_t token_at(int32_t *id, const reader *r, const char *s, size_t n)
{
    const nbi_added_token *added;
    size_t n_added = nbi_added_tokens(r->tokens->tokenizer, &added), best = 0;
    for (size_t i = 0; i < n_added; i++) {
        const nbi_added_token *a = &added[i];
        if (a->n <= best || a->n > n || memcmp(a->text, s, a->n) != 0) continue;
        if (!may_come(r->tokens, a->id)) continue;
        *id = a->id;
        best = a->n;
    }
    return best;
}

/* The text before the first added token in it: *n_token 0 when there is none. */
static size_t text_before(int32_t *id, size_t *n_token, const reader *r, const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        *n_token = token_at(id, r, s + i, n - i);
        if (*n_token) return i;
    }
    *n_token = 0;
    return n;
}

nb_status nbi_tag_new(node **out, reader *r, nbi_lark_kind kind)
{
    return nbi_lark_new(out, &r->lark, kind);
}

static nb_status add_literal(node *seq, reader *r, const char *s, size_t n)
{
    node *text;
    if (n == 0) return NB_OK;
    NB_TRY(nbi_lark_literal(&text, &r->lark, s, n));
    nbi_lark_add(seq, text);
    return NB_OK;
}

static nb_status add_token(node *seq, reader *r, int32_t id)
{
    node *token;
    NB_TRY(nbi_tag_token_node(&token, r, id));
    nbi_lark_add(seq, token);
    return NB_OK;
}

/* Appends a fixed text: letter by letter, or its added tokens by themselves. */
static nb_status add_text(node *seq, reader *r, const char *s, size_t n)
{
    while (n) {
        int32_t id = -1;
        size_t n_token, before = text_before(&id, &n_token, r, s, n);
        NB_TRY(add_literal(seq, r, s, before));
        if (n_token) {
            node *either;
            NB_TRY(nbi_lark_new(&either, &r->lark, NBI_LARK_CHOICE));
            NB_TRY(add_literal(either, r, s + before, n_token));
            NB_TRY(add_token(either, r, id));
            nbi_lark_add(seq, either);
        }
        s += before + n_token;
        n -= before + n_token;
    }
    return NB_OK;
}

nb_status nbi_tag_add_mark(node *seq, reader *r, const mark *m)
{
    return m->token >= 0 ? add_token(seq, r, m->token) : add_text(seq, r, m->s, m->n);
}

nb_status nbi_tag_add_behind(node *seq, reader *r, const mark *m, size_t n)
{
    return m->token >= 0 ? NB_OK : add_text(seq, r, m->s + n, m->n - n);
}

nb_status nbi_tag_add_rule(node *seq, reader *r, uint32_t rule)
{
    node *ref;
    NB_TRY(nbi_lark_ref(&ref, &r->lark, rule));
    nbi_lark_add(seq, ref);
    return NB_OK;
}

/* By id or by its text. */
nb_status nbi_tag_read_token(int32_t *out, const reader *r, const json_t *value, const place *at)
{
    *out = -1;
    if (json_is_integer(value) && json_integer_value(value) >= 0 &&
        json_integer_value(value) < (json_int_t)r->tokens->n_tokens)
        *out = (int32_t)json_integer_value(value);
    else if (json_is_string(value))
        *out = nbi_token_find(r->tokens->tokenizer, json_string_value(value),
                              json_string_length(value));
    else
        return nbi_tag_bad(r, at, NB_INVALID, "must be the id or the text of a token");
    if (may_come(r->tokens, *out)) return NB_OK;
    return nbi_tag_bad(r, at, NB_UNSUPPORTED,
                       "is not an added token of the model, or one that ends an answer");
}

nb_status nbi_tag_read_token_format(int32_t *out, const reader *r, const json_t *f, const place *at)
{
    const place here = nbi_tag_member(at, "token");
    NB_TRY(nbi_tag_check_members(r, f, "type token", at));
    return nbi_tag_read_token(out, r, nbi_tag_find(f, "token"), &here);
}

bool nbi_tag_is_token_format(const json_t *f)
{
    const char *type = json_string_value(json_object_get(f, "type"));
    return type && strcmp(type, "token") == 0;
}

/* Excluded tokens: added ones never come in free text. */
nb_status nbi_tag_check_excluded(const reader *r, const json_t *f, const place *at)
{
    const json_t *list = nbi_tag_find(f, "exclude_tokens"), *value;
    const place here = nbi_tag_member(at, "exclude_tokens");
    size_t i;
    if (list && !json_is_array(list)) return nbi_tag_bad(r, &here, NB_INVALID, "must be an array");
    json_array_foreach(list, i, value)
    {
        const place where = nbi_tag_entry(&here, i);
        int32_t id = -1;
        if (json_is_integer(value) && json_integer_value(value) < INT32_MAX)
            id = (int32_t)json_integer_value(value);
        else if (json_is_string(value))
            id = nbi_token_find(r->tokens->tokenizer, json_string_value(value),
                                json_string_length(value));
        else
            return nbi_tag_bad(r, &where, NB_INVALID, "must be the id or the text of a token");
        if (id < 0 || (uint32_t)id >= r->tokens->n_tokens ||
            !nbi_token_is_added(r->tokens->tokenizer, id))
            return nbi_tag_bad(r, &where, NB_UNSUPPORTED,
                               "is not an added token of the model; others cannot be excluded");
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- free text */

/* The expression of free text, as it stands in a terminal. */
static nb_status put_free(nbi_buf *out, reader *r, const json_t *f, const place *at)
{
    const json_t *list = nbi_tag_find(f, "excludes"), *value;
    const place here = nbi_tag_member(at, "excludes");
    uint32_t most = NBI_LARK_NO_MAX;
    size_t i;
    if (nbi_tag_find(f, "max_chars")) NB_TRY(nbi_tag_read_count(&most, r, f, "max_chars", at));
    if (list && !json_is_array(list)) return nbi_tag_bad(r, &here, NB_INVALID, "must be an array");
    if (json_array_size(list) > NBI_TAG_EXCLUDES_MAX)
        return nbi_tag_bad(r, &here, NB_TOO_LARGE, "more than %u texts", NBI_TAG_EXCLUDES_MAX);
    bool any = json_array_size(list) > 0;
    if (any) NB_TRY(nbi_buf_add(out, "(", 1));
    NB_TRY(most == NBI_LARK_NO_MAX ? nbi_buf_add(out, "/(?s:.*)/", 9)
                                   : nbi_buf_addf(out, "/(?s:.){0,%u}/", most));
    if (!any) return NB_OK;
    NB_TRY(nbi_buf_add(out, " & ~/(?s:.*)(", 13));
    json_array_foreach(list, i, value)
    {
        const place where = nbi_tag_entry(&here, i);
        mark m = {0};
        node *text;
        NB_TRY(nbi_tag_need_string(&m, r, value, &where));
        if (m.n == 0) return nbi_tag_bad(r, &where, NB_INVALID, "is empty");
        NB_TRY(nbi_lark_literal(&text, &r->lark, m.s, m.n));
        NB_TRY(nbi_buf_addf(out, "%s%.*s", i ? "|" : "", (int)strlen(text->text) - 2,
                            text->text + 1)); /* without its slashes */
    }
    return nbi_buf_add(out, ")(?s:.*)/)", 10);
}

nb_status nbi_tag_read_free(const char **out, reader *r, const json_t *f, const place *at)
{
    nbi_buf text = {0};
    nb_status st = put_free(&text, r, f, at);
    if (st == NB_OK) {
        *out = nbi_arena_strndup(&r->lark.arena, text.data, text.len);
        if (!*out) st = NB_NO_MEMORY;
    }
    nbi_buf_free(&text);
    return st == NB_NO_MEMORY ? nbi_lark_no_memory(&r->lark) : st;
}

static nb_status lead_node(node **out, reader *r, const nbi_tag_lead *lead)
{
    return lead->text ? nbi_lark_text(out, &r->lark, lead->text, strlen(lead->text))
                      : nbi_lark_ref(out, &r->lark, lead->rule);
}

/* The lead and s[0..n): ending with the first of these, or wherever a token follows. */
static nb_status add_head(node *seq, reader *r, const nbi_tag_lead *lead, const char *s, size_t n,
                          bool first)
{
    node *head = NULL, *before, *lazy;
    NB_TRY(nbi_tag_new(&head, r, NBI_LARK_SEQUENCE));
    NB_TRY(lead_node(&before, r, lead));
    nbi_lark_add(head, before);
    NB_TRY(add_literal(head, r, s, n));
    if (first) {
        NB_TRY(nbi_tag_new(&lazy, r, NBI_LARK_LAZY));
        nbi_lark_add(lazy, head);
        head = lazy;
    }
    nbi_lark_add(seq, head);
    return NB_OK;
}

static nb_status add_way(node *choice, reader *r, const nbi_tag_lead *lead, const mark *m,
                         size_t n_text, int32_t token, size_t n_token, const uint32_t *rest)
{
    node *seq;
    NB_TRY(nbi_tag_new(&seq, r, NBI_LARK_SEQUENCE));
    NB_TRY(add_head(seq, r, lead, m->s, n_text, token < 0));
    if (token >= 0) NB_TRY(add_token(seq, r, token));
    size_t taken = n_text + n_token;
    if (m->token < 0) NB_TRY(add_text(seq, r, m->s + taken, m->n - taken));
    if (rest) NB_TRY(nbi_tag_add_rule(seq, r, *rest));
    nbi_lark_add(choice, seq);
    return NB_OK;
}

nb_status nbi_tag_add_ways(node *choice, reader *r, const nbi_tag_lead *lead, const mark *m,
                           const uint32_t *rest)
{
    int32_t id = -1;
    size_t n_token = 0, before;
    if (m->token >= 0) return add_way(choice, r, lead, m, 0, m->token, 0, rest);
    NB_TRY(add_way(choice, r, lead, m, m->n, -1, 0, rest));
    before = text_before(&id, &n_token, r, m->s, m->n);
    return n_token ? add_way(choice, r, lead, m, before, id, n_token, rest) : NB_OK;
}

nb_status nbi_tag_add_across(node *choice, reader *r, const nbi_tag_lead *lead, const mark *m,
                             size_t n_first, uint32_t rest)
{
    int32_t id = -1;
    size_t n_token = 0, before;
    if (m->token >= 0) return NB_OK;
    before = text_before(&id, &n_token, r, m->s, m->n);
    if (!n_token || before >= n_first || before + n_token <= n_first) return NB_OK;
    return add_way(choice, r, lead, m, before, id, n_token, &rest);
}

nb_status nbi_tag_until(node **out, reader *r, const nbi_tag_lead *lead, const nbi_tag_ends *stop)
{
    if (stop->n == 0) return lead_node(out, r, lead);
    NB_TRY(nbi_tag_new(out, r, NBI_LARK_CHOICE));
    for (size_t i = 0; i < stop->n; i++)
        NB_TRY(nbi_tag_add_ways(*out, r, lead, &stop->at[i], NULL));
    return NB_OK;
}

nb_status nbi_tag_any_end(node **out, reader *r, const nbi_tag_ends *stop)
{
    NB_TRY(nbi_tag_new(out, r, NBI_LARK_CHOICE));
    for (size_t i = 0; i < stop->n; i++) {
        node *seq;
        NB_TRY(nbi_tag_new(&seq, r, NBI_LARK_SEQUENCE));
        NB_TRY(nbi_tag_add_mark(seq, r, &stop->at[i]));
        nbi_lark_add(*out, seq);
    }
    return NB_OK;
}

nb_status nbi_tag_region(node **out, reader *r, node *items, const char *text, bool once,
                         const nbi_tag_ends *stop)
{
    const nbi_tag_lead lead = {.text = text};
    node *tail, *seq, *repeat, *end;
    NB_TRY(nbi_tag_until(&tail, r, &lead, stop));
    NB_TRY(nbi_tag_new(&seq, r, NBI_LARK_SEQUENCE));
    if (!once) {
        NB_TRY(nbi_lark_repeat(&repeat, &r->lark, items, 0, NBI_LARK_NO_MAX));
        nbi_lark_add(seq, repeat);
        nbi_lark_add(seq, tail);
        *out = seq;
        return NB_OK;
    }
    nbi_lark_add(seq, items);
    if (stop->n) {
        NB_TRY(nbi_tag_any_end(&end, r, stop));
        nbi_lark_add(seq, end);
    }
    NB_TRY(nbi_tag_new(out, r, NBI_LARK_CHOICE));
    nbi_lark_add(*out, seq);
    nbi_lark_add(*out, tail);
    return NB_OK;
}
