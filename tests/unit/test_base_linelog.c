/* Histograms and line logs: counts are exact, lines whole and in order, nothing blocks. */
#include "cmocka_all.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/histogram.h"
#include "base/linelog.h"
#include "base/mem.h"
#include "scratch.h"

static void buckets_are_inclusive(void **state)
{
    (void)state;
    static const double bounds[] = {1, 2, 5};
    nbi_histogram h;
    nb_histogram out;
    nbi_histogram_init(&h, bounds, 3, 1);
    for (uint64_t v = 0; v <= 6; v++) nbi_histogram_add(&h, v, v == 6 ? 3 : 1);
    nbi_histogram_read(&h, &out);
    assert_int_equal(out.n_bounds, 3);
    assert_int_equal(out.counts[0], 2); /* 0, 1 */
    assert_int_equal(out.counts[1], 1); /* 2 */
    assert_int_equal(out.counts[2], 3); /* 3, 4, 5 */
    assert_int_equal(out.counts[3], 3); /* 6, three times */
    assert_true(out.sum == 15 + 18);
    nbi_histogram_init(&h, bounds, 3, 1e-9);
    nbi_histogram_add(&h, 1500000000, 1);
    nbi_histogram_read(&h, &out);
    assert_int_equal(out.counts[1], 1);
    assert_true(out.sum > 1.4999 && out.sum < 1.5001);
}

static void *add_many(void *arg)
{
    for (uint64_t i = 0; i < 20000; i++) nbi_histogram_add(arg, i % 7, 1);
    return NULL;
}

static void threads_lose_nothing(void **state)
{
    (void)state;
    static const double bounds[] = {1, 2, 5};
    nbi_histogram h;
    nb_histogram out;
    pthread_t t[4];
    uint64_t n = 0;
    nbi_histogram_init(&h, bounds, 3, 1);
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&t[i], NULL, add_many, &h), 0);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    nbi_histogram_read(&h, &out);
    for (uint32_t i = 0; i <= out.n_bounds; i++) n += out.counts[i];
    assert_int_equal(n, 80000);
}

static void *write_many(void *arg)
{
    char line[300];
    for (int i = 0; i < 500; i++) {
        int n = snprintf(line, sizeof line, "%d %0*d", i, 1 + i % 200, i);
        nbi_linelog_write(arg, line, (size_t)n);
    }
    return NULL;
}

/* Every line whole, each writer's in order. */
static void lines_are_whole(void **state)
{
    (void)state;
    char line[400], *dir = scratch_make();
    const char *path = scratch_path(dir, "lines");
    nbi_linelog *log = NULL;
    pthread_t t[3];
    int n = 0, next[500] = {0};
    assert_int_equal(nbi_linelog_open(&log, path, "--test-log", NULL), NB_OK);
    for (int i = 0; i < 3; i++) assert_int_equal(pthread_create(&t[i], NULL, write_many, log), 0);
    for (int i = 0; i < 3; i++) pthread_join(t[i], NULL);
    assert_int_equal(nbi_linelog_dropped(log), 0);
    nbi_linelog_close(&log);
    assert_null(log);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        int index, again, end = 0;
        assert_int_equal(sscanf(line, "%d %d%n", &index, &again, &end), 2);
        assert_true(index == again && index >= 0 && index < 500);
        assert_int_equal(line[end], '\n');
        next[index]++;
        n++;
    }
    fclose(f);
    assert_int_equal(n, 1500);
    for (int i = 0; i < 500; i++) assert_int_equal(next[i], 3);
    scratch_remove(dir);
}

static void a_full_disk_costs_lines(void **state)
{
    (void)state;
    nbi_linelog *log = NULL;
    if (access("/dev/full", W_OK) != 0) skip();
    assert_int_equal(nbi_linelog_open(&log, "/dev/full", "--test-log", NULL), NB_OK);
    for (int i = 0; i < 10; i++) nbi_linelog_write(log, "line", 4);
    nbi_linelog_flush(log);
    assert_int_equal(nbi_linelog_dropped(log), 10);
    nbi_linelog_close(&log);
}

/* The pipe and the buffer fill; the rest is counted; closing waits a second and no longer. */
static void a_stuck_reader_blocks_nobody(void **state)
{
    (void)state;
    char line[1000], *dir = scratch_make();
    const char *path = scratch_path(dir, "fifo");
    nbi_linelog *log = NULL;
    memset(line, 'x', sizeof line);
    assert_int_equal(mkfifo(path, 0600), 0);
    int reader = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    assert_int_equal(nbi_linelog_open(&log, path, "--test-log", NULL), NB_OK);
    uint64_t begin = nbi_now_ns();
    for (int i = 0; i < 3000; i++) nbi_linelog_write(log, line, sizeof line);
    assert_true(nbi_now_ns() - begin < 2000000000u);
    assert_true(nbi_linelog_dropped(log) > 1500);
    nbi_linelog_close(&log);
    assert_true(nbi_now_ns() - begin < 5000000000u);
    close(reader);
    usleep(300000); /* the thread that was left behind ends */
    scratch_remove(dir);
}

static void bad_paths_are_named(void **state)
{
    (void)state;
    nbi_linelog *log = NULL;
    nb_error err = {0};
    assert_int_equal(nbi_linelog_open(&log, "/no/such/file", "--test-log", &err), NB_IO);
    assert_non_null(strstr(err.text, "--test-log /no/such/file"));
    assert_null(log);
}

static void memory_that_is_not_there(void **state)
{
    (void)state;
    nbi_linelog *log = NULL;
    for (long n = 0; n < 2; n++) {
        nbi_heap_fail_after(n);
        assert_int_equal(nbi_linelog_open(&log, "/dev/null", "--test-log", NULL), NB_NO_MEMORY);
        nbi_heap_fail_after(-1);
    }
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN); /* as the server does */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(buckets_are_inclusive),
        cmocka_unit_test(threads_lose_nothing),
        cmocka_unit_test(lines_are_whole),
        cmocka_unit_test(a_full_disk_costs_lines),
        cmocka_unit_test(a_stuck_reader_blocks_nobody),
        cmocka_unit_test(bad_paths_are_named),
        cmocka_unit_test(memory_that_is_not_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
