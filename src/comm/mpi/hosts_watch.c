/* What leaders of hosts tell one another beside the collectives. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "comm/mpi/hosts_parts.h"

#define TAG_PULSE     2
#define BEATS_A_PULSE 2u /* of 50 ms */
/* As in shared_watch.c: a longer turn says that this process did not run. */
#define TURN_NS   200000000u
#define SILENT_NS 1000000000u /* more than pulses are apart */
#define NEWS_NS   50000000u   /* to get the news of a loss out */
#define PART_NS   8000000000u

/* ---------------------------------------------------------------- pulses; with the lock */

static void listen_to(nbi_hosts *h, nbi_host *host)
{
    const nbi_mpi *mpi = h->o.mpi;
    host->broken = mpi->irecv(&host->in, sizeof host->in, mpi->byte, (int)host->leader, TAG_PULSE,
                              mpi->world, &host->in_request);
    host->in_open = host->broken == MPI_SUCCESS;
}

nb_status nbi_hosts_listen(nbi_hosts *h, nb_error *err)
{
    for (uint32_t i = 0; i < h->n_hosts; i++) {
        if (i == h->own) continue;
        listen_to(h, &h->hosts[i]);
        if (h->hosts[i].broken)
            return nbi_fail(err, NB_INTERNAL, "MPI: cannot listen to rank %u: %d",
                            h->hosts[i].leader, h->hosts[i].broken);
    }
    return NB_OK;
}

static bool is_done(nbi_hosts *h, nbi_host *host, MPI_Request *request)
{
    int done = 0, rc = h->o.mpi->testall(1, request, &done, MPI_STATUSES_IGNORE);
    if (rc != MPI_SUCCESS) host->broken = rc;
    return rc == MPI_SUCCESS && done;
}

/* Takes the pulses that have come: is there one? */
static bool hear(nbi_hosts *h, nbi_host *host)
{
    bool heard = false;
    while (host->in_open && !host->broken && is_done(h, host, &host->in_request)) {
        host->in_open = false;
        host->heard = host->in;
        heard = true;
        host->left = host->in.state == NBI_PULSE_LEFT;
        if (host->in.state == NBI_PULSE_WELL) listen_to(h, host);
    }
    return heard;
}

/* Nothing is sent while the one before is under way. */
static bool say(nbi_hosts *h, nbi_host *host, const nbi_pulse *pulse)
{
    const nbi_mpi *mpi = h->o.mpi;
    if (host->out_open && !is_done(h, host, &host->out_request)) return false;
    host->out_open = false;
    if (host->broken) return false;
    host->out = *pulse;
    host->broken = mpi->isend(&host->out, sizeof host->out, mpi->byte, (int)host->leader, TAG_PULSE,
                              mpi->world, &host->out_request);
    host->out_open = host->broken == MPI_SUCCESS;
    return host->out_open;
}

/* ---------------------------------------------------------------- judging */

static void lose_host(nbi_hosts *h, nbi_shared *c, uint32_t i, const char *how)
{
    const nbi_host *host = &h->hosts[i];
    char why[NB_ERROR_TEXT_MAX];
    snprintf(why, sizeof why, "rank %u and its neighbours on host %s: %s", host->leader, host->name,
             how);
    if (host->n == 1)
        snprintf(why, sizeof why, "rank %u on host %s: %s", host->leader, host->name, how);
    atomic_store(&h->silent_host, i);
    nbi_hosts_end_starter(h);
    nbi_shared_lose(c, host->leader, why);
}

static void judge(nbi_hosts *h, nbi_shared *c, uint32_t i, bool heard, uint64_t turn_ns)
{
    nbi_host *host = &h->hosts[i];
    char text[160];
    if (host->heard.state == NBI_PULSE_LOST) {
        host->heard.why[sizeof host->heard.why - 1] = 0;
        nbi_shared_lose(c, host->heard.lost_rank, host->heard.why);
        return;
    }
    if (host->left) {
        if ((int32_t)(host->heard.calls - atomic_load(&h->calls)) >= 0) return;
        snprintf(text, sizeof text, "rank %u has ended while others go on", host->leader);
        nbi_shared_lose(c, host->leader, text);
        return;
    }
    host->silent_ns = heard ? 0 : host->silent_ns + (turn_ns < TURN_NS ? turn_ns : 0);
    if (host->broken) {
        snprintf(text, sizeof text, "cannot be reached: MPI returns %d", host->broken);
        lose_host(h, c, i, text);
    } else if (host->silent_ns > (uint64_t)NBI_LINK_MS * 1000000) {
        snprintf(text, sizeof text, "not heard of for %.1f s: down, or cut off",
                 1e-9 * (double)host->silent_ns);
        lose_host(h, c, i, text);
    }
}

/* As watch_step() of one host, over the calls between hosts. Rank 0 alone expects something. */
static void watch_step(nbi_hosts *h, nbi_shared *c, const nbi_pulse *own, uint64_t turn_ns)
{
    const uint64_t limit = atomic_load(&h->limit_ns);
    uint32_t seen = atomic_load(&h->expected) + own->calls +
                    atomic_load(&c->areas[nbi_shared_behind(c)]->number);
    const nbi_pulse *last = own;
    uint32_t host = h->own;
    char why[NB_ERROR_TEXT_MAX];
    for (uint32_t i = 0; i < h->n_hosts; i++) {
        const nbi_pulse *p = &h->hosts[i].heard;
        if (i == h->own) continue;
        seen += p->calls;
        if ((int32_t)(p->calls - last->calls) >= 0) continue;
        last = p;
        host = i;
    }
    if (!limit || seen != h->expected_seen) h->expected_ns = 0;
    h->expected_seen = seen;
    h->expected_ns += turn_ns < TURN_NS ? turn_ns : 0;
    if (!limit || h->expected_ns < limit) return;
    if (h->hosts[host].silent_ns > SILENT_NS) return; /* judge() finds out why */
    snprintf(why, sizeof why,
             "rank %u (process %d) on host %s does not get on: nothing for %.1f s in a step that "
             "takes %.3f s",
             last->behind, (int)last->behind_pid, h->hosts[host].name,
             1e-9 * (double)h->expected_ns, 1e-9 * (double)atomic_load(&h->usual_ns));
    nbi_shared_lose(c, last->behind, why);
}

void nbi_hosts_beat(void *user, nbi_shared *c, uint64_t turn_ns)
{
    nbi_hosts *h = user;
    bool heard[NBI_RANKS_MAX] = {0};
    const uint32_t behind = nbi_shared_behind(c);
    const nbi_pulse own = {.state = NBI_PULSE_WELL,
                           .calls = atomic_load(&h->calls),
                           .behind = nbi_shared_number(c, behind),
                           .behind_pid = c->areas[behind]->pid};
    const bool speak = h->beats++ % BEATS_A_PULSE == 0;
    pthread_mutex_lock(&h->lock);
    for (uint32_t i = 0; i < h->n_hosts; i++) {
        if (i == h->own) continue;
        heard[i] = hear(h, &h->hosts[i]);
        if (speak && !h->hosts[i].left) (void)say(h, &h->hosts[i], &own);
    }
    pthread_mutex_unlock(&h->lock);
    for (uint32_t i = 0; i < h->n_hosts && !atomic_load(&c->lost); i++)
        if (i != h->own) judge(h, c, i, heard[i], turn_ns);
    if (!atomic_load(&c->lost)) watch_step(h, c, &own, turn_ns);
}

/* ---------------------------------------------------------------- the last words */

/* The process may end as soon as this returns: the news must be on their way. */
void nbi_hosts_tell(void *user, uint32_t rank, const char *why)
{
    nbi_hosts *h = user;
    const nbi_mpi *mpi = h->o.mpi;
    MPI_Request requests[NBI_RANKS_MAX];
    int n = 0, done = 0;
    h->news = (nbi_pulse){.state = NBI_PULSE_LOST, .lost_rank = rank};
    snprintf(h->news.why, sizeof h->news.why, "%s", why);
    pthread_mutex_lock(&h->lock);
    for (uint32_t i = 0; i < h->n_hosts; i++) {
        const nbi_host *host = &h->hosts[i];
        if (i == h->own || host->left || host->broken) continue;
        if (mpi->isend(&h->news, sizeof h->news, mpi->byte, (int)host->leader, TAG_PULSE,
                       mpi->world, &requests[n]) == MPI_SUCCESS)
            n++;
    }
    const uint64_t end = nbi_now_ns() + NEWS_NS;
    while (!done && nbi_now_ns() < end)
        if (mpi->testall(n, requests, &done, MPI_STATUSES_IGNORE) != MPI_SUCCESS) break;
    pthread_mutex_unlock(&h->lock);
}

bool nbi_hosts_part(nbi_hosts *h)
{
    const nbi_pulse last = {.state = NBI_PULSE_LEFT, .calls = atomic_load(&h->calls)};
    const struct timespec nap = {.tv_nsec = 200000};
    const uint64_t end = nbi_now_ns() + PART_NS;
    bool said[NBI_RANKS_MAX] = {0}, all = false;
    said[h->own] = true;
    while (!all && nbi_now_ns() < end) {
        all = true;
        pthread_mutex_lock(&h->lock);
        for (uint32_t i = 0; i < h->n_hosts; i++) {
            nbi_host *host = &h->hosts[i];
            if (i == h->own) continue;
            (void)hear(h, host);
            if (!said[i]) said[i] = say(h, host, &last);
            if (said[i] && host->out_open && is_done(h, host, &host->out_request))
                host->out_open = false;
            if (host->broken || host->heard.state == NBI_PULSE_LOST) {
                pthread_mutex_unlock(&h->lock);
                return false;
            }
            all = all && said[i] && !host->out_open && host->left;
        }
        pthread_mutex_unlock(&h->lock);
        nanosleep(&nap, NULL);
    }
    return all;
}
