/* Read bandwidth of this machine over the memory that a checkpoint occupies, or over fresh memory.
 * Callers: bench, doctor. */
#pragma once

#include "base/thread.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_bandwidth nbi_bandwidth;

/* Maps the *.safetensors files of a folder and brings them into memory by reading them once. With
 * max_bytes passes go over the first so many alone, and nothing is read yet; 0: over all. */
nb_status nbi_bandwidth_open(nbi_bandwidth **out, const char *dir, uint32_t n_threads,
                             uint64_t max_bytes, nb_error *err);

/* Fresh memory instead, written by all threads, so that it lies at all nodes. */
nb_status nbi_bandwidth_open_memory(nbi_bandwidth **out, uint64_t bytes, uint32_t n_threads,
                                    nb_error *err);

void nbi_bandwidth_close(nbi_bandwidth **b);

uint32_t nbi_bandwidth_threads(const nbi_bandwidth *b);

/* Bytes per second of one pass over at most `bytes` bytes, going on where the last pass ended: wide
 * loads, every thread on pieces of its own. */
double nbi_bandwidth_pass(nbi_bandwidth *b, uint64_t bytes);

#ifdef __cplusplus
}
#endif
