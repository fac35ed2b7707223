/* Translates tokenizer.json patterns from Oniguruma's dialect to PCRE2's and runs them (see
 * pattern.h). */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/pattern.h"

#include <ctype.h>
#include <pcre2.h>
#include <string.h>

#include "base/mem.h"
#include "text/unicode_extra.h"

#define MATCH_LIMIT    50000000u    /* backtracking steps of one match */
#define HEAP_LIMIT_KIB (64u * 1024) /* interpreter only */
#define JIT_STACK_MAX  ((size_t)8 << 20)
#define PATTERN_MAX    ((size_t)1 << 16)

/* White_Space without PCRE2's U+180E, and its complement, as class members. */
#define SPACE_MEMBERS \
    "\\t-\\r "        \
    "\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
#define NOT_SPACE_MEMBERS                                                                         \
    "\\x{0}-\\x{8}\\x{E}-\\x{1F}!-\\x{84}\\x{86}-\\x{9F}\\x{A1}-\\x{167F}\\x{1681}-\\x{1FFF}\\x{" \
    "200B}-\\x{2027}"                                                                             \
    "\\x{202A}-\\x{202E}\\x{2030}-\\x{205E}\\x{2060}-\\x{2FFF}\\x{3001}-\\x{10FFFF}"
/* `\w` with the reference's Latin-1 digits and fractions. */
#define WORD_MEMBERS \
    "A-Za-z0-9_\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}"

struct nbi_pattern {
    pcre2_code *code;
    char *text; /* translated */
};

struct nbi_matcher {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

typedef struct translator {
    const char *in, *end;
    const char *name;
    nbi_buf out;
    nb_error *err;
} translator;

static nb_status refuse(translator *t, const char *what)
{
    return nbi_fail(t->err, NB_UNSUPPORTED, "%s: the pattern uses %s, which is not supported",
                    t->name, what);
}

static nb_status put(translator *t, const char *s)
{
    return nbi_buf_add(&t->out, s, strlen(s));
}

static const struct {
    uint32_t first, last;
    char category[3];
} extra[] = {
#define X(first, last, category) {first, last, #category},
    NBI_UNICODE_EXTRA(X)
#undef X
};

/* Members that the category `name` ("L", "Nd") has gained since PCRE2's tables. */
static nb_status put_extra(translator *t, const char *name, size_t n)
{
    for (size_t i = 0; i < sizeof extra / sizeof *extra; i++) {
        if (toupper((unsigned char)name[0]) != extra[i].category[0]) continue;
        if (n == 2 && toupper((unsigned char)name[1]) != extra[i].category[1]) continue;
        NB_TRY(nbi_buf_addf(&t->out, "\\x{%X}-\\x{%X}", extra[i].first, extra[i].last));
    }
    return NB_OK;
}

/* \p{..}, \P{..}, \p{^..} with t->in behind the p. Categories of one or two letters get the newer
 * characters; negated ones only outside of a class, since a class cannot subtract. */
static nb_status translate_property(translator *t, char letter, bool in_class)
{
    const char *name = t->in, *close;
    size_t n = 1;
    if (t->in < t->end && *t->in == '{') {
        name++;
        close = memchr(t->in, '}', (size_t)(t->end - t->in));
        if (!close) return refuse(t, "an unfinished \\p{");
        n = (size_t)(close - name);
        t->in = close + 1;
    } else if (t->in < t->end) {
        t->in++;
    } else {
        return refuse(t, "an unfinished \\p");
    }
    bool negated = letter == 'P';
    if (n > 0 && *name == '^') {
        negated = !negated;
        name++, n--;
    }
    bool category = (n == 1 || n == 2) && strchr("LMNPSZC", toupper((unsigned char)name[0]));
    if (!category || (negated && in_class))
        return nbi_buf_addf(&t->out, "\\%c{%.*s}", negated ? 'P' : 'p', (int)n, name);
    if (!in_class) NB_TRY(put(t, negated ? "[^" : "["));
    if (n == 1 && toupper((unsigned char)name[0]) == 'L')
        NB_TRY(put(t, "A-Za-z")); /* a bitmap: quicker than the property */
    NB_TRY(nbi_buf_addf(&t->out, "\\p{%.*s}", (int)n, name));
    NB_TRY(put_extra(t, name, n));
    return in_class ? NB_OK : put(t, "]");
}

static nb_status put_class(translator *t, bool in_class, bool negated, const char *members)
{
    if (in_class)
        return negated ? refuse(t, "a negated shorthand inside a class") : put(t, members);
    return nbi_buf_addf(&t->out, "[%s%s]", negated ? "^" : "", members);
}

/* The members of \w between two texts. */
static nb_status put_word(translator *t, const char *before, const char *behind)
{
    static const char *const categories[] = {"L", "M", "Nd", "Pc"};
    NB_TRY(put(t, before));
    NB_TRY(put(t, WORD_MEMBERS));
    for (size_t i = 0; i < sizeof categories / sizeof *categories; i++)
        NB_TRY(put_extra(t, categories[i], strlen(categories[i])));
    return put(t, behind);
}

/* \b and \B: two alternatives of two assertions each. */
static nb_status put_boundary(translator *t, const char *a, const char *b, const char *c,
                              const char *d)
{
    NB_TRY(put_word(t, a, b));
    NB_TRY(put_word(t, "", c));
    NB_TRY(put_word(t, "", d));
    return put_word(t, "", "]))");
}

/* After a backslash. */
static nb_status translate_escape(translator *t, bool in_class)
{
    if (t->in == t->end) return refuse(t, "a backslash at its end");
    char c = *t->in++;
    switch (c) {
    case 'p':
    case 'P': return translate_property(t, c, in_class);
    case 's': return put_class(t, in_class, false, SPACE_MEMBERS);
    case 'S':
        return in_class ? put(t, NOT_SPACE_MEMBERS) : put_class(t, false, true, SPACE_MEMBERS);
    case 'w': return put_word(t, in_class ? "" : "[", in_class ? "" : "]");
    case 'W': return in_class ? refuse(t, "\\W inside a class") : put_word(t, "[^", "]");
    case 'h':
    case 'H': return put_class(t, in_class, c == 'H', "0-9A-Fa-f");
    case 'd':
    case 'D': {
        if (in_class && c == 'D') return refuse(t, "\\D inside a class");
        if (!in_class) NB_TRY(put(t, c == 'D' ? "[^" : "["));
        NB_TRY(put(t, "0-9\\p{Nd}"));
        NB_TRY(put_extra(t, "Nd", 2));
        return in_class ? NB_OK : put(t, "]");
    }
    case 'b':
        if (in_class) return put(t, "\\x{8}");
        return put_boundary(t, "(?:(?<=[", "])(?![", "])|(?<![", "])(?=[");
    case 'B': return put_boundary(t, "(?:(?<=[", "])(?=[", "])|(?<![", "])(?![");
    case 'u': {
        char hex[5] = {0};
        for (int i = 0; i < 4; i++) {
            if (t->in == t->end || !isxdigit((unsigned char)*t->in))
                return refuse(t, "an unfinished \\u");
            hex[i] = *t->in++;
        }
        return nbi_buf_addf(&t->out, "\\x{%s}", hex);
    }
    case 'y':
    case 'Y':
    case 'O':
    case 'C':
    case 'M':
    case 'c': return refuse(t, "an escape of Oniguruma's own");
    default: return nbi_buf_addf(&t->out, "\\%c", c);
    }
}

/* After '[': up to and with its ']'. */
static nb_status translate_class(translator *t)
{
    NB_TRY(put(t, "["));
    if (t->in < t->end && *t->in == '^') {
        t->in++;
        NB_TRY(put(t, "^"));
    }
    if (t->in < t->end && *t->in == ']') return refuse(t, "']' as the first member of a class");
    while (t->in < t->end) {
        char c = *t->in++;
        if (c == ']') return put(t, "]");
        if (c == '[') {
            const char *close = t->in < t->end && *t->in == ':' ? strstr(t->in, ":]") : NULL;
            if (!close) return refuse(t, "a class inside a class");
            NB_TRY(nbi_buf_addf(&t->out, "[%.*s", (int)(close + 2 - t->in), t->in));
            t->in = close + 2;
        } else if (c == '&' && t->in < t->end && *t->in == '&') {
            return refuse(t, "'&&' inside a class");
        } else if (c == '\\') {
            NB_TRY(translate_escape(t, true));
        } else {
            NB_TRY(nbi_buf_add(&t->out, &c, 1));
        }
    }
    return refuse(t, "an unfinished class");
}

static nb_status translate(translator *t)
{
    while (t->in < t->end) {
        char c = *t->in++;
        if (c == '\\') {
            NB_TRY(translate_escape(t, false));
        } else if (c == '[') {
            NB_TRY(translate_class(t));
        } else if (c == '(' && t->end - t->in > 1 &&
                   (*t->in == '*' || (*t->in == '?' && strchr("C{R0123456789&P~", t->in[1])))) {
            return refuse(t, "a call, verb or callout");
        } else {
            NB_TRY(nbi_buf_add(&t->out, &c, 1));
        }
    }
    return NB_OK;
}

static nb_status compile(nbi_pattern *p, const char *name, nb_error *err)
{
    int code;
    PCRE2_SIZE offset;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", name);
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    pcre2_set_parens_nest_limit(context, 100);
    p->code = pcre2_compile((PCRE2_SPTR)p->text, PCRE2_ZERO_TERMINATED,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                            &code, &offset, context);
    pcre2_compile_context_free(context);
    if (!p->code) {
        PCRE2_UCHAR text[128];
        pcre2_get_error_message(code, text, sizeof text);
        return nbi_fail(err, NB_UNSUPPORTED,
                        "%s: the pattern is refused by PCRE2 at byte %zu of \"%.200s\": %s", name,
                        offset, p->text, (char *)text);
    }
    (void)pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE); /* without JIT the interpreter runs */
    return NB_OK;
}

nb_status nbi_pattern_compile(nbi_pattern **out, const char *regex, size_t n, const char *name,
                              nb_error *err)
{
    if (n > PATTERN_MAX)
        return nbi_fail(err, NB_TOO_LARGE, "%s: pattern of %zu bytes, at most %zu", name, n,
                        PATTERN_MAX);
    if (memchr(regex, 0, n))
        return nbi_fail(err, NB_UNSUPPORTED, "%s: pattern with a NUL character", name);
    char *copy = nbi_strndup(regex, n); /* strstr() needs its NUL */
    nbi_pattern *p = nbi_calloc(1, sizeof *p);
    nb_status st = copy && p ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", name);
    if (st == NB_OK) {
        translator t = {.in = copy,
                        .end = copy + n,
                        .name = name,
                        .out = {.max = PATTERN_MAX * 64},
                        .err = err};
        st = translate(&t);
        if (st == NB_OK) st = nbi_buf_add(&t.out, "", 1);
        if (st == NB_NO_MEMORY || st == NB_TOO_LARGE)
            (void)nbi_fail(err, st, "%s: pattern grows too large", name);
        p->text = t.out.data;
        if (st == NB_OK) st = compile(p, name, err);
    }
    nbi_free(copy);
    if (st == NB_OK)
        *out = p;
    else
        nbi_pattern_free(&p);
    return st;
}

void nbi_pattern_free(nbi_pattern **pattern)
{
    nbi_pattern *p = *pattern;
    if (!p) return;
    pcre2_code_free(p->code);
    nbi_free(p->text);
    nbi_free(p);
    *pattern = NULL;
}

const char *nbi_pattern_text(const nbi_pattern *pattern)
{
    return pattern->text;
}

nb_status nbi_matcher_create(nbi_matcher **out, nb_error *err)
{
    nbi_matcher *m = nbi_calloc(1, sizeof *m);
    if (m) {
        m->data = pcre2_match_data_create(4, NULL);
        m->context = pcre2_match_context_create(NULL);
        m->stack = pcre2_jit_stack_create(32 * 1024, JIT_STACK_MAX, NULL);
    }
    if (!m || !m->data || !m->context) {
        nbi_matcher_free(&m);
        return nbi_fail(err, NB_NO_MEMORY, "out of memory for a regular expression");
    }
    pcre2_set_match_limit(m->context, MATCH_LIMIT);
    pcre2_set_heap_limit(m->context, HEAP_LIMIT_KIB);
    if (m->stack) pcre2_jit_stack_assign(m->context, NULL, m->stack);
    *out = m;
    return NB_OK;
}

void nbi_matcher_free(nbi_matcher **matcher)
{
    nbi_matcher *m = *matcher;
    if (!m) return;
    if (m->stack) pcre2_jit_stack_free(m->stack);
    if (m->context) pcre2_match_context_free(m->context);
    if (m->data) pcre2_match_data_free(m->data);
    nbi_free(m);
    *matcher = NULL;
}

nb_status nbi_pattern_find(const nbi_pattern *pattern, nbi_matcher *matcher, const char *text,
                           size_t n, size_t from, size_t *start, size_t *end, nb_error *err)
{
    int rc = pcre2_match(pattern->code, (PCRE2_SPTR)text, n, from, PCRE2_NO_UTF_CHECK,
                         matcher->data, matcher->context);
    if (rc == PCRE2_ERROR_NOMATCH) return NB_NOT_FOUND;
    if (rc < 0) {
        PCRE2_UCHAR message[128];
        pcre2_get_error_message(rc, message, sizeof message);
        return nbi_fail(err, NB_TOO_LARGE,
                        "the tokenizer's pattern cannot be matched within its limits: %s",
                        (char *)message);
    }
    const PCRE2_SIZE *o = pcre2_get_ovector_pointer(matcher->data);
    *start = o[0];
    *end = o[1] < o[0] ? o[0] : o[1]; /* \K in a look-ahead can place the start behind the end */
    return NB_OK;
}
