/* The step's batch: flat host arrays, allocated once. */
#include <string.h>

#include "engine/beam.h"

static size_t carve(nbi_step_batch *b, char *base)
{
    nbi_plan plan = {0};
    size_t T = b->max_rows, S = b->max_seqs, R = b->max_logit_rows, i32 = sizeof(int32_t);
    struct {
        void *slot;
        size_t bytes;
    } const parts[] = {
        {&b->ids, T * i32},
        {&b->pos, T * i32},
        {&b->row_seq, T * i32},
        {&b->row_fault, T * i32},
        {&b->shares, T * i32},
        {&b->hidden_rows, T * i32},
        {&b->list_rows, T * i32},
        {&b->last_row, S * sizeof(uint32_t)},
        {&b->seq_first, (S + 1) * i32},
        {&b->seq_len, S * i32},
        {&b->expanded, S * i32},
        {&b->page_table, S * b->page_stride * i32},
        {&b->logit_rows, R * i32},
        {&b->logit_fault, R * i32},
        {&b->candidates, R * i32},
        {&b->seqs, S * sizeof(nb_request *)},
        {&b->seq_logit, (S + 1) * sizeof(uint32_t)},
        {&b->sample_rows, R * sizeof(nbi_sample_row)},
        {&b->sample_out, R * sizeof(nbi_sample_out)},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        size_t at = nbi_plan_add(&plan, parts[i].bytes);
        if (base) *(void **)parts[i].slot = base + at;
    }
    return plan.bytes;
}

static nbi_step_batch sized(uint32_t max_rows, uint32_t max_seqs, uint32_t max_logit_rows,
                            uint32_t max_context)
{
    return (nbi_step_batch){.max_rows = max_rows,
                            .max_seqs = max_seqs,
                            .max_logit_rows = max_logit_rows,
                            .page_stride = (max_context + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS};
}

size_t nbi_step_batch_bytes(uint32_t max_rows, uint32_t max_seqs, uint32_t max_logit_rows,
                            uint32_t max_context)
{
    nbi_step_batch b = sized(max_rows, max_seqs, max_logit_rows, max_context);
    return carve(&b, NULL);
}

nb_status nbi_step_batch_create(nbi_step_batch *b, uint32_t max_rows, uint32_t max_seqs,
                                uint32_t max_logit_rows, uint32_t max_context, nb_error *err)
{
    *b = sized(max_rows, max_seqs, max_logit_rows, max_context);
    b->block = nbi_calloc(1, carve(b, NULL));
    if (!b->block) return nbi_fail(err, NB_NO_MEMORY, "no memory for batches of %u rows", max_rows);
    carve(b, b->block);
    return NB_OK;
}

void nbi_step_batch_destroy(nbi_step_batch *b)
{
    nbi_free(b->block);
    *b = (nbi_step_batch){0};
}

void nbi_step_batch_clear(nbi_step_batch *b)
{
    b->view = (nbi_batch){.page_stride = b->page_stride,
                          .ids = b->ids,
                          .pos = b->pos,
                          .row_seq = b->row_seq,
                          .shares = b->shares,
                          .seq_first = b->seq_first,
                          .seq_len = b->seq_len,
                          .expanded = b->expanded,
                          .page_table = b->page_table,
                          .logit_rows = b->logit_rows,
                          .candidates = b->candidates,
                          .n_valid = b->n_valid,
                          .row_fault = b->row_fault};
    b->seq_first[0] = 0;
    b->seq_logit[0] = 0;
    b->constrained = false;
}

/* Where a mask leaves nothing but the end, the end is not banned. */
static bool only_ends(const nb_request *r, const uint32_t *mask)
{
    uint32_t n_allowed = 0, n_ends = 0;
    for (uint32_t i = 0; i < r->mask_words && n_allowed <= r->n_end_ids; i++)
        n_allowed += (uint32_t)__builtin_popcount(mask[i]);
    for (uint32_t i = 0; i < r->n_end_ids; i++) {
        uint32_t id = (uint32_t)r->end_ids[i];
        bool again = false;
        for (uint32_t k = 0; k < i; k++) again = again || r->end_ids[k] == r->end_ids[i];
        n_ends += !again && id / 32 < r->mask_words && (mask[id / 32] >> id % 32 & 1u);
    }
    return n_allowed == n_ends;
}

/* How many logits of each rank choosing this row's token needs (model/candidates.h); 0: all. */
static int32_t candidates_of(const nbi_sample_row *row, bool constrained)
{
    if (constrained || row->forced || row->n_logprobs >= 0 || row->n_adjust) return 0;
    if (row->temperature < NBI_GREEDY_BELOW) return 1;
    return row->top_k > 0 && row->top_k < NBI_CANDIDATES_MAX ? row->top_k + 1 : 0;
}

/* Row `row` at position p: are its logits wanted, and for what? Fills the sample row but for masks
 * and bans. */
static void add_logit_row(nbi_step_batch *b, nb_request *r, uint32_t row, uint32_t p)
{
    bool last = p + 1 >= r->n_tokens; /* the newest token, or a draft behind it */
    bool prompt = r->sampling.prompt_logprobs && p + 1 < r->n_prompt && p + 1 >= r->n_reported;
    if (!last && !prompt) return;
    uint32_t i = b->view.n_logit_rows++;
    NB_ASSERT(i < b->max_logit_rows);
    b->logit_rows[i] = (int32_t)row;
    b->logit_fault[i] = 0;
    const nb_sampling *s = &r->sampling;
    b->sample_rows[i] =
        (nbi_sample_row){.temperature = s->temperature,
                         .top_p = s->top_p,
                         .min_p = s->min_p,
                         .top_k = s->top_k,
                         .seed = s->seed,
                         .counter = p + 1 - r->n_prompt,
                         .n_logprobs = r->beams ? r->beams->n_row_logprobs : s->n_logprobs,
                         .wanted = s->logprob_ids,
                         .n_wanted = s->n_logprob_ids};
    if (!last) {
        b->sample_rows[i].forced = true;
        b->sample_rows[i].forced_id = r->tokens[p + 1];
        b->candidates[i] = 0;
        return;
    }
    const bool constrained = r->masks || p + 1 - r->n_prompt < s->min_tokens;
    b->constrained = b->constrained || constrained;
    b->sample_rows[i].adjust = r->penalties.adjust;
    b->sample_rows[i].n_adjust = r->penalties.n;
    b->candidates[i] = candidates_of(&b->sample_rows[i], constrained);
}

void nbi_step_batch_add(nbi_step_batch *b, nb_request *r, uint32_t rows)
{
    uint32_t s = b->view.n_seqs++, first = b->view.n_rows;
    const bool decodes = r->n_tokens - r->n_cached == 1;
    NB_ASSERT(s < b->max_seqs && first + rows <= b->max_rows &&
              r->n_cached + rows <= r->n_tokens + r->n_drafts);
    for (uint32_t i = 0; i < rows; i++) {
        uint32_t row = first + i, p = r->n_cached + i;
        b->ids[row] = p < r->n_tokens ? r->tokens[p] : r->drafts[p - r->n_tokens];
        b->pos[row] = (int32_t)p;
        b->row_seq[row] = (int32_t)s;
        b->row_fault[row] = 0;
        b->shares[row] = decodes && !r->sampling.disable_oea;
        add_logit_row(b, r, row, p);
    }
    for (uint32_t i = 0; i < r->n_pages; i++)
        b->page_table[(size_t)s * b->page_stride + i] = r->pages[i];
    b->seqs[s] = r;
    b->seq_len[s] = (int32_t)(r->n_cached + rows);
    b->expanded[s] = (int32_t)r->n_expanded;
    b->view.n_rows += rows;
    b->seq_first[s + 1] = (int32_t)b->view.n_rows;
    b->seq_logit[s + 1] = b->view.n_logit_rows;
    if ((uint32_t)b->seq_len[s] > b->view.max_len) b->view.max_len = (uint32_t)b->seq_len[s];
    r->rows = rows;
}

void nbi_step_batch_forget(nbi_step_batch *b, const nb_request *r)
{
    for (uint32_t s = 0; s < b->view.n_seqs; s++) {
        if (b->seqs[s] != r) continue;
        b->seqs[s] = NULL;
        for (uint32_t i = b->seq_logit[s]; i < b->seq_logit[s + 1]; i++)
            b->sample_rows[i] = (nbi_sample_row){.top_p = 1, .n_logprobs = -1};
    }
}

void nbi_step_batch_constrain(nbi_step_batch *b)
{
    for (uint32_t s = 0; b->constrained && s < b->view.n_seqs; s++) {
        nb_request *r = b->seqs[s];
        uint32_t drafts = 0; /* before the row */
        if (!r) continue;
        for (uint32_t i = b->seq_logit[s]; i < b->seq_logit[s + 1]; i++) {
            nbi_sample_row *row = &b->sample_rows[i];
            if (row->forced) continue;
            row->mask = r->masks ? nbi_request_mask(r, drafts++) : NULL;
            if (row->counter >= r->sampling.min_tokens) continue;
            if (row->mask && only_ends(r, row->mask)) continue;
            row->banned = r->end_ids;
            row->n_banned = r->n_end_ids;
        }
    }
}

int32_t nbi_step_batch_fault(const nbi_step_batch *b, uint32_t s)
{
    for (int32_t row = b->seq_first[s]; row < b->seq_first[s + 1]; row++) {
        if (b->row_fault[row]) return b->row_fault[row];
    }
    for (uint32_t i = b->seq_logit[s]; i < b->seq_logit[s + 1]; i++) {
        if (b->logit_fault[i]) return b->logit_fault[i];
    }
    return 0;
}
