/* Whole answers from items (see tool.h). Called by the server for answers that do not stream. */
#include <string.h>

#include "text/tool.h"

static nb_status add_call(nbi_tool_answer *answer, const nbi_tool_item *item)
{
    if (answer->n_calls == answer->cap_calls) {
        size_t cap = answer->cap_calls ? answer->cap_calls * 2 : 4;
        nbi_tool_call *calls = nbi_realloc(answer->calls, cap * sizeof *calls);
        if (!calls) return NB_NO_MEMORY;
        answer->calls = calls;
        answer->cap_calls = cap;
    }
    nbi_tool_call call = {.name = nbi_strndup(item->text, item->n)};
    if (!call.name) return NB_NO_MEMORY;
    memcpy(call.id, item->id, sizeof call.id);
    answer->calls[answer->n_calls++] = call;
    return NB_OK;
}

static nb_status add_item(nbi_tool_answer *answer, const nbi_tool_item *item)
{
    if (item->kind == NBI_TOOL_CONTENT) return nbi_buf_add(&answer->content, item->text, item->n);
    if (item->kind == NBI_TOOL_BEGIN) return add_call(answer, item);
    NB_ASSERT(item->call + 1 == answer->n_calls);
    nbi_tool_call *call = &answer->calls[item->call];
    if (item->kind == NBI_TOOL_ARGS) return nbi_buf_add(&call->arguments, item->text, item->n);
    call->complete = item->complete;
    return NB_OK;
}

nb_status nbi_tool_answer_add(nbi_tool_answer *answer, const nbi_tool_item *items, size_t n_items,
                              nb_error *err)
{
    for (size_t i = 0; i < n_items; i++) {
        nb_status st = add_item(answer, &items[i]);
        if (st != NB_OK) return nbi_fail(err, st, "tool calls: %s", nb_status_text(st));
    }
    return NB_OK;
}

void nbi_tool_answer_free(nbi_tool_answer *answer)
{
    for (size_t i = 0; i < answer->n_calls; i++) {
        nbi_free(answer->calls[i].name);
        nbi_buf_free(&answer->calls[i].arguments);
    }
    nbi_free(answer->calls);
    nbi_buf_free(&answer->content);
    *answer = (nbi_tool_answer){0};
}

nb_status nbi_tool_parse(nbi_tool_answer *answer, nbi_tool_form form, json_t *tools,
                         const nbi_tool_options *options, const char *text, size_t n, bool stopped,
                         nb_error *err)
{
    nbi_tool_parser *parser = NULL;
    const nbi_tool_item *items;
    size_t n_items;
    nb_status st;
    NB_TRY(nbi_tool_parser_create(&parser, form, tools, options, err));
    NB_TRY_OR(st, nbi_tool_parser_push(parser, text, n, &items, &n_items, err), done);
    NB_TRY_OR(st, nbi_tool_answer_add(answer, items, n_items, err), done);
    NB_TRY_OR(st, nbi_tool_parser_finish(parser, stopped, &items, &n_items, err), done);
    st = nbi_tool_answer_add(answer, items, n_items, err);
done:
    nbi_tool_parser_destroy(&parser);
    return st;
}
