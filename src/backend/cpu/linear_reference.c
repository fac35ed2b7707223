/* Products in plain C: the level that all others are checked against, and the fallback for what
 * they lack. Double accumulators, ascending columns. Callers: linear.c. */
#include "backend/cpu/linear.h"

void nbi_lin_panel_reference(const nbi_lin_panel *p)
{
    const uint32_t cols = p->w->cols, pad = nbi_lin_pad(cols);
    const float *x = (const float *)p->x->data + (size_t)p->t0 * pad;
    float *row = p->scratch;
    for (uint32_t r = 0; r < p->n_rows; r++) {
        nbi_matrix_row(p->w, p->row + r, row);
        for (uint32_t t = 0; t < p->n; t++) {
            const float *xt = x + (size_t)t * pad;
            double sum = 0;
            for (uint32_t c = 0; c < cols; c++) sum += (double)row[c] * (double)xt[c];
            p->out[t * p->out_stride + r] = (float)(sum * (double)p->x->scale);
        }
    }
}
