/* Ranks of a command: started, joined, followed. */
#include "cli/ranks.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "cli/launch.h"

char **nbi_ranks_keep(int argc, char **argv)
{
    char **kept = nbi_calloc((size_t)argc + 1, sizeof *kept);
    if (kept) memcpy(kept, argv, (size_t)argc * sizeof *kept);
    return kept;
}

typedef struct cores {
    cpu_set_t set;
    uint32_t host;
} cores;

/* Ranks of a host that may all run on the same cores take equal shares of them. */
static nb_status share_cores(nbi_comm *comm, bool *crowded, nb_error *err)
{
    const uint32_t n = nbi_comm_local_size(comm), size = nbi_comm_size(comm);
    cores own, *all = nbi_calloc(size, sizeof *all);
    NB_ASSERT(n > 0 && size > 0);
    if (!all) return nbi_fail(err, NB_NO_MEMORY, "out of memory");
    memset(&own, 0, sizeof own);
    own.host = nbi_comm_host(comm);
    if (sched_getaffinity(0, sizeof own.set, &own.set) != 0) CPU_ZERO(&own.set);
    nb_status st = nbi_comm_gather(comm, all, &own, sizeof own, err);
    bool same = st == NB_OK;
    for (uint32_t r = 0; r < size && same; r++)
        same = all[r].host != own.host || CPU_EQUAL(&own.set, &all[r].set);
    nbi_free(all);
    const uint32_t share = (uint32_t)CPU_COUNT(&own.set) / n;
    *crowded = same && !share;
    if (!same || !share) return st;
    cpu_set_t mine;
    CPU_ZERO(&mine);
    uint32_t begin = share * nbi_comm_local_rank(comm), seen = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &own.set)) continue;
        if (seen >= begin && seen < begin + share) CPU_SET(cpu, &mine);
        seen++;
    }
    sched_setaffinity(0, sizeof mine, &mine);
    return st;
}

/* A rank that is not 0 has nothing to finish when another one is lost. */
static void end_with_it(void *user, const nb_error *why)
{
    const nbi_comm *comm = user;
    if (nbi_comm_speaks(comm)) nbi_log(NB_LOG_ERROR, "%s", why->text);
    _exit(NBI_EXIT_FAILED);
}

static nb_status join(nbi_comm **out, nbi_ranks_options *o, nb_error *err)
{
    nbi_comm *comm = NULL;
    const uint32_t wanted = o->tp_size ? o->tp_size : 1;
    NB_TRY(nbi_comm_open(&comm, "mpi", err));
    nb_status st = nbi_launch_meet(nbi_comm_rank(comm), err);
    if (st == NB_OK && nbi_comm_size(comm) != wanted)
        st = nbi_fail(err, NB_INVALID, "started as one of %u ranks, but --tp-size is %u",
                      nbi_comm_size(comm), wanted);
    if (st == NB_OK && nbi_comm_size(comm) > 1) st = share_cores(comm, &o->crowded, err);
    if (st != NB_OK) {
        nbi_comm_close(&comm);
        return st;
    }
    *out = comm;
    return NB_OK;
}

int nbi_ranks_enter(nbi_comm **out, nbi_ranks_options *o, const nbi_command *command, char **argv,
                    bool input)
{
    nb_error err = {0};
    nbi_shard shard;
    const uint32_t n = o->tp_size ? o->tp_size : 1;
    *out = NULL;
    if (n > NBI_RANKS_MAX)
        return nbi_cli_usage(command, "--tp-size is %u; expected 1 to %u", n, NBI_RANKS_MAX);
    if (o->shard_latents && n == 1)
        return nbi_cli_usage(command, "--shard-latents: one rank has nothing to split; expected "
                                      "--tp-size 2 or more");
    if (nbi_shard_make(&shard, 0, n, o->ep_size, &err) != NB_OK)
        return nbi_cli_usage(command, "--ep-size: %s", err.text);
#if !NBI_WITH_MPI
    if (n > 1) {
        (void)nbi_comm_open(out, "mpi", &err);
        return nbi_cli_fail(command, &err);
    }
#endif
    if (n == 1 && nbi_launch_ranks() > 1)
        return nbi_cli_usage(command, "started as one of %u ranks, but --tp-size is 1",
                             nbi_launch_ranks());
    if (n == 1 || !nbi_launch_is_rank()) return n > 1 ? nbi_launch(command, n, argv, input) : -1;
    if (join(out, o, &err) == NB_OK) return -1;
    return nbi_cli_fail(command, &err);
}

bool nbi_ranks_follows(const nbi_comm *comm)
{
    return comm && nbi_comm_rank(comm) > 0;
}

void nbi_ranks_apply(nbi_comm *comm, const nbi_ranks_options *o, nb_engine_options *engine)
{
    engine->ranks = comm;
    engine->ep_size = o->ep_size;
    engine->shard_latents = o->shard_latents;
    engine->ranks_per_gpu = o->per_gpu;
    engine->gpu_exchange = o->exchange;
    engine->disable_single_batch_overlap = o->no_batch_overlap;
    if (o->crowded && !engine->n_threads) engine->n_threads = 1;
    if (nbi_ranks_follows(comm)) nbi_cli_log_follow(nbi_comm_rank(comm));
}

int nbi_ranks_fail(nbi_comm *comm, const nbi_command *command, const nb_error *err)
{
    nb_error why;
    if (!comm) return nbi_cli_fail(command, err);
    /* Where all come to the same end, rank 0 says it; also where it alone does, since it lives. */
    const bool heard = nbi_comm_lost(comm, &why) != NB_OK;
    bool speaks = nbi_comm_rank(comm) == 0;
    if (heard && strncmp(why.text, "rank 0: ", 8) != 0) speaks = nbi_comm_speaks(comm);
    nbi_comm_fail(comm, err->text);
    return speaks ? nbi_cli_fail(command, err) : NBI_EXIT_FAILED;
}

int nbi_ranks_follow(nbi_comm *comm, const nb_engine_options *o)
{
    nb_error err = {0};
    nb_engine *engine = NULL;
    nb_engine_options options = *o;
    signal(SIGINT, SIG_IGN); /* rank 0 says when it is over */
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    options.progress = NULL;
    nbi_comm_on_lost(comm, end_with_it, comm);
    nb_status st = nb_engine_open(&engine, &options, &err);
    if (st == NB_OK) st = nb_engine_follow(engine, &err);
    nb_engine_close(&engine);
    nbi_comm_close(&comm);
    return st == NB_OK ? NBI_EXIT_OK : NBI_EXIT_FAILED;
}
