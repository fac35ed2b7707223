/* The bodies of the requests of a load run: random prompts of a length, prompts with shared
 * prefixes, prompts of a file. */
#pragma once

#include "perf/load_run.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_load_prompt {
    char *body; /* the request, JSON; from malloc() of the JSON library, freed with the prompts */
    size_t body_bytes;
    uint32_t input_tokens, output_tokens; /* input 0: not known */
} nbi_load_prompt;

typedef struct nbi_load_prompts {
    nbi_load_prompt *items; /* [n + n_warmup]: the measured ones, then others for the warm-up */
    uint32_t n, n_warmup;
    char how[256]; /* one sentence */
} nbi_load_prompts;

/* Asks the server for what it takes to make prompts of the right length: token ids through
 * /tokenize, else the tokens per word of two small requests. NB_INVALID names option or file entry.
 */
nb_status nbi_load_prompts_make(nbi_load_prompts *out, const nbi_load_options *opt,
                                const char *model, nbi_load_client *client, nb_error *err);
void nbi_load_prompts_free(nbi_load_prompts *prompts);

#ifdef __cplusplus
}
#endif
