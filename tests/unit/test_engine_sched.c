/* Turns of clients, time limits, bounds of the queue, steps between looks at it. */
#include "cmocka_all.h"

#include <string.h>
#include <time.h>

#include "nibble.h"

#define MODEL NBI_TEST_SOURCE_DIR "/tests/golden/data/glm52-nvfp4-routed"

static nb_engine *open_engine(uint32_t running, uint32_t queued, uint32_t decode_steps)
{
    nb_engine_options o;
    nb_error err = {0};
    nb_engine *e = NULL;
    nb_engine_options_default(&o);
    o.model_dir = MODEL;
    o.chunk_size = 16;
    o.max_running = running;
    o.max_context = 192;
    o.max_queued = queued;
    o.decode_steps = decode_steps;
    if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    return e;
}

typedef struct wish {
    uint64_t client;
    uint32_t n_prompt, max_tokens, timeout_ms;
    int32_t priority;
    bool prompt_logprobs;
} wish;

static nb_status submit(nb_request **out, nb_engine *e, wish w)
{
    int32_t prompt[180];
    nb_request_options o = {.prompt = prompt,
                            .n_prompt = w.n_prompt ? w.n_prompt : 5,
                            .client = w.client,
                            .timeout_ms = w.timeout_ms,
                            .priority = w.priority};
    for (uint32_t i = 0; i < 180; i++) prompt[i] = (int32_t)(i * 7 % 90);
    nb_sampling_default(e, &o.sampling);
    o.sampling.temperature = 0;
    o.sampling.max_tokens = w.max_tokens ? w.max_tokens : 4;
    o.sampling.ignore_eos = true;
    o.sampling.prompt_logprobs = w.prompt_logprobs;
    return nb_request_submit(out, e, &o, NULL);
}

static nb_request *must_submit(nb_engine *e, wish w)
{
    nb_request *r = NULL;
    assert_int_equal(submit(&r, e, w), NB_OK);
    return r;
}

static void step(nb_engine *e)
{
    bool worked;
    assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
}

/* The finish when it is there. */
static nb_finish poll(nb_request *r)
{
    nb_event event;
    while (nb_request_read(r, &event, 0, NULL) == NB_OK) {
        if (event.finish != NB_FINISH_NONE) return event.finish;
    }
    return NB_FINISH_NONE;
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

/* One of 40 requests runs at a time. The one of a client that came last is served second, whatever
 * the first client has in the queue; its second one waits its turn. */
static void clients_take_turns(void **state)
{
    (void)state;
    nb_engine *e = open_engine(1, 100, 1);
    nb_request *many[40], *few[2];
    uint32_t order[2] = {0}, done = 0;
    bool over[42] = {false};
    for (int i = 0; i < 40; i++) many[i] = must_submit(e, (wish){.client = 1});
    step(e); /* many[0] runs */
    for (int i = 0; i < 2; i++) few[i] = must_submit(e, (wish){.client = 2});
    for (int spins = 0; done < 42; spins++) {
        assert_true(spins < 1000);
        step(e);
        for (int i = 0; i < 42; i++) {
            nb_request *r = i < 40 ? many[i] : few[i - 40];
            if (over[i] || poll(r) == NB_FINISH_NONE) continue;
            over[i] = true;
            if (i >= 40) order[i - 40] = done;
            done++;
        }
    }
    assert_int_equal(order[0], 1);
    assert_int_equal(order[1], 3);
    for (int i = 0; i < 40; i++) nb_request_close(&many[i]);
    for (int i = 0; i < 2; i++) nb_request_close(&few[i]);
    nb_engine_close(&e);
}

/* With several places a client that comes late gets the next one that is free, and priority goes
 * before turns. */
static void priority_goes_before_turns(void **state)
{
    (void)state;
    nb_engine *e = open_engine(1, 100, 1);
    nb_request *first = must_submit(e, (wish){.client = 1, .max_tokens = 8});
    step(e);
    nb_request *own = must_submit(e, (wish){.client = 1, .priority = -1});
    nb_request *other = must_submit(e, (wish){.client = 2});
    while (poll(own) == NB_FINISH_NONE) {
        step(e);
        assert_int_equal(poll(other), NB_FINISH_NONE);
    }
    nb_request_close(&first);
    nb_request_close(&own);
    nb_request_close(&other);
    nb_engine_close(&e);
}

/* Late in the queue, in the prompt, in the answer: one step later it has ended and its pages are
 * free. */
static void late_requests_end_in_one_step(void **state)
{
    (void)state;
    nb_engine *e = open_engine(2, 10, 1);
    nb_engine_stats stats;
    nb_request *answers = must_submit(e, (wish){.max_tokens = 100, .timeout_ms = 400});
    step(e);
    nb_request *prompt = must_submit(e, (wish){.n_prompt = 100, .timeout_ms = 400});
    nb_request *waits = must_submit(e, (wish){.timeout_ms = 20});
    step(e);
    sleep_ms(30);
    step(e);
    assert_int_equal(poll(waits), NB_FINISH_TIMEOUT);
    assert_non_null(strstr(nb_request_error(waits), "in the queue"));
    assert_int_equal(poll(answers), NB_FINISH_NONE);
    sleep_ms(400);
    step(e);
    assert_int_equal(poll(answers), NB_FINISH_TIMEOUT);
    assert_int_equal(poll(prompt), NB_FINISH_TIMEOUT);
    assert_non_null(strstr(nb_request_error(answers), "answered"));
    assert_non_null(strstr(nb_request_error(prompt), "prompt was read"));
    nb_engine_get_stats(e, &stats);
    assert_int_equal(stats.kv_tokens_used, 0);
    assert_int_equal(stats.n_running + stats.n_waiting, 0);
    nb_request_close(&answers);
    nb_request_close(&prompt);
    nb_request_close(&waits);
    nb_engine_close(&e);
}

/* An engine that sleeps because the only reader does not read still ends that request in time. */
static void a_sleeping_engine_keeps_time(void **state)
{
    (void)state;
    nb_engine *e = open_engine(1, 10, 1);
    assert_int_equal(nb_engine_start(e, NULL), NB_OK);
    nb_request *r = must_submit(e, (wish){.max_tokens = 180, .timeout_ms = 300});
    nb_engine_stats stats = {0};
    for (int i = 0; i < 200 && !stats.requests_failed; i++) {
        sleep_ms(20);
        nb_engine_get_stats(e, &stats);
    }
    assert_int_equal(stats.requests_failed, 1);
    assert_int_equal(stats.kv_tokens_used, 0);
    nb_request_close(&r);
    nb_engine_close(&e);
}

/* CPU time of the process, in ns. */
static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t steps_of(nb_engine *e)
{
    nb_engine_stats stats;
    nb_engine_get_stats(e, &stats);
    return stats.n_steps;
}

/* Until it makes no more steps. */
static void wait_until_still(nb_engine *e)
{
    uint64_t before;
    do {
        before = steps_of(e);
        sleep_ms(100);
    } while (steps_of(e) != before || !before);
}

static nb_finish read_all(nb_request *r)
{
    nb_event event = {0};
    while (event.finish == NB_FINISH_NONE) {
        nb_error err;
        nb_status status = nb_request_read(r, &event, 20000, &err);
        if (status != NB_OK) fail_msg("no event in 20 s, status %d", (int)status);
    }
    return event.finish;
}

/* Every place is taken by a request whose reader is behind, and others wait: the engine sleeps. It
 * goes on when a reader reads, when a running request is cancelled and when one ends. */
static void an_engine_whose_readers_are_behind_sleeps(void **state)
{
    (void)state;
    for (uint32_t decode_steps = 1; decode_steps <= 100; decode_steps += 99) {
        nb_engine *e = open_engine(2, 10, decode_steps);
        nb_request *runs[2], *waits[3];
        assert_int_equal(nb_engine_start(e, NULL), NB_OK);
        for (int i = 0; i < 2; i++) runs[i] = must_submit(e, (wish){.max_tokens = 180});
        wait_until_still(e);
        for (int i = 0; i < 3; i++) waits[i] = must_submit(e, (wish){.max_tokens = 180});
        sleep_ms(50);
        uint64_t begin = cpu_ns();
        sleep_ms(400);
        assert_in_range(cpu_ns() - begin, 0, 40000000);
        nb_request_cancel(runs[1]); /* its place is waits[0]'s */
        assert_int_equal(read_all(waits[0]), NB_FINISH_LENGTH);
        assert_int_equal(read_all(runs[0]), NB_FINISH_LENGTH);
        for (int i = 1; i < 3; i++) assert_int_equal(read_all(waits[i]), NB_FINISH_LENGTH);
        for (int i = 0; i < 2; i++) nb_request_close(&runs[i]);
        for (int i = 0; i < 3; i++) nb_request_close(&waits[i]);
        nb_engine_close(&e);
    }
}

/* With decode_steps a place that is free is given away although those that run cannot go on. */
static void a_free_place_does_not_wait_for_readers(void **state)
{
    (void)state;
    nb_engine *e = open_engine(2, 10, 1000);
    assert_int_equal(nb_engine_start(e, NULL), NB_OK);
    nb_request *behind = must_submit(e, (wish){.max_tokens = 180});
    wait_until_still(e);
    nb_request *late = must_submit(e, (wish){.max_tokens = 180});
    assert_int_equal(read_all(late), NB_FINISH_LENGTH);
    nb_request_close(&behind);
    nb_request_close(&late);
    nb_engine_close(&e);
}

/* Log-probabilities of a prompt that has more tokens than a reader may be behind, with a batch that
 * could hold them all: they come in pieces, however late they are read. */
static void prompt_logprobs_come_in_pieces(void **state)
{
    (void)state;
    nb_engine_options o;
    nb_error err = {0};
    nb_engine *e = NULL;
    nb_engine_options_default(&o);
    o.model_dir = MODEL;
    o.max_running = 256;
    o.max_context = 192;
    if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    assert_int_equal(nb_engine_start(e, NULL), NB_OK);
    nb_request *r = must_submit(e, (wish){.n_prompt = 180, .prompt_logprobs = true});
    nb_event event = {0};
    uint32_t seen = 0;
    while (event.finish == NB_FINISH_NONE) {
        nb_status status = nb_request_read(r, &event, 20000, &err);
        if (status != NB_OK) fail_msg("no event in 20 s, after %u", seen);
        seen += event.is_prompt;
        if (seen % 40 == 0) sleep_ms(30); /* the engine finds no room meanwhile */
    }
    assert_int_equal(seen, 180);
    nb_request_close(&r);
    nb_engine_close(&e);
}

/* The queue is bounded, and what requests take comes back with them. */
static void a_full_queue_refuses(void **state)
{
    (void)state;
    nb_engine *e = open_engine(1, 3, 1);
    nb_request *r[4], *more = NULL;
    for (int round = 0; round < 50; round++) {
        r[0] = must_submit(e, (wish){0});
        step(e);
        for (int i = 1; i < 4; i++) r[i] = must_submit(e, (wish){0});
        assert_int_equal(submit(&more, e, (wish){0}), NB_BUSY);
        assert_null(more);
        for (int i = 0; i < 4; i++) nb_request_close(&r[i]);
        step(e);
    }
    nb_engine_close(&e);
}

/* Requests that ended but were not closed keep their memory: the planned bytes bound them too. */
static void memory_of_requests_is_bounded(void **state)
{
    (void)state;
    enum { MOST = 2000 };
    static nb_request *r[MOST];
    nb_engine *e = open_engine(2, 4, 1);
    int n = 0;
    nb_status status = NB_OK;
    for (; n < MOST && status == NB_OK; n += status == NB_OK) {
        status = submit(&r[n], e, (wish){.max_tokens = 1});
        for (int i = 0; status == NB_OK && i < 3; i++) step(e);
    }
    assert_int_equal(status, NB_BUSY);
    assert_true(n >= 6);
    nb_request_close(&r[--n]);
    assert_int_equal(submit(&r[n], e, (wish){.max_tokens = 1}), NB_OK);
    for (int i = 0; i <= n; i++) nb_request_close(&r[i]);
    nb_engine_close(&e);
}

/* With decode_steps the queue is looked at later, but at the promised step, and cancelling is not
 * delayed. */
static void the_queue_is_looked_at_every_n_steps(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 5; n += 4) {
        nb_engine *e = open_engine(2, 10, n);
        nb_engine_stats stats;
        nb_request *first = must_submit(e, (wish){.max_tokens = 100});
        step(e); /* admitted, and its prompt read */
        nb_request *second = must_submit(e, (wish){.max_tokens = 100});
        uint32_t steps = 0;
        do {
            step(e);
            nb_engine_get_stats(e, &stats);
            steps++;
        } while (stats.n_running < 2 && steps < 20);
        assert_int_equal(steps, n);
        nb_request_cancel(first);
        step(e);
        assert_int_equal(poll(first), NB_FINISH_CANCELLED);
        nb_request_close(&first);
        nb_request_close(&second);
        nb_engine_close(&e);
    }
}

static void bad_options_name_themselves(void **state)
{
    (void)state;
    nb_engine_options o;
    nb_engine *e = NULL;
    nb_error err;
#define REFUSED(word, set)                                         \
    do {                                                           \
        nb_engine_options_default(&o);                             \
        o.model_dir = MODEL;                                       \
        set;                                                       \
        assert_int_not_equal(nb_engine_open(&e, &o, &err), NB_OK); \
        assert_null(e);                                            \
        if (!strstr(err.text, word)) fail_msg("%s", err.text);     \
    } while (0)
    REFUSED("memory_fraction", o.memory_fraction = 1.5);
    REFUSED("memory_fraction", o.memory_fraction = -1);
    REFUSED("max_queued", o.max_queued = 2000000);
    REFUSED("overlap_schedule", o.overlap_schedule = "maybe");
    REFUSED("decode_steps", o.decode_steps = 5000);
    REFUSED("--max-total-tokens", (o.memory_bytes = 100u << 20, o.kv_tokens = 1u << 30));
    REFUSED("--mem-fraction-static", o.memory_fraction = 1e-9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clients_take_turns),
        cmocka_unit_test(priority_goes_before_turns),
        cmocka_unit_test(late_requests_end_in_one_step),
        cmocka_unit_test(a_sleeping_engine_keeps_time),
        cmocka_unit_test(an_engine_whose_readers_are_behind_sleeps),
        cmocka_unit_test(a_free_place_does_not_wait_for_readers),
        cmocka_unit_test(prompt_logprobs_come_in_pieces),
        cmocka_unit_test(a_full_queue_refuses),
        cmocka_unit_test(memory_of_requests_is_bounded),
        cmocka_unit_test(the_queue_is_looked_at_every_n_steps),
        cmocka_unit_test(bad_options_name_themselves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
