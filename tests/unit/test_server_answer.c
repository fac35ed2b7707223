/* Answers taken apart: the same pieces however the text is cut, calls without anything between. */
#include "cmocka_all.h"

#include <string.h>

#include "server/answer.h"

#define TOOLS                                                                                   \
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\"," \
    "\"properties\":{\"n\":{\"type\":\"integer\"},\"s\":{\"type\":\"string\"}}}}}]"

typedef struct setup {
    bool inside, stopped, first_call_only, calls_only, with_tools, whole;
} setup;

static json_t *tools;

/* One letter and the text of every piece. */
static void print(nbi_buf *out, const nbi_answer *a)
{
    static const char letters[] = {[NBI_PIECE_THINKING] = 'T',
                                   [NBI_PIECE_CONTENT] = 'C',
                                   [NBI_PIECE_CALL] = 'F',
                                   [NBI_PIECE_ARGS] = 'A',
                                   [NBI_PIECE_END] = 'E'};
    for (size_t i = 0; i < a->n_pieces; i++) {
        const nbi_piece *p = &a->pieces[i];
        if (i) assert_int_not_equal(p->kind, a->pieces[i - 1].kind);
        assert_int_equal(
            nbi_buf_addf(out, "%c:%.*s|", letters[p->kind], (int)p->n, nbi_piece_text(a, p)),
            NB_OK);
    }
}

/* The pieces of a text that comes in parts of `step` bytes (0: at once), kept to the end. */
static void take_apart(nbi_buf *out, const char *text, size_t step, setup s)
{
    nbi_answer a = {0};
    nbi_reasoning splitter;
    size_t n = strlen(text);
    nbi_reasoning_init(&splitter, NBI_REASONING_GLM45, s.inside);
    nbi_tool_form form = s.calls_only ? NBI_TOOL_FORM_JSON : NBI_TOOL_FORM_GLM;
    assert_int_equal(
        nbi_answer_init(&a, form, s.with_tools ? tools : NULL, s.first_call_only, NULL), NB_OK);
    a.calls_only = s.calls_only;
    a.thinking_whole = s.whole;
    for (size_t at = 0; step && at + step < n; at += step) {
        const nb_event event = {.text = text + at, .n_text = step};
        assert_int_equal(nbi_answer_take(&a, &splitter, &event), NB_OK);
    }
    size_t rest = !step || n == 0 ? n : (n - 1) % step + 1;
    const nb_event last = {.text = text + n - rest,
                           .n_text = rest,
                           .finish = s.stopped ? NB_FINISH_STOP : NB_FINISH_LENGTH};
    assert_int_equal(nbi_answer_take(&a, &splitter, &last), NB_OK);
    print(out, &a);
    nbi_answer_free(&a);
}

static void check(const char *text, const char *want, setup s)
{
    for (size_t step = 0; step <= 2 * strlen(text) + 1; step++) {
        nbi_buf got = {0};
        s.whole = step % 2;
        take_apart(&got, text, step / 2, s);
        assert_string_equal(got.data ? got.data : "", want);
        nbi_buf_free(&got);
    }
}

static const setup usual = {.inside = true, .stopped = true, .with_tools = true};

static void test_kinds(void **state)
{
    (void)state;
    check("why</think>8", "T:why|C:8|", usual);
    check("why</think><tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>",
          "T:why|F:f|A:{\"n\":3}|E:|", usual);
    check("</think>a<tool_call>f</tool_call>b<tool_call>f<arg_key>s</arg_key><arg_value>3"
          "</arg_value></tool_call>",
          "C:a|F:f|A:{}|E:|C:b|F:f|A:{\"s\":\"3\"}|E:|", usual);
    check("", "", usual);
}

/* A call that opens inside the thinking ends it. */
static void test_call_ends_thinking(void **state)
{
    (void)state;
    check("hm<tool_call>f</tool_call>", "T:hm|F:f|A:{}|E:|", usual);
}

static void test_unclosed_thinking_is_the_answer(void **state)
{
    setup s = usual;
    (void)state;
    check("8", "T:8|C:8|", s);
    s.stopped = false;
    check("8", "T:8|", s);
}

/* A value without key is content, and stands behind the call that it was found in. */
static void test_content_inside_a_call(void **state)
{
    (void)state;
    check("</think><tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value><arg_value>9"
          "</arg_value></tool_call>!",
          "F:f|A:{\"n\":3}|E:|C:<arg_value>9</arg_value>!|", usual);
}

/* Of a list of calls that is cut nothing is content. */
static void test_calls_only(void **state)
{
    (void)state;
    setup s = usual;
    s.calls_only = true;
    check("why</think> [ {\"name\": \"f\", \"parameters\": {\"n\": 1}} , "
          "{\"name\": \"f\", \"parameters\": {}}]",
          "T:why|F:f|A:{\"n\":1}|E:|F:f|A:{}|E:|", s);
    s.stopped = false;
    check("why</think>[{\"name\": \"f\", \"parameters\": {\"n\": 1}}, {\"name\": \"f\", \"par",
          "T:why|F:f|A:{\"n\":1}|E:|", s);
    check("why</think>[{\"name\": \"f\", \"parameters\": ", "T:why|", s);
    check("why</think>[{\"name\": \"f\", \"parameters\": {\"s\": \"a",
          "T:why|F:f|A:{\"s\":\"a\"}|E:|", s);
    s.stopped = true; /* by a stop text */
    check("why</think>[{\"na", "T:why|", s);
    check("why", "T:why|", s);
}

static void test_first_call_only(void **state)
{
    setup s = usual;
    (void)state;
    s.first_call_only = true;
    check("</think><tool_call>f</tool_call><tool_call>f<arg_key>n</arg_key><arg_value>3"
          "</arg_value></tool_call>bye",
          "F:f|A:{}|E:|C:bye|", s);
}

static void test_cut_call(void **state)
{
    setup s = usual;
    (void)state;
    s.stopped = false;
    check("</think><tool_call>f<arg_key>s</arg_key><arg_value>ab", "F:f|A:{\"s\":\"ab\"}|E:|", s);
}

static void test_without_tools(void **state)
{
    setup s = usual;
    (void)state;
    s.with_tools = false;
    check("</think><tool_call>f</tool_call>", "C:<tool_call>f</tool_call>|", s);
}

/* Cleared between the parts, as a stream does it, the pieces join to the same. */
static void test_cleared(void **state)
{
    static const char text[] = "ab</think>c<tool_call>f<arg_key>s</arg_key><arg_value>xyz"
                               "</arg_value></tool_call>";
    nbi_answer a = {0};
    nbi_reasoning splitter;
    nbi_buf joined[NBI_PIECE_END + 1] = {{0}};
    uint32_t n_calls = 0;
    (void)state;
    nbi_reasoning_init(&splitter, NBI_REASONING_GLM45, true);
    assert_int_equal(nbi_answer_init(&a, NBI_TOOL_FORM_GLM, tools, false, NULL), NB_OK);
    for (size_t i = 0; i <= sizeof text - 1; i++) {
        const nb_event event = {.text = text + i,
                                .n_text = i < sizeof text - 1,
                                .finish = i < sizeof text - 1 ? NB_FINISH_NONE : NB_FINISH_STOP};
        assert_int_equal(nbi_answer_take(&a, &splitter, &event), NB_OK);
        for (size_t k = 0; k < a.n_pieces; k++) {
            const nbi_piece *p = &a.pieces[k];
            if (p->kind == NBI_PIECE_CALL) assert_int_equal(p->call, n_calls++);
            assert_int_equal(nbi_buf_add(&joined[p->kind], nbi_piece_text(&a, p), p->n), NB_OK);
        }
        nbi_answer_clear(&a);
    }
    assert_string_equal(joined[NBI_PIECE_THINKING].data, "ab");
    assert_string_equal(joined[NBI_PIECE_CONTENT].data, "c");
    assert_string_equal(joined[NBI_PIECE_CALL].data, "f");
    assert_string_equal(joined[NBI_PIECE_ARGS].data, "{\"s\":\"xyz\"}");
    assert_int_equal(n_calls, 1);
    assert_int_equal(a.n_calls, 1);
    for (size_t i = 0; i <= NBI_PIECE_END; i++) nbi_buf_free(&joined[i]);
    nbi_answer_free(&a);
}

/* Kept back, the thinking is one piece; with "ab" alone it comes with the end. */
static void test_whole_thinking(void **state)
{
    static const struct {
        const char *text;
        size_t shown; /* bytes that have come when it is shown */
    } cases[] = {{"ab\ncd</think>e", 13}, {"ab", 3}, {"ab<tool_call>f</tool_call>", 13}};
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const size_t n = strlen(cases[k].text);
        nbi_answer a = {.thinking_whole = true};
        nbi_reasoning splitter;
        unsigned n_thoughts = 0;
        nbi_reasoning_init(&splitter, NBI_REASONING_GLM45, true);
        assert_int_equal(nbi_answer_init(&a, NBI_TOOL_FORM_GLM, tools, false, NULL), NB_OK);
        for (size_t i = 0; i <= n; i++) {
            const nb_event event = {.text = cases[k].text + i,
                                    .n_text = i < n,
                                    .finish = i < n ? NB_FINISH_NONE : NB_FINISH_STOP};
            assert_int_equal(nbi_answer_take(&a, &splitter, &event), NB_OK);
            if (a.n_pieces && a.pieces[0].kind == NBI_PIECE_THINKING) {
                if (i + 1 != cases[k].shown) fail_msg("%s: shown with byte %zu", cases[k].text, i);
                n_thoughts++;
            }
            nbi_answer_clear(&a);
        }
        assert_int_equal(n_thoughts, 1);
        nbi_answer_free(&a);
    }
}

/* Memory that runs out anywhere is a status, and nothing leaks. */
static void test_no_memory(void **state)
{
    static const char text[] = "t</think>c<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value>"
                               "</tool_call>d";
    const nb_event event = {.text = text, .n_text = sizeof text - 1, .finish = NB_FINISH_STOP};
    nb_status status = NB_NO_MEMORY;
    (void)state;
    for (long n = 0; status != NB_OK; n++) {
        nbi_answer a = {0};
        nbi_reasoning splitter;
        nbi_reasoning_init(&splitter, NBI_REASONING_GLM45, true);
        nbi_heap_fail_after(n);
        status = nbi_answer_init(&a, NBI_TOOL_FORM_GLM, tools, false, NULL);
        if (status == NB_OK) status = nbi_answer_take(&a, &splitter, &event);
        nbi_heap_fail_after(-1);
        assert_true(status == NB_OK || status == NB_NO_MEMORY);
        nbi_answer_free(&a);
        assert_true(n < 1000);
    }
}

static int setup_tools(void **state)
{
    (void)state;
    return nbi_json_parse(&tools, TOOLS, sizeof TOOLS - 1, "tools", NULL) == NB_OK ? 0 : -1;
}

static int free_tools(void **state)
{
    (void)state;
    json_decref(tools);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_call_ends_thinking),
        cmocka_unit_test(test_unclosed_thinking_is_the_answer),
        cmocka_unit_test(test_content_inside_a_call),
        cmocka_unit_test(test_calls_only),
        cmocka_unit_test(test_first_call_only),
        cmocka_unit_test(test_cut_call),
        cmocka_unit_test(test_without_tools),
        cmocka_unit_test(test_cleared),
        cmocka_unit_test(test_whole_thinking),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, setup_tools, free_tools);
}
