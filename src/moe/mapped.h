/* A layer for runners that read the mapped weights in place: views only. Columns of larger matrices
 * (the down projections of a rank) are copied side by side. Included by those runners. */
#pragma once

#include "moe/runners.h"

#ifdef __cplusplus
extern "C" {
#endif

struct nbi_moe_layer {
    nbi_moe_experts experts; /* its arrays point into `matrices` */
    nbi_matrix *matrices;    /* [3 * n_experts] gate, up, down */
    void *block;             /* copied columns, or NULL */
    size_t block_bytes;
};

/* Table entries `prepare` and `release` of such a runner. */
nb_status nbi_moe_mapped_prepare(nbi_backend *b, nbi_moe_layer **out, const nbi_moe_experts *e,
                                 nb_error *err);
void nbi_moe_mapped_release(nbi_backend *b, nbi_moe_layer **layer);

#ifdef __cplusplus
}
#endif
