/* The device from the host's side: memory, one stream, launches, recorded steps. The same
 * interface over the CUDA runtime (runtime.cu) and over the emulation (runtime_emulated.cpp).
 *
 * Errors stick: the first failed call leaves a sentence in `error`, what comes after does nothing,
 * nbi_rt_sync() reports it. One thread at a time. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/cuda/device.h"

#if NBI_EMULATED
#include <vector>
#else
#include <cuda_runtime.h>
#endif

#define NBI_RT_ERROR_MAX 256
#define NBI_RT_MARKS     4u

struct nbi_rt {
    int index; /* of the device, as CUDA counts */
    int sm;    /* compute capability: 90 for 9.0 */
    int n_sms; /* multiprocessors */
    size_t l2_bytes;
    size_t shared_max; /* dynamic shared memory a block can have */
    char name[64];
    char driver[96];              /* "580.65.06, CUDA 13.0" */
    char error[NBI_RT_ERROR_MAX]; /* "" while all is well */
    bool recording;
    uint64_t n_calls; /* that may have changed device memory, or may be done again: while it stays,
                         so does what lies there */
    bool dependent;   /* launches overlap the end of the one before (PDL); kernels keep the rule of
                         nbi_wait_before() */
    bool settles;     /* the next launch begins when all before it have ended: what these wrote,
                         kernels behind it may read without a wait */
    uint32_t n_apart; /* launches to come that wait for the end of the one before all the same */
    uint32_t n_clock; /* marks of nbi_rt_clock_open() */
    bool skips;       /* launches and copies within the device are counted, and not done */
    bool stamps;      /* launches are stamped */
    struct nbi_rt_stamps *stamped; /* NULL: never wanted */
    uint32_t n_stamps;             /* launches since nbi_rt_stamps_clear() */

    /* kernels that wait for kernels of other ranks: nbi_rt_waits_for_ranks() */
    uint32_t *stop; /* host memory that kernels read: 1: wait no longer */
    bool (*lost)(void *user);
    void *lost_user;
    uint64_t until_ns; /* on nbi_now_ns()'s clock; 0: no end */
#if NBI_EMULATED
    std::vector<std::function<void()>> *record, *stream; /* stream: asked for, done by a wait */
    uint64_t *clock;                                     /* [n_clock] */
    int shared_file;                                     /* of nbi_rt_share() */
#else
    cudaStream_t stream;
    cudaEvent_t opened, mark;        /* of nbi_rt_seconds() */
    cudaEvent_t marks[NBI_RT_MARKS]; /* of nbi_rt_mark() */
    cudaEvent_t *clock;              /* [n_clock] of nbi_rt_clock_mark() */
#endif
};

/* A recorded sequence of launches and copies. */
struct nbi_rt_graph;

/* Memory that other processes of this host can open. */
struct nbi_rt_handle {
    unsigned char bytes[64];
};

/* What names a device among those of its host. */
struct nbi_rt_device_id {
    char text[32];
};

/* Opens that device of CUDA_VISIBLE_DEVICES; of one that is alone there, that one whatever the
 * index: then somebody has dealt them out. False with a sentence in `error` when there is none that
 * this build's kernels run on. */
bool nbi_rt_open(nbi_rt *rt, uint32_t index);
void nbi_rt_close(nbi_rt *rt);

void *nbi_rt_alloc(nbi_rt *rt, size_t bytes); /* device memory, zeroed; NULL */
void nbi_rt_free(nbi_rt *rt, void *p);
void *nbi_rt_alloc_host(nbi_rt *rt, size_t bytes); /* pinned, zeroed; NULL */
void nbi_rt_free_host(nbi_rt *rt, void *p);
bool nbi_rt_memory(nbi_rt *rt, size_t *free_bytes, size_t *total_bytes);

/* ---- ranks */

nbi_rt_device_id nbi_rt_device(nbi_rt *rt);

/* For a library that launches by itself: the stream, a cudaStream_t (NULL: there is none), and a
 * thread of its own that is to use the device. */
void *nbi_rt_stream(nbi_rt *rt);
void nbi_rt_use(const nbi_rt *rt);

/* While the host waits for kernels it asks `lost` now and then, and looks at the clock; where it is
 * so, or late, *stop is set for good. False: no memory. Without `lost`, forgets all of it. */
bool nbi_rt_waits_for_ranks(nbi_rt *rt, bool (*lost)(void *user), void *user);

/* Device memory, zeroed, of whole pieces of 2 MB; what others need to open it. NULL with a sentence
 * in `why`, which is not an error of the stream. */
void *nbi_rt_share(nbi_rt *rt, size_t bytes, nbi_rt_handle *handle, char *why, size_t why_bytes);
void nbi_rt_unshare(nbi_rt *rt, void *p, size_t bytes);
/* The memory of another process as this one's kernels see it; likewise. */
void *nbi_rt_open_shared(nbi_rt *rt, const nbi_rt_handle *handle, size_t bytes, char *why,
                         size_t why_bytes);
void nbi_rt_close_shared(nbi_rt *rt, void *p, size_t bytes);

/* In the order of the stream. Host memory must be pinned and stay as it is until nbi_rt_sync(). */
void nbi_rt_upload(nbi_rt *rt, void *dst, const void *src, size_t bytes);
void nbi_rt_download(nbi_rt *rt, void *dst, const void *src, size_t bytes);
void nbi_rt_zero(nbi_rt *rt, void *dst, size_t bytes);
void nbi_rt_copy(nbi_rt *rt, void *dst, const void *src, size_t bytes); /* device to device */

/* Notes a place in the stream, outside of recordings, and waits until the stream is past it. A mark
 * that was never set does not wait. */
void nbi_rt_mark(nbi_rt *rt, uint32_t i);
void nbi_rt_wait_mark(nbi_rt *rt, uint32_t i);

/* Waits for all of it. False with a sentence in `error` when anything failed. */
bool nbi_rt_sync(nbi_rt *rt);

/* Waits for all of it, and says when it was done, on the device's own clock: differences of two
 * calls are times of what was asked for in between. */
double nbi_rt_seconds(nbi_rt *rt);

/* Marks in the stream whose times can be asked for, made once (false: no memory): outside of
 * recordings, not counted in n_calls. ns: between two marks that were set, behind nbi_rt_sync(). */
bool nbi_rt_clock_open(nbi_rt *rt, uint32_t n_marks);
void nbi_rt_clock_mark(nbi_rt *rt, uint32_t i);
uint64_t nbi_rt_clock_ns(nbi_rt *rt, uint32_t from, uint32_t to);

/* Stamps of launches: when each began, behind its wait for the one before, which is when that one
 * had ended. Launches still overlap, and those that are recorded while `stamps` is set are stamped
 * in every replay. For 9.0 and above.
 * open: once; false: no memory. stamp: a launch that does nothing else; its number. ns: of launch i
 * since the last clear, on the device's clock; waits. 0: there is none, or there were launches
 * without a stamp in between. */
bool nbi_rt_stamps_open(nbi_rt *rt);
void nbi_rt_stamps_clear(nbi_rt *rt);
uint32_t nbi_rt_stamp(nbi_rt *rt);
uint64_t nbi_rt_stamp_ns(nbi_rt *rt, uint32_t i);

/* Between begin and end, launches and copies are recorded instead of done. NULL when it failed. */
void nbi_rt_record(nbi_rt *rt);
nbi_rt_graph *nbi_rt_record_end(nbi_rt *rt);
void nbi_rt_replay(nbi_rt *rt, nbi_rt_graph *g);
void nbi_rt_graph_free(nbi_rt *rt, nbi_rt_graph **g);

/* Notes a failed call of the runtime. */
void nbi_rt_fail(nbi_rt *rt, const char *what, int code);

/* ---------------------------------------------------------------- launches */

#if NBI_EMULATED
/* The next of the stream, or of the recording. Done as late as may be: behind a wait that is
 * missing on a device, what it gives is missing here. */
void nbi_rt_later(nbi_rt *rt, const std::function<void()> &step);
#endif

template <class T> struct nbi_same {
    using type = T;
};

/* kernel<<<grid, block, shared>>>(args...) in the stream. Arguments are taken by value. */
template <class... P>
inline void nbi_launch(nbi_rt *rt, dim3 grid, dim3 block, size_t shared, void (*kernel)(P...),
                       typename nbi_same<P>::type... args)
{
    if (rt->error[0]) return;
    const bool overlaps = rt->dependent && !rt->settles && !rt->n_apart;
    rt->settles = false;
    if (rt->n_apart) rt->n_apart--;
    rt->n_calls++;
    rt->n_stamps++;
    if (rt->skips) return;
#if NBI_EMULATED
    const auto body = [=] { kernel(args...); };
    const bool stamped = rt->stamps;
    (void)overlaps;
    nbi_rt_later(rt, [=] {
        nbi_emu_stamped = stamped;
        nbi_emu_run(grid, block, shared, body);
    });
#else
    if (shared > 16u << 10) { /* with a kernel's static memory, more than 48 KB must be asked for */
        const cudaError_t e = cudaFuncSetAttribute(
            (const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (e != cudaSuccess) return nbi_rt_fail(rt, "shared memory of a kernel", (int)e);
    }
    /* A multiprocessor whose kernels divide its memory differently must be idle in between, and
     * then nothing overlaps: all kernels of a recorded step leave the same for L1. */
    if (rt->recording)
        (void)cudaFuncSetAttribute((const void *)kernel,
                                   cudaFuncAttributePreferredSharedMemoryCarveout,
                                   cudaSharedmemCarveoutMaxShared);
    cudaLaunchAttribute wants[2] = {};
    unsigned n = 0;
    if (overlaps) {
        wants[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        wants[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (rt->stamps) {
        wants[n].id = cudaLaunchAttributeClusterDimension;
        wants[n++].val.clusterDim = {1, 1, 1};
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = rt->stream;
    config.attrs = wants;
    config.numAttrs = n;
    const cudaError_t e = cudaLaunchKernelEx(&config, kernel, args...);
    if (e != cudaSuccess) nbi_rt_fail(rt, "launch of a kernel", (int)e);
#endif
}
