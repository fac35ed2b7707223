/* Replies and stream events of /generate. Called through nbi_surface_generate by job.c. */
#include <string.h>

#include "base/clock.h"
#include "server/generate.h"

/* ---------------------------------------------------------------- meta_info */

/* {"type": "stop" | "length" | "abort", ...}, or null while the answer goes on. */
static nb_status write_finish(const nbi_job *job, const nbi_choice *c, nbi_buf *out)
{
    NB_TRY(nbi_buf_addf(out, ",\"finish_reason\":"));
    if (!c->done) return nbi_buf_add(out, "null", 4);
    if (c->finish == NB_FINISH_LENGTH) {
        return nbi_buf_addf(out, "{\"type\":\"length\",\"length\":%u}", c->n_tokens);
    }
    if (c->finish == NB_FINISH_REPETITION)
        return nbi_buf_addf(out, "{\"type\":\"stop\",\"matched\":null}");
    if (c->finish == NB_FINISH_CANCELLED) {
        return nbi_buf_addf(out, "{\"type\":\"abort\",\"message\":\"the request was aborted\","
                                 "\"status_code\":null,\"err_type\":null}");
    }
    if (c->matched_string < 0) {
        return nbi_buf_addf(out, "{\"type\":\"stop\",\"matched\":%d}", c->matched_id);
    }
    const char *stop = nbi_job_matched_stop(job, c);
    NB_TRY(nbi_job_write_string(out, "{\"type\":\"stop\",\"matched\":", stop, strlen(stop)));
    return nbi_buf_add(out, "}", 1);
}

static nb_status write_array(nbi_buf *out, const char *key, const nbi_buf *items)
{
    NB_TRY(nbi_buf_addf(out, ",\"%s\":[", key));
    NB_TRY(nbi_buf_add(out, items->data ? items->data : "", items->len));
    return nbi_buf_add(out, "]", 1);
}

static nb_status write_logprobs(const nbi_generate *g, const nbi_logprobs *prompt,
                                const nbi_logprobs *answer, nbi_buf *out)
{
    if (!g->logprobs) return NB_OK;
    NB_TRY(write_array(out, "input_token_logprobs", &prompt->tokens));
    NB_TRY(write_array(out, "output_token_logprobs", &answer->tokens));
    if (g->has_ids) {
        NB_TRY(write_array(out, "input_token_ids_logprobs", &prompt->tops));
        return write_array(out, "output_token_ids_logprobs", &answer->tops);
    }
    if (!g->n_top) return NB_OK;
    NB_TRY(write_array(out, "input_top_logprobs", &prompt->tops));
    return write_array(out, "output_top_logprobs", &answer->tops);
}

static nb_status write_id(const nbi_job *job, const nbi_choice *c, nbi_buf *out)
{
    const char *id = job->names ? job->names[c->prompt] : job->name ? job->name : job->id;
    return nbi_job_write_string(out, "\"id\":", id, strlen(id));
}

static nb_status write_meta(const nbi_job *job, const nbi_choice *c, const nbi_generate *g,
                            const nbi_logprobs *prompt, const nbi_logprobs *answer, nbi_buf *out)
{
    NB_TRY(nbi_buf_addf(out, "\"meta_info\":{"));
    NB_TRY(write_id(job, c, out));
    NB_TRY(write_finish(job, c, out));
    NB_TRY(nbi_buf_addf(out,
                        ",\"prompt_tokens\":%zu,\"completion_tokens\":%u,\"cached_tokens\":%u,"
                        "\"weight_version\":\"default\"",
                        job->prompts[c->prompt].n_ids, c->n_tokens,
                        nb_request_cached_tokens(c->request)));
    NB_TRY(write_logprobs(g, prompt, answer, out));
    if (c->done) {
        NB_TRY(nbi_buf_addf(out, ",\"e2e_latency\":%.6f",
                            (double)(nbi_now_ns() - job->begin_ns) / 1e9));
    }
    return nbi_buf_add(out, "}", 1);
}

nb_status nbi_generate_write_meta(const nbi_job *job, const nbi_choice *c, nbi_buf *out)
{
    const nbi_params *p = &job->params;
    const nbi_logprobs none = {0};
    const nbi_generate g = {.logprobs = p->n_logprobs >= 0,
                            .n_top = p->n_logprobs,
                            .has_ids = p->sampling.n_logprob_ids > 0};
    NB_TRY(nbi_buf_add(out, ",", 1));
    return write_meta(job, c, &g, &none, &c->native, out);
}

/* ---------------------------------------------------------------- answers */

/* The members of an answer, without the braces around them. */
static nb_status write_answer(const nbi_job *job, const nbi_choice *c, nbi_buf *out)
{
    NB_TRY(nbi_job_write_string(out, "\"text\":", c->text.data, c->text.len));
    NB_TRY(write_array(out, "output_ids", &c->ids));
    NB_TRY(nbi_buf_add(out, ",", 1));
    return write_meta(job, c, job->state, &c->prompt_logprobs, &c->logprobs, out);
}

nb_status nbi_generate_write_delta(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    const nbi_generate *g = job->state;
    if (!c->done && c->n_shown == c->n_tokens) return NB_OK;
    c->n_shown = c->n_tokens;
    NB_TRY(nbi_buf_addf(out, "data: {"));
    if (g->as_list) NB_TRY(nbi_buf_addf(out, "\"index\":%u,", c->index));
    NB_TRY(write_answer(job, c, out));
    NB_TRY(nbi_buf_addf(out, "}\n\n"));
    if (!g->incremental) return NB_OK;
    nbi_buf_clear(&c->text);
    nbi_buf_clear(&c->ids);
    nbi_logprobs_clear(&c->logprobs);
    nbi_logprobs_clear(&c->prompt_logprobs);
    return NB_OK;
}

nb_status nbi_generate_write_reply(nbi_job *job, nbi_buf *out)
{
    const nbi_generate *g = job->state;
    if (g->as_list) NB_TRY(nbi_buf_add(out, "[", 1));
    for (uint32_t i = 0; i < job->n_choices; i++) {
        NB_TRY(nbi_buf_add(out, i ? ",{" : "{", i ? 2 : 1));
        NB_TRY(write_answer(job, &job->choices[i], out));
        NB_TRY(nbi_buf_add(out, "}", 1));
    }
    return g->as_list ? nbi_buf_add(out, "]", 1) : NB_OK;
}
