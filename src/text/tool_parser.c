/* The tool-call parser: text in, items out, and the state outside of calls (see tool.h,
 * tool_impl.h). */
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/clock.h"
#include "text/tool_impl.h"

nb_status nbi_tool_form_by_name(nbi_tool_form *out, const char *name, nb_error *err)
{
    static const struct {
        const char *name;
        nbi_tool_form form;
    } names[] = {
        {"none", NBI_TOOL_FORM_NONE},
        {"glm45", NBI_TOOL_FORM_GLM},
        {"glm47", NBI_TOOL_FORM_GLM},
        {"glm", NBI_TOOL_FORM_GLM},
        {"glm5", NBI_TOOL_FORM_GLM},
        {"glm4_moe", NBI_TOOL_FORM_GLM},
        {"hermes", NBI_TOOL_FORM_HERMES},
        {"qwen25", NBI_TOOL_FORM_HERMES},
        {"qwen", NBI_TOOL_FORM_HERMES},
        {"qwen3", NBI_TOOL_FORM_HERMES},
        {"deepseekv3", NBI_TOOL_FORM_DEEPSEEK},
        {"deepseek_v3", NBI_TOOL_FORM_DEEPSEEK},
        {"deepseekv31", NBI_TOOL_FORM_DEEPSEEK},
        {"deepseek_v31", NBI_TOOL_FORM_DEEPSEEK},
        {"deepseekv32", NBI_TOOL_FORM_DSML},
        {"deepseek_v32", NBI_TOOL_FORM_DSML},
        {"deepseekv4", NBI_TOOL_FORM_DSML},
        {"deepseek_v4", NBI_TOOL_FORM_DSML},
        {"json", NBI_TOOL_FORM_JSON},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(names[i].name, name) == 0) {
            *out = names[i].form;
            return NB_OK;
        }
    }
    return nbi_fail(err, NB_INVALID,
                    "tool-call parser \"%.64s\" is not known; known: none, glm45 (glm, glm4_moe), "
                    "glm47 (glm5), qwen25 (qwen, qwen3), hermes, deepseekv3, deepseekv31, "
                    "deepseekv32, deepseekv4 (also deepseek_v3, ...), json",
                    name);
}

void nbi_tool_call_id(char out[NBI_TOOL_ID_SIZE])
{
    static const char hex[] = "0123456789abcdef";
    unsigned char bytes[12];
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes) {
        /* A kernel without it: ids have to differ, nobody has to be unable to guess them. */
        static _Atomic uint64_t n_made;
        uint64_t seed[2] = {nbi_now_ns() * 0x9e3779b97f4a7c15u, ++n_made};
        memcpy(bytes, seed, 8);
        memcpy(bytes + 8, &seed[1], 4);
    }
    memcpy(out, "call_", 5);
    for (size_t i = 0; i < sizeof bytes; i++) {
        out[5 + 2 * i] = hex[bytes[i] >> 4];
        out[6 + 2 * i] = hex[bytes[i] & 15];
    }
    out[NBI_TOOL_ID_SIZE - 1] = '\0';
}

nbi_tool_match nbi_tool_match_tag(const char *s, size_t n, const char *tag)
{
    size_t len = strlen(tag);
    if (memcmp(s, tag, n < len ? n : len) != 0) return NBI_TOOL_NO;
    return n < len ? NBI_TOOL_MAYBE : NBI_TOOL_YES;
}

/* ---------------------------------------------------------------- items */

const char *nbi_tool_rest(const nbi_tool_parser *p, size_t *n)
{
    *n = p->in.len - p->pos;
    return p->in.data ? p->in.data + p->pos : "";
}

void nbi_tool_skip(nbi_tool_parser *p, size_t n)
{
    p->pos += n;
}

static nb_status add_item(nbi_tool_parser *p, nbi_tool_item_kind kind, size_t at, size_t n)
{
    nbi_tool_out *last = p->n_outs ? &p->outs[p->n_outs - 1] : NULL;
    if (last && last->item.kind == kind && (kind == NBI_TOOL_CONTENT || kind == NBI_TOOL_ARGS) &&
        last->at + last->item.n == at) {
        last->item.n += n;
        return NB_OK;
    }
    if (!p->outs || p->n_outs == p->cap_outs) {
        size_t cap = p->cap_outs ? p->cap_outs * 2 : 8;
        nbi_tool_out *outs = nbi_realloc(p->outs, cap * sizeof *outs);
        if (!outs) return NB_NO_MEMORY;
        p->outs = outs;
        p->cap_outs = cap;
    }
    p->outs[p->n_outs++] =
        (nbi_tool_out){{.kind = kind, .call = p->n_calls ? p->n_calls - 1 : 0, .n = n}, .at = at};
    return NB_OK;
}

nb_status nbi_tool_content(nbi_tool_parser *p, const char *text, size_t n)
{
    if (n == 0) return NB_OK;
    size_t at = p->out.len, space = 0;
    NB_TRY(nbi_buf_add(&p->out, text, n));
    while (space < n && nbi_tool_is_space(text[n - 1 - space])) space++;
    p->space_run = space == n ? p->space_run + n : space;
    if (space < n) p->behind_call = false;
    return add_item(p, NBI_TOOL_CONTENT, at, n);
}

nb_status nbi_tool_content_rest(nbi_tool_parser *p, size_t n)
{
    size_t n_rest;
    const char *s = nbi_tool_rest(p, &n_rest);
    nbi_tool_skip(p, n);
    return nbi_tool_content(p, s, n);
}

/* Printable, and nothing that markup or JSON is made of. */
static bool is_plausible_name(const char *name, size_t n)
{
    if (n == 0 || n > NBI_TOOL_NAME_MAX) return false;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)name[i];
        if (c <= ' ' || c == 0x7f || strchr("\"'`<>{}[]()\\,;=", c)) return false;
    }
    return true;
}

bool nbi_tool_name_ok(const nbi_tool_parser *p, const char *name, size_t n)
{
    if (p->options.max_calls && p->n_calls >= p->options.max_calls) return false;
    if (n == 0 || n > NBI_TOOL_NAME_MAX || memchr(name, '\0', n)) return false;
    if (nbi_tool_find(p->tools, name, n)) return true;
    return p->options.undeclared == NBI_TOOL_UNDECLARED_CALL && is_plausible_name(name, n);
}

nb_status nbi_tool_begin(nbi_tool_parser *p, const char *name, size_t n)
{
    size_t at = p->out.len;
    NB_TRY(nbi_buf_add(&p->out, name, n));
    NB_TRY(nbi_buf_add(&p->out, "", 1));
    p->open = true;
    p->n_calls++;
    p->tool = nbi_tool_find(p->tools, name, n);
    p->has_args = p->args_whole = false;
    nbi_tool_keys_clear(&p->keys);
    NB_TRY(add_item(p, NBI_TOOL_BEGIN, at, n));
    nbi_tool_call_id(p->outs[p->n_outs - 1].item.id);
    return NB_OK;
}

nb_status nbi_tool_args_end(nbi_tool_parser *p, size_t at)
{
    return p->out.len > at ? add_item(p, NBI_TOOL_ARGS, at, p->out.len - at) : NB_OK;
}

nb_status nbi_tool_args(nbi_tool_parser *p, const char *text, size_t n)
{
    size_t at = p->out.len;
    NB_TRY(nbi_buf_add(&p->out, text, n));
    return nbi_tool_args_end(p, at);
}

nb_status nbi_tool_end(nbi_tool_parser *p, bool complete)
{
    const char *close = p->args_whole ? "" : p->has_args ? "}" : "{}";
    NB_TRY(nbi_tool_args(p, close, strlen(close)));
    NB_TRY(add_item(p, NBI_TOOL_END, p->out.len, 0));
    p->outs[p->n_outs - 1].item.complete = complete;
    p->open = false;
    p->behind_call = true;
    p->space_run = 0;
    return NB_OK;
}

nb_status nbi_tool_enter(nbi_tool_parser *p, nbi_tool_verdict verdict, const nbi_tool_head *head,
                         size_t before)
{
    p->after_index = 0;
    if (verdict == NBI_TOOL_HEAD_LOOSE) {
        p->loose_skip = before + head->tag;
        p->scanned = before + head->used;
        nbi_tool_json_start(&p->json);
        nbi_buf_clear(&p->scratch);
        p->state = NBI_TOOL_LOOSE;
        return NB_OK;
    }
    NB_TRY(nbi_tool_begin(p, head->name, head->n_name));
    nbi_tool_skip(p, before + head->used);
    if (verdict == NBI_TOOL_HEAD_TAGS) {
        p->state = NBI_TOOL_INSIDE;
    } else if (verdict == NBI_TOOL_HEAD_OBJ) {
        nbi_tool_json_start(&p->json);
        p->state = NBI_TOOL_OBJ;
    } else {
        p->state = NBI_TOOL_AFTER;
        return nbi_tool_end(p, true);
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- outside of calls */

static const char *const *opening_tags(nbi_tool_form form)
{
    static const char *const none[] = {NULL};
    static const char *const tool_call[] = {"<tool_call>", NULL};
    static const char *const deepseek[] = {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", NULL};
    static const char *const dsml[] = {"<｜DSML｜function_calls>", "<｜DSML｜tool_calls>",
                                       "<｜DSML｜invoke name=\"", NULL};
    switch (form) {
    case NBI_TOOL_FORM_GLM:
    case NBI_TOOL_FORM_HERMES: return tool_call;
    case NBI_TOOL_FORM_DEEPSEEK: return deepseek;
    case NBI_TOOL_FORM_DSML: return dsml;
    default: return none;
    }
}

static nbi_tool_match match_opening(nbi_tool_form form, const char *s, size_t n)
{
    nbi_tool_match best = NBI_TOOL_NO;
    for (const char *const *tag = opening_tags(form); *tag; tag++) {
        nbi_tool_match match = nbi_tool_match_tag(s, n, *tag);
        if (match > best) best = match;
    }
    return best;
}

/* Where the next opening tag stands, or what may become one; n when there is none. */
static size_t find_opening(const nbi_tool_parser *p, const char *s, size_t n, nbi_tool_match *match)
{
    *match = NBI_TOOL_NO;
    for (size_t k = 0; k < n; k++) {
        const char *lt = memchr(s + k, '<', n - k);
        if (!lt) return n;
        k = (size_t)(lt - s);
        *match = match_opening(p->form, lt, n - k);
        if (*match == NBI_TOOL_YES || (*match == NBI_TOOL_MAYBE && !p->final)) return k;
        *match = NBI_TOOL_NO;
    }
    return n;
}

/* White space that ends s[0, n) and may be dropped with the call behind it. */
static size_t droppable(const nbi_tool_parser *p, const char *s, size_t n)
{
    size_t w = 0;
    while (w < n && w <= NBI_TOOL_SPACE_MAX && nbi_tool_is_space(s[n - 1 - w])) w++;
    size_t run = w == n ? w + p->space_run : w;
    return run > NBI_TOOL_SPACE_MAX ? 0 : w;
}

static nbi_tool_verdict read_head(const nbi_tool_parser *p, const char *s, size_t n,
                                  nbi_tool_head *head)
{
    bool tagged = p->form == NBI_TOOL_FORM_GLM || p->form == NBI_TOOL_FORM_DSML;
    size_t view = n < NBI_TOOL_HEAD_MAX ? n : NBI_TOOL_HEAD_MAX;
    nbi_tool_verdict verdict =
        tagged ? nbi_tool_tagged_head(p, s, view, head) : nbi_tool_object_head(p, s, view, head);
    bool no_more = p->final || n >= NBI_TOOL_HEAD_MAX;
    return verdict == NBI_TOOL_HEAD_MORE && no_more ? NBI_TOOL_HEAD_BAD : verdict;
}

static nb_status outside_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n;
    const char *s = nbi_tool_rest(p, &n);
    nbi_tool_match match;
    size_t at = find_opening(p, s, n, &match), w = droppable(p, s, at);
    NB_TRY(nbi_tool_content_rest(p, at - w));
    *step = NBI_TOOL_MORE;
    if (match != NBI_TOOL_YES) {
        if (!p->final) return NB_OK;
        if (!p->behind_call) return nbi_tool_content_rest(p, w);
        nbi_tool_skip(p, w);
        return NB_OK;
    }
    nbi_tool_head head = {0};
    s = nbi_tool_rest(p, &n);
    nbi_tool_verdict verdict = read_head(p, s + w, n - w, &head);
    if (verdict == NBI_TOOL_HEAD_MORE) return NB_OK;
    *step = NBI_TOOL_AGAIN;
    if (verdict == NBI_TOOL_HEAD_BAD) return nbi_tool_content_rest(p, w + head.tag);
    return nbi_tool_enter(p, verdict, &head, w);
}

/* Closing tags of a call, each at most once and in this order. */
static const char *const *closing_tags(nbi_tool_form form)
{
    static const char *const none[] = {NULL};
    static const char *const tool_call[] = {"</tool_call>", NULL};
    static const char *const deepseek[] = {"```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
                                           NULL};
    static const char *const dsml[] = {"</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", NULL};
    switch (form) {
    case NBI_TOOL_FORM_HERMES: return tool_call;
    case NBI_TOOL_FORM_DEEPSEEK: return deepseek;
    case NBI_TOOL_FORM_DSML: return dsml;
    default: return none;
    }
}

/* The next call of the same block, without an opening tag of its own. */
static nb_status next_in_block(nbi_tool_parser *p, const char *s, size_t n, size_t w,
                               nbi_tool_step *step)
{
    nbi_tool_head head = {0};
    nbi_tool_verdict verdict = read_head(p, s + w, n - w, &head);
    if (verdict == NBI_TOOL_HEAD_MORE) {
        *step = NBI_TOOL_MORE;
        return NB_OK;
    }
    if (verdict != NBI_TOOL_HEAD_BAD) return nbi_tool_enter(p, verdict, &head, w);
    p->state = NBI_TOOL_OUTSIDE;
    return NB_OK;
}

static nb_status after_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n;
    const char *s = nbi_tool_rest(p, &n), *const *tags = closing_tags(p->form);
    size_t w = nbi_tool_spaces(s, n < NBI_TOOL_SPACE_MAX + 1 ? n : NBI_TOOL_SPACE_MAX + 1);
    *step = NBI_TOOL_AGAIN;
    if (w == n && !p->final && w <= NBI_TOOL_SPACE_MAX) {
        *step = NBI_TOOL_MORE;
        return NB_OK;
    }
    if (w == n || w > NBI_TOOL_SPACE_MAX) {
        p->state = NBI_TOOL_OUTSIDE;
        return NB_OK;
    }
    for (unsigned i = 0; tags[i]; i++) {
        nbi_tool_match match = NBI_TOOL_NO;
        if (i >= p->after_index) match = nbi_tool_match_tag(s + w, n - w, tags[i]);
        if (match == NBI_TOOL_YES) {
            nbi_tool_skip(p, w + strlen(tags[i]));
            p->after_index = i + 1;
            return NB_OK;
        }
        if (match == NBI_TOOL_MAYBE && !p->final) {
            *step = NBI_TOOL_MORE;
            return NB_OK;
        }
    }
    if (p->form == NBI_TOOL_FORM_HERMES && p->after_index == 0 && s[w] == '{')
        return next_in_block(p, s, n, w, step);
    if (p->form == NBI_TOOL_FORM_JSON && s[w] == ',') return next_in_block(p, s, n, w, step);
    if (p->form == NBI_TOOL_FORM_JSON && s[w] == ']') nbi_tool_skip(p, w + 1);
    p->state = NBI_TOOL_OUTSIDE;
    return NB_OK;
}

/* ---------------------------------------------------------------- the loop */

static nb_status take_step(nbi_tool_parser *p, nbi_tool_step *step)
{
    size_t n;
    switch (p->state) {
    case NBI_TOOL_OUTSIDE: return outside_step(p, step);
    case NBI_TOOL_AFTER: return after_step(p, step);
    case NBI_TOOL_PLAIN:
        *step = NBI_TOOL_MORE;
        nbi_tool_rest(p, &n);
        return nbi_tool_content_rest(p, n);
    case NBI_TOOL_START:
    case NBI_TOOL_LOOSE:
    case NBI_TOOL_OBJ:
    case NBI_TOOL_TAIL: return nbi_tool_object_step(p, step);
    default: return nbi_tool_tagged_step(p, step);
    }
}

/* Gives the items their text, which has stopped moving. */
static nb_status give_items(nbi_tool_parser *p, const nbi_tool_item **items, size_t *n_items)
{
    if (p->n_outs > p->cap_items) {
        nbi_tool_item *grown = nbi_realloc(p->items, p->cap_outs * sizeof *grown);
        if (!grown) return NB_NO_MEMORY;
        p->items = grown;
        p->cap_items = p->cap_outs;
    }
    for (size_t i = 0; i < p->n_outs; i++) {
        p->items[i] = p->outs[i].item;
        p->items[i].text = p->out.data ? p->out.data + p->outs[i].at : "";
    }
    *items = p->items;
    *n_items = p->n_outs;
    return NB_OK;
}

static nb_status run(nbi_tool_parser *p, const char *text, size_t n, const nbi_tool_item **items,
                     size_t *n_items)
{
    nbi_tool_step step = NBI_TOOL_AGAIN;
    nbi_buf_clear(&p->out);
    p->n_outs = 0;
    if (p->pos) {
        p->in.len -= p->pos;
        memmove(p->in.data, p->in.data + p->pos, p->in.len + 1);
        p->pos = 0;
    }
    if (n) NB_TRY(nbi_buf_add(&p->in, text, n));
    while (step == NBI_TOOL_AGAIN) NB_TRY(take_step(p, &step));
    return give_items(p, items, n_items);
}

static nb_status fail_run(nb_status st, nb_error *err)
{
    return nbi_fail(err, st, "tool calls: %s", nb_status_text(st));
}

nb_status nbi_tool_parser_push(nbi_tool_parser *parser, const char *text, size_t n,
                               const nbi_tool_item **items, size_t *n_items, nb_error *err)
{
    nb_status st = run(parser, text, n, items, n_items);
    return st == NB_OK ? NB_OK : fail_run(st, err);
}

nb_status nbi_tool_parser_finish(nbi_tool_parser *parser, bool stopped, const nbi_tool_item **items,
                                 size_t *n_items, nb_error *err)
{
    parser->final = true;
    parser->stopped = stopped;
    nb_status st = run(parser, NULL, 0, items, n_items);
    if (st != NB_OK) return fail_run(st, err);
    NB_ASSERT(!parser->open && parser->pos == parser->in.len);
    return NB_OK;
}

uint32_t nbi_tool_parser_calls(const nbi_tool_parser *parser)
{
    return parser->n_calls;
}

nb_status nbi_tool_parser_create(nbi_tool_parser **out, nbi_tool_form form, json_t *tools,
                                 const nbi_tool_options *options, nb_error *err)
{
    nbi_tool_parser *p = nbi_calloc(1, sizeof *p);
    if (!p) return fail_run(NB_NO_MEMORY, err);
    p->form = form;
    if (options) p->options = *options;
    if (!p->options.max_held) p->options.max_held = NBI_TOOL_HELD_DEFAULT;
    p->tools = json_incref(tools);
    p->in.max = p->out.max = p->scratch.max = SIZE_MAX;
    if (form == NBI_TOOL_FORM_NONE) p->state = NBI_TOOL_PLAIN;
    if (form == NBI_TOOL_FORM_JSON) p->state = NBI_TOOL_START;
    *out = p;
    return NB_OK;
}

void nbi_tool_parser_destroy(nbi_tool_parser **parser)
{
    nbi_tool_parser *p = *parser;
    if (!p) return;
    json_decref(p->tools);
    nbi_buf_free(&p->in);
    nbi_buf_free(&p->out);
    nbi_buf_free(&p->scratch);
    nbi_tool_keys_free(&p->keys);
    nbi_tool_json_free(&p->json);
    nbi_free(p->outs);
    nbi_free(p->items);
    nbi_free(p);
    *parser = NULL;
}
