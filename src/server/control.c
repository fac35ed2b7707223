/* What an operator does to a running server: /flush_cache, /reset_prefix_cache and
 * /abort_request. Called by http.c. */
#include <string.h>
#include <strings.h>

#include "server/http.h"

static unsigned done(nbi_exchange *ex, nb_status status)
{
    if (status == NB_OK) return 200;
    nbi_api_no_memory(&ex->error, "the reply");
    return 0;
}

static nb_status flush(nbi_exchange *ex)
{
    nb_error err = {0};
    nb_status status = nb_engine_flush_cache(ex->server->served->engine, &err);
    if (status == NB_BUSY)
        return nbi_api_fail(&ex->error, 400, "cache_in_use", NULL, "%s", err.text);
    if (status != NB_OK) nbi_api_from(&ex->error, status, &err, NULL);
    return status;
}

unsigned nbi_get_flush_cache(nbi_exchange *ex, nbi_buf *out)
{
    if (flush(ex) != NB_OK) return 0;
    ex->content_type = "text/plain; charset=utf-8";
    return done(ex, nbi_buf_addf(out, "Cache flushed.\n"));
}

unsigned nbi_post_flush_cache(nbi_exchange *ex, const json_t *body, nbi_buf *out)
{
    (void)body;
    return nbi_get_flush_cache(ex, out);
}

/* vLLM's path of the same; `success` is never false, a cache in use is an error. */
unsigned nbi_post_reset_prefix_cache(nbi_exchange *ex, const json_t *body, nbi_buf *out)
{
    const char *running =
        MHD_lookup_connection_value(ex->conn, MHD_GET_ARGUMENT_KIND, "reset_running_requests");
    (void)body;
    if (running && (strcasecmp(running, "true") == 0 || strcmp(running, "1") == 0)) {
        nbi_api_field(&ex->error, "reset_running_requests",
                      "is true; running requests are not put back for it here");
        return 0;
    }
    if (flush(ex) != NB_OK) return 0;
    return done(ex, nbi_buf_addf(out, "{\"success\":true}"));
}

unsigned nbi_post_abort_request(nbi_exchange *ex, const json_t *body, nbi_buf *out)
{
    const char *rid = NULL;
    bool all = false;
    nbi_api_error *e = &ex->error;
    if (nbi_field_str(&rid, body, "", "rid", e) != NB_OK ||
        nbi_field_bool(&all, body, "", "abort_all", e) != NB_OK) {
        return 0;
    }
    if (!all && (!rid || !rid[0])) {
        nbi_api_field(e, "rid", "is missing, and \"abort_all\" is not true");
        return 0;
    }
    uint32_t n = nbi_exchanges_abort(ex->server, all ? NULL : rid);
    return done(ex, nbi_buf_addf(out, "{\"aborted\":%u}", n));
}
