/* GET or POST /health_generate: a token is generated, by this request or, when it has to wait for
 * its turn, by those in front of it. Called through nbi_surface_health by job.c. */
#include <stdio.h>

#include "base/clock.h"
#include "server/job.h"

#define LIMIT_MS 20000u /* without a token: the answer is 503 */

typedef struct state {
    uint64_t steps; /* of the engine when this began */
    bool busy;      /* it works, but on others */
} state;

static nb_status read(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    nb_engine_stats stats;
    state *s = nbi_arena_alloc(&job->arena, sizeof *s);
    (void)body;
    if (!s) return nbi_api_no_memory(e, "this request");
    nb_engine_get_stats(job->served->engine, &stats);
    s->steps = stats.n_steps;
    job->state = s;
    job->count = NB_COUNT_NONE;
    job->params.sampling = job->facts->defaults;
    job->params.sampling.ignore_eos = true;
    job->params.n = job->params.best_of = 1;
    job->params.has_max_tokens = true;
    job->params.max_tokens = 1;
    job->params.n_logprobs = job->params.n_prompt_logprobs = -1;
    job->params.max_tokens_field = "max_tokens";
    return NB_OK;
}

static nb_status encode(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    nbi_prompt *prompt = nbi_arena_alloc(&job->arena, sizeof *prompt);
    int32_t *ids = nbi_arena_alloc(&job->arena, sizeof *ids);
    (void)body;
    if (!prompt || !ids) return nbi_api_no_memory(e, "this request");
    ids[0] = job->served->info.n_eos ? job->served->info.eos_ids[0] : 0;
    *prompt = (nbi_prompt){.ids = ids, .n_ids = 1};
    job->prompts = prompt;
    job->n_prompts = 1;
    return NB_OK;
}

static nb_status begin(nbi_job *job, nbi_choice *c)
{
    (void)job;
    (void)c;
    return NB_OK;
}

static nb_status take(nbi_job *job, nbi_choice *c, const nb_event *event)
{
    (void)job;
    (void)c;
    (void)event;
    return NB_OK;
}

/* A full queue is no fault: whoever waits sees that steps are made. One that runs must end. */
static void tick(nbi_job *job)
{
    state *s = job->state;
    nbi_choice *c = &job->choices[0];
    nb_request_times times;
    nb_engine_stats stats;
    nbi_api_error e = {0};
    uint64_t age_ms = (nbi_now_ns() - job->begin_ns) / 1000000;
    nb_engine_get_stats(job->served->engine, &stats);
    nb_request_get_times(c->request, &times);
    if (!times.admitted_ns && stats.n_steps != s->steps) {
        s->busy = true;
        c->done = true;
        job->n_done++;
    } else if (age_ms >= LIMIT_MS) {
        nbi_api_fail(&e, 503, "no_token", NULL, "no token was generated within %u s",
                     LIMIT_MS / 1000);
        nbi_job_fail(job, &e);
    }
}

static nb_status write_reply(nbi_job *job, nbi_buf *out)
{
    const state *s = job->state;
    return nbi_buf_addf(out,
                        "{\"status\":\"ok\",\"state\":\"ready\",\"generated_tokens\":%u,"
                        "\"busy\":%s,\"ms\":%.3f}",
                        job->choices[0].n_tokens, s->busy ? "true" : "false",
                        (double)(nbi_now_ns() - job->begin_ns) / 1e6);
}

const nbi_surface nbi_surface_health = {
    .id_prefix = "health-",
    .object = "health",
    .bodyless = true,
    .read = read,
    .encode = encode,
    .begin = begin,
    .take = take,
    .tick = tick,
    .write_reply = write_reply,
};
