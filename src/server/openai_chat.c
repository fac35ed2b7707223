/* POST /v1/chat/completions: messages in, reasoning and content out.
 *
 * Fields beside the shared ones: those of messages.h, logprobs and top_logprobs, separate_reasoning
 * and include_reasoning. Called through nbi_surface_chat by job.c. */
#include <string.h>

#include "server/job.h"
#include "server/messages.h"

/* ---------------------------------------------------------------- read */

static nb_status read_logprobs(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    bool on = false;
    int64_t top = 0;
    NB_TRY(nbi_field_bool(&on, body, "", "logprobs", e));
    NB_TRY(nbi_field_int(&top, body, "", "top_logprobs", 0, NB_TOP_LOGPROBS_MAX, e));
    if (top > 0 && !on) {
        return nbi_api_field(e, "top_logprobs", "only allowed when \"logprobs\" is true");
    }
    job->params.sampling.n_logprobs = on ? (int32_t)top : -1;
    return NB_OK;
}

static nb_status read(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    job->separate_reasoning = job->include_reasoning = true;
    NB_TRY(nbi_params_read(&job->params, body, job->facts, 1, e));
    NB_TRY(read_logprobs(job, body, e));
    NB_TRY(nbi_field_bool(&job->separate_reasoning, body, "", "separate_reasoning", e));
    NB_TRY(nbi_field_bool(&job->include_reasoning, body, "", "include_reasoning", e));
    NB_TRY(nbi_chat_request_read(&job->chat, body, e));
    if (job->facts->has_chat) return NB_OK;
    return nbi_api_field(e, "messages", "this model cannot chat: %s", job->facts->no_chat);
}

static nb_status encode(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    nbi_chat_prompt rendered = {0};
    (void)body;
    NB_TRY(nbi_served_encode_chat(job->served, job->chat, &rendered, e));
    nbi_prompt *prompt = nbi_arena_alloc(&job->arena, sizeof *prompt);
    size_t n = rendered.ids.len;
    int32_t *ids = nbi_arena_alloc(&job->arena, (n + 1) * sizeof *ids);
    if (prompt && ids) {
        if (n) memcpy(ids, rendered.ids.data, n * sizeof *ids);
        *prompt = (nbi_prompt){.ids = ids, .n_ids = n};
        job->prompts = prompt;
        job->n_prompts = 1;
        job->starts_in_reasoning = rendered.thinking_open;
    }
    nbi_chat_prompt_free(&rendered);
    if (prompt && ids) return NB_OK;
    return nbi_api_fail(e, 503, NULL, NULL, "no memory for the prompt");
}

/* ---------------------------------------------------------------- answers */

static nb_status begin(nbi_job *job, nbi_choice *c)
{
    nbi_reasoning_kind kind = job->separate_reasoning ? job->served->reasoning : NBI_REASONING_NONE;
    nbi_reasoning_init(&c->splitter, kind, job->starts_in_reasoning);
    return NB_OK;
}

static nb_status add_spans(nbi_choice *c, const nbi_span *spans, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bool reasoning = spans[i].kind == NBI_SPAN_REASONING;
        NB_TRY(nbi_buf_add(reasoning ? &c->reasoning : &c->text, spans[i].text, spans[i].n));
        c->has_reasoning = c->has_reasoning || reasoning;
    }
    return NB_OK;
}

static nb_status take(nbi_job *job, nbi_choice *c, const nb_event *event)
{
    nbi_span spans[NBI_REASONING_SPANS_MAX];
    bool unclosed = false;
    (void)job;
    size_t n = nbi_reasoning_push(&c->splitter, event->text, event->n_text, spans);
    NB_TRY(add_spans(c, spans, n));
    if (event->finish == NB_FINISH_NONE) return NB_OK;
    n = nbi_reasoning_finish(&c->splitter, event->finish == NB_FINISH_STOP, spans, &unclosed);
    NB_TRY(add_spans(c, spans, n));
    return unclosed ? nbi_buf_add(&c->text, c->reasoning.data, c->reasoning.len) : NB_OK;
}

/* ---------------------------------------------------------------- whole reply */

static nb_status write_string(nbi_buf *out, const char *key, const char *s, size_t n)
{
    NB_TRY(nbi_buf_add(out, key, strlen(key)));
    return nbi_json_quote(out, n ? s : "", n);
}

/* Under both names that clients read. */
static nb_status write_reasoning(nbi_buf *out, const char *s, size_t n)
{
    NB_TRY(write_string(out, "\"reasoning_content\":", s, n));
    return write_string(out, ",\"reasoning\":", s, n);
}

static nb_status write_logprobs(nbi_choice *c, bool wanted, nbi_buf *out)
{
    NB_TRY(nbi_buf_add(out, ",\"logprobs\":", 12));
    if (!wanted) return nbi_buf_add(out, "null", 4);
    return nbi_logprobs_write(&c->logprobs, NBI_LOGPROBS_CHAT, out);
}

static nb_status write_choice(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    NB_TRY(nbi_buf_addf(out, "{\"index\":%u,\"message\":{\"role\":\"assistant\",", c->index));
    NB_TRY(write_string(out, "\"content\":", c->text.data, c->text.len));
    NB_TRY(nbi_buf_add(out, ",\"refusal\":null,", 16));
    if (c->has_reasoning && job->include_reasoning) {
        NB_TRY(write_reasoning(out, c->reasoning.data, c->reasoning.len));
    } else {
        NB_TRY(nbi_buf_addf(out, "\"reasoning_content\":null,\"reasoning\":null"));
    }
    NB_TRY(nbi_buf_add(out, "}", 1));
    NB_TRY(write_logprobs(c, job->params.sampling.n_logprobs >= 0, out));
    NB_TRY(nbi_job_write_finish(job, c, true, out));
    return nbi_buf_add(out, "}", 1);
}

/* ---------------------------------------------------------------- stream */

static nb_status begin_event(const nbi_job *job, const nbi_choice *c, nbi_buf *out)
{
    NB_TRY(nbi_buf_add(out, "data: ", 6));
    NB_TRY(nbi_buf_add(out, job->head.data, job->head.len));
    return nbi_buf_addf(out, "{\"index\":%u,\"delta\":{", c->index);
}

/* Closes the delta. The first event after tokens carries their log-probabilities. */
static nb_status end_event(const nbi_job *job, nbi_choice *c, bool last, nbi_buf *out)
{
    NB_TRY(nbi_buf_add(out, "}", 1));
    NB_TRY(write_logprobs(c, c->logprobs.n > 0, out));
    NB_TRY(nbi_job_write_finish(job, c, last, out));
    NB_TRY(nbi_buf_add(out, "}", 1));
    return nbi_job_write_tail(job, c, out);
}

static nb_status write_role(const nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    static const char role[] = "\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                               "\"finish_reason\":null}";
    NB_TRY(begin_event(job, c, out));
    NB_TRY(nbi_buf_add(out, role, sizeof role - 1));
    return nbi_job_write_tail(job, c, out);
}

/* What was not sent of the reasoning. It is kept while it may still become the answer. */
static nb_status write_reasoning_delta(const nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    size_t n = c->reasoning.len - c->reasoning_sent;
    if (n && job->include_reasoning) {
        NB_TRY(begin_event(job, c, out));
        NB_TRY(write_reasoning(out, c->reasoning.data + c->reasoning_sent, n));
        NB_TRY(end_event(job, c, false, out));
    }
    c->reasoning_sent = c->reasoning.len;
    if (nbi_reasoning_inside(&c->splitter)) return NB_OK;
    nbi_buf_clear(&c->reasoning);
    c->reasoning_sent = 0;
    return NB_OK;
}

/* Content; log-probabilities without text wait for the next text or the end. */
static nb_status write_content_delta(const nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    if (!c->text.len && !(c->done && c->logprobs.n)) return NB_OK;
    NB_TRY(begin_event(job, c, out));
    NB_TRY(write_string(out, "\"content\":", c->text.data, c->text.len));
    nbi_buf_clear(&c->text);
    return end_event(job, c, false, out);
}

static nb_status write_delta(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    if (!c->opened) {
        NB_TRY(write_role(job, c, out));
        c->opened = true;
    }
    NB_TRY(write_reasoning_delta(job, c, out));
    NB_TRY(write_content_delta(job, c, out));
    if (!c->done) return NB_OK;
    NB_TRY(begin_event(job, c, out));
    return end_event(job, c, true, out);
}

const nbi_surface nbi_surface_chat = {
    .id_prefix = "chatcmpl-",
    .object = "chat.completion",
    .chunk_object = "chat.completion.chunk",
    .logprob_shape = NBI_LOGPROBS_CHAT,
    .read = read,
    .encode = encode,
    .begin = begin,
    .take = take,
    .write_delta = write_delta,
    .write_choice = write_choice,
};
