/* Orders of text/grammar.h: of many threads, some closed before they are done; too many, too long.
 */
#include "cmocka_all.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "text/grammar_impl.h"

#define N_THREADS 6
#define N_ORDERS  40
#define HOUR_NS   ((uint64_t)3600 * 1000000000u)

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

static void check_result(waiter *w, nbi_grammar_order *order, bool valid)
{
    nbi_grammar *grammars[3] = {0};
    nb_error err = {.status = NB_OK};
    nb_status st = nbi_grammar_order_take(order, grammars, &err);
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
    nbi_grammar_order *order = NULL;
    snprintf(source, sizeof source, valid ? "a{%u}b" : "(a{%u}", i % 7 * N_THREADS + w->k + 1);
    pthread_mutex_lock(&w->lock);
    w->n_notified = 0;
    pthread_mutex_unlock(&w->lock);
    if (nbi_grammar_order_open(&order, compiler, NBI_GRAMMAR_REGEX, source, strlen(source),
                               &at_once, 3, on_done, w, NULL) != NB_OK) {
        w->wrong = "refused";
        return;
    }
    if (i % 3 == 0) { /* at some moment of its life */
        struct timespec pause = {.tv_nsec = (long)(i % 4) * 300000};
        nanosleep(&pause, NULL);
        nbi_grammar_order_close(&order);
        return;
    }
    pthread_mutex_lock(&w->lock);
    while (!w->n_notified) pthread_cond_wait(&w->changed, &w->lock);
    if (w->n_notified != 1) w->wrong = "notified more than once";
    pthread_mutex_unlock(&w->lock);
    if (!nbi_grammar_order_is_done(order)) w->wrong = "notified before it was done";
    check_result(w, order, valid);
    nbi_grammar_order_close(&order);
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
    waiter waiters[N_THREADS];
    pthread_t threads[N_THREADS];
    for (uint32_t k = 0; k < N_THREADS; k++) {
        waiters[k] = (waiter){.k = k};
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
}

/* ---------------------------------------------------------------- a library that takes its time */

static const nbi_llg *library;
static atomic_bool go;
static atomic_uint n_begun, n_freed;

/* Expressions that begin with "slow" take all the processor time there is, until `go`. */
static nbi_llg_matcher *slow_matcher(const nbi_llg_init *init, const char *type, const char *data)
{
    atomic_fetch_add(&n_begun, 1);
    while (strstr(data, "slow") && !atomic_load(&go)) {}
    return library->new_matcher(init, type, data);
}

static void count_freed(nbi_llg_tokenizer *t)
{
    library->free_tokenizer(t);
    atomic_fetch_add(&n_freed, 1);
}

static void open_slow(nbi_grammar_compiler **c, nbi_llg *slow)
{
    static int32_t eos;
    eos = nbi_token_find(tokenizer, "<|user|>", 8);
    nbi_grammar_setup setup = {
        .tokenizer = tokenizer, .eos = &eos, .n_eos = 1, .folder = NBI_TEST_GRAMMAR_FOLDER};
    assert_int_equal(nbi_grammar_compiler_open(c, &setup, NULL), NB_OK);
    assert_int_equal(nbi_grammar_compiler_load(*c, NULL), NB_OK);
    library = (*c)->llg;
    *slow = *library;
    slow->new_matcher = slow_matcher;
    slow->free_tokenizer = count_freed;
    (*c)->llg = slow;
    atomic_store(&go, false);
    atomic_store(&n_begun, 0);
    atomic_store(&n_freed, 0);
}

static void set_time(nbi_grammar_compiler *c, uint64_t ns)
{
    pthread_mutex_lock(&c->lock);
    c->time_ns = ns;
    pthread_mutex_unlock(&c->lock);
}

static nbi_grammar_order *ordered(nbi_grammar_compiler *c, const char *source)
{
    static const nbi_grammar_options at_once = {.after_think = -1};
    nbi_grammar_order *o = NULL;
    assert_int_equal(nbi_grammar_order_open(&o, c, NBI_GRAMMAR_REGEX, source, strlen(source),
                                            &at_once, 1, NULL, NULL, NULL),
                     NB_OK);
    return o;
}

static nb_error last; /* of wait_for() */

static nb_status wait_for(nbi_grammar_compiler *c, nbi_grammar_order **o)
{
    const struct timespec pause = {.tv_nsec = 2000000};
    nbi_grammar *g = NULL;
    while (!nbi_grammar_order_is_done(*o)) {
        nbi_grammar_look_at_clock(c);
        nanosleep(&pause, NULL);
    }
    nb_status st = nbi_grammar_order_take(*o, &g, &last);
    assert_int_equal(st == NB_OK, g != NULL);
    nbi_grammar_close(&g);
    nbi_grammar_order_close(o);
    return st;
}

static void wait_until_begun(unsigned n)
{
    const struct timespec pause = {.tv_nsec = 2000000};
    while (atomic_load(&n_begun) < n) nanosleep(&pause, NULL);
}

static void wait_until_freed(void)
{
    const struct timespec pause = {.tv_nsec = 2000000};
    while (!atomic_load(&n_freed)) nanosleep(&pause, NULL);
}

static bool is_known(nbi_grammar_compiler *c, const char *source)
{
    static const nbi_grammar_options at_once = {.after_think = -1};
    nbi_grammar *g = NULL;
    bool known;
    nb_status st = nbi_grammar_recall(&g, &known, c, NBI_GRAMMAR_REGEX, source, strlen(source),
                                      &at_once, NULL);
    assert_int_equal(st, NB_OK);
    nbi_grammar_close(&g);
    return known;
}

static void one_source_is_compiled_once(void **state)
{
    (void)state;
    static nbi_llg slow;
    nbi_grammar_compiler *c = NULL;
    nbi_grammar_order *orders[5];
    open_slow(&c, &slow);
    for (int i = 0; i < 5; i++) orders[i] = ordered(c, "slow one");
    nbi_grammar_order_close(&orders[4]);
    atomic_store(&go, true);
    for (int i = 0; i < 4; i++) assert_int_equal(wait_for(c, &orders[i]), NB_OK);
    assert_int_equal(atomic_load(&n_begun), 1);
    assert_true(is_known(c, "slow one"));
    orders[0] = ordered(c, "slow one"); /* from what is kept */
    assert_int_equal(wait_for(c, &orders[0]), NB_OK);
    assert_int_equal(atomic_load(&n_begun), 1);
    nbi_grammar_compiler_close(&c);
    wait_until_freed();
}

static void too_many_orders_are_refused(void **state)
{
    (void)state;
    static nbi_llg slow;
    static nbi_grammar_order *orders[NBI_GRAMMAR_ORDERS_MAX];
    static const nbi_grammar_options at_once = {.after_think = -1};
    nbi_grammar_compiler *c = NULL;
    nbi_grammar_order *more = NULL;
    nb_error err = {.status = NB_OK};
    char source[32];
    open_slow(&c, &slow);
    set_time(c, HOUR_NS);
    for (int i = 0; i < NBI_GRAMMAR_ORDERS_MAX; i++) {
        snprintf(source, sizeof source, "slow %d", i);
        orders[i] = ordered(c, source);
    }
    assert_int_equal(
        nbi_grammar_order_open(&more, c, NBI_GRAMMAR_REGEX, "a", 1, &at_once, 1, NULL, NULL, &err),
        NB_BUSY);
    assert_non_null(strstr(err.text, "try again later"));
    assert_null(more);
    nbi_grammar_order_close(&orders[NBI_GRAMMAR_ORDERS_MAX - 1]); /* room for one */
    orders[NBI_GRAMMAR_ORDERS_MAX - 1] = ordered(c, "a");
    wait_until_begun(NBI_GRAMMAR_COMPILES_MAX);
    set_time(c, 1); /* all who wait have waited too long */
    assert_int_equal(wait_for(c, &orders[NBI_GRAMMAR_ORDERS_MAX - 1]), NB_BUSY);
    assert_int_equal(atomic_load(&n_begun), NBI_GRAMMAR_COMPILES_MAX);
    for (int i = 0; i < NBI_GRAMMAR_ORDERS_MAX; i++) nbi_grammar_order_close(&orders[i]);
    atomic_store(&go, true);
    nbi_grammar_compiler_close(&c);
    wait_until_freed();
}

static void what_takes_too_long_is_given_up(void **state)
{
    (void)state;
    static nbi_llg slow;
    nbi_grammar_compiler *c = NULL;
    open_slow(&c, &slow);
    set_time(c, HOUR_NS);
    nbi_grammar_order *first = ordered(c, "slow"), *second = ordered(c, "slow"),
                      *left = ordered(c, "slow other"), *quick = ordered(c, "quick");
    assert_int_equal(wait_for(c, &quick), NB_OK); /* beside the others */
    wait_until_begun(3);
    set_time(c, 1);
    assert_int_equal(wait_for(c, &first), NB_TOO_LARGE);
    assert_non_null(strstr(last.text, "too complex"));
    assert_int_equal(wait_for(c, &second), NB_TOO_LARGE);
    assert_int_equal(wait_for(c, &left), NB_TOO_LARGE);
    assert_false(is_known(c, "slow"));
    set_time(c, HOUR_NS);
    first = ordered(c, "slow"); /* begun again: the machine may have been busy */
    wait_until_begun(4);
    nbi_grammar_order_close(&first);
    set_time(c, 1);
    nbi_grammar_compiler_close(&c); /* does not wait for those */
    assert_int_equal(atomic_load(&n_freed), 0);
    atomic_store(&go, true);
    wait_until_freed();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(orders_of_many_threads),
        cmocka_unit_test(one_source_is_compiled_once),
        cmocka_unit_test(too_many_orders_are_refused),
        cmocka_unit_test(what_takes_too_long_is_given_up),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
