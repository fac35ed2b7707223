/* Clients as numbers (client.h). Called by http.c. */
#include "server/client.h"

#include <string.h>

#include "server/peers.h"

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
    nbi_address from = nbi_address_of(info ? info->client_addr : NULL);
    return mix(hash, from.bytes, sizeof from.bytes);
}
