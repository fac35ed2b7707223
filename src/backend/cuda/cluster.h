/* Clusters of blocks, which run at the same time and reach each other's shared memory: SM90 and
 * above, launched by nbi_launch_cluster(). Included by kernels that are launched so.
 *
 * The memory of another block may be touched when it has begun (all blocks have arrived at the
 * cluster's barrier once) and until it ends (a block whose memory others touch waits for them
 * before it returns). Static __shared__ variables are not for such kernels. */
#pragma once

#include "backend/cuda/device.h"

/* The block's number in its cluster, and how many there are. */
NBI_DEV uint32_t nbi_cluster_rank()
{
#if NBI_EMULATED
    return nbi_emu_cluster_rank();
#elif NBI_SM90
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
#else
    return 0;
#endif
}

NBI_DEV uint32_t nbi_cluster_size()
{
#if NBI_EMULATED
    return nbi_emu_cluster_size();
#elif NBI_SM90
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
    return r;
#else
    return 1;
#endif
}

/* The cluster's barrier, of all threads of all its blocks that have not ended, in two halves: what
 * a thread wrote before it arrived can be read behind the wait. Arrive and wait take turns. */
NBI_DEV void nbi_cluster_arrive()
{
#if NBI_EMULATED
    nbi_emu_cluster_arrive();
#elif NBI_SM90
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
    __trap();
#endif
}

/* The first half, where nothing but initialised barriers has to become known (nbi_bar_init_done()
 * behind them): arriving otherwise waits for all of the thread's stores, to memory too. */
NBI_DEV void nbi_cluster_begin()
{
#if NBI_EMULATED
    nbi_emu_cluster_arrive();
#elif NBI_SM90
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
    __trap();
#endif
}

NBI_DEV void nbi_cluster_wait()
{
#if NBI_EMULATED
    nbi_emu_cluster_wait();
#elif NBI_SM90
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __trap();
#endif
}

/* The same place in the shared memory of block `rank`. */
template <class T> NBI_DEV T *nbi_cluster_at(T *own, uint32_t rank)
{
#if NBI_EMULATED
    return static_cast<T *>(nbi_emu_cluster_at(own, rank));
#elif NBI_SM90
    uint64_t r;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(r) : "l"(own), "r"(rank));
    return reinterpret_cast<T *>(r);
#else
    __trap();
    return own;
#endif
}

/* Arrives at the same barrier of block `rank`: what the thread wrote before can be read behind
 * nbi_bar_wait_cluster(). */
NBI_DEV void nbi_bar_arrive_at(uint64_t *bar, uint32_t rank)
{
#if NBI_EMULATED
    nbi_emu_bar_arrive(nbi_cluster_at(bar, rank), 0);
#elif NBI_SM90
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(bar);
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];}" ::"r"(at),
                 "r"(rank)
                 : "memory");
#else
    __trap();
#endif
}

/* Stores 8 bytes at the same place of block `rank`, some time, and then signals the same barrier
 * there, where they are announced: no fence and no arrival. */
NBI_DEV void nbi_store_async(float *own, const nbi_f32x2 &x, uint64_t *bar, uint32_t rank)
{
#if NBI_EMULATED
    nbi_emu_store_async(own, &x, bar, rank);
#elif NBI_SM90
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(own);
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(bar);
    asm volatile("{.reg .b32 there, bar; mapa.shared::cluster.u32 there, %0, %4; "
                 "mapa.shared::cluster.u32 bar, %3, %4; st.async.shared::cluster.mbarrier::"
                 "complete_tx::bytes.v2.f32 [there], {%1, %2}, [bar];}" ::"r"(to),
                 "f"(x.v[0]), "f"(x.v[1]), "r"(at), "r"(rank)
                 : "memory");
#else
    __trap();
#endif
}

/* As nbi_bar_wait(), for arrivals from other blocks too. */
NBI_DEV void nbi_bar_wait_cluster(uint64_t *bar, uint32_t parity)
{
#if NBI_EMULATED
    nbi_emu_bar_wait(bar, parity);
#elif NBI_SM90
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(bar);
    uint32_t done = 0;
    while (!done)
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
            "selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(at), "r"(parity)
            : "memory");
#else
    __trap();
#endif
}

/* As nbi_copy_bulk(), to the same place of all blocks whose bit of the mask is set, signalling the
 * same barrier of each, where each announces its bytes; L2 keeps the memory as it likes. Copy by
 * copy where the instruction for all is not at home. */
NBI_DEV void nbi_copy_bulk_multicast(void *shared, const void *src, uint32_t bytes, uint64_t *bar,
                                     uint32_t mask)
{
#if NBI_EMULATED
    nbi_emu_copy_bulk_multicast(shared, src, bytes, bar, mask);
#elif NBI_SM90
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(bar);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(src), "r"(bytes), "r"(at), "h"((uint16_t)mask)
        : "memory");
#else
    for (uint32_t rank = 0; mask >> rank; rank++)
        if (mask >> rank & 1u)
            asm volatile("{.reg .b32 there, bar; mapa.shared::cluster.u32 there, %0, %4; "
                         "mapa.shared::cluster.u32 bar, %3, %4; cp.async.bulk.shared::cluster."
                         "global.mbarrier::complete_tx::bytes [there], [%1], %2, [bar];}" ::"r"(to),
                         "l"(src), "r"(bytes), "r"(at), "r"(rank)
                         : "memory");
#endif
#else
    __trap();
#endif
}
