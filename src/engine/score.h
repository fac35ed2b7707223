/* Running given tokens through a model and looking at every position's logits. For `nibble score`
 * and the golden tests: no scheduler, one sequence, the same operators and pages as serving. */
#pragma once

#include "model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Called for every position in order with its logits [vocab], valid during the call. An error ends
 * the run. */
typedef nb_status (*nbi_score_each)(void *user, uint32_t position, const float *logits,
                                    nb_error *err);

/* Runs ids[n] in pieces of at most `chunk` rows (1 .. the reserved rows and logit rows). Uses pages
 * 0 .. ceil(n / 64) - 1 of kv. A numerics fault is NB_NUMERIC with its sentence. */
nb_status nbi_score_run(nbi_model *model, nbi_kv *kv, const int32_t *ids, uint32_t n,
                        uint32_t chunk, nbi_score_each each, void *user, nb_error *err);

#ifdef __cplusplus
}
#endif
