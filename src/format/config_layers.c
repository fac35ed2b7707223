/* Per-layer schedules of config.json: which layers have experts, which own an indexer.
 *
 * Experts: mlp_layer_types where there is one, else first_k_dense_replace and moe_layer_freq;
 * Qwen3: mlp_only_layers and decoder_sparse_step. Indexers: index_topk_pattern, else
 * index_topk_freq and index_skip_topk_offset, with indexer_types as a cross-check, else
 * indexer_types alone, else every layer. MTP layers have experts and an indexer of their own. */
#include <string.h>

#include "format/config_parts.h"

static const json_t *list(const nbi_config_source *s, const char *key)
{
    const json_t *v = json_object_get(s->o, key);
    return v && !json_is_null(v) ? v : NULL;
}

/* A list of two words for n_layers (MTP layers may be listed too). out[i] = 1 where the word is
 * `yes`. */
static nb_status read_words(uint8_t *out, const nbi_config *c, const nbi_config_source *s,
                            const char *key, const char *yes, const char *no)
{
    const json_t *v = list(s, key);
    size_t n = json_array_size(v);
    if (!json_is_array(v) || (n != c->n_layers && n != c->n_layers + c->n_mtp_layers))
        return nbi_fail(s->err, NB_INVALID,
                        "%s: %s is not a list of num_hidden_layers %u words (found %zu)", s->name,
                        key, c->n_layers, n);
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const char *word = json_string_value(json_array_get(v, i));
        bool is_yes = word && !strcmp(word, yes);
        if (!is_yes && (!word || strcmp(word, no)))
            return nbi_fail(s->err, NB_INVALID,
                            "%s: %s[%u] is \"%.40s\", expected \"%s\" or \"%s\"", s->name, key, i,
                            word ? word : "", yes, no);
        out[i] = is_yes;
    }
    return NB_OK;
}

static nb_status sparse_qwen(nbi_config *c, const nbi_config_source *s)
{
    uint32_t step = 1;
    NB_TRY(nbi_config_count(&step, s, "decoder_sparse_step", 1, 1024));
    if (!step) return nbi_fail(s->err, NB_INVALID, "%s: decoder_sparse_step is 0", s->name);
    for (uint32_t i = 0; i < c->n_layers; i++)
        c->layer_sparse[i] = c->n_experts > 0 && (i + 1) % step == 0;
    const json_t *only = list(s, "mlp_only_layers");
    if (only && !json_is_array(only))
        return nbi_fail(s->err, NB_INVALID, "%s: mlp_only_layers is not a list", s->name);
    for (size_t i = 0; i < json_array_size(only); i++) {
        const json_t *v = json_array_get(only, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 ||
            json_integer_value(v) >= c->n_layers)
            return nbi_fail(s->err, NB_INVALID, "%s: mlp_only_layers[%zu] is not a layer below %u",
                            s->name, i, c->n_layers);
        c->layer_sparse[json_integer_value(v)] = 0;
    }
    return NB_OK;
}

static nb_status sparse_layers(nbi_config *c, const nbi_config_source *s)
{
    for (uint32_t i = 0; i < c->n_mtp_layers; i++)
        c->layer_sparse[c->n_layers + i] = c->n_experts > 0;
    if (c->family == NBI_FAMILY_QWEN3_MOE) return sparse_qwen(c, s);
    if (list(s, "mlp_layer_types"))
        return read_words(c->layer_sparse, c, s, "mlp_layer_types", "sparse", "dense");
    bool three = c->family != NBI_FAMILY_GLM4_MOE && c->family != NBI_FAMILY_GLM4_MOE_LITE;
    uint32_t dense = 0, freq = 1;
    NB_TRY(nbi_config_count(&dense, s, "first_k_dense_replace", three ? 3 : 1, UINT32_MAX));
    NB_TRY(nbi_config_count(&freq, s, "moe_layer_freq", 1, 1024));
    if (!freq) return nbi_fail(s->err, NB_INVALID, "%s: moe_layer_freq is 0", s->name);
    for (uint32_t i = 0; i < c->n_layers; i++) c->layer_sparse[i] = i >= dense && i % freq == 0;
    return NB_OK;
}

/* index_topk_pattern: "FSSF..." or a list of words. */
static nb_status read_pattern(uint8_t *out, const nbi_config *c, const nbi_config_source *s,
                              const json_t *v)
{
    const char *text = json_string_value(v);
    if (!text) return read_words(out, c, s, "index_topk_pattern", "full", "shared");
    if (strlen(text) < c->n_layers || strspn(text, "FS") != strlen(text))
        return nbi_fail(s->err, NB_INVALID, "%s: index_topk_pattern is not %u letters F or S",
                        s->name, c->n_layers);
    for (uint32_t i = 0; i < c->n_layers; i++) out[i] = text[i] == 'F';
    return NB_OK;
}

static nb_status read_formula(uint8_t *out, const nbi_config *c, const nbi_config_source *s)
{
    uint32_t freq = 1, offset = 2;
    NB_TRY(nbi_config_count(&freq, s, "index_topk_freq", 1, 1u << 20));
    NB_TRY(nbi_config_count(&offset, s, "index_skip_topk_offset", 2, 1u << 20));
    if (freq == 0) freq = 1;
    for (uint32_t i = 0; i < c->n_layers; i++)
        out[i] = i + 1 <= offset || (i + 1 - offset) % freq == 0;
    return NB_OK;
}

static nb_status full_indexers(nbi_config *c, const nbi_config_source *s)
{
    uint8_t *out = c->layer_full_indexer;
    memset(out, 1, c->n_layers + c->n_mtp_layers);
    const json_t *pattern = list(s, "index_topk_pattern");
    bool types = list(s, "indexer_types") != NULL, rule = pattern || list(s, "index_topk_freq");
    if (types) NB_TRY(read_words(out, c, s, "indexer_types", "full", "shared"));
    if (rule || !types) {
        uint8_t *by_rule = nbi_malloc(c->n_layers);
        if (!by_rule) return nbi_fail(s->err, NB_NO_MEMORY, "out of memory");
        nb_status st = pattern ? read_pattern(by_rule, c, s, pattern) : read_formula(by_rule, c, s);
        for (uint32_t i = 0; i < c->n_layers && st == NB_OK; i++) {
            if (types && out[i] != by_rule[i])
                st = nbi_fail(
                    s->err, NB_INVALID, "%s: indexer_types[%u] is \"%s\" but %s makes it \"%s\"",
                    s->name, i, out[i] ? "full" : "shared",
                    pattern ? "index_topk_pattern" : "index_topk_freq with index_skip_topk_offset",
                    by_rule[i] ? "full" : "shared");
            out[i] = by_rule[i];
        }
        nbi_free(by_rule);
        NB_TRY(st);
    }
    if (!out[0])
        return nbi_fail(s->err, NB_INVALID, "%s: layer 0 shares an indexer, but none precedes it",
                        s->name);
    return NB_OK;
}

nb_status nbi_config_layers(nbi_config *c, const nbi_config_source *s)
{
    c->layer_sparse = nbi_calloc(c->n_layers + c->n_mtp_layers, 1);
    if (!c->layer_sparse) return nbi_fail(s->err, NB_NO_MEMORY, "out of memory");
    NB_TRY(sparse_layers(c, s));
    bool any = false;
    for (uint32_t i = 0; i < c->n_layers; i++) any |= c->layer_sparse[i];
    if (any && !c->n_experts)
        return nbi_fail(s->err, NB_INVALID,
                        "%s: layers with experts, but the number of experts is 0", s->name);
    if (!c->has_indexer) return NB_OK;
    c->layer_full_indexer = nbi_calloc(c->n_layers + c->n_mtp_layers, 1);
    if (!c->layer_full_indexer) return nbi_fail(s->err, NB_NO_MEMORY, "out of memory");
    return full_indexers(c, s);
}
