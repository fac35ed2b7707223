/* Lenient JSON in, strict JSON out, byte by byte (see tool_json.h).
 *
 * Invariant: `out` plus a quote (while in a string that is a value) plus the closing brackets of
 * the open containers is valid JSON. A comma and a key are owed, and written together with the
 * first byte of the value behind them. */
#include "text/tool_json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"

enum {
    EXPECT_VALUE,
    EXPECT_VALUE_OR_END, /* behind '[' or a comma in an array */
    EXPECT_KEY_OR_END,   /* behind '{' or a comma in an object */
    EXPECT_FIRST_OR_END, /* behind '{' or '[': no comma owed */
    EXPECT_COLON,
    EXPECT_NEXT, /* a comma or the end of the container */
    EXPECT_STRING,
    EXPECT_KEY
};

/* ---------------------------------------------------------------- keys */

/* Of the characters that are written: bytes that are no UTF-8 all become U+FFFD. */
static uint64_t hash_key(uint32_t object, const char *key, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u ^ (object * 0x9e3779b97f4a7c15u);
    for (size_t i = 0; i < n;) {
        uint32_t code;
        i += nbi_utf8_next(key + i, n - i, &code);
        h = (h ^ (code == NBI_UTF8_BAD ? 0xfffd : code)) * 0x100000001b3u;
    }
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    h ^= h >> 32;
    return h ? h : 1; /* 0 marks a free slot */
}

/* The slot that holds h or where it belongs; there is always a free one. */
static uint64_t *slot_of(uint64_t *slots, size_t n_slots, uint64_t h)
{
    size_t i = (size_t)h & (n_slots - 1);
    while (slots[i] && slots[i] != h) i = (i + 1) & (n_slots - 1);
    return &slots[i];
}

static nb_status grow_keys(nbi_tool_keys *keys)
{
    size_t n_slots = keys->n_slots ? keys->n_slots * 2 : 64;
    uint64_t *slots = nbi_calloc(n_slots, sizeof *slots);
    if (!slots) return NB_NO_MEMORY;
    for (size_t i = 0; i < keys->n_slots; i++)
        if (keys->slots[i]) *slot_of(slots, n_slots, keys->slots[i]) = keys->slots[i];
    nbi_free(keys->slots);
    keys->slots = slots;
    keys->n_slots = n_slots;
    return NB_OK;
}

nb_status nbi_tool_keys_add(nbi_tool_keys *keys, uint32_t object, const char *key, size_t n,
                            bool *added)
{
    if (keys->n * 2 >= keys->n_slots) NB_TRY(grow_keys(keys));
    uint64_t h = hash_key(object, key, n);
    uint64_t *slot = slot_of(keys->slots, keys->n_slots, h);
    *added = *slot != h;
    if (*added && keys->n < NBI_TOOL_KEYS_MAX) {
        *slot = h;
        keys->n++;
    }
    return NB_OK;
}

void nbi_tool_keys_clear(nbi_tool_keys *keys)
{
    if (keys->n) memset(keys->slots, 0, keys->n_slots * sizeof *keys->slots);
    keys->n = 0;
}

void nbi_tool_keys_free(nbi_tool_keys *keys)
{
    nbi_free(keys->slots);
    *keys = (nbi_tool_keys){0};
}

/* ---------------------------------------------------------------- output */

nb_status nbi_tool_json_escape(nbi_buf *out, const char *s, size_t n)
{
    size_t before = out->len;
    NB_TRY(nbi_json_quote(out, s, n));
    out->len -= 2; /* without its quotes */
    memmove(out->data + before, out->data + before + 1, out->len - before);
    out->data[out->len] = '\0';
    return NB_OK;
}

/* Input up to here has reached the output. */
static void commit(nbi_tool_json *j, size_t at, size_t *mark)
{
    nbi_buf_clear(&j->held);
    *mark = at;
}

/* The comma and key before a value. */
static nb_status pay_owed(nbi_tool_json *j, nbi_buf *out)
{
    if (j->depth == 0) return NB_OK;
    if (j->has_member[j->depth]) NB_TRY(nbi_buf_add(out, ",", 1));
    j->has_member[j->depth] = true;
    if (!j->is_object[j->depth]) return NB_OK;
    NB_TRY(nbi_json_quote(out, j->key.data ? j->key.data : "", j->key.len));
    nbi_buf_clear(&j->key);
    return nbi_buf_add(out, ":", 1);
}

/* ---------------------------------------------------------------- strings */

/* Reads "\uXXXX", a pair of them where it is one; s[0] == '\\', s[1] == 'u'. Returns bytes taken, 0
 * when more are needed. Wrong digits give a backslash that stands for itself. */
static size_t unicode_escape(const char *s, size_t n, bool final, uint32_t *code)
{
    if (n < 6 && !final) return 0;
    int high = n >= 6 ? nbi_hex4(s + 2) : -1;
    *code = '\\';
    if (high < 0) return 1;
    *code = (uint32_t)high;
    if (high < 0xd800 || high > 0xdfff) return 6;
    *code = 0xfffd;
    if (high >= 0xdc00) return 6;
    if (n < 12 && !final && (n < 7 || s[6] == '\\') && (n < 8 || s[7] == 'u')) return 0;
    int low = n >= 12 && s[6] == '\\' && s[7] == 'u' ? nbi_hex4(s + 8) : -1;
    if (low < 0xdc00 || low > 0xdfff) return 6;
    *code = 0x10000 + ((uint32_t)(high - 0xd800) << 10) + (uint32_t)(low - 0xdc00);
    return 12;
}

/* Reads an escape; s[0] == '\\'. Returns bytes taken, 0 when more are needed. An unknown one is a
 * backslash that stands for itself. */
static size_t read_escape(const char *s, size_t n, bool final, uint32_t *code)
{
    static const char from[] = "\"\\/'bfnrt", to[] = "\"\\/'\b\f\n\r\t";
    if (n < 2 && !final) return 0;
    *code = '\\';
    if (n < 2) return 1;
    if (s[1] == 'u') return unicode_escape(s, n, final, code);
    const char *at = s[1] ? strchr(from, s[1]) : NULL;
    if (!at) return 1;
    *code = (unsigned char)to[at - from];
    return 2;
}

static nb_status put(nbi_tool_json *j, const char *s, size_t n, nbi_buf *out)
{
    return j->expect == EXPECT_KEY ? nbi_buf_add(&j->key, s, n) : nbi_tool_json_escape(out, s, n);
}

/* The inside of a string and its closing quote; *used stays short of what may still change. */
static nb_status read_string(nbi_tool_json *j, const char *s, size_t n, bool final, size_t *used,
                             nbi_buf *out)
{
    size_t i = *used;
    while (i < n && s[i] != j->quote) {
        size_t begin = i;
        if (s[i] == '\\') {
            uint32_t code;
            char utf8[4];
            size_t taken = read_escape(s + i, n - i, final, &code);
            if (!taken) break;
            NB_TRY(put(j, utf8, nbi_utf8_put(utf8, code), out));
            i += taken;
            continue;
        }
        while (i < n && s[i] != j->quote && s[i] != '\\') i++;
        if (i == n && !final) i = begin + nbi_utf8_cut(s + begin, n - begin);
        if (i == begin) break;
        NB_TRY(put(j, s + begin, i - begin, out));
    }
    *used = i;
    return NB_OK;
}

/* Behind the closing quote of a key. Repeated and NUL-bearing keys are refused. */
static nb_status end_key(nbi_tool_json *j)
{
    bool added = false;
    const char *key = j->key.data ? j->key.data : "";
    if (!memchr(key, '\0', j->key.len))
        NB_TRY(nbi_tool_keys_add(&j->keys, j->object[j->depth], key, j->key.len, &added));
    if (!added) j->state = NBI_TOOL_JSON_BAD;
    j->expect = EXPECT_COLON;
    return NB_OK;
}

/* ---------------------------------------------------------------- numbers and literals */

static bool is_word(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '+' ||
           c == '-' || c == '.' || c == '_';
}

static size_t digits(const char *s, size_t n, size_t i)
{
    while (i < n && s[i] >= '0' && s[i] <= '9') i++;
    return i;
}

/* NBI_TOOL_INTEGER, NBI_TOOL_NUMBER or 0. */
static uint8_t number_kind(const char *s, size_t n)
{
    char copy[NBI_TOOL_JSON_TOKEN_MAX];
    size_t i = s[0] == '-', whole = i, part;
    i = digits(s, n, i);
    if (i == whole || (s[whole] == '0' && i > whole + 1) || n >= sizeof copy) return 0;
    if (i == n) return NBI_TOOL_INTEGER;
    if (s[i] == '.') {
        part = i + 1;
        i = digits(s, n, part);
        if (i == part) return 0;
    }
    if (i < n && (s[i] == 'e' || s[i] == 'E')) {
        i++;
        if (i < n && (s[i] == '+' || s[i] == '-')) i++;
        part = i;
        i = digits(s, n, part);
        if (i == part) return 0;
    }
    memcpy(copy, s, n);
    copy[n] = '\0';
    return i == n && isfinite(strtod(copy, NULL)) ? NBI_TOOL_NUMBER : 0;
}

/* The kind of a word, and how strict JSON writes it. */
static uint8_t word_kind(const char **text, size_t *n)
{
    static const struct {
        const char *from, *to;
        uint8_t kind;
    } literals[] = {
        {"true", "true", NBI_TOOL_BOOLEAN},   {"false", "false", NBI_TOOL_BOOLEAN},
        {"null", "null", NBI_TOOL_NULL},      {"True", "true", NBI_TOOL_BOOLEAN},
        {"False", "false", NBI_TOOL_BOOLEAN}, {"None", "null", NBI_TOOL_NULL},
    };
    for (size_t i = 0; i < sizeof literals / sizeof *literals; i++) {
        if (strlen(literals[i].from) != *n || memcmp(literals[i].from, *text, *n) != 0) continue;
        *text = literals[i].to;
        *n = strlen(literals[i].to);
        return literals[i].kind;
    }
    return number_kind(*text, *n);
}

static void value_ended(nbi_tool_json *j)
{
    j->expect = EXPECT_NEXT;
    if (j->depth == 0) j->state = NBI_TOOL_JSON_DONE;
}

static nb_status read_word(nbi_tool_json *j, const char *s, size_t n, bool final, size_t *used,
                           nbi_buf *out, size_t *mark)
{
    size_t i = *used, end = i;
    while (end < n && end - i < NBI_TOOL_JSON_TOKEN_MAX && is_word(s[end])) end++;
    if (end == n && !final) return NB_OK;
    const char *text = s + i;
    size_t len = end - i;
    uint8_t kind = len ? word_kind(&text, &len) : 0;
    if (!kind) {
        j->state = NBI_TOOL_JSON_BAD;
        return NB_OK;
    }
    NB_TRY(pay_owed(j, out));
    NB_TRY(nbi_buf_add(out, text, len));
    if (j->depth == 0) j->kind = kind;
    value_ended(j);
    *used = end;
    commit(j, end, mark);
    return NB_OK;
}

/* ---------------------------------------------------------------- structure */

static nb_status open_container(nbi_tool_json *j, char c, nbi_buf *out)
{
    if (j->depth == NBI_TOOL_JSON_DEPTH) {
        j->state = NBI_TOOL_JSON_BAD;
        return NB_OK;
    }
    NB_TRY(pay_owed(j, out));
    NB_TRY(nbi_buf_add(out, &c, 1));
    if (j->depth == 0) j->kind = c == '{' ? NBI_TOOL_OBJECT : NBI_TOOL_ARRAY;
    j->depth++;
    j->is_object[j->depth] = c == '{';
    j->has_member[j->depth] = false;
    j->object[j->depth] = j->n_objects++;
    j->expect = EXPECT_FIRST_OR_END;
    return NB_OK;
}

static bool ends_container(const nbi_tool_json *j, char c)
{
    return j->depth > 0 && c == (j->is_object[j->depth] ? '}' : ']') &&
           (j->expect == EXPECT_NEXT || j->expect == EXPECT_FIRST_OR_END ||
            j->expect == EXPECT_KEY_OR_END || j->expect == EXPECT_VALUE_OR_END);
}

static bool key_may_come(const nbi_tool_json *j)
{
    return j->expect == EXPECT_KEY_OR_END ||
           (j->expect == EXPECT_FIRST_OR_END && j->is_object[j->depth]);
}

static bool value_may_come(const nbi_tool_json *j)
{
    return j->expect == EXPECT_VALUE || j->expect == EXPECT_VALUE_OR_END ||
           (j->expect == EXPECT_FIRST_OR_END && !j->is_object[j->depth]);
}

/* One byte of structure that is no white space; numbers and literals are read whole. */
static nb_status read_structure(nbi_tool_json *j, const char *s, size_t n, bool final, size_t *used,
                                nbi_buf *out, size_t *mark)
{
    char c = s[*used];
    if (ends_container(j, c)) {
        NB_TRY(nbi_buf_add(out, &c, 1));
        j->depth--;
        value_ended(j);
        commit(j, ++*used, mark);
    } else if (c == ',' && j->expect == EXPECT_NEXT) {
        j->expect = j->is_object[j->depth] ? EXPECT_KEY_OR_END : EXPECT_VALUE_OR_END;
        ++*used;
    } else if (c == ':' && j->expect == EXPECT_COLON) {
        j->expect = EXPECT_VALUE;
        ++*used;
    } else if ((c == '"' || c == '\'') && key_may_come(j)) {
        j->quote = c;
        j->expect = EXPECT_KEY;
        ++*used;
    } else if ((c == '"' || c == '\'') && value_may_come(j)) {
        NB_TRY(pay_owed(j, out));
        NB_TRY(nbi_buf_add(out, "\"", 1));
        if (j->depth == 0) j->kind = NBI_TOOL_STRING;
        j->quote = c;
        j->expect = EXPECT_STRING;
        commit(j, ++*used, mark);
    } else if ((c == '{' || c == '[') && value_may_come(j)) {
        NB_TRY(open_container(j, c, out));
        if (j->state == NBI_TOOL_JSON_MORE) commit(j, ++*used, mark);
    } else if (value_may_come(j)) {
        NB_TRY(read_word(j, s, n, final, used, out, mark));
    } else {
        j->state = NBI_TOOL_JSON_BAD;
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- public */

void nbi_tool_json_start(nbi_tool_json *j)
{
    j->state = NBI_TOOL_JSON_MORE;
    j->kind = j->depth = 0;
    j->expect = EXPECT_VALUE;
    j->n_objects = 0;
    nbi_buf_clear(&j->key);
    nbi_buf_clear(&j->held);
    nbi_tool_keys_clear(&j->keys);
}

void nbi_tool_json_free(nbi_tool_json *j)
{
    nbi_buf_free(&j->key);
    nbi_buf_free(&j->held);
    nbi_tool_keys_free(&j->keys);
}

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static nb_status feed(nbi_tool_json *j, const char *s, size_t n, bool final, size_t *used,
                      nbi_buf *out, size_t *mark)
{
    while (*used < n && j->state == NBI_TOOL_JSON_MORE) {
        size_t before = *used;
        if (j->expect == EXPECT_STRING || j->expect == EXPECT_KEY) {
            NB_TRY(read_string(j, s, n, final, used, out));
            bool ended = *used < n && s[*used] == j->quote;
            if (j->expect == EXPECT_STRING) {
                if (ended) {
                    NB_TRY(nbi_buf_add(out, "\"", 1));
                    ++*used;
                    value_ended(j);
                }
                commit(j, *used, mark);
            } else if (ended) {
                ++*used;
                NB_TRY(end_key(j));
            }
        } else if (is_space(s[*used])) {
            ++*used;
            if (j->held.len == 0 && *mark == before && j->kind) *mark = *used; /* no trace needed */
        } else {
            NB_TRY(read_structure(j, s, n, final, used, out, mark));
        }
        if (j->held.len + (*used - *mark) > NBI_TOOL_JSON_HELD_MAX) j->state = NBI_TOOL_JSON_BAD;
        if (*used == before) break;
    }
    return NB_OK;
}

nb_status nbi_tool_json_feed(nbi_tool_json *j, const char *s, size_t n, bool final, size_t *used,
                             nbi_buf *out)
{
    size_t mark = 0;
    *used = 0;
    NB_TRY(feed(j, s, n, final, used, out, &mark));
    return mark < *used ? nbi_buf_add(&j->held, s + mark, *used - mark) : NB_OK;
}

nb_status nbi_tool_json_close(nbi_tool_json *j, nbi_buf *out, bool *something)
{
    *something = j->kind != 0;
    if (j->expect == EXPECT_STRING) {
        NB_TRY(nbi_buf_add(out, "\"", 1));
        value_ended(j);
    }
    for (; j->depth; j->depth--) NB_TRY(nbi_buf_add(out, j->is_object[j->depth] ? "}" : "]", 1));
    return NB_OK;
}

nb_status nbi_tool_json_unquote(nbi_tool_json *j, const char *s, size_t n, nbi_buf *out)
{
    size_t used = 1;
    nbi_buf_clear(&j->key);
    j->quote = '"';
    j->expect = EXPECT_KEY; /* strings that are keys are decoded */
    NB_TRY(read_string(j, s, n, true, &used, out));
    return nbi_buf_add(out, j->key.data ? j->key.data : "", j->key.len);
}
