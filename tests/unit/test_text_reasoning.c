/* text/reasoning.h: the rules, and streamed equal to whole for every way to cut the text. */
#include "cmocka_all.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "text/reasoning.h"

typedef struct result {
    char reasoning[256], content[256];
    bool unclosed;
} result;

static void append(result *r, const nbi_span *spans, size_t n)
{
    assert_true(n <= NBI_REASONING_SPANS_MAX);
    for (size_t i = 0; i < n; i++) {
        assert_true(spans[i].n > 0);
        strncat(spans[i].kind == NBI_SPAN_REASONING ? r->reasoning : r->content, spans[i].text,
                spans[i].n);
    }
}

static void stream(result *out, nbi_reasoning_kind kind, bool inside, bool stopped,
                   const char *text, size_t first, size_t size)
{
    nbi_reasoning r;
    nbi_span spans[NBI_REASONING_SPANS_MAX];
    size_t n = strlen(text), k = first < n ? first : n;
    memset(out, 0, sizeof *out);
    nbi_reasoning_init(&r, kind, inside);
    nbi_heap_forbid();
    for (size_t i = 0; i < n; i += k, k = size < n - i ? size : n - i) {
        char part[256]; /* spans may not point into parts of before */
        memcpy(part, text + i, k);
        append(out, spans, nbi_reasoning_push(&r, part, k, spans));
        memset(part, '#', sizeof part);
    }
    append(out, spans, nbi_reasoning_finish(&r, stopped, spans, &out->unclosed));
    nbi_heap_allow();
    if (out->unclosed && out->reasoning[0])
        memcpy(out->content, out->reasoning, sizeof out->content);
}

static void whole(result *out, nbi_reasoning_kind kind, bool inside, bool stopped, const char *text)
{
    nbi_reasoning_parts parts;
    nbi_reasoning_split(kind, inside, stopped, text, strlen(text), &parts);
    memset(out, 0, sizeof *out);
    memcpy(out->reasoning, parts.reasoning, parts.n_reasoning);
    memcpy(out->content, parts.content, parts.n_content);
    out->unclosed = parts.unclosed;
}

static const struct {
    nbi_reasoning_kind kind;
    bool inside, stopped;
    const char *text, *reasoning, *content;
} cases[] = {
    {NBI_REASONING_GLM45, true, true, "hmm</think>8", "hmm", "8"},
    {NBI_REASONING_GLM45, true, true, "\n<think>hmm\n</think>\n8", "hmm\n", "\n8"},
    {NBI_REASONING_GLM45, true, true, "</think>8", "", "8"},
    {NBI_REASONING_GLM45, true, true, "  hmm", "  hmm", "  hmm"},
    {NBI_REASONING_GLM45, true, true, "It is 4.", "It is 4.", "It is 4."}, /* C32 */
    {NBI_REASONING_GLM45, true, false, "It is 4.", "It is 4.", ""},
    {NBI_REASONING_GLM45, true, false, "a </thin", "a </thin", ""},
    {NBI_REASONING_GLM45, true, true, "x<tool_call>f</tool_call>", "x", "<tool_call>f</tool_call>"},
    {NBI_REASONING_GLM45, true, true, "<tool_call>f</tool_call>", "", "<tool_call>f</tool_call>"},
    {NBI_REASONING_THINK, true, true, "x<tool_call>f</think>y", "x<tool_call>f", "y"},
    {NBI_REASONING_GLM45, false, true, "Answer <think>no</think>", "",
     "Answer <think>no</think>"}, /* C33 */
    {NBI_REASONING_GLM45, false, true, "\n<think>r</think>\nc", "r", "\nc"},
    {NBI_REASONING_GLM45, false, true, "\n <thin", "", "\n <thin"},
    {NBI_REASONING_GLM45, false, true, " \n", "", " \n"},
    {NBI_REASONING_GLM45, true, true, "                    many spaces</think>x",
     "                    many spaces", "x"},
    {NBI_REASONING_GLM45, true, true, "a < b <t </t << <</think>c </think> d", "a < b <t </t << <",
     "c </think> d"},
    {NBI_REASONING_GLM45, true, true, "", "", ""},
    {NBI_REASONING_GLM45, true, true, "<think><think>x</think>", "<think>x", ""},
    {NBI_REASONING_NONE, true, true, "<think>x</think>y", "", "<think>x</think>y"},
};

static void test_rules(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        result r;
        whole(&r, cases[i].kind, cases[i].inside, cases[i].stopped, cases[i].text);
        assert_string_equal(r.reasoning, cases[i].reasoning);
        assert_string_equal(r.content, cases[i].content);
    }
}

static void test_streamed_equals_whole(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (size_t first = 1; first < 16; first++) {
            for (size_t size = 1; size < 14; size++) {
                result r;
                stream(&r, cases[i].kind, cases[i].inside, cases[i].stopped, cases[i].text, first,
                       size);
                assert_string_equal(r.reasoning, cases[i].reasoning);
                assert_string_equal(r.content, cases[i].content);
            }
        }
    }
}

static void test_random(void **state)
{
    (void)state;
    static const char *const bits[] = {
        "<think>", "</think>", "<tool_call>", "<", "</", "<t", "a", " ", "\n", "think>", "_call>"};
    unsigned seed = 5;
    for (int round = 0; round < 20000; round++) {
        char text[200] = "";
        result a, b;
        seed = seed * 1664525u + 1013904223u;
        for (unsigned k = (seed >> 8) % 12; k; k--) {
            seed = seed * 1664525u + 1013904223u;
            strcat(text, bits[(seed >> 8) % (sizeof bits / sizeof *bits)]);
        }
        bool inside = seed >> 30 & 1, stopped = seed >> 29 & 1;
        nbi_reasoning_kind kind = 1 + (seed >> 28 & 1);
        whole(&a, kind, inside, stopped, text);
        stream(&b, kind, inside, stopped, text, 1 + (seed >> 10) % 9, 1 + (seed >> 14) % 7);
        assert_string_equal(a.reasoning, b.reasoning);
        assert_string_equal(a.content, b.content);
        if (stopped && (a.reasoning[0] || b.reasoning[0]) && strstr(text, "</think>") == NULL &&
            inside && (kind == NBI_REASONING_THINK || !strstr(text, "<tool_call>")))
            assert_true(a.content[0] != 0);
    }
}

static void test_prompt_and_names(void **state)
{
    (void)state;
    const char *open = "<|assistant|><think>\n", *closed = "<|assistant|><think></think>";
    assert_true(nbi_reasoning_prompt_open(NBI_REASONING_GLM45, open, strlen(open)));
    assert_false(nbi_reasoning_prompt_open(NBI_REASONING_GLM45, closed, strlen(closed)));
    assert_false(nbi_reasoning_prompt_open(NBI_REASONING_NONE, open, strlen(open)));
    assert_false(nbi_reasoning_prompt_open(NBI_REASONING_GLM45, NULL, 0));
    nbi_reasoning_kind kind = NBI_REASONING_NONE;
    nb_error err;
    assert_int_equal(nbi_reasoning_by_name(&kind, "glm45", &err), NB_OK);
    assert_int_equal(kind, NBI_REASONING_GLM45);
    assert_int_equal(nbi_reasoning_by_name(&kind, "deepseek-r1", &err), NB_OK);
    assert_int_equal(kind, NBI_REASONING_THINK);
    assert_int_equal(nbi_reasoning_by_name(&kind, "gpt", &err), NB_INVALID);
    assert_non_null(strstr(err.text, "glm45"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_streamed_equals_whole),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_prompt_and_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
