/* Which runner computes a step, by its number of rows. Callers: model, the file of `nibble tune`.
 *
 * The rows of one request meet in steps of any size, and their bits must not depend on that. So a
 * table holds runners of one numerics class only (nbi_moe_runner_ops.numerics): the same bits from
 * the same prepared layer. */
#pragma once

#include "moe/runner.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_MOE_BUCKETS 10u /* 1, 2, 4, ... 256 rows, and more */

typedef struct nbi_moe_bucket {
    uint32_t rows; /* at most, and more than the one before; UINT32_MAX in the last */
    const nbi_moe_runner_ops *runner;
} nbi_moe_bucket;

typedef struct nbi_moe_table {
    nbi_moe_bucket buckets[NBI_MOE_BUCKETS];
    uint32_t n; /* 0: no experts */
} nbi_moe_table;

/* Seconds of one call of a runner, for the rows of each bucket; 0 where none was measured. */
typedef struct nbi_moe_times {
    const nbi_moe_runner_ops *runner;
    double seconds[NBI_MOE_BUCKETS];
} nbi_moe_times;

/* Same bits, same prepared layer. */
bool nbi_moe_same_class(const nbi_moe_runner_ops *a, const nbi_moe_runner_ops *b);

/* One runner for every step. */
void nbi_moe_table_one(nbi_moe_table *out, const nbi_moe_runner_ops *r);

/* The runner of a step of n rows. */
const nbi_moe_runner_ops *nbi_moe_table_runner(const nbi_moe_table *t, uint32_t rows);

bool nbi_moe_table_has(const nbi_moe_table *t, const nbi_moe_runner_ops *r);

/* Of any step up to max_rows. */
size_t nbi_moe_table_workspace(const nbi_moe_table *t, const nbi_backend *b,
                               const nbi_moe_shape *shape, uint32_t max_rows);

/* Buckets next to each other with the same runner become one. */
void nbi_moe_table_join(nbi_moe_table *t);

/* "1 to 4 rows cuda_stream, to 64 cuda, more cuda_grouped"; one runner: its name. */
void nbi_moe_table_text(const nbi_moe_table *t, char *out, size_t n);

/* The runners in order of first use, "cuda_stream+cuda"; "none". */
void nbi_moe_table_names(const nbi_moe_table *t, char *out, size_t n);

/* The fastest class, and in it the fastest runner of every bucket. A class counts by the product of
 * its best times; one without a time for every bucket counts only when all are so, and then fills
 * its gaps with the runner of the bucket before. Of runners within 3 % the first in `times` is
 * taken, and so with classes: times of the same thing differ by as much. False without any time in
 * the first bucket. `rows` ascends, [n_buckets]; what is above the last belongs to the last. */
bool nbi_moe_table_choose(nbi_moe_table *out, const nbi_moe_times *times, uint32_t n_times,
                          const uint32_t *rows, uint32_t n_buckets);

#ifdef __cplusplus
}
#endif
