/* Clusters of blocks (backend/cuda/cluster.h), on a GPU or emulated: ranks, memory of other blocks,
 * barriers, copies to several blocks, stamps of their launches, and what the emulation refuses. */
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda/cluster_kernels.h"
#include "kernel/operator_util.h"

enum { CLUSTERS = 3 };

static uint32_t most;

static void check_block(const cluster_seen *b, uint32_t cluster, uint32_t number)
{
    const uint32_t rank = number % cluster, base = 1000 * (number / cluster + 1);
    assert_int_equal(b->rank, rank);
    assert_int_equal(b->size, cluster);
    assert_int_equal(b->own, base + (rank + cluster - 1) % cluster);
    assert_int_equal(b->read, base + rank);
    assert_int_equal(b->named, base + rank);
    assert_int_equal((int)b->posted[0], base + (rank + 2 * cluster - 2) % cluster);
    assert_true(b->posted[1] == 0.5f);
    for (uint32_t from = 0; from < CLUSTER_MOST; from++) {
        assert_int_equal(b->board[from], from < cluster ? base + from + rank : 0);
        for (uint32_t i = 0; i < CLUSTER_SLICE; i++)
            assert_int_equal(b->sent[from][i], from <= rank ? 100 + from * CLUSTER_SLICE + i : 7);
    }
}

static void test_blocks(void **state)
{
    (void)state;
    uint32_t stamped;
    for (uint32_t cluster = 1; cluster <= most; cluster *= 2) {
        cluster_seen seen[CLUSTERS * CLUSTER_MOST];
        memset(seen, 0xff, sizeof seen);
        assert_true(cluster_run(cluster, CLUSTERS, CLUSTER_SOUND, 1, false, seen, &stamped));
        for (uint32_t i = 0; i < CLUSTERS * cluster; i++) check_block(&seen[i], cluster, i);
    }
}

/* A launch of clusters has one stamp, in its place among ordinary ones. */
static void test_stamps(void **state)
{
    (void)state;
    enum { LAUNCHES = 5 };
    uint32_t stamped;
    for (uint32_t cluster = 1; cluster <= most; cluster *= 4) {
        cluster_seen seen[CLUSTERS * CLUSTER_MOST];
        assert_true(cluster_run(cluster, CLUSTERS, CLUSTER_SOUND, LAUNCHES, true, seen, &stamped));
        assert_int_equal(stamped, 3 * LAUNCHES);
        for (uint32_t i = 0; i < CLUSTERS * cluster; i++) check_block(&seen[i], cluster, i);
    }
}

static void expect_abort(enum cluster_fault fault)
{
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        cluster_seen seen[CLUSTER_MOST];
        uint32_t stamped;
        close(STDERR_FILENO);
        signal(SIGABRT, SIG_DFL);
        cluster_run(4, 1, fault, 1, false, seen, &stamped);
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

/* On a device the first would wait for ever, and the second goes well now and then. */
static void test_faults(void **state)
{
    (void)state;
    if (!NBI_CUDA_EMULATED) skip();
    expect_abort(CLUSTER_STAYS_AWAY);
    expect_abort(CLUSTER_TOO_EARLY);
}

int main(int argc, char **argv)
{
    op_begin(argc, argv);
    most = cluster_most();
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_blocks), cmocka_unit_test(test_stamps),
                                       cmocka_unit_test(test_faults)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
