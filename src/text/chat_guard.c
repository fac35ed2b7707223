/* Private-use stand-ins for control words (see chat_guard.h). */
#include "text/chat_guard.h"

#include <string.h>

#include "base/utf8.h"
#include "text/unicode.h"

#define FIRST_PRIVATE 0xF0000u /* planes 15 and 16 are private use */
#define END_PRIVATE   0x10FFFEu
#define BLOCKS_MAX    512

static bool is_word(const nbi_added_token *t)
{
    if (t->n == 0) return false;
    return t->special || (t->n > 2 && t->text[0] == '<' && t->text[t->n - 1] == '>');
}

static bool is_think(const nbi_added_token *t)
{
    return strcmp(t->text, "<think>") == 0 || strcmp(t->text, "</think>") == 0;
}

/* Marks the blocks of `size` characters that text[0..n) uses; escapes such as \udb80\udc00 of JSON
 * are not used by our writer. */
static void mark_blocks(bool *used, uint32_t size, const char *text, size_t n)
{
    const uint8_t *s = (const uint8_t *)text;
    for (size_t i = 0; i < n; i++) {
        uint32_t cp;
        if (s[i] < 0xF3 || nbi_utf8_read(&cp, s + i, n - i) != 4 || cp < FIRST_PRIVATE) continue;
        uint32_t block = (cp - FIRST_PRIVATE) / size;
        if (block < BLOCKS_MAX) used[block] = true;
    }
}

static nb_status choose_block(nbi_guard *g, uint32_t n_tokens, const char *request,
                              size_t n_request, const char *source, nb_error *err)
{
    bool used[BLOCKS_MAX] = {false};
    uint32_t size = 256;
    while (size < n_tokens) size *= 2;
    mark_blocks(used, size, request, n_request);
    mark_blocks(used, size, source, strlen(source));
    for (uint32_t block = 0; block < BLOCKS_MAX; block++) {
        g->base = FIRST_PRIVATE + block * size;
        if (g->base + n_tokens > END_PRIVATE) break;
        bool has_noncharacter = g->base <= 0xFFFFF && g->base + n_tokens > 0xFFFFE;
        if (!used[block] && !has_noncharacter) return NB_OK;
    }
    return nbi_fail(
        err, NB_INVALID,
        "messages use private-use characters of every block, so control words cannot be guarded");
}

nb_status nbi_guard_init(nbi_guard *guard, const nbi_tokenizer *tokenizer, const char *request,
                         size_t n_request, const char *source, nb_error *err)
{
    memset(guard, 0, sizeof *guard);
    size_t n = nbi_added_tokens(tokenizer, &guard->tokens);
    nb_status st = choose_block(guard, (uint32_t)n, request, n_request, source, err);
    for (size_t i = 0; i < n && st == NB_OK; i++) {
        const nbi_added_token *t = &guard->tokens[i];
        if (!is_word(t)) continue;
        st = nbi_added_add(&guard->words, t->text, t->n, (int32_t)i);
        if (st == NB_OK && !is_think(t))
            st = nbi_added_add(&guard->assistant_words, t->text, t->n, (int32_t)i);
        if (st != NB_OK) (void)nbi_fail(err, st, "out of memory for control words");
    }
    guard->n_words = (uint32_t)n;
    if (st != NB_OK) nbi_guard_deinit(guard);
    return st;
}

void nbi_guard_deinit(nbi_guard *guard)
{
    nbi_added_free(&guard->words);
    nbi_added_free(&guard->assistant_words);
}

/* Appends s[0..n) with words replaced; *changed is set when there were any. */
static nb_status replace_words(const nbi_guard *g, const nbi_added_set *words, const char *s,
                               size_t n, nbi_buf *out, bool *changed)
{
    size_t done = 0, start, length;
    int32_t token;
    while ((token = nbi_added_next(words, s, n, done, &start, &length)) >= 0) {
        char bytes[4];
        *changed = true;
        NB_TRY(nbi_buf_add(out, s + done, start - done));
        NB_TRY(nbi_buf_add(out, bytes, nbi_utf8_put(bytes, g->base + (uint32_t)token)));
        done = start + length;
    }
    return nbi_buf_add(out, s + done, n - done);
}

static json_t *guard_string(const nbi_guard *g, const nbi_added_set *words, json_t *string)
{
    nbi_buf out = {0};
    bool changed = false;
    nb_status st = replace_words(g, words, json_string_value(string), json_string_length(string),
                                 &out, &changed);
    json_t *result = st != NB_OK ? NULL
                     : changed   ? json_stringn_nocheck(out.data, out.len)
                                 : json_incref(string);
    nbi_buf_free(&out);
    return result;
}

static json_t *guard_object(const nbi_guard *g, json_t *object, bool assistant)
{
    json_t *result = json_object(), *value;
    const char *key;
    size_t n;
    if (!result) return NULL;
    json_object_keylen_foreach(object, key, n, value)
    {
        nbi_buf name = {0};
        bool changed = false, keep = n == 4 && memcmp(key, "role", 4) == 0;
        nb_status st = replace_words(g, &g->words, key, n, &name, &changed);
        json_t *copy = st != NB_OK ? NULL
                       : keep      ? json_incref(value)
                                   : nbi_guard_apply(g, value, assistant);
        bool ok = copy && json_object_setn_new_nocheck(result, name.data ? name.data : "", name.len,
                                                       copy) == 0;
        nbi_buf_free(&name);
        if (!ok) {
            json_decref(result);
            return NULL;
        }
    }
    return result;
}

/* Recursion is bounded by NBI_JSON_DEPTH: the value was parsed by nbi_json_parse(). */
json_t *nbi_guard_apply(const nbi_guard *guard, json_t *value, bool assistant)
{
    if (json_is_string(value))
        return guard_string(guard, assistant ? &guard->assistant_words : &guard->words, value);
    if (json_is_object(value)) {
        const char *role = json_string_value(json_object_get(value, "role"));
        return guard_object(guard, value, assistant || (role && strcmp(role, "assistant") == 0));
    }
    if (!json_is_array(value)) return json_incref(value);
    json_t *result = json_array();
    for (size_t i = 0; result && i < json_array_size(value); i++) {
        json_t *copy = nbi_guard_apply(guard, json_array_get(value, i), assistant);
        if (!copy || json_array_append_new(result, copy) != 0) {
            json_decref(result);
            return NULL;
        }
    }
    return result;
}

static nb_status add_range(nbi_ranges *r, size_t begin, size_t end)
{
    if (r->n == r->cap) {
        size_t cap = r->cap ? r->cap * 2 : 16;
        nbi_range *data = nbi_realloc(r->data, cap * sizeof *data);
        if (!data) return NB_NO_MEMORY;
        r->data = data;
        r->cap = cap;
    }
    r->data[r->n++] = (nbi_range){begin, end};
    return NB_OK;
}

nb_status nbi_guard_undo(const nbi_guard *guard, const nbi_buf *rendered, nbi_buf *out,
                         nbi_ranges *ranges)
{
    const uint8_t *s = (const uint8_t *)rendered->data;
    size_t done = 0;
    for (size_t i = 0; i < rendered->len; i++) {
        uint32_t cp;
        if (s[i] < 0xF3 || nbi_utf8_read(&cp, s + i, rendered->len - i) != 4) continue;
        if (cp < guard->base || cp - guard->base >= guard->n_words) continue;
        const nbi_added_token *t = &guard->tokens[cp - guard->base];
        NB_TRY(nbi_buf_add(out, rendered->data + done, i - done));
        NB_TRY(add_range(ranges, out->len, out->len + t->n));
        NB_TRY(nbi_buf_add(out, t->text, t->n));
        done = i + 4;
    }
    return nbi_buf_add(out, rendered->data + done, rendered->len - done);
}
