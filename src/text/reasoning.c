/* Reasoning and content in model output (see reasoning.h). */
#include "text/reasoning.h"

#include <string.h>

#define OPEN  "<think>"
#define CLOSE "</think>"
#define CALL  "<tool_call>"

/* PHASE_OUTSIDE and PHASE_START: only white space so far; a <think> may come. */
enum { PHASE_OUTSIDE, PHASE_START, PHASE_REASONING, PHASE_CONTENT };

nb_status nbi_reasoning_by_name(nbi_reasoning_kind *out, const char *name, nb_error *err)
{
    static const struct {
        const char *name;
        nbi_reasoning_kind kind;
    } names[] = {
        {"none", NBI_REASONING_NONE},         {"glm45", NBI_REASONING_GLM45},
        {"glm", NBI_REASONING_GLM45},         {"glm4", NBI_REASONING_GLM45},
        {"glm47", NBI_REASONING_GLM45},       {"glm4_moe", NBI_REASONING_GLM45},
        {"glm4-moe", NBI_REASONING_GLM45},    {"glm5", NBI_REASONING_GLM45},
        {"deepseek-r1", NBI_REASONING_THINK}, {"deepseek_r1", NBI_REASONING_THINK},
        {"deepseek-v3", NBI_REASONING_THINK}, {"deepseek_v3", NBI_REASONING_THINK},
        {"qwen3", NBI_REASONING_THINK},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i].name) == 0) {
            *out = names[i].kind;
            return NB_OK;
        }
    }
    return nbi_fail(err, NB_INVALID,
                    "reasoning parser \"%.64s\" is not known; known: none, glm45 (glm, glm4, "
                    "glm47, glm4_moe, glm5), deepseek-r1, "
                    "deepseek-v3, qwen3",
                    name);
}

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

bool nbi_reasoning_prompt_open(nbi_reasoning_kind kind, const char *prompt, size_t n)
{
    if (kind == NBI_REASONING_NONE) return false;
    while (n && is_space(prompt[n - 1])) n--;
    size_t len = sizeof OPEN - 1;
    return n >= len && memcmp(prompt + n - len, OPEN, len) == 0;
}

void nbi_reasoning_init(nbi_reasoning *r, nbi_reasoning_kind kind, bool inside)
{
    memset(r, 0, sizeof *r);
    r->kind = kind;
    r->phase = kind == NBI_REASONING_NONE ? PHASE_CONTENT : inside ? PHASE_START : PHASE_OUTSIDE;
    r->closed = r->phase == PHASE_CONTENT;
}

bool nbi_reasoning_inside(const nbi_reasoning *r)
{
    return r->phase != PHASE_CONTENT;
}

typedef struct writer {
    nbi_span *spans;
    size_t n;
} writer;

static void emit(writer *w, nbi_span_kind kind, const char *text, size_t n)
{
    if (n) w->spans[w->n++] = (nbi_span){kind, text, n};
}

/* Tags that may come in this phase, NULL-terminated. */
static const char *const *tags_of(const nbi_reasoning *r)
{
    static const char *const start[] = {OPEN, CLOSE, CALL, NULL}, *const inside[] = {CLOSE, CALL,
                                                                                     NULL};
    static const char *const think_start[] = {OPEN, CLOSE, NULL}, *const think_inside[] = {CLOSE,
                                                                                           NULL};
    static const char *const outside[] = {OPEN, NULL}, *const none[] = {NULL};
    bool glm = r->kind == NBI_REASONING_GLM45;
    switch (r->phase) {
    case PHASE_OUTSIDE: return outside;
    case PHASE_START: return glm ? start : think_start;
    case PHASE_REASONING: return glm ? inside : think_inside;
    default: return none;
    }
}

/* The tag that s[0..n) begins with (*whole) or is the beginning of (!*whole); NULL for neither. */
static const char *match_tag(const char *const *tags, const char *s, size_t n, bool *whole)
{
    for (; *tags; tags++) {
        size_t len = strlen(*tags);
        *whole = n >= len;
        if (memcmp(s, *tags, n < len ? n : len) == 0) return *tags;
    }
    return NULL;
}

/* White space held at the start is text after all. */
static void release_space(nbi_reasoning *r, writer *w)
{
    emit(w, r->phase == PHASE_OUTSIDE ? NBI_SPAN_CONTENT : NBI_SPAN_REASONING, r->space,
         r->n_space);
    r->n_space = 0;
}

static void enter(nbi_reasoning *r, uint8_t phase)
{
    r->phase = phase;
    if (phase == PHASE_CONTENT) r->closed = true;
}

/* A whole tag in the current phase. `static_tag` is the constant, so that the span outlives the
 * buffer. */
static void take_tag(nbi_reasoning *r, writer *w, const char *static_tag)
{
    if (strcmp(static_tag, OPEN) == 0) {
        r->n_space = 0; /* dropped with the tag */
        enter(r, PHASE_REASONING);
        return;
    }
    release_space(r, w);
    enter(r, PHASE_CONTENT);
    if (strcmp(static_tag, CALL) == 0) emit(w, NBI_SPAN_CONTENT, CALL, sizeof CALL - 1);
}

/* Text that is no tag ends the two start phases. */
static void leave_start(nbi_reasoning *r, writer *w)
{
    if (r->phase == PHASE_OUTSIDE) {
        release_space(r, w);
        enter(r, PHASE_CONTENT);
    } else if (r->phase == PHASE_START) {
        release_space(r, w);
        enter(r, PHASE_REASONING);
    }
}

/* Start phases: holds white space. Returns bytes taken; 0 when something else comes or the room is
 * used up. */
static size_t take_space(nbi_reasoning *r, const char *text, size_t n)
{
    size_t i = 0;
    while (i < n && is_space(text[i]) && r->n_space < NBI_REASONING_SPACE_MAX)
        r->space[r->n_space++] = text[i++];
    return i;
}

/* Completes or refutes the tag whose beginning is held; returns bytes of text taken. The held bytes
 * go to `w` as a constant. */
static size_t resume_tag(nbi_reasoning *r, writer *w, const char *text, size_t n)
{
    const char *const *tags = tags_of(r);
    size_t held = r->n_tag, taken = 0;
    bool whole = false;
    const char *before = match_tag(tags, r->tag, held, &whole);
    while (taken < n) {
        r->tag[held + taken] = text[taken];
        const char *tag = match_tag(tags, r->tag, held + taken + 1, &whole);
        if (!tag) break;
        taken++;
        if (whole) {
            r->n_tag = 0;
            take_tag(r, w, tag);
            return taken;
        }
        before = tag;
    }
    if (taken == n) {
        r->n_tag = (uint8_t)(held + n);
        return n;
    }
    /* Not a tag. No tag begins inside another's beginning (they have one '<' each), so all of it is
     * text. */
    leave_start(r, w);
    emit(w, r->phase == PHASE_REASONING ? NBI_SPAN_REASONING : NBI_SPAN_CONTENT, before,
         held + taken);
    r->n_tag = 0;
    return taken;
}

size_t nbi_reasoning_push(nbi_reasoning *r, const char *text, size_t n, nbi_span *spans)
{
    writer w = {spans, 0};
    size_t i = 0, begin;
    if (r->n_tag && n) i = resume_tag(r, &w, text, n);
    while (i < n && r->phase != PHASE_CONTENT) {
        if (r->phase != PHASE_REASONING) {
            i += take_space(r, text + i, n - i);
            if (i == n) break;
        }
        begin = i;
        const char *tag = NULL;
        bool whole = false;
        for (; i < n; i++) {
            if (text[i] == '<' && (tag = match_tag(tags_of(r), text + i, n - i, &whole))) break;
            if (r->phase != PHASE_REASONING) leave_start(r, &w); /* the first byte is text */
            if (r->phase == PHASE_CONTENT) break;
        }
        if (r->phase == PHASE_CONTENT) {
            i = begin;
            break;
        }
        emit(&w, NBI_SPAN_REASONING, text + begin, i - begin);
        if (!tag) break;
        if (whole) {
            take_tag(r, &w, tag);
            i += strlen(tag);
        } else {
            memcpy(r->tag, text + i, n - i);
            r->n_tag = (uint8_t)(n - i);
            i = n;
        }
    }
    if (i < n) emit(&w, NBI_SPAN_CONTENT, text + i, n - i);
    return w.n;
}

size_t nbi_reasoning_finish(nbi_reasoning *r, bool stopped, nbi_span *spans, bool *unclosed)
{
    writer w = {spans, 0};
    bool was_inside = r->phase == PHASE_START || r->phase == PHASE_REASONING;
    bool whole;
    const char *tag = r->n_tag ? match_tag(tags_of(r), r->tag, r->n_tag, &whole) : NULL;
    release_space(r, &w);
    if (tag) emit(&w, was_inside ? NBI_SPAN_REASONING : NBI_SPAN_CONTENT, tag, r->n_tag);
    r->n_tag = 0;
    enter(r, PHASE_CONTENT);
    *unclosed = was_inside && stopped;
    return w.n;
}

void nbi_reasoning_split(nbi_reasoning_kind kind, bool inside, bool stopped, const char *text,
                         size_t n, nbi_reasoning_parts *out)
{
    nbi_reasoning r;
    nbi_span spans[NBI_REASONING_SPANS_MAX];
    nbi_reasoning_init(&r, kind, inside);
    size_t k = nbi_reasoning_push(&r, text, n, spans), end = 0, begin = 0;
    bool unclosed;
    *out = (nbi_reasoning_parts){.reasoning = text, .content = text};
    /* One push of everything: reasoning is one stretch and content the rest, so lengths place them.
     */
    for (size_t i = 0; i < k; i++)
        *(spans[i].kind == NBI_SPAN_REASONING ? &out->n_reasoning : &out->n_content) += spans[i].n;
    k = nbi_reasoning_finish(&r, stopped, spans, &unclosed);
    for (size_t i = 0; i < k; i++)
        *(spans[i].kind == NBI_SPAN_REASONING ? &out->n_reasoning : &out->n_content) += spans[i].n;
    out->content = text + (n - out->n_content);
    /* Reasoning ends at the text's end, before a </think>, or before the content that a <tool_call>
     * starts. */
    end = n - out->n_content;
    size_t close = sizeof CLOSE - 1;
    if (r.closed && end >= close && out->n_reasoning + close <= end &&
        memcmp(text + end - close, CLOSE, close) == 0)
        end -= close;
    begin = end - out->n_reasoning;
    out->reasoning = text + begin;
    out->unclosed = unclosed && out->n_reasoning > 0;
    if (out->unclosed) {
        out->content = out->reasoning;
        out->n_content = out->n_reasoning;
    }
}
