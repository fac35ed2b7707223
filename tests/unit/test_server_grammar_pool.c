/* server/grammar_pool.h: orders of many threads, some closed before they are done. */
#include "cmocka_all.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "server/grammar_pool.h"

#define N_THREADS 6
#define N_ORDERS  40

static nbi_tokenizer *tokenizer;
static nbi_grammar_compiler *compiler;

static int set_up(void **state)
{
    (void)state;
    nb_error err = {.status = NB_OK};
    if (nbi_tokenizer_open(&tokenizer, NBI_TEST_SOURCE_DIR "/models/glm5-tiny", &err) != NB_OK)
        fail_msg("%s", err.text);
    static int32_t eos;
    eos = nbi_token_find(tokenizer, "<|user|>", 8);
    nbi_grammar_setup setup = {
        .tokenizer = tokenizer, .eos = &eos, .n_eos = 1, .folder = NBI_TEST_GRAMMAR_FOLDER};
    return nbi_grammar_compiler_open(&compiler, &setup, NULL);
}

static int tear_down(void **state)
{
    (void)state;
    nbi_grammar_compiler_close(&compiler);
    nbi_tokenizer_close(&tokenizer);
    return 0;
}

/* ---------------------------------------------------------------- */

typedef struct waiter {
    nbi_grammar_pool *pool;
    uint32_t k;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    unsigned n_notified;
    const char *wrong; /* what was not as it should be */
} waiter;

static void on_done(void *user)
{
    waiter *w = user;
    pthread_mutex_lock(&w->lock);
    w->n_notified++;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

static void check_result(waiter *w, nbi_order *order, bool valid)
{
    nbi_grammar *grammars[3] = {0};
    nb_error err = {.status = NB_OK};
    nb_status st = nbi_order_take(order, grammars, &err);
    if (valid ? st != NB_OK : st != NB_INVALID || !strstr(err.text, "unclosed"))
        w->wrong = "status";
    for (int i = 0; i < 3; i++) {
        if (valid != (grammars[i] != NULL)) w->wrong = "grammars";
        nbi_grammar_close(&grammars[i]);
    }
}

static void one_order(waiter *w, unsigned i)
{
    static const nbi_grammar_options at_once = {.after_think = -1};
    char source[64];
    bool valid = i % 5 != 0;
    nbi_order *order = NULL;
    snprintf(source, sizeof source, valid ? "a{%u}b" : "(a{%u}", i % 7 * N_THREADS + w->k + 1);
    pthread_mutex_lock(&w->lock);
    w->n_notified = 0;
    pthread_mutex_unlock(&w->lock);
    if (nbi_order_give(&order, w->pool, NBI_GRAMMAR_REGEX, source, strlen(source), &at_once, 3,
                       on_done, w, NULL) != NB_OK) {
        w->wrong = "refused";
        return;
    }
    if (i % 3 == 0) { /* at some moment of its life */
        struct timespec pause = {.tv_nsec = (long)(i % 4) * 300000};
        nanosleep(&pause, NULL);
        nbi_order_close(&order);
        return;
    }
    pthread_mutex_lock(&w->lock);
    while (!w->n_notified) pthread_cond_wait(&w->changed, &w->lock);
    if (w->n_notified != 1) w->wrong = "notified more than once";
    pthread_mutex_unlock(&w->lock);
    if (!nbi_order_is_done(order)) w->wrong = "notified before it was done";
    check_result(w, order, valid);
    nbi_order_close(&order);
    if (order) w->wrong = "close does not clear";
}

static void *many_orders(void *user)
{
    for (unsigned i = 0; i < N_ORDERS; i++) one_order(user, i);
    return NULL;
}

static void orders_of_many_threads(void **state)
{
    (void)state;
    nbi_grammar_pool *pool = NULL;
    waiter waiters[N_THREADS];
    pthread_t threads[N_THREADS];
    assert_int_equal(nbi_grammar_pool_open(&pool, compiler, NULL), NB_OK);
    for (uint32_t k = 0; k < N_THREADS; k++) {
        waiters[k] = (waiter){.pool = pool, .k = k};
        pthread_mutex_init(&waiters[k].lock, NULL);
        pthread_cond_init(&waiters[k].changed, NULL);
        assert_int_equal(pthread_create(&threads[k], NULL, many_orders, &waiters[k]), 0);
    }
    for (uint32_t k = 0; k < N_THREADS; k++) {
        pthread_join(threads[k], NULL);
        if (waiters[k].wrong) fail_msg("thread %u: %s", k, waiters[k].wrong);
        pthread_cond_destroy(&waiters[k].changed);
        pthread_mutex_destroy(&waiters[k].lock);
    }
    nbi_grammar_pool_close(&pool);
    assert_null(pool);
}

static void ignore(void *user)
{
    (void)user;
}

static void too_many_orders_are_refused(void **state)
{
    (void)state;
    static nbi_order *orders[NBI_ORDERS_MAX + 16];
    static const nbi_grammar_options at_once = {.after_think = -1};
    nbi_grammar_pool *pool = NULL;
    size_t n = 0, n_max = sizeof orders / sizeof *orders;
    nb_error err = {.status = NB_OK};
    nb_status st = NB_OK;
    assert_int_equal(nbi_grammar_pool_open(&pool, compiler, NULL), NB_OK);
    while (st == NB_OK && n < n_max) { /* slow ones, each different */
        char source[64];
        snprintf(source, sizeof source, "((a|b)*a(a|b){12}c{%zu}){2}", n + 1);
        st = nbi_order_give(&orders[n], pool, NBI_GRAMMAR_REGEX, source, strlen(source), &at_once,
                            1, ignore, NULL, &err);
        n += st == NB_OK;
    }
    if (st != NB_OK) {
        assert_int_equal(st, NB_BUSY);
        assert_non_null(strstr(err.text, "try again later"));
        assert_true(n >= NBI_ORDERS_MAX);
    }
    for (size_t i = 0; i < n; i++) nbi_order_close(&orders[i]);
    nbi_grammar_pool_close(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(orders_of_many_threads),
        cmocka_unit_test(too_many_orders_are_refused),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
