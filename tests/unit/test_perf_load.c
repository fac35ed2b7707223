/* perf/load_*.h: answers in the shapes that servers write, cut at every byte, and every figure
 * against arithmetic. The public cases C79 to C81 of wrong counting are among them. */
#include "cmocka_all.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "perf/load_figures.h"
#include "perf/load_file.h"
#include "perf/load_random.h"
#include "scratch.h"

static const uint64_t MS = 1000000;

static nbi_load_answer sse_answer(void)
{
    return (nbi_load_answer){.sse = true, .http = 200};
}

/* An event of a chat stream; `n` of them from `begin`, every `gap`. Returns the last time. */
static uint64_t feed_deltas(nbi_load_answer *a, const char *key, const char *text, unsigned n,
                            uint64_t begin, uint64_t gap)
{
    char event[256];
    snprintf(event, sizeof event,
             "data: {\"choices\":[{\"index\":0,\"delta\":{\"%s\":\"%s\"}}]}\n\n", key, text);
    for (unsigned i = 0; i < n; i++)
        assert_true(nbi_load_answer_feed(a, event, strlen(event), begin + i * gap));
    return begin + (n - 1) * gap;
}

static void feed_text(nbi_load_answer *a, const char *text, uint64_t now)
{
    nbi_load_answer_feed(a, text, strlen(text), now);
}

static nbi_load_figures figures_of(nbi_load_record *records, uint32_t n, uint64_t end_ns)
{
    static const double percentiles[] = {50, 99};
    nbi_load_figures f;
    nbi_load_result result = {
        .records = records, .n = n, .begin_ns = 1, .end_ns = 1 + end_ns, .peak_running = n};
    const nbi_load_goodput goodput = {.ttft_ms = 150};
    assert_int_equal(nbi_load_figures_make(&f, &result, true, percentiles, 2, &goodput, NULL),
                     NB_OK);
    return f;
}

#define assert_near(a, b) assert_true(fabs((a) - (b)) <= 1e-6 * fabs(b))

/* C79: 50 reasoning deltas, no content, finish length. */
static void reasoning_only(void **state)
{
    (void)state;
    nbi_load_record r = {.planned_ns = 1, .sent_ns = 1, .asked_output = 50};
    r.answer = sse_answer();
    feed_text(&r.answer,
              "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
              1 + 20 * MS);
    uint64_t last = feed_deltas(&r.answer, "reasoning_content", "x", 50, 1 + 100 * MS, 10 * MS);
    feed_text(&r.answer,
              "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}]}\n\n"
              "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":50,"
              "\"completion_tokens_details\":{\"reasoning_tokens\":50}}}\n\ndata: [DONE]\n\n",
              last);
    nbi_load_answer_end(&r.answer, NBI_LOAD_NONE, "", last + 5 * MS);
    nbi_load_figures f = figures_of(&r, 1, 1000 * MS);
    assert_int_equal(f.completed, 1);
    assert_int_equal(f.output_tokens, 50);
    assert_int_equal(f.reasoning_tokens, 50);
    assert_int_equal(f.input_tokens, 7);
    assert_near(f.ttft.mean, 100.0); /* the first reasoning delta, not the role */
    assert_near(f.itl.mean, 10.0);
    assert_int_equal(f.itl.n, 49);
    assert_near(f.tpot.mean, 10.0);
    assert_near(f.e2el.mean, 590.0); /* not the time of the usage or of the end of the connection */
    assert_near(f.output_throughput, 50.0);
    assert_near(f.concurrency, 0.59);
    assert_near(f.goodput, 1.0);
    nbi_load_answer_free(&r.answer);
}

/* C80: 10 chunks, usage 40, 2.0 s from first to last: 19.5 tokens a second. */
static void several_tokens_per_chunk(void **state)
{
    (void)state;
    nbi_load_record r = {.planned_ns = 1, .sent_ns = 1, .asked_output = 40};
    r.answer = sse_answer();
    uint64_t last =
        feed_deltas(&r.answer, "content", "four of them", 10, 1 + 500 * MS, 2000 * MS / 9);
    feed_text(&r.answer,
              "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}],\"usage\":"
              "{\"prompt_tokens\":3,\"completion_tokens\":40}}\n\n",
              last);
    nbi_load_answer_end(&r.answer, NBI_LOAD_NONE, "", last);
    nbi_load_figures f = figures_of(&r, 1, 2500 * MS);
    assert_int_equal(f.output_tokens, 40);
    assert_int_equal(f.chunks, 10);
    assert_near(f.tokens_per_chunk, 4.0);
    assert_true(fabs(1000 / f.tpot.mean - 19.5) < 1e-5);
    assert_true(fabs(f.itl.mean - 2000.0 / 9) < 1e-4);
    assert_near(f.output_throughput, 16.0);
    /* Chunks at 0.5, 0.72, 0.94 | 1.17 to 1.83 | 2.06 and later: 3, 4 and 3 of 4 tokens. */
    assert_near(f.peak_output, 16.0);
    nbi_load_answer_free(&r.answer);
}

/* C81: the count is the server's, whatever the text would be encoded to. */
static void usage_counts(void **state)
{
    (void)state;
    nbi_load_record r = {.sent_ns = 1, .asked_output = 100};
    r.answer = (nbi_load_answer){.http = 200};
    char body[512];
    snprintf(body, sizeof body,
             "{\"choices\":[{\"text\":\"%100s\",\"finish_reason\":\"length\"}],\"usage\":"
             "{\"prompt_tokens\":1,\"completion_tokens\":100}}",
             "");
    feed_text(&r.answer, body, 1 + 400 * MS);
    nbi_load_answer_end(&r.answer, NBI_LOAD_NONE, "", 1 + 401 * MS);
    nbi_load_figures f = figures_of(&r, 1, 500 * MS);
    assert_int_equal(f.output_tokens, 100);
    assert_int_equal(f.not_streamed, 1);
    assert_int_equal(f.ttft.n + f.tpot.n + f.itl.n, 0);
    assert_near(f.e2el.mean, 400.0);
    assert_near(f.output_throughput, 200.0);
    assert_near(f.peak_output, 200.0); /* of a run below a second */
    nbi_load_answer_free(&r.answer);
}

/* Every way to cut a stream of all kinds of lines gives the same answer. */
static void cut_anywhere(void **state)
{
    (void)state;
    static const char stream[] =
        ": ping\r\n\r\nevent: message\r\nid: 3\r\ndata: {\"choices\":[{\"text\":\"a\"}]}\r\n\r\n"
        "data:{\"choices\":[{\"text\":\"\"}],\"usage\":null}\n\n"
        "data: {\"choices\":\ndata: [{\"text\":\"\\u00e9\xC3\xA9\"}]}\n\n"
        "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\n"
        "data: {\"choices\":[{\"delta\":{\"reasoning\":\"r\"},\"finish_reason\":\"stop\"}]}\n\n"
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":4,"
        "\"prompt_tokens_details\":{\"cached_tokens\":2}}}\n\n"
        "data: [DONE]";
    const size_t n = sizeof stream - 1;
    for (size_t cut = 0; cut <= n; cut++) {
        nbi_load_answer a = sse_answer();
        assert_true(nbi_load_answer_feed(&a, stream, cut, 5));
        assert_true(nbi_load_answer_feed(&a, stream + cut, n - cut, 5));
        nbi_load_answer_end(&a, NBI_LOAD_NONE, "", 6);
        if (a.failure || !a.done || !a.finished || a.n_chunks != 4 || a.output_tokens != 4 ||
            a.input_tokens != 5 || a.cached_tokens != 2 || a.n_together != 3)
            fail_msg("cut at %zu: %s, %u chunks, %u tokens", cut, a.why, a.n_chunks,
                     a.output_tokens);
        nbi_load_answer_free(&a);
    }
}

static void failures(void **state)
{
    (void)state;
    static const struct {
        bool sse;
        unsigned http;
        const char *bytes;
        nbi_load_failure failure;
        const char *why;
    } cases[] = {
        {true, 200, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n", NBI_LOAD_CUT, "after 1 chunks"},
        {true, 200, "", NBI_LOAD_CUT, "after 0 chunks"},
        {true, 200,
         "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"error\":{\"message\":\"no "
         "more\"}}\n\ndata: [DONE]\n\n",
         NBI_LOAD_SERVER, "no more"},
        {true, 200, "data: {\"error\":\"plain\"}\n\n", NBI_LOAD_SERVER, "plain"},
        {true, 200, "data: {\"object\":\"error\",\"message\":\"flat\"}\n\n", NBI_LOAD_SERVER,
         "flat"},
        {true, 200, "data: {\"choices\":[{\n\n", NBI_LOAD_MALFORMED, "event"},
        {true, 200, "data: [1]\n\n", NBI_LOAD_MALFORMED, "choices"},
        {false, 200, "<html>", NBI_LOAD_MALFORMED, "answer"},
        {false, 200, "", NBI_LOAD_MALFORMED, "empty"},
        {false, 400, "{\"error\":{\"message\":\"too long\",\"type\":\"x\"}}", NBI_LOAD_HTTP,
         "too long"},
        {false, 422, "{\"detail\":\"bad\"}", NBI_LOAD_HTTP, "bad"},
        {false, 502, "<html>Bad\nGateway\xff", NBI_LOAD_HTTP, "<html>Bad Gateway "},
        {false, 500, "", NBI_LOAD_HTTP, "no body"},
    };
    nbi_load_record records[sizeof cases / sizeof *cases];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nbi_load_answer *a = &records[i].answer;
        records[i] = (nbi_load_record){.sent_ns = 1};
        *a = (nbi_load_answer){.sse = cases[i].sse, .http = cases[i].http};
        feed_text(a, cases[i].bytes, 2);
        nbi_load_answer_end(a, NBI_LOAD_NONE, "", 3);
        if (a->failure != cases[i].failure || !strstr(a->why, cases[i].why))
            fail_msg("case %zu: %s, \"%s\"", i, nbi_load_failure_name(a->failure), a->why);
    }
    nbi_load_figures f = figures_of(records, sizeof cases / sizeof *cases, 1000 * MS);
    assert_int_equal(f.completed, 0);
    assert_int_equal(f.failed, sizeof cases / sizeof *cases);
    assert_int_equal(f.n_groups, 7); /* cut, error event, malformed, http 400, 422, 502, 500 */
    assert_int_equal(f.groups[0].n, 2);
    assert_int_equal(f.groups[1].n, 3);
    assert_string_equal(f.groups[1].sample, "no more");
    assert_int_equal(f.e2el.n, 0);
    assert_near(f.peak_output + 1, 1.0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        nbi_load_answer_free(&records[i].answer);
    /* What the transfer says comes first. */
    nbi_load_answer a = sse_answer();
    nbi_load_answer_end(&a, NBI_LOAD_TIMEOUT, "after 3 s", 3);
    assert_int_equal(a.failure, NBI_LOAD_TIMEOUT);
    assert_string_equal(a.why, "after 3 s");
    nbi_load_answer_free(&a);
}

/* An answer without tokens is complete, and in no latency but the whole. */
static void no_tokens(void **state)
{
    (void)state;
    nbi_load_record r[2] = {{.sent_ns = 1, .asked_output = 8, .asked_input = 30},
                            {.sent_ns = 1, .asked_output = 8, .asked_input = 30}};
    r[0].answer = sse_answer();
    feed_text(&r[0].answer,
              "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"stop\"}]}\n\n"
              "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":0}}\n\n",
              1 + 10 * MS);
    nbi_load_answer_end(&r[0].answer, NBI_LOAD_NONE, "", 1 + 10 * MS);
    /* Without usage: chunks, and what was asked for. */
    r[1].answer = sse_answer();
    uint64_t last = feed_deltas(&r[1].answer, "content", "a", 5, 1 + 100 * MS, 20 * MS);
    feed_text(&r[1].answer, "data: [DONE]\n\n", last);
    nbi_load_answer_end(&r[1].answer, NBI_LOAD_NONE, "", last);
    nbi_load_figures f = figures_of(r, 2, 200 * MS);
    assert_int_equal(f.completed, 2);
    assert_int_equal(f.no_tokens, 1);
    assert_int_equal(f.no_usage, 1);
    assert_int_equal(f.shorter, 1); /* an estimate is not held against it */
    assert_int_equal(f.output_tokens, 5);
    assert_int_equal(f.input_tokens, 33);
    assert_int_equal(f.ttft.n, 1);
    assert_int_equal(f.tpot.n, 1);
    assert_int_equal(f.e2el.n, 2);
    assert_near(f.e2el.mean, 95.0);
    assert_near(f.concurrency, 0.95);
    nbi_load_answer_free(&r[0].answer);
    nbi_load_answer_free(&r[1].answer);
}

static void statistics(void **state)
{
    (void)state;
    /* numpy.percentile([1, 2, 3, 10], [25, 99]) and numpy.std of it */
    double v[] = {10, 1, 3, 2};
    const double percentiles[] = {25, 99, 100};
    nbi_load_stat s;
    nbi_load_stat_make(&s, v, 4, percentiles, 3);
    assert_near(s.mean, 4.0);
    assert_near(s.median, 2.5);
    assert_near(s.std, 3.5355339059327378);
    assert_near(s.percentiles[0], 1.75);
    assert_near(s.percentiles[1], 9.79);
    assert_near(s.percentiles[2], 10.0);
    assert_near(s.min, 1.0);
    assert_near(s.max, 10.0);
    nbi_load_stat_make(&s, v, 0, percentiles, 3);
    assert_true(s.n == 0 && s.mean == 0);
    nbi_load_stat_make(&s, v, 1, percentiles, 3);
    assert_near(s.percentiles[1], 1.0);
}

/* Mean 1 and variance 1 / shape, within five standard errors. */
static void arrivals(void **state)
{
    (void)state;
    enum { N = 200000 };
    static const double shapes[] = {0.3, 1, 4};
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        nbi_load_rng rng = {k + 7};
        double sum = 0, squares = 0, variance = 1 / shapes[k];
        for (int i = 0; i < N; i++) {
            double x = nbi_load_random_gamma(&rng, shapes[k]);
            assert_true(x >= 0);
            sum += x;
            squares += (x - 1) * (x - 1);
        }
        double kurtosis = 3 + 6 / shapes[k];
        assert_true(fabs(sum / N - 1) < 5 * sqrt(variance / N));
        assert_true(fabs(squares / N - variance) < 5 * variance * sqrt((kurtosis - 1) / N));
    }
    nbi_load_rng a = {3}, b = {3};
    uint32_t seen = 0;
    for (int i = 0; i < 1000; i++) {
        uint32_t x = nbi_load_random_range(&a, 5, 9);
        assert_true(x >= 5 && x <= 9 && x == nbi_load_random_range(&b, 5, 9));
        seen |= 1u << x;
    }
    assert_int_equal(seen, 0x3e0);
    assert_int_equal(nbi_load_random_range(&a, UINT32_MAX, UINT32_MAX), UINT32_MAX);
}

static void files(void **state)
{
    static const struct {
        const char *text, *wrong; /* wrong NULL: good */
        bool chat;
        uint32_t n;
    } cases[] = {
        {"{'prompt': 'a', 'output_len': 3}\n\n{'prompt': [1, 2]}\n", NULL, false, 2},
        {" [{'conversations': [{'from': 'human', 'value': 'q'}, {'from': 'gpt', 'value': 'four'}]},"
         "{'conversations': []}]",
         NULL, true, 1},
        {"{'messages': [{'role': 'user', 'content': 'x'}]}", NULL, true, 1},
        {"{'messages': [{'role': 'user', 'content': 'x'}]}", "chat/completions", false, 0},
        {"{'prompt': [1]}", "takes text", true, 0},
        {"{'prompt': 5}", "line 1: \"prompt\" is an integer", false, 0},
        {"{'prompt': 'a'}\n{'prompt': [1, 'b']}", "line 2: \"prompt\"[1]", false, 0},
        {"{'prompt': 'a', 'output_len': -3}", "output_len", false, 0},
        {"{'text': 'a'}", "neither", false, 0},
        {"[{'conversations': 'x'}]", "entry 0", false, 0},
        {"[{'conversations': [{'from': 'a'}, {}]}]", "\"value\"", false, 0},
        {"[1]", "expected an object", false, 0},
        {"[]", "no prompts", false, 0},
        {"", "no prompts", false, 0},
        {"{'prompt'", "line 1", false, 0},
    };
    (void)state;
    char *dir = scratch_make();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[512];
        nb_error err = {0};
        nbi_load_file file = {0};
        snprintf(text, sizeof text, "%s", cases[i].text);
        for (char *p = text; *p; p++)
            if (*p == '\'') *p = '"';
        scratch_write_text(dir, "f", text);
        nb_status st = nbi_load_file_read(&file, scratch_path(dir, "f"), cases[i].chat, &err);
        if ((st == NB_OK) != !cases[i].wrong ||
            (cases[i].wrong && !strstr(err.text, cases[i].wrong)))
            fail_msg("case %zu: %d, %s", i, st, err.text);
        assert_int_equal(file.n, cases[i].n);
        if (i == 0) {
            assert_int_equal(file.entries[0].output_tokens, 3);
            assert_int_equal(json_array_size(file.entries[1].prompt), 2);
        }
        if (i == 1) assert_int_equal(file.entries[0].answer_bytes, 4);
        nbi_load_file_free(&file);
    }
    scratch_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reasoning_only), cmocka_unit_test(several_tokens_per_chunk),
        cmocka_unit_test(usage_counts),   cmocka_unit_test(cut_anywhere),
        cmocka_unit_test(failures),       cmocka_unit_test(no_tokens),
        cmocka_unit_test(statistics),     cmocka_unit_test(arrivals),
        cmocka_unit_test(files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
