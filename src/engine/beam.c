/* Beam search in the step: which beams go on, who takes whose place, and the answers at the end.
 *
 * As vLLM defines it: of the 2 W likeliest tokens of every beam those that end it give an answer of
 * score sum / length^penalty, the length with the prompt and without the end; of all others the W
 * likeliest go on. vLLM goes on to the last token; here the search ends as soon as no beam that
 * lives can come to a better score than the W answers there are, which changes nothing. */
#include "engine/beam.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"

/* A token that a beam may go on with. */
typedef struct next_beam {
    double sum;
    uint32_t parent, slot;
    int32_t id;
    float logprob;
} next_beam;

bool nbi_beams_is_idle(const nb_request *r)
{
    return r->beams && (r->beams->state != NBI_BEAMS_SEARCHING || !r->beams->live[r->beam]);
}

bool nbi_beams_are_ready(const nbi_beams *g)
{
    for (uint32_t i = 0; i < g->width; i++) {
        if (g->live[i] && g->members[i]->n_tokens - g->members[i]->n_cached != 1) return false;
    }
    return true;
}

bool nbi_beams_must_wait(const nb_request *r)
{
    const nbi_beams *g = r->beams;
    for (uint32_t i = 0; i < r->beam; i++) {
        if (g->live[i] && g->members[i]->n_tokens - g->members[i]->n_cached != 1) return true;
    }
    return false;
}

/* ---------------------------------------------------------------- answers */

static double score(const nbi_beams *g, double sum, uint32_t n)
{
    return sum / pow((double)(g->members[0]->n_prompt + n), g->length_penalty);
}

/* Keeps the best, equal ones in the order they come in. */
static void add_answer(nbi_beams *g, const nbi_beam_answer *a)
{
    uint32_t at = g->n_answers;
    while (at > 0 && a->score > g->answers[at - 1].score) at--;
    if (at == g->width) return;
    if (g->n_answers < g->width) g->n_answers++;
    for (uint32_t i = g->n_answers - 1; i > at; i--) g->answers[i] = g->answers[i - 1];
    g->answers[at] = *a;
}

/* Can no living beam come to a better score than the answers there are? Sums only fall. */
static bool is_decided(const nbi_beams *g)
{
    if (g->n_answers < g->width) return false;
    if (g->early_stopping) return true;
    uint32_t n = g->length_penalty >= 0 ? g->max_steps : g->step;
    return g->answers[g->width - 1].score >= score(g, g->sum[g->order[0]], n);
}

/* Notes the way to answer i, and clears its member for showing it. */
static void trace(nbi_beams *g, uint32_t i)
{
    const nbi_beam_answer *a = &g->answers[i];
    uint8_t *path = g->paths + (size_t)i * g->max_steps;
    uint32_t slot = a->slot;
    for (uint32_t t = a->n; t-- > 0;) {
        path[t] = (uint8_t)slot;
        slot = g->links[(size_t)t * g->width + slot].parent;
    }
}

static void finish(nb_engine *e, nbi_beams *g)
{
    for (uint32_t k = 0; k < g->n_live && g->step == g->max_steps; k++) {
        uint32_t slot = g->order[k];
        add_answer(g, &(nbi_beam_answer){.score = score(g, g->sum[slot], g->step),
                                         .n = g->step,
                                         .slot = slot,
                                         .end_id = -1});
    }
    g->state = NBI_BEAMS_SHOWING;
    for (uint32_t i = 0; i < g->width; i++) {
        nb_request *r = g->members[i];
        nbi_request_drop_pages(e, r);
        r->n_tokens = r->n_prompt;
        if (i < g->n_answers) trace(g, i);
    }
}

static void fail(nb_engine *e, nbi_beams *g, const nb_request *r, int32_t fault)
{
    char what[160];
    nbi_fault_text(fault, what, sizeof what);
    snprintf(g->error, sizeof g->error, "numerics guard: %s at token %u of a beam", what,
             r->n_cached);
    nbi_log(NB_LOG_ERROR, "%s", g->error);
    g->state = NBI_BEAMS_FAILED;
    for (uint32_t i = 0; i < g->width; i++) nbi_request_drop_pages(e, g->members[i]);
}

/* ---------------------------------------------------------------- choosing */

static void add_next(nbi_beams *g, next_beam *next, uint32_t *n, const next_beam *c)
{
    uint32_t at = *n;
    while (at > 0 && c->sum > next[at - 1].sum) at--;
    if (at == g->width) return;
    if (*n < g->width) ++*n;
    for (uint32_t i = *n - 1; i > at; i--) next[i] = next[i - 1];
    next[at] = *c;
}

/* Looks at every living beam's row; the beams that go on, best first. */
static uint32_t choose(const nb_engine *e, nbi_beams *g, next_beam *next)
{
    uint32_t n = 0;
    for (uint32_t k = 0; k < g->n_live; k++) {
        uint32_t slot = g->order[k];
        const nbi_sample_out *row = g->rows[slot];
        for (uint32_t i = 0; i < 2 * g->width; i++) {
            const int32_t id = row->top_ids[i];
            const double sum = g->sum[slot] + (double)row->top_logprobs[i];
            if (id < 0 || (uint32_t)id >= e->n_valid_ids) continue;
            if (!nbi_request_is_end(g->members[0], id)) {
                add_next(g, next, &n, &(next_beam){sum, slot, 0, id, row->top_logprobs[i]});
                continue;
            }
            add_answer(g, &(nbi_beam_answer){.score = score(g, sum, g->step),
                                             .n = g->step,
                                             .slot = slot,
                                             .end_id = id,
                                             .end_logprob = row->top_logprobs[i]});
        }
    }
    return n;
}

static void keep_tops(nbi_beams *g)
{
    for (uint32_t k = 0; k < g->n_live; k++) {
        const uint32_t slot = g->order[k];
        nb_logprob *to = g->tops + ((size_t)g->step * g->width + slot) * g->n_top;
        for (uint32_t i = 0; i < g->n_top; i++)
            to[i] = (nb_logprob){g->rows[slot]->top_ids[i], g->rows[slot]->top_logprobs[i]};
    }
}

/* ---------------------------------------------------------------- taking places */

/* The first that goes on with a beam stays in its place; the others take places that are empty now.
 */
static void assign(const nbi_beams *g, next_beam *next, uint32_t n)
{
    bool taken[NB_BEAM_WIDTH_MAX] = {false}, placed[NB_BEAM_WIDTH_MAX] = {false};
    for (uint32_t j = 0; j < n; j++) {
        if (taken[next[j].parent]) continue;
        next[j].slot = next[j].parent;
        taken[next[j].slot] = placed[j] = true;
    }
    for (uint32_t j = 0, at = 0; j < n; j++) {
        if (placed[j]) continue;
        while (at + 1 < g->width && taken[at]) at++;
        next[j].slot = at;
        taken[at] = true;
    }
}

/* `to` becomes what `from` is: tokens, pages, cache. */
static void fork(nb_engine *e, nb_request *to, const nb_request *from)
{
    nbi_request_drop_pages(e, to);
    memcpy(to->tokens + to->n_prompt, from->tokens + from->n_prompt,
           (from->n_tokens - from->n_prompt) * sizeof *to->tokens);
    to->n_tokens = from->n_tokens;
    for (uint32_t i = 0; i < from->n_shared; i++) {
        nbi_prefix_retain(&e->prefix, from->pages[i]);
        to->pages[i] = from->pages[i];
    }
    to->n_pages = to->n_shared = from->n_shared;
    to->n_cached = from->n_shared * NBI_PAGE_TOKENS;
    for (uint32_t i = from->n_shared; i < from->n_pages; i++) {
        int32_t page = nbi_kv_pages_take(e);
        if (page < 0) return; /* computed again from here on */
        nb_error lost;        /* the next pass says so */
        if (nbi_ranks_copy_page(e, from->pages[i], page, &lost) != NB_OK)
            nbi_log(NB_LOG_DEBUG, "beam search: %s", lost.text);
        nbi_kv_copy_page(&e->kv, e->backend, nbi_model_local(e->model), from->pages[i], page);
        to->pages[to->n_pages++] = page;
        uint32_t end = to->n_pages * NBI_PAGE_TOKENS;
        to->n_cached = end < from->n_cached ? end : from->n_cached;
    }
}

static void go_on(nb_engine *e, nbi_beams *g, next_beam *next, uint32_t n)
{
    assign(g, next, n);
    for (uint32_t j = 0; j < n; j++) {
        const next_beam *b = &next[j];
        if (b->slot != b->parent) fork(e, g->members[b->slot], g->members[b->parent]);
    }
    memset(g->live, 0, sizeof g->live);
    for (uint32_t j = 0; j < n; j++) {
        const next_beam *b = &next[j];
        nb_request *r = g->members[b->slot];
        r->tokens[r->n_tokens++] = b->id;
        g->links[(size_t)g->step * g->width + b->slot] =
            (nbi_beam_link){b->id, b->logprob, b->parent};
        g->live[b->slot] = true;
        g->sum[b->slot] = b->sum;
        g->order[j] = b->slot;
    }
    g->n_live = n;
    for (uint32_t i = 0; i < g->width; i++) {
        if (!g->live[i]) nbi_request_drop_pages(e, g->members[i]);
    }
}

/* All rows of the step are there. */
static uint32_t advance(nb_engine *e, nbi_beams *g)
{
    next_beam next[NB_BEAM_WIDTH_MAX];
    keep_tops(g);
    const uint32_t n = choose(e, g, next);
    nb_request *first = g->members[0];
    nbi_meter_stamp(e, first);
    nbi_meter_tokens(e, first, 1);
    nbi_meter_flush(e);
    if (n) go_on(e, g, next, n);
    g->n_live = n;
    g->step++;
    if (!n || g->step == g->max_steps || is_decided(g)) finish(e, g);
    return first->count_as == NB_COUNT_ALL ? n : 0;
}

uint32_t nbi_beams_deliver(nb_engine *e, const nbi_step_batch *b, uint32_t s)
{
    nb_request *r = b->seqs[s];
    nbi_beams *g = r->beams;
    if (g->state != NBI_BEAMS_SEARCHING) return 0; /* another beam's row has failed it */
    int32_t fault = nbi_step_batch_fault(b, s);
    if (fault) {
        fail(e, g, r, fault);
        return 0;
    }
    r->n_cached += r->rows;
    nbi_request_share_pages(e, r);
    if (b->seq_logit[s + 1] == b->seq_logit[s]) return 0; /* tokens that were known */
    g->rows[r->beam] = &b->sample_out[b->seq_logit[s]];
    if (++g->n_rows < g->n_live) return 0;
    g->n_rows = 0;
    return advance(e, g);
}

/* ---------------------------------------------------------------- showing */

/* Token j of the answer that member r shows, as a row would have given it. */
static void answer_token(const nb_request *r, uint32_t j, nbi_sample_out *out)
{
    const nbi_beams *g = r->beams;
    const nbi_beam_answer *a = &g->answers[r->beam];
    const uint8_t *path = g->paths + (size_t)r->beam * g->max_steps;
    uint32_t row = a->slot;
    if (j < a->n) {
        const nbi_beam_link *link = &g->links[(size_t)j * g->width + path[j]];
        out->id = link->id;
        out->logprob = link->logprob;
        row = link->parent;
    } else {
        out->id = a->end_id;
        out->logprob = a->end_logprob;
    }
    const nb_logprob *top = g->tops + ((size_t)j * g->width + row) * g->n_top;
    for (uint32_t i = 0; i < g->n_top; i++) {
        out->top_ids[i] = top[i].id;
        out->top_logprobs[i] = top[i].logprob;
    }
}

bool nbi_beams_show(nb_engine *e, nb_request *r)
{
    const nbi_beams *g = r->beams;
    if (g->state == NBI_BEAMS_SEARCHING) return false;
    if (g->state == NBI_BEAMS_FAILED) {
        nbi_request_end(r, NB_FINISH_ERROR, g->error);
        return true;
    }
    if (r->beam >= g->n_answers) { /* nothing but ends was likely */
        nbi_request_end(r, NB_FINISH_STOP, NULL);
        return true;
    }
    for (bool ended = false; !ended;) {
        nbi_sample_out out;
        r->n_cached = r->n_tokens - 1; /* one token at a time, as if it were decoded */
        if (!nbi_request_has_room(r, 1)) return false;
        answer_token(r, r->n_tokens - r->n_prompt, &out);
        (void)nbi_request_take_token(r, out.id);
        ended = nbi_request_put_token(e, r, &out, r->n_tokens);
    }
    return true;
}
