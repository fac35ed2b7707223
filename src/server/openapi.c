/* GET /openapi.json: the description of the API. Called by http.c. */
#include "server/openapi.h"

#include "server/http.h"

unsigned nbi_get_openapi(nbi_exchange *ex, nbi_buf *out)
{
    if (nbi_buf_add(out, nbi_openapi_json, nbi_openapi_json_bytes) == NB_OK) return 200;
    nbi_api_no_memory(&ex->error, "the reply");
    return 0;
}
