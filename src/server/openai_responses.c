/* POST /v1/responses: the response object.
 *
 * Fields: those of nbi_responses_chat(), model, max_output_tokens, temperature, top_p, stream,
 * metadata (repeated), and the sampling fields that every surface here takes. store, include,
 * truncation, service_tier and the like have no effect. Called through nbi_surface_responses by
 * job.c. */
#include "server/openai_responses.h"

#include <stdio.h>
#include <string.h>

/* ---------------------------------------------------------------- read */

static nb_status read_fields(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    nbi_params *p = &job->params;
    int64_t max_tokens = -1, top_logprobs = 0;
    json_t *ignored = NULL;
    NB_TRY(nbi_params_read(p, body, job->facts, 1, e));
    NB_TRY(nbi_params_refuse_openai(body, e));
    if (p->n != 1) return nbi_api_field(e, "n", "one answer is all that this API gives");
    NB_TRY(nbi_field_int(&max_tokens, body, "", "max_output_tokens", 1, UINT32_MAX, e));
    if (max_tokens >= 0) {
        p->has_max_tokens = true;
        p->max_tokens = (uint32_t)max_tokens;
        p->max_tokens_field = "max_output_tokens";
        if (p->sampling.min_tokens > p->max_tokens) {
            return nbi_api_field(e, "min_tokens", "%u is more than max_output_tokens, %u",
                                 p->sampling.min_tokens, p->max_tokens);
        }
    }
    NB_TRY(nbi_field_int(&top_logprobs, body, "", "top_logprobs", 0, NB_TOP_LOGPROBS_MAX, e));
    if (top_logprobs) return nbi_api_field(e, "top_logprobs", "not supported by this server");
    NB_TRY(nbi_field_object(&ignored, body, "", "metadata", e));
    return nbi_field_array(&ignored, body, "", "include", e);
}

/* `key`, then the member of the request, or `absent`. */
static nb_status echo(nbi_buf *out, const char *key, const json_t *value, const char *absent)
{
    NB_TRY(nbi_buf_add(out, key, strlen(key)));
    if (!value) return nbi_buf_add(out, absent, strlen(absent));
    return nbi_json_dump(out, value);
}

static nb_status write_echo(const nbi_job *job, const json_t *body, nbi_buf *out)
{
    const nbi_params *p = &job->params;
    const json_t *reasoning = nbi_field(body, "reasoning");
    const json_t *format = nbi_field(nbi_field(body, "text"), "format");
    NB_TRY(echo(out, ",\"instructions\":", nbi_field(body, "instructions"), "null"));
    NB_TRY(echo(out, ",\"metadata\":", nbi_field(body, "metadata"), "{}"));
    NB_TRY(echo(out, ",\"tools\":", nbi_field(body, "tools"), "[]"));
    NB_TRY(echo(out, ",\"tool_choice\":", nbi_field(body, "tool_choice"), "\"auto\""));
    NB_TRY(echo(out, ",\"user\":", nbi_field(body, "user"), "null"));
    NB_TRY(echo(out, ",\"reasoning\":{\"effort\":", nbi_field(reasoning, "effort"), "null"));
    NB_TRY(nbi_buf_addf(out, ",\"summary\":null},\"max_output_tokens\":"));
    NB_TRY(p->has_max_tokens ? nbi_buf_addf(out, "%u", p->max_tokens) : nbi_buf_addf(out, "null"));
    NB_TRY(echo(out, ",\"text\":{\"format\":", format, "{\"type\":\"text\"}"));
    return nbi_buf_addf(out,
                        "},\"parallel_tool_calls\":%s,\"temperature\":%.7g,\"top_p\":%.7g,"
                        "\"truncation\":\"disabled\","
                        "\"previous_response_id\":null,\"store\":false,\"background\":false,"
                        "\"top_logprobs\":0",
                        job->one_call ? "false" : "true", (double)p->sampling.temperature,
                        (double)p->sampling.top_p);
}

static nb_status make_state(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    nbi_responses_state *s = nbi_arena_alloc(&job->arena, sizeof *s);
    nbi_buf text = {0};
    if (!s) return nbi_api_no_memory(e, "this request");
    if (write_echo(job, body, &text) == NB_OK) {
        s->echo = nbi_arena_strndup(&job->arena, text.data, text.len);
    }
    nbi_buf_free(&text);
    job->state = s;
    return s->echo ? NB_OK : nbi_api_no_memory(e, "this request");
}

static nb_status read(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    json_t *chat = NULL;
    job->separate_reasoning = job->include_reasoning = true;
    NB_TRY(read_fields(job, body, e));
    NB_TRY(nbi_structured_read(&job->constraint, &job->arena, body, "", e));
    NB_TRY(nbi_structured_add_format(&job->constraint, &job->arena,
                                     nbi_field(nbi_field(body, "text"), "format"), "text.format",
                                     e));
    NB_TRY(nbi_responses_chat(&chat, body, e));
    nb_status status = nbi_job_read_chat(job, chat, e);
    json_decref(chat);
    return status == NB_OK ? make_state(job, body, e) : status;
}

/* ---------------------------------------------------------------- items */

static bool begins_item(const nbi_piece *p)
{
    return p->kind == NBI_PIECE_THINKING || p->kind == NBI_PIECE_CONTENT ||
           p->kind == NBI_PIECE_CALL;
}

/* Only the last item can have been cut. */
static const char *item_status(const nbi_job *job, size_t i)
{
    const nbi_choice *c = &job->choices[0];
    if (c->done && c->finish == NB_FINISH_STOP) return "completed";
    for (size_t k = i + 1; k < c->answer.n_pieces; k++) {
        if (begins_item(&c->answer.pieces[k])) return "completed";
    }
    return "incomplete";
}

nb_status nbi_responses_write_id(const nbi_job *job, const char *key, size_t i, uint32_t index,
                                 nbi_buf *out)
{
    nbi_piece_kind kind = job->choices[0].answer.pieces[i].kind;
    const char *prefix = kind == NBI_PIECE_THINKING  ? "rs"
                         : kind == NBI_PIECE_CONTENT ? "msg"
                                                     : "fc";
    return nbi_buf_addf(out, "\"%s\":\"%s_%s_%u\"", key, prefix, job->id, index);
}

nb_status nbi_responses_write_part(nbi_piece_kind kind, const char *text, size_t n, nbi_buf *out)
{
    bool content = kind == NBI_PIECE_CONTENT;
    NB_TRY(nbi_buf_addf(out, "{\"type\":\"%s\",", content ? "output_text" : "reasoning_text"));
    NB_TRY(nbi_job_write_string(out, "\"text\":", text, n));
    if (content) NB_TRY(nbi_buf_addf(out, ",\"annotations\":[],\"logprobs\":[]"));
    return nbi_buf_add(out, "}", 1);
}

/* An item with the first n bytes of its text or arguments. */
static nb_status write_item(const nbi_job *job, size_t i, uint32_t index, const char *status,
                            bool empty, nbi_buf *out)
{
    const nbi_answer *a = &job->choices[0].answer;
    const nbi_piece *p = &a->pieces[i];
    const char *text = nbi_piece_text(a, p);
    NB_TRY(nbi_buf_add(out, "{", 1));
    NB_TRY(nbi_responses_write_id(job, "id", i, index, out));
    NB_TRY(nbi_buf_addf(out, ",\"status\":\"%s\"", status));
    if (p->kind == NBI_PIECE_CALL) {
        bool has_args = !empty && i + 1 < a->n_pieces && a->pieces[i + 1].kind == NBI_PIECE_ARGS;
        const nbi_piece *args = has_args ? &a->pieces[i + 1] : NULL;
        NB_TRY(nbi_buf_addf(out, ",\"type\":\"function_call\",\"call_id\":\"%s\"", p->id));
        NB_TRY(nbi_job_write_string(out, ",\"name\":", text, p->n));
        NB_TRY(nbi_job_write_string(out, ",\"arguments\":", args ? nbi_piece_text(a, args) : "",
                                    args ? args->n : 0));
        return nbi_buf_add(out, "}", 1);
    }
    NB_TRY(nbi_buf_addf(out, p->kind == NBI_PIECE_CONTENT
                                 ? ",\"type\":\"message\",\"role\":\"assistant\",\"content\":["
                                 : ",\"type\":\"reasoning\",\"summary\":[],\"content\":["));
    if (!empty) NB_TRY(nbi_responses_write_part(p->kind, text, p->n, out));
    return nbi_buf_add(out, "]}", 2);
}

nb_status nbi_responses_write_item(const nbi_job *job, size_t i, uint32_t index, nbi_buf *out)
{
    return write_item(job, i, index, item_status(job, i), false, out);
}

nb_status nbi_responses_write_new_item(const nbi_job *job, size_t i, uint32_t index, nbi_buf *out)
{
    return write_item(job, i, index, "in_progress", true, out);
}

/* ---------------------------------------------------------------- the response */

const char *nbi_responses_status(const nbi_job *job)
{
    if (job->error.http) return "failed";
    return job->choices[0].finish == NB_FINISH_STOP ? "completed" : "incomplete";
}

static nb_status write_output(const nbi_job *job, nbi_buf *out)
{
    const nbi_answer *a = &job->choices[0].answer;
    uint32_t index = 0;
    for (size_t i = 0; i < a->n_pieces; i++) {
        if (!begins_item(&a->pieces[i])) continue;
        if (index) NB_TRY(nbi_buf_add(out, ",", 1));
        NB_TRY(nbi_responses_write_item(job, i, index++, out));
    }
    return NB_OK;
}

static nb_status write_usage(const nbi_job *job, nbi_buf *out)
{
    const nbi_choice *c = &job->choices[0];
    size_t n = job->prompts[0].n_ids;
    return nbi_buf_addf(out,
                        "{\"input_tokens\":%zu,\"input_tokens_details\":{\"cached_tokens\":%u,"
                        "\"cache_write_tokens\":0},\"output_tokens\":%u,"
                        "\"output_tokens_details\":{\"reasoning_tokens\":%u},\"total_tokens\":%zu}",
                        n, nb_request_cached_tokens(c->request), c->n_tokens,
                        c->has_reasoning ? c->n_reasoning : 0, n + c->n_tokens);
}

static nb_status write_error(const nbi_job *job, nbi_buf *out)
{
    const char *message = job->error.message;
    if (!job->error.http) return nbi_buf_addf(out, ",\"error\":null");
    NB_TRY(nbi_buf_addf(out, ",\"error\":{\"code\":\"server_error\""));
    NB_TRY(nbi_job_write_string(out, ",\"message\":", message, strlen(message)));
    return nbi_buf_add(out, "}", 1);
}

nb_status nbi_responses_write(const nbi_job *job, const char *status, bool output, nbi_buf *out)
{
    const nbi_responses_state *s = job->state;
    const char *name = job->facts->names[0];
    bool cut = strcmp(status, "incomplete") == 0;
    NB_TRY(nbi_buf_addf(out,
                        "{\"id\":\"resp_%s\",\"object\":\"response\",\"created_at\":%lld,"
                        "\"status\":\"%s\"",
                        job->id, (long long)job->created, status));
    NB_TRY(write_error(job, out));
    NB_TRY(nbi_buf_addf(out, ",\"incomplete_details\":%s",
                        cut ? "{\"reason\":\"max_output_tokens\"}" : "null"));
    NB_TRY(nbi_job_write_string(out, ",\"model\":", name, strlen(name)));
    NB_TRY(nbi_buf_add(out, s->echo, strlen(s->echo)));
    NB_TRY(nbi_buf_addf(out, ",\"output\":["));
    if (output) NB_TRY(write_output(job, out));
    NB_TRY(nbi_buf_addf(out, "],\"usage\":"));
    NB_TRY(output ? write_usage(job, out) : nbi_buf_addf(out, "null"));
    return nbi_buf_add(out, "}", 1);
}

static nb_status write_reply(nbi_job *job, nbi_buf *out)
{
    return nbi_responses_write(job, nbi_responses_status(job), true, out);
}

const nbi_surface nbi_surface_responses = {
    .id_prefix = "resp_",
    .object = "response",
    .chunk_object = "response",
    .prompt_field = "input",
    .read = read,
    .encode = nbi_job_encode_chat,
    .begin = nbi_job_begin_chat,
    .take = nbi_job_take_chat,
    .write_delta = nbi_responses_write_delta,
    .write_reply = write_reply,
    .write_end = nbi_responses_write_end,
};
