/* One thread: sends what is due, reads what came, until all is done. */
#include "perf/load_run.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/json.h"
#include "perf/load_prompts.h"
#include "perf/load_random.h"

static const uint64_t PROGRESS_NS = 100000000;

/* One request under way; the calls are reused. */
typedef struct lane {
    nbi_load_call call;
    struct run *run;
    uint32_t index; /* of the record */
    struct lane *next_free, *next;
} lane;

typedef struct run {
    const nbi_load_options *opt;
    nbi_load_client *client;
    const nbi_load_prompts *prompts;
    nbi_load_record *records;
    lane *all, *free;
    uint32_t n, next, done, failed, running, peak;
    uint64_t tokens; /* of answers that have ended */
    uint64_t begin_ns, end_ns, shown_ns;
} run;

static void note(const nbi_load_options *opt, const char *sentence)
{
    if (opt->note) opt->note(opt->user, sentence);
}

/* ---- the measured part */

static void show(run *r, uint64_t now)
{
    if (!r->opt->progress || (now - r->shown_ns < PROGRESS_NS && r->done < r->n)) return;
    r->shown_ns = now;
    nbi_load_progress p = {.done = r->done,
                           .failed = r->failed,
                           .running = r->running,
                           .total = r->n,
                           .output_tokens = r->tokens,
                           .seconds = (double)(now - r->begin_ns) * 1e-9};
    for (const lane *l = r->all; l; l = l->next)
        if (!l->call.over) p.output_tokens += l->call.answer.n_chunks;
    r->opt->progress(r->opt->user, &p);
}

static void ended(nbi_load_call *call, void *user)
{
    lane *l = user;
    run *r = l->run;
    nbi_load_record *record = &r->records[l->index];
    record->sent_ns = call->sent_ns;
    record->answer = call->answer;
    call->answer = (nbi_load_answer){0};
    r->done++;
    r->running--;
    r->failed += record->answer.failure != NBI_LOAD_NONE;
    if (!record->answer.failure) r->tokens += record->answer.output_tokens;
    if (record->answer.end_ns > r->end_ns) r->end_ns = record->answer.end_ns;
    l->next_free = r->free;
    r->free = l;
}

static nb_status send_next(run *r, nb_error *err)
{
    lane *l = r->free;
    if (l) {
        r->free = l->next_free;
    } else {
        l = nbi_calloc(1, sizeof *l);
        if (!l) return nbi_fail(err, NB_NO_MEMORY, "out of memory for request %u", r->next);
        l->next = r->all;
        r->all = l;
    }
    const nbi_load_prompt *prompt = &r->prompts->items[r->next];
    l->run = r;
    l->index = r->next++;
    l->call.path = r->opt->endpoint;
    l->call.body = prompt->body;
    l->call.body_bytes = prompt->body_bytes;
    l->call.ended = ended;
    l->call.user = l;
    if (++r->running > r->peak) r->peak = r->running;
    return nbi_load_client_start(r->client, &l->call, err);
}

/* Arrival times: gaps of a gamma distribution, the first request at once. */
static void plan(run *r, uint64_t now)
{
    const nbi_load_options *opt = r->opt;
    nbi_load_rng rng = {opt->seed ^ 0xa5a5a5a5u};
    double at = 0;
    for (uint32_t i = 0; i < r->n; i++) {
        r->records[i].planned_ns = now + (uint64_t)(at * 1e9);
        r->records[i].asked_input = r->prompts->items[i].input_tokens;
        r->records[i].asked_output = r->prompts->items[i].output_tokens;
        if (isfinite(opt->request_rate))
            at += nbi_load_random_gamma(&rng, opt->burstiness) / opt->request_rate;
    }
}

static nb_status measure(run *r, nb_error *err)
{
    const uint32_t limit = r->opt->max_concurrency ? r->opt->max_concurrency : UINT32_MAX;
    r->begin_ns = r->end_ns = r->shown_ns = nbi_now_ns();
    plan(r, r->begin_ns);
    while (r->done < r->n) {
        uint64_t now = nbi_now_ns();
        while (r->next < r->n && r->running < limit && r->records[r->next].planned_ns <= now)
            NB_TRY(send_next(r, err));
        show(r, now);
        uint64_t until = now + PROGRESS_NS;
        if (r->next < r->n && r->running < limit && r->records[r->next].planned_ns < until)
            until = r->records[r->next].planned_ns;
        NB_TRY(nbi_load_client_wait(r->client, until, err));
    }
    show(r, nbi_now_ns());
    return NB_OK;
}

static void free_lanes(run *r)
{
    while (r->all) {
        lane *l = r->all;
        r->all = l->next;
        nbi_load_answer_free(&l->call.answer);
        nbi_free(l);
    }
}

/* ---- before it */

/* Asks /v1/models until it answers or the time is over. A server without that route needs --model.
 */
static nb_status find_model(char **out, const nbi_load_options *opt, nbi_load_client *client,
                            nb_error *err)
{
    const uint64_t end = nbi_now_ns() + (uint64_t)(opt->ready_wait_s * 1e9);
    nbi_load_call call;
    json_t *reply;
    for (bool told = false;; told = true) {
        call = (nbi_load_call){.path = "/v1/models"};
        NB_TRY(nbi_load_client_fetch(client, &call, &reply, err));
        const nbi_load_answer *a = &call.answer;
        bool busy = a->failure == NBI_LOAD_CONNECT || a->failure == NBI_LOAD_CUT || a->http == 503;
        if (reply || !busy) break;
        if (nbi_now_ns() >= end) {
            char what[512];
            snprintf(what, sizeof what, "GET %s/v1/models", opt->client.base_url);
            return nbi_load_answer_fail(a, what, err);
        }
        if (!told) note(opt, "waiting for the server");
        const uint64_t until = nbi_now_ns() + PROGRESS_NS;
        while (nbi_now_ns() < until) NB_TRY(nbi_load_client_wait(client, until, err));
    }
    const json_t *first = json_array_get(json_object_get(reply, "data"), 0);
    const char *id = opt->model ? opt->model : json_string_value(json_object_get(first, "id"));
    nb_status st = NB_OK;
    if (!id && call.answer.failure)
        st = nbi_load_answer_fail(&call.answer, "GET /v1/models (--model would do without)", err);
    else if (!id)
        st = nbi_fail(err, NB_INVALID, "/v1/models names no model: give --model");
    else if (!(*out = nbi_strdup(id)))
        st = nbi_fail(err, NB_NO_MEMORY, "out of memory");
    json_decref(reply);
    return st;
}

/* Before the clock runs: connections, compiled kernels. With prompts of its own, so that no
 * measured one is found in a prefix cache. */
static nb_status warm_up(const nbi_load_options *opt, nbi_load_client *client,
                         const nbi_load_prompts *prompts, nb_error *err)
{
    if (opt->n_warmup) note(opt, "warming up");
    for (uint32_t i = 0; i < prompts->n_warmup; i++) {
        const nbi_load_prompt *prompt = &prompts->items[prompts->n + i];
        nbi_load_call call = {
            .path = opt->endpoint, .body = prompt->body, .body_bytes = prompt->body_bytes};
        NB_TRY(nbi_load_client_ask(client, &call, err));
        nb_status st = NB_OK;
        if (call.answer.failure)
            st = nbi_load_answer_fail(&call.answer, "the warm-up request", err);
        nbi_load_answer_free(&call.answer);
        NB_TRY(st);
    }
    return NB_OK;
}

static nb_status check(const nbi_load_options *opt, nb_error *err)
{
    size_t n = strlen(opt->endpoint);
    if (opt->endpoint[0] != '/' || n < 12 || strcmp(opt->endpoint + n - 11, "completions") != 0)
        return nbi_fail(err, NB_INVALID,
                        "--endpoint is \"%s\"; expected /v1/completions, /v1/chat/completions or "
                        "another path of such an end",
                        opt->endpoint);
    if (!(opt->request_rate > 0))
        return nbi_fail(err, NB_INVALID, "--request-rate is %g; expected a number above 0 or inf",
                        opt->request_rate);
    if (!(opt->burstiness > 0) || !isfinite(opt->burstiness))
        return nbi_fail(err, NB_INVALID, "--burstiness is %g; expected a number above 0",
                        opt->burstiness);
    if (!(opt->client.timeout_s > 0) || opt->client.timeout_s > 1e7)
        return nbi_fail(err, NB_INVALID, "--timeout is %g; expected seconds above 0",
                        opt->client.timeout_s);
    return NB_OK;
}

/* ---- all */

nb_status nbi_load_run(nbi_load_result *out, const nbi_load_options *opt, nb_error *err)
{
    nb_status st;
    nbi_load_result result = {0};
    nbi_load_prompts prompts = {0};
    run r = {.opt = opt};
    nbi_load_client_options client_options = opt->client;
    NB_TRY(check(opt, err));
    if (!client_options.max_streams) client_options.max_streams = opt->max_concurrency;
    NB_TRY(nbi_load_client_create(&r.client, &client_options, err));
    NB_TRY_OR(st, find_model(&result.model, opt, r.client, err), end);
    note(opt, "making prompts");
    NB_TRY_OR(st, nbi_load_prompts_make(&prompts, opt, result.model, r.client, err), end);
    r.prompts = &prompts;
    r.n = result.n = prompts.n;
    r.records = result.records = nbi_calloc(prompts.n, sizeof *r.records);
    st = r.records ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "out of memory for %u records", r.n);
    if (st == NB_OK) st = warm_up(opt, r.client, &prompts, err);
    if (st != NB_OK) goto end;
    uint64_t idle = nbi_load_client_idle_ns(r.client);
    NB_TRY_OR(st, measure(&r, err), end);
    result.begin_ns = r.begin_ns;
    result.end_ns = r.end_ns;
    result.idle_s = (double)(nbi_load_client_idle_ns(r.client) - idle) * 1e-9;
    result.peak_running = r.peak;
    memcpy(result.prompts, prompts.how, sizeof result.prompts);
end:
    nbi_load_client_destroy(&r.client);
    free_lanes(&r);
    nbi_load_prompts_free(&prompts);
    if (st != NB_OK)
        nbi_load_result_free(&result);
    else
        *out = result;
    return st;
}

void nbi_load_result_free(nbi_load_result *result)
{
    for (uint32_t i = 0; result->records && i < result->n; i++)
        nbi_load_answer_free(&result->records[i].answer);
    nbi_free(result->records);
    nbi_free(result->model);
    *result = (nbi_load_result){0};
}
