/* One step: reap, admit, build the batch, launch it, wait for it, commit and hand out (results.c).
 *
 * With overlap (nbi_engine.overlaps) what a step decided is handed out, and the queue looked at for
 * the step after it, when the next forward or draft pass has been launched; so are the masks made
 * that its sampling needs. Between the wait for a step and the next launch is left what that launch
 * needs. Nothing is launched when nbi_engine_step_once() returns.
 *
 * Order is first come, first served; clients of one priority take turns (queue.c). Every running
 * request gets its decode row first; prompts share what is left of the token budget in order of
 * admission. When pages run out, the youngest running request is put back to the head of the queue
 * and will be computed again; the same tokens come out, since a row's bits depend on its own
 * request alone. The oldest always proceeds: the pool holds a whole context. */
#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/beam.h"

static uint32_t pages_for(uint32_t tokens)
{
    return (tokens + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS;
}

/* ---------------------------------------------------------------- queue and running list */

static const char *where_is(const nb_request *r, bool runs)
{
    if (!runs) return "in the queue";
    return r->n_tokens > r->n_prompt ? "while it was answered" : "while its prompt was read";
}

/* Somebody cancelled it, or its time is over. */
static void end_early(nb_engine *e, nb_request *r, bool runs)
{
    char why[NB_ERROR_TEXT_MAX];
    nb_finish finish = nbi_request_is_cancelled(r) ? NB_FINISH_CANCELLED : NB_FINISH_TIMEOUT;
    snprintf(why, sizeof why, "the request's time was over %s, after %u tokens of the answer",
             where_is(r, runs), r->n_tokens - r->n_prompt);
    nbi_request_end(r, finish, finish == NB_FINISH_TIMEOUT ? why : NULL);
    nbi_engine_count_end(e, r, finish);
}

/* The search of running[i], its first member, ends with all members. */
static void end_search(nb_engine *e, uint32_t i)
{
    nbi_beams *g = e->running[i]->beams;
    const uint32_t width = g->width;
    const bool cancelled = nbi_request_is_cancelled(e->running[i]);
    for (uint32_t k = 0; k < width && cancelled; k++) atomic_store(&g->members[k]->cancelled, true);
    g->state = NBI_BEAMS_SHOWING; /* from here on each for itself */
    for (uint32_t k = 0; k < width; k++) {
        end_early(e, e->running[i], true);
        nbi_engine_retire(e, i);
    }
}

static void reap_running(nb_engine *e, uint64_t now_ns)
{
    for (uint32_t i = 0; i < e->n_running;) {
        nb_request *r = e->running[i];
        bool late = r->deadline_ns && r->deadline_ns <= now_ns;
        if (!late && !nbi_request_is_cancelled(r)) {
            i++;
        } else if (r->n_owed) { /* comes before its end, and may be its end */
            nbi_engine_hand_out(e);
            i = 0;
        } else if (r->beams && r->beams->state == NBI_BEAMS_SEARCHING) {
            end_search(e, i); /* members are as late and as cancelled as the first */
        } else {
            end_early(e, r, true);
            nbi_engine_retire(e, i);
        }
    }
}

static void reap_waiting(nb_engine *e, uint64_t now_ns)
{
    pthread_mutex_lock(&e->lock);
    nb_request *r = nbi_queue_take_ended(e, now_ns);
    pthread_mutex_unlock(&e->lock);
    while (r) {
        nb_request *next = r->next;
        uint32_t n;
        nb_request *const *members = nbi_request_members(&r, &n);
        for (uint32_t i = 0; i < n; i++) end_early(e, members[i], false);
        for (uint32_t i = 0; i < n; i++) {
            nbi_meter_end(e, members[i]);
            nbi_request_unref(members[i]);
        }
        r = next;
    }
}

/* Does its first chunk fit, leaving every running request one page to grow into? */
static bool fits(nb_engine *e, nb_request *r)
{
    uint32_t shared = nbi_request_peek_prefix(e, r);
    uint32_t rows = nbi_min_u32(r->n_tokens - shared * NBI_PAGE_TOKENS, e->chunk_size);
    if (r->beams && e->n_running + r->beams->width > e->max_running) return false;
    return !e->n_running || nbi_kv_pages_free(e) >= shared + pages_for(rows) + e->n_running;
}

static void start(nb_engine *e, nb_request *r)
{
    nbi_queue_remove(e, r);
    nbi_client_turn *turn = nbi_queue_turn(e, r);
    uint32_t n;
    nb_request *const *members = nbi_request_members(&r, &n);
    turn->running += n;
    turn->last = ++e->next_turn;
    r->preempted = false;
    if (!nbi_beams_is_idle(r)) nbi_request_match_prefix(e, r);
    for (uint32_t i = 0; i < n; i++) e->running[e->n_running++] = members[i];
    if (r->admitted) return; /* preempted before: the first admission counts */
    r->admitted = true;
    atomic_store(&r->cached_tokens, r->n_cached);
    nbi_meter_admit(e, r);
}

/* While every running request decodes, the queue is looked at every decode_steps steps only. */
static bool skips_queue(nb_engine *e)
{
    bool decodes = e->n_running > 0;
    for (uint32_t i = 0; i < e->n_running; i++) {
        const nb_request *r = e->running[i];
        decodes = decodes && (nbi_beams_is_idle(r) || r->n_tokens - r->n_cached == 1);
    }
    if (decodes && ++e->decode_run < e->decode_steps) return true;
    e->decode_run = 0;
    return false;
}

/* Admits while there is a slot and the next in line fits. */
static void admit(nb_engine *e)
{
    if (e->decode_steps > 1 && skips_queue(e)) return;
    pthread_mutex_lock(&e->lock);
    if (e->flush) nbi_kv_pages_flush(e);
    e->flush = false;
    while (e->n_running < e->max_running) {
        nb_request *r = nbi_queue_best(e);
        if (!r || !fits(e, r)) break;
        start(e, r);
    }
    e->stats.n_running = e->n_running; /* at no moment is a request neither waiting nor running */
    pthread_mutex_unlock(&e->lock);
}

/* ---------------------------------------------------------------- batch */

/* Where the youngest that holds pages begins, a search as a whole; n_running when there is none
 * behind index `keep`. */
static uint32_t find_youngest(const nb_engine *e, uint32_t keep, uint32_t *n)
{
    for (uint32_t i = e->n_running; i-- > keep + 1;) {
        const nbi_beams *g = e->running[i]->beams;
        if (g && g->state != NBI_BEAMS_SEARCHING) continue; /* its answers are being read */
        *n = g ? g->width : 1;
        return i + 1 - *n > keep ? i + 1 - *n : e->n_running;
    }
    return e->n_running;
}

/* Puts it back into the queue. False when there is none. */
static bool preempt_youngest(nb_engine *e, uint32_t keep)
{
    uint32_t n = 0, at = find_youngest(e, keep, &n);
    if (at == e->n_running) return false;
    nb_request *r = e->running[at];
    for (uint32_t i = 0; i < n; i++) nbi_request_drop_pages(e, e->running[at + i]);
    for (uint32_t i = at; i + n < e->n_running; i++) e->running[i] = e->running[i + n];
    e->n_running -= n;
    pthread_mutex_lock(&e->lock);
    r->preempted = true;
    nbi_queue_turn(e, r)->running -= n;
    nbi_queue_push_front(e, r);
    e->stats.preemptions++;
    pthread_mutex_unlock(&e->lock);
    return true;
}

/* Gives running[i] pages for its next `rows` rows, taking them from younger requests if need be.
 * Returns the rows that fit. */
static uint32_t ensure_pages(nb_engine *e, uint32_t i, uint32_t rows)
{
    nb_request *r = e->running[i];
    uint32_t want = pages_for(r->n_cached + rows);
    while (r->n_pages < want) {
        int32_t page = nbi_kv_pages_take(e);
        if (page >= 0) {
            r->pages[r->n_pages++] = page;
        } else if (!preempt_youngest(e, i)) {
            break;
        }
    }
    uint32_t fit = r->n_pages * NBI_PAGE_TOKENS - r->n_cached;
    return fit < rows ? fit : rows;
}

/* Rows that running[i] may have of the budget. A request that wants prompt log-probabilities is
 * held to the logit rows that are left, and to what its reader can take. */
static uint32_t rows_wanted(const nb_request *r, uint32_t budget, uint32_t logit_rows)
{
    uint32_t known = r->n_tokens - r->n_cached;
    uint32_t rows =
        nbi_min_u32(r->beams ? known - 1 : known, budget); /* the last: with all beams */
    if (!r->sampling.prompt_logprobs || r->n_reported == r->n_prompt) return rows;
    return nbi_min_u32(rows, nbi_min_u32(logit_rows, NBI_PROMPT_EVENTS_MAX));
}

/* The next row of every beam, or of none: running[i] is the first member. */
static void add_beams(nb_engine *e, uint32_t i)
{
    const nbi_beams *g = e->running[i]->beams;
    if (g->state != NBI_BEAMS_SEARCHING) return;
    for (uint32_t k = 0; k < g->width; k++) g->members[k]->rows = 0;
    if (!nbi_beams_are_ready(g)) return;
    for (uint32_t k = 0; k < g->width; k++) {
        if (g->live[k] && !ensure_pages(e, i + k, 1)) return;
    }
    for (uint32_t k = 0; k < g->width; k++) {
        if (g->live[k]) nbi_step_batch_add(&e->batch, g->members[k], 1);
    }
}

/* Decode rows: the newest token and the drafts behind it, as far as pages and the reader's ring
 * allow. */
static void add_decoding(nb_engine *e)
{
    for (uint32_t i = 0; i < e->n_running; i++) {
        nb_request *r = e->running[i];
        if (r->beams) {
            if (r->beam == 0) add_beams(e, i);
            continue;
        }
        r->rows = 0;
        if (r->n_tokens - r->n_cached != 1) continue;
        if (r->n_drafts && !nbi_request_has_room(r, 1 + r->n_drafts)) r->n_drafts = 0;
        if (!nbi_request_has_room(r, 1)) continue;
        uint32_t rows = ensure_pages(e, i, 1 + r->n_drafts);
        if (rows) nbi_step_batch_add(&e->batch, r, rows);
    }
}

/* False: the beam has nothing to compute for itself now. One that was put back takes what those
 * before it have computed. */
static bool start_beam(nb_engine *e, nb_request *r)
{
    if (nbi_beams_is_idle(r)) return false;
    if (r->n_pages) return true;
    if (nbi_beams_must_wait(r)) return false;
    nbi_request_match_prefix(e, r);
    return true;
}

static void add_prompts(nb_engine *e)
{
    uint32_t budget = e->chunk_size;
    for (uint32_t i = 0; i < e->n_running && budget; i++) {
        nb_request *r = e->running[i];
        if (r->beams && !start_beam(e, r)) continue;
        if (r->rows || r->n_tokens - r->n_cached == 1) continue;
        uint32_t left = e->batch.max_logit_rows - e->batch.view.n_logit_rows;
        uint32_t others = e->n_running - i - 1; /* each may still need one logit row */
        uint32_t rows = rows_wanted(r, budget, left > others ? left - others : 0);
        if (!rows || !nbi_request_has_room(r, rows)) continue;
        rows = ensure_pages(e, i, rows);
        if (!rows) continue;
        nbi_step_batch_add(&e->batch, r, rows);
        budget -= rows;
    }
}

/* A request preempted after it was added must not run: decode rows are added first, and only
 * younger requests are preempted, which are added later; prompts likewise. Still, an added younger
 * decode row can lose its pages to an older prompt: rebuild without it. */
static bool lost_a_member(const nb_engine *e)
{
    for (uint32_t s = 0; s < e->batch.view.n_seqs; s++) {
        if (!e->batch.seqs[s]->n_pages) return true;
    }
    return false;
}

static void build(nb_engine *e)
{
    do {
        nbi_step_batch_clear(&e->batch);
        add_decoding(e);
        add_prompts(e);
    } while (lost_a_member(e));
}

/* ---------------------------------------------------------------- step */

/* Answers of searches that are over go out as far as their readers take them. */
static void show_beams(nb_engine *e)
{
    for (uint32_t i = 0; i < e->n_running;) {
        nb_request *r = e->running[i];
        if (!r->beams || !nbi_beams_show(e, r)) {
            i++;
            continue;
        }
        nbi_engine_count_end(e, r, r->finish);
        nbi_engine_retire(e, i);
    }
}

/* What runs and is used: known before anybody hears of the step. */
static void publish(nb_engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->stats.n_running = e->n_running;
    e->stats.kv_tokens_used = (uint64_t)(e->pool.n_pages - nbi_kv_pages_free(e)) * NBI_PAGE_TOKENS;
    e->stats.kv_tokens_cached = (uint64_t)e->prefix.n_cached * NBI_PAGE_TOKENS;
    pthread_mutex_unlock(&e->lock);
}

void nbi_engine_sample(nb_engine *e, nbi_step_batch *b, float *logits)
{
    e->backend->ops->sample(e->backend,
                            &(nbi_sample_args){.out = b->sample_out,
                                               .logits = logits,
                                               .rows = b->sample_rows,
                                               .n_rows = b->view.n_logit_rows,
                                               .vocab = nbi_model_config(e->model)->vocab,
                                               .n_valid = e->n_valid_ids,
                                               .row_fault = b->logit_fault});
}

/* Readers hear of the tokens of the last step. */
static void tell_readers(nb_engine *e)
{
    nbi_engine_hand_out(e);
    publish(e);
    nbi_heap_allow();
    nbi_engine_after_step(e);
    nbi_heap_forbid();
}

void nbi_engine_meanwhile(nb_engine *e)
{
    if (e->overlaps && e->n_owed) tell_readers(e);
    if (e->overlaps && e->decode_steps == 1) admit(e);
}

static nb_status run(nb_engine *e, nb_error *err)
{
    nbi_step_batch *b = &e->batch;
    float *logits;
    NB_TRY(nbi_ranks_order(e, NBI_ORDER_FORWARD, b, err));
    NB_TRY(nbi_model_forward(e->model, &e->kv, &b->view, &logits, err));
    nbi_engine_meanwhile(e);
    nbi_step_batch_constrain(b);
    if (b->view.n_logit_rows) nbi_engine_sample(e, b, logits);
    NB_TRY(e->backend->ops->sync(e->backend, err));
    nbi_ranks_done(e, b);
    nbi_engine_commit(e);
    if (!e->overlaps) tell_readers(e);
    return e->n_draft_steps ? nbi_engine_draft(e, err) : NB_OK;
}

/* The batch of this step; empty when there is nothing to do. Leaves the heap forbidden. */
static void form_batch(nb_engine *e)
{
    admit(e);
    nbi_heap_forbid();
    build(e);
    if (e->batch.view.n_rows || !e->decode_run) return;
    e->decode_run = e->decode_steps; /* nobody decodes after all: the queue is due */
    nbi_heap_allow();
    form_batch(e);
}

nb_status nbi_engine_step_once(nb_engine *e, bool *worked, nb_error *err)
{
    uint64_t now_ns = nbi_now_ns();
    nbi_profile_step_begin(e);
    reap_running(e, now_ns);
    reap_waiting(e, now_ns);
    show_beams(e);
    if (e->notified) publish(e);
    nbi_engine_after_step(e); /* what was cancelled need not wait for this step */
    form_batch(e);
    nb_status st = NB_OK;
    uint64_t begin_ns = nbi_now_ns();
    *worked = e->batch.view.n_rows || e->n_owed;
    if (e->batch.view.n_rows) {
        st = run(e, err);
        nbi_meter_step(e, begin_ns, &e->batch.view);
    } else if (e->n_owed) {
        tell_readers(e);
    }
    nbi_heap_allow();
    publish(e);
    nbi_engine_after_step(e); /* readers that are behind were told so */
    nbi_profile_step_end(e, &e->batch.view);
    return st;
}
