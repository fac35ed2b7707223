/* What the rows of a step say. Commit takes at once what the next step builds on: tokens, pages,
 * who has ended by an id or by length. What only readers wait for comes when results are handed
 * out: text, stop strings, events, counters of requests. With overlap that is done while the next
 * step or draft pass runs; a request that its text ends then has a row there, which nobody takes.
 * Either way the answer is the same. */
#include <stddef.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/beam.h"

/* What one request is owed of a step: tokens its reader has not heard of. */
struct nbi_owed {
    nb_request *r;              /* the engine's reference, when `left` */
    const nbi_sample_out *outs; /* [n] in owed_out */
    uint32_t n, n_before;       /* tokens; those the request had before */
    uint32_t drafted, accepted;
    bool left; /* the last token ended it: it does not run any more */
};

size_t nbi_owed_bytes(uint32_t max_running, uint32_t max_logit_rows)
{
    return max_running * sizeof(nbi_owed) + max_logit_rows * sizeof(nbi_sample_out);
}

nb_status nbi_owed_create(nb_engine *e, uint32_t max_logit_rows, nb_error *err)
{
    e->owed = nbi_calloc(1, nbi_owed_bytes(e->max_running, max_logit_rows));
    if (!e->owed) return nbi_fail(err, NB_NO_MEMORY, "engine: out of memory");
    e->owed_out = (nbi_sample_out *)(void *)(e->owed + e->max_running);
    return NB_OK;
}

/* ---------------------------------------------------------------- memory */

/* How far ahead memory is asked for. The model has emptied the caches, and a lock waits for all
 * that was read before it: without asking, misses would come one after the other. */
#define AHEAD 4u

static void prefetch_row(const nbi_step_batch *b, uint32_t s)
{
    const nb_request *r = s < b->view.n_seqs ? b->seqs[s] : NULL;
    if (!r) return;
    nbi_prefetch(r, offsetof(nb_request, sampling.stop_strings));
    nbi_prefetch(r->end_ids, 16);
    nbi_prefetch(&r->clock, offsetof(nb_request, readable) - offsetof(nb_request, clock));
}

static void prefetch_owed(const nb_engine *e, uint32_t i)
{
    if (i < e->n_owed) nbi_request_prefetch_events(e->owed[i].r);
}

/* ---------------------------------------------------------------- ends */

void nbi_engine_count_end(nb_engine *e, const nb_request *r, nb_finish finish)
{
    if (r->beams && r->beam) return; /* the first of a search counts */
    pthread_mutex_lock(&e->lock);
    if (finish == NB_FINISH_ERROR || finish == NB_FINISH_TIMEOUT) {
        e->stats.requests_failed++;
    } else if (finish == NB_FINISH_CANCELLED) {
        e->stats.requests_cancelled++;
    } else {
        e->stats.requests_finished++;
    }
    pthread_mutex_unlock(&e->lock);
}

static uint32_t index_of(const nb_engine *e, const nb_request *r)
{
    uint32_t i = 0;
    while (e->running[i] != r) i++;
    return i;
}

/* Takes running[i] out, pages back. */
static void leave(nb_engine *e, uint32_t i)
{
    nb_request *r = e->running[i];
    nbi_request_drop_pages(e, r);
    pthread_mutex_lock(&e->lock);
    nbi_queue_turn(e, r)->running--;
    pthread_mutex_unlock(&e->lock);
    for (uint32_t j = i; j + 1 < e->n_running; j++) e->running[j] = e->running[j + 1];
    e->n_running--;
}

void nbi_engine_retire(nb_engine *e, uint32_t i)
{
    nb_request *r = e->running[i];
    nbi_meter_end(e, r);
    leave(e, i);
    nbi_request_unref(r);
}

/* ---------------------------------------------------------------- commit */

static void fail_numeric(nb_request *r, int32_t fault)
{
    char what[160], why[NB_ERROR_TEXT_MAX];
    nbi_fault_text(fault, what, sizeof what);
    snprintf(why, sizeof why, "numerics guard: %s at token %u of the request", what, r->n_cached);
    nbi_log(NB_LOG_ERROR, "%s", why);
    nbi_request_end(r, NB_FINISH_ERROR, why);
}

/* Takes the logit rows of sequence s, in order. True when the request has ended with them. */
static bool take(nb_engine *e, uint32_t s)
{
    const nbi_step_batch *b = &e->batch;
    nb_request *r = b->seqs[s];
    if (r->sampling.prompt_logprobs && !r->n_reported) nbi_request_put_prompt(r, 0, NULL);
    uint32_t confirmed = nbi_min_u32(r->rows, r->n_tokens - r->n_cached);
    nbi_owed *o = &e->owed[e->n_owed];
    *o = (nbi_owed){.r = r, .n_before = r->n_tokens, .drafted = r->rows - confirmed};
    r->n_cached += confirmed;
    nbi_request_share_pages(e, r); /* also of a request that ends with this step */
    for (uint32_t i = b->seq_logit[s]; i < b->seq_logit[s + 1]; i++) {
        const nbi_sample_out *out = &b->sample_out[i];
        if (b->sample_rows[i].forced) {
            nbi_request_put_prompt(r, r->n_reported, out);
            continue;
        }
        if (!o->n++) o->outs = out;
        o->left = nbi_request_take_token(r, out->id);
        bool right = o->accepted < o->drafted && out->id == r->drafts[o->accepted];
        o->accepted += right; /* the draft is the token: its row is the token's row */
        if (o->left || !right) break;
        r->n_cached++;
    }
    r->n_owed = o->n;
    if (o->n) e->n_owed++;
    if (o->left) return true;
    r->n_drafts = 0;
    nbi_request_share_pages(e, r);
    return false;
}

/* Prompt tokens that became computed. */
static uint64_t prompt_rows(const nb_request *r, uint32_t before, uint32_t after)
{
    if (r->count_as == NB_COUNT_NONE) return 0;
    return nbi_min_u32(after, r->n_prompt) - nbi_min_u32(before, r->n_prompt);
}

/* The outputs handed out later stay where they are; the next step samples elsewhere. */
static void keep_outputs(nb_engine *e)
{
    nbi_sample_out *free_out = e->owed_out;
    e->owed_out = e->batch.sample_out;
    e->batch.sample_out = free_out;
}

void nbi_engine_commit(nb_engine *e)
{
    nbi_step_batch *b = &e->batch;
    uint64_t prompt = 0, generated = 0;
    NB_ASSERT(!e->n_owed);
    e->now_ns = nbi_now_ns();
    for (uint32_t s = 0; s < AHEAD; s++) prefetch_row(b, s);
    for (uint32_t s = 0; s < b->view.n_seqs; s++) {
        nb_request *r = b->seqs[s];
        prefetch_row(b, s + AHEAD);
        if (!r) continue; /* has ended meanwhile */
        uint32_t cached = r->n_cached;
        if (r->beams) {
            prompt += prompt_rows(r, cached, cached + r->rows);
            generated += nbi_beams_deliver(e, b, s);
            continue;
        }
        int32_t fault = nbi_step_batch_fault(b, s);
        bool ended = !fault && take(e, s);
        prompt += prompt_rows(r, cached, r->n_cached);
        if (!fault && !ended) continue;
        if (fault) fail_numeric(r, fault);
        if (fault) nbi_engine_count_end(e, r, NB_FINISH_ERROR);
        if (fault) nbi_engine_retire(e, index_of(e, r));
        if (ended) leave(e, index_of(e, r));
        b->seqs[s] = NULL;
    }
    keep_outputs(e);
    pthread_mutex_lock(&e->lock);
    e->stats.n_steps++;
    e->stats.prompt_tokens += prompt;
    e->stats.generated_tokens += generated;
    pthread_mutex_unlock(&e->lock);
}

/* ---------------------------------------------------------------- handing out */

static void count_drafts(nb_engine *e, const nb_request *r, uint32_t drafted, uint32_t accepted)
{
    if (!drafted || r->count_as == NB_COUNT_NONE) return;
    pthread_mutex_lock(&e->lock);
    e->stats.draft_steps++;
    e->stats.draft_tokens += drafted;
    e->stats.draft_accepted += accepted;
    for (uint32_t i = 0; i < accepted; i++) e->stats.draft_accepted_at[i]++;
    pthread_mutex_unlock(&e->lock);
}

/* Ended by its text: out of what runs or waits, and out of the rows being computed. */
static void leave_late(nb_engine *e, nb_request *r)
{
    nbi_step_batch_forget(&e->batch, r);
    nbi_step_batch_forget(&e->drafting, r);
    if (!r->preempted) {
        leave(e, index_of(e, r));
        return;
    }
    pthread_mutex_lock(&e->lock);
    nbi_queue_remove(e, r);
    pthread_mutex_unlock(&e->lock);
}

/* Writes the events of one request. Returns the tokens that count as generated. */
static uint32_t hand_out_one(nb_engine *e, const nbi_owed *o)
{
    nb_request *r = o->r;
    uint32_t n = 0;
    bool ended = false;
    r->n_owed = 0;
    while (n < o->n && !ended) {
        ended = nbi_request_put_token(e, r, &o->outs[n], o->n_before + n + 1);
        n++;
    }
    nbi_meter_tokens(e, r, n);
    count_drafts(e, r, o->drafted, nbi_min_u32(o->accepted, n));
    uint32_t generated = r->count_as == NB_COUNT_ALL ? n : 0;
    if (!ended) return generated;
    r->n_tokens = o->n_before + n; /* drafts behind a stop string were never said */
    nbi_engine_count_end(e, r, r->finish);
    nbi_meter_end(e, r);
    if (!o->left) leave_late(e, r);
    nbi_request_unref(r);
    return generated;
}

void nbi_engine_hand_out(nb_engine *e)
{
    uint64_t generated = 0;
    if (!e->n_owed) return;
    for (uint32_t i = 0; i < AHEAD; i++) prefetch_owed(e, i);
    for (uint32_t i = 0; i < e->n_owed; i++) {
        prefetch_owed(e, i + AHEAD);
        generated += hand_out_one(e, &e->owed[i]);
    }
    e->n_owed = 0;
    nbi_meter_flush(e);
    pthread_mutex_lock(&e->lock);
    e->stats.generated_tokens += generated;
    pthread_mutex_unlock(&e->lock);
}
