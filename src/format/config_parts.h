/* Pieces of the config.json parser. Private to src/format. */
#pragma once

#include "format/config.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What every piece needs: the object, what errors call it, where sentences go. */
typedef struct nbi_config_source {
    const json_t *o;
    const char *name;
    nb_error *err;
} nbi_config_source;

/* Fills c->rope; reads c->family, rope_dim, head_dim, max_positions. */
nb_status nbi_config_rope(nbi_config *c, const nbi_config_source *s);
/* Allocates and fills c->layer_sparse and c->layer_full_indexer; reads c->family, counts,
 * has_indexer. */
nb_status nbi_config_layers(nbi_config *c, const nbi_config_source *s);

/* Required positive number up to max. */
nb_status nbi_config_size(uint32_t *out, const nbi_config_source *s, const char *key, uint32_t max);
/* Optional: `fallback` when absent or null; then checked like a required one, with 0 allowed. */
nb_status nbi_config_count(uint32_t *out, const nbi_config_source *s, const char *key,
                           uint32_t fallback, uint32_t max);

#ifdef __cplusplus
}
#endif
