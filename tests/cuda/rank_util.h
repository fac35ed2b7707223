/* Ranks of tests without MPI: processes that share memory (comm/shared.h). */
#pragma once

#include "comm/comm.h"

/* Runs `body` in n processes, each with its end of the comm; 0 is well. Returns how many of them
 * did not return 0. The caller must not have used a device yet: a fork would not survive it. */
typedef int (*rank_body)(nbi_comm *comm, const void *user);
uint32_t ranks_run(uint32_t n, rank_body body, const void *user);

/* In such a process: prints the sentence and ends it. */
void rank_must(nb_status st, const nb_error *err);

/* 1 where n ranks of this host can have a device each, else enough for all to share one. */
uint32_t ranks_per_device(uint32_t n);
