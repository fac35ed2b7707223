/* Latent attention in the expanded form: the same bits however a prompt is cut, batched, preempted
 * or found in the cache. Bits are those of the log-probabilities. */
#include "cmocka_all.h"

#include <stdio.h>
#include <string.h>

#include "nibble.h"

#define DATA(name) NBI_TEST_SOURCE_DIR "/tests/golden/data/" name
#define MODEL      DATA("lite-bf16")
#define CONTEXT    512
#define ANSWER     12

typedef struct setup {
    const char *form;
    uint32_t block, chunk, running;
    uint64_t kv_tokens;
    bool no_cache;
    const char *level; /* at most; NULL: the machine's */
} setup;

typedef struct answer {
    int32_t ids[ANSWER];
    float logprobs[ANSWER], prompt[CONTEXT];
    uint32_t n, n_prompt, cached;
} answer;

static nb_engine *open_engine(const setup *s)
{
    nb_engine_options o;
    nb_error err = {0};
    nb_engine *e = NULL;
    nb_engine_options_default(&o);
    o.model_dir = MODEL;
    o.max_context = CONTEXT;
    o.n_threads = 2;
    o.mla_prefill = s->form;
    o.cpu_level = s->level ? s->level : "auto";
    o.mla_prefill_block = s->block;
    o.chunk_size = s->chunk ? s->chunk : 512;
    o.max_running = s->running ? s->running : 1;
    o.kv_tokens = s->kv_tokens;
    o.disable_prefix_cache = s->no_cache;
    if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    return e;
}

/* Prompt of n tokens: `same` of the family's, then others that `k` decides. */
static void make_prompt(int32_t *out, uint32_t n, uint32_t same, uint32_t k)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = (int32_t)((i * 31 + i * i % 11 + (i < same ? 0 : 1 + k * 7)) % 90);
}

static nb_request *submit(nb_engine *e, const int32_t *prompt, uint32_t n, bool prompt_logprobs)
{
    nb_request_options o = {.prompt = prompt, .n_prompt = n};
    nb_error err = {0};
    nb_request *r = NULL;
    nb_sampling_default(e, &o.sampling);
    o.sampling.temperature = 0;
    o.sampling.max_tokens = ANSWER;
    o.sampling.ignore_eos = true;
    o.sampling.n_logprobs = 0;
    o.sampling.prompt_logprobs = prompt_logprobs;
    if (nb_request_submit(&r, e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    return r;
}

static void drain(nb_engine *e, nb_request **r, answer *a)
{
    nb_event event = {.finish = NB_FINISH_NONE};
    memset(a, 0, sizeof *a);
    for (int spins = 0; event.finish == NB_FINISH_NONE; spins++) {
        assert_true(spins < 100000);
        if (nb_request_read(*r, &event, 0, NULL) == NB_AGAIN) {
            bool worked;
            assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
            event.finish = NB_FINISH_NONE;
        } else if (event.is_prompt) {
            a->prompt[a->n_prompt++] = event.logprob;
        } else if (event.id >= 0) {
            a->logprobs[a->n] = event.logprob;
            a->ids[a->n++] = event.id;
        }
    }
    assert_int_equal(event.finish, NB_FINISH_LENGTH);
    assert_int_equal(a->n, ANSWER);
    a->cached = nb_request_cached_tokens(*r);
    nb_request_close(r);
}

static answer ask(nb_engine *e, const int32_t *prompt, uint32_t n, bool prompt_logprobs)
{
    answer a;
    nb_request *r = submit(e, prompt, n, prompt_logprobs);
    drain(e, &r, &a);
    return a;
}

/* From an engine of its own, without a cache. */
static answer alone(const setup *s, const int32_t *prompt, uint32_t n, bool prompt_logprobs)
{
    nb_engine *e = open_engine(&(setup){.form = s->form, .block = s->block, .no_cache = true});
    answer a = ask(e, prompt, n, prompt_logprobs);
    nb_engine_close(&e);
    return a;
}

static void assert_same(const answer *a, const answer *b)
{
    assert_memory_equal(a->ids, b->ids, sizeof a->ids);
    assert_memory_equal(a->logprobs, b->logprobs, sizeof a->logprobs);
    assert_int_equal(a->n_prompt, b->n_prompt);
    assert_memory_equal(a->prompt, b->prompt, sizeof a->prompt);
}

static const uint32_t lengths[] = {63, 64, 100, 128, 200, 300};
#define N (sizeof lengths / sizeof *lengths)

static void same_bits_however_cut(void **state)
{
    (void)state;
    const setup expanded = {.form = "expanded", .block = 64};
    uint32_t different = 0;
    for (size_t i = 0; i < N; i++) {
        int32_t prompt[CONTEXT];
        make_prompt(prompt, lengths[i], 0, (uint32_t)i);
        const answer want = alone(&expanded, prompt, lengths[i], true);
        const answer plain = alone(&(setup){.form = "absorbed"}, prompt, lengths[i], true);
        const bool same = !memcmp(want.prompt, plain.prompt, sizeof want.prompt);
        assert_true(same || lengths[i] >= 64);
        different += !same;
        static const uint32_t chunks[] = {1, 7, 50, 64, 130};
        for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
            nb_engine *e =
                open_engine(&(setup){.form = "expanded", .block = 64, .chunk = chunks[c]});
            const answer got = ask(e, prompt, lengths[i], true);
            assert_same(&got, &want);
            nb_engine_close(&e);
        }
    }
    assert_true(different >= 4); /* else the form was not what was asked for */
}

/* All at once in few pages: some are put back and computed again. */
static void same_bits_together_and_preempted(void **state)
{
    (void)state;
    const setup s = {.form = "expanded", .block = 64, .chunk = 48, .running = N, .kv_tokens = 640};
    nb_engine *e = open_engine(&s);
    int32_t prompts[N][CONTEXT];
    nb_request *r[N];
    for (size_t i = 0; i < N; i++) {
        make_prompt(prompts[i], lengths[i], 0, (uint32_t)i);
        r[i] = submit(e, prompts[i], lengths[i], false);
    }
    for (size_t i = 0; i < N; i++) {
        answer got;
        const answer want = alone(&s, prompts[i], lengths[i], false);
        drain(e, &r[i], &got);
        assert_same(&got, &want);
    }
    nb_engine_stats stats;
    nb_engine_get_stats(e, &stats);
    assert_true(stats.preemptions > 0);
    nb_engine_close(&e);
}

/* Prompts that share beginnings, of both forms: what the cache gives is what would be computed. */
static void cached_pages_carry_their_form(void **state)
{
    (void)state;
    const setup s = {.form = "expanded", .block = 128};
    nb_engine *e = open_engine(&s);
    static const struct {
        uint32_t n, same, cached;
    } cases[] = {
        {190, 190, 0},   /* 128 expanded, the page behind filled by the answer: absorbed */
        {250, 190, 128}, /* leaves an absorbed page at 128 */
        {230, 190, 192}, /* takes it */
        {252, 190, 192}, /* here too the page at 192 has never been full */
        {256, 190, 128}, /* expanded to 256: the absorbed page is not for it */
        {300, 190, 256}, /* takes the expanded ones */
        {120, 120, 0},   /* absorbed from the start ... */
        {100, 100, 64},  /* ... and now there is such a page */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t prompt[CONTEXT];
        make_prompt(prompt, cases[i].n, cases[i].same, 1);
        const answer got = ask(e, prompt, cases[i].n, false);
        const answer want = alone(&s, prompt, cases[i].n, false);
        assert_same(&got, &want);
        assert_int_equal(got.cached, cases[i].cached);
    }
    nb_engine_close(&e);
}

/* The next turn: the prompt holds the answer. Its pages are absorbed and serve until a block is
 * full. */
static void answers_come_back(void **state)
{
    (void)state;
    const setup s = {.form = "expanded", .block = 128};
    nb_engine *e = open_engine(&s);
    int32_t prompt[CONTEXT];
    make_prompt(prompt, 185, 185, 0);
    const answer first = ask(e, prompt, 185, false);
    for (uint32_t i = 0; i < ANSWER; i++) prompt[185 + i] = first.ids[i];
    make_prompt(prompt + 185 + ANSWER, 100, 0, 5);
    const answer second = ask(e, prompt, 230, false), third = ask(e, prompt, 260, false);
    const answer want2 = alone(&s, prompt, 230, false), want3 = alone(&s, prompt, 260, false);
    assert_same(&second, &want2);
    assert_same(&third, &want3);
    assert_int_equal(second.cached, 192);
    assert_int_equal(third.cached, 128);
    nb_engine_close(&e);
}

static answer ask_form(const char *form, bool no_cache, const int32_t *prompt, uint32_t n)
{
    nb_engine *e =
        open_engine(&(setup){.form = form, .block = 64, .no_cache = no_cache, .level = "avx512"});
    const answer a = ask(e, prompt, n, true);
    nb_engine_close(&e);
    return a;
}

/* auto: expanded where requests do not share pages, absorbed where they do. */
static void auto_follows_the_prefix_cache(void **state)
{
    (void)state;
    int32_t prompt[CONTEXT];
    make_prompt(prompt, 300, 300, 0);
    const answer absorbed = ask_form("absorbed", true, prompt, 300);
    const answer expanded = ask_form("expanded", true, prompt, 300);
    const answer shared = ask_form("auto", false, prompt, 300);
    const answer unshared = ask_form("auto", true, prompt, 300);
    assert_same(&shared, &absorbed);
    assert_same(&unshared, &expanded);
    assert_memory_not_equal(absorbed.prompt, expanded.prompt, sizeof absorbed.prompt);
}

static void bad_settings_are_refused(void **state)
{
    (void)state;
    nb_engine_options o;
    nb_engine *e = NULL;
    nb_error err;
    nb_engine_options_default(&o);
    o.model_dir = MODEL;
    o.mla_prefill = "both";
    assert_int_equal(nb_engine_open(&e, &o, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "--mla-prefill"));
    o.mla_prefill = "expanded";
    static const uint32_t blocks[] = {32, 96};
    for (int i = 0; i < 2; i++) {
        o.mla_prefill_block = blocks[i];
        assert_int_equal(nb_engine_open(&e, &o, &err), NB_INVALID);
        assert_non_null(strstr(err.text, "--mla-prefill-block"));
    }
    o.mla_prefill_block = 64;
    o.max_context = 192;
    o.model_dir = DATA("v32-bf16"); /* an indexer: served absorbed */
    assert_int_equal(nb_engine_open(&e, &o, &err), NB_OK);
    nb_engine_close(&e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits_however_cut),
        cmocka_unit_test(same_bits_together_and_preempted),
        cmocka_unit_test(cached_pages_carry_their_form),
        cmocka_unit_test(answers_come_back),
        cmocka_unit_test(auto_follows_the_prefix_cache),
        cmocka_unit_test(bad_settings_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
