/* config.json and generation_config.json to nbi_config.
 *
 * Called by the model opener, inspect, synth and quantize. Defaults of absent keys are those of the
 * family's class in transformers; what has no safe default (sizes, the rotary base) is required.
 * The pieces: rope in config_rope.c, per-layer schedules in config_layers.c. */
#include "format/config.h"

#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "format/config_parts.h"

#define FILE_BYTES_MAX ((size_t)16 << 20)
#define WIDTH_MAX      (1u << 20) /* hidden, intermediate, ranks */

const char *nbi_family_name(nbi_family family)
{
    static const char *const names[] = {
#define X(suffix, name) name,
        NBI_FAMILY_LIST(X)
#undef X
    };
    return family < NBI_FAMILY_COUNT ? names[family] : "unknown";
}

/* Class defaults of transformers for keys that files leave out. */
static const struct family_defaults {
    nbi_attention attention;
    float norm_eps;
    uint32_t n_shared, n_group, topk_group;
    float routed_scale;
    bool norm_topk, has_indexer, index_interleaved, qk_norm;
    nbi_scoring scoring;
    uint32_t index_heads;
} defaults[NBI_FAMILY_COUNT] = {
    [NBI_FAMILY_GLM_MOE_DSA] = {NBI_ATTENTION_MLA, 1e-5f, 1, 1, 1, 2.5f, true, true, true, false,
                                NBI_SCORING_SIGMOID, 32},
    [NBI_FAMILY_GLM4_MOE_LITE] = {NBI_ATTENTION_MLA, 1e-5f, 1, 1, 1, 1.8f, true, false, false,
                                  false, NBI_SCORING_SIGMOID, 0},
    [NBI_FAMILY_GLM4_MOE] = {NBI_ATTENTION_GQA, 1e-5f, 1, 1, 1, 1.0f, true, false, false, false,
                             NBI_SCORING_SIGMOID, 0},
    [NBI_FAMILY_DEEPSEEK_V3] = {NBI_ATTENTION_MLA, 1e-6f, 1, 8, 4, 2.5f, true, false, false, false,
                                NBI_SCORING_SIGMOID, 0},
    [NBI_FAMILY_DEEPSEEK_V32] = {NBI_ATTENTION_MLA, 1e-6f, 1, 8, 4, 2.5f, true, true, false, false,
                                 NBI_SCORING_SIGMOID, 64},
    [NBI_FAMILY_QWEN3_MOE] = {NBI_ATTENTION_GQA, 1e-6f, 0, 1, 1, 1.0f, false, false, false, true,
                              NBI_SCORING_SOFTMAX, 0},
};

/* ---- fields */

static const json_t *member(const nbi_config_source *s, const char *key)
{
    const json_t *v = json_object_get(s->o, key);
    return v && !json_is_null(v) ? v : NULL;
}

nb_status nbi_config_count(uint32_t *out, const nbi_config_source *s, const char *key,
                           uint32_t fallback, uint32_t max)
{
    uint32_t v = fallback;
    NB_TRY(nbi_json_u32(&v, s->o, key, s->name, s->err));
    if (v > max)
        return nbi_fail(s->err, NB_INVALID, "%s: %s is %u, at most %u is supported", s->name, key,
                        v, max);
    *out = v;
    return NB_OK;
}

nb_status nbi_config_size(uint32_t *out, const nbi_config_source *s, const char *key, uint32_t max)
{
    uint32_t v = 0;
    if (!member(s, key)) return nbi_fail(s->err, NB_INVALID, "%s: %s is missing", s->name, key);
    NB_TRY(nbi_config_count(&v, s, key, 0, max));
    if (v == 0) return nbi_fail(s->err, NB_INVALID, "%s: %s is 0", s->name, key);
    *out = v;
    return NB_OK;
}

/* Optional finite number in [low, high]. */
static nb_status real(float *out, const nbi_config_source *s, const char *key, float fallback,
                      double low, double high)
{
    double v = (double)fallback;
    NB_TRY(nbi_json_f64(&v, s->o, key, s->name, s->err));
    if (!(v >= low && v <= high))
        return nbi_fail(s->err, NB_INVALID, "%s: %s is %g, expected %g to %g", s->name, key, v, low,
                        high);
    *out = (float)v;
    return NB_OK;
}

/* Optional string that must be `expected` when it is there. */
static nb_status expect(const nbi_config_source *s, const char *key, const char *expected)
{
    const char *v = NULL;
    NB_TRY(nbi_json_str(&v, s->o, key, s->name, s->err));
    if (v && strcmp(v, expected))
        return nbi_fail(s->err, NB_UNSUPPORTED,
                        "%s: %s is \"%.60s\", only \"%s\" is supported for this model_type",
                        s->name, key, v, expected);
    return NB_OK;
}

static nb_status expect_false(const nbi_config_source *s, const char *key)
{
    bool v = false;
    NB_TRY(nbi_json_bool(&v, s->o, key, s->name, s->err));
    return v ? nbi_fail(s->err, NB_UNSUPPORTED, "%s: %s is true, which is not supported", s->name,
                        key)
             : NB_OK;
}

/* ---- groups of fields */

static nb_status read_family(nbi_config *c, const nbi_config_source *s)
{
    const char *type = NULL;
    NB_TRY(nbi_json_str(&type, s->o, "model_type", s->name, s->err));
    if (!type) return nbi_fail(s->err, NB_INVALID, "%s: model_type is missing", s->name);
    for (int f = 0; f < NBI_FAMILY_COUNT; f++)
        if (!strcmp(type, nbi_family_name((nbi_family)f))) {
            c->family = (nbi_family)f;
            return NB_OK;
        }
    return nbi_fail(s->err, NB_UNSUPPORTED,
                    "%s: model_type \"%.60s\" is not supported%s; supported: glm_moe_dsa, "
                    "glm4_moe_lite, glm4_moe, "
                    "deepseek_v3, deepseek_v32, qwen3_moe",
                    s->name, type,
                    strncmp(type, "glm5_next", 9)
                        ? ""
                        : " (GLM-5.3-Flash is another architecture than GLM-5.3: linear attention, "
                          "hyper-connections)");
}

static nb_status read_sizes(nbi_config *c, const nbi_config_source *s)
{
    NB_TRY(nbi_config_size(&c->n_layers, s, "num_hidden_layers", 1024));
    NB_TRY(nbi_config_size(&c->hidden, s, "hidden_size", WIDTH_MAX));
    NB_TRY(nbi_config_size(&c->vocab, s, "vocab_size", 1u << 24));
    NB_TRY(nbi_config_size(&c->n_heads, s, "num_attention_heads", 4096));
    NB_TRY(nbi_config_size(&c->max_positions, s, "max_position_embeddings", 1u << 30));
    /* Both spellings are in use; transformers maps one to the other. */
    NB_TRY(nbi_config_count(&c->n_mtp_layers, s, "num_mtp_layers", 0, 16));
    NB_TRY(nbi_config_count(&c->n_mtp_layers, s, "num_nextn_predict_layers", c->n_mtp_layers, 16));
    NB_TRY(real(&c->norm_eps, s, "rms_norm_eps", defaults[c->family].norm_eps, 1e-12, 1.0));
    c->latent_norm_eps = c->index_norm_eps = 1e-6f;
    NB_TRY(nbi_json_bool(&c->tied_head, s->o, "tie_word_embeddings", s->name, s->err));
    NB_TRY(nbi_json_bool(&c->attention_bias, s->o, "attention_bias", s->name, s->err));
    NB_TRY(expect(s, "hidden_act", "silu"));
    NB_TRY(expect_false(s, "mlp_bias"));
    return expect_false(s, "use_sliding_window");
}

static nb_status read_mla(nbi_config *c, const nbi_config_source *s)
{
    c->n_kv_heads = c->n_heads;
    NB_TRY(nbi_config_size(&c->kv_lora, s, "kv_lora_rank", WIDTH_MAX));
    NB_TRY(nbi_config_size(&c->nope_dim, s, "qk_nope_head_dim", 4096));
    NB_TRY(nbi_config_size(&c->rope_dim, s, "qk_rope_head_dim", 4096));
    NB_TRY(nbi_config_size(&c->v_dim, s, "v_head_dim", 4096));
    const json_t *q_lora = json_object_get(s->o, "q_lora_rank");
    if (json_is_null(q_lora))
        c->q_lora = 0;
    else
        NB_TRY(nbi_config_size(&c->q_lora, s, "q_lora_rank", WIDTH_MAX));
    c->has_indexer = defaults[c->family].has_indexer;
    if (!c->has_indexer) return NB_OK;
    if (!c->q_lora)
        return nbi_fail(s->err, NB_UNSUPPORTED,
                        "%s: q_lora_rank is null, the indexer needs the query latent", s->name);
    /* The *_interleave keys are not read: transformers rotates GLM's indexer in adjacent pairs and
     * DeepSeek's in halves whatever they say. */
    c->index_interleaved = defaults[c->family].index_interleaved;
    NB_TRY(nbi_config_count(&c->index_heads, s, "index_n_heads", defaults[c->family].index_heads,
                            1024));
    NB_TRY(nbi_config_count(&c->index_dim, s, "index_head_dim", 128, 4096));
    NB_TRY(nbi_config_count(&c->index_topk, s, "index_topk", 2048, 1u << 30));
    NB_TRY(
        nbi_json_bool(&c->index_share_mtp, s->o, "index_share_for_mtp_iteration", s->name, s->err));
    if (!c->index_heads || !c->index_topk || c->index_dim < c->rope_dim)
        return nbi_fail(s->err, NB_INVALID,
                        "%s: index_n_heads %u, index_topk %u, index_head_dim %u: expected positive "
                        "numbers and a head "
                        "of at least qk_rope_head_dim %u",
                        s->name, c->index_heads, c->index_topk, c->index_dim, c->rope_dim);
    return NB_OK;
}

static nb_status read_gqa(nbi_config *c, const nbi_config_source *s)
{
    NB_TRY(nbi_config_count(&c->n_kv_heads, s, "num_key_value_heads", c->n_heads, c->n_heads));
    NB_TRY(nbi_config_count(&c->head_dim, s, "head_dim", c->hidden / c->n_heads, 4096));
    if (!c->n_kv_heads || c->n_heads % c->n_kv_heads)
        return nbi_fail(s->err, NB_INVALID,
                        "%s: num_key_value_heads %u does not divide num_attention_heads %u",
                        s->name, c->n_kv_heads, c->n_heads);
    if (!c->head_dim) return nbi_fail(s->err, NB_INVALID, "%s: head_dim is 0", s->name);
    c->qk_norm = defaults[c->family].qk_norm;
    if (c->family == NBI_FAMILY_GLM4_MOE)
        NB_TRY(nbi_json_bool(&c->qk_norm, s->o, "use_qk_norm", s->name, s->err));
    return NB_OK;
}

/* n_routed_experts, num_experts and num_local_experts are one number; files carry one to three of
 * them. */
static nb_status read_n_experts(nbi_config *c, const nbi_config_source *s)
{
    static const char *const keys[] = {"n_routed_experts", "num_experts", "num_local_experts"};
    const char *seen = NULL;
    for (int i = 0; i < 3; i++) {
        uint32_t v;
        if (!member(s, keys[i])) continue;
        NB_TRY(nbi_config_count(&v, s, keys[i], 0, 65535));
        if (seen && v != c->n_experts)
            return nbi_fail(s->err, NB_INVALID, "%s: %s is %u and %s is %u", s->name, seen,
                            c->n_experts, keys[i], v);
        seen = keys[i];
        c->n_experts = v;
    }
    return seen ? NB_OK
                : nbi_fail(s->err, NB_INVALID, "%s: n_routed_experts (or num_experts) is missing",
                           s->name);
}

static nb_status read_routing(nbi_config *c, const nbi_config_source *s)
{
    const struct family_defaults *d = &defaults[c->family];
    c->scoring = d->scoring;
    c->router_bias = d->scoring == NBI_SCORING_SIGMOID;
    c->norm_topk = d->norm_topk;
    c->routed_scale = d->routed_scale;
    c->n_group = c->topk_group = 1;
    NB_TRY(nbi_json_bool(&c->norm_topk, s->o, "norm_topk_prob", s->name, s->err));
    /* Absent in GLM-4.7-Flash and in files saved by transformers: the class knows. */
    NB_TRY(expect(s, "scoring_func", d->scoring == NBI_SCORING_SIGMOID ? "sigmoid" : "softmax"));
    if (c->router_bias) {
        NB_TRY(expect(s, "topk_method", "noaux_tc"));
        NB_TRY(real(&c->routed_scale, s, "routed_scaling_factor", d->routed_scale, 1e-6, 1e6));
        NB_TRY(nbi_config_count(&c->n_group, s, "n_group", d->n_group, 65535));
        NB_TRY(nbi_config_count(&c->topk_group, s, "topk_group", d->topk_group, 65535));
    }
    uint32_t g = c->n_group, per = g ? c->n_experts / g : 0;
    if (!g || c->n_experts % g || !c->topk_group || c->topk_group > g || (g > 1 && per < 2))
        return nbi_fail(s->err, NB_INVALID,
                        "%s: n_group %u and topk_group %u do not fit %u experts", s->name, g,
                        c->topk_group, c->n_experts);
    if (c->top_k == 0 || c->top_k > c->topk_group * per)
        return nbi_fail(s->err, NB_INVALID,
                        "%s: num_experts_per_tok is %u, %u experts can be chosen", s->name,
                        c->top_k, c->topk_group * per);
    return NB_OK;
}

static nb_status read_mlp(nbi_config *c, const nbi_config_source *s)
{
    NB_TRY(read_n_experts(c, s));
    NB_TRY(nbi_config_layers(c, s));
    bool dense = false, sparse = c->n_mtp_layers > 0 && c->n_experts > 0;
    for (uint32_t i = 0; i < c->n_layers; i++) *(c->layer_sparse[i] ? &sparse : &dense) = true;
    if (dense)
        NB_TRY(nbi_config_size(&c->intermediate, s, "intermediate_size", WIDTH_MAX));
    else
        NB_TRY(nbi_config_count(&c->intermediate, s, "intermediate_size", 0, WIDTH_MAX));
    if (!sparse) {
        c->n_experts = 0;
        c->n_group = c->topk_group = 1;
        c->routed_scale = 1.0f;
        return NB_OK;
    }
    NB_TRY(nbi_config_size(&c->moe_intermediate, s, "moe_intermediate_size", WIDTH_MAX));
    NB_TRY(nbi_config_size(&c->top_k, s, "num_experts_per_tok", 65535));
    if (defaults[c->family].n_shared) {
        const json_t *shared = json_object_get(s->o, "n_shared_experts");
        if (!json_is_null(shared))
            NB_TRY(nbi_config_count(&c->n_shared, s, "n_shared_experts",
                                    defaults[c->family].n_shared, 64));
    }
    return read_routing(c, s);
}

/* transformers: qk_head_dim^-0.5, for MLA times the square of YaRN's m over all dimensions when the
 * file sets mscale_all_dim. */
static void set_softmax_scale(nbi_config *c)
{
    double scale =
        pow((double)(c->attention == NBI_ATTENTION_MLA ? c->nope_dim + c->rope_dim : c->head_dim),
            -0.5);
    const nbi_rope_config *r = &c->rope;
    if (c->attention == NBI_ATTENTION_MLA && r->yarn && r->mscale_all_dim != 0 && r->factor > 1) {
        double m = 0.1 * r->mscale_all_dim * log(r->factor) + 1.0;
        scale *= m * m;
    }
    c->softmax_scale = (float)scale;
}

/* ---- end tokens and generation defaults */

static nb_status add_eos(nbi_config *c, const json_t *v, const char *name, nb_error *err)
{
    json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;
    if (id < 0 || id > INT32_MAX)
        return nbi_fail(err, NB_INVALID, "%s: eos_token_id is not a token id or a list of them",
                        name);
    if (id >= (json_int_t)c->vocab) {
        nbi_log(NB_LOG_WARN,
                "%s: eos_token_id %lld is beyond the vocabulary of %u and cannot occur", name,
                (long long)id, c->vocab);
        return NB_OK;
    }
    for (uint32_t i = 0; i < c->n_eos; i++)
        if (c->eos[i] == (int32_t)id) return NB_OK;
    if (c->n_eos == NBI_EOS_MAX)
        return nbi_fail(err, NB_TOO_LARGE, "%s: more than %d eos_token_id", name, NBI_EOS_MAX);
    c->eos[c->n_eos++] = (int32_t)id;
    return NB_OK;
}

/* An id, a list, or nothing. */
static nb_status read_eos(nbi_config *c, const nbi_config_source *s)
{
    const json_t *v = member(s, "eos_token_id");
    if (!v) return NB_OK;
    if (!json_is_array(v)) return add_eos(c, v, s->name, s->err);
    for (size_t i = 0; i < json_array_size(v); i++)
        NB_TRY(add_eos(c, json_array_get(v, i), s->name, s->err));
    return NB_OK;
}

static nb_status read_generation(nbi_config *c, const nbi_config_source *s)
{
    c->gen_temperature = c->gen_top_p = 1.0f;
    c->gen_top_k = -1;
    if (!s->o) return NB_OK;
    NB_TRY(read_eos(c, s));
    NB_TRY(real(&c->gen_temperature, s, "temperature", 1.0f, 0, 100));
    NB_TRY(real(&c->gen_top_p, s, "top_p", 1.0f, 0, 1));
    NB_TRY(real(&c->gen_min_p, s, "min_p", 0.0f, 0, 1));
    if (c->gen_top_p <= 0) return nbi_fail(s->err, NB_INVALID, "%s: top_p is 0", s->name);
    const json_t *k = member(s, "top_k");
    if (!k) return NB_OK;
    if (!json_is_integer(k) || json_integer_value(k) < -1 || json_integer_value(k) > INT32_MAX)
        return nbi_fail(s->err, NB_INVALID, "%s: top_k is not a whole number from -1", s->name);
    c->gen_top_k = json_integer_value(k) > 0 ? (int32_t)json_integer_value(k) : -1;
    return NB_OK;
}

/* ---- entry points */

static nb_status parse(nbi_config *c, const nbi_config_source *s,
                       const nbi_config_source *generation)
{
    NB_TRY(read_family(c, s));
    c->attention = defaults[c->family].attention;
    NB_TRY(read_sizes(c, s));
    NB_TRY(c->attention == NBI_ATTENTION_MLA ? read_mla(c, s) : read_gqa(c, s));
    NB_TRY(nbi_config_rope(c, s));
    set_softmax_scale(c);
    NB_TRY(read_mlp(c, s));
    NB_TRY(read_generation(c, generation));
    return c->n_eos ? NB_OK : read_eos(c, s);
}

nb_status nbi_config_parse(nbi_config *out, const json_t *config, const json_t *generation,
                           const char *name, nb_error *err)
{
    if (!json_is_object(config)) return nbi_fail(err, NB_INVALID, "%s: not an object", name);
    if (generation && !json_is_object(generation))
        return nbi_fail(err, NB_INVALID, "%s: generation_config.json is not an object", name);
    nbi_config c = {0};
    nbi_config_source s = {config, name, err},
                      g = {generation, generation ? "generation_config.json" : name, err};
    nb_status st = parse(&c, &s, &g);
    if (st == NB_OK)
        *out = c;
    else
        nbi_config_free(&c);
    return st;
}

nb_status nbi_config_load(nbi_config *out, const char *dir, nb_error *err)
{
    char *path = nbi_path_join(dir, "config.json"),
         *gen_path = nbi_path_join(dir, "generation_config.json");
    json_t *config = NULL, *generation = NULL;
    nb_status st =
        path && gen_path ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "out of memory for a path");
    if (st == NB_OK) st = nbi_json_load(&config, path, FILE_BYTES_MAX, err);
    if (st == NB_OK && nbi_file_exists(gen_path))
        st = nbi_json_load(&generation, gen_path, FILE_BYTES_MAX, err);
    if (st == NB_OK) st = nbi_config_parse(out, config, generation, path, err);
    json_decref(config);
    json_decref(generation);
    nbi_free(path);
    nbi_free(gen_path);
    return st;
}

void nbi_config_free(nbi_config *config)
{
    nbi_free(config->layer_sparse);
    nbi_free(config->layer_full_indexer);
    *config = (nbi_config){0};
}
