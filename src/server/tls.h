/* Certificate and key of HTTPS, which can be read again while connections run.
 *
 * GnuTLS's callback that chooses a certificate has no argument of its own, so there is at most one
 * of these in a process. */
#pragma once

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_tls nbi_tls;

/* PEM files: the server's certificate followed by those between it and the root, and its private
 * key (NULL: in the same file). `handshake_s`: no handshake takes longer, a certificate that was
 * replaced is freed after that. The names must live as long as the object. NB_INVALID names file
 * and reason: not PEM, a key with a passphrase, a key that belongs to another certificate. */
nb_status nbi_tls_open(nbi_tls **out, const char *certfile, const char *keyfile,
                       uint32_t handshake_s, nb_error *err);

/* Reads both files again: new handshakes use what they hold, connections that run are not touched.
 * On failure everything stays as it was. *changed may be NULL. Any thread. */
nb_status nbi_tls_reload(nbi_tls *tls, bool *changed, nb_error *err);

/* The value of MHD_OPTION_HTTPS_CERT_CALLBACK. */
void *nbi_tls_callback(void);

/* When no handshake can begin any more. NULL is fine. */
void nbi_tls_close(nbi_tls **tls);

#ifdef __cplusplus
}
#endif
