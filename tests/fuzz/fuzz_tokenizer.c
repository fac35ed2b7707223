/* Fuzz target: tokenizer.json, then text through it. The input is a file, a line feed and 0xFF, and
 * text; without that mark it is all file and some fixed texts are used. The text also goes through
 * every hand-written scanner, whose pieces must be those of PCRE2. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "text/pattern.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

#define SCANNERS 14  /* known patterns */
#define SCAN_MAX 512 /* bytes of text that are compared */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const nbi_tokenizer *t, const char *text, size_t n, bool special)
{
    nbi_ids ids = {0};
    char *back = NULL;
    size_t n_back;
    nb_error err;
    if (nbi_tokenizer_encode(t, text, n, special, &ids, &err) == NB_OK &&
        nbi_tokenizer_decode(t, ids.data, ids.len, false, &back, &n_back, &err) != NB_OK)
        abort(); /* every id that encoding gives can be decoded */
    nbi_free(back);
    nbi_ids_free(&ids);
}

/* Kept for the life of the process. */
static nbi_pattern *patterns[SCANNERS];
static nbi_matcher *matcher;

static void make_patterns(void)
{
    if (matcher) return;
    if (nbi_pattern_known_at(SCANNERS) || nbi_matcher_create(&matcher, NULL) != NB_OK) abort();
    for (size_t i = 0; i < SCANNERS; i++) {
        const char *regex = nbi_pattern_known_at(i)->regex;
        if (!nbi_pattern_known(regex, strlen(regex)) || /* makes the scanner's tables */
            nbi_pattern_compile(&patterns[i], regex, strlen(regex), "fuzz", NULL) != NB_OK)
            abort();
    }
}

static void check_scanners(const uint8_t *text, size_t n)
{
    make_patterns();
    n = nbi_utf8_valid_prefix(text, n < SCAN_MAX ? n : SCAN_MAX);
    for (size_t i = 0; i < SCANNERS; i++) {
        const nbi_known_pattern *known = nbi_pattern_known_at(i);
        for (size_t at = 0, next; at < n; at = next) {
            size_t start, end;
            nb_status st = nbi_pattern_find(patterns[i], matcher, (const char *)text, n, at, &start,
                                            &end, NULL);
            next = st == NB_NOT_FOUND ? n : start > at ? start : end;
            if ((st != NB_OK && st != NB_NOT_FOUND) ||
                (!known->gaps && (st != NB_OK || start > at)) ||
                known->scan(text + at, text + n) != next - at)
                abort();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char fixed[] = "Hello, w\xC3\xB6rld 123\r\n\r\n  don't \xF0\x9F\x99\x82 <|user|> "
                                "\xFF\xE9\xBE aaaaaaaaaaaaaaaaaaaaaaaa"
                                "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\xCC\x81\xCC\xA3";
    const char *text = fixed;
    size_t n_file = size, n_text = sizeof fixed - 1;
    for (size_t i = 0; i + 1 < size; i++) {
        if (data[i] != '\n' || data[i + 1] != 0xFF) continue;
        n_file = i;
        text = (const char *)data + i + 2;
        n_text = size - i - 2;
        break;
    }
    check_scanners((const uint8_t *)text, n_text);
    nbi_tokenizer *t = NULL;
    nb_error err;
    if (nbi_tokenizer_parse(&t, (const char *)data, n_file, "fuzz", &err) != NB_OK) return 0;
    check(t, text, n_text, true);
    check(t, text, n_text, false);
    nbi_range plain = {n_text / 3, n_text / 2};
    nbi_ids ids = {0};
    (void)nbi_tokenizer_encode_guarded(t, text, n_text, &plain, n_text > 6, &ids, &err);
    nbi_ids_free(&ids);
    nbi_tokenizer_close(&t);
    return 0;
}
