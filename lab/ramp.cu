// Short streams: what does one launch inside a graph cost that reads 1 to 80 MB, and what does each
// further megabyte cost? By plain loads and by bulk copies, with and without programmatic dependent
// launch.
#include "lab.h"
#include "ptx.cuh"

constexpr int PIECE = 4096, CONSUMERS = 8;

// XOR of a block's values into *out.
__device__ inline void reduce_xor(uint32_t x, uint32_t *out)
{
    x = __reduce_xor_sync(0xFFFFFFFF, x);
    if (threadIdx.x % 32 == 0) atomicXor(out, x);
}

template <int DEPTH>
__global__ void __launch_bounds__(512) by_loads(const uint4 *p, size_t n, uint32_t *out)
{
    size_t stride = (size_t)gridDim.x * blockDim.x,
           i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    uint32_t x = 0;
    pdl_trigger();
    for (; i < n; i += DEPTH * stride) {
        uint4 v[DEPTH] = {};
#pragma unroll
        for (int j = 0; j < DEPTH; ++j)
            if (i + j * stride < n) v[j] = ld_stream(p + i + j * stride);
#pragma unroll
        for (int j = 0; j < DEPTH; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    pdl_wait(); // the stream depends on nothing, the result is written in order
    reduce_xor(x, out);
}

// RING pieces of 4 KB: 48 fill the shared memory, 24 leave room for the next launch beside this
// one.
template <int RING>
__global__ void __launch_bounds__((CONSUMERS + 1) * 32)
    by_bulk(const uint4 *p, size_t n, uint32_t *out)
{
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ uint64_t full[RING], empty[RING];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    pdl_trigger();
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; ++i) {
            mbar_init(&full[i], 1);
            mbar_init(&empty[i], 1);
        }
        mbar_fence_init();
    }
    __syncthreads();
    const size_t bytes = n * 16;
    const int pieces = (int)((bytes + PIECE - 1) / PIECE), blocks = gridDim.x, first = blockIdx.x;
    const int mine = first < pieces ? (pieces - first + blocks - 1) / blocks : 0;
    auto size = [&](int i) {
        size_t left = bytes - (size_t)(first + i * blocks) * PIECE;
        return (uint32_t)(left < PIECE ? left : PIECE);
    };
    uint32_t x = 0;
    if (warp == CONSUMERS) {
        for (int i = 0; lane == 0 && i < mine; ++i) {
            if (i >= RING) mbar_wait(&empty[i % RING], (uint32_t)(i / RING - 1) & 1);
            mbar_expect(&full[i % RING], size(i));
            bulk_load(ring + i % RING * PIECE,
                      (const uint8_t *)p + (size_t)(first + i * blocks) * PIECE, size(i),
                      &full[i % RING]);
        }
    } else {
        for (int i = warp; i < mine; i += CONSUMERS) {
            mbar_wait(&full[i % RING], (uint32_t)(i / RING) & 1);
            const uint4 *s = (const uint4 *)(ring + i % RING * PIECE);
            for (uint32_t j = (uint32_t)lane; j < size(i) / 16; j += 32)
                x ^= s[j].x ^ s[j].y ^ s[j].z ^ s[j].w;
            __syncwarp();
            if (lane == 0) mbar_arrive(&empty[i % RING]);
        }
    }
    pdl_wait();
    __syncwarp();
    reduce_xor(x, out);
}

int main()
{
    double stream = lab_start("ramp");
    const size_t pool = (size_t)2 << 30;
    const int sms = sm_count(), sizes[] = {1, 2, 5, 10, 20, 40, 80};
    uint64_t *p = device_alloc<uint64_t>(pool / 8);
    uint32_t *out = device_alloc<uint32_t>(1);
    lab_fill<<<sms, 1024>>>(p, pool / 8);
    CK(cudaGetLastError());
    CK(cudaDeviceSynchronize());
    allow_smem(by_bulk<48>, 48 * PIECE);
    allow_smem(by_bulk<24>, 24 * PIECE);
    struct {
        const char *name;
        void (*kernel)(const uint4 *, size_t, uint32_t *);
        int blocks, threads;
        size_t smem;
        bool pdl;
    } forms[] = {
        {"loads, 8 in flight, 2 x 512", by_loads<8>, 2 * sms, 512, 0, false},
        {"loads, 4 in flight, 4 x 512", by_loads<4>, 4 * sms, 512, 0, false},
        {"bulk, ring of 192 KB", by_bulk<48>, sms, (CONSUMERS + 1) * 32, 48 * PIECE, false},
        {"bulk, ring of 96 KB", by_bulk<24>, sms, (CONSUMERS + 1) * 32, 24 * PIECE, false},
        {"loads, 8 in flight, PDL", by_loads<8>, 2 * sms, 512, 0, true},
        {"loads, 4 in flight, PDL", by_loads<4>, 4 * sms, 512, 0, true},
        {"bulk, ring of 192 KB, PDL", by_bulk<48>, sms, (CONSUMERS + 1) * 32, 48 * PIECE, true},
        {"bulk, ring of 96 KB, PDL", by_bulk<24>, sms, (CONSUMERS + 1) * 32, 24 * PIECE, true},
    };
    printf("%-30s %6s %9s %9s %7s %16s\n", "form", "MB", "us", "GB/s", "share", "marginal us/MB");
    for (auto &f : forms) {
        double before = 0, before_mb = 0;
        for (int mb : sizes) {
            size_t bytes = (size_t)mb * 1000000 / PIECE * PIECE, slots = pool / bytes;
            int launches = (int)std::min<size_t>(slots, (size_t)std::max(40, 320 / mb));
            auto call = [&](int i, cudaStream_t s) { // spread over the pool: nothing is left in L2
                const uint8_t *at =
                    (const uint8_t *)p + (size_t)i * (slots / (size_t)launches) * bytes;
                launch(f.kernel, f.blocks, f.threads, f.smem, f.pdl && i > 0, s, (const uint4 *)at,
                       bytes / 16, out);
            };
            CK(cudaMemset(out, 0, 4));
            CK(cudaDeviceSynchronize());
            call(1, lab_stream());
            CK(cudaStreamSynchronize(lab_stream()));
            uint64_t x = 0;
            size_t start = (slots / (size_t)launches) * bytes / 8;
            for (size_t i = 0; i < bytes / 8; ++i) x ^= mix64(start + i);
            uint32_t want = (uint32_t)x ^ (uint32_t)(x >> 32), got = host_copy(out, 1)[0];
            expect(want == got, "%s, %d MB: XOR of the bytes read %08x, expected %08x", f.name, mb,
                   got, want);
            cudaGraphExec_t g = capture([&](cudaStream_t s) {
                for (int i = 0; i < launches; ++i) call(i, s);
            });
            double us = time_graph_us(g) / launches, rate = (double)bytes / us;
            CK(cudaGraphExecDestroy(g));
            printf("%-30s %6d %9.2f %9.0f %6.1f%%", f.name, mb, us, rate / 1e3,
                   100 * rate / stream);
            if (before_mb > 0) printf(" %16.3f", (us - before) / (mb - before_mb));
            printf("\n");
            before = us;
            before_mb = mb;
        }
    }
    printf("a megabyte at full rate: %.3f us\n", 1e6 / stream);
    return lab_exit();
}
