/* BF16, F16 or F32 checkpoints to NVFP4 in ModelOpt's convention: the values of its max
 * calibration, bit for bit (tools/quantize compares them). */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* enum suffix, name, what it covers */
#define NBI_QUANTIZE_SCOPE_LIST(X)                            \
    X(EXPERTS, "experts", "routed experts")                   \
    X(MLP, "mlp", "routed and shared experts and dense MLPs") \
    X(ALL, "all", "attention and indexer projections too")

typedef enum nbi_quantize_scope {
#define X(suffix, name, text) NBI_QUANTIZE_##suffix,
    NBI_QUANTIZE_SCOPE_LIST(X)
#undef X
        NBI_QUANTIZE_SCOPE_COUNT
} nbi_quantize_scope;

const char *nbi_quantize_scope_name(nbi_quantize_scope scope);
/* NBI_QUANTIZE_SCOPE_COUNT for an unknown name. */
nbi_quantize_scope nbi_quantize_scope_parse(const char *name);

typedef struct nbi_quantize_options {
    const char *model_dir, *out_dir;
    nbi_quantize_scope scope;
    const char *input_scales; /* optional JSON file {module: input_scale}; without it none are
                                 written (W4A16_NVFP4) */
    bool mtp;                 /* the MTP layer too; ModelOpt leaves it alone */
    uint64_t shard_bytes;     /* 0: 4 GiB */
    uint32_t n_threads;       /* 0: all cores */
    nb_progress progress;     /* optional; bytes of the source */
    void *progress_user;
} nbi_quantize_options;

typedef struct nbi_quantize_result {
    uint64_t n_modules; /* quantised */
    uint64_t n_kept;    /* in scope, but their width is not a multiple of 16: left as they are */
    uint64_t source_bytes, bytes;
    uint64_t resumed_tensors; /* found finished from an earlier run */
} nbi_quantize_result;

/* Writes to OUT.partial and renames it at the end. A run that ended early leaves OUT.partial; the
 * same call continues behind its last complete shard. */
nb_status nbi_quantize(nbi_quantize_result *out, const nbi_quantize_options *options,
                       nb_error *err);

#ifdef __cplusplus
}
#endif
