/* POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.
 *
 * Fields: those of anthropic.h, model, max_tokens (required), stop_sequences, temperature, top_p,
 * top_k, stream, and the sampling fields that every surface here takes. Called through
 * nbi_surface_messages and nbi_surface_count_tokens by job.c.
 *
 * In a stream pieces become content blocks, one open at a time. The signature of a thinking block
 * is a digest of its text; nothing checks it when it comes back. */
#include "server/anthropic.h"

#include <stdio.h>
#include <string.h>

#include "server/job.h"

#define DIGEST_BEGIN 0xcbf29ce484222325u /* FNV-1a, 64 bits */
#define DIGEST_PRIME 0x100000001b3u

typedef struct messages_state {
    uint32_t n_blocks;
    bool is_open;
    nbi_piece_kind open; /* THINKING, CONTENT, CALL */
    uint64_t digest;     /* of the open thinking */
} messages_state;

/* ---------------------------------------------------------------- read */

static nb_status read_stop_sequences(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    nb_sampling *s = &job->params.sampling;
    json_t *list = NULL;
    const json_t *value;
    size_t i;
    NB_TRY(nbi_field_array(&list, body, "", "stop_sequences", e));
    if (!list) return NB_OK;
    json_array_foreach(list, i, value)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "stop_sequences[%zu]", i);
        if (!json_is_string(value)) {
            return nbi_api_field(e, param, "expected a string, found %s", nbi_json_kind(value));
        }
        if (!json_string_length(value)) return nbi_api_field(e, param, "is empty");
        if (s->n_stop_strings == NB_STOP_STRINGS_MAX) {
            return nbi_api_field(e, "stop_sequences", "more than %d", NB_STOP_STRINGS_MAX);
        }
        s->stop_strings[s->n_stop_strings++] = json_string_value(value);
    }
    return NB_OK;
}

/* thinking.budget_tokens, which nbi_anthropic_chat() has checked, where nothing nearer to the model
 * is said and the model's thinking has an end that can be forced. Clients send it to any model. */
static void set_budget(nbi_job *job, const json_t *body)
{
    nb_sampling *s = &job->params.sampling;
    const json_t *thinking = nbi_field(body, "thinking");
    const char *type = json_string_value(nbi_field(thinking, "type"));
    if (s->has_think_budget || !type || strcmp(type, "enabled") != 0) return;
    if (!nbi_job_can_end_thinking(job)) return;
    s->has_think_budget = true;
    s->think_budget = (uint32_t)json_number_value(nbi_field(thinking, "budget_tokens"));
}

static nb_status read_prompt(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    json_t *chat = NULL;
    job->separate_reasoning = job->include_reasoning = true;
    NB_TRY(nbi_params_read(&job->params, body, job->facts, 1, e));
    NB_TRY(nbi_params_refuse_openai(body, e));
    NB_TRY(nbi_structured_read(&job->constraint, &job->arena, body, "", e));
    NB_TRY(nbi_structured_add_format(&job->constraint, &job->arena,
                                     nbi_field(body, "output_format"), "output_format", e));
    NB_TRY(nbi_structured_add_format(&job->constraint, &job->arena,
                                     nbi_field(nbi_field(body, "output_config"), "format"),
                                     "output_config.format", e));
    NB_TRY(nbi_anthropic_chat(&chat, body, e));
    set_budget(job, body);
    nb_status status = nbi_job_read_chat(job, chat, e);
    json_decref(chat);
    return status;
}

static nb_status read_count(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    NB_TRY(read_prompt(job, body, e));
    job->params.stream = false; /* there is one number to say */
    return NB_OK;
}

static nb_status read(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    NB_TRY(read_prompt(job, body, e));
    if (!nbi_field(body, "max_tokens")) return nbi_api_field(e, "max_tokens", "is missing");
    if (job->params.n != 1) return nbi_api_field(e, "n", "one answer is all that this API gives");
    NB_TRY(read_stop_sequences(job, body, e));
    job->state = nbi_arena_alloc(&job->arena, sizeof(messages_state));
    return job->state ? NB_OK : nbi_api_no_memory(e, "this request");
}

/* ---------------------------------------------------------------- parts of replies */

static uint64_t digest(uint64_t h, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)text[i]) * DIGEST_PRIME;
    return h;
}

/* Prompt tokens that were found in the cache are counted apart, as the API has it. */
static nb_status write_usage(const nbi_job *job, const nbi_choice *c, nbi_buf *out)
{
    uint32_t cached = nb_request_cached_tokens(c->request);
    return nbi_buf_addf(out,
                        "\"usage\":{\"input_tokens\":%zu,\"cache_creation_input_tokens\":0,"
                        "\"cache_read_input_tokens\":%u,\"output_tokens\":%u,"
                        "\"output_tokens_details\":{\"thinking_tokens\":%u},"
                        "\"service_tier\":\"standard\"}",
                        job->prompts[0].n_ids - cached, cached, c->n_tokens,
                        c->has_reasoning ? c->n_reasoning : 0);
}

static nb_status write_stop(const nbi_job *job, const nbi_choice *c, nbi_buf *out)
{
    if (c->finish == NB_FINISH_STOP && c->matched_string >= 0) {
        const char *text = nbi_job_matched_stop(job, c);
        NB_TRY(nbi_buf_addf(out, "\"stop_reason\":\"stop_sequence\","));
        return nbi_job_write_string(out, "\"stop_sequence\":", text, strlen(text));
    }
    const char *reason = c->finish != NB_FINISH_STOP ? "max_tokens"
                         : c->answer.n_calls         ? "tool_use"
                                                     : "end_turn";
    return nbi_buf_addf(out, "\"stop_reason\":\"%s\",\"stop_sequence\":null", reason);
}

/* `"id":...,"model":...,` */
static nb_status write_identity(const nbi_job *job, nbi_buf *out)
{
    const char *name = job->facts->names[0];
    NB_TRY(nbi_buf_addf(out, "\"id\":\"msg_%s\",\"type\":\"message\",\"role\":\"assistant\",",
                        job->id));
    NB_TRY(nbi_job_write_string(out, "\"model\":", name, strlen(name)));
    return nbi_buf_add(out, ",", 1);
}

/* `"id":...,"name":...`: the parser's id under the prefix of this API. */
static nb_status write_tool_use(const nbi_answer *a, const nbi_piece *p, nbi_buf *out)
{
    NB_TRY(
        nbi_buf_addf(out, "{\"type\":\"tool_use\",\"id\":\"toolu_%s\",", p->id + strlen("call_")));
    return nbi_job_write_string(out, "\"name\":", nbi_piece_text(a, p), p->n);
}

/* ---------------------------------------------------------------- whole reply */

static nb_status write_block(const nbi_answer *a, const nbi_piece *p, nbi_buf *out)
{
    const char *text = nbi_piece_text(a, p);
    switch (p->kind) {
    case NBI_PIECE_THINKING:
        NB_TRY(nbi_job_write_string(out, "{\"type\":\"thinking\",\"thinking\":", text, p->n));
        return nbi_buf_addf(out, ",\"signature\":\"%016llx\"}",
                            (unsigned long long)digest(DIGEST_BEGIN, text, p->n));
    case NBI_PIECE_CONTENT:
        NB_TRY(nbi_job_write_string(out, "{\"type\":\"text\",\"text\":", text, p->n));
        return nbi_buf_addf(out, ",\"citations\":null}");
    case NBI_PIECE_CALL: NB_TRY(write_tool_use(a, p, out)); return nbi_buf_addf(out, ",\"input\":");
    case NBI_PIECE_ARGS: return nbi_buf_add(out, text, p->n);
    case NBI_PIECE_END: return nbi_buf_add(out, "}", 1);
    }
    return NB_OK;
}

static nb_status write_reply(nbi_job *job, nbi_buf *out)
{
    const nbi_choice *c = &job->choices[0];
    const nbi_answer *a = &c->answer;
    NB_TRY(nbi_buf_add(out, "{", 1));
    NB_TRY(write_identity(job, out));
    NB_TRY(nbi_buf_addf(out, "\"content\":["));
    for (size_t i = 0; i < a->n_pieces; i++) {
        bool begins = a->pieces[i].kind <= NBI_PIECE_CALL;
        if (i && begins) NB_TRY(nbi_buf_add(out, ",", 1));
        NB_TRY(write_block(a, &a->pieces[i], out));
    }
    NB_TRY(nbi_buf_add(out, "],", 2));
    NB_TRY(write_stop(job, c, out));
    NB_TRY(nbi_buf_add(out, ",", 1));
    NB_TRY(write_usage(job, c, out));
    return nbi_buf_add(out, "}", 1);
}

static nb_status write_count(nbi_job *job, nbi_buf *out)
{
    return nbi_buf_addf(out, "{\"input_tokens\":%zu}", job->prompts[0].n_ids);
}

/* ---------------------------------------------------------------- stream */

/* The event's line and the beginning of its object. */
static nb_status begin_event(nbi_buf *out, const char *type)
{
    return nbi_buf_addf(out, "event: %s\ndata: {\"type\":\"%s\"", type, type);
}

static nb_status end_event(nbi_buf *out)
{
    return nbi_buf_add(out, "}\n\n", 3);
}

static nb_status write_message_start(const nbi_job *job, const nbi_choice *c, nbi_buf *out)
{
    NB_TRY(begin_event(out, "message_start"));
    NB_TRY(nbi_buf_addf(out, ",\"message\":{"));
    NB_TRY(write_identity(job, out));
    NB_TRY(nbi_buf_addf(out, "\"content\":[],\"stop_reason\":null,\"stop_sequence\":null,"));
    NB_TRY(write_usage(job, c, out));
    NB_TRY(nbi_buf_add(out, "}", 1));
    return end_event(out);
}

static nb_status begin_delta(const messages_state *s, nbi_buf *out)
{
    NB_TRY(begin_event(out, "content_block_delta"));
    return nbi_buf_addf(out, ",\"index\":%u,\"delta\":{\"type\":", s->n_blocks - 1);
}

static nb_status close_block(messages_state *s, nbi_buf *out)
{
    if (!s->is_open) return NB_OK;
    s->is_open = false;
    if (s->open == NBI_PIECE_THINKING) {
        NB_TRY(begin_delta(s, out));
        NB_TRY(nbi_buf_addf(out, "\"signature_delta\",\"signature\":\"%016llx\"}",
                            (unsigned long long)s->digest));
        NB_TRY(end_event(out));
    }
    NB_TRY(begin_event(out, "content_block_stop"));
    NB_TRY(nbi_buf_addf(out, ",\"index\":%u", s->n_blocks - 1));
    return end_event(out);
}

static nb_status open_block(messages_state *s, const nbi_answer *a, const nbi_piece *p,
                            nbi_buf *out)
{
    NB_TRY(close_block(s, out));
    s->is_open = true;
    s->open = p->kind;
    s->digest = DIGEST_BEGIN;
    NB_TRY(begin_event(out, "content_block_start"));
    NB_TRY(nbi_buf_addf(out, ",\"index\":%u,\"content_block\":", s->n_blocks++));
    if (p->kind == NBI_PIECE_THINKING) {
        NB_TRY(nbi_buf_addf(out, "{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}"));
    } else if (p->kind == NBI_PIECE_CONTENT) {
        NB_TRY(nbi_buf_addf(out, "{\"type\":\"text\",\"text\":\"\",\"citations\":null}"));
    } else {
        NB_TRY(write_tool_use(a, p, out));
        NB_TRY(nbi_buf_addf(out, ",\"input\":{}}"));
    }
    return end_event(out);
}

static nb_status write_text(messages_state *s, const nbi_answer *a, const nbi_piece *p,
                            nbi_buf *out)
{
    const char *keys[] = {[NBI_PIECE_THINKING] = "\"thinking_delta\",\"thinking\":",
                          [NBI_PIECE_CONTENT] = "\"text_delta\",\"text\":",
                          [NBI_PIECE_ARGS] = "\"input_json_delta\",\"partial_json\":"};
    const char *text = nbi_piece_text(a, p);
    if (p->kind == NBI_PIECE_THINKING) s->digest = digest(s->digest, text, p->n);
    NB_TRY(begin_delta(s, out));
    NB_TRY(nbi_job_write_string(out, keys[p->kind], text, p->n));
    NB_TRY(nbi_buf_add(out, "}", 1));
    return end_event(out);
}

static nb_status write_piece(messages_state *s, const nbi_answer *a, const nbi_piece *p,
                             nbi_buf *out)
{
    switch (p->kind) {
    case NBI_PIECE_CALL: return open_block(s, a, p, out);
    case NBI_PIECE_END: return close_block(s, out);
    case NBI_PIECE_ARGS: return write_text(s, a, p, out);
    case NBI_PIECE_THINKING:
    case NBI_PIECE_CONTENT:
        if (!s->is_open || s->open != p->kind) NB_TRY(open_block(s, a, p, out));
        return write_text(s, a, p, out);
    }
    return NB_OK;
}

static nb_status write_delta(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    messages_state *s = job->state;
    nbi_answer *a = &c->answer;
    if (!c->opened) {
        NB_TRY(write_message_start(job, c, out));
        c->opened = true;
    }
    for (size_t i = 0; i < a->n_pieces; i++) NB_TRY(write_piece(s, a, &a->pieces[i], out));
    nbi_answer_clear(a);
    return c->done ? close_block(s, out) : NB_OK;
}

static nb_status write_error(nbi_buf *out, const nbi_api_error *e);

static nb_status write_end(nbi_job *job, nbi_buf *out)
{
    if (job->error.http) {
        NB_TRY(nbi_buf_addf(out, "event: error\ndata: "));
        NB_TRY(write_error(out, &job->error));
        return nbi_buf_add(out, "\n\n", 2);
    }
    NB_TRY(begin_event(out, "message_delta"));
    NB_TRY(nbi_buf_addf(out, ",\"delta\":{"));
    NB_TRY(write_stop(job, &job->choices[0], out));
    NB_TRY(nbi_buf_add(out, "},", 2));
    NB_TRY(write_usage(job, &job->choices[0], out));
    NB_TRY(end_event(out));
    NB_TRY(begin_event(out, "message_stop"));
    return end_event(out);
}

/* ---------------------------------------------------------------- errors */

static const char *type_of(unsigned http)
{
    switch (http) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 413: return "request_too_large";
    case 429: return "rate_limit_error";
    case 503:
    case 529: return "overloaded_error";
    default: return http >= 500 ? "api_error" : "invalid_request_error";
    }
}

/* The field's name is in the message; `param` beside it is for programs. */
static nb_status write_error(nbi_buf *out, const nbi_api_error *e)
{
    NB_TRY(nbi_buf_addf(out, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",", type_of(e->http)));
    NB_TRY(nbi_job_write_string(out, "\"message\":", e->message, strlen(e->message)));
    if (e->param[0]) {
        NB_TRY(nbi_job_write_string(out, ",\"param\":", e->param, strlen(e->param)));
    }
    return nbi_buf_add(out, "}}", 2);
}

const nbi_surface nbi_surface_messages = {
    .id_prefix = "msg_",
    .object = "message",
    .chunk_object = "message",
    .prompt_field = "messages",
    .read = read,
    .encode = nbi_job_encode_chat,
    .begin = nbi_job_begin_chat,
    .take = nbi_job_take_chat,
    .write_delta = write_delta,
    .write_reply = write_reply,
    .write_end = write_end,
    .write_error = write_error,
};

const nbi_surface nbi_surface_count_tokens = {
    .prompt_field = "messages",
    .count_only = true,
    .read = read_count,
    .encode = nbi_job_encode_chat,
    .write_reply = write_count,
    .write_error = write_error,
};
