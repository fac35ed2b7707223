/* An answer of a chat model taken apart: thinking, content, tool calls, in the order of the text.
 * Called by the chat surfaces.
 *
 * Invariants:
 *  - Neighbouring pieces are of different kinds, so that a piece of thinking or content is a whole
 *    one, and ARGS hold all fragments that came since the pieces were last cleared.
 *  - A call is CALL, ARGS..., END with nothing between: content that the parser finds inside a call
 *    stands behind its END.
 *  - Joined, the pieces are the same however the text was cut. */
#pragma once

#include "text/reasoning.h"
#include "text/tool.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum nbi_piece_kind {
    NBI_PIECE_THINKING,
    NBI_PIECE_CONTENT,
    NBI_PIECE_CALL, /* its text is the name */
    NBI_PIECE_ARGS, /* part of a JSON object */
    NBI_PIECE_END   /* of a call; without text */
} nbi_piece_kind;

typedef struct nbi_piece {
    nbi_piece_kind kind;
    uint32_t call;             /* CALL, ARGS, END: ordinal */
    size_t begin, n;           /* place in `text` */
    char id[NBI_TOOL_ID_SIZE]; /* CALL */
} nbi_piece;

/* Zeroed is an answer without tools. */
typedef struct nbi_answer {
    nbi_piece *pieces; /* [n_pieces] */
    size_t n_pieces, cap_pieces;
    nbi_buf text;             /* of all pieces */
    nbi_tool_parser *parser;  /* NULL: all is content */
    bool first_call_only;     /* further calls are left out */
    bool calls_only;          /* so is all text that is no thinking */
    bool thinking_whole;      /* thinking is one piece, which comes when it is over */
    bool in_call, skips_call; /* between CALL and END; of a call that is left out */
    uint32_t n_calls;         /* begun and kept */
    nbi_buf thinking;         /* all of it while it may still turn out to be the answer */
    size_t n_shown;           /* of it, in pieces so far, with thinking_whole */
    nbi_buf held;             /* content found inside a call */
} nbi_answer;

/* Calls of the form are looked for when there are tools (their reference count is raised). */
nb_status nbi_answer_init(nbi_answer *answer, nbi_tool_form form, json_t *tools,
                          bool first_call_only, nb_error *err);
void nbi_answer_free(nbi_answer *answer);

/* Content that is not the model's. */
nb_status nbi_answer_add_content(nbi_answer *answer, const char *text, size_t n);

/* Takes the text of an event, and with the last one (a finish) what was held back. */
nb_status nbi_answer_take(nbi_answer *answer, nbi_reasoning *splitter, const nb_event *event);

/* Forgets the pieces, keeps the state. */
void nbi_answer_clear(nbi_answer *answer);

/* Not NUL-terminated; "" for a piece without text. */
const char *nbi_piece_text(const nbi_answer *answer, const nbi_piece *piece);

#ifdef __cplusplus
}
#endif
