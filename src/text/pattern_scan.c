/* Hand-written scanners for the pre-tokenizer patterns that nearly all public models use (see
 * pattern.h).
 *
 * PCRE2's JIT needs a call per piece and property look-ups per character; these need a table
 * look-up per character. They are chosen only when the file's pattern is one of the texts below,
 * letter for letter, and tests hold them equal to PCRE2 on random text. The order of alternatives
 * in the patterns is the order of the ifs. */
#include <string.h>

#include "text/pattern.h"
#include "text/unicode.h"

/* Class of the character at p and its length. Text is valid, so only the lead byte is looked at. */
static inline uint8_t peek(const uint8_t *p, size_t *len)
{
    uint32_t c = p[0];
    if (c < 0x80) {
        *len = 1;
        return nbi_char_class_low[c];
    }
    if (c < 0xE0) {
        *len = 2;
        return nbi_char_class_low[(c & 0x1F) << 6 | (p[1] & 0x3Fu)];
    }
    if (c < 0xF0) {
        *len = 3;
        return nbi_char_class_low[(c & 0x0F) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu)];
    }
    *len = 4;
    return nbi_char_class((c & 0x07) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 |
                          (p[3] & 0x3Fu));
}

/* Skips characters of one class (0: neither letter, number nor space), at most `limit` of them. */
static inline const uint8_t *skip(const uint8_t *p, const uint8_t *end, uint8_t class, size_t limit)
{
    size_t len;
    while (p < end && limit-- > 0 && peek(p, &len) == class) p += len;
    return p;
}

/* `\s+(?!\S)|\s+` at a space, after `\s*[\r\n]+` when `newlines`. */
static size_t scan_spaces(const uint8_t *p, const uint8_t *end, bool newlines)
{
    const uint8_t *q = p, *last = p, *after_newline = NULL;
    size_t len;
    for (uint8_t class; q < end && (class = peek(q, &len)) & NBI_CLASS_SPACE;) {
        last = q;
        q += len;
        if (class & NBI_CLASS_NEWLINE) after_newline = q;
    }
    if (newlines && after_newline) return (size_t)(after_newline - p);
    if (q == end || last == p) return (size_t)(q - p);
    return (size_t)(last - p); /* the last space belongs to what follows */
}

/* Length of `'s|'t|'re|'ve|'m|'ll|'d` at p[0] == '\'', else 0. `fold`: any case, with U+017F as
 * another s. */
static size_t scan_contraction(const uint8_t *p, const uint8_t *end, bool fold)
{
    size_t n = (size_t)(end - p);
    if (n < 2) return 0;
    uint8_t a = p[1], b = n > 2 ? p[2] : 0;
    if (fold && a == 0xC5 && b == 0xBF) return 3;
    if (fold) {
        a |= a >= 'A' && a <= 'Z' ? 0x20 : 0;
        b |= b >= 'A' && b <= 'Z' ? 0x20 : 0;
    }
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
    return 0;
}

/* The cl100k family with at most `digits` numbers per piece. */
static inline size_t scan_cl100k_family(const uint8_t *p, const uint8_t *end, size_t digits)
{
    size_t len, next;
    uint8_t class = peek(p, &len);
    if (p[0] == '\'' && (next = scan_contraction(p, end, true)) != 0) return next;
    if (class == NBI_CLASS_LETTER)
        return (size_t)(skip(p + len, end, NBI_CLASS_LETTER, SIZE_MAX) - p);
    if (class == NBI_CLASS_NUMBER)
        return (size_t)(skip(p + len, end, NBI_CLASS_NUMBER, digits - 1) - p);
    const uint8_t *q = p + len;
    if (!(class & NBI_CLASS_NEWLINE) && q < end && peek(q, &next) == NBI_CLASS_LETTER)
        return (size_t)(skip(q + next, end, NBI_CLASS_LETTER, SIZE_MAX) - p);
    if (class == 0 || (p[0] == ' ' && q < end && peek(q, &next) == 0)) {
        q = skip(q, end, 0, SIZE_MAX);
        while (q < end && (*q == '\r' || *q == '\n')) q++;
        return (size_t)(q - p);
    }
    return scan_spaces(p, end, true);
}

static size_t scan_cl100k(const uint8_t *p, const uint8_t *end)
{
    return scan_cl100k_family(p, end, 3);
}

static size_t scan_qwen2(const uint8_t *p, const uint8_t *end)
{
    return scan_cl100k_family(p, end, 1);
}

static size_t scan_gpt2(const uint8_t *p, const uint8_t *end)
{
    size_t len, next;
    if (p[0] == '\'' && (next = scan_contraction(p, end, false)) != 0) return next;
    uint8_t class = peek(p, &len);
    const uint8_t *q = p + len;
    if (p[0] == ' ' && q < end && !((class = peek(q, &next)) & NBI_CLASS_SPACE)) q += next;
    if (class & NBI_CLASS_SPACE) return scan_spaces(p, end, false);
    return (size_t)(skip(q, end, class, SIZE_MAX) - p);
}

static const struct {
    const char *name, *regex;
    nbi_scan scan;
} known[] = {
    {"cl100k (GLM-4, GLM-5, Llama 3)",
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
     "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
     "|\\s+(?!\\S)|\\s+",
     scan_cl100k},
    {"Qwen2, Qwen3",
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
     "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
     "|\\s+(?!\\S)|\\s+",
     scan_qwen2},
    {"cl100k, as first published",
     "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}| "
     "?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]"
     "|\\s+(?!\\S)|\\s+",
     scan_cl100k},
    {"GPT-2", "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     scan_gpt2},
    {"GPT-2, as first published",
     "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     scan_gpt2},
};

bool nbi_scan_known(uint32_t index, const char **name, const char **regex, nbi_scan *scan)
{
    if (index >= sizeof known / sizeof *known) return false;
    *name = known[index].name;
    *regex = known[index].regex;
    *scan = known[index].scan;
    return true;
}

nbi_scan nbi_scan_lookup(const char *regex, size_t n)
{
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strlen(known[i].regex) == n && memcmp(known[i].regex, regex, n) == 0) {
            nbi_char_class_init();
            return known[i].scan;
        }
    return NULL;
}
