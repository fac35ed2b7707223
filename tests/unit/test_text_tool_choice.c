/* tools, tool_choice and parallel_tool_calls of a request, and the schema of forced calls. */
#include "cmocka_all.h"

#include <string.h>

#include "text/tool_choice.h"

static nb_error err;

static json_t *body_of(const char *text)
{
    json_t *body = NULL;
    if (nbi_json_parse(&body, text, strlen(text), "body", &err) != NB_OK) fail_msg("%s", err.text);
    return body;
}

#define TOOLS                                                                                  \
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a\",\"parameters\":{\"type\":" \
    "\"object\",\"properties\":{\"x\":{\"$ref\":\"#/$defs/P\"}},\"$defs\":{\"P\":{\"type\":"   \
    "\"integer\"}}}}},{\"type\":\"function\",\"name\":\"b\"}]"

static void good_requests(void **state)
{
    (void)state;
    static const struct {
        const char *body;
        nbi_tool_choice_mode mode;
        const char *name;
        bool tools, parallel;
    } cases[] = {
        {"{}", NBI_TOOL_CHOICE_NONE, NULL, false, true},
        {"{\"tools\":null,\"tool_choice\":null}", NBI_TOOL_CHOICE_NONE, NULL, false, true},
        {"{\"tools\":[],\"tool_choice\":\"auto\"}", NBI_TOOL_CHOICE_NONE, NULL, false, true},
        {"{" TOOLS "}", NBI_TOOL_CHOICE_AUTO, NULL, true, true},
        {"{" TOOLS ",\"tool_choice\":\"none\"}", NBI_TOOL_CHOICE_NONE, NULL, true, true},
        {"{" TOOLS ",\"tool_choice\":\"required\",\"parallel_tool_calls\":false}",
         NBI_TOOL_CHOICE_REQUIRED, NULL, true, false},
        {"{" TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"b\"}}}",
         NBI_TOOL_CHOICE_NAMED, "b", true, true},
        {"{" TOOLS ",\"tool_choice\":{\"type\":\"function\",\"name\":\"a\"}}",
         NBI_TOOL_CHOICE_NAMED, "a", true, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *body = body_of(cases[i].body);
        nbi_tool_choice c = {0};
        char field[96];
        if (nbi_tool_choice_read(&c, body, field, &err) != NB_OK) fail_msg("%s", err.text);
        assert_string_equal(field, "");
        assert_int_equal(c.mode, cases[i].mode);
        assert_int_equal(c.tools != NULL, cases[i].tools);
        assert_int_equal(c.parallel, cases[i].parallel);
        if (cases[i].name)
            assert_string_equal(c.name, cases[i].name);
        else
            assert_null(c.name);
        assert_int_equal(nbi_tool_choice_is_forced(&c), cases[i].mode >= NBI_TOOL_CHOICE_REQUIRED);
        json_decref(body);
    }
}

static void errors_name_the_field(void **state)
{
    (void)state;
    static const struct {
        const char *body, *field, *part;
    } cases[] = {
        {"{\"tools\":{}}", "tools", "an object"},
        {"{\"tools\":[5]}", "tools[0]", "an integer"},
        {"{\"tools\":[{\"type\":\"web_search\"}]}", "tools[0].type", "web_search"},
        {"{\"tools\":[{\"type\":1}]}", "tools[0].type", "an integer"},
        {"{\"tools\":[{\"type\":\"function\"}]}", "tools[0].function", "missing"},
        {"{\"tools\":[{\"function\":[]}]}", "tools[0].function", "an array"},
        {"{\"tools\":[{\"name\":\"a\"},{\"function\":{}}]}", "tools[1].function.name", "nothing"},
        {"{\"tools\":[{\"name\":\"\"}]}", "tools[0].name", "found 0"},
        {"{\"tools\":[{\"name\":\"a\\nb\"}]}", "tools[0].name", "byte 1"},
        {"{\"tools\":[{\"function\":{\"name\":\"a\",\"parameters\":[]}}]}",
         "tools[0].function.parameters", "an array"},
        {"{\"tool_choice\":\"required\"}", "tool_choice", "needs tools"},
        {"{" TOOLS ",\"tool_choice\":\"any\"}", "tool_choice", "\"any\""},
        {"{" TOOLS ",\"tool_choice\":7}", "tool_choice", "an integer"},
        {"{" TOOLS ",\"tool_choice\":{}}", "tool_choice.type", "nothing"},
        {"{" TOOLS ",\"tool_choice\":{\"type\":\"allowed_tools\"}}", "tool_choice.type",
         "allowed_tools"},
        {"{" TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":1}}",
         "tool_choice.function", "an integer"},
        {"{" TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{}}}",
         "tool_choice.function.name", "nothing"},
        {"{" TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"z\"}}}",
         "tool_choice.function.name", "\"z\""},
        {"{\"tool_choice\":{\"type\":\"function\",\"name\":\"a\"}}", "tool_choice.name", "0 tools"},
        {"{\"parallel_tool_calls\":\"yes\"}", "parallel_tool_calls", "a string"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *body = body_of(cases[i].body);
        nbi_tool_choice c = {.mode = NBI_TOOL_CHOICE_NAMED};
        char field[96] = "";
        assert_int_equal(nbi_tool_choice_read(&c, body, field, &err), NB_INVALID);
        assert_int_equal(c.mode, NBI_TOOL_CHOICE_NAMED);
        assert_string_equal(field, cases[i].field);
        size_t n = strlen(field);
        if (strncmp(err.text, field, n) != 0 || err.text[n] != ':' ||
            !strstr(err.text, cases[i].part))
            fail_msg("\"%s\" does not say %s: ...%s", err.text, field, cases[i].part);
        json_decref(body);
    }
}

static void check_schema(const char *body_text, const char *want_text)
{
    json_t *body = body_of(body_text), *want = body_of(want_text);
    nbi_tool_choice c;
    char field[96];
    assert_int_equal(nbi_tool_choice_read(&c, body, field, &err), NB_OK);
    json_t *before = json_deep_copy(body), *schema = nbi_tool_choice_schema(&c);
    assert_non_null(schema);
    if (!json_equal(schema, want)) fail_msg("%s", json_dumps(schema, 0));
    assert_true(json_equal(body, before));
    json_decref(before);
    json_decref(schema);
    json_decref(want);
    json_decref(body);
}

#define CALL_OF(name, parameters)                                                          \
    "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"enum\":[\"" name \
    "\"]},\"parameters\":" parameters "},\"required\":[\"name\",\"parameters\"],"          \
    "\"additionalProperties\":false}"

static void schemas_of_forced_calls(void **state)
{
    (void)state;
    check_schema(
        "{" TOOLS ",\"tool_choice\":\"required\"}",
        "{\"type\":\"array\",\"minItems\":1,\"items\":{\"anyOf\":[" CALL_OF(
            "a", "{\"$ref\":\"#/$defs/tool_0\"}") "," CALL_OF("b",
                                                              "{\"type\":\"object\",\"properties\":"
                                                              "{}}") "]},\"$defs\":{\"tool_0\":{"
                                                                     "\"type\":\"object\","
                                                                     "\"properties\":{\"x\":{\"$"
                                                                     "ref\":\"#/$defs/tool_0/$defs/"
                                                                     "P\"}},"
                                                                     "\"$defs\":{\"P\":{\"type\":"
                                                                     "\"integer\"}}}}}");
    /* of one function a single call */
    check_schema("{" TOOLS ",\"tool_choice\":{\"type\":\"function\",\"name\":\"b\"}}",
                 "{\"type\":\"array\",\"minItems\":1,\"maxItems\":1,\"items\":{\"anyOf\":[" CALL_OF(
                     "b", "{\"type\":\"object\",\"properties\":{}}") "]}}");
}

static void schema_without_memory(void **state)
{
    (void)state;
    json_t *body = body_of("{" TOOLS ",\"tool_choice\":\"required\"}");
    nbi_tool_choice c;
    char field[96];
    assert_int_equal(nbi_tool_choice_read(&c, body, field, &err), NB_OK);
    for (long n = 0;; n++) {
        nbi_heap_fail_after(n);
        json_t *schema = nbi_tool_choice_schema(&c);
        nbi_heap_fail_after(-1);
        json_decref(schema);
        if (schema) break;
        assert_true(n < 1000);
    }
    json_decref(body);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_requests),
        cmocka_unit_test(errors_name_the_field),
        cmocka_unit_test(schemas_of_forced_calls),
        cmocka_unit_test(schema_without_memory),
    };
    return cmocka_run_group_tests_name("text_tool_choice", tests, NULL, NULL);
}
