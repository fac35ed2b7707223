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

static const char *const kinds[NBI_GRAMMAR_KIND_COUNT] = {"json_object", "json_schema", "regex",
                                                          "choice", "ebnf"};

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
        if (!in || json_unpack(in, "{s:s, s:s, s:i, s?i, s?s}", "kind", &kind, "source", &source, "seed",
                               &seed, "free", &n_free, "finish", &finish) != 0)
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
    nbi_grammar_setup setup = {.tokenizer = t, .eos = &eos, .n_eos = 1};
    int rc = 1;
    if (nbi_grammar_compiler_open(&c, &setup, &err) == NB_OK)
        rc = drive_lines(c, t, &eos);
    else
        fprintf(stderr, "%s\n", err.text);
    nbi_grammar_compiler_close(&c);
    nbi_tokenizer_close(&t);
    return rc;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "walk") == 0) return drive_folder(argv[2]);
    return 0;
}
