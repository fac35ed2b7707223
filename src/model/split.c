/* Ranges of a rank. Called once by nbi_model_open(), before weights are loaded. */
#include "model/split.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Whole lines and tiles, where there are enough of them. */
#define COLUMNS_WANTED 64u
#define VOCAB_WANTED   128u

static uint32_t gcd(uint32_t a, uint32_t b)
{
    while (b) {
        const uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static uint32_t lcm(uint32_t a, uint32_t b)
{
    const uint32_t common = gcd(a, b);
    NB_ASSERT(common);
    const uint32_t all = a / common * b;
    NB_ASSERT(all);
    return all;
}

nbi_range nbi_split_part(uint32_t n, uint32_t unit, uint32_t rank, uint32_t size)
{
    NB_ASSERT(unit && size);
    const uint32_t units = (n + unit - 1) / unit, each = units / size, more = units % size;
    const uint32_t first = rank * each + (rank < more ? rank : more),
                   end = first + each + (rank < more ? 1 : 0);
    const uint32_t at = first * unit < n ? first * unit : n, to = end * unit < n ? end * unit : n;
    return (nbi_range){at, to - at};
}

nbi_range nbi_split_inter(uint32_t inter, const nbi_weight_kind kinds[3], uint32_t rank,
                          uint32_t size)
{
    uint32_t unit = lcm(nbi_matrix_row_unit(kinds[0]), nbi_matrix_row_unit(kinds[1]));
    unit = lcm(unit, nbi_matrix_column_unit(kinds[2]));
    const uint32_t wide = lcm(unit, COLUMNS_WANTED);
    if (inter % wide == 0 && inter / wide >= size) unit = wide;
    return nbi_split_part(inter, unit, rank, size);
}

/* ---------------------------------------------------------------- heads */

typedef struct heads {
    nbi_checkpoint *ckpt;
    nbi_arena *arena;
    uint32_t layer;
} heads;

/* How many heads make whole units of a matrix of `per_head` rows (or columns) each. */
static nb_status unit_of(uint32_t *unit, const heads *h, const char *name, uint32_t per_head,
                         bool columns, nb_error *err)
{
    char full[128];
    nbi_matrix m;
    snprintf(full, sizeof full, "model.layers.%u.self_attn.%s", h->layer, name);
    NB_TRY(nbi_matrix_load(&m, h->ckpt, h->arena, full, 0, 0, err));
    const uint32_t cut = columns ? nbi_matrix_column_unit(m.kind) : nbi_matrix_row_unit(m.kind);
    *unit = lcm(*unit, cut / gcd(cut, per_head));
    return NB_OK;
}

static nb_status mla_unit(uint32_t *unit, const heads *h, const nbi_config *c, nb_error *err)
{
    NB_TRY(
        unit_of(unit, h, c->q_lora ? "q_b_proj" : "q_proj", c->nope_dim + c->rope_dim, false, err));
    NB_TRY(unit_of(unit, h, "kv_b_proj", c->nope_dim + c->v_dim, false, err));
    return unit_of(unit, h, "o_proj", c->v_dim, true, err);
}

/* *unit in query heads, *kv_unit in key heads. */
static nb_status gqa_unit(uint32_t *unit, uint32_t *kv_unit, const heads *h, const nbi_config *c,
                          nb_error *err)
{
    NB_TRY(unit_of(unit, h, "q_proj", c->head_dim, false, err));
    NB_TRY(unit_of(unit, h, "o_proj", c->head_dim, true, err));
    NB_TRY(unit_of(kv_unit, h, "k_proj", c->head_dim, false, err));
    return unit_of(kv_unit, h, "v_proj", c->head_dim, false, err);
}

/* Ranks share a key head where there are fewer than ranks: its query heads are split among them. */
static void share_kv_heads(nbi_split *s, const nbi_config *c, uint32_t unit)
{
    const uint32_t rank = s->shard.tp_rank, size = s->shard.tp_size;
    const uint32_t ratio = c->n_heads / c->n_kv_heads, kv = rank * c->n_kv_heads / size;
    uint32_t first = 0, n = 0; /* ranks of this key head */
    for (uint32_t r = 0; r < size; r++) {
        if (r * c->n_kv_heads / size != kv) continue;
        if (!n++) first = r;
    }
    s->heads = nbi_split_part(ratio, unit, rank - first, n);
    s->heads.first += kv * ratio;
    s->kv_heads = (nbi_range){kv, 1};
}

static void split_gqa(nbi_split *s, const nbi_config *c, uint32_t unit, uint32_t kv_unit)
{
    const uint32_t ratio = c->n_heads / c->n_kv_heads;
    NB_ASSERT(unit);
    if (kv_unit == 1 && c->n_kv_heads < s->shard.tp_size && ratio % unit == 0) {
        share_kv_heads(s, c, unit);
        return;
    }
    kv_unit = lcm(kv_unit, unit / gcd(unit, ratio));
    s->kv_heads = nbi_split_part(c->n_kv_heads, kv_unit, s->shard.tp_rank, s->shard.tp_size);
    s->heads = (nbi_range){s->kv_heads.first * ratio, s->kv_heads.n * ratio};
}

/* The last rank has the fewest. */
static nb_status all_attend(const nbi_split *s, const nbi_config *c, uint32_t unit, nb_error *err)
{
    const uint32_t size = s->shard.tp_size;
    if (nbi_split_part(c->n_heads, unit, size - 1, size).n) return NB_OK;
    return nbi_fail(err, NB_UNSUPPORTED,
                    "--shard-latents: of %u ranks some have none of the %u attention heads; every "
                    "rank must attend",
                    size, c->n_heads);
}

static nb_status split_heads(nbi_split *s, const nbi_config *c, nbi_checkpoint *ckpt,
                             uint32_t n_layers, nb_error *err)
{
    nbi_arena names = {0};
    heads h = {.ckpt = ckpt, .arena = &names};
    const bool mla = c->attention == NBI_ATTENTION_MLA;
    uint32_t unit = 1, kv_unit = 1;
    nb_status st = NB_OK;
    for (; h.layer < n_layers && st == NB_OK; h.layer++)
        st = mla ? mla_unit(&unit, &h, c, err) : gqa_unit(&unit, &kv_unit, &h, c, err);
    nbi_arena_free(&names);
    if (st != NB_OK) return st;
    if (!mla) {
        split_gqa(s, c, unit, kv_unit);
        return NB_OK;
    }
    s->heads = nbi_split_part(c->n_heads, unit, s->shard.tp_rank, s->shard.tp_size);
    return s->shard.latents ? all_attend(s, c, unit, err) : NB_OK;
}

/* ---------------------------------------------------------------- the whole */

nbi_range nbi_split_vocab(const nbi_split *s, uint32_t vocab, uint32_t rank)
{
    return nbi_split_part(vocab, s->vocab_unit, rank, s->shard.tp_size);
}

/* Embedding and head alike, since they may be one. */
static nb_status split_vocab(nbi_split *s, uint32_t vocab, nbi_checkpoint *ckpt, nb_error *err)
{
    static const char *const names[] = {"model.embed_tokens", "lm_head"};
    nbi_arena arena = {0};
    nb_status st = NB_OK;
    uint32_t unit = 1;
    for (size_t i = 0; i < 2 && st == NB_OK; i++) {
        nbi_matrix m;
        if (i && !nbi_matrix_present(ckpt, names[i])) break;
        st = nbi_matrix_load(&m, ckpt, &arena, names[i], 0, 0, err);
        if (st == NB_OK) unit = lcm(unit, nbi_matrix_row_unit(m.kind));
    }
    nbi_arena_free(&arena);
    if (st != NB_OK) return st;
    const uint32_t wide = lcm(unit, VOCAB_WANTED);
    NB_ASSERT(wide && unit);
    s->vocab_unit = vocab / wide >= s->shard.tp_size ? wide : unit;
    s->vocab = nbi_split_vocab(s, vocab, s->shard.tp_rank);
    s->vocab_max = nbi_split_vocab(s, vocab, 0).n;
    return NB_OK;
}

/* The columns of the residual that a rank multiplies: the same for every layer. */
static nb_status split_latents(nbi_split *s, const nbi_config *c, nbi_checkpoint *ckpt,
                               uint32_t n_layers, nb_error *err)
{
    nbi_arena names = {0};
    heads h = {.ckpt = ckpt, .arena = &names};
    const uint32_t size = s->shard.tp_size;
    uint32_t unit = 1;
    nb_status st = NB_OK;
    if (c->attention != NBI_ATTENTION_MLA)
        return nbi_fail(err, NB_UNSUPPORTED,
                        "--shard-latents: attention of this model has no latents; expected MLA");
    for (; h.layer < n_layers && st == NB_OK; h.layer++) {
        st = unit_of(&unit, &h, "kv_a_proj_with_mqa", 1, true, err);
        if (st == NB_OK && c->q_lora) st = unit_of(&unit, &h, "q_a_proj", 1, true, err);
        if (st != NB_OK || !c->has_indexer || !c->layer_full_indexer[h.layer]) continue;
        st = unit_of(&unit, &h, "indexer.wk", 1, true, err);
        if (st == NB_OK) st = unit_of(&unit, &h, "indexer.weights_proj", 1, true, err);
    }
    nbi_arena_free(&names);
    if (st != NB_OK) return st;
    const uint32_t wide = lcm(unit, COLUMNS_WANTED);
    if (c->hidden % wide == 0 && c->hidden / wide >= size) unit = wide;
    s->latent = nbi_split_part(c->hidden, unit, s->shard.tp_rank, size);
    if (nbi_split_part(c->hidden, unit, size - 1, size).n) return NB_OK;
    return nbi_fail(err, NB_UNSUPPORTED,
                    "--shard-latents: %u hidden values in units of %u are not enough for %u ranks",
                    c->hidden, unit, size);
}

nb_status nbi_split_make(nbi_split *out, const nbi_shard *shard, const nbi_config *c,
                         nbi_checkpoint *ckpt, uint32_t n_layers, nb_error *err)
{
    nbi_split s = {.shard = *shard,
                   .heads = {0, c->n_heads},
                   .kv_heads = {0, c->n_kv_heads},
                   .vocab = {0, c->vocab},
                   .vocab_unit = 1,
                   .vocab_max = c->vocab,
                   .experts = {0, c->n_experts}};
    if (!nbi_split_alone(&s)) {
        NB_TRY(split_heads(&s, c, ckpt, n_layers, err));
        NB_TRY(split_vocab(&s, c->vocab, ckpt, err));
        s.experts = nbi_split_part(c->n_experts, 1, shard->ep_rank, shard->ep_size);
        if (shard->latents) NB_TRY(split_latents(&s, c, ckpt, n_layers, err));
    }
    *out = s;
    return NB_OK;
}

/* ---------------------------------------------------------------- by name */

/* -1: not a tensor of one routed expert. */
static long expert_of(const char *name)
{
    const char *at = strstr(name, ".mlp.experts.");
    if (!at) return -1;
    at += strlen(".mlp.experts.");
    return *at >= '0' && *at <= '9' ? strtol(at, NULL, 10) : -1;
}

static bool holds(const nbi_range *r, long i)
{
    return i >= (long)r->first && i < (long)r->first + (long)r->n;
}

bool nbi_split_foreign(const nbi_split *s, const char *name)
{
    const long expert = expert_of(name);
    if (!s->heads.n && strstr(name, ".self_attn.")) return true;
    return expert >= 0 && !holds(&s->experts, expert);
}

static double share_of_tensor(const nbi_split *s, const nbi_config *c, const char *name)
{
    static const char *const by_head[] = {".q_b_proj.", ".kv_b_proj.", ".o_proj.", ".q_proj."};
    const double all = s->shard.tp_size;
    if (strstr(name, ".mlp.experts.")) {
        const bool whole = expert_of(name) >= 0; /* else all experts of a layer in one tensor */
        return (whole ? 1 : (double)s->experts.n / c->n_experts) / nbi_shard_moe_size(&s->shard);
    }
    static const char *const of_residual[] = {".q_a_proj.", ".kv_a_proj_with_mqa.", ".indexer.wk.",
                                              ".indexer.weights_proj."};
    for (size_t i = 0; i < sizeof of_residual / sizeof *of_residual; i++)
        if (s->shard.latents && strstr(name, of_residual[i]))
            return (double)s->latent.n / c->hidden;
    if (strstr(name, ".indexer.")) return 1;
    for (size_t i = 0; i < sizeof by_head / sizeof *by_head; i++)
        if (strstr(name, by_head[i])) return (double)s->heads.n / c->n_heads;
    if (strstr(name, ".k_proj.") || strstr(name, ".v_proj."))
        return (double)s->kv_heads.n / c->n_kv_heads;
    if (strstr(name, "embed_tokens.") || strstr(name, "lm_head."))
        return (double)s->vocab.n / c->vocab;
    return strstr(name, ".gate_proj.") || strstr(name, ".up_proj.") || strstr(name, ".down_proj.")
               ? 1 / all
               : 1;
}

uint64_t nbi_split_bytes(const nbi_split *s, const nbi_config *c, const nbi_checkpoint *ckpt)
{
    if (nbi_split_alone(s)) return nbi_checkpoint_bytes(ckpt);
    double bytes = 0;
    for (size_t i = 0; i < nbi_checkpoint_count(ckpt); i++) {
        const nbi_st_tensor *t = nbi_checkpoint_at(ckpt, i);
        if (!nbi_split_foreign(s, t->name))
            bytes += (double)t->bytes * share_of_tensor(s, c, t->name);
    }
    return (uint64_t)bytes;
}
