/* Prompts as text or token ids, one or many. Called by the surfaces of completions, /generate and
 * the tokenizer, and by job.c. */
#include "server/prompts.h"

#include <stdio.h>
#include <string.h>

/* Contexts of tokens that are encoded of one text; then it is refused without its exact length. The
 * second is for prompts that are cut to their end, and where tokens are only counted. */
#define CONTEXTS     2
#define CONTEXTS_CUT 16

/* ---------------------------------------------------------------- check */

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
static nb_status check_batch(const json_t *prompts, const char *field, const nbi_api_facts *facts,
                             nbi_api_error *e)
{
    size_t i;
    const json_t *prompt;
    if (json_array_size(prompts) > NBI_CHOICES_MAX) {
        return nbi_api_field(e, field, "%zu prompts, at most %d", json_array_size(prompts),
                             NBI_CHOICES_MAX);
    }
    json_array_foreach(prompts, i, prompt)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "%.96s[%zu]", field, i);
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

nb_status nbi_prompts_check(const json_t *prompt, const char *field, const nbi_api_facts *facts,
                            nbi_api_error *e)
{
    if (!prompt) return nbi_api_field(e, field, "is missing");
    if (json_is_string(prompt)) return check_text(prompt, field, facts, e);
    if (!json_is_array(prompt)) {
        return nbi_api_field(e, field,
                             "expected a string, an array of token ids, or an array of either, "
                             "found %s",
                             nbi_json_kind(prompt));
    }
    if (json_array_size(prompt) == 0) return nbi_api_field(e, field, "is empty");
    if (json_is_number(json_array_get(prompt, 0))) return check_ids(prompt, field, facts, e);
    return check_batch(prompt, field, facts, e);
}

/* ---------------------------------------------------------------- encode */

size_t nbi_prompts_max_ids(const nbi_job *job)
{
    bool cut = job->params.truncate_prompt || job->surface->count_only;
    return (size_t)(cut ? CONTEXTS_CUT : CONTEXTS) * job->facts->max_context;
}

static nb_status encode_text(nbi_job *job, nbi_prompt *prompt, const json_t *text,
                             const char *param, nbi_api_error *e)
{
    nb_error err = {0};
    int32_t *ids = NULL;
    size_t n = json_string_length(text);
    nb_status status = nb_tokenize(job->served->engine, json_string_value(text), n, true,
                                   nbi_prompts_max_ids(job), &ids, &prompt->n_ids, &err);
    if (status == NB_TOO_LARGE) return nbi_served_too_long(job->served, &err, param, e);
    if (status != NB_OK) return nbi_api_from(e, status, &err, param);
    int32_t *own = nbi_arena_alloc(&job->arena, (prompt->n_ids + 1) * sizeof *own);
    if (own && prompt->n_ids) memcpy(own, ids, prompt->n_ids * sizeof *own);
    nb_free(ids);
    prompt->ids = own;
    if (own && job->echo) {
        prompt->text = nbi_arena_strndup(&job->arena, json_string_value(text), n);
        prompt->n_text = n;
    }
    return own && (!job->echo || prompt->text) ? NB_OK : nbi_api_no_memory(e, "the prompt");
}

/* What echo shows of ids. */
static nb_status show_ids(nbi_job *job, nbi_prompt *prompt, nbi_api_error *e)
{
    char *text = NULL;
    nb_error err = {0};
    nb_status status =
        nb_detokenize(job->served->engine, prompt->ids, prompt->n_ids,
                      job->params.sampling.skip_special, &text, &prompt->n_text, &err);
    if (status != NB_OK) return nbi_api_from(e, status, &err, job->prompt_field);
    prompt->text = nbi_arena_strndup(&job->arena, text, prompt->n_text);
    nb_free(text);
    return prompt->text ? NB_OK : nbi_api_no_memory(e, "the prompt");
}

static nb_status encode_ids(nbi_job *job, nbi_prompt *prompt, const json_t *ids, nbi_api_error *e)
{
    size_t i;
    const json_t *value;
    int32_t *own = nbi_arena_alloc(&job->arena, json_array_size(ids) * sizeof *own);
    if (!own) return nbi_api_no_memory(e, "the prompt");
    json_array_foreach(ids, i, value) own[i] = (int32_t)json_number_value(value);
    prompt->ids = own;
    prompt->n_ids = json_array_size(ids);
    if (!job->echo) return NB_OK;
    if (!job->facts->has_text) {
        prompt->text = "";
        return NB_OK;
    }
    return show_ids(job, prompt, e);
}

static nb_status encode_one(nbi_job *job, nbi_prompt *prompt, const json_t *value,
                            const char *param, nbi_api_error *e)
{
    return json_is_string(value) ? encode_text(job, prompt, value, param, e)
                                 : encode_ids(job, prompt, value, e);
}

bool nbi_prompts_are_batch(const json_t *prompt)
{
    return json_is_array(prompt) && !json_is_number(json_array_get(prompt, 0));
}

nb_status nbi_prompts_encode(nbi_job *job, const json_t *prompt, const char *field,
                             nbi_api_error *e)
{
    bool batch = nbi_prompts_are_batch(prompt);
    size_t n = batch ? json_array_size(prompt) : 1;
    job->prompt_field = field;
    job->prompts = nbi_arena_alloc(&job->arena, n * sizeof *job->prompts);
    if (!job->prompts) return nbi_api_no_memory(e, "the prompt");
    job->n_prompts = (uint32_t)n;
    if (!batch) return encode_one(job, job->prompts, prompt, field, e);
    for (size_t i = 0; i < n; i++) {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "%.96s[%zu]", field, i);
        NB_TRY(encode_one(job, &job->prompts[i], json_array_get(prompt, i), param, e));
    }
    return NB_OK;
}

/* ---------------------------------------------------------------- truncation */

nb_status nbi_prompts_truncate(nbi_job *job, nbi_api_error *e)
{
    const int64_t keep = job->params.truncate_prompt;
    const uint64_t limit = job->facts->max_context;
    uint64_t answer =
        job->params.has_max_tokens && job->params.max_tokens ? job->params.max_tokens : 1;
    uint64_t room = limit > answer ? limit - answer : 1; /* -1: what leaves the answer its room */
    uint64_t n = keep < 0 ? room : (uint64_t)keep;
    for (uint32_t i = 0; keep && i < job->n_prompts; i++) {
        nbi_prompt *p = &job->prompts[i];
        if (p->n_ids <= n) continue;
        if (!job->params.truncate_end) p->ids += p->n_ids - n;
        p->n_ids = n;
        if (job->echo && job->facts->has_text) NB_TRY(show_ids(job, p, e));
    }
    return NB_OK;
}
