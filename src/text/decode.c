/* Incremental decoding and stop strings (see decode.h). */
#include "text/decode.h"

#include <string.h>

#include "base/mem.h"
#include "text/stop_regex.h"
#include "text/unicode.h"

#define STOP_BYTES_MAX 65536

static size_t put_replacement(char *out)
{
    memcpy(out, NBI_REPLACEMENT, 3);
    return 3;
}

/* Decodes s[0..n) to out as far as it is certain; *used is less than n only when the rest is the
 * beginning of a character. */
static size_t decode_some(const uint8_t *s, size_t n, size_t *used, char *out)
{
    size_t i = 0, len = 0;
    while (i < n) {
        size_t good = nbi_utf8_valid_prefix(s + i, n - i);
        memcpy(out + len, s + i, good);
        len += good;
        i += good;
        if (i == n) break;
        bool cut;
        size_t bad = nbi_utf8_bad_length(s + i, n - i, &cut);
        if (cut) break;
        len += put_replacement(out + len);
        i += bad;
    }
    *used = i;
    return len;
}

size_t nbi_decoder_push(nbi_decoder *decoder, const char *bytes, size_t n, char *out)
{
    const uint8_t *s = (const uint8_t *)bytes;
    size_t len = 0, used, k = 0;
    /* The held beginning together with up to three more bytes: enough to finish it, one way or the
     * other. */
    if (decoder->n_held && n) {
        uint8_t joined[8];
        size_t held = decoder->n_held;
        memcpy(joined, decoder->held, held);
        k = n < 3 ? n : 3;
        memcpy(joined + held, s, k);
        bool cut;
        uint32_t cp;
        size_t one = nbi_utf8_read(&cp, joined, held + k);
        if (one) {
            memcpy(out, joined, one);
            len = one;
        } else {
            one = nbi_utf8_bad_length(joined, held + k, &cut);
            if (cut) { /* then all of n was taken: a beginning has at most three bytes */
                memcpy(decoder->held, joined, one);
                decoder->n_held = (uint8_t)one;
                return 0;
            }
            len = put_replacement(out);
        }
        decoder->n_held = 0;
        k = one - held; /* one >= held, since the held bytes were a good beginning */
    }
    len += decode_some(s + k, n - k, &used, out + len);
    size_t rest = n - k - used;
    if (rest) memcpy(decoder->held, s + k + used, rest);
    if (rest) decoder->n_held = (uint8_t)rest;
    return len;
}

size_t nbi_decoder_flush(nbi_decoder *decoder, char *out)
{
    bool any = decoder->n_held != 0;
    decoder->n_held = 0;
    return any ? put_replacement(out) : 0;
}

/* ---------------------------------------------------------------- stop strings */

/* One Knuth-Morris-Pratt automaton per string. The text held back is always the beginning of the
 * string with the longest state, so it needs no storage of its own. */
typedef struct stop_string {
    const uint8_t *bytes;
    uint32_t *fail; /* [n] length of the longest border of bytes[0..i] */
    uint32_t n, state;
} stop_string;

struct nbi_stop {
    stop_string strings[NB_STOP_STRINGS_MAX];
    size_t n, longest;
    bool done;
    nbi_stop_regex *regex; /* NULL: none */
    char *held;            /* with regex: [n_held] of nbi_stop_room(stop, 0) */
    size_t n_held;
    nbi_arena arena;
};

static void make_failure(stop_string *s)
{
    uint32_t k = 0;
    s->fail[0] = 0;
    for (uint32_t i = 1; i < s->n; i++) {
        while (k && s->bytes[i] != s->bytes[k]) k = s->fail[k - 1];
        if (s->bytes[i] == s->bytes[k]) k++;
        s->fail[i] = k;
    }
}

nb_status nbi_stop_create(nbi_stop **out, const char *const *strings, size_t n, nb_error *err)
{
    if (n > NB_STOP_STRINGS_MAX)
        return nbi_fail(err, NB_INVALID, "%zu stop strings, at most %d are allowed", n,
                        NB_STOP_STRINGS_MAX);
    nbi_stop *stop = nbi_calloc(1, sizeof *stop);
    if (!stop) return nbi_fail(err, NB_NO_MEMORY, "out of memory for stop strings");
    size_t total = 0;
    nb_status st = NB_OK;
    for (size_t i = 0; i < n && st == NB_OK; i++) {
        stop_string *s = &stop->strings[i];
        size_t len = strlen(strings[i]);
        total += len;
        if (len == 0)
            st = nbi_fail(err, NB_INVALID, "stop string %zu is empty", i);
        else if (total > STOP_BYTES_MAX)
            st = nbi_fail(err, NB_INVALID, "the stop strings have more than %d bytes",
                          STOP_BYTES_MAX);
        else if (!(s->bytes = (const uint8_t *)nbi_arena_strndup(&stop->arena, strings[i], len)) ||
                 !(s->fail = nbi_arena_alloc(&stop->arena, len * sizeof *s->fail)))
            st = nbi_fail(err, NB_NO_MEMORY, "out of memory for stop strings");
        if (st != NB_OK) break;
        s->n = (uint32_t)len;
        make_failure(s);
        if (len > stop->longest) stop->longest = len;
    }
    stop->n = n;
    if (st == NB_OK)
        *out = stop;
    else
        nbi_stop_destroy(&stop);
    return st;
}

void nbi_stop_destroy(nbi_stop **stop)
{
    if (!*stop) return;
    nbi_stop_regex_destroy(&(*stop)->regex);
    nbi_arena_free(&(*stop)->arena);
    nbi_free(*stop);
    *stop = NULL;
}

nb_status nbi_stop_add_regex(nbi_stop *stop, const char *const *patterns, size_t n, nb_error *err)
{
    if (!n) return NB_OK;
    NB_TRY(nbi_stop_regex_create(&stop->regex, patterns, n, err));
    stop->held = nbi_arena_alloc(&stop->arena, nbi_stop_room(stop, 0));
    return stop->held ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "out of memory for stop_regex");
}

size_t nbi_stop_room(const nbi_stop *stop, size_t n)
{
    return n + stop->longest + (stop->regex ? NBI_STOP_REGEX_BYTES : 0);
}

/* The string whose beginning is held, NULL for none. */
static const stop_string *held_string(const nbi_stop *stop)
{
    const stop_string *best = NULL;
    for (size_t i = 0; i < stop->n; i++)
        if (stop->strings[i].state > (best ? best->state : 0)) best = &stop->strings[i];
    return best;
}

/* Advances all automata by one byte; index of the longest string that ends here, or -1. */
static int step(nbi_stop *stop, uint8_t byte)
{
    int matched = -1;
    for (size_t i = 0; i < stop->n; i++) {
        stop_string *s = &stop->strings[i];
        while (s->state && s->bytes[s->state] != byte) s->state = s->fail[s->state - 1];
        if (s->bytes[s->state] == byte) s->state++;
        if (s->state == s->n && (matched < 0 || s->n > stop->strings[matched].n)) matched = (int)i;
    }
    return matched;
}

/* The first `want` bytes of held text followed by new text. */
static size_t put_joined(const uint8_t *held, size_t n_held, const char *text, size_t want,
                         char *out)
{
    size_t from_held = want < n_held ? want : n_held;
    if (from_held) memcpy(out, held, from_held);
    if (want > from_held) memcpy(out + from_held, text, want - from_held);
    return want;
}

static size_t character_length(uint8_t lead)
{
    return lead < 0xc0 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

/* As nbi_stop_push(). The text held back and what is new are put together in `out`. */
static size_t push_both(nbi_stop *stop, const char *text, size_t n, bool include, char *out,
                        int *matched)
{
    size_t len = stop->n_held, length;
    memcpy(out, stop->held, len);
    for (size_t i = 0; i < n;) {
        size_t n_char = character_length((uint8_t)text[i]);
        if (n_char > n - i) n_char = n - i;
        for (size_t k = 0; k < n_char && *matched < 0; k++) {
            *matched = step(stop, (uint8_t)text[i + k]);
            out[len++] = text[i + k];
        }
        if (*matched >= 0) {
            length = stop->strings[*matched].n;
        } else {
            int found = nbi_stop_regex_push(stop->regex, text + i, n_char, &length);
            if (found >= 0) *matched = (int)stop->n + found;
        }
        stop->done = *matched >= 0;
        if (stop->done) return include ? len : len - length;
        i += n_char;
    }
    const stop_string *string = held_string(stop);
    stop->n_held = nbi_stop_regex_held(stop->regex);
    if (string && string->state > stop->n_held) stop->n_held = string->state;
    memcpy(stop->held, out + len - stop->n_held, stop->n_held);
    return len - stop->n_held;
}

size_t nbi_stop_push(nbi_stop *stop, const char *text, size_t n, bool include, char *out,
                     int *matched)
{
    *matched = -1;
    if (stop->done) return 0;
    if (stop->regex) return push_both(stop, text, n, include, out, matched);
    const stop_string *before = held_string(stop);
    const uint8_t *held = before ? before->bytes : NULL;
    size_t n_held = before ? before->state : 0;
    for (size_t i = 0; i < n; i++) {
        *matched = step(stop, (uint8_t)text[i]);
        if (*matched < 0) continue;
        stop->done = true;
        size_t end = n_held + i + 1;
        return put_joined(held, n_held, text, include ? end : end - stop->strings[*matched].n, out);
    }
    const stop_string *after = held_string(stop);
    return put_joined(held, n_held, text, n_held + n - (after ? after->state : 0), out);
}

size_t nbi_stop_flush(nbi_stop *stop, char *out)
{
    if (stop->regex) {
        size_t n_held = stop->done ? 0 : stop->n_held;
        memcpy(out, stop->held, n_held);
        stop->n_held = 0;
        return n_held;
    }
    const stop_string *held = stop->done ? NULL : held_string(stop);
    size_t n = held ? held->state : 0;
    if (n) memcpy(out, held->bytes, n);
    for (size_t i = 0; i < stop->n; i++) stop->strings[i].state = 0;
    return n;
}
