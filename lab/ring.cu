// Weights stream through a ring in shared memory while the computation waits at grid barriers: how
// much of the stream survives 3, 4 or 6 dependencies a layer, and does it help to keep less in
// flight near them? 48 layers of 32.4 MB; bulk copies of 4 KB, ring of 192 KB, one producer thread
// and 8 consumer warps.
#include "lab.h"
#include "ptx.cuh"

constexpr int PIECE = 4096, RING = 48, WARPS = 8, LAYERS = 48, PER_LAYER = 60; // pieces of a block

enum Cap { CAP_NONE, CAP_ACROSS, CAP_ALWAYS };
static const char *const cap_name[] = {"", "for later phases", "always"};

struct Args {
    const uint8_t *pool;
    unsigned *counter;
    uint32_t *out;
    int per_phase, phases; // pieces of a block in a phase; phases in all
    int barrier;           // 0: none
    int cap, cap_mode;     // pieces in flight
};

__global__ void __launch_bounds__((WARPS + 1) * 32, 1) ring_kernel(const __grid_constant__ Args a)
{
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ uint64_t full[RING], empty[RING];
    __shared__ int reached; // phase the consumers are in
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, total = a.phases * a.per_phase;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; ++i) {
            mbar_init(&full[i], 1);
            mbar_init(&empty[i], 1);
        }
        mbar_fence_init();
        reached = 0;
    }
    __syncthreads();
    if (warp == WARPS) {
        for (int i = 0, phase = 0, left = a.per_phase; lane == 0 && i < total; ++i) {
            if (!left) {
                ++phase;
                left = a.per_phase;
            }
            --left;
            if (i >= RING) mbar_wait(&empty[i % RING], (uint32_t)(i / RING - 1) & 1);
            bool capped = a.cap_mode == CAP_ALWAYS ||
                          (a.cap_mode == CAP_ACROSS && phase > *(volatile int *)&reached);
            if (capped && i >= a.cap) {
                int j = i - a.cap; // has landed before this one is asked for
                mbar_wait(&full[j % RING], (uint32_t)(j / RING) & 1);
            }
            mbar_expect(&full[i % RING], PIECE);
            bulk_load(ring + i % RING * PIECE,
                      a.pool + ((size_t)i * gridDim.x + blockIdx.x) * PIECE, PIECE,
                      &full[i % RING]);
        }
        return;
    }
    uint32_t x = 0;
    for (int phase = 0, base = 0; phase < a.phases; ++phase, base += a.per_phase) {
        for (int i = base + (warp - base % WARPS + WARPS) % WARPS; i < base + a.per_phase;
             i += WARPS) {
            mbar_wait(&full[i % RING], (uint32_t)(i / RING) & 1);
            const uint4 *s = (const uint4 *)(ring + i % RING * PIECE);
#pragma unroll
            for (int j = 0; j < PIECE / 512; ++j) {
                uint4 v = s[lane + 32 * j];
                x ^= v.x ^ v.y ^ v.z ^ v.w;
            }
            __syncwarp();
            if (lane == 0) mbar_arrive(&empty[i % RING]);
        }
        if (!a.barrier) continue;
        named_sync(1, WARPS * 32);
        if (threadIdx.x == 0) {
            red_release(a.counter, 1);
            poll_until(a.counter, (unsigned)(phase + 1) * gridDim.x);
            *(volatile int *)&reached = phase + 1;
        }
        named_sync(1, WARPS * 32);
    }
    x = __reduce_xor_sync(0xFFFFFFFF, x);
    if (lane == 0) atomicXor(a.out, x);
}

int main()
{
    double stream = lab_start("ring");
    const int sms = sm_count();
    const size_t bytes = (size_t)LAYERS * PER_LAYER * (size_t)sms * PIECE,
                 smem = (size_t)RING * PIECE;
    uint64_t *pool = device_alloc<uint64_t>(bytes / 8);
    lab_fill<<<sms, 1024>>>(pool, bytes / 8);
    CK(cudaGetLastError());
    CK(cudaDeviceSynchronize());
    uint64_t x = 0;
    for (size_t i = 0; i < bytes / 8; ++i) x ^= mix64(i);
    const uint32_t want = (uint32_t)x ^ (uint32_t)(x >> 32);
    Args a = {
        (const uint8_t *)pool, device_alloc<unsigned>(1), device_alloc<uint32_t>(1), 0, 0, 0, 0, 0};
    allow_smem(ring_kernel, smem);
    const double floor_us = (double)bytes / stream / LAYERS;
    printf("%.1f MB a layer, %.2f us at the rate of the stream\n", (double)bytes / LAYERS / 1e6,
           floor_us);
    printf("%12s %-30s %9s %9s %7s %18s\n", "dependencies", "in flight at most", "us/layer",
           "us/phase", "share", "lost per phase, us");
    auto test = [&](int per_layer, int cap, int mode) {
        const bool barrier = per_layer > 0;
        const int n = barrier ? per_layer : 1;
        a.per_phase = PER_LAYER / n;
        a.phases = LAYERS * n;
        a.barrier = barrier;
        a.cap = cap;
        a.cap_mode = mode;
        void *args[] = {&a};
        std::vector<double> t;
        for (int i = 0; i < 7; ++i) {
            CK(cudaMemset(a.counter, 0, 4));
            CK(cudaMemset(a.out, 0, 4));
            CK(cudaDeviceSynchronize());
            t.push_back(time_us(
                [&](cudaStream_t s) {
                    CK(cudaLaunchCooperativeKernel((const void *)ring_kernel, dim3((unsigned)sms),
                                                   dim3((WARPS + 1) * 32), args, smem, s));
                },
                1, 0));
            uint32_t got = host_copy(a.out, 1)[0];
            expect(got == want, "%d dependencies, cap %d: XOR of the bytes %08x, expected %08x",
                   per_layer, cap, got, want);
        }
        std::sort(t.begin(), t.end());
        double us = t[t.size() / 2] / LAYERS;
        char how[64] = "192 KB (the ring)";
        if (mode != CAP_NONE)
            snprintf(how, sizeof how, "%d KB %s", cap * PIECE / 1024, cap_name[mode]);
        printf("%12d %-30s %9.2f %9.2f %6.1f%% %18.2f\n", per_layer, how, us, us / n,
               100 * floor_us / us, (us - floor_us) / n);
    };
    for (int mode = CAP_NONE; mode <= CAP_ALWAYS; ++mode)
        for (int cap : {4, 8, 12, 16, 24}) {
            if (mode == CAP_NONE && cap > 4) continue;
            if (mode != CAP_ACROSS) test(0, cap, mode); // without barriers nothing lies across one
            for (int per_layer : {3, 4, 6}) test(per_layer, cap, mode);
        }
    return lab_exit();
}
