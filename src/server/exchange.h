/* One HTTP request and its reply, between libmicrohttpd and the API.
 *
 * Threads: an exchange belongs to the HTTP thread of its connection, and while that is suspended
 * with `direct` set, to the sender (sender.h). Three others touch it: the engine's thread
 * (nbi_exchange_wake), the watcher (finds it in the server's list by its serial, under the server's
 * lock) and nbi_server_stop() (likewise). It leaves that list before anything of it is freed, and
 * its requests are closed, after which the engine does not call, before it is.
 *
 * Waiting: a connection that has nothing to send is suspended, so that no thread waits for it;
 * nbi_exchange_wake() queues it for the sender or resumes it. `signalled` catches the wake-up that
 * comes before the suspension. */
#pragma once

#include <microhttpd.h>
#include <pthread.h>

#include "server/job.h"
#include "server/server_state.h"
#include "server/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_route nbi_route;

struct nbi_exchange {
    /* Touched for every piece of a stream: the first lines of the exchange, and no more. */
    pthread_mutex_t lock;
    bool signalled, suspended; /* under lock */
    bool direct;               /* under lock: suspended, and the sender's */
    bool watched;
    bool blocked;          /* the sender's: the client does not read */
    atomic_bool writable;  /* or perhaps reads again */
    atomic_bool gone;      /* the client has closed the connection */
    atomic_bool started;   /* the whole request is there: it is owed a reply */
    uint64_t queued_round; /* of the sender's queue, under its lock */
    uint32_t queued_at;
    int socket; /* of conn; -1: none */
    nbi_server *server;
    nbi_job *job; /* set under the server's lock */
    nbi_buf out;  /* stream: bytes for the client */
    size_t out_done;
    nbi_trace trace;

    struct MHD_Connection *conn;
    const nbi_route *route;
    const char *rest;          /* the URL behind the route's path; valid while the headers are */
    nbi_exchange *prev, *next; /* the server's list, under its lock */
    uint64_t serial;           /* never used twice */
    uint64_t begin_ns;
    atomic_uint_fast64_t look_ns; /* when the job wants to look at the clock; 0: never */

    bool preflight;    /* the reply says what other origins may (cors.h) */
    uint64_t buffered; /* what the body adds to server->buffered */
    nbi_buf body;
    uint64_t discarded;  /* body bytes dropped because the reply is decided */
    nbi_api_error error; /* http != 0: the reply is this */
    const char *allow;   /* 405: the methods of the path */
    bool is_post;
    const char *content_type; /* static; NULL: application/json */

    uint64_t client; /* nbi_client_of() */
    bool http_1_1;
    bool plain_chunks; /* the stream's chunks may be written to the socket by us */
    bool broken;       /* a chunk was sent in part and will not be completed */
};

/* NULL when out of memory. Enters the server's list. */
nbi_exchange *nbi_exchange_create(nbi_server *server, struct MHD_Connection *conn);
void nbi_exchange_destroy(nbi_exchange *ex);

/* Appends to the body. NB_TOO_LARGE: more than one may have; NB_BUSY: more than all may have
 * together; NB_NO_MEMORY. */
NBI_MUST_CHECK nb_status nbi_exchange_add_body(nbi_exchange *ex, const char *data, size_t n);
void nbi_exchange_drop_body(nbi_exchange *ex);

/* Something changed: work on it again. From any thread. */
void nbi_exchange_wake(nbi_exchange *ex);

/* Moves the job on as far as it goes; a stream's bytes go to ex->out. For who owns the exchange. */
void nbi_exchange_work(nbi_exchange *ex);
/* nbi_exchange_work() will be called soon: asks for the memory that it needs. `steps` from
 * NBI_EXCHANGE_STEPS down to 1, in that order, with other work between: each follows the pointers
 * that the one before asked for. */
#define NBI_EXCHANGE_STEPS 5u
void nbi_exchange_prefetch(const nbi_exchange *ex, uint32_t steps);

/* The body is there: begin the job and reply, or wait. */
enum MHD_Result nbi_exchange_begin(nbi_exchange *ex, const nbi_surface *surface);
/* After a wake-up of an exchange that has not replied yet. */
enum MHD_Result nbi_exchange_continue(nbi_exchange *ex);

/* Ends the running requests that are called `id`, all of them with NULL; returns how many answers
 * that were. */
uint32_t nbi_exchanges_abort(nbi_server *server, const char *id);

/* Queues a reply and takes the buffer's memory. */
enum MHD_Result nbi_exchange_reply(nbi_exchange *ex, unsigned http, nbi_buf *body);
/* Queues ex->error. */
enum MHD_Result nbi_exchange_reply_error(nbi_exchange *ex);

#ifdef __cplusplus
}
#endif
