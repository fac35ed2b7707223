/* POST /v1/responses in parts: request, response object, stream. Private to openai_responses*.c.
 *
 * Nothing is stored between requests: `store` has no effect, what refers to an earlier response is
 * refused. */
#pragma once

#include "server/job.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_responses_state {
    const char *echo;   /* members of the response that repeat the request */
    uint64_t sequence;  /* of the next event */
    size_t piece, sent; /* stream: the piece to write next, and how much of it was written */
    bool is_open;       /* its item was added */
    uint32_t n_items;   /* items added */
} nbi_responses_state;

/* Checks input, instructions, tools, tool_choice, parallel_tool_calls, reasoning and text, and says
 * the same as a chat body that nbi_chat_request_read() takes; errors name the fields of `body`.
 * *out is a new object. Neighbouring reasoning, assistant messages and function calls become one
 * assistant message. Tools of the type web_search, which clients declare unasked, are left out;
 * other built-in tools are refused. */
nb_status nbi_responses_chat(json_t **out, const json_t *body, nbi_api_error *e);

/* Appends the response object. `status` is one of the API; `output` false leaves the list empty and
 * usage null. */
nb_status nbi_responses_write(const nbi_job *job, const char *status, bool output, nbi_buf *out);
/* How the answer ended: "completed", "incomplete" or "failed". */
const char *nbi_responses_status(const nbi_job *job);

/* The item that begins with piece i, as it is after the last event; `index` is its place. */
nb_status nbi_responses_write_item(const nbi_job *job, size_t i, uint32_t index, nbi_buf *out);
/* The same before anything of it was written. */
nb_status nbi_responses_write_new_item(const nbi_job *job, size_t i, uint32_t index, nbi_buf *out);
/* `"<key>":"<id of the item>"` */
nb_status nbi_responses_write_id(const nbi_job *job, const char *key, size_t i, uint32_t index,
                                 nbi_buf *out);
/* A content part of thinking or content with this text. */
nb_status nbi_responses_write_part(nbi_piece_kind kind, const char *text, size_t n, nbi_buf *out);

/* nbi_surface.write_delta and write_end. */
nb_status nbi_responses_write_delta(nbi_job *job, nbi_choice *choice, nbi_buf *out);
nb_status nbi_responses_write_end(nbi_job *job, nbi_buf *out);

#ifdef __cplusplus
}
#endif
