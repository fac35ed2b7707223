/* Inside of a model: the layer description that loading fills and forward walks. Private to
 * src/model. */
#pragma once

#include "backend/parts.h"
#include "model/candidates.h"
#include "model/model.h"
#include "model/split.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Multi-head latent attention; with q_lora 0 only q_b is set and it is q_proj. Heads, I and E are
 * those of the rank (split.h). A rank without heads has none of attention's matrices. */
typedef struct nbi_mla_weights {
    nbi_weight *q_a;                            /* [q_lora, H] */
    nbi_weight *q_b;                            /* [heads * (nope + rope), q_lora or H] */
    nbi_weight *kv_a;                           /* [kv_lora + rope, H] */
    nbi_weight *kv_b;                           /* [heads * (nope + v), kv_lora] */
    nbi_weight *o;                              /* [H, heads * v] */
    const float *q_a_norm;                      /* [q_lora] */
    const float *kv_a_norm;                     /* [kv_lora] */
    const float *q_a_bias, *kv_a_bias, *o_bias; /* or NULL; o's on rank 0 */
} nbi_mla_weights;

typedef struct nbi_gqa_weights {
    nbi_weight *q, *k, *v;                          /* [heads * d, H], [kv_heads * d, H] twice */
    nbi_weight *o;                                  /* [H, heads * d] */
    const float *q_bias, *k_bias, *v_bias, *o_bias; /* or NULL; o's on rank 0 */
    const float *q_norm, *k_norm;                   /* [d] or NULL */
} nbi_gqa_weights;

typedef struct nbi_indexer_weights {
    nbi_weight *q;                     /* wq_b [index_heads * index_dim, q_lora] */
    nbi_weight *k;                     /* wk [index_dim, H] */
    nbi_weight *weights;               /* weights_proj [index_heads, H] */
    const float *k_norm, *k_norm_bias; /* [index_dim] */
} nbi_indexer_weights;

typedef struct nbi_mlp_weights {
    nbi_weight *gate, *up; /* [I, H] */
    nbi_weight *down;      /* [H, I] */
    uint32_t inter;        /* I; 0: there is none */
} nbi_mlp_weights;

typedef struct nbi_moe_weights {
    nbi_weight *router;       /* [E, H] */
    const float *router_bias; /* [E] or NULL */
    nbi_moe_experts
        experts; /* canonical views, [E] each, and a shared expert that runs with them */
    nbi_moe_layer *prepared; /* of the runners; NULL: the rank has no part of the experts */
    nbi_mlp_weights shared;  /* one that does not */
} nbi_moe_weights;

typedef struct nbi_layer {
    bool sparse, full_indexer;
    const float *input_norm, *post_norm; /* [H] */
    nbi_mla_weights mla;
    nbi_gqa_weights gqa;
    nbi_indexer_weights indexer;
    nbi_mlp_weights mlp; /* dense layers */
    nbi_moe_weights moe; /* sparse layers */
} nbi_layer;

/* The MTP layer's own tensors; its decoder layer is layers[n_layers]. */
typedef struct nbi_mtp_weights {
    const float *enorm, *hnorm, *head_norm; /* [H] */
    nbi_weight *eh_proj;                    /* [H, 2H]: embedding half first */
} nbi_mtp_weights;

/* Rows whose logits ranks exchange at once. */
#define NBI_LOGIT_ROWS 16u

/* Activations of a step, carved from one block. act unless noted. */
typedef struct nbi_workspace {
    void *block;
    size_t bytes;
    void *x, *xn, *delta, *shared;   /* [T, H] */
    void *x_other;                   /* [few rows, H]: the residual, every second time */
    void *q_a, *q;                   /* [T, q_lora], [T, heads * qk] */
    void *kv;                        /* MLA [T, kv_lora + rope]; GQA: k [T, kv_heads * d] */
    void *v;                         /* GQA [T, kv_heads * d] */
    float *latents;                  /* split latents: [T, q_lora + kv_lora + rope + indexer's] */
    void *attn;                      /* [T, heads * v] */
    void *index_q, *index_k;         /* [T, index_heads * index_dim], [T, index_dim] */
    float *index_w;                  /* [T, index_heads] */
    int32_t *select;                 /* [T, index_topk] */
    int32_t *draft_select;           /* drafting with shared lists: [R, index_topk] */
    void *gate, *up;                 /* [T, widest dense or shared MLP] */
    float *router_logits;            /* [T, E] */
    int32_t *expert_ids;             /* [T, top_k] */
    float *expert_weights;           /* [T, top_k] */
    void *moe;                       /* the runners' */
    void *last;                      /* [R, H] normed rows for the head */
    nbi_share_state *shared_experts; /* with oea_k0 */
    float *logits;                   /* [R, V] */
    float *part;                     /* ranks: [NBI_LOGIT_ROWS, vocab_max] logits of this one, */
    float *parts;                    /* [ranks][NBI_LOGIT_ROWS, vocab_max] and of all */
    nbi_candidate *best;             /* ranks: [R, NBI_CANDIDATES_MAX + 1] of this one, */
    nbi_candidate *all_best;         /* [ranks][R, NBI_CANDIDATES_MAX + 1] and of all */
    float *cos, *sin;                /* [T, rope dim / 2] */
    void *hidden,
        *draft_hidden; /* drafting: [T, H] final states of the last forward and draft pass */
    void *pair;        /* drafting: [T, 2H] normed embedding, normed hidden state */
    uint32_t max_rows, max_logit_rows;
} nbi_workspace;

/* A float vector waiting for its place in device memory. */
typedef struct nbi_vector_slot {
    const float **slot;
    uint32_t n;
} nbi_vector_slot;

struct nbi_model {
    nbi_backend *b; /* borrowed */
    nbi_config config;
    nbi_config local; /* the same with the rank's numbers of heads; borrows from config */
    nbi_comm *comm;   /* borrowed; NULL: one rank */
    nbi_split split;
    nbi_quant quant;
    nbi_checkpoint *ckpt;
    nbi_arena arena;                  /* names, views, layers, host vectors */
    const nbi_moe_runner_ops *runner; /* of moe_table, prepares for all; NULL without experts */
    nbi_moe_table moe_table;          /* runners by rows of a step */
    const nbi_moe_table *table_now;   /* moe_table, or timed_table */
    const char *moe_source;           /* "named", "rule", "tuned" */
    char moe_names[96];
    uint32_t n_layers;       /* main stack */
    uint32_t expanded_block; /* 0: latent attention is absorbed throughout */
    bool has_mtp;            /* the files hold the layer */
    bool can_draft;          /* and it was asked for: cache and workspace have room for it */
    bool draft_listed;       /* the last draft pass behind a forward has left lists in ws.select */
    uint32_t oea_k0;         /* 0: off */
    nbi_layer *layers;       /* [n_layers + has_mtp] */
    nbi_mtp_weights mtp;
    nbi_weight *embed, *head; /* [rank's part of V, H]; the same object when tied */
    const float *final_norm;
    float *inv_freq; /* host [rope.dim / 2] */
    nbi_vector_slot *slots;
    uint32_t n_slots, cap_slots;
    void *vectors; /* device block of all float vectors */
    size_t vector_bytes;
    uint64_t weight_bytes, non_expert_bytes,
        non_expert_macs;      /* of the main stack with head, without embedding */
    uint64_t selecting_bytes; /* of non_expert_bytes: indexers without their key's matrix, which is
                                 read also where there is nothing to choose */
    uint64_t
        expert_bytes_per_layer_sum; /* of one expert, summed over sparse layers of the main stack */
    uint64_t *expert_bytes;         /* [n_layers + has_mtp] of one expert, 0 in dense layers; what
                                       the rank has of all experts, divided by their number */
    uint64_t *shared_bytes;         /* of a shared expert among the others; counted as non-expert */
    uint64_t expert_macs;           /* per token, of the main stack */
    nbi_moe_runner_ops timed_runner; /* what steps call while they are timed (timed_runner.c) */
    nbi_moe_table timed_table;
    nbi_workspace ws;
};

/* inv_freq[i], i < dim / 2, of a rope setting; YaRN as in arXiv 2309.00071 and transformers. */
void nbi_rope_inv_freq(const nbi_rope_config *rope, float *out);

/* weights.c */
nb_status nbi_model_load_weights(nbi_model *m, const nbi_model_options *opt, nb_error *err);
void nbi_model_release_weights(nbi_model *m);

#ifdef __cplusplus
}
#endif
