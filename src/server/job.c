/* The life of an API request that is the same for every surface. Called by exchange.c. */
#include "server/job.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "server/prompts.h"

#define READ_EVENTS 32u /* of an answer that is not streamed: read so many at a time */

/* ---------------------------------------------------------------- opening */

/* The part of every reply and event before the first choice. */
static nb_status write_head(nbi_job *job)
{
    const nbi_surface *s = job->surface;
    const char *name = job->served->facts.names[0];
    const char *id = job->name ? job->name : job->id;
    nbi_buf full = {0};
    nb_status status = nbi_buf_addf(&full, "%s%s", job->name_is_id ? "" : s->id_prefix, id);
    if (status == NB_OK) status = nbi_job_write_string(&job->head, "{\"id\":", full.data, full.len);
    nbi_buf_free(&full);
    NB_TRY(status);
    NB_TRY(nbi_buf_addf(&job->head, ",\"object\":\"%s\",\"created\":%lld,\"model\":",
                        job->params.stream ? s->chunk_object : s->object, (long long)job->created));
    NB_TRY(nbi_json_quote(&job->head, name, strlen(name)));
    return nbi_buf_addf(&job->head, ",\"system_fingerprint\":null,\"choices\":[");
}

static const char *prompt_field(const nbi_job *job)
{
    const char *field = job->prompt_field ? job->prompt_field : job->surface->prompt_field;
    return field ? field : "prompt";
}

nb_status nbi_job_keep_name(nbi_job *job, const char **out, const json_t *value, const char *param,
                            nbi_api_error *e)
{
    if (!json_is_string(value)) {
        return nbi_api_field(e, param, "expected a string, found %s", nbi_json_kind(value));
    }
    size_t n = json_string_length(value);
    if (n == 0 || n > NBI_NAME_BYTES_MAX) {
        return nbi_api_field(e, param, "has %zu bytes, expected 1 to %d", n, NBI_NAME_BYTES_MAX);
    }
    *out = nbi_arena_strndup(&job->arena, json_string_value(value), n);
    return *out ? NB_OK : nbi_api_no_memory(e, "this request");
}

/* What the client calls the request: SGLang's "rid", which replies have as their id, or vLLM's
 * "request_id". */
static nb_status read_name(nbi_job *job, const json_t *body, nbi_api_error *e)
{
    const json_t *rid = nbi_field(body, "rid"), *request_id = nbi_field(body, "request_id");
    if (job->names || job->name) return NB_OK; /* read by the surface */
    if (request_id) NB_TRY(nbi_job_keep_name(job, &job->name, request_id, "request_id", e));
    if (!rid) return NB_OK;
    job->name_is_id = true;
    return nbi_job_keep_name(job, &job->name, rid, "rid", e);
}

static nb_status check_prompts(const nbi_job *job, nbi_api_error *e)
{
    for (uint32_t i = 0; i < job->n_prompts; i++) {
        char field[NBI_PARAM_MAX];
        if (job->n_prompts > 1) {
            snprintf(field, sizeof field, "%s[%u]", prompt_field(job), i);
        } else {
            snprintf(field, sizeof field, "%s", prompt_field(job));
        }
        NB_TRY(nbi_params_check_length(&job->params, job->facts, job->prompts[i].n_ids, field, e));
    }
    return NB_OK;
}

static nb_status make_choices(nbi_job *job, nbi_api_error *e)
{
    const nbi_params *p = &job->params;
    job->per_prompt = p->best_of;
    uint64_t n = (uint64_t)job->n_prompts * job->per_prompt;
    if (p->beams && !job->surface->beams)
        return nbi_api_field(e, "use_beam_search", "not supported by this API");
    if (p->beams && job->constraint.field) {
        return nbi_api_field(e, job->constraint.field, "not together with \"use_beam_search\"");
    }
    if (p->best_of > p->n && !job->surface->ranks && !p->beams) {
        return nbi_api_field(e, "best_of", "not supported here unless it equals n, %u", p->n);
    }
    if (n > NBI_CHOICES_MAX) {
        return nbi_api_field(e, prompt_field(job),
                             "%u prompts times %s = %u is more than %d answers", job->n_prompts,
                             p->best_of > p->n ? "best_of" : "n", p->best_of, NBI_CHOICES_MAX);
    }
    job->choices = nbi_calloc((size_t)n, sizeof *job->choices);
    if (!job->choices) return nbi_api_no_memory(e, "this request");
    job->n_choices = (uint32_t)n;
    for (uint32_t i = 0; i < job->n_choices; i++) {
        nbi_choice *c = &job->choices[i];
        c->job = job;
        c->event = job->hooks.event;
        c->event_user = job->hooks.user;
        c->index = i;
        c->prompt = i / job->per_prompt;
        c->matched_id = c->matched_string = -1;
        c->logprobs.by_id = p->name_by_id;
        c->native.with_text = true;
        atomic_init(&c->signalled, false);
        atomic_init(&c->was_aborted, false);
        if (job->surface->begin(job, c) != NB_OK) return nbi_api_no_memory(e, "this request");
    }
    return NB_OK;
}

static void on_notify(void *user)
{
    nbi_choice *choice = user;
    atomic_store(&choice->signalled, true);
    choice->event(choice->event_user);
}

/* Which answers are shown, and in which order, is known when all are done. */
static bool is_ranked(const nbi_job *job)
{
    return job->params.beams || job->params.best_of > job->params.n;
}

/* Asks the engine for the most that is wanted of any token. */
static void set_logprobs(const nbi_job *job, nb_sampling *s)
{
    const nbi_params *p = &job->params;
    s->n_logprobs = p->n_logprobs > p->n_prompt_logprobs ? p->n_logprobs : p->n_prompt_logprobs;
    if (is_ranked(job) && s->n_logprobs < 0 && !p->beams) s->n_logprobs = 0;
    s->prompt_logprobs = p->n_prompt_logprobs >= 0 || (job->echo && p->n_logprobs >= 0);
}

/* Events the engine gathers before it says so; the first and the last come at once. */
static uint32_t notify_events(const nbi_job *job)
{
    if (!job->params.stream || is_ranked(job)) return READ_EVENTS;
    return job->params.stream_interval ? job->params.stream_interval : job->served->stream_interval;
}

/* What is asked of the engine for a choice, but for its grammar. Answer i of a prompt has the seed
 * plus i, so that they differ and can be had again. */
static nb_request_options options_of(nbi_job *job, nbi_choice *choice)
{
    const nbi_prompt *prompt = &job->prompts[choice->prompt];
    nb_request_options options = {.prompt = prompt->ids,
                                  .n_prompt = prompt->n_ids,
                                  .sampling = job->params.sampling,
                                  .priority = job->params.priority,
                                  .client = job->hooks.client,
                                  .cache_salt = prompt->cache_salt,
                                  .timeout_ms = job->served->request_timeout_ms,
                                  .notify_events = notify_events(job),
                                  .notify = on_notify,
                                  .notify_user = choice,
                                  .arrival_ns = job->begin_ns,
                                  .count = job->count};
    nb_sampling *s = &options.sampling;
    set_logprobs(job, s);
    nbi_job_set_thinking(prompt, s);
    s->seed += choice->index % job->per_prompt;
    s->max_tokens = job->params.max_tokens;
    if (job->params.has_max_tokens && s->max_tokens == 0) {
        s->max_tokens = 1; /* and is dropped */
        options.count = NB_COUNT_PROMPT;
    }
    return options;
}

/* What the engine has refused. Its sentences about a field of sampling begin with the name; what is
 * left is about the prompt, or `other` where that is given. */
static nb_status refused(const nbi_job *job, nb_status status, const nb_error *err,
                         const char *other, nbi_api_error *e)
{
    size_t n = strspn(err->text, "abcdefghijklmnopqrstuvwxyz_");
    bool named = (status == NB_INVALID || status == NB_UNSUPPORTED) && n &&
                 (err->text[n] == ':' || strncmp(err->text + n, " is ", 4) == 0) &&
                 strncmp(err->text, "prompt", 6) != 0;
    if (!named) return nbi_api_from(e, status, err, other ? other : prompt_field(job));
    nb_error full;
    char field[NBI_PARAM_MAX];
    size_t n_prefix = strlen(job->params.prefix);
    snprintf(full.text, sizeof full.text, "%s%.*s", job->params.prefix,
             (int)(sizeof full.text - n_prefix - 1), err->text);
    snprintf(field, sizeof field, "%.*s", (int)(n_prefix + n), full.text);
    return nbi_api_from(e, status, &full, field);
}

static nb_status submit(nbi_job *job, nbi_choice *choice, nbi_api_error *e)
{
    nb_request_options options = options_of(job, choice);
    nb_error err = {0};
    nb_grammar hooks;
    if (choice->grammar) {
        hooks = nbi_grammar_hooks(choice->grammar);
        options.grammar = &hooks;
    }
    nb_status status = nb_request_submit(&choice->request, job->served->engine, &options, &err);
    if (status != NB_OK) return refused(job, status, &err, NULL, e);
    if (choice->grammar) nbi_grammar_retain(choice->grammar);
    return NB_OK;
}

/* One search for every prompt: its answers are the choices, the best first. */
static nb_status submit_beams(nbi_job *job, nbi_api_error *e)
{
    const nbi_params *p = &job->params;
    for (uint32_t i = 0; i < job->n_choices; i += p->best_of) {
        nbi_choice *choices = &job->choices[i];
        const nb_request_options options = options_of(job, choices);
        nb_request *requests[NB_BEAM_WIDTH_MAX];
        void *users[NB_BEAM_WIDTH_MAX];
        nb_error err = {0};
        for (uint32_t k = 0; k < p->best_of; k++) users[k] = &choices[k];
        const nb_beam_options beam = {.width = p->best_of,
                                      .length_penalty = p->length_penalty,
                                      .early_stopping = p->early_stopping,
                                      .notify_users = users};
        nb_status status = nb_beams_submit(requests, job->served->engine, &options, &beam, &err);
        if (status == NB_TOO_LARGE) return nbi_api_field(e, p->max_tokens_field, "%s", err.text);
        if (status != NB_OK) return refused(job, status, &err, "use_beam_search", e);
        for (uint32_t k = 0; k < p->best_of; k++) choices[k].request = requests[k];
    }
    return NB_OK;
}

static nb_status submit_all(nbi_job *job, nbi_api_error *e)
{
    if (job->params.beams) NB_TRY(submit_beams(job, e));
    for (uint32_t i = 0; i < job->n_choices && !job->params.beams; i++)
        NB_TRY(submit(job, &job->choices[i], e));
    atomic_store(&job->submitted, true);
    for (uint32_t i = 0; i < job->n_choices; i++) { /* aborted while the grammar was made */
        nbi_choice *c = &job->choices[i];
        if (atomic_load(&c->was_aborted)) nb_request_cancel(c->request);
    }
    return NB_OK;
}

nb_status nbi_job_open(nbi_job **out, const nbi_surface *surface, const nbi_served *served,
                       json_t *body, const nbi_job_hooks *hooks, nbi_api_error *e)
{
    nb_status status = NB_OK;
    nbi_job *job = nbi_calloc(1, sizeof *job);
    if (!job) return nbi_api_no_memory(e, "this request");
    job->surface = surface;
    job->served = served;
    job->facts = &served->facts;
    job->hooks = *hooks;
    job->created = (int64_t)time(NULL);
    job->begin_ns = nbi_now_ns();
    nbi_served_next_id(served, job->id);
    NB_TRY_OR(status, surface->read(job, body, e), fail);
    NB_TRY_OR(status, read_name(job, body, e), fail);
    NB_TRY_OR(status, surface->encode(job, body, e), fail);
    json_decref(job->chat);
    job->chat = NULL;
    if (surface->count_only) {
        *out = job;
        return NB_OK;
    }
    NB_TRY_OR(status, nbi_prompts_truncate(job, e), fail);
    NB_TRY_OR(status, check_prompts(job, e), fail);
    NB_TRY_OR(status, nbi_job_keep_sampling(job, e), fail);
    NB_TRY_OR(status, make_choices(job, e), fail);
    NB_TRY_OR(status, nbi_job_make_grammars(job, e), fail);
    if (write_head(job) != NB_OK) {
        status = nbi_api_no_memory(e, "this request");
        goto fail;
    }
    if (!job->order) NB_TRY_OR(status, submit_all(job, e), fail);
    *out = job;
    return NB_OK;
fail:
    nbi_job_close(&job);
    return status;
}

void nbi_job_close(nbi_job **out)
{
    nbi_job *job = *out;
    if (!job) return;
    nbi_grammar_order_close(&job->order);
    for (uint32_t i = 0; i < job->n_choices; i++) {
        nbi_choice *c = &job->choices[i];
        nb_request_close(&c->request);
        nbi_grammar_close(&c->grammar); /* the engine has a share of it */
        nbi_buf_free(&c->text);
        nbi_buf_free(&c->lead);
        nbi_answer_free(&c->answer);
        nbi_logprobs_free(&c->logprobs);
        nbi_logprobs_free(&c->prompt_logprobs);
        nbi_logprobs_free(&c->native);
        nbi_buf_free(&c->ids);
        nbi_buf_free(&c->whole);
    }
    nbi_free(job->choices);
    json_decref(job->chat);
    json_decref(job->tools);
    nbi_buf_free(&job->head);
    nbi_arena_free(&job->arena);
    nbi_free(job);
    *out = NULL;
}

bool nbi_job_is_pending(const nbi_job *job)
{
    return job->order && job->error.http == 0;
}

/* Before the requests are submitted there is nothing to cancel, and its owner closes the job. */
void nbi_job_cancel(nbi_job *job)
{
    if (!atomic_load(&job->submitted)) return;
    for (uint32_t i = 0; i < job->n_choices; i++) nb_request_cancel(job->choices[i].request);
}

/* Is answer c called `id`? Replies call it by the client's name or by the id, with the prefix. */
static bool is_called(const nbi_job *job, const nbi_choice *c, const char *id)
{
    const char *prefix = job->surface->id_prefix;
    size_t n = prefix ? strlen(prefix) : 0;
    const char *rest = n && strncmp(id, prefix, n) == 0 ? id + n : id;
    if (job->names) return strcmp(job->names[c->prompt], id) == 0;
    if (job->name && (strcmp(job->name, id) == 0 || strcmp(job->name, rest) == 0)) return true;
    return strcmp(job->id, rest) == 0;
}

uint32_t nbi_job_abort(nbi_job *job, const char *id)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < job->n_choices; i++) {
        nbi_choice *c = &job->choices[i];
        if (id && !is_called(job, c, id)) continue;
        n += !atomic_exchange(&c->was_aborted, true) && !atomic_load(&c->done);
        if (atomic_load(&job->submitted)) nb_request_cancel(c->request);
    }
    return n;
}

void nbi_job_fail(nbi_job *job, const nbi_api_error *e)
{
    if (job->error.http == 0) job->error = *e;
    nbi_job_cancel(job);
}

/* ---------------------------------------------------------------- reading */

/* With max_tokens 0 one token is computed for the log-probabilities of the prompt, and not shown.
 */
static bool is_dropped(const nbi_job *job, const nb_event *event)
{
    return !event->is_prompt && job->params.has_max_tokens && job->params.max_tokens == 0;
}

static nb_status take_logprob(nbi_job *job, nbi_choice *c, const nb_event *event)
{
    const nb_engine *engine = job->served->engine;
    const nbi_params *p = &job->params;
    const nbi_surface *surface = job->surface;
    if (event->id < 0) return NB_OK;
    if (event->is_prompt && p->n_prompt_logprobs >= 0 &&
        c->n_prompt_seen++ >= p->prompt_logprobs_from) {
        NB_TRY(nbi_logprobs_add(&c->prompt_logprobs, surface->prompt_logprob_shape, engine, event,
                                (uint32_t)p->n_prompt_logprobs, 0));
    }
    if (!event->is_prompt && event->has_logprob) c->sum_logprob += (double)event->logprob;
    if (p->n_logprobs < 0 || (event->is_prompt && !job->echo)) return NB_OK;
    if (p->return_meta && !event->is_prompt)
        NB_TRY(nbi_logprobs_add(&c->native, NBI_LOGPROBS_NATIVE, engine, event,
                                (uint32_t)p->n_logprobs, 0));
    NB_TRY(nbi_logprobs_add(&c->logprobs, surface->logprob_shape, engine, event,
                            (uint32_t)p->n_logprobs, c->n_chars));
    c->n_chars += nbi_token_chars(engine, event->id);
    return NB_OK;
}

/* Ends the choice; an answer that failed fails the job. */
static void take_finish(nbi_job *job, nbi_choice *c, const nb_event *event)
{
    nbi_api_error e = {0};
    c->done = true;
    job->n_done++;
    c->finish = event->finish;
    c->matched_id = event->matched_id;
    c->matched_string = event->matched_string;
    const char *why = c->grammar ? nbi_grammar_failure(c->grammar) : NULL;
    if (why) nbi_log(NB_LOG_WARN, "%s: an answer was ended early: %s", job->constraint.field, why);
    if (event->finish == NB_FINISH_ERROR) {
        nbi_api_fail(&e, 500, NULL, NULL, "%s", nb_request_error(c->request));
        nbi_job_fail(job, &e);
    } else if (event->finish == NB_FINISH_TIMEOUT) {
        nbi_api_fail(&e, 504, "request_timeout", NULL, "%s (--request-timeout)",
                     nb_request_error(c->request));
        nbi_job_fail(job, &e);
    } else if (event->finish == NB_FINISH_CANCELLED && atomic_load(&c->was_aborted)) {
        if (job->surface->shows_abort) return;
        nbi_api_fail(&e, 400, "aborted", NULL, "the request was aborted");
        nbi_job_fail(job, &e);
    } else if (event->finish == NB_FINISH_CANCELLED) {
        nbi_api_fail(&e, 503, "cancelled", NULL, "the request was cancelled");
        nbi_job_fail(job, &e);
    } else if (is_dropped(job, event)) {
        c->finish = NB_FINISH_LENGTH;
        c->matched_id = c->matched_string = -1;
    }
}

static nb_status take_event(nbi_job *job, nbi_choice *c, const nb_event *event)
{
    bool last = event->finish != NB_FINISH_NONE;
    if (!is_dropped(job, event)) {
        if (event->id >= 0 && !event->is_prompt) {
            c->n_tokens++;
            c->n_reasoning += nbi_reasoning_inside(&c->splitter);
            if (job->surface->keeps_ids || job->params.return_ids) {
                NB_TRY(nbi_buf_addf(&c->ids, c->ids.len ? ",%d" : "%d", event->id));
            }
        }
        if (job->served->keep_text) NB_TRY(nbi_buf_add(&c->whole, event->text, event->n_text));
        NB_TRY(take_logprob(job, c, event));
        if (event->n_text || last) {
            NB_TRY(job->surface->take(job, c, event));
        }
    }
    if (last) take_finish(job, c, event);
    return NB_OK;
}

/* Everything the choice has ready. */
static void read_choice(nbi_job *job, nbi_choice *c)
{
    nb_event event;
    nb_error err = {0};
    nb_status status = NB_OK;
    while (!c->done && job->error.http == 0 &&
           (status = nb_request_read(c->request, &event, 0, &err)) == NB_OK) {
        if (take_event(job, c, &event) != NB_OK) {
            nbi_api_error e = {0};
            nbi_api_no_memory(&e, "this request");
            nbi_job_fail(job, &e);
        }
    }
    if (status < 0) {
        nbi_api_error e = {0};
        nbi_api_from(&e, status, &err, NULL);
        nbi_job_fail(job, &e);
    }
}

/* ---------------------------------------------------------------- writing */

nb_status nbi_job_write_usage(const nbi_job *job, const nbi_choice *choice, nbi_buf *out)
{
    uint64_t prompt = 0, completion = 0, reasoning = 0, cached = 0;
    if (choice) {
        prompt = job->prompts[choice->prompt].n_ids;
        completion = choice->n_tokens;
        cached = nb_request_cached_tokens(choice->request);
        reasoning = choice->has_reasoning ? choice->n_reasoning : 0;
    } else {
        for (uint32_t i = 0; i < job->n_prompts; i++) prompt += job->prompts[i].n_ids;
        for (uint32_t i = 0; i < job->n_choices; i++) {
            completion += job->choices[i].n_tokens;
            if (i % job->per_prompt == 0)
                cached += nb_request_cached_tokens(job->choices[i].request);
            if (job->choices[i].has_reasoning) reasoning += job->choices[i].n_reasoning;
        }
    }
    return nbi_buf_addf(out,
                        ",\"usage\":{\"prompt_tokens\":%llu,\"completion_tokens\":%llu,"
                        "\"total_tokens\":%llu,\"prompt_tokens_details\":{\"cached_tokens\":%llu},"
                        "\"completion_tokens_details\":{\"reasoning_tokens\":%llu}}",
                        (unsigned long long)prompt, (unsigned long long)completion,
                        (unsigned long long)(prompt + completion), (unsigned long long)cached,
                        (unsigned long long)reasoning);
}

nb_status nbi_job_write_ids(const nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    if (!job->params.return_ids) return NB_OK;
    NB_TRY(nbi_buf_addf(out, ",\"token_ids\":["));
    NB_TRY(nbi_buf_add(out, c->ids.data ? c->ids.data : "", c->ids.len));
    nbi_buf_clear(&c->ids);
    return nbi_buf_add(out, "]", 1);
}

nb_status nbi_job_write_prompt_ids(const nbi_job *job, const nbi_choice *c, nbi_buf *out)
{
    const nbi_prompt *prompt = &job->prompts[c->prompt];
    NB_TRY(nbi_buf_addf(out, ",\"prompt_token_ids\":["));
    for (size_t i = 0; i < prompt->n_ids; i++)
        NB_TRY(nbi_buf_addf(out, i ? ",%d" : "%d", prompt->ids[i]));
    return nbi_buf_add(out, "]", 1);
}

nb_status nbi_job_write_lead(const nbi_job *job, nbi_choice *c, const char *key, nbi_buf *out)
{
    if (!c->lead.len) {
        nb_status status =
            nbi_buf_addf(&c->lead, "data: %s{\"index\":%u,%s", job->head.data, c->index, key);
        if (status != NB_OK) return status;
    }
    return nbi_buf_add(out, c->lead.data, c->lead.len);
}

nb_status nbi_job_write_tail(const nbi_job *job, const nbi_choice *choice, nbi_buf *out)
{
    if (job->params.continuous_usage) {
        NB_TRY(nbi_job_write_usage(job, choice, out));
    } else if (job->params.include_usage) {
        NB_TRY(nbi_buf_add(out, ",\"usage\":null", 13));
    }
    return nbi_buf_add(out, "}\n\n", 3);
}

/* A stop id of the request, as opposed to an end-of-sequence id of the model. */
static bool is_own_stop_id(const nb_sampling *s, int32_t id)
{
    for (uint32_t i = 0; i < s->n_stop_ids; i++) {
        if (s->stop_ids[i] == id) return true;
    }
    return false;
}

nb_status nbi_job_write_finish(const nbi_job *job, const nbi_choice *c, bool last, nbi_buf *out)
{
    const nb_sampling *s = &job->params.sampling;
    if (!last) return nbi_buf_add(out, ",\"finish_reason\":null", 21);
    if (c->finish == NB_FINISH_STOP && c->answer.n_calls) {
        return nbi_buf_addf(out, ",\"finish_reason\":\"tool_calls\",\"stop_reason\":null,"
                                 "\"matched_stop\":null");
    }
    if (c->finish == NB_FINISH_REPETITION) {
        return nbi_buf_addf(out, ",\"finish_reason\":\"repetition\","
                                 "\"stop_reason\":\"repetition_detected\",\"matched_stop\":null");
    }
    NB_TRY(nbi_buf_addf(out, ",\"finish_reason\":\"%s\"",
                        c->finish == NB_FINISH_STOP        ? "stop"
                        : c->finish == NB_FINISH_CANCELLED ? "abort"
                                                           : "length"));
    if (c->matched_string >= 0) {
        const char *stop = nbi_job_matched_stop(job, c);
        NB_TRY(nbi_buf_add(out, ",\"stop_reason\":", 15));
        NB_TRY(nbi_json_quote(out, stop, strlen(stop)));
        NB_TRY(nbi_buf_add(out, ",\"matched_stop\":", 16));
        return nbi_json_quote(out, stop, strlen(stop));
    }
    if (c->matched_id < 0) return nbi_buf_addf(out, ",\"stop_reason\":null,\"matched_stop\":null");
    if (is_own_stop_id(s, c->matched_id)) {
        return nbi_buf_addf(out, ",\"stop_reason\":%d,\"matched_stop\":%d", c->matched_id,
                            c->matched_id);
    }
    return nbi_buf_addf(out, ",\"stop_reason\":null,\"matched_stop\":%d", c->matched_id);
}

nb_status nbi_job_write_string(nbi_buf *out, const char *key, const char *s, size_t n)
{
    NB_TRY(nbi_buf_add(out, key, strlen(key)));
    return nbi_json_quote(out, n ? s : "", n);
}

/* The event with no choices, for who asked for it. */
static nb_status write_usage_event(const nbi_job *job, nbi_buf *out)
{
    NB_TRY(nbi_buf_add(out, "data: ", 6));
    NB_TRY(nbi_buf_add(out, job->head.data, job->head.len));
    NB_TRY(nbi_buf_add(out, "]", 1));
    NB_TRY(nbi_job_write_usage(job, NULL, out));
    return nbi_buf_add(out, "}\n\n", 3);
}

static nb_status write_end(nbi_job *job, nbi_buf *out)
{
    if (job->surface->write_end) return job->surface->write_end(job, out);
    if (job->error.http) {
        NB_TRY(nbi_buf_add(out, "data: ", 6));
        NB_TRY(nbi_api_error_json(out, &job->error));
        NB_TRY(nbi_buf_add(out, "\n\n", 2));
    } else if (job->params.include_usage) {
        NB_TRY(write_usage_event(job, out));
    }
    return nbi_buf_add(out, "data: [DONE]\n\n", 14);
}

/* The grammars are there, or are not to be had. */
static void submit_late(nbi_job *job)
{
    nbi_api_error e = {0};
    nb_status status = nbi_job_take_grammars(job, &e);
    if (status == NB_OK) status = submit_all(job, &e);
    if (status != NB_OK) nbi_job_fail(job, &e);
}

bool nbi_job_finished(const nbi_job *job)
{
    return job->error.http || job->n_done == job->n_choices;
}

static double mean_logprob(const nbi_choice *c)
{
    return c->n_tokens ? c->sum_logprob / c->n_tokens : 0;
}

/* Keeps n answers of every prompt: of beam search the first, else those with the best
 * log-probability per token, in the order they were asked for. */
static void rank(nbi_job *job)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < job->n_choices; i++) {
        nbi_choice *c = &job->choices[i];
        uint32_t first = c->prompt * job->per_prompt, better = 0;
        for (uint32_t j = first; j < first + job->per_prompt; j++) {
            double other = mean_logprob(&job->choices[j]), own = mean_logprob(c);
            better += other > own || (other == own && j < i);
        }
        if (job->params.beams) better = i - first;
        c->outranked = better >= job->params.n;
        c->index = kept;
        kept += !c->outranked;
    }
}

static nb_status write_reply(nbi_job *job, nbi_buf *out)
{
    if (job->surface->write_reply) return job->surface->write_reply(job, out);
    rank(job);
    NB_TRY(nbi_buf_add(out, job->head.data, job->head.len));
    for (uint32_t i = 0; i < job->n_choices; i++) {
        nbi_choice *c = &job->choices[i];
        if (c->outranked) continue;
        if (c->index) NB_TRY(nbi_buf_add(out, ",", 1));
        NB_TRY(job->surface->write_choice(job, c, out));
    }
    NB_TRY(nbi_buf_add(out, "]", 1));
    NB_TRY(nbi_job_write_usage(job, NULL, out));
    if (job->surface->write_extra) NB_TRY(job->surface->write_extra(job, out));
    return nbi_buf_add(out, "}", 1);
}

/* The answers of a stream, all at once. */
static nb_status write_ranked(nbi_job *job, nbi_buf *out)
{
    if (job->surface->ranked_as_one) {
        NB_TRY(nbi_buf_add(out, "data: ", 6));
        NB_TRY(write_reply(job, out));
        return nbi_buf_add(out, "\n\n", 2);
    }
    rank(job);
    for (uint32_t i = 0; i < job->n_choices; i++) {
        nbi_choice *c = &job->choices[i];
        if (!c->outranked) NB_TRY(job->surface->write_delta(job, c, out));
    }
    return NB_OK;
}

/* Events that memory did not suffice for are taken back, and the stream ends with an error. */
static void fail_writing(nbi_job *job, nbi_buf *out, size_t before)
{
    nbi_api_error e = {0};
    nbi_api_no_memory(&e, "this request");
    nbi_job_fail(job, &e);
    out->len = before;
}

void nbi_job_prefetch(const nbi_job *job, uint32_t steps)
{
    const nbi_choice *c = job->choices; /* of several answers the first */
    switch (steps) {
    case 4:
        nbi_prefetch(job, offsetof(nbi_job, error) + sizeof job->error.http);
        nbi_prefetch(&job->params, offsetof(nbi_params, sampling));
        break;
    case 3: nbi_prefetch(c, offsetof(nbi_choice, logprobs) + sizeof c->logprobs.n); break;
    case 2:
        nb_request_prefetch(c->request, false);
        nbi_prefetch(c->lead.data, c->lead.len);
        nbi_prefetch(c->text.data, 1);
        break;
    case 1: nb_request_prefetch(c->request, true); break;
    default: break;
    }
}

void nbi_job_pump(nbi_job *job, nbi_buf *out)
{
    if (nbi_job_is_pending(job)) {
        if (!nbi_grammar_order_is_done(job->order)) return;
        submit_late(job);
        if (job->error.http) return;
    }
    for (uint32_t i = 0; i < job->n_choices && !job->error.http; i++) {
        nbi_choice *c = &job->choices[i];
        if (c->done || !atomic_exchange(&c->signalled, false)) continue;
        read_choice(job, c);
        if (!job->params.stream || is_ranked(job) || job->error.http) continue;
        size_t before = out->len;
        if (job->surface->write_delta(job, c, out) != NB_OK) fail_writing(job, out, before);
    }
    if (!job->params.stream || job->ended || !nbi_job_finished(job)) return;
    size_t before = out->len;
    if (is_ranked(job) && !job->error.http && write_ranked(job, out) != NB_OK)
        fail_writing(job, out, before);
    job->cut = write_end(job, out) != NB_OK;
    job->ended = true;
}

bool nbi_job_reply(nbi_job *job, nbi_buf *out)
{
    if (job->error.http == 0 && write_reply(job, out) != NB_OK)
        nbi_api_no_memory(&job->error, "this request");
    return job->error.http == 0;
}
