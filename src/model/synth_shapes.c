/* config.json of the shapes that synth knows, and overrides of it. Facts: docs/models.md (the hub's
 * own configurations). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "model/synth_parts.h"

#define GLM_MOE_DSA                                                                               \
    "\"architectures\":[\"GlmMoeDsaForCausalLM\"],\"model_type\":\"glm_moe_dsa\",\"num_hidden_"   \
    "layers\":78,"                                                                                \
    "\"hidden_size\":6144,\"num_attention_heads\":64,\"num_key_value_heads\":64,\"q_lora_rank\":" \
    "2048,"                                                                                       \
    "\"kv_lora_rank\":512,\"qk_nope_head_dim\":192,\"qk_rope_head_dim\":64,\"qk_head_dim\":256,"  \
    "\"v_head_dim\":256,\"attention_bias\":false,\"index_n_heads\":32,\"index_head_dim\":128,"    \
    "\"index_topk\":2048,\"indexer_rope_interleave\":true,\"rope_interleave\":true,"              \
    "\"first_k_dense_replace\":3,\"moe_layer_freq\":1,\"intermediate_size\":12288,"               \
    "\"moe_intermediate_size\":2048,\"n_routed_experts\":256,\"num_experts_per_tok\":8,"          \
    "\"n_shared_experts\":1,\"n_group\":1,\"topk_group\":1,\"scoring_func\":\"sigmoid\","         \
    "\"topk_method\":\"noaux_tc\",\"norm_topk_prob\":true,\"routed_scaling_factor\":2.5,"         \
    "\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-05,\"vocab_size\":154880,\"tie_word_"            \
    "embeddings\":false,"                                                                         \
    "\"eos_token_id\":[154820,154827,154829],\"pad_token_id\":154820,\"num_nextn_predict_"        \
    "layers\":1,"                                                                                 \
    "\"dtype\":\"bfloat16\","

static const struct shape {
    const char *name, *json;
} shapes[] = {
    {"glm-5", "{" GLM_MOE_DSA "\"head_dim\":64,\"max_position_embeddings\":202752,"
              "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1000000}}"},
    {"glm-5.2",
     "{" GLM_MOE_DSA "\"head_dim\":192,\"max_position_embeddings\":1048576,\"index_topk_freq\":4,"
     "\"index_skip_topk_offset\":3,\"index_share_for_mtp_iteration\":true,"
     "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":8000000}}"},
    {"glm-4.7-flash",
     "{\"architectures\":[\"Glm4MoeLiteForCausalLM\"],\"model_type\":\"glm4_moe_lite\",\"num_"
     "hidden_layers\":47,"
     "\"hidden_size\":2048,\"num_attention_heads\":20,\"num_key_value_heads\":20,\"q_lora_rank\":"
     "768,"
     "\"kv_lora_rank\":512,\"qk_nope_head_dim\":192,\"qk_rope_head_dim\":64,\"v_head_dim\":256,"
     "\"attention_bias\":false,\"rope_theta\":1000000,\"partial_rotary_factor\":1.0,"
     "\"first_k_dense_replace\":1,\"intermediate_size\":10240,\"moe_intermediate_size\":1536,"
     "\"n_routed_experts\":64,\"num_experts_per_tok\":4,\"n_shared_experts\":1,\"n_group\":1,"
     "\"topk_group\":1,"
     "\"topk_method\":\"noaux_tc\",\"norm_topk_prob\":true,\"routed_scaling_factor\":1.8,\"hidden_"
     "act\":\"silu\","
     "\"rms_norm_eps\":1e-05,\"vocab_size\":154880,\"tie_word_embeddings\":false,"
     "\"max_position_embeddings\":202752,\"eos_token_id\":[154820,154827,154829],\"pad_token_id\":"
     "154820,"
     "\"num_nextn_predict_layers\":1,\"dtype\":\"bfloat16\"}"},
    {"glm-4.5-air",
     "{\"architectures\":[\"Glm4MoeForCausalLM\"],\"model_type\":\"glm4_moe\",\"num_hidden_"
     "layers\":46,"
     "\"hidden_size\":4096,\"num_attention_heads\":96,\"num_key_value_heads\":8,\"head_dim\":128,"
     "\"attention_bias\":true,\"use_qk_norm\":false,\"rope_theta\":1000000,\"rope_scaling\":null,"
     "\"partial_rotary_factor\":0.5,\"first_k_dense_replace\":1,\"intermediate_size\":10944,"
     "\"moe_intermediate_size\":1408,\"n_routed_experts\":128,\"num_experts_per_tok\":8,"
     "\"n_shared_experts\":1,\"n_group\":1,\"topk_group\":1,\"norm_topk_prob\":true,"
     "\"routed_scaling_factor\":1.0,\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-05,\"vocab_size\":"
     "151552,"
     "\"tie_word_embeddings\":false,\"max_position_embeddings\":131072,"
     "\"eos_token_id\":[151329,151336,151338],\"pad_token_id\":151329,\"num_nextn_predict_layers\":"
     "1,"
     "\"dtype\":\"bfloat16\"}"},
    {"deepseek-v3.2",
     "{\"architectures\":[\"DeepseekV32ForCausalLM\"],\"model_type\":\"deepseek_v32\",\"num_hidden_"
     "layers\":61,"
     "\"hidden_size\":7168,\"num_attention_heads\":128,\"num_key_value_heads\":128,\"q_lora_rank\":"
     "1536,"
     "\"kv_lora_rank\":512,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"
     "\"attention_bias\":false,\"index_n_heads\":64,\"index_head_dim\":128,\"index_topk\":2048,"
     "\"rope_theta\":10000,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"beta_fast\":32,"
     "\"beta_slow\":1,"
     "\"mscale\":1.0,\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":4096},"
     "\"first_k_dense_replace\":3,\"moe_layer_freq\":1,\"intermediate_size\":18432,"
     "\"moe_intermediate_size\":2048,\"n_routed_experts\":256,\"num_experts_per_tok\":8,"
     "\"n_shared_experts\":1,\"n_group\":8,\"topk_group\":4,\"scoring_func\":\"sigmoid\","
     "\"topk_method\":\"noaux_tc\",\"norm_topk_prob\":true,\"routed_scaling_factor\":2.5,\"hidden_"
     "act\":\"silu\","
     "\"rms_norm_eps\":1e-06,\"vocab_size\":129280,\"tie_word_embeddings\":false,"
     "\"max_position_embeddings\":163840,\"bos_token_id\":0,\"eos_token_id\":1,\"num_nextn_predict_"
     "layers\":1,"
     "\"torch_dtype\":\"bfloat16\"}"},
    {"qwen3-30b-a3b",
     "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\",\"num_hidden_"
     "layers\":48,"
     "\"hidden_size\":2048,\"num_attention_heads\":32,\"num_key_value_heads\":4,\"head_dim\":128,"
     "\"attention_bias\":false,\"rope_theta\":1000000.0,\"rope_scaling\":null,\"decoder_sparse_"
     "step\":1,"
     "\"mlp_only_layers\":[],\"intermediate_size\":6144,\"moe_intermediate_size\":768,\"num_"
     "experts\":128,"
     "\"num_experts_per_tok\":8,\"norm_topk_prob\":true,\"hidden_act\":\"silu\",\"rms_norm_eps\":"
     "1e-06,"
     "\"vocab_size\":151936,\"tie_word_embeddings\":false,\"max_position_embeddings\":40960,"
     "\"use_sliding_window\":false,\"sliding_window\":null,\"bos_token_id\":151643,\"eos_token_"
     "id\":151645,"
     "\"torch_dtype\":\"bfloat16\"}"},
};

const char *nbi_synth_shape_name(size_t i)
{
    return i < sizeof shapes / sizeof *shapes ? shapes[i].name : NULL;
}

const char *nbi_synth_weights_name(nbi_synth_weights weights)
{
    static const char *const names[] = {
#define X(suffix, name, text) name,
        NBI_SYNTH_WEIGHTS_LIST(X)
#undef X
    };
    return weights < NBI_SYNTH_WEIGHTS_COUNT ? names[weights] : "unknown";
}

const char *nbi_synth_weights_text(nbi_synth_weights weights)
{
    static const char *const texts[] = {
#define X(suffix, name, text) text,
        NBI_SYNTH_WEIGHTS_LIST(X)
#undef X
    };
    return weights < NBI_SYNTH_WEIGHTS_COUNT ? texts[weights] : "unknown";
}

nbi_synth_weights nbi_synth_weights_parse(const char *name)
{
    int i = 0;
    while (i < NBI_SYNTH_WEIGHTS_COUNT &&
           strcmp(name, nbi_synth_weights_name((nbi_synth_weights)i)))
        i++;
    return (nbi_synth_weights)i;
}

/* "a.b.c=value": goes into objects, which must exist; the last key may be new. */
static nb_status set_value(json_t *config, const char *text, nb_error *err)
{
    const char *eq = strchr(text, '=');
    if (!eq || eq == text) return nbi_fail(err, NB_INVALID, "--set %s: expected KEY=VALUE", text);
    json_t *value = json_loads(eq + 1, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL), *o = config;
    if (!value) value = json_string(eq + 1);
    if (!value) return nbi_fail(err, NB_INVALID, "--set %s: the value is not UTF-8", text);
    const char *p = text;
    for (const char *dot; o && (dot = memchr(p, '.', (size_t)(eq - p))); p = dot + 1) {
        char key[128];
        snprintf(key, sizeof key, "%.*s", (int)(dot - p), p);
        o = json_object_get(o, key);
    }
    char key[128];
    snprintf(key, sizeof key, "%.*s", (int)(eq - p), p);
    if (!json_is_object(o)) {
        json_decref(value);
        return nbi_fail(err, NB_INVALID, "--set %s: there is no object to hold \"%s\"", text, key);
    }
    if (json_object_set_new(o, key, value))
        return nbi_fail(err, NB_INVALID, "--set %s: cannot be set", text);
    return NB_OK;
}

static nb_status set_integer(json_t *config, const char *key, json_int_t value, nb_error *err)
{
    if (json_object_set_new(config, key, json_integer(value)))
        return nbi_fail(err, NB_NO_MEMORY, "out of memory for the configuration");
    return NB_OK;
}

nb_status nbi_synth_resize(json_t *config, uint32_t n_layers, uint32_t n_experts, nb_error *err)
{
    const char *experts =
        json_object_get(config, "num_experts") ? "num_experts" : "n_routed_experts";
    NB_TRY(set_integer(config, "num_hidden_layers", n_layers, err));
    return set_integer(config, experts, n_experts, err);
}

/* The share of one of n ranks: heads, columns of MLPs and experts, rows of embedding and head are
 * cut; latents, indexer, router and norms are on every rank, and key-value heads where there are
 * fewer than ranks. The vocabulary's last id ends an answer. */
static nb_status cut_for_rank(json_t *config, uint32_t n, nb_error *err)
{
    static const char *const cut[] = {"num_attention_heads", "num_key_value_heads",
                                      "intermediate_size", "moe_intermediate_size", "vocab_size"};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
        const json_int_t whole = json_integer_value(json_object_get(config, cut[i]));
        if (!whole) continue;
        const bool spread = i == 1 && n > whole && n % whole == 0; /* a head on n / whole ranks */
        const bool width = strstr(cut[i], "intermediate") != NULL;
        if (!spread && (whole % n || (width && whole / n % NBI_NVFP4_BLOCK)))
            return nbi_fail(err, NB_INVALID,
                            "--shard-of-tp %u: %s is %lld, which does not give %u equal parts%s", n,
                            cut[i], (long long)whole, n, width ? " in blocks of 16" : "");
        NB_TRY(set_integer(config, cut[i], spread ? 1 : whole / n, err));
    }
    const json_int_t last = json_integer_value(json_object_get(config, "vocab_size")) - 1;
    static const char *const ids[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        if (json_object_get(config, ids[i])) NB_TRY(set_integer(config, ids[i], last, err));
    return NB_OK;
}

nb_status nbi_synth_config(json_t **out, const nbi_synth_options *o, nb_error *err)
{
    size_t i = 0;
    while (nbi_synth_shape_name(i) && strcmp(shapes[i].name, o->like)) i++;
    if (!nbi_synth_shape_name(i))
        return nbi_fail(err, NB_INVALID, "--like %s: no such shape", o->like);
    json_t *config = NULL;
    NB_TRY(nbi_json_parse(&config, shapes[i].json, strlen(shapes[i].json), o->like, err));
    nb_status st = NB_OK;
    for (size_t k = 0; k < o->n_sets && st == NB_OK; k++) st = set_value(config, o->sets[k], err);
    const char *experts =
        json_object_get(config, "num_experts") ? "num_experts" : "n_routed_experts";
    if (st == NB_OK && o->n_layers) st = set_integer(config, "num_hidden_layers", o->n_layers, err);
    if (st == NB_OK && o->n_experts) st = set_integer(config, experts, o->n_experts, err);
    if (st == NB_OK && !o->mtp && json_object_get(config, "num_nextn_predict_layers"))
        st = set_integer(config, "num_nextn_predict_layers", 0, err);
    if (st == NB_OK && o->shard_of_tp > 1) st = cut_for_rank(config, o->shard_of_tp, err);
    if (st == NB_OK)
        *out = config;
    else
        json_decref(config);
    return st;
}

nb_status nbi_synth_shape(nbi_config *out, const char *like, const char *const *sets, size_t n_sets,
                          bool mtp, nb_error *err)
{
    const nbi_synth_options o = {.like = like, .sets = sets, .n_sets = n_sets, .mtp = mtp};
    json_t *config = NULL;
    NB_TRY(nbi_synth_config(&config, &o, err));
    const nb_status st = nbi_config_parse(out, config, NULL, like, err);
    json_decref(config);
    return st;
}

nb_status nbi_synth_describe(json_t *config, json_t **hf_quant, nbi_synth_weights weights,
                             nb_error *err)
{
    static const char *const ignored[NBI_SYNTH_WEIGHTS_COUNT] = {
        [NBI_SYNTH_NVFP4_EXPERTS] = "[\"lm_head\",\"*self_attn*\",\"*shared_experts*\",\"*mlp.gate_"
                                    "proj*\",\"*mlp.up_proj*\","
                                    "\"*mlp.down_proj*\",\"*eh_proj*\"]",
        [NBI_SYNTH_NVFP4_MLP] = "[\"lm_head\",\"*self_attn*\",\"*eh_proj*\"]",
        [NBI_SYNTH_NVFP4_ALL] = "[\"lm_head\",\"*indexer.weights_proj*\",\"*eh_proj*\"]",
    };
    json_t *q = NULL, *hf = NULL;
    if (weights == NBI_SYNTH_FP8) {
        q = json_pack("{s:s, s:s, s:s, s:[i,i]}", "quant_method", "fp8", "fmt", "e4m3",
                      "activation_scheme", "dynamic", "weight_block_size", 128, 128);
    } else if (weights != NBI_SYNTH_BF16) {
        json_t *ignore = json_loads(ignored[weights], 0, NULL);
        q = json_pack("{s:s, s:s, s:{s:s, s:s}, s:i, s:O}", "quant_method", "modelopt",
                      "quant_algo", "NVFP4", "producer", "name", "nibble synth", "version",
                      NB_VERSION, "group_size", 16, "ignore", ignore);
        hf = json_pack("{s:{s:s, s:s}, s:{s:s, s:n, s:i, s:o}}", "producer", "name", "nibble synth",
                       "version", NB_VERSION, "quantization", "quant_algo", "NVFP4",
                       "kv_cache_quant_algo", "group_size", 16, "exclude_modules", ignore);
        if (!hf) {
            json_decref(q);
            q = NULL;
        }
    }
    if (weights != NBI_SYNTH_BF16 &&
        (!q || json_object_set_new(config, "quantization_config", q))) {
        json_decref(hf);
        return nbi_fail(err, NB_NO_MEMORY, "out of memory for the configuration");
    }
    *hf_quant = hf;
    return NB_OK;
}
