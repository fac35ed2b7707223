/* Reading a checkpoint ahead of its use: the loader walks layers and touches the mapping wherever a
 * tensor lies; here a thread reads the same bytes before, file by file, upwards, in large pieces,
 * into the page cache (nothing is kept twice). What is in the cache is only looked at.
 *
 * Caller: model/weights.c. Tensors belong to units that are needed one after the other; while one
 * is used the next is read, no more, so that a checkpoint larger than memory is not read in vain.
 */
#pragma once

#include "format/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_ST_PIECE ((uint64_t)8 << 20) /* bytes of a read, but at the end of a range */
#define NBI_ST_GAP   ((uint64_t)1 << 20) /* ranges of a unit this near to each other are one */
#define NBI_ST_NONE  UINT32_MAX          /* of no unit: not read */

typedef struct nbi_st_ahead nbi_st_ahead;

typedef struct nbi_st_ahead_plan {
    uint32_t n_units;
    /* The unit of a tensor, below n_units, or NBI_ST_NONE. */
    uint32_t (*unit_of)(void *user, const nbi_st_tensor *tensor);
    /* NULL, or called in the thread before each piece is looked at. For tests. */
    void (*piece)(void *user, uint32_t file, uint64_t at, uint64_t bytes);
    void *user;
} nbi_st_ahead_plan;

typedef struct nbi_st_ahead_sum {
    uint64_t bytes, read_bytes; /* all; those that were not in the page cache */
    double seconds;             /* of reading them */
} nbi_st_ahead_sum;

/* The checkpoint is borrowed until the stop. */
nb_status nbi_st_ahead_start(nbi_st_ahead **out, const nbi_checkpoint *checkpoint,
                             const nbi_st_ahead_plan *plan, nb_error *err);
/* Waits until the units up to this one are in memory; the next one is begun. NB_IO when a file
 * cannot be read, or has become shorter: the mapping must not be touched then. */
nb_status nbi_st_ahead_need(nbi_st_ahead *ahead, uint32_t unit, nb_error *err);
/* Also in the middle, then what is under way is given up. */
void nbi_st_ahead_stop(nbi_st_ahead **ahead, nbi_st_ahead_sum *sum);

#ifdef __cplusplus
}
#endif
