/* How fast GPUs copy to the host and to each other, measured. Callers: nibble doctor. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_TRANSFERS_MAX 16u

typedef struct nbi_transfer {
    double rate;    /* bytes per second of one large copy, the best of some; 0: not measured */
    double latency; /* seconds of a copy of 16 bytes and the wait for it, the best of some */
    bool direct;    /* between GPUs: peer access, no way through host memory */
} nbi_transfer;

typedef struct nbi_transfers {
    uint32_t n;
    char address[NBI_TRANSFERS_MAX][16];                     /* "0000:17:00.0" */
    nbi_transfer to_host[NBI_TRANSFERS_MAX];                 /* into pinned memory */
    nbi_transfer from_host[NBI_TRANSFERS_MAX];               /* out of it */
    nbi_transfer peer[NBI_TRANSFERS_MAX][NBI_TRANSFERS_MAX]; /* [from][to]; the diagonal is zero */
} nbi_transfers;

/* All GPUs that the process sees, at most NBI_TRANSFERS_MAX; a second or so for each, and 128 MiB
 * of memory of each and of the host. NB_UNSUPPORTED: this build has no CUDA, or there is no GPU. */
nb_status nbi_transfers_measure(nbi_transfers *out, nb_error *err);

#ifdef __cplusplus
}
#endif
