/* POST /v1/completions: text or token ids in, text out.
 *
 * Fields beside the shared ones: prompt, echo, logprobs, best_of, suffix (refused), max_tokens (16
 * when absent, as everywhere). Called through nbi_surface_completions by job.c. */
#include "server/generate.h"
#include "server/prompts.h"

#define MAX_TOKENS_DEFAULT 16u

/* ---------------------------------------------------------------- read */

static nb_status read(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    const nbi_api_facts *facts = job->facts;
    const char *suffix = "";
    int64_t logprobs = -1;
    nbi_params *p = &job->params;
    NB_TRY(nbi_params_read(p, body, facts, 0, e));
    NB_TRY(nbi_structured_read(&job->constraint, &job->arena, body, "", e));
    NB_TRY(nbi_field_bool(&job->echo, body, "", "echo", e));
    NB_TRY(nbi_field_int(&logprobs, body, "", "logprobs", 0, NB_TOP_LOGPROBS_MAX, e));
    NB_TRY(nbi_field_str(&suffix, body, "", "suffix", e));
    if (suffix[0]) return nbi_api_field(e, "suffix", "not supported by this server");
    if (!p->has_max_tokens) {
        p->has_max_tokens = true;
        p->max_tokens = p->sampling.min_tokens > MAX_TOKENS_DEFAULT ? p->sampling.min_tokens
                                                                    : MAX_TOKENS_DEFAULT;
    }
    if (p->max_tokens == 0 && !job->echo && p->n_prompt_logprobs < 0) {
        return nbi_api_field(e, p->max_tokens_field,
                             "0 gives an answer only with \"echo\" or \"prompt_logprobs\"");
    }
    p->n_logprobs = (int32_t)logprobs;
    if (p->beams && job->echo && logprobs >= 0)
        return nbi_api_field(e, "echo", "not together with \"use_beam_search\" and \"logprobs\"");
    NB_TRY(nbi_params_read_openai(p, body, facts, e));
    NB_TRY(nbi_prompts_check(nbi_field(body, "prompt"), "prompt", facts, e));
    if (!json_is_array(nbi_field(body, "rid"))) return NB_OK;
    NB_TRY(nbi_generate_read_rids(job, nbi_field(body, "rid"), nbi_field(body, "prompt"), e));
    job->name = job->names[0]; /* of the reply */
    return NB_OK;
}

static nb_status encode(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    return nbi_prompts_encode(job, nbi_field(body, "prompt"), "prompt", e);
}

/* ---------------------------------------------------------------- answers */

static nb_status begin(nbi_job *job, nbi_choice *c)
{
    const nbi_prompt *prompt = &job->prompts[c->prompt];
    return job->echo ? nbi_buf_add(&c->text, prompt->text, prompt->n_text) : NB_OK;
}

static nb_status take(nbi_job *job, nbi_choice *c, const nb_event *event)
{
    (void)job;
    return nbi_buf_add(&c->text, event->text, event->n_text);
}

/* What follows `"text":`; in a stream the first has the prompt. */
static nb_status write_rest(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    NB_TRY(nbi_json_quote(out, c->text.data ? c->text.data : "", c->text.len));
    NB_TRY(nbi_buf_add(out, ",\"logprobs\":", 12));
    if (c->logprobs.n) {
        NB_TRY(nbi_logprobs_write(&c->logprobs, NBI_LOGPROBS_COMPLETIONS, out));
    } else {
        NB_TRY(nbi_buf_add(out, "null", 4));
    }
    if (job->params.n_prompt_logprobs >= 0) {
        NB_TRY(nbi_buf_addf(out, ",\"prompt_logprobs\":"));
        NB_TRY(nbi_logprobs_write(&c->prompt_logprobs, NBI_LOGPROBS_PROMPT, out));
    }
    NB_TRY(nbi_job_write_finish(job, c, c->done, out));
    if (!c->opened && (job->params.return_ids || job->params.return_prompt_ids))
        NB_TRY(nbi_job_write_prompt_ids(job, c, out));
    c->opened = true;
    NB_TRY(nbi_job_write_ids(job, c, out));
    if (job->params.return_meta) NB_TRY(nbi_generate_write_meta(job, c, out));
    return nbi_buf_add(out, "}", 1);
}

/* {"index":..,"text":..,"logprobs":..,"finish_reason":..} */
static nb_status write_choice(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    NB_TRY(nbi_buf_addf(out, "{\"index\":%u,\"text\":", c->index));
    return write_rest(job, c, out);
}

static nb_status write_delta(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    if (!c->text.len && !c->logprobs.n && !c->ids.len && !c->done) return NB_OK;
    NB_TRY(nbi_job_write_lead(job, c, "\"text\":", out));
    NB_TRY(write_rest(job, c, out));
    nbi_buf_clear(&c->text);
    NB_TRY(nbi_buf_add(out, "]", 1));
    return nbi_job_write_tail(job, c, out);
}

const nbi_surface nbi_surface_completions = {
    .id_prefix = "cmpl-",
    .object = "text_completion",
    .chunk_object = "text_completion",
    .ranks = true,
    .ranked_as_one = true,
    .beams = true,
    .shows_abort = true,
    .logprob_shape = NBI_LOGPROBS_COMPLETIONS,
    .prompt_logprob_shape = NBI_LOGPROBS_PROMPT,
    .read = read,
    .encode = encode,
    .begin = begin,
    .take = take,
    .write_delta = write_delta,
    .write_choice = write_choice,
};
