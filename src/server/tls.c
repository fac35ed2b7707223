/* Certificates (see tls.h). Called by http.c and server.c. */
#include "server/tls.h"

#include <gnutls/abstract.h>
#include <gnutls/x509.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"

#define FILE_BYTES_MAX ((size_t)1 << 20)
#define CHAIN_MAX      16
#define KEY_ID_BYTES   64

/* One state of the files. */
typedef struct identity {
    gnutls_pcert_st chain[CHAIN_MAX]; /* [n_chain] the server's own first */
    unsigned n_chain;
    gnutls_privkey_t key;
    char *cert_text, *key_text; /* what was read, to see a change */
    size_t n_cert_text, n_key_text;
    struct identity *next; /* replaced before this one */
    uint64_t replaced_ns;
} identity;

struct nbi_tls {
    const char *certfile, *keyfile;
    uint64_t keep_ns;
    pthread_mutex_t lock; /* guards the rest */
    identity *now;        /* and behind it those that a handshake may still use */
};

static _Atomic(nbi_tls *) the_tls;

/* ---------------------------------------------------------------- reading */

static void identity_free(identity *id)
{
    if (!id) return;
    for (unsigned i = 0; i < id->n_chain; i++) gnutls_pcert_deinit(&id->chain[i]);
    if (id->key) gnutls_privkey_deinit(id->key);
    if (id->key_text) explicit_bzero(id->key_text, id->n_key_text);
    nbi_free(id->cert_text);
    nbi_free(id->key_text);
    nbi_free(id);
}

static gnutls_datum_t datum(char *text, size_t n)
{
    return (gnutls_datum_t){.data = (unsigned char *)text, .size = (unsigned)n};
}

static nb_status read_chain(identity *id, const char *path, nb_error *err)
{
    gnutls_datum_t pem = datum(id->cert_text, id->n_cert_text);
    unsigned n = CHAIN_MAX;
    int rc = gnutls_pcert_list_import_x509_raw(id->chain, &n, &pem, GNUTLS_X509_FMT_PEM,
                                               GNUTLS_X509_CRT_LIST_FAIL_IF_UNSORTED);
    if (rc < 0) {
        return nbi_fail(err, NB_INVALID,
                        "--ssl-certfile %s: %s; expected at most %d PEM "
                        "certificates, the server's first",
                        path, gnutls_strerror(rc), CHAIN_MAX);
    }
    id->n_chain = n;
    return NB_OK;
}

static nb_status read_key(identity *id, const char *path, const char *flag, nb_error *err)
{
    gnutls_datum_t pem = datum(id->key_text, id->n_key_text);
    int rc = gnutls_privkey_init(&id->key);
    if (rc == 0) rc = gnutls_privkey_import_x509_raw(id->key, &pem, GNUTLS_X509_FMT_PEM, NULL, 0);
    if (rc == 0) return NB_OK;
    if (rc == GNUTLS_E_DECRYPTION_FAILED || strstr(id->key_text, "ENCRYPTED")) {
        return nbi_fail(err, NB_UNSUPPORTED,
                        "%s %s: the key is protected by a passphrase, which nibble does not ask "
                        "for; expected a key without one (openssl pkey -in OLD -out NEW)",
                        flag, path);
    }
    return nbi_fail(err, NB_INVALID, "%s %s: no private key can be read: %s; expected PEM", flag,
                    path, gnutls_strerror(rc));
}

/* Are they two halves? */
static nb_status check_pair(const identity *id, const nbi_tls *tls, nb_error *err)
{
    unsigned char a[KEY_ID_BYTES] = {0}, b[KEY_ID_BYTES] = {0};
    size_t n_a = sizeof a, n_b = sizeof b;
    gnutls_pubkey_t half = NULL;
    int rc = gnutls_pubkey_init(&half);
    if (rc == 0) rc = gnutls_pubkey_import_privkey(half, id->key, 0, 0);
    if (rc == 0) rc = gnutls_pubkey_get_key_id(half, GNUTLS_KEYID_USE_SHA256, a, &n_a);
    if (rc == 0) {
        rc = gnutls_pubkey_get_key_id(id->chain[0].pubkey, GNUTLS_KEYID_USE_SHA256, b, &n_b);
    }
    if (half) gnutls_pubkey_deinit(half);
    if (rc != 0) {
        return nbi_fail(err, NB_INVALID, "--ssl-certfile %s: %s", tls->certfile,
                        gnutls_strerror(rc));
    }
    if (n_a == n_b && memcmp(a, b, n_a) == 0) return NB_OK;
    return nbi_fail(err, NB_INVALID,
                    "the key in --ssl-keyfile %s does not belong to the first certificate in "
                    "--ssl-certfile %s",
                    tls->keyfile ? tls->keyfile : tls->certfile, tls->certfile);
}

/* A certificate out of its time is used all the same: clients say so themselves. */
static void warn_about_time(const identity *id, const char *path)
{
    gnutls_x509_crt_t crt;
    time_t now = time(NULL);
    if (gnutls_x509_crt_init(&crt) != 0) return;
    if (gnutls_x509_crt_import(crt, &id->chain[0].cert, GNUTLS_X509_FMT_DER) == 0) {
        if (gnutls_x509_crt_get_expiration_time(crt) < now) {
            nbi_log(NB_LOG_WARN, "--ssl-certfile %s: the certificate has expired", path);
        } else if (gnutls_x509_crt_get_activation_time(crt) > now) {
            nbi_log(NB_LOG_WARN, "--ssl-certfile %s: the certificate is not valid yet", path);
        }
    }
    gnutls_x509_crt_deinit(crt);
}

static nb_status fill(identity *id, const nbi_tls *tls, nb_error *err)
{
    const char *key = tls->keyfile ? tls->keyfile : tls->certfile;
    const char *flag = tls->keyfile ? "--ssl-keyfile" : "--ssl-certfile";
    nb_status status =
        nbi_file_read(&id->cert_text, &id->n_cert_text, tls->certfile, FILE_BYTES_MAX, err);
    if (status != NB_OK) return nbi_fail_prefix(err, status, "--ssl-certfile");
    status = nbi_file_read(&id->key_text, &id->n_key_text, key, FILE_BYTES_MAX, err);
    if (status != NB_OK) return nbi_fail_prefix(err, status, "%s", flag);
    NB_TRY(read_chain(id, tls->certfile, err));
    NB_TRY(read_key(id, key, flag, err));
    return check_pair(id, tls, err);
}

static nb_status identity_read(identity **out, const nbi_tls *tls, nb_error *err)
{
    identity *id = nbi_calloc(1, sizeof *id);
    if (!id) return nbi_fail(err, NB_NO_MEMORY, "no memory for the certificate");
    nb_status status = fill(id, tls, err);
    if (status != NB_OK) {
        identity_free(id);
        return status;
    }
    *out = id;
    return NB_OK;
}

/* ---------------------------------------------------------------- handshakes */

/* A gnutls_certificate_retrieve_function2: what it gives stays ours. */
static int choose(gnutls_session_t session, const gnutls_datum_t *authorities, int n_authorities,
                  const gnutls_pk_algorithm_t *algorithms, int n_algorithms,
                  gnutls_pcert_st **chain, unsigned *n_chain, gnutls_privkey_t *key)
{
    (void)session;
    (void)authorities;
    (void)n_authorities;
    (void)algorithms;
    (void)n_algorithms;
    nbi_tls *tls = atomic_load(&the_tls);
    if (!tls) return -1;
    pthread_mutex_lock(&tls->lock);
    *chain = tls->now->chain;
    *n_chain = tls->now->n_chain;
    *key = tls->now->key;
    pthread_mutex_unlock(&tls->lock);
    return 0;
}

void *nbi_tls_callback(void)
{
    gnutls_certificate_retrieve_function2 *function = choose;
    void *out;
    memcpy(&out, &function, sizeof out); /* ISO C has no such cast, POSIX has the size */
    return out;
}

/* ---------------------------------------------------------------- life */

/* Frees what was replaced so long ago that no handshake uses it. Called with the lock held. */
static void drop_old(nbi_tls *tls, uint64_t now)
{
    identity **link = &tls->now->next;
    while (*link) {
        identity *old = *link;
        if (now - old->replaced_ns < tls->keep_ns) {
            link = &old->next;
            continue;
        }
        *link = old->next;
        identity_free(old);
    }
}

static bool same_text(const identity *a, const identity *b)
{
    return a->n_cert_text == b->n_cert_text && a->n_key_text == b->n_key_text &&
           memcmp(a->cert_text, b->cert_text, a->n_cert_text) == 0 &&
           memcmp(a->key_text, b->key_text, a->n_key_text) == 0;
}

nb_status nbi_tls_reload(nbi_tls *tls, bool *changed, nb_error *err)
{
    identity *id = NULL;
    NB_TRY(identity_read(&id, tls, err));
    warn_about_time(id, tls->certfile);
    uint64_t now = nbi_now_ns();
    pthread_mutex_lock(&tls->lock);
    bool is_new = !same_text(id, tls->now);
    if (is_new) {
        tls->now->replaced_ns = now;
        id->next = tls->now;
        tls->now = id;
    }
    drop_old(tls, now);
    pthread_mutex_unlock(&tls->lock);
    if (!is_new) identity_free(id);
    if (changed) *changed = is_new;
    return NB_OK;
}

nb_status nbi_tls_open(nbi_tls **out, const char *certfile, const char *keyfile,
                       uint32_t handshake_s, nb_error *err)
{
    nbi_tls *tls = nbi_calloc(1, sizeof *tls), *none = NULL;
    if (!tls || pthread_mutex_init(&tls->lock, NULL) != 0) {
        nbi_free(tls);
        return nbi_fail(err, NB_NO_MEMORY, "no memory for the certificate");
    }
    tls->certfile = certfile;
    tls->keyfile = keyfile;
    tls->keep_ns = ((uint64_t)handshake_s + 60) * 1000000000u;
    nb_status status = identity_read(&tls->now, tls, err);
    if (status == NB_OK && !atomic_compare_exchange_strong(&the_tls, &none, tls)) {
        status = nbi_fail(err, NB_BUSY, "another server of this process uses HTTPS");
    }
    if (status != NB_OK) {
        nbi_tls_close(&tls);
        return status;
    }
    warn_about_time(tls->now, certfile);
    *out = tls;
    return NB_OK;
}

void nbi_tls_close(nbi_tls **out)
{
    nbi_tls *tls = *out, *mine = *out;
    if (!tls) return;
    atomic_compare_exchange_strong(&the_tls, &mine, NULL);
    while (tls->now) {
        identity *id = tls->now;
        tls->now = id->next;
        identity_free(id);
    }
    pthread_mutex_destroy(&tls->lock);
    nbi_free(tls);
    *out = NULL;
}
