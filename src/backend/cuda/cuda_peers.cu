/* One-shot exchange over the memory of GPUs of one host (cuda_peers.h). Callers: cuda_ranks.cu.
 *
 * A chunk is what a block does at a time, a packet for each thread. A thread sends its packet to
 * all others, then looks for theirs at its own place until they carry the epoch. So nothing has to
 * be cleared and nobody has to be told. Epochs are counted for each chunk on the device: recorded
 * steps count on.
 *
 * A block sends all it has before it waits, so blocks that wait hold up nobody; of those of other
 * ranks it waits for the ones of the same chunks alone. */
#include "backend/cuda/cuda_ranks.h"
#include "backend/cuda/norm.h"

#define THREADS     256u
#define CHUNK       (2 * THREADS) /* values */
#define CHUNKS      256u          /* of one exchange; more values go in pieces */
#define PIECE       ((size_t)CHUNK * CHUNKS)
#define TURN_BYTES  ((size_t)CHUNKS * THREADS * sizeof(nbi_u32x4))
#define BLOCKS_EACH 4u /* for each multiprocessor: all of a launch are there together */

struct join_args {
    float *out;
    const float *in;
    uint32_t from, n; /* of the values [rows][in_stride] */
    uint32_t width, in_stride;
    uint32_t first[NBI_PEERS_MAX + 1];
};

static NBI_DEV nbi_u32x4 *place(char *buffer, uint32_t from, uint32_t epoch, uint32_t chunk)
{
    return nbi_peer_turn(buffer, from, epoch) + chunk * THREADS + threadIdx.x;
}

template <uint32_t N>
static NBI_DEV void send(const nbi_peer_view &v, uint32_t chunk, float a, float b)
{
    const uint32_t epoch = nbi_load_fresh(&v.epochs[chunk]) + 1;
    const nbi_u32x4 packet = nbi_peer_packet(a, b, epoch);
#pragma unroll
    for (uint32_t r = 0; r < N; r++)
        if (r < v.size && r != v.rank)
            nbi_packet_send(place(v.buffers[r], v.rank, epoch, chunk), packet);
}

/* The values of all ranks: got[r], but for the own ones. */
template <uint32_t N>
static NBI_DEV void receive(const nbi_peer_view &v, uint32_t chunk, nbi_u32x4 (&got)[N])
{
    const uint32_t epoch = nbi_load_fresh(&v.epochs[chunk]) + 1;
    char *own = v.buffers[v.rank];
    for (uint32_t looks = 1;; looks++) {
        bool all = true;
#pragma unroll
        for (uint32_t r = 0; r < N; r++) {
            if (r >= v.size || r == v.rank) continue;
            got[r] = nbi_packet_look(place(own, r, epoch, chunk));
            all = all && nbi_peer_is(got[r], epoch);
        }
        if (all || nbi_peer_stops(v, looks)) return;
        nbi_spin();
    }
}

/* Behind the last use of the chunk's epoch by the block's threads. */
static NBI_DEV void count(const nbi_peer_view &v, uint32_t chunk)
{
    __syncthreads();
    if (threadIdx.x == 0) v.epochs[chunk]++;
}

template <uint32_t N>
static __global__ void __launch_bounds__(THREADS, BLOCKS_EACH)
    sum_kernel(const __grid_constant__ nbi_peer_view v, float *x, uint32_t n)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t n_chunks = (n + CHUNK - 1) / CHUNK;
    for (uint32_t c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        const uint32_t i = c * CHUNK + 2 * threadIdx.x;
        send<N>(v, c, i < n ? x[i] : 0, i + 1 < n ? x[i + 1] : 0);
    }
    for (uint32_t c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        const uint32_t i = c * CHUNK + 2 * threadIdx.x;
        const float own_a = i < n ? x[i] : 0, own_b = i + 1 < n ? x[i + 1] : 0;
        nbi_u32x4 got[N] = {};
        receive<N>(v, c, got);
        float a = v.rank == 0 ? own_a : nbi_float(got[0].v[0]);
        float b = v.rank == 0 ? own_b : nbi_float(got[0].v[2]);
#pragma unroll
        for (uint32_t r = 1; r < N; r++) {
            if (r >= v.size) continue;
            a += r == v.rank ? own_a : nbi_float(got[r].v[0]);
            b += r == v.rank ? own_b : nbi_float(got[r].v[2]);
        }
        if (i < n) x[i] = a;
        if (i + 1 < n) x[i + 1] = b;
        count(v, c);
    }
}

static NBI_DEV void put(const join_args &a, uint32_t first, uint32_t end, uint32_t at, float x)
{
    const uint32_t row = at / a.in_stride, column = at - row * a.in_stride;
    if (column < end - first) a.out[static_cast<size_t>(row) * a.width + first + column] = x;
}

template <uint32_t N>
static __global__ void __launch_bounds__(THREADS, BLOCKS_EACH)
    join_kernel(const __grid_constant__ nbi_peer_view v, const __grid_constant__ join_args a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t n_chunks = (a.n + CHUNK - 1) / CHUNK;
    const float *in = a.in + a.from;
    for (uint32_t c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        const uint32_t i = c * CHUNK + 2 * threadIdx.x;
        send<N>(v, c, i < a.n ? in[i] : 0, i + 1 < a.n ? in[i + 1] : 0);
    }
    for (uint32_t c = blockIdx.x; c < n_chunks; c += gridDim.x) {
        const uint32_t i = c * CHUNK + 2 * threadIdx.x;
        nbi_u32x4 got[N] = {};
        receive<N>(v, c, got);
#pragma unroll
        for (uint32_t r = 0; r < N; r++) {
            if (r >= v.size) continue;
            const bool own = r == v.rank;
            if (i < a.n)
                put(a, a.first[r], a.first[r + 1], a.from + i,
                    own ? in[i] : nbi_float(got[r].v[0]));
            if (i + 1 < a.n)
                put(a, a.first[r], a.first[r + 1], a.from + i + 1,
                    own ? in[i + 1] : nbi_float(got[r].v[2]));
        }
        count(v, c);
    }
}

/* ---------------------------------------------------------------- launches */

static dim3 grid_of(const nbi_cuda *c, size_t n)
{
    const uint32_t chunks = static_cast<uint32_t>((n + CHUNK - 1) / CHUNK);
    const uint32_t most = BLOCKS_EACH * static_cast<uint32_t>(c->rt.n_sms);
    return dim3(chunks < most ? chunks : most);
}

void nbi_cuda_peers_sum(nbi_cuda *c, const nbi_cuda_peers *p, float *x, size_t n)
{
    const auto kernel = p->view.size <= 2   ? sum_kernel<2>
                        : p->view.size <= 4 ? sum_kernel<4>
                                            : sum_kernel<NBI_PEERS_MAX>;
    for (size_t at = 0; at < n; at += PIECE) {
        const size_t m = n - at < PIECE ? n - at : PIECE;
        nbi_launch(&c->rt, grid_of(c, m), dim3(THREADS), 0, kernel, p->view, x + at,
                   static_cast<uint32_t>(m));
    }
}

void nbi_cuda_peers_join(nbi_cuda *c, const nbi_cuda_peers *p, const nbi_join_ranks_args *a)
{
    const auto kernel = p->view.size <= 2   ? join_kernel<2>
                        : p->view.size <= 4 ? join_kernel<4>
                                            : join_kernel<NBI_PEERS_MAX>;
    const size_t n = static_cast<size_t>(a->n_rows) * a->in_stride;
    NB_ASSERT(n <= UINT32_MAX - PIECE);
    join_args k = {a->out, a->in, 0, 0, a->width, a->in_stride, {}};
    for (uint32_t r = 0; r <= p->view.size; r++) k.first[r] = a->first[r];
    for (size_t at = 0; at < n; at += PIECE) {
        const size_t m = n - at < PIECE ? n - at : PIECE;
        k.from = static_cast<uint32_t>(at);
        k.n = static_cast<uint32_t>(m);
        nbi_launch(&c->rt, grid_of(c, m), dim3(THREADS), 0, kernel, p->view, k);
    }
}

/* ---------------------------------------------------------------- life */

static nb_status share(nbi_cuda *c, nbi_cuda_peers *p, nbi_rt_handle *handle, nb_error *err)
{
    char why[160];
    p->bytes = 2 * 2 * p->view.size * NBI_TURN_BYTES; /* sums, and those that norms take along */
    p->view.stop = c->rt.stop;
    p->view.epochs = static_cast<uint32_t *>(
        nbi_rt_alloc(&c->rt, (CHUNKS + NBI_NORM_EPOCHS) * sizeof(uint32_t)));
    char *own = static_cast<char *>(nbi_rt_share(&c->rt, p->bytes, handle, why, sizeof why));
    p->view.buffers[p->view.rank] = own;
    if (!own) return nbi_fail(err, NB_UNSUPPORTED, "%s", why);
    return p->view.epochs ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "cuda: out of memory");
}

static nb_status open_others(nbi_cuda *c, nbi_cuda_peers *p, const nbi_rt_handle *handles,
                             nb_error *err)
{
    char why[160];
    for (uint32_t r = 0; r < p->view.size; r++) {
        if (r == p->view.rank) continue;
        p->view.buffers[r] =
            static_cast<char *>(nbi_rt_open_shared(&c->rt, &handles[r], p->bytes, why, sizeof why));
        if (!p->view.buffers[r])
            return nbi_fail(err, NB_UNSUPPORTED, "memory of rank %u: %s", r, why);
    }
    return NB_OK;
}

nb_status nbi_cuda_peers_open(nbi_cuda *c, nbi_cuda_peers *p, const nbi_rank_link *link,
                              nb_error *err)
{
    nbi_rt_handle own = {}, handles[NBI_PEERS_MAX];
    nb_error mine = {};
    if (link->size > NBI_PEERS_MAX || !link->one_host)
        return nbi_fail(err, NB_UNSUPPORTED, "it is for up to %u ranks of one host", NBI_PEERS_MAX);
    *p = {};
    p->view.rank = link->rank;
    p->view.size = link->size;
    nb_status st = share(c, p, &own, &mine);
    NB_TRY(link->agree(link->user, st, &mine, err));
    NB_TRY(link->gather(link->user, handles, &own, sizeof own, err));
    st = open_others(c, p, handles, &mine);
    p->norms = p->view;
    p->norms.epochs += CHUNKS;
    for (uint32_t r = 0; r < p->view.size; r++)
        if (p->norms.buffers[r]) p->norms.buffers[r] += p->bytes / 2;
    return link->agree(link->user, st, &mine, err);
}

void nbi_cuda_peers_close(nbi_cuda *c, nbi_cuda_peers *p)
{
    for (uint32_t r = 0; r < p->view.size; r++)
        if (r != p->view.rank) nbi_rt_close_shared(&c->rt, p->view.buffers[r], p->bytes);
    if (p->view.size) nbi_rt_unshare(&c->rt, p->view.buffers[p->view.rank], p->bytes);
    nbi_rt_free(&c->rt, p->view.epochs);
    *p = {};
}
