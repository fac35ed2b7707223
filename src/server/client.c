/* Clients as numbers (client.h). Called by http.c. */
#include "server/client.h"

#include <netinet/in.h>
#include <string.h>

/* FNV-1a. */
static uint64_t mix(uint64_t hash, const void *data, size_t n)
{
    const unsigned char *bytes = data;
    for (size_t i = 0; i < n; i++) hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}

uint64_t nbi_client_of(const nbi_exchange *ex, const char *key)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    if (key) return mix(hash, key, strlen(key));
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(ex->conn, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    if (!info || !info->client_addr) return hash;
    if (info->client_addr->sa_family == AF_INET) {
        struct sockaddr_in v4;
        memcpy(&v4, info->client_addr, sizeof v4);
        return mix(hash, &v4.sin_addr, sizeof v4.sin_addr);
    }
    if (info->client_addr->sa_family == AF_INET6) {
        struct sockaddr_in6 v6;
        memcpy(&v6, info->client_addr, sizeof v6);
        const unsigned char *bytes = v6.sin6_addr.s6_addr;
        return IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr) ? mix(hash, bytes + 12, 4) : mix(hash, bytes, 8);
    }
    return hash;
}
