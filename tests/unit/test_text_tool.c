/* Tool calls in model output: the corpus however it is cut, random mutations, bounds, options,
 * failing allocations. */
#include "cmocka_all.h"

#include <stdio.h>
#include <string.h>

#include "text/tool.h"
#include "text/tool_json.h"
#include "text/tool_schema.h"
#include "tool_corpus.h"

static nb_error err;
static json_t *tools;

static int set_up(void **state)
{
    (void)state;
    return nbi_json_parse(&tools, tool_corpus_tools, strlen(tool_corpus_tools), "tools", &err);
}

static int tear_down(void **state)
{
    (void)state;
    json_decref(tools);
    return 0;
}

static uint64_t random_state;

static uint32_t random_below(uint32_t n)
{
    random_state += 0x9e3779b97f4a7c15u;
    uint64_t z = (random_state ^ random_state >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) % n);
}

/* ---------------------------------------------------------------- running the parser */

/* Order of items, ordinals, ids: holds for every sequence. */
typedef struct order {
    bool open;
    uint32_t n_calls;
    size_t n_args;
    char last_id[NBI_TOOL_ID_SIZE];
} order;

static void check_items(order *o, const nbi_tool_item *items, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const nbi_tool_item *item = &items[i];
        if (item->kind != NBI_TOOL_END) assert_true(item->n > 0);
        if (item->kind == NBI_TOOL_CONTENT) continue;
        if (item->kind == NBI_TOOL_BEGIN) {
            assert_false(o->open);
            assert_int_equal(item->call, o->n_calls);
            assert_int_equal(strlen(item->text), item->n);
            assert_int_equal(strlen(item->id), 29);
            assert_memory_equal(item->id, "call_", 5);
            assert_int_equal(strspn(item->id + 5, "0123456789abcdef"), 24);
            assert_string_not_equal(item->id, o->last_id);
            memcpy(o->last_id, item->id, sizeof o->last_id);
            o->open = true;
            o->n_calls++;
            o->n_args = 0;
            continue;
        }
        assert_true(o->open);
        assert_int_equal(item->call, o->n_calls - 1);
        if (item->kind == NBI_TOOL_ARGS) {
            o->n_args++;
        } else {
            assert_true(o->n_args > 0);
            o->open = false;
        }
    }
}

/* Pushes text in pieces that end at cuts[0..n_cuts), ascending. */
static void run(nbi_tool_answer *answer, nbi_tool_form form, const nbi_tool_options *options,
                const char *text, size_t n, bool stopped, const size_t *cuts, size_t n_cuts)
{
    nbi_tool_parser *p = NULL;
    const nbi_tool_item *items;
    size_t n_items, at = 0;
    order o = {0};
    assert_int_equal(nbi_tool_parser_create(&p, form, tools, options, &err), NB_OK);
    for (size_t i = 0; i <= n_cuts; i++) {
        size_t end = i < n_cuts ? cuts[i] : n;
        /* An exact copy: reading beyond it must be seen. */
        char *piece = nbi_malloc(end - at ? end - at : 1);
        memcpy(piece, text + at, end - at);
        assert_int_equal(nbi_tool_parser_push(p, piece, end - at, &items, &n_items, &err), NB_OK);
        nbi_free(piece);
        check_items(&o, items, n_items);
        assert_int_equal(nbi_tool_answer_add(answer, items, n_items, &err), NB_OK);
        at = end;
    }
    assert_int_equal(nbi_tool_parser_finish(p, stopped, &items, &n_items, &err), NB_OK);
    check_items(&o, items, n_items);
    assert_int_equal(nbi_tool_answer_add(answer, items, n_items, &err), NB_OK);
    assert_false(o.open);
    assert_int_equal(nbi_tool_parser_calls(p), o.n_calls);
    nbi_tool_parser_destroy(&p);
    assert_null(p);
}

/* Content and calls as one text; arguments have to be a JSON object. */
static char *spell(const nbi_tool_answer *answer)
{
    nbi_buf b = {0};
    assert_int_equal(
        nbi_buf_add(&b, answer->content.data ? answer->content.data : "", answer->content.len),
        NB_OK);
    for (size_t i = 0; i < answer->n_calls; i++) {
        const nbi_tool_call *call = &answer->calls[i];
        json_t *value = NULL;
        /* The reader that nibble has for what clients send back; U+0000 is the one thing it
         * refuses that is JSON. */
        if (!strstr(call->arguments.data, "\\u0000") &&
            nbi_json_parse(&value, call->arguments.data, call->arguments.len, "arguments", &err) !=
                NB_OK)
            fail_msg("%s in %s", err.text, call->arguments.data);
        if (value) assert_true(json_is_object(value));
        json_decref(value);
        assert_int_equal(nbi_buf_addf(&b, " [%s %s%s]", call->name, call->arguments.data,
                                      call->complete ? "" : "..."),
                         NB_OK);
    }
    return b.data;
}

static char *run_spelled(nbi_tool_form form, const nbi_tool_options *options, const char *text,
                         size_t n, bool stopped, const size_t *cuts, size_t n_cuts)
{
    nbi_tool_answer answer = {0};
    run(&answer, form, options, text, n, stopped, cuts, n_cuts);
    char *spelled = spell(&answer);
    nbi_tool_answer_free(&answer);
    return spelled;
}

static void same(const char *got, const char *want, const char *text, const char *how)
{
    if (strcmp(got, want) != 0)
        fail_msg("%s\n  text: %s\n  got:  %s\n  want: %s", how, text, got, want);
}

/* ---------------------------------------------------------------- the corpus */

static void corpus_whole(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_tool_corpus; i++) {
        const tool_case *c = &tool_corpus[i];
        nbi_tool_answer answer = {0};
        assert_int_equal(
            nbi_tool_parse(&answer, c->form, tools, NULL, c->text, strlen(c->text), !c->cut, &err),
            NB_OK);
        char *got = spell(&answer);
        same(got, c->want, c->text, "whole");
        nbi_free(got);
        nbi_tool_answer_free(&answer);
    }
}

static void corpus_at_every_cut(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_tool_corpus; i++) {
        const tool_case *c = &tool_corpus[i];
        size_t n = strlen(c->text), all[1024];
        assert_true(n < 1024);
        for (size_t cut = 0; cut <= n; cut++) {
            char *got = run_spelled(c->form, NULL, c->text, n, !c->cut, &cut, 1);
            same(got, c->want, c->text, "two pieces");
            nbi_free(got);
            all[cut] = cut;
        }
        char *got = run_spelled(c->form, NULL, c->text, n, !c->cut, all, n + 1);
        same(got, c->want, c->text, "byte by byte");
        nbi_free(got);
    }
}

/* Every beginning of every text, cut off and stopped there. */
static void corpus_prefixes_close(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_tool_corpus; i++) {
        const tool_case *c = &tool_corpus[i];
        for (size_t n = 0; n <= strlen(c->text); n++) {
            for (int stopped = 0; stopped < 2; stopped++) {
                size_t half = n / 2;
                char *whole = run_spelled(c->form, NULL, c->text, n, stopped, NULL, 0);
                char *parts = run_spelled(c->form, NULL, c->text, n, stopped, &half, 1);
                same(parts, whole, c->text, "prefix in two pieces");
                nbi_free(whole);
                nbi_free(parts);
            }
        }
    }
}

/* ---------------------------------------------------------------- mutations */

/* Deletes, repeats, overwrites, and splices in pieces of another text. */
static size_t mutate(char *out, size_t max, const char *text)
{
    size_t n = strlen(text);
    memcpy(out, text, n);
    for (uint32_t k = random_below(6) + 1; k && n; k--) {
        const char *other = tool_corpus[random_below((uint32_t)n_tool_corpus)].text;
        size_t at = random_below((uint32_t)n), len = random_below(24) + 1, n_other = strlen(other);
        if (len > n - at) len = n - at;
        switch (random_below(4)) {
        case 0:
            memmove(out + at, out + at + len, n - at - len);
            n -= len;
            break;
        case 1:
            for (size_t i = 0; i < len; i++) out[at + i] = (char)random_below(256);
            break;
        case 2: out[at] = "<>{}[]\"'\\,: \n/0n"[random_below(16)]; break;
        default:
            if (!n_other) break;
            if (len > n_other) len = n_other;
            if (n + len > max) break;
            memmove(out + at + len, out + at, n - at);
            memcpy(out + at, other + random_below((uint32_t)(n_other - len + 1)), len);
            n += len;
        }
    }
    return n;
}

static void mutations_never_break(void **state)
{
    (void)state;
    char text[2048];
    random_state = 20260301;
    for (int round = 0; round < 10000; round++) {
        const tool_case *c = &tool_corpus[random_below((uint32_t)n_tool_corpus)];
        nbi_tool_options options = {.max_held = random_below(2) ? 0 : random_below(60) + 1};
        size_t n = mutate(text, sizeof text - 64, c->text), cuts[8], n_cuts = 0;
        bool stopped = random_below(2);
        for (size_t at = 0; n_cuts < 8; cuts[n_cuts++] = at)
            at += random_below((uint32_t)(n - at + 1));
        char *whole = run_spelled(c->form, &options, text, n, stopped, NULL, 0);
        char *parts = run_spelled(c->form, &options, text, n, stopped, cuts, n_cuts);
        text[n] = '\0';
        same(parts, whole, text, "mutation in pieces");
        nbi_free(whole);
        nbi_free(parts);
    }
}

/* ---------------------------------------------------------------- streaming, bounds, options */

typedef struct push_step {
    const char *push, *args; /* the fragments that this push gives */
} push_step;

static void check_steps(nbi_tool_form form, const push_step *steps, size_t n)
{
    nbi_tool_parser *p = NULL;
    assert_int_equal(nbi_tool_parser_create(&p, form, tools, NULL, &err), NB_OK);
    for (size_t i = 0; i < n; i++) {
        const nbi_tool_item *items;
        size_t n_items, len = strlen(steps[i].push);
        nbi_buf got = {0};
        assert_int_equal(nbi_tool_parser_push(p, steps[i].push, len, &items, &n_items, &err),
                         NB_OK);
        for (size_t k = 0; k < n_items; k++)
            if (items[k].kind == NBI_TOOL_ARGS)
                assert_int_equal(nbi_buf_add(&got, items[k].text, items[k].n), NB_OK);
        same(got.data ? got.data : "", steps[i].args, steps[i].push, "fragment");
        nbi_buf_free(&got);
    }
    nbi_tool_parser_destroy(&p);
}

/* A string leaves as it comes; a number only when it is complete. */
static void strings_stream_and_numbers_wait(void **state)
{
    (void)state;
    static const push_step glm[] = {
        {"<tool_call>weather<arg_key>city</arg_key><arg_value>Lu", "{\"city\":\"Lu"},
        {"nd", "nd"},
        {"</arg_va", ""},
        {"lue>", "\""},
        {"<arg_key>days</arg_key><arg_value>1", ""},
        {"2", ""},
        {"</arg_value>", ",\"days\":12"},
        {"</tool_call>", "}"},
    };
    static const push_step hermes[] = {
        {"<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"ci", "{"},
        {"ty\": \"Lu", "\"city\":\"Lu"},
        {"nd\\", "nd"},
        {"n\"", "\\n\""},
        {", \"days\": 1", ""},
        {"2", ""},
        {"}", ",\"days\":12}"},
        {"}\n</tool_call>", ""},
    };
    check_steps(NBI_TOOL_FORM_GLM, glm, sizeof glm / sizeof *glm);
    check_steps(NBI_TOOL_FORM_HERMES, hermes, sizeof hermes / sizeof *hermes);
}

static void values_beyond_the_bound_are_strings(void **state)
{
    (void)state;
    nbi_tool_options options = {.max_held = 8};
    static const char text[] =
        "<tool_call>lookup<arg_key>tags</arg_key><arg_value>[1, 2, 3]</arg_value>"
        "<arg_key>list</arg_key><arg_value>[1,2,34]</arg_value></tool_call>";
    for (size_t cut = 0; cut < sizeof text; cut++) {
        char *got = run_spelled(NBI_TOOL_FORM_GLM, &options, text, sizeof text - 1, true, &cut, 1);
        same(got, " [lookup {\"tags\":\"[1, 2, 3]\",\"list\":[1,2,34]}]", text, "bound");
        nbi_free(got);
    }
    static const char late[] = "<tool_call>{\"arguments\":{\"a\":1},\"name\":\"now\"}</tool_call>";
    char *got = run_spelled(NBI_TOOL_FORM_HERMES, &options, late, sizeof late - 1, true, NULL, 0);
    same(got, late, late, "late name");
    nbi_free(got);
}

static void white_space_has_a_bound(void **state)
{
    (void)state;
    for (size_t n = 255; n <= 258; n++) {
        nbi_buf text = {0}, want = {0};
        for (size_t i = 0; i < n; i++) assert_int_equal(nbi_buf_add(&text, " ", 1), NB_OK);
        if (n > 256) assert_int_equal(nbi_buf_add(&want, text.data, n), NB_OK);
        assert_int_equal(nbi_buf_addf(&text, "<tool_call>now</tool_call>"), NB_OK);
        assert_int_equal(nbi_buf_addf(&want, " [now {}]"), NB_OK);
        for (size_t cut = 0; cut <= text.len; cut++) {
            char *got = run_spelled(NBI_TOOL_FORM_GLM, NULL, text.data, text.len, true, &cut, 1);
            same(got, want.data, text.data, "white space");
            nbi_free(got);
        }
        nbi_buf_free(&text);
        nbi_buf_free(&want);
    }
}

static void options_turn_calls_into_content(void **state)
{
    (void)state;
    static const char text[] = "<tool_call>now</tool_call><tool_call>other</tool_call>"
                               "<tool_call>now</tool_call>";
    nbi_tool_options declared = {.undeclared = NBI_TOOL_UNDECLARED_CONTENT}, one = {.max_calls = 1};
    char *got = run_spelled(NBI_TOOL_FORM_GLM, &declared, text, sizeof text - 1, true, NULL, 0);
    same(got, "<tool_call>other</tool_call> [now {}] [now {}]", text, "declared only");
    nbi_free(got);
    got = run_spelled(NBI_TOOL_FORM_GLM, &one, text, sizeof text - 1, true, NULL, 0);
    same(got, "<tool_call>other</tool_call><tool_call>now</tool_call> [now {}]", text, "one call");
    nbi_free(got);
}

/* Long input stays linear: a megabyte of every kind of text byte by byte. */
static void long_values(void **state)
{
    (void)state;
    static const char *const heads[] = {"<tool_call>lookup<arg_key>q</arg_key><arg_value>",
                                        "<tool_call>lookup<arg_key>tags</arg_key><arg_value>[\"",
                                        "<tool_call>"};
    for (size_t h = 0; h < 3; h++) {
        nbi_tool_parser *p = NULL;
        const nbi_tool_item *items;
        size_t n_items;
        assert_int_equal(nbi_tool_parser_create(&p, NBI_TOOL_FORM_GLM, tools, NULL, &err), NB_OK);
        assert_int_equal(
            nbi_tool_parser_push(p, heads[h], strlen(heads[h]), &items, &n_items, &err), NB_OK);
        for (size_t i = 0; i < 1100000; i++)
            assert_int_equal(nbi_tool_parser_push(p, "<a \n" + i % 4, 1, &items, &n_items, &err),
                             NB_OK);
        assert_int_equal(nbi_tool_parser_finish(p, true, &items, &n_items, &err), NB_OK);
        nbi_tool_parser_destroy(&p);
    }
}

static void failing_allocations(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_tool_corpus; i++) {
        const tool_case *c = &tool_corpus[i];
        for (long n = 0;; n++) {
            nbi_tool_answer answer = {0};
            nbi_heap_fail_after(n);
            nb_status st = nbi_tool_parse(&answer, c->form, tools, NULL, c->text, strlen(c->text),
                                          !c->cut, &err);
            nbi_heap_fail_after(-1);
            if (st == NB_OK) {
                char *got = spell(&answer);
                same(got, c->want, c->text, "after failing allocations");
                nbi_free(got);
            } else {
                assert_int_equal(st, NB_NO_MEMORY);
            }
            nbi_tool_answer_free(&answer);
            if (st == NB_OK) break;
        }
    }
}

static void names_of_parsers(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        nbi_tool_form form;
    } known[] = {
        {"glm45", NBI_TOOL_FORM_GLM},           {"glm47", NBI_TOOL_FORM_GLM},
        {"deepseekv3", NBI_TOOL_FORM_DEEPSEEK}, {"deepseek_v31", NBI_TOOL_FORM_DEEPSEEK},
        {"deepseekv32", NBI_TOOL_FORM_DSML},    {"qwen25", NBI_TOOL_FORM_HERMES},
        {"hermes", NBI_TOOL_FORM_HERMES},       {"none", NBI_TOOL_FORM_NONE},
    };
    nbi_tool_form form = NBI_TOOL_FORM_COUNT;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        assert_int_equal(nbi_tool_form_by_name(&form, known[i].name, &err), NB_OK);
        assert_int_equal(form, known[i].form);
    }
    assert_int_equal(nbi_tool_form_by_name(&form, "mistral", &err), NB_INVALID);
    assert_non_null(strstr(err.text, "mistral"));
    assert_non_null(strstr(err.text, "deepseekv32"));
}

/* ---------------------------------------------------------------- schemas */

static unsigned kinds_in(const char *schema)
{
    nbi_buf text = {0};
    json_t *tool = NULL;
    assert_int_equal(nbi_buf_addf(&text, "{\"name\":\"f\",\"parameters\":%s}", schema), NB_OK);
    if (nbi_json_parse(&tool, text.data, text.len, "schema", &err) != NB_OK)
        fail_msg("%s", err.text);
    unsigned kinds = nbi_tool_kinds(tool, "x", 1);
    json_decref(tool);
    nbi_buf_free(&text);
    return kinds;
}

#define X(schema) kinds_in("{\"properties\":{\"x\":" schema "}}")

static void kinds_of_schemas(void **state)
{
    (void)state;
    unsigned number = NBI_TOOL_NUMBER | NBI_TOOL_INTEGER;
    assert_int_equal(X("{\"type\":\"string\"}"), NBI_TOOL_STRING);
    assert_int_equal(X("{\"type\":[\"integer\",\"null\"]}"), NBI_TOOL_INTEGER | NBI_TOOL_NULL);
    assert_int_equal(X("{\"type\":\"number\"}"), number);
    assert_int_equal(X("{\"type\":\"string\",\"nullable\":true}"), NBI_TOOL_STRING | NBI_TOOL_NULL);
    assert_int_equal(X("{\"enum\":[\"a\",1]}"), NBI_TOOL_STRING | NBI_TOOL_INTEGER);
    assert_int_equal(X("{\"const\":true}"), NBI_TOOL_BOOLEAN);
    assert_int_equal(X("{\"anyOf\":[{\"type\":\"array\"},{\"type\":\"null\"}]}"),
                     NBI_TOOL_ARRAY | NBI_TOOL_NULL);
    assert_int_equal(X("{\"oneOf\":[{\"type\":\"array\"},{}]}"), 0);
    assert_int_equal(X("{\"allOf\":[{\"type\":[\"array\",\"string\"]},{\"type\":\"array\"}]}"),
                     NBI_TOOL_ARRAY);
    assert_int_equal(X("{\"properties\":{}}"), NBI_TOOL_OBJECT);
    assert_int_equal(X("{\"items\":{}}"), NBI_TOOL_ARRAY);
    assert_int_equal(X("{\"$ref\":\"#/properties/x\"}"), 0); /* itself */
    assert_int_equal(X("{\"$ref\":\"http://a/b\"}"), 0);
    assert_int_equal(X("true"), 0);
    assert_int_equal(X("{}"), 0);
    assert_int_equal(kinds_in("{}"), 0);
    assert_int_equal(kinds_in("5"), 0);
    assert_int_equal(kinds_in("{\"additionalProperties\":{\"type\":\"integer\"}}"),
                     NBI_TOOL_INTEGER);
    assert_int_equal(kinds_in("{\"$ref\":\"#/$defs/a~1b\",\"$defs\":{\"a/b\":{\"properties\":"
                              "{\"x\":{\"$ref\":\"#/$defs/list/1\"}}},\"list\":[{},"
                              "{\"type\":\"boolean\"}]}}"),
                     NBI_TOOL_BOOLEAN);
    assert_int_equal(kinds_in("{\"allOf\":[{\"properties\":{\"y\":{}}},{\"properties\":{\"x\":"
                              "{\"type\":\"object\"}}}]}"),
                     NBI_TOOL_OBJECT);
    /* Sixteen references to sixteen references ...: bounded. */
    assert_int_equal(
        kinds_in(
            "{\"properties\":{\"x\":{\"$ref\":\"#/d\"}},\"d\":{\"anyOf\":[{\"anyOf\":["
            "{\"$ref\":\"#/d\"},{\"$ref\":\"#/d\"}]},{\"$ref\":\"#/d\"},{\"$ref\":\"#/d\"}]}}"),
        0);
}

/* ---------------------------------------------------------------- the JSON inside */

static void json_goes_deep_and_no_deeper(void **state)
{
    (void)state;
    for (int depth = NBI_TOOL_JSON_DEPTH - 1; depth <= NBI_TOOL_JSON_DEPTH + 1; depth++) {
        nbi_tool_json j = {0};
        nbi_buf text = {0}, out = {0};
        size_t used;
        bool something;
        for (int i = 0; i < depth; i++) assert_int_equal(nbi_buf_add(&text, "[", 1), NB_OK);
        nbi_tool_json_start(&j);
        assert_int_equal(nbi_tool_json_feed(&j, text.data, text.len, false, &used, &out), NB_OK);
        assert_int_equal(j.state,
                         depth > NBI_TOOL_JSON_DEPTH ? NBI_TOOL_JSON_BAD : NBI_TOOL_JSON_MORE);
        assert_int_equal(nbi_tool_json_close(&j, &out, &something), NB_OK);
        json_t *value = NULL;
        assert_int_equal(nbi_json_parse(&value, out.data, out.len, "deep", &err), NB_OK);
        json_decref(value);
        nbi_buf_free(&text);
        nbi_buf_free(&out);
        nbi_tool_json_free(&j);
    }
}

static void json_is_made_strict(void **state)
{
    (void)state;
    static const struct {
        const char *in, *out; /* NULL: refused */
    } cases[] = {
        {"{ \"a\" : [ 1 , -0.5e+3 , true ] } ", "{\"a\":[1,-0.5e+3,true]}"},
        {"{'a': 'it\\'s', 'b': \"x\"}", "{\"a\":\"it's\",\"b\":\"x\"}"},
        {"[1,2,]", "[1,2]"},
        {"{\"a\":1,}", "{\"a\":1}"},
        {"\"tab\there\\q\\u0041\\/\"", "\"tab\\there\\\\qA/\""},
        {"\"\\uD83D\\uDE42\\udc00\\uzzzz\"", "\"🙂\xef\xbf\xbd\\\\uzzzz\""},
        {"{\"\\u0061\":1,\"b\":{\"a\":2}}", "{\"a\":1,\"b\":{\"a\":2}}"},
        {"{\"\\u0061\":1,\"a\":2}", NULL},
        {"{\"a\\u0000\":1}", NULL},
        {"[,1]", NULL},
        {"[1 2]", NULL},
        {"{\"a\"}", NULL},
        {"{1:2}", NULL},
        {"[}", NULL},
        {"01", NULL},
        {"1.", NULL},
        {"-", NULL},
        {"1e400", NULL},
        {"NaN", NULL},
        {"tru", NULL},
        {"", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nbi_tool_json j = {0};
        nbi_buf out = {0};
        size_t used;
        nbi_tool_json_start(&j);
        assert_int_equal(
            nbi_tool_json_feed(&j, cases[i].in, strlen(cases[i].in), true, &used, &out), NB_OK);
        if (cases[i].out) {
            assert_int_equal(j.state, NBI_TOOL_JSON_DONE);
            same(out.data, cases[i].out, cases[i].in, "strict");
        } else if (j.state == NBI_TOOL_JSON_DONE) {
            fail_msg("%s is taken", cases[i].in);
        }
        nbi_buf_free(&out);
        nbi_tool_json_free(&j);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(corpus_whole),
        cmocka_unit_test(corpus_at_every_cut),
        cmocka_unit_test(corpus_prefixes_close),
        cmocka_unit_test(mutations_never_break),
        cmocka_unit_test(strings_stream_and_numbers_wait),
        cmocka_unit_test(values_beyond_the_bound_are_strings),
        cmocka_unit_test(white_space_has_a_bound),
        cmocka_unit_test(options_turn_calls_into_content),
        cmocka_unit_test(long_values),
        cmocka_unit_test(failing_allocations),
        cmocka_unit_test(names_of_parsers),
        cmocka_unit_test(kinds_of_schemas),
        cmocka_unit_test(json_goes_deep_and_no_deeper),
        cmocka_unit_test(json_is_made_strict),
    };
    return cmocka_run_group_tests_name("text_tool", tests, set_up, tear_down);
}
