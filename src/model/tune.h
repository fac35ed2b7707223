/* Measuring the MoE runners of a model by the rows of a step. Callers: `nibble tune`. */
#pragma once

#include "model/gate.h"
#include "moe/tune_file.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_TUNE_RUNNERS 16u

typedef struct nbi_tune_options {
    uint32_t max_rows; /* largest number of rows that is measured, 1 to 512 */
    nbi_dtype kv_dtype;
    uint32_t max_seqs, max_context;                     /* as reserved */
    void (*each)(void *user, const nbi_gate_result *r); /* per time; may be NULL */
    void *user;
} nbi_tune_options;

typedef struct nbi_tune_result {
    nbi_tune_key key;    /* lives as long as the backend */
    nbi_moe_table table; /* one bucket per number of rows measured */
    nbi_moe_times times[NBI_TUNE_RUNNERS];
    uint32_t n_times;
    uint32_t rows[NBI_MOE_BUCKETS];
} nbi_tune_result;

/* After nbi_model_reserve() of at least max_rows rows, beside no step. Only runners that the gate
 * finds right on this model are measured. NB_UNSUPPORTED: the model has no experts. */
nb_status nbi_tune_run(nbi_tune_result *out, nbi_model *m, const nbi_tune_options *opt,
                       nb_error *err);

#ifdef __cplusplus
}
#endif
