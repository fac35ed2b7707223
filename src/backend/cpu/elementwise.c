/* Row-wise operators: embedding, rope angles, RMSNorm, SwiGLU, gather, add.
 * Callers: the table in cpu.c.
 * Invariant: a row (or a fixed strip of columns) is computed by one task in one order. */
#include "backend/cpu/cpu_kernels.h"

#define STRIP 1024u /* columns per item of column-wise work; a multiple of every vector width */

static void set_fault(int32_t *row_fault, uint32_t t, uint32_t layer, nbi_where where)
{
    if (row_fault && row_fault[t] == 0)
        row_fault[t] = (int32_t)(1 + layer * NBI_WHERE_COUNT + (uint32_t)where);
}

/* ---------------------------------------------------------------- embed */

typedef struct embed_work {
    const nbi_embed_args *a;
    const nbi_cpu_kernels *k;
} embed_work;

static void embed_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const embed_work *w = arg;
    const nbi_matrix *m = &w->a->table->host;
    const nbi_batch *b = w->a->batch;
    for (uint32_t t = begin; t < end; t++) {
        float *out = (float *)w->a->out + (size_t)t * m->cols;
        NB_ASSERT(b->ids[t] >= 0);
        const uint32_t row = (uint32_t)b->ids[t] - w->a->first; /* wraps around below the first */
        if (row >= m->rows) {
            NB_ASSERT(w->a->part_of);
            memset(out, 0, m->cols * sizeof *out);
            continue;
        }
        nbi_matrix_row(m, row, out);
        if (!isfinite(w->k->add_squares(out, NULL, m->cols)))
            set_fault(b->row_fault, t, 0, NBI_WHERE_EMBED);
    }
}

void nbi_cpu_embed(nbi_backend *b, const nbi_embed_args *a)
{
    nbi_cpu *cpu = nbi_cpu_of(b);
    embed_work w = {.a = a, .k = nbi_cpu_kernels_of(cpu->level)};
    nbi_pool_run(cpu->pool, embed_task, &w, a->batch->n_rows, 8);
}

/* ---------------------------------------------------------------- rope angles */

static void rope_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const nbi_rope_table_args *a = arg;
    const uint32_t half = a->dim / 2;
    for (uint32_t t = begin; t < end; t++)
        for (uint32_t i = 0; i < half; i++) {
            /* In double: float32 angles are off by up to 0.06 at position 1,000,000. */
            const double angle = (double)a->batch->pos[t] * (double)a->inv_freq[i];
            a->cos[(size_t)t * half + i] = (float)cos(angle) * a->factor;
            a->sin[(size_t)t * half + i] = (float)sin(angle) * a->factor;
        }
}

void nbi_cpu_rope_table(nbi_backend *b, const nbi_rope_table_args *a)
{
    nbi_rope_table_args args = *a;
    nbi_pool_run(nbi_cpu_of(b)->pool, rope_task, &args, a->batch->n_rows, 8);
}

/* ---------------------------------------------------------------- RMSNorm */

typedef struct norm_work {
    const nbi_rmsnorm_args *a;
    const nbi_cpu_kernels *k;
} norm_work;

static void norm_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const norm_work *w = arg;
    const nbi_rmsnorm_args *a = w->a;
    for (uint32_t t = begin; t < end; t++) {
        float *x = (float *)a->x + (size_t)t * a->x_stride;
        const float *delta = a->delta ? (const float *)a->delta + (size_t)t * a->width : NULL;
        if (delta && a->x_out && a->x_out != a->x) {
            float *sum = (float *)a->x_out + (size_t)t * a->x_stride;
            memcpy(sum, x, a->width * sizeof *sum);
            x = sum;
        }
        const float squares = w->k->add_squares(x, delta, a->width);
        if (!isfinite(squares)) set_fault(a->row_fault, t, a->layer, a->where);
        if (!a->out) continue;
        const double mean = (double)squares / a->width;
        w->k->scale_weight((float *)a->out + (size_t)t * a->out_stride, x, a->weight,
                           (float)(1.0 / sqrt(mean + (double)a->eps)), a->width);
    }
}

void nbi_cpu_rmsnorm(nbi_backend *b, const nbi_rmsnorm_args *a)
{
    nbi_cpu *cpu = nbi_cpu_of(b);
    norm_work w = {.a = a, .k = nbi_cpu_kernels_of(cpu->level)};
    nbi_pool_run(cpu->pool, norm_task, &w, a->n_rows, 4);
}

/* ---------------------------------------------------------------- SwiGLU */

typedef struct swiglu_work {
    const nbi_swiglu_args *a;
    const nbi_cpu_kernels *k;
    uint32_t strips;
} swiglu_work;

static void swiglu_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const swiglu_work *w = arg;
    const nbi_swiglu_args *a = w->a;
    for (uint32_t i = begin; i < end; i++) {
        const uint32_t t = i / w->strips, c = i % w->strips * STRIP;
        const size_t in = (size_t)t * a->in_stride + c;
        w->k->swiglu((float *)a->out + (size_t)t * a->out_stride + c, (const float *)a->gate + in,
                     (const float *)a->up + in, a->width - c < STRIP ? a->width - c : STRIP);
    }
}

void nbi_cpu_swiglu(nbi_backend *b, const nbi_swiglu_args *a)
{
    nbi_cpu *cpu = nbi_cpu_of(b);
    swiglu_work w = {
        .a = a, .k = nbi_cpu_kernels_of(cpu->level), .strips = (a->width + STRIP - 1) / STRIP};
    nbi_pool_run(cpu->pool, swiglu_task, &w, a->n_rows * w.strips, 4);
}

/* ---------------------------------------------------------------- ranks */

void nbi_cpu_own_experts(nbi_backend *b, const nbi_own_experts_args *a)
{
    (void)b;
    for (size_t i = 0; i < a->n; i++) {
        const uint32_t at = (uint32_t)a->ids[i] - a->first; /* wraps around below the first */
        a->ids[i] = a->ids[i] >= 0 && at < a->n_own ? (int32_t)at : -1;
    }
}

void nbi_cpu_clear(nbi_backend *b, const nbi_clear_args *a)
{
    (void)b;
    memset(a->p, 0, a->bytes);
}

/* ---------------------------------------------------------------- gather, add */

void nbi_cpu_gather(nbi_backend *b, const nbi_gather_args *a)
{
    (void)b;
    for (uint32_t i = 0; i < a->n; i++)
        memcpy((float *)a->out + (size_t)i * a->width,
               (const float *)a->x + (size_t)a->rows[i] * a->width, a->width * sizeof(float));
}

static void add_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    (void)thread;
    const nbi_add_args *a = arg;
    for (uint32_t s = begin; s < end; s++) {
        const size_t first = (size_t)s * STRIP, last = a->n - first < STRIP ? a->n : first + STRIP;
        float *x = a->x;
        const float *y = a->y;
        for (size_t i = first; i < last; i++) x[i] += y[i];
    }
}

void nbi_cpu_add(nbi_backend *b, const nbi_add_args *a)
{
    nbi_add_args args = *a;
    nbi_pool_run(nbi_cpu_of(b)->pool, add_task, &args, (uint32_t)((a->n + STRIP - 1) / STRIP), 16);
}
