/* The runners built in. Included by runner.c and the runners themselves. */
#pragma once

#include "moe/runner.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const nbi_moe_runner_ops nbi_moe_runner_reference; /* reference/reference.c */
extern const nbi_moe_runner_ops nbi_moe_runner_cpu;       /* cpu/cpu.c */

/* cuda/moe_runners.cu, in builds with CUDA */
extern const nbi_moe_runner_ops nbi_moe_runner_cuda;
extern const nbi_moe_runner_ops nbi_moe_runner_cuda_gemv;
extern const nbi_moe_runner_ops nbi_moe_runner_cuda_stream;
extern const nbi_moe_runner_ops nbi_moe_runner_cuda_grouped;
extern const nbi_moe_runner_ops nbi_moe_runner_cuda_masked;
extern const nbi_moe_runner_ops nbi_moe_runner_cuda_masked_fp4;
extern const nbi_moe_runner_ops nbi_moe_runner_cuda_grouped_fp4;
/* cuda/moe_cutlass.cu, in builds with CUTLASS (NBI_WITH_CUTLASS) */
extern const nbi_moe_runner_ops nbi_moe_runner_cutlass;

#define NBI_MOE_CUDA_SUMMARY \
    "cuda_stream up to 12 rows of an expert, else cuda_grouped: one prepared form"
#define NBI_MOE_CUDA_GEMV_SUMMARY "weights streamed once for up to 8 rows, two kernels per layer"
#define NBI_MOE_CUDA_STREAM_SUMMARY \
    "weights of every chosen expert by bulk copies, once for all its rows"
#define NBI_MOE_CUDA_GROUPED_SUMMARY "rows sorted by expert, grouped products on the matrix units"
#define NBI_MOE_CUDA_MASKED_SUMMARY \
    "a fixed capacity of rows for every expert, masked grouped products, requantised in between"
#define NBI_MOE_CUDA_MASKED_FP4_SUMMARY \
    "as cuda_masked, NVFP4 by NVFP4: SM120's FP4 products, elsewhere FP16 in their place"
#define NBI_MOE_CUDA_GROUPED_FP4_SUMMARY "as cuda_grouped, by the products of cuda_masked_fp4"
#define NBI_MOE_CUTLASS_SUMMARY \
    "as cuda_grouped through CUTLASS: weights of the chosen experts are unpacked to 16 bits first"

/* Checks what every runner needs: known kinds, equal shapes over the experts, columns that NVFP4
 * allows. NB_INVALID naming the matrix. */
nb_status nbi_moe_experts_check(const nbi_moe_experts *e, nb_error *err);

/* Input scale that gate and up of an expert share: the larger; 0 when w4a4 is off or one has none.
 */
float nbi_moe_gate_up_scale(const nbi_moe_shape *shape, const nbi_matrix *gate,
                            const nbi_matrix *up);
float nbi_moe_down_scale(const nbi_moe_shape *shape, const nbi_matrix *down);

#ifdef __cplusplus
}
#endif
