#include "cuda/cluster_kernels.h"

#include <stdio.h>

#include "backend/cuda/cluster.h"
#include "backend/cuda/runtime.h"

#define THREADS 64u

struct block_memory {
    alignas(128) uint32_t sent[CLUSTER_MOST][CLUSTER_SLICE];
    alignas(8) uint64_t full, all, post;
    alignas(8) float posted[2];
    uint32_t own, named;
    uint32_t board[CLUSTER_MOST];
};

static __global__ void plain_kernel()
{
    nbi_wait_before();
    nbi_let_next();
}

NBI_DEV uint32_t mark_of(uint32_t rank)
{
    return 1000 * (blockIdx.x / nbi_cluster_size() + 1) + rank;
}

/* Slice r, of block r, to the blocks from r on. */
NBI_DEV void send_slices(const uint32_t *words, block_memory *s, uint32_t rank, uint32_t size)
{
    if (threadIdx.x == 0) {
        const uint32_t bytes = CLUSTER_SLICE * sizeof *words;
        nbi_bar_expect(&s->full, (rank + 1) * bytes);
        nbi_copy_bulk_multicast(s->sent[rank], words + rank * CLUSTER_SLICE, bytes, &s->full,
                                ((1u << size) - 1) & ~((1u << rank) - 1));
    }
    nbi_bar_wait(&s->full, 0);
}

static __global__ void cluster_kernel(const uint32_t *words, cluster_seen *seen, int fault)
{
    block_memory *s = nbi_shared<block_memory>();
    const uint32_t rank = nbi_cluster_rank(), size = nbi_cluster_size(), t = threadIdx.x;
    cluster_seen *to = seen + blockIdx.x;
    if (fault == CLUSTER_TOO_EARLY && rank == 0) *nbi_cluster_at(&s->own, size - 1) = 1;
    if (t == 0) {
        nbi_bar_init(&s->full, 1);
        nbi_bar_init(&s->all, size);
        nbi_bar_init(&s->post, 1);
        nbi_bar_init_done();
    }
    for (uint32_t i = t; i < CLUSTER_MOST * CLUSTER_SLICE; i += THREADS)
        s->sent[i / CLUSTER_SLICE][i % CLUSTER_SLICE] = 7;
    if (t < CLUSTER_MOST) s->board[t] = 0;
    nbi_cluster_arrive();
    nbi_wait_before();
    nbi_let_next();
    nbi_cluster_wait();

    if (t == 0) *nbi_cluster_at(&s->own, (rank + 1) % size) = mark_of(rank);
    if (t < size) {
        nbi_cluster_at(s->board, t)[rank] = mark_of(rank) + t;
        if (fault != CLUSTER_STAYS_AWAY || rank + 1 < size) nbi_bar_arrive_at(&s->all, t);
    }
    nbi_bar_wait_cluster(&s->all, 0);
    if (t < CLUSTER_MOST) to->board[t] = s->board[t];
    send_slices(words, s, rank, size);
    for (uint32_t i = t; i < CLUSTER_MOST * CLUSTER_SLICE; i += THREADS)
        to->sent[i / CLUSTER_SLICE][i % CLUSTER_SLICE] =
            s->sent[i / CLUSTER_SLICE][i % CLUSTER_SLICE];
    if (t == 0) {
        nbi_bar_expect(&s->post, sizeof s->posted);
        nbi_store_async(s->posted, {{(float)mark_of(rank), 0.5f}}, &s->post, (rank + 2) % size);
    }
    nbi_bar_wait(&s->post, 0);
    if (t < 2) to->posted[t] = s->posted[t];
    if (t == 0) s->named = mark_of(rank);
    nbi_sync_some(1, THREADS);
    if (t == THREADS - 1) to->named = s->named;

    nbi_cluster_arrive();
    nbi_cluster_wait();
    if (t == 0) {
        to->rank = rank;
        to->size = size;
        to->own = s->own;
        to->read = *nbi_cluster_at(&s->own, (rank + 1) % size);
    }
    nbi_cluster_arrive();
    nbi_cluster_wait();
}

static void launch(nbi_rt *rt, uint32_t cluster, uint32_t n_clusters, enum cluster_fault fault,
                   const uint32_t *words, cluster_seen *seen)
{
    nbi_launch(rt, dim3(2), dim3(THREADS), 0, plain_kernel);
    nbi_launch_cluster(rt, dim3(cluster * n_clusters), cluster, dim3(THREADS), sizeof(block_memory),
                       cluster_kernel, words, seen, (int)fault);
    nbi_launch(rt, dim3(2), dim3(THREADS), 0, plain_kernel);
}

static uint32_t count_stamps(nbi_rt *rt)
{
    uint32_t n = 0;
    uint64_t before = 0;
    for (uint32_t i = 0; i < rt->n_stamps; i++) {
        const uint64_t ns = nbi_rt_stamp_ns(rt, i);
        n += ns && ns >= before;
        before = ns;
    }
    return n;
}

bool cluster_run(uint32_t cluster, uint32_t n_clusters, enum cluster_fault fault, uint32_t launches,
                 bool stamps, cluster_seen *seen, uint32_t *stamped)
{
    nbi_rt rt;
    uint32_t words[CLUSTER_MOST * CLUSTER_SLICE];
    const size_t bytes = cluster * n_clusters * sizeof *seen;
    for (uint32_t i = 0; i < CLUSTER_MOST * CLUSTER_SLICE; i++) words[i] = 100 + i;
    bool good = nbi_rt_open(&rt, 0);
    if (!good) return fprintf(stderr, "%s\n", rt.error), false;
    uint32_t *at = static_cast<uint32_t *>(nbi_rt_alloc(&rt, sizeof words));
    cluster_seen *out = static_cast<cluster_seen *>(nbi_rt_alloc(&rt, bytes));
    good = at && out && (!stamps || nbi_rt_stamps_open(&rt));
    if (good) {
        nbi_rt_upload(&rt, at, words, sizeof words);
        rt.dependent = true;
        if (stamps) nbi_rt_stamps_clear(&rt);
        rt.stamps = stamps;
        nbi_rt_record(&rt);
        for (uint32_t i = 0; i < launches; i++) launch(&rt, cluster, n_clusters, fault, at, out);
        nbi_rt_graph *g = nbi_rt_record_end(&rt);
        if (g) nbi_rt_replay(&rt, g);
        rt.stamps = false;
        *stamped = stamps ? count_stamps(&rt) : 0;
        nbi_rt_download(&rt, seen, out, bytes);
        good = nbi_rt_sync(&rt);
        if (g) nbi_rt_graph_free(&rt, &g);
    }
    if (!good) fprintf(stderr, "%s\n", rt.error);
    nbi_rt_free(&rt, at);
    nbi_rt_free(&rt, out);
    nbi_rt_close(&rt);
    return good;
}

uint32_t cluster_most(void)
{
    nbi_rt rt;
    uint32_t n = 0;
    if (!nbi_rt_open(&rt, 0)) return 0;
    for (uint32_t cluster = 1; cluster <= CLUSTER_MOST; cluster *= 2)
        if (nbi_rt_clusters(&rt, cluster_kernel, cluster, dim3(THREADS), sizeof(block_memory)))
            n = cluster;
    nbi_rt_close(&rt);
    return n;
}
