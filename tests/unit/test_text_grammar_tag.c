/* Structural tags (text/grammar_tag.h) with the real library: what each format lets through,
 * byte by byte and in the tokens of a real tokenizer; ends, added tokens, refusals. */
#include "cmocka_all.h"

#include <string.h>

#include "base/mem.h"
#include "text/grammar.h"

static nbi_tokenizer *tokenizer;
static nbi_grammar_compiler *compiler;
static int32_t eos;

static int set_up(void **state)
{
    (void)state;
    nb_error err = {.status = NB_OK};
    if (nbi_tokenizer_open(&tokenizer, NBI_TEST_SOURCE_DIR "/models/glm5-tiny", &err) != NB_OK)
        fail_msg("%s", err.text);
    eos = nbi_token_find(tokenizer, "<|user|>", 8);
    nbi_grammar_setup setup = {
        .tokenizer = tokenizer, .eos = &eos, .n_eos = 1, .folder = NBI_TEST_GRAMMAR_FOLDER};
    return nbi_grammar_compiler_open(&compiler, &setup, NULL);
}

static int tear_down(void **state)
{
    (void)state;
    nbi_grammar_compiler_close(&compiler);
    nbi_tokenizer_close(&tokenizer);
    return 0;
}

/* ---------------------------------------------------------------- feeding */

enum { REFUSED = -1, OPEN, COMPLETE };

typedef enum spelling { BYTES, WORDS, ADDED } spelling; /* ADDED: with added tokens */

static nbi_grammar *compiled(const char *source, const nbi_grammar_options *options)
{
    nbi_grammar *g = NULL;
    nb_error err = {.status = NB_OK};
    if (nbi_grammar_compile(&g, compiler, NBI_GRAMMAR_TAG, source, strlen(source), options, &err) !=
        NB_OK)
        fail_msg("%s\n%s", err.text, source);
    return g;
}

static bool is_allowed(nbi_grammar *g, int32_t id)
{
    uint32_t bits[128] = {0};
    nb_grammar hooks = nbi_grammar_hooks(g);
    hooks.mask(hooks.user, bits, sizeof bits / sizeof *bits);
    return bits[id / 32] >> id % 32 & 1;
}

static int feed(nbi_grammar *g, const char *text, spelling how)
{
    nbi_ids ids = {0};
    size_t n = strlen(text);
    nb_grammar hooks = nbi_grammar_hooks(g);
    for (size_t i = 0; i < n && how == BYTES; i++)
        assert_int_equal(nbi_tokenizer_encode(tokenizer, text + i, 1, false, &ids, NULL), NB_OK);
    if (how != BYTES)
        assert_int_equal(nbi_tokenizer_encode(tokenizer, text, n, how == ADDED, &ids, NULL), NB_OK);
    int result = OPEN;
    for (size_t i = 0; i < ids.len && result == OPEN; i++) {
        if (is_allowed(g, ids.data[i]))
            hooks.accept(hooks.user, ids.data[i]);
        else
            result = REFUSED;
    }
    nbi_ids_free(&ids);
    if (result == REFUSED) return REFUSED;
    assert_null(nbi_grammar_failure(g));
    assert_int_equal(is_allowed(g, eos), nbi_grammar_complete(g));
    return nbi_grammar_complete(g) ? COMPLETE : OPEN;
}

static int fed(const char *source, const char *text, spelling how)
{
    nbi_grammar *g = compiled(source, NULL);
    int result = feed(g, text, how);
    nbi_grammar_close(&g);
    return result;
}

static void expect(const char *source, const char *text, int result)
{
    for (spelling how = BYTES; how <= WORDS; how++) {
        int found = fed(source, text, how);
        if (found != result)
            fail_msg("%d for %d, spelled %d: %s\n%s", found, result, how, text, source);
    }
}

#define FORMAT(f)    "{\"type\":\"structural_tag\",\"format\":" f "}"
#define INTEGER      "{\"type\":\"json_schema\",\"json_schema\":{\"type\":\"integer\"}}"
#define OBJECT       "{\"type\":\"json_schema\",\"json_schema\":{\"type\":\"object\"}}"
#define CONST(s)     "{\"type\":\"const_string\",\"value\":\"" s "\"}"
#define REGEX(s)     "{\"type\":\"regex\",\"pattern\":\"" s "\"}"
#define ANY          "{\"type\":\"any_text\"}"
#define TAG(b, c, e) "{\"type\":\"tag\",\"begin\":\"" b "\",\"content\":" c ",\"end\":\"" e "\"}"
#define TRIGGERED(more)                                                                        \
    "{\"type\":\"triggered_tags\",\"triggers\":[\"<f=\"],\"tags\":[" TAG(                      \
        "<f=a>", INTEGER, "</f>") "," TAG("<f=b>", OBJECT, "</f>") "," TAG("<f=c>",            \
                                                                           REGEX("[a-z/<>]*"), \
                                                                           "</f>") "]" more "}"

/* ---------------------------------------------------------------- the two forms */

static void test_structures(void **state)
{
    (void)state;
    static const char tag[] =
        "{\"type\":\"structural_tag\",\"structures\":[{\"begin\":\"<f=a>\",\"schema\":{\"type\":"
        "\"integer\"},\"end\":\"</f>\"},{\"begin\":\"<f=b>\",\"schema\":{\"type\":\"object\","
        "\"properties\":{\"x\":{\"enum\":[\"y\"]}},\"required\":[\"x\"],\"additionalProperties\":"
        "false},\"end\":\"</f>\"}],\"triggers\":[\"<f=\"]}";
    expect(tag, "", COMPLETE);
    expect(tag, "Free text, also <f and </f> and {}.\n", COMPLETE);
    expect(tag, "a <f=", OPEN);
    expect(tag, "a <f=c", REFUSED);
    expect(tag, "a <f=a>12", OPEN);
    expect(tag, "a <f=a>\"", REFUSED);
    expect(tag, "a <f=a>12</f>", COMPLETE);
    expect(tag, "a <f=a>12</f> b <f=b>{\"x\": \"y\"}</f><f=a>3</f>c <f", COMPLETE);
    expect(tag, "<f=b>{\"x\":\"z", REFUSED);
    expect(tag, "<f=b>{\"x\":\"y\"} </f>", REFUSED);
}

static void test_triggered_tags(void **state)
{
    (void)state;
    static const char tag[] = FORMAT(TRIGGERED("")),
                      first[] = FORMAT(TRIGGERED(",\"at_least_one\":true")),
                      once[] = FORMAT(TRIGGERED(",\"stop_after_first\":true")),
                      one[] = FORMAT(TRIGGERED(",\"at_least_one\":true,\"stop_after_first\":true")),
                      without[] = FORMAT(TRIGGERED(",\"excludes\":[\"STOP\",\"a.b\"]"));
    expect(tag, "x<f=a>1</f>y<f=b>{ }</f>z", COMPLETE);
    expect(tag, "x<f=c></a></f>y 1", COMPLETE); /* ends with the first end */
    expect(tag, "x<f=c>1", REFUSED);
    expect(first, "x", REFUSED);
    expect(first, "", OPEN);
    expect(first, "<f=a>1</f> and <f=a>2</f>", COMPLETE);
    expect(once, "x", COMPLETE);
    expect(once, "x<f=a>1</f>", COMPLETE);
    expect(once, "x<f=a>1</f>y", REFUSED);
    expect(one, "<f=c>a</f>", COMPLETE);
    expect(one, "<f=c>a</f>b", REFUSED);
    expect(one, "x", REFUSED);
    expect(without, "STO axb <f=a>1</f>a.", COMPLETE);
    expect(without, "a STOP", REFUSED);
    expect(without, "<f=a>1</f>a.b", REFUSED);
}

/* ---------------------------------------------------------------- formats */

static void test_values(void **state)
{
    (void)state;
    static const char grammar[] =
        FORMAT("{\"type\":\"grammar\",\"grammar\":\"root ::= \\\"(\\\" root \\\")\\\" | [0-9]\"}");
    expect(FORMAT(CONST("a/b\\n\\\"c")), "a/b\n\"c", COMPLETE);
    expect(FORMAT(CONST("a/b")), "a/bc", REFUSED);
    expect(FORMAT(REGEX("a/[/]\\\\d+\\n")), "a//12\n", COMPLETE);
    expect(FORMAT(REGEX("a|b")), "ab", REFUSED);
    expect(FORMAT(INTEGER), "-12", COMPLETE);
    expect(grammar, "((3))", COMPLETE);
    expect(grammar, "((3)", OPEN);
    expect(FORMAT(ANY), "a\nb\t<é>", COMPLETE);
    expect(FORMAT(TAG("<t>", "{\"type\":\"any_text\",\"max_chars\":3}", "</t>")), "<t>abc</t>",
           COMPLETE);
    expect(FORMAT(TAG("<t>", "{\"type\":\"any_text\",\"max_chars\":3}", "</t>")), "<t>abcd",
           REFUSED);
    expect(
        FORMAT(
            "{\"type\":\"json_schema\",\"style\":\"json\",\"json_schema\":\"{\\\"const\\\":1}\"}"),
        "1", COMPLETE);
}

static void test_compositions(void **state)
{
    (void)state;
    static const char sequence[] = FORMAT("{\"type\":\"sequence\",\"elements\":[" TAG(
        "<think>", ANY, "</think>") "," INTEGER "," CONST("!") "," TRIGGERED("") "]}");
    static const char either[] =
        FORMAT("{\"type\":\"or\",\"elements\":[" CONST("yes") "," INTEGER "," REGEX("x+") "]}");
    static const char repeats[] = FORMAT(
        "{\"type\":\"sequence\",\"elements\":[{\"type\":\"optional\","
        "\"content\":" CONST("a") "},{\"type\":\"plus\",\"content\":" TAG(
            "(", INTEGER, ")") "},{\"type\":\"star\","
                               "\"content\":" CONST("c") "},{\"type\":\"repeat\",\"min\":1,"
                                                         "\"max\":2,\"content\":" TAG(
                                                             "[", INTEGER,
                                                             "]") "},{\"type\":\"repeat\",\"min\":"
                                                                  "1,\"max\":-1,"
                                                                  "\"content\":" CONST("d") "}]}");
    expect(sequence, "<think>a < b</think>12!and <f=a>1</f>", COMPLETE);
    expect(sequence, "<think></think>1!", COMPLETE);
    expect(sequence, "<think>a</think>b", REFUSED);
    expect(sequence, "a", REFUSED);
    expect(either, "yes", COMPLETE);
    expect(either, "xxx", COMPLETE);
    expect(either, "7", COMPLETE);
    expect(either, "x7", REFUSED);
    expect(repeats, "(1)[2]d", COMPLETE);
    expect(repeats, "a(1)(2)ccc[3][4]ddd", COMPLETE);
    expect(repeats, "a[1]", REFUSED);
    expect(repeats, "(1)[1][2][3]", REFUSED);
    expect(repeats, "(1)[1]", OPEN);
}

static void test_ends(void **state)
{
    (void)state;
    static const char several[] = FORMAT("{\"type\":\"tag\",\"begin\":\"<r>\",\"content\":" ANY
                                         ",\"end\":[\"</r>\",\"END\"]}");
    static const char nested[] = FORMAT("{\"type\":\"sequence\",\"elements\":[" TAG(
        "<r>", TRIGGERED(""), "</r>") "," CONST("done") "]}");
    static const char nested_once[] =
        FORMAT(TAG("<r>", TRIGGERED(",\"stop_after_first\":true"), "</r>"));
    static const char no_end[] = FORMAT(TAG("Answer: ", ANY, ""));
    expect(several, "<r>a </r", OPEN);
    expect(several, "<r>a </r>", COMPLETE);
    expect(several, "<r>a EN END", COMPLETE);
    expect(several, "<r>a END ", REFUSED);
    expect(nested, "<r>x<f=b>{\"</r>\":1}</f>y</r>done", COMPLETE);
    expect(nested, "<r></r>done", COMPLETE);
    expect(nested, "<r></r>x", REFUSED);
    expect(nested_once, "<r>x<f=a>1</f></r>", COMPLETE);
    expect(nested_once, "<r>x<f=a>1</f> ", REFUSED);
    expect(nested_once, "<r>x</r>", COMPLETE);
    expect(no_end, "Answer: anything </r>", COMPLETE);
    expect(no_end, "answer", REFUSED);
}

static void test_lists_and_dispatch(void **state)
{
    (void)state;
#define LIST(more)                                                                  \
    FORMAT("{\"type\":\"tags_with_separator\",\"separator\":\", \",\"tags\":[" TAG( \
        "<i>", INTEGER, "</i>") "," TAG("<s>", REGEX("[a-z]+"), "</s>") "]" more "}")
#define DISPATCH(more)                                                                           \
    FORMAT("{\"type\":\"dispatch\",\"rules\":[[\"@\"," INTEGER "],[\"#x\"," CONST("y") "]]" more \
                                                                                       "}")
    expect(LIST(""), "", COMPLETE);
    expect(LIST(""), "<i>1</i>, <s>ab</s>, <i>2</i>", COMPLETE);
    expect(LIST(""), "<i>1</i>,<", REFUSED);
    expect(LIST(",\"at_least_one\":true"), "", OPEN);
    expect(LIST(",\"stop_after_first\":true"), "<i>1</i>,", REFUSED);
    expect(LIST(",\"stop_after_first\":true"), "<s>a</s>", COMPLETE);
    expect(DISPATCH(""), "a @12 b #xy @3", COMPLETE);
    expect(DISPATCH(""), "a @b", REFUSED);
    expect(DISPATCH(",\"loop\":false"), "a #xy", COMPLETE);
    expect(DISPATCH(",\"loop\":false"), "a #xyz", REFUSED);
}

/* ---------------------------------------------------------------- added tokens */

#define CALL  "<tool_call>"
#define CLOSE "</tool_call>"

static void test_added_tokens(void **state)
{
    (void)state;
    static const char json[] =
        FORMAT("{\"type\":\"triggered_tags\",\"triggers\":[\"" CALL "\"],\"tags\":[" TAG(
            CALL "a\\n", INTEGER, "\\n" CLOSE) "," TAG(CALL "b", REGEX("[a-z]*"), CLOSE) "]}");
    static const char short_trigger[] =
        FORMAT("{\"type\":\"triggered_tags\",\"triggers\":[\"<tool\"],\"tags\":[" TAG(
            CALL "a", INTEGER, CLOSE) "]}");
    static const char any[] = FORMAT(TAG("<think>", ANY, "\\n</think>"));
    for (spelling how = WORDS; how <= ADDED; how++) {
        assert_int_equal(fed(json, "x " CALL "a\n12\n" CLOSE " y " CALL "bq" CLOSE, how), COMPLETE);
        assert_int_equal(fed(json, "x " CALL "c", how), REFUSED);
        assert_int_equal(fed(json, "x " CALL "a\n12\n", how), OPEN);
        assert_int_equal(fed(short_trigger, "x " CALL "a1" CLOSE " z", how), COMPLETE);
        assert_int_equal(fed(short_trigger, "x " CALL "b", how), REFUSED);
        assert_int_equal(fed(any, "<think>a\nb\n</think>", how), COMPLETE);
    }
    assert_int_equal(fed(json, "x <arg_key>", ADDED), REFUSED); /* not one of the tag's */
    assert_int_equal(fed(json, "x " CLOSE, ADDED), REFUSED);
    assert_int_equal(fed(any, "<think>a</think>", ADDED), REFUSED); /* the line is not ended */
    assert_int_equal(fed(FORMAT(CONST("<|user|>")), "<|user|>", ADDED), REFUSED); /* ends answers */
    expect(FORMAT(CONST("<|user|>")), "<|user|>", COMPLETE);
}

static void test_token_formats(void **state)
{
    (void)state;
    static const char tag[] = FORMAT(
        "{\"type\":\"sequence\",\"elements\":[{\"type\":\"tag\",\"begin\":{\"type\":\"token\","
        "\"token\":\"<think>\"},\"content\":{\"type\":\"any_tokens\",\"exclude_tokens\":[\"<|user|>"
        "\"]},"
        "\"end\":{\"type\":\"token\",\"token\":\"</think>\"}},{\"type\":\"token_triggered_tags\","
        "\"trigger_tokens\":[\"" CALL
        "\"],\"tags\":[{\"type\":\"tag\",\"begin\":{\"type\":\"token\","
        "\"token\":\"" CALL "\"},\"content\":" INTEGER
        ",\"end\":{\"type\":\"token\",\"token\":\"" CLOSE "\"}}]}]}");
    static const char dispatch[] =
        FORMAT("{\"type\":\"token_dispatch\",\"rules\":[[\"" CALL "\"," INTEGER "]]}");
    assert_int_equal(fed(tag, "<think>a b</think>c " CALL "12" CLOSE "d", ADDED), COMPLETE);
    assert_int_equal(fed(tag, "<think>a b</think>c " CALL "x", ADDED), REFUSED);
    assert_int_equal(fed(tag, "<think>", WORDS), REFUSED);
    assert_int_equal(fed(dispatch, "a " CALL "12 b", ADDED), COMPLETE);
    assert_int_equal(fed(dispatch, "a " CALL "b", ADDED), REFUSED);
}

/* The grammar's own tokens open neither thinking nor calls that nothing binds. */
static void test_own_tokens_come_first(void **state)
{
    (void)state;
    static const char calls[] = FORMAT("{\"type\":\"triggered_tags\",\"triggers\":[\"" CALL
                                       "\"],\"tags\":[" TAG(CALL "a", INTEGER, CLOSE) "]}");
    const int32_t call = nbi_token_find(tokenizer, CALL, strlen(CALL)),
                  think = nbi_token_find(tokenizer, "<think>", 7),
                  close = nbi_token_find(tokenizer, "</think>", 8);
    nbi_grammar_options o = {.after_think = close,
                             .may_think = true,
                             .think_begin = think,
                             .may_call = true,
                             .call_begin = call};
    nbi_grammar *g = compiled(calls, &o);
    assert_int_equal(feed(g, CALL "x", ADDED), REFUSED);
    nbi_grammar_close(&g);
    g = compiled(calls, &o);
    assert_int_equal(feed(g, "<think>" CALL, ADDED), REFUSED); /* not in the thinking */
    assert_int_equal(feed(g, "no</think>a " CALL "a1" CLOSE, ADDED), COMPLETE);
    nbi_grammar_close(&g);
    g = compiled(FORMAT(TAG("<think>", INTEGER, "</think>")), &o);
    assert_int_equal(feed(g, "<think>1</think>", ADDED), COMPLETE);
    nbi_grammar_close(&g);
    g = compiled(FORMAT(ANY), &o); /* others: a call in place of the text */
    assert_int_equal(feed(g, CALL "x", ADDED), COMPLETE);
    nbi_grammar_close(&g);
}

static void test_rollback(void **state)
{
    (void)state;
    static const char tag[] = FORMAT("{\"type\":\"triggered_tags\",\"triggers\":[\"" CALL
                                     "\"],\"tags\":[" TAG(CALL "a", INTEGER, CLOSE) "]}");
    const int32_t call = nbi_token_find(tokenizer, CALL, strlen(CALL)),
                  a = nbi_token_find(tokenizer, "a", 1), b = nbi_token_find(tokenizer, "b", 1);
    nbi_grammar *g = compiled(tag, NULL);
    nb_grammar hooks = nbi_grammar_hooks(g);
    for (int i = 0; i < 3; i++) {
        assert_true(is_allowed(g, call) && is_allowed(g, b));
        hooks.accept(hooks.user, call);
        assert_true(is_allowed(g, a) && !is_allowed(g, b));
        hooks.accept(hooks.user, a);
        assert_false(is_allowed(g, a));
        hooks.rollback(hooks.user, 2);
    }
    assert_int_equal(feed(g, "x " CALL "a1" CLOSE, ADDED), COMPLETE);
    nbi_grammar_close(&g);
}

/* ---------------------------------------------------------------- refusals and bounds */

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *source;
        nb_status status;
        const char *words;
    } cases[] = {
        {"[]", NB_INVALID, "must be an object"},
        {"{\"type\":\"x\",\"format\":{}}", NB_INVALID, "\"structural_tag\""},
        {"{}", NB_INVALID, "\"format\" is missing"},
        {"{\"a\":", NB_INVALID, "the structural tag"},
        {FORMAT("{\"type\":\"exclude_token\"}"), NB_UNSUPPORTED,
         "format: the format \"exclude_token\""},
        {FORMAT("{\"type\":\"any_text\",\"max_tokens\":3}"), NB_UNSUPPORTED, "\"max_tokens\""},
        {FORMAT("{\"type\":\"json_schema\",\"json_schema\":{},\"style\":\"glm_xml\"}"),
         NB_UNSUPPORTED, "style"},
        {FORMAT("{\"type\":\"json_schema\",\"json_schema\":{},\"any_order\":true}"), NB_UNSUPPORTED,
         "any_order"},
        {FORMAT("{\"type\":\"json_schema\",\"json_schema\":false}"), NB_INVALID,
         "format.json_schema: the schema is false"},
        {FORMAT("{\"type\":\"json_schema\",\"json_schema\":{\"not\":{}}}"), NB_UNSUPPORTED, "not"},
        {FORMAT("{\"type\":\"json_schema\"}"), NB_INVALID, "is missing"},
        {FORMAT("{\"type\":\"regex\",\"pattern\":\"(\"}"), NB_INVALID, "unclosed"},
        {FORMAT("{\"type\":\"grammar\",\"grammar\":\"a ::= b\"}"), NB_INVALID,
         "format.grammar: the grammar has no rule"},
        {FORMAT("{\"type\":\"sequence\",\"elements\":[" ANY "," CONST("x") "]}"), NB_UNSUPPORTED,
         "format.elements[0]: free text"},
        {FORMAT("{\"type\":\"or\",\"elements\":[" CONST("x") "," ANY "]}"), NB_UNSUPPORTED,
         "format.elements[1]"},
        {FORMAT("{\"type\":\"star\",\"content\":" ANY "}"), NB_UNSUPPORTED, "format.content"},
        {FORMAT("{\"type\":\"sequence\",\"elements\":[]}"), NB_INVALID, "elements"},
        {FORMAT("{\"type\":\"repeat\",\"min\":3,\"max\":2,\"content\":" ANY "}"), NB_INVALID,
         "max"},
        {FORMAT("{\"type\":\"token\",\"token\":\"the\"}"), NB_UNSUPPORTED, "added token"},
        {FORMAT("{\"type\":\"token\",\"token\":\"<|user|>\"}"), NB_UNSUPPORTED, "added token"},
        {FORMAT("{\"type\":\"any_tokens\",\"exclude_tokens\":[65]}"), NB_UNSUPPORTED,
         "exclude_tokens[0]"},
        {FORMAT("{\"type\":\"triggered_tags\",\"triggers\":[\"<g\"],\"tags\":[" TAG("<f>", INTEGER,
                                                                                    "") "]}"),
         NB_INVALID, "format.tags[0]: \"begin\" begins with no trigger"},
        {FORMAT("{\"type\":\"triggered_tags\",\"triggers\":[\"<\",\"<f\"],\"tags\":[" TAG(
             "<f>", INTEGER, "") "]}"),
         NB_INVALID, "several triggers"},
        {FORMAT("{\"type\":\"triggered_tags\",\"triggers\":[\"\"],\"tags\":[" TAG("<f>", INTEGER,
                                                                                  "") "]}"),
         NB_INVALID, "format.triggers[0]: is empty"},
        {FORMAT("{\"type\":\"triggered_tags\",\"triggers\":[\"<f\"],\"tags\":[" TAG("<f>", ANY,
                                                                                    "") "]}"),
         NB_UNSUPPORTED, "end"},
        {"{\"structures\":[{\"begin\":\"<a>\",\"end\":\"\"}],\"triggers\":[\"<\"]}", NB_INVALID,
         "structures[0].schema: is missing"},
        {"{\"structures\":[{\"begin\":\"<a>\",\"schema\":{},\"end\":\"\"}],\"triggers\":[\"b\"]}",
         NB_INVALID, "structures[0]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nbi_grammar *g = NULL;
        nb_error err = {.status = NB_OK};
        nb_status st = nbi_grammar_compile(&g, compiler, NBI_GRAMMAR_TAG, cases[i].source,
                                           strlen(cases[i].source), NULL, &err);
        if (st != cases[i].status || !strstr(err.text, cases[i].words))
            fail_msg("%zu: %d: %s", i, st, err.text);
    }
}

/* Formats in one another up to the limit, and one more. */
static void test_depth(void **state)
{
    (void)state;
    for (unsigned depth = 23; depth <= 24; depth++) {
        nbi_buf text = {0};
        nbi_grammar *g = NULL;
        nb_error err = {.status = NB_OK};
        assert_int_equal(nbi_buf_addf(&text, "{\"format\":"), NB_OK);
        for (unsigned i = 0; i < depth; i++)
            assert_int_equal(nbi_buf_addf(&text, "{\"type\":\"star\",\"content\":"), NB_OK);
        assert_int_equal(nbi_buf_addf(&text, INTEGER), NB_OK);
        for (unsigned i = 0; i <= depth; i++) assert_int_equal(nbi_buf_addf(&text, "}"), NB_OK);
        nb_status st =
            nbi_grammar_compile(&g, compiler, NBI_GRAMMAR_TAG, text.data, text.len, NULL, &err);
        if (st != (depth == 23 ? NB_OK : NB_TOO_LARGE)) fail_msg("%u: %s", depth, err.text);
        nbi_grammar_close(&g);
        nbi_buf_free(&text);
    }
}

/* As many tools as clients declare. */
static void test_many_tags(void **state)
{
    (void)state;
    nbi_buf text = {0};
    assert_int_equal(nbi_buf_addf(&text, "{\"triggers\":[\"" CALL "\"],\"structures\":["), NB_OK);
    for (int i = 0; i < 200; i++)
        assert_int_equal(
            nbi_buf_addf(&text,
                         "%s{\"begin\":\"" CALL "tool%d\\n\",\"end\":\"" CLOSE
                         "\",\"schema\":{\"type\":\"object\",\"properties\":{\"p%d\":{\"type\":"
                         "\"integer\"},\"s\":{\"type\":\"string\"}},\"required\":[\"p%d\"],"
                         "\"additionalProperties\":false}}",
                         i ? "," : "", i, i, i),
            NB_OK);
    assert_int_equal(nbi_buf_addf(&text, "]}"), NB_OK);
    for (spelling how = WORDS; how <= ADDED; how++) {
        assert_int_equal(fed(text.data,
                             "x" CALL "tool7\n{\"p7\": 1}" CLOSE " and " CALL
                             "tool77\n{\"p77\": 1, \"s\": \"é\"}" CLOSE,
                             how),
                         COMPLETE);
        assert_int_equal(fed(text.data, "x" CALL "tool7\n{\"p77", how), REFUSED);
    }
    nbi_buf_free(&text);
}

static void test_every_allocation_fails_once(void **state)
{
    (void)state;
    static const char tag[] = FORMAT("{\"type\":\"sequence\",\"elements\":[" TAG(
        CALL, REGEX("a+"), CLOSE) ",{\"type\":"
                                  "\"grammar\",\"grammar\":\"root ::= [0-9] root?\"}," TRIGGERED(
                                      ",\"excludes\":[\"q\"]") "]}");
    unsigned n_failed = 0;
    for (long n = 0;; n++) {
        nbi_grammar_compiler *c = NULL;
        nbi_grammar *g = NULL;
        nbi_grammar_setup setup = {
            .tokenizer = tokenizer, .eos = &eos, .n_eos = 1, .folder = NBI_TEST_GRAMMAR_FOLDER};
        nb_error err = {.status = NB_OK};
        assert_int_equal(nbi_grammar_compiler_open(&c, &setup, &err), NB_OK);
        assert_int_equal(nbi_grammar_compiler_load(c, &err), NB_OK);
        nbi_heap_fail_after(n);
        nb_status st = nbi_grammar_compile(&g, c, NBI_GRAMMAR_TAG, tag, strlen(tag), NULL, &err);
        nbi_heap_fail_after(-1);
        /* The JSON library, short of memory inside a string, speaks of wrong syntax. */
        if (st != NB_OK && st != NB_NO_MEMORY && (st != NB_INVALID || !strstr(err.text, "line")))
            fail_msg("allocation %ld: %s", n, err.text);
        n_failed += st != NB_OK;
        nbi_grammar_close(&g);
        nbi_grammar_compiler_close(&c);
        if (st == NB_OK && n > 200) break;
    }
    assert_true(n_failed > 60);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_structures),
        cmocka_unit_test(test_triggered_tags),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_compositions),
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_lists_and_dispatch),
        cmocka_unit_test(test_added_tokens),
        cmocka_unit_test(test_token_formats),
        cmocka_unit_test(test_own_tokens_come_first),
        cmocka_unit_test(test_rollback),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_depth),
        cmocka_unit_test(test_many_tags),
        cmocka_unit_test(test_every_allocation_fails_once),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
