/* The grammars of a job's answers: made at once when they are known, else ordered. Called by job.c.
 */
#include <string.h>

#include "server/job.h"

/* Cloning a known grammar is quick, but not for hundreds of answers. */
#define AT_ONCE_MAX 4u

/* Thinking goes on as it likes and the grammar begins behind it. Where tools may be called, a call
 * may come instead of the text. */
static nbi_grammar_options options_for(const nbi_job *job)
{
    nbi_grammar_options o = {.after_think = -1};
    bool thinks = job->prompts && job->served->reasoning != NBI_REASONING_NONE &&
                  job->surface->logprob_shape == NBI_LOGPROBS_CHAT && !job->thinking_closed;
    int32_t call = nbi_job_call_token(job), close = nbi_job_find_token(job, "</think>"),
            open = nbi_job_find_token(job, "<think>");
    if (json_array_size(job->tools) && !job->forced_calls && call >= 0) {
        o.may_call = true;
        o.call_begin = call;
    } else if (call >= 0 && call != close) {
        o.banned[o.n_banned++] = call;
    }
    if (job->starts_in_reasoning) {
        o.after_think = close;
    } else if (thinks && close >= 0 && open >= 0) {
        o.after_think = close;
        o.may_think = true;
        o.think_begin = open;
    }
    return o;
}

static nb_status refuse(const nbi_job *job, nb_status status, const nb_error *err, nbi_api_error *e)
{
    nbi_api_from(e, status, err, job->constraint.field);
    if (e->http != 400) return NB_INTERNAL;
    return nbi_api_field(e, job->constraint.field, "%s", err->text);
}

/* From what is kept; *known false: an order has to be given. */
static nb_status make_now(nbi_job *job, const nbi_grammar_options *options, bool *known,
                          nbi_api_error *e)
{
    const nbi_constraint *c = &job->constraint;
    nb_error err = {0};
    *known = job->n_choices <= AT_ONCE_MAX;
    for (uint32_t i = 0; i < job->n_choices && *known; i++) {
        nb_status status =
            nbi_grammar_recall(&job->choices[i].grammar, known, job->served->grammars, c->kind,
                               c->source, c->n_source, options, &err);
        if (status != NB_OK) return refuse(job, status, &err, e);
    }
    for (uint32_t i = 0; i < job->n_choices && !*known; i++)
        nbi_grammar_close(&job->choices[i].grammar); /* it has gone meanwhile */
    return NB_OK;
}

nb_status nbi_job_make_grammars(nbi_job *job, nbi_api_error *e)
{
    const nbi_constraint *c = &job->constraint;
    nb_error err = {0};
    bool known;
    if (!c->field) return NB_OK;
    if (!job->served->grammars) return nbi_api_field(e, c->field, "%s", job->served->no_grammars);
    const nbi_grammar_options options = options_for(job);
    NB_TRY(make_now(job, &options, &known, e));
    if (known) return NB_OK;
    nb_status status =
        nbi_grammar_order_open(&job->order, job->served->grammars, c->kind, c->source, c->n_source,
                               &options, job->n_choices, job->hooks.notify, job->hooks.user, &err);
    return status == NB_OK ? NB_OK : refuse(job, status, &err, e);
}

nb_status nbi_job_take_grammars(nbi_job *job, nbi_api_error *e)
{
    nb_error err = {0};
    nbi_grammar **grammars = nbi_calloc(job->n_choices, sizeof *grammars);
    nb_status status = grammars ? nbi_grammar_order_take(job->order, grammars, &err)
                                : nbi_fail(&err, NB_NO_MEMORY, "no memory for this request");
    for (uint32_t i = 0; status == NB_OK && i < job->n_choices; i++)
        job->choices[i].grammar = grammars[i];
    nbi_free(grammars);
    nbi_grammar_order_close(&job->order);
    return status == NB_OK ? NB_OK : refuse(job, status, &err, e);
}
