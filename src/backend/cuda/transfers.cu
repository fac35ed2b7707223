/* Copies between GPUs and to the host, timed by events of the stream that copies. Not in the
 * emulation: its copies are of plain memory. */
#include "backend/cuda/runtime.h"

#if !NBI_EMULATED
#include <stdio.h>

#include "backend/cuda/cuda_transfers.h"
#include "base/clock.h"

#define LARGE   ((size_t)64 << 20)
#define SMALL   ((size_t)16)
#define PASSES  4 /* the first one warms */
#define ROUNDS  20
#define ADDRESS 16

namespace
{

struct gpu {
    void *from, *to; /* LARGE bytes each */
    cudaStream_t stream;
    cudaEvent_t begin, end;
};

struct machine {
    int n;
    gpu gpus[NBI_TRANSFERS_MAX];
    void *host; /* pinned, LARGE bytes */
    cudaError_t error;
};

/* Once something failed nothing more is asked for. */
bool ok(machine *m, cudaError_t e)
{
    if (m->error == cudaSuccess) m->error = e;
    if (e != cudaSuccess) cudaGetLastError();
    return m->error == cudaSuccess;
}

bool open_gpu(machine *m, int i)
{
    gpu *g = &m->gpus[i];
    return ok(m, cudaSetDevice(i)) && ok(m, cudaMalloc(&g->from, LARGE)) &&
           ok(m, cudaMalloc(&g->to, LARGE)) && ok(m, cudaMemset(g->from, 1, LARGE)) &&
           ok(m, cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking)) &&
           ok(m, cudaEventCreate(&g->begin)) && ok(m, cudaEventCreate(&g->end));
}

void close_gpu(gpu *g, int i)
{
    if (cudaSetDevice(i) != cudaSuccess) return;
    if (g->begin) cudaEventDestroy(g->begin);
    if (g->end) cudaEventDestroy(g->end);
    if (g->stream) cudaStreamDestroy(g->stream);
    cudaFree(g->from);
    cudaFree(g->to);
}

/* One kind of copy, in the stream of GPU i. */
struct copy {
    int i, k; /* k: the other GPU, -1 for the host */
    bool down;
};

cudaError_t begin_copy(machine *m, const copy &c, size_t bytes)
{
    gpu *g = &m->gpus[c.i];
    if (c.k >= 0) return cudaMemcpyPeerAsync(m->gpus[c.k].to, c.k, g->from, c.i, bytes, g->stream);
    return c.down ? cudaMemcpyAsync(m->host, g->from, bytes, cudaMemcpyDeviceToHost, g->stream)
                  : cudaMemcpyAsync(g->to, m->host, bytes, cudaMemcpyHostToDevice, g->stream);
}

void measure(machine *m, nbi_transfer *out, const copy &c)
{
    gpu *g = &m->gpus[c.i];
    if (!ok(m, cudaSetDevice(c.i))) return;
    for (int pass = 0; pass < PASSES; pass++) {
        float ms = 0;
        if (!ok(m, cudaEventRecord(g->begin, g->stream)) || !ok(m, begin_copy(m, c, LARGE)) ||
            !ok(m, cudaEventRecord(g->end, g->stream)) ||
            !ok(m, cudaStreamSynchronize(g->stream)) ||
            !ok(m, cudaEventElapsedTime(&ms, g->begin, g->end)))
            return;
        const double rate = ms > 0 ? (double)LARGE / ((double)ms * 1e-3) : 0;
        if (pass && rate > out->rate) out->rate = rate;
    }
    for (int round = 0; round < ROUNDS; round++) {
        const uint64_t begin = nbi_now_ns();
        if (!ok(m, begin_copy(m, c, SMALL)) || !ok(m, cudaStreamSynchronize(g->stream))) return;
        const double seconds = (double)(nbi_now_ns() - begin) * 1e-9;
        if (round == 0 || seconds < out->latency) out->latency = seconds;
    }
}

/* Lower case, as sysfs has it. */
bool read_address(machine *m, char out[ADDRESS], int i)
{
    if (!ok(m, cudaDeviceGetPCIBusId(out, ADDRESS, i))) return false;
    for (char *p = out; *p; p++)
        if (*p >= 'A' && *p <= 'F') *p = (char)(*p - 'A' + 'a');
    return true;
}

void measure_peers(machine *m, nbi_transfers *out)
{
    for (int i = 0; i < m->n; i++)
        for (int k = 0; k < m->n; k++) {
            int can = 0;
            if (i == k || !ok(m, cudaSetDevice(i)) || !ok(m, cudaDeviceCanAccessPeer(&can, i, k)))
                continue;
            const cudaError_t e = can ? cudaDeviceEnablePeerAccess(k, 0) : cudaSuccess;
            if (e == cudaErrorPeerAccessAlreadyEnabled)
                cudaGetLastError();
            else if (!ok(m, e))
                return;
            out->peer[i][k].direct = can != 0;
            measure(m, &out->peer[i][k], copy{i, k, false});
        }
}

} // namespace

bool nbi_cuda_transfers(nbi_transfers *out, char why[NBI_CUDA_TRANSFERS_TEXT])
{
    machine m = {};
    const bool counted = ok(&m, cudaGetDeviceCount(&m.n)) && m.n > 0;
    if (m.n > (int)NBI_TRANSFERS_MAX) m.n = (int)NBI_TRANSFERS_MAX;
    bool all = counted && ok(&m, cudaHostAlloc(&m.host, LARGE, cudaHostAllocPortable));
    for (int i = 0; i < m.n && all; i++)
        all = read_address(&m, out->address[i], i) && open_gpu(&m, i);
    for (int i = 0; i < m.n && all; i++) {
        measure(&m, &out->to_host[i], copy{i, -1, true});
        measure(&m, &out->from_host[i], copy{i, -1, false});
    }
    if (all) measure_peers(&m, out);
    for (int i = 0; i < m.n; i++) close_gpu(&m.gpus[i], i);
    if (m.host) cudaFreeHost(m.host);
    out->n = (uint32_t)m.n;
    if (counted && m.error == cudaSuccess) return true;
    snprintf(why, NBI_CUDA_TRANSFERS_TEXT, "CUDA: %s",
             m.error == cudaSuccess ? "the driver shows no GPU" : cudaGetErrorString(m.error));
    return false;
}
#endif
