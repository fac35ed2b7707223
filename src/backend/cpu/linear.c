/* The operator y = x W^T + bias: prepares weights (only columns of a rank are copied), packs
 * activations, cuts rows and tokens into panels for the threads. Callers: the backend's table. */
#include "backend/cpu/linear.h"

#include <string.h>

#define ROWS_STEP   32u        /* panels are multiples of this */
#define PACK_SERIAL (1u << 15) /* values that one thread packs faster than a region starts */
#define FIXED_BYTES (256u << 10)

/* `block`: columns of a larger matrix, side by side; else NULL, the mapped file is used. A panel
 * then reads whole lines: of a slice of 256 NVFP4 columns the file has one scale in four lines. */
typedef struct own_weight {
    nbi_weight base;
    void *block;
} own_weight;

nb_status nbi_cpu_weight_prepare(nbi_backend *b, nbi_weight **out, const nbi_matrix *m,
                                 nb_error *err)
{
    (void)b;
    if (m->kind <= NBI_WEIGHT_NONE || m->kind >= NBI_WEIGHT_KIND_COUNT || !m->data)
        return nbi_fail(err, NB_INVALID, "%s: not a loaded matrix", m->name ? m->name : "weight");
    if (m->kind == NBI_WEIGHT_NVFP4 && m->cols % NBI_NVFP4_BLOCK)
        return nbi_fail(err, NB_INVALID, "%s: %u columns, NVFP4 needs a multiple of %u", m->name,
                        m->cols, NBI_NVFP4_BLOCK);
    own_weight *w = nbi_calloc(1, sizeof *w);
    if (!w) return nbi_fail(err, NB_NO_MEMORY, "%s: no memory", m->name);
    w->base.host = *m;
    if (nbi_matrix_strided(m)) {
        w->base.device_bytes = nbi_matrix_packed_bytes(m);
        w->block = nbi_pages_alloc(w->base.device_bytes);
        if (!w->block) {
            nbi_free(w);
            return nbi_fail(err, NB_NO_MEMORY, "%s: no memory for %llu bytes of its columns",
                            m->name, (unsigned long long)nbi_matrix_packed_bytes(m));
        }
        nbi_matrix_pack(&w->base.host, m, w->block);
    }
    *out = &w->base;
    return NB_OK;
}

void nbi_cpu_weight_release(nbi_backend *b, nbi_weight **weight)
{
    (void)b;
    own_weight *w = (own_weight *)*weight;
    if (w && w->block) nbi_pages_free(w->block, w->base.device_bytes);
    nbi_free(w);
    *weight = NULL;
}

size_t nbi_lin_thread_bytes(uint32_t max_cols)
{
    const size_t rows = 64 * (size_t)nbi_lin_pad(max_cols) + 4096;
    return rows > FIXED_BYTES ? rows : FIXED_BYTES;
}

static size_t pack_area(uint32_t n, uint32_t cols)
{
    return nbi_lin_pack_bytes(NBI_LIN_F32, n, cols);
}

size_t nbi_cpu_linear_scratch(const nbi_cpu *cpu, const nbi_limits *limits)
{
    nbi_plan plan = {0};
    nbi_plan_add(&plan, pack_area(limits->max_rows, limits->max_linear_cols));
    nbi_plan_add(&plan,
                 nbi_pool_threads(cpu->pool) * nbi_lin_thread_bytes(limits->max_linear_cols));
    return plan.bytes;
}

uint32_t nbi_lin_rows_per_item(uint64_t total_rows, uint32_t n_tokens, uint32_t n_threads)
{
    if (n_tokens <= 16) return ROWS_STEP;
    uint64_t rows = total_rows / (4 * (uint64_t)n_threads) / ROWS_STEP * ROWS_STEP;
    if (rows < ROWS_STEP) rows = ROWS_STEP;
    return rows > NBI_LIN_ROWS ? NBI_LIN_ROWS : (uint32_t)rows;
}

uint32_t nbi_lin_grain(uint32_t n_items, uint32_t n_tokens, uint32_t n_threads)
{
    if (n_tokens > 16) return 1;
    const uint32_t grain = n_items / (n_threads * 8);
    return grain ? grain : 1;
}

void nbi_lin_run_panel(nbi_cpu_level level, const nbi_lin_panel *p)
{
#if defined(__x86_64__)
    switch (p->x->form) {
    case NBI_LIN_F32:
        if (level >= NBI_CPU_AVX512) {
            nbi_lin_panel_avx512_f32(p);
            return;
        }
        if (level >= NBI_CPU_AVX2) {
            nbi_lin_panel_avx2(p);
            return;
        }
        break;
    case NBI_LIN_BF16:
    case NBI_LIN_BF16_NVFP4: nbi_lin_panel_avx512(p); return;
    case NBI_LIN_PAIRS:
    case NBI_LIN_PAIRS_NVFP4: nbi_lin_panel_amx(p); return;
    case NBI_LIN_FORM_COUNT: break;
    }
#endif
    (void)level;
    NB_ASSERT(p->x->form == NBI_LIN_F32);
    nbi_lin_panel_reference(p);
}

/* ---------------------------------------------------------------- the operator */

typedef struct product {
    const nbi_cpu *cpu;
    const nbi_linear_args *a;
    nbi_lin_x x;
    float input_scale;
    uint32_t item_rows, n_row_items;
    char *threads; /* per-thread scratch */
    size_t thread_bytes;
} product;

static void pack_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    product *p = arg;
    const uint32_t n = p->a->n_rows, last = end * 16 < n ? end * 16 : n;
    nbi_lin_pack(p->cpu->level, &p->x, begin * 16, last - begin * 16, p->a->x, p->a->x_stride, NULL,
                 p->input_scale, p->threads + thread * p->thread_bytes);
}

static void add_bias(float *y, size_t stride, uint32_t n, const float *bias, uint32_t n_rows)
{
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t r = 0; r < n_rows; r++) y[t * stride + r] += bias[r];
}

/* Item i: row block i % n_row_items of token block i / n_row_items. */
static void product_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    product *p = arg;
    const nbi_linear_args *a = p->a;
    const nbi_matrix *w = &a->w->host;
    for (uint32_t i = begin; i < end; i++) {
        const uint32_t row = i % p->n_row_items * p->item_rows;
        const uint32_t t0 = i / p->n_row_items * NBI_LIN_TOKENS;
        const uint32_t left = w->rows - row, tokens = a->n_rows - t0;
        nbi_lin_panel panel = {
            .w = w,
            .row = row,
            .n_rows = left < p->item_rows ? left : p->item_rows,
            .x = &p->x,
            .t0 = t0,
            .n = tokens < NBI_LIN_TOKENS ? tokens : NBI_LIN_TOKENS,
            .out = (float *)a->y + (size_t)t0 * a->y_stride + row,
            .out_stride = a->y_stride,
            .scratch = p->threads + thread * p->thread_bytes,
        };
        if (i + 1 < end && left > panel.n_rows) {
            const uint32_t behind = left - panel.n_rows;
            panel.next = w;
            panel.next_row = row + panel.n_rows;
            panel.next_rows = behind < p->item_rows ? behind : p->item_rows;
        }
        nbi_lin_run_panel(p->cpu->level, &panel);
        if (a->bias) add_bias(panel.out, a->y_stride, panel.n, a->bias + row, panel.n_rows);
    }
}

void nbi_cpu_linear(nbi_backend *b, const nbi_linear_args *a)
{
    if (a->n_rows == 0) return;
    nbi_cpu *cpu = nbi_cpu_of(b);
    const nbi_matrix *w = &a->w->host;
    const uint32_t n_threads = nbi_pool_threads(cpu->pool);
    nbi_plan plan = {0};
    const size_t packed = nbi_plan_add(&plan, pack_area(a->n_rows, w->cols));
    const size_t thread_bytes = nbi_lin_thread_bytes(w->cols);
    const size_t threads = nbi_plan_add(&plan, n_threads * thread_bytes);
    NB_ASSERT(plan.bytes <= cpu->scratch_bytes);

    const bool w4a4 = nbi_lin_w4a4(cpu, w) && !a->x_exact;
    product p = {.cpu = cpu, .a = a, .thread_bytes = thread_bytes};
    p.threads = (char *)cpu->scratch + threads;
    p.input_scale = w4a4 ? w->input_scale : 0;
    p.x = (nbi_lin_x){.form = nbi_lin_form_of(cpu->level, w->kind, a->x_exact),
                      .n = a->n_rows,
                      .cols = w->cols,
                      .scale = w4a4 ? w->input_scale : 1,
                      .data = (char *)cpu->scratch + packed};
    const uint32_t n_groups = (a->n_rows + 15) / 16;
    const bool serial = (uint64_t)a->n_rows * w->cols <= PACK_SERIAL;
    nbi_pool_run(serial ? NULL : cpu->pool, pack_task, &p, n_groups, 1);

    const uint32_t n_blocks = (a->n_rows + NBI_LIN_TOKENS - 1) / NBI_LIN_TOKENS;
    p.item_rows = nbi_lin_rows_per_item((uint64_t)w->rows * n_blocks, a->n_rows, n_threads);
    p.n_row_items = (w->rows + p.item_rows - 1) / p.item_rows;
    const uint32_t n_items = p.n_row_items * n_blocks;
    nbi_pool_run(cpu->pool, product_task, &p, n_items,
                 nbi_lin_grain(n_items, a->n_rows, n_threads));
}
