/* Tool calls whose arguments are a JSON object: the hermes form, DeepSeek V3 and V3.1, and the
 * array of constrained output (see tool.h). Called by tool_parser.c. */
#include <string.h>

#include "text/tool_impl.h"

#define CALLS_BEGIN "<｜tool▁calls▁begin｜>"
#define CALL_BEGIN  "<｜tool▁call▁begin｜>"
#define CALL_END    "<｜tool▁call▁end｜>"
#define SEPARATOR   "<｜tool▁sep｜>"
#define FENCE       "```"

/* A place in the text of a head. `more`: the last thing that was not eaten may still come. */
typedef struct cursor {
    const char *s;
    size_t n, i;
    bool more;
} cursor;

static bool eat(cursor *c, const char *word)
{
    nbi_tool_match match = nbi_tool_match_tag(c->s + c->i, c->n - c->i, word);
    c->more = match == NBI_TOOL_MAYBE;
    if (match == NBI_TOOL_YES) c->i += strlen(word);
    return match == NBI_TOOL_YES;
}

static void skip_space(cursor *c)
{
    c->i += nbi_tool_spaces(c->s + c->i, c->n - c->i);
}

static bool eat_spaced(cursor *c, const char *word)
{
    skip_space(c);
    return eat(c, word);
}

static nbi_tool_verdict more_or(const cursor *c, nbi_tool_verdict verdict)
{
    return c->more ? NBI_TOOL_HEAD_MORE : verdict;
}

/* ---------------------------------------------------------------- {"name": ..., "arguments":
 * {...}} */

/* "name" ends at its quote; a name with escapes is left to the reader of whole objects. */
static nbi_tool_verdict read_name(cursor *c, nbi_tool_head *head)
{
    size_t begin = c->i;
    while (c->i < c->n && c->s[c->i] != '"' && c->s[c->i] != '\\') c->i++;
    if (c->i == c->n) return NBI_TOOL_HEAD_MORE;
    if (c->s[c->i] == '\\') return NBI_TOOL_HEAD_LOOSE;
    head->name = c->s + begin;
    head->n_name = c->i++ - begin;
    return NBI_TOOL_HEAD_OBJ;
}

/* Behind the name: the arguments, or the end. */
static nbi_tool_verdict read_member(cursor *c)
{
    if (eat_spaced(c, "}")) return NBI_TOOL_HEAD_EMPTY;
    if (!eat(c, ",")) return more_or(c, NBI_TOOL_HEAD_LOOSE);
    if (!eat_spaced(c, "\"arguments\"")) {
        bool more = c->more;
        bool found = eat(c, "\"parameters\"");
        c->more = c->more || more;
        if (!found) return more_or(c, NBI_TOOL_HEAD_LOOSE);
    }
    if (!eat_spaced(c, ":")) return more_or(c, NBI_TOOL_HEAD_LOOSE);
    skip_space(c);
    if (c->i == c->n) return NBI_TOOL_HEAD_MORE;
    return c->s[c->i] == '{' ? NBI_TOOL_HEAD_OBJ : NBI_TOOL_HEAD_LOOSE;
}

static nbi_tool_verdict read_object(const nbi_tool_parser *p, cursor *c, nbi_tool_head *head)
{
    if (!eat_spaced(c, "{")) return more_or(c, NBI_TOOL_HEAD_BAD);
    head->used = c->i - 1; /* where a loose object starts */
    if (!eat_spaced(c, "\"name\"")) return more_or(c, NBI_TOOL_HEAD_LOOSE);
    if (!eat_spaced(c, ":")) return more_or(c, NBI_TOOL_HEAD_LOOSE);
    if (!eat_spaced(c, "\"")) return more_or(c, NBI_TOOL_HEAD_LOOSE);
    nbi_tool_verdict verdict = read_name(c, head);
    if (verdict != NBI_TOOL_HEAD_OBJ) return verdict;
    verdict = read_member(c);
    if (verdict == NBI_TOOL_HEAD_MORE || verdict == NBI_TOOL_HEAD_LOOSE) return verdict;
    if (!nbi_tool_name_ok(p, head->name, head->n_name)) return NBI_TOOL_HEAD_BAD;
    head->used = c->i;
    return verdict;
}

/* ---------------------------------------------------------------- DeepSeek */

static void set_name(nbi_tool_head *head, const char *s, size_t begin, size_t end)
{
    while (begin < end && nbi_tool_is_space(s[begin])) begin++;
    while (end > begin && nbi_tool_is_space(s[end - 1])) end--;
    head->name = s + begin;
    head->n_name = end - begin;
}

/* V3, behind the separator: the name, and a fence around the arguments. */
static nbi_tool_verdict read_fenced(cursor *c, nbi_tool_head *head)
{
    size_t begin = c->i;
    while (c->i < c->n && !strchr("\n`{<", c->s[c->i])) c->i++;
    if (c->i == c->n) return NBI_TOOL_HEAD_MORE;
    set_name(head, c->s, begin, c->i);
    if (eat_spaced(c, FENCE)) {
        while (c->i < c->n && c->s[c->i] >= 'a' && c->s[c->i] <= 'z') c->i++;
    } else if (c->more) {
        return NBI_TOOL_HEAD_MORE;
    }
    skip_space(c);
    if (c->i == c->n) return NBI_TOOL_HEAD_MORE;
    if (c->s[c->i] == '{') return NBI_TOOL_HEAD_OBJ;
    size_t here = c->i;
    bool empty = eat(c, CALL_END);
    c->i = here;
    return empty ? NBI_TOOL_HEAD_EMPTY : more_or(c, NBI_TOOL_HEAD_BAD);
}

static nbi_tool_verdict deepseek_head(const nbi_tool_parser *p, cursor *c, nbi_tool_head *head)
{
    eat(c, CALLS_BEGIN);
    head->tag = c->i;
    if (!eat_spaced(c, CALL_BEGIN)) return more_or(c, NBI_TOOL_HEAD_BAD);
    if (!head->tag) head->tag = c->i;
    size_t begin = c->i;
    const char *lt = memchr(c->s + begin, '<', c->n - begin);
    if (!lt) return NBI_TOOL_HEAD_MORE;
    size_t end = c->i = (size_t)(lt - c->s);
    if (!eat(c, SEPARATOR)) return more_or(c, NBI_TOOL_HEAD_BAD);
    skip_space(c);
    if (c->i == c->n) return NBI_TOOL_HEAD_MORE;
    nbi_tool_verdict verdict = NBI_TOOL_HEAD_OBJ;
    size_t here = c->i;
    if (c->s[here] == '{') {
        set_name(head, c->s, begin, end);
    } else if (eat(c, CALL_END)) {
        set_name(head, c->s, begin, end);
        verdict = NBI_TOOL_HEAD_EMPTY;
        c->i = here;
    } else if (c->more) {
        return NBI_TOOL_HEAD_MORE;
    } else {
        verdict = read_fenced(c, head);
    }
    if (verdict == NBI_TOOL_HEAD_MORE || verdict == NBI_TOOL_HEAD_BAD) return verdict;
    head->used = c->i;
    return nbi_tool_name_ok(p, head->name, head->n_name) ? verdict : NBI_TOOL_HEAD_BAD;
}

nbi_tool_verdict nbi_tool_object_head(const nbi_tool_parser *p, const char *s, size_t n,
                                      nbi_tool_head *head)
{
    cursor c = {s, n, 0, false};
    if (p->form == NBI_TOOL_FORM_DEEPSEEK) return deepseek_head(p, &c, head);
    if (p->form == NBI_TOOL_FORM_HERMES) {
        if (s[0] == '<') c.i = strlen("<tool_call>");
    } else if (s[0] == '[' || s[0] == ',') {
        c.i = 1;
    }
    head->tag = c.i ? c.i : 1;
    return read_object(p, &c, head);
}

/* ---------------------------------------------------------------- steps */

/* Form json: the array's bracket, or an object alone. */
static nb_status start_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n;
    const char *s = nbi_tool_rest(p, &n);
    size_t w = nbi_tool_spaces(s, n);
    size_t view = n - w < NBI_TOOL_HEAD_MAX ? n - w : NBI_TOOL_HEAD_MAX;
    nbi_tool_verdict verdict = NBI_TOOL_HEAD_BAD;
    nbi_tool_head head = {0};
    if (w == n && w <= NBI_TOOL_SPACE_MAX) {
        verdict = NBI_TOOL_HEAD_MORE;
    } else if (w < n && w <= NBI_TOOL_SPACE_MAX && (s[w] == '[' || s[w] == '{')) {
        verdict = nbi_tool_object_head(p, s + w, view, &head);
        if (view == NBI_TOOL_HEAD_MAX && verdict == NBI_TOOL_HEAD_MORE) verdict = NBI_TOOL_HEAD_BAD;
    }
    *step = NBI_TOOL_AGAIN;
    if (verdict == NBI_TOOL_HEAD_MORE && !p->final) {
        *step = NBI_TOOL_MORE;
        return NB_OK;
    }
    p->state = NBI_TOOL_OUTSIDE;
    if (verdict == NBI_TOOL_HEAD_BAD || verdict == NBI_TOOL_HEAD_MORE) return NB_OK;
    return nbi_tool_enter(p, verdict, &head, w);
}

/* A piece of strict JSON without white space. */
typedef struct slice {
    const char *s;
    size_t n;
} slice;

/* Behind the value that starts at s[i]; s is strict JSON. */
static size_t skip_value(const char *s, size_t n, size_t i)
{
    size_t depth = 0;
    for (; i < n; i++) {
        if (s[i] == '"') {
            for (i++; s[i] != '"'; i++) i += s[i] == '\\';
        } else if (s[i] == '{' || s[i] == '[') {
            depth++;
        } else if (s[i] == '}' || s[i] == ']') {
            if (depth == 0) return i;
            depth--;
        } else if (depth == 0 && (s[i] == ',' || s[i] == ':')) {
            return i;
        }
    }
    return n;
}

/* The value of a member of the object s, n 0 when there is none. `key` with its quotes. jansson is
 * not asked: it aborts when memory runs out inside a string. */
static slice member_of(const char *s, size_t n, const char *key)
{
    for (size_t i = 1; i < n && s[i] == '"';) {
        size_t end = skip_value(s, n, i), value = end + 1;
        bool found = end - i == strlen(key) && memcmp(s + i, key, end - i) == 0;
        end = skip_value(s, n, value);
        if (found) return (slice){s + value, end - value};
        i = end + 1;
    }
    return (slice){s, 0};
}

static bool is_value(slice v, char first)
{
    return v.n && v.s[0] == first;
}

/* A call of that name with the arguments v: an object, such an object in a string, or nothing. */
static nb_status take_arguments(nbi_tool_parser *p, const nbi_buf *name, slice v, nbi_buf *inner,
                                bool *taken)
{
    if (is_value(v, '"')) {
        nbi_buf decoded = {.max = SIZE_MAX};
        size_t used = 0;
        nb_status st = nbi_tool_json_unquote(&p->json, v.s, v.n, &decoded);
        nbi_tool_json_start(&p->json);
        if (st == NB_OK && decoded.len)
            st = nbi_tool_json_feed(&p->json, decoded.data, decoded.len, true, &used, inner);
        if (decoded.data) used += nbi_tool_spaces(decoded.data + used, decoded.len - used);
        bool whole = p->json.state == NBI_TOOL_JSON_DONE && used == decoded.len;
        nbi_buf_free(&decoded);
        NB_TRY(st);
        v = whole ? (slice){inner->data, inner->len} : v;
    } else if (v.n == 0 || is_value(v, 'n')) {
        v = (slice){"{}", 2};
    }
    if (!is_value(v, '{')) return NB_OK;
    *taken = true;
    NB_TRY(nbi_tool_begin(p, name->data, name->len));
    NB_TRY(nbi_tool_args(p, v.s, v.n));
    p->args_whole = true;
    return nbi_tool_end(p, true);
}

/* A whole object is in p->scratch. *taken: it was a call. */
static nb_status take_loose(nbi_tool_parser *p, bool *taken)
{
    const char *s = p->scratch.data;
    size_t n = p->scratch.len;
    slice name = member_of(s, n, "\"name\""), arguments = member_of(s, n, "\"arguments\"");
    if (!arguments.n) arguments = member_of(s, n, "\"parameters\"");
    if (!is_value(name, '"')) return NB_OK;
    nbi_buf text = {.max = SIZE_MAX}, inner = {.max = SIZE_MAX};
    nb_status st = nbi_tool_json_unquote(&p->json, name.s, name.n, &text);
    if (st == NB_OK && text.len && nbi_tool_name_ok(p, text.data, text.len))
        st = take_arguments(p, &text, arguments, &inner, taken);
    nbi_buf_free(&text);
    nbi_buf_free(&inner);
    return st;
}

static nb_status loose_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n, used;
    const char *s = nbi_tool_rest(p, &n);
    bool taken = false;
    NB_TRY(nbi_tool_json_feed(&p->json, s + p->scanned, n - p->scanned, false, &used, &p->scratch));
    p->scanned += used;
    bool small = p->scanned <= p->options.max_held;
    *step = NBI_TOOL_MORE;
    if (small && p->json.state == NBI_TOOL_JSON_MORE && !p->final) return NB_OK;
    *step = NBI_TOOL_AGAIN;
    if (small && p->json.state == NBI_TOOL_JSON_DONE) NB_TRY(take_loose(p, &taken));
    p->state = taken ? NBI_TOOL_AFTER : NBI_TOOL_OUTSIDE;
    if (!taken) return nbi_tool_content_rest(p, p->loose_skip);
    nbi_tool_skip(p, p->scanned);
    return NB_OK;
}

/* What is left of JSON that broke off or goes wrong: content, unless output was cut off there. */
static nb_status leave_json(nbi_tool_parser *p)
{
    size_t n;
    p->state = NBI_TOOL_OUTSIDE;
    nbi_tool_rest(p, &n);
    if (p->json.state != NBI_TOOL_JSON_BAD && !p->stopped) {
        nbi_tool_skip(p, n);
        return NB_OK;
    }
    if (p->json.held.len) NB_TRY(nbi_tool_content(p, p->json.held.data, p->json.held.len));
    return p->json.state == NBI_TOOL_JSON_BAD ? NB_OK : nbi_tool_content_rest(p, n);
}

/* The object around the arguments goes on: as if its first member had just been read. */
static nb_status enter_tail(nbi_tool_parser *p)
{
    static const char read[] = "{\"\":0";
    size_t used;
    nbi_tool_json_start(&p->json);
    nbi_buf_clear(&p->scratch);
    p->state = NBI_TOOL_TAIL;
    return nbi_tool_json_feed(&p->json, read, sizeof read - 1, true, &used, &p->scratch);
}

static nb_status arguments_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n, used, at = p->out.len;
    const char *s = nbi_tool_rest(p, &n);
    bool something;
    p->has_args = p->args_whole = true;
    NB_TRY(nbi_tool_json_feed(&p->json, s, n, p->final && p->stopped, &used, &p->out));
    nbi_tool_skip(p, used);
    *step = NBI_TOOL_AGAIN;
    if (p->json.state == NBI_TOOL_JSON_MORE && !p->final) {
        *step = NBI_TOOL_MORE;
        return nbi_tool_args_end(p, at);
    }
    if (p->json.state != NBI_TOOL_JSON_DONE) {
        NB_TRY(nbi_tool_json_close(&p->json, &p->out, &something));
        NB_TRY(nbi_tool_args_end(p, at));
        NB_TRY(nbi_tool_end(p, false));
        return leave_json(p);
    }
    NB_TRY(nbi_tool_args_end(p, at));
    if (p->form == NBI_TOOL_FORM_DSML) {
        p->state = NBI_TOOL_INSIDE;
        return NB_OK;
    }
    NB_TRY(nbi_tool_end(p, true));
    p->state = NBI_TOOL_AFTER;
    return p->form == NBI_TOOL_FORM_DEEPSEEK ? NB_OK : enter_tail(p);
}

static nb_status tail_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n, used;
    const char *s = nbi_tool_rest(p, &n);
    nbi_buf_clear(&p->scratch);
    NB_TRY(nbi_tool_json_feed(&p->json, s, n, false, &used, &p->scratch));
    nbi_tool_skip(p, used);
    *step = NBI_TOOL_AGAIN;
    if (p->json.state == NBI_TOOL_JSON_DONE) {
        p->state = NBI_TOOL_AFTER;
    } else if (p->json.state == NBI_TOOL_JSON_BAD || p->final) {
        return leave_json(p);
    } else {
        *step = NBI_TOOL_MORE;
    }
    return NB_OK;
}

nb_status nbi_tool_object_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    switch (p->state) {
    case NBI_TOOL_START: return start_step(p, step);
    case NBI_TOOL_LOOSE: return loose_step(p, step);
    case NBI_TOOL_OBJ: return arguments_step(p, step);
    default: return tail_step(p, step);
    }
}
