/* Weights in canonical host form: a view of the mapped file, whatever convention the file used.
 *
 * y[r] = sum_c W[r][c] * x[c], with W[r][c] =
 *   F32, F16, BF16   data[r][c]
 *   NVFP4            e2m1(code) * e4m3(scales[r][c/16]) * global_scale; codes [rows][cols/2],
 * element 2j in the low nibble FP8_BLOCK        e4m3(data[r][c]) * scales_f32[r/128][c/128]
 *   FP8_TENSOR       e4m3(data[r][c]) * global_scale
 * Source of the conventions: NVIDIA Model Optimizer's exporter, compressed-tensors
 * `nvfp4-pack-quantized`, DeepSeek-V3's FP8. */
#pragma once

#include "base/dtype.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nbi_weight_kind {
    NBI_WEIGHT_NONE,
    NBI_WEIGHT_F32,
    NBI_WEIGHT_F16,
    NBI_WEIGHT_BF16,
    NBI_WEIGHT_NVFP4,
    NBI_WEIGHT_FP8_BLOCK,
    NBI_WEIGHT_FP8_TENSOR,
    NBI_WEIGHT_KIND_COUNT
} nbi_weight_kind;

const char *nbi_weight_kind_name(nbi_weight_kind kind);

#define NBI_NVFP4_BLOCK 16u
#define NBI_FP8_BLOCK   128u

typedef struct nbi_matrix {
    nbi_weight_kind kind;
    uint32_t rows, cols;
    const void *data;      /* mapped, borrowed; may be unaligned for its type */
    const void *scales;    /* NVFP4: u8 [rows][cols/16]; FP8_BLOCK: f32
                              [ceil(rows/128)][ceil(cols/128)]; else NULL */
    uint64_t data_stride;  /* bytes from row to row of data; 0: rows lie side by side */
    uint64_t scale_stride; /* bytes from row to row of scales (FP8_BLOCK: of blocks); 0 likewise */
    float global_scale;    /* multiplies; 1 where the kind has none */
    float input_scale; /* NVFP4 activations (W4A4): multiplies codes back; 0: the file has none */
    const char *name;  /* module, e.g. "model.layers.0.mlp.gate_proj"; borrowed */
} nbi_matrix;

/* Bytes of data and scales that a product reads. */
uint64_t nbi_matrix_bytes(const nbi_matrix *m);

/* Bytes of one row of `data`. */
uint64_t nbi_matrix_row_bytes(const nbi_matrix *m);

/* Bytes from row to row of data, and of scales (of block rows with FP8_BLOCK; 0: it has none). */
uint64_t nbi_matrix_data_stride(const nbi_matrix *m);
uint64_t nbi_matrix_scale_stride(const nbi_matrix *m);

/* A view of columns: its rows do not lie side by side. Kernels take packed matrices. */
static inline bool nbi_matrix_strided(const nbi_matrix *m)
{
    return m->data_stride != 0;
}

/* Row r as float32 (exact for BF16, F16, FP8 and for NVFP4 up to the last product with
 * global_scale). out[cols]. */
void nbi_matrix_row(const nbi_matrix *m, uint32_t r, float *out);

/* A view of rows [begin, end). begin must be a multiple of 128 for FP8_BLOCK unless end - begin
 * stays inside one block's rows. */
nb_status nbi_matrix_rows(nbi_matrix *out, const nbi_matrix *m, uint32_t begin, uint32_t end,
                          nb_error *err);

/* A view of columns [begin, end). NB_UNSUPPORTED naming the matrix unless begin, and end where it
 * is not the last column, are multiples of nbi_matrix_column_unit(). The view is strided. */
nb_status nbi_matrix_columns(nbi_matrix *out, const nbi_matrix *m, uint32_t begin, uint32_t end,
                             nb_error *err);

/* Where rows and columns can be cut: a multiple of this many. FP8_BLOCK 128; columns of NVFP4 16;
 * else 1. */
uint32_t nbi_matrix_row_unit(nbi_weight_kind kind);
uint32_t nbi_matrix_column_unit(nbi_weight_kind kind);

/* The same values in memory of its own, rows side by side: bytes it takes, and the copy into
 * `block` (64-byte aligned, borrowed by *out, which may be m). Reads what m shows and no more. */
uint64_t nbi_matrix_packed_bytes(const nbi_matrix *m);
void nbi_matrix_pack(nbi_matrix *out, const nbi_matrix *m, void *block);

/* ---- NVFP4 blocks (models of rounding: round to nearest, ties to even) */

/* Quantises one tensor as ModelOpt's max calibration does: global = amax / 2688, block scale =
 * e4m3(block amax / (6 global)) clamped to [2^-9, 448], zero -> 1.0, codes = e2m1(x / (scale *
 * global)). w[rows][cols] float32, cols a multiple of 16. codes[rows][cols/2],
 * scales[rows][cols/16]. amax > 0 overrides the tensor's own (fused gate/up); *global_scale is
 * returned. Non-finite input is NB_INVALID. */
nb_status nbi_nvfp4_quantize(const float *w, uint32_t rows, uint32_t cols, float amax,
                             uint8_t *codes, uint8_t *scales, float *global_scale, nb_error *err);

/* Largest magnitude of w[n]; NB_INVALID naming the first value that is not finite. */
nb_status nbi_nvfp4_amax(float *out, const float *w, uint64_t n, nb_error *err);

/* Activation row to NVFP4 with a static input_scale: SF = e4m3(amax16 / (6 * input_scale)), code =
 * e2m1(x / (SF * input_scale)), 0 when SF is 0. Exact division throughout (not reciprocals).
 * codes[n/2], scales[n/16]; n a multiple of 16. */
void nbi_nvfp4_quantize_row(const float *x, uint32_t n, float input_scale, uint8_t *codes,
                            uint8_t *scales);

/* The same, decoded again: out[i] = e2m1 * SF * input_scale. Oracle of the W4A4 path. */
void nbi_nvfp4_round_row(const float *x, uint32_t n, float input_scale, float *out);

#ifdef __cplusplus
}
#endif
