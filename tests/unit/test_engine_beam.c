/* Beam search against vLLM's algorithm, written again over requests of one token: the same answers
 * in the same order, alone and beside others, and every page comes back. */
#include "cmocka_all.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "nibble.h"

#define DATA(name) NBI_TEST_SOURCE_DIR "/tests/golden/data/" name
#define LEN_MAX    400
#define ENDED_MAX  4000

typedef struct hypothesis {
    int32_t ids[LEN_MAX]; /* prompt and answer */
    float logprobs[LEN_MAX];
    uint32_t n;
    double sum, score;
    bool stopped;
} hypothesis;

typedef struct search {
    const int32_t *prompt;
    uint32_t n_prompt, width, max_tokens;
    double length_penalty;
    bool ignore_eos;
    int32_t n_logprobs;
} search;

typedef struct setup {
    uint32_t running;
    uint64_t kv_tokens;
    bool mtp, no_cache, fp8;
    uint32_t chunk;
} setup;

static nb_engine *open_engine(const char *dir, const setup *s)
{
    nb_engine_options o;
    nb_error err = {0};
    nb_engine *e = NULL;
    nb_engine_options_default(&o);
    o.model_dir = dir;
    o.max_running = s->running;
    o.kv_tokens = s->kv_tokens;
    o.chunk_size = s->chunk ? s->chunk : 512;
    o.max_context = 320;
    o.disable_prefix_cache = s->no_cache;
    if (s->fp8) o.kv_dtype = "fp8_e4m3";
    if (s->mtp) o.speculative_algorithm = "mtp";
    if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s: %s", dir, err.text);
    return e;
}

static void make_prompt(int32_t *out, uint32_t n, uint32_t k)
{
    for (uint32_t i = 0; i < n; i++) out[i] = (int32_t)((i * 31 + k * 7 + i * i % 11) % 90);
}

static void step(nb_engine *e)
{
    bool worked;
    assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
}

/* ---------------------------------------------------------------- the algorithm, again */

static void next_token(nb_engine *e, const hypothesis *h, uint32_t top, nb_event *event)
{
    nb_request_options o = {.prompt = h->ids, .n_prompt = h->n};
    nb_error err = {0};
    nb_request *r = NULL;
    nb_sampling_default(e, &o.sampling);
    o.sampling.temperature = 0;
    o.sampling.max_tokens = 1;
    o.sampling.n_logprobs = (int32_t)top;
    if (nb_request_submit(&r, e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    while (nb_request_read(r, event, 0, NULL) == NB_AGAIN) step(e);
    nb_request_close(&r);
}

static bool is_eos(const nb_engine *e, int32_t id)
{
    nb_engine_info info;
    nb_engine_get_info(e, &info);
    for (uint32_t i = 0; i < info.n_eos; i++) {
        if (info.eos_ids[i] == id) return true;
    }
    return false;
}

static void append(hypothesis *to, const hypothesis *from, const nb_logprob *token)
{
    *to = *from;
    to->logprobs[to->n] = token->logprob;
    to->ids[to->n++] = token->id;
    to->sum += (double)token->logprob;
}

/* Sorts by descending `score` (or sum), equal ones stay in order. */
static void sort(hypothesis *h, uint32_t n, bool by_score)
{
    for (uint32_t i = 1; i < n; i++) {
        for (uint32_t j = i; j > 0; j--) {
            double a = by_score ? h[j - 1].score : h[j - 1].sum,
                   b = by_score ? h[j].score : h[j].sum;
            if (a >= b) break;
            hypothesis swap = h[j];
            h[j] = h[j - 1];
            h[j - 1] = swap;
        }
    }
}

/* To the last token, as vLLM does. The result has `width` hypotheses; freed by the caller. */
static hypothesis *expected(nb_engine *e, const search *s)
{
    hypothesis *live = calloc(s->width, sizeof *live), *ended = calloc(ENDED_MAX, sizeof *ended);
    hypothesis *next = calloc(s->width * s->width * 2u, sizeof *next);
    uint32_t n_live = 1, n_ended = 0, top = 2 * s->width;
    memcpy(live->ids, s->prompt, s->n_prompt * sizeof *s->prompt);
    live->n = s->n_prompt;
    for (uint32_t t = 0; t < s->max_tokens; t++) {
        uint32_t n_next = 0;
        for (uint32_t b = 0; b < n_live; b++) {
            nb_event event;
            next_token(e, &live[b], top, &event);
            for (uint32_t i = 0; i < top; i++) {
                bool ends = !s->ignore_eos && is_eos(e, event.top[i].id);
                hypothesis *h = ends ? &ended[n_ended++] : &next[n_next++];
                assert_true(n_ended < ENDED_MAX);
                append(h, &live[b], &event.top[i]);
                h->stopped = ends;
                if (ends) h->score = h->sum / pow(h->n - 1, s->length_penalty);
            }
        }
        sort(next, n_next, false);
        n_live = n_next < s->width ? n_next : s->width;
        memcpy(live, next, n_live * sizeof *live);
    }
    for (uint32_t b = 0; b < n_live; b++) {
        live[b].score = live[b].sum / pow(live[b].n, s->length_penalty);
        ended[n_ended++] = live[b];
    }
    sort(ended, n_ended, true);
    free(live);
    free(next);
    return ended;
}

/* ---------------------------------------------------------------- the engine's */

static nb_status submit_with(nb_engine *e, const search *s, nb_request **out, nb_error *err)
{
    nb_request_options o = {.prompt = s->prompt, .n_prompt = s->n_prompt};
    nb_beam_options beam = {.width = s->width, .length_penalty = s->length_penalty};
    nb_sampling_default(e, &o.sampling);
    o.sampling.max_tokens = s->max_tokens;
    o.sampling.ignore_eos = s->ignore_eos;
    o.sampling.n_logprobs = s->n_logprobs;
    return nb_beams_submit(out, e, &o, &beam, err);
}

static void submit(nb_engine *e, const search *s, nb_request **out)
{
    nb_error err = {0};
    if (submit_with(e, s, out, &err) != NB_OK) fail_msg("%s", err.text);
}

/* Reads answer i as far as it is there; true at its end. */
static bool read_answer(nb_request *r, hypothesis *h)
{
    nb_event event;
    while (nb_request_read(r, &event, 0, NULL) == NB_OK) {
        if (event.id >= 0) {
            if (event.has_logprob) h->sum += (double)event.logprob;
            h->logprobs[h->n] = event.logprob;
            h->ids[h->n++] = event.id;
        }
        h->stopped = event.finish == NB_FINISH_STOP;
        if (event.finish == NB_FINISH_NONE) continue;
        assert_in_range(event.finish, NB_FINISH_STOP, NB_FINISH_LENGTH);
        return true;
    }
    return false;
}

static hypothesis *answers(nb_engine *e, nb_request **r, uint32_t width)
{
    hypothesis *h = calloc(width, sizeof *h);
    uint32_t n_done = 0;
    bool done[NB_BEAM_WIDTH_MAX] = {false};
    for (int spins = 0; n_done < width; spins++) {
        assert_true(spins < 100000);
        step(e);
        for (uint32_t i = 0; i < width; i++) {
            if (done[i] || !read_answer(r[i], &h[i])) continue;
            done[i] = true;
            n_done++;
            nb_request_close(&r[i]);
        }
    }
    return h;
}

static void same(const hypothesis *got, const hypothesis *want, const search *s)
{
    for (uint32_t i = 0; i < s->width; i++) {
        uint32_t n = want[i].n - s->n_prompt;
        assert_int_equal(got[i].n, n);
        assert_memory_equal(got[i].ids, want[i].ids + s->n_prompt, n * sizeof(int32_t));
        assert_int_equal(got[i].stopped, want[i].stopped);
        if (s->n_logprobs < 0) continue;
        assert_memory_equal(got[i].logprobs, want[i].logprobs + s->n_prompt, n * sizeof(float));
        assert_true(fabs(got[i].sum - want[i].sum) < 1e-9);
    }
}

static void check_idle(nb_engine *e)
{
    nb_engine_stats stats;
    for (int i = 0; i < 3; i++) step(e);
    nb_engine_get_stats(e, &stats);
    assert_int_equal(stats.n_running + stats.n_waiting, 0);
    assert_int_equal(stats.kv_tokens_used, 0);
}

/* ---------------------------------------------------------------- tests */

static const char *const models[] = {DATA("glm52-nvfp4-routed"), DATA("qwen3-nvfp4"),
                                     DATA("lite-bf16"), DATA("v32-bf16")};

/* Lengths around the page of 64 tokens, answers over its border. */
static const struct {
    uint32_t n_prompt, width, max_tokens;
    double length_penalty;
    bool ignore_eos;
} cases[] = {{1, 2, 12, 1, false},   {5, 4, 20, 1, false},    {5, 4, 20, 0, false},
             {63, 3, 10, 2, false},  {64, 3, 10, 1, true},    {65, 10, 6, -1, false},
             {130, 4, 70, 1, true},  {40, 1, 30, 1, false},   {70, 5, 66, 3, false},
             {127, 2, 5, 0.5, true}, {128, 6, 9, -0.5, false}};

static void against_reference(const char *dir, const setup *with)
{
    nb_engine *plain = open_engine(dir, &(setup){.running = 1, .fp8 = with->fp8});
    nb_engine *e = open_engine(dir, with);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        int32_t prompt[LEN_MAX];
        nb_request *r[NB_BEAM_WIDTH_MAX];
        make_prompt(prompt, cases[c].n_prompt, (uint32_t)c);
        search s = {prompt,
                    cases[c].n_prompt,
                    cases[c].width,
                    cases[c].max_tokens,
                    cases[c].length_penalty,
                    cases[c].ignore_eos,
                    c % 2 ? 3 : 0};
        hypothesis *want = expected(plain, &s);
        submit(e, &s, r);
        hypothesis *got = answers(e, r, s.width);
        same(got, want, &s);
        check_idle(e);
        free(got);
        free(want);
    }
    nb_engine_close(&e);
    nb_engine_close(&plain);
}

static void the_answers_of_vllms_algorithm(void **state)
{
    (void)state;
    for (size_t m = 0; m < sizeof models / sizeof *models; m++)
        against_reference(models[m], &(setup){.running = 10});
}

static void with_drafts_small_chunks_and_without_a_cache(void **state)
{
    (void)state;
    against_reference(DATA("lite-bf16"), &(setup){.running = 12, .mtp = true, .chunk = 7});
    against_reference(DATA("qwen3-nvfp4"), &(setup){.running = 10, .fp8 = true});
    against_reference(DATA("v32-nvfp4"), &(setup){.running = 10, .fp8 = true});
    against_reference(DATA("lite-bf16"), &(setup){.running = 10, .no_cache = true});
}

/* Searches and usual requests take pages from each other, and all come to what they come to alone.
 */
static void the_same_answers_when_pages_run_out(void **state)
{
    (void)state;
    static const search searches[] = {{NULL, 70, 3, 40, 1, true, 0},
                                      {NULL, 50, 4, 60, 1, false, 0},
                                      {NULL, 129, 2, 50, 0, true, 0}};
    nb_engine *plain = open_engine(DATA("lite-bf16"), &(setup){.running = 1});
    nb_engine *e = open_engine(DATA("lite-bf16"), &(setup){.running = 12, .kv_tokens = 512});
    int32_t prompt[3][LEN_MAX];
    nb_request *r[3][NB_BEAM_WIDTH_MAX], *usual[3];
    hypothesis *want[3];
    for (int i = 0; i < 3; i++) {
        search s = searches[i];
        make_prompt(prompt[i], s.n_prompt, (uint32_t)i);
        s.prompt = prompt[i];
        want[i] = expected(plain, &s);
        submit(e, &s, r[i]);
        nb_request_options o = {.prompt = prompt[i], .n_prompt = s.n_prompt};
        nb_sampling_default(e, &o.sampling);
        o.sampling.max_tokens = 150;
        o.sampling.ignore_eos = true;
        assert_int_equal(nb_request_submit(&usual[i], e, &o, NULL), NB_OK);
    }
    hypothesis others[3] = {0};
    for (int i = 0; i < 3; i++) {
        search s = searches[i];
        s.prompt = prompt[i];
        hypothesis *got = calloc(s.width, sizeof *got);
        bool done[NB_BEAM_WIDTH_MAX] = {false};
        for (uint32_t n = 0, spins = 0; n < s.width; spins++) {
            assert_true(spins < 100000);
            step(e);
            for (int k = 0; k < 3; k++) (void)(usual[k] && read_answer(usual[k], &others[k]));
            for (uint32_t b = 0; b < s.width; b++) {
                if (!done[b] && read_answer(r[i][b], &got[b])) done[b] = ++n;
            }
        }
        same(got, want[i], &s);
        for (uint32_t b = 0; b < s.width; b++) nb_request_close(&r[i][b]);
        free(got);
        free(want[i]);
    }
    for (int k = 0; k < 3; k++) {
        while (!read_answer(usual[k], &others[k]) && others[k].n < 150) step(e);
        nb_request_close(&usual[k]);
    }
    nb_engine_stats stats;
    nb_engine_get_stats(e, &stats);
    assert_true(stats.preemptions > 0);
    check_idle(e);
    nb_engine_close(&e);
    nb_engine_close(&plain);
}

/* Cancelled in the queue, while the prompt is read, while it searches, while it is read. */
static void cancelling_one_ends_all_and_frees_the_pages(void **state)
{
    (void)state;
    static const int steps[] = {0, 1, 3, 9, 30};
    for (size_t c = 0; c < sizeof steps / sizeof *steps; c++) {
        for (uint32_t who = 0; who < 3; who++) {
            int32_t prompt[LEN_MAX];
            nb_request *r[3];
            nb_event event;
            nb_engine *e = open_engine(DATA("lite-bf16"), &(setup){.running = 4, .chunk = 24});
            search s = {prompt, 70, 3, 20, 1, true, -1};
            make_prompt(prompt, s.n_prompt, 1);
            submit(e, &s, r);
            for (int i = 0; i < steps[c]; i++) step(e);
            nb_request_cancel(r[who]);
            step(e);
            for (uint32_t i = 0; i < 3; i++) {
                nb_finish finish = NB_FINISH_NONE;
                while (nb_request_read(r[i], &event, 0, NULL) == NB_OK) finish = event.finish;
                if (steps[c] < 20) assert_int_equal(finish, NB_FINISH_CANCELLED);
                if (i != who) nb_request_close(&r[i]);
            }
            nb_request_close(&r[who]);
            check_idle(e);
            nb_engine_close(&e);
        }
    }
}

static void closing_the_engine_ends_a_search(void **state)
{
    (void)state;
    for (int steps = 0; steps < 8; steps += 3) {
        int32_t prompt[LEN_MAX];
        nb_request *r[2][3];
        nb_engine *e = open_engine(DATA("lite-bf16"), &(setup){.running = 3});
        search s = {prompt, 70, 3, 20, 1, true, -1};
        make_prompt(prompt, s.n_prompt, 1);
        for (int k = 0; k < 2; k++) submit(e, &s, r[k]);
        for (int i = 0; i < steps; i++) step(e);
        for (int k = 0; k < 2; k++) {
            for (int i = 0; i < 3; i++) nb_request_close(&r[k][i]);
        }
        nb_engine_close(&e);
    }
}

static void what_cannot_be_searched_is_refused(void **state)
{
    (void)state;
    nb_engine *e = open_engine(DATA("lite-bf16"), &(setup){.running = 4, .kv_tokens = 640});
    int32_t prompt[LEN_MAX];
    nb_request *r[NB_BEAM_WIDTH_MAX];
    nb_error err = {0};
    make_prompt(prompt, 100, 1);
    assert_int_equal(submit_with(e, &(search){prompt, 100, 0, 20, 1, 0, -1}, r, &err), NB_INVALID);
    assert_int_equal(submit_with(e, &(search){prompt, 100, 5, 20, 1, 0, -1}, r, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "the width is 5; expected 1 to 4"));
    assert_int_equal(submit_with(e, &(search){prompt, 100, 2, 20, NAN, 0, -1}, r, &err),
                     NB_INVALID);
    assert_int_equal(submit_with(e, &(search){prompt, 100, 4, 210, 1, 0, -1}, r, &err),
                     NB_TOO_LARGE);
    assert_non_null(strstr(err.text, "may come to need 17 pages of the KV cache, which has 10"));
    nb_request_options o = {.prompt = prompt, .n_prompt = 100};
    nb_sampling_default(e, &o.sampling);
    o.sampling.max_tokens = 20;
    o.sampling.min_tokens = 1;
    nb_beam_options beam = {.width = 2, .length_penalty = 1};
    assert_int_equal(nb_beams_submit(r, e, &o, &beam, &err), NB_UNSUPPORTED);
    assert_non_null(strstr(err.text, "min_tokens"));
    check_idle(e);
    nb_engine_close(&e);
}

/* Every allocation of a submission fails in turn: nothing is left of it, and the next one works. */
static void a_submission_short_of_memory_leaves_nothing(void **state)
{
    (void)state;
    nb_engine *e = open_engine(DATA("lite-bf16"), &(setup){.running = 4});
    int32_t prompt[LEN_MAX];
    nb_request *r[3];
    nb_status st = NB_NO_MEMORY;
    search s = {prompt, 70, 3, 20, 1, true, 2};
    int n = 0;
    make_prompt(prompt, s.n_prompt, 1);
    for (; st != NB_OK; n++) {
        assert_true(n < 200);
        nbi_heap_fail_after(n);
        st = submit_with(e, &s, r, NULL);
        nbi_heap_fail_after(-1);
        if (st != NB_OK) assert_int_equal(st, NB_NO_MEMORY);
    }
    assert_true(n > 10);
    free(answers(e, r, 3));
    check_idle(e);
    nb_engine_close(&e);
}

/* Stops as soon as there are `width` ended answers: they are among those of the whole search, or
 * are passed by later ones, never better. */
static void early_stopping_takes_the_first_that_end(void **state)
{
    (void)state;
    nb_engine *e = open_engine(DATA("lite-bf16"), &(setup){.running = 4});
    int32_t prompt[LEN_MAX];
    uint64_t rows[2];
    double sums[2];
    for (int early = 0; early < 2; early++) {
        nb_request *r[4];
        nb_request_options o = {.prompt = prompt, .n_prompt = 9};
        nb_beam_options beam = {.width = 4, .length_penalty = 4, .early_stopping = early};
        nb_engine_stats before, after;
        make_prompt(prompt, 9, 4);
        nb_sampling_default(e, &o.sampling);
        o.sampling.max_tokens = 60;
        o.sampling.n_logprobs = 0;
        nb_engine_get_stats(e, &before);
        assert_int_equal(nb_beams_submit(r, e, &o, &beam, NULL), NB_OK);
        hypothesis *h = answers(e, r, 4);
        nb_engine_get_stats(e, &after);
        rows[early] = after.generated_tokens - before.generated_tokens;
        sums[early] = h[0].sum / pow(9 + h[0].n - h[0].stopped, 4);
        for (int i = 0; i < 4 && early; i++) assert_true(h[i].stopped);
        free(h);
    }
    assert_true(rows[1] < rows[0]);
    assert_true(sums[1] <= sums[0]);
    nb_engine_close(&e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_answers_of_vllms_algorithm),
        cmocka_unit_test(with_drafts_small_chunks_and_without_a_cache),
        cmocka_unit_test(the_same_answers_when_pages_run_out),
        cmocka_unit_test(cancelling_one_ends_all_and_frees_the_pages),
        cmocka_unit_test(closing_the_engine_ends_a_search),
        cmocka_unit_test(what_cannot_be_searched_is_refused),
        cmocka_unit_test(a_submission_short_of_memory_leaves_nothing),
        cmocka_unit_test(early_stopping_takes_the_first_that_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
