/* Which build this is. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Version, then the GNU build id of the program or library that holds this code:
 * "0.1.0+5f3c...". Another build of the same sources with other flags has another id. Where the
 * linker left none, the version alone. Static text; any thread. */
const char *nbi_build_id(void);

#ifdef __cplusplus
}
#endif
