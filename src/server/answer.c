/* Pieces of an answer (answer.h). Called by the chat surfaces of the server. */
#include "server/answer.h"

#include <string.h>

nb_status nbi_answer_init(nbi_answer *answer, nbi_tool_form form, json_t *tools,
                          bool first_call_only, nb_error *err)
{
    answer->first_call_only = first_call_only;
    if (!tools || form == NBI_TOOL_FORM_NONE) return NB_OK;
    return nbi_tool_parser_create(&answer->parser, form, tools, NULL, err);
}

void nbi_answer_free(nbi_answer *answer)
{
    nbi_free(answer->pieces);
    nbi_buf_free(&answer->text);
    nbi_buf_free(&answer->thinking);
    nbi_buf_free(&answer->held);
    nbi_tool_parser_destroy(&answer->parser);
    *answer = (nbi_answer){0};
}

void nbi_answer_clear(nbi_answer *answer)
{
    answer->n_pieces = 0;
    nbi_buf_clear(&answer->text);
}

const char *nbi_piece_text(const nbi_answer *answer, const nbi_piece *piece)
{
    return piece->n ? answer->text.data + piece->begin : "";
}

/* ---------------------------------------------------------------- pieces */

static nb_status add_piece(nbi_answer *a, const nbi_piece *piece, const char *text, size_t n)
{
    if (a->n_pieces == a->cap_pieces) {
        size_t cap = a->cap_pieces ? a->cap_pieces * 2 : 8;
        nbi_piece *pieces = nbi_realloc(a->pieces, cap * sizeof *pieces);
        if (!pieces) return NB_NO_MEMORY;
        a->pieces = pieces;
        a->cap_pieces = cap;
    }
    size_t begin = a->text.len;
    NB_TRY(nbi_buf_add(&a->text, text, n));
    a->pieces[a->n_pieces] = *piece;
    a->pieces[a->n_pieces].begin = begin;
    a->pieces[a->n_pieces++].n = n;
    return NB_OK;
}

/* Text that goes on where the last piece ends makes that longer. */
static nb_status add_text(nbi_answer *a, nbi_piece_kind kind, uint32_t call, const char *text,
                          size_t n)
{
    nbi_piece *last = a->n_pieces ? &a->pieces[a->n_pieces - 1] : NULL;
    if (!n) return NB_OK;
    if (last && last->kind == kind) {
        NB_TRY(nbi_buf_add(&a->text, text, n));
        last->n += n;
        return NB_OK;
    }
    const nbi_piece piece = {.kind = kind, .call = call};
    return add_piece(a, &piece, text, n);
}

nb_status nbi_answer_add_content(nbi_answer *answer, const char *text, size_t n)
{
    return add_text(answer, NBI_PIECE_CONTENT, 0, text, n);
}

/* ---------------------------------------------------------------- calls */

static nb_status begin_call(nbi_answer *a, const nbi_tool_item *item)
{
    a->in_call = true;
    a->skips_call = a->first_call_only && item->call > 0;
    if (a->skips_call) return NB_OK;
    nbi_piece piece = {.kind = NBI_PIECE_CALL, .call = item->call};
    memcpy(piece.id, item->id, sizeof piece.id);
    a->n_calls++;
    return add_piece(a, &piece, item->text, item->n);
}

static nb_status end_call(nbi_answer *a, uint32_t call)
{
    const nbi_piece piece = {.kind = NBI_PIECE_END, .call = call};
    a->in_call = false;
    if (!a->skips_call) NB_TRY(add_piece(a, &piece, "", 0));
    NB_TRY(add_text(a, NBI_PIECE_CONTENT, 0, a->held.data, a->held.len));
    nbi_buf_clear(&a->held);
    return NB_OK;
}

static nb_status add_item(nbi_answer *a, const nbi_tool_item *item)
{
    switch (item->kind) {
    case NBI_TOOL_CONTENT:
        if (a->calls_only) return NB_OK;
        if (a->in_call) return nbi_buf_add(&a->held, item->text, item->n);
        return add_text(a, NBI_PIECE_CONTENT, 0, item->text, item->n);
    case NBI_TOOL_BEGIN: return begin_call(a, item);
    case NBI_TOOL_ARGS:
        if (a->skips_call) return NB_OK;
        return add_text(a, NBI_PIECE_ARGS, item->call, item->text, item->n);
    case NBI_TOOL_END: return end_call(a, item->call);
    }
    return NB_OK;
}

static nb_status add_items(nbi_answer *a, const nbi_tool_item *items, size_t n)
{
    for (size_t i = 0; i < n; i++) NB_TRY(add_item(a, &items[i]));
    return NB_OK;
}

/* ---------------------------------------------------------------- text */

static nb_status add_content(nbi_answer *a, const char *text, size_t n)
{
    const nbi_tool_item *items = NULL;
    size_t n_items = 0;
    if (!a->parser) return add_text(a, NBI_PIECE_CONTENT, 0, text, n);
    NB_TRY(nbi_tool_parser_push(a->parser, text, n, &items, &n_items, NULL));
    return add_items(a, items, n_items);
}

/* The thinking that was kept back. */
static nb_status show_thinking(nbi_answer *a)
{
    size_t from = a->n_shown;
    if (!a->thinking_whole || a->thinking.len == from) return NB_OK;
    a->n_shown = a->thinking.len;
    return add_text(a, NBI_PIECE_THINKING, 0, a->thinking.data + from, a->thinking.len - from);
}

static void forget_thinking(nbi_answer *a)
{
    nbi_buf_free(&a->thinking);
    a->n_shown = 0;
}

static nb_status add_spans(nbi_answer *a, const nbi_span *spans, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (spans[i].kind == NBI_SPAN_CONTENT) {
            NB_TRY(show_thinking(a));
            NB_TRY(add_content(a, spans[i].text, spans[i].n));
            continue;
        }
        NB_TRY(nbi_buf_add(&a->thinking, spans[i].text, spans[i].n));
        if (a->thinking_whole) continue;
        NB_TRY(add_text(a, NBI_PIECE_THINKING, 0, spans[i].text, spans[i].n));
    }
    return NB_OK;
}

/* The last text: what splitter and parser held back. */
static nb_status finish(nbi_answer *a, nbi_reasoning *splitter, bool stopped)
{
    nbi_span spans[NBI_REASONING_SPANS_MAX];
    const nbi_tool_item *items = NULL;
    size_t n_items = 0;
    bool unclosed = false;
    size_t n = nbi_reasoning_finish(splitter, stopped, spans, &unclosed);
    NB_TRY(add_spans(a, spans, n));
    NB_TRY(show_thinking(a));
    if (unclosed && !a->calls_only) NB_TRY(add_content(a, a->thinking.data, a->thinking.len));
    forget_thinking(a);
    if (!a->parser) return NB_OK;
    NB_TRY(nbi_tool_parser_finish(a->parser, stopped, &items, &n_items, NULL));
    return add_items(a, items, n_items);
}

nb_status nbi_answer_take(nbi_answer *answer, nbi_reasoning *splitter, const nb_event *event)
{
    nbi_span spans[NBI_REASONING_SPANS_MAX];
    size_t n = nbi_reasoning_push(splitter, event->text, event->n_text, spans);
    NB_TRY(add_spans(answer, spans, n));
    if (event->finish != NB_FINISH_NONE) {
        return finish(answer, splitter, event->finish == NB_FINISH_STOP);
    }
    if (!answer->thinking.data || nbi_reasoning_inside(splitter)) return NB_OK;
    NB_TRY(show_thinking(answer));
    forget_thinking(answer);
    return NB_OK;
}
