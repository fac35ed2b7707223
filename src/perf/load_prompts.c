/* Random prompts are token ids where the server has /tokenize and the endpoint takes ids: their
 * length is then exact and nothing merges. Elsewhere they are words, as many as the server's own
 * count of two prompts says. */
#include "perf/load_prompts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "perf/load_file.h"
#include "perf/load_random.h"

static const char *const words[] = {
    "the",     "of",     "and",     "water",  "people",  "time",  "house",  "number",  "sound",
    "place",   "little", "work",    "know",   "years",   "live",  "back",   "give",    "most",
    "very",    "after",  "things",  "our",    "just",    "name",  "good",   "man",     "think",
    "say",     "great",  "where",   "help",   "through", "much",  "before", "line",    "right",
    "too",     "means",  "old",     "any",    "same",    "tell",  "boy",    "follow",  "came",
    "want",    "show",   "also",    "around", "form",    "three", "small",  "set",     "put",
    "end",     "does",   "another", "well",   "large",   "must",  "big",    "even",    "such",
    "because", "turn",   "here",    "why",    "ask",     "went",  "men",    "read",    "need",
    "land",    "home",   "us",      "move",   "try",     "kind",  "hand",   "picture", "again",
    "change",  "off",    "play",    "spell",  "air",     "away",  "animal", "page",    "letter",
    "mother",  "answer", "found",   "study",  "still",   "learn", "should", "world",   "high",
    "every",   "near",   "add",     "food",   "between", "own",   "below",  "country", "plant",
};
enum { N_WORDS = sizeof words / sizeof *words };

/* How text becomes tokens at this server. */
typedef struct maker {
    const nbi_load_options *opt;
    nbi_load_client *client;
    const char *model;
    json_t *base; /* the members that all bodies have */
    bool chat, ids;
    uint32_t low_id, high_id;  /* ids: between them all are ordinary text */
    double per_word, overhead; /* text: tokens = overhead + per_word * words */
    bool calibrated;           /* per_word is measured */
    double bytes_per_token;    /* of words */
    nbi_load_rng rng;
    nbi_buf text;
} maker;

static nb_status no_memory(nb_error *err)
{
    return nbi_fail(err, NB_NO_MEMORY, "out of memory for the prompts");
}

/* ---- bodies */

/* Steals `prompt`: a string, an array of ids or, for chat, of messages. */
static nb_status make_body(maker *m, nbi_load_prompt *out, json_t *prompt, uint32_t input,
                           uint32_t output, nb_error *err)
{
    json_t *body = json_copy(m->base);
    if (m->chat && json_is_string(prompt))
        prompt = json_pack("[{s:s, s:o}]", "role", "user", "content", prompt);
    int bad = !body || !prompt ||
              json_object_set_new(body, m->chat ? "messages" : "prompt", prompt) != 0 ||
              (!json_object_get(body, "max_tokens") &&
               json_object_set_new(body, "max_tokens", json_integer(output)) != 0);
    char *text = bad ? NULL : json_dumps(body, JSON_COMPACT);
    json_decref(body);
    if (!text) return no_memory(err);
    *out = (nbi_load_prompt){
        .body = text, .body_bytes = strlen(text), .input_tokens = input, .output_tokens = output};
    return NB_OK;
}

static nb_status make_base(maker *m, nb_error *err)
{
    const nbi_load_options *opt = m->opt;
    m->base = json_pack("{s:s, s:b}", "model", m->model, "stream", opt->stream);
    bool ok = m->base;
    if (ok && opt->stream)
        ok =
            !json_object_set_new(m->base, "stream_options", json_pack("{s:b}", "include_usage", 1));
    if (ok && opt->temperature >= 0)
        ok = !json_object_set_new(m->base, "temperature", json_real(opt->temperature));
    if (ok && opt->ignore_eos) ok = !json_object_set_new(m->base, "ignore_eos", json_true());
    if (!ok) return no_memory(err);
    if (!opt->extra_body) return NB_OK;
    json_t *extra;
    NB_TRY(nbi_json_parse(&extra, opt->extra_body, strlen(opt->extra_body), "--extra-body", err));
    ok = json_is_object(extra);
    if (ok && json_object_update(m->base, extra) != 0) {
        json_decref(extra);
        return no_memory(err);
    }
    const char *kind = nbi_json_kind(extra);
    json_decref(extra);
    return ok ? NB_OK
              : nbi_fail(err, NB_INVALID, "--extra-body is %s; expected a JSON object", kind);
}

/* ---- what the server makes of words */

static nb_status add_words(maker *m, uint32_t n, nb_error *err)
{
    for (uint32_t i = 0; i < n; i++) {
        const char *word = words[nbi_load_random_range(&m->rng, 0, N_WORDS - 1)];
        if (nbi_buf_addf(&m->text, "%s%s", m->text.len ? " " : "", word) != NB_OK)
            return no_memory(err);
    }
    return NB_OK;
}

/* The ids of all words; leaves m->ids false when the server does not tell them. */
static nb_status learn_ids(maker *m, nb_error *err)
{
    nbi_buf_clear(&m->text);
    for (size_t i = 0; i < N_WORDS; i++)
        if (nbi_buf_addf(&m->text, "%s%s", i ? " " : "", words[i]) != NB_OK) return no_memory(err);
    json_t *body = json_pack("{s:s, s:s, s:b}", "model", m->model, "prompt", m->text.data,
                             "add_special_tokens", 0);
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    json_decref(body);
    if (!text) return no_memory(err);
    nbi_load_call call = {.path = "/tokenize", .body = text, .body_bytes = strlen(text)};
    json_t *reply = NULL;
    nb_status st = nbi_load_client_fetch(m->client, &call, &reply, err);
    free(text);
    if (st != NB_OK) return st;
    const json_t *tokens = json_object_get(reply, "tokens"), *token;
    size_t i, n = json_array_size(tokens);
    m->low_id = UINT32_MAX;
    m->high_id = 0;
    bool ok = n >= N_WORDS / 2;
    json_array_foreach(tokens, i, token)
    {
        json_int_t id = json_is_integer(token) ? json_integer_value(token) : -1;
        if (id < 0 || id > INT32_MAX) ok = false;
        if (id < m->low_id) m->low_id = (uint32_t)id;
        if (id > m->high_id) m->high_id = (uint32_t)id;
    }
    json_decref(reply);
    m->ids = ok;
    if (ok) m->bytes_per_token = (double)m->text.len / (double)n;
    return NB_OK;
}

/* The server's own count of all words, `copies` times; 0 when it does not tell. */
static nb_status count_words(maker *m, uint32_t copies, uint32_t *tokens, nb_error *err)
{
    nbi_buf_clear(&m->text);
    for (uint32_t i = 0; i < copies * N_WORDS; i++)
        if (nbi_buf_addf(&m->text, "%s%s", i ? " " : "", words[i % N_WORDS]) != NB_OK)
            return no_memory(err);
    json_t *prompt = json_stringn(m->text.data, m->text.len);
    nbi_load_prompt one;
    NB_TRY(make_body(m, &one, prompt, 0, 1, err));
    nbi_load_call call = {.path = m->opt->endpoint, .body = one.body, .body_bytes = one.body_bytes};
    nb_status st = nbi_load_client_ask(m->client, &call, err);
    free(one.body);
    if (st == NB_OK && call.answer.failure)
        st = nbi_load_answer_fail(&call.answer, "a first small request", err);
    *tokens = call.answer.has_usage ? call.answer.input_tokens : 0;
    nbi_load_answer_free(&call.answer);
    return st;
}

/* Every word counts the same in both, so the difference is the mean that random words have. */
static nb_status calibrate(maker *m, nb_error *err)
{
    uint32_t once, twice;
    NB_TRY(count_words(m, 1, &once, err));
    NB_TRY(count_words(m, 2, &twice, err));
    m->calibrated = once && twice > once;
    m->per_word = m->calibrated ? (double)(twice - once) / N_WORDS : 1.3;
    m->overhead = m->calibrated ? fmax(0, once - m->per_word * N_WORDS) : 0;
    m->bytes_per_token = (double)m->text.len / (2 * N_WORDS * m->per_word);
    return NB_OK;
}

static nb_status learn(maker *m, nb_error *err)
{
    if (!m->chat && !m->opt->as_text) NB_TRY(learn_ids(m, err));
    return m->ids ? NB_OK : calibrate(m, err);
}

/* ---- random prompts */

static uint32_t draw_length(maker *m, uint32_t length)
{
    double r = m->opt->range_ratio;
    uint32_t low = (uint32_t)floor(length * (1 - r)), high = (uint32_t)ceil(length * (1 + r));
    return nbi_load_random_range(&m->rng, low ? low : 1, high ? high : 1);
}

/* The seed of a group's prefix is its own, so that it comes out the same for every prompt. */
static nb_status random_prompt(maker *m, json_t **out, uint32_t prefix, uint32_t group,
                               uint32_t input, nb_error *err)
{
    const nbi_load_rng outer = m->rng;
    json_t *ids = m->ids ? json_array() : NULL;
    if (m->ids && !ids) return no_memory(err);
    nbi_buf_clear(&m->text);
    const uint32_t lengths[2] = {prefix, input};
    for (int part = 0; part < 2; part++) {
        m->rng = part ? outer : (nbi_load_rng){m->opt->seed * 1000003 + group + 1};
        uint32_t n = lengths[part];
        if (m->ids) {
            for (uint32_t i = 0; i < n; i++)
                if (json_array_append_new(ids, json_integer(nbi_load_random_range(
                                                   &m->rng, m->low_id, m->high_id))) != 0) {
                    json_decref(ids);
                    return no_memory(err);
                }
        } else if (n) {
            double tokens = n - (part ? m->overhead : 0);
            uint32_t n_words = tokens < m->per_word ? 1 : (uint32_t)(tokens / m->per_word + 0.5);
            NB_TRY(add_words(m, n_words, err));
        }
    }
    *out = m->ids ? ids : json_stringn(m->text.data, m->text.len);
    return *out ? NB_OK : no_memory(err);
}

static nb_status make_random(maker *m, nbi_load_prompts *out, nb_error *err)
{
    const nbi_load_options *opt = m->opt;
    const bool shared = opt->dataset == NBI_LOAD_SHARED_PREFIX;
    NB_TRY(learn(m, err));
    for (uint32_t i = 0; i < out->n + out->n_warmup; i++) {
        uint32_t input = draw_length(m, opt->input_len), output = draw_length(m, opt->output_len);
        uint32_t group = shared ? nbi_load_random_range(&m->rng, 0, opt->prefix_groups - 1) : 0;
        uint32_t prefix = shared ? opt->prefix_len : 0;
        json_t *prompt;
        NB_TRY(random_prompt(m, &prompt, prefix, group, input, err));
        NB_TRY(make_body(m, &out->items[i], prompt, prefix + input, output, err));
    }
    if (m->ids)
        snprintf(out->how, sizeof out->how, "random token ids %u to %u, exact lengths", m->low_id,
                 m->high_id);
    else
        snprintf(out->how, sizeof out->how, "random words, %s%.3f tokens per word and %.0f more",
                 m->calibrated ? "" : "guessed (the server sends no usage): ", m->per_word,
                 m->overhead);
    return NB_OK;
}

/* ---- prompts of a file */

static nb_status make_file(maker *m, nbi_load_prompts *out, const nbi_load_file *file,
                           nb_error *err)
{
    const nbi_load_options *opt = m->opt;
    bool estimated = false;
    NB_ASSERT(file->n > 0);
    for (uint32_t i = 0; i < file->n && !opt->file_output_len; i++)
        estimated |= !file->entries[i].output_tokens && file->entries[i].answer_bytes;
    if (estimated) NB_TRY(learn(m, err));
    for (uint32_t i = 0; i < out->n + out->n_warmup; i++) {
        const nbi_load_entry *e = &file->entries[i % file->n];
        uint32_t output = opt->file_output_len ? opt->file_output_len : e->output_tokens;
        if (!output && e->answer_bytes)
            output = (uint32_t)fmax(1, round((double)e->answer_bytes / m->bytes_per_token));
        if (!output) output = opt->output_len;
        uint32_t input = json_is_integer(json_array_get(e->prompt, 0))
                             ? (uint32_t)json_array_size(e->prompt)
                             : 0;
        NB_TRY(make_body(m, &out->items[i], json_incref(e->prompt), input, output, err));
    }
    snprintf(out->how, sizeof out->how, "%u prompts of the %u in the file%s%s", out->n, file->n,
             out->n > file->n ? ", again from the start" : "",
             estimated ? "; answer lengths estimated from the bytes of the file's answers" : "");
    return NB_OK;
}

/* ---- all */

static nb_status check(const nbi_load_options *opt, nb_error *err)
{
    if (opt->dataset != NBI_LOAD_FILE && !opt->input_len)
        return nbi_fail(err, NB_INVALID, "--random-input-len is 0; expected at least 1");
    if (!opt->output_len)
        return nbi_fail(err, NB_INVALID, "--random-output-len is 0; expected at least 1");
    if (!(opt->range_ratio >= 0 && opt->range_ratio < 1))
        return nbi_fail(err, NB_INVALID, "--random-range-ratio is %g; expected 0 <= r < 1",
                        opt->range_ratio);
    if (opt->dataset == NBI_LOAD_SHARED_PREFIX && (!opt->prefix_groups || !opt->prefix_len))
        return nbi_fail(err, NB_INVALID,
                        "--shared-prefix-len %u, --shared-prefix-groups %u; expected at least 1",
                        opt->prefix_len, opt->prefix_groups);
    if (opt->dataset == NBI_LOAD_FILE && !opt->path)
        return nbi_fail(err, NB_INVALID, "--dataset-name file needs --dataset-path FILE");
    return NB_OK;
}

nb_status nbi_load_prompts_make(nbi_load_prompts *out, const nbi_load_options *opt,
                                const char *model, nbi_load_client *client, nb_error *err)
{
    nb_status st;
    nbi_load_prompts made = {0};
    nbi_load_file file = {0};
    maker m = {.opt = opt, .client = client, .model = model, .rng = {opt->seed}};
    size_t n = strlen(opt->endpoint);
    m.chat = n >= 16 && !strcmp(opt->endpoint + n - 16, "chat/completions");
    NB_TRY(check(opt, err));
    NB_TRY_OR(st, make_base(&m, err), fail);
    if (opt->dataset == NBI_LOAD_FILE)
        NB_TRY_OR(st, nbi_load_file_read(&file, opt->path, m.chat, err), fail);
    made.n = opt->n_prompts ? opt->n_prompts : 1000;
    if (!opt->n_prompts && file.n && file.n < made.n) made.n = file.n;
    made.n_warmup = opt->n_warmup;
    made.items = nbi_calloc((size_t)made.n + made.n_warmup, sizeof *made.items);
    st = made.items ? NB_OK : no_memory(err);
    if (st == NB_OK)
        st = opt->dataset == NBI_LOAD_FILE ? make_file(&m, &made, &file, err)
                                           : make_random(&m, &made, err);
fail:
    json_decref(m.base);
    nbi_buf_free(&m.text);
    nbi_load_file_free(&file);
    if (st != NB_OK)
        nbi_load_prompts_free(&made);
    else
        *out = made;
    return st;
}

void nbi_load_prompts_free(nbi_load_prompts *prompts)
{
    for (uint32_t i = 0; prompts->items && i < prompts->n + prompts->n_warmup; i++)
        free(prompts->items[i].body);
    nbi_free(prompts->items);
    *prompts = (nbi_load_prompts){0};
}
