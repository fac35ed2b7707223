/* Expressions that end an answer: the same however the text is cut, within their bounds, without
 * heap. */
#include "cmocka_all.h"

#include <string.h>

#include "base/mem.h"
#include "text/decode.h"
#include "text/stop_regex.h"

/* Pushes `text` in parts of `size` characters. */
static size_t run(const char *const *strings, size_t n_strings, const char *const *patterns,
                  size_t n_patterns, const char *text, size_t size, bool include, char *out,
                  int *matched)
{
    nbi_stop *stop = NULL;
    nb_error err = {0};
    size_t len = 0, total = strlen(text);
    assert_int_equal(nbi_stop_create(&stop, strings, n_strings, &err), NB_OK);
    if (nbi_stop_add_regex(stop, patterns, n_patterns, &err) != NB_OK) fail_msg("%s", err.text);
    *matched = -1;
    nbi_heap_forbid();
    for (size_t i = 0, k; i < total && *matched < 0; i += k) {
        k = 0;
        for (size_t c = 0; c < size && i + k < total; c++) {
            do k++;
            while (((unsigned char)text[i + k] & 0xc0) == 0x80);
        }
        size_t wrote = nbi_stop_push(stop, text + i, k, include, out + len, matched);
        assert_true(wrote <= nbi_stop_room(stop, k));
        len += wrote;
    }
    if (*matched >= 0)
        assert_int_equal(nbi_stop_push(stop, "more", 4, include, out + len, &(int){0}), 0);
    len += nbi_stop_flush(stop, out + len);
    nbi_heap_allow();
    nbi_stop_destroy(&stop);
    out[len] = 0;
    return len;
}

typedef struct expected {
    const char *pattern, *string, *text;
    int matched;
    const char *cut, *whole; /* without and with what matched */
} expected;

static const expected cases[] = {
    {"\\d+", NULL, "room 123", 0, "room ", "room 1"},
    {"\\n\\n", NULL, "one\ntwo\n\nthree", 0, "one\ntwo", "one\ntwo\n\n"},
    {"foo(bar|baz)", NULL, "foo fooba foobaz!", 0, "foo fooba ", "foo fooba foobaz"},
    {"foo(bar|baz)", NULL, "foo fooba", -1, "foo fooba", "foo fooba"},
    {"(?i)end\\.", NULL, "the End. x", 0, "the ", "the End."},
    {"abc|b", NULL, "xabc", 0, "xa", "xab"},
    {"a.c|ab", NULL, "xabc", 0, "x", "xab"},
    {"(?<=x)a", NULL, "a ba xa", 0, "a ba x", "a ba xa"},
    {"a(?=b)", NULL, "ac ab", 0, "ac ", "ac ab"},
    {"^b", NULL, "ab\nb", -1, "ab\nb", "ab\nb"},
    {"^a", NULL, "ab", 0, "", "a"},
    {"b$", NULL, "abc", 0, "a", "ab"},
    {"[\xC3\xA4\xE4\xBD\xA0]x", NULL, "\xC3\xA4 \xE4\xBD\xA0x", 0, "\xC3\xA4 ",
     "\xC3\xA4 \xE4\xBD\xA0x"},
    {"\\w\xE4\xBD\xA0", NULL, "\xE5\xA5\xBD\xE4\xBD\xA0", 0, "", "\xE5\xA5\xBD\xE4\xBD\xA0"},
    {"(\\w)\\1\\1", NULL, "aabbccc", 0, "aabb", "aabbccc"},
    {"cde", "bc", "abcde", 0, "a", "abc"},
    {"bcd", "cde", "abcde", 1, "a", "abcd"},
    {"bcdx", "cde", "abcdex", 0, "ab", "abcde"},
    {"(*NO_JIT)(a+)+$b", NULL, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaac", -1,
     "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaac", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaac"},
    {"(*NO_JIT)(\\w)\\1(x|(ab)+c)", NULL, "aabbababab bbababc", 0, "aabbababab ",
     "aabbababab bbababc"},
    {"(a+)+$b", NULL, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaac", -1, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaac",
     "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaac"},
};

static void test_cases(void **state)
{
    (void)state;
    char out[256];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const expected *c = &cases[i];
        for (size_t size = 1; size < 12; size++) {
            int matched;
            run(&c->string, c->string != NULL, &c->pattern, 1, c->text, size, false, out, &matched);
            if (matched != c->matched || strcmp(out, c->cut) != 0)
                fail_msg("\"%s\" in \"%s\" by %zu: %d \"%s\"", c->pattern, c->text, size, matched,
                         out);
            run(&c->string, c->string != NULL, &c->pattern, 1, c->text, size, true, out, &matched);
            assert_string_equal(out, c->whole);
        }
    }
}

static void test_several(void **state)
{
    (void)state;
    static const char *const patterns[] = {"x\\d", "\\d\\d", "q"};
    char out[64];
    int matched;
    for (size_t size = 1; size < 8; size++) {
        run(NULL, 0, patterns, 3, "a x 12", size, false, out, &matched);
        assert_int_equal(matched, 1);
        assert_string_equal(out, "a x ");
        run(NULL, 0, patterns, 3, "ax1", size, false, out, &matched);
        assert_int_equal(matched, 0);
        assert_string_equal(out, "a");
    }
}

/* What may become a match is held back, but no more than the longest match that is looked for; the
 * text comes out whole. */
static void test_bounds(void **state)
{
    (void)state;
    enum { N = 6000 };
    static const char *const open[] = {"<[^>]*>"}, *const deep[] = {"((a?){20}){20}b"};
    static char text[N + 8], out[N + 512];
    int matched;
    memset(text, 'a', N);
    text[0] = '<';
    memcpy(text + N, ">", 2);
    assert_int_equal(run(NULL, 0, open, 1, text, 3, false, out, &matched), N + 1);
    assert_int_equal(matched, -1);
    assert_string_equal(out, text);
    text[N - 100] = '<';
    assert_int_equal(run(NULL, 0, open, 1, text, 3, false, out, &matched), N - 100);
    assert_int_equal(matched, 0);
    text[0] = text[N - 100] = 'a';
    assert_int_equal(run(NULL, 0, deep, 1, text, 7, false, out, &matched), N + 1);
    assert_string_equal(out, text);
}

static void test_refused(void **state)
{
    (void)state;
    char *longest = nbi_calloc(1, NBI_STOP_REGEX_PATTERN_MAX + 2);
    const char *const wrong[] = {"(", "[a", "a*", "", "a|", "\\C", "(?<=a*)b", longest};
    nb_error err = {0};
    assert_non_null(longest);
    memset(longest, 'a', NBI_STOP_REGEX_PATTERN_MAX + 1);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        nbi_stop_regex *r = NULL;
        if (nbi_stop_regex_create(&r, &wrong[i], 1, &err) != NB_INVALID)
            fail_msg("\"%s\" was taken", wrong[i]);
    }
    nbi_free(longest);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_several),
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
