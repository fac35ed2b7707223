/* Expressions that end an answer (see stop_regex.h).
 *
 * An expression is anchored, and every place where a match may begin is tried by itself: those that
 * PCRE2 calls partial stay, the others are never looked at again. */
#include "text/stop_regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <string.h>

#include "base/mem.h"

#define WINDOW      ((size_t)2048)
#define MATCH_LIMIT 2000
#define HEAP_KIB    64
#define HEAP_BYTES  ((size_t)192 << 10) /* 20 KiB, doubled as often as HEAP_KIB allows; and more */

typedef struct expression {
    pcre2_code *code;
    size_t from; /* no match begins before it; an offset in the window */
} expression;

struct nbi_stop_regex {
    expression expressions[NB_STOP_REGEX_MAX];
    size_t n;
    pcre2_general_context *memory;
    pcre2_match_context *context;
    pcre2_match_data *data;
    size_t heap_used;
    size_t n_text;
    char text[WINDOW]; /* [n_text] the end of the text, with what look-behind may see */
    _Alignas(16) char heap[HEAP_BYTES];
};

/* ---------------------------------------------------------------- memory of PCRE2 */

/* All that matching takes comes from one block, given out once. */
static void *take(PCRE2_SIZE bytes, void *user)
{
    nbi_stop_regex *r = user;
    size_t n = (bytes + 15) & ~(size_t)15;
    if (bytes > HEAP_BYTES || HEAP_BYTES - r->heap_used < n) return NULL;
    r->heap_used += n;
    return r->heap + r->heap_used - n;
}

static void leave(void *p, void *user)
{
    (void)p;
    (void)user;
}

static nb_status make_contexts(nbi_stop_regex *r, nb_error *err)
{
    r->memory = pcre2_general_context_create(take, leave, r);
    if (r->memory) r->context = pcre2_match_context_create(r->memory);
    if (r->memory) r->data = pcre2_match_data_create(1, r->memory);
    if (!r->context || !r->data) return nbi_fail(err, NB_NO_MEMORY, "out of memory");
    pcre2_set_match_limit(r->context, MATCH_LIMIT);
    pcre2_set_heap_limit(r->context, HEAP_KIB);
    return NB_OK;
}

/* ---------------------------------------------------------------- compiling */

static int match(const nbi_stop_regex *r, const expression *x, size_t from)
{
    return pcre2_match(x->code, (PCRE2_SPTR)r->text, r->n_text, from,
                       PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY | PCRE2_PARTIAL_SOFT, r->data,
                       r->context);
}

static nb_status compile(nbi_stop_regex *r, expression *x, const char *pattern, nb_error *err)
{
    int code;
    PCRE2_SIZE offset;
    PCRE2_UCHAR why[128];
    if (strlen(pattern) > NBI_STOP_REGEX_PATTERN_MAX)
        return nbi_fail(err, NB_INVALID, "an expression of %zu bytes, at most %d", strlen(pattern),
                        NBI_STOP_REGEX_PATTERN_MAX);
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context) return nbi_fail(err, NB_NO_MEMORY, "out of memory");
    pcre2_set_parens_nest_limit(context, 100);
    x->code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                            PCRE2_ANCHORED | PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code,
                            &offset, context);
    pcre2_compile_context_free(context);
    if (!x->code) {
        pcre2_get_error_message(code, why, sizeof why);
        return nbi_fail(err, NB_INVALID, "not an expression of PCRE2, at byte %zu: %s", offset,
                        (char *)why);
    }
    (void)pcre2_jit_compile(x->code, PCRE2_JIT_PARTIAL_SOFT); /* else the interpreter runs */
    if (pcre2_match(x->code, (PCRE2_SPTR) "", 0, 0, 0, r->data, r->context) >= 0)
        return nbi_fail(err, NB_INVALID, "matches the empty text, so that nothing would come");
    return NB_OK;
}

nb_status nbi_stop_regex_create(nbi_stop_regex **out, const char *const *patterns, size_t n,
                                nb_error *err)
{
    if (n > NB_STOP_REGEX_MAX)
        return nbi_fail(err, NB_INVALID, "%zu expressions, at most %d", n, NB_STOP_REGEX_MAX);
    nbi_stop_regex *r = nbi_calloc(1, sizeof *r);
    if (!r) return nbi_fail(err, NB_NO_MEMORY, "out of memory");
    nb_status st = make_contexts(r, err);
    for (size_t i = 0; st == NB_OK && i < n; i++) {
        r->n = i + 1;
        st = compile(r, &r->expressions[i], patterns[i], err);
    }
    if (st == NB_OK)
        *out = r;
    else
        nbi_stop_regex_destroy(&r);
    return st;
}

void nbi_stop_regex_destroy(nbi_stop_regex **regex)
{
    nbi_stop_regex *r = *regex;
    if (!r) return;
    for (size_t i = 0; i < r->n; i++) pcre2_code_free(r->expressions[i].code);
    pcre2_match_data_free(r->data);
    pcre2_match_context_free(r->context);
    pcre2_general_context_free(r->memory);
    nbi_free(r);
    *regex = NULL;
}

/* ---------------------------------------------------------------- searching */

static size_t next_character(const nbi_stop_regex *r, size_t at)
{
    do at++;
    while (at < r->n_text && ((unsigned char)r->text[at] & 0xc0) == 0x80);
    return at;
}

/* Room for one more character; what may be matched or looked back at stays. */
static void make_room(nbi_stop_regex *r)
{
    if (r->n_text + 4 <= WINDOW) return;
    size_t drop = next_character(r, r->n_text - 2 * NBI_STOP_REGEX_BYTES - 1);
    memmove(r->text, r->text + drop, r->n_text - drop);
    r->n_text -= drop;
    for (size_t i = 0; i < r->n; i++) r->expressions[i].from -= drop;
}

/* Where the expression's match begins that ends here, or n_text. Moves `from` on. */
static size_t find(const nbi_stop_regex *r, expression *x)
{
    bool partial = false;
    while (r->n_text - x->from > NBI_STOP_REGEX_BYTES) x->from = next_character(r, x->from);
    for (size_t at = x->from; at < r->n_text; at = next_character(r, at)) {
        int rc = match(r, x, at);
        if (rc >= 0) return at;
        partial = partial || rc == PCRE2_ERROR_PARTIAL;
        if (!partial) x->from = next_character(r, at);
    }
    return r->n_text;
}

int nbi_stop_regex_push(nbi_stop_regex *r, const char *character, size_t n, size_t *length)
{
    make_room(r);
    memcpy(r->text + r->n_text, character, n);
    r->n_text += n;
    for (size_t i = 0; i < r->n; i++) {
        size_t at = find(r, &r->expressions[i]);
        if (at == r->n_text) continue;
        *length = r->n_text - at;
        return (int)i;
    }
    return -1;
}

size_t nbi_stop_regex_bytes(void)
{
    return sizeof(nbi_stop_regex);
}

size_t nbi_stop_regex_held(const nbi_stop_regex *r)
{
    size_t held = 0;
    for (size_t i = 0; i < r->n; i++) {
        size_t own = r->n_text - r->expressions[i].from;
        if (own > held) held = own;
    }
    return held;
}
