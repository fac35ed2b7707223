/* Every collective: each rank says where its values are, all wait, each reads what it wants of the
 * others into memory of its own, all wait again. */
#include "thread_comm.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "comm/transport.h"

enum { RANKS_MAX = 8, CHUNK = 4096 };

typedef struct job {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint32_t size, here, open;
    uint64_t round;
    bool broken;
    const void *at[RANKS_MAX];
} job;

typedef struct member {
    nbi_comm base;
    job *job;
} member;

static nb_status meet(member *m, nb_error *err)
{
    job *j = m->job;
    pthread_mutex_lock(&j->lock);
    const uint64_t round = j->round;
    if (!j->broken && ++j->here == j->size) {
        j->here = 0;
        j->round++;
        pthread_cond_broadcast(&j->moved);
    }
    while (j->round == round && !j->broken) pthread_cond_wait(&j->moved, &j->lock);
    const bool met = j->round != round;
    pthread_mutex_unlock(&j->lock);
    return met ? NB_OK : nbi_fail(err, NB_CLOSED, "a rank is gone");
}

static nb_status sum(nbi_comm *comm, float *x, size_t n, nb_error *err)
{
    member *m = (member *)comm;
    float all[CHUNK];
    for (size_t first = 0; first < n; first += CHUNK) {
        const size_t k = n - first < CHUNK ? n - first : CHUNK;
        m->job->at[comm->rank] = x + first;
        NB_TRY(meet(m, err));
        for (uint32_t r = 0; r < comm->size; r++)
            for (size_t i = 0; i < k; i++)
                all[i] = r ? all[i] + ((const float *)m->job->at[r])[i]
                           : ((const float *)m->job->at[r])[i];
        NB_TRY(meet(m, err));
        memcpy(x + first, all, k * sizeof *x);
    }
    return NB_OK;
}

static nb_status gather(nbi_comm *comm, void *out, const void *in, size_t bytes, nb_error *err)
{
    member *m = (member *)comm;
    m->job->at[comm->rank] = in;
    NB_TRY(meet(m, err));
    for (uint32_t r = 0; r < comm->size; r++) memcpy((char *)out + r * bytes, m->job->at[r], bytes);
    return meet(m, err);
}

static nb_status broadcast(nbi_comm *comm, void *data, size_t bytes, nb_error *err)
{
    member *m = (member *)comm;
    m->job->at[comm->rank] = data;
    NB_TRY(meet(m, err));
    if (comm->rank) memcpy(data, m->job->at[0], bytes);
    return meet(m, err);
}

static nb_status barrier(nbi_comm *comm, nb_error *err)
{
    return meet((member *)comm, err);
}

static void leave(nbi_comm *comm)
{
    job *j = ((member *)comm)->job;
    pthread_mutex_lock(&j->lock);
    j->broken = true;
    pthread_cond_broadcast(&j->moved);
    const bool last = --j->open == 0;
    pthread_mutex_unlock(&j->lock);
    if (last) {
        pthread_cond_destroy(&j->moved);
        pthread_mutex_destroy(&j->lock);
        free(j);
    }
    free(comm);
}

static const nbi_comm_ops ops = {.name = "threads",
                                 .close = leave,
                                 .sum = sum,
                                 .gather = gather,
                                 .broadcast = broadcast,
                                 .barrier = barrier};

void thread_comm_open(nbi_comm **out, uint32_t size)
{
    NB_ASSERT(size && size <= RANKS_MAX);
    job *j = calloc(1, sizeof *j);
    NB_ASSERT(j);
    pthread_mutex_init(&j->lock, NULL);
    pthread_cond_init(&j->moved, NULL);
    j->size = j->open = size;
    for (uint32_t r = 0; r < size; r++) {
        member *m = calloc(1, sizeof *m);
        NB_ASSERT(m);
        *m = (member){.base = {.ops = &ops, .rank = r, .size = size}, .job = j};
        out[r] = &m->base;
    }
}
