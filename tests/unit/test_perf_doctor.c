/* The doctor's reading of foreign text, and the audit without memory. Rules: tests/cli. */
#include "cmocka_all.h"

#include <stdio.h>
#include <string.h>

#include "perf/doctor.h"
#include "perf/doctor_facts.h"
#include "scratch.h"

static void sets(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint32_t n;
    } cases[] = {{"0-3", 4},
                 {"0-3,8", 5},
                 {"7", 1},
                 {"", 0},
                 {"5-2", 0},
                 {"1,1,0-1", 2},
                 {"-", 0},
                 {"x,3", 1},
                 {"2-", 1},
                 {"8191,8192", 1},
                 {"0-99999999999999999999", NBI_SET_MAX},
                 {",,,4", 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nbi_set set;
        nbi_set_parse(&set, cases[i].text);
        assert_int_equal(set.n, cases[i].n);
        assert_int_equal(nbi_set_common(&set, &set), cases[i].n);
    }
    nbi_set a, b;
    nbi_set_parse(&a, "0-7");
    nbi_set_parse(&b, "6-9");
    assert_int_equal(nbi_set_common(&a, &b), 2);
    assert_true(nbi_set_has(&a, 7));
    assert_false(nbi_set_has(&a, 8));
    assert_false(nbi_set_has(&a, NBI_SET_MAX));
}

static void lines_and_words(void **state)
{
    (void)state;
    nbi_reader r = {.root = ""};
    const char *text = "MemTotal:    12 kB\nMemTotalX: 3\nflags : a bc\nempty:\nhex 0x1f";
    assert_int_equal(nbi_line_number(text, "MemTotal"), 12);
    assert_int_equal(nbi_line_number(text, "hex"), 31);
    assert_true(nbi_line_number(text, "Mem") == NBI_UNKNOWN);
    assert_true(nbi_line_number(text, "empty") == NBI_UNKNOWN);
    assert_true(nbi_line_number(NULL, "MemTotal") == NBI_UNKNOWN);
    assert_string_equal(nbi_line_text(&r, text, "flags"), "a bc");
    assert_null(nbi_line_text(&r, text, "none"));
    assert_true(nbi_has_word("a bc d", "bc"));
    assert_false(nbi_has_word("a bcd abc", "bc"));
    assert_false(nbi_has_word(NULL, "bc"));
    assert_string_equal(nbi_chosen_word(&r, "always [madvise] never"), "madvise");
    assert_string_equal(nbi_chosen_word(&r, "[cut"), "cut");
    assert_string_equal(nbi_chosen_word(&r, "plain"), "plain");
    assert_null(nbi_chosen_word(&r, NULL));
    assert_string_equal(nbi_last_part("../../a/b"), "b");
    assert_string_equal(nbi_last_part("b"), "b");
    nbi_reader_free(&r);
}

/* Whatever bytes a file has, what comes out can be printed and is JSON. */
static void files_are_cleaned(void **state)
{
    (void)state;
    char *dir = scratch_make();
    nbi_reader r = {.root = dir};
    scratch_write(dir, "a", "x\033[31m\xff\ty\0z \n\n", 15);
    scratch_write(dir, "n", "-12\n", 4);
    scratch_write(dir, "big", "99999999999999999999", 20);
    assert_string_equal(nbi_read_text(&r, "/%s", "a"), "x?[31m? y\nz");
    assert_int_equal(nbi_read_number(&r, "/n"), -12);
    assert_true(nbi_read_number(&r, "/big") == NBI_UNKNOWN);
    assert_true(nbi_read_number(&r, "/a") == NBI_UNKNOWN);
    assert_null(nbi_read_text(&r, "/none"));
    assert_null(nbi_read_text(&r, "/")); /* a folder */
    const nbi_names names = nbi_read_names(&r, "/");
    assert_int_equal(names.n, 3);
    assert_string_equal(names.items[0], "a");
    assert_null(r.unseen);
    nbi_reader_free(&r);
    scratch_remove(dir);
}

/* Each allocation of an audit made to fail: no memory, or an audit that did without. */
static void audit_without_memory(void **state)
{
    (void)state;
    char *dir = scratch_make();
    scratch_write_text(dir, "nvml.json",
                       "{\"devices\": [{\"name\": \"x\", \"persistence\": 0}, {}]}");
    scratch_write_text(dir, "transfers.json", "{\"devices\": [{\"to_host\": [1e9, 1e-6]}]}");
    const nbi_doctor_options options = {.root = dir, .model = "/"};
    nbi_doctor *d = NULL;
    const long before = nbi_heap_count();
    assert_int_equal(nbi_doctor_run(&d, &options, NULL), NB_OK);
    const long all = nbi_heap_count() - before;
    assert_int_equal(nbi_doctor_count(d, NBI_FINDING_WARNING), 1); /* persistence */
    nbi_doctor_free(&d);
    assert_true(all > 5);
    for (long n = 0; n < all; n++) {
        nb_error err;
        nbi_heap_fail_after(n);
        const nb_status st = nbi_doctor_run(&d, &options, &err);
        nbi_heap_fail_after(-1);
        assert_true(st == NB_OK || st == NB_NO_MEMORY);
        assert_true(st == NB_OK || d == NULL);
        nbi_doctor_free(&d);
    }
    scratch_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sets),
        cmocka_unit_test(lines_and_words),
        cmocka_unit_test(files_are_cleaned),
        cmocka_unit_test(audit_without_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
