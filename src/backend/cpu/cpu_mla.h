/* The two forms of latent attention, between mla.c and mla_expanded.c. */
#pragma once

#include "backend/cpu/cpu_backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows [first, first + n_rows) of the batch, of one sequence, in the expanded form. */
void nbi_cpu_mla_expanded(nbi_cpu *cpu, const nbi_mla_attend_args *a, uint32_t first,
                          uint32_t n_rows);
/* Scratch it takes. */
size_t nbi_cpu_mla_expanded_bytes(uint32_t threads, const nbi_limits *l);

#ifdef __cplusplus
}
#endif
