/* Experts of a layer, routings and the float64 oracle of MoE runners. */
#pragma once

#include "matrix_util.h"

#include "moe/runner.h"

/* Experts of one layer with everything the oracle needs. */
typedef struct moe_layer {
    mat *gate, *up, *down; /* [n_experts] */
    nbi_matrix *views;     /* [3 * n_experts] */
    nbi_moe_experts e;
} moe_layer;

/* Random experts; some at odd addresses, each with its own global and input scales. */
void moe_make(moe_layer *l, nbi_weight_kind gate_up, nbi_weight_kind down, uint32_t n_experts,
              uint32_t top_k, uint32_t hidden, uint32_t inter, bool w4a4);
void moe_free(moe_layer *l);
/* The last of the experts is from now on the shared one. */
void moe_share_last(moe_layer *l);

/* Distinct experts per row, as a router gives them; one slot in eight is -1. */
void moe_routing(const moe_layer *l, int32_t *ids, float *weights, uint32_t n);

/* out[hidden] of one row in double; NVFP4 activations rounded in float32 as the format does. */
void moe_oracle_row(const moe_layer *l, const float *x, const int32_t *ids, const float *weights,
                    double *out);

/* Fails the test at the first value whose bits differ. */
void moe_same_bits(const float *a, const float *b, size_t n, const char *what);
