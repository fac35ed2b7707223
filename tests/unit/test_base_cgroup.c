/* Control-group limits on recorded trees (tests/unit/data/cgroup, one folder per machine; README
 * there). */
#include "cmocka_all.h"

#include <stdio.h>

#include "base/cgroup.h"
#include "base/file.h"

#define KIB 1024ull
#define MIB (1024ull * KIB)

typedef struct machine {
    const char *name;
    uint64_t memory_bytes, quota_milli;
} machine;

static const machine machines[] = {
    /* No group at all: MemAvailable. */
    {"bare", 8000000 * KIB, 0},
    /* v2 on a desktop: all groups say "max". */
    {"v2_unlimited", 16000000 * KIB, 0},
    /* v2, limit in the own group: 1 GiB limit, 700 MiB used of which 500 MiB are page cache. */
    {"v2_own", 824 * MIB, 1500},
    /* v2, the own group is open, the one above has the tighter limits. */
    {"v2_parent", 256 * MIB, 2000},
    /* v2 inside a container with its own cgroup namespace: path "/", limits at the mount. */
    {"v2_namespace", 512 * MIB, 500},
    /* v1, Docker without cgroup namespace: the mount shows the subtree of the container. */
    {"v1_docker", 1792 * MIB, 3000},
    /* v1, unlimited: a limit near 2^63 and quota -1. */
    {"v1_unlimited", 4000000 * KIB, 0},
    /* v1 and v2 together (systemd hybrid): controllers in v1, a v2 tree without limits. */
    {"hybrid", 300 * MIB, 4000},
    /* More used than allowed: nothing left, which is not "unknown". */
    {"v2_over", 0, 1},
    /* Nothing readable. */
    {"empty", 0, 0},
};

static void recorded_trees(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        const machine *m = &machines[i];
        char root[512];
        snprintf(root, sizeof root, "tests/unit/data/cgroup/%s", m->name);
        uint64_t memory = nbi_memory_available_under(root);
        uint64_t quota = nbi_cpu_quota_milli_under(root);
        if (memory != m->memory_bytes || quota != m->quota_milli) {
            fail_msg("%s: %llu bytes, %llu milli-CPUs; expected %llu, %llu", m->name,
                     (unsigned long long)memory, (unsigned long long)quota,
                     (unsigned long long)m->memory_bytes, (unsigned long long)m->quota_milli);
        }
    }
}

static void this_machine_says_something(void **state)
{
    (void)state;
    uint64_t bytes = nbi_memory_available();
    assert_true(bytes > MIB && bytes < (1ull << 50));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recorded_trees),
        cmocka_unit_test(this_machine_says_something),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
