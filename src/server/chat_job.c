/* What the chat surfaces share: prompts from messages, answers taken apart. Called through their
 * tables by job.c. */
#include <string.h>

#include "base/json.h"
#include "server/job.h"
#include "server/messages.h"
#include "server/prompts.h"
#include "text/tool_choice.h"

/* The grammar of calls that have to come. */
static nb_status force_calls(nbi_job *job, const nbi_tool_choice *choice, nbi_api_error *e)
{
    json_t *schema = nbi_tool_choice_schema(choice);
    char *text = schema ? nbi_json_dumps(schema) : NULL;
    size_t n = text ? strlen(text) : 0;
    const char *source = text ? nbi_arena_strndup(&job->arena, text, n) : NULL;
    json_decref(schema);
    nbi_free(text);
    if (!source) return nbi_api_no_memory(e, "the tools");
    job->forced_calls = true;
    job->constraint = (nbi_constraint){
        .field = "tool_choice", .kind = NBI_GRAMMAR_JSON_SCHEMA, .source = source, .n_source = n};
    return NB_OK;
}

/* Does the constraint speak of the content alone, which calls have none of? */
static bool is_format(const char *field)
{
    static const char *const formats[] = {"response_format", "text.format", "output_format",
                                          "output_config.format"};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (strncmp(field, formats[i], strlen(formats[i])) == 0) return true;
    }
    return false;
}

nb_status nbi_job_read_chat(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    const char *field = job->surface->prompt_field;
    char tool_field[96];
    nbi_tool_choice choice;
    nb_error err = {0};
    NB_TRY(nbi_chat_request_read(&job->chat, body, e));
    nb_status status = nbi_tool_choice_read(&choice, body, tool_field, &err);
    if (status != NB_OK) return nbi_api_from(e, status, &err, tool_field);
    job->one_call = !choice.parallel;
    job->tools = json_incref(json_object_get(job->chat, "tools"));
    if (nbi_tool_choice_is_forced(&choice)) {
        const char *other = job->constraint.field;
        if (other && !is_format(other))
            return nbi_api_field(e, other,
                                 "cannot be combined with a tool_choice that forces calls");
        NB_TRY(force_calls(job, &choice, e));
    }
    if (job->facts->has_chat) return NB_OK;
    return nbi_api_field(e, field, "this model cannot chat: %s", job->facts->no_chat);
}

/* Templates without thinking close it in the prompt. */
static bool ends_thinking(const char *text, size_t n)
{
    static const char close[] = "</think>";
    const size_t n_close = sizeof close - 1;
    while (n && (unsigned char)text[n - 1] <= ' ') n--;
    return n >= n_close && memcmp(text + n - n_close, close, n_close) == 0;
}

/* What is to be known of the prompt's text. */
static bool keep_text(nbi_job *job, const char *text, size_t n)
{
    nbi_prompt *prompt = job->prompts;
    job->thinking_closed = ends_thinking(text, n);
    if (!job->params.return_prompt_text) return true;
    prompt->text = nbi_arena_strndup(&job->arena, n ? text : "", n);
    prompt->n_text = n;
    return prompt->text;
}

nb_status nbi_job_encode_chat(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    nbi_chat_prompt rendered = {0};
    (void)body;
    NB_TRY(nbi_served_encode_chat(job->served, job->chat, job->surface->prompt_field,
                                  nbi_prompts_max_ids(job), &rendered, e));
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
    bool kept = prompt && ids && keep_text(job, rendered.text.data, rendered.text.len);
    nbi_chat_prompt_free(&rendered);
    return kept ? NB_OK : nbi_api_no_memory(e, "the prompt");
}

nb_status nbi_job_encode_ids(nbi_job *job, const json_t *value, nbi_api_error *e)
{
    nb_error err = {0};
    char *text = NULL;
    size_t n = 0;
    NB_TRY(nbi_prompts_encode(job, value, "input_ids", e));
    nb_status status = nb_detokenize(job->served->engine, job->prompts->ids, job->prompts->n_ids,
                                     false, &text, &n, &err);
    if (status != NB_OK) return nbi_api_from(e, status, &err, "input_ids");
    job->starts_in_reasoning = nbi_reasoning_prompt_open(job->served->reasoning, text, n);
    bool kept = keep_text(job, text, n);
    nb_free(text);
    return kept ? NB_OK : nbi_api_no_memory(e, "the prompt");
}

nb_status nbi_job_begin_chat(nbi_job *job, nbi_choice *c)
{
    nbi_tool_form form = job->forced_calls ? NBI_TOOL_FORM_JSON : job->served->tool_form;
    /* forced calls begin behind the thinking, so that it has to be told apart */
    bool split = job->separate_reasoning || job->forced_calls;
    nbi_reasoning_kind kind = split ? job->served->reasoning : NBI_REASONING_NONE;
    nbi_reasoning_init(&c->splitter, kind, job->starts_in_reasoning);
    NB_TRY(nbi_answer_init(&c->answer, form, job->tools, job->one_call, NULL));
    c->answer.calls_only = job->forced_calls; /* what is no call is a piece of the list of calls */
    c->answer.thinking_whole = job->whole_reasoning;
    if (!job->echo_text) return NB_OK;
    return nbi_answer_add_content(&c->answer, job->echo_text, strlen(job->echo_text));
}

nb_status nbi_job_take_chat(nbi_job *job, nbi_choice *c, const nb_event *event)
{
    (void)job;
    size_t before = c->answer.n_pieces;
    NB_TRY(nbi_answer_take(&c->answer, &c->splitter, event));
    for (size_t i = before ? before - 1 : 0; i < c->answer.n_pieces; i++) {
        if (c->answer.pieces[i].kind == NBI_PIECE_THINKING) c->has_reasoning = true;
    }
    return NB_OK;
}
