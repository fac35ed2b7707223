/* Reading of the shared request fields. Called by openai_completions.c and openai_chat.c, and by
 * the fuzz target. One function per group of fields; nbi_params_read() lists them. */
#include "server/sampling_params.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/stop_regex.h"

/* ---------------------------------------------------------------- refusals */

/* Values of an unsupported field that ask for nothing. */
typedef enum neutral {
    NEUTRAL_NONE,  /* only absent and null */
    NEUTRAL_ZERO,  /* 0 */
    NEUTRAL_ONE,   /* 1 */
    NEUTRAL_FALSE, /* false */
    NEUTRAL_EMPTY  /* an empty object, array or string */
} neutral;

typedef struct neutral_field {
    const char *key;
    neutral neutral;
} neutral_field;

/* Fields that would change the answer, or ask for something beside it. Ignoring them would be a
 * silent lie. */
static const neutral_field unsupported[] = {
    {"lora_path", NEUTRAL_NONE},
    {"custom_logit_processor", NEUTRAL_NONE},
    {"logits_processors", NEUTRAL_EMPTY},
    {"return_hidden_states", NEUTRAL_FALSE},
    {"return_routed_experts", NEUTRAL_FALSE},
    {"return_entropy", NEUTRAL_FALSE},
    {"prompt_embeds", NEUTRAL_EMPTY},
};
/* Of completions and chat alone. */
static const neutral_field openai_fields[] = {
    {"logprob_token_ids", NEUTRAL_EMPTY},       {"repetition_detection", NEUTRAL_EMPTY},
    {"return_meta_info", NEUTRAL_FALSE},        {"return_token_ids", NEUTRAL_FALSE},
    {"return_prompt_token_ids", NEUTRAL_FALSE},
};
/* Of beam search. */
static const neutral_field beam_fields[] = {
    {"use_beam_search", NEUTRAL_FALSE},
    {"length_penalty", NEUTRAL_ONE},
    {"early_stopping", NEUTRAL_FALSE},
};
/* Would change which beams are the best, or when they end; nb_beams_submit() has no place for it.
 */
static const neutral_field beyond_beams[] = {
    {"stop", NEUTRAL_EMPTY},
    {"stop_regex", NEUTRAL_EMPTY},
    {"min_tokens", NEUTRAL_ZERO},
    {"repetition_detection", NEUTRAL_EMPTY},
    {"prompt_logprobs", NEUTRAL_NONE},
    {"logprob_token_ids", NEUTRAL_EMPTY},
    {"logit_bias", NEUTRAL_EMPTY},
    {"allowed_token_ids", NEUTRAL_NONE},
    {"bad_words", NEUTRAL_EMPTY},
    {"frequency_penalty", NEUTRAL_ZERO},
    {"presence_penalty", NEUTRAL_ZERO},
    {"repetition_penalty", NEUTRAL_ONE},
};

static bool is_neutral(const json_t *value, neutral kind)
{
    switch (kind) {
    case NEUTRAL_NONE: return false;
    case NEUTRAL_ZERO: return json_is_number(value) && json_number_value(value) == 0;
    case NEUTRAL_ONE: return json_is_number(value) && json_number_value(value) == 1;
    case NEUTRAL_FALSE: return json_is_false(value);
    case NEUTRAL_EMPTY:
        return (json_is_object(value) && json_object_size(value) == 0) ||
               (json_is_array(value) && json_array_size(value) == 0) ||
               (json_is_string(value) && json_string_length(value) == 0);
    }
    return false;
}

static nb_status refuse(const json_t *body, const neutral_field *fields, size_t n, const char *why,
                        nbi_api_error *e)
{
    for (size_t i = 0; i < n; i++) {
        const json_t *value = nbi_field(body, fields[i].key);
        if (value && !is_neutral(value, fields[i].neutral))
            return nbi_api_field(e, fields[i].key, "%s", why);
    }
    return NB_OK;
}

#define REFUSE(body, fields, why, e) refuse(body, fields, sizeof(fields) / sizeof *(fields), why, e)

static nb_status refuse_unsupported(const json_t *body, nbi_api_error *e)
{
    return REFUSE(body, unsupported, "not supported by this server", e);
}

nb_status nbi_params_refuse_openai(const json_t *body, nbi_api_error *e)
{
    return REFUSE(body, openai_fields, "not supported by this API", e);
}

/* ---------------------------------------------------------------- groups */

nb_status nbi_params_read_model(const json_t *body, const nbi_api_facts *facts, nbi_api_error *e)
{
    const char *model = NULL;
    NB_TRY(nbi_field_str(&model, body, "", "model", e));
    if (!model) return NB_OK;
    for (uint32_t i = 0; i < facts->n_names; i++) {
        if (strcmp(model, facts->names[i]) == 0) return NB_OK;
    }
    return nbi_api_fail(e, 404, "model_not_found", "model",
                        "the model \"%.128s\" does not exist, this server has \"%.128s\"", model,
                        facts->n_names ? facts->names[0] : "");
}

/* The newer name wins when both are given. */
static nb_status read_lengths(nbi_params *p, const json_t *body, const nbi_param_names *names,
                              uint32_t min_max_tokens, nbi_api_error *e)
{
    int64_t max_tokens = -1, newer = -1, min_tokens = p->sampling.min_tokens;
    const uint32_t least = min_max_tokens;
    NB_TRY(nbi_field_int(&max_tokens, body, "", names->max_tokens, least, UINT32_MAX, e));
    NB_TRY(nbi_field_int(&newer, body, "", "max_completion_tokens", least, UINT32_MAX, e));
    NB_TRY(nbi_field_int(&min_tokens, body, "", names->min_tokens, 0, UINT32_MAX, e));
    NB_TRY(nbi_field_bool(&p->sampling.ignore_eos, body, "", "ignore_eos", e));
    NB_TRY(nbi_field_bool(&p->sampling.disable_oea, body, "", "disable_oea", e));
    p->max_tokens_field = newer >= 0 ? "max_completion_tokens" : names->max_tokens;
    if (newer >= 0) max_tokens = newer;
    p->has_max_tokens = max_tokens >= 0;
    p->max_tokens = p->has_max_tokens ? (uint32_t)max_tokens : 0;
    if (p->has_max_tokens && min_tokens > max_tokens) {
        return nbi_api_field(e, names->min_tokens, "%lld is more than %s, %lld",
                             (long long)min_tokens, p->max_tokens_field, (long long)max_tokens);
    }
    p->sampling.min_tokens = (uint32_t)min_tokens;
    return NB_OK;
}

/* A number in [min, max], or in (min, max] with `open`. */
static nb_status read_ratio(float *out, const json_t *body, const char *key, double min, bool open,
                            double max, nbi_api_error *e)
{
    double value = *out;
    NB_TRY(nbi_field_num(&value, body, "", key, e));
    bool low = open ? !(value > min) : !(value >= min);
    if (low || !(value <= max)) {
        return nbi_api_field(e, key, "%.9g is outside of %c%g, %g]", value, open ? '(' : '[', min,
                             max);
    }
    *out = (float)value;
    if (open && !((double)*out > min)) *out = 1e-30f; /* a denormal that rounded to the open end */
    return NB_OK;
}

static nb_status read_randomness(nbi_params *p, const json_t *body, const nbi_param_names *names,
                                 nbi_api_error *e)
{
    nb_sampling *s = &p->sampling;
    double temperature = s->temperature;
    int64_t top_k = s->top_k, seed = 0;
    NB_TRY(nbi_field_num(&temperature, body, "", "temperature", e));
    if (!(temperature >= 0) || temperature > 1e6) {
        return nbi_api_field(e, "temperature", "%.9g is outside of 0 to 1000000", temperature);
    }
    s->temperature = (float)temperature;
    NB_TRY(read_ratio(&s->top_p, body, "top_p", 0, true, 1, e));
    NB_TRY(read_ratio(&s->min_p, body, "min_p", 0, false, 1, e));
    NB_TRY(nbi_field_int(&top_k, body, "", "top_k", -1, INT32_MAX, e));
    s->top_k = (int32_t)top_k;
    if (nbi_field(body, names->seed)) {
        NB_TRY(nbi_field_int(&seed, body, "", names->seed, INT64_MIN, INT64_MAX, e));
        s->has_seed = true;
        s->seed = (uint64_t)seed;
    }
    return NB_OK;
}

static nb_status read_penalties(nbi_params *p, const json_t *body, nbi_api_error *e)
{
    nb_sampling *s = &p->sampling;
    NB_TRY(read_ratio(&s->frequency_penalty, body, "frequency_penalty", -2, false, 2, e));
    NB_TRY(read_ratio(&s->presence_penalty, body, "presence_penalty", -2, false, 2, e));
    return read_ratio(&s->repetition_penalty, body, "repetition_penalty", 0, true, 2, e);
}

/* One member of logit_bias: the key is a token id in decimal. */
static nb_status add_bias(nbi_params *p, const char *key, const json_t *value,
                          const nbi_api_facts *facts, nbi_api_error *e)
{
    char *end = NULL;
    long id = strtol(key, &end, 10);
    if (!key[0] || *end || id < 0 || id >= (long)facts->vocab_size) {
        return nbi_api_field(e, "logit_bias",
                             "the key \"%.32s\" is not a token id, expected 0 to %u", key,
                             facts->vocab_size - 1);
    }
    double bias = json_number_value(value);
    if (!json_is_number(value) || !(bias >= -100 && bias <= 100)) {
        return nbi_api_field(e, "logit_bias",
                             "the value of \"%.32s\" is not a number in [-100, 100]", key);
    }
    if (p->sampling.n_logit_bias == NB_LOGIT_BIAS_MAX)
        return nbi_api_field(e, "logit_bias", "more than %d tokens", NB_LOGIT_BIAS_MAX);
    p->bias[p->sampling.n_logit_bias++] = (nb_logit_bias){.id = (int32_t)id, .bias = (float)bias};
    return NB_OK;
}

static nb_status read_logit_bias(nbi_params *p, const json_t *body, const nbi_api_facts *facts,
                                 nbi_api_error *e)
{
    json_t *map = NULL, *value;
    const char *key;
    NB_TRY(nbi_field_object(&map, body, "", "logit_bias", e));
    if (!map) return NB_OK;
    p->sampling.logit_bias = p->bias;
    json_object_foreach(map, key, value) NB_TRY(add_bias(p, key, value, facts, e));
    return NB_OK;
}

static nb_status read_n(nbi_params *p, const json_t *body, nbi_api_error *e)
{
    int64_t n = 1;
    NB_TRY(nbi_field_int(&n, body, "", "n", 1, NBI_N_MAX, e));
    int64_t best_of = n;
    NB_TRY(nbi_field_int(&best_of, body, "", "best_of", 1, NBI_N_MAX, e));
    if (best_of < n) {
        return nbi_api_field(e, "best_of", "%lld is less than n, %lld", (long long)best_of,
                             (long long)n);
    }
    p->n = (uint32_t)n;
    p->best_of = (uint32_t)best_of;
    return NB_OK;
}

/* vLLM's beam search: width and answers are best_of and n. */
static nb_status read_beams(nbi_params *p, const json_t *body, const nbi_api_facts *facts,
                            nbi_api_error *e)
{
    const char *early = json_string_value(nbi_field(body, "early_stopping"));
    const char *width = nbi_field(body, "best_of") ? "best_of" : "n";
    uint32_t most = facts->max_running < NB_BEAM_WIDTH_MAX ? facts->max_running : NB_BEAM_WIDTH_MAX;
    p->length_penalty = 1;
    NB_TRY(nbi_field_bool(&p->beams, body, "", "use_beam_search", e));
    NB_TRY(nbi_field_num(&p->length_penalty, body, "", "length_penalty", e));
    if (!early || strcmp(early, "never") != 0) /* which is false */
        NB_TRY(nbi_field_bool(&p->early_stopping, body, "", "early_stopping", e));
    if (!p->beams) {
        const char *field = p->early_stopping        ? "early_stopping"
                            : p->length_penalty != 1 ? "length_penalty"
                                                     : NULL;
        if (!field) return NB_OK;
        return nbi_api_field(e, field, "only allowed when \"use_beam_search\" is true");
    }
    if (!(fabs(p->length_penalty) <= NBI_LENGTH_PENALTY_MAX)) {
        return nbi_api_field(e, "length_penalty", "%.9g is outside of -%d to %d", p->length_penalty,
                             NBI_LENGTH_PENALTY_MAX, NBI_LENGTH_PENALTY_MAX);
    }
    if (p->best_of > most) return nbi_api_field(e, width, "%u beams, at most %u", p->best_of, most);
    if (p->has_max_tokens && !p->max_tokens)
        return nbi_api_field(e, p->max_tokens_field, "0 leaves nothing to search for");
    NB_TRY(REFUSE(body, beyond_beams, "not together with \"use_beam_search\"", e));
    if (p->sampling.has_think_budget)
        return nbi_api_field(e, "thinking_token_budget", "not together with \"use_beam_search\"");
    p->sampling.repetition_penalty = 1; /* the model's default */
    return NB_OK;
}

static nb_status add_stop(nb_sampling *s, const json_t *value, const char *param, nbi_api_error *e)
{
    if (!json_is_string(value)) {
        return nbi_api_field(e, param, "expected a string, found %s", nbi_json_kind(value));
    }
    if (json_string_length(value) == 0) return nbi_api_field(e, param, "a stop text is empty");
    if (json_string_length(value) > NBI_STOP_BYTES_MAX) {
        return nbi_api_field(e, param, "a stop text of %zu bytes, at most %d",
                             json_string_length(value), NBI_STOP_BYTES_MAX);
    }
    if (s->n_stop_strings == NB_STOP_STRINGS_MAX) {
        return nbi_api_field(e, "stop", "more than %d stop texts", NB_STOP_STRINGS_MAX);
    }
    s->stop_strings[s->n_stop_strings++] = json_string_value(value);
    return NB_OK;
}

static nb_status read_stop_strings(nbi_params *p, const json_t *body, nbi_api_error *e)
{
    const json_t *stop = nbi_field(body, "stop");
    if (!stop) return NB_OK;
    if (json_is_string(stop)) return add_stop(&p->sampling, stop, "stop", e);
    if (!json_is_array(stop)) {
        return nbi_api_field(e, "stop", "expected a string or an array of strings, found %s",
                             nbi_json_kind(stop));
    }
    size_t i;
    const json_t *value;
    json_array_foreach(stop, i, value)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "stop[%zu]", i);
        NB_TRY(add_stop(&p->sampling, value, param, e));
    }
    return NB_OK;
}

static nb_status add_stop_regex(nb_sampling *s, const json_t *value, const char *param,
                                nbi_api_error *e)
{
    const char *text = json_string_value(value);
    nbi_stop_regex *regex = NULL;
    nb_error err = {0};
    if (!text) return nbi_api_field(e, param, "expected a string, found %s", nbi_json_kind(value));
    if (s->n_stop_regex == NB_STOP_REGEX_MAX)
        return nbi_api_field(e, "stop_regex", "more than %d expressions", NB_STOP_REGEX_MAX);
    nb_status status = nbi_stop_regex_create(&regex, &text, 1, &err);
    nbi_stop_regex_destroy(&regex);
    if (status == NB_NO_MEMORY) return nbi_api_no_memory(e, "this request");
    if (status != NB_OK) return nbi_api_field(e, param, "%s", err.text);
    s->stop_regex[s->n_stop_regex++] = text;
    return NB_OK;
}

static nb_status read_stop_regex(nbi_params *p, const json_t *body, nbi_api_error *e)
{
    const json_t *stop = nbi_field(body, "stop_regex"), *value;
    size_t i;
    if (!stop || (json_is_string(stop) && json_string_length(stop) == 0)) return NB_OK;
    if (json_is_string(stop)) return add_stop_regex(&p->sampling, stop, "stop_regex", e);
    if (!json_is_array(stop)) {
        return nbi_api_field(e, "stop_regex", "expected a string or an array of strings, found %s",
                             nbi_json_kind(stop));
    }
    json_array_foreach(stop, i, value)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "stop_regex[%zu]", i);
        NB_TRY(add_stop_regex(&p->sampling, value, param, e));
    }
    return NB_OK;
}

static nb_status read_stop_ids(nbi_params *p, const json_t *body, const nbi_api_facts *facts,
                               nbi_api_error *e)
{
    nb_sampling *s = &p->sampling;
    json_t *ids = NULL;
    const json_t *value;
    size_t i;
    NB_TRY(nbi_field_array(&ids, body, "", "stop_token_ids", e));
    if (!ids) return NB_OK;
    json_array_foreach(ids, i, value)
    {
        char param[NBI_PARAM_MAX];
        int64_t id;
        snprintf(param, sizeof param, "stop_token_ids[%zu]", i);
        NB_TRY(nbi_value_int(&id, value, param, 0, (int64_t)facts->vocab_size - 1, e));
        if (s->n_stop_ids == NB_STOP_IDS_MAX) {
            return nbi_api_field(e, "stop_token_ids", "more than %d ids", NB_STOP_IDS_MAX);
        }
        s->stop_ids[s->n_stop_ids++] = (int32_t)id;
    }
    return NB_OK;
}

/* Stay in the body; nbi_job_keep_sampling() takes them from there. */
static nb_status read_allowed(nbi_params *p, const json_t *body, const nbi_api_facts *facts,
                              nbi_api_error *e)
{
    json_t *ids = NULL;
    const json_t *value;
    size_t i;
    NB_TRY(nbi_field_array(&ids, body, "", "allowed_token_ids", e));
    if (!ids) return NB_OK;
    if (json_array_size(ids) == 0) return nbi_api_field(e, "allowed_token_ids", "is empty");
    json_array_foreach(ids, i, value)
    {
        char param[NBI_PARAM_MAX];
        int64_t id;
        snprintf(param, sizeof param, "allowed_token_ids[%zu]", i);
        NB_TRY(nbi_value_int(&id, value, param, 0, (int64_t)facts->vocab_size - 1, e));
    }
    p->allowed = ids;
    return NB_OK;
}

static nb_status read_bad_words(nbi_params *p, const json_t *body, const nbi_api_facts *facts,
                                nbi_api_error *e)
{
    json_t *words = NULL;
    const json_t *value;
    size_t i;
    NB_TRY(nbi_field_array(&words, body, "", "bad_words", e));
    if (json_array_size(words) == 0) return NB_OK;
    if (!facts->has_text)
        return nbi_api_field(e, "bad_words", "this model has no tokenizer, so there are no words");
    if (json_array_size(words) > NB_BAD_WORDS_MAX / 2)
        return nbi_api_field(e, "bad_words", "more than %d words", NB_BAD_WORDS_MAX / 2);
    json_array_foreach(words, i, value)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "bad_words[%zu]", i);
        if (!json_is_string(value)) {
            return nbi_api_field(e, param, "expected a string, found %s", nbi_json_kind(value));
        }
        const char *text = json_string_value(value);
        if (!text[strspn(text, " ")]) return nbi_api_field(e, param, "is empty");
        if (json_string_length(value) > NBI_STOP_BYTES_MAX)
            return nbi_api_field(e, param, "a word of %zu bytes, at most %d",
                                 json_string_length(value), NBI_STOP_BYTES_MAX);
    }
    p->bad_words = words;
    return NB_OK;
}

static nb_status read_text_options(nbi_params *p, const json_t *body, nbi_api_error *e)
{
    nb_sampling *s = &p->sampling;
    NB_TRY(nbi_field_bool(&s->include_stop, body, "", "no_stop_trim", e));
    NB_TRY(nbi_field_bool(&s->include_stop, body, "", "include_stop_str_in_output", e));
    return nbi_field_bool(&s->skip_special, body, "", "skip_special_tokens", e);
}

static nb_status read_think_budget(nbi_params *p, const json_t *body, nbi_api_error *e)
{
    int64_t budget = -1;
    NB_TRY(nbi_field_int(&budget, body, "", "thinking_token_budget", -1, UINT32_MAX, e));
    p->sampling.has_think_budget = budget >= 0;
    p->sampling.think_budget = budget >= 0 ? (uint32_t)budget : 0;
    return NB_OK;
}

nb_status nbi_params_read_logprob_ids(nbi_params *p, const json_t *body, const char *field,
                                      const nbi_api_facts *facts, nbi_api_error *e)
{
    nb_sampling *s = &p->sampling;
    json_t *ids = NULL;
    const json_t *value;
    size_t i;
    NB_TRY(nbi_field_array(&ids, body, "", field, e));
    if (json_array_size(ids) == 0) return NB_OK;
    if (p->n_prompt_logprobs >= 0)
        return nbi_api_field(e, field, "not together with \"prompt_logprobs\"");
    if (json_array_size(ids) > NB_TOP_LOGPROBS_MAX)
        return nbi_api_field(e, field, "more than %d ids", NB_TOP_LOGPROBS_MAX);
    json_array_foreach(ids, i, value)
    {
        char param[NBI_PARAM_MAX];
        int64_t id;
        snprintf(param, sizeof param, "%s[%zu]", field, i);
        NB_TRY(nbi_value_int(&id, value, param, 0, (int64_t)facts->vocab_size - 1, e));
        s->logprob_ids[s->n_logprob_ids++] = (int32_t)id;
    }
    p->n_logprobs = (int32_t)s->n_logprob_ids;
    return NB_OK;
}

/* vLLM's: the answer ends where a piece of it comes so often in a row. */
static nb_status read_repetition(nb_sampling *s, const json_t *body, nbi_api_error *e)
{
    static const char prefix[] = "repetition_detection.";
    json_t *object = NULL;
    int64_t most = 0, least = 0, count = 0;
    NB_TRY(nbi_field_object(&object, body, "", "repetition_detection", e));
    if (!object) return NB_OK;
    NB_TRY(nbi_field_int(&most, object, prefix, "max_pattern_size", 0, UINT32_MAX, e));
    NB_TRY(nbi_field_int(&least, object, prefix, "min_pattern_size", 0, UINT32_MAX, e));
    NB_TRY(nbi_field_int(&count, object, prefix, "min_count", 0, UINT32_MAX, e));
    if (least > most) {
        return nbi_api_field(e, "repetition_detection.min_pattern_size",
                             "%lld is more than max_pattern_size, %lld", (long long)least,
                             (long long)most);
    }
    if (!most) return NB_OK;
    if (count < 2) {
        return nbi_api_field(e, "repetition_detection.min_count",
                             "%lld is less than 2; max_pattern_size 0 detects nothing",
                             (long long)count);
    }
    s->repeat_min = (uint32_t)least;
    s->repeat_max = (uint32_t)most;
    s->repeat_count = (uint32_t)count;
    return NB_OK;
}

nb_status nbi_params_read_openai(nbi_params *p, const json_t *body, const nbi_api_facts *facts,
                                 nbi_api_error *e)
{
    NB_TRY(nbi_field_bool(&p->return_ids, body, "", "return_token_ids", e));
    NB_TRY(nbi_field_bool(&p->return_prompt_ids, body, "", "return_prompt_token_ids", e));
    NB_TRY(nbi_field_bool(&p->return_meta, body, "", "return_meta_info", e));
    if (p->return_meta && p->stream)
        return nbi_api_field(e, "return_meta_info", "not available when \"stream\" is true");
    NB_TRY(read_repetition(&p->sampling, body, e));
    NB_TRY(nbi_field_bool(&p->name_by_id, body, "", "return_tokens_as_token_ids", e));
    return nbi_params_read_logprob_ids(p, body, "logprob_token_ids", facts, e);
}

static nb_status read_interval(nbi_params *p, const json_t *body, nbi_api_error *e)
{
    int64_t interval = 0;
    NB_TRY(nbi_field_int(&interval, body, "", "stream_interval", 1, UINT32_MAX, e));
    p->stream_interval = (uint32_t)interval;
    return NB_OK;
}

static nb_status read_stream(nbi_params *p, const json_t *body, nbi_api_error *e)
{
    json_t *options = NULL;
    NB_TRY(nbi_field_bool(&p->stream, body, "", "stream", e));
    NB_TRY(nbi_field_object(&options, body, "", "stream_options", e));
    if (!options) return NB_OK;
    if (!p->stream) {
        return nbi_api_field(e, "stream_options", "only allowed when \"stream\" is true");
    }
    NB_TRY(nbi_field_bool(&p->include_usage, options, "stream_options.", "include_usage", e));
    return nbi_field_bool(&p->continuous_usage, options, "stream_options.",
                          "continuous_usage_stats", e);
}

/* Which tokens besides the answer's are of interest, and how much of the prompt is. */
static nb_status read_prompt_options(nbi_params *p, const json_t *body, const nbi_api_facts *facts,
                                     nbi_api_error *e)
{
    int64_t n = -1, priority = 0;
    NB_TRY(nbi_field_int(&n, body, "", "prompt_logprobs", 0, NB_TOP_LOGPROBS_MAX, e));
    if (n >= 0 && p->stream) {
        return nbi_api_field(e, "prompt_logprobs", "not available when \"stream\" is true");
    }
    p->n_prompt_logprobs = (int32_t)n;
    NB_TRY(nbi_field_int(&p->truncate_prompt, body, "", "truncate_prompt_tokens", -1,
                         facts->max_context, e));
    if (nbi_field(body, "truncate_prompt_tokens") && p->truncate_prompt == 0) {
        return nbi_api_field(e, "truncate_prompt_tokens", "0 leaves no token to start from");
    }
    const char *side = "left";
    NB_TRY(nbi_field_str(&side, body, "", "truncation_side", e));
    p->truncate_end = strcmp(side, "right") == 0;
    if (!p->truncate_end && strcmp(side, "left") != 0) {
        return nbi_api_field(e, "truncation_side", "\"%.32s\" is unknown, expected left or right",
                             side);
    }
    NB_TRY(nbi_field_int(&priority, body, "", "priority", INT32_MIN, INT32_MAX, e));
    p->priority = (int32_t)priority;
    return NB_OK;
}

/* A string, or one for every prompt. */
static nb_status read_salt(const json_t **out, const json_t *body, const char *key,
                           nbi_api_error *e)
{
    const char *string;
    const json_t *value = nbi_field(body, key), *one;
    size_t i;
    *out = value;
    if (!json_is_array(value)) return nbi_field_str(&string, body, "", key, e);
    json_array_foreach(value, i, one)
    {
        char param[NBI_PARAM_MAX];
        snprintf(param, sizeof param, "%s[%zu]", key, i);
        if (!json_is_string(one))
            return nbi_api_field(e, param, "expected a string, found %s", nbi_json_kind(one));
    }
    return NB_OK;
}

nb_status nbi_params_read_salts(nbi_params *p, const json_t *body, nbi_api_error *e)
{
    NB_TRY(read_salt(&p->salts[0], body, "cache_salt", e));
    return read_salt(&p->salts[1], body, "extra_key", e);
}

/* Fields without effect on the answer: the type has to be right. */
static nb_status check_ignored(const json_t *body, nbi_api_error *e)
{
    static const char *const strings[] = {"user", "service_tier", "safety_identifier",
                                          "prompt_cache_key"};
    static const char *const booleans[] = {"store", "spaces_between_special_tokens",
                                           "add_special_tokens"};
    const char *string;
    json_t *object;
    bool boolean;
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        NB_TRY(nbi_field_str(&string, body, "", strings[i], e));
    }
    for (size_t i = 0; i < sizeof booleans / sizeof *booleans; i++) {
        NB_TRY(nbi_field_bool(&boolean, body, "", booleans[i], e));
    }
    return nbi_field_object(&object, body, "", "metadata", e);
}

/* What every API has. */
static nb_status read_common(nbi_params *out, const json_t *body, const nbi_api_facts *facts,
                             const nbi_param_names *names, uint32_t min_max_tokens,
                             nbi_api_error *e)
{
    NB_TRY(read_lengths(out, body, names, min_max_tokens, e));
    NB_TRY(read_randomness(out, body, names, e));
    NB_TRY(read_penalties(out, body, e));
    NB_TRY(read_logit_bias(out, body, facts, e));
    NB_TRY(read_n(out, body, e));
    NB_TRY(read_stop_strings(out, body, e));
    NB_TRY(read_stop_regex(out, body, e));
    NB_TRY(read_stop_ids(out, body, facts, e));
    NB_TRY(read_allowed(out, body, facts, e));
    NB_TRY(read_bad_words(out, body, facts, e));
    NB_TRY(read_think_budget(out, body, e));
    NB_TRY(read_interval(out, body, e));
    return read_text_options(out, body, e);
}

static nbi_params defaults(const nbi_api_facts *facts)
{
    return (nbi_params){.sampling = facts->defaults,
                        .n = 1,
                        .best_of = 1,
                        .n_logprobs = -1,
                        .n_prompt_logprobs = -1};
}

nb_status nbi_params_read(nbi_params *out, const json_t *body, const nbi_api_facts *facts,
                          uint32_t min_max_tokens, nbi_api_error *e)
{
    static const nbi_param_names names = {"", "max_tokens", "min_tokens", "seed"};
    *out = defaults(facts);
    out->prefix = names.prefix;
    NB_TRY(nbi_params_read_model(body, facts, e));
    NB_TRY(read_common(out, body, facts, &names, min_max_tokens, e));
    NB_TRY(read_stream(out, body, e));
    NB_TRY(read_prompt_options(out, body, facts, e));
    NB_TRY(read_beams(out, body, facts, e));
    NB_TRY(nbi_params_read_salts(out, body, e));
    NB_TRY(check_ignored(body, e));
    return refuse_unsupported(body, e);
}

/* "stop[3]" becomes "sampling_params.stop[3]", as the sentence that begins with it. */
static void put_prefix(nbi_api_error *e, const char *prefix)
{
    nbi_api_error inner = *e;
    size_t n = strlen(inner.param);
    if (!n || inner.http != 400) return;
    snprintf(e->param, sizeof e->param, "%s%.*s", prefix,
             (int)(sizeof e->param - strlen(prefix) - 1), inner.param);
    if (strncmp(inner.message, inner.param, n) != 0) return;
    snprintf(e->message, sizeof e->message, "%s%.*s", prefix,
             (int)(sizeof e->message - strlen(prefix) - 1), inner.message);
}

nb_status nbi_params_read_native(nbi_params *out, const json_t *obj, const nbi_api_facts *facts,
                                 nbi_api_error *e)
{
    static const nbi_param_names names = {"sampling_params.", "max_new_tokens", "min_new_tokens",
                                          "sampling_seed"};
    *out = defaults(facts);
    out->prefix = names.prefix;
    nb_status status = read_common(out, obj, facts, &names, 0, e);
    if (status == NB_OK) status = nbi_params_refuse_openai(obj, e);
    if (status == NB_OK) status = check_ignored(obj, e);
    if (status == NB_OK) status = refuse_unsupported(obj, e);
    if (status == NB_OK) status = REFUSE(obj, beam_fields, "not supported by this API", e);
    if (status != NB_OK) put_prefix(e, names.prefix);
    return status;
}

nb_status nbi_params_check_length(const nbi_params *params, const nbi_api_facts *facts,
                                  size_t n_prompt, const char *prompt_field, nbi_api_error *e)
{
    const uint64_t limit = facts->max_context;
    if (n_prompt == 0) return nbi_api_field(e, prompt_field, "is empty, no token to start from");
    if (n_prompt >= limit) {
        return nbi_api_fail(e, 400, "context_length_exceeded", prompt_field,
                            "%s: the prompt has %zu tokens, which leaves no room for an answer "
                            "(%s: %u) in the context of %llu tokens",
                            prompt_field, n_prompt, params->max_tokens_field, params->max_tokens,
                            (unsigned long long)limit);
    }
    if (params->has_max_tokens && n_prompt + params->max_tokens > limit) {
        return nbi_api_fail(e, 400, "context_length_exceeded", params->max_tokens_field,
                            "%s: the prompt has %zu tokens and the answer may have %u, together "
                            "more than the context of %llu tokens",
                            params->max_tokens_field, n_prompt, params->max_tokens,
                            (unsigned long long)limit);
    }
    return NB_OK;
}
