/* What an operator does to a running server: /flush_cache and /abort_request. Called by http.c. */
#include "server/http.h"

static unsigned done(nbi_exchange *ex, nb_status status)
{
    if (status == NB_OK) return 200;
    nbi_api_no_memory(&ex->error, "the reply");
    return 0;
}

unsigned nbi_get_flush_cache(nbi_exchange *ex, nbi_buf *out)
{
    nb_error err = {0};
    nb_status status = nb_engine_flush_cache(ex->server->served->engine, &err);
    if (status == NB_BUSY) {
        nbi_api_fail(&ex->error, 400, "cache_in_use", NULL, "%s", err.text);
        return 0;
    }
    if (status != NB_OK) {
        nbi_api_from(&ex->error, status, &err, NULL);
        return 0;
    }
    ex->content_type = "text/plain; charset=utf-8";
    return done(ex, nbi_buf_addf(out, "Cache flushed.\n"));
}

unsigned nbi_post_flush_cache(nbi_exchange *ex, const json_t *body, nbi_buf *out)
{
    (void)body;
    return nbi_get_flush_cache(ex, out);
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
