/* The gate's order of work and what its parts share. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/gate_parts.h"

/* Measured: at most 0.02 with activations in BF16 and with a BF16 cache, 0.003 in FP16. With NVFP4
 * activations a value next to a boundary goes to another code than in double. */
#define BOUND      0.04
#define BOUND_W4A4 0.25

#define MANY_SUMS  20000000u /* about 20 ms of one thread */

nb_status nbi_gate_buffer_open(nbi_gate *g, nbi_gate_buffer *out, size_t bytes, nb_error *err)
{
    nbi_gate_buffer b = {.bytes = bytes ? bytes : 1};
    b.device = g->b->ops->alloc(g->b, b.bytes);
    b.host = nbi_calloc(1, b.bytes);
    if (b.device && b.host) {
        *out = b;
        return NB_OK;
    }
    nbi_gate_buffer_close(g, &b);
    return nbi_fail(err, NB_NO_MEMORY, "check: no memory for a buffer of %zu bytes", bytes);
}

void nbi_gate_buffer_close(nbi_gate *g, nbi_gate_buffer *b)
{
    if (b->device) g->b->ops->release(g->b, b->device, b->bytes);
    nbi_free(b->host);
    *b = (nbi_gate_buffer){0};
}

void nbi_gate_up(nbi_gate *g, const nbi_gate_buffer *b)
{
    g->b->ops->upload(g->b, b->device, b->host, b->bytes);
}

void nbi_gate_down(nbi_gate *g, const nbi_gate_buffer *b)
{
    g->b->ops->download(g->b, b->host, b->device, b->bytes);
}

uint32_t nbi_gate_below(nbi_gate *g, uint32_t n)
{
    g->random = g->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(((g->random >> 32) * n) >> 32);
}

/* The sum of four uniform numbers, from one step of splitmix64. */
float nbi_gate_normal(nbi_gate *g)
{
    uint64_t z = g->random += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    const uint32_t sum = (uint32_t)(z & 0xffff) + (uint32_t)(z >> 16 & 0xffff) +
                         (uint32_t)(z >> 32 & 0xffff) + (uint32_t)(z >> 48);
    return ((float)sum - 2 * 65535.0f) * (1.7320508f / 65536);
}

void nbi_gate_fill(nbi_gate *g, float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = nbi_gate_normal(g);
}

uint32_t nbi_gate_rows(const nbi_gate *g, uint32_t n)
{
    return nbi_gate_least(n, g->m->ws.max_rows);
}

double nbi_gate_error(const float *got, const double *want, size_t n)
{
    double most = 0, square = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double)got[i] - want[i]);
        if (!isfinite(d)) return INFINITY;
        if (d > most) most = d;
        square += want[i] * want[i];
    }
    if (most == 0) return 0;
    return square > 0 ? most / sqrt(square / (double)n) : (double)INFINITY;
}

double nbi_gate_dot(const float *a, const float *b, uint32_t n)
{
    double s[4] = {0};
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (uint32_t k = 0; k < 4; k++) s[k] += (double)a[i + k] * (double)b[i + k];
    for (; i < n; i++) s[0] += (double)a[i] * (double)b[i];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

void nbi_gate_each(nbi_gate *g, nbi_task task, void *arg, uint32_t n, uint32_t grain, uint64_t sums)
{
    nb_error ignored;
    if (!g->pool && sums >= MANY_SUMS && nbi_pool_create(&g->pool, 0, &ignored) != NB_OK)
        g->pool = NULL;
    nbi_pool_run(sums >= MANY_SUMS ? g->pool : NULL, task, arg, n, grain);
}

double nbi_gate_bound(bool w4a4)
{
    return w4a4 ? BOUND_W4A4 : BOUND;
}

void nbi_gate_say(nbi_gate *g, nbi_gate_result *r)
{
    const bool small = r->error <= r->bound; /* false for NaN */
    r->ok = r->supported && small && !r->why[0];
    if (g->opt->each) g->opt->each(g->opt->user, r);
    if (r->ok || !r->chosen || g->failed) return;
    g->failed = true;
    if (r->why[0])
        snprintf(g->failure, sizeof g->failure, "%s %s, %s: %s", r->kind, r->path, r->where,
                 r->why);
    else
        snprintf(g->failure, sizeof g->failure,
                 "%s %s, %s: wrong results on %s: error %.3g, bound %.3g", r->kind, r->path,
                 r->where, g->b->description, r->error, r->bound);
}

nb_status nbi_gate_run(nbi_model *m, const nbi_gate_options *opt, nb_error *err)
{
    nbi_gate g = {.m = m, .b = m->b, .opt = opt, .random = 20251, .pass = 1u << 16};
    if (m->b->act_dtype != NBI_F32)
        return nbi_fail(err, NB_UNSUPPORTED, "check: activations of %s are not of float32",
                        m->b->description);
    nb_status st = nbi_gate_linear(&g, err);
    if (st == NB_OK) st = nbi_gate_mlp(&g, err);
    if (st == NB_OK) st = nbi_gate_attention(&g, err);
    if (st == NB_OK && m->runner) st = nbi_gate_moe(&g, err);
    nbi_pool_destroy(&g.pool);
    if (st == NB_OK) st = m->b->ops->sync(m->b, err);
    if (st == NB_OK && g.failed) return nbi_fail(err, NB_NUMERIC, "%s", g.failure);
    return st;
}
