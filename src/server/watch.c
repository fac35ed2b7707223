/* The watcher thread: clients that left, and clients that are too slow. Called by exchange.c and
 * server.c. */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "server/exchange.h"

#define EVENTS_PER_WAIT 64

void nbi_watch_add(nbi_exchange *ex)
{
    struct epoll_event event = {.events = EPOLLRDHUP | EPOLLONESHOT, .data.u64 = ex->serial};
    int fd = ex->socket;
    if (ex->watched || fd < 0) return;
    /* When it fails the client's leaving is noticed later, at the next write. */
    ex->watched = epoll_ctl(ex->server->watch_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

void nbi_watch_remove(nbi_exchange *ex)
{
    int fd = ex->socket;
    if (ex->watched && fd >= 0) epoll_ctl(ex->server->watch_fd, EPOLL_CTL_DEL, fd, NULL);
    ex->watched = false;
}

void nbi_watch_writable(nbi_exchange *ex, bool wanted)
{
    uint32_t events = EPOLLRDHUP | EPOLLONESHOT | (wanted ? EPOLLOUT : 0u);
    struct epoll_event event = {.events = events, .data.u64 = ex->serial};
    if (ex->watched) epoll_ctl(ex->server->watch_fd, EPOLL_CTL_MOD, ex->socket, &event);
}

/* The serial may be of an exchange that has ended meanwhile. */
static void on_event(nbi_server *server, uint64_t serial, uint32_t events)
{
    pthread_mutex_lock(&server->lock);
    for (nbi_exchange *ex = server->live; ex; ex = ex->next) {
        if (ex->serial != serial) continue;
        if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {
            atomic_store(&ex->gone, true);
            nbi_job_cancel(ex->job); /* it was watched, so it has one */
        }
        atomic_store(&ex->writable, true);
        nbi_exchange_wake(ex);
        break;
    }
    pthread_mutex_unlock(&server->lock);
}

static void *run(void *arg)
{
    nbi_server *server = arg;
    struct epoll_event events[EVENTS_PER_WAIT];
    for (;;) {
        int next_ms = nbi_peers_cut_late(&server->peers);
        int n = epoll_wait(server->watch_fd, events, EVENTS_PER_WAIT, next_ms);
        if (n < 0 && errno != EINTR) return NULL;
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == 0) return NULL; /* watch_stop */
            on_event(server, events[i].data.u64, events[i].events);
        }
    }
}

nb_status nbi_watch_start(nbi_server *server, nb_error *err)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0};
    server->watch_fd = epoll_create1(EPOLL_CLOEXEC);
    server->watch_stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->watch_fd < 0 || server->watch_stop < 0 ||
        epoll_ctl(server->watch_fd, EPOLL_CTL_ADD, server->watch_stop, &event) != 0) {
        return nbi_fail(err, NB_IO, "cannot watch connections: %s", strerror(errno));
    }
    int failed = pthread_create(&server->watch_thread, NULL, run, server);
    if (failed) return nbi_fail(err, NB_IO, "cannot start a thread: %s", strerror(failed));
    server->has_watch_thread = true;
    return NB_OK;
}

void nbi_watch_stop(nbi_server *server)
{
    uint64_t one = 1;
    if (server->has_watch_thread) {
        while (write(server->watch_stop, &one, sizeof one) < 0 && errno == EINTR) continue;
        pthread_join(server->watch_thread, NULL);
        server->has_watch_thread = false;
    }
    if (server->watch_fd >= 0) close(server->watch_fd);
    if (server->watch_stop >= 0) close(server->watch_stop);
    server->watch_fd = server->watch_stop = -1;
}
