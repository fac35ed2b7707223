/* Single products of device_fp4.h. Callers: tests. */
#include "backend/cuda/fp4_probe.h"

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device_fp4.h"

/* A warp per product. */
static __global__ void probe_kernel(const nbi_cuda_fp4_registers r)
{
    nbi_wait_before();
    nbi_let_next();
    const size_t at = (size_t)blockIdx.x * NBI_WARP + threadIdx.x;
    float d[4];
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; i++) d[i] = r.d[4 * at + i];
    for (int i = 0; i < 4; i++) a[i] = r.a[4 * at + i];
    for (int i = 0; i < 2; i++) b[i] = r.b[2 * at + i];
    if (r.by_f16)
        nbi_mma_fp4_by_f16(d, a, b, r.scale_a[at], r.scale_b[at]);
    else
        nbi_mma_fp4(d, a, b, r.scale_a[at], r.scale_b[at]);
    for (int i = 0; i < 4; i++) r.d[4 * at + i] = d[i];
}

void nbi_cuda_fp4_probe(nbi_backend *b, const nbi_cuda_fp4_registers *r)
{
    nbi_cuda *c = nbi_cuda_of(b);
    nbi_cuda_flush(c);
    nbi_launch(&c->rt, dim3(r->n), dim3(NBI_WARP), 0, probe_kernel, *r);
}
