/* The tensors of a checkpoint, as the hub's files name them, one expert at a time.
 *
 * Standard deviation of a weight is 1 / sqrt(inputs), so that a normalised input gives outputs of
 * order one. Called twice per checkpoint at least: to count, and to declare. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/synth_parts.h"
#include "tensor/matrix.h"

/* What a linear layer belongs to: decides its kind. */
typedef enum component { ROUTED, SHARED, DENSE, ATTENTION, FIXED } component;

/* Activations of order one reach about this much; input_scale = AMAX / 2688. */
#define ACTIVATION_AMAX 8.0f
#define SQRT_3          1.7320508f /* half width over deviation of a uniform distribution */

/* Appends a tensor of the current pass. key: the tensor's number within all, so that values do not
 * depend on the passes. */
static void add(nbi_synth_plan *p, const char *name, nbi_dtype dtype, uint32_t n_dims,
                uint64_t rows, uint64_t cols, nbi_fill fill)
{
    const uint64_t shape[2] = {rows, cols};
    if (p->st != NB_OK || (n_dims == 0) != p->scalars) return;
    fill.bytes = nbi_dtype_bits(dtype) / 8;
    for (uint32_t i = 0; i < n_dims; i++) fill.bytes *= shape[i];
    p->bytes += fill.bytes;
    fill.key = (p->seed + 1) * 0xd1342543de82ef95u ^ (p->n_tensors++ * 0x2545f4914f6cdd1du);
    if (!p->writer) return;
    p->st = nbi_st_writer_add(p->writer, name, dtype, n_dims, shape, p->err);
    if (p->st == NB_OK && p->n_fills == p->fills_cap) {
        size_t cap = p->fills_cap ? p->fills_cap * 2 : 1024;
        nbi_fill *more = nbi_realloc(p->fills, cap * sizeof *more);
        if (!more)
            p->st = nbi_fail(p->err, NB_NO_MEMORY, "out of memory for %zu tensors", cap);
        else {
            p->fills = more;
            p->fills_cap = cap;
        }
    }
    if (p->st == NB_OK) p->fills[p->n_fills++] = fill;
}

/* Module and tensor names; empty while only counting. */
typedef struct name {
    char text[160];
} name;

static name join(const nbi_synth_plan *p, const char *base, const char *suffix)
{
    name n = {{0}};
    if (p->writer) snprintf(n.text, sizeof n.text, "%s%s", base, suffix);
    return n;
}

static void vector(nbi_synth_plan *p, const char *base, const char *suffix, uint64_t n,
                   float center, float spread)
{
    add(p, join(p, base, suffix).text, NBI_BF16, 1, n, 0,
        (nbi_fill){NBI_FILL_BF16, center, spread, 0, 0});
}

static void linear_nvfp4(nbi_synth_plan *p, const char *base, uint64_t rows, uint64_t cols,
                         float deviation)
{
    float global = deviation / nbi_fill_rms_nvfp4();
    add(p, join(p, base, ".weight").text, NBI_U8, 2, rows, cols / 2,
        (nbi_fill){.kind = NBI_FILL_CODES});
    add(p, join(p, base, ".weight_scale").text, NBI_F8_E4M3, 2, rows, cols / NBI_NVFP4_BLOCK,
        (nbi_fill){.kind = NBI_FILL_E4M3_NEAR});
    add(p, join(p, base, ".weight_scale_2").text, NBI_F32, 0, 0, 0,
        (nbi_fill){NBI_FILL_F32, global, 0, 0, 0});
    add(p, join(p, base, ".input_scale").text, NBI_F32, 0, 0, 0,
        (nbi_fill){NBI_FILL_F32, ACTIVATION_AMAX / 2688, 0, 0, 0});
}

static void linear_fp8(nbi_synth_plan *p, const char *base, uint64_t rows, uint64_t cols,
                       float deviation)
{
    float scale = deviation / nbi_fill_rms_fp8();
    add(p, join(p, base, ".weight").text, NBI_F8_E4M3, 2, rows, cols,
        (nbi_fill){.kind = NBI_FILL_FP8});
    add(p, join(p, base, ".weight_scale_inv").text, NBI_F32, 2,
        (rows + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK, (cols + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK,
        (nbi_fill){NBI_FILL_F32, scale, scale / 4, 0, 0});
}

static void linear_bf16(nbi_synth_plan *p, const char *base, uint64_t rows, uint64_t cols,
                        float deviation)
{
    add(p, join(p, base, ".weight").text, NBI_BF16, 2, rows, cols,
        (nbi_fill){NBI_FILL_BF16, 0, deviation * SQRT_3, 0, 0});
}

/* base: module name without ".weight" */
static void linear(nbi_synth_plan *p, component c, const char *base, uint64_t rows, uint64_t cols)
{
    static const component last[NBI_SYNTH_WEIGHTS_COUNT] = {[NBI_SYNTH_NVFP4_EXPERTS] = ROUTED,
                                                            [NBI_SYNTH_NVFP4_MLP] = DENSE,
                                                            [NBI_SYNTH_NVFP4_ALL] = ATTENTION,
                                                            [NBI_SYNTH_FP8] = ATTENTION};
    float deviation = 1.0f / sqrtf((float)cols);
    bool quantised = p->weights != NBI_SYNTH_BF16 && c <= last[p->weights];
    if (quantised && p->weights == NBI_SYNTH_FP8)
        linear_fp8(p, base, rows, cols, deviation);
    else if (quantised && cols % NBI_NVFP4_BLOCK == 0)
        linear_nvfp4(p, base, rows, cols, deviation);
    else
        linear_bf16(p, base, rows, cols, deviation);
}

static void mlp(nbi_synth_plan *p, component c, const char *base, uint64_t inter)
{
    uint64_t hidden = p->config->hidden;
    linear(p, c, join(p, base, ".gate_proj").text, inter, hidden);
    linear(p, c, join(p, base, ".up_proj").text, inter, hidden);
    linear(p, c, join(p, base, ".down_proj").text, hidden, inter);
}

static void moe(nbi_synth_plan *p, const char *base)
{
    const nbi_config *c = p->config;
    linear(p, FIXED, join(p, base, ".gate").text, c->n_experts, c->hidden);
    if (c->router_bias) /* small against sigmoid scores of 0.5 +- 0.2: every expert is chosen by
                           some token */
        add(p, join(p, base, ".gate.e_score_correction_bias").text, NBI_F32, 1, c->n_experts, 0,
            (nbi_fill){NBI_FILL_F32, 0, 0.02f, 0, 0});
    for (uint32_t e = 0; e < c->n_experts; e++) {
        char suffix[32];
        snprintf(suffix, sizeof suffix, ".experts.%u", e);
        mlp(p, ROUTED, join(p, base, suffix).text, c->moe_intermediate);
    }
    if (c->n_shared)
        mlp(p, SHARED, join(p, base, ".shared_experts").text,
            (uint64_t)c->n_shared * c->moe_intermediate);
}

static void indexer(nbi_synth_plan *p, const char *base)
{
    const nbi_config *c = p->config;
    linear(p, ATTENTION, join(p, base, ".wq_b").text, (uint64_t)c->index_heads * c->index_dim,
           c->q_lora);
    linear(p, ATTENTION, join(p, base, ".wk").text, c->index_dim, c->hidden);
    linear(p, FIXED, join(p, base, ".weights_proj").text, c->index_heads, c->hidden);
    vector(p, base, ".k_norm.weight", c->index_dim, 1, 0.1f);
    vector(p, base, ".k_norm.bias", c->index_dim, 0, 0.1f);
}

static void mla(nbi_synth_plan *p, const char *base, bool full_indexer)
{
    const nbi_config *c = p->config;
    uint64_t qk = c->nope_dim + c->rope_dim;
    if (c->q_lora) {
        linear(p, ATTENTION, join(p, base, ".q_a_proj").text, c->q_lora, c->hidden);
        if (c->attention_bias) vector(p, base, ".q_a_proj.bias", c->q_lora, 0, 0.1f);
        vector(p, base, ".q_a_layernorm.weight", c->q_lora, 1, 0.1f);
        linear(p, ATTENTION, join(p, base, ".q_b_proj").text, c->n_heads * qk, c->q_lora);
    } else {
        linear(p, ATTENTION, join(p, base, ".q_proj").text, c->n_heads * qk, c->hidden);
    }
    linear(p, ATTENTION, join(p, base, ".kv_a_proj_with_mqa").text, c->kv_lora + c->rope_dim,
           c->hidden);
    if (c->attention_bias)
        vector(p, base, ".kv_a_proj_with_mqa.bias", c->kv_lora + c->rope_dim, 0, 0.1f);
    vector(p, base, ".kv_a_layernorm.weight", c->kv_lora, 1, 0.1f);
    linear(p, ATTENTION, join(p, base, ".kv_b_proj").text,
           (uint64_t)c->n_heads * (c->nope_dim + c->v_dim), c->kv_lora);
    linear(p, ATTENTION, join(p, base, ".o_proj").text, c->hidden, (uint64_t)c->n_heads * c->v_dim);
    if (c->attention_bias) vector(p, base, ".o_proj.bias", c->hidden, 0, 0.1f);
    if (full_indexer) indexer(p, join(p, base, ".indexer").text);
}

static void gqa(nbi_synth_plan *p, const char *base)
{
    static const char *const names[] = {".q_proj", ".k_proj", ".v_proj"};
    const nbi_config *c = p->config;
    uint64_t q = (uint64_t)c->n_heads * c->head_dim, kv = (uint64_t)c->n_kv_heads * c->head_dim;
    for (int i = 0; i < 3; i++) {
        name module = join(p, base, names[i]);
        linear(p, ATTENTION, module.text, i ? kv : q, c->hidden);
        if (c->attention_bias) vector(p, module.text, ".bias", i ? kv : q, 0, 0.1f);
    }
    linear(p, ATTENTION, join(p, base, ".o_proj").text, c->hidden, q);
    if (c->attention_bias && c->family == NBI_FAMILY_QWEN3_MOE)
        vector(p, base, ".o_proj.bias", c->hidden, 0, 0.1f);
    if (c->qk_norm) {
        vector(p, base, ".q_norm.weight", c->head_dim, 1, 0.1f);
        vector(p, base, ".k_norm.weight", c->head_dim, 1, 0.1f);
    }
}

static void layer(nbi_synth_plan *p, uint32_t i)
{
    const nbi_config *c = p->config;
    char text[48];
    snprintf(text, sizeof text, "model.layers.%u", i);
    name base = join(p, text, "");
    vector(p, base.text, ".input_layernorm.weight", c->hidden, 1, 0.1f);
    if (c->attention == NBI_ATTENTION_MLA)
        mla(p, join(p, base.text, ".self_attn").text, c->has_indexer && c->layer_full_indexer[i]);
    else
        gqa(p, join(p, base.text, ".self_attn").text);
    vector(p, base.text, ".post_attention_layernorm.weight", c->hidden, 1, 0.1f);
    if (c->layer_sparse[i])
        moe(p, join(p, base.text, ".mlp").text);
    else
        mlp(p, DENSE, join(p, base.text, ".mlp").text, c->intermediate);
    if (i < c->n_layers) return;
    vector(p, base.text, ".enorm.weight", c->hidden, 1, 0.1f);
    vector(p, base.text, ".hnorm.weight", c->hidden, 1, 0.1f);
    linear(p, FIXED, join(p, base.text, ".eh_proj").text, c->hidden, (uint64_t)c->hidden * 2);
    vector(p, base.text, ".shared_head.norm.weight", c->hidden, 1, 0.1f);
}

nb_status nbi_synth_plan_run(nbi_synth_plan *p)
{
    const nbi_config *c = p->config;
    for (int pass = 0; pass < 2; pass++) {
        p->scalars = pass == 1;
        add(p, "model.embed_tokens.weight", NBI_BF16, 2, c->vocab, c->hidden,
            (nbi_fill){NBI_FILL_BF16, 0, 1, 0, 0});
        for (uint32_t i = 0; i < c->n_layers + c->n_mtp_layers; i++) layer(p, i);
        vector(p, "model.norm", ".weight", c->hidden, 1, 0.1f);
        if (!c->tied_head) /* logits of deviation 4: neither flat nor certain */
            add(p, "lm_head.weight", NBI_BF16, 2, c->vocab, c->hidden,
                (nbi_fill){NBI_FILL_BF16, 0, 4 * SQRT_3 / sqrtf((float)c->hidden), 0, 0});
    }
    return p->st;
}
