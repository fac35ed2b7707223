/* DSA indexer: keys, queries and what a right selection is. The oracle computes every score in
 * float64; a chosen set is right when it is what the oracle would choose up to scores closer than
 * rounding. */
#pragma once

#include "operator_util.h"

typedef struct index_case {
    uint32_t heads, dim, rope, topk;
    nbi_dtype cache;
    bool interleaved;
} index_case;

typedef struct index_data {
    index_case c;
    op_batch batch;
    op_kv keys; /* what kv points to */
    nbi_kv_layer kv;
    nbi_rope_rows rope;
    float *q, *w, *cs, *sn; /* q not yet rotated */
} index_data;

void ix_make(index_data *d, const index_case *c, const uint32_t *lengths, const uint32_t *rows,
             uint32_t n_seqs);
void ix_free(index_data *d);
nbi_limits ix_limits(const index_data *d);
void ix_check(const index_data *d, uint32_t t, const int32_t *sel);
