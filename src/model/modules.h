/* The linear layers and vectors of a model, by name and shape, from its configuration alone: the
 * list that synth writes, inspect looks for and quantize goes through. Names are the hub's; experts
 * come one at a time. */
#pragma once

#include "format/config.h"

#ifdef __cplusplus
extern "C" {
#endif

/* enum suffix, name in reports */
/* clang-format off */
#define NBI_COMPONENT_LIST(X)                       \
    X(ROUTED, "routed experts")                     \
    X(SHARED, "shared experts")                     \
    X(DENSE, "dense MLPs")                          \
    X(ATTENTION, "attention")                       \
    X(INDEXER, "indexer")                           \
    X(INDEXER_HEADS, "indexer head weights")        \
    X(ROUTER, "router")                             \
    X(MTP_PROJECTION, "MTP projection")             \
    X(EMBEDDING, "embedding")                       \
    X(HEAD, "output head")                          \
    X(NORM, "norms")                                \
    X(BIAS, "biases")                               \
    X(ROUTER_BIAS, "router bias")
/* clang-format on */

typedef enum nbi_component {
#define X(suffix, name) NBI_COMPONENT_##suffix,
    NBI_COMPONENT_LIST(X)
#undef X
        NBI_COMPONENT_COUNT
} nbi_component;

const char *nbi_component_name(nbi_component component);

typedef struct nbi_module {
    const char *name; /* linear layer without ".weight"; vector with its whole name. "" in a walk
                         without names */
    nbi_component component;
    bool linear; /* [rows, cols]; otherwise a vector [rows] */
    uint64_t rows, cols;
    uint32_t layer; /* UINT32_MAX outside of layers; >= config.n_layers in MTP layers */
    uint32_t expert,
        part; /* routed experts: number; 0 gate, 1 up, 2 down (also for the other MLPs) */
} nbi_module;

typedef nb_status (*nbi_module_fn)(void *user, const nbi_module *module, nb_error *err);

/* Calls `each` for every module: embedding, layers 0 to n_layers + n_mtp_layers - 1, final norm,
 * head (unless it is tied). Stops at the first failure. Without names the walk only costs its
 * arithmetic (sizes of 750 G parameter models in milliseconds). */
nb_status nbi_modules_walk(const nbi_config *config, bool names, nbi_module_fn each, void *user,
                           nb_error *err);

#ifdef __cplusplus
}
#endif
