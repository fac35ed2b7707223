/* How long a MoE runner takes on the experts of one layer. Callers: gate_moe.c, tune.c. */
#include "base/clock.h"
#include "model/gate_parts.h"

#define CALLS     8u
#define LONG_CALL 1.0 /* seconds */

typedef struct timing {
    const nbi_moe_experts *e;
    const nbi_moe_runner_ops *r;
    const nbi_moe_layer *layer;
    uint32_t rows;
    nbi_gate_buffer x, ids, weights, y, ws;
} timing;

static uint64_t expert_bytes(const nbi_moe_experts *e)
{
    return nbi_matrix_bytes(&e->gate[0]) + nbi_matrix_bytes(&e->up[0]) +
           nbi_matrix_bytes(&e->down[0]);
}

/* The shared one is as large as the others, and every call reads it. */
static uint64_t call_bytes(const nbi_moe_experts *e, uint64_t distinct)
{
    return distinct * expert_bytes(e) / CALLS + e->shape.n_shared * expert_bytes(e);
}

/* Distinct experts per row, others in every call; returns the distinct experts of all calls. */
static uint64_t spread_ids(nbi_gate *g, const nbi_moe_shape *s, int32_t *ids, uint32_t rows)
{
    const uint32_t n_experts = s->n_experts, top_k = s->top_k;
    uint64_t distinct = 0;
    NB_ASSERT(top_k && n_experts);
    const uint32_t most = n_experts / top_k; /* steps between the experts of a row */
    for (uint32_t n = 0; n < CALLS; n++) {
        bool seen[1024] = {false};
        for (uint32_t t = 0; t < rows; t++) {
            uint32_t id = nbi_gate_below(g, n_experts);
            const uint32_t step = 1 + nbi_gate_below(g, most);
            for (uint32_t i = 0; i < top_k; i++, id = (id + step) % n_experts) {
                *ids++ = (int32_t)id;
                distinct += id < 1024 && !seen[id];
                if (id < 1024) seen[id] = true;
            }
        }
    }
    return distinct;
}

static nb_status open_buffers(timing *t, nbi_gate *g, nb_error *err)
{
    const nbi_moe_shape *s = &t->e->shape;
    const size_t k = (size_t)t->rows * s->top_k, width = (size_t)t->rows * s->hidden;
    NB_TRY(nbi_gate_buffer_open(g, &t->x, width * sizeof(float), err));
    NB_TRY(nbi_gate_buffer_open(g, &t->y, width * sizeof(float), err));
    NB_TRY(nbi_gate_buffer_open(g, &t->ids, CALLS * k * sizeof(int32_t), err));
    NB_TRY(nbi_gate_buffer_open(g, &t->weights, k * sizeof(float), err));
    return nbi_gate_buffer_open(g, &t->ws, t->r->workspace_bytes(g->b, s, t->rows), err);
}

static void close_buffers(timing *t, nbi_gate *g)
{
    nbi_gate_buffer_close(g, &t->x);
    nbi_gate_buffer_close(g, &t->ids);
    nbi_gate_buffer_close(g, &t->weights);
    nbi_gate_buffer_close(g, &t->y);
    nbi_gate_buffer_close(g, &t->ws);
}

/* Seconds of n calls, with all that they left to do. */
static nb_status run_calls(const timing *t, nbi_gate *g, uint32_t n, double *seconds, nb_error *err)
{
    const size_t k = (size_t)t->rows * t->e->shape.top_k;
    const uint64_t begin = nbi_now_ns();
    for (uint32_t i = 0; i < n; i++)
        t->r->run(g->b, t->layer,
                  &(nbi_moe_args){.out = t->y.device,
                                  .x = t->x.device,
                                  .ids = (const int32_t *)t->ids.device + i * k,
                                  .weights = t->weights.device,
                                  .n_rows = t->rows,
                                  .workspace = t->ws.device});
    const nb_status st = g->b->ops->sync(g->b, err);
    *seconds = 1e-9 * (double)(nbi_now_ns() - begin);
    return st;
}

static nb_status measure(const timing *t, nbi_gate *g, uint32_t repeats, double *least,
                         nb_error *err)
{
    NB_TRY(run_calls(t, g, 1, least, err)); /* warms */
    if (*least >= LONG_CALL) return NB_OK;
    for (uint32_t i = 0; i < repeats; i++) {
        double seconds;
        NB_TRY(run_calls(t, g, CALLS, &seconds, err));
        if (!i || seconds / CALLS < *least) *least = seconds / CALLS;
    }
    return NB_OK;
}

nb_status nbi_gate_time(nbi_gate *g, const nbi_moe_experts *e, const nbi_moe_runner_ops *r,
                        const nbi_moe_layer *layer, uint32_t rows, uint32_t repeats,
                        nbi_gate_result *out, nb_error *err)
{
    const nbi_moe_shape *s = &e->shape;
    timing t = {.e = e, .r = r, .layer = layer, .rows = rows};
    nb_status st = open_buffers(&t, g, err);
    if (st == NB_OK) {
        nbi_gate_fill(g, t.x.host, (size_t)rows * s->hidden);
        for (size_t i = 0; i < (size_t)rows * s->top_k; i++) ((float *)t.weights.host)[i] = 0.125f;
        out->bytes = call_bytes(e, spread_ids(g, s, t.ids.host, rows));
        out->rows = rows;
        nbi_gate_up(g, &t.x);
        nbi_gate_up(g, &t.ids);
        nbi_gate_up(g, &t.weights);
        st = measure(&t, g, repeats, &out->seconds, err);
    }
    close_buffers(&t, g);
    return st;
}
