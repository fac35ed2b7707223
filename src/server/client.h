/* Who a request comes from, for turns in the queue: a number per API key, or per address where the
 * server has no keys. An IPv6 client is its /64 network. */
#pragma once

#include "server/exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `key`: the one that was given and found right; NULL: none is needed. */
uint64_t nbi_client_of(const nbi_exchange *ex, const char *key);

#ifdef __cplusplus
}
#endif
