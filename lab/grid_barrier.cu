// What does it cost when every block waits for every other, or for a few? Forms of grid barrier and
// of hand-off counters, alone and while each SM streams by bulk copies.
#include "lab.h"
#include "ptx.cuh"
#include <cooperative_groups.h>

enum Form { F_COOPERATIVE, F_COUNTER, F_COUNTER_SLEEP, F_CLUSTER, F_HANDOFF, F_FLAGS };
static const char *const form_name[] = {"cooperative groups",         "one counter",
                                        "one counter, sleep 32 ns",   "two levels, cluster of 4",
                                        "hand-off, 8 producers each", "flag per block, all polled"};

constexpr int THREADS = 256, PHASES = 2000, LINE = 32, PIECE = 4096, RING = 48, WAIT_FOR = 8;

struct Args {
    unsigned *counters; // [blocks + 1] lines of 128 bytes; the last is the common one
    unsigned *cells;    // [blocks]: phase that each block has written
    unsigned *errors;
    unsigned long long *pieces; // bulk pieces of all blocks
    const uint8_t *pool;        // stream of the load
    size_t pool_per_block;
    int in_flight; // pieces a block has in flight; 0: no load
};

// Streams until *stop.
__device__ inline void load_sm(const Args &a, uint8_t *ring, uint64_t *bars,
                               const volatile int *stop)
{
    const uint8_t *from = a.pool + blockIdx.x * a.pool_per_block;
    unsigned i = 0, pieces_here = (unsigned)(a.pool_per_block / PIECE), q = (unsigned)a.in_flight;
    for (; !*stop; ++i) {
        if (i >= q) mbar_wait(&bars[i % q], (i / q - 1) & 1);
        mbar_expect(&bars[i % q], PIECE);
        bulk_load(ring + i % q * PIECE, from + (size_t)(i % pieces_here) * PIECE, PIECE,
                  &bars[i % q]);
    }
    for (unsigned j = i > q ? i - q : 0; j < i; ++j) mbar_wait(&bars[j % q], (j / q) & 1);
    atomicAdd(a.pieces, i);
}

__device__ inline int producer_of(int block, int i, int blocks)
{
    return (block + 1 + i * 17) % blocks;
}

// One synchronisation of phase `p` (1, 2, ...), by the THREADS threads of a block.
template <int FORM>
__device__ inline void synchronise(const Args &a, unsigned p, uint64_t *up, uint64_t *down)
{
    const int blocks = gridDim.x;
    unsigned *common = a.counters + (size_t)blocks * LINE, *own = a.counters + blockIdx.x * LINE;
    if (FORM == F_COOPERATIVE) {
        cooperative_groups::this_grid().sync();
        return;
    }
    named_sync(1, THREADS);
    if (FORM == F_COUNTER || FORM == F_COUNTER_SLEEP) {
        if (threadIdx.x == 0) {
            red_release(common, 1);
            while ((int)(ld_acquire(common) - p * blocks) < 0)
                if (FORM == F_COUNTER_SLEEP) __nanosleep(32);
        }
    } else if (FORM == F_CLUSTER) {
        if (threadIdx.x == 0) {
            const uint32_t size = cluster_size(), parity = (p - 1) & 1;
            mbar_arrive_at(up, 0);
            if (cluster_rank() == 0) {
                mbar_wait_cluster(up, parity);
                red_release(common, 1);
                poll_until(common, p * (blocks / size));
                for (uint32_t r = 1; r < size; ++r) mbar_arrive_at(down, r);
            } else {
                mbar_wait_cluster(down, parity);
            }
        }
    } else if (FORM == F_HANDOFF) {
        if (threadIdx.x == 0) red_release(own, 1);
        if (threadIdx.x < WAIT_FOR)
            poll_until(a.counters + producer_of(blockIdx.x, threadIdx.x, blocks) * LINE, p);
    } else {
        if (threadIdx.x == 0) red_release(own, 1);
        if (threadIdx.x < blocks) poll_until(a.counters + threadIdx.x * LINE, p);
    }
    named_sync(1, THREADS);
}

// CHECK: each block writes the phase before and reads the others' after.
template <int FORM, bool CHECK>
__global__ void __launch_bounds__(THREADS + 32, 1) barrier_kernel(const __grid_constant__ Args a)
{
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ uint64_t bars[RING], up, down;
    __shared__ int stop;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; ++i) mbar_init(&bars[i], 1);
        mbar_init(&up, FORM == F_CLUSTER ? cluster_size() : 1);
        mbar_init(&down, 1);
        mbar_fence_init();
        stop = 0;
    }
    __syncthreads();
    if (FORM == F_CLUSTER) cluster_sync();
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x == THREADS && a.in_flight) load_sm(a, ring, bars, &stop);
    } else {
        const int blocks = gridDim.x, me = threadIdx.x;
        for (unsigned p = 1; p <= PHASES; ++p) {
            if (CHECK && me == 0) a.cells[blockIdx.x] = p;
            synchronise<FORM>(a, p, &up, &down);
            if (CHECK) {
                int other = FORM == F_HANDOFF ? producer_of(blockIdx.x, me, blocks) : me;
                if (me < (FORM == F_HANDOFF ? WAIT_FOR : blocks) && __ldcg(a.cells + other) < p)
                    atomicAdd(a.errors, 1u);
            }
        }
        if (me == 0) *(volatile int *)&stop = 1;
    }
    if (FORM == F_CLUSTER) cluster_sync(); // shared memory is written from outside until here
}

static uint8_t *pool;
static double stream;

template <int FORM> static void run(int in_flight)
{
    const size_t smem = (size_t)RING * PIECE;
    auto timed = barrier_kernel<FORM, false>, checked = barrier_kernel<FORM, true>;
    allow_smem(timed, smem);
    allow_smem(checked, smem);
    int blocks = sm_count(), threads = FORM == F_COOPERATIVE ? THREADS : THREADS + 32;
    cudaLaunchAttribute attr[1] = {};
    cudaLaunchConfig_t c = {};
    c.blockDim = dim3((unsigned)threads);
    c.dynamicSmemBytes = smem;
    c.stream = lab_stream();
    c.attrs = attr;
    c.numAttrs = 1;
    if (FORM == F_CLUSTER) { // all clusters must be resident: not every SM may fit into one
        attr[0].id = cudaLaunchAttributeClusterDimension;
        attr[0].val.clusterDim.x = 4;
        attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
        int clusters = 0;
        c.gridDim = dim3((unsigned)blocks / 4 * 4);
        CK(cudaOccupancyMaxActiveClusters(&clusters, timed, &c));
        blocks = std::min(blocks / 4, clusters) * 4;
    } else {
        attr[0].id = cudaLaunchAttributeCooperative;
        attr[0].val.cooperative = 1;
    }
    c.gridDim = dim3((unsigned)blocks);
    const size_t per_block = ((size_t)2 << 30) / (size_t)blocks / PIECE * PIECE;
    const size_t n_counters = (size_t)(blocks + 1) * LINE;
    Args a = {device_alloc<unsigned>(n_counters),
              device_alloc<unsigned>((size_t)blocks),
              device_alloc<unsigned>(1),
              device_alloc<unsigned long long>(1),
              pool,
              per_block,
              in_flight};
    CK(cudaMemset(a.errors, 0, 4));
    CK(cudaMemset(a.cells, 0, (size_t)blocks * 4));
    auto clear = [&] {
        CK(cudaMemset(a.counters, 0, n_counters * 4));
        CK(cudaMemset(a.pieces, 0, 8));
        CK(cudaDeviceSynchronize());
    };
    clear();
    CK(cudaLaunchKernelEx(&c, checked, a));
    CK(cudaStreamSynchronize(lab_stream()));
    unsigned errors = host_copy(a.errors, 1)[0];
    expect(!errors, "%s, %d KB in flight: %u reads saw an older phase", form_name[FORM],
           in_flight * 4, errors);
    std::vector<double> t;
    double gbs = 0;
    for (int i = 0; i < 5; ++i) {
        clear();
        double us = time_us([&](cudaStream_t) { CK(cudaLaunchKernelEx(&c, timed, a)); }, 1, 0);
        t.push_back(us);
        gbs = (double)host_copy(a.pieces, 1)[0] * PIECE / us;
    }
    std::sort(t.begin(), t.end());
    printf("%-30s %4d blocks %4d KB in flight %8.2f us %8.1f%% of the stream\n", form_name[FORM],
           blocks, in_flight * 4, t[2] / PHASES, 100 * gbs / stream);
    for (void *p : {(void *)a.counters, (void *)a.cells, (void *)a.errors, (void *)a.pieces})
        CK(cudaFree(p));
}

int main()
{
    stream = lab_start("grid_barrier");
    if (!expect(sm_count() <= THREADS, "%d SMs: at most %d", sm_count(), THREADS))
        return lab_exit();
    CK(cudaMalloc((void **)&pool, (size_t)2 << 30));
    lab_fill<<<sm_count(), 1024>>>((uint64_t *)pool, (size_t)1 << 28);
    CK(cudaDeviceSynchronize());
    printf("per synchronisation, %d in a row\n", PHASES);
    run<F_COOPERATIVE>(
        0); // its barrier counts every thread of the block: no loading warp beside it
    for (int in_flight : {0, 4, 8, 16, 48}) {
        run<F_COUNTER>(in_flight);
        run<F_COUNTER_SLEEP>(in_flight);
        run<F_CLUSTER>(in_flight);
        run<F_HANDOFF>(in_flight);
        run<F_FLAGS>(in_flight);
    }
    return lab_exit();
}
