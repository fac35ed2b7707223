/* Bytes, operations and floors by part. Callers: nibble roofline.
 *
 * The model's modules are walked once; what depends on the batch alone is worked out from their
 * sums, so that the batch that turns a step compute-bound is found by bisection in no time. */
#include "perf/roofline.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend/kv_shape.h"
#include "tensor/matrix.h"

#define BF16_BYTES    2.0
#define DRAWS         2000u /* of random routings, for the busiest expert group */
#define DRAWN_IDS_MAX 4000000u
#define BATCH_MAX     (1u << 20)

/* Sums over the modules of one rank (one expert for routed experts). */
typedef struct sums {
    double bytes[NBI_ROOF_PART_COUNT];
    double macs[NBI_ROOF_PART_COUNT];                          /* per token */
    double row_bytes;                                          /* of the embedding */
    double fp4[NBI_ROOF_PART_COUNT], fp8[NBI_ROOF_PART_COUNT]; /* share of macs by weight kind */
} sums;

typedef struct walker {
    const nbi_roof_options *o;
    sums sums;
    double *stage_bytes; /* [pp] stored on one rank of each stage */
    size_t at;           /* of module_bytes */
    uint64_t parameters, active;
} walker;

const char *nbi_roof_part_name(nbi_roof_part part)
{
    static const char *const names[] = {
#define X(suffix, name) name,
        NBI_PART_LIST(X)
#undef X
    };
    return part < NBI_ROOF_PART_COUNT ? names[part] : "unknown";
}

/* ---------------------------------------------------------------- modules */

static nbi_roof_part part_of(nbi_component c)
{
    switch (c) {
    case NBI_COMPONENT_ROUTED: return NBI_ROOF_ROUTED;
    case NBI_COMPONENT_SHARED: return NBI_ROOF_SHARED;
    case NBI_COMPONENT_DENSE: return NBI_ROOF_DENSE;
    case NBI_COMPONENT_ATTENTION: return NBI_ROOF_ATTENTION;
    case NBI_COMPONENT_INDEXER:
    case NBI_COMPONENT_INDEXER_HEADS: return NBI_ROOF_INDEXER;
    case NBI_COMPONENT_ROUTER: return NBI_ROOF_ROUTER;
    case NBI_COMPONENT_EMBEDDING: return NBI_ROOF_EMBEDDING;
    case NBI_COMPONENT_HEAD: return NBI_ROOF_HEAD;
    default: return NBI_ROOF_NORM;
    }
}

/* Bytes of the next module. */
static double module_bytes(walker *w, const nbi_module *m)
{
    const nbi_roof_options *o = w->o;
    const double weights = (double)m->rows * (double)(m->linear ? m->cols : 1);
    if (o->module_bytes) return (double)o->module_bytes[w->at++];
    const nbi_weight_kind kind = nbi_synth_kind(o->weights, m);
    if (!m->linear) return weights * (kind == NBI_WEIGHT_F32 ? 4 : BF16_BYTES);
    const nbi_matrix matrix = {.kind = kind, .rows = (uint32_t)m->rows, .cols = (uint32_t)m->cols};
    return (double)nbi_matrix_bytes(&matrix);
}

/* Share of a module that one rank holds. */
static double share_of(const nbi_roof_options *o, const nbi_module *m)
{
    const nbi_config *c = o->config;
    const bool mla = c->attention == NBI_ATTENTION_MLA;
    switch (m->component) {
    case NBI_COMPONENT_ROUTED: return 1.0 / o->tp; /* ep groups x columns */
    case NBI_COMPONENT_INDEXER:
    case NBI_COMPONENT_INDEXER_HEADS: return o->whole_latents ? 1 : 1.0 / o->tp;
    case NBI_COMPONENT_ATTENTION:
        if (mla && o->whole_latents && m->cols == c->hidden &&
            (m->rows == c->q_lora || m->rows == (uint64_t)c->kv_lora + c->rope_dim))
            return 1;
        if (!mla && m->rows == (uint64_t)c->n_kv_heads * c->head_dim && c->n_kv_heads < o->tp)
            return 1.0 / c->n_kv_heads; /* a rank needs at least one head of keys and values */
        return 1.0 / o->tp;
    case NBI_COMPONENT_SHARED:
    case NBI_COMPONENT_DENSE:
    case NBI_COMPONENT_EMBEDDING:
    case NBI_COMPONENT_HEAD:
    case NBI_COMPONENT_MTP_PROJECTION: return 1.0 / o->tp;
    default: return 1; /* router, norms, biases */
    }
}

/* The stage that stores a module; the embedding is in the first, the head in the last. */
static uint32_t stage_of(const nbi_roof_options *o, const nbi_module *m)
{
    const uint32_t n = o->config->n_layers;
    if (m->component == NBI_COMPONENT_EMBEDDING) return 0;
    if (m->layer >= n) return o->pp - 1;
    return (uint32_t)((uint64_t)m->layer * o->pp / n);
}

static bool chooses(const nbi_roof_options *o)
{
    return o->config->has_indexer &&
           (o->context == NBI_ROOF_ALL_WEIGHTS || o->context + 1 > o->config->index_topk);
}

static double cached_tokens(const nbi_roof_options *o)
{
    return o->context == NBI_ROOF_ALL_WEIGHTS ? 0 : (double)o->context;
}

/* Does a step run it? Of the indexer, the key's matrix always. */
static bool is_run(const nbi_roof_options *o, const nbi_module *m)
{
    const nbi_config *c = o->config;
    const bool key =
        m->component == NBI_COMPONENT_INDEXER && m->rows == c->index_dim && m->cols == c->hidden;
    return part_of(m->component) != NBI_ROOF_INDEXER || key || chooses(o);
}

static nb_status add_module(void *user, const nbi_module *m, nb_error *err)
{
    (void)err;
    walker *w = user;
    const nbi_roof_options *o = w->o;
    const double weights = (double)m->rows * (double)(m->linear ? m->cols : 1);
    const double bytes = module_bytes(w, m), share = share_of(o, m);
    w->parameters += (uint64_t)weights;
    w->stage_bytes[stage_of(o, m)] += bytes * share;
    const nbi_roof_part part = part_of(m->component);
    if (part == NBI_ROOF_EMBEDDING) {
        w->sums.row_bytes = bytes / (double)m->rows;
        if (!o->config->tied_head) return NB_OK;
    }
    if (m->layer != UINT32_MAX && m->layer >= o->config->n_layers) return NB_OK; /* MTP */
    if (part == NBI_ROOF_ROUTED && m->expert > 0) return NB_OK; /* one stands for all */
    if (!is_run(o, m)) return NB_OK;
    const nbi_roof_part to = part == NBI_ROOF_EMBEDDING ? NBI_ROOF_HEAD : part; /* tied */
    const double macs = m->linear ? weights * share : 0;
    w->sums.bytes[to] += bytes * share;
    w->sums.macs[to] += macs;
    if (m->linear)
        w->active += (uint64_t)weights * (part == NBI_ROOF_ROUTED ? o->config->top_k : 1);
    const double per_weight = bytes / weights;
    if (per_weight < 0.75)
        w->sums.fp4[to] += macs;
    else if (per_weight < 1.5)
        w->sums.fp8[to] += macs;
    return NB_OK;
}

/* ---------------------------------------------------------------- cache */

static uint32_t count_full_indexers(const nbi_config *c, uint32_t n_layers)
{
    uint32_t n = 0;
    for (uint32_t i = 0; c->has_indexer && i < n_layers; i++) n += c->layer_full_indexer[i];
    return n;
}

/* Of one layer's cached token: latent (or keys and values), and indexer key. */
static double latent_bytes(const nbi_config *c, nbi_dtype dtype)
{
    nbi_kv_shape s;
    if (c->attention == NBI_ATTENTION_GQA)
        s = nbi_kv_head_shape(dtype, 2 * c->n_kv_heads, c->head_dim);
    else
        s = nbi_kv_latent_shape(dtype, c->kv_lora, c->rope_dim);
    return nbi_kv_position_bytes(&s);
}

static double index_key_bytes(const nbi_config *c, nbi_dtype dtype)
{
    if (!c->has_indexer) return 0;
    const nbi_kv_shape s = nbi_kv_head_shape(dtype, 1, c->index_dim);
    return nbi_kv_position_bytes(&s);
}

double nbi_roof_kv_bytes(const nbi_config *c, nbi_dtype dtype)
{
    const uint32_t n = c->n_layers + c->n_mtp_layers;
    return n * latent_bytes(c, dtype) + count_full_indexers(c, n) * index_key_bytes(c, dtype);
}

/* Share of the cache that a rank holds: heads of GQA are split, latents are not. */
static double cache_share(const nbi_roof_options *o)
{
    const nbi_config *c = o->config;
    if (c->attention == NBI_ATTENTION_MLA) return 1;
    return 1.0 / (c->n_kv_heads < o->tp ? c->n_kv_heads : o->tp);
}

static void add_cache(nbi_roofline *r, const nbi_roof_options *o, double batch)
{
    const nbi_config *c = o->config;
    const double context = cached_tokens(o), share = cache_share(o);
    const double full = count_full_indexers(c, c->n_layers);
    const double seen = c->has_indexer && context > c->index_topk ? c->index_topk : context;
    const double latent = c->n_layers * latent_bytes(c, o->kv_dtype) * share;
    const double keys = full * index_key_bytes(c, o->kv_dtype);
    nbi_roof_cost *read = &r->parts[NBI_ROOF_KV_READ], *write = &r->parts[NBI_ROOF_KV_WRITE];
    const double scored = chooses(o) ? full * context : 0; /* index keys */
    read->bytes = batch * (seen * latent + scored * index_key_bytes(c, o->kv_dtype));
    write->bytes = batch * (latent + keys);
    /* Multiply-adds per head and cached token: scores, then values. */
    const double per_token =
        c->attention == NBI_ATTENTION_MLA ? 2.0 * c->kv_lora + c->rope_dim : 2.0 * c->head_dim;
    read->flops = 2 * batch * c->n_layers * ((double)c->n_heads / o->tp) * seen * per_token;
    const double index_share = o->whole_latents ? 1 : 1.0 / o->tp;
    read->flops += 2 * batch * scored * c->index_heads * c->index_dim * index_share;
}

/* ---------------------------------------------------------------- experts */

static uint64_t next_random(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Distinct experts that `batch` tokens choose, expected, if all are equally likely. */
static double distinct_experts(const nbi_config *c, double batch)
{
    if (!c->n_experts) return 0;
    return c->n_experts * (1 - pow(1 - (double)c->top_k / c->n_experts, batch));
}

/* Distinct experts of the group that has most of them: mean over random routings, always the same
 * ones. */
static double busiest_group(const nbi_config *c, uint32_t ep, uint64_t batch)
{
    const uint64_t per_draw = batch * c->top_k;
    uint64_t draws = DRAWN_IDS_MAX / (per_draw ? per_draw : 1);
    if (draws > DRAWS) draws = DRAWS;
    if (draws < 16 || c->n_experts > 4096) return distinct_experts(c, (double)batch) / ep;
    uint64_t state = 1;
    double sum = 0;
    for (uint64_t d = 0; d < draws; d++) {
        uint64_t hit[4096 / 64] = {0};
        uint32_t in_group[4096] = {0}, most = 0;
        for (uint64_t b = 0; b < batch; b++) {
            uint64_t own[4096 / 64] = {0};
            for (uint32_t k = 0; k < c->top_k;) {
                const uint32_t e = (uint32_t)(next_random(&state) % c->n_experts);
                if (own[e / 64] >> e % 64 & 1) continue;
                own[e / 64] |= 1ull << e % 64;
                k++;
                if (hit[e / 64] >> e % 64 & 1) continue;
                hit[e / 64] |= 1ull << e % 64;
                const uint32_t n = ++in_group[(uint64_t)e * ep / c->n_experts];
                if (n > most) most = n;
            }
        }
        sum += most;
    }
    return sum / (double)draws;
}

/* ---------------------------------------------------------------- a step */

static double peak_of(const nbi_roof_options *o, const sums *s, nbi_roof_part part)
{
    const nbi_device *d = &o->device;
    const double macs = s->macs[part];
    if (!(macs > 0) || !(d->flops_bf16 > 0)) return d->flops_bf16;
    const double fp4_peak = o->fp4_products && d->flops_fp4 > 0 ? d->flops_fp4 : d->flops_bf16;
    const double fp8_peak = d->flops_fp8 > 0 ? d->flops_fp8 : d->flops_bf16;
    const double fp4 = s->fp4[part] / macs, fp8 = s->fp8[part] / macs;
    return 1 / (fp4 / fp4_peak + fp8 / fp8_peak + (1 - fp4 - fp8) / d->flops_bf16);
}

static void add_collectives(nbi_roofline *r, const nbi_roof_options *o, double batch)
{
    nbi_roof_cost *c = &r->parts[NBI_ROOF_COLLECTIVES];
    const double row = batch * o->config->hidden * BF16_BYTES;
    double calls = 0;
    if (o->tp > 1) {
        const double reductions =
            2.0 * o->config->n_layers + 1; /* two per layer, and the embedding */
        c->bytes += reductions * row * 2 * (o->tp - 1) / o->tp;
        c->bytes += batch * 8 * (o->tp - 1); /* best value and id of each rank's vocabulary */
        calls += reductions + 1;
    }
    c->bytes += (o->pp - 1) * row;
    calls += o->pp - 1;
    c->seconds = calls * o->link_latency;
    if (o->device.link > 0) c->seconds += c->bytes / o->device.link;
}

/* Costs of a step of `batch` sequences. `busiest`: of the fullest expert group, else of a balanced
 * one. */
static void cost_step(nbi_roofline *r, const nbi_roof_options *o, const sums *s, uint64_t batch,
                      bool busiest)
{
    const nbi_config *c = o->config;
    const double b = (double)batch;
    memset(r->parts, 0, sizeof r->parts);
    r->experts_balanced = distinct_experts(c, b) / o->ep;
    r->experts_read = busiest && o->ep > 1 ? busiest_group(c, o->ep, batch) : r->experts_balanced;
    for (int i = 0; i < NBI_ROOF_PART_COUNT; i++) {
        r->parts[i].bytes = s->bytes[i];
        r->parts[i].flops = 2 * s->macs[i] * b;
    }
    /* sums hold 1 / tp of one expert; a rank has tp / ep columns' share of its group's experts. */
    r->parts[NBI_ROOF_ROUTED].bytes *= r->experts_read * o->ep;
    r->parts[NBI_ROOF_ROUTED].flops *= c->top_k;
    if (o->ep > 1 && r->experts_balanced > 0)
        r->parts[NBI_ROOF_ROUTED].flops *= r->experts_read / r->experts_balanced;
    r->parts[NBI_ROOF_EMBEDDING].bytes = b * s->row_bytes;
    add_cache(r, o, b);
    add_collectives(r, o, b);
    memset(&r->step, 0, sizeof r->step);
    for (int i = 0; i < NBI_ROOF_PART_COUNT; i++) {
        nbi_roof_cost *p = &r->parts[i];
        if (i != NBI_ROOF_COLLECTIVES) {
            const double peak = peak_of(o, s, (nbi_roof_part)i);
            const double by_flops = peak > 0 ? p->flops / peak : 0;
            p->seconds = p->bytes / o->device.bandwidth;
            p->by_flops = by_flops > p->seconds;
            if (p->by_flops) p->seconds = by_flops;
            r->step.bytes += p->bytes;
            r->step.flops += p->flops;
        }
        r->step.seconds += p->seconds;
    }
    r->tokens_per_s = b / r->step.seconds;
}

/* True when the operations of a step of this batch take longer than its bytes. */
static bool is_compute_bound(const nbi_roof_options *o, const sums *s, uint64_t batch)
{
    nbi_roofline r;
    cost_step(&r, o, s, batch, false);
    double by_flops = 0;
    for (int i = 0; i < NBI_ROOF_PART_COUNT; i++)
        if (i != NBI_ROOF_COLLECTIVES)
            by_flops += r.parts[i].flops / peak_of(o, s, (nbi_roof_part)i);
    return by_flops > r.step.bytes / o->device.bandwidth;
}

static uint64_t find_compute_batch(const nbi_roof_options *o, const sums *s)
{
    if (!(o->device.flops_bf16 > 0) || !is_compute_bound(o, s, BATCH_MAX)) return 0;
    uint64_t low = 0, high = BATCH_MAX; /* low is not, high is */
    while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        if (is_compute_bound(o, s, middle))
            high = middle;
        else
            low = middle;
    }
    return high;
}

/* ---------------------------------------------------------------- memory */

static void plan_memory(nbi_roofline *r, const nbi_roof_options *o, const double *stage_bytes)
{
    const nbi_config *c = o->config;
    const uint32_t pp = o->pp > 1 ? o->pp : 1;
    for (uint32_t i = 0; i < pp; i++)
        if (stage_bytes[i] > r->weight_bytes) r->weight_bytes = stage_bytes[i];
    /* The fullest stage has ceil(n / pp) layers, and their share of the indexers. */
    const uint32_t n = c->n_layers + c->n_mtp_layers, layers = (n + pp - 1) / pp;
    const double latents = n * latent_bytes(c, o->kv_dtype) * cache_share(o);
    const double keys = count_full_indexers(c, n) * index_key_bytes(c, o->kv_dtype);
    r->kv_bytes_per_token = n ? (latents + keys) * layers / n : 0;
    r->cache_bytes = r->kv_bytes_per_token * o->batch * cached_tokens(o);
    const double room = o->device.memory * o->memory_share - r->weight_bytes;
    if (o->device.memory > 0 && room > 0) {
        const double tokens = room / (r->kv_bytes_per_token * o->batch);
        r->longest_context = tokens < c->max_positions ? (uint64_t)tokens : c->max_positions;
    }
}

static nb_status check(const nbi_roof_options *o, nb_error *err)
{
    if (!(o->device.bandwidth > 0))
        return nbi_fail(err, NB_INVALID, "no device and no bandwidth: name one of them");
    if (!o->tp || !o->ep || !o->pp)
        return nbi_fail(err, NB_INVALID, "tp %u, ep %u, pp %u: expected at least 1", o->tp, o->ep,
                        o->pp);
    if (o->tp % o->ep)
        return nbi_fail(err, NB_INVALID, "ep %u: expected a divisor of tp %u", o->ep, o->tp);
    if (o->ep > 1 && o->ep > o->config->n_experts)
        return nbi_fail(err, NB_INVALID, "ep %u: the model has %u experts", o->ep,
                        o->config->n_experts);
    if (o->pp > o->config->n_layers)
        return nbi_fail(err, NB_INVALID, "pp %u: the model has %u layers", o->pp,
                        o->config->n_layers);
    if (o->config->n_heads % o->tp)
        return nbi_fail(err, NB_INVALID, "tp %u: %u heads cannot be split evenly", o->tp,
                        o->config->n_heads);
    if (!o->batch || o->batch > BATCH_MAX)
        return nbi_fail(err, NB_INVALID, "batch %u: expected 1 to %u", o->batch, BATCH_MAX);
    if (o->context != NBI_ROOF_ALL_WEIGHTS && o->context > o->config->max_positions)
        return nbi_fail(err, NB_INVALID, "context %llu: the model takes %u",
                        (unsigned long long)o->context, o->config->max_positions);
    return NB_OK;
}

nb_status nbi_roofline_run(nbi_roofline *out, const nbi_roof_options *o, nb_error *err)
{
    memset(out, 0, sizeof *out);
    NB_TRY(check(o, err));
    walker w = {.o = o, .stage_bytes = nbi_calloc(o->pp, sizeof *w.stage_bytes)};
    if (!w.stage_bytes) return nbi_fail(err, NB_NO_MEMORY, "no memory for %u stages", o->pp);
    const nb_status st = nbi_modules_walk(o->config, false, add_module, &w, err);
    if (st == NB_OK) {
        cost_step(out, o, &w.sums, o->batch, true);
        out->compute_batch = find_compute_batch(o, &w.sums);
        out->parameters = w.parameters;
        out->active = w.active;
        plan_memory(out, o, w.stage_bytes);
    }
    nbi_free(w.stage_bytes);
    return st;
}
