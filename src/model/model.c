/* Opening and closing a model, and what it costs: bytes and multiply-adds per token. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend/kv_shape.h"
#include "base/log.h"
#include "comm/device_ranks.h"
#include "model/layer.h"

/* Tensors that exporters leave behind and no engine needs. */
static bool harmless(const char *name)
{
    static const char *const suffix[] = {
        ".rotary_emb.inv_freq", ".k_proj.k_scale",    ".v_proj.v_scale", ".k_scale", ".v_scale",
        ".input_scale",         ".input_global_scale"};
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof suffix / sizeof *suffix; i++) {
        size_t k = strlen(suffix[i]);
        if (n >= k && !strcmp(name + n - k, suffix[i])) return true;
    }
    return false;
}

/* One line with the count and the first names of what nobody read; details at debug level. */
static void report_unused(const nbi_model *m)
{
    size_t n = nbi_checkpoint_count(m->ckpt), unused = 0;
    for (size_t i = 0; i < n; i++) {
        const nbi_st_tensor *t = nbi_checkpoint_at(m->ckpt, i);
        if (t->used || nbi_split_foreign(&m->split, t->name)) continue;
        if (harmless(t->name)) {
            nbi_log(NB_LOG_DEBUG, "not used by this build: %s", t->name);
            continue;
        }
        if (unused++ < 8)
            nbi_log(NB_LOG_WARN, "tensor %s is not used by a %s model", t->name,
                    nbi_family_name(m->config.family));
    }
    if (unused > 8) nbi_log(NB_LOG_WARN, "and %zu more unused tensors", unused - 8);
}

/* The checkpoint carries an MTP layer when its projection is there, whatever the config counts. */
static bool find_mtp(const nbi_model *m)
{
    char name[96];
    if (!m->config.n_mtp_layers) return false;
    snprintf(name, sizeof name, "model.layers.%u.eh_proj", m->config.n_layers);
    if (nbi_matrix_present(m->ckpt, name)) return true;
    nbi_log(NB_LOG_INFO,
            "config names %u MTP layer(s), the files hold none: drafting is not available",
            m->config.n_mtp_layers);
    return false;
}

/* The form of latent attention for prompts. */
static nb_status choose_form(nbi_model *m, const nbi_attention_names *names, nb_error *err)
{
    const char *form = names && names->mla_prefill ? names->mla_prefill : "auto";
    const uint32_t block = names && names->mla_block ? names->mla_block : NBI_MLA_BLOCK;
    if (strcmp(form, "auto") && strcmp(form, "absorbed") && strcmp(form, "expanded"))
        return nbi_fail(err, NB_INVALID,
                        "--mla-prefill is \"%s\"; expected auto, absorbed or expanded", form);
    if (block < NBI_PAGE_TOKENS || block & (block - 1))
        return nbi_fail(err, NB_INVALID,
                        "--mla-prefill-block is %u; expected a power of two, at least %u", block,
                        NBI_PAGE_TOKENS);
    /* auto: docs/models.md, "Absorbed or expanded" */
    const bool asked = !strcmp(form, "expanded");
    if (!asked && (strcmp(form, "auto") || !names || !names->unshared || !m->b->expands_fast))
        return NB_OK;
    const char *why = m->config.attention != NBI_ATTENTION_MLA ? "has no latent attention"
                      : m->config.has_indexer    ? "chooses positions per row with its indexer"
                      : !m->b->ops->mla_expanded ? "is absorbed only on this device"
                                                 : NULL;
    if (why && asked)
        nbi_log(NB_LOG_WARN, "--mla-prefill expanded: %s %s; prompts are as they would be without",
                nbi_family_name(m->config.family), why);
    if (!why) m->expanded_block = block;
    return NB_OK;
}

uint32_t nbi_model_expanded(const nbi_model *m, uint32_t n_prompt)
{
    return m->expanded_block ? n_prompt / m->expanded_block * m->expanded_block : 0;
}

/* What this rank holds; all of it without a comm. */
static nb_status split(nbi_model *m, const nbi_model_options *opt, nb_error *err)
{
    const nbi_shard alone = {.tp_size = 1, .ep_size = 1};
    const nbi_shard *shard = opt->comm ? &opt->shard : &alone;
    NB_ASSERT(!opt->comm || (shard->tp_size == nbi_comm_size(opt->comm) &&
                             shard->tp_rank == nbi_comm_rank(opt->comm)));
    NB_TRY(nbi_split_make(&m->split, shard, &m->config, m->ckpt, m->n_layers + m->has_mtp, err));
    m->comm = shard->tp_size > 1 ? opt->comm : NULL;
    if (!m->comm) return NB_OK;
    NB_TRY(nbi_comm_join_device(m->comm, m->b, err));
    const nbi_split *s = &m->split;
    nbi_log(NB_LOG_INFO, "rank %u of %u: %u of %u heads, %u of %u rows of the vocabulary",
            shard->tp_rank, shard->tp_size, s->heads.n, m->config.n_heads, s->vocab.n,
            m->config.vocab);
    if (m->config.n_experts)
        nbi_log(NB_LOG_INFO, "rank %u of %u: experts %u to %u, part %u of %u of each",
                shard->tp_rank, shard->tp_size, s->experts.first,
                s->experts.first + s->experts.n - 1, nbi_shard_moe_rank(shard) + 1,
                nbi_shard_moe_size(shard));
    return NB_OK;
}

static nb_status check_oea(nbi_model *m, const nbi_model_options *opt, nb_error *err)
{
    const nbi_config *c = &m->config;
    const uint32_t k0 = opt->oea_k0;
    if (!k0) return NB_OK;
    if (!c->n_experts)
        return nbi_fail(err, NB_INVALID,
                        "--oea-k0 is %u; a %s model without experts has no use for it", k0,
                        nbi_family_name(c->family));
    if (k0 > c->top_k)
        return nbi_fail(err, NB_INVALID, "--oea-k0 is %u; expected 1 to %u, the experts of a token",
                        k0, c->top_k);
    m->oea_k0 = k0;
    return NB_OK;
}

static void make_local(nbi_model *m)
{
    m->local = m->config;
    m->local.n_heads = m->split.heads.n;
    if (!m->comm) return;
    /* Also a rank without heads has a cache, so that pages mean the same everywhere. */
    m->local.n_kv_heads = m->split.kv_heads.n ? m->split.kv_heads.n : 1;
}

static nb_status open_parts(nbi_model *m, const nbi_model_options *opt, nb_error *err)
{
    NB_TRY(nbi_config_load(&m->config, opt->dir, err));
    NB_TRY(nbi_quant_load(&m->quant, opt->dir, err));
    NB_TRY(nbi_checkpoint_open(&m->ckpt, opt->dir, err));
    m->n_layers = m->config.n_layers;
    m->has_mtp = find_mtp(m);
    NB_TRY(check_oea(m, opt, err));
    NB_TRY(split(m, opt, err));
    make_local(m);
    if (opt->plan)
        NB_TRY(opt->plan(opt->plan_user, &m->config,
                         nbi_split_bytes(&m->split, &m->config, m->ckpt), err));
    NB_TRY(nbi_attention_choose(opt->attention, m->b, &m->local, err));
    NB_TRY(choose_form(m, opt->attention, err));
    m->layers = nbi_arena_alloc(&m->arena, (m->n_layers + m->has_mtp) * sizeof *m->layers);
    m->inv_freq = nbi_arena_alloc(&m->arena, m->config.rope.dim / 2 * sizeof(float));
    m->expert_bytes =
        nbi_arena_alloc(&m->arena, (m->n_layers + m->has_mtp) * sizeof *m->expert_bytes);
    m->shared_bytes =
        nbi_arena_alloc(&m->arena, (m->n_layers + m->has_mtp) * sizeof *m->shared_bytes);
    if (!m->layers || !m->inv_freq || !m->expert_bytes || !m->shared_bytes)
        return nbi_fail(err, NB_NO_MEMORY, "loading %s: out of memory", opt->dir);
    nbi_rope_inv_freq(&m->config.rope, m->inv_freq);
    nbi_log(NB_LOG_INFO, "%s: %u layers, hidden %u, rope base %g%s",
            nbi_family_name(m->config.family), m->n_layers, m->config.hidden, m->config.rope.theta,
            m->config.rope.yarn ? " with YaRN" : "");
    NB_TRY(nbi_model_load_weights(m, opt, err));
    report_unused(m);
    m->can_draft = m->has_mtp && opt->use_mtp;
    /* the cache has no place for it */
    if (!m->can_draft) m->config.n_mtp_layers = m->local.n_mtp_layers = 0;
    return NB_OK;
}

nb_status nbi_model_open(nbi_model **out, nbi_backend *b, const nbi_model_options *opt,
                         nb_error *err)
{
    nbi_model *m = nbi_calloc(1, sizeof *m);
    if (!m) return nbi_fail(err, NB_NO_MEMORY, "loading %s: out of memory", opt->dir);
    m->b = b;
    nb_status st = open_parts(m, opt, err);
    if (st != NB_OK) {
        nbi_model_close(&m);
        return st;
    }
    *out = m;
    return NB_OK;
}

void nbi_model_close(nbi_model **model)
{
    nbi_model *m = *model;
    if (!m) return;
    if (m->ws.block) m->b->ops->release(m->b, m->ws.block, m->ws.bytes);
    nbi_model_release_weights(m);
    nbi_checkpoint_close(&m->ckpt);
    nbi_config_free(&m->config);
    nbi_quant_free(&m->quant);
    nbi_arena_free(&m->arena);
    nbi_free(m);
    *model = NULL;
}

const nbi_config *nbi_model_config(const nbi_model *m)
{
    return &m->config;
}

const nbi_config *nbi_model_local(const nbi_model *m)
{
    return &m->local;
}

const char *nbi_model_runner(const nbi_model *m)
{
    return m->runner ? m->moe_names : "none";
}

const nbi_moe_table *nbi_model_moe_table(const nbi_model *m)
{
    return &m->moe_table;
}

const char *nbi_model_moe_source(const nbi_model *m)
{
    return m->moe_source ? m->moe_source : "rule";
}

const char *nbi_model_kv_algo(const nbi_model *m)
{
    return m->quant.kv_algo;
}

bool nbi_model_can_draft(const nbi_model *m)
{
    return m->can_draft;
}

uint64_t nbi_model_weight_bytes(const nbi_model *m)
{
    return m->weight_bytes;
}

/* Does a step with so many tokens in the cache choose some of them (forward.c)? */
static bool selects(const nbi_config *c, uint32_t context)
{
    return c->has_indexer && context >= c->index_topk;
}

/* Cache bytes that one sequence of `context` tokens reads in a decode step. */
static uint64_t cache_read_bytes(const nbi_config *c, uint32_t context, nbi_dtype dtype)
{
    const nbi_kv_shape heads = nbi_kv_head_shape(dtype, c->n_kv_heads, c->head_dim);
    const nbi_kv_shape latent = nbi_kv_latent_shape(dtype, c->kv_lora, c->rope_dim);
    const nbi_kv_shape index = nbi_kv_head_shape(dtype, 1, c->index_dim);
    uint64_t bytes = 0;
    for (uint32_t l = 0; l < c->n_layers; l++) {
        if (c->attention == NBI_ATTENTION_GQA) {
            bytes += 2ull * nbi_kv_position_bytes(&heads) * context;
            continue;
        }
        uint32_t attended = c->has_indexer && c->index_topk < context ? c->index_topk : context;
        bytes += (uint64_t)nbi_kv_position_bytes(&latent) * attended;
        if (selects(c, context) && c->layer_full_indexer[l])
            bytes += (uint64_t)nbi_kv_position_bytes(&index) * context;
    }
    return bytes;
}

/* Weights that a step of so many rows reads: distinct experts as expected. */
static double weights_read(const nbi_model *m, uint32_t n_rows)
{
    const nbi_config *c = &m->config;
    double bytes = (double)m->non_expert_bytes;
    if (m->embed) bytes += (double)n_rows * (double)nbi_matrix_row_bytes(&m->embed->host);
    if (!c->n_experts) return bytes;
    const uint32_t each = m->oea_k0 ? m->oea_k0 : c->top_k;
    double distinct = c->n_experts * (1.0 - pow(1.0 - (double)each / c->n_experts, n_rows));
    return bytes + distinct * (double)m->expert_bytes_per_layer_sum;
}

uint64_t nbi_model_token_bytes(const nbi_model *m, uint32_t batch, uint32_t context,
                               nbi_dtype kv_dtype)
{
    return nbi_model_step_bytes(m, batch, batch, (uint64_t)batch * context, kv_dtype);
}

uint64_t nbi_model_step_bytes(const nbi_model *m, uint32_t n_rows, uint32_t n_seqs, uint64_t cached,
                              nbi_dtype kv_dtype)
{
    if (!n_seqs) return 0;
    const uint32_t each = (uint32_t)(cached / n_seqs);
    const uint64_t idle = selects(&m->local, each) ? 0 : m->selecting_bytes;
    return (uint64_t)weights_read(m, n_rows) - idle +
           n_seqs * cache_read_bytes(&m->local, each, kv_dtype);
}

uint64_t nbi_model_token_macs(const nbi_model *m)
{
    return m->non_expert_macs + m->expert_macs;
}

void nbi_fault_text(int32_t code, char *out, size_t n)
{
    static const char *const where[NBI_WHERE_COUNT] = {
        [NBI_WHERE_EMBED] = "embedding",
        [NBI_WHERE_INPUT_NORM] = "input norm (residual entering attention)",
        [NBI_WHERE_POST_NORM] = "post-attention norm (residual entering the MLP)",
        [NBI_WHERE_FINAL_NORM] = "final norm",
        [NBI_WHERE_LOGITS] = "logits",
    };
    int32_t at = code - 1;
    if (at < 0) {
        snprintf(out, n, "no fault");
        return;
    }
    snprintf(out, n, "non-finite value in layer %d, %s", (int)(at / NBI_WHERE_COUNT),
             where[at % NBI_WHERE_COUNT]);
}
