/* Random calls, written the way each model's template writes them, cut at random, come back equal.
 */
#include "cmocka_all.h"

#include <stdio.h>
#include <string.h>

#include "text/tool.h"

static nb_error err;
static uint64_t random_state = 7;

static uint32_t random_below(uint32_t n)
{
    random_state += 0x9e3779b97f4a7c15u;
    uint64_t z = (random_state ^ random_state >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) % n);
}

static void add(nbi_buf *b, const char *text)
{
    assert_int_equal(nbi_buf_add(b, text, strlen(text)), NB_OK);
}

/* ---------------------------------------------------------------- random values */

static json_t *random_string(void)
{
    static const char *const pieces[] = {
        "a",
        "10",
        " ",
        "\n",
        "\"",
        "\\",
        "{\"x\":",
        "}",
        "</",
        "<arg_key>",
        "é",
        "北",
        "🙂",
        "null",
        "\t",
        "'",
        "</tool_call>x",
        "true",
        "```json\n",
        "<｜tool▁sep｜>",
    };
    nbi_buf b = {0};
    for (uint32_t n = random_below(12); n; n--)
        add(&b, pieces[random_below(sizeof pieces / sizeof *pieces)]);
    json_t *value = json_stringn(b.data ? b.data : "", b.len);
    nbi_buf_free(&b);
    return value;
}

static json_t *random_value(unsigned kind, unsigned depth)
{
    static const char *const keys[] = {"k", "key two", "ключ", "\"q\"", "a\\b"};
    json_t *value;
    if (depth > 3 && kind > 4) kind = 0;
    switch (kind) {
    case 0: return random_string();
    case 1: return json_integer((json_int_t)random_below(100000) - 50000);
    case 2: return json_real((double)random_below(1000) / 8 + 0.0625);
    case 3: return json_boolean(random_below(2));
    case 4: return json_null();
    case 5:
        value = json_array();
        for (uint32_t n = random_below(4); n; n--)
            json_array_append_new(value, random_value(random_below(7), depth + 1));
        return value;
    default:
        value = json_object();
        for (uint32_t n = random_below(4); n; n--)
            json_object_set_new(value, keys[random_below(5)],
                                random_value(random_below(7), depth + 1));
        return value;
    }
}

/* Parameters by kind: the tool declares them so. */
static const char *const names[] = {"s", "i", "n", "b", "z", "a", "o"};
static const char tools_text[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"rt\",\"parameters\":{\"properties\":{"
    "\"s\":{\"type\":\"string\"},\"i\":{\"type\":\"integer\"},\"n\":{\"type\":\"number\"},"
    "\"b\":{\"type\":\"boolean\"},\"z\":{\"type\":\"null\"},\"a\":{\"type\":\"array\"},"
    "\"o\":{\"type\":\"object\"}}}}}]";

static json_t *random_arguments(void)
{
    json_t *arguments = json_object();
    for (uint32_t n = random_below(6); n; n--) {
        unsigned kind = random_below(7);
        json_object_set_new(arguments, names[kind], random_value(kind, 0));
    }
    return arguments;
}

/* ---------------------------------------------------------------- the templates' spelling */

enum { GLM45, GLM47, HERMES, V3, V31, V32, ARRAY, N_STYLES };

static const nbi_tool_form forms[N_STYLES] = {
    NBI_TOOL_FORM_GLM,      NBI_TOOL_FORM_GLM,  NBI_TOOL_FORM_HERMES, NBI_TOOL_FORM_DEEPSEEK,
    NBI_TOOL_FORM_DEEPSEEK, NBI_TOOL_FORM_DSML, NBI_TOOL_FORM_JSON};

static void write_json(nbi_buf *b, const json_t *value)
{
    char *text = json_dumps(value, JSON_ENCODE_ANY); /* separators ", " and ": ", like Python's */
    add(b, text);
    nbi_free(text);
}

static void write_tagged(nbi_buf *b, int style, json_t *arguments)
{
    const char *key, *line = style == GLM45 ? "\n" : "";
    json_t *value;
    if (style == V32)
        add(b, "<｜DSML｜invoke name=\"rt\">\n");
    else
        assert_int_equal(nbi_buf_addf(b, "%s<tool_call>rt%s", line, line), NB_OK);
    json_object_foreach(arguments, key, value)
    {
        if (style == V32) {
            assert_int_equal(nbi_buf_addf(b, "<｜DSML｜parameter name=\"%s\" string=\"%s\">", key,
                                          json_is_string(value) ? "true" : "false"),
                             NB_OK);
        } else {
            assert_int_equal(nbi_buf_addf(b, "<arg_key>%s</arg_key>%s<arg_value>", key, line),
                             NB_OK);
        }
        if (json_is_string(value))
            add(b, json_string_value(value));
        else
            write_json(b, value);
        add(b, style == V32 ? "</｜DSML｜parameter>\n" : "</arg_value>");
        add(b, line);
    }
    add(b, style == V32 ? "</｜DSML｜invoke>\n" : "</tool_call>");
}

static void write_call(nbi_buf *b, int style, json_t *arguments, bool first)
{
    switch (style) {
    case HERMES:
        add(b, first ? "<tool_call>\n" : "\n<tool_call>\n");
        add(b, "{\"name\": \"rt\", \"arguments\": ");
        write_json(b, arguments);
        add(b, "}\n</tool_call>");
        break;
    case V3:
        add(b, first ? "" : "\n");
        add(b, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>rt\n```json\n");
        write_json(b, arguments);
        add(b, "\n```<｜tool▁call▁end｜>");
        break;
    case V31:
        add(b, "<｜tool▁call▁begin｜>rt<｜tool▁sep｜>");
        write_json(b, arguments);
        add(b, "<｜tool▁call▁end｜>");
        break;
    case ARRAY:
        add(b, first ? "[{\"name\": \"rt\", \"parameters\": "
                     : ", {\"name\": \"rt\", \"parameters\": ");
        write_json(b, arguments);
        add(b, "}");
        break;
    default: write_tagged(b, style, arguments);
    }
}

static void write_answer(nbi_buf *b, int style, json_t *calls, const char *content)
{
    static const char *const before[N_STYLES] = {"",
                                                 "",
                                                 "",
                                                 "<｜tool▁calls▁begin｜>",
                                                 "<｜tool▁calls▁begin｜>",
                                                 "<｜DSML｜function_calls>\n",
                                                 ""};
    static const char *const behind[N_STYLES] = {
        "", "", "", "<｜tool▁calls▁end｜>", "<｜tool▁calls▁end｜>", "</｜DSML｜function_calls>",
        "]"};
    size_t i;
    json_t *arguments;
    if (style != ARRAY) add(b, content);
    add(b, before[style]);
    json_array_foreach(calls, i, arguments) write_call(b, style, arguments, i == 0);
    add(b, behind[style]);
}

/* ---------------------------------------------------------------- the test */

static void read_answer(nbi_tool_answer *answer, nbi_tool_form form, json_t *tools,
                        const nbi_buf *text)
{
    nbi_tool_parser *p = NULL;
    const nbi_tool_item *items;
    size_t n_items;
    assert_int_equal(nbi_tool_parser_create(&p, form, tools, NULL, &err), NB_OK);
    for (size_t at = 0, len; at < text->len; at += len) {
        len = random_below(random_below(2) ? 4 : 40) + 1;
        if (len > text->len - at) len = text->len - at;
        assert_int_equal(nbi_tool_parser_push(p, text->data + at, len, &items, &n_items, &err),
                         NB_OK);
        assert_int_equal(nbi_tool_answer_add(answer, items, n_items, &err), NB_OK);
    }
    assert_int_equal(nbi_tool_parser_finish(p, true, &items, &n_items, &err), NB_OK);
    assert_int_equal(nbi_tool_answer_add(answer, items, n_items, &err), NB_OK);
    nbi_tool_parser_destroy(&p);
}

static void calls_come_back(void **state)
{
    (void)state;
    json_t *tools = NULL;
    assert_int_equal(nbi_json_parse(&tools, tools_text, strlen(tools_text), "tools", &err), NB_OK);
    for (int round = 0; round < 4000; round++) {
        int style = round % N_STYLES;
        const char *content = random_below(2) ? "Let me look < that > up." : "";
        json_t *calls = json_array();
        for (uint32_t n = random_below(3) + 1; n; n--)
            json_array_append_new(calls, random_arguments());
        nbi_buf text = {0};
        nbi_tool_answer answer = {0};
        write_answer(&text, style, calls, content);
        read_answer(&answer, forms[style], tools, &text);
        if (style == ARRAY || !content[0])
            assert_int_equal(answer.content.len, 0);
        else
            assert_string_equal(answer.content.data, content);
        assert_int_equal(answer.n_calls, json_array_size(calls));
        for (size_t i = 0; i < answer.n_calls; i++) {
            const nbi_tool_call *call = &answer.calls[i];
            json_t *got = NULL;
            assert_true(call->complete);
            assert_string_equal(call->name, "rt");
            assert_int_equal(
                nbi_json_parse(&got, call->arguments.data, call->arguments.len, "got", &err),
                NB_OK);
            if (!json_equal(got, json_array_get(calls, i)))
                fail_msg("style %d\n%s\n%s", style, text.data, call->arguments.data);
            json_decref(got);
        }
        nbi_tool_answer_free(&answer);
        nbi_buf_free(&text);
        json_decref(calls);
    }
    json_decref(tools);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(calls_come_back)};
    return cmocka_run_group_tests_name("text_tool_roundtrip", tests, NULL, NULL);
}
