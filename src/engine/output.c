/* From sampled tokens to events: end conditions, text, the event ring. The step writes, one reader
 * takes. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "engine/engine.h"

/* ---------------------------------------------------------------- rings */

/* Where `worst` bytes of text fit in one piece; UINT32_MAX when they do not. Called with the lock
 * held. */
static uint32_t text_place(nb_request *r)
{
    if (!r->count) r->text_begin = r->text_end = 0;
    if (r->text_end >= r->text_begin) {
        if (r->text_cap - r->text_end >= r->text_worst) return r->text_end;
        return r->text_begin > r->text_worst ? 0 : UINT32_MAX;
    }
    return r->text_begin - r->text_end > r->text_worst ? r->text_end : UINT32_MAX;
}

/* Bytes of the text ring from the first unread to the newest, with what a wrap left unused. */
static uint32_t text_span(const nb_request *r)
{
    if (!r->count) return 0;
    return r->text_end >= r->text_begin ? r->text_end - r->text_begin
                                        : r->text_cap - (r->text_begin - r->text_end);
}

/* Says that there is something to read. Called with the lock held. */
static void notify(nb_request *r)
{
    if (!r->notify || r->closed) return;
    r->notify(r->notify_user);
    r->engine->notified = true;
}

/* The reader can only make more of it. Called with the lock held. */
static void set_sure(nb_request *r)
{
    uint32_t by_count = NBI_EVENTS_MAX - r->count;
    uint32_t by_text = (r->text_cap - text_span(r)) / r->text_worst;
    uint32_t n = nbi_min_u32(by_count, by_text);
    r->n_sure = n ? n - 1 : 0;
}

bool nbi_request_has_room(nb_request *r, uint32_t rows)
{
    bool decoding = r->n_tokens - r->n_cached == 1;
    uint32_t answers = decoding ? rows : 1;
    uint32_t prompts = r->sampling.prompt_logprobs && r->n_reported < r->n_prompt ? rows : 0;
    answers += r->n_owed;
    if (!r->lacked_room && answers + prompts <= r->n_sure) return true;
    pthread_mutex_lock(&r->lock);
    bool room = r->count + answers + prompts + 1 <= NBI_EVENTS_MAX; /* 1: the event that ends it */
    room = room && r->text_cap - text_span(r) >=
                       (answers + 1) * r->text_worst;   /* 1: a wrap may waste as much */
    if (!room && !r->wants_room && r->count) notify(r); /* it may wait for more events */
    r->wants_room = r->lacked_room = !room;
    pthread_mutex_unlock(&r->lock);
    return room;
}

void nbi_request_prefetch_events(const nb_request *r)
{
    nbi_prefetch(r->ring, sizeof(nbi_event_slot) / 2); /* where a reader that keeps up leaves it */
    nbi_prefetch(r->text_ring, 1);
    nbi_prefetch(r->notify_user, 64);
}

bool nbi_request_is_half_free(const nb_request *r)
{
    return r->count <= NBI_EVENTS_MAX / 2 && text_span(r) <= r->text_cap / 2;
}

void nbi_event_copy(nb_event *to, const nb_event *from)
{
    memcpy(to, from, offsetof(nb_event, top) + from->n_top * sizeof *from->top);
}

/* The next event, to be filled and pushed. Called with the lock held. */
static nb_event *new_event(nb_request *r, int32_t id)
{
    NB_ASSERT(r->count < NBI_EVENTS_MAX && !r->ended);
    if (!r->count) r->head = 0; /* the same cache lines again */
    nb_event *event = &r->ring[(r->head + r->count) % NBI_EVENTS_MAX].event;
    memset(event, 0, offsetof(nb_event, top));
    event->id = id;
    event->matched_id = event->matched_string = -1;
    return event;
}

/* Appends the new event, whose text (n_text bytes) was written at `place`, and tells the reader,
 * now if it is `first`: somebody may measure the time to it. Called with the lock held. */
static void push_event(nb_request *r, uint32_t place, bool first)
{
    nbi_event_slot *slot = &r->ring[(r->head + r->count) % NBI_EVENTS_MAX];
    nb_event *event = &slot->event;
    event->text = r->text_ring + place;
    r->text_end = place + (uint32_t)event->n_text;
    slot->text_end = r->text_end;
    r->count++;
    r->ended = event->finish != NB_FINISH_NONE;
    r->finish = event->finish;
    set_sure(r);
    if (r->n_blocked) pthread_cond_signal(&r->readable);
    bool enough = first || r->ended || r->count >= r->notify_events;
    if (enough) notify(r);
}

static float finite_logprob(float x)
{
    return x > -9999.0f ? x : -9999.0f; /* also for NaN and -inf: JSON has neither */
}

static void fill_logprobs(nb_event *event, const nb_request *r, const nbi_sample_out *out)
{
    if (r->sampling.n_logprobs < 0) return;
    event->has_logprob = true;
    event->logprob = finite_logprob(out->logprob);
    uint32_t n_ids = r->sampling.n_logprob_ids;
    event->n_top = n_ids ? n_ids : (uint32_t)r->sampling.n_logprobs;
    for (uint32_t i = 0; i < event->n_top; i++) {
        event->top[i] = (nb_logprob){out->top_ids[i], finite_logprob(out->top_logprobs[i])};
    }
}

/* ---------------------------------------------------------------- prompt tokens */

void nbi_request_put_prompt(nb_request *r, uint32_t index, const nbi_sample_out *out)
{
    pthread_mutex_lock(&r->lock);
    uint32_t place = text_place(r);
    nb_event *event = new_event(r, r->tokens[index]);
    event->is_prompt = true;
    if (out) fill_logprobs(event, r, out);
    push_event(r, place == UINT32_MAX ? r->text_end : place, false);
    pthread_mutex_unlock(&r->lock);
    r->n_reported = index + 1;
}

/* ---------------------------------------------------------------- answer tokens */

bool nbi_request_is_end(const nb_request *r, int32_t id)
{
    for (uint32_t i = 0; i < r->n_end_ids; i++) {
        if (r->end_ids[i] == id) return true;
    }
    return false;
}

/* Bytes a token gives to the text; none for special tokens that are to be skipped. */
static const char *token_text(const nb_engine *e, const nb_request *r, int32_t id, size_t *n)
{
    *n = 0;
    if (!e->tokenizer || (r->sampling.skip_special && nbi_token_is_special(e->tokenizer, id)))
        return "";
    const char *bytes = nbi_token_bytes(e->tokenizer, id, n);
    return bytes ? bytes : "";
}

/* Searches n bytes of r->whole for stop strings; appends what is safe to the event's text at out.
 */
static void push_stop(nb_request *r, nb_event *event, size_t n, char *out)
{
    int matched = -1;
    event->n_text += nbi_stop_push(r->stop, r->whole, n, r->sampling.include_stop,
                                   out + event->n_text, &matched);
    event->matched_string = matched;
}

/* Bytes -> whole characters -> what cannot become a stop string any more. Appends to event's text
 * at out. */
static void add_text(nb_request *r, nb_event *event, const char *bytes, size_t n, bool may_stop,
                     char *out)
{
    if (!may_stop || !r->has_stops) {
        event->n_text += nbi_decoder_push(&r->decoder, bytes, n, out + event->n_text);
        return;
    }
    size_t n_whole = nbi_decoder_push(&r->decoder, bytes, n, r->whole);
    push_stop(r, event, n_whole, out);
}

/* The answer ends without a stop string: half characters and held-back text come out. */
static void flush_text(nb_request *r, nb_event *event, char *out)
{
    size_t n = nbi_decoder_flush(&r->decoder, r->whole);
    push_stop(r, event, n, out);
    if (event->matched_string < 0) event->n_text += nbi_stop_flush(r->stop, out + event->n_text);
}

/* Is the end of the answer one piece, time after time? So it is where, over all but one of the
 * times, every token is the one a piece before it. */
static bool repeats(const nb_request *r, uint32_t n_tokens)
{
    const nb_sampling *s = &r->sampling;
    const int32_t *last = r->tokens + n_tokens - 1;
    uint32_t n = n_tokens - r->n_prompt;
    if (!s->repeat_count) return false;
    for (uint32_t size = s->repeat_min ? s->repeat_min : 1;
         size <= s->repeat_max && size <= n / s->repeat_count; size++) {
        uint32_t i = 0, all = size * (s->repeat_count - 1);
        while (i < all && *(last - i) == *(last - i - size)) i++;
        if (i == all) return true;
    }
    return false;
}

/* The token is the last of n_tokens, prompt and answer. */
static void write_text(nb_engine *e, nb_request *r, nb_event *event, uint32_t n_tokens, char *out)
{
    size_t n;
    const char *bytes = token_text(e, r, event->id, &n);
    bool ends = nbi_request_is_end(r, event->id);
    bool may_stop = n_tokens - r->n_prompt >= r->sampling.min_tokens;
    if (!ends || r->sampling.include_stop) add_text(r, event, bytes, n, may_stop, out);
    if (event->matched_string >= 0) {
        event->finish = NB_FINISH_STOP;
        return;
    }
    if (ends) {
        event->finish = NB_FINISH_STOP;
        event->matched_id = event->id;
    } else if (n_tokens == r->n_max) {
        event->finish = NB_FINISH_LENGTH;
    } else if (may_stop && repeats(r, n_tokens)) {
        event->finish = NB_FINISH_REPETITION;
    }
    if (event->finish != NB_FINISH_NONE) flush_text(r, event, out);
}

bool nbi_request_take_token(nb_request *r, int32_t id)
{
    NB_ASSERT(r->n_tokens < r->n_max);
    r->tokens[r->n_tokens++] = id;
    nbi_penalties_add(&r->penalties, &r->sampling, id, true);
    nbi_token_limits_add(&r->limits, &r->sampling, id);
    r->n_masks = 0;
    return r->n_tokens == r->n_max || nbi_request_is_end(r, id);
}

bool nbi_request_put_token(nb_engine *e, nb_request *r, const nbi_sample_out *out,
                           uint32_t n_tokens)
{
    if (r->grammar.mask) r->grammar.accept(r->grammar.user, out->id);
    nbi_meter_stamp(e, r);
    pthread_mutex_lock(&r->lock);
    uint32_t place = text_place(r);
    NB_ASSERT(place != UINT32_MAX); /* nbi_request_has_room() said so before the step */
    nb_event *event = new_event(r, out->id);
    fill_logprobs(event, r, out);
    write_text(e, r, event, n_tokens, r->text_ring + place);
    push_event(r, place, n_tokens == r->n_prompt + 1);
    bool ended = r->ended;
    pthread_mutex_unlock(&r->lock);
    return ended;
}

void nbi_request_end(nb_request *r, nb_finish finish, const char *why)
{
    pthread_mutex_lock(&r->lock);
    if (!r->ended) {
        if (why) snprintf(r->error, sizeof r->error, "%s", why);
        new_event(r, -1)->finish = finish;
        push_event(r, r->text_end, false);
    }
    pthread_mutex_unlock(&r->lock);
}
