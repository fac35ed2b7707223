/* text/pattern.h: every hand-written scanner against PCRE2 (random text, every character, long
 * runs), and the patterns that are refused. */
#include "cmocka_all.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/utf8.h"
#include "text/pattern.h"
#include "text/unicode.h"

#define ROUNDS 6000

static unsigned seed = 1;

static unsigned next_random(unsigned n)
{
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % n;
}

/* Something of every class that a pattern names, and both sides of every border of a range. */
static const char *const likely[] = {
    " ",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\r",
    "\x0B",
    "\xC2\x85",
    "\xC2\xA0",
    "\xE3\x80\x80",
    "\xE2\x80\xA8",
    "\xE1\xA0\x8E",
    "\x01",
    "\x7F",
    "\xE2\x80\x8D",
    "\xEF\xBB\xBF",
    "'",
    "'s",
    "'LL",
    "'Ve",
    "'\xC5\xBF",
    "'rE",
    "'d",
    "\xE2\x80\x99s",
    "a",
    "zz",
    "A",
    "Zz",
    "\xC3\xA9",
    "\xC3\x89",
    "\xC7\x85",
    "\xCA\xB0",
    "\xC2\xAA",
    "\xC3\x9F",
    "\xD7\x90",
    "\xE0\xA4\x85",
    "\xCC\x81",
    "\xE0\xA4\xBE",
    "\xE2\x83\x9D",
    "\xEF\xB8\x8F",
    "7",
    "42",
    "12345",
    "\xD9\xA3",
    "\xE2\x91\xA0",
    "\xE2\x85\xA7",
    "\xC2\xBD",
    ".",
    "!?",
    "_",
    "/",
    "//",
    "$",
    "+",
    "`",
    "^",
    "~",
    "@",
    "[",
    "{",
    "\xC2\xA3",
    "\xE2\x80\x94",
    "\xEF\xBC\x81",
    "\xE3\x80\x82",
    "\xE3\x80\xBF",
    "\xE3\x81\x80",
    "\xE3\x81\x82",
    "\xE3\x82\xA0",
    "\xE3\x83\xBF",
    "\xE3\x84\x80",
    "\xE4\xB7\xBF",
    "\xE4\xB8\x80",
    "\xE9\xBE\xA5",
    "\xE9\xBE\xA6",
    "\xED\x95\x9C",
    "\xEE\x80\x80",
    "\xF0\x9F\x99\x82",
    "\xF0\x9F\x91\x8D\xF0\x9F\x8F\xBD",
    "\xF0\x9D\x94\x98",
    "\xF0\x9D\x94\xB2",
    "\xF0\x9D\x9F\x99",
    "\xF0\x90\xB5\x80",
    "\xF0\x90\xB5\x90",
    "\xF0\xA0\x80\x80",
    "\xF0\xB2\x8E\xAF",
    "\xF0\x91\xBC\x83",
    "\xF3\xA0\x84\x80",
    "\xF4\x8F\xBF\xBF",
};

/* Characters of mixed kinds; when `narrow` of few kinds, so that long runs of two or three meet. */
static size_t random_text(char *out, size_t n_chars, bool narrow)
{
    const size_t n_likely = sizeof likely / sizeof *likely;
    const char *few[3];
    size_t n = 0;
    for (int i = 0; i < 3; i++) few[i] = likely[next_random((unsigned)n_likely)];
    for (size_t i = 0; i < n_chars; i++) {
        if (narrow || next_random(4)) {
            const char *s = narrow ? few[next_random(3)] : likely[next_random((unsigned)n_likely)];
            memcpy(out + n, s, strlen(s));
            n += strlen(s);
        } else {
            uint32_t cp = next_random(2) ? next_random(0x3000) : next_random(0x110000);
            if (cp >= 0xD800 && cp < 0xE000) cp = 'x';
            n += nbi_utf8_put(out + n, cp);
        }
    }
    return n;
}

typedef struct pair {
    const nbi_known_pattern *known;
    nbi_pattern *pattern;
    nbi_matcher *matcher;
} pair;

/* Both cut text[0..n), every piece of one being a piece of the other. */
static void compare(const pair *p, const char *text, size_t n)
{
    for (size_t at = 0, next; at < n; at = next) {
        size_t start, end;
        nb_status st = nbi_pattern_find(p->pattern, p->matcher, text, n, at, &start, &end, NULL);
        if (st == NB_NOT_FOUND)
            next = n;
        else
            next = start > at ? start : end;
        assert_true(st == NB_OK || (p->known->gaps && st == NB_NOT_FOUND));
        size_t k = p->known->scan((const uint8_t *)text + at, (const uint8_t *)text + n);
        if (k != next - at || (st == NB_OK && start > at && !p->known->gaps)) {
            size_t from = at < 40 ? 0 : at - 40;
            print_error("%s: at %zu of %zu, \"%.*s\": PCRE2 %zu, scanner %zu bytes\n",
                        p->known->name, at, n, (int)(n - from < 120 ? n - from : 120), text + from,
                        next - at, k);
            fail();
        }
    }
}

static void with_every_pattern(void (*check)(const pair *p))
{
    pair p = {0};
    for (size_t i = 0; (p.known = nbi_pattern_known_at(i)); i++) {
        const char *regex = p.known->regex;
        assert_ptr_equal(nbi_pattern_known(regex, strlen(regex)), p.known);
        assert_int_equal(nbi_pattern_compile(&p.pattern, regex, strlen(regex), p.known->name, NULL),
                         NB_OK);
        assert_int_equal(nbi_matcher_create(&p.matcher, NULL), NB_OK);
        check(&p);
        nbi_matcher_free(&p.matcher);
        nbi_pattern_free(&p.pattern);
    }
}

static void check_random(const pair *p)
{
    char text[1024];
    seed = 1;
    for (int round = 0; round < ROUNDS; round++)
        compare(p, text, random_text(text, 1 + next_random(40), round % 3 == 0));
}

static void test_random(void **state)
{
    (void)state;
    with_every_pattern(check_random);
}

/* Ideographs, Hangul, private and unassigned characters, but for the ends of these ranges. */
static bool is_plain(uint32_t cp)
{
    return (cp > 0x3400 && cp < 0x4DB0) || (cp > 0x4E00 && cp < 0x9FA0) ||
           (cp > 0xAC00 && cp < 0xD790) || (cp > 0xE000 && cp < 0xF8F0) ||
           (cp > 0x12600 && cp < 0x16000) || (cp > 0x17000 && cp < 0x18C00) ||
           (cp > 0x20000 && cp < 0x2A6D0) || (cp > 0x2A700 && cp < 0x32300) ||
           (cp > 0x32400 && cp < 0xE0000) || (cp > 0xE0200 && cp < 0x10FFF0);
}

/* Every character: in a row, and each between others of which it could be a part. */
static void check_characters(const pair *p)
{
    static const char *const around[][2] = {{"", ""},   {"", "a"},  {"A", "b"}, {"\x01", "A"},
                                            {" ", "."}, {".", " "}, {"1", "1"}};
    for (size_t k = 0; k < sizeof around / sizeof *around; k++) {
        char text[2048];
        size_t n = 0;
        for (uint32_t cp = 0; cp < 0x110000; cp++) {
            if (cp >= 0xD800 && cp < 0xE000) continue;
            if (k > 0 && is_plain(cp) && cp % 61) continue;
            n += (size_t)sprintf(text + n, "%s", around[k][0]);
            n += nbi_utf8_put(text + n, cp);
            n += (size_t)sprintf(text + n, "%s", around[k][1]);
            if (n < sizeof text - 16) continue;
            compare(p, text, n);
            n = 0;
        }
        compare(p, text, n);
    }
}

static void test_every_character(void **state)
{
    (void)state;
    with_every_pattern(check_characters);
}

/* The same for text[from..to), moved to whole characters. */
static void compare_part(const pair *p, const char *text, size_t n, size_t from, size_t to)
{
    while (from > 0 && ((uint8_t)text[from] & 0xC0) == 0x80) from--;
    while (to < n && ((uint8_t)text[to] & 0xC0) == 0x80) to++;
    compare(p, text + from, to - from);
}

static uint64_t scan_ns(const nbi_known_pattern *known, const char *text, size_t n)
{
    struct timespec t[2];
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t[0]);
    const uint8_t *p = (const uint8_t *)text, *end = p + n;
    while (p < end) p += known->scan(p, end);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t[1]);
    return (uint64_t)(t[1].tv_sec - t[0].tv_sec) * 1000000000u + (uint64_t)t[1].tv_nsec -
           (uint64_t)t[0].tv_nsec;
}

/* A quarter of a megabyte of one or two things in turn: time grows with the length (a scanner that
 * looked further ahead than it cuts would take minutes), and the start and the end give the same
 * pieces. */
static void check_long(const pair *p)
{
    static const char *const units[][2] = {{"a", "a"},
                                           {"A", "A"},
                                           {"A", "a"},
                                           {"\xCC\x81", "A"},
                                           {"\xD7\x90", "A"},
                                           {" ", " "},
                                           {" ", "\n"},
                                           {"\n", "x"},
                                           {"7", "7"},
                                           {".", "."},
                                           {"'", "s"},
                                           {"'", "'"},
                                           {"/", "\n"},
                                           {"\xE4\xB8\x80", "a"},
                                           {"\xE4\xB8\x80", "\xE3\x81\x80"},
                                           {"\x01", "a"},
                                           {"\x01", "\x01"}};
    const size_t size = (size_t)1 << 18, compared = size / 16;
    char *text = malloc(size);
    assert_non_null(text);
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        for (int turn = 0; turn < 2; turn++) {
            /* in turn one by one, or half a megabyte of each */
            size_t n = 0, a = strlen(units[i][0]), b = strlen(units[i][1]);
            for (size_t k = 0; n + 8 < size; k++) {
                bool second = turn ? n > size / 2 : k % 2;
                memcpy(text + n, units[i][second], second ? b : a);
                n += second ? b : a;
            }
            uint64_t ns = scan_ns(p->known, text, n);
            if (ns > 1000000000u) fail_msg("%s: %zu: %.3f s", p->known->name, i, (double)ns * 1e-9);
            compare_part(p, text, n, 0, compared);
            compare_part(p, text, n, n / 2 - compared / 2, n / 2 + compared / 2);
        }
    free(text);
}

static void test_long(void **state)
{
    (void)state;
    with_every_pattern(check_long);
}

static void test_only_exact_text(void **state)
{
    (void)state;
    const nbi_known_pattern *known;
    for (size_t i = 0; (known = nbi_pattern_known_at(i)); i++) {
        char changed[1024];
        size_t n = strlen(known->regex);
        assert_true(n + 1 < sizeof changed);
        memcpy(changed, known->regex, n + 1);
        changed[n] = '$';
        assert_null(nbi_pattern_known(changed, n + 1));
        assert_null(nbi_pattern_known("", 0));
        changed[0] ^= 1;
        assert_null(nbi_pattern_known(changed, n));
    }
}

static void test_patterns_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {"[a[b]]",        "[a&&b]", "(*VERB)", "(?R)", "[\\W]", "(",
                                      "\\p{Nonsense}", "a\\",    "[a",      "\\p{", "[]"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        nbi_pattern *p = NULL;
        nb_error err = {.status = NB_OK};
        assert_int_equal(nbi_pattern_compile(&p, bad[i], strlen(bad[i]), "here", &err),
                         NB_UNSUPPORTED);
        assert_null(p);
        assert_non_null(strstr(err.text, "here"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_every_character),
        cmocka_unit_test(test_long),
        cmocka_unit_test(test_only_exact_text),
        cmocka_unit_test(test_patterns_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
