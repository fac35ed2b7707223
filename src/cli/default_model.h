/* Where the embedded model lies, for commands that are called without --model. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The folder of models/glm5-tiny: beside the program, in the source tree that the program was built
 * in, or in the installed data folder. *out is from nbi_malloc. NB_NOT_FOUND names --model. */
nb_status nbi_default_model(char **out, nb_error *err);

#ifdef __cplusplus
}
#endif
