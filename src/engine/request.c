/* Requests from the user's side: submit, read, cancel, close. Any thread. */
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "engine/beam.h"
#include "text/stop_regex.h"

void nbi_engine_kick(nb_engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->kick = true;
    pthread_mutex_unlock(&e->lock);
    pthread_cond_signal(&e->work); /* now: a thread that wakes finds the lock free */
}

/* ---------------------------------------------------------------- checks */

static nb_status check_range(bool ok, nb_error *err, const char *field, double found,
                             const char *expected)
{
    if (ok) return NB_OK;
    return nbi_fail(err, NB_INVALID, "%s is %g; expected %s", field, found, expected);
}

static nb_status check_sampling(const nb_engine *e, const nb_sampling *s, nb_error *err)
{
    NB_TRY(check_range(s->temperature >= 0 && s->temperature <= 1e6f, err, "temperature",
                       s->temperature, "a finite number >= 0"));
    NB_TRY(check_range(s->top_p > 0 && s->top_p <= 1, err, "top_p", s->top_p, "0 < top_p <= 1"));
    NB_TRY(check_range(s->min_p >= 0 && s->min_p <= 1, err, "min_p", s->min_p, "0 <= min_p <= 1"));
    NB_TRY(check_range(s->top_k >= -1, err, "top_k", s->top_k, "-1 (off) or a count"));
    NB_TRY(check_range(s->n_logprobs >= -1 && s->n_logprobs <= NB_TOP_LOGPROBS_MAX, err, "logprobs",
                       s->n_logprobs, "at most 20 top log-probabilities"));
    NB_TRY(check_range(s->frequency_penalty >= -2 && s->frequency_penalty <= 2, err,
                       "frequency_penalty", s->frequency_penalty, "-2 to 2"));
    NB_TRY(check_range(s->presence_penalty >= -2 && s->presence_penalty <= 2, err,
                       "presence_penalty", s->presence_penalty, "-2 to 2"));
    NB_TRY(check_range(s->repetition_penalty > 0 && s->repetition_penalty <= 2, err,
                       "repetition_penalty", s->repetition_penalty, "0 < repetition_penalty <= 2"));
    NB_TRY(check_range(s->n_logit_bias <= NB_LOGIT_BIAS_MAX, err, "logit_bias", s->n_logit_bias,
                       "at most 1024 entries"));
    for (uint32_t i = 0; i < s->n_logit_bias; i++) {
        bool ok = s->logit_bias[i].id >= 0 &&
                  (uint32_t)s->logit_bias[i].id < nbi_model_config(e->model)->vocab;
        NB_TRY(check_range(ok, err, "logit_bias: token id", s->logit_bias[i].id,
                           "an id of the vocabulary"));
        NB_TRY(check_range(s->logit_bias[i].bias >= -100 && s->logit_bias[i].bias <= 100, err,
                           "logit_bias", s->logit_bias[i].bias, "-100 to 100"));
    }
    NB_TRY(check_range(s->n_stop_strings <= NB_STOP_STRINGS_MAX, err, "stop", s->n_stop_strings,
                       "at most 16 strings"));
    NB_TRY(check_range(s->n_logprob_ids <= NB_TOP_LOGPROBS_MAX, err, "logprob_token_ids",
                       s->n_logprob_ids, "at most 20 ids"));
    for (uint32_t i = 0; i < s->n_logprob_ids; i++) {
        bool ok = s->logprob_ids[i] >= 0 &&
                  (uint32_t)s->logprob_ids[i] < nbi_model_config(e->model)->vocab;
        NB_TRY(check_range(ok, err, "logprob_token_ids", s->logprob_ids[i],
                           "an id of the vocabulary"));
    }
    NB_TRY(check_range(s->n_stop_ids <= NB_STOP_IDS_MAX, err, "stop_token_ids", s->n_stop_ids,
                       "at most 64 ids"));
    NB_TRY(check_range(!s->max_tokens || s->min_tokens <= s->max_tokens, err, "min_tokens",
                       s->min_tokens, "at most max_tokens"));
    NB_TRY(check_range(s->repeat_count != 1, err, "repetition_detection", s->repeat_count,
                       "a count of at least 2"));
    NB_TRY(check_range(s->repeat_min <= s->repeat_max, err, "repetition_detection", s->repeat_min,
                       "at most the longest piece"));
    for (uint32_t i = 0; i < s->n_stop_strings; i++) {
        if (!s->stop_strings[i][0])
            return nbi_fail(err, NB_INVALID,
                            "stop: an empty string; expected at least one character");
    }
    NB_TRY(check_range(s->n_stop_regex <= NB_STOP_REGEX_MAX, err, "stop_regex", s->n_stop_regex,
                       "at most 4 expressions"));
    if ((s->n_stop_strings || s->n_stop_regex) && !e->tokenizer) {
        return nbi_fail(err, NB_UNSUPPORTED,
                        "stop: this model has no tokenizer, so there is no text to search");
    }
    for (uint32_t i = 0; i < s->n_stop_ids; i++) {
        bool ok =
            s->stop_ids[i] >= 0 && (uint32_t)s->stop_ids[i] < nbi_model_config(e->model)->vocab;
        NB_TRY(check_range(ok, err, "stop_token_ids", s->stop_ids[i], "an id of the vocabulary"));
    }
    return NB_OK;
}

static nb_status check_prompt(const nb_engine *e, const nb_request_options *o, nb_error *err)
{
    uint32_t vocab = nbi_model_config(e->model)->vocab;
    if (!o->n_prompt)
        return nbi_fail(err, NB_INVALID, "prompt is empty; expected at least one token");
    if (o->n_prompt >= e->max_context) {
        return nbi_fail(err, NB_TOO_LARGE,
                        "this model's context holds %u tokens; the prompt has %zu and leaves no "
                        "room for an answer",
                        e->max_context, o->n_prompt);
    }
    if (o->n_prompt + o->sampling.max_tokens > e->max_context) {
        return nbi_fail(err, NB_TOO_LARGE,
                        "this model's context holds %u tokens; the prompt has %zu and max_tokens "
                        "asks for %u more",
                        e->max_context, o->n_prompt, o->sampling.max_tokens);
    }
    for (size_t i = 0; i < o->n_prompt; i++) {
        if (o->prompt[i] < 0 || (uint32_t)o->prompt[i] >= vocab) {
            return nbi_fail(err, NB_INVALID, "prompt[%zu] is token id %d; expected 0 to %u", i,
                            o->prompt[i], vocab - 1);
        }
    }
    return NB_OK;
}

nb_status nbi_request_check(const nb_engine *e, const nb_request_options *o, nb_error *err)
{
    NB_TRY(check_prompt(e, o, err));
    NB_TRY(check_sampling(e, &o->sampling, err));
    return nbi_token_limits_check(&o->sampling, nbi_model_config(e->model)->vocab, e->n_valid_ids,
                                  err);
}

/* ---------------------------------------------------------------- making one */

static void collect_end_ids(const nb_engine *e, nb_request *r)
{
    const nbi_config *c = nbi_model_config(e->model);
    for (uint32_t i = 0; i < c->n_eos && !r->sampling.ignore_eos; i++)
        r->end_ids[r->n_end_ids++] = c->eos[i];
    for (uint32_t i = 0; i < r->sampling.n_stop_ids; i++)
        r->end_ids[r->n_end_ids++] = r->sampling.stop_ids[i];
}

static void draw_seed(nb_engine *e, nb_sampling *s)
{
    if (s->has_seed) return;
    s->seed = (atomic_fetch_add(&e->seed_counter, 1) + 1) *
              0x9e3779b97f4a7c15ull; /* Weyl sequence: distinct per request */
}

/* Masks that a request keeps: of the next token, and behind every draft. */
static uint32_t n_masks(const nb_engine *e, const nb_request_options *o)
{
    if (!o->grammar && !nbi_token_limits_wanted(&o->sampling)) return 0;
    return 1 + (o->grammar && !o->grammar->rollback ? 0 : e->n_draft_steps);
}

/* Penalties over the prompt so far, the masks of grammar and limits. */
static nb_status take_constraints(nb_request *r, const nb_engine *e, const nb_request_options *o,
                                  nb_error *err)
{
    uint32_t vocab = nbi_model_config(e->model)->vocab;
    NB_TRY(nbi_penalties_init(&r->penalties, &r->sampling, vocab, r->n_max, err));
    for (uint32_t i = 0; i < r->n_prompt; i++)
        nbi_penalties_add(&r->penalties, &r->sampling, r->tokens[i], false);
    r->has_limits = nbi_token_limits_wanted(&r->sampling);
    NB_TRY(nbi_token_limits_init(&r->limits, &r->sampling, vocab, e->n_valid_ids, err));
    r->sampling.logit_bias = NULL; /* the caller's; taken over above */
    r->sampling.allowed = NULL;
    r->sampling.bad_words = NULL;
    uint32_t n = n_masks(e, o);
    if (!n) return NB_OK;
    if (o->grammar) r->grammar = *o->grammar;
    r->mask_words = (vocab + 31) / 32;
    r->masks = nbi_calloc((size_t)n * r->mask_words, sizeof *r->masks);
    return r->masks ? NB_OK : nbi_fail(err, NB_NO_MEMORY, "request: out of memory");
}

size_t nbi_request_bytes(uint32_t n_max, size_t n_text)
{
    size_t pages = (n_max + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS;
    return sizeof(nb_request) + (n_max + pages) * sizeof(int32_t) +
           NBI_EVENTS_MAX * sizeof(nbi_event_slot) + n_text;
}

nb_status nbi_request_count_bytes(nb_engine *e, size_t bytes, nb_count count, nb_error *err)
{
    uint64_t all = atomic_fetch_add(&e->request_bytes, bytes) + bytes;
    if (all <= e->request_bytes_max || count == NB_COUNT_NONE) return NB_OK; /* a probe */
    atomic_fetch_sub(&e->request_bytes, bytes);
    return nbi_fail(err, NB_BUSY,
                    "the %.1f MB planned for requests are in use, and this one takes %.1f MB; try "
                    "again later",
                    (double)e->request_bytes_max / 1e6, (double)bytes / 1e6);
}

/* Takes the request's share of the memory planned for requests. */
static nb_status count_bytes(nb_request *r, nb_engine *e, const nb_request_options *o,
                             nb_error *err)
{
    uint32_t vocab = nbi_model_config(e->model)->vocab;
    r->bytes = nbi_request_bytes(r->n_max, (size_t)r->text_cap + r->text_worst) +
               nbi_penalties_bytes(&r->sampling, vocab, r->n_max);
    r->bytes += (size_t)n_masks(e, o) * ((vocab + 31) / 32) * 4;
    r->bytes += nbi_token_limits_bytes(&r->sampling, vocab);
    if (r->sampling.n_stop_regex) r->bytes += nbi_stop_regex_bytes();
    nb_status st = nbi_request_count_bytes(e, r->bytes, o->count, err);
    if (st != NB_OK) r->bytes = 0;
    return st;
}

static nb_status fill(nb_request *r, nb_engine *e, const nb_request_options *o, nb_error *err)
{
    r->sampling = o->sampling;
    NB_TRY(nbi_stop_create(&r->stop, r->sampling.stop_strings, r->sampling.n_stop_strings, err));
    NB_TRY(nbi_stop_add_regex(r->stop, r->sampling.stop_regex, r->sampling.n_stop_regex, err));
    r->has_stops = r->sampling.n_stop_strings || r->sampling.n_stop_regex;
    collect_end_ids(e, r);
    draw_seed(e, &r->sampling);
    r->n_prompt = r->n_tokens = (uint32_t)o->n_prompt;
    r->n_expanded = nbi_model_expanded(e->model, r->n_prompt);
    r->n_max = o->sampling.max_tokens ? r->n_prompt + o->sampling.max_tokens : e->max_context;
    r->n_pages_max = (r->n_max + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS;
    size_t worst = NBI_DECODER_ROOM(e->max_token_bytes) + NBI_DECODER_ROOM(0);
    r->text_worst = (uint32_t)(worst + 2 * nbi_stop_room(r->stop, worst));
    r->text_cap = (8 + e->n_draft_steps) * r->text_worst + 2048;
    NB_TRY(count_bytes(r, e, o, err));
    r->tokens = nbi_malloc(r->n_max * sizeof *r->tokens);
    r->pages = nbi_malloc(r->n_pages_max * sizeof *r->pages);
    r->ring = nbi_calloc(NBI_EVENTS_MAX, sizeof *r->ring);
    r->text_ring = nbi_malloc((size_t)r->text_cap + r->text_worst);
    if (!r->tokens || !r->pages || !r->ring || !r->text_ring)
        return nbi_fail(err, NB_NO_MEMORY, "request: out of memory");
    r->whole = r->text_ring + r->text_cap;
    memcpy(r->tokens, o->prompt, o->n_prompt * sizeof *r->tokens);
    r->priority = o->priority;
    r->client = o->client;
    r->cache_salt = o->cache_salt;
    if (o->timeout_ms) r->deadline_ns = nbi_now_ns() + o->timeout_ms * UINT64_C(1000000);
    NB_TRY(take_constraints(r, e, o, err));
    r->notify = o->notify;
    r->notify_user = o->notify_user;
    nbi_meter_submit(r, o);
    r->notify_events = o->notify_events ? o->notify_events : 1;
    if (r->notify_events > NBI_EVENTS_MAX / 2) r->notify_events = NBI_EVENTS_MAX / 2;
    return NB_OK;
}

void nbi_request_destroy(nb_request *r)
{
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->readable);
    nbi_stop_destroy(&r->stop);
    nbi_penalties_deinit(&r->penalties);
    nbi_token_limits_deinit(&r->limits);
    nbi_free(r->masks);
    nbi_free(r->tokens);
    nbi_free(r->pages);
    nbi_free(r->ring);
    nbi_free(r->text_ring);
    atomic_fetch_sub(&r->engine->request_bytes, r->bytes);
    nbi_beams_unref(r);
    nbi_free(r);
}

void nbi_request_unref(nb_request *r)
{
    if (atomic_fetch_sub(&r->refs, 1) != 1) return;
    if (r->grammar.release) r->grammar.release(r->grammar.user);
    nbi_request_destroy(r);
}

nb_status nbi_request_create(nb_request **out, nb_engine *e, const nb_request_options *o,
                             nb_error *err)
{
    nb_request *r = nbi_calloc(1, sizeof *r);
    if (!r) return nbi_fail(err, NB_NO_MEMORY, "request: out of memory");
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->readable, &attr);
    pthread_condattr_destroy(&attr);
    atomic_init(&r->refs, 2);
    r->engine = e;
    nb_status st = fill(r, e, o, err);
    if (st != NB_OK) {
        nbi_request_destroy(r);
        return st;
    }
    *out = r;
    return NB_OK;
}

/* Queues the request; refused when the engine stops or has failed. */
nb_status nbi_request_enqueue(nb_engine *e, nb_request *r, nb_error *err)
{
    nb_status st = NB_OK;
    pthread_mutex_lock(&e->lock);
    if (e->has_failed) {
        st = nbi_fail(err, NB_CLOSED, "%s", e->failure);
    } else if (atomic_load(&e->stopping)) {
        st = nbi_fail(err, NB_CLOSED, "the engine is shutting down");
    } else if (e->n_waiting >= e->max_queued && r->count_as != NB_COUNT_NONE) {
        st = nbi_fail(err, NB_BUSY, "%u requests wait already, as many as may; try again later",
                      e->n_waiting);
    } else {
        nbi_queue_push(e, r);
        e->kick = true;
    }
    pthread_mutex_unlock(&e->lock);
    if (st == NB_OK) pthread_cond_signal(&e->work);
    return st;
}

nb_status nb_request_submit(nb_request **out, nb_engine *e, const nb_request_options *o,
                            nb_error *err)
{
    nb_request *r;
    NB_TRY(nbi_request_check(e, o, err));
    NB_TRY(nbi_request_create(&r, e, o, err));
    nb_status st = nbi_request_enqueue(e, r, err);
    if (st != NB_OK) {
        nbi_request_destroy(r);
        return st;
    }
    *out = r;
    return NB_OK;
}

/* ---------------------------------------------------------------- reading */

/* Waits until an event is there. False on timeout. Called with the lock held. */
static bool wait_readable(nb_request *r, int timeout_ms)
{
    if (r->count || !timeout_ms) return r->count > 0;
    uint64_t wait_ms = timeout_ms > 0 ? (uint64_t)timeout_ms : 0;
    struct timespec until = nbi_timespec(nbi_now_ns() + wait_ms * 1000000u);
    bool late = false;
    r->n_blocked++;
    while (!r->count && !late) {
        if (timeout_ms < 0) {
            pthread_cond_wait(&r->readable, &r->lock);
        } else {
            late = pthread_cond_timedwait(&r->readable, &r->lock, &until) == ETIMEDOUT;
        }
    }
    r->n_blocked--;
    return r->count > 0;
}

/* Frees the slot handed out last. Called with the lock held. */
static void release_read(nb_request *r)
{
    if (!r->reading) return;
    r->reading = false;
    r->text_begin = r->ring[r->head].text_end;
    if (r->ring[r->head].event.finish != NB_FINISH_NONE) r->drained = true;
    r->head = (r->head + 1) % NBI_EVENTS_MAX;
    r->count--;
}

nb_status nb_request_read(nb_request *r, nb_event *event, int timeout_ms, nb_error *err)
{
    nb_status st = NB_OK;
    pthread_mutex_lock(&r->lock);
    release_read(r);
    bool made_room = r->wants_room && nbi_request_is_half_free(r);
    if (made_room) r->wants_room = false;
    if (r->drained) {
        st = nbi_fail(err, NB_CLOSED, "the request has ended and every event was read");
    } else if (!wait_readable(r, timeout_ms)) {
        st = NB_AGAIN;
    } else {
        nbi_event_copy(event, &r->ring[r->head].event);
        r->reading = true;
    }
    pthread_mutex_unlock(&r->lock);
    if (made_room) nbi_engine_kick(r->engine);
    return st;
}

void nb_request_prefetch(const nb_request *r, bool event)
{
    if (!r) return;
    if (event) {
        nbi_prefetch(r->ring, sizeof(nbi_event_slot) / 2);
        nbi_prefetch(r->text_ring, 1);
    } else {
        nbi_prefetch(&r->lock, offsetof(nb_request, notify) - offsetof(nb_request, lock));
    }
}

uint32_t nb_request_cached_tokens(const nb_request *r)
{
    return atomic_load(&r->cached_tokens);
}

const char *nb_request_error(const nb_request *r)
{
    return r->error;
}

/* ---------------------------------------------------------------- ending */

nb_request *const *nbi_request_members(nb_request *const *r, uint32_t *n)
{
    *n = (*r)->beams ? (*r)->beams->width : 1;
    return (*r)->beams ? (*r)->beams->members : r;
}

bool nbi_request_is_cancelled(const nb_request *r)
{
    const nbi_beams *g = r->beams;
    if (!g || g->state != NBI_BEAMS_SEARCHING) return atomic_load(&r->cancelled);
    for (uint32_t i = 0; i < g->width; i++) {
        if (atomic_load(&g->members[i]->cancelled)) return true;
    }
    return false;
}

void nb_request_cancel(nb_request *r)
{
    nb_engine *e = r->engine;
    atomic_store(&r->cancelled, true);
    pthread_mutex_lock(&e->lock);
    e->kick = e->has_cancelled = true;
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->lock);
}

void nb_request_close(nb_request **request)
{
    nb_request *r = *request;
    if (!r) return;
    pthread_mutex_lock(&r->lock);
    r->closed = true; /* no notify from here on */
    bool ended = r->ended;
    pthread_mutex_unlock(&r->lock);
    if (!ended) nb_request_cancel(r);
    nbi_request_unref(r);
    *request = NULL;
}
