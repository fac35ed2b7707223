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
/* What the kernel keeps for a client that does not read; it may take twice that for its own
 * accounts. Left to itself it grows to megabytes per connection. */
#define SEND_BYTES (256 << 10)

/* Binds the first address that works; *why is errno of the last that did not. */
static int bind_first(const struct addrinfo *list, int *why)
{
    *why = EADDRNOTAVAIL;
    for (const struct addrinfo *a = list; a; a = a->ai_next) {
        int on = 1, sent = SEND_BYTES;
        int fd =
            socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
        if (fd < 0) {
            *why = errno;
            continue;
        }
        /* A port in TIME_WAIT is free; one that somebody listens on is not. */
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &sent, sizeof sent); /* connections inherit it */
        if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0) return fd;
        *why = errno;
        close(fd);
    }
    return -1;
}

typedef union local_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
} local_address;

static bool address_of(local_address *out, int fd)
{
    socklen_t n = sizeof *out;
    *out = (local_address){0};
    return getsockname(fd, &out->any, &n) == 0;
}

static uint16_t port_of(int fd)
{
    local_address a;
    if (!address_of(&a, fd)) return 0;
    return ntohs(a.any.sa_family == AF_INET6 ? a.v6.sin6_port : a.v4.sin_port);
}

bool nbi_is_loopback(int fd)
{
    local_address a;
    if (!address_of(&a, fd)) return false;
    if (a.any.sa_family == AF_INET) return ntohl(a.v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    if (a.any.sa_family != AF_INET6) return false;
    if (IN6_IS_ADDR_V4MAPPED(&a.v6.sin6_addr)) return a.v6.sin6_addr.s6_addr[12] == IN_LOOPBACKNET;
    return IN6_IS_ADDR_LOOPBACK(&a.v6.sin6_addr);
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
