/* A MoE runner on a layer, batches of rows and the float64 oracle: shared by the tests of runners.
 */
#pragma once

#include "cuda/gpu_util.h"
#include "moe_util.h"

/* For 320 rows of layers with sides up to 4,096. */
extern const nbi_limits gpu_moe_limits;

/* A runner, and what it has prepared of a layer. */
typedef struct gpu_moe {
    nbi_backend *b;
    const nbi_moe_runner_ops *ops;
    nbi_moe_layer *layer;
    const moe_layer *l;
} gpu_moe;

/* Fails the test when the name does not take the layer. */
gpu_moe gpu_moe_prepare(nbi_backend *b, const char *name, const moe_layer *l);
void gpu_moe_release(gpu_moe *p);

/* n rows of x with their ids and weights, top_k each: out [n][hidden] (malloc). Guard bands of the
 * results and of the workspace are checked. */
float *gpu_moe_run(const gpu_moe *p, const float *x, const int32_t *ids, const float *weights,
                   uint32_t n);

/* One batch of a layer. */
typedef struct gpu_moe_batch {
    float *x, *weights;
    int32_t *ids;
    uint32_t n;
} gpu_moe_batch;

gpu_moe_batch gpu_moe_batch_make(const moe_layer *l, uint32_t n);
void gpu_moe_batch_free(gpu_moe_batch *b);

/* Every row of out against the oracle. */
void gpu_moe_check(const gpu_moe *p, const gpu_moe_batch *b, const float *out, double bound);
