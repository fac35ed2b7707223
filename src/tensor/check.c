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

nb_status nbi_matrix_check(const nbi_matrix *m, nb_error *err)
{
    const char *name = m->name ? m->name : "matrix";
    if (!(m->global_scale > 0) || isinf(m->global_scale))
        return nbi_fail(err, NB_CORRUPT, "%s: the global scale is %s", name,
                        describe(m->global_scale));
    if (!(m->input_scale >= 0) || isinf(m->input_scale))
        return nbi_fail(err, NB_CORRUPT, "%s: the input scale is %s", name,
                        describe(m->input_scale));
    if (m->kind == NBI_WEIGHT_NVFP4) {
        const uint8_t *p = m->scales;
        uint32_t per_row = m->cols / NBI_NVFP4_BLOCK;
        uint64_t n = (uint64_t)m->rows * per_row, at = bad_e4m3(p, n);
        if (at < n)
            return nbi_fail(
                err, NB_CORRUPT,
                "%s.weight_scale: the scale of row %llu, block %llu is %s (byte 0x%02x)", name,
                (unsigned long long)(at / per_row), (unsigned long long)(at % per_row),
                (p[at] & 0x7f) == 0x7f ? "NaN" : "negative", p[at]);
    }
    if (m->kind == NBI_WEIGHT_FP8_BLOCK) {
        uint32_t per_row = (m->cols + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK,
                 n_rows = (m->rows + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK;
        for (uint64_t i = 0; i < (uint64_t)n_rows * per_row; i++) {
            float f;
            memcpy(&f, (const uint8_t *)m->scales + i * sizeof f, sizeof f);
            if (!(f > 0) || isinf(f))
                return nbi_fail(
                    err, NB_CORRUPT,
                    "%s.weight_scale_inv: the scale of block row %llu, block column %llu is %s",
                    name, (unsigned long long)(i / per_row), (unsigned long long)(i % per_row),
                    describe(f));
        }
    }
    return NB_OK;
}
