/* JSON access: limits, error sentences, members, quoting. */
#include "cmocka_all.h"

#include <stdio.h>
#include <string.h>

#include "base/json.h"

static nb_error err;

static json_t *parsed(const char *text)
{
    json_t *value = NULL;
    if (nbi_json_parse(&value, text, strlen(text), "doc", &err) != NB_OK) fail_msg("%s", err.text);
    return value;
}

static void refused(const char *text, size_t n, const char *part)
{
    json_t *value = (json_t *)&err;
    memset(&err, 0, sizeof err);
    assert_int_equal(nbi_json_parse(&value, text, n, "doc", &err), NB_INVALID);
    assert_ptr_equal(value, &err);
    if (strncmp(err.text, "doc: ", 5) != 0 || !strstr(err.text, part)) {
        fail_msg("\"%s\" does not name \"%s\"", err.text, part);
    }
}

static void wrong_documents_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"", "line 1"},
        {"{", "line 1"},
        {"{\"a\": 1,\n \"a\": 2}", "duplicate"},
        {"{\"a\": 1} x", "end of file"},
        {"[1,]", "column"},
        {"{\"a\": NaN}", "invalid token"},
        {"\"\xff\"", "unable to decode byte 0xff"},
        {"\"\xed\xa0\x80\"", "unable to decode byte 0xed"},
        {"\"\\ud800\"", "Unicode"},
        {"\"a\\u0000b\"", "NUL"},
        {"[1e999]", "overflow"},
        {"\"open", "line 1"},
        {"\"open\\", "line 1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        refused(cases[i].text, strlen(cases[i].text), cases[i].part);
    }
    refused("{}\0", 3, "end of file");
}

static void depth_is_limited(void **state)
{
    (void)state;
    char text[3 * NBI_JSON_DEPTH + 8];
    memset(text, '[', NBI_JSON_DEPTH + 1);
    memset(text + NBI_JSON_DEPTH + 1, ']', NBI_JSON_DEPTH + 1);
    refused(text, 2 * NBI_JSON_DEPTH + 2, "128 levels");
    json_t *value = NULL;
    assert_int_equal(nbi_json_parse(&value, text + 1, 2 * NBI_JSON_DEPTH, "doc", &err), NB_OK);
    json_decref(value);
    /* Brackets in strings are no depth. */
    memset(text, '[', sizeof text);
    text[0] = text[sizeof text - 1] = '"';
    assert_int_equal(nbi_json_parse(&value, text, sizeof text, "doc", &err), NB_OK);
    json_decref(value);
}

/* Legal JSON that jansson alone refuses, and found in published tokenizer configurations. */
static void integers_beyond_64_bits_are_reals(void **state)
{
    (void)state;
    json_t *v =
        parsed("{\"model_max_length\": 1000000000000000019884624838656, \"n\": 7, "
               "\"m\": [-9223372036854775808, 9223372036854775807, -9223372036854775809], "
               "\"s\": \"1000000000000000019884624838656\", \"r\": 1000000000000000000000.5}");
    double d = 0;
    assert_int_equal(nbi_json_f64(&d, v, "model_max_length", "doc", &err), NB_OK);
    assert_true(d == 1e30);
    assert_true(json_is_integer(json_object_get(v, "n")));
    const json_t *m = json_object_get(v, "m");
    assert_true(json_integer_value(json_array_get(m, 0)) == INT64_MIN);
    assert_true(json_integer_value(json_array_get(m, 1)) == INT64_MAX);
    assert_true(json_is_real(json_array_get(m, 2)));
    const char *s = NULL;
    assert_int_equal(nbi_json_str(&s, v, "s", "doc", &err), NB_OK);
    assert_string_equal(s, "1000000000000000019884624838656");
    json_decref(v);
}

static void members_are_typed(void **state)
{
    (void)state;
    json_t *v = parsed("{\"u\": 4294967295, \"f\": 1.5, \"w\": 40.0, \"b\": true, \"s\": \"x\", "
                       "\"null\": null, \"neg\": -1, \"big\": 4294967296, \"o\": {}, \"a\": []}");
    uint32_t u = 11;
    double f = 12;
    bool b = false;
    const char *s = "keep";
    assert_int_equal(nbi_json_u32(&u, v, "u", "doc", &err), NB_OK);
    assert_int_equal(u, UINT32_MAX);
    assert_int_equal(nbi_json_u32(&u, v, "w", "doc", &err), NB_OK);
    assert_int_equal(u, 40);
    assert_int_equal(nbi_json_f64(&f, v, "f", "doc", &err), NB_OK);
    assert_true(f == 1.5);
    assert_int_equal(nbi_json_f64(&f, v, "u", "doc", &err), NB_OK);
    assert_true(f == 4294967295.0);
    assert_int_equal(nbi_json_bool(&b, v, "b", "doc", &err), NB_OK);
    assert_true(b);
    /* Absent and null: as it was. */
    static const char *const absent[] = {"null", "nothing"};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(nbi_json_u32(&u, v, absent[i], "doc", &err), NB_OK);
        assert_int_equal(nbi_json_f64(&f, v, absent[i], "doc", &err), NB_OK);
        assert_int_equal(nbi_json_bool(&b, v, absent[i], "doc", &err), NB_OK);
        assert_int_equal(nbi_json_str(&s, v, absent[i], "doc", &err), NB_OK);
    }
    assert_int_equal(u, 40);
    assert_string_equal(s, "keep");
    static const char *const not_u32[] = {"neg", "big", "f", "s", "b", "o", "a"};
    for (size_t i = 0; i < sizeof not_u32 / sizeof *not_u32; i++) {
        assert_int_equal(nbi_json_u32(&u, v, not_u32[i], "doc", &err), NB_INVALID);
        assert_int_equal(u, 40);
        char key[16];
        snprintf(key, sizeof key, "\"%s\"", not_u32[i]);
        assert_non_null(strstr(err.text, key));
        assert_non_null(strstr(err.text, "expected"));
    }
    assert_int_equal(nbi_json_f64(&f, v, "s", "doc", &err), NB_INVALID);
    assert_string_equal(err.text, "doc: \"s\" is a string, expected a number");
    assert_int_equal(nbi_json_bool(&b, v, "u", "doc", &err), NB_INVALID);
    assert_string_equal(err.text, "doc: \"u\" is an integer, expected a boolean");
    assert_int_equal(nbi_json_str(&s, v, "a", "doc", &err), NB_INVALID);
    assert_string_equal(err.text, "doc: \"a\" is an array, expected a string");
    json_decref(v);
}

static void quoted_parses_back(void **state)
{
    (void)state;
    char all[128];
    for (int i = 1; i < 128; i++) all[i - 1] = (char)i;
    nbi_buf buf = {0};
    assert_int_equal(nbi_json_quote(&buf, all, 127), NB_OK);
    json_t *v = NULL;
    assert_int_equal(nbi_json_parse(&v, buf.data, buf.len, "doc", &err), NB_OK);
    assert_int_equal(json_string_length(v), 127);
    assert_memory_equal(json_string_value(v), all, 127);
    json_decref(v);
    nbi_buf_clear(&buf);
    static const struct {
        const char *in;
        size_t n;
        const char *out;
    } cases[] = {
        {"", 0, "\"\""},
        {"a\0b", 3, "\"a\\u0000b\""},
        {"\"\\/\n", 4, "\"\\\"\\\\/\\n\""},
        {"\xe2\x82\xac\xf0\x9f\x98\x80", 7, "\"\xe2\x82\xac\xf0\x9f\x98\x80\""},
        {"\xff", 1, "\"\xef\xbf\xbd\""},
        {"a\xe2\x82", 3, "\"a\xef\xbf\xbd\""},
        {"\xe2\x82z\xc0\xaf", 5, "\"\xef\xbf\xbdz\xef\xbf\xbd\xef\xbf\xbd\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(nbi_json_quote(&buf, cases[i].in, cases[i].n), NB_OK);
        assert_string_equal(buf.data, cases[i].out);
        nbi_buf_clear(&buf);
    }
    nbi_buf_free(&buf);
    nbi_buf small = {.max = 6};
    assert_int_equal(nbi_buf_add(&small, "ab", 2), NB_OK);
    assert_int_equal(nbi_json_quote(&small, "xyz", 3), NB_TOO_LARGE);
    assert_string_equal(small.data, "ab");
    assert_int_equal(nbi_json_quote(&small, "xy", 2), NB_OK);
    assert_string_equal(small.data, "ab\"xy\"");
    nbi_buf_free(&small);
}

/* The same of writing: no text with a hole in it. */
static void dumping_without_memory(void **state)
{
    (void)state;
    const char *text =
        "{\"a\":[1,\"\\u20ac and more than a few bytes\"],\"another key\":{\"b\":null}}";
    json_t *v = NULL;
    char *right, *s = NULL;
    assert_int_equal(nbi_json_parse(&v, text, strlen(text), "doc", &err), NB_OK);
    right = nbi_json_dumps(v);
    assert_non_null(right);
    for (long n = 0; n < 50 && !s; n++) {
        nbi_heap_fail_after(n);
        s = nbi_json_dumps(v);
        nbi_heap_fail_after(-1);
        assert_true(n > 0 || !s);
    }
    assert_non_null(s);
    assert_string_equal(s, right);
    nbi_free(s);
    nbi_free(right);
    json_decref(v);
}

/* Every allocation of a parse made to fail in turn. */
static void parsing_without_memory(void **state)
{
    (void)state;
    /* jansson stops the process where the buffer of a token cannot grow */
    const char *text =
        "{\"a\": [1, 2.5, \"text\", {\"b\": 1000000000000000019884624838656}], "
        "\"a key that is not short, and \\u20ac\": \"a string of more than a hundred "
        "bytes, so that the buffer of its token has to grow again and again and again "
        "and again and again and again\", \"c\": [[1],[2],[3],[4],[5],[6],[7],[8],[9]]}";
    bool ok = false;
    for (long n = 0; n < 200 && !ok; n++) {
        json_t *v = NULL;
        nbi_heap_fail_after(n);
        nb_status st = nbi_json_parse(&v, text, strlen(text), "doc", &err);
        nbi_heap_fail_after(-1);
        ok = st == NB_OK;
        if (ok) {
            json_decref(v);
        } else {
            assert_int_equal(st, NB_NO_MEMORY);
            assert_null(v);
            assert_true(err.text[0] != '\0');
        }
    }
    assert_true(ok);
}

static void files_are_loaded_by_name(void **state)
{
    (void)state;
    json_t *v = NULL;
    assert_int_equal(nbi_json_load(&v, "CMakePresets.json", 1 << 20, &err), NB_OK);
    assert_true(json_is_object(v));
    json_decref(v);
    assert_int_equal(nbi_json_load(&v, "CMakeLists.txt", 1 << 20, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "CMakeLists.txt: line 1"));
    assert_int_equal(nbi_json_load(&v, "no-such.json", 1 << 20, &err), NB_NOT_FOUND);
}

static void test_mend(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"\\ud83d", "\\ufffd"},
        {"\\ude42x\\ud83d", "\\ufffdx\\ufffd"},
        {"\\ud83d\\ude42", "\\ud83d\\ude42"},
        {"\\ud83d\\ud83d\\ude42", "\\ufffd\\ud83d\\ude42"},
        {"a\\u0000\\U0000", "a\\ufffd\\U0000"},
        {"\\\\u0000\\\\\\u0000", "\\\\u0000\\\\\\ufffd"},
        {"\\ud83d\\u0000", "\\ufffd\\ufffd"},
        {"\\u000", "\\u000"},
        {"\\", "\\"},
        {"", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[64];
        snprintf(text, sizeof text, "%s", cases[i][0]);
        nbi_json_mend(text, strlen(text));
        assert_string_equal(text, cases[i][1]);
    }
    json_t *root = NULL;
    assert_int_equal(nbi_json_parse_mended(&root, "[\"\\u0000\"]", 10, "x", NULL), NB_OK);
    assert_string_equal(json_string_value(json_array_get(root, 0)), "\xef\xbf\xbd");
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_documents_are_refused),
        cmocka_unit_test(depth_is_limited),
        cmocka_unit_test(integers_beyond_64_bits_are_reals),
        cmocka_unit_test(members_are_typed),
        cmocka_unit_test(quoted_parses_back),
        cmocka_unit_test(parsing_without_memory),
        cmocka_unit_test(dumping_without_memory),
        cmocka_unit_test(files_are_loaded_by_name),
        cmocka_unit_test(test_mend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
