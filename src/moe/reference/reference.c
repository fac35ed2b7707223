/* Runner `reference`: plain loops in double, one row and one expert after the other. The oracle of
 * the other runners, and a runner for every shape. Callers: the registry. Weights are read as
 * mapped; an expert without rows is never read. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "moe/mapped.h"

/* One chosen expert of one row. */
typedef struct scratch {
    float *weights; /* [max(hidden, inter)] one row of a matrix */
    float *x;       /* [max(hidden, inter)] NVFP4 activations, when they are used */
    float *h;       /* [inter] */
} scratch;

static size_t layout(scratch *s, char *base, const nbi_moe_shape *shape)
{
    const size_t side = shape->hidden > shape->inter ? shape->hidden : shape->inter;
    nbi_plan plan = {0};
    const size_t weights = nbi_plan_add(&plan, side * sizeof(float));
    const size_t x = nbi_plan_add(&plan, side * sizeof(float));
    const size_t h = nbi_plan_add(&plan, shape->inter * sizeof(float));
    if (s) {
        *s = (scratch){.weights = (float *)(void *)(base + weights),
                       .x = (float *)(void *)(base + x),
                       .h = (float *)(void *)(base + h)};
    }
    return plan.bytes;
}

static bool supports(const nbi_backend *b, const nbi_moe_shape *shape, char *why, size_t why_bytes)
{
    if (strcmp(b->ops->name, "cpu") != 0) {
        snprintf(why, why_bytes, "runner reference runs on the CPU backend, this is %s",
                 b->description);
        return false;
    }
    if (!shape->n_shared) return true;
    snprintf(why, why_bytes, "a shared expert is not among the others on the CPU");
    return false;
}

static size_t workspace_bytes(const nbi_backend *b, const nbi_moe_shape *shape, uint32_t max_rows)
{
    (void)b;
    (void)max_rows;
    return layout(NULL, NULL, shape);
}

static double dot_row(const nbi_matrix *m, uint32_t r, const float *x, float *row)
{
    nbi_matrix_row(m, r, row);
    double sum = 0;
    for (uint32_t c = 0; c < m->cols; c++) sum += (double)row[c] * (double)x[c];
    return sum;
}

static void add_expert(const nbi_moe_experts *e, uint32_t id, float weight, const float *x,
                       scratch *s, float *out)
{
    const nbi_matrix *gate = &e->gate[id], *up = &e->up[id], *down = &e->down[id];
    const float in_scale = nbi_moe_gate_up_scale(&e->shape, gate, up);
    const float mid_scale = nbi_moe_down_scale(&e->shape, down);
    if (in_scale > 0) {
        nbi_nvfp4_round_row(x, e->shape.hidden, in_scale, s->x);
        x = s->x;
    }
    for (uint32_t i = 0; i < e->shape.inter; i++) {
        const double g = dot_row(gate, i, x, s->weights), u = dot_row(up, i, x, s->weights);
        s->h[i] = (float)(g / (1 + exp(-g)) * u);
    }
    const float *h = s->h;
    if (mid_scale > 0) {
        nbi_nvfp4_round_row(s->h, e->shape.inter, mid_scale, s->x);
        h = s->x;
    }
    for (uint32_t i = 0; i < e->shape.hidden; i++)
        out[i] += weight * (float)dot_row(down, i, h, s->weights);
}

static void run(nbi_backend *b, const nbi_moe_layer *layer, const nbi_moe_args *a)
{
    (void)b;
    const nbi_moe_experts *e = &layer->experts;
    const uint32_t hidden = e->shape.hidden, top_k = e->shape.top_k;
    scratch s;
    layout(&s, a->workspace, &e->shape);
    for (uint32_t t = 0; t < a->n_rows; t++) {
        float *out = (float *)a->out + (size_t)t * hidden;
        const float *x = (const float *)a->x + (size_t)t * hidden;
        memset(out, 0, hidden * sizeof *out);
        for (uint32_t i = 0; i < top_k; i++) {
            const int32_t id = a->ids[(size_t)t * top_k + i];
            if (id < 0 || (uint32_t)id >= e->shape.n_experts) continue;
            add_expert(e, (uint32_t)id, a->weights[(size_t)t * top_k + i], x, &s, out);
        }
    }
}

const nbi_moe_runner_ops nbi_moe_runner_reference = {
    .version = 1,
    .size = sizeof(nbi_moe_runner_ops),
    .name = "reference",
    .summary = "plain C in double precision, one expert after the other: for checks",
    .numerics = "reference",
    .supports = supports,
    .prepare = nbi_moe_mapped_prepare,
    .release = nbi_moe_mapped_release,
    .workspace_bytes = workspace_bytes,
    .run = run,
};
