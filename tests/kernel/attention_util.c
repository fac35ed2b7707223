#include "attention_util.h"

static nbi_limits limits_of(uint32_t rows, uint32_t ctx)
{
    return (nbi_limits){.max_rows = rows, .max_seqs = 8, .max_context = ctx, .max_logit_rows = 1};
}

/* kv_b of the wanted kind; d->w is what it decodes to. */
static void make_weight(at_mla *d)
{
    const at_mla_case *c = &d->c;
    const uint32_t rows = c->heads * (c->nope + c->v), cols = c->lora;
    const size_t n = (size_t)rows * cols;
    float *w = op_floats(n);
    op_fill(w, n, 0.2f);
    nbi_matrix *m = &d->kv_b.host;
    *m = (nbi_matrix){
        .kind = c->kind, .rows = rows, .cols = cols, .global_scale = 1, .name = "kv_b_proj"};
    if (c->kind == NBI_WEIGHT_F32) {
        d->data = op_cache(NBI_F32, w, n);
    } else if (c->kind == NBI_WEIGHT_NVFP4) {
        d->data = op_alloc(n / 2);
        d->scales = op_alloc(n / 16);
        nb_error err;
        assert_int_equal(
            nbi_nvfp4_quantize(w, rows, cols, 0, d->data, d->scales, &m->global_scale, &err),
            NB_OK);
    } else if (c->kind == NBI_WEIGHT_FP8_BLOCK) {
        const uint32_t br = (rows + 127) / 128, bc = (cols + 127) / 128;
        uint8_t *codes = d->data = op_alloc(n);
        float *scales = d->scales = op_floats((size_t)br * bc);
        for (size_t i = 0; i < n; i++) codes[i] = nbi_f32_e4m3(w[i] * 100);
        for (uint32_t i = 0; i < br * bc; i++) scales[i] = op_uniform(0.005f, 0.02f);
    } else if (c->kind == NBI_WEIGHT_F16) {
        uint16_t *h = d->data = op_alloc(n * 2);
        for (size_t i = 0; i < n; i++) h[i] = nbi_f32_f16(w[i]);
    } else {
        d->data = op_cache(NBI_BF16, w, n);
    }
    m->data = d->data;
    m->scales = d->scales;
    for (uint32_t r = 0; r < rows; r++) nbi_matrix_row(m, r, w + (size_t)r * cols);
    d->w = w;
}

void at_make_mla(at_mla *d, const at_mla_case *c, const uint32_t *lengths, const uint32_t *rows,
                 uint32_t n_seqs)
{
    memset(d, 0, sizeof *d);
    d->c = *c;
    op_batch_make(&d->batch, lengths, rows, n_seqs);
    const uint32_t T = d->batch.b.n_rows;
    const size_t n = (size_t)d->batch.n_pages * NBI_PAGE_TOKENS * (c->lora + c->rope);
    float *latent = op_floats(n);
    op_fill(latent, n, 1.0f);
    /* What no row sees must not matter: slots behind the sequences hold NaN. */
    for (size_t i = 0; i < n; i++) latent[i] = NAN;
    for (uint32_t s = 0; s < n_seqs; s++)
        for (uint32_t p = 0; p < lengths[s]; p++)
            op_fill(latent + op_slot(&d->batch, s, p) * (c->lora + c->rope), c->lora + c->rope, 1);
    d->cache = op_kv_make(c->cache, d->batch.n_pages, 1, c->lora + c->rope, c->lora, latent);
    d->kv = (nbi_kv_layer){.dtype = c->cache, .latent = d->cache.data};
    op_free(latent);
    make_weight(d);
    d->q = op_floats((size_t)T * c->heads * (c->nope + c->rope));
    op_fill(d->q, (size_t)T * c->heads * (c->nope + c->rope), 1);
    d->out = op_floats((size_t)T * c->heads * c->v);
    d->scale = 1.0f / sqrtf((float)(c->nope + c->rope));
    if (c->topk) { /* a random ascending subset per row */
        d->select = op_alloc((size_t)T * c->topk * sizeof(int32_t));
        for (uint32_t t = 0; t < T; t++) {
            const uint32_t len = (uint32_t)d->batch.pos[t] + 1;
            uint32_t need = len < c->topk ? len : c->topk, k = 0;
            for (uint32_t p = 0; p < len; p++)
                if (op_below(len - p) < need) {
                    d->select[t * c->topk + k++] = (int32_t)p;
                    need--;
                }
            for (; k < c->topk; k++) d->select[t * c->topk + k] = -1;
        }
    }
}

void at_free_mla(at_mla *d)
{
    op_batch_free(&d->batch);
    op_free(d->kv.latent);
    op_free(d->q);
    op_free(d->out);
    op_free(d->w);
    op_free(d->data);
    op_free(d->scales);
    op_free(d->select);
}

/* Plain form: keys and values are expanded per position, so nothing is shared with the absorbed
 * form. */
void at_oracle_mla(const at_mla *d, uint32_t t, uint32_t h, double *out)
{
    const at_mla_case *c = &d->c;
    const uint32_t seq = (uint32_t)d->batch.seq[t];
    const uint32_t len = (uint32_t)d->batch.pos[t] + 1;
    const float *q = d->q + ((size_t)t * c->heads + h) * (c->nope + c->rope);
    const float *w = d->w + (size_t)h * (c->nope + c->v) * c->lora;
    double *s = malloc(len * sizeof *s), max = -INFINITY, sum = 0;
    double *latent = malloc(c->lora * sizeof *latent);
    uint32_t *at = malloc(len * sizeof *at), n = 0;
    for (uint32_t p = 0; p < len; p++) {
        if (!d->select)
            at[n++] = p;
        else
            for (uint32_t k = 0; k < c->topk; k++)
                if (d->select[t * c->topk + k] == (int32_t)p) at[n++] = p;
    }
    for (uint32_t j = 0; j < n; j++) {
        const size_t base = op_slot(&d->batch, seq, at[j]);
        for (uint32_t l = 0; l < c->lora; l++) latent[l] = op_kv_at(&d->cache, base, l);
        s[j] = 0;
        for (uint32_t i = 0; i < c->nope; i++) {
            double k = 0;
            for (uint32_t l = 0; l < c->lora; l++)
                k += (double)w[(size_t)i * c->lora + l] * latent[l];
            s[j] += (double)q[i] * k;
        }
        for (uint32_t i = 0; i < c->rope; i++)
            s[j] += (double)q[c->nope + i] * op_kv_at(&d->cache, base, c->lora + i);
        s[j] *= (double)d->scale;
        if (s[j] > max) max = s[j];
    }
    for (uint32_t j = 0; j < n; j++) sum += exp(s[j] - max);
    double *ol = calloc(c->lora, sizeof *ol);
    for (uint32_t j = 0; j < n; j++) {
        const double p = exp(s[j] - max) / sum;
        const size_t base = op_slot(&d->batch, seq, at[j]);
        for (uint32_t l = 0; l < c->lora; l++) ol[l] += p * op_kv_at(&d->cache, base, l);
    }
    for (uint32_t i = 0; i < c->v; i++) {
        out[i] = 0;
        for (uint32_t l = 0; l < c->lora; l++)
            out[i] += (double)w[(size_t)(c->nope + i) * c->lora + l] * ol[l];
    }
    free(s);
    free(at);
    free(ol);
    free(latent);
}

nbi_limits at_mla_limits(const at_mla_case *c, uint32_t rows, uint32_t ctx)
{
    nbi_limits l = limits_of(rows, ctx);
    l.n_heads = c->heads;
    l.kv_lora = c->lora;
    l.rope_dim = c->rope;
    l.nope_dim = c->nope;
    l.v_dim = c->v;
    return l;
}

static size_t gqa_at(const at_gqa *d, uint32_t seq, uint32_t pos, uint32_t kv)
{
    const size_t slot = op_slot(&d->batch, seq, pos);
    return (slot / NBI_PAGE_TOKENS * d->c.kv_heads + kv) * NBI_PAGE_TOKENS + slot % NBI_PAGE_TOKENS;
}

void at_make_gqa(at_gqa *d, const at_gqa_case *c, const uint32_t *lengths, const uint32_t *rows,
                 uint32_t n_seqs)
{
    memset(d, 0, sizeof *d);
    d->c = *c;
    op_batch_make(&d->batch, lengths, rows, n_seqs);
    const size_t n = (size_t)d->batch.n_pages * NBI_PAGE_TOKENS * c->kv_heads * c->dim;
    float *k = op_floats(n), *v = op_floats(n); /* NaN where nothing was appended */
    for (uint32_t s = 0; s < n_seqs; s++)
        for (uint32_t p = 0; p < lengths[s]; p++)
            for (uint32_t h = 0; h < c->kv_heads; h++) {
                op_fill(k + gqa_at(d, s, p, h) * c->dim, c->dim, 1);
                op_fill(v + gqa_at(d, s, p, h) * c->dim, c->dim, 1);
            }
    d->k = op_kv_make(c->cache, d->batch.n_pages, c->kv_heads, c->dim, c->dim, k);
    d->v = op_kv_make(c->cache, d->batch.n_pages, c->kv_heads, c->dim, c->dim, v);
    d->kv = (nbi_kv_layer){.dtype = c->cache, .k = d->k.data, .v = d->v.data};
    op_free(k);
    op_free(v);
    const size_t nq = (size_t)d->batch.b.n_rows * c->heads * c->dim;
    d->q = op_floats(nq);
    d->out = op_floats(nq);
    op_fill(d->q, nq, 1);
    d->scale = 1.0f / sqrtf((float)c->dim);
}

void at_free_gqa(at_gqa *d)
{
    op_batch_free(&d->batch);
    op_free(d->kv.k);
    op_free(d->kv.v);
    op_free(d->q);
    op_free(d->out);
}

void at_oracle_gqa(const at_gqa *d, uint32_t t, uint32_t h, double *out)
{
    const at_gqa_case *c = &d->c;
    const uint32_t seq = (uint32_t)d->batch.seq[t], len = (uint32_t)d->batch.pos[t] + 1;
    const uint32_t kv = h / (c->heads / c->kv_heads);
    const float *q = d->q + ((size_t)t * c->heads + h) * c->dim;
    double *s = malloc(len * sizeof *s), max = -INFINITY, sum = 0;
    for (uint32_t p = 0; p < len; p++) {
        const size_t at = gqa_at(d, seq, p, kv);
        s[p] = 0;
        for (uint32_t i = 0; i < c->dim; i++) s[p] += (double)q[i] * op_kv_at(&d->k, at, i);
        s[p] *= (double)d->scale;
        if (s[p] > max) max = s[p];
    }
    memset(out, 0, c->dim * sizeof *out);
    for (uint32_t p = 0; p < len; p++) sum += exp(s[p] - max);
    for (uint32_t p = 0; p < len; p++) {
        const size_t at = gqa_at(d, seq, p, kv);
        for (uint32_t i = 0; i < c->dim; i++)
            out[i] += exp(s[p] - max) / sum * op_kv_at(&d->v, at, i);
    }
    free(s);
}

nbi_limits at_gqa_limits(const at_gqa_case *c, uint32_t rows, uint32_t ctx)
{
    nbi_limits l = limits_of(rows, ctx);
    l.n_heads = c->heads;
    l.n_kv_heads = c->kv_heads;
    l.head_dim = c->dim;
    return l;
}

void at_angles(float **cos_out, float **sin_out, const op_batch *b, uint32_t dim)
{
    const uint32_t T = b->b.n_rows, half = dim / 2;
    *cos_out = op_floats((size_t)T * half);
    *sin_out = op_floats((size_t)T * half);
    for (uint32_t t = 0; t < T; t++)
        for (uint32_t i = 0; i < half; i++) {
            const double a = b->pos[t] * pow(10000.0, -2.0 * i / dim);
            (*cos_out)[t * half + i] = (float)cos(a);
            (*sin_out)[t * half + i] = (float)sin(a);
        }
}

/* Rotation as complex numbers: pair i of the layout times exp(i angle). */
void at_rotate(double *x, uint32_t dim, bool interleaved, const float *cs, const float *sn)
{
    for (uint32_t i = 0; i < dim / 2; i++) {
        const uint32_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + dim / 2;
        const double u = x[a], v = x[b];
        x[a] = u * (double)cs[i] - v * (double)sn[i];
        x[b] = v * (double)cs[i] + u * (double)sn[i];
    }
}

double at_cache_error(const op_kv *kv, size_t vector, uint32_t first, const double *want,
                      uint32_t n)
{
    float *got = malloc(n * sizeof *got);
    for (uint32_t i = 0; i < n; i++) got[i] = (float)op_kv_at(kv, vector, first + i);
    const double e = op_error(got, want, n);
    free(got);
    return e;
}

double at_cache_bound(nbi_dtype dtype)
{
    if (dtype == NBI_F8_E4M3) return 0.0625; /* half a unit of four bits */
    return dtype == NBI_F32 ? 1e-6 : 0.004;  /* BF16: half a unit of 8 bits */
}

void at_norm(double *x, uint32_t n, const float *w, double eps)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += x[i] * x[i];
    for (uint32_t i = 0; i < n; i++) x[i] = x[i] / sqrt(sum / n + eps) * (double)w[i];
}
