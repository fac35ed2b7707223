/* The host's side of the device (runtime.h) over the CUDA runtime. Callers: the CUDA backend and
 * its MoE runners. */
#include "backend/cuda/runtime.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "base/clock.h"

#define POLLS_OF_A_LOOK 256u /* of the stream, between two looks at the other ranks */

struct nbi_rt_graph {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
};

/* Any kernel of this build: tells whether the build has code for the device. */
static __global__ void probe_kernel()
{
}

void nbi_rt_fail(nbi_rt *rt, const char *what, int code)
{
    if (rt->error[0]) return;
    snprintf(rt->error, sizeof rt->error, "CUDA: %s: %s", what,
             cudaGetErrorString((cudaError_t)code));
}

static bool ok(nbi_rt *rt, const char *what, cudaError_t e)
{
    if (e == cudaSuccess) return true;
    nbi_rt_fail(rt, what, (int)e);
    return false;
}

/* The kernel module's version where it can be read, and the CUDA version of the driver. */
static void read_driver(nbi_rt *rt)
{
    int cuda = 0;
    char loaded[48] = "";
    if (cudaDriverGetVersion(&cuda) != cudaSuccess) cuda = 0;
    if (FILE *f = fopen("/sys/module/nvidia/version", "re")) {
        if (!fgets(loaded, sizeof loaded, f)) loaded[0] = '\0';
        fclose(f);
    }
    loaded[strcspn(loaded, "\n")] = '\0';
    snprintf(rt->driver, sizeof rt->driver, "%s%sCUDA %d.%d", loaded, loaded[0] ? ", " : "",
             cuda / 1000, cuda % 1000 / 10);
}

static bool read_device(nbi_rt *rt, int index)
{
    cudaDeviceProp p;
    if (!ok(rt, "properties of a device", cudaGetDeviceProperties(&p, index))) return false;
    rt->sm = p.major * 10 + p.minor;
    rt->n_sms = p.multiProcessorCount;
    rt->l2_bytes = (size_t)p.l2CacheSize;
    rt->shared_max = p.sharedMemPerBlockOptin;
    snprintf(rt->name, sizeof rt->name, "%.60s", p.name);
    read_driver(rt);
    cudaFuncAttributes a;
    const cudaError_t e = cudaFuncGetAttributes(&a, (const void *)probe_kernel);
    if (e == cudaSuccess) return true;
    cudaGetLastError();
    if (e != cudaErrorNoKernelImageForDevice && e != cudaErrorInvalidDeviceFunction)
        return ok(rt, "the first kernel", e);
    snprintf(rt->error, sizeof rt->error,
             "%.60s has compute capability %d.%d, and this build has no code for it", p.name,
             p.major, p.minor);
    return false;
}

/* ---------------------------------------------------------------- stamps */

#define FILES 64

static const void *symbols[FILES]; /* nbi_stamps_here of every file of kernels */
static uint32_t n_symbols;

struct stamps_of {
    nbi_stamps *file[FILES];
};

struct nbi_rt_stamps {
    stamps_of device;
    nbi_stamps *host;       /* [n_symbols], pinned */
    uint64_t *ns;           /* [NBI_STAMPS * n_symbols] */
    uint32_t n, n_launches; /* of ns; launches when it was fetched, which clears them */
};

bool nbi_rt_knows_stamps(const void *symbol)
{
    if (n_symbols == FILES) abort();
    symbols[n_symbols++] = symbol;
    return true;
}

static __global__ void stamp_kernel()
{
    nbi_wait_before();
}

static __global__ void clear_stamps_kernel(const stamps_of of)
{
    nbi_wait_before();
    of.file[threadIdx.x]->n = 0;
}

static __global__ void fetch_stamps_kernel(const stamps_of of, nbi_stamps *to)
{
    nbi_wait_before();
    nbi_stamps *from = of.file[blockIdx.x];
    const uint32_t n = from->n;
    for (uint32_t i = threadIdx.x; i < n && i < NBI_STAMPS; i += blockDim.x)
        to[blockIdx.x].ns[i] = from->ns[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        to[blockIdx.x].n = n;
        from->n = 0;
    }
}

static void close_stamps(nbi_rt *rt)
{
    nbi_rt_free_host(rt, rt->stamped->host);
    free(rt->stamped->ns);
    free(rt->stamped);
    rt->stamped = NULL;
}

bool nbi_rt_stamps_open(nbi_rt *rt)
{
    if (rt->stamped) return true;
    nbi_rt_stamps *s = rt->stamped = (nbi_rt_stamps *)calloc(1, sizeof *s);
    if (!s) return false;
    s->host = (nbi_stamps *)nbi_rt_alloc_host(rt, n_symbols * sizeof *s->host);
    s->ns = (uint64_t *)malloc(n_symbols * sizeof s->host->ns);
    if (!s->host || !s->ns) {
        close_stamps(rt);
        return false;
    }
    for (uint32_t i = 0; i < n_symbols; i++)
        ok(rt, "stamps", cudaGetSymbolAddress((void **)&s->device.file[i], symbols[i]));
    return true;
}

void nbi_rt_stamps_clear(nbi_rt *rt)
{
    if (!rt->n_stamps || rt->stamped->n_launches != rt->n_stamps)
        nbi_launch(rt, dim3(1), dim3(n_symbols), 0, clear_stamps_kernel, rt->stamped->device);
    rt->n_stamps = rt->stamped->n_launches = 0;
}

uint32_t nbi_rt_stamp(nbi_rt *rt)
{
    nbi_launch(rt, dim3(1), dim3(1), 0, stamp_kernel);
    return rt->n_stamps - 1;
}

/* Launches began one after the other: the files' stamps by time are those of the launches. */
static bool fetch_stamps(nbi_rt *rt)
{
    nbi_rt_stamps *s = rt->stamped;
    const uint32_t launches = rt->n_stamps;
    nbi_launch(rt, dim3(n_symbols), dim3(256), 0, fetch_stamps_kernel, s->device, s->host);
    rt->n_stamps = s->n_launches = launches;
    s->n = 0;
    if (!nbi_rt_sync(rt)) return false;
    for (uint32_t i = 0; i < n_symbols; i++) {
        const uint32_t n = s->host[i].n < NBI_STAMPS ? s->host[i].n : NBI_STAMPS;
        memcpy(s->ns + s->n, s->host[i].ns, n * sizeof *s->ns);
        s->n += n;
    }
    std::sort(s->ns, s->ns + s->n);
    return true;
}

uint64_t nbi_rt_stamp_ns(nbi_rt *rt, uint32_t i)
{
    nbi_rt_stamps *s = rt->stamped;
    if (s->n_launches != rt->n_stamps && !fetch_stamps(rt)) return 0;
    return i < s->n && s->n == rt->n_stamps ? s->ns[i] : 0;
}

bool nbi_rt_open(nbi_rt *rt, uint32_t index)
{
    *rt = {};
    int n = 0;
    const cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0) {
        snprintf(rt->error, sizeof rt->error, "no usable NVIDIA GPU: %s",
                 e == cudaSuccess ? "the driver shows none" : cudaGetErrorString(e));
        cudaGetLastError();
        return false;
    }
    const int device = n == 1 ? 0 : (int)index;
    if (device >= n) {
        snprintf(rt->error, sizeof rt->error,
                 "GPU %d is asked for, %d are visible (CUDA_VISIBLE_DEVICES)", device, n);
        return false;
    }
    if (!ok(rt, "choice of a device", cudaSetDevice(device)) || !read_device(rt, device))
        return false;
    rt->index = device;
    for (cudaEvent_t &mark : rt->marks)
        if (!ok(rt, "event", cudaEventCreateWithFlags(&mark, cudaEventDisableTiming))) return false;
    return ok(rt, "stream", cudaStreamCreateWithFlags(&rt->stream, cudaStreamNonBlocking)) &&
           ok(rt, "event", cudaEventCreate(&rt->opened)) &&
           ok(rt, "event", cudaEventCreate(&rt->mark)) &&
           ok(rt, "event", cudaEventRecord(rt->opened, rt->stream));
}

void nbi_rt_close(nbi_rt *rt)
{
    if (rt->stamped) close_stamps(rt);
    if (rt->opened) cudaEventDestroy(rt->opened);
    if (rt->mark) cudaEventDestroy(rt->mark);
    for (cudaEvent_t &mark : rt->marks) {
        if (mark) cudaEventDestroy(mark);
        mark = NULL;
    }
    for (uint32_t i = 0; i < rt->n_clock; i++) cudaEventDestroy(rt->clock[i]);
    free(rt->clock);
    rt->clock = NULL;
    rt->n_clock = 0;
    if (rt->stream) cudaStreamDestroy(rt->stream);
    rt->opened = rt->mark = NULL;
    rt->stream = NULL;
}

void *nbi_rt_alloc(nbi_rt *rt, size_t bytes)
{
    rt->n_calls++;
    void *p = NULL;
    if (cudaMalloc(&p, bytes ? bytes : 1) != cudaSuccess) {
        cudaGetLastError();
        return NULL;
    }
    if (cudaMemsetAsync(p, 0, bytes, rt->stream) == cudaSuccess) return p;
    cudaGetLastError();
    cudaFree(p);
    return NULL;
}

void nbi_rt_free(nbi_rt *rt, void *p)
{
    rt->n_calls++;
    if (!p) return;
    cudaStreamSynchronize(rt->stream);
    cudaFree(p);
}

void *nbi_rt_alloc_host(nbi_rt *rt, size_t bytes)
{
    (void)rt;
    void *p = NULL;
    if (cudaMallocHost(&p, bytes ? bytes : 1) != cudaSuccess) {
        cudaGetLastError();
        return NULL;
    }
    memset(p, 0, bytes);
    return p;
}

void nbi_rt_free_host(nbi_rt *rt, void *p)
{
    if (!p) return;
    cudaStreamSynchronize(rt->stream);
    cudaFreeHost(p);
}

bool nbi_rt_memory(nbi_rt *rt, size_t *free_bytes, size_t *total_bytes)
{
    return ok(rt, "free memory", cudaMemGetInfo(free_bytes, total_bytes));
}

void nbi_rt_upload(nbi_rt *rt, void *dst, const void *src, size_t bytes)
{
    rt->n_calls++;
    if (rt->error[0] || !bytes) return;
    ok(rt, "copy to the device",
       cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, rt->stream));
}

void nbi_rt_download(nbi_rt *rt, void *dst, const void *src, size_t bytes)
{
    if (rt->error[0] || !bytes) return;
    ok(rt, "copy from the device",
       cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, rt->stream));
}

void nbi_rt_copy(nbi_rt *rt, void *dst, const void *src, size_t bytes)
{
    rt->n_calls++;
    if (rt->error[0] || rt->skips || !bytes) return;
    ok(rt, "copy on the device",
       cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, rt->stream));
}

void nbi_rt_zero(nbi_rt *rt, void *dst, size_t bytes)
{
    rt->n_calls++;
    if (rt->error[0] || rt->skips || !bytes) return;
    ok(rt, "clearing memory", cudaMemsetAsync(dst, 0, bytes, rt->stream));
}

void nbi_rt_mark(nbi_rt *rt, uint32_t i)
{
    if (!rt->error[0]) ok(rt, "event", cudaEventRecord(rt->marks[i], rt->stream));
}

void nbi_rt_wait_mark(nbi_rt *rt, uint32_t i)
{
    if (!rt->error[0]) ok(rt, "a copy or a kernel", cudaEventSynchronize(rt->marks[i]));
}

/* Kernels that wait for those of a rank that is gone would never end. */
static cudaError_t wait_beside_ranks(nbi_rt *rt)
{
    cudaError_t e;
    for (uint32_t n = 1; (e = cudaStreamQuery(rt->stream)) == cudaErrorNotReady; n++) {
        if (n % POLLS_OF_A_LOOK) continue;
        if (rt->lost(rt->lost_user) || (rt->until_ns && nbi_now_ns() > rt->until_ns))
            *(volatile uint32_t *)rt->stop = 1;
        sched_yield();
    }
    return e;
}

bool nbi_rt_sync(nbi_rt *rt)
{
    const cudaError_t e = rt->lost ? wait_beside_ranks(rt) : cudaStreamSynchronize(rt->stream);
    if (e != cudaSuccess) nbi_rt_fail(rt, "a kernel", (int)e);
    return !rt->error[0];
}

double nbi_rt_seconds(nbi_rt *rt)
{
    float ms = 0;
    if (rt->error[0] || !ok(rt, "event", cudaEventRecord(rt->mark, rt->stream)) || !nbi_rt_sync(rt))
        return 0;
    ok(rt, "time", cudaEventElapsedTime(&ms, rt->opened, rt->mark));
    return (double)ms * 1e-3;
}

bool nbi_rt_clock_open(nbi_rt *rt, uint32_t n_marks)
{
    if (!rt->clock) rt->clock = (cudaEvent_t *)calloc(n_marks, sizeof *rt->clock);
    if (!rt->clock) return false;
    while (rt->n_clock < n_marks) {
        if (cudaEventCreate(&rt->clock[rt->n_clock]) != cudaSuccess) {
            cudaGetLastError();
            return false;
        }
        rt->n_clock++;
    }
    return true;
}

void nbi_rt_clock_mark(nbi_rt *rt, uint32_t i)
{
    if (!rt->error[0]) ok(rt, "event", cudaEventRecord(rt->clock[i], rt->stream));
}

uint64_t nbi_rt_clock_ns(nbi_rt *rt, uint32_t from, uint32_t to)
{
    float ms = 0;
    if (rt->error[0]) return 0;
    ok(rt, "time", cudaEventElapsedTime(&ms, rt->clock[from], rt->clock[to]));
    return ms > 0 ? (uint64_t)((double)ms * 1e6) : 0;
}

void nbi_rt_record(nbi_rt *rt)
{
    rt->n_calls++;
    rt->recording = true;
    ok(rt, "recording", cudaStreamBeginCapture(rt->stream, cudaStreamCaptureModeThreadLocal));
}

nbi_rt_graph *nbi_rt_record_end(nbi_rt *rt)
{
    rt->n_calls++;
    rt->recording = false;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    const cudaError_t e = cudaStreamEndCapture(rt->stream, &graph);
    if (!ok(rt, "end of a recording", e) || rt->error[0]) return NULL;
    if (!ok(rt, "making a graph", cudaGraphInstantiate(&exec, graph, 0))) {
        cudaGraphDestroy(graph);
        return NULL;
    }
    return new nbi_rt_graph{graph, exec};
}

void nbi_rt_replay(nbi_rt *rt, nbi_rt_graph *g)
{
    rt->n_calls++;
    if (!rt->error[0]) ok(rt, "start of a graph", cudaGraphLaunch(g->exec, rt->stream));
}

void nbi_rt_graph_free(nbi_rt *rt, nbi_rt_graph **g)
{
    if (!*g) return;
    cudaStreamSynchronize(rt->stream);
    cudaGraphExecDestroy((*g)->exec);
    cudaGraphDestroy((*g)->graph);
    delete *g;
    *g = NULL;
}

/* ---------------------------------------------------------------- ranks */

nbi_rt_device_id nbi_rt_device(nbi_rt *rt)
{
    nbi_rt_device_id id = {};
    int device = 0;
    if (ok(rt, "number of the device", cudaGetDevice(&device)))
        ok(rt, "place of the device", cudaDeviceGetPCIBusId(id.text, (int)sizeof id.text, device));
    return id;
}

void *nbi_rt_stream(nbi_rt *rt)
{
    return rt->stream;
}

void nbi_rt_use(const nbi_rt *rt)
{
    cudaSetDevice(rt->index); /* it has been used before */
}

bool nbi_rt_waits_for_ranks(nbi_rt *rt, bool (*lost)(void *user), void *user)
{
    if (!lost) {
        nbi_rt_free_host(rt, rt->stop);
        rt->stop = NULL;
    } else if (!rt->stop) {
        rt->stop = (uint32_t *)nbi_rt_alloc_host(rt, 64);
        if (!rt->stop) return false;
    }
    rt->lost = lost;
    rt->lost_user = user;
    return true;
}

static bool said(char *why, size_t why_bytes, const char *what, cudaError_t e)
{
    if (e == cudaSuccess) return false;
    cudaGetLastError();
    snprintf(why, why_bytes, "%s: %s", what, cudaGetErrorString(e));
    return true;
}

void *nbi_rt_share(nbi_rt *rt, size_t bytes, nbi_rt_handle *handle, char *why, size_t why_bytes)
{
    static_assert(sizeof(cudaIpcMemHandle_t) == sizeof *handle, "a handle of CUDA");
    const size_t piece = (size_t)2 << 20;
    cudaIpcMemHandle_t h;
    void *p = NULL;
    rt->n_calls++;
    bytes = (bytes + piece - 1) / piece * piece;
    if (said(why, why_bytes, "device memory", cudaMalloc(&p, bytes))) return NULL;
    if (said(why, why_bytes, "clearing it", cudaMemset(p, 0, bytes)) ||
        said(why, why_bytes, "clearing it", cudaDeviceSynchronize()) ||
        said(why, why_bytes, "cudaIpcGetMemHandle", cudaIpcGetMemHandle(&h, p))) {
        cudaFree(p);
        return NULL;
    }
    memcpy(handle, &h, sizeof h);
    return p;
}

void nbi_rt_unshare(nbi_rt *rt, void *p, size_t bytes)
{
    (void)bytes;
    nbi_rt_free(rt, p);
}

void *nbi_rt_open_shared(nbi_rt *rt, const nbi_rt_handle *handle, size_t bytes, char *why,
                         size_t why_bytes)
{
    (void)bytes;
    cudaIpcMemHandle_t h;
    void *p = NULL;
    rt->n_calls++;
    memcpy(&h, handle, sizeof h);
    if (said(why, why_bytes, "cudaIpcOpenMemHandle",
             cudaIpcOpenMemHandle(&p, h, cudaIpcMemLazyEnablePeerAccess)))
        return NULL;
    return p;
}

void nbi_rt_close_shared(nbi_rt *rt, void *p, size_t bytes)
{
    (void)bytes;
    rt->n_calls++;
    if (!p) return;
    cudaStreamSynchronize(rt->stream);
    cudaIpcCloseMemHandle(p);
}
