/* text/grammar.h with the real library and a byte-level tokenizer made here: masks, ends,
 * thinking, refusals, bounds, threads, memory failures, time of a mask.
 *
 * With arguments it is the driver of tests/text/test_grammar.py: `test_text_grammar walk FOLDER`
 * reads one JSON object per line, {"kind", "source", "seed"}, generates by choosing at random among
 * the tokens allowed, and prints one object per line. */
#include "cmocka_all.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "text/grammar.h"
#include "text/grammar_source.h"

#define WORDS 8192

static const char *const kinds[NBI_GRAMMAR_KIND_COUNT] = {
    "json_object", "json_schema", "json_tight", "json_spaced", "regex", "choice", "ebnf", "tag"};

/* ---------------------------------------------------------------- generating */

static uint32_t next_random(uint64_t *seed, uint32_t n)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33) % n;
}

/* What brings an answer to its end soonest: low is good. In a JSON string that is its quote. A
 * caller who knows better gives the bytes that do, best first;
 * with `flat` they are alike. */
static int rank_of(const nbi_tokenizer *t, int32_t id, bool in_string, const char *finish,
                   bool flat)
{
    size_t n = 0;
    const char *s = nbi_token_bytes(t, id, &n);
    if (!s || n == 0) return 10000;
    const char *at = memchr(finish, s[0], strlen(finish));
    int rank = !at ? 30 : flat ? 0 : (int)(at - finish);
    if (!*finish) {
        rank = s[0] == '}' || s[0] == ']' ? in_string : s[0] == '"' ? !in_string : 4;
        if (s[0] == ',') rank = 2;
        if (s[0] >= '0' && s[0] <= '9') rank = 3;
        if (memchr("{[ \t\r\n", s[0], 6)) rank = 5;
    }
    return rank * 64 + (n < 60 ? (int)n : 60);
}

typedef struct walk {
    const nbi_tokenizer *tokenizer;
    const int32_t *eos;
    uint32_t n_eos;
    const char *finish;
    uint64_t seed;
    uint32_t n_free, n_max; /* tokens chosen at random, tokens at most */
    nbi_buf text;
    uint32_t n_tokens, n_bad_ends; /* ends offered while not complete, or missing when complete */
    bool ended;
    uint64_t mask_ns, mask_ns_max;
} walk;

static bool has(const uint32_t *bits, int32_t id)
{
    return bits[id / 32] >> id % 32 & 1;
}

static int32_t choose(walk *w, const uint32_t *bits, uint32_t n_words)
{
    bool hurry = w->n_tokens >= w->n_free, flat = next_random(&w->seed, 4) == 0;
    for (uint32_t i = 0; i < w->n_eos; i++) {
        if (has(bits, w->eos[i]) && (hurry || next_random(&w->seed, 4) == 0)) return w->eos[i];
    }
    int32_t best = -1, letter = nbi_token_find(w->tokenizer, "q", 1);
    bool in_string = letter >= 0 && has(bits, letter);
    int best_rank = 0;
    uint32_t ties = 0;
    for (uint32_t i = 0; i < n_words; i++) {
        for (uint32_t word = bits[i]; word; word &= word - 1) {
            int32_t id = (int32_t)(i * 32) + __builtin_ctz(word);
            int rank = hurry ? rank_of(w->tokenizer, id, in_string, w->finish, flat) : 0;
            if (best < 0 || rank < best_rank) ties = 0;
            if ((best < 0 || rank <= best_rank) && next_random(&w->seed, ++ties) == 0) {
                best = id;
                best_rank = rank;
            }
        }
    }
    return best;
}

static void run_walk(walk *w, nbi_grammar *g)
{
    static _Thread_local uint32_t bits[WORDS];
    nb_grammar hooks = nbi_grammar_hooks(g);
    uint32_t n_words = (nbi_tokenizer_size(w->tokenizer) + 31) / 32;
    while (!w->ended && w->n_tokens < w->n_max) {
        memset(bits, 0, n_words * sizeof *bits);
        bool complete = nbi_grammar_complete(g);
        uint64_t start = nbi_now_ns();
        nbi_heap_forbid();
        hooks.mask(hooks.user, bits, n_words);
        nbi_heap_allow();
        uint64_t ns = nbi_now_ns() - start;
        w->mask_ns += ns;
        if (ns > w->mask_ns_max) w->mask_ns_max = ns;
        if (!nbi_grammar_failure(g)) w->n_bad_ends += has(bits, w->eos[0]) != complete;
        int32_t id = choose(w, bits, n_words);
        if (id < 0) return;
        for (uint32_t i = 0; i < w->n_eos; i++) w->ended |= id == w->eos[i];
        hooks.accept(hooks.user, id);
        w->n_tokens++;
        size_t n = 0;
        const char *s = nbi_token_bytes(w->tokenizer, id, &n);
        if (!w->ended && nbi_buf_add(&w->text, s, n) != NB_OK) abort();
    }
}

/* ---------------------------------------------------------------- driver */

static int32_t driver_eos(const nbi_tokenizer *t)
{
    int32_t id = nbi_token_find(t, "<|user|>", 8);
    return id >= 0 ? id : nbi_token_find(t, "<|endoftext|>", 13);
}

static nbi_grammar_kind kind_by_name(const char *name)
{
    for (int i = 0; i < NBI_GRAMMAR_KIND_COUNT; i++) {
        if (strcmp(kinds[i], name) == 0) return (nbi_grammar_kind)i;
    }
    return NBI_GRAMMAR_KIND_COUNT;
}

static json_t *drive(nbi_grammar_compiler *c, walk *w, const char *kind, const char *source)
{
    nb_error err = {.status = NB_OK};
    nbi_grammar *g = NULL;
    uint64_t start = nbi_now_ns();
    nb_status st =
        nbi_grammar_compile(&g, c, kind_by_name(kind), source, strlen(source), NULL, &err);
    double ms = (double)(nbi_now_ns() - start) * 1e-6;
    if (st != NB_OK)
        return json_pack("{s:i, s:s, s:f}", "status", st, "error", err.text, "compile_ms", ms);
    run_walk(w, g);
    const char *failure = nbi_grammar_failure(g);
    json_t *result =
        json_pack("{s:i, s:s%, s:b, s:s?, s:i, s:i, s:f, s:f, s:f}", "status", 0, "text",
                  w->text.data ? w->text.data : "", w->text.len, "ended", w->ended, "failure",
                  failure, "tokens", (int)w->n_tokens, "bad_ends", (int)w->n_bad_ends, "compile_ms",
                  ms, "mask_us", (double)w->mask_ns * 1e-3 / (w->n_tokens ? w->n_tokens : 1),
                  "mask_us_max", (double)w->mask_ns_max * 1e-3);
    nbi_grammar_close(&g);
    return result ? result : json_pack("{s:i, s:s}", "status", -4, "error", "text is not UTF-8");
}

static int drive_lines(nbi_grammar_compiler *c, const nbi_tokenizer *t, const int32_t *eos)
{
    char *line = NULL;
    size_t cap = 0;
    while (getline(&line, &cap, stdin) > 0) {
        json_t *in = json_loads(line, 0, NULL);
        const char *kind, *source, *finish = "";
        int seed, n_free = 40;
        if (!in || json_unpack(in, "{s:s, s:s, s:i, s?i, s?s}", "kind", &kind, "source", &source,
                               "seed", &seed, "free", &n_free, "finish", &finish) != 0)
            return 2;
        walk w = {.tokenizer = t,
                  .eos = eos,
                  .n_eos = 1,
                  .finish = finish,
                  .seed = (uint64_t)seed,
                  .n_free = (uint32_t)n_free,
                  .n_max = 4000};
        json_t *out = drive(c, &w, kind, source);
        char *dump = json_dumps(out, JSON_COMPACT);
        puts(dump);
        fflush(stdout);
        free(dump);
        json_decref(out);
        json_decref(in);
        nbi_buf_free(&w.text);
    }
    free(line);
    return 0;
}

static int drive_folder(const char *folder)
{
    nb_error err = {.status = NB_OK};
    nbi_tokenizer *t = NULL;
    nbi_grammar_compiler *c = NULL;
    if (nbi_tokenizer_open(&t, folder, &err) != NB_OK) return fprintf(stderr, "%s\n", err.text), 1;
    int32_t eos = driver_eos(t);
    nbi_grammar_setup setup = {
        .tokenizer = t, .eos = &eos, .n_eos = 1, .folder = NBI_TEST_GRAMMAR_FOLDER};
    int rc = 1;
    if (nbi_grammar_compiler_open(&c, &setup, &err) == NB_OK)
        rc = drive_lines(c, t, &eos);
    else
        fprintf(stderr, "%s\n", err.text);
    nbi_grammar_compiler_close(&c);
    nbi_tokenizer_close(&t);
    return rc;
}

/* ---------------------------------------------------------------- a tokenizer */

enum { ID_END = 300, ID_USER, ID_THINK, ID_NOTHINK, ID_CALL, N_IDS };

/* GPT-2's spelling of a byte. */
static uint32_t spelling(unsigned byte)
{
    static uint32_t next, table[256];
    if (!table[0]) {
        for (unsigned b = 0; b < 256; b++) {
            bool shown = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
            table[b] = shown ? b : 256 + next++;
        }
    }
    return table[byte];
}

/* 256 bytes, four merges, five added tokens behind a gap. */
static nbi_tokenizer *make_tokenizer(void)
{
    static const char *const merges[][2] = {{"{", "\""}, {"\"", ":"}, {"t", "r"}, {"1", "2"}};
    static const char *const added[] = {"<end>", "<|user|>", "<think>", "</think>", "<tool_call>"};
    json_t *vocab = json_object(), *pairs = json_array(), *tokens = json_array();
    for (unsigned b = 0; b < 256; b++) {
        char text[5] = {0};
        (void)nbi_utf8_put(text, spelling(b));
        json_object_set_new(vocab, text, json_integer(b));
    }
    for (int i = 0; i < 4; i++) {
        char text[8];
        snprintf(text, sizeof text, "%s%s", merges[i][0], merges[i][1]);
        json_object_set_new(vocab, text, json_integer(256 + i));
        json_array_append_new(pairs, json_pack("[s,s]", merges[i][0], merges[i][1]));
    }
    for (int i = 0; i < 5; i++)
        json_array_append_new(tokens,
                              json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", ID_END + i,
                                        "content", added[i], "special", i < 2, "normalized", 0,
                                        "lstrip", 0, "rstrip", 0, "single_word", 0));
    json_t *all = json_pack("{s:s, s:o, s:{s:s, s:b, s:b, s:b}, s:{s:s, s:o, s:o}}", "version",
                            "1.0", "added_tokens", tokens, "pre_tokenizer", "type", "ByteLevel",
                            "add_prefix_space", 0, "use_regex", 1, "trim_offsets", 0, "model",
                            "type", "BPE", "vocab", vocab, "merges", pairs);
    assert_non_null(all);
    char *text = json_dumps(all, JSON_COMPACT);
    nbi_tokenizer *t = NULL;
    nb_error err;
    if (nbi_tokenizer_parse(&t, text, strlen(text), "test", &err) != NB_OK)
        fail_msg("%s", err.text);
    free(text);
    json_decref(all);
    return t;
}

static nbi_tokenizer *tokenizer;
static nbi_grammar_compiler *compiler;
static const int32_t ends[] = {ID_END, ID_USER};

static int set_up(void **state)
{
    (void)state;
    tokenizer = make_tokenizer();
    nbi_grammar_setup setup = {
        .tokenizer = tokenizer, .eos = ends, .n_eos = 2, .folder = NBI_TEST_GRAMMAR_FOLDER};
    return nbi_grammar_compiler_open(&compiler, &setup, NULL);
}

static int tear_down(void **state)
{
    (void)state;
    nbi_grammar_compiler_close(&compiler);
    nbi_tokenizer_close(&tokenizer);
    return 0;
}

static nbi_grammar *compiled(nbi_grammar_kind kind, const char *source,
                             const nbi_grammar_options *options)
{
    nbi_grammar *g = NULL;
    nb_error err = {.status = NB_OK};
    if (nbi_grammar_compile(&g, compiler, kind, source, strlen(source), options, &err) != NB_OK)
        fail_msg("%s", err.text);
    return g;
}

static uint32_t bits[16];

static const uint32_t *masked(nbi_grammar *g)
{
    memset(bits, 0, sizeof bits);
    nb_grammar hooks = nbi_grammar_hooks(g);
    hooks.mask(hooks.user, bits, (N_IDS + 31) / 32);
    return bits;
}

static void accepted(nbi_grammar *g, int32_t id)
{
    nb_grammar hooks = nbi_grammar_hooks(g);
    hooks.accept(hooks.user, id);
}

static unsigned count(const uint32_t *mask_bits)
{
    unsigned n = 0;
    for (int32_t id = 0; id < 512; id++) n += has(mask_bits, id);
    return n;
}

/* ---------------------------------------------------------------- tests */

static void test_end_only_when_complete(void **state)
{
    (void)state;
    nbi_grammar *g = compiled(NBI_GRAMMAR_REGEX, "a(bc)?", NULL);
    masked(g);
    assert_int_equal(count(bits), 1);
    assert_true(has(bits, 'a'));
    accepted(g, 'a');
    masked(g); /* complete, and may go on */
    assert_int_equal(count(bits), 3);
    assert_true(has(bits, 'b') && has(bits, ID_END) && has(bits, ID_USER));
    assert_true(nbi_grammar_complete(g));
    accepted(g, 'b');
    masked(g);
    assert_int_equal(count(bits), 1);
    assert_true(has(bits, 'c') && !nbi_grammar_complete(g));
    accepted(g, 'c');
    for (int i = 0; i < 3; i++) { /* with ignore_eos the engine goes on asking */
        masked(g);
        assert_int_equal(count(bits), 2);
        assert_true(has(bits, ID_END) && has(bits, ID_USER));
        accepted(g, ID_END);
    }
    assert_true(nbi_grammar_complete(g));
    assert_null(nbi_grammar_failure(g));
    nbi_grammar_close(&g);
    assert_null(g);
}

static void test_tokens_of_several_bytes(void **state)
{
    (void)state;
    nbi_grammar *g = compiled(NBI_GRAMMAR_JSON_SCHEMA,
                              "{\"type\":\"object\",\"properties\":{\"é\":{\"const\":12}},"
                              "\"required\":[\"é\"],\"additionalProperties\":false}",
                              NULL);
    static const int32_t ids[] = {256, 0xc3, 0xa9, 257, 259, '}'}; /* {" é ": 12 } */
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        masked(g);
        assert_true(has(bits, ids[i]));
        assert_false(has(bits, ID_END));
        accepted(g, ids[i]);
    }
    assert_true(has(masked(g), ID_END));
    nbi_grammar_close(&g);
}

static void test_added_tokens_are_no_text(void **state)
{
    (void)state;
    nbi_grammar *g = compiled(NBI_GRAMMAR_REGEX, "(?s:.)*", NULL);
    masked(g);
    for (int32_t id = ID_THINK; id <= ID_CALL; id++) assert_false(has(bits, id));
    for (int32_t id = 260; id < ID_END; id++) assert_false(has(bits, id)); /* unused */
    assert_true(has(bits, '<') && has(bits, ID_END));
    nbi_grammar_close(&g);
}

static void test_begins_behind_thinking(void **state)
{
    (void)state;
    nbi_grammar_options o = {.after_think = ID_NOTHINK, .banned = {ID_CALL}, .n_banned = 1};
    nbi_grammar *g = compiled(NBI_GRAMMAR_CHOICE, "[\"x\"]", &o);
    static const int32_t thoughts[] = {'x', '{', ID_THINK, 270, 256};
    for (size_t i = 0; i < sizeof thoughts / sizeof *thoughts; i++) {
        masked(g);
        assert_int_equal(count(bits), N_IDS - 3); /* ends, <tool_call> */
        assert_false(has(bits, ID_END) || has(bits, ID_USER) || has(bits, ID_CALL));
        assert_false(nbi_grammar_complete(g));
        accepted(g, thoughts[i]);
    }
    accepted(g, ID_NOTHINK);
    masked(g);
    assert_int_equal(count(bits), 1);
    assert_true(has(bits, 'x'));
    nbi_grammar_close(&g);
    o.banned[0] = ID_NOTHINK;
    assert_int_equal(nbi_grammar_compile(&g, compiler, NBI_GRAMMAR_JSON_OBJECT, NULL, 0, &o, NULL),
                     NB_INVALID);
    o = (nbi_grammar_options){.after_think = N_IDS};
    assert_int_equal(nbi_grammar_compile(&g, compiler, NBI_GRAMMAR_JSON_OBJECT, NULL, 0, &o, NULL),
                     NB_INVALID);
}

/* The model may open the thinking itself, once, and call a tool in place of the text. */
static void test_thinking_and_calls_are_choices(void **state)
{
    (void)state;
    nbi_grammar_options o = {.after_think = ID_NOTHINK,
                             .may_think = true,
                             .think_begin = ID_THINK,
                             .may_call = true,
                             .call_begin = ID_CALL};
    for (int way = 0; way < 4; way++) { /* text; thinking, text; call; thinking, call inside it */
        nbi_grammar *g = compiled(NBI_GRAMMAR_REGEX, "xy", &o);
        masked(g);
        assert_int_equal(count(bits), 3);
        assert_true(has(bits, 'x') && has(bits, ID_THINK) && has(bits, ID_CALL));
        if (way & 1) {
            accepted(g, ID_THINK);
            masked(g);
            assert_true(has(bits, ID_CALL) && has(bits, 'q') && !has(bits, ID_END));
            accepted(g, 'q');
        }
        if (way == 1) {
            accepted(g, ID_NOTHINK);
            masked(g);
            assert_int_equal(count(bits), 2); /* once is enough */
            assert_true(has(bits, 'x') && has(bits, ID_CALL));
        }
        if (way < 2) {
            accepted(g, 'x');
            masked(g);
            assert_int_equal(count(bits), 1);
            assert_true(has(bits, 'y'));
        } else {
            accepted(g, ID_CALL);
            masked(g);
            assert_int_equal(count(bits), N_IDS);
            assert_true(nbi_grammar_complete(g));
            accepted(g, 'z');
            accepted(g, ID_END);
            masked(g);
            assert_int_equal(count(bits), 2);
        }
        assert_null(nbi_grammar_failure(g));
        nbi_grammar_close(&g);
    }
    nbi_grammar *g = NULL;
    o.after_think = -1; /* thinking that cannot end */
    assert_int_equal(nbi_grammar_compile(&g, compiler, NBI_GRAMMAR_JSON_OBJECT, NULL, 0, &o, NULL),
                     NB_INVALID);
}

static int32_t pick(uint64_t *seed, const uint32_t *from)
{
    int32_t id = -1;
    for (int32_t i = 0, n = 0; i < N_IDS; i++) {
        if (has(from, i) && next_random(seed, (uint32_t)++n) == 0) id = i;
    }
    return id;
}

/* Before every token up to eight guesses are accepted and taken back: nothing of them is left, also
 * where they run out of the thinking, into the end, or are no token at all. */
static void test_rollback(void **state)
{
    (void)state;
    static const struct {
        nbi_grammar_kind kind;
        const char *source;
    } sources[] = {
        {NBI_GRAMMAR_JSON_SCHEMA, "{\"type\":\"array\",\"items\":{\"enum\":[\"a\",12,null]},"
                                  "\"maxItems\":5}"},
        {NBI_GRAMMAR_REGEX, "(ab?|c){0,9}d"},
        {NBI_GRAMMAR_EBNF, "root ::= \"(\" root* \")\" | [a-c]"},
        {NBI_GRAMMAR_CHOICE, "[\"tr\",\"true\",\"12\"]"},
    };
    for (uint64_t seed = 1; seed <= 60; seed++) {
        nbi_grammar_options o = {.after_think = seed % 3 ? -1 : ID_NOTHINK};
        nbi_grammar *g = compiled(sources[seed % 4].kind, sources[seed % 4].source, &o);
        uint64_t random = seed;
        for (int step = 0; step < 40; step++) {
            uint32_t before[16];
            memcpy(before, masked(g), sizeof before);
            bool complete = nbi_grammar_complete(g);
            uint32_t n = next_random(&random, NB_GRAMMAR_ROLLBACK_MAX + 1);
            for (uint32_t i = 0; i < n; i++) { /* a wrong one among them now and then */
                accepted(g, next_random(&random, 20) ? pick(&random, bits) : -1);
                masked(g);
            }
            nb_grammar hooks = nbi_grammar_hooks(g);
            hooks.rollback(hooks.user, n);
            assert_null(nbi_grammar_failure(g));
            assert_memory_equal(before, masked(g), sizeof before);
            assert_int_equal(complete, nbi_grammar_complete(g));
            int32_t id = step == 3 && o.after_think >= 0 ? ID_NOTHINK : pick(&random, before);
            accepted(g, id);
            assert_null(nbi_grammar_failure(g));
        }
        nbi_grammar_close(&g);
    }
}

static bool is_known(nbi_grammar_kind kind, const char *source)
{
    static const nbi_grammar_options at_once = {.after_think = -1};
    nbi_grammar *g = NULL;
    bool known;
    nb_status st =
        nbi_grammar_recall(&g, &known, compiler, kind, source, strlen(source), &at_once, NULL);
    assert_int_equal(known && st == NB_OK, g != NULL);
    assert_true(known || st == NB_OK);
    nbi_grammar_close(&g);
    return known;
}

static void test_refusals_are_kept(void **state)
{
    (void)state;
    static const char wrong[] = "(a", good[] = "ab{2}";
    nbi_grammar *g = NULL;
    for (int i = 0; i < 2; i++) {
        nb_error err = {.status = NB_OK};
        assert_int_equal(is_known(NBI_GRAMMAR_REGEX, wrong), i == 1);
        assert_int_equal(nbi_grammar_compile(&g, compiler, NBI_GRAMMAR_REGEX, wrong, 2, NULL, &err),
                         NB_INVALID);
        assert_non_null(strstr(err.text, "unclosed group"));
        assert_int_equal(is_known(NBI_GRAMMAR_REGEX, good), i == 1);
        g = compiled(NBI_GRAMMAR_REGEX, good, NULL);
        nbi_grammar_close(&g);
    }
    assert_false(is_known(NBI_GRAMMAR_EBNF, good));
}

static void test_wrong_token_ends_the_answer(void **state)
{
    (void)state;
    static const int32_t wrong[] = {'b', ID_THINK, 270, -1, N_IDS + 5};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        nbi_grammar *g = compiled(NBI_GRAMMAR_REGEX, "aa", NULL);
        accepted(g, 'a');
        accepted(g, wrong[i]);
        assert_non_null(nbi_grammar_failure(g));
        assert_false(nbi_grammar_complete(g));
        masked(g);
        assert_int_equal(count(bits), 2);
        assert_true(has(bits, ID_END));
        nbi_grammar_close(&g);
    }
}

/* The model may have fewer ids than the tokenizer, or more. */
static void test_vocabulary_sizes(void **state)
{
    (void)state;
    for (uint32_t vocab = 290; vocab <= 400; vocab += 110) {
        int32_t eos = 0;
        nbi_grammar_compiler *c = NULL;
        nbi_grammar *g = NULL;
        nbi_grammar_setup setup = {.tokenizer = tokenizer,
                                   .eos = &eos,
                                   .n_eos = 1,
                                   .vocab = vocab,
                                   .folder = NBI_TEST_GRAMMAR_FOLDER};
        nbi_grammar_options o = {.after_think = 5};
        assert_int_equal(nbi_grammar_compiler_open(&c, &setup, NULL), NB_OK);
        assert_int_equal(nbi_grammar_compile(&g, c, NBI_GRAMMAR_REGEX, "a", 1, &o, NULL), NB_OK);
        nb_grammar hooks = nbi_grammar_hooks(g);
        uint32_t wide[20] = {0};
        hooks.mask(hooks.user, wide, (vocab + 31) / 32);
        assert_int_equal(count(wide), vocab - 1);
        hooks.accept(hooks.user, 5);
        memset(wide, 0, sizeof wide);
        hooks.mask(hooks.user, wide, (vocab + 31) / 32);
        assert_int_equal(count(wide), 1);
        nbi_grammar_close(&g);
        nbi_grammar_compiler_close(&c);
        eos = (int32_t)vocab;
        assert_int_equal(nbi_grammar_compiler_open(&c, &setup, NULL), NB_INVALID);
    }
}

static void test_not_installed(void **state)
{
    (void)state;
    nb_error err = {.status = NB_OK};
    nbi_grammar_compiler *c = NULL;
    nbi_grammar *g = NULL;
    nbi_grammar_setup setup = {
        .tokenizer = tokenizer, .eos = ends, .n_eos = 2, .folder = "/nonexistent"};
    assert_int_equal(nbi_grammar_compiler_open(&c, &setup, NULL), NB_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(nbi_grammar_compile(&g, c, NBI_GRAMMAR_REGEX, "a", 1, NULL, &err),
                         NB_UNSUPPORTED);
        assert_non_null(strstr(err.text, "pip install --target"));
        assert_non_null(strstr(err.text, "/nonexistent"));
    }
    nbi_grammar_compiler_close(&c);
}

static void test_more_grammars_than_the_cache_holds(void **state)
{
    (void)state;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < (int)NBI_GRAMMAR_CACHED_MAX + 8; i++) {
            char regex[32];
            snprintf(regex, sizeof regex, "x{%d}", i + 1);
            nbi_grammar *g = compiled(NBI_GRAMMAR_REGEX, regex, NULL);
            for (int k = 0; k <= i; k++) {
                assert_int_equal(count(masked(g)), 1);
                accepted(g, 'x');
            }
            assert_true(nbi_grammar_complete(g));
            nbi_grammar_close(&g);
        }
    }
}

static void test_sizes_are_refused(void **state)
{
    (void)state;
    nbi_grammar *g = NULL;
    char *large = malloc(NBI_GRAMMAR_SOURCE_MAX + 1);
    memset(large, 'a', NBI_GRAMMAR_SOURCE_MAX + 1);
    for (int kind = NBI_GRAMMAR_JSON_SCHEMA; kind < NBI_GRAMMAR_KIND_COUNT; kind++)
        assert_int_equal(nbi_grammar_compile(&g, compiler, (nbi_grammar_kind)kind, large,
                                             NBI_GRAMMAR_SOURCE_MAX + 1, NULL, NULL),
                         NB_TOO_LARGE);
    free(large);
    assert_int_equal(nbi_grammar_compile(&g, compiler, NBI_GRAMMAR_REGEX, "a\0b", 3, NULL, NULL),
                     NB_INVALID);
    assert_int_equal(
        nbi_grammar_compile(&g, compiler, NBI_GRAMMAR_EBNF, "root ::= \"\xff\"", 12, NULL, NULL),
        NB_INVALID);
    assert_null(g);
}

static void *walk_many(void *arg)
{
    static const char *const sources[] = {
        "{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"maxItems\":9}",
        "{\"type\":\"object\",\"properties\":{\"a\":{\"enum\":[\"x\",\"y\"]}},\"required\":[\"a\"]"
        "}",
        "{\"anyOf\":[{\"type\":\"null\"},{\"type\":\"string\",\"pattern\":\"^[a-c]+$\"}]}"};
    uint64_t seed = (uint64_t)(uintptr_t)arg;
    size_t n_bad = 0;
    for (int i = 0; i < 60; i++) {
        const char *source = sources[next_random(&seed, 3)];
        nbi_grammar *g = NULL;
        walk w = {.tokenizer = tokenizer,
                  .eos = ends,
                  .n_eos = 2,
                  .finish = "",
                  .seed = seed + i,
                  .n_free = 10,
                  .n_max = 2000};
        if (nbi_grammar_compile(&g, compiler, NBI_GRAMMAR_JSON_SCHEMA, source, strlen(source), NULL,
                                NULL) != NB_OK) {
            n_bad++;
            continue;
        }
        run_walk(&w, g);
        json_t *value = json_loads(w.text.data ? w.text.data : "", JSON_DECODE_ANY, NULL);
        n_bad += !w.ended || w.n_bad_ends || nbi_grammar_failure(g) || !value;
        json_decref(value);
        nbi_buf_free(&w.text);
        nbi_grammar_close(&g);
    }
    return (void *)n_bad;
}

static void test_threads(void **state)
{
    (void)state;
    pthread_t threads[6];
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, walk_many, (void *)(i + 1)), 0);
    for (size_t i = 0; i < 6; i++) {
        void *n_bad;
        pthread_join(threads[i], &n_bad);
        assert_null(n_bad);
    }
}

static void test_every_allocation_fails_once(void **state)
{
    (void)state;
    static const char grammar[] = "root ::= item+\nitem ::= \"(\" item* \")\" | [a-z]";
    static const char schema[] = "{\"type\":\"object\",\"properties\":{\"q\":{\"type\":\"null\"}}}";
    unsigned n_failed = 0;
    for (long n = 0;; n++) {
        nbi_grammar_compiler *c = NULL;
        nbi_grammar *g = NULL, *h = NULL;
        nbi_grammar_setup setup = {
            .tokenizer = tokenizer, .eos = ends, .n_eos = 2, .folder = NBI_TEST_GRAMMAR_FOLDER};
        nb_error err = {.status = NB_OK};
        nbi_heap_fail_after(n);
        nb_status st = nbi_grammar_compiler_open(&c, &setup, &err);
        if (st == NB_OK)
            st = nbi_grammar_compile(&g, c, NBI_GRAMMAR_EBNF, grammar, strlen(grammar), NULL, &err);
        if (st == NB_OK)
            st = nbi_grammar_compile(&h, c, NBI_GRAMMAR_JSON_SCHEMA, schema, strlen(schema), NULL,
                                     &err);
        nbi_heap_fail_after(-1);
        /* The JSON library, short of memory inside a string, speaks of wrong syntax. */
        if (st != NB_OK && st != NB_NO_MEMORY && (st != NB_INVALID || !strstr(err.text, "line")))
            fail_msg("allocation %ld: %s", n, err.text);
        n_failed += st != NB_OK;
        bool done = st == NB_OK && n > 60;
        nbi_grammar_close(&g);
        nbi_grammar_close(&h);
        nbi_grammar_compiler_close(&c);
        if (done) break;
    }
    assert_true(n_failed > 20);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "walk") == 0) return drive_folder(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_end_only_when_complete),
        cmocka_unit_test(test_tokens_of_several_bytes),
        cmocka_unit_test(test_added_tokens_are_no_text),
        cmocka_unit_test(test_begins_behind_thinking),
        cmocka_unit_test(test_thinking_and_calls_are_choices),
        cmocka_unit_test(test_rollback),
        cmocka_unit_test(test_refusals_are_kept),
        cmocka_unit_test(test_wrong_token_ends_the_answer),
        cmocka_unit_test(test_vocabulary_sizes),
        cmocka_unit_test(test_not_installed),
        cmocka_unit_test(test_more_grammars_than_the_cache_holds),
        cmocka_unit_test(test_sizes_are_refused),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_every_allocation_fails_once),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
