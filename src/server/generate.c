/* POST /generate, SGLang's own API: text or ids in, text and ids out.
 *
 * Fields: text or input_ids (one or many), sampling_params, stream, incremental, return_logprob,
 * logprob_start_len, top_logprobs_num, token_ids_logprob, return_text_in_logprobs, rid, priority.
 * Called through nbi_surface_generate by job.c; the replies are in generate_reply.c. */
#include "server/generate.h"

#include <stdio.h>
#include <string.h>

#include "server/prompts.h"

#define MAX_NEW_TOKENS_DEFAULT 128u

/* ---------------------------------------------------------------- prompts */

/* The value of `text` or `input_ids`, whichever is there, and its name. */
static const json_t *prompt_of(const json_t *body, const char **field)
{
    const json_t *text = nbi_field(body, "text");
    *field = text ? "text" : "input_ids";
    return text ? text : nbi_field(body, "input_ids");
}

/* `text` holds texts and `input_ids` ids, though both are checked alike. */
static nb_status check_kind(const json_t *value, const char *field, nbi_api_error *e)
{
    bool wants_text = strcmp(field, "text") == 0;
    if (wants_text ? !json_is_number(json_array_get(value, 0)) : !json_is_string(value)) {
        return NB_OK;
    }
    return nbi_api_field(e, field, "expected %s",
                         wants_text ? "a string or an array of strings, found token ids"
                                    : "an array of token ids or of such arrays, found a string");
}

static nb_status check_prompt(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    const char *field;
    const json_t *value = prompt_of(body, &field);
    if (!value) {
        return nbi_api_field(e, "text", "is missing, and so is \"input_ids\"");
    }
    if (nbi_field(body, "text") && nbi_field(body, "input_ids")) {
        return nbi_api_field(e, "input_ids", "not allowed beside \"text\"");
    }
    NB_TRY(check_kind(value, field, e));
    NB_TRY(nbi_prompts_check(value, field, job->facts, e));
    if (!nbi_prompts_are_batch(value)) return NB_OK;
    size_t i;
    const json_t *item;
    json_array_foreach(value, i, item)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "%s[%zu]", field, i);
        if (json_is_string(item) == (strcmp(field, "text") == 0)) continue;
        return nbi_api_field(e, param, "expected %s, found %s",
                             field[0] == 't' ? "a string" : "an array of token ids",
                             nbi_json_kind(item));
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- read */

static nb_status refuse_unsupported(const json_t *body, nbi_api_error *e)
{
    static const char *const values[] = {"input_embeds",
                                         "image_data",
                                         "video_data",
                                         "audio_data",
                                         "lora_path",
                                         "session_params",
                                         "custom_logit_processor"};
    static const char *const switches[] = {"return_hidden_states", "return_routed_experts",
                                           "return_entropy"};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        if (nbi_field(body, values[i])) {
            return nbi_api_field(e, values[i], "not supported by this server");
        }
    }
    for (size_t i = 0; i < sizeof switches / sizeof *switches; i++) {
        bool on = false;
        NB_TRY(nbi_field_bool(&on, body, "", switches[i], e));
        if (on) return nbi_api_field(e, switches[i], "not supported by this server");
    }
    return NB_OK;
}

static nb_status read_sampling(nbi_job *job, nbi_generate *g, const json_t *body, nbi_api_error *e)
{
    json_t *params = NULL;
    nbi_params *p = &job->params;
    NB_TRY(nbi_field_object(&params, body, "", "sampling_params", e));
    NB_TRY(nbi_params_read_native(p, params, job->facts, e));
    NB_TRY(nbi_structured_read(&job->constraint, &job->arena, params, "sampling_params.", e));
    g->has_limit = p->has_max_tokens;
    if (!p->has_max_tokens) {
        p->has_max_tokens = true;
        p->max_tokens = p->sampling.min_tokens > MAX_NEW_TOKENS_DEFAULT ? p->sampling.min_tokens
                                                                        : MAX_NEW_TOKENS_DEFAULT;
    }
    p->max_tokens_field = "sampling_params.max_new_tokens";
    return NB_OK;
}

static nb_status read_logprobs(nbi_job *job, nbi_generate *g, const json_t *body, nbi_api_error *e)
{
    int64_t start = -1, top = 0;
    nbi_params *p = &job->params;
    NB_TRY(nbi_field_bool(&g->logprobs, body, "", "return_logprob", e));
    NB_TRY(nbi_field_bool(&g->with_text, body, "", "return_text_in_logprobs", e));
    NB_TRY(nbi_field_int(&start, body, "", "logprob_start_len", -1, INT32_MAX, e));
    NB_TRY(nbi_field_int(&top, body, "", "top_logprobs_num", 0, NB_TOP_LOGPROBS_MAX, e));
    NB_TRY(nbi_params_read_logprob_ids(p, body, "token_ids_logprob", job->facts, e));
    g->has_ids = p->sampling.n_logprob_ids > 0;
    if (g->has_ids && top) {
        return nbi_api_field(e, "token_ids_logprob", "not together with \"top_logprobs_num\"");
    }
    if (!g->logprobs) { /* then the fields around it say nothing */
        p->n_logprobs = -1;
        p->sampling.n_logprob_ids = 0;
        return NB_OK;
    }
    g->n_top = (int32_t)top;
    if (!g->has_ids) p->n_logprobs = (int32_t)top;
    if (start < 0) return NB_OK;
    p->n_prompt_logprobs = p->n_logprobs;
    p->prompt_logprobs_from = (uint32_t)start;
    return NB_OK;
}

nb_status nbi_generate_read_rids(nbi_job *job, const json_t *rid, const json_t *prompt,
                                 nbi_api_error *e)
{
    const json_t *value;
    size_t i, n = nbi_prompts_are_batch(prompt) ? json_array_size(prompt) : 1;
    if (!rid) return NB_OK;
    job->name_is_id = true;
    if (!json_is_array(rid)) return nbi_job_keep_name(job, &job->name, rid, "rid", e);
    if (json_array_size(rid) != n) {
        return nbi_api_field(e, "rid", "%zu names for %zu prompts", json_array_size(rid), n);
    }
    const char **names = nbi_arena_alloc(&job->arena, n * sizeof *names);
    if (!names) return nbi_api_no_memory(e, "this request");
    json_array_foreach(rid, i, value)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "rid[%zu]", i);
        NB_TRY(nbi_job_keep_name(job, &names[i], value, param, e));
    }
    job->names = names;
    return NB_OK;
}

static nb_status read(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    nbi_generate *g = job->state = nbi_arena_alloc(&job->arena, sizeof *g);
    const char *field;
    int64_t priority = 0;
    if (!g) return nbi_api_no_memory(e, "this request");
    NB_TRY(read_sampling(job, g, body, e));
    NB_TRY(check_prompt(job, body, e));
    NB_TRY(nbi_field_bool(&job->params.stream, body, "", "stream", e));
    NB_TRY(nbi_field_bool(&g->incremental, body, "", "incremental", e));
    NB_TRY(read_logprobs(job, g, body, e));
    NB_TRY(nbi_generate_read_rids(job, nbi_field(body, "rid"), prompt_of(body, &field), e));
    NB_TRY(nbi_field_int(&priority, body, "", "priority", INT32_MIN, INT32_MAX, e));
    job->params.priority = (int32_t)priority;
    NB_TRY(nbi_params_read_salts(&job->params, body, e));
    return refuse_unsupported(body, e);
}

/* ---------------------------------------------------------------- encode */

/* The default limit gives way to the context; one that was asked for is an error there. */
static void fit_default(nbi_job *job)
{
    size_t longest = 0;
    nbi_params *p = &job->params;
    for (uint32_t i = 0; i < job->n_prompts; i++) {
        if (job->prompts[i].n_ids > longest) longest = job->prompts[i].n_ids;
    }
    size_t room = longest < job->facts->max_context ? job->facts->max_context - longest : 0;
    if (room && p->max_tokens > room) p->max_tokens = (uint32_t)room;
}

static nb_status encode(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    const char *field;
    nbi_generate *g = job->state;
    const json_t *prompt = prompt_of(body, &field);
    g->as_list = nbi_prompts_are_batch(prompt) || job->params.n > 1;
    NB_TRY(nbi_prompts_encode(job, prompt, field, e));
    if (!g->has_limit) fit_default(job);
    return NB_OK;
}

/* ---------------------------------------------------------------- answers */

static nb_status begin(nbi_job *job, nbi_choice *c)
{
    const nbi_generate *g = job->state;
    c->logprobs.with_text = c->prompt_logprobs.with_text = g->with_text;
    return NB_OK;
}

static nb_status take(nbi_job *job, nbi_choice *c, const nb_event *event)
{
    (void)job;
    return nbi_buf_add(&c->text, event->text, event->n_text);
}

const nbi_surface nbi_surface_generate = {
    .id_prefix = "",
    .object = "",
    .chunk_object = "",
    .keeps_ids = true,
    .shows_abort = true,
    .logprob_shape = NBI_LOGPROBS_NATIVE,
    .prompt_logprob_shape = NBI_LOGPROBS_NATIVE,
    .read = read,
    .encode = encode,
    .begin = begin,
    .take = take,
    .write_delta = nbi_generate_write_delta,
    .write_reply = nbi_generate_write_reply,
};
