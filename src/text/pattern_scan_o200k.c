/* Scanners for the o200k family (see pattern_scan.h), whose words end where lower case is followed
 * by upper case: GPT-4o and gpt-oss; Mistral's Tekken, the same without contractions and with
 * single numbers. */
#include "text/pattern_scan.h"

/* `[UXM]*[LXM]+` at p, where U is upper case, L lower case, X letters without case and M marks: its
 * end. NULL when there is no match; then *upper is the end of the upper case letters at p. */
static inline const uint8_t *cased_word(const uint8_t *p, const uint8_t *end, const uint8_t **upper)
{
    const uint8_t both = NBI_CLASS_UNCASED | NBI_CLASS_MARK;
    const uint8_t *last = NULL; /* behind the last character that may also end the match */
    size_t len;
    for (uint8_t class; p < end; p += len) {
        class = nbi_scan_peek(p, &len);
        if (class & NBI_CLASS_LOWER)
            return nbi_scan_skip(p + len, end, NBI_CLASS_LOWER | both, SIZE_MAX);
        if (!(class & (NBI_CLASS_UPPER | both))) break;
        if (class & both) last = p + len;
    }
    *upper = p;
    return last;
}

/* The first two alternatives without what may follow them: the end of the word, or NULL. */
static inline const uint8_t *word_end(const uint8_t *p, const uint8_t *end, uint8_t class,
                                      size_t len)
{
    const uint8_t *from = p, *upper = NULL;
    if (class & (NBI_CLASS_NUMBER | NBI_CLASS_NEWLINE)) return NULL;
    if (!(class & NBI_CLASS_LETTER)) from += len; /* the one character that may stand in front */
    const uint8_t *q = cased_word(from, end, &upper);
    if (q) return q;
    if (class & NBI_CLASS_MARK) return from; /* the mark in front is a word of its own */
    return upper > from ? upper : NULL;
}

static inline size_t scan_o200k_family(const uint8_t *p, const uint8_t *end, size_t digits,
                                       bool contractions)
{
    const uint8_t word = NBI_CLASS_LETTER | NBI_CLASS_NUMBER | NBI_CLASS_SPACE;
    size_t len, next;
    uint8_t class = nbi_scan_peek(p, &len);
    const uint8_t *q = word_end(p, end, class, len);
    if (q) {
        if (contractions && q < end && *q == '\'') q += nbi_scan_contraction(q, end, true);
        return (size_t)(q - p);
    }
    q = p + len;
    if (class & NBI_CLASS_NUMBER)
        return (size_t)(nbi_scan_skip(q, end, NBI_CLASS_NUMBER, digits - 1) - p);
    if (!(class & word) || (p[0] == ' ' && q < end && !(nbi_scan_peek(q, &next) & word))) {
        q = nbi_scan_skip_others(q, end, word);
        while (q < end && (*q == '\r' || *q == '\n' || *q == '/')) q++;
        return (size_t)(q - p);
    }
    return nbi_scan_spaces(p, end, true);
}

size_t nbi_scan_o200k(const uint8_t *p, const uint8_t *end)
{
    return scan_o200k_family(p, end, 3, true);
}

size_t nbi_scan_tekken(const uint8_t *p, const uint8_t *end)
{
    return scan_o200k_family(p, end, 1, false);
}
