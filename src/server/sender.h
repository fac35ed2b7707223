/* The sender thread: moves jobs on and writes streams while their connections are suspended.
 *
 * libmicrohttpd needs a wake-up, two looks at epoll and a read for every piece of a stream. While a
 * connection is suspended it leaves the socket alone, so this thread writes the chunks itself: one
 * wake-up per step of the engine, whatever the number of streams, and one send for each of them.
 * For one or two streams the engine's thread does it between two steps, without a wake-up.
 * The end of a reply, errors and everything of encrypted or HTTP/1.0 connections stay with
 * libmicrohttpd.
 *
 * Ownership: an exchange with `direct` set is the sender's, that is, of the thread that has the
 * turn; it is given back by resuming its connection. Locks: the turn, the server's, the exchange's,
 * the sender's. */
#pragma once

#include "server/exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

nb_status nbi_sender_start(nbi_server *server, nb_error *err);
/* Gives back every exchange and ends the thread; from here on no exchange goes to it. NULL is
 * fine. */
void nbi_sender_stop(nbi_server *server);
void nbi_sender_free(nbi_server *server);

/* Gives the exchange to the sender if it may go there. Called with the exchange's lock held. */
bool nbi_sender_take(nbi_exchange *ex);
/* Queues an exchange that the sender has; does not wake it. Called with the exchange's lock held.
 */
void nbi_sender_push(nbi_exchange *ex);
/* Wakes the thread when something is queued. */
void nbi_sender_kick(nbi_server *server);
/* For nb_engine_on_step(): works on one or two exchanges here and now, which is cheaper than to
 * wake a thread, and leaves more of them to the sender. Never waits. `server` is an nbi_server. */
void nbi_sender_after_step(void *server);

#ifdef __cplusplus
}
#endif
