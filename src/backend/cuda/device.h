/* What kernels are written with, and nothing else: under nvcc thin wrappers of instructions, under
 * a C++ compiler their emulation (emulate.h), so that the same kernels run in tests without a GPU.
 *
 * Raw bits stand for small formats: uint16_t one BF16 or FP16 value, uint32_t two of them (the
 * first in the low half), uint8_t one E4M3 value. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define NBI_EMULATED 0
#define NBI_DEV      __device__ __forceinline__
/* Dynamic shared memory of the block, 128-byte aligned. */
template <class T> NBI_DEV T *nbi_shared()
{
    extern __shared__ __align__(128) unsigned char nbi_shared_bytes[];
    return reinterpret_cast<T *>(nbi_shared_bytes);
}
/* The same, 1,024-byte aligned: for wgmma. */
template <class T> NBI_DEV T *nbi_shared_1024()
{
    extern __shared__ __align__(1024) unsigned char nbi_shared_bytes_1024[];
    return reinterpret_cast<T *>(nbi_shared_bytes_1024);
}
#else
#include "backend/cuda/emulate.h"
#define NBI_EMULATED 1
#define NBI_DEV      inline
template <class T> inline T *nbi_shared()
{
    return reinterpret_cast<T *>(nbi_emu_shared());
}
template <class T> inline T *nbi_shared_1024()
{
    return reinterpret_cast<T *>(nbi_emu_shared());
}
#endif

#if NBI_EMULATED || __CUDA_ARCH__ >= 900
#define NBI_SM90 1
#else
#define NBI_SM90 0
#endif

/* wgmma, which only 9.0 has */
#if NBI_EMULATED || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define NBI_SM90A 1
#else
#define NBI_SM90A 0
#endif

#define NBI_WARP      32
#define NBI_FULL_MASK 0xffffffffu

struct alignas(16) nbi_u32x4 {
    uint32_t v[4];
};
struct alignas(16) nbi_f32x4 {
    float v[4];
};
struct alignas(8) nbi_u32x2 {
    uint32_t v[2];
};
struct alignas(8) nbi_f32x2 {
    float v[2];
};

/* ---------------------------------------------------------------- bits */

NBI_DEV uint32_t nbi_bits(float x)
{
#if NBI_EMULATED
    return __builtin_bit_cast(uint32_t, x);
#else
    return __float_as_uint(x);
#endif
}

NBI_DEV float nbi_float(uint32_t x)
{
#if NBI_EMULATED
    return __builtin_bit_cast(float, x);
#else
    return __uint_as_float(x);
#endif
}

/* What divides again and again: a division is some 30 instructions that wait for each other. */
struct nbi_divisor {
    uint32_t d, inv;
};

inline nbi_divisor nbi_divisor_of(uint32_t d)
{
    return {d, (uint32_t)((1ull << 31) / d + 1)};
}

/* x / d and x % d where x * d < 2^31. */
NBI_DEV uint32_t nbi_div(uint32_t x, nbi_divisor by)
{
    return (uint32_t)((uint64_t)x * by.inv >> 31);
}

NBI_DEV uint32_t nbi_mod(uint32_t x, nbi_divisor by)
{
    return x - nbi_div(x, by) * by.d;
}

/* Whether item i is this block's, of items that blocks take in turn. */
NBI_DEV bool nbi_is_own(uint32_t i)
{
    return i < gridDim.x ? i == blockIdx.x : i % gridDim.x == blockIdx.x;
}

/* a / b as '/' rounds it, without its branch: for 2^-60 <= |a| <= 2^60 and 1 <= b <= 2^60. */
NBI_DEV float nbi_divide_in_range(float a, float b)
{
#if NBI_EMULATED
    return a / b;
#else
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    r = fmaf(r, fmaf(-b, r, 1.0f), r);
    const float q = a * r, near = fmaf(r, fmaf(-b, q, a), q);
    return fmaf(r, fmaf(-b, near, a), near);
#endif
}

/* 2^e for -126 <= e <= 127. */
NBI_DEV float nbi_pow2(int e)
{
    return nbi_float((uint32_t)(e + 127) << 23);
}

NBI_DEV bool nbi_finite(float x)
{
    return (nbi_bits(x) & 0x7f800000u) != 0x7f800000u;
}

/* ---------------------------------------------------------------- small formats */

/* Round to nearest, ties to even; NaN stays NaN. */
NBI_DEV uint16_t nbi_to_bf16(float x)
{
#if NBI_EMULATED
    uint32_t u = nbi_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#else
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#endif
}

NBI_DEV float nbi_from_bf16(uint16_t x)
{
    return nbi_float((uint32_t)x << 16);
}

NBI_DEV uint32_t nbi_to_bf16x2(float lo, float hi)
{
#if NBI_EMULATED
    return (uint32_t)nbi_to_bf16(lo) | (uint32_t)nbi_to_bf16(hi) << 16;
#else
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
#endif
}

NBI_DEV float nbi_bf16_lo(uint32_t x)
{
    return nbi_float(x << 16);
}

NBI_DEV float nbi_bf16_hi(uint32_t x)
{
    return nbi_float(x & 0xffff0000u);
}

NBI_DEV float nbi_from_f16(uint16_t x)
{
#if NBI_EMULATED
    return nbi_emu_from_f16(x);
#else
    return __half2float(__ushort_as_half(x));
#endif
}

NBI_DEV uint16_t nbi_to_f16(float x)
{
#if NBI_EMULATED
    return nbi_emu_to_f16(x);
#else
    return __half_as_ushort(__float2half_rn(x));
#endif
}

NBI_DEV uint32_t nbi_to_f16x2(float lo, float hi)
{
#if NBI_EMULATED
    return (uint32_t)nbi_to_f16(lo) | (uint32_t)nbi_to_f16(hi) << 16;
#else
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
#endif
}

/* Two FP16 products, round to nearest even; subnormals are kept. */
NBI_DEV uint32_t nbi_mul_f16x2(uint32_t a, uint32_t b)
{
#if NBI_EMULATED
    const float lo = nbi_from_f16((uint16_t)a) * nbi_from_f16((uint16_t)b);
    const float hi = nbi_from_f16((uint16_t)(a >> 16)) * nbi_from_f16((uint16_t)(b >> 16));
    return nbi_to_f16x2(lo, hi);
#else
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#endif
}

/* Both halves of a times one half of b. */
NBI_DEV uint32_t nbi_mul_f16x2_lo(uint32_t a, uint32_t b)
{
#if NBI_EMULATED
    return nbi_mul_f16x2(a, (b & 0xffffu) | b << 16);
#else
    uint32_t r;
    asm("{.reg .b16 l, h; .reg .b32 d; mov.b32 {l, h}, %2; mov.b32 d, {l, l}; "
        "mul.rn.f16x2 %0, %1, d;}"
        : "=r"(r)
        : "r"(a), "r"(b));
    return r;
#endif
}

NBI_DEV uint32_t nbi_mul_f16x2_hi(uint32_t a, uint32_t b)
{
#if NBI_EMULATED
    return nbi_mul_f16x2(a, (b & 0xffff0000u) | b >> 16);
#else
    uint32_t r;
    asm("{.reg .b16 l, h; .reg .b32 d; mov.b32 {l, h}, %2; mov.b32 d, {h, h}; "
        "mul.rn.f16x2 %0, %1, d;}"
        : "=r"(r)
        : "r"(a), "r"(b));
    return r;
#endif
}

/* E4M3 to FP16 times 2^-8, exact: the bits only move. */
NBI_DEV uint16_t nbi_e4m3_bits_f16(uint8_t x)
{
    return (uint16_t)((uint32_t)(x & 0x80u) << 8 | (uint32_t)(x & 0x7fu) << 7);
}

NBI_DEV float nbi_from_e4m3(uint8_t x)
{
    if ((x & 0x7fu) == 0x7fu) return nbi_float(0x7fc00000u);
    return nbi_from_f16(nbi_e4m3_bits_f16(x)) * 256.0f;
}

/* Round to nearest even, saturating at 448; NaN stays NaN. */
NBI_DEV uint8_t nbi_to_e4m3(float x)
{
    const uint32_t sign = nbi_bits(x) >> 24 & 0x80u;
    const float a = nbi_float(nbi_bits(x) & 0x7fffffffu);
    if (!(a == a)) return 0x7f;
    if (a >= 464.0f) return (uint8_t)(sign | 0x7eu);
    int e = (int)(nbi_bits(a) >> 23) - 127;
    if (e < -6) e = -6;
    const float unit = nbi_pow2(e - 3); /* of the last place */
    float q = a / unit;                 /* exact: a power of two */
    const float down = (float)(int)q;
    const float rest = q - down;
    q = rest > 0.5f || (rest == 0.5f && ((int)down & 1)) ? down + 1 : down;
    const float v = q * unit;
    if (v > 448.0f) return (uint8_t)(sign | 0x7eu);
    if (v < 0.015625f) return (uint8_t)(sign | (uint32_t)(v * 512.0f)); /* below 2^-6 */
    const uint32_t b = nbi_bits(v);
    return (uint8_t)(sign | (((b >> 23) - 120u) << 3 | (b >> 20 & 7u)));
}

/* ---------------------------------------------------------------- warps */

NBI_DEV int nbi_lane()
{
    return (int)(threadIdx.x & 31u);
}

/* The order of additions is that of the tree: the same bits for every caller. */
NBI_DEV float nbi_warp_sum(float x)
{
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(NBI_FULL_MASK, x, d);
    return x;
}

NBI_DEV float nbi_warp_max(float x)
{
    for (int d = 16; d; d >>= 1) {
        const float y = __shfl_xor_sync(NBI_FULL_MASK, x, d);
        x = y > x ? y : x;
    }
    return x;
}

NBI_DEV uint32_t nbi_warp_max(uint32_t x)
{
    return __reduce_max_sync(NBI_FULL_MASK, x);
}

NBI_DEV uint32_t nbi_warp_min(uint32_t x)
{
    return __reduce_min_sync(NBI_FULL_MASK, x);
}

/* Integers in the order of the floats, for choices by reductions of integers: -0 is below 0. Finite
 * values and infinities are never 0 or UINT32_MAX. */
NBI_DEV uint32_t nbi_order(float x)
{
    const uint32_t u = nbi_bits(x);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

NBI_DEV float nbi_unorder(uint32_t x)
{
    return nbi_float(x & 0x80000000u ? x & 0x7fffffffu : ~x);
}

/* ---------------------------------------------------------------- memory */

/* 16 bytes that nobody writes while the kernel runs and that are read once. */
NBI_DEV nbi_u32x4 nbi_load_once(const void *p)
{
#if NBI_EMULATED
    return *static_cast<const nbi_u32x4 *>(p);
#else
    nbi_u32x4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
                 : "l"(p));
    return r;
#endif
}

NBI_DEV nbi_u32x2 nbi_load_once8(const void *p)
{
#if NBI_EMULATED
    return *static_cast<const nbi_u32x2 *>(p);
#else
    nbi_u32x2 r;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(r.v[0]), "=r"(r.v[1])
                 : "l"(p));
    return r;
#endif
}

/* A value that another kernel may have written while the kernel before this one still runs: read
 * past the L1 cache. */
template <class T> NBI_DEV T nbi_load_fresh(const T *p)
{
    static_assert(sizeof(T) == 4, "four bytes at a time");
#if NBI_EMULATED
    return *p;
#else
    T r;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
    return r;
#endif
}

/* True in every thread of the block that is the last of `n` to arrive at *count, which is zero
 * between kernels; what the others stored can be read then. `last` is shared memory. */
NBI_DEV bool nbi_arrive_last(uint32_t *count, uint32_t n, bool *last)
{
    __syncthreads();
    if (threadIdx.x == 0) {
#if NBI_EMULATED
        const uint32_t before = atomicAdd(count, 1u);
#else
        uint32_t before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(count)
                     : "memory");
#endif
        *last = before + 1 == n;
        if (*last) *count = 0;
    }
    __syncthreads();
    return *last;
}

/* Counts an arrival; what the block stored before a barrier can be read by whoever sees it. */
NBI_DEV void nbi_arrive(uint32_t *count)
{
#if NBI_EMULATED
    atomicAdd(count, 1u);
#else
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
#endif
}

/* Arrivals up to now; what those that came stored can be read, past the L1 cache. */
NBI_DEV uint32_t nbi_arrived(const uint32_t *count)
{
#if NBI_EMULATED
    return *count;
#else
    uint32_t r;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(count) : "memory");
    return r;
#endif
}

/* Between blocks of a launch: 8 bytes that arrive whole. */
NBI_DEV void nbi_whole_send(uint64_t *to, uint64_t x)
{
#if NBI_EMULATED
    *to = x;
#else
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
#endif
}

NBI_DEV uint64_t nbi_whole_look(const uint64_t *from)
{
#if NBI_EMULATED
    return *from;
#else
    uint64_t r;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(r) : "l"(from) : "memory");
    return r;
#endif
}

/* Packets of 16 bytes between kernels of different GPUs: each half of 8 bytes arrives whole, halves
 * and packets in any order. */
NBI_DEV void nbi_packet_send(void *to, const nbi_u32x4 &x)
{
#if NBI_EMULATED
    uint64_t half[2];
    __builtin_memcpy(half, &x, sizeof half);
    __atomic_store_n(static_cast<uint64_t *>(to), half[0], __ATOMIC_RELAXED);
    __atomic_store_n(static_cast<uint64_t *>(to) + 1, half[1], __ATOMIC_RELAXED);
#else
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.v[0]),
                 "r"(x.v[1]), "r"(x.v[2]), "r"(x.v[3])
                 : "memory");
#endif
}

NBI_DEV nbi_u32x4 nbi_packet_look(const void *from)
{
    nbi_u32x4 r;
#if NBI_EMULATED
    uint64_t half[2];
    half[0] = __atomic_load_n(static_cast<const uint64_t *>(from), __ATOMIC_RELAXED);
    half[1] = __atomic_load_n(static_cast<const uint64_t *>(from) + 1, __ATOMIC_RELAXED);
    __builtin_memcpy(&r, half, sizeof r);
#else
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
                 : "l"(from)
                 : "memory");
#endif
    return r;
}

/* A word of the host's memory that the host may change while the kernel runs. */
NBI_DEV uint32_t nbi_host_word(const uint32_t *p)
{
#if NBI_EMULATED
    return __atomic_load_n(p, __ATOMIC_RELAXED);
#else
    return *(const volatile uint32_t *)p;
#endif
}

/* In a loop that looks for packets. */
NBI_DEV void nbi_spin()
{
#if NBI_EMULATED
    nbi_emu_spin();
#endif
}

/* 16 bytes that were loaded before: the compiler does not keep them in registers instead. */
NBI_DEV nbi_f32x4 nbi_load_again(const float *p)
{
#if NBI_EMULATED
    return *reinterpret_cast<const nbi_f32x4 *>(p);
#else
    nbi_f32x4 r;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r.v[0]), "=f"(r.v[1]), "=f"(r.v[2]), "=f"(r.v[3])
                 : "l"(p));
    return r;
#endif
}

/* Asynchronous copies of 16 bytes to shared memory; both addresses aligned to 16. With `take` false
 * the 16 bytes become zero and src is not read. */
NBI_DEV void nbi_copy_async(void *shared, const void *src, bool take = true)
{
#if NBI_EMULATED
    nbi_emu_copy_async(shared, src, take);
#else
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(src),
                 "r"(take ? 16 : 0)
                 : "memory");
#endif
}

NBI_DEV void nbi_copy_commit()
{
#if NBI_EMULATED
    nbi_emu_copy_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Until at most N of this thread's groups are on their way. Other threads need a barrier behind. */
template <int N> NBI_DEV void nbi_copy_wait()
{
#if NBI_EMULATED
    nbi_emu_copy_wait(N);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

/* ---------------------------------------------------------------- bulk copies, SM90 and above */

/* A barrier in shared memory (mbarrier): a phase ends when `count` arrivals and all bytes that were
 * announced for it are there. Phases alternate between parity 0 and 1, the first is 0. */
NBI_DEV void nbi_bar_init(uint64_t *bar, uint32_t count)
{
#if NBI_EMULATED
    nbi_emu_bar_init(bar, count);
#else
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(bar);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
#endif
}

/* Initialised barriers become known to the copy engine; threads need a block barrier behind. */
NBI_DEV void nbi_bar_init_done()
{
#if !NBI_EMULATED && NBI_SM90
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

NBI_DEV void nbi_bar_arrive(uint64_t *bar)
{
#if NBI_EMULATED
    nbi_emu_bar_arrive(bar, 0);
#else
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(bar);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
#endif
}

/* Arrives and announces bytes of copies that will signal this barrier. */
NBI_DEV void nbi_bar_expect(uint64_t *bar, uint32_t bytes)
{
#if NBI_EMULATED
    nbi_emu_bar_arrive(bar, bytes);
#elif NBI_SM90
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(bar);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
                 : "memory");
#else
    __trap();
#endif
}

/* Until the phase of that parity has ended. */
NBI_DEV void nbi_bar_wait(uint64_t *bar, uint32_t parity)
{
#if NBI_EMULATED
    nbi_emu_bar_wait(bar, parity);
#elif NBI_SM90
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(bar);
    uint32_t done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
#else
    __trap();
#endif
}

/* Asynchronous copy of `bytes` to shared memory that signals a barrier; addresses and size are
 * multiples of 16. The memory is read once: L2 lets go of it before anything else. */
NBI_DEV void nbi_copy_bulk(void *shared, const void *src, uint32_t bytes, uint64_t *bar)
{
#if NBI_EMULATED
    nbi_emu_copy_bulk(shared, src, bytes, bar);
#elif NBI_SM90
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(bar);
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(src), "r"(bytes), "r"(at), "l"(policy)
                 : "memory");
#else
    __trap();
#endif
}

/* Arrives once all of this thread's asynchronous copies so far are there. */
NBI_DEV void nbi_copy_arrive(uint64_t *bar)
{
#if NBI_EMULATED
    nbi_emu_copy_commit();
    nbi_emu_copy_wait(0);
    nbi_emu_bar_arrive(bar, 0);
#elif NBI_SM90
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(bar);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
#else
    __trap();
#endif
}

/* Barrier `id` (1 to 15) of `threads` threads of the block. */
NBI_DEV void nbi_sync_some(uint32_t id, uint32_t threads)
{
#if NBI_EMULATED
    nbi_emu_sync_some(id, threads);
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

/* ---------------------------------------------------------------- matrix units */

/* Four 8 x 8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8. */
NBI_DEV void nbi_ldmatrix(uint32_t r[4], const void *shared)
{
#if NBI_EMULATED
    nbi_emu_ldmatrix(r, shared);
#else
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
#endif
}

/* The same, each matrix transposed. */
NBI_DEV void nbi_ldmatrix_trans(uint32_t r[4], const void *shared)
{
#if NBI_EMULATED
    nbi_emu_ldmatrix_trans(r, shared);
#else
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
#endif
}

/* d += a b, m16n8k16, FP32 sums. Lane (g = lane / 4, t = lane % 4):
 *   a[0] row g, k 2t 2t+1      a[1] row g+8, the same k
 *   a[2] row g, k 2t+8 2t+9    a[3] row g+8, the same k
 *   b[0] column g, k 2t 2t+1   b[1] column g, k 2t+8 2t+9
 *   d[0] d[1] row g, columns 2t 2t+1; d[2] d[3] row g+8. Source: PTX ISA, mma.m16n8k16. */
NBI_DEV void nbi_mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if NBI_EMULATED
    nbi_emu_mma(d, a, b, true);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

NBI_DEV void nbi_mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if NBI_EMULATED
    nbi_emu_mma(d, a, b, false);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

/* ---------------------------------------------------------------- warpgroup products, 9.0 only */

/* Writes of this thread to shared memory become known to wgmma; a barrier behind for others. */
NBI_DEV void nbi_shared_to_async()
{
#if !NBI_EMULATED && NBI_SM90
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* Registers of a thread from here on: MORE takes, else gives back. All warps of a warpgroup. */
template <int N, bool MORE> NBI_DEV void nbi_registers()
{
#if !NBI_EMULATED && NBI_SM90A
    if (MORE)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
    else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

/* B of a wgmma in shared memory: groups of 8 columns (n) of 1,024 bytes, aligned to 1,024; in a
 * group 128 bytes for each column, 64 values along K, whose 16-byte piece q lies at q ^ n % 8. A
 * k-step further on is + 2. Source: PTX ISA, matrix descriptor, 128-byte swizzle. */
NBI_DEV uint64_t nbi_wgmma_b(const void *shared)
{
#if NBI_EMULATED
    const uint32_t at =
        (uint32_t)(static_cast<const char *>(shared) - static_cast<const char *>(nbi_emu_shared()));
#else
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
#endif
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 16 |
           (at >> 4 & 0x3fffu);
}

/* Before the first wgmma, and after registers of one were written by other instructions. */
NBI_DEV void nbi_wgmma_begin()
{
#if !NBI_EMULATED && NBI_SM90A
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

/* The wgmma before are a group. */
NBI_DEV void nbi_wgmma_commit()
{
#if NBI_EMULATED
    nbi_emu_wgmma_commit();
#elif NBI_SM90A
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/* Until at most LEFT groups are on their way. Registers of a group, a and d, may not be touched
 * before. */
template <int LEFT> NBI_DEV void nbi_wgmma_wait()
{
#if NBI_EMULATED
    nbi_emu_wgmma_wait(LEFT);
#elif NBI_SM90A
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#endif
}

/* What comes before and after in the code stays before and after for these registers. */
template <int N> NBI_DEV void nbi_wgmma_hold(float (&d)[N])
{
#if !NBI_EMULATED
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
#else
    (void)d;
#endif
}

#define NBI_D8(i)                                                                               \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define NBI_D16(i) NBI_D8(i), NBI_D8(i + 8)
#define NBI_D32(i) NBI_D16(i), NBI_D16(i + 16)
#define NBI_R8     "%0, %1, %2, %3, %4, %5, %6, %7"
#define NBI_R16    NBI_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NBI_R32 \
    NBI_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NBI_R64                                                                                  \
    NBI_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NBI_D48(i) NBI_D32(i), NBI_D16(i + 32)
#define NBI_D64(i) NBI_D32(i), NBI_D32(i + 32)
#define NBI_D72(i) NBI_D64(i), NBI_D8(i + 64)
#define NBI_D80(i) NBI_D64(i), NBI_D16(i + 64)
#define NBI_R48 \
    NBI_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NBI_R72 NBI_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NBI_R80 NBI_R72 ", %72, %73, %74, %75, %76, %77, %78, %79"
/* ab: places of a and b; more: of `more`. */
#define NBI_WGMMA(n, type, results, ab, more_at, ...)                                        \
    asm volatile("{.reg .pred p; setp.ne.u32 p, " more_at ", 0; "                            \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" results \
                 "}, " ab ", p, 1, 1, 0;}"                                                   \
                 : __VA_ARGS__                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)more))
#define NBI_WGMMA_N(type)                                                                \
    if constexpr (N == 160)                                                              \
        NBI_WGMMA("160", type, NBI_R80, "{%80, %81, %82, %83}, %84", "%85", NBI_D80(0)); \
    else if constexpr (N == 144)                                                         \
        NBI_WGMMA("144", type, NBI_R72, "{%72, %73, %74, %75}, %76", "%77", NBI_D72(0)); \
    else if constexpr (N == 128)                                                         \
        NBI_WGMMA("128", type, NBI_R64, "{%64, %65, %66, %67}, %68", "%69", NBI_D64(0)); \
    else if constexpr (N == 96)                                                          \
        NBI_WGMMA("96", type, NBI_R48, "{%48, %49, %50, %51}, %52", "%53", NBI_D48(0));  \
    else if constexpr (N == 64)                                                          \
        NBI_WGMMA("64", type, NBI_R32, "{%32, %33, %34, %35}, %36", "%37", NBI_D32(0));  \
    else if constexpr (N == 32)                                                          \
        NBI_WGMMA("32", type, NBI_R16, "{%16, %17, %18, %19}, %20", "%21", NBI_D16(0));  \
    else                                                                                 \
        NBI_WGMMA("16", type, NBI_R8, "{%8, %9, %10, %11}, %12", "%13", NBI_D8(0))

/* d = a b, or d += a b with `more`: 64 rows by N columns (16, 32, 64, 96, 128, 144, 160), k-step of
 * 16, by the four warps of a warpgroup; asynchronous, see nbi_wgmma_wait(). Warp w of the group has
 * rows 16 w
 * ... 16 w + 15: a as in nbi_mma_f16(); d[4 n ... 4 n + 3] are its d of columns 8 n ... 8 n + 7. */
template <int N, bool BF16>
NBI_DEV void nbi_wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool more)
{
    static_assert(N == 16 || N == 32 || N == 64 || N == 96 || N == 128 || N == 144 || N == 160,
                  "columns of a wgmma");
#if NBI_EMULATED
    nbi_emu_wgmma(d, a, b, N, BF16, more);
#elif NBI_SM90A
    if constexpr (BF16) {
        NBI_WGMMA_N("bf16");
    } else {
        NBI_WGMMA_N("f16");
    }
#else
    __trap();
#endif
}

/* The same for BF16 with a in shared memory too, as nbi_wgmma_b() describes it with rows for
 * columns. Writes to a by other threads' copies that are not bulk copies need nbi_shared_to_async()
 * behind the wait for them. */
template <int N> NBI_DEV void nbi_wgmma_shared(float (&d)[N / 2], uint64_t a, uint64_t b, bool more)
{
    static_assert(N == 32 || N == 64, "columns of a wgmma");
#if NBI_EMULATED
    nbi_emu_wgmma_shared(d, a, b, N, more);
#elif NBI_SM90A
    if constexpr (N == 64)
        asm volatile("{.reg .pred p; setp.ne.u32 p, %34, 0; "
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NBI_R32
                     "}, %32, %33, p, 1, 1, 0, 0;}"
                     : NBI_D32(0)
                     : "l"(a), "l"(b), "r"((int)more));
    else
        asm volatile("{.reg .pred p; setp.ne.u32 p, %18, 0; "
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" NBI_R16
                     "}, %16, %17, p, 1, 1, 0, 0;}"
                     : NBI_D16(0)
                     : "l"(a), "l"(b), "r"((int)more));
#else
    __trap();
#endif
}

/* B whose columns lie side by side: groups of 64 columns, `bytes` apart; in a group 128 bytes for
 * each row (k), rows in eights of 1,024 bytes aligned to that, whose 16-byte piece q lies at q ^ k
 * % 8. A k-step further on is + 128. Source: as above, "MN-major". */
NBI_DEV uint64_t nbi_wgmma_lying(const void *shared, uint32_t bytes)
{
    return (nbi_wgmma_b(shared) & ~((uint64_t)0x3fffu << 16)) | (uint64_t)(bytes >> 4) << 16;
}

/* As nbi_wgmma_shared(), with b of nbi_wgmma_lying(). */
template <int N> NBI_DEV void nbi_wgmma_across(float (&d)[N / 2], uint64_t a, uint64_t b, bool more)
{
    static_assert(N == 128, "columns of a wgmma");
#if NBI_EMULATED
    nbi_emu_wgmma_across(d, a, b, N, more);
#elif NBI_SM90A
    asm volatile("{.reg .pred p; setp.ne.u32 p, %66, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NBI_R64
                 "}, %64, %65, p, 1, 1, 0, 1;}"
                 : NBI_D32(0), NBI_D32(32)
                 : "l"(a), "l"(b), "r"((int)more));
#else
    __trap();
#endif
}

/* 2^x; 0 where that is below the least normal value. */
NBI_DEV float nbi_exp2(float x)
{
#if NBI_EMULATED
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

/* ---------------------------------------------------------------- programmatic dependent launch */

/* When launches of one file of kernels began, those that are to be stamped (runtime.h). Every file
 * has its own under nvcc, so that the address is in the code: a pointer would have to be read, and
 * cost each launch 0.4 us, stamped or not. */
#define NBI_STAMPS 4096u
struct nbi_stamps {
    uint32_t n; /* since it was cleared; those behind NBI_STAMPS are not noted */
    uint32_t pad;
    uint64_t ns[NBI_STAMPS]; /* the device's clock */
};

#if NBI_EMULATED
extern nbi_stamps nbi_stamps_here;
extern bool nbi_emu_stamped; /* this launch */
uint64_t nbi_emu_ns();
#else
static __device__ nbi_stamps nbi_stamps_here;
bool nbi_rt_knows_stamps(const void *symbol);
[[maybe_unused]] static const bool nbi_stamps_known = nbi_rt_knows_stamps(&nbi_stamps_here);
#endif

/* Is this launch to be stamped? The sign is a cluster dimension of 1, 1, 1: no memory is read. */
NBI_DEV bool nbi_is_stamped()
{
#if NBI_EMULATED
    return nbi_emu_stamped;
#elif NBI_SM90
    uint32_t yes;
    asm volatile("{.reg .pred p; mov.pred p, %%is_explicit_cluster; selp.u32 %0, 1, 0, p;}"
                 : "=r"(yes));
    return yes != 0;
#else
    return false;
#endif
}

NBI_DEV uint64_t nbi_device_ns()
{
#if NBI_EMULATED
    return nbi_emu_ns();
#else
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)::"memory");
    return ns;
#endif
}

/* Until everything the kernel before wrote is visible. Every kernel calls it before its first read
 * of what a kernel wrote and before its first write, also when it needs nothing: the next kernel
 * trusts that what is two back has ended. The first thread of a launch, which calls it once, stamps
 * it here: it takes its number while it waits. */
NBI_DEV void nbi_wait_before()
{
    uint32_t i = NBI_STAMPS;
    if (nbi_is_stamped() && (threadIdx.x | threadIdx.y | blockIdx.x | blockIdx.y | blockIdx.z) == 0)
        i = atomicAdd(&nbi_stamps_here.n, 1u);
#if !NBI_EMULATED && NBI_SM90
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (i < NBI_STAMPS) nbi_stamps_here.ns[i] = nbi_device_ns();
}

/* The next kernel may start its prologue. */
NBI_DEV void nbi_let_next()
{
#if !NBI_EMULATED && NBI_SM90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
