/* GET /health: 200 when requests are served, 503 while loading, draining or after a failure. Called
 * by http.c. */
#include <string.h>

#include "base/json.h"
#include "server/http.h"

static nb_status write_loading(const nbi_server *server, nbi_buf *out)
{
    uint64_t done = atomic_load(&server->load_done), total = atomic_load(&server->load_total);
    return nbi_buf_addf(
        out,
        "{\"status\":\"loading\",\"state\":\"loading\",\"loaded_bytes\":%llu,\"total_bytes\":%llu,"
        "\"progress\":%.3f}",
        (unsigned long long)done, (unsigned long long)total,
        total ? (double)done / (double)total : 0.0);
}

static nb_status write_failed(const char *why, nbi_buf *out)
{
    NB_TRY(nbi_buf_addf(out, "{\"status\":\"failed\",\"state\":\"failed\",\"error\":"));
    NB_TRY(nbi_json_quote(out, why, strlen(why)));
    return nbi_buf_add(out, "}", 1);
}

static nb_status write_ready(nb_engine *engine, nbi_buf *out)
{
    nb_engine_stats stats;
    nb_engine_get_stats(engine, &stats);
    return nbi_buf_addf(out,
                        "{\"status\":\"ok\",\"state\":\"ready\",\"running\":%u,\"waiting\":%u,\"kv_"
                        "tokens_used\":%llu}",
                        stats.n_running, stats.n_waiting, (unsigned long long)stats.kv_tokens_used);
}

unsigned nbi_get_health(nbi_exchange *ex, nbi_buf *out)
{
    nbi_server *server = ex->server;
    unsigned http = 503;
    nb_status status;
    switch (atomic_load(&server->phase)) {
    case NBI_SERVER_LOADING: status = write_loading(server, out); break;
    case NBI_SERVER_READY: {
        const char *why = nb_engine_failure(server->served->engine);
        http = why ? 503 : 200;
        status = why ? write_failed(why, out) : write_ready(server->served->engine, out);
        break;
    }
    default:
        status =
            nbi_buf_addf(out, "{\"status\":\"draining\",\"state\":\"draining\",\"requests\":%u}",
                         nbi_server_owed(server));
        break;
    }
    if (status == NB_OK) return http;
    nbi_api_no_memory(&ex->error, "the reply");
    return 0;
}
