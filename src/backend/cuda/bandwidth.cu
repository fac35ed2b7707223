/* Read bandwidth of the device's memory. Callers: the backend's table (`nibble bench`). */
#include "backend/cuda/cuda_backend.h"

#define THREADS 512u
#define AHEAD   8u /* loads of 16 bytes on their way per thread */

/* The sum keeps the loads; blocks read in turns, so that neighbours read neighbouring memory. */
static __global__ void read_kernel(const nbi_u32x4 *p, size_t n, uint32_t *sum)
{
    nbi_wait_before();
    const size_t step = (size_t)gridDim.x * THREADS * AHEAD;
    uint32_t s = 0;
    for (size_t at = (size_t)blockIdx.x * THREADS * AHEAD + threadIdx.x; at < n; at += step) {
        nbi_u32x4 v[AHEAD];
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++) {
            const size_t k = at + i * THREADS;
            v[i] = nbi_load_once(p + (k < n ? k : 0));
        }
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++) s ^= v[i].v[0] ^ v[i].v[1] ^ v[i].v[2] ^ v[i].v[3];
    }
    if (s == 0x9e3779b9u) atomicAdd(sum, 1u); /* practically never */
}

double nbi_cuda_read_bandwidth(nbi_backend *b, void *memory, size_t bytes)
{
    nbi_cuda *c = nbi_cuda_of(b);
    if (c->batch_bytes < sizeof(uint32_t) || bytes < 16) return 0;
    const dim3 grid(4u * (uint32_t)c->rt.n_sms), block(THREADS);
    double best = 0;
    for (int pass = 0; pass < 4; pass++) { /* the first one warms */
        nbi_rt_sync(&c->rt);
        const double t0 = nbi_rt_seconds(&c->rt);
        nbi_launch(&c->rt, grid, block, 0, read_kernel, static_cast<const nbi_u32x4 *>(memory),
                   bytes / 16, reinterpret_cast<uint32_t *>(c->batch_device));
        const double t1 = nbi_rt_seconds(&c->rt);
        const double rate = (double)bytes / (t1 - t0);
        if (pass && rate > best) best = rate;
    }
    return best;
}
