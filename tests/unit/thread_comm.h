/* Ranks as threads of one process: a transport of the tests (comm/transport.h). */
#pragma once

#include "comm/comm.h"

/* One comm per rank, of one job. The thread of a rank closes its own; the others' calls then fail
 * with NB_CLOSED. */
void thread_comm_open(nbi_comm **out, uint32_t size);
