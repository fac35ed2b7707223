/* The list of modules of each family. Called by synth, inspect and quantize. */
#include "model/modules.h"

#include <stdio.h>
#include <string.h>

#define NAME_BYTES 160

const char *nbi_component_name(nbi_component component)
{
    static const char *const names[] = {
#define X(suffix, name) name,
        NBI_COMPONENT_LIST(X)
#undef X
    };
    return component < NBI_COMPONENT_COUNT ? names[component] : "unknown";
}

typedef struct walk {
    const nbi_config *c;
    bool names;
    nbi_module_fn each;
    void *user;
    nb_error *err;
    uint32_t layer;
    char prefix[48]; /* "model.layers.3." */
} walk;

static nb_status visit(const walk *w, nbi_module m, const char *base, const char *suffix)
{
    char name[NAME_BYTES] = "";
    if (w->names) snprintf(name, sizeof name, "%s%s%s", w->prefix, base, suffix);
    m.name = name;
    m.layer = w->layer;
    return w->each(w->user, &m, w->err);
}

static nb_status linear(const walk *w, nbi_component c, const char *base, const char *suffix,
                        uint64_t rows, uint64_t cols)
{
    return visit(w, (nbi_module){.component = c, .linear = true, .rows = rows, .cols = cols}, base,
                 suffix);
}

static nb_status vector(const walk *w, nbi_component c, const char *base, const char *suffix,
                        uint64_t n)
{
    return visit(w, (nbi_module){.component = c, .rows = n}, base, suffix);
}

static nb_status mlp(const walk *w, nbi_component c, const char *base, uint32_t expert,
                     uint64_t inter)
{
    static const char *const parts[] = {".gate_proj", ".up_proj", ".down_proj"};
    for (uint32_t i = 0; i < 3; i++) {
        nbi_module m = {.component = c, .linear = true, .expert = expert, .part = i};
        m.rows = i == 2 ? w->c->hidden : inter;
        m.cols = i == 2 ? inter : w->c->hidden;
        NB_TRY(visit(w, m, base, parts[i]));
    }
    return NB_OK;
}

static nb_status moe(const walk *w)
{
    const nbi_config *c = w->c;
    NB_TRY(linear(w, NBI_COMPONENT_ROUTER, "mlp.gate", "", c->n_experts, c->hidden));
    if (c->router_bias)
        NB_TRY(vector(w, NBI_COMPONENT_ROUTER_BIAS, "mlp.gate", ".e_score_correction_bias",
                      c->n_experts));
    for (uint32_t e = 0; e < c->n_experts; e++) {
        char base[32] = "";
        if (w->names) snprintf(base, sizeof base, "mlp.experts.%u", e);
        NB_TRY(mlp(w, NBI_COMPONENT_ROUTED, base, e, c->moe_intermediate));
    }
    return c->n_shared ? mlp(w, NBI_COMPONENT_SHARED, "mlp.shared_experts", 0,
                             (uint64_t)c->n_shared * c->moe_intermediate)
                       : NB_OK;
}

static nb_status indexer(const walk *w)
{
    const nbi_config *c = w->c;
    NB_TRY(linear(w, NBI_COMPONENT_INDEXER, "self_attn.indexer.wq_b", "",
                  (uint64_t)c->index_heads * c->index_dim, c->q_lora));
    NB_TRY(linear(w, NBI_COMPONENT_INDEXER, "self_attn.indexer.wk", "", c->index_dim, c->hidden));
    NB_TRY(linear(w, NBI_COMPONENT_INDEXER_HEADS, "self_attn.indexer.weights_proj", "",
                  c->index_heads, c->hidden));
    NB_TRY(vector(w, NBI_COMPONENT_NORM, "self_attn.indexer.k_norm", ".weight", c->index_dim));
    return vector(w, NBI_COMPONENT_BIAS, "self_attn.indexer.k_norm", ".bias", c->index_dim);
}

static nb_status mla(const walk *w, bool full_indexer)
{
    const nbi_config *c = w->c;
    uint64_t q = (uint64_t)c->n_heads * (c->nope_dim + c->rope_dim),
             kv = (uint64_t)c->kv_lora + c->rope_dim;
    if (c->q_lora) {
        NB_TRY(linear(w, NBI_COMPONENT_ATTENTION, "self_attn.q_a_proj", "", c->q_lora, c->hidden));
        if (c->attention_bias)
            NB_TRY(vector(w, NBI_COMPONENT_BIAS, "self_attn.q_a_proj", ".bias", c->q_lora));
        NB_TRY(vector(w, NBI_COMPONENT_NORM, "self_attn.q_a_layernorm", ".weight", c->q_lora));
        NB_TRY(linear(w, NBI_COMPONENT_ATTENTION, "self_attn.q_b_proj", "", q, c->q_lora));
    } else {
        NB_TRY(linear(w, NBI_COMPONENT_ATTENTION, "self_attn.q_proj", "", q, c->hidden));
    }
    NB_TRY(linear(w, NBI_COMPONENT_ATTENTION, "self_attn.kv_a_proj_with_mqa", "", kv, c->hidden));
    if (c->attention_bias)
        NB_TRY(vector(w, NBI_COMPONENT_BIAS, "self_attn.kv_a_proj_with_mqa", ".bias", kv));
    NB_TRY(vector(w, NBI_COMPONENT_NORM, "self_attn.kv_a_layernorm", ".weight", c->kv_lora));
    NB_TRY(linear(w, NBI_COMPONENT_ATTENTION, "self_attn.kv_b_proj", "",
                  (uint64_t)c->n_heads * (c->nope_dim + c->v_dim), c->kv_lora));
    NB_TRY(linear(w, NBI_COMPONENT_ATTENTION, "self_attn.o_proj", "", c->hidden,
                  (uint64_t)c->n_heads * c->v_dim));
    if (c->attention_bias)
        NB_TRY(vector(w, NBI_COMPONENT_BIAS, "self_attn.o_proj", ".bias", c->hidden));
    return full_indexer ? indexer(w) : NB_OK;
}

static nb_status gqa(const walk *w)
{
    static const char *const names[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
    const nbi_config *c = w->c;
    uint64_t q = (uint64_t)c->n_heads * c->head_dim, kv = (uint64_t)c->n_kv_heads * c->head_dim;
    for (int i = 0; i < 3; i++) {
        NB_TRY(linear(w, NBI_COMPONENT_ATTENTION, names[i], "", i ? kv : q, c->hidden));
        if (c->attention_bias) NB_TRY(vector(w, NBI_COMPONENT_BIAS, names[i], ".bias", i ? kv : q));
    }
    NB_TRY(linear(w, NBI_COMPONENT_ATTENTION, "self_attn.o_proj", "", c->hidden, q));
    if (c->attention_bias && c->family == NBI_FAMILY_QWEN3_MOE) /* GLM-4.x has none there */
        NB_TRY(vector(w, NBI_COMPONENT_BIAS, "self_attn.o_proj", ".bias", c->hidden));
    if (!c->qk_norm) return NB_OK;
    NB_TRY(vector(w, NBI_COMPONENT_NORM, "self_attn.q_norm", ".weight", c->head_dim));
    return vector(w, NBI_COMPONENT_NORM, "self_attn.k_norm", ".weight", c->head_dim);
}

static nb_status layer(walk *w, uint32_t i)
{
    const nbi_config *c = w->c;
    w->layer = i;
    snprintf(w->prefix, sizeof w->prefix, "model.layers.%u.", i);
    NB_TRY(vector(w, NBI_COMPONENT_NORM, "input_layernorm", ".weight", c->hidden));
    NB_TRY(c->attention == NBI_ATTENTION_MLA ? mla(w, c->has_indexer && c->layer_full_indexer[i])
                                             : gqa(w));
    NB_TRY(vector(w, NBI_COMPONENT_NORM, "post_attention_layernorm", ".weight", c->hidden));
    NB_TRY(c->layer_sparse[i] ? moe(w) : mlp(w, NBI_COMPONENT_DENSE, "mlp", 0, c->intermediate));
    if (i < c->n_layers) return NB_OK;
    NB_TRY(vector(w, NBI_COMPONENT_NORM, "enorm", ".weight", c->hidden));
    NB_TRY(vector(w, NBI_COMPONENT_NORM, "hnorm", ".weight", c->hidden));
    NB_TRY(
        linear(w, NBI_COMPONENT_MTP_PROJECTION, "eh_proj", "", c->hidden, (uint64_t)c->hidden * 2));
    return vector(w, NBI_COMPONENT_NORM, "shared_head.norm", ".weight", c->hidden);
}

nb_status nbi_modules_walk(const nbi_config *config, bool names, nbi_module_fn each, void *user,
                           nb_error *err)
{
    walk w = {
        .c = config, .names = names, .each = each, .user = user, .err = err, .layer = UINT32_MAX};
    NB_TRY(linear(&w, NBI_COMPONENT_EMBEDDING, "model.embed_tokens", "", config->vocab,
                  config->hidden));
    for (uint32_t i = 0; i < config->n_layers + config->n_mtp_layers; i++) NB_TRY(layer(&w, i));
    w.layer = UINT32_MAX;
    w.prefix[0] = 0;
    NB_TRY(vector(&w, NBI_COMPONENT_NORM, "model.norm", ".weight", config->hidden));
    return config->tied_head
               ? NB_OK
               : linear(&w, NBI_COMPONENT_HEAD, "lm_head", "", config->vocab, config->hidden);
}
