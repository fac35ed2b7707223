/* What the sampling of a job points to: from the body into the arena. Called by job.c. */
#include <string.h>

#include "server/job.h"

static nb_status keep_stop_strings(nbi_job *job, nbi_api_error *e)
{
    nb_sampling *s = &job->params.sampling;
    for (uint32_t i = 0; i < s->n_stop_strings; i++) {
        s->stop_strings[i] =
            nbi_arena_strndup(&job->arena, s->stop_strings[i], strlen(s->stop_strings[i]));
        if (!s->stop_strings[i]) return nbi_api_no_memory(e, "this request");
    }
    return NB_OK;
}

static nb_status keep_allowed(nbi_job *job, nbi_api_error *e)
{
    const json_t *list = job->params.allowed, *value;
    size_t i, n = json_array_size(list);
    if (!list) return NB_OK;
    int32_t *ids = nbi_arena_alloc(&job->arena, n * sizeof *ids);
    if (!ids) return nbi_api_no_memory(e, "this request");
    json_array_foreach(list, i, value) ids[i] = (int32_t)json_number_value(value);
    job->params.sampling.allowed = ids;
    job->params.sampling.n_allowed = (uint32_t)n;
    job->params.allowed = NULL;
    return NB_OK;
}

nb_status nbi_job_keep_sampling(nbi_job *job, nbi_api_error *e)
{
    NB_TRY(keep_stop_strings(job, e));
    return keep_allowed(job, e);
}
