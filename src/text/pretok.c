/* Pre-tokenizer steps of tokenizer.json (see pretok.h). Every step cuts what the step before gave
 * it; pieces are handed on as they are found, so that no list of them exists. */
#include "text/pretok.h"

#include <string.h>
#include <utf8proc.h>

#include "base/json.h"
#include "text/unicode.h"

#define STEPS_MAX 16
#define GPT2_PATTERN \
    "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

typedef enum cut_kind { CUT_REGEX, CUT_LITERAL, CUT_SCAN, CUT_PUNCTUATION, CUT_SPACES } cut_kind;

/* What becomes of matches (and, with `invert`, of what lies between them). */
typedef enum cut_rule {
    RULE_ISOLATED,
    RULE_REMOVED,
    RULE_CONTIGUOUS,
    RULE_WITH_PREVIOUS,
    RULE_WITH_NEXT
} cut_rule;

typedef struct cut {
    cut_kind kind;
    cut_rule rule;
    bool invert;
    bool prefix_space;    /* ByteLevel: put a space in front unless there is one */
    nbi_pattern *pattern; /* CUT_REGEX */
    nbi_scan scan; /* CUT_SCAN; or the pattern's hand-written equal, when the rule keeps all text */
    char *literal;
    size_t n_literal;
} cut;

struct nbi_pretok {
    cut cuts[STEPS_MAX];
    size_t n;
    bool prefix_space_only; /* ByteLevel(add_prefix_space) without its regex: after the last cut */
    bool has_byte_level;
};

/* ---------------------------------------------------------------- parsing */

static nb_status parse_rule(cut_rule *out, const json_t *spec, const char *name, nb_error *err)
{
    static const char *const names[] = {"Isolated", "Removed", "Contiguous", "MergedWithPrevious",
                                        "MergedWithNext"};
    const char *rule = json_string_value(json_object_get(spec, "behavior"));
    for (size_t i = 0; rule && i < sizeof names / sizeof *names; i++) {
        if (strcmp(rule, names[i]) == 0) {
            *out = (cut_rule)i;
            return NB_OK;
        }
    }
    return nbi_fail(err, NB_UNSUPPORTED, "%s: pre_tokenizer behavior \"%.64s\" is not known", name,
                    rule ? rule : "(none)");
}

static nb_status use_regex(cut *c, const char *regex, size_t n, const char *name, nb_error *err)
{
    c->kind = CUT_REGEX;
    NB_TRY(nbi_pattern_compile(&c->pattern, regex, n, name, err));
    const nbi_known_pattern *known = nbi_pattern_known(regex, n);
    if (known &&
        (c->rule == RULE_ISOLATED || (c->rule == RULE_REMOVED && c->invert && !known->gaps)))
        c->scan = known->scan;
    return NB_OK;
}

static nb_status use_literal(cut *c, const char *literal, size_t n, const char *name, nb_error *err)
{
    if (n == 0)
        return nbi_fail(err, NB_UNSUPPORTED, "%s: pre_tokenizer splits at an empty string", name);
    c->kind = CUT_LITERAL;
    c->n_literal = n;
    c->literal = nbi_strndup(literal, n);
    return c->literal ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", name);
}

static nb_status parse_split(cut *c, const json_t *spec, const char *name, nb_error *err)
{
    NB_TRY(parse_rule(&c->rule, spec, name, err));
    NB_TRY(nbi_json_bool(&c->invert, spec, "invert", name, err));
    const json_t *pattern = json_object_get(spec, "pattern");
    const json_t *regex = json_object_get(pattern, "Regex"),
                 *literal = json_object_get(pattern, "String");
    if (json_is_string(regex))
        return use_regex(c, json_string_value(regex), json_string_length(regex), name, err);
    if (json_is_string(literal))
        return use_literal(c, json_string_value(literal), json_string_length(literal), name, err);
    return nbi_fail(err, NB_CORRUPT,
                    "%s: pre_tokenizer Split has neither pattern.Regex nor pattern.String", name);
}

static nb_status parse_byte_level(nbi_pretok *t, const json_t *spec, const char *name,
                                  nb_error *err)
{
    bool regex = true, prefix = true;
    NB_TRY(nbi_json_bool(&regex, spec, "use_regex", name, err));
    NB_TRY(nbi_json_bool(&prefix, spec, "add_prefix_space", name, err));
    t->has_byte_level = true;
    if (!regex) {
        t->prefix_space_only = prefix;
        return NB_OK;
    }
    cut *c = &t->cuts[t->n++];
    c->prefix_space = prefix;
    return use_regex(c, GPT2_PATTERN, sizeof GPT2_PATTERN - 1, name, err);
}

static nb_status parse_simple(cut *c, const char *type, const json_t *spec, const char *name,
                              nb_error *err)
{
    if (strcmp(type, "Digits") == 0) {
        bool single = false;
        NB_TRY(nbi_json_bool(&single, spec, "individual_digits", name, err));
        nbi_char_class_init();
        c->kind = CUT_SCAN;
        c->scan = single ? nbi_scan_number : nbi_scan_number_run;
        return NB_OK;
    }
    if (strcmp(type, "Punctuation") == 0) {
        c->kind = CUT_PUNCTUATION;
        return json_object_get(spec, "behavior") ? parse_rule(&c->rule, spec, name, err) : NB_OK;
    }
    if (strcmp(type, "WhitespaceSplit") == 0) {
        c->kind = CUT_SPACES;
        c->rule = RULE_REMOVED;
        return NB_OK;
    }
    if (strcmp(type, "CharDelimiterSplit") == 0) {
        const json_t *delimiter = json_object_get(spec, "delimiter");
        c->rule = RULE_REMOVED;
        return use_literal(c, json_is_string(delimiter) ? json_string_value(delimiter) : "",
                           json_string_length(delimiter), name, err);
    }
    return nbi_fail(err, NB_UNSUPPORTED,
                    "%s: pre_tokenizer \"%.64s\" is not supported (known: Split, ByteLevel, "
                    "Digits, Punctuation, WhitespaceSplit, "
                    "CharDelimiterSplit, Sequence)",
                    name, type);
}

static nb_status parse_step(nbi_pretok *t, const json_t *spec, const char *name, nb_error *err)
{
    const char *type = json_string_value(json_object_get(spec, "type"));
    if (!type) return nbi_fail(err, NB_CORRUPT, "%s: pre_tokenizer without a \"type\"", name);
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(spec, "pretokenizers");
        if (!json_is_array(list))
            return nbi_fail(err, NB_CORRUPT, "%s: pre_tokenizer Sequence without \"pretokenizers\"",
                            name);
        for (size_t i = 0; i < json_array_size(list); i++)
            NB_TRY(parse_step(t, json_array_get(list, i), name, err));
        return NB_OK;
    }
    if (t->has_byte_level)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "%s: pre_tokenizer \"%.64s\" after ByteLevel is not supported", name, type);
    if (t->n == STEPS_MAX)
        return nbi_fail(err, NB_UNSUPPORTED, "%s: more than %d pre_tokenizer steps", name,
                        STEPS_MAX);
    if (strcmp(type, "ByteLevel") == 0) return parse_byte_level(t, spec, name, err);
    cut *c = &t->cuts[t->n++];
    if (strcmp(type, "Split") == 0) return parse_split(c, spec, name, err);
    return parse_simple(c, type, spec, name, err);
}

nb_status nbi_pretok_parse(nbi_pretok **out, const json_t *spec, const char *name, nb_error *err)
{
    if (!json_is_object(spec))
        return nbi_fail(err, NB_UNSUPPORTED,
                        "%s: no pre_tokenizer; only byte-level BPE (a ByteLevel step) is supported",
                        name);
    nbi_pretok *t = nbi_calloc(1, sizeof *t);
    if (!t) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", name);
    nb_status st = parse_step(t, spec, name, err);
    if (st == NB_OK && !t->has_byte_level)
        st = nbi_fail(
            err, NB_UNSUPPORTED,
            "%s: the pre_tokenizer has no ByteLevel step; only byte-level BPE is supported", name);
    if (st == NB_OK)
        *out = t;
    else
        nbi_pretok_free(&t);
    return st;
}

void nbi_pretok_free(nbi_pretok **pretok)
{
    nbi_pretok *t = *pretok;
    if (!t) return;
    for (size_t i = 0; i < t->n; i++) {
        nbi_pattern_free(&t->cuts[i].pattern);
        nbi_free(t->cuts[i].literal);
    }
    nbi_free(t);
    *pretok = NULL;
}

/* ---------------------------------------------------------------- running */

typedef struct run {
    const nbi_pretok *pretok;
    nbi_matcher *matcher;
    nbi_buf *scratch;
    nbi_piece_fn fn;
    void *arg;
    nb_error *err;
} run;

typedef struct text_span {
    const char *data;
    size_t n;
} text_span;

static nb_status run_cut(run *r, size_t step, text_span text);

static bool is_match(cut_kind kind, uint32_t cp)
{
    if (kind == CUT_SPACES) return nbi_unicode_is_space(cp);
    int category = nbi_unicode_category(cp);
    if (cp < 0x80) return cp > ' ' && cp < 0x7F && !(nbi_unicode_is_word(cp) && cp != '_');
    return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

static nb_status find_char(cut_kind kind, text_span text, size_t from, size_t *start, size_t *end)
{
    for (size_t i = from; i < text.n;) {
        uint32_t cp = 0;
        size_t len = nbi_utf8_read(&cp, (const uint8_t *)text.data + i, text.n - i);
        if (is_match(kind, cp)) {
            *start = i;
            *end = i + len;
            return NB_OK;
        }
        i += len ? len : 1;
    }
    return NB_NOT_FOUND;
}

static nb_status find_literal(const cut *c, text_span text, size_t from, size_t *start, size_t *end)
{
    for (size_t i = from; text.n - i >= c->n_literal; i++) {
        const char *hit = memchr(text.data + i, c->literal[0], text.n - i - c->n_literal + 1);
        if (!hit) break;
        i = (size_t)(hit - text.data);
        if (memcmp(hit, c->literal, c->n_literal) != 0) continue;
        *start = i;
        *end = i + c->n_literal;
        return NB_OK;
    }
    return NB_NOT_FOUND;
}

/* The next match at or after *from; an empty one right behind the last match is passed over, as the
 * reference does. */
static nb_status find(run *r, const cut *c, text_span text, size_t *from, size_t last_end,
                      size_t *start, size_t *end)
{
    if (c->kind == CUT_LITERAL) return find_literal(c, text, *from, start, end);
    if (c->kind != CUT_REGEX) return find_char(c->kind, text, *from, start, end);
    while (*from <= text.n) {
        NB_TRY(
            nbi_pattern_find(c->pattern, r->matcher, text.data, text.n, *from, start, end, r->err));
        if (*start != *end || *end != last_end) return NB_OK;
        uint32_t cp;
        size_t len = *from < text.n
                         ? nbi_utf8_read(&cp, (const uint8_t *)text.data + *from, text.n - *from)
                         : 1;
        *from += len ? len : 1;
    }
    return NB_NOT_FOUND;
}

/* Segments collected by the rule; one may be waiting for its neighbour. */
typedef struct joiner {
    run *r;
    const cut *c;
    size_t next_step;
    const char *data;
    size_t begin, end;
    bool waiting, last_match;
} joiner;

static nb_status flush(joiner *j)
{
    if (!j->waiting) return NB_OK;
    j->waiting = false;
    return run_cut(j->r, j->next_step, (text_span){j->data + j->begin, j->end - j->begin});
}

static nb_status feed(joiner *j, size_t begin, size_t end, bool match)
{
    match = match != j->c->invert;
    if (j->c->rule == RULE_REMOVED && match) return NB_OK;
    bool join = j->waiting && ((j->c->rule == RULE_CONTIGUOUS && match == j->last_match) ||
                               (j->c->rule == RULE_WITH_PREVIOUS && match && !j->last_match) ||
                               (j->c->rule == RULE_WITH_NEXT && !match && j->last_match));
    j->last_match = match;
    if (join) {
        j->end = end;
        return NB_OK;
    }
    NB_TRY(flush(j));
    j->begin = begin;
    j->end = end;
    j->waiting = true;
    return NB_OK;
}

static nb_status run_find(run *r, size_t step, text_span text)
{
    const cut *c = &r->pretok->cuts[step];
    joiner j = {.r = r, .c = c, .next_step = step + 1, .data = text.data};
    size_t from = 0, done = 0, last_end = SIZE_MAX, start, end;
    for (;;) {
        nb_status st = find(r, c, text, &from, last_end, &start, &end);
        if (st == NB_NOT_FOUND) break;
        if (st != NB_OK) return st;
        if (start < done) start = done; /* \K behind a look-ahead */
        if (done < start) NB_TRY(feed(&j, done, start, false));
        NB_TRY(feed(&j, start, end, true));
        done = from = last_end = end;
    }
    if (done < text.n) NB_TRY(feed(&j, done, text.n, false));
    return flush(&j);
}

static nb_status put_space_in_front(run *r, text_span *text)
{
    if (text->data[0] == ' ') return NB_OK;
    nbi_buf_clear(r->scratch);
    nb_status st = nbi_buf_add(r->scratch, " ", 1);
    if (st == NB_OK) st = nbi_buf_add(r->scratch, text->data, text->n);
    if (st != NB_OK) return nbi_fail(r->err, st, "out of memory for %zu bytes of text", text->n);
    *text = (text_span){r->scratch->data, r->scratch->len};
    return NB_OK;
}

static nb_status run_cut(run *r, size_t step, text_span text)
{
    if (text.n == 0) return NB_OK;
    if (step == r->pretok->n) {
        if (r->pretok->prefix_space_only) NB_TRY(put_space_in_front(r, &text));
        return r->fn(r->arg, (const uint8_t *)text.data, text.n);
    }
    const cut *c = &r->pretok->cuts[step];
    if (c->prefix_space) NB_TRY(put_space_in_front(r, &text));
    if (!c->scan) return run_find(r, step, text);
    const uint8_t *p = (const uint8_t *)text.data, *end = p + text.n;
    while (p < end) {
        size_t n = c->scan(p, end);
        NB_TRY(step + 1 == r->pretok->n && !r->pretok->prefix_space_only
                   ? r->fn(r->arg, p, n)
                   : run_cut(r, step + 1, (text_span){(const char *)p, n}));
        p += n;
    }
    return NB_OK;
}

nb_status nbi_pretok_run(const nbi_pretok *pretok, nbi_matcher *matcher, nbi_buf *scratch,
                         const char *text, size_t n, nbi_piece_fn fn, void *arg, nb_error *err)
{
    run r = {pretok, matcher, scratch, fn, arg, err};
    return run_cut(&r, 0, (text_span){text, n});
}
