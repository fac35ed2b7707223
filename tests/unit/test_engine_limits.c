/* Allowed ids, bad words and a budget for thinking: held with and without drafts, and beside a
 * grammar. */
#include "cmocka_all.h"

#include <string.h>

#include "nibble.h"

#define DATA(name) NBI_TEST_SOURCE_DIR "/tests/golden/data/" name
#define N          60

static const int32_t prompt[] = {5, 9, 17, 4, 33, 12};

static nb_engine *open_engine(const char *algorithm)
{
    nb_engine_options o;
    nb_error err = {0};
    nb_engine *e = NULL;
    nb_engine_options_default(&o);
    o.model_dir = DATA("glm5-bf16");
    o.max_context = 256;
    o.max_running = 4;
    o.speculative_algorithm = algorithm;
    if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    return e;
}

static nb_sampling sampling_of(const nb_engine *e, uint64_t seed)
{
    nb_sampling s;
    nb_sampling_default(e, &s);
    s.temperature = seed ? 1.3f : 0;
    s.has_seed = true;
    s.seed = seed;
    s.max_tokens = N;
    s.ignore_eos = true;
    return s;
}

/* Only ids below 64, and behind an even one only odd ones. */
typedef struct parity {
    int32_t seen[512];
    uint32_t n;
} parity;

/* Returns the tokens, at most N. */
static size_t run_to_end(nb_engine *e, const nb_sampling *s, const nb_grammar *grammar,
                         int32_t ids[N], nb_finish *finish)
{
    nb_request_options o = {.prompt = prompt, .n_prompt = 6, .sampling = *s, .grammar = grammar};
    nb_request *r = NULL;
    nb_event event = {0};
    nb_error err = {0};
    bool worked;
    size_t n = 0;
    if (grammar) *(parity *)grammar->user = (parity){0};
    if (nb_request_submit(&r, e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    while (event.finish == NB_FINISH_NONE) {
        assert_int_equal(nb_engine_step(e, &worked, &err), NB_OK);
        while (event.finish == NB_FINISH_NONE && nb_request_read(r, &event, 0, &err) == NB_OK)
            ids[n++] = event.id;
    }
    nb_request_close(&r);
    *finish = event.finish;
    return n;
}

static void run(nb_engine *e, const nb_sampling *s, const nb_grammar *grammar, int32_t ids[N])
{
    nb_finish finish;
    assert_int_equal(run_to_end(e, s, grammar, ids, &finish), N);
    assert_int_equal(finish, NB_FINISH_LENGTH);
}

static void refused(nb_engine *e, const nb_sampling *s, const char *field)
{
    nb_request_options o = {.prompt = prompt, .n_prompt = 6, .sampling = *s};
    nb_request *r = NULL;
    nb_error err = {0};
    assert_int_equal(nb_request_submit(&r, e, &o, &err), NB_INVALID);
    if (!strstr(err.text, field)) fail_msg("\"%s\" does not name %s", err.text, field);
}

/* Runs without drafts, then with them: the same tokens, some of them drafted. */
static void run_both(const nb_sampling *s, const nb_grammar *grammar, int32_t ids[N])
{
    int32_t drafted[N];
    nb_engine_stats stats;
    nb_engine *e = open_engine("none");
    run(e, s, grammar, ids);
    nb_engine_close(&e);
    e = open_engine("mtp");
    run(e, s, grammar, drafted);
    nb_engine_get_stats(e, &stats);
    assert_true(stats.draft_tokens > 0);
    run(e, s, grammar, drafted); /* with the prompt cached */
    assert_memory_equal(ids, drafted, sizeof drafted);
    nb_engine_close(&e);
}

static bool contains(const int32_t *ids, size_t n, const nb_ids *word)
{
    for (size_t i = 0; i + word->n <= n; i++) {
        if (memcmp(ids + i, word->ids, word->n * sizeof *ids) == 0) return true;
    }
    return false;
}

static nb_sampling plain_of(uint64_t seed, int32_t ids[N])
{
    nb_engine *e = open_engine("none");
    nb_sampling s = sampling_of(e, seed);
    run(e, &s, NULL, ids);
    nb_engine_close(&e);
    return s;
}

/* ---------------------------------------------------------------- tests */

static void only_allowed_ids_come(void **state)
{
    (void)state;
    static const int32_t allowed[] = {11, 40, 41, 77, 90, 11};
    for (uint64_t seed = 0; seed < 3; seed++) {
        int32_t ids[N];
        nb_sampling s = plain_of(seed, ids);
        s.allowed = allowed;
        s.n_allowed = 6;
        run_both(&s, NULL, ids);
        for (int i = 0; i < N; i++) {
            nb_ids one = {&ids[i], 1};
            assert_true(contains(allowed, 6, &one));
        }
    }
}

static void bad_words_do_not_come(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 3; seed++) {
        int32_t plain[N], ids[N];
        nb_sampling s = plain_of(seed, plain);
        /* one token, a pair, three in a row: all of them in the plain answer */
        const nb_ids words[] = {{plain + 1, 1}, {plain + 5, 2}, {plain + 20, 3}};
        s.bad_words = words;
        s.n_bad_words = 3;
        run_both(&s, NULL, ids);
        for (int w = 0; w < 3; w++) assert_false(contains(ids, N, &words[w]));
        assert_int_equal(ids[0], plain[0] == plain[1] ? ids[0] : plain[0]);
    }
}

/* A pair alone is banned, not its tokens. */
static void a_pair_is_banned_as_a_pair(void **state)
{
    (void)state;
    static const int32_t allowed[] = {50, 51};
    static const int32_t pair[] = {50, 50};
    int32_t ids[N];
    nb_sampling s = plain_of(7, ids);
    const nb_ids word = {pair, 2};
    s.allowed = allowed;
    s.n_allowed = 2;
    s.temperature = 100; /* about even */
    run_both(&s, NULL, ids);
    assert_true(contains(ids, N, &word));
    s.bad_words = &word;
    s.n_bad_words = 1;
    run_both(&s, NULL, ids);
    const nb_ids one = {pair, 1};
    assert_true(contains(ids, N, &one));
    assert_false(contains(ids, N, &word));
}

static void something_is_always_left(void **state)
{
    (void)state;
    static const int32_t allowed[] = {50};
    const nb_ids word = {allowed, 1};
    int32_t ids[N];
    nb_sampling s = plain_of(0, ids);
    s.allowed = allowed;
    s.n_allowed = 1;
    s.bad_words = &word;
    s.n_bad_words = 1;
    run_both(&s, NULL, ids);
    for (int i = 0; i < N; i++) assert_int_equal(ids[i], 50);
}

static void thinking_ends_with_its_budget(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 3; seed++) {
        int32_t plain[N], ids[N], end = 0;
        nb_sampling s = plain_of(seed, plain);
        nb_ids one = {&end, 1};
        while (contains(plain, N, &one)) end++;
        s.has_think_budget = true;
        s.think_open = true;
        s.think_budget = 17;
        s.think_call = -1;
        s.think_end = end;
        s.think_begin = end + 1 == plain[0] ? end + 2 : end + 1;
        run_both(&s, NULL, ids);
        assert_memory_equal(ids, plain, 17 * sizeof *ids);
        assert_int_equal(ids[17], end);
        s.think_call = plain[9]; /* none of the budget is used up before */
        s.think_budget = 10;
        run_both(&s, NULL, ids);
        assert_memory_equal(ids, plain, 10 * sizeof *ids);
        assert_int_not_equal(ids[10], end);
        s.think_call = -1;
        s.think_budget = 0;
        s.think_open = false; /* opened by the answer's first token */
        s.think_begin = plain[0];
        run_both(&s, NULL, ids);
        assert_int_equal(ids[0], plain[0]);
        assert_int_equal(ids[1], end);
    }
}

/* ---------------------------------------------------------------- beside a grammar */

static void parity_mask(void *user, uint32_t *bits, size_t n_words)
{
    const parity *p = user;
    assert_true(n_words >= 2);
    bits[0] = bits[1] = p->n && p->seen[p->n - 1] % 2 == 0 ? 0xaaaaaaaau : 0xffffffffu;
}

static void parity_accept(void *user, int32_t id)
{
    parity *p = user;
    assert_true(p->n < 512);
    p->seen[p->n++] = id;
}

static void parity_rollback(void *user, uint32_t n)
{
    parity *p = user;
    assert_true(n <= p->n);
    p->n -= n;
}

static void limits_go_with_a_grammar(void **state)
{
    (void)state;
    static const int32_t allowed[] = {10, 12, 13, 21, 22, 100};
    static const int32_t banned[] = {22, 21};
    const nb_ids word = {banned, 2};
    for (uint64_t seed = 0; seed < 3; seed++) {
        int32_t ids[N];
        parity p = {0};
        nb_grammar g = {
            .user = &p, .mask = parity_mask, .accept = parity_accept, .rollback = parity_rollback};
        nb_sampling s = plain_of(seed, ids);
        s.allowed = allowed;
        s.n_allowed = 6;
        s.bad_words = &word;
        s.n_bad_words = 1;
        run_both(&s, &g, ids);
        for (int i = 0; i < N; i++) {
            nb_ids one = {&ids[i], 1};
            assert_true(ids[i] < 64 && contains(allowed, 6, &one));
            if (i && ids[i - 1] % 2 == 0) assert_int_equal(ids[i] % 2, 1);
        }
        assert_false(contains(ids, N, &word));
    }
}

/* The first n tokens end with `count` times the same piece of `min` to `max` tokens. */
static bool ends_with_a_piece(const int32_t *ids, size_t n, const nb_sampling *s)
{
    for (size_t size = s->repeat_min; size <= s->repeat_max; size++) {
        bool all = size * s->repeat_count <= n;
        for (size_t k = 1; all && k < s->repeat_count; k++)
            all = memcmp(ids + n - size, ids + n - (k + 1) * size, size * sizeof *ids) == 0;
        if (all) return true;
    }
    return false;
}

static void a_piece_that_repeats_ends_the_answer(void **state)
{
    (void)state;
    static const int32_t allowed[] = {50, 51, 52};
    static const uint32_t rules[][4] = {/* min, max, count, min_tokens */
                                        {1, 1, 3, 0}, {1, 4, 2, 0},  {2, 5, 2, 0},
                                        {3, 9, 3, 0}, {1, 3, 4, 20}, {1, 100, 30, 0}};
    nb_engine *engines[] = {open_engine("none"), open_engine("mtp")};
    unsigned n_early = 0, n_whole = 0;
    for (uint64_t seed = 0; seed < 3; seed++) {
        int32_t plain[N], ids[N];
        nb_sampling s = plain_of(seed, plain);
        s.allowed = allowed;
        s.n_allowed = 3;
        run(engines[0], &s, NULL, plain);
        for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
            s.repeat_min = rules[i][0];
            s.repeat_max = rules[i][1];
            s.repeat_count = rules[i][2];
            s.min_tokens = rules[i][3];
            size_t want = s.min_tokens ? s.min_tokens : 1;
            while (want < N && !ends_with_a_piece(plain, want, &s)) want++;
            for (int k = 0; k < 2; k++) {
                nb_finish finish;
                assert_int_equal(run_to_end(engines[k], &s, NULL, ids, &finish), want);
                assert_int_equal(finish, want < N ? NB_FINISH_REPETITION : NB_FINISH_LENGTH);
                assert_memory_equal(ids, plain, want * sizeof *ids);
            }
            n_early += want < N;
            n_whole += want == N;
        }
    }
    assert_true(n_early > 3 && n_whole > 2);
    nb_sampling s = sampling_of(engines[0], 0);
    s.repeat_max = 3;
    s.repeat_count = 1;
    refused(engines[0], &s, "repetition_detection");
    s.repeat_count = 2;
    s.repeat_min = 4;
    refused(engines[0], &s, "repetition_detection");
    for (int k = 0; k < 2; k++) nb_engine_close(&engines[k]);
}

static void what_is_no_id_is_refused(void **state)
{
    (void)state;
    static const int32_t wrong[] = {3, 1 << 20};
    nb_engine *e = open_engine("none");
    nb_sampling s = sampling_of(e, 0);
    s.allowed = wrong;
    s.n_allowed = 2;
    refused(e, &s, "allowed_token_ids");
    s = sampling_of(e, 0);
    const nb_ids words[] = {{wrong, 1}, {wrong, 0}, {wrong + 1, 1}};
    s.bad_words = words;
    s.n_bad_words = 2;
    refused(e, &s, "bad_words");
    s.bad_words = words + 2;
    s.n_bad_words = 1;
    refused(e, &s, "bad_words");
    s = sampling_of(e, 0);
    s.has_think_budget = true;
    s.think_end = -1;
    refused(e, &s, "thinking_token_budget");
    nb_engine_close(&e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_allowed_ids_come),
        cmocka_unit_test(bad_words_do_not_come),
        cmocka_unit_test(a_pair_is_banned_as_a_pair),
        cmocka_unit_test(something_is_always_left),
        cmocka_unit_test(thinking_ends_with_its_budget),
        cmocka_unit_test(limits_go_with_a_grammar),
        cmocka_unit_test(what_is_no_id_is_refused),
        cmocka_unit_test(a_piece_that_repeats_ends_the_answer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
