/* Fuzz target: config.json, generation_config.json and hf_quant_config.json, one behind the other
 * with NULs between them. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "format/config.h"
#include "format/quant.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What the layers above rely on. */
static void check(const nbi_config *c)
{
    NB_ASSERT(c->family < NBI_FAMILY_COUNT && c->n_layers && c->hidden && c->vocab && c->n_heads &&
              c->n_kv_heads && c->max_positions);
    NB_ASSERT(c->rope.dim && c->rope.dim % 2 == 0 && c->rope.theta > 1 &&
              isfinite(c->rope.attention_factor));
    NB_ASSERT(c->softmax_scale > 0 && isfinite(c->softmax_scale) && c->n_eos <= NBI_EOS_MAX);
    for (uint32_t i = 0; i < c->n_layers + c->n_mtp_layers; i++) {
        NB_ASSERT(!c->layer_sparse[i] ||
                  (c->n_experts && c->top_k && c->top_k <= c->n_experts && c->moe_intermediate));
        NB_ASSERT(c->layer_sparse[i] || c->intermediate || i >= c->n_layers);
    }
    NB_ASSERT(!c->has_indexer ||
              (c->layer_full_indexer[0] && c->index_topk && c->index_heads && c->q_lora));
    NB_ASSERT(c->attention != NBI_ATTENTION_MLA ||
              (c->kv_lora && c->nope_dim && c->v_dim && c->rope_dim == c->rope.dim));
    NB_ASSERT(c->attention != NBI_ATTENTION_GQA ||
              (c->head_dim >= c->rope.dim && c->n_heads % c->n_kv_heads == 0));
}

static void try_config(const json_t *config, const json_t *generation)
{
    nbi_config c;
    nb_error err = {0};
    nb_status st = nbi_config_parse(&c, config, generation, "config.json", &err);
    NB_ASSERT(st == NB_OK || err.text[0]);
    if (st != NB_OK) return;
    check(&c);
    nbi_config_free(&c);
}

static void try_quant(const json_t *config, const json_t *hf_quant)
{
    nbi_quant q;
    nb_error err = {0};
    nb_status st = nbi_quant_parse(&q, config, hf_quant, "config.json", &err);
    NB_ASSERT(st == NB_OK || err.text[0]);
    if (st != NB_OK) return;
    if (q.n_ignore <= 16) nbi_quant_ignored(&q, "model.layers.3.mlp.experts.17.down_proj");
    nbi_quant_free(&q);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *json[3] = {NULL};
    size_t at = 0;
    for (int i = 0; i < 3 && at <= size; i++) {
        const uint8_t *nul = size > at ? memchr(data + at, 0, size - at) : NULL;
        size_t n = nul ? (size_t)(nul - data) - at : size - at;
        if (n && nbi_json_parse(&json[i], (const char *)data + at, n, "input", NULL) != NB_OK)
            json[i] = NULL;
        at += n + 1;
    }
    if (json[0]) {
        try_config(json[0], json[1]);
        try_quant(json[0], json[2]);
    }
    for (int i = 0; i < 3; i++) json_decref(json[i]);
    return 0;
}
