/* Measures the read bandwidth beside a server. Called by cmd_serve.c. */
#include "cli/serve_bandwidth.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "perf/bandwidth.h"

#define REGION_BYTES ((uint64_t)512 << 20) /* past every cache */
#define PASS_BYTES   ((uint64_t)32 << 20)
#define PASSES       ((uint32_t)(REGION_BYTES / PASS_BYTES))
#define QUIET_MS     500 /* without a request before it begins */

struct nbi_bandwidth_watch {
    nb_engine *engine;
    const char *dir;
    uint32_t n_threads;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t end;
    bool ending; /* under lock */
};

static bool is_quiet(const nbi_bandwidth_watch *w)
{
    nb_engine_stats stats;
    nb_engine_get_stats(w->engine, &stats);
    return !stats.n_running && !stats.n_waiting;
}

/* True when it is to end. */
static bool pause_ms(nbi_bandwidth_watch *w, uint32_t ms)
{
    struct timespec at = nbi_timespec(nbi_now_ns() + ms * 1000000ull);
    pthread_mutex_lock(&w->lock);
    while (!w->ending && ms &&
           pthread_cond_clockwait(&w->end, &w->lock, CLOCK_MONOTONIC, &at) == 0) {}
    const bool ending = w->ending;
    pthread_mutex_unlock(&w->lock);
    return ending;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* 0: something ran meanwhile. */
static double measure(nbi_bandwidth_watch *w, nbi_bandwidth *b)
{
    double rates[PASSES];
    for (uint32_t i = 0; i < 2 * PASSES; i++) { /* the first half brings the pages in */
        rates[i % PASSES] = nbi_bandwidth_pass(b, PASS_BYTES);
        if (!is_quiet(w) || pause_ms(w, 0)) return 0;
    }
    qsort(rates, PASSES, sizeof *rates, compare);
    return rates[PASSES / 2];
}

static void *run(void *arg)
{
    nbi_bandwidth_watch *w = arg;
    nbi_bandwidth *b = NULL;
    nb_error err = {0};
    double rate = 0;
    if (nbi_bandwidth_open(&b, w->dir, w->n_threads, REGION_BYTES, &err) != NB_OK) {
        nbi_log(NB_LOG_INFO, "memory bandwidth: not measured: %s", err.text);
        return NULL;
    }
    while (!(rate > 0) && !pause_ms(w, QUIET_MS))
        if (is_quiet(w)) rate = measure(w, b);
    nbi_bandwidth_close(&b);
    if (!(rate > 0)) return NULL;
    nb_engine_set_read_bandwidth(w->engine, rate);
    nbi_log(NB_LOG_INFO, "memory bandwidth: %.1f GB/s for plain reads", 1e-9 * rate);
    return NULL;
}

static void release(nbi_bandwidth_watch *w)
{
    pthread_cond_destroy(&w->end);
    pthread_mutex_destroy(&w->lock);
    nbi_free(w);
}

void nbi_bandwidth_watch_start(nbi_bandwidth_watch **out, nb_engine *engine, const char *model_dir,
                               uint32_t n_threads)
{
    nb_engine_stats stats;
    nb_engine_get_stats(engine, &stats);
    if (stats.read_bandwidth > 0) return;
    nbi_bandwidth_watch *w = nbi_calloc(1, sizeof *w);
    if (!w) return;
    *w = (nbi_bandwidth_watch){.engine = engine, .dir = model_dir, .n_threads = n_threads};
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->end, NULL);
    if (pthread_create(&w->thread, NULL, run, w) == 0)
        *out = w;
    else
        release(w);
}

void nbi_bandwidth_watch_stop(nbi_bandwidth_watch **watch)
{
    nbi_bandwidth_watch *w = *watch;
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    w->ending = true;
    pthread_cond_signal(&w->end);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    release(w);
    *watch = NULL;
}
