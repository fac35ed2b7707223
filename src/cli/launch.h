/* Starting the ranks of one host. The process that the user has started stays as their launcher: it
 * runs mpiexec, hands on signals to rank 0 and the exit status to whoever waits for it.
 *
 * Launcher and ranks meet on an abstract socket, which leaves no file: every rank says who it is
 * and gets the launcher's standard output and error; what mpiexec itself has to say is shown only
 * when a rank has not come that far. */
#pragma once

#include "cli/cli.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Is this process a rank already, of mpiexec, Slurm or a launcher? */
bool nbi_launch_is_rank(void);

/* Ranks that mpiexec has started together with this process; 0: not known. */
uint32_t nbi_launch_ranks(void);

/* Runs `nibble argv` as n ranks and waits for them. Returns the exit status. `input`: rank 0 reads
 * what comes on standard input. */
int nbi_launch(const nbi_command *command, uint32_t n, char **argv, bool input);

/* On a rank: meets the launcher, when there is one. Before threads are started. */
nb_status nbi_launch_meet(uint32_t rank, nb_error *err);

#ifdef __cplusplus
}
#endif
