/* Grouped-query attention: norm, rotate and append keys and values; attend.
 * Callers: the table in cpu.c.
 * Invariant: the cache holds rotated, normed keys, kv_shape.h. */
#include "backend/cpu/cpu_attend.h"
#include "backend/cpu/cpu_scratch.h"

static void norm_rotate(float *x, const float *weight, const nbi_gqa_append_args *a, uint32_t t)
{
    if (weight) {
        double sum = 0;
        for (uint32_t i = 0; i < a->head_dim; i++) sum += (double)x[i] * (double)x[i];
        const float r = (float)(1.0 / sqrt(sum / a->head_dim + (double)a->eps));
        for (uint32_t i = 0; i < a->head_dim; i++) x[i] = x[i] * r * weight[i];
    }
    nbi_cpu_rotate(x, a->rope, t);
}

static void append_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const nbi_gqa_append_args *a = arg;
    const nbi_batch *b = a->batch;
    const uint32_t hd = a->head_dim;
    const nbi_kv_shape shape = nbi_kv_head_shape(a->cache->dtype, a->n_kv_heads, hd);
    for (uint32_t t = begin; t < end; t++) {
        float *q = (float *)a->q + (size_t)t * a->n_heads * hd;
        float *k = (float *)a->k + (size_t)t * a->n_kv_heads * hd;
        const float *v = (const float *)a->v + (size_t)t * a->n_kv_heads * hd;
        for (uint32_t h = 0; h < a->n_heads; h++) norm_rotate(q + (size_t)h * hd, a->q_norm, a, t);

        const uint32_t p = (uint32_t)b->pos[t];
        const size_t page = nbi_cpu_page(b, (uint32_t)b->row_seq[t], p);
        for (uint32_t h = 0; h < a->n_kv_heads; h++) {
            norm_rotate(k + (size_t)h * hd, a->k_norm, a, t);
            const uint32_t slot = p % NBI_PAGE_TOKENS;
            nbi_kv_write(&shape, a->cache->k, page, h, slot, 0, k + (size_t)h * hd, hd);
            nbi_kv_write(&shape, a->cache->v, page, h, slot, 0, v + (size_t)h * hd, hd);
        }
    }
}

void nbi_cpu_gqa_append(nbi_backend *b, const nbi_gqa_append_args *a)
{
    NB_ASSERT(a->rope->dim <= a->head_dim);
    nbi_gqa_append_args args = *a;
    nbi_pool_run(nbi_cpu_of(b)->pool, append_task, &args, a->batch->n_rows, 4);
}

size_t nbi_cpu_gqa_fixed(uint32_t threads, const nbi_limits *l)
{
    return nbi_attend_thread_bytes(threads, l->head_dim, l->head_dim);
}

size_t nbi_cpu_gqa_row(uint32_t n_positions, const nbi_limits *l)
{
    return nbi_attend_row_bytes_max(n_positions, l->n_heads, l->head_dim);
}

void nbi_cpu_gqa_attend(nbi_backend *b, const nbi_gqa_attend_args *a)
{
    nbi_cpu *cpu = nbi_cpu_of(b);
    const uint32_t T = a->batch->n_rows, hd = a->head_dim;
    const size_t fixed = nbi_attend_thread_bytes(nbi_pool_threads(cpu->pool), hd, hd);
    NB_ASSERT(a->n_heads % a->n_kv_heads == 0 && fixed < cpu->attention_bytes);
    nbi_attend at = {.kernels = nbi_cpu_kernels_many(cpu->level, a->n_heads / a->n_kv_heads),
                     .pool = cpu->pool,
                     .batch = a->batch,
                     .keys = a->cache->k,
                     .values = a->cache->v,
                     .shape = nbi_kv_head_shape(a->cache->dtype, a->n_kv_heads, hd),
                     .k_width = hd,
                     .v_width = hd,
                     .n_kv = a->n_kv_heads,
                     .ratio = a->n_heads / a->n_kv_heads,
                     .scale = a->scale,
                     .q_stride = (size_t)a->n_heads * hd,
                     .out_stride = (size_t)a->n_heads * hd,
                     .out_head = hd};
    uint32_t n = 0;
    for (uint32_t first = 0; first < T; first += n) {
        n = nbi_attend_rows(&at, first, cpu->attention_bytes - fixed, 0);
        NB_ASSERT(n > 0);
        at.q = (const float *)a->q + first * at.q_stride;
        at.out = (float *)a->out + first * at.out_stride;
        nbi_attend_run(&at, first, n, cpu->attention);
    }
}
