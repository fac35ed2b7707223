/* Connections: who they come from and how long they may take.
 *
 * No thread waits for a connection, so a slow client costs only its place. What it may hold is
 * bounded by a deadline for every step: the handshake and the headers, the body, taking the reply.
 * Bytes that trickle do not move a deadline. The watcher thread cuts connections that miss theirs.
 */
#pragma once

#include <microhttpd.h>
#include <pthread.h>

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_peers_options {
    uint32_t header_timeout_s, body_timeout_s, idle_timeout_s; /* as in nbi_server_options */
    uint32_t max_per_address;                                  /* 0: no limit */
} nbi_peers_options;

/* IPv4 whole, also where it is mapped into IPv6; of IPv6 the 64 bits that one customer gets. */
typedef struct nbi_address {
    uint8_t bytes[16];
} nbi_address;

/* All zeros for NULL and for other families. */
nbi_address nbi_address_of(const struct sockaddr *sa);

/* What a connection is doing. */
typedef enum nbi_peer_step {
    NBI_PEER_HEADERS, /* handshake and headers of the first request: header timeout */
    NBI_PEER_BODY,    /* body timeout */
    NBI_PEER_WORK,    /* the server works: no deadline */
    NBI_PEER_REPLY,   /* takes n bytes: idle timeout, and more the larger they are */
    NBI_PEER_KEPT     /* idle and header timeout until the headers of the next request are there */
} nbi_peer_step;

typedef struct nbi_peer nbi_peer;

typedef struct nbi_peers {
    nbi_peers_options options;
    pthread_mutex_t lock; /* guards all of it */
    nbi_peer *first;
    uint32_t n, n_refused;   /* the second since the last log line about it */
    uint64_t refused_log_ns; /* when that was */
} nbi_peers;

nb_status nbi_peers_init(nbi_peers *peers, const nbi_peers_options *options, nb_error *err);
void nbi_peers_deinit(nbi_peers *peers);

/* For MHD_start_daemon() and MHD_OPTION_NOTIFY_CONNECTION; `cls` is the nbi_peers. */
enum MHD_Result nbi_peers_accept(void *cls, const struct sockaddr *address, socklen_t n_address);
void nbi_peers_notify(void *cls, struct MHD_Connection *conn, void **slot,
                      enum MHD_ConnectionNotificationCode code);

/* The connection begins a step; from its thread. `n_bytes` counts only for NBI_PEER_REPLY. */
void nbi_peers_step(nbi_peers *peers, struct MHD_Connection *conn, nbi_peer_step step,
                    uint64_t n_bytes);

/* Cuts what is late. Returns the milliseconds after which to call again. */
int nbi_peers_cut_late(nbi_peers *peers);

uint32_t nbi_peers_count(nbi_peers *peers);

#ifdef __cplusplus
}
#endif
