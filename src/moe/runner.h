/* MoE runners: how the routed experts of a layer are computed. Chosen by name, gated with reasons,
 * all proven against `reference`.
 *
 *   out[t] = sum_i weights[t, i] * down_e( silu(gate_e x[t]) * (up_e x[t]) ),  e = ids[t, i]
 * Ids of -1 contribute nothing. The sum over i runs in the order i = 0..top_k-1, and what the
 * shared expert gives is added behind it. Same rule of numerics as backend.h: a row's bits do not
 * depend on its neighbours. The residual is not the runner's, and a shared expert only where the
 * shape has one: the model runs others by itself, to the same bits on the same device. */
#pragma once

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_moe_shape {
    uint32_t n_experts, top_k, hidden, inter;
    nbi_weight_kind kind_gate_up,
        kind_down; /* of expert 0; layers may differ, experts of a layer may not */
    bool w4a4;
    uint32_t n_shared; /* 1: an expert of every row beside those chosen, of the same widths and
                          kinds, the last of the arrays; 0: none, or not the runner's */
} nbi_moe_shape;

/* All experts; those of a row. */
static inline uint32_t nbi_moe_n_all(const nbi_moe_shape *s)
{
    return s->n_experts + s->n_shared;
}

static inline uint32_t nbi_moe_n_slots(const nbi_moe_shape *s)
{
    return s->top_k + s->n_shared;
}

/* Experts of one layer, canonical views, each array [n_experts + n_shared]. */
typedef struct nbi_moe_experts {
    nbi_moe_shape shape;
    const nbi_matrix *gate, *up, *down;
    uint32_t layer;
} nbi_moe_experts;

typedef struct nbi_moe_layer nbi_moe_layer; /* prepared, runner-defined */
typedef struct nbi_moe_runner nbi_moe_runner;

typedef struct nbi_moe_args {
    void *out;            /* act [T, hidden] */
    const void *x;        /* act [T, hidden] */
    const int32_t *ids;   /* [T, top_k], -1 allowed */
    const float *weights; /* [T, top_k] */
    uint32_t n_rows;
    void *workspace; /* of workspace_bytes(max rows) */
} nbi_moe_args;

typedef struct nbi_moe_runner_ops {
    uint32_t version, size;
    const char *name;           /* "cpu" */
    const char *const *aliases; /* NULL-terminated; may be NULL */
    const char *summary;        /* one line for `inspect` and `check` */
    /* Numerics class: runners of one class give a row the same bits, and share prepare(), release()
     * and so the prepared layer. Only such runners may take turns in a model (table.h). */
    const char *numerics;

    /* Can it run this shape on this backend? When not, `why` gets the sentence. */
    bool (*supports)(const nbi_backend *b, const nbi_moe_shape *shape, char *why, size_t why_bytes);
    nb_status (*prepare)(nbi_backend *b, nbi_moe_layer **out, const nbi_moe_experts *experts,
                         nb_error *err);
    void (*release)(nbi_backend *b, nbi_moe_layer **layer);
    size_t (*workspace_bytes)(const nbi_backend *b, const nbi_moe_shape *shape, uint32_t max_rows);
    void (*run)(nbi_backend *b, const nbi_moe_layer *layer, const nbi_moe_args *args);
} nbi_moe_runner_ops;

/* All runners built in, in order of preference; NULL-terminated. */
const nbi_moe_runner_ops *const *nbi_moe_runners(void);

/* By name or alias; "auto" takes the first that supports the shape. NB_INVALID lists the known
 * names; NB_UNSUPPORTED carries the reason. */
nb_status nbi_moe_runner_choose(const nbi_moe_runner_ops **out, const char *name,
                                const nbi_backend *b, const nbi_moe_shape *shape, nb_error *err);

#ifdef __cplusplus
}
#endif
