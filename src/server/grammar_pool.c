/* Threads that compile grammars (see grammar_pool.h). Called by job_grammar.c and served.c. */
#include "server/grammar_pool.h"

#include <pthread.h>
#include <string.h>

#include "base/mem.h"

/* As many as may compile at once: each of these threads only waits for its compilation. */
#define THREADS_MAX NBI_GRAMMAR_COMPILES_MAX

struct nbi_order {
    nbi_grammar_pool *pool;
    nbi_order *next;
    nbi_grammar_kind kind;
    nbi_grammar_options options;
    void (*notify)(void *user);
    void *user;
    bool taken;             /* by a thread; this and what follows under the pool's lock */
    bool done, closed;      /* closed and taken: the thread frees it */
    nb_error err;           /* of what it came to */
    uint32_t n_grammars;    /* wanted */
    nbi_grammar **grammars; /* [n_grammars], behind the struct */
    char *source;           /* [n_source], behind them */
    size_t n_source;
};

struct nbi_grammar_pool {
    nbi_grammar_compiler *compiler;
    pthread_mutex_t lock;
    pthread_cond_t more; /* an order, or the end */
    nbi_order *first, **last;
    uint32_t n_waiting, n_idle, n_threads;
    bool ending;
    pthread_t threads[THREADS_MAX];
};

static void free_order(nbi_order *o)
{
    for (uint32_t i = 0; i < o->n_grammars; i++) nbi_grammar_close(&o->grammars[i]);
    nbi_free(o);
}

/* ---------------------------------------------------------------- threads */

static void compile(nbi_order *o)
{
    nb_status status = NB_OK;
    for (uint32_t i = 0; i < o->n_grammars && status == NB_OK; i++)
        status = nbi_grammar_compile(&o->grammars[i], o->pool->compiler, o->kind, o->source,
                                     o->n_source, &o->options, &o->err);
    o->err.status = status;
}

/* With the lock held. */
static void finish(nbi_order *o)
{
    o->done = true;
    if (!o->closed) {
        o->notify(o->user);
        return;
    }
    pthread_mutex_unlock(&o->pool->lock);
    nbi_grammar_pool *pool = o->pool;
    free_order(o);
    pthread_mutex_lock(&pool->lock);
}

static void *run(void *arg)
{
    nbi_grammar_pool *p = arg;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        p->n_idle++;
        while (!p->first && !p->ending) pthread_cond_wait(&p->more, &p->lock);
        p->n_idle--;
        if (!p->first) break;
        nbi_order *o = p->first;
        p->first = o->next;
        if (!p->first) p->last = &p->first;
        p->n_waiting--;
        o->taken = true;
        pthread_mutex_unlock(&p->lock);
        compile(o);
        pthread_mutex_lock(&p->lock);
        finish(o);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* With the lock held. One more where none is free. */
static void start_thread(nbi_grammar_pool *p)
{
    if (p->n_idle >= p->n_waiting || p->n_threads == THREADS_MAX) return;
    if (pthread_create(&p->threads[p->n_threads], NULL, run, p) == 0) p->n_threads++;
}

/* ---------------------------------------------------------------- pools */

nb_status nbi_grammar_pool_open(nbi_grammar_pool **out, nbi_grammar_compiler *compiler,
                                nb_error *err)
{
    nbi_grammar_pool *p = nbi_calloc(1, sizeof *p);
    if (!p) return nbi_fail(err, NB_NO_MEMORY, "grammars: out of memory");
    p->compiler = compiler;
    p->last = &p->first;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->more, NULL);
    *out = p;
    return NB_OK;
}

void nbi_grammar_pool_close(nbi_grammar_pool **pool)
{
    nbi_grammar_pool *p = *pool;
    if (!p) return;
    pthread_mutex_lock(&p->lock);
    p->ending = true;
    pthread_cond_broadcast(&p->more);
    pthread_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < p->n_threads; i++) pthread_join(p->threads[i], NULL);
    pthread_cond_destroy(&p->more);
    pthread_mutex_destroy(&p->lock);
    nbi_free(p);
    *pool = NULL;
}

/* ---------------------------------------------------------------- orders */

static nb_status enter(nbi_grammar_pool *p, nbi_order *o, nb_error *err)
{
    nb_status status = NB_OK;
    pthread_mutex_lock(&p->lock);
    if (p->n_waiting == NBI_ORDERS_MAX) {
        status = nbi_fail(err, NB_BUSY, "%d grammars wait to be compiled, try again later",
                          NBI_ORDERS_MAX);
    } else {
        *p->last = o;
        p->last = &o->next;
        p->n_waiting++;
        start_thread(p);
        if (!p->n_threads) { /* nobody will come */
            p->first = NULL;
            p->last = &p->first;
            p->n_waiting = 0;
            status = nbi_fail(err, NB_NO_MEMORY, "cannot start a thread to compile the grammar");
        }
        pthread_cond_signal(&p->more);
    }
    pthread_mutex_unlock(&p->lock);
    return status;
}

nb_status nbi_order_give(nbi_order **out, nbi_grammar_pool *pool, nbi_grammar_kind kind,
                         const char *source, size_t n, const nbi_grammar_options *options,
                         uint32_t n_grammars, void (*notify)(void *user), void *user, nb_error *err)
{
    nbi_order *o = nbi_calloc(1, sizeof *o + n_grammars * sizeof *o->grammars + n + 1);
    if (!o) return nbi_fail(err, NB_NO_MEMORY, "grammars: out of memory");
    o->pool = pool;
    o->kind = kind;
    o->options = *options;
    o->notify = notify;
    o->user = user;
    o->n_grammars = n_grammars;
    o->grammars = (nbi_grammar **)(o + 1);
    o->source = (char *)(o->grammars + n_grammars);
    o->n_source = n;
    if (n) memcpy(o->source, source, n);
    nb_status status = enter(pool, o, err);
    if (status != NB_OK) {
        free_order(o);
        return status;
    }
    *out = o;
    return NB_OK;
}

bool nbi_order_is_done(nbi_order *o)
{
    pthread_mutex_lock(&o->pool->lock);
    bool done = o->done;
    pthread_mutex_unlock(&o->pool->lock);
    return done;
}

nb_status nbi_order_take(nbi_order *o, nbi_grammar **grammars, nb_error *err)
{
    if (o->err.status != NB_OK) {
        if (err) *err = o->err;
        return o->err.status;
    }
    memcpy(grammars, o->grammars, o->n_grammars * sizeof *grammars);
    o->n_grammars = 0;
    return NB_OK;
}

/* With the lock held. */
static void unlink_order(nbi_grammar_pool *p, nbi_order *o)
{
    nbi_order **at = &p->first;
    while (*at != o) at = &(*at)->next;
    *at = o->next;
    if (!*at) p->last = at;
    p->n_waiting--;
}

void nbi_order_close(nbi_order **order)
{
    nbi_order *o = *order;
    if (!o) return;
    nbi_grammar_pool *p = o->pool;
    pthread_mutex_lock(&p->lock);
    bool mine = !o->taken || o->done;
    if (!o->taken) unlink_order(p, o);
    o->closed = true;
    pthread_mutex_unlock(&p->lock);
    if (mine) free_order(o);
    *order = NULL;
}
