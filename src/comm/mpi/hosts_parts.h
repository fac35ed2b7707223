/* Inside of comm/mpi/hosts.h. */
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include "comm/mpi/hosts.h"
#include "comm/shared_parts.h"

#ifdef __cplusplus
extern "C" {
#endif

enum nbi_pulse_state { NBI_PULSE_WELL, NBI_PULSE_LEFT, NBI_PULSE_LOST };

/* What a leader tells another one of its host. */
typedef struct nbi_pulse {
    uint32_t state;
    uint32_t calls;  /* exchanges between hosts that it has begun */
    uint32_t behind; /* the rank of its host that has made the fewest calls */
    int32_t behind_pid;
    uint32_t lost_rank;          /* LOST: as in nbi_shared_area */
    char why[NB_ERROR_TEXT_MAX]; /* LOST */
} nbi_pulse;

typedef struct nbi_host {
    uint32_t leader, n; /* its lowest rank; how many it has */
    char name[NBI_HOST_NAME_MAX];
    char *block; /* what its leader has sent; own host: what is sent */
    nbi_pulse in, out, heard;
    MPI_Request in_request, out_request;
    bool in_open, out_open;
    bool left;
    int broken; /* what MPI says of its messages */
    uint64_t silent_ns;
} nbi_host;

typedef struct nbi_hosts {
    nbi_comm base;
    nbi_hosts_options o;
    nbi_shared *local;
    bool leads;
    uint32_t n_hosts, own; /* own: this host */
    nbi_host *hosts;       /* [n_hosts] by their lowest ranks */
    uint32_t *host_of;     /* [size] */
    uint32_t *numbers;     /* [local_size] */
    size_t room;           /* bytes of one rank in a block */
    char *blocks, *all;    /* all: one piece of a gather, by rank */
    pthread_mutex_t lock;  /* around every call of MPI */
    atomic_uint calls;
    atomic_uint silent_host; /* that was lost; n_hosts: none */
    nbi_pulse news;          /* of a loss, to all */
    uint32_t beats;
    int end_word; /* of hosts_end.c: the pipe to its process; -1 */
    pid_t end_pid;
    atomic_uint_fast64_t limit_ns, usual_ns; /* as in nbi_shared */
    atomic_uint expected;
    uint32_t expected_seen;
    uint64_t expected_ns;
} nbi_hosts;

/* ---- hosts_watch.c */
/* Hooks of the host's shared memory, on a leader. */
void nbi_hosts_beat(void *user, nbi_shared *shared, uint64_t turn_ns);
void nbi_hosts_tell(void *user, uint32_t rank, const char *why);
nb_status nbi_hosts_listen(nbi_hosts *h, nb_error *err);
/* Leaders take leave of one another. False when one is lost meanwhile. */
bool nbi_hosts_part(nbi_hosts *h);

/* ---- hosts_end.c; on a leader */
/* Before there are threads. What cannot be prepared is left out: mpiexec then ends by itself. */
void nbi_hosts_end_prepare(nbi_hosts *h);
/* A host is lost: when this process has ended, what has started it is ended, too. */
void nbi_hosts_end_starter(nbi_hosts *h);
void nbi_hosts_end_close(nbi_hosts *h);

static inline bool nbi_hosts_lost_one(const nbi_hosts *h)
{
    return atomic_load(&h->silent_host) != h->n_hosts;
}

#ifdef __cplusplus
}
#endif
