/* The MoE runner's part of timing (backend/timing.h): while a step is timed, the model calls a copy
 * of its runner whose `run` is measured. Callers: bench, engine/profile.c. */
#include "model/layer.h"

static void timed_run(nbi_backend *b, const nbi_moe_layer *layer, const nbi_moe_args *args)
{
    nbi_timing *t = b->timing;
    const nbi_moe_runner_ops *own = nbi_timing_experts_begin(t);
    own->run(b, layer, args);
    nbi_timing_experts_end(t, args->n_rows);
}

nb_status nbi_model_timing_create(nbi_timing **out, nbi_model *m, nb_error *err)
{
    NB_TRY(nbi_timing_create(out, m->b, err));
    m->own_runner = m->runner;
    if (!m->runner) return NB_OK;
    m->timed_runner = *m->runner;
    m->timed_runner.run = timed_run;
    nbi_timing_experts(*out, m->config.n_experts, m->config.top_k, m->expert_bytes, m->n_layers,
                       m->own_runner);
    return NB_OK;
}

void nbi_model_time_begin(nbi_model *m, nbi_timing *timing)
{
    if (m->own_runner) m->runner = &m->timed_runner;
    nbi_timing_step_begin(timing);
}

void nbi_model_time_end(nbi_model *m, nbi_timing *timing, uint32_t n_rows, bool decode)
{
    nbi_timing_step_end(timing, n_rows, decode);
    m->runner = m->own_runner;
}

void nbi_model_time_cancel(nbi_model *m, nbi_timing *timing)
{
    nbi_timing_step_cancel(timing);
    m->runner = m->own_runner;
}
