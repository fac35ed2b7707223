/* NCCL as the exchange of ranks (nccl_api.h). Callers: cuda_ranks.cu.
 *
 * Its calls are part of the stream and of recorded steps. What it adds up by itself it adds in an
 * order that changes with size and layout, so it does so for two ranks only, where there is one
 * order. For more it carries the values, and a kernel adds them in the order of ranks: few of them
 * are gathered; of many each rank gets one slice of everybody's, adds it, and slices are gathered,
 * which are the bytes of a ring.
 *
 * Connecting and taking leave may wait for ever, for a rank that is lost: a thread of their own
 * makes these calls, and when it does not come back it is left alone, since the job is over. */
#include "backend/cuda/cuda_ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

#define THREADS        256u
#define SCRATCH_VALUES ((size_t)4 << 20)
#define GATHER_VALUES  ((size_t)256 << 10) /* of all ranks: so few are gathered whole */
#define BLOCKS_EACH    8u
#define CONNECT_NS     120000000000u
#define OPTIONAL_NS    20000000000u /* the same, where there is another exchange */
#define LEAVE_NS       5000000000u
#define LOOK_US        200u

enum call_kind { CONNECT, DESTROY, ABORT };

/* A call that may not return, and its thread; freed when it has. */
struct nbi_cuda_nccl_call {
    pthread_t thread;
    call_kind kind;
    const nbi_nccl *api;
    const nbi_rt *rt;
    nbi_nccl_comm *comm;
    nbi_nccl_id id;
    int rank, size, result;
    bool done;
};

static void *make_call(void *user)
{
    nbi_cuda_nccl_call *call = static_cast<nbi_cuda_nccl_call *>(user);
    nbi_rt_use(call->rt);
    if (call->kind == CONNECT)
        call->result = call->api->comm_init_rank(&call->comm, call->size, call->id, call->rank);
    else if (call->kind == ABORT)
        call->result = call->api->comm_abort(call->comm);
    else
        call->result = call->api->comm_destroy(call->comm);
    __atomic_store_n(&call->done, true, __ATOMIC_RELEASE);
    return NULL;
}

static nbi_cuda_nccl_call *begin_call(nbi_cuda *c, const nbi_cuda_nccl *p, call_kind kind,
                                      const nbi_nccl_id *id)
{
    nbi_cuda_nccl_call *call =
        static_cast<nbi_cuda_nccl_call *>(nbi_calloc(1, sizeof(nbi_cuda_nccl_call)));
    if (!call) return NULL;
    call->kind = kind;
    call->api = p->api;
    call->rt = &c->rt;
    call->comm = p->comm;
    if (id) call->id = *id;
    call->rank = static_cast<int>(p->rank);
    call->size = static_cast<int>(p->size);
    if (!pthread_create(&call->thread, NULL, make_call, call)) return call;
    nbi_free(call);
    return NULL;
}

/* Whether it came back; else it stays with its thread. `link`: gives up when a rank is lost. */
static bool end_call(nbi_cuda_nccl_call **call, const nbi_rank_link *link, uint64_t ns)
{
    nbi_cuda_nccl_call *k = *call;
    const uint64_t until = nbi_now_ns() + ns;
    while (!__atomic_load_n(&k->done, __ATOMIC_ACQUIRE)) {
        if (nbi_now_ns() > until || (link && link->lost(link->user, NULL) != NB_OK)) {
            pthread_detach(k->thread);
            *call = NULL;
            return false;
        }
        usleep(LOOK_US);
    }
    pthread_join(k->thread, NULL);
    return true;
}

/* ---------------------------------------------------------------- sums */

struct parts_args {
    float *out;
    const float *own, *parts; /* parts: [size][stride], without the own one */
    uint32_t n, stride, rank, size;
};

static __global__ void __launch_bounds__(THREADS) add_parts_kernel(const parts_args a)
{
    nbi_wait_before();
    nbi_let_next();
    for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < a.n; i += gridDim.x * THREADS) {
        const float own = a.own[i];
        float sum = a.rank == 0 ? own : a.parts[i];
        for (uint32_t r = 1; r < a.size; r++)
            sum += r == a.rank ? own : a.parts[static_cast<size_t>(r) * a.stride + i];
        a.out[i] = sum;
    }
}

struct place_args {
    float *out;
    const float *parts; /* [size][rows][in_stride] */
    uint32_t rows, width, in_stride, size;
    uint32_t first[NBI_DEVICE_RANKS_MAX + 1];
};

/* A block is a row of a rank. */
static __global__ void __launch_bounds__(THREADS) place_kernel(const __grid_constant__ place_args a)
{
    nbi_wait_before();
    nbi_let_next();
    const uint32_t row = blockIdx.x, r = blockIdx.y, n = a.first[r + 1] - a.first[r];
    const float *in = a.parts + (static_cast<size_t>(r) * a.rows + row) * a.in_stride;
    float *out = a.out + static_cast<size_t>(row) * a.width + a.first[r];
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) out[i] = in[i];
}

/* Is a call of NCCL to be made now? A timed step is stamped by a launch before it. */
static bool goes_on(nbi_cuda *c)
{
    if (c->rt.stamps) nbi_rt_stamp(&c->rt);
    c->rt.n_calls++;
    return !c->rt.skips && !c->rt.error[0] && !*c->rt.stop;
}

static void check(nbi_cuda *c, const nbi_cuda_nccl *p, const char *what, int result)
{
    if (result == NBI_NCCL_SUCCESS || c->rt.error[0]) return;
    snprintf(c->rt.error, sizeof c->rt.error, "NCCL: %s: %s (%.100s)", what,
             p->api->get_error_string(result), p->api->get_last_error(p->comm));
}

static void gather(nbi_cuda *c, const nbi_cuda_nccl *p, const float *in, float *out, size_t n)
{
    if (!goes_on(c)) return;
    check(c, p, "ncclAllGather",
          p->api->all_gather(in, out, n, NBI_NCCL_FLOAT32, p->comm, nbi_rt_stream(&c->rt)));
}

static void add_parts(nbi_cuda *c, const nbi_cuda_nccl *p, float *x, size_t n)
{
    const uint32_t blocks = static_cast<uint32_t>((n + THREADS - 1) / THREADS);
    const uint32_t most = BLOCKS_EACH * static_cast<uint32_t>(c->rt.n_sms);
    const parts_args a = {
        x, x, p->scratch, static_cast<uint32_t>(n), static_cast<uint32_t>(n), p->rank, p->size};
    nbi_launch(&c->rt, dim3(blocks < most ? blocks : most), dim3(THREADS), 0, add_parts_kernel, a);
}

/* A slice of n values to each rank, and theirs of the own one to scratch. */
static void scatter(nbi_cuda *c, const nbi_cuda_nccl *p, const float *x, size_t n)
{
    const nbi_nccl *api = p->api;
    if (!goes_on(c)) return;
    check(c, p, "ncclGroupStart", api->group_start());
    for (uint32_t r = 0; r < p->size; r++) {
        if (r == p->rank) continue;
        check(c, p, "ncclSend",
              api->send(x + r * n, n, NBI_NCCL_FLOAT32, static_cast<int>(r), p->comm,
                        nbi_rt_stream(&c->rt)));
        check(c, p, "ncclRecv",
              api->recv(p->scratch + r * n, n, NBI_NCCL_FLOAT32, static_cast<int>(r), p->comm,
                        nbi_rt_stream(&c->rt)));
    }
    check(c, p, "ncclGroupEnd", api->group_end());
}

void nbi_cuda_nccl_sum(nbi_cuda *c, const nbi_cuda_nccl *p, float *x, size_t n)
{
    if (p->size == 2 && !p->slices) {
        if (!goes_on(c)) return;
        check(c, p, "ncclAllReduce",
              p->api->all_reduce(x, x, n, NBI_NCCL_FLOAT32, NBI_NCCL_SUM, p->comm,
                                 nbi_rt_stream(&c->rt)));
        return;
    }
    while (n) {
        size_t m = n;
        if (n * p->size <= GATHER_VALUES) {
            gather(c, p, x, p->scratch, n);
            add_parts(c, p, x, n);
        } else {
            const size_t each = (n < SCRATCH_VALUES ? n : SCRATCH_VALUES) / p->size;
            float *own = x + p->rank * each;
            scatter(c, p, x, each);
            add_parts(c, p, own, each);
            gather(c, p, own, x, each);
            m = each * p->size;
        }
        x += m;
        n -= m;
    }
}

void nbi_cuda_nccl_join(nbi_cuda *c, const nbi_cuda_nccl *p, const nbi_join_ranks_args *a)
{
    const size_t row = static_cast<size_t>(a->in_stride) * p->size;
    const uint32_t most = row ? static_cast<uint32_t>(SCRATCH_VALUES / row) : 1;
    NB_ASSERT(row && most);
    for (uint32_t at = 0; at < a->n_rows; at += most) {
        const uint32_t rows = a->n_rows - at < most ? a->n_rows - at : most;
        place_args k = {a->out + static_cast<size_t>(at) * a->width,
                        p->scratch,
                        rows,
                        a->width,
                        a->in_stride,
                        p->size,
                        {}};
        for (uint32_t r = 0; r <= p->size; r++) k.first[r] = a->first[r];
        gather(c, p, a->in + static_cast<size_t>(at) * a->in_stride, p->scratch,
               static_cast<size_t>(rows) * a->in_stride);
        nbi_launch(&c->rt, dim3(rows, p->size), dim3(THREADS), 0, place_kernel, k);
    }
}

/* ---------------------------------------------------------------- life */

/* The id that rank 0 makes, on all of them. */
static nb_status share_id(nbi_cuda_nccl *p, const nbi_rank_link *link, nbi_nccl_id *id,
                          nb_error *err)
{
    nb_error mine = {};
    nb_status st = NB_OK;
    nbi_nccl_id own = {};
    nbi_nccl_id *all = static_cast<nbi_nccl_id *>(nbi_calloc(link->size, sizeof(nbi_nccl_id)));
    const int result = link->rank ? NBI_NCCL_SUCCESS : p->api->get_unique_id(&own);
    if (!all) st = nbi_fail(&mine, NB_NO_MEMORY, "out of memory");
    if (result != NBI_NCCL_SUCCESS)
        st = nbi_fail(&mine, NB_UNSUPPORTED, "ncclGetUniqueId: %s (%.200s)",
                      p->api->get_error_string(result), p->api->get_last_error(NULL));
    st = link->agree(link->user, st, &mine, err);
    if (st == NB_OK) st = link->gather(link->user, all, &own, sizeof own, err);
    if (st == NB_OK) *id = all[0];
    nbi_free(all);
    return st;
}

static nb_status connect(nbi_cuda *c, nbi_cuda_nccl *p, const nbi_rank_link *link,
                         const nbi_nccl_id *id, nb_error *err)
{
    nbi_cuda_nccl_call *call = begin_call(c, p, CONNECT, id);
    const uint64_t most = c->ranks->one_shot ? OPTIONAL_NS : CONNECT_NS;
    if (!call) return nbi_fail(err, NB_NO_MEMORY, "no thread for NCCL");
    if (!end_call(&call, link, most)) {
        NB_TRY(link->lost(link->user, err));
        return nbi_fail(err, NB_UNSUPPORTED, "NCCL %s did not connect %u ranks within %.0f s",
                        p->api->version, p->size, 1e-9 * static_cast<double>(most));
    }
    const int result = call->result;
    if (result == NBI_NCCL_SUCCESS) p->comm = call->comm;
    nbi_free(call);
    if (result == NBI_NCCL_SUCCESS) return NB_OK;
    return nbi_fail(err, NB_UNSUPPORTED, "NCCL %s: ncclCommInitRank: %s (%.200s)", p->api->version,
                    p->api->get_error_string(result), p->api->get_last_error(NULL));
}

static nb_status find(const nbi_cuda *c, nbi_cuda_nccl *p, nb_error *err)
{
    NB_TRY(nbi_nccl_load(&p->api, NULL, err));
    if (NBI_EMULATED)
        return nbi_fail(err, NB_UNSUPPORTED, "NCCL needs GPUs, and here they are emulated");
    if (c->ranks_per_device > 1)
        return nbi_fail(err, NB_UNSUPPORTED, "NCCL has one rank on a GPU, here it is %u",
                        c->ranks_per_device);
    return NB_OK;
}

nb_status nbi_cuda_nccl_open(nbi_cuda *c, nbi_cuda_nccl *p, const nbi_rank_link *link, bool slices,
                             nb_error *err)
{
    nb_error mine = {};
    nbi_nccl_id id = {};
    *p = {};
    p->rank = link->rank;
    p->size = link->size;
    p->slices = slices;
    nb_status st = find(c, p, &mine);
    NB_TRY(link->agree(link->user, st, &mine, err));
    NB_TRY(share_id(p, link, &id, err));
    st = connect(c, p, link, &id, &mine);
    NB_TRY(link->agree(link->user, st, &mine, err));
    p->scratch = static_cast<float *>(nbi_rt_alloc(&c->rt, SCRATCH_VALUES * sizeof(float)));
    if (!p->scratch) st = nbi_fail(&mine, NB_NO_MEMORY, "cuda: no memory for NCCL's values");
    return link->agree(link->user, st, &mine, err);
}

bool nbi_cuda_nccl_failed(nbi_cuda_nccl *p)
{
    int result = NBI_NCCL_SUCCESS;
    if (!p->comm || p->leaving) return p->failed[0] != '\0';
    const int asked = p->api->comm_get_async_error(p->comm, &result);
    if (asked == NBI_NCCL_SUCCESS && result == NBI_NCCL_SUCCESS) return false;
    snprintf(p->failed, sizeof p->failed, "NCCL: %s",
             p->api->get_error_string(asked == NBI_NCCL_SUCCESS ? result : asked));
    return true;
}

/* Its kernels end when a thread aborts; that returns when the recorded steps are gone. */
void nbi_cuda_nccl_abort(nbi_cuda *c, nbi_cuda_nccl *p)
{
    if (p->comm && !p->leaving) p->leaving = begin_call(c, p, ABORT, NULL);
}

void nbi_cuda_nccl_close(nbi_cuda *c, nbi_cuda_nccl *p)
{
    if (p->comm && !p->leaving) p->leaving = begin_call(c, p, DESTROY, NULL);
    if (p->leaving && end_call(&p->leaving, NULL, LEAVE_NS)) nbi_free(p->leaving);
    nbi_rt_free(&c->rt, p->scratch);
    *p = {};
}
