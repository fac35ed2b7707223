#include "indexer_util.h"

void ix_make(index_data *d, const index_case *c, const uint32_t *lengths, const uint32_t *rows,
             uint32_t n_seqs)
{
    memset(d, 0, sizeof *d);
    d->c = *c;
    op_batch_make(&d->batch, lengths, rows, n_seqs);
    const uint32_t T = d->batch.b.n_rows, half = c->rope / 2;
    const size_t n = (size_t)d->batch.n_pages * NBI_PAGE_TOKENS * c->dim;
    float *k = op_floats(n); /* NaN where nothing was appended */
    for (uint32_t s = 0; s < n_seqs; s++)
        for (uint32_t p = 0; p < lengths[s]; p++)
            op_fill(k + op_slot(&d->batch, s, p) * c->dim, c->dim, 1);
    d->keys = op_kv_make(c->cache, d->batch.n_pages, 1, c->dim, c->dim, k);
    d->kv = (nbi_kv_layer){.dtype = c->cache, .index_k = d->keys.data};
    op_free(k);
    d->q = op_floats((size_t)T * c->heads * c->dim);
    d->w = op_floats((size_t)T * c->heads);
    op_fill(d->q, (size_t)T * c->heads * c->dim, 1);
    op_fill(d->w, (size_t)T * c->heads, 1); /* negative weights too: scores below zero */
    d->cs = op_floats((size_t)T * half);
    d->sn = op_floats((size_t)T * half);
    for (uint32_t i = 0; i < T * half; i++) {
        const double a = op_uniform(-3, 3);
        d->cs[i] = (float)cos(a);
        d->sn[i] = (float)sin(a);
    }
    d->rope =
        (nbi_rope_rows){.cos = d->cs, .sin = d->sn, .dim = c->rope, .interleaved = c->interleaved};
}

void ix_free(index_data *d)
{
    op_batch_free(&d->batch);
    op_free(d->kv.index_k);
    op_free(d->q);
    op_free(d->w);
    op_free(d->cs);
    op_free(d->sn);
}

nbi_limits ix_limits(const index_data *d)
{
    return (nbi_limits){.max_rows = d->batch.b.n_rows,
                        .max_seqs = 8,
                        .max_context = d->batch.b.max_len,
                        .index_heads = d->c.heads,
                        .index_dim = d->c.dim,
                        .index_topk = d->c.topk};
}

static void oracle_scores(const index_data *d, uint32_t t, double *score)
{
    const index_case *c = &d->c;
    const uint32_t len = (uint32_t)d->batch.pos[t] + 1, half = c->rope / 2;
    double *q = malloc(c->dim * sizeof *q);
    memset(score, 0, len * sizeof *score);
    for (uint32_t h = 0; h < c->heads; h++) {
        const float *src = d->q + ((size_t)t * c->heads + h) * c->dim;
        for (uint32_t i = 0; i < c->dim; i++) q[i] = (double)src[i];
        for (uint32_t i = 0; i < half; i++) {
            const uint32_t a = c->interleaved ? 2 * i : i,
                           b = c->interleaved ? 2 * i + 1 : i + half;
            const double u = q[a], v = q[b];
            const double cs = (double)d->cs[t * half + i], sn = (double)d->sn[t * half + i];
            q[a] = u * cs - v * sn;
            q[b] = u * sn + v * cs;
        }
        for (uint32_t p = 0; p < len; p++) {
            const size_t at = op_slot(&d->batch, (uint32_t)d->batch.seq[t], p);
            double dot = 0;
            for (uint32_t i = 0; i < c->dim; i++) dot += q[i] * op_kv_at(&d->keys, at, i);
            dot /= sqrt((double)c->dim);
            if (dot > 0) score[p] += (double)d->w[t * c->heads + h] / sqrt((double)c->heads) * dot;
        }
    }
    free(q);
}

static int descending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* Ascending, distinct, in range, -1 behind; nothing left out that is clearly better than something
 * taken. */
void ix_check(const index_data *d, uint32_t t, const int32_t *sel)
{
    const uint32_t len = (uint32_t)d->batch.pos[t] + 1, topk = d->c.topk;
    const uint32_t want = len < topk ? len : topk;
    for (uint32_t i = 0; i < topk; i++) {
        if (i >= want) {
            assert_int_equal(sel[i], -1);
            continue;
        }
        assert_in_range(sel[i], 0, len - 1);
        if (i) assert_true(sel[i] > sel[i - 1]);
    }
    double *score = malloc(len * sizeof *score), *sorted = malloc(len * sizeof *sorted);
    oracle_scores(d, t, score);
    memcpy(sorted, score, len * sizeof *score);
    qsort(sorted, len, sizeof *sorted, descending);
    const double edge = sorted[want - 1], near = 5e-5;
    uint32_t k = 0;
    for (uint32_t p = 0; p < len; p++) {
        const bool taken = k < want && sel[k] == (int32_t)p;
        k += taken;
        if (taken && score[p] < edge - near) fail_msg("row %u: position %u is too small", t, p);
        if (!taken && score[p] > edge + near) fail_msg("row %u: position %u is missing", t, p);
    }
    free(score);
    free(sorted);
}
