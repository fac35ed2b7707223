/* Log-probabilities as JSON. Called by job.c.
 *
 * Names of tokens: chat shows the text with U+FFFD for bytes that are not characters, beside the
 * bytes themselves. The older shape has no bytes, and its top_logprobs are keyed by name, so there
 * such a token is called "bytes:\xf0\x9f". */
#include "server/logprobs.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"

#define NAME_MAX_BYTES 4096

typedef struct token_name {
    char scratch[NAME_MAX_BYTES];
    const char *text;
    size_t n;
    bool by_id;
} token_name;

static bool is_utf8(const char *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        uint32_t code;
        i += nbi_utf8_next(s + i, n - i, &code);
        if (code == NBI_UTF8_BAD) return false;
    }
    return true;
}

/* The name in the older shape. */
static void name_of(token_name *name, const nb_engine *engine, int32_t id, bool by_id)
{
    size_t n = 0;
    const char *bytes = by_id ? NULL : nb_token_bytes(engine, id, &n);
    name->by_id = by_id;
    if (bytes && is_utf8(bytes, n)) {
        name->text = bytes;
        name->n = n;
        return;
    }
    name->text = name->scratch;
    if (!bytes) {
        name->n = (size_t)snprintf(name->scratch, sizeof name->scratch, "token_id:%d", id);
        return;
    }
    size_t at = (size_t)snprintf(name->scratch, sizeof name->scratch, "bytes:");
    for (size_t i = 0; i < n && at + 5 < sizeof name->scratch; i++) {
        at += (size_t)snprintf(name->scratch + at, sizeof name->scratch - at, "\\x%02x",
                               (unsigned char)bytes[i]);
    }
    name->n = at;
}

size_t nbi_token_chars(const nb_engine *engine, int32_t id)
{
    size_t n = 0, chars = 0;
    const char *bytes = nb_token_bytes(engine, id, &n);
    for (size_t i = 0; bytes && i < n; i++) chars += ((unsigned char)bytes[i] & 0xc0) != 0x80;
    return chars;
}

/* Finite whatever comes, so that it is JSON. */
static nb_status add_number(nbi_buf *out, float value)
{
    if (!(value > -9999.0f)) value = -9999.0f; /* also NaN */
    if (value > 0) value = 0;
    return nbi_buf_addf(out, "%.7g", (double)value);
}

static nb_status add_comma(nbi_buf *out, uint32_t n)
{
    return n ? nbi_buf_add(out, ",", 1) : NB_OK;
}

/* ---------------------------------------------------------------- chat */

/* {"token":..,"logprob":..,"bytes":[..] without the closing brace. */
static nb_status chat_token(nbi_buf *out, const nb_engine *engine, int32_t id, float logprob,
                            bool by_id)
{
    size_t n = 0;
    const char *bytes = nb_token_bytes(engine, id, &n);
    NB_TRY(nbi_buf_add(out, "{\"token\":", 9));
    if (bytes && !by_id) {
        NB_TRY(nbi_json_quote(out, bytes, n));
    } else {
        NB_TRY(nbi_buf_addf(out, "\"token_id:%d\"", id));
    }
    NB_TRY(nbi_buf_add(out, ",\"logprob\":", 11));
    NB_TRY(add_number(out, logprob));
    if (!bytes) return nbi_buf_add(out, ",\"bytes\":null", 13);
    NB_TRY(nbi_buf_add(out, ",\"bytes\":[", 10));
    for (size_t i = 0; i < n; i++) {
        NB_TRY(nbi_buf_addf(out, i ? ",%u" : "%u", (unsigned)(unsigned char)bytes[i]));
    }
    return nbi_buf_add(out, "]", 1);
}

static nb_status chat_add(nbi_logprobs *lp, const nb_engine *engine, const nb_event *event)
{
    nbi_buf *out = &lp->tokens;
    NB_TRY(add_comma(out, lp->n));
    NB_TRY(chat_token(out, engine, event->id, event->logprob, lp->by_id));
    NB_TRY(nbi_buf_add(out, ",\"top_logprobs\":[", 17));
    for (uint32_t i = 0; i < event->n_top; i++) {
        NB_TRY(add_comma(out, i));
        NB_TRY(chat_token(out, engine, event->top[i].id, event->top[i].logprob, lp->by_id));
        NB_TRY(nbi_buf_add(out, "}", 1));
    }
    return nbi_buf_add(out, "]}", 2);
}

/* ---------------------------------------------------------------- completions */

/* Two ids may have one name; the object keeps the likelier, which comes first. */
static bool named_before(const token_name *name, const nb_engine *engine, const nb_event *event,
                         uint32_t before)
{
    token_name other;
    for (uint32_t i = 0; i < before; i++) {
        name_of(&other, engine, event->top[i].id, name->by_id);
        if (other.n == name->n && memcmp(other.text, name->text, name->n) == 0) return true;
    }
    return false;
}

static nb_status add_top(nbi_buf *out, uint32_t n, const token_name *name, float logprob)
{
    NB_TRY(add_comma(out, n));
    NB_TRY(nbi_json_quote(out, name->text, name->n));
    NB_TRY(nbi_buf_add(out, ":", 1));
    return add_number(out, logprob);
}

/* The k best, and the chosen token when it is not among them. */
static nb_status completions_tops(nbi_buf *out, const nb_engine *engine, const nb_event *event,
                                  const token_name *chosen)
{
    uint32_t n = 0;
    NB_TRY(nbi_buf_add(out, "{", 1));
    for (uint32_t i = 0; i < event->n_top; i++) {
        token_name name;
        name_of(&name, engine, event->top[i].id, chosen->by_id);
        if (named_before(&name, engine, event, i)) continue;
        NB_TRY(add_top(out, n++, &name, event->top[i].logprob));
    }
    if (!named_before(chosen, engine, event, event->n_top)) {
        NB_TRY(add_top(out, n, chosen, event->logprob));
    }
    return nbi_buf_add(out, "}", 1);
}

static nb_status completions_add(nbi_logprobs *lp, const nb_engine *engine, const nb_event *event,
                                 size_t offset)
{
    token_name name;
    name_of(&name, engine, event->id, lp->by_id);
    NB_TRY(add_comma(&lp->tokens, lp->n));
    NB_TRY(nbi_json_quote(&lp->tokens, name.text, name.n));
    NB_TRY(nbi_buf_addf(&lp->offsets, lp->n ? ",%zu" : "%zu", offset));
    NB_TRY(add_comma(&lp->values, lp->n));
    NB_TRY(add_comma(&lp->tops, lp->n));
    if (!event->has_logprob) {
        NB_TRY(nbi_buf_add(&lp->values, "null", 4));
        return nbi_buf_add(&lp->tops, "null", 4);
    }
    NB_TRY(add_number(&lp->values, event->logprob));
    return completions_tops(&lp->tops, engine, event, &name);
}

/* ---------------------------------------------------------------- prompts (vLLM) */

nb_status nbi_token_write_name(nbi_buf *out, const nb_engine *engine, int32_t id)
{
    token_name name;
    name_of(&name, engine, id, false);
    return nbi_json_quote(out, name.text, name.n);
}

/* "7":{"logprob":..,"rank":..,"decoded_token":..}; rank 0: not known. */
static nb_status prompt_entry(nbi_buf *out, const nb_engine *engine, int32_t id, float logprob,
                              uint32_t rank)
{
    NB_TRY(nbi_buf_addf(out, "\"%d\":{\"logprob\":", id));
    NB_TRY(add_number(out, logprob));
    NB_TRY(rank ? nbi_buf_addf(out, ",\"rank\":%u", rank) : nbi_buf_addf(out, ",\"rank\":null"));
    NB_TRY(nbi_buf_addf(out, ",\"decoded_token\":"));
    NB_TRY(nbi_token_write_name(out, engine, id));
    return nbi_buf_add(out, "}", 1);
}

/* The token of the prompt, then the best that are not it. */
static nb_status prompt_add(nbi_logprobs *lp, const nb_engine *engine, const nb_event *event)
{
    nbi_buf *out = &lp->tokens;
    uint32_t rank = 0;
    NB_TRY(add_comma(out, lp->n));
    if (!event->has_logprob) return nbi_buf_add(out, "null", 4);
    for (uint32_t i = 0; i < event->n_top; i++) {
        if (event->top[i].id == event->id) rank = i + 1;
    }
    NB_TRY(nbi_buf_add(out, "{", 1));
    NB_TRY(prompt_entry(out, engine, event->id, event->logprob, rank));
    for (uint32_t i = 0; i < event->n_top; i++) {
        if (i + 1 == rank) continue;
        NB_TRY(nbi_buf_add(out, ",", 1));
        NB_TRY(prompt_entry(out, engine, event->top[i].id, event->top[i].logprob, i + 1));
    }
    return nbi_buf_add(out, "}", 1);
}

/* ---------------------------------------------------------------- native (SGLang) */

static nb_status native_entry(nbi_buf *out, const nb_engine *engine, int32_t id, bool has_logprob,
                              float logprob, bool with_text)
{
    NB_TRY(nbi_buf_add(out, "[", 1));
    NB_TRY(has_logprob ? add_number(out, logprob) : nbi_buf_add(out, "null", 4));
    NB_TRY(nbi_buf_addf(out, ",%d,", id));
    NB_TRY(with_text ? nbi_token_write_name(out, engine, id) : nbi_buf_add(out, "null", 4));
    return nbi_buf_add(out, "]", 1);
}

static nb_status native_add(nbi_logprobs *lp, const nb_engine *engine, const nb_event *event)
{
    bool has = event->has_logprob;
    NB_TRY(add_comma(&lp->tokens, lp->n));
    NB_TRY(add_comma(&lp->tops, lp->n));
    NB_TRY(native_entry(&lp->tokens, engine, event->id, has, event->logprob, lp->with_text));
    if (!event->n_top) return nbi_buf_add(&lp->tops, "null", 4);
    for (uint32_t i = 0; i < event->n_top; i++) {
        NB_TRY(nbi_buf_add(&lp->tops, i ? "," : "[", 1));
        NB_TRY(native_entry(&lp->tops, engine, event->top[i].id, true, event->top[i].logprob,
                            lp->with_text));
    }
    return nbi_buf_add(&lp->tops, "]", 1);
}

/* ---------------------------------------------------------------- all */

static nb_status add_shape(nbi_logprobs *lp, nbi_logprob_shape shape, const nb_engine *engine,
                           const nb_event *event, size_t offset)
{
    switch (shape) {
    case NBI_LOGPROBS_CHAT: return chat_add(lp, engine, event);
    case NBI_LOGPROBS_COMPLETIONS: return completions_add(lp, engine, event, offset);
    case NBI_LOGPROBS_PROMPT: return prompt_add(lp, engine, event);
    case NBI_LOGPROBS_NATIVE: return native_add(lp, engine, event);
    }
    return NB_INTERNAL;
}

nb_status nbi_logprobs_add(nbi_logprobs *lp, nbi_logprob_shape shape, const nb_engine *engine,
                           const nb_event *event, uint32_t n_top, size_t offset)
{
    nb_event cut;
    if (event->n_top > n_top) { /* others asked for more */
        cut = *event;
        cut.n_top = n_top;
        event = &cut;
    }
    NB_TRY(add_shape(lp, shape, engine, event, offset));
    lp->n++;
    return NB_OK;
}

static nb_status write_array(nbi_buf *out, const char *key, const nbi_buf *items)
{
    NB_TRY(nbi_buf_add(out, key, strlen(key)));
    NB_TRY(nbi_buf_add(out, items->data, items->len));
    return nbi_buf_add(out, "]", 1);
}

nb_status nbi_logprobs_write(nbi_logprobs *lp, nbi_logprob_shape shape, nbi_buf *out)
{
    if (shape == NBI_LOGPROBS_CHAT) {
        NB_TRY(write_array(out, "{\"content\":[", &lp->tokens));
        NB_TRY(nbi_buf_add(out, ",\"refusal\":null}", 16));
    } else if (shape == NBI_LOGPROBS_PROMPT) {
        NB_TRY(write_array(out, "[", &lp->tokens));
    } else {
        NB_TRY(write_array(out, "{\"tokens\":[", &lp->tokens));
        NB_TRY(write_array(out, ",\"token_logprobs\":[", &lp->values));
        NB_TRY(write_array(out, ",\"top_logprobs\":[", &lp->tops));
        NB_TRY(write_array(out, ",\"text_offset\":[", &lp->offsets));
        NB_TRY(nbi_buf_add(out, "}", 1));
    }
    nbi_logprobs_clear(lp);
    return NB_OK;
}

void nbi_logprobs_clear(nbi_logprobs *lp)
{
    lp->n = 0;
    nbi_buf_clear(&lp->tokens);
    nbi_buf_clear(&lp->values);
    nbi_buf_clear(&lp->tops);
    nbi_buf_clear(&lp->offsets);
}

void nbi_logprobs_free(nbi_logprobs *lp)
{
    nbi_buf_free(&lp->tokens);
    nbi_buf_free(&lp->values);
    nbi_buf_free(&lp->tops);
    nbi_buf_free(&lp->offsets);
    lp->n = 0;
}
