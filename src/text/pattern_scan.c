/* Hand-written scanners for the pre-tokenizer patterns that nearly all public models use (see
 * pattern.h).
 *
 * PCRE2's JIT needs a call per piece and property look-ups per character; these need a table
 * look-up per character. They are chosen only when the file's pattern is one of the texts below,
 * letter for letter, and tests hold them equal to PCRE2 on random text. The order of alternatives
 * in the patterns is the order of the ifs. */
#include "text/pattern_scan.h"

#include <string.h>

size_t nbi_scan_spaces(const uint8_t *p, const uint8_t *end, bool newlines)
{
    const uint8_t *q = p, *last = p, *after_newline = NULL;
    size_t len;
    for (uint8_t class; q < end && (class = nbi_scan_peek(q, &len)) & NBI_CLASS_SPACE;) {
        last = q;
        q += len;
        if (class & NBI_CLASS_NEWLINE) after_newline = q;
    }
    if (newlines && after_newline) return (size_t)(after_newline - p);
    if (q == end || last == p) return (size_t)(q - p);
    return (size_t)(last - p); /* the last space belongs to what follows */
}

size_t nbi_scan_contraction(const uint8_t *p, const uint8_t *end, bool fold)
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

/* The cl100k family with at most `digits` numbers per piece; `word`: the classes of its words. */
static inline size_t scan_cl100k_family(const uint8_t *p, const uint8_t *end, size_t digits,
                                        uint8_t word)
{
    const uint8_t known = word | NBI_CLASS_NUMBER | NBI_CLASS_SPACE;
    size_t len, next;
    uint8_t class = nbi_scan_peek(p, &len), follows = 0;
    if (p[0] == '\'' && (next = nbi_scan_contraction(p, end, true)) != 0) return next;
    const uint8_t *q = p + len;
    if (class & word) return (size_t)(nbi_scan_skip(q, end, word, SIZE_MAX) - p);
    if (class & NBI_CLASS_NUMBER)
        return (size_t)(nbi_scan_skip(q, end, NBI_CLASS_NUMBER, digits - 1) - p);
    if (q < end) follows = nbi_scan_peek(q, &next);
    if (!(class & NBI_CLASS_NEWLINE) && (follows & word))
        return (size_t)(nbi_scan_skip(q + next, end, word, SIZE_MAX) - p);
    if (!(class & known) || (p[0] == ' ' && q < end && !(follows & known))) {
        q = nbi_scan_skip_others(q, end, known);
        while (q < end && (*q == '\r' || *q == '\n')) q++;
        return (size_t)(q - p);
    }
    return nbi_scan_spaces(p, end, true);
}

static size_t scan_cl100k(const uint8_t *p, const uint8_t *end)
{
    return scan_cl100k_family(p, end, 3, NBI_CLASS_LETTER);
}

static size_t scan_qwen2(const uint8_t *p, const uint8_t *end)
{
    return scan_cl100k_family(p, end, 1, NBI_CLASS_LETTER);
}

static size_t scan_qwen35(const uint8_t *p, const uint8_t *end)
{
    return scan_cl100k_family(p, end, 1, NBI_CLASS_LETTER | NBI_CLASS_MARK);
}

static size_t scan_gpt2(const uint8_t *p, const uint8_t *end)
{
    const uint8_t known = NBI_CLASS_LETTER | NBI_CLASS_NUMBER | NBI_CLASS_SPACE;
    size_t len, next;
    if (p[0] == '\'' && (next = nbi_scan_contraction(p, end, false)) != 0) return next;
    uint8_t class = nbi_scan_peek(p, &len);
    const uint8_t *q = p + len;
    if (p[0] == ' ' && q < end && !((class = nbi_scan_peek(q, &next)) & NBI_CLASS_SPACE)) q += next;
    if (class & NBI_CLASS_SPACE) return nbi_scan_spaces(p, end, false);
    if (class & NBI_CLASS_LETTER)
        q = nbi_scan_skip(q, end, NBI_CLASS_LETTER, SIZE_MAX);
    else if (class & NBI_CLASS_NUMBER)
        q = nbi_scan_skip(q, end, NBI_CLASS_NUMBER, SIZE_MAX);
    else
        q = nbi_scan_skip_others(q, end, known);
    return (size_t)(q - p);
}

#define CONTRACTION "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define SPACES      "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
/* `[UXM]*[LXM]+` and `[UXM]+[LXM]*` of the o200k family. */
#define CASED_LOWER \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
#define CASED_UPPER \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
/* Public DeepSeek files have the two line ends in the pattern themselves. */
#define DEEPSEEK_WORDS(newlines)                                                          \
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^" newlines                   \
    "\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[" newlines "]*|\\s*[" newlines \
    "]+|\\s+(?!\\S)|\\s+"

static const nbi_known_pattern known_patterns[] = {
    {"cl100k (GLM-4, GLM-5, Llama 3)",
     CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" SPACES,
     scan_cl100k, false},
    {"Qwen2, Qwen3",
     CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" SPACES,
     scan_qwen2, false},
    {"Qwen3.5",
     CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+"
                 "[\\r\\n]*" SPACES,
     scan_qwen35, false},
    {"cl100k, as first published",
     "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}| "
     "?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+",
     scan_cl100k, false},
    {"GPT-2", "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     scan_gpt2, false},
    {"GPT-2, as first published",
     "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     scan_gpt2, false},
    {"o200k (GPT-4o, gpt-oss)",
     CASED_LOWER CONTRACTION "?|" CASED_UPPER CONTRACTION
                             "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" SPACES,
     nbi_scan_o200k, false},
    {"Tekken (Mistral)",
     CASED_LOWER "|" CASED_UPPER "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" SPACES, nbi_scan_tekken,
     false},
    {"DeepSeek V3, numbers", "\\p{N}{1,3}", nbi_scan_number_triple, true},
    {"DeepSeek V3, Han and kana",
     "[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+",
     nbi_scan_deepseek_han_kana, true},
    {"DeepSeek V3, words", DEEPSEEK_WORDS("\r\n"), nbi_scan_deepseek_words, true},
    {"DeepSeek V3, words, with escapes", DEEPSEEK_WORDS("\\r\\n"), nbi_scan_deepseek_words, true},
    {"single numbers", "\\p{N}", nbi_scan_number, true},
    {"runs of numbers", "\\p{N}+", nbi_scan_number_run, true},
};

const nbi_known_pattern *nbi_pattern_known_at(size_t index)
{
    return index < sizeof known_patterns / sizeof *known_patterns ? &known_patterns[index] : NULL;
}

const nbi_known_pattern *nbi_pattern_known(const char *regex, size_t n)
{
    for (size_t i = 0; i < sizeof known_patterns / sizeof *known_patterns; i++)
        if (strlen(known_patterns[i].regex) == n &&
            memcmp(known_patterns[i].regex, regex, n) == 0) {
            nbi_char_class_init();
            return &known_patterns[i];
        }
    return NULL;
}
