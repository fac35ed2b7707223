/* The server from inside. Private to src/server.
 *
 * `lock` guards the list of exchanges. `served` is written once, before `state` becomes ready, and
 * read only when it is. */
#pragma once

#include <microhttpd.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

#include "base/linelog.h"
#include "server/auth.h"
#include "server/peers.h"
#include "server/profiling.h"
#include "server/served.h"
#include "server/server.h"
#include "server/tls.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_exchange nbi_exchange;
typedef struct nbi_sender nbi_sender;

typedef enum nbi_server_phase {
    NBI_SERVER_LOADING,
    NBI_SERVER_READY,
    NBI_SERVER_DRAINING, /* what was begun goes on, nothing new is taken */
    NBI_SERVER_STOPPING
} nbi_server_phase;

struct nbi_server {
    nbi_server_options options;
    uint16_t port;
    struct MHD_Daemon *daemon;
    int quiesced_fd; /* the listening socket once the server ends */
    nbi_keys *keys;
    nbi_tls *tls; /* NULL: plain HTTP */
    nbi_peers peers;
    bool has_peers;
    atomic_uint_fast64_t buffered; /* bytes of bodies that are not yet read whole */
    atomic_int phase;              /* nbi_server_phase */
    atomic_uint_fast64_t load_done, load_total;
    uint64_t load_logged_ns; /* when the log last heard of the load; the loading thread's */
    nbi_served *served;
    atomic_bool served_there; /* `served` may be read whatever the phase */

    nbi_linelog *access_log, *request_log; /* NULL: not asked for */
    struct nbi_http_counts *http_counts;
    struct nbi_reporter *reporter;
    nbi_profiling profiling;
    atomic_uint_fast64_t reasoning_tokens; /* of requests that have ended */

    bool preparing; /* a detached thread does; the loading thread's, like all that follows */
    sem_t prepared; /* posted when it is done */
    const char *prepare_dir;
    nbi_served_text text; /* the prepare thread's until it is joined */
    nb_status text_status;
    nb_error text_error;

    pthread_mutex_t lock;
    pthread_cond_t drained; /* an exchange left the list of a server that is ending */
    nbi_exchange *live;
    uint64_t next_serial;

    nbi_sender *sender; /* NULL before nbi_sender_start() */

    int watch_fd;   /* epoll: clients that may leave */
    int watch_stop; /* eventfd */
    bool has_watch_thread;
    pthread_t watch_thread;
};

/* ---- listen.c */

/* A listening socket on options.host and options.port; *port is the one it got. */
nb_status nbi_listen(int *fd, uint16_t *port, const nbi_server_options *options, nb_error *err);

/* Does the socket take only connections of this machine? */
bool nbi_is_loopback(int fd);

/* ---- http.c */

nb_status nbi_http_start(nbi_server *server, int listen_fd, nb_error *err);

/* ---- watch.c: notices clients that leave while their connection is suspended, when libmicrohttpd
 * does not look at the socket. Half a close counts: it cannot be told from a whole one. */

nb_status nbi_watch_start(nbi_server *server, nb_error *err);
void nbi_watch_stop(nbi_server *server);
void nbi_watch_add(nbi_exchange *ex);
void nbi_watch_remove(nbi_exchange *ex);
/* Watches for room in the socket's buffer too, until it is there; or looks for the leaving only. */
void nbi_watch_writable(nbi_exchange *ex, bool wanted);

#ifdef __cplusplus
}
#endif
