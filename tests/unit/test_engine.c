/* The engine on real (tiny, random) checkpoints: what comes out depends on the request alone. */
#include "cmocka_all.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "format/safetensors.h"
#include "nibble.h"

#define DATA(name) NBI_TEST_SOURCE_DIR "/tests/golden/data/" name
#define MAX_TOKENS 400

static const char *kv_dtype = "auto";

static nb_engine *open_engine(const char *dir, uint32_t chunk, uint32_t running, uint64_t kv_tokens)
{
    nb_engine_options o;
    nb_error err = {0};
    nb_engine *e = NULL;
    nb_engine_options_default(&o);
    o.model_dir = dir;
    o.chunk_size = chunk;
    o.max_running = running;
    o.kv_tokens = kv_tokens;
    o.max_context = 192;
    o.kv_dtype = kv_dtype;
    if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s: %s", dir, err.text);
    return e;
}

/* Prompt k of a family of different lengths and contents, ids below 90. */
static size_t make_prompt(int32_t *out, uint32_t k)
{
    size_t n = 3 + 17 * (size_t)k % 90;
    for (size_t i = 0; i < n; i++) out[i] = (int32_t)((i * 31 + k * 7 + i * i % 11) % 90);
    return n;
}

static nb_request *submit(nb_engine *e, uint32_t k, uint32_t max_tokens, float temperature)
{
    int32_t prompt[128];
    nb_request_options o = {.prompt = prompt, .n_prompt = make_prompt(prompt, k)};
    nb_error err = {0};
    nb_request *r = NULL;
    nb_sampling_default(e, &o.sampling);
    o.sampling.temperature = temperature;
    o.sampling.max_tokens = max_tokens;
    o.sampling.ignore_eos = true;
    o.sampling.has_seed = true;
    o.sampling.seed = 1000 + k;
    if (nb_request_submit(&r, e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    return r;
}

/* Steps until the request ends; collects its ids. */
static size_t drain(nb_engine *e, nb_request *r, int32_t *ids, nb_finish *finish)
{
    size_t n = 0;
    nb_event event;
    *finish = NB_FINISH_NONE;
    for (int spins = 0; *finish == NB_FINISH_NONE; spins++) {
        assert_true(spins < 100000);
        nb_status st = nb_request_read(r, &event, 0, NULL);
        if (st == NB_AGAIN) {
            bool worked;
            assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
            continue;
        }
        assert_int_equal(st, NB_OK);
        if (event.id >= 0 && !event.is_prompt) ids[n++] = event.id;
        *finish = event.finish;
    }
    assert_int_equal(nb_request_read(r, &event, 0, NULL), NB_CLOSED);
    return n;
}

static size_t generate_alone(const char *dir, uint32_t chunk, uint32_t k, uint32_t max_tokens,
                             float temperature, int32_t *ids)
{
    nb_engine *e = open_engine(dir, chunk, 1, 0);
    nb_request *r = submit(e, k, max_tokens, temperature);
    nb_finish finish;
    size_t n = drain(e, r, ids, &finish);
    assert_int_equal(finish, NB_FINISH_LENGTH);
    nb_request_close(&r);
    nb_engine_close(&e);
    return n;
}

static void copy_file(const char *from_dir, const char *to_dir, const char *name)
{
    char path[600];
    nbi_map map;
    snprintf(path, sizeof path, "%s/%s", from_dir, name);
    assert_int_equal(nbi_map_open(&map, path, NULL), NB_OK);
    snprintf(path, sizeof path, "%s/%s", to_dir, name);
    assert_int_equal(nbi_file_write(path, map.data, map.bytes, NULL), NB_OK);
    nbi_map_close(&map);
}

static const char *const models[] = {DATA("glm52-nvfp4-routed"), DATA("glm53-fp8"),
                                     DATA("qwen3-nvfp4"), DATA("v32-bf16"), DATA("lite-bf16")};

static void same_tokens_in_any_batch(void **state)
{
    (void)state;
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        int32_t alone[6][MAX_TOKENS], together[MAX_TOKENS];
        for (uint32_t k = 0; k < 6; k++) {
            assert_int_equal(generate_alone(models[m], 512, k, 20 + k, k % 2 ? 0.8f : 0, alone[k]),
                             20 + k);
        }
        nb_engine *e = open_engine(models[m], 24, 6, 0);
        nb_request *r[6];
        for (uint32_t k = 0; k < 6; k++) r[k] = submit(e, k, 20 + k, k % 2 ? 0.8f : 0);
        for (uint32_t k = 0; k < 6; k++) {
            nb_finish finish;
            assert_int_equal(drain(e, r[k], together, &finish), 20 + k);
            assert_memory_equal(together, alone[k], (20 + k) * sizeof(int32_t));
            nb_request_close(&r[k]);
        }
        nb_engine_close(&e);
    }
}

/* C66 */
static void same_tokens_however_the_prompt_is_cut(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {1, 7, 64};
    int32_t whole[MAX_TOKENS], cut[MAX_TOKENS];
    for (size_t m = 0; m < 3; m++) {
        generate_alone(models[m], 512, 5, 16, 0, whole);
        for (size_t c = 0; c < 3; c++) {
            generate_alone(models[m], chunks[c], 5, 16, 0, cut);
            assert_memory_equal(whole, cut, 16 * sizeof(int32_t));
        }
    }
}

/* C69. Pages for about one and a half requests: the younger is put back and computed again. */
static void preempted_requests_give_the_same_tokens(void **state)
{
    (void)state;
    int32_t alone[4][MAX_TOKENS], ids[MAX_TOKENS];
    nb_engine_stats stats;
    for (uint32_t k = 0; k < 4; k++) generate_alone(models[0], 512, 4 + k, 80, 0.9f, alone[k]);
    nb_engine *e = open_engine(models[0], 32, 4, 5 * 64);
    nb_request *r[4];
    for (uint32_t k = 0; k < 4; k++) r[k] = submit(e, 4 + k, 80, 0.9f);
    for (uint32_t k = 0; k < 4; k++) {
        nb_finish finish;
        assert_int_equal(drain(e, r[k], ids, &finish), 80);
        assert_memory_equal(ids, alone[k], 80 * sizeof(int32_t));
        nb_request_close(&r[k]);
    }
    nb_engine_get_stats(e, &stats);
    assert_true(stats.preemptions > 0);
    assert_int_equal(stats.requests_finished, 4);
    assert_int_equal(stats.kv_tokens_used, 0);
    nb_engine_close(&e);
}

/* The second run finds its beginning in the cache and says the same; after a flush nothing is
 * found. */
static void a_cached_prefix_changes_no_token(void **state)
{
    (void)state;
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        nb_engine *e = open_engine(models[m], 48, 2, 0);
        int32_t first[MAX_TOKENS], again[MAX_TOKENS];
        nb_engine_stats stats;
        nb_finish finish;
        for (int round = 0; round < 3; round++) {
            nb_request *r = submit(e, 4, 90, 0.7f); /* 71 tokens: one full page and a bit */
            assert_int_equal(drain(e, r, round ? again : first, &finish), 90);
            assert_int_equal(nb_request_cached_tokens(r), round == 1 ? 64 : 0);
            if (round) assert_memory_equal(again, first, 90 * sizeof(int32_t));
            nb_request_close(&r);
            nb_engine_get_stats(e, &stats);
            assert_int_equal(stats.kv_tokens_used, 0);
            assert_int_equal(stats.kv_tokens_cached, 128);
            bool worked;
            if (round == 1) assert_int_equal(nb_engine_flush_cache(e, NULL), NB_OK);
            assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
        }
        nb_engine_close(&e);
    }
}

/* Drafts cost or save time, never a token: greedy and sampled, alone and together, also when pages
 * are short. */
static void drafting_changes_no_token(void **state)
{
    (void)state;
    static const char *const with_mtp[] = {DATA("glm5-bf16"), DATA("glm45air-bf16"),
                                           DATA("glm52-nvfp4-routed")};
    for (size_t m = 0; m < sizeof with_mtp / sizeof *with_mtp; m++) {
        int32_t alone[4][MAX_TOKENS], drafted[MAX_TOKENS];
        for (uint32_t k = 0; k < 4; k++)
            generate_alone(with_mtp[m], 512, 3 + k, 60, k % 2 ? 0.5f : 0, alone[k]);
        nb_engine_options o;
        nb_error err = {0};
        nb_engine *e = NULL;
        nb_engine_options_default(&o);
        o.model_dir = with_mtp[m];
        o.max_context = 192;
        o.chunk_size = 20;
        o.max_running = 4;
        o.kv_tokens = 6 * 64;
        o.kv_dtype = kv_dtype;
        o.speculative_algorithm = "mtp";
        o.speculative_num_steps = 3;
        if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s", err.text);
        nb_request *r[4];
        nb_engine_stats stats;
        for (uint32_t k = 0; k < 4; k++) r[k] = submit(e, 3 + k, 60, k % 2 ? 0.5f : 0);
        for (uint32_t k = 0; k < 4; k++) {
            nb_finish finish;
            assert_int_equal(drain(e, r[k], drafted, &finish), 60);
            assert_memory_equal(drafted, alone[k], 60 * sizeof(int32_t));
            nb_request_close(&r[k]);
        }
        nb_engine_get_stats(e, &stats);
        assert_true(stats.draft_steps > 0);
        assert_true(stats.draft_tokens > stats.draft_steps);
        assert_true(stats.draft_accepted <= stats.draft_tokens);
        assert_int_equal(stats.kv_tokens_used, 0);
        nb_engine_close(&e);
    }
}

/* The trained model's MTP layer guesses right often enough to be worth it. */
static void drafts_of_the_embedded_model_are_good(void **state)
{
    (void)state;
    const char *dir = NBI_TEST_SOURCE_DIR "/models/glm5-tiny";
    int32_t plain[MAX_TOKENS], drafted[MAX_TOKENS];
    size_t n_plain = 0, n_drafted = 0;
    for (int draft = 0; draft < 2; draft++) {
        nb_engine_options o;
        nb_error err = {0};
        nb_engine *e = NULL;
        nb_engine_options_default(&o);
        o.model_dir = dir;
        o.max_context = 1024;
        if (draft) o.speculative_algorithm = "mtp";
        if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s", err.text);
        static const char text[] = "Once upon a time in a land far away there was";
        nb_request_options ro = {0};
        int32_t *ids = NULL;
        assert_int_equal(nb_tokenize(e, text, strlen(text), false, 0, &ids, &ro.n_prompt, NULL),
                         NB_OK);
        ro.prompt = ids;
        nb_sampling_default(e, &ro.sampling);
        ro.sampling.temperature = 0;
        ro.sampling.max_tokens = 150;
        nb_request *r = NULL;
        nb_finish finish;
        assert_int_equal(nb_request_submit(&r, e, &ro, NULL), NB_OK);
        if (draft)
            n_drafted = drain(e, r, drafted, &finish);
        else
            n_plain = drain(e, r, plain, &finish);
        nb_engine_stats stats;
        nb_engine_get_stats(e, &stats);
        if (draft)
            assert_true(stats.draft_accepted * 2 >
                        stats.draft_steps); /* half a token per step at least */
        nb_request_close(&r);
        nb_free(ids);
        nb_engine_close(&e);
    }
    assert_int_equal(n_plain, n_drafted);
    assert_memory_equal(plain, drafted, n_plain * sizeof(int32_t));
}

/* Drafts are those that a request gets alone, also behind more context than the indexer keeps
 * (256), where later drafts take the first one's positions. */
static void neighbours_change_no_draft(void **state)
{
    (void)state;
    enum { N = 3, TOKENS = 48 };
    static const char *const texts[N] = {"Once upon a time there was a small house by the sea. ",
                                         "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ", "for i in range(10): "};
    static const int repeats[N] = {24, 30, 4};
    nb_engine_options o;
    nb_error err = {0};
    nb_engine *e = NULL;
    nb_engine_options_default(&o);
    o.model_dir = NBI_TEST_SOURCE_DIR "/models/glm5-tiny";
    o.max_context = 1024;
    o.disable_prefix_cache = true;
    o.speculative_algorithm = "mtp";
    if (nb_engine_open(&e, &o, &err) != NB_OK) fail_msg("%s", err.text);
    nb_engine_stats before, stats[2] = {0};
    int32_t ids[MAX_TOKENS];
    for (int together = 0; together < 2; together++) {
        nb_request *r[N];
        nb_finish finish;
        nb_engine_get_stats(e, &before);
        for (int k = 0; k < N; k++) {
            char text[2000] = "";
            for (int i = 0; i < repeats[k]; i++) strcat(text, texts[k]);
            nb_request_options ro = {0};
            int32_t *prompt = NULL;
            nb_status st =
                nb_tokenize(e, text, strlen(text), false, 0, &prompt, &ro.n_prompt, NULL);
            assert_int_equal(st, NB_OK);
            assert_true((ro.n_prompt > 256) == (repeats[k] > 4));
            ro.prompt = prompt;
            nb_sampling_default(e, &ro.sampling);
            ro.sampling.temperature = 0;
            ro.sampling.max_tokens = TOKENS;
            ro.sampling.ignore_eos = true;
            assert_int_equal(nb_request_submit(&r[k], e, &ro, NULL), NB_OK);
            nb_free(prompt);
            if (!together) drain(e, r[k], ids, &finish);
        }
        for (int k = 0; k < N; k++) {
            if (together) drain(e, r[k], ids, &finish);
            nb_request_close(&r[k]);
        }
        nb_engine_get_stats(e, &stats[together]);
        stats[together].draft_tokens -= before.draft_tokens;
        for (int i = 0; i < NB_DRAFTS_MAX; i++)
            stats[together].draft_accepted_at[i] -= before.draft_accepted_at[i];
    }
    assert_true(stats[0].draft_accepted_at[2] > 0);
    assert_int_equal(stats[0].draft_tokens, stats[1].draft_tokens);
    assert_memory_equal(stats[0].draft_accepted_at, stats[1].draft_accepted_at,
                        sizeof stats[0].draft_accepted_at);
    nb_engine_close(&e);
}

static void a_slow_reader_holds_only_itself(void **state)
{
    (void)state;
    nb_engine *e = open_engine(models[2], 64, 4, 0);
    nb_request *slow = submit(e, 0, 180, 0), *quick = submit(e, 1, 30, 0);
    int32_t ids[MAX_TOKENS];
    nb_finish finish;
    bool worked = true;
    assert_int_equal(drain(e, quick, ids, &finish), 30);
    for (int i = 0; i < 400 && worked; i++)
        assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
    assert_false(worked); /* the slow one waits for room */
    assert_int_equal(drain(e, slow, ids, &finish), 180);
    assert_int_equal(finish, NB_FINISH_LENGTH);
    nb_request_close(&slow);
    nb_request_close(&quick);
    nb_engine_close(&e);
}

static void cancel_frees_pages_in_one_step(void **state)
{
    (void)state;
    nb_engine *e = open_engine(models[0], 8, 1, 0);
    nb_request *running = submit(e, 5, 50, 0), *waiting = submit(e, 3, 5, 0),
               *next = submit(e, 2, 5, 0);
    nb_engine_stats stats;
    nb_event event;
    bool worked;
    assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK); /* in the middle of its prompt */
    nb_engine_get_stats(e, &stats);
    assert_int_equal(stats.n_running, 1);
    assert_int_equal(stats.n_waiting, 2);
    assert_true(stats.kv_tokens_used > 0);
    nb_request_cancel(running);
    nb_request_cancel(waiting);
    assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
    assert_int_equal(nb_request_read(running, &event, 0, NULL), NB_OK);
    assert_int_equal(event.finish, NB_FINISH_CANCELLED);
    assert_int_equal(nb_request_read(waiting, &event, 0, NULL), NB_OK);
    assert_int_equal(event.finish, NB_FINISH_CANCELLED);
    int32_t ids[MAX_TOKENS];
    nb_finish finish;
    assert_int_equal(drain(e, next, ids, &finish), 5);
    nb_request_close(&next); /* closed after its end */
    nb_request_close(&running);
    nb_request_close(&waiting);
    nb_request *left = submit(e, 1, 50, 0); /* closed while it runs */
    assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
    nb_request_close(&left);
    assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
    nb_engine_get_stats(e, &stats);
    assert_int_equal(stats.kv_tokens_used, 0);
    assert_int_equal(stats.requests_cancelled, 3);
    nb_engine_close(&e);
}

static void bad_requests_name_the_field(void **state)
{
    (void)state;
    nb_engine *e = open_engine(models[2], 64, 2, 0);
    nb_engine_info info;
    nb_engine_get_info(e, &info);
    int32_t prompt[256] = {1, 2, 3};
    nb_request_options base = {.prompt = prompt, .n_prompt = 3}, o;
    nb_sampling_default(e, &base.sampling);
    nb_request *r = NULL;
    nb_error err;
#define REFUSED(word, status, change)                                 \
    do {                                                              \
        o = base;                                                     \
        change;                                                       \
        assert_int_equal(nb_request_submit(&r, e, &o, &err), status); \
        assert_non_null(strstr(err.text, word));                      \
        assert_null(r);                                               \
    } while (0)
    REFUSED("prompt", NB_INVALID, o.n_prompt = 0);
    REFUSED("temperature", NB_INVALID, o.sampling.temperature = -1);
    REFUSED("temperature", NB_INVALID, o.sampling.temperature = strtof("nan", NULL));
    REFUSED("top_p", NB_INVALID, o.sampling.top_p = 0);
    REFUSED("min_p", NB_INVALID, o.sampling.min_p = 1.5f);
    REFUSED("top_k", NB_INVALID, o.sampling.top_k = -2);
    REFUSED("logprobs", NB_INVALID, o.sampling.n_logprobs = 21);
    REFUSED("stop_token_ids", NB_INVALID, (o.sampling.n_stop_ids = 1, o.sampling.stop_ids[0] = -1));
    REFUSED("min_tokens", NB_INVALID, (o.sampling.min_tokens = 5, o.sampling.max_tokens = 2));
    REFUSED("192", NB_TOO_LARGE, o.n_prompt = 192);
    REFUSED("max_tokens asks for 190", NB_TOO_LARGE, o.sampling.max_tokens = 190);
    REFUSED("prompt[1] is token id -1", NB_INVALID, prompt[1] = -1);
    REFUSED("prompt[1]", NB_INVALID, prompt[1] = (int32_t)info.vocab_size);
    REFUSED("no tokenizer", NB_UNSUPPORTED,
            (prompt[1] = 2, o.sampling.n_stop_strings = 1, o.sampling.stop_strings[0] = "x"));
#undef REFUSED
    nb_engine_close(&e);
}

/* Runs a request with log-probabilities; checks what every event must hold; keeps its tokens'
 * log-probabilities, prompt first. */
static size_t run_logprobs(nb_engine *e, nb_request_options *o, int32_t *ids, float *logprobs)
{
    size_t n = 0;
    nb_event event = {0};
    nb_request *r = NULL;
    assert_int_equal(nb_request_submit(&r, e, o, NULL), NB_OK);
    while (event.finish == NB_FINISH_NONE) {
        bool worked;
        if (nb_request_read(r, &event, 0, NULL) == NB_AGAIN) {
            assert_int_equal(nb_engine_step(e, &worked, NULL), NB_OK);
            event.finish = NB_FINISH_NONE;
            continue;
        }
        assert_int_equal(event.is_prompt, n < o->n_prompt);
        assert_int_equal(event.has_logprob, n > 0);
        if (event.is_prompt) assert_int_equal(event.id, o->prompt[n]);
        if (!event.is_prompt) { /* greedy */
            assert_int_equal(event.top[0].id, event.id);
            assert_float_equal(event.top[0].logprob, event.logprob, 1e-6);
        }
        for (uint32_t i = 1; i < event.n_top; i++)
            assert_true(event.top[i].logprob <= event.top[i - 1].logprob);
        if (event.has_logprob) assert_true(event.logprob <= 0 && event.logprob >= -9999);
        ids[n] = event.id;
        logprobs[n++] = event.has_logprob ? event.logprob : 0;
    }
    nb_request_close(&r);
    return n;
}

/* What an answer's tokens were given as log-probabilities they are given again as part of a prompt.
 */
static void prompt_logprobs_are_those_of_the_answer(void **state)
{
    (void)state;
    nb_engine *e = open_engine(models[1], 16, 2, 0);
    int32_t prompt[128], ids[256], again[256];
    float first[256], second[256];
    nb_request_options o = {.prompt = prompt, .n_prompt = make_prompt(prompt, 4)};
    nb_sampling_default(e, &o.sampling);
    o.sampling.temperature = 0;
    o.sampling.max_tokens = 6;
    o.sampling.ignore_eos = true;
    o.sampling.n_logprobs = 5;
    o.sampling.prompt_logprobs = true;
    size_t n = run_logprobs(e, &o, ids, first);
    assert_int_equal(n, o.n_prompt + 6);
    o.prompt = ids;
    o.n_prompt = n;
    o.sampling.max_tokens = 1;
    assert_int_equal(run_logprobs(e, &o, again, second), n + 1);
    assert_memory_equal(first, second, n * sizeof *first);
    nb_engine_close(&e);
}

/* ---------------------------------------------------------------- numerics guard */

/* A copy of the checkpoint whose embedding row 7 holds a NaN. */
static void poison_embedding(const char *from, const char *to)
{
    nbi_checkpoint *c = NULL;
    assert_int_equal(nbi_checkpoint_open(&c, from, NULL), NB_OK);
    mkdir(to, 0700);
    copy_file(from, to, "config.json");
    for (uint32_t f = 0; f < nbi_checkpoint_files(c); f++)
        copy_file(from, to, nbi_checkpoint_file(c, f));
    char path[600];
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", from);
    if (nbi_file_exists(path)) copy_file(from, to, "model.safetensors.index.json");
    nbi_checkpoint_close(&c);
    assert_int_equal(nbi_checkpoint_open(&c, to, NULL), NB_OK);
    const nbi_st_tensor *t = nbi_checkpoint_peek(c, "model.embed_tokens.weight");
    assert_non_null(t);
    assert_int_equal(t->dtype, NBI_BF16);
    char file[300];
    snprintf(file, sizeof file, "%s", nbi_checkpoint_file(c, t->file));
    uint64_t row_bytes = t->shape[1] * 2, first = 0;
    for (size_t i = 0; i < nbi_checkpoint_count(c);
         i++) { /* the map of a file starts where its first tensor's header ends */
        const nbi_st_tensor *other = nbi_checkpoint_at(c, i);
        if (other->file == t->file && other->data <= t->data)
            first += other == t ? 0 : other->bytes;
    }
    snprintf(path, sizeof path, "%s/%s", to, file);
    FILE *out = fopen(path, "r+b");
    uint64_t header = 0;
    assert_int_equal(fread(&header, 8, 1, out), 1);
    assert_int_equal(fseek(out, (long)(8 + header + first + 7 * row_bytes), SEEK_SET), 0);
    uint16_t nan = 0x7fc0;
    assert_int_equal(fwrite(&nan, 2, 1, out), 1);
    fclose(out);
    nbi_checkpoint_close(&c);
}

static void a_nan_fails_its_request_and_no_other(void **state)
{
    (void)state;
    char dir[64] = "/tmp/nibble-test-XXXXXX";
    char to[128];
    assert_non_null(mkdtemp(dir));
    snprintf(to, sizeof to, "%s/model", dir);
    poison_embedding(DATA("qwen3-bf16"), to);
    nb_engine *e = open_engine(to, 64, 4, 0);
    int32_t good[] = {1, 2, 3}, bad[] = {1, 7, 3}, ids[MAX_TOKENS];
    nb_request_options o = {.prompt = bad, .n_prompt = 3};
    nb_sampling_default(e, &o.sampling);
    o.sampling.temperature = 0;
    o.sampling.max_tokens = 6;
    o.sampling.ignore_eos = true;
    nb_request *r_bad = NULL, *r_good = NULL;
    assert_int_equal(nb_request_submit(&r_bad, e, &o, NULL), NB_OK);
    o.prompt = good;
    assert_int_equal(nb_request_submit(&r_good, e, &o, NULL), NB_OK);
    nb_finish finish;
    drain(e, r_bad, ids, &finish);
    assert_int_equal(finish, NB_FINISH_ERROR);
    assert_non_null(strstr(nb_request_error(r_bad), "layer 0"));
    drain(e, r_good, ids, &finish);
    assert_int_equal(finish, NB_FINISH_LENGTH);
    nb_request_close(&r_bad);
    nb_request_close(&r_good);
    nb_engine_close(&e);
    char command[200];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    assert_int_equal(system(command), 0);
}

/* ---------------------------------------------------------------- ends, penalties, grammars */

/* C30: each of several end ids of generation_config.json stops the answer. */
static void every_end_id_stops(void **state)
{
    (void)state;
    int32_t free_run[MAX_TOKENS], ids[MAX_TOKENS];
    char dir[64] = "/tmp/nibble-test-XXXXXX", path[600], text[200];
    generate_alone(DATA("qwen3-tied-f32"), 512, 2, 12, 0, free_run);
    assert_non_null(mkdtemp(dir));
    copy_file(DATA("qwen3-tied-f32"), dir, "config.json");
    copy_file(DATA("qwen3-tied-f32"), dir, "model.safetensors");
    snprintf(path, sizeof path, "%s/generation_config.json", dir);
    for (int at = 0; at < 3; at++) {
        int32_t end = free_run[4 + at];
        size_t first = 0;
        while (free_run[first] != end) first++;
        int n = snprintf(text, sizeof text, "{\"eos_token_id\": [%d, %d, %d]}", at == 0 ? end : 95,
                         at == 1 ? end : 95, at == 2 ? end : 95);
        assert_int_equal(nbi_file_write(path, text, (size_t)n, NULL), NB_OK);
        nb_engine *e = open_engine(dir, 64, 1, 0);
        int32_t prompt[128];
        nb_request_options o = {.prompt = prompt, .n_prompt = make_prompt(prompt, 2)};
        nb_sampling_default(e, &o.sampling);
        o.sampling.temperature = 0;
        o.sampling.max_tokens = 12;
        nb_request *r = NULL;
        nb_finish finish;
        assert_int_equal(nb_request_submit(&r, e, &o, NULL), NB_OK);
        assert_int_equal(drain(e, r, ids, &finish), first + 1);
        assert_int_equal(finish, NB_FINISH_STOP);
        nb_request_close(&r);
        o.sampling.min_tokens = (uint32_t)first + 3; /* not before then */
        assert_int_equal(nb_request_submit(&r, e, &o, NULL), NB_OK);
        assert_true(drain(e, r, ids, &finish) >= first + 3);
        nb_request_close(&r);
        nb_engine_close(&e);
    }
    snprintf(text, sizeof text, "rm -rf %s", dir);
    assert_int_equal(system(text), 0);
}

static nb_request *submit_with(nb_engine *e, const nb_request_options *base)
{
    nb_request *r = NULL;
    nb_error err = {0};
    if (nb_request_submit(&r, e, base, &err) != NB_OK) fail_msg("%s", err.text);
    return r;
}

static size_t count_repeats(const int32_t *ids, size_t n)
{
    size_t repeats = 0;
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < i; j++) {
            if (ids[i] != ids[j]) continue;
            repeats++;
            break;
        }
    }
    return repeats;
}

static void penalties_and_bias(void **state)
{
    (void)state;
    nb_engine *e = open_engine(models[2], 64, 2, 0);
    int32_t prompt[128], ids[MAX_TOKENS];
    nb_request_options o = {.prompt = prompt, .n_prompt = make_prompt(prompt, 1)};
    nb_finish finish;
    nb_sampling_default(e, &o.sampling);
    o.sampling.temperature = 0;
    o.sampling.max_tokens = 40;
    o.sampling.ignore_eos = true;
    nb_sampling plain = o.sampling;

    nb_logit_bias bias[] = {{.id = 17, .bias = 100}};
    o.sampling.logit_bias = bias;
    o.sampling.n_logit_bias = 1;
    nb_request *r = submit_with(e, &o);
    assert_int_equal(drain(e, r, ids, &finish), 40);
    for (int i = 0; i < 40; i++) assert_int_equal(ids[i], 17);
    nb_request_close(&r);

    o.sampling.frequency_penalty =
        2; /* 100 is used up after 50 repeats; with presence the first costs more */
    bias[0].bias = 21;
    o.sampling.presence_penalty = 2;
    r = submit_with(e, &o);
    drain(e, r, ids, &finish);
    assert_int_equal(ids[0], 17);
    size_t n17 = 0;
    for (int i = 0; i < 40; i++) n17 += ids[i] == 17;
    assert_in_range(n17, 1, 20);
    nb_request_close(&r);

    o.sampling = plain;
    o.sampling.frequency_penalty = 2;
    o.sampling.presence_penalty = 2;
    o.sampling.repetition_penalty = 2;
    r = submit_with(e, &o);
    drain(e, r, ids, &finish);
    size_t repeats = count_repeats(ids, 40);
    nb_request_close(&r);
    o.sampling = plain;
    r = submit_with(e, &o);
    drain(e, r, ids, &finish);
    assert_true(repeats <= count_repeats(ids, 40));
    nb_request_close(&r);
    nb_engine_close(&e);
}

/* Allows one id at a time, 10, 11, 12, ... */
typedef struct counting {
    int32_t next;
    int accepted;
} counting;

static void counting_mask(void *user, uint32_t *bits, size_t n_words)
{
    const counting *c = user;
    assert_true((size_t)c->next / 32 < n_words);
    bits[c->next / 32] |= 1u << c->next % 32;
}

static void counting_accept(void *user, int32_t id)
{
    counting *c = user;
    assert_int_equal(id, c->next);
    c->next++;
    c->accepted++;
}

static void a_grammar_decides(void **state)
{
    (void)state;
    nb_engine *e = open_engine(models[0], 64, 2, 0);
    int32_t prompt[128], ids[MAX_TOKENS];
    counting c = {.next = 10};
    nb_grammar grammar = {.user = &c, .mask = counting_mask, .accept = counting_accept};
    nb_request_options o = {
        .prompt = prompt, .n_prompt = make_prompt(prompt, 1), .grammar = &grammar};
    nb_finish finish;
    nb_sampling_default(e, &o.sampling);
    o.sampling.max_tokens = 20;
    o.sampling.ignore_eos = true;
    o.sampling.n_logprobs = 3;
    nb_request *r = submit_with(e, &o);
    assert_int_equal(drain(e, r, ids, &finish), 20);
    for (int i = 0; i < 20; i++) assert_int_equal(ids[i], 10 + i);
    assert_int_equal(c.accepted, 20);
    nb_request_close(&r);
    nb_engine_close(&e);
}

/* ---------------------------------------------------------------- the engine's own thread */

typedef struct client {
    nb_engine *e;
    uint32_t k;
    int32_t ids[MAX_TOKENS];
    size_t n;
} client;

static void *client_main(void *arg)
{
    client *c = arg;
    for (int round = 0; round < 4; round++) {
        nb_request *r = submit(c->e, c->k, 24, 0.7f);
        nb_event event = {0};
        c->n = 0;
        bool cut = round == 2;
        while (event.finish == NB_FINISH_NONE) {
            if (nb_request_read(r, &event, 10000, NULL) != NB_OK) break;
            if (event.id >= 0) c->ids[c->n++] = event.id;
            if (cut && c->n == 3) nb_request_cancel(r);
        }
        nb_request_close(&r);
    }
    return NULL;
}

static void many_threads_one_engine(void **state)
{
    (void)state;
    nb_engine *e = open_engine(models[2], 32, 4, 0);
    client clients[6];
    pthread_t threads[6];
    assert_int_equal(nb_engine_start(e, NULL), NB_OK);
    for (uint32_t i = 0; i < 6; i++) {
        clients[i] = (client){.e = e, .k = i};
        assert_int_equal(pthread_create(&threads[i], NULL, client_main, &clients[i]), 0);
    }
    for (uint32_t i = 0; i < 6; i++) pthread_join(threads[i], NULL);
    nb_engine_close(&e);
    for (uint32_t i = 0; i < 6; i++) {
        int32_t alone[MAX_TOKENS];
        assert_int_equal(clients[i].n, generate_alone(models[2], 512, i, 24, 0.7f, alone));
        assert_memory_equal(clients[i].ids, alone, 24 * sizeof(int32_t));
    }
}

static void closing_ends_what_runs(void **state)
{
    (void)state;
    nb_engine *e = open_engine(models[0], 32, 1, 0);
    assert_int_equal(nb_engine_start(e, NULL), NB_OK);
    nb_request *a = submit(e, 1, 100, 0), *b = submit(e, 2, 100, 0);
    nb_request_close(&a);
    nb_request_close(&b);
    nb_engine_close(&e);
    assert_null(e);
}

static void refusals_when_opening(void **state)
{
    (void)state;
    nb_engine_options o;
    nb_engine *e = NULL;
    nb_error err;
#define REFUSED(word, change)                                                             \
    do {                                                                                  \
        nb_engine_options_default(&o);                                                    \
        o.model_dir = models[0];                                                          \
        change;                                                                           \
        assert_int_not_equal(nb_engine_open(&e, &o, &err), NB_OK);                        \
        assert_null(e);                                                                   \
        if (!strstr(err.text, word)) fail_msg("\"%s\" is not in \"%s\"", word, err.text); \
    } while (0)
    REFUSED("model_dir", o.model_dir = NULL);
    REFUSED("config.json", o.model_dir = "/nonexistent");
    REFUSED("max_running", o.max_running = 0);
    REFUSED("chunk_size", o.chunk_size = 0);
    REFUSED("--kv-cache-dtype", o.kv_dtype = "int4");
    REFUSED("activations", o.activations = "w8a8");
    REFUSED("warp9", o.cpu_level = "warp9");
    REFUSED("warp9", o.moe_runner = "warp9");
    REFUSED("abacus", o.device = "abacus");
    REFUSED("max_context", o.max_context = 1u << 30);
    REFUSED("memory", o.memory_bytes = 1000);
    REFUSED("exceed", (o.memory_bytes = 100u << 20, o.kv_tokens = 1u << 30));
#undef REFUSED
}

/* The same with a cache of codes: a token's scales are its own, so nothing else changes. */
static void the_same_with_an_fp8_cache(void **state)
{
    int32_t ids[2][MAX_TOKENS];
    uint64_t bytes[2];
    for (int i = 0; i < 2; i++) {
        nb_engine_info info;
        kv_dtype = i ? "fp8_e4m3" : "bf16";
        nb_engine *e = open_engine(models[2], 64, 1, 192);
        nb_engine_get_info(e, &info);
        bytes[i] = info.kv_bytes;
        assert_string_equal(info.kv_dtype, kv_dtype);
        nb_engine_close(&e);
        generate_alone(models[0], 64, 5, 60, 0, ids[i]);
    }
    assert_true(bytes[1] < bytes[0]);
    assert_memory_not_equal(ids[0], ids[1], 60 * sizeof **ids); /* it is another cache */
    same_tokens_in_any_batch(state);
    same_tokens_however_the_prompt_is_cut(state);
    preempted_requests_give_the_same_tokens(state);
    a_cached_prefix_changes_no_token(state);
    drafting_changes_no_token(state);
    kv_dtype = "auto";
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_tokens_in_any_batch),
        cmocka_unit_test(same_tokens_however_the_prompt_is_cut),
        cmocka_unit_test(preempted_requests_give_the_same_tokens),
        cmocka_unit_test(a_cached_prefix_changes_no_token),
        cmocka_unit_test(drafting_changes_no_token),
        cmocka_unit_test(drafts_of_the_embedded_model_are_good),
        cmocka_unit_test(neighbours_change_no_draft),
        cmocka_unit_test(a_slow_reader_holds_only_itself),
        cmocka_unit_test(cancel_frees_pages_in_one_step),
        cmocka_unit_test(bad_requests_name_the_field),
        cmocka_unit_test(prompt_logprobs_are_those_of_the_answer),
        cmocka_unit_test(a_nan_fails_its_request_and_no_other),
        cmocka_unit_test(every_end_id_stops),
        cmocka_unit_test(penalties_and_bias),
        cmocka_unit_test(a_grammar_decides),
        cmocka_unit_test(many_threads_one_engine),
        cmocka_unit_test(closing_ends_what_runs),
        cmocka_unit_test(refusals_when_opening),
        cmocka_unit_test(the_same_with_an_fp8_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
