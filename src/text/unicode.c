/* UTF-8 validation and Unicode properties (see unicode.h). */
#include "text/unicode.h"

#include <pthread.h>
#include <string.h>
#include <utf8proc.h>

#include "text/unicode_extra.h"

size_t nbi_utf8_valid_prefix(const uint8_t *s, size_t n)
{
    size_t i = 0;
    while (i < n) {
        uint64_t w;
        while (n - i >= 8 && (memcpy(&w, s + i, 8), (w & 0x8080808080808080ull) == 0)) i += 8;
        if (i == n) break;
        uint32_t cp;
        size_t k = nbi_utf8_read(&cp, s + i, n - i);
        if (k == 0) break;
        i += k;
    }
    return i;
}

size_t nbi_utf8_bad_length(const uint8_t *s, size_t n, bool *cut)
{
    *cut = false;
    uint8_t c = s[0];
    if (c < 0xC2 || c > 0xF4) return 1;
    size_t need = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    /* The second byte has a narrower range after some first bytes. */
    uint8_t low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
    uint8_t high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    size_t k = 1;
    if (k < n && s[k] >= low && s[k] <= high) {
        k++;
        while (k < need - 1 && k < n && (s[k] & 0xC0) == 0x80) k++;
    }
    *cut = k == n && k < need;
    return k;
}

typedef struct extra_range {
    uint32_t first, last;
    int category;
} extra_range;

static const extra_range extra[] = {
#define X(first, last, category) {first, last, UTF8PROC_CATEGORY_##category},
    NBI_UNICODE_EXTRA(X)
#undef X
};

int nbi_unicode_category(uint32_t cp)
{
    int category = utf8proc_category((utf8proc_int32_t)cp);
    if (category != UTF8PROC_CATEGORY_CN) return category;
    for (size_t i = 0; i < sizeof extra / sizeof *extra; i++)
        if (cp >= extra[i].first && cp <= extra[i].last) return extra[i].category;
    return category;
}

bool nbi_unicode_is_space(uint32_t cp)
{
    if (cp < 0x80) return cp == ' ' || (cp >= 9 && cp <= 13);
    return cp == 0x85 || cp == 0xA0 || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200A) ||
           cp == 0x2028 || cp == 0x2029 || cp == 0x202F || cp == 0x205F || cp == 0x3000;
}

bool nbi_unicode_is_word(uint32_t cp)
{
    switch (nbi_unicode_category(cp)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: return false;
    }
}

uint8_t nbi_char_class_low[0x20000];
static pthread_once_t class_once = PTHREAD_ONCE_INIT;

static uint8_t class_of(uint32_t cp, int category)
{
    if (nbi_unicode_is_space(cp))
        return cp == '\r' || cp == '\n' ? NBI_CLASS_SPACE | NBI_CLASS_NEWLINE : NBI_CLASS_SPACE;
    switch (category) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LT: return NBI_CLASS_UPPER;
    case UTF8PROC_CATEGORY_LL: return NBI_CLASS_LOWER;
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO: return NBI_CLASS_UNCASED;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME: return NBI_CLASS_MARK;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO: return NBI_CLASS_NUMBER;
    default:
        return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_SO
                   ? NBI_CLASS_SYMBOL
                   : 0;
    }
}

static void class_fill(void)
{
    for (uint32_t cp = 0; cp < 0x20000; cp++)
        nbi_char_class_low[cp] = class_of(cp, utf8proc_category((int32_t)cp));
    for (size_t i = 0; i < sizeof extra / sizeof *extra; i++)
        for (uint32_t cp = extra[i].first; cp <= extra[i].last && cp < 0x20000; cp++)
            nbi_char_class_low[cp] = class_of(cp, extra[i].category);
}

void nbi_char_class_init(void)
{
    (void)pthread_once(&class_once, class_fill);
}

uint8_t nbi_char_class_high(uint32_t cp)
{
    return class_of(cp, nbi_unicode_category(cp));
}
