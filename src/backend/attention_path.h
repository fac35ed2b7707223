/* Attention and cache by the names that users bring from other engines: which of them mean an
 * algorithm that this device and model have here, and why the others do not. Callers: model (choice
 * at load), commands.
 *
 * There is one attention path per device; what a name decides is whether it can be meant. */
#pragma once

#include "backend/backend.h"
#include "format/config.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_MLA_BLOCK 512u /* --mla-prefill-block by default */

/* As the options of the same names; NULL or "auto": the device's own. */
typedef struct nbi_attention_names {
    const char *backend;     /* --attention-backend: of both phases */
    const char *mla_prefill; /* --mla-prefill: "absorbed", "expanded"; NULL or "auto" */
    uint32_t mla_block;      /* --mla-prefill-block; 0: NBI_MLA_BLOCK */
    bool unshared;           /* no request uses another's pages: "auto" takes the faster form */
    const char *prefill, *decode; /* --prefill-attention-backend, --decode-attention-backend */
    const char *sparse_prefill, *sparse_decode; /* --dsa-prefill-backend, --dsa-decode-backend */
} nbi_attention_names;

/* The path a model gets on this backend: "cuda", "cpu". */
const char *nbi_attention_path(const nbi_backend *b);
/* One line of what it does for this model. */
const char *nbi_attention_summary(const nbi_backend *b, const nbi_config *config);

/* Does the name mean something that this backend does for the model? When not, `why` gets the
 * sentence. Every name in nbi_attention_known() is decided; another one is not known. */
bool nbi_attention_supports(const nbi_backend *b, const nbi_config *config, const char *name,
                            char *why, size_t why_bytes);
/* All names, without "auto"; NULL-terminated. */
const char *const *nbi_attention_known(void);

/* Checks every name that was given, a line in the log for each that is mapped. NB_INVALID lists the
 * known names; NB_UNSUPPORTED carries the reason. */
nb_status nbi_attention_choose(const nbi_attention_names *names, const nbi_backend *b,
                               const nbi_config *config, nb_error *err);

/* Type of the cache by name; NBI_DTYPE_COUNT for "auto" and NULL. NB_INVALID for what is no type;
 * NB_UNSUPPORTED for those of other engines that are not here, with the reason. */
nb_status nbi_kv_dtype_parse(nbi_dtype *out, const char *name, nb_error *err);

/* As --kv-cache-dtype has it. */
const char *nbi_kv_dtype_name(nbi_dtype dtype);

/* What "auto" goes by. */
typedef struct nbi_kv_asked {
    const char *algo; /* the checkpoint's word (nbi_quant.kv_algo); NULL or "": none */
    nbi_cpu_level level;
} nbi_kv_asked;

/* The same when the checkpoint is known. "auto" is F32 at level reference, which is exact; else
 * E4M3 if the checkpoint asks for FP8, else BF16; a line in the log when the checkpoint asks. */
nb_status nbi_kv_dtype_choose(nbi_dtype *out, const char *name, const nbi_kv_asked *asked,
                              nb_error *err);

#ifdef __cplusplus
}
#endif
