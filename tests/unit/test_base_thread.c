/* The compute pool: every item once, in every way of waiting; meant to run under ThreadSanitizer
 * too. */
#include "cmocka_all.h"

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/thread.h"
#include "child.h"

#define MAX_THREADS 16

typedef struct visit {
    uint32_t n, grain, n_threads;
    uint8_t *seen; /* [n] not atomic: two visits of an item are a race and a wrong count */
    uint64_t per_thread[MAX_THREADS * 16]; /* one cache line each; not atomic: a thread index
                                              belongs to one thread at a time */
    _Atomic uint32_t wrong;
} visit;

static void visit_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    visit *v = arg;
    if (begin >= end || end > v->n || end - begin > v->grain || begin % v->grain != 0 ||
        thread >= v->n_threads) {
        atomic_fetch_add(&v->wrong, 1);
        return;
    }
    for (uint32_t i = begin; i < end; i++) v->seen[i]++;
    v->per_thread[thread * 16] += end - begin;
}

static void run_and_check(nbi_pool *pool, uint32_t n, uint32_t grain)
{
    visit v = {.n = n, .grain = grain ? grain : 1, .n_threads = nbi_pool_threads(pool)};
    v.seen = calloc(n ? n : 1, 1);
    nbi_pool_run(pool, visit_task, &v, n, grain);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < MAX_THREADS; i++) sum += v.per_thread[i * 16];
    assert_int_equal(atomic_load(&v.wrong), 0);
    assert_int_equal(sum, n);
    for (uint32_t i = 0; i < n; i++) assert_int_equal(v.seen[i], 1);
    free(v.seen);
}

static void every_item_once(void **state)
{
    (void)state;
    const uint32_t sizes[] = {0, 1, 2, 7, 64, 1000, 4099};
    for (uint32_t threads = 1; threads <= 9; threads++) {
        nbi_pool *pool = NULL;
        assert_int_equal(nbi_pool_create(&pool, threads, NULL), NB_OK);
        assert_int_equal(nbi_pool_threads(pool), threads);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            for (uint32_t grain = 0; grain < 70; grain += 23) run_and_check(pool, sizes[i], grain);
        }
        nbi_pool_destroy(&pool);
        assert_null(pool);
    }
    nbi_pool *none = NULL;
    nbi_pool_destroy(&none);
}

static void no_pool_runs_here(void **state)
{
    (void)state;
    assert_int_equal(nbi_pool_threads(NULL), 1);
    run_and_check(NULL, 0, 4);
    run_and_check(NULL, 10, 4);
    run_and_check(NULL, 10, 0);
    run_and_check(NULL, 3, 100);
}

static void add_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    uint32_t *x = arg; /* plain memory: the pool must order region after region */
    for (uint32_t i = begin; i < end; i++) x[i] += i;
}

/* Back to back: workers that are late for one region meet the next ones. */
static void many_regions_in_a_row(void **state)
{
    (void)state;
    enum { N = 37, REGIONS = 20000 };
    for (uint32_t threads = 2; threads <= 6; threads += 2) {
        nbi_pool *pool = NULL;
        uint32_t x[N] = {0};
        assert_int_equal(nbi_pool_create(&pool, threads, NULL), NB_OK);
        for (int r = 0; r < REGIONS; r++) {
            nbi_pool_run(pool, add_task, x, N, 3);
            if (x[N - 1] != (uint32_t)(r + 1) * (N - 1)) fail_msg("region %d is not complete", r);
        }
        for (uint32_t i = 0; i < N; i++) assert_int_equal(x[i], i * REGIONS);
        nbi_pool_destroy(&pool);
    }
}

/* With pauses on both sides of the spinning time: workers fall asleep, or are about to. */
static void regions_after_a_pause(void **state)
{
    (void)state;
    nbi_pool *pool = NULL;
    assert_int_equal(nbi_pool_create(&pool, 2, NULL), NB_OK);
    for (unsigned r = 0; r < 400; r++) {
        usleep(r % 2 ? 1000 : 60 + r % 97);
        run_and_check(pool, 64, 1);
    }
    nbi_pool_destroy(&pool);
}

typedef struct meet {
    _Atomic uint32_t inside;
    _Atomic uint32_t together;
} meet;

static void meet_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)begin, (void)end, (void)thread;
    meet *m = arg;
    atomic_fetch_add(&m->inside, 1);
    for (int i = 0; i < 2000 && atomic_load(&m->inside) < 2; i++) usleep(1000);
    if (atomic_load(&m->inside) >= 2) atomic_store(&m->together, 1);
}

/* Two pieces that wait for each other can only end when two threads work at the same time. */
static void pieces_run_at_the_same_time(void **state)
{
    (void)state;
    nbi_pool *pool = NULL;
    meet m = {0};
    assert_int_equal(nbi_pool_create(&pool, 2, NULL), NB_OK);
    nbi_pool_run(pool, meet_task, &m, 2, 1);
    assert_int_equal(atomic_load(&m.together), 1);
    nbi_pool_destroy(&pool);
}

static void size_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    atomic_fetch_add((_Atomic uint64_t *)arg, end - begin);
}

static void indices_do_not_wrap(void **state)
{
    (void)state;
    nbi_pool *pool = NULL;
    assert_int_equal(nbi_pool_create(&pool, 4, NULL), NB_OK);
    for (uint32_t grain = 1u << 28; grain; grain = grain == 1u << 28 ? UINT32_MAX - 1 : 0) {
        _Atomic uint64_t sum = 0;
        nbi_pool_run(pool, size_task, &sum, UINT32_MAX, grain);
        assert_int_equal(atomic_load(&sum), UINT32_MAX);
        atomic_store(&sum, 0);
        nbi_pool_run(NULL, size_task, &sum, UINT32_MAX, grain);
        assert_int_equal(atomic_load(&sum), UINT32_MAX);
    }
    nbi_pool_destroy(&pool);
}

static void inner_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)begin, (void)end, (void)thread;
    nbi_pool_run(arg, inner_task, arg, 10, 1);
}

static void run_nested(void *arg)
{
    (void)arg;
    nbi_pool *pool = NULL;
    if (nbi_pool_create(&pool, 2, NULL) != NB_OK) _exit(0);
    nbi_pool_run(pool, inner_task, pool, 10, 1);
}

static void nested_regions_abort(void **state)
{
    (void)state;
    assert_int_equal(child_signal(run_nested, NULL), SIGABRT);
}

static void creation_fails_cleanly(void **state)
{
    (void)state;
    nb_error err = {0};
    nbi_pool *pool = (nbi_pool *)&err; /* must stay as it is */
    assert_int_equal(nbi_pool_create(&pool, 1u << 20, &err), NB_INVALID);
    assert_non_null(strstr(err.text, "1048576"));
    bool failed = false;
    for (long n = 0; n < 8; n++) {
        pool = NULL;
        nbi_heap_fail_after(n);
        nb_status st = nbi_pool_create(&pool, 3, &err);
        nbi_heap_fail_after(-1);
        if (st == NB_OK) {
            run_and_check(pool, 100, 7);
            nbi_pool_destroy(&pool);
        } else {
            assert_int_equal(st, NB_NO_MEMORY);
            assert_null(pool);
            failed = true;
        }
    }
    assert_true(failed);
}

/* A mask of one core leaves one, whatever the machine has. */
static void cores_follow_affinity(void **state)
{
    (void)state;
    cpu_set_t old, one;
    uint32_t cores = nbi_cores_available();
    assert_true(cores >= 1 && cores <= (uint32_t)sysconf(_SC_NPROCESSORS_CONF));
    assert_int_equal(sched_getaffinity(0, sizeof old, &old), 0);
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE; i++) {
        if (!CPU_ISSET(i, &old)) continue;
        CPU_SET(i, &one);
        break;
    }
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(nbi_cores_available(), 1);
    nbi_pool *pool = NULL;
    assert_int_equal(nbi_pool_create(&pool, 0, NULL), NB_OK);
    assert_int_equal(nbi_pool_threads(pool), 1);
    nbi_pool_destroy(&pool);
    /* More threads than cores: nobody may starve on spinning. */
    assert_int_equal(nbi_pool_create(&pool, 4, NULL), NB_OK);
    for (int i = 0; i < 200; i++) run_and_check(pool, 100, 1);
    nbi_pool_destroy(&pool);
    assert_int_equal(sched_setaffinity(0, sizeof old, &old), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_item_once),
        cmocka_unit_test(no_pool_runs_here),
        cmocka_unit_test(many_regions_in_a_row),
        cmocka_unit_test(regions_after_a_pause),
        cmocka_unit_test(pieces_run_at_the_same_time),
        cmocka_unit_test(indices_do_not_wrap),
        cmocka_unit_test(nested_regions_abort),
        cmocka_unit_test(creation_fails_cleanly),
        cmocka_unit_test(cores_follow_affinity),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
