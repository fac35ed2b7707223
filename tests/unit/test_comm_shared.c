/* Collectives over shared memory: ranks as threads, then as processes that stop and die. */
#include "cmocka_all.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/shared.h"

#define RANKS_MAX 4u
#define LONG      200000u /* floats: several messages, added up by shares */

typedef struct job job;
typedef struct place {
    job *job;
    uint32_t rank;
    nbi_comm *comm;
    nb_status status;
    nb_error err;
    float *x;
} place;

struct job {
    uint32_t size;
    void *areas[RANKS_MAX];
    size_t bytes;
    void (*run)(place *p);
    place places[RANKS_MAX];
};

static job *make_job(uint32_t size, void (*run)(place *p))
{
    job *j = calloc(1, sizeof *j);
    j->size = size;
    j->run = run;
    j->bytes = (nbi_shared_area_bytes() + 4095) & ~(size_t)4095;
    char *all =
        mmap(NULL, size * j->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(all, MAP_FAILED);
    for (uint32_t r = 0; r < size; r++) {
        j->areas[r] = all + r * j->bytes;
        j->places[r] = (place){.job = j, .rank = r};
    }
    return j;
}

static void free_job(job *j)
{
    munmap(j->areas[0], j->size * j->bytes);
    free(j);
}

static void open_place(place *p)
{
    p->status = nbi_comm_open_shared(
        &p->comm,
        &(nbi_shared_options){
            .rank = p->rank, .size = p->job->size, .areas = p->job->areas, .crowded = true},
        &p->err);
}

static void *thread_main(void *arg)
{
    place *p = arg;
    open_place(p);
    if (p->status == NB_OK) p->job->run(p);
    nbi_comm_close(&p->comm);
    return NULL;
}

static void run_threads(job *j)
{
    pthread_t threads[RANKS_MAX];
    for (uint32_t r = 0; r < j->size; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, thread_main, &j->places[r]), 0);
    for (uint32_t r = 0; r < j->size; r++) pthread_join(threads[r], NULL);
}

/* ---------------------------------------------------------------- right sums */

static float value(uint32_t rank, uint32_t i)
{
    uint32_t v = (rank * 2654435761u) ^ (i * 40503u + 7);
    v ^= v >> 15;
    v *= 2246822519u;
    return ((float)(v >> 8) * 0x1p-24f - 0.5f) * (i % 7 ? 1.0f : 1e6f);
}

#define CHECK(cond) \
    if (!(cond)) p->status = nbi_fail(&p->err, NB_INTERNAL, "line %d: %s", __LINE__, #cond)
#define DO(call) \
    if ((p->status = (call)) != NB_OK) return

static void check_sum(place *p, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) p->x[i] = value(p->rank, i);
    DO(nbi_comm_sum(p->comm, p->x, n, &p->err));
    for (uint32_t i = 0; i < n; i++) {
        float want = value(0, i);
        for (uint32_t r = 1; r < p->job->size; r++) want += value(r, i);
        if (memcmp(&want, &p->x[i], sizeof want)) CHECK(!"the sum is in the order of ranks");
    }
}

static void all_calls(place *p)
{
    static const uint32_t lengths[] = {1, 5, 6144, 40000, LONG};
    p->x = calloc(LONG * RANKS_MAX, sizeof *p->x);
    for (int round = 0; round < 3 && p->status == NB_OK; round++) {
        for (size_t k = 0; k < sizeof lengths / sizeof *lengths && p->status == NB_OK; k++)
            check_sum(p, lengths[k]);
        uint32_t word = 100 + p->rank, words[RANKS_MAX];
        if (p->status == NB_OK) p->status = nbi_comm_gather(p->comm, words, &word, 4, &p->err);
        for (uint32_t r = 0; r < p->job->size; r++) CHECK(words[r] == 100 + r);
        for (uint32_t n = 0; n < 20 && p->status == NB_OK; n++) { /* rank 0 runs ahead */
            word = p->rank ? 0 : 7 * n + 1;
            p->status = nbi_comm_broadcast(p->comm, &word, 4, &p->err);
            CHECK(word == 7 * n + 1);
        }
        for (uint32_t i = 0; i < LONG; i++) p->x[i] = p->rank ? 0 : (float)i;
        if (p->status == NB_OK)
            p->status = nbi_comm_broadcast(p->comm, p->x, LONG * sizeof *p->x, &p->err);
        for (uint32_t i = 0; i < LONG; i++) CHECK(p->x[i] == (float)i);
        if (p->status == NB_OK) p->status = nbi_comm_barrier(p->comm, &p->err);
    }
    if (p->status == NB_OK) {
        float *all = calloc(LONG * RANKS_MAX, sizeof *all);
        for (uint32_t i = 0; i < LONG; i++) p->x[i] = (float)(i + p->rank);
        p->status = nbi_comm_gather(p->comm, all, p->x, LONG * sizeof *p->x, &p->err);
        for (uint32_t r = 0; r < p->job->size; r++) CHECK(all[r * LONG + 99999] == 99999.0f + r);
        free(all);
    }
    free(p->x);
}

static void sums_are_in_order(void **state)
{
    (void)state;
    for (uint32_t size = 2; size <= RANKS_MAX; size++) {
        job *j = make_job(size, all_calls);
        run_threads(j);
        for (uint32_t r = 0; r < size; r++) {
            if (j->places[r].status != NB_OK) fail_msg("rank %u: %s", r, j->places[r].err.text);
        }
        free_job(j);
    }
}

/* ---------------------------------------------------------------- disagreement and failure */

static void agree(place *p)
{
    nb_error own = {0};
    nb_status st = p->rank == 2 ? nbi_fail(&own, NB_NO_MEMORY, "2.5 GB are missing") : NB_OK;
    p->status = nbi_comm_agree(p->comm, st, &own, &p->err);
    own = p->err;
    if (nbi_comm_agree(p->comm, NB_OK, NULL, &p->err) != NB_OK) p->status = NB_INTERNAL;
    p->err = own;
}

static void one_refusal_is_everybodys(void **state)
{
    (void)state;
    job *j = make_job(3, agree);
    run_threads(j);
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(j->places[r].status, NB_NO_MEMORY);
        assert_string_equal(j->places[r].err.text, "rank 2: 2.5 GB are missing");
    }
    free_job(j);
}

static void disagree(place *p)
{
    float x[8] = {0};
    p->status = nbi_comm_sum(p->comm, x, p->rank ? 8 : 4, &p->err);
}

static void different_calls_are_found_out(void **state)
{
    (void)state;
    job *j = make_job(2, disagree);
    run_threads(j);
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_not_equal(j->places[r].status, NB_OK);
        assert_non_null(strstr(j->places[r].err.text, "ranks disagree: rank"));
    }
    free_job(j);
}

static void fail_in_the_middle(place *p)
{
    if (p->rank == 1) {
        nbi_comm_fail(p->comm, "the disk is on fire");
        p->status = nbi_comm_lost(p->comm, &p->err);
        while (nbi_comm_barrier(p->comm, NULL) == NB_OK) {}
        usleep(300000); /* still there when the others hear of it */
        return;
    }
    p->status = nbi_comm_barrier(p->comm, &p->err);
    if (p->status == NB_OK) p->status = nbi_comm_barrier(p->comm, &p->err);
}

static void one_failure_is_everybodys(void **state)
{
    (void)state;
    job *j = make_job(3, fail_in_the_middle);
    run_threads(j);
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(j->places[r].status, NB_CLOSED);
        assert_string_equal(j->places[r].err.text,
                            r == 1 ? "the disk is on fire" : "rank 1: the disk is on fire");
    }
    free_job(j);
}

static void leave(place *p)
{
    if (p->rank) p->status = nbi_comm_barrier(p->comm, &p->err);
}

static void who_leaves_is_not_waited_for(void **state)
{
    (void)state;
    job *j = make_job(2, leave);
    run_threads(j);
    assert_int_equal(j->places[1].status, NB_CLOSED);
    assert_string_equal(j->places[1].err.text, "rank 0 has ended while others go on");
    free_job(j);
}

/* ---------------------------------------------------------------- processes */

/* Rank 1 as a process that does `what` when it has come to the first barrier. */
static pid_t start_victim(job *j, int what)
{
    pid_t pid = fork();
    if (pid) return pid;
    open_place(&j->places[1]);
    bool came = nbi_comm_barrier(j->places[1].comm, NULL) == NB_OK;
    if (came && what) kill(getpid(), what);
    while (came && !what) pause(); /* its watch goes on */
    _exit(0);
}

static void set_flag(void *user, const nb_error *why)
{
    strcpy(user, why->text);
}

static void lose_by(int what, const char *sentence)
{
    char heard[NB_ERROR_TEXT_MAX] = "", want[NB_ERROR_TEXT_MAX];
    int status;
    job *j = make_job(2, NULL);
    pid_t pid = start_victim(j, what);
    place *p = &j->places[0];
    open_place(p);
    assert_int_equal(p->status, NB_OK);
    nbi_comm_on_lost(p->comm, set_flag, heard);
    assert_int_equal(nbi_comm_barrier(p->comm, &p->err), NB_OK);
    assert_int_equal(nbi_comm_barrier(p->comm, &p->err), NB_CLOSED);
    snprintf(want, sizeof want, "rank 1 (process %d) %s", (int)pid, sentence);
    assert_string_equal(p->err.text, want);
    assert_int_equal(nbi_comm_lost(p->comm, NULL), NB_CLOSED);
    nbi_comm_close(&p->comm);
    assert_string_equal(heard, want);
    assert_int_equal(waitpid(pid, &status, 0), pid); /* a stopped one is killed, not left behind */
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    free_job(j);
}

static void a_killed_rank_is_named(void **state)
{
    (void)state;
    lose_by(SIGKILL, "is gone: killed, or ended without a word");
}

static void a_stopped_rank_is_named_and_ended(void **state)
{
    (void)state;
    lose_by(SIGSTOP, "is stopped");
}

static void a_rank_that_does_not_get_on_is_named(void **state)
{
    (void)state;
    int status;
    char head[80];
    job *j = make_job(2, NULL);
    pid_t pid = start_victim(j, 0);
    place *p = &j->places[0];
    open_place(p);
    assert_int_equal(nbi_comm_barrier(p->comm, &p->err), NB_OK);
    nbi_comm_expect(p->comm, 1, 1);
    nbi_comm_expect(p->comm, 0, 0); /* came in time */
    nbi_comm_expect(p->comm, 500000000, 25000000);
    assert_int_equal(nbi_comm_barrier(p->comm, &p->err), NB_CLOSED);
    snprintf(head, sizeof head, "rank 1 (process %d) does not get on: nothing for 0.", (int)pid);
    assert_non_null(strstr(p->err.text, head));
    nbi_comm_close(&p->comm);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    free_job(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_in_order),
        cmocka_unit_test(one_refusal_is_everybodys),
        cmocka_unit_test(different_calls_are_found_out),
        cmocka_unit_test(one_failure_is_everybodys),
        cmocka_unit_test(who_leaves_is_not_waited_for),
        cmocka_unit_test(a_killed_rank_is_named),
        cmocka_unit_test(a_stopped_rank_is_named_and_ended),
        cmocka_unit_test(a_rank_that_does_not_get_on_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
