/* A dense MLP as the forward pass calls it: addition and norm, gate and up, activation, down,
 * addition. A backend may join neighbours of this list into one kernel, which the operators by
 * themselves would not show. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/gate_parts.h"

#define TOKENS 33u
#define ROWS   2u /* with sums in double; they are the first of every call */
#define COLS   64u

typedef struct mlp_case {
    nbi_gate *g;
    const nbi_layer *layer;
    const nbi_mlp_weights *w;
    uint32_t hidden, inter, n_cols;
    nbi_gate_buffer x, delta, xn, gate, up, down, sum;
    float *x0, *sum0; /* [TOKENS][hidden] before the call */
    float *norm;      /* [hidden] weights */
    float *xr;        /* [ROWS][3][hidden] normed, as gate and as up see it */
    float *h;         /* [ROWS][inter] */
    double *want;     /* [ROWS][n_cols] */
    float *first;     /* [ROWS][hidden] of the call before */
    void *block;
    bool no_memory;
} mlp_case;

static bool rounded(const mlp_case *c, const nbi_weight *w)
{
    return c->g->b->w4a4 && w->host.kind == NBI_WEIGHT_NVFP4 && w->host.input_scale > 0;
}

static nb_status open_case(mlp_case *c, nb_error *err)
{
    const size_t H = c->hidden * sizeof(float), I = c->inter * sizeof(float);
    const struct {
        void *at; /* address of a pointer in *c */
        size_t bytes;
    } parts[] = {{&c->x0, TOKENS * H}, {&c->sum0, TOKENS * H},
                 {&c->norm, H},        {&c->xr, ROWS * 3 * H},
                 {&c->h, ROWS * I},    {&c->want, ROWS * COLS * sizeof(double)},
                 {&c->first, ROWS * H}};
    nbi_plan plan = {0};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) nbi_plan_add(&plan, parts[i].bytes);
    c->block = nbi_calloc(1, plan.bytes);
    if (!c->block) return nbi_fail(err, NB_NO_MEMORY, "check: out of memory");
    plan.bytes = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        *(void **)parts[i].at = (char *)c->block + nbi_plan_add(&plan, parts[i].bytes);
    nbi_gate_buffer *wide[] = {&c->x, &c->delta, &c->xn, &c->down, &c->sum};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        NB_TRY(nbi_gate_buffer_open(c->g, wide[i], TOKENS * H, err));
    NB_TRY(nbi_gate_buffer_open(c->g, &c->gate, TOKENS * I, err));
    return nbi_gate_buffer_open(c->g, &c->up, TOKENS * I, err);
}

static void close_case(mlp_case *c)
{
    nbi_gate_buffer *all[] = {&c->x, &c->delta, &c->xn, &c->gate, &c->up, &c->down, &c->sum};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) nbi_gate_buffer_close(c->g, all[i]);
    nbi_free(c->block);
}

static void linear(const mlp_case *c, void *y, const void *x, const nbi_weight *w, uint32_t n)
{
    c->g->b->ops->linear(c->g->b, &(nbi_linear_args){.y = y,
                                                     .x = x,
                                                     .w = w,
                                                     .n_rows = n,
                                                     .x_stride = w->host.cols,
                                                     .y_stride = w->host.rows});
}

static nb_status call(mlp_case *c, uint32_t n, nb_error *err)
{
    nbi_backend *b = c->g->b;
    memcpy(c->x.host, c->x0, c->x.bytes);
    memcpy(c->sum.host, c->sum0, c->sum.bytes);
    nbi_gate_up(c->g, &c->x);
    nbi_gate_up(c->g, &c->sum);
    b->ops->rmsnorm(b, &(nbi_rmsnorm_args){.out = c->xn.device,
                                           .x = c->x.device,
                                           .delta = c->delta.device,
                                           .weight = c->layer->post_norm,
                                           .eps = c->g->m->config.norm_eps,
                                           .n_rows = n,
                                           .width = c->hidden,
                                           .x_stride = c->hidden,
                                           .out_stride = c->hidden});
    linear(c, c->gate.device, c->xn.device, c->w->gate, n);
    linear(c, c->up.device, c->xn.device, c->w->up, n);
    b->ops->swiglu(b, &(nbi_swiglu_args){.out = c->gate.device,
                                         .gate = c->gate.device,
                                         .up = c->up.device,
                                         .n_rows = n,
                                         .width = c->inter,
                                         .in_stride = c->inter,
                                         .out_stride = c->inter,
                                         .once = true});
    linear(c, c->down.device, c->gate.device, c->w->down, n);
    b->ops->add(
        b, &(nbi_add_args){
               .x = c->sum.device, .y = c->down.device, .n = (size_t)n * c->hidden, .once = true});
    nbi_gate_down(c->g, &c->sum);
    nbi_gate_down(c->g, &c->x);
    return b->ops->sync(b, err);
}

/* ---------------------------------------------------------------- the same in double */

static void norm_rows(mlp_case *c)
{
    const nbi_weight *parts[2] = {c->w->gate, c->w->up};
    const float *delta = c->delta.host;
    for (uint32_t t = 0; t < ROWS; t++) {
        float *x = c->xr + (size_t)t * 3 * c->hidden;
        double sum = 0;
        for (uint32_t i = 0; i < c->hidden; i++) {
            const float v = c->x0[(size_t)t * c->hidden + i] + delta[(size_t)t * c->hidden + i];
            sum += (double)v * (double)v;
            x[i] = v;
        }
        const double scale = 1 / sqrt(sum / c->hidden + (double)c->g->m->config.norm_eps);
        for (uint32_t i = 0; i < c->hidden; i++)
            x[i] = (float)((double)x[i] * scale * (double)c->norm[i]);
        for (uint32_t p = 0; p < 2; p++) {
            float *to = x + (1 + p) * (size_t)c->hidden;
            if (rounded(c, parts[p]))
                nbi_nvfp4_round_row(x, c->hidden, parts[p]->host.input_scale, to);
            else
                memcpy(to, x, c->hidden * sizeof *to);
        }
    }
}

static void hidden_task(void *arg, uint32_t begin, uint32_t end, uint32_t thread)
{
    mlp_case *c = arg;
    (void)thread;
    float *gate = nbi_malloc(2 * (size_t)c->hidden * sizeof *gate);
    if (!gate) {
        c->no_memory = true;
        return;
    }
    float *up = gate + c->hidden;
    for (uint32_t r = begin; r < end; r++) {
        nbi_matrix_row(&c->w->gate->host, r, gate);
        nbi_matrix_row(&c->w->up->host, r, up);
        for (uint32_t t = 0; t < ROWS; t++) {
            const float *x = c->xr + ((size_t)t * 3 + 1) * c->hidden;
            const double g = nbi_gate_dot(x, gate, c->hidden),
                         u = nbi_gate_dot(x + c->hidden, up, c->hidden);
            c->h[(size_t)t * c->inter + r] = (float)(g / (1 + exp(-g)) * u);
        }
    }
    nbi_free(gate);
}

static uint32_t column(const mlp_case *c, uint32_t i)
{
    return (uint32_t)((uint64_t)i * (c->hidden - 1) / (c->n_cols - 1));
}

static nb_status make_case(mlp_case *c, nb_error *err)
{
    nbi_gate *g = c->g;
    NB_TRY(open_case(c, err));
    nbi_gate_fill(g, c->x0, (size_t)TOKENS * c->hidden);
    nbi_gate_fill(g, c->sum0, (size_t)TOKENS * c->hidden);
    nbi_gate_fill(g, c->delta.host, (size_t)TOKENS * c->hidden);
    for (size_t i = 0; i < (size_t)TOKENS * c->hidden; i++) c->sum0[i] *= 0.1f;
    nbi_gate_up(g, &c->delta);
    g->b->ops->download(g->b, c->norm, c->layer->post_norm, c->hidden * sizeof *c->norm);
    norm_rows(c);
    nbi_gate_each(g, hidden_task, c, c->inter, 16, 2ull * ROWS * c->inter * c->hidden);
    if (c->no_memory) return nbi_fail(err, NB_NO_MEMORY, "check: out of memory");
    float *row = nbi_malloc(c->inter * sizeof *row);
    if (!row) return nbi_fail(err, NB_NO_MEMORY, "check: out of memory");
    for (uint32_t t = 0; t < ROWS; t++) {
        float *h = c->h + (size_t)t * c->inter;
        if (rounded(c, c->w->down))
            nbi_nvfp4_round_row(h, c->inter, c->w->down->host.input_scale, h);
        for (uint32_t i = 0; i < c->n_cols; i++) {
            nbi_matrix_row(&c->w->down->host, column(c, i), row);
            c->want[(size_t)t * c->n_cols + i] = nbi_gate_dot(h, row, c->inter);
        }
    }
    nbi_free(row);
    return NB_OK;
}

static double row_error(const mlp_case *c, uint32_t t)
{
    const size_t at = (size_t)t * c->hidden;
    const float *sum = (const float *)c->sum.host + at, *x = (const float *)c->x.host + at;
    float got[COLS];
    for (uint32_t i = 0; i < c->hidden; i++)
        if (!isfinite(sum[i]) || x[i] != c->x0[at + i] + ((const float *)c->delta.host)[at + i])
            return INFINITY;
    for (uint32_t i = 0; i < c->n_cols; i++)
        got[i] = sum[column(c, i)] - c->sum0[at + column(c, i)];
    return nbi_gate_error(got, c->want + (size_t)t * c->n_cols, c->n_cols);
}

/* One, a few and many tokens; the bits of the first ones stay. */
static nb_status run_calls(mlp_case *c, nbi_gate_result *out, nb_error *err)
{
    const uint32_t most = nbi_gate_rows(c->g, TOKENS), calls[] = {most, ROWS, 1};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        const uint32_t n = calls[i] < ROWS ? calls[i] : ROWS;
        NB_TRY(call(c, calls[i], err));
        for (uint32_t t = 0; t < n; t++) out->error = fmax(out->error, row_error(c, t));
        const size_t bytes = (size_t)n * c->hidden * sizeof(float);
        if (i && memcmp(c->first, c->sum.host, bytes) != 0 && out->error <= out->bound)
            snprintf(out->why, sizeof out->why,
                     "a row among %u has other bits than the same row among %u", calls[i], most);
        if (!i) memcpy(c->first, c->sum.host, bytes);
    }
    out->rows = most;
    return NB_OK;
}

static nb_status try_mlp(nbi_gate *g, const nbi_layer *layer, const nbi_mlp_weights *w,
                         nb_error *err)
{
    mlp_case c = {.g = g, .layer = layer, .w = w, .hidden = g->m->config.hidden, .inter = w->inter};
    c.n_cols = c.hidden < COLS ? c.hidden : COLS;
    const bool w4a4 = rounded(&c, w->gate) || rounded(&c, w->up) || rounded(&c, w->down);
    nbi_gate_result out = {
        .kind = "mlp", .chosen = true, .supported = true, .bound = nbi_gate_bound(w4a4)};
    snprintf(out.path, sizeof out.path, "%s", nbi_weight_kind_name(w->gate->host.kind));
    snprintf(out.where, sizeof out.where, "layer %u, %u x %u", (uint32_t)(layer - g->m->layers),
             w->inter, c.hidden);
    nb_status st = make_case(&c, err);
    if (st == NB_OK) st = run_calls(&c, &out, err);
    close_case(&c);
    if (st == NB_OK) nbi_gate_say(g, &out);
    return st;
}

/* Of the first dense layer and of the first shared expert. */
nb_status nbi_gate_mlp(nbi_gate *g, nb_error *err)
{
    const nbi_model *m = g->m;
    const nbi_layer *dense = NULL, *shared = NULL;
    for (uint32_t l = 0; l < m->n_layers; l++) {
        const nbi_layer *at = &m->layers[l];
        if (!dense && !at->sparse && at->mlp.inter) dense = at;
        if (!shared && at->sparse && at->moe.shared.inter) shared = at;
    }
    if (dense && !(g->opt->brief && shared)) NB_TRY(try_mlp(g, dense, &dense->mlp, err));
    return shared ? try_mlp(g, shared, &shared->moe.shared, err) : NB_OK;
}
