/* The ranks of a command that runs a model: --tp-size and --ep-size. */
#pragma once

#include "cli/cli.h"
#include "comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_ranks_options {
    uint32_t tp_size, ep_size; /* --tp-size, --ep-size; 0: 1 */
    uint32_t per_gpu;          /* --ranks-per-gpu; 0: 1 */
    const char *exchange;      /* --gpu-exchange; NULL: auto */
    bool no_batch_overlap;     /* --disable-single-batch-overlap */
    bool shard_latents;        /* --shard-latents */
    bool crowded;              /* out: more ranks than cores on this host */
} nbi_ranks_options;

/* Rows for an option table. `o` is an nbi_ranks_options *. */
#define NBI_RANKS_OPTION_ROWS(o)                                                                  \
    {"tp-size",                                                                                   \
     NBI_OPT_U32,                                                                                 \
     &(o)->tp_size,                                                                               \
     "N",                                                                                         \
     "ranks that run the model together, one process each; on one\nhost nibble starts them "      \
     "through mpiexec (default 1)",                                                               \
     false},                                                                                      \
        {"disable-single-batch-overlap",                                                          \
         NBI_OPT_FLAG,                                                                            \
         &(o)->no_batch_overlap,                                                                  \
         NULL,                                                                                    \
         "on GPUs: nothing begins beside a sum over ranks",                                       \
         false},                                                                                  \
        {"shard-latents",                                                                         \
         NBI_OPT_FLAG,                                                                            \
         &(o)->shard_latents,                                                                     \
         NULL,                                                                                    \
         "MLA: ranks split q_a, kv_a and the indexer's\nproducts, too; a sum more for "           \
         "each "                                                                                  \
         "layer",                                                                                 \
         false},                                                                                  \
        {"tensor-parallel-size", NBI_OPT_U32, &(o)->tp_size, "N", "the same", false},             \
        {"ranks-per-gpu",                                                                         \
         NBI_OPT_U32,                                                                             \
         &(o)->per_gpu,                                                                           \
         "N",                                                                                     \
         "ranks of a host that share a GPU, for tests (default 1)",                               \
         false},                                                                                  \
        {"gpu-exchange",                                                                          \
         NBI_OPT_STRING,                                                                          \
         &(o)->exchange,                                                                          \
         "NAME",                                                                                  \
         "how sums go between the GPUs of ranks: auto (default): the\nfaster one for each "       \
         "size; one-shot: over their memory, on\none host; nccl; staged: through the host",       \
         false},                                                                                  \
    {                                                                                             \
        "ep-size", NBI_OPT_U32, &(o)->ep_size, "M",                                               \
            "parts of the ranks that whole experts are dealt to; divides\n--tp-size (default 1)", \
            false                                                                                 \
    }

/* Comes to be one of the ranks: starts them, or joins those that were started. -1: go on, with *out
 * NULL for one rank; else the exit status. `argv` is the command's own, from its name on; taken
 * before nbi_cli_parse(), which moves it, by nbi_ranks_keep(). Called by the main thread before it
 * starts others. */
int nbi_ranks_enter(nbi_comm **out, nbi_ranks_options *o, const nbi_command *command, char **argv,
                    bool input);

/* A copy of argv with a NULL at the end, from nbi_malloc; NULL when out of memory. */
char **nbi_ranks_keep(int argc, char **argv);

/* Is this rank one of those that follow? They log warnings only (all with debug), with their
 * number.
 */
bool nbi_ranks_follows(const nbi_comm *comm);

/* What ranks mean for an engine's options. */
void nbi_ranks_apply(nbi_comm *comm, const nbi_ranks_options *o, nb_engine_options *engine);

/* The end of a command that every rank runs alike, by a failure: the others hear of it, one rank
 * prints it. `comm` may be NULL. Returns the exit status. */
int nbi_ranks_fail(nbi_comm *comm, const nbi_command *command, const nb_error *err);

/* On a rank that is not 0: opens an engine and follows. Returns the exit status. */
int nbi_ranks_follow(nbi_comm *comm, const nb_engine_options *o);

#ifdef __cplusplus
}
#endif
