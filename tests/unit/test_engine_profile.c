/* Profiles of an engine: which steps are timed, what start and stop refuse, sums, and start and
 * stop beside an engine that runs. On the CPU, or in a build with CUDA on that
 * (NBI_TEST_PROFILE_CUDA). */
#include "cmocka_all.h"

#include <math.h>
#include <string.h>

#include "base/json.h"
#include "nibble.h"

#define MODEL NBI_TEST_SOURCE_DIR "/tests/golden/data/glm52-bf16"

#ifdef NBI_TEST_PROFILE_CUDA
#define DEVICE "cuda"
enum { ROUNDS = 2 };
#else
#define DEVICE "cpu"
enum { ROUNDS = 10 };
#endif

enum { PROMPT = 5, SAMPLED = 3 };

static nb_engine *open_engine(uint32_t interval)
{
    nb_engine_options o;
    nb_engine *e;
    nb_error err = {0};
    nb_engine_options_default(&o);
    o.model_dir = MODEL;
    o.device = DEVICE;
    o.n_threads = 1;
    o.max_context = 64;
    o.kv_tokens = 256;
    o.timing_interval = interval;
    if (nb_engine_open(&e, &o, &err)) fail_msg("%s", err.text);
    return e;
}

static nb_request *submit(nb_engine *e, uint32_t n_tokens)
{
    static const int32_t prompt[PROMPT] = {7, 3, 9, 1, 4};
    nb_request_options o = {.prompt = prompt, .n_prompt = PROMPT};
    nb_request *r;
    nb_error err = {0};
    nb_sampling_default(e, &o.sampling);
    o.sampling.temperature = 0;
    o.sampling.max_tokens = n_tokens;
    o.sampling.ignore_eos = true;
    if (nb_request_submit(&r, e, &o, &err)) fail_msg("%s", err.text);
    return r;
}

/* Steps until the request has ended: the prompt's and one for every further token. */
static void generate(nb_engine *e, uint32_t n_tokens)
{
    nb_request *r = submit(e, n_tokens);
    nb_error err = {0};
    bool worked = true;
    while (worked)
        if (nb_engine_step(e, &worked, &err)) fail_msg("%s", err.text);
    nb_request_close(&r);
}

static void start(nb_engine *e, uint32_t n_steps, uint32_t skip_steps, bool by_stage)
{
    const nb_profile_options o = {n_steps, skip_steps, by_stage};
    nb_error err = {0};
    if (nb_engine_profile_start(e, &o, &err)) fail_msg("%s", err.text);
}

/* Stops it: steps of decode and of prefill in its tables. */
static void stop(nb_engine *e, uint32_t *decode, uint32_t *prefill)
{
    nb_profile p;
    nb_error err = {0};
    json_t *tables, *trace;
    if (nb_engine_profile_stop(e, &p, &err)) fail_msg("%s", err.text);
    if (nbi_json_parse(&tables, p.breakdown, p.n_breakdown, "tables", &err) ||
        nbi_json_parse(&trace, p.trace, p.n_trace, "trace", &err))
        fail_msg("%s", err.text);
    *decode = *prefill = 0;
    for (size_t i = 0; i < json_array_size(tables); i++) {
        const json_t *t = json_array_get(tables, i);
        const char *stage = json_string_value(json_object_get(t, "stage"));
        const uint32_t n = (uint32_t)json_integer_value(json_object_get(t, "steps"));
        *(strcmp(stage, "decode") == 0 ? decode : prefill) = n;
    }
    assert_true(json_equal(tables, json_object_get(trace, "breakdown")));
    json_decref(tables);
    json_decref(trace);
    nb_profile_free(&p);
    assert_null(p.trace);
}

static void the_right_steps(void **state)
{
    (void)state;
    nb_engine *e = open_engine(0);
    uint32_t decode, prefill;
    start(e, 0, 0, false);
    generate(e, 6);
    assert_false(nb_engine_profile_is_done(e));
    stop(e, &decode, &prefill);
    assert_int_equal(decode, 5);
    assert_int_equal(prefill, 1);
    start(e, 2, 3, false);
    generate(e, 8);
    assert_true(nb_engine_profile_is_done(e));
    stop(e, &decode, &prefill);
    assert_int_equal(decode, 2);
    assert_int_equal(prefill, 0);
    start(e, 2, 0, true);
    for (int i = 0; i < 3; i++) generate(e, 2);
    stop(e, &decode, &prefill);
    assert_int_equal(decode, 2);
    assert_int_equal(prefill, 2);
    nb_engine_close(&e);
}

static void states(void **state)
{
    (void)state;
    nb_engine *e = open_engine(0);
    nb_profile p;
    nb_error err = {0};
    uint32_t decode, prefill;
    const nb_profile_options o = {.n_steps = 1};
    assert_int_equal(nb_engine_profile_stop(e, &p, &err), NB_NOT_FOUND);
    start(e, 1, 0, false);
    assert_int_equal(nb_engine_profile_start(e, &o, &err), NB_BUSY);
    generate(e, 2);
    assert_true(nb_engine_profile_is_done(e));
    start(e, 1, 0, false); /* what is done gives way */
    assert_false(nb_engine_profile_is_done(e));
    stop(e, &decode, &prefill);
    assert_int_equal(decode + prefill, 0);
    assert_int_equal(nb_engine_profile_stop(e, &p, &err), NB_NOT_FOUND);
    start(e, 0, 0, false); /* closing ends it */
    nb_engine_close(&e);
}

static void sums(void **state)
{
    (void)state;
    nb_engine *e = open_engine(3);
    nb_component_stats s;
    nb_engine_stats stats;
    uint32_t decode, prefill;
    nb_engine_get_components(e, &s);
    assert_int_equal(s.steps, 0);
    generate(e, 9);
    nb_engine_get_components(e, &s);
    assert_int_equal(s.steps, SAMPLED); /* of nine */
    start(e, 0, 0, false);
    generate(e, 2);
    stop(e, &decode, &prefill);
    nb_engine_get_components(e, &s);
    assert_int_equal(s.steps, SAMPLED + 2);
    uint64_t ns = 0;
    for (uint32_t i = 0; i < s.n; i++) ns += s.components[i].ns;
    assert_int_equal(ns, s.step_ns);
    assert_string_equal(s.components[0].name, "attention");
    assert_true(s.components[0].calls > 0 && s.components[0].bytes > 0);
    nb_engine_get_stats(e, &stats);
    assert_int_equal(stats.decode_steps, 9);
    assert_true(stats.decode_ns > 0 && stats.decode_bytes > 8 * 100000);
    const bool cuda = !strcmp(DEVICE, "cuda");
    assert_int_equal(stats.read_bandwidth > 0, cuda);
    /* eleven passes of four shapes: timed or not, a prompt or a token; the first of each is
     * launched */
    assert_int_equal(stats.passes_launched + stats.passes_recorded, cuda ? 11 : 0);
    assert_true(!cuda || (stats.passes_recorded > 0 && stats.passes_launched > 0));
    nb_engine_set_read_bandwidth(e, 5e9);
    nb_engine_get_stats(e, &stats);
    assert_true(fabs(stats.read_bandwidth - 5e9) < 1);
    nb_engine_close(&e);
}

/* Reads all of it, with a profile for every event. */
static void read_with_profiles(nb_engine *e, nb_request *r)
{
    nb_error err = {0};
    nb_event event;
    nb_component_stats s;
    uint32_t decode, prefill;
    nb_status st = NB_OK;
    while (st == NB_OK) {
        start(e, 0, 0, false);
        st = nb_request_read(r, &event, -1, &err);
        nb_engine_get_components(e, &s);
        stop(e, &decode, &prefill);
    }
    assert_int_equal(st, NB_CLOSED);
    nb_request_close(&r);
}

static void beside_a_running_engine(void **state)
{
    (void)state;
    nb_engine *e = open_engine(2);
    nb_error err = {0};
    nb_event event;
    uint32_t decode, prefill;
    if (nb_engine_start(e, &err)) fail_msg("%s", err.text);
    for (int i = 0; i < ROUNDS; i++) read_with_profiles(e, submit(e, 20));
    start(e, 0, 0, false);
    nb_request *r = submit(e, 20);
    while (nb_request_read(r, &event, -1, &err) == NB_OK) {}
    stop(e, &decode, &prefill); /* the step that wrote the last event is under way or over */
    assert_int_equal(decode, 19);
    assert_int_equal(prefill, 1);
    nb_request_close(&r);
    nb_engine_close(&e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_right_steps),
        cmocka_unit_test(states),
        cmocka_unit_test(sums),
        cmocka_unit_test(beside_a_running_engine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
