// Host side shared by the programs of the laboratory: checks, random numbers, timing, the read-only
// stream.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include <cuda_runtime.h>

#define CK(call)                                                                               \
    do {                                                                                       \
        cudaError_t ck_ = (call);                                                              \
        if (ck_ != cudaSuccess) {                                                              \
            printf("FAIL %s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(ck_)); \
            exit(2);                                                                           \
        }                                                                                      \
    } while (0)

static int lab_failures;

// Counts a failure and says what was found.
__attribute__((format(printf, 2, 3))) static inline bool expect(bool ok, const char *fmt, ...)
{
    if (ok) return true;
    ++lab_failures;
    va_list ap;
    va_start(ap, fmt);
    printf("FAIL ");
    vprintf(fmt, ap);
    printf("\n");
    va_end(ap);
    return false;
}

static inline int lab_exit()
{
    printf(lab_failures ? "%d FAILED\n" : "all checks passed\n", lab_failures);
    return lab_failures ? 1 : 0;
}

// splitmix64 as a counter-based generator: the same value on host and device, without state.
__host__ __device__ inline uint64_t mix64(uint64_t x)
{
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// A value of a roughly normal distribution, variance 1: sum of four uniform ones.
__host__ __device__ inline float normal_at(uint64_t seed, uint64_t i)
{
    uint64_t h = mix64(seed * 0x100000001B3ull + i);
    float s = 0;
    for (int j = 0; j < 4; ++j) s += (float)(h >> (16 * j) & 0xFFFF) * (1.0f / 65536.0f);
    return (s - 2.0f) * 1.7320508f;
}

template <class T> static inline T *device_alloc(size_t n)
{
    void *p = nullptr;
    CK(cudaMalloc(&p, n * sizeof(T)));
    CK(cudaMemset(p, 0xFF, n * sizeof(T))); // poison: NaN in every float format used here
    return (T *)p;
}

template <class T> static inline T *device_copy(const std::vector<T> &v)
{
    T *p = device_alloc<T>(v.size());
    CK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

template <class T> static inline std::vector<T> host_copy(const T *d, size_t n)
{
    std::vector<T> v(n);
    CK(cudaMemcpy(v.data(), d, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}

static inline cudaStream_t lab_stream()
{
    static cudaStream_t s;
    if (!s) CK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

// Captures what `body` launches on lab_stream().
static inline cudaGraphExec_t capture(const std::function<void(cudaStream_t)> &body)
{
    cudaStream_t s = lab_stream();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    body(s);
    CK(cudaStreamEndCapture(s, &graph));
    CK(cudaGraphInstantiate(&exec, graph, 0));
    CK(cudaGraphDestroy(graph));
    return exec;
}

// Median time in microseconds of `body` over `reps` runs, after `warm` runs.
static inline double time_us(const std::function<void(cudaStream_t)> &body, int reps = 9,
                             int warm = 2)
{
    cudaStream_t s = lab_stream();
    cudaEvent_t a, b;
    CK(cudaEventCreate(&a));
    CK(cudaEventCreate(&b));
    std::vector<double> t;
    for (int i = -warm; i < reps; ++i) {
        CK(cudaEventRecord(a, s));
        body(s);
        CK(cudaEventRecord(b, s));
        CK(cudaEventSynchronize(b));
        CK(cudaGetLastError());
        float ms;
        CK(cudaEventElapsedTime(&ms, a, b));
        if (i >= 0) t.push_back(ms * 1e3);
    }
    CK(cudaEventDestroy(a));
    CK(cudaEventDestroy(b));
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}

static inline double time_graph_us(cudaGraphExec_t g, int reps = 9)
{
    return time_us([&](cudaStream_t s) { CK(cudaGraphLaunch(g, s)); }, reps);
}

// Launches with or without the attribute of programmatic dependent launch.
template <class... P, class... A>
static inline void launch(void (*kernel)(P...), int grid, int block, size_t smem, bool pdl,
                          cudaStream_t s, A... args)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute attr[1] = {};
    attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[0].val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = dim3((unsigned)grid);
    c.blockDim = dim3((unsigned)block);
    c.dynamicSmemBytes = smem;
    c.stream = s;
    c.attrs = attr;
    c.numAttrs = pdl ? 1 : 0;
    CK(cudaLaunchKernelEx(&c, kernel, P(args)...));
}

template <class K> static inline void allow_smem(K kernel, size_t bytes)
{
    CK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

static inline int sm_count()
{
    int n;
    CK(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0));
    return n;
}

static __global__ void __launch_bounds__(1024) lab_fill(uint64_t *p, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] = mix64(i);
}

static __global__ void __launch_bounds__(512) lab_read(const uint4 *p, size_t n, uint32_t *out)
{
    size_t stride = (size_t)gridDim.x * blockDim.x,
           i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    uint32_t x = 0;
    for (; i + 7 * stride < n; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                         : "l"(p + i + j * stride));
#pragma unroll
        for (int j = 0; j < 8; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < n; i += stride) x ^= p[i].x ^ p[i].y ^ p[i].z ^ p[i].w;
    if (x == 0x12345678) *out = x; // practically never: keeps the loads
}

// Read-only stream of 4 GiB in bytes per microsecond (1e6 = 1 TB/s). The yardstick of a run.
static inline double stream_rate()
{
    const size_t bytes = (size_t)4 << 30;
    uint64_t *p = nullptr;
    uint32_t *out = device_alloc<uint32_t>(1);
    CK(cudaMalloc((void **)&p, bytes));
    lab_fill<<<sm_count() * 2, 1024, 0, lab_stream()>>>(p, bytes / 8);
    CK(cudaGetLastError());
    double us = time_us(
        [&](cudaStream_t s) {
            lab_read<<<sm_count() * 2, 512, 0, s>>>((const uint4 *)p, bytes / 16, out);
        },
        7);
    CK(cudaFree(p));
    CK(cudaFree(out));
    return (double)bytes / us;
}

// The first line of every program: device and yardstick. Returns the rate.
static inline double lab_start(const char *name, bool measure = true)
{
    cudaDeviceProp p;
    CK(cudaSetDevice(0));
    CK(cudaGetDeviceProperties(&p, 0));
    printf("== %s: %s, %d SMs, %.0f MB of L2", name, p.name, p.multiProcessorCount,
           p.l2CacheSize / 1e6);
    double rate = measure ? stream_rate() : 0;
    if (measure) printf(", read-only stream %.3f TB/s", rate / 1e6);
    printf("\n");
    if (p.major != 9) {
        printf("FAIL compute capability %d.%d, built for 9.0a\n", p.major, p.minor);
        exit(2);
    }
    return rate;
}
