/* The tensors of a synthetic checkpoint: each module of the model in its weight kind.
 *
 * Standard deviation of a weight is 1 / sqrt(inputs), so that a normalised input gives outputs of
 * order one. Called twice per checkpoint at least: to count, and to declare. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/modules.h"
#include "model/synth_parts.h"
#include "tensor/matrix.h"

/* Activations of order one reach about this much; input_scale = AMAX / 2688. */
#define ACTIVATION_AMAX 8.0f
#define SQRT_3          1.7320508f /* half width over deviation of a uniform distribution */

/* Appends a tensor of the current pass. Its key comes from its number, so that values do not depend
 * on threads or shards. */
static void add(nbi_synth_plan *p, const char *base, const char *suffix, nbi_dtype dtype,
                uint32_t n_dims, uint64_t rows, uint64_t cols, nbi_fill fill)
{
    const uint64_t shape[2] = {rows, cols};
    char name[192];
    if (p->st != NB_OK || (n_dims == 0) != p->scalars) return;
    fill.bytes = nbi_dtype_bits(dtype) / 8;
    for (uint32_t i = 0; i < n_dims; i++) fill.bytes *= shape[i];
    p->bytes += fill.bytes;
    fill.key = (p->seed + 1) * 0xd1342543de82ef95u ^ (p->n_tensors++ * 0x2545f4914f6cdd1du);
    if (!p->writer) return;
    snprintf(name, sizeof name, "%s%s", base, suffix);
    p->st = nbi_st_writer_add(p->writer, name, dtype, n_dims, shape, p->err);
    if (p->st == NB_OK && p->n_fills == p->fills_cap) {
        size_t cap = p->fills_cap ? p->fills_cap * 2 : 1024;
        nbi_fill *more = nbi_realloc(p->fills, cap * sizeof *more);
        if (!more) {
            p->st = nbi_fail(p->err, NB_NO_MEMORY, "out of memory for %zu tensors", cap);
            return;
        }
        p->fills = more;
        p->fills_cap = cap;
    }
    if (p->st == NB_OK) p->fills[p->n_fills++] = fill;
}

static void add_nvfp4(nbi_synth_plan *p, const nbi_module *m, float deviation)
{
    float global = deviation / nbi_fill_rms_nvfp4();
    add(p, m->name, ".weight", NBI_U8, 2, m->rows, m->cols / 2, (nbi_fill){.kind = NBI_FILL_CODES});
    add(p, m->name, ".weight_scale", NBI_F8_E4M3, 2, m->rows, m->cols / NBI_NVFP4_BLOCK,
        (nbi_fill){.kind = NBI_FILL_E4M3_NEAR});
    add(p, m->name, ".weight_scale_2", NBI_F32, 0, 0, 0, (nbi_fill){NBI_FILL_F32, global, 0, 0, 0});
    add(p, m->name, ".input_scale", NBI_F32, 0, 0, 0,
        (nbi_fill){NBI_FILL_F32, ACTIVATION_AMAX / 2688, 0, 0, 0});
}

static void add_fp8(nbi_synth_plan *p, const nbi_module *m, float deviation)
{
    float scale = deviation / nbi_fill_rms_fp8();
    add(p, m->name, ".weight", NBI_F8_E4M3, 2, m->rows, m->cols, (nbi_fill){.kind = NBI_FILL_FP8});
    add(p, m->name, ".weight_scale_inv", NBI_F32, 2, (m->rows + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK,
        (m->cols + NBI_FP8_BLOCK - 1) / NBI_FP8_BLOCK,
        (nbi_fill){NBI_FILL_F32, scale, scale / 12, 0, 0});
}

nbi_weight_kind nbi_synth_kind(nbi_synth_weights weights, const nbi_module *m)
{
    /* Components up to this one are quantised. */
    static const nbi_component last[NBI_SYNTH_WEIGHTS_COUNT] = {
        [NBI_SYNTH_NVFP4_EXPERTS] = NBI_COMPONENT_ROUTED,
        [NBI_SYNTH_NVFP4_MLP] = NBI_COMPONENT_DENSE,
        [NBI_SYNTH_NVFP4_ALL] = NBI_COMPONENT_INDEXER,
        [NBI_SYNTH_FP8] = NBI_COMPONENT_INDEXER};
    if (!m->linear)
        return m->component == NBI_COMPONENT_ROUTER_BIAS ? NBI_WEIGHT_F32 : NBI_WEIGHT_BF16;
    if (weights == NBI_SYNTH_BF16 || m->component > last[weights]) return NBI_WEIGHT_BF16;
    if (weights == NBI_SYNTH_FP8) return NBI_WEIGHT_FP8_BLOCK;
    return m->cols % NBI_NVFP4_BLOCK == 0 ? NBI_WEIGHT_NVFP4 : NBI_WEIGHT_BF16;
}

static void add_linear(nbi_synth_plan *p, const nbi_module *m)
{
    float deviation = 1.0f / sqrtf((float)m->cols);
    if (m->component == NBI_COMPONENT_EMBEDDING) deviation = 0.5f;
    if (m->component == NBI_COMPONENT_HEAD) deviation *= 4; /* logits neither flat nor certain */
    switch (nbi_synth_kind(p->weights, m)) {
    case NBI_WEIGHT_FP8_BLOCK: add_fp8(p, m, deviation); break;
    case NBI_WEIGHT_NVFP4: add_nvfp4(p, m, deviation); break;
    default:
        add(p, m->name, ".weight", NBI_BF16, 2, m->rows, m->cols,
            (nbi_fill){NBI_FILL_BF16, 0, deviation * SQRT_3, 0, 0});
    }
}

static nb_status add_module(void *user, const nbi_module *m, nb_error *err)
{
    nbi_synth_plan *p = user;
    (void)err;
    if (m->linear)
        add_linear(p, m);
    else if (m->component == NBI_COMPONENT_ROUTER_BIAS) /* small against scores of 0.5 +- 0.2: some
                                                           token chooses every expert */
        add(p, m->name, "", NBI_F32, 1, m->rows, 0, (nbi_fill){NBI_FILL_F32, 0, 0.02f, 0, 0});
    else
        add(p, m->name, "", NBI_BF16, 1, m->rows, 0,
            (nbi_fill){NBI_FILL_BF16, m->component == NBI_COMPONENT_NORM, 0.1f, 0, 0});
    return p->st;
}

nb_status nbi_synth_plan_run(nbi_synth_plan *p)
{
    for (int pass = 0; pass < 2; pass++) {
        p->scalars = pass == 1;
        NB_TRY(nbi_modules_walk(p->config, p->writer != NULL, add_module, p, p->err));
    }
    return p->st;
}
