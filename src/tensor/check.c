/* Scales of a matrix, all of them: a NaN, negative, infinite or zero scale is found at load, not as
 * garbage in an answer.
 *
 * Called by the model opener and inspect for every matrix. The NVFP4 scan runs at memory speed: a
 * byte loop without branches that the compiler vectorises. */
#include <math.h>
#include <string.h>

#include "tensor/load.h"

/* The first E4M3 byte that is negative or NaN; n when there is none. */
static uint64_t bad_e4m3(const uint8_t *p, uint64_t n)
{
    enum { STRIDE = 4096 };
    for (uint64_t i = 0; i < n; i += STRIDE) {
        uint64_t end = n - i < STRIDE ? n : i + STRIDE;
        uint8_t bad = 0; /* bit 7: the byte is above 0x7f, or is 0x7f */
        for (uint64_t k = i; k < end; k++) bad |= (uint8_t)(p[k] | (p[k] + 1));
        for (uint64_t k = i; bad & 0x80 && k < end; k++)
            if (p[k] >= 0x7f) return k;
    }
    return n;
}

static const char *describe(float f)
{
    return isnan(f) ? "NaN" : isinf(f) ? "infinite" : f < 0 ? "negative" : "zero";
}

/* Rows whose scales lie side by side are one run. */
static nb_status check_nvfp4(const nbi_matrix *m, const char *name, nb_error *err)
{
    const uint32_t per_row = m->cols / NBI_NVFP4_BLOCK;
    const uint64_t runs = m->scale_stride ? m->rows : 1,
                   n = m->scale_stride ? per_row : (uint64_t)m->rows * per_row;
    for (uint64_t i = 0; i < runs; i++) {
        const uint8_t *p = (const uint8_t *)m->scales + i * m->scale_stride;
        const uint64_t at = bad_e4m3(p, n), all = i * n + at;
        if (at < n)
            return nbi_fail(
                err, NB_CORRUPT,
                "%s.weight_scale: the scale of row %llu, block %llu is %s (byte 0x%02x)", name,
                (unsigned long long)(all / per_row), (unsigned long long)(all % per_row),
                (p[at] & 0x7f) == 0x7f ? "NaN" : "negative", p[at]);
    }
    return NB_OK;
}

static nb_status check_fp8(const nbi_matrix *m, const char *name, nb_error *err)
{
    const uint32_t per_row = (m->cols + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK,
                   n_rows = (m->rows + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK;
    const uint64_t stride = m->scale_stride ? m->scale_stride : per_row * sizeof(float);
    for (uint32_t r = 0; r < n_rows; r++) {
        const uint8_t *row = (const uint8_t *)m->scales + r * stride;
        for (uint32_t c = 0; c < per_row; c++) {
            float f;
            memcpy(&f, row + c * sizeof f, sizeof f);
            if (!(f > 0) || isinf(f))
                return nbi_fail(
                    err, NB_CORRUPT,
                    "%s.weight_scale_inv: the scale of block row %u, block column %u is %s", name,
                    r, c, describe(f));
        }
    }
    return NB_OK;
}

nb_status nbi_matrix_check(const nbi_matrix *m, nb_error *err)
{
    const char *name = m->name ? m->name : "matrix";
    if (!(m->global_scale > 0) || isinf(m->global_scale))
        return nbi_fail(err, NB_CORRUPT, "%s: the global scale is %s", name,
                        describe(m->global_scale));
    if (!(m->input_scale >= 0) || isinf(m->input_scale))
        return nbi_fail(err, NB_CORRUPT, "%s: the input scale is %s", name,
                        describe(m->input_scale));
    if (m->kind == NBI_WEIGHT_NVFP4) return check_nvfp4(m, name, err);
    return m->kind == NBI_WEIGHT_FP8_BLOCK ? check_fp8(m, name, err) : NB_OK;
}
