/* Speculative decoding with the checkpoint's MTP layer: drafts for the next step.
 *
 * After a step, the MTP layer runs over the rows that were confirmed (so its cache follows the main
 * one), and the last row of every request that decodes gives the first draft; further drafts come
 * from the layer fed with its own output. The next step verifies them: the token of every row is
 * drawn from the model's own distribution with that position's own random number, and a draft
 * counts only if it is that very token. So the answer is the same, token for token, with any number
 * of drafts, greedy or sampled.
 *
 * Position t of the layer's cache holds what token t + 1 and hidden state t give. The last slot of
 * a page therefore knows the token behind the page; after a prefix hit it may know another
 * request's. That can cost a draft, never a token.
 *
 * Under a mask each draft is drawn from what it allows; a grammar then accepts the draft for the
 * time being. The masks found on the way are those that the verification needs. At the end all
 * drafts are taken back. */
#include "engine/beam.h"

/* Few drafts pay when many requests share a step: each costs a row of work, and the step reads most
 * experts anyway. */
static uint32_t drafts_for(const nb_engine *e, const nb_request *r)
{
    if (r->penalties.index) return 0; /* each token changes what the next may be */
    if (r->beams) return 0;
    if (r->grammar.mask && !r->grammar.rollback) return 0;
    uint32_t k = e->n_draft_steps;
    for (uint32_t running = 8; running < e->n_running; running *= 2) k /= 2;
    uint32_t left =
        r->n_max - r->n_tokens; /* tokens that may still come: a draft needs one behind it */
    if (left < 1 || k > left - 1) k = left < 1 ? 0 : left - 1;
    return k;
}

static void clear(nbi_step_batch *b)
{
    nbi_step_batch_clear(b);
    b->view.hidden_rows = b->hidden_rows;
    b->view.list_rows = b->list_rows;
}

/* Adds rows [from, from + rows) of the request as the MTP layer sees them. `hidden` and `list` are
 * the hidden row and the list row of the first. */
static void add_rows(nbi_step_batch *b, nb_request *r, uint32_t from, uint32_t rows,
                     uint32_t hidden, uint32_t list, bool wants_logits)
{
    uint32_t s = b->view.n_seqs++, first = b->view.n_rows;
    for (uint32_t i = 0; i < rows; i++) {
        uint32_t row = first + i, t = from + i;
        b->ids[row] = t + 1 < r->n_tokens ? r->tokens[t + 1] : r->drafts[t + 1 - r->n_tokens];
        b->pos[row] = (int32_t)t;
        b->row_seq[row] = (int32_t)s;
        b->row_fault[row] = 0;
        b->hidden_rows[row] = (int32_t)(hidden + i);
        b->list_rows[row] = (int32_t)(list + i);
    }
    for (uint32_t i = 0; i < r->n_pages; i++)
        b->page_table[(size_t)s * b->page_stride + i] = r->pages[i];
    b->seqs[s] = r;
    b->seq_len[s] = (int32_t)(from + rows);
    b->expanded[s] = (int32_t)r->n_expanded;
    b->view.n_rows += rows;
    b->seq_first[s + 1] = (int32_t)b->view.n_rows;
    if ((uint32_t)b->seq_len[s] > b->view.max_len) b->view.max_len = (uint32_t)b->seq_len[s];
    b->seq_logit[s] = b->view.n_logit_rows;
    if (!wants_logits) return;
    uint32_t l = b->view.n_logit_rows++;
    b->logit_rows[l] = (int32_t)(b->view.n_rows - 1);
    b->logit_fault[l] = 0;
    b->sample_rows[l] = (nbi_sample_row){.top_p = 1, .n_logprobs = -1}; /* greedy */
    b->candidates[l] = r->masks ? 0 : 1;
}

static void add_draft(nb_request *r, int32_t id)
{
    r->drafts[r->n_drafts++] = id;
    if (!r->masks) return;
    if (r->grammar.mask) r->grammar.accept(r->grammar.user, id);
    (void)nbi_request_mask(r, r->n_drafts);
}

/* The drafts are only guesses: grammars forget them. */
static void take_back(const nbi_step_batch *main)
{
    for (uint32_t s = 0; s < main->view.n_seqs; s++) {
        nb_request *r = main->seqs[s];
        if (r && r->grammar.mask && r->n_drafts) r->grammar.rollback(r->grammar.user, r->n_drafts);
    }
}

/* Masks of the drafts to come. A grammar knows the confirmed tokens once they were handed out. */
static void constrain(nbi_step_batch *b)
{
    for (uint32_t s = 0; s < b->view.n_seqs; s++) {
        nb_request *r = b->seqs[s];
        if (r && r->masks && b->seq_logit[s + 1] > b->seq_logit[s])
            b->sample_rows[b->seq_logit[s]].mask = nbi_request_mask(r, r->n_drafts);
    }
}

/* Runs the pass and appends a draft to every request that wanted one. */
static nb_status run(nb_engine *e, bool from_draft, nb_error *err)
{
    nbi_step_batch *b = &e->drafting;
    float *logits;
    NB_TRY(nbi_ranks_order(e, from_draft ? NBI_ORDER_DRAFT_ON : NBI_ORDER_DRAFT, b, err));
    NB_TRY(nbi_model_draft(e->model, &e->kv, &b->view, from_draft, &logits, err));
    b->seq_logit[b->view.n_seqs] = b->view.n_logit_rows;
    nbi_engine_meanwhile(e);
    constrain(b);
    if (b->view.n_logit_rows) nbi_engine_sample(e, b, logits);
    NB_TRY(e->backend->ops->sync(e->backend, err));
    nbi_ranks_done(e, b);
    for (uint32_t s = 0; s < b->view.n_seqs; s++) {
        nb_request *r = b->seqs[s];
        if (r && b->seq_logit[s + 1] > b->seq_logit[s])
            add_draft(r, b->sample_out[b->seq_logit[s]].id);
    }
    return NB_OK;
}

/* First pass: every confirmed row of the step's batch. */
static void add_confirmed(nb_engine *e, const nbi_step_batch *main)
{
    for (uint32_t s = 0; s < main->view.n_seqs; s++) {
        nb_request *r = main->seqs[s];
        if (!r) continue;
        bool chose = main->seq_logit[s + 1] > main->seq_logit[s];
        if (r->beams && (chose || nbi_beams_is_idle(r))) continue; /* another beam by now */
        uint32_t from = (uint32_t)main->pos[main->seq_first[s]], rows = r->n_cached - from;
        bool decodes = r->n_cached + 1 == r->n_tokens;
        r->n_drafts = 0;
        r->drafts_wanted = decodes ? drafts_for(e, r) : 0;
        if (rows)
            add_rows(&e->drafting, r, from, rows, (uint32_t)main->seq_first[s],
                     e->drafting.view.n_rows, r->drafts_wanted > 0);
    }
}

/* Draft pass j > 0: one row for each request that wants more and has a page for it. The requests
 * are those of the pass before. */
static void add_continuing(nbi_step_batch *b, uint32_t j)
{
    uint32_t n = b->view.n_seqs;
    for (uint32_t s = 0; s < n; s++) b->last_row[s] = (uint32_t)b->seq_first[s + 1] - 1;
    clear(b);
    for (uint32_t s = 0; s < n; s++) { /* seqs[] is rewritten in place, never ahead of s */
        nb_request *r = b->seqs[s];
        if (!r) continue; /* has ended meanwhile */
        uint32_t position = r->n_cached + j - 1;
        if (r->n_drafts != j || r->drafts_wanted <= j || position >= r->n_pages * NBI_PAGE_TOKENS)
            continue;
        uint32_t last = b->last_row[s]; /* not before the row being added: still as it was */
        add_rows(b, r, position, 1, last, (uint32_t)b->list_rows[last], true);
    }
}

nb_status nbi_engine_draft(nb_engine *e, nb_error *err)
{
    clear(&e->drafting);
    add_confirmed(e, &e->batch);
    for (uint32_t j = 1; e->drafting.view.n_rows; j++) {
        NB_TRY(run(e, j > 1, err));
        add_continuing(&e->drafting, j);
    }
    take_back(&e->batch);
    return NB_OK;
}
