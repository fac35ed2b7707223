/* Devices of ranks: which one a rank takes, and the exchange that a device does by itself. Callers:
 * whoever opens a backend for a rank; model/model.c. */
#pragma once

#include "backend/backend.h"
#include "comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What ranks mean for the options of a backend; nothing without a comm. */
void nbi_comm_device(const nbi_comm *comm, nbi_backend_options *o);

/* Collective: the backend's own exchange (nbi_backend_ops.join); nothing where memory of the device
 * is the host's. The comm outlives the backend. */
nb_status nbi_comm_join_device(nbi_comm *comm, nbi_backend *b, nb_error *err);

#ifdef __cplusplus
}
#endif
