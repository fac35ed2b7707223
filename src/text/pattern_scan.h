/* What the hand-written scanners share. Callers: pattern_scan*.c only; see pattern.h for their use.
 */
#pragma once

#include "text/pattern.h"
#include "text/unicode.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Class of the character at p and its length. Text is valid, so only the lead byte is looked at. */
static inline uint8_t nbi_scan_peek(const uint8_t *p, size_t *len)
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

/* Behind the characters of the classes `any`, at most `limit` of them. */
static inline const uint8_t *nbi_scan_skip(const uint8_t *p, const uint8_t *end, uint8_t any,
                                           size_t limit)
{
    size_t len;
    while (p < end && limit-- > 0 && (nbi_scan_peek(p, &len) & any)) p += len;
    return p;
}

/* Behind the characters that are in none of the classes. */
static inline const uint8_t *nbi_scan_skip_others(const uint8_t *p, const uint8_t *end,
                                                  uint8_t none)
{
    size_t len;
    while (p < end && !(nbi_scan_peek(p, &len) & none)) p += len;
    return p;
}

/* `\s+(?!\S)|\s+` at a space, after `\s*[\r\n]+` when `newlines`. */
size_t nbi_scan_spaces(const uint8_t *p, const uint8_t *end, bool newlines);

/* Length of `'s|'t|'re|'ve|'m|'ll|'d` at p[0] == '\'', else 0. `fold`: any case, with U+017F as
 * another s. */
size_t nbi_scan_contraction(const uint8_t *p, const uint8_t *end, bool fold);

/* The scanners of the other files; their patterns are in the table of pattern_scan.c. */
size_t nbi_scan_number_triple(const uint8_t *p, const uint8_t *end);
size_t nbi_scan_deepseek_han_kana(const uint8_t *p, const uint8_t *end);
size_t nbi_scan_deepseek_words(const uint8_t *p, const uint8_t *end);
size_t nbi_scan_o200k(const uint8_t *p, const uint8_t *end);
size_t nbi_scan_tekken(const uint8_t *p, const uint8_t *end);

#ifdef __cplusplus
}
#endif
