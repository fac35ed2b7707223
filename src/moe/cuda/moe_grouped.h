/* Many rows of an MoE layer: what the kernels of a pass share. Callers: moe_grouped.cu, which says
 * how a pass goes, and moe_wide.cu. */
#pragma once

#include "moe/cuda/moe_cuda.h"

/* Tokens of one expert that a block takes. */
struct nbi_moe_token_tile {
    uint32_t expert, first, n; /* places */
};

struct nbi_moe_totals {
    uint32_t n_tiles, n_places;
};

/* Device memory of one pass. */
struct nbi_moe_work {
    uint32_t *count; /* [segments][n_experts] */
    uint32_t *pair;  /* [pairs] at a place */
    uint32_t *place; /* [pairs] of a pair that has an expert */
    nbi_moe_token_tile *tiles;
    nbi_moe_totals *total;
    char *xc, *hc;  /* converted rows */
    float *xe, *he; /* 2^e, [rows][chunks] */
    float *h, *y;   /* [pairs][inter], [pairs][hidden]: one memory, h ends where y begins to live */
};

/* moe_wide.cu: products on warpgroups, compute capability 9.0. */
struct nbi_moe_wide_args {
    nbi_moe_work w;
    const int32_t *ids; /* [n_pairs] */
    const float *x;     /* [n_rows][hidden] */
    uint32_t top_k, n_experts, n_rows, n_pairs;
    uint32_t n_tiles; /* at most */
};

/* Tokens of a tile at most. */
uint32_t nbi_moe_wide_tokens(const nbi_moe_shape *shape);

/* x to h, behind begin and place; h to y. */
void nbi_moe_wide_gate_up(nbi_cuda *c, const nbi_moe_wide_args &a, const nbi_moe_weights &weights);
void nbi_moe_wide_down(nbi_cuda *c, const nbi_moe_wide_args &a, const nbi_moe_weights &weights);
