/* Multi-head latent attention: append to the latent cache, attend over it; here in the absorbed
 * form, mla_expanded.c has the other.
 *
 * Callers: the table in cpu.c.
 * Weights: W_UK is used as rows scaled by the query (axpy), W_UV as dot products, so kv_b stays the
 * mapped file for BF16 and F32. Other kinds are decoded head by head into per-thread scratch inside
 * each call: no second copy in memory; a step with many rows decodes a head once for up to
 * MLA_ROW_CHUNK rows. */
#include "backend/cpu/cpu_attend.h"
#include "backend/cpu/cpu_mla.h"
#include "backend/cpu/cpu_scratch.h"

#define MLA_ROW_CHUNK 64u

/* ---------------------------------------------------------------- append */

static void append_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const nbi_mla_append_args *a = arg;
    const nbi_batch *b = a->batch;
    const uint32_t head = a->nope_dim + a->rope_dim;
    const nbi_kv_shape shape = nbi_kv_latent_shape(a->cache->dtype, a->kv_lora, a->rope_dim);
    for (uint32_t t = begin; t < end; t++) {
        float *q = (float *)a->q + (size_t)t * a->n_heads * head;
        for (uint32_t h = 0; h < a->n_heads; h++)
            nbi_cpu_rotate(q + (size_t)h * head + a->nope_dim, a->rope, t);

        const float *kv = (const float *)a->kv + (size_t)t * a->kv_stride;
        double sum = 0;
        for (uint32_t i = 0; i < a->kv_lora; i++) sum += (double)kv[i] * (double)kv[i];
        const float r = (float)(1.0 / sqrt(sum / a->kv_lora + (double)a->eps));

        const uint32_t p = (uint32_t)b->pos[t];
        const size_t page = nbi_cpu_page(b, (uint32_t)b->row_seq[t], p);
        const uint32_t slot = p % NBI_PAGE_TOKENS;
        float strip[NBI_KV_GROUP];
        for (uint32_t i0 = 0; i0 < a->kv_lora; i0 += NBI_KV_GROUP) {
            const uint32_t n = a->kv_lora - i0 < NBI_KV_GROUP ? a->kv_lora - i0 : NBI_KV_GROUP;
            for (uint32_t i = 0; i < n; i++) strip[i] = kv[i0 + i] * r * a->kv_norm[i0 + i];
            nbi_kv_write(&shape, a->cache->latent, page, 0, slot, i0, strip, n);
        }
        float key[NBI_CPU_WIDTH_MAX];
        memcpy(key, kv + a->kv_lora, a->rope_dim * sizeof *key);
        nbi_cpu_rotate(key, a->rope, t);
        nbi_kv_write(&shape, a->cache->latent, page, 0, slot, a->kv_lora, key, a->rope_dim);
    }
}

void nbi_cpu_mla_append(nbi_backend *b, const nbi_mla_append_args *a)
{
    NB_ASSERT(a->rope->dim == a->rope_dim && a->rope_dim <= NBI_CPU_WIDTH_MAX);
    nbi_mla_append_args args = *a;
    nbi_pool_run(nbi_cpu_of(b)->pool, append_task, &args, a->batch->n_rows, 4);
}

/* ---------------------------------------------------------------- attend */

typedef struct mla {
    const nbi_mla_attend_args *a;
    const nbi_cpu_kernels *k;
    uint32_t first, n_rows; /* block of rows */
    uint32_t q_width;       /* kv_lora + rope */
    float *q;               /* [n_rows][heads][q_width] absorbed query; then the value sums */
    char *threads;
    size_t thread_bytes;
} mla;

/* Rows of kv_b as the kernels want them. */
typedef struct head_rows {
    const void **rows; /* [max(nope, v)] */
    float *decoded;    /* [max(nope, v)][kv_lora], for kinds that are not read in place */
} head_rows;

static size_t head_layout(head_rows *h, char *base, uint32_t n_rows, uint32_t kv_lora)
{
    nbi_plan p = {0};
    const size_t rows = nbi_plan_add(&p, n_rows * sizeof(void *));
    const size_t decoded = nbi_plan_add(&p, (size_t)n_rows * kv_lora * sizeof(float));
    if (h)
        *h = (head_rows){.rows = (const void **)(void *)(base + rows),
                         .decoded = (float *)(void *)(base + decoded)};
    return p.bytes;
}

/* Points h->rows at rows [begin, begin + n) of kv_b; returns their type. */
static nbi_dtype find_weight_rows(const mla *m, head_rows *h, uint32_t begin, uint32_t n)
{
    const nbi_matrix *w = &m->a->kv_b->host;
    if (w->kind == NBI_WEIGHT_BF16 || w->kind == NBI_WEIGHT_F32) {
        const uint64_t bytes = nbi_matrix_row_bytes(w);
        for (uint32_t j = 0; j < n; j++) h->rows[j] = (const char *)w->data + (begin + j) * bytes;
        return w->kind == NBI_WEIGHT_BF16 ? NBI_BF16 : NBI_F32;
    }
    for (uint32_t j = 0; j < n; j++) {
        float *row = h->decoded + (size_t)j * w->cols;
        nbi_matrix_row(w, begin + j, row);
        h->rows[j] = row;
    }
    return NBI_F32;
}

static uint32_t row_chunks(const mla *m)
{
    return (m->n_rows + MLA_ROW_CHUNK - 1) / MLA_ROW_CHUNK;
}

/* Item: (head, chunk of rows). ql = qn . W_UK, qr copied behind it. */
static void absorb_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    const mla *m = arg;
    const nbi_mla_attend_args *a = m->a;
    const uint32_t head_dim = a->nope_dim + a->rope_dim, chunks = row_chunks(m);
    const size_t q_stride = (size_t)a->n_heads * m->q_width;
    head_rows w;
    head_layout(&w, m->threads + thread * m->thread_bytes,
                a->nope_dim > a->v_dim ? a->nope_dim : a->v_dim, a->kv_lora);
    for (uint32_t i = begin; i < end; i++) {
        const uint32_t h = i / chunks, r0 = i % chunks * MLA_ROW_CHUNK;
        const uint32_t n = m->n_rows - r0 < MLA_ROW_CHUNK ? m->n_rows - r0 : MLA_ROW_CHUNK;
        const nbi_dtype dtype = find_weight_rows(m, &w, h * (a->nope_dim + a->v_dim), a->nope_dim);
        const float *in =
            (const float *)a->q + ((size_t)(m->first + r0) * a->n_heads + h) * head_dim;
        float *out = m->q + r0 * q_stride + (size_t)h * m->q_width;
        for (uint32_t r = 0; r < n; r++) {
            memset(out + r * q_stride, 0, a->kv_lora * sizeof(float));
            memcpy(out + r * q_stride + a->kv_lora,
                   in + (size_t)r * a->n_heads * head_dim + a->nope_dim,
                   a->rope_dim * sizeof(float));
        }
        m->k->mix(out, q_stride, in, (size_t)a->n_heads * head_dim, n, (const void *const *)w.rows,
                  dtype, a->nope_dim, a->kv_lora);
    }
}

/* Item: (head, chunk of rows). out = W_UV . ol. */
static void expand_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    const mla *m = arg;
    const nbi_mla_attend_args *a = m->a;
    const uint32_t chunks = row_chunks(m);
    const size_t q_stride = (size_t)a->n_heads * m->q_width;
    head_rows w;
    head_layout(&w, m->threads + thread * m->thread_bytes,
                a->nope_dim > a->v_dim ? a->nope_dim : a->v_dim, a->kv_lora);
    for (uint32_t i = begin; i < end; i++) {
        const uint32_t h = i / chunks, r0 = i % chunks * MLA_ROW_CHUNK;
        const uint32_t n = m->n_rows - r0 < MLA_ROW_CHUNK ? m->n_rows - r0 : MLA_ROW_CHUNK;
        const nbi_dtype dtype =
            find_weight_rows(m, &w, h * (a->nope_dim + a->v_dim) + a->nope_dim, a->v_dim);
        float *out = (float *)a->out + ((size_t)(m->first + r0) * a->n_heads + h) * a->v_dim;
        m->k->dots(out, (size_t)a->n_heads * a->v_dim,
                   m->q + r0 * q_stride + (size_t)h * m->q_width, q_stride, n,
                   (const void *const *)w.rows, dtype, a->v_dim, a->kv_lora, 1.0f);
    }
}

static size_t head_bytes(uint32_t nope, uint32_t v, uint32_t kv_lora)
{
    return head_layout(NULL, NULL, nope > v ? nope : v, kv_lora);
}

size_t nbi_cpu_mla_fixed(uint32_t threads, const nbi_limits *l)
{
    return threads * head_bytes(l->nope_dim, l->v_dim, l->kv_lora) +
           nbi_attend_thread_bytes(threads, l->kv_lora + l->rope_dim, l->kv_lora);
}

size_t nbi_cpu_mla_row(uint32_t n_positions, const nbi_limits *l)
{
    return (size_t)l->n_heads * (l->kv_lora + l->rope_dim) * sizeof(float) + 64 +
           nbi_attend_row_bytes_max(n_positions, l->n_heads, l->kv_lora);
}

/* Rows [first, end). */
static void attend_absorbed(nbi_cpu *cpu, const nbi_mla_attend_args *a, uint32_t first,
                            uint32_t end)
{
    const uint32_t threads = nbi_pool_threads(cpu->pool);
    mla m = {.a = a,
             .k = nbi_cpu_kernels_of(cpu->level),
             .first = first,
             .q_width = a->kv_lora + a->rope_dim};
    m.threads = cpu->attention;
    m.thread_bytes = head_bytes(a->nope_dim, a->v_dim, a->kv_lora);
    const size_t row_bytes = (size_t)a->n_heads * m.q_width * sizeof(float);
    const size_t fixed =
        threads * m.thread_bytes + nbi_attend_thread_bytes(threads, m.q_width, a->kv_lora);
    NB_ASSERT(fixed < cpu->attention_bytes);

    nbi_attend at = {.kernels = nbi_cpu_kernels_many(cpu->level, a->n_heads),
                     .pool = cpu->pool,
                     .batch = a->batch,
                     .keys = a->cache->latent,
                     .values = a->cache->latent,
                     .shape = nbi_kv_latent_shape(a->cache->dtype, a->kv_lora, a->rope_dim),
                     .k_width = m.q_width,
                     .v_width = a->kv_lora,
                     .n_kv = 1,
                     .ratio = a->n_heads,
                     .scale = a->scale,
                     .select = a->select,
                     .select_stride = a->select_stride,
                     .q_stride = (size_t)a->n_heads * m.q_width,
                     .out_stride = (size_t)a->n_heads * m.q_width,
                     .out_head = m.q_width};
    for (; m.first < end; m.first += m.n_rows) {
        m.n_rows = nbi_attend_rows(&at, m.first, cpu->attention_bytes - fixed, row_bytes + 64);
        if (m.n_rows > end - m.first) m.n_rows = end - m.first;
        NB_ASSERT(m.n_rows > 0);
        char *ws = (char *)cpu->attention + threads * m.thread_bytes;
        m.q = (float *)(void *)ws;
        at.q = at.out = m.q; /* a row's sums replace its query once they are merged */
        nbi_pool_run(cpu->pool, absorb_task, &m, a->n_heads * row_chunks(&m), 1);
        nbi_attend_run(&at, m.first, m.n_rows, ws + (m.n_rows * row_bytes + 63) / 64 * 64);
        nbi_pool_run(cpu->pool, expand_task, &m, a->n_heads * row_chunks(&m), 1);
    }
}

static bool is_expanded(const nbi_batch *b, uint32_t t)
{
    return b->expanded && b->pos[t] < b->expanded[b->row_seq[t]];
}

/* Where the rows from t on that are attended together end: those of another form, and in the
 * expanded form of another sequence, are not. */
static uint32_t end_of_run(const nbi_batch *b, uint32_t t)
{
    const bool form = is_expanded(b, t);
    uint32_t end = t + 1;
    while (end < b->n_rows && is_expanded(b, end) == form &&
           (!form || b->row_seq[end] == b->row_seq[t]))
        end++;
    return end;
}

void nbi_cpu_mla_attend(nbi_backend *b, const nbi_mla_attend_args *a)
{
    nbi_cpu *cpu = nbi_cpu_of(b);
    NB_ASSERT(a->kv_b->host.rows == a->n_heads * (a->nope_dim + a->v_dim) &&
              a->kv_b->host.cols == a->kv_lora);
    for (uint32_t t = 0, end; t < a->batch->n_rows; t = end) {
        end = end_of_run(a->batch, t);
        if (is_expanded(a->batch, t))
            nbi_cpu_mla_expanded(cpu, a, t, end - t);
        else
            attend_absorbed(cpu, a, t, end);
    }
}
