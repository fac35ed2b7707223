/* POST /v1/completions: text or token ids in, text out.
 *
 * Fields beside the shared ones: prompt, echo, logprobs, suffix (refused), max_tokens (16 when
 * absent, as everywhere). Called through nbi_surface_completions by job.c. */
#include <stdio.h>
#include <string.h>

#include "server/job.h"

#define MAX_TOKENS_DEFAULT 16u

/* ---------------------------------------------------------------- read */

static nb_status check_ids(const json_t *ids, const char *param, const nbi_api_facts *facts,
                           nbi_api_error *e)
{
    size_t i;
    const json_t *value;
    if (json_array_size(ids) == 0) return nbi_api_field(e, param, "is empty");
    json_array_foreach(ids, i, value)
    {
        char name[NBI_PARAM_MAX];
        int64_t id;
        if (json_is_integer(value) && json_integer_value(value) >= 0 &&
            json_integer_value(value) < (json_int_t)facts->vocab_size) {
            continue; /* without the name: prompts are long */
        }
        snprintf(name, sizeof name, "%s[%zu]", param, i);
        NB_TRY(nbi_value_int(&id, value, name, 0, (int64_t)facts->vocab_size - 1, e));
    }
    return NB_OK;
}

static nb_status check_text(const json_t *text, const char *param, const nbi_api_facts *facts,
                            nbi_api_error *e)
{
    if (!facts->has_text) {
        return nbi_api_field(e, param, "this model has no tokenizer, send token ids");
    }
    return json_string_length(text) ? NB_OK : nbi_api_field(e, param, "is empty");
}

/* A list of texts or of lists of ids. */
static nb_status check_batch(const json_t *prompts, const nbi_api_facts *facts, nbi_api_error *e)
{
    size_t i;
    const json_t *prompt;
    if (json_array_size(prompts) > NBI_CHOICES_MAX) {
        return nbi_api_field(e, "prompt", "%zu prompts, at most %d", json_array_size(prompts),
                             NBI_CHOICES_MAX);
    }
    json_array_foreach(prompts, i, prompt)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "prompt[%zu]", i);
        if (json_is_string(prompt)) {
            NB_TRY(check_text(prompt, param, facts, e));
        } else if (json_is_array(prompt)) {
            NB_TRY(check_ids(prompt, param, facts, e));
        } else {
            return nbi_api_field(e, param, "expected a string or an array of token ids, found %s",
                                 nbi_json_kind(prompt));
        }
    }
    return NB_OK;
}

static nb_status check_prompt(const json_t *body, const nbi_api_facts *facts, nbi_api_error *e)
{
    const json_t *prompt = nbi_field(body, "prompt");
    if (!prompt) return nbi_api_field(e, "prompt", "is missing");
    if (json_is_string(prompt)) return check_text(prompt, "prompt", facts, e);
    if (!json_is_array(prompt)) {
        return nbi_api_field(e, "prompt",
                             "expected a string, an array of token ids, or an array of either, "
                             "found %s",
                             nbi_json_kind(prompt));
    }
    if (json_array_size(prompt) == 0) return nbi_api_field(e, "prompt", "is empty");
    if (json_is_number(json_array_get(prompt, 0))) return check_ids(prompt, "prompt", facts, e);
    return check_batch(prompt, facts, e);
}

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
    if (p->max_tokens == 0 && !job->echo) {
        return nbi_api_field(e, p->max_tokens_field, "0 gives an answer only with \"echo\"");
    }
    p->sampling.n_logprobs = (int32_t)logprobs;
    p->sampling.prompt_logprobs = job->echo && logprobs >= 0;
    return check_prompt(body, facts, e);
}

/* ---------------------------------------------------------------- encode */

static nb_status no_memory(nbi_api_error *e)
{
    return nbi_api_fail(e, 503, NULL, NULL, "no memory for the prompt");
}

static nb_status encode_text(nbi_job *job, nbi_prompt *prompt, const json_t *text, nbi_api_error *e)
{
    nb_error err = {0};
    int32_t *ids = NULL;
    size_t n = json_string_length(text);
    nb_status status = nb_tokenize(job->served->engine, json_string_value(text), n, true, &ids,
                                   &prompt->n_ids, &err);
    if (status != NB_OK) return nbi_api_from(e, status, &err, "prompt");
    int32_t *own = nbi_arena_alloc(&job->arena, (prompt->n_ids + 1) * sizeof *own);
    if (own && prompt->n_ids) memcpy(own, ids, prompt->n_ids * sizeof *own);
    nb_free(ids);
    prompt->ids = own;
    if (own && job->echo) {
        prompt->text = nbi_arena_strndup(&job->arena, json_string_value(text), n);
        prompt->n_text = n;
    }
    return own && (!job->echo || prompt->text) ? NB_OK : no_memory(e);
}

static nb_status encode_ids(nbi_job *job, nbi_prompt *prompt, const json_t *ids, nbi_api_error *e)
{
    size_t i;
    const json_t *value;
    int32_t *own = nbi_arena_alloc(&job->arena, json_array_size(ids) * sizeof *own);
    if (!own) return no_memory(e);
    json_array_foreach(ids, i, value) own[i] = (int32_t)json_number_value(value);
    prompt->ids = own;
    prompt->n_ids = json_array_size(ids);
    if (!job->echo) return NB_OK;
    if (!job->facts->has_text) {
        prompt->text = "";
        return NB_OK;
    }
    char *text = NULL;
    nb_error err = {0};
    nb_status status =
        nb_detokenize(job->served->engine, own, prompt->n_ids, job->params.sampling.skip_special,
                      &text, &prompt->n_text, &err);
    if (status != NB_OK) return nbi_api_from(e, status, &err, "prompt");
    prompt->text = nbi_arena_strndup(&job->arena, text, prompt->n_text);
    nb_free(text);
    return prompt->text ? NB_OK : no_memory(e);
}

static nb_status encode_one(nbi_job *job, nbi_prompt *prompt, const json_t *value, nbi_api_error *e)
{
    return json_is_string(value) ? encode_text(job, prompt, value, e)
                                 : encode_ids(job, prompt, value, e);
}

static nb_status encode(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    const json_t *prompt = nbi_field(body, "prompt");
    bool batch = json_is_array(prompt) && !json_is_number(json_array_get(prompt, 0));
    size_t n = batch ? json_array_size(prompt) : 1;
    job->prompts = nbi_arena_alloc(&job->arena, n * sizeof *job->prompts);
    if (!job->prompts) return no_memory(e);
    job->n_prompts = (uint32_t)n;
    if (!batch) return encode_one(job, job->prompts, prompt, e);
    for (size_t i = 0; i < n; i++) {
        NB_TRY(encode_one(job, &job->prompts[i], json_array_get(prompt, i), e));
    }
    return NB_OK;
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

/* {"index":..,"text":..,"logprobs":..,"finish_reason":..} */
static nb_status write_choice(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    NB_TRY(nbi_buf_addf(out, "{\"index\":%u,\"text\":", c->index));
    NB_TRY(nbi_json_quote(out, c->text.data ? c->text.data : "", c->text.len));
    NB_TRY(nbi_buf_add(out, ",\"logprobs\":", 12));
    if (c->logprobs.n) {
        NB_TRY(nbi_logprobs_write(&c->logprobs, NBI_LOGPROBS_COMPLETIONS, out));
    } else {
        NB_TRY(nbi_buf_add(out, "null", 4));
    }
    NB_TRY(nbi_job_write_finish(job, c, c->done, out));
    return nbi_buf_add(out, "}", 1);
}

static nb_status write_delta(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    if (!c->text.len && !c->logprobs.n && !c->done) return NB_OK;
    NB_TRY(nbi_buf_add(out, "data: ", 6));
    NB_TRY(nbi_buf_add(out, job->head.data, job->head.len));
    NB_TRY(write_choice(job, c, out));
    nbi_buf_clear(&c->text);
    return nbi_job_write_tail(job, c, out);
}

const nbi_surface nbi_surface_completions = {
    .id_prefix = "cmpl-",
    .object = "text_completion",
    .chunk_object = "text_completion",
    .logprob_shape = NBI_LOGPROBS_COMPLETIONS,
    .read = read,
    .encode = encode,
    .begin = begin,
    .take = take,
    .write_delta = write_delta,
    .write_choice = write_choice,
};
