/* Drafts and sampling: answers drawn with drafts have the distribution of answers drawn without.
 * Two samples of different seeds, position by position, by chi-square. That the same seed gives the
 * same tokens is in test_engine.c. */
#include "cmocka_all.h"

#include <math.h>
#include <string.h>

#include "nibble.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SEEDS = 48, SHOWS_OTHERS = 0 }; /* slow, and too few to tell anything small */
#else
enum { SEEDS = 200, SHOWS_OTHERS = 1 };
#endif
enum { TOKENS = 4, VOCAB = 8192, TOGETHER = 8 };

typedef struct sample {
    uint32_t hits[TOKENS][VOCAB];
    nb_engine_stats stats;
} sample;

static sample with_drafts, without, hotter;

static nb_request *submit(nb_engine *e, const int32_t *ids, size_t n, uint64_t seed, float heat)
{
    nb_request_options o = {.prompt = ids, .n_prompt = n};
    nb_error err = {0};
    nb_request *r = NULL;
    nb_sampling_default(e, &o.sampling);
    o.sampling.temperature = heat;
    o.sampling.top_p = 1;
    o.sampling.max_tokens = TOKENS;
    o.sampling.ignore_eos = true;
    o.sampling.has_seed = true;
    o.sampling.seed = seed;
    if (nb_request_submit(&r, e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    return r;
}

static void take(nb_engine *e, nb_request *r, sample *s)
{
    uint32_t n = 0;
    nb_event event = {.finish = NB_FINISH_NONE};
    bool worked;
    while (event.finish == NB_FINISH_NONE) {
        nb_status st = nb_request_read(r, &event, 0, NULL);
        if (st == NB_AGAIN) {
            assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
            continue;
        }
        assert_int_equal(st, NB_OK);
        if (event.id < 0) continue;
        assert_true(n < TOKENS && event.id < VOCAB);
        s->hits[n++][event.id]++;
    }
    assert_int_equal(n, TOKENS);
}

static void draw(const char *algorithm, uint64_t first_seed, float heat, sample *s)
{
    static const char text[] = "Once upon a time there was a";
    nb_engine_options o;
    nb_error err = {0};
    nb_engine *e = NULL;
    int32_t *ids = NULL;
    size_t n = 0;
    nb_engine_options_default(&o);
    o.model_dir = NBI_TEST_SOURCE_DIR "/models/glm5-tiny";
    o.max_context = 256;
    o.max_running = TOGETHER;
    o.speculative_algorithm = algorithm;
    if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    assert_int_equal(nb_tokenize(e, text, strlen(text), false, 0, &ids, &n, NULL), NB_OK);
    for (uint32_t i = 0; i < SEEDS; i += TOGETHER) {
        nb_request *r[TOGETHER];
        for (uint32_t k = 0; k < TOGETHER; k++) r[k] = submit(e, ids, n, first_seed + i + k, heat);
        for (uint32_t k = 0; k < TOGETHER; k++) {
            take(e, r[k], s);
            nb_request_close(&r[k]);
        }
    }
    nb_engine_get_stats(e, &s->stats);
    nb_free(ids);
    nb_engine_close(&e);
}

/* Tokens that both together have fewer than ten of are one class. Above 1: one in 10,000; 0: there
 * is one class only. */
static double distance(const sample *a, const sample *b, uint32_t place)
{
    double chi = 0, rest[2] = {0, 0}, classes = 0;
    for (uint32_t id = 0; id < VOCAB; id++) {
        const double x = a->hits[place][id], y = b->hits[place][id];
        if (x + y >= 10) {
            chi += (x - y) * (x - y) / (x + y);
            classes++;
            continue;
        }
        rest[0] += x;
        rest[1] += y;
    }
    if (rest[0] + rest[1] > 0) {
        chi += (rest[0] - rest[1]) * (rest[0] - rest[1]) / (rest[0] + rest[1]);
        classes++;
    }
    if (classes < 2) return 0; /* nothing to compare */
    const double df = classes - 1, z = 3.72;
    return chi / (df * pow(1 - 2 / (9 * df) + z * sqrt(2 / (9 * df)), 3));
}

static void drafts_keep_the_distribution(void **state)
{
    (void)state;
    double farthest = 0;
    uint32_t compared = 0;
    draw("mtp", 1, 1.0f, &with_drafts);
    draw(NULL, 100001, 1.0f, &without);
    if (SHOWS_OTHERS) draw(NULL, 200001, 1.6f, &hotter);
    assert_true(with_drafts.stats.draft_accepted > SEEDS / 4); /* both kinds of drafts were met */
    assert_true(with_drafts.stats.draft_accepted < with_drafts.stats.draft_tokens);
    for (uint32_t i = 0; i < TOKENS; i++) {
        const double d = distance(&with_drafts, &without, i);
        compared += d > 0;
        if (!(d < 1)) fail_msg("token %u: %.3f of the bound", i, d);
        if (SHOWS_OTHERS) farthest = fmax(farthest, distance(&with_drafts, &hotter, i));
    }
    assert_true(compared >= 2);
    if (SHOWS_OTHERS) assert_true(farthest > 1); /* another distribution is seen */
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(drafts_keep_the_distribution)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
