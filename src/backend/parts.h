/* What a step is made of: the names that `nibble roofline`, `bench --breakdown`, profiles and
 * /metrics share. */
#pragma once

/* enum suffix, name in tables and JSON */
/* clang-format off */
#define NBI_PART_LIST(X)                   \
    X(ATTENTION, "attention")              \
    X(INDEXER, "indexer")                  \
    X(ROUTER, "router")                    \
    X(ROUTED, "routed experts")            \
    X(SHARED, "shared experts")            \
    X(DENSE, "dense MLPs")                 \
    X(HEAD, "output head")                 \
    X(EMBEDDING, "embedding")              \
    X(NORM, "norms and biases")            \
    X(KV_READ, "cache read")               \
    X(KV_WRITE, "cache write")             \
    X(COLLECTIVES, "collectives")
/* clang-format on */

typedef enum nbi_part {
#define X(suffix, name) NBI_PART_##suffix,
    NBI_PART_LIST(X)
#undef X
        NBI_PART_COUNT
} nbi_part;
