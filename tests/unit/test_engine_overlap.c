/* Overlap of host and device: events of a step are written beside the next one, and nothing else
 * changes. Compiled a second time for the CUDA backend. */
#include "cmocka_all.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "nibble.h"
#include "scratch.h"

#define MODEL NBI_TEST_SOURCE_DIR "/tests/golden/data/glm5-bf16"
#ifdef NBI_TEST_OVERLAP_CUDA
#define DEVICE "cuda"
enum { ANSWER = 6, LONGEST = 12, REQUESTS = 10, LATER = 7, CANCELLED_AT = 2 }; /* emulated */
#else
#define DEVICE "cpu"
enum { ANSWER = 40, LONGEST = 150, REQUESTS = 40, LATER = 25, CANCELLED_AT = 6 };
#endif

static char *model; /* MODEL and a tokenizer: two letters a token */

static int make_model(void **state)
{
    (void)state;
    static const char *const files[] = {"config.json",
                                        "generation_config.json",
                                        "model-00001-of-00003.safetensors",
                                        "model-00002-of-00003.safetensors",
                                        "model-00003-of-00003.safetensors",
                                        "model.safetensors.index.json"};
    json_t *vocab = json_object();
    model = scratch_make();
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char from[600];
        snprintf(from, sizeof from, "%s/%s", MODEL, files[i]);
        if (symlink(from, scratch_path(model, files[i]))) return -1;
    }
    for (int i = 0; i < 128; i++) {
        const char token[] = {(char)('a' + i % 26), (char)('a' + i / 26), 0};
        json_object_set_new(vocab, token, json_integer(i));
    }
    json_t *tokenizer =
        json_pack("{s:s, s:[], s:{s:s, s:b}, s:{s:s}, s:{s:s, s:o, s:[]}}", "version", "1.0",
                  "added_tokens", "pre_tokenizer", "type", "ByteLevel", "add_prefix_space", 0,
                  "decoder", "type", "ByteLevel", "model", "type", "BPE", "vocab", vocab, "merges");
    char *text = json_dumps(tokenizer, 0);
    scratch_write_text(model, "tokenizer.json", text);
    free(text);
    json_decref(tokenizer);
    return 0;
}

static int remove_model(void **state)
{
    (void)state;
    scratch_remove(model);
    return 0;
}

typedef struct setting {
    const char *algorithm;
    uint32_t running, chunk;
    uint64_t kv_tokens;
    bool cached;
} setting;

static nb_engine *open_engine(setting s, const char *overlap)
{
    nb_engine_options o;
    nb_error err = {0};
    nb_engine *e = NULL;
    nb_engine_options_default(&o);
    o.model_dir = model;
    o.device = DEVICE;
    o.n_threads = 1;
    o.max_context = 256;
    o.max_running = s.running;
    o.chunk_size = s.chunk;
    o.kv_tokens = s.kv_tokens;
    o.speculative_algorithm = s.algorithm;
    o.disable_prefix_cache = !s.cached;
    o.overlap_schedule = overlap;
    if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    return e;
}

/* ---------------------------------------------------------------- a grammar with a memory */

typedef struct summing {
    uint32_t sum, n, history[1024]; /* sums before each token */
    bool released;
} summing;

static void summing_mask(void *user, uint32_t *bits, size_t n_words)
{
    const summing *s = user;
    for (size_t i = 0; i < n_words; i++) bits[i] = 0x08421084u << (s->sum + i) % 5;
}

static void summing_accept(void *user, int32_t id)
{
    summing *s = user;
    assert_true(s->n < 1024);
    s->history[s->n++] = s->sum;
    s->sum = s->sum * 31 + (uint32_t)id;
}

static void summing_rollback(void *user, uint32_t n)
{
    summing *s = user;
    assert_true(n <= s->n);
    s->n -= n;
    s->sum = s->history[s->n];
}

static void summing_release(void *user)
{
    summing *s = user;
    s->released = true;
}

/* ---------------------------------------------------------------- requests */

typedef struct answer {
    nb_request *r;
    summing grammar;
    uint64_t hash; /* of all that the events say */
    uint32_t n;
    nb_finish finish;
    int32_t matched_string;
} answer;

static void choose_sampling(nb_sampling *s, uint32_t k)
{
    static const nb_logit_bias bias[] = {{.id = 40, .bias = 3}, {.id = 17, .bias = -100}};
    static const int32_t pair[] = {30, 31};
    static const nb_ids words[] = {{pair, 2}};
    s->temperature = k % 2 ? 0.9f : 0;
    s->has_seed = true;
    s->seed = 77 + k;
    s->max_tokens = k % 7 == 3 ? 1 + k % 3 : ANSWER + k % 5;
    s->ignore_eos = k % 3 == 0;
    switch (k % 10) {
    case 1: s->n_stop_strings = 2, s->stop_strings[0] = "zb", s->stop_strings[1] = "e"; break;
    case 2: s->n_logprobs = 3, s->prompt_logprobs = true; break;
    case 3: s->repeat_count = 2, s->repeat_max = 3; break;
    case 4:
        s->n_stop_strings = 1, s->stop_strings[0] = "a", s->min_tokens = 4, s->include_stop = true;
        s->max_tokens = ANSWER;
        break;
    case 5: s->frequency_penalty = 0.5f, s->n_logit_bias = 2, s->logit_bias = bias; break;
    case 6: s->n_stop_regex = 1, s->stop_regex[0] = "[aeiou][bc]t"; break;
    case 7: s->n_bad_words = 1, s->bad_words = words, s->n_logprobs = 0; break;
    case 9: s->n_stop_strings = 1, s->stop_strings[0] = "b"; break;
    default: break;
    }
}

static void submit(answer *a, nb_engine *e, uint32_t k)
{
    int32_t prompt[LONGEST];
    const nb_grammar g = {.user = &a->grammar,
                          .mask = summing_mask,
                          .accept = summing_accept,
                          .rollback = k % 20 == 8 ? summing_rollback : NULL,
                          .release = summing_release};
    nb_request_options o = {.prompt = prompt,
                            .n_prompt = 2 + k * 29 % (LONGEST - 2),
                            .grammar = k % 10 == 8 ? &g : NULL};
    nb_error err;
    for (uint32_t i = 0; i < LONGEST; i++)
        prompt[i] = (int32_t)(i < 64 ? i * 7 % 100 : (i * k + i * i) % 110);
    nb_sampling_default(e, &o.sampling);
    choose_sampling(&o.sampling, k);
    *a = (answer){.hash = 14695981039346656037u, .matched_string = -1};
    if (nb_request_submit(&a->r, e, &o, &err) != NB_OK) fail_msg("%s", err.text);
}

static void mix(answer *a, const void *bytes, size_t n)
{
    const unsigned char *p = bytes;
    for (size_t i = 0; i < n; i++) a->hash = (a->hash ^ p[i]) * 1099511628211u;
}

static void read_events_for(answer *a, int wait_ms)
{
    nb_event ev;
    while (a->r && nb_request_read(a->r, &ev, wait_ms, NULL) == NB_OK) {
        mix(a, &ev.id, sizeof ev.id);
        mix(a, ev.text, ev.n_text);
        mix(a, &ev.finish, sizeof ev.finish);
        mix(a, &ev.matched_id, sizeof ev.matched_id);
        mix(a, &ev.matched_string, sizeof ev.matched_string);
        if (ev.has_logprob) mix(a, &ev.logprob, sizeof ev.logprob);
        mix(a, ev.top, ev.n_top * sizeof *ev.top);
        a->n += ev.id >= 0 && !ev.is_prompt;
        a->finish = ev.finish;
        a->matched_string = ev.matched_string;
    }
}

static void read_events(answer *a)
{
    read_events_for(a, 0);
}

static bool step(nb_engine *e)
{
    bool worked;
    assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
    return worked;
}

/* All requests, some of which come later, and one of which is cancelled unless `cancelled` is
 * REQUESTS. */
static nb_engine_stats serve(setting s, const char *overlap, uint32_t cancelled, answer *out)
{
    nb_engine *e = open_engine(s, overlap);
    nb_engine_stats stats;
    uint32_t n = LATER;
    for (uint32_t k = 0; k < n; k++) submit(&out[k], e, k);
    for (uint32_t steps = 0; step(e) || n < REQUESTS; steps++) {
        assert_true(steps < 5000);
        if (steps % 3 == 1 && n < REQUESTS) submit(&out[n], e, n), n++;
        for (uint32_t k = 0; k < n; k++) read_events(&out[k]);
        if (steps == CANCELLED_AT && cancelled < n) nb_request_cancel(out[cancelled].r);
    }
    nb_engine_get_stats(e, &stats);
    assert_int_equal(stats.n_running + stats.n_waiting, 0);
    assert_int_equal(stats.kv_tokens_used, 0);
    for (uint32_t k = 0; k < REQUESTS; k++) {
        assert_int_not_equal(out[k].finish, NB_FINISH_NONE);
        nb_request_close(&out[k].r);
        if (k % 10 == 8) assert_true(out[k].grammar.released);
    }
    nb_engine_close(&e);
    return stats;
}

static void compare(const answer *a, const answer *b, uint32_t but)
{
    for (uint32_t k = 0; k < REQUESTS; k++) {
        if (k == but) continue;
        if (a[k].hash != b[k].hash || a[k].n != b[k].n || a[k].finish != b[k].finish)
            fail_msg("request %u: %u tokens, finish %d; with overlap %u, %d", k, a[k].n,
                     (int)a[k].finish, b[k].n, (int)b[k].finish);
    }
}

static const setting settings[] = {
    {"none", 32, 64, 0, true},
    {"mtp", 32, 64, 0, true},
#ifndef NBI_TEST_OVERLAP_CUDA
    {"mtp", 6, 512, 512, true},
    {"none", 8, 512, 512, false} /* too few pages */
#endif
};

static void same_answers(void **state)
{
    (void)state;
    static answer off[REQUESTS], on[REQUESTS];
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        const nb_engine_stats a = serve(settings[i], "off", REQUESTS, off);
        const nb_engine_stats b = serve(settings[i], "on", REQUESTS, on);
        uint32_t by_string = 0;
        compare(off, on, REQUESTS);
        for (uint32_t k = 0; k < REQUESTS; k++) by_string += off[k].matched_string >= 0;
        assert_true(by_string >= REQUESTS / 10);
        assert_int_equal(a.generated_tokens, b.generated_tokens);
        assert_int_equal(a.requests_finished, b.requests_finished);
        assert_int_equal(a.request_prompt_tokens, b.request_prompt_tokens);
        assert_memory_equal(a.requests_ended, b.requests_ended, sizeof a.requests_ended);
        if (i == 3) assert_true(a.preemptions && b.preemptions);
        if (settings[i].algorithm[0] == 'm') assert_true(a.draft_accepted && b.draft_accepted);
    }
}

/* One is cancelled on its way: the others do not notice, and accounts are as without. */
static void a_cancelled_request(void **state)
{
    (void)state;
    static answer off[REQUESTS], on[REQUESTS];
    for (uint32_t k = 0; k < REQUESTS / 20 + 1; k++) {
        const nb_engine_stats a = serve(settings[k % 2], "off", REQUESTS, off);
        const nb_engine_stats b = serve(settings[k % 2], "on", 2 * k, on);
        compare(off, on, 2 * k);
        assert_int_equal(on[2 * k].finish, NB_FINISH_CANCELLED);
        assert_int_equal(b.requests_cancelled, 1);
        assert_int_equal(a.requests_finished, b.requests_finished + 1);
        assert_true(on[2 * k].n <= off[2 * k].n);
    }
}

/* With overlap an event comes with the step behind its own; the pages of a request that ends are
 * free when its last event can be read, those of a cancelled one a step later at most. */
static void when_what_happens(void **state)
{
    (void)state;
    for (int on = 0; on < 2; on++) {
        nb_engine *e = open_engine((setting){"none", 4, 64, 0, false}, on ? "on" : "off");
        nb_engine_stats stats;
        answer a, other;
        submit(&a, e, 1); /* ends with a stop string */
        assert_true(step(e));
        read_events(&a);
        assert_int_equal(a.n, !on);
        while (a.finish == NB_FINISH_NONE) {
            assert_true(step(e));
            read_events(&a);
        }
        assert_true(a.matched_string >= 0);
        nb_engine_get_stats(e, &stats);
        assert_int_equal(stats.kv_tokens_used, 0);
        assert_int_equal(stats.n_running, 0);
        nb_request_close(&a.r);
        submit(&other, e, 0);
        for (int i = 0; i < 3; i++) step(e);
        nb_request_cancel(other.r);
        step(e);
        nb_engine_get_stats(e, &stats);
        assert_int_equal(stats.kv_tokens_used, 0);
        read_events(&other);
        assert_int_equal(other.finish, NB_FINISH_CANCELLED);
        assert_int_equal(other.n, 3); /* none that was computed is lost */
        nb_request_close(&other.r);
        assert_false(step(e));
        nb_engine_close(&e);
    }
}

#ifndef NBI_TEST_OVERLAP_CUDA
/* A sampled answer of 100 tokens behind 60, and its text if wanted. */
static void ask(answer *a, nb_engine *e, uint64_t seed, const char *stop, char *text)
{
    int32_t prompt[60];
    nb_request_options o = {.prompt = prompt, .n_prompt = 60};
    nb_event ev;
    for (int32_t i = 0; i < 60; i++) prompt[i] = i * 7 % 100;
    nb_sampling_default(e, &o.sampling);
    o.sampling.has_seed = o.sampling.ignore_eos = true;
    o.sampling.seed = seed;
    o.sampling.max_tokens = 100;
    o.sampling.n_stop_strings = stop ? 1 : 0;
    o.sampling.stop_strings[0] = stop;
    *a = (answer){.hash = 1, .matched_string = -1};
    assert_int_equal(nb_request_submit(&a->r, e, &o, NULL), NB_OK);
    while (text && step(e)) {
        while (nb_request_read(a->r, &ev, 0, NULL) == NB_OK) {
            memcpy(text, ev.text, ev.n_text);
            text += ev.n_text;
        }
    }
}

/* Two requests outgrow the pages, so that the younger goes back to the queue, and its stop string
 * comes somewhere around that: in the very step before, too. */
static void a_stop_string_of_one_put_back(void **state)
{
    (void)state;
    const setting small = {"none", 2, 512, 256, false};
    char text[300] = "", stop[9] = "";
    uint32_t preempted = 0;
    answer a, b[2];
    nb_engine *e = open_engine(small, "off");
    ask(&a, e, 2, NULL, text);
    nb_request_close(&a.r);
    nb_engine_close(&e);
    assert_int_equal(strlen(text), 200); /* two letters a token */
    for (uint32_t n = 60; n < 76; n++) {
        memcpy(stop, text + 2 * n - 8, 8);
        for (int on = 0; on < 2; on++) {
            nb_engine_stats stats;
            e = open_engine(small, on ? "on" : "off");
            ask(&a, e, 1, NULL, NULL);
            ask(&b[on], e, 2, stop, NULL);
            while (step(e)) read_events(&a), read_events(&b[on]);
            nb_engine_get_stats(e, &stats);
            assert_int_equal(stats.kv_tokens_used + stats.n_running + stats.n_waiting, 0);
            assert_int_equal(stats.generated_tokens, 100 + n);
            preempted += stats.preemptions > 0;
            nb_request_close(&a.r);
            nb_request_close(&b[on].r);
            nb_engine_close(&e);
        }
        assert_int_equal(b[0].n, n);
        assert_int_equal(b[0].matched_string, 0);
        assert_true(b[1].n == n && b[1].hash == b[0].hash);
    }
    assert_in_range(preempted, 1, 31); /* it does lie around it */
}

typedef struct user {
    nb_engine *e;
    uint32_t first;
    answer *answers;
} user;

static void *use(void *arg)
{
    user *u = arg;
    for (uint32_t k = u->first; k < REQUESTS; k += 4) {
        submit(&u->answers[k], u->e, k);
        if (k % 8 == 5) nb_request_cancel(u->answers[k].r);
        read_events_for(&u->answers[k], 60000);
        nb_request_close(&u->answers[k].r);
    }
    return NULL;
}

/* The same from the engine's own thread, with readers in four others. */
static void readers_in_threads(void **state)
{
    (void)state;
    static answer off[REQUESTS], on[REQUESTS];
    pthread_t threads[4];
    user users[4];
    (void)serve(settings[1], "off", REQUESTS, off);
    nb_engine *e = open_engine(settings[1], "on");
    assert_int_equal(nb_engine_start(e, NULL), NB_OK);
    for (uint32_t i = 0; i < 4; i++) {
        users[i] = (user){e, i, on};
        assert_int_equal(pthread_create(&threads[i], NULL, use, &users[i]), 0);
    }
    for (uint32_t i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    nb_engine_close(&e);
    for (uint32_t k = 0; k < REQUESTS; k++) {
        if (k % 8 != 5) assert_true(off[k].hash == on[k].hash && off[k].finish == on[k].finish);
        if (k % 8 == 5) assert_int_not_equal(on[k].finish, NB_FINISH_NONE);
    }
}
#endif

static void auto_follows_the_device(void **state)
{
    (void)state;
    nb_engine *e = open_engine(settings[0], NULL);
    answer a;
    submit(&a, e, 0);
    step(e);
    read_events(&a);
#ifdef NBI_TEST_OVERLAP_CUDA
    assert_int_equal(a.n, 0);
#else
    assert_int_equal(a.n, 1);
#endif
    nb_request_close(&a.r);
    nb_engine_close(&e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_answers),
        cmocka_unit_test(a_cancelled_request),
        cmocka_unit_test(when_what_happens),
        cmocka_unit_test(auto_follows_the_device),
#ifndef NBI_TEST_OVERLAP_CUDA
        cmocka_unit_test(a_stop_string_of_one_put_back),
        cmocka_unit_test(readers_in_threads),
#endif
    };
    return cmocka_run_group_tests(tests, make_model, remove_model);
}
