/* Prompts as text or token ids, one or many: a string, an array of ids, or an array of either. */
#pragma once

#include "server/job.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Pure. `field` names the value in errors; NULL is a missing one. */
nb_status nbi_prompts_check(const json_t *prompt, const char *field, const nbi_api_facts *facts,
                            nbi_api_error *e);
/* An array of prompts, as opposed to one, of what was checked. */
bool nbi_prompts_are_batch(const json_t *prompt);
/* Tokens at which the encoding of one text ends early: it would only be refused, and may be as long
 * as a body. */
size_t nbi_prompts_max_ids(const nbi_job *job);
/* Fills job->prompts, and with job->echo their texts, from what was checked. `field` is static. */
nb_status nbi_prompts_encode(nbi_job *job, const json_t *prompt, const char *field,
                             nbi_api_error *e);
/* Keeps the ends, or the beginnings, of prompts that params.truncate_prompt makes shorter. */
nb_status nbi_prompts_truncate(nbi_job *job, nbi_api_error *e);

#ifdef __cplusplus
}
#endif
