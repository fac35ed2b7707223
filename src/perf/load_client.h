/* Many HTTP exchanges at a time in one thread: libcurl drives the protocol, epoll says which of
 * them has something. */
#pragma once

#include "base/json.h"
#include "perf/load_answer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nbi_load_client nbi_load_client;

typedef struct nbi_load_client_options {
    const char *base_url; /* "http://host:port", without a final '/'; https too */
    const char *api_key;  /* NULL: none */
    const char *ca_file;  /* NULL: the system's certificates */
    bool insecure;        /* certificates are not checked */
    double timeout_s;     /* of one exchange, > 0 */
    uint32_t max_streams; /* exchanges at a time that are expected; 0: not known */
} nbi_load_client_options;

/* One exchange; the caller's, alive and unmoved until `ended` has been called. */
typedef struct nbi_load_call {
    const char *path; /* "/v1/completions" */
    const char *body; /* JSON of a POST; NULL: GET */
    size_t body_bytes;
    bool raw;               /* the answer is any JSON, not that of a model */
    uint64_t sent_ns;       /* out: when it was handed over */
    nbi_load_answer answer; /* out; freed by the caller */
    /* The answer is settled. May start other calls. NULL: only flags it. */
    void (*ended)(struct nbi_load_call *call, void *user);
    void *user;
    bool over; /* out */
} nbi_load_call;

/* Raises the limit of open files when max_streams needs it. NB_UNSUPPORTED: no libcurl, no such
 * protocol; NB_TOO_LARGE: the limit cannot be raised far enough; NB_INVALID: base_url. */
nb_status nbi_load_client_create(nbi_load_client **out, const nbi_load_client_options *opt,
                                 nb_error *err);
/* Calls that are not over are dropped: their `ended` is not called. */
void nbi_load_client_destroy(nbi_load_client **client);

nb_status nbi_load_client_start(nbi_load_client *client, nbi_load_call *call, nb_error *err);

/* Lets things happen until something has or until_ns (of nbi_now_ns()) has come. */
nb_status nbi_load_client_wait(nbi_load_client *client, uint64_t until_ns, nb_error *err);

/* Starts the call and waits for its end: its failure is in the answer, not in the status. */
nb_status nbi_load_client_ask(nbi_load_client *client, nbi_load_call *call, nb_error *err);

/* The same for an exchange whose answer is any JSON. *out is NULL when that did not come: the
 * answer says why. */
nb_status nbi_load_client_fetch(nbi_load_client *client, nbi_load_call *call, json_t **out,
                                nb_error *err);

/* Nanoseconds since creation in which the thread had nothing to do. */
uint64_t nbi_load_client_idle_ns(const nbi_load_client *client);

#ifdef __cplusplus
}
#endif
