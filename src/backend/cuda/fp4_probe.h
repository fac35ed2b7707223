/* Single products of device_fp4.h, for tests of its layout. Callers: tests/cuda/test_cuda_fp4.c. */
#pragma once

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Registers of n products as they lie in the 32 lanes; pointers are of the device. d is read and
 * written. by_f16: by what stands in for the instruction, also where there is one. */
typedef struct nbi_cuda_fp4_registers {
    float *d;                          /* [n][32][4] */
    const uint32_t *a;                 /* [n][32][4] */
    const uint32_t *b;                 /* [n][32][2] */
    const uint32_t *scale_a, *scale_b; /* [n][32] */
    uint32_t n;
    bool by_f16;
} nbi_cuda_fp4_registers;

void nbi_cuda_fp4_probe(nbi_backend *b, const nbi_cuda_fp4_registers *r);

#ifdef __cplusplus
}
#endif
