/* Tool calls whose arguments stand in tags: the GLM form and DeepSeek's DSML (see tool.h). Called
 * by tool_parser.c. */
#include <string.h>

#include "base/utf8.h"
#include "text/tool_impl.h"

#define GLM_OPEN    "<tool_call>"
#define GLM_CLOSE   "</tool_call>"
#define GLM_KEY     "<arg_key>"
#define GLM_KEY_END "</arg_key>"
#define GLM_VALUE   "<arg_value>"
#define DSML_INVOKE "<｜DSML｜invoke name=\""
#define DSML_PARAM  "<｜DSML｜parameter name=\""

static bool is_glm(const nbi_tool_parser *p)
{
    return p->form == NBI_TOOL_FORM_GLM;
}

static const char *call_close(const nbi_tool_parser *p)
{
    return is_glm(p) ? GLM_CLOSE : "</｜DSML｜invoke>";
}

static const char *value_close(const nbi_tool_parser *p)
{
    return is_glm(p) ? "</arg_value>" : "</｜DSML｜parameter>";
}

/* Tags that can only stand behind a call. */
static nbi_tool_match match_next(const nbi_tool_parser *p, const char *s, size_t n)
{
    static const char *const glm[] = {GLM_OPEN, NULL};
    static const char *const dsml[] = {DSML_INVOKE, "</｜DSML｜function_calls>",
                                       "</｜DSML｜tool_calls>", NULL};
    nbi_tool_match best = NBI_TOOL_NO;
    for (const char *const *tag = is_glm(p) ? glm : dsml; *tag; tag++) {
        nbi_tool_match match = nbi_tool_match_tag(s, n, *tag);
        if (match > best) best = match;
    }
    return best;
}

/* Moves *i over `tag`. False with *more when it may still come, false without when something else
 * stands there. */
static bool eat(const char *s, size_t n, size_t *i, const char *tag, bool *more)
{
    nbi_tool_match match = nbi_tool_match_tag(s + *i, n - *i, tag);
    *more = match == NBI_TOOL_MAYBE;
    if (match == NBI_TOOL_YES) *i += strlen(tag);
    return match == NBI_TOOL_YES;
}

static bool eat_spaced(const char *s, size_t n, size_t *i, const char *tag, bool *more)
{
    *i += nbi_tool_spaces(s + *i, n - *i);
    return eat(s, n, i, tag, more);
}

/* s[*begin, *end) without white space around it. */
static void trim(const char *s, size_t *begin, size_t *end)
{
    while (*begin < *end && nbi_tool_is_space(s[*begin])) ++*begin;
    while (*end > *begin && nbi_tool_is_space(s[*end - 1])) --*end;
}

/* ---------------------------------------------------------------- the head of a call */

static nbi_tool_verdict verdict_of(bool more)
{
    return more ? NBI_TOOL_HEAD_MORE : NBI_TOOL_HEAD_BAD;
}

/* Behind <tool_call>: the name up to a tag, a newline, or a newline spelled "\n". */
static nbi_tool_verdict glm_head(const nbi_tool_parser *p, const char *s, size_t n,
                                 nbi_tool_head *head)
{
    size_t begin = head->tag = sizeof GLM_OPEN - 1, end;
    bool more = false;
    begin += nbi_tool_spaces(s + begin, n - begin);
    for (end = begin; end < n && s[end] != '<' && s[end] != '\n' && s[end] != '\\';) end++;
    if (end == n) return NBI_TOOL_HEAD_MORE;
    size_t i = end;
    if (s[i] == '\\') {
        if (i + 1 == n) return NBI_TOOL_HEAD_MORE;
        if (s[++i] != 'n') return NBI_TOOL_HEAD_BAD;
    }
    head->used = i += s[i] != '<';
    trim(s, &begin, &end);
    head->name = s + begin;
    head->n_name = end - begin;
    if (!nbi_tool_name_ok(p, head->name, head->n_name)) return NBI_TOOL_HEAD_BAD;
    size_t next = i;
    if (eat_spaced(s, n, &next, GLM_KEY, &more)) return NBI_TOOL_HEAD_TAGS;
    bool more_key = more;
    if (eat(s, n, &next, GLM_CLOSE, &more)) return NBI_TOOL_HEAD_TAGS;
    if (more || more_key) return NBI_TOOL_HEAD_MORE;
    /* A tool's own name on a line is a call even if what follows is broken. */
    return i > end && nbi_tool_find(p->tools, head->name, head->n_name) ? NBI_TOOL_HEAD_TAGS
                                                                        : NBI_TOOL_HEAD_BAD;
}

static nbi_tool_verdict dsml_head(const nbi_tool_parser *p, const char *s, size_t n,
                                  nbi_tool_head *head)
{
    static const char *const outer[] = {"<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"};
    size_t i = 0;
    bool more = false;
    for (size_t t = 0; t < 2 && i == 0; t++) eat(s, n, &i, outer[t], &more);
    head->tag = i;
    if (!eat_spaced(s, n, &i, DSML_INVOKE, &more)) return verdict_of(more);
    if (!head->tag) head->tag = i;
    const char *quote = memchr(s + i, '"', n - i);
    if (!quote) return NBI_TOOL_HEAD_MORE;
    size_t end = (size_t)(quote - s);
    head->name = s + i;
    head->n_name = end - i;
    i = end + 1;
    if (!nbi_tool_name_ok(p, head->name, head->n_name)) return NBI_TOOL_HEAD_BAD;
    if (!eat_spaced(s, n, &i, ">", &more)) return verdict_of(more);
    head->used = i;
    return NBI_TOOL_HEAD_TAGS;
}

nbi_tool_verdict nbi_tool_tagged_head(const nbi_tool_parser *p, const char *s, size_t n,
                                      nbi_tool_head *head)
{
    return is_glm(p) ? glm_head(p, s, n, head) : dsml_head(p, s, n, head);
}

/* ---------------------------------------------------------------- the head of an argument */

typedef struct argument {
    const char *key;
    size_t n_key, used;
    bool typed, is_string; /* DSML: string="..." was there, and was true */
} argument;

/* Key up to the value's opening tag. One of <arg_key> and </arg_key> may be missing. */
static nbi_tool_verdict glm_pair(const char *s, size_t n, argument *out)
{
    size_t i = 0;
    bool more = false, more_value = false;
    bool opened = eat(s, n, &i, GLM_KEY, &more);
    if (!opened && more) return NBI_TOOL_HEAD_MORE;
    const char *lt = memchr(s + i, '<', n - i);
    if (!lt) return NBI_TOOL_HEAD_MORE;
    size_t begin = i, end = (size_t)(lt - s);
    i = end;
    bool closed = eat(s, n, &i, GLM_KEY_END, &more);
    if (!closed && !opened) return verdict_of(more);
    if (!eat_spaced(s, n, &i, GLM_VALUE, &more_value)) return verdict_of(more_value || more);
    trim(s, &begin, &end);
    *out = (argument){.key = s + begin, .n_key = end - begin, .used = i};
    return NBI_TOOL_HEAD_TAGS;
}

static nbi_tool_verdict dsml_pair(const char *s, size_t n, argument *out)
{
    size_t i = 0;
    bool more = false, more_false = false;
    if (!eat(s, n, &i, DSML_PARAM, &more)) return verdict_of(more);
    const char *quote = memchr(s + i, '"', n - i);
    if (!quote) return NBI_TOOL_HEAD_MORE;
    *out = (argument){.key = s + i, .n_key = (size_t)(quote - s) - i};
    i += out->n_key + 1;
    if (eat_spaced(s, n, &i, "string=\"true\"", &more)) {
        out->typed = out->is_string = true;
    } else if (eat(s, n, &i, "string=\"false\"", &more_false)) {
        out->typed = true;
    } else if ((more || more_false)) {
        return NBI_TOOL_HEAD_MORE;
    }
    if (!eat_spaced(s, n, &i, ">", &more)) return verdict_of(more);
    out->used = i;
    return NBI_TOOL_HEAD_TAGS;
}

/* ---------------------------------------------------------------- between arguments */

/* Output ended inside a call. */
static nb_status end_of_output(nbi_tool_parser *p)
{
    size_t n;
    nbi_tool_rest(p, &n);
    NB_TRY(nbi_tool_end(p, false));
    p->state = NBI_TOOL_OUTSIDE;
    if (p->stopped) return nbi_tool_content_rest(p, n);
    nbi_tool_skip(p, n);
    return NB_OK;
}

/* Text that does not belong, up to the next '<' behind its first byte. */
static nb_status junk(nbi_tool_parser *p, size_t from)
{
    size_t n;
    const char *s = nbi_tool_rest(p, &n);
    const char *lt = from < n ? memchr(s + from, '<', n - from) : NULL;
    p->state = lt ? NBI_TOOL_INSIDE : NBI_TOOL_JUNK;
    return nbi_tool_content_rest(p, lt ? (size_t)(lt - s) : n);
}

static nb_status take_pair(nbi_tool_parser *p, const argument *pair)
{
    bool added = false;
    if (pair->n_key && pair->n_key <= NBI_TOOL_KEY_MAX && !memchr(pair->key, '\0', pair->n_key))
        NB_TRY(nbi_tool_keys_add(&p->keys, 0, pair->key, pair->n_key, &added));
    if (!added || p->args_whole) {
        NB_TRY(nbi_tool_content_rest(p, pair->used));
        p->state = NBI_TOOL_JUNK;
        return NB_OK;
    }
    memcpy(p->key, pair->key, pair->n_key);
    p->n_key = pair->n_key;
    p->kinds = nbi_tool_kinds(p->tool, p->key, p->n_key);
    if (pair->is_string) p->kinds = NBI_TOOL_STRING;
    p->as_json = pair->typed && !pair->is_string;
    p->scanned = 0;
    p->state = NBI_TOOL_VALUE;
    nbi_tool_skip(p, pair->used);
    return NB_OK;
}

static nb_status inside_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n;
    const char *s = nbi_tool_rest(p, &n);
    size_t w = nbi_tool_spaces(s, n);
    nbi_tool_skip(p, w);
    s += w;
    n -= w;
    *step = NBI_TOOL_AGAIN;
    if (n == 0) {
        if (p->final) return end_of_output(p);
        *step = NBI_TOOL_MORE;
        return NB_OK;
    }
    if (!is_glm(p) && !p->has_args && s[0] == '{') {
        nbi_tool_json_start(&p->json);
        p->state = NBI_TOOL_OBJ;
        return NB_OK;
    }
    nbi_tool_match close = nbi_tool_match_tag(s, n, call_close(p)), next = match_next(p, s, n);
    if (close == NBI_TOOL_YES || next == NBI_TOOL_YES) {
        if (close == NBI_TOOL_YES) nbi_tool_skip(p, strlen(call_close(p)));
        p->after_index = 0;
        p->state = NBI_TOOL_AFTER;
        return nbi_tool_end(p, close == NBI_TOOL_YES);
    }
    argument pair = {0};
    size_t view = n < NBI_TOOL_HEAD_MAX ? n : NBI_TOOL_HEAD_MAX;
    nbi_tool_verdict verdict = is_glm(p) ? glm_pair(s, view, &pair) : dsml_pair(s, view, &pair);
    if (verdict == NBI_TOOL_HEAD_TAGS) return take_pair(p, &pair);
    bool may_come = verdict == NBI_TOOL_HEAD_MORE && n < NBI_TOOL_HEAD_MAX;
    if (may_come || close == NBI_TOOL_MAYBE || next == NBI_TOOL_MAYBE) {
        if (p->final) return end_of_output(p);
        *step = NBI_TOOL_MORE;
        return NB_OK;
    }
    return junk(p, 1);
}

/* ---------------------------------------------------------------- values */

/* No end of the value stands before `at`. With `found`, it ends there, and `tag` bytes close it. */
typedef struct value_end {
    size_t at, tag;
    bool found;
} value_end;

/* At a tag that closes the call: is the value's own closing tag missing? Only if nothing but
 * another call or the end of output follows; else the text is part of the value. */
static nbi_tool_match is_call_end(const nbi_tool_parser *p, const char *s, size_t n)
{
    nbi_tool_match match = nbi_tool_match_tag(s, n, call_close(p));
    if (match != NBI_TOOL_YES) return match;
    size_t i = strlen(call_close(p)), max = n - i;
    if (max > NBI_TOOL_SPACE_MAX) max = NBI_TOOL_SPACE_MAX;
    size_t w = nbi_tool_spaces(s + i, max);
    i += w;
    if (i == n) return p->final ? NBI_TOOL_YES : NBI_TOOL_MAYBE;
    return match_next(p, s + i, n - i);
}

static value_end find_value_end(const nbi_tool_parser *p, const char *s, size_t n, size_t from)
{
    const char *close = value_close(p);
    for (size_t k = from; k < n; k++) {
        const char *lt = memchr(s + k, '<', n - k);
        if (!lt) break;
        k = (size_t)(lt - s);
        nbi_tool_match value = nbi_tool_match_tag(lt, n - k, close);
        nbi_tool_match call = is_call_end(p, lt, n - k);
        if (value == NBI_TOOL_YES) return (value_end){k, strlen(close), true};
        if (call == NBI_TOOL_YES) return (value_end){k, 0, true};
        /* A tag cut off with the output is no text of the value; one that the model left so is. */
        if ((value == NBI_TOOL_MAYBE || call == NBI_TOOL_MAYBE) && !(p->final && p->stopped))
            return (value_end){k, 0, false};
    }
    return (value_end){n, 0, false};
}

/* Comma or brace, key and colon of the value that comes. */
static nb_status put_key(nbi_tool_parser *p)
{
    NB_TRY(nbi_buf_add(&p->out, p->has_args ? "," : "{", 1));
    p->has_args = true;
    NB_TRY(nbi_json_quote(&p->out, p->key, p->n_key));
    return nbi_buf_add(&p->out, ":", 1);
}

static nb_status start_text(nbi_tool_parser *p)
{
    size_t at = p->out.len;
    NB_TRY(put_key(p));
    NB_TRY(nbi_buf_add(&p->out, "\"", 1));
    p->state = NBI_TOOL_VALUE_TEXT;
    return nbi_tool_args_end(p, at);
}

static nb_status text_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n, at = p->out.len;
    const char *s = nbi_tool_rest(p, &n);
    value_end end = find_value_end(p, s, n, 0);
    size_t m = end.at == n && !p->final ? nbi_utf8_cut(s, n) : end.at;
    bool over = end.found || p->final;
    NB_TRY(nbi_tool_json_escape(&p->out, s, m));
    if (over) NB_TRY(nbi_buf_add(&p->out, "\"", 1));
    NB_TRY(nbi_tool_args_end(p, at));
    nbi_tool_skip(p, end.found ? m + end.tag : p->final ? n : m);
    if (over) p->state = NBI_TOOL_INSIDE;
    *step = over ? NBI_TOOL_AGAIN : NBI_TOOL_MORE;
    return NB_OK;
}

/* May a value be given as JSON of this kind? */
static bool is_allowed(const nbi_tool_parser *p, unsigned kind)
{
    unsigned numbers = NBI_TOOL_INTEGER | NBI_TOOL_NUMBER;
    if (p->kinds == 0 || (p->kinds & kind)) return true;
    if (kind == NBI_TOOL_NULL) return !(p->kinds & NBI_TOOL_STRING);
    return (kind & numbers) && (p->kinds & numbers);
}

/* Reads s as JSON into p->scratch. 0 when it is not, or not all of it; else its kind. `cut`: it is
 * the beginning of a value, and closed. */
static nb_status read_value(nbi_tool_parser *p, const char *s, size_t n, bool cut, unsigned *kind)
{
    size_t used;
    bool something = true;
    *kind = 0;
    nbi_tool_json_start(&p->json);
    nbi_buf_clear(&p->scratch);
    NB_TRY(nbi_tool_json_feed(&p->json, s, n, !cut, &used, &p->scratch));
    if (cut && p->json.state == NBI_TOOL_JSON_MORE) {
        NB_TRY(nbi_tool_json_close(&p->json, &p->scratch, &something));
        if (something) *kind = p->json.kind;
    } else if (p->json.state == NBI_TOOL_JSON_DONE) {
        if (used + nbi_tool_spaces(s + used, n - used) == n) *kind = p->json.kind;
    }
    return NB_OK;
}

/* A quoted value where no string is allowed: reads what stands in the quotes. */
static nb_status read_quoted(nbi_tool_parser *p, unsigned *kind)
{
    nbi_buf inner = {.max = SIZE_MAX};
    nb_status st = nbi_tool_json_unquote(&p->json, p->scratch.data, p->scratch.len, &inner);
    if (st == NB_OK) st = read_value(p, inner.data, inner.len, false, kind);
    nbi_buf_free(&inner);
    return st;
}

/* Gives out a value that was held; `cut` as above: what has no beginning yet is left out. */
static nb_status put_value(nbi_tool_parser *p, const char *s, size_t n, bool cut)
{
    unsigned kind;
    size_t at = p->out.len;
    NB_TRY(read_value(p, s, n, cut, &kind));
    if (cut && !kind && p->json.state == NBI_TOOL_JSON_MORE) return NB_OK;
    if (kind == NBI_TOOL_STRING && !is_allowed(p, kind)) NB_TRY(read_quoted(p, &kind));
    NB_TRY(put_key(p));
    NB_TRY(kind && is_allowed(p, kind) ? nbi_buf_add(&p->out, p->scratch.data, p->scratch.len)
                                       : nbi_json_quote(&p->out, s, n));
    return nbi_tool_args_end(p, at);
}

static nb_status held_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n;
    const char *s = nbi_tool_rest(p, &n);
    value_end end = find_value_end(p, s, n, p->scanned);
    *step = NBI_TOOL_AGAIN;
    if (end.at > p->options.max_held) return start_text(p);
    if (!end.found && !p->final) {
        p->scanned = end.at;
        *step = NBI_TOOL_MORE;
        return NB_OK;
    }
    p->state = NBI_TOOL_INSIDE;
    nbi_tool_skip(p, end.found ? end.at + end.tag : n);
    return put_value(p, s, end.at, !end.found && !p->stopped);
}

/* How to take a value that may be text or something else: by its first byte. */
static nbi_tool_match is_held_kind(const nbi_tool_parser *p, const char *s, size_t n)
{
    size_t w = nbi_tool_spaces(s, n < NBI_TOOL_SPACE_MAX ? n : NBI_TOOL_SPACE_MAX);
    if (w == NBI_TOOL_SPACE_MAX) return NBI_TOOL_NO;
    if (w == n) return NBI_TOOL_MAYBE;
    char c = s[w];
    if (p->kinds == 0) return c && strchr("{[\"-0123456789tfn", c) ? NBI_TOOL_YES : NBI_TOOL_NO;
    if (c == '{' && (p->kinds & NBI_TOOL_OBJECT)) return NBI_TOOL_YES;
    if (c == '[' && (p->kinds & NBI_TOOL_ARRAY)) return NBI_TOOL_YES;
    if (c == 'n' && (p->kinds & NBI_TOOL_NULL)) return nbi_tool_match_tag(s + w, n - w, "null");
    return NBI_TOOL_NO;
}

static nb_status value_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n;
    const char *s = nbi_tool_rest(p, &n);
    *step = NBI_TOOL_AGAIN;
    if (n == 0 && p->final && !p->stopped) return end_of_output(p);
    if (!p->as_json && p->kinds == NBI_TOOL_STRING) return start_text(p);
    if (!p->as_json && (p->kinds == 0 || (p->kinds & NBI_TOOL_STRING))) {
        nbi_tool_match held = is_held_kind(p, s, n);
        if (held == NBI_TOOL_NO || (held == NBI_TOOL_MAYBE && p->final)) return start_text(p);
        if (held == NBI_TOOL_MAYBE) {
            *step = NBI_TOOL_MORE;
            return NB_OK;
        }
    }
    p->state = NBI_TOOL_VALUE_HELD;
    return NB_OK;
}

nb_status nbi_tool_tagged_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n;
    switch (p->state) {
    case NBI_TOOL_INSIDE: return inside_step(p, step);
    case NBI_TOOL_VALUE: return value_step(p, step);
    case NBI_TOOL_VALUE_TEXT: return text_step(p, step);
    case NBI_TOOL_VALUE_HELD: return held_step(p, step);
    default: break;
    }
    NB_TRY(junk(p, 0));
    nbi_tool_rest(p, &n);
    *step = p->state == NBI_TOOL_INSIDE || p->final ? NBI_TOOL_AGAIN : NBI_TOOL_MORE;
    if (p->final) p->state = NBI_TOOL_INSIDE;
    return NB_OK;
}
