/* One rank, and who holds what among many. */
#include <string.h>

#include "cmocka_all.h"
#include "comm/comm.h"

static void one_rank_keeps_its_own(void **state)
{
    (void)state;
    nbi_comm *comm = NULL;
    nb_error err = {0};
    assert_int_equal(nbi_comm_open(&comm, "self", &err), NB_OK);
    assert_int_equal(nbi_comm_rank(comm), 0);
    assert_int_equal(nbi_comm_size(comm), 1);
    float x[3] = {1, -2.5f, 1e30f}, out[3] = {0};
    assert_int_equal(nbi_comm_sum(comm, x, 3, &err), NB_OK);
    assert_true(x[0] == 1 && x[1] == -2.5f && x[2] == 1e30f);
    assert_int_equal(nbi_comm_gather(comm, out, x, sizeof x, &err), NB_OK);
    assert_memory_equal(out, x, sizeof x);
    assert_int_equal(nbi_comm_broadcast(comm, x, sizeof x, &err), NB_OK);
    assert_memory_equal(out, x, sizeof x);
    assert_int_equal(nbi_comm_barrier(comm, &err), NB_OK);
    nbi_comm_close(&comm);
    assert_null(comm);
    nbi_comm_close(&comm);
}

static void unknown_transport_is_refused(void **state)
{
    (void)state;
    nbi_comm *comm = NULL;
    nb_error err = {0};
    assert_int_equal(nbi_comm_open(&comm, "smoke", &err), NB_UNSUPPORTED);
    assert_null(comm);
    assert_non_null(strstr(err.text, "\"smoke\""));
}

/* Ranks of one expert group are neighbours, and every (group, part) has exactly one rank. */
static void shards_cover_everything_once(void **state)
{
    (void)state;
    static const uint32_t sizes[][2] = {{1, 1}, {2, 1}, {2, 2}, {4, 2}, {8, 4}, {6, 3}, {8, 8}};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        uint32_t size = sizes[k][0], ep = sizes[k][1];
        uint64_t seen = 0;
        for (uint32_t rank = 0; rank < size; rank++) {
            nbi_shard s;
            assert_int_equal(nbi_shard_make(&s, rank, size, ep, NULL), NB_OK);
            assert_int_equal(s.tp_rank, rank);
            assert_int_equal(s.tp_size, size);
            assert_int_equal(nbi_shard_moe_size(&s) * s.ep_size, size);
            uint32_t place = s.ep_rank * nbi_shard_moe_size(&s) + nbi_shard_moe_rank(&s);
            assert_int_equal(place, rank);
            seen |= UINT64_C(1) << place;
        }
        assert_int_equal(seen, (UINT64_C(1) << size) - 1);
    }
}

static void odd_expert_groups_are_refused(void **state)
{
    (void)state;
    nbi_shard s = {9, 9, 9, 9, true};
    nb_error err = {0};
    assert_int_equal(nbi_shard_make(&s, 0, 4, 3, &err), NB_INVALID);
    assert_string_equal(err.text, "ep_size is 3; expected a divisor of the 4 ranks");
    assert_int_equal(s.tp_size, 9);
    assert_int_equal(nbi_shard_make(&s, 3, 4, 0, &err), NB_OK);
    assert_int_equal(s.ep_size, 1);
    assert_int_equal(s.ep_rank, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank_keeps_its_own),
        cmocka_unit_test(unknown_transport_is_refused),
        cmocka_unit_test(shards_cover_everything_once),
        cmocka_unit_test(odd_expert_groups_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
