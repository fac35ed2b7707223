/* What the sampling of a job points to: from the body into the arena. Called by job.c. */
#include <stdio.h>
#include <string.h>

#include "server/job.h"

static nb_status keep_texts(nbi_job *job, const char **texts, uint32_t n, nbi_api_error *e)
{
    for (uint32_t i = 0; i < n; i++) {
        texts[i] = nbi_arena_strndup(&job->arena, texts[i], strlen(texts[i]));
        if (!texts[i]) return nbi_api_no_memory(e, "this request");
    }
    return NB_OK;
}

static nb_status keep_allowed(nbi_job *job, nbi_api_error *e)
{
    const json_t *list = job->params.allowed, *value;
    size_t i, n = json_array_size(list);
    if (!list) return NB_OK;
    int32_t *ids = nbi_arena_alloc(&job->arena, n * sizeof *ids);
    if (!ids) return nbi_api_no_memory(e, "this request");
    json_array_foreach(list, i, value) ids[i] = (int32_t)json_number_value(value);
    job->params.sampling.allowed = ids;
    job->params.sampling.n_allowed = (uint32_t)n;
    job->params.allowed = NULL;
    return NB_OK;
}

/* The client's name of a field of sampling. */
static const char *field_of(const nbi_job *job, char out[NBI_PARAM_MAX], const char *name)
{
    snprintf(out, NBI_PARAM_MAX, "%s%s", job->params.prefix, name);
    return out;
}

/* The tokens of a bad word behind `space`. */
static nb_status add_word(nbi_job *job, nb_ids *out, const char *space, const char *word, size_t *n,
                          nbi_api_error *e)
{
    char text[1 + NBI_STOP_BYTES_MAX + 1], field[NBI_PARAM_MAX];
    int32_t *ids = NULL;
    size_t n_ids = 0, left = NB_BAD_WORD_IDS_MAX - *n;
    nb_error err = {0};
    int n_text = snprintf(text, sizeof text, "%s%s", space, word);
    nb_status status =
        nb_tokenize(job->served->engine, text, (size_t)n_text, true, left + 1, &ids, &n_ids, &err);
    if (status == NB_OK && n_ids > left) status = NB_TOO_LARGE;
    int32_t *kept = status == NB_OK ? nbi_arena_alloc(&job->arena, n_ids * sizeof *kept) : NULL;
    if (kept) memcpy(kept, ids, n_ids * sizeof *kept);
    nb_free(ids);
    if (status == NB_TOO_LARGE)
        return nbi_api_field(e, field_of(job, field, "bad_words"), "more than %d tokens",
                             NB_BAD_WORD_IDS_MAX);
    if (status != NB_OK) return nbi_api_from(e, status, &err, field_of(job, field, "bad_words"));
    if (!kept) return nbi_api_no_memory(e, "this request");
    *out = (nb_ids){kept, (uint32_t)n_ids};
    *n += n_ids;
    return NB_OK;
}

/* Each word as it stands at the beginning of a text, and inside of one. */
static nb_status keep_bad_words(nbi_job *job, nbi_api_error *e)
{
    const json_t *list = job->params.bad_words, *value;
    size_t i, n = 0;
    if (!list) return NB_OK;
    nb_ids *words = nbi_arena_alloc(&job->arena, 2 * json_array_size(list) * sizeof *words);
    if (!words) return nbi_api_no_memory(e, "this request");
    json_array_foreach(list, i, value)
    {
        const char *word = json_string_value(value);
        word += strspn(word, " ");
        NB_TRY(add_word(job, &words[2 * i], "", word, &n, e));
        NB_TRY(add_word(job, &words[2 * i + 1], " ", word, &n, e));
    }
    job->params.sampling.bad_words = words;
    job->params.sampling.n_bad_words = (uint32_t)(2 * json_array_size(list));
    job->params.bad_words = NULL;
    return NB_OK;
}

int32_t nbi_job_find_token(const nbi_job *job, const char *text)
{
    return nbi_token_find(job->served->text.tokenizer, text, strlen(text));
}

int32_t nbi_job_call_token(const nbi_job *job)
{
    switch (job->served->tool_form) {
    case NBI_TOOL_FORM_GLM:
    case NBI_TOOL_FORM_HERMES: return nbi_job_find_token(job, "<tool_call>");
    case NBI_TOOL_FORM_DEEPSEEK:
        return nbi_job_find_token(job, "<\xef\xbd\x9ctool\xe2\x96\x81"
                                       "calls\xe2\x96\x81"
                                       "begin\xef\xbd\x9c>");
    default: return -1;
    }
}

bool nbi_job_can_end_thinking(const nbi_job *job)
{
    return job->served->reasoning != NBI_REASONING_NONE &&
           nbi_job_find_token(job, "<think>") >= 0 && nbi_job_find_token(job, "</think>") >= 0;
}

static nb_status find_thinking(const nbi_job *job, nb_sampling *s, nbi_api_error *e)
{
    if (!s->has_think_budget) return NB_OK;
    nbi_reasoning_kind kind = job->served->reasoning;
    s->think_begin = nbi_job_find_token(job, "<think>");
    s->think_end = nbi_job_find_token(job, "</think>");
    s->think_call = kind == NBI_REASONING_GLM45 ? nbi_job_call_token(job) : -1;
    if (nbi_job_can_end_thinking(job)) return NB_OK;
    char field[NBI_PARAM_MAX];
    return nbi_api_field(e, field_of(job, field, "thinking_token_budget"),
                         "this model has no tokens that begin and end its thinking");
}

void nbi_job_set_thinking(const nbi_prompt *prompt, nb_sampling *s)
{
    size_t i = prompt->n_ids;
    if (!s->has_think_budget) return;
    while (i && prompt->ids[i - 1] != s->think_begin && prompt->ids[i - 1] != s->think_end) i--;
    s->think_open = i && prompt->ids[i - 1] == s->think_begin;
}

const char *nbi_job_matched_stop(const nbi_job *job, const nbi_choice *c)
{
    const nb_sampling *s = &job->params.sampling;
    uint32_t i = (uint32_t)c->matched_string;
    return i < s->n_stop_strings ? s->stop_strings[i] : s->stop_regex[i - s->n_stop_strings];
}

static uint64_t mix(uint64_t h)
{
    h = (h ^ h >> 32) * 0x9e3779b97f4a7c15ull;
    return h ^ h >> 29;
}

/* What field `k` adds to a salt: FNV-1a from a beginning that both decide. Never 0, which is none.
 */
static uint64_t add_salt(uint64_t salt, uint32_t k, const char *text, size_t n)
{
    uint64_t h = mix(salt ^ (k + 1) * 0xcbf29ce484222325ull);
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)text[i]) * 0x100000001b3ull;
    h = mix(h);
    return h ? h : 1;
}

static nb_status keep_salts(nbi_job *job, nbi_api_error *e)
{
    static const char *const names[] = {"cache_salt", "extra_key"};
    for (uint32_t k = 0; k < 2; k++) {
        const json_t *value = job->params.salts[k];
        bool list = json_is_array(value);
        job->params.salts[k] = NULL;
        if (list && json_array_size(value) != job->n_prompts)
            return nbi_api_field(e, names[k], "%zu texts for %u prompts", json_array_size(value),
                                 job->n_prompts);
        for (uint32_t i = 0; value && i < job->n_prompts; i++) {
            const json_t *one = list ? json_array_get(value, i) : value;
            nbi_prompt *prompt = &job->prompts[i];
            if (json_string_length(one))
                prompt->cache_salt = add_salt(prompt->cache_salt, k, json_string_value(one),
                                              json_string_length(one));
        }
    }
    return NB_OK;
}

nb_status nbi_job_keep_sampling(nbi_job *job, nbi_api_error *e)
{
    nb_sampling *s = &job->params.sampling;
    NB_TRY(keep_texts(job, s->stop_strings, s->n_stop_strings, e));
    NB_TRY(keep_texts(job, s->stop_regex, s->n_stop_regex, e));
    NB_TRY(find_thinking(job, s, e));
    NB_TRY(keep_allowed(job, e));
    NB_TRY(keep_salts(job, e));
    return keep_bad_words(job, e);
}
