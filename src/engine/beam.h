/* Beam search: requests that are searched together and each show one of the answers found.
 *
 * A search of width W has W members, one per beam that may live, in neighbouring places of the
 * running list. The first alone reads the prompt; from then on all living members have their row in
 * one step, and what the rows say of the next token decides which beams go on. A beam that goes on
 * twice takes the place of one that ended: the full pages are shared through the prefix tree, the
 * last, unfinished page is copied, or computed again when there is none to copy it to. When the
 * search is over the best answers go through the members' event rings like any other.
 *
 * What was chosen is kept as links from step to step, so an answer is a walk back from its end. All
 * memory is taken at submit. Everything here is the step's, but for what nb_beams_submit() does. */
#pragma once

#include "engine/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The token that beam `slot` got in a step, and whose row it came from. */
typedef struct nbi_beam_link {
    int32_t id;
    float logprob;
    uint32_t parent;
} nbi_beam_link;

/* An answer: the first n tokens are those on the way to links[n - 1][slot]. */
typedef struct nbi_beam_answer {
    double score;
    uint32_t n, slot;
    int32_t end_id; /* one token more: what ended it; -1: none, it has all the tokens it may */
    float end_logprob;
} nbi_beam_answer;

typedef enum nbi_beams_state {
    NBI_BEAMS_SEARCHING, /* every member is in the queue (the first for all) or runs */
    NBI_BEAMS_SHOWING,   /* members end one by one */
    NBI_BEAMS_FAILED
} nbi_beams_state;

struct nbi_beams {
    atomic_int refs; /* members that are not freed */
    nbi_beams_state state;
    uint32_t width;
    double length_penalty;
    bool early_stopping;
    uint32_t max_steps, step; /* tokens of an answer; those chosen so far */
    int32_t n_row_logprobs;   /* asked of every row */
    nb_request *members[NB_BEAM_WIDTH_MAX];
    bool live[NB_BEAM_WIDTH_MAX];
    double sum[NB_BEAM_WIDTH_MAX];     /* log-probability of a living beam */
    uint32_t order[NB_BEAM_WIDTH_MAX]; /* [n_live] places, best first */
    uint32_t n_live, n_rows;           /* rows of this step that were looked at */
    const nbi_sample_out *rows[NB_BEAM_WIDTH_MAX];
    nbi_beam_answer answers[NB_BEAM_WIDTH_MAX]; /* [n_answers] best first */
    uint32_t n_answers;
    uint32_t n_top;       /* log-probabilities kept beside each token's own */
    nbi_beam_link *links; /* [max_steps][width] */
    nb_logprob *tops;     /* [max_steps][width][n_top] of the row of that place */
    uint8_t *paths;       /* [width][max_steps] place of answer i in every step */
    size_t bytes;         /* counted in the engine's request_bytes */
    char error[NB_ERROR_TEXT_MAX];
};

/* Drops a member's share; the last one frees. */
void nbi_beams_unref(nb_request *r);

/* A member that has no row now: its place is empty, or the search is over. */
bool nbi_beams_is_idle(const nb_request *r);
/* All living members lack the row of their newest token only. */
bool nbi_beams_are_ready(const nbi_beams *g);
/* A member that was put back waits for those before it: they compute the pages it shares. */
bool nbi_beams_must_wait(const nb_request *r);
/* Takes what a step says of sequence s, a member. Returns the tokens chosen: 0 until the last
 * member's row is there. */
uint32_t nbi_beams_deliver(nb_engine *e, const nbi_step_batch *b, uint32_t s);
/* Writes as many events of a finished search as the reader has room for; true: that was all. */
bool nbi_beams_show(nb_engine *e, nb_request *r);

#ifdef __cplusplus
}
#endif
