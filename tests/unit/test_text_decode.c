/* text/decode.h: whole characters and stop strings, however the bytes are cut. */
#include "cmocka_all.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "text/decode.h"
#include "text/unicode.h"

static unsigned seed = 1;

static unsigned next_random(unsigned n)
{
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % n;
}

/* Oracle: base/utf8.c over everything at once. */
static size_t decode_whole(const char *s, size_t n, char *out)
{
    size_t len = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        size_t k = nbi_utf8_next(s + i, n - i, &cp);
        memcpy(out + len, cp == NBI_UTF8_BAD ? NBI_REPLACEMENT : s + i, cp == NBI_UTF8_BAD ? 3 : k);
        len += cp == NBI_UTF8_BAD ? 3 : k;
        i += k;
    }
    return len;
}

static size_t decode_parts(const char *const *parts, const size_t *sizes, size_t n, char *out)
{
    nbi_decoder d = {0};
    size_t len = 0;
    for (size_t i = 0; i < n; i++) {
        size_t k = nbi_decoder_push(&d, parts[i], sizes[i], out + len);
        assert_true(k <= NBI_DECODER_ROOM(sizes[i]));
        assert_int_equal(nbi_utf8_valid_prefix((const uint8_t *)out + len, k), k);
        len += k;
    }
    return len + nbi_decoder_flush(&d, out + len);
}

static void test_characters_over_tokens(void **state)
{
    (void)state;
    char out[128];
    const char *emoji[] = {"A", "\xF0\x9F", "\x98\x80", "B"}; /* C20 */
    size_t n = decode_parts(emoji, (size_t[]){1, 2, 2, 1}, 4, out);
    assert_memory_equal(out,
                        "A\xF0\x9F\x98\x80"
                        "B",
                        n);
    assert_int_equal(n, 6);
    const char *cjk[] = {"\xE9", "\xBE", "\x98", "!"}; /* C21 */
    nbi_decoder d = {0};
    assert_int_equal(nbi_decoder_push(&d, cjk[0], 1, out), 0);
    assert_int_equal(nbi_decoder_push(&d, cjk[1], 1, out), 0);
    assert_int_equal(nbi_decoder_push(&d, cjk[2], 1, out), 3);
    assert_int_equal(nbi_decoder_push(&d, cjk[3], 1, out), 1);
    assert_int_equal(nbi_decoder_flush(&d, out), 0);
    assert_int_equal(nbi_decoder_push(&d, "\xF0\x9F\x98", 3, out), 0);
    assert_int_equal(nbi_decoder_flush(&d, out), 3);
    assert_memory_equal(out, NBI_REPLACEMENT, 3);
}

static void test_random_bytes_in_random_parts(void **state)
{
    (void)state;
    static const uint8_t likely[] = {0x41, 0x80, 0xBF, 0xC2, 0xC0, 0xE0, 0xA0, 0xED,
                                     0x9F, 0xEF, 0xF0, 0x90, 0xF4, 0x8F, 0xFF};
    for (int round = 0; round < 20000; round++) {
        char text[24], want[128], got[512];
        const char *parts[24];
        size_t sizes[24], n = next_random(24), n_parts = 0;
        for (size_t i = 0; i < n; i++) text[i] = (char)likely[next_random(sizeof likely)];
        for (size_t i = 0; i < n;) {
            size_t k = 1 + next_random(4);
            if (k > n - i) k = n - i;
            parts[n_parts] = text + i;
            sizes[n_parts++] = k;
            i += k;
        }
        size_t n_want = decode_whole(text, n, want),
               n_got = decode_parts(parts, sizes, n_parts, got);
        assert_int_equal(n_got, n_want);
        assert_memory_equal(got, want, n_want);
    }
}

static void test_reader_agrees_with_base(void **state)
{
    (void)state;
    char bytes[4];
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        if (cp >= 0xD800 && cp < 0xE000) continue;
        uint32_t back;
        size_t n = nbi_utf8_put(bytes, cp);
        assert_int_equal(nbi_utf8_read(&back, (const uint8_t *)bytes, n), n);
        assert_int_equal(back, cp);
        assert_int_equal(nbi_utf8_back((const uint8_t *)bytes, n), n);
        if (n > 1) assert_int_equal(nbi_utf8_read(&back, (const uint8_t *)bytes, n - 1), 0);
    }
}

/* Pushes `text` in parts of `size` bytes; returns all output, *matched. */
static size_t stop_parts(const char *const *strings, size_t n, const char *text, size_t size,
                         bool include, char *out, int *matched)
{
    nbi_stop *stop = NULL;
    size_t len = 0, total = strlen(text);
    assert_int_equal(nbi_stop_create(&stop, strings, n, NULL), NB_OK);
    *matched = -1;
    for (size_t i = 0; i < total && *matched < 0; i += size) {
        size_t k = size < total - i ? size : total - i;
        size_t room = nbi_stop_room(stop, k),
               wrote = nbi_stop_push(stop, text + i, k, include, out + len, matched);
        assert_true(wrote <= room);
        len += wrote;
    }
    if (*matched >= 0)
        assert_int_equal(nbi_stop_push(stop, "more", 4, include, out + len, &(int){0}), 0);
    len += nbi_stop_flush(stop, out + len);
    nbi_stop_destroy(&stop);
    out[len] = 0;
    return len;
}

static void test_stop_over_tokens(void **state)
{
    (void)state;
    const char *strings[] = {"beta"};
    nbi_stop *stop = NULL;
    char out[64];
    int matched;
    size_t n;
    assert_int_equal(nbi_stop_create(&stop, strings, 1, NULL), NB_OK);
    n = nbi_stop_push(stop, "al", 2, false, out, &matched); /* C36 */
    n += nbi_stop_push(stop, "pha be", 6, false, out + n, &matched);
    assert_memory_equal(out, "alpha ", 6);
    assert_int_equal(n, 6);
    assert_int_equal(nbi_stop_push(stop, "ta ga", 5, false, out + n, &matched), 0);
    assert_int_equal(matched, 0);
    nbi_stop_destroy(&stop);
}

static void test_stop_by_brute_force(void **state)
{
    (void)state;
    for (int round = 0; round < 20000; round++) {
        char text[32], a[8], b[8], got[128];
        const char *strings[] = {a, b};
        size_t n = next_random(31);
        for (size_t i = 0; i < n; i++) text[i] = "ab"[next_random(2)];
        text[n] = 0;
        for (int s = 0; s < 2; s++) {
            char *p = s ? b : a;
            size_t k = 1 + next_random(6);
            for (size_t i = 0; i < k; i++) p[i] = "ab"[next_random(2)];
            p[k] = 0;
        }
        int want = -1, matched;
        size_t end = n, begin = n;
        for (size_t e = 1; e <= n && want < 0; e++) {
            for (int s = 0; s < 2; s++) {
                size_t k = strlen(strings[s]);
                if (k <= e && !memcmp(text + e - k, strings[s], k) &&
                    (want < 0 || k > strlen(strings[want]))) {
                    want = s;
                    end = e;
                    begin = e - k;
                }
            }
        }
        bool include = next_random(2);
        size_t len = stop_parts(strings, 2, text, 1 + next_random(5), include, got, &matched);
        assert_int_equal(matched, want);
        assert_int_equal(len, include ? end : begin);
        assert_memory_equal(got, text, len);
    }
}

static void test_stop_limits(void **state)
{
    (void)state;
    const char *many[NB_STOP_STRINGS_MAX + 1], *empty[] = {""};
    nbi_stop *stop = NULL;
    nb_error err;
    for (size_t i = 0; i <= NB_STOP_STRINGS_MAX; i++) many[i] = "x";
    assert_int_equal(nbi_stop_create(&stop, many, NB_STOP_STRINGS_MAX + 1, &err), NB_INVALID);
    assert_int_equal(nbi_stop_create(&stop, empty, 1, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "empty"));
    assert_null(stop);
    char out[16];
    int matched;
    assert_int_equal(nbi_stop_create(&stop, NULL, 0, &err), NB_OK);
    assert_int_equal(nbi_stop_push(stop, "abc", 3, false, out, &matched), 3);
    nbi_stop_destroy(&stop);
}

static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* C77, and no heap in push: the last of 40 stretches of a long text costs no more than the first.
 * The least of several stretches is taken, since other processes disturb. */
static void test_constant_time_per_token(void **state)
{
    (void)state;
    const char *strings[] = {"never seen", "<|nor this|>"};
    nbi_stop *stop = NULL;
    nbi_decoder d = {0};
    uint64_t first = UINT64_MAX, last = UINT64_MAX;
    char chars[64], out[128];
    int matched;
    assert_int_equal(nbi_stop_create(&stop, strings, 2, NULL), NB_OK);
    nbi_heap_forbid();
    for (int stretch = 0; stretch < 40; stretch++) {
        uint64_t begin = cpu_ns();
        for (int k = 0; k < 20000; k++) {
            size_t n = nbi_decoder_push(&d, " n\xC3\xA9ver \xF0\x9F", 10, chars);
            (void)nbi_stop_push(stop, chars, n, false, out, &matched);
        }
        uint64_t ns = cpu_ns() - begin;
        if (stretch < 8 && ns < first) first = ns;
        if (stretch >= 32 && ns < last) last = ns;
    }
    nbi_heap_allow();
    nbi_stop_destroy(&stop);
    assert_true((double)last < 1.3 * (double)first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_characters_over_tokens),
        cmocka_unit_test(test_random_bytes_in_random_parts),
        cmocka_unit_test(test_reader_agrees_with_base),
        cmocka_unit_test(test_stop_over_tokens),
        cmocka_unit_test(test_stop_by_brute_force),
        cmocka_unit_test(test_stop_limits),
        cmocka_unit_test(test_constant_time_per_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
