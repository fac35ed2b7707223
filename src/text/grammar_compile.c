/* Compiling grammars: what is kept, the threads, and the orders of their callers (see grammar.h).
 *
 * A source is compiled once for all who have ordered it (a work), in a thread with a large stack
 * because the library recurses. A compiled grammar is a matcher of the library in its first state;
 * every answer gets a deep copy, which shares nothing that changes. The library cannot be stopped:
 * a work that has had its time is given up, its orders are refused, and its thread is one of the
 * few until the library's own bounds end it.
 *
 * One lock guards all of it; the library and the heap of matchers are used without it. */
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "text/grammar_impl.h"
#include "text/grammar_source.h"

#define STACK_BYTES     ((size_t)64 << 20) /* of address space */
#define BUSY_ROUNDS     5u                 /* times its time at most, on a busy machine */
#define LOOK_NS         200000000u
#define LEXER_FUEL      1000000u /* 20 ms of building expressions */
#define GRAMMAR_SYMBOLS 200000u
#define COMPILE_NICE    5

struct nbi_grammar_order {
    nbi_grammar_compiler *compiler;
    nbi_grammar_work *work; /* whose list it is in; NULL: done, or a thread makes its grammars */
    nbi_grammar_order *next;
    nbi_grammar_options options;
    void (*notify)(void *user); /* or NULL */
    void *user;
    bool done, closed; /* closed and not done: the thread frees it */
    nb_error err;      /* of what it came to */
    uint32_t n_grammars;
    nbi_grammar *grammars[]; /* [n_grammars] */
};

struct nbi_grammar_work {
    nbi_grammar_work *next;
    nbi_grammar_order *orders;
    nbi_grammar_kind kind;
    bool timed, late;
    uint64_t since_ns; /* waits: when it was ordered; timed: when the compilation began */
    clockid_t clock;   /* processor time of its thread; timed: */
    uint64_t cpu_ns;   /* and when the compilation began */
    size_t n;
    char source[]; /* [n] */
};

/* What a work came to. */
typedef struct outcome {
    nbi_llg_matcher *matcher;
    nbi_grammar_own own;
    nb_error why; /* status NB_OK: matcher is there */
    bool keep;    /* says something about the source, and is not kept yet */
} outcome;

/* ---------------------------------------------------------------- what is kept */

void nbi_grammar_free_entry(const nbi_grammar_compiler *c, nbi_grammar_entry *e)
{
    if (e->matcher) c->llg->free_matcher(e->matcher);
    nbi_free(e->refusal);
    nbi_free(e->source);
}

/* With the lock held. */
static nbi_grammar_entry *find(nbi_grammar_compiler *c, nbi_grammar_kind kind, const char *source,
                               size_t n)
{
    for (size_t i = 0; i < NBI_GRAMMAR_CACHED_MAX; i++) {
        nbi_grammar_entry *e = &c->cache[i];
        if (e->source && e->kind == kind && e->n == n && memcmp(e->source, source, n) == 0) {
            e->used = ++c->clock;
            return e;
        }
    }
    return NULL;
}

/* With the lock held. Returns what is to be freed: what the outcome displaces, or itself. */
static nbi_grammar_entry keep(nbi_grammar_compiler *c, const nbi_grammar_work *w,
                              const outcome *result)
{
    nbi_grammar_entry fresh = {
        .kind = w->kind, .n = w->n, .matcher = result->matcher, .own = result->own};
    if (!result->keep || w->late) return fresh;
    fresh.source = nbi_malloc(w->n + 1);
    if (!fresh.matcher) fresh.refusal = nbi_malloc(sizeof *fresh.refusal);
    if (!fresh.source || (!fresh.matcher && !fresh.refusal)) return fresh;
    memcpy(fresh.source, w->source, w->n);
    if (fresh.refusal) *fresh.refusal = result->why;
    fresh.used = ++c->clock;
    nbi_grammar_entry *oldest = &c->cache[0];
    for (size_t i = 1; i < NBI_GRAMMAR_CACHED_MAX; i++) {
        if (c->cache[i].used < oldest->used) oldest = &c->cache[i];
    }
    nbi_grammar_entry old = *oldest;
    *oldest = fresh;
    return old;
}

/* JSON_OBJECT has no source, others may be empty. */
static const char *source_of(nbi_grammar_kind kind, const char *source, size_t *n)
{
    if (kind == NBI_GRAMMAR_JSON_OBJECT) *n = 0;
    return *n ? source : "";
}

/* ---------------------------------------------------------------- one compilation */

static uint64_t cpu_ns(clockid_t clock)
{
    struct timespec used;
    if (clock_gettime(clock, &used) != 0) return 0;
    return (uint64_t)used.tv_sec * 1000000000u + (uint64_t)used.tv_nsec;
}

static void set_timed(nbi_grammar_compiler *c, nbi_grammar_work *w, bool timed)
{
    pthread_mutex_lock(&c->lock);
    w->timed = timed && pthread_getcpuclockid(pthread_self(), &w->clock) == 0;
    w->since_ns = nbi_now_ns();
    w->cpu_ns = w->timed ? cpu_ns(w->clock) : 0;
    pthread_mutex_unlock(&c->lock);
}

/* The first mask: builds what every request would build again, and finds grammars that nothing
 * matches. */
static nb_status first_mask(bool *empty, const nbi_grammar_compiler *c, nbi_llg_matcher *matcher,
                            const nbi_grammar_own *own, nb_error *err)
{
    size_t n = nbi_grammar_words(c->n_tokens);
    uint32_t any = 0, *mask = nbi_calloc(n, sizeof *mask);
    if (!mask) return nbi_fail(err, NB_NO_MEMORY, "grammars: out of memory");
    if (c->llg->compute_mask(matcher, mask, n * sizeof *mask) == 0) {
        for (size_t i = 0; i < n; i++) any |= mask[i] & c->text_ids[i];
        for (uint32_t i = 0; i < own->n; i++)
            any |= mask[own->ids[i] / 32] & 1u << own->ids[i] % 32;
        *empty = !any && !c->llg->is_accepting(matcher);
    }
    nbi_free(mask);
    return NB_OK;
}

static nb_status build(nbi_llg_matcher **out, const nbi_grammar_compiler *c,
                       const nbi_grammar_work *w, const nbi_grammar_own *own, const char *type,
                       const char *text, nb_error *err)
{
    nbi_llg_init init = {.tokenizer = c->vocabulary,
                         .limits = {.initial_lexer_fuel = LEXER_FUEL,
                                    .step_lexer_fuel = NBI_GRAMMAR_STEP_FUEL,
                                    .step_max_items = NBI_GRAMMAR_STEP_ITEMS,
                                    .max_items_in_row = 2000,
                                    .max_lexer_states = NBI_GRAMMAR_LEXER_STATES,
                                    .max_grammar_size = GRAMMAR_SYMBOLS,
                                    .precompute_large_lexemes = true}};
    nb_status st = NB_OK;
    bool empty = false;
    nbi_llg_matcher *matcher = c->llg->new_matcher(&init, type, text);
    if (!c->llg->is_error(matcher)) st = first_mask(&empty, c, matcher, own, err);
    if (st == NB_OK && c->llg->is_error(matcher)) {
        const char *message = c->llg->error(matcher);
        st = nbi_grammar_refuse(w->kind, message ? message : "no reason given", err);
    } else if (empty) {
        st = nbi_fail(err, NB_INVALID, "%s is not valid: no text can match it",
                      nbi_grammar_noun(w->kind));
    }
    if (st == NB_OK) {
        *out = matcher;
    } else {
        c->llg->free_matcher(matcher);
    }
    return st;
}

static nb_status compile(nbi_llg_matcher **out, nbi_grammar_own *own, nbi_grammar_compiler *c,
                         nbi_grammar_work *w, nb_error *err)
{
    nbi_grammar_tokens tokens = {
        .tokenizer = c->tokenizer, .eos = c->eos, .n_eos = c->n_eos, .n_tokens = c->n_tokens};
    const char *type = NULL;
    nbi_buf text = {0};
    nb_error why = {.status = NB_OK};
    set_timed(c, w, true);
    nb_status st = nbi_grammar_prepare(&text, &type, w->kind, w->source, w->n, &tokens, &why);
    own->n = tokens.n_own;
    memcpy(own->ids, tokens.own, sizeof own->ids);
    if (st == NB_OK && !text.data) st = nbi_buf_add(&text, "", 0);
    if (st == NB_OK) st = build(out, c, w, own, type, text.data, &why);
    set_timed(c, w, false);
    nbi_buf_free(&text);
    if (st == NB_OK) return NB_OK;
    if (why.status != NB_OK) return nbi_fail(err, st, "%s", why.text);
    return nbi_fail(err, st, "%s: %s", nbi_grammar_noun(w->kind), nb_status_text(st));
}

/* From what is kept, or compiled. */
static outcome get(nbi_grammar_compiler *c, nbi_grammar_work *w)
{
    outcome r = {.why = {.status = NB_OK}};
    nb_status st = nbi_grammar_compiler_load(c, &r.why);
    if (st != NB_OK) return r;
    pthread_mutex_lock(&c->lock);
    const nbi_grammar_entry *e = find(c, w->kind, w->source, w->n);
    if (e && e->refusal) r.why = *e->refusal;
    if (e && e->matcher) r.matcher = c->llg->clone_matcher(e->matcher);
    if (e) r.own = e->own;
    pthread_mutex_unlock(&c->lock);
    if (e) return r;
    st = compile(&r.matcher, &r.own, c, w, &r.why);
    r.keep = st == NB_OK || st == NB_INVALID || st == NB_UNSUPPORTED || st == NB_TOO_LARGE;
    return r;
}

/* ---------------------------------------------------------------- orders that are done */

static void free_order(nbi_grammar_order *o)
{
    for (uint32_t i = 0; i < o->n_grammars; i++) nbi_grammar_close(&o->grammars[i]);
    nbi_free(o);
}

/* With the lock held. The order is in no list. */
static void finish(nbi_grammar_compiler *c, nbi_grammar_order *o)
{
    o->done = true;
    c->n_orders--;
    if (!o->closed) {
        if (o->notify) o->notify(o->user);
        pthread_cond_broadcast(&c->changed);
        return;
    }
    pthread_mutex_unlock(&c->lock);
    free_order(o);
    pthread_mutex_lock(&c->lock);
}

/* With the lock held. */
static nbi_grammar_order *take_order(nbi_grammar_work *w)
{
    nbi_grammar_order *o = w->orders;
    w->orders = o->next;
    o->work = NULL;
    return o;
}

/* With the lock held, which is left for the copies. */
static void deliver(nbi_grammar_compiler *c, nbi_grammar_work *w, const outcome *result)
{
    while (w->orders) {
        nbi_grammar_order *o = take_order(w);
        pthread_mutex_unlock(&c->lock);
        o->err = result->why;
        for (uint32_t i = 0; i < o->n_grammars && o->err.status == NB_OK; i++)
            o->err.status = nbi_grammar_create(&o->grammars[i], c, &o->options, result->matcher,
                                               &result->own, &o->err);
        pthread_mutex_lock(&c->lock);
        finish(c, o);
    }
}

/* With the lock held. Nobody will come, or not in time. */
static void refuse(nbi_grammar_compiler *c, nbi_grammar_work *w, const nb_error *why)
{
    while (w->orders) {
        nbi_grammar_order *o = take_order(w);
        o->err = *why;
        finish(c, o);
    }
}

/* ---------------------------------------------------------------- works and time */

/* With the lock held. */
static void unlink_waiting(nbi_grammar_compiler *c, nbi_grammar_work *w)
{
    nbi_grammar_work **at = &c->first;
    while (*at && *at != w) at = &(*at)->next;
    NB_ASSERT(*at);
    *at = w->next;
    if (!*at) c->last = at;
    c->n_waiting--;
}

/* Seconds count that the thread had a processor for: a machine that is busy with other things is no
 * reason to refuse a grammar. */
static bool had_its_time(const nbi_grammar_compiler *c, const nbi_grammar_work *w, uint64_t now)
{
    uint64_t waited = now - w->since_ns;
    if (waited >= BUSY_ROUNDS * c->time_ns) return true;
    return waited >= c->time_ns && cpu_ns(w->clock) - w->cpu_ns >= c->time_ns;
}

/* With the lock held. */
static void look_at_clock(nbi_grammar_compiler *c)
{
    nb_error why = {.status = NB_OK};
    uint64_t now = nbi_now_ns();
    for (nbi_grammar_work *w = c->running; w; w = w->next) {
        if (!w->timed || w->late || !had_its_time(c, w, now)) continue;
        w->late = true;
        c->n_late++;
        nbi_fail(&why, NB_TOO_LARGE, "%s is too complex: compiling it takes more than %d s",
                 nbi_grammar_noun(w->kind), NBI_GRAMMAR_SECONDS);
        refuse(c, w, &why);
        pthread_cond_broadcast(&c->changed);
    }
    while (c->first && now - c->first->since_ns >= BUSY_ROUNDS * c->time_ns) {
        nbi_grammar_work *w = c->first;
        unlink_waiting(c, w);
        nbi_fail(&why, NB_BUSY, "too many grammars are being compiled, try again later");
        refuse(c, w, &why);
        nbi_free(w);
    }
}

void nbi_grammar_look_at_clock(nbi_grammar_compiler *c)
{
    pthread_mutex_lock(&c->lock);
    look_at_clock(c);
    pthread_mutex_unlock(&c->lock);
}

/* With the lock held, which is left meanwhile. The caller looks again. */
static void wait_for_change(nbi_grammar_compiler *c)
{
    struct timespec soon = nbi_timespec(nbi_now_ns() + LOOK_NS);
    pthread_cond_clockwait(&c->changed, &c->lock, CLOCK_MONOTONIC, &soon);
    look_at_clock(c);
}

/* ---------------------------------------------------------------- threads */

/* With the lock held. */
static nbi_grammar_work *take_work(nbi_grammar_compiler *c)
{
    nbi_grammar_work *w = c->first;
    unlink_waiting(c, w);
    w->next = c->running;
    c->running = w;
    return w;
}

/* With the lock held. */
static void end_work(nbi_grammar_compiler *c, nbi_grammar_work *w, const outcome *result)
{
    nbi_grammar_work **at = &c->running;
    while (*at != w) at = &(*at)->next;
    *at = w->next;
    c->n_late -= w->late;
    nbi_grammar_entry old = keep(c, w, result);
    pthread_mutex_unlock(&c->lock);
    nbi_grammar_free_entry(c, &old);
    nbi_free(w);
    pthread_mutex_lock(&c->lock);
}

static void *run(void *arg)
{
    nbi_grammar_compiler *c = arg;
    /* Streams that run go first. On Linux a priority is the thread's. */
    (void)setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), COMPILE_NICE);
    pthread_mutex_lock(&c->lock);
    for (;;) {
        c->n_idle++;
        while (!c->first && !c->ending) pthread_cond_wait(&c->more, &c->lock);
        c->n_idle--;
        if (!c->first) break;
        nbi_grammar_work *w = take_work(c);
        pthread_mutex_unlock(&c->lock);
        outcome result = get(c, w);
        pthread_mutex_lock(&c->lock);
        deliver(c, w, &result);
        end_work(c, w, &result);
    }
    c->n_threads--;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    nbi_grammar_compiler_release(c);
    return NULL;
}

/* With the lock held. One more where none is free. */
static void start_thread(nbi_grammar_compiler *c)
{
    pthread_attr_t attr;
    pthread_t thread;
    if (c->n_idle >= c->n_waiting || c->n_threads == NBI_GRAMMAR_COMPILES_MAX ||
        pthread_attr_init(&attr) != 0)
        return;
    (void)pthread_attr_setstacksize(&attr, STACK_BYTES);
    (void)pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    atomic_fetch_add(&c->refs, 1);
    if (pthread_create(&thread, &attr, run, c) == 0) {
        pthread_setname_np(thread, "grammar");
        c->n_threads++;
    } else {
        atomic_fetch_sub(&c->refs, 1);
    }
    pthread_attr_destroy(&attr);
}

void nbi_grammar_end_threads(nbi_grammar_compiler *c)
{
    pthread_mutex_lock(&c->lock);
    c->ending = true;
    pthread_cond_broadcast(&c->more);
    while (c->n_threads > c->n_late) wait_for_change(c);
    pthread_mutex_unlock(&c->lock);
}

/* ---------------------------------------------------------------- orders */

/* With the lock held. The work that the order can share. */
static nbi_grammar_work *find_work(const nbi_grammar_compiler *c, nbi_grammar_kind kind,
                                   const char *source, size_t n)
{
    for (int list = 0; list < 2; list++) {
        for (nbi_grammar_work *w = list ? c->running : c->first; w; w = w->next) {
            if (!w->late && w->kind == kind && w->n == n && memcmp(w->source, source, n) == 0)
                return w;
        }
    }
    return NULL;
}

/* With the lock held; NULL without memory, or where no thread can be had. */
static nbi_grammar_work *add_work(nbi_grammar_compiler *c, nbi_grammar_kind kind,
                                  const char *source, size_t n)
{
    nbi_grammar_work *w = nbi_calloc(1, sizeof *w + n + 1);
    if (!w) return NULL;
    w->kind = kind;
    w->since_ns = nbi_now_ns();
    w->n = n;
    memcpy(w->source, source, n);
    *c->last = w;
    c->last = &w->next;
    c->n_waiting++;
    start_thread(c);
    if (c->n_threads) {
        pthread_cond_signal(&c->more);
        return w;
    }
    unlink_waiting(c, w);
    nbi_free(w);
    return NULL;
}

static nb_status enter(nbi_grammar_order *o, nbi_grammar_kind kind, const char *source, size_t n,
                       nb_error *err)
{
    nbi_grammar_compiler *c = o->compiler;
    if (c->n_orders == NBI_GRAMMAR_ORDERS_MAX)
        return nbi_fail(err, NB_BUSY, "%d grammars wait to be compiled, try again later",
                        NBI_GRAMMAR_ORDERS_MAX);
    nbi_grammar_work *w = find_work(c, kind, source, n);
    if (!w) w = add_work(c, kind, source, n);
    if (!w) return nbi_fail(err, NB_NO_MEMORY, "grammars: no memory or no thread");
    o->work = w;
    o->next = w->orders;
    w->orders = o;
    c->n_orders++;
    return NB_OK;
}

nb_status nbi_grammar_order_open(nbi_grammar_order **out, nbi_grammar_compiler *c,
                                 nbi_grammar_kind kind, const char *source, size_t n,
                                 const nbi_grammar_options *options, uint32_t n_grammars,
                                 void (*notify)(void *user), void *user, nb_error *err)
{
    source = source_of(kind, source, &n);
    NB_TRY(nbi_grammar_check_options(c, options, err));
    NB_TRY(nbi_grammar_check_size(kind, n, err));
    nbi_grammar_order *o = nbi_calloc(1, sizeof *o + n_grammars * sizeof *o->grammars);
    if (!o) return nbi_fail(err, NB_NO_MEMORY, "grammars: out of memory");
    o->compiler = c;
    o->options = *options;
    o->notify = notify;
    o->user = user;
    o->n_grammars = n_grammars;
    pthread_mutex_lock(&c->lock);
    nb_status st = enter(o, kind, source, n, err);
    pthread_mutex_unlock(&c->lock);
    if (st == NB_OK) {
        *out = o;
    } else {
        free_order(o);
    }
    return st;
}

bool nbi_grammar_order_is_done(nbi_grammar_order *o)
{
    pthread_mutex_lock(&o->compiler->lock);
    bool done = o->done;
    pthread_mutex_unlock(&o->compiler->lock);
    return done;
}

nb_status nbi_grammar_order_take(nbi_grammar_order *o, nbi_grammar **grammars, nb_error *err)
{
    if (o->err.status != NB_OK) {
        if (err) *err = o->err;
        return o->err.status;
    }
    memcpy(grammars, o->grammars, o->n_grammars * sizeof *grammars);
    o->n_grammars = 0;
    return NB_OK;
}

/* With the lock held. A work that nobody waits for is not begun. */
static void leave(nbi_grammar_compiler *c, nbi_grammar_order *o)
{
    nbi_grammar_work *w = o->work;
    nbi_grammar_order **at = &w->orders;
    while (*at != o) at = &(*at)->next;
    *at = o->next;
    c->n_orders--;
    nbi_grammar_work *waits = c->first;
    while (waits && waits != w) waits = waits->next;
    if (w->orders || !waits) return;
    unlink_waiting(c, w);
    nbi_free(w);
}

void nbi_grammar_order_close(nbi_grammar_order **order)
{
    nbi_grammar_order *o = *order;
    if (!o) return;
    nbi_grammar_compiler *c = o->compiler;
    pthread_mutex_lock(&c->lock);
    bool mine = o->work || o->done;
    if (o->work) leave(c, o);
    o->closed = true;
    pthread_mutex_unlock(&c->lock);
    if (mine) free_order(o);
    *order = NULL;
}

/* ---------------------------------------------------------------- at once */

nb_status nbi_grammar_recall(nbi_grammar **out, bool *known, nbi_grammar_compiler *c,
                             nbi_grammar_kind kind, const char *source, size_t n,
                             const nbi_grammar_options *options, nb_error *err)
{
    nb_status st = NB_OK;
    source = source_of(kind, source, &n);
    *known = false;
    NB_TRY(nbi_grammar_check_options(c, options, err));
    pthread_mutex_lock(&c->lock);
    const nbi_grammar_entry *e = find(c, kind, source, n);
    *known = e;
    if (e && e->refusal) st = nbi_fail(err, e->refusal->status, "%s", e->refusal->text);
    if (e && !e->refusal) st = nbi_grammar_create(out, c, options, e->matcher, &e->own, err);
    pthread_mutex_unlock(&c->lock);
    return st;
}

nb_status nbi_grammar_compile(nbi_grammar **out, nbi_grammar_compiler *c, nbi_grammar_kind kind,
                              const char *source, size_t n, const nbi_grammar_options *options,
                              nb_error *err)
{
    static const nbi_grammar_options at_once = {.after_think = -1};
    nbi_grammar_order *o = NULL;
    bool known;
    if (!options) options = &at_once;
    nb_status st = nbi_grammar_recall(out, &known, c, kind, source, n, options, err);
    if (known || st != NB_OK) return st;
    NB_TRY(nbi_grammar_order_open(&o, c, kind, source, n, options, 1, NULL, NULL, err));
    pthread_mutex_lock(&c->lock);
    while (!o->done) wait_for_change(c);
    pthread_mutex_unlock(&c->lock);
    st = nbi_grammar_order_take(o, out, err);
    nbi_grammar_order_close(&o);
    return st;
}
