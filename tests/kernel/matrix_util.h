/* Random matrices of every weight kind, as a mapped file would hold them (data at odd addresses),
 * and their values decoded in double by the definition of the formats, apart from the code under
 * test. */
#pragma once

#include "operator_util.h"

typedef struct mat {
    nbi_matrix m;
    void *data, *scales; /* guarded allocations; m points inside */
} mat;

/* `odd`: data and scales at addresses not aligned to their type. */
void mat_make(mat *out, nbi_weight_kind kind, uint32_t rows, uint32_t cols, bool odd);
void mat_free(mat *m);

/* W[r][c], global scale included. */
double mat_at(const nbi_matrix *m, uint32_t r, uint32_t c);

/* e4m3 and e2m1 from their bit fields. */
double mat_e4m3(uint8_t v);
double mat_e2m1(uint8_t code);

/* out[t][r] = sum_c W[r][c] * x[t][c]; x [n][x_stride], out and sizes [n][rows]. sizes (may be
 * NULL): the sum of magnitudes, what rounding errors are measured by. */
void mat_product(double *out, double *sizes, const nbi_matrix *m, const float *x, uint32_t n,
                 size_t x_stride);
