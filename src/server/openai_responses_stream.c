/* The events of a streamed response. Called through nbi_surface_responses.
 *
 * Pieces are kept, because the last event repeats all output; `piece` and `sent` of the state say
 * what was written. A piece of thinking or content is an item, CALL to END are one; an item is
 * closed when its piece cannot grow any more. */
#include <string.h>

#include "server/openai_responses.h"

static nb_status begin_event(nbi_responses_state *s, const char *type, nbi_buf *out)
{
    return nbi_buf_addf(out, "event: %s\ndata: {\"type\":\"%s\",\"sequence_number\":%llu", type,
                        type, (unsigned long long)s->sequence++);
}

static nb_status end_event(nbi_buf *out)
{
    return nbi_buf_add(out, "}\n\n", 3);
}

/* An event that holds the whole response. */
static nb_status write_response_event(nbi_job *job, const char *type, const char *status,
                                      bool output, nbi_buf *out)
{
    NB_TRY(begin_event(job->state, type, out));
    NB_TRY(nbi_buf_addf(out, ",\"response\":"));
    NB_TRY(nbi_responses_write(job, status, output, out));
    return end_event(out);
}

static nb_status write_begin(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    if (c->opened) return NB_OK;
    c->opened = true;
    NB_TRY(write_response_event(job, "response.created", "in_progress", false, out));
    return write_response_event(job, "response.in_progress", "in_progress", false, out);
}

/* ---------------------------------------------------------------- one item */

/* `,"item_id":...,"output_index":N` of the open item, which began with piece i. */
static nb_status write_place(const nbi_job *job, size_t i, nbi_buf *out)
{
    const nbi_responses_state *s = job->state;
    NB_TRY(nbi_buf_add(out, ",", 1));
    NB_TRY(nbi_responses_write_id(job, "item_id", i, s->n_items - 1, out));
    return nbi_buf_addf(out, ",\"output_index\":%u", s->n_items - 1);
}

static nb_status write_part_event(nbi_job *job, const char *type, size_t i, size_t n, nbi_buf *out)
{
    const nbi_answer *a = &job->choices[0].answer;
    const nbi_piece *p = &a->pieces[i];
    NB_TRY(begin_event(job->state, type, out));
    NB_TRY(write_place(job, i, out));
    NB_TRY(nbi_buf_addf(out, ",\"content_index\":0,\"part\":"));
    NB_TRY(nbi_responses_write_part(p->kind, nbi_piece_text(a, p), n, out));
    return end_event(out);
}

static nb_status open_item(nbi_job *job, size_t i, nbi_buf *out)
{
    nbi_responses_state *s = job->state;
    s->is_open = true;
    s->n_items++;
    NB_TRY(begin_event(s, "response.output_item.added", out));
    NB_TRY(nbi_buf_addf(out, ",\"output_index\":%u,\"item\":", s->n_items - 1));
    NB_TRY(nbi_responses_write_new_item(job, i, s->n_items - 1, out));
    NB_TRY(end_event(out));
    if (job->choices[0].answer.pieces[i].kind == NBI_PIECE_CALL) return NB_OK;
    return write_part_event(job, "response.content_part.added", i, 0, out);
}

/* Delta or done of the text of piece `text`; the item began with piece i. */
static nb_status write_text_event(nbi_job *job, const char *what, size_t i, size_t text,
                                  size_t skip, nbi_buf *out)
{
    nbi_responses_state *s = job->state;
    const nbi_answer *a = &job->choices[0].answer;
    const nbi_piece *p = &a->pieces[text];
    bool done = strcmp(what, "done") == 0;
    const char *stem = p->kind == NBI_PIECE_THINKING  ? "response.reasoning_text"
                       : p->kind == NBI_PIECE_CONTENT ? "response.output_text"
                                                      : "response.function_call_arguments";
    const char *key = !done                       ? ",\"delta\":"
                      : p->kind == NBI_PIECE_ARGS ? ",\"arguments\":"
                                                  : ",\"text\":";
    NB_TRY(nbi_buf_addf(out, "event: %s.%s\ndata: {\"type\":\"%s.%s\",\"sequence_number\":%llu",
                        stem, what, stem, what, (unsigned long long)s->sequence++));
    NB_TRY(write_place(job, i, out));
    if (p->kind != NBI_PIECE_ARGS) NB_TRY(nbi_buf_addf(out, ",\"content_index\":0"));
    if (p->kind == NBI_PIECE_CONTENT) NB_TRY(nbi_buf_addf(out, ",\"logprobs\":[]"));
    if (p->kind == NBI_PIECE_ARGS && done) {
        const nbi_piece *call = &a->pieces[i];
        NB_TRY(nbi_job_write_string(out, ",\"name\":", nbi_piece_text(a, call), call->n));
    }
    NB_TRY(nbi_job_write_string(out, key, nbi_piece_text(a, p) + skip, p->n - skip));
    return end_event(out);
}

static nb_status close_item(nbi_job *job, size_t i, size_t text, nbi_buf *out)
{
    nbi_responses_state *s = job->state;
    const nbi_piece *p = &job->choices[0].answer.pieces[i];
    s->is_open = false;
    NB_TRY(write_text_event(job, "done", i, text, 0, out));
    if (p->kind != NBI_PIECE_CALL) {
        NB_TRY(write_part_event(job, "response.content_part.done", i, p->n, out));
    }
    NB_TRY(begin_event(s, "response.output_item.done", out));
    NB_TRY(nbi_buf_addf(out, ",\"output_index\":%u,\"item\":", s->n_items - 1));
    NB_TRY(nbi_responses_write_item(job, i, s->n_items - 1, out));
    return end_event(out);
}

/* ---------------------------------------------------------------- the answer */

/* What was not written of piece i, which belongs to the item that began with piece `item`. */
static nb_status write_news(nbi_job *job, size_t item, size_t i, nbi_buf *out)
{
    nbi_responses_state *s = job->state;
    size_t n = job->choices[0].answer.pieces[i].n;
    if (s->sent < n) NB_TRY(write_text_event(job, "delta", item, i, s->sent, out));
    s->sent = n;
    return NB_OK;
}

/* Writes piece s->piece; *more is false when it may still grow. CALL stands right before its ARGS,
 * and these right before the END. */
static nb_status write_piece(nbi_job *job, const nbi_choice *c, bool *more, nbi_buf *out)
{
    nbi_responses_state *s = job->state;
    size_t i = s->piece;
    *more = i + 1 < c->answer.n_pieces || c->done;
    switch (c->answer.pieces[i].kind) {
    case NBI_PIECE_CALL: return open_item(job, i, out);
    case NBI_PIECE_ARGS: return write_news(job, i - 1, i, out);
    case NBI_PIECE_END: return close_item(job, i - 2, i - 1, out);
    case NBI_PIECE_THINKING:
    case NBI_PIECE_CONTENT:
        if (!s->is_open) NB_TRY(open_item(job, i, out));
        NB_TRY(write_news(job, i, i, out));
        return *more ? close_item(job, i, i, out) : NB_OK;
    }
    return NB_OK;
}

nb_status nbi_responses_write_delta(nbi_job *job, nbi_choice *c, nbi_buf *out)
{
    nbi_responses_state *s = job->state;
    NB_TRY(write_begin(job, c, out));
    while (s->piece < c->answer.n_pieces) {
        nbi_piece_kind kind = c->answer.pieces[s->piece].kind;
        bool more;
        NB_TRY(write_piece(job, c, &more, out));
        if (!more && kind != NBI_PIECE_CALL && kind != NBI_PIECE_END) break;
        s->piece++;
        s->sent = 0;
    }
    return NB_OK;
}

nb_status nbi_responses_write_end(nbi_job *job, nbi_buf *out)
{
    const char *status = nbi_responses_status(job);
    const char *type = strcmp(status, "completed") == 0    ? "response.completed"
                       : strcmp(status, "incomplete") == 0 ? "response.incomplete"
                                                           : "response.failed";
    NB_TRY(write_begin(job, &job->choices[0], out));
    return write_response_event(job, type, status, true, out);
}
