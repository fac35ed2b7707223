/* The reporter thread. Called by server.c and metrics.c. */
#include "server/reporter.h"

#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "server/exchange.h"

typedef struct sample {
    uint64_t ns;
    nb_engine_stats stats;
} sample;

struct nbi_reporter {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t end;
    bool ending;
    sample ring[NBI_REPORT_WINDOW + 1]; /* the last, `newest`; under lock */
    uint32_t newest, n;
    uint32_t since_line;  /* seconds; the thread's */
    uint64_t line_tokens; /* prompt and generated, when the last line was due; the thread's */
};

/* ---------------------------------------------------------------- rates */

static double per(uint64_t a, uint64_t b)
{
    return b ? (double)a / (double)b : 0.0;
}

/* Called with the lock held. */
static void rates_of(const nbi_reporter *r, nbi_rates *out)
{
    uint32_t size = NBI_REPORT_WINDOW + 1;
    const sample *last = &r->ring[r->newest];
    const sample *first = &r->ring[(r->newest + size - (r->n ? r->n - 1 : 0)) % size];
    const nb_engine_stats *a = &first->stats, *b = &last->stats;
    double seconds = (double)(last->ns - first->ns) / 1e9;
    uint64_t steps = b->draft_steps - a->draft_steps;
    uint64_t accepted = b->draft_accepted - a->draft_accepted;
    *out = (nbi_rates){0};
    if (!(seconds > 0)) return;
    out->generation = (double)(b->generated_tokens - a->generated_tokens) / seconds;
    out->prefill = (double)(b->prompt_tokens - a->prompt_tokens) / seconds;
    out->hit_rate = per(b->prefix_hit_tokens - a->prefix_hit_tokens,
                        b->prefix_query_tokens - a->prefix_query_tokens);
    out->accept_rate = per(accepted, b->draft_tokens - a->draft_tokens);
    out->accept_length = per(accepted + steps, steps);
    out->read_rate = 1e9 * per(b->decode_bytes - a->decode_bytes, b->decode_ns - a->decode_ns);
    if (b->read_bandwidth > 0) out->share_of_floor = out->read_rate / b->read_bandwidth;
}

void nbi_reporter_rates(const nbi_server *server, nbi_rates *out)
{
    nbi_reporter *r = server->reporter;
    pthread_mutex_lock(&r->lock);
    rates_of(r, out);
    pthread_mutex_unlock(&r->lock);
}

/* ---------------------------------------------------------------- once a second */

static void write_line(const nbi_server *server, const nb_engine_stats *s, const nbi_rates *rates)
{
    uint64_t kv = server->served->info.kv_tokens;
    char drafts[64] = "", floor[64] = "";
    if (rates->accept_length > 0) {
        snprintf(drafts, sizeof drafts, ", accept length %.2f", rates->accept_length);
    }
    if (rates->share_of_floor > 0) {
        snprintf(floor, sizeof floor, ", %.1f %% of the floor (%.1f GB/s)",
                 100 * rates->share_of_floor, 1e-9 * rates->read_rate);
    }
    nbi_log(NB_LOG_INFO,
            "load: %u running, %u queued, prefill %.1f tok/s, decode %.1f tok/s%s, KV %.1f %%, "
            "prefix hits %.1f %%%s",
            s->n_running, s->n_waiting, rates->prefill, rates->generation, floor,
            100 * per(s->kv_tokens_used, kv), 100 * rates->hit_rate, drafts);
}

/* Called with the lock held. */
static void push(nbi_reporter *r, const sample *s)
{
    r->newest = r->n ? (r->newest + 1) % (NBI_REPORT_WINDOW + 1) : 0;
    if (r->n <= NBI_REPORT_WINDOW) r->n++;
    r->ring[r->newest] = *s;
}

static void take_sample(nbi_server *server)
{
    nbi_reporter *r = server->reporter;
    nbi_rates rates;
    sample now = {.ns = nbi_now_ns()};
    nb_engine_get_stats(server->served->engine, &now.stats);
    pthread_mutex_lock(&r->lock);
    if (!r->n) push(r, &(sample){.ns = now.ns - 1000000000u}); /* nothing was before the start */
    push(r, &now);
    rates_of(r, &rates);
    pthread_mutex_unlock(&r->lock);
    if (++r->since_line < NBI_REPORT_WINDOW) return;
    uint64_t tokens = now.stats.generated_tokens + now.stats.prompt_tokens;
    bool busy = now.stats.n_running || now.stats.n_waiting || tokens != r->line_tokens;
    r->since_line = 0;
    r->line_tokens = tokens;
    if (busy) write_line(server, &now.stats, &rates);
}

/* Wakes the exchanges whose time is over; they find out themselves. */
static void check_deadlines(nbi_server *server)
{
    uint64_t now = nbi_now_ns();
    pthread_mutex_lock(&server->lock);
    for (nbi_exchange *ex = server->live; ex; ex = ex->next) {
        uint64_t look = atomic_load(&ex->look_ns);
        if (look && look <= now) nbi_exchange_wake(ex);
    }
    pthread_mutex_unlock(&server->lock);
}

static void *run(void *arg)
{
    nbi_server *server = arg;
    nbi_reporter *r = server->reporter;
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    pthread_mutex_lock(&r->lock);
    for (;;) {
        at.tv_sec++;
        int timed_out = 0;
        while (!r->ending && !timed_out) {
            timed_out = pthread_cond_timedwait(&r->end, &r->lock, &at);
        }
        if (r->ending) break;
        pthread_mutex_unlock(&r->lock);
        if (atomic_load(&server->served_there)) {
            take_sample(server);
            if (server->served->grammars) nbi_grammar_look_at_clock(server->served->grammars);
            nbi_profiling_look(server);
        }
        check_deadlines(server);
        pthread_mutex_lock(&r->lock);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

nb_status nbi_reporter_start(nbi_server *server, nb_error *err)
{
    pthread_condattr_t attr;
    nbi_reporter *r = nbi_calloc(1, sizeof *r);
    if (!r) return nbi_fail(err, NB_NO_MEMORY, "no memory for the server");
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->end, &attr);
    pthread_condattr_destroy(&attr);
    server->reporter = r;
    int failed = pthread_create(&r->thread, NULL, run, server);
    if (!failed) return NB_OK;
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->end);
    nbi_free(r);
    server->reporter = NULL;
    return nbi_fail(err, NB_IO, "cannot start a thread: %s", strerror(failed));
}

void nbi_reporter_stop(nbi_server *server)
{
    nbi_reporter *r = server->reporter;
    if (!r) return;
    pthread_mutex_lock(&r->lock);
    r->ending = true;
    pthread_cond_signal(&r->end);
    pthread_mutex_unlock(&r->lock);
    pthread_join(r->thread, NULL);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->end);
    nbi_free(r);
    server->reporter = NULL;
}
