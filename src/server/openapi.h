/* The description of the API that the build makes of src/server/openapi.json. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

extern const unsigned char nbi_openapi_json[]; /* [nbi_openapi_json_bytes] */
extern const size_t nbi_openapi_json_bytes;

#ifdef __cplusplus
}
#endif
