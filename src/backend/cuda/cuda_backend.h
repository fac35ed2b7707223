/* The CUDA backend from inside. Private to src/backend/cuda and src/moe/cuda.
 *
 * Activations are float32. Everything runs in one stream in the order of the calls; nothing but
 * `sync` and `download` waits for the device, but a step or `sample` for the one before it that
 * nobody has waited for.
 *
 * Recorded steps: the calls of a step depend on the batch's counts (rows, sequences, logit rows, a
 * bound of the longest sequence) and on nothing else the host knows; everything else is read from
 * device memory. So a step is recorded once per set of counts and replayed. An operator must not
 * look at host arrays of the batch, and sizes its grid from the counts alone. */
#pragma once

#include "backend/backend.h"
#include "backend/cuda/runtime.h"

#define NBI_CUDA_GRAPHS         96u  /* recorded steps kept */
#define NBI_CUDA_GRAPH_ROWS     256u /* steps of more rows are not worth recording */
#define NBI_CUDA_LEN_BUCKET     256u /* smallest bound of a sequence's length */
#define NBI_CUDA_STAGE_BYTES    ((size_t)16 << 20)
#define NBI_CUDA_PENDING        4u /* linear layers that one launch can do */
#define NBI_CUDA_STAGES         2u
#define NBI_CUDA_ARRIVALS       4096u /* counters of blocks */
#define NBI_CUDA_ROUTED_EXPERTS 256u
#define NBI_CUDA_ROUTED_BLOCKS  512u

/* What a recorded step depends on. */
struct nbi_cuda_key {
    uint32_t n_rows, n_seqs, n_logit_rows, max_len, pass, stamped;
};

struct nbi_cuda_graph {
    nbi_cuda_key key;
    nbi_rt_graph *graph; /* NULL: seen once, not recorded yet */
    uint64_t used;       /* number of the step that used it last */
};

/* An append that may become part of the attention behind it. */
enum nbi_cuda_waits { NBI_CUDA_WAITS_NOT, NBI_CUDA_WAITS_GQA, NBI_CUDA_WAITS_MLA };

struct nbi_cuda_waiting {
    nbi_cuda_waits what;
    nbi_gqa_append_args gqa;
    nbi_mla_append_args mla;
    nbi_rope_rows rope; /* of the append */
    nbi_kv_layer cache;
};

/* Parts of the indexer that may become part of the choice behind them. */
struct nbi_cuda_index_waiting {
    bool appends, weighs, selects; /* selects: with what else is part of it */
    nbi_index_append_args append;
    nbi_rope_rows rope; /* of the append */
    nbi_kv_layer cache;
    nbi_linear_args weigh; /* the exact product that makes w */
    nbi_index_select_args select;
    nbi_rope_rows select_rope;
    nbi_kv_layer select_cache;
};

/* Activations that linear_wide.cu has converted: its next call may use them while the runtime's
 * n_calls stays. */
struct nbi_cuda_converted {
    uint64_t n_calls;
    const void *x;
    uint32_t n_rows, cols, stride, form;
    float input_scale;
};

/* What the blocks of a launch that routes and multiplies share (moe_routed.cu). */
struct nbi_cuda_routed {
    uint64_t logits[NBI_CUDA_ROUTED_EXPERTS]; /* each with the number of its launch */
    uint32_t numbers[NBI_CUDA_ROUTED_BLOCKS]; /* of a block's last launch */
};

struct nbi_cuda_ranks; /* cuda_ranks.h */
struct nbi_peer_view;  /* cuda_peers.h */

struct nbi_cuda {
    nbi_backend base;
    nbi_rt rt;
    nbi_limits limits;
    bool graphs;  /* record steps */
    bool timed;   /* this one: with graphs by stamps of launches, else by events around operators */
    bool in_step; /* between step_begin and step_end */

    void *scratch; /* of one operator at a time */
    size_t scratch_bytes;

    nbi_cuda_converted converted; /* in scratch */

    /* the step's batch */
    char *batch_host, *batch_device; /* pinned, device: the arrays of a batch, packed */
    size_t batch_bytes;
    nbi_batch batch; /* device form */
    const nbi_batch *host_batch;
    bool owes_faults; /* the step has ended, and nobody has waited: row_fault of host_batch */
    nbi_cuda_graph recorded[NBI_CUDA_GRAPHS], *recording, *replaying;
    uint64_t n_steps;
    uint32_t *clock_at;  /* the launch behind a mark, where launches are stamped */
    uint32_t clock_last; /* launches up to the last that only stamped */

    /* uploads of weights: pageable memory goes through pinned pieces, one filled while the device
     * reads the other */
    char *stage[NBI_CUDA_STAGES];
    uint32_t stage_now;
    size_t stage_used;  /* bytes of it */
    char *stage_device; /* device memory of one piece: what is packed there lies here first */
    nbi_pool *copiers;  /* threads that fill a piece, while weights are loaded */

    /* linear layers that wait for others of the same x, and the norm that makes this x: every other
     * call does them first */
    nbi_linear_args pending[NBI_CUDA_PENDING];
    uint32_t n_pending;
    nbi_rmsnorm_args norm;
    nbi_linear_args router; /* the exact product behind the norm: waits for `route` */
    nbi_route_args route;   /* of one row behind it: waits for the experts */
    nbi_swiglu_args swiglu; /* what makes this x instead */
    bool norm_pending, router_pending, route_pending, swiglu_pending;
    const nbi_peer_view *norm_peers; /* the norm sums its delta over ranks; NULL */
    nbi_sum_ranks_args sum;          /* for the norm behind it: alone, before all these */
    bool sum_pending;
    nbi_cuda_waiting waiting;     /* the same; never beside these */
    nbi_cuda_index_waiting index; /* the same; beside all of them */

    uint32_t *arrivals;      /* device, [NBI_CUDA_ARRIVALS]: blocks of a group that are done; zero
                                between kernels */
    nbi_cuda_routed *routed; /* device; zero at first */

    void *sampler; /* of sample.cu */

    nbi_cuda_ranks *ranks; /* NULL: one rank */
    uint32_t ranks_per_device;
    char exchange[16];
    bool apart_sums;
};

static inline nbi_cuda *nbi_cuda_of(nbi_backend *b)
{
    return reinterpret_cast<nbi_cuda *>(b);
}

static inline const nbi_cuda *nbi_cuda_of(const nbi_backend *b)
{
    return reinterpret_cast<const nbi_cuda *>(b);
}

static inline uint32_t nbi_ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* Copies pageable memory to the device, through the pinned pieces, in the order of the stream.
 * Returns when src may go. */
void nbi_cuda_upload(nbi_cuda *c, void *dst, const void *src, size_t bytes);
/* `bytes` (at most NBI_CUDA_STAGE_BYTES) of a pinned piece, aligned to 16, to fill and upload
 * before the next call. Waits only when the other piece is still being read. */
char *nbi_cuda_stage(nbi_cuda *c, size_t bytes);

/* The threads that copy weights into pinned memory: one reads about 7 GB/s, the bus takes 50. They
 * are there from the first call to the next reserve(). NULL, where there are none: copy alone. */
nbi_pool *nbi_cuda_copiers(nbi_cuda *c);

/* Does the norm and the linear layers, or the append, that wait. What runs on the device without
 * going through the table calls it first. */
void nbi_cuda_flush(nbi_cuda *c);
/* Does the append that waits; its operator's own part of it. */
void nbi_cuda_append_now(nbi_cuda *c);
void nbi_cuda_gqa_append_now(nbi_cuda *c);
/* All that waits of the indexer. */
void nbi_cuda_index_now(nbi_cuda *c);
/* Only the products and what they stand with: appends and what the indexer's choice weighs wait on.
 */
void nbi_cuda_products_now(nbi_cuda *c);
/* The product that the indexer's choice weighs. */
void nbi_cuda_weigh_now(nbi_cuda *c);
void nbi_cuda_mla_append_now(nbi_cuda *c);

extern "C" {
extern const nbi_backend_ops nbi_cuda_ops;

/* pack.cu, linear*.cu */
nb_status nbi_cuda_weight_prepare(nbi_backend *b, nbi_weight **out, const nbi_matrix *m,
                                  nb_error *err);
void nbi_cuda_weight_release(nbi_backend *b, nbi_weight **w);
void nbi_cuda_linear(nbi_backend *b, const nbi_linear_args *a);
void nbi_cuda_route_now(nbi_backend *b, const nbi_route_args *a);
void nbi_cuda_swiglu_later(nbi_backend *b, const nbi_swiglu_args *a);
void nbi_cuda_add_now(nbi_backend *b, const nbi_add_args *a);
void nbi_cuda_rmsnorm_later(nbi_backend *b, const nbi_rmsnorm_args *a);
/* elementwise.cu */
void nbi_cuda_embed(nbi_backend *b, const nbi_embed_args *a);
void nbi_cuda_rope_table(nbi_backend *b, const nbi_rope_table_args *a);
void nbi_cuda_swiglu(nbi_backend *b, const nbi_swiglu_args *a);
void nbi_cuda_share_experts(nbi_backend *b, const nbi_share_experts_args *a);
void nbi_cuda_own_experts(nbi_backend *b, const nbi_own_experts_args *a);
void nbi_cuda_clear(nbi_backend *b, const nbi_clear_args *a);
void nbi_cuda_gather(nbi_backend *b, const nbi_gather_args *a);
void nbi_cuda_add(nbi_backend *b, const nbi_add_args *a);
/* attention_mla.cu, attention_gqa.cu */
void nbi_cuda_mla_append(nbi_backend *b, const nbi_mla_append_args *a);
void nbi_cuda_mla_attend(nbi_backend *b, const nbi_mla_attend_args *a);
void nbi_cuda_gqa_append(nbi_backend *b, const nbi_gqa_append_args *a);
void nbi_cuda_gqa_attend(nbi_backend *b, const nbi_gqa_attend_args *a);
/* indexer.cu */
void nbi_cuda_index_append(nbi_backend *b, const nbi_index_append_args *a);
void nbi_cuda_index_select(nbi_backend *b, const nbi_index_select_args *a);
void nbi_cuda_index_reuse(nbi_backend *b, const nbi_index_reuse_args *a);
/* bandwidth.cu */
double nbi_cuda_read_bandwidth(nbi_backend *b, void *memory, size_t bytes);
/* cuda_ranks.cu */
nb_status nbi_cuda_join(nbi_backend *b, const nbi_rank_link *link, nb_error *err);
void nbi_cuda_sum_ranks(nbi_backend *b, const nbi_sum_ranks_args *a);
void nbi_cuda_sum_ranks_later(nbi_backend *b, const nbi_sum_ranks_args *a); /* linear.cu */
void nbi_cuda_join_ranks(nbi_backend *b, const nbi_join_ranks_args *a);
/* route.cu, sample.cu */
void nbi_cuda_route(nbi_backend *b, const nbi_route_args *a);
void nbi_cuda_sample(nbi_backend *b, const nbi_sample_args *a);
}

/* elementwise.cu. peers: delta is summed over ranks in the same launch; NULL. The bits are those of
 * separate calls. */
void nbi_cuda_rmsnorm(nbi_cuda *c, const nbi_rmsnorm_args *a, const nbi_peer_view *peers);
bool nbi_cuda_norm_sums(const nbi_cuda *c, const nbi_rmsnorm_args *a,
                        const nbi_sum_ranks_args *sum);
/* What norms sum n values by; NULL: they do not. */
const nbi_peer_view *nbi_cuda_peers_of_norms(const nbi_cuda *c, size_t n);

/* What a sum over ranks met, behind a wait. */
nb_status nbi_cuda_ranks_status(nbi_cuda *c, nb_error *err);
void nbi_cuda_leave(nbi_cuda *c);

/* Scratch bytes of the operators for any call within the limits. */
size_t nbi_cuda_linear_scratch(const nbi_cuda *c, const nbi_limits *limits);
size_t nbi_cuda_attention_scratch(const nbi_cuda *c, const nbi_limits *limits);
/* Writes what `sample` owes the host, behind a wait that went well or not. */
void nbi_cuda_sample_settle(nbi_cuda *c, bool fine);
/* The sampler's own memory; its device bytes. */
size_t nbi_cuda_sampler_bytes(const nbi_limits *limits);
nb_status nbi_cuda_sampler_open(nbi_cuda *c, const nbi_limits *limits, nb_error *err);
void nbi_cuda_sampler_close(nbi_cuda *c);
