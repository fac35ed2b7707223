/* The gate: kernels of this device on weights of this model against plain sums in double. Callers:
 * engine (the short form before serving), `nibble check`.
 *
 * The error of a path is the largest difference of one value, over the root mean square of the
 * row's values: a single wrong value is seen as well as a scale that is off. */
#pragma once

#include "model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_gate_result {
    const char *kind; /* "runner", "attention", "linear", "mlp" */
    char path[48];    /* "cuda_gemv", "latent, decode", "nvfp4" */
    char where[96];   /* layer or module */
    bool chosen;      /* serving would use it */
    bool supported;   /* else `why` */
    bool not_run;     /* only asked whether it is supported: ok, error and bound say nothing */
    bool ok;          /* error <= bound, and nothing in `why` */
    char why[256];    /* of not supported, or of a failure that is not an error above the bound */
    double error, bound;
    uint32_t rows, context; /* of what was timed, else of the largest case checked */
    double seconds;         /* of one call; 0: not timed */
    uint64_t bytes;         /* that a call must read; 0: not timed */
} nbi_gate_result;

typedef struct nbi_gate_options {
    const char *runner; /* NULL: the model's; "all"; or a name, refused as at load */
    bool brief;         /* the chosen paths, small cases, not timed; other runners are not run */
    nbi_dtype kv_dtype;
    uint32_t max_seqs, max_context;                     /* as reserved */
    void (*each)(void *user, const nbi_gate_result *r); /* may be NULL */
    void *user;
} nbi_gate_options;

/* After nbi_model_reserve(), beside no step. NB_NUMERIC when a path that serving would use is
 * wrong: which, error and bound. */
nb_status nbi_gate_run(nbi_model *m, const nbi_gate_options *opt, nb_error *err);

/* Could this runner do what each of tp_size ranks would hold of every layer's experts? `m` is on
 * one rank; ep_size divides tp_size. When not, `why` names the first rank and the reason. */
bool nbi_gate_runner_on_ranks(const nbi_model *m, const nbi_moe_runner_ops *r, uint32_t tp_size,
                              uint32_t ep_size, char *why, size_t why_bytes);

#ifdef __cplusplus
}
#endif
