/* Deadlines and counts of connections (see peers.h). Called by http.c, exchange.c and watch.c. */
#include "server/peers.h"

#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/log.h"

#define SECOND        1000000000u /* ns */
#define REPLY_RATE    1024u       /* bytes per second that a client has to take at least */
#define TICK_MS_MIN   50
#define TICK_MS_MAX   1000
#define REFUSE_LOG_NS ((uint64_t)10 * SECOND) /* between two lines about refused connections */

struct nbi_peer {
    nbi_peer *prev, *next;
    nbi_address from;
    int fd;
    nbi_peer_step step;
    uint64_t deadline_ns; /* 0: none */
    bool cut;
};

/* ---------------------------------------------------------------- addresses */

nbi_address nbi_address_of(const struct sockaddr *sa)
{
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    nbi_address out = {{0}};
    if (!sa) return out;
    memcpy(out.bytes, mapped, sizeof mapped);
    if (sa->sa_family == AF_INET) {
        struct sockaddr_in v4;
        memcpy(&v4, sa, sizeof v4);
        memcpy(out.bytes + 12, &v4.sin_addr, 4);
    } else if (sa->sa_family == AF_INET6) {
        struct sockaddr_in6 v6;
        memcpy(&v6, sa, sizeof v6);
        bool is_v4 = memcmp(&v6.sin6_addr, mapped, sizeof mapped) == 0;
        memset(out.bytes, 0, sizeof out.bytes);
        memcpy(out.bytes, &v6.sin6_addr, is_v4 ? 16 : 8);
    }
    return out;
}

/* Called with the lock held. */
static uint32_t count_from(const nbi_peers *peers, const nbi_address *from)
{
    uint32_t n = 0;
    for (const nbi_peer *p = peers->first; p; p = p->next) {
        n += memcmp(&p->from, from, sizeof *from) == 0;
    }
    return n;
}

/* Called with the lock held. */
static void log_refusal(nbi_peers *peers)
{
    uint64_t now = nbi_now_ns();
    peers->n_refused++;
    if (peers->refused_log_ns && now - peers->refused_log_ns < REFUSE_LOG_NS) return;
    nbi_log(NB_LOG_WARN,
            "%u connections refused: their addresses have %u already "
            "(--max-connections-per-address)",
            peers->n_refused, peers->options.max_per_address);
    peers->refused_log_ns = now;
    peers->n_refused = 0;
}

/* Two threads may let in one each at the same time: enter() looks again. */
enum MHD_Result nbi_peers_accept(void *cls, const struct sockaddr *sa, socklen_t n_sa)
{
    nbi_peers *peers = cls;
    nbi_address from = nbi_address_of(n_sa ? sa : NULL);
    if (!peers->options.max_per_address) return MHD_YES;
    pthread_mutex_lock(&peers->lock);
    bool fits = count_from(peers, &from) < peers->options.max_per_address;
    if (!fits) log_refusal(peers);
    pthread_mutex_unlock(&peers->lock);
    return fits ? MHD_YES : MHD_NO;
}

/* ---------------------------------------------------------------- steps */

static uint64_t seconds_of(const nbi_peers *peers, nbi_peer_step step, uint64_t n_bytes)
{
    const nbi_peers_options *o = &peers->options;
    switch (step) {
    case NBI_PEER_HEADERS: return o->header_timeout_s;
    case NBI_PEER_BODY: return o->body_timeout_s;
    case NBI_PEER_REPLY: return o->idle_timeout_s + n_bytes / REPLY_RATE;
    case NBI_PEER_KEPT: return (uint64_t)o->idle_timeout_s + o->header_timeout_s;
    default: return 0;
    }
}

/* Called with the lock held. */
static void begin_step(const nbi_peers *peers, nbi_peer *p, nbi_peer_step step, uint64_t n_bytes)
{
    uint64_t seconds = seconds_of(peers, step, n_bytes);
    p->step = step;
    p->deadline_ns = step == NBI_PEER_WORK ? 0 : nbi_now_ns() + seconds * SECOND;
}

static nbi_peer *peer_of(struct MHD_Connection *conn)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

void nbi_peers_step(nbi_peers *peers, struct MHD_Connection *conn, nbi_peer_step step,
                    uint64_t n_bytes)
{
    nbi_peer *p = peer_of(conn);
    if (!p) return; /* there was no memory for it */
    pthread_mutex_lock(&peers->lock);
    begin_step(peers, p, step, n_bytes);
    pthread_mutex_unlock(&peers->lock);
}

/* Its thread sees the end and closes. Called with the lock held. */
static void cut(nbi_peer *p)
{
    p->cut = true;
    shutdown(p->fd, SHUT_RDWR);
}

int nbi_peers_cut_late(nbi_peers *peers)
{
    static const char *const what[] = {"the headers", "the body", "work", "taking the reply",
                                       "the next request"};
    const nbi_peers_options *o = &peers->options;
    uint64_t now = nbi_now_ns(), shortest = o->header_timeout_s;
    pthread_mutex_lock(&peers->lock);
    for (nbi_peer *p = peers->first; p; p = p->next) {
        if (p->cut || !p->deadline_ns || now < p->deadline_ns) continue;
        cut(p);
        nbi_log(NB_LOG_DEBUG, "http: a connection is cut: %s took too long", what[p->step]);
    }
    pthread_mutex_unlock(&peers->lock);
    if (o->body_timeout_s < shortest) shortest = o->body_timeout_s;
    if (o->idle_timeout_s < shortest) shortest = o->idle_timeout_s;
    uint64_t tick = shortest * 1000 / 8;
    if (tick < TICK_MS_MIN) return TICK_MS_MIN;
    return tick > TICK_MS_MAX ? TICK_MS_MAX : (int)tick;
}

/* ---------------------------------------------------------------- life */

static void enter(nbi_peers *peers, struct MHD_Connection *conn, void **slot)
{
    const union MHD_ConnectionInfo *from =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    const union MHD_ConnectionInfo *fd =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CONNECTION_FD);
    nbi_peer *p = fd ? nbi_calloc(1, sizeof *p) : NULL;
    if (!p) return; /* the idle timeout of libmicrohttpd is left */
    p->fd = fd->connect_fd;
    p->from = nbi_address_of(from ? from->client_addr : NULL);
    *slot = p;
    pthread_mutex_lock(&peers->lock);
    begin_step(peers, p, NBI_PEER_HEADERS, 0);
    p->next = peers->first;
    if (p->next) p->next->prev = p;
    peers->first = p;
    peers->n++;
    uint32_t max = peers->options.max_per_address;
    if (max && count_from(peers, &p->from) > max) {
        log_refusal(peers);
        cut(p);
    }
    pthread_mutex_unlock(&peers->lock);
}

/* Before the socket is closed: its number cannot be another's while it is in the list. */
static void leave(nbi_peers *peers, nbi_peer *p)
{
    pthread_mutex_lock(&peers->lock);
    if (p->prev) {
        p->prev->next = p->next;
    } else {
        peers->first = p->next;
    }
    if (p->next) p->next->prev = p->prev;
    peers->n--;
    pthread_mutex_unlock(&peers->lock);
    nbi_free(p);
}

void nbi_peers_notify(void *cls, struct MHD_Connection *conn, void **slot,
                      enum MHD_ConnectionNotificationCode code)
{
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        enter(cls, conn, slot);
    } else if (*slot) {
        leave(cls, *slot);
        *slot = NULL;
    }
}

uint32_t nbi_peers_count(nbi_peers *peers)
{
    pthread_mutex_lock(&peers->lock);
    uint32_t n = peers->n;
    pthread_mutex_unlock(&peers->lock);
    return n;
}

nb_status nbi_peers_init(nbi_peers *peers, const nbi_peers_options *options, nb_error *err)
{
    *peers = (nbi_peers){.options = *options};
    if (pthread_mutex_init(&peers->lock, NULL) == 0) return NB_OK;
    return nbi_fail(err, NB_NO_MEMORY, "no memory for the table of connections");
}

void nbi_peers_deinit(nbi_peers *peers)
{
    pthread_mutex_destroy(&peers->lock);
}
