/* POST /tokenize and /detokenize, in vLLM's form with the names of SGLang's. Called through their
 * tables by job.c. Nothing is generated. */
#include <stdio.h>
#include <string.h>

#include "server/prompts.h"

/* job->state */
typedef struct tokens_state {
    bool with_names;    /* tokenize: return_token_strs */
    bool as_list;       /* several prompts, or lists of ids */
    bool keeps_special; /* detokenize */
} tokens_state;

/* The name of the model has to fit, and there has to be a tokenizer. */
static nb_status read_begin(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    job->state = nbi_arena_alloc(&job->arena, sizeof(tokens_state));
    if (!job->state) return nbi_api_no_memory(e, "this request");
    return nbi_params_read_model(body, job->facts, e);
}

/* ---------------------------------------------------------------- tokenize */

static nb_status read_tokenize(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    bool special = true;
    NB_TRY(read_begin(job, body, e));
    tokens_state *s = job->state;
    NB_TRY(nbi_field_bool(&s->with_names, body, "", "return_token_strs", e));
    NB_TRY(nbi_field_bool(&special, body, "", "add_special_tokens", e));
    if (nbi_field(body, "messages")) {
        if (!nbi_field(body, "prompt")) return nbi_job_read_chat(job, body, e);
        return nbi_api_field(e, "prompt", "not allowed beside \"messages\"");
    }
    const json_t *prompt = nbi_field(body, "prompt"), *item;
    size_t i;
    s->as_list = json_is_array(prompt);
    json_array_foreach(prompt, i, item)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "prompt[%zu]", i);
        if (json_is_string(item)) continue;
        return nbi_api_field(e, param, "expected a string, found %s", nbi_json_kind(item));
    }
    if (!job->facts->has_text) {
        return nbi_api_field(e, "prompt", "this model has no tokenizer");
    }
    if (json_is_string(prompt) && json_string_length(prompt) == 0) return NB_OK;
    return nbi_prompts_check(prompt, "prompt", job->facts, e);
}

static nb_status encode_tokenize(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    if (job->chat) return nbi_job_encode_chat(job, body, e);
    return nbi_prompts_encode(job, nbi_field(body, "prompt"), "prompt", e);
}

static nb_status write_ids(const nbi_prompt *p, nbi_buf *out)
{
    NB_TRY(nbi_buf_add(out, "[", 1));
    for (size_t i = 0; i < p->n_ids; i++) NB_TRY(nbi_buf_addf(out, i ? ",%d" : "%d", p->ids[i]));
    return nbi_buf_add(out, "]", 1);
}

static nb_status write_names(const nbi_job *job, const nbi_prompt *p, nbi_buf *out)
{
    NB_TRY(nbi_buf_add(out, "[", 1));
    for (size_t i = 0; i < p->n_ids; i++) {
        if (i) NB_TRY(nbi_buf_add(out, ",", 1));
        NB_TRY(nbi_token_write_name(out, job->served->engine, p->ids[i]));
    }
    return nbi_buf_add(out, "]", 1);
}

static nb_status write_count(const nbi_prompt *p, nbi_buf *out)
{
    return nbi_buf_addf(out, "%zu", p->n_ids);
}

typedef enum member { COUNT, TOKENS, NAMES } member;

/* One value, or a list of them. */
static nb_status write_member(const nbi_job *job, member which, nbi_buf *out)
{
    const tokens_state *s = job->state;
    if (s->as_list) NB_TRY(nbi_buf_add(out, "[", 1));
    for (uint32_t i = 0; i < job->n_prompts; i++) {
        const nbi_prompt *p = &job->prompts[i];
        if (i) NB_TRY(nbi_buf_add(out, ",", 1));
        NB_TRY(which == COUNT    ? write_count(p, out)
               : which == TOKENS ? write_ids(p, out)
                                 : write_names(job, p, out));
    }
    return s->as_list ? nbi_buf_add(out, "]", 1) : NB_OK;
}

static nb_status reply_tokenize(nbi_job *job, nbi_buf *out)
{
    const tokens_state *s = job->state;
    NB_TRY(nbi_buf_addf(out, "{\"count\":"));
    NB_TRY(write_member(job, COUNT, out));
    NB_TRY(nbi_buf_addf(out, ",\"max_model_len\":%u,\"tokens\":", job->facts->max_context));
    NB_TRY(write_member(job, TOKENS, out));
    NB_TRY(nbi_buf_addf(out, ",\"token_strs\":"));
    NB_TRY(s->with_names ? write_member(job, NAMES, out) : nbi_buf_addf(out, "null"));
    return nbi_buf_add(out, "}", 1);
}

const nbi_surface nbi_surface_tokenize = {
    .prompt_field = "messages",
    .count_only = true,
    .read = read_tokenize,
    .encode = encode_tokenize,
    .write_reply = reply_tokenize,
};

/* ---------------------------------------------------------------- detokenize */

static nb_status read_detokenize(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    bool skip = false;
    const json_t *tokens = nbi_field(body, "tokens"), *item;
    size_t i;
    NB_TRY(read_begin(job, body, e));
    tokens_state *s = job->state;
    NB_TRY(nbi_field_bool(&skip, body, "", "skip_special_tokens", e));
    s->keeps_special = !skip;
    if (!job->facts->has_text) return nbi_api_field(e, "tokens", "this model has no tokenizer");
    if (json_is_array(tokens) && json_array_size(tokens) == 0) return NB_OK;
    if (tokens && !json_is_array(tokens)) {
        return nbi_api_field(e, "tokens", "expected an array of token ids, found %s",
                             nbi_json_kind(tokens));
    }
    NB_TRY(nbi_prompts_check(tokens, "tokens", job->facts, e));
    s->as_list = nbi_prompts_are_batch(tokens);
    json_array_foreach(tokens, i, item)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "tokens[%zu]", i);
        if (!json_is_string(item)) continue;
        return nbi_api_field(e, param, "expected %s, found a string",
                             s->as_list ? "an array of token ids" : "a token id");
    }
    return NB_OK;
}

/* The texts of the ids are what echo would show. */
static nb_status encode_detokenize(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    const tokens_state *s = job->state;
    const json_t *tokens = nbi_field(body, "tokens");
    job->echo = true;
    job->params.sampling.skip_special = !s->keeps_special;
    if (json_array_size(tokens)) return nbi_prompts_encode(job, tokens, "tokens", e);
    job->prompts = nbi_arena_alloc(&job->arena, sizeof *job->prompts);
    if (!job->prompts) return nbi_api_no_memory(e, "this request");
    job->prompts[0].text = "";
    job->n_prompts = 1;
    return NB_OK;
}

static nb_status write_texts(const nbi_job *job, const char *key, nbi_buf *out)
{
    const tokens_state *s = job->state;
    NB_TRY(nbi_buf_addf(out, "\"%s\":%s", key, s->as_list ? "[" : ""));
    for (uint32_t i = 0; i < job->n_prompts; i++) {
        const nbi_prompt *p = &job->prompts[i];
        NB_TRY(nbi_job_write_string(out, i ? "," : "", p->text, p->n_text));
    }
    return s->as_list ? nbi_buf_add(out, "]", 1) : NB_OK;
}

/* Under the names of vLLM and of SGLang. */
static nb_status reply_detokenize(nbi_job *job, nbi_buf *out)
{
    NB_TRY(nbi_buf_add(out, "{", 1));
    NB_TRY(write_texts(job, "prompt", out));
    NB_TRY(nbi_buf_add(out, ",", 1));
    NB_TRY(write_texts(job, "text", out));
    return nbi_buf_add(out, "}", 1);
}

const nbi_surface nbi_surface_detokenize = {
    .count_only = true,
    .read = read_detokenize,
    .encode = encode_detokenize,
    .write_reply = reply_detokenize,
};
