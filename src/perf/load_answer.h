/* One answer of an OpenAI-compatible server while it arrives: server-sent events or one JSON body,
 * as tokens, times and the way it failed. Foreign bytes: any input gives an answer or a failure. */
#pragma once

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kinds of failure, and what reports call them. */
#define NBI_LOAD_FAILURES(X)                                                             \
    X(NONE, "none")                                                                      \
    X(CONNECT, "connect")     /* no connection */                                        \
    X(TIMEOUT, "timeout")     /* not complete in time */                                 \
    X(CUT, "cut")             /* the connection or the stream ended before the answer */ \
    X(HTTP, "http")           /* a status other than 200 */                              \
    X(SERVER, "error event")  /* an error inside the stream or a 200 body */             \
    X(MALFORMED, "malformed") /* not what the API says */                                \
    X(OTHER, "other")

typedef enum nbi_load_failure {
#define NBI_LOAD_FAILURE_MEMBER(name, text) NBI_LOAD_##name,
    NBI_LOAD_FAILURES(NBI_LOAD_FAILURE_MEMBER)
#undef NBI_LOAD_FAILURE_MEMBER
        NBI_LOAD_FAILURE_COUNT
} nbi_load_failure;

const char *nbi_load_failure_name(nbi_load_failure kind);

/* A chunk is an event that carries output: text, reasoning or a piece of a tool call. Events with a
 * role, a finish_reason or usage only are none. Times are of the reads that brought the events. */
typedef struct nbi_load_answer {
    bool raw;                   /* any JSON: the body is kept as it is */
    bool sse;                   /* by content type, told at the first byte */
    unsigned http;              /* status, likewise */
    uint64_t first_ns, last_ns; /* first and last chunk; 0 without one */
    uint64_t end_ns;            /* the last event with choices, or the end of the body */
    float *gaps;                /* [n_gaps] seconds between a chunk and the next */
    uint32_t n_gaps, gaps_cap;
    uint32_t n_chunks;
    uint32_t n_together; /* chunks that came in the same read as the one before */
    bool has_usage;      /* the counts below are the server's */
    uint32_t input_tokens, output_tokens, reasoning_tokens, cached_tokens;
    bool finished, done; /* a finish_reason, [DONE] was seen */
    nbi_load_failure failure;
    char why[192]; /* its sentence */

    nbi_buf line, body; /* a line that is not complete; the event's data, or the whole body */
} nbi_load_answer;

/* Bytes from the wire. A zeroed answer with `sse`, `raw` and `http` set is a new
 * one. False: the answer
 * has failed, do not go on. */
bool nbi_load_answer_feed(nbi_load_answer *a, const char *data, size_t n, uint64_t now_ns);

/* The transfer has ended, by itself (`failure` NONE) or as `failure` and `why` say. Settles what
 * the answer is; without usage the output tokens are the chunks. */
void nbi_load_answer_end(nbi_load_answer *a, nbi_load_failure failure, const char *why,
                         uint64_t now_ns);

/* NB_IO with the sentence of a failed answer, "what failed: kind: why". */
nb_status nbi_load_answer_fail(const nbi_load_answer *a, const char *what, nb_error *err);

void nbi_load_answer_free(nbi_load_answer *a);

#ifdef __cplusplus
}
#endif
