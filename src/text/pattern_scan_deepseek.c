/* Scanners for DeepSeek's three steps (V3 and later; see pattern_scan.h): numbers by threes, runs
 * of Han and kana, then words and symbols. Each leaves text unmatched, so a piece is either a match
 * or all up to the next one. */
#include <string.h>

#include "text/pattern_scan.h"

static inline size_t scan_numbers(const uint8_t *p, const uint8_t *end, size_t limit)
{
    const uint8_t *q = nbi_scan_skip(p, end, NBI_CLASS_NUMBER, limit);
    if (q == p) q = nbi_scan_skip_others(p, end, NBI_CLASS_NUMBER);
    return (size_t)(q - p);
}

size_t nbi_scan_number(const uint8_t *p, const uint8_t *end)
{
    return scan_numbers(p, end, 1);
}

size_t nbi_scan_number_triple(const uint8_t *p, const uint8_t *end)
{
    return scan_numbers(p, end, 3);
}

size_t nbi_scan_number_run(const uint8_t *p, const uint8_t *end)
{
    return scan_numbers(p, end, SIZE_MAX);
}

/* U+3040..U+30FF, U+4E00..U+9FA5: all of three bytes that start with E3 to E9. */
static inline bool is_han_kana(const uint8_t *p)
{
    if (p[0] < 0xE3 || p[0] > 0xE9) return false;
    uint32_t cp = (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    return (cp >= 0x3040 && cp <= 0x30FF) || (cp >= 0x4E00 && cp <= 0x9FA5);
}

size_t nbi_scan_deepseek_han_kana(const uint8_t *p, const uint8_t *end)
{
    const uint8_t *q = p;
    while (q < end && is_han_kana(q)) q += 3;
    if (q > p) return (size_t)(q - p);
    while (q < end && !is_han_kana(q)) {
        uint64_t w;
        while (end - q >= 8 && (memcpy(&w, q, 8), (w & 0x8080808080808080ull) == 0)) q += 8;
        if (q < end && !is_han_kana(q)) q++; /* a byte inside of a character is no E3 to E9 */
    }
    return (size_t)(q - p);
}

static inline bool is_ascii_letter(uint8_t c)
{
    return (uint8_t)((c | 0x20) - 'a') < 26;
}

/* At a character that starts no match: up to the next that does. One such character in front of a
 * word belongs to it. */
static size_t scan_gap(const uint8_t *p, const uint8_t *end)
{
    const uint8_t *q = p, *last = p;
    size_t len;
    uint8_t class = 0;
    for (; q < end; q += len) {
        class = nbi_scan_peek(q, &len);
        if (class & (NBI_CLASS_LETTER | NBI_CLASS_MARK | NBI_CLASS_SYMBOL | NBI_CLASS_SPACE)) break;
        last = q;
    }
    if (q < end && (class & (NBI_CLASS_LETTER | NBI_CLASS_MARK))) q = last;
    return (size_t)(q - p);
}

size_t nbi_scan_deepseek_words(const uint8_t *p, const uint8_t *end)
{
    const uint8_t word = NBI_CLASS_LETTER | NBI_CLASS_MARK;
    size_t len, next;
    uint8_t class = nbi_scan_peek(p, &len), follows = 0;
    const uint8_t *q = p + len;
    if (class & word) return (size_t)(nbi_scan_skip(q, end, word, SIZE_MAX) - p);
    if (len == 1 && (class & NBI_CLASS_SYMBOL) && q < end && is_ascii_letter(*q)) {
        do q++;
        while (q < end && is_ascii_letter(*q));
        return (size_t)(q - p);
    }
    if (q < end) follows = nbi_scan_peek(q, &next);
    if (!(class & (NBI_CLASS_SYMBOL | NBI_CLASS_NEWLINE)) && (follows & word))
        return (size_t)(nbi_scan_skip(q + next, end, word, SIZE_MAX) - p);
    if ((class & NBI_CLASS_SYMBOL) || (p[0] == ' ' && (follows & NBI_CLASS_SYMBOL))) {
        q = nbi_scan_skip(q, end, NBI_CLASS_SYMBOL, SIZE_MAX);
        while (q < end && (*q == '\r' || *q == '\n')) q++;
        return (size_t)(q - p);
    }
    return class & NBI_CLASS_SPACE ? nbi_scan_spaces(p, end, true) : scan_gap(p, end);
}
