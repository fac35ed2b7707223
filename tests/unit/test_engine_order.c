/* Who is admitted before whom: nobody is passed over for ever. */
#include "cmocka_all.h"

#include "engine/engine.h"
#include "nibble.h"

#define DATA(name)     NBI_TEST_SOURCE_DIR "/tests/golden/data/" name
#define ALWAYS_WAITING 3
#define PASSES         128 /* of queue.c */
#define PASSES_MAX     1024

static nb_engine *open_engine(const char *policy)
{
    nb_engine_options o;
    nb_error err = {0};
    nb_engine *e = NULL;
    nb_engine_options_default(&o);
    o.model_dir = DATA("lite-bf16");
    o.max_running = 1;
    o.max_context = 192;
    o.schedule_policy = policy;
    if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    return e;
}

/* 70 tokens that begin with `first`: one full page, the rest is of no interest. */
static nb_request *submit_as(nb_engine *e, int32_t first, int32_t priority)
{
    int32_t prompt[70];
    for (int32_t i = 0; i < 70; i++) prompt[i] = (first + i * i) % 90;
    nb_request_options o = {.prompt = prompt, .n_prompt = 70, .priority = priority};
    nb_error err = {0};
    nb_request *r = NULL;
    nb_sampling_default(e, &o.sampling);
    o.sampling.max_tokens = 2;
    o.sampling.ignore_eos = true;
    if (nb_request_submit(&r, e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    return r;
}

static nb_request *submit(nb_engine *e, int32_t first)
{
    return submit_as(e, first, 0);
}

static bool has_ended(nb_request *r)
{
    nb_event event;
    nb_status st = nb_request_read(r, &event, 0, NULL);
    if (st == NB_OK && event.finish == NB_FINISH_NONE) return has_ended(r);
    return st == NB_CLOSED || (st == NB_OK && event.finish != NB_FINISH_NONE);
}

static void finish(nb_engine *e, nb_request *r)
{
    bool worked;
    while (!has_ended(r)) assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
    nb_request_close(&r);
}

/* One request that begins like no other comes while there are always some that begin like one that
 * is cached. Returns how many of those end before it. */
static uint32_t passed_over(const char *policy)
{
    nb_engine *e = open_engine(policy);
    finish(e, submit(e, 1));
    nb_request *warm[ALWAYS_WAITING], *cold = submit(e, 2);
    for (uint32_t i = 0; i < ALWAYS_WAITING; i++) warm[i] = submit(e, 1);
    uint32_t ended = 0;
    while (!has_ended(cold)) {
        bool worked;
        assert_true(ended < 1000);
        assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
        for (uint32_t i = 0; i < ALWAYS_WAITING; i++) {
            if (!has_ended(warm[i])) continue;
            ended++;
            nb_request_close(&warm[i]);
            warm[i] = submit(e, 1);
        }
    }
    nb_request_close(&cold);
    for (uint32_t i = 0; i < ALWAYS_WAITING; i++) finish(e, warm[i]);
    nb_engine_close(&e);
    return ended;
}

/* C67 under lpm: cached beginnings go first, but not without end. */
static void longest_prefix_first_has_a_bound(void **state)
{
    (void)state;
    assert_in_range(passed_over("lpm"), PASSES, PASSES + 1);
}

static void first_come_is_first_served(void **state)
{
    (void)state;
    assert_int_equal(passed_over("fcfs"), 0);
}

/* A request that everything else goes before, by its priority, has its turn after so many. */
static void a_low_priority_does_not_starve(void **state)
{
    (void)state;
    nb_engine *e = open_engine("fcfs");
    nb_request *low = submit_as(e, 2, 0), *high[2];
    uint32_t ended = 0;
    for (int i = 0; i < 2; i++) high[i] = submit_as(e, 1, -5);
    while (!has_ended(low)) {
        bool worked;
        assert_true(ended < 2 * PASSES_MAX);
        assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
        for (int i = 0; i < 2; i++) {
            if (!has_ended(high[i])) continue;
            ended++;
            nb_request_close(&high[i]);
            high[i] = submit_as(e, 1, -5);
        }
    }
    assert_in_range(ended, PASSES_MAX, PASSES_MAX + 1);
    nb_request_close(&low);
    for (int i = 0; i < 2; i++) finish(e, high[i]);
    nb_engine_close(&e);
}

static nb_request *submit_long(nb_engine *e, uint32_t n, uint32_t max_tokens, int32_t first)
{
    int32_t prompt[192];
    for (uint32_t i = 0; i < n; i++) prompt[i] = (first + (int32_t)(i * i)) % 90;
    nb_request_options o = {.prompt = prompt, .n_prompt = n};
    nb_request *r = NULL;
    nb_sampling_default(e, &o.sampling);
    o.sampling.max_tokens = max_tokens;
    o.sampling.ignore_eos = true;
    assert_int_equal(nb_request_submit(&r, e, &o, NULL), NB_OK);
    return r;
}

/* The first in line waits for pages, and its prefix is not looked up in every step. */
static void the_prefix_of_a_waiting_request_is_remembered(void **state)
{
    (void)state;
    for (int lpm = 0; lpm < 2; lpm++) {
        nb_engine_options o;
        nb_engine *e = NULL;
        nb_engine_stats stats;
        bool worked;
        nb_engine_options_default(&o);
        o.model_dir = DATA("lite-bf16");
        o.max_running = 2;
        o.max_context = o.kv_tokens = 192;
        o.schedule_policy = lpm ? "lpm" : "fcfs";
        assert_int_equal(nb_engine_open(&e, &o, NULL), NB_OK);
        nb_request *first = submit_long(e, 70, 40, 1);
        assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
        nb_request *second = submit_long(e, 130, 10, 2), *third = submit_long(e, 131, 10, 3);
        assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
        const uint64_t lookups = e->prefix.n_lookups;
        assert_true(lookups > 0);
        for (int i = 0; i < 20; i++) assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
        nb_engine_get_stats(e, &stats);
        assert_int_equal(stats.n_running, 1);
        assert_int_equal(stats.n_waiting, 2);
        assert_int_equal(e->prefix.n_lookups, lookups);
        finish(e, first);
        finish(e, second);
        finish(e, third);
        assert_true(e->prefix.n_lookups > lookups);
        nb_engine_close(&e);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(longest_prefix_first_has_a_bound),
        cmocka_unit_test(first_come_is_first_served),
        cmocka_unit_test(a_low_priority_does_not_starve),
        cmocka_unit_test(the_prefix_of_a_waiting_request_is_remembered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
