/* Reading UTF-8 quickly, and Unicode properties. Callers: every file of text/; fuzzed by
 * tests/fuzz/fuzz_utf8.c.
 *
 * "Valid" is the definition of the Unicode standard: no surrogates, no overlong forms, nothing
 * above U+10FFFF. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_REPLACEMENT "\xEF\xBF\xBD" /* U+FFFD */

/* Reads the first character of s[0..n), n >= 1. Returns its length 1..4 and sets *cp; 0 when the
 * bytes are not the start of a valid character or the character is cut; *cp is then untouched. */
static inline size_t nbi_utf8_read(uint32_t *cp, const uint8_t *s, size_t n)
{
    uint32_t c = s[0];
    if (c < 0x80) {
        *cp = c;
        return 1;
    }
    if (c < 0xC2 || c > 0xF4 || n < 2 || (s[1] & 0xC0) != 0x80) return 0;
    if (c < 0xE0) {
        *cp = (c & 0x1F) << 6 | (s[1] & 0x3Fu);
        return 2;
    }
    if (n < 3 || (s[2] & 0xC0) != 0x80) return 0;
    if (c < 0xF0) {
        uint32_t v = (c & 0x0F) << 12 | (s[1] & 0x3Fu) << 6 | (s[2] & 0x3Fu);
        if (v < 0x800 || (v >= 0xD800 && v < 0xE000)) return 0;
        *cp = v;
        return 3;
    }
    if (n < 4 || (s[3] & 0xC0) != 0x80) return 0;
    uint32_t v = (c & 0x07) << 18 | (s[1] & 0x3Fu) << 12 | (s[2] & 0x3Fu) << 6 | (s[3] & 0x3Fu);
    if (v < 0x10000 || v > 0x10FFFF) return 0;
    *cp = v;
    return 4;
}

/* Bytes of the longest prefix of s[0..n) that is valid UTF-8 (whole characters). */
size_t nbi_utf8_valid_prefix(const uint8_t *s, size_t n);

/* For bytes that do not start with a valid character (n >= 1): how many of them one U+FFFD stands
 * for, the "maximal subpart" of the Unicode standard (what Python, Rust and browsers do), 1..3.
 * *cut is true when s[0..n) is all of it and more bytes could still complete a character. */
size_t nbi_utf8_bad_length(const uint8_t *s, size_t n, bool *cut);

/* Length of the character that ends at s + n (n >= 1, s[0..n) valid). */
static inline size_t nbi_utf8_back(const uint8_t *s, size_t n)
{
    size_t k = 1;
    while (k < n && k < 4 && (s[n - k] & 0xC0) == 0x80) k++;
    return k;
}

/* General category, a UTF8PROC_CATEGORY_* value, as of the newest of utf8proc and unicode_extra.h.
 */
int nbi_unicode_category(uint32_t cp);

/* The White_Space property (what `\s` means in the reference encoder). */
bool nbi_unicode_is_space(uint32_t cp);

/* Letters, marks, decimal digits, letter numbers and connector punctuation: a character of a word.
 */
bool nbi_unicode_is_word(uint32_t cp);

/* Classes for the hand-written scanners: a byte of flags per character, made once per process.
 * None: control, format, private and unassigned characters that are not spaces. */
#define NBI_CLASS_UPPER   0x01 /* Lu and Lt */
#define NBI_CLASS_LOWER   0x02 /* Ll */
#define NBI_CLASS_UNCASED 0x04 /* Lm and Lo */
#define NBI_CLASS_LETTER  0x07 /* any of the three */
#define NBI_CLASS_MARK    0x08
#define NBI_CLASS_NUMBER  0x10
#define NBI_CLASS_SYMBOL  0x20 /* P and S */
#define NBI_CLASS_SPACE   0x40 /* White_Space, alone or with the next */
#define NBI_CLASS_NEWLINE 0x80 /* \r and \n */

/* Makes the table; must have returned once before nbi_char_class() is used by any thread.
 * Thread-safe. */
void nbi_char_class_init(void);
extern uint8_t nbi_char_class_low[0x20000]; /* planes 0 and 1 */
uint8_t nbi_char_class_high(uint32_t cp);

static inline uint8_t nbi_char_class(uint32_t cp)
{
    return cp < 0x20000 ? nbi_char_class_low[cp] : nbi_char_class_high(cp);
}

#ifdef __cplusplus
}
#endif
