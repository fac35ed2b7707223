/* Operator contracts and the table a device implements. The model is a list of these calls, the
 * same for every device.
 *
 * Shapes: T rows of the batch, S sequences, H hidden, V vocabulary. Buffers marked `act` hold
 * activations in the backend's own type (nbi_backend.act_dtype: F32 on the CPU); all other types
 * are written out. Every pointer in an args struct is a device pointer of this backend unless
 * marked host. Rows of a buffer are contiguous unless a stride is given.
 *
 * Numerics, for every entry: accumulation in float32 or better; the order of every reduction
 * depends on the row's own shapes (K, context length, expert ids), never on T, S, its neighbours,
 * the thread count or the cut of a prompt into chunks: a row's result is the same bits in any
 * batch. No operator allocates; scratch comes from `workspace`, sized by the plan function of the
 * table.
 *
 * Numerics guard: norms and the head find non-finite rows. They write `1 + layer * NBI_WHERE_COUNT
 * + where` to row_fault[t] if it is still 0. */
#pragma once

#include "base/cpu.h"
#include "base/mem.h"
#include "base/thread.h"
#include "tensor/matrix.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_PAGE_TOKENS 64u

/* Where the guard found a non-finite value. */
typedef enum nbi_where {
    NBI_WHERE_EMBED,
    NBI_WHERE_INPUT_NORM, /* residual entering attention */
    NBI_WHERE_POST_NORM,  /* residual after attention */
    NBI_WHERE_FINAL_NORM, /* residual after the last layer */
    NBI_WHERE_LOGITS,
    NBI_WHERE_COUNT
} nbi_where;

/* A prepared matrix: this head, then whatever the backend keeps. */
typedef struct nbi_weight {
    nbi_matrix host;       /* canonical view (mapped) */
    uint64_t device_bytes; /* memory the prepared form takes beyond the mapped file */
    uint8_t part;          /* nbi_part it belongs to; whoever had it prepared says so */
} nbi_weight;

/* One step's rows. Rows of a sequence are consecutive and ascend in position. Arrays live on the
 * device for operators; the engine fills the host form and the backend's `step_begin` makes the
 * device form (the same pointers on a CPU). */
typedef struct nbi_batch {
    uint32_t n_rows;            /* T */
    uint32_t n_seqs;            /* S */
    uint32_t n_logit_rows;      /* R */
    uint32_t page_stride;       /* columns of page_table */
    uint32_t max_len;           /* largest seq_len */
    const int32_t *ids;         /* [T] token ids */
    const int32_t *pos;         /* [T] position in its sequence, from 0 */
    const int32_t *row_seq;     /* [T] sequence index */
    const int32_t *seq_first;   /* [S + 1] first row of each sequence */
    const int32_t *seq_len;     /* [S] tokens in the cache after this step */
    const int32_t *page_table;  /* [S][page_stride] page of every 64 positions */
    const int32_t *logit_rows;  /* [R] rows whose logits are wanted */
    const int32_t *hidden_rows; /* [T] drafting: row of the pass before to continue; else NULL */
    const int32_t *list_rows;   /* [T] drafting: row of the first pass it goes back to; else NULL */
    const int32_t *shares;      /* [T] 1: takes experts that others read (nbi_share_experts_args);
                                   NULL: nobody does */
    const int32_t *candidates;  /* [R] host; with ranks on several hosts so many of the best logits
                                   of each rank suffice (model/candidates.h); 0, NULL: all are
                                   wanted. Where links are short all are there anyway */
    uint32_t n_valid;           /* with candidates: ids below may be chosen */
    const int32_t *expanded;    /* [S] rows at positions below attend in MLA's expanded form; NULL:
                                   none do. Host, and for backends with ops->mla_expanded only */
    int32_t *row_fault;         /* [T] out: numerics guard, zero when fine */
} nbi_batch;

/* Cache of one layer. Position p of a sequence lies in page_table[s][p / 64], slot p % 64. */
typedef struct nbi_kv_layer {
    nbi_dtype dtype; /* F32, BF16, or F8_E4M3: with scales, kv_shape.h */
    void *latent;    /* MLA: [pages][64][kv_lora + rope]; normed latent, then rotated rope key */
    void *k, *v;     /* GQA: [pages][n_kv_heads][64][head_dim], k rotated */
    void *index_k;   /* DSA, full-indexer layers: [pages][64][index_dim], normed and rotated */
} nbi_kv_layer;

/* cos and sin of one rope setting for the rows of a batch. */
typedef struct nbi_rope_rows {
    const float *cos, *sin; /* [T][dim / 2], attention factor included */
    uint32_t dim;
    bool interleaved;
} nbi_rope_rows;

typedef struct nbi_backend nbi_backend;

/* ---------------------------------------------------------------- operator arguments */

/* out[t] = table[ids[t] - first]; zero where that is outside of the table (another rank has it).
 * NVFP4 and FP8 tables are decoded. */
typedef struct nbi_embed_args {
    void *out; /* act [T, H] */
    const nbi_weight *table;
    uint32_t first; /* id of the table's first row */
    bool part_of;   /* ids may be outside; without it they are not */
    const nbi_batch *batch;
} nbi_embed_args;

/* cos/sin [T][dim/2] of angle pos * inv_freq[i], computed in double and rounded to float32, times
 * `factor`. */
typedef struct nbi_rope_table_args {
    float *cos, *sin;
    const float *inv_freq; /* host [dim / 2] */
    uint32_t dim;
    float factor;
    const nbi_batch *batch;
} nbi_rope_table_args;

/* x += delta (when given), then out = x * rsqrt(mean(x^2) + eps) * weight. The sum may go elsewhere
 * (x_out), which leaves x as it is. */
typedef struct nbi_rmsnorm_args {
    void *out;           /* act [T, D], row stride out_stride; NULL: only the addition */
    void *x;             /* act [T, D], row stride x_stride; updated when delta is given */
    void *x_out;         /* act [T, D], row stride x_stride, written instead; NULL or x: x is */
    const void *delta;   /* act [T, D] contiguous, or NULL */
    const float *weight; /* [D] */
    float eps;
    uint32_t n_rows, width, x_stride, out_stride; /* elements */
    int32_t *row_fault;                           /* [T] or NULL */
    uint32_t layer;
    nbi_where where;
} nbi_rmsnorm_args;

/* y[t, n] = sum_k x[t, k] * w[n, k] + bias[n]. */
typedef struct nbi_linear_args {
    void *y;       /* act [T, rows], row stride y_stride; f32 when y_f32 */
    const void *x; /* act [T, cols], row stride x_stride */
    const nbi_weight *w;
    const float *bias; /* [rows] or NULL */
    uint32_t n_rows, x_stride, y_stride;
    bool y_f32;   /* y is float32 whatever act is (router, indexer weights, logits) */
    bool x_exact; /* x must not be rounded below float32 (router: fp32 x fp32 product) */
} nbi_linear_args;

/* out = silu(gate) * up, elementwise over [T, width]. */
typedef struct nbi_swiglu_args {
    void *out;
    const void *gate, *up; /* act, row strides below */
    uint32_t n_rows, width, in_stride, out_stride;
    bool once; /* only the next linear layer reads out: it may be left unwritten */
} nbi_swiglu_args;

/* MLA: norm the latent, rotate q and the shared key, append (latent, key) to the cache. */
typedef struct nbi_mla_append_args {
    void *q;              /* act [T, heads, nope + rope]; the rope part is rotated in place */
    const void *kv;       /* act [T, kv_lora + rope] as kv_a_proj gives it, row stride kv_stride */
    const float *kv_norm; /* [kv_lora] */
    float eps;
    uint32_t n_heads, nope_dim, rope_dim, kv_lora, kv_stride;
    const nbi_rope_rows *rope;
    const nbi_kv_layer *cache;
    const nbi_batch *batch;
} nbi_mla_append_args;

/* MLA. Per row t and head h, W = kv_b rows [h * (nope + v), ...): first nope rows
 * W_UK, then v rows W_UV, each [kv_lora]: ql = qn . W_UK; s_j = (ql . c_j + qr . k_j) * scale over
 * the positions j <= pos[t] (only those in `select` when given); p = softmax(s) in float32; ol =
 * sum_j p_j c_j; out[t, h, d] = W_UV[d] . ol. That is the absorbed form. The expanded one, of the
 * rows below batch->expanded, is the same with the sums in another order: k_j = W_UK . c_j and
 * v_j = W_UV . c_j for every position and head; s_j = (qn . k_j + qr . rope key) * scale; out =
 * sum_j p_j v_j. It has no `select`. */
typedef struct nbi_mla_attend_args {
    void *out;              /* act [T, heads, v_dim] */
    const void *q;          /* act [T, heads, nope + rope], rotated; undefined behind the call */
    const nbi_weight *kv_b; /* [heads * (nope + v), kv_lora] */
    uint32_t n_heads, nope_dim, rope_dim, kv_lora, v_dim;
    float scale;
    const nbi_kv_layer *cache;
    const int32_t
        *select; /* [T, select_stride] positions, ascending, -1 behind the last; NULL: all */
    uint32_t select_stride;
    const nbi_batch *batch;
    void *workspace;
} nbi_mla_attend_args;

/* GQA: RMSNorm per head (when weights are given), rotate the first rope.dim values of q and k,
 * append k and v. */
typedef struct nbi_gqa_append_args {
    void *q;                      /* act [T, heads, head_dim], in place */
    void *k;                      /* act [T, kv_heads, head_dim], in place */
    const void *v;                /* act [T, kv_heads, head_dim] */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    float eps;
    uint32_t n_heads, n_kv_heads, head_dim;
    const nbi_rope_rows *rope;
    const nbi_kv_layer *cache;
    const nbi_batch *batch;
} nbi_gqa_append_args;

/* Causal grouped-query attention over the cache; head h reads kv head h / (heads / kv_heads). */
typedef struct nbi_gqa_attend_args {
    void *out;     /* act [T, heads, head_dim] */
    const void *q; /* as gqa_append left it; undefined behind the call, as that one's k */
    uint32_t n_heads, n_kv_heads, head_dim;
    float scale;
    const nbi_kv_layer *cache;
    const nbi_batch *batch;
    void *workspace;
} nbi_gqa_attend_args;

/* DSA indexer key: LayerNorm with bias, rotate the FIRST rope.dim values, append to cache->index_k.
 */
typedef struct nbi_index_append_args {
    const void *k;                        /* act [T, index_dim] */
    const float *norm_weight, *norm_bias; /* [index_dim] */
    float eps;
    uint32_t index_dim;
    const nbi_rope_rows *rope;
    const nbi_kv_layer *cache;
    const nbi_batch *batch;
} nbi_index_append_args;

/* DSA selection: q's first rope.dim values of each head are rotated (in place); I(t, s) = sum_h
 * w[t, h] * heads^-0.5 * relu(q[t, h] . k[s] * index_dim^-0.5) for s <= pos[t]. The topk largest,
 * ties to the lower position; all when pos[t] < topk. */
typedef struct nbi_index_select_args {
    int32_t *select; /* [T, topk] ascending positions, -1 behind the last */
    void *q;         /* act [T, index_heads, index_dim] */
    const float *w;  /* [T, index_heads] */
    uint32_t n_heads, index_dim, topk;
    const nbi_rope_rows *rope;
    const nbi_kv_layer *cache;
    const nbi_batch *batch;
    void *workspace;
} nbi_index_select_args;

/* Index lists of an earlier pass: select[t] = from[list_rows[t]]. Places that are free there, since
 * that row had fewer positions than topk, take those up to pos[t]: place i position i. `from` NULL:
 * all are free. */
typedef struct nbi_index_reuse_args {
    int32_t *select;     /* [T, topk] as of index_select */
    const int32_t *from; /* [rows of the first pass, topk] */
    uint32_t topk;
    const nbi_batch *batch;
} nbi_index_reuse_args;

/* Routing. score = sigmoid or softmax(logits); choice = score + bias; with groups: group score =
 * sum of its two largest choices, keep topk_group groups. ids: top_k by choice, ties to the lower
 * id, in descending order of choice. weights = score at ids; norm_topk divides by their sum (+
 * 1e-20 for sigmoid); times routed_scale. Source: DeepSeek-V3 (arXiv 2412.19437) and its noaux_tc
 * routing. */
typedef struct nbi_route_args {
    int32_t *ids;        /* [T, top_k] */
    float *weights;      /* [T, top_k] */
    const float *logits; /* [T, E] */
    const float *bias;   /* [E] or NULL */
    uint32_t n_rows, n_experts, top_k, n_group, topk_group;
    bool softmax, norm_topk;
    float routed_scale;
} nbi_route_args;

/* Device memory, zeroed at the start. Sums over calls in which some row shares. */
typedef struct nbi_share_state {
    uint64_t calls, before, after; /* distinct experts that route chose; those in S */
    uint32_t scratch[32];          /* the operator's */
} nbi_share_state;

/* Opportunistic expert activation (arXiv 2511.02237), behind `route` with the same arguments. A row
 * that shares keeps its first k0 experts. S: those, and all top_k of the rows that do not share.
 * From its k0-th choice downwards such a row then takes what is in S until it has top_k; places
 * that stay free get id -1 and weight 0; weights are made of the new set as `route` makes them. A
 * row's result depends on the others of the batch: the only operator of which that is meant. */
typedef struct nbi_share_experts_args {
    nbi_route_args route;  /* as it was called; ids and weights in place */
    const int32_t *shares; /* [T] */
    uint32_t k0;           /* 1 .. top_k */
    nbi_share_state *state;
} nbi_share_experts_args;

/* What of a routing a rank computes: ids[i] - first, or -1 where that is not one of n_own experts.
 */
typedef struct nbi_own_experts_args {
    int32_t *ids; /* [n], in place */
    size_t n;
    uint32_t first, n_own;
} nbi_own_experts_args;

/* Zeros: what a rank adds that has no part of a layer. */
typedef struct nbi_clear_args {
    void *p;      /* 64-byte aligned */
    size_t bytes; /* a multiple of 4 */
} nbi_clear_args;

/* x[n] := sum over ranks, float32, added in the order of ranks beginning with the value of rank 0:
 * the same bits on every rank, in every run and in every form of the exchange. */
typedef struct nbi_sum_ranks_args {
    float *x;
    size_t n;
    bool once; /* rmsnorm comes next and takes it as its delta, nobody else: x need not become it */
} nbi_sum_ranks_args;

/* Columns of all ranks side by side: out[t, first[k] + i] = in of rank k [t, i] for i below first[k
 * + 1] - first[k]. */
typedef struct nbi_join_ranks_args {
    float *out;            /* [T, width] */
    const float *in;       /* [T, in_stride]; in_stride is the same on every rank */
    const uint32_t *first; /* host [ranks + 1], ascending, from 0 to width */
    uint32_t n_rows, width, in_stride;
} nbi_join_ranks_args;

/* out[i] = x[rows[i]]. */
typedef struct nbi_gather_args {
    void *out;           /* act [n, width] */
    const void *x;       /* act [T, width] */
    const int32_t *rows; /* [n] */
    uint32_t n, width;
} nbi_gather_args;

/* x += y over [n] values. */
typedef struct nbi_add_args {
    void *x;
    const void *y;
    size_t n;
    bool once; /* nobody else reads y, which the linear layer before made: it may be left unwritten
                */
} nbi_add_args;

/* Chooses a token per row. Before choosing, in this order: `adjust` (repetition, then bias),
 * `banned`, `mask`. temperature < 1e-6: the largest logit, ties to the lower id. Otherwise logits /
 * temperature, then top_k, top_p, min_p in this order over the sorted distribution, then one draw
 * with u = philox4x32-10(seed, counter) in [0, 1) walked down the sorted candidates. Ids >= n_valid
 * (padding rows of the head) are never chosen. Log-probabilities are of the untouched logits. */

#define NBI_GREEDY_BELOW 1e-6f

/* One token whose logit is changed. */
typedef struct nbi_sample_adjust {
    int32_t id;
    float
        repetition; /* a positive logit is divided by it, a negative one multiplied; 1: unchanged */
    float bias;     /* added then */
    float untouched; /* the sampler's own: the logit before */
} nbi_sample_adjust;

typedef struct nbi_sample_row {
    float temperature, top_p, min_p;
    int32_t top_k; /* <= 0: off */
    uint64_t seed, counter;
    int32_t n_logprobs;        /* -1: none, else top count */
    const int32_t *wanted;     /* [n_wanted] with n_logprobs >= 0: ids below vocab whose
                                  log-probabilities go to the place of the top ones; host, or NULL */
    uint32_t n_wanted;         /* at most NBI_SAMPLE_TOP_MAX */
    nbi_sample_adjust *adjust; /* [n_adjust], distinct ids; host memory, or NULL */
    uint32_t n_adjust;
    const uint32_t *mask; /* host bits [ceil(vocab / 32)], 1: may be chosen; NULL: all may */
    bool forced; /* report forced_id as if chosen (log-probabilities of a given token); nothing is
                    drawn */
    int32_t forced_id;
    const int32_t
        *banned; /* [n_banned] ids not to choose (EOS before min_tokens), or NULL; host memory */
    uint32_t n_banned;
} nbi_sample_row;

#define NBI_SAMPLE_TOP_MAX 20

typedef struct nbi_sample_out {
    int32_t id;
    float logprob; /* of id; only with n_logprobs >= 0 */
    int32_t top_ids[NBI_SAMPLE_TOP_MAX];
    float top_logprobs[NBI_SAMPLE_TOP_MAX]; /* descending; of wanted ids in their order */
} nbi_sample_out;

typedef struct nbi_sample_args {
    nbi_sample_out *out;        /* host [R]; written by the next `sync` at the latest */
    float *logits;              /* [R, V] float32, may be overwritten */
    const nbi_sample_row *rows; /* host [R] */
    uint32_t n_rows, vocab, n_valid;
    int32_t *row_fault; /* host [R] guard per logit row, or NULL; written as `out` */
    void *workspace;
} nbi_sample_args;

/* What scratch must be able to hold. */
typedef struct nbi_limits {
    uint32_t max_rows, max_seqs, max_context, max_logit_rows;
    uint32_t n_heads, n_kv_heads, head_dim, kv_lora, rope_dim, nope_dim, v_dim;
    uint32_t index_heads, index_dim, index_topk;
    uint32_t max_linear_cols, max_linear_rows; /* largest matrix sides */
    bool mla_expanded;                         /* batches may have `expanded` */
    uint32_t vocab;
} nbi_limits;

/* ---------------------------------------------------------------- the table */

#define NBI_DEVICE_RANKS_MAX 256u

/* The ranks of a job, as a device needs them that exchanges by itself: calls of comm/comm.h, of
 * host memory, with their contracts. */
typedef struct nbi_rank_link {
    void *user;
    uint32_t rank, size, host; /* host: what tells it from others */
    bool one_host;             /* all of them are on this one */
    nb_status (*sum)(void *user, float *x, size_t n, nb_error *err);
    nb_status (*gather)(void *user, void *out, const void *in, size_t bytes, nb_error *err);
    nb_status (*agree)(void *user, nb_status status, const nb_error *own, nb_error *err);
    nb_status (*lost)(void *user, nb_error *err); /* any thread, cheap */
} nbi_rank_link;

typedef struct nbi_backend_options {
    nbi_cpu_level cpu_level;
    uint32_t local_rank;       /* GPU: which of those that are visible, counted in ranks; */
    uint32_t ranks_per_device; /* so many ranks to each (0: 1) */
    const char *exchange;      /* GPU: how sums go over ranks; NULL: "auto" */
    bool apart_sums;           /* GPU: nothing else is under way beside a sum over ranks */
    uint32_t n_threads;        /* 0: all cores */
    bool w4a4;                 /* NVFP4 activations for NVFP4 weights that have an input scale */
    bool disable_graphs;       /* GPU: launch every operator of every step by itself */
} nbi_backend_options;

/* Times on the device's own clock, for timing.h: marks are places in the stream of operators. */
typedef struct nbi_backend_clock {
    /* Makes marks 0 to n_marks - 1, once; they live as long as the backend. */
    nb_status (*open)(nbi_backend *b, uint32_t n_marks, nb_error *err);
    /* Between steps. On: every operator of a step is called, though the step may be a recorded one.
     */
    void (*on)(nbi_backend *b, bool on);
    /* Is a timed step launched as one that is not? Otherwise it takes longer. */
    bool (*light)(const nbi_backend *b);
    void (*mark)(nbi_backend *b, uint32_t i);
    /* Launches so far. *waits: operators were called whose work a later call launches. */
    uint64_t (*launches)(const nbi_backend *b, bool *waits);
    /* Nanoseconds between two marks that were set; everything asked for is done. */
    uint64_t (*ns)(nbi_backend *b, uint32_t from, uint32_t to);
} nbi_backend_clock;

typedef struct nbi_backend_ops {
    uint32_t version, size; /* 1, sizeof(nbi_backend_ops) */
    const char *name;       /* "cpu" */
    bool mla_expanded;      /* mla_attend knows the expanded form */
    bool asynchronous;      /* calls return before the device has done them */

    nb_status (*open)(nbi_backend **out, const nbi_backend_options *opt, nb_error *err);
    void (*close)(nbi_backend **b);

    /* Device memory, zeroed, 64-byte aligned (aligned to 2 MB when large). NULL when there is none.
     */
    void *(*alloc)(nbi_backend *b, size_t bytes);
    /* Makes part of such memory (whole pages) certain to be there when it is used, without changing
     * what it holds; beside its use, from any thread. False when it cannot. NULL: alloc does it. */
    bool (*commit)(nbi_backend *b, void *p, size_t bytes);
    void (*release)(nbi_backend *b, void *p, size_t bytes);
    void (*upload)(nbi_backend *b, void *dst, const void *src, size_t bytes);
    void (*download)(nbi_backend *b, void *dst, const void *src, size_t bytes);
    /* Within such memory, between steps; seen by the next one. */
    void (*copy)(nbi_backend *b, void *dst, const void *src, size_t bytes);

    /* Collective, once, before weights are prepared: takes what sum_ranks and join_ranks need, and
     * proves that it works. The link is copied; what it points to outlives the backend. NULL as
     * they are. */
    nb_status (*join)(nbi_backend *b, const nbi_rank_link *link, nb_error *err);

    /* Makes a matrix usable by `linear`. Keeps the mapped form where it can. */
    nb_status (*weight_prepare)(nbi_backend *b, nbi_weight **out, const nbi_matrix *m,
                                nb_error *err);
    void (*weight_release)(nbi_backend *b, nbi_weight **w);

    /* Scratch bytes the backend will use for any call within `limits`; allocated by the backend
     * itself, once, in `reserve`. */
    size_t (*workspace_bytes)(const nbi_backend *b, const nbi_limits *limits);
    nb_status (*reserve)(nbi_backend *b, const nbi_limits *limits, nb_error *err);

    /* A step: step_begin, operators, step_end. *device is the batch for operators, valid until
     * step_end. `pass` tells different lists of calls apart (0 forward, drafts from 1): a backend
     * may record the calls of a step and repeat them for a batch of the same counts. False: it
     * will, and the caller goes to step_end without calling operators. */
    bool (*step_begin)(nbi_backend *b, const nbi_batch *host, uint32_t pass,
                       const nbi_batch **device);
    /* All of the step has been asked for; `sync` writes row_fault of the host batch, which has to
     * stay until then. */
    nb_status (*step_end)(nbi_backend *b, nb_error *err);

    void (*embed)(nbi_backend *b, const nbi_embed_args *a);
    void (*rope_table)(nbi_backend *b, const nbi_rope_table_args *a);
    void (*rmsnorm)(nbi_backend *b, const nbi_rmsnorm_args *a);
    void (*linear)(nbi_backend *b, const nbi_linear_args *a);
    void (*swiglu)(nbi_backend *b, const nbi_swiglu_args *a);
    void (*mla_append)(nbi_backend *b, const nbi_mla_append_args *a);
    void (*mla_attend)(nbi_backend *b, const nbi_mla_attend_args *a);
    void (*gqa_append)(nbi_backend *b, const nbi_gqa_append_args *a);
    void (*gqa_attend)(nbi_backend *b, const nbi_gqa_attend_args *a);
    void (*index_append)(nbi_backend *b, const nbi_index_append_args *a);
    void (*index_select)(nbi_backend *b, const nbi_index_select_args *a);
    void (*index_reuse)(nbi_backend *b, const nbi_index_reuse_args *a);
    void (*route)(nbi_backend *b, const nbi_route_args *a);
    void (*share_experts)(nbi_backend *b, const nbi_share_experts_args *a);
    void (*own_experts)(nbi_backend *b, const nbi_own_experts_args *a);
    void (*clear)(nbi_backend *b, const nbi_clear_args *a);
    void (*gather)(nbi_backend *b, const nbi_gather_args *a);
    void (*add)(nbi_backend *b, const nbi_add_args *a);
    /* With ranks. A device of its own (join) does these in its own stream, and what goes wrong is
     * said by `sync`; NULL on a device whose memory is the host's: the model calls comm/comm.h. */
    void (*sum_ranks)(nbi_backend *b, const nbi_sum_ranks_args *a);
    void (*join_ranks)(nbi_backend *b, const nbi_join_ranks_args *a);
    void (*sample)(nbi_backend *b, const nbi_sample_args *a);
    /* Everything asked for is done and visible to the host, what `sample` was to write and
     * row_fault with it. */
    nb_status (*sync)(nbi_backend *b, nb_error *err);
    /* Bytes per second of plain reads over that memory of the device, several times the size of its
     * caches. NULL: memory is the host's. */
    double (*read_bandwidth)(nbi_backend *b, void *memory, size_t bytes);
    const nbi_backend_clock *clock; /* NULL: an operator has ended when its call returns */
} nbi_backend_ops;

/* First member of every backend. */
struct nbi_backend {
    const nbi_backend_ops *ops;
    struct nbi_timing *timing;                 /* while a step is timed (timing.h) */
    uint64_t passes_recorded, passes_launched; /* by step_begin, where passes can be recorded */
    nbi_dtype act_dtype;
    bool w4a4;             /* NVFP4 activations, as the options asked */
    uint64_t memory_bytes; /* of the device, free when it was opened; 0: it is the host's */
    uint32_t sm;           /* GPU: compute capability, 90 for 9.0; else 0 */
    bool expands_fast;     /* the expanded form of long prompts (mla_expanded) beats the absorbed */
    char description[64];  /* "cpu (amx, 2 threads)" */
    char driver[96]; /* what else its times depend on: a GPU's driver, a CPU's model; may be "" */
};

/* Backend by name: "cpu"; "auto" takes the best that works here. NB_UNSUPPORTED with the reason. */
nb_status nbi_backend_open(nbi_backend **out, const char *name, const nbi_backend_options *opt,
                           nb_error *err);
void nbi_backend_close(nbi_backend **b);

#ifdef __cplusplus
}
#endif
