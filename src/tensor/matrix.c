/* Views of weight matrices in canonical host form. Called by the loader, quantize, reference
 * kernels and tests. */
#include "tensor/matrix.h"

#include <string.h>

#include "base/numfmt.h"

const char *nbi_weight_kind_name(nbi_weight_kind kind)
{
    static const char *const names[NBI_WEIGHT_KIND_COUNT] = {
        "none", "f32", "f16", "bf16", "nvfp4", "fp8-block", "fp8-tensor"};
    return kind < NBI_WEIGHT_KIND_COUNT ? names[kind] : "unknown";
}

uint64_t nbi_matrix_row_bytes(const nbi_matrix *m)
{
    switch (m->kind) {
    case NBI_WEIGHT_F32: return (uint64_t)m->cols * 4;
    case NBI_WEIGHT_F16:
    case NBI_WEIGHT_BF16: return (uint64_t)m->cols * 2;
    case NBI_WEIGHT_NVFP4: return m->cols / 2;
    case NBI_WEIGHT_FP8_BLOCK:
    case NBI_WEIGHT_FP8_TENSOR: return m->cols;
    default: return 0;
    }
}

/* Columns of the FP8 block scales. */
static uint32_t block_cols(const nbi_matrix *m)
{
    return (m->cols + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK;
}

/* Bytes of a row of scales; 0 where the kind has none. */
static uint64_t scale_row_bytes(const nbi_matrix *m)
{
    if (m->kind == NBI_WEIGHT_NVFP4) return m->cols / NBI_NVFP4_BLOCK;
    return m->kind == NBI_WEIGHT_FP8_BLOCK ? block_cols(m) * sizeof(float) : 0;
}

static uint64_t scale_rows(const nbi_matrix *m)
{
    if (m->kind == NBI_WEIGHT_NVFP4) return m->rows;
    return m->kind == NBI_WEIGHT_FP8_BLOCK ? ((uint64_t)m->rows + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK
                                           : 0;
}

uint64_t nbi_matrix_data_stride(const nbi_matrix *m)
{
    return m->data_stride ? m->data_stride : nbi_matrix_row_bytes(m);
}

uint64_t nbi_matrix_scale_stride(const nbi_matrix *m)
{
    return m->scale_stride ? m->scale_stride : scale_row_bytes(m);
}

uint64_t nbi_matrix_bytes(const nbi_matrix *m)
{
    return m->rows * nbi_matrix_row_bytes(m) + scale_rows(m) * scale_row_bytes(m);
}

static void row_nvfp4(const nbi_matrix *m, uint32_t r, float *out)
{
    const uint8_t *codes = (const uint8_t *)m->data + r * nbi_matrix_data_stride(m);
    const uint8_t *scales = (const uint8_t *)m->scales + r * nbi_matrix_scale_stride(m);
    for (uint32_t b = 0; b < m->cols / NBI_NVFP4_BLOCK; b++) {
        float scale = nbi_e4m3_f32(scales[b]);
        for (uint32_t j = 0; j < NBI_NVFP4_BLOCK / 2; j++) {
            uint8_t pair = codes[b * (NBI_NVFP4_BLOCK / 2) + j];
            *out++ = nbi_e2m1_table[pair & 15] * scale * m->global_scale;
            *out++ = nbi_e2m1_table[pair >> 4] * scale * m->global_scale;
        }
    }
}

static void row_fp8_block(const nbi_matrix *m, uint32_t r, float *out)
{
    const uint8_t *data = (const uint8_t *)m->data + r * nbi_matrix_data_stride(m);
    const uint8_t *scales =
        (const uint8_t *)m->scales + r / NBI_FP8_BLOCK * nbi_matrix_scale_stride(m);
    float scale = 0;
    for (uint32_t c = 0; c < m->cols; c++) {
        if (c % NBI_FP8_BLOCK == 0)
            memcpy(&scale, scales + c / NBI_FP8_BLOCK * sizeof scale, sizeof scale);
        out[c] = nbi_e4m3_f32(data[c]) * scale;
    }
}

void nbi_matrix_row(const nbi_matrix *m, uint32_t r, float *out)
{
    const uint8_t *row = (const uint8_t *)m->data + r * nbi_matrix_data_stride(m);
    uint16_t half;
    NB_ASSERT(r < m->rows);
    switch (m->kind) {
    case NBI_WEIGHT_F32: memcpy(out, row, (size_t)m->cols * sizeof *out); break;
    case NBI_WEIGHT_F16:
    case NBI_WEIGHT_BF16:
        for (uint32_t c = 0; c < m->cols; c++) {
            memcpy(&half, row + (size_t)c * 2, 2);
            out[c] = m->kind == NBI_WEIGHT_F16 ? nbi_f16_f32(half) : nbi_bf16_f32(half);
        }
        break;
    case NBI_WEIGHT_NVFP4: row_nvfp4(m, r, out); break;
    case NBI_WEIGHT_FP8_BLOCK: row_fp8_block(m, r, out); break;
    case NBI_WEIGHT_FP8_TENSOR:
        for (uint32_t c = 0; c < m->cols; c++) out[c] = nbi_e4m3_f32(row[c]) * m->global_scale;
        break;
    default: NB_ASSERT(!"matrix without a kind");
    }
}

uint32_t nbi_matrix_row_unit(nbi_weight_kind kind)
{
    return kind == NBI_WEIGHT_FP8_BLOCK ? NBI_FP8_BLOCK : 1;
}

uint32_t nbi_matrix_column_unit(nbi_weight_kind kind)
{
    return kind == NBI_WEIGHT_NVFP4 ? NBI_NVFP4_BLOCK : nbi_matrix_row_unit(kind);
}

nb_status nbi_matrix_rows(nbi_matrix *out, const nbi_matrix *m, uint32_t begin, uint32_t end,
                          nb_error *err)
{
    const char *name = m->name ? m->name : "matrix";
    if (begin > end || end > m->rows)
        return nbi_fail(err, NB_INVALID, "%s: rows [%u, %u) of %u", name, begin, end, m->rows);
    nbi_matrix v = *m;
    v.rows = end - begin;
    v.data = (const uint8_t *)m->data + begin * nbi_matrix_data_stride(m);
    if (m->kind == NBI_WEIGHT_NVFP4)
        v.scales = (const uint8_t *)m->scales + begin * nbi_matrix_scale_stride(m);
    if (m->kind == NBI_WEIGHT_FP8_BLOCK) {
        if (begin % NBI_FP8_BLOCK && end > begin &&
            begin / NBI_FP8_BLOCK != (end - 1) / NBI_FP8_BLOCK)
            return nbi_fail(err, NB_UNSUPPORTED,
                            "%s: rows [%u, %u) cut a block of %u rows with one FP8 scale", name,
                            begin, end, NBI_FP8_BLOCK);
        v.scales = (const uint8_t *)m->scales + begin / NBI_FP8_BLOCK * nbi_matrix_scale_stride(m);
    }
    *out = v;
    return NB_OK;
}

nb_status nbi_matrix_columns(nbi_matrix *out, const nbi_matrix *m, uint32_t begin, uint32_t end,
                             nb_error *err)
{
    const char *name = m->name ? m->name : "matrix";
    const uint32_t unit = nbi_matrix_column_unit(m->kind);
    if (begin > end || end > m->cols)
        return nbi_fail(err, NB_INVALID, "%s: columns [%u, %u) of %u", name, begin, end, m->cols);
    if (begin % unit || (end % unit && end != m->cols))
        return nbi_fail(err, NB_UNSUPPORTED,
                        "%s: columns [%u, %u) of %u cut a block of %u columns with one %s scale",
                        name, begin, end, m->cols, unit, nbi_weight_kind_name(m->kind));
    nbi_matrix v = *m;
    v.cols = begin; /* bytes in front of the first */
    v.data = (const uint8_t *)m->data + nbi_matrix_row_bytes(&v);
    if (m->scales) v.scales = (const uint8_t *)m->scales + scale_row_bytes(&v);
    v.cols = end - begin;
    v.data_stride = nbi_matrix_data_stride(m);
    v.scale_stride = nbi_matrix_scale_stride(m);
    *out = v;
    return NB_OK;
}

static uint64_t packed_data_bytes(const nbi_matrix *m)
{
    return (m->rows * nbi_matrix_row_bytes(m) + 63) / 64 * 64;
}

uint64_t nbi_matrix_packed_bytes(const nbi_matrix *m)
{
    return packed_data_bytes(m) + scale_rows(m) * scale_row_bytes(m);
}

static void copy_rows(char *to, const char *from, uint64_t n, uint64_t bytes, uint64_t stride)
{
    for (uint64_t r = 0; r < n; r++) memcpy(to + r * bytes, from + r * stride, bytes);
}

void nbi_matrix_pack(nbi_matrix *out, const nbi_matrix *m, void *block)
{
    nbi_matrix p = *m;
    char *data = block, *scales = data + packed_data_bytes(m);
    copy_rows(data, m->data, m->rows, nbi_matrix_row_bytes(m), nbi_matrix_data_stride(m));
    if (m->scales)
        copy_rows(scales, m->scales, scale_rows(m), scale_row_bytes(m), nbi_matrix_scale_stride(m));
    p.data = data;
    p.scales = m->scales ? scales : NULL;
    p.data_stride = p.scale_stride = 0;
    *out = p;
}
