/* Kernels whose blocks form clusters, for test_cuda_cluster.c: over the runtime, without a backend.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CLUSTER_MOST  16u
#define CLUSTER_SLICE 16u /* words that a block sends to others */

/* What a block saw. */
typedef struct cluster_seen {
    uint32_t rank, size;
    uint32_t own;                               /* what the block before it stored here */
    uint32_t read;                              /* what it read from the block behind it */
    uint32_t board[CLUSTER_MOST];               /* what all stored here, before they arrived */
    uint32_t sent[CLUSTER_MOST][CLUSTER_SLICE]; /* slices by multicast; 7: none came */
    uint32_t named;                             /* stored before a named barrier of the block */
    float posted[2]; /* by the block two before it, which did not arrive anywhere */
} cluster_seen;

enum cluster_fault {
    CLUSTER_SOUND,
    CLUSTER_STAYS_AWAY, /* a block waits for what nobody sends */
    CLUSTER_TOO_EARLY   /* memory of a block that may not have begun */
};

/* False with a sentence on stderr. `launches` launches in a row, stamped or not, each between two
 * ordinary ones; *stamped: launches that have a stamp, in order of time, else 0. */
bool cluster_run(uint32_t cluster, uint32_t n_clusters, enum cluster_fault fault, uint32_t launches,
                 bool stamps, cluster_seen *seen, uint32_t *stamped);

/* Of CLUSTER_MOST at most; 0: the device has no clusters. */
uint32_t cluster_most(void);

#ifdef __cplusplus
}
#endif
