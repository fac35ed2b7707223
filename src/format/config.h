/* config.json and generation_config.json of the families nibble runs, in one struct.
 *
 * Every spelling of the same fact is folded here (rope_theta, rope_parameters, rope_scaling;
 * n_routed_experts, num_experts; first_k_dense_replace, mlp_layer_types, mlp_only_layers;
 * index_topk_freq/offset/pattern, indexer_types); nothing above reads JSON again. Facts:
 * docs/models.md. A field that is wrong is refused with file, key, found and expected. Unknown
 * `model_type`s are refused by name. */
#pragma once

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

/* enum suffix, model_type */
#define NBI_FAMILY_LIST(X)            \
    X(GLM_MOE_DSA, "glm_moe_dsa")     \
    X(GLM4_MOE_LITE, "glm4_moe_lite") \
    X(GLM4_MOE, "glm4_moe")           \
    X(DEEPSEEK_V3, "deepseek_v3")     \
    X(DEEPSEEK_V32, "deepseek_v32")   \
    X(QWEN3_MOE, "qwen3_moe")

typedef enum nbi_family {
#define X(suffix, name) NBI_FAMILY_##suffix,
    NBI_FAMILY_LIST(X)
#undef X
        NBI_FAMILY_COUNT
} nbi_family;

const char *nbi_family_name(nbi_family family);

typedef enum nbi_attention { NBI_ATTENTION_MLA, NBI_ATTENTION_GQA } nbi_attention;
typedef enum nbi_scoring { NBI_SCORING_SIGMOID, NBI_SCORING_SOFTMAX } nbi_scoring;

#define NBI_EOS_MAX 16

typedef struct nbi_rope_config {
    double theta;
    uint32_t dim;     /* rotated values per head, even */
    bool interleaved; /* pairs (2i, 2i+1); otherwise half-split (i, i + dim/2) */
    bool yarn;        /* YaRN (arXiv 2309.00071) with the fields below */
    double factor, beta_fast, beta_slow, mscale, mscale_all_dim;
    double attention_factor; /* multiplies cos and sin; 1 without YaRN, computed as transformers
                                does when the file gives none */
    uint32_t original_max_positions;
    bool truncate; /* YaRN correction range rounded to whole dimensions (default true) */
} nbi_rope_config;

typedef struct nbi_config {
    nbi_family family;
    nbi_attention attention;
    uint32_t n_layers;     /* main stack, without MTP */
    uint32_t n_mtp_layers; /* stored behind the main stack */
    uint32_t hidden, vocab;
    uint32_t n_heads, n_kv_heads;
    uint32_t head_dim;                           /* GQA only */
    uint32_t q_lora;                             /* MLA; 0: q_proj without a low-rank step */
    uint32_t kv_lora, nope_dim, rope_dim, v_dim; /* MLA */
    float softmax_scale;  /* includes YaRN's m^2 where the family multiplies it in */
    bool attention_bias;  /* GQA: q, k, v have biases. MLA: q_a, kv_a, o have biases */
    bool qk_norm;         /* GQA: RMSNorm per head on q and k */
    nbi_rope_config rope; /* MLA rope or GQA rope */
    bool has_indexer;
    uint32_t index_heads, index_dim, index_topk;
    bool index_interleaved; /* indexer rope: GLM true, DeepSeek-V3.2 false */
    bool index_share_mtp;
    float norm_eps;        /* all RMSNorms but the latent ones */
    float latent_norm_eps; /* q_a_layernorm, kv_a_layernorm: 1e-6, as transformers builds them */
    float index_norm_eps;  /* LayerNorm of the indexer key: 1e-6 */
    uint32_t intermediate; /* dense MLP */
    uint32_t moe_intermediate, n_experts, top_k, n_shared;
    uint32_t n_group, topk_group;
    nbi_scoring scoring;
    bool router_bias; /* e_score_correction_bias, for choosing only */
    bool norm_topk;
    float routed_scale;
    bool tied_head;
    uint32_t max_positions;
    uint8_t *layer_sparse;       /* [n_layers + n_mtp_layers] 1: MoE, 0: dense MLP */
    uint8_t *layer_full_indexer; /* [n_layers + n_mtp_layers] 1: own indexer, 0: reuses the
                                    preceding list; NULL without indexer */
    int32_t eos[NBI_EOS_MAX];    /* generation_config.json if it names any, else config.json */
    uint32_t n_eos;
    /* generation defaults; absent in the files: temperature 1, top_p 1, top_k -1, min_p 0 */
    float gen_temperature, gen_top_p, gen_min_p;
    int32_t gen_top_k;
} nbi_config;

/* Reads dir/config.json and, when present, dir/generation_config.json. */
nb_status nbi_config_load(nbi_config *out, const char *dir, nb_error *err);
/* From memory (fuzzed, and for synthetic shapes); generation may be NULL. */
nb_status nbi_config_parse(nbi_config *out, const json_t *config, const json_t *generation,
                           const char *name, nb_error *err);
void nbi_config_free(nbi_config *config);

#ifdef __cplusplus
}
#endif
