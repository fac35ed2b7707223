#include "matrix_util.h"

double mat_e4m3(uint8_t v)
{
    const int e = v >> 3 & 15, m = v & 7;
    if ((v & 0x7f) == 0x7f) return (double)NAN;
    const double a = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return v & 0x80 ? -a : a;
}

double mat_e2m1(uint8_t code)
{
    static const double value[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -value[code & 7] : value[code & 7];
}

static size_t data_bytes(nbi_weight_kind kind, size_t n)
{
    switch (kind) {
    case NBI_WEIGHT_F32: return 4 * n;
    case NBI_WEIGHT_F16:
    case NBI_WEIGHT_BF16: return 2 * n;
    case NBI_WEIGHT_NVFP4: return n / 2;
    default: return n;
    }
}

static void fill_data(char *p, nbi_weight_kind kind, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const float f = op_normal() * 0.05f;
        const uint16_t h = kind == NBI_WEIGHT_F16 ? nbi_f32_f16(f) : nbi_f32_bf16(f);
        uint8_t b = (uint8_t)op_random();
        switch (kind) {
        case NBI_WEIGHT_F32: memcpy(p + 4 * i, &f, 4); break;
        case NBI_WEIGHT_F16:
        case NBI_WEIGHT_BF16: memcpy(p + 2 * i, &h, 2); break;
        case NBI_WEIGHT_NVFP4: p[i / 2] = (char)b; break;
        default:
            while ((b & 0x7f) == 0x7f) b = (uint8_t)op_random();
            p[i] = (char)b;
        }
    }
}

void mat_make(mat *out, nbi_weight_kind kind, uint32_t rows, uint32_t cols, bool odd)
{
    static const char *name = "test.weight";
    const size_t bytes = data_bytes(kind, (size_t)rows * cols), shift = odd ? 1 : 0;
    *out = (mat){.m = {.kind = kind, .rows = rows, .cols = cols, .global_scale = 1, .name = name}};
    out->data = op_alloc(bytes + shift);
    char *data = (char *)out->data + shift;
    memset(out->data, 0, shift);
    fill_data(data, kind, (size_t)rows * cols);
    out->m.data = data;
    if (kind == NBI_WEIGHT_NVFP4) {
        const size_t n = (size_t)rows * (cols / 16);
        out->scales = op_alloc(n + shift);
        uint8_t *s = (uint8_t *)out->scales + shift;
        for (size_t i = 0; i < n; i++) /* subnormal scales too */
            s[i] = (uint8_t)(op_below(16) == 0 ? op_below(8) : 0x28 + op_below(0x10));
        out->m.scales = s;
        out->m.global_scale = op_uniform(0.001f, 0.01f);
    } else if (kind == NBI_WEIGHT_FP8_BLOCK) {
        const size_t n = (size_t)((rows + 127) / 128) * ((cols + 127) / 128);
        out->scales = op_alloc(4 * n + shift);
        char *s = (char *)out->scales + shift;
        for (size_t i = 0; i < n; i++) {
            const float v = op_uniform(0.0001f, 0.01f);
            memcpy(s + 4 * i, &v, 4);
        }
        out->m.scales = s;
    } else if (kind == NBI_WEIGHT_FP8_TENSOR) {
        out->m.global_scale = op_uniform(0.0001f, 0.01f);
    }
}

void mat_free(mat *m)
{
    op_free(m->data);
    op_free(m->scales);
    *m = (mat){0};
}

double mat_at(const nbi_matrix *m, uint32_t r, uint32_t c)
{
    const size_t i = (size_t)r * m->cols + c;
    const uint8_t *data = m->data, *scales = m->scales;
    float f;
    uint16_t h;
    switch (m->kind) {
    case NBI_WEIGHT_F32: memcpy(&f, data + 4 * i, 4); return (double)f;
    case NBI_WEIGHT_F16: memcpy(&h, data + 2 * i, 2); return (double)nbi_f16_f32(h);
    case NBI_WEIGHT_BF16: memcpy(&h, data + 2 * i, 2); return (double)nbi_bf16_f32(h);
    case NBI_WEIGHT_NVFP4:
        return mat_e2m1(data[i / 2] >> (i % 2 * 4) & 15) * mat_e4m3(scales[i / 16]) *
               (double)m->global_scale;
    case NBI_WEIGHT_FP8_BLOCK:
        memcpy(&f, scales + 4 * ((size_t)(r / 128) * ((m->cols + 127) / 128) + c / 128), 4);
        return mat_e4m3(data[i]) * (double)f;
    default: return mat_e4m3(data[i]) * (double)m->global_scale;
    }
}

void mat_product(double *out, double *sizes, const nbi_matrix *m, const float *x, uint32_t n,
                 size_t x_stride)
{
    double *row = malloc(m->cols * sizeof *row);
    for (uint32_t r = 0; r < m->rows; r++) {
        for (uint32_t c = 0; c < m->cols; c++) row[c] = mat_at(m, r, c);
        for (uint32_t t = 0; t < n; t++) {
            double sum = 0, size = 0;
            for (uint32_t c = 0; c < m->cols; c++) {
                const double v = row[c] * (double)x[t * x_stride + c];
                sum += v;
                size += fabs(v);
            }
            out[(size_t)t * m->rows + r] = sum;
            if (sizes) sizes[(size_t)t * m->rows + r] = size;
        }
    }
    free(row);
}
