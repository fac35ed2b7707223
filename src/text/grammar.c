/* Compiling grammars and asking them for masks (see grammar.h).
 *
 * A compiled grammar is a matcher of the library in its first state. It is kept as a prototype;
 * every request gets a deep copy, which shares nothing that changes. Compilation runs in a thread
 * of its own, with a large stack because the library recurses: the caller waits for it no longer
 * than its time and leaves it behind otherwise. What is left behind ends by the library's own
 * bounds and frees itself; it counts as one that runs until then. */
#include "text/grammar.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "text/grammar_library.h"
#include "text/grammar_source.h"

#define STACK_BYTES     ((size_t)64 << 20) /* of address space */
#define BUSY_ROUNDS     5 /* times NBI_GRAMMAR_SECONDS at most, on a busy machine */
#define COMPILE_NS      ((uint64_t)NBI_GRAMMAR_SECONDS * 1000000000u)
#define NO_TOKEN_BYTE   0xff /* the library: a name follows that no text matches */
#define MESSAGE_BYTES   512
#define LEXER_FUEL      1000000u /* compilation: 20 ms of building expressions */
#define COMPILE_NICE    5
#define STEP_FUEL       200000u /* a mask: 14 ms at worst */
#define STEP_ITEMS      50000u  /* a mask: 3 ms at worst */
#define LEXER_STATES    50000u  /* of one request */
#define GRAMMAR_SYMBOLS 200000u

/* What a source came to: a matcher, or why there is none. */
typedef struct cache_entry {
    nbi_grammar_kind kind;
    char *source; /* NULL: free */
    size_t n;
    uint64_t used; /* of compiler.clock */
    nbi_llg_matcher *matcher;
    nb_error *refusal;
} cache_entry;

/* A compilation that its caller waits for; lies on the caller's stack. */
typedef struct flight {
    nbi_grammar_kind kind;
    const char *source;
    size_t n;
    struct flight *next;
} flight;

struct nbi_grammar_compiler {
    atomic_uint refs; /* its owner's, and one of each grammar */
    const nbi_tokenizer *tokenizer;
    char *folder; /* or NULL */
    int32_t *eos;
    uint32_t n_eos, vocab, n_tokens; /* n_tokens: ids that the library knows */
    uint32_t n_words;                /* of the masks below, over the model's vocabulary */
    uint32_t *text_ids;              /* ids that stand for text */
    uint32_t *free_ids;              /* everything but the end tokens */

    pthread_mutex_t load_lock;
    bool load_tried;
    nb_error load_error; /* status NB_OK: loaded */
    const nbi_llg *llg;
    nbi_llg_tokenizer *vocabulary;

    pthread_mutex_t cache_lock;
    pthread_cond_t landed;
    flight *flights;
    uint64_t clock;
    cache_entry cache[NBI_GRAMMAR_CACHED_MAX];
};

typedef enum phase { PHASE_THINKING, PHASE_TEXT, PHASE_FREE, PHASE_ENDED } phase;

/* Where an answer stands beside the matcher. */
typedef struct place {
    phase phase;
    bool begun;    /* the matcher was given a token */
    bool thought;  /* reasoning was opened, or cannot be any more */
    bool consumed; /* by the token that led here: the matcher has to give it back */
    bool failed;
} place;

struct nbi_grammar {
    atomic_uint refs;
    nbi_grammar_compiler *compiler;
    const nbi_llg *llg;
    nbi_llg_matcher *matcher;
    nbi_grammar_options options;
    place now;
    place undo[NB_GRAMMAR_ROLLBACK_MAX]; /* ring: places before the last tokens */
    uint32_t n_accepted;
    atomic_bool failed;
    char failure[256]; /* written before `failed` */
    uint32_t mask[];   /* [words of n_tokens] */
};

static void set_bit(uint32_t *bits, uint32_t id)
{
    bits[id / 32] |= 1u << id % 32;
}

static void clear_bit(uint32_t *bits, uint32_t id)
{
    bits[id / 32] &= ~(1u << id % 32);
}

static bool has_bit(const uint32_t *bits, uint32_t id)
{
    return bits[id / 32] >> id % 32 & 1;
}

static size_t words_for(uint32_t n)
{
    return ((size_t)n + 31) / 32;
}

/* ---------------------------------------------------------------- the vocabulary */

static nb_status check_setup(const nbi_grammar_setup *s, uint32_t vocab, nb_error *err)
{
    if (s->n_eos == 0)
        return nbi_fail(err, NB_INVALID,
                        "grammars: the model has no end token, so no answer could end");
    for (uint32_t i = 0; i < s->n_eos; i++) {
        if (s->eos[i] < 0 || (uint32_t)s->eos[i] >= vocab)
            return nbi_fail(err, NB_INVALID, "grammars: end token %d is outside [0, %u)", s->eos[i],
                            vocab);
    }
    return NB_OK;
}

static bool is_text(const nbi_grammar_compiler *c, uint32_t id)
{
    size_t n = 0;
    return nbi_token_bytes(c->tokenizer, (int32_t)id, &n) && n > 0 &&
           !nbi_token_is_added(c->tokenizer, (int32_t)id) &&
           !nbi_token_is_special(c->tokenizer, (int32_t)id);
}

static void fill_masks(nbi_grammar_compiler *c)
{
    for (uint32_t id = 0; id < c->vocab; id++) set_bit(c->free_ids, id);
    for (uint32_t id = 0; id < c->n_tokens; id++) {
        if (is_text(c, id)) set_bit(c->text_ids, id);
    }
    for (uint32_t i = 0; i < c->n_eos; i++) {
        clear_bit(c->free_ids, (uint32_t)c->eos[i]);
        clear_bit(c->text_ids, (uint32_t)c->eos[i]);
    }
}

nb_status nbi_grammar_compiler_open(nbi_grammar_compiler **out, const nbi_grammar_setup *setup,
                                    nb_error *err)
{
    uint32_t size = nbi_tokenizer_size(setup->tokenizer),
             vocab = setup->vocab ? setup->vocab : size;
    NB_TRY(check_setup(setup, vocab, err));
    nbi_grammar_compiler *c = nbi_calloc(1, sizeof *c);
    if (!c) return nbi_fail(err, NB_NO_MEMORY, "grammars: out of memory");
    atomic_init(&c->refs, 1);
    pthread_mutex_init(&c->load_lock, NULL);
    pthread_mutex_init(&c->cache_lock, NULL);
    pthread_cond_init(&c->landed, NULL);
    c->tokenizer = setup->tokenizer;
    c->vocab = vocab;
    c->n_tokens = size < vocab ? size : vocab;
    c->n_eos = setup->n_eos;
    c->n_words = (uint32_t)words_for(vocab);
    c->eos = nbi_malloc(c->n_eos * sizeof *c->eos);
    c->text_ids = nbi_calloc(c->n_words, sizeof *c->text_ids);
    c->free_ids = nbi_calloc(c->n_words, sizeof *c->free_ids);
    if (setup->folder) c->folder = nbi_strdup(setup->folder);
    if (!c->eos || !c->text_ids || !c->free_ids || (setup->folder && !c->folder)) {
        nbi_grammar_compiler_close(&c);
        return nbi_fail(err, NB_NO_MEMORY, "grammars: out of memory");
    }
    memcpy(c->eos, setup->eos, c->n_eos * sizeof *c->eos);
    fill_masks(c);
    *out = c;
    return NB_OK;
}

static void free_entry(const nbi_grammar_compiler *c, cache_entry *e)
{
    if (e->matcher) c->llg->free_matcher(e->matcher);
    nbi_free(e->refusal);
    nbi_free(e->source);
}

static void unref_compiler(nbi_grammar_compiler *c)
{
    if (atomic_fetch_sub(&c->refs, 1) != 1) return;
    for (size_t i = 0; i < NBI_GRAMMAR_CACHED_MAX; i++) free_entry(c, &c->cache[i]);
    if (c->vocabulary) c->llg->free_tokenizer(c->vocabulary);
    pthread_mutex_destroy(&c->load_lock);
    pthread_cond_destroy(&c->landed);
    pthread_mutex_destroy(&c->cache_lock);
    nbi_free(c->free_ids);
    nbi_free(c->text_ids);
    nbi_free(c->eos);
    nbi_free(c->folder);
    nbi_free(c);
}

void nbi_grammar_compiler_close(nbi_grammar_compiler **compiler)
{
    if (*compiler) unref_compiler(*compiler);
    *compiler = NULL;
}

/* Ids that are no text get a name no text matches; so do unused ids. */
static nb_status token_texts(const nbi_grammar_compiler *c, uint32_t *lens, nbi_buf *bytes)
{
    for (uint32_t id = 0; id < c->n_tokens; id++) {
        size_t n = 0, before = bytes->len;
        if (has_bit(c->text_ids, id)) {
            const char *text = nbi_token_bytes(c->tokenizer, (int32_t)id, &n);
            NB_TRY(nbi_buf_add(bytes, text, n));
        } else {
            NB_TRY(nbi_buf_addf(bytes, "%c<%u>", NO_TOKEN_BYTE, id));
        }
        lens[id] = (uint32_t)(bytes->len - before);
    }
    return NB_OK;
}

static nb_status give_vocabulary(nbi_grammar_compiler *c, nb_error *err)
{
    char message[MESSAGE_BYTES] = "";
    nbi_buf bytes = {0};
    uint32_t *lens = nbi_malloc(c->n_tokens * sizeof *lens);
    nb_status st = lens ? token_texts(c, lens, &bytes) : NB_NO_MEMORY;
    if (st == NB_OK) {
        nbi_llg_tokenizer_init init = {
            .struct_size = sizeof init,
            .vocab_size = c->n_tokens,
            .tok_eos = UINT32_MAX, /* none: nibble puts the end tokens into the mask */
            .token_lens = lens,
            .token_bytes = (const uint8_t *)bytes.data,
            .use_approximate_greedy_tokenize_fn = true, /* used for forced tokens only */
        };
        c->vocabulary = c->llg->new_tokenizer(&init, message, sizeof message);
        if (!c->vocabulary)
            st = nbi_fail(err, NB_UNSUPPORTED, "the grammar library refuses the vocabulary: %s",
                          message);
    } else {
        st = nbi_fail(err, st, "grammars: out of memory");
    }
    nbi_buf_free(&bytes);
    nbi_free(lens);
    return st;
}

nb_status nbi_grammar_compiler_load(nbi_grammar_compiler *c, nb_error *err)
{
    pthread_mutex_lock(&c->load_lock);
    if (!c->load_tried) {
        uint64_t start = nbi_now_ns();
        nb_status st = nbi_llg_load(&c->llg, c->folder, &c->load_error);
        if (st == NB_OK) st = give_vocabulary(c, &c->load_error);
        c->load_error.status = st;
        c->load_tried = st != NB_NO_MEMORY;
        nbi_log(NB_LOG_DEBUG, "grammars: %s after %.0f ms", st == NB_OK ? "ready" : "not available",
                (double)(nbi_now_ns() - start) * 1e-6);
    }
    nb_status st = c->load_error.status;
    if (st != NB_OK && err) *err = c->load_error;
    pthread_mutex_unlock(&c->load_lock);
    return st;
}

/* ---------------------------------------------------------------- one compilation */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a compilation ended */
    unsigned n_running;
} compiling = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* Owned by its thread until `done`, then by the caller; by the thread alone once `abandoned`. */
typedef struct compile_job {
    const nbi_llg *llg;
    nbi_llg_tokenizer *vocabulary; /* a reference of its own */
    const char *type;
    nbi_buf text;
    uint32_t n_words;
    nbi_llg_matcher *matcher;
    bool done, abandoned; /* with compiling.lock */
    clockid_t clock;      /* processor time of the thread, once `started` */
    bool started;         /* with compiling.lock */
    bool empty;           /* nothing can match */
    uint32_t words[];     /* copy of text_ids, then room for a mask */
} compile_job;

static void free_job(compile_job *j)
{
    if (j->matcher) j->llg->free_matcher(j->matcher);
    if (j->vocabulary) j->llg->free_tokenizer(j->vocabulary);
    nbi_buf_free(&j->text);
    nbi_free(j);
}

/* The first mask: builds what every request would build again, and finds grammars that nothing
 * matches. */
static void first_mask(compile_job *j)
{
    uint32_t *mask = j->words + j->n_words, any = 0;
    if (j->llg->is_error(j->matcher)) return;
    if (j->llg->compute_mask(j->matcher, mask, j->n_words * sizeof *mask) != 0) return;
    for (uint32_t i = 0; i < j->n_words; i++) any |= mask[i] & j->words[i];
    j->empty = !any && !j->llg->is_accepting(j->matcher);
}

static void *compile_thread(void *arg)
{
    compile_job *j = arg;
    pthread_mutex_lock(&compiling.lock);
    j->started = pthread_getcpuclockid(pthread_self(), &j->clock) == 0;
    pthread_mutex_unlock(&compiling.lock);
    /* Streams that run go first. On Linux a priority is the thread's. */
    (void)setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), COMPILE_NICE);
    nbi_llg_init init = {.tokenizer = j->vocabulary,
                         .limits = {.initial_lexer_fuel = LEXER_FUEL,
                                    .step_lexer_fuel = STEP_FUEL,
                                    .step_max_items = STEP_ITEMS,
                                    .max_items_in_row = 2000,
                                    .max_lexer_states = LEXER_STATES,
                                    .max_grammar_size = GRAMMAR_SYMBOLS,
                                    .precompute_large_lexemes = true}};
    j->matcher = j->llg->new_matcher(&init, j->type, j->text.data);
    first_mask(j);
    pthread_mutex_lock(&compiling.lock);
    compiling.n_running--;
    j->done = true;
    bool mine = j->abandoned;
    pthread_cond_broadcast(&compiling.changed);
    pthread_mutex_unlock(&compiling.lock);
    if (mine) free_job(j);
    return NULL;
}

/* With the lock held. */
static bool wait_until(const struct timespec *deadline)
{
    return pthread_cond_clockwait(&compiling.changed, &compiling.lock, CLOCK_MONOTONIC, deadline) ==
           0;
}

static nb_status start_job(compile_job *j, nb_error *err)
{
    struct timespec deadline = nbi_timespec(nbi_now_ns() + COMPILE_NS);
    pthread_mutex_lock(&compiling.lock);
    bool waiting = true;
    while (compiling.n_running >= NBI_GRAMMAR_COMPILES_MAX && waiting)
        waiting = wait_until(&deadline);
    bool free_slot = compiling.n_running < NBI_GRAMMAR_COMPILES_MAX;
    if (free_slot) compiling.n_running++;
    pthread_mutex_unlock(&compiling.lock);
    if (!free_slot)
        return nbi_fail(err, NB_BUSY, "%u grammars are being compiled, try again later",
                        NBI_GRAMMAR_COMPILES_MAX);
    pthread_attr_t attr;
    pthread_t thread;
    int rc = pthread_attr_init(&attr);
    if (rc == 0) {
        (void)pthread_attr_setstacksize(&attr, STACK_BYTES);
        (void)pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        rc = pthread_create(&thread, &attr, compile_thread, j);
        pthread_attr_destroy(&attr);
    }
    if (rc == 0) return NB_OK;
    pthread_mutex_lock(&compiling.lock);
    compiling.n_running--;
    pthread_cond_broadcast(&compiling.changed);
    pthread_mutex_unlock(&compiling.lock);
    return nbi_fail(err, NB_NO_MEMORY, "cannot start a thread to compile the grammar: %s",
                    strerror(rc));
}

/* True when the job has had its seconds of a processor. With the lock held, and not done: its
 * thread is there. */
static bool used_its_time(const compile_job *j)
{
    struct timespec used;
    return j->started && clock_gettime(j->clock, &used) == 0 &&
           (uint64_t)used.tv_sec >= NBI_GRAMMAR_SECONDS;
}

/* Seconds count that the thread had a processor for: a machine that is busy with other things is no
 * reason to refuse a grammar. False: the time is over, and the job is no longer the caller's. */
static bool wait_for(compile_job *j)
{
    pthread_mutex_lock(&compiling.lock);
    for (int rounds = 0; rounds < BUSY_ROUNDS && !j->done; rounds++) {
        struct timespec deadline = nbi_timespec(nbi_now_ns() + COMPILE_NS);
        bool waiting = true;
        while (!j->done && waiting) waiting = wait_until(&deadline);
        if (!j->done && used_its_time(j)) break;
    }
    bool done = j->done;
    j->abandoned = !done;
    pthread_mutex_unlock(&compiling.lock);
    return done;
}

static nb_status make_job(compile_job **out, const nbi_grammar_compiler *c, nbi_grammar_kind kind,
                          const char *source, size_t n, nb_error *err)
{
    size_t n_words = words_for(c->n_tokens);
    compile_job *j = nbi_calloc(1, sizeof *j + 2 * n_words * sizeof *j->words);
    if (!j) return nbi_fail(err, NB_NO_MEMORY, "grammars: out of memory");
    j->llg = c->llg;
    j->n_words = (uint32_t)n_words;
    memcpy(j->words, c->text_ids, n_words * sizeof *j->words);
    nb_error why = {.status = NB_OK};
    nb_status st = nbi_grammar_prepare(&j->text, &j->type, kind, source, n, &why);
    if (st == NB_OK && !j->text.data) st = nbi_buf_add(&j->text, "", 0);
    if (st != NB_OK) {
        free_job(j);
        return why.status != NB_OK
                   ? nbi_fail(err, st, "%s", why.text)
                   : nbi_fail(err, st, "%s: %s", nbi_grammar_noun(kind), nb_status_text(st));
    }
    j->vocabulary = c->llg->clone_tokenizer(c->vocabulary);
    *out = j;
    return NB_OK;
}

/* Compiles without looking into the cache; *out is the caller's. *late: the time was over. */
static nb_status compile(nbi_llg_matcher **out, bool *late, const nbi_grammar_compiler *c,
                         nbi_grammar_kind kind, const char *source, size_t n, nb_error *err)
{
    compile_job *j = NULL;
    NB_TRY(make_job(&j, c, kind, source, n, err));
    nb_status st = start_job(j, err);
    if (st != NB_OK) {
        free_job(j);
        return st;
    }
    *late = !wait_for(j);
    if (*late)
        return nbi_fail(err, NB_TOO_LARGE, "%s is too complex: compiling it takes more than %d s",
                        nbi_grammar_noun(kind), NBI_GRAMMAR_SECONDS);
    if (j->llg->is_error(j->matcher)) {
        const char *message = j->llg->error(j->matcher);
        st = nbi_grammar_refuse(kind, message ? message : "no reason given", err);
    } else if (j->empty) {
        st = nbi_fail(err, NB_INVALID, "%s is not valid: no text can match it",
                      nbi_grammar_noun(kind));
    } else {
        *out = j->matcher;
        j->matcher = NULL;
    }
    free_job(j);
    return st;
}

/* ---------------------------------------------------------------- the cache */

/* With the lock held. */
static cache_entry *find(nbi_grammar_compiler *c, nbi_grammar_kind kind, const char *source,
                         size_t n)
{
    for (size_t i = 0; i < NBI_GRAMMAR_CACHED_MAX; i++) {
        cache_entry *e = &c->cache[i];
        if (e->source && e->kind == kind && e->n == n && memcmp(e->source, source, n) == 0) {
            e->used = ++c->clock;
            return e;
        }
    }
    return NULL;
}

/* With the lock held. Another caller compiles it now. */
static bool in_flight(const nbi_grammar_compiler *c, const flight *what)
{
    for (const flight *f = c->flights; f; f = f->next) {
        if (f->kind == what->kind && f->n == what->n && memcmp(f->source, what->source, f->n) == 0)
            return true;
    }
    return false;
}

static void land(nbi_grammar_compiler *c, const flight *what)
{
    pthread_mutex_lock(&c->cache_lock);
    flight **at = &c->flights;
    while (*at != what) at = &(*at)->next;
    *at = what->next;
    pthread_cond_broadcast(&c->landed);
    pthread_mutex_unlock(&c->cache_lock);
}

/* A time that ran out and a lack of memory say nothing about the source. */
static bool is_final(const nb_error *why, bool late)
{
    return !late && (why->status == NB_INVALID || why->status == NB_UNSUPPORTED ||
                     why->status == NB_TOO_LARGE);
}

/* Takes the matcher, NULL when `refusal` is the answer; what it displaces is freed. Without memory
 * it is not kept. */
static void keep(nbi_grammar_compiler *c, const flight *what, nbi_llg_matcher *matcher,
                 const nb_error *refusal)
{
    cache_entry fresh = {.kind = what->kind, .n = what->n, .matcher = matcher};
    fresh.source = nbi_malloc(what->n + 1);
    if (!matcher) fresh.refusal = nbi_malloc(sizeof *refusal);
    if (fresh.source) memcpy(fresh.source, what->source, what->n);
    if (fresh.refusal) *fresh.refusal = *refusal;
    if (fresh.source && (matcher || fresh.refusal)) {
        pthread_mutex_lock(&c->cache_lock);
        cache_entry *oldest = &c->cache[0];
        for (size_t i = 1; i < NBI_GRAMMAR_CACHED_MAX; i++) {
            if (c->cache[i].used < oldest->used) oldest = &c->cache[i];
        }
        cache_entry old = *oldest;
        fresh.used = ++c->clock;
        *oldest = fresh;
        fresh = old;
        pthread_mutex_unlock(&c->cache_lock);
    }
    free_entry(c, &fresh);
}

/* From the cache: a copy of the matcher, or the refusal. False when it is not there. */
static bool recall(nbi_llg_matcher **out, nb_status *status, nbi_grammar_compiler *c,
                   const flight *what, nb_error *err)
{
    const cache_entry *e = find(c, what->kind, what->source, what->n);
    if (!e) return false;
    *status = e->refusal ? nbi_fail(err, e->refusal->status, "%s", e->refusal->text) : NB_OK;
    if (!e->refusal) *out = c->llg->clone_matcher(e->matcher);
    return true;
}

static nb_status compile_and_keep(nbi_llg_matcher **out, nbi_grammar_compiler *c,
                                  const flight *what, nb_error *err)
{
    nbi_llg_matcher *prototype = NULL;
    nb_error why = {.status = NB_OK};
    bool late = false;
    nb_status st = compile(&prototype, &late, c, what->kind, what->source, what->n, &why);
    if (st == NB_OK) {
        *out = c->llg->clone_matcher(prototype);
    } else if (err) {
        *err = why;
    }
    if (st == NB_OK || is_final(&why, late)) keep(c, what, prototype, &why);
    return st;
}

static nb_status get_matcher(nbi_llg_matcher **out, nbi_grammar_compiler *c, nbi_grammar_kind kind,
                             const char *source, size_t n, nb_error *err)
{
    flight mine = {.kind = kind, .source = source, .n = n};
    nb_status st = NB_OK;
    struct timespec deadline = nbi_timespec(nbi_now_ns() + 2 * COMPILE_NS);
    pthread_mutex_lock(&c->cache_lock);
    bool known = recall(out, &st, c, &mine, err), waiting = true;
    while (!known && waiting && in_flight(c, &mine)) {
        waiting =
            pthread_cond_clockwait(&c->landed, &c->cache_lock, CLOCK_MONOTONIC, &deadline) == 0;
        known = recall(out, &st, c, &mine, err);
    }
    if (!known) {
        mine.next = c->flights;
        /* cppcheck-suppress autoVariables ; land() below takes it out */
        c->flights = &mine;
    }
    pthread_mutex_unlock(&c->cache_lock);
    if (known) return st;
    st = compile_and_keep(out, c, &mine, err);
    land(c, &mine);
    return st;
}

bool nbi_grammar_is_known(nbi_grammar_compiler *c, nbi_grammar_kind kind, const char *source,
                          size_t n)
{
    if (kind == NBI_GRAMMAR_JSON_OBJECT || n == 0) source = "", n = 0;
    pthread_mutex_lock(&c->cache_lock);
    bool known = find(c, kind, source, n);
    pthread_mutex_unlock(&c->cache_lock);
    return known;
}

/* ---------------------------------------------------------------- one request */

static nb_status check_options(const nbi_grammar_compiler *c, const nbi_grammar_options *o,
                               nb_error *err)
{
    if (o->after_think < -1 || o->after_think >= (int64_t)c->vocab ||
        o->n_banned > NBI_GRAMMAR_BANNED_MAX)
        return nbi_fail(err, NB_INVALID, "grammars: after_think %d or n_banned %u is out of range",
                        o->after_think, o->n_banned);
    for (uint32_t i = 0; i < o->n_banned; i++) {
        if (o->banned[i] < 0 || (uint32_t)o->banned[i] >= c->vocab ||
            o->banned[i] == o->after_think)
            return nbi_fail(err, NB_INVALID, "grammars: banned token %d cannot be banned",
                            o->banned[i]);
    }
    if ((o->may_think && (o->think_begin < 0 || (uint32_t)o->think_begin >= c->vocab ||
                          o->after_think < 0 || o->after_think == o->think_begin)) ||
        (o->may_call && (o->call_begin < 0 || (uint32_t)o->call_begin >= c->vocab)))
        return nbi_fail(err, NB_INVALID, "grammars: may_think %d %d or may_call %d is out of range",
                        o->think_begin, o->after_think, o->call_begin);
    return NB_OK;
}

nb_status nbi_grammar_compile(nbi_grammar **out, nbi_grammar_compiler *c, nbi_grammar_kind kind,
                              const char *source, size_t n, const nbi_grammar_options *options,
                              nb_error *err)
{
    static const nbi_grammar_options at_once = {.after_think = -1};
    if (!options) options = &at_once;
    if (kind == NBI_GRAMMAR_JSON_OBJECT) n = 0;
    if (n == 0) source = "";
    NB_TRY(check_options(c, options, err));
    NB_TRY(nbi_grammar_compiler_load(c, err));
    nbi_grammar *g = nbi_calloc(1, sizeof *g + words_for(c->n_tokens) * sizeof *g->mask);
    if (!g) return nbi_fail(err, NB_NO_MEMORY, "grammars: out of memory");
    atomic_init(&g->refs, 1);
    atomic_fetch_add(&c->refs, 1);
    g->compiler = c;
    g->llg = c->llg;
    g->options = *options;
    bool inside = options->after_think >= 0 && !options->may_think;
    g->now = (place){.phase = inside ? PHASE_THINKING : PHASE_TEXT, .thought = !options->may_think};
    nb_status st = get_matcher(&g->matcher, c, kind, source, n, err);
    if (st != NB_OK) {
        nbi_grammar_close(&g);
        return st;
    }
    *out = g;
    return NB_OK;
}

static void unref(nbi_grammar *g)
{
    if (atomic_fetch_sub(&g->refs, 1) != 1) return;
    if (g->matcher) g->llg->free_matcher(g->matcher);
    unref_compiler(g->compiler);
    nbi_free(g);
}

void nbi_grammar_close(nbi_grammar **grammar)
{
    if (*grammar) unref(*grammar);
    *grammar = NULL;
}

void nbi_grammar_retain(nbi_grammar *grammar)
{
    atomic_fetch_add(&grammar->refs, 1);
}

/* The answer ends here. */
static void fail(nbi_grammar *g, const char *what)
{
    const char *why = g->llg->error(g->matcher);
    size_t n = 0;
    if (!why) why = "nothing can follow the text so far";
    snprintf(g->failure, sizeof g->failure, "%s: %s", what, why);
    n = strcspn(g->failure, "\r\n");
    g->failure[n] = 0;
    g->now.phase = PHASE_ENDED;
    g->now.failed = true;
    atomic_store_explicit(&g->failed, true, memory_order_release);
}

static void allow_end(const nbi_grammar *g, uint32_t *bits, size_t n_words)
{
    for (uint32_t i = 0; i < g->compiler->n_eos; i++) {
        uint32_t id = (uint32_t)g->compiler->eos[i];
        if (id / 32 < n_words) set_bit(bits, id);
    }
}

static void mask_thinking(const nbi_grammar *g, uint32_t *bits, size_t n_words)
{
    size_t n = n_words < g->compiler->n_words ? n_words : g->compiler->n_words;
    memcpy(bits, g->compiler->free_ids, n * sizeof *bits);
    for (uint32_t i = 0; i < g->options.n_banned; i++) {
        uint32_t id = (uint32_t)g->options.banned[i];
        if (id / 32 < n) clear_bit(bits, id);
    }
}

/* What may stand in place of the grammar's first token. */
static bool allow_others(const nbi_grammar *g, uint32_t *bits, size_t n_words)
{
    const nbi_grammar_options *o = &g->options;
    bool think = !g->now.begun && !g->now.thought && (uint32_t)o->think_begin / 32 < n_words;
    bool call = !g->now.begun && o->may_call && (uint32_t)o->call_begin / 32 < n_words;
    if (think) set_bit(bits, (uint32_t)o->think_begin);
    if (call) set_bit(bits, (uint32_t)o->call_begin);
    return think || call;
}

/* Returns whether anything is allowed. */
static bool mask_text(nbi_grammar *g, uint32_t *bits, size_t n_words)
{
    const nbi_grammar_compiler *c = g->compiler;
    size_t n = words_for(c->n_tokens);
    uint32_t any = 0;
    if (c->llg->compute_mask(g->matcher, g->mask, n * sizeof *g->mask) != 0) return false;
    if (n > n_words) n = n_words;
    for (size_t i = 0; i < n; i++) any |= bits[i] = g->mask[i] & c->text_ids[i];
    if (allow_others(g, bits, n_words)) any = 1;
    if (!c->llg->is_accepting(g->matcher)) return any != 0;
    allow_end(g, bits, n_words);
    return true;
}

static void mask(void *user, uint32_t *bits, size_t n_words)
{
    nbi_grammar *g = user;
    switch (g->now.phase) {
    case PHASE_THINKING: mask_thinking(g, bits, n_words); return;
    case PHASE_FREE:
        mask_thinking(g, bits, n_words);
        allow_end(g, bits, n_words);
        return;
    case PHASE_ENDED: allow_end(g, bits, n_words); return;
    case PHASE_TEXT: break;
    }
    if (mask_text(g, bits, n_words)) return;
    fail(g, "the grammar cannot go on");
    allow_end(g, bits, n_words);
}

static bool is_end(const nbi_grammar *g, int32_t id)
{
    for (uint32_t i = 0; i < g->compiler->n_eos; i++) {
        if (g->compiler->eos[i] == id) return true;
    }
    return false;
}

static void accept_text(nbi_grammar *g, int32_t id)
{
    if (!g->now.begun && !g->now.thought && id == g->options.think_begin) {
        g->now.phase = PHASE_THINKING;
        g->now.thought = true;
    } else if (!g->now.begun && g->options.may_call && id == g->options.call_begin) {
        g->now.phase = PHASE_FREE;
    } else if (id < 0 || (uint32_t)id >= g->compiler->n_tokens ||
               g->llg->consume(g->matcher, (uint32_t)id) != 0) {
        fail(g, "the grammar was given a token it does not allow");
    } else {
        g->now.begun = g->now.consumed = true;
    }
}

static void accept(void *user, int32_t id)
{
    nbi_grammar *g = user;
    g->undo[g->n_accepted++ % NB_GRAMMAR_ROLLBACK_MAX] = g->now;
    g->now.consumed = false;
    if (g->now.phase == PHASE_ENDED) return;
    if (is_end(g, id)) {
        g->now.phase = PHASE_ENDED;
    } else if (g->now.phase == PHASE_THINKING) {
        if (id == g->options.after_think) g->now.phase = PHASE_TEXT;
        if (g->options.may_call && id == g->options.call_begin) g->now.phase = PHASE_FREE;
    } else if (g->now.phase == PHASE_TEXT) {
        accept_text(g, id);
    }
}

static void rollback(void *user, uint32_t n)
{
    nbi_grammar *g = user;
    size_t n_consumed = 0;
    NB_ASSERT(n <= NB_GRAMMAR_ROLLBACK_MAX && n <= g->n_accepted);
    for (; n; n--) {
        n_consumed += g->now.consumed;
        g->now = g->undo[--g->n_accepted % NB_GRAMMAR_ROLLBACK_MAX];
    }
    atomic_store_explicit(&g->failed, g->now.failed, memory_order_release);
    if (n_consumed && g->llg->rollback(g->matcher, n_consumed) != 0)
        fail(g, "the grammar cannot go back");
}

static void release(void *user)
{
    unref(user);
}

nb_grammar nbi_grammar_hooks(nbi_grammar *grammar)
{
    return (nb_grammar){
        .user = grammar, .mask = mask, .accept = accept, .rollback = rollback, .release = release};
}

bool nbi_grammar_complete(nbi_grammar *g)
{
    if (g->now.failed || g->now.phase == PHASE_THINKING) return false;
    return g->now.phase == PHASE_FREE || g->llg->is_accepting(g->matcher);
}

const char *nbi_grammar_failure(const nbi_grammar *g)
{
    return atomic_load_explicit(&g->failed, memory_order_acquire) ? g->failure : NULL;
}
