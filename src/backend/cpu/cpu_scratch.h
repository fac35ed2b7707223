/* Scratch that each operator of the CPU backend takes from nbi_cpu.attention: a part per thread and
 * a part per row. Callers: cpu_scratch.c sums them up; the operators carve with the same layout
 * functions. */
#pragma once

#include "backend/cpu/cpu_backend.h"

#ifdef __cplusplus
extern "C" {
#endif

size_t nbi_cpu_mla_fixed(uint32_t threads, const nbi_limits *l);
size_t nbi_cpu_mla_row(uint32_t n_positions, const nbi_limits *l);
size_t nbi_cpu_gqa_fixed(uint32_t threads, const nbi_limits *l);
size_t nbi_cpu_gqa_row(uint32_t n_positions, const nbi_limits *l);
size_t nbi_cpu_index_fixed(uint32_t threads, const nbi_limits *l);
size_t nbi_cpu_index_row(uint32_t n_positions);
/* Per thread that samples. */
size_t nbi_cpu_sample_thread(uint32_t vocab);

#ifdef __cplusplus
}
#endif
