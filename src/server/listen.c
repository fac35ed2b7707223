/* The listening socket. Called by server.c. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/server_state.h"

#define BACKLOG 1024

/* Binds the first address that works; *why is errno of the last that did not. */
static int bind_first(const struct addrinfo *list, int *why)
{
    *why = EADDRNOTAVAIL;
    for (const struct addrinfo *a = list; a; a = a->ai_next) {
        int on = 1;
        int fd =
            socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
        if (fd < 0) {
            *why = errno;
            continue;
        }
        /* A port in TIME_WAIT is free; one that somebody listens on is not. */
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0) return fd;
        *why = errno;
        close(fd);
    }
    return -1;
}

static uint16_t port_of(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } address = {0};
    socklen_t n = sizeof address;
    if (getsockname(fd, &address.any, &n) != 0) return 0;
    return ntohs(address.any.sa_family == AF_INET6 ? address.v6.sin6_port : address.v4.sin_port);
}

nb_status nbi_listen(int *fd, uint16_t *port, const nbi_server_options *options, nb_error *err)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    char service[8];
    int why;
    snprintf(service, sizeof service, "%u", options->port);
    int failed = getaddrinfo(options->host, service, &hints, &list);
    if (failed) {
        return nbi_fail(err, NB_INVALID, "host \"%s\" is not an address of this machine: %s",
                        options->host, gai_strerror(failed));
    }
    int bound = bind_first(list, &why);
    freeaddrinfo(list);
    if (bound < 0 && why == EADDRINUSE) {
        return nbi_fail(err, NB_IO,
                        "port %u on %s is in use by another process; choose another with --port",
                        options->port, options->host);
    }
    if (bound < 0) {
        return nbi_fail(err, NB_IO, "cannot listen on %s port %u: %s", options->host, options->port,
                        strerror(why));
    }
    *fd = bound;
    *port = port_of(bound);
    return NB_OK;
}
