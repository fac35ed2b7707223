/* One sequence, chunk by chunk, logits of every row. */
#include "engine/score.h"

typedef struct arrays {
    int32_t *ids, *pos, *row_seq, *logit_rows, *row_fault, *pages;
    int32_t seq_first[2], seq_len[1], expanded[1];
    void *block;
} arrays;

static size_t carve(arrays *a, uint32_t chunk, uint32_t n_pages, char *base)
{
    nbi_plan plan = {0};
    int32_t **const rows[] = {&a->ids, &a->pos, &a->row_seq, &a->logit_rows, &a->row_fault};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        size_t at = nbi_plan_add(&plan, chunk * sizeof(int32_t));
        if (base) *rows[i] = (int32_t *)(void *)(base + at);
    }
    size_t at = nbi_plan_add(&plan, n_pages * sizeof(int32_t));
    if (base) a->pages = (int32_t *)(void *)(base + at);
    return plan.bytes;
}

static nb_status run_chunk(nbi_model *model, nbi_kv *kv, arrays *a, const int32_t *ids,
                           uint32_t begin, uint32_t rows, uint32_t n_pages, float **logits,
                           nb_error *err)
{
    for (uint32_t i = 0; i < rows; i++) {
        a->ids[i] = ids[begin + i];
        a->pos[i] = (int32_t)(begin + i);
        a->logit_rows[i] = (int32_t)i;
        a->row_fault[i] = 0;
    }
    a->seq_first[1] = (int32_t)rows;
    a->seq_len[0] = (int32_t)(begin + rows);
    nbi_batch batch = {.n_rows = rows,
                       .n_seqs = 1,
                       .n_logit_rows = rows,
                       .page_stride = n_pages,
                       .max_len = begin + rows,
                       .ids = a->ids,
                       .pos = a->pos,
                       .row_seq = a->row_seq,
                       .seq_first = a->seq_first,
                       .seq_len = a->seq_len,
                       .expanded = a->expanded,
                       .page_table = a->pages,
                       .logit_rows = a->logit_rows,
                       .row_fault = a->row_fault};
    NB_TRY(nbi_model_forward(model, kv, &batch, logits, err));
    NB_TRY(nbi_model_sync(model, err));
    for (uint32_t i = 0; i < rows; i++) {
        char what[160];
        if (!a->row_fault[i]) continue;
        nbi_fault_text(a->row_fault[i], what, sizeof what);
        return nbi_fail(err, NB_NUMERIC, "numerics guard: %s at token %u", what, begin + i);
    }
    return NB_OK;
}

nb_status nbi_score_run(nbi_model *model, nbi_kv *kv, const int32_t *ids, uint32_t n,
                        uint32_t chunk, nbi_score_each each, void *user, nb_error *err)
{
    arrays a = {0};
    uint32_t n_pages = (n + NBI_PAGE_TOKENS - 1) / NBI_PAGE_TOKENS,
             vocab = nbi_model_config(model)->vocab;
    if (n_pages > kv->n_pages)
        return nbi_fail(err, NB_TOO_LARGE, "%u tokens need %u KV pages, %u are there", n, n_pages,
                        kv->n_pages);
    a.block = nbi_calloc(1, carve(&a, chunk, n_pages, NULL));
    float *host = nbi_malloc((size_t)chunk * vocab * sizeof *host);
    if (!a.block || !host) {
        nbi_free(a.block);
        nbi_free(host);
        return nbi_fail(err, NB_NO_MEMORY, "score: out of memory");
    }
    carve(&a, chunk, n_pages, a.block);
    for (uint32_t i = 0; i < n_pages; i++) a.pages[i] = (int32_t)i;
    a.expanded[0] = (int32_t)nbi_model_expanded(model, n);
    nb_status st = NB_OK;
    for (uint32_t begin = 0; begin < n && st == NB_OK; begin += chunk) {
        uint32_t rows = n - begin < chunk ? n - begin : chunk;
        float *logits = NULL;
        st = run_chunk(model, kv, &a, ids, begin, rows, n_pages, &logits, err);
        if (st == NB_OK) nbi_model_read_logits(model, host, logits, rows);
        for (uint32_t i = 0; i < rows && st == NB_OK; i++)
            st = each(user, begin + i, host + (size_t)i * vocab, err);
    }
    nbi_free(host);
    nbi_free(a.block);
    return st;
}
