/* The proof that sums over ranks are right, and what they take (cuda_ranks.h). Callers:
 * cuda_ranks.cu. */
#include <string.h>

#include "backend/cuda/cuda_ranks.h"
#include "base/clock.h"

#define PROVE_VALUES 140001u
#define PROVE_NS     (NBI_EMULATED ? 300000000000u : 10000000000u)
#define TIME_SUMS    (NBI_EMULATED ? 1u : 16u)
#define TIME_LARGE   (1u << 20) /* values from which two sums are timed */

static float value(uint32_t rank, uint32_t turn, uint32_t i)
{
    const uint32_t v = (rank * 2654435761u) ^ (turn * 97u + i) * 40503u;
    return static_cast<float>(static_cast<int32_t>(v * 2246822519u)) * (i % 5 ? 1.0f : 1e-4f);
}

static float whole(uint32_t size, uint32_t turn, uint32_t i)
{
    float sum = value(0, turn, i);
    for (uint32_t r = 1; r < size; r++) sum += value(r, turn, i);
    return sum;
}

static nb_status waited(nbi_cuda *c, uint32_t n, nb_error *err)
{
    const bool fine = nbi_rt_sync(&c->rt);
    if (*c->rt.stop)
        return nbi_fail(err, NB_UNSUPPORTED, "a sum of %u values did not end within %.0f s", n,
                        1e-9 * PROVE_NS);
    return fine ? NB_OK : nbi_fail(err, NB_UNSUPPORTED, "%s", c->rt.error);
}

/* Recorded: done twice, from the same values. */
static void repeat(nbi_cuda *c, nbi_cuda_sum sum, float *x, const float *host, uint32_t n)
{
    nbi_rt_record(&c->rt);
    sum(c, x, n);
    nbi_rt_graph *g = nbi_rt_record_end(&c->rt);
    if (!g) return;
    for (uint32_t i = 0; i < 2; i++) {
        nbi_rt_upload(&c->rt, x, host, n * sizeof *x);
        nbi_rt_replay(&c->rt, g);
    }
    nbi_rt_graph_free(&c->rt, &g);
}

/* One sum, of values that tell rank, turn and place. */
static nb_status prove(nbi_cuda *c, nbi_cuda_sum sum, float *x, uint32_t n, uint32_t turn,
                       nb_error *err)
{
    const nbi_rank_link *link = &c->ranks->link;
    float *host = reinterpret_cast<float *>(c->stage[0]);
    for (uint32_t i = 0; i < n; i++) host[i] = value(link->rank, turn, i);
    nbi_rt_upload(&c->rt, x, host, n * sizeof *x);
    if (turn % 2)
        repeat(c, sum, x, host, n);
    else
        sum(c, x, n);
    NB_TRY(waited(c, n, err));
    nbi_rt_download(&c->rt, host, x, n * sizeof *x);
    NB_TRY(waited(c, n, err));
    for (uint32_t i = 0; i < n; i++) {
        const float want = whole(link->size, turn, i);
        if (memcmp(&want, &host[i], sizeof want) != 0)
            return nbi_fail(err, NB_UNSUPPORTED,
                            "value %u of a sum of %u over GPUs is %.9g; expected %.9g", i, n,
                            static_cast<double>(host[i]), static_cast<double>(want));
    }
    return NB_OK;
}

nb_status nbi_cuda_prove_sums(nbi_cuda *c, nbi_cuda_sum sum, nb_error *err)
{
    static const uint32_t sizes[] = {1, 515, 6144, 6144, PROVE_VALUES, 5};
    const nbi_rank_link *link = &c->ranks->link;
    nb_error mine = {};
    float *x = static_cast<float *>(nbi_rt_alloc(&c->rt, PROVE_VALUES * sizeof *x));
    nb_status st = x ? NB_OK : nbi_fail(&mine, NB_NO_MEMORY, "cuda: out of memory");
    c->rt.until_ns = nbi_now_ns() + PROVE_NS;
    for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes && st == NB_OK; i++)
        st = prove(c, sum, x, sizes[i], i, &mine);
    nbi_rt_free(&c->rt, x);
    c->rt.until_ns = 0;
    return link->agree(link->user, st, &mine, err);
}

/* ---------------------------------------------------------------- times */

static float time_one(nbi_cuda *c, nbi_cuda_sum sum, float *x, size_t n)
{
    const uint32_t sums = n >= TIME_LARGE && !NBI_EMULATED ? 2 : TIME_SUMS;
    nbi_rt_record(&c->rt);
    for (uint32_t i = 0; i < sums; i++) sum(c, x, n);
    nbi_rt_graph *g = nbi_rt_record_end(&c->rt);
    if (!g) return 0;
    nbi_rt_replay(&c->rt, g);
    const double begin = nbi_rt_seconds(&c->rt);
    nbi_rt_replay(&c->rt, g);
    const double end = nbi_rt_seconds(&c->rt);
    nbi_rt_graph_free(&c->rt, &g);
    return static_cast<float>(1e6 * (end - begin) / sums);
}

/* Into `us`, of all ranks. */
static nb_status longest(const nbi_rank_link *link, float *us, nb_error *err)
{
    float all[NBI_DEVICE_RANKS_MAX][NBI_EXCHANGE_SIZES];
    NB_TRY(link->gather(link->user, all, us, sizeof all[0], err));
    for (uint32_t r = 0; r < link->size; r++)
        for (uint32_t i = 0; i < NBI_EXCHANGE_SIZES; i++)
            if (all[r][i] > us[i]) us[i] = all[r][i];
    return NB_OK;
}

nb_status nbi_cuda_time_sums(nbi_cuda *c, nbi_cuda_sum one_shot, nbi_cuda_sum nccl,
                             nbi_exchange_times *t, nb_error *err)
{
    const nbi_rank_link *link = &c->ranks->link;
    const size_t most = t->values[NBI_EXCHANGE_SIZES - 1];
    nb_error mine = {};
    float *x = static_cast<float *>(nbi_rt_alloc(&c->rt, most * sizeof *x));
    nb_status st = x ? NB_OK : nbi_fail(&mine, NB_NO_MEMORY, "cuda: no memory to time sums");
    NB_TRY_OR(st, link->agree(link->user, st, &mine, err), done);
    c->rt.until_ns = nbi_now_ns() + PROVE_NS;
    for (uint32_t i = 0; i < NBI_EXCHANGE_SIZES; i++) {
        t->one_shot_us[i] = one_shot ? time_one(c, one_shot, x, t->values[i]) : 0;
        t->nccl_us[i] = nccl ? time_one(c, nccl, x, t->values[i]) : 0;
    }
    st = waited(c, static_cast<uint32_t>(most), &mine);
    c->rt.until_ns = 0;
    NB_TRY_OR(st, link->agree(link->user, st, &mine, err), done);
    NB_TRY_OR(st, longest(link, t->one_shot_us, err), done);
    NB_TRY_OR(st, longest(link, t->nccl_us, err), done);
done:
    nbi_rt_free(&c->rt, x);
    return st;
}
