/* Shared by the tests of the CUDA backend: the backend under test (a GPU, or the emulation where
 * the build is one), guarded buffers on the device, batches. Numbers, host buffers and oracles come
 * from tests/kernel. */
#pragma once

#include "kernel/matrix_util.h"
#include "kernel/operator_util.h"

/* Opens the backend under test with limits reserved; fails the test when it cannot. */
nbi_backend *gpu_open(const nbi_limits *limits);
nbi_backend *gpu_open_w4a4(const nbi_limits *limits);
nbi_backend *gpu_open_graphs(const nbi_limits *limits, bool w4a4); /* steps are recorded */
void gpu_close(nbi_backend *b);

/* Device memory between guard bands. gpu_floats and gpu_bytes copy from the host; gpu_poisoned is
 * NaN (all bits set). */
typedef struct gpu_buffer {
    nbi_backend *b;
    void *block;
    void *p; /* what operators get */
    size_t bytes;
} gpu_buffer;

gpu_buffer gpu_bytes(nbi_backend *b, const void *host, size_t bytes);
gpu_buffer gpu_floats(nbi_backend *b, const float *host, size_t n);
gpu_buffer gpu_poisoned(nbi_backend *b, size_t bytes);
/* Copies to the host (malloc) and fails the test when a guard band was written to. */
void *gpu_read(const gpu_buffer *buffer);
void gpu_free(gpu_buffer *buffer);

/* The device form of a batch, by step_begin; step_end by gpu_step_end. */
const nbi_batch *gpu_step(nbi_backend *b, const nbi_batch *host);
void gpu_step_end(nbi_backend *b);
void gpu_sync(nbi_backend *b);

/* Bytes per second of reads over `bytes` of memory taken for it; printed with the device's name. */
double gpu_bandwidth(nbi_backend *b, size_t bytes);
