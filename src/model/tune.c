/* The measurement behind `nibble tune`. */
#include "model/tune.h"

#include <stdio.h>
#include <string.h>

#include "model/gate_parts.h"

#define REPEATS 3u
/* A runner so far behind the best of a bucket is not measured with more rows. */
#define BEHIND     8
#define BEHIND_MIN 0.02 /* seconds */

typedef struct tuning {
    nbi_tune_result *out;
    const nbi_tune_options *opt;
    nbi_model *m;
    const nbi_moe_experts *e;
    bool behind[NBI_TUNE_RUNNERS];
} tuning;

/* Runners that the gate finds right. */
static void take_runner(void *user, const nbi_gate_result *r)
{
    tuning *t = user;
    if (strcmp(r->kind, "runner") != 0 || !r->ok || r->not_run ||
        t->out->n_times == NBI_TUNE_RUNNERS)
        return;
    for (const nbi_moe_runner_ops *const *known = nbi_moe_runners(); *known; known++)
        if (strcmp((*known)->name, r->path) == 0) t->out->times[t->out->n_times++].runner = *known;
}

static uint32_t list_rows(uint32_t *rows, uint32_t max_rows)
{
    uint32_t n = 0;
    for (uint32_t r = 1; n < NBI_MOE_BUCKETS && r <= max_rows; r *= 2) rows[n++] = r;
    return n;
}

static nb_status time_one(tuning *t, nbi_gate *g, uint32_t bucket, uint32_t runner, nb_error *err)
{
    nbi_model *m = t->m;
    nbi_moe_times *at = &t->out->times[runner];
    const nbi_moe_runner_ops *r = at->runner;
    nbi_moe_layer *own = NULL;
    nbi_gate_result result = {.kind = "runner", .supported = true, .ok = true};
    snprintf(result.path, sizeof result.path, "%s", r->name);
    const bool shared = nbi_moe_same_class(r, m->runner);
    if (!shared) NB_TRY(r->prepare(m->b, &own, t->e, err));
    g->random = 20251 + bucket; /* the same routing for every runner */
    const nb_status st =
        nbi_gate_time(g, t->e, r, shared ? m->layers[t->e->layer].moe.prepared : own,
                      t->out->rows[bucket], REPEATS, &result, err);
    r->release(m->b, &own);
    if (st != NB_OK) return st;
    at->seconds[bucket] = result.seconds;
    if (t->opt->each) t->opt->each(t->opt->user, &result);
    return NB_OK;
}

static nb_status time_bucket(tuning *t, nbi_gate *g, uint32_t bucket, nb_error *err)
{
    double best = 0;
    for (uint32_t i = 0; i < t->out->n_times; i++) {
        if (t->behind[i]) continue;
        NB_TRY(time_one(t, g, bucket, i, err));
        const double s = t->out->times[i].seconds[bucket];
        if (best <= 0 || s < best) best = s;
    }
    for (uint32_t i = 0; i < t->out->n_times; i++) {
        const double s = t->out->times[i].seconds[bucket];
        if (s > BEHIND * best && s > BEHIND_MIN) t->behind[i] = true;
    }
    return NB_OK;
}

nb_status nbi_tune_run(nbi_tune_result *out, nbi_model *m, const nbi_tune_options *opt,
                       nb_error *err)
{
    tuning t = {.out = out, .opt = opt, .m = m};
    *out = (nbi_tune_result){0};
    for (uint32_t l = 0; l < m->n_layers && !t.e; l++)
        if (m->layers[l].sparse) t.e = &m->layers[l].moe.experts;
    if (!t.e) return nbi_fail(err, NB_UNSUPPORTED, "the model has no experts: nothing to measure");
    NB_TRY(nbi_gate_run(m,
                        &(nbi_gate_options){.runner = "all",
                                            .brief = true,
                                            .kv_dtype = opt->kv_dtype,
                                            .max_seqs = opt->max_seqs,
                                            .max_context = opt->max_context,
                                            .each = take_runner,
                                            .user = &t},
                        err));
    out->key = nbi_tune_key_of(m->b, &t.e->shape);
    const uint32_t n = list_rows(out->rows, opt->max_rows);
    nbi_gate g = {.m = m, .b = m->b};
    for (uint32_t i = 0; i < n; i++) NB_TRY(time_bucket(&t, &g, i, err));
    if (nbi_moe_table_choose(&out->table, out->times, out->n_times, out->rows, n)) return NB_OK;
    return nbi_fail(err, NB_UNSUPPORTED, "no MoE runner could be measured on %s",
                    m->b->description);
}
