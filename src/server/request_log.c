/* The request log: ids, counts, times and parameters; content only when it was asked for. */
#include "server/request_log.h"

#include <string.h>

#include "base/clock.h"

static nb_status add_quoted(nbi_buf *line, const char *key, const char *s, size_t n)
{
    NB_TRY(nbi_buf_addf(line, ",\"%s\":", key));
    return nbi_json_quote(line, n ? s : "", n);
}

/* Of one answer. */
static const char *finish_word(const nbi_job *job, const nbi_choice *c)
{
    if (c->done && c->finish == NB_FINISH_STOP) return c->answer.n_calls ? "tool_calls" : "stop";
    if (c->done && c->finish == NB_FINISH_LENGTH) return "length";
    if (c->done && c->finish == NB_FINISH_REPETITION) return "repetition";
    if (c->done && c->finish == NB_FINISH_ERROR) return "error";
    return job->error.http == 500 ? "error" : "abort";
}

/* Of all: the first that is none of the model's own ends, else the first answer's. */
static const char *finish_of(const nbi_job *job)
{
    for (uint32_t i = 0; i < job->n_choices; i++) {
        const nbi_choice *c = &job->choices[i];
        bool own = c->done && (c->finish == NB_FINISH_STOP || c->finish == NB_FINISH_LENGTH ||
                               c->finish == NB_FINISH_REPETITION);
        if (!own) return finish_word(job, c);
    }
    return job->n_choices ? finish_word(job, &job->choices[0]) : "stop";
}

typedef struct sums {
    uint64_t prompt, cached, completion, reasoning;
    uint64_t admitted_ns, first_ns; /* the earliest; 0: none */
    uint64_t submitted_ns;
} sums;

static uint64_t earliest(uint64_t a, uint64_t b)
{
    return !a || (b && b < a) ? b : a;
}

static sums add_up(const nbi_job *job)
{
    sums s = {0};
    for (uint32_t i = 0; i < job->n_prompts; i++) s.prompt += job->prompts[i].n_ids;
    for (uint32_t i = 0; i < job->n_choices; i++) {
        const nbi_choice *c = &job->choices[i];
        nb_request_times t = {0};
        s.completion += c->n_tokens;
        if (c->has_reasoning) s.reasoning += c->n_reasoning;
        if (!c->request) continue;
        if (i % job->per_prompt == 0) s.cached += nb_request_cached_tokens(c->request);
        nb_request_get_times(c->request, &t);
        s.submitted_ns = earliest(s.submitted_ns, t.submitted_ns);
        s.admitted_ns = earliest(s.admitted_ns, t.admitted_ns);
        s.first_ns = earliest(s.first_ns, t.first_token_ns);
    }
    return s;
}

/* Milliseconds, or null when the end was not reached. */
static nb_status add_ms(nbi_buf *line, const char *key, uint64_t from, uint64_t to)
{
    if (!to) return nbi_buf_addf(line, ",\"%s\":null", key);
    return nbi_buf_addf(line, ",\"%s\":%.3f", key, to > from ? (double)(to - from) / 1e6 : 0.0);
}

static nb_status add_params(nbi_buf *line, const nbi_params *p)
{
    const nb_sampling *s = &p->sampling;
    NB_TRY(nbi_buf_addf(line, ",\"params\":{\"stream\":%s,\"n\":%u,\"max_tokens\":",
                        p->stream ? "true" : "false", p->n));
    NB_TRY(p->has_max_tokens ? nbi_buf_addf(line, "%u", p->max_tokens)
                             : nbi_buf_addf(line, "null"));
    NB_TRY(nbi_buf_addf(line,
                        ",\"temperature\":%.6g,\"top_p\":%.6g,\"top_k\":%d,\"min_p\":%.6g,"
                        "\"frequency_penalty\":%.6g,\"presence_penalty\":%.6g,"
                        "\"repetition_penalty\":%.6g,\"seed\":",
                        (double)s->temperature, (double)s->top_p, s->top_k, (double)s->min_p,
                        (double)s->frequency_penalty, (double)s->presence_penalty,
                        (double)s->repetition_penalty));
    NB_TRY(s->has_seed ? nbi_buf_addf(line, "%llu", (unsigned long long)s->seed)
                       : nbi_buf_addf(line, "null"));
    return nbi_buf_addf(line, ",\"stop\":%u,\"ignore_eos\":%s}", s->n_stop_strings + s->n_stop_ids,
                        s->ignore_eos ? "true" : "false");
}

static nb_status add_prompts(nbi_buf *line, const nbi_job *job)
{
    NB_TRY(nbi_buf_addf(line, ",\"prompts\":["));
    for (uint32_t i = 0; i < job->n_prompts; i++) {
        char *text = NULL;
        size_t n = 0;
        if (i) NB_TRY(nbi_buf_add(line, ",", 1));
        if (nb_detokenize(job->served->engine, job->prompts[i].ids, job->prompts[i].n_ids, false,
                          &text, &n, NULL) != NB_OK) {
            NB_TRY(nbi_buf_addf(line, "null")); /* a model without a tokenizer */
            continue;
        }
        nb_status status = nbi_json_quote(line, text, n);
        nb_free(text);
        NB_TRY(status);
    }
    return nbi_buf_add(line, "]", 1);
}

static nb_status add_content(nbi_buf *line, const nbi_job *job)
{
    NB_TRY(add_prompts(line, job));
    NB_TRY(nbi_buf_addf(line, ",\"answers\":["));
    for (uint32_t i = 0; i < job->n_choices; i++) {
        const nbi_buf *whole = &job->choices[i].whole;
        if (i) NB_TRY(nbi_buf_add(line, ",", 1));
        NB_TRY(nbi_json_quote(line, whole->len ? whole->data : "", whole->len));
    }
    return nbi_buf_add(line, "]", 1);
}

nb_status nbi_request_line(const nbi_exchange *ex, bool content, nbi_buf *line)
{
    const nbi_job *job = ex->job;
    const char *model = job->served->facts.names[0], *path = ex->trace.path;
    const char *id_prefix = job->surface->id_prefix ? job->surface->id_prefix : "";
    sums s = add_up(job);
    NB_TRY(nbi_trace_time(line));
    NB_TRY(nbi_buf_addf(line, ",\"request_id\":\"%s\",\"id\":\"%s%s\"", ex->trace.id, id_prefix,
                        job->id));
    NB_TRY(add_quoted(line, "endpoint", path, strlen(path)));
    NB_TRY(add_quoted(line, "model", model, strlen(model)));
    NB_TRY(nbi_buf_addf(line,
                        ",\"prompt_tokens\":%llu,\"cached_tokens\":%llu,"
                        "\"completion_tokens\":%llu,\"reasoning_tokens\":%llu,"
                        "\"finish_reason\":\"%s\",\"status\":%u",
                        (unsigned long long)s.prompt, (unsigned long long)s.cached,
                        (unsigned long long)s.completion, (unsigned long long)s.reasoning,
                        finish_of(job), ex->trace.status ? ex->trace.status : 499));
    NB_TRY(add_ms(line, "queue_ms", s.submitted_ns, s.admitted_ns));
    NB_TRY(add_ms(line, "ttft_ms", job->begin_ns, s.first_ns));
    NB_TRY(add_ms(line, "total_ms", job->begin_ns, nbi_now_ns()));
    NB_TRY(add_params(line, &job->params));
    if (content) NB_TRY(add_content(line, job));
    return nbi_buf_add(line, "}", 1);
}
