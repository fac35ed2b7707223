/* text/tokenizer.h on a small file made here: guards, threads, memory failures, time on long runs.
 * The comparison with the reference library is in tests/text. */
#include "cmocka_all.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "text/tokenizer.h"

/* All 256 bytes, and merges for a few words. */
static char *make_file(const char *extra_added)
{
    nbi_buf b = {0};
    int id = 0, next = 0x100;
    static const char *const merges[][2] = {{"h", "e"}, {"l", "l"}, {"he", "ll"}, {"hell", "o"},
                                            {"Ġ", "w"}, {"a", "a"}, {"aa", "aa"}};
    assert_int_equal(
        nbi_buf_addf(
            &b,
            "{\"added_tokens\":[{\"id\":300,\"content\":\"<|user|>\",\"special\":true},"
            "{\"id\":301,\"content\":\"<think>\",\"special\":false,\"normalized\":false}%s],"
            "\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":["
            "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\s+|\\\\S+\"},\"behavior\":"
            "\"Isolated\"},"
            "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]},"
            "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"vocab\":{",
            extra_added),
        NB_OK);
    for (int i = 0; i < 256; i++) {
        bool printable = (i >= 0x21 && i <= 0x7E) || (i >= 0xA1 && i <= 0xAC) || i >= 0xAE;
        char c[5] = {0};
        nbi_utf8_put(c, (uint32_t)(printable ? i : next++));
        assert_int_equal(nbi_json_quote(&b, c, strlen(c)), NB_OK);
        assert_int_equal(nbi_buf_addf(&b, ":%d,", id++), NB_OK);
    }
    for (size_t i = 0; i < sizeof merges / sizeof *merges; i++)
        assert_int_equal(
            nbi_buf_addf(&b, "%s\"%s%s\":%d", i ? "," : "", merges[i][0], merges[i][1], id++),
            NB_OK);
    assert_int_equal(nbi_buf_addf(&b, "},\"merges\":["), NB_OK);
    for (size_t i = 0; i < sizeof merges / sizeof *merges; i++)
        assert_int_equal(nbi_buf_addf(&b, i % 2 ? "%s\"%s %s\"" : "%s[\"%s\",\"%s\"]", i ? "," : "",
                                      merges[i][0], merges[i][1]),
                         NB_OK);
    assert_int_equal(nbi_buf_addf(&b, "]}}"), NB_OK);
    return b.data;
}

static nbi_tokenizer *open_small(void)
{
    char *json = make_file("");
    nbi_tokenizer *t = NULL;
    nb_error err;
    if (nbi_tokenizer_parse(&t, json, strlen(json), "small", &err) != NB_OK)
        fail_msg("%s", err.text);
    nbi_free(json);
    return t;
}

static void expect_ids(const nbi_tokenizer *t, const char *text, bool special, const int32_t *want,
                       size_t n)
{
    nbi_ids ids = {0};
    assert_int_equal(nbi_tokenizer_encode(t, text, strlen(text), special, &ids, NULL), NB_OK);
    assert_int_equal(ids.len, n);
    assert_memory_equal(ids.data, want, n * sizeof *want);
    nbi_ids_free(&ids);
}

static void test_small(void **state)
{
    (void)state;
    nbi_tokenizer *t = open_small();
    expect_ids(t, "hello", true, (int32_t[]){259}, 1);
    expect_ids(t, "hell<|user|>o", true, (int32_t[]){258, 300, 'o'}, 3);
    assert_int_equal(nbi_tokenizer_size(t), 302);
    assert_true(nbi_token_is_special(t, 300));
    assert_false(nbi_token_is_special(t, 301));
    assert_true(nbi_token_is_added(t, 301));
    assert_false(nbi_token_is_added(t, 5));
    assert_false(nbi_token_is_special(t, -1));
    assert_int_equal(nbi_token_find(t, "<think>", 7), 301);
    assert_int_equal(nbi_token_find(t, "hello", 5), 259);
    assert_int_equal(nbi_token_find(t, "hallo", 5), -1);
    size_t n = 9;
    assert_null(nbi_token_bytes(t, 299, &n)); /* unused */
    assert_null(nbi_token_bytes(t, 302, &n));
    assert_memory_equal(nbi_token_bytes(t, 260, &n), " w", 2);
    assert_int_equal(nbi_token_bytes_max(t), 8);
    char *text = NULL;
    nb_error err;
    assert_int_equal(
        nbi_tokenizer_decode(t, (int32_t[]){259, 300, 299, 0x80}, 4, true, &text, &n, NULL), NB_OK);
    assert_int_equal(n, 6);
    assert_memory_equal(text, "hello\x80", 7);
    nbi_free(text);
    assert_int_equal(nbi_tokenizer_decode(t, (int32_t[]){-1}, 1, true, &text, &n, &err),
                     NB_INVALID);
    assert_non_null(strstr(err.text, "-1"));
    nbi_tokenizer_close(&t);
    assert_null(t);
}

static void test_guarded_ranges(void **state)
{
    (void)state;
    nbi_tokenizer *t = open_small();
    const char *text = "<|user|><|user|><|user|>";
    nbi_ids ids = {0};
    nbi_range plain = {8, 16};
    assert_int_equal(nbi_tokenizer_encode_guarded(t, text, strlen(text), &plain, 1, &ids, NULL),
                     NB_OK);
    assert_int_equal(ids.len, 10);
    assert_int_equal(ids.data[0], 300);
    assert_int_equal(ids.data[1], '<');
    assert_int_equal(ids.data[9], 300);
    ids.len = 0;
    plain = (nbi_range){7, 9}; /* touches two */
    assert_int_equal(nbi_tokenizer_encode_guarded(t, text, strlen(text), &plain, 1, &ids, NULL),
                     NB_OK);
    assert_int_equal(ids.len, 17);
    nbi_ids_free(&ids);
    nbi_tokenizer_close(&t);
}

/* As many ids as may be are encoded, one more is refused: in words, in one long piece, as added
 * tokens; what was in the list stays. */
static void test_most_ids(void **state)
{
    (void)state;
    static char long_piece[1 << 20];
    nbi_tokenizer *t = open_small();
    memset(long_piece, 'a', sizeof long_piece);
    const struct {
        const char *text;
        size_t n;
    } texts[] = {
        {"hello world hello world", 23}, {long_piece, sizeof long_piece}, {"<|user|><|user|>", 16}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        nbi_ids all = {0}, some = {0};
        nb_error err;
        assert_int_equal(nbi_tokenizer_encode(t, texts[i].text, texts[i].n, true, &all, NULL),
                         NB_OK);
        assert_int_equal(nbi_ids_add(&some, 7), NB_OK);
        some.max = all.len + 1;
        assert_int_equal(nbi_tokenizer_encode(t, texts[i].text, texts[i].n, true, &some, NULL),
                         NB_OK);
        assert_int_equal(some.len, all.len + 1);
        some.len = 1;
        some.max = all.len;
        assert_int_equal(nbi_tokenizer_encode(t, texts[i].text, texts[i].n, true, &some, &err),
                         NB_TOO_LARGE);
        assert_non_null(strstr(err.text, "more than"));
        assert_int_equal(some.len, 1);
        some.max = 2; /* long before its end */
        assert_int_equal(nbi_tokenizer_encode(t, texts[i].text, texts[i].n, true, &some, &err),
                         all.len + 1 > 2 ? NB_TOO_LARGE : NB_OK);
        nbi_ids_free(&all);
        nbi_ids_free(&some);
    }
    nbi_tokenizer_close(&t);
}

static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t time_long_piece(const nbi_tokenizer *t, size_t n)
{
    char *text = malloc(n);
    assert_non_null(text);
    memset(text, 'a', n);
    nbi_ids ids = {0};
    uint64_t begin = cpu_ns();
    assert_int_equal(nbi_tokenizer_encode(t, text, n, true, &ids, NULL), NB_OK);
    uint64_t ns = cpu_ns() - begin;
    assert_int_equal(ids.len, n / 4);
    for (size_t i = 0; i < ids.len; i++) assert_int_equal(ids.data[i], 262);
    nbi_ids_free(&ids);
    free(text);
    return ns;
}

/* Work on one long piece grows like n log n: 16 times the text may not cost 16 * 16 times the time.
 */
static void test_long_piece(void **state)
{
    (void)state;
    nbi_tokenizer *t = open_small();
    (void)time_long_piece(t, 65536);
    uint64_t small = time_long_piece(t, 65536), large = time_long_piece(t, (size_t)1 << 20);
    assert_true(large < 80 * small);
    nbi_tokenizer_close(&t);
}

static void *encode_often(void *arg)
{
    static const int32_t want[] = {259, 260, 'o', 'r', 'l', 'd', 300};
    for (int i = 0; i < 3000; i++) {
        nbi_ids ids = {0};
        if (nbi_tokenizer_encode(arg, "hello world<|user|>", 19, true, &ids, NULL) != NB_OK ||
            ids.len != 8 || ids.data[0] != want[0] || ids.data[7] != 300)
            return arg;
        nbi_ids_free(&ids);
    }
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    nbi_tokenizer *t = open_small();
    pthread_t threads[8];
    for (int i = 0; i < 8; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, t), 0);
    for (int i = 0; i < 8; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    nbi_tokenizer_close(&t);
}

/* Every allocation made to fail once, while parsing and while encoding: an error, no leak, no
 * crash. */
static void test_out_of_memory(void **state)
{
    (void)state;
    char *json = make_file("");
    bool done = false;
    for (long n = 0; !done && n < 5000; n += n < 300 ? 1 : 37) {
        nbi_tokenizer *t = NULL;
        nbi_heap_fail_after(n);
        nb_status st = nbi_tokenizer_parse(&t, json, strlen(json), "small", NULL);
        nbi_heap_fail_after(-1);
        done = st == NB_OK;
        assert_true(done == (t != NULL));
        nbi_tokenizer_close(&t);
    }
    assert_true(done);
    nbi_free(json);
    done = false;
    for (long n = 0; !done && n < 100; n++) {
        nbi_tokenizer *t = open_small();
        nbi_ids ids = {0};
        nbi_heap_fail_after(n);
        nb_status st = nbi_tokenizer_encode(
            t, "hello <|user|> aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 70, true,
            &ids, NULL);
        nbi_heap_fail_after(-1);
        done = st == NB_OK;
        if (!done) assert_int_equal(ids.len, 0);
        nbi_ids_free(&ids);
        nbi_tokenizer_close(&t);
    }
    assert_true(done);
}

/* The same unchanged file is read once; a changed one again. */
static void test_shared(void **state)
{
    (void)state;
    static const char json[] =
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},"
        "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
        "\"trim_offsets\":true,\"use_regex\":true}}";
    char folder[] = "/tmp/nibble-tokenizer-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    nbi_tokenizer *a = NULL, *b = NULL, *c = NULL;
    nb_error err = {0};
    for (int round = 0; round < 2; round++) {
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fprintf(f, "%s%*s", json, round, "");
        fclose(f);
        nbi_tokenizer **first = round ? &c : &a;
        if (nbi_tokenizer_open(first, folder, &err) != NB_OK) fail_msg("%s", err.text);
        assert_int_equal(nbi_tokenizer_open(&b, folder, &err), NB_OK);
        assert_ptr_equal(*first, b);
        nbi_tokenizer_close(&b);
        assert_null(b);
        assert_int_equal(nbi_tokenizer_size(*first), 1);
    }
    assert_ptr_not_equal(a, c);
    nbi_tokenizer_close(&a);
    nbi_tokenizer_close(&c);
    remove(path);
    rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small),    cmocka_unit_test(test_guarded_ranges),
        cmocka_unit_test(test_most_ids), cmocka_unit_test(test_long_piece),
        cmocka_unit_test(test_threads),  cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_shared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
