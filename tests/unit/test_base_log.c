/* The tail of the log: order, what is left when it is full, cut lines, levels. */
#include "cmocka_all.h"

#include <stdio.h>
#include <string.h>

#include "base/log.h"

static int n_sunk;

static void sink(void *user, nb_log_level level, const char *line)
{
    (void)user, (void)level, (void)line;
    n_sunk++;
}

/* How many lines there are from number n on; *last is the last. */
static uint64_t count(uint64_t n, nbi_log_line *last)
{
    uint64_t lines = 0;
    for (; nbi_log_tail(n, last); n = last->n + 1) lines++;
    return lines;
}

static void test_no_sink(void **state)
{
    nbi_log_line line;
    (void)state;
    nb_log_set_sink(NULL, NULL, NB_LOG_DEBUG);
    nbi_log(NB_LOG_ERROR, "nobody listens");
    assert_int_equal(count(0, &line), 0);
}

static void test_levels(void **state)
{
    nbi_log_line line;
    (void)state;
    nb_log_set_sink(sink, NULL, NB_LOG_DEBUG);
    n_sunk = 0;
    nbi_log(NB_LOG_WARN, "one\ntwo %d", 3);
    nbi_log(NB_LOG_DEBUG, "of a client");
    nbi_log(NB_LOG_INFO, "four");
    assert_int_equal(n_sunk, 3);
    assert_true(nbi_log_tail(0, &line));
    assert_string_equal(line.text, "one two 3");
    assert_int_equal(line.level, NB_LOG_WARN);
    assert_int_equal(line.n, 0);
    assert_true(line.unix_ms > 1700000000000u);
    assert_true(nbi_log_tail(1, &line));
    assert_string_equal(line.text, "four");
    assert_false(nbi_log_tail(2, &line));
    nb_log_set_sink(sink, NULL, NB_LOG_WARN);
    nbi_log(NB_LOG_INFO, "not wanted");
    assert_false(nbi_log_tail(2, &line));
}

static void test_full(void **state)
{
    nbi_log_line line;
    char want[32];
    (void)state;
    nb_log_set_sink(sink, NULL, NB_LOG_INFO);
    for (int i = 2; i < 2 * NBI_LOG_TAIL_LINES + 7; i++) nbi_log(NB_LOG_INFO, "line %d", i);
    assert_int_equal(count(0, &line), NBI_LOG_TAIL_LINES);
    assert_int_equal(line.n, 2 * NBI_LOG_TAIL_LINES + 6);
    for (uint64_t n = NBI_LOG_TAIL_LINES + 7; nbi_log_tail(n, &line); n++) {
        assert_int_equal(line.n, n);
        snprintf(want, sizeof want, "line %d", (int)n);
        assert_string_equal(line.text, want);
    }
    assert_true(nbi_log_tail(3, &line));
    assert_int_equal(line.n, NBI_LOG_TAIL_LINES + 7);
}

/* A long line is cut between characters. */
static void test_cut(void **state)
{
    char text[2 * NBI_LOG_TAIL_BYTES];
    nbi_log_line line;
    (void)state;
    for (int shift = 0; shift < 3; shift++) {
        memset(text, 'x', (size_t)shift);
        for (size_t i = (size_t)shift; i + 3 < sizeof text; i += 3) memcpy(text + i, "\u20ac", 4);
        nb_log_set_sink(sink, NULL, NB_LOG_INFO);
        nbi_log(NB_LOG_INFO, "%s", text);
        count(0, &line);
        const size_t n = strlen(line.text);
        assert_true(n < NBI_LOG_TAIL_BYTES && n > NBI_LOG_TAIL_BYTES - 4);
        assert_int_equal((n - (size_t)shift) % 3, 0);
        assert_memory_equal(line.text, text, n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_sink),
        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_full),
        cmocka_unit_test(test_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
