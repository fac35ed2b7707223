/* Inside of comm/shared.h: the areas, and what the two files do for each other. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "comm/shared.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NBI_SHARED_PIECE ((size_t)256 << 10) /* bytes of one message */

/* What a message is part of. */
enum nbi_shared_kind {
    NBI_SHARED_BARRIER = 1,
    NBI_SHARED_SUM,
    NBI_SHARED_SHARES,
    NBI_SHARED_GATHER,
    NBI_SHARED_BROADCAST
};

/* Written by its rank alone, but for sleepers. */
typedef struct nbi_shared_area {
    atomic_uint number __attribute__((aligned(64))); /* of the newest message; a futex word */
    atomic_uint sleepers;                            /* ranks that may sleep on `number` */
    uint64_t tags[2]; /* what each message is part of: kind and bytes */
    atomic_uint pulse __attribute__((aligned(64)));
    atomic_bool there;     /* pid and the like are written */
    atomic_bool left;      /* has parted in order */
    atomic_bool failed;    /* by itself: `why` is written */
    atomic_bool heard;     /* of another's failure: likewise */
    atomic_uint lost_rank; /* whom `why` is about */
    int32_t pid;
    uint64_t pid_space, started; /* to know the process again */
    char why[NB_ERROR_TEXT_MAX];
    char message[2][NBI_SHARED_PIECE] __attribute__((aligned(64)));
} nbi_shared_area;

/* What the watch knows of another rank. */
typedef struct nbi_peer {
    uint32_t pulse;
    uint64_t silent_ns;
} nbi_peer;

typedef struct nbi_shared {
    nbi_comm base;
    nbi_shared_options o;
    nbi_shared_area **areas; /* [size] */
    nbi_peer *peers;         /* [size]; the watch's */
    uint32_t number;         /* of the last operation */
    atomic_bool lost;        /* `why` is written */
    nb_error why;
    int32_t parent;
    atomic_uint_fast64_t limit_ns, usual_ns; /* of what is expected; limit 0: nothing is */
    atomic_uint expected;                    /* how often something was */
    uint32_t expected_seen;                  /* the watch's: with the calls made; and the next */
    uint64_t expected_ns;                    /* spent on it so far */

    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock; /* guards stopping and the losing */
    pthread_cond_t wake;
    bool stopping;
    pthread_mutex_t call_lock; /* guards the rest; taken before no other but inside on_lost */
    bool called;
    void (*on_lost)(void *user, const nb_error *why);
    void *on_lost_user;
} nbi_shared;

/* ---- shared.c; for comm/mpi */

static inline nbi_shared *nbi_shared_of(nbi_comm *comm)
{
    return (nbi_shared *)(void *)comm;
}

/* The number in the whole job of a rank of this host. */
static inline uint32_t nbi_shared_number(const nbi_shared *c, uint32_t local)
{
    return c->o.numbers ? c->o.numbers[local] : local;
}

const char *nbi_shared_kind_name(uint32_t kind);
/* Collective. On local rank 0 messages[size] are what all have brought, valid until its next call;
 * bytes <= NBI_SHARED_PIECE. `whole` is the size of the call that this is a piece of. */
NBI_MUST_CHECK nb_status nbi_shared_collect(nbi_shared *c, enum nbi_shared_kind kind,
                                            const void *in, size_t bytes, size_t whole,
                                            const char *messages[], nb_error *err);
/* Collective. data[bytes] of local rank 0 to all of this host, in pieces. */
NBI_MUST_CHECK nb_status nbi_shared_spread(nbi_shared *c, void *data, size_t bytes, nb_error *err);
/* out[from..to) := the sum of messages[size] in their order. */
void nbi_shared_add_up(float *out, const char *const messages[], uint32_t size, size_t from,
                       size_t to);
NBI_MUST_CHECK nb_status nbi_shared_is_lost(const nbi_shared *c, nb_error *err);

/* ---- shared_watch.c */
void nbi_shared_introduce(nbi_shared_area *own);
nb_status nbi_shared_watch_start(nbi_shared *c, nb_error *err);
void nbi_shared_watch_stop(nbi_shared *c);
/* The local rank that has made the fewest calls. */
uint32_t nbi_shared_behind(const nbi_shared *c);
/* The job has failed by the rank of that number in the whole job (NBI_RANKS_MAX: by none): once.
 * Wakes whoever waits here. */
void nbi_shared_lose(nbi_shared *c, uint32_t rank, const char *why);
/* Calls on_lost when it is due. With call_lock. */
void nbi_shared_call(nbi_shared *c);
void nbi_shared_wake(nbi_shared_area *area);

#ifdef __cplusplus
}
#endif
