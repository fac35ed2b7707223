/* Normalizers of tokenizer.json (see normalize.h). Canonical forms come from utf8proc's data; the
 * ordering of combining marks is done here, since utf8proc's own takes quadratic time on long runs
 * of marks. */
#include "text/normalize.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/json.h"
#include "base/utf8.h"
#include "text/unicode.h"

typedef enum norm_kind {
    NORM_FORM, /* NFC, NFD, NFKC, NFKD */
    NORM_LOWERCASE,
    NORM_REPLACE,
    NORM_PREPEND,
    NORM_STRIP,
    NORM_STRIP_ACCENTS,
} norm_kind;

typedef struct norm_step {
    norm_kind kind;
    int form;             /* utf8proc options of NORM_FORM */
    bool left, right;     /* NORM_STRIP */
    nbi_pattern *pattern; /* NORM_REPLACE: NULL when `find` is literal */
    char *find, *content; /* content also of NORM_PREPEND */
    size_t n_find, n_content;
} norm_step;

struct nbi_normalizer {
    norm_step *steps;
    size_t n, cap;
};

/* ---------------------------------------------------------------- parsing */

static nb_status add_step(nbi_normalizer *z, norm_step **out)
{
    if (z->n == z->cap) {
        size_t cap = z->cap ? z->cap * 2 : 4;
        norm_step *steps = nbi_realloc(z->steps, cap * sizeof *steps);
        if (!steps) return NB_NO_MEMORY;
        z->steps = steps;
        z->cap = cap;
    }
    *out = memset(&z->steps[z->n++], 0, sizeof **out);
    return NB_OK;
}

static nb_status copy_string(char **out, size_t *n, const json_t *obj, const char *key,
                             const char *name, nb_error *err)
{
    const json_t *s = json_object_get(obj, key);
    if (!json_is_string(s))
        return nbi_fail(err, NB_CORRUPT, "%s: normalizer member \"%s\" is not a string", name, key);
    *n = json_string_length(s);
    *out = nbi_strndup(json_string_value(s), *n);
    return *out ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", name);
}

static nb_status parse_replace(norm_step *step, const json_t *spec, const char *name, nb_error *err)
{
    const json_t *pattern = json_object_get(spec, "pattern");
    NB_TRY(copy_string(&step->content, &step->n_content, spec, "content", name, err));
    if (json_object_get(pattern, "String"))
        return copy_string(&step->find, &step->n_find, pattern, "String", name, err);
    NB_TRY(copy_string(&step->find, &step->n_find, pattern, "Regex", name, err));
    return nbi_pattern_compile(&step->pattern, step->find, step->n_find, name, err);
}

static int form_of(const char *type)
{
    static const struct {
        const char *name;
        int form;
    } forms[] = {{"NFC", UTF8PROC_COMPOSE},
                 {"NFD", UTF8PROC_DECOMPOSE},
                 {"NFKC", UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
                 {"NFKD", UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (strcmp(type, forms[i].name) == 0) return forms[i].form | UTF8PROC_STABLE;
    return 0;
}

static nb_status parse_step(nbi_normalizer *z, const json_t *spec, const char *name, nb_error *err)
{
    const char *type = json_string_value(json_object_get(spec, "type"));
    if (!type) return nbi_fail(err, NB_CORRUPT, "%s: normalizer without a \"type\"", name);
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(spec, "normalizers");
        if (!json_is_array(list))
            return nbi_fail(err, NB_CORRUPT, "%s: normalizer Sequence without \"normalizers\"",
                            name);
        for (size_t i = 0; i < json_array_size(list); i++)
            NB_TRY(parse_step(z, json_array_get(list, i), name, err));
        return NB_OK;
    }
    norm_step *step;
    if (add_step(z, &step) != NB_OK) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", name);
    if ((step->form = form_of(type)) != 0) {
        step->kind = NORM_FORM;
    } else if (strcmp(type, "Lowercase") == 0) {
        step->kind = NORM_LOWERCASE;
    } else if (strcmp(type, "StripAccents") == 0) {
        step->kind = NORM_STRIP_ACCENTS;
    } else if (strcmp(type, "Replace") == 0) {
        step->kind = NORM_REPLACE;
        return parse_replace(step, spec, name, err);
    } else if (strcmp(type, "Prepend") == 0) {
        step->kind = NORM_PREPEND;
        return copy_string(&step->content, &step->n_content, spec, "prepend", name, err);
    } else if (strcmp(type, "Strip") == 0) {
        step->kind = NORM_STRIP;
        NB_TRY(nbi_json_bool(&step->left, spec, "strip_left", name, err));
        NB_TRY(nbi_json_bool(&step->right, spec, "strip_right", name, err));
    } else {
        return nbi_fail(err, NB_UNSUPPORTED,
                        "%s: normalizer \"%.64s\" is not supported (known: NFC, NFD, NFKC, NFKD, "
                        "Lowercase, Replace, Prepend, "
                        "Strip, StripAccents, Sequence)",
                        name, type);
    }
    return NB_OK;
}

nb_status nbi_normalizer_parse(nbi_normalizer **out, const json_t *spec, const char *name,
                               nb_error *err)
{
    if (!spec || json_is_null(spec)) {
        *out = NULL;
        return NB_OK;
    }
    nbi_normalizer *z = nbi_calloc(1, sizeof *z);
    if (!z) return nbi_fail(err, NB_NO_MEMORY, "%s: out of memory", name);
    nb_status st = parse_step(z, spec, name, err);
    if (st == NB_OK)
        *out = z;
    else
        nbi_normalizer_free(&z);
    return st;
}

void nbi_normalizer_free(nbi_normalizer **normalizer)
{
    nbi_normalizer *z = *normalizer;
    if (!z) return;
    for (size_t i = 0; i < z->n; i++) {
        nbi_pattern_free(&z->steps[i].pattern);
        nbi_free(z->steps[i].find);
        nbi_free(z->steps[i].content);
    }
    nbi_free(z->steps);
    nbi_free(z);
    *normalizer = NULL;
}

/* ---------------------------------------------------------------- canonical forms */

static uint32_t mark_class(int32_t cp)
{
    return (uint32_t)utf8proc_get_property(cp)->combining_class;
}

/* Stable counting sort of one run of marks by combining class (1..255). */
static void sort_marks(int32_t *run, size_t n, int32_t *spare)
{
    size_t count[257] = {0};
    for (size_t i = 0; i < n; i++) count[mark_class(run[i]) + 1]++;
    for (size_t i = 1; i < 257; i++) count[i] += count[i - 1];
    for (size_t i = 0; i < n; i++) spare[count[mark_class(run[i])]++] = run[i];
    memcpy(run, spare, n * sizeof *run);
}

/* Short runs, which are nearly all, by insertion. */
static void order_marks(int32_t *run, size_t n, int32_t *spare)
{
    if (n > 32) {
        sort_marks(run, n, spare);
        return;
    }
    for (size_t i = 1; i < n; i++) {
        int32_t cp = run[i];
        size_t j = i;
        while (j > 0 && mark_class(run[j - 1]) > mark_class(cp)) {
            run[j] = run[j - 1];
            j--;
        }
        run[j] = cp;
    }
}

/* The character at the start of valid s[0..n), n >= 1, and its length. */
static inline size_t next_char(uint32_t *cp, const uint8_t *s, size_t n)
{
    *cp = 0;
    size_t len = nbi_utf8_read(cp, s, n);
    return len ? len : 1;
}

/* Bytes of ASCII at the start of s[0..n). */
static size_t ascii_length(const uint8_t *s, size_t n)
{
    size_t i = 0;
    uint64_t w;
    while (n - i >= 8 && (memcpy(&w, s + i, 8), (w & 0x8080808080808080ull) == 0)) i += 8;
    while (i < n && s[i] < 0x80) i++;
    return i;
}

/* Room for code points, kept from run to run. */
typedef struct points {
    int32_t *data;
    size_t cap;
} points;

static nb_status reserve(points *p, size_t n)
{
    if (n <= p->cap) return NB_OK;
    size_t cap = n > 2 * p->cap ? n : 2 * p->cap;
    int32_t *data = nbi_realloc(p->data, cap * sizeof *data);
    if (!data) return NB_NO_MEMORY;
    p->data = data;
    p->cap = cap;
    return NB_OK;
}

/* Code points of s[0..n), decomposed, into p, with room for a second copy behind them. */
static nb_status decompose(points *p, size_t *n_out, const uint8_t *s, size_t len, int form)
{
    size_t n = 0;
    int options = UTF8PROC_DECOMPOSE | (form & UTF8PROC_COMPAT) | UTF8PROC_STABLE;
    for (size_t i = 0; i < len;) {
        uint32_t cp;
        size_t k = next_char(&cp, s + i, len - i);
        NB_TRY(reserve(p, n + 32)); /* the longest decomposition has 18 */
        int boundary = 0;
        utf8proc_ssize_t made =
            utf8proc_decompose_char((int32_t)cp, p->data + n, 32, options, &boundary);
        if (made > 0 && made <= 32)
            n += (size_t)made;
        else
            p->data[n++] = (int32_t)cp;
        i += k;
    }
    *n_out = n;
    return reserve(p, 2 * n);
}

/* Appends the form of s[0..len), whose neighbours do not touch it. */
static nb_status put_form(int form, points *p, const uint8_t *s, size_t len, nbi_buf *out)
{
    size_t n;
    NB_TRY(decompose(p, &n, s, len, form));
    int32_t *cps = p->data;
    for (size_t i = 0; i < n;) {
        size_t j = i;
        while (j < n && mark_class(cps[j]) != 0) j++;
        if (j - i > 1) order_marks(cps + i, j - i, cps + n);
        i = j + 1;
    }
    if (form & UTF8PROC_COMPOSE) {
        utf8proc_ssize_t m =
            utf8proc_normalize_utf32(cps, (utf8proc_ssize_t)n, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
        if (m >= 0) n = (size_t)m;
    }
    for (size_t i = 0; i < n; i++) {
        char bytes[4];
        NB_TRY(nbi_buf_add(out, bytes, nbi_utf8_put(bytes, (uint32_t)cps[i])));
    }
    return NB_OK;
}

/* Characters that the form leaves as they are whatever stands before them: ASCII, and for NFC the
 * common ones of many scripts. A character behind may still change one of them. */
static bool is_stable(uint32_t cp, int form)
{
    static const struct {
        uint32_t first, last;
    } composed[] = {{0x80, 0x2FF},    {0x400, 0x482},    {0x2010, 0x205E}, {0x3001, 0x3029},
                    {0x3041, 0x3096}, {0x30A1, 0x30FA},  {0x4E00, 0x9FFF}, {0xAC00, 0xD7A3},
                    {0xFF00, 0xFFEF}, {0x1F300, 0x1F64F}};
    if (cp < 0x80) return true;
    if ((form & UTF8PROC_COMPAT) || !(form & UTF8PROC_COMPOSE)) return false;
    for (size_t i = 0; i < sizeof composed / sizeof *composed && cp >= composed[i].first; i++)
        if (cp <= composed[i].last) return true;
    return false;
}

/* Runs of other characters, each with the stable one in front, are put into the form. *changed is
 * false when there are none; then `out` stays empty. */
static nb_status run_form(int form, points *p, const nbi_buf *text, nbi_buf *out, bool *changed)
{
    const uint8_t *s = (const uint8_t *)text->data;
    size_t done = 0, last = 0;
    for (size_t i = 0, len; i < text->len; i += len) {
        uint32_t cp;
        if ((len = ascii_length(s + i, text->len - i)) > 0) {
            last = i + len - 1;
            continue;
        }
        len = next_char(&cp, s + i, text->len - i);
        if (is_stable(cp, form)) {
            last = i;
            continue;
        }
        size_t begin = i > done ? last : i;
        while (i < text->len && !is_stable(cp, form)) {
            i += len;
            if (i < text->len) len = next_char(&cp, s + i, text->len - i);
        }
        NB_TRY(nbi_buf_add(out, s + done, begin - done));
        NB_TRY(put_form(form, p, s + begin, i - begin, out));
        done = i;
        len = 0; /* the stable character at i comes next */
        *changed = true;
    }
    return *changed ? nbi_buf_add(out, s + done, text->len - done) : NB_OK;
}

/* ---------------------------------------------------------------- other steps */

/* Appends the ASCII at the start of s[0..n), with small letters when `lower`; *used is its length.
 */
static nb_status put_ascii(const uint8_t *s, size_t n, bool lower, nbi_buf *out, size_t *used)
{
    size_t k = *used = ascii_length(s, n);
    if (k == 0) return NB_OK;
    NB_TRY(nbi_buf_add(out, s, k));
    if (!lower) return NB_OK;
    for (char *c = out->data + out->len - k; k > 0; c++, k--)
        if (*c >= 'A' && *c <= 'Z') *c = (char)(*c | 0x20);
    return NB_OK;
}

/* Lowercase or StripAccents. */
static nb_status run_chars(const norm_step *step, const nbi_buf *text, nbi_buf *out)
{
    const uint8_t *s = (const uint8_t *)text->data;
    for (size_t i = 0, ascii; i < text->len;) {
        NB_TRY(put_ascii(s + i, text->len - i, step->kind == NORM_LOWERCASE, out, &ascii));
        i += ascii;
        if (i == text->len) break;
        uint32_t cp;
        char bytes[4];
        i += next_char(&cp, s + i, text->len - i);
        if (step->kind == NORM_STRIP_ACCENTS) {
            int category = nbi_unicode_category(cp);
            if (category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME) continue;
        } else if (cp == 0x130) { /* the one character whose lower case is two */
            NB_TRY(nbi_buf_add(out, "i\xCC\x87", 3));
            continue;
        } else {
            cp = (uint32_t)utf8proc_tolower((int32_t)cp);
        }
        NB_TRY(nbi_buf_add(out, bytes, nbi_utf8_put(bytes, cp)));
    }
    return NB_OK;
}

static nb_status run_strip(const norm_step *step, const nbi_buf *text, nbi_buf *out)
{
    size_t begin = 0, end = text->len;
    const uint8_t *s = (const uint8_t *)text->data;
    uint32_t cp = 0;
    while (step->left && begin < end) {
        size_t len = nbi_utf8_read(&cp, s + begin, end - begin);
        if (!nbi_unicode_is_space(cp)) break;
        begin += len;
    }
    while (step->right && begin < end) {
        size_t len = nbi_utf8_back(s + begin, end - begin);
        (void)nbi_utf8_read(&cp, s + end - len, len);
        if (!nbi_unicode_is_space(cp)) break;
        end -= len;
    }
    return nbi_buf_add(out, text->data + begin, end - begin);
}

static nb_status find_next(const norm_step *step, nbi_matcher *matcher, const nbi_buf *text,
                           size_t from, size_t *start, size_t *end, nb_error *err)
{
    if (step->pattern)
        return nbi_pattern_find(step->pattern, matcher, text->data, text->len, from, start, end,
                                err);
    const char *hit = NULL, *p = text->data + from, *stop = text->data + text->len;
    while (step->n_find && (size_t)(stop - p) >= step->n_find &&
           (p = memchr(p, step->find[0], (size_t)(stop - p)))) {
        if ((size_t)(stop - p) >= step->n_find && memcmp(p, step->find, step->n_find) == 0) {
            hit = p;
            break;
        }
        p++;
    }
    if (!hit) return NB_NOT_FOUND;
    *start = (size_t)(hit - text->data);
    *end = *start + step->n_find;
    return NB_OK;
}

static nb_status run_replace(const norm_step *step, nbi_matcher *matcher, const nbi_buf *text,
                             nbi_buf *out, nb_error *err)
{
    size_t done = 0, from = 0, start, end, last_end = SIZE_MAX;
    while (from <= text->len) {
        nb_status st = find_next(step, matcher, text, from, &start, &end, err);
        if (st == NB_NOT_FOUND) break;
        if (st != NB_OK) return st;
        if (start == end &&
            end == last_end) { /* an empty match right behind a match does not count */
            uint32_t cp;
            size_t len = from < text->len ? nbi_utf8_read(&cp, (const uint8_t *)text->data + from,
                                                          text->len - from)
                                          : 1;
            from += len ? len : 1;
            continue;
        }
        NB_TRY(nbi_buf_add(out, text->data + done, start - done));
        NB_TRY(nbi_buf_add(out, step->content, step->n_content));
        done = from = last_end = end;
    }
    return nbi_buf_add(out, text->data + done, text->len - done);
}

static nb_status run_step(const norm_step *step, nbi_matcher *matcher, nbi_buf *text,
                          nbi_buf *scratch, nb_error *err)
{
    nbi_buf_clear(scratch);
    if (step->kind == NORM_FORM) {
        points p = {0};
        bool changed = false;
        nb_status st = run_form(step->form, &p, text, scratch, &changed);
        nbi_free(p.data);
        if (st != NB_OK || !changed) return st;
    } else if (step->kind == NORM_REPLACE) {
        NB_TRY(run_replace(step, matcher, text, scratch, err));
    } else if (step->kind == NORM_STRIP) {
        NB_TRY(run_strip(step, text, scratch));
    } else if (step->kind == NORM_PREPEND) {
        if (text->len == 0) return NB_OK;
        NB_TRY(nbi_buf_add(scratch, step->content, step->n_content));
        NB_TRY(nbi_buf_add(scratch, text->data, text->len));
    } else {
        NB_TRY(run_chars(step, text, scratch));
    }
    nbi_buf swap = *text;
    *text = *scratch;
    *scratch = swap;
    return NB_OK;
}

nb_status nbi_normalizer_run(const nbi_normalizer *normalizer, nbi_matcher *matcher, nbi_buf *text,
                             nbi_buf *scratch, nb_error *err)
{
    if (!normalizer) return NB_OK;
    for (size_t i = 0; i < normalizer->n; i++) {
        if (text->len == 0) break;
        nb_status st = run_step(&normalizer->steps[i], matcher, text, scratch, err);
        if (st == NB_NO_MEMORY || st == NB_TOO_LARGE)
            return nbi_fail(err, st,
                            "normalizing %zu bytes exceeds the memory or the pattern's limits",
                            text->len);
        if (st != NB_OK) return st;
    }
    return NB_OK;
}
