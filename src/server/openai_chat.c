/* POST /v1/chat/completions: messages in; reasoning, content and tool calls out.
 *
 * Fields beside the shared ones: those of messages.h, logprobs and top_logprobs,
 * separate_reasoning, include_reasoning, echo, input_ids and return_prompt_text. Called through
 * nbi_surface_chat by job.c. */
#include <string.h>

#include "server/generate.h"
#include "server/prompts.h"

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
    job->params.n_logprobs = on ? (int32_t)top : -1;
    return nbi_params_read_openai(&job->params, body, job->facts, e);
}

/* vLLM's: when the last message is the assistant's, the answer begins with it. */
static nb_status read_echo(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    bool echo = false;
    const json_t *messages = json_object_get(job->chat, "messages");
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const char *role = json_string_value(json_object_get(last, "role"));
    const char *content = json_string_value(json_object_get(last, "content"));
    NB_TRY(nbi_field_bool(&echo, body, "", "echo", e));
    if (!echo || !role || strcmp(role, "assistant") != 0 || !content) return NB_OK;
    job->echo_text = nbi_arena_strndup(&job->arena, content, strlen(content));
    return job->echo_text ? NB_OK : nbi_api_no_memory(e, "this request");
}

/* SGLang's: the prompt as it is, in place of what the template would make of the messages. */
static nb_status check_ids(const nbi_job *job, const json_t *body, nbi_api_error *e)
{
    const json_t *ids = nbi_field(body, "input_ids");
    if (!ids) return NB_OK;
    if (!json_is_array(ids) || (json_array_size(ids) && nbi_prompts_are_batch(ids))) {
        return nbi_api_field(e, "input_ids", "expected an array of token ids, found %s",
                             json_is_array(ids) ? "an array of others" : nbi_json_kind(ids));
    }
    return nbi_prompts_check(ids, "input_ids", job->facts, e);
}

static nb_status encode(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    const json_t *ids = nbi_field(body, "input_ids");
    return ids ? nbi_job_encode_ids(job, ids, e) : nbi_job_encode_chat(job, body, e);
}

static nb_status read(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    bool stream_reasoning = true;
    job->separate_reasoning = job->include_reasoning = true;
    NB_TRY(nbi_params_read(&job->params, body, job->facts, 1, e));
    NB_TRY(nbi_structured_read(&job->constraint, &job->arena, body, "", e));
    NB_TRY(read_logprobs(job, body, e));
    NB_TRY(nbi_field_bool(&job->separate_reasoning, body, "", "separate_reasoning", e));
    NB_TRY(nbi_field_bool(&job->include_reasoning, body, "", "include_reasoning", e));
    NB_TRY(nbi_field_bool(&stream_reasoning, body, "", "stream_reasoning", e));
    job->whole_reasoning = !stream_reasoning;
    NB_TRY(nbi_field_bool(&job->params.return_prompt_text, body, "", "return_prompt_text", e));
    NB_TRY(nbi_job_read_chat(job, body, e));
    NB_TRY(check_ids(job, body, e));
    return read_echo(job, body, e);
}

/* ---------------------------------------------------------------- whole reply */

/* Under both names that clients read. */
static nb_status write_reasoning(nbi_buf *out, const char *s, size_t n)
{
    NB_TRY(nbi_job_write_string(out, "\"reasoning_content\":", s, n));
    return nbi_job_write_string(out, ",\"reasoning\":", s, n);
}

static nb_status write_logprobs(nbi_choice *c, bool wanted, nbi_buf *out)
{
    NB_TRY(nbi_buf_add(out, ",\"logprobs\":", 12));
    if (!wanted) return nbi_buf_add(out, "null", 4);
    return nbi_logprobs_write(&c->logprobs, NBI_LOGPROBS_CHAT, out);
}

/* All pieces of a kind, joined. */
static nb_status join(nbi_buf *out, const nbi_answer *a, nbi_piece_kind kind)
{
    for (size_t i = 0; i < a->n_pieces; i++) {
        const nbi_piece *p = &a->pieces[i];
        if (p->kind == kind) NB_TRY(nbi_buf_add(out, nbi_piece_text(a, p), p->n));
    }
    return NB_OK;
}

/* `,"tool_calls":[...]`; nothing without calls. */
static nb_status write_calls(const nbi_answer *a, nbi_buf *out)
{
    nb_status status = NB_OK;
    nbi_buf args = {0};
    if (!a->n_calls) return NB_OK;
    NB_TRY(nbi_buf_addf(out, ",\"tool_calls\":["));
    for (size_t i = 0; i < a->n_pieces && status == NB_OK; i++) {
        const nbi_piece *p = &a->pieces[i];
        if (p->kind == NBI_PIECE_CALL) {
            NB_TRY_OR(status,
                      nbi_buf_addf(out, "%s{\"id\":\"%s\",\"type\":\"function\",\"function\":{",
                                   p->call ? "," : "", p->id),
                      done);
            status = nbi_job_write_string(out, "\"name\":", nbi_piece_text(a, p), p->n);
            nbi_buf_clear(&args);
        } else if (p->kind == NBI_PIECE_ARGS) {
            status = nbi_buf_add(&args, nbi_piece_text(a, p), p->n);
        } else if (p->kind == NBI_PIECE_END) {
            NB_TRY_OR(status, nbi_job_write_string(out, ",\"arguments\":", args.data, args.len),
                      done);
            status = nbi_buf_add(out, "}}", 2);
        }
    }
    if (status == NB_OK) status = nbi_buf_add(out, "]", 1);
done:
    nbi_buf_free(&args);
    return status;
}

static nb_status write_message(const nbi_job *job, const nbi_choice *c, nbi_buf *text, nbi_buf *out)
{
    NB_TRY(join(text, &c->answer, NBI_PIECE_CONTENT));
    if (text->len || !c->answer.n_calls) {
        NB_TRY(nbi_job_write_string(out, "\"content\":", text->data, text->len));
    } else {
        NB_TRY(nbi_buf_addf(out, "\"content\":null"));
    }
    NB_TRY(nbi_buf_add(out, ",\"refusal\":null,", 16));
    if (c->has_reasoning && job->include_reasoning) {
        nbi_buf_clear(text);
        NB_TRY(join(text, &c->answer, NBI_PIECE_THINKING));
        NB_TRY(write_reasoning(out, text->data, text->len));
    } else {
        NB_TRY(nbi_buf_addf(out, "\"reasoning_content\":null,\"reasoning\":null"));
    }
    return write_calls(&c->answer, out);
}

/* Not with thinking that is to be left out, as vLLM has it. */
static bool shows_ids(const nbi_job *job)
{
    return job->include_reasoning || job->served->reasoning == NBI_REASONING_NONE;
}

static nb_status write_choice(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    nbi_buf text = {0};
    NB_TRY(nbi_buf_addf(out, "{\"index\":%u,\"message\":{\"role\":\"assistant\",", c->index));
    nb_status status = write_message(job, c, &text, out);
    nbi_buf_free(&text);
    NB_TRY(status);
    NB_TRY(nbi_buf_add(out, "}", 1));
    NB_TRY(write_logprobs(c, job->params.n_logprobs >= 0, out));
    NB_TRY(nbi_job_write_finish(job, c, true, out));
    if (job->params.return_prompt_ids) NB_TRY(nbi_job_write_prompt_ids(job, c, out));
    if (shows_ids(job)) NB_TRY(nbi_job_write_ids(job, c, out));
    if (job->params.return_meta) NB_TRY(nbi_generate_write_meta(job, c, out));
    return nbi_buf_add(out, "}", 1);
}

static nb_status write_prompt(const nbi_job *job, const nbi_choice *c, nbi_buf *out)
{
    const nbi_prompt *prompt = &job->prompts[0];
    if (job->params.return_ids) NB_TRY(nbi_job_write_prompt_ids(job, c, out));
    if (!job->params.return_prompt_text) return NB_OK;
    return nbi_job_write_string(out, ",\"prompt_text\":", prompt->text, prompt->n_text);
}

/* Of the one prompt, so they stand beside the choices. */
static nb_status write_extra(nbi_job *job, nbi_buf *out)
{
    nbi_logprobs *lp = &job->choices[0].prompt_logprobs;
    NB_TRY(write_prompt(job, &job->choices[0], out));
    if (job->params.n_prompt_logprobs < 0) return NB_OK;
    NB_TRY(nbi_buf_addf(out, ",\"prompt_logprobs\":"));
    return nbi_logprobs_write(lp, NBI_LOGPROBS_PROMPT, out);
}

/* ---------------------------------------------------------------- stream */

static nb_status begin_event(const nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    return nbi_job_write_lead(job, c, "\"delta\":{", out);
}

/* Closes the delta. The first event after tokens carries their log-probabilities and ids. */
static nb_status end_event(const nbi_job *job, nbi_choice *c, bool last, nbi_buf *out)
{
    NB_TRY(nbi_buf_add(out, "}", 1));
    NB_TRY(write_logprobs(c, c->logprobs.n > 0, out));
    NB_TRY(nbi_job_write_finish(job, c, last, out));
    if (shows_ids(job)) NB_TRY(nbi_job_write_ids(job, c, out));
    NB_TRY(nbi_buf_add(out, "}]", 2));
    return nbi_job_write_tail(job, c, out);
}

static nb_status write_role(const nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    static const char role[] = "\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                               "\"finish_reason\":null";
    NB_TRY(begin_event(job, c, out));
    NB_TRY(nbi_buf_add(out, role, sizeof role - 1));
    if (job->params.return_prompt_ids) NB_TRY(nbi_job_write_prompt_ids(job, c, out));
    NB_TRY(nbi_buf_add(out, "}]", 2));
    NB_TRY(write_prompt(job, c, out));
    return nbi_job_write_tail(job, c, out);
}

/* The delta of one piece. The first of a call has its id and name. */
static nb_status write_piece(const nbi_answer *a, const nbi_piece *p, nbi_buf *out)
{
    const char *text = nbi_piece_text(a, p);
    if (p->kind == NBI_PIECE_THINKING) return write_reasoning(out, text, p->n);
    if (p->kind == NBI_PIECE_CONTENT) return nbi_job_write_string(out, "\"content\":", text, p->n);
    NB_TRY(nbi_buf_addf(out, "\"tool_calls\":[{\"index\":%u,", p->call));
    if (p->kind == NBI_PIECE_CALL) {
        NB_TRY(nbi_buf_addf(out, "\"id\":\"%s\",\"type\":\"function\",\"function\":{", p->id));
        NB_TRY(nbi_job_write_string(out, "\"name\":", text, p->n));
        return nbi_buf_addf(out, ",\"arguments\":\"\"}}]");
    }
    NB_TRY(nbi_job_write_string(out, "\"function\":{\"arguments\":", text, p->n));
    return nbi_buf_addf(out, "}}]");
}

static nb_status write_pieces(const nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    const nbi_answer *a = &c->answer;
    for (size_t i = 0; i < a->n_pieces; i++) {
        const nbi_piece *p = &a->pieces[i];
        if (p->kind == NBI_PIECE_END) continue;
        if (p->kind == NBI_PIECE_THINKING && !job->include_reasoning) continue;
        NB_TRY(begin_event(job, c, out));
        NB_TRY(write_piece(a, p, out));
        NB_TRY(end_event(job, c, false, out));
    }
    return NB_OK;
}

/* Log-probabilities without text wait for the next text or the end. */
static nb_status write_rest(const nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    if (!c->done || !c->logprobs.n) return NB_OK;
    NB_TRY(begin_event(job, c, out));
    NB_TRY(nbi_job_write_string(out, "\"content\":", "", 0));
    return end_event(job, c, false, out);
}

static nb_status write_delta(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    if (!c->opened) {
        NB_TRY(write_role(job, c, out));
        c->opened = true;
    }
    NB_TRY(write_pieces(job, c, out));
    nbi_answer_clear(&c->answer);
    NB_TRY(write_rest(job, c, out));
    if (!c->done) return NB_OK;
    NB_TRY(begin_event(job, c, out));
    return end_event(job, c, true, out);
}

const nbi_surface nbi_surface_chat = {
    .id_prefix = "chatcmpl-",
    .object = "chat.completion",
    .chunk_object = "chat.completion.chunk",
    .beams = true,
    .shows_abort = true,
    .logprob_shape = NBI_LOGPROBS_CHAT,
    .prompt_logprob_shape = NBI_LOGPROBS_PROMPT,
    .prompt_field = "messages",
    .read = read,
    .encode = encode,
    .begin = nbi_job_begin_chat,
    .take = nbi_job_take_chat,
    .write_delta = write_delta,
    .write_choice = write_choice,
    .write_extra = write_extra,
};
