/* Tool-call parsers over any text. Byte 0 picks form, end and options, byte 1 where the text is
 * cut: whole and cut have to agree, and arguments have to be JSON objects. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "text/tool.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char tools_text[] =
    "[{\"name\":\"f\",\"parameters\":{\"properties\":{\"s\":{\"type\":\"string\"},"
    "\"i\":{\"type\":\"integer\"},\"a\":{\"type\":\"array\"},\"o\":{\"type\":\"object\"},"
    "\"n\":{\"type\":[\"string\",\"null\",\"object\"]},\"b\":{\"type\":\"boolean\"}}}}]";

static json_t *tools(void)
{
    static json_t *parsed;
    nb_error err;
    if (!parsed && nbi_json_parse(&parsed, tools_text, strlen(tools_text), "tools", &err) != NB_OK)
        abort();
    return parsed;
}

static void add(nbi_tool_answer *answer, nb_status st, const nbi_tool_item *items, size_t n)
{
    nb_error err;
    if (st != NB_OK || nbi_tool_answer_add(answer, items, n, &err) != NB_OK) abort();
}

static void run(nbi_tool_answer *answer, uint8_t mode, const char *text, size_t n, size_t cut)
{
    nbi_tool_parser *p = NULL;
    const nbi_tool_item *items = NULL;
    size_t n_items = 0;
    nb_error err;
    nbi_tool_options options = {.undeclared = mode & 16 ? NBI_TOOL_UNDECLARED_CONTENT
                                                        : NBI_TOOL_UNDECLARED_CALL,
                                .max_calls = mode & 32 ? 1 : 0,
                                .max_held = mode & 64 ? 12 : 0};
    nbi_tool_form form = (nbi_tool_form)(mode % 8 % NBI_TOOL_FORM_COUNT);
    if (nbi_tool_parser_create(&p, form, tools(), &options, &err) != NB_OK) abort();
    for (size_t at = 0; at < n; at += cut) {
        size_t len = n - at < cut ? n - at : cut;
        nb_status st = nbi_tool_parser_push(p, text + at, len, &items, &n_items, &err);
        add(answer, st, items, n_items);
    }
    nb_status st = nbi_tool_parser_finish(p, mode & 8, &items, &n_items, &err);
    add(answer, st, items, n_items);
    nbi_tool_parser_destroy(&p);
}

static void check_arguments(const nbi_buf *arguments)
{
    json_t *value = NULL;
    nb_error err;
    if (strstr(arguments->data, "\\u0000")) return; /* JSON that nibble's reader refuses */
    if (nbi_json_parse(&value, arguments->data, arguments->len, "arguments", &err) != NB_OK)
        abort();
    if (!json_is_object(value)) abort();
    json_decref(value);
}

static void check_same(const nbi_buf *a, const nbi_buf *b)
{
    if (a->len != b->len || (a->len && memcmp(a->data, b->data, a->len) != 0)) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return 0;
    const char *text = (const char *)data + 2;
    nbi_tool_answer whole = {0}, cut = {0};
    run(&whole, data[0], text, size - 2, size);
    run(&cut, data[0], text, size - 2, data[1] % 16 + 1u);
    check_same(&whole.content, &cut.content);
    if (whole.n_calls != cut.n_calls) abort();
    for (size_t i = 0; i < whole.n_calls; i++) {
        check_arguments(&whole.calls[i].arguments);
        check_same(&whole.calls[i].arguments, &cut.calls[i].arguments);
        if (strcmp(whole.calls[i].name, cut.calls[i].name) != 0) abort();
        if (whole.calls[i].complete != cut.calls[i].complete) abort();
    }
    nbi_tool_answer_free(&whole);
    nbi_tool_answer_free(&cut);
    return 0;
}
