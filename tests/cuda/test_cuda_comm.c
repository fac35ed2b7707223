/* Sums over ranks on the device: several processes of this host, each with a device, or all with
 * one where there is one only. Every form of the exchange gives the bits of the sum in the order of
 * ranks. With --bench [EXCHANGE]: what sums, and norms behind them, take in recorded steps. */
#include <unistd.h>

#include "backend/nccl_api.h"
#include "base/clock.h"
#include "comm/device_ranks.h"
#include "cuda/gpu_util.h"
#include "cuda/rank_util.h"

#define MOST  140000u /* values; more than one piece of any form */
#define STEPS 5u

static uint32_t per_device[5]; /* [ranks] */

static float value(uint32_t rank, uint32_t turn, uint32_t i)
{
    uint32_t v = (rank * 2654435761u) ^ ((i + 977u * turn) * 40503u + 7);
    v ^= v >> 15;
    v *= 2246822519u;
    return ((float)(v >> 8) * 0x1p-24f - 0.5f) * (i % 7 ? 1.0f : 1e6f);
}

static float sum_value(uint32_t size, uint32_t turn, uint32_t i)
{
    float sum = value(0, turn, i);
    for (uint32_t r = 1; r < size; r++) sum += value(r, turn, i);
    return sum;
}

static nbi_backend *open_device(nbi_comm *comm, const char *exchange)
{
    const nbi_limits limits = {.max_rows = 64,
                               .max_seqs = 64,
                               .max_context = 256,
                               .max_logit_rows = 1,
                               .max_linear_cols = 64,
                               .max_linear_rows = 64,
                               .vocab = 64};
    nbi_backend_options o = {.cpu_level = NBI_CPU_LEVEL_COUNT,
                             .ranks_per_device = per_device[nbi_comm_size(comm)],
                             .exchange = exchange};
    nbi_backend *b = NULL;
    nb_error err = {0};
    nbi_comm_device(comm, &o);
    rank_must(nbi_backend_open(&b, "cuda", &o, &err), &err);
    rank_must(nbi_comm_join_device(comm, b, &err), &err);
    rank_must(b->ops->reserve(b, &limits, &err), &err);
    return b;
}

static uint32_t check_sum(nbi_backend *b, nbi_comm *comm, float *x, float *host, uint32_t n,
                          uint32_t turn)
{
    const uint32_t size = nbi_comm_size(comm);
    uint32_t wrong = 0;
    nb_error err = {0};
    for (uint32_t i = 0; i < n + 1; i++) host[i] = value(nbi_comm_rank(comm), turn, i);
    b->ops->upload(b, x, host, (n + 1) * sizeof *x);
    b->ops->sum_ranks(b, &(nbi_sum_ranks_args){.x = x, .n = n});
    rank_must(b->ops->sync(b, &err), &err);
    const float behind = host[n];
    b->ops->download(b, host, x, (n + 1) * sizeof *x);
    for (uint32_t i = 0; i < n; i++) {
        const float want = sum_value(size, turn, i);
        wrong += memcmp(&want, &host[i], sizeof want) != 0;
    }
    wrong += memcmp(&behind, &host[n], sizeof behind) != 0;
    if (wrong) fprintf(stderr, "%u of %u values of a sum are wrong\n", wrong, n);
    return wrong;
}

/* Parts of different widths, also none. */
static uint32_t check_join(nbi_backend *b, nbi_comm *comm, float *x, float *host, uint32_t stride)
{
    enum { ROWS = 3 };
    const uint32_t size = nbi_comm_size(comm), rank = nbi_comm_rank(comm);
    uint32_t first[NBI_RANKS_MAX + 1] = {0}, wrong = 0;
    nb_error err = {0};
    for (uint32_t r = 0; r < size; r++)
        first[r + 1] = first[r] + (r == 0 ? stride : r + 1 == size ? 0 : stride - 13 * r);
    const uint32_t width = first[size];
    float *in = x, *out = x + (size_t)ROWS * stride;
    for (uint32_t i = 0; i < ROWS * stride; i++) host[i] = value(rank, 9, i);
    b->ops->upload(b, in, host, ROWS * stride * sizeof *x);
    b->ops->join_ranks(b, &(nbi_join_ranks_args){.out = out,
                                                 .in = in,
                                                 .first = first,
                                                 .n_rows = ROWS,
                                                 .width = width,
                                                 .in_stride = stride});
    rank_must(b->ops->sync(b, &err), &err);
    b->ops->download(b, host, out, (size_t)ROWS * width * sizeof *x);
    for (uint32_t t = 0; t < ROWS; t++)
        for (uint32_t r = 0; r < size; r++)
            for (uint32_t i = 0; i < first[r + 1] - first[r]; i++)
                wrong += host[t * width + first[r] + i] != value(r, 9, t * stride + i);
    if (wrong) fprintf(stderr, "%u values of joined rows of %u are wrong\n", wrong, stride);
    return wrong;
}

/* One sequence with all it has: one row or two. */
static nbi_batch batch_of(uint32_t n)
{
    static const int32_t zeros[2] = {0}, pos[2] = {0, 1}, first[3][2] = {{0, 0}, {0, 1}, {0, 2}};
    static int32_t fault[2];
    return (nbi_batch){.n_rows = n,
                       .n_seqs = 1,
                       .page_stride = 1,
                       .max_len = n,
                       .ids = zeros,
                       .pos = pos,
                       .row_seq = zeros,
                       .seq_first = first[n],
                       .seq_len = first[n] + 1,
                       .page_table = zeros,
                       .logit_rows = zeros,
                       .row_fault = fault};
}

/* The same sums in steps of the same counts: from the third on what was recorded. */
static uint32_t check_steps(nbi_backend *b, nbi_comm *comm, float *x, float *host)
{
    const nbi_batch batch = batch_of(2);
    const uint32_t n = 1500, size = nbi_comm_size(comm);
    uint32_t wrong = 0;
    nb_error err = {0};
    for (uint32_t turn = 0; turn < STEPS; turn++) {
        const nbi_batch *device;
        for (uint32_t i = 0; i < n; i++) host[i] = value(nbi_comm_rank(comm), turn, i);
        b->ops->upload(b, x, host, n * sizeof *x);
        if (b->ops->step_begin(b, &batch, 0, &device)) {
            b->ops->sum_ranks(b, &(nbi_sum_ranks_args){.x = x, .n = n});
            b->ops->sum_ranks(b, &(nbi_sum_ranks_args){.x = x, .n = 700});
        }
        rank_must(b->ops->step_end(b, &err), &err);
        rank_must(b->ops->sync(b, &err), &err);
        b->ops->download(b, host, x, n * sizeof *x);
        for (uint32_t i = 0; i < n; i++) {
            const float once = sum_value(size, turn, i);
            float want = once;
            for (uint32_t r = 1; r < size && i < 700; r++) want += once;
            wrong += memcmp(&want, &host[i], sizeof want) != 0;
        }
    }
    if (wrong) fprintf(stderr, "%u values of sums in steps are wrong\n", wrong);
    return wrong;
}

/* A norm that takes the sum of its delta along, against both apart: the same bits. */
static uint32_t check_norm(nbi_backend *b, nbi_comm *comm, float *host, uint32_t rows,
                           uint32_t width)
{
    const uint32_t n = rows * width, rank = nbi_comm_rank(comm);
    float *x = b->ops->alloc(b, 5 * (size_t)n * sizeof *x), *delta = x + n, *x_out = delta + n,
          *out = x_out + n, *weight = out + n;
    float *apart = malloc(2 * (size_t)n * sizeof *apart);
    uint32_t wrong = !x || !apart;
    nb_error err = {0};
    for (uint32_t turn = 0; turn < 3 && !wrong; turn++) {
        for (uint32_t once = 0; once < 2; once++) {
            for (uint32_t i = 0; i < n; i++) host[i] = value(9, turn, i);
            b->ops->upload(b, x, host, n * sizeof *x);
            b->ops->upload(b, weight, host, width * sizeof *x);
            for (uint32_t i = 0; i < n; i++) host[i] = value(rank, turn, i);
            b->ops->upload(b, delta, host, n * sizeof *x);
            b->ops->sum_ranks(b, &(nbi_sum_ranks_args){.x = delta, .n = n, .once = once});
            b->ops->rmsnorm(b, &(nbi_rmsnorm_args){.out = out,
                                                   .x = x,
                                                   .x_out = x_out,
                                                   .delta = delta,
                                                   .weight = weight,
                                                   .eps = 1e-5f,
                                                   .n_rows = rows,
                                                   .width = width,
                                                   .x_stride = width,
                                                   .out_stride = width});
            rank_must(b->ops->sync(b, &err), &err);
            b->ops->download(b, once ? host : apart, x_out, 2 * (size_t)n * sizeof *x);
        }
        wrong += memcmp(host, apart, 2 * (size_t)n * sizeof *host) != 0;
    }
    if (wrong) fprintf(stderr, "a norm of %u x %u with its sum differs\n", rows, width);
    b->ops->release(b, x, 5 * (size_t)n * sizeof *x);
    free(apart);
    return wrong;
}

/* A sum for a norm that does not come is made all the same. */
static uint32_t check_no_norm(nbi_backend *b, nbi_comm *comm, float *x, float *host)
{
    const uint32_t n = 1024;
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < n; i++) host[i] = value(nbi_comm_rank(comm), 5, i);
    b->ops->upload(b, x, host, n * sizeof *x);
    b->ops->sum_ranks(b, &(nbi_sum_ranks_args){.x = x, .n = n, .once = true});
    b->ops->download(b, host, x, n * sizeof *x);
    for (uint32_t i = 0; i < n; i++) {
        const float want = sum_value(nbi_comm_size(comm), 5, i);
        wrong += memcmp(&want, &host[i], sizeof want) != 0;
    }
    if (wrong) fprintf(stderr, "%u values of a sum without its norm are wrong\n", wrong);
    return wrong;
}

static int body(nbi_comm *comm, const void *user)
{
    static const uint32_t lengths[] = {1, 511, 512, 513, 6144, 31107, MOST - 1, 2};
    nbi_backend *b = open_device(comm, user);
    float *x = b->ops->alloc(b, MOST * sizeof *x), *host = malloc(MOST * sizeof *host);
    uint32_t wrong = !x || !host;
    for (uint32_t k = 0; k < sizeof lengths / sizeof *lengths && !wrong; k++)
        wrong += check_sum(b, comm, x, host, lengths[k], k);
    for (uint32_t rows = 1; rows <= 64 && !wrong; rows *= 4)
        wrong += check_sum(b, comm, x, host, rows * 384, rows);
    if (!wrong) wrong += check_join(b, comm, x, host, 701);
    if (!wrong) wrong += check_join(b, comm, x, host, 40);
    if (!wrong) wrong += check_steps(b, comm, x, host);
    if (!wrong) wrong += check_norm(b, comm, host, 1, 6144);
    if (!wrong) wrong += check_norm(b, comm, host, 1, 300);
    if (!wrong) wrong += check_norm(b, comm, host, 5, 2048);
    if (!wrong) wrong += check_norm(b, comm, host, 31, 516);
    if (!wrong) wrong += check_norm(b, comm, host, 2, 301); /* not by packets */
    if (!wrong) wrong += check_no_norm(b, comm, x, host);
    b->ops->release(b, x, MOST * sizeof *x);
    nbi_backend_close(&b);
    free(host);
    return wrong != 0;
}

static void test_one_shot(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(2, body, "one-shot"), 0);
    assert_int_equal(ranks_run(3, body, "one-shot"), 0);
    assert_int_equal(ranks_run(2, body, "one-shot-norms"), 0);
}

static void test_staged(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(2, body, "staged"), 0);
    assert_int_equal(ranks_run(3, body, "staged"), 0);
}

/* The last rank leaves in the middle: the others are told, also those whose kernels wait for it. */
static int lose(nbi_comm *comm, const void *user)
{
    nbi_backend *b = open_device(comm, user);
    float *x = b->ops->alloc(b, 1000 * sizeof *x);
    nb_error err = {0};
    for (uint32_t turn = 0; turn < 3; turn++) {
        if (turn == 2 && nbi_comm_rank(comm) + 1 == nbi_comm_size(comm)) {
            nbi_comm_fail(comm, "the disk is on fire");
            break;
        }
        b->ops->sum_ranks(b, &(nbi_sum_ranks_args){.x = x, .n = 1000});
        const nb_status st = b->ops->sync(b, &err);
        if (turn < 2) rank_must(st, &err);
        if (turn == 2 && (st != NB_CLOSED || !strstr(err.text, "the disk is on fire"))) {
            fprintf(stderr, "heard %d: %s\n", (int)st, err.text);
            _exit(1);
        }
    }
    b->ops->release(b, x, 1000 * sizeof *x);
    nbi_backend_close(&b);
    return 0;
}

static void test_lost(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(2, lose, "one-shot"), 0);
    assert_int_equal(ranks_run(2, lose, "staged"), 0);
}

static int refuse(nbi_comm *comm, const void *user)
{
    const nbi_backend_options o = {.cpu_level = NBI_CPU_LEVEL_COUNT,
                                   .ranks_per_device = nbi_comm_size(comm),
                                   .exchange = user};
    nbi_backend *b = NULL;
    nb_error err = {0};
    rank_must(nbi_backend_open(&b, "cuda", &o, &err), &err);
    const nb_status st = nbi_comm_join_device(comm, b, &err);
    nbi_backend_close(&b);
    return st != NB_INVALID || !strstr(err.text, "--gpu-exchange is \"pigeons\"");
}

/* What NCCL cannot do is said: it is not there, or the GPUs are emulated or shared. */
static int refuse_nccl(nbi_comm *comm, const void *user)
{
    const nbi_backend_options o = {.cpu_level = NBI_CPU_LEVEL_COUNT,
                                   .ranks_per_device = nbi_comm_size(comm),
                                   .exchange = user};
    nbi_backend *b = NULL;
    nb_error err = {0};
    rank_must(nbi_backend_open(&b, "cuda", &o, &err), &err);
    const nb_status st = nbi_comm_join_device(comm, b, &err);
    nbi_backend_close(&b);
    if (st == NB_UNSUPPORTED && strstr(err.text, "--gpu-exchange nccl: rank 0: NCCL ")) return 0;
    fprintf(stderr, "heard %d: %s\n", (int)st, err.text);
    return 1;
}

static void test_refused(void **state)
{
    (void)state;
    assert_int_equal(ranks_run(2, refuse, "pigeons"), 0);
    assert_int_equal(ranks_run(2, refuse_nccl, "nccl"), 0);
}

/* With a GPU for each rank and a library: the bits of the others, whole and in slices; a rank that
 * leaves. */
static void test_nccl(void **state)
{
    (void)state;
    const nbi_nccl *nccl = NULL;
    if (NBI_CUDA_EMULATED || per_device[2] > 1 || nbi_nccl_load(&nccl, NULL, NULL) != NB_OK) skip();
    assert_int_equal(ranks_run(2, body, "nccl"), 0);
    assert_int_equal(ranks_run(2, body, "nccl-slices"), 0);
    assert_int_equal(ranks_run(2, body, "auto"), 0);
    assert_int_equal(ranks_run(2, lose, "nccl"), 0);
}

/* ---------------------------------------------------------------- --bench */

enum { ROUNDS = 100, REPLAYS = 20 };

/* One of the ways to end an attention or experts, `ROUNDS` times in a step: the sum alone; the sum
 * and the norm of it; the norm alone. */
enum work { SUM, SUM_NORM, NORM, WORKS };

static void call(nbi_backend *b, float *x, uint32_t n, enum work work, uint32_t round)
{
    const size_t side = round % 2 ? (size_t)n : 0;
    if (work != NORM) b->ops->sum_ranks(b, &(nbi_sum_ranks_args){.x = x, .n = n, .once = true});
    if (work == SUM) return;
    const uint32_t rows = n > 6144 ? n / 6144 : 1;
    b->ops->rmsnorm(b, &(nbi_rmsnorm_args){.out = x + 3 * (size_t)n,
                                           .x = x + n + side,
                                           .x_out = x + 2 * (size_t)n - side,
                                           .delta = x,
                                           .weight = x + 4 * (size_t)n,
                                           .eps = 1e-5f,
                                           .n_rows = rows,
                                           .width = n / rows,
                                           .x_stride = n / rows,
                                           .out_stride = n / rows});
}

/* Microseconds of one, in a step that was recorded. */
static double time_step(nbi_backend *b, float *x, uint32_t n, enum work work)
{
    const nbi_batch batch = batch_of(1);
    static uint32_t pass;
    uint64_t begin = 0;
    nb_error err = {0};
    pass++; /* another list of calls */
    for (uint32_t i = 0; i < 3 + REPLAYS; i++) {
        const nbi_batch *device;
        if (i == 3) {
            rank_must(b->ops->sync(b, &err), &err);
            begin = nbi_now_ns();
        }
        if (b->ops->step_begin(b, &batch, pass, &device))
            for (uint32_t k = 0; k < ROUNDS; k++) call(b, x, n, work, k);
        rank_must(b->ops->step_end(b, &err), &err);
    }
    rank_must(b->ops->sync(b, &err), &err);
    return 1e-3 * (double)(nbi_now_ns() - begin) / (ROUNDS * REPLAYS);
}

static int bench(nbi_comm *comm, const void *user)
{
    static const uint32_t kb[] = {4, 8, 12, 16, 24, 48, 96, 192, 384, 768, 1536, 6144, 24576};
    static const char *const names[] = {"sum", "sum and norm", "norm"};
    const bool staged = !strcmp(user, "staged"), nccl = !strcmp(user, "nccl");
    nbi_backend *b = open_device(comm, user);
    const size_t most = (size_t)5 * 24576 * 256;
    float *x = b->ops->alloc(b, most * sizeof *x);
    if (!x) return 1;
    for (uint32_t k = 0; k < sizeof kb / sizeof *kb; k++) {
        for (uint32_t work = SUM; work < WORKS; work++) {
            if ((kb[k] > 1536 || staged) && (work != SUM || kb[k] > (nccl ? 24576 : 1536)))
                continue;
            const double us = time_step(b, x, kb[k] * 256, (enum work)work);
            if (nbi_comm_rank(comm) == 0)
                printf("%s: %s of %u KB over %u ranks on %s: %.2f us\n", (const char *)user,
                       names[work], kb[k], nbi_comm_size(comm), b->description, us);
            fflush(stdout);
        }
    }
    b->ops->release(b, x, most * sizeof *x);
    nbi_backend_close(&b);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_shot), cmocka_unit_test(test_staged), cmocka_unit_test(test_lost),
        cmocka_unit_test(test_refused),  cmocka_unit_test(test_nccl),
    };
    for (uint32_t n = 2; n <= 4; n++) per_device[n] = ranks_per_device(n);
    if (argc > 2 && !strcmp(argv[1], "--bench")) return (int)ranks_run(2, bench, argv[2]);
    if (argc > 1 && !strcmp(argv[1], "--bench"))
        return (int)(ranks_run(2, bench, "one-shot") + ranks_run(2, bench, "one-shot-norms") +
                     ranks_run(2, bench, "nccl") + ranks_run(2, bench, "staged"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
