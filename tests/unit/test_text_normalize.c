/* text/normalize.h: the four canonical forms, made run by run, against utf8proc's of the whole. */
#include "cmocka_all.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/json.h"
#include "base/utf8.h"
#include "text/normalize.h"

static const struct {
    const char *name;
    int options;
} forms[] = {{"NFC", UTF8PROC_COMPOSE},
             {"NFD", UTF8PROC_DECOMPOSE},
             {"NFKC", UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
             {"NFKD", UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT}};

typedef struct fixture {
    nbi_normalizer *normalizer[4];
    nbi_matcher *matcher;
    nbi_buf text, scratch;
} fixture;

static void check(fixture *f, const char *text, size_t n)
{
    for (size_t i = 0; i < 4; i++) {
        utf8proc_uint8_t *want = NULL;
        utf8proc_ssize_t n_want =
            utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)n, &want,
                         UTF8PROC_STABLE | (utf8proc_option_t)forms[i].options);
        assert_true(n_want >= 0);
        nbi_buf_clear(&f->text);
        assert_int_equal(nbi_buf_add(&f->text, text, n), NB_OK);
        assert_int_equal(
            nbi_normalizer_run(f->normalizer[i], f->matcher, &f->text, &f->scratch, NULL), NB_OK);
        if (f->text.len != (size_t)n_want || memcmp(f->text.data, want, f->text.len) != 0) {
            for (size_t k = 0; k < n; k++) print_error("%02X ", (uint8_t)text[k]);
            fail_msg("%s of \"%.*s\" is \"%.*s\" instead of \"%.*s\"", forms[i].name, (int)n, text,
                     (int)f->text.len, f->text.data, (int)n_want, (const char *)want);
        }
        free(want);
    }
}

static int setup(void **state)
{
    static fixture f;
    for (size_t i = 0; i < 4; i++) {
        json_t *spec = NULL;
        char text[64];
        int n = snprintf(text, sizeof text, "{\"type\": \"%s\"}", forms[i].name);
        assert_int_equal(nbi_json_parse(&spec, text, (size_t)n, "test", NULL), NB_OK);
        assert_int_equal(nbi_normalizer_parse(&f.normalizer[i], spec, "test", NULL), NB_OK);
        json_decref(spec);
    }
    assert_int_equal(nbi_matcher_create(&f.matcher, NULL), NB_OK);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    for (size_t i = 0; i < 4; i++) nbi_normalizer_free(&f->normalizer[i]);
    nbi_matcher_free(&f->matcher);
    nbi_buf_free(&f->text);
    nbi_buf_free(&f->scratch);
    return 0;
}

/* Every character between those that it may join with: Latin, kana, jamo and Indic bases in front,
 * marks, a vowel sign and jamo behind. */
static void test_every_character(void **state)
{
    static const char *const before[] = {
        "",         "e", "\xC3\xAA", "\xE3\x81\x8B", "\xE1\x84\x80", "\xEA\xB0\x80", "\xE0\xA7\x87",
        "x\xCC\xA3"};
    static const char *const behind[] = {
        "",          "\xCC\x81", "\xE3\x82\x99", "\xE1\x85\xA1", "\xE1\x86\xA8", "\xE0\xA6\xBE",
        "\xCC\xB8z", "\xCC\xA7"};
    for (uint32_t cp = 1; cp < 0x30000; cp++) {
        if (cp >= 0xD800 && cp < 0xE000) continue;
        if (cp >= 0x20000 && cp < 0x2F800 && cp % 97) continue;
        char text[2048];
        size_t n = 0;
        for (size_t i = 0; i < 8; i++) {
            n += (size_t)sprintf(text + n, "%s", before[i]);
            n += nbi_utf8_put(text + n, cp);
            n += (size_t)sprintf(text + n, "%s ", behind[i]);
            n += (size_t)sprintf(text + n, "%s", before[i]);
            n += nbi_utf8_put(text + n, cp);
            n += (size_t)sprintf(text + n, "%s", behind[(i * 3 + cp) % 8]);
        }
        check(*state, text, n);
    }
}

static void test_random(void **state)
{
    static const char *const parts[] = {"a",
                                        "E",
                                        " ",
                                        "<",
                                        "plain ASCII",
                                        "\xC3\xA9",
                                        "\xC3\x85",
                                        "\xE2\x84\xAB",
                                        "\xCC\x81",
                                        "\xCC\xA3",
                                        "\xCC\xB8",
                                        "\xCD\x84",
                                        "\xD0\xB8",
                                        "\xD0\xB9",
                                        "\xCC\x86",
                                        "\xE3\x81\x8B",
                                        "\xE3\x82\x99",
                                        "\xE3\x81\x8C",
                                        "\xE1\x84\x80",
                                        "\xE1\x85\xA1",
                                        "\xE1\x86\xA8",
                                        "\xEA\xB0\x80",
                                        "\xE0\xA7\x87",
                                        "\xE0\xA6\xBE",
                                        "\xEF\xAC\x81",
                                        "\xE4\xB8\x80",
                                        "\xEF\xBC\xA1",
                                        "\xF0\x9F\x99\x82",
                                        "\xF0\x9D\x85\x97",
                                        "\xE2\x80\xA6",
                                        "\xCE\x87"};
    unsigned seed = 1;
    for (int round = 0; round < 20000; round++) {
        char text[512];
        size_t n = 0;
        for (int i = 0; i < 12; i++) {
            seed = seed * 1664525u + 1013904223u;
            n += (size_t)sprintf(text + n, "%s",
                                 parts[(seed >> 8) % (sizeof parts / sizeof *parts)]);
        }
        check(*state, text, n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_character),
                                       cmocka_unit_test(test_random)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
