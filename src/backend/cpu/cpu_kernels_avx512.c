/* Kernel table of AVX-512 (F, BW, VL, DQ). The body is cpu_kernels_simd.inc. */
#include "backend/cpu/cpu_kernels.h"
#include "backend/cpu/cpu_vectors_avx512.h"

#include "backend/cpu/cpu_kernels_simd.inc"

const nbi_cpu_kernels nbi_cpu_kernels_avx512 = KERNEL_TABLE;
