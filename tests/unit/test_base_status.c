/* Error sentences, UTF-8 and the log. */
#include "cmocka_all.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/status.h"
#include "base/utf8.h"
#include "child.h"

static void every_status_has_its_text(void **state)
{
    (void)state;
#define X(name, value, text)       \
    assert_int_equal(name, value); \
    assert_string_equal(nb_status_text(name), text);
    NB_STATUS_LIST(X)
#undef X
    assert_string_equal(nb_status_text((nb_status)-77), "unknown status");
    assert_string_equal(nb_version(), NB_VERSION);
}

static void fail_fills_and_returns(void **state)
{
    (void)state;
    nb_error err = {0};
    assert_int_equal(nbi_fail(&err, NB_IO, "%s: %d", "file", 7), NB_IO);
    assert_int_equal(err.status, NB_IO);
    assert_string_equal(err.text, "file: 7");
    assert_int_equal(nbi_fail(NULL, NB_BUSY, "dropped"), NB_BUSY);
    /* The sentence itself may be an argument. */
    assert_int_equal(nbi_fail(&err, NB_CORRUPT, "outer: %s", err.text), NB_CORRUPT);
    assert_string_equal(err.text, "outer: file: 7");
}

static void prefix_goes_before(void **state)
{
    (void)state;
    nb_error err = {0};
    nbi_fail(&err, NB_NOT_FOUND, "no scale");
    assert_int_equal(nbi_fail_prefix(&err, NB_INTERNAL, "layer %d", 3), NB_NOT_FOUND);
    assert_string_equal(err.text, "layer 3: no scale");
    assert_int_equal(nbi_fail_prefix(NULL, NB_INTERNAL, "x"), NB_INTERNAL);
}

/* Whatever the length, a cut sentence ends on a whole character. */
static void long_text_is_cut_between_characters(void **state)
{
    (void)state;
    static const char *const characters[] = {"a", "\xc3\xa4", "\xe2\x82\xac", "\xf0\x9f\x98\x80"};
    for (size_t c = 0; c < 4; c++) {
        for (size_t shift = 0; shift < 5; shift++) {
            char text[2 * NB_ERROR_TEXT_MAX] = {0};
            memset(text, 'x', shift);
            while (strlen(text) < NB_ERROR_TEXT_MAX + 8) strcat(text, characters[c]);
            nb_error err = {0};
            nbi_fail(&err, NB_INVALID, "%s", text);
            size_t n = strlen(err.text);
            assert_true(n < NB_ERROR_TEXT_MAX && n + 4 >= NB_ERROR_TEXT_MAX);
            for (size_t i = 0; i < n;) {
                uint32_t code;
                i += nbi_utf8_next(err.text + i, n - i, &code);
                assert_int_not_equal(code, NBI_UTF8_BAD);
            }
            nbi_fail_prefix(&err, NB_INVALID, "\xc3\xa4%s", "pre");
            n = strlen(err.text);
            for (size_t i = 0; i < n;) {
                uint32_t code;
                i += nbi_utf8_next(err.text + i, n - i, &code);
                assert_int_not_equal(code, NBI_UTF8_BAD);
            }
        }
    }
}

static void every_code_point_round_trips(void **state)
{
    (void)state;
    for (uint32_t code = 0; code <= 0x10ffff; code++) {
        if (code >= 0xd800 && code <= 0xdfff) continue;
        char bytes[4];
        uint32_t back = 0;
        size_t n = nbi_utf8_put(bytes, code);
        size_t expected = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
        assert_int_equal(n, expected);
        assert_int_equal(nbi_utf8_next(bytes, n, &back), n);
        assert_int_equal(back, code);
        for (size_t cut = 1; cut < n; cut++) {
            assert_int_equal(nbi_utf8_next(bytes, cut, &back), cut);
            assert_int_equal(back, NBI_UTF8_BAD);
            assert_int_equal(nbi_utf8_cut(bytes, cut), 0);
        }
        assert_int_equal(nbi_utf8_cut(bytes, n), n);
    }
}

/* All 1- to 3-byte strings: the decoder accepts exactly what encodes a code point, by a rule of its
 * own. */
static void invalid_bytes_are_refused(void **state)
{
    (void)state;
    for (uint32_t v = 0; v < 1u << 24; v += v < 1u << 16 ? 1 : 7) {
        char s[3] = {(char)(v >> 16), (char)(v >> 8), (char)v};
        uint32_t code;
        size_t n = nbi_utf8_next(s, 3, &code);
        assert_true(n >= 1 && n <= 3);
        if (code == NBI_UTF8_BAD) continue;
        char again[4];
        assert_true(code < 0xd800 || code > 0xdfff);
        assert_int_equal(nbi_utf8_put(again, code), n);
        assert_memory_equal(again, s, n);
    }
    /* Unicode 15, table 3-11: one replacement for each maximal part. */
    const char sample[] = "\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41";
    const size_t parts[] = {2, 1, 3, 2, 1};
    size_t at = 0;
    for (size_t i = 0; i < 5; i++) {
        uint32_t code;
        assert_int_equal(nbi_utf8_next(sample + at, sizeof sample - 1 - at, &code), parts[i]);
        at += parts[i];
    }
}

static void broken_assert(void *arg)
{
    NB_ASSERT(arg != NULL);
}

static void assert_aborts(void **state)
{
    (void)state;
    assert_int_equal(child_signal(broken_assert, NULL), SIGABRT);
    int x;
    assert_int_equal(child_signal(broken_assert, &x), 0);
}

typedef struct lines {
    pthread_mutex_t lock;
    unsigned n;
    nb_log_level level;
    char last[4096];
} lines;

static void keep_line(void *user, nb_log_level level, const char *line)
{
    lines *l = user;
    pthread_mutex_lock(&l->lock);
    l->n++;
    l->level = level;
    strncpy(l->last, line, sizeof l->last - 1);
    pthread_mutex_unlock(&l->lock);
}

static void log_reaches_the_sink_by_level(void **state)
{
    (void)state;
    lines l = {.lock = PTHREAD_MUTEX_INITIALIZER};
    nbi_log(NB_LOG_ERROR, "nobody listens");
    assert_false(nbi_log_wants(NB_LOG_ERROR));
    nb_log_set_sink(keep_line, &l, NB_LOG_INFO);
    assert_true(nbi_log_wants(NB_LOG_INFO));
    assert_false(nbi_log_wants(NB_LOG_DEBUG));
    nbi_log(NB_LOG_WARN, "two\nlines %d\r", 2);
    assert_int_equal(l.n, 1);
    assert_int_equal(l.level, NB_LOG_WARN);
    assert_string_equal(l.last, "two lines 2 ");
    nbi_log(NB_LOG_DEBUG, "unwanted");
    assert_int_equal(l.n, 1);
    char text[5000];
    memset(text, 'y', sizeof text);
    text[sizeof text - 1] = '\0';
    nbi_log(NB_LOG_INFO, "%s", text);
    assert_int_equal(l.n, 2);
    assert_true(strlen(l.last) > 1000 && strlen(l.last) < 4096);
    nb_log_set_sink(NULL, NULL, NB_LOG_DEBUG);
    nbi_log(NB_LOG_ERROR, "dropped");
    assert_int_equal(l.n, 2);
}

static void *log_much(void *arg)
{
    for (int i = 0; i < 1000; i++) nbi_log(NB_LOG_INFO, "%s %d", (const char *)arg, i);
    return NULL;
}

static void log_from_many_threads(void **state)
{
    (void)state;
    lines l = {.lock = PTHREAD_MUTEX_INITIALIZER};
    nb_log_set_sink(keep_line, &l, NB_LOG_INFO);
    pthread_t threads[4];
    char text[] = "line";
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, log_much, text);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    nb_log_set_sink(NULL, NULL, NB_LOG_INFO);
    assert_int_equal(l.n, 4000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_status_has_its_text),
        cmocka_unit_test(fail_fills_and_returns),
        cmocka_unit_test(prefix_goes_before),
        cmocka_unit_test(long_text_is_cut_between_characters),
        cmocka_unit_test(every_code_point_round_trips),
        cmocka_unit_test(invalid_bytes_are_refused),
        cmocka_unit_test(assert_aborts),
        cmocka_unit_test(log_reaches_the_sink_by_level),
        cmocka_unit_test(log_from_many_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
