/* The MoE runner's part of timing (backend/timing.h): while a step is timed, the model calls a copy
 * of a runner whose `run` is measured, for every number of rows. Callers: bench, engine/profile.c.
 */
#include "model/layer.h"

static void timed_run(nbi_backend *b, const nbi_moe_layer *layer, const nbi_moe_args *args)
{
    nbi_timing *t = b->timing;
    const nbi_moe_table *own = nbi_timing_experts_begin(t);
    nbi_moe_table_runner(own, args->n_rows)->run(b, layer, args);
    nbi_timing_experts_end(t, args->n_rows);
}

nb_status nbi_model_timing_create(nbi_timing **out, nbi_model *m, nb_error *err)
{
    NB_TRY(nbi_timing_create(out, m->b, err));
    if (!m->runner) return NB_OK;
    m->timed_runner = *m->runner;
    m->timed_runner.run = timed_run;
    nbi_moe_table_one(&m->timed_table, &m->timed_runner);
    nbi_timing_experts(*out, m->config.n_experts, m->oea_k0 ? m->oea_k0 : m->config.top_k,
                       m->expert_bytes, m->shared_bytes, m->n_layers, &m->moe_table);
    return NB_OK;
}

void nbi_model_time_begin(nbi_model *m, nbi_timing *timing)
{
    if (m->runner) m->table_now = &m->timed_table;
    nbi_timing_step_begin(timing);
}

void nbi_model_time_end(nbi_model *m, nbi_timing *timing, uint32_t n_rows, bool decode)
{
    nbi_timing_step_end(timing, n_rows, decode);
    m->table_now = &m->moe_table;
}

void nbi_model_time_cancel(nbi_model *m, nbi_timing *timing)
{
    nbi_timing_step_cancel(timing);
    m->table_now = &m->moe_table;
}
