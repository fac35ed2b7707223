/* The end of a server in order. Called by the serve command. */
#include "server/exchange.h"
#include "server/http.h"

void nbi_server_drain(nbi_server *server)
{
    int phase = atomic_load(&server->phase);
    while (phase < NBI_SERVER_DRAINING &&
           !atomic_compare_exchange_weak(&server->phase, &phase, NBI_SERVER_DRAINING)) {
        continue;
    }
}

uint32_t nbi_server_owed(nbi_server *server)
{
    uint32_t n = 0;
    pthread_mutex_lock(&server->lock);
    for (const nbi_exchange *ex = server->live; ex; ex = ex->next) {
        /* the route is set before the exchange counts as started */
        n += atomic_load(&ex->started) && ex->route && ex->route->surface;
    }
    pthread_mutex_unlock(&server->lock);
    return n;
}

void nbi_server_flush_logs(nbi_server *server)
{
    nbi_linelog_flush(server->access_log);
    nbi_linelog_flush(server->request_log);
}
