/* Linear layers: some rows of real matrices, for one and for more tokens.
 *
 * Every token is a sum of two base vectors, so that a row is multiplied twice in double, whatever
 * the number of tokens. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "model/gate_parts.h"

#define BASES      2u
#define ROWS_MAX   512u
#define ROWS_BRIEF 48u
#define TOKENS     33u /* past what kernels for few tokens take */
#define FEW        5u
#define MACS_BRIEF 400000000u /* of one call of the short form on a CPU: some milliseconds */
#define MACS_FULL  4000000000u
#define TIME_CALLS 4u

/* Grows with the matrices: memory is not given back and taken anew for each. */
typedef struct linear_memory {
    nbi_gate_buffer x, y;
} linear_memory;

typedef struct linear_case {
    nbi_gate *g;
    const nbi_weight *w;
    bool exact; /* the router: products in float32 */
    uint32_t tokens, n_rows;
    uint32_t rows[ROWS_MAX];
    nbi_gate_buffer x, y; /* parts of the memory */
    float *base;          /* [BASES][cols] as the products see them */
    float mix[TOKENS][BASES];
    double products[BASES][ROWS_MAX];
    bool no_memory;
} linear_case;

/* Activations are rounded to NVFP4 in front of the product. */
static bool rounds(const linear_case *c)
{
    return c->g->b->w4a4 && c->w->host.kind == NBI_WEIGHT_NVFP4 && c->w->host.input_scale > 0;
}

static void row_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    linear_case *c = arg;
    const nbi_matrix *m = &c->w->host;
    (void)thread;
    float *row = nbi_malloc(m->cols * sizeof *row);
    if (!row) {
        c->no_memory = true;
        return;
    }
    for (uint32_t i = begin; i < end; i++) {
        nbi_matrix_row(m, c->rows[i], row);
        for (uint32_t b = 0; b < BASES; b++)
            c->products[b][i] = nbi_gate_dot(c->base + (size_t)b * m->cols, row, m->cols);
    }
    nbi_free(row);
}

/* Rounding is not linear: a token is then one of the bases. */
static nb_status make_tokens(linear_case *c, nb_error *err)
{
    const nbi_matrix *m = &c->w->host;
    const bool rounded = rounds(c);
    float *x = c->x.host;
    NB_ASSERT(x);
    c->base = nbi_malloc(BASES * (size_t)m->cols * sizeof *c->base);
    if (!c->base) return nbi_fail(err, NB_NO_MEMORY, "check: out of memory");
    nbi_gate_fill(c->g, c->base, BASES * (size_t)m->cols);
    for (uint32_t t = 0; t < c->tokens; t++) {
        for (uint32_t b = 0; b < BASES; b++)
            c->mix[t][b] = rounded ? (float)(b == t % BASES) : nbi_gate_normal(c->g);
        for (uint32_t j = 0; j < m->cols; j++)
            *x++ = c->mix[t][0] * c->base[j] + c->mix[t][1] * c->base[m->cols + j];
    }
    for (uint32_t b = 0; b < BASES && rounded; b++) {
        float *base = c->base + (size_t)b * m->cols;
        nbi_nvfp4_round_row(base, m->cols, m->input_scale, base);
    }
    return NB_OK;
}

static void call(const linear_case *c, uint32_t first, uint32_t n)
{
    const nbi_matrix *m = &c->w->host;
    c->g->b->ops->linear(
        c->g->b, &(nbi_linear_args){.y = (float *)c->y.device + (size_t)first * m->rows,
                                    .x = (const float *)c->x.device + (size_t)first * m->cols,
                                    .w = c->w,
                                    .n_rows = n,
                                    .x_stride = m->cols,
                                    .y_stride = m->rows,
                                    .y_f32 = c->exact,
                                    .x_exact = c->exact});
}

static double row_error(const linear_case *c, uint32_t t)
{
    const float *y = (const float *)c->y.host + (size_t)t * c->w->host.rows;
    float got[ROWS_MAX];
    double want[ROWS_MAX];
    for (uint32_t r = 0; r < c->w->host.rows; r++)
        if (!isfinite(y[r])) return INFINITY;
    for (uint32_t i = 0; i < c->n_rows; i++) {
        got[i] = y[c->rows[i]];
        want[i] =
            (double)c->mix[t][0] * c->products[0][i] + (double)c->mix[t][1] * c->products[1][i];
    }
    return nbi_gate_error(got, want, c->n_rows);
}

/* Tokens [first, first + n) in one call; what was there before is NaN. */
static nb_status run(linear_case *c, uint32_t first, uint32_t n, double *error, nb_error *err)
{
    memset(c->y.host, 0xff, c->y.bytes);
    nbi_gate_up(c->g, &c->y);
    call(c, first, n);
    nbi_gate_down(c->g, &c->y);
    NB_TRY(c->g->b->ops->sync(c->g->b, err));
    for (uint32_t t = first; t < first + n; t++) *error = fmax(*error, row_error(c, t));
    return NB_OK;
}

static nb_status time_call(linear_case *c, nbi_gate_result *out, nb_error *err)
{
    uint64_t begin = 0;
    for (uint32_t n = 0; n <= TIME_CALLS; n++) {
        if (n == 1) NB_TRY(c->g->b->ops->sync(c->g->b, err));
        if (n == 1) begin = nbi_now_ns();
        call(c, 0, 1);
        NB_TRY(c->g->b->ops->sync(c->g->b, err));
    }
    out->seconds = 1e-9 * (double)(nbi_now_ns() - begin) / TIME_CALLS;
    out->bytes = nbi_matrix_bytes(&c->w->host);
    out->rows = 1;
    return NB_OK;
}

/* *out: the first `bytes` of `memory`. */
static nb_status borrow(nbi_gate *g, nbi_gate_buffer *out, nbi_gate_buffer *memory, size_t bytes,
                        nb_error *err)
{
    if (memory->bytes < bytes) {
        nbi_gate_buffer_close(g, memory);
        NB_TRY(nbi_gate_buffer_open(g, memory, bytes, err));
    }
    *out = *memory;
    out->bytes = bytes;
    return NB_OK;
}

static nb_status check_weight(linear_case *c, linear_memory *memory, nbi_gate_result *out,
                              nb_error *err)
{
    const nbi_matrix *m = &c->w->host;
    const size_t token = c->tokens * sizeof(float);
    NB_TRY(borrow(c->g, &c->x, &memory->x, m->cols * token, err));
    NB_TRY(borrow(c->g, &c->y, &memory->y, m->rows * token, err));
    NB_TRY(make_tokens(c, err));
    for (uint32_t i = 0; i < c->n_rows; i++)
        c->rows[i] = (uint32_t)((uint64_t)i * (m->rows - 1) / (c->n_rows > 1 ? c->n_rows - 1 : 1));
    nbi_gate_each(c->g, row_task, c, c->n_rows, 4, (uint64_t)c->n_rows * BASES * m->cols);
    if (c->no_memory) return nbi_fail(err, NB_NO_MEMORY, "check: out of memory");
    nbi_gate_up(c->g, &c->x);
    NB_TRY(run(c, 0, 1, &out->error, err));
    if (c->tokens > 1) NB_TRY(run(c, 0, c->tokens < FEW ? c->tokens : FEW, &out->error, err));
    if (c->tokens > FEW) NB_TRY(run(c, 0, c->tokens, &out->error, err));
    out->rows = c->tokens;
    return c->g->opt->brief ? NB_OK : time_call(c, out, err);
}

static nb_status try_weight(nbi_gate *g, linear_memory *memory, const nbi_weight *w, bool exact,
                            nb_error *err)
{
    if (!w) return NB_OK;
    const nbi_matrix *m = &w->host;
    const uint64_t macs = (uint64_t)m->rows * m->cols,
                   most = g->opt->brief && !g->b->memory_bytes ? MACS_BRIEF : MACS_FULL;
    linear_case c = {.g = g, .w = w, .exact = exact, .tokens = nbi_gate_rows(g, TOKENS)};
    if (macs * TOKENS > most) c.tokens = macs * FEW > most ? 1 : nbi_gate_rows(g, FEW);
    const uint32_t looked_at = g->opt->brief ? ROWS_BRIEF : ROWS_MAX;
    c.n_rows = m->rows < looked_at ? m->rows : looked_at;
    nbi_gate_result out = {
        .kind = "linear", .chosen = true, .supported = true, .bound = nbi_gate_bound(rounds(&c))};
    snprintf(out.path, sizeof out.path, "%s", nbi_weight_kind_name(m->kind));
    snprintf(out.where, sizeof out.where, "%s", m->name ? m->name : "matrix");
    const nb_status st = check_weight(&c, memory, &out, err);
    nbi_free(c.base);
    if (st == NB_OK) nbi_gate_say(g, &out);
    return st;
}

/* Not kv_b, which attention multiplies itself. */
static nb_status try_layer(nbi_gate *g, linear_memory *memory, const nbi_layer *l, nb_error *err)
{
    const nbi_weight *const all[] = {
        l->mla.q_a,   l->mla.q_b,         l->mla.kv_a,      l->mla.o,
        l->gqa.q,     l->gqa.k,           l->gqa.v,         l->gqa.o,
        l->indexer.q, l->indexer.k,       l->mlp.gate,      l->mlp.up,
        l->mlp.down,  l->moe.shared.gate, l->moe.shared.up, l->moe.shared.down};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        NB_TRY(try_weight(g, memory, all[i], false, err));
    NB_TRY(try_weight(g, memory, l->indexer.weights, true, err));
    return try_weight(g, memory, l->moe.router, true, err);
}

nb_status nbi_gate_linear(nbi_gate *g, nb_error *err)
{
    const nbi_model *m = g->m;
    const nbi_layer *sparse = NULL;
    for (uint32_t l = 0; l < m->n_layers && !sparse; l++)
        if (m->layers[l].sparse) sparse = &m->layers[l];
    linear_memory memory = {0};
    nb_status st = try_layer(g, &memory, &m->layers[0], err);
    if (st == NB_OK && sparse && sparse != &m->layers[0]) st = try_layer(g, &memory, sparse, err);
    if (st == NB_OK) st = try_weight(g, &memory, m->head, false, err);
    nbi_gate_buffer_close(g, &memory.x);
    nbi_gate_buffer_close(g, &memory.y);
    return st;
}
