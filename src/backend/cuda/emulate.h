/* CUDA's execution model on a CPU, for tests: one block after the other in one thread, its threads
 * as fibers that change at barriers and warp exchanges. Included by device.h where the compiler is
 * not nvcc.
 *
 * Static __shared__ variables are function statics (one block runs at a time); dynamic shared
 * memory is filled with NaN before every block. Asynchronous copies and warpgroup products happen
 * at the wait that they are waited for by (bulk copies: when some thread waits and nothing else can
 * go on), never earlier, so that a missing wait is seen. A block whose threads wait for each other
 * for ever aborts with a sentence. Grid-wide barriers are not emulated. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__      static
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

struct nbi_emu_thread {
    dim3 thread, block;
    unsigned lane, warp;
};

extern nbi_emu_thread *nbi_emu_self; /* the fiber that runs */
extern dim3 nbi_emu_block_dim, nbi_emu_grid_dim;
#define threadIdx (nbi_emu_self->thread)
#define blockIdx  (nbi_emu_self->block)
#define blockDim  nbi_emu_block_dim
#define gridDim   nbi_emu_grid_dim

/* Runs body once per thread of every block. */
void nbi_emu_run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body);

void *nbi_emu_shared();
/* In a loop that waits for another process: lets it run (runtime_emulated.cpp). */
void nbi_emu_spin();
void nbi_emu_sync_block();
void nbi_emu_sync_warp();
/* All lanes of the warp hand in `bytes` (16 at most) and see each other's: slot of lane i. Valid
 * until the lane calls nbi_emu_sync_warp(). */
const unsigned char *nbi_emu_exchange(const void *value, size_t bytes);
bool nbi_emu_lane_lives(unsigned lane);

float nbi_emu_from_f16(uint16_t x);
uint16_t nbi_emu_to_f16(float x);
void nbi_emu_copy_async(void *shared, const void *src, bool take);
void nbi_emu_copy_commit();
void nbi_emu_copy_wait(int left);
void nbi_emu_bar_init(uint64_t *bar, uint32_t count);
void nbi_emu_bar_arrive(uint64_t *bar, uint32_t bytes);
void nbi_emu_bar_wait(uint64_t *bar, uint32_t parity);
void nbi_emu_copy_bulk(void *shared, const void *src, uint32_t bytes, uint64_t *bar);
void nbi_emu_sync_some(uint32_t id, uint32_t threads);
void nbi_emu_ldmatrix(uint32_t r[4], const void *shared);
void nbi_emu_ldmatrix_trans(uint32_t r[4], const void *shared);
void nbi_emu_mma(float d[4], const uint32_t a[4], const uint32_t b[2], bool bf16);
void nbi_emu_mma_fp4(float d[4], const uint32_t a[4], const uint32_t b[2], uint32_t scale_a,
                     uint32_t scale_b);
/* d [n / 2], a and the memory behind descriptor b are read when the group is waited for. */
void nbi_emu_wgmma(float *d, const uint32_t *a, uint64_t b, unsigned n, bool bf16, bool more);
void nbi_emu_wgmma_shared(float *d, uint64_t a, uint64_t b, unsigned n, bool more);
void nbi_emu_wgmma_across(float *d, uint64_t a, uint64_t b, unsigned n, bool more);
void nbi_emu_wgmma_commit();
void nbi_emu_wgmma_wait(int left);

#define NBI_EMU_SLOT 16u

inline void __syncthreads()
{
    nbi_emu_sync_block();
}

inline void __syncwarp(unsigned = 0xffffffffu)
{
    nbi_emu_sync_warp();
}

inline void __threadfence()
{
}
inline void __threadfence_block()
{
}
inline void __nanosleep(unsigned)
{
}

template <class T> inline T nbi_emu_from_lane(T x, unsigned lane)
{
    static_assert(sizeof(T) <= NBI_EMU_SLOT, "too large for a shuffle");
    const unsigned char *slots = nbi_emu_exchange(&x, sizeof x);
    T y;
    __builtin_memcpy(&y, slots + (lane & 31u) * NBI_EMU_SLOT, sizeof y);
    nbi_emu_sync_warp();
    return y;
}

template <class T> inline T __shfl_sync(unsigned, T x, int lane, int width = 32)
{
    const unsigned self = nbi_emu_self->lane, base = self & ~((unsigned)width - 1u);
    return nbi_emu_from_lane(x, base + ((unsigned)lane & ((unsigned)width - 1u)));
}

template <class T> inline T __shfl_xor_sync(unsigned, T x, int mask, int = 32)
{
    return nbi_emu_from_lane(x, nbi_emu_self->lane ^ (unsigned)mask);
}

template <class T> inline T __shfl_down_sync(unsigned, T x, unsigned d, int width = 32)
{
    const unsigned self = nbi_emu_self->lane, end = (self | ((unsigned)width - 1u));
    return nbi_emu_from_lane(x, self + d > end ? self : self + d);
}

template <class T> inline T __shfl_up_sync(unsigned, T x, unsigned d, int width = 32)
{
    const unsigned self = nbi_emu_self->lane, first = self & ~((unsigned)width - 1u);
    return nbi_emu_from_lane(x, self < first + d ? self : self - d);
}

template <class F> inline unsigned nbi_emu_reduce(unsigned x, F better)
{
    const unsigned char *slots = nbi_emu_exchange(&x, sizeof x);
    for (unsigned i = 0; i < 32; i++) {
        unsigned v;
        __builtin_memcpy(&v, slots + i * NBI_EMU_SLOT, sizeof v);
        if (nbi_emu_lane_lives(i) && better(v, x)) x = v;
    }
    nbi_emu_sync_warp();
    return x;
}

inline unsigned __reduce_max_sync(unsigned, unsigned x)
{
    return nbi_emu_reduce(x, [](unsigned a, unsigned b) { return a > b; });
}

inline unsigned __reduce_min_sync(unsigned, unsigned x)
{
    return nbi_emu_reduce(x, [](unsigned a, unsigned b) { return a < b; });
}

inline unsigned __ballot_sync(unsigned, int predicate)
{
    const int own = predicate != 0;
    const unsigned char *slots = nbi_emu_exchange(&own, sizeof own);
    unsigned r = 0;
    for (unsigned i = 0; i < 32; i++) {
        int v;
        __builtin_memcpy(&v, slots + i * NBI_EMU_SLOT, sizeof v);
        r |= (unsigned)(nbi_emu_lane_lives(i) && v) << i;
    }
    nbi_emu_sync_warp();
    return r;
}

inline int __any_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}

inline int __all_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, !predicate) == 0;
}

inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}

inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}

inline unsigned __umulhi(unsigned a, unsigned b)
{
    return (unsigned)((uint64_t)a * b >> 32);
}

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s)
{
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned pick = s >> 4 * i & 15u;
        uint32_t byte = (uint32_t)(both >> 8 * (pick & 7u)) & 0xffu;
        if (pick & 8u) byte = byte & 0x80u ? 0xffu : 0;
        r |= byte << 8 * i;
    }
    return r;
}

#define __expf(x) expf(x) /* the C library has a private name of this spelling */

inline float __fadd_rn(float a, float b)
{
    return a + b;
}

inline float rsqrtf(float x)
{
    return 1.0f / __builtin_sqrtf(x);
}

template <class T> inline T atomicAdd(T *p, T x)
{
    const T old = *p;
    *p = (T)(old + x);
    return old;
}

template <class T> inline T atomicMax(T *p, T x)
{
    const T old = *p;
    if (x > old) *p = x;
    return old;
}

template <class T> inline T atomicMin(T *p, T x)
{
    const T old = *p;
    if (x < old) *p = x;
    return old;
}

template <class T> inline T atomicOr(T *p, T x)
{
    const T old = *p;
    *p = old | x;
    return old;
}

template <class T> inline T atomicCAS(T *p, T expected, T x)
{
    const T old = *p;
    if (old == expected) *p = x;
    return old;
}

template <class T> inline T atomicExch(T *p, T x)
{
    const T old = *p;
    *p = x;
    return old;
}

template <class T> inline T __ldg(const T *p)
{
    return *p;
}
