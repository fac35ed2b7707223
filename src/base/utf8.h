/* UTF-8, strictly as Unicode 15 table 3-7 has it: no overlong forms, no surrogates, at most
 * U+10FFFF. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_UTF8_BAD 0xffffffffu

/* Reads the character at s, 1 <= n bytes available. Returns the bytes taken (at least 1). Where
 * they are not valid, *code is NBI_UTF8_BAD and the bytes taken are the longest part that could
 * have started a character (what Python and browsers replace by one U+FFFD). */
size_t nbi_utf8_next(const char *s, size_t n, uint32_t *code);

/* Writes a valid code point; returns 1 to 4 bytes. */
size_t nbi_utf8_put(char out[4], uint32_t code);

/* The largest m <= n so that s[0, m) does not end inside a character that s[0, n) has begun. */
size_t nbi_utf8_cut(const char *s, size_t n);

/* The code unit that four hexadecimal digits name, as behind JSON's \u; -1 where one is none. */
int32_t nbi_hex4(const char s[4]);

#ifdef __cplusplus
}
#endif
