/* The waiting list: who is next, who has left. Under the engine's lock. */
#include "engine/engine.h"

/* Requests that lpm compares before each admission: bounds the work per step. */
#define LPM_WINDOW 32u
/* So often later ones may go before the first in line; then it is first come, first served until it
 * has gone. */
#define LPM_PASSES 128u
/* So often a request is passed by later ones, whatever their priority or client: then it is next.
 */
#define PASSES_MAX 1024u

static void note_deadline(nb_engine *e, const nb_request *r)
{
    if (r->deadline_ns && r->deadline_ns < e->first_deadline_ns)
        e->first_deadline_ns = r->deadline_ns;
}

static void count_in(nb_engine *e, nb_request *r)
{
    r->n_queued = r->n_tokens;
    e->n_waiting++;
    e->waiting_tokens += r->n_queued;
}

static void count_out(nb_engine *e, const nb_request *r)
{
    e->n_waiting--;
    e->waiting_tokens -= r->n_queued;
}

void nbi_queue_push(nb_engine *e, nb_request *r)
{
    note_deadline(e, r);
    r->next = NULL;
    if (e->waiting_tail) {
        e->waiting_tail->next = r;
    } else {
        e->waiting_head = r;
    }
    e->waiting_tail = r;
    count_in(e, r);
}

void nbi_queue_push_front(nb_engine *e, nb_request *r)
{
    note_deadline(e, r);
    e->has_cancelled = true; /* perhaps while it ran */
    r->next = e->waiting_head;
    e->waiting_head = r;
    if (!e->waiting_tail) e->waiting_tail = r;
    count_in(e, r);
}

nbi_client_turn *nbi_queue_turn(const nb_engine *e, const nb_request *r)
{
    uint64_t hash = r->client * 0x9e3779b97f4a7c15ull;
    return &e->turns[hash >> 32 & (NBI_CLIENTS - 1)];
}

/* Better: lower priority value; preempted; of a client with fewer running requests; of the client
 * whose last turn is longer ago; under lpm the longer cached prefix; else the earlier. */
static bool is_better(const nb_engine *e, const nb_request *a, uint32_t a_pages,
                      const nb_request *b, uint32_t b_pages)
{
    if (a->priority != b->priority) return a->priority < b->priority;
    if (a->preempted != b->preempted) return a->preempted;
    const nbi_client_turn *ta = nbi_queue_turn(e, a), *tb = nbi_queue_turn(e, b);
    if (!a->preempted && ta != tb) {
        if (ta->running != tb->running) return ta->running < tb->running;
        if (ta->last != tb->last) return ta->last < tb->last;
    }
    return e->lpm && a_pages > b_pages;
}

nb_request *nbi_queue_best(nb_engine *e)
{
    nb_request *best = e->waiting_head;
    if (!best || best->passed >= PASSES_MAX) return best; /* nobody was passed more often */
    uint32_t best_pages = e->lpm ? nbi_request_peek_prefix(e, best) : 0, seen = 1;
    for (nb_request *r = best->next; r; r = r->next) {
        bool by_prefix = e->lpm && e->waiting_head->passed < LPM_PASSES && seen++ < LPM_WINDOW;
        uint32_t pages = by_prefix ? nbi_request_peek_prefix(e, r) : 0;
        if (!is_better(e, r, pages, best, best_pages)) continue;
        best = r;
        best_pages = pages;
    }
    return best;
}

void nbi_queue_remove(nb_engine *e, nb_request *r)
{
    nb_request *before = NULL;
    for (nb_request *at = e->waiting_head; at != r; at = at->next) {
        at->passed++;
        before = at;
    }
    if (before) {
        before->next = r->next;
    } else {
        e->waiting_head = r->next;
    }
    if (e->waiting_tail == r) e->waiting_tail = before;
    r->next = NULL;
    count_out(e, r);
}

nb_request *nbi_queue_take_ended(nb_engine *e, uint64_t now_ns)
{
    nb_request *taken = NULL, *last = NULL;
    if (!e->has_cancelled && now_ns < e->first_deadline_ns) return NULL;
    e->has_cancelled = false;
    e->first_deadline_ns = UINT64_MAX;
    for (nb_request **at = &e->waiting_head; *at;) {
        nb_request *r = *at;
        bool late = r->deadline_ns && r->deadline_ns <= now_ns;
        if (r->n_owed) e->has_cancelled = true; /* perhaps: after it was handed out */
        if ((!nbi_request_is_cancelled(r) && !late) || r->n_owed) {
            note_deadline(e, r);
            last = r;
            at = &r->next;
            continue;
        }
        *at = r->next;
        r->next = taken;
        taken = r;
        count_out(e, r);
    }
    e->waiting_tail = last;
    return taken;
}
