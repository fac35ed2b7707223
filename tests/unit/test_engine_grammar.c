/* Grammars in the engine: drafts under them, and ends that min_tokens must not ban. */
#include "cmocka_all.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "nibble.h"

#define DATA(name) NBI_TEST_SOURCE_DIR "/tests/golden/data/" name
#define N_MAX      80

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

static size_t run(nb_engine *e, const nb_grammar *grammar, uint64_t seed, uint32_t min_tokens,
                  uint32_t max_tokens, int32_t *ids, nb_finish *finish)
{
    static const int32_t prompt[] = {5, 9, 17, 4, 33, 12};
    nb_request_options o = {.prompt = prompt, .n_prompt = 6, .grammar = grammar};
    nb_request *r = NULL;
    nb_event event;
    size_t n = 0;
    bool worked;
    nb_sampling_default(e, &o.sampling);
    o.sampling.temperature = seed ? 1.2f : 0;
    o.sampling.has_seed = true;
    o.sampling.seed = seed;
    o.sampling.min_tokens = min_tokens;
    o.sampling.max_tokens = max_tokens;
    nb_error err = {0};
    if (nb_request_submit(&r, e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    *finish = NB_FINISH_NONE;
    while (*finish == NB_FINISH_NONE) {
        assert_int_equal(nb_engine_step(e, &worked, &err), NB_OK);
        while (*finish == NB_FINISH_NONE && nb_request_read(r, &event, 0, &err) == NB_OK) {
            if (event.id >= 0) ids[n++] = event.id;
            *finish = event.finish;
            assert_true(n <= max_tokens);
        }
    }
    nb_request_close(&r);
    return n;
}

/* ---------------------------------------------------------------- a grammar with a memory */

/* What may follow depends on the sum of all tokens so far; `width` of every 16 ids are allowed, and
 * no end. */
typedef struct summing {
    const nb_engine_info *info;
    uint32_t width;
    uint32_t sum;
    uint32_t history[N_MAX * 4], n; /* sums before each token */
    uint32_t n_back;
} summing;

static bool allows(const summing *s, uint32_t id)
{
    for (uint32_t i = 0; i < s->info->n_eos; i++) {
        if ((uint32_t)s->info->eos_ids[i] == id) return false;
    }
    return (id + s->sum) % 16 < s->width;
}

static void summing_mask(void *user, uint32_t *bits, size_t n_words)
{
    const summing *s = user;
    for (uint32_t i = 0; i < n_words; i++) assert_int_equal(bits[i], 0);
    for (uint32_t id = 0; id < s->info->vocab_size; id++) {
        if (allows(s, id)) bits[id / 32] |= 1u << id % 32;
    }
}

static void summing_accept(void *user, int32_t id)
{
    summing *s = user;
    assert_true(allows(s, (uint32_t)id));
    assert_true(s->n < N_MAX * 4);
    s->history[s->n++] = s->sum;
    s->sum = s->sum * 31 + (uint32_t)id;
}

static void summing_rollback(void *user, uint32_t n)
{
    summing *s = user;
    assert_true(n > 0 && n <= NB_GRAMMAR_ROLLBACK_MAX && n <= s->n);
    s->n -= n;
    s->sum = s->history[s->n];
    s->n_back += n;
}

/* The same tokens with drafts as without, all of them allowed; the grammar ends where it should. */
static void drafts_change_no_token(void **state)
{
    (void)state;
    nb_engine *plain = open_engine("none"), *drafting = open_engine("mtp");
    nb_engine_info info;
    nb_engine_get_info(plain, &info);
    for (uint32_t width = 1; width <= 9; width += 4) {
        for (uint64_t seed = 0; seed < 4; seed++) {
            summing a = {.info = &info, .width = width}, b = a;
            nb_grammar g = {.user = &a,
                            .mask = summing_mask,
                            .accept = summing_accept,
                            .rollback = summing_rollback};
            int32_t want[N_MAX], found[N_MAX];
            nb_finish finish;
            assert_int_equal(run(plain, &g, seed, 0, N_MAX, want, &finish), N_MAX);
            g.user = &b;
            assert_int_equal(run(drafting, &g, seed, 0, N_MAX, found, &finish), N_MAX);
            assert_memory_equal(want, found, sizeof want);
            assert_int_equal(a.n, N_MAX);
            assert_int_equal(b.n, N_MAX);
            assert_int_equal(a.sum, b.sum);
            assert_int_equal(a.n_back, 0);
            assert_true(b.n_back > 0);
        }
    }
    nb_engine_stats stats;
    nb_engine_get_stats(drafting, &stats);
    assert_true(stats.draft_accepted > 0 && stats.draft_tokens > stats.draft_accepted);
    nb_engine_close(&plain);
    nb_engine_close(&drafting);
}

static void no_rollback_no_drafts(void **state)
{
    (void)state;
    nb_engine *e = open_engine("mtp");
    nb_engine_info info;
    nb_engine_stats stats;
    nb_engine_get_info(e, &info);
    summing s = {.info = &info, .width = 3};
    nb_grammar g = {.user = &s, .mask = summing_mask, .accept = summing_accept};
    int32_t ids[N_MAX];
    nb_finish finish;
    assert_int_equal(run(e, &g, 1, 0, 20, ids, &finish), 20);
    nb_engine_get_stats(e, &stats);
    assert_int_equal(stats.draft_tokens, 0);
    nb_engine_close(&e);
}

/* ---------------------------------------------------------------- ends */

/* Three tokens, then nothing but the ends. */
typedef struct three {
    const nb_engine_info *info;
    uint32_t n;
} three;

static void three_mask(void *user, uint32_t *bits, size_t n_words)
{
    const three *t = user;
    if (t->n < 3) {
        bits[0] = 0x700; /* 8, 9, 10 */
        return;
    }
    for (uint32_t i = 0; i < t->info->n_eos; i++) {
        uint32_t id = (uint32_t)t->info->eos_ids[i];
        assert_true(id / 32 < n_words);
        bits[id / 32] |= 1u << id % 32;
    }
}

static void three_accept(void *user, int32_t id)
{
    (void)id;
    ((three *)user)->n++;
}

static void three_rollback(void *user, uint32_t n)
{
    ((three *)user)->n -= n;
}

static void the_end_is_not_banned_where_nothing_else_is_left(void **state)
{
    (void)state;
    for (int draft = 0; draft < 2; draft++) {
        nb_engine *e = open_engine(draft ? "mtp" : "none");
        nb_engine_info info;
        nb_engine_get_info(e, &info);
        for (uint64_t seed = 0; seed < 3; seed++) {
            three t = {.info = &info};
            nb_grammar g = {
                .user = &t, .mask = three_mask, .accept = three_accept, .rollback = three_rollback};
            int32_t ids[N_MAX];
            nb_finish finish;
            assert_int_equal(run(e, &g, seed, 20, 40, ids, &finish), 4);
            assert_int_equal(finish, NB_FINISH_STOP);
            for (int i = 0; i < 3; i++) assert_in_range(ids[i], 8, 10);
        }
        nb_engine_close(&e);
    }
}

/* ---------------------------------------------------------------- life */

/* Freed by the engine: a call behind the release is a use after free. */
typedef struct counted {
    three grammar;
    atomic_int *n_released;
} counted;

static void counted_mask(void *user, uint32_t *bits, size_t n_words)
{
    (void)n_words;
    bits[0] = ((counted *)user)->grammar.n & 1 ? 0x700 : 0x7000;
}

static void counted_release(void *user)
{
    counted *c = user;
    atomic_fetch_add(c->n_released, 1);
    free(c);
}

/* Requests closed in the middle of a step: the grammar is released once, after the last call. */
static void grammars_outlive_closed_requests(void **state)
{
    (void)state;
    static const int32_t prompt[] = {5, 9, 17, 4};
    enum { N = 60 };
    atomic_int n_released;
    atomic_init(&n_released, 0);
    nb_engine *e = open_engine("mtp");
    assert_int_equal(nb_engine_start(e, NULL), NB_OK);
    for (int i = 0; i < N; i++) {
        counted *c = calloc(1, sizeof *c);
        nb_grammar g = {.user = c,
                        .mask = counted_mask,
                        .accept = three_accept,
                        .rollback = three_rollback,
                        .release = counted_release};
        nb_request_options o = {.prompt = prompt, .n_prompt = 4, .grammar = &g};
        nb_request *r = NULL;
        nb_event event;
        assert_non_null(c);
        c->n_released = &n_released;
        nb_sampling_default(e, &o.sampling);
        o.sampling.max_tokens = 200;
        assert_int_equal(nb_request_submit(&r, e, &o, NULL), NB_OK);
        for (int k = 0; k < i % 7; k++) (void)nb_request_read(r, &event, 1000, NULL);
        nb_request_close(&r);
    }
    nb_engine_close(&e);
    assert_int_equal(atomic_load(&n_released), N);
}

/* A request that is refused leaves its grammar alone. */
static void a_refused_request_releases_nothing(void **state)
{
    (void)state;
    atomic_int n_released;
    atomic_init(&n_released, 0);
    nb_engine *e = open_engine("none");
    counted c = {.n_released = &n_released};
    nb_grammar g = {
        .user = &c, .mask = counted_mask, .accept = three_accept, .release = counted_release};
    static const int32_t prompt[] = {-5};
    nb_request_options o = {.prompt = prompt, .n_prompt = 1, .grammar = &g};
    nb_request *r = NULL;
    nb_sampling_default(e, &o.sampling);
    assert_int_equal(nb_request_submit(&r, e, &o, NULL), NB_INVALID);
    nb_engine_close(&e);
    assert_int_equal(atomic_load(&n_released), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(drafts_change_no_token),
        cmocka_unit_test(no_rollback_no_drafts),
        cmocka_unit_test(the_end_is_not_banned_where_nothing_else_is_left),
        cmocka_unit_test(grammars_outlive_closed_requests),
        cmocka_unit_test(a_refused_request_releases_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
